"""One layout in all dialects, side by side, as text; no framework is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .._arguments import instance
from .._text import shown
from ..errors import LayoutError, MeshError
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ..sub_axis import parse_sub_axis
from ._axes import checked_layout, spec_names
from ._plain import whole_axes_layout
from .hlo import to_hlo
from .shardy import to_shardy
from .spmd_types import to_spmd_types
from .torch import Partial, Replicate, Shard, StridedShard, to_placements

__all__ = ["DIALECTS", "translate"]


def translate(layout: TensorLayout, to: str | Iterable[str] | None = None) -> dict[str, str]:
    """Write a layout in other dialects.

    Args:
        layout: a layout with a mesh.
        to: the name of a dialect, or several; by default all of `DIALECTS`.

    Returns:
        For each dialect the layout as its users write it, or `"cannot express: "` and why not. In Megatron's tuples
        the name of an axis stands for a device's coordinate along it.

    Raises:
        LayoutError: if there is no such dialect, or the layout has no mesh.

    >>> from shardwise import DeviceMesh
    >>> mesh = DeviceMesh((2, 4), ("data", "model"))
    >>> for dialect, text in translate(TensorLayout((None, ("model", "data")), mesh)).items():
    ...     print(f"{dialect:9}{text}")
    jax      PartitionSpec(None, ('model', 'data'))
    torch    [_StridedShard(1, split_factor=4), Shard(1)]
    tf       cannot express: dim 1 is cut by the axes ('model', 'data'); TensorFlow has at most one axis per dim
    keras    cannot express: dim 1 is cut by the axes ('model', 'data'); Keras has at most one axis per dim
    hlo      {devices=[1,8]<=[2,4]T(1,0)}
    shardy   #sdy.sharding<@mesh, [{}, {"model", "data"}]>
    megatron rank_offsets=[(1, model*2 + data, 8)], replica_id=0
    spmd     SpmdType({'data': V, 'model': V}, PartitionSpec(None, ('model', 'data')))
    """
    if instance("layout", layout, TensorLayout).device_mesh is None:
        checked_layout(layout)  # Raises.
    names = list(DIALECTS) if to is None else [to] if isinstance(to, str) else list(to)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"to must be a dialect's name, or a sequence of them, got {type(name).__name__} in it")
        if name not in DIALECTS:
            raise LayoutError(f"to holds {shown(name)}; the dialects are {', '.join(DIALECTS)}")
    return {name: _attempt(_WRITERS[name], layout) for name in names}


def _attempt(write: Callable[[TensorLayout], str], layout: TensorLayout) -> str:
    try:
        return write(layout)
    except (LayoutError, MeshError) as error:
        return f"cannot express: {error}"


def _jax(layout: TensorLayout) -> str:
    layout = whole_axes_layout(layout, "JAX")
    arguments = [repr(spec) for spec in layout.axes]
    summed = [name for name in checked_layout(layout)[1].axis_names if name in layout.unreduced]
    if summed:
        arguments.append(f"unreduced={{{', '.join(map(repr, summed))}}}")
    return f"PartitionSpec({', '.join(arguments)})"


def _torch(layout: TensorLayout) -> str:
    def text(placement: Shard | StridedShard | Replicate | Partial) -> str:
        if isinstance(placement, StridedShard):
            return f"_StridedShard({placement.dim}, split_factor={placement.split_factor})"
        return f"Shard({placement.dim})" if isinstance(placement, Shard) else f"{type(placement).__name__}()"

    return f"[{', '.join(map(text, to_placements(layout)))}]"


def _tf(layout: TensorLayout) -> str:
    layout = _one_axis_a_dim(layout, "TensorFlow")
    _, mesh = checked_layout(layout)
    if mesh.size > _MAX_LISTED:
        raise MeshError(f"TensorFlow lists all devices; {mesh.size} are over the limit of {_MAX_LISTED}")
    if not mesh.has_default_devices:
        for label in mesh.labels():
            if not isinstance(label, str):
                raise MeshError(f"TensorFlow's devices have names, and {shown(label)} is not such a name")
    from ..dtensor import Layout

    return Layout.from_tensor_layout(layout).to_string()


def _keras(layout: TensorLayout) -> str:
    return repr(_one_axis_a_dim(layout, "Keras"))


def _one_axis_a_dim(layout: TensorLayout, who: str) -> TensorLayout:
    layout = whole_axes_layout(layout, who)
    for dim, spec in enumerate(layout.axes):
        if isinstance(spec, tuple):
            raise LayoutError(f"dim {dim} is cut by the axes {spec}; {who} has at most one axis per dim")
    if layout.unreduced:
        raise LayoutError(f"{shown(layout.unreduced)} are unreduced; {who} has no partial sums")
    return layout


def _megatron(layout: TensorLayout) -> str:
    layout, _ = checked_layout(layout)
    if layout.unreduced:
        raise LayoutError(f"{shown(layout.unreduced)} are unreduced; Megatron has no partial sums")
    offsets = [
        f"({dim}, {_number(layout, spec_names(spec))}, {count})"
        for dim, (spec, count) in enumerate(zip(layout.axes, layout.num_shards, strict=True))
        if count > 1
    ]
    return f"rank_offsets=[{', '.join(offsets)}], replica_id={_number(layout, layout.replicated_axes)}"


def _number(layout: TensorLayout, names: tuple[str, ...]) -> str:
    """Return the number that the coordinates over some axes spell, the first axis major, as a formula."""
    mesh = checked_layout(layout)[1]
    terms: list[str] = []
    weight = 1
    for name in reversed(names):
        if mesh.axis_size(name) > 1:
            digit = _digit(mesh, name)
            terms.insert(0, digit if weight == 1 else f"{digit}*{weight}")
        weight *= mesh.axis_size(name)
    return " + ".join(terms) or "0"


def _digit(mesh: DeviceMesh, name: str) -> str:
    """Return the coordinate along an axis, or along a sub-axis, as a formula of the axis's coordinate."""
    sub = parse_sub_axis(name, mesh.axis_names)
    if sub is None:
        return name
    size = mesh.axis_size(sub.axis)
    rest = size // (sub.before * sub.size)
    return (sub.axis if rest == 1 else f"{sub.axis}//{rest}") + (f"%{sub.size}" if sub.before > 1 else "")


#: The most devices for which the text is of use.
_MAX_LISTED = 2**16

_WRITERS: dict[str, Callable[[TensorLayout], str]] = {
    "jax": _jax,
    "torch": _torch,
    "tf": _tf,
    "keras": _keras,
    "hlo": to_hlo,
    "shardy": to_shardy,
    "megatron": _megatron,
    "spmd": lambda layout: str(to_spmd_types(layout)),
}

#: The dialects that `translate` knows.
DIALECTS: tuple[str, ...] = tuple(_WRITERS)
