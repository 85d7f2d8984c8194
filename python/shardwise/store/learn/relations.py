"""Relations of a tensor to its sources (stacked, packed, transposed, padded), found from the places of its fibers."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ..._types import Numbers
from .dims import (
    FIELDS,
    Factors,
    IrregularError,
    Relation,
    TargetDims,
    cut_factors,
    factors_in_dims,
    factors_of,
    say_dims,
)
from .fibers import Fibers, Match

__all__ = ["NUMBER", "related"]

#: A number in a name.
NUMBER = re.compile(r"(?<![A-Za-z0-9_])[0-9]+(?![A-Za-z0-9_])")
#: The most parts of a dim in another order that repeat in no period; and the most parts of a period.
_MOST_PARTS, _MOST_CYCLE = 3, 64


def related(number: int, match: Match, there: Fibers, here: Fibers) -> Relation:
    """Return the relation of a tensor to those in which its fibers were found.

    Raises:
        IrregularError: if no rewrite can express it.
    """
    tensor = there.tensors[number]
    tensors, index, dim = match.tensor, match.position, match.dim
    is_element = dim < 0 or tensor.shape[dim] == 1
    if is_element and dim >= 0:
        tensors, index, dim = np.expand_dims(tensors, dim), np.expand_dims(index, dim), -1
    tensors, index, pad = _without_padding(tensors, index)
    used = np.unique(tensors).tolist()
    names = {one: here.names[one] for one in used}
    if len({(here.tensors[one].ndim, match.along[one]) for one in used}) > 1:
        raise IrregularError("its rows are rows of some tensors and columns of others")
    # Fibers of one element are elements: neither tensor has a dim that is theirs.
    rank, along = here.tensors[used[0]].ndim, -1 if is_element else match.along[used[0]]
    excess = tensor.ndim - rank
    grid, what = list(tensors.shape), list(range(tensors.ndim))  # of each dim, which dim of the grid it is of
    stacked: list[tuple[int, int]] = []  # The position of the number, and the dim; dims are counted as they are then.
    for position in _positions(names, used, excess, there.names[number]):
        values = _numbers_at(names, tensors, position)
        at, count = _stacked_dim(values, grid, [dim for _, dim in stacked], excess > len(stacked))
        if at < 0 and len(np.unique(values)) > 1:
            raise _no_position(position)
        if at < 0:
            continue
        if count < grid[at]:
            grid[at : at + 1] = [count, grid[at] // count]
            what.insert(at, what[at])
            stacked = [(one, dim + (dim > at)) for one, dim in stacked]
            tensors, index = tensors.reshape(grid), index.reshape(grid)
        stacked.append((position, at))
    if len(stacked) > len(FIELDS):
        raise IrregularError(
            f"it is stacked along {len(stacked)} numbers in the names of its sources; a rewrite stacks along at most "
            f"{len(FIELDS)}"
        )
    axes = [dim for _, dim in stacked]
    skeleton = {one: _filled(names[one], dict.fromkeys([position for position, _ in stacked], "0")) for one in used}
    keys = sorted(set(skeleton.values()))
    lookup = np.zeros(max(used) + 1, np.int64)
    lookup[used] = [keys.index(skeleton[one]) for one in used]
    first = tuple(slice(0, 1) if dim in axes else slice(None) for dim in range(len(grid)))
    parts = lookup[tensors]
    if (parts != parts[first]).any() or (index != index[first]).any():
        raise IrregularError("the tensors that are stacked in it are not all in one order")
    parts, index = (np.squeeze(each[first], tuple(axes)) for each in (parts, index))
    by_key = {key: here.tensors[next(one for one in used if skeleton[one] == key)] for key in keys}
    inner = {key: [n for dim, n in enumerate(one.shape) if dim != along] for key, one in by_key.items()}
    found = Relation(there.names[number], {}, tuple(position for position, _ in stacked), frozenset(names.values()))
    special: set[int] = set()
    if len(keys) == 1:
        found.parts = {"": keys[0]}
        factors, reordered = _single(index, inner[keys[0]], found)
        special |= reordered
    else:
        special.add(_packed(parts, index, keys, inner, found))
        factors = [[(n, math.prod(parts.shape[at + 1 :]))] for at, n in enumerate(parts.shape)]
    sizes = inner[keys[0]] if len(keys) == 1 else list(parts.shape)
    factors = [cut_factors(each, sizes) for each in factors]
    source = factors_in_dims(sizes, sorted((one for each in factors for one in each), key=lambda one: -one[1]))
    say_dims(found, TargetDims(tensor.ndim, dim, along, what, stacked), factors, source)
    rest = [at for at in range(len(grid)) if at not in axes]
    if pad is not None:
        at, found.size, padded = pad
        (place,) = [i for i, each in enumerate(rest) if what[each] == at] or [-1]
        if place < 0 or at in [what[each] for each in axes] or len(factors[place]) != 1:
            raise IrregularError("the dim that is padded is a stacked or a merged one")
        special.add(next(i for i, each in enumerate(source) if each == factors[place]))
        found.side["pad_to"] = _pad_to(found.size, padded)
    if len(special) > 1:
        raise IrregularError("one of its dims is packed, and another one padded")
    for each in special:
        place = each + (0 <= along <= each)
        found.side |= {"dim": place} if place else {}
        if set(found.own) & {"packed"}:
            found.own |= {"dim": place} if place else {}
    return found


def _without_padding(tensors: Numbers, index: Numbers) -> tuple[Numbers, Numbers, tuple[int, int, int] | None]:
    """Return fibers without the zeros at the end of one dim; and that dim, its size without them, and with them."""
    if (tensors >= 0).all():
        return tensors, index, None
    for at, size in enumerate(tensors.shape):
        filled = np.flatnonzero((tensors >= 0).any(axis=tuple(dim for dim in range(tensors.ndim) if dim != at)))
        if 0 < len(filled) < size and filled[-1] == len(filled) - 1:
            take = tuple(slice(len(filled)) if dim == at else slice(None) for dim in range(tensors.ndim))
            if (tensors[take] >= 0).all():
                return tensors[take], index[take], (at, len(filled), size)
    raise IrregularError("it has rows of zeros in the middle")


def _pad_to(size: int, padded: int) -> int:
    """Return the multiple to which a size is padded: the largest power of two that fits, else the least number."""
    powers = (1 << bit for bit in range(12, 0, -1))
    return next((n for n in powers if -(-size // n) * n == padded), padded)


def _positions(names: dict[int, str], used: list[int], excess: int, target: str) -> list[int]:
    """Return the positions of numbers in names that differ within a tensor, or that stand for a dim of size 1."""
    held = {one: NUMBER.findall(names[one]) for one in used}
    width = min(map(len, held.values()))
    varying = [at for at in range(width) if len({held[one][at] for one in used}) > 1]
    single = [at for at in range(width) if at not in varying and held[used[0]][at] == "0"]
    # A dim may be one of one element that no number stands for: then the tensor's own name has the numbers still.
    most = min(excess, width - len(NUMBER.findall(target)))
    return sorted([*varying, *single[: max(most - len(varying), 0)]])


def _no_position(position: int) -> IrregularError:
    return IrregularError(
        f"the number {position + 1} in the names of its sources does not say the place of each source in it"
    )


def _numbers_at(names: dict[int, str], tensors: Numbers, position: int) -> Numbers:
    lookup = np.zeros(max(names) + 1, np.int64)
    for one, name in names.items():
        number = int(NUMBER.findall(name)[position])
        if number >= tensors.size:  # Also of more than 64 bits.
            raise _no_position(position)
        lookup[one] = number
    found: Numbers = lookup[tensors]
    return found


def _stacked_dim(values: Numbers, grid: list[int], taken: list[int], adds: bool) -> tuple[int, int]:
    """Return the dim along which numbers are positions, or positions of equal blocks, and their number; -1 if none."""
    count = int(values.max()) + 1
    for exact in (True, False):
        for at, size in enumerate(grid):
            if at in taken or size % count or (size == count) != exact or (count == 1 and not (adds and size == 1)):
                continue
            shape = [-1 if dim == at else 1 for dim in range(len(grid))]
            if (values == (np.arange(size) // (size // count)).reshape(shape)).all():
                return at, count
    return -1, 0


def _filled(name: str, changes: dict[int, str]) -> str:
    at = -1

    def changed(found: re.Match[str]) -> str:
        nonlocal at
        at += 1
        return changes.get(at, found[0])

    return NUMBER.sub(changed, name)


def _single(index: Numbers, inner: list[int], found: Relation) -> tuple[list[Factors], set[int]]:
    """Return the factors of each dim of a tensor with one source; and the dim whose order is not one of factors."""
    if index.size != math.prod(inner) or len(np.unique(index)) != index.size:
        raise IrregularError("it has some rows of another tensor, but not all")
    expected, factors = np.zeros(index.shape, np.int64), []
    for dim in range(index.ndim):
        along = index[tuple(slice(None) if i == dim else 0 for i in range(index.ndim))]
        expected = expected + along.reshape([-1 if i == dim else 1 for i in range(index.ndim)])
        factors.append(factors_of(along))
    known = [each for each in factors if each is not None]
    if len(known) == len(factors) and (expected == index).all():
        return known, set()
    if list(index.shape) == inner:
        identity = [[(size, math.prod(inner[at + 1 :]))] for at, size in enumerate(inner)]
        whole = np.arange(index.size).reshape(inner)
        for dim, size in enumerate(inner):
            along = index[tuple(slice(None) if i == dim else 0 for i in range(index.ndim))] // identity[dim][0][1]
            if not (np.take(whole, along, axis=dim) == index).all():
                continue
            pairs = next((k for k in range(2, size // 2 + 1) if size % (2 * k) == 0 and _is_zigzag(along, k)), None)
            if pairs is not None:
                found.side["zigzag"] = pairs
            else:
                found.own["packed"], found.side["packed"] = _reordered(along)
            return identity, {dim}
    moved = np.flatnonzero(index.reshape(-1) != np.arange(index.size))
    raise IrregularError(f"{len(moved)} of its rows are elsewhere, and no rewrite can state their order")


def _is_zigzag(along: Numbers, pairs: int) -> bool:
    chunk, size = np.arange(2 * pairs), len(along) // (2 * pairs)
    chunks = np.where(chunk % 2 == 0, chunk // 2, 2 * pairs - 1 - chunk // 2)
    return bool((along.reshape(-1, size) == chunks[:, None] * size + np.arange(size)).all())


def _reordered(along: Numbers) -> tuple[str, str]:
    """Return the parts of a dim that are in another order in the source: the `packed` texts of both sides."""
    edges = [0, *(np.flatnonzero(np.diff(along) != 1) + 1).tolist(), len(along)]
    runs = [(int(along[begin]), end - begin) for begin, end in pairwise(edges)]
    for count in range(2, min(len(runs), _MOST_CYCLE) + 1):
        cycle, groups = runs[:count], len(runs) // count
        if len(runs) % count or (groups == 1 and count > _MOST_PARTS):
            continue
        if any(runs[g * count + i] != (s + g * n, n) for g in range(groups) for i, (s, n) in enumerate(cycle)):
            continue
        parts = {start: f"p{at}" for at, start in enumerate(sorted(start for start, _ in cycle))}
        left = [(start, n * groups) for start, n in sorted(cycle)]
        if any(start + n != after for (start, n), (after, _) in pairwise(left)):
            continue
        blocks = " + ".join(f"{parts[start]}:({n})" for start, n in left)
        return blocks, _order([(parts[start], n) for start, n in cycle], groups)
    raise IrregularError(
        f"{int((along != np.arange(len(along))).sum())} of its rows are moved, and their order does not repeat"
    )


def _order(cycle: Sequence[tuple[str, int]], groups: int) -> str:
    if groups == 1:
        return " + ".join(f"{part}:({n})" for part, n in cycle)
    return f"({groups} [{' '.join(f'{part}:{n}' for part, n in cycle)}])"


def _packed(parts: Numbers, index: Numbers, keys: list[str], inner: dict[str, list[int]], found: Relation) -> int:
    """Find the dim in which several parts are packed, and the order of the parts."""
    for dim in range(parts.ndim):
        labels = parts[tuple(slice(None) if i == dim else 0 for i in range(parts.ndim))]
        if not (parts == labels.reshape([-1 if i == dim else 1 for i in range(parts.ndim)])).all():
            continue
        for at, key in enumerate(keys):
            chosen = np.compress(labels == at, index, axis=dim)
            if list(chosen.shape) != inner[key] or (chosen.reshape(-1) != np.arange(chosen.size)).any():
                raise IrregularError(f"it lacks rows of {key!r}, or has them in another order")
        edges = [0, *(np.flatnonzero(np.diff(labels)) + 1).tolist(), len(labels)]
        runs = [(int(labels[begin]), end - begin) for begin, end in pairwise(edges)]
        cycle, groups = runs[: len(keys)], len(runs) // len(keys)
        if len(runs) % len(keys) or runs != cycle * groups or len({part for part, _ in cycle}) < len(keys):
            raise IrregularError("the order of its parts does not repeat")
        names = _part_names([keys[part] for part, _ in cycle])
        found.parts = dict(zip(names, [keys[part] for part, _ in cycle], strict=True))
        found.side["packed"] = _order([(name, n) for name, (_, n) in zip(names, cycle, strict=True)], groups)
        return dim
    raise IrregularError("its parts do not follow one another along one dim")


def _part_names(names: list[str]) -> list[str]:
    """Return names for parts: the first word in which their tensors' names differ, else p0, p1, …."""
    words = [re.findall(r"[A-Za-z][A-Za-z0-9]*", name) for name in names]
    if len(set(map(len, words))) == 1:
        for column in zip(*words, strict=True):
            if len(set(column)) == len(names):
                return list(column)
    return [f"p{at}" for at in range(len(names))]
