"""Axes of ranks in learned rules: which ranks have a parameter, and the file that states it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..._text import shown
from ...deploy.recording import Recording
from ...deploy.stages import EXTRA, Stages
from ...errors import LayoutError
from ...rules.toml_text import key_text, value_text
from .named import size_value
from .relations import NUMBER

__all__ = ["LearnedRule", "RankAxes", "Stay", "stays_of"]

Sizes = tuple[int, ...]
#: The expression for the stage that has the layer in a name.
_STAGE = "stage[i]"
#: A model's configuration, and the recordings of all ranks by the sizes of the axes.
Model = tuple[Mapping[str, Any], Mapping[Sizes, Sequence[Recording]]]


class LearnedRule(NamedTuple):
    """A rule: an entry for each dim, and the coordinates of the ranks that it applies to."""

    entries: Sequence[Any]
    at: Mapping[str, Any]

    def texts(self) -> Iterator[str]:
        """Yield the expressions of its coordinates, and the name of the list of stages that they use."""
        for value in self.at.values():
            yield from (one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str))
            yield from ["layers"] if value == _STAGE else []

    @property
    def value(self) -> Any:
        """Return the rule as a file states it."""
        if not self.at:
            return list(self.entries)
        return {"axes": list(self.entries), "at": dict(self.at)}


class Stay(NamedTuple):
    """The ranks that have the parameters of some names: all, those of one stage, or of the layer or expert in the name.

    Attributes:
        at: Coordinates along some axes.
        fields: For each field in the coordinates, its position among the numbers in a name.
    """

    at: Mapping[str, Any]
    fields: Mapping[str, int]

    def rule(self, entries: Sequence[Any]) -> LearnedRule:
        """Return a rule for these parameters, with these entries."""
        return LearnedRule(entries, self.at)

    def key(self, pattern: str) -> str:
        """Return the regular expression of the names, with fields."""
        parts = pattern.split(r"\d+")
        named = {place: f"{{{field}}}" for field, place in self.fields.items()}
        joints = [named.get(place, r"\d+") for place in range(len(parts) - 1)]
        return "".join(itertools.chain.from_iterable(itertools.zip_longest(parts, joints, fillvalue="")))


@dataclass(frozen=True)
class RankAxes:
    """The axes of the ranks.

    Attributes:
        names: The names of the axes, the major first.
        stages: The axis of the stages, if there is one.
        extra: The stages that have one layer more than others.
    """

    names: tuple[str, ...]
    stages: str | None = None
    extra: str = EXTRA[0]

    def __post_init__(self) -> None:
        if self.stages is not None and self.stages not in self.names:
            raise LayoutError(f"stages is {shown(self.stages)}, which is not one of the axes {shown(list(self.names))}")

    @property
    def is_plain(self) -> bool:
        """True if the rules file has one mesh; False if it is a deployment's."""
        return len(self.names) == 1 and self.stages is None

    @property
    def specs(self) -> list[str]:
        """Return the axes that may cut a dim; several are joined by `+`."""
        cut = [name for name in self.names if name != self.stages]
        return [*cut, *(["+".join(cut)] if len(cut) > 1 else [])]

    def ranks_of(self, place: str, ranks: Mapping[Any, Sequence[Recording]]) -> dict[Sizes, Sequence[Recording]]:
        """Return the recordings by the sizes of all axes.

        Raises:
            LayoutError: if a key is not the sizes of these axes, or the recording on one rank is missing.
        """
        found: dict[Sizes, Sequence[Recording]] = {}
        for key, held in ranks.items():
            sizes = key if isinstance(key, tuple) else (key,)
            if len(sizes) != len(self.names) or not all(type(size) is int and size > 0 for size in sizes):
                raise LayoutError(
                    f"{place} was recorded on {shown(key)} ranks; a key must be the size of each of the axes "
                    f"{', '.join(self.names)}"
                )
            if held and len(held) != math.prod(sizes):
                raise LayoutError(f"{place} has {len(held)} recordings for {shown(key)} ranks")
            found[sizes] = held
        if not any(held for sizes, held in found.items() if math.prod(sizes) == 1):
            raise LayoutError("each model must also be recorded on one rank, where its parameters are whole")
        return {sizes: held for sizes, held in found.items() if held}

    def text(
        self,
        sizes: Sizes,
        head: Sequence[str],
        numbers: Mapping[str, Any],
        rules: Mapping[str, LearnedRule],
        rewrites: Sequence[str] = (),
    ) -> str:
        """Return a rules file for ranks of these sizes; the rewrites are given as text."""
        lines = [*head, ""] if head else []
        numbers = {} if self.is_plain and not numbers else dict(numbers)
        if not self.is_plain:
            numbers = {**dict(zip(self.names, sizes, strict=True)), **numbers}
        if numbers:
            lines += ["[numbers]", *(f"{name} = {value_text(given)}" for name, given in numbers.items()), ""]
        if any("stage[" in text for rule in rules.values() for text in rule.texts()):
            made = {"layers": "layers", "pp": self.stages, "extra": self.extra}
            lines += ["[lists]", f"stage = {value_text(made)}", ""]
        if not self.is_plain:
            mesh = {"shape": list(self.names), "axis_names": list(self.names)}
            lines += ["[meshes]", f"ranks = {value_text(mesh)}", ""]
        lines += ["[rules]", *(f"{key_text(name)} = {value_text(rule.value)}" for name, rule in rules.items()), ""]
        return "\n".join(lines) + "".join(f"\n[[rewrite]]{block.rstrip()}\n" for block in rewrites)


