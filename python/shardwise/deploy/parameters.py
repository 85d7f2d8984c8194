"""Parameters of an engine that are made of several tensors: fused projections, stacked experts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from .._arguments import check_items, instance, integer, optional, sizes_of
from .._text import counted, shown
from ..errors import LayoutError, MeshError
from ..piece import Slices
from ..reshard.model.memory import Repeat
from ..rules.templates import parse_template
from .numbers import Number
from .rule import Coordinates
from .world import coordinates_of

if TYPE_CHECKING:
    from ..mesh import DeviceMesh
    from ..partition import Partition

__all__ = ["FusedParameter", "HeldPart", "LocalParameter", "ParameterPiece", "Repeat", "local_parameters", "shapes_of"]


@dataclass(frozen=True)
class FusedParameter:
    """A parameter that holds several tensors one after the other, or stacked.

    Args:
        name: a template of the parameter's name, such as `"layers.{i}.qkv_proj.weight"`.
        parts: templates of the names of the tensors in it, in order along dim 0.
        stack: a field of the parts that is not in the name: the tensors of all its numbers on a device are stacked in a
            new first dim.
        slots: the order in which they are stacked, as an entry of a list of lists of the deployment's numbers, such as
            `"slots[ep]"`; the index may use the fields of the name and the device's coordinates. By default each number
            once, in ascending order. A device with no such tensor has an empty parameter.
        after: templates of tensors without the field of the stack, one for each part, that are stacked after all
            others, such as those of a shared expert.
        at: coordinates by the names of axes of the tensors' mesh: the devices there have the parameter, and elsewhere
            its tensors are parameters of their own.

    Raises:
        LayoutError: if templates have choices, or fields that the name does not have; if `slots` is not an expression.
        TypeError: if an argument is of the wrong type.

    >>> FusedParameter("layers.{i}.qkv", ("layers.{i}.q", "layers.{i}.k", "layers.{i}.v")).parts
    ('layers.{i}.q', 'layers.{i}.k', 'layers.{i}.v')
    """

    name: str
    parts: tuple[str, ...]
    stack: str | None = None
    slots: str | None = None
    after: tuple[str, ...] = ()
    at: Mapping[str, int] | tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.parts, str) or not isinstance(self.parts, Sequence) or not self.parts:
            raise TypeError(f"parts must be a sequence of templates, got {shown(self.parts)}")
        object.__setattr__(self, "parts", tuple(self.parts))
        object.__setattr__(self, "after", tuple(self.after))
        check_items("parts", self.parts, str)
        check_items("after", self.after, str)
        places = self.at.items() if isinstance(self.at, Mapping) else self.at
        placed = tuple((instance("an axis of at", axis, str), integer(f"at[{shown(axis)}]", at)) for axis, at in places)
        object.__setattr__(self, "at", placed)
        optional("stack", self.stack, str)
        optional("slots", self.slots, str)
        if self.slots is not None and self.stack is None:
            raise LayoutError("slots is given, but nothing is stacked")
        if self.after and (self.stack is None or len(self.after) != len(self.parts)):
            raise LayoutError(
                f"after has {counted(len(self.after), 'template')}; it must have one for each part of a stack, "
                f"{len(self.parts)}"
            )
        if self.slots is not None:
            Coordinates("slots", self.slots, 1)  # Raises, if it cannot be read.
        fields = parse_template(instance("name", self.name, str)).fields
        for text in (self.name, *self.parts, *self.after):
            if parse_template(text).choices:
                raise LayoutError(f"the template {shown(text)} has a choice; write a part for each")
        stack = {self.stack} if self.stack is not None else set()
        for part, own in (*((part, fields | stack) for part in self.parts), *((part, fields) for part in self.after)):
            if parse_template(part).fields != own:
                raise LayoutError(f"the part {shown(part)} does not have the fields of the name {shown(self.name)}")


@dataclass(frozen=True)
class ParameterPiece:
    """A box of a tensor, and where it begins in a parameter.

    Attributes:
        tensor: The name of the tensor.
        box: The box in the tensor.
        start: The position in the parameter at which the box begins, one number per dim of the parameter.
    """

    tensor: str
    box: Slices
    start: tuple[int, ...]


@dataclass(frozen=True)
class LocalParameter:
    """One parameter of a device; what no piece covers is padding.

    Attributes:
        shape: The parameter's shape on the device.
        pieces: The pieces of the parameter, in order.
        slabs: The rows of the parameter that are the device's own array of a tensor: the tensor's name, the index in
            the stack (`None` if the parameter is not stacked), the first row, and the row after the last.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[ParameterPiece, ...]
    slabs: tuple[tuple[str, int | None, int, int], ...] = ()

    def views(self, array: Any) -> dict[str, Any]:
        """Return each tensor's own array on the device as a view of the parameter's, to receive into it.

        If a tensor has several places, as a redundant expert may have, its name gives the first of them, and a `Repeat`
        each further one: the runners of plans fill these too. A transport of your own, which has descriptors only,
        calls `repeat` when it has received everything.

        Args:
            array: the parameter's memory: a numpy array, a tensor of PyTorch, anything that slices as these do.

        Raises:
            LayoutError: if `array` is of another shape than the parameter.

        >>> import numpy as np
        >>> from shardwise import DeviceMesh
        >>> from shardwise.deploy import Deployment, FusedParameter
        >>> mesh = DeviceMesh((2,), ("tp",))
        >>> engine = Deployment(2, mesh, {"q|k": ("tp",)}, parameters=[FusedParameter("qk", ("q", "k"))])
        >>> (qk,) = engine.parameters_of("cpu:1", {"q": (4,), "k": (2,)})
        >>> memory = np.zeros(3, int)
        >>> qk.views(memory)["k"][:] = 7
        >>> memory
        array([0, 0, 7])
        """
        found: dict[str, Any] = {}
        for tensor, place, view in self._views(array):
            found[Repeat(tensor, place or 0) if tensor in found else tensor] = view
        return found

    def repeat(self, array: Any) -> None:
        """Copy each tensor that the array holds more than once from its first place to the others.

        Raises:
            LayoutError: if the array is of another shape.
        """
        first: dict[str, Any] = {}
        for tensor, _, view in self._views(array):
            if tensor in first:
                view[...] = first[tensor]
            else:
                first[tensor] = view

    def _views(self, array: Any) -> Iterator[tuple[str, int | None, Any]]:
        if tuple(array.shape) != self.shape:
            raise LayoutError(f"the array of {shown(self.name)} is of shape {tuple(array.shape)}, not {self.shape}")
        for tensor, slot, start, stop in self.slabs:
            one = array if slot is None else array[slot]
            yield tensor, slot, one[start:stop] if one.shape else one


