"""Plans between orders of a fused weight: q, k and v interleaved, blocked, or in separate tensors."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .._drawn import Drawn
from .._dtypes import itemsize_of
from .._fork import importing
from .._text import bytes_text, counted, shown
from .._types import Array
from ..errors import LayoutError, SizeOverflowError
from ..packed.parts import segments_of
from ..partition import Partition
from ..piece import Piece
from ..tiling import Tiling
from .balance import balanced
from .orders import check_packed, named_dims
from .plan import ReshardPlan
from .run import checked_arrays
from .source import ShardSource

if TYPE_CHECKING:
    from ..show.picture import Picture

__all__ = ["RefitPlan", "plan_refit"]

#: One partition in which several tensors are packed, or the partitions of the tensors, by name.
RefitSide = Partition | Mapping[str, Partition]


class RefitPlan(Drawn):
    """The moves from one order of packed tensors to another: a plan for each tensor; `plan_refit` makes one.

    Immutable, comparable, hashable and picklable; `plans` has the plan of each tensor by its name.
    """

    __slots__ = ("_dst", "_plans", "_src")

    def __init__(self, src: RefitSide, dst: RefitSide) -> None:
        sides = [_checked(name, side) for name, side in (("src", src), ("dst", dst))]
        names = [[name for name, _ in side] for side in sides]
        if set(names[0]) != set(names[1]):
            raise LayoutError(f"src has the tensors {shown(names[0])}, but dst has {shown(names[1])}")
        # Copies: the caller's mapping may change.
        self._src, self._dst = (side if isinstance(side, Partition) else dict(side) for side in (src, dst))
        self._plans = _planned(_frozen(self._src), _frozen(self._dst))

    @property
    def src(self) -> Partition | dict[str, Partition]:
        """The partitions before the change: one, or one for each tensor by name."""
        return self._src if isinstance(self._src, Partition) else dict(self._src)

    @property
    def dst(self) -> Partition | dict[str, Partition]:
        """The partitions after the change: one, or one for each tensor by name."""
        return self._dst if isinstance(self._dst, Partition) else dict(self._dst)

    @property
    def plans(self) -> dict[str, ReshardPlan]:
        """The plan of each tensor, by its name."""
        return dict(self._plans)

    def bytes_received(self, dtype: npt.DTypeLike) -> npt.NDArray[np.int64]:
        """Return the bytes of all tensors that each destination device receives: int64 (destination devices,).

        Raises:
            LayoutError: if the tensors of `dst` are on different devices.
            SizeOverflowError: if all that is sent is over 2**63 - 1 bytes.
        """
        if len({plan.dst.holders for plan in self._plans.values()}) > 1:
            raise LayoutError("the tensors of dst are on different devices; plans has the plan of each tensor")
        if self.total_bytes(dtype) > 2**63 - 1:
            raise SizeOverflowError(f"the bytes that all devices receive are over the limit of {2**63 - 1}")
        each = [plan.bytes_received(dtype) for plan in self._plans.values()]
        total: npt.NDArray[np.int64] = np.sum(each, axis=0, dtype=np.int64)
        return total

    def total_bytes(self, dtype: npt.DTypeLike) -> int:
        """Return the bytes that move in all."""
        return sum(plan.total_bytes(dtype) for plan in self._plans.values())

    def run(self, src_shards: Any) -> Any:
        """Carry out the plan on numpy arrays in the memory of this process.

        Args:
            src_shards: the arrays of the source devices, in device-index order, or a `ShardedArray`; for separate
                tensors, these by name.

        Returns:
            New arrays of the destination devices, as a list; for separate tensors a dict of lists by name.

        Raises:
            LayoutError: if an array does not have the shape that its device holds.

        >>> import numpy as np
        >>> from shardwise import DeviceMesh, TensorLayout, packed, plan_refit
        >>> mesh = DeviceMesh((1,), ("tp",))
        >>> one, other = (
        ...     TensorLayout((packed.qkv(4, 2, 1, "tp", order=order),), mesh).partition((8,))
        ...     for order in ("interleaved", "blocked")
        ... )
        >>> plan_refit(one, other).run([np.array(["q0", "q1", "k0", "v0", "q2", "q3", "k1", "v1"])])[0].tolist()
        ['q0', 'q1', 'q2', 'q3', 'k0', 'k1', 'v0', 'v1']
        """
        if isinstance(self._src, Partition):
            whole = _arrays("src_shards", src_shards, self._src)
            sources = dict.fromkeys(self._plans, whole)
        else:
            if not isinstance(src_shards, Mapping) or src_shards.keys() != self._src.keys():
                raise LayoutError(f"src_shards must be a mapping with the arrays of each of {shown(list(self._src))}")
            sources = {
                name: _arrays(f"src_shards[{name!r}]", src_shards[name], side) for name, side in self._src.items()
            }
        if not isinstance(self._dst, Partition):
            return {name: self._plans[name].run(sources[name]) for name in self._dst}
        dtype = next(iter(sources.values()))[0].dtype
        for name, arrays in sources.items():
            if arrays[0].dtype != dtype:
                raise LayoutError(f"src_shards[{name!r}] is of dtype {arrays[0].dtype}, but others are of {dtype}")
        # Zeros, since nothing writes to padding.
        results = [np.zeros(shape, dtype) for shape in self._dst.holder_shapes()]
        for name, plan in self._plans.items():
            plan.run(sources[name], out=results)
        return results

    def explain(self, dtype: npt.DTypeLike = np.float32) -> str:
        """Describe the plan in a few lines: what moves of each tensor, what stays, and the busiest device.

        >>> from shardwise import DeviceMesh, TensorLayout, packed
        >>> def partition(order, devices):
        ...     mesh = DeviceMesh((devices,), ("tp",))
        ...     return TensorLayout((packed.qkv(4, 2, 8, "tp", order=order), None), mesh).partition((64, 8))
        >>> print(plan_refit(partition("interleaved", 2), partition("blocked", 4)).explain())
        3 tensors, 2.0 KiB of float32, go from 2 devices to 4.
        q: 3 boxes move, 768 B; 256 B stays in place.
        k: 3 boxes move, 768 B; 256 B stays in place.
        v: 3 boxes move, 768 B; 256 B stays in place.
        """
        size = sum(plan.dst.size for plan in self._plans.values())
        itemsize = itemsize_of(dtype)
        senders, receivers = (
            len({label for plan in self._plans.values() for label in getattr(plan, side).holders})
            for side in ("src", "dst")
        )
        verb = "goes" if len(self._plans) == 1 else "go"
        lines = [
            f"{counted(len(self._plans), 'tensor')}, {bytes_text(size * itemsize)} of {np.dtype(dtype)}, {verb} from "
            f"{counted(senders, 'device')} to {receivers}."
        ]
        for name, plan in self._plans.items():
            verb = "moves" if len(plan) == 1 else "move"
            kept = bytes_text(sum(plan.bytes_kept(dtype).tolist()))
            moved = f"{counted(len(plan), 'box', 'boxes')} {verb}, {bytes_text(plan.total_bytes(dtype))}"
            lines.append(f"{name}: {moved if len(plan) else 'nothing moves'}; {kept} stays in place.")
        return "\n".join(lines)

    def _picture(self) -> Picture:
        with importing:
            from .drawn import loads_picture, plan_picture

        if len(self._plans) == 1:
            return plan_picture(next(iter(self._plans.values())))
        received: dict[Any, int] = {}
        for plan in self._plans.values():
            for holder, elements in enumerate(plan.bytes_received("uint8").tolist()):
                label = plan.dst.holder_label(holder)
                received[label] = received.get(label, 0) + elements
        return loads_picture(
            f"a plan for {counted(len(self._plans), 'tensor')}, elements by holder",
            {"received": received},
            "{:,}".format,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RefitPlan):
            return NotImplemented
        return self is other or (self._src == other._src and self._dst == other._dst)

    def __hash__(self) -> int:
        # Compared like mappings: in any order.
        return hash(tuple(side if isinstance(side, Partition) else frozenset(side.items()) for side in self._sides))

    @property
    def _sides(self) -> tuple[RefitSide, RefitSide]:
        return self._src, self._dst

    def __repr__(self) -> str:
        return f"plan_refit({self._src!r}, {self._dst!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return plan_refit, self._sides


def plan_refit(src: RefitSide, dst: RefitSide) -> RefitPlan:
    """Plan how to go from one order of a fused weight to another, tensor by tensor.

    Args:
        src: the order now: a partition with a packed dim whose parts have names (`packed.qkv` and `packed.gate_up`
            give them), or a mapping from these names to the partitions of separate tensors.
        dst: the order afterwards, in the same two forms.

    Raises:
        LayoutError: if a partition does not state its order, because its parts have no names (the same shape in the
            wrong order passes every check of shapes); if the names or the sizes of the two sides differ.
        SizeOverflowError: if a device sends or receives over 2**63 - 1 elements in all.

    The whole tensors differ in the order of their rows; each row is moved once to each device that should hold it. Each
    box is sent by the replica that has sent the fewest elements over all tensors, as in `plan_model`. Equal partitions,
    as in the layers of a model, are planned once.

    >>> from shardwise import DeviceMesh, TensorLayout, packed
    >>> def partition(order, devices):
    ...     mesh = DeviceMesh((devices,), ("tp",))
    ...     return TensorLayout((packed.qkv(64, 8, 128, "tp", order=order), None), mesh).partition((10240, 8192))
    >>> plan = plan_refit(partition("interleaved", 8), partition("blocked", 16))
    >>> {name: len(one) for name, one in plan.plans.items()}
    {'q': 15, 'k': 15, 'v': 15}
    """
    return RefitPlan(src, dst)


def _checked(argument: str, side: Any) -> list[tuple[str, Partition]]:
    """Return the names of the tensors, each with its partition."""
    if isinstance(side, Mapping):
        for name, partition in side.items():
            if not isinstance(name, str) or not isinstance(partition, Partition):
                raise TypeError(
                    f"{argument} must map names to Partitions, got {shown(name)}: {type(partition).__name__}"
                )
        if not side:
            raise LayoutError(f"{argument} is an empty mapping")
        return list(side.items())
    if not isinstance(side, Partition):
        raise TypeError(
            f"{argument} must be a Partition or a mapping of names to Partitions, got {type(side).__name__}"
        )
    named = list(named_dims(side))
    if len(named) != 1:
        raise LayoutError(
            f"{argument} must have one packed dim whose parts have names, but has {len(named)}: nothing "
            f"states their order, and the shape {shown(side.shape)} does not show it"
        )
    return [(name, side) for name in named[0][1].names]


def _frozen(side: RefitSide) -> Partition | tuple[tuple[str, Partition], ...]:
    return side if isinstance(side, Partition) else tuple(side.items())


@lru_cache(maxsize=256)  # the layers of a model share their partitions
def _planned(src: Any, dst: Any) -> dict[str, ReshardPlan]:
    before, after = _tilings(src), _tilings(dst)
    for name, tiling in after.items():
        if tiling.shape != before[name].shape:
            raise LayoutError(f"{name} is of shape {before[name].shape} in src, but {tiling.shape} in dst")
    # In an order that does not depend on that of the mappings, since it decides who sends what.
    pairs = [(name, before[name], after[name]) for name in sorted(after)]
    for _, *ends in pairs:
        check_packed(*ends)
    *_, senders = balanced(pairs, list(range(len(pairs))), [1] * len(pairs))
    plans = {name: ReshardPlan(src, dst, who) for (name, src, dst), who in zip(pairs, senders, strict=True)}
    return {name: plans[name] for name in after}


def _tilings(side: Partition | tuple[tuple[str, Partition], ...]) -> dict[str, Tiling]:
    """Return the tiling of each tensor."""
    if not isinstance(side, Partition):
        return dict(side)
    ((dim, spec),) = named_dims(side)
    begins, rows = side.all_pieces()
    labels, shapes = side.holders, side.holder_shapes()
    found = {}
    for name, segments in segments_of(spec, side.shape[dim]).items():
        places, starts, lengths = segments.T.tolist()
        shape = (*side.shape[:dim], sum(lengths), *side.shape[dim + 1 :])
        boxes: dict[Any, list[Piece]] = {}
        for device, label in enumerate(labels):
            held: list[Piece] = []
            for row in rows[begins[device] : begins[device + 1]].tolist():
                held += _within(row, dim, places, starts, lengths)
            # A device that holds nothing of it still has an array.
            boxes[label] = held or [Piece((slice(0, 0),) * len(shape), (0,) * len(shape))]
        found[name] = Tiling.from_boxes(shape, boxes, replicas=True, arrays=dict(zip(labels, shapes, strict=True)))
    return found


def _within(
    row: Sequence[Sequence[int]], dim: int, places: list[int], starts: list[int], lengths: list[int]
) -> list[Piece]:
    """Return the part of a tensor's piece (start, stop and local start along each dim) that is in these segments."""
    start, stop, local = row[dim]
    pieces = []
    for i in range(max(bisect.bisect_right(starts, start) - 1, 0), len(starts)):
        if starts[i] >= stop:
            break
        low, high = max(start, starts[i]), min(stop, starts[i] + lengths[i])
        if low < high:
            at = places[i] + low - starts[i]
            sides = [slice(begin, end) for begin, end, _ in row]
            sides[dim] = slice(at, at + high - low)
            begin = [origin for *_, origin in row]
            begin[dim] = local + low - start
            pieces.append(Piece(tuple(sides), tuple(begin)))
    return pieces


def _arrays(name: str, arrays: Any, partition: Partition) -> list[Array]:
    if isinstance(arrays, ShardSource):
        if arrays.tiling != partition:
            raise LayoutError(f"{name} is not cut as the plan's source is")
        return arrays.shard_arrays()
    return checked_arrays(name, arrays, partition, None)
