"""The two sides of a rewrite: tensors split as one side stores them, and combined as the other side does."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache

import numpy as np

from .._text import elements_text, shown
from ..errors import LayoutError, ShardwiseError
from ..packed import PackedDim
from ..packed.parts import segments_of
from ..pieces import Runs
from ..rules.rewrite import Rewrite, Side
from .trained import Tensor, Trained, arranged, packed, stacked

__all__ = ["Fields", "products", "taken_apart"]

#: The most tensors that a stack may be split into; a tensor without bytes may claim any number.
_MOST_STACKED = 1 << 20
#: A cache of the order of parts, which layers share.
_segments = lru_cache(maxsize=32)(segments_of)
#: The values of a template's fields, in the order of the fields' names.
Fields = tuple[tuple[str, str], ...]
#: Tensors by the name of the part; a side without parts has the name `""`.
_PartTensors = dict[str, Tensor]


def taken_apart(
    groups: Mapping[Fields, Mapping[str, str]], tensors: Mapping[str, Tensor], rewrite: Rewrite
) -> Iterator[tuple[Fields, _PartTensors]]:
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
                "there, so these must be equal"
            )
        yield from _unstacked(values, stored, side.stack, rewrite)


def _common(tensor: Tensor, side: Side) -> Tensor:
    """Return a stored tensor with its stacked fields as first dims, followed by the dims that both sides share."""
    if side.dims is None:
        return tensor
    with _naming(tensor):
        sizes = side.dims.solved(side.dims.stored, tensor.shape)
    names = [name for group in side.dims.stored for name in group]
    split = [[sizes[name] for name in group] for group in side.dims.stored]
    merged = [(field,) for field in side.stack] + list(side.dims.common)
    return arranged(tensor, split, [[names.index(name) for name in group] for group in merged])


def _arranged_back(tensor: Tensor, side: Side) -> Tensor:
    """Return the stored tensor of one that `_common` returned, its inverse."""
    if side.dims is None:
        return tensor
    counts = dict(zip(side.stack, tensor.shape, strict=False))
    with _naming(tensor):
        for name, size in side.dims.sizes:
            if counts.get(name, size) != size:
                raise LayoutError(f"{name} = {size}, but the number of tensors along {name} is {counts[name]}")
        groups = (*((field,) for field in side.stack), *side.dims.common)
        sizes = side.dims.solved(groups, tensor.shape)
    names = [name for group in groups for name in group]
    split = [[sizes[name] for name in group] for group in groups]
    return arranged(tensor, split, [[names.index(name) for name in group] for group in side.dims.stored])


def _unstacked(
    values: Fields, stored: _PartTensors, fields: Sequence[str], rewrite: Rewrite
) -> Iterator[tuple[Fields, _PartTensors]]:
    """Yield the tensors of a stack, one by one; the first of these fields is the first dim."""
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


def _parts(stored: _PartTensors, rewrite: Rewrite) -> _PartTensors:
    """Return the parts of tensors that a side stores, already unstacked."""
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
            f"dim {dim} has {elements_text(have)}; expected {size}, padded to a multiple of {side.pad_to}: "
            f"{_multiple(size, side.pad_to)} or more"
        )
    return tensor if have == size else tensor.taken(dim, np.array([[0, 0, size]], np.int64), size)


def products(instances: Iterable[tuple[Fields, _PartTensors]], rewrite: Rewrite) -> Iterator[tuple[str, Tensor]]:
    """Apply the right side of a rewrite: yield the tensors that it makes of the parts of each layer, by name."""
    side = rewrite.target
    stacks: dict[tuple[str, Fields], dict[tuple[str, ...], Tensor]] = {}
    for values, parts in instances:
        named = dict(values)
        places = tuple(named.pop(field) for field in side.stack)
        rest = tuple(pair for pair in values if pair[0] in named)
        for part, _ in side.names:
            stacks.setdefault((part, rest), {})[places] = _stored(part, parts, rewrite)
    for (part, values), layers in stacks.items():
        name = dict(side.names)[part].filled(dict(values))
        tensor = _stacked(name, layers, side)
        yield name, tensor
        # Of tensors with several names the optimizer knows the first.
        further = tensor.weight if isinstance(tensor, Trained) else tensor
        if further is not None:
            yield from ((template.filled(dict(values)), further) for template in side.also)


def _stacked(name: str, layers: Mapping[tuple[str, ...], Tensor], side: Side) -> Tensor:
    """Return the stack of these layers, given by the values of the fields along which they are stacked."""
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


def _stored(part: str, parts: _PartTensors, rewrite: Rewrite) -> Tensor:
    """Return a part, or all parts packed, as the target stores it, not stacked yet."""
    side = rewrite.target
    tensor = parts[part] if side.packed is None else _packed(parts, side, side.packed)
    with _naming(tensor):
        if side.pad_to is not None:
            dim = _dim(tensor, side)
            if rewrite.size is not None and tensor.shape[dim] != rewrite.size:
                raise LayoutError(f"dim {dim} has {elements_text(tensor.shape[dim])}, but size is {rewrite.size}")
            tensor = tensor.padded(dim, _multiple(tensor.shape[dim], side.pad_to))
        if side.zigzag is not None:
            tensor = _in_chunks(tensor, side, side.zigzag, turned=False)
        return tensor.transposed() if side.transpose else tensor


def _in_chunks(tensor: Tensor, side: Side, pairs: int, *, turned: bool) -> Tensor:
    """Return a tensor with a dim in zigzag order, or the inverse: of 2k chunks the first, then the last, and so on."""
    dim = _dim(tensor, side)
    size, rest = divmod(tensor.shape[dim], 2 * pairs)
    if rest:
        raise LayoutError(
            f"dim {dim} has {elements_text(tensor.shape[dim])}, which zigzag = {pairs} does not cut into "
            f"{2 * pairs} chunks"
        )
    if pairs > _MOST_STACKED:
        raise LayoutError(f"zigzag is {pairs}, over the limit of {_MOST_STACKED}")
    chunk = np.arange(2 * pairs, dtype=np.int64)
    chunks = np.where(chunk % 2 == 0, chunk // 2, 2 * pairs - 1 - chunk // 2)
    runs = np.stack([chunks * size, chunk * size, np.full_like(chunk, size)], 1)
    if turned:
        runs = runs[:, [1, 0, 2]]
    return tensor if size == 0 else tensor.taken(dim, np.ascontiguousarray(runs), tensor.shape[dim])


def _packed(parts: _PartTensors, side: Side, order: PackedDim) -> Tensor:
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


def _origins(parts: _PartTensors) -> str:
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
    """Put the tensor's name before the message of an error in the block, unless the message has it."""
    try:
        yield
    except ShardwiseError as error:
        if shown(tensor.origin) in str(error):
            raise
        raise type(error)(f"tensor {shown(tensor.origin)}: {error}") from None
