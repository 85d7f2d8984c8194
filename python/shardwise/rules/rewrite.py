"""One rewrite, from one side to another, and the entry that it is read from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .._arguments import integer
from .._expressions import parse_expression
from .._text import shown
from ..errors import LayoutError
from ..packed import PackedDim
from .arrangement import Arrangement, parse_arrangement
from .numbers import NamedNumbers, numbered
from .templates import Template, parse_template, ways

__all__ = ["Rewrite", "Side", "read_rewrite"]

_SIDE_KEYS = ("name", "parts", "where", "also", "packed", "dim", "transpose", "dims", "stack", "pad_to", "zigzag")
_REWRITE_KEYS = ("from", "to", "size", "optional", "refused")
_LARGEST = 2**63 - 1


@dataclass(frozen=True)
class Side:
    """One side of a rewrite: the names and the form of its tensors.

    Attributes:
        names: The templates by part; one template under `""` if the parts are packed in one tensor, or there are none.
        also: Templates of further names that the same tensor has.
        where: The template of a tensor that must be there too, if the side is read.
        packed: The order of the parts in a dim; `None` if no dim is packed.
        dim: The dim that is packed, padded or in zigzag order, in the tensor after it is taken apart and transposed.
        transpose: Whether the last two dims are swapped.
        dims: The way in which all dims are split, merged and permuted, and the dims along which tensors are stacked.
        stack: The fields along which tensors are stacked in first dims.
        pad_to: The dim is padded with zeros to a multiple of this.
        zigzag: The dim is in so many pairs of chunks, each the next from its beginning and the next from its end.
    """

    names: tuple[tuple[str, Template], ...]
    also: tuple[Template, ...] = ()
    where: Template | None = None
    packed: PackedDim | None = None
    dim: int = 0
    transpose: bool = False
    dims: Arrangement | None = None
    stack: tuple[str, ...] = ()
    pad_to: int | None = None
    zigzag: int | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts that one tensor here has, or that have a tensor each; empty if there are none."""
        if self.packed is not None:
            return self.packed.names
        return tuple(part for part, _ in self.names if part)

    @property
    def fields(self) -> frozenset[str]:
        """The fields of its templates, with the one that is stacked."""
        return self.names[0][1].fields | frozenset(self.stack)

    def described(self) -> Any:
        """Return the entry of `Rewrites` that describes this side."""
        found: dict[str, Any] = {}
        if len(self.names) == 1 and not self.names[0][0]:
            found["name"] = self.names[0][1].text
        else:
            found["parts"] = {part: template.text for part, template in self.names}
        if self.where is not None:
            found["where"] = self.where.text
        if self.also:
            found["also"] = [template.text for template in self.also]
        for key, usual in (("packed", None), ("dim", 0), ("transpose", False), ("pad_to", None), ("zigzag", None)):
            if getattr(self, key) != usual:
                found[key] = getattr(self, key)
        if self.dims is not None:
            found["dims"] = self.dims.text
        elif self.stack:
            found["stack"] = self.stack[0] if len(self.stack) == 1 else list(self.stack)
        return found["name"] if list(found) == ["name"] else found


@dataclass(frozen=True)
class Rewrite:
    """A rewrite of the tensors of one side into those of another.

    `size` is the size of a padded dim without its padding.
    """

    source: Side
    target: Side
    size: int | None = None
    optional: bool = False
    #: The reason why no tensor can be rewritten so.
    refused: str | None = None
    #: The model's numbers with which the rewrite was made, for messages.
    numbers: tuple[tuple[str, int], ...] = field(default=(), compare=False)

    def turned(self) -> Rewrite:
        """Return the inverse rewrite, from the target to the source.

        Raises:
            LayoutError: if the target is padded and the size without padding is not given.
        """
        if self.target.pad_to is not None and self.size is None:
            raise LayoutError(
                f"the rewrite to {shown(self.target.names[0][1].text)} cannot be undone: size is missing, and "
                "nothing else says how much is padding"
            )
        return replace(self, source=self.target, target=self.source)

    def described(self) -> dict[str, Any]:
        """Return the entry of `Rewrites` that describes this rewrite."""
        found: dict[str, Any] = {"from": self.source.described(), "to": self.target.described()}
        if self.size is not None:
            found["size"] = self.size
        if self.optional:
            found["optional"] = True
        if self.refused is not None:
            found["refused"] = self.refused
        return found


