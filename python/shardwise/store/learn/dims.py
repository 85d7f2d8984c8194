"""Dims of a tensor in terms of the dims of its sources: factors of positions, and the text of a rewrite for them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..._types import Numbers

__all__ = [
    "FIBER",
    "FIELDS",
    "Factors",
    "IrregularError",
    "Relation",
    "TargetDims",
    "cut_factors",
    "factors_in_dims",
    "factors_of",
    "say_dims",
]

#: Names for stacked fields, for factors of dims, and for the dim along which fibers run.
FIELDS, _FACTORS, _FIBER = "ijkmn", "abcdeghopqrstuvwxyz", "f"
#: The last name where it is a dim by itself, in a text of dims.
FIBER = re.compile(rf"(?:^| ){_FIBER}(?= |$) ?")
#: Factors of a dim: size and stride of each, major first.
Factors = list[tuple[int, int]]


class IrregularError(Exception):
    """Raised for fibers in an order that no rewrite can express; the message describes it."""


@dataclass
class Relation:
    """The way in which one tensor is made of others.

    Attributes:
        target: The tensor that is made.
        parts: The names of its sources by part, under `""` if there is one. A stacked number is that of the first.
        stack: The positions of the stacked numbers in these names.
        used: The names of all its sources.
        side: The keys of the target's side of the rewrite, besides the name.
        own: The keys of the sources' side.
        size: The size of a padded dim without padding.
    """

    target: str
    parts: dict[str, str]
    stack: tuple[int, ...]
    used: frozenset[str]
    side: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    size: int | None = None

    @property
    def kind(self) -> str:
        """A text that is equal for tensors that are made alike, whatever their sizes."""
        return re.sub(r"[0-9]+", "#", repr((list(self.parts), self.stack, self.side, self.own)))


def factors_of(along: Numbers) -> Factors | None:
    """Return the factors (size and stride) of a dim with these positions, from 0; `None` if there are none."""
    if len(along) == 1:
        return [] if along[0] == 0 else None
    stride = int(along[1])
    straight = np.flatnonzero(along != np.arange(len(along)) * stride)
    run = int(straight[0]) if len(straight) else len(along)
    if along[0] != 0 or stride <= 0 or len(along) % run:
        return None
    outer = along[::run]
    if (along.reshape(-1, run) != outer[:, None] + np.arange(run) * stride).any():
        return None
    rest = factors_of(outer)
    return None if rest is None else [*rest, (run, stride)]


def cut_factors(factors: Factors, sizes: list[int]) -> Factors:
    """Return the same factors, cut so that each is within one of these dims."""
    found: Factors = []
    for n, stride in factors:
        own, end = [], n * stride
        for at in range(1, len(sizes)):
            step = math.prod(sizes[at:])
            if stride < step < end and step % stride == end % step == 0:
                own.append((end // step, step))
                end = step
        found += [*own, (end // stride, stride)]
    return found


def factors_in_dims(sizes: list[int], factors: Factors) -> list[Factors]:
    """Return the factors of each of these dims, from factors with strides."""
    found: list[Factors] = []
    rest = list(reversed(factors))
    for size in reversed(sizes):
        own: Factors = []
        while math.prod(n for n, _ in own) < size and rest:
            own.insert(0, rest.pop(0))
        if math.prod(n for n, _ in own) != size:
            raise IrregularError("splitting and merging its source's dims does not give its dims")
        found.insert(0, own)
    return found


class TargetDims(NamedTuple):
    """The dims of a tensor, as a grid of fibers.

    Attributes:
        rank: The number of its dims.
        dim: The dim along which its fibers run; -1 if fibers are single elements.
        along: The dim along which they run in its sources; -1 if fibers are single elements.
        what: For each dim of the grid, its dim of the tensor, not counting the fibers' dim.
        stacked: The positions of stacked numbers in names, each with its dim of the grid.
    """

    rank: int
    dim: int
    along: int
    what: list[int]
    stacked: list[tuple[int, int]]


def say_dims(found: Relation, tensor: TargetDims, factors: list[Factors], source: list[Factors]) -> None:
    """Add the text of a rewrite that turns the source's dims into the target's: stacked, split, merged and permuted.

    Args:
        found: The relation, to which the text is added.
        tensor: The dims of the target.
        factors: For each dim of its grid that is not stacked, its factors of the source's dims.
        source: For each dim of the source, the same factors.
    """
    rank, dim, along, what, stacked = tensor
    atoms = [one for each in source for one in each]
    letters = {one: _FACTORS[at] for at, one in enumerate(atoms[: len(_FACTORS)])}
    if len(atoms) > len(_FACTORS) or len(set(atoms)) < len(atoms):
        raise IrregularError("its dims are split into too many factors")
    common: list[list[str]] = [[letters[one] for one in each] for each in source]
    if along >= 0:
        common.insert(along, [_FIBER])
    fields = {at: FIELDS[number] for number, (_, at) in enumerate(sorted(stacked))}
    target: list[list[str]] = [[] for _ in range(rank)]
    rest = iter(factors)
    for at, of in enumerate(what):
        place = of + (0 <= dim <= of)
        target[place] += [fields[at]] if at in fields else [letters[one] for one in next(rest)]
    if dim >= 0:
        target[dim] = [_FIBER]
    leading = [fields[at] for _, at in sorted(stacked, key=lambda one: one[1])]
    if target[: len(leading)] == [[name] for name in leading]:
        inner = target[len(leading) :]
        swapped = [*common[:-2], *common[:-3:-1]] if len(common) > 1 else common
        if inner in (common, swapped):
            if leading:
                found.side["stack"] = leading[0] if len(leading) == 1 else leading
            if inner != common:
                found.side["transpose"] = True
            return
    sizes = {letters[n, stride]: n for n, stride in atoms}
    merged = {name for group in (*common, *target) for name in group if len(group) > 1 and name in sizes}

    def written(groups: list[list[str]], sized: set[str]) -> str:
        texts = []
        for group in groups:
            said = [f"{name}={sizes[name]}" if name in sized else name for name in group]
            texts.append("1" if not said else said[0] if len(said) == 1 else f"({' '.join(said)})")
        return " ".join(texts)

    found.side["dims"] = f"{written(target, merged)} -> {written(common, set())}".strip()
