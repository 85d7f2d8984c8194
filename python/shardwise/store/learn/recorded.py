"""Rules learned from recordings of an engine's loader: how it names and stores a model, and each rank's parts."""

from __future__ import annotations

import io
import math
import re
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..._arguments import check_fields, check_items
from ..._types import Numbers
from ...deploy.read import layouts_of
from ...deploy.recording import Recording
from ...errors import LayoutError, ShardwiseError
from ...mesh import DeviceMesh
from ...placing import Placing, partition_of
from ...rules.rewrites import Rewrites
from ...rules.toml import read_document
from ...rules.toml_tables import parse_toml
from ..formats.open import open_checkpoint
from ..rewritten.names import Naming
from ..rewritten.view import rewritten_view
from .candidates import are_made, candidates, padded_alike, targets_of
from .learn import learn_rewrites
from .named import numbers_for
from .numbered import NumberedModel
from .relations import NUMBER
from .staged import LearnedRule, RankAxes, Stay, stays_of

__all__ = ["LearnedRules", "RecordedModel", "learn_rules"]


class RecordedModel(NamedTuple):
    """A model of one size, as an engine holds it on several numbers of ranks.

    Attributes:
        config: The contents of the model's `config.json`.
        ranks: By the number of ranks, or by the sizes of several axes, the recording of each rank in row-major order;
            the recording on one rank must be included.
    """

    config: Mapping[str, Any]
    ranks: Mapping[int, Sequence[Recording]] | Mapping[tuple[int, ...], Sequence[Recording]]


@dataclass(frozen=True)
class LearnedRules:
    """The rules of an engine for a family of models.

    Attributes:
        text: A rules file: rewrites from the checkpoint to the engine's parameters, and the cuts of the parameters.
        unexplained: Parameters that no rule makes, each with the reason.
        unused: Tensors that are in no parameter; the rules drop them.
        compared: The number of parameters, over all models and ranks, for which the rules gave the recorded elements.
    """

    text: str
    unexplained: Mapping[str, str]
    unused: tuple[str, ...]
    compared: int

    def __post_init__(self) -> None:
        check_fields(self, text=str, unexplained=Mapping, unused=tuple, compared=int)


def learn_rules(
    models: Sequence[RecordedModel], axis: str | Sequence[str] = "tp", *, stages: str | None = None
) -> LearnedRules:
    r"""Work out a rules file from what an engine's own loader did, recorded for models of a family.

    Args:
        models: Models of two or more sizes, each on one rank and on several; sizes with different meanings should be
            different numbers in every model, or one is taken for the other. The last model only checks: rules that do
            not hold for it are not returned.
        axis: The axis of the mesh over which the ranks are; or several, the major first, whose sizes are the keys of
            `ranks`.
        stages: The one of several axes whose ranks have different layers. The rules are then a file of a deployment,
            which has the sizes of the axes as its first numbers.

    Raises:
        LayoutError: if there are fewer than two models, or one was not recorded on one rank; if the keys of `ranks` are
            not sizes of these axes, or there is another number of recordings than ranks.

    Parameters are matched with the checkpoint's tensors by their elements, as `learn_rewrites` does it; sizes get the
    names that the configuration has for them. All that the file says was carried out for all models and ranks,
    and compared element by element: a parameter of which an element differs is unexplained.

    >>> import shardwise as sw
    >>> def recorded(inner):  # an engine that fuses two tensors, and cuts each
    ...     shapes = {name: ((inner, 4), "float32") for name in ("h.0.gate", "h.0.up")}
    ...     def load(tensors, rank, ranks):
    ...         return {"h.0.gate_up": np.concatenate([np.split(one, ranks)[rank] for one in tensors.values()])}
    ...     ranks = {
    ...         count: [sw.record(shapes, lambda given: load(given, rank, count), rank) for rank in range(count)]
    ...         for count in (1, 2)
    ...     }
    ...     return RecordedModel({"intermediate_size": inner, "hidden_size": 4}, ranks)
    >>> print(learn_rules([recorded(6), recorded(10)]).text)
    [numbers]
    inner = "intermediate_size"
    <BLANKLINE>
    [rules]
    '^h\.\d+\.gate_up$' = [{ packed = "gate:(inner@tp) + up:(inner@tp)" }, []]
    <BLANKLINE>
    [[rewrite]]
    from = { parts = { gate = "h.{i}.gate", up = "h.{i}.up" } }
    to = { name = "h.{i}.gate_up", packed = "gate:(inner) + up:(inner)" }
    <BLANKLINE>
    """
    check_items("models", models, RecordedModel)
    if len(models) < 2:
        raise LayoutError(f"models has {len(models)}; rules are learned from one or more, and checked on another")
    axes = RankAxes((axis,) if isinstance(axis, str) else tuple(axis), stages)
    ranks = [axes.ranks_of(f"models[{number}]", model.ranks) for number, model in enumerate(models)]
    with tempfile.TemporaryDirectory() as folder:
        whole = [
            NumberedModel(model.config, held, f"models[{number}]", Path(folder, str(number)))
            for number, (model, held) in enumerate(zip(models, ranks, strict=True))
        ]
        best: LearnedRules | None = None
        for one in whole[:-1]:
            found = _learned(one, whole, axes)
            if best is None or (len(found.unexplained), -found.compared) < (len(best.unexplained), -best.compared):
                best = found
            if not best.unexplained:
                break
    assert best is not None
    return best


