"""A plan among MPI ranks, each with its own shard; also a model for carrying out programs over your own transport.

Every rank takes its own part of one order of all transfers (`ReshardPlan.program`). It cuts each box into messages of a
size that all ranks know, and keeps a few sends and a few receives under way at a time, both in the order of the
program. So memory is bounded, and there is no deadlock: of all unfinished messages, the first one is at
the head of its sender's queue and of its receiver's, and therefore under way. A message is bytes, without pickling: a
box that lies in one run is sent from and received into its place, any other is packed into a buffer.
"""

from __future__ import annotations

import hashlib
import struct
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .._arguments import instance, integer, is_masked
from .._boxes import consecutive
from .._dtypes import find_dtype
from .._text import bytes_text, shown
from ..errors import LayoutError
from ..reshard.model.memory import check_disjoint
from ..reshard.plan import ReshardPlan
from ..reshard.program import Program
from ..reshard.run import check_addable
from ..reshard.same import same_holders

__all__ = ["run"]

Array = npt.NDArray[Any]

#: Sends under way at a time, and also receives.
_WINDOW = 4
_MEMORY = 64 * 2**20
#: MPI counts the bytes of a message in 32 bits.
_LONGEST = 2**30
#: The message that ranks send each other: whether all is well, the plan's digest, the bytes of a message, dtype or
#: trouble.
_WORD = struct.Struct("<?32sq512s")
#: Turns in which nothing arrived, after which a rank lets others have its core.
_PATIENCE = 64


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
        src: The rank's array before, of shape `plan.src.holder_shape(...)`, with any strides and of any dtype without
            references; `None` on a rank that holds nothing before.
        out: The array to write into, of shape `plan.dst.holder_shape(...)`, which shares no memory with `src`, nor
            with itself; a new one if left out.
        src_ranks: The rank of each holder of `plan.src`, in the order of its `holders`; 0, 1, … if left out.
        dst_ranks: The same for `plan.dst`. If left out, a holder whose label is in `plan.src` too has the same rank,
            and the others follow those of `plan.src`; holders without labels are 0, 1, ….
        memory: Bytes for the buffers of this rank, the same on every rank.

    Returns:
        The rank's array after; `None` on a rank that holds nothing then.

    Raises:
        ImportError: if mpi4py is not installed.
        TypeError: if `comm` is not such a communicator; if an array is not a numpy array, holds references, or is of a
            dtype whose partial sums cannot be added.
        ValueError: if an array is not of its holder's shape, or is read-only.
        LayoutError: if `out` shares memory with `src`, or overlaps itself; if ranks are missing or given twice; if
            plans, dtypes or `memory` differ between ranks.

    An error on one rank before anything is sent ends the call on all ranks: that rank raises its own error, the others
    a LayoutError that names the rank and repeats the message. When something fails later, and on Ctrl-C, other ranks
    may wait for messages that never come: the rank prints what happened and ends all ranks by `Abort`.

    >>> import numpy as np
    >>> from shardwise import DeviceMesh, TensorLayout, plan_reshard
    >>> mesh = DeviceMesh((1,), ("x",))
    >>> plan = plan_reshard(*(TensorLayout(axes, mesh).partition((2, 3)) for axes in (("x", None), (None, "x"))))
    >>> from mpi4py import MPI  # doctest: +SKIP
    >>> run(plan, MPI.COMM_WORLD, np.arange(6).reshape(2, 3))  # doctest: +SKIP
    array([[0, 1, 2],
           [3, 4, 5]])
    """
    mpi = communicator_of(comm)
    own = comm.Dup()
    agreed = False
    try:
        part = _prepared(mpi, own, plan, src, out, src_ranks, dst_ranks, memory)
        agreed = True
        _move(mpi, own, part)
    except BaseException as error:
        if agreed or not isinstance(error, Exception):
            said = f"{type(error).__name__}: {error}"
            print(
                f"shardwise.execute.mpi: rank {own.Get_rank()} failed, so all ranks end: {said}",
                file=sys.stderr,
                flush=True,
            )
            own.Abort(1)
        raise
    finally:
        own.Free()
    return part.out


def communicator_of(comm: Any) -> Any:
    """Give mpi4py, if this is an intracommunicator of it."""
    try:
        from mpi4py import MPI
    except ImportError:
        message = "running a plan among MPI ranks needs mpi4py and an MPI: pip install 'shardwise[mpi]'"
        raise ImportError(message, name="mpi4py") from None
    if not isinstance(comm, MPI.Comm) or comm == MPI.COMM_NULL or comm.Is_inter():
        raise TypeError(f"comm must be an intracommunicator of mpi4py, got {type(comm).__name__}")
    return MPI


class _Part(NamedTuple):
    """The work of one rank: its programs, its arrays, and the buffers for what has to be packed."""

    programs: list[Program]
    src: Array | None
    out: Array | None
    #: The rank of each label, of destinations for sends and of sources for receives.
    receivers: dict[Any, int]
    senders: dict[Any, int]
    message_bytes: int
    send_buffers: list[Array]
    receive_buffers: list[Array]


def _prepared(
    mpi: Any,
    comm: Any,
    plan: ReshardPlan,
    src: Array | None,
    out: Array | None,
    src_ranks: Sequence[int] | None,
    dst_ranks: Sequence[int] | None,
    memory: int,
) -> _Part:
    """Check everything on all ranks, before any of them sends."""
    rank, size = comm.Get_rank(), comm.Get_size()
    failure: Exception | None = None
    digest, dtype = bytes(32), None
    try:
        instance("plan", plan, ReshardPlan)
        ranks = _ranks_of(plan, src_ranks, dst_ranks, size)
        memory = _checked_memory(memory)
        programs = _programs(plan, ranks, rank)
        src, out = _checked("src", src, programs[0].src_shape), _checked("out", out, programs[-1].dst_shape, False)
        dtype = _common_dtype(src, out)
        digest = _digest(plan, ranks)
    except Exception as error:
        failure = error
    said = _agreed(mpi, comm, failure, digest, memory if failure is None else 0, dtype)
    try:
        dtype = dtype if dtype is not None else _dtype_of(said)
        if memory < 2 * _WINDOW * dtype.itemsize:
            raise LayoutError(
                f"memory is {bytes_text(memory)}; at least {2 * _WINDOW} buffers for elements of "
                f"{dtype.itemsize} bytes are needed"
            )
        if any(step.adds for program in programs for step in program):
            check_addable(dtype)
        if out is None and programs[-1].dst_shape is not None:
            out = np.zeros(programs[-1].dst_shape, dtype)
        message_bytes = min(memory // (2 * _WINDOW), _LONGEST)
        buffers = [np.empty(message_bytes, np.uint8) for _ in range(2 * _WINDOW)]
    except Exception as error:
        failure = error
    _agreed(mpi, comm, failure, digest, memory, dtype)
    receivers = {plan.dst._label(i): at for i, at in enumerate(ranks[1])}
    senders = {plan.src._label(i): at for i, at in enumerate(ranks[0])}
    return _Part(programs, src, out, receivers, senders, message_bytes, buffers[:_WINDOW], buffers[_WINDOW:])


def _ranks_of(
    plan: ReshardPlan, src_ranks: Sequence[int] | None, dst_ranks: Sequence[int] | None, size: int
) -> tuple[list[int], list[int]]:
    """The rank of each holder before, and of each after."""
    same = same_holders(plan.src, plan.dst).tolist()
    sources = list(range(plan.src._count)) if src_ranks is None else _listed("src_ranks", src_ranks, plan.src._count)
    if dst_ranks is not None:
        targets = _listed("dst_ranks", dst_ranks, plan.dst._count)
    elif plan.src._is_named and plan.dst._is_named:
        taken = set(sources)
        following = (at for at in range(size + plan.dst._count) if at not in taken)
        targets = [sources[at] if at >= 0 else next(following) for at in same]
    else:
        targets = list(range(plan.dst._count))
    for name, ranks in (("src_ranks", sources), ("dst_ranks", targets)):
        seen: set[int] = set()
        for i, at in enumerate(ranks):
            if not 0 <= at < size:
                raise LayoutError(f"{name}[{i}] is {shown(at)}; the communicator has {size} ranks")
            if at in seen:
                raise LayoutError(f"{name}[{i}] repeats rank {at}; a rank has one holder")
            seen.add(at)
    for i, at in enumerate(same):
        if at >= 0 and sources[at] != targets[i]:
            raise LayoutError(
                f"dst_ranks[{i}] is {targets[i]}, but {shown(plan.dst._label(i))} is in src too, as rank {sources[at]}"
            )
    return sources, targets


def _listed(name: str, ranks: Sequence[int], count: int) -> list[int]:
    if isinstance(ranks, (str, bytes)) or not hasattr(ranks, "__iter__"):
        raise TypeError(f"{name} must be a sequence of integers, got {type(ranks).__name__}")
    listed = [integer(f"{name}[{i}]", at) for i, at in enumerate(ranks)]
    if len(listed) != count:
        raise LayoutError(f"{name} has {len(listed)} ranks but there are {count} holders")
    return listed


def _checked_memory(memory: int) -> int:
    memory = integer("memory", memory)
    if not 2 * _WINDOW <= memory <= 2**62:
        raise LayoutError(f"memory is {shown(memory)}; it must be at least {2 * _WINDOW} bytes, and at most 2**62")
    return memory


def _programs(plan: ReshardPlan, ranks: tuple[list[int], list[int]], rank: int) -> list[Program]:
    """The rank's programs: one that sends, and one that receives, which may be the same."""
    source, target = (side.index(rank) if rank in side else -1 for side in ranks)
    nothing = Program(None, (), None, None)
    before = plan.program(plan.src._label(source), side="src") if source >= 0 else nothing
    if source >= 0 and target >= 0 and before.dst_shape is not None:
        return [before]
    return [before, plan.program(plan.dst._label(target), side="dst") if target >= 0 else nothing]


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
        raise TypeError(f"src is of dtype {src.dtype}, out of dtype {out.dtype}; they must be the same")
    check_disjoint(out, src)
    return src.dtype if src is not None else None if out is None else out.dtype


