"""Values that are not tensors, when a checkpoint is rewritten: groups of optimizers, schedulers, counts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from ...._text import shown
from ....conversion.tables import Wanted
from ....errors import LayoutError, ParseError
from ...rewritten.groups import Grouped
from ...rewritten.names import check_name
from ...rewritten.wanted import wanted_bytes, wanted_object
from ...tensors.checkpoint import StoredCheckpoint
from ..forms.dcp import value_bytes
from ..forms.plain_values import plain_value

__all__ = ["WrittenValues", "written_values"]

#: The name of a value of a numbered group.
_OF_GROUP = re.compile(r"(?P<before>(?:.*\.)?param_groups\.)(?P<number>[0-9]{1,9})\.(?P<key>\w+)")
#: The default values of a group of PyTorch's Adam. Its subclass AdamW always decouples weight decay.
_OF_ADAM: dict[str, Any] = {
    "amsgrad": False,
    "foreach": None,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": False,
}


class WrittenValues(NamedTuple):
    """The values of a new checkpoint, as its form has them.

    Attributes:
        names: The new names of the values that are written, by their names in the source.
        common: The values by new name, for a file that has them in its pickle.
        wanted: A container for each value, for a form that stores them so.
        homeless: The names of values that cannot be written.
    """

    names: dict[str, str]
    common: dict[str, Any]
    wanted: list[Wanted]
    homeless: list[str]


def written_values(checkpoint: StoredCheckpoint, grouped: Grouped, form: str, taken: Iterable[str]) -> WrittenValues:
    """Return the values of a checkpoint as a form has them.

    Args:
        checkpoint: The source.
        grouped: The values, by their new names.
        form: The form, `"dcp"` or `"torch"`.
        taken: The new names of all tensors.

    Raises:
        LayoutError: if a value would get the name of a tensor.
    """
    found = WrittenValues({}, {}, [], [])
    tensors = set(taken)
    for new, old in (*grouped.copied.items(), *((new, old) for new, (old, _) in grouped.changed.items())):
        held = checkpoint.objects[old]
        if form == "dcp" and held.extent is not None and new in grouped.copied:
            wanted = wanted_object(new, held)
        else:
            try:
                value = plain_value(grouped.changed[new][1] if new in grouped.changed else held.value())
                data = value_bytes(value) if form == "dcp" else b""
            except (ParseError, TypeError, OverflowError):
                found.homeless.append(old)
                continue
            if not new and value == {}:  # The dict of a file without anything.
                continue
            found.common[new] = value
            wanted = wanted_bytes(new, data)
        check_name(new)
        if new in tensors:
            raise LayoutError(f"a value and a tensor would both be called {shown(new)}")
        found.names[old] = new
        found.wanted.append(wanted)
    if form == "dcp":
        known = {*tensors, *grouped.copied, *grouped.changed}
        for new, value in _by_parameter(checkpoint, grouped):
            if new not in known:
                check_name(new)
                found.wanted.append(wanted_bytes(new, value))
    return found


def _by_parameter(checkpoint: StoredCheckpoint, grouped: Grouped) -> Iterator[tuple[str, bytes]]:
    """Yield the values of numbered groups once more under the name of each parameter, as torchtitan expects them.

    Missing values of Adam get their defaults: an optimizer without a schedule has no `initial_lr`, for example.
    """
    groups: dict[tuple[str, int], dict[str, Any]] = {}
    for new in (*grouped.copied, *grouped.changed):
        match = _OF_GROUP.fullmatch(new)
        if match is not None:
            value = (
                grouped.changed[new][1] if new in grouped.changed else checkpoint.objects[grouped.copied[new]].value()
            )
            groups.setdefault((match["before"], int(match["number"])), {})[match["key"]] = value
    for (before, _), said in groups.items():
        params = said.pop("params", None)
        said.pop("param_names", None)
        if "lr" not in said or not isinstance(params, list) or not all(isinstance(name, str) for name in params):
            continue
        more = _OF_ADAM if "betas" in said else {}
        values: dict[str, bytes] = {}
        for key, value in {"initial_lr": said["lr"], **more, **said}.items():
            with suppress(
                ParseError, TypeError, OverflowError
            ):  # It is said of the group's own that it is not written.
                values[key] = value_bytes(plain_value(value))
        yield from ((f"{before}{name}.{key}", data) for name in params for key, data in values.items())
