"""The flat partitions of the ranks of a ZeRO optimizer: their contents, and the place of each parameter's elements."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ...._text import counted, shown
from ...._types import Numbers
from ....errors import ParseError
from ...data.text import checked_name, checked_shape
from ...tensors.stored import UnsupportedError
from .deepspeed_files import ReadFile
from .pickles import state_of, torch_sizes
from .tensors import SavedTensor, dict_of, items_within

__all__ = [
    "GroupShapes",
    "RankArrays",
    "Spans",
    "group_shapes",
    "parameters_of_groups",
    "rank_arrays",
    "step_elsewhere",
]

#: For each group, or sub-group, the shapes of its parameters by name.
GroupShapes = list[dict[str, tuple[int, ...]]]


class RankArrays(NamedTuple):
    """The flat arrays of a rank.

    Attributes:
        values: The values of its optimizer.
        masters: The masters of each group, or of each sub-group.
        states: The states of each group, or sub-group, by kind.
        groups: The groups of the optimizer; `None` if they are not in the file.
    """

    file: ReadFile
    values: dict[str, Any]
    masters: list[SavedTensor]
    states: list[dict[str, Any]]
    groups: list[dict[str, Any]] | None


def group_shapes(file: ReadFile) -> GroupShapes:
    """Return the shapes of the parameters of each group, or sub-group."""
    said = file.values.get("param_shapes")
    if not isinstance(said, list):
        raise ParseError(f"{file.path}: has no list param_shapes, which names the parameters of the partitions")
    found: GroupShapes = []
    for group in said:
        shapes = dict_of(group).items()
        found.append(
            {
                checked_name(name, file.path): checked_shape(torch_sizes(shape), 64, name, file.path)
                for name, shape in shapes
            }
        )
    return found


def rank_arrays(file: ReadFile) -> RankArrays:
    """Return the flat arrays in the file of a rank's optimizer."""
    said = dict_of(file.values.get("optimizer_state_dict"))
    inner = dict_of(said.get("optimizer_state_dict" if "fp32_flat_groups" in said else "base_optimizer_state"))
    masters = said.get("fp32_flat_groups", said.get("single_partition_of_fp32_groups"))
    if not isinstance(masters, list):
        raise UnsupportedError(
            f"{file.path}: has neither single_partition_of_fp32_groups nor fp32_flat_groups: it is of an optimizer, or "
            "of a version of DeepSpeed, that is not read"
        )
    if said.get("ds_zero_partition_groups"):
        raise UnsupportedError(
            f"{file.path}: has ds_zero_partition_groups, which is not read: experts are partitioned among "
            "other ranks than the rest"
        )
    flats = []
    for number, value in enumerate(masters):
        flat = file.container.tensor(value, f"master {number}")
        if flat is None:
            raise ParseError(f"{file.path}: the master of group {number} is not a tensor")
        flats.append(flat)
    listed = said.get("base_optimizer_state")
    if isinstance(listed, list):  # Of elastic checkpoints: states alone, one for each group.
        states, groups = [dict_of(state) for state in listed], None
    else:
        held = dict_of({f"{key}": value for key, value in items_within(inner.get("state")) or ()})
        states = [dict_of(held.get(str(number))) for number in range(len(flats))]
        groups = [dict_of(group) for _, group in items_within(inner.get("param_groups")) or ()]
    if len(states) != len(flats):
        raise ParseError(
            f"{file.path}: has {counted(len(flats), 'master')} and the states of {counted(len(states), 'group')}"
        )
    return RankArrays(file, said, flats, states, groups)


def parameters_of_groups(part: RankArrays, layout: GroupShapes) -> list[list[str]]:
    """Return the names of the parameters of each group of the optimizer; of stage 3, those of its sub-groups."""
    groups = part.groups or []
    if "fp32_flat_groups" not in part.values:
        if len(groups) not in (0, len(layout)):
            raise ParseError(f"{part.file.path}: has {counted(len(groups), 'group')}; param_shapes has {len(layout)}")
        return [list(group) for group in layout[: len(groups)]]
    found, seen = [], 0
    for group in groups:
        numbers = torch_sizes(group.get("params"))
        if numbers is None or any(number >= len(layout) for number in numbers):
            raise ParseError(
                f"{part.file.path}: the sub-groups {shown(group.get('params'))} are not those of param_shapes"
            )
        found.append([name for number in numbers for name in layout[number]])
        seen += len(numbers)
    if groups and seen != len(layout):
        raise ParseError(
            f"{part.file.path}: its groups have {counted(seen, 'sub-group')}; param_shapes has {len(layout)}"
        )
    return found


