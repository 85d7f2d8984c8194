"""Ranges of files that a device has to read of a checkpoint, for programs that do their own reading."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._arguments import check_fields, instance, integer
from ..._gaps import joined_over_gaps
from ..._text import counted, shown
from ..._types import Numbers
from ...errors import LayoutError, MeshError, ParseError
from ...layout import UnevenRule
from ...mesh import DeviceMesh
from ...partition import Partition
from ...pieces import Pieces, dense_strides
from ...placing import Layouts, Placing, placing_of
from ...quantized.outline import components_in
from ...shared_tiling import SharedTiling
from ..data.location import version_at
from ..tensors.checkpoint import StoredCheckpoint
from ..tensors.model_config import config_of
from ..tensors.stored import UnsupportedError
from .components import reader_of
from .partitions import DescribedTensors
from .wanted import wanted_stored

__all__ = ["DeviceReads", "ReadArray", "device_reads"]

_READ = np.dtype([("file", "i8"), ("offset", "i8"), ("length", "i8")])
_COPY = np.dtype([("read", "i8"), ("offset", "i8"), ("array", "i8"), ("destination", "i8"), ("length", "i8")])
#: The most copies of a plan: a layout that cuts between single elements would need one for each.
_MOST = 50_000_000
#: The default of `over_read`.
_OVER_READ = 0.05


@dataclass(frozen=True)
class ReadArray:
    """An array that a device will hold.

    Attributes:
        device: The label of the device.
        dtype: The array's dtype, as the checkpoint calls it.
        shape: Elements per dim of the device's own array, with its parts one after the other. Elements that no copy
            writes are padding, which is zero.
        nbytes: The array's size in bytes.
    """

    name: str
    device: Hashable
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    def __post_init__(self) -> None:
        check_fields(self, name=str, device=Hashable, dtype=str, shape=tuple, nbytes=int)


@dataclass(frozen=True, eq=False)
class DeviceReads:
    """The reads from the files of a checkpoint, and the copies from them into arrays.

    Attributes:
        files: The files, or objects of a store.
        arrays: The arrays that are filled.
        reads: The ranges to read: a structured array with the fields `file` (a position in `files`), `offset` and
            `length`, in bytes, ordered by file and offset. No two ranges have a byte in common.
        copies: The copies from reads into arrays: a structured array with the fields `read` (a position in `reads`),
            `offset` (in the read), `array` (a position in `arrays`), `destination` (the byte of the array) and
            `length`.
        nbytes: The bytes of the files that are needed, each counted once.
        versions: For each file a text that changes if the file is replaced: an object's ETag or its equivalent, a
            file's size and time of modification.
    """

    files: tuple[Path, ...]
    arrays: tuple[ReadArray, ...]
    reads: npt.NDArray[Any]
    copies: npt.NDArray[Any]
    nbytes: int
    versions: tuple[str, ...]

    def __post_init__(self) -> None:
        check_fields(self, files=tuple, arrays=tuple, reads=np.ndarray, copies=np.ndarray, nbytes=int, versions=tuple)

    @property
    def bytes_read(self) -> int:
        """The bytes that are read, including gaps between the ranges that are needed."""
        return int(self.reads["length"].sum())

    def check(self) -> None:
        """Refuse files that are not the ones for which the reads were planned.

        Raises:
            ParseError: if a file has changed; the message has both versions.
            OSError: if there is no file of the name.
        """
        for path, version in zip(self.files, self.versions, strict=True):
            if version != (now := version_at(path)):
                raise ParseError(f"{path}: is of version {now}, but the reads are of {version}; plan them again")

    def fill(self, fetch: Callable[[Path, int, int], Any]) -> list[npt.NDArray[np.uint8]]:
        """Read all ranges, and return the bytes of each array.

        Args:
            fetch: Reads a range: takes a file, an offset and a length, and returns that many bytes.

        Raises:
            ParseError: if `fetch` gives another number of bytes.

        A program may make the reads itself, in any order or at once; this method shows their meaning.
        """
        made = [np.zeros(array.nbytes, np.uint8) for array in self.arrays]
        order = np.argsort(self.copies["read"], kind="stable")
        ends = np.searchsorted(self.copies["read"][order], np.arange(len(self.reads)), side="right").tolist()
        begin = 0
        for (file, offset, length), end in zip(self.reads.tolist(), ends, strict=True):
            data = np.frombuffer(fetch(self.files[file], offset, length), np.uint8)
            if len(data) != length:
                raise ParseError(f"{self.files[file]}: {len(data)} bytes were read from byte {offset} on, not {length}")
            for _, at, array, to, size in self.copies[order[begin:end]].tolist():
                made[array][to : to + size] = data[at : at + size]
            begin = end
        return made

    def __repr__(self) -> str:
        reads = counted(len(self.reads), "read")
        return f"<DeviceReads: {reads}, {self.bytes_read:,} bytes, of which {self.nbytes:,} are needed>"


def device_reads(
    checkpoint: StoredCheckpoint,
    layouts: Layouts,
    device: Hashable | list[Hashable],
    *,
    uneven: UnevenRule = "even",
    over_read: float | None = None,
    max_reads: int | None = None,
) -> DeviceReads:
    """Plan the ranges of files that a device has to read, and where each byte goes.

    Args:
        checkpoint: The checkpoint; only its headers and indexes are read.
        layouts: The cuts of the checkpoint's tensors: a `LayoutMap`, a `Deployment` or a mapping by name. A tensor that
            the layouts do not name is whole on every device. If the `config.json` next to the checkpoint states a
            quantization, all components of a weight follow its rule. Elements of fewer than eight bits are cut in whole
            bytes.
        device: The label of a device; or a list of labels, such as those of one process or host: then bytes that
            several of them need are read once.
        uneven: The rule by which a dim that does not divide is cut.
        over_read: The share of bytes that may be read beyond those that are needed, by default 0.05, a twentieth. The
            shortest gaps between ranges are read too, which gives the fewest reads within this limit.
        max_reads: The most reads, in place of `over_read`; within that limit the fewest bytes are read.

    Raises:
        LayoutError: if a layout does not fit its tensor, or there are more than 50 million copies; the message names
            the tensor. If `over_read` is not a number from 0 on; if `max_reads` is fewer than the files, or both are
            given.
        MeshError: if the layouts do not have the device.
        UnsupportedError: if a tensor is compressed, or has elements that are not stored, so that no range of a file has
            its bytes; `StoredTensor.read` reads it.

    A tensor in C order is stored row by row: a device that has some of its columns needs a read for each row, or reads
    whole rows. The devices of a host together need whole rows.

    >>> import tempfile
    >>> from shardwise import DeviceMesh, TensorLayout, open_checkpoint, save_checkpoint
    >>> rows = TensorLayout(("x", None), DeviceMesh((2,), ("x",)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = save_checkpoint(Path(folder, "m.safetensors"), {"w": np.arange(8, dtype="f4").reshape(4, 2)})
    ...     with open_checkpoint(report.path) as checkpoint:
    ...         plan = device_reads(checkpoint, {"w": rows}, "cpu:1")
    ...     def fetch(path, offset, length):
    ...         return path.read_bytes()[offset : offset + length]
    ...     plan.reads["length"].tolist(), plan.arrays[0].shape, plan.fill(fetch)[0].view("f4").tolist()
    ([16], (2, 2), [4.0, 5.0, 6.0, 7.0])
    """
    instance("checkpoint", checkpoint, StoredCheckpoint)
    share = over_read.item() if isinstance(over_read, np.generic) else over_read
    if share is not None and (
        isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < math.inf
    ):
        raise LayoutError(f"over_read is {shown(over_read)}; it must be 0 or more")
    most = None if max_reads is None else integer("max_reads", max_reads)
    if share is not None and most is not None:
        raise LayoutError("over_read and max_reads are both given; give one of them")
    devices = device if isinstance(device, list) else [device]
    placing = placing_of(layouts)
    _check_devices(devices, placing)
    files: dict[int, int] = {}
    paths: list[Path] = []
    versions: list[str] = []
    arrays: list[ReadArray] = []
    tables = [np.zeros((0, 5), np.int64)]
    count = 0
    described = {name: (shape, dtype) for name, dtype, shape in checkpoint.described()}
    weights = components_in(described, config_of(checkpoint.given), reader_of(checkpoint))
    partitions = DescribedTensors(described, weights).partitions(placing, uneven)
    for name, tensor in checkpoint.items():
        if not tensor.is_addressable:
            raise UnsupportedError(
                f"tensor {shown(name)} is compressed, or not stored: no range of a file has its bytes; read() gives "
                "them"
            )
        wanted = wanted_stored(name, tensor, None)
        pieces = wanted.pieces
        for holder in pieces.holders:
            if files.setdefault(id(holder), len(paths)) == len(paths):
                paths.append(holder.path)
                versions.append(holder.version)
        numbers = np.array([files[id(holder)] for holder in pieces.holders], np.int64)
        for label in devices:
            found = _array_of(partitions[name], wanted.shape, label)
            if found is None:
                continue
            shape, targets = found
            own = wanted.dtype.element_shape(shape)
            arrays.append(ReadArray(name, label, wanted.dtype.stated, tuple(own), math.prod(shape) * wanted.itemsize))
            for table in _runs(pieces, targets(wanted.itemsize), wanted.itemsize, name, _MOST - count):
                table[:, 0] = numbers[table[:, 0]]
                table[:, 3] = len(arrays) - 1
                tables.append(table)
                count += len(table)
    return _planned((tuple(paths), tuple(versions)), tuple(arrays), np.concatenate(tables), share, most)


def _check_devices(devices: list[Hashable], placing: Placing) -> None:
    """Refuse, with MeshError, a device that no mesh of the layouts has."""
    known = [*placing.meshes.values()] if placing.world is None else [placing.world]
    for label in devices:
        if known and all(_position(mesh, label) is None for mesh in known):
            known[0].index_of_label(label)  # Says what there is.


def _position(mesh: DeviceMesh, label: Hashable) -> int | None:
    try:
        return mesh.index_of_label(label)
    except (MeshError, TypeError):
        return None


def _array_of(
    partition: Partition | SharedTiling | None, shape: tuple[int, ...], label: Hashable
) -> tuple[tuple[int, ...], Callable[[int], Pieces]] | None:
    """Return the shape of a device's array of a tensor, with a function for its boxes; `None` for no array."""
    rank = len(shape)
    if partition is None:
        own, rows = shape, np.array([[0] * rank, shape, [0] * rank], np.int64)[None]
    else:
        position = _position(partition.device_mesh, label)
        if position is None:
            return None
        own = partition.holder_shape(partition.device_mesh.device(position))
        found = partition.pieces(partition.device_mesh.device(position))
        rows = np.array(
            [[[side.start for side in piece.box], [side.stop for side in piece.box], piece.start] for piece in found],
            np.int64,
        ).reshape(len(found), 3, rank)

    def targets(itemsize: int) -> Pieces:
        strides = dense_strides(np.array([own], np.int64).reshape(1, rank), itemsize)
        offsets = (rows[:, 2] * strides).sum(axis=1)
        boxes = rows[:, :2].transpose(0, 2, 1)
        return Pieces.built(np.zeros_like(offsets), offsets, boxes, np.repeat(strides, len(rows), axis=0), ())

    return own, targets


def _runs(pieces: Pieces, targets: Pieces, itemsize: int, name: str, most: int) -> list[Numbers]:
    """Return the runs of bytes that stored pieces and targets share: holder, offset, length, 0, target's offset."""
    found = []
    rank = pieces.rank
    for here, there in pieces.common(targets) if len(pieces) and len(targets) else ():
        for source, target in zip(here.rows, there.rows, strict=True):
            steps, into = source[2 + 2 * rank :], target[2 + 2 * rank :]
            offset, to = int(source[1]), int(target[1])
            start, stop = source[2 : 2 + rank], source[2 + rank : 2 + 2 * rank]
            extents, length, dim = (stop - start).tolist(), itemsize, rank
            while dim and (extents[dim - 1] == 1 or steps[dim - 1] == into[dim - 1] == length):
                dim -= 1
                length *= extents[dim]
            if math.prod(extents[:dim]) > most:
                raise LayoutError(
                    f"tensor {shown(name)}: the device's part of it is in {math.prod(extents[:dim]):,} runs of "
                    f"{length} bytes; at most {_MOST:,} are listed"
                )
            most -= math.prod(extents[:dim])
            places = np.array([[offset, to]], np.int64)
            for extent, step, other in zip(extents[:dim], steps.tolist(), into.tolist(), strict=False):
                along = np.arange(extent, dtype=np.int64)[:, None] * np.array([step, other], np.int64)
                places = (places[:, None] + along).reshape(-1, 2)
            table = np.zeros((len(places), 5), np.int64)
            table[:, 0], table[:, 1], table[:, 2], table[:, 4] = source[0], places[:, 0], length, places[:, 1]
            found.append(table)
    return found


def _planned(
    files: tuple[tuple[Path, ...], tuple[str, ...]],
    arrays: tuple[ReadArray, ...],
    runs: Numbers,
    share: float | None,
    most: int | None,
) -> DeviceReads:
    """Return reads that cover all runs, joined across gaps as far as `share` or `most` allows."""
    runs = runs[np.lexsort((runs[:, 1], runs[:, 0]))]
    file, begin, end = runs[:, 0], runs[:, 1], runs[:, 1] + runs[:, 2]
    _, reach = joined_over_gaps(file, begin, end, (0, None))
    # How far the runs before have come in the same file; runs may overlap, where several devices have the same.
    before = np.where(file[1:] == file[:-1], reach[:-1], begin[1:])
    needed = int(np.maximum(end[1:] - np.maximum(begin[1:], before), 0).sum()) + sum(runs[:1, 2].tolist())
    over = min(needed * (_OVER_READ if share is None else share), 2.0**62)
    limit = (int(over), None) if most is None else (None, most)
    is_first, reach = joined_over_gaps(file, begin, end, limit, "max_reads")
    firsts = np.flatnonzero(is_first)
    of = np.cumsum(is_first) - 1
    lasts = np.append(firsts[1:], len(runs)) - 1 if len(firsts) else firsts
    reads = np.zeros(len(firsts), _READ)
    reads["file"], reads["offset"], reads["length"] = file[firsts], begin[firsts], reach[lasts] - begin[firsts]
    copies = np.zeros(len(runs), _COPY)
    copies["read"], copies["offset"], copies["length"] = of, begin - reads["offset"][of], runs[:, 2]
    copies["array"], copies["destination"] = runs[:, 3], runs[:, 4]
    return DeviceReads(files[0], arrays, reads, copies, needed, files[1])
