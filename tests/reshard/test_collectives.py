"""Collectives, what they cost, and where there are none: what the laws leave out."""

from __future__ import annotations

import math
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise import packed
from tests.checks import interrupted

MESH = sw.DeviceMesh((2, 2), ("x", "y"))
ROWS = sw.TensorLayout((("x", "y"), None), MESH)
COLUMNS = sw.TensorLayout((None, ("x", "y")), MESH)
WHOLE = sw.TensorLayout((None, None), MESH)
SHAPE = (8, 8)
ARRAY = np.arange(64, dtype=np.float32).reshape(SHAPE)
BYTES = sw.reshard.LinkModel(bandwidth=1e9, latency=0)


def sharded(layout: sw.TensorLayout, array: Any = ARRAY) -> sw.ShardedArray:
    partition = layout.partition(array.shape)
    return sw.ShardedArray(partition, [view.copy() for view in partition.views(array)])


def plan(src: sw.TensorLayout, dst: sw.TensorLayout, shape: tuple[int, ...] = SHAPE) -> sw.reshard.ReshardPlan:
    return sw.plan_reshard(src.partition(shape), dst.partition(shape))


def steps(plan: sw.reshard.ReshardPlan, links: sw.reshard.LinkModel = BYTES) -> list[tuple[str, tuple[str, ...], int]]:
    found = plan.collectives("f4", links)
    assert found is not None
    return [(step.kind, step.axes, step.bytes) for step in found]


def test_link_models_are_equal_if_both_of_their_numbers_are() -> None:
    one = sw.reshard.LinkModel({"x": 1.0}, latency=1e-6)
    assert one == sw.reshard.LinkModel({"x": 1.0}, latency=1e-6)
    assert one != sw.reshard.LinkModel({"x": 1.0}, latency=2e-6)
    assert one != sw.reshard.LinkModel({"x": 2.0}, latency=1e-6)
    assert one != sw.reshard.LinkModel({"x": 1.0}, latency={"x": 1e-6})


