"""The cost of collectives: bytes, and seconds according to a model of the links."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from types import MappingProxyType
from typing import Any

from .._arguments import instance
from .._core import Layout as CoreLayout
from .._core import Partition as CorePartition
from .._core import priced_collectives
from .._dtypes import itemsize_of
from .._text import bytes_text, counted, seconds_text, shown
from ..errors import LayoutError, SizeOverflowError
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ..partition import Partition
from .kinds import Collective, CollectiveStep

__all__ = ["CollectiveCost", "LinkModel", "cost_of"]


class LinkModel:
    """The bandwidth and the latency of the links along each mesh axis.

    Args:
        bandwidth: bytes per second that a device receives; one number above 0, or one for each axis name.
        latency: seconds per message between neighbours along an axis; one number, or one for each axis name.

    Raises:
        LayoutError: if a number is negative or not finite, or a bandwidth is 0.
        SizeOverflowError: if an integer is too large for a float.
        TypeError: if an argument is neither a number nor a mapping from names to numbers.

    A step along axes of sizes `n` takes `latency` for each of its `n - 1` messages per axis (twice that for an
    all-reduce, one for a collective-permute), and the bytes that a device receives over the slowest axis's `bandwidth`.
    The neighbours along the sub-axis `(m)k` of an axis of size `m * k * r` are `r` apart, so each of its messages
    takes `r` latencies. A link model is immutable, comparable, hashable and picklable.

    >>> LinkModel(bandwidth={"model": 300e9, "data": 25e9}, latency=2e-6).of("data")
    (25000000000.0, 2e-06)
    """

    __slots__ = ("_bandwidth", "_latency")

    _bandwidth: float | Mapping[str, float]
    _latency: float | Mapping[str, float]

    def __init__(
        self, bandwidth: float | Mapping[str, float] = 50e9, latency: float | Mapping[str, float] = 1e-6
    ) -> None:
        object.__setattr__(self, "_bandwidth", _numbers("bandwidth", bandwidth))
        object.__setattr__(self, "_latency", _numbers("latency", latency))

    @property
    def bandwidth(self) -> float | Mapping[str, float]:
        """Bytes per second that a device receives; one number, or a read-only mapping from axis names."""
        return self._bandwidth

    @property
    def latency(self) -> float | Mapping[str, float]:
        """Seconds per message; one number, or a read-only mapping from axis names."""
        return self._latency

    def of(self, axis: str) -> tuple[float, float]:
        """Return the bandwidth and the latency of one axis.

        Raises:
            LayoutError: if the axis is not in a mapping.
        """
        return self.along(axis)

    def along(self, *names: str) -> tuple[float, float]:
        """Return bandwidth and latency of an axis that has several names: the first that a mapping has."""
        return _of("bandwidth", self._bandwidth, names), _of("latency", self._latency, names)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a LinkModel is immutable: {name} cannot be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a LinkModel is immutable: {name} cannot be deleted")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LinkModel):
            return NotImplemented
        return self._bandwidth == other._bandwidth and self._latency == other._latency

    def __hash__(self) -> int:
        return hash(tuple(_hashable(value) for value in (self._bandwidth, self._latency)))

    def __repr__(self) -> str:
        return f"LinkModel(bandwidth={_plain(self._bandwidth)!r}, latency={_plain(self._latency)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return LinkModel, (_plain(self._bandwidth), _plain(self._latency))


def _numbers(name: str, given: Any) -> float | Mapping[str, float]:
    if not isinstance(given, Mapping):
        return _number(name, name, given)
    for axis in given:
        if not isinstance(axis, str):
            raise TypeError(f"{name} must map axis names to numbers, got the key {shown(axis)}")
    return MappingProxyType(
        {str(axis): _number(name, f"{name} of axis {shown(axis)}", value) for axis, value in given.items()}
    )


def _number(name: str, what: str, given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, Real):
        raise TypeError(f"{name} must be a number or a mapping from axis names to numbers, got {shown(given)}")
    try:
        number = float(given)
    except OverflowError:
        raise SizeOverflowError(f"{what} is {shown(given)}, over the limit of {math.nextafter(math.inf, 0)}") from None
    if not (math.isfinite(number) and number >= 0):
        raise LayoutError(f"{what} is {number}; it must be finite and not negative")
    if name == "bandwidth" and number == 0:
        raise LayoutError(f"{what} is {number}; it must be above 0 bytes per second")
    return number


def _of(name: str, given: float | Mapping[str, float], names: tuple[str, ...]) -> float:
    if not isinstance(given, Mapping):
        return given
    found = next((axis for axis in names if axis in given), None)
    if found is None:
        wanted = " or ".join(shown(axis) for axis in dict.fromkeys(names))
        raise LayoutError(f"{name} has no entry for axis {wanted}; it has {shown(sorted(given))}")
    return given[found]


def _plain(given: float | Mapping[str, float]) -> float | dict[str, float]:
    return dict(given) if isinstance(given, Mapping) else given


def _hashable(given: float | Mapping[str, float]) -> Any:
    return frozenset(given.items()) if isinstance(given, Mapping) else given


@dataclass(frozen=True)
class CollectiveCost:
    """The cost of a sequence of collectives, together and step by step.

    >>> from shardwise import DeviceMesh, TensorLayout
    >>> src = TensorLayout(("x", None), DeviceMesh((4,), ("x",))).partition((64, 64))
    >>> print(cost_of([Collective("all-gather", ("x",), from_dim=0)], src, "float32"))
    each device receives 12.0 KiB in 1 step, about 3.25 µs
    """

    #: The steps with their costs.
    steps: tuple[CollectiveStep, ...]

    def __post_init__(self) -> None:
        steps = tuple(instance(f"steps[{number}]", step, CollectiveStep) for number, step in enumerate(self.steps))
        object.__setattr__(self, "steps", steps)

    @property
    def bytes(self) -> int:
        """The bytes that each device receives."""
        return sum(step.bytes for step in self.steps)

    @property
    def seconds(self) -> float:
        """The time of the steps one after another, by the link model."""
        return math.fsum(step.seconds for step in self.steps)

    def __str__(self) -> str:
        count = len(self.steps)
        steps = f"{counted(count, 'step')}"
        return f"each device receives {bytes_text(self.bytes)} in {steps}, about {seconds_text(self.seconds)}"


def cost_of(steps: Iterable[Collective], src: Partition, dtype: Any, links: LinkModel | None = None) -> CollectiveCost:
    """Return the cost of collectives that are carried out one after another, starting from a partition.

    Args:
        steps: the collectives; those of `ReshardPlan.collectives`, or your own.
        src: the partition before the first collective.
        dtype: the tensor's dtype.
        links: bandwidth and latency of each mesh axis; by default those of `LinkModel()`.

    Raises:
        LayoutError: if a collective cannot be carried out at its place, or leaves a dim in shards that do not divide
            it; the message names the step and the reason. Also if a dim of `src` does not divide.

    Bytes are those that each device receives. With shards of `s` bytes and axes of product `n`: 0 for a slice,
    `(n - 1) * s` for an all-gather, `(n - 1) * s / n` for an all-to-all and a reduce-scatter, twice that for an
    all-reduce (a ring), `s` for a collective-permute.

    >>> from shardwise import DeviceMesh, TensorLayout
    >>> src = TensorLayout((("node", "gpu"), None), DeviceMesh((2, 4), ("node", "gpu"))).partition((1024, 1024))
    >>> at_once = [Collective("all-gather", ("node", "gpu"), from_dim=0)]
    >>> in_turn = [Collective("all-gather", ("gpu",), from_dim=0), Collective("all-gather", ("node",), from_dim=0)]
    >>> links = LinkModel(bandwidth={"node": 25e9, "gpu": 300e9}, latency=1e-6)
    >>> [f"{cost_of(steps, src, 'float32', links).seconds:.1e}" for steps in (at_once, in_turn)]
    ['1.5e-04', '9.3e-05']
    """
    instance("src", src, Partition)
    links = LinkModel() if links is None else instance("links", links, LinkModel)
    given = [instance(f"steps[{number}]", step, Collective) for number, step in enumerate(steps)]
    return CollectiveCost(timed(given, src, itemsize_of(dtype), links))


def timed(given: Sequence[Collective], src: Partition, itemsize: int, links: LinkModel) -> tuple[CollectiveStep, ...]:
    """Return the collectives with their costs."""
    mesh = src.device_mesh
    bandwidth, latency = zip(*map(links.of, mesh.axis_names), strict=True)
    fields = [
        (step.kind, step.axes, step.from_dim, step.to_dim, _bound(number, step, mesh))
        for number, step in enumerate(given)
    ]
    if not isinstance(src.core, CorePartition):
        raise LayoutError("src has a packed dim, whose parts are cut separately; collectives are over whole dims")
    found = priced_collectives(mesh.core, src.core, fields, itemsize, bandwidth, latency)
    return tuple(priced_steps(found, mesh))


def _bound(number: int, step: Collective, mesh: DeviceMesh) -> CoreLayout | None:
    if step.layout is None:
        return None
    layout = step.layout
    if layout.device_mesh != mesh:
        raise LayoutError(f"steps[{number}].layout is on another mesh than src")
    return layout.core


def priced_steps(found: list[Any], mesh: DeviceMesh) -> Iterator[CollectiveStep]:
    """Yield the core's steps as `CollectiveStep`s, on the mesh of the source."""
    for kind, axes, from_dim, to_dim, size, seconds, specs, unreduced in found:
        layout = TensorLayout(specs, mesh, unreduced=unreduced)
        yield CollectiveStep(kind, axes, from_dim, to_dim, layout, size, seconds)
