"""The files of a new checkpoint: which tensors and boxes each has, at which byte, and what surrounds them."""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ...._dtypes import Dtype
from ...._fork import cached_property
from ...._text import bytes_text
from ....errors import LayoutError, ParseError, SizeOverflowError
from ....mesh import DeviceMesh
from ....partition import Partition
from ....pieces import Bounds
from ....shared_tiling import SharedTiling
from ...data.parts import SHARDING_INFO, part_mark
from .slots import BoxPool, OwnedBoxes, Shaped, Slots, SlotTable, digits_of

__all__ = [
    "NO_DIGESTS",
    "CutTensor",
    "Extent",
    "FileArray",
    "FileDigests",
    "HeaderLengths",
    "HeaderText",
    "Headers",
    "NamedTensor",
    "SafetensorsFile",
    "TargetFile",
    "WrittenFile",
    "begins_of",
    "file_order",
    "hugging_face_files",
    "index_of",
    "sharded_files",
    "single_file",
    "slots_by_file",
    "slots_of",
    "whole_slots",
]

#: The longest header that the format allows.
_MOST_HEADER = 100_000_000
#: Space for a hexadecimal digest, which is known when the data has been written.
_NO_DIGEST = "0" * 32
#: The label of a device of a mesh that was given none.
_DEFAULT = re.compile(r"cpu:(0|[1-9][0-9]{0,17})")


class NamedTensor(Shaped, Protocol):
    """A tensor, as far as the files describe it."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def dtype(self) -> Dtype:
        """Its dtype."""

    @property
    def is_object(self) -> bool:
        """True if the value is not a tensor."""


class CutTensor(NamedTensor, Protocol):
    """A tensor with the way in which it is cut."""

    @property
    def partition(self) -> Partition | SharedTiling | None:
        """The partition that cuts the tensor; `None` if it is written whole."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""


class FileArray(NamedTuple):
    """An array of a file, in C order.

    Attributes:
        tensor: The position of the tensor of which it has boxes.
        shape: Its shape.
        parts: For each of its slots the position, the box, and where that begins in the array.
    """

    tensor: int
    shape: tuple[int, ...]
    parts: Sequence[tuple[int, Bounds, Sequence[int]]]


class TensorFacts(NamedTuple):
    """The facts of a tensor that a file states."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    itemsize: int
    is_object: bool


def facts_of(tensor: NamedTensor) -> TensorFacts:
    """Return the facts of a tensor that a file states, without anything else that is known of the tensor."""
    return TensorFacts(tensor.name, tensor.dtype, tensor.shape, tensor.itemsize, tensor.is_object)


class FileDigests(NamedTuple):
    """The digests of what a file holds, as far as they are known.

    Attributes:
        tensors: The digest of what it holds of each tensor, by the tensor's position.
        crcs: The CRC-32 of each slot, by its position, for files that have them.
    """

    tensors: Mapping[int, int]
    crcs: Mapping[int, int]


NO_DIGESTS = FileDigests({}, {})

#: The bytes of a file besides those of tensors, each run with the byte at which it begins; returns their SHA-256.
Headers = Generator[tuple[int, bytes], None, str]


class Extent(NamedTuple):
    """The first byte of a file's data, and the bytes of the file."""

    start: int
    size: int


class HeaderText(NamedTuple):
    """The contents of headers besides tensors.

    Attributes:
        metadata: The contents of `__metadata__`, besides what follows from the slots.
        has_digests: Whether there is a digest for each tensor; else the manifest has them.
        has_offsets: Whether it is said, for PyTorch, where in its tensor each box begins; and whole shapes.
        files: The number of files of the checkpoint, which is said if there may be more than one.
    """

    metadata: Mapping[str, str]
    has_digests: bool = False
    has_offsets: bool = False
    files: int = 1


