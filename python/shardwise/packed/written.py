"""Packed dims as text: what `notation` reads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from .._text import shown
from ..errors import LayoutError

__all__ = ["AXIS", "NAME", "packed_text", "says_all"]

NAME = r"[A-Za-z_][A-Za-z0-9_.]*"
AXIS = r"[^\s()\[\]+/@,:=]+(?::\([0-9]+\)[0-9]+)?"


class OnePart(Protocol):
    """The members of a part that writing it needs; `Part` documents each."""

    @property
    def factors(self) -> tuple[int | None, ...]: ...
    @property
    def cut(self) -> int | None: ...
    @property
    def axes(self) -> tuple[str, ...]: ...
    @property
    def uneven(self) -> str | None: ...
    @property
    def ratio(self) -> int: ...
    @property
    def at_most(self) -> int | None: ...
    @property
    def split(self) -> bool: ...
    @property
    def unit(self) -> int | None: ...
    @property
    def pad_to(self) -> int | None: ...
    @property
    def pad_each(self) -> bool: ...
    @property
    def name(self) -> str | None: ...
    @property
    def blocks(self) -> tuple[tuple[str, int], ...]: ...


class Packed(Protocol):
    """The members of a packed dim that writing it needs."""

    @property
    def parts(self) -> Sequence[OnePart]: ...


def packed_text(dim: Packed) -> str:
    """Write a packed dim as `parse` reads it.

    Raises:
        LayoutError: if the name of an axis or of a tensor has characters that the notation cannot write.

    >>> from shardwise import packed
    >>> packed_text(packed.gate_up("tp"))
    'gate:(n@tp) + up:(n@tp)'
    """
    return " + ".join(map(_part_text, dim.parts))


def says_all(dim: Packed) -> bool:
    """Return whether the text says all of a packed dim: it cannot express a cut by no axes, or a ratio to nothing."""
    return all(
        (
            one.axes
            or (one.cut, one.uneven, one.at_most, one.split, one.unit, one.pad_to)
            == (None, None, None, False, None, None)
        )
        and (one.ratio == 1 or None in one.factors)
        for one in dim.parts
    )


def _part_text(one: OnePart) -> str:
    for name in [one.name, *(label for label, _ in one.blocks)]:
        if name is not None and re.fullmatch(NAME, name) is None:
            raise LayoutError(f"the name {shown(name)} cannot be written in the notation of packed dims")
    for axis in one.axes:
        if re.fullmatch(AXIS, axis) is None:
            raise LayoutError(f"the axis {shown(axis)} cannot be written in the notation of packed dims")
    factors = []
    for position, size in enumerate(one.factors):
        text = str(size) if size is not None else _times(one.ratio)
        if one.blocks and position == len(one.factors) - 1:
            lengths = [(name, _times(length) if size is None else str(length)) for name, length in one.blocks]
            text = f"[{' '.join(f'{name}:{length}' for name, length in lengths)}]"
        elif position == one.cut and one.axes:
            text += f"@{'+'.join(one.axes)}{_options_text(one)}"
        factors.append(text)
    return f"{'' if one.name is None else f'{one.name}:'}({' '.join(factors)})"


def _times(count: int) -> str:
    """Return the text of a number of times the unknown."""
    return "n" if count == 1 else f"{count}*n"


def _options_text(one: OnePart) -> str:
    text = "" if one.uneven is None else f"/{one.uneven}"
    text += "" if one.at_most is None else f"/max{one.at_most}"
    text += "/split" if one.split else ""
    text += "" if one.unit is None else f"/unit{one.unit}"
    return text + ("" if one.pad_to is None else f"/pad{one.pad_to}{'each' if one.pad_each else ''}")
