"""Running a plan on arrays: the checks, the outputs, and the sums; the copies are the compiled module's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import LayoutError, SizeOverflowError

if TYPE_CHECKING:
    from .plan import ReshardPlan

__all__ = ["check_addable", "run_plan"]

Array = npt.NDArray[Any]

#: Up to how many bytes are allocated together; what is allocated together is freed together.
_BLOCK_BYTES = 1 << 24


def run_plan(
    plan: ReshardPlan,
    src_shards: Sequence[Array],
    out: Sequence[Array] | None,
    progress: Callable[[int, int], Any] | None,
) -> list[Array]:
    """Check everything, then write; see `ReshardPlan.run`."""
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be callable or None, got {type(progress).__name__}")
    sources = _checked("src_shards", src_shards, plan._source_bounds(), None)
    dtype = sources[0].dtype if sources else np.dtype(np.float64)
    bounds = plan.dst.boxes()
    if plan.addends > 1:
        check_addable(dtype)
    if out is None:
        results = _views(plan, sources)
    else:
        results = dict(enumerate(_checked("out", out, bounds, dtype)))
        for device, array in results.items():
            if not array.flags.writeable:
                raise ValueError(f"out[{device}] is read-only, so the shard cannot be written into it")
    copied = list(results) if out is not None else [d for d in range(len(bounds)) if d not in results]
    if dtype.hasobject and copied:
        raise TypeError(f"shards of dtype {dtype} hold references, which cannot be copied as bytes")
    if out is None:
        results |= _allocated(copied, bounds, dtype)
    outputs = np.full(len(bounds), -1, np.int64)
    outputs[copied] = np.arange(len(copied))
    if copied:
        plan._core.run(sources, [results[device] for device in copied], outputs.tolist(), progress)
    elif progress is not None:
        progress(0, 0)
    if plan.addends > 1:
        _add(plan, sources, results)
    return [results[device] for device in range(len(bounds))]


def check_addable(dtype: np.dtype[Any]) -> None:
    """Refuse dtypes whose sums are not of the dtype."""
    probe = np.empty(0, dtype)
    if dtype.hasobject or np.add(probe, probe).dtype != dtype.newbyteorder("="):
        raise TypeError(f"partial sums of dtype {dtype} cannot be added to one of the same dtype")


def _checked(
    name: str, arrays: Sequence[Array], bounds: npt.NDArray[np.int64], dtype: np.dtype[Any] | None
) -> list[Array]:
    """The arrays as a list, each of the shape of its box and all of one dtype."""
    if isinstance(arrays, (str, bytes, dict)) or not hasattr(arrays, "__iter__"):
        raise TypeError(f"{name} must be a sequence of numpy arrays, got {type(arrays).__name__}")
    checked = list(arrays)
    if len(checked) != len(bounds):
        raise LayoutError(f"{name} has {len(checked)} arrays but the plan has {len(bounds)}")
    shapes = (bounds[..., 1] - bounds[..., 0]).tolist()
    for i, (array, shape) in enumerate(zip(checked, shapes, strict=True)):
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name}[{i}] must be a numpy array, got {type(array).__name__}")
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(f"{name}[{i}] is a masked array, whose mask would be lost; give its filled() values")
        dtype = array.dtype if dtype is None else dtype
        if array.shape != tuple(shape) or array.dtype != dtype:
            raise LayoutError(
                f"{name}[{i}] is of shape {array.shape} and dtype {array.dtype}; "
                f"it must be of shape {tuple(shape)} and dtype {dtype}"
            )
    return checked


def _views(plan: ReshardPlan, sources: list[Array]) -> dict[int, Array]:
    """The destination shards that lie within what their device holds, as views of that."""
    if plan.addends > 1:
        return {}
    receives = np.zeros(plan.dst.device_mesh.size, np.bool_)
    receives[plan.transfers["dst_device"]] = True
    whole = plan.kept[~receives[plan.kept["dst_device"]]]
    origins = plan._source_bounds()[whole["src_device"], :, 0]
    pairs = zip(whole["src_device"].tolist(), whole["dst_device"].tolist(), strict=True)
    boxes = map(_box, whole["start"] - origins, whole["stop"] - origins)
    return {device: sources[source][box] for (source, device), box in zip(pairs, boxes, strict=True)}


def _allocated(devices: list[int], bounds: npt.NDArray[np.int64], dtype: np.dtype[Any]) -> dict[int, Array]:
    """New arrays; many small ones are cut from common blocks, for which the operating system has large pages.

    A page is made when it is first written to, and for many small arrays that takes longer than the copy itself.
    """
    shapes = (bounds[devices, :, 1] - bounds[devices, :, 0]).tolist()
    nbytes = [math.prod(shape) * dtype.itemsize for shape in shapes]
    arrays = {}
    try:
        if dtype.itemsize and sum(nbytes) >= _BLOCK_BYTES:
            for positions in _blocks(nbytes):
                block, at = np.empty(sum(_aligned(nbytes[i]) for i in positions), np.uint8), 0
                for i in positions:
                    arrays[devices[i]] = block[at : at + nbytes[i]].view(dtype).reshape(shapes[i])
                    at += _aligned(nbytes[i])
        for device, shape in zip(devices, shapes, strict=True):
            if device not in arrays:
                arrays[device] = np.empty(shape, dtype)
    except ValueError as error:  # numpy's word for a size that no address space holds
        raise SizeOverflowError(f"a shard of dtype {dtype} is over the address space: {error}") from None
    return arrays


def _blocks(nbytes: list[int]) -> Iterator[list[int]]:
    """The positions of small arrays that share a block."""
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
    # No dtype wants more than numpy's memory has.
    return -(-nbytes // 16) * 16


def _add(plan: ReshardPlan, sources: list[Array], results: dict[int, Array]) -> None:
    """Add the second and further addends to the first, which is there, in the order of their coordinates."""
    assert plan.src is not None
    layout = plan.src.layout.refined()
    mesh = layout._with_mesh("a plan")
    axes = sorted(mesh.axis_names.index(name) for name in layout.unreduced)
    coordinates = mesh.coordinates()[:, axes].T
    addends = np.ravel_multi_index(tuple(coordinates), [mesh.shape[axis] for axis in axes])
    rows = np.concatenate([plan.kept, plan.transfers])
    rows = rows[np.argsort(addends[rows["src_device"]], kind="stable")]
    rows = rows[addends[rows["src_device"]] > 0]
    source_origins = plan._source_bounds()[rows["src_device"], :, 0]
    target_origins = plan.dst.boxes()[rows["dst_device"], :, 0]
    for i, (source, device) in enumerate(zip(rows["src_device"].tolist(), rows["dst_device"].tolist(), strict=True)):
        start, stop = rows["start"][i], rows["stop"][i]
        addend = sources[source][_box(start - source_origins[i], stop - source_origins[i])]
        total = results[device][_box(start - target_origins[i], stop - target_origins[i])]
        np.add(total, addend, out=total)


def _box(start: npt.NDArray[np.int64], stop: npt.NDArray[np.int64]) -> tuple[Any, ...]:
    return (*map(slice, start.tolist(), stop.tolist()), ...)
