"""Ways to shard a training state: what each rank of a data-parallel group holds, and what its framework allocates.

A rank's parameters, as tensor, pipeline and expert parallelism leave them, go in; sizes for each rank of its group come
out. The rules are those of PyTorch 2.15, DeepSpeed 0.19 and Megatron-Core 0.16, whose own allocations the tests have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .._dtypes import bytes_for
from .._text import shown
from ..errors import LayoutError
from ..layout import TensorLayout, UnevenRule
from ..mesh import DeviceMesh
from .optimizers import Optimizer

if TYPE_CHECKING:
    import numpy.typing as npt

    from ..partition import Partition

    Count = int | npt.NDArray[np.int64]

__all__ = ["KINDS", "SHARDINGS", "Entry", "Local", "Recipe", "entries"]

#: The kinds of what a rank has, in the order in which they are shown.
KINDS = ("weights", "gradients", "masters", "optimizer", "whole", "caches")

#: The ways to shard that are known, with what they do.
SHARDINGS = {
    "none": "everything as the rules cut it",
    "ddp": "everything whole on every data-parallel rank",
    "zero-redundancy": "PyTorch's ZeroRedundancyOptimizer: each parameter's state on one rank",
    "zero1": "DeepSpeed's ZeRO 1: masters and states in flat partitions",
    "zero2": "ZeRO 2: gradients too",
    "zero3": "ZeRO 3: each parameter cut, and small ones whole besides after a step",
    "fsdp1": "PyTorch's FullyShardedDataParallel: flat parameters, one for each wrapped module",
    "fsdp2": "PyTorch's fully_shard: rows of each parameter, padded to equal numbers",
    "hsdp": "fully_shard within groups of ranks, whole between them",
    "megatron": "Megatron-Core's distributed optimizer: masters and states in parts of padded buckets",
    "megatron-ddp": "Megatron-Core without it: one buffer of gradients, everything whole",
}


class Local(NamedTuple):
    """A parameter as one rank has it before its state is sharded.

    Attributes:
        tensor: The number of its tensor.
        shape: The shape of the rank's own array.
        bits: The bits of an element.
        trained: Whether it is trained; what is frozen has a weight only.
        unit: What it is flattened together with: the module that FSDP wraps, or Megatron's chunk of a stage.
        is_matrix: Whether it is a matrix within a layer, as Muon takes them.
        apart: Whether it has a bucket of its own, as Megatron's tied embeddings do in a pipeline.
        room: The shape for which there is room, where that is another, as XLA pads to the largest part.
    """

    tensor: int
    shape: tuple[int, ...]
    bits: int
    trained: bool = True
    unit: Hashable = 0
    is_matrix: bool = False
    apart: bool = False
    room: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


class Entry(NamedTuple):
    """One array, or a part of one, on each rank of a data-parallel group.

    Attributes:
        kind: One of `KINDS`.
        name: The name of the array: `"weight"`, `"exp_avg"`, …
        tensor: The number of the tensor that it belongs to; `None` for padding and for what belongs to several.
        held: The bytes of elements that belong to a tensor; the same for all ranks, or an array.
        allocated: The bytes that the framework allocates.
    """

    kind: str
    name: str
    tensor: int | None
    held: Count
    allocated: Count


@dataclass(frozen=True)
class Recipe:
    """The arrays that are kept of each parameter, and how they are sharded.

    Attributes:
        sharding: One of `SHARDINGS`.
        optimizer: The optimizer; `None` if nothing is trained.
        gradients: The bits of gradients; `None` for those of the weights.
        masters: The bits of master copies; `None` for what the framework does, 0 for none.
        aligned: For FSDP1, whether `use_orig_params` is set, by which each parameter begins at a multiple of 16 bytes.
        compute: For FSDP1 so aligned, the bits of the dtype of its mixed precision; `None` without.
        groups: For DeepSpeed, the parameter groups: 1, or 2 with biases and norms in one of their own.
        round_robin: For ZeRO 1 and 2, `round_robin_gradients`.
        persistent: For ZeRO 3, `stage3_param_persistence_threshold`.
        sub_group: For ZeRO 3, `sub_group_size`.
        bucket: For Megatron, the elements of a bucket on the first stage; `None` for one bucket.
        high_bandwidth: For Megatron, `pad_buckets_for_high_nccl_busbw`.
    """

    sharding: str
    optimizer: Optimizer | None = None
    gradients: int | None = None
    masters: int | None = None
    aligned: bool = False
    compute: int | None = None
    groups: int = 1
    round_robin: bool = False
    persistent: int = 100_000
    sub_group: int = 1_000_000_000
    bucket: int | None = None
    high_bandwidth: bool = False

    def gradient_bits(self, part: Local) -> int:
        """The bits of an element of a gradient."""
        return self.gradients or part.bits


def entries(recipe: Recipe, parts: Sequence[Local], ways: int) -> Iterator[Entry]:
    """Give all that a rank of a data-parallel group keeps, for each rank of it.

    Args:
        recipe: What is kept, and how it is sharded.
        parts: The parameters, in the order of the model; those of the ranks of the group are alike.
        ways: The ranks of the group over which the state is sharded.

    Raises:
        LayoutError: if the framework cannot do it.

    >>> from shardwise.state.optimizers import optimizer_of
    >>> recipe = Recipe("fsdp2", optimizer_of("lion"))
    >>> for entry in entries(recipe, [Local(0, (5, 2), 32)], 4):
    ...     print(entry.kind, entry.name, entry.held.tolist(), entry.allocated)
    weights weight [16, 16, 8, 0] 16
    gradients gradient [16, 16, 8, 0] 16
    optimizer exp_avg [16, 16, 8, 0] [16 16  8  0]
    """
    yield from _WAYS[recipe.sharding](recipe, parts, ways)
    optimizer = recipe.optimizer
    if optimizer is not None and optimizer.tables and any(part.trained for part in parts):
        yield Entry("optimizer", "tables", None, optimizer.tables, optimizer.tables)


def _whole(recipe: Recipe, parts: Sequence[Local], ways: int) -> Iterator[Entry]:
    """Everything whole on every rank."""
    for part in parts:
        if part.room is None:
            yield from _alone(recipe, part)
            continue
        padded = _alone(recipe, part._replace(shape=part.room, room=None))
        for own, room in zip(_alone(recipe, part), padded, strict=True):
            yield own._replace(allocated=room.allocated)


def _alone(recipe: Recipe, part: Local) -> Iterator[Entry]:
    yield _weight(part)
    if part.trained and recipe.optimizer is not None:
        yield _same("gradients", "gradient", part, part.size, recipe.gradient_bits(part))
        yield from _trained(recipe, part, part.shape)


def _weight(part: Local) -> Entry:
    return _same("weights", "weight", part, part.size, part.bits)


def _same(kind: str, name: str, part: Local, elements: Count, bits: int) -> Entry:
    size = _bytes(elements, bits)
    return Entry(kind, name, part.tensor, size, size)


def _bytes(elements: Any, bits: int) -> Any:
    return bytes_for(elements, bits)


def _trained(recipe: Recipe, part: Local, sizes: tuple[Count, ...], copy: int | None = None) -> Iterator[Entry]:
    """The master copy of a parameter, if there is one, and the arrays of its optimizer."""
    assert recipe.optimizer is not None
    bits = copy if recipe.masters is None else recipe.masters
    if bits:
        yield _same("masters", "master", part, math.prod(sizes), bits)
    for kept in recipe.optimizer.kept(sizes, bits or part.bits, is_matrix=part.is_matrix):
        yield _same("optimizer", kept.name, part, kept.elements, kept.bits)


def _by_rows(recipe: Recipe, parts: Sequence[Local], ways: int) -> Iterator[Entry]:
    """FSDP2: rows, of which every rank has room for as many."""
    for part in parts:
        if not part.shape:
            raise LayoutError(
                "fsdp2: a parameter without dims cannot be cut in rows, and fully_shard refuses it: give it as one dim "
                "of one element"
            )
        rows = _lengths(part.shape[0], ways)
        row, most = math.prod(part.shape[1:]), int(rows.max())
        trained = part.trained and recipe.optimizer is not None
        for kind, name, bits in (
            ("weights", "weight", part.bits),
            *([("gradients", "gradient", recipe.gradient_bits(part))] if trained else []),
        ):
            yield Entry(kind, name, part.tensor, bytes_for(rows * row, bits), bytes_for(most * row, bits))
        if trained:
            yield from _trained(recipe, part, (rows, *part.shape[1:]))


def _by_parameter(recipe: Recipe, parts: Sequence[Local], ways: int) -> Iterator[Entry]:
    """ZeroRedundancyOptimizer: the state of each parameter on one rank, the largest first to the least loaded."""
    sizes = np.zeros(ways, np.int64)
    owners = {}
    for at in sorted((at for at, part in enumerate(parts) if part.trained), key=lambda at: -parts[at].size):
        owners[at] = int(sizes.argmin())
        sizes[owners[at]] += parts[at].size
    for at, part in enumerate(parts):
        yield _weight(part)
        if at in owners and recipe.optimizer is not None:
            yield _same("gradients", "gradient", part, part.size, recipe.gradient_bits(part))
            here = (np.arange(ways) == owners[at]).astype(np.int64)
            for entry in _trained(recipe, part, part.shape):
                yield entry._replace(held=here * entry.held, allocated=here * entry.allocated)


class _Flat(NamedTuple):
    """Parameters one after the other in an array that is cut in equal parts.

    Attributes:
        starts: Where each of them begins.
        size: The size of the array, before it is padded to equal parts.
        cuts: The start and stop of each rank's part, within that size.
        chunk: The length of a part.
    """

    starts: tuple[int, ...]
    size: int
    cuts: npt.NDArray[np.int64]
    chunk: int

    def lengths(self, start: int, size: int) -> npt.NDArray[np.int64]:
        """The elements of a parameter in the part of each rank."""
        found: npt.NDArray[np.int64] = np.minimum(self.cuts[:, 1], start + size) - np.maximum(self.cuts[:, 0], start)
        return np.maximum(found, 0)


def _flat(sizes: Sequence[int], ways: int, align: int = 1, end: int = 1) -> _Flat:
    """Put arrays one after the other, each at a multiple of `align`, and the end of all at one of `end`."""
    starts, at = [], 0
    for size in sizes:
        at = _up(at, align)
        starts.append(at)
        at += size
    size = _up(at, end)
    partition = _partition(size, ways)
    return _Flat(tuple(starts), size, partition.boxes()[:, 0], partition.largest_shard_shape[0])


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _padded(
    kind: str, name: str, pieces: Sequence[tuple[Local, npt.NDArray[np.int64]]], chunk: int, bits: int
) -> Iterator[Entry]:
    """Pieces of parameters in a flat part of `chunk` elements, and what is left of it."""
    left: Any = chunk
    for part, lengths in pieces:
        yield _same(kind, name, part, lengths, bits)
        left = left - lengths
    if np.any(left):
        yield Entry(kind, "padding", None, np.zeros_like(left), bytes_for(left, bits))


def _by_units(recipe: Recipe, parts: Sequence[Local], ways: int) -> Iterator[Entry]:
    """FSDP1: the parameters of a wrapped module in one flat one."""
    units: dict[Hashable, list[Local]] = {}
    for part in parts:
        units.setdefault(part.unit, []).append(part)
    for unit, own in units.items():
        bits = own[0].bits
        if any(part.bits != bits for part in own):
            raise LayoutError(
                f"fsdp1: the unit {shown(unit)} has parameters of several dtypes, which FSDP1 does not flatten "
                "together: give as units a regular expression that tells them apart"
            )
        trained = [part for part in own if part.trained and recipe.optimizer is not None]
        if trained and not recipe.aligned and len(trained) < len(own):
            raise LayoutError(
                f"fsdp1: the unit {shown(unit)} has trained and frozen parameters, which FSDP1 flattens together only "
                "with use_orig_params: set it to true in settings"
            )
        sizes = [part.size for part in own]
        align = max(128 // (recipe.compute or bits), 1) if recipe.aligned else 1
        flat = _flat(sizes, ways, align, ways if recipe.aligned else 1)
        pieces = [(part, flat.lengths(at, part.size)) for part, at in zip(own, flat.starts, strict=True)]
        yield from _padded("weights", "weight", pieces, flat.chunk, bits)
        if not trained:
            continue
        assert recipe.optimizer is not None
        yield from _padded("gradients", "gradient", pieces, flat.chunk, recipe.gradients or bits)
        if recipe.aligned:
            for part, lengths in pieces:
                if part.trained:
                    sizes_here = part.shape if ways == 1 else (lengths,)
                    for entry in _trained(recipe, part, sizes_here):
                        is_there = (lengths > 0).astype(np.int64)
                        yield entry._replace(held=entry.held * is_there, allocated=entry.allocated * is_there)
            continue
        if recipe.masters:
            yield from _padded("masters", "master", pieces, flat.chunk, recipe.masters)
        yield from _of_flat(recipe.optimizer, pieces, flat.chunk, recipe.masters or bits)


def _of_flat(
    optimizer: Optimizer, pieces: Sequence[tuple[Local, npt.NDArray[np.int64]]], chunk: int, bits: int
) -> Iterator[Entry]:
    """The arrays of an optimizer for a flat part; those of its length belong to the parameters in it."""
    for kept in optimizer.kept((chunk,), bits):
        if isinstance(kept.elements, int) and kept.elements == chunk and kept.name != "step":
            yield from _padded("optimizer", kept.name, pieces, chunk, kept.bits)
        else:
            size = _bytes(kept.elements, kept.bits)
            yield Entry("optimizer", kept.name, None, size, size)


def _grouped(recipe: Recipe, parts: Sequence[Local]) -> list[list[Local]]:
    """The parameter groups of DeepSpeed, of those that are trained."""
    trained = [part for part in parts if part.trained]
    if recipe.groups == 1:
        return [trained] if trained else []
    both = [part for part in trained if len(part.shape) > 1], [part for part in trained if len(part.shape) < 2]
    return [group for group in both if group]


def _zero12(recipe: Recipe, parts: Sequence[Local], ways: int) -> Iterator[Entry]:
    """ZeRO 1 and 2: each group flat, masters and states in equal partitions of it."""
    for part in parts:
        yield _weight(part)
    if recipe.optimizer is None:
        return
    for group in _grouped(recipe, parts):
        bits = group[0].bits
        if any(part.bits != bits for part in group):
            raise LayoutError(
                f"{recipe.sharding}: a parameter group has several dtypes, which DeepSpeed does not take; weights is "
                "the one dtype of all"
            )
        if recipe.round_robin:
            group = [part for first in range(min(ways, len(group))) for part in group[first::ways]]
        flat = _flat([part.size for part in group], ways, 1, 2 * ways)
        pieces = [(part, flat.lengths(at, part.size)) for part, at in zip(group, flat.starts, strict=True)]
        padding = flat.size - sum(part.size for part in group)
        if padding:
            yield Entry("weights", "padding", None, 0, bytes_for(padding, bits))
        gradients = recipe.gradients or bits
        # BF16_Optimizer, which DeepSpeed takes for bfloat16 with gradients that are summed in float32, keeps both.
        if recipe.sharding == "zero1" and gradients > bits:
            for part in group:
                yield _same("gradients", "gradient", part, part.size, bits)
                yield _same("gradients", "gradient summed", part, part.size, gradients)
            if padding:
                yield Entry("gradients", "padding", None, 0, bytes_for(padding, gradients))
        else:
            yield from _padded("gradients", "gradient", pieces, flat.chunk, gradients)
        masters = 32 if recipe.masters is None else recipe.masters
        if masters:
            yield from _padded("masters", "master", pieces, flat.chunk, masters)
        yield from _of_flat(recipe.optimizer, pieces, flat.chunk, masters or bits)


def _zero3(recipe: Recipe, parts: Sequence[Local], ways: int) -> Iterator[Entry]:
    """ZeRO 3: each parameter flat and cut alone; states in sub-groups of the pieces."""
    cuts = {part.size: _lengths(part.size, ways) for part in parts}
    for part in parts:
        lengths = cuts[part.size]
        chunk = int(lengths.max())
        yield Entry("weights", "weight", part.tensor, bytes_for(lengths, part.bits), bytes_for(chunk, part.bits))
        if recipe.optimizer is not None and part.size <= recipe.persistent:
            whole = bytes_for(part.size, part.bits), bytes_for(chunk * ways, part.bits)
            yield Entry("whole", "weight after a step", part.tensor, *whole)
    if recipe.optimizer is None:
        return
    masters = 32 if recipe.masters is None else recipe.masters
    for group in _grouped(recipe, parts):
        for own in _sub_groups(group, cuts, recipe.sub_group):
            pieces = [(part, cuts[part.size]) for part in own]
            chunk = sum(int(lengths.max()) for _, lengths in pieces)
            bits = own[0].bits
            yield from _padded("gradients", "gradient", pieces, chunk, recipe.gradients or bits)
            if masters:
                yield from _padded("masters", "master", pieces, chunk, masters)
            yield from _of_flat(recipe.optimizer, pieces, chunk, masters or bits)


def _sub_groups(group: Sequence[Local], cuts: dict[int, npt.NDArray[np.int64]], most: int) -> Iterator[Sequence[Local]]:
    """Runs of parameters, each as long as its pieces have fewer than `most` elements."""
    own: list[Local] = []
    size = 0
    for part in group:
        own.append(part)
        size += int(cuts[part.size].max())
        if size >= most:
            yield own
            own, size = [], 0
    if own:
        yield own


def _buffers(recipe: Recipe, parts: Sequence[Local]) -> Iterator[list[Local]]:
    """The parameters of each buffer of Megatron: of one chunk, with one dtype of weights and gradients."""
    found: dict[tuple[Hashable, int], list[Local]] = {}
    for part in parts:
        if part.trained:
            found.setdefault((part.unit, part.bits), []).append(part)
    yield from found.values()


def _megatron_whole(recipe: Recipe, parts: Sequence[Local], ways: int) -> Iterator[Entry]:
    """Megatron without its distributed optimizer: everything whole, masters of what has 16 bits."""
    for part in parts:
        yield _weight(part)
        if part.trained and recipe.optimizer is not None:
            yield _same("gradients", "gradient", part, part.size, recipe.gradient_bits(part))
            yield from _trained(recipe, part, part.shape, 32 if part.bits == 16 else 0)


def _megatron(recipe: Recipe, parts: Sequence[Local], ways: int) -> Iterator[Entry]:
    """Megatron's distributed optimizer: parameters from the last to the first in buckets, each cut in equal parts."""
    for part in parts:
        yield _weight(part)
    if recipe.optimizer is None:
        return
    for at, own in enumerate(_buffers(recipe, parts)):
        bits, gradients = own[0].bits, recipe.gradients or own[0].bits
        masters = (32 if bits == 16 else 0) if recipe.masters is None else recipe.masters
        size = 0
        for bucket in _buckets(recipe, own[::-1], ways, is_first=at == 0):
            size += bucket.size
            for part, lengths in bucket.pieces:
                yield _same("gradients", "gradient", part, part.size, gradients)
                is_there = (lengths > 0).astype(np.int64)
                for entry in _trained(recipe, part, (lengths,), masters):
                    yield entry._replace(held=entry.held * is_there, allocated=entry.allocated * is_there)
        padding = size - sum(part.size for part in own)
        if padding:
            yield Entry("weights", "padding", None, 0, bytes_for(padding, bits))
            yield Entry("gradients", "padding", None, 0, bytes_for(padding, gradients))


