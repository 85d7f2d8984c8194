"""Tensors and values that do not go into another checkpoint, with the arguments by which a call accepts this."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from ..._dtypes import bytes_for
from ..._text import shown
from ...conversion.assembled import Assembled
from ...rules.left_out import LeftOut, listed, names_text
from ...rules.states import training_names
from ..tensors.checkpoint import StoredCheckpoint

__all__ = [
    "asked_for",
    "dropped_by_rules",
    "expression_for",
    "nbytes_of",
    "of_single_ranks",
    "rounded",
    "states_alone",
    "without_a_place",
]

_SHOWN = 3
#: The most alternatives in a regular expression that a message proposes.
_MOST_ADVISED = 16
#: Names of values that only the rank that wrote them can use.
_OF_A_RANK = re.compile(r"(?:^|[._/])(?:rank_?[0-9]+|error_feedback|worker_error|server_error)(?:[._/]|$)")
#: A name that may be in a proposed expression without being quoted for a shell.
_PLAIN = re.compile(r"[\w./:-]+", re.ASCII)


def without_a_place(names: Sequence[str], form: str, others: Collection[str]) -> LeftOut:
    """Return the note that values are not written as the form cannot hold them, with the `drop` that accepts it."""
    count, them = ("1 value is", "it") if len(names) == 1 else (f"{len(names)} values are", "them")
    why = f"a copy of {them} cannot be made" if form in ("dcp", "torch") else f"{form!r} has no place for {them}"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    text = (
        f"{count} not written, because {why}: {', '.join(map(shown, names[:_SHOWN]))}{more}; {_wanted(names, others)}"
    )
    return LeftOut("values", tuple(names), text)


def _wanted(names: Collection[str], others: Collection[str]) -> str:
    advice = expression_for(names, others)
    return ("drop" if advice is None else f"drop={advice!r}") + " says that this is wanted"


def dropped_by_rules(
    dropped: Mapping[str, Assembled], values: Iterable[str] = (), others: Collection[str] = ()
) -> list[LeftOut]:
    """Return the note on the tensors and values that the rules drop, with the `drop` that accepts it.

    Args:
        dropped: The tensors, by the names by which the rules drop them.
        values: Names of values that are not tensors, and of tensors that cannot be read.
        others: All names in the source, with those in `dropped`.
    """
    names = [made.stored or name for name, made in dropped.items()]
    values = list(values)
    if not names and not values:
        return []
    nbytes = sum(nbytes_of(made) for made in dropped.values())
    count, _ = listed(names, "tensor", nbytes)
    if not names:
        count, _ = listed(values, "value")
    elif values:
        count = f"{count.rpartition(' ')[0]} and {len(values)} value{'s' * (len(values) != 1)} are"
    all_names = (*names, *values)
    text = f"{count} dropped by the rules: {names_text(all_names)}; {_wanted(all_names, others)}"
    return [LeftOut("dropped", all_names, text, nbytes)]


def asked_for(tensors: Mapping[str, int], values: Iterable[str] = ()) -> list[LeftOut]:
    """Return the note on tensors (bytes by name) and values (names) that the call itself leaves out."""
    names = (*tensors, *values)
    if not names:
        return []
    count, which = listed(names, "tensor or value" if len(names) > len(tensors) else "tensor")
    return [LeftOut("asked", names, f"{count} left out, as only and drop say: {which}", sum(tensors.values()))]


def rounded(weights: Mapping[str, int], what: str) -> list[LeftOut]:
    """Return the note on weights that are replaced by their master copies; `what` says what happens to the weights."""
    if not weights:
        return []
    nbytes = sum(weights.values())
    count, which = listed(tuple(weights), "weight", nbytes)
    return [LeftOut("rounded", tuple(weights), f"{count} {what}: {which}", nbytes)]


def nbytes_of(made: Assembled) -> int:
    """Return the bytes of a tensor's elements."""
    count = 1
    for size in made.shape:
        count *= size
    return bytes_for(count, made.dtype.bits)


