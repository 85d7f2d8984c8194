"""The dialect of `spmd_types`: for each mesh axis how values are distributed over it, and which axes cut which dims.

A type is `R` or `I` (every rank has the same), `P` (partial sums), `V` (values differ) or `S(i)` (dim `i` is cut). `S`
says no order where several axes cut a dim: a `PartitionSpec` does, with `V` for its axes. `R` and `I` differ in their
gradients only, which a layout does not have: `R` is written, both are read.

No package is needed: types are given as text (`"R"`, `"S(1)"`), and those of `spmd_types` 0.3 are read as well;
`to_spmd_type` makes these.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from .._arguments import instance
from .._text import counted, shown
from ..errors import LayoutError
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ._axes import checked_layout, checked_mesh, checked_rank, spec_names
from ._plain import whole_axes_layout

__all__ = ["SpmdTypes", "from_spmd_types", "to_spmd_type", "to_spmd_types"]

_SHARD = re.compile(r"S\((-?\d{1,9})\)")
_KINDS = ("R", "I", "V", "P")


class SpmdTypes(NamedTuple):
    """A layout as `spmd_types` has it: `str()` is the text of its `SpmdType`.

    Attributes:
        local_type: The type of each mesh axis, as text.
        partition_spec: The axes of each dim, major first, if several cut one; else `None`.
    """

    local_type: dict[str, str]
    partition_spec: tuple[str | tuple[str, ...] | None, ...] | None = None

    def __str__(self) -> str:
        types = ", ".join(f"{axis!r}: {kind}" for axis, kind in self.local_type.items())
        if self.partition_spec is None:
            return f"SpmdType({{{types}}})"
        return f"SpmdType({{{types}}}, PartitionSpec({', '.join(map(repr, self.partition_spec))}))"


def to_spmd_types(layout: TensorLayout) -> SpmdTypes:
    """Write a layout as types per mesh axis, with a `PartitionSpec` if several axes cut a dim.

    Raises:
        LayoutError: if the layout has no mesh, or has sub-axes or packed dims that no whole axes can express.

    >>> mesh = DeviceMesh((2, 4), ("data", "model"))
    >>> print(to_spmd_types(TensorLayout((None, "model"), mesh)))
    SpmdType({'data': R, 'model': S(1)})
    >>> print(to_spmd_types(TensorLayout((("model", "data"), None), mesh)))
    SpmdType({'data': V, 'model': V}, PartitionSpec(('model', 'data'), None))
    """
    layout, mesh = checked_layout(whole_axes_layout(instance("layout", layout, TensorLayout), "spmd_types"))
    dims = {name: dim for dim, spec in enumerate(layout.axes) for name in spec_names(spec)}
    several = any(len(spec_names(spec)) > 1 for spec in layout.axes)
    types = {}
    for name in mesh.axis_names:
        cut = "V" if several else f"S({dims.get(name)})"
        types[name] = "P" if name in layout.unreduced else cut if name in dims else "R"
    if not several:
        return SpmdTypes(types)
    spec = tuple(
        None if not names else names[0] if len(names) == 1 else names for names in map(spec_names, layout.axes)
    )
    return SpmdTypes(types, spec)


def from_spmd_types(given: Any, mesh: DeviceMesh, rank: int) -> TensorLayout:
    """Read types per mesh axis as a layout of a tensor of `rank` dims.

    Args:
        given: a mapping from axes to types, an `SpmdTypes`, an `SpmdType` of `spmd_types`, or its `PartitionSpec` or
            `TensorSharding`, whose further axes replicate.
        mesh: the mesh, whose axes are named as there.
        rank: the number of dims; those that a spec leaves out are not cut.

    Raises:
        LayoutError: if an axis of more than one rank has no type, or `V` without a dim; if several axes cut a dim and
            no spec has their order; if an axis is not one of the mesh.
        TypeError: if the value is of another type.

    >>> mesh = DeviceMesh((2, 4), ("data", "model"))
    >>> from_spmd_types({"data": "P", "model": "S(-1)"}, mesh, rank=2)
    TensorLayout((None, 'model'), DeviceMesh((2, 4), ('data', 'model')), unreduced=('data',))
    >>> from_spmd_types({"data": "V", "model": "R"}, mesh, rank=2)
    Traceback (most recent call last):
    shardwise.errors.LayoutError: axis 'data' is V: its values differ, but the dim that it cuts is not stated; S(dim)
    states it
    """
    checked_mesh(mesh)
    dims = checked_rank(rank)
    types, spec = _taken(given)
    kinds = {_axis(axis, mesh): _kind(axis, kind) for axis, kind in types.items()} if types is not None else None
    cut: dict[int, list[str]] = {}
    if spec is not None:
        if len(spec) > dims:
            raise LayoutError(
                f"the spec has {counted(len(spec), 'entry', 'entries')}, but the tensor has {counted(dims, 'dim')}"
            )
        for dim, entry in enumerate(spec):
            names = () if entry is None else entry if isinstance(entry, (tuple, list)) else (entry,)
            cut[dim] = [_axis(name, mesh) for name in names]
    placed = [name for names in cut.values() for name in names]
    for name, kind in (kinds or {}).items():
        if isinstance(kind, int):
            if not -dims <= kind < dims:
                raise LayoutError(f"axis {shown(name)} is S({kind}), but the tensor has {counted(dims, 'dim')}")
            if spec is not None:
                raise LayoutError(f"axis {shown(name)} is S({kind}), but with a spec its axes must be V")
            cut.setdefault(kind % dims, []).append(name)
        elif kind != "V" and name in placed:
            raise LayoutError(f"axis {shown(name)} is {kind}, but the spec has it too")
        elif kind == "V" and name not in placed and mesh.axis_size(name) > 1:
            raise LayoutError(
                f"axis {shown(name)} is V: its values differ, but the dim that it cuts is not stated; S(dim) states it"
            )
    large = {dim: [name for name in names if mesh.axis_size(name) > 1] for dim, names in cut.items()}
    if spec is None and (twice := next((dim for dim, names in large.items() if len(names) > 1), None)) is not None:
        raise LayoutError(
            f"dim {twice} is cut by the axes {shown(large[twice])}, and S does not state their order; "
            "a PartitionSpec does"
        )
    if kinds is not None:
        missing = [name for name in mesh.axis_names if name not in kinds and name not in placed]
        if unknown := next((name for name in missing if mesh.axis_size(name) > 1), None):
            raise LayoutError(f"axis {shown(unknown)} has no type; R, I, P, V and S(dim) are types")
    summed = [name for name in mesh.axis_names if kinds is not None and kinds.get(name) == "P"]
    return TensorLayout([tuple(cut.get(dim, ())) for dim in range(dims)], mesh, unreduced=summed)


def to_spmd_type(layout: TensorLayout) -> Any:
    """Return the layout as an `SpmdType` of the package `spmd_types`, which needs PyTorch.

    Raises:
        LayoutError: as `to_spmd_types`.
        ImportError: if the package is not installed.
    """
    made = to_spmd_types(layout)
    import spmd_types.types as package

    def kind(text: str) -> Any:
        found = _SHARD.fullmatch(text)
        return package.PerMeshAxisLocalSpmdType(text) if found is None else package.Shard(int(found[1]))

    types = {axis: kind(text) for axis, text in made.local_type.items()}
    spec = None if made.partition_spec is None else package.PartitionSpec(*made.partition_spec)
    return package.SpmdType(types, spec)


def _taken(given: Any) -> tuple[Mapping[Any, Any] | None, Any]:
    """Return the types per axis and the spec of what was given."""
    if hasattr(given, "local_type"):
        return given.local_type, given.partition_spec
    if isinstance(given, Mapping):
        return given, None
    if isinstance(given, (tuple, list)) or type(given).__name__ == "TensorSharding":
        return None, tuple(given)
    raise TypeError(f"expected types per mesh axis or a PartitionSpec, got {type(given).__name__}")


def _axis(axis: Any, mesh: DeviceMesh) -> str:
    """Return the axis of the mesh that is meant: by its name, or by the one name that an axis of the package has."""
    names = [axis] if isinstance(axis, str) else sorted(getattr(axis, "names", lambda: ())())
    found = [name for name in names if name in mesh.axis_names]
    if len(found) != 1:
        raise LayoutError(f"axis {shown(axis)} is not in the mesh; its axes are {shown(mesh.axis_names)}")
    return str(found[0])


def _kind(axis: Any, kind: Any) -> str | int:
    """Return a type: one of four letters, or the dim of `S`."""
    if isinstance(getattr(kind, "dim", None), int):
        return int(kind.dim)
    text = getattr(kind, "value", kind)
    if isinstance(text, str):
        if text in _KINDS:
            return text
        if found := _SHARD.fullmatch(text):
            return int(found[1])
    raise LayoutError(f"axis {shown(axis)} has the type {shown(kind)}; R, I, P, V and S(dim) are types")
