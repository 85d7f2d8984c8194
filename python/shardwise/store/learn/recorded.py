"""Rules worked out from recordings: how an engine names and stores a model, and what each of its ranks holds."""

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
from ...deploy.recording import Recording
from ...errors import LayoutError, ShardwiseError
from ...mesh import DeviceMesh
from ...rules.layout_map import LayoutMap
from ...rules.rewrites import Rewrites
from ...rules.templates import parse_template
from ...rules.toml_tables import parse_toml
from ...rules.toml_text import key_text, value_text
from ..formats.open import open_checkpoint
from ..rewritten.names import Naming
from ..rewritten.view import rewritten_view
from .learn import learn_rewrites
from .named import numbers_for, size_value
from .relations import NUMBER

__all__ = ["LearnedRules", "RecordedModel", "learn_rules"]

#: The ways in which the part of a fused dim may be cut: not, or along its first factor, where it is not too small.
_WAYS = ("@tp", "@tp/max", "")
#: Parts of a packed dim, `name:(factors)` or `name:factors`.
_PART = re.compile(r"(\w+):(?:\(([^()]*)\)|([\w*/]+))")
_PERIOD = re.compile(r"\((\S+) \[([^\]]*)\]\)")
#: The most parts whose ways are tried in all combinations.
_MOST_PARTS = 4


class RecordedModel(NamedTuple):
    """A model of one size, as an engine holds it on numbers of ranks.

    Attributes:
        config: What its `config.json` holds.
        ranks: By the number of ranks, the recording of each of them in order; that of one rank must be there.
    """

    config: Mapping[str, Any]
    ranks: Mapping[int, Sequence[Recording]]


@dataclass(frozen=True)
class LearnedRules:
    """The rules of an engine for a family of models.

    Attributes:
        text: A rules file: rewrites from the checkpoint to the engine's parameters, and how these are cut.
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


def learn_rules(models: Sequence[RecordedModel], axis: str = "tp") -> LearnedRules:
    r"""Work out a rules file from what an engine's own loader did, recorded for models of a family.

    Args:
        models: Models of two or more sizes, each on one rank and on several; sizes that differ in one model should be
            different numbers in all, or one is taken for the other. The last one is not learned from: rules that do not
            hold for it are not given.
        axis: The axis of the mesh over which the ranks are.

    Raises:
        LayoutError: if there are fewer than two models, or one was not recorded on one rank.

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
    for model in models:
        if not model.ranks.get(1):
            raise LayoutError("each model must be recorded on one rank too: what its parameters are as a whole")
    with tempfile.TemporaryDirectory() as folder:
        whole = [_Whole(model, f"models[{number}]", Path(folder, str(number))) for number, model in enumerate(models)]
        best: LearnedRules | None = None
        for one in whole[:-1]:
            found = _learned(one, whole, axis)
            if best is None or (len(found.unexplained), -found.compared) < (len(best.unexplained), -best.compared):
                best = found
            if not best.unexplained:
                break
    assert best is not None
    return best


class _Whole:
    """A model with its elements: its tensors and its parameters as two checkpoints of element numbers."""

    def __init__(self, model: RecordedModel, name: str, folder: Path) -> None:
        self.config, self.ranks, self.name = model.config, model.ranks, name
        (recording,) = model.ranks[1]
        self.recording = recording
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

    def part(self, size: int, rank: int, name: str) -> Numbers | None:
        """The element numbers of a parameter of a rank; `None` if it has none of this name, or computes it."""
        recording = self.ranks[size][rank]
        there = name in recording.parameters and name not in recording.computed
        return recording.element_numbers(name) if there else None

    def parts(self, name: str) -> Iterator[tuple[int, int, Numbers | None]]:
        for size in self.ranks:
            for rank in range(len(self.ranks[size])):
                yield size, rank, self.part(size, rank, name)


def _learned(one: _Whole, whole: Sequence[_Whole], axis: str) -> LearnedRules:
    """The rules with the rewrites of one model, compared with all."""
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
    rules: dict[str, list[Any]] = {}
    for pattern, names in groups.items():
        if all(name in unexplained for name in names):
            continue
        for entries in _candidates(one, names[0], parsed, axis):
            if all(_fits(model, names, entries, axis) for model in whole[:-1]):
                rules[pattern] = entries
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
        numbers = {**_numbers_of(rules.values(), one), **parsed.get("numbers", {})}
        text = _text(drop, numbers, rules, blocks)
        wrong: dict[str, str] = {}
        compared = sum(_compared(model, text, axis, unexplained.keys(), wrong) for model in whole)
        unexplained |= wrong
        if not wrong:
            return LearnedRules(text, unexplained, learned.unused, compared)
        # What does not hold is not printed.
        drop = []
        rules = {pattern: entries for pattern, entries in rules.items() if not wrong.keys() & {*groups[pattern]}}
        kept = [at for at, templates in enumerate(made) if not _are_made(wrong, templates)]
        blocks, made = [blocks[at] for at in kept], [made[at] for at in kept]


def _numbers_of(rules: Iterable[Sequence[Any]], model: _Whole) -> Mapping[str, Any]:
    """The numbers that the packed dims of rules name."""
    return numbers_for([one["packed"] for entries in rules for one in entries if isinstance(one, dict)], model.config)


