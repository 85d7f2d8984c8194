"""Tensors put together, quantized or not: replicas of one, stacked, packed in a dim."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .._text import shown
from ..errors import LayoutError
from ..pieces import Runs
from ..quantized.component import Along
from ..quantized.parts import WHOLE
from . import arrange
from .assembled import Assembled
from .weights import ALL, ORDERS, SHAPE, AnyTensor, MadeComponent, Weight, refuse_flat

__all__ = ["packed", "repeated", "stacked"]


def repeated(tensor: AnyTensor, others: Sequence[AnyTensor]) -> AnyTensor:
    """Return a tensor with others as replicas, which should have equal elements.

    Raises:
        LayoutError: if one is of another shape, dtype or form.
    """
    plain = [other for other in others if isinstance(other, Assembled)]
    if isinstance(tensor, Assembled) and len(plain) == len(others):
        return tensor.repeated(plain)
    _, (first, *same) = _weights([tensor, *others], "should be the same")
    return first.repeated(same)


def stacked(tensors: Sequence[AnyTensor]) -> AnyTensor:
    """Return tensors of one shape and dtype, stacked in a new first dim; quantized weights component by component.

    Raises:
        LayoutError: if their shapes, dtypes or forms differ.
    """
    plain = [tensor for tensor in tensors if isinstance(tensor, Assembled)]
    if len(plain) == len(tensors):
        return Assembled.stacked(plain)
    first, weights = _weights(tensors, "cannot be stacked")
    refuse_flat(first)
    if other := next((one for one in weights if one.shape != first.shape), None):
        raise LayoutError(
            f"tensors {shown(first.origin)} and {shown(other.origin)} cannot be stacked: one is {first.shape}, the "
            f"other {other.shape}"
        )
    held = [
        MadeComponent(
            one.tail,
            Assembled.stacked([weight.components[at].tensor for weight in weights]),
            (Along(0), *(each._replace(of=each.of + 1) if each.of is not None else each for each in one.along)),
        )
        for at, one in enumerate(first.components)
    ]
    uncut = {dim + 1: why for weight in weights for dim, why in weight.uncut}
    return Weight(
        first.origin, (len(weights), *first.shape), first.form, tuple(held), tuple(uncut.items()), is_whole=False
    )


def packed(dim: int, parts: Sequence[tuple[AnyTensor, Runs]]) -> AnyTensor:
    """Return tensors packed in a dim; each part comes with the new places of its runs.

    The blocks of quantized weights are packed like their elements. A number for each part becomes a row of numbers. The
    orders of groups have to be the same, since a fused weight has only one.

    Raises:
        LayoutError: if the parts differ in another dim, in dtype or in form; if parts would share a block.
        SizeOverflowError: if the dim is over 2**63 - 1.
    """
    plain = [(part, runs) for part, runs in parts if isinstance(part, Assembled)]
    if len(plain) == len(parts):
        return Assembled.packed(dim, plain)
    first, weights = _weights([part for part, _ in parts], "cannot be packed")
    refuse_flat(first)
    size = sum(weight.shape[dim] for weight in weights)
    shape = (*first.shape[:dim], size, *first.shape[dim + 1 :])
    for weight in weights:
        if (*weight.shape[:dim], size, *weight.shape[dim + 1 :]) != shape:
            raise LayoutError(
                f"tensors {shown(first.origin)} and {shown(weight.origin)} cannot be packed in dim {dim}: one is "
                f"{first.shape}, the other {weight.shape}"
            )
    runs = [each for _, each in parts]
    held = [_packed(weights, at, dim, runs, size) for at in range(len(first.components))]
    uncut = {number: why for weight in weights for number, why in weight.uncut}
    return Weight(first.origin, shape, first.form, tuple(held), tuple(uncut.items()), is_whole=False)


def _packed(weights: Sequence[Weight], index: int, dim: int, runs: Sequence[Runs], size: int) -> MadeComponent:
    """Return one component of weights that are packed."""
    first = weights[0]
    ours = [weight.components[index] for weight in weights]
    held = ours[0]
    if len(ours) == 1 or held.tail == SHAPE:
        return held
    if first.is_number(held):
        made = [_in_a_row(weight, one) for weight, one in zip(weights, ours, strict=True)]
        last = len(made[0].shape) - 1
        ends = list(itertools.accumulate(one.shape[last] for one in made))
        rows = [
            (one, np.array([[0, end - one.shape[last], one.shape[last]]], np.int64))
            for one, end in zip(made, ends, strict=True)
        ]
        return replace(held, tensor=Assembled.packed(last, rows), along=(*first.lead_of(held), WHOLE))
    at = held.position(dim)
    if at is None:
        # Of all parts the same, which is seen to when they are copied; an order decides which scale is whose.
        values = {one.value for one in ours}
        if any(weight.uncut for weight in weights) and (None in values or len(values) > 1):
            names = " and ".join(shown(weight.origin) for weight in weights[:2])
            known = "that were not read" if None in values else "in different orders"
            raise LayoutError(f"{names} have groups {known} ({held.tail}); a fused weight has one order")
        return replace(held, tensor=held.tensor.repeated([other.tensor for other in ours[1:]]))
    each = held.along[at]
    if each.block == ALL or held.tail in ORDERS:
        raise LayoutError(
            f"{first.component_text(held)} is for all of dim {dim}, so it cannot be packed with others in that dim: "
            "each of them needs its own"
        )
    coarse = [
        (one.tensor, weight.in_blocks(one, each, where, size, dim))
        for one, weight, where in zip(ours, weights, runs, strict=True)
    ]
    return replace(held, tensor=Assembled.packed(at, coarse))


def _in_a_row(weight: Weight, held: MadeComponent) -> Assembled:
    """Return the numbers of a weight, or of its parts, with one dim for the parts after the dim of experts, if any."""
    made, lead = held.tensor, len(weight.lead_of(held))
    rest = list(range(lead, len(made.shape)))
    return arrange.arranged(made, [[size] for size in made.shape], [*([dim] for dim in range(lead)), rest])


def _weights(tensors: Sequence[AnyTensor], what: str) -> tuple[Weight, list[Weight]]:
    """Return the tensors as quantized weights, all in one form; else refuse them."""
    first = next(one for one in tensors if isinstance(one, Weight))
    return first, [_alike(first, other, what) for other in tensors]


def _alike(first: Weight, other: AnyTensor, what: str) -> Weight:
    if isinstance(other, Weight):
        ours, theirs = ({one.tail: one.along for one in weight.components} for weight in (first, other))
        if ours == theirs or (ours.keys() == theirs.keys() and other.form == first.form):
            order = [next(one for one in other.components if one.tail == held.tail) for held in first.components]
            return replace(other, components=tuple(order))
        said = f"{other.form} of {', '.join(theirs)}"
    else:
        said = "not quantized"
    parts = ", ".join(held.tail for held in first.components)
    raise LayoutError(
        f"tensors {shown(first.origin)} and {shown(other.origin)} {what}: one is {first.form} of {parts}, the other "
        f"{said}"
    )
