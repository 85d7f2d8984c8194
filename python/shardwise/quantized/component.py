"""Logical tensors and their components: a quantized weight, and the arrays in which it is stored (rule 2.13)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .._text import shown
from ..errors import LayoutError

if TYPE_CHECKING:
    from ..rules.within import Within

__all__ = ["Along", "Component", "LogicalTensor", "StoredLook"]


class Along(NamedTuple):
    """A dim of a component: element `j` stands for `[j·block, (j+1)·block)` of a dim of the logical tensor.

    >>> Along(1, 128).elements(576)
    5
    >>> Along(1, 32, words=3, packing=32).elements(128)           # 32 values of 3 bits in three words
    12
    """

    #: The dim of the logical tensor; -1 is the tensor flattened, `None` nothing: every device holds the dim whole.
    of: int | None
    #: The number of elements of that dim in a block.
    block: int = 1
    #: The number of elements of the component in which a block is stored.
    words: int = 1
    #: The number of values that share one stored element and so cannot be cut apart: 8 of 4 bits in an int32.
    packing: int = 1

    def elements(self, n: int) -> int:
        """Return the size of the component's dim for `n` elements of the logical one; the last block may be short."""
        return -(-n * self.words // self.block)


class Component(NamedTuple):
    """One of the arrays in which a logical tensor is stored."""

    #: The name of the array in the checkpoint.
    name: str
    #: The dtype of the array, as the safetensors format writes it.
    dtype: str
    shape: tuple[int, ...]
    #: The meaning of each of its dims.
    along: tuple[Along, ...]


class StoredLook(NamedTuple):
    """The dtype of a stored tensor, as the safetensors format writes it, and its shape."""

    dtype: str
    shape: tuple[int, ...]


class LogicalTensor(NamedTuple):
    """A tensor that is stored as several components.

    >>> weight = Component("w.weight", "F8_E4M3", (256, 576), (Along(0), Along(1)))
    >>> scale = Component("w.weight_scale_inv", "F32", (2, 5), (Along(0, 128), Along(1, 128)))
    >>> tensor = LogicalTensor("w.weight", (256, 576), "FP8 in blocks", (weight, scale))
    >>> tensor.unit(1), tensor.unit(1, shared=True)
    (128, 1)
    """

    #: The name by which rules find it.
    name: str
    #: Rows (out) and columns (in) as PyTorch's linear layers have them; experts come first.
    shape: tuple[int, ...]
    #: The form in words.
    form: str
    components: tuple[Component, ...]
    #: The dims that cannot be cut at all, each with the reason.
    uncut: tuple[tuple[int, str], ...] = ()
    #: The components whose values are about the whole tensor, such as its shape; each with what they say.
    stated: tuple[tuple[str, str], ...] = ()
    #: The rewrites after which it has this name: it may be a part of the tensor that rules find.
    within: tuple[Within, ...] = ()

    def unit(self, dim: int, *, shared: bool = False) -> int:
        """Return the number of elements of a dim that stay together: the least common multiple of all blocks along it.

        With `shared`, a block with one scale may be cut, and its scale is on both sides; values that are packed into
        one stored element stay together all the same.
        """
        along = [each for component in self.components for each in component.along]
        units = [each.packing if shared else each.block for each in along if each.of == dim]
        # Blocks of the flattened tensor hold whole rows, or rows whole blocks.
        row = math.prod(self.shape[1:])
        flat = [each.packing if shared else each.block for each in along if each.of == -1] if dim == 0 else []
        return math.lcm(*units, *(block // math.gcd(block, row) for block in flat))

    def why_uncut(self, dim: int) -> str:
        """Return the reason why a dim cannot be cut; an empty text if it can."""
        return dict(self.uncut).get(dim, "")

    def elements_of(self, component: str, offsets: Any) -> npt.NDArray[np.int64]:
        """Return the element of a component for each element of the tensor: for a scale, that of its block.

        Args:
            component: the name of the component.
            offsets: flat positions in the tensor, in C order.

        Returns:
            Flat positions in the component. If a value is in several stored elements, the position is that of the first
            of these.

        Raises:
            LayoutError: if there is no such component, or its elements do not stand for those of the tensor.
            IndexError: if an offset is not within the tensor.

        >>> scale = Component("w.weight_scale_inv", "F32", (2, 5), (Along(0, 128), Along(1, 128)))
        >>> weight = LogicalTensor("w.weight", (256, 576), "FP8 in blocks", (scale,))
        >>> weight.elements_of("w.weight_scale_inv", [0, 575, 200 * 576])
        array([0, 4, 5])
        """
        found = next((one for one in self.components if one.name == component), None)
        if found is None:
            known = ", ".join(one.name for one in self.components)
            raise LayoutError(f"{shown(self.name)} has no component {shown(component)}; it has {known}")
        flat = np.asarray(offsets, np.int64)
        size = math.prod(self.shape)
        if len(outside := flat[(flat < 0) | (flat >= size)]):
            raise IndexError(f"offsets has {outside[0]}, which is not within {shown(self.name)} of {size} elements")
        at = np.unravel_index(flat, self.shape) if self.shape else ()
        inner: list[Any] = []
        for dim, (each, count) in enumerate(zip(found.along, found.shape, strict=True)):
            if each.of is None and count > 1:
                raise LayoutError(f"dim {dim} of {shown(component)} follows no dim of {shown(self.name)}")
            of = flat if each.of == -1 else np.zeros_like(flat) if each.of is None else at[each.of]
            inner.append(of // each.block * each.words)
        answer: npt.NDArray[np.int64] = np.zeros_like(flat)
        for index, count in zip(inner, found.shape, strict=True):
            answer = answer * count + index
        return answer

    @property
    def blocks(self) -> Mapping[int, tuple[tuple[str, int], ...]]:
        """The blocks along each dim of the weight: pairs of a component's name and the elements of a block of it."""
        found: dict[int, list[tuple[str, int]]] = {}
        for component in self.components:
            for each in component.along:
                if each.of is not None and each.block > 1:
                    found.setdefault(each.of, []).append((component.name, each.block))
        return {dim: tuple(blocks) for dim, blocks in found.items()}
