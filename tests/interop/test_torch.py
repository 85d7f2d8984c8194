"""PyTorch's dialect: cases from PyTorch's own tests, explicit lists of elements, and PyTorch where it is installed."""

from __future__ import annotations

import itertools
import random
import sys
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise import DeviceMesh, LayoutError, MeshError, TensorLayout, distribute_tensor, packed
from shardwise.interop import torch as dialect
from shardwise.interop.torch import Partial, Replicate, Shard, StridedShard, local_shards

from .layouts import layouts, mesh_of
from .segments import random_segments

DP_TP = DeviceMesh((4, 2), ("dp", "tp"))


# From test/distributed/tensor/test_utils.py of PyTorch: test_uneven_fsdp_tp_meta_compute.
def test_uneven_fsdp_with_tensor_parallelism() -> None:
    shards = local_shards([StridedShard(0, split_factor=2), Shard(0)], DP_TP, (15, 5))
    assert shards.shapes[:, 0].tolist() == [2, 2, 2, 2, 2, 2, 2, 1]
    assert shards.offsets[:, 0].tolist() == [0, 8, 2, 10, 4, 12, 6, 14]
    assert shards.is_box.all()


# From the same file: test_compute_local_shape_and_global_offset_uneven, where one rank in thirty is empty.
def test_uneven_and_empty_strided_shards() -> None:
    mesh = DeviceMesh((30, 8), ("dp", "tp"))
    shards = local_shards([StridedShard(0, split_factor=8), Shard(0)], mesh, (4096, 4096))
    for rank, (dp, tp) in enumerate(itertools.product(range(30), range(8))):
        expected = (18, tp * 512 + 18 * dp) if dp < 28 else (8, tp * 512 + 504) if dp == 28 else (0, 4096)
        assert (shards.shapes[rank, 0], shards.offsets[rank, 0]) == expected
    assert (shards.shapes[:, 1] == 4096).all()


# From the docstring of compute_local_shape_and_global_offset.
def test_the_example_of_the_docstring() -> None:
    shards = local_shards([Shard(1), Shard(1)], DeviceMesh((2, 2), ("DP", "TP")), (2, 5))
    assert shards.shapes.tolist() == [[2, 2], [2, 1], [2, 1], [2, 1]]
    assert shards.offsets.tolist() == [[0, 0], [0, 2], [0, 3], [0, 4]]


# From a comment in _compute_local_shape_and_global_offset: ranks hold [0, 2], [1, 3], [4, 6] and [5, 7].
def test_strided_shards_that_are_no_boxes() -> None:
    shards = local_shards([Shard(0), StridedShard(0, split_factor=2)], DeviceMesh((2, 2), ("x", "y")), (8,))
    assert shards.shapes.tolist() == [[2]] * 4
    assert shards.offsets.tolist() == [[0], [1], [4], [5]]
    assert not shards.is_box.any()


# What distribute_tensor of PyTorch 2.10.0 gave every rank of torch.arange(n), and its calculator.
@pytest.mark.parametrize(
    ("mesh_shape", "placements", "held"),
    [
        ((2, 2), [Shard(0), Shard(0)], [[0, 1, 2], [3, 4], [5, 6], [7, 8]]),
        ((2, 2), [Shard(0), Shard(0)], [[0], [1], [2], []]),
        ((2, 2), [StridedShard(0, 2), Shard(0)], [[0, 1, 2], [5, 6], [3, 4], [7, 8]]),
        ((4, 2), [StridedShard(0, 2), Shard(0)], [[0, 1], [5], [2, 3], [6], [4], [7], [8], []]),
        ((2, 2), [Shard(0), StridedShard(0, 2)], [[0, 2], [1, 3], [4, 6], [5, 7]]),
        (
            (2, 2, 2),
            [StridedShard(0, 4), StridedShard(0, 2), Shard(0)],
            [[0, 1], [8, 9], [4, 5], [12], [2, 3], [7, 10], [6], [11]],
        ),
        (
            (2, 2, 2),
            [Shard(0), StridedShard(0, 2), Shard(0)],
            [[0, 1], [4, 5], [2, 3], [6], [7, 8], [10, 11], [9], [12]],
        ),
    ],
)
def test_what_pytorch_gives_where_dims_do_not_divide(
    mesh_shape: tuple[int, ...], placements: list[Any], held: list[list[int]]
) -> None:
    size = sum(map(len, held))
    shards = local_shards(placements, DeviceMesh(mesh_shape, list("xyz")[: len(mesh_shape)]), (size,))
    assert shards.shapes[:, 0].tolist() == [len(elements) for elements in held]
    assert shards.offsets[:, 0].tolist() == [elements[0] if elements else size for elements in held]
    together = [elements == list(range(elements[0], elements[-1] + 1)) for elements in held if elements]
    assert [bool(box) for box, elements in zip(shards.is_box, held, strict=True) if elements] == together
    assert all(box for box, elements in zip(shards.is_box, held, strict=True) if not elements)


