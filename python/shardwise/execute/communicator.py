"""Communicators of MPI: what their ranks tell each other, and messages between them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import LayoutError
from ..reshard.model.transport import MessagePart, Transport

__all__ = ["BUFFERS", "CommRanks", "MpiTransport", "together"]


#: The number of buffers of a rank.
BUFFERS = 8
#: Times to ask for a message that is not there, after which a rank lets others have its core.
_PATIENCE = 64


class CommRanks:
    """The ranks of a communicator that carry out a plan together."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        self.mpi, self.comm = mpi, comm
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        #: True once all know that all can begin: from then on they wait for each other's messages.
        self.have_agreed = False

    def gather(self, told: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Return the bytes that all ranks tell, a row each."""
        heard = np.empty((self.size, told.size), np.uint8)
        self.comm.Allgather([told, self.mpi.BYTE], [heard, self.mpi.BYTE])
        return heard


@contextmanager
def together(comm: Any, verb: str) -> Iterator[CommRanks]:
    """A duplicate of a communicator; a failure that the other ranks cannot know of ends them all."""
    mpi = communicator_of(comm)
    own = comm.Dup()
    ranks = CommRanks(mpi, own)
    try:
        yield ranks
    except BaseException as error:
        if ranks.have_agreed or not isinstance(error, Exception):
            said = f"{type(error).__name__}: {error}"
            print(
                f"shardwise.execute.mpi.{verb}: rank {ranks.rank} failed, so all ranks end: {said}",
                file=sys.stderr,
                flush=True,
            )
            own.Abort(1)
        raise
    finally:
        own.Free()


def communicator_of(comm: Any) -> Any:
    """Return the module `mpi4py.MPI`; refuse a `comm` that is not one of its intracommunicators."""
    try:
        from mpi4py import MPI
    except ImportError:
        message = "running a plan among MPI ranks needs mpi4py and an MPI: pip install 'shardwise[mpi]'"
        raise ImportError(message, name="mpi4py") from None
    if not isinstance(comm, MPI.Comm) or comm == MPI.COMM_NULL or comm.Is_inter():
        raise TypeError(f"comm must be an intracommunicator of mpi4py, got {type(comm).__name__}")
    return MPI


class MpiTransport(Transport):
    """Messages between ranks; those between two arrive in their order, so they need no tags.

    Args:
        all_of: The ranks.
        at: The rank of each peer.
        most: The bytes of a buffer.
    """

    buffers = BUFFERS

    def __init__(self, all_of: CommRanks, at: Sequence[int], most: int = 2**20) -> None:
        self._all, self._at, self.most = all_of, at, most

    def send(self, peer: int, tag: int, data: Any, part: MessagePart) -> Callable[[], None]:
        """Begin to send a message; return a function that waits until it is gone."""
        request = self._all.comm.Isend([data[: part.size], self._all.mpi.BYTE], dest=self._at[peer])
        return lambda: self._wait(request)

    def receive(self, peer: int, tag: int, data: Any, part: MessagePart) -> Callable[[], None]:
        """Begin to receive a message; return a function that waits until it is there."""
        sender = self._at[peer]
        request = self._all.comm.Irecv([data[: part.size], self._all.mpi.BYTE], source=sender)

        def wait() -> None:
            count = self._wait(request).Get_count(self._all.mpi.BYTE)
            if count != part.size:  # MPI takes a message that is shorter than the memory for it.
                raise LayoutError(f"rank {sender} has sent {count} bytes, not {part.size}")

        return wait

    def _wait(self, request: Any) -> Any:
        state, asked = self._all.mpi.Status(), 0
        while not request.Test(state):
            asked += 1
            if asked > _PATIENCE:
                time.sleep(min(asked - _PATIENCE, 100) * 1e-5)
        return state
