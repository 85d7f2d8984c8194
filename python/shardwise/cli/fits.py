"""`shardwise fits`: the numbers of devices into which a model can be cut."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from ..errors import ParseError
from ..fit import Cut, Fits, SizeFit, Unknown, fits, fits_ratio
from ..fit.evidence import is_of_elements
from ..show.lines import StyledText
from .terminal import WOULD_CUT, Screen

__all__ = ["run_fits"]

_WORDS: dict[str, StyledText] = {
    "fits": ("fits", "bold green"),
    "shared": ("fits with shared blocks", "bold yellow"),
    "padded": ("fits with padding", "bold yellow"),
    "unknown": ("unknown", "bold magenta"),
    "refused": ("does not fit", "bold red"),
}
_RATIO_WORDS: dict[str, StyledText] = {
    **{"fits": _WORDS["fits"], "unknown": _WORDS["unknown"], "refused": _WORDS["refused"]},
    "rounded": ("fits with shares rounded to whole units", "bold yellow"),
}
#: The most kinds of tensors that are named for one size.
_NAMED = 6


#: The exit statuses if no size fits, and if there is no verdict for one.
_REFUSED, _UNKNOWN = 1, 4


def run_fits(screen: Screen, options: argparse.Namespace) -> int:
    """Print the answer for each size, or for a ratio, and give the exit status: 1 if none fits, 4 if one is unknown."""
    if options.ratio is not None:
        return _run_ratio(screen, options)
    sizes = _sizes("--tp", options.tp), _sizes("--ep", options.ep)
    answer = fits(options.model, *sizes, config=options.config, rules=options.rules)
    if options.json:
        print(json.dumps(answer.as_json(), indent=2))
    else:
        _print(screen, answer, by_rules=options.rules is not None)
    return _status([size.verdict for size in answer.sizes])


def _run_ratio(screen: Screen, options: argparse.Namespace) -> int:
    if options.rules is not None:
        raise ParseError("--ratio cuts by the names of weights, but rules cut in equal shares: leave --rules out")
    answer = fits_ratio(options.model, _sizes("--ratio", options.ratio), config=options.config)
    if options.json:
        found = {"ratio": answer.ratio, "verdict": answer.verdict, "units": [one._asdict() for one in answer.units]}
        print(json.dumps(found | {"unknown": answer.unknown}, indent=2))
    else:
        screen.write((answer.text, "bold"), ": ", _RATIO_WORDS[answer.verdict])
        for one in answer.units:
            shares = ", ".join(map(str, one.shares)) or "no shares"
            screen.write(f"  {one.units} {one.what}: {shares}{'; ' * bool(one.why)}{one.why}")
            screen.write(f"    {_some(one.names)}")
        if answer.unknown:
            screen.write(f"not recognised, so that no ratio is known to fit: {_some(answer.unknown)}")
    return _status([answer.verdict])


def _status(verdicts: Sequence[str]) -> int:
    """Return the exit status: a padded, rounded or shared size fits."""
    return _UNKNOWN if "unknown" in verdicts else _REFUSED if {*verdicts} == {"refused"} else 0


def _sizes(name: str, text: str) -> list[int]:
    sizes = text.split(",")
    if not all(size.strip().isascii() and size.strip().isdecimal() and len(size.strip()) < 10 for size in sizes):
        raise ParseError(f"{name} {text[:80]!r}: not whole numbers with commas between them; expected e.g. 1,2,4,8")
    return [int(size) for size in sizes]


def _print(screen: Screen, answer: Fits, *, by_rules: bool) -> None:
    if answer.method is None and answer.is_known:
        screen.write("not quantized")
    for form, count in answer.forms:
        screen.write((form, "bold"), f", {count:,} weight{'s' if count > 1 else ''}")
    experts = any(size.ep > 1 for size in answer.sizes)
    for size in answer.sizes:
        screen.write("")
        named = f"tp {size.tp}" + (f", ep {size.ep}" if experts else "")
        refused = ", and engines refuse it" if size.limits and size.verdict != "refused" else ""
        screen.write((named, "bold"), ": ", _WORDS[size.verdict], refused)
        _print_size(screen, size)
    screen.write("")
    if answer.unknown:
        _print_unknown(screen, answer, by_rules=by_rules)
    if answer.whole:
        screen.write(f"whole on every rank: {_some(answer.whole)}")
    if answer.elsewhere:
        screen.write(f"not looked at, because they are not of the language model: {_some(answer.elsewhere)}")
    for number, reason in enumerate(answer.rests_on):
        screen.write("rests on " if number == 0 else "  ", reason)


def _print_unknown(screen: Screen, answer: Fits, *, by_rules: bool) -> None:
    """Print the tensors whose names are not known, with the reasons, and the options that say how they are cut."""
    screen.write("not recognised, so that no size over one rank is known to fit:")
    alike: dict[str, list[Unknown]] = {}
    for one in answer.unknown:
        alike.setdefault(one.why, []).append(one)
    for why, kinds in list(alike.items())[:_NAMED]:
        names = [f"{one.name} of {' x '.join(map(str, one.shape))}" for one in kinds]
        screen.write(f"  {_some(names)}: {why}")
    if len(alike) > _NAMED:
        screen.write(f"  and {len(alike) - _NAMED} more reasons")
    rules = (
        "add rules for them" if by_rules else "say how each tensor is cut in a rules file, and give it: --rules FILE"
    )
    if any(not is_of_elements(one) for one in answer.unknown):
        screen.write(f"to decide it, {rules}; with default = [] tensors that no rule matches are whole on every rank")
    if any(map(is_of_elements, answer.unknown)):
        screen.write(
            "for elements that may be quantized, give a configuration that states how (--config); if the form is not "
            "known, `shardwise report`, with rules for the names of the stored tensors, shows how these are cut"
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _print_size(screen: Screen, size: SizeFit) -> None:
    alike: dict[tuple[str, str], list[Cut]] = {}
    for cut in size.problems:
        alike.setdefault((cut.why, _ways_out(cut, size.ep)), []).append(cut)
    for (why, ways), cuts in list(alike.items())[:_NAMED]:
        names = list(dict.fromkeys(cut.name for cut in cuts))
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        count = f" ({cuts[0].tensors:,} tensors)" if cuts[0].tensors > 1 else ""
        is_of_one = {cut.dim for cut in cuts} == {max(cuts[0].dim, 0)} and not why.startswith("dim ")
        dim = f", dim {cuts[0].dim}" if is_of_one else ""
        screen.write(f"  {names[0]}{count}{others}{dim}: {why.replace(f'; {WOULD_CUT}', '')}{ways}")
    if len(alike) > _NAMED:
        screen.write(f"  and {len(alike) - _NAMED} more reasons")
    for cut, limit in size.limits[:_NAMED]:
        screen.write(f"  {limit.engine} ({limit.kernel}) refuses {cut.name}: {limit.why}")
    if len(size.limits) > _NAMED:
        screen.write(f"  and {len(size.limits) - _NAMED} more limits of engines")


def _ways_out(cut: Cut, ep: int) -> str:
    """Return the remedies: padding, other sizes, an uneven cut in whole units."""
    ways = []
    if cut.padded is not None:
        ways.append(f"padded to {cut.padded}")
    if not cut.never and (sizes := [str(size) for size in cut.sizes if size > 1]):
        # Where experts are cut as well, the shards of a dim are not those of tensor parallelism.
        ways.append(f"tp {', '.join(sizes)}" if ep == 1 else f"in {', '.join(sizes)} parts")
    if cut.ceil and cut.padded is not None:
        ways.append(f"uneven, {', '.join(map(str, cut.ceil))}" if len(cut.ceil) <= 8 else "uneven, in whole units")
    return f"; would fit: {'; '.join(ways)}" if ways else ""
