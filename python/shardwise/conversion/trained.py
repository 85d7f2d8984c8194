"""Weights with the states of an optimizer in rewrites: what becomes of a weight becomes of each of its states (2.17).

A `Trained` has the verbs of `Assembled` and `Weight`, in terms of the weight. A state of the weight's shape goes the
same way. An average over a dim, as Adafactor has, lacks that dim, and is refused where the rewrite changes what it is
an average of. A number for the whole weight, such as a step, is the number of each part, and of a fused weight if all
parts have the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from .._text import counted, shown
from ..errors import LayoutError
from ..pieces import Runs
from ..quantized.states import State, kind_over
from . import arrange, combined, weights
from .assembled import Assembled
from .moments import Moment
from .weights import Reader, Weight

__all__ = ["Tensor", "Trained", "arranged", "components_of", "packed", "repeated", "stacked"]


class _StateNames(NamedTuple):
    """The names of the states of one kind."""

    before: str
    after: str
    kind: str


@dataclass(frozen=True, eq=False)
class Trained:
    """A weight and the states of an optimizer that belong to it.

    Attributes:
        shape: The shape of the weight.
        weight: The weight; `None` if it is not there.
        states: The states by their names' fixed parts.
        prefix: The beginning of the weight's name that the names of states leave out.
    """

    shape: tuple[int, ...]
    weight: Assembled | Weight | None
    states: Mapping[_StateNames, Moment]
    prefix: str = ""

    @classmethod
    def of_stored(
        cls, weight: Assembled | Weight | None, states: Sequence[State], made: Mapping[str, Assembled], read: Reader
    ) -> Trained:
        """Return a weight with these stored states."""
        first = states[0]
        prefix = first.weight.removesuffix(first.parsed.parameter)
        return cls(
            first.shape,
            weight,
            {
                _StateNames(one.parsed.before, one.parsed.after, one.parsed.kind): Moment.of_stored(
                    one, made[one.name], read
                )
                for one in states
            },
            prefix if first.weight.endswith(first.parsed.parameter) else "",
        )

    @property
    def origin(self) -> str:
        """The name of one stored tensor in it, for messages."""
        return next(iter(self.states.values())).origin if self.weight is None else self.weight.origin

    def named(self, name: str) -> dict[str, Assembled]:
        """Return the states by name, for a weight of this name.

        Raises:
            LayoutError: if the optimizer has no average over this dim for a weight of this shape.
        """
        parameter = name.removeprefix(self.prefix)
        found = {}
        for key, state in self.states.items():
            before, after, _ = key if state.over is None else self._called(key, state, state.over)
            found[f"{before}{parameter}{after}"] = state.stored()
        return found

    def _called(self, key: _StateNames, state: Moment, over: int) -> _StateNames:
        kind = kind_over(key.kind, self.shape, over)
        if kind is None:
            raise LayoutError(
                f"{shown(state.origin)} would be an average over dim {over} of a weight {self.shape}, but {key.kind} "
                "is not such an average; drop leaves it out"
            )
        if kind == key.kind:
            return key
        before, after, old = key
        if after.endswith(old):
            return _StateNames(before, after.removesuffix(old) + kind, kind)
        head, found, tail = before.rpartition(old)
        return _StateNames(f"{head}{kind if found else ''}{tail}", after, kind)

    def without(self, name: str, matched: Callable[[str], object]) -> Trained | Assembled | Weight | None:
        """Return the weight of this name without components and states whose names a template matches."""
        weight = self.weight.without(name, matched) if isinstance(self.weight, Weight) else self.weight
        parameter = name.removeprefix(self.prefix)
        left = {key: one for key, one in self.states.items() if matched(f"{key.before}{parameter}{key.after}") is None}
        return replace(self, weight=weight, states=left) if left else weight

    def taken(self, dim: int, runs: Runs, size: int) -> Trained:
        """Return a weight whose dim has this size, made of these runs of the old dim."""
        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        # All elements in another order have the same average.
        is_same = size == self.shape[dim] == int(runs[:, 2].sum())
        weight = None if self.weight is None else self.weight.taken(dim, runs, size)

        def change(state: Moment) -> Moment:
            if is_same and state.over == dim:
                return state
            return state.changed(
                f"a part of {shown(self.origin)} is taken", dim, lambda one: one.taken(dim, runs, size)
            )

        return self._with(shape, weight, change)

    def unpacked(self, dim: int, segments: Mapping[str, Runs]) -> dict[str, Trained]:
        """Return the parts of a fused weight, each with its part of the states."""
        if self.weight is None:
            weight: Mapping[str, Assembled | Weight | None] = dict.fromkeys(segments)
        else:
            weight = self.weight.unpacked(dim, segments)
        found = {}
        for name, runs in segments.items():
            turned, size = np.ascontiguousarray(runs[:, [1, 0, 2]]), int(runs[:, 2].sum())
            found[name] = replace(replace(self, weight=None).taken(dim, turned, size), weight=weight[name])
        return found

    def unstacked(self, place: int) -> Trained:
        """Return the weight at a position of the first dim."""
        what = f"{shown(self.origin)} is taken apart"
        return self._with(
            self.shape[1:],
            None if self.weight is None else self.weight.unstacked(place),
            lambda state: state.changed(what, 0, lambda one: one.unstacked(place)).moved((state.over or 0) - 1),
        )

    def transposed(self) -> Trained:
        """Return the weight with its last two dims swapped."""
        rank = len(self.shape)
        if rank < 2:
            raise LayoutError(f"tensor {shown(self.origin)} has {counted(rank, 'dim')}, so it cannot be transposed")
        order = [*range(rank - 2), rank - 1, rank - 2]
        return self._with(
            tuple(self.shape[dim] for dim in order),
            None if self.weight is None else self.weight.transposed(),
            lambda state: state.changed(
                f"{shown(self.origin)} is transposed", None, lambda one: one.transposed()
            ).moved(None if state.over is None else order[state.over]),
        )

    def padded(self, dim: int, size: int) -> Trained:
        """Return the weight with zeros after a dim's elements; its states are padded too."""
        if size == self.shape[dim]:
            return self
        return self._with(
            (*self.shape[:dim], size, *self.shape[dim + 1 :]),
            None if self.weight is None else self.weight.padded(dim, size),
            lambda state: state.changed(f"{shown(self.origin)} is padded", dim, lambda one: one.padded(dim, size)),
        )

    def arranged(self, split: Sequence[Sequence[int]], merged: Sequence[Sequence[int]]) -> Trained:
        """Return the weight with its dims split, permuted and merged: see `arrange.arranged`."""
        if all(len(group) == 1 for group in split) and list(map(list, merged)) == [[dim] for dim in range(len(split))]:
            return self
        sizes = [size for group in split for size in group]
        owners = [dim for dim, group in enumerate(split) for _ in group]
        shape = tuple(int(np.prod([sizes[atom] for atom in group], dtype=object)) for group in merged)
        what = f"{shown(self.origin)} is put in another arrangement"

        def change(state: Moment) -> Moment:
            if state.over is None:
                return state.changed(what, None, lambda one: arrange.arranged(one, split, merged))
            over = state.over
            of = [at for at, group in enumerate(merged) if any(owners[atom] == over for atom in group)]
            large = [at for at in of if any(owners[atom] == over and sizes[atom] != 1 for atom in merged[at])]
            places = large or of[:1]
            mixed = any(owners[atom] != over and sizes[atom] != 1 for at in places for atom in merged[at])
            if len(places) != 1 or mixed:
                raise LayoutError(
                    f"{what}, in which {shown(state.origin)} is no longer an average over one dim; drop leaves it out"
                )
            own = [[1] * len(group) if dim == over else group for dim, group in enumerate(split)]
            return state.changed(what, None, lambda one: arrange.arranged(one, own, merged)).moved(places[0])

        weight = None if self.weight is None else weights.arranged(self.weight, split, merged)
        return self._with(shape, weight, change)

    def _with(
        self, shape: tuple[int, ...], weight: Assembled | Weight | None, change: Callable[[Moment], Moment]
    ) -> Trained:
        return replace(
            self, shape=shape, weight=weight, states={key: change(state) for key, state in self.states.items()}
        )


