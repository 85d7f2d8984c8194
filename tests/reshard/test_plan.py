"""Plans and runs: what the laws leave out, bad input first of all."""

from __future__ import annotations

import pickle
import signal
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import shardwise as sw
from tests.checks import INT64_MAX, lets_others_run, refused

MESH = sw.DeviceMesh((2, 2), ("x", "y"))
ROWS = sw.TensorLayout((("x", "y"), None), MESH)
COLUMNS = sw.TensorLayout((None, ("x", "y")), MESH)
WHOLE = sw.TensorLayout((None, None), MESH)
SHAPE = (8, 8)


def row_to_column(shape: tuple[int, int] = SHAPE) -> sw.reshard.ReshardPlan:
    return sw.plan_reshard(ROWS.partition(shape), COLUMNS.partition(shape))


def row_shards(array: Any) -> list[Any]:
    return [view.copy() for view in ROWS.partition(array.shape).views(array)]


ARRAY = np.arange(64, dtype=np.float32).reshape(SHAPE)


class TestPlan:
    def test_dask_finds_the_same_intersections(self) -> None:
        rechunk = pytest.importorskip("dask.array.rechunk")
        src = sw.TensorLayout(("x", "y"), sw.DeviceMesh((3, 2), ("x", "y"))).partition((7, 9), "balanced")
        labels = [f"gpu:{i}" for i in range(8)]
        dst = sw.TensorLayout(("x", "y"), sw.DeviceMesh((2, 4), ("x", "y"), labels)).partition((7, 9), "ceil")
        expected = [
            tuple((slice_.start, slice_.stop) for _, slice_ in piece)
            for chunk in rechunk.intersect_chunks(((3, 2, 2), (5, 4)), ((4, 3), (3, 3, 3, 0)))
            for piece in chunk
        ]
        plan = sw.plan_reshard(src, dst)
        found = [tuple(map(tuple, box)) for box in plan.source_boxes().tolist()]
        assert found == [piece for piece in expected if all(start < stop for start, stop in piece)]

    def test_devices_are_matched_by_label(self) -> None:
        swapped = sw.DeviceMesh((4,), ("z",), ["cpu:3", "cpu:2", "other", "cpu:0"])
        plan = sw.plan_reshard(ROWS.partition(SHAPE), sw.TensorLayout(("z", None), swapped).partition(SHAPE))
        # cpu:3 now wants the rows that cpu:0 has, and so on; nobody has its own.
        assert [(t.src_device, t.dst_device) for t in plan] == [
            ("cpu:0", "cpu:3"),
            ("cpu:1", "cpu:2"),
            ("cpu:2", "other"),
            ("cpu:3", "cpu:0"),
        ]
        assert len(plan.kept) == 0

    def test_a_local_part_is_not_fetched(self) -> None:
        plan = sw.plan_reshard(ROWS.partition(SHAPE), WHOLE.partition(SHAPE))
        assert len(plan) == 12
        assert plan.bytes_kept("f4").tolist() == [64] * 4
        assert plan.bytes_sent("f4").tolist() == plan.bytes_received("f4").tolist() == [192] * 4

    def test_the_arrays_are_read_only(self) -> None:
        plan = row_to_column()
        for array in (plan.transfers, plan.kept):
            with pytest.raises(ValueError, match="read-only"):
                array["start"][0] = 1

    def test_values(self) -> None:
        plan, other = row_to_column(), sw.plan_reshard(ROWS.partition(SHAPE), WHOLE.partition(SHAPE))
        assert plan == row_to_column()
        assert hash(plan) == hash(row_to_column())
        assert plan != other
        assert plan != 3
        assert pickle.loads(pickle.dumps(plan)) == plan
        assert eval(repr(plan), vars(sw)) == plan
        by_hand = sw.plan_reshard(sw.Tiling.from_boxes(SHAPE, [[[0, 8], [0, 8]]]), WHOLE.partition(SHAPE))
        assert pickle.loads(pickle.dumps(by_hand)) == by_hand
        assert eval(repr(by_hand), vars(sw)) == by_hand
        assert plan[-1] == list(plan)[-1]
        for number in (len(plan), -len(plan) - 1, np.uint64(2**64 - 1), 10**5000):
            with refused(IndexError, f"which has {len(plan)}"):
                plan[number]

    def test_a_huge_tensor(self) -> None:
        shape = (2**31, 2**31)
        plan = row_to_column(shape)
        assert len(plan) == 12
        assert plan.bytes_sent("u1").tolist() == [3 * 2**58] * 4
        with pytest.raises(sw.SizeOverflowError, match=r"over the limit of 9223372036854775807 bytes"):
            plan.bytes_sent("f4")

    def test_refused(self) -> None:
        with pytest.raises(sw.LayoutError, match=r"src is of shape \[8, 8\] but dst of \[8, 4\]"):
            sw.plan_reshard(ROWS.partition(SHAPE), WHOLE.partition((8, 4)))
        with pytest.raises(TypeError, match="dst must be a Partition or another Tiling, got TensorLayout"):
            sw.plan_reshard(ROWS.partition(SHAPE), WHOLE)  # type: ignore[arg-type]
        sums = sw.TensorLayout((None, None), MESH, unreduced=("y",))
        with pytest.raises(sw.LayoutError, match=r"dst is unreduced over \[\"y\"\]"):
            sw.plan_reshard(ROWS.partition(SHAPE), sums.partition(SHAPE))

    def test_meshes_that_memory_cannot_hold(self) -> None:
        one = sw.DeviceMesh((1,), ("x",))
        whole = sw.TensorLayout((None,), one).partition((2**62,))
        for mesh, axis in (sw.DeviceMesh((2**62,), ("x",)), "x"), (sw.DeviceMesh((4, 2**60), ("x", "y")), "x"):
            cut = sw.TensorLayout((axis,), mesh).partition((2**62,))
            with pytest.raises(MemoryError, match="than there is memory for"):
                sw.plan_reshard(cut, whole)

    def test_rounds(self) -> None:
        plan = row_to_column()
        rounds = plan.rounds(16, "f4")  # a transfer is 2 x 2 float32
        assert [len(part) for part in rounds] == [4, 4, 4]
        joined = np.concatenate(rounds)
        assert sorted(map(str, joined)) == sorted(map(str, plan.transfers))
        assert sum(len(part) for part in plan.rounds(8, "f4")) == 24  # each cut into two rows
        assert len(plan.rounds(2**70, "f4")) == 1
        with pytest.raises(sw.LayoutError, match="max_bytes_in_flight is 3; it must hold at least one element of 4"):
            plan.rounds(3, "f4")
        with pytest.raises(sw.LayoutError, match="max_bytes_in_flight is -1;"):
            plan.rounds(-1, "f4")
        with pytest.raises(TypeError, match="max_bytes_in_flight must be an integer"):
            plan.rounds(1.5, "f4")  # type: ignore[arg-type]
        assert sw.plan_reshard(WHOLE.partition(SHAPE), ROWS.partition(SHAPE)).rounds(8, "f4") == []


