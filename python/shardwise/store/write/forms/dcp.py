"""PyTorch's distributed checkpoint: a `.distcp` file for each device that owns shards, and a `.metadata` for all.

A file is one container of `torch.save` after another, each with one box of a tensor, beginning at a multiple of 64
bytes. It is written as PyTorch 2.15 does, in the older of the formats that it reads.

A container is a zip archive around the elements of one tensor, whose CRC-32 is known when they are written. Members as
PyTorch's: the pickle, the byte order, the elements, the version; none is compressed, and the elements begin at a
multiple of 64 bytes. Unlike PyTorch's, the headers before the members have their sizes and CRC-32, as in any zip. What
does not fit into 32 bits is in zip64 fields.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...._dtypes import Dtype
from ...._fork import cached_property
from ....errors import LayoutError
from ...formats.torch.pickles import STORAGE_CLASSES
from ...tensors.checkpoint import KeyPath
from .archives import ALIGNMENT, CRC_IN_ENTRY, CRC_IN_LOCAL, ROOT, Member, ZippedFile, directory_entry, end_of, local
from .files import NO_DIGESTS, CutTensor, FileDigests, Headers, slots_of
from .pickles import Call, Global, Items, New, Persistent, pickled
from .slots import Slot, Slots, joined_slots

__all__ = [
    "INDEX",
    "DcpFile",
    "Envelope",
    "dcp_files",
    "dcp_index",
    "envelope_of",
    "is_writable",
    "rebuilt",
    "value_bytes",
]


class Envelope(NamedTuple):
    """The bytes of a container before and after the elements."""

    head: bytes
    tail: bytes


class _Blank(NamedTuple):
    """A container whose CRC-32 fields are 0, and the positions of these fields in its head and its tail."""

    head: bytes
    tail: bytes
    in_head: int
    in_tail: int


def envelope_of(pickle: bytes, size: int, crc: int) -> Envelope:
    """Return the bytes around `size` bytes of elements with this CRC-32. Their lengths do not depend on the CRC-32."""
    blank, said = _blank(pickle, size), crc.to_bytes(4, "little")
    return Envelope(_with(blank.head, blank.in_head, said), _with(blank.tail, blank.in_tail, said))


def value_bytes(value: Any) -> bytes:
    """Return the container of a value that is not a tensor; `pickled` says which values can be written."""
    return b"".join(envelope_of(pickled(value), 0, 0))


def _with(data: bytes, at: int, said: bytes) -> bytes:
    return data[:at] + said + data[at + len(said) :]


@lru_cache(maxsize=1024)
def _blank(pickle: bytes, size: int) -> _Blank:
    # The layers of a model have the same boxes: most containers are made before.
    head, members = bytearray(), []
    for name, data in ((f"{ROOT}/data.pkl", pickle), (f"{ROOT}/byteorder", b"little")):
        members.append(Member(name.encode(), len(head), len(data), zlib.crc32(data)))
        head += local(members[-1]) + data
    elements = Member(f"{ROOT}/data/0".encode(), len(head), size, 0)
    head += local(elements, -(len(head) + len(local(elements))) % ALIGNMENT)
    members.append(elements)
    start, data = len(head) + size, b"3\n"
    version = Member(f"{ROOT}/version".encode(), start, len(data), zlib.crc32(data))
    tail = bytearray(local(version) + data)
    members.append(version)
    directory, in_tail = start + len(tail), 0
    for member in members:
        if member is elements:
            in_tail = len(tail) + CRC_IN_ENTRY
        tail += directory_entry(member)
    tail += end_of(len(members), directory, start + len(tail))
    return _Blank(bytes(head), bytes(tail), elements.at + CRC_IN_LOCAL, in_tail)


#: The name of the index.
INDEX = ".metadata"

_METADATA = "torch.distributed.checkpoint.metadata"
_SIZE = Global("torch", "Size")
_CHUNK, _KEY = Global(_METADATA, "ChunkStorageMetadata"), Global(_METADATA, "MetadataIndex")
_STORED = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
#: The most boxes that are remembered while an index is made.
_MOST_BOXES = 1 << 16


def is_writable(dtype: str) -> bool:
    """Return whether PyTorch has a dtype of this name and can save it."""
    return dtype in STORAGE_CLASSES


#: A box in the index: its file, the number of its slot in the file, and its place in the pool.
_FileChunk = tuple["DcpFile", int, int]


class Containers(NamedTuple):
    """The containers of a file, one per slot: the first byte of each, its size, and the bytes before its elements."""

    begins: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    heads: npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class DcpFile(ZippedFile):
    """A `.distcp` file. Each slot is in a container of its own, which begins at a multiple of 64 bytes."""

    @cached_property
    def containers(self) -> Containers:
        """The containers of the slots.

        Raises:
            LayoutError: if the file would be too large.
        """
        boxes, sizes = self.boxes, self.boxes.nbytes
        heads, tails = np.zeros(len(boxes), np.int64), np.zeros(len(boxes), np.int64)
        for rank, chosen in boxes.table.by_rank(boxes.tensors):
            starts, stops = boxes.table.sides(boxes.places[chosen], rank)
            columns = chosen.tolist(), boxes.tensors[chosen].tolist(), (stops - starts).tolist()
            for position, tensor, shape, size in zip(*columns, sizes[chosen].tolist(), strict=True):
                around = self._envelope(tensor, tuple(shape), size, 0)
                heads[position], tails[position] = len(around.head), len(around.tail)
        lengths = heads + tails + sizes
        ends = np.cumsum(lengths + -lengths % ALIGNMENT)
        if (ends < 0).any() or float(lengths.sum(dtype=float)) > 2.0**62:
            raise LayoutError(f"{self.name}: would have more than 2**63 - 1 bytes")
        begins = np.concatenate([np.zeros(1, np.int64), ends])[:-1]
        return Containers(begins, lengths, heads)

    def _begins(self) -> npt.NDArray[np.int64]:
        return self.containers.begins + self.containers.heads

    @property
    def end(self) -> int:
        """The byte after the last container."""
        return int(self.containers.begins[-1] + self.containers.sizes[-1]) if len(self.boxes) else 0

    def before(self, number: int, digests: FileDigests = NO_DIGESTS) -> tuple[int, bytes]:
        """Return the bytes between two slots: the end of one container and the beginning of the next."""
        at, text = 0, b""
        if number:
            at, text = self.slots[number - 1].end, self._around(number - 1, self.slots[number - 1], digests).tail
        if number == len(self.slots):
            return at, text
        begin = int(self.containers.begins[number])
        return at, text + bytes(begin - at - len(text)) + self._around(number, self.slots[number], digests).head

    def headers(self, digests: FileDigests = NO_DIGESTS) -> Headers:
        """Yield the bytes around tensors, slot by slot, as `before` gives them.

        The digest that is returned is that of `tensors.headers`: the CRC-32 of a container does not cover its headers.
        """
        digest = hashlib.sha256()
        at, text = 0, b""
        for number, slot in enumerate(self.slots):
            around = self._around(number, slot, digests)
            text += bytes(int(self.containers.begins[number]) - at - len(text)) + around.head
            digest.update(text)
            if self.wanted[slot.tensor].is_object:
                digest.update(digests.crcs.get(number, 0).to_bytes(4, "little"))
            if text:
                yield at, text
            at, text = slot.end, around.tail
        digest.update(text)
        if text:
            yield at, text
        return digest.hexdigest()

    def _around(self, number: int, slot: Slot, digests: FileDigests) -> Envelope:
        shape = tuple(stop - start for start, stop in slot.box)
        return self._envelope(slot.tensor, shape, slot.end - slot.begin, digests.crcs.get(number, 0))

    def _envelope(self, tensor: int, shape: tuple[int, ...], size: int, crc: int) -> Envelope:
        wanted = self.wanted[tensor]
        if wanted.is_object:
            return Envelope(b"", b"")  # It is already a container.
        return envelope_of(tensor_pickle(wanted.dtype, shape), size, crc)


def dcp_files(wanted: Sequence[CutTensor]) -> list[DcpFile]:
    """Return one file for each device that owns shards. The owner of a shard is the first device that holds it."""
    held: dict[int, list[Slots]] = {}
    for (device, _), slots in slots_of(wanted, range(len(wanted))).items():
        held.setdefault(device, []).append(slots)
    return [
        DcpFile(f"__{rank}_0.distcp", joined_slots(held[device]), wanted) for rank, device in enumerate(sorted(held))
    ]


@lru_cache(maxsize=1024)
def tensor_pickle(dtype: Dtype, shape: tuple[int, ...]) -> bytes:
    """Return the pickle in a container, which rebuilds the tensor from its storage."""
    return pickled(rebuilt(dtype, shape, "0"))


def rebuilt(dtype: Dtype, shape: tuple[int, ...], key: str) -> Call:
    """Return the call, as a pickle has it, that rebuilds a tensor from the storage with this key."""
    strides, step = [1] * len(shape), 1
    for dim in reversed(range(len(shape))):
        strides[dim] = step
        step *= max(shape[dim], 1)
    kind = STORAGE_CLASSES[dtype.name]
    count = math.prod(shape)
    hooks = Call(Global("collections", "OrderedDict"), ())
    if kind is not None:
        storage = Persistent(("storage", Global("torch", kind), key, "cpu", count))
        args: tuple[Any, ...] = (storage, 0, shape, tuple(strides), False, hooks)
        return Call(Global("torch._utils", "_rebuild_tensor_v2"), args)
    storage = Persistent(("storage", Global("torch.storage", "UntypedStorage"), key, "cpu", count * dtype.bits // 8))
    args = (storage, 0, shape, tuple(strides), False, hooks, Global("torch", dtype.name))
    return Call(Global("torch._utils", "_rebuild_tensor_v3"), args)


def dcp_index(
    files: Sequence[DcpFile], wanted: Sequence[CutTensor], aliases: Mapping[str, str], paths: Mapping[str, KeyPath]
) -> bytes:
    """Return the bytes of the `.metadata` file of a checkpoint.

    Args:
        files: The `.distcp` files.
        wanted: The tensors and objects of the checkpoint.
        aliases: Further names of tensors, each with the name under which the elements are written.
        paths: The path of each tensor in a nested state dict; a tensor without a path is at the top level.
    """
    chunks: list[list[_FileChunk]] = [[] for _ in wanted]
    for file in files:
        slots = file.slots
        for number, (tensor, place) in enumerate(zip(slots.tensors.tolist(), slots.places.tolist(), strict=True)):
            chunks[tensor].append((file, number, place))
    named = [(tensor.name, tensor, chunks[i]) for i, tensor in enumerate(wanted)]
    by_name = {name: (tensor, held) for name, tensor, held in named}
    named += [(alias, *by_name[name]) for alias, name in aliases.items()]
    boxes = _BoxEntries()
    state = {
        "state_dict_metadata": Items((name, _entry(tensor, held, boxes)) for name, tensor, held in named),
        "planner_data": Items((name, paths.get(name, (name,))) for name, *_ in named),
        "storage_data": Items(pair for name, tensor, held in named for pair in _places(name, tensor, held, boxes)),
        "storage_meta": None,
        "version": "1.0.0",
    }
    return pickled(New(Global(_METADATA, "Metadata"), state))


def _entry(tensor: CutTensor, chunks: Sequence[_FileChunk], boxes: _BoxEntries) -> New:
    if tensor.is_object:
        return New(Global(_METADATA, "BytesStorageMetadata"), {})
    layout = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = Call(Global(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
    # Without strides, which PyTorch has written since about 2.9, but does not need.
    properties = (Global("torch", tensor.dtype.name), layout, False, contiguous, False)
    state = {
        "properties": New(Global(_METADATA, "TensorProperties"), properties),
        "size": Call(_SIZE, (tensor.shape,)),
        "chunks": (
            New(_CHUNK, dict(zip(("offsets", "sizes"), boxes.of(file, place, tensor), strict=True)))
            for file, _, place in chunks
        ),
    }
    return New(Global(_METADATA, "TensorStorageMetadata"), state)


def _places(
    name: str, tensor: CutTensor, chunks: Sequence[_FileChunk], boxes: _BoxEntries
) -> Iterator[tuple[New, New]]:
    for index, (file, number, place) in enumerate(chunks):
        offset, length = int(file.containers.begins[number]), int(file.containers.sizes[number])
        if tensor.is_object:
            key: dict[str, Any] = {"fqn": name, "index": None}
        else:
            key = {"fqn": name, "index": index, "offset": boxes.of(file, place, tensor)[0]}
        yield New(_KEY, key), New(_STORED, {"relative_path": file.name, "offset": offset, "length": length})


class _BoxEntries:
    """The entries of boxes in an index, kept by place in the pool: tensors cut alike share them."""

    def __init__(self) -> None:
        self._said: dict[tuple[int, int], tuple[Call, Call]] = {}

    def of(self, file: DcpFile, place: int, tensor: CutTensor) -> tuple[Call, Call]:
        """Return the start and the sizes of a box of a tensor, as calls in the index's pickle."""
        key = place, len(tensor.shape)
        found = self._said.get(key)
        if found is None:
            start, stop = file.slots.table.sides(np.array([place]), len(tensor.shape))
            found = tuple(Call(_SIZE, (tuple(sizes[0].tolist()),)) for sizes in (start, stop - start))  # type: ignore[assignment]
            assert found is not None
            if len(self._said) < _MOST_BOXES:
                self._said[key] = found
        return found
