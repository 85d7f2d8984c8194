"""Running a plan on arrays: the checks, the outputs, and the sums; the compiled module makes the copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from .._arguments import refuse_mask
from .._core import count_fitting
from .._text import counted, shown
from .._types import Array
from ..errors import LayoutError, SizeOverflowError
from ..partition import Partition
from .source import ShardSource

if TYPE_CHECKING:
    from .._core import ReshardPlan as CorePlan
    from ..tiling import Tiling

__all__ = [
    "Window",
    "addends_of",
    "box_view",
    "check_addable",
    "checked_arrays",
    "run_on_arrays",
    "slices_of",
    "views_of",
]

#: The part of a flat array that holds a piece: its offset, and its shape.
Window = tuple[int, tuple[int, ...]]

#: The most bytes that are allocated together; they are also freed together.
_BLOCK_BYTES = 1 << 24
#: The bytes of a cache line of the processor; a different size does no harm.
_LINE = 64


class Runnable(Protocol):
    """The members of a plan that running it needs; `ReshardPlan` documents each member."""

    @property
    def core(self) -> CorePlan: ...
    @property
    def src(self) -> Tiling: ...
    @property
    def dst(self) -> Tiling: ...
    @property
    def addends(self) -> int: ...
    @property
    def kept(self) -> npt.NDArray[np.void]: ...
    @property
    def transfers(self) -> npt.NDArray[np.void]: ...


def run_on_arrays(
    plan: Runnable,
    src_shards: Sequence[Array] | ShardSource,
    out: Sequence[Array] | None,
    progress: Callable[[int, int], Any] | None,
) -> list[Array]:
    """Check all arguments, then run a plan; see `ReshardPlan.run`."""
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be callable or None, got {type(progress).__name__}")
    # The arrays of a source were checked when it was made. Asking an abstract class takes as long as checking an
    # array, so lists are not asked.
    if type(src_shards) is not list and isinstance(src_shards, ShardSource):
        sources = src_shards.shard_arrays()
    else:
        sources = checked_arrays("src_shards", src_shards, plan.src, None)
    if sources:
        dtype = sources[0].dtype
    elif out is not None and len(out) and isinstance(out[0], np.ndarray):
        dtype = out[0].dtype
    else:
        dtype = np.dtype(np.float64)
    addends = plan.addends
    if addends > 1:
        check_addable(dtype)
    if out is not None:
        results = copied = checked_arrays("out", out, plan.dst, dtype)
        outputs: Sequence[int] = tuple(range(len(copied)))
        _check_copyable(dtype, len(copied))
    else:
        count = plan.dst.holder_count
        there = {d: box_view(sources[s], w, box) for d, s, w, box in views_of(plan)}
        absent = [device for device in range(count) if device not in there]
        _check_copyable(dtype, len(absent))
        new = _allocated(absent, plan.dst, dtype) if absent else {}
        copied, outputs = [new[device] for device in absent], [-1] * count
        for position, device in enumerate(absent):
            outputs[device] = position
        new |= there
        results = [new[device] for device in range(count)]
    if copied:
        if sources and type(sources[0]) is not np.ndarray:
            refuse_mask("the source", sources[0])  # Views of one array may be, and stay so; all are or none is.
        plan.core.run(sources, copied, outputs, progress)
    elif progress is not None:
        progress(0, 0)
    if addends > 1:
        _add(plan, sources, results)
    return results


def _check_copyable(dtype: np.dtype[Any], count: int) -> None:
    if dtype.hasobject and count:
        raise TypeError(f"shards of dtype {dtype} hold references, which cannot be copied as bytes")


def check_addable(dtype: np.dtype[Any]) -> None:
    """Refuse dtypes that have no sums, or whose sums are of another dtype."""
    probe = np.empty(0, dtype)
    try:
        adds = not dtype.hasobject and np.add(probe, probe).dtype == dtype.newbyteorder("=")
    except TypeError:  # numpy cannot add them, as text and dates.
        adds = False
    if not adds:
        raise TypeError(f"partial sums of dtype {dtype} do not add up to a value of that dtype")


def checked_arrays(name: str, arrays: Sequence[Array], tiling: Tiling, dtype: np.dtype[Any] | None) -> list[Array]:
    """Return the arrays as a list, after checking that each has its holder's shape, and all have one dtype."""
    if type(arrays) is not list and (isinstance(arrays, (str, bytes, dict)) or not hasattr(arrays, "__iter__")):
        raise TypeError(f"{name} must be a sequence of numpy arrays, got {type(arrays).__name__}")
    # One more than allowed: an iterable may never end.
    shapes = tiling.holder_shapes()
    checked = list(islice(arrays, len(shapes) + 1))
    if len(checked) != len(shapes):
        over = len(checked) > len(shapes)
        given = len(arrays) if hasattr(arrays, "__len__") else f"more than {len(shapes)}" if over else len(checked)
        raise LayoutError(f"{name} has {given} arrays but there are {counted(len(shapes), 'holder')}")
    if dtype is None and checked and isinstance(checked[0], np.ndarray):
        dtype = checked[0].dtype
    for i in range(count_fitting(checked, shapes, dtype), len(checked)):
        array, shape = checked[i], shapes[i]
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name}[{i}] must be a numpy array, got {type(array).__name__}")
        refuse_mask(f"{name}[{i}]", array)
        if array.shape != shape or array.dtype != dtype:
            raise LayoutError(
                f"{name}[{i}] ({shown(tiling.holder_label(i))}) is of shape {array.shape} and dtype {array.dtype}; "
                f"it must be of shape {shape} and dtype {dtype}"
            )
    return checked


def slices_of(start: npt.NDArray[np.int64], stop: npt.NDArray[np.int64]) -> tuple[slice, ...]:
    """Return a box as slices."""
    return tuple(slice(a, b) for a, b in zip(start.tolist(), stop.tolist(), strict=True))


