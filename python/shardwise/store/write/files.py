"""The files of a new checkpoint: which tensors and boxes each has, at which byte, and what surrounds them."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..._dtypes import Dtype
from ..._text import bytes_text
from ...errors import LayoutError
from ...mesh import DeviceMesh
from ..boxes import Bounds
from ..parts import SHARDING_INFO, part_mark
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
#: Space for a hexadecimal digest, which is known when the data has been written.
_NO_DIGEST = "0" * 32
#: The label of a device of a mesh that was given none.
_DEFAULT = re.compile(r"cpu:(0|[1-9][0-9]{0,17})")


class Named(Protocol):
    """A tensor, as far as the files describe it."""

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


class Slot(NamedTuple):
    """A box of a tensor in a file.

    Attributes:
        tensor: The tensor's position among those that are written.
        box: The box.
        begin: Its first byte, counted in the file's data.
        end: One past the last.
    """

    tensor: int
    box: Bounds
    begin: int
    end: int


class TargetFile(ABC):
    """A file to be written: boxes of tensors, and what surrounds them.

    Attributes:
        name: Its name.
        slots: The boxes, in order.
        digests: The digests of what it holds of each tensor, by the tensor's position, once they are known.
        crcs: The CRC-32 of each slot, by its position, once they are known.
    """

    #: Whether the CRC-32 of each slot is needed.
    needs_crcs = False
    #: Whether the digests are in the file.
    has_digests = False

    def __init__(self, name: str, slots: Sequence[Slot], wanted: Sequence[Named]) -> None:
        self.name = name
        self.slots = slots
        self._wanted: Sequence[Named] | Mapping[int, Named] = wanted
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
    def before(self, number: int) -> tuple[int, bytes]:
        """What comes before a slot, or after the last, and the byte where it begins; its length does not change."""

    def frame(self) -> Iterator[tuple[int, bytes]]:
        """The bytes besides the tensors, with the byte at which each stretch begins."""
        stretches = map(self.before, range(len(self.slots) + 1))
        return (stretch for stretch in stretches if stretch[1])

    def boxes(self) -> dict[int, list[Bounds]]:
        """The boxes that it holds of each tensor, by the tensor's position."""
        found: dict[int, list[Bounds]] = {}
        for slot in self.slots:
            found.setdefault(slot.tensor, []).append(slot.box)
        return found

    def of(self, wanted: Mapping[int, Named]) -> TargetFile:
        """Give a copy without digests, which knows only the tensors that it holds."""
        other = copy.copy(self)
        other._wanted, other.digests, other.crcs = wanted, {}, {}
        return other

    @abstractmethod
    def recipe(self) -> dict[str, Any]:
        """What a saved plan says about it, besides its name and slots, to make it again."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What the manifest says about it, besides its size and digests."""


