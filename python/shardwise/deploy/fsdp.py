"""The deployments of PyTorch's fully sharded data parallelism: FSDP2 and HSDP."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from .._arguments import integer
from .._text import shown
from ..errors import MeshError
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ..rules.layout_map import LayoutMap
from ..rules.layout_rule import LayoutRule
from .deployment import Deployment
from .rule import DeploymentRule

__all__ = ["fsdp2", "fully_sharded"]


def fsdp2(
    shard: int,
    replicate: int = 1,
    *,
    tp: int = 1,
    tp_rules: Mapping[str, Any] | None = None,
    world: Sequence[Hashable] | DeviceMesh | None = None,
) -> Deployment:
    """Return the deployment of a model under `fully_shard`: dim 0 of every tensor is cut as `torch.chunk` does.

    Args:
        shard: the devices over which parameters are cut.
        replicate: the number of copies: hybrid sharding (HSDP).
        tp: tensor parallelism, the last axis of the mesh.
        tp_rules: the axes of tensors that tensor parallelism cuts, by regular expressions: `{"q_proj": ("tp", None)}`.
            If both cut dim 0, tensor parallelism cuts first.
        world: labels of the devices, in row-major order of (replicate, shard, tp); `"cpu:0"`, … by default.

    Raises:
        MeshError: if a size is below 1.
        LayoutError: if a rule has other axes than `"tp"`.

    Where rows do not divide, the last devices have fewer or none, and `fully_shard` pads them in memory.

    >>> fsdp2(4).partition("norm.weight", (6,)).boxes()[:, 0].tolist()
    [[0, 2], [2, 4], [4, 6], [6, 6]]
    >>> both = fsdp2(2, tp=2, tp_rules={"up_proj": ("tp", None), "down_proj": (None, "tp")})
    >>> both.partition("up_proj.weight", (8, 4)).boxes()[:, 0].tolist()
    [[0, 2], [4, 6], [2, 4], [6, 8]]
    """
    sizes = [integer(name, size) for name, size in (("replicate", replicate), ("shard", shard), ("tp", tp))]
    for name, size in zip(("replicate", "shard", "tp"), sizes, strict=True):
        if size < 1:
            raise MeshError(f"{name} is {shown(size)}; it must be at least 1")
    mesh = DeviceMesh(sizes, ("replicate", "shard", "tp"))
    rules = {}
    for key, axes in (tp_rules or {}).items():
        first, *others = axes
        # PyTorch's strided shard: tensor parallelism is the major cut, although its axis comes later in the mesh.
        rules[key] = DeploymentRule(((*([first] if first else []), "shard"), *others), "mesh", uneven="chunk")
    default = DeploymentRule(("shard",), "mesh", uneven="chunk")
    return Deployment(mesh.size if world is None else world, mesh, rules, default=default, replicated=["replicate"])


def fully_sharded(mesh: DeviceMesh) -> LayoutMap:
    """Return the layouts of a model under `fully_shard` over this mesh: dim 0 is cut over the last axis.

    >>> layouts = fully_sharded(DeviceMesh((2, 2), ("replicate", "shard")))
    >>> layouts.partition("norm.weight", (3,)).boxes()[:, 0].tolist()
    [[0, 2], [2, 3], [0, 2], [2, 3]]
    """
    rows = LayoutRule(TensorLayout((mesh.axis_names[-1],)), "ceil")
    return LayoutMap(mesh, default=rows, replicated=mesh.axis_names[:-1])
