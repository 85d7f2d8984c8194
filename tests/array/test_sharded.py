"""ShardedArray, Shard and distribute_tensor."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import pickle
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import shardwise as sw
from shardwise import LayoutError, MeshError
from tests.checks import refused


def mesh() -> sw.DeviceMesh:
    return sw.DeviceMesh((2, 2), ("x", "y"), ["d3", "d1", "d0", "d2"])


def sharded() -> sw.ShardedArray:
    return sw.distribute_tensor(np.arange(12).reshape(4, 3), sw.TensorLayout(("y", None), mesh()))


class TestDistribute:
    def test_the_tensorflow_example(self) -> None:
        """`np.arange(6).reshape((3, 2))` in layout ["x", UNSHARDED] over x=3, y=2, from TensorFlow's documentation."""
        six = sw.DeviceMesh((3, 2), ("x", "y"), [f"TPU:{i}" for i in range(6)])
        shards = sw.distribute_tensor(np.arange(6).reshape(3, 2), sw.TensorLayout(("x", None), six)).shards
        held = {shard.device: shard.data.tolist() for shard in shards}
        assert held == {
            "TPU:0": [[0, 1]],
            "TPU:1": [[0, 1]],
            "TPU:2": [[2, 3]],
            "TPU:3": [[2, 3]],
            "TPU:4": [[4, 5]],
            "TPU:5": [[4, 5]],
        }

    def test_shards_in_device_index_order(self) -> None:
        rows = [(s.device, s.index, s.replica_id, s.data.tolist()) for s in sharded().shards]
        upper, lower = (slice(0, 2), slice(0, 3)), (slice(2, 4), slice(0, 3))
        assert rows == [
            ("d3", upper, 0, [[0, 1, 2], [3, 4, 5]]),
            ("d1", lower, 0, [[6, 7, 8], [9, 10, 11]]),
            ("d0", upper, 1, [[0, 1, 2], [3, 4, 5]]),
            ("d2", lower, 1, [[6, 7, 8], [9, 10, 11]]),
        ]

    def test_no_element_is_copied(self) -> None:
        array = np.arange(12).reshape(4, 3)
        distributed = sw.distribute_tensor(array, sw.TensorLayout(("y", None), mesh()))
        assert all(np.shares_memory(shard.data, array) for shard in distributed.shards)
        distributed.shard("d1")[0, 0] = 100
        assert array[2, 0] == 100

    @pytest.mark.parametrize("layout", [None, ("x", None), "x"])
    def test_a_layout_of_a_wrong_type(self, layout: Any) -> None:
        with refused(TypeError, "layout", "TensorLayout", type(layout).__name__):
            sw.distribute_tensor(np.zeros((4, 3)), layout)

    @pytest.mark.parametrize("shape", [(), (4,), (4, 3, 1)])
    def test_a_layout_of_another_rank(self, shape: tuple[int, ...]) -> None:
        with refused(LayoutError, f"{len(shape)} dim", "layout has 2"):
            sw.distribute_tensor(np.zeros(shape), sw.TensorLayout(("x", None), mesh()))

    def test_a_layout_without_a_mesh(self) -> None:
        with refused(LayoutError, "device_mesh"):
            sw.distribute_tensor(np.zeros(4), sw.TensorLayout(("x",)))

    def test_a_dim_that_does_not_divide(self) -> None:
        layout = sw.TensorLayout(("x", None), mesh())
        with refused(LayoutError, "dim 0", "3 elements", "2 shards"):
            sw.distribute_tensor(np.zeros((3, 3)), layout)
        assert sw.distribute_tensor(np.zeros((3, 3)), layout, "ceil").shard("d2").shape == (1, 3)

    def test_unreduced_axes_have_no_values(self) -> None:
        with refused(LayoutError, "layout", "unreduced", "('x',)"):
            sw.distribute_tensor(np.zeros(4), sw.TensorLayout((None,), mesh(), unreduced=("x",)))

    def test_a_sharded_array_changes_its_layout(self) -> None:
        columns = sw.TensorLayout((None, ("x", "y")), mesh())
        again = sw.distribute_tensor(sharded(), columns, "ceil")
        assert again.numpy().tolist() == np.arange(12).reshape(4, 3).tolist()
        assert again.shard("d2").shape == (4, 0)
        assert again.layout == columns


