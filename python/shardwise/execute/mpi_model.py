"""A plan of a model among MPI ranks, each with its own arrays.

Every rank carries out its own program (`ModelPlan.program`): one message to each peer and round, of the bytes that go
there of all tensors. All messages of a round are under way at once. Messages that are one run are sent from and
received into the arrays themselves; others are put together in a buffer. Nothing is pickled.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .._arguments import instance
from .._text import shown
from ..errors import LayoutError
from ..reshard.model.program import Memory, ModelProgram, view_of
from ._ranks import ranks_of
from .mpi import communicator_of

__all__ = ["run"]

Array = npt.NDArray[Any]

#: MPI counts the bytes of a message in 32 bits.
_LONGEST = 2**30


def run(
    program: ModelProgram,
    comm: Any,
    src: Mapping[str, Array],
    out: Mapping[str, Array],
    *,
    ranks: Mapping[Any, int] | Sequence[int] | None = None,
) -> None:
    """Carry out the programs of a model among the ranks of a communicator; all of them call this together.

    Args:
        program: the rank's own, by `ModelPlan.program(holder, memory)`; all with the same `memory`, of at most 2**30
            bytes. In each round a rank keeps one message to and one from each of its peers.
        comm: an intracommunicator of mpi4py; a duplicate is used, so that messages never mix with the caller's.
        src: the arrays before, by name, in C order.
        out: the arrays to write into, by name, in C order, which share no memory with those of `src`, nor with one
            another; further places of a tensor (`Repeat`, from `LocalParameter.views`) are filled too.
        ranks: the rank of each holder, by label or in the order of `descriptors.peers`; that order if not given.

    Raises:
        ImportError: if mpi4py is not installed.
        TypeError: if `comm` is not such a communicator.
        LayoutError: if an array is missing or too small, or one of `out` shares memory with another; if ranks are
            missing, or a message is too long for MPI; if two ranks have other plans for each other. On all ranks, and
            before anything is sent.
        ValueError: if an array is not in C order, or is read-only.

    When something fails later, other ranks may wait for messages that never come: the rank prints what happened and
    ends all ranks by `Abort`.

    >>> run(plan.program(label, 2**26), MPI.COMM_WORLD, before, after)  # doctest: +SKIP
    """
    mpi = communicator_of(comm)
    own = comm.Dup()
    agreed = False
    try:
        at, memory = _prepared(mpi, own, program, src, out, ranks)
        agreed = True
        _move(mpi, own, program, at, memory)
    except BaseException as error:
        if agreed or not isinstance(error, Exception):
            said = f"{type(error).__name__}: {error}"
            where = f"shardwise.execute.mpi_model: rank {own.Get_rank()}"
            print(f"{where} failed, so all ranks end: {said}", file=sys.stderr, flush=True)
            own.Abort(1)
        raise
    finally:
        own.Free()


def _prepared(mpi: Any, comm: Any, program: ModelProgram, src: Any, out: Any, ranks: Any) -> tuple[list[int], Memory]:
    """Check everything on all ranks, before any of them sends."""
    rank, size = comm.Get_rank(), comm.Get_size()
    failure: Exception | None = None
    at: list[int] = []
    memory = Memory({}, {}, [])
    state = np.zeros((size, 32), np.uint8)
    try:
        rows = instance("program", program, ModelProgram).descriptors
        at = ranks_of(rows.peers, ranks, size)
        if at[rows.peers.index(rows.holder)] != rank:
            place = at[rows.peers.index(rows.holder)]
            raise LayoutError(f"holder {shown(rows.holder)} is rank {place}, but this is rank {rank}")
        if program.messages["bytes"].max(initial=0) > _LONGEST:
            raise LayoutError(
                f"a message is over {_LONGEST} bytes, which MPI cannot count; make the program with memory"
            )
        memory = program.memory_of(src, out)
        for label, place in zip(rows.peers, at, strict=True):
            if label != rows.holder:
                state[place] = np.frombuffer(program.digest(label), np.uint8)
    except Exception as error:
        failure = error
    told = np.concatenate([np.array([[0 if failure is None else 1] * 32], np.uint8), state])
    heard = np.empty((size, size + 1, 32), np.uint8)
    comm.Allgather([told, mpi.BYTE], [heard, mpi.BYTE])
    if failure is not None:
        raise failure
    for one in range(size):
        if heard[one, 0, 0]:
            raise LayoutError(f"rank {one} cannot begin; its own error says why")
    for one in range(size):
        for other in range(one):
            if (heard[one, 1 + other] != heard[other, 1 + one]).any():
                raise LayoutError(f"ranks {other} and {one} have other plans for each other")
    return at, memory


def _move(mpi: Any, comm: Any, program: ModelProgram, at: list[int], memories: Memory) -> None:
    rows = program.descriptors
    program.fill(memories)
    for tag in np.unique(program.messages["tag"]).tolist():
        waiting: list[Any] = []
        #: The bytes of each, the places to put them in, and who sends them.
        filled: list[tuple[Any, list[Any], int | None]] = []
        for sends, peer, _, size, first, stop in program.messages[program.messages["tag"] == tag].tolist():
            memory, side, listed = (
                (memories.before, "src", rows.sends) if sends else (memories.after, "dst", rows.receives)
            )
            views = [view_of(memory[int(row[f"{side}_tensor"])], row, side) for row in listed[first:stop]]
            direct = len(views) == 1 and len(views[0]) == 1
            data = views[0][0] if direct else np.empty(size, np.uint8)
            # One message of a round between two ranks, and MPI keeps their order: they need no tags.
            if sends:
                if not direct:
                    np.concatenate([view.ravel() for view in views], out=data)
                waiting.append(comm.Isend([data, mpi.BYTE], dest=at[peer]))
                filled.append((data, [], None))
            else:
                waiting.append(comm.Irecv([data, mpi.BYTE], source=at[peer]))
                filled.append((data, [] if direct else views, at[peer]))
        states = [mpi.Status() for _ in waiting]
        mpi.Request.Waitall(waiting, states)
        for (data, views, sender), state in zip(filled, states, strict=True):
            # MPI takes a message that is shorter than the memory for it.
            if sender is not None and state.Get_count(mpi.BYTE) != data.nbytes:
                raise LayoutError(f"rank {sender} has sent {state.Get_count(mpi.BYTE)} bytes, not {data.nbytes}")
            used = 0
            for view in views:
                view[...] = data[used : used + view.size].reshape(view.shape)
                used += view.size
    memories.repeat()
