"""Collectives carried out one at a time, in plain numpy, as the devices of a cluster would."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .._types import Array, Numbers
from ..sub_axis import SubAxis, parse_sub_axis
from .run import check_addable

if TYPE_CHECKING:
    from ..mesh import DeviceMesh
    from ..partition import Partition
    from .kinds import CollectiveStep

__all__ = ["run_steps"]


def run_steps(src: Partition, shards: Sequence[Array], steps: Sequence[CollectiveStep]) -> list[Array]:
    """Run a sequence of collectives; return one array per device of the source's mesh, in its order."""
    layout, arrays = src.layout, list(shards)
    for step in steps:
        assert step.layout is not None
        before, after = (each.partition(src.shape).boxes() for each in (layout, step.layout))
        if step.kind == "collective-permute":
            arrays = _permuted(arrays, before, after, _digits(src.device_mesh, step.layout.unreduced))
        else:
            arrays = list(_exchanged(step, arrays, before, after, _groups(src.device_mesh, step.axes)))
        layout = step.layout
    return arrays


def _digits(mesh: DeviceMesh, names: Iterable[str]) -> npt.NDArray[np.int64]:
    """Return the contribution of each (sub-)axis to a device's coordinate along its mesh axis: (devices, names)."""
    columns = [digit * rest for _, digit, rest in _parts(mesh, names)]
    rows: npt.NDArray[np.int64] = np.array(columns, np.int64).reshape(-1, mesh.size).T.copy()
    return rows


def _parts(mesh: DeviceMesh, names: Iterable[str]) -> Iterator[tuple[int, npt.NDArray[np.int64], int]]:
    """Yield for each name the position of its mesh axis, all devices' coordinates along it, and its stride."""
    coordinates = mesh.coordinates()
    for name in names:
        part = None if name in mesh.axis_names else parse_sub_axis(name)
        part = part or SubAxis(name, 1, mesh.axis_size(name))
        axis = mesh.axis_names.index(part.axis)
        rest = mesh.shape[axis] // (part.before * part.size)
        yield axis, coordinates[:, axis] // rest % part.size, rest


def _groups(mesh: DeviceMesh, names: Sequence[str]) -> Iterator[list[int]]:
    """Return for each device the devices, itself included, that differ only along some axes, in the mesh's order."""
    others = mesh.coordinates().copy()
    for axis, digit, rest in _parts(mesh, names):
        others[:, axis] -= digit * rest
    groups: dict[bytes, list[int]] = {}
    keys = [row.tobytes() for row in others]
    for device, key in enumerate(keys):
        groups.setdefault(key, []).append(device)
    return (groups[key] for key in keys)


def _exchanged(
    step: CollectiveStep, shards: list[Array], before: Numbers, after: Numbers, groups: Iterable[list[int]]
) -> Iterator[Array]:
    """Yield each device's shard after the step, made from the shards of its group."""
    for device, group in enumerate(groups):
        wanted = after[device]
        if step.kind == "slice":
            yield shards[device][_within(wanted, before[device])]
        elif step.kind in ("all-reduce", "reduce-scatter"):
            yield _sum([shards[member][_within(wanted, before[member])] for member in group])
        else:
            whole = np.empty(wanted[:, 1] - wanted[:, 0], shards[device].dtype)
            for member in group:
                start = np.maximum(wanted[:, 0], before[member, :, 0])
                stop = np.maximum(np.minimum(wanted[:, 1], before[member, :, 1]), start)
                common = np.stack([start, stop], axis=1)
                whole[_within(common, wanted)] = shards[member][_within(common, before[member])]
            yield whole


def _within(box: Numbers, of: Numbers) -> tuple[Any, ...]:
    # With an ellipsis, since without one the box of an array that has no dims is a scalar, not an array.
    return (*(slice(start, stop) for start, stop in (box - of[:, :1]).tolist()), ...)


def _sum(addends: list[Array]) -> Array:
    check_addable(addends[0].dtype)
    total: Array = addends[0].copy()
    for addend in addends[1:]:
        np.add(total, addend, out=total)
    return total


def _permuted(shards: list[Array], before: Numbers, after: Numbers, addend: npt.NDArray[np.int64]) -> list[Array]:
    """Return each device's shard: that of the first device with its new box and its addend."""
    holder: dict[tuple[bytes, bytes], Array] = {}
    for box, place, shard in zip(before, addend, shards, strict=True):
        holder.setdefault((box.tobytes(), place.tobytes()), shard)
    return [holder[box.tobytes(), place.tobytes()] for box, place in zip(after, addend, strict=True)]