def test_a_shard_without_elements_is_a_box() -> None:
    placements = [Shard(0), StridedShard(0, 2)]
    assert local_shards(placements, DeviceMesh((2, 2), ("x", "y")), (8, 0)).is_box.all()


# From test_explicit_order_placements: what order of axes the placements say.
@pytest.mark.parametrize(
    ("shape", "placements", "order"),
    [
        ((2, 4), [StridedShard(0, 4), Shard(0)], (1, 0)),
        ((2, 3, 4), [Shard(0), StridedShard(0, 4), Shard(0)], (0, 2, 1)),
        ((2, 3, 4), [StridedShard(0, 12), StridedShard(0, 4), Shard(0)], (2, 1, 0)),
    ],
)
def test_the_order_of_strided_shards(shape: tuple[int, ...], placements: list[Any], order: tuple[int, ...]) -> None:
    mesh = DeviceMesh(shape, list("abc")[: len(shape)])
    layout = TensorLayout((tuple(mesh.axis_names[i] for i in order),), mesh)
    assert dialect.from_placements(placements, mesh, 1) == layout
    assert dialect.to_placements(layout) == placements


def chunk(elements: npt.NDArray[np.int64], count: int) -> list[npt.NDArray[np.int64]]:
    """`torch.chunk`, with empty pieces at the end so that there are `count`."""
    size = max(1, -(-len(elements) // count))
    return [elements[i * size : (i + 1) * size] for i in range(count)]


def elements_of(dim: int, size: int, mesh: DeviceMesh, placements: list[Any], rank: int) -> npt.NDArray[np.int64]:
    """The elements of one dim that a rank holds, found by cutting the list of them as the placements say."""
    held = np.arange(size)
    for count, coordinate, placement in zip(mesh.shape, mesh.coordinate(rank), placements, strict=True):
        if isinstance(placement, (Shard, StridedShard)) and placement.dim == dim:
            factor = placement.split_factor if isinstance(placement, StridedShard) else 1
            held = np.concatenate([chunk(piece, count)[coordinate] for piece in chunk(held, factor)])
    return held


placements_of = st.one_of(
    st.just(Replicate()),
    st.just(Partial()),
    st.builds(Shard, st.integers(0, 1)),
    st.builds(StridedShard, st.integers(0, 1), st.integers(1, 6)),
)


@given(
    st.lists(st.tuples(st.integers(1, 4), placements_of), min_size=1, max_size=4), st.integers(0, 40), st.integers(0, 9)
)
def test_local_shards_hold_the_elements_that_cutting_lists_gives(cuts: list[tuple[int, Any]], n: int, m: int) -> None:
    mesh = DeviceMesh([size for size, _ in cuts], [f"a{i}" for i in range(len(cuts))])
    placements = [placement for _, placement in cuts]
    shards = local_shards(placements, mesh, (n, m))
    for rank in range(mesh.size):
        held = [elements_of(dim, size, mesh, placements, rank) for dim, size in enumerate((n, m))]
        assert shards.shapes[rank].tolist() == [len(elements) for elements in held]
        # An empty shard begins where the dim ends.
        first = [int(elements[0]) if len(elements) else size for elements, size in zip(held, (n, m), strict=True)]
        assert shards.offsets[rank].tolist() == first
        together = all((np.diff(elements) == 1).all() for elements in held)
        assert shards.is_box[rank] == (together or not all(map(len, held)))


@given(layouts(), st.integers(0, 30))
def test_layouts_in_mesh_order_are_cut_by_the_chunk_rule(layout: TensorLayout, size: int) -> None:
    mesh = mesh_of(layout)
    axes = [() if spec is None else (spec,) if isinstance(spec, str) else spec for spec in layout.axes]
    ordered = TensorLayout([tuple(sorted(spec, key=mesh.axis_names.index)) for spec in axes], mesh)  # type: ignore[arg-type]
    shape = tuple(range(size, size + layout.rank))
    shards = local_shards(dialect.to_placements(ordered), mesh, shape)
    boxes = ordered.partition(shape, uneven="chunk").boxes()
    assert np.array_equal(np.stack([shards.offsets, shards.offsets + shards.shapes], axis=-1), boxes)
    assert shards.is_box.all()


@given(layouts())
def test_where_all_dims_divide_any_order_is_the_partition(layout: TensorLayout) -> None:
    mesh = mesh_of(layout)
    shape = tuple(2 * count for count in layout.num_shards)
    try:
        placements = dialect.to_placements(layout)
    except LayoutError:
        return
    shards = local_shards(placements, mesh, shape)
    boxes = layout.partition(shape).boxes()
    assert np.array_equal(np.stack([shards.offsets, shards.offsets + shards.shapes], axis=-1), boxes)
    assert shards.is_box.all()


def held_by(placements: list[Any], mesh: DeviceMesh, size: int) -> list[list[int]]:
    return [elements_of(0, size, mesh, placements, rank).tolist() for rank in range(mesh.size)]


def rows_of(layout: TensorLayout, size: int) -> list[list[int]]:
    """What the devices hold of a dim, in the order of their arrays."""
    pieces = [layout.partition((size,)).pieces(label) for label in mesh_of(layout).labels()]
    return [[row for one in own for row in range(one.box[0].start, one.box[0].stop)] for own in pieces]


@pytest.mark.heavy
@given(st.randoms(use_true_random=False))
def test_equal_segments_are_strided_shards(source: random.Random) -> None:
    """Packed dims and sub-axes: what PyTorch cuts is what the layout says, there and back."""
    case = random_segments(source)
    layout, mesh = case.layout(), case.mesh()
    assert rows_of(layout, case.size) == case.rows_held()
    try:
        placements = dialect.to_placements(layout)
    except LayoutError:
        assert any(":" in name for name in case.axes) or 1 in case.mesh_shape
        return
    assert held_by(placements, mesh, case.size) == case.rows_held()
    back = dialect.from_placements(placements, mesh, 1)
    assert rows_of(back, case.size) == case.rows_held()
    assert dialect.to_placements(back) == placements
    array = np.arange(case.size)
    sharded = distribute_tensor(array, layout)
    dialect._check_torch_agrees(sharded)
    assert [shard.data.tolist() for shard in sharded.shards] == case.rows_held()


@given(st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 6]), placements_of), min_size=1, max_size=3))
def test_placements_that_a_layout_can_say_are_read(cuts: list[tuple[int, Any]]) -> None:
    mesh = DeviceMesh([size for size, _ in cuts], [f"a{i}" for i in range(len(cuts))])
    placements = [placement for _, placement in cuts]
    try:
        layout = dialect.from_placements(placements, mesh, 2)
    except LayoutError:
        with pytest.raises(LayoutError, match="split_factor is not a product"):
            dialect.from_placements(placements, mesh, 2)
        return
    shape = [1, 1]
    for size, placement in cuts:
        if isinstance(placement, (Shard, StridedShard)):
            shape[placement.dim] *= size * getattr(placement, "split_factor", 1)
    partition = layout.partition(shape)
    for rank, label in enumerate(mesh.labels()):
        pieces = partition.pieces(label)
        for dim in range(2):
            ours = {row for one in pieces for row in range(one.box[dim].start, one.box[dim].stop)}
            assert sorted(ours) == elements_of(dim, shape[dim], mesh, placements, rank).tolist()


