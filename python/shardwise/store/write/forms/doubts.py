"""Doubts about a checkpoint that can be written: things that do not arrive, layouts that cut nothing, idle rules."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from ...._dtypes import bytes_for
from ...._text import shown
from ....conversion.assembled import Assembled, Wanted
from ....errors import LayoutError
from ....layout import UnevenRule
from ....placing import Layouts, placing_of
from ....quantized.forms import Components
from ....rules.left_out import LeftOut, listed, named
from .forms import WRITTEN

__all__ = [
    "DoubtsError",
    "asked_for",
    "described",
    "doubts_about",
    "dropped_by_rules",
    "states_alone",
    "without_a_place",
]

_SHOWN = 3
#: The components of no quantized weights.
NO_WEIGHTS = Components(None, {}, ())
#: The most alternatives of an expression that a message advises.
_MOST_ADVISED = 16
#: A name that may be a part of such an expression, which a shell takes as it is.
_PLAIN = re.compile(r"[\w./:-]+", re.ASCII)
_MOMENT = (
    "(?:max_)?exp_avg(?:_sq)?|exp_avg_sq_(?:row|col)|momentum_buffer|fp32_(?:param|from_fp16_params)|master_param|"
    "(?:row|col)_var|variance"
)
#: The names of states: of torch's optimizers, whose parameter comes first, and of Megatron's.
_STATES = (
    re.compile(rf"(?:^|\.)state\.(?P<weight>.+)\.(?:{_MOMENT})$"),
    re.compile(rf"(?:^|\.)state\.(?:{_MOMENT})\.(?P<weight>.+)$"),
)


class DoubtsError(LayoutError):
    """Doubts as an error, where the caller allows none.

    Attributes:
        warnings: The doubts, a sentence each.
    """

    def __init__(self, warnings: Sequence[str]) -> None:
        super().__init__("; ".join(warnings))
        self.warnings = tuple(warnings)

    def __reduce__(self) -> tuple[type[DoubtsError], tuple[tuple[str, ...]]]:
        return type(self), (self.warnings,)


def without_a_place(names: Sequence[str], form: str, others: Collection[str]) -> LeftOut:
    """Say that values that are not tensors are not written, and how a call says that this is wanted."""
    why = "in a form that cannot be copied" if form == "dcp" else f"without a place in {form!r}"
    count = "1 value is" if len(names) == 1 else f"{len(names)} values are"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    text = f"{count} not written, {why}: {', '.join(map(shown, names[:_SHOWN]))}{more}; {_wanted(names, others)}"
    return LeftOut("values", tuple(names), text)


def _wanted(names: Collection[str], others: Collection[str]) -> str:
    advice = expression_for(names, others)
    return ("drop" if advice is None else f"drop={advice!r}") + " says that this is wanted"


def dropped_by_rules(
    dropped: Mapping[str, Assembled], values: Iterable[str] = (), others: Collection[str] = ()
) -> list[LeftOut]:
    """Say which tensors and values the rules drop, and how a call says that this is wanted.

    Args:
        dropped: The tensors, by the names by which the rules drop them.
        values: Names of values that are not tensors, and of tensors that cannot be read.
        others: The names in the source, with those of all these.
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
    text = f"{count} dropped by the rules: {named(all_names)}; {_wanted(all_names, others)}"
    return [LeftOut("dropped", all_names, text, nbytes)]


def asked_for(tensors: Mapping[str, int], values: Iterable[str] = ()) -> list[LeftOut]:
    """Say what is left out because the call says so: the bytes of tensors by name, and names of values."""
    names = (*tensors, *values)
    if not names:
        return []
    count, which = listed(names, "tensor or value" if len(names) > len(tensors) else "tensor")
    return [LeftOut("asked", names, f"{count} left out, as only and drop say: {which}", sum(tensors.values()))]


def nbytes_of(made: Assembled) -> int:
    """The bytes of a tensor's elements."""
    count = 1
    for size in made.shape:
        count *= size
    return bytes_for(count, made.dtype.bits)


