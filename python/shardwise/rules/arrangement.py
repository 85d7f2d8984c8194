"""Dims split, merged and permuted, as text: `hidden i heads d -> (heads d) hidden`.

On the left are the dims of a stored tensor, on the right those that it has in common with the other side of a rewrite.
Names in round brackets are one dim, the major one first, in C order. `1` is a dim of one element. A name may have its
size, `heads=8`. A name on the left only is a field of the tensors' names: the tensors are stacked along it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .._text import counted, elements_text, shown
from ..errors import LayoutError, ParseError

__all__ = ["Arrangement", "parse_arrangement"]

_TOKEN = re.compile(
    r"\s*(?:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?:=(?P<size>[0-9]{1,19}))?(?![A-Za-z0-9_=])|(?P<mark>[()]|->|1(?![0-9])))"
)
_MOST = 32
_LARGEST = 2**63 - 1

#: The names that make up each dim.
_DimNames = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Arrangement:
    """The way from the dims of a stored tensor to those of the form that both sides of a rewrite have.

    Attributes:
        stored: The names that make up each stored dim.
        common: Those of each dim of the common form.
        sizes: The sizes that are known.
    """

    stored: _DimNames
    common: _DimNames
    sizes: tuple[tuple[str, int], ...] = ()

    @property
    def stacked(self) -> tuple[str, ...]:
        """The fields along which tensors are stacked."""
        common = {name for group in self.common for name in group}
        return tuple(name for group in self.stored for name in group if name not in common)

    @property
    def text(self) -> str:
        """The arrangement as rules write it, with the sizes that are known."""
        sizes = dict(self.sizes)
        left = " ".join(_written(group, sizes) for group in self.stored)
        return f"{left} -> {' '.join(_written(group, {}) for group in self.common)}"

    def solved(self, groups: _DimNames, shape: Sequence[int]) -> dict[str, int]:
        """Return the sizes of the names of dims, `stored` or `common`, that have this shape.

        Raises:
            LayoutError: if the shape does not fit, or leaves a size open.

        >>> arrangement = parse_arrangement("(heads d) hidden -> heads d hidden", {"d": 4})
        >>> arrangement.solved(arrangement.stored, (12, 5))
        {'d': 4, 'heads': 3, 'hidden': 5}
        """
        found = dict(self.sizes)
        if len(shape) != len(groups):
            raise LayoutError(f"it has {counted(len(shape), 'dim')}; {shown(self.text)} is for {len(groups)}")
        for dim, (group, size) in enumerate(zip(groups, shape, strict=True)):
            unknown = [name for name in group if name not in found]
            known = math.prod(found[name] for name in group if name in found)
            if len(unknown) > 1:
                which = f"neither {unknown[0]} nor {unknown[1]}"
                raise LayoutError(f"dim {dim} is {_written(group, {})}, but the size of {which} is given")
            if unknown and known and size % known == 0:
                found[unknown[0]] = size // known
            elif unknown or known != size:
                said = ", ".join(f"{name} = {found[name]}" for name in group if name in found)
                raise LayoutError(
                    f"dim {dim} has {elements_text(size)}, and is {_written(group, {})}{said and f', where {said}'}"
                )
        return found


def parse_arrangement(text: str, sizes: Mapping[str, int] | None = None) -> Arrangement:
    """Read dims; the notation is in this module's documentation.

    Args:
        text: The dims.
        sizes: The sizes of names.

    Raises:
        ParseError: if the text does not follow the notation; the message says where.
        LayoutError: if a name is there twice, or on the right only.

    >>> parse_arrangement("hidden i heads d -> (heads d) hidden").stacked
    ('i',)
    """
    sides: list[list[tuple[str, ...]]] = [[]]
    known: dict[str, int] = {}
    group: list[str] | None = None
    at = count = 0
    while text[at:].strip():
        token = _TOKEN.match(text, at)
        if token is None:
            raise ParseError(
                f"expected a name, 1, a bracket or -> at character {at}, found {text[at : at + 20]!r} in {shown(text)}"
            )
        at = token.end()
        name, mark = token["name"], token["mark"]
        if name is not None:
            count += 1
            if token["size"] is not None:
                known[name] = int(token["size"])
            elif sizes is not None and name in sizes:
                known[name] = sizes[name]
            if group is None:
                sides[-1].append((name,))
            else:
                group.append(name)
        elif mark == "1" and group is None:
            sides[-1].append(())
        elif mark == "(" and group is None:
            group = []
        elif mark == ")" and group is not None:
            sides[-1].append(tuple(group))
            group = None
        elif mark == "->" and group is None and len(sides) == 1:
            sides.append([])
        else:
            raise ParseError(f"{mark!r} at character {token.start('mark')} is not allowed there, in {shown(text)}")
        if count > 2 * _MOST:
            raise LayoutError(f"dims have up to {_MOST} names, got {shown(text)}")
    if group is not None or len(sides) != 2:
        raise ParseError(
            f"{'a bracket is open' if group is not None else 'expected stored -> common'} in {shown(text)}"
        )
    return _checked(Arrangement(tuple(sides[0]), tuple(sides[1]), tuple(known.items())), text)


def _checked(found: Arrangement, text: str) -> Arrangement:
    stored, common = ([name for group in side for name in group] for side in (found.stored, found.common))
    for side in (stored, common):
        if twice := [name for name in side if side.count(name) > 1]:
            raise LayoutError(f"the name {twice[0]} is twice on a side of {shown(text)}")
    if unknown := [name for name in common if name not in stored]:
        raise LayoutError(f"the name {unknown[0]} is on the right only in {shown(text)}")
    for name, size in found.sizes:
        if not 0 < size <= _LARGEST:
            raise LayoutError(f"the size of {name} is {shown(size)}; it must be 1 to {_LARGEST}")
    return found


def _written(group: Sequence[str], sizes: Mapping[str, int]) -> str:
    names = [f"{name}={sizes[name]}" if name in sizes else name for name in group]
    return names[0] if len(names) == 1 else f"({' '.join(names)})" if names else "1"