class TestSearch:
    def test_the_link_model_decides(self) -> None:
        # By hand: shards of 1 MiB. With equal links one gather of 3 MiB; with a slow x, the exchange along y makes the
        # gather along x the first one, when it moves least.
        gather = plan(ROWS, WHOLE, (1024, 1024))
        assert steps(gather) == [("all-gather", ("x", "y"), 3 * 2**20)]
        cost = gather.cost("f4", BYTES)
        assert cost is not None
        assert cost.seconds == pytest.approx(3 * 2**20 / 1e9)
        assert steps(gather, sw.reshard.LinkModel(bandwidth={"x": 1e9, "y": 1e12}, latency=0)) == [
            ("all-to-all", ("y",), 2**19),
            ("all-gather", ("x",), 2**20),
            ("all-gather", ("y",), 2**21),
        ]

    def test_of_unknown_links_only_the_bytes_count(self) -> None:
        """24 float32 in 8 shards: 7/8 of 96 bytes, in 7 messages. Three steps need fewer messages, but more bytes."""
        line = sw.DeviceMesh((8,), ("x",))
        small = plan(sw.TensorLayout(("x",), line), sw.TensorLayout((None,), line), (24,))
        at_once, known = small.collectives("f4"), small.collectives("f4", sw.reshard.LinkModel())
        assert at_once is not None
        assert known is not None
        assert [(step.kind, step.axes, step.bytes) for step in at_once] == [("all-gather", ("x",), 84)]
        assert at_once[0].seconds == pytest.approx(7e-6 + 84 / 50e9)
        assert [(step.kind, step.bytes) for step in known] == [
            ("all-gather", 12),
            ("collective-permute", 24),
            ("all-gather", 72),
        ]
        assert sum(step.seconds for step in known) < at_once[0].seconds

    def test_several_axes_are_exchanged_at_once(self) -> None:
        # 7/8 of shards of 512 KiB, which is all that the transfers move.
        grid = sw.DeviceMesh((2, 4), ("node", "gpu"))
        both = ("node", "gpu")
        exchange = plan(sw.TensorLayout((both, None), grid), sw.TensorLayout((None, both), grid), (1024, 1024))
        assert steps(exchange) == [("all-to-all", both, 458_752)]
        assert exchange.bytes_received("f4").tolist() == [458_752] * 8

    def test_axes_change_places_in_one_step(self) -> None:
        mesh = sw.DeviceMesh((2, 2, 2), ("a", "b", "c"))
        turned = plan(sw.TensorLayout(("a", "b", "c"), mesh), sw.TensorLayout(("b", "c", "a"), mesh), (8, 8, 8))
        assert steps(turned) == [("collective-permute", ("a", "b", "c"), 256)]

    def test_an_axis_of_each_mesh_or_a_part_of_one(self) -> None:
        line, grid = sw.DeviceMesh((8,), ("world",)), sw.DeviceMesh((2, 4), ("dp", "tp"))
        there = plan(sw.TensorLayout(("world", None), line), sw.TensorLayout(("dp", "tp"), grid), (8, 8))
        found = there.collectives("f4", BYTES)
        assert found is not None
        assert [(step.kind, step.axes, step.from_dim, step.to_dim, step.bytes) for step in found] == [
            ("all-to-all", ("world:(2)4",), 0, 1, 24)
        ]
        assert found[0].layout == sw.TensorLayout(("world:(1)2", "world:(2)4"), line)
        back = plan(sw.TensorLayout(("dp", "tp"), grid), sw.TensorLayout(("world", None), line), (8, 8))
        assert steps(back) == [("all-to-all", ("tp",), 24)]

    def test_a_transposed_view(self) -> None:
        grid = sw.DeviceMesh((2, 4), ("dp", "tp"))
        turned = grid.transpose("tp", "dp")
        same = plan(sw.TensorLayout(("dp", "tp"), grid), sw.TensorLayout(("dp", "tp"), turned))
        assert steps(same) == []
        ran = same.run_collectives(sharded(sw.TensorLayout(("dp", "tp"), grid)))
        expected = sw.TensorLayout(("dp", "tp"), turned).partition(SHAPE).views(ARRAY)
        assert all(map(np.array_equal, ran, expected))
        swapped = plan(sw.TensorLayout((("dp", "tp"), None), grid), sw.TensorLayout((("tp", "dp"), None), turned))
        assert steps(swapped) == [("collective-permute", ("dp", "tp"), 32)]

    def test_links_of_two_meshes_go_by_the_names_of_either(self) -> None:
        line, grid = sw.DeviceMesh((8,), ("world",)), sw.DeviceMesh((2, 4), ("dp", "tp"))
        gather = plan(sw.TensorLayout(("world",), line), sw.TensorLayout(("dp",), grid), (8,))
        for bandwidth in ({"world": 100.0}, {"dp": 1e9, "tp": 100.0}):
            cost = gather.cost("f4", sw.reshard.LinkModel(bandwidth, latency=0))
            assert cost is not None
            # Three more shards of 4 bytes along tp, after the shards of both halves have changed places: 4 bytes more.
            assert cost.seconds >= 12 / 100
        with pytest.raises(sw.LayoutError, match="no entry for axis 'world' or 'dp'"):
            gather.cost("f4", sw.reshard.LinkModel({"tp": 1.0}))

    @pytest.mark.parametrize("after", [COLUMNS, WHOLE])
    def test_the_byte_order_is_kept(self, after: sw.TensorLayout) -> None:
        array = ARRAY.astype(">f4")
        ran = plan(ROWS, after).run_collectives(sharded(ROWS, array))
        assert all(shard.dtype == np.dtype(">f4") for shard in ran)
        assert (sw.ShardedArray(after.partition(SHAPE), ran).numpy() == array).all()

    @pytest.mark.parametrize(
        ("unreduced", "addends", "total"), [(("x",), [1, 1, 4, 4], 5), (("x", "y"), [1, 2, 4, 8], 15)]
    )
    def test_an_array_without_dims(self, unreduced: tuple[str, ...], addends: list[int], total: int) -> None:
        before = sw.TensorLayout((), MESH, unreduced=unreduced)
        sums = sw.ShardedArray(before.partition(()), [np.array(addend, "f4") for addend in addends])
        ran = plan(before, sw.TensorLayout((), MESH), ()).run_collectives(sums)
        assert [(type(shard), shard.shape, shard.tolist()) for shard in ran] == [(np.ndarray, (), total)] * 4

    def test_nothing_to_do(self) -> None:
        nothing = plan(ROWS, ROWS)
        assert nothing.collectives("f4") == ()
        cost = nothing.cost("f4")
        assert cost is not None
        assert (cost.bytes, cost.seconds, str(cost)) == (0, 0, "each device receives 0 B in 0 steps, about 0 s")
        assert "Nothing moves" in nothing.explain()

    @pytest.mark.heavy
    def test_many_axes(self) -> None:
        names = tuple("abcdefghijklmn")
        mesh = sw.DeviceMesh((2,) * 14, names)
        src = sw.TensorLayout((names[:5], names[5:9], None), mesh)
        dst = sw.TensorLayout((names[12:7:-1], (*names[3:8], "a"), names[1]), mesh)
        found = plan(src, dst, (2**14,) * 3).collectives("f4", BYTES)
        assert found
        assert found[-1].layout == dst
        # More cannot be needed than to gather all of it.
        assert sum(step.bytes for step in found) <= 4 * 2**42

    def test_ctrl_c(self) -> None:
        def planned(axes: int) -> sw.reshard.ReshardPlan:
            names = tuple(f"a{i}" for i in range(axes))
            mesh = sw.DeviceMesh((2,) * axes, names)
            third = axes // 3
            src = sw.TensorLayout((names[:third], names[third : 2 * third], names[2 * third :]), mesh)
            dst = sw.TensorLayout((names[2 * third + 1 :: -1], names[2 * third + 2 :], ()), mesh)
            return plan(src, dst, (2**axes,) * 3)

        found = interrupted(lambda made: made.collectives("f4"), map(planned, range(8, 20)), KeyboardInterrupt)
        assert found