def read_rewrite(value: Any, numbers: NamedNumbers) -> list[Rewrite]:
    """Return the rewrites that an entry describes: one for each text of the choices that both sides have."""
    if not isinstance(value, Mapping):
        raise TypeError(f"expected a mapping with from and to, got {shown(value)}")
    _check_keys(value, _REWRITE_KEYS)
    for key in ("from", "to"):
        if key not in value:
            raise LayoutError(f"{key!r} is missing")
    size = None if value.get("size") is None else _integer("size", numbers.number("size", value["size"]), 0)
    optional, refused = value.get("optional", False), value.get("refused")
    if not isinstance(optional, bool):
        raise TypeError(f"optional must be true or false, got {shown(optional)}")
    if refused is not None and not isinstance(refused, str):
        raise TypeError(f"refused must be text that says why, got {shown(refused)}")
    sides = [_side(key, value[key], numbers) for key in ("from", "to")]
    said = _numbers_of(value, sides, numbers)
    shared = [choice for choice in _choices(sides[0]) if choice in _choices(sides[1])]
    found = []
    for texts in ways(shared):
        pair = []
        for key, side in zip(("from", "to"), sides, strict=True):
            names, also, where = side.names, side.also, side.where
            for choice, text in zip(shared, texts, strict=True):
                names = tuple((part, template.chosen(choice, text)) for part, template in names)
                also = tuple(template.chosen(choice, text) for template in also)
                where = None if where is None else where.chosen(choice, text)
            pair.append(_by_part(key, replace(side, names=names, also=also, where=where)))
        _check_pair(pair[0], pair[1], size)
        found.append(Rewrite(pair[0], pair[1], size, optional, refused, said))
    return found


def _numbers_of(value: Mapping[str, Any], sides: Sequence[Side], numbers: NamedNumbers) -> tuple[tuple[str, int], ...]:
    """Return the numbers that a rewrite is written with, with their values, each once."""
    tables = [side for side in value.values() if isinstance(side, Mapping)]
    texts = [value.get("size"), *(side.get(key) for side in tables for key in ("pad_to", "zigzag"))]
    names = [name for text in texts if isinstance(text, str) for name in parse_expression(text).names]
    names += [name for side in sides if side.dims is not None for name, _ in side.dims.sizes]
    found = dict(numbers.for_messages(names))
    for side in sides:
        if side.packed is not None:
            found.update(side.packed.numbers)
    return tuple(found.items())


