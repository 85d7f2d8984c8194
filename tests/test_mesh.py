"""DeviceMesh and list_devices: every line on meshes of the reliability catalogue, and hand-computed answers."""

from __future__ import annotations

import itertools
import pickle
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest

import shardwise as sw
from shardwise import MeshError, SizeOverflowError
from tests.checks import INT64_MAX, linear, peak_of, refused


def small() -> sw.DeviceMesh:
    return sw.DeviceMesh((3, 2), ("x", "y"))


class TestArithmetic:
    def test_the_tensorflow_example(self) -> None:
        """The table in the documentation of `tf.experimental.dtensor.Mesh.unravel_index`."""
        assert small().coordinates().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1]]

    def test_strides_are_products_of_the_sizes_after(self) -> None:
        assert sw.DeviceMesh((2, 3, 5, 7), ["a", "b", "c", "d"]).strides == (105, 35, 7, 1)

    def test_coordinates_are_what_numpy_unravels(self) -> None:
        mesh = sw.DeviceMesh((5, 1, 7, 4), ["a", "b", "c", "d"])
        expected = np.stack(np.unravel_index(np.arange(mesh.size), mesh.shape), 1)
        coordinates = mesh.coordinates()
        assert coordinates.dtype == np.int64
        assert coordinates.flags.c_contiguous
        assert coordinates.tolist() == expected.tolist()

    def test_many_default_labels(self) -> None:
        mesh = sw.DeviceMesh((1 << 16, 2), ("x", "y"))
        assert mesh.devices[-1].tolist() == ["cpu:131070", "cpu:131071"]
        assert mesh.device(131_071) == "cpu:131071"
        assert mesh.index_of_label("cpu:131071") == 131_071

    def test_a_mesh_of_a_million_devices_costs_no_more_than_one_of_eight(self) -> None:
        def work() -> None:
            mesh = sw.DeviceMesh((1 << 10, 1 << 10), ("x", "y"))
            partition = sw.TensorLayout(("x", "y"), mesh).partition((1 << 12, 1 << 11))
            assert partition.box("cpu:1048575") == (slice(4092, 4096), slice(2046, 2048))
            assert mesh.device(mesh.size - 1) == "cpu:1048575"

        work()  # What is imported or made once is not measured.
        assert peak_of(work) < 100_000

    def test_the_largest_mesh_there_can_be(self) -> None:
        mesh = sw.DeviceMesh((INT64_MAX,), ("x",))
        assert mesh.coordinate(INT64_MAX - 1) == (INT64_MAX - 1,)
        assert mesh.index_of_label(f"cpu:{INT64_MAX - 1}") == INT64_MAX - 1
        assert mesh == eval(repr(mesh), {"DeviceMesh": sw.DeviceMesh})


