"""The files of a new checkpoint: which tensors and boxes each has, at which byte, and what stands around them."""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..._dtypes import Dtype
from ..._text import bytes_text
from ...errors import LayoutError
from ..boxes import Bounds
from ..protocol import whole_box
from .wanted import Wanted

__all__ = [
    "Named",
    "SafetensorsFile",
    "Slot",
    "TargetFile",
    "hugging_face_files",
    "index_of",
    "owned_boxes",
    "sharded_files",
    "single_file",
]

#: The longest header that the format allows.
_MOST_HEADER = 100_000_000
#: Room for a digest, in hexadecimal, which is known when the data has been written.
_NO_DIGEST = "0" * 32


class Named(Protocol):
    """A tensor, as far as the files say what it is."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def dtype(self) -> Dtype:
        """Its dtype."""

    @property
    def itemsize(self) -> int:
        """Bytes per element."""

    @property
    def is_object(self) -> bool:
        """Whether it is not a tensor."""


@dataclass(frozen=True)
class Slot:
    """A box of a tensor in a file."""

    #: The tensor's position among those that are written.
    tensor: int
    box: Bounds
    #: Of the file's data, the bytes that it has: begin and end.
    begin: int
    end: int


class TargetFile(ABC):
    """A file to be written: boxes of tensors, and what stands around them.

    Attributes:
        name: Its name.
        slots: The boxes, in the order in which they lie.
        digests: The digests of what it holds of each tensor, by the tensor's position, once they are known.
        crcs: The CRC-32 of each slot, by its position, likewise.
    """

    #: Whether the CRC-32 of each slot is to be known.
    needs_crcs = False
    #: Whether the digests stand in the file.
    has_digests = False

    def __init__(self, name: str, slots: Sequence[Slot]) -> None:
        self.name = name
        self.slots = slots
        self.digests: dict[int, int] = {}
        self.crcs: dict[int, int] = {}

    @property
    @abstractmethod
    def start(self) -> int:
        """The byte at which the data begins, from which slots are counted."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Bytes of the file."""

    @abstractmethod
    def frame(self) -> Iterator[tuple[int, bytes]]:
        """The bytes besides the tensors, with the byte at which each stretch begins; as many whatever is known yet."""

    @abstractmethod
    def recipe(self) -> dict[str, Any]:
        """What a saved plan says of it, besides its name and slots, to make it again."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What the manifest says of it, besides its size and digests."""


class SafetensorsFile(TargetFile):
    """A safetensors file.

    Args:
        name: Its name.
        slots: The boxes, without gaps.
        wanted: All tensors that are written.
        metadata: What `__metadata__` says, besides the digests.
        has_digests: Whether the header has a digest for each tensor; else the manifest has them.
    """

    def __init__(
        self,
        name: str,
        slots: Sequence[Slot],
        wanted: Sequence[Named],
        metadata: Mapping[str, str],
        has_digests: bool,
    ) -> None:
        super().__init__(name, slots)
        self._wanted = wanted
        self._metadata = metadata
        self.has_digests = has_digests
        self._start = len(self._header())

    @property
    def start(self) -> int:
        """The length of the header, which does not depend on the digests."""
        return self._start

    @property
    def data_bytes(self) -> int:
        """Bytes after the header."""
        return self.slots[-1].end if self.slots else 0

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._start + self.data_bytes

    def frame(self) -> Iterator[tuple[int, bytes]]:
        """The header."""
        yield 0, self._header()

    def recipe(self) -> dict[str, Any]:
        """What `__metadata__` says, and whether digests are there."""
        return {"metadata": dict(self._metadata), "has_digests": self.has_digests}

    def facts(self) -> dict[str, Any]:
        """A digest of the header."""
        return {"header_sha256": hashlib.sha256(self._header()).hexdigest()}

    def _header(self) -> bytes:
        metadata = dict(self._metadata)
        if self.has_digests:
            digests = {self._wanted[slot.tensor].name: self._digest(slot.tensor) for slot in self.slots}
            metadata["shardwise.digests"] = json.dumps(digests, separators=(",", ":"))
        entries: dict[str, Any] = {"__metadata__": metadata}
        for slot in self.slots:
            tensor = self._wanted[slot.tensor]
            entries[tensor.name] = {
                "dtype": tensor.dtype.code,
                "shape": [stop - start for start, stop in slot.box],
                "data_offsets": [slot.begin, slot.end],
            }
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > _MOST_HEADER:
            raise LayoutError(
                f"{self.name}: a header of {bytes_text(len(text))} for {len(self.slots)} tensors is over the format's "
                f"limit of {bytes_text(_MOST_HEADER)}; a folder has several files"
            )
        return len(text).to_bytes(8, "little") + text

    def _digest(self, tensor: int) -> str:
        return f"{self.digests[tensor]:032x}" if tensor in self.digests else _NO_DIGEST


