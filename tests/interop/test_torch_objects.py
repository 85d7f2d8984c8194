"""PyTorch's own objects, made and read by the dialect; runs where PyTorch is installed in this Python."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shardwise import DeviceMesh, LayoutError, MeshError, ShardedArray, TensorLayout, distribute_tensor
from shardwise.interop import torch as dialect
from shardwise.interop.torch import Partial, Replicate, Shard, StridedShard, local_shards

from .layouts import mesh_of, random_layout

torch = pytest.importorskip("torch")
device_mesh = importlib.import_module("torch.distributed.device_mesh")
placement_types = importlib.import_module("torch.distributed.tensor.placement_types")

DP_TP = DeviceMesh((4, 2), ("dp", "tp"))
#: A mesh of PyTorch without a process group.
ALONE = {"_init_backend": False, "_rank": 0}


def test_placements_there_and_back() -> None:
    ours: list[dialect.Placement] = [Shard(1), StridedShard(0, 2), Replicate(), Partial(), Partial("max")]
    theirs = dialect.to_torch_placements(ours)
    assert theirs == [
        placement_types.Shard(1),
        placement_types._StridedShard(0, split_factor=2),
        placement_types.Replicate(),
        placement_types.Partial(),
        placement_types.Partial("max"),
    ]
    mesh = DeviceMesh((2, 2, 2, 2, 2), list("abcde"))
    assert dialect.read_placements(theirs, mesh, 2) == ours
    assert dialect.read_placements([placement_types.Shard(-1)], DeviceMesh((2,), ("a",)), 3) == [Shard(2)]


def test_placements_that_no_layout_can_express() -> None:
    with pytest.raises(LayoutError, match=r"placements\[0\]"):
        dialect.from_placements([placement_types.Partial("max"), placement_types.Shard(0)], DP_TP, 1)
    # A plain shard that comes after cuts the three pieces in two, which ends within one of them.
    strided = placement_types._StridedShard(0, split_factor=3)
    with pytest.raises(
        LayoutError, match=r"^placements \[StridedShard\(dim=0, split_factor=3\), .* no layout expresses"
    ):
        dialect.from_placements([strided, placement_types.Shard(0)], DP_TP, 1)
    mask = getattr(placement_types, "MaskPartial", None)
    if mask is not None:
        with pytest.raises(LayoutError, match=r"placements\[0\] must be a Shard"):
            dialect.from_placements([mask(), placement_types.Shard(0)], DP_TP, 1)


def test_placements_of_nonsense() -> None:
    """PyTorch makes them; they are refused where they are read."""
    for placement in (placement_types._StridedShard(0, split_factor=0), placement_types.Partial("nonsense")):
        with pytest.raises(LayoutError, match=r"placements\[0\]"):
            dialect.from_placements([placement, placement_types.Shard(0)], DP_TP, 1)


def test_layouts_there_and_back() -> None:
    source = random.Random(0)
    for _ in range(100):
        layout = random_layout(source)
        try:
            theirs = dialect.to_torch_placements(dialect.to_placements(layout))
        except LayoutError:  # orders of axes of size 1 that placements cannot say
            continue
        assert dialect.from_placements(theirs, mesh_of(layout), layout.rank) == layout


def test_meshes_there_and_back() -> None:
    for mesh in (DP_TP, DeviceMesh((2, 2), ("x", "y"), devices=[f"cuda:{i}" for i in (3, 1, 0, 2)])):
        theirs = dialect.mesh_to_torch(mesh, **ALONE)
        assert isinstance(theirs, device_mesh.DeviceMesh)
        assert tuple(theirs.shape) == mesh.shape
        assert theirs.mesh_dim_names == mesh.axis_names
        assert dialect.mesh_from_torch(theirs) == mesh
    for names in (None, ("x", "x")):
        with pytest.raises(MeshError):
            dialect.mesh_from_torch(device_mesh.DeviceMesh("cpu", [[0, 1]], mesh_dim_names=names, **ALONE))


@pytest.mark.parametrize("dtype", ["float32", "complex64", "bool", "uint8", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_tensors_share_the_memory_of_arrays(dtype: str) -> None:
    if dtype.startswith(("bfloat", "float8")):
        pytest.importorskip("ml_dtypes")
    array = np.ones((3, 4), np.dtype(dtype))
    sharded = distribute_tensor(array, TensorLayout((None, "dp"), DP_TP))
    tensors = dialect.to_local_tensors(sharded)
    assert all(tensor.dtype == getattr(torch, dtype) and tuple(tensor.shape) == (3, 1) for tensor in tensors)
    tensors[2][1] = 0
    assert not array[1, 1]
    back = dialect.from_local_tensors(tensors, sharded.layout, (3, 4))
    assert isinstance(back, ShardedArray)
    assert back.dtype == array.dtype
    assert np.shares_memory(back.shards[0].data, array)
    assert back.numpy().tobytes() == array.tobytes()


def test_tensors_of_no_dims_and_no_elements() -> None:
    for array in (np.array(1.5), np.zeros((0, 3)), np.arange(12.0)[::2]):
        layout = TensorLayout((None,) * array.ndim, DP_TP)
        tensors = dialect.to_local_tensors(distribute_tensor(array, layout))
        assert all(tensor.tolist() == array.tolist() for tensor in tensors)
        assert dialect.from_local_tensors(tensors, layout, array.shape).numpy().tolist() == array.tolist()


@pytest.mark.parametrize(
    ("array", "error"),
    [
        (np.zeros(8)[::-1], ValueError),
        (np.zeros(8, "f4").astype(">f4"), ValueError),
        (np.zeros(8, "i1,f4")["f1"], ValueError),
        (np.zeros(8, "i4,f4"), TypeError),
        (np.zeros(8, "M8[s]"), TypeError),
    ],
)
def test_arrays_that_pytorch_does_not_have(array: Any, error: type[Exception]) -> None:
    sharded = distribute_tensor(array, TensorLayout((("dp", "tp"),), DP_TP))
    # PyTorch makes a tensor of one element of any strides.
    sharded = sharded if error is TypeError else distribute_tensor(array, TensorLayout(("tp",), DP_TP))
    with pytest.raises(error):
        dialect.to_local_tensors(sharded)


def test_local_tensors_that_have_a_gradient() -> None:
    tensors = [torch.full((1,), float(i), requires_grad=True) for i in range(8)]
    sharded = dialect.from_local_tensors(tensors, TensorLayout((("dp", "tp"),), DP_TP), (8,))
    assert sharded.numpy().tolist() == list(range(8))


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that makes this process one rank of a group whose other ranks are not there."""
    distributed = torch.distributed
    store = importlib.import_module("torch.testing._internal.distributed.fake_pg").FakeStore

    def become(number: int, world: int) -> None:
        if distributed.is_initialized():
            distributed.destroy_process_group()
        distributed.init_process_group("fake", rank=number, world_size=world, store=store())

    yield become
    if distributed.is_initialized():
        distributed.destroy_process_group()


