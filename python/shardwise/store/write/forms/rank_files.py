"""Files for ranks: each holds everything that one device holds, as arrays of the device's own shapes.

Replicas are therefore in the files of all devices that have them. A dim of several parts becomes one array with the
parts one after the other, so a box of a tensor may be strided in the array. `ranks` is a file for each device, `rank`
is the file of one device alone, and `vllm` is the files that vLLM's and SGLang's sharded loaders read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ...._fork import cached_property
from ....errors import LayoutError
from ....mesh import DeviceMesh
from ....partition import Partition
from ....shared_tiling import SharedTiling
from ...data.parts import PIECES, part_mark
from .files import CutTensor, FileArray, FileDigests, NamedTensor, begins_of, file_order, slots_by_file
from .safetensors import HeaderText, SafetensorsFile
from .slots import BoxPool, OwnedBoxes, Slots, SlotTable

__all__ = ["FileRanks", "RankFile", "pieces_text", "rank_files", "rank_name", "rank_slots", "slot_bounds"]

#: The characters of an axis's name that are replaced by `_` in the name of a file.
_UNNAMED = re.compile(r"[^A-Za-z0-9_.]")
_LONGEST = 200
#: Tensors that are not cut, but that vLLM sums over the ranks of tensor parallelism: all ranks but the first store
#: zeros. And the beginnings of the names of the first rank's files.
_ADDED_ONCE = re.compile(r"\.experts\..*\bw2_bias$")
_FIRST = re.compile(r"(rank|tp)-0-part-")


@dataclass(frozen=True, eq=False)
class FileRanks:
    """The devices that get files, in the order of their ranks.

    Attributes:
        labels: The label of each device.
        meshes: Meshes over these devices, by name; they give the devices their coordinates.
    """

    labels: tuple[Any, ...]
    meshes: Mapping[str, DeviceMesh]

    def numbers(self, mesh: DeviceMesh | None) -> npt.NDArray[np.int64]:
        """Return the rank of each device of a mesh; `None` stands for all devices."""
        if mesh is None or mesh.labels() == self.labels:
            return np.arange(len(self.labels), dtype=np.int64)
        known = {label: rank for rank, label in enumerate(self.labels)}
        return np.array([known[label] for label in mesh.labels()], np.int64)

    def coordinates(self, rank: int) -> dict[str, dict[str, int]]:
        """Return the coordinates of a rank in each mesh that contains it: by the mesh's name, then by the axis's."""
        found = {}
        for name, mesh in self.meshes.items():
            at = self._positions[name].get(self.labels[rank])
            if at is not None:
                found[name] = dict(zip(mesh.axis_names, mesh.coordinate(at), strict=True))
        return found

    @cached_property
    def _positions(self) -> dict[str, dict[Any, int]]:
        """The position of each label in each mesh, by the mesh's name."""
        return {name: {label: at for at, label in enumerate(mesh.labels())} for name, mesh in self.meshes.items()}

    @property
    def whole(self) -> str | None:
        """The name of the first mesh that contains all devices; `None` without one."""
        return next((name for name, mesh in self.meshes.items() if mesh.size == len(self.labels)), None)

    def as_json(self, names: Sequence[Sequence[str]], sizes: Mapping[str, int]) -> bytes:
        """Return the text of `ranks.json`: the files of each rank, its coordinates in the meshes, and its bytes."""
        ranks = []
        for rank, files in enumerate(names):
            found = self.coordinates(rank)
            own = next(iter(found.values()), {}) if len(self.meshes) == 1 else found
            row: dict[str, Any] = {"rank": rank, "device": str(self.labels[rank]), "coordinates": own}
            row |= {"file": files[0]} if len(files) == 1 else {"files": list(files)}
            ranks.append(row | {"bytes": sum(sizes[name] for name in files)})
        meshes = {name: dict(zip(mesh.axis_names, mesh.shape, strict=True)) for name, mesh in self.meshes.items()}
        head = {"mesh": next(iter(meshes.values()))} if len(meshes) == 1 else {"meshes": meshes}
        rows = ",\n  ".join(json.dumps(row) for row in ranks)
        return f'{json.dumps(head)[:-1]},\n "ranks": [\n  {rows}\n ]}}\n'.encode()