@pytest.mark.parametrize(
    ("dim", "message"),
    [
        (packed.qkv(8, 2, 4, "tp"), "several sizes"),
        (packed.qkv(8, 1, 4, "tp"), "at most 1"),
        (packed.parse("(8@tp) + (8@dp)"), "not all cut by the same axes"),
        (packed.parse("(8@tp) + (8)"), "not all cut by the same axes"),
        (packed.parse("(n@tp 64)"), "units stay whole"),
        (packed.parse("(7@tp 64)"), "units stay whole"),
        (packed.parse("(n 8@tp)"), "depends on the shape"),
        (packed.parse("(2 n@tp/balanced)"), "uneven rule is 'balanced'"),
        (packed.parse("(2 n@dp+tp/ceil)"), "uneven rule is 'ceil'"),
        (packed.padded_vocab(100, "tp"), "padded"),
        (packed.parse("(0 8@tp)"), "has 0 segments"),
        (packed.parse(f"({2**62} {2**40} 8@tp)"), "segments; there must be 1 to"),
        (packed.parse("(2 8@tp:(1)1+dp:(1)2)"), "whole axes only"),
    ],
)
def test_packed_dims_that_strided_shards_cannot_say(dim: packed.PackedDim, message: str) -> None:
    with pytest.raises(LayoutError, match=message) as caught:
        dialect.to_placements(TensorLayout((dim,), DP_TP))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("dim", "placement"),
    [
        (packed.gate_up("tp"), StridedShard(0, 2)),
        (packed.parse("(n@tp/ceil) + (n@tp/ceil)"), StridedShard(0, 2)),
        (packed.parse("(3 12@tp 64)"), StridedShard(0, 3)),
        (packed.parse("(4@tp 6) + (8@tp 3) + (2 12@tp)"), None),
        (packed.parse("(4@tp 6) + (8@tp 3) + (2 12@tp 2)"), StridedShard(0, 4)),
        (packed.qkv(8, 8, 4, "tp"), StridedShard(0, 3)),
        (packed.qkv(8, 4, 4, "tp", order="interleaved"), Shard(0)),
        (packed.qkv(8, 1, 4, "tp", order="interleaved"), Shard(0)),
        (packed.experts(8, "tp"), Shard(0)),
        (packed.experts(8, "tp", cut="features", fused=2), StridedShard(0, 16)),
    ],
)
def test_packed_dims_that_people_have(dim: packed.PackedDim, placement: Any) -> None:
    if placement is None:
        with pytest.raises(LayoutError, match="several sizes"):
            dialect.to_placements(TensorLayout((dim,), DP_TP))
        return
    assert dialect.to_placements(TensorLayout((dim,), DP_TP)) == [Replicate(), placement]


