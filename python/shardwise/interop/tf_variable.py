"""Plain `tf.Variable`s made under a `layout_map_scope`.

TensorFlow makes the value at once, so these variables do not wait for their layout as others do. But once
`initialize_variables(module)` has found their object path, they have the `layout` that the layout map has for it, and
the path as `object_path`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from ..model.hooks import ForeignVariable, register, register_variable
from ..model.scope import LayoutScope, PlacedVariable

__all__ = ["variables_known"]

_SCOPE = "_shardwise_scope"


@contextmanager
def variables_known(scope: LayoutScope) -> Iterator[None]:
    """Have each `tf.Variable` that is made in the context remember the scope."""

    def creator(next_creator: Any, **arguments: Any) -> Any:
        variable = next_creator(**arguments)
        setattr(variable, _SCOPE, scope)
        return variable

    with tf.variable_creator_scope(creator):
        yield


def _scope_of(variable: Any) -> LayoutScope | None:
    scope: LayoutScope | None = getattr(variable, _SCOPE, None)
    return scope


def _settle(variable: Any, placement: PlacedVariable) -> None:
    variable.layout, variable.object_path = placement.shown_layout, placement.path
    setattr(variable, _SCOPE, None)


register("tensorflow", variables_known)
register_variable(tf.Variable, ForeignVariable(_scope_of, _settle, bookkeeping="_self_"))
