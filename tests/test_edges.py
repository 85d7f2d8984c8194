"""Where one more or one less makes the difference: limits of bytes, axes and positions, and what messages say there.

Changes of the code that the other tests did not notice (`python -m tests.mutants`) showed what is here.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise import packed
from shardwise._boxes import consecutive
from shardwise.sub_axis import SubAxis, parse_sub_axis
from tests.checks import INT64_MAX, refused

ONE = sw.DeviceMesh((1,), ("x",))
MESH = sw.DeviceMesh((2, 4), ("dp", "tp"))


class TestBytes:
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

    def test_a_tiling_may_have_as_many_as_int64_holds(self) -> None:
        assert sw.Tiling.from_boxes((INT64_MAX,), [[(0, INT64_MAX)]]).nbytes("int8").tolist() == [INT64_MAX]
        assert sw.Tiling.from_boxes((2**62 - 1,), [[(0, 2**62 - 1)]]).nbytes("int16").tolist() == [2**63 - 2]
        with refused(sw.SizeOverflowError, f"{2**62} elements of 16 bits", INT64_MAX):
            sw.Tiling.from_boxes((2**62,), [[(0, 2**62)]]).nbytes("int16")


def test_all_pieces_of_a_plain_partition_are_its_boxes() -> None:
    partition = sw.TensorLayout(("tp", None), MESH).partition((8, 3))
    begins, rows = partition.all_pieces()
    assert begins.tolist() == list(range(9))
    assert begins.dtype == rows.dtype == np.int64
    assert rows.shape == (8, 2, 3)
    assert rows[:, :, :2].tolist() == partition.boxes().tolist()
    assert not rows[:, :, 2].any()


def test_padding_is_zero_after_a_reshard() -> None:
    mesh = sw.DeviceMesh((2,), ("x",))
    padded = sw.TensorLayout((packed.padded_vocab(5, "x", 4, per_shard=True),), mesh).partition((5,))
    source = sw.distribute_tensor(np.arange(1, 6), sw.TensorLayout((None,), mesh))
    made = sw.plan_reshard(source.partition, padded).run(source)
    # As Megatron pads: 5 to 8, which is 4 for each.
    assert [shard.tolist() for shard in made] == [[1, 2, 3, 4], [5, 0, 0, 0]]
    # New memory is often 0 by itself: what has to be made so is known.
    covered = padded._covered()
    assert covered is not None
    assert covered.tolist() == [True, False]


class TestPackedDims:
    def test_a_part_without_a_size_may_be_empty(self) -> None:
        dim = packed.concat(packed.part(4), packed.part(None))
        assert (dim.sizes(4), dim.sizes(5)) == ((4, 0), (4, 1))
        with refused(sw.LayoutError, "3"):
            dim.sizes(3)

    def test_gate_and_up_in_turn_are_cut_in_pairs(self) -> None:
        mesh = sw.DeviceMesh((2,), ("tp",))
        dim = packed.gate_up("tp", order="interleaved")
        pieces = sw.TensorLayout((dim,), mesh).partition((8,)).pieces("cpu:1")
        assert pieces == [sw.Piece((slice(4, 8),), (0,))]
        assert list(dim.segments(4)) == [("gate", 0, 0, 1), ("up", 0, 1, 1), ("gate", 1, 2, 1), ("up", 1, 3, 1)]

    @pytest.mark.parametrize("heads", [(0, 1, 8), (1, 0, 8), (1, 1, 0)])
    def test_there_is_a_head_at_least(self, heads: tuple[int, int, int]) -> None:
        with refused(sw.LayoutError, "is 0; it must be at least 1"):
            packed.qkv(*heads, "tp")

    def test_vocabularies_are_padded_as_vllm_pads_them(self) -> None:
        mesh = sw.DeviceMesh((2,), ("tp",))
        assert sw.TensorLayout((packed.padded_vocab(100, "tp"),), mesh).partition((100,)).shard_shape("cpu:1") == (64,)

    def test_padding_to_one_is_none(self) -> None:
        with refused(sw.LayoutError, "pad_to", "0"):
            packed.part(10, axes="x", pad_to=0)
        layout = sw.TensorLayout((packed.concat(packed.part(10, axes="x", pad_to=1)),), ONE)
        assert layout.partition((10,)).shard_shape("cpu:0") == (10,)


class TestTilings:
    def test_a_label_that_comes_twice_is_named_with_both_places(self) -> None:
        with refused(sw.LayoutError, "holders[2] repeats the label 'a' of holders[0]"):
            sw.Tiling.grid((3,), (1,), ["a", "b", "a"])

    def test_shapes_of_arrays_need_labels(self) -> None:
        with refused(sw.LayoutError, "arrays is for holders with labels"):
            sw.Tiling.from_boxes((4,), [[(0, 4)]], arrays={0: (4,)})

    @pytest.mark.parametrize("ranges", [[], {}, np.empty((0, 2), np.int64)])
    def test_no_ranges_are_no_holders(self, ranges: Any) -> None:
        assert sw.Tiling.from_flat_ranges((0,), ranges).holders == ()

    def test_one_range_is_one_holder(self) -> None:
        assert sw.Tiling.from_flat_ranges((4,), [(0, 4)]).holders == (0,)
        with refused(sw.LayoutError, "(1, 1)"):
            sw.Tiling.from_flat_ranges((4,), [(0,)])  # type: ignore[list-item]

    def test_a_shape_has_one_dim(self) -> None:
        with refused(TypeError, "shape must be a sequence of integers"):
            sw.Tiling.from_boxes(np.ones((2, 2), np.int64), [])  # type: ignore[arg-type]

    @pytest.mark.parametrize(("count", "shown"), [(3, "3 holders: 0, 1, 2"), (4, "4 holders: 0, 1, 2, …")])
    def test_up_to_three_holders_are_listed(self, count: int, shown: str) -> None:
        with pytest.raises(sw.LayoutError) as raised:
            sw.Tiling.from_boxes((count,), [[(i, i + 1)] for i in range(count)]).pieces("nobody")
        assert str(raised.value).endswith(shown)

    def test_a_plan_says_what_sort_of_tilings_there_are(self) -> None:
        chunks, ranges = sw.Tiling.grid((4,), (3,)), sw.Tiling.from_flat_ranges((4,), [(0, 4)])
        text = sw.plan_reshard(chunks, ranges).explain()
        assert "chunks of shape (3,)" in text
        assert "ranges of the flattened tensor" in text
        assert "explicit boxes" in sw.plan_reshard(sw.Tiling.from_boxes((4,), [[(0, 4)]]), ranges).explain()

    def test_boxes_of_another_rank_are_refused_with_their_shape(self) -> None:
        with refused(sw.LayoutError, "boxes is of shape (2, 1, 2)", "(boxes, 2, 2)"):
            sw.Tiling.from_boxes((4, 4), np.zeros((2, 1, 2), np.int64))

        with refused(sw.LayoutError, "boxes['a'] is of shape (2, 1, 2)", "(boxes, 2, 2)"):
            sw.Tiling.from_boxes((4, 4), {"a": np.zeros((2, 1, 2), np.int64)})

    def test_no_boxes_are_of_any_rank(self) -> None:
        tiling = sw.Tiling.from_boxes((4, 0), {"a": [], "b": np.empty((0, 2, 2), np.int64)})
        assert tiling.pieces("a") == tiling.pieces("b") == []

    def test_pieces_and_boxes_are_not_mixed(self) -> None:
        piece = sw.Piece((slice(0, 2),), (0,))
        with refused(TypeError, "Pieces and other boxes"):
            sw.Tiling.from_boxes((4,), {"a": [piece, (slice(2, 4),)]}, arrays={"a": (4,)})

    def test_arrays_of_their_own_come_back_from_a_repr(self) -> None:
        flat = {"a": [sw.Piece((slice(0, 1), slice(0, 3)), 2), sw.Piece((slice(1, 2), slice(0, 3)), 5)]}
        full = {"a": [sw.Piece((slice(0, 1), slice(0, 3)), (1, 0)), sw.Piece((slice(1, 2), slice(0, 3)), (0, 0))]}
        for pieces, own in ((flat, (8,)), (full, (2, 3))):
            tiling = sw.Tiling.from_boxes((2, 3), pieces, arrays={"a": own})
            again = eval(repr(tiling), {"Tiling": sw.Tiling, "Piece": sw.Piece})
            assert again == tiling
            assert again.pieces("a") == pieces["a"]
            assert again.holder_shape("a") == own

    @pytest.mark.parametrize("step", [None, 1])
    def test_a_step_of_one_is_none(self, step: int | None) -> None:
        assert sw.Tiling.from_boxes((4,), {"a": (slice(0, 4, step),)}).pieces("a")[0].box == (slice(0, 4),)

    @pytest.mark.parametrize("step", [-1, 0, 2])
    def test_other_steps_are_refused(self, step: int) -> None:
        with refused(sw.LayoutError, "no steps"):
            sw.Tiling.from_boxes((4,), {"a": (slice(0, 4, step),)})


class TestViewsOfMeshes:
    def test_sub_axes_of_axes_with_line_breaks(self) -> None:
        assert parse_sub_axis("a\nb:(2)4") == SubAxis("a\nb", 2, 4)

    def test_unflatten_takes_positions_within_the_mesh(self) -> None:
        assert MESH.unflatten(0, (2, 1), ("a", "b")).axis_names == ("a", "b", "tp")
        assert MESH.unflatten(1, (2, 2), ("a", "b")).axis_names == ("dp", "a", "b")
        for position in (-1, 2):
            with refused(sw.MeshError, f"axis is {position}", "2 axes"):
                MESH.unflatten(position, (2, 2), ("a", "b"))

    def test_names_that_are_no_strings_are_named(self) -> None:
        with refused(TypeError, "name must be a string or None, got int"):
            MESH.flatten(("dp", "tp"), 3)  # type: ignore[arg-type]

    def test_sub_axes_that_cut_across_each_other(self) -> None:
        mesh = sw.DeviceMesh((12,), ("tp",))
        with refused(sw.MeshError, "cannot be combined", "at 4 and 6"):
            mesh.submesh(("tp:(1)4", "tp:(2)3"))

    def test_what_overlaps_is_said_to(self) -> None:
        with refused(sw.MeshError, "names[0] is 'tp'", "(two of the names overlap)"):
            MESH.submesh(("tp", "tp:(1)2"))
        with refused(sw.MeshError, "names[0] is 'tp:(1)4'", "(two of the names overlap)"):
            MESH.submesh(("tp:(1)4", "tp:(1)2"))
        for names in ("pp", ("dp", "pp")):
            with pytest.raises(sw.MeshError) as raised:
                MESH.submesh(names)
            assert str(raised.value).endswith("the axes of this mesh are ('dp', 'tp')")

    def test_names_that_are_not_text_are_shown(self) -> None:
        with refused(TypeError, "names must be an axis name or a sequence of them, got (0, 1)"):
            MESH.submesh((0, 1))  # type: ignore[arg-type]

    def test_an_axis_named_twice_is_named_with_both_places(self) -> None:
        with refused(sw.MeshError, "names[2] repeats the axis 'dp' of names[0]"):
            MESH.submesh(("dp", "tp", "dp"))


class TestMeshes:
    def test_a_label_that_comes_twice_is_named_with_both_places(self) -> None:
        with refused(sw.MeshError, "devices[2] repeats the label 'a' of devices[0]"):
            sw.DeviceMesh((3,), ("x",), ["a", "b", "a"])

    def test_an_array_of_devices_has_as_many_dims_as_numpy_allows(self) -> None:
        most = max(dims for dims in (32, 64) if _is_possible(dims))
        names = [f"a{i}" for i in range(most + 1)]
        assert sw.DeviceMesh((1,) * most, names[:most]).devices.shape == (1,) * most
        with refused(sw.MeshError, f"{most + 1} axes", f"at most {most} dims"):
            _ = sw.DeviceMesh((1,) * (most + 1), names).devices

    def test_positions_end_with_the_mesh(self) -> None:
        mesh = sw.DeviceMesh((4,), ("x",))
        assert [mesh.index_of_label(i) for i in range(4)] == [0, 1, 2, 3]
        for position in (-1, 4):
            with refused(sw.MeshError, f"device {position} is not in the mesh"):
                mesh.index_of_label(position)

    def test_only_positions_within_the_mesh_are_offered(self) -> None:
        mesh = sw.DeviceMesh((2,), ("x",), ["a", "b"])
        for position in (0, 1):
            with refused(sw.MeshError, f"give mesh.device({position})"):
                mesh.index_of_label(position)
        for position in (-1, 2):
            with pytest.raises(sw.MeshError) as raised:
                mesh.index_of_label(position)
            assert str(raised.value).endswith("labelled 'a', 'b'")

    def test_up_to_four_labels_are_listed(self) -> None:
        for labels, shown in (("abcd", "'a', 'b', 'c', 'd'"), ("abcde", "'a', 'b', … 'e'")):
            with pytest.raises(sw.MeshError) as raised:
                sw.DeviceMesh((len(labels),), ("x",), list(labels)).index_of_label("z")
            assert str(raised.value).endswith(f"labelled {shown}")

    def test_labels_from_arrays_are_plain_values(self) -> None:
        numbers = sw.DeviceMesh((2,), ("x",), np.array([5, 6]))
        assert [type(numbers.device(i)) for i in range(2)] == [int, int]
        objects = sw.DeviceMesh((2,), ("x",), np.array(["a", 3], object))
        assert [objects.device(i) for i in range(2)] == ["a", 3]


def _is_possible(dims: int) -> bool:
    try:
        np.empty((1,) * dims)
    except ValueError:
        return False
    return True


class TestLayouts:
    def test_a_mesh_that_comes_later_leaves_unreduced_axes(self) -> None:
        bound = sw.TensorLayout((None,), unreduced=("tp",)).with_mesh(MESH)
        assert bound == sw.TensorLayout((None,), MESH, unreduced=("tp",))

    @pytest.mark.parametrize(("size", "whole"), [(1, True), (2, False)])
    def test_an_unreduced_axis_of_one_device_is_a_whole(self, size: int, whole: bool) -> None:
        mesh = sw.DeviceMesh((size,), ("x",))
        assert sw.TensorLayout((None,), mesh, unreduced=("x",)).is_fully_replicated is whole
        assert sw.TensorLayout((None,), mesh).is_fully_replicated

    @pytest.mark.parametrize(
        "axes",
        [
            ("dp", packed.gate_up("tp:(1)2")),
            (("tp:(2)2", "dp"), packed.gate_up("tp:(1)2")),
            ("tp:(2)2", packed.gate_up("dp")),
            (None, packed.gate_up(("tp:(1)2", "tp:(2)2"))),
        ],
    )
    @pytest.mark.parametrize("unreduced", [(), ("pp",), ("ep:(2)3",), ("ep:(1)6",), ("pp:(1)2", "ep")])
    def test_a_refined_layout_with_packed_dims_gives_every_device_the_same(self, axes: Any, unreduced: Any) -> None:
        mesh = sw.DeviceMesh((2, 4, 2, 6), ("dp", "tp", "pp", "ep"))
        layout = sw.TensorLayout(axes, mesh, unreduced=unreduced)
        refined = layout.refined()
        assert refined.device_mesh is not None
        assert "tp" not in refined.device_mesh.axis_names
        assert [refined.device_mesh.axis_size(name) for name in refined.unreduced] == [
            mesh.axis_size(name) for name in unreduced
        ]
        for mine, theirs in zip(
            layout.partition((8, 16)).all_pieces(), refined.partition((8, 16)).all_pieces(), strict=True
        ):
            assert mine.tolist() == theirs.tolist()

    @pytest.mark.parametrize(
        "axes",
        [
            ("dp", packed.gate_up("tp:(1)4")),
            ("tp:(1)4", packed.gate_up("dp")),
            ("tp:(1)1", packed.gate_up("dp:(1)2")),
            ("tp:(4)1", packed.gate_up("tp:(1)4")),
            ("tp:(1)2", packed.gate_up("tp:(2)1")),
            (("dp:(1)2", "tp:(1)4"), packed.gate_up("tp:(2)1")),
        ],
    )
    def test_sub_axes_that_are_whole_axes_or_nothing_stay_so_when_refined(self, axes: Any) -> None:
        layout = sw.TensorLayout(axes, MESH)
        mine, theirs = (each.partition((8, 16)).all_pieces() for each in (layout, layout.refined()))
        assert [array.tolist() for array in mine] == [array.tolist() for array in theirs]


@pytest.mark.parametrize("shape", [(), (0,), (7,), (2, 3), (3, 4, 5), (1, 1, 6), (4, 1, 2), (2, 0, 3)])
@pytest.mark.parametrize("most", [1, 2, 5, 6, 11, 12, 20, 1000])
def test_a_box_is_cut_in_parts_that_follow_one_another(shape: tuple[int, ...], most: int) -> None:
    elements = np.arange(math.prod(shape)).reshape(shape)
    parts = [elements[box].ravel().tolist() for box in consecutive(shape, most)]
    assert [element for part in parts for element in part] == elements.ravel().tolist()
    assert all(len(part) <= most for part in parts)


class TestPlans:
    def test_devices_that_only_the_larger_mesh_has_receive(self) -> None:
        here, there = (sw.TensorLayout((None,), sw.DeviceMesh((size,), ("x",))).partition((3,)) for size in (2, 4))
        plan = sw.plan_reshard(here, there)
        assert plan.kept["dst_device"].tolist() == [0, 1]
        assert plan.transfers["dst_device"].tolist() == [2, 3]
        assert plan.bytes_received("int16").tolist() == [0, 0, 6, 6]

    def test_as_many_bytes_may_move_as_int64_holds(self) -> None:
        for size, dtype in ((INT64_MAX, "int8"), (2**62 - 1, "int16")):
            one, other = (sw.Tiling.from_boxes((size,), [[(0, size)]]) for _ in range(2))
            assert sw.plan_reshard(one, other).bytes_sent(dtype).tolist() == [size * np.dtype(dtype).itemsize]
        one, other = (sw.Tiling.from_boxes((2**62,), [[(0, 2**62)]]) for _ in range(2))
        with refused(sw.SizeOverflowError, f"{2**62} elements of 2 bytes", INT64_MAX):
            sw.plan_reshard(one, other).bytes_sent("int16")

    def test_the_bytes_of_a_refit_are_those_of_its_tensors(self) -> None:
        one, two = (sw.DeviceMesh((size,), ("tp",)) for size in (1, 2))
        here = sw.TensorLayout((packed.qkv(4, 2, 1, "tp", order="interleaved"),), one).partition((8,))
        there = sw.TensorLayout((packed.qkv(4, 2, 1, "tp"),), two).partition((8,))
        plan = sw.plan_refit(here, there)
        # All is on the first device, and half of it goes to the second: two heads of q, one of k, one of v.
        assert plan.bytes_received("int16").tolist() == [0, 8]
        assert plan.total_bytes("int16") == 8

    @pytest.mark.parametrize(("from_packed", "to_packed"), [(True, False), (False, True), (True, True)])
    def test_a_packed_dim_of_either_side_has_no_collectives(self, from_packed: bool, to_packed: bool) -> None:
        plain = sw.TensorLayout(("tp",), MESH).partition((16,))
        fused = sw.TensorLayout((packed.gate_up("tp"),), MESH).partition((16,))
        plan = sw.plan_reshard(fused if from_packed else plain, fused if to_packed else plain)
        assert plan.obstacle is not None
        assert plan.obstacle.kind == "packed"
        assert plan.collectives("float32") is None

    def test_the_last_step_gives_the_layout_that_was_asked_for(self) -> None:
        mesh = sw.DeviceMesh((4, 1), ("x", "one"))
        src = sw.TensorLayout(("x", None), mesh).partition((8, 8))
        dst = sw.TensorLayout((None, ("x", "one")), mesh).partition((8, 8))
        steps = sw.plan_reshard(src, dst).collectives("float32")
        assert steps is not None
        assert steps[-1].layout == dst.layout

    def test_shards_of_two_dtypes_are_not_put_into_one(self) -> None:
        mesh = sw.DeviceMesh((2,), ("tp",))
        fused = sw.TensorLayout((packed.gate_up("tp"),), mesh).partition((8,))
        parts = {name: sw.TensorLayout(("tp",), mesh).partition((4,)) for name in ("gate", "up")}
        plan = sw.plan_refit(parts, fused)
        gate, up = ([np.full(2, value, np.float32)] * 2 for value in (1, 2))
        assert [array.tolist() for array in plan.run({"gate": gate, "up": up})] == [[1, 1, 2, 2]] * 2
        with refused(sw.LayoutError, "src_shards['up'] is of dtype float64", "others are of float32"):
            plan.run({"gate": gate, "up": [array.astype(np.float64) for array in up]})

    def test_a_refit_names_what_it_cannot_take(self) -> None:
        mesh = sw.DeviceMesh((2,), ("tp",))
        part = sw.TensorLayout(("tp",), mesh).partition((4,))
        for wrong in ({3: part}, {"gate": 3}):
            with pytest.raises(TypeError):
                sw.plan_refit(wrong, part)  # type: ignore[arg-type]
        longer = sw.TensorLayout(("tp",), mesh).partition((6,))
        with refused(sw.LayoutError, "gate", "(4,)", "(6,)"):
            sw.plan_refit({"gate": part}, {"gate": longer})

    def test_plans_of_models_are_equal_if_all_of_them_is(self) -> None:
        mesh = sw.DeviceMesh((2,), ("tp",))
        cut, whole = (sw.TensorLayout((axis,), mesh) for axis in ("tp", None))
        src, dst, tensors = {"a": cut, "b": whole}, {"a": whole, "b": cut}, {"a": ((4,), "f4"), "b": ((4,), "f4")}
        plan, again = sw.plan_model(src, dst, tensors), sw.plan_model(src, dst, tensors)
        assert plan == again
        assert hash(plan) == hash(again)
        others = [
            sw.plan_model(src, dst, {"a": ((4,), "f4"), "b": ((4,), "i4")}),
            sw.plan_model(src, {"a": whole, "b": whole}, tensors),
            sw.plan_model(src, dst, {"a": ((4,), "f4")}),
            # The order of the tensors decides who sends what.
            sw.plan_model(src, dst, dict(reversed(tensors.items()))),
        ]
        assert all(plan != other for other in others)


@pytest.mark.heavy
def test_rules_that_match_one_path_are_listed_in_short() -> None:
    layout_map = sw.LayoutMap(MESH)
    for i in range(200):
        layout_map[f"kernel|{i}" + "x" * 500] = ("dp",)
    with pytest.raises(sw.LayoutError, match="200 rules") as raised:
        _ = layout_map["kernel"]
    assert "'kernel|0xxx" in str(raised.value)
    assert len(str(raised.value)) < 1500
