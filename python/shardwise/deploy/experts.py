"""The experts of each rank of expert parallelism, redundant ones included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from .._arguments import check_items, instance, integer
from .._core import least_assignments
from .._text import counted, shown
from ..errors import LayoutError

__all__ = ["ExpertMap", "balanced_experts", "least_moves"]

#: The precision of each balancer: SGLang's, which is DeepSeek's own, uses single precision; vLLM's uses double.
Balancer = Literal["sglang", "vllm"]

_MOST_SLOTS = 1 << 20


@dataclass(frozen=True)
class ExpertMap:
    """The experts of one layer on each rank of expert parallelism.

    Args:
        slots: for each rank the numbers of its experts, in the order in which it stacks them. An expert may be on
            several ranks, and more than once on one.

    Raises:
        LayoutError: if a number is negative, or an expert below the largest is on no rank.

    `where` is the list that rules name: `at = { ep = "where[e]" }`.

    >>> experts = ExpertMap.redundant(4, 2, ep=3)
    >>> experts.slots, experts.where
    (((0, 1), (2, 3), (0, 1)), ((0, 2), (0, 2), (1,), (1,)))
    """

    slots: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        rows = tuple(tuple(integer(f"slots[{r}]", e) for e in row) for r, row in enumerate(self.slots))
        held = {expert for row in rows for expert in row}
        if not rows:
            raise LayoutError("slots is empty; give the experts of at least one rank")
        if held and min(held) < 0:
            raise LayoutError(f"slots has expert {min(held)}; experts are counted from 0")
        if held and len(held) != max(held) + 1:
            missing = next(expert for expert in range(len(held) + 1) if expert not in held)
            raise LayoutError(f"slots has expert {max(held)}, but no expert {missing}")
        object.__setattr__(self, "slots", rows)

    @classmethod
    def even(cls, num_experts: int, ep: int) -> ExpertMap:
        """Return the experts of each rank: the same number of consecutive ones, as Megatron-Core does.

        Raises:
            LayoutError: if `ep` does not divide the experts.

        >>> ExpertMap.even(4, ep=2).slots
        ((0, 1), (2, 3))
        """
        num_experts, ep = _sizes(num_experts, ep)
        if num_experts % ep:
            raise LayoutError(f"num_experts is {num_experts}, which is not divisible by ep, {ep}")
        return cls.linear(num_experts, ep)

    @classmethod
    def linear(cls, num_experts: int, ep: int) -> ExpertMap:
        """Return consecutive experts for each rank; if they do not divide, the first ranks get one more, as in vLLM.

        >>> ExpertMap.linear(5, ep=3).slots
        ((0, 1), (2, 3), (4,))
        """
        num_experts, ep = _sizes(num_experts, ep)
        return cls(tuple(map(tuple, np.array_split(np.arange(num_experts), ep))))

    @classmethod
    def round_robin(cls, num_experts: int, ep: int) -> ExpertMap:
        """Return experts dealt to the ranks in turn: vLLM's `round_robin`.

        Raises:
            LayoutError: if there are more ranks than the number of experts plus one: vLLM fails on the others.

        >>> ExpertMap.round_robin(5, ep=2).slots
        ((0, 2, 4), (1, 3))
        """
        num_experts, ep = _sizes(num_experts, ep)
        if ep > num_experts + 1:
            raise LayoutError(f"ep is {ep}, but round_robin has no experts for ranks beyond {num_experts}")
        return cls(tuple(tuple(range(rank, num_experts, ep)) for rank in range(ep)))

    @classmethod
    def redundant(cls, num_experts: int, redundant: int, ep: int) -> ExpertMap:
        """Return the map with which vLLM and SGLang begin, without a load: each expert once, then the first ones again.

        Args:
            num_experts: the experts of the model.
            redundant: further slots; number i has expert `i % num_experts`.
            ep: the ranks; where the slots do not divide, the first ranks have one more.
        """
        num_experts, ep = _sizes(num_experts, ep)
        extra = integer("redundant", redundant)
        if not 0 <= extra <= _MOST_SLOTS:
            raise LayoutError(f"redundant is {shown(extra)}; it must be from 0 to {_MOST_SLOTS}")
        experts = [*range(num_experts), *(i % num_experts for i in range(extra))]
        return cls.of_physical(experts, ep)

    @classmethod
    def of_physical(cls, physical_to_logical: Sequence[int], ep: int) -> ExpertMap:
        """Return the map of an engine's `physical_to_logical_map`: the expert of each slot, rank after rank.

        >>> ExpertMap.of_physical([2, 0, 1, 2], ep=2).slots
        ((2, 0), (1, 2))
        """
        parts = ExpertMap.linear(len(physical_to_logical), ep).slots
        return cls(tuple(tuple(physical_to_logical[slot] for slot in part) for part in parts))

    @property
    def ep(self) -> int:
        """The number of ranks."""
        return len(self.slots)

    @property
    def num_experts(self) -> int:
        """The number of experts, each counted once."""
        return max((expert for row in self.slots for expert in row), default=-1) + 1

    @property
    def where(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each expert, in ascending order."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for rank, row in enumerate(self.slots):
            for expert in dict.fromkeys(row):
                found[expert].append(rank)
        return tuple(map(tuple, found))

    def moved_from(self, before: ExpertMap) -> int:
        """Count the experts that ranks receive if this map comes after another: those that a rank did not hold.

        >>> ExpertMap.linear(4, ep=2).moved_from(ExpertMap.round_robin(4, ep=2))
        2
        """
        instance("before", before, ExpertMap)
        old = (*before.slots, *((),) * self.ep)
        return sum(len({*row} - {*old[rank]}) for rank, row in enumerate(self.slots))

    @property
    def physical_to_logical(self) -> tuple[int, ...]:
        """The expert in each slot, over all ranks."""
        return tuple(expert for row in self.slots for expert in row)


def least_moves(before: Sequence[ExpertMap], after: Sequence[ExpertMap], *, nodes: int = 1) -> tuple[ExpertMap, ...]:
    """Return the maps `after` with the ranks' sets and slots permuted, so that the fewest experts move.

    A balancer says which experts are together, and numbers the sets in any order; the load does not depend on which
    rank has which set. Of all ways to give the sets to ranks, this is one in which ranks receive the fewest experts.
    The experts that a rank keeps stay in their slots.

    Args:
        before: the experts of each layer now.
        after: the experts of each layer as a balancer gives them. If there are more ranks than before, the new
            ranks begin without experts; if there are fewer, the first ranks remain.
        nodes: the number of nodes; each has the same number of consecutive ranks. Experts that are together on a node
            stay together.

    Raises:
        LayoutError: if the two have different numbers of layers, or different experts; if ranks do not divide among
            nodes.

    >>> now = balanced_experts([[90, 40, 10, 10]], slots=6, ep=2)
    >>> new = balanced_experts([[40, 90, 10, 10]], slots=6, ep=2)
    >>> best = least_moves(now, new)
    >>> now[0].slots, new[0].slots, best[0].slots
    (((1, 0, 2), (0, 0, 3)), ((0, 1, 2), (1, 1, 3)), ((1, 0, 2), (1, 1, 3)))
    """
    nodes = integer("nodes", nodes)
    if len(before) != len(after):
        raise LayoutError(f"before has {counted(len(before), 'layer')}, and after {len(after)}")
    check_items("before", before, ExpertMap)
    check_items("after", after, ExpertMap)
    found = []
    for layer, (old, new) in enumerate(zip(before, after, strict=True)):
        if old.num_experts != new.num_experts:
            raise LayoutError(
                f"layer {layer} has {counted(old.num_experts, 'expert')} before, and {new.num_experts} after"
            )
        if nodes < 1 or new.ep % nodes:
            raise LayoutError(f"nodes is {nodes}, which does not divide the {new.ep} ranks of layer {layer}")
        rows = (*old.slots, *((),) * new.ep)[: new.ep]
        sets = _nearest(rows, new.slots, new.num_experts, nodes)
        found.append(ExpertMap(tuple(map(_in_place, rows, (new.slots[one] for one in sets)))))
    return tuple(found)


def _nearest(old: Sequence[tuple[int, ...]], new: Sequence[tuple[int, ...]], experts: int, nodes: int) -> list[int]:
    """Return the set of each rank for which the fewest experts move: within nodes, whose sets may be exchanged too."""
    ranks, each = len(old), len(old) // nodes
    where: list[list[int]] = [[] for _ in range(experts)]
    for rank, row in enumerate(old):
        for expert in {*row}:
            where[expert].append(rank)
    # For each rank and set the experts of the set that the rank lacks.
    costs = np.empty((ranks, ranks), np.int64)
    for at, row in enumerate(new):
        wanted = {*row}
        costs[:, at] = len(wanted)
        for expert in wanted:
            for rank in where[expert]:
                costs[rank, at] -= 1
    blocks = costs.reshape(nodes, each, nodes, each).transpose(0, 2, 1, 3)
    inner = least_assignments(blocks.reshape(-1), each).reshape(nodes, nodes, each)
    outer = np.take_along_axis(blocks, inner[..., None], 3).sum((2, 3))
    of_node = least_assignments(outer.reshape(-1), nodes)[0].tolist()
    return [there * each + int(at) for here, there in enumerate(of_node) for at in inner[here, there]]


def _in_place(old: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...]:
    """Return the experts of a rank, those that it had in their old slots, the others in the free slots."""
    left = list(new)
    slots: list[int | None] = [None] * len(new)
    for slot, expert in enumerate(old[: len(new)]):
        if expert in left:
            left.remove(expert)
            slots[slot] = expert
    return tuple(left.pop(0) if expert is None else expert for expert in slots)


def balanced_experts(
    load: Any, slots: int, ep: int, *, groups: int = 1, nodes: int = 1, balancer: Balancer = "vllm"
) -> tuple[ExpertMap, ...]:
    """Return the experts of each layer where redundant ones balance a load: DeepSeek's EPLB.

    Args:
        load: the load of each expert in each layer, of shape (layers, experts).
        slots: the slots of all ranks, redundant ones included; a multiple of `ep`.
        ep: the ranks; a multiple of `nodes`.
        groups: groups of experts that should stay on one node; used only if it is a multiple of `nodes`.
        nodes: the nodes among which the ranks are divided equally.
        balancer: the engine whose algorithm is used: `"vllm"` (`DefaultEplbPolicy`) or `"sglang"`
            (`eplb_algorithms/deepseek.py`). They differ in precision, and in the order of experts of equal load.

    Raises:
        LayoutError: if sizes do not divide, or there are fewer slots than experts.

    For vLLM, experts of equal load are in the order that numpy's sort gives on this machine, because vLLM sorts with
    it; for SGLang in that of PyTorch on a CPU.

    >>> balanced_experts([[90, 40, 10, 10]], slots=6, ep=2)[0].slots
    ((1, 0, 2), (0, 0, 3))
    """
    if instance("balancer", balancer, str) not in get_args(Balancer):
        raise LayoutError(
            f"balancer is {shown(balancer)}; it must be one of {', '.join(map(repr, get_args(Balancer)))}"
        )
    single = balancer == "sglang"
    weight = np.asarray(load, np.float32)
    if weight.ndim != 2 or not weight.size or not np.isfinite(weight).all() or (weight < 0).any():
        raise LayoutError(f"load must be finite numbers from 0, of shape (layers, experts), got shape {weight.shape}")
    layers, experts = weight.shape
    slots, ep = integer("slots", slots), integer("ep", ep)
    groups, nodes = integer("groups", groups), integer("nodes", nodes)
    if min(slots, ep, groups, nodes) < 1 or slots > _MOST_SLOTS:
        raise LayoutError(f"slots, ep, groups and nodes must be from 1 to {_MOST_SLOTS}")
    if groups % nodes:
        groups = nodes = 1
    checks = (("experts", experts, "groups", groups), ("ep", ep, "nodes", nodes), ("slots", slots, "ep", ep))
    for what, size, by, divisor in checks:
        if size % divisor:
            raise LayoutError(f"{what} is {size}, which is not divisible by {by}, {divisor}")
    if slots < experts:
        raise LayoutError(f"slots is {slots}; it must be at least the number of experts, {experts}")
    # Groups to nodes, then redundant experts within each node, then slots to the ranks of the node.
    of_group = experts // groups
    node, at = _packed(weight.reshape(layers, groups, of_group).sum(-1), nodes, single)
    placed = ((node * (groups // nodes) + at) * of_group)[..., None] + np.arange(of_group)
    to_expert = _inverse(placed.reshape(layers, experts))
    in_node = np.take_along_axis(weight, to_expert, 1).reshape(-1, experts // nodes)
    precision = np.float32 if single else np.float64
    copies, counts = _replicated(in_node, slots // nodes, precision)
    shared = in_node / counts.astype(precision)
    rank, at = _packed(np.take_along_axis(shared, copies, 1), ep // nodes, single)
    order = _inverse(rank * (slots // ep) + at)
    within = np.take_along_axis(copies, order, 1).reshape(layers, nodes, -1)
    held = (within + np.arange(0, experts, experts // nodes)[:, None]).reshape(layers, -1)
    physical = np.take_along_axis(to_expert, held, 1)
    return tuple(ExpertMap.of_physical(row, ep) for row in physical.tolist())


def _packed(weight: npt.NDArray[Any], packs: int, single: bool) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the pack of each item, and its position there: the heaviest first, to the lightest pack with room."""
    layers, items = weight.shape
    room = items // packs
    pack = np.tile(np.arange(items), (layers, 1))
    if room == 1:
        return pack, np.zeros_like(pack)
    at = np.zeros_like(pack)
    sorted_by_numpy = None if single else np.argsort(-weight, axis=-1)
    for layer in range(layers):
        held, sums = [0] * packs, [0.0] * packs
        row: list[float] = weight[layer].astype(np.float64).tolist()
        for item in _descending(row) if sorted_by_numpy is None else sorted_by_numpy[layer].tolist():
            lightest = min((one for one in range(packs) if held[one] < room), key=sums.__getitem__)
            pack[layer, item], at[layer, item] = lightest, held[lightest]
            sums[lightest] += row[item]
            held[lightest] += 1
    return pack, at