def step_elsewhere(part: RankArrays, groups: list[dict[str, Any]], members: list[list[str]], number: int) -> Any:
    """Return a group's step if no state holds it: older fused optimizers keep it for all groups, or in the group."""
    step = part.values.get("base_optimizer_state_step")
    if step is None and len(groups) == len(members) == len(part.masters):
        step = groups[number].get("step") or None
    return step if type(step) in (int, float) else None


class Spans:
    """The place of each parameter's elements in the flat arrays of the ranks."""

    def __init__(self, partitions: list[list[RankArrays]], layouts: list[GroupShapes]) -> None:
        self._partitions = partitions
        self._layouts = layouts
        self.is_each = "fp32_flat_groups" in partitions[0][0].values
        self._begins: list[list[dict[str, int]]] = []
        self._sizes: list[list[int]] = []
        self._tables: dict[tuple[int, str], Numbers] = {}
        for row, layout in zip(partitions, layouts, strict=True):
            for rank, part in enumerate(row):
                if len(part.masters) != len(layout):
                    raise ParseError(
                        f"{part.file.path}: has {counted(len(part.masters), 'master')}; param_shapes has "
                        f"{counted(len(layout), 'group')}"
                    )
                self._check_world(part, len(row))
                if part.groups != row[0].groups and rank and _hyper(part) != _hyper(row[0]):
                    raise ParseError(
                        f"{part.file.path}: its param_groups differ from those of {row[0].file.path.name}: it is of "
                        "another step"
                    )
            begins, sizes = [], []
            for number, group in enumerate(layout):
                found, total = self._placed(row, number, group)
                begins.append(found)
                sizes.append(total if self.is_each else self._partition_size(row, number, total))
                if self.is_each:
                    self._check_lengths(row, number, [part.masters[number].shape[0] for part in row], total)
            self._begins.append(begins)
            self._sizes.append(sizes)
            if not self.is_each:
                for rank, part in enumerate(row):
                    self._check_named(part, rank, sizes, layout)

    def _check_world(self, part: RankArrays, world: int) -> None:
        count = part.values.get("partition_count")
        counts = [count] if isinstance(count, int) else [size for _, size in items_within(count) or ()]
        wrong = next((size for size in counts if size != world), None)
        if wrong is not None:
            raise ParseError(
                f"{part.file.path}: is of {shown(wrong)} partitions; there are files of "
                f"{counted(world, 'data-parallel rank')}"
            )

    def _placed(
        self, row: list[RankArrays], number: int, group: dict[str, tuple[int, ...]]
    ) -> tuple[dict[str, int], int]:
        listed = row[0].values.get("param_alignment_paddings")
        padding = torch_sizes(listed[number]) if isinstance(listed, list) and number < len(listed) else None
        if padding is not None and len(padding) != len(group):
            raise ParseError(
                f"{row[0].file.path}: param_alignment_paddings are not those of {counted(len(group), 'parameter')}"
            )
        found, at = {}, 0
        for position, (name, shape) in enumerate(group.items()):
            found[name] = at
            at += (
                -(-math.prod(shape) // len(row))
                if self.is_each
                else math.prod(shape) + (padding[position] if padding else 0)
            )
        return found, at

    def _partition_size(self, row: list[RankArrays], number: int, total: int) -> int:
        """Return the elements of a rank's partition with its padding, which the files may leave out."""
        lengths = [part.masters[number].shape[0] for part in row]
        size = max(lengths)
        if lengths == [min(max(total - rank * size, 0), size) for rank in range(len(row))]:
            return size
        paddings = [torch_sizes(part.values.get("group_paddings")) or () for part in row]
        padded = sum(padding[number] for padding in paddings if number < len(padding))
        if min(lengths) == size and size * len(row) - total == padded:
            return size
        at = next((rank for rank, length in enumerate(lengths) if length != min(max(total - rank * size, 0), size)), 0)
        raise ParseError(
            f"{row[at].file.path}: has {lengths[at]} elements of group {number} and {row[0].file.path.name} has "
            f"{lengths[0]}, but according to param_shapes the group has {total}: they are not the "
            f"partitions of {len(row)} ranks"
        )

    def _check_lengths(self, row: list[RankArrays], number: int, lengths: list[int], total: int) -> None:
        for part, length in zip(row, lengths, strict=True):
            if length != total:
                why = ": it may be offloaded to files of their own, which are not read" if length < 2 < total else ""
                raise ParseError(
                    f"{part.file.path}: master of group {number} has {length} elements; param_shapes gives "
                    f"each of {len(row)} ranks {total}{why}"
                )

    def check(self, number: int, kind: str, lengths: list[list[int]]) -> None:
        """Check the lengths of a group's state on all ranks: with padding, or as long as the masters."""
        for row, sizes, own in zip(self._partitions, self._sizes, lengths, strict=True):
            for part, length in zip(row, own, strict=True):
                if length not in (sizes[number], part.masters[number].shape[0]):
                    raise ParseError(
                        f"{part.file.path}: {kind} of group {number} has {length} elements; its master has "
                        f"{part.masters[number].shape[0]}"
                    )

    def table(self, number: int, name: str) -> Numbers:
        """Return the ranges of flat arrays that hold a parameter of a group, as in `FlatRow.spans`."""
        found = self._tables.get((number, name))
        if found is None:
            rows = [self._of_rank(mp, number, name) for mp in range(len(self._partitions))]
            found = self._tables[number, name] = np.concatenate(rows)
        return found

    def _of_rank(self, mp: int, number: int, name: str) -> Numbers:
        """Return the ranges of a parameter on a model-parallel rank's data-parallel ranks that have some of it."""
        world, begin = len(self._partitions[mp]), self._begins[mp][number][name]
        count = math.prod(self._layouts[mp][number][name])
        ranks = np.arange(world)
        if self.is_each:
            size = -(-count // world)
            start, stop = np.minimum(ranks * size, count), np.minimum((ranks + 1) * size, count)
            at = np.full(world, begin)
        else:
            first = ranks * self._sizes[mp][number]
            low = np.maximum(begin, first)
            at, start = low - first, low - begin
            stop = np.minimum(begin + count, first + self._sizes[mp][number]) - begin
        rows = np.column_stack([mp * world + ranks, at, np.full(world, mp), start, stop])
        return rows[start < stop]

    def _check_named(self, part: RankArrays, rank: int, sizes: list[int], layout: GroupShapes) -> None:
        """Check a file's statement of its parameters' places, which tells one rank's file from another's.

        With round_robin_gradients, DeepSpeed states it for another order than that of the elements.
        """
        said = part.values.get("param_slice_mappings")
        world = len(self._partitions[0])
        zero = dict_of(dict_of(part.file.values.get("ds_config")).get("zero_optimization"))
        padded = any(
            any(torch_sizes(one) or ()) for _, one in items_within(part.values.get("param_alignment_paddings")) or ()
        )
        if not isinstance(said, list) or len(said) != len(layout) or padded:
            return
        for number, group in enumerate(layout):
            names, at = list(group), 0
            if zero.get("round_robin_gradients"):
                order = [position for first in range(world) for position in range(first, len(names), world)]
                names = [names[order.index(position)] for position in range(len(names))]
            expected = {}
            for name in names:
                count = math.prod(group[name])
                low, high = max(at, rank * sizes[number]), min(at + count, (rank + 1) * sizes[number])
                if low < high:
                    expected[name] = (low - rank * sizes[number], high - low)
                at += count
            found = {}
            for name, address in dict_of(said[number]).items():
                state = state_of(address, "fragment_address") or {}
                found[name] = (state.get("start"), state.get("numel"))
            if found != expected:
                differs = next(name for name in [*expected, *found] if found.get(name) != expected.get(name))
                raise ParseError(
                    f"{part.file.path}: param_slice_mappings has {shown(differs)} at {found.get(differs)}, but by "
                    f"param_shapes rank {rank} of {world} has it at {expected.get(differs)}: it is the file of "
                    "another rank, or of another run"
                )


def _hyper(part: RankArrays) -> list[Any]:
    """Return the values of a rank's groups that can be compared with other ranks'."""
    return [
        {key: value for key, value in group.items() if isinstance(value, (int, float, str, bool, type(None)))}
        for group in part.groups or []
    ]
