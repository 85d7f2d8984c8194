"""States of an optimizer, each with what its dims stand for: they are cut and rewritten as their weights are (2.17)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .._text import shown
from ..rules.state_splits import StateName
from ..rules.states import TrainingNames
from .component import Along, Component, LogicalTensor

__all__ = ["State", "averaged_dims", "kind_over", "states_in"]

#: Kinds that are averages over a dim of the weight, in pairs: the first over the last dim, the second over that before.
#: Those of transformers lack the dim; those of PyTorch have one element there.
_PAIRS = (("row_var", "col_var"), ("exp_avg_sq_row", "exp_avg_sq_col"), ("v_row", "v_col"))
_PARTNERS = {one: other for pair in _PAIRS for one, other in (pair, pair[::-1])}
_KEEPING = _PAIRS[0]
#: optax takes the two largest dims, whichever they are.
_LARGEST = _PAIRS[2]


class State(NamedTuple):
    """A state of an optimizer, and its weight.

    Attributes:
        parsed: Its name, taken apart.
        weight: The name by which rules find its weight, which may be elsewhere.
        shape: The shape of the weight.
        along: What each of its dims stands for; `None` if nothing says it.
        own: Its own shape.
        dtype: The name of the tensor's dtype.
    """

    name: str
    parsed: StateName
    weight: str
    shape: tuple[int, ...]
    along: tuple[Along, ...] | None
    own: tuple[int, ...]
    dtype: str

    @property
    def is_number(self) -> bool:
        """True if it is one number for the whole weight, as a step is."""
        return self.along is not None and all(each.of is None for each in self.along) and self.over is None

    @property
    def over(self) -> int | None:
        """The dim of the weight over which it is an average; `None` if it is none."""
        found = averaged_dims(self.parsed.kind, self.shape)
        return None if found is None or self.own != _average_shape(self.parsed.kind, self.shape, found) else found

    @property
    def unknown(self) -> str:
        """The reason why it can be neither cut nor rewritten; empty if it can."""
        if self.along is not None:
            return ""
        return (
            f"{shown(self.name)} has the shape {self.own}, and nothing says which elements of the weight "
            f"{self.shape} these are for; a rule for its own name places it, and drop leaves it out"
        )

    def logical(self) -> LogicalTensor:
        """Return the weight, with the state as its only component."""
        along = (Along(None),) * len(self.own) if self.along is None else self.along
        uncut = tuple((dim, self.unknown) for dim in range(len(self.shape))) if self.unknown else ()
        return LogicalTensor(
            self.weight, self.shape, self.parsed.kind, (Component(self.name, self.dtype, self.own, along),), uncut
        )


def averaged_dims(kind: str, shape: tuple[int, ...]) -> int | None:
    """Return the dim of a weight of this shape over which a state of this kind is an average; `None` if it is none.

    >>> averaged_dims("row_var", (4, 6)), averaged_dims("v_row", (6, 4)), averaged_dims("exp_avg", (4, 6))
    (1, 0, None)
    """
    if kind not in _PARTNERS or len(shape) < 2:
        return None
    is_second = any(kind == pair[1] for pair in _PAIRS)
    if kind in _LARGEST:
        return sorted(range(len(shape)), key=shape.__getitem__)[-2 if is_second else -1]
    return len(shape) - (2 if is_second else 1)


def kind_over(kind: str, shape: tuple[int, ...], dim: int) -> str | None:
    """Return what a kind, or the other of its pair, is called for a weight of this shape, as an average over a dim.

    >>> kind_over("row_var", (6, 4), 0)
    'col_var'
    """
    return next((one for one in (kind, _PARTNERS[kind]) if averaged_dims(one, shape) == dim), None)


def _average_shape(kind: str, shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *((1,) if kind in _KEEPING else ()), *shape[dim + 1 :])


def _along(kind: str, shape: tuple[int, ...], own: tuple[int, ...]) -> tuple[Along, ...] | None:
    """Return what the dims of a state of this kind and shape stand for, of a weight of this shape."""
    over = averaged_dims(kind, shape)
    if over is not None and own == _average_shape(kind, shape, over):
        whole = tuple(Along(None) if dim == over else Along(dim) for dim in range(len(shape)))
        return whole if kind in _KEEPING else (*whole[:over], *whole[over + 1 :])
    if own == shape:
        return tuple(map(Along, range(len(shape))))
    # A number for the whole weight, or what optax has in place of a state that a parameter does not have.
    return (Along(None),) * len(own) if own in ((), (1,)) else None


def states_in(tensors: Mapping[str, tuple[tuple[int, ...], str]], training: TrainingNames) -> list[State]:
    """Find the states of an optimizer among tensors, given as shapes and the names of dtypes.

    Args:
        tensors: The tensors, with quantized weights by the names by which rules find them.
        training: What their names say; see `training_names`.

    >>> from shardwise.rules.states import training_names
    >>> tensors = {"w": ((4, 2), "float32"), "optim.state.w.col_var": ((1, 2), "float32")}
    >>> (state,) = states_in(tensors, training_names(tensors))
    >>> state.weight, state.over, [dim.of for dim in state.along]
    ('w', 0, [None, 1])
    """
    by_weight: dict[str, list[tuple[str, StateName]]] = {}
    for name, state in training.states.items():
        if name in tensors:
            by_weight.setdefault(state.weight or state.parameter, []).append((name, state))
    found = []
    for weight, states in by_weight.items():
        if weight in tensors:
            shape, _ = tensors[weight]
        else:
            shape = _shape_of({state.kind: tensors[name][0] for name, state in states})
        for name, state in states:
            own, dtype = tensors[name]
            found.append(State(name, state, weight, shape, _along(state.kind, shape, own), own, dtype))
    return found


def _shape_of(states: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of a weight that is elsewhere, by those of its states."""
    plain = [shape for kind, shape in states.items() if kind not in _PARTNERS]
    largest = max(plain, key=len, default=())
    if largest not in ((), (1,)):
        return largest
    for first, second in _PAIRS[:2]:
        if first in states and second in states:
            rows, columns = states[first], states[second]
            if first in _KEEPING and len(rows) == len(columns) > 1:
                return (*rows[:-1], columns[-1])
            if first not in _KEEPING and len(rows) == len(columns) > 0:
                return (*rows, columns[-1])
    return largest or next((shape for shape in states.values() if shape), ())