class TestObstacles:
    def test_each_has_its_reason(self) -> None:
        def on(names: str, sizes: tuple[int, ...], specs: Any, devices: Any = None) -> sw.TensorLayout:
            return sw.TensorLayout(specs, sw.DeviceMesh(sizes, tuple(names), devices))

        four = on("x", (4,), ("x",))
        cases: list[tuple[sw.TensorLayout, sw.TensorLayout, str, str]] = [
            (four, on("z", (2,), ("z",)), "device-count", "src is on 4 devices and dst on 2"),
            (four, on("x", (4,), ("x",), "abcd"), "devices", "device 0 of the mesh of dst is not in the mesh of src"),
            (
                four,
                on("x", (4,), ("x",), ["cpu:3", "cpu:2", "cpu:1", "cpu:0"]),
                "device-order",
                "no reordering of axes or sub-axes turns the device order of src into that of dst",
            ),
            (
                on("ab", (6, 4), ("a",)),
                on("cd", (4, 6), ("c",)),
                "no-common-sub-axes",
                "the meshes have no common sub-axes: [6, 4] and [4, 6] cut the devices at different places",
            ),
        ]
        for src, dst, kind, message in cases:
            blocked = plan(src, dst, (24,))
            assert blocked.obstacle == sw.reshard.CollectiveObstacle(kind, message)  # type: ignore[arg-type]
            assert blocked.collectives("f4") is None
            assert blocked.cost("f4") is None
            assert f"It cannot be expressed as collectives: {message}. It is sent point to point." in blocked.explain()
            with pytest.raises(sw.LayoutError, match="the plan has no collectives: "):
                blocked.run_collectives(sharded(src, np.arange(24)))

    @pytest.mark.parametrize("side", ["src", "dst"])
    def test_a_dim_that_does_not_divide(self, side: str) -> None:
        cut, whole = ROWS.partition((6, 8), "ceil"), WHOLE.partition((6, 8))
        blocked = sw.plan_reshard(cut, whole) if side == "src" else sw.plan_reshard(whole, cut)
        assert blocked.obstacle is not None
        assert blocked.obstacle.kind == "indivisible"
        assert str(blocked.obstacle) == f"dim 0 of {side} has 6 elements, which 4 shards do not divide evenly"
        assert f"dim 0 of {side} has 6 elements" in blocked.explain()

    def test_none_where_there_is_none(self) -> None:
        assert plan(ROWS, COLUMNS).obstacle is None

    def test_what_is_no_sharded_array(self) -> None:
        with pytest.raises(TypeError, match="src_shards must be a ShardedArray"):
            plan(ROWS, COLUMNS).run_collectives([])  # type: ignore[arg-type]