def _side(key: str, value: Any, numbers: NamedNumbers) -> Side:
    if isinstance(value, str):
        return Side((("", parse_template(value, numbers)),))
    if not isinstance(value, Mapping):
        raise TypeError(f"{key} must be a template or a table, got {shown(value)}")
    sizes = {str(name): size for name, size in value.items() if name not in _SIDE_KEYS}
    if "packed" not in value and "dims" not in value:
        _check_keys(value, _SIDE_KEYS, key)
    names = _names(key, value, numbers)
    also = value.get("also", ())
    if not isinstance(also, (list, tuple)):
        raise TypeError(f"{key}: also must be a list of templates, got {shown(also)}")
    if also and "parts" in value:
        raise LayoutError(f"{key}: 'also' adds names to one tensor, but parts have a tensor each")
    transpose = value.get("transpose", False)
    if not isinstance(transpose, bool):
        raise TypeError(f"{key}: transpose must be true or false, got {shown(transpose)}")
    packed, dims = _packed(key, value, sizes, numbers), _dims(key, value, sizes, numbers)
    texts = [text for text in (value.get("packed"), value.get("dims")) if isinstance(text, str)]
    if unused := [name for name in sizes if not any(name in re.findall(r"\w+", text) for text in texts)]:
        if not texts:
            raise LayoutError(f"{key}: {shown(unused[0])} is given, but packed is not text")
        raise LayoutError(f"{key}: sizes has {shown(unused[0])}, which {' and '.join(map(shown, texts))} does not name")
    if packed is not None and value.get("zigzag") is not None:
        raise LayoutError(f"{key}: a dim is packed or in zigzag order, not both")
    if dims is not None and (transpose or value.get("stack") is not None):
        raise LayoutError(
            f"{key}: dims says what is stacked and transposed, so stack and transpose cannot be given too"
        )

    def number(name: str) -> int | None:
        given = value.get(name)
        return None if given is None else _integer(f"{key}: {name}", numbers.number(f"{key}: {name}", given), 1)

    return Side(
        names,
        tuple(parse_template(text, numbers) for text in also),
        None if value.get("where") is None else parse_template(value["where"], numbers),
        packed,
        _integer(f"{key}: dim", value.get("dim", 0), -64),
        transpose,
        dims,
        _stack(key, value.get("stack")) if dims is None else dims.stacked,
        number("pad_to"),
        number("zigzag"),
    )


def _names(key: str, value: Mapping[str, Any], numbers: NamedNumbers) -> tuple[tuple[str, Template], ...]:
    if ("name" in value) == ("parts" in value):
        raise LayoutError(f"{key}: give either name or parts")
    if "name" in value:
        return (("", parse_template(value["name"], numbers)),)
    parts = value["parts"]
    if not isinstance(parts, Mapping) or not parts or not all(isinstance(part, str) and part for part in parts):
        raise TypeError(f"{key}: parts must be a table from the parts to their templates, got {shown(parts)}")
    return tuple((part, parse_template(text, numbers)) for part, text in parts.items())


def _packed(key: str, value: Mapping[str, Any], sizes: Mapping[str, Any], numbers: NamedNumbers) -> PackedDim | None:
    packed = value.get("packed")
    if isinstance(packed, str):
        own = {name: size for name, size in sizes.items() if name in re.findall(r"\w+", packed)}
        packed = numbered(packed, own, numbers)
    if packed is None:
        return None
    if not isinstance(packed, PackedDim):
        raise TypeError(f"{key}: packed must be the text of a packed dim, got {shown(packed)}")
    if "parts" in value:
        raise LayoutError(f"{key}: parts have a tensor each, so they cannot be packed too")
    if not packed.names:
        raise LayoutError(
            f"{key}: the order is not stated: some parts of {shown(str(packed))} have no name, such as q:(…)"
        )
    return packed


def _dims(key: str, value: Mapping[str, Any], sizes: Mapping[str, Any], numbers: NamedNumbers) -> Arrangement | None:
    text = value.get("dims")
    if text is None:
        return None
    if not isinstance(text, str):
        raise TypeError(f"{key}: dims must be text such as 'hidden heads d -> (heads d) hidden', got {shown(text)}")
    known: dict[str, int] = {}
    for name in dict.fromkeys(re.findall(r"[A-Za-z_]\w*", text)):
        if name in sizes:
            known[name] = _integer(name, numbers.number(name, sizes[name]), 1)
        elif name in numbers:
            known[name] = _integer(name, numbers.number(name, name), 1)
    return parse_arrangement(text, known)


def _stack(key: str, value: Any) -> tuple[str, ...]:
    fields = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(fields, (list, tuple)) or not all(isinstance(field, str) for field in fields):
        raise TypeError(f"{key}: stack must be the name of a field or a list of them, got {shown(value)}")
    if len(set(fields)) != len(fields):
        raise LayoutError(f"{key}: stack has a field twice: {shown(list(fields))}")
    return tuple(fields)