@dataclass(frozen=True, eq=False)
class RankFile(SafetensorsFile):
    """A file with the tensors of one device, or some of them: each tensor is one array, which its boxes fill."""

    def _begins(self) -> npt.NDArray[np.int64]:
        return _array_begins(self.boxes)

    @property
    def end(self) -> int:
        """The byte after the last array."""
        return self.start + int(_array_bytes(self.boxes).sum())

    def array_at(self, number: int) -> FileArray | None:
        """Return the array that begins with a slot; None if it began with an earlier one."""
        slots = self.slots
        tensor = int(slots.tensors[number])
        if number and slots.tensors[number - 1] == tensor:
            return None
        stop = int(np.searchsorted(slots.tensors[number:] != tensor, True)) + number
        begins, shapes = slots.table.in_arrays(slots.places[number:stop], int(slots.table.ranks[tensor]))
        parts = [(at, slots[at].box, begin) for at, begin in zip(range(number, stop), begins.tolist(), strict=True)]
        return FileArray(tensor, tuple(shapes[0].tolist()), parts)

    def _header(self, digests: FileDigests) -> bytes:
        metadata: dict[str, str] = {"format": "pt", **self.text.metadata, **part_mark(self.text.files)}
        entries: dict[str, Any] = {"__metadata__": metadata}
        end = 0
        for first, _ in slot_bounds(self.slots):
            tensor = self.wanted[int(self.slots.tensors[first])]
            shape = _array_shape(self.slots, first, len(tensor.shape))
            begin, end = end, end + tensor.itemsize * math.prod(shape)
            element = tensor.dtype.element_shape(shape)
            entries[tensor.name] = {"dtype": tensor.dtype.code, "shape": element, "data_offsets": (begin, end)}
        metadata[PIECES] = pieces_text(self.slots, self.wanted)
        return self._as_header(entries)


def _array_shape(slots: Slots, number: int, rank: int) -> list[int]:
    """Return the shape of the array that a slot's box is in; `rank` is the number of dims."""
    _, shapes = slots.table.in_arrays(slots.places[number : number + 1], rank)
    found: list[int] = shapes[0].tolist()
    return found


def pieces_text(slots: Slots, wanted: Sequence[NamedTensor] | Mapping[int, NamedTensor]) -> str:
    """Return the header's text on tensors that are not whole in a file: the whole shape, and the array's boxes."""
    found: dict[str, Any] = {}
    for first, stop in slot_bounds(slots):
        tensor = wanted[int(slots.tensors[first])]
        shape, places = list(tensor.shape), slots.places[first:stop]
        lows, highs = (side.tolist() for side in slots.table.sides(places, len(shape)))
        if (lows[0], highs[0]) == ([0] * len(shape), shape) and _array_shape(slots, first, len(shape)) == shape:
            continue
        start, begins = tensor.dtype.element_start, slots.table.in_arrays(places, len(shape))[0].tolist()
        boxes = [[*start(low), *start(high), *start(at)] for low, high, at in zip(lows, highs, begins, strict=True)]
        found[tensor.name] = {"shape": tensor.dtype.element_shape(tensor.shape), "pieces": boxes}
    return json.dumps(found, separators=(",", ":"), ensure_ascii=False)


def slot_bounds(slots: Slots) -> list[tuple[int, int]]:
    """Return, for each tensor of a file, the number of its first slot and the number after its last."""
    changes = np.flatnonzero(np.diff(slots.tensors)) + 1
    edges = [0, *changes.tolist(), len(slots)] if len(slots) else [0]
    return list(pairwise(edges))


def _array_bytes(slots: Slots) -> npt.NDArray[np.int64]:
    """Return the bytes of the array of each tensor of a file."""
    firsts = np.array([first for first, _ in slot_bounds(slots)], np.int64)
    return slots.table.array_bytes(slots.tensors[firsts], slots.places[firsts])


def _array_begins(slots: Slots) -> npt.NDArray[np.int64]:
    """Return the offset of each slot's box in the file's data."""
    begins = begins_of(_array_bytes(slots))
    counts = np.array([stop - first for first, stop in slot_bounds(slots)], np.int64)
    found: npt.NDArray[np.int64] = np.repeat(begins, counts) + slots.table.array_offsets(slots.tensors, slots.places)
    return found


