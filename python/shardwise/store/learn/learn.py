"""The rewrites that lead from one checkpoint to another of the same model, found by comparing their elements."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..._arguments import check_fields
from ..._text import shown
from ...errors import LayoutError
from ...rules.numbers import Config, read_config
from ...rules.rewrites import Rewrites
from ...rules.templates import parse_template
from ..data.engine import check_job_memory, check_threads
from ..data.location import Location
from ..formats.open import open_checkpoint
from ..rewritten.names import Naming
from ..rewritten.view import rewritten_view
from ..tensors.checkpoint import StoredCheckpoint
from ..tensors.digests import tensor_digests
from ..tensors.model_config import config_of
from ..tensors.stored import StoredTensor
from .dims import FIBER, IrregularError, Relation
from .entries import Directed, Printed, dropped_templates, joined_entries, rewrite_entries, rules_text
from .fibers import Fibers, fibers_of, find_match, unseen
from .named import with_sizes_named
from .relations import NUMBER, related

__all__ = ["Learned", "learn_rewrites"]

_MEMORY = 256 * 2**20
_WEIGHT, _BIAS = ".weight", ".bias"
_NOT_FOUND = "its rows are not rows of tensors of the first checkpoint"


@dataclass(frozen=True)
class Learned:
    """The rewrites that lead from one checkpoint to another.

    Attributes:
        text: A rules file, in TOML; each of its rewrites was carried out, and the result compared.
        unexplained: The tensors of the second checkpoint that no rewrite makes, each with the reason.
        unused: The tensors of the first checkpoint that are in no tensor of the second; the rules drop them, unless
            tensors are unexplained.
        doubtful: The tensors of the second for which several tensors of the first, with equal elements, are possible;
            the one with the most similar name was taken.
    """

    text: str
    rewrites: Rewrites
    unexplained: Mapping[str, str]
    unused: tuple[str, ...]
    doubtful: tuple[str, ...]

    def __post_init__(self) -> None:
        check_fields(self, text=str, rewrites=Rewrites, unexplained=Mapping, unused=tuple, doubtful=tuple)


def learn_rewrites(
    first: str | os.PathLike[str] | Location,
    second: str | os.PathLike[str] | Location,
    *,
    memory: int = _MEMORY,
    threads: int | None = None,
    config: Config | None = None,
) -> Learned:
    """Work out the rewrites that lead from one checkpoint to another of the same model.

    Args:
        first: A checkpoint of any format, also by URL.
        second: The same model as another engine names and stores it.
        memory: Bytes for the buffers of all threads. Besides these, some 60 bytes are needed for each row and column of
            both checkpoints. If a stack has so many rows along a short dim that they alone need more than `memory`,
            its other dims are searched instead.
        threads: The number of threads; one per core if left out.
        config: The model's configuration: a size that it has a name for is written as one of the file's `[numbers]`. By
            default the `config.json` in the folder of `first`.

    Raises:
        ParseError, OSError: as for `open_checkpoint`, and if the configuration cannot be read.
        LayoutError: if the memory is too little.

    Tensors are matched by a few elements of their rows and columns. So names, stacks, the order of what is packed,
    transpositions, dims that are split, merged and permuted, zigzag order and padding are found, whatever the names
    are. Then the rewrites are carried out, and all elements are compared: a tensor of which an element differs is
    unexplained. A tensor that is made differently from those of the same kind in other layers is unexplained too,
    because that is a mistake in the conversion.

    >>> import tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> from shardwise import save_checkpoint
    >>> q, k = np.random.default_rng(0).random((2, 4, 3))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name, tensors in (("a", {"h.0.q": q, "h.0.k": k}), ("b", {"layers.0.qk": np.concatenate([q, k])})):
    ...         _ = save_checkpoint(Path(folder, f"{name}.safetensors"), tensors)
    ...     print(learn_rewrites(Path(folder, "a.safetensors"), Path(folder, "b.safetensors")).text)
    [[rewrite]]
    from = { parts = { q = "h.{i}.q", k = "h.{i}.k" } }
    to = { name = "layers.{i}.qk", packed = "q:(4) + k:(4)" }
    <BLANKLINE>
    """
    check_job_memory(memory)
    check_threads(threads)
    with open_checkpoint(first) as one, open_checkpoint(second) as other:
        count = (os.cpu_count() or 1) if threads is None else threads
        here, there = fibers_of(one, other, memory, count), fibers_of(other, one, memory, count)
        unexplained: dict[str, str] = {}
        doubtful: set[str] = set()
        relations = _relations(here, there, unexplained, doubtful)
        entries, unused = _checked(relations, unexplained, here)
        compared = _Compared(one, other, memory, threads)
        found, printed = _verified(compared, entries, _Unsettled(unused, unexplained, doubtful))
        return _with_names(found, printed, config_of(one.given) if config is None else read_config(config))


class _Compared(NamedTuple):
    """The two checkpoints, with the memory and threads for comparing them."""

    one: StoredCheckpoint
    other: StoredCheckpoint
    memory: int
    threads: int | None


class _Unsettled(NamedTuple):
    """The tensors that `Learned` lists besides the rewrites; carrying out rewrites may add unexplained ones."""

    unused: tuple[str, ...]
    unexplained: dict[str, str]
    doubtful: set[str]


def _relations(here: Fibers, there: Fibers, unexplained: dict[str, str], doubtful: set[str]) -> list[Directed]:
    """Find the relations by which tensors of the second checkpoint are made of the first's, or the reverse."""
    found: list[Directed] = []
    back: dict[int, None] = {}
    why: dict[str, str] = {}
    numbers = {name: number for number, name in enumerate(here.names)}
    for number, name in enumerate(there.names):
        reason = unseen(there.tensors[number])
        if reason and name in numbers and _are_alike(there.tensors[number], here.tensors[numbers[name]]):
            found.append(Directed(Relation(name, {"": name}, (), frozenset([name])), is_back=False))
            continue
        match = find_match(number, there, here)
        if match is None:
            why[name] = f"{reason}, and the first checkpoint has no equal tensor of that name" if reason else _NOT_FOUND
            continue
        if not match.is_sure:
            doubtful.add(name)
        try:
            found.append(Directed(related(number, match, there, here), is_back=False))
        except IrregularError as error:
            why[name] = str(error)
            back |= dict.fromkeys(int(one) for one in set(match.tensor.reshape(-1).tolist()) if one >= 0)
    used = {name for one in found for name in one.sources}
    back |= dict.fromkeys(number for name, number in numbers.items() if name not in used)
    explained = {name for one in found for name in one.targets}
    for number in back if why else ():
        match = find_match(number, here, there)
        if match is None:
            continue
        try:
            made = Directed(related(number, match, here, there), is_back=True)
        except IrregularError:
            continue
        if not made.targets & explained:
            found.append(made)
            explained |= made.targets
    missing = why.keys() - explained
    for made in [*found] if missing else ():
        sibling = _sibling(made)
        if sibling is not None and sibling.targets <= missing and sibling.sources <= numbers.keys():
            found.append(sibling)
            missing -= sibling.targets
    unexplained |= {name: reason for name, reason in why.items() if name in missing}
    return found


