"""Rewrites: other names and other orders for the tensors of a checkpoint, as data.

Each rewrite has two sides. A side says how some tensors are named and stored; both sides are of the same elements. So a
rewrite turned round is also a rewrite.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TextIO, get_args

from .._arguments import integer
from .._expressions import parse_expression
from .._fork import importing
from .._text import shown
from ..errors import LayoutError, ParseError, ShardwiseError, ShardwiseWarning
from ..packed import PackedDim
from .arrangement import Arrangement, parse_arrangement
from .numbers import NamedNumbers, numbered
from .templates import Template, parse_template, ways

if TYPE_CHECKING:
    from .numbers import Config

__all__ = ["Rewrite", "RewriteSet", "Rewrites", "Side"]

#: The fate of a tensor that no rewrite takes.
Unmatched = Literal["keep", "drop", "refuse"]

_SIDE_KEYS = ("name", "parts", "where", "also", "packed", "dim", "transpose", "dims", "stack", "pad_to", "zigzag")
_REWRITE_KEYS = ("from", "to", "size", "optional", "refused")
_LARGEST = 2**63 - 1
#: The most rewrites of a file, each choice written out.
_MOST_REWRITES = 100_000
#: The most rules files that come after each other.
_MOST_AFTER = 8


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
        """The entry that `Rewrites` takes for it."""
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
    """From one side to another; `size` is the size of a padded dim without its padding."""

    source: Side
    target: Side
    size: int | None = None
    optional: bool = False
    #: Why no tensor can be rewritten so.
    refused: str | None = None
    #: The numbers of a model that it was worked out from, for messages.
    numbers: tuple[tuple[str, int], ...] = field(default=(), compare=False)

    def turned(self) -> Rewrite:
        """From the target to the source.

        Raises:
            LayoutError: if the target is padded and the size without padding is not given.
        """
        if self.target.pad_to is not None and self.size is None:
            raise LayoutError(
                f"the rewrite to {shown(self.target.names[0][1].text)} cannot be turned round: size is missing, and "
                "nothing else says how much is padding"
            )
        return replace(self, source=self.target, target=self.source)

    def described(self) -> dict[str, Any]:
        """The entry that `Rewrites` takes for it."""
        found: dict[str, Any] = {"from": self.source.described(), "to": self.target.described()}
        if self.size is not None:
            found["size"] = self.size
        if self.optional:
            found["optional"] = True
        if self.refused is not None:
            found["refused"] = self.refused
        return found


@dataclass(frozen=True)
class RewriteSet:
    """The rewrites of one file: what is dropped first, the rewrites in order, and what happens to the rest."""

    rewrites: tuple[Rewrite, ...]
    drop: tuple[Template, ...]
    unmatched: Unmatched


@dataclass(frozen=True, init=False, repr=False)
class Rewrites:
    """Rewrites of a checkpoint's tensors: names, fused weights, stacked layers, transposed and padded dims.

    Args:
        rewrites: Mappings with `from`, `to`, and perhaps `size` and `optional`; the page `docs/rules-file.md` explains
            them. They are applied one after the other, each to the result of the one before.
        drop: templates of names that are left out first, in whichever direction the rewrites go.
        unmatched: what happens to tensors that no rewrite takes: `"keep"`, `"drop"`, or `"refuse"`.
        numbers: whole numbers by name, which packed dims and sizes may be written with.

    Raises:
        LayoutError: if a rewrite has an unknown key, its sides do not have the same tensors, or an order is not stated.
        TypeError: if a value is of the wrong type.

    `one + other` applies first one, then the other. Immutable, hashable, picklable and comparable.

    >>> fused = Rewrites(
    ...     [
    ...         {
    ...             "from": "h.{i}.{q,k,v}.weight",
    ...             "to": {"name": "layers.{i}.qkv.weight", "packed": "q:(4 2) + k:(2 2) + v:(2 2)"},
    ...         }
    ...     ]
    ... )
    >>> fused.inverse().inverse() == fused
    True
    """

    sets: tuple[RewriteSet, ...]
    #: Notes on the files that they are from, such as that these are for models of another type.
    _notes: tuple[str, ...] = field(default=(), compare=False)

    def __init__(
        self,
        rewrites: Iterable[Mapping[str, Any]] = (),
        *,
        drop: Iterable[str] = (),
        unmatched: Unmatched = "keep",
        numbers: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(rewrites, (str, bytes, Mapping)) or not isinstance(rewrites, Iterable):
            raise TypeError(f"rewrites must be a sequence of mappings, got {type(rewrites).__name__}")
        if isinstance(drop, (str, bytes)) or not isinstance(drop, Iterable):
            raise TypeError(f"drop must be a sequence of templates, got {shown(drop)}")
        if not isinstance(unmatched, str) or unmatched not in get_args(Unmatched):
            allowed = ", ".join(map(repr, get_args(Unmatched)))
            raise LayoutError(f"unmatched is {shown(unmatched)}; it must be one of {allowed}")
        read: list[Rewrite] = []
        known = numbers if isinstance(numbers, NamedNumbers) else NamedNumbers(numbers, None, "numbers")
        for number, one in enumerate(rewrites, 1):
            try:
                read += _rewrites(one, known)
            except (ShardwiseError, TypeError) as error:
                raise type(error)(f"rewrite {number}: {error}") from None
            _check_count("rewrites", len(read))
        dropped: list[Template] = []
        for text in drop:
            dropped += parse_template(text, known).expanded()
            _check_count("drop", len(dropped))
        object.__setattr__(self, "sets", (RewriteSet(tuple(read), tuple(dropped), unmatched),))

    @classmethod
    def from_toml(cls, file: str | os.PathLike[str] | TextIO, *, config: Config | None = None) -> Rewrites:
        r"""Read the rewrites of a rules file; the page `docs/rules-file.md` has the format.

        Args:
            file: The path of the file, the name of one of the package's (`example_rules`), or an open text file.
            config: The model's configuration, for the file's `[numbers]`; see `LayoutMap.from_toml`.

        Raises:
            ParseError: if the file is not TOML, or has an unknown key or a value of the wrong type; if the
                configuration is not JSON.
            LayoutError: as for `Rewrites`, and if a number that a rewrite needs is missing.
            OSError: if the file cannot be read.
            ShardwiseWarning: if the file says of which types its models are, and the configuration's is another.

        >>> import io
        >>> Rewrites.from_toml(io.StringIO("[[rewrite]]\nfrom = 'h.{i}.w'\nto = 'layers.{i}.w'"))
        Rewrites([{'from': 'h.{i}.w', 'to': 'layers.{i}.w'}])
        """
        with importing:
            made = cls._read(file, config, 0)
        for note in made._notes:
            warnings.warn(note, ShardwiseWarning, stacklevel=2)
        return made

    @classmethod
    def _read(cls, file: Any, config: Config | None, depth: int) -> Rewrites:
        with importing:
            from .shipped import rules_named
            from .toml import located, other_model, read_document, read_models, read_rewrites

        document: Any = read_document(file)
        found, numbers, source = read_rewrites(document, config)
        before = cls()
        if "after" in found:
            if not isinstance(found["after"], str):
                raise ParseError(f"{source}: after must be the name of a rules file, got {shown(found['after'])}")
            if depth == _MOST_AFTER:
                raise ParseError(f"{source}: more than {_MOST_AFTER} files come after each other")
            before = cls._read(rules_named(found["after"], document.file), config, depth + 1)
        with located(source):
            own = cls(
                found.get("rewrite", ()),
                drop=found.get("drop", ()),
                unmatched=found.get("unmatched", "keep"),
                numbers=numbers,
            )
        note = other_model(read_models(document), config, source)
        notes = (*before._notes, *([] if note is None else [note]))
        return cls._of([*(before.sets if before else ()), *own.sets], notes)

    def inverse(self) -> Rewrites:
        """Give the rewrites that lead back: the last one first, each from its `to` to its `from`.

        Raises:
            LayoutError: if a rewrite pads a dim and has no `size`.

        >>> Rewrites([{"from": "a.{i}", "to": "b.{i}"}]).inverse()
        Rewrites([{'from': 'b.{i}', 'to': 'a.{i}'}])
        """
        sets = [
            replace(one, rewrites=tuple(rewrite.turned() for rewrite in reversed(one.rewrites)))
            for one in reversed(self.sets)
        ]
        return self._of(sets, self._notes)

    def __add__(self, other: Rewrites) -> Rewrites:
        if not isinstance(other, Rewrites):
            return NotImplemented
        return self._of((*self.sets, *other.sets), (*self._notes, *other._notes))

    def __bool__(self) -> bool:
        """Return whether there is anything to do."""
        return any(one.rewrites or one.drop or one.unmatched != "keep" for one in self.sets)

    @classmethod
    def _of(cls, sets: Iterable[RewriteSet], notes: Iterable[str]) -> Rewrites:
        made = cls()
        object.__setattr__(made, "sets", tuple(sets))
        object.__setattr__(made, "_notes", tuple(dict.fromkeys(notes)))
        return made

    def __repr__(self) -> str:
        return " + ".join(map(_set_text, self.sets))


def _check_count(what: str, count: int) -> None:
    if count > _MOST_REWRITES:
        raise LayoutError(
            f"{what}: {count:,} and more once their choices are written out; at most {_MOST_REWRITES:,} are"
        )


def _set_text(one: RewriteSet) -> str:
    arguments = [repr([rewrite.described() for rewrite in one.rewrites])]
    if one.drop:
        arguments.append(f"drop={[template.text for template in one.drop]!r}")
    if one.unmatched != "keep":
        arguments.append(f"unmatched={one.unmatched!r}")
    return f"Rewrites({', '.join(arguments)})"


def _rewrites(value: Any, numbers: NamedNumbers) -> list[Rewrite]:
    """A rewrite, once for each text of the choices that are on both sides."""
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
    """The numbers that a rewrite is written with, with their values, each once."""
    tables = [side for side in value.values() if isinstance(side, Mapping)]
    texts = [value.get("size"), *(side.get(key) for side in tables for key in ("pad_to", "zigzag"))]
    names = [name for text in texts if isinstance(text, str) for name in parse_expression(text).names]
    names += [name for side in sides if side.dims is not None for name, _ in side.dims.sizes]
    found = dict(numbers.said(names))
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
        raise LayoutError(f"{key}: also is for one tensor; parts have one each")
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
        raise LayoutError(f"{key}: dims says what is stacked and transposed, so stack and transpose are not given too")

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
        raise LayoutError(f"{key}: expected one of name and parts")
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
    """The side with its choice, if it has one, as parts."""
    choices = _choices(side)
    if not choices:
        return side
    if len(choices) > 1 or side.packed is not None or len(side.names) > 1:
        raise LayoutError(
            f"{key}: the choice {{{','.join(choices[-1])}}} is not on the other side; one choice of a side without "
            "parts and packed may be, which names its parts"
        )
    if side.also:
        raise LayoutError(f"{key}: also is for one tensor; the choice {{{','.join(choices[-1])}}} names parts")
    (choice,), (_, template) = choices, side.names[0]
    if "" in choice:
        raise LayoutError(f"{key}: the choice {{{','.join(choice)}}} names its parts, one of which has no name")
    return replace(side, names=tuple((text, template.chosen(choice, text)) for text in choice))


def _check_pair(source: Side, target: Side, size: int | None) -> None:
    """Refuse sides that do not have the same tensors, or do not state the order."""
    for key, side in (("from", source), ("to", target)):
        fields = {template.fields for _, template in side.names}
        if len(fields) > 1:
            raise LayoutError(f"{key}: its templates do not have the same fields")
        if any(template.fields != side.names[0][1].fields for template in side.also):
            raise LayoutError(f"{key}: the templates of also do not have the same fields as name")
        if side.where is not None and not side.where.fields <= side.names[0][1].fields:
            raise LayoutError(f"{key}: the template of where has fields that the name does not have")
        if side.where is not None and side.where.choices:
            raise LayoutError(f"{key}: the template of where has a choice that the name does not have")
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
        raise LayoutError(
            f"{key} is one tensor of the parts {', '.join(parts[:8])}, and its order is not stated; the shape "
            "does not tell it, packed does"
        )
    if set(source.parts) != set(target.parts):
        raise LayoutError(f"from has the parts {shown(list(source.parts))}, to {shown(list(target.parts))}")
    if source.pad_to is not None and size is None:
        raise LayoutError("size is missing: from is padded, and nothing else says how much is padding")
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
