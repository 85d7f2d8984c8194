"""Packed dims as text: `q:(h=64@tp d=128) + k:(g=8@tp/max8 d=128) + v:(g=8@tp/max8 d=128)`.

Parts in round brackets stand with `+` between them; factors within, major first, with spaces between them. A factor is
a number, or a name with its size, `h=64`, or a name whose size is given next to the text or is left to the shape, or an
expression of these without spaces, `heads//groups*d`. The factor that is cut has its axes after `@`, with `+` between
several, and then its options, each after a `/`: the uneven rule; `max8` for at most eight shards, `max` for at most as
many as it has elements; `unit128` to cut between multiples of 128 only; `split` to cut what comes after it too where
there are more shards than elements; `pad64` for padding to a multiple of 64, `pad128each` where each shard is padded. A
part may have a name in front, `gate:(…)`. A factor that holds several tensors is written `[q:1024 k:128 v:128]`, and
comes last; their sizes may be expressions too, or all be times the unknown, `[q:4*n k:n v:n]`. A part without a cut
factor is on every device. `8*f` is eight times the unknown `f`.
"""

from __future__ import annotations

import re
import string
from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any

from .._expressions import Expression, read_expression
from .._text import shown
from ..errors import LayoutError, ParseError
from .parts import MOST_FACTORS, MOST_PARTS, PackedDim, Part, concat, part
from .written import AXIS, NAME

__all__ = ["parse", "parse_with"]

_CUT = re.compile(rf"@(?P<axes>{AXIS}(?:\+{AXIS})*)(?P<options>(?:/[a-z]+[0-9]*[a-z]*)*)")
#: A size that may be left to the shape: a name, or a number of times a name.
_UNKNOWN = re.compile(rf"(?:([0-9]{{1,19}})\*)?({NAME})")
_LABEL = re.compile(rf"({NAME}):")
_OPEN = re.compile(rf"(?:({NAME}):)?\(")
_OPTION = re.compile(
    r"(?P<uneven>even|ceil|chunk|balanced|floor)|(?P<max>max)(?P<most>[0-9]{1,19})?|(?P<split>split)"
    r"|pad(?P<pad>[0-9]{1,19})(?P<each>each)?|unit(?P<unit>[0-9]{1,19})"
)
_SPACE = re.compile(r"\s*")
#: The characters with which the expression of a size may begin.
_BEGINS = frozenset("(-_" + string.digits + string.ascii_letters)
#: The end of a part, if another follows; after the bracket of a sub-axis comes its size.
_NEXT = re.compile(r"\)\s*\+")


def parse(text: str, **sizes: int) -> PackedDim:
    """Read a packed dim; the notation is in this module's documentation.

    Args:
        text: the parts.
        sizes: the sizes of factors that the text names without one.

    Raises:
        ParseError: if the text does not follow the notation; the message says where.
        LayoutError: if the text is not a valid packed dim: two cut factors, two of unknown size, or a size that is
            given and not used.

    >>> parse("(q@tp d) + (g@tp d) + (g@tp d)", q=64, g=8, d=128).size
    10240
    >>> print(parse("(3 h=12@tp d=64)"))
    (3 12@tp 64)
    """
    dim, used = parse_with(text, sizes)
    if unused := sorted(set(sizes) - used.keys()):
        raise LayoutError(f"sizes has {shown(unused[0])}, which {shown(text)} does not name")
    return dim


def parse_with(text: str, sizes: Mapping[str, int | Sequence[int]]) -> tuple[PackedDim, dict[str, int | Sequence[int]]]:
    """Read a packed dim, and give it with those of the sizes that its text names; see `parse`.

    >>> dim, used = parse_with("(groups@tp [q:heads//groups*2 k:2])", {"heads": 8, "groups": 4, "layers": 3})
    >>> print(dim, used)
    (4@tp [q:4 k:2]) {'groups': 4, 'heads': 8}
    """
    if not isinstance(text, str):
        raise TypeError(f"text must be a string, got {type(text).__name__}")
    count = 1 + sum(1 for _ in _NEXT.finditer(text))
    if count > MOST_PARTS:  # Refused before a long text is read.
        raise LayoutError(f"parts: {count} were given; a packed dim has 1 to {MOST_PARTS} parts")
    reader = _NotationReader(text, sizes)
    parts = [reader.part()]
    while not reader.at_end():
        reader.expect("+")
        parts.append(reader.part())
    return concat(*parts), reader.used