def _descending(keys: list[float]) -> list[int]:
    """Return the positions of keys, largest first, in the order of C++'s `std::sort`, with which PyTorch sorts.

    That is not stable: where keys are equal, how GNU's library swaps decides. So its steps are repeated here: parts of
    up to 16 are left for a last pass of insertions, longer ones are parted at the median of three.
    """
    order = list(range(len(keys)))

    def comes_before(one: int, other: int) -> bool:
        return keys[order[one]] > keys[order[other]]

    parts = [(0, len(order))]
    while parts:
        first, stop = parts.pop()
        while stop - first > 16:
            low, middle, high = first + 1, first + (stop - first) // 2, stop - 1
            if comes_before(low, middle):
                median = middle if comes_before(middle, high) else high if comes_before(low, high) else low
            else:
                median = low if comes_before(low, high) else high if comes_before(middle, high) else middle
            order[first], order[median] = order[median], order[first]
            left, right = first + 1, stop
            while True:
                while comes_before(left, first):
                    left += 1
                right -= 1
                while comes_before(first, right):
                    right -= 1
                if left >= right:
                    break
                order[left], order[right] = order[right], order[left]
                left += 1
            parts.append((left, stop))
            stop = left
    # Insertions do not change the order of equal keys, as a stable sort does not.
    return sorted(order, key=keys.__getitem__, reverse=True)


def _replicated(
    weight: npt.NDArray[Any], slots: int, precision: Any
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the expert of each slot, and the slots of each expert: each further slot goes to the largest share."""
    layers, experts = weight.shape
    of_slot = np.tile(np.arange(slots), (layers, 1))
    counts = np.ones((layers, experts), np.int64)
    every = np.arange(layers)
    for slot in range(experts, slots):
        largest = np.argmax(weight / counts.astype(precision), axis=-1)
        of_slot[:, slot] = largest
        counts[every, largest] += 1
    return of_slot, counts


def _inverse(order: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    inverse = np.empty_like(order)
    np.put_along_axis(inverse, order, np.broadcast_to(np.arange(order.shape[1]), order.shape), 1)
    return inverse


def _sizes(num_experts: int, ep: int) -> tuple[int, int]:
    num_experts, ep = integer("num_experts", num_experts), integer("ep", ep)
    for name, size in (("num_experts", num_experts), ("ep", ep)):
        if not 1 <= size <= _MOST_SLOTS:
            raise LayoutError(f"{name} is {shown(size)}; it must be from 1 to {_MOST_SLOTS}")
    return num_experts, ep