@dataclass(frozen=True, eq=False)
class TargetFile(ABC):
    """A file to be written: boxes of tensors, and what surrounds them.

    Attributes:
        name: Its name.
        boxes: The boxes, in order; `slots` has them with the bytes at which they begin.
        wanted: The tensors, by their positions.
    """

    #: True if the CRC-32 of each slot is needed.
    needs_crcs: ClassVar[bool] = False
    #: The key in the manifest of the digest of what surrounds the tensors.
    headers_key: ClassVar[str] = "header_sha256"

    name: str
    boxes: Slots
    wanted: Sequence[NamedTensor] | Mapping[int, NamedTensor] = field(repr=False)

    @property
    def has_digests(self) -> bool:
        """True if the digests are in the file."""
        return False

    @property
    def needs_values(self) -> bool:
        """True if bytes before a tensor depend on its values."""
        return self.has_digests or self.needs_crcs

    @property
    @abstractmethod
    def start(self) -> int:
        """The byte at which the data begins, from which slots are counted."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Bytes of the file."""

    @property
    @abstractmethod
    def end(self) -> int:
        """One past the last byte, by its slots."""

    @cached_property
    def slots(self) -> Slots:
        """The boxes, in order, with the bytes at which they begin."""
        return self.boxes.at(self._begins())

    @abstractmethod
    def _begins(self) -> npt.NDArray[np.int64]:
        """Return the first byte of each slot."""

    @abstractmethod
    def before(self, number: int, digests: FileDigests = NO_DIGESTS) -> tuple[int, bytes]:
        """Return the byte at which the text before a slot, or after the last, begins, and that text of fixed length."""

    @abstractmethod
    def headers(self, digests: FileDigests = NO_DIGESTS) -> Headers:
        """Yield the bytes besides the tensors, with the byte at which each run begins; return their digest."""

    def headers_digest(self, digests: FileDigests = NO_DIGESTS) -> str:
        """Return the SHA-256 of the bytes besides the tensors, as the manifest has it."""
        headers = self.headers(digests)
        while True:
            try:
                next(headers)
            except StopIteration as end:
                return str(end.value)

    def array_at(self, number: int) -> FileArray | None:
        """The array that begins with a slot; None if it began with an earlier one."""
        slot = self.slots[number]
        return FileArray(slot.tensor, tuple(b - a for a, b in slot.box), [(number, slot.box, (0,) * len(slot.box))])

    def alone(self) -> TargetFile:
        """Give the same file, which knows only the tensors that it holds."""
        own = {tensor: facts_of(self.wanted[tensor]) for tensor in set(self.boxes.tensors.tolist())}
        return replace(self, wanted=own)


@dataclass(frozen=True, eq=False)
class SafetensorsFile(TargetFile):
    """A safetensors file, whose boxes have no gaps.

    Attributes:
        text: The contents of the header besides tensors.
        known: The length of the header and the bytes of the file, if they are known.
    """

    text: HeaderText
    known: Extent | None = None

    @property
    def has_digests(self) -> bool:
        """True if the digests are in the header."""
        return self.text.has_digests

    @cached_property
    def start(self) -> int:
        """The length of the header, which does not depend on the digests."""
        return len(self._header(NO_DIGESTS)) if self.known is None else self.known.start

    @property
    def data_bytes(self) -> int:
        """Bytes after the header."""
        return self.size - self.start

    @property
    def end(self) -> int:
        """One past the last byte, by its slots."""
        return self.start + (self.slots[-1].end if len(self.slots) else 0)

    @cached_property
    def size(self) -> int:
        """Bytes of the file."""
        return self.end if self.known is None else self.known.size

    def _begins(self) -> npt.NDArray[np.int64]:
        return begins_of(self.boxes.nbytes)

    def before(self, number: int, digests: FileDigests = NO_DIGESTS) -> tuple[int, bytes]:
        """The header; nothing between tensors."""
        if number == 0:
            header = self._header(digests)
            if len(header) != self.start:
                raise ParseError(f"{self.name}: has a header of {len(header)} bytes; its plan says {self.start}")
            return 0, header
        return self.start + self.slots[number - 1].end, b""

    def headers(self, digests: FileDigests = NO_DIGESTS) -> Headers:
        """The header."""
        at, header = self.before(0, digests)
        yield at, header
        return hashlib.sha256(header).hexdigest()

    def _header(self, digests: FileDigests) -> bytes:
        slots = list(self.slots)
        wanted = {number: self.wanted[number] for number in {slot.tensor for slot in slots}}
        metadata = {"format": "pt", **self.text.metadata}
        if self.text.has_offsets:
            offsets = {
                tensor.name: {"saved_offsets": tensor.dtype.element_start([start for start, _ in slot.box])}
                for slot in slots
                for tensor in [wanted[slot.tensor]]
            }
            whole = {slot.tensor: wanted[slot.tensor].shape for slot in slots}
            parts = (slot for slot in slots if slot.box != tuple((0, size) for size in whole[slot.tensor]))
            cut = [wanted[slot.tensor] for slot in parts]
            shapes = {tensor.name: tuple(tensor.dtype.element_shape(tensor.shape)) for tensor in cut}
            metadata |= _sharding(json.dumps(offsets)) | part_mark(self.text.files, shapes)
        elif self.text.files > 1:
            metadata |= part_mark(self.text.files)
        if self.has_digests:
            known = {wanted[slot.tensor].name: digests.tensors.get(slot.tensor) for slot in slots}
            stated = {name: _NO_DIGEST if digest is None else f"{digest:032x}" for name, digest in known.items()}
            metadata["shardwise.digests"] = json.dumps(stated, separators=(",", ":"))
        entries: dict[str, Any] = {"__metadata__": metadata}
        for number, box, begin, end in slots:
            tensor = wanted[number]
            entries[tensor.name] = {
                "dtype": tensor.dtype.code,
                "shape": tensor.dtype.element_shape([stop - start for start, stop in box]),
                "data_offsets": (begin, end),
            }
        return self._as_header(entries)

    def _as_header(self, entries: Mapping[str, Any]) -> bytes:
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > _MOST_HEADER:
            raise _too_long(self.name, len(text), len(entries) - 1)
        return len(text).to_bytes(8, "little") + text