def expression_for(names: Collection[str], others: Collection[str]) -> str | None:
    """A regular expression that is found in all of these names and in none of the others; `None` if none is short.

    >>> expression_for(["optimizer.a.0", "optimizer.b"], ["optimizer.a.0", "optimizer.b", "model.a.0"])
    '^(optimizer)[.]'
    >>> expression_for(["h.0.inv_freq", "h.1.inv_freq"], ["h.0.w"])
    '[.](inv_freq)$'
    >>> expression_for(["h.0.w", "h.1.w"], ["x.0.w", "h.0.b"])
    '^(h[.][0-9]+[.]w)$'
    """
    if not all(map(_PLAIN.fullmatch, names)):
        return None
    wanted = set(names)
    rest = [name for name in others if name not in wanted]
    parts = (
        ("^({})[.]", [name.partition(".")[0] for name in names]),
        ("[.]({})$", [name.rpartition(".")[2] for name in names]),
        ("^({})$", [re.sub("[0-9]+", "0", name) for name in names]),
    )
    for form, pieces in parts:
        distinct = sorted(set(pieces))
        if len(distinct) > _MOST_ADVISED:
            continue
        texts = [text.replace(".", "[.]") for text in distinct]
        if form == "^({})$":
            texts = [re.sub("[0-9]+", "[0-9]+", text) for text in texts]
        found = form.format("|".join(texts))
        pattern = re.compile(found)
        if all(map(pattern.search, names)) and not any(map(pattern.search, rest)):
            return found
    return None


def states_alone(names: Collection[str], source: Collection[str]) -> list[LeftOut]:
    """Say which states of an optimizer are among these tensors without the weights that the source has for them."""
    found: dict[str, str] = {}
    for name in names:
        for pattern in _STATES:
            match = pattern.search(name)
            if match is not None:
                found[name] = match["weight"]
                break
    if not found:
        return []
    there, before = (_ends(name for name in each if name not in found) for each in (names, source))
    alone = tuple(name for name, weight in found.items() if weight in before and weight not in there)
    if not alone:
        return []
    count, which = listed(alone, "optimizer state")
    whose = "its weight" if len(alone) == 1 else "their weights"
    return [LeftOut("states", alone, f"{count} among the tensors without {whose}: {which}")]


def _ends(names: Iterable[str]) -> set[str]:
    """All names, also without their first parts."""
    found = set()
    for name in names:
        at = 0
        while at >= 0:
            found.add(name[at:])
            at = name.find(".", at) + 1 or -1
    return found


def doubts_about(
    layouts: Layouts | None,
    uneven: UnevenRule,
    form: str,
    wanted: Sequence[Wanted],
    tensors: Collection[str],
    described: Sequence[tuple[str, tuple[int, ...], str]],
) -> tuple[list[LeftOut], list[str]]:
    """Say what looks wrong: what does not arrive as it seems, and all of this and the rest, a sentence each.

    Args:
        layouts: The layouts by name.
        uneven: The rule by which a dim that does not divide is cut.
        form: The format that they are written in.
        wanted: The tensors that are written.
        tensors: The names of all tensors, the new ones.
        described: The tensors to which rules apply, of those that are written; see `described`.
    """
    lost: list[LeftOut] = []
    found: list[str] = []
    cut = [each.name for each in wanted if each.partition is not None and each.partition.total_shards > 1]
    if cut and form != "rank" and not WRITTEN[form].is_cut:
        found.append(
            f"the layouts cut {len(cut)} tensor{'s' * (len(cut) != 1)}, but {form!r} holds tensors whole, so nothing "
            "is cut; 'sharded', 'ranks' and 'dcp' hold them in pieces"
        )
    placing = placing_of(layouts)
    report = placing.report(described, uneven=uneven)
    if report is not None:
        # A rule for tensors that are not wanted is a rule like any other.
        kept = {each.name for each in wanted}
        rest = {
            rule.removeprefix(placing.prefix)
            for name in tensors
            if name not in kept
            for rule in placing.matching_rules(name)
        }
        report = replace(report, unused_rules=tuple(rule for rule in report.unused_rules if rule not in rest))
        lost += report.left_out
        found += report.doubts
    else:
        missing = [name for name in placing.names or () if name not in tensors]
        if missing:
            names = ", ".join(map(shown, missing[:_SHOWN]))
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            count = "a name" if len(missing) == 1 else f"{len(missing)} names"
            found.append(f"layouts has {count} that no tensor has: {names}{more}")
    return lost, found


def described(
    kept: Mapping[str, Assembled | Wanted], weights: Components = NO_WEIGHTS
) -> list[tuple[str, tuple[int, ...], str]]:
    """The tensors to which rules apply, with shape and dtype: in place of components, the weight that they make."""
    components = {one.name for each in weights.tensors.values() for one in each.components}
    found = [(name, each.shape, each.dtype.name) for name, each in kept.items() if name not in components]
    return [*found, *((name, each.shape, "uint8") for name, each in weights.tensors.items())]