class TestPutTogether:
    def test_own_memory(self) -> None:
        partition = sharded().partition
        shards = [shard.data.copy() for shard in sharded().shards]
        array = sw.ShardedArray(partition, shards)
        back = array.numpy()
        assert back.tolist() == np.arange(12).reshape(4, 3).tolist()
        assert not any(np.shares_memory(back, shard) for shard in shards)
        back[:] = -1
        assert shards[0].tolist() == [[0, 1, 2], [3, 4, 5]]

    def test_the_canonical_owner_s_values_are_taken(self) -> None:
        shards = [np.full((2, 3), i) for i in range(4)]
        array = sw.ShardedArray(sharded().partition, shards)
        assert array.numpy(check_replicas=False)[:, 0].tolist() == [0, 0, 1, 1]

    @pytest.mark.parametrize("axes", [("x", "y"), (None, ("y", "x")), ("y", None), (None, None)])
    @pytest.mark.parametrize("dtype", ["f4", ">i8", "O"])
    def test_large_arrays(self, axes: Any, dtype: str) -> None:
        """Put together as a plan does it; of replicas only the canonical owner's values are taken."""
        values = np.random.default_rng(0).integers(0, 1000, (1031, 1033)).astype(dtype)
        partition = sw.TensorLayout(axes, mesh()).partition(values.shape, "ceil")
        shards = [view.copy() for view in partition.views(values)]
        for shard, replica in zip(shards, partition.replica_ids(), strict=True):
            if replica:
                shard[...] = -1
        back = sw.ShardedArray(partition, shards).numpy(check_replicas=False)
        assert back.dtype == values.dtype
        assert (back == values).all()
        assert not any(np.shares_memory(back, shard) for shard in shards)

    def test_array_protocol(self) -> None:
        array = sharded()
        assert np.asarray(array).tolist() == np.arange(12).reshape(4, 3).tolist()
        assert np.asarray(array, dtype="f4").dtype == np.float32
        assert (np.add(array, 1) == np.arange(12).reshape(4, 3) + 1).all()
        with refused(ValueError, "copy"):
            array.__array__(copy=False)

    @pytest.mark.parametrize(
        "dtype", ["i1", ">f8", "O", "M8[s]", "U2", [("a", "i1"), ("b", ">f8")], ml_dtypes.bfloat16]
    )
    def test_any_dtype(self, dtype: Any) -> None:
        values = np.zeros((4, 3), dtype)
        array = sw.distribute_tensor(values, sw.TensorLayout(("x", None), mesh()))
        own = sw.ShardedArray(array.partition, [shard.data.copy() for shard in array.shards])
        for back in (array.numpy(), own.numpy()):
            assert back.dtype == values.dtype
            assert (back == values).all()

    @pytest.mark.heavy
    @pytest.mark.parametrize("order", ["C", "F"])
    def test_contiguous_shards_can_be_written_as_they_lie(self, order: Any, tmp_path: Path) -> None:
        """`save_file` of safetensors writes an array's memory, whatever its strides."""
        save_file = importlib.import_module("safetensors.numpy").save_file
        values = np.arange(48, dtype="f4").reshape(8, 6, order=order)
        array = sw.distribute_tensor(values, sw.TensorLayout(("x", "y"), mesh()))
        for device in mesh().devices.flat:
            shard = array.shard(device, contiguous=True)
            assert shard.flags.c_contiguous
            assert shard.tolist() == array.shard(device).tolist()
            save_file({"weight": shard}, tmp_path / "shard.safetensors")
            with sw.open_checkpoint(tmp_path / "shard.safetensors") as written:
                assert written["weight"].array().tolist() == array.shard(device).tolist()

    def test_a_contiguous_shard_is_not_copied_again(self) -> None:
        values = np.arange(12.0).reshape(4, 3)
        rows = sw.distribute_tensor(values, sw.TensorLayout(("x", None), mesh()))
        assert np.shares_memory(rows.shard("d3", contiguous=True), values)
        point = sw.distribute_tensor(np.array(1.0), sw.TensorLayout((), mesh()))
        assert point.shard("d3", contiguous=True).shape == ()

    def test_bytes(self) -> None:
        assert sharded().nbytes == 12 * 8
        assert sw.distribute_tensor(np.zeros((0, 3)), sw.TensorLayout((None, None), mesh())).nbytes == 0

    def test_a_device_that_the_mesh_has_not(self) -> None:
        for array in (sharded(), sw.ShardedArray(sharded().partition, [s.data for s in sharded().shards])):
            with refused(MeshError, "'cpu:0'", "'d3'"):
                array.shard("cpu:0")

    def test_one_addend_is_the_sum(self) -> None:
        one = sw.DeviceMesh((1, 2), ("x", "y"))
        partition = sw.TensorLayout(("y",), one, unreduced=("x",)).partition((4,))
        array = sw.ShardedArray(partition, [np.array([1, 2]), np.array([3, 4])])
        assert array.numpy().tolist() == [1, 2, 3, 4]

    def test_unreduced_shards_are_not_put_together(self) -> None:
        layout = sw.TensorLayout((None,), mesh(), unreduced=("x",))
        array = sw.ShardedArray(layout.partition((2,)), [np.ones(2)] * 4)
        with refused(LayoutError, "unreduced", "('x',)"):
            array.numpy()


