"""A framework takes part in scopes without the scope knowing it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import shardwise as sw
from shardwise.model import hooks
from shardwise.model.scope import LayoutScope, PlacedVariable

LAYOUT_MAP = sw.LayoutMap(sw.DeviceMesh((2,), ("x",)))


def test_hooks_are_entered_in_order_and_left_in_reverse() -> None:
    """They stay registered, and do nothing in other scopes than these."""
    said: list[object] = []

    def hook(name: str) -> hooks.Hook:
        @contextmanager
        def entered(scope: LayoutScope) -> Iterator[None]:
            said.append((name, scope))
            try:
                yield
            except KeyError as error:
                said.append((name, repr(error)))
                raise
            said.append(f"{name} is left")

        return entered

    hooks.register("first", hook("first"))
    hooks.register("second", hook("second"))
    with sw.layout_map_scope(LAYOUT_MAP) as scope:
        assert said == [("first", scope), ("second", scope)]
    assert said[2:] == ["second is left", "first is left"]
    said.clear()
    with pytest.raises(KeyError), sw.layout_map_scope(LAYOUT_MAP):
        raise KeyError(7)
    assert said[2:] == [("second", "KeyError(7)"), ("first", "KeyError(7)")]


def test_variables_of_a_framework_are_named_by_attributes_that_are_not_its_own_records() -> None:
    class Weight:
        shape = (8,)
        scope: LayoutScope | None = None
        placed: PlacedVariable | None = None

    class Layer:
        def __init__(self) -> None:
            self.kernel, self.later = Weight(), Weight()

    layer = Layer()
    # As frameworks do, which list what an object holds in the object itself, before all else.
    vars(layer).update({"_tracked": [layer.kernel], **vars(layer)})
    vars(layer).update({name: vars(layer).pop(name) for name in ("kernel", "later")})
    assert list(vars(layer)) == ["_tracked", "kernel", "later"]
    hook = hooks.ForeignVariable(lambda one: one.scope, lambda one, placed: setattr(one, "placed", placed), "_tracked")
    hooks.register_variable(Weight, hook)
    layout_map = sw.LayoutMap(sw.DeviceMesh((2,), ("x",)))
    layout_map["kernel"] = ("x",)
    with sw.layout_map_scope(layout_map) as scope:
        layer.kernel.scope = scope
    assert sw.initialize_variables(layer) is layer
    assert layer.kernel.placed is not None
    assert (layer.kernel.placed.path, layer.kernel.placed.layout.axes) == ("kernel", ("x",))
    assert layer.later.placed is None


def test_the_part_of_a_framework_is_loaded_once_the_framework_is() -> None:
    program = """
        import sys, types
        import shardwise as sw
        from shardwise._lazy import load_with
        load_with("wsgiref", "mailcap_of_nobody")
        layout_map = sw.LayoutMap(sw.DeviceMesh((2,), ("x",)))
        with sw.layout_map_scope(layout_map):
            print("shardwise.interop.keras" in sys.modules)
        import wsgiref
        try:
            with sw.layout_map_scope(layout_map):
                pass
        except ModuleNotFoundError as error:
            print(error.name)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "mailcap_of_nobody"]