def _are_alike(one: StoredTensor, other: StoredTensor) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape)


def _sibling(made: Directed) -> Directed | None:
    """Return the relation of a bias, made like the weight next to it: its elements may be too common to be found."""
    one = made.relation
    if not all(name.endswith(_WEIGHT) for name in (one.target, *one.used)):
        return None

    def bias(name: str) -> str:
        return name.removesuffix(_WEIGHT) + _BIAS

    # A bias has one dim, next to those that are stacked.
    side, own = (
        {key: value for key, value in each.items() if key not in ("transpose", "dim")} for each in (one.side, one.own)
    )
    if "dims" in side:  # Without the dim along which fibers lie.
        side["dims"] = " -> ".join(" ".join(FIBER.split(half)).strip() for half in side["dims"].split(" -> "))
    parts = {part: bias(name) for part, name in one.parts.items()}
    relation = Relation(bias(one.target), parts, one.stack, frozenset(map(bias, one.used)), side, own, one.size)
    return Directed(relation, made.is_back)


def _checked(
    relations: list[Directed], unexplained: dict[str, str], here: Fibers
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Return the entries of the rewrites, without tensors that are made unlike their siblings; and the unused names."""
    alike: dict[tuple[Any, ...], list[Directed]] = {}
    for made in relations:
        skeletons = tuple(NUMBER.sub("#", name) for name in made.named())
        alike.setdefault((tuple(sorted(skeletons)), NUMBER.sub("#", made.relation.target), made.is_back), []).append(
            made
        )
    taken: dict[str, set[str]] = {}
    for made in relations:
        for name in made.sources:
            taken.setdefault(NUMBER.sub("#", name), set()).add(name)
    entries: list[dict[str, Any]] = []
    for group in alike.values():
        kinds: dict[str, list[Directed]] = {}
        for made in group:
            kinds.setdefault(made.relation.kind, []).append(made)
        if len(kinds) > 1:
            usual = max(kinds.values(), key=len)
            for those in kinds.values():
                for made in those if those is not usual or 2 * len(usual) <= len(group) else ():
                    reason = f"{len(usual)} of its kind are made differently, such as {shown(usual[0].relation.target)}"
                    for name in made.targets:
                        unexplained[name] = reason
            group = usual if 2 * len(usual) > len(group) else []
        exact: dict[str, list[Directed]] = {}
        for made in group:
            relation = made.relation
            said = repr((list(relation.parts), relation.stack, relation.side, relation.own, relation.size))
            exact.setdefault(said, []).append(made)
        # A template of their numbers would match what others take too, as where two tensors of one layer are exchanged.
        sources = {name for made in group for name in made.sources}
        is_alone = all(taken[NUMBER.sub("#", name)] <= sources for name in sources)
        for those in exact.values():
            entries += rewrite_entries(those, is_general=len(exact) == 1 and is_alone)
    used = {name for made in relations for name in made.sources}
    return joined_entries(entries), tuple(name for name in here.names if name not in used)


def _verified(compared: _Compared, entries: list[dict[str, Any]], rest: _Unsettled) -> tuple[Learned, Printed]:
    """Return the rewrites as a file, after carrying them out and comparing the results; and their sources."""
    (one, other, memory, threads), (unused, unexplained, doubtful) = compared, rest
    drop = [] if unexplained else dropped_templates(unused, one.keys() - {*unused})
    error: LayoutError | None = None
    for in_two_steps in (False, True):
        text = rules_text(entries, drop, in_two_steps=in_two_steps)
        try:
            rewrites = Rewrites.from_toml(io.StringIO(text))
            made = rewritten_view(one, Naming(rewrites=rewrites)) if rewrites else one
            break
        except LayoutError as caught:
            error = caught
    else:
        why = f"the rewrites do not go together: {error}"
        return Learned("", Rewrites(), {name: unexplained.get(name, why) for name in other}, unused, ()), (
            [],
            [],
            False,
        )
    wanted = [name for name in other if name not in unexplained]
    for name in wanted:
        if name not in made or not _are_alike(made[name], other[name]):
            unexplained[name] = "the rewrites do not make it"
    alike = [name for name in wanted if name not in unexplained]
    # First the second, which was read last: of large checkpoints the page cache still has it.
    digests = [tensor_digests(each, alike, memory=memory, threads=threads) for each in (other, made)]
    for name in alike:
        if digests[0][name] != digests[1][name]:
            unexplained[name] = "some of its elements differ from those of the tensors whose rows it has"
    if any(name in unexplained for name in wanted):
        # A rewrite that does not hold is not printed; those that remain were compared.
        kept = [entry for entry in entries if not _makes(entry, set(unexplained))]
        if len(kept) < len(entries):
            return _verified(compared, kept, rest)
    found = Learned(text, rewrites, dict(unexplained), unused, tuple(sorted(doubtful - set(unexplained))))
    return found, (entries, drop, in_two_steps)


def _with_names(found: Learned, made: Printed, config: Mapping[str, Any]) -> Learned:
    """Return the same rewrites, with the configuration's names for sizes."""
    entries, drop, in_two_steps = made
    with_names, numbers = with_sizes_named(entries, config)
    if not numbers:
        return found
    text = rules_text(with_names, drop, in_two_steps=in_two_steps, numbers=numbers)
    # What was carried out and compared is what is printed.
    if Rewrites.from_toml(io.StringIO(text), config=config) != found.rewrites:
        return found
    return replace(found, text=text)


def _makes(entry: dict[str, Any], names: set[str]) -> bool:
    """Return whether a rewrite makes one of these tensors."""
    side = entry["to"]
    texts = [*side.get("parts", {}).values(), *([side["name"]] if "name" in side else []), *side.get("also", ())]
    templates = [each for text in texts for each in parse_template(text).expanded()]
    return any(template.matched(name) is not None for template in templates for name in names)
