"""A plan of a model among the processes of `torch.distributed`, each with its own tensors.

Every process carries out its own program (`ModelPlan.program`), message by message, in parts that both sides know:
contiguous, large parts go straight from tensor to tensor; the others are put together in a few buffers on the tensors'
device, which are used again and again (`reshard.model.runner`). Tested with gloo on CPUs; any backend works that has
`isend` and `irecv` for `uint8`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .._arguments import instance
from .._text import shown
from ..errors import LayoutError
from ..reshard.model.memory import Block, array_name
from ..reshard.model.program import ModelProgram
from ..reshard.model.runner import ALONE, carry_out, message_parts, runs_view
from ..reshard.model.transport import Memory, MessagePart, Transport, memory_of
from ._ranks import agree, ranks_of

__all__ = ["run"]

#: Bytes of a buffer, and how many of them a process has. Larger ones do not stay in the processor's caches between
#: the copy and the kernel's. After them is room for the mark at the end of a part.
_BUFFER, _BUFFERS, _ROOM = 2**20, 8, 64
#: The byte after the last one of a part.
_MARK = 1


def run(
    program: ModelProgram,
    src: Mapping[str, Any],
    out: Mapping[str, Any],
    *,
    spare: Mapping[str, Any] | None = None,
    ranks: Mapping[Any, int] | Sequence[int] | None = None,
    group: Any = None,
    version: str = "",
) -> None:
    """Carry out one holder's program of a model; all processes of the group call this together.

    Args:
        program: the process's own program, from `ModelPlan.program(holder)`; all processes give the same `memory`, if
            any. For every `memory` a process takes 8 MiB besides the tensors.
        src: the tensors that the process has, by name, contiguous.
        out: the tensors to write into, by name, contiguous, which share no memory with those of `src`, nor with one
            another. Further places of a tensor (`Repeat`, from `LocalParameter.views`) are filled too. After an error
            they may hold anything, unless there are spare ones; those of `src` are untouched.
        spare: tensors of the shapes of `out`, which receive first. When all processes have everything, the tensors of
            `out` are overwritten with those. So each tensor of `out` is whole or untouched, whichever process fails,
            and whenever.
        ranks: the global rank of each holder, by label or in the order of `descriptors.peers`; that order if not given.
        group: the process group; the default one if not given.
        version: the version of the weights that are sent, such as `"step 1200"`; all processes must have the same.

    Partial sums are added in the order of their coordinates, by `Tensor.add_`.

    Raises:
        ImportError: if PyTorch is not installed.
        LayoutError: if a tensor is missing, too small or not contiguous, or one to write into shares memory with
            another; if one with partial sums is of another dtype than the plan has; if ranks are missing; if a peer has
            another plan or version: on every process of the group, and before anything is sent. If a message was
            shorter than it should be: on every process of the group, at the end.
        RuntimeError: by PyTorch, on every process of the group, if one has ended, or does not send its part within the
            time-out of the group. All processes wait for each other at the end.

    >>> run(program, before, after)  # doctest: +SKIP
    """
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        raise ImportError("running a plan among processes of PyTorch needs torch", name="torch") from None
    transport = _TorchTransport(torch, dist, group)
    failure: Exception | None = None
    memory = Memory({}, {}, {}, [])
    dtypes: dict[int, Any] = {}
    instance("version", version, str)
    rows = instance("program", program, ModelProgram).descriptors
    try:
        transport.ranks = ranks_of(rows.peers, ranks, dist.get_world_size())
        own = transport.ranks[rows.peers.index(rows.holder)]
        if own != dist.get_rank():
            raise LayoutError(f"holder {shown(rows.holder)} is rank {own}, but this process is {dist.get_rank()}")
        memory, dtypes = memory_of(program.phases, transport, src, out, spare)
    except Exception as error:
        failure = error
    transport.device = _device(torch, memory.before, memory.after)
    agree(program, failure, transport.positions(), transport.size, transport.gather, version, " of the group")
    transport.tell_last_bytes(program, memory)
    carry_out(program.phases, transport, memory, dtypes)
    transport.confirm()
    if spare is not None:
        _take_over(program, transport, memory)
    memory.repeat()


class _TorchTransport(Transport):
    """Messages among the processes of a group, and the memory of tensors.

    A backend may take a message that is shorter than the memory for it, and say nothing: so each part ends with a byte
    that the receiver knows, and changes before. In a buffer that is a mark after the part; of a part without a buffer
    its last byte, which is told before.

    Attributes:
        ranks: The global rank of each peer.
        device: The device of the tensors.
    """

    most, buffers = _BUFFER, _BUFFERS

    def __init__(self, torch: Any, dist: Any, group: Any) -> None:
        self._torch, self._dist, self._group = torch, dist, group
        self.size = dist.get_world_size(group)
        self.ranks: list[int] = []
        self.device = torch.device("cpu")
        #: The parts sent to a peer so far, and received from it: the number of the next one.
        self._numbers: dict[tuple[bool, int], int] = {}
        #: The bytes sent to the processes of the group, and received from them.
        self._moved = torch.zeros(2, self.size, dtype=torch.int64)
        #: The last bytes of parts from each peer that are in no buffer.
        self._lasts: dict[int, Iterator[int]] = {}
        #: The peer and the bytes of each part that is received; for those that are there, whether the last byte is.
        self._expected: list[tuple[int, int]] = []
        self._came: list[Any] = []

    def positions(self) -> list[int]:
        """Return the number of each peer within the group."""
        if self._group is None:
            return self.ranks
        return [int(self._dist.get_group_rank(self._group, rank)) for rank in self.ranks]

    def gather(self, told: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Return the bytes that all processes of the group tell, a row each."""
        rows: npt.NDArray[np.uint8] = self._all(self._torch.from_numpy(told).to(self.device)).numpy()
        return rows

    def _all(self, tensor: Any) -> Any:
        """Return the tensors of all processes of the group, stacked, on the CPU."""
        found = [self._torch.empty_like(tensor) for _ in range(self.size)]
        self._dist.all_gather(found, tensor, group=self._group)
        return self._torch.stack(found).cpu()

    def send(self, peer: int, tag: int, data: Any, part: MessagePart) -> Callable[[], Any]:
        if not part.is_alone:
            data[part.size] = _MARK
        self._moved[0, self._position(peer)] += part.size
        return self._begin(self._dist.isend, True, peer, self._ended(data, part)).wait  # type: ignore[no-any-return]

    def receive(self, peer: int, tag: int, data: Any, part: MessagePart) -> Callable[[], None]:
        ended = self._ended(data, part)
        # The last byte is another one until it comes.
        last = next(self._lasts[peer]) if part.is_alone else _MARK
        ended[-1] = last ^ 1
        self._moved[1, self._position(peer)] += part.size
        self._expected.append((peer, part.size))
        work = self._begin(self._dist.irecv, False, peer, ended)

        def wait() -> None:
            work.wait()
            self._came.append(ended[-1] == last)

        return wait

    def _ended(self, data: Any, part: MessagePart) -> Any:
        """Return the memory of a part, with the marker byte after it if it has one."""
        return data[: part.size if part.is_alone else part.size + 1]

    def _begin(self, transfer: Any, sends: bool, peer: int, data: Any) -> Any:
        number = self._numbers[sends, peer] = self._numbers.get((sends, peer), 0) + 1
        return transfer(data, self.ranks[peer], group=self._group, tag=number)

    def _position(self, peer: int) -> int:
        rank = self.ranks[peer]
        return rank if self._group is None else int(self._dist.get_group_rank(self._group, rank))

    def tell_last_bytes(self, program: ModelProgram, memory: Memory) -> None:
        """Tell all peers the last bytes of the parts that go to them in no buffer, and hear those of theirs."""
        rows, waiting, told, heard = program.descriptors, [], [], {}
        for sends, listed in ((True, rows.sends), (False, rows.receives)):
            large = listed[listed["bytes"] * listed["count"] >= ALONE]
            for peer in sorted(set(large["peer"].tolist())):
                parts = message_parts(large[large["peer"] == peer].tolist(), self.most)
                alone = [part.rows[0] for part in parts if part.is_alone]
                if alone and sends:
                    ends = [runs_view(self, memory.before, row, "src")[-1, -1] for row in alone]
                    told.append(self._torch.stack(ends))
                    waiting.append(self._dist.isend(told[-1], self.ranks[peer], group=self._group, tag=0))
                elif alone:
                    heard[peer] = self._torch.zeros(len(alone), dtype=self._torch.uint8, device=self.device)
                    waiting.append(self._dist.irecv(heard[peer], self.ranks[peer], group=self._group, tag=0))
        for work in waiting:
            work.wait()
        self._lasts = {peer: iter(data.tolist()) for peer, data in heard.items()}

    def confirm(self) -> None:
        """Check that everything that was sent has arrived; if a process fails before this, the others wait in vain.

        Raises:
            LayoutError: if a message was shorter than it should be.
        """
        # Asked for once: a device answers slowly. Receives are finished in their order.
        there = self._torch.stack(self._came).tolist() if self._came else ()
        for (peer, size), whole in zip(self._expected, there, strict=True):
            self._moved[1, self._position(peer)] -= 0 if whole else size
        sent, arrived = self._all(self._moved.to(self.device)).unbind(1)
        for one, other in (sent != arrived.T).nonzero()[:1].tolist():
            raise LayoutError(
                f"rank {one} of the group has sent {int(sent[one, other])} bytes to rank {other}, but only "
                f"{int(arrived[other, one])} bytes arrived in complete messages"
            )

    def empty(self, size: int) -> Any:
        return self._torch.empty(size + _ROOM, dtype=self._torch.uint8, device=self.device)

    def runs(self, memory: Any, start: int, count: int, size: int, stride: int) -> Any:
        return memory.as_strided((count, size), (stride, 1), memory.storage_offset() + start)

    def copy(self, target: Any, values: Any) -> None:
        target.copy_(values)

    def add(self, target: Any, values: Any, dtype: Any) -> None:
        # Values in a buffer may begin at any byte; a copy begins where an element may.
        target.view(dtype).add_(values.clone(memory_format=self._torch.contiguous_format).view(dtype))

    def check_addable(self, dtype: Any) -> None:
        probe = self._torch.zeros(1, dtype=dtype)
        try:
            probe.add_(probe)
        except RuntimeError:
            raise TypeError(f"partial sums of dtype {dtype} cannot be added") from None

    def bytes_of(self, what: str, name: str, array: Any, least: int) -> Any:
        """Return the bytes of a contiguous tensor, which has as many as are needed."""
        if not isinstance(array, self._torch.Tensor) or not array.is_contiguous():
            raise LayoutError(f"{array_name(what, name)} must be a contiguous tensor")
        held = array.numel() * array.element_size()
        if held < least:
            raise LayoutError(f"{array_name(what, name)} has {held} bytes; the plan needs {least}")
        return array.detach().reshape(-1).view(self._torch.uint8)

    def block_of(self, name: str, memory: Any) -> Block:
        return Block(name, memory.data_ptr(), memory.data_ptr() + len(memory), str(memory.device))


def _device(torch: Any, *memories: Mapping[int, Any]) -> Any:
    return next((one.device for memory in memories for one in memory.values()), torch.device("cpu"))


def _take_over(program: ModelProgram, transport: Transport, memory: Memory) -> None:
    """Copy only the bytes that were received: padding in the tensors stays unchanged."""
    rows = program.descriptors
    for each in (rows.receives, rows.copies, rows.zeros):
        for row in each.tolist():
            values = runs_view(transport, memory.after, row, "dst")
            transport.copy(runs_view(transport, memory.kept, row, "dst"), values)
