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
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..._arguments import instance
from ..._dtypes import dtype_of, find_dtype
from ..._text import shown
from ...errors import LayoutError
from ..run import check_addable
from .descriptors import Descriptors
from .memory import Block, block_of, check_apart, named, repeats_in

__all__ = [
    "ALONE",
    "Memory",
    "Part",
    "Row",
    "Transport",
    "carry_out",
    "is_run",
    "memory_of",
    "name_of_dtype",
    "parts_of",
    "view_of",
]

#: A row of descriptors, as a tuple.
Row = tuple[int, ...]
_SRC, _DST, _SRC_OFFSET, _DST_OFFSET, _BYTES, _COUNT, _SRC_STRIDE, _DST_STRIDE = range(1, 9)
#: From how many bytes on a run is sent on its own: a message costs about as much as copying these twice.
ALONE = 2**18
#: The most bytes of a part: MPI counts those of a message in 32 bits.
_LONGEST = 2**30


class Memory(NamedTuple):
    """The bytes of a holder's arrays.

    Attributes:
        before: The arrays before, by the positions of the tensors.
        after: The arrays to receive into, by the positions of the tensors.
        kept: The arrays of `out`: those to receive into, unless there are spare ones.
        repeats: Each further place of a tensor in a parameter, and the array of `out` that has the tensor.
    """

    before: dict[int, Any]
    after: dict[int, Any]
    kept: dict[int, Any]
    repeats: list[tuple[Any, Any]]

    def repeat(self) -> None:
        """Copy tensors to their further places, when everything has been received."""
        for there, first in self.repeats:
            there[...] = first


class Phase(NamedTuple):
    """The part of a program that is written, or that is added: of one addend, and elements of one size.

    Attributes:
        descriptors: The rows.
        messages: Their messages; the tags follow those of the phases before.
        dtypes: The name of the dtype of each tensor that is added, by its position.
        itemsize: The bytes of an element if it is added, which a message has whole; 0 if it is written.
    """

    descriptors: Descriptors
    messages: npt.NDArray[np.void]
    dtypes: Mapping[int, str] = MappingProxyType({})
    itemsize: int = 0


class Part(NamedTuple):
    """A part of a message: what goes at once.

    Attributes:
        rows: Its rows, whose bytes follow one another.
        size: Its bytes.
        is_alone: Whether it is one row that may go straight from memory to memory, where it is one run.
    """

    rows: list[Row]
    size: int
    is_alone: bool


class Transport:
    """A way to exchange messages with peers, and the kind of memory that they come from: numpy's, unless overridden.

    Attributes:
        most: The bytes of a buffer. `None` for functions that wait: a message is one part, done when they return.
        buffers: The number of buffers.
    """

    most: int | None = 2**20
    buffers = 8

    def send(self, peer: int, tag: int, data: Any, part: Part) -> Callable[[], None]:
        """Begin to send a part.

        Args:
            peer: the position of the peer.
            tag: the number of the message between the two.
            data: the memory that begins with the part.
            part: the part.

        Returns:
            A function that waits until the memory may be used again.
        """
        raise NotImplementedError

    def receive(self, peer: int, tag: int, data: Any, part: Part) -> Callable[[], None]:
        """Begin to receive a part; see `send`. The function that it returns waits until the part is there."""
        raise NotImplementedError

    def empty(self, size: int) -> Any:
        """Make a buffer."""
        return np.empty(size, np.uint8)

    def runs(self, memory: Any, start: int, count: int, size: int, stride: int) -> Any:
        """Give `count` runs of `size` bytes, each `stride` after the one before, as a view (count, size) of memory."""
        if count == 1:
            return memory[start : start + size].reshape(1, size)
        return np.lib.stride_tricks.as_strided(memory[start:], (count, size), (stride, 1))

    def copy(self, target: Any, values: Any) -> None:
        """Copy values to a target of the same shape."""
        target[...] = values

    def add(self, target: Any, values: Any, dtype: Any) -> None:
        """Add values to a target, both views of bytes that are elements of a dtype."""
        there = target.view(dtype)
        np.add(there, values.view(dtype), out=there)

    def check_addable(self, dtype: Any) -> None:
        """Refuse a dtype whose partial sums cannot be added."""
        check_addable(dtype)

    def bytes_of(self, what: str, name: str, array: Any, least: int) -> Any:
        """Give the bytes of an array, which has as many as are needed.

        Raises:
            ValueError: if it is not in C order, or is read-only and written.
            LayoutError: if it is too small.
        """
        if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
            raise ValueError(f"{named(what, name)} must be a numpy array in C order")
        if what == "out" and not array.flags.writeable:
            raise ValueError(f"{named(what, name)} is read-only")
        if array.nbytes < least:
            raise LayoutError(f"{named(what, name)} has {array.nbytes} bytes; the plan needs {least}")
        return array.reshape(-1).view(np.uint8)

    def block_of(self, name: str, memory: Any) -> Block:
        """Give the place of bytes."""
        return block_of(name, memory)


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
                values = view_of(transport, memory.before, row, "src")
                transport.add(view_of(transport, memory.after, row, "dst"), values, adds[row[_DST]])
        for sends, peer, tag, _, first, stop in phase.messages.tolist():
            rows = (phase.descriptors.sends if sends else phase.descriptors.receives)[first:stop].tolist()
            for part in parts_of(rows, most, phase.itemsize):
                side, arrays = ("src", memory.before) if sends else ("dst", memory.after)
                buffer: Any = None
                if part.is_alone and is_run(part.rows[0], side) and (sends or adds is None):
                    data = _flat(transport, arrays, part.rows[0], side)
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
    """A part that is under way, and what is to be done when it is there.

    Attributes:
        transport: The transport.
        wait: A function that waits for the part.
        after: The arrays to receive into.
        places: The rows to put the bytes of the buffer in; none if they are sent, or received in their place.
        buffer: The buffer that the part is in, if any.
        adds: The dtypes of the tensors, if the part is added.
        free: The buffers that are free.
    """

    transport: Transport
    wait: Callable[[], None]
    after: Mapping[int, Any]
    places: list[Row]
    buffer: Any
    adds: Mapping[int, Any] | None
    free: deque[Any]

    def finish(self) -> None:
        """Wait for the part, put its bytes in their places, and free the buffer."""
        self.wait()
        used = 0
        for row in self.places:
            size, count = row[_BYTES], row[_COUNT]
            view = view_of(self.transport, self.after, row, "dst")
            values = self.transport.runs(self.buffer, used, count, size, size)
            if self.adds is None:
                self.transport.copy(view, values)
            else:
                self.transport.add(view, values, self.adds[row[_DST]])
            used += size * count
        if self.buffer is not None:
            self.free.append(self.buffer)