class TestBoxes:
    def test_runs(self) -> None:
        boxes = [[[0, 3], [0, 8]], [[3, 8], [0, 5]], [[3, 8], [5, 8]], [[8, 8], [0, 0]]]
        plan = sw.plan_reshard(sw.Tiling.from_boxes(SHAPE, boxes), COLUMNS.partition(SHAPE))
        chunks = [ARRAY[tuple(slice(*side) for side in box)].copy() for box in boxes]
        for got, expected in zip(plan.run(chunks), COLUMNS.partition(SHAPE).views(ARRAY), strict=True):
            np.testing.assert_array_equal(got, expected)
        assert plan.src == sw.Tiling.from_boxes(SHAPE, boxes)
        assert plan.collectives("f4") is None
        assert plan.cost("f4") is None
        assert plan.obstacle is not None
        assert plan.obstacle.kind == "no-layout"
        assert "goes from explicit boxes held by 4 holders to" in plan.explain()
        # The rows from 3 on of columns 5 to 8, of which device 2 needs column 5.
        transfer = next(plan[i] for i in range(len(plan)) if (plan[i].src_device, plan[i].dst_device) == (2, "cpu:2"))
        assert transfer.box == (slice(3, 8), slice(5, 6))
        assert transfer.src_box == (slice(0, 5), slice(0, 1))
        assert transfer.dst_box == (slice(3, 8), slice(1, 2))
        assert (transfer.size, transfer.nbytes("f8")) == (5, 40)

    @pytest.mark.parametrize(
        ("boxes", "message"),
        [
            ([[[0, 3], [0, 8]], [[3, 8], [0, 5]]], r"src does not hold \[3:8, 5:6\], which holders\[2\] of dst needs"),
            ([[[0, 5], [0, 8]], [[4, 8], [0, 8]]], r"holders\[0\] and holders\[1\] overlap: both hold \[4:5, 0:8\]"),
            ([[[0, 9], [0, 8]]], r"holders\[0\]: its box is \[0, 9\) along dim 0, which is not within \[0, 8\)"),
            ([[[5, 4], [0, 8]]], r"holders\[0\]: its box is \[5, 4\) along dim 0"),
            ([[0, 8], [0, 8]], r"boxes is of shape \(2, 2\); it must be \(boxes, 2, 2\)"),
            (np.zeros((0, 2, 2), int), r"src does not hold \[0:8, 0:2\], which holders\[0\]"),
            ([], r"src does not hold \[0:8, 0:2\]"),
            ([[]], r"boxes is of shape \(1, 0\)"),
        ],
    )
    def test_refused(self, boxes: Any, message: str) -> None:
        with pytest.raises(sw.LayoutError, match=message):
            sw.plan_reshard(sw.Tiling.from_boxes(SHAPE, boxes), COLUMNS.partition(SHAPE))

    def test_positions_over_the_limit(self) -> None:
        with pytest.raises(sw.SizeOverflowError, match=r"boxes\[1\] is 9223372036854775808"):
            sw.Tiling.from_boxes(SHAPE, [[[0, 2**63], [0, 8]]])

    def test_no_elements(self) -> None:
        partition = sw.TensorLayout(("x",), MESH).partition((0,))
        for boxes in [], [[[0, 0]]]:
            plan = sw.plan_reshard(sw.Tiling.from_boxes((0,), boxes), partition)
            assert len(plan) == 0
            assert eval(repr(plan), vars(sw)) == plan

    def test_rank_0(self) -> None:
        scalar = sw.TensorLayout((), MESH).partition(())
        plan = sw.plan_reshard(sw.Tiling.from_boxes((), np.zeros((1, 0, 2), int)), scalar)
        assert len(plan) == 4
        assert eval(repr(plan), vars(sw)) == plan
        with pytest.raises(sw.LayoutError, match=r"holders\[0\] and holders\[1\] overlap: both hold \[\]"):
            sw.plan_reshard(sw.Tiling.from_boxes((), np.zeros((2, 0, 2), int)), scalar)