class WrittenFile(NamedTuple):
    """A file with the digests of what was written to it; `headers` is that of the bytes besides the tensors."""

    file: TargetFile
    digests: FileDigests
    headers: str


def _sharding(offsets: str) -> dict[str, str]:
    return {SHARDING_INFO: offsets, "DCP_VERSION": "1.0"}


def _too_long(name: str, length: int, count: int) -> LayoutError:
    return LayoutError(
        f"{name}: a header of {bytes_text(length)} for {count} tensors is over the format's limit of "
        f"{bytes_text(_MOST_HEADER)}; several files in a folder have shorter ones, and to='dcp' has no such limit"
    )


def file_order(wanted: Sequence[NamedTensor]) -> list[int]:
    """The order of tensors in a file: those with the largest elements first, so that all are aligned; then by name."""
    return sorted(range(len(wanted)), key=lambda i: (-wanted[i].itemsize, wanted[i].name))


def whole_slots(wanted: Sequence[CutTensor], groups: Sequence[Sequence[int]]) -> list[Slots]:
    """The slots of files of whole tensors, those of each group; where they begin is for the files to say."""
    pool = BoxPool()
    places = np.array([int(pool.whole(tensor.shape).places[0]) for tensor in wanted], np.int64)
    table = SlotTable.of(pool.numbers, wanted)
    ranks = np.empty(len(wanted), np.int64)
    ranks[np.array(file_order(wanted), np.int64)] = np.arange(len(wanted))
    found = []
    for group in groups:
        tensors = np.array(sorted(group, key=lambda i: int(ranks[i])), np.int64)
        found.append(Slots(table, tensors, places[tensors], np.zeros(len(tensors), np.int64)))
    return found


