"""The program of one holder in a plan of a model: its messages over all tensors, in an order without deadlock."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..._arguments import instance, integer
from ..._frozen import frozen
from ..._text import shown
from ...errors import LayoutError
from .descriptors import DESCRIPTOR, Descriptors
from .memory import block_of, check_apart, named, repeats_in

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]
    Bytes = npt.NDArray[np.uint8]
    Rows = npt.NDArray[np.void]

__all__ = ["MESSAGE", "Memory", "ModelProgram", "program_of"]

#: The fields of a message: whether it is sent, or else received; the position of the other holder in the peers; its
#: number among those that the sender sends to the receiver; its bytes; and the rows of `sends` or `receives` in it.
MESSAGE = np.dtype(
    [
        ("sends", np.bool_),
        ("peer", np.int64),
        ("tag", np.int64),
        ("bytes", np.int64),
        ("first", np.int64),
        ("stop", np.int64),
    ]
)


class Memory(NamedTuple):
    """The bytes of a holder's arrays, for those who carry out its program.

    Attributes:
        before: The arrays before, by the positions of the tensors.
        after: The arrays to write into, by the positions of the tensors.
        repeats: Each further place of a tensor in a parameter, and the array that has the tensor.
    """

    before: dict[int, Bytes]
    after: dict[int, Bytes]
    repeats: list[tuple[Bytes, Bytes]]

    def repeat(self) -> None:
        """Copy tensors to their further places, when everything has been received."""
        for there, first in self.repeats:
            there[...] = first


@dataclass(frozen=True, eq=False, repr=False)
class ModelProgram:
    """The part of one holder in a plan of a model, message by message; `ModelPlan.program` makes one.

    All that goes from one holder to another is one list of rows over all tensors, cut into messages of a size that both
    sides know. A message is the bytes of its rows one after the other. The tag is the number of the message between the
    two in this direction, so tags cannot clash. The messages are in an order without deadlock, even if each send waits
    for its receive: all holders follow one order, in which they take turns.

    Attributes:
        descriptors: The rows of the holder, cut where a message ends.
        messages: A structured array: `sends`, `peer`, `tag`, `bytes`, and `first` and `stop`, the message's rows in
            `descriptors.sends` or `descriptors.receives`.
    """

    descriptors: Descriptors
    messages: Rows

    def digest(self, peer: Any) -> bytes:
        """Give 32 bytes that are equal on both sides if two holders agree on all that they send to each other.

        Raises:
            LayoutError: if there is no such peer.
        """
        own, other = (self._position(label) for label in (self.descriptors.holder, peer))
        digest = hashlib.sha256()
        # The lower of the two first, so that both hash the same.
        for sends in (True, False) if own < other else (False, True):
            rows = self.descriptors.sends if sends else self.descriptors.receives
            mine = rows[rows["peer"] == other].copy()
            used = np.unique(np.concatenate([mine["src_tensor"], mine["dst_tensor"]]))
            names = {tensor: self.descriptors.tensors[tensor] for tensor in used.tolist()}
            mine["peer"] = 0
            chosen = self.messages[(self.messages["peer"] == other) & (self.messages["sends"] == sends)]
            digest.update(repr((len(mine), list(names.items()), chosen["bytes"].tolist())).encode())
            digest.update(mine.tobytes())
        return digest.digest()

    def run(
        self,
        src: Mapping[str, Array],
        out: Mapping[str, Array],
        send: Callable[[Any, int, Bytes], Any],
        receive: Callable[[Any, int, Bytes], Any],
    ) -> None:
        """Carry out the messages one after the other.

        Args:
            src: the holder's arrays before, by tensor, in C order.
            out: the arrays to write into, by tensor, in C order, which share no memory with those of `src`, nor with
                one another. What `LocalParameter.views` gives for further places of a tensor (`Repeat`) is filled too.
            send: called with a peer's label, a tag and bytes, which are only valid until it returns.
            receive: called with a peer's label, a tag and an array of bytes to fill: the memory of `out` itself where
                the message is one run there.

        Raises:
            LayoutError: if an array is missing, or too small for the rows; if one to write into shares memory with
                another. Before anything is sent.
            ValueError: if an array is not in C order, or cannot be written.

        >>> import numpy as np
        >>> from queue import Queue
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> from shardwise import DeviceMesh, TensorLayout, plan_model
        >>> mesh = DeviceMesh((2,), ("x",))
        >>> rows, columns = TensorLayout(("x", None), mesh), TensorLayout((None, "x"), mesh)
        >>> plan = plan_model({"w": rows}, {"w": columns}, {"w": ((2, 2), "int64")})
        >>> mail = {holder: Queue() for holder in mesh.devices}
        >>> def run(holder, shard):
        ...     out = np.empty((2, 1), int)
        ...     plan.program(holder).run(
        ...         {"w": shard}, {"w": out},
        ...         lambda peer, tag, data: mail[peer].put(data.copy()),
        ...         lambda peer, tag, data: np.copyto(data, mail[holder].get()),
        ...     )
        ...     return out.ravel().tolist()
        >>> with ThreadPoolExecutor(2) as pool:
        ...     list(pool.map(run, ["cpu:0", "cpu:1"], [np.array([[1, 2]]), np.array([[3, 4]])]))
        [[1, 3], [2, 4]]
        """
        memories = self.memory_of(src, out)
        self.fill(memories)
        for sends, peer, tag, size, first, stop in self.messages.tolist():
            memory, side = (memories.before, "src") if sends else (memories.after, "dst")
            rows = (self.descriptors.sends if sends else self.descriptors.receives)[first:stop]
            views = [view_of(memory[int(row[f"{side}_tensor"])], row, side) for row in rows]
            label = self.descriptors.peers[peer]
            direct = len(views) == 1 and len(views[0]) == 1
            data = views[0][0] if direct else np.empty(size, np.uint8)
            if sends:
                if not direct:
                    np.concatenate([view.ravel() for view in views], out=data)
                send(label, tag, data)
                continue
            receive(label, tag, data)
            if not direct:
                at = 0
                for view in views:
                    view[...] = data[at : at + view.size].reshape(view.shape)
                    at += view.size
        memories.repeat()

    def _position(self, label: Any) -> int:
        try:
            return self.descriptors.peers.index(label)
        except ValueError:
            raise LayoutError(f"holder {shown(label)} is not in the plan") from None

    def memory_of(self, src: Mapping[str, Array], out: Mapping[str, Array]) -> Memory:
        """Give the bytes of the arrays that the rows name; for those who carry it out.

        Args:
            src: the arrays before, by tensor.
            out: those to write into, by tensor.

        Raises:
            LayoutError: if an array is missing, or too small for the rows; if one to write into shares memory with
                another of `out` or `src`.
            ValueError: if an array is not in C order, or cannot be written.
        """
        names = self.descriptors.tensors
        found: dict[str, dict[int, Bytes]] = {"src": {}, "out": {}}
        for what, arrays, side in (("src", src, "src"), ("out", out, "dst")):
            instance(what, arrays, Mapping)  # type: ignore[type-abstract]
            for tensor, least in self.needed(side):
                if names[tensor] not in arrays:
                    raise LayoutError(f"{what} has no array for {shown(names[tensor])}")
                found[what][tensor] = _bytes_of(what, names[tensor], arrays[names[tensor]], least)
        after = found["out"]
        again = repeats_in(out, {names[tensor]: tensor for tensor in after})
        repeats = [(_bytes_of("out", name, out[name], 0), after[tensor]) for name, tensor in again]
        for (name, _), (there, first) in zip(again, repeats, strict=True):
            if there.size != first.size:
                raise LayoutError(f"{named('out', name)} has {there.size} bytes, but the tensor has {first.size}")
        written = [block_of(named("out", names[tensor]), memory) for tensor, memory in after.items()]
        written += [block_of(named("out", name), there) for (name, _), (there, _) in zip(again, repeats, strict=True)]
        check_apart(written, (block_of(named("src", names[tensor]), memory) for tensor, memory in found["src"].items()))
        return Memory(found["src"], after, repeats)

    def fill(self, memory: Memory) -> None:
        """Copy what the holder has itself, and fill padding with zeros, in the memory that `memory_of` gives."""
        for row in self.descriptors.zeros:
            view_of(memory.after[int(row["dst_tensor"])], row, "dst")[...] = 0
        for row in self.descriptors.copies:
            view_of(memory.after[int(row["dst_tensor"])], row, "dst")[...] = view_of(
                memory.before[int(row["src_tensor"])], row, "src"
            )

    def needed(self, side: str) -> Iterator[tuple[int, int]]:
        """Give the tensors that rows name, each with the bytes that its array must have at least.

        Args:
            side: `"src"` for those that are read, `"dst"` for those that are written.
        """
        rows = self.descriptors
        used = (rows.sends, rows.copies) if side == "src" else (rows.receives, rows.copies, rows.zeros)
        least: dict[int, int] = {}
        for each in used:
            ends = each[f"{side}_offset"] + np.maximum(each["count"] - 1, 0) * each[f"{side}_stride"] + each["bytes"]
            for tensor, end in zip(each[f"{side}_tensor"].tolist(), ends.tolist(), strict=True):
                least[tensor] = max(least.get(tensor, 0), end)
        return iter(sorted(least.items()))

    def __repr__(self) -> str:
        return f"<ModelProgram of {shown(self.descriptors.holder)}: {len(self.messages)} messages>"


def _bytes_of(what: str, name: str, array: Any, least: int) -> Bytes:
    """The bytes of an array that is large enough."""
    if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
        raise ValueError(f"{named(what, name)} must be a numpy array in C order")
    if what == "out" and not array.flags.writeable:
        raise ValueError(f"{named(what, name)} is read-only")
    if array.nbytes < least:
        raise LayoutError(f"{named(what, name)} has {array.nbytes} bytes; the plan needs {least}")
    return array.reshape(-1).view(np.uint8)


def view_of(memory: Bytes, row: Any, side: str) -> Bytes:
    """Give the runs of a row as an array (count, bytes) over memory that is known to be large enough."""
    count, size = int(row["count"]), int(row["bytes"])
    start, stride = int(row[f"{side}_offset"]), int(row[f"{side}_stride"])
    if count == 1:
        return memory[start : start + size].reshape(1, size)
    return np.lib.stride_tricks.as_strided(memory[start:], (count, size), (stride, 1))


def program_of(descriptors: Descriptors, memory: int | None) -> ModelProgram:
    """Make the program of a holder; see `ModelPlan.program`."""
    # No message has more bytes than 64 bits count.
    most = None if memory is None else min(integer("memory", memory), 2**63 - 1)
    if most is not None and most < 1:
        raise LayoutError(f"memory is {shown(most)}; a message has at least one byte")
    own, count = descriptors.peers.index(descriptors.holder), len(descriptors.peers)
    found: list[Rows] = []
    cut: dict[bool, Rows] = {}
    for sends, rows in ((True, descriptors.sends), (False, descriptors.receives)):
        pieces, numbers = (rows, np.zeros(len(rows), np.int64)) if most is None else _cut(rows, most)
        cut[sends] = frozen(pieces)
        if not len(pieces):
            continue
        # Rows are sorted by peer, and the messages of a peer follow each other.
        starts = np.flatnonzero(
            np.concatenate([[True], (pieces["peer"][1:] != pieces["peer"][:-1]) | (numbers[1:] != numbers[:-1])])
        )
        messages = np.zeros(len(starts), MESSAGE)
        messages["sends"], messages["peer"], messages["tag"] = sends, pieces["peer"][starts], numbers[starts]
        messages["bytes"] = np.add.reduceat(pieces["bytes"] * pieces["count"], starts)
        messages["first"], messages["stop"] = starts, np.append(starts[1:], len(pieces))
        found.append(messages)
    messages = np.concatenate(found) if found else np.zeros(0, MESSAGE)
    # In the n-th turn of each round every holder sends to the n-th after it, and receives from the n-th before it.
    turn = np.where(messages["sends"], messages["peer"] - own, own - messages["peer"]) % count
    # Of what two exchange in one turn, the message of the first of them is first.
    sender = np.where(messages["sends"], own, messages["peer"])
    order = np.lexsort((sender, turn, messages["tag"]))
    return ModelProgram(replace(descriptors, sends=cut[True], receives=cut[False]), frozen(messages[order]))


def _cut(rows: Rows, most: int) -> tuple[Rows, npt.NDArray[np.int64]]:
    """Rows cut where a message of `most` bytes to a peer ends, and the number of the message that each is in."""
    sizes = rows["bytes"] * rows["count"]
    ends = np.cumsum(sizes)
    begins = ends - sizes
    is_first = np.concatenate([[True], rows["peer"][1:] != rows["peer"][:-1]])[: len(rows)]
    # From the beginning of the peer's stream.
    begins = begins - np.repeat(begins[is_first], np.diff(np.append(np.flatnonzero(is_first), len(rows))))
    first, last = begins // most, (begins + np.maximum(sizes, 1) - 1) // most
    crossing = np.flatnonzero(first != last)
    if not len(crossing):
        return rows, first
    found, numbers, done = [], [], 0
    for at in crossing.tolist():
        found.append(rows[done:at])
        numbers.append(first[done:at])
        parts = list(_parts(rows[at], int(begins[at]), most))
        found.append(np.array([part for part, _ in parts], DESCRIPTOR))
        numbers.append(np.array([number for _, number in parts], np.int64))
        done = at + 1
    return np.concatenate([*found, rows[done:]]), np.concatenate([*numbers, first[done:]])


def _parts(row: Any, begin: int, most: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """A row as the parts of it that are in one message each: parts of runs, and whole runs."""
    *who, src, dst, size, count, src_stride, dst_stride = row.tolist()
    at, whole = 0, size * count
    while at < whole:
        number = (begin + at) // most
        stop = min(whole, (number + 1) * most - begin)
        while at < stop:
            run, within = divmod(at, size)
            if within or stop - at < size:
                length, times = min(size - within, stop - at), 1
            else:
                length, times = size, (stop - at) // size
            offsets = src + run * src_stride + within, dst + run * dst_stride + within
            strides = (src_stride, dst_stride) if times > 1 else (0, 0)
            yield (*who, *offsets, length, times, *strides), number
            at += length * times