class TestCost:
    def test_a_sequence_by_hand(self) -> None:
        src = sw.TensorLayout((("x", "y"), None), MESH).partition((64, 64))
        sequence = [
            sw.reshard.Collective("all-to-all", ("y",), from_dim=0, to_dim=1),
            sw.reshard.Collective("collective-permute", ("x", "y"), layout=sw.TensorLayout(("y", "x"), MESH)),
            sw.reshard.Collective("all-gather", ("y",), from_dim=0),
            sw.reshard.Collective("slice", ("y",), to_dim=1),
        ]
        cost = sw.reshard.cost_of(sequence, src, "f4", sw.reshard.LinkModel(bandwidth=1e3, latency=2))
        # Shards of 4 KiB: half of one, one, one more, nothing.
        assert [step.bytes for step in cost.steps] == [2048, 4096, 4096, 0]
        assert [step.seconds for step in cost.steps] == pytest.approx([2 + 2.048, 4 + 4.096, 2 + 4.096, 0])
        assert cost.bytes == 2048 + 4096 + 4096
        assert cost.seconds == pytest.approx(8 + 10.24)
        assert cost.steps[-1].layout == sw.TensorLayout((None, ("x", "y")), MESH)

    def test_partial_sums(self) -> None:
        sums = sw.TensorLayout((None, None), MESH, unreduced=("x", "y")).partition((64, 64))
        sequence = [
            sw.reshard.Collective("reduce-scatter", ("x",), to_dim=0),
            sw.reshard.Collective("all-reduce", ("y",)),
        ]
        # Of 16 KiB half; then shards of 8 KiB, twice the half.
        assert [step.bytes for step in sw.reshard.cost_of(sequence, sums, "f4").steps] == [8192, 8192]

    @pytest.mark.parametrize(
        ("collective", "problem"),
        [
            (
                sw.reshard.Collective("all-gather", ("x",), from_dim=0),
                "dim 0 is cut by x, y, and x are not its minor axes",
            ),
            (sw.reshard.Collective("all-gather", ("y",)), "from_dim is missing"),
            (sw.reshard.Collective("slice", ("x",), to_dim=0), "x does not replicate"),
            (sw.reshard.Collective("slice", (), to_dim=7), "to_dim is 7, outside 0 to 1"),
            (sw.reshard.Collective("all-reduce", ("x",)), "x is not unreduced"),
            (sw.reshard.Collective("collective-permute", ("x",)), "layout is missing"),
            (
                sw.reshard.Collective("collective-permute", ("x",), layout=WHOLE),
                "layout has another number of shards along a dim than the layout before",
            ),
            (
                sw.reshard.Collective("all-gather", ("y",), from_dim=0, layout=WHOLE),
                "layout is not the one that this collective leads to",
            ),
        ],
    )
    def test_what_cannot_be_made_names_the_step(self, collective: sw.reshard.Collective, problem: str) -> None:
        with pytest.raises(sw.LayoutError) as caught:
            sw.reshard.cost_of([collective], ROWS.partition(SHAPE), "f4")
        assert str(caught.value) == f"steps[0], {collective.kind}: {problem}"

    def test_other_bad_input(self) -> None:
        rows = ROWS.partition(SHAPE)
        with pytest.raises(sw.LayoutError, match="divide"):
            sw.reshard.cost_of([sw.reshard.Collective("all-to-all", ("y",), 0, 1)], ROWS.partition((8, 3)), "f4")
        with pytest.raises(sw.LayoutError, match=r"steps\[0\].axes names axis \"w\""):
            sw.reshard.cost_of([sw.reshard.Collective("all-gather", ("w",), 0)], rows, "f4")
        other = sw.TensorLayout((None, None), sw.DeviceMesh((4,), ("x",)))
        with pytest.raises(sw.LayoutError, match=r"steps\[0\].layout is on another mesh"):
            sw.reshard.cost_of([sw.reshard.Collective("all-gather", ("y",), 0, layout=other)], rows, "f4")
        with pytest.raises(TypeError, match=r"steps\[0\] must be a Collective"):
            sw.reshard.cost_of(["all-gather"], rows, "f4")  # type: ignore[list-item]
        with pytest.raises(TypeError, match="src must be a Partition"):
            sw.reshard.cost_of([], ROWS, "f4")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="links must be a LinkModel"):
            sw.reshard.cost_of([], rows, "f4", {})  # type: ignore[arg-type]
        with pytest.raises(sw.LayoutError, match="kind is 'gather'; the kinds are slice"):
            sw.reshard.Collective("gather", ("x",))  # type: ignore[arg-type]
        for axes in ("x", 3, {"x": 1}, [3]):
            with pytest.raises(TypeError, match="axes must be a tuple"):
                sw.reshard.Collective("slice", axes)  # type: ignore[arg-type]
        with pytest.raises(sw.LayoutError, match="from_dim is -1"):
            sw.reshard.Collective("all-gather", ("x",), from_dim=-1)
        with pytest.raises(TypeError, match="to_dim must be an integer"):
            sw.reshard.Collective("slice", ("x",), to_dim=0.5)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="layout must be a TensorLayout"):
            sw.reshard.Collective("slice", ("x",), layout=rows)  # type: ignore[arg-type]


