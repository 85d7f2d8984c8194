"""Rules learned from recordings of an engine's loader: how it names and stores a model, and each rank's parts."""

from __future__ import annotations

import io
import itertools
import json
import math
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..._arguments import check_fields, check_items
from ..._types import Numbers
from ...deploy.deployment import Deployment
from ...deploy.recording import Recording
from ...errors import LayoutError, ShardwiseError
from ...mesh import DeviceMesh
from ...rules.layout_map import LayoutMap
from ...rules.rewrites import Rewrites
from ...rules.templates import parse_template
from ...rules.toml_tables import parse_toml
from ..formats.open import open_checkpoint
from ..rewritten.names import Naming
from ..rewritten.view import rewritten_view
from .learn import learn_rewrites
from .named import numbers_for, size_value
from .relations import NUMBER
from .staged import LearnedRule, RankAxes, Stay, stays_of

__all__ = ["LearnedRules", "RecordedModel", "learn_rules"]

#: The ways in which the part of a fused dim may be cut: not, or along its first factor, where it is not too small.
_WAYS = ("@tp", "@tp/max", "")
#: Parts of a packed dim, `name:(factors)` or `name:factors`.
_PART = re.compile(r"(\w+):(?:\(([^()]*)\)|([\w*/]+))")
_PERIOD = re.compile(r"\((\S+) \[([^\]]*)\]\)")
#: The most parts of a packed dim for which all combinations of cuts are tried.
_MOST_PARTS = 4