class HeldPart(NamedTuple):
    """A device's part of a tensor.

    Attributes:
        partition: The cut of the tensor.
        mesh: The mesh of its rule, all of it.
        at: The coordinates that the rule gives, by axis, and the fields of the name on which they depend.
        is_here: Whether the device holds a part of it.
    """

    partition: Partition
    mesh: DeviceMesh
    at: Mapping[str, tuple[tuple[int, ...], tuple[str, ...]]]
    is_here: bool


def local_parameters(
    fused: Sequence[FusedParameter], device: Any, tensors: Mapping[str, HeldPart], numbers: Mapping[str, Number]
) -> list[LocalParameter]:
    """Put together the parameters of a device from its tensors; see `Deployment.parameters_of`."""
    found: dict[str, LocalParameter] = {}
    taken: set[str] = set()
    here = {name: held for name, held in tensors.items() if held.is_here}
    lacking: dict[str, tuple[str, str]] = {}
    for each in fused:
        for name, rows, stacked in _groups(each, device, here, numbers, lacking):
            if name in found:
                raise LayoutError(f"two parameters of {shown(device)} are called {shown(name)}")
            found[name] = _joined(name, rows, stacked, device, here)
            taken.update(part for row in rows for part in row)
        if each.slots is not None and len(here) < len(tensors):
            found |= {name: LocalParameter(name, shape, ()) for name, shape in _empty(each, device, tensors, numbers)}
    if alone := next((name for name in lacking if name not in taken), None):
        parameter, missing = lacking[alone]
        raise LayoutError(
            f"the parameter {shown(parameter)} of {shown(device)} is made of {shown(alone)} and {shown(missing)}, but "
            f"{shown(missing)} is not among the tensors: give all of them, or none"
        )
    tensors = here
    if clashing := [name for name in found if name in tensors and name not in taken]:
        raise LayoutError(
            f"the parameter {shown(clashing[0])} of {shown(device)} is made of other tensors, but there is a tensor of "
            "this name too; leave it out"
        )
    # In the order of the tensors, each parameter where its first tensor is.
    first = {parameter.pieces[0].tensor if parameter.pieces else name: name for name, parameter in found.items()}
    result = []
    for tensor in tensors:
        if tensor in first:
            result.append(found.pop(first[tensor]))
        elif tensor not in taken:
            result.append(_joined(tensor, [(tensor,)], False, device, tensors))
    return [*result, *found.values()]


