"""Templates of tensors' names: `model.layers.{i}.self_attn.{q,k,v}_proj.weight`."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from .._expressions import parse_expression
from .._fork import cached_property
from .._text import shown
from ..errors import LayoutError, ShardwiseError

__all__ = ["NameIndex", "Template", "parse_template", "ways"]

_TOKEN = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|([^{}]+)")
_FIELD = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
_SEPARATOR = re.compile(r"[./]")
#: The most bytes of a template: names have up to 4,096 bytes.
_LONGEST = 4096
_MOST_WAYS = 1024
#: The most comparisons of names with templates for one set of rewrites: some ten seconds.
_MOST_TRIED = 20_000_000
#: The number of comparisons that take as long as rewriting one tensor.
_AS_LONG = 8
#: The number of passes over all names after which an index of names by parts is made.
_PASSES = 16

_SHIFTED = re.compile(r"([A-Za-z_][A-Za-z_0-9]*|[0-9]{1,18})\s*([+-])\s*(\w+)")
_CYCLED = re.compile(r"([A-Za-z_][A-Za-z_0-9]*)\s*\*\s*(\w+)\s*\+\s*([A-Za-z_][A-Za-z_0-9]*)")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")

#: The kinds of tokens: literal text; a field within one part of a name; a field that spans parts; a field that is a
#: number, with what is added to it; two fields of a number, its quotient and its remainder; a choice of texts.
_WordKind = Literal["text", "field", "rest", "shifted", "cycled", "choice"]


@dataclass(frozen=True)
class Template:
    """A name with fields; `parse_template` reads one.

    Attributes:
        text: As it was written.
        tokens: Its tokens in order: the kind, and the text, the field's name, that name and what is added to it, the
            quotient's name, the divisor and the remainder's name, or the texts of the choice.
    """

    text: str
    tokens: tuple[tuple[_WordKind, str | tuple[str, ...]], ...]

    @property
    def fields(self) -> frozenset[str]:
        """Return the names of its fields."""
        return frozenset(name for kind, value in self.tokens for name in _fields(kind, value))

    @property
    def spanning(self) -> frozenset[str]:
        """Return the names of the fields that may match dots."""
        return frozenset(str(value) for kind, value in self.tokens if kind == "rest")

    @property
    def choices(self) -> tuple[tuple[str, ...], ...]:
        """The choices of the template, in order, each once."""
        found = [value for kind, value in self.tokens if kind == "choice" and isinstance(value, tuple)]
        return tuple(dict.fromkeys(found))

    def chosen(self, choice: tuple[str, ...], text: str) -> Template:
        """Return the template with one text in place of a choice."""
        tokens = tuple(
            ("text", text) if (kind, value) == ("choice", choice) else (kind, value) for kind, value in self.tokens
        )
        return parse_template(Template("", tokens)._written())

    def expanded(self) -> Iterator[Template]:
        """Yield the templates without choices, one for each way to choose; see `ways`."""
        choices = self.choices
        for texts in ways(choices):
            one = self
            for choice, text in zip(choices, texts, strict=True):
                one = one.chosen(choice, text)
            yield one

    def matched(self, name: str) -> dict[str, str] | None:
        """Return the values of its fields if it matches a name as a whole.

        >>> parse_template("layers.{i+4}.w").matched("layers.6.w")
        {'i': '2'}
        >>> parse_template("layers.{i*4+k}.w").matched("layers.6.w")
        {'i': '1', 'k': '2'}
        """
        match = self._pattern.fullmatch(name)
        if match is None:
            return None
        values = match.groupdict()
        for field, shift in self._shifts.items():
            number = int(values[field]) - shift if _NUMBER.fullmatch(values[field]) else -1
            if number < 0:
                return None
            values[field] = str(number)
        for field, (divisor, rest) in self._cycles.items():
            if not _NUMBER.fullmatch(values[field]):
                return None
            quotient, remainder = divmod(int(values[field]), divisor)
            values |= {field: str(quotient), rest: str(remainder)}
        return values

    @cached_property
    def _shifts(self) -> dict[str, int]:
        """Return the shift of each field that is a number."""
        return {value[0]: int(value[1]) for kind, value in self.tokens if kind == "shifted"}

    @cached_property
    def _cycles(self) -> dict[str, tuple[int, str]]:
        """Return, for each quotient, the divisor and the remainder's field."""
        return {value[0]: (int(value[1]), value[2]) for kind, value in self.tokens if kind == "cycled"}

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        """Return the regular expression for whole names, with a group for each field."""
        seen: set[str] = set()
        parts = []
        for kind, value in self.tokens:
            name = _field(value)
            if kind == "text":
                parts.append(re.escape(name))
            elif name in seen:
                parts.append(f"(?P={name})")
            else:
                seen.add(name)
                parts.append(f"(?P<{name}>{'.+' if kind == 'rest' else '[^./]+'})")
        return re.compile("".join(parts), re.DOTALL)

    @cached_property
    def whole_parts(self) -> tuple[str, ...]:
        """Return the texts that are whole parts, between dots and slashes, of every name that it matches."""
        found: list[str] = []
        #: The text since the last separator; `None` if there are fields too.
        part: str | None = ""
        for kind, value in self.tokens:
            if kind != "text":
                part = None
                continue
            first, *others = _SEPARATOR.split(str(value))
            part = None if part is None else part + first
            for other in others:
                found += [] if part is None else [part]
                part = other
        return tuple(found if part is None else [*found, part])

    def filled(self, values: Mapping[str, str]) -> str:
        """Return the name with these values for its fields.

        Raises:
            LayoutError: if something is added to a field that is not a number, or it becomes negative, or a remainder
                is not less than its divisor.
        """
        return "".join(
            str(value) if kind == "text" else self._value(_field(value), values) for kind, value in self.tokens
        )

    def _value(self, field: str, values: Mapping[str, str]) -> str:
        value = values[field]
        number = int(value) if _NUMBER.fullmatch(value) else -1
        if field in self._cycles:
            divisor, rest = self._cycles[field]
            remainder = values[rest]
            if not _NUMBER.fullmatch(remainder) or int(remainder) >= divisor:
                raise LayoutError(
                    f"template {shown(self.text)}: {{{rest}}} is {shown(remainder)}; a remainder of a division by "
                    f"{divisor} is from 0 to {divisor - 1}"
                )
            number = number * divisor + int(remainder) if number >= 0 else -1
        elif field not in self._shifts:
            return value
        elif number >= 0:
            number += self._shifts[field]
        if number < 0:
            raise LayoutError(
                f"template {shown(self.text)}: {{{field}}} is {shown(value)}, which does not give a whole number of 0 "
                "or more"
            )
        return str(number)

    def _written(self) -> str:
        parts = []
        for kind, value in self.tokens:
            if kind == "choice":
                parts.append(f"{{{','.join(value)}}}")
            elif kind == "shifted":
                parts.append(f"{{{value[0]}{int(value[1]):+d}}}")
            elif kind == "cycled":
                parts.append(f"{{{value[0]}*{value[1]}+{value[2]}}}")
            elif kind == "text":
                parts.append(str(value).replace("{", "{{").replace("}", "}}"))
            else:
                parts.append(f"{{{value}*}}" if kind == "rest" else f"{{{value}}}")
        return "".join(parts)