class _NotationReader:
    def __init__(self, text: str, sizes: Mapping[str, int | Sequence[int]]) -> None:
        self._text = text
        self._given = sizes
        #: The sizes that the text itself gives.
        self._own: dict[str, int] = {}
        self._at = 0
        #: The sizes that were given and are named.
        self.used: dict[str, int | Sequence[int]] = {}
        self._unknown: str | None = None

    def at_end(self) -> bool:
        return self._skip() == len(self._text)

    def expect(self, mark: str) -> None:
        if not self._take(mark):
            raise self._error(f"{mark!r}")

    def part(self) -> Part:
        self._skip()
        opened = _OPEN.match(self._text, self._at)
        if opened is None:
            raise self._error("a part in round brackets")
        self._at = opened.end()
        factors: list[int | None] = []
        cut: dict[str, Any] = {}
        blocks: list[tuple[str, int]] = []
        ratio = 1
        while not self._take(")"):
            if blocks:
                raise self._error("')' after the blocks, which are the last factor")
            if self._take("["):
                blocks, is_known = self._blocks()
                total = sum(size for _, size in blocks)
                factors.append(total if is_known else None)
                ratio = ratio if is_known else total
                continue
            if len(factors) == MOST_FACTORS:
                raise LayoutError(
                    f"factors: more than {MOST_FACTORS} were given; a part has 1 to {MOST_FACTORS} factors"
                )
            size, times = self._size()
            if size is None:
                ratio = times
            found = _CUT.match(self._text, self._at)
            if found is not None:
                self._at = found.end()
                if cut:
                    raise LayoutError(f"{shown(self._text)}: two factors of one part are cut; at most one may be cut")
                options = _options(found["options"], size)
                cut = {"cut": len(factors), "axes": tuple(found["axes"].split("+")), **options}
            if self._text[self._at : self._at + 1] not in (" ", ")", "\t", "\n", ""):
                raise self._error("a space or ')'")
            factors.append(size)
        return part(factors, **{"cut": None, **cut}, ratio=ratio, name=opened[1], blocks=blocks)

    def _blocks(self) -> tuple[list[tuple[str, int]], bool]:
        """Return the tensors in a factor, after its bracket, with sizes that are known, or multiples of the unknown."""
        blocks: list[tuple[str, int]] = []
        known: set[bool] = set()
        while not blocks or not self._take("]"):
            self._skip()
            label = _LABEL.match(self._text, self._at)
            if label is None:
                raise self._error("a tensor and its size, as in q:128")
            self._at = label.end()
            size, times = self._measured(self._expression("a size"))
            known.add(size is not None)
            if len(known) > 1:
                raise LayoutError(
                    f"{shown(self._text)}: of the sizes in one bracket some are known and some are {self._unknown}; "
                    f"give the size of {self._unknown}, or write each as a multiple of {self._unknown}"
                )
            size = times if size is None else size
            if size < 1:
                raise LayoutError(f"the size of block {shown(label[1])} is {size}; it must be at least 1")
            blocks.append((label[1], size))
            if self._text[self._at : self._at + 1] not in (" ", "]", "\t", "\n"):
                raise self._error("a space or ']'")
        return blocks, True in known

    def _size(self) -> tuple[int | None, int]:
        """Return the size of a factor and 1; or `None`, and the multiple of the unknown that it is."""
        expression = self._expression("a factor")
        if self._text.startswith("=", self._at) and expression.text == "".join(expression.names):
            self._at += 1
            name, size = expression.text, self._value(self._expression("a size"))
            if self._sizes.get(name, size) != size:
                raise LayoutError(f"{shown(self._text)}: {name} is {size}, and {self._sizes[name]} elsewhere")
            self._own[name] = size
            if name in self._given:
                self.used[name] = size
            return size, 1
        return self._measured(expression)

    def _measured(self, expression: Expression) -> tuple[int | None, int]:
        """Return the value of an expression and 1; or `None`, and the multiple of the unknown that it is."""
        unknown = _UNKNOWN.fullmatch(expression.text)
        if unknown is None or unknown[2] in self._sizes:
            return self._value(expression), 1
        if self._unknown not in (None, unknown[2]):
            raise LayoutError(
                f"{shown(self._text)}: {self._unknown} and {unknown[2]} are both unknown; at most one may be unknown"
            )
        self._unknown = unknown[2]
        return None, int(unknown[1] or 1)

    @property
    def _sizes(self) -> Mapping[str, int | Sequence[int]]:
        # Looked up one by one: those that are given may be worked out then, and some cannot be.
        return ChainMap(self._own, self._given) if self._own else self._given  # type: ignore[arg-type]

    def _value(self, expression: Expression) -> int:
        value = expression.value(self._sizes)
        self.used.update({name: self._given[name] for name in expression.names if name in self._given})
        return value

    def _expression(self, wanted: str) -> Expression:
        if self._at == len(self._text) or self._text[self._at] not in _BEGINS:
            raise self._error(wanted)
        expression, self._at = read_expression(self._text, self._at)
        return expression

    def _skip(self) -> int:
        space = _SPACE.match(self._text, self._at)
        assert space is not None
        self._at = space.end()
        return self._at

    def _take(self, mark: str) -> bool:
        self._skip()
        found = self._text.startswith(mark, self._at)
        self._at += len(mark) if found else 0
        return found

    def _error(self, wanted: str) -> ParseError:
        found = self._text[self._at : self._at + 20]
        return ParseError(f"expected {wanted} at character {self._at}, found {found!r} in {shown(self._text)}")


def _options(text: str, size: int | None) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for option in text.split("/")[1:]:
        found = _OPTION.fullmatch(option)
        if found is None:
            raise ParseError(f"{shown(option)} is not an uneven rule, split, or max, unit or pad and a number")
        if found["uneven"]:
            new: dict[str, Any] = {"uneven": found["uneven"]}
        elif found["max"]:
            if found["most"] is None and size is None:
                raise LayoutError("max has no number, and the size of the factor is not known either")
            new = {"at_most": size if found["most"] is None else int(found["most"])}
        elif found["split"]:
            new = {"split": True}
        elif found["unit"]:
            new = {"unit": int(found["unit"])}
        else:
            new = {"pad_to": int(found["pad"]), "pad_each": found["each"] is not None}
        if options.keys() & new.keys():
            raise ParseError(f"{shown(option)} repeats an option")
        options.update(new)
    return options
