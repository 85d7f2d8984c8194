"""The text of `shardwise state`: tables of bytes by kind and by tensor."""

from __future__ import annotations

import argparse
import json
from typing import NamedTuple

from .._text import bytes_text, counted
from ..fit.nearest import Way
from ..show.lines import StyledText
from ..show.names import brief, group_names
from ..show.table import table_lines
from ..state import NOT_COUNTED, TrainingState
from .terminal import Screen

__all__ = ["Findings", "print_findings", "print_unknown"]

#: The exit status if what is needed is not known.
UNKNOWN = 4
_NAMED = 6
#: The rows of tensors that are shown without `--all`.
_MOST_ROWS = 20


class Findings(NamedTuple):
    """The findings on a model: its state, the memory of a device, ways that fit it, and what the figures rest on."""

    state: TrainingState
    memory: int | None
    ways: list[Way]
    rests_on: tuple[str, ...]
    notes: list[str]


def print_unknown(screen: Screen, options: argparse.Namespace, reasons: list[str]) -> int:
    """Print why the needs of a rank are not known, and give the exit status."""
    if options.json:
        print(json.dumps({"known": False, "unknown": reasons}, indent=2))
    else:
        screen.write(("unknown", "bold magenta"), ": the bytes that a rank needs. The reasons:")
        for reason in reasons[:_NAMED]:
            screen.write(f"  {reason}")
        if len(reasons) > _NAMED:
            screen.write(f"  and {len(reasons) - _NAMED} more")
        screen.write("to decide it, say how each tensor is cut in a rules file, and give it: --rules FILE --mesh AXES")
    return UNKNOWN


def print_findings(screen: Screen, options: argparse.Namespace, findings: Findings) -> None:
    """Print what each rank needs, by kind and by tensor."""
    state, memory, ways, rests_on, notes = findings
    device, most = state.fullest
    size = state.device_mesh.size
    trained = "nothing trained" if state.optimizer is None else f"{state.optimizer}, sharded by {state.sharding}"
    over = f" over {', '.join(state.over)}" if state.over and state.optimizer is not None else ""
    screen.write((options.model, "bold"), f": {trained}{over}, on {size:,} device{'s' * (size > 1)}")
    screen.write("")
    for line in table_lines(("on the fullest", ">held", ">allocated", ">on all together"), _kind_rows(state)):
        screen.write(*line)
    screen.write("")
    screen.write(("fullest: ", "bold"), f"{device}, {bytes_text(most)}; {state.why}")
    stages = state.stages
    if stages is not None and len(stages) > 1:
        said = ", ".join(f"{number}: {bytes_text(most)}" for number, (_, most) in enumerate(stages))
        screen.write(f"by stage: {said}")
    if options.devices:
        screen.write("")
        rows = [[(brief([str(state.device_mesh.device(at)) for at in devices]), ""),
                 (f"{sum(room for _, room in sizes.values()):,}", "")] for devices, sizes in state.alike()]  # fmt: skip
        for line in table_lines(("devices", ">bytes"), rows):
            screen.write(*line)
    screen.write("")
    for line in table_lines(("tensors of the fullest", ">held", ">allocated"), _tensor_rows(state, options.all),
                            screen.size and screen.size.columns):  # fmt: skip
        screen.write(*line)
    screen.write("")
    if memory is not None:
        _print_memory(screen, state, memory, ways)
    if state.unmatched:
        names = [name for name, _, _ in group_names((name, None) for name in state.unmatched)]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        count = len(state.unmatched)
        said = f"{counted(count, 'tensor')} {'matches no rule and is' if count == 1 else 'match no rule and are'}"
        screen.write(("warning: ", "bold yellow"), f"{said} whole everywhere: {', '.join(names[:_NAMED])}{more}")
    for number, reason in enumerate(rests_on):
        screen.write("rests on " if number == 0 else "  ", reason)
    if options.html is not None:
        screen.write("the page is in ", (str(options.html), "bold"))
    for note in notes:
        screen.write(note)
    screen.write(NOT_COUNTED)


def _print_memory(screen: Screen, state: TrainingState, memory: int, ways: list[Way]) -> None:
    most = state.fullest[1]
    if state.fits(memory):
        screen.write(("fits", "bold green"), f" {bytes_text(memory)}, with {bytes_text(memory - most)} left")
        return
    screen.write(("does not fit", "bold red"), f" {bytes_text(memory)}: {bytes_text(most - memory)} too much")
    for way in ways:
        if way.fits:
            screen.write(f"  would fit: {way.text}, {bytes_text(way.allocated)}")
        elif way.change == "together":
            screen.write(f"  no change that was tried is enough; the least is {way.text}, {bytes_text(way.allocated)}")
        else:
            screen.write(f"  {way.change} alone is not enough; the least is {way.text}, {bytes_text(way.allocated)}")
    if not ways:
        screen.write("  no other way to cut or to shard these devices is known")


def _kind_rows(state: TrainingState) -> list[list[StyledText]]:
    at = int(state.device_bytes.argmax())
    held, room, totals = state.held, state.allocated, state.totals()
    rows = [
        [(kind, ""), *((bytes_text(size), "") for size in (
            int(held[kind][at]), int(room[kind][at]), totals[kind][1]))] for kind in state.kinds
    ]  # fmt: skip
    whole = sum(int(held[kind][at]) for kind in state.kinds), int(state.device_bytes[at])
    total = sum(size for _, size in totals.values())
    return [*rows, [("all", "bold"), *((bytes_text(size), "bold") for size in (*whole, total))]]


def _tensor_rows(state: TrainingState, everything: bool) -> list[list[StyledText]]:
    """Return the tensors of the fullest device, those that differ in numbers only together."""
    sums: dict[str, list[int]] = {}
    for kept in state.of(state.fullest[0]):
        own = sums.setdefault(kept.tensor or f"({kept.name} of {kept.kind})", [0, 0])
        own[0] += kept.held
        own[1] += kept.allocated
    if everything:
        found = [(name, held, room) for name, (held, room) in sums.items()]
    else:
        groups = group_names((name, None) for name in sums)
        found = [
            (name if len(names) == 1 else f"{name} × {len(names)}",
             sum(sums[one][0] for one in names), sum(sums[one][1] for one in names))
            for name, names, _ in groups
        ]  # fmt: skip
    found.sort(key=lambda one: -one[2])
    rows: list[list[StyledText]] = [
        [(name, ""), (bytes_text(held), ""), (bytes_text(room), "")] for name, held, room in found
    ]
    if not everything and len(rows) > _MOST_ROWS:
        rest = found[_MOST_ROWS:]
        sizes = sum(one[1] for one in rest), sum(one[2] for one in rest)
        rows = [*rows[:_MOST_ROWS], [(f"and {len(rest)} more", ""), *((bytes_text(size), "") for size in sizes)]]
    return rows
