"""Quantized weights in rewrites: a change of a weight changes each of its components, in whole blocks.

A `Weight` has the methods of `Assembled`, in terms of the logical weight; only its components are read. Blocks move
with the elements that they are for. A number for a whole weight is kept for each part of a fused one, in the order of
the parts, as engines have it; numbers of several parts are never combined.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .._text import counted, elements_text, shown
from ..errors import LayoutError
from ..pieces import Runs
from ..quantized.component import Along, Component, LogicalTensor
from ..quantized.parts import WHOLE
from . import arrange
from .assembled import Assembled
from .leaves import Values

__all__ = ["AnyTensor", "MadeComponent", "Reader", "Weight", "arranged", "refuse_flat"]

#: Components that describe the whole weight: its shape, which is written anew, and the order of its groups.
SHAPE, ORDERS = "weight_shape", ("g_idx", "weight_g_idx")
#: Components that describe the layer's input, and may be left out.
_ACTIVATIONS = frozenset(
    ["input_scale", "input_global_scale", "input_zero_point", "activation_scale", "input_scale_ub"]
)
#: The block of a dim that has one element for all of the weight's: `Along` has no dim for these.
ALL = 0
#: A function that returns the bytes of a small tensor, or `None`.
Reader = Callable[[str], bytes | None]


@dataclass(frozen=True, eq=False)
class MadeComponent:
    """A component: the end of its name, its tensor, the meaning of its dims, and its value if that is known."""

    tail: str
    tensor: Assembled
    along: tuple[Along, ...]
    value: bytes | None = None

    def position(self, dim: int) -> int | None:
        """Return the component's dim that stands for a dim of the weight; `None` if there is none."""
        return next((at for at, each in enumerate(self.along) if each.of == dim), None)


