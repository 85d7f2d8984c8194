"""Partition: every line on arithmetic of the reliability catalogue, and hand-computed answers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, ClassVar, cast

import numpy as np
import pytest

import shardwise as sw
from shardwise import LayoutError, MeshError, SizeOverflowError, packed
from tests.checks import INT64_MAX, peak_of, refused
from tests.strategies import RULES

UNEVEN: list[sw.UnevenRule] = ["ceil", "chunk", "balanced", "floor"]

ONE = sw.DeviceMesh((1,), ("x",))


def cut(n: int, sizes: tuple[int, ...], rule: sw.UnevenRule) -> sw.Partition:
    """One dim of `n` elements, cut by all axes of a mesh, in order."""
    names = tuple(f"a{i}" for i in range(len(sizes)))
    return sw.TensorLayout([names], sw.DeviceMesh(sizes, names)).partition((n,), rule)


def lengths(partition: sw.Partition) -> list[int]:
    return [stop - start for ((start, stop),) in partition.boxes().tolist()]


def grid() -> sw.Partition:
    """A (6, 8) tensor in 2 x 4 shards of (3, 2)."""
    return sw.TensorLayout(("x", "y"), sw.DeviceMesh((2, 4), ("x", "y"))).partition((6, 8))


class TestUnevenRules:
    @pytest.mark.parametrize(
        ("n", "rule", "expected"),
        [
            (9, "ceil", [3, 3, 3, 0]),
            (9, "chunk", [3, 2, 2, 2]),
            (9, "balanced", [3, 2, 2, 2]),
            (10, "ceil", [3, 3, 3, 1]),
            (10, "chunk", [3, 2, 3, 2]),
            (10, "balanced", [3, 3, 2, 2]),
            (10, "floor", [2, 3, 2, 3]),
            (8, "even", [2, 2, 2, 2]),
        ],
    )
    def test_the_examples_of_the_design(self, n: int, rule: sw.UnevenRule, expected: list[int]) -> None:
        assert lengths(cut(n, (2, 2), rule)) == expected

    def test_chunk_goes_axis_by_axis(self) -> None:
        """10 over (2, 3) is 5 and 5, each 2, 2, 1; over (3, 2) it is 4, 4, 2, each halved."""
        assert lengths(cut(10, (2, 3), "chunk")) == [2, 2, 1, 2, 2, 1]
        assert lengths(cut(10, (3, 2), "chunk")) == [2, 2, 2, 2, 1, 1]

    def test_tensorflow_s_floor_is_no_rule(self) -> None:
        """8190 over 64: TensorFlow answers 127 a shard, which loses 62 elements."""
        with refused(LayoutError, "dim 0", "8190", "64"):
            cut(8190, (64,), "even")
        assert sum(lengths(cut(8190, (64,), "ceil"))) == 8190

    @pytest.mark.parametrize(("n", "k"), [(1, 2), (7, 2), (9, 4), (INT64_MAX, 2)])
    def test_a_dim_that_does_not_divide(self, n: int, k: int) -> None:
        layout = sw.TensorLayout((None, "x"), sw.DeviceMesh((k,), ("x",)))
        with refused(LayoutError, "dim 1", f"{n} element", f"{k} shards", "uneven"):
            layout.partition((1, n))
        for rule in UNEVEN:
            assert layout.partition((1, n), rule).shape == (1, n)

    @pytest.mark.parametrize("rule", RULES)
    def test_a_dim_without_elements_divides(self, rule: sw.UnevenRule) -> None:
        assert cut(0, (2, 3), rule).boxes().tolist() == [[[0, 0]]] * 6

    @pytest.mark.parametrize("rule", UNEVEN)
    @pytest.mark.parametrize("n", [1, 2, 3])
    def test_more_shards_than_elements(self, rule: sw.UnevenRule, n: int) -> None:
        """Empty shards start and stop at n."""
        boxes = cut(n, (2, 2, 2), rule).boxes()[:, 0].tolist()
        assert sorted(start for start, stop in boxes if start < stop) == list(range(n))
        assert [box for box in boxes if box[0] == box[1]] == [[n, n]] * (8 - n)

    @pytest.mark.parametrize("rule", ["", "EVEN", "round", "even ", "\ud800"])
    def test_an_unknown_rule(self, rule: Any) -> None:
        with refused(LayoutError, "uneven", '"even", "ceil", "chunk", "balanced" and "floor"'):
            cut(4, (2,), rule)

    @pytest.mark.parametrize("rule", [None, 1, b"even"])
    def test_a_rule_of_a_wrong_type(self, rule: Any) -> None:
        with refused(TypeError, "uneven", repr(rule)):
            cut(4, (2,), rule)


class TestShape:
    @pytest.mark.parametrize("shape", [(), (6,), (6, 8, 1)])
    def test_another_rank(self, shape: Any) -> None:
        with refused(LayoutError, f"shape has {len(shape)} dim", "layout has 2"):
            grid().layout.partition(shape)

    @pytest.mark.parametrize("n", [-1, -8, -(2**63)])
    def test_a_negative_dim(self, n: int) -> None:
        with refused(LayoutError, "shape[1]", n, "at least 0"):
            grid().layout.partition((6, n))

    def test_two_negative_dims_with_a_positive_product(self) -> None:
        with refused(LayoutError, "shape[0]", "-6"):
            grid().layout.partition((-6, -8))

    @pytest.mark.parametrize("n", [True, 8.0, "8", None, np.float64(8), np.bool_(True), [8]])
    def test_a_dim_of_a_wrong_type(self, n: Any) -> None:
        with refused(TypeError, "shape[1]", "integer", repr(n)):
            grid().layout.partition((6, n))

    @pytest.mark.parametrize("shape", [8, "68", None, {6, 8}, {6: 0, 8: 1}])
    def test_a_shape_of_a_wrong_type(self, shape: Any) -> None:
        with refused(TypeError, "shape", "sequence of integers"):
            grid().layout.partition(shape)

    def test_numpy_integers_will_do(self) -> None:
        for shape in (np.array([6, 8], np.uint16), [np.int8(6), np.uint64(8)]):
            partition = grid().layout.partition(shape)  # type: ignore[arg-type]
            assert partition == grid()
            assert all(type(n) is int for n in partition.shape)

    @pytest.mark.parametrize("n", [2**63, 2**64, 2**64 + 8, np.uint64(2**63)])
    def test_a_dim_over_the_limit(self, n: Any) -> None:
        with refused(SizeOverflowError, "shape[1]", int(n), "64-bit"):
            grid().layout.partition((6, n))

    @pytest.mark.parametrize(
        "shape", [(2**32, 2**31), (2**32, 2**32), (2**33 + 2, 2**31 + 2), (274177, 67280421310721), (INT64_MAX, 2)]
    )
    def test_a_product_over_the_limit_also_where_it_wraps_to_a_valid_count(self, shape: tuple[int, int]) -> None:
        layout = sw.TensorLayout((None, None, None), sw.DeviceMesh((2,), ("x",)))
        for order in itertools.permutations((*shape, 1)):
            with refused(SizeOverflowError, "shape", list(order), INT64_MAX):
                layout.partition(order)

    def test_a_layout_of_a_wrong_type(self) -> None:
        for layout in (None, ("x",), 5):
            with refused(TypeError, "layout", type(layout).__name__):
                sw.Partition(layout, (4,))  # type: ignore[arg-type]

    @pytest.mark.parametrize("shape", list(itertools.permutations((0, 2**62, 6))))
    @pytest.mark.parametrize("rule", RULES)
    def test_a_zero_dim_beside_huge_ones(self, shape: tuple[int, ...], rule: sw.UnevenRule) -> None:
        mesh = sw.DeviceMesh((2,), ("x",))
        for axes in itertools.permutations(("x", None, None)):
            partition = sw.TensorLayout(axes, mesh).partition(shape, rule)
            assert partition.size == 0
            assert partition.nbytes("float64").tolist() == [0, 0]
            assert partition.runs("cpu:0").tolist() == []
            assert [np.prod(partition.shard_shape(d), dtype=object) for d in ("cpu:0", "cpu:1")] == [0, 0]
            with refused(IndexError, "offsets", "empty"):
                partition.locate(0)
            with refused(IndexError, "local_offsets", "empty"):
                partition.global_offset(0, 0)
            with refused(IndexError, "local_offsets[0]", "empty"):
                partition.global_offset([0], [0])

    def test_the_largest_tensor_there_can_be(self) -> None:
        for rule, sizes in itertools.product(UNEVEN, ((2, 3), (1,), (1, 1))):
            partition = cut(INT64_MAX, sizes, rule)
            assert sum(lengths(partition)) == INT64_MAX
            shard, local = partition.locate(INT64_MAX - 1)
            assert partition.global_offset(shard, local) == INT64_MAX - 1
            assert [a.tolist() for a in partition.locate([INT64_MAX - 1])] == [[shard], [local]]

    def test_inputs_are_not_changed_or_kept(self) -> None:
        shape = [6, 8]
        partition = grid().layout.partition(shape)
        shape[0] = 600
        assert partition.shape == (6, 8)

    @pytest.mark.parametrize("rank", [33, 64])
    def test_many_dims(self, rank: int) -> None:
        """numpy holds at most 64 dims, before version 2 at most 32."""
        layout = sw.TensorLayout((None,) * (rank - 1) + ("x",), sw.DeviceMesh((2,), ("x",)))
        partition = layout.partition((1,) * (rank - 1) + (4,))
        assert partition.shard_shape("cpu:1") == (1,) * (rank - 1) + (2,)
        assert partition.locate(3) == (1, 1)
        try:
            array = np.arange(4).reshape(partition.shape)
        except ValueError:
            return
        assert partition.views(array)[1].ravel().tolist() == [2, 3]

    def test_more_dims_than_numpy_holds(self) -> None:
        partition = sw.TensorLayout((None,) * 70, sw.DeviceMesh((2,), ("x",))).partition((1,) * 70)
        assert partition.box("cpu:1") == (slice(0, 1),) * 70
        with refused(LayoutError, "array", "shape"):
            partition.views(np.zeros(1))


class TestDevices:
    calls: ClassVar[list[Callable[[sw.Partition, Any], object]]] = [
        lambda p, d: p.box(d),
        lambda p, d: p.shard_shape(d),
        lambda p, d: p.shard_id(d),
        lambda p, d: p.replica_id(d),
        lambda p, d: p.runs(d),
        lambda p, d: p.view(np.zeros((6, 8)), d),
    ]

    @pytest.mark.parametrize("call", calls)
    @pytest.mark.parametrize("device", ["cpu:8", "", -1, 8, True, 0.0, None])
    def test_a_device_that_the_mesh_has_not(self, call: Callable[[sw.Partition, Any], object], device: Any) -> None:
        with refused(MeshError, "device", repr(device), "'cpu:7'"):
            call(grid(), device)

    @pytest.mark.parametrize("uneven", ["ceil", "chunk", "balanced", "floor"])
    def test_the_box_of_a_shard_is_that_of_its_holders(self, uneven: Any) -> None:
        mesh = sw.DeviceMesh((2, 3, 2), ("x", "y", "z"), [f"d{i}" for i in range(11, -1, -1)])
        partition = sw.TensorLayout((("y", "x"), None), mesh).partition((7, 5), uneven)
        assert partition.total_shards == 6
        for shard_id in range(6):
            boxes = [partition.box(device) for device in partition.devices_holding(shard_id)]
            assert boxes == [partition.shard_box(shard_id)] * 2
        for wrong in (-1, 6, 2**80):
            with refused(IndexError, "shard_id", wrong):
                partition.shard_box(wrong)

    def test_permuted_devices(self) -> None:
        mesh = sw.DeviceMesh((2, 2), ("x", "y"), ["d3", "d1", "d0", "d2"])
        partition = sw.TensorLayout(("y", None), mesh).partition((4, 3))
        assert partition.shard_ids().tolist() == [0, 1, 0, 1]
        assert partition.devices_holding(1) == ["d1", "d2"]
        assert (partition.box("d0"), partition.replica_id("d0")) == ((slice(0, 2), slice(0, 3)), 1)
        assert list(partition.devices_indices_map()) == ["d3", "d1", "d0", "d2"]

    def test_2_to_the_40_elements_over_100_000_shards(self) -> None:
        """Memory does not depend on the elements."""

        def work() -> None:
            partition = cut(2**40, (1000, 100), "ceil")
            boxes = partition.boxes()
            shard, local = partition.locate(2**40 - 1)
            assert partition.global_offset(shard, local) == 2**40 - 1
            offsets = np.linspace(0, 2**40 - 1, 1000, dtype=np.int64)
            assert (partition.global_offset(*partition.locate(offsets)) == offsets).all()
            assert partition.runs("cpu:99999").tolist() == [[99_999 * 10_995_117, 2**40 - 99_999 * 10_995_117]]
            assert boxes.shape == (100_000, 1, 2)
            assert int(boxes[:, 0, 1].max()) == 2**40

        work()
        assert peak_of(work) < 5_000_000

    def test_runs_that_memory_cannot_hold(self) -> None:
        layout = sw.TensorLayout((None, "x"), sw.DeviceMesh((2,), ("x",)))
        with pytest.raises((MemoryError, SizeOverflowError)):
            layout.partition((2**58, 2)).runs("cpu:0")

    @pytest.mark.parametrize("size", [2**44, 2**60, 2**62])
    @pytest.mark.parametrize(
        "call",
        [
            lambda p: p.boxes(),
            lambda p: p.shard_ids(),
            lambda p: p.replica_ids(),
            lambda p: p.devices_indices_map(),
            lambda p: p.devices_holding(0),
            lambda p: p.views(np.zeros(8)),
            lambda p: p.nbytes("int8"),
        ],
    )
    def test_answers_for_all_devices_that_memory_cannot_hold(
        self, call: Callable[[sw.Partition], object], size: int
    ) -> None:
        partition = sw.TensorLayout((None,), sw.DeviceMesh((size,), ("x",))).partition((8,))
        with pytest.raises((MemoryError, SizeOverflowError)):
            call(partition)
        assert partition.box(f"cpu:{size - 1}") == (slice(0, 8),)

    def test_results_are_the_caller_s(self) -> None:
        partition = grid()
        partition.boxes()[:] = -1
        partition.shard_ids()[:] = -1
        partition.devices_indices_map().clear()
        assert partition.boxes()[7].tolist() == [[3, 6], [6, 8]]
        assert partition.shard_ids().tolist() == list(range(8))
        assert len(partition.devices_indices_map()) == 8


class TestLocate:
    def test_by_hand(self) -> None:
        assert grid().locate(27) == (5, 1)  # Row 3, column 3: shard (1, 1), its row 0, column 1.
        assert grid().global_offset(5, 1) == 27

    @pytest.mark.parametrize("offset", [-1, 48, INT64_MAX, -(2**63), 2**63, 2**64, -(2**63) - 1])
    def test_an_offset_outside(self, offset: int) -> None:
        with refused(IndexError, "offsets", offset):
            grid().locate(offset)
        with refused(IndexError, "offsets[2]", offset):
            grid().locate([0, 47, offset])
        with refused(IndexError, "offsets[2]", offset):
            grid().locate(np.array([0, 47, offset], dtype=np.int64 if -(2**63) <= offset < 2**63 else object))

    def test_one_bad_offset_among_a_million(self) -> None:
        partition = cut(1 << 20, (2,), "even")
        offsets = np.arange(1 << 20)
        offsets[[700_001, 700_002, 900_000]] = [1 << 20, -1, -1]
        before = offsets.copy()
        with refused(IndexError, "offsets[700001]", 1 << 20, f"0 to {(1 << 20) - 1}"):
            partition.locate(offsets)
        assert (offsets == before).all()
        ids, local = np.zeros(1 << 20, int), np.arange(1 << 20) % (1 << 19)
        local[[3, 800_000]] = [1 << 19, -1]
        with refused(IndexError, "local_offsets[3]", 1 << 19):
            partition.global_offset(ids, local)
        ids[2] = 2
        with refused(IndexError, "shard_ids[2] is 2", "0 to 1"):
            partition.global_offset(ids, local)

    @pytest.mark.parametrize(
        "offset", [True, 1.0, "1", None, np.float64(1), np.bool_(True), object(), {1: 2}, [[1], [2, 3]]]
    )
    def test_an_offset_of_a_wrong_type(self, offset: Any) -> None:
        with refused(TypeError, "offsets", "integer"):
            grid().locate(offset)

    @pytest.mark.parametrize(
        "offsets",
        [
            np.array([1.0]),
            np.array([True]),
            np.array(["1"]),
            np.array([1], dtype=object),
            np.array([], dtype=object),
            np.array([1], dtype="m8[s]"),
            np.array([1], dtype="M8[s]"),
            np.array([(1,)], dtype=[("a", int)]),
            np.ma.masked_array([1, 2], mask=[False, True]),
            np.array([]),
        ],
    )
    def test_offsets_of_a_wrong_dtype(self, offsets: Any) -> None:
        with refused(TypeError, "offsets"):
            grid().locate(offsets)

    @pytest.mark.parametrize(
        "kind", ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64", ">i8", "<i8", ">i2"]
    )
    def test_any_integer_dtype(self, kind: str) -> None:
        shards, local = grid().locate(np.array([0, 27, 47], dtype=kind))
        assert (shards.tolist(), local.tolist()) == ([0, 5, 7], [0, 1, 5])

    def test_any_memory_layout(self) -> None:
        partition, base = grid(), np.arange(48)
        expected = [partition.locate(i) for i in range(48)]
        raw = np.zeros(48 * 8 + 1, np.uint8)
        misaligned = raw[1:].view(np.int64)
        misaligned[:] = base
        read_only = base.copy()
        read_only.flags.writeable = False
        sources: list[Any] = [base[::-1], base.reshape(6, 8).T, np.asfortranarray(base.reshape(6, 8)), misaligned]
        sources += [np.broadcast_to(np.int64(27), (3, 2)), read_only, base.reshape(2, 2, 12)[:, ::-1, ::3], np.array(5)]
        for offsets in sources:
            before = offsets.tolist()
            shards, local = partition.locate(offsets)
            assert shards.shape == local.shape == offsets.shape
            found = list(zip(shards.ravel().tolist(), local.ravel().tolist(), strict=True))
            assert found == [expected[i] for i in offsets.ravel().tolist()]
            assert (partition.global_offset(shards, local) == offsets).all()
            assert offsets.tolist() == before

    def test_none_at_all(self) -> None:
        nothing: list[Any] = [[], np.zeros((0, 3), int), ()]
        for offsets in nothing:
            answer: Any = grid().locate(offsets)
            shards, local = answer
            assert shards.shape == local.shape == np.shape(offsets)
            assert grid().global_offset(shards, local).shape == np.shape(offsets)

    def test_integers_in_integers_out(self) -> None:
        for one in (27, np.int8(27), np.uint64(27)):
            answer = grid().locate(one)
            assert answer == (5, 1)
            assert [type(n) for n in answer] == [int, int]
        assert type(grid().global_offset(5, 1)) is int

    def test_rank_0(self) -> None:
        partition = sw.TensorLayout((), sw.DeviceMesh((2,), ("x",))).partition(())
        assert partition.locate(0) == (0, 0)
        assert [a.tolist() for a in partition.locate([0, 0])] == [[0, 0], [0, 0]]
        with refused(IndexError, "offsets", "0 to 0"):
            partition.locate(1)
        assert partition.boxes().shape == (2, 0, 2)
        assert partition.runs("cpu:1").tolist() == [[0, 1]]

    @pytest.mark.parametrize("shard", [-1, 8, 2**63, -(2**64)])
    def test_no_such_shard(self, shard: int) -> None:
        with refused(IndexError, "shard_ids is", shard):
            grid().global_offset(shard, 0)
        with refused(IndexError, "shard_id", shard):
            grid().devices_holding(shard)

    @pytest.mark.parametrize("local", [-1, 6, 2**63, -(2**63)])
    def test_no_such_element_of_a_shard(self, local: int) -> None:
        with refused(IndexError, "local_offsets", local):
            grid().global_offset(0, local)

    def test_no_element_of_an_empty_shard(self) -> None:
        partition = cut(2, (4,), "ceil")
        for local in (-1, 0, 1):
            with refused(IndexError, "local_offsets", local, "empty"):
                partition.global_offset(3, local)
            with refused(IndexError, "local_offsets[1]", local, "empty"):
                partition.global_offset([0, 3], [0, local])

    def test_shard_ids_and_local_offsets_that_do_not_pair_up(self) -> None:
        with refused(LayoutError, "shard_ids", "local_offsets", "[2]", "[3]"):
            grid().global_offset([0, 1], [0, 1, 2])
        for ids, local in ((0, [0]), ([0], 0)):
            with refused(LayoutError, "shard_ids", "local_offsets", "both"):
                grid().global_offset(ids, local)

    @pytest.mark.parametrize("shard", [True, 1.0, "1", None])
    def test_a_shard_id_of_a_wrong_type(self, shard: Any) -> None:
        with refused(TypeError, "shard_id", "integer"):
            grid().devices_holding(shard)
        with refused(TypeError, "shard_ids", "integer"):
            grid().global_offset(shard, 0)


class TestRuns:
    @pytest.mark.parametrize(
        ("axes", "expected"),
        [
            ((None, None, None), [[0, 24]]),
            (("x", None, None), [[12, 12]]),
            ((None, "x", None), [[6, 6], [18, 6]]),
            ((None, None, "y"), [[2 + 3 * i, 1] for i in range(8)]),
        ],
    )
    def test_by_hand(self, axes: Any, expected: list[list[int]]) -> None:
        """The last part of a (2, 4, 3) tensor along each of its dims."""
        partition = sw.TensorLayout(axes, sw.DeviceMesh((2, 3), ("x", "y"))).partition((2, 4, 3))
        assert partition.runs("cpu:5").tolist() == expected

    def test_an_empty_shard_has_none(self) -> None:
        assert cut(2, (4,), "ceil").runs("cpu:3").shape == (0, 2)


class TestBytes:
    def test_by_hand(self) -> None:
        assert cut(10, (4,), "balanced").nbytes(np.float32).tolist() == [12, 12, 8, 8]
        assert grid().nbytes([("a", "i1"), ("b", "f8")]).tolist() == [54] * 8
        assert grid().nbytes("S0").tolist() == [0] * 8

    @pytest.mark.parametrize("shape", [(2**60,), (2**61 + 1,)])
    def test_elements_times_item_size_over_the_limit(self, shape: tuple[int]) -> None:
        """2**60 * 8 is 2**63; (2**61 + 1) * 8 wraps round to 8."""
        partition = sw.TensorLayout((None,), sw.DeviceMesh((2,), ("x",))).partition(shape)
        with refused(SizeOverflowError, "nbytes", shape[0], "8 bytes", INT64_MAX):
            partition.nbytes("float64")
        assert partition.nbytes("int8").tolist() == [shape[0]] * 2

    def test_no_such_dtype(self) -> None:
        with pytest.raises(TypeError, match="nope"):
            grid().nbytes("nope")

    def test_a_partition_may_have_as_many_as_int64_holds(self) -> None:
        partition = sw.TensorLayout(("x",), ONE).partition((INT64_MAX,))
        assert partition.nbytes("int8").tolist() == [INT64_MAX]
        with refused(sw.SizeOverflowError, f"{INT64_MAX} elements of 2 bytes"):
            partition.nbytes("int16")

    def test_a_byte_too_many_is_refused(self) -> None:
        partition = sw.TensorLayout(("x",), ONE).partition((2**62,))
        assert sw.TensorLayout(("x",), ONE).partition((2**62 - 1,)).nbytes("int16").tolist() == [2**63 - 2]
        with refused(sw.SizeOverflowError, f"{2**62} elements of 2 bytes", INT64_MAX):
            partition.nbytes("int16")

    def test_the_padding_counts(self) -> None:
        layout = sw.TensorLayout((packed.padded_vocab(10, "x", 2**62, per_shard=True),), ONE)
        partition = layout.partition((10,))
        assert partition.nbytes("int8").tolist() == [2**62]
        with refused(sw.SizeOverflowError, f"{2**62} elements of 16 bits", "padding"):
            partition.nbytes("int16")
        most = sw.TensorLayout((packed.padded_vocab(10, "x", INT64_MAX, per_shard=True),), ONE).partition((10,))
        assert most.nbytes("int8").tolist() == [INT64_MAX]


class TestValue:
    def test_immutable(self) -> None:
        for name in ("layout", "shape", "uneven", "size", "num_shards", "other"):
            with pytest.raises(AttributeError):
                setattr(grid(), name, ())

    def test_what_differs(self) -> None:
        values: set[Any] = {
            grid(),
            grid().layout.partition((6, 16)),
            grid().layout.partition((6, 8), "ceil"),
            sw.TensorLayout(("y", "x"), grid().device_mesh).partition((8, 8)),
        }
        assert len(values) == 4
        assert grid() in values
        assert cast(object, grid()) != (6, 8)


def test_all_pieces_of_a_plain_partition_are_its_boxes() -> None:
    partition = sw.TensorLayout(("tp", None), sw.DeviceMesh((2, 4), ("dp", "tp"))).partition((8, 3))
    begins, rows = partition.all_pieces()
    assert begins.tolist() == list(range(9))
    assert begins.dtype == rows.dtype == np.int64
    assert rows.shape == (8, 2, 3)
    assert rows[:, :, :2].tolist() == partition.boxes().tolist()
    assert not rows[:, :, 2].any()
