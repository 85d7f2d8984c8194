"""Hooks of frameworks for `layout_map_scope`; each registers itself.

The scope knows no framework. A framework's part is loaded once the framework itself is: without
Keras imported there are no Keras models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

from .._lazy import import_with_frameworks

__all__ = ["ForeignVariable", "entered", "foreign_variables", "register", "register_variable"]

#: Gives the context in which the framework's models take their layouts from a `LayoutScope`.
Hook = Callable[[Any], AbstractContextManager[None]]

_HOOKS: dict[str, Hook] = {}


def register(framework: str, hook: Hook) -> None:
    """Have `hook(scope)` entered with every scope from now on."""
    _HOOKS[framework] = hook


class ForeignVariable(NamedTuple):
    """The treatment by `initialize_variables` of the variables of a framework that it finds in an object tree."""

    #: The scope in which the variable was made and still waits for its place, or `None`.
    scope_of: Callable[[Any], Any]
    #: Takes the variable and its `PlacedVariable`.
    settle: Callable[[Any, Any], None]
    #: The prefix of attributes in which the framework keeps its own records of what an object holds.
    bookkeeping: str


_VARIABLES: dict[type, ForeignVariable] = {}


def register_variable(kind: type, hook: ForeignVariable) -> None:
    """Have variables of this type found in object trees."""
    _VARIABLES[kind] = hook


def foreign_variables() -> dict[type, ForeignVariable]:
    """Return the types of variables that frameworks have registered."""
    return dict(_VARIABLES)


@contextmanager
def entered(scope: Any) -> Iterator[None]:
    """Enter the hooks of all frameworks that are loaded, for as long as the context lasts."""
    import_with_frameworks()
    with ExitStack() as stack:
        for hook in tuple(_HOOKS.values()):
            stack.enter_context(hook(scope))
        yield
