"""The layout of the DTensor dialect: what TensorFlow's tests ask of it, and what it refuses."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise import DeviceMesh, LayoutError, MeshError, SizeOverflowError, TensorLayout
from shardwise.dtensor import MATCH, UNSHARDED, Layout, LayoutType, Mesh
from tests.dtensor.strategies import layouts

TPUS = ",".join(f"/job:localhost/replica:0/task:0/device:TPU:{index}" for index in range(4))
MESH = Mesh.from_string("|batch=2,x=2|0,1,2,3|0,1,2,3|" + TPUS)
DEVICE = Mesh.from_device("/job:localhost/replica:0/task:0/device:TPU:0")
SINGLE = Layout.from_single_device_mesh(DEVICE)
EMPTY = Layout.from_string("empty_layout")


def test_queries() -> None:
    layout = Layout(["batch", UNSHARDED, "x"], mesh=MESH)
    assert layout.sharding_specs == ["batch", "unsharded", "x"]
    assert layout.mesh is MESH
    assert layout.mesh_proto() == MESH.as_proto()
    assert (layout.rank, layout.shape, layout.type) == (3, [2, 2], LayoutType.STATIC)
    assert [layout.num_shards(dim) for dim in range(3)] == [2, 1, 2]
    assert not layout.is_fully_replicated()
    assert not layout.is_batch_parallel()
    assert not layout.is_single_device()
    assert layout.offset_to_shard() == [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)]


def test_constructors() -> None:
    assert Layout.replicated(MESH, rank=2) == Layout([UNSHARDED, UNSHARDED], MESH)
    assert Layout.replicated(MESH, 0) == Layout([], MESH)
    assert Layout.batch_sharded(MESH, "batch", rank=3) == Layout(["batch", UNSHARDED, UNSHARDED], MESH)
    assert Layout.batch_sharded(MESH, "x", 3, axis=1) == Layout([UNSHARDED, "x", UNSHARDED], MESH)
    assert Layout.inner_sharded(MESH, "x", 3) == Layout([UNSHARDED, UNSHARDED, "x"], MESH)
    assert Layout.batch_sharded(MESH, "batch", rank=2).is_batch_parallel()
    assert Layout.replicated(MESH, rank=2).is_fully_replicated()
    assert Layout(("x",), MESH) == Layout(["x"], MESH)
    assert Layout.batch_sharded(MESH, "batch", np.int64(2)).rank == 2


def test_no_specs_are_not_one_that_cuts_nothing() -> None:
    none = Layout.from_string("sharding_specs: mesh:" + MESH.to_string())
    one = Layout.from_string("sharding_specs:unsharded, mesh:" + MESH.to_string())
    assert none.rank == 0
    assert none.to_string() != one.to_string()
    assert none != one


def test_single_device() -> None:
    assert SINGLE.is_single_device()
    assert SINGLE.mesh == DEVICE
    assert Layout.from_device(DEVICE.single_device) == SINGLE
    assert (SINGLE.type, SINGLE.rank, SINGLE.sharding_specs) == (LayoutType.SINGLE_DEVICE, 0, [])
    assert not SINGLE.is_fully_replicated()
    assert not SINGLE.is_batch_parallel()
    assert SINGLE.local_shape_from_global_shape((3, 4)) == SINGLE.global_shape_from_local_shape((3, 4)) == (3, 4)
    for refused in (SINGLE.to_parted, SINGLE.offset_to_shard, SINGLE.to_tensor_layout, lambda: SINGLE.partition((2,))):
        with pytest.raises(LayoutError):
            refused()


def test_parted() -> None:
    parted = Layout.batch_sharded(MESH, "batch", rank=2).to_parted()
    assert parted.type is LayoutType.PARTED
    assert parted.to_parted() == parted
    assert parted != Layout.batch_sharded(MESH, "batch", rank=2)
    assert parted.delete(1).type is LayoutType.PARTED
    assert parted.partition((4, 2)).num_shards == (2, 1)
    with pytest.raises(LayoutError, match="PARTED"):
        parted.to_tensor_layout()


def test_the_empty_layout() -> None:
    assert EMPTY.to_string() == "empty_layout"
    assert EMPTY.type is LayoutType.EMPTY
    assert EMPTY.serialized_string() == b"\x12\x00"
    assert Layout.from_str(b"") == EMPTY
    assert EMPTY.mesh == Mesh.from_string("empty_mesh")


def test_delete() -> None:
    layout = Layout(["batch", UNSHARDED, "x"], MESH)
    assert layout.delete(1) == Layout(["batch", "x"], MESH)
    assert (
        layout.delete([2, 0, 2])
        == layout.delete((0, 2))
        == layout.delete(np.array([0, 2]))
        == Layout([UNSHARDED], MESH)
    )
    assert layout.delete([]) == layout
    for wrong in (3, -1, [0, 3]):
        with pytest.raises(LayoutError, match="outside the layout, which has rank 3"):
            layout.delete(wrong)
    for wrong_type in ("x", 1.0, True, [True]):
        with pytest.raises(TypeError):
            layout.delete(wrong_type)  # type: ignore[arg-type]


ANY_LAYOUT: Any = Layout  # what the type checker would refuse


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: ANY_LAYOUT(["batch", "x"], "string_mesh"), LayoutError, "mesh is not a valid Mesh object"),
        (lambda: ANY_LAYOUT(["batch"], None), LayoutError, "mesh is not a valid Mesh object"),
        (lambda: Layout(["batch", "batch"], MESH), LayoutError, r"Mesh dimensions must be unique in a layout."),
        (lambda: Layout([MATCH, MATCH], MESH), LayoutError, "must be unique"),
        (
            lambda: Layout(["WRONG", UNSHARDED], MESH),
            LayoutError,
            "A dimension sharding must either be a valid mesh dimension or UNSHARDED.",
        ),
        (lambda: Layout(["any"], MESH), LayoutError, "A dimension sharding"),
        (lambda: Layout([UNSHARDED] * 255, MESH), LayoutError, "rank 255"),
        (lambda: Layout([], Mesh.from_string("empty_mesh")), LayoutError, "an empty mesh"),
        (lambda: Layout([], DEVICE), LayoutError, "a single-device mesh"),
        (lambda: Layout("xy", MESH), TypeError, "sharding_specs"),
        (lambda: ANY_LAYOUT(None, MESH), TypeError, "sharding_specs"),
        (lambda: ANY_LAYOUT(["x", None], MESH), TypeError, r"sharding_specs\[1\]"),
        (lambda: Layout(["\ud800"], MESH), TypeError, "surrogate"),
        (lambda: Layout.replicated(MESH, -1), LayoutError, "rank -1"),
        (lambda: Layout.replicated(MESH, 255), LayoutError, "rank 255"),
        (lambda: Layout.replicated(MESH, 2**70), SizeOverflowError, "rank"),
        (lambda: Layout.replicated(MESH, True), TypeError, "rank"),
        (lambda: ANY_LAYOUT.replicated(MESH, 1.0), TypeError, "rank"),
        (lambda: Layout.replicated(DEVICE, 1), LayoutError, "a single-device mesh"),
        (lambda: Layout.batch_sharded(MESH, "x", rank=0), LayoutError, "dim 0 is outside the layout, which has rank 0"),
        (lambda: Layout.batch_sharded(MESH, "x", rank=2, axis=-1), LayoutError, "dim -1"),
        (lambda: Layout.batch_sharded(MESH, "x", rank=2, axis=2), LayoutError, "dim 2"),
        (lambda: Layout.batch_sharded(MESH, "q", rank=2), LayoutError, "A dimension sharding"),
        (lambda: Layout.batch_sharded(MESH, "any", rank=2), LayoutError, "A dimension sharding"),
        (lambda: ANY_LAYOUT.batch_sharded(MESH, 1, rank=2), TypeError, "mesh dimension"),
        (lambda: Layout.inner_sharded(MESH, "x", rank=0), LayoutError, "outside"),
        (lambda: Layout.from_single_device_mesh(MESH), LayoutError, "a mesh with axes"),
        (lambda: Layout.from_device("garbage"), MeshError, "not a device name"),
    ],
)
def test_what_is_no_layout(make: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


@pytest.mark.parametrize("dim", [-1, 2, 99_999_999])
def test_num_shards_outside(dim: int) -> None:
    with pytest.raises(LayoutError, match=f"dim {dim} is outside the layout, which has rank 2"):
        Layout(["x", UNSHARDED], MESH).num_shards(dim)


def test_match_leaves_open_how_a_dim_is_cut() -> None:
    layout = Layout([MATCH, "x"], MESH)
    assert not layout.is_fully_replicated()
    assert layout.num_shards(1) == 2
    for refused in (
        lambda: layout.num_shards(0),
        layout.offset_to_shard,
        lambda: layout.offset_tuple_to_global_index((0, 0)),
        lambda: layout.local_shape_from_global_shape((2, 2)),
        lambda: layout.global_shape_from_local_shape((2, 2)),
        layout.to_tensor_layout,
    ):
        with pytest.raises(LayoutError, match=r"sharding_specs\[0\] is \"match\""):
            refused()


def test_shapes() -> None:
    layout = Layout(["batch", "x", UNSHARDED], MESH)
    assert layout.global_shape_from_local_shape((1, 3, 5)) == (2, 6, 5)
    assert layout.local_shape_from_global_shape((2, 6, 5)) == (1, 3, 5)
    assert layout.local_shape_from_global_shape([None, -1, 0]) == (-1, -1, 0)
    assert layout.global_shape_from_local_shape(iter([None, -1, 0])) == (-1, -1, 0)
    for wrong in ((2, 7, 5), (2, 6), (2, 6, 5, 1), (2, 6, -5), (-2, 6, 5)):
        with pytest.raises(LayoutError):
            layout.local_shape_from_global_shape(wrong)
    with pytest.raises(LayoutError):
        Layout.replicated(MESH, 1).local_shape_from_global_shape((2, 6))
    for wrong_type in ((2.0, 6, 5), (True, 6, 5), "265", 7):
        with pytest.raises(TypeError):
            layout.local_shape_from_global_shape(wrong_type)  # type: ignore[arg-type]
    for large in ((2**62, 1, 1), (2**70, 1, 1)):
        with pytest.raises(SizeOverflowError):
            layout.global_shape_from_local_shape(large)


@settings(deadline=None)
@given(layouts(cut=True).filter(lambda layout: not layout.is_single_device()))
def test_shards_agree_with_the_main_dialect(layout: Layout) -> None:
    shards = [layout.num_shards(dim) for dim in range(layout.rank)]
    partition = layout.partition(shards)
    assert partition.num_shards == layout.to_tensor_layout().num_shards == tuple(shards)
    by_device = layout.offset_to_shard()
    assert [layout.offset_tuple_to_global_index(index) for index in by_device] == partition.shard_ids().tolist()
    assert layout.offset_tuple_to_global_index(
        np.array(by_device, dtype=np.int64).reshape(len(by_device), layout.rank)
    ).tolist() == (partition.shard_ids().tolist())
    corners = [tuple(cut.start for cut in partition.box(label)) for label in partition.device_mesh.devices.ravel()]
    assert by_device == corners
    local = tuple(range(2, 2 + layout.rank))
    whole = layout.global_shape_from_local_shape(local)
    assert layout.local_shape_from_global_shape(whole) == local
    assert layout.partition(whole).shard_shape(partition.device_mesh.device(0)) == local


@settings(deadline=None)
@given(layouts(cut=True), st.data())
def test_indices_count_the_shards(layout: Layout, data: st.DataObject) -> None:
    shards = [range(layout.num_shards(dim)) for dim in range(layout.rank)]
    indices = list(itertools.product(*shards))
    assert [layout.offset_tuple_to_global_index(index) for index in indices] == list(range(len(indices)))
    if layout.rank:
        dim = data.draw(st.integers(0, layout.rank - 1))
        wrong = list(indices[0])
        wrong[dim] = data.draw(st.sampled_from([-1, len(shards[dim])]))
        with pytest.raises(IndexError, match=rf"offset_tuple\[{dim}\] is {wrong[dim]}"):
            layout.offset_tuple_to_global_index(wrong)
        rows = np.array([indices[0], wrong])
        with pytest.raises(IndexError, match=rf"offset_tuple\[{layout.rank + dim}\]"):
            layout.offset_tuple_to_global_index(rows)
    for length in (layout.rank - 1, layout.rank + 1):
        if length >= 0:
            with pytest.raises(LayoutError, match=f"{length} entr(y|ies) but the layout has rank {layout.rank}"):
                layout.offset_tuple_to_global_index([0] * length)


@pytest.mark.parametrize(
    ("index", "error"),
    [((0.0, 0), TypeError), ((True, 0), TypeError), ("00", TypeError), (3, TypeError), ((2**70, 0), IndexError),
     (np.zeros((2, 2)), TypeError), (np.zeros((2, 2), bool), TypeError), (np.zeros((2, 3), int), LayoutError)],
)  # fmt: skip
def test_indices_that_are_none(index: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        Layout(["batch", "x"], MESH).offset_tuple_to_global_index(index)


def test_indices_may_be_of_any_integers() -> None:
    layout = Layout(["batch", "x"], MESH)
    assert layout.offset_tuple_to_global_index([np.int8(1), np.uint64(1)]) == 3
    assert layout.offset_tuple_to_global_index(np.array([1, 0])) == 2
    turned = np.array([[0, 1], [1, 1]], dtype=">i2").T
    assert layout.offset_tuple_to_global_index(turned).tolist() == [1, 3]
    assert layout.offset_tuple_to_global_index(np.zeros((0, 2), int)).tolist() == []


def test_unravel() -> None:
    layout = Layout([UNSHARDED, "x"], MESH)
    arranged = layout.unravel(["a", "b", "c", "d"])
    assert arranged.shape == (1, 2)
    assert arranged.tolist() == [["c", "d"]]
    with pytest.raises(LayoutError, match="3 entries but the mesh has 4"):
        layout.unravel("abc")


@settings(deadline=None)
@given(layouts())
def test_a_layout_comes_back_from_everything(layout: Layout) -> None:
    assert Layout.from_string(layout.to_string()) == layout
    assert Layout.from_proto(layout.as_proto()) == layout
    assert Layout.from_str(layout.serialized_string()) == layout
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert copy.copy(layout) == copy.deepcopy(layout) == layout
    assert eval(repr(layout)) == layout
    assert hash(eval(repr(layout))) == hash(layout)
    assert layout.mesh_proto() == layout.mesh.as_proto()
    assert layout != layout.to_string()


def test_immutable() -> None:
    layout = Layout(["x"], MESH)
    for name in ("mesh", "sharding_specs", "rank", "type", "shape"):
        with pytest.raises(AttributeError):
            setattr(layout, name, None)
    layout.sharding_specs.append("y")
    assert layout.sharding_specs == ["x"]


@settings(deadline=None)
@given(layouts(cut=True).filter(lambda layout: layout.type is LayoutType.STATIC))
def test_to_and_from_tensor_layout(layout: Layout) -> None:
    tensor_layout = layout.to_tensor_layout()
    assert tensor_layout.axes == tuple(None if spec == UNSHARDED else spec for spec in layout.sharding_specs)
    assert Layout.from_tensor_layout(tensor_layout, layout.mesh) == layout
    assert Layout.from_tensor_layout(tensor_layout).to_tensor_layout() == tensor_layout


def test_what_this_dialect_cannot_express() -> None:
    mesh = DeviceMesh((2, 2), ("batch", "x"))
    for layout, match in [
        (TensorLayout((("batch", "x"),), mesh), "one mesh axis at most"),
        (TensorLayout(("batch",), mesh, unreduced=("x",)), "unreduced"),
        (TensorLayout(("batch",)), "no device_mesh"),
    ]:
        with pytest.raises(LayoutError, match=match):
            Layout.from_tensor_layout(layout)
        if layout.device_mesh is not None:
            with pytest.raises(LayoutError, match=match):
                Layout.from_tensor_layout(layout, Mesh.from_device_mesh(mesh))
    assert Layout.from_tensor_layout(TensorLayout(("batch",)), MESH) == Layout(["batch"], MESH)
    with pytest.raises(LayoutError, match="whose axes are not those of the layout's"):
        Layout.from_tensor_layout(TensorLayout(("x",), DeviceMesh((4,), ("x",))), MESH)


@pytest.mark.parametrize("wrong", [None, 1, b"m"])
def test_only_strings_and_messages_are_read(wrong: Any) -> None:
    with pytest.raises(TypeError):
        Layout.from_string(wrong)
    with pytest.raises(TypeError):
        Layout.from_proto(wrong)
    with pytest.raises(TypeError):
        Layout.from_str("text" if wrong == b"m" else wrong)  # type: ignore[arg-type]
