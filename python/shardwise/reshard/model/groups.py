"""The tensors of a model that share a plan, as groups, with the names and dtypes of all tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..._text import shown
from ..._types import Numbers
from ...errors import LayoutError
from ...partition import Partition
from ..plan import ReshardPlan
from .sides import PieceRows
from .transport import name_of_dtype

if TYPE_CHECKING:
    from .tensors import ModelTensors

__all__ = ["BoxRuns", "GroupedTensors", "TensorGroup", "grouped"]


class TensorGroup(NamedTuple):
    """Tensors that share a plan.

    Attributes:
        plan: The plan that they share.
        tensors: The positions of the tensors.
        sources: The positions of the tensors that each is made of.
        bits: The bits of an element of each.
        src: For each source holder its position among all holders of the plan, the peers.
        dst: The same for each destination holder.
        places: The places of the pieces of the source, if the tensors are rewritten.
        lowered: The runs of all transfers (False) and of all that stays (True), once they have been worked out.
    """

    plan: ReshardPlan
    tensors: Numbers
    sources: Numbers
    bits: Numbers
    src: Numbers
    dst: Numbers
    places: PieceRows | None
    lowered: dict[bool, BoxRuns]

    def only(self, wanted: npt.NDArray[np.bool_]) -> TensorGroup:
        """Return the group with only these of its tensors."""
        return self._replace(tensors=self.tensors[wanted], sources=self.sources[wanted], bits=self.bits[wanted])


class BoxRuns(NamedTuple):
    """Rows of runs: the transfer and the tensor of each; offsets, lengths and strides in elements."""

    transfer: Numbers
    src: Numbers
    dst: Numbers
    run: Numbers
    times: Numbers
    src_stride: Numbers
    dst_stride: Numbers
    leaf: Numbers


class GroupedTensors(NamedTuple):
    """All tensors of a plan for a model, grouped by the plans that they share.

    Attributes:
        peers: The labels of all holders.
        names: The names of all tensors; positions of tensors are positions here.
        dtypes: The names of their dtypes.
        groups: The tensors by their plans.
    """

    peers: tuple[Any, ...]
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    groups: list[TensorGroup]


def grouped(
    model: ModelTensors, senders: Mapping[str, npt.NDArray[np.int64] | None], peers: tuple[Any, ...]
) -> GroupedTensors:
    """Group tensors by shared plan: those with the same two tilings and the same senders.

    Args:
        model: The tensors, with their tilings.
        senders: For each tensor the senders of its transfers, or `None` if it has no replicas.
        peers: The labels of all holders.

    Raises:
        LayoutError: if holders have no labels.
    """
    number_of_peer = {label: number for number, label in enumerate(peers)}
    new = list(model.tensors)
    names = tuple(dict.fromkeys((*new, *model.stored)) if model.stored is not model.tensors else new)
    given = [(model.tensors.get(name) or model.stored[name])[1] for name in names]
    called = {dtype: name_of_dtype(dtype) for dtype in dict.fromkeys(given)}
    positions: dict[int, Numbers] = {}

    def positions_of(name: str, tiling: Any) -> Numbers:
        """Return the position of each of a tiling's holders among all; many tilings have the mesh in common."""
        if not tiling.has_labels:
            raise LayoutError(f"tensor {shown(name)}: its holders have no labels to send to")
        key = id(tiling.device_mesh) if isinstance(tiling, Partition) else id(tiling)
        if key not in positions:
            positions[key] = np.array([number_of_peer[label] for label in tiling.holders], np.int64)
        return positions[key]

    number_of = {name: number for number, name in enumerate(names)} if model.sources else {}
    groups = []
    for pair, order, members in _members(model.used, list(senders.values())):
        name, src, dst = model.pairs[pair]
        ends = positions_of(name, src), positions_of(name, dst)
        plan = ReshardPlan(src, dst, None if order is None else np.frombuffer(order, np.int64))
        sources = members[:, None]
        if model.sources:
            sources = np.array(
                [[number_of[one] for one in model.sources[new[member]]] for member in members.tolist()], np.int64
            )
        groups.append(TensorGroup(plan, members, sources, model.bits[members], *ends, model.places[pair], {}))
    return GroupedTensors(peers, names, tuple([called[dtype] for dtype in given]), groups)


def _members(used: Numbers, senders: list[Numbers | None]) -> list[tuple[int, bytes | None, Numbers]]:
    """Return the pair, the senders and the tensors of each group."""
    chosen: dict[tuple[int, bytes], list[int]] = {}
    # Few have senders of their own; the others are put together at once.
    alone = np.ones(len(used), bool)
    for number, order in enumerate(senders):
        if order is not None:
            chosen.setdefault((int(used[number]), order.tobytes()), []).append(number)
            alone[number] = False
    found: list[tuple[int, bytes | None, Numbers]] = [
        (pair, order, np.array(members, np.int64)) for (pair, order), members in chosen.items()
    ]
    others = alone.nonzero()[0]
    others = others[used[others].argsort(kind="stable")]
    edges = np.diff(used[others]).nonzero()[0] + 1
    return found + [(int(used[part[0]]), None, part) for part in np.split(others, edges) if len(part)]
