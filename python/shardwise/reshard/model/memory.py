"""The memory of runners: arrays that are written share no byte with arrays that are read, nor with each other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from ..._text import shown
from ..._types import Array
from ...errors import LayoutError

__all__ = ["Block", "Repeat", "array_name", "block_of", "check_apart", "check_disjoint", "repeats_in"]


#: The most steps of numpy's search for a byte that two strided arrays share; after that they count as sharing one.
_MOST_WORK = 10**6


class Repeat(str):
    """The name of a further place of a tensor in a parameter: a key in the result of `LocalParameter.views`.

    Args:
        tensor: the name of the tensor.
        place: the place in the stack.

    The runners of plans (`ModelProgram.run`, `execute.mpi.run_model`, `execute.torch.run`) copy the tensor there when
    they have received it.

    >>> Repeat("experts.3.up", 5), Repeat("experts.3.up", 5).tensor
    ('experts.3.up in place 5', 'experts.3.up')
    """

    __slots__ = ("place", "tensor")

    tensor: str
    place: int

    def __new__(cls, tensor: str, place: int) -> Repeat:
        """Return the name, a text with the tensor and the place."""
        made = super().__new__(cls, f"{tensor} in place {place}")
        made.tensor, made.place = tensor, place
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return Repeat, (self.tensor, self.place)


class Block(NamedTuple):
    """A run of bytes in memory.

    Attributes:
        name: Its name in messages.
        start: The address of its first byte.
        stop: The address after its last.
        space: Whose addresses these are, such as a device.
    """

    name: str
    start: int
    stop: int
    space: str = ""


def block_of(name: str, array: Array) -> Block:
    """Return the bytes of an array in C order."""
    start = int(array.__array_interface__["data"][0])
    return Block(name, start, start + array.nbytes)


def check_apart(written: Iterable[Block], read: Iterable[Block]) -> None:
    """Refuse blocks to write into that share a byte with one another, or with a block that is read.

    Raises:
        LayoutError: if there are two; the message names both.

    >>> check_apart([Block("out['a']", 0, 4), Block("out['b']", 4, 8)], [Block("src['a']", 8, 12)])
    >>> check_apart([Block("out['a']", 0, 4)], [Block("src['a']", 3, 5)])
    Traceback (most recent call last):
    shardwise.errors.LayoutError: out['a'] shares memory with src['a'], so writing the one would change the other; \
give it memory of its own
    """
    targets, sources = (sorted(filter(_holds, blocks), key=attrgetter("space", "start")) for blocks in (written, read))
    for before, after in pairwise(targets):
        if before.space == after.space and after.start < before.stop:
            raise _shared(after, before)
    # Of sources, which may share memory, the one that reaches furthest among those that begin no later.
    furthest: list[Block] = []
    for one in sources:
        last = furthest[-1] if furthest else None
        is_further = last is None or (last.space, last.stop) < (one.space, one.stop)
        furthest.append(one if is_further or last is None else last)
    begins = [(one.space, one.start) for one in sources]
    for target in targets:
        # The last of those that begin before it ends.
        at = bisect_right(begins, (target.space, target.stop - 1)) - 1
        if at >= 0 and furthest[at].space == target.space and furthest[at].stop > target.start:
            raise _shared(target, furthest[at])


def check_disjoint(out: Array | None, src: Array | None) -> None:
    """Refuse an array to write into, of any strides, that shares memory with itself or with another that is read.

    Raises:
        LayoutError: if it does.

    >>> both = np.zeros((4, 6))
    >>> check_disjoint(both[:, :3], both[:, 3:])
    >>> check_disjoint(both[:, :3], both[:, 2:])
    Traceback (most recent call last):
    shardwise.errors.LayoutError: out shares memory with src, so writing the one would change the other; give it \
memory of its own
    """
    if out is None or not out.size:
        return
    reach = out.itemsize
    for stride, size in sorted(zip(map(abs, out.strides), out.shape, strict=True)):
        if size > 1 and stride < reach:
            raise LayoutError(f"out overlaps itself in memory (strides {out.strides}), so it cannot be written")
        reach += stride * (size - 1)
    if src is None or not np.may_share_memory(out, src):
        return
    try:
        shares = np.shares_memory(out, src, max_work=_MOST_WORK)  # type: ignore[arg-type]
    except RuntimeError:  # numpy's TooHardError.
        shares = True
    if shares:
        raise _shared(Block("out", 0, 0), Block("src", 0, 0))


def repeats_in(out: Mapping[str, Any], names: Mapping[str, int]) -> list[tuple[Repeat, int]]:
    """Return those keys of `out` that are further places of tensors, each with the number of its tensor.

    Args:
        out: what a runner writes into, by name.
        names: the numbers of the tensors that it writes.
    """
    return [(name, names[name.tensor]) for name in out if isinstance(name, Repeat) and name.tensor in names]


def _holds(block: Block) -> bool:
    return block.stop > block.start


def _shared(one: Block, other: Block) -> LayoutError:
    return LayoutError(
        f"{one.name} shares memory with {other.name}, so writing the one would change the other; give it memory of "
        "its own"
    )


def array_name(what: str, name: str) -> str:
    """Return the name of an array of a mapping, for messages."""
    return f"{what}[{shown(str(name))}]"