class SafetensorsFile(TargetFile):
    """A safetensors file.

    Args:
        name: Its name.
        slots: The boxes, without gaps.
        wanted: All tensors that are written.
        metadata: The contents of `__metadata__`, besides the digests.
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
        super().__init__(name, slots, wanted)
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

    def before(self, number: int) -> tuple[int, bytes]:
        """The header; nothing between tensors."""
        if number == 0:
            return 0, self._header()
        return self._start + self.slots[number - 1].end, b""

    def recipe(self) -> dict[str, Any]:
        """The contents of `__metadata__`, and whether there are digests."""
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
        for number, box, begin, end in self.slots:
            tensor = self._wanted[number]
            entries[tensor.name] = {
                "dtype": tensor.dtype.code,
                "shape": [stop - start for start, stop in box],
                "data_offsets": (begin, end),
            }
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > _MOST_HEADER:
            raise LayoutError(
                f"{self.name}: a header of {bytes_text(len(text))} for {len(self.slots)} tensors is over the format's "
                f"limit of {bytes_text(_MOST_HEADER)}; a folder can have several files"
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
    ordered = [(-wanted[tensor].itemsize, wanted[tensor].name, tensor, box) for tensor, box in boxes]
    for negative, _, tensor, box in sorted(ordered):
        size = -negative
        for start, stop in box:
            size *= stop - start
        slots.append(Slot(tensor, box, at, at + size))
        at += size
    return SafetensorsFile(name, slots, wanted, {"format": "pt", **metadata}, has_digests)


def single_file(name: str, wanted: Sequence[Wanted], metadata: Mapping[str, str]) -> list[SafetensorsFile]:
    """All tensors whole, in one file."""
    return [_filled(name, wanted, [(i, whole_box(tensor.shape)) for i, tensor in enumerate(wanted)], metadata, True)]


def hugging_face_files(wanted: Sequence[Wanted], most: int, metadata: Mapping[str, str]) -> list[SafetensorsFile]:
    """All tensors whole, in files of at most `most` bytes, split as by Hugging Face's `save_pretrained`."""
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
    metadata = {**metadata, **part_mark(len(groups))}
    names = (f"model-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1))
    return [_filled(name, wanted, group, metadata, False) for name, group in zip(names, groups, strict=True)]


def index_of(files: Sequence[SafetensorsFile], wanted: Sequence[Wanted]) -> dict[str, Any]:
    """The index of a folder in Hugging Face's format."""
    return {
        "metadata": {"total_size": sum(file.data_bytes for file in files)},
        "weight_map": {wanted[slot.tensor].name: file.name for file in files for slot in file.slots},
    }


def sharded_files(wanted: Sequence[Wanted], metadata: Mapping[str, str]) -> list[SafetensorsFile]:
    """A file for each device that owns shards: of the devices that hold the same shard, the first owns it.

    Each says in its header of what it is a part. The names and the entry `DCP_SHARDING_INFO` are those of PyTorch's
    `HuggingFaceStorageWriter`, which has one box of a tensor per file: further boxes of a device are in further files
    of that device.
    """
    boxes = owned_boxes(wanted)
    parts: dict[int, int] = {}
    for device, number in boxes:
        parts[device] = max(parts.get(device, 0), number + 1)
    ranks = {device: rank for rank, device in enumerate(sorted(parts), 1)}
    files = []
    for device, number in sorted(boxes):
        held = boxes[device, number]
        offsets = {wanted[i].name: {"saved_offsets": [start for start, _ in box]} for i, box in held}
        name = f"shard-{ranks[device]:05}-model-{number + 1:05}-of-{parts[device]:05}.safetensors"
        shapes = {wanted[i].name: wanted[i].shape for i, box in held if box != whole_box(wanted[i].shape)}
        info = {SHARDING_INFO: json.dumps(offsets), "DCP_VERSION": "1.0", **part_mark(len(boxes), shapes)}
        files.append(_filled(name, wanted, held, {**metadata, **info}, False))
    return files


def owned_boxes(wanted: Sequence[Wanted]) -> dict[tuple[int, int], list[tuple[int, Bounds]]]:
    """The boxes of tensors that each device owns, with the tensors' positions.

    Args:
        wanted: The tensors. Uncut ones belong to the first device.

    Returns:
        By device and a number, so that each list has at most one box of a tensor. Devices are numbered as in their
        mesh; where tensors have different meshes, as those of a deployment have, a device is the same by its label.
    """
    boxes: dict[tuple[int, int], list[tuple[int, Bounds]]] = {}
    numbers = _device_numbers(wanted)
    for i, tensor in enumerate(wanted):
        if tensor.partition is None:
            boxes.setdefault((0, 0), []).append((i, whole_box(tensor.shape)))
            continue
        own = None if numbers is None else numbers[tensor.partition.device_mesh]
        for device, number, box in _owned(tensor):
            boxes.setdefault((device if own is None else own[device], number), []).append((i, box))
    return boxes


def _device_numbers(wanted: Sequence[Wanted]) -> dict[DeviceMesh | None, list[int]] | None:
    """A number for each device of each mesh, by its label; `None` if there is only one mesh."""
    meshes = dict.fromkeys(tensor.partition.device_mesh for tensor in wanted if tensor.partition is not None)
    if len(meshes) < 2:
        return None
    labels = {mesh: mesh._all_labels() for mesh in meshes if mesh is not None}
    known = dict.fromkeys(label for own in labels.values() for label in own)
    # Labels that were not given are numbers of devices already; others are numbered as they come.
    defaults = [_DEFAULT.fullmatch(label) if isinstance(label, str) else None for label in known]
    numbers = {
        label: position if found is None or None in defaults else int(found[1])
        for position, (label, found) in enumerate(zip(known, defaults, strict=True))
    }
    return {mesh: [numbers[label] for label in own] for mesh, own in labels.items()}


def _owned(tensor: Wanted) -> Iterable[tuple[int, int, Bounds]]:
    """For each device the boxes that it owns, numbered; a tensor without elements belongs to its first device."""
    partition = tensor.partition
    assert partition is not None
    if 0 in tensor.shape:
        yield 0, 0, whole_box(tensor.shape)
        return
    begins, rows = partition.all_pieces()
    boxes = rows[:, :, :2]
    counts = np.diff(begins)
    devices = np.repeat(np.arange(len(counts)), counts)
    kept = (boxes[:, :, 0] < boxes[:, :, 1]).all(axis=1)
    seen: set[Bounds] = set()
    last, number = -1, 0
    for device, sides in zip(devices[kept].tolist(), boxes[kept].tolist(), strict=True):
        box = tuple(map(tuple, sides))
        if box in seen:
            continue
        seen.add(box)
        number = number + 1 if device == last else 0
        last = device
        yield device, number, box