def _groups(
    fused: FusedParameter,
    device: Any,
    tensors: Mapping[str, HeldPart],
    numbers: Mapping[str, Number],
    lacking: dict[str, tuple[str, str]],
) -> Iterator[tuple[str, list[tuple[str, ...]], bool]]:
    """Yield the names of parameters, with their tensors: a row for each entry of a stack.

    Tensors of parameters of which others are missing go into `lacking`, with the parameter and one that is missing.
    """
    patterns = [parse_template(part) for part in fused.parts]
    target, last = parse_template(fused.name), [parse_template(part) for part in fused.after]
    #: The tensors of the parts, by the fields of the name, by the number in the stack.
    groups: dict[tuple[tuple[str, str], ...], dict[int, dict[int, str]]] = {}
    for tensor in tensors:
        for part, pattern in enumerate(patterns):
            fields = pattern.matched(tensor)
            if fields is None:
                continue
            number = 0 if fused.stack is None else _number(fused.stack, fields.pop(fused.stack), tensor)
            groups.setdefault(tuple(sorted(fields.items())), {}).setdefault(number, {})[part] = tensor
    for given, by_number in groups.items():
        values = dict(given)
        order = sorted(by_number)
        mesh = tensors[next(iter(by_number[order[0]].values()))].mesh
        place = coordinates_of(mesh, device)
        if any(place.get(axis) != at for axis, at in dict(fused.at).items()):
            continue
        after = tuple(pattern.filled(values) for pattern in last)
        missing = [
            pattern.filled(values if fused.stack is None else {**values, fused.stack: str(number)})
            for number in order
            for part, pattern in enumerate(patterns)
            if part not in by_number[number]
        ]
        missing += [name for name in after if name not in tensors]
        if missing:
            those = (part for parts in by_number.values() for part in parts.values())
            lacking.update(dict.fromkeys(those, (target.filled(values), missing[0])))
            continue
        if fused.slots is not None:
            order = _slots(fused.slots, values, device, mesh, numbers)
            if missing_numbers := [number for number in order if number not in by_number]:
                raise LayoutError(
                    f"{fused.slots} has {missing_numbers[0]} on {shown(device)}, but the tensors there lack it"
                )
            if more := sorted(by_number.keys() - {*order}):
                raise LayoutError(
                    f"{fused.slots} has no {more[0]} on {shown(device)}, but there is a tensor with that number"
                )
        rows = [tuple(by_number[number][part] for part in range(len(patterns))) for number in order]
        yield target.filled(values), [*rows, after] if after else rows, fused.stack is not None