def test_distribute_tensor_of_pytorch_gives_the_same_tensors(rank: Any) -> None:
    theirs = importlib.import_module("torch.distributed.tensor").distribute_tensor
    calculate = importlib.import_module("torch.distributed.tensor._utils").compute_local_shape_and_global_offset
    cases: list[tuple[TensorLayout, tuple[int, ...]]] = [
        (TensorLayout((("dp", "tp"), None), DP_TP), (11, 3)),
        (TensorLayout(("tp", "dp"), DP_TP), (5, 6)),
        (TensorLayout((("tp", "dp"),), DP_TP), (16,)),
        (TensorLayout((("tp", "dp"),), DP_TP), (15,)),
        (TensorLayout((None, "tp"), DP_TP), (2, 1)),
    ]
    for layout, shape in cases:
        array = np.arange(np.prod(shape)).reshape(shape)
        ours = dialect.to_local_tensors(distribute_tensor(array, layout, uneven="chunk"))
        placements = dialect.to_torch_placements(dialect.to_placements(layout))
        shards = local_shards(placements, DP_TP, shape)
        for number in range(DP_TP.size):
            rank(number, DP_TP.size)
            mesh = dialect.mesh_to_torch(DP_TP)
            local = theirs(torch.from_numpy(array), mesh, placements, src_data_rank=None).to_local()
            assert torch.equal(local, ours[number]), (layout, shape, number)
            expected = calculate(torch.Size(shape), mesh, placements)
            assert (tuple(shards.shapes[number]), tuple(shards.offsets[number])) == tuple(map(tuple, expected))


def test_from_local_takes_the_tensors_with_the_global_shape(rank: Any) -> None:
    dtensor = importlib.import_module("torch.distributed.tensor").DTensor
    layout = TensorLayout((("dp", "tp"),), DP_TP)
    tensors = dialect.to_local_tensors(distribute_tensor(np.arange(11), layout, uneven="chunk"))
    placements = dialect.to_torch_placements(dialect.to_placements(layout))
    for number, tensor in enumerate(tensors):
        rank(number, DP_TP.size)
        made = dtensor.from_local(tensor, dialect.mesh_to_torch(DP_TP), placements, shape=torch.Size([11]), stride=(1,))
        assert made.shape == (11,)
        assert torch.equal(made.to_local(), tensor)


def test_a_cpu_tensor_is_distributed_without_a_copy() -> None:
    tensor = torch.arange(12).reshape(3, 4)
    shard = distribute_tensor(tensor, TensorLayout((None, "x"), DeviceMesh((2,), ("x",)))).shard("cpu:1")
    shard[0, 0] = 100
    assert tensor[0, 2].item() == 100