@pytest.mark.usefixtures("fake_torch")
def test_local_tensors_of_packed_dims() -> None:
    array = np.arange(14 * 3).reshape(14, 3)
    layout = TensorLayout((packed.gate_up("dp"), None), DP_TP)
    sharded = distribute_tensor(array, layout, uneven="chunk")
    tensors = dialect.to_local_tensors(sharded)
    # 7 in 4 chunks are 2, 2, 2 and 1, of each of the two.
    assert [tensor.array[:, 0].tolist() for tensor in tensors[::2]] == [
        [0, 3, 21, 24],
        [6, 9, 27, 30],
        [12, 15, 33, 36],
        [18, 39],
    ]
    assert np.array_equal(dialect.from_local_tensors(tensors, layout, (14, 3)).numpy(), array)
    with pytest.raises(LayoutError, match="but PyTorch gives it"):
        dialect.to_local_tensors(distribute_tensor(array, layout, uneven="floor"))


def test_the_cost_does_not_grow_with_the_elements() -> None:
    mesh = DeviceMesh((64, 64), ("dp", "tp"))
    shards = local_shards([StridedShard(0, 64), Shard(0)], mesh, (10**12, 8))
    assert shards.shapes[:, 0].sum() == 10**12


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ([Shard(0)], "has 1 entry"),
        ([Shard(2), Shard(0)], "has 2 dims"),
        ([Shard(-3), Shard(0)], "has 2 dims"),
        ([Partial("avg"), Shard(0)], "are sums"),
        ([StridedShard(0, 3), Shard(0)], "is not a product"),
        ([Shard(0), StridedShard(0, 2)], "is not a product"),
        ([StridedShard(0, 0), Shard(0)], "at least 1"),
    ],
)
def test_what_no_layout_can_express(placements: list[Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        dialect.from_placements(placements, DP_TP, 2)


OF_AN_ARRAY = distribute_tensor(np.arange(2), TensorLayout(("x",), DeviceMesh((2,), ("x",)))).shards[0]


def foreign(kind: str, **said: Any) -> Any:
    """A placement of another library, which may say anything."""
    return type(kind, (), said)()


@pytest.mark.parametrize(
    "entry",
    [
        "S(1)",
        None,
        foreign("Shard", dim=1.0),
        Shard(True),
        foreign("StridedShard", dim=0, split_factor="2"),
        OF_AN_ARRAY,
    ],
)
def test_what_is_no_placement(entry: Any) -> None:
    with pytest.raises(TypeError, match=r"placements\[1\]"):
        dialect.from_placements([Shard(0), entry], DP_TP, 2)


class Placement:
    """The base of PyTorch's placements."""


class MaskPartial(Placement):
    """One that says nothing about a layout."""


def test_a_kind_of_placement_that_is_not_known() -> None:
    with pytest.raises(LayoutError, match=r"placements\[0\] must be a Shard, .*MaskPartial"):
        dialect.from_placements([MaskPartial(), Shard(0)], DP_TP, 2)


def test_numpy_integers_as_dims() -> None:
    read = dialect.read_placements([Shard(np.int64(-1))], DeviceMesh((2,), ("x",)), 2)
    assert read == [Shard(1)]
    assert type(read[0].dim) is int  # type: ignore[union-attr]


def test_orders_of_trivial_axes_that_placements_cannot_say() -> None:
    mesh = DeviceMesh((2, 1, 1), ("x", "y", "z"))
    assert dialect.to_placements(TensorLayout((("y", "x"),), mesh))[0] == StridedShard(0, 1)
    with pytest.raises(LayoutError, match="axes of size 1"):
        dialect.to_placements(TensorLayout((("y", "z", "x"),), mesh))


class FakeTensor:
    """As much of a `torch.Tensor` on the CPU as is used."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array = array

    def detach(self) -> FakeTensor:
        return self

    def numpy(self) -> npt.NDArray[Any]:
        return self.array

    def flatten(self) -> FakeTensor:
        return FakeTensor(self.array.ravel())

    def tolist(self) -> Any:
        return self.array.tolist()

    @property
    def dtype(self) -> str:
        return f"torch.{self.array.dtype}"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape


class FakeMesh:
    """As much of a `torch.distributed.DeviceMesh` as is used."""

    def __init__(self, device_type: str, mesh: Any, *, mesh_dim_names: tuple[str, ...] | None = None) -> None:
        self.device_type, self.mesh, self.mesh_dim_names = device_type, FakeTensor(np.array(mesh)), mesh_dim_names


@pytest.fixture
def fake_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch, device_mesh = ModuleType("torch"), ModuleType("torch.distributed.device_mesh")
    torch.from_numpy = FakeTensor  # type: ignore[attr-defined]
    device_mesh.DeviceMesh = FakeMesh  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.distributed", ModuleType("torch.distributed"))
    monkeypatch.setitem(sys.modules, "torch.distributed.device_mesh", device_mesh)


@pytest.mark.usefixtures("fake_torch")
def test_meshes_come_back() -> None:
    for mesh in (DP_TP, DeviceMesh((2, 2), ("x", "y"), devices=[f"cuda:{i}" for i in (3, 1, 0, 2)])):
        assert dialect.mesh_from_torch(dialect.mesh_to_torch(mesh)) == mesh
    for devices, message in ((["a", "b"], "'a'"), (["cpu:0", "cuda:1"], "one type"), (["cpu:0", "cpu:01"], "cpu:01")):
        with pytest.raises(MeshError, match=message):
            dialect.mesh_to_torch(DeviceMesh((2,), ("x",), devices))
    with pytest.raises(MeshError, match="mesh_dim_names"):
        dialect.mesh_from_torch(FakeMesh("cpu", [0, 1]))


@pytest.mark.usefixtures("fake_torch")
def test_local_tensors_share_the_memory() -> None:
    array = np.arange(10.0)
    layout = TensorLayout((("dp", "tp"),), DP_TP)
    sharded = distribute_tensor(array, layout, uneven="chunk")
    tensors = dialect.to_local_tensors(sharded)
    assert all(np.shares_memory(tensor.array, array) for tensor in tensors if tensor.array.size)
    back = dialect.from_local_tensors(tensors, layout, (10,))
    assert np.array_equal(back.numpy(), array)
    assert back.partition == sharded.partition


@pytest.mark.usefixtures("fake_torch")
def test_other_uneven_rules_are_refused() -> None:
    layout = TensorLayout((("dp", "tp"),), DP_TP)
    with pytest.raises(
        LayoutError, match=r"'cpu:2' holds .* PyTorch gives .*; uneven=\"chunk\" is its rule for axes in"
    ):
        dialect.to_local_tensors(distribute_tensor(np.arange(9), layout, uneven="balanced"))
    dialect.to_local_tensors(distribute_tensor(np.arange(9), layout, uneven="chunk"))
    # 9 over tp, then dp, is 5 + 4, then 2, 2, 1, 0 and 1, 1, 1, 1; PyTorch gives the ninth element to tp 0.
    swapped = TensorLayout((("tp", "dp"),), DP_TP)
    with pytest.raises(LayoutError, match="but PyTorch gives it different elements"):
        dialect.to_local_tensors(distribute_tensor(np.arange(9), swapped, uneven="chunk"))
    with pytest.raises(LayoutError, match=r"shards\[0\]"):
        dialect.from_local_tensors([FakeTensor(np.zeros(2))] * 8, layout, (8,))
