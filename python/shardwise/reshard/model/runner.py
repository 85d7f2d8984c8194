"""The runner of programs: messages over a transport, a few at a time, in an order without deadlock.

All holders follow one order of all messages and of their parts, and each waits for its oldest first. So of all parts
that are not done, the first one is under way on both sides: everything before it is done there, and nobody waits for a
buffer that a later part would have to free.

Partial sums go addend by addend: the first is written, each further one is added to what is there, in the order of
their coordinates. An addend begins at a holder when everything before it is done there, so floats have the same bits
whatever the transport, the memory and the number of messages are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .transport import Memory, MessagePart, Phase, RowNumbers, Transport

__all__ = ["ALONE", "carry_out", "is_run", "message_parts", "runs_view"]

_SRC, _DST, _SRC_OFFSET, _DST_OFFSET, _BYTES, _COUNT, _SRC_STRIDE, _DST_STRIDE = range(1, 9)
#: The least bytes of a run that is sent on its own: a message costs about as much as copying this many bytes twice.
ALONE = 2**18
#: The most bytes of a part: MPI counts those of a message in 32 bits.
_LONGEST = 2**30


def carry_out(phases: Sequence[Phase], transport: Transport, memory: Memory, dtypes: Mapping[int, Any]) -> None:
    """Carry out a program; what is repeated elsewhere, `Memory.repeat` does then.

    Args:
        phases: those of the program.
        transport: where its messages go and come from.
        memory: what `memory_of` gives.
        dtypes: the same: the dtypes of tensors that have partial sums.
    """
    most = transport.most
    free = deque(transport.empty(most) for _ in range(transport.buffers)) if most is not None else deque()
    under_way: deque[Callable[[], None]] = deque()
    _write_own(phases[0], transport, memory)
    for number, phase in enumerate(phases):
        # Copies of an addend come after all that was received of those before.
        while under_way:
            under_way.popleft()()
        adds = dtypes if number else None
        if adds is not None:
            for row in phase.descriptors.copies.tolist():
                values = runs_view(transport, memory.before, row, "src")
                transport.add(runs_view(transport, memory.after, row, "dst"), values, adds[row[_DST]])
        for sends, peer, tag, _, first, stop in phase.messages.tolist():
            rows = (phase.descriptors.sends if sends else phase.descriptors.receives)[first:stop].tolist()
            for part in message_parts(rows, most, phase.itemsize):
                side, arrays = ("src", memory.before) if sends else ("dst", memory.after)
                buffer: Any = None
                if part.is_alone and is_run(part.rows[0], side) and (sends or adds is None):
                    data = _flat(arrays, part.rows[0], side)
                else:
                    while most is not None and not free:
                        under_way.popleft()()
                    data = buffer = transport.empty(part.size) if most is None else free.popleft()
                    if sends:
                        _pack(transport, arrays, part.rows, data)
                wait = (transport.send if sends else transport.receive)(peer, tag, data, part)
                places = [] if sends or buffer is None else part.rows
                under_way.append(_UnderWay(transport, wait, memory.after, places, buffer, adds, free).finish)
                if most is None:
                    under_way.popleft()()
    while under_way:
        under_way.popleft()()


class _UnderWay(NamedTuple):
    """A part of a message that is under way, and the work to do when it has arrived.

    Attributes:
        wait: A function that waits for the part.
        after: The arrays to receive into.
        places: The rows that the buffer's bytes are copied to; empty if they are sent, or received directly.
        buffer: The buffer that the part is in, if any.
        adds: The dtypes of the tensors, if the part is added.
        free: The buffers that are free.
    """

    transport: Transport
    wait: Callable[[], None]
    after: Mapping[int, Any]
    places: list[RowNumbers]
    buffer: Any
    adds: Mapping[int, Any] | None
    free: deque[Any]

    def finish(self) -> None:
        """Wait for the part, copy its bytes to their places, and free the buffer."""
        self.wait()
        used = 0
        for row in self.places:
            size, count = row[_BYTES], row[_COUNT]
            view = runs_view(self.transport, self.after, row, "dst")
            values = self.transport.runs(self.buffer, used, count, size, size)
            if self.adds is None:
                self.transport.copy(view, values)
            else:
                self.transport.add(view, values, self.adds[row[_DST]])
            used += size * count
        if self.buffer is not None:
            self.free.append(self.buffer)


def _write_own(phase: Phase, transport: Transport, memory: Memory) -> None:
    """Fill padding with zeros, and copy the elements that the holder itself has."""
    for row in phase.descriptors.zeros.tolist():
        runs_view(transport, memory.after, row, "dst")[...] = 0
    for row in phase.descriptors.copies.tolist():
        transport.copy(runs_view(transport, memory.after, row, "dst"), runs_view(transport, memory.before, row, "src"))


def _pack(transport: Transport, arrays: Mapping[int, Any], rows: Sequence[RowNumbers], data: Any) -> None:
    """Copy the bytes of rows one after the other into a buffer."""
    used = 0
    for row in rows:
        size, count = row[_BYTES], row[_COUNT]
        transport.copy(transport.runs(data, used, count, size, size), runs_view(transport, arrays, row, "src"))
        used += size * count


def runs_view(transport: Transport, arrays: Mapping[int, Any], row: RowNumbers, side: str) -> Any:
    """Return the runs of a row on a side, as a view (count, bytes) of memory; the memory must be large enough."""
    if side == "src":
        return transport.runs(arrays[row[_SRC]], row[_SRC_OFFSET], row[_COUNT], row[_BYTES], row[_SRC_STRIDE])
    return transport.runs(arrays[row[_DST]], row[_DST_OFFSET], row[_COUNT], row[_BYTES], row[_DST_STRIDE])


def _flat(arrays: Mapping[int, Any], row: RowNumbers, side: str) -> Any:
    """Return the bytes of a row that is one run on a side."""
    tensor, start = (_SRC, _SRC_OFFSET) if side == "src" else (_DST, _DST_OFFSET)
    return arrays[row[tensor]][row[start] : row[start] + row[_BYTES] * row[_COUNT]]


def is_run(row: RowNumbers, side: str) -> bool:
    """Return whether the bytes of a row are contiguous in the array of a side."""
    return row[_COUNT] == 1 or row[_BYTES] == row[_SRC_STRIDE if side == "src" else _DST_STRIDE]


def message_parts(rows: Sequence[RowNumbers], most: int | None, itemsize: int = 0) -> Iterator[MessagePart]:
    """Cut the rows of a message into parts that both sides know.

    Args:
        rows: the rows of the message, in its order.
        most: the bytes of a buffer, or `None` for one part.
        itemsize: the bytes of an element if the rows are added: then elements stay whole, and all rows go by buffers.

    Large rows that are one run on a side are alone. Only a row that is one run on both sides is longer than a buffer.

    >>> [part.size for part in message_parts([(0, 0, 0, 0, 0, 10, 1, 0, 0), (0, 0, 0, 20, 40, 3, 1, 0, 0)], 8)]
    [8, 5]
    """
    if most is None:
        yield MessagePart(list(rows), sum(row[_BYTES] * row[_COUNT] for row in rows), len(rows) == 1)
        return
    together: list[RowNumbers] = []
    used = 0
    for row in rows:
        for piece in [row] if row[_BYTES] * row[_COUNT] <= most else _pieces(row, most, itemsize):
            size = piece[_BYTES] * piece[_COUNT]
            if size > most or (size >= ALONE and not itemsize and (is_run(piece, "src") or is_run(piece, "dst"))):
                yield MessagePart([piece], size, True)
                continue
            if used + size > most:
                yield MessagePart(together, used, False)
                together, used = [], 0
            together.append(piece)
            used += size
    if together:
        yield MessagePart(together, used, False)


def _pieces(row: RowNumbers, most: int, itemsize: int) -> Iterator[RowNumbers]:
    """Yield the parts of a row that fit in a buffer, or single runs that need no buffer."""
    *who, src, dst, size, count, src_stride, dst_stride = row
    if size <= most:
        times = most // size
        for done in range(0, count, times):
            offsets = src + done * src_stride, dst + done * dst_stride
            yield (*who, *offsets, size, min(times, count - done), src_stride, dst_stride)
        return
    longest = _LONGEST if size >= ALONE and not itemsize else most - most % max(itemsize, 1)
    for run in range(count):
        for done in range(0, size, longest):
            offsets = src + run * src_stride + done, dst + run * dst_stride + done
            yield (*who, *offsets, min(longest, size - done), 1, 0, 0)