class TestLinkModel:
    def test_it_is_a_value(self) -> None:
        links = sw.reshard.LinkModel({"x": 1, "y": np.float32(2)}, latency=Fraction(1, 4))  # type: ignore[arg-type]
        same = sw.reshard.LinkModel({"y": 2.0, "x": 1.0}, 0.25)
        assert links == same
        assert hash(links) == hash(same)
        assert eval(repr(links), {"LinkModel": sw.reshard.LinkModel}) == links
        assert pickle.loads(pickle.dumps(links)) == links
        assert links.of("y") == (2.0, 0.25)
        assert links != sw.reshard.LinkModel({"x": 1.0}, 0.25)
        assert links != "links"

    def test_it_cannot_be_changed(self) -> None:
        given = {"x": 1.0}
        links = sw.reshard.LinkModel(given)
        given["x"] = 2.0
        assert links.of("x") == (1.0, 1e-6)
        with pytest.raises(TypeError, match="does not support item assignment"):
            links.bandwidth["x"] = 2.0  # type: ignore[index]
        with pytest.raises(AttributeError, match="immutable"):
            links.latency = 2.0  # type: ignore[misc]
        with pytest.raises(AttributeError, match="immutable"):
            del links.latency

    @pytest.mark.parametrize(
        ("bandwidth", "latency", "error", "message"),
        [
            (0, 0, sw.LayoutError, "bandwidth is 0.0; it must be above 0"),
            ({"x": 0}, 0, sw.LayoutError, "bandwidth of axis 'x' is 0.0; it must be above 0"),
            (1, -1, sw.LayoutError, "latency is -1.0; it must be finite and not negative"),
            (math.nan, 0, sw.LayoutError, "bandwidth is nan; it must be finite"),
            (1, {"x": math.inf}, sw.LayoutError, "latency of axis 'x' is inf; it must be finite"),
            (10**400, 0, sw.SizeOverflowError, "bandwidth is an integer of 1329 bits, over the limit of 1.79"),
            (1, "fast", TypeError, "latency must be a number or a mapping from axis names to numbers, got 'fast'"),
            (True, 0, TypeError, "bandwidth must be a number"),
            (1j, 0, TypeError, "bandwidth must be a number"),
            ({1: 1.0}, 0, TypeError, "bandwidth must map axis names to numbers, got the key 1"),
        ],
    )
    def test_what_is_refused(self, bandwidth: Any, latency: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            sw.reshard.LinkModel(bandwidth, latency)

    def test_an_axis_that_a_mapping_lacks(self) -> None:
        with pytest.raises(sw.LayoutError, match=r"bandwidth has no entry for axis 'y'; it has \['x'\]"):
            plan(ROWS, COLUMNS).collectives("f4", sw.reshard.LinkModel({"x": 1.0}))


class TestWords:
    def test_a_plan(self) -> None:
        text = plan(ROWS, COLUMNS).explain(np.int8)
        assert text.startswith("An int8 tensor of shape (8, 8), 64 B, goes")
        assert "; 16 B stays in place." in text

    def test_sums_and_short_times(self) -> None:
        sums = plan(sw.TensorLayout((None, None), MESH, unreduced=["x"]), WHOLE)
        assert "Each value is the sum of 2 addends" in sums.explain("f4")
        # All-reduce over 2 devices: half of 64 elements of 4 bytes there and half back.
        quick = sw.reshard.LinkModel(bandwidth=256e9, latency=0.0)
        assert "As collectives, about 1 ns:" in sums.explain("f4", quick)

    def test_a_permute(self) -> None:
        (step,) = plan(ROWS, sw.TensorLayout((("y", "x"), None), MESH)).collectives("f4") or ()
        text = "collective-permute along x, y: shards change places, to (('y', 'x'), None); each device receives 64 B"
        assert str(step) == text


class TestAllToAll:
    def test_several_axes_in_another_order(self) -> None:
        moved = sw.array.all_to_all(sharded(ROWS), ("y", "x"), dim=1)
        assert moved.layout.axes == (None, ("y", "x"))
        assert (moved.numpy() == ARRAY).all()

    def test_bad_input(self) -> None:
        rows = sharded(ROWS)
        with pytest.raises(sw.LayoutError, match="not the minor axes of a dim"):
            sw.array.all_to_all(rows, "x", dim=1)
        with pytest.raises(sw.LayoutError, match="not the minor axes of a dim"):
            sw.array.all_to_all(rows, (), dim=1)
        with pytest.raises(sw.LayoutError, match="dim is 0, which"):
            sw.array.all_to_all(rows, "y", dim=0)
        with pytest.raises(IndexError, match="dim is 2, outside 0 to 1"):
            sw.array.all_to_all(rows, "y", dim=2)
        with pytest.raises(TypeError, match="dim must be an integer"):
            sw.array.all_to_all(rows, "y", dim="1")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="sharded must be a ShardedArray"):
            sw.array.all_to_all(ARRAY, "y", dim=0)  # type: ignore[arg-type]


@pytest.mark.parametrize(("from_packed", "to_packed"), [(True, False), (False, True), (True, True)])
def test_a_packed_dim_of_either_side_has_no_collectives(from_packed: bool, to_packed: bool) -> None:
    plain = sw.TensorLayout(("x",), MESH).partition((16,))
    fused = sw.TensorLayout((packed.gate_up("x"),), MESH).partition((16,))
    plan = sw.plan_reshard(fused if from_packed else plain, fused if to_packed else plain)
    assert plan.obstacle is not None
    assert plan.obstacle.kind == "packed"
    assert plan.collectives("float32") is None


def test_the_last_step_gives_the_layout_that_was_asked_for() -> None:
    mesh = sw.DeviceMesh((4, 1), ("x", "one"))
    src = sw.TensorLayout(("x", None), mesh).partition((8, 8))
    dst = sw.TensorLayout((None, ("x", "one")), mesh).partition((8, 8))
    steps = sw.plan_reshard(src, dst).collectives("float32")
    assert steps is not None
    assert steps[-1].layout == dst.layout