class _Bucket(NamedTuple):
    """The size of a bucket, and the elements of each of its parameters on each rank."""

    size: int
    pieces: list[tuple[Local, npt.NDArray[np.int64]]]


def _buckets(recipe: Recipe, parts: Sequence[Local], ways: int, *, is_first: bool) -> Iterator[_Bucket]:
    """Fill buckets as `_ParamAndGradBuffer` does: parameters begin at multiples of 64, buckets end at whole parts."""
    step = math.lcm(ways, 128, 2**16 if recipe.high_bandwidth else 1)
    most = recipe.bucket if is_first else None
    own: list[tuple[Local, int]] = []
    at = 0

    def made(end: int) -> _Bucket:
        flat = _flat([_up(end, step)], ways)
        return _Bucket(flat.size, [(part, flat.lengths(start, part.size)) for part, start in own])

    for part in parts:
        at = _up(at, 64)
        if part.apart and own:
            yield made(at)
            own, at = [], 0
        own.append((part, at))
        at += part.size
        if part.apart or (most is not None and at >= most):
            yield made(at)
            own, at = [], 0
    if own:
        yield made(at)


@lru_cache(maxsize=4096)
def _partition(size: int, ways: int, uneven: UnevenRule = "ceil") -> Partition:
    """A flat array in equal parts, of which the last may be short or empty."""
    return TensorLayout(("ranks",), _ranks(ways)).partition((size,), uneven)


@lru_cache(maxsize=64)
def _ranks(ways: int) -> DeviceMesh:
    return DeviceMesh((ways,), ("ranks",))


@lru_cache(maxsize=4096)
def _lengths(size: int, ways: int) -> npt.NDArray[np.int64]:
    """The elements of each rank, of so many that are cut in equal parts."""
    bounds = _partition(size, ways).boxes()[:, 0]
    lengths: npt.NDArray[np.int64] = bounds[:, 1] - bounds[:, 0]
    lengths.flags.writeable = False
    return lengths


_WAYS: dict[str, Callable[[Recipe, Sequence[Local], int], Iterator[Entry]]] = {
    "none": _whole,
    "ddp": _whole,
    "zero-redundancy": _by_parameter,
    "zero1": _zero12,
    "zero2": _zero12,
    "zero3": _zero3,
    "fsdp1": _by_units,
    "fsdp2": _by_rows,
    "hsdp": _by_rows,
    "megatron": _megatron,
    "megatron-ddp": _megatron_whole,
}