def _digest(plan: ReshardPlan, ranks: tuple[list[int], list[int]]) -> bytes:
    """Equal on ranks that have the same plan: shapes alone would not tell two plans from each other."""
    digest = hashlib.blake2b(repr((plan.src.shape, plan.dst.shape, *ranks)).encode(), digest_size=32)
    for table in (plan.kept, plan.transfers):
        digest.update(np.ascontiguousarray(table).view(np.uint8).data)
    return digest.digest()


def _agreed(
    mpi: Any, comm: Any, failure: Exception | None, digest: bytes, memory: int, dtype: np.dtype[Any] | None
) -> str:
    """Collect what all ranks report; raise on all of them if one failed, or if they disagree.

    Returns:
        The dtype of the first rank that has an array.
    """
    told = "" if dtype is None else f"{dtype.str} {dtype.name}"
    text = told if failure is None else f"{type(failure).__name__}: {failure}"
    word = np.frombuffer(_WORD.pack(failure is None, digest, memory, text.encode()[:512]), np.uint8)
    words = np.empty((comm.Get_size(), _WORD.size), np.uint8)
    comm.Allgather([word, mpi.BYTE], [words, mpi.BYTE])
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
            raise LayoutError(f"rank {rank} has another plan, or other ranks, than rank 0")
        if budget != heard[0][2]:
            raise LayoutError(f"memory is {heard[0][2]} on rank 0, but {budget} on rank {rank}")
        if texts[rank] not in ("", texts[first]):
            raise LayoutError(f"the dtype is {texts[first]} on rank {first}, but {texts[rank]} on rank {rank}")
    return texts[first]