def box_view(array: Array, window: Window | None, box: tuple[slice, ...]) -> Array:
    """Return a box of an array as a view; if the array is flat, a box of its part `window`."""
    if window is not None:
        offset, shape = window
        array = array[offset : offset + math.prod(shape)].reshape(shape)
    index: tuple[Any, ...] = (*box, ...)  # Without the ellipsis, a 0-d array would give a scalar.
    view: Array = array[index]
    return view


def views_of(plan: Runnable) -> Iterator[tuple[int, int, Window | None, tuple[slice, ...]]]:
    """Yield the new arrays that are parts of arrays that their holders already have.

    For each, the number of its holder in the destination and in the source, and window and box in the holder's array.
    Arrays with partial sums are never in the list: a holder of one addend receives the others.
    """
    kept = plan.kept
    if not len(kept):
        return
    times = np.bincount(kept["dst_device"], minlength=plan.dst.holder_count)
    times[plan.transfers["dst_device"]] = 0
    alone = np.flatnonzero(times[kept["dst_device"]] == 1)
    if not len(alone):
        return
    boxes = plan.core.local_boxes(0, True).take(alone, axis=0)
    extents = boxes[..., 1] - boxes[..., 0]
    pieces = plan.core.kept_pieces().take(alone, axis=0)
    shapes = None if isinstance(plan.dst, Partition) and not plan.dst.is_packed else plan.dst.holder_shapes()
    for row, (piece, _), box, extent in zip(
        kept[alone], pieces.tolist(), boxes.tolist(), extents.tolist(), strict=True
    ):
        source, device = int(row["src_device"]), int(row["dst_device"])
        # A shard of a partition is one box; other arrays may be more than this box, or of one dim.
        if shapes is None or shapes[device] == tuple(extent):
            yield device, source, plan.core.place(0, source, piece)[1], tuple(slice(*side) for side in box)


def _allocated(devices: list[int], tiling: Tiling, dtype: np.dtype[Any]) -> dict[int, Array]:
    """Return new arrays; many small ones are cut from common blocks, which the operating system backs with large pages.

    A page is made when it is first written to, and for many small arrays that takes longer than the copy itself.
    """
    all_shapes, covered = tiling.holder_shapes(), tiling.covered()
    shapes = [all_shapes[device] for device in devices]
    nbytes = [math.prod(shape) * dtype.itemsize for shape in shapes]
    arrays: dict[int, Array] = {}
    try:
        for device, shape in zip(devices, shapes, strict=True):
            if covered is not None and not covered[device]:
                arrays[device] = np.zeros(shape, dtype)
        if dtype.itemsize and sum(nbytes) >= _BLOCK_BYTES:
            for positions in _blocks(nbytes):
                block = np.empty(sum(_aligned(nbytes[i]) for i in positions) + _LINE, np.uint8)
                at = -block.ctypes.data % _LINE
                for i in positions:
                    arrays.setdefault(devices[i], block[at : at + nbytes[i]].view(dtype).reshape(shapes[i]))
                    at += _aligned(nbytes[i])
        for device, shape in zip(devices, shapes, strict=True):
            if device not in arrays:
                arrays[device] = np.empty(shape, dtype)
    except ValueError as error:  # what numpy raises for a size that no address space holds
        raise SizeOverflowError(f"a shard of dtype {dtype} does not fit in the address space: {error}") from None
    return arrays


def _blocks(nbytes: list[int]) -> Iterator[list[int]]:
    """Yield the ranges of positions of small arrays that share a block of memory."""
    positions: list[int] = []
    filled = 0
    for i, size in enumerate(map(_aligned, nbytes)):
        if size > _BLOCK_BYTES // 4:  # numpy asks for large pages itself
            continue
        if filled + size > _BLOCK_BYTES:
            yield positions
            positions, filled = [], 0
        positions.append(i)
        filled += size
    yield positions


def _aligned(nbytes: int) -> int:
    # Each begins at a cache line, so that copies fill whole lines; no dtype needs a larger alignment.
    return -(-nbytes // _LINE) * _LINE


def addends_of(partition: Partition) -> npt.NDArray[np.int64]:
    """Return the partial sum of its shard that each device holds: its unreduced coordinate, as one number."""
    layout = partition.layout.refined()
    mesh = layout.require_mesh("a plan")
    addends = np.zeros(mesh.size, np.int64)
    if layout.unreduced:
        coordinates = mesh.coordinates()
        for axis in sorted(map(mesh.axis_names.index, layout.unreduced)):
            addends = addends * mesh.shape[axis] + coordinates[:, axis]
    return addends


def _add(plan: Runnable, sources: list[Array], results: list[Array]) -> None:
    """Add the second and further addends to the first, which is in place, in the order of their coordinates."""
    assert isinstance(plan.src, Partition)
    addends = addends_of(plan.src)
    rows = np.concatenate([plan.kept, plan.transfers])
    pieces = np.concatenate([plan.core.kept_pieces(), plan.core.pieces()])[:, 1]
    sides = [np.concatenate([plan.core.local_boxes(side, True), plan.core.local_boxes(side, False)]) for side in (0, 1)]
    order = np.argsort(addends[rows["src_device"]], kind="stable")
    for i in order[addends[rows["src_device"][order]] > 0].tolist():
        source, device = int(rows["src_device"][i]), int(rows["dst_device"][i])
        from_box, to_box = (tuple(slice(*side) for side in boxes[i].tolist()) for boxes in sides)
        window = plan.core.place(1, device, int(pieces[i]))[1]
        total = box_view(results[device], window, to_box)
        np.add(total, box_view(sources[source], None, from_box), out=total)