def rank_files(
    wanted: Sequence[CutTensor], ranks: FileRanks, metadata: Mapping[str, str], form: str, most: int
) -> tuple[list[RankFile], bytes]:
    """Return a file for each rank, or several; and the text that says which.

    Args:
        wanted: The tensors; those that are not cut are in the files of all ranks.
        ranks: The ranks of all meshes of the layouts.
        metadata: Texts for the headers.
        form: `"ranks"` or `"vllm"`.
        most: For `"vllm"`, the most bytes of tensors in a file.
    """
    pattern = _vllm_names(ranks) if form == "vllm" else None
    beginnings = [] if pattern is None else [pattern(rank) for rank in range(len(ranks.labels))]
    others = [rank for rank, name in enumerate(beginnings) if _FIRST.search(name) is None]
    held = rank_slots(wanted, ranks, np.array(others, np.int64) if others else None)
    parts: list[tuple[str, Slots]] = []
    names: list[list[str]] = []
    for rank, slots in enumerate(held):
        cut = [slots] if pattern is None else _cut(slots, most)
        names.append(
            [
                rank_name(ranks, rank) if pattern is None else f"{pattern(rank)}{at}.safetensors"
                for at in range(len(cut))
            ]
        )
        parts += zip(names[-1], cut, strict=True)
    text = HeaderText(metadata, files=len(parts))
    files = [RankFile(name, slots, wanted, text) for name, slots in parts]
    return files, ranks.as_json(names, {file.name: file.size for file in files})


def rank_slots(
    wanted: Sequence[CutTensor], ranks: FileRanks, zeros: npt.NDArray[np.int64] | None = None
) -> list[Slots]:
    """Return the slots of each rank; the ranks in `zeros` store zeros for tensors that vLLM sums over ranks."""
    pool, order = BoxPool(), file_order(wanted)
    known: dict[Any, OwnedBoxes] = {}
    numbers: dict[DeviceMesh | None, npt.NDArray[np.int64]] = {}
    cuts = []
    for number in order:
        partition, shape = wanted[number].partition, wanted[number].shape
        mesh = None if partition is None else partition.device_mesh
        if mesh not in numbers:
            numbers[mesh] = ranks.numbers(mesh)
        own = None
        if zeros is not None and _ADDED_ONCE.search(wanted[number].name) and not _is_cut(partition):
            partition, own = None, zeros
        key = (shape, own is None, mesh) if partition is None else partition
        if key not in known:
            known[key] = pool.arrays(partition, shape, numbers[mesh], own)
        cuts.append(known[key])
    keys = [(rank, 0) for rank in range(len(ranks.labels))]
    table = SlotTable.of(pool.coordinates, wanted, has_arrays=True)
    return list(slots_by_file(keys, cuts, order, table).values())


def _is_cut(partition: Partition | SharedTiling | None) -> bool:
    return partition is not None and partition.total_shards > 1


def rank_name(ranks: FileRanks, rank: int) -> str:
    """Return the name of a rank's file: its number, and its coordinates in the first mesh that contains all devices."""
    own = {} if ranks.whole is None else ranks.coordinates(rank)[ranks.whole]
    at = "".join(f"-{_UNNAMED.sub('_', axis)}-{position}" for axis, position in own.items())
    return f"rank-{rank:05}{at if len(at) < _LONGEST else ''}.safetensors"


def _vllm_names(ranks: FileRanks) -> Any:
    """Return a function from a rank to the beginning of its files' names, as the engines' loaders expect it."""
    whole = ranks.whole
    mesh = None if whole is None else ranks.meshes[whole]
    axes = () if mesh is None else tuple(a for a, n in zip(mesh.axis_names, mesh.shape, strict=True) if n > 1)
    if whole is None or len([axis for axis in axes if axis != "pp"]) > 1:
        raise LayoutError(
            f"the mesh has the axes {', '.join(axes) or 'none of all devices'}; the loaders of vLLM and SGLang know "
            "only the tensor-parallel rank, and vLLM's also the pipeline rank: give one axis, or pp and another"
        )

    def name(rank: int) -> str:
        at = ranks.coordinates(rank)[whole]
        tp = next((at[axis] for axis in axes if axis != "pp"), 0)
        return f"model-pp-{at['pp']}-tp-{tp}-part-" if "pp" in axes else f"model-rank-{tp}-part-"

    return name


def _cut(slots: Slots, most: int) -> list[Slots]:
    """Split a rank's slots into files, each with tensors of at most `most` bytes in all, or with one larger tensor."""
    firsts, filled = [0], 0
    for (first, _), size in zip(slot_bounds(slots), _array_bytes(slots).tolist(), strict=True):
        if filled and filled + size > most:
            firsts.append(first)
            filled = 0
        filled += size
    edges = zip(firsts, [*firsts[1:], len(slots)], strict=True)
    return [
        Slots(slots.table, *(column[a:b] for column in (slots.tensors, slots.places, slots.begins))) for a, b in edges
    ]
