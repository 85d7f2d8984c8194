"""The numbers and lists that the rules of a deployment name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .._arguments import integer
from .._text import shown
from ..errors import LayoutError

__all__ = ["Number", "checked_numbers"]

#: A number; a list of them; a list of lists, for what is at several places.
Number = int | tuple[int, ...] | tuple[tuple[int, ...], ...]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def checked_numbers(numbers: Mapping[str, Any] | None) -> dict[str, Number]:
    """Return numbers as integers and tuples of them.

    Raises:
        LayoutError: if a name is not an identifier, or a list holds numbers and lists.
        TypeError: if a value is neither a whole number nor a list of them.

    >>> checked_numbers({"heads": 8, "stage": [0, 0, 1], "where": [[0, 2], [1]]})
    {'heads': 8, 'stage': (0, 0, 1), 'where': ((0, 2), (1,))}
    """
    if numbers is not None and not isinstance(numbers, Mapping):
        raise TypeError(f"numbers must be a mapping from names to whole numbers and lists, got {shown(numbers)}")
    found: dict[str, Number] = {}
    for name, value in (numbers or {}).items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise LayoutError(f"numbers: {shown(name)} is not a name of letters, digits and _")
        found[name] = _checked(f"numbers[{shown(name)}]", value)
    return found


def _checked(name: str, value: Any) -> Number:
    if not isinstance(value, (list, tuple)):
        return integer(f"{name}, if it is not a list,", value)
    nested = [isinstance(one, (list, tuple)) for one in value]
    if any(nested) and not all(nested):
        raise LayoutError(f"{name} holds both numbers and lists; give one or the other")
    if any(nested):
        return tuple(tuple(integer(f"{name}[{at}]", one) for one in row) for at, row in enumerate(value))
    return tuple(integer(f"{name}[{at}]", one) for at, one in enumerate(value))