def _choices(side: Side) -> tuple[tuple[str, ...], ...]:
    return tuple(dict.fromkeys(choice for _, template in side.names for choice in template.choices))


def _by_part(key: str, side: Side) -> Side:
    """Return the side with the texts of its choice as parts, if it has a choice."""
    choices = _choices(side)
    if not choices:
        return side
    if len(choices) > 1 or side.packed is not None or len(side.names) > 1:
        raise LayoutError(
            f"{key}: the choice {{{','.join(choices[-1])}}} is not on the other side, so it names parts; then "
            f"{key} must have no other choice, no 'parts' and no 'packed'"
        )
    if side.also:
        raise LayoutError(
            f"{key}: 'also' adds names to one tensor, but the choice {{{','.join(choices[-1])}}} names parts"
        )
    (choice,), (_, template) = choices, side.names[0]
    if "" in choice:
        raise LayoutError(f"{key}: the choice {{{','.join(choice)}}} names its parts, but one of them has no name")
    return replace(side, names=tuple((text, template.chosen(choice, text)) for text in choice))


def _check_pair(source: Side, target: Side, size: int | None) -> None:
    """Refuse sides that cannot describe the same tensors, or do not state an order."""
    for key, side in (("from", source), ("to", target)):
        fields = {template.fields for _, template in side.names}
        if len(fields) > 1:
            raise LayoutError(f"{key}: its templates do not have the same fields")
        if any(template.fields != side.names[0][1].fields for template in side.also):
            raise LayoutError(f"{key}: the templates of 'also' do not have the same fields as 'name'")
        if side.where is not None and not side.where.fields <= side.names[0][1].fields:
            raise LayoutError(f"{key}: the template of 'where' has fields that 'name' does not have")
        if side.where is not None and side.where.choices:
            raise LayoutError(f"{key}: the template of 'where' has a choice that 'name' does not have")
        other = target if side is source else source
        for stacked in side.stack:
            if stacked in side.names[0][1].fields:
                raise LayoutError(f"{key}: the field {{{stacked}}} is stacked, so it cannot be in the name too")
            if any(stacked in template.spanning for _, template in other.names):
                raise LayoutError(f"{key}: the field {{{stacked}*}} may match dots, and cannot be stacked")
    if lacking := sorted(source.fields ^ target.fields):
        key = "to" if lacking[0] in source.fields else "from"
        raise LayoutError(
            f"{key} has no field {{{lacking[0]}}}, which the other side has; stack = {lacking[0]!r} makes one "
            "tensor of these"
        )
    if bool(source.parts) != bool(target.parts):
        key, parts = ("to", source.parts) if source.parts else ("from", target.parts)
        raise LayoutError(f"{key} is one tensor of the parts {', '.join(parts[:8])}; state their order with packed")
    if set(source.parts) != set(target.parts):
        raise LayoutError(f"from has the parts {shown(list(source.parts))}, but to has {shown(list(target.parts))}")
    if source.pad_to is not None and size is None:
        raise LayoutError("size is missing: 'from' is padded, and nothing else says how much is padding")
    if size is not None and source.pad_to is None and target.pad_to is None:
        raise LayoutError("size is given, but neither side has pad_to")


def _check_keys(value: Mapping[Any, Any], known: Sequence[str], place: str | None = None) -> None:
    for key in value:
        if key not in known:
            before = "" if place is None else f"{place}: "
            raise LayoutError(f"{before}unknown key {shown(key)}, expected one of {', '.join(known)}")


def _integer(name: str, value: Any, least: int) -> int:
    number = integer(name, value)
    if not least <= number <= _LARGEST:
        raise LayoutError(f"{name} is {shown(number)}; it must be {least} to {_LARGEST}")
    return number
