"""Collectives: a change of layout in the field's terms, what it costs, and what each step does, in plain numpy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .. import _core
from .._text import bytes_text
from ..errors import LayoutError, MeshError
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ..mesh_views import factored
from ..partition import Partition
from ..sub_axis import parse_sub_axis
from .run import check_addable

__all__ = ["CollectiveKind", "CollectiveStep", "LinkModel", "apply_steps", "price"]

#: What a collective is called.
CollectiveKind = Literal["slice", "all-gather", "all-to-all", "reduce-scatter", "all-reduce", "collective permute"]
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class LinkModel:
    """What the links along each mesh axis can do.

    A step along axes of sizes `n` takes `latency` for each of its `n - 1` messages per axis (twice that for an
    all-reduce, one for a permute), and the bytes that a device receives over the slowest axis's `bandwidth`.

    >>> LinkModel(bandwidth={"model": 300e9, "data": 25e9}, latency=2e-6).of("data")
    (25000000000.0, 2e-06)
    """

    #: Bytes per second that a device receives; one number, or one for each axis name.
    bandwidth: float | Mapping[str, float] = 50e9
    #: Seconds per message; one number, or one for each axis name.
    latency: float | Mapping[str, float] = 1e-6

    def of(self, axis: str) -> tuple[float, float]:
        """Give the bandwidth and the latency of one axis.

        Raises:
            LayoutError: if the axis is not in a mapping, or a number is negative, zero bandwidth, or not finite.
        """
        sub = parse_sub_axis(axis)
        if sub is not None and not any(
            isinstance(given, Mapping) and axis in given for given in (self.bandwidth, self.latency)
        ):
            axis = sub.axis  # The links of an axis are those of its factors.
        bandwidth, latency = _number("bandwidth", self.bandwidth, axis), _number("latency", self.latency, axis)
        if bandwidth <= 0:
            raise LayoutError(f"bandwidth of axis {axis!r} is {bandwidth}; it must be above 0 bytes per second")
        return bandwidth, latency


def _number(name: str, given: float | Mapping[str, float], axis: str) -> float:
    if isinstance(given, Mapping):
        if axis not in given:
            raise LayoutError(f"{name} has no entry for axis {axis!r}; it has {sorted(given)}")
        given = given[axis]
    if isinstance(given, (bool, str)) or not hasattr(given, "__float__"):
        raise TypeError(f"{name} must be a number or a mapping from axis names to numbers, got {given!r}")
    number = float(given)
    if not (math.isfinite(number) and number >= 0):
        raise LayoutError(f"{name} of axis {axis!r} is {number}; it must be finite and not negative")
    return number


@dataclass(frozen=True)
class CollectiveStep:
    """One collective of a sequence."""

    #: What it does.
    kind: CollectiveKind
    #: Along which mesh axes, major first.
    axes: tuple[str, ...]
    #: The dim that is put together, if one is.
    from_dim: int | None
    #: The dim that is cut, if one is.
    to_dim: int | None
    #: The bytes that each device receives.
    bytes: int
    #: How long it takes, by the link model.
    seconds: float
    #: The layout after it.
    layout: TensorLayout

    def __str__(self) -> str:
        along = ", ".join(self.axes)
        cut = f"dim {self.to_dim} is cut"
        what = {
            "slice": f"each device keeps its part, {cut}",
            "all-gather": f"dim {self.from_dim} is put together",
            "all-to-all": f"dim {self.from_dim} is put together, {cut}",
            "reduce-scatter": f"partial sums are added, {cut}",
            "all-reduce": "partial sums are added",
            "collective permute": f"shards change places, to {self.layout.axes}",
        }[self.kind]
        received = "nothing moves" if self.kind == "slice" else f"each device receives {bytes_text(self.bytes)}"
        return f"{self.kind} along {along}: {what}; {received}"


def price(src: Partition, dst: Partition, itemsize: int, links: LinkModel) -> tuple[CollectiveStep, ...] | None:
    """Find the cheapest sequence; see `ReshardPlan.price`."""
    if not isinstance(links, LinkModel):
        raise TypeError(f"links must be a LinkModel, got {type(links).__name__}")
    mesh = src.device_mesh
    if mesh != dst.device_mesh or src.is_packed or dst.is_packed:
        return None
    if src.layout.refined() is not src.layout or dst.layout.refined() is not dst.layout:
        return _price_refined(src, dst, itemsize, links)
    bandwidth, latency = zip(*(links.of(name) for name in mesh.axis_names), strict=True)
    assert isinstance(src._core, _core.Partition)
    assert isinstance(dst._core, _core.Partition)
    found = _core.collectives(src._core, dst._core, itemsize, bandwidth, latency)
    if found is None:
        return None
    names = mesh.axis_names
    steps = []
    for kind, axes, from_dim, to_dim, size, seconds, specs, unreduced in found:
        layout = TensorLayout(
            [[names[axis] for axis in spec] for spec in specs], mesh, unreduced=[names[axis] for axis in unreduced]
        )
        steps.append(CollectiveStep(kind, tuple(names[axis] for axis in axes), from_dim, to_dim, size, seconds, layout))
    if steps:
        # The search leaves out axes of size 1, which cut nothing.
        steps[-1] = replace(steps[-1], layout=dst.layout)
    return tuple(steps)


def _price_refined(
    src: Partition, dst: Partition, itemsize: int, links: LinkModel
) -> tuple[CollectiveStep, ...] | None:
    """As `price`, over the mesh in which the sub-axes of both sides are axes."""
    named = [name for side in (src, dst) for name in side.layout._named_axes()]
    try:
        mesh = factored(src.device_mesh, named)
    except MeshError:
        return None  # The sub-axes of the two sides have no common refinement.
    before, after = (side.layout._over(mesh).partition(side.shape, side.uneven) for side in (src, dst))
    return price(before, after, itemsize, links)


def apply_steps(
    src: Partition, shards: Sequence[Array], steps: Sequence[CollectiveStep], dst: Partition
) -> list[Array]:
    """Carry out a sequence; see `ReshardPlan.run_collectives`."""
    layout, arrays = src.layout, list(shards)
    for step in steps:
        # Where there are sub-axes, the steps are over a mesh in which they are axes; the devices are the same.
        arrays = _apply(step, layout, arrays, step.layout.device_mesh or dst.device_mesh, src.shape)
        layout = step.layout
    return arrays


def _apply(
    step: CollectiveStep, layout: TensorLayout, shards: list[Array], mesh: DeviceMesh, shape: tuple[int, ...]
) -> list[Array]:
    """Each device's shard after the step, out of those of its group: the devices that differ in the step's axes."""
    if step.kind == "collective permute":
        return _permute(step, layout, shards, mesh, shape)
    axes = [mesh.axis_names.index(name) for name in step.axes]
    sizes = [mesh.shape[axis] for axis in axes]
    coordinates = mesh.coordinates()
    place = np.ravel_multi_index(tuple(coordinates[:, axes].T), sizes)
    others = np.delete(coordinates, axes, axis=1)
    groups: dict[bytes, list[int]] = {}
    for device in np.argsort(place, kind="stable").tolist():
        groups.setdefault(others[device].tobytes(), []).append(device)
    after: list[Array] = []
    for device, (own, i) in enumerate(zip(shards, place.tolist(), strict=True)):
        group = [shards[member] for member in groups[others[device].tobytes()]]
        if step.kind == "slice":
            after.append(_part(own, step.to_dim, i, len(group)))
        elif step.kind == "all-gather":
            after.append(_joined(group, step.from_dim))
        elif step.kind == "all-to-all":
            after.append(_joined([_part(s, step.to_dim, i, len(group)) for s in group], step.from_dim))
        elif step.kind == "reduce-scatter":
            after.append(_sum([_part(s, step.to_dim, i, len(group)) for s in group]))
        else:
            after.append(_sum(group))
    return after


def _part(array: Array, dim: int | None, number: int, parts: int) -> Array:
    assert dim is not None
    length = array.shape[dim] // parts
    part: Array = array[(slice(None),) * dim + (slice(number * length, (number + 1) * length),)]
    return part


def _joined(parts: list[Array], dim: int | None) -> Array:
    assert dim is not None
    # Told the dtype, since numpy would turn the bytes of another byte order round.
    whole: Array = np.concatenate(parts, axis=dim, dtype=parts[0].dtype)
    return whole


def _sum(addends: list[Array]) -> Array:
    check_addable(addends[0].dtype)
    total: Array = addends[0].copy()
    for addend in addends[1:]:
        np.add(total, addend, out=total)
    return total


def _permute(
    step: CollectiveStep, layout: TensorLayout, shards: list[Array], mesh: DeviceMesh, shape: tuple[int, ...]
) -> list[Array]:
    """Each device takes the shard of the first device that has its new box and its place among the addends."""
    addend = mesh.coordinates()[:, [mesh.axis_names.index(name) for name in step.layout.unreduced]]

    def keys(of: TensorLayout) -> list[tuple[bytes, bytes]]:
        boxes = of.partition(shape).boxes()
        return [(box.tobytes(), place.tobytes()) for box, place in zip(boxes, addend, strict=True)]

    holder: dict[tuple[bytes, bytes], Array] = {}
    for key, shard in zip(keys(layout), shards, strict=True):
        holder.setdefault(key, shard)
    return [holder[key] for key in keys(step.layout)]