class TestConstruction:
    @pytest.mark.parametrize("count", [0, 1, 3, 5])
    def test_another_number_of_shards(self, count: int) -> None:
        with refused(LayoutError, "shards", f"{count} arrays", "4 holders"):
            sw.ShardedArray(sharded().partition, [np.zeros((2, 3))] * count)

    def test_a_shard_of_another_shape_or_dtype(self) -> None:
        good = [np.zeros((2, 3)) for _ in range(4)]
        for bad in (np.zeros((3, 2)), np.zeros(6), np.zeros((2, 3), int), np.zeros((2, 3), ">f8")):
            with refused(LayoutError, "shards[2]", "'d0'", bad.shape, "(2, 3)", "float64"):
                sw.ShardedArray(sharded().partition, [*good[:2], bad, good[3]])

    @pytest.mark.parametrize("bad", [None, [[0.0] * 3] * 2, 5])
    def test_a_shard_of_a_wrong_type(self, bad: Any) -> None:
        with refused(TypeError, "shards[0]", type(bad).__name__):
            sw.ShardedArray(sharded().partition, [bad] * 4)

    def test_masked_shards(self) -> None:
        layout = sw.TensorLayout(("x",), sw.DeviceMesh((2,), ("x",)))
        masked = np.ma.masked_array([1, 2], [True, False])
        with refused(TypeError, "shards[1]", "masked array"):
            sw.ShardedArray(layout.partition((4,)), [np.array([3, 4]), masked])

    @pytest.mark.parametrize("shards", [None, 5, {1, 2}])
    def test_shards_of_a_wrong_type(self, shards: Any) -> None:
        with refused(TypeError, "shards", type(shards).__name__):
            sw.ShardedArray(sharded().partition, shards)

    @pytest.mark.parametrize("partition", [None, (4, 3), "x"])
    def test_a_tiling_of_a_wrong_type(self, partition: Any) -> None:
        with refused(TypeError, "tiling", type(partition).__name__):
            sw.ShardedArray(partition, [])


class TestValue:
    def test_attributes(self) -> None:
        array = sharded()
        assert (array.shape, array.ndim, array.size, array.dtype) == ((4, 3), 2, 12, np.dtype(int))
        assert array.layout == array.partition.layout
        assert "(4, 3)" in repr(array)
        assert "int64" in repr(array)

    def test_immutable(self) -> None:
        for name in ("shape", "dtype", "layout", "partition", "shards", "other"):
            with pytest.raises(AttributeError):
                setattr(sharded(), name, None)
        with pytest.raises(dataclasses.FrozenInstanceError):
            sharded().shards[0].device = "other"  # type: ignore[misc]

    def test_copied_and_pickled(self) -> None:
        array = sharded()
        own = sw.ShardedArray(array.partition, [shard.data.copy() for shard in array.shards])
        for value in (array, own):
            for other in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
                assert other.partition == value.partition
                assert other.numpy().tolist() == value.numpy().tolist()


