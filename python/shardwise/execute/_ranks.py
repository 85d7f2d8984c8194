"""The holder of a plan that each process stands for; and the agreement of a group's processes before they begin."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .._arguments import integer
from .._text import counted, shown
from ..errors import LayoutError
from ..reshard.model.program import ModelProgram
from .versions import difference_error

__all__ = ["agree", "ranks_of"]

Bytes = npt.NDArray[np.uint8]


def ranks_of(peers: Sequence[Any], ranks: Any, size: int) -> list[int]:
    """Return the rank of each holder: by label, in their order, or as they are numbered.

    Raises:
        LayoutError: if one is missing, given twice, or not there.
        TypeError: if one is not an integer.

    >>> ranks_of(["a", "b"], {"b": 0, "a": 2}, 3)
    [2, 0]
    """
    if ranks is None:
        found = list(range(len(peers)))
    elif isinstance(ranks, Mapping):
        missing = [label for label in peers if label not in ranks]
        if missing:
            raise LayoutError(f"ranks has no rank for {shown(missing[0])}")
        found = [integer(f"ranks[{shown(label)}]", ranks[label]) for label in peers]
    else:
        found = [integer(f"ranks[{number}]", rank) for number, rank in enumerate(ranks)]
    if len(found) != len(peers) or len(set(found)) != len(found):
        raise LayoutError(f"ranks has {counted(len(set(found)), 'different rank')} for {counted(len(peers), 'holder')}")
    for rank in found:
        if not 0 <= rank < size:
            raise LayoutError(f"rank {rank} does not exist: the ranks are 0 to {size - 1}")
    return found


def agree(
    program: ModelProgram,
    failure: Exception | None,
    positions: Sequence[int],
    size: int,
    gather: Callable[[Bytes], Bytes],
    version: str,
    group: str = "",
) -> None:
    """Raise on all processes if one cannot begin, or two have other plans for each other, or other versions.

    Args:
        program: the program of this process.
        failure: what keeps this process from beginning.
        positions: the number of each holder's process among those that agree, unless this one cannot begin.
        size: how many processes agree.
        gather: a function that gives the bytes of all processes, a row each.
        version: the version of what is sent, the same on all processes.
        group: the name of the group after a rank, in messages.

    Raises:
        LayoutError: if another process cannot begin, or two have other plans or versions; the message has the digests
            of both.
        Exception: `failure`.
    """
    # Whether it failed, a digest of the version, and then one for each process.
    state = np.zeros((2 + size, 32), np.uint8)
    state[0] = failure is not None
    state[1] = np.frombuffer(hashlib.sha256(version.encode()).digest(), np.uint8)
    if failure is None:
        for peer in sorted({peer for phase in program.phases for peer in phase.messages["peer"].tolist()}):
            digest = program.digest(program.descriptors.peers[peer])
            state[2 + positions[peer]] = np.frombuffer(digest, np.uint8)
    heard = gather(state.reshape(-1)).reshape(size, 2 + size, 32)
    if failure is not None:
        raise failure
    for rank in np.flatnonzero(heard[:, 0, 0])[:1].tolist():
        raise LayoutError(f"rank {rank}{group} cannot begin; its own error says why")
    for rank in np.flatnonzero((heard[:, 1] != heard[0, 1]).any(1))[:1].tolist():
        whose = "rank 0", f"rank {rank}{group}"
        raise difference_error("versions", whose, (heard[0, 1].tobytes().hex(), heard[rank, 1].tobytes().hex()))
    digests = heard[:, 2:]
    for one, other in np.argwhere((digests != digests.transpose(1, 0, 2)).any(2))[:1].tolist():
        both = digests[one, other].tobytes().hex(), digests[other, one].tobytes().hex()
        raise difference_error("plans for each other", (f"rank {one}", f"rank {other}{group}"), both)