def _text(
    head: Sequence[str], numbers: Mapping[str, Any], rules: Mapping[str, Sequence[Any]], rewrites: Sequence[str] = ()
) -> str:
    """A rules file, whose rewrites are texts already."""
    lines = [*head, ""] if head else []
    if numbers:
        lines += ["[numbers]", *(f"{name} = {value_text(given)}" for name, given in numbers.items()), ""]
    lines += ["[rules]", *(f"{key_text(name)} = {value_text(list(entries))}" for name, entries in rules.items()), ""]
    return "\n".join(lines) + "".join(f"\n[[rewrite]]{block.rstrip()}\n" for block in rewrites)


def _targets(side: Any) -> list[str]:
    """The templates of all tensors that a rewrite makes."""
    if isinstance(side, str):
        return [side]
    return [*side.get("parts", {}).values(), *([side["name"]] if "name" in side else []), *side.get("also", ())]


def _are_made(names: Iterable[str], templates: Sequence[str]) -> bool:
    """Return whether one of these names is one of these templates'."""
    each = [one for text in templates for one in parse_template(text).expanded()]
    return any(one.matched(name) is not None for one in each for name in names)


def _write(path: Path, arrays: Mapping[str, Numbers]) -> None:
    """Write numbers as a file of safetensors."""
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
    """The expression of names that differ in numbers only."""
    parts, end = [], 0
    for number in NUMBER.finditer(name):
        parts += [re.escape(name[end : number.start()]), r"\d+"]
        end = number.end()
    return f"^{''.join(parts)}{re.escape(name[end:])}$"


def _candidates(one: _Whole, name: str, parsed: Mapping[str, Any], axis: str) -> Iterator[list[Any]]:
    """The entries of rules for a parameter that may hold, the plainest first."""
    shape = one.parameters[name].shape
    yield [[] for _ in shape]
    texts = [text for text in _packed_texts(name, parsed) for text in _ways(text, axis)]
    for dim in range(len(shape)):
        entries: list[list[Any]] = [[] for _ in shape]
        yield [*entries[:dim], axis, *entries[dim + 1 :]]
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
    """A rewrite with the largest multiple to which all models pad; one alone says less than several."""
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
    """The parts of a parameter that is made of several tensors, as its rewrite has them."""
    for rewrite in parsed.get("rewrite", ()):
        side = rewrite["to"]
        if isinstance(side, dict) and "packed" in side and _are_made([name], _targets(side)):
            yield side["packed"]


def _ways(text: str, axis: str) -> Iterator[str]:
    """A packed dim with its parts cut in all ways, or the groups of a period cut."""
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


def _fits(model: _Whole, names: Sequence[str], entries: Sequence[Any], axis: str) -> bool:
    """Return whether a rule gives each rank what it has of all these parameters."""
    text = _text((), _numbers_of([entries], model), {"x": entries})
    maps = {size: _map_of(text, size, axis, model) for size in model.ranks}
    for name in names:
        if name not in model.parameters:
            continue
        for size, rank, held in model.parts(name):
            if held is None or not _is_held(maps[size], "x", model.parameters[name], rank, held):
                return False
    return True


def _map_of(text: str, size: int, axis: str, model: _Whole) -> LayoutMap | None:
    try:
        return LayoutMap.from_toml(io.StringIO(text), DeviceMesh((size,), (axis,), range(size)), config=model.config)
    except ShardwiseError:
        return None


def _is_held(layouts: LayoutMap | None, name: str, whole: Numbers, rank: int, held: Numbers) -> bool:
    """Return whether a rank has of an array what its layout says."""
    if layouts is None:
        return False
    try:
        partition = layouts.partition(name, whole.shape)
        own = np.zeros(partition.holder_shape(rank), np.int64)
        if own.shape != held.shape:
            return False
        for piece in partition.pieces(rank):
            piece.view(own)[...] = whole[piece.box]
    except ShardwiseError:
        return False
    return bool(np.array_equal(own, held))


def _compared(model: _Whole, text: str, axis: str, left: Collection[str], wrong: dict[str, str]) -> int:
    """Carry out the rules for a model and compare all parameters of all ranks; the number of those that are equal."""
    names = [name for name in model.parameters if name not in left]
    try:
        rewrites = Rewrites.from_toml(io.StringIO(text), config=model.config)
        with open_checkpoint(model.tensors) as checkpoint:
            made = rewritten_view(checkpoint, Naming(rewrites=rewrites)) if rewrites else checkpoint
            arrays = {name: made[name].read() for name in names if name in made}
    except ShardwiseError as error:
        wrong |= dict.fromkeys(names, f"the rewrites do not hold for {model.name}: {error}")
        return 0
    maps = {size: _map_of(text, size, axis, model) for size in model.ranks}
    equal = 0
    for name in names:
        for size, rank, held in model.parts(name):
            if held is None or name not in arrays or not _is_held(maps[size], name, arrays[name], rank, held):
                wrong[name] = f"rank {rank} of {size} of {model.name} has it otherwise"
                break
            equal += 1
    return equal
