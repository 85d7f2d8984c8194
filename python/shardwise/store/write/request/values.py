"""Values that are not tensors, of a checkpoint that is written again: groups of optimizers, schedulers, counts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from ...._text import shown
from ....conversion.assembled import Wanted
from ....errors import LayoutError, ParseError
from ...rewritten.groups import Grouped
from ...rewritten.names import check_name
from ...rewritten.wanted import wanted_bytes, wanted_object
from ...tensors.checkpoint import StoredCheckpoint
from ..forms.dcp import value_bytes
from ..forms.nested import plain_value

__all__ = ["WrittenValues", "written_values"]


class WrittenValues(NamedTuple):
    """Values as a form has them.

    Attributes:
        names: The new names of those that are written, by their names in the source.
        said: The values themselves by new name, for a file that has them in its pickle.
        wanted: Their containers, for a form that has one for each.
        homeless: Those that cannot be written.
    """

    names: dict[str, str]
    said: dict[str, Any]
    wanted: list[Wanted]
    homeless: list[str]


def written_values(checkpoint: StoredCheckpoint, grouped: Grouped, form: str, taken: Iterable[str]) -> WrittenValues:
    """Give the values of a checkpoint as a form has them.

    Args:
        checkpoint: The source.
        grouped: The values, by their new names.
        form: The form, `"dcp"` or `"torch"`.
        taken: The new names of all tensors.

    Raises:
        LayoutError: if a value would be called as a tensor is.
    """
    found = WrittenValues({}, {}, [], [])
    tensors = set(taken)
    for new, old in (*grouped.copied.items(), *((new, old) for new, (old, _) in grouped.made.items())):
        held = checkpoint.objects[old]
        if form == "dcp" and held.extent is not None and new in grouped.copied:
            wanted = wanted_object(new, held)
        else:
            try:
                value = plain_value(grouped.made[new][1] if new in grouped.made else held.value())
                data = value_bytes(value) if form == "dcp" else b""
            except (ParseError, TypeError, OverflowError):
                found.homeless.append(old)
                continue
            if not new and value == {}:  # The dict of a file without anything.
                continue
            found.said[new] = value
            wanted = wanted_bytes(new, data)
        check_name(new)
        if new in tensors:
            raise LayoutError(f"a value and a tensor would both be called {shown(new)}")
        found.names[old] = new
        found.wanted.append(wanted)
    return found