class TestDevices:
    def test_default_labels(self) -> None:
        assert small().devices.tolist() == [["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"], ["cpu:4", "cpu:5"]]
        assert sw.DeviceMesh((2,), ("x",), ["cpu:0", "cpu:1"]) == sw.DeviceMesh((2,), ("x",))

    @pytest.mark.parametrize(
        "devices",
        [
            ["d", "c", "b", "a"],
            [["d", "c"], ["b", "a"]],
            np.array([["d", "c"], ["b", "a"]]),
            np.array([["d", "c"], ["b", "a"]], dtype=object),
            "dcba",
            ("d", "c", "b", "a"),
        ],
    )
    def test_labels_in_any_order_and_nesting(self, devices: Any) -> None:
        mesh = sw.DeviceMesh((2, 2), ("x", "y"), devices)
        assert mesh.devices.tolist() == [["d", "c"], ["b", "a"]]
        assert [mesh.index_of_label(label) for label in "abcd"] == [3, 2, 1, 0]

    def test_labels_may_be_tuples_integers_or_any_hashable(self) -> None:
        labels = [(0, 1), 7, None, frozenset({3})]
        mesh = sw.DeviceMesh((4,), ("x",), labels)
        assert list(mesh.devices) == labels
        assert [mesh.index_of_label(label) for label in labels] == [0, 1, 2, 3]

    def test_a_returned_mesh_array_is_read_only(self) -> None:
        for mesh in (small(), sw.DeviceMesh((2,), ("x",), "ab")):
            with pytest.raises(ValueError, match="read-only"):
                mesh.devices[0] = "other"
            with pytest.raises(ValueError, match="cannot set WRITEABLE"):
                mesh.devices.flags.writeable = True

    @pytest.mark.parametrize("devices", [[], ["a"], ["a"] * 7, range(7), np.arange(8)])
    def test_shape_and_device_count_differ(self, devices: Any) -> None:
        with refused(MeshError, "devices", f"has {len(devices)} entr", "(3, 2)", "6 positions"):
            sw.DeviceMesh((3, 2), ("x", "y"), devices)

    def test_duplicate_device(self) -> None:
        with refused(MeshError, "devices[3]", "'b'", "devices[1]"):
            sw.DeviceMesh((4,), ("x",), ["a", "b", "c", "b"])

    def test_labels_that_are_equal_are_duplicates(self) -> None:
        with refused(MeshError, "devices[0]", "devices[1]"):
            sw.DeviceMesh((2,), ("x",), [1, True])

    @pytest.mark.parametrize("devices", [5, 1.5, object(), b"ab", np.ma.array([1, 2], mask=[False, True])])
    def test_devices_of_a_wrong_type(self, devices: Any) -> None:
        with refused(TypeError, "devices", type(devices).__name__):
            sw.DeviceMesh((2,), ("x",), devices)

    def test_a_set_has_no_order(self) -> None:
        with refused(TypeError, "devices", "set", "no order"):
            sw.DeviceMesh((2,), ("x",), {"a", "b"})  # type: ignore[arg-type]

    def test_unhashable_label(self) -> None:
        with refused(TypeError, "devices", "hashable"):
            sw.DeviceMesh((2,), ("x",), [{}, {}])

    @pytest.mark.parametrize(
        "label", ["cpu:6", "cpu:-1", "cpu:00", "cpu:", "cpu:1 ", "cpu:²", "gpu:0", -1, 6, False, 0.0, None, ("cpu", 0)]
    )
    def test_a_device_that_the_mesh_has_not(self, label: Any) -> None:
        with refused(MeshError, "device", repr(label), "'cpu:0'", "'cpu:5'"):
            small().index_of_label(label)

    @pytest.mark.parametrize("devices", [None, "ab"])
    def test_an_unhashable_device(self, devices: str | None) -> None:
        with refused(TypeError, "device", "list"):
            sw.DeviceMesh((2,), ("x",), devices).index_of_label([])  # type: ignore[arg-type]

    def test_a_position_is_taken_only_where_the_labels_are_the_default_ones(self) -> None:
        assert [small().index_of_label(i) for i in (0, 5, np.int64(3), np.uint8(2))] == [0, 5, 3, 2]
        assert sw.DeviceMesh((2,), ("x",), [1, 0]).index_of_label(0) == 1  # A label, not a position.
        mesh = sw.DeviceMesh((2,), ("x",), ["gpu:1", "gpu:0"])
        with refused(MeshError, "device 1", "'gpu:1', 'gpu:0'", "mesh.device(1)"):
            mesh.index_of_label(1)
        with refused(MeshError, "device (0, 1)", "device_index takes a coordinate"):
            small().index_of_label((0, 1))

    def test_labels_that_memory_cannot_hold(self) -> None:
        mesh = sw.DeviceMesh((1 << 60,), ("x",))
        with linear(), pytest.raises(MemoryError, match=f"labels of {1 << 60} devices"):
            _ = mesh.devices


