"""Sub-axes: factors of a mesh axis, written as Shardy writes them, `tp:(m)k`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["SubAxis", "is_sub_axis", "parse_sub_axis"]

_SUB_AXIS = re.compile(r"(.+):\(([1-9][0-9]{0,18})\)([1-9][0-9]{0,18})", re.DOTALL)


class SubAxis(NamedTuple):
    """A factor of size `size` of a mesh axis, after the major factor `before`.

    On an axis of size `n = before * size * rest`, coordinate `i` has the coordinate `i // rest % size` along it.

    >>> str(SubAxis("tp", 2, 4))
    'tp:(2)4'
    """

    #: The name of the mesh axis.
    axis: str
    #: The product of the factors of the axis before it.
    before: int
    #: The size of the sub-axis.
    size: int

    def __str__(self) -> str:
        return f"{self.axis}:({self.before}){self.size}"


def parse_sub_axis(name: str, axis_names: Iterable[str] = ()) -> SubAxis | None:
    """Read a sub-axis; `None` if the name does not spell one, or is exactly that of a mesh axis, which goes first.

    >>> parse_sub_axis("tp:(2)4")
    SubAxis(axis='tp', before=2, size=4)
    >>> parse_sub_axis("tp") is None
    True
    """
    found = None if name in axis_names else _SUB_AXIS.fullmatch(name)
    return None if found is None else SubAxis(found[1], int(found[2]), int(found[3]))


def is_sub_axis(name: str, axis_names: Iterable[str] = ()) -> bool:
    """Return whether a name spells a sub-axis; a mesh axis with exactly that name goes first.

    >>> is_sub_axis("tp:(1)4"), is_sub_axis("tp:(1)4", ["tp:(1)4"])
    (True, False)
    """
    return parse_sub_axis(name, axis_names) is not None
