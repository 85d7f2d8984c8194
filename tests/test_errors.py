"""The exceptions, and that a panic becomes one of them."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

import shardwise as sw
from shardwise import _core
from tests.checks import refused


@pytest.mark.parametrize(
    ("exception", "builtin"),
    [
        (sw.MeshError, ValueError),
        (sw.LayoutError, ValueError),
        (sw.ParseError, ValueError),
        (sw.SizeOverflowError, OverflowError),
        (sw.InternalError, RuntimeError),
    ],
)
def test_each_is_also_the_built_in_that_a_caller_expects(exception: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(exception, sw.ShardwiseError)
    assert issubclass(exception, builtin)
    assert str(pickle.loads(pickle.dumps(exception("message")))) == "message"


def test_a_panic_becomes_an_internal_error() -> None:
    with refused(sw.InternalError, "fault of shardwise", "asked to"):
        _core._panic()
    assert sw.DeviceMesh((2,), ("x",)).size == 2


def test_errors_of_the_core_come_out_as_the_package_s_exceptions() -> None:
    with refused(sw.MeshError):
        _core.Mesh((0,), ("x",))
    mesh = _core.Mesh((2,), ("x",))
    with refused(sw.LayoutError):
        _core.Layout(mesh, ("y",), ())
    with refused(TypeError):
        _core.Layout(mesh, (5,), ())  # type: ignore[arg-type]
    layout = _core.Layout(mesh, ("x",), ())
    with refused(sw.SizeOverflowError):
        _core.Partition(layout, (2**63,), "even")
    with refused(IndexError):
        _core.Partition(layout, (8,), "even").box(2)


def test_importing_imports_numpy_and_the_standard_library_only() -> None:
    program = """
import sys
import numpy
before = set(sys.modules)
import shardwise
added = {name.partition('.')[0] for name in set(sys.modules) - before}
print(sorted(added - set(sys.stdlib_module_names) - {'numpy', 'shardwise'}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=3600, check=True)
    assert done.stdout.strip() == "[]"


def test_everything_that_is_exported_exists() -> None:
    assert sorted(sw.__all__) == list(dict.fromkeys(sorted(sw.__all__)))
    for name in sw.__all__:
        assert getattr(sw, name) is not None
        assert name in dir(sw)
    with refused(AttributeError):
        sw.nothing  # noqa: B018


def test_modules_are_imported_when_a_name_of_theirs_is_used() -> None:
    program = """
import sys
import shardwise as sw
modules = ("array.verbs", "model.scope", "model.variable", "reshard.plan", "rules.layout_map", "show.draw", "store")
print([name for name in modules if f"shardwise.{name}" in sys.modules])
sw.draw
print([name for name in modules if f"shardwise.{name}" in sys.modules])
print(sw.draw is sys.modules["shardwise.show.draw"].draw)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=3600, check=True)
    assert done.stdout.splitlines() == ["[]", "['show.draw']", "True"]