class NameIndex:
    """Names in their order, of which those are found that a template matches, without a look at all of them each time.

    >>> index = NameIndex(["a.0.w", "b.0.w", "a.1.w"])
    >>> index.discard("a.0.w")
    >>> index.matched(parse_template("a.{i}.w"))
    {'a.1.w': {'i': '1'}}
    """

    def __init__(self, names: Iterable[str], most: int = _MOST_TRIED, passes: int = _PASSES) -> None:
        self._most, self._passes = most, passes
        #: The names, each with its place in the order.
        self.order = {name: at for at, name in enumerate(names)}
        self._next = len(self.order)
        self._by_part: dict[str, set[str]] | None = None
        self._tried = 0

    def add(self, name: str) -> None:
        """Add a name after all others; a name that is already there keeps its position."""
        if name not in self.order:
            self.order[name] = self._next
            self._next += 1
            if self._by_part is not None:
                self._list(name, self._by_part)

    def discard(self, name: str) -> None:
        """Remove a name, if it is there."""
        if self.order.pop(name, None) is not None and self._by_part is not None:
            for part in _SEPARATOR.split(name):
                self._by_part[part].discard(name)

    def matched(self, template: Template) -> dict[str, dict[str, str]]:
        """Return the names that a template matches, in order, with the values of its fields.

        Raises:
            LayoutError: if names were compared with templates too often.
        """
        candidates = self._candidates(template)
        self.count(len(candidates))
        found = {}
        for name in candidates:
            values = template.matched(name)
            if values is not None:
                found[name] = values
        if isinstance(candidates, set):
            return {name: found[name] for name in sorted(found, key=self.order.__getitem__)}
        return found

    def discard_all(self, names: Collection[str]) -> None:
        """Take names out that are made anew, each of which takes as long as some comparisons."""
        self.count(len(names) * _AS_LONG)
        for name in names:
            self.discard(name)

    def count(self, tried: int) -> None:
        """Add to the count of comparisons, and refuse more than can be made in seconds."""
        self._tried += tried
        if self._tried > self._most:
            raise LayoutError(
                f"the rewrites would take more than {self._most:,} comparisons with the {len(self.order):,} names: "
                "too many templates match too many names, or have no part between dots that only a few names have"
            )

    def _candidates(self, template: Template) -> Collection[str]:
        if self._by_part is None and self._tried < self._passes * len(self.order):
            return self.order
        if self._by_part is None:
            self._by_part = {}
            for name in self.order:
                self._list(name, self._by_part)
        if not template.fields and not template.choices:
            name = template.filled({})
            return {name} if name in self.order else ()
        by_part = [self._by_part.get(part, set()) for part in template.whole_parts]
        return min(by_part, key=len) if by_part else self.order

    @staticmethod
    def _list(name: str, by_part: dict[str, set[str]]) -> None:
        for part in _SEPARATOR.split(name):
            by_part.setdefault(part, set()).add(name)