def _dtype_of(said: str) -> np.dtype[Any]:
    """The dtype that another rank has, for an array that is made here."""
    code, _, name = said.partition(" ")
    try:
        if np.dtype(code).name == name:
            return np.dtype(code)
    except TypeError:
        pass
    found = find_dtype(name)
    if found is None:
        raise TypeError(f"out must be given, since its dtype, {shown(said)}, cannot be told to another rank by a name")
    return found.numpy("out")


class _Message(NamedTuple):
    """A piece of a box: the rank it is exchanged with, its view of the array and, for a copy, its origin."""

    peer: int
    view: Array
    adds: bool
    source: Array | None


def _outgoing(part: _Part) -> Iterator[_Message]:
    for step in part.programs[0]:
        if step.kind == "send":
            assert step.src is not None
            assert part.src is not None
            view = step.src.view(part.src)
            for piece in consecutive(view.shape, part.message_bytes // view.itemsize):
                index: tuple[Any, ...] = (*piece, ...)
                yield _Message(part.receivers[step.peer], view[index], False, None)


def _incoming(part: _Part) -> Iterator[_Message]:
    for step in part.programs[-1]:
        if step.kind == "send":
            continue
        assert step.dst is not None
        assert part.out is not None
        view = step.dst.view(part.out)
        source = None
        if step.kind == "copy":
            assert step.src is not None
            assert part.src is not None
            source = step.src.view(part.src)
        for piece in consecutive(view.shape, part.message_bytes // view.itemsize):
            index: tuple[Any, ...] = (*piece, ...)
            if source is None:
                yield _Message(part.senders[step.peer], view[index], step.adds, None)
            else:
                yield _Message(-1, view[index], step.adds, source[index])


class _Arrival:
    """A message that is awaited, or a copy: where its values will be, and whether they are there."""

    def __init__(self, message: _Message, buffer: Array | None, values: Array | None) -> None:
        self.message = message
        self.buffer = buffer
        self.values = values
        self.is_there = message.source is not None

    def apply(self) -> None:
        """Put the values where they belong, unless they were received there."""
        if self.values is None:
            return
        target = self.message.view
        if self.message.adds:
            np.add(target, self.values, out=target)
        else:
            target[...] = self.values


def _move(mpi: Any, comm: Any, part: _Part) -> None:
    """Send, receive and copy, a few messages at a time."""
    outgoing, incoming = _outgoing(part), _incoming(part)
    # Sums are added in the order of the program; copies may arrive in any order.
    in_order = any(step.adds for step in part.programs[-1])
    free_to_send, free_to_receive = list(part.send_buffers), list(part.receive_buffers)
    requests: list[Any] = []
    owners: list[Array | _Arrival] = []
    arrivals: deque[_Arrival] = deque()
    idle = 0
    while True:
        while free_to_send and (message := next(outgoing, None)) is not None:
            buffer = free_to_send.pop()
            data = _as_bytes(message.view)
            if data is None:
                data = buffer[: message.view.nbytes]
                data.view(message.view.dtype).reshape(message.view.shape)[...] = message.view
            requests.append(comm.Isend([data, mpi.BYTE], message.peer))
            owners.append(buffer)
        while free_to_receive and (message := next(incoming, None)) is not None:
            if message.source is not None:
                arrivals.append(_Arrival(message, None, message.source))
                break  # What is already here is copied while messages are under way.
            buffer = free_to_receive.pop()
            data, values = _as_bytes(message.view) if not message.adds else None, None
            if data is None:
                data = buffer[: message.view.nbytes]
                values = data.view(message.view.dtype).reshape(message.view.shape)
            arrivals.append(_Arrival(message, buffer, values))
            requests.append(comm.Irecv([data, mpi.BYTE], message.peer))
            owners.append(arrivals[-1])
        states = [mpi.Status() for _ in requests]
        finished = (mpi.Request.Testsome(requests, states) or []) if requests else []
        # The states are those of the finished ones, in their order.
        for at, state in zip(finished, states, strict=False):
            owner = owners[at]
            if isinstance(owner, _Arrival):
                if state.Get_count(mpi.BYTE) != owner.message.view.nbytes:  # MPI takes a message that is too short.
                    raise LayoutError(
                        f"rank {owner.message.peer} has sent {state.Get_count(mpi.BYTE)} bytes, not "
                        f"{owner.message.view.nbytes}"
                    )
                owner.is_there = True
            else:
                free_to_send.append(owner)
        for at in sorted(finished, reverse=True):
            del requests[at], owners[at]
        applied = _apply(arrivals, in_order, free_to_receive)
        if not requests and not arrivals and not applied and not finished:
            return
        idle = 0 if finished or applied else idle + 1
        if idle > _PATIENCE:
            time.sleep(min(idle - _PATIENCE, 100) * 1e-5)


def _apply(arrivals: deque[_Arrival], in_order: bool, free: list[Array]) -> int:
    """Put what has arrived where it belongs; give how many messages that were."""
    if in_order:
        ready = []
        while arrivals and arrivals[0].is_there:
            ready.append(arrivals.popleft())
    else:
        ready = [arrival for arrival in arrivals if arrival.is_there]
        for arrival in ready:
            arrivals.remove(arrival)
    for arrival in ready:
        arrival.apply()
        if arrival.buffer is not None:
            free.append(arrival.buffer)
    return len(ready)


def _as_bytes(view: Array) -> Array | None:
    """The bytes of a view that lies in one run; `None` for any other."""
    return view.reshape(-1).view(np.uint8) if view.flags.c_contiguous else None
