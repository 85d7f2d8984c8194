"""The files of a new checkpoint of any form: the boxes in each file, their positions, and the bytes around them."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ...._dtypes import Dtype
from ...._fork import cached_property
from ....errors import SizeOverflowError
from ....mesh import DeviceMesh
from ....partition import Partition
from ....pieces import Bounds
from ....shared_tiling import SharedTiling
from .slots import BoxPool, OwnedBoxes, Shaped, Slots, SlotTable

__all__ = [
    "NO_DIGESTS",
    "CutTensor",
    "Extent",
    "FileArray",
    "FileDigests",
    "Headers",
    "NamedTensor",
    "TargetFile",
    "WrittenFile",
    "begins_of",
    "file_order",
    "slots_by_file",
    "slots_of",
    "whole_slots",
]

#: The label of a device of a mesh that was given none.
_DEFAULT = re.compile(r"cpu:(0|[1-9][0-9]{0,17})")


class NamedTensor(Shaped, Protocol):
    """A tensor, with the facts that a file states about it."""

    @property
    def name(self) -> str:
        """The tensor's name in the checkpoint."""

    @property
    def dtype(self) -> Dtype:
        """The dtype in which the tensor is stored."""

    @property
    def is_object(self) -> bool:
        """True if the value is not a tensor."""


class CutTensor(NamedTensor, Protocol):
    """A tensor, with the partition by which it is cut into files."""

    @property
    def partition(self) -> Partition | SharedTiling | None:
        """The partition that cuts the tensor; `None` if it is written whole."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""


class FileArray(NamedTuple):
    """An array in a file, in C order; boxes of one tensor fill it.

    Attributes:
        tensor: The position of the tensor among those that are written.
        shape: The array's own shape.
        parts: For each box, the number of its slot, the box in the tensor, and its start in the array.
    """

    tensor: int
    shape: tuple[int, ...]
    parts: Sequence[tuple[int, Bounds, Sequence[int]]]


class TensorFacts(NamedTuple):
    """The facts that a file states about a tensor."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    itemsize: int
    is_object: bool


def facts_of(tensor: NamedTensor) -> TensorFacts:
    """Return only those facts about a tensor that a file states."""
    return TensorFacts(tensor.name, tensor.dtype, tensor.shape, tensor.itemsize, tensor.is_object)


class FileDigests(NamedTuple):
    """The digests of a file's contents, as far as they are known.

    Attributes:
        tensors: The digest of the part of each tensor in the file, by the tensor's position.
        crcs: The CRC-32 of each slot by its number; empty for forms that need none.
    """

    tensors: Mapping[int, int]
    crcs: Mapping[int, int]


NO_DIGESTS = FileDigests({}, {})

#: Yields runs of a file's bytes that are not tensors, each after its position; returns the SHA-256 of all of them.
Headers = Generator[tuple[int, bytes], None, str]


class Extent(NamedTuple):
    """The first byte of a file's data, and the size of the file in bytes."""

    start: int
    size: int


@dataclass(frozen=True, eq=False)
class TargetFile(ABC):
    """A file to be written: boxes of tensors, and the bytes around them.

    Attributes:
        name: The file's name in the checkpoint's folder.
        boxes: The boxes in the order of the file; `slots` adds the bytes at which they begin.
        wanted: The tensors, by the positions that `boxes` refers to.
    """

    #: True if the CRC-32 of each slot is needed.
    needs_crcs: ClassVar[bool] = False
    #: The key, in the manifest, of the digest of the bytes around the tensors.
    headers_key: ClassVar[str] = "header_sha256"

    name: str
    boxes: Slots
    wanted: Sequence[NamedTensor] | Mapping[int, NamedTensor] = field(repr=False)

    @property
    def has_digests(self) -> bool:
        """True if the file itself states the digests of its tensors."""
        return False

    @property
    def needs_values(self) -> bool:
        """True if bytes before a tensor depend on the tensor's values."""
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
        """The byte after the last slot."""

    @cached_property
    def slots(self) -> Slots:
        """The boxes, in order, with the bytes at which they begin."""
        return self.boxes.at(self._begins())

    @abstractmethod
    def _begins(self) -> npt.NDArray[np.int64]:
        """Return the first byte of each slot."""

    @abstractmethod
    def before(self, number: int, digests: FileDigests = NO_DIGESTS) -> tuple[int, bytes]:
        """Return the bytes before a slot, or after the last one, and the position at which they begin.

        The number of bytes does not depend on the digests.
        """

    @abstractmethod
    def headers(self, digests: FileDigests = NO_DIGESTS) -> Headers:
        """Yield each run of bytes around the tensors after its position; return the digest of all of them."""

    def headers_digest(self, digests: FileDigests = NO_DIGESTS) -> str:
        """Return the SHA-256 of the bytes around the tensors, as the manifest states it."""
        headers = self.headers(digests)
        while True:
            try:
                next(headers)
            except StopIteration as end:
                return str(end.value)

    def array_at(self, number: int) -> FileArray | None:
        """Return the array whose first box is this slot; `None` if the array began with an earlier slot."""
        slot = self.slots[number]
        return FileArray(slot.tensor, tuple(b - a for a, b in slot.box), [(number, slot.box, (0,) * len(slot.box))])

    def alone(self) -> TargetFile:
        """Return the same file with the facts of its own tensors only, so that it can be sent to a worker."""
        own = {tensor: facts_of(self.wanted[tensor]) for tensor in set(self.boxes.tensors.tolist())}
        return replace(self, wanted=own)


