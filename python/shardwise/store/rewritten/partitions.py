"""Partitions of a checkpoint's tensors by layouts: components and states are cut as their weights are."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..._dtypes import Dtype, in_bytes
from ..._fork import cached_property
from ..._text import shown
from ...conversion.tables import Wanted
from ...errors import LayoutError
from ...layout import TensorLayout, UnevenRule
from ...partition import Partition
from ...placing import Placing, partition_of
from ...quantized.component import Along, Component, LogicalTensor
from ...quantized.follow import followed, with_states
from ...quantized.forms import NO_COMPONENTS, Components
from ...quantized.outline import Outline
from ...quantized.unstated import check_elements, check_known
from ...rules.left_out import names_text
from ...shared_tiling import SharedTiling

__all__ = ["DescribedTensors", "RuledTensor", "partition_for"]

#: The name, the shape and the dtype of a tensor to which rules apply.
RuledTensor = tuple[str, tuple[int, ...], str]


@dataclass(frozen=True)
class DescribedTensors:
    """Tensors of a checkpoint as rules know them: described by names, with what belongs together.

    Attributes:
        tensors: The shapes and dtypes of the tensors. Packed elements, several to a byte, are cut in whole bytes.
        weights: The quantized weights and the states of an optimizer among them.
        is_stored: Whether they are stored, so that a configuration may state how they are quantized: integers for
            which none does are not cut by the rules of a model. Arrays in memory are what their dtypes say.
    """

    tensors: Outline
    weights: Components
    is_stored: bool = True

    @classmethod
    def of_arrays(cls, arrays: Iterable[Wanted]) -> DescribedTensors:
        """Return the description of arrays in memory: which of them are states of an optimizer, their names say."""
        found = {each.name: (each.shape, each.dtype) for each in arrays}
        states = with_states(NO_COMPONENTS, {name: (shape, dtype.name) for name, (shape, dtype) in found.items()})
        return cls(found, states, is_stored=False)

    @cached_property
    def ruled(self) -> list[RuledTensor]:
        """The tensors to which rules apply: a quantized weight, or a state's, in place of its components."""
        tensors, weights = self.tensors, self.weights
        taken = weights.taken
        found = [(name, shape, dtype.name) for name, (shape, dtype) in tensors.items() if name not in taken]
        whole = {name: each.shape for name, each in weights.tensors.items()}
        # States may be without their weights.
        whole |= {one.name: one.shape for one in weights.states if one.name not in tensors and one.name not in whole}
        return [*found, *((name, shape, "uint8") for name, shape in whole.items())]

    def partitions(self, layouts: Placing, uneven: UnevenRule) -> dict[str, Partition | SharedTiling | None]:
        """Return the partition of each tensor; `None` for tensors that no layout cuts.

        Raises:
            LayoutError: if no device would hold a tensor; if a layout does not fit one, or cuts within a block or a
                byte: the message names the weight, and what would fit.
            ParseError: if it is not known how a weight is quantized.
        """
        tensors, weights = self.tensors, self.weights
        _refuse_unmatched(layouts, [name for name, _, _ in self.ruled])
        check_known(weights, layouts)
        if self.is_stored:
            check_elements(tensors, weights, layouts)
        packed = {name: _bytes_of(name, *each) for name, each in tensors.items() if each[1].bits % 8 and each[0]}
        every = Components(None, {**weights.tensors, **packed}, (), states=weights.states)
        cuts = followed(every, layouts, uneven)
        found: dict[str, Partition | SharedTiling | None] = {}
        for name, (shape, _) in tensors.items():
            cut = cuts.get(name)
            if cut is None:
                found[name] = partition_for(name, shape, layouts, uneven)
            elif isinstance(cut, TensorLayout):
                found[name] = cut.partition(packed[name].components[0].shape if name in packed else shape)
            else:
                found[name] = cut
        return found

    def cut(self, arrays: Iterable[Wanted], layouts: Placing, uneven: UnevenRule) -> list[Wanted]:
        """Return these tensors, arrays in memory, as layouts cut them; one that no layout cuts stays as it is."""
        cuts = self.partitions(layouts, uneven)
        return [replace(each, partition=cuts[each.name]) if cuts[each.name] else each for each in arrays]


def partition_for(
    name: str, shape: tuple[int, ...], layouts: Placing, uneven: UnevenRule
) -> Partition | SharedTiling | None:
    """Return the partition of a tensor by the layout of its own name; `None` if there is none.

    Raises:
        LayoutError: if the layout does not fit the tensor; the message names it.
    """
    partition = partition_of(layouts, name, shape, uneven)
    if partition is not None and not isinstance(partition, (Partition, SharedTiling)):
        raise LayoutError(
            f"tensor {shown(name)}: its layout is only a list of boxes, as rules learned from recordings have, and "
            "files cannot be cut by that; plan_model moves such boxes between memories"
        )
    if isinstance(partition, Partition) and partition.layout.unreduced:
        axes = partition.layout.unreduced
        raise LayoutError(f"tensor {shown(name)}: a layout with unreduced axes {axes} cannot be written")
    return partition


def _refuse_unmatched(layouts: Placing, names: Iterable[str]) -> None:
    """Refuse tensors, by name, for which a deployment has neither a rule nor a default: no device would hold them."""
    if layouts.is_whole_elsewhere:
        return
    found = [name for name in names if not layouts.matching_rules(name)]
    if found:
        count = "1 tensor matches" if len(found) == 1 else f"{len(found)} tensors match"
        raise LayoutError(
            f"{count} no rule of the deployment, which has no default, so no device holds them: {names_text(found)}; "
            "with default = 'replicated' all devices hold them, and drop leaves them out"
        )


def _bytes_of(name: str, whole: tuple[int, ...], elements: Dtype) -> LogicalTensor:
    """Return the bytes of a tensor of packed elements, as its only component."""
    dtype, shape = in_bytes(elements, whole)
    bits, inner = dtype.packed or (8, ())
    at, row = len(shape) - 1 - len(inner), math.prod(inner)
    # So many elements of the dim are whole bytes.
    unit = 8 // math.gcd(8, row * bits)
    along = (*map(Along, range(at)), Along(at, unit, unit * row * bits // 8, unit), *(Along(None),) * len(inner))
    why = "its elements share bytes with those of the dim before"
    uncut = tuple((dim, why) for dim in range(at + 1, len(shape)))
    return LogicalTensor(name, whole, elements.name, (Component(name, dtype.name, shape, along),), uncut)