def _learned(one: NumberedModel, whole: Sequence[NumberedModel], axes: RankAxes) -> LearnedRules:
    """Return the rules made with the rewrites of one model, after comparing them with all models."""
    learned = learn_rewrites(one.tensors_file, one.parameters_file, config=one.config)
    parsed = parse_toml(learned.text, "the learned rules")
    head, *blocks = learned.text.split("[[rewrite]]")
    for at, rewrite in enumerate(parsed.get("rewrite", ())):
        blocks[at] = padded_alike(blocks[at], rewrite, whole[:-1])
    unexplained = dict(learned.unexplained)
    groups: dict[str, list[str]] = {}
    for model in whole[:-1]:
        for name in model.parameters:
            group = groups.setdefault(_pattern(name), [])
            group += [] if name in group else [name]
        unexplained |= dict.fromkeys(model.elsewhere(), "it exists only on several ranks")
    stays, axes = stays_of(groups, [(model.config, model.ranks) for model in whole[:-1]], axes)
    rules: dict[str, LearnedRule] = {}
    for pattern, names in groups.items():
        if all(name in unexplained for name in names):
            continue
        stay, known = stays[pattern], next((name for name in names if name in one.parameters), None)
        if known is None:
            for name in names:
                unexplained.setdefault(name, _without_rule(name, f"{one.name} lacks it"))
            continue
        for entries in candidates(one, known, parsed, axes) if stay is not None else ():
            assert stay is not None
            rule = stay.rule(entries)
            if all(_fits(model, names, {stay.key(pattern): rule}, axes) for model in whole[:-1]):
                rules[pattern] = rule
                break
        else:
            for name in names:
                unexplained.setdefault(name, "its ranks hold it in a way that no rule can state")
    for name in whole[-1].parameters:
        alike = groups.get(_pattern(name), [])
        if not alike:
            unexplained.setdefault(
                name, _without_rule(name, f"only {whole[-1].name} has it, and nothing is learned from that model")
            )
        elif _pattern(name) not in rules:
            unexplained.setdefault(name, unexplained[alike[0]])
    drop = [line for line in head.splitlines() if line.startswith("drop =")] if not unexplained else []
    made = [targets_of(rewrite["to"]) for rewrite in parsed.get("rewrite", ())]
    while True:
        keyed = {_stay(stays[pattern]).key(pattern): rule for pattern, rule in rules.items()}
        numbers = {**_numbers_of(keyed.values(), one), **parsed.get("numbers", {})}
        wrong: dict[str, str] = {}
        compared = 0
        for model in whole:
            texts = {sizes: axes.text(sizes, drop, numbers, keyed, blocks) for sizes in model.ranks}
            compared += _compared(model, texts, axes, unexplained.keys(), wrong)
        unexplained |= wrong
        if not wrong:
            text = axes.text(max(one.ranks, key=math.prod), drop, numbers, keyed, blocks)
            return LearnedRules(text, unexplained, learned.unused, compared)
        # What does not hold is not printed.
        drop = []
        rules = {pattern: rule for pattern, rule in rules.items() if not wrong.keys() & {*groups[pattern]}}
        kept = [at for at, templates in enumerate(made) if not are_made(wrong, templates)]
        blocks, made = [blocks[at] for at in kept], [made[at] for at in kept]


