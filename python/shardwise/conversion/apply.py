"""Rewrites, applied to the tensors of a checkpoint: which tensor is made from which, under which name."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache

import numpy as np

from .._text import shown
from ..errors import LayoutError, ShardwiseError
from ..packed import PackedDim
from ..packed.parts import segments_of
from ..pieces import Runs
from ..quantized.component import LogicalTensor
from ..rules.rewrites import Rewrite, Rewrites, RewriteSet, Side
from ..rules.templates import NameIndex, Template
from .assembled import Assembled
from .weights import Reader, Tensor, Weight, arranged, packed, repeated, stacked

__all__ = ["kept_objects", "rewritten"]

#: The most tensors that are taken out of one; a tensor without bytes may claim any number.
_MOST_STACKED = 1 << 20

#: Layers share the order of their parts.
_segments = lru_cache(maxsize=32)(segments_of)


class _NothingError(LayoutError):
    """A rewrite matches nothing."""


#: Tensors by name.
_Tensors = dict[str, Tensor]
#: The values of a template's fields, in the order of the fields' names.
_Fields = tuple[tuple[str, str], ...]
#: Tensors by part; under `""` where there are no parts.
_Parts = dict[str, Tensor]


def rewritten(
    tensors: Mapping[str, Assembled],
    rewrites: Rewrites,
    weights: Mapping[str, LogicalTensor] | None = None,
    read: Reader = lambda name: None,
    dropped: dict[str, Assembled] | None = None,
) -> tuple[dict[str, Assembled], dict[str, LogicalTensor]]:
    """The tensors of a checkpoint as the rewrites name and store them, and the quantized weights among them.

    A rewrite that names a weight is carried out for all its components, which get names like that of the weight. One
    that names a component is for this tensor alone, and the weight's other ones are tensors like any others. What the
    rewrites drop is put into `dropped`, by the names that it has then.

    Raises:
        LayoutError: if a rewrite matches nothing; a tensor is missing that should be packed or stacked with others; the
            sizes of parts do not add up; two tensors get the same name; a tensor is left that `unmatched` refuses; a
            rewrite would take a block of a quantized weight apart.
    """
    found = _grouped(tensors, weights or {}, read)
    for one in rewrites.sets:
        found = _apply_set(_apart(found, one), one, {} if dropped is None else dropped)
    made: dict[str, Assembled] = {}
    logical: dict[str, LogicalTensor] = {}
    for name, tensor in found.items():
        parts = {name: tensor} if isinstance(tensor, Assembled) else {}
        if isinstance(tensor, Weight):
            logical[name], parts = tensor.named(name)
        for own, part in parts.items():
            if own in made:
                raise LayoutError(
                    f"the rewrites call {shown(made[own].origin)} and {shown(part.origin)} both {shown(own)}"
                )
            made[own] = part
    return made, logical


def _grouped(tensors: Mapping[str, Assembled], weights: Mapping[str, LogicalTensor], read: Reader) -> _Tensors:
    """The tensors with quantized weights in place of their components, each where its first one is."""
    owners: dict[str, LogicalTensor] = {}
    for name, weight in weights.items():
        names = [component.name for component in weight.components]
        # A tensor that is called like the weight, and is none of its components, is another one.
        if name in names or name not in tensors:
            owners.update(dict.fromkeys(names, weight))
    found: _Tensors = {}
    for name, tensor in tensors.items():
        weight_of = owners.get(name)
        if weight_of is None:
            found[name] = tensor
        elif weight_of.name not in found:
            found[weight_of.name] = Weight.of_stored(weight_of, tensors, read)
    return found


def _apart(tensors: _Tensors, one: RewriteSet) -> _Tensors:
    """The tensors with the components of those weights by themselves that a set of rewrites names one by one."""
    owners = _components(tensors)
    components = NameIndex(owners)
    alone = {
        owners[part]
        for rewrite in one.rewrites if owners
        for _, template in rewrite.source.names
        for part in components.matched(template)
        if template.matched(owners[part]) is None
    }  # fmt: skip
    found: _Tensors = {}
    for name, tensor in tensors.items():
        found.update(tensor.named(name)[1] if isinstance(tensor, Weight) and name in alone else {name: tensor})
    return found


def _components(tensors: _Tensors) -> dict[str, str]:
    """The components of quantized weights that are not called like these, each with the name of its weight."""
    return {
        part: name
        for name, tensor in tensors.items()
        if isinstance(tensor, Weight)
        for part in tensor.named(name)[1]
        if part != name
    }


def kept_objects(names: Iterable[str], rewrites: Rewrites) -> set[str]:
    """The names of values that are not tensors, without those that the rewrites drop."""
    kept = NameIndex(names)
    for one in rewrites.sets:
        for template in one.drop:
            for name in kept.matched(template):
                kept.discard(name)
        if one.unmatched == "drop":
            return set()
    return set(kept.order)


def _singly(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Assembled]]:
    """The tensors, with the components of weights in place of these."""
    for name, tensor in tensors.items():
        yield from ((name, tensor),) if isinstance(tensor, Assembled) else tensor.named(name)[1].items()


def _apply_set(tensors: _Tensors, one: RewriteSet, dropped: dict[str, Assembled]) -> _Tensors:
    given, tensors = tensors, dict(tensors)
    names = NameIndex(tensors)
    if one.drop:
        owners = _components(tensors)
        components = NameIndex(owners)
        for template in one.drop:
            for name in names.matched(template):
                names.discard(name)
                del tensors[name]
            for name in dict.fromkeys(owners[part] for part in components.matched(template)):
                weight = tensors.get(name)
                if isinstance(weight, Weight):
                    tensors[name] = weight.without(name, template.matched)
        kept = {name for name, _ in _singly(tensors)}
        dropped.update((name, tensor) for name, tensor in _singly(given) if name not in kept)
    made: set[str] = set()
    for number, rewrite in enumerate(one.rewrites, 1):
        with _numbered(rewrite):
            later = one.rewrites[number:] if one.unmatched == "drop" else None
            _apply(tensors, names, rewrite, made, later)
    left = [name for name in tensors if name not in made]
    if left and one.unmatched == "refuse":
        raise LayoutError(
            f"no rewrite matches {shown(left[0])}{_others(len(left) - 1)}; drop leaves tensors out, and unmatched = "
            "'keep' keeps them as they are"
        )
    if one.unmatched == "keep":
        return tensors
    dropped.update(_singly({name: tensors[name] for name in left}))
    return {name: tensors[name] for name in tensors if name in made}


def _others(count: int) -> str:
    return "" if not count else f" and {count} other{'s' * (count > 1)}"


def _apply(
    tensors: _Tensors, index: NameIndex, rewrite: Rewrite, made: set[str], later: Sequence[Rewrite] | None
) -> None:
    """Apply one rewrite to the tensors, of which the index has the names.

    Record in `made` what has been made, and forget what has been taken. Where tensors that no rewrite matches are
    dropped, `later` has the rewrites that may still match one.
    """
    taken: dict[str, tuple[str, _Fields]] = {}
    where = rewrite.source.where
    for part, template in rewrite.source.names:
        for name, matched in index.matched(template).items():
            if where is None or where.filled(matched) in tensors:
                if name in taken:
                    raise LayoutError(f"tensor {shown(name)} is both the part {taken[name][0]} and the part {part}")
                taken[name] = (part, tuple(sorted(matched.items())))
    if not taken:
        if rewrite.optional:
            return
        such = f", such as {shown(next(iter(tensors)))}" if tensors else ""
        _, wanted = rewrite.source.names[0]
        raise _NothingError(
            f"no tensor is called {shown(wanted.text)}, which a rewrite needs: there are "
            f"{len(tensors)}{such}. {_within(wanted, tensors)}If they are another engine's, its rules "
            "are to be undone first (--source-rules, or Rewrites.inverse); optional = true allows a rewrite to match "
            "nothing"
        )
    if rewrite.refused is not None:
        raise LayoutError(f"tensor {shown(next(iter(taken)))} cannot be rewritten: {rewrite.refused}")
    groups: dict[_Fields, dict[str, str]] = {}
    for name in sorted(taken, key=index.order.__getitem__):  # In the checkpoint's order.
        part, values = taken[name]
        groups.setdefault(values, {})[part] = name
    again = _repeated(groups, tensors, rewrite)
    sources = {name: tensors[name] for name in taken} | again
    index.discard_all(sources)
    for name in sources:
        del tensors[name]
    made.difference_update(sources)
    for name, tensor in _products(_taken_apart(groups, sources, rewrite), rewrite):
        if name in tensors and (name in made or later is None or _matches(later, name, index)):
            how = "like another tensor that it makes" if name in made else "which exists already"
            raise LayoutError(
                f"the rewrite of {shown(rewrite.source.names[0][1].text)} calls {shown(tensor.origin)} {shown(name)}, "
                f"{how}"
            )
        tensors[name] = tensor
        index.add(name)
        made.add(name)


def _matches(rewrites: Sequence[Rewrite], name: str, index: NameIndex) -> bool:
    """Return whether one of these rewrites reads a tensor of this name."""
    index.count(len(rewrites))
    sources = [rewrite.source for rewrite in rewrites]
    templates = [template for one in sources for template in (*(named for _, named in one.names), *one.also)]
    return any(template.matched(name) is not None for template in templates)


#: The most names of which it is asked whether they are of a model within another.
_MOST_ASKED = 4096


def _within(template: Template, tensors: Iterable[str]) -> str:
    """Say how names are renamed that would match but for what they begin with: those of a model within another."""
    for name in itertools.islice(tensors, _MOST_ASKED):
        for dot in (at for at, letter in enumerate(name) if letter == "."):
            for begin in ("", "model."):
                if template.matched(begin + name[dot + 1 :]) is not None:
                    prefix = name[: dot + 1].replace(".", r"\.")
                    return (
                        f"If the model is within another, its names are renamed first (--rename '^{prefix}={begin}', "
                        f"or rename={{r'^{prefix}': {begin!r}}}). "
                    )
    return ""


def _repeated(groups: Mapping[_Fields, Mapping[str, str]], tensors: _Tensors, rewrite: Rewrite) -> _Tensors:
    """The tensors that have further names, and under these names too, where they are there."""
    found: _Tensors = {}
    for values, names in groups.items():
        further = [template.filled(dict(values)) for template in rewrite.source.also]
        for name in names.values():
            others = [tensors[other] for other in further if other in tensors and other != name]
            if others:
                found[name] = repeated(tensors[name], others)
        found.update((other, tensors[other]) for other in further if other in tensors and other not in found)
    return found


def _taken_apart(
    groups: Mapping[_Fields, Mapping[str, str]], tensors: _Tensors, rewrite: Rewrite
) -> Iterator[tuple[_Fields, _Parts]]:
    """Apply the left side of a rewrite: yield the parts of each layer, unpacked and unstacked."""
    side = rewrite.source
    for values, names in groups.items():
        for part, template in side.names:
            if part not in names:
                raise LayoutError(
                    f"tensor {shown(template.filled(dict(values)))} is missing; it belongs with "
                    f"{shown(next(iter(names.values())))}"
                )
        stored = {part: _common(tensors[names[part]], side) for part, _ in side.names}
        depth = len(side.stack)
        sizes = {names[part]: tensor.shape[:depth] for part, tensor in stored.items()}
        if len(set(sizes.values())) != 1 or len(next(iter(sizes.values()))) != depth:
            fields = ", ".join(f"{{{field}}}" for field in side.stack)
            first = "dim 0" if depth == 1 else f"dims 0 to {depth - 1}"
            raise LayoutError(
                f"{shown(list(sizes))} have the sizes {shown(list(sizes.values()))} in {first}: {fields} is stacked "
                "there, which must be of one size"
            )
        yield from _unstacked(values, stored, side.stack, rewrite)


def _common(tensor: Tensor, side: Side) -> Tensor:
    """A stored tensor with the fields along which it is stacked as its first dims, and then those in common."""
    if side.dims is None:
        return tensor
    with _naming(tensor):
        sizes = side.dims.solved(side.dims.stored, tensor.shape)
    names = [name for group in side.dims.stored for name in group]
    split = [[sizes[name] for name in group] for group in side.dims.stored]
    merged = [(field,) for field in side.stack] + list(side.dims.common)
    return arranged(tensor, split, [[names.index(name) for name in group] for group in merged])


def _arranged_back(tensor: Tensor, side: Side) -> Tensor:
    """The inverse of `_common`."""
    if side.dims is None:
        return tensor
    counts = dict(zip(side.stack, tensor.shape, strict=False))
    with _naming(tensor):
        for name, size in side.dims.sizes:
            if counts.get(name, size) != size:
                raise LayoutError(f"there are {counts[name]} tensors along {name}, but {name} = {size}")
        groups = (*((field,) for field in side.stack), *side.dims.common)
        sizes = side.dims.solved(groups, tensor.shape)
    names = [name for group in groups for name in group]
    split = [[sizes[name] for name in group] for group in groups]
    return arranged(tensor, split, [[names.index(name) for name in group] for group in side.dims.stored])


def _unstacked(
    values: _Fields, stored: _Parts, fields: Sequence[str], rewrite: Rewrite
) -> Iterator[tuple[_Fields, _Parts]]:
    """The tensors of a stack, one by one; the first of these fields is the first dim."""
    if not fields:
        yield values, _parts(stored, rewrite)
        return
    count = next(iter(stored.values())).shape[0]
    if count > _MOST_STACKED:
        origin = next(iter(stored.values())).origin
        raise LayoutError(f"tensor {shown(origin)} is a stack of {count} tensors, over the limit of {_MOST_STACKED}")
    for place in range(count):
        inner = tuple(sorted([*values, (fields[0], str(place))]))
        each = {part: tensor.unstacked(place) for part, tensor in stored.items()}
        yield from _unstacked(inner, each, fields[1:], rewrite)


def _parts(stored: _Parts, rewrite: Rewrite) -> _Parts:
    """Tensors as a side stores them, but not stacked, taken apart."""
    side, found = rewrite.source, {}
    for part, tensor in stored.items():
        with _naming(tensor):
            one = tensor.transposed() if side.transpose else tensor
            if side.zigzag is not None:
                one = _in_chunks(one, side, side.zigzag, turned=True)
            if side.pad_to is not None:
                one = _stripped(one, side, rewrite.size)
            if side.packed is None:
                found[part] = one
                continue
            dim = _dim(one, side)
            found.update(one.unpacked(dim, _segments(side.packed, one.shape[dim])))
    return found


def _stripped(tensor: Tensor, side: Side, size: int | None) -> Tensor:
    assert size is not None
    assert side.pad_to is not None
    dim = _dim(tensor, side)
    have = tensor.shape[dim]
    if have < size or have % side.pad_to:
        raise LayoutError(
            f"dim {dim} has {have} elements; expected {size}, padded to a multiple of {side.pad_to}: "
            f"{_multiple(size, side.pad_to)} or more"
        )
    return tensor if have == size else tensor.taken(dim, np.array([[0, 0, size]], np.int64), size)


def _products(instances: Iterable[tuple[_Fields, _Parts]], rewrite: Rewrite) -> Iterator[tuple[str, Tensor]]:
    side = rewrite.target
    stacks: dict[tuple[str, _Fields], dict[tuple[str, ...], Tensor]] = {}
    for values, parts in instances:
        named = dict(values)
        places = tuple(named.pop(field) for field in side.stack)
        rest = tuple(pair for pair in values if pair[0] in named)
        for part, _ in side.names:
            stacks.setdefault((part, rest), {})[places] = _stored(part, parts, rewrite)
    for (part, values), layers in stacks.items():
        name = dict(side.names)[part].filled(dict(values))
        tensor = _stacked(name, layers, side)
        for each in (name, *(template.filled(dict(values)) for template in side.also)):
            yield each, tensor


def _stacked(name: str, layers: Mapping[tuple[str, ...], Tensor], side: Side) -> Tensor:
    """A tensor of which these are the layers, by the values of the fields along which they are stacked."""
    if not side.stack:
        (tensor,) = layers.values()
        return _arranged_back(tensor, side)
    counts = [len(values) for values in map(set, zip(*layers, strict=True))]
    whole = itertools.product(*([str(place) for place in range(count)] for count in counts))
    # As many as there are, so that no number of places is taken on trust.
    if missing := next((places for places in itertools.islice(whole, len(layers) + 1) if places not in layers), None):
        wanted = [set(map(str, range(count))) for count in counts]
        others = (places for places in layers if any(at not in known for at, known in zip(places, wanted, strict=True)))
        other = next(others, next(iter(layers)))
        raise LayoutError(
            f"{shown(name)} should be a stack of {math.prod(counts)} tensors, but none has "
            f"{_fields(side.stack, missing)}; one has {_fields(side.stack, other)}"
        )
    order = itertools.product(*([str(place) for place in range(count)] for count in counts))
    tensor = stacked([layers[places] for places in order])
    split = [counts, *([size] for size in tensor.shape[1:])]
    atoms = range(len(counts) + len(tensor.shape) - 1)
    return _arranged_back(arranged(tensor, split, [[atom] for atom in atoms]), side)


def _fields(fields: Sequence[str], values: Sequence[str]) -> str:
    return ", ".join(
        f"{field} = {value if value.isdecimal() else shown(value)}" for field, value in zip(fields, values, strict=True)
    )


def _stored(part: str, parts: _Parts, rewrite: Rewrite) -> Tensor:
    """A part, or all of them packed, as the target stores it, but not stacked."""
    side = rewrite.target
    tensor = parts[part] if side.packed is None else _packed(parts, side, side.packed)
    with _naming(tensor):
        if side.pad_to is not None:
            dim = _dim(tensor, side)
            if rewrite.size is not None and tensor.shape[dim] != rewrite.size:
                raise LayoutError(f"dim {dim} has {tensor.shape[dim]} elements, but size is {rewrite.size}")
            tensor = tensor.padded(dim, _multiple(tensor.shape[dim], side.pad_to))
        if side.zigzag is not None:
            tensor = _in_chunks(tensor, side, side.zigzag, turned=False)
        return tensor.transposed() if side.transpose else tensor


def _in_chunks(tensor: Tensor, side: Side, pairs: int, *, turned: bool) -> Tensor:
    """The tensor with a dim in zigzag order, or the inverse: of 2k chunks the first, then the last, and so on."""
    dim = _dim(tensor, side)
    size, rest = divmod(tensor.shape[dim], 2 * pairs)
    if rest:
        raise LayoutError(
            f"dim {dim} has {tensor.shape[dim]} elements, which zigzag = {pairs} does not cut into {2 * pairs} chunks"
        )
    if pairs > _MOST_STACKED:
        raise LayoutError(f"zigzag is {pairs}, over the limit of {_MOST_STACKED}")
    chunk = np.arange(2 * pairs, dtype=np.int64)
    chunks = np.where(chunk % 2 == 0, chunk // 2, 2 * pairs - 1 - chunk // 2)
    runs = np.stack([chunks * size, chunk * size, np.full_like(chunk, size)], 1)
    if turned:
        runs = runs[:, [1, 0, 2]]
    return tensor if size == 0 else tensor.taken(dim, np.ascontiguousarray(runs), tensor.shape[dim])


def _packed(parts: _Parts, side: Side, order: PackedDim) -> Tensor:
    dims = {_dim(tensor, side) for tensor in parts.values()}
    if len(dims) != 1:
        raise LayoutError(f"{_origins(parts)} have different numbers of dims, so they cannot be packed")
    (dim,) = dims
    total = sum(tensor.shape[dim] for tensor in parts.values())
    given = " + ".join(f"{name} {parts[name].shape[dim]}" for name in list(parts)[:8])
    try:
        segments = _segments(order, total)
    except LayoutError as error:
        raise LayoutError(f"{_origins(parts)} have {given} = {total} elements in dim {dim}: {error}") from None
    chosen: list[tuple[Tensor, Runs]] = []
    for name, runs in segments.items():
        size = int(runs[:, 2].sum())
        if parts[name].shape[dim] != size:
            raise LayoutError(
                f"{_origins(parts)} have {given} elements in dim {dim}, but {shown(str(order))} has {size} of {name}"
            )
        chosen.append((parts[name], runs))
    return packed(dim, chosen)


def _origins(parts: _Parts) -> str:
    return ", ".join(shown(tensor.origin) for tensor in list(parts.values())[:8])


def _dim(tensor: Tensor, side: Side) -> int:
    rank = len(tensor.shape)
    if not -rank <= side.dim < rank:
        raise LayoutError(f"tensor {shown(tensor.origin)} has no dim {side.dim}: its shape is {shown(tensor.shape)}")
    return side.dim % rank


def _multiple(size: int, of: int) -> int:
    return -(-size // of) * of


@contextmanager
def _naming(tensor: Tensor) -> Iterator[None]:
    """Put the tensor's name before the message of an error inside, unless it is there already."""
    try:
        yield
    except ShardwiseError as error:
        if shown(tensor.origin) in str(error):
            raise
        raise type(error)(f"tensor {shown(tensor.origin)}: {error}") from None


@contextmanager
def _numbered(rewrite: Rewrite) -> Iterator[None]:
    """Put the numbers of a model that a rewrite was worked out from after the message of an error inside."""
    try:
        yield
    except _NothingError:
        raise  # Whatever the numbers are.
    except ShardwiseError as error:
        lacking = [f"{name} = {value}" for name, value in rewrite.numbers if f"{name} = {value}" not in str(error)]
        if not lacking:
            raise
        raise type(error)(f"{error}; the rewrite has {', '.join(lacking)}") from None
