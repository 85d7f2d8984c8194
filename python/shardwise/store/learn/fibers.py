"""Fibers of tensors, and the places of one checkpoint's fibers in another.

A fiber is all elements along one dim, such as a row or a column. However tensors are fused, stacked, transposed or
padded, fibers along some dim stay whole. They are compared by a few of their elements; the result is later checked on
all elements.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..._boxes import consecutive
from ..._threads import Threads
from ..._types import Numbers
from ..tensors.checkpoint import StoredCheckpoint
from ..tensors.stored import StoredTensor

__all__ = ["Fibers", "Match", "fibers_of", "find_match", "unseen"]

#: The number of elements from the middle of a fiber that are compared; of fibers up to twice as long, all are.
_WINDOW = 16
#: The least run of bytes of a window that is read by itself; between shorter ones everything is read too.
_SHORT = 1 << 16
#: About how many bytes of memory a fiber takes during the search.
_BYTES_EACH = 64
#: The most elements of a vector whose elements are fibers too; a scalar is one as well.
_MOST_ELEMENTS = 1 << 20
#: The most fibers of a tensor of zeros that are looked for, as all fibers of zeros are alike.
_MOST_ZEROS = 64
#: The most equal fibers that are all considered. Of more, only those of tensors with the same numbers in their names,
#: or of tensors known to be sources, are; without any, the second number of them.
_MANY, _MOST_ALIKE = 64, 4096

Hashes = npt.NDArray[np.uint64]


class Fibers(NamedTuple):
    """The fibers of the tensors of a checkpoint.

    Attributes:
        names: The names of the tensors.
        tensors: The stored tensors, in the same order.
        hashes: By tensor and dim, a hash of each fiber, 0 for one of zeros; an array with the tensor's other dims. The
            elements of vectors and scalars are under dim -1. Tensors without elements, or with elements of less than a
            byte, have none; nor have dims whose length no dim of the other checkpoint has.
        table: All fibers by length and dtype, sorted by hash: hash, tensor, dim, position.
        numbered: By the numbers in names, the tensors whose names have these numbers.
    """

    names: Sequence[str]
    tensors: Sequence[StoredTensor]
    hashes: dict[tuple[int, int], Hashes]
    table: dict[tuple[int, str], tuple[Hashes, Numbers]]
    numbered: dict[tuple[str, ...], list[int]]


class Match(NamedTuple):
    """The places of a tensor's fibers along a dim in another checkpoint.

    Attributes:
        dim: The dim along which the tensor has them.
        tensor: For each fiber, the number of the other checkpoint's tensor that has it; -1 for a fiber of zeros.
        position: For each fiber, its position in that tensor.
        along: The dim along which the fibers run in each such tensor.
        is_sure: Whether each of these tensors has a fiber that no other tensor has.
    """

    dim: int
    tensor: Numbers
    position: Numbers
    along: dict[int, int]
    is_sure: bool


def fibers_of(checkpoint: StoredCheckpoint, other: StoredCheckpoint, memory: int, threads: int) -> Fibers:
    """Return hashes of the fibers of a checkpoint that another one may have too, each from a few elements.

    Args:
        checkpoint: The checkpoint whose fibers are hashed.
        other: The other one; only fibers of its lengths and dtypes count.
        memory: Bytes for the buffers and the work of all threads.
        threads: The number of threads.
    """
    names, tensors = list(checkpoint), [checkpoint[name] for name in checkpoint]
    lengths = _lengths(other)
    work = [
        (number, dim)
        for number, tensor in enumerate(tensors)
        if not unseen(tensor)
        for dim in _dims(tensor, lengths, memory)
    ]
    # Each thread decodes a chunk.
    decoding = 0
    for number in {number for number, _ in work}:
        tensors[number].check_decodable(memory)
        decoding = max(decoding, tensors[number].decoding)
    threads = min(threads, memory // max(decoding, 1))
    # Besides what is read there are copies of a window, and the numbers that are made of it.
    most = max(memory // (8 * threads), 1)
    hashes: dict[tuple[int, int], Hashes] = {}
    table: dict[tuple[int, str], list[tuple[Hashes, Numbers]]] = {}
    with Threads(threads, "shardwise-learn") as pool:
        found = pool.map(lambda one: _looked_at(tensors[one[0]], one[1], most, memory), work)
        for (number, dim), seen in zip(work, found, strict=True):
            hashes[number, dim] = seen
            rows = np.empty((seen.size, 3), np.int64)
            rows[:, 0], rows[:, 1], rows[:, 2] = number, dim, np.arange(seen.size)
            key = tensors[number].shape[dim] if dim >= 0 else 1, tensors[number].dtype
            table.setdefault(key, []).append((seen.reshape(-1), rows))
    numbered: dict[tuple[str, ...], list[int]] = {}
    for number, name in enumerate(names):
        numbered.setdefault(_said(name)[0], []).append(number)
    return Fibers(names, tensors, hashes, {key: _sorted(rows) for key, rows in table.items()}, numbered)


def _lengths(checkpoint: StoredCheckpoint) -> set[tuple[int, str]]:
    """Return the lengths of the fibers of a checkpoint, with their dtypes."""
    found = {(size, tensor.dtype) for tensor in checkpoint.values() for size in tensor.shape}
    return found | {(1, tensor.dtype) for tensor in checkpoint.values() if tensor.ndim < 2}


def _dims(tensor: StoredTensor, lengths: set[tuple[int, str]], memory: int) -> list[int]:
    """Return the dims along which a tensor's fibers are hashed, and -1 for its elements.

    Along a short dim of a stack there are very many fibers, which take more room than `memory`. They are left out if
    the fibers along another dim suffice.
    """
    dims = [dim for dim, size in enumerate(tensor.shape) if (size, tensor.dtype) in lengths]
    few = [dim for dim in dims if tensor.size // tensor.shape[dim] * _BYTES_EACH <= memory]
    if tensor.ndim < 2 and 1 < tensor.size <= _MOST_ELEMENTS:
        few.append(-1)
    if tensor.ndim and not few:
        return sorted(dims, key=lambda dim: -tensor.shape[dim])[:1]
    return few or [-1]


def _looked_at(tensor: StoredTensor, dim: int, most: int, memory: int) -> Hashes:
    """Return the numbers of a tensor's fibers along a dim, in groups of at most `most` bytes."""
    size, itemsize = tensor.shape[dim] if dim >= 0 else 1, tensor.bits // 8
    start = size // 2 if size > 2 * _WINDOW else 0
    window = slice(start, min(start + _WINDOW if start else size, size))
    shape = tensor.shape if dim >= 0 else (*tensor.shape, 1)
    # A few bytes of every row cost more to read than all rows.
    run = (window.stop - start) * math.prod(shape[dim + 1 :] if dim >= 0 else ()) * itemsize
    is_whole = dim >= 0 and run < _SHORT and size * itemsize <= most
    found = np.empty(tuple(each for at, each in enumerate(shape) if at != dim % len(shape)), np.uint64)
    width = (size if is_whole else window.stop - start) * itemsize
    for box in consecutive(found.shape, max(most // width, 1)):
        sides = list(box)
        if dim >= 0:
            sides.insert(dim, slice(0, size) if is_whole else window)
        values = tensor.read(tuple(sides), memory=memory).view(f"V{itemsize}")
        if dim < 0:
            values = values.reshape(*values.shape, 1)
        elif is_whole:
            values = values[tuple(window if at == dim else slice(None) for at in range(tensor.ndim))]
        found[box] = _hashes(np.moveaxis(values, dim, -1))
    return found


def unseen(tensor: StoredTensor) -> str:
    """Return the reason why no fibers of a tensor are hashed; empty if they are."""
    if not tensor.size:
        return "it has no elements to find it by"
    return "its elements are of fewer than eight bits" if tensor.bits % 8 else ""


def _hashes(values: npt.NDArray[Any]) -> Hashes:
    """Return a hash of each fiber, given its elements along the last dim."""
    data = np.ascontiguousarray(values).view(np.uint8).reshape(*values.shape[:-1], -1)
    width = data.shape[-1]
    words = np.zeros((math.prod(data.shape[:-1]), -(-width // 8) * 8), np.uint8)
    words[:, :width] = data.reshape(-1, width)
    held = words.view(np.uint64)
    factors = np.random.default_rng(20_000 + held.shape[1]).integers(1, 2**63, held.shape[1], np.uint64) * 2 + 1
    with np.errstate(over="ignore"):
        mixed = (held ^ (held >> np.uint64(29))) * factors
        sums = (mixed ^ (mixed >> np.uint64(32))).sum(axis=1, dtype=np.uint64)
    found: Hashes = np.where((held == 0).all(axis=1), np.uint64(0), sums | np.uint64(1))
    return found.reshape(data.shape[:-1])


def _sorted(rows: list[tuple[Hashes, Numbers]]) -> tuple[Hashes, Numbers]:
    hashes, places = np.concatenate([one for one, _ in rows]), np.concatenate([each for _, each in rows])
    order = np.argsort(hashes, kind="stable")
    return hashes[order], places[order]


def find_match(number: int, there: Fibers, here: Fibers) -> Match | None:
    """Find the fibers of a tensor among those of another checkpoint, along the first dim for which all are there.

    Of several equal fibers, one is taken from the tensor that has the most other fibers, then from that with the most
    similar name.

    Args:
        number: The tensor.
        there: The checkpoint that has it.
        here: The checkpoint in which its fibers are looked for.
    """
    tensor = there.tensors[number]
    dims = sorted(range(tensor.ndim), key=lambda dim: -tensor.shape[dim])
    for dim in [*dims, -1] if tensor.ndim < 2 else dims:
        hashes = there.hashes.get((number, dim))
        known = here.table.get((1 if dim < 0 else tensor.shape[dim], tensor.dtype))
        if hashes is None or known is None:
            continue
        flat = hashes.reshape(-1)
        first, end = (np.searchsorted(known[0], flat, side=side) for side in ("left", "right"))
        # Zeros next to others are padding. A tensor of zeros only is like any other, unless it is large.
        is_zero = (flat == 0) & bool(flat.any())
        if not ((first < end) | is_zero).all() or (not flat.any() and len(flat) > _MOST_ZEROS):
            continue
        found = _chosen_by_votes(there.names[number], is_zero, first, end, known[1], here)
        if found is not None:
            chosen, index, along = found
            alone = set(known[1][first[end - first == 1], 0].tolist())
            is_sure = set(chosen[chosen >= 0].tolist()) <= alone
            return Match(dim, chosen.reshape(hashes.shape), index.reshape(hashes.shape), along, is_sure)
    return None


def _chosen_by_votes(
    name: str, is_zero: npt.NDArray[np.bool_], first: Any, end: Any, places: Numbers, here: Fibers
) -> tuple[Numbers, Numbers, dict[int, int]] | None:
    """Choose one of the equal fibers for each fiber of a tensor; `None` if a tensor has chosen ones along several dims.

    Fibers with one equal only are certain, and each is a vote for its tensor and dim. Of several equal ones the next
    one in the tensor of the fiber before is taken, else that with most votes, else that of the most alike name.
    """
    counts = end - first
    sure = np.flatnonzero((counts == 1) & ~is_zero)
    votes: dict[tuple[int, int], int] = {}
    for tensor, dim in zip(*(column.tolist() for column in places[first[sure], :2].T), strict=True):
        votes[tensor, dim] = votes.get((tensor, dim), 0) + 1
    tensors, index = np.full(len(is_zero), -1, np.int64), np.zeros(len(is_zero), np.int64)
    tensors[sure], index[sure] = places[first[sure], 0], places[first[sure], 2]
    likeness: dict[int, Any] = {}
    for at in np.flatnonzero((counts > 1) & ~is_zero).tolist():
        rows = places[first[at] : end[at]]
        if len(rows) > _MANY:
            likely = [*here.numbered.get(_said(name)[0], ()), *(tensor for tensor, _ in votes)]
            chosen = rows[np.isin(rows[:, 0], likely)]
            rows = chosen if len(chosen) else rows[:_MOST_ALIKE]
        before = (int(tensors[at - 1]), int(index[at - 1]) + 1) if at else None
        best = None
        for tensor, dim, position in rows.tolist():
            if tensor not in likeness:
                likeness[tensor] = _alike(name, here.names[tensor])
            score = ((tensor, position) == before, votes.get((tensor, dim), 0), likeness[tensor], -position)
            if best is None or score > best[0]:
                best = score, tensor, dim, position
        assert best is not None
        _, tensors[at], dim, index[at] = best
        votes[int(tensors[at]), dim] = votes.get((int(tensors[at]), dim), 0) + 1
    along: dict[int, int] = {}
    for tensor, dim in sorted(votes, key=votes.__getitem__):
        along[tensor] = dim
    used = set(tensors[tensors >= 0].tolist())
    if any(tensor in used and dim != along[tensor] for tensor, dim in votes):
        return None
    return tensors, index, along


def _alike(one: str, other: str) -> tuple[bool, float]:
    """Compare two names: return whether they have the same numbers, and the share of words that they have in common."""
    (numbers, words), (others, other_words) = _said(one), _said(other)
    return numbers == others, len(words & other_words) / max(len(words | other_words), 1)


@lru_cache(maxsize=1 << 16)
def _said(name: str) -> tuple[tuple[str, ...], set[str]]:
    """Return the numbers and the words in a name; cached, as names are compared many times."""
    return tuple(re.findall(r"[0-9]+", name)), set(re.findall(r"[A-Za-z]+", name))
