"""Rewrites, applied to the tensors of a checkpoint: which tensor is made from which, under which name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache

import numpy as np

from ..._text import shown
from ...errors import LayoutError, ShardwiseError
from ...packed import PackedDim
from ...reshard.orders import segments_of
from ...rules.rewrites import Rewrite, Rewrites, RewriteSet, Side
from .assembled import Assembled, Stretches

__all__ = ["kept_objects", "rewritten"]

#: The most tensors that are taken out of one; a tensor without bytes may claim any number.
_MOST_STACKED = 1 << 20

#: Layers share the order of their parts.
_segments = lru_cache(maxsize=32)(segments_of)

#: Tensors by name.
_Tensors = dict[str, Assembled]
#: The values of a template's fields, in the order of the fields' names.
_Values = tuple[tuple[str, str], ...]
#: Tensors by part; under `""` where there are no parts.
_Parts = dict[str, Assembled]


def rewritten(tensors: Mapping[str, Assembled], rewrites: Rewrites) -> _Tensors:
    """The tensors of a checkpoint as the rewrites name and store them.

    Raises:
        LayoutError: if a rewrite matches nothing; a tensor is missing that should be packed or stacked with others; the
            sizes of parts do not add up; two tensors get the same name; a tensor is left that `unmatched` refuses.
    """
    found = dict(tensors)
    for one in rewrites.sets:
        found = _apply_set(found, one)
    return found


def kept_objects(names: Iterable[str], rewrites: Rewrites) -> set[str]:
    """The names of values that are not tensors, without those that the rewrites drop."""
    kept = set(names)
    for one in rewrites.sets:
        for template in one.drop:
            pattern = template.pattern()
            kept = {name for name in kept if pattern.fullmatch(name) is None}
        if one.unmatched == "drop":
            kept = set()
    return kept


def _apply_set(tensors: _Tensors, one: RewriteSet) -> _Tensors:
    for template in one.drop:
        pattern = template.pattern()
        tensors = {name: tensor for name, tensor in tensors.items() if pattern.fullmatch(name) is None}
    made: set[str] = set()
    for rewrite in one.rewrites:
        with _numbered(rewrite):
            tensors = _apply(tensors, rewrite, made)
    left = [name for name in tensors if name not in made]
    if left and one.unmatched == "refuse":
        raise LayoutError(
            f"no rewrite matches {shown(left[0])}{_others(len(left) - 1)}; drop leaves tensors out, and unmatched = "
            "'keep' keeps them as they are"
        )
    return tensors if one.unmatched == "keep" else {name: tensors[name] for name in tensors if name in made}


def _others(count: int) -> str:
    return "" if not count else f" and {count} other{'s' * (count > 1)}"


def _apply(tensors: _Tensors, rewrite: Rewrite, made: set[str]) -> _Tensors:
    """Apply one rewrite; record in `made` what has been made, and forget what has been taken."""
    taken: dict[str, tuple[str, _Values]] = {}
    for part, template in rewrite.source.names:
        pattern = template.pattern()
        for name in tensors:
            if match := pattern.fullmatch(name):
                if name in taken:
                    raise LayoutError(f"tensor {shown(name)} is both the part {taken[name][0]} and the part {part}")
                taken[name] = (part, tuple(sorted(match.groupdict().items())))
    if not taken:
        if rewrite.optional:
            return tensors
        raise LayoutError(
            f"no tensor is called {shown(rewrite.source.names[0][1].text)}, which a rewrite needs; "
            "optional = true allows that"
        )
    groups: dict[_Values, dict[str, str]] = {}
    for name in tensors:  # In the checkpoint's order.
        if name in taken:
            part, values = taken[name]
            groups.setdefault(values, {})[part] = name
    result = {name: tensor for name, tensor in tensors.items() if name not in taken}
    made.difference_update(taken)
    for name, tensor in _products(_taken_apart(groups, tensors, rewrite), rewrite):
        if name in result:
            how = "like another tensor that it makes" if name in made else "which exists already"
            raise LayoutError(
                f"the rewrite of {shown(rewrite.source.names[0][1].text)} calls {shown(tensor.origin)} {shown(name)}, "
                f"{how}"
            )
        result[name] = tensor
        made.add(name)
    return result


def _taken_apart(
    groups: Mapping[_Values, Mapping[str, str]], tensors: _Tensors, rewrite: Rewrite
) -> Iterator[tuple[_Values, _Parts]]:
    """What is between the two sides: the parts of each layer."""
    side = rewrite.source
    for values, names in groups.items():
        for part, template in side.names:
            if part not in names:
                raise LayoutError(
                    f"tensor {shown(template.filled(dict(values)))} is missing; it belongs with "
                    f"{shown(next(iter(names.values())))}"
                )
        if side.stack is None:
            yield values, _parts({part: tensors[names[part]] for part, _ in side.names}, rewrite)
            continue
        counts = {names[part]: tensors[names[part]].shape[:1] for part, _ in side.names}
        if len(set(counts.values())) != 1 or () in counts.values():
            raise LayoutError(
                f"{shown(list(counts))} have the dims 0 {shown(list(counts.values()))}: {{{side.stack}}} is stacked in "
                "dim 0, which must be of one size"
            )
        count = next(iter(counts.values()))[0]
        if count > _MOST_STACKED:
            raise LayoutError(
                f"tensor {shown(next(iter(counts)))} is a stack of {count} tensors, over the limit of {_MOST_STACKED}"
            )
        for place in range(count):
            inner = tuple(sorted([*values, (side.stack, str(place))]))
            yield inner, _parts({part: tensors[names[part]].unstacked(place) for part, _ in side.names}, rewrite)


def _parts(stored: _Parts, rewrite: Rewrite) -> _Parts:
    """Tensors as a side stores them, but not stacked, taken apart."""
    side, found = rewrite.source, {}
    for part, tensor in stored.items():
        with _naming(tensor):
            one = tensor.transposed() if side.transpose else tensor
            if side.pad_to is not None:
                one = _stripped(one, side, rewrite.size)
            if side.packed is None:
                found[part] = one
                continue
            dim = _dim(one, side)
            for name, stretches in _segments(side.packed, one.shape[dim]).items():
                turned = np.ascontiguousarray(stretches[:, [1, 0, 2]])
                found[name] = one.taken(dim, turned, int(stretches[:, 2].sum()))
    return found


def _stripped(tensor: Assembled, side: Side, size: int | None) -> Assembled:
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


def _products(instances: Iterable[tuple[_Values, _Parts]], rewrite: Rewrite) -> Iterator[tuple[str, Assembled]]:
    side = rewrite.target
    stacks: dict[tuple[str, _Values], dict[str, Assembled]] = {}
    for values, parts in instances:
        if side.stack is None:
            for part, template in side.names:
                yield template.filled(dict(values)), _stored(part, parts, rewrite)
            continue
        place = dict(values)[side.stack]
        rest = tuple(pair for pair in values if pair[0] != side.stack)
        for part, _ in side.names:
            stacks.setdefault((part, rest), {})[place] = _stored(part, parts, rewrite)
    for (part, values), layers in stacks.items():
        name = dict(side.names)[part].filled(dict(values))
        places = [str(place) for place in range(len(layers))]
        if missing := [place for place in places if place not in layers]:
            other = next(place for place in layers if place not in places)
            raise LayoutError(
                f"{shown(name)} should be a stack of {len(layers)} tensors, but none has {side.stack} = {missing[0]}; "
                f"one has {side.stack} = {shown(other)}"
            )
        yield name, Assembled.stacked([layers[place] for place in places])


def _stored(part: str, parts: _Parts, rewrite: Rewrite) -> Assembled:
    """A part, or all of them packed, as the target stores it, but not stacked."""
    side = rewrite.target
    tensor = parts[part] if side.packed is None else _packed(parts, side, side.packed)
    with _naming(tensor):
        if side.pad_to is not None:
            dim = _dim(tensor, side)
            if rewrite.size is not None and tensor.shape[dim] != rewrite.size:
                raise LayoutError(f"dim {dim} has {tensor.shape[dim]} elements, but size is {rewrite.size}")
            tensor = tensor.padded(dim, _multiple(tensor.shape[dim], side.pad_to))
        return tensor.transposed() if side.transpose else tensor


def _packed(parts: _Parts, side: Side, packed: PackedDim) -> Assembled:
    dims = {_dim(tensor, side) for tensor in parts.values()}
    if len(dims) != 1:
        raise LayoutError(f"{_origins(parts)} have different numbers of dims, so they cannot be packed")
    (dim,) = dims
    total = sum(tensor.shape[dim] for tensor in parts.values())
    given = " + ".join(f"{name} {parts[name].shape[dim]}" for name in list(parts)[:8])
    try:
        segments = _segments(packed, total)
    except LayoutError as error:
        raise LayoutError(f"{_origins(parts)} have {given} = {total} elements in dim {dim}: {error}") from None
    chosen: list[tuple[Assembled, Stretches]] = []
    for name, stretches in segments.items():
        size = int(stretches[:, 2].sum())
        if parts[name].shape[dim] != size:
            raise LayoutError(
                f"{_origins(parts)} have {given} elements in dim {dim}, but {shown(str(packed))} has {size} of {name}"
            )
        chosen.append((parts[name], stretches))
    return Assembled.packed(dim, chosen)


def _origins(parts: _Parts) -> str:
    return ", ".join(shown(tensor.origin) for tensor in list(parts.values())[:8])


def _dim(tensor: Assembled, side: Side) -> int:
    rank = len(tensor.shape)
    if not -rank <= side.dim < rank:
        raise LayoutError(f"tensor {shown(tensor.origin)} has no dim {side.dim}: its shape is {shown(tensor.shape)}")
    return side.dim % rank


def _multiple(size: int, of: int) -> int:
    return -(-size // of) * of


@contextmanager
def _naming(tensor: Assembled) -> Iterator[None]:
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
    except ShardwiseError as error:
        lacking = [f"{name} = {value}" for name, value in rewrite.numbers if f"{name} = {value}" not in str(error)]
        if not lacking:
            raise
        raise type(error)(f"{error}; the rewrite has {', '.join(lacking)}") from None
