"""Plain `tf.Variable`s made under a `layout_map_scope`.

TensorFlow makes the value at once, so these variables do not wait for their layout as others do. But once
`initialize_variables(module)` has found their object path, they have the `layout` that the layout map has for it, and
the path as `object_path`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from ..model.hooks import ForeignVariable, register, register_variable
from ..model.scope import LayoutScope, PlacedVariable, current_scope

__all__ = ["variables_known"]

_SCOPE = "_shardwise_scope"


class _Entered(threading.local):
    """The active scopes of this thread in each graph: their number, and TensorFlow's one that serves them all."""

    def __init__(self) -> None:
        self.graphs: dict[Any, tuple[int, Any]] = {}


_ENTERED = _Entered()


@contextmanager
def variables_known(scope: LayoutScope) -> Iterator[None]:
    """Have each `tf.Variable` that is made in the context remember the scope that is current where it is made.

    TensorFlow wants its own scopes to be left in the reverse order, by the tasks of a thread together. The scopes of
    tasks take turns, so TensorFlow's is entered with the first of them and left with the last.
    """
    graph = tf.compat.v1.get_default_graph()
    count, entered = _ENTERED.graphs.get(graph, (0, None))
    if entered is None:
        entered = tf.variable_creator_scope(_creator)
        entered.__enter__()
    _ENTERED.graphs[graph] = (count + 1, entered)
    try:
        yield
    finally:
        count, entered = _ENTERED.graphs.pop(graph)
        if count > 1:
            _ENTERED.graphs[graph] = (count - 1, entered)
        else:
            entered.__exit__(None, None, None)


def _creator(next_creator: Any, **arguments: Any) -> Any:
    variable = next_creator(**arguments)
    scope = current_scope()
    if scope is not None:
        setattr(variable, _SCOPE, scope)
    return variable


def _scope_of(variable: Any) -> LayoutScope | None:
    scope: LayoutScope | None = getattr(variable, _SCOPE, None)
    return scope


def _settle(variable: Any, placement: PlacedVariable) -> None:
    variable.layout, variable.object_path = placement.shown_layout, placement.path
    setattr(variable, _SCOPE, None)


register("tensorflow", variables_known)
register_variable(tf.Variable, ForeignVariable(_scope_of, _settle, bookkeeping="_self_"))