def begins_of(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the offsets of parts that follow one another, from their sizes."""
    ends: npt.NDArray[np.int64] = np.cumsum(sizes)
    if (ends < 0).any() or float(np.sum(sizes, dtype=float)) > 2.0**63:
        raise SizeOverflowError("an offset of a file is over 2**63 - 1")
    return ends - sizes


def single_file(
    name: str, wanted: Sequence[CutTensor], metadata: Mapping[str, str], *, has_digests: bool = True
) -> list[SafetensorsFile]:
    """All tensors whole, in one file."""
    (slots,) = whole_slots(wanted, [range(len(wanted))])
    return [SafetensorsFile(name, slots, wanted, HeaderText(metadata, has_digests))]


def hugging_face_files(wanted: Sequence[CutTensor], most: int, metadata: Mapping[str, str]) -> list[SafetensorsFile]:
    """All tensors whole, in files of at most `most` bytes, split as by Hugging Face's `save_pretrained`."""
    groups: list[list[int]] = [[]]
    filled = 0
    for i, tensor in enumerate(wanted):
        if groups[-1] and filled + tensor.nbytes > most:
            groups.append([])
            filled = 0
        groups[-1].append(i)
        filled += tensor.nbytes
    names = [f"model-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1)]
    names = names if len(names) > 1 else ["model.safetensors"]
    slots = whole_slots(wanted, groups)
    text = HeaderText(metadata, files=len(names))
    return [SafetensorsFile(name, held, wanted, text) for name, held in zip(names, slots, strict=True)]


def index_of(files: Sequence[SafetensorsFile], wanted: Sequence[NamedTensor]) -> dict[str, Any]:
    """The index of a folder in Hugging Face's format."""
    return {
        "metadata": {"total_size": sum(file.data_bytes for file in files)},
        "weight_map": {wanted[slot.tensor].name: file.name for file in files for slot in file.slots},
    }


def sharded_files(wanted: Sequence[CutTensor], metadata: Mapping[str, str]) -> list[SafetensorsFile]:
    """A file for each device that owns shards: of the devices that hold the same shard, the first owns it.

    Each says in its header of what it is a part. The names and the entry `DCP_SHARDING_INFO` are those of PyTorch's
    `HuggingFaceStorageWriter`, which has one box of a tensor per file: further boxes of a device are in further files
    of that device.
    """
    held = slots_of(wanted, file_order(wanted))
    parts: dict[int, int] = {}
    for device, number in held:
        parts[device] = max(parts.get(device, 0), number + 1)
    ranks = {device: rank for rank, device in enumerate(sorted(parts), 1)}
    lengths = HeaderLengths(wanted, len(held))
    text = HeaderText(metadata, has_offsets=True, files=len(held))
    files = []
    for (device, number), slots in held.items():
        sizes = slots.nbytes
        name = f"shard-{ranks[device]:05}-model-{number + 1:05}-of-{parts[device]:05}.safetensors"
        start = lengths.header(name, slots.at(begins_of(sizes)), metadata)
        known = Extent(start, start + int(sizes.sum()))
        files.append(SafetensorsFile(name, slots, wanted, text, known))
    return files


class HeaderLengths:
    """The lengths of headers of sharded files, without making them: there may be millions of entries.

    Args:
        wanted: All tensors that are written.
        count: The number of files.
    """

    def __init__(self, wanted: Sequence[NamedTensor], count: int) -> None:
        self._count = count
        facts = []
        shapes: list[int] = []
        for tensor in wanted:
            shapes += tensor.shape
            facts.append((len(shapes), *_name_lengths(tensor.name), len(tensor.dtype.code or "")))
        self._ends, self._named, self._texts, codes = np.array(facts, np.int64).reshape(-1, 4).T
        self._named = self._named + codes
        self._packed = {number: tensor for number, tensor in enumerate(wanted) if tensor.dtype.packed is not None}
        self._shapes = np.array(shapes, np.int64)

    def header(self, name: str, slots: Slots, metadata: Mapping[str, str]) -> int:
        """The length of the header of a file with these slots."""
        empty = {"format": "pt", **metadata, **_sharding("{}"), **part_mark(self._count, {})}
        length = len(json.dumps({"__metadata__": empty}, separators=(",", ":"), ensure_ascii=False).encode())
        ends = slots.begins + slots.nbytes
        # Of a tensor "w" of one dim: `,"w":{"dtype":"F8","shape":[2],"data_offsets":[0,2]}` and, within a text,
        # `\\"w\\": {\\"saved_offsets\\": [0]}`, with `, ` before each but the first.
        entry = len(',:{"dtype":"","shape":[],"data_offsets":[,]}') + len(': {\\"saved_offsets\\": []}, ')
        length += len(slots) * entry - (2 if len(slots) else 0)
        length += int((self._named[slots.tensors] + digits_of(slots.begins) + digits_of(ends)).sum())
        parts = 0
        for rank, chosen in slots.table.by_rank(slots.tensors):
            tensors = slots.tensors[chosen]
            starts, stops = slots.table.sides(slots.places[chosen], rank)
            length += int(digits_of(starts).sum() + digits_of(stops - starts).sum())
            commas = max(rank - 1, 0)
            length += len(chosen) * 3 * commas
            # And of each that is not whole, in another text, `\\"w\\":[4]`, with `,` before each but the first.
            shapes = self._shapes[(self._ends[tensors] - rank)[:, None] + np.arange(rank)]
            is_part = ((starts != 0) | (stops != shapes)).any(axis=1)
            length += int(digits_of(shapes[is_part]).sum() + self._texts[tensors[is_part]].sum())
            length += int(is_part.sum()) * (len(":[],") + commas)
            parts += int(is_part.sum())
        length -= 1 if parts else 0
        if self._packed:
            length += sum(
                self._more(slots[at]) for at, number in enumerate(slots.tensors.tolist()) if number in self._packed
            )
        length += -length % 8
        if length > _MOST_HEADER:
            raise _too_long(name, length, len(slots))
        return 8 + length

    def _more(self, slot: Any) -> int:
        """Return how many more characters the numbers of a box take in elements than in the bytes that are counted."""
        tensor = self._packed[slot.tensor]
        start, extents = [at for at, _ in slot.box], [stop - start for start, stop in slot.box]
        more = _digits(tensor.dtype.element_start(start)) - _digits(start)
        more += _digits(tensor.dtype.element_shape(extents)) - _digits(extents)
        if extents != list(tensor.shape):
            more += _digits(tensor.dtype.element_shape(tensor.shape)) - _digits(tensor.shape)
        return more


def _digits(numbers: Iterable[int]) -> int:
    return sum(len(str(number)) for number in numbers)


def _name_lengths(name: str) -> tuple[int, int]:
    """The length of a name in a header together with that in a text of ASCII within it, and in another text."""
    held, within = json.dumps(name, ensure_ascii=False), json.dumps(json.dumps(name))
    text = json.dumps(held, ensure_ascii=False)
    return len(held.encode()) + len(within) - 2, len(text.encode()) - 2


def slots_of(wanted: Sequence[CutTensor], order: Sequence[int]) -> dict[tuple[int, int], Slots]:
    """The boxes of tensors that each device owns, the tensors in this order; where they begin is not known yet.

    Args:
        wanted: The tensors. Uncut ones belong to the first device.
        order: Their positions.

    Returns:
        By device and a number, in their order, so that each has at most one box of a tensor. Devices are numbered as
        in their mesh; where tensors have different meshes, as those of a deployment have, a device is the same by its
        label.
    """
    pool, cuts = BoxPool(), []
    numbers = _device_numbers(wanted)
    renumbered: dict[tuple[int, DeviceMesh | None], OwnedBoxes] = {}
    for i in order:
        partition = wanted[i].partition
        cut = pool.whole(wanted[i].shape) if partition is None else pool.owned(partition)
        if partition is not None and numbers is not None:
            mesh = partition.device_mesh
            if (id(cut), mesh) not in renumbered:
                renumbered[id(cut), mesh] = cut._replace(devices=numbers[mesh][cut.devices])
            cut = renumbered[id(cut), mesh]
        cuts.append(cut)
    keys = sorted(
        {
            key
            for cut in {id(cut): cut for cut in cuts}.values()
            for key in zip(cut.devices.tolist(), cut.numbers.tolist(), strict=True)
        }
    )
    return slots_by_file(keys, cuts, order, SlotTable.of(pool.numbers, wanted))


def slots_by_file(
    keys: Sequence[tuple[int, int]], cuts: Sequence[OwnedBoxes], order: Sequence[int], table: SlotTable
) -> dict[tuple[int, int], Slots]:
    """The slots of each file, by its device and number.

    Args:
        keys: The devices and numbers.
        cuts: The cuts of the tensors.
        order: The positions of these tensors.
        table: The table that all slots share.
    """
    distinct = {id(cut): cut for cut in cuts}
    numbered = {key: number for number, key in enumerate(keys)}
    files = {
        which: np.array(
            [numbered[key] for key in zip(cut.devices.tolist(), cut.numbers.tolist(), strict=True)], np.int32
        )
        for which, cut in distinct.items()
    }
    places = {which: cut.places.astype(_small(len(table.pool))) for which, cut in distinct.items()}
    counts = [len(cut.places) for cut in cuts]
    none = np.zeros(0, np.int32)
    of_file = np.concatenate([none, *(files[id(cut)] for cut in cuts)])
    by_file = np.argsort(of_file, kind="stable").astype(_small(len(of_file)))
    ends = np.cumsum(np.bincount(of_file, minlength=len(keys))).tolist()
    del of_file
    tensors = np.repeat(np.array(order, np.int32), counts)[by_file]
    at = np.concatenate([none, *(places[id(cut)] for cut in cuts)])[by_file]
    found, begin = {}, 0
    for key, end in zip(keys, ends, strict=True):
        found[key] = Slots(table, tensors[begin:end], at[begin:end], np.zeros(end - begin, np.int64))
        begin = end
    return found


def _small(most: int) -> type[np.signedinteger[Any]]:
    return np.int32 if most < 1 << 31 else np.int64


def _device_numbers(wanted: Sequence[CutTensor]) -> dict[DeviceMesh | None, npt.NDArray[np.int64]] | None:
    """A number for each device of each mesh, by its label; `None` if there is only one mesh."""
    meshes = dict.fromkeys(tensor.partition.device_mesh for tensor in wanted if tensor.partition is not None)
    if len(meshes) < 2:
        return None
    labels = {mesh: mesh.labels() for mesh in meshes if mesh is not None}
    known = dict.fromkeys(label for own in labels.values() for label in own)
    # Labels that were not given are numbers of devices already; others are numbered as they come.
    defaults = [_DEFAULT.fullmatch(label) if isinstance(label, str) else None for label in known]
    numbers = {
        label: position if found is None or None in defaults else int(found[1])
        for position, (label, found) in enumerate(zip(known, defaults, strict=True))
    }
    return {mesh: np.array([numbers[label] for label in own], np.int64) for mesh, own in labels.items()}