def _field(value: str | tuple[str, ...]) -> str:
    return value if isinstance(value, str) else value[0]


def _fields(kind: _WordKind, value: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the fields of a token."""
    if kind in ("text", "choice"):
        return ()
    return (value[0], value[2]) if kind == "cycled" else (_field(value),)


def ways(choices: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Return all combinations of one text from each choice.

    Raises:
        LayoutError: if there are too many.
    """
    count = math.prod(map(len, choices))
    if count > _MOST_WAYS:
        raise LayoutError(f"{len(choices)} choices make {shown(count)} templates, over the limit of {_MOST_WAYS}")
    return itertools.product(*choices)


def parse_template(text: object, numbers: Mapping[str, int | Sequence[int]] | None = None) -> Template:
    """Read a template.

    `{i}` is a field: it matches a part of a name without dots and slashes. `{rest*}` matches any text. `{i+4}` matches
    a number, of which the field is 4 less; it may also be one of `numbers`, and `{0+layers}` is that number, no field.
    `{i*4+k}` matches a number, of which `i` is the quotient by 4 and `k` the remainder. `{q,k,v}` is a choice. `{{` and
    `}}` are braces. A field that comes twice must match the same text.

    Raises:
        LayoutError: if a brace is open, a field has no name, a part between dots has two fields, or there are two that
            may match dots, so that a name could be read in more than one way.
        TypeError: if `text` is not a string.

    >>> template = parse_template("layers.{i}.{q,k}_proj")
    >>> sorted(template.fields), template.choices
    (['i'], (('q', 'k'),))
    >>> parse_template("layers.{0+layers}.w", {"layers": 61}).matched("layers.61.w")
    {}
    """
    if not isinstance(text, str):
        raise TypeError(f"a template must be a string, got {shown(text)}")
    if not text or len(text) > _LONGEST:
        raise LayoutError(f"a template has 1 to {_LONGEST} characters, got {shown(text)}")
    tokens: list[tuple[_WordKind, str | tuple[str, ...]]] = []
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise LayoutError(f"template {shown(text)}: the brace at character {at} is unmatched; {{{{ gives a brace")
        at = found.end()
        inside, literal = found.groups()
        if inside is None:
            tokens.append(("text", literal or found.group()[0]))
        elif "," in inside:
            options = tuple(option.strip() for option in inside.split(","))
            if len(set(options)) != len(options):
                raise LayoutError(f"template {shown(text)}: the choice {{{inside}}} repeats a text")
            tokens.append(("choice", options))
        elif shifted := _SHIFTED.fullmatch(inside):
            added = _number(text, shifted[2].replace("+", "") + shifted[3], numbers)
            if not shifted[1][0].isdigit():
                tokens.append(("shifted", (shifted[1], str(added))))
                continue
            if int(shifted[1]) + added < 0:
                raise LayoutError(
                    f"template {shown(text)}: {{{inside}}} is {int(shifted[1]) + added}; it must be 0 or more"
                )
            tokens.append(("text", str(int(shifted[1]) + added)))
        elif cycled := _CYCLED.fullmatch(inside):
            divisor = _number(text, cycled[2], numbers)
            if divisor < 1:
                raise LayoutError(f"template {shown(text)}: {cycled[2]} is {shown(divisor)}; a divisor is at least 1")
            tokens.append(("cycled", (cycled[1], str(divisor), cycled[3])))
        else:
            name = inside.removesuffix("*")
            if not _FIELD.fullmatch(name):
                raise LayoutError(f"template {shown(text)}: {{{inside}}} is not a field, such as {{i}} or {{rest*}}")
            tokens.append(("rest" if inside.endswith("*") else "field", name))
    _check_fields(text, tokens)
    read = Template(text, tuple(tokens))
    # With numbers in place of their names.
    return replace(read, text=read._written()) if _SHIFTED.search(text) or _CYCLED.search(text) else read


def _number(text: str, expression: str, numbers: Mapping[str, int | Sequence[int]] | None) -> int:
    try:
        return parse_expression(expression).value(numbers or {})
    except ShardwiseError as error:
        raise LayoutError(f"template {shown(text)}: {error}") from None


def _check_fields(text: str, tokens: list[tuple[_WordKind, str | tuple[str, ...]]]) -> None:
    """Refuse templates that could match a name in two ways, or slowly."""
    in_part = spanning = 0
    kinds: dict[str, tuple[_WordKind, str | tuple[str, ...]]] = {}
    for kind, value in tokens:
        if kind == "text" and _SEPARATOR.search(str(value)):
            in_part = 0
        fields = _fields(kind, value)
        if fields:
            in_part += 1
            spanning += kind == "rest"
            if in_part > 1:
                raise LayoutError(f"template {shown(text)}: two fields without a dot or a slash between them")
            if len(set(fields)) != len(fields):
                raise LayoutError(f"template {shown(text)}: quotient and remainder are both {{{fields[0]}}}")
        for field in fields:
            if kinds.setdefault(field, (kind, value)) != (kind, value):
                both = {kind, kinds[field][0]}
                other = f"{{{field}*}}" if both == {"field", "rest"} else "one with another number"
                raise LayoutError(f"template {shown(text)} has both {{{field}}} and {other}")
    if spanning > 1:
        raise LayoutError(f"template {shown(text)}: only one field may match dots, as {{rest*}} does")