def _write_own(phase: Phase, transport: Transport, memory: Memory) -> None:
    """Fill padding with zeros, and copy what the holder has itself."""
    for row in phase.descriptors.zeros.tolist():
        view_of(transport, memory.after, row, "dst")[...] = 0
    for row in phase.descriptors.copies.tolist():
        transport.copy(view_of(transport, memory.after, row, "dst"), view_of(transport, memory.before, row, "src"))


def _pack(transport: Transport, arrays: Mapping[int, Any], rows: Sequence[Row], data: Any) -> None:
    """Put the bytes of rows one after the other into a buffer."""
    used = 0
    for row in rows:
        size, count = row[_BYTES], row[_COUNT]
        transport.copy(transport.runs(data, used, count, size, size), view_of(transport, arrays, row, "src"))
        used += size * count


def view_of(transport: Transport, arrays: Mapping[int, Any], row: Row, side: str) -> Any:
    """Give the runs of a row on a side, as a view (count, bytes) of memory that is known to be large enough."""
    if side == "src":
        return transport.runs(arrays[row[_SRC]], row[_SRC_OFFSET], row[_COUNT], row[_BYTES], row[_SRC_STRIDE])
    return transport.runs(arrays[row[_DST]], row[_DST_OFFSET], row[_COUNT], row[_BYTES], row[_DST_STRIDE])


def _flat(transport: Transport, arrays: Mapping[int, Any], row: Row, side: str) -> Any:
    """The bytes of a row that are one run on a side."""
    tensor, start = (_SRC, _SRC_OFFSET) if side == "src" else (_DST, _DST_OFFSET)
    return arrays[row[tensor]][row[start] : row[start] + row[_BYTES] * row[_COUNT]]


def is_run(row: Row, side: str) -> bool:
    """Say if the bytes of a row are one run in the arrays of a side."""
    return row[_COUNT] == 1 or row[_BYTES] == row[_SRC_STRIDE if side == "src" else _DST_STRIDE]


def parts_of(rows: Sequence[Row], most: int | None, itemsize: int = 0) -> Iterator[Part]:
    """Cut the rows of a message into parts that both sides know.

    Args:
        rows: the rows.
        most: the bytes of a buffer, or `None` for one part.
        itemsize: the bytes of an element if the rows are added: then elements stay whole, and all rows go by buffers.

    Large rows that are one run on a side are alone. Only a row that is one run on both sides is longer than a buffer.

    >>> [part.size for part in parts_of([(0, 0, 0, 0, 0, 10, 1, 0, 0), (0, 0, 0, 20, 40, 3, 1, 0, 0)], 8)]
    [8, 5]
    """
    if most is None:
        yield Part(list(rows), sum(row[_BYTES] * row[_COUNT] for row in rows), len(rows) == 1)
        return
    together: list[Row] = []
    used = 0
    for row in rows:
        for piece in [row] if row[_BYTES] * row[_COUNT] <= most else _pieces(row, most, itemsize):
            size = piece[_BYTES] * piece[_COUNT]
            if size > most or (size >= ALONE and not itemsize and (is_run(piece, "src") or is_run(piece, "dst"))):
                yield Part([piece], size, True)
                continue
            if used + size > most:
                yield Part(together, used, False)
                together, used = [], 0
            together.append(piece)
            used += size
    if together:
        yield Part(together, used, False)