def _stay(stay: Stay | None) -> Stay:
    assert stay is not None  # Rules are of those that have one.
    return stay


def _numbers_of(rules: Iterable[LearnedRule], model: NumberedModel) -> Mapping[str, Any]:
    """Return the numbers that the packed dims and the coordinates of rules name."""
    texts = [one["packed"] for rule in rules for one in rule.entries if isinstance(one, dict)]
    return numbers_for([*texts, *(text for rule in rules for text in rule.texts())], model.config)


def _pattern(name: str) -> str:
    """Return the regular expression for a name in which numbers may vary."""
    parts, end = [], 0
    for number in NUMBER.finditer(name):
        parts += [re.escape(name[end : number.start()]), r"\d+"]
        end = number.end()
    return f"^{''.join(parts)}{re.escape(name[end:])}$"


def _without_rule(name: str, why: str) -> str:
    """Return why a parameter has no rule; if a number is part of a word, with the form that rules have fields for."""
    if not re.search("[0-9]", NUMBER.sub("", name)):
        return why
    return f"{why}; if its number is a layer's or an expert's, it must stand alone between dots, as in 'layers.0.w'"


def _fits(model: NumberedModel, names: Sequence[str], rule: Mapping[str, LearnedRule], axes: RankAxes) -> bool:
    """Return whether a rule gives each rank exactly its part of all these parameters."""
    numbers = _numbers_of(rule.values(), model)
    placings: dict[tuple[int, ...], Placing | None] = {}
    for name in names:
        if name not in model.parameters:
            continue
        for sizes, rank, held in model.parts(name):
            if sizes not in placings:
                placings[sizes] = _placing(axes.text(sizes, (), numbers, rule), sizes, axes, model)
            if not _is_held(placings[sizes], name, model.parameters[name], rank, held):
                return False
    return True


def _placing(text: str, sizes: tuple[int, ...], axes: RankAxes, model: NumberedModel) -> Placing | None:
    """Return the layouts of a rules file over ranks, which are the labels; `None` if it does not hold for the model."""
    ranks = range(math.prod(sizes))
    try:
        mesh = DeviceMesh(sizes, axes.names, ranks) if axes.is_plain else None
        return layouts_of(read_document(io.StringIO(text)), mesh, model.config, ranks)
    except ShardwiseError:
        return None


def _is_held(layouts: Placing | None, name: str, whole: Numbers, rank: int, held: Numbers | None) -> bool:
    """Return whether a rank has exactly the part of an array that its layout says."""
    if layouts is None:
        return False
    try:
        partition = partition_of(layouts, name, whole.shape, "even")
        if partition is None:
            return False
        if held is None or rank not in partition.holders:
            return held is None and rank not in partition.holders
        own = np.zeros(partition.holder_shape(rank), np.int64)
        if own.shape != held.shape:
            return False
        for piece in partition.pieces(rank):
            piece.view(own)[...] = whole[piece.box]
    except ShardwiseError:
        return False
    return bool(np.array_equal(own, held))


def _compared(
    model: NumberedModel,
    texts: Mapping[tuple[int, ...], str],
    axes: RankAxes,
    left: Collection[str],
    wrong: dict[str, str],
) -> int:
    """Carry out the rules for a model and compare all parameters of all ranks; return the number of equal ones."""
    names = [name for name in model.parameters if name not in left]
    try:
        rewrites = Rewrites.from_toml(io.StringIO(next(iter(texts.values()))), config=model.config)
        with open_checkpoint(model.tensors_file) as checkpoint:
            made = rewritten_view(checkpoint, Naming(rewrites=rewrites)) if rewrites else checkpoint
            arrays = {name: made[name].read() for name in names if name in made}
    except ShardwiseError as error:
        wrong |= dict.fromkeys(names, f"the rewrites do not hold for {model.name}: {error}")
        return 0
    placings = {sizes: _placing(text, sizes, axes, model) for sizes, text in texts.items()}
    equal = 0
    for name in names:
        if name not in arrays:
            wrong[name] = f"no rewrite makes it for {model.name}"
            continue
        for sizes, rank, held in model.parts(name):
            if not _is_held(placings[sizes], name, arrays[name], rank, held):
                size = sizes[0] if len(sizes) == 1 else sizes
                wrong[name] = f"rank {rank} of {size} of {model.name} has it differently"
                break
            equal += held is not None
    return equal