#: The tensors that rewrites take and make.
Tensor = Assembled | Weight | Trained


def components_of(name: str, tensor: Tensor) -> dict[str, Assembled]:
    """Return the stored tensors that a tensor consists of, by name: itself, or its components, and its states."""
    if isinstance(tensor, Assembled):
        return {name: tensor}
    if isinstance(tensor, Weight):
        return tensor.named(name)[1]
    return {**({} if tensor.weight is None else components_of(name, tensor.weight)), **tensor.named(name)}


def repeated(tensor: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Return a tensor with others as replicas, which should have equal elements; states of one kind are replicas too.

    Raises:
        LayoutError: if one is of another shape, dtype or form.
    """
    every = [tensor, *others]
    if not any(isinstance(one, Trained) for one in every):
        return combined.repeated(tensor, others)  # type: ignore[arg-type]
    held = [_weight_of(one) for one in every]
    there = [one for one in held if one is not None]
    made: dict[_StateNames, list[Moment]] = {}
    first = next(one for one in every if isinstance(one, Trained))
    for one in every:
        for key, state in one.states.items() if isinstance(one, Trained) else ():
            made.setdefault(key, []).append(state)
    states = {
        key: replace(same[0], tensor=same[0].tensor.repeated([other.tensor for other in same[1:]]), whole=None)
        if len(same) > 1
        else same[0]
        for key, same in made.items()
    }
    return replace(first, weight=combined.repeated(there[0], there[1:]) if there else None, states=states)


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors of one shape and dtype, stacked in a new first dim, with their states stacked too.

    Raises:
        LayoutError: if their shapes, dtypes or forms differ, or one has a state that another lacks.
    """
    if not any(isinstance(one, Trained) for one in tensors):
        return combined.stacked(tensors)  # type: ignore[arg-type]
    trained, held, states = _together(tensors, "stacked")
    made = {
        key: _one(same, "stacked", None, lambda each: Assembled.stacked(each)).moved((same[0].over or 0) + 1)
        for key, same in states.items()
    }
    weight = combined.stacked(held) if held else None
    return replace(trained, shape=(len(tensors), *trained.shape), weight=weight, states=made)


def packed(dim: int, parts: Sequence[tuple[Tensor, Runs]]) -> Tensor:
    """Return tensors packed in a dim, with their states; each part comes with the new places of its runs.

    Raises:
        LayoutError: if the parts differ in another dim, in dtype or in form, or one has a state that another lacks.
        SizeOverflowError: if the dim is over 2**63 - 1.
    """
    if not any(isinstance(one, Trained) for one, _ in parts):
        return combined.packed(dim, parts)  # type: ignore[arg-type]
    runs = [each for _, each in parts]
    trained, held, states = _together([one for one, _ in parts], "fused")
    shape = (*trained.shape[:dim], sum(one.shape[dim] for one, _ in parts), *trained.shape[dim + 1 :])

    def joined(each: Sequence[Assembled]) -> Assembled:
        return Assembled.packed(dim, list(zip(each, runs, strict=True)))

    made = {
        key: same[0] if len(same) == 1 and same[0].over == dim else _one(same, "fused", dim, joined)
        for key, same in states.items()
    }
    weight = combined.packed(dim, list(zip(held, runs, strict=True))) if held else None
    return replace(trained, shape=shape, weight=weight, states=made)


def arranged(tensor: Tensor, split: Sequence[Sequence[int]], merged: Sequence[Sequence[int]]) -> Tensor:
    """Return a tensor with its dims split, permuted and merged: see `arrange.arranged`."""
    return tensor.arranged(split, merged) if isinstance(tensor, Trained) else weights.arranged(tensor, split, merged)


def _weight_of(tensor: Tensor) -> Assembled | Weight | None:
    return tensor.weight if isinstance(tensor, Trained) else tensor


def _together(
    tensors: Sequence[Tensor], what: str
) -> tuple[Trained, list[Assembled | Weight], dict[_StateNames, list[Moment]]]:
    """Return the first of tensors that are combined, their weights, and for each kind of state one state per tensor."""
    first = next(one for one in tensors if isinstance(one, Trained))
    held = [each for each in map(_weight_of, tensors) if each is not None]
    if held and len(held) < len(tensors):
        lone = next(one for one in tensors if _weight_of(one) is None)
        raise LayoutError(
            f"{shown(lone.origin)} is {what} with {shown(held[0].origin)}, but only the second has a weight"
        )
    states: dict[_StateNames, list[Moment]] = {}
    for key in dict.fromkeys(key for one in tensors if isinstance(one, Trained) for key in one.states):
        same = [one.states.get(key) if isinstance(one, Trained) else None for one in tensors]
        there = [each for each in same if each is not None]
        if len(there) < len(same):
            lone = tensors[same.index(None)]
            raise LayoutError(
                f"{shown(lone.origin)} is {what} with the weight of {shown(there[0].origin)}, but has no such state; "
                "leave those states out (drop), or write the weights without their states"
            )
        states[key] = there
    return first, held, states


def _one(
    same: Sequence[Moment], what: str, dim: int | None, join: Callable[[Sequence[Assembled]], Assembled]
) -> Moment:
    """Return one state of a weight that is combined of several."""
    first = same[0]
    others = f"with {shown(same[1].origin)}" if len(same) > 1 else "anew"
    for one in same:
        one.check(f"{shown(first.origin)} is {what} {others}", dim)
        if (one.over, one.is_number) != (first.over, first.is_number):
            raise LayoutError(
                f"{shown(first.origin)} and {shown(one.origin)} cannot be {what}: the shapes are {first.tensor.shape} "
                f"and {one.tensor.shape}; they are averages over different dims, or one is a number"
            )
    if not first.is_number:
        return replace(first, tensor=join([one.tensor for one in same]), whole=None)
    if len(same) == 1:
        return first
    values = [one.read() for one in same]
    for one, value in zip(same, values, strict=True):
        if one.tensor.dtype != first.tensor.dtype or (None not in (value, values[0]) and value != values[0]):
            raise LayoutError(
                f"{shown(first.origin)} and {shown(one.origin)} are {what}, but one is {_said(first, values[0])}, the "
                f"other {_said(one, value)}: a {what} weight has one number; drop leaves them out"
            )
    if None not in values:
        return replace(first, tensor=first.tensor.apart(), whole=None)
    return replace(first, tensor=first.tensor.repeated([one.tensor for one in same[1:]]), whole=None)


def _said(state: Moment, value: bytes | None) -> str:
    dtype = state.tensor.dtype
    if value is None:
        return f"of {dtype.name}"
    found = np.frombuffer(value, dtype.numpy())
    return f"{dtype.name} {found[0] if found.size == 1 else found}"