class TestConstruction:
    @pytest.mark.parametrize("names", [(), "", ("x",), ("x", "y", "z")])
    def test_names_and_rank_differ(self, names: Any) -> None:
        with refused(MeshError, "shape", "2", "axis_names", len(names)):
            sw.DeviceMesh((3, 2), names)

    def test_no_axes(self) -> None:
        with refused(MeshError, "axis_names", "at least one"):
            sw.DeviceMesh((), ())

    def test_duplicate_axis_name(self) -> None:
        with refused(MeshError, "axis_names[2]", '"x"', "axis_names[0]"):
            sw.DeviceMesh((2, 2, 2), ("x", "y", "x"))

    def test_empty_axis_name(self) -> None:
        with refused(MeshError, "axis_names[1]", "empty"):
            sw.DeviceMesh((2, 2), ("x", ""))

    @pytest.mark.parametrize("size", [0, -1, -(2**63), np.int8(-3)])
    def test_negative_or_zero_size(self, size: Any) -> None:
        with refused(MeshError, "shape[1]", '"y"', int(size), "at least 1"):
            sw.DeviceMesh((3, size), ("x", "y"))

    def test_two_negative_sizes_with_a_positive_product(self) -> None:
        with refused(MeshError, "shape[0]", "-2", "at least 1"):
            sw.DeviceMesh((-2, -3), ("x", "y"))

    @pytest.mark.parametrize(
        "size", [True, False, 2.0, float("nan"), "2", b"2", None, np.bool_(True), np.float64(2), [2]]
    )
    def test_a_size_of_a_wrong_type(self, size: Any) -> None:
        with refused(TypeError, "shape[1]", "integer", repr(size)):
            sw.DeviceMesh((3, size), ("x", "y"))

    @pytest.mark.parametrize("shape", [6, "32", b"32", None, {3, 2}, {3: 0, 2: 1}, iter((3, 2))])
    def test_a_shape_of_a_wrong_type(self, shape: Any) -> None:
        with refused(TypeError, "shape", "sequence of integers"):
            sw.DeviceMesh(shape, ("x", "y"))

    @pytest.mark.parametrize("names", ["xy", b"xy", 5, None, {"x", "y"}])
    def test_names_of_a_wrong_type(self, names: Any) -> None:
        with refused(TypeError, "axis_names", "sequence of strings"):
            sw.DeviceMesh((3, 2), names)

    @pytest.mark.parametrize("name", [1, b"y", None, ("y",)])
    def test_a_name_of_a_wrong_type(self, name: Any) -> None:
        with refused(TypeError, "axis_names[1]", "string", repr(name)):
            sw.DeviceMesh((3, 2), ("x", name))

    @pytest.mark.parametrize("kind", ["int8", "uint8", "int32", "uint32", "int64", "uint64", ">i4"])
    def test_numpy_integers_will_do(self, kind: str) -> None:
        shape = np.array([3, 2], dtype=kind)
        sources: list[Any] = [shape, list(shape), tuple(shape)]
        for given in sources:
            mesh = sw.DeviceMesh(given, ("x", "y"))
            assert mesh == small()
            assert all(type(n) is int for n in mesh.shape)

    @pytest.mark.parametrize("size", [2**63, 2**64, 2**64 + 2, 10**40, np.uint64(2**63)])
    def test_a_size_over_the_limit(self, size: Any) -> None:
        with refused(SizeOverflowError, "shape[1]", int(size), "64-bit"):
            sw.DeviceMesh((3, size), ("x", "y"))

    @pytest.mark.parametrize(
        "shape",
        [
            (2**32, 2**31),
            (2**63 - 1, 2),
            (2**21 + 1, 2**21, 2**21),
            # Products that wrap round to a valid count: to 4, to 0 and to 1 in 64 bits.
            (2**33 + 2, 2**31 + 2),
            (2**32, 2**32),
            (274177, 67280421310721),
        ],
    )
    def test_a_product_over_the_limit_also_where_it_wraps_to_a_valid_count(self, shape: Any) -> None:
        for order in itertools.permutations(shape):
            with refused(SizeOverflowError, "shape", str(order[0]), INT64_MAX):
                sw.DeviceMesh(order, [f"a{i}" for i in range(len(shape))])

    def test_what_an_index_raises_comes_out_unchanged(self) -> None:
        class Failing:
            def __index__(self) -> int:
                raise KeyError("mine")

        with refused(KeyError, "mine"):
            sw.DeviceMesh((Failing(),), ("x",))  # type: ignore[arg-type]

    def test_inputs_are_not_changed_or_kept(self) -> None:
        shape, names, devices = [2, 2], ["x", "y"], ["a", "b", "c", "d"]
        mesh = sw.DeviceMesh(shape, names, devices)
        assert (shape, names, devices) == ([2, 2], ["x", "y"], ["a", "b", "c", "d"])
        shape[0], names[0], devices[0] = 9, "z", "q"
        assert (mesh.shape, mesh.axis_names, mesh.device(0)) == ((2, 2), ("x", "y"), "a")

    def test_a_mesh_is_immutable(self) -> None:
        for name in ("shape", "axis_names", "devices", "size", "strides", "other"):
            with pytest.raises(AttributeError):
                setattr(small(), name, 1)

    def test_many_axes(self) -> None:
        mesh = sw.DeviceMesh((1,) * 5000, [f"a{i}" for i in range(5000)])
        assert mesh.size == 1
        assert pickle.loads(pickle.dumps(mesh)) == mesh


