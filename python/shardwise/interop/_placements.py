"""PyTorch's placements as values, read from and written as layouts; `torch` has the rules."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from .._arguments import INTEGER, check_fields, instance
from .._text import counted, shown
from ..errors import LayoutError
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ..sub_axis import is_sub_axis
from ._axes import checked_layout, checked_mesh, checked_rank
from ._strides import StridedCut, cut_of, read_factors, spec_of, split_factors

__all__ = [
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "StridedShard",
    "cuts_of",
    "from_placements",
    "mesh_of_layout",
    "read_placements",
    "to_placements",
]


@dataclass(frozen=True)
class Shard:
    """The mesh dim cuts the tensor dim `dim`."""

    dim: int

    def __post_init__(self) -> None:
        check_fields(self, dim=INTEGER)


@dataclass(frozen=True)
class StridedShard:
    """The mesh dim cuts each of `split_factor` pieces of the tensor dim `dim`: PyTorch's `_StridedShard`."""

    dim: int
    split_factor: int

    def __post_init__(self) -> None:
        check_fields(self, dim=INTEGER, split_factor=INTEGER)


@dataclass(frozen=True)
class Replicate:
    """The mesh dim replicates."""


@dataclass(frozen=True)
class Partial:
    """The mesh dim holds values still to be reduced by `reduce_op`."""

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        check_fields(self, reduce_op=Hashable)


Placement: TypeAlias = Shard | StridedShard | Replicate | Partial


def to_placements(layout: TensorLayout) -> list[Placement]:
    """Return one placement per mesh dim.

    Raises:
        LayoutError: if the layout has no mesh, names sub-axes that do not make up whole axes, has a packed dim that is
            not of equal segments cut alike, or cuts a dim by several axes of size 1 in an order that is not the
            mesh's.

    A packed dim of equal segments is a `_StridedShard` whose split factor is their number; placements do not keep
    the names and sizes of its parts.

    >>> mesh = DeviceMesh((4, 2), ("dp", "tp"))
    >>> to_placements(TensorLayout(("dp", None), mesh))
    [Shard(dim=0), Replicate()]
    >>> to_placements(TensorLayout((("tp", "dp"), None), mesh))
    [StridedShard(dim=0, split_factor=2), Shard(dim=0)]
    >>> from shardwise import packed
    >>> to_placements(TensorLayout((packed.gate_up("tp"), "dp"), mesh))
    [Shard(dim=1), StridedShard(dim=0, split_factor=2)]
    """
    mesh = mesh_of_layout(layout)
    for name in layout.unreduced:
        if is_sub_axis(name, mesh.axis_names):
            raise LayoutError(f"unreduced names the sub-axis {name!r}; PyTorch has whole axes only")
    placements: dict[str, Placement] = {name: Partial() for name in layout.unreduced}
    cuts = [cut_of(dim, spec, mesh) for dim, spec in enumerate(layout.axes)]
    for dim, cut in enumerate(cuts):
        for name, factor in split_factors(dim, cut, mesh).items():
            placements[name] = Shard(dim) if factor is None else StridedShard(dim, factor)
    result = [placements.get(name, Replicate()) for name in mesh.axis_names]
    back = cuts_of(result, mesh, layout.rank)
    if back != cuts:
        raise LayoutError(
            f"placements cannot say in which order axes of size 1 cut a dim: {shown(layout.axes)} would become "
            f"{shown(from_placements(result, mesh, layout.rank).axes)}"
        )
    return result


def mesh_of_layout(layout: TensorLayout) -> DeviceMesh:
    mesh = instance("layout", layout, TensorLayout).device_mesh
    # Without one, the check raises.
    return checked_layout(layout)[1] if mesh is None else mesh


