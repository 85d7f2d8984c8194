"""The program of one holder in a plan of a model: its messages over all tensors, in an order without deadlock."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..._arguments import integer
from ..._frozen import frozen
from ..._text import counted, shown
from ...errors import LayoutError
from ..plan import ReshardPlan
from .descriptors import DESCRIPTOR, Descriptors
from .groups import GroupedTensors, TensorGroup
from .rows import descriptors_of
from .runner import carry_out
from .transport import MessagePart, Phase, Transport, memory_of, name_of_dtype

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]
    Bytes = npt.NDArray[np.uint8]
    Rows = npt.NDArray[np.void]

__all__ = ["MESSAGE", "ONE", "ModelProgram", "program_of", "program_of_one"]

#: The name of the tensor of a plan that has only one.
ONE = "tensor"

#: The fields of a message: whether it is sent or received; the other holder's position in the peers; its number among
#: the messages from the sender to the receiver; its size in bytes; and its rows of `sends` or `receives`.
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
        sums: The further addends of partial sums: the second ones, the third, …, in the order of their coordinates,
            each with rows and messages of its own. A runner adds them one after the other, each as a whole.
    """

    descriptors: Descriptors
    messages: Rows
    sums: tuple[Phase, ...] = ()

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The first phase, whose rows and messages are written, followed by `sums`."""
        return Phase(self.descriptors, self.messages), *self.sums

    def digest(self, peer: Any) -> bytes:
        """Return 32 bytes that are equal on both sides if two holders agree on all messages between them.

        Raises:
            LayoutError: if there is no such peer.
        """
        digest = hashlib.sha256()
        for phase in self.phases:
            digest.update(phase.descriptors.digest(peer))
            chosen = phase.messages[phase.messages["peer"] == self.descriptors.peers.index(peer)]
            for sends in (True, False) if self._is_before(peer) else (False, True):
                digest.update(repr(chosen["bytes"][chosen["sends"] == sends].tolist()).encode())
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
            src: the arrays that the holder has, by tensor, in C order.
            out: the arrays to write into, by tensor, in C order, which share no memory with those of `src`, nor with
                one another. Further places of a tensor (`Repeat`, from `LocalParameter.views`) are filled too.
            send: called with a peer's label, a tag and bytes, which are only valid until it returns.
            receive: called with a peer's label, a tag and an array of bytes to fill: the memory of `out` itself where
                the message is one run there.

        Raises:
            LayoutError: if an array is missing, or too small for the rows; if one to write into shares memory with
                another; if one with partial sums is of another dtype than the plan has. It is raised before anything is
                sent.
            ValueError: if an array is not in C order, or cannot be written.
            TypeError: if partial sums of a dtype cannot be added.

        Partial sums are added in the order of their coordinates, by `numpy.add`.

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
        transport = _Functions(self.descriptors.peers, send, receive)
        memory, dtypes = memory_of(self.phases, transport, src, out)
        carry_out(self.phases, transport, memory, dtypes)
        memory.repeat()

    def _is_before(self, peer: Any) -> bool:
        """True if the holder is listed before the peer."""
        peers = self.descriptors.peers
        return peers.index(self.descriptors.holder) < peers.index(peer)

    def __repr__(self) -> str:
        count = sum(len(phase.messages) for phase in self.phases)
        return f"<ModelProgram of {shown(self.descriptors.holder)}: {counted(count, 'message')}>"


class _Functions(Transport):
    """A transport made of two functions that wait until a message is done: see `ModelProgram.run`."""

    most = None

    def __init__(self, peers: Sequence[Any], send: Callable[..., Any], receive: Callable[..., Any]) -> None:
        self._peers, self._send, self._receive = peers, send, receive

    def send(self, peer: int, tag: int, data: Any, part: MessagePart) -> Callable[[], None]:
        self._send(self._peers[peer], tag, data)
        return _done

    def receive(self, peer: int, tag: int, data: Any, part: MessagePart) -> Callable[[], None]:
        self._receive(self._peers[peer], tag, data)
        return _done


def _done() -> None:
    pass


def program_of_one(
    plan: ReshardPlan, dtype: np.dtype[Any], holder: int, holders: tuple[Sequence[int], Sequence[int]], count: int
) -> ModelProgram:
    """Return the program of a holder for one tensor, called `ONE`; holders are numbers.

    Args:
        plan: The plan of the tensor.
        dtype: The tensor's dtype.
        holder: The number of the holder.
        holders: The number of each holder of the source, and of each of the destination.
        count: The number of all holders.
    """
    first, bits = np.zeros(1, np.int64), np.array([8 * dtype.itemsize])
    ends = [np.array(side, np.int64) for side in holders]
    group = TensorGroup(plan, first, first[:, None], bits, ends[0], ends[1], None, {})
    return program_of(holder, GroupedTensors(tuple(range(count)), (ONE,), (name_of_dtype(dtype),), [group]))


def program_of(holder: Any, model: GroupedTensors, memory: int | None = None) -> ModelProgram:
    """Make the program of a holder; see `ModelPlan.program`.

    Args:
        holder: The label of the holder.
        model: The tensors by their plans.
        memory: The most bytes of a message.
    """
    # No message has more bytes than 64 bits count.
    most = None if memory is None else min(integer("memory", memory), 2**63 - 1)
    if most is not None and most < 1:
        raise LayoutError(f"memory is {shown(most)}; a message has at least one byte")
    #: The number of messages to and from each peer so far.
    counts = {sends: np.zeros(len(model.peers), np.int64) for sends in (True, False)}
    written = _messages(descriptors_of(holder, model), most, counts)
    sums = []
    for addend in range(1, max((group.plan.addends for group in model.groups), default=1)):
        having = [group for group in model.groups if group.plan.addends > addend]
        for bits in sorted({size for group in having for size in group.bits.tolist()}):
            alike, itemsize = [group.only(group.bits == bits) for group in having], max(bits // 8, 1)
            if most is not None and most < itemsize:
                raise LayoutError(f"memory is {shown(most)}; a message of partial sums has at least {itemsize} bytes")
            rows = descriptors_of(holder, model._replace(groups=alike), addend)
            # All rows have elements of one size: so a message ends where an element does.
            cut = _messages(rows, None if most is None else most // itemsize * itemsize, counts)
            numbers = [number for group in alike for number in group.tensors.tolist()]
            sums.append(Phase(*cut, {number: model.dtypes[number] for number in numbers}, itemsize))
    return ModelProgram(*written, tuple(sums))


def _messages(
    descriptors: Descriptors, most: int | None, counts: Mapping[bool, npt.NDArray[np.int64]]
) -> tuple[Descriptors, Rows]:
    """Cut rows at the ends of messages, and return the messages in order; `counts` is increased by their numbers."""
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
        messages["sends"], messages["peer"] = sends, pieces["peer"][starts]
        messages["tag"] = numbers[starts] + counts[sends][messages["peer"]]
        np.maximum.at(counts[sends], messages["peer"], messages["tag"] + 1)
        messages["bytes"] = np.add.reduceat(pieces["bytes"] * pieces["count"], starts)
        messages["first"], messages["stop"] = starts, np.append(starts[1:], len(pieces))
        found.append(messages)
    messages = np.concatenate(found) if found else np.zeros(0, MESSAGE)
    # In the n-th turn of each round every holder sends to the n-th after it, and receives from the n-th before it.
    turn = np.where(messages["sends"], messages["peer"] - own, own - messages["peer"]) % count
    # Of what two exchange in one turn, the message of the first of them is first.
    sender = np.where(messages["sends"], own, messages["peer"])
    order = np.lexsort((sender, turn, messages["tag"]))
    return replace(descriptors, sends=cut[True], receives=cut[False]), frozen(messages[order])


def _cut(rows: Rows, most: int) -> tuple[Rows, npt.NDArray[np.int64]]:
    """Return rows cut at the ends of messages of `most` bytes to a peer, and the number of each row's message."""
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
    """Yield the parts of a row that are in one message each: parts of runs, and whole runs."""
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
