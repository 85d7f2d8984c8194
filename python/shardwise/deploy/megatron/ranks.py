"""Megatron-Core's ranks: its dense and its expert mesh, and its process groups, without Megatron."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..._arguments import instance, integer
from ..._fork import cached_property
from ..._text import shown
from ...errors import MeshError
from ...mesh import DeviceMesh

__all__ = ["RankGroups", "Ranks"]

#: Ranks that communicate with each other, one tuple for each group, ordered as Megatron orders both.
RankGroups = tuple[tuple[int, ...], ...]

#: The most ranks: each kind of group lists every rank once.
_MOST_RANKS = 1 << 20
_NAMES = ("tp", "pp", "dp", "ep", "cp")
#: The names of axes of the expert mesh, by Megatron's names, which the dense mesh has.
_EXPERT_NAMES = {"tp": "etp", "dp": "edp"}

_DENSE_GROUPS = {
    "DATA_PARALLEL_GROUP_WITH_CP": "dp-cp",
    "DATA_PARALLEL_GROUP": "dp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "MODEL_PARALLEL_GROUP": "tp-pp",
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp-dp-cp",
    "TENSOR_AND_DATA_PARALLEL_GROUP": "tp-dp",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp-cp",
}
_EXPERT_GROUPS = {
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "tp",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp-ep",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp-ep-pp",
    "EXPERT_DATA_PARALLEL_GROUP": "dp",
}


@dataclass(frozen=True)
class Ranks:
    """The ranks of Megatron-Core, as `initialize_model_parallel` arranges them.

    Args:
        world: the number of ranks.
        tp: tensor parallelism of attention and dense layers.
        pp: pipeline stages.
        cp: context parallelism.
        ep: expert parallelism.
        etp: tensor parallelism of experts; that of dense layers if not given.
        order: Megatron's text, minor axis first: `"tp-cp-ep-dp-pp"`.
        instances: instances of the distributed optimizer.

    Raises:
        MeshError: where Megatron refuses: sizes that do not divide the ranks; an order that lacks an axis; an order
            that does not end with `pp`, with different data parallelism for experts and dense layers; pipelines that
            differ between the two.
        TypeError: if a size is not an integer.

    Dense tensors are on a mesh of pp, dp, cp and tp, experts are on one of pp, edp, ep and etp; both are views of the
    same ranks. The rules are those of `megatron/core/parallel_state.py`.

    >>> ranks = Ranks(16, tp=2, pp=2, ep=4, etp=1)
    >>> ranks.dense
    DeviceMesh((2, 4, 1, 2), ('pp', 'dp', 'cp', 'tp'))
    >>> ranks.expert
    DeviceMesh((2, 2, 4, 1), ('pp', 'edp', 'ep', 'etp'))
    >>> ranks.groups("tp")[:3], ranks.groups("ep", expert=True)[0]
    (((0, 1), (2, 3), (4, 5)), (0, 1, 2, 3))
    """

    world: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    order: str = "tp-cp-ep-dp-pp"
    instances: int = 1

    def __post_init__(self) -> None:
        for name in ("world", "tp", "pp", "cp", "ep", "etp", "instances"):
            value = getattr(self, name)
            if name == "etp" and value is None:
                continue
            size = integer(name, value)
            if not 1 <= size <= _MOST_RANKS:
                raise MeshError(f"{name} is {shown(size)}; it must be from 1 to {_MOST_RANKS}")
            object.__setattr__(self, name, size)
        instance("order", self.order, str)
        for what, model in (("tp * pp * cp", self.tp * self.pp * self.cp), ("etp * ep * pp", self._expert_size)):
            if self.world % model:
                raise MeshError(f"world is {self.world}, which is not divisible by {what}, {model}")
        dense, expert = self._sizes(False), self._sizes(True)  # Refuses an order that lacks an axis.
        if not self.order.endswith("pp") and self.pp > 1 and self.edp != self.dp:
            raise MeshError(
                f"order {shown(self.order)} does not end with pp, so experts need the same data parallelism as dense "
                f"layers, but dense layers have {self.dp} and experts {self.edp}"
            )
        if dense != expert and self.groups("pp") != self.groups("pp", expert=True):
            raise MeshError(
                f"order {shown(self.order)} gives experts and dense layers different pipelines: the first pipelines "
                "are the ranks "
                f"{self.groups('pp', expert=True)[0]} and {self.groups('pp')[0]}"
            )
        for name, size in (("dp * cp", self.dp * self.cp), ("edp", self.edp)):
            if size % self.instances:
                raise MeshError(f"instances is {self.instances}, which does not divide {name}, {size}")

    @property
    def dp(self) -> int:
        """Data parallelism of dense layers."""
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def edp(self) -> int:
        """Data parallelism of experts."""
        return self.world // self._expert_size

    @property
    def _expert_size(self) -> int:
        return (self.etp or self.tp) * self.ep * self.pp

    @cached_property
    def dense(self) -> DeviceMesh:
        """The mesh of attention and dense layers, over the default labels; an axis that the order lacks is first."""
        return self._mesh(expert=False)

    @cached_property
    def expert(self) -> DeviceMesh:
        """The mesh of experts, over the same labels."""
        return self._mesh(expert=True)

    def _mesh(self, expert: bool) -> DeviceMesh:
        sizes = self._sizes(expert)
        # An axis that one of the two cannot have is of size 1 there, and left out.
        sizes.pop("cp" if expert else "ep")
        names = [_EXPERT_NAMES.get(name, name) if expert else name for name in reversed(sizes)]
        return DeviceMesh(list(reversed(sizes.values())), names)

    def groups(self, token: str, *, expert: bool = False) -> RankGroups:
        """Return the groups of ranks that differ along the axes of a token only: `RankGenerator.get_ranks`.

        Args:
            token: Megatron's names of the axes, such as `"tp-dp"`, in any order.
            expert: whether these are the axes of experts.

        Raises:
            MeshError: if there is no such axis.

        >>> Ranks(8, tp=2, pp=2).groups("dp")
        ((0, 2), (1, 3), (4, 6), (5, 7))
        """
        wanted = instance("token", token, str).split("-")
        sizes = self._sizes(instance("expert", expert, bool))
        if unknown := [name for name in wanted if name not in sizes]:
            raise MeshError(f"token {shown(token)} has {shown(unknown[0])}; the axes are {', '.join(sizes)}")
        names = list(reversed(sizes))
        ranks = np.arange(self.world).reshape([sizes[name] for name in names])
        others, own = ([axis for axis, name in enumerate(names) if (name in wanted) is here] for here in (False, True))
        size = math.prod(sizes[names[axis]] for axis in own)
        rows: list[list[int]] = ranks.transpose([*others, *own]).reshape(-1, size).tolist()
        return tuple(map(tuple, rows))

    def process_groups(self) -> dict[str, RankGroups]:
        """Return all groups that `initialize_model_parallel` makes, by the descriptions that it gives them.

        >>> Ranks(8, tp=2, pp=2).process_groups()["EMBEDDING_GROUP"]
        ((0, 4), (1, 5), (2, 6), (3, 7))
        """
        found = {name: self.groups(token) for name, token in _DENSE_GROUPS.items()}
        pipelines = found["PIPELINE_MODEL_PARALLEL_GROUP"]
        found["EMBEDDING_GROUP"] = tuple((ranks[0], ranks[-1]) if len(ranks) > 1 else ranks for ranks in pipelines)
        found["POSITION_EMBEDDING_GROUP"] = tuple(ranks[:1] for ranks in pipelines)
        found |= {name: self.groups(token, expert=True) for name, token in _EXPERT_GROUPS.items()}
        each = self.edp // self.instances
        models = found["EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP"]
        found["INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP"] = tuple(
            tuple(rank for ranks in models[first : first + each] for rank in ranks)
            for first in range(0, len(models), each)
        )
        if self.instances > 1:
            together, experts = found["DATA_PARALLEL_GROUP_WITH_CP"], found["EXPERT_DATA_PARALLEL_GROUP"]
            found["INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP"] = _runs(together, self.dp * self.cp // self.instances)
            found["INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP"] = _runs(experts, each)
            found["INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP"] = tuple(
                ranks[first::each] for ranks in experts for first in range(each)
            )
        return found

    def _sizes(self, expert: bool) -> dict[str, int]:
        """Return the axes of Megatron's `RankGenerator` with their sizes, minor first."""
        if expert:
            sizes = {"tp": self.etp or self.tp, "pp": self.pp, "dp": self.edp, "ep": self.ep, "cp": 1}
        else:
            sizes = {"tp": self.tp, "pp": self.pp, "dp": self.dp, "ep": 1, "cp": self.cp}
        order = self.order.lower().split("-")
        for name in order:
            if name not in sizes or order.count(name) > 1:
                raise MeshError(f"order {shown(self.order)} has {shown(name)}; it may have {', '.join(_NAMES)}, once")
        for name in _NAMES:
            if name not in order and sizes[name] != 1:
                raise MeshError(f"order {shown(self.order)} lacks {name}, whose size is {sizes[name]}")
        return {name: sizes[name] for name in (*order, *(name for name in _NAMES if name not in order))}


def _runs(groups: RankGroups, length: int) -> RankGroups:
    """Split each group into runs of `length` ranks."""
    return tuple(ranks[first : first + length] for ranks in groups for first in range(0, len(ranks), length))
