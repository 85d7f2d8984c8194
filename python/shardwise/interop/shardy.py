"""Shardy's text: `#sdy.sharding<@mesh, [{"x"}, {"y", "z"}]>` and `#sdy.mesh<["x"=2, "y"=4]>`; needs no MLIR.

Shardy says what a layout says: ordered axes and sub-axes (`"x":(2)4`) per dim, and unreduced axes. It also
has open dims (`{"x", ?}`) and priorities (`{"x"}p1`), which are refused. The axes that it lists as `replicated` are
those that a layout leaves unused. A mesh has device numbers and no labels: `devices` says which label has which number.

The form is that of `shardy/dialect/sdy/ir/attrs.td`, as MLIR prints and reads it.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from .._text import counted, shown
from ..errors import LayoutError, MeshError, ParseError
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ..sub_axis import SubAxis, parse_sub_axis
from ._axes import checked_layout, checked_mesh, spec_names
from ._shardy_tokens import ShardyReader

__all__ = ["from_shardy", "mesh_from_shardy", "mesh_to_shardy", "to_shardy"]

_BARE_SYMBOL = re.compile(r"[A-Za-z_][\w$.]*", re.ASCII)


def to_shardy(layout: TensorLayout, mesh_name: str | None = "mesh") -> str:
    """Write a layout as a Shardy sharding.

    Args:
        layout: a layout with a mesh.
        mesh_name: the symbol of the mesh; `None` writes the mesh in its place, as JAX does. See `mesh_to_shardy`.

    Raises:
        LayoutError: if the layout has no mesh.

    >>> mesh = DeviceMesh((2, 2, 2), ("x", "y", "z"))
    >>> to_shardy(TensorLayout(("x", ("z", "y")), mesh))
    '#sdy.sharding<@mesh, [{"x"}, {"z", "y"}]>'
    >>> to_shardy(TensorLayout(("x", None), mesh, unreduced=["z"]), mesh_name=None)
    '#sdy.sharding<mesh<["x"=2, "y"=2, "z"=2]>, [{"x"}, {}], unreduced={"z"}>'
    """
    layout, mesh = checked_layout(layout)
    name = mesh_to_shardy(mesh).removeprefix("#sdy.") if mesh_name is None else _symbol(mesh_name)
    dims = ", ".join(_axis_list(mesh, spec_names(spec)) for spec in layout.axes)
    summed = sorted(layout.unreduced, key=lambda name: _place(mesh, name))
    unreduced = f", unreduced={_axis_list(mesh, summed)}" if summed else ""
    return f"#sdy.sharding<{name}, [{dims}]{unreduced}>"


def from_shardy(text: str, mesh: DeviceMesh | None = None) -> TensorLayout:
    """Read a Shardy sharding as a layout.

    Args:
        text: `#sdy.sharding<…>`, or the part in angle brackets.
        mesh: the mesh that the text names; not needed if the text holds it.

    Raises:
        ParseError: if the text is not a sharding.
        LayoutError: if dims are open or have priorities, which a layout cannot express; if sub-axes overlap or do not
            divide their axis; if the mesh is missing, or is not the one in the text.

    >>> mesh = DeviceMesh((2, 4), ("x", "y"))
    >>> from_shardy('#sdy.sharding<@mesh, [{"x"}, {"y"}], replicated={}, unreduced={}>', mesh).axes
    ('x', 'y')
    >>> from_shardy('#sdy.sharding<@mesh, [{"y":(1)2}, {"x"}]>', mesh).axes
    ('y:(1)2', 'x')
    >>> from_shardy('#sdy.sharding<@mesh, [{"x", ?}, {}]>', mesh)
    Traceback (most recent call last):
    shardwise.errors.LayoutError: dim 0 is open (?): the compiler decides how to cut it, which a layout cannot
    express
    """
    reader = ShardyReader(text)
    reader.skip_word("#sdy.sharding", "sdy.sharding")
    reader.expect("<")
    written = _labelled(*_read_mesh(reader), None) if reader.skip_word("mesh") else None
    if written is None:
        reader.symbol()
    reader.expect(",")
    reader.expect("[")
    dims: list[list[_AxisRef]] = []
    while not reader.skip("]"):
        if dims:
            reader.expect(",")
        dims.append(_read_dim(reader, len(dims)))
    lists: dict[str, list[_AxisRef]] = {}
    while not reader.skip(">"):
        reader.expect(",")
        name = reader.word("replicated", "unreduced")
        if name in lists:
            raise reader.refusal(f"{name} axes are listed twice")
        reader.expect("=")
        if not reader.skip_word("sum") and reader.at_word():
            raise LayoutError(
                f"{name} axes are to be reduced by {reader.word()!r}; a layout can only express axes that are summed"
            )
        lists[name] = _read_axes(reader)
        _check_sorted(name, lists[name], written if mesh is None else mesh)
    reader.end()
    mesh = _one_mesh(mesh, written)
    axes = [tuple(_axis_of(mesh, axis) for axis in dim) for dim in dims]
    unreduced = [_axis_of(mesh, axis) for axis in lists.get("unreduced", ())]
    layout = TensorLayout(axes, mesh, unreduced=unreduced)
    for axis in lists.get("replicated", ()):
        name = _axis_of(mesh, axis)
        try:
            TensorLayout((*axes, (name,)), mesh, unreduced=unreduced)
        except LayoutError:
            raise LayoutError(
                f"axis {shown(name)} is listed as replicated, but it cuts a dim or is unreduced"
            ) from None
    return layout


def mesh_to_shardy(mesh: DeviceMesh, devices: Sequence[Hashable] | None = None) -> str:
    """Write a mesh as Shardy does.

    Args:
        mesh: the mesh, whose axes and devices are written.
        devices: the label of each device number; by default `"cpu:0"`, `"cpu:1"`, …

    Raises:
        MeshError: if the mesh's devices are not those of `devices`, in any order.

    >>> mesh_to_shardy(DeviceMesh((2, 2), ("x", "y")))
    '#sdy.mesh<["x"=2, "y"=2]>'
    >>> mesh_to_shardy(DeviceMesh((2,), ("x",), devices=["b", "a"]), devices=["a", "b"])
    '#sdy.mesh<["x"=2], device_ids=[1, 0]>'
    """
    checked_mesh(mesh)
    axes = ", ".join(f"{_string(name)}={size}" for name, size in zip(mesh.axis_names, mesh.shape, strict=True))
    ids = _device_ids(mesh, devices)
    device_ids = f", device_ids=[{', '.join(map(str, ids))}]" if ids else ""
    return f"#sdy.mesh<[{axes}]{device_ids}>"


def mesh_from_shardy(text: str, devices: Sequence[Hashable] | None = None) -> DeviceMesh:
    """Read a mesh as Shardy writes it: `#sdy.mesh<…>`, or the operation `sdy.mesh @name = <…>`.

    Args:
        text: the mesh.
        devices: the label of each device number; by default `"cpu:0"`, `"cpu:1"`, …

    Raises:
        ParseError: if the text is not a mesh.
        MeshError: if the mesh has no axes (a single device), or `devices` do not fit it.

    >>> mesh_from_shardy('#sdy.mesh<["x"=2], device_ids=[1, 0]>')
    DeviceMesh((2,), ('x',), devices=['cpu:1', 'cpu:0'])
    """
    reader = ShardyReader(text)
    if reader.skip_word("#sdy.mesh", "sdy.mesh", "mesh") and not reader.at("<"):
        reader.symbol()
        reader.expect("=")
    mesh, ids = _read_mesh(reader)
    reader.end()
    if devices is None:
        return _labelled(mesh, ids, None)
    labels = list(devices)
    if len(labels) != mesh.size:
        raise MeshError(
            f"devices has {counted(len(labels), 'label')}, but the mesh {shown(text)} has "
            f"{counted(mesh.size, 'device')}"
        )
    return _labelled(mesh, ids, labels)


def _device_ids(mesh: DeviceMesh, devices: Sequence[Hashable] | None) -> list[int]:
    """Return the device numbers, or nothing if they are 0, 1, … in order."""
    if devices is None and mesh.has_default_devices:
        return []
    labels = [f"cpu:{number}" for number in range(mesh.size)] if devices is None else list(devices)
    number_of = {label: number for number, label in enumerate(labels)}
    own = list(mesh.labels())
    if len(labels) != len(number_of) or set(own) != set(number_of):
        raise MeshError(
            f"devices: Shardy numbers devices and has no labels; mesh_to_shardy(mesh, devices=…) takes the "
            f"{mesh.size} labels of {shown(mesh)} in the order of their numbers"
        )
    ids = [number_of[label] for label in own]
    return [] if ids == list(range(mesh.size)) else ids


class _AxisRef(NamedTuple):
    name: str
    #: The times that the axis is cut before a sub-axis, and the size of that.
    part: tuple[int, int] | None


def _read_dim(reader: ShardyReader, dim: int) -> list[_AxisRef]:
    axes = _read_axes(reader, open_dim=dim)
    if reader.at_word() and reader.word().startswith("p"):
        raise LayoutError(f"dim {dim} has a priority, an order for the compiler, which a layout cannot express")
    return axes


def _read_axes(reader: ShardyReader, open_dim: int | None = None) -> list[_AxisRef]:
    reader.expect("{")
    axes: list[_AxisRef] = []
    while not reader.skip("}"):
        if axes:
            reader.expect(",")
        if open_dim is not None and reader.skip("?"):
            raise LayoutError(
                f"dim {open_dim} is open (?): the compiler decides how to cut it, which a layout cannot express"
            )
        name, part = reader.string(), None
        if reader.skip(":"):
            reader.expect("(")
            before = reader.number()
            reader.expect(")")
            part = before, reader.number()
        axes.append(_AxisRef(name, part))
    return axes


def _read_mesh(reader: ShardyReader) -> tuple[DeviceMesh, list[int] | None]:
    """Return the axes, and the device numbers if the text has them."""
    reader.expect("<")
    reader.expect("[")
    names: list[str] = []
    sizes: list[int] = []
    while not reader.skip("]"):
        if names:
            reader.expect(",")
        names.append(reader.string())
        reader.expect("=")
        sizes.append(reader.number())
    ids: list[int] | None = None
    if reader.skip(","):
        reader.word("device_ids")
        reader.expect("=")
        reader.expect("[")
        ids = []
        while not reader.skip("]"):
            if ids:
                reader.expect(",")
            ids.append(reader.number())
    reader.expect(">")
    if not names:
        raise MeshError(
            f"{shown(reader.text)}: a mesh without axes is a single device; a DeviceMesh has at least one axis"
        )
    mesh = DeviceMesh(sizes, names)
    if ids is not None and (len(ids) != mesh.size or set(ids) != set(range(mesh.size))):
        raise MeshError(f"{shown(reader.text)}: device_ids are not 0 to {mesh.size - 1}, each once")
    return mesh, ids


def _labelled(mesh: DeviceMesh, ids: list[int] | None, labels: list[Hashable] | None) -> DeviceMesh:
    if ids is None:
        return mesh if labels is None else DeviceMesh(mesh.shape, mesh.axis_names, labels)
    return DeviceMesh(mesh.shape, mesh.axis_names, [f"cpu:{i}" if labels is None else labels[i] for i in ids])


def _check_sorted(what: str, axes: list[_AxisRef], mesh: DeviceMesh | None) -> None:
    """Shardy lists such axes once, in the order of the mesh, and parts of one axis major first."""
    names = [] if mesh is None else list(mesh.axis_names)
    places = [(names.index(axis.name) if axis.name in names else len(names), axis.part or (1, 1)) for axis in axes]
    for first, second, before, after in zip(axes, axes[1:], places, places[1:], strict=False):
        if first == second or (before >= after and first.name in names):
            raise ParseError(
                f"{what} axes are listed once, in the order of the mesh, but {shown(second.name)} comes after "
                f"{shown(first.name)}"
            )


def _one_mesh(given: DeviceMesh | None, written: DeviceMesh | None) -> DeviceMesh:
    if given is None:
        if written is None:
            raise LayoutError("mesh is needed: the text names its mesh, but does not hold it")
        return written
    checked_mesh(given)
    if written is not None and given != written:
        same_axes = (given.shape, given.axis_names) == (written.shape, written.axis_names)
        # The text has numbers instead of labels; they can only differ if they stand for the same labels.
        reordered = not written.has_default_devices and set(given.labels()) == set(written.labels())
        if not same_axes or reordered:
            raise LayoutError(f"mesh is {shown(given)}, but the text holds {shown(written)}")
    return given


def _axis_of(mesh: DeviceMesh, axis: _AxisRef) -> str:
    """Return the axis, or the sub-axis, as a layout names it."""
    if axis.name not in mesh.axis_names:
        raise LayoutError(f"axis {shown(axis.name)} is not in the mesh; its axes are {shown(mesh.axis_names)}")
    if axis.part is None or axis.part == (1, mesh.axis_size(axis.name)):
        return axis.name
    before, size = axis.part
    if before < 1 or size < 1 or mesh.axis_size(axis.name) % (before * size):
        raise LayoutError(
            f"{shown(axis.name)}:({before}){size} does not divide the axis {shown(axis.name)} of size "
            f"{mesh.axis_size(axis.name)}"
        )
    return str(SubAxis(axis.name, before, size))


def _place(mesh: DeviceMesh, name: str) -> tuple[int, int]:
    """Return the position of an axis or a sub-axis in the mesh."""
    sub = _sub_axis(mesh, name)
    return mesh.axis_names.index(name if sub is None else sub.axis), 1 if sub is None else sub.before


def _sub_axis(mesh: DeviceMesh, name: str) -> SubAxis | None:
    return None if name in mesh.axis_names else parse_sub_axis(name)


def _axis_list(mesh: DeviceMesh, names: Sequence[str]) -> str:
    """Return the axes as Shardy writes them: without sub-axes of size 1 or that are the whole axis."""
    written = []
    for name in names:
        sub = _sub_axis(mesh, name)
        if sub is None or sub.size == mesh.axis_size(sub.axis):
            written.append(_string(name if sub is None else sub.axis))
        elif sub.size > 1:
            written.append(f"{_string(sub.axis)}:({sub.before}){sub.size}")
    return f"{{{', '.join(written)}}}"


def _symbol(name: str) -> str:
    return f"@{name}" if _BARE_SYMBOL.fullmatch(name) else f"@{_string(name)}"


def _string(text: str) -> str:
    r"""Write a string as MLIR does: what is not printable ASCII by the hexadecimal digits of its bytes.

    >>> print(_string('a "b" \\ é'))
    "a \22b\22 \\ \C3\A9"
    """
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise LayoutError(f"{shown(text)} cannot be written as UTF-8, which MLIR's strings need") from error
    special = {ord('"'): r"\22", ord("\\"): r"\\"}
    letters = [special.get(byte) or (chr(byte) if 32 <= byte < 127 else rf"\{byte:02X}") for byte in data]
    return f'"{"".join(letters)}"'
