"""Plans among MPI ranks, each with its own arrays: of one tensor, which is a model of one, or of a model.

The programs are carried out by the one runner (`reshard.model.runner`), whose messages go over a communicator
(`communicator.MpiTransport`) as bytes, without pickling. This module makes sure, before any rank sends, that all of
them have the same plan, and arrays that it can be carried out with.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._arguments import instance, integer, is_masked
from .._dtypes import find_dtype
from .._text import bytes_text, counted, shown
from .._types import Array
from ..errors import LayoutError
from ..reshard.model.memory import check_disjoint
from ..reshard.model.program import ONE, ModelProgram, program_of_one
from ..reshard.model.runner import carry_out
from ..reshard.model.transport import memory_of
from ..reshard.plan import ReshardPlan
from ..reshard.run import check_addable
from ..reshard.same import same_holders
from ._ranks import agree, ranks_of
from .communicator import BUFFERS, CommRanks, MpiTransport, together

__all__ = ["run", "run_model"]


_MEMORY = 64 * 2**20
#: MPI counts the bytes of a message in 32 bits.
_LONGEST = 2**30
#: The message that ranks send each other: whether all is well, the plan's digest, the bytes for buffers, dtype or
#: trouble.
_WORD = struct.Struct("<?32sq512s")


def run(
    plan: ReshardPlan,
    comm: Any,
    src: Array | None = None,
    out: Array | None = None,
    *,
    src_ranks: Sequence[int] | None = None,
    dst_ranks: Sequence[int] | None = None,
    memory: int = _MEMORY,
) -> Array | None:
    """Carry out a plan among the ranks of a communicator, each on its own shard; all of them call this together.

    Args:
        plan: The plan, the same on every rank.
        comm: An intracommunicator of mpi4py; a duplicate is used, so that messages never mix with the caller's.
        src: The array that the rank has, of shape `plan.src.holder_shape(...)`, with any strides and of any dtype
            without references; `None` on a rank that has none.
        out: The array to write into, of shape `plan.dst.holder_shape(...)`, which does not overlap `src` or itself; a
            new one if left out.
        src_ranks: The rank of each holder of `plan.src`, in the order of its `holders`; 0, 1, … if left out.
        dst_ranks: The same for `plan.dst`. If left out, a holder whose label is in `plan.src` too has the same rank,
            and the others follow those of `plan.src`; holders without labels are 0, 1, ….
        memory: Bytes for the buffers of this rank, the same on every rank.

    Returns:
        The new array of the rank; `None` on a rank that receives none.

    Raises:
        ImportError: if mpi4py is not installed.
        TypeError: if `comm` is not such a communicator; if an array is not a numpy array, holds references, or is of a
            dtype whose partial sums cannot be added.
        ValueError: if an array is not of its holder's shape, or is read-only.
        LayoutError: if `out` shares memory with `src`, or overlaps itself; if ranks are missing or given twice; if
            plans, dtypes or `memory` differ between ranks.

    An error on one rank before anything is sent ends the call on all ranks: that rank raises its own error, the others
    raise a LayoutError that names the rank and repeats the message. When something fails later, and on Ctrl-C, other
    ranks may wait for messages that never come: the rank prints what happened and ends all ranks by `Abort`.

    >>> import numpy as np
    >>> from shardwise import DeviceMesh, TensorLayout, plan_reshard
    >>> mesh = DeviceMesh((1,), ("x",))
    >>> plan = plan_reshard(*(TensorLayout(axes, mesh).partition((2, 3)) for axes in (("x", None), (None, "x"))))
    >>> from mpi4py import MPI  # doctest: +SKIP
    >>> run(plan, MPI.COMM_WORLD, np.arange(6).reshape(2, 3))  # doctest: +SKIP
    array([[0, 1, 2],
           [3, 4, 5]])
    """
    with together(comm, "run") as ranks:
        prepared = _prepared(ranks, plan, (src, out), (src_ranks, dst_ranks), memory)
        ranks.have_agreed = True
        return prepared()


def run_model(
    program: ModelProgram,
    comm: Any,
    src: Mapping[str, Array],
    out: Mapping[str, Array],
    *,
    ranks: Mapping[Any, int] | Sequence[int] | None = None,
    version: str = "",
) -> None:
    """Carry out the programs of a model among the ranks of a communicator; all of them call this together.

    Args:
        program: the rank's own program, from `ModelPlan.program(holder, memory)`. All ranks give the same `memory`, of
            at most 2**30 bytes. In each round a rank keeps one message to and one from each of its peers.
        comm: an intracommunicator of mpi4py; a duplicate is used, so that messages never mix with the caller's.
        src: the arrays that the rank has, by name, in C order.
        out: the arrays to write into, by name, in C order, which share no memory with those of `src`, nor with one
            another; further places of a tensor (`Repeat`, from `LocalParameter.views`) are filled too.
        ranks: the rank of each holder, by label or in the order of `descriptors.peers`; that order if not given.
        version: the version of the weights that are sent, such as `"step 1200"`; all ranks must have the same.

    Raises:
        ImportError: if mpi4py is not installed.
        TypeError: if `comm` is not such a communicator.
        LayoutError: if an array is missing or too small, or one of `out` shares memory with another; if ranks are
            missing, or a message is too long for MPI; if two ranks have different plans or versions. It is raised on
            all ranks, before anything is sent.
        ValueError: if an array is not in C order, or is read-only.

    When something fails later, other ranks may wait for messages that never come: the rank prints what happened and
    ends all ranks by `Abort`.

    >>> run_model(plan.program(label, 2**26), MPI.COMM_WORLD, before, after)  # doctest: +SKIP
    """
    with together(comm, "run_model") as all_of:
        failure: Exception | None = None
        at: list[int] = []
        try:
            instance("version", version, str)
            rows = instance("program", program, ModelProgram).descriptors
            at = ranks_of(rows.peers, ranks, all_of.size)
            place = at[rows.peers.index(rows.holder)]
            if place != all_of.rank:
                raise LayoutError(f"holder {shown(rows.holder)} is rank {place}, but this is rank {all_of.rank}")
            transport = MpiTransport(all_of, at)
            arrays, dtypes = memory_of(program.phases, transport, src, out)
        except Exception as error:
            failure = error
        agree(program, failure, at, all_of.size, all_of.gather, version)
        all_of.have_agreed = True
        carry_out(program.phases, transport, arrays, dtypes)
        arrays.repeat()


class _Told(NamedTuple):
    """The things that all ranks have alike before they begin: the digest of the plan, bytes for buffers, the dtype."""

    digest: bytes
    memory: int
    dtype: np.dtype[Any] | None


def _prepared(
    all_of: CommRanks,
    plan: ReshardPlan,
    arrays: tuple[Array | None, Array | None],
    given: tuple[Sequence[int] | None, Sequence[int] | None],
    memory: int,
) -> Callable[[], Array | None]:
    """Check everything on all ranks before any of them sends; return a function that carries out the plan."""
    failure: Exception | None = None
    told = _Told(bytes(32), 0, None)
    try:
        instance("plan", plan, ReshardPlan)
        ranks = _ranks_of(plan, *given, all_of.size)
        memory = _checked_memory(memory)
        shapes = [
            tiling.shape_at(side.index(all_of.rank)) if all_of.rank in side else None
            for tiling, side in zip((plan.src, plan.dst), ranks, strict=True)
        ]
        src, out = _checked("src", arrays[0], shapes[0]), _checked("out", arrays[1], shapes[1], False)
        told = _Told(_digest(plan, ranks), memory, _common_dtype(src, out))
    except Exception as error:
        failure = error
    said = _agreed(all_of, failure, told)
    try:
        dtype = told.dtype if told.dtype is not None else _dtype_of(said)
        if memory < BUFFERS * dtype.itemsize:
            raise LayoutError(
                f"memory is {bytes_text(memory)}; at least {BUFFERS} buffers for elements of "
                f"{dtype.itemsize} bytes are needed"
            )
        if plan.addends > 1:
            check_addable(dtype)
        program = program_of_one(plan, dtype, all_of.rank, ranks, all_of.size)
        if out is None and shapes[1] is not None:
            out = np.zeros(shapes[1], dtype)
        # Rows are of arrays in C order: others are copied to such ones, and from there.
        before, after = (None if one is None else np.ascontiguousarray(one) for one in (src, out))
        transport = MpiTransport(all_of, range(all_of.size), min(memory // BUFFERS, _LONGEST))
        named = [{} if one is None else {ONE: one} for one in (before, after)]
        bytes_of, dtypes = memory_of(program.phases, transport, named[0], named[1])
    except Exception as error:
        failure = error
    _agreed(all_of, failure, told)

    def carried() -> Array | None:
        carry_out(program.phases, transport, bytes_of, dtypes)
        if out is not None and after is not None and after.base is not out and after is not out:
            out[...] = after.reshape(out.shape)
        return out

    return carried


def _ranks_of(
    plan: ReshardPlan, src_ranks: Sequence[int] | None, dst_ranks: Sequence[int] | None, size: int
) -> tuple[list[int], list[int]]:
    """Return the rank of each holder before, and of each holder after."""
    same = same_holders(plan.src, plan.dst).tolist()
    sources = (
        list(range(plan.src.holder_count))
        if src_ranks is None
        else _listed("src_ranks", src_ranks, plan.src.holder_count)
    )
    if dst_ranks is not None:
        targets = _listed("dst_ranks", dst_ranks, plan.dst.holder_count)
    elif plan.src.has_labels and plan.dst.has_labels:
        taken = set(sources)
        following = (at for at in range(size + plan.dst.holder_count) if at not in taken)
        targets = [sources[at] if at >= 0 else next(following) for at in same]
    else:
        targets = list(range(plan.dst.holder_count))
    for name, ranks in (("src_ranks", sources), ("dst_ranks", targets)):
        seen: set[int] = set()
        for i, at in enumerate(ranks):
            if not 0 <= at < size:
                raise LayoutError(f"{name}[{i}] is {shown(at)}; the communicator has {counted(size, 'rank')}")
            if at in seen:
                raise LayoutError(f"{name}[{i}] repeats rank {at}; a rank has one holder")
            seen.add(at)
    for i, at in enumerate(same):
        if at >= 0 and sources[at] != targets[i]:
            raise LayoutError(
                f"dst_ranks[{i}] is {targets[i]}, but {shown(plan.dst.holder_label(i))} is in src too, "
                f"as rank {sources[at]}"
            )
    return sources, targets


def _listed(name: str, ranks: Sequence[int], count: int) -> list[int]:
    if isinstance(ranks, (str, bytes)) or not hasattr(ranks, "__iter__"):
        raise TypeError(f"{name} must be a sequence of integers, got {type(ranks).__name__}")
    listed = [integer(f"{name}[{i}]", at) for i, at in enumerate(ranks)]
    if len(listed) != count:
        raise LayoutError(f"{name} has {counted(len(listed), 'rank')}, but the plan has {counted(count, 'holder')}")
    return listed


def _checked_memory(memory: int) -> int:
    memory = integer("memory", memory)
    if not BUFFERS <= memory <= 2**62:
        raise LayoutError(f"memory is {shown(memory)}; it must be at least {BUFFERS} bytes, and at most 2**62")
    return memory


def _checked(name: str, array: Array | None, shape: tuple[int, ...] | None, needed: bool = True) -> Array | None:
    if array is None and not (needed and shape is not None):
        return None
    if array is not None and (not isinstance(array, np.ndarray) or is_masked(array)):
        raise TypeError(f"{name} must be a numpy array without a mask, or None, got {type(array).__name__}")
    given = None if array is None else array.shape
    if given != shape or array is None:
        raise ValueError(f"{name} must be {'None' if shape is None else f'of shape {shape}'}, got {given}")
    if array.dtype.hasobject or not array.dtype.itemsize:
        raise TypeError(f"{name} is of dtype {array.dtype}, whose elements cannot be sent as bytes")
    if name == "out" and not array.flags.writeable:
        raise ValueError("out is read-only")
    return array


def _common_dtype(src: Array | None, out: Array | None) -> np.dtype[Any] | None:
    if src is not None and out is not None and src.dtype != out.dtype:
        raise TypeError(f"src is of dtype {src.dtype}, but out is of dtype {out.dtype}; they must be the same")
    check_disjoint(out, src)
    return src.dtype if src is not None else None if out is None else out.dtype


def _digest(plan: ReshardPlan, ranks: tuple[list[int], list[int]]) -> bytes:
    """Return a digest that is equal on ranks with the same plan: equal shapes would not show that."""
    digest = hashlib.blake2b(repr((plan.src.shape, plan.dst.shape, *ranks)).encode(), digest_size=32)
    for table in (plan.kept, plan.transfers):
        digest.update(np.ascontiguousarray(table).view(np.uint8).data)
    return digest.digest()


def _agreed(all_of: CommRanks, failure: Exception | None, told: _Told) -> str:
    """Collect what all ranks report; raise on all of them if one failed, or if they disagree.

    Returns:
        The dtype of the first rank that has an array.
    """
    dtype = "" if told.dtype is None else f"{told.dtype.str} {told.dtype.name}"
    text = dtype if failure is None else f"{type(failure).__name__}: {failure}"
    word = _WORD.pack(failure is None, told.digest, told.memory, text.encode()[:512])
    words = all_of.gather(np.frombuffer(word, np.uint8))
    if failure is not None:
        raise failure
    heard = [_WORD.unpack(bytes(row)) for row in words]
    texts: list[str] = [row[3].rstrip(b"\0").decode(errors="replace") for row in heard]
    for rank, row in enumerate(heard):
        if not row[0]:
            raise LayoutError(f"rank {rank}: {texts[rank]}")
    first = next((rank for rank, text in enumerate(texts) if text), 0)
    for rank, (_, other, budget, _) in enumerate(heard):
        if other != heard[0][1]:
            raise LayoutError(f"rank {rank} and rank 0 have different plans, or different ranks")
        if budget != heard[0][2]:
            raise LayoutError(f"memory is {heard[0][2]} on rank 0, but {budget} on rank {rank}")
        if texts[rank] not in ("", texts[first]):
            raise LayoutError(f"the dtype is {texts[first]} on rank {first}, but {texts[rank]} on rank {rank}")
    return texts[first]


def _dtype_of(said: str) -> np.dtype[Any]:
    """Return the dtype of another rank's shard from the text that the rank has sent; `out` is made with it."""
    code, _, name = said.partition(" ")
    try:
        if np.dtype(code).name == name:
            return np.dtype(code)
    except TypeError:
        pass
    found = find_dtype(name)
    if found is None:
        raise TypeError(f"out must be given: the dtype of src, {shown(said)}, has no name that another rank could read")
    return found.numpy("out")