def _empty(
    fused: FusedParameter, device: Any, tensors: Mapping[str, HeldPart], numbers: Mapping[str, Number]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of stacks without entries, each entry as large as it is on a device that has some."""
    assert fused.stack is not None
    assert fused.slots is not None
    patterns = [parse_template(part) for part in fused.parts]
    target = parse_template(fused.name)
    #: A tensor and its shape, by the fields of the name and the part.
    found: dict[tuple[tuple[tuple[str, str], ...], int], tuple[str, tuple[int, ...]]] = {}
    for tensor, held in tensors.items():
        for part, pattern in enumerate(patterns):
            fields = pattern.matched(tensor)
            key = (tuple(sorted((name, text) for name, text in (fields or {}).items() if name != fused.stack)), part)
            if fields is not None and key not in found:
                shape = _shape_on(held, device, fused.stack)
                if shape is not None:
                    found[key] = tensor, shape
    for (given, part), (tensor, shape) in found.items():
        shapes = [found[given, other][1] for other in range(len(patterns)) if (given, other) in found]
        if part or len(shapes) < len(patterns) or fused.after:
            continue
        if not _slots(fused.slots, dict(given), device, tensors[tensor].mesh, numbers):
            yield target.filled(dict(given)), (0, sum(one[0] for one in shapes), *shape[1:])


def _shape_on(held: HeldPart, device: Any, stack: str) -> tuple[int, ...] | None:
    """Return the shape of a tensor on a device if all numbers of the stack were there; `None` if not even then."""
    mesh = held.mesh
    try:
        place = coordinates_of(mesh, device)
    except (MeshError, TypeError):
        return None
    for axis, (at, fields) in held.at.items():
        if stack in fields:
            place[axis] = at[0]
        elif place[axis] not in at:
            return None
    return held.partition.holder_shape(mesh.device(mesh.device_index(tuple(place.values()))))


def _slots(
    text: str, fields: Mapping[str, str], device: Any, mesh: DeviceMesh, numbers: Mapping[str, Number]
) -> list[int]:
    """Return the numbers of the entries that a device stacks, in order."""
    place = coordinates_of(mesh, device)
    known = {**numbers, **place, **{name: int(text) for name, text in fields.items() if text.isdecimal()}}
    listed = re.match(r"\s*(\w+)\s*\[", text)
    entries = known.get(listed[1]) if listed else None
    if not isinstance(entries, tuple) or not all(isinstance(entry, tuple) for entry in entries):
        raise LayoutError(f"slots is {shown(text)}; it must be an entry of a list of lists of the deployment's numbers")
    return list(Coordinates("slots", text, 2**62).in_order(known))


def _number(field: str, text: str, tensor: str) -> int:
    if not text.isdecimal() or len(text) > 18:
        raise LayoutError(f"tensor {shown(tensor)}: the field {field} is {shown(text)}, which is not a whole number")
    return int(text)


def _joined(
    name: str, rows: Sequence[tuple[str, ...]], stacked: bool, device: Any, tensors: Mapping[str, HeldPart]
) -> LocalParameter:
    """Return the tensors of a fused parameter, joined into one `LocalParameter`."""
    pieces: list[ParameterPiece] = []
    slabs: list[tuple[str, int | None, int, int]] = []
    shapes = []
    for number, row in enumerate(rows):
        at = 0
        shape: tuple[int, ...] | None = None
        for tensor in row:
            partition = tensors[tensor].partition
            own = partition.holder_shape(device)
            if shape is not None and (not own or own[1:] != shape[1:]):
                raise LayoutError(
                    f"{name}: the tensor {shown(tensor)} is of shape {own} on {shown(device)}, but the tensor before "
                    f"it is of shape {shape}"
                )
            for piece in partition.pieces(device):
                assert isinstance(piece.start, tuple)
                if math.prod(side.stop - side.start for side in piece.box):
                    begins = (piece.start[0] + at, *piece.start[1:]) if piece.start else ()
                    pieces.append(ParameterPiece(tensor, piece.box, (number, *begins) if stacked else begins))
            slabs.append((tensor, number if stacked else None, at, at + (own[0] if own else 0)))
            at += own[0] if own else 0
            shape = (at, *own[1:]) if own else ()
        assert shape is not None
        shapes.append(shape)
    if len(set(shapes)) > 1:
        raise LayoutError(
            f"{name}: the tensors to be stacked are of shapes {shown(sorted(set(shapes)))} on {shown(device)}"
        )
    whole = (len(rows), *shapes[0]) if stacked else shapes[0]
    return LocalParameter(name, whole, tuple(pieces), tuple(slabs))


def shapes_of(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors: shapes, pairs of shape and dtype, or what has a shape, by name."""
    if not isinstance(tensors, Mapping):
        raise TypeError(f"tensors must map names to shapes, got {type(tensors).__name__}")
    found = {}
    for name, given in tensors.items():
        shape = getattr(given, "shape", given)
        if isinstance(shape, (tuple, list)) and len(shape) == 2 and isinstance(shape[0], (tuple, list)):
            shape = shape[0]
        found[name] = sizes_of(f"the shape of {shown(name)}", shape)
    return found
