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
from shardwise.model.scope import LayoutScope

LAYOUT_MAP = sw.LayoutMap(sw.DeviceMesh((2,), ("x",)))


def test_hooks_are_entered_in_order_and_left_in_reverse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_HOOKS", {})
    monkeypatch.setattr(hooks, "_MODULES", {})  # Else a framework that is loaded would register itself there.
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


def test_the_part_of_a_framework_is_loaded_once_the_framework_is() -> None:
    program = """
        import sys, types
        import shardwise as sw
        from shardwise.model import hooks
        hooks.load_with("wsgiref", "mailcap_of_nobody")
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