def _pieces(row: Row, most: int, itemsize: int) -> Iterator[Row]:
    """A row as rows that a buffer has room for, or as single runs that need none."""
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


def memory_of(
    phases: Sequence[Phase],
    transport: Transport,
    src: Mapping[str, Any],
    out: Mapping[str, Any],
    spare: Mapping[str, Any] | None = None,
) -> tuple[Memory, dict[int, Any]]:
    """Give the bytes of the arrays that a program names, and the dtypes of those that have partial sums; checks both.

    Args:
        phases: those of the program.
        transport: the kind of memory.
        src: the arrays before, by tensor.
        out: those to write into.
        spare: those to receive into, if not `out`.

    Raises:
        LayoutError: if an array is missing, or too small for the rows; if one to write into shares memory with another;
            if one that has partial sums is of another dtype than the plan says.
        ValueError: if an array is not in C order, or cannot be written.
        TypeError: if partial sums of its dtype cannot be added.
    """
    names = phases[0].descriptors.tensors
    found: dict[str, dict[int, Any]] = {}
    written: list[Block] = []
    for what, arrays, side in (("src", src, "src"), ("out", out, "dst"), ("spare", spare, "dst")):
        if arrays is None:
            continue
        instance(what, arrays, Mapping)  # type: ignore[type-abstract]
        found[what] = {}
        for tensor, least in _needed(phases, side):
            if names[tensor] not in arrays:
                raise LayoutError(f"{what} has no array for {shown(names[tensor])}")
            found[what][tensor] = transport.bytes_of(what, names[tensor], arrays[names[tensor]], least)
        blocks = [transport.block_of(named(what, names[tensor]), there) for tensor, there in found[what].items()]
        written += blocks if what != "src" else []
    before, kept = found["src"], found["out"]
    after = found.get("spare", kept)
    for tensor, there in after.items():
        if spare is not None and len(there) != len(kept[tensor]):
            raise LayoutError(f"spare[{shown(names[tensor])}] must be as large as that of out")
    repeats = []
    for name, tensor in repeats_in(out, {names[tensor]: tensor for tensor in kept}):
        there = transport.bytes_of("out", name, out[name], 0)
        if len(there) != len(kept[tensor]):
            raise LayoutError(f"{named('out', name)} has {len(there)} bytes, but the tensor has {len(kept[tensor])}")
        repeats.append((there, kept[tensor]))
        written.append(transport.block_of(named("out", name), there))
    check_apart(written, (transport.block_of(named("src", names[tensor]), there) for tensor, there in before.items()))
    dtypes: dict[int, Any] = {}
    for one in phases[1:]:
        for what, arrays in (("src", src), ("out", out), ("spare", spare)):
            dtypes |= _dtypes(one, what, arrays or {}, names, transport)
    return Memory(before, after, kept, repeats), dtypes


def _needed(phases: Sequence[Phase], side: str) -> Iterator[tuple[int, int]]:
    """The tensors that rows name on a side, each with the bytes that its array must have at least."""
    used = []
    for phase in phases:
        rows = phase.descriptors
        used += [rows.sends, rows.copies] if side == "src" else [rows.receives, rows.copies, rows.zeros]
    least: dict[int, int] = {}
    for each in used:
        ends = each[f"{side}_offset"] + np.maximum(each["count"] - 1, 0) * each[f"{side}_stride"] + each["bytes"]
        for tensor, end in zip(each[f"{side}_tensor"].tolist(), ends.tolist(), strict=True):
            least[tensor] = max(least.get(tensor, 0), end)
    return iter(sorted(least.items()))


def _dtypes(
    one: Phase, what: str, arrays: Mapping[str, Any], names: Sequence[str], transport: Transport
) -> dict[int, Any]:
    """The dtypes of arrays that have partial sums, which are those of the plan."""
    found = {}
    for tensor, wanted in one.dtypes.items():
        array = arrays.get(names[tensor])
        if array is not None:
            if name_of_dtype(array.dtype) != wanted:
                raise LayoutError(
                    f"{named(what, names[tensor])} is of dtype {array.dtype}, but the plan adds up {wanted}"
                )
            transport.check_addable(array.dtype)
            found[tensor] = array.dtype
    return found


def name_of_dtype(dtype: Any) -> str:
    """Give the name of a dtype, the same for that of an array, of a tensor of PyTorch and of a plan.

    >>> name_of_dtype("F32"), name_of_dtype(np.dtype("float32")), name_of_dtype(">f4")
    ('float32', 'float32', '>f4')
    """
    known = find_dtype(dtype)
    return known.name if known is not None else dtype_of(dtype).str
