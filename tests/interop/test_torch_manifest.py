"""Manifests of the tensors of a running model: what PyTorch gives each rank, from placements alone."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardwise import DeviceMesh, LayoutError, TensorLayout, Tiling, plan_model
from shardwise.deploy import Deployment, Manifest
from shardwise.interop import torch as interop
from shardwise.interop.torch import Partial, Replicate, Shard, StridedShard, manifest_of


def torch_mesh(*shape: int, names: tuple[str, ...]) -> Any:
    return SimpleNamespace(
        device_type="cpu", mesh_dim_names=names, mesh=np.arange(int(np.prod(shape))).reshape(shape)
    )  # fmt: skip


def tensor(shape: tuple[int, ...], mesh: Any = None, placements: Any = None, dtype: str = "torch.bfloat16") -> Any:
    more = {} if mesh is None else {"device_mesh": mesh, "placements": tuple(placements)}
    return SimpleNamespace(shape=shape, dtype=dtype, **more)


MESH = torch_mesh(2, 3, names=("dp", "tp"))


def test_layouts() -> None:
    made = manifest_of(
        {
            "w": tensor((10, 4), MESH, (Shard(0), Shard(1))),
            "v": tensor((10, 4), MESH, (Shard(0), Shard(1))),
            "norm": tensor((7,), MESH, (Replicate(), Replicate()), "torch.float32"),
            "buffer": tensor((3,)),
        }
    )
    labelled = DeviceMesh((2, 3), ("dp", "tp"), [f"cpu:{i}" for i in range(6)])
    assert made["w"] == TensorLayout(("dp", "tp"), labelled).partition((10, 4), "chunk")
    assert made["v"] is made["w"]
    assert made.tensors["norm"].dtype == "float32"
    # What is no DTensor is on every rank.
    assert made["buffer"].holders == tuple(f"cpu:{i}" for i in range(6))
    assert Manifest.from_dict(json.loads(json.dumps(made.to_dict()))) == made


@pytest.mark.parametrize("shape", [(12, 4), (15, 5), (7, 2), (1, 3)])
def test_strided_shards_are_what_pytorch_gives(shape: tuple[int, ...]) -> None:
    """FSDP on top of tensor parallelism; the boxes are those of `local_shards`, which is compared with PyTorch."""
    placements = (StridedShard(0, split_factor=3), Shard(0))
    made = manifest_of({"w": tensor(shape, MESH, placements)})
    mesh = interop.mesh_from_torch(MESH)
    shards = interop.local_shards(placements, mesh, shape)
    for rank, label in enumerate(mesh.devices.ravel()):
        assert made["w"].holder_shape(label) == tuple(shards.shapes[rank]) or not shards.shapes[rank].all()
        if shards.is_box[rank] and shards.shapes[rank].all():
            (piece,) = made["w"].pieces(label)
            assert [side.start for side in piece.box] == shards.offsets[rank].tolist()
    made["w"].check() if type(made["w"]) is Tiling else None
    engine = Deployment(["gpu"], DeviceMesh((1,), ("x",)), {}, default="replicated")
    assert plan_model(made, engine, made.tensors).total_bytes() == 2 * int(np.prod(shape))
    assert Manifest.from_dict(made.to_dict()).to_dict() == made.to_dict()


def test_what_no_manifest_says() -> None:
    with pytest.raises(LayoutError, match="'b' is not a DTensor, so it needs world"):
        manifest_of({"b": tensor((3,))})
    whole = manifest_of({"b": tensor((3,))}, DeviceMesh((2,), ("x",), ["a", "b"]))
    assert whole["b"].holders == ("a", "b")
    with pytest.raises(LayoutError, match=r"'w': placements.*unreduced axes of a layout are sums"):
        manifest_of({"w": tensor((4, 4), MESH, (Partial("max"), Replicate()))})
    with pytest.raises(LayoutError, match=r"'w': .*partial sums and strided shards"):
        manifest_of({"w": tensor((4, 4), MESH, (Partial(), StridedShard(0, split_factor=2)))})
    with pytest.raises(LayoutError, match=r"'w' has the dtype 'torch.quint8', which is not known"):
        manifest_of({"w": tensor((4,), MESH, (Replicate(), Replicate()), "torch.quint8")})
    with pytest.raises(TypeError, match="tensors must be"):
        manifest_of([tensor((3,))])  # type: ignore[arg-type]


def test_of_dtensors() -> None:
    torch = pytest.importorskip("torch")
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.testing._internal.distributed.fake_pg import FakeStore

    ranks: dict[int, dict[str, Any]] = {}
    made = None
    for rank in range(6):
        dist.init_process_group("fake", rank=rank, world_size=6, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(8, 13), torch.nn.Linear(13, 7))
            model.register_buffer("scale", torch.zeros(2))
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
            fully_shard(model, mesh=mesh["dp"])
            state = model.state_dict()
            made = manifest_of(state)
            ranks[rank] = {name: getattr(one, "to_local", lambda one=one: one)() for name, one in state.items()}
        finally:
            dist.destroy_process_group()
    assert made is not None
    for rank, state in ranks.items():
        for name, local in state.items():
            label = f"cpu:{rank}"
            assert made[name].holder_shape(label) == tuple(local.shape) or local.numel() == 0
            assert made.tensors[name].dtype == "float32"
