"""Groups of an optimizer's parameters after a renaming: values whose names or contents name parameters (2.17)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..._text import counted, shown
from ...conversion.assembled import Assembled
from ...rules.left_out import LeftOut, names_text
from ...rules.states import TrainingNames, training_names
from ..tensors.checkpoint import StoredCheckpoint

__all__ = ["Grouped", "grouped_values"]

#: The name of a group's value, either by the group's number or by one parameter.
_GROUPS = re.compile(r"(?:^|.*\.)param_groups\.")


class Grouped(NamedTuple):
    """The values of a checkpoint with their new names.

    Attributes:
        copied: Unchanged values: the old name of each, by its new name.
        changed: Changed values, which are lists of parameters: old name and value of each, by its new name.
        lost: Values that cannot be expressed any more.
    """

    copied: dict[str, str]
    changed: dict[str, tuple[str, Any]]
    lost: list[LeftOut]


def grouped_values(
    checkpoint: StoredCheckpoint, values: Mapping[str, str], tensors: Mapping[str, Assembled]
) -> Grouped:
    """Return the kept values, with those of groups under the new names of their parameters.

    Args:
        checkpoint: The source.
        values: The old names of the kept values, each with its new one.
        tensors: All tensors by their new names.
    """
    found = Grouped({}, {}, [])
    groups = {name: new for name, new in values.items() if _GROUPS.match(name)}
    found.copied.update((new, name) for name, new in values.items() if name not in groups)
    if not groups:
        return found
    became = _became(tensors, checkpoint.training.names)
    single: dict[str, list[str]] = {}
    for name, new in groups.items():
        match = _GROUPS.match(new)
        assert match is not None
        parameter = _parameter(new[match.end() :], became)
        if parameter is not None:
            for other in became[parameter]:
                single.setdefault(f"{match[0]}{other}{new[match.end() + len(parameter) :]}", []).append(name)
        elif new.endswith(".params"):
            _list(checkpoint, name, new, became, found)
        else:
            found.copied[new] = name
    differing = []
    for new, names in single.items():
        held = [checkpoint.objects[name].value() for name in names] if len(names) > 1 else [None]
        if all(value == held[0] for value in held):
            found.copied[new] = names[0]
        else:
            differing.append((new, names, held))
    if differing:
        _, names, held = differing[0]
        at = next(at for at, value in enumerate(held) if value != held[0])
        lost = tuple(name for _, names, _ in differing for name in names)
        are = "is" if len(differing) == 1 else "are"
        text = (
            f"{counted(len(differing), 'value')} of parameters that become one {are} not written, because they differ: "
            f"{names_text(new for new, _, _ in differing)}; {shown(names[0])} is {shown(held[0])}, "
            f"{shown(names[at])} is {shown(held[at])}"
        )
        found.lost.append(LeftOut("values", lost, text))
    return found


def _parameter(rest: str, became: Mapping[str, Sequence[str]]) -> str | None:
    """Return the parameter with which the name of a parameter's own value begins."""
    head, dot, _ = rest.rpartition(".")
    while dot and head not in became:
        head, dot, _ = head.rpartition(".")
    return head if dot else None


def _list(
    checkpoint: StoredCheckpoint, name: str, new: str, became: Mapping[str, Sequence[str]], found: Grouped
) -> None:
    """Add the list of a group's parameters to what is found, by their new names; two groups may not share one."""
    said = checkpoint.objects[name].value()
    if not isinstance(said, list) or not all(isinstance(one, str) for one in said):
        found.copied[new] = name
        return
    names = list(dict.fromkeys(other for one in said for other in became.get(one, (one,))))
    others = {other for key, (_, value) in found.changed.items() if _beside(key) == _beside(new) for other in value}
    shared = [one for one in names if one in others]
    if shared:
        text = (
            f"{shown(name)} is not written: {shown(shared[0])} is made of parameters of several groups, and is in "
            f"{shown(next(key for key, (_, value) in found.changed.items() if shared[0] in value))}"
        )
        found.lost.append(LeftOut("values", (name,), text))
    elif names == said:
        found.copied[new] = name
    else:
        found.changed[new] = name, names


def _beside(name: str) -> str:
    match = _GROUPS.match(name)
    return "" if match is None else match[0]


def _became(tensors: Mapping[str, Assembled], old: TrainingNames) -> dict[str, list[str]]:
    """Return the new names of each parameter."""
    new = training_names(tensors)
    after = {weight: parameter for parameter, weight in new.weights.items()}
    before = {weight: parameter for parameter, weight in old.weights.items()}
    found: dict[str, dict[str, None]] = {}
    by_state: dict[str, dict[str, None]] = {}
    for name, made in tensors.items():
        state = new.states.get(name)
        for origin in made.origins():
            if state is None and origin in before and name in after:
                found.setdefault(before[origin], {})[after[name]] = None
            elif state is not None and origin in old.states:
                by_state.setdefault(old.states[origin].parameter, {})[state.parameter] = None
    return {parameter: list(names) for parameter, names in {**by_state, **found}.items()}
