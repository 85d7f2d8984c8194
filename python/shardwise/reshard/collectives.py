"""A change of layout as a sequence of collectives: the cheapest one found, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from .._arguments import check_fields, instance
from .._core import CollectiveSearch
from .._core import Partition as CorePartition
from ..partition import Partition
from .cost import LinkModel, priced_steps, timed
from .kinds import CollectiveStep
from .same import same_devices

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ..mesh import DeviceMesh
    from ..tiling import Tiling

__all__ = ["CollectiveObstacle", "ObstacleKind", "device_map", "obstacle_between", "steps_between"]

#: The reasons why a change of layout is not a sequence of collectives.
ObstacleKind = Literal[
    "device-count",
    "devices",
    "device-order",
    "no-common-sub-axes",
    "indivisible",
    "unreduced-destination",
    "no-layout",
    "packed",
]


@dataclass(frozen=True)
class CollectiveObstacle:
    """A reason why a change of layout is not a sequence of collectives; `str` gives a sentence.

    | kind | the reason |
    |---|---|
    | `device-count` | the meshes are of different sizes |
    | `devices` | the meshes have different devices |
    | `device-order` | no reordering of axes or sub-axes gives the other mesh's order of devices |
    | `no-common-sub-axes` | the axes have no common refinement, like those of 6 × 4 and 4 × 6 |
    | `indivisible` | a dim does not divide, so the shards before are not unions or parts of those after |
    | `unreduced-destination` | a value cannot be cut into partial sums |
    | `no-layout` | one side is made of boxes, not by a layout |
    | `packed` | a dim is packed, so its parts are cut separately |
    """

    #: The kind of the reason.
    kind: ObstacleKind
    #: The reason in words, with its numbers.
    message: str

    def __post_init__(self) -> None:
        check_fields(self, kind=str, message=str)

    def __str__(self) -> str:
        return self.message


_NO_LAYOUT = CollectiveObstacle("no-layout", "a side of the plan is made of boxes, not by a layout")
_PACKED = CollectiveObstacle("packed", "a side of the plan has a packed dim, whose parts are cut separately")


def device_map(src: DeviceMesh, dst: DeviceMesh) -> npt.NDArray[np.int64] | None:
    """Return the position in `src` of each device of `dst`; `None` if they are equal, or not the same number."""
    return None if src.size != dst.size or src.given_labels == dst.given_labels else same_devices(src, dst)


def _search(src: Tiling, dst: Tiling) -> CollectiveSearch | CollectiveObstacle:
    if not (isinstance(src, Partition) and isinstance(dst, Partition)):
        return _NO_LAYOUT
    if not (isinstance(src.core, CorePartition) and isinstance(dst.core, CorePartition)):
        return _PACKED
    from_mesh, to_mesh = src.device_mesh, dst.device_mesh
    same = device_map(from_mesh, to_mesh)
    return CollectiveSearch(from_mesh.core, src.core, to_mesh.core, dst.core, same)


def obstacle_between(src: Tiling, dst: Tiling) -> CollectiveObstacle | None:
    """Return the reason why there is no sequence of collectives; `None` if there is one."""
    search = _search(src, dst)
    if isinstance(search, CollectiveObstacle):
        return search
    return None if search.obstacle is None else CollectiveObstacle(*search.obstacle)


def steps_between(
    src: Tiling, dst: Tiling, itemsize: int, links: LinkModel | None
) -> tuple[CollectiveStep, ...] | CollectiveObstacle:
    """Return the cheapest sequence of collectives; see `ReshardPlan.collectives`."""
    search = _search(src, dst)
    if isinstance(search, CollectiveObstacle):
        return search
    assert isinstance(src, Partition)
    assert isinstance(dst, Partition)
    # Of links that nobody knows only the bytes are certain.
    known = LinkModel(latency=0) if links is None else instance("links", links, LinkModel)
    along = [known.along(*names) for names in search.axes]
    found = search.steps(itemsize, [bandwidth for bandwidth, _ in along], [latency for _, latency in along])
    if isinstance(found, tuple):
        return CollectiveObstacle(*found)
    steps = list(priced_steps(found, src.device_mesh))
    if links is None:
        costs = timed(steps, src, itemsize, LinkModel())
        steps = [replace(step, seconds=cost.seconds) for step, cost in zip(steps, costs, strict=True)]
    if steps and src.device_mesh == dst.device_mesh:
        # The search leaves out axes of size 1, which cut nothing.
        steps[-1] = replace(steps[-1], layout=dst.layout)
    return tuple(steps)