@dataclass(frozen=True, eq=False)
class Weight:
    """A quantized weight whose components are made of parts of stored ones.

    Attributes:
        origin: The name of the stored weight, for messages.
        shape: The shape of the logical weight.
        form: The form in words.
        uncut: The dims that cannot be cut, each with the reason.
        is_whole: Whether it is an unchanged stored weight, except for its name.
    """

    origin: str
    shape: tuple[int, ...]
    form: str
    components: tuple[MadeComponent, ...]
    uncut: tuple[tuple[int, str], ...]
    is_whole: bool = True

    @classmethod
    def of_stored(cls, tensor: LogicalTensor, made: Mapping[str, Assembled], read: Reader) -> Weight:
        """Return the weight of these stored components; orders of groups are read if they are not trivial."""
        rank = len(tensor.shape)
        held = []
        for one in tensor.components:
            along = one.along
            missing = [dim for dim in range(rank) if all(each.of != dim for each in along)]
            whole = [at for at, each in enumerate(along) if each.of is None]
            if len(along) == rank and len(missing) == 1 and len(whole) == 1 and one.shape[whole[0]] == 1:
                along = tuple(Along(missing[0], ALL) if at in whole else each for at, each in enumerate(along))
            tail = _tail(tensor.name, one.name)
            held.append(
                MadeComponent(tail, made[one.name], along, read(one.name) if tensor.uncut and tail in ORDERS else None)
            )
        return cls(tensor.name, tensor.shape, tensor.form, tuple(held), tensor.uncut)

    def named(self, name: str) -> tuple[LogicalTensor, dict[str, Assembled]]:
        """Return the logical tensor under a name, and its components by their names."""
        components, tensors = [], {}
        for held in self.components:
            made = held.tensor
            if held.tail == SHAPE and not self.is_whole:
                made = _stated(made, self.shape)
            along = tuple(WHOLE if each.block == ALL else each for each in held.along)
            own = _name(name, held.tail)
            tensors[own] = made
            components.append(Component(own, made.dtype.code or made.dtype.name, made.shape, along))
        return LogicalTensor(name, self.shape, self.form, tuple(components), self.uncut), tensors

    def without(self, name: str, matched: Callable[[str], object]) -> Weight:
        """Return the weight of this name without components whose names a template matches."""
        left = [held for held in self.components if matched(_name(name, held.tail)) is not None]
        if needed := [held.tail for held in left if held.tail not in _ACTIVATIONS]:
            raise LayoutError(f"{shown(name)}: drop leaves out its {needed[0]}, which the values need")
        return replace(self, components=tuple(held for held in self.components if held not in left)) if left else self

    def taken(self, dim: int, runs: Runs, size: int) -> Weight:
        """Return a weight whose dim has this size, made of these runs of the old dim."""
        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        return self._changed(shape, lambda held: self._taken(held, dim, runs, size), self.uncut)

    def _taken(self, held: MadeComponent, dim: int, runs: Runs, size: int) -> MadeComponent:
        at = held.position(dim)
        if at is None or held.along[at].block == ALL:
            return replace(held, tensor=held.tensor.apart())
        if held.tail in ORDERS:
            raise LayoutError(f"{self.component_text(held)} is the order of all groups, so no part of it can be taken")
        coarse = self.in_blocks(held, held.along[at], runs, size, dim)
        return replace(held, tensor=held.tensor.taken(at, coarse, held.along[at].elements(size)))

    def in_blocks(self, held: MadeComponent, each: Along, runs: Runs, size: int, dim: int) -> Runs:
        """Return the runs counted in blocks, of which only the last one of a dim may be short."""
        begins, places, lengths = runs.T
        block = each.block
        # The last block may be short; of values in one word all go together.
        ends = (places + lengths == size) & ((begins + lengths == self.shape[dim]) | (each.packing == 1))
        within = (begins % block != 0) | (places % block != 0) | ((lengths % block != 0) & ~ends)
        if within.any():
            first = int(np.flatnonzero(within)[0])
            begin, length = int(begins[first]), int(lengths[first])
            raise LayoutError(
                f"{shown(self.origin)} is in blocks of {block} in dim {dim} ({held.tail}); its {length} elements from "
                f"{begin} on go to position {int(places[first])}, where they are not whole blocks: parts would share "
                "a block"
            )
        return np.stack([begins // block, places // block, -(-lengths // block)], 1) * each.words

    def unpacked(self, dim: int, segments: Mapping[str, Runs]) -> dict[str, Weight]:
        """Return the parts of a fused weight; a number for the whole of it becomes one for each part."""
        found = {}
        for number, (name, runs) in enumerate(segments.items()):
            turned = np.ascontiguousarray(runs[:, [1, 0, 2]])
            part = self.taken(dim, turned, int(runs[:, 2].sum()))
            held = [self._number_of(one, number, len(segments)) for one in part.components]
            found[name] = replace(part, components=tuple(held))
        return found

    def _number_of(self, held: MadeComponent, number: int, count: int) -> MadeComponent:
        """Return the component for one part of a fused weight: its number if there is one per part, else all of it."""
        if not self.is_number(held) or math.prod(held.tensor.shape[len(self.lead_of(held)) :]) != count or count == 1:
            return held
        last = len(held.tensor.shape) - 1
        return replace(held, tensor=held.tensor.taken(last, np.array([[number, 0, 1]], np.int64), 1))

    def is_number(self, held: MadeComponent) -> bool:
        """Return whether a component is one number for the weight, or for each of its experts or parts."""
        lead = len(self.shape) - 2
        return held.tail != SHAPE and all(
            each.of is None or 0 <= each.of < lead or each.block == ALL for each in held.along
        )

    def lead_of(self, held: MadeComponent) -> tuple[Along, ...]:
        """Return the leading dims of a component that are dims of the weight."""
        return tuple(itertools.takewhile(lambda each: each.of is not None and each.block != ALL, held.along))

    def unstacked(self, place: int) -> Weight:
        """Return the weight at a position of the first dim."""

        def change(held: MadeComponent) -> MadeComponent:
            along = tuple(each._replace(of=each.of - 1) if each.of is not None else each for each in held.along)
            if held.position(0) is None:
                return replace(held, along=along, tensor=held.tensor.apart())
            if held.position(0) != 0 or held.along[0].block != 1:
                raise LayoutError(f"{self.component_text(held)} has blocks in dim 0, which cannot be split")
            return MadeComponent(held.tail, held.tensor.unstacked(place), along[1:])

        uncut = tuple((dim - 1, why) for dim, why in self.uncut if dim)
        return self._changed(self.shape[1:], change, uncut)

    def transposed(self) -> Weight:
        """Return the weight with its last two dims swapped, and all blocks with them."""
        rank = len(self.shape)
        if rank < 2:
            raise LayoutError(f"tensor {shown(self.origin)} has {counted(rank, 'dim')}, so it cannot be transposed")
        dims = [*range(rank - 2), rank - 1, rank - 2]
        made = arranged(self, [[size] for size in self.shape], [[dim] for dim in dims])
        assert isinstance(made, Weight)
        return made

    def padded(self, dim: int, size: int) -> Weight:
        """Return the weight with zeros after a dim's elements, and its scales padded too."""

        def change(held: MadeComponent) -> MadeComponent:
            at = held.position(dim)
            if at is None or held.along[at].block == ALL:
                return held
            if held.tail in ORDERS:
                raise LayoutError(f"{self.component_text(held)} is the order of all groups, and cannot be padded")
            return replace(held, tensor=held.tensor.padded(at, held.along[at].elements(size)))

        if size == self.shape[dim]:
            return self
        return self._changed((*self.shape[:dim], size, *self.shape[dim + 1 :]), change, self.uncut)

    def repeated(self, others: Sequence[Weight]) -> Weight:
        """Return the weight with others of the same form as replicas, which should have equal elements."""
        held = [
            replace(one, tensor=one.tensor.repeated([other.components[at].tensor for other in others]))
            for at, one in enumerate(self.components)
        ]
        return replace(self, components=tuple(held))

    def _changed(
        self,
        shape: tuple[int, ...],
        change: Callable[[MadeComponent], MadeComponent],
        uncut: tuple[tuple[int, str], ...],
    ) -> Weight:
        refuse_flat(self)
        return replace(self, shape=shape, components=tuple(map(change, self.components)), uncut=uncut, is_whole=False)

    def component_text(self, held: MadeComponent) -> str:
        """Return how messages name a component."""
        return f"{shown(self.origin)}: its {held.tail}"


#: The tensors that rewrites take and make.
AnyTensor = Assembled | Weight


def arranged(tensor: AnyTensor, split: Sequence[Sequence[int]], merged: Sequence[Sequence[int]]) -> AnyTensor:
    """Return the tensor with its dims split, permuted and merged as `arrange.arranged` does; blocks go with elements.

    Raises:
        LayoutError: if a block would be taken apart, or its elements put in another order.
    """
    if isinstance(tensor, Assembled):
        return arrange.arranged(tensor, split, merged)
    if len(merged) == len(split) and list(map(list, merged)) == [[dim] for dim in range(len(split))]:
        return tensor
    sizes = [size for group in split for size in group]
    shape = tuple(math.prod(sizes[atom] for atom in group) for group in merged)
    owners = [dim for dim, group in enumerate(split) for _ in group]
    held = tuple(_arranged(tensor, one, split, merged) for one in tensor.components)
    uncut = {
        number: why for dim, why in tensor.uncut for number, group in enumerate(merged)
        if any(owners[atom] == dim for atom in group)
    }  # fmt: skip
    refuse_flat(tensor)
    return replace(tensor, shape=shape, components=held, uncut=tuple(uncut.items()), is_whole=False)


def _arranged(
    weight: Weight, held: MadeComponent, split: Sequence[Sequence[int]], merged: Sequence[Sequence[int]]
) -> MadeComponent:
    """Return one component of a weight whose dims are rearranged."""
    if weight.is_number(held) and not weight.lead_of(held):
        return held
    # In the order of the weight's dims; AWQ and GPTQ have the last two swapped. What stands for none comes after them.
    extra = [at for at, each in enumerate(held.along) if each.of is None]
    follows = [at for at, each in enumerate(held.along) if each.of is not None]
    order = sorted(follows, key=lambda at: held.along[at].of or 0)
    is_swapped = order != follows
    along = {each.of: each for each in held.along}
    atoms: list[tuple[int, int, bool]] = []  # Of the weight: size, size in the component, whether within a block.
    inner: list[list[int]] = []
    for dim, group in enumerate(split):
        own = along.get(dim)
        inner.append(_split_sizes(weight, held, own, group, weight.shape[dim]) if own is not None else [])
        for place, size in enumerate(group):
            own_size = inner[-1][place] if own is not None else 0
            atoms.append((size, own_size, own is not None and own_size != size))
    owners = [dim for dim, group in enumerate(split) for _ in group]
    present = [atom for atom, dim in enumerate(owners) if dim in along]
    groups, new = [], []
    for number, group in enumerate(merged):
        inside = [atom for atom in group if atom in present]
        if not inside:
            continue
        large = [atom for atom in group if atoms[atom][0] != 1]
        block = [atom for atom in large if atoms[atom][2]]
        one = along[owners[block[0]]] if block else Along(0)
        whole = [atom for atom, dim in enumerate(owners) if block and dim == owners[block[0]] and atoms[atom][2]]
        is_kept = large[len(large) - len(block) :] == block and (one.block == ALL or block == whole)
        if (
            any(atom not in present for atom in large)
            or (block and not is_kept)
            or (one.block == ALL and len(large) > len(block))
        ):
            raise LayoutError(f"{weight.component_text(held)} has blocks that would be split in dim {number}")
        groups.append([present.index(atom) for atom in inside])
        new.append(one._replace(of=number))
    flat = [atom for group in groups for atom in group]
    if extra and flat != sorted(flat) and not weight.is_number(held):
        raise LayoutError(
            f"{weight.component_text(held)} has the shape {held.tensor.shape}, and its dims cannot be put in another "
            "order; these rules are for the form without quantization, which is stored transposed"
        )
    made = arrange.arranged(held.tensor, [[size] for size in held.tensor.shape], [[at] for at in [*order, *extra]])
    own_split = [inner[dim] for dim in range(len(split)) if dim in along]
    rest = [[held.tensor.shape[at]] for at in extra]
    made = arrange.arranged(made, [*own_split, *rest], [*groups, *([len(flat) + at] for at in range(len(rest)))])
    if is_swapped and len(new) > 1 and not extra:
        made, new = made.transposed(), [*new[:-2], new[-1], new[-2]]
    return MadeComponent(held.tail, made, (*new, *(held.along[at] for at in extra)))


def _split_sizes(weight: Weight, held: MadeComponent, each: Along, sizes: Sequence[int], n: int) -> list[int]:
    """Return the sizes that a component's dim is split into when the weight's dim is split into `sizes`."""
    if len(sizes) == 1:
        return [1 if each.block == ALL else each.elements(n)]
    if each.block == ALL:
        return [1] * len(sizes)
    rest, found = each.block, []
    for size in reversed(sizes):
        if rest == 1:
            found.append(size)
        elif rest % size == 0:
            found.append(each.words if rest == size else 1)
            rest //= size
        elif size % rest == 0:
            found.append(size // rest * each.words)
            rest = 1
        else:
            raise LayoutError(
                f"{weight.component_text(held)} has blocks of {each.block}, which do not fit dims of {list(sizes)}"
            )
    if rest != 1:
        raise LayoutError(f"{weight.component_text(held)} has blocks of {each.block} in a dim of {elements_text(n)}")
    return found[::-1]


def refuse_flat(weight: Weight) -> None:
    """Refuse a weight that is stored flat."""
    if any(each.of == -1 for held in weight.components for each in held.along):
        raise LayoutError(
            f"{shown(weight.origin)} is stored flat, with its shape in its quant_state, so it can only be renamed"
        )


def _tail(name: str, component: str) -> str:
    """Return the end of a component's name: `weight_scale_inv`; marked if it follows the weight's whole name."""
    base = name.removesuffix("weight")
    if base != name and component.startswith(base):
        return component[len(base) :]
    return "+" + component.removeprefix(name)


def _name(name: str, tail: str) -> str:
    """Return the name of a component of a weight, which is called `…weight`, or of stacked experts."""
    if tail.startswith("+"):
        return name + tail[1:]
    if name.endswith("weight"):
        return name.removesuffix("weight") + tail
    return name + (tail.removeprefix("weight") if tail.startswith("weight") else f"_{tail}")


def _stated(made: Assembled, shape: tuple[int, ...]) -> Assembled:
    """Return the sizes of a weight, or of each of stacked ones, as `weight_shape` states them."""
    sizes = np.broadcast_to(np.array(shape[-2:], "<i8"), (*shape[:-2], 2))
    return Values.of(made.origin, sizes.astype(f"<i{made.dtype.bits // 8}"), made.dtype)