class TestPositions:
    calls: ClassVar[list[Callable[[Any], object]]] = [
        lambda i: small().coordinate(i),
        lambda i: small().device(i),
    ]

    @pytest.mark.parametrize("call", calls)
    @pytest.mark.parametrize("index", [-1, 6, INT64_MAX, -(2**63), 2**63, 2**64 + 1, -(2**80)])
    def test_no_such_device_index(self, call: Callable[[Any], object], index: int) -> None:
        with refused(IndexError, "index", index):
            call(index)

    @pytest.mark.parametrize("call", calls)
    @pytest.mark.parametrize("index", [True, 1.0, "1", None, np.float32(1), [1], np.array([1])])
    def test_an_index_of_a_wrong_type(self, call: Callable[[Any], object], index: Any) -> None:
        with refused(TypeError, "index", "integer"):
            call(index)

    @pytest.mark.parametrize(
        "coordinate", [(3, 0), (-1, 0), (0, 2), (0, -1), (0, INT64_MAX), (0, 2**63), (0, -(2**70))]
    )
    def test_no_such_coordinate(self, coordinate: Any) -> None:
        bad = 0 if coordinate[0] else 1
        with refused(IndexError, f"coordinate[{bad}]", coordinate[bad]):
            small().device_index(coordinate)

    @pytest.mark.parametrize("coordinate", [(), (0,), (0, 0, 0)])
    def test_a_coordinate_of_another_rank(self, coordinate: Any) -> None:
        with refused(MeshError, "coordinate", len(coordinate), "2 axes"):
            small().device_index(coordinate)

    @pytest.mark.parametrize("coordinate", [5, "00", (0, 1.0), (0, True), None])
    def test_a_coordinate_of_a_wrong_type(self, coordinate: Any) -> None:
        with refused(TypeError, "coordinate", "integer"):
            small().device_index(coordinate)

    @pytest.mark.parametrize("name", ["z", "", 0, None, ["x"]])
    def test_no_such_axis(self, name: Any) -> None:
        with refused(MeshError, "axis_name", repr(name), "('x', 'y')"):
            small().axis_size(name)

    def test_coordinates_that_memory_cannot_hold(self) -> None:
        with pytest.raises((MemoryError, SizeOverflowError)):
            sw.DeviceMesh((1 << 60,), ("x",)).coordinates()


class TestListDevices:
    def test_one_per_core(self) -> None:
        devices = sw.list_devices()
        assert devices == [f"cpu:{i}" for i in range(len(devices))]
        assert devices
        if sys.platform == "linux":
            import os

            assert len(devices) == len(os.sched_getaffinity(0))

    @pytest.mark.parametrize("device_type", ["cpu", "CPU", None])
    def test_types_that_there_are(self, device_type: Any) -> None:
        assert sw.list_devices(device_type) == sw.list_devices()

    def test_other_types(self) -> None:
        with refused(MeshError, "device_type", "'gpu'", "'cpu'"):
            sw.list_devices("gpu")
        with refused(TypeError, "device_type", "5"):
            sw.list_devices(5)  # type: ignore[arg-type]


def _is_possible(dims: int) -> bool:
    try:
        np.empty((1,) * dims)
    except ValueError:
        return False
    return True


class TestLabels:
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