class TestRun:
    def test_views_where_nothing_moves(self) -> None:
        shards = [ARRAY.copy() for _ in range(4)]
        plan = sw.plan_reshard(WHOLE.partition(SHAPE), COLUMNS.partition(SHAPE))
        for shard, got in zip(shards, plan.run(shards), strict=True):
            assert np.shares_memory(shard, got)
        objects = [np.full(SHAPE, None, object) for _ in range(4)]
        assert all(map(np.shares_memory, objects, plan.run(objects)))

    def test_copies_where_something_moves(self) -> None:
        shards = row_shards(ARRAY)
        results = row_to_column().run(shards)
        assert not any(np.shares_memory(a, b) for a in shards for b in results)
        whole = sw.plan_reshard(ROWS.partition(SHAPE), WHOLE.partition(SHAPE)).run(shards)
        whole[0][...] = -1
        np.testing.assert_array_equal(whole[1], ARRAY)

    @pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, "M8[ns]", "S3", "V7", "?", ">c16"])
    def test_dtypes(self, dtype: Any) -> None:
        size = 64 * np.dtype(dtype).itemsize
        array = np.arange(size, dtype=np.uint8).view(dtype).reshape(SHAPE)
        for got, expected in zip(
            row_to_column().run(row_shards(array)), COLUMNS.partition(SHAPE).views(array), strict=True
        ):
            assert got.dtype == expected.dtype
            assert got.tobytes() == expected.tobytes()

    @pytest.mark.parametrize("shape", [(300, 1001), (4, 300_000), (2048, 8)])
    @pytest.mark.parametrize("turned", [False, True])
    def test_sizes_that_block_and_cut_rows(self, shape: tuple[int, int], turned: bool) -> None:
        array = np.random.default_rng(0).integers(0, 2**15, shape, np.int16)
        a, b = ROWS.partition(shape, "ceil"), COLUMNS.partition(shape, "balanced")
        if turned:
            a, b = b, a
        for got, expected in zip(
            sw.plan_reshard(a, b).run([v.copy() for v in a.views(array)]), b.views(array), strict=True
        ):
            np.testing.assert_array_equal(got, expected)

    def test_broadcast_sources(self) -> None:
        shards = [np.broadcast_to(np.float32(i), (2, 8)) for i in range(4)]
        np.testing.assert_array_equal(row_to_column().run(shards)[0][:, 0], [0, 0, 1, 1, 2, 2, 3, 3])

    def test_wrong_shards(self) -> None:
        plan, shards = row_to_column(), row_shards(ARRAY)
        with pytest.raises(sw.LayoutError, match="src_shards has 3 arrays but there are 4 holders"):
            plan.run(shards[:3])
        with pytest.raises(
            sw.LayoutError, match=r"src_shards\[1\] \('cpu:1'\) is of shape \(2, 7\) .* must be of shape \(2, 8\)"
        ):
            plan.run([shards[0], shards[1][:, 1:], *shards[2:]])
        with pytest.raises(sw.LayoutError, match=r"src_shards\[3\] \('cpu:3'\) is .* dtype float64; .* dtype float32"):
            plan.run([*shards[:3], shards[3].astype("f8")])
        with pytest.raises(TypeError, match=r"src_shards\[0\] must be a numpy array, got list"):
            plan.run([[1]] * 4)  # type: ignore[list-item]
        with pytest.raises(TypeError, match="masked"):
            plan.run([np.ma.masked_array(shard) for shard in shards])
        with pytest.raises(TypeError, match="src_shards must be a sequence"):
            plan.run(3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="hold references"):
            plan.run([shard.astype(object) for shard in shards])
        other = sw.ShardedArray(COLUMNS.partition(SHAPE), COLUMNS.partition(SHAPE).views(ARRAY))
        with pytest.raises(sw.LayoutError, match="src_shards is cut by"):
            plan.run(other)

    @pytest.mark.parametrize("dtype", ["M8[s]", "S3", "U2", "V2", "i4,f4"])
    def test_partial_sums_of_what_cannot_be_added(self, dtype: str) -> None:
        mesh = sw.DeviceMesh((2,), ("x",))
        sums, whole = (sw.TensorLayout((None,), mesh, unreduced=axes).partition((2,)) for axes in (("x",), ()))
        plan, shards = sw.plan_reshard(sums, whole), [np.zeros(2, dtype)] * 2
        with pytest.raises(TypeError, match=r"partial sums of dtype .* do not add up to a value of that dtype"):
            plan.run(shards)
        # Where nothing is added they are moved as they are.
        assert [array.dtype for array in sw.plan_reshard(whole, whole).run(shards)] == [np.dtype(dtype)] * 2

    @pytest.mark.parametrize("dtype", ["?", "i1", ">i2", "f2", "c8", "m8[s]", ml_dtypes.bfloat16])
    def test_partial_sums_of_what_can(self, dtype: Any) -> None:
        mesh = sw.DeviceMesh((2,), ("x",))
        sums, whole = (sw.TensorLayout((None,), mesh, unreduced=axes).partition((2,)) for axes in (("x",), ()))
        for array in sw.plan_reshard(sums, whole).run([np.ones(2, dtype), np.zeros(2, dtype)]):
            assert array.dtype == np.dtype(dtype)
            np.testing.assert_array_equal(array, np.ones(2, dtype))

    def test_subclasses_and_equal_dtypes_are_shards_too(self) -> None:
        class Own(np.ndarray[Any, Any]):
            pass

        plan, shards = row_to_column(), row_shards(ARRAY)
        named = np.dtype("f4", metadata={"unit": "m"})
        assert named == shards[0].dtype
        for i in range(4):
            for other in (shards[i].view(Own), shards[i].view(named)):
                given = [*shards[:i], other, *shards[i + 1 :]]
                np.testing.assert_array_equal(np.concatenate(plan.run(given), axis=1), ARRAY)
                wrong = (i + 1) % 4
                given[wrong] = given[wrong][:, 1:]
                with pytest.raises(sw.LayoutError, match=rf"src_shards\[{wrong}\] .* is of shape \(2, 7\)"):
                    plan.run(given)

    def test_wrong_outputs_are_left_alone(self) -> None:
        plan, shards = row_to_column(), row_shards(ARRAY)
        large = np.full((8, 8), -1, np.float32)
        out = COLUMNS.partition(SHAPE).views(large)
        read_only = out[3].copy()
        read_only.flags.writeable = False
        with pytest.raises(ValueError, match=r"out\[3\] is read-only"):
            plan.run(shards, [*out[:3], read_only])
        with pytest.raises(sw.LayoutError, match=r"out\[2\] shares memory with out\[1\]"):
            plan.run(shards, [out[0], out[1], out[1], out[3]])
        with pytest.raises(sw.LayoutError, match=r"out\[0\] shares memory with src_shards\[2\]"):
            plan.run([*shards[:2], large[4:6], shards[3]], [large[:, 1:3], *[o.copy() for o in out[1:]]])
        zero = np.lib.stride_tricks.as_strided(out[1], strides=(0, 4))
        with pytest.raises(sw.LayoutError, match=r"out\[1\] overlaps itself"):
            plan.run(shards, [out[0], zero, *out[2:]])
        with pytest.raises(sw.LayoutError, match=r"out\[0\] \('cpu:0'\) is of shape"):
            plan.run(shards, [out[0].T, *out[1:]])
        assert (large == -1).all()

    def test_many_views_of_one_array_are_outputs_as_they_are_alone(self) -> None:
        """Columns, of which each interleaves with all others."""
        count = 3000
        mesh = sw.DeviceMesh((count,), ("x",))
        dst = sw.TensorLayout((None, "x"), mesh).partition((5, count))
        src = sw.TensorLayout((None, None), sw.DeviceMesh((1,), ("y",), ["one"])).partition((5, count))
        values, large = np.arange(5 * count).reshape(5, count), np.zeros((5, count), np.int64)
        out = dst.views(large)
        sw.plan_reshard(src, dst).run([values], out)
        assert (large == values).all()
        with pytest.raises(sw.LayoutError, match=r"out\[2000\] shares memory with out\[1999\]"):
            sw.plan_reshard(src, dst).run([values], [*out[:1999], out[2000], *out[2000:]])

    def test_no_memory_for_the_outputs(self) -> None:
        shape = (4, 2**44)
        shards = [np.broadcast_to(np.float32(0), (1, 2**44))] * 4
        with pytest.raises(MemoryError):
            row_to_column(shape).run(shards)

    def test_many_small_outputs_lie_apart(self) -> None:
        """Together over the size of one block of memory, none of a length that is a multiple of 16."""
        mesh = sw.DeviceMesh((64,), ("x",))
        array = np.random.default_rng(0).integers(0, 256, (8191, 2600), np.uint8)
        rows = sw.TensorLayout(("x", None), mesh).partition(array.shape, "ceil")
        columns = sw.TensorLayout((None, "x"), mesh).partition(array.shape, "ceil")
        got = sw.plan_reshard(rows, columns).run(rows.views(array))
        for shard, expected in zip(got, columns.views(array), strict=True):
            assert np.array_equal(shard, expected)
            assert shard.ctypes.data % 16 == 0

    def test_outputs_that_no_address_space_holds(self) -> None:
        elements = 1 << 60
        mesh = sw.DeviceMesh((4,), ("x",))
        parts = sw.TensorLayout(("x",), mesh).partition((elements,))
        whole = sw.TensorLayout((None,), mesh).partition((elements,))
        shards = [np.broadcast_to(np.float64(0), (elements // 4,))] * 4
        with pytest.raises(sw.SizeOverflowError, match="does not fit in the address space"):
            sw.plan_reshard(parts, whole).run(shards)

    def test_progress_where_nothing_is_copied(self) -> None:
        calls: list[tuple[int, int]] = []
        plan = sw.plan_reshard(WHOLE.partition(SHAPE), COLUMNS.partition(SHAPE))
        plan.run([ARRAY] * 4, progress=lambda done, total: calls.append((done, total)))
        assert calls == [(0, 0)]

    def test_progress(self) -> None:
        calls: list[tuple[int, int]] = []
        row_to_column().run(row_shards(ARRAY), progress=lambda done, total: calls.append((done, total)))
        assert calls[-1] == (256, 256)
        assert calls == sorted(calls)

        class Stop(Exception):
            pass

        def stop(done: int, total: int) -> None:
            raise Stop(done, total)

        with pytest.raises(Stop):
            row_to_column().run(row_shards(ARRAY), progress=stop)
        with pytest.raises(TypeError, match="progress must be callable"):
            row_to_column().run(row_shards(ARRAY), progress=3)  # type: ignore[arg-type]

    def test_ctrl_c(self) -> None:
        def interrupt(done: int, total: int) -> None:
            if not done:
                signal.raise_signal(signal.SIGINT)

        # A shell that runs in the background has the signal ignored.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                row_to_column().run(row_shards(ARRAY), progress=interrupt)
        finally:
            signal.signal(signal.SIGINT, before)

    def test_the_lock_is_released(self) -> None:
        def arguments(size: int) -> tuple[sw.reshard.ReshardPlan, Any, Any]:
            array = np.zeros((size, 4096), np.float64)
            return row_to_column(array.shape), row_shards(array), [np.empty((size, 1024)) for _ in range(4)]

        assert lets_others_run(arguments, lambda given: given[0].run(given[1], given[2]), range(8, 12))

    def test_empty_and_scalar_tensors(self) -> None:
        assert [a.shape for a in row_to_column((0, 8)).run([np.empty((0, 8))] * 4)] == [(0, 2)] * 4
        scalar = sw.TensorLayout((), MESH).partition(())
        other = sw.TensorLayout((), sw.DeviceMesh((1,), ("z",), ["elsewhere"])).partition(())
        assert sw.plan_reshard(scalar, other).run([np.array(5)] * 4)[0] == 5


class TestSums:
    LAYOUT = sw.TensorLayout((None,), MESH, unreduced=("y",))

    def sharded(self, dtype: Any) -> sw.ShardedArray:
        shards = [np.array([1, 2, 3], dtype), np.array([10, 20, 30], dtype)] * 2
        return sw.ShardedArray(self.LAYOUT.partition((3,)), shards)

    @pytest.mark.parametrize("dtype", ["i1", "f2", ml_dtypes.bfloat16, ">f8", "m8[s]"])
    def test_all_reduce(self, dtype: Any) -> None:
        for shard in sw.array.all_reduce(self.sharded(dtype)).shards:
            assert shard.data.dtype == np.dtype(dtype)
            assert shard.data.astype("i8").tolist() == [11, 22, 33]

    def test_numpy_rounds_and_wraps_at_every_addition(self) -> None:
        mesh = sw.DeviceMesh((3,), ("x",))
        layout = sw.TensorLayout((None,), mesh, unreduced=("x",)).partition((1,))
        half = [np.array([value], np.float16) for value in (2048, 1, 1)]
        assert sw.array.gather(sw.ShardedArray(layout, half)) == 2048  # 2048 + 1 rounds to 2048, twice
        assert sw.array.gather(sw.ShardedArray(layout, half[::-1])) == 2050
        assert sw.array.gather(sw.ShardedArray(layout, [np.array([100], np.int8)] * 3)) == 44

    @pytest.mark.parametrize("dtype", ["V4", "M8[s]", "U2"])
    def test_what_cannot_be_added(self, dtype: str) -> None:
        with pytest.raises(TypeError):
            sw.array.all_reduce(sw.ShardedArray(self.LAYOUT.partition((3,)), [np.zeros(3, dtype)] * 4))

    def test_a_device_keeps_its_own_addend(self) -> None:
        plan = sw.plan_reshard(self.LAYOUT.partition((3,)), sw.TensorLayout((None,), MESH).partition((3,)))
        assert plan.addends == 2
        assert [(t.src_device, t.dst_device) for t in plan] == [
            ("cpu:1", "cpu:0"),
            ("cpu:0", "cpu:1"),
            ("cpu:3", "cpu:2"),
            ("cpu:2", "cpu:3"),
        ]
        assert plan.peak_extra_memory("int16").tolist() == [6] * 4  # The sum of three is an array of its own.

    def test_reduce_scatter(self) -> None:
        layout = sw.TensorLayout((None,), MESH, unreduced=("y",)).partition((4,))
        sharded = sw.ShardedArray(layout, [np.arange(4), 10 * np.arange(4)] * 2)
        done = sw.array.reduce_scatter(sharded, "y", 0)
        assert done.layout == sw.TensorLayout(("y",), MESH)
        assert [shard.data.tolist() for shard in done.shards] == [[0, 11], [22, 33]] * 2
        with pytest.raises(sw.LayoutError, match="unreduced over 'x' alone"):
            sw.array.reduce_scatter(sharded, "x", 0)
        with pytest.raises(IndexError, match="dim is 1, outside 0 to 0"):
            sw.array.reduce_scatter(sharded, "y", 1)

    def test_the_uneven_rule_stays(self) -> None:
        """7 does not divide by 2 or 4: without its rule the array could not be cut again."""
        mesh = sw.DeviceMesh((2, 2), ("x", "y"))
        values = np.arange(21.0).reshape(7, 3)
        for uneven in ("ceil", "chunk", "balanced"):
            cut = sw.TensorLayout((("x", "y"), None), mesh).partition((7, 3), uneven)
            own = sw.ShardedArray(cut, [view.copy() for view in cut.views(values)])
            gathered = sw.array.all_gather(own, "y")
            assert gathered.partition == sw.TensorLayout(("x", None), mesh).partition((7, 3), uneven)
            sums = sw.TensorLayout(("x", None), mesh, unreduced=("y",)).partition((7, 3), uneven)
            partial = sw.ShardedArray(sums, [view.copy() for view in sums.views(values)])
            reduced, scattered = sw.array.all_reduce(partial), sw.array.reduce_scatter(partial, "y", 0)
            assert reduced.partition == gathered.partition
            assert scattered.partition == cut
            for array, times in ((gathered, 1), (reduced, 2), (scattered, 2)):
                assert (array.numpy() == times * values).all()

    def test_all_gather(self) -> None:
        sharded = sw.ShardedArray(ROWS.partition(SHAPE), row_shards(ARRAY))
        assert sw.array.all_gather(sharded, ["y"]).layout == sw.TensorLayout(("x", None), MESH)
        assert all((shard.data == ARRAY).all() for shard in sw.array.all_gather(sharded).shards)
        with pytest.raises(sw.LayoutError, match="axes names 'w', which does not cut a dim"):
            sw.array.all_gather(sharded, "w")
        for wrong in (5, [5], ["y", None]):
            with pytest.raises(TypeError, match="axes must be a sequence of axis names, got"):
                sw.array.all_gather(sharded, wrong)  # type: ignore[arg-type]


class TestShardedArray:
    def test_views_of_one_array_stay_views(self) -> None:
        sharded = sw.distribute_tensor(ARRAY, ROWS)
        assert np.shares_memory(sharded.reshard(COLUMNS).shard("cpu:1"), ARRAY)

    def test_distribute_tensor_reshards(self) -> None:
        sharded = sw.ShardedArray(ROWS.partition(SHAPE), row_shards(ARRAY))
        moved = sw.distribute_tensor(sharded, COLUMNS)
        assert moved.layout == COLUMNS
        np.testing.assert_array_equal(moved.numpy(), ARRAY)
        np.testing.assert_array_equal(sw.distribute_tensor(sharded, COLUMNS, "chunk").numpy(), ARRAY)

    def test_refused(self) -> None:
        for sharded in (sw.distribute_tensor(ARRAY, ROWS), sw.ShardedArray(ROWS.partition(SHAPE), row_shards(ARRAY))):
            other = sw.plan_reshard(COLUMNS.partition(SHAPE), ROWS.partition(SHAPE))
            with pytest.raises(sw.LayoutError, match=r"src_shards is cut by .* but the plan is for"):
                other.run_collectives(sharded)
            with pytest.raises(sw.LayoutError, match="unreduced"):
                sharded.reshard(sw.TensorLayout((None, None), MESH, unreduced=("x",)))
            with pytest.raises(TypeError, match="layout must be a TensorLayout"):
                sharded.reshard(("x", None))  # type: ignore[arg-type]
            with pytest.raises(sw.LayoutError):
                sharded.reshard(sw.TensorLayout(("x",), MESH))


def test_devices_that_only_the_larger_mesh_has_receive() -> None:
    here, there = (sw.TensorLayout((None,), sw.DeviceMesh((size,), ("x",))).partition((3,)) for size in (2, 4))
    plan = sw.plan_reshard(here, there)
    assert plan.kept["dst_device"].tolist() == [0, 1]
    assert plan.transfers["dst_device"].tolist() == [2, 3]
    assert plan.bytes_received("int16").tolist() == [0, 0, 6, 6]


def test_as_many_bytes_may_move_as_int64_holds() -> None:
    for size, dtype in ((INT64_MAX, "int8"), (2**62 - 1, "int16")):
        one, other = (sw.Tiling.from_boxes((size,), [[(0, size)]]) for _ in range(2))
        assert sw.plan_reshard(one, other).bytes_sent(dtype).tolist() == [size * np.dtype(dtype).itemsize]
    one, other = (sw.Tiling.from_boxes((2**62,), [[(0, 2**62)]]) for _ in range(2))
    with refused(sw.SizeOverflowError, f"{2**62} elements of 2 bytes", INT64_MAX):
        sw.plan_reshard(one, other).bytes_sent("int16")
