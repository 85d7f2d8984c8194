"""The files of a new checkpoint of any form: which boxes each has, at which byte, and what surrounds them."""

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


class WrittenFile(NamedTuple):
    """A file with the digests of what was written to it; `headers` is that of the bytes besides the tensors."""

    file: TargetFile
    digests: FileDigests
    headers: str


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