def from_placements(placements: Iterable[Any], mesh: DeviceMesh, rank: int) -> TensorLayout:
    """Read placements, ours or PyTorch's, as a layout over `mesh`.

    Args:
        placements: one per axis of the mesh.
        mesh: the mesh; see `mesh_from_torch`.
        rank: the number of dims.

    Raises:
        LayoutError: if a layout cannot express a placement, or a placement is for a dim that does not exist.
        TypeError: if an entry is not a placement.

    >>> mesh = DeviceMesh((4, 2), ("dp", "tp"))
    >>> from_placements([StridedShard(0, split_factor=2), Shard(0)], mesh, rank=2).axes
    (('tp', 'dp'), None)
    >>> from_placements([Replicate(), StridedShard(0, split_factor=3)], mesh, rank=2).axes
    (packed.parse('(3 n@tp)'), None)
    >>> from_placements([Replicate(), Partial("max")], mesh, rank=2)
    Traceback (most recent call last):
    shardwise.errors.LayoutError: placements[1] is Partial(reduce_op='max'); unreduced axes of a layout are sums
    """
    checked_mesh(mesh)
    read = read_placements(placements, mesh, rank)
    unreduced = []
    for i, (name, placement) in enumerate(zip(mesh.axis_names, read, strict=True)):
        if isinstance(placement, Partial):
            if placement.reduce_op != "sum":
                raise LayoutError(f"placements[{i}] is {placement}; unreduced axes of a layout are sums")
            unreduced.append(name)
    specs = []
    for dim, cut in enumerate(cuts_of(read, mesh, rank)):
        if cut is None:
            own = [one for one in read if isinstance(one, (Shard, StridedShard)) and one.dim == dim]
            raise LayoutError(
                f"placements {shown(own)} cut dim {dim} over {shown(mesh)}: a split_factor is not a product of axes "
                "and sub-axes that cut it, with equal segments around all of them, so no layout expresses it"
            )
        specs.append(spec_of(cut))
    return TensorLayout(specs, mesh, unreduced=unreduced)


def cuts_of(placements: list[Placement], mesh: DeviceMesh, rank: int) -> list[StridedCut | None]:
    """Return the axes that cut each dim; `None` if no layout can express the cut."""
    cuts: list[list[tuple[str, int | None]]] = [[] for _ in range(rank)]
    for name, placement in zip(mesh.axis_names, placements, strict=True):
        if isinstance(placement, (Shard, StridedShard)):
            factor = placement.split_factor if isinstance(placement, StridedShard) else None
            cuts[placement.dim].append((name, factor))
    return [read_factors(own, mesh) for own in cuts]


def read_placements(placements: Iterable[Any], mesh: DeviceMesh, rank: int) -> list[Placement]:
    """Read placements, ours or PyTorch's, as ours, with dims from 0 to `rank - 1`.

    Raises:
        LayoutError: if there is not one per axis of the mesh, or one is for a dim that does not exist, or of a
            kind that is not supported here.
        TypeError: if an entry is not a placement.

    >>> read_placements([Shard(-1)], DeviceMesh((4,), ("x",)), rank=2)
    [Shard(dim=1)]
    """
    dims = checked_rank(rank)
    read = [_read(i, placement, dims) for i, placement in enumerate(placements)]
    if len(read) != checked_mesh(mesh).ndim:
        raise LayoutError(
            f"placements has {counted(len(read), 'entry', 'entries')}, but the axes of the mesh are "
            f"{shown(mesh.axis_names)}"
        )
    return read


def _read(i: int, placement: Any, rank: int) -> Placement:
    # By name: PyTorch's classes without importing PyTorch; its subclasses of Partial are other operations.
    kind = type(placement).__name__
    if kind == "Replicate":
        return Replicate()
    if kind == "Partial":
        return Partial(placement.reduce_op)
    if kind not in ("Shard", "StridedShard", "_StridedShard"):
        message = f"placements[{i}] must be a Shard, a Replicate, a Partial or a _StridedShard, got {shown(placement)}"
        # PyTorch has further kinds, such as MaskPartial, all of one base.
        known = any(base.__name__ == "Placement" for base in type(placement).__mro__)
        raise LayoutError(message) if known else TypeError(message)
    dim = _integer(i, placement, "dim")
    if not -rank <= dim < rank:
        raise LayoutError(f"placements[{i}] is {shown(placement)}, but the tensor has {counted(rank, 'dim')}")
    dim += rank * (dim < 0)
    if kind == "Shard":
        return Shard(dim)
    split_factor = _integer(i, placement, "split_factor")
    if split_factor < 1:
        raise LayoutError(f"placements[{i}] is {shown(placement)}; a split_factor is at least 1")
    return StridedShard(dim, split_factor)


def _integer(i: int, placement: Any, name: str) -> int:
    # Other classes are called Shard too, such as that of a sharded array.
    value = getattr(placement, name, None)
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"placements[{i}] must have an integer {name}, got {shown(placement)}")
    return int(value)