class TestTilings:
    """Arrays that are cut by other tilings than partitions."""

    WHOLE = np.arange(24.0).reshape(4, 6)
    RANKS = sw.Tiling.from_flat_ranges((4, 6), {"cpu:0": (0, 10), "cpu:1": (10, 24)})
    PARTS = (WHOLE.ravel()[:10].copy(), WHOLE.ravel()[10:].copy())

    def test_a_flat_parameter_to_shards_and_back(self) -> None:
        flat = sw.ShardedArray(self.RANKS, self.PARTS)
        columns = sw.TensorLayout((None, "x"), sw.DeviceMesh((2,), ("x",)))
        cut = flat.reshard(columns)
        assert all(map(np.array_equal, [s.data for s in cut.shards], columns.partition((4, 6)).views(self.WHOLE)))
        back = cut.reshard(self.RANKS)
        assert back.tiling == self.RANKS
        assert np.array_equal(back.shard("cpu:1"), self.PARTS[1])
        assert np.array_equal(flat.numpy(), self.WHOLE)
        assert np.array_equal(np.asarray(back), self.WHOLE)
        assert (flat.shape, flat.ndim, flat.size, flat.nbytes, flat.dtype) == ((4, 6), 2, 24, 192, np.float64)  # type: ignore[comparison-overlap]
        assert repr(flat) == "<ShardedArray (4, 6) float64, ranges of the flattened tensor>"
        # An array that is cut into views of it goes to a tiling too.
        views = sw.distribute_tensor(self.WHOLE, columns)
        assert np.array_equal(views.reshard(self.RANKS).shard("cpu:0"), self.PARTS[0])

    def test_what_only_a_layout_has(self) -> None:
        flat = sw.ShardedArray(self.RANKS, self.PARTS)
        for ask in (lambda: flat.partition, lambda: flat.layout, lambda: flat.shards):
            with refused(LayoutError, "ranges of the flattened tensor, not by a layout"):
                ask()
        with refused(LayoutError, "holder 'x' is not in the tiling"):
            flat.shard("x")
        with refused(LayoutError, "src does not hold [0:1, 0:2]"):
            sw.ShardedArray(sw.Tiling.from_flat_ranges((4, 6), [(2, 24)]), [np.zeros(22)]).numpy()
        with refused(LayoutError, "src is of shape"):
            flat.reshard(sw.Tiling.grid((4, 4), (4, 4)))

    def test_replicas_of_a_box_that_differ(self) -> None:
        twice = sw.Tiling.from_boxes((4,), {"a": [[(0, 2)], [(2, 4)]], "b": [(2, 4)]}, replicas=True)
        good = sw.ShardedArray(twice, [np.array([1, 2, 3, 4]), np.array([3, 4])])
        assert good.numpy().tolist() == [1, 2, 3, 4]
        bad = sw.ShardedArray(twice, [np.array([1, 2, 3, 4]), np.array([3, 5])])
        with refused(LayoutError, "element (3,) is 4 in 'a' and 5 in 'b'"):
            bad.numpy()
        assert bad.numpy(check_replicas=False)[:3].tolist() == [1, 2, 3]


@pytest.mark.parametrize("dim", [-1, 2, 3])
def test_verbs_name_a_dim_that_is_not_there(dim: int) -> None:
    """Two dims: 0 and 1 are there, and none is counted from the end."""
    sums = sw.TensorLayout((None, None), mesh(), unreduced=("x",)).partition((4, 4))
    with refused(IndexError, f"dim is {dim}, outside 0 to 1"):
        sw.array.all_to_all(sharded(), "y", dim=dim)
    with refused(IndexError, f"dim is {dim}, outside 0 to 1"):
        sw.array.reduce_scatter(sw.ShardedArray(sums, [np.ones((4, 4))] * 4), "x", dim=dim)
    with refused(IndexError, "dim is 0, but rank is 0"):
        sw.array.all_to_all(sw.distribute_tensor(np.array(1.0), sw.TensorLayout((), mesh())), "y", dim=0)


def test_verbs_leave_other_dims_packed() -> None:
    """A device holds rows of both parts before and after, and all columns after."""
    axes = (sw.packed.gate_up("x"), "y")
    whole = np.arange(32).reshape(8, 4)
    cut = sw.distribute_tensor(whole, sw.TensorLayout(axes, sw.DeviceMesh((2, 2), ("x", "y"))))
    rows = sw.array.all_gather(cut, "y")
    assert rows.layout.axes == (axes[0], None)
    assert np.array_equal(rows.shard("cpu:2"), whole[[2, 3, 6, 7]])
    columns = sw.array.all_gather(cut, "x")
    assert columns.layout.axes == (None, "y")
    assert np.array_equal(columns.shard("cpu:3"), whole[:, 2:])
    with refused(LayoutError, "dim 0 is packed"):
        sw.array.all_to_all(cut, "y", dim=0)
    with refused(LayoutError, "'x'", "not the minor axes of a dim"):
        sw.array.all_to_all(cut, "x", dim=1)


def test_verbs_keep_the_axes_of_a_packed_dim_that_are_not_gathered() -> None:
    """The first part is cut by both axes, the second by one: without that it is whole."""
    dim = sw.packed.concat(sw.packed.part(4, axes=("x", "y")), sw.packed.part(2, axes="y"))
    cut = sw.distribute_tensor(np.arange(6), sw.TensorLayout((dim,), sw.DeviceMesh((2, 2), ("x", "y"))))
    found = sw.array.all_gather(cut, "y")
    assert [shard.data.tolist() for shard in found.shards] == [[0, 1, 4, 5], [0, 1, 4, 5], [2, 3, 4, 5], [2, 3, 4, 5]]
    assert found.layout.axes == (sw.packed.concat(sw.packed.part(4, axes="x"), sw.packed.part(2)),)


def test_packed_dims_are_not_cut_by_the_axis_of_partial_sums() -> None:
    layout = sw.TensorLayout((sw.packed.gate_up("x"),), mesh(), unreduced=("y",))
    sums = sw.ShardedArray(layout.partition((4,)), [np.ones(2)] * 4)
    with refused(LayoutError, "dim 0 is packed"):
        sw.array.reduce_scatter(sums, "y", dim=0)
