"""TensorLayout: every line on layouts of the reliability catalogue."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import shardwise as sw
from shardwise import LayoutError, MeshError, packed
from tests.checks import linear, refused

MESH = sw.DeviceMesh((2, 4), ("dp", "tp"))


def mesh() -> sw.DeviceMesh:
    return sw.DeviceMesh((2, 3, 4), ("x", "y", "z"))


class TestAxes:
    def test_entries_are_normalised(self) -> None:
        layout = sw.TensorLayout([None, "x", ["y"], ("z",), (), []])
        assert layout.axes == (None, "x", "y", "z", None, None)
        assert layout.rank == 6

    def test_a_name_of_a_class_of_its_own_becomes_a_str(self) -> None:
        class Name(str):
            pass

        layout = sw.TensorLayout([Name("x"), (Name("y"), "z")])
        assert [type(name) for name in (layout.axes[0], *(layout.axes[1] or ()))] == [str] * 3  # type: ignore[misc]
        assert layout == sw.TensorLayout(["x", ("y", "z")])

    def test_the_order_of_a_tuple_counts(self) -> None:
        """Device (1, 0) is shard 3 of ("x", "y"), x major, and shard 1 of ("y", "x")."""
        m = sw.DeviceMesh((2, 3), ("x", "y"))
        xy, yx = sw.TensorLayout([("x", "y")], m), sw.TensorLayout([("y", "x")], m)
        assert xy != yx
        assert xy.partition((6,)).shard_ids().tolist() == [0, 1, 2, 3, 4, 5]
        assert yx.partition((6,)).shard_ids().tolist() == [0, 2, 4, 1, 3, 5]

    @pytest.mark.parametrize("axes", [("x", "x"), ("x", ("y", "x")), [("x", "x")], [("y", "x"), None, "y"]])
    @pytest.mark.parametrize("with_mesh", [False, True])
    def test_a_repeated_axis(self, axes: Any, with_mesh: bool) -> None:
        with refused(LayoutError, "axes[", "uses already", "at most one dim"):
            sw.TensorLayout(axes, mesh() if with_mesh else None)

    @pytest.mark.parametrize("with_mesh", [False, True])
    def test_an_axis_that_cuts_and_is_unreduced(self, with_mesh: bool) -> None:
        with refused(LayoutError, "unreduced", "'x'", "axes[0]"):
            sw.TensorLayout(("x",), mesh() if with_mesh else None, unreduced=("x",))
        with refused(LayoutError, "unreduced", "'x'"):
            sw.TensorLayout((None,), mesh() if with_mesh else None, unreduced=("x", "x"))

    @pytest.mark.parametrize(
        ("axes", "place"), [(("w",), "axes[0]"), ((None, ("x", "w")), "axes[1]"), (("X",), "axes[0]")]
    )
    def test_an_unknown_axis(self, axes: Any, place: str) -> None:
        layout = sw.TensorLayout(axes)
        with refused(LayoutError, place, '["x", "y", "z"]'):
            sw.TensorLayout(axes, mesh())
        with refused(LayoutError, place, '["x", "y", "z"]'):
            layout.device_mesh = mesh()
        assert layout.device_mesh is None

    def test_an_unknown_unreduced_axis(self) -> None:
        with refused(LayoutError, "unreduced", '"w"'):
            sw.TensorLayout((), mesh(), unreduced=["w"])

    def test_an_empty_name(self) -> None:
        for axes in (("",), (None, ("x", ""))):
            with refused(LayoutError, "axes[", "empty"):
                sw.TensorLayout(axes)

    @pytest.mark.parametrize("axes", ["x", b"x", None, 5, {"x"}, iter(["x"])])
    def test_axes_of_a_wrong_type(self, axes: Any) -> None:
        with refused(TypeError, "axes", "sequence"):
            sw.TensorLayout(axes)

    @pytest.mark.parametrize("entry", [0, True, 1.5, b"x", {"x"}, ("x", None), ("x", 0), (("x",),)])
    def test_an_entry_of_a_wrong_type(self, entry: Any) -> None:
        with refused(TypeError, "axes[1]", repr(entry)):
            sw.TensorLayout((None, entry))

    @pytest.mark.parametrize("unreduced", ["x", 5, None, (1,), (None,)])
    def test_unreduced_of_a_wrong_type(self, unreduced: Any) -> None:
        with refused(TypeError, "unreduced", repr(unreduced)):
            sw.TensorLayout((None,), unreduced=unreduced)

    def test_rank_0(self) -> None:
        layout = sw.TensorLayout((), mesh())
        assert layout.num_shards == ()
        assert layout.is_fully_replicated
        assert layout.partition(()).size == 1

    @pytest.mark.heavy
    def test_many_axes_take_time_in_proportion(self) -> None:
        names = [f"a{i}" for i in range(200_000)]  # Each sought among all of them would take an hour.
        with linear():
            large = sw.DeviceMesh((1,) * len(names), names)
            assert sw.TensorLayout(names, large).rank == len(names)

    def test_inputs_are_not_changed_or_kept(self) -> None:
        axes: list[Any] = [["x", "y"], None]
        unreduced = ["z"]
        layout = sw.TensorLayout(axes, mesh(), unreduced=unreduced)
        axes[0].append("q")
        unreduced.append("q")
        assert (layout.axes, layout.unreduced) == ((("x", "y"), None), ("z",))


class TestMesh:
    def test_the_mesh_comes_once(self) -> None:
        layout = sw.TensorLayout(("x",))
        layout.device_mesh = mesh()
        layout.device_mesh = mesh()  # An equal one changes nothing.
        with refused(LayoutError, "device_mesh", "set already", repr(mesh())):
            layout.device_mesh = sw.DeviceMesh((2,), ("x",))
        assert layout.device_mesh == mesh()

    @pytest.mark.parametrize("given", [5, "x", (2, 3), object()])
    def test_a_mesh_of_a_wrong_type(self, given: Any) -> None:
        with refused(TypeError, "device_mesh", type(given).__name__):
            sw.TensorLayout(("x",), given)

    @pytest.mark.parametrize("what", ["num_shards", "replicated_axes", "is_fully_replicated"])
    def test_what_needs_a_mesh(self, what: str) -> None:
        with refused(LayoutError, what, "device_mesh", "TensorLayout(('x',))"):
            getattr(sw.TensorLayout(("x",)), what)

    def test_a_partition_needs_a_mesh(self) -> None:
        with refused(LayoutError, "partition", "device_mesh"):
            sw.TensorLayout(("x",)).partition((4,))

    def test_axes_that_cut_nothing_replicate_unless_unreduced(self) -> None:
        layout = sw.TensorLayout(("y",), mesh(), unreduced=("z",))
        assert layout.replicated_axes == ("x",)
        assert not layout.is_fully_replicated
        partition = layout.partition((3,))
        assert partition.replicas == 8
        assert partition.devices_holding(1) == [f"cpu:{i}" for i in (4, 5, 6, 7, 16, 17, 18, 19)]

    def test_an_axis_of_size_1_does_not_count(self) -> None:
        one = sw.DeviceMesh((1, 4), ("one", "four"))
        assert sw.TensorLayout(("one",), one, unreduced=()).is_fully_replicated
        assert not sw.TensorLayout(("four",), one).is_fully_replicated

    def test_a_mesh_that_comes_later_leaves_unreduced_axes(self) -> None:
        bound = sw.TensorLayout((None,), unreduced=("tp",)).with_mesh(MESH)
        assert bound == sw.TensorLayout((None,), MESH, unreduced=("tp",))

    @pytest.mark.parametrize(("size", "whole"), [(1, True), (2, False)])
    def test_an_unreduced_axis_of_one_device_is_a_whole(self, size: int, whole: bool) -> None:
        mesh = sw.DeviceMesh((size,), ("x",))
        assert sw.TensorLayout((None,), mesh, unreduced=("x",)).is_fully_replicated is whole
        assert sw.TensorLayout((None,), mesh).is_fully_replicated


class TestValue:
    def test_immutable(self) -> None:
        layout = sw.TensorLayout(("x",), mesh())
        for name in ("axes", "unreduced", "rank", "num_shards", "other"):
            with pytest.raises(AttributeError):
                setattr(layout, name, ())

    def test_the_hash_does_not_change_when_the_mesh_comes(self) -> None:
        layout = sw.TensorLayout(("x",))
        found = {layout: 1}
        layout.device_mesh = mesh()
        assert found[layout] == 1

    def test_unreduced_is_a_set(self) -> None:
        for order in itertools.permutations(("y", "z")):
            layout = sw.TensorLayout(("x",), mesh(), unreduced=order)
            assert layout == sw.TensorLayout(("x",), mesh(), unreduced=("y", "z"))
            assert hash(layout) == hash(sw.TensorLayout(("x",), unreduced=("y", "z")))

    def test_layouts_of_different_meshes_differ(self) -> None:
        assert sw.TensorLayout(("x",), mesh()) != sw.TensorLayout(("x",))
        assert sw.TensorLayout(("x",), mesh()) != sw.TensorLayout(("x",), sw.DeviceMesh((2,), ("x",)))
        assert sw.TensorLayout(("x",)) != ("x",)


class TestShorthands:
    def test_they_are_the_partition_s(self) -> None:
        layout = sw.TensorLayout((("z", "x"), None), mesh())
        partition = layout.partition((16, 3))
        assert layout.box("cpu:5", (16, 3)) == partition.box("cpu:5")
        assert layout.shard_shape("cpu:5", (16, 3)) == (2, 3) == partition.shard_shape("cpu:5")
        assert layout.devices_indices_map((16, 3)) == partition.devices_indices_map()
        assert (layout.boxes((16, 3)) == partition.boxes()).all()

    def test_they_take_the_uneven_rule(self) -> None:
        layout = sw.TensorLayout(("y",), mesh())
        assert layout.box("cpu:23", (4,), "balanced") == (slice(3, 4),)
        assert layout.box("cpu:23", (4,), "ceil") == (slice(4, 4),)
        assert layout.shard_shape("cpu:23", (4,), "ceil") == (0,)
        assert layout.devices_indices_map((4,), "ceil")["cpu:4"] == (slice(2, 4),)

    def test_a_shape_in_the_place_of_a_device(self) -> None:
        with refused(MeshError, "device (6,)"):
            sw.TensorLayout(("y",), mesh()).shard_shape((6,), (6,))
        with refused(LayoutError, "dim 0", "4 elements", "3 shards"):
            sw.TensorLayout(("y",), mesh()).shard_shape("cpu:0", (4,))


class TestRefined:
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
