"""Entries of rules that may hold for a parameter, the simplest first."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ...rules.templates import parse_template
from .named import size_value
from .numbered import NumberedModel
from .staged import RankAxes

__all__ = ["are_made", "candidates", "padded_alike", "targets_of"]

#: The ways in which the part of a fused dim may be cut: not, or along its first factor, where it is not too small.
_WAYS = ("@tp", "@tp/max", "")
#: Parts of a packed dim, `name:(factors)` or `name:factors`.
_PART = re.compile(r"(\w+):(?:\(([^()]*)\)|([\w*/]+))")
_PERIOD = re.compile(r"\((\S+) \[([^\]]*)\]\)")
#: The most parts of a packed dim for which all combinations of cuts are tried.
_MOST_PARTS = 4


def targets_of(side: Any) -> list[str]:
    """Return the templates of all tensors that a rewrite makes."""
    if isinstance(side, str):
        return [side]
    return [*side.get("parts", {}).values(), *([side["name"]] if "name" in side else []), *side.get("also", ())]


def are_made(names: Iterable[str], templates: Sequence[str]) -> bool:
    """Return whether one of these names matches one of these templates."""
    each = [one for text in templates for one in parse_template(text).expanded()]
    return any(one.matched(name) is not None for one in each for name in names)


def candidates(one: NumberedModel, name: str, parsed: Mapping[str, Any], axes: RankAxes) -> Iterator[list[Any]]:
    """Yield entries of rules that may hold for a parameter, the simplest first."""
    shape = one.parameters[name].shape
    yield [[] for _ in shape]
    for spec in axes.specs:
        yield from _cut_once(one, name, parsed, spec)
    for first, second in itertools.permutations(axes.specs, 2):
        # Whole experts by one axis, and their features by another.
        if len(shape) > 1 and not {*first.split("+")} & {*second.split("+")}:
            for entries in _cut_once(one, name, parsed, second):
                if entries[0] == []:
                    yield [first, *entries[1:]]


def _cut_once(one: NumberedModel, name: str, parsed: Mapping[str, Any], axis: str) -> Iterator[list[Any]]:
    """Yield entries that cut one dim; several axes are joined by `+`."""
    shape = one.parameters[name].shape
    texts = [text for text in _packed_texts(name, parsed) for text in _ways(text, axis)]
    for dim in range(len(shape)):
        entries: list[list[Any]] = [[] for _ in shape]
        yield [*entries[:dim], axis.split("+") if "+" in axis else axis, *entries[dim + 1 :]]
    for dim, size in enumerate(shape):
        named = [
            f"({first}@{axis}{way} d)"
            for first in ("groups", "heads")
            for way in ("/max", "")
            if size_value(f"{first}*d", one.config) == size
        ]
        alone = [f"(groups@{axis}/max)"] if size_value("groups", one.config) == size else []
        halves = [f"(n@{axis}/ceil) + (n@{axis}/ceil)", f"(n@{axis}/ceil)", f"(n@{axis}/pad64)"]
        for text in [*texts, *named, *alone, *halves]:
            entries = [[] for _ in shape]
            yield [*entries[:dim], {"packed": text}, *entries[dim + 1 :]]


def padded_alike(block: str, rewrite: Mapping[str, Any], models: Sequence[NumberedModel]) -> str:
    """Return a rewrite whose dim is padded to the largest multiple that fits all models."""
    side, size = rewrite["to"], rewrite.get("size")
    if not isinstance(side, dict) or not isinstance(size, str) or "pad_to" not in side:
        return block
    multiple = side["pad_to"]
    while multiple > 1 and multiple % 2 == 0:
        sizes = [(model, size_value(size, model.config)) for model in models]
        if all(
            value is None or model.parameters[name].shape[side.get("dim", 0)] == -(-value // multiple) * multiple
            for model, value in sizes
            for name in model.parameters
            if are_made([name], targets_of(side))
        ):
            break
        multiple //= 2
    return block.replace(f"pad_to = {side['pad_to']}", f"pad_to = {multiple}")


def _packed_texts(name: str, parsed: Mapping[str, Any]) -> Iterator[str]:
    """Yield the packed dims of a parameter that is made of several tensors, as its rewrites state them."""
    for rewrite in parsed.get("rewrite", ()):
        side = rewrite["to"]
        if isinstance(side, dict) and "packed" in side and are_made([name], targets_of(side)):
            yield side["packed"]


def _ways(text: str, axis: str) -> Iterator[str]:
    """Yield a packed dim with its parts cut in all ways, or with the groups of a period cut."""
    period = _PERIOD.fullmatch(text)
    if period is not None:
        yield f"({period[1]}@{axis} [{period[2]}])"
        return
    parts = [(found[1], (found[2] or found[3]).split("*")) for found in _PART.finditer(text)]
    if not parts or len(parts) > _MOST_PARTS:
        return
    for ways in itertools.product([way.replace("@tp", f"@{axis}") for way in _WAYS], repeat=len(parts)):
        yield " + ".join(
            f"{part}:({' '.join([factors[0] + way, *factors[1:]])})"
            for (part, factors), way in zip(parts, ways, strict=True)
        )