class RecordedModel(NamedTuple):
    """A model of one size, as an engine holds it on numbers of ranks.

    Attributes:
        config: The contents of its `config.json`.
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
        compared: The number of parameters, over all models, numbers of ranks and ranks, that the rules were carried out
            for and that were equal element by element.
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
        models: Models of two or more sizes, each on one rank and on several; sizes that differ in one model should be
            different numbers in all, or one is taken for the other. The last one is not learned from: rules that do not
            hold for it are not given.
        axis: The axis of the mesh over which the ranks are; or several, the major first, whose sizes are the keys of
            `ranks`.
        stages: The one of several axes whose ranks have other layers. The rules are then a file of a deployment, which
            has the sizes of the axes as its first numbers.

    Raises:
        LayoutError: if there are fewer than two models, or one was not recorded on one rank; if the keys of `ranks` are
            not sizes of these axes, or there is another number of recordings than ranks.

    Parameters are matched with the checkpoint's tensors by their elements, as `learn_rewrites` does it; sizes get the
    names that the configuration has for them. What is printed was carried out for all models and ranks, and
    compared element by element: a parameter that does not come out right is unexplained.

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
        raise LayoutError(f"there are {len(models)} models; rules are learned from one or more, and checked on another")
    axes = RankAxes((axis,) if isinstance(axis, str) else tuple(axis), stages)
    ranks = [axes.ranks_of(f"models[{number}]", model.ranks) for number, model in enumerate(models)]
    with tempfile.TemporaryDirectory() as folder:
        whole = [
            _Whole(model.config, held, f"models[{number}]", Path(folder, str(number)))
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


class _Whole:
    """A model with numbered elements: its tensors and its parameters as two checkpoints of element numbers."""

    def __init__(
        self, config: Mapping[str, Any], ranks: Mapping[tuple[int, ...], Sequence[Recording]], name: str, folder: Path
    ) -> None:
        self.config, self.ranks, self.name = config, ranks, name
        (recording,) = next(held for sizes, held in ranks.items() if math.prod(sizes) == 1)
        self.parameters = {
            name: recording.element_numbers(name) for name, one in recording.parameters.items() if one.pieces
        }
        folder.mkdir()
        self.tensors, self.made = folder / "tensors.safetensors", folder / "parameters.safetensors"
        numbers, first = {}, 1
        for name, (shape, _) in recording.tensors.items():
            numbers[name] = np.arange(first, first + math.prod(shape)).reshape(shape)
            first += math.prod(shape)
        _write(self.tensors, numbers)
        _write(self.made, self.parameters)

    def parts(self, name: str) -> Iterator[tuple[tuple[int, ...], int, Numbers | None]]:
        """Yield sizes, rank, and the element numbers that the rank has of a parameter (`None` if it lacks it)."""
        for sizes, held in self.ranks.items():
            for rank, one in enumerate(held):
                yield sizes, rank, one.element_numbers(name) if name in one.parameters else None

    def elsewhere(self) -> Iterator[str]:
        """Yield the parameters that are missing in the recording on one rank."""
        for held in self.ranks.values():
            for one in held:
                yield from (name for name, own in one.parameters.items() if own.pieces and name not in self.parameters)


def _learned(one: _Whole, whole: Sequence[_Whole], axes: RankAxes) -> LearnedRules:
    """Return the rules made with the rewrites of one model, after comparing them with all models."""
    learned = learn_rewrites(one.tensors, one.made, config=one.config)
    parsed = parse_toml(learned.text, "the learned rules")
    head, *blocks = learned.text.split("[[rewrite]]")
    for at, rewrite in enumerate(parsed.get("rewrite", ())):
        blocks[at] = _padded_alike(blocks[at], rewrite, whole[:-1])
    unexplained = dict(learned.unexplained)
    groups: dict[str, list[str]] = {}
    for model in whole[:-1]:
        for name in model.parameters:
            group = groups.setdefault(_pattern(name), [])
            group += [] if name in group else [name]
        unexplained |= dict.fromkeys(model.elsewhere(), "only ranks of several have it")
    stays, axes = stays_of(groups, [(model.config, model.ranks) for model in whole[:-1]], axes)
    rules: dict[str, LearnedRule] = {}
    for pattern, names in groups.items():
        if all(name in unexplained for name in names):
            continue
        stay = stays[pattern]
        for entries in _candidates(one, names[0], parsed, axes) if stay is not None else ():
            assert stay is not None
            rule = stay.rule(entries)
            if all(_fits(model, names, {stay.key(pattern): rule}, axes) for model in whole[:-1]):
                rules[pattern] = rule
                break
        else:
            for name in names:
                unexplained.setdefault(name, "what its ranks have of it is no cut that a rule states")
    for name in whole[-1].parameters:
        alike = groups.get(_pattern(name), [])
        if alike and _pattern(name) not in rules:
            unexplained.setdefault(name, unexplained[alike[0]])
    drop = [line for line in head.splitlines() if line.startswith("drop =")] if not unexplained else []
    made = [_targets(rewrite["to"]) for rewrite in parsed.get("rewrite", ())]
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
        kept = [at for at, templates in enumerate(made) if not _are_made(wrong, templates)]
        blocks, made = [blocks[at] for at in kept], [made[at] for at in kept]


def _stay(stay: Stay | None) -> Stay:
    assert stay is not None  # Rules are of those that have one.
    return stay


def _numbers_of(rules: Iterable[LearnedRule], model: _Whole) -> Mapping[str, Any]:
    """Return the numbers that the packed dims and the coordinates of rules name."""
    texts = [one["packed"] for rule in rules for one in rule.entries if isinstance(one, dict)]
    return numbers_for([*texts, *(text for rule in rules for text in rule.texts())], model.config)


def _targets(side: Any) -> list[str]:
    """Return the templates of all tensors that a rewrite makes."""
    if isinstance(side, str):
        return [side]
    return [*side.get("parts", {}).values(), *([side["name"]] if "name" in side else []), *side.get("also", ())]


def _are_made(names: Iterable[str], templates: Sequence[str]) -> bool:
    """Return whether one of these names matches one of these templates."""
    each = [one for text in templates for one in parse_template(text).expanded()]
    return any(one.matched(name) is not None for one in each for name in names)


def _write(path: Path, arrays: Mapping[str, Numbers]) -> None:
    """Write arrays of numbers as a safetensors file."""
    header, end = {}, 0
    for name, array in arrays.items():
        header[name] = {"dtype": "I64", "shape": list(array.shape), "data_offsets": [end, end + 8 * array.size]}
        end += 8 * array.size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            file.write(array.astype("<i8").tobytes())


def _pattern(name: str) -> str:
    """Return the regular expression for a name in which numbers may vary."""
    parts, end = [], 0
    for number in NUMBER.finditer(name):
        parts += [re.escape(name[end : number.start()]), r"\d+"]
        end = number.end()
    return f"^{''.join(parts)}{re.escape(name[end:])}$"


def _candidates(one: _Whole, name: str, parsed: Mapping[str, Any], axes: RankAxes) -> Iterator[list[Any]]:
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


def _cut_once(one: _Whole, name: str, parsed: Mapping[str, Any], axis: str) -> Iterator[list[Any]]:
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


def _padded_alike(block: str, rewrite: Mapping[str, Any], models: Sequence[_Whole]) -> str:
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
            if _are_made([name], _targets(side))
        ):
            break
        multiple //= 2
    return block.replace(f"pad_to = {side['pad_to']}", f"pad_to = {multiple}")


def _packed_texts(name: str, parsed: Mapping[str, Any]) -> Iterator[str]:
    """Yield the packed dims of a parameter that is made of several tensors, as its rewrites state them."""
    for rewrite in parsed.get("rewrite", ()):
        side = rewrite["to"]
        if isinstance(side, dict) and "packed" in side and _are_made([name], _targets(side)):
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


def _fits(model: _Whole, names: Sequence[str], rule: Mapping[str, LearnedRule], axes: RankAxes) -> bool:
    """Return whether a rule gives each rank exactly its part of all these parameters."""
    numbers = _numbers_of(rule.values(), model)
    maps: dict[tuple[int, ...], LayoutMap | Deployment | None] = {}
    for name in names:
        if name not in model.parameters:
            continue
        for sizes, rank, held in model.parts(name):
            if sizes not in maps:
                maps[sizes] = _map_of(axes.text(sizes, (), numbers, rule), sizes, axes, model)
            if not _is_held(maps[sizes], name, model.parameters[name], rank, held):
                return False
    return True


def _map_of(text: str, sizes: tuple[int, ...], axes: RankAxes, model: _Whole) -> LayoutMap | Deployment | None:
    labels = range(math.prod(sizes))
    try:
        if axes.is_plain:
            return LayoutMap.from_toml(io.StringIO(text), DeviceMesh(sizes, axes.names, labels), config=model.config)
        return Deployment.from_toml(io.StringIO(text), config=model.config, world=labels)
    except ShardwiseError:
        return None


def _is_held(
    layouts: LayoutMap | Deployment | None, name: str, whole: Numbers, rank: int, held: Numbers | None
) -> bool:
    """Return whether a rank has exactly the part of an array that its layout says."""
    if layouts is None:
        return False
    try:
        partition = layouts.partition(name, whole.shape)
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
    model: _Whole, texts: Mapping[tuple[int, ...], str], axes: RankAxes, left: Collection[str], wrong: dict[str, str]
) -> int:
    """Carry out the rules for a model and compare all parameters of all ranks; return the number of equal ones."""
    names = [name for name in model.parameters if name not in left]
    try:
        rewrites = Rewrites.from_toml(io.StringIO(next(iter(texts.values()))), config=model.config)
        with open_checkpoint(model.tensors) as checkpoint:
            made = rewritten_view(checkpoint, Naming(rewrites=rewrites)) if rewrites else checkpoint
            arrays = {name: made[name].read() for name in names if name in made}
    except ShardwiseError as error:
        wrong |= dict.fromkeys(names, f"the rewrites do not hold for {model.name}: {error}")
        return 0
    maps = {sizes: _map_of(text, sizes, axes, model) for sizes, text in texts.items()}
    equal = 0
    for name in names:
        for sizes, rank, held in model.parts(name):
            if name not in arrays or not _is_held(maps[sizes], name, arrays[name], rank, held):
                size = sizes[0] if len(sizes) == 1 else sizes
                wrong[name] = f"rank {rank} of {size} of {model.name} has it otherwise"
                break
            equal += held is not None
    return equal