class WrittenFile(NamedTuple):
    """A file with the digests of its contents; `headers` is the digest of the bytes around the tensors."""

    file: TargetFile
    digests: FileDigests
    headers: str


def file_order(wanted: Sequence[NamedTensor]) -> list[int]:
    """Return the positions of tensors in the order of a file: largest elements first, for alignment; then by name."""
    return sorted(range(len(wanted)), key=lambda i: (-wanted[i].itemsize, wanted[i].name))


def whole_slots(wanted: Sequence[CutTensor], groups: Sequence[Sequence[int]]) -> list[Slots]:
    """Return the slots of one file for each group of whole tensors. The first bytes are left to the files."""
    pool = BoxPool()
    places = np.array([int(pool.whole(tensor.shape).places[0]) for tensor in wanted], np.int64)
    table = SlotTable.of(pool.coordinates, wanted)
    sizes = table.bytes(np.arange(len(wanted)), places)
    ranks = np.empty(len(wanted), np.int64)
    ranks[np.array(file_order(wanted), np.int64)] = np.arange(len(wanted))
    found = []
    for group in groups:
        tensors = np.array(sorted(group, key=lambda i: int(ranks[i])), np.int64)
        found.append(Slots(table, tensors, places[tensors], np.zeros(len(tensors), np.int64), sizes[tensors]))
    return found


def begins_of(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the offsets of parts that are stored one after the other, from their sizes in bytes."""
    ends: npt.NDArray[np.int64] = np.cumsum(sizes)
    if (ends < 0).any() or float(np.sum(sizes, dtype=float)) > 2.0**63:
        raise SizeOverflowError("an offset of a file is over 2**63 - 1")
    return ends - sizes


def slots_of(wanted: Sequence[CutTensor], order: Sequence[int]) -> dict[tuple[int, int], Slots]:
    """Return the slots of the boxes that each device owns. The first bytes are left to the files.

    Args:
        wanted: The tensors. Uncut ones belong to the first device.
        order: The positions of the tensors, in the order of a file.

    Returns:
        Slots by (device, number), sorted: each entry has at most one box of a tensor, further boxes have higher
        numbers. Devices are numbered as in their mesh; of different meshes, those with the same label are one.
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
            for key in zip(cut.devices.tolist(), cut.ordinals.tolist(), strict=True)
        }
    )
    return slots_by_file(keys, cuts, order, SlotTable.of(pool.coordinates, wanted))


def slots_by_file(
    keys: Sequence[tuple[int, int]], cuts: Sequence[OwnedBoxes], order: Sequence[int], table: SlotTable
) -> dict[tuple[int, int], Slots]:
    """Return the slots of each file, by its device and number.

    Args:
        keys: The device and number of each file.
        cuts: The boxes of each tensor and their owners.
        order: The positions of these tensors.
        table: The table that all slots share.
    """
    distinct = {id(cut): cut for cut in cuts}
    numbered = {key: number for number, key in enumerate(keys)}
    files = {
        which: np.array(
            [numbered[key] for key in zip(cut.devices.tolist(), cut.ordinals.tolist(), strict=True)], np.int32
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
    """Return, for each mesh, a number for each device by its label; `None` if there is only one mesh."""
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