def _filled(
    name: str,
    wanted: Sequence[Wanted],
    boxes: Iterable[tuple[int, Bounds]],
    metadata: Mapping[str, str],
    has_digests: bool,
) -> SafetensorsFile:
    """A file of these boxes, those with the largest elements first, so that all are aligned; then by name."""
    at, slots = 0, []
    for tensor, box in sorted(boxes, key=lambda item: (-wanted[item[0]].itemsize, wanted[item[0]].name)):
        size = math.prod(stop - start for start, stop in box) * wanted[tensor].itemsize
        slots.append(Slot(tensor, box, at, at + size))
        at += size
    return SafetensorsFile(name, slots, wanted, {"format": "pt", **metadata}, has_digests)


def single_file(name: str, wanted: Sequence[Wanted], metadata: Mapping[str, str]) -> list[SafetensorsFile]:
    """All tensors whole, in one file."""
    return [_filled(name, wanted, [(i, whole_box(tensor.shape)) for i, tensor in enumerate(wanted)], metadata, True)]


def hugging_face_files(wanted: Sequence[Wanted], most: int, metadata: Mapping[str, str]) -> list[SafetensorsFile]:
    """All tensors whole, in files of at most so many bytes, as Hugging Face's `save_pretrained` cuts them."""
    groups: list[list[tuple[int, Bounds]]] = [[]]
    filled = 0
    for i, tensor in enumerate(wanted):
        if groups[-1] and filled + tensor.nbytes > most:
            groups.append([])
            filled = 0
        groups[-1].append((i, whole_box(tensor.shape)))
        filled += tensor.nbytes
    if len(groups) == 1:
        return [_filled("model.safetensors", wanted, groups[0], metadata, False)]
    names = (f"model-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1))
    return [_filled(name, wanted, group, metadata, False) for name, group in zip(names, groups, strict=True)]


def index_of(files: Sequence[SafetensorsFile], wanted: Sequence[Wanted]) -> dict[str, Any]:
    """The index of a folder in Hugging Face's form."""
    return {
        "metadata": {"total_size": sum(file.data_bytes for file in files)},
        "weight_map": {wanted[slot.tensor].name: file.name for file in files for slot in file.slots},
    }


def sharded_files(wanted: Sequence[Wanted], metadata: Mapping[str, str]) -> list[SafetensorsFile]:
    """A file for each device that owns shards: of the devices that hold the same shard, the first owns it.

    The names and the entry `DCP_SHARDING_INFO` are those of PyTorch's `HuggingFaceStorageWriter`, which has one box of
    a tensor in a file: further boxes of a device are in further files of it.
    """
    boxes = owned_boxes(wanted)
    parts = {device: 1 + max(number for other, number in boxes if other == device) for device, _ in boxes}
    ranks = {device: rank for rank, device in enumerate(sorted(parts), 1)}
    files = []
    for device, number in sorted(boxes):
        held = boxes[device, number]
        offsets = {wanted[i].name: {"saved_offsets": [start for start, _ in box]} for i, box in held}
        name = f"shard-{ranks[device]:05}-model-{number + 1:05}-of-{parts[device]:05}.safetensors"
        info = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0"}
        files.append(_filled(name, wanted, held, {**metadata, **info}, False))
    return files


def owned_boxes(wanted: Sequence[Wanted]) -> dict[tuple[int, int], list[tuple[int, Bounds]]]:
    """The boxes of tensors that each device owns, with the tensors' positions.

    Args:
        wanted: The tensors. What is not cut is the first device's.

    Returns:
        By device and a number, so that of one tensor there is no more than a box in each list.
    """
    boxes: dict[tuple[int, int], list[tuple[int, Bounds]]] = {}
    for i, tensor in enumerate(wanted):
        if tensor.partition is None:
            boxes.setdefault((0, 0), []).append((i, whole_box(tensor.shape)))
            continue
        for device, number, box in _owned(tensor):
            boxes.setdefault((device, number), []).append((i, box))
    return boxes


def _owned(tensor: Wanted) -> Iterable[tuple[int, int, Bounds]]:
    """Of each device the boxes that it owns, numbered; a tensor without elements is its first device's."""
    partition = tensor.partition
    assert partition is not None
    if 0 in tensor.shape:
        yield 0, 0, whole_box(tensor.shape)
        return
    seen: set[Bounds] = set()
    for device, label in enumerate(partition.holders):
        number = 0
        for piece in partition.pieces(label):
            box = tuple((side.start, side.stop) for side in piece.box)
            if box in seen or any(start == stop for start, stop in box):
                continue
            seen.add(box)
            yield device, number, box
            number += 1
