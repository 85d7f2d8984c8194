"""The transport of a program's messages, and the memory of a holder's arrays."""

from __future__ import annotations

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
from .memory import Block, array_name, block_of, check_apart, repeats_in

__all__ = ["Memory", "MessagePart", "Phase", "RowNumbers", "Transport", "memory_of", "name_of_dtype"]

#: A row of descriptors, as a tuple.
RowNumbers = tuple[int, ...]


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
        """Copy tensors to their further places, after everything has been received."""
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


class MessagePart(NamedTuple):
    """A part of a message that is sent at once.

    Attributes:
        rows: Its rows, whose bytes follow one another.
        size: Its size in bytes.
        is_alone: Whether it is one row that may be sent from memory to memory without a buffer, if it is one run.
    """

    rows: list[RowNumbers]
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

    def send(self, peer: int, tag: int, data: Any, part: MessagePart) -> Callable[[], None]:
        """Begin to send a part.

        Args:
            peer: the position of the peer.
            tag: the number of the message between the two.
            data: the memory that begins with the part.
            part: its rows, its size, and whether it goes without a buffer.

        Returns:
            A function that waits until the memory may be used again.
        """
        raise NotImplementedError

    def receive(self, peer: int, tag: int, data: Any, part: MessagePart) -> Callable[[], None]:
        """Begin to receive a part; see `send`. The function that it returns waits until the part is there."""
        raise NotImplementedError

    def empty(self, size: int) -> Any:
        """Return a new buffer."""
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
        """Return the bytes of an array, which must have at least `least`; `what` and `name` are for messages.

        Raises:
            ValueError: if it is not in C order, or is read-only and written.
            LayoutError: if it is too small.
        """
        if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
            raise ValueError(f"{array_name(what, name)} must be a numpy array in C order")
        if what == "out" and not array.flags.writeable:
            raise ValueError(f"{array_name(what, name)} is read-only")
        if array.nbytes < least:
            raise LayoutError(f"{array_name(what, name)} has {array.nbytes} bytes; the plan needs {least}")
        return array.reshape(-1).view(np.uint8)

    def block_of(self, name: str, memory: Any) -> Block:
        """Return the place of bytes in memory, to find overlaps."""
        return block_of(name, memory)


def memory_of(
    phases: Sequence[Phase],
    transport: Transport,
    src: Mapping[str, Any],
    out: Mapping[str, Any],
    spare: Mapping[str, Any] | None = None,
) -> tuple[Memory, dict[int, Any]]:
    """Return the bytes of the arrays that a program names, and the dtypes of those that have partial sums; checks both.

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
        blocks = [transport.block_of(array_name(what, names[tensor]), there) for tensor, there in found[what].items()]
        written += blocks if what != "src" else []
    before, kept = found["src"], found["out"]
    after = found.get("spare", kept)
    for tensor, there in after.items():
        if spare is not None and len(there) != len(kept[tensor]):
            raise LayoutError(f"spare[{shown(names[tensor])}] must be as large as the same array of out")
    repeats = []
    for name, tensor in repeats_in(out, {names[tensor]: tensor for tensor in kept}):
        there = transport.bytes_of("out", name, out[name], 0)
        if len(there) != len(kept[tensor]):
            raise LayoutError(
                f"{array_name('out', name)} has {len(there)} bytes, but the tensor has {len(kept[tensor])}"
            )
        repeats.append((there, kept[tensor]))
        written.append(transport.block_of(array_name("out", name), there))
    check_apart(
        written, (transport.block_of(array_name("src", names[tensor]), there) for tensor, there in before.items())
    )
    dtypes: dict[int, Any] = {}
    for one in phases[1:]:
        for what, arrays in (("src", src), ("out", out), ("spare", spare)):
            dtypes |= _dtypes(one, what, arrays or {}, names, transport)
    return Memory(before, after, kept, repeats), dtypes


def _needed(phases: Sequence[Phase], side: str) -> Iterator[tuple[int, int]]:
    """Return the tensors that rows name on a side, each with the least bytes that its array must have."""
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
    """Return the dtypes of arrays that have partial sums, after checking them against the plan."""
    found = {}
    for tensor, wanted in one.dtypes.items():
        array = arrays.get(names[tensor])
        if array is not None:
            if name_of_dtype(array.dtype) != wanted:
                raise LayoutError(
                    f"{array_name(what, names[tensor])} is of dtype {array.dtype}, but the plan adds up {wanted}"
                )
            transport.check_addable(array.dtype)
            found[tensor] = array.dtype
    return found


def name_of_dtype(dtype: Any) -> str:
    """Return the name of a dtype, the same for that of an array, of a tensor of PyTorch and of a plan.

    >>> name_of_dtype("F32"), name_of_dtype(np.dtype("float32")), name_of_dtype(">f4")
    ('float32', 'float32', '>f4')
    """
    known = find_dtype(dtype)
    return known.name if known is not None else dtype_of(dtype).str
