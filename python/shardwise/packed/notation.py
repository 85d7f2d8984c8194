"""Packed dims as text: `q:(h=64@tp d=128) + k:(g=8@tp/max8 d=128) + v:(g=8@tp/max8 d=128)`.

Parts in round brackets stand with `+` between them; factors within, major first, with spaces between them. A factor
is a number, or a name with its size, `h=64`, or a name whose size is given beside the text or is left to the shape.
The factor that is cut has its axes after `@`, with `+` between several, and then its options, each after a `/`: the
uneven rule; `max8` for at most eight shards; `unit128` to cut between multiples of 128 only; `split` to cut what
comes after it too where there are more shards than elements; `pad64` for padding to a multiple of 64, `pad128each`
where each shard is padded. A part may have a name in front, `gate:(…)`. A factor that holds several tensors is
written `[q:1024 k:128 v:128]`, and comes last. A part without a cut factor is on every device. `8*f` is eight times
the unknown `f`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .._text import shown
from ..errors import LayoutError, ParseError
from .parts import MOST_FACTORS, MOST_PARTS, PackedDim, Part, concat, part
from .written import AXIS, NAME, text_of

__all__ = ["parse", "text_of"]

_FACTOR = re.compile(
    rf"(?:(?:(?P<ratio>[0-9]{{1,19}})\*)?(?P<name>{NAME})(?:=(?P<size>[0-9]{{1,19}}))?|(?P<number>[0-9]{{1,19}}))"
    rf"(?:@(?P<axes>{AXIS}(?:\+{AXIS})*)(?P<options>(?:/[a-z]+[0-9]*[a-z]*)*))?"
)
_BLOCKS = re.compile(rf"\[\s*({NAME}:[0-9]{{1,19}}(?:\s+{NAME}:[0-9]{{1,19}})*)\s*\]")
_OPEN = re.compile(rf"(?:({NAME}):)?\(")
_OPTION = re.compile(
    r"(even|ceil|chunk|balanced|floor)|max([0-9]{1,19})|pad([0-9]{1,19})(each)?|(split)|unit([0-9]{1,19})"
)
_SPACE = re.compile(r"\s*")
#: After a part, if another follows; after the bracket of a sub-axis comes its size.
_NEXT = re.compile(r"\)\s*\+")


def parse(text: str, **sizes: int) -> PackedDim:
    """Read a packed dim; the notation is in this module's documentation.

    Args:
        text: the parts.
        sizes: the sizes of factors that the text names without one.

    Raises:
        ParseError: if the text does not follow the notation; says where.
        LayoutError: if it is not a valid packed dim: two cut factors, two of unknown size, or a size that is
            given and not used.

    >>> parse("(q@tp d) + (g@tp d) + (g@tp d)", q=64, g=8, d=128).size
    10240
    >>> print(parse("(3 h=12@tp d=64)"))
    (3 12@tp 64)
    """
    if not isinstance(text, str):
        raise TypeError(f"text must be a string, got {type(text).__name__}")
    count = 1 + sum(1 for _ in _NEXT.finditer(text))
    if count > MOST_PARTS:  # Refused before a long text is read.
        raise LayoutError(f"parts: {count} were given; a packed dim has 1 to {MOST_PARTS} parts")
    reader = _Reader(text, sizes)
    parts = [reader.part()]
    while not reader.at_end():
        reader.expect("+")
        parts.append(reader.part())
    if unused := sorted(set(sizes) - reader.used):
        raise LayoutError(f"sizes has {shown(unused[0])}, which {shown(text)} does not name")
    return concat(*parts)


class _Reader:
    def __init__(self, text: str, sizes: Mapping[str, int]) -> None:
        self._text = text
        self._sizes = dict(sizes)
        self._at = 0
        #: The sizes that the arguments give.
        self.used: set[str] = set()
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
            held = _BLOCKS.match(self._text, self._at)
            if held is not None:
                self._at = held.end()
                pairs = [item.split(":") for item in held[1].split()]
                blocks = [(name, int(size)) for name, size in pairs]
                factors.append(sum(size for _, size in blocks))
                continue
            if len(factors) == MOST_FACTORS:
                raise LayoutError(
                    f"factors: more than {MOST_FACTORS} were given; a part has 1 to {MOST_FACTORS} factors"
                )
            found = _FACTOR.match(self._text, self._at)
            if found is None:
                raise self._error("a factor")
            self._at = found.end()
            if self._text[self._at : self._at + 1] not in (" ", ")", "\t", "\n", ""):
                raise self._error("a space or ')'")
            if found["ratio"] is not None:
                ratio = int(found["ratio"])
            size = self._size(found)
            if found["ratio"] is not None and size is not None:
                size, ratio = size * ratio, 1
            if found["axes"] is not None:
                if cut:
                    raise LayoutError(f"{shown(self._text)}: two factors of one part are cut; at most one may be")
                cut = {"cut": len(factors), "axes": tuple(found["axes"].split("+")), **_options(found["options"])}
            factors.append(size)
        return part(factors, **{"cut": None, **cut}, ratio=ratio, name=opened[1], blocks=blocks)

    def _size(self, found: re.Match[str]) -> int | None:
        if found["number"] is not None:
            return int(found["number"])
        name = found["name"]
        if found["size"] is not None:
            size = int(found["size"])
            if self._sizes.setdefault(name, size) != size:
                raise LayoutError(f"{shown(self._text)}: {name} is {size}, and {self._sizes[name]} elsewhere")
            self.used.add(name)
            return size
        if name in self._sizes:
            self.used.add(name)
            return self._sizes[name]
        if self._unknown not in (None, name):
            raise LayoutError(f"{shown(self._text)}: {self._unknown} and {name} are both unknown; at most one may be")
        self._unknown = name
        return None

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


def _options(text: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for option in text.split("/")[1:]:
        found = _OPTION.fullmatch(option)
        if found is None:
            raise ParseError(f"{shown(option)} is not an uneven rule, split, or max, unit or pad and a number")
        if found[1]:
            new: dict[str, Any] = {"uneven": found[1]}
        elif found[2]:
            new = {"at_most": int(found[2])}
        elif found[5]:
            new = {"split": True}
        elif found[6]:
            new = {"unit": int(found[6])}
        else:
            new = {"pad_to": int(found[3]), "pad_each": found[4] is not None}
        if options.keys() & new.keys():
            raise ParseError(f"{shown(option)} is the second of its kind")
        options.update(new)
    return options