def stays_of(
    groups: Mapping[str, Sequence[str]], models: Sequence[Model], axes: RankAxes
) -> tuple[dict[str, Stay | None], RankAxes]:
    """Find, for each pattern of names, the ranks that have the parameters, and the stages with a layer more.

    Args:
        groups: names by their pattern.
        models: the recordings.
        axes: the axes; their `extra` is ignored.

    Returns:
        For each pattern the ranks, `None` if no rule can state them; and the axes with `extra`.
    """
    best: dict[str, Stay | None] = {}
    chosen = axes
    for extra in EXTRA if axes.stages is not None else EXTRA[:1]:
        own = RankAxes(axes.names, axes.stages, extra)
        found = {
            pattern: next((stay for stay in _stays(names[0], own) if _stay_there(stay, names, models, own)), None)
            for pattern, names in groups.items()
        }
        if not best or sum(map(bool, found.values())) > sum(map(bool, best.values())):
            best, chosen = found, own
    return best, chosen


def _stays(name: str, axes: RankAxes) -> Iterator[Stay]:
    """Yield the sets of ranks that may have a parameter, all ranks first."""
    yield Stay({}, {})
    places = range(len(NUMBER.findall(name)))
    of_stages: list[Stay] = [Stay({}, {})]
    if axes.stages is not None:
        last = f"{axes.stages} - 1"
        ends = [Stay({axes.stages: value}, {}) for value in (0, last, [0, last])]
        of_stages = [*ends, *(Stay({axes.stages: _STAGE}, {"i": place}) for place in places)]
        yield from of_stages
    for axis in axes.names:
        for place in places if axis != axes.stages else ():
            for stay in [Stay({}, {}), *of_stages]:
                if place not in stay.fields.values():
                    yield Stay({**stay.at, axis: f"e * {axis} // experts"}, {**stay.fields, "e": place})


def _stay_there(stay: Stay, names: Sequence[str], models: Sequence[Model], axes: RankAxes) -> bool:
    """Return whether exactly these ranks have the parameters."""
    for config, ranks in models:
        sizes_of = {what: size_value(what, config) for what in ("layers", "experts")}
        for sizes, held in ranks.items():
            where = dict(zip(axes.names, sizes, strict=True))
            stage: Sequence[int] = ()
            if "i" in stay.fields:
                if sizes_of["layers"] is None or axes.stages is None:
                    return False
                stage = Stages.split(sizes_of["layers"], where[axes.stages], axes.extra).stage
            for name in names:
                if name not in next(one for size, one in ranks.items() if math.prod(size) == 1)[0].parameters:
                    continue
                numbers = [int(one) for one in NUMBER.findall(name)]
                fields = {field: numbers[place] for field, place in stay.fields.items()}
                if "i" in fields and fields["i"] >= len(stage):
                    return False
                if "e" in fields and (not sizes_of["experts"] or fields["e"] >= sizes_of["experts"]):
                    return False
                allowed = {
                    axis: _coordinates(value, fields, where, axis, stage, sizes_of["experts"] or 1)
                    for axis, value in stay.at.items()
                }
                for at, one in zip(itertools.product(*map(range, sizes)), held, strict=True):
                    own = dict(zip(axes.names, at, strict=True))
                    if (name in one.parameters) != all(own[axis] in places for axis, places in allowed.items()):
                        return False
    return True


def _coordinates(
    value: Any, fields: Mapping[str, int], sizes: Mapping[str, int], axis: str, stage: Sequence[int], experts: int
) -> set[int]:
    """Return the coordinates along an axis that a value of `Stay.at` stands for."""
    found = set()
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, int):
            found.add(one)
        elif one == _STAGE:
            found.add(stage[fields["i"]])
        elif one == f"{axis} - 1":
            found.add(sizes[axis] - 1)
        else:
            found.add(fields["e"] * sizes[axis] // experts)
    return found
