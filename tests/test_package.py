"""The package itself: what `shardwise.` offers, and what its import brings along."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import subprocess
import sys
from types import ModuleType

import pytest

import shardwise as sw


def test_the_version_is_that_of_the_installed_package() -> None:
    try:
        installed = importlib.metadata.version("shardwise")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is on the path and not installed")
    assert sw.__version__ == installed


def test_only_public_names_are_listed() -> None:
    names = dir(sw)
    assert [name for name in names if name.startswith("_")] == ["__version__"]
    modules = {name for name in names if isinstance(getattr(sw, name), ModuleType)}
    assert modules == {
        "array",
        "computation",
        "deploy",
        "dtensor",
        "execute",
        "fit",
        "interop",
        "packed",
        "propagate",
        "quantized",
        "reshard",
        "rules",
        "state",
        "store",
    }
    assert set(names) == set(sw.__all__) | modules


def test_the_top_has_the_names_that_a_user_types() -> None:
    """The others are in their modules: a list that nobody can read through says nothing."""
    assert len(sw.__all__) <= 45
    for module in (sw.array, sw.reshard, sw.rules, sw.store):
        assert set(dir(module)) >= set(module.__all__)
        assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize(
    "name",
    [
        "deploy.vllm",
        "dtensor.Layout",
        "interop.hlo.to_hlo",
        "interop.translate",
        "rules.LayoutReport",
        "store.WriteReport",
    ],
)
def test_there_without_an_import_of_its_own(name: str) -> None:
    """In a process of its own, where nothing else has imported it."""
    code = f"import shardwise as sw; print(sw.{name}.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [name.rpartition(".")[2]]


def test_no_such_name() -> None:
    with pytest.raises(AttributeError, match="'shardwise' has no attribute 'nothing'"):
        sw.nothing  # noqa: B018
    with pytest.raises(AttributeError, match=r"'shardwise\.interop' has no attribute 'nothing'"):
        sw.interop.nothing  # noqa: B018


@pytest.mark.parametrize("name", ["Layout", "Mesh", "PartitionSpec", "load", "open", "plan", "save", "verify"])
def test_names_of_other_libraries_lead_to_ours(name: str) -> None:
    """What the message names is there."""
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'; here it is") as error:
        getattr(sw, name)
    found = re.findall(r"shardwise\.([\w.]+)", str(error.value).partition("here it is")[2])
    assert found
    for path in found:
        functools.reduce(getattr, path.split("."), sw)