def expression_for(names: Collection[str], others: Collection[str]) -> str | None:
    """Return a short regular expression that is found in all of these names and in no other; `None` if none is short.

    >>> expression_for(["optimizer.a.0", "optimizer.b"], ["optimizer.a.0", "optimizer.b", "model.a.0"])
    '^(optimizer)[.]'
    >>> expression_for(["optim.groups.0.lr", "optim.groups.0.eps", "step"], ["optim.state.0.step"])
    '^(optim[.]groups)[.]|^(step)$'
    >>> expression_for(["h.0.q._extra/0_1", "h.0.up._extra/0_1", "h.1.q._extra/0_1", "step"], ["h.0.q.weight"])
    '(^|[./])(_extra|step)([./]|$)'
    >>> expression_for(["h.0.inv_freq", "h.1.inv_freq"], ["h.0.w"])
    '[.](inv_freq)$'
    >>> expression_for(["h.0.w", "h.1.w"], ["x.0.w", "h.0.b"])
    '^(h[.][0-9]+[.]w)$'
    """
    if not all(map(_PLAIN.fullmatch, names)):
        return None
    wanted = set(names)
    rest = [name for name in others if name not in wanted]
    good = []
    for parts, is_numbered in (
        (_beginnings(names, rest), True),
        ({"[.]({})$": {name.rpartition(".")[2] for name in names}}, True),
        (_words(names, rest), True),
        (_beginnings(*({re.sub("[0-9]+", "0", name) for name in each} for each in (names, rest))), False),
    ):
        if sum(map(len, parts.values())) > _MOST_ADVISED:
            continue
        found = "|".join(
            form.format("|".join(sorted(pieces)).replace(".", "[.]")) for form, pieces in parts.items() if pieces
        )
        found = found if is_numbered else re.sub("[0-9]+", "[0-9]+", found)
        pattern = re.compile(found)
        if all(map(pattern.search, names)) and not any(map(pattern.search, rest)):
            good.append(found)
    return min(good, key=len, default=None)


def _beginnings(names: Iterable[str], rest: Iterable[str]) -> dict[str, set[str]]:
    """Return, by form, the shortest beginnings of names, up to a dot, that no other name has; else the whole names."""
    taken = {name[: dot.start()] for name in rest for dot in re.finditer("[.]", name)}
    found: dict[str, set[str]] = {"^({})[.]": set(), "^({})$": set()}
    for name in names:
        begins = (name[: dot.start()] for dot in re.finditer("[.]", name))
        own = next((begin for begin in begins if begin not in taken), None)
        found["^({})$" if own is None else "^({})[.]"].add(own or name)
    return found


def _words(names: Collection[str], rest: Iterable[str]) -> dict[str, set[str]]:
    """Return, by form, common words between dots and slashes that no other name has; else whole names."""
    taken = {word for name in rest for word in re.split("[./]", name)}
    words = {name: {word for word in re.split("[./]", name) if re.search("[A-Za-z]", word)} - taken for name in names}
    counts = Counter(word for own in words.values() for word in own)
    found: dict[str, set[str]] = {"(^|[./])({})([./]|$)": set(), "^({})$": set()}
    for name, own in words.items():
        best = max(own, key=lambda word: (counts[word], not re.search("[0-9]", word), word), default=None)
        found["^({})$" if best is None else "(^|[./])({})([./]|$)"].add(best or name)
    return found


def of_single_ranks(names: Iterable[str], checkpoint: StoredCheckpoint) -> list[str]:
    """Return the note on values, such as random states, that only the rank of the run that wrote them can use.

    Args:
        names: The names in the source of all that is written.
        checkpoint: The source.
    """
    found = [name for name in names if checkpoint.training.is_state(name) and _OF_A_RANK.search(name)]
    if not found:
        return []
    count = "1 value of a training state is" if len(found) == 1 else f"{len(found)} values of a training state are"
    return [
        f"{count} for single ranks of the run that wrote it, and cannot be made for other ranks: "
        f"{names_text(found)}; {_wanted(found, (*checkpoint, *checkpoint.objects, *checkpoint.unreadable))}"
    ]


def states_alone(names: Collection[str], source: Collection[str]) -> list[LeftOut]:
    """Return the note on states of an optimizer that are written without their weights, though the source has them."""
    alone = {name: state.parameter for name, state in training_names(names).states.items() if state.weight is None}
    if not alone:
        return []
    had = {state.parameter for state in training_names(source).states.values() if state.weight is not None}
    lonely = tuple(name for name, parameter in alone.items() if parameter in had)
    if not lonely:
        return []
    count, which = listed(lonely, "optimizer state")
    whose = "its weight" if len(lonely) == 1 else "their weights"
    return [LeftOut("states", lonely, f"{count} among the tensors without {whose}: {which}")]
