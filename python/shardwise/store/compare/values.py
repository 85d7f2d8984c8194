"""Values that are not tensors, such as learning rates: compared where both checkpoints have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..._text import shown
from ...errors import ShardwiseError
from ..tensors.checkpoint import StoredObject

__all__ = ["same_values"]

#: The most parts of a value that is compared.
_MOST = 10_000


def same_values(
    one: Mapping[str, StoredObject], other: Mapping[str, StoredObject]
) -> tuple[frozenset[str], dict[str, str]]:
    """Return the names of values that both have and that are equal, and of those that differ, with both as a text.

    Numbers and texts are compared, and lists and dicts of these; what else there is, such as a random state, is not.

    >>> lr, step = StoredObject("lr", lambda: 0.1), StoredObject("lr", lambda: 0.2)
    >>> same_values({"lr": lr}, {"lr": step})
    (frozenset(), {'lr': '0.1 and 0.2'})
    """
    alike, unlike = set[str](), {}
    for name in one:
        if name not in other:
            continue
        try:
            first, second = one[name].value(), other[name].value()
        except ShardwiseError:
            continue
        parts = _parts(first), _parts(second)
        if None in parts:
            continue
        if parts[0] == parts[1]:
            alike.add(name)
        else:
            unlike[name] = f"{shown(first)} and {shown(second)}"
    return frozenset(alike), unlike


def _parts(value: Any) -> list[Any] | None:
    """Return the numbers and texts of a value, in order; `None` if it has other things, or too many.

    A tuple is as good as a list, which it is in other formats, and the order of a dict's keys does not matter.
    """
    found: list[Any] = []
    rest = [value]
    while rest:
        if len(found) + len(rest) > _MOST:
            return None
        one = rest.pop()
        if isinstance(one, dict):
            keys = sorted(one, key=repr)
            found.append(("dict", len(keys)))
            rest += [*keys, *(one[key] for key in keys)]
        elif isinstance(one, (list, tuple)):
            found.append(("list", len(one)))
            rest += one
        elif type(one) in (int, float):
            found.append("nan" if one != one else ("number", one))
        elif one is None or type(one) in (bool, str, bytes):
            found.append((type(one), one))
        else:
            return None
    return found
