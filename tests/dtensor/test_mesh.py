"""The mesh of the DTensor dialect: what TensorFlow's tests ask of it, and what it refuses."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from shardwise import DeviceMesh, MeshError, ParseError, SizeOverflowError
from shardwise.dtensor import DeviceSpec, Mesh, MeshDimension
from tests.dtensor.strategies import meshes

TPUS = [f"/job:localhost/replica:0/task:0/device:TPU:{index}" for index in range(8)]
CPUS = [f"/job:localhost/replica:0/task:0/device:CPU:{index}" for index in range(8)]
TEXT = "|batch=2,x=2|0,1,2,3|0,1,2,3|" + ",".join(TPUS[:4])


def make(shape: tuple[int, ...], devices: list[str], names: str = "abcd", **more: Any) -> Mesh:
    ids = np.arange(math.prod(shape))
    return Mesh(list(names[: len(shape)]), ids.reshape(shape), ids.tolist(), devices[: ids.size], **more)


@pytest.fixture
def mesh() -> Mesh:
    return Mesh.from_string(TEXT)


class NamedDevice:
    """A device that is not a string, like TensorFlow's `DeviceSpec`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def to_string(self) -> str:
        return self._name


def test_queries(mesh: Mesh) -> None:
    assert mesh.dim_names == ["batch", "x"]
    assert (mesh.name, mesh.size, mesh.shape(), mesh.strides) == ("", 4, [2, 2], [2, 1])
    assert mesh.device_type() == "TPU"
    assert mesh.num_local_devices() == 4
    assert mesh.min_global_device_id() == 0
    assert not mesh.is_remote()
    assert not mesh.is_single_device()
    assert mesh.single_device == ""
    assert not mesh.use_xla_spmd()
    assert mesh.local_device_ids() == [0, 1, 2, 3]
    assert mesh.local_devices() == TPUS[:4]
    assert mesh.global_devices() == []
    assert mesh.contains_dim("batch")
    assert "x" in mesh
    assert "y" not in mesh
    assert mesh["x"] == MeshDimension("x", 2) == ("x", 2)
    assert mesh.dim_size("batch") == 2


@pytest.mark.parametrize(
    ("text", "is_remote"), [("|x=1|0|||CPU:0", True), ("|x=1|0|0|CPU:0", False), ("|x=2|0,1|||CPU:0,CPU:1", True)]
)
def test_a_mesh_without_a_device_of_this_client_is_remote(text: str, is_remote: bool) -> None:
    assert Mesh.from_string(text).is_remote() == is_remote


def test_the_constructor_takes_strings_and_objects_with_to_string() -> None:
    devices: list[Any] = [NamedDevice(TPUS[0]), DeviceSpec.from_string(TPUS[1]), TPUS[2], np.str_(TPUS[3])]
    ids = np.arange(4).reshape(2, 2)
    expected = Mesh.from_string(TEXT)
    assert Mesh(["batch", "x"], ids, [0, 1, 2, 3], devices) == expected
    assert Mesh(("batch", "x"), ids.tolist(), np.arange(4), tuple(devices)) == expected
    assert Mesh(["batch", "x"], ids.astype(np.uint8), [np.int64(i) for i in range(4)], np.array(TPUS[:4])) == expected


def test_ids_may_begin_anywhere_and_keys_are_ids() -> None:
    mesh = Mesh(["x", "y"], np.arange(5, 9).reshape(2, 2), [8, 5], ["CPU:3", "CPU:0"])
    assert mesh.min_global_device_id() == 5
    assert list(mesh.unravel_index()) == [5, 6, 7, 8]
    assert mesh.local_device_locations() == [{"x": 1, "y": 1}, {"x": 0, "y": 0}]


@pytest.mark.parametrize(("shape", "strides"), [((8,), [1]), ((2, 4, 2), [8, 2, 1]), ((8, 16, 2, 4), [128, 8, 4, 1])])
def test_strides(shape: tuple[int, ...], strides: list[int]) -> None:
    devices = [f"CPU:{index}" for index in range(math.prod(shape))]
    assert make(shape, devices).strides == strides


def test_coords_go_round() -> None:
    mesh = make((2, 4, 2), [f"CPU:{index}" for index in range(16)])
    once = list(itertools.product(range(2), range(4), range(2)))
    for index, expected in enumerate(once * 3):
        assert mesh.coords(index).tolist() == list(expected)
    assert mesh.coords(-1).tolist() == [1, 3, 1]
    assert mesh.coords(np.arange(48).reshape(3, 16)).tolist() == [[list(c) for c in once]] * 3
    assert mesh.coords(np.int32(3)).tolist() == [0, 1, 1]
    for wrong in (1.5, "1", True, np.array([1.5])):
        with pytest.raises(TypeError):
            mesh.coords(wrong)  # type: ignore[arg-type]
    with pytest.raises(IndexError):
        mesh.coords(2**70)


@settings(deadline=None)
@given(meshes())
def test_locations_agree_in_every_form(mesh: Mesh) -> None:
    coordinates = mesh.coordinates()
    assert coordinates.shape == (mesh.size, len(mesh.dim_names))
    by_id = mesh.unravel_index()
    assert [list(location.values()) for location in by_id.values()] == coordinates.tolist()
    assert all(list(location) == mesh.dim_names for location in by_id.values())
    assert list(by_id) == mesh.global_device_ids().ravel().tolist()
    assert mesh.local_device_locations() == [by_id[number] for number in mesh.local_device_ids()]
    assert [mesh.device_location(index) for index in range(mesh.size)] == coordinates.tolist()
    if mesh.size:
        assert np.array_equal(mesh.coords(np.arange(mesh.size)), coordinates)
        assert np.array_equal(np.ravel_multi_index(tuple(coordinates.T), mesh.shape()), np.arange(mesh.size))


def test_each_location_is_a_dict_of_its_own(mesh: Mesh) -> None:
    locations = mesh.unravel_index()
    locations[0]["x"] = 9
    assert locations[1] == {"batch": 0, "x": 1}
    assert mesh.unravel_index()[0] == {"batch": 0, "x": 0}


def test_returned_ids_are_read_only(mesh: Mesh) -> None:
    with pytest.raises(ValueError, match="read-only"):
        mesh.global_device_ids()[0] = 1
    with pytest.raises(AttributeError):
        mesh.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("index", [-1, 4, 2**70])
def test_a_location_outside_is_an_index_error(mesh: Mesh, index: int) -> None:
    with pytest.raises(IndexError, match="device"):
        mesh.device_location(index)


def test_an_unknown_axis(mesh: Mesh) -> None:
    with pytest.raises(MeshError, match=r"dim_name is 'q'.*\['batch', 'x'\]"):
        mesh.dim_size("q")
    with pytest.raises(MeshError):
        mesh["q"]
    with pytest.raises(TypeError):
        1 in mesh  # type: ignore[arg-type]  # noqa: B015


def test_use_xla_spmd() -> None:
    for flag in (True, False):
        mesh = make((2, 4), TPUS, use_xla_spmd=flag)
        assert mesh.use_xla_spmd() is flag
        assert mesh.as_proto().use_xla_spmd is flag
        assert Mesh.from_string(mesh.to_string()).use_xla_spmd() is flag
    with pytest.raises(MeshError, match="XLA SPMD is not supported for a CPU"):
        make((2, 4), CPUS, use_xla_spmd=True)


def test_host_mesh() -> None:
    gpus = [device.replace("TPU", "GPU") for device in TPUS]
    mesh = make((4, 2), gpus, mesh_name="not kept", global_devices=gpus)
    assert mesh.host_mesh() == make((4, 2), CPUS)
    assert mesh.host_mesh().host_mesh() == make((4, 2), CPUS)
    local = make((2,), ["GPU:3", "/gpu:4"])
    assert local.host_mesh().local_devices() == ["/device:CPU:3", "/device:CPU:4"]
    far = Mesh(["x"], np.arange(2), [], [], global_devices=TPUS[:2])
    assert far.host_mesh().global_devices() == CPUS[:2]
    assert Mesh.from_device(TPUS[1]).host_mesh() == Mesh.from_device(CPUS[1])
    assert Mesh.from_string("empty_mesh").host_mesh() == Mesh.from_string("empty_mesh")


def test_single_device() -> None:
    mesh = Mesh.from_device("job:localhost/replica:0/task:0/TPU:0")
    assert mesh.is_single_device()
    assert mesh.single_device == "job:localhost/replica:0/task:0/TPU:0"
    assert (mesh.size, mesh.shape(), mesh.dim_names, mesh.device_type()) == (0, [], [], "TPU")
    assert Mesh.from_string(mesh.to_string()) == mesh
    assert Mesh.from_proto(mesh.as_proto()) == mesh
    for wrong in ("", "garbage", "/job:a"):
        with pytest.raises(MeshError):
            Mesh.from_device(wrong)


def test_a_mesh_without_axes_has_no_positions() -> None:
    for mesh in (Mesh.from_string("empty_mesh"), Mesh.from_device("CPU:0")):
        assert mesh.unravel_index() == {}
        assert mesh.local_device_locations() == []
        assert mesh.global_device_ids().tolist() == []
        assert mesh.strides == []
        assert not mesh.is_remote()
        for refused in (mesh.min_global_device_id, mesh.to_device_mesh):
            with pytest.raises(MeshError):
                refused()
        with pytest.raises(IndexError):
            mesh.device_location(0)


def test_equality_hash_repr_and_pickle(mesh: Mesh) -> None:
    same = Mesh.from_string(TEXT)
    assert mesh == same
    assert hash(mesh) == hash(same)
    assert mesh != Mesh.from_string("n" + TEXT)
    assert mesh != TEXT
    assert "batch=2,x=2" in repr(mesh)
    assert TPUS[3] in repr(mesh)


@settings(deadline=None)
@given(meshes())
def test_a_mesh_comes_back_from_everything(mesh: Mesh) -> None:
    assert Mesh.from_string(mesh.to_string()) == mesh
    assert Mesh.from_proto(mesh.as_proto()) == mesh
    assert pickle.loads(pickle.dumps(mesh)) == mesh
    assert copy.copy(mesh) == copy.deepcopy(mesh) == mesh
    assert eval(repr(mesh)) == mesh
    assert hash(eval(repr(mesh))) == hash(mesh)


def test_one_host_cpu_may_stand_everywhere() -> None:
    mesh = make((2, 2), ["/job:a/task:0/device:CPU:0"] * 4)
    assert Mesh.from_string(mesh.to_string()) == mesh
    assert mesh.to_device_mesh().devices.ravel().tolist() == [f"/device:CPU:{index}" for index in range(4)]


def test_to_and_from_device_mesh(mesh: Mesh) -> None:
    device_mesh = mesh.to_device_mesh()
    assert device_mesh == DeviceMesh((2, 2), ("batch", "x"), TPUS[:4])
    assert Mesh.from_device_mesh(device_mesh) == mesh
    plain = DeviceMesh((2, 3), ("x", "y"))
    assert Mesh.from_device_mesh(plain, "named").name == "named"
    assert Mesh.from_device_mesh(plain).to_device_mesh() == plain
    part = Mesh(["x"], np.arange(2, 6), [4, 5], TPUS[4:6])
    assert part.to_device_mesh().devices.tolist() == [f"/device:TPU:{index}" for index in range(2, 6)]
    turned = Mesh(["x"], np.arange(2), [1, 0], ["CPU:1", "CPU:0"])
    assert turned.to_device_mesh().devices.tolist() == ["CPU:0", "CPU:1"]
    with pytest.raises(MeshError):
        Mesh.from_device_mesh(DeviceMesh((2,), ("x",), ["left", "right"]))


IDS = np.arange(4).reshape(2, 2)
LOCAL = [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("names", "ids", "local", "devices", "more", "error", "match"),
    [
        (["x"], IDS, LOCAL, CPUS[:4], {}, MeshError, "dim"),
        (["x", "x"], IDS, LOCAL, CPUS[:4], {}, MeshError, "'x'|\"x\""),
        (["", "x"], IDS, LOCAL, CPUS[:4], {}, MeshError, "empty"),
        *(([name, "x"], IDS, LOCAL, CPUS[:4], {}, MeshError, "reserved") for name in ("unsharded", "any", "match")),
        *(([f"a{c}b", "x"], IDS, LOCAL, CPUS[:4], {}, MeshError, r"dim_names\[0\]") for c in "|,=:\0"),
        *((["x", "y"], IDS, LOCAL, CPUS[:4], {"mesh_name": f"a{c}"}, MeshError, "mesh_name") for c in "|,=:\0"),
        ([], np.array(0), [0], CPUS[:1], {}, MeshError, "axis"),
        (["x"], np.arange(0), [], CPUS[:1], {}, MeshError, "at least 1"),
        (["x", "y"], IDS[::-1], LOCAL, CPUS[:4], {}, MeshError, "global_device_ids must sequentially increase"),
        (["x", "y"], IDS * 2, LOCAL, CPUS[:4], {}, MeshError, "position 1 has 2, expected 1"),
        (["x", "y"], IDS - 2, [-2, -1, 0, 1], CPUS[:4], {}, MeshError, "negative"),
        (["x", "y"], IDS, [0, 1, 2, 7], CPUS[:4], {}, MeshError, r"local_device_ids\[3\] is 7"),
        (["x", "y"], IDS, [0, 1, 1, 0], CPUS[:4], {}, MeshError, "more than once"),
        (["x", "y"], IDS, [0, 1], CPUS[:4], {}, MeshError, "2 ids but local_devices has 4"),
        (["x", "y"], IDS, [], [], {}, MeshError, "are both empty; a mesh needs at least one device"),
        (["x", "y"], IDS, LOCAL, [*CPUS[:3], TPUS[3]], {}, MeshError, "Devices containing multiple device_types"),
        (["x", "y"], IDS, LOCAL, CPUS[:4], {"global_devices": TPUS[:4]}, MeshError, "multiple device_types"),
        (["x", "y"], IDS, LOCAL, CPUS[:4], {"global_devices": CPUS[:3]}, MeshError, "global_devices has 3"),
        (["x", "y"], IDS, LOCAL, [*TPUS[:3], TPUS[0]], {}, MeshError, "Duplicate devices found"),
        (["x", "y"], IDS, LOCAL, ["TPU:0", "TPU:1", "TPU:2", "/device:TPU:1"], {}, MeshError, r"\[1\] and .*\[3\]"),
        (["x", "y"], IDS, LOCAL, ["CPU:0", "CPU:0", "CPU:1", "CPU:1"], {}, MeshError, "Duplicate devices found"),
        (
            ["x", "y"],
            IDS,
            LOCAL,
            [*CPUS[:3], "foo"],
            {},
            MeshError,
            r"local_devices\[3\] is .foo., which is not a device",
        ),
        (["x", "y"], IDS, LOCAL, [*CPUS[:3], "/job:a"], {}, MeshError, "device_type is required"),
        (["x", "y"], IDS, LOCAL, [*CPUS[:3], "CPU:1,CPU:2"], {}, MeshError, "not a device name"),
        (["x", "y"], [[0, 1], [2]], LOCAL, CPUS[:4], {}, TypeError, "global_device_ids"),
        ([f"a{i}" for i in range(65)], IDS, LOCAL, CPUS[:4], {}, MeshError, "at most 64"),
        (
            ["x"],
            np.array([2**63 - 1], np.uint64) + 1,
            [0],
            CPUS[:1],
            {},
            SizeOverflowError,
            "2\\*\\*63|9223372036854775807",
        ),
        (["x"], [2**70], [0], CPUS[:1], {}, SizeOverflowError, "64-bit|2\\*\\*63"),
        (["x"], [0], [2**63], CPUS[:1], {}, SizeOverflowError, "local_device_ids"),
        (["x"], [2**63 - 1], [2**63 - 1], CPUS[:1], {}, SizeOverflowError, "global_device_ids"),
        (["x", "y"], IDS.astype(float), LOCAL, CPUS[:4], {}, TypeError, "global_device_ids"),
        (["x", "y"], IDS > 5, LOCAL, CPUS[:4], {}, TypeError, "global_device_ids"),
        (["x", "y"], "0123", LOCAL, CPUS[:4], {}, TypeError, "global_device_ids"),
        (["x", "y"], IDS, [0, 1, 2, True], CPUS[:4], {}, TypeError, r"local_device_ids\[3\]"),
        (["x", "y"], IDS, [0, 1, 2, 3.0], CPUS[:4], {}, TypeError, r"local_device_ids\[3\]"),
        (["x", "y"], IDS, "0123", CPUS[:4], {}, TypeError, "local_device_ids"),
        (["x", "y"], IDS, LOCAL, "CPU:0", {}, TypeError, "local_devices"),
        (["x", "y"], IDS, LOCAL, [*CPUS[:3], 7], {}, TypeError, r"local_devices\[3\]"),
        (["x", "y"], IDS, LOCAL, CPUS[:4], {"global_devices": 7}, TypeError, "global_devices"),
        ("xy", IDS, LOCAL, CPUS[:4], {}, TypeError, "dim_names"),
        (["x", 1], IDS, LOCAL, CPUS[:4], {}, TypeError, r"dim_names\[1\]"),
        (["x", "\ud800"], IDS, LOCAL, CPUS[:4], {}, TypeError, "surrogate"),
        (["x", "y"], IDS, LOCAL, CPUS[:4], {"mesh_name": None}, TypeError, "mesh_name"),
        (["x", "y"], IDS, LOCAL, TPUS[:4], {"use_xla_spmd": 1}, TypeError, "use_xla_spmd"),
    ],
)
def test_what_is_no_mesh(
    names: Any, ids: Any, local: Any, devices: Any, more: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        Mesh(names, ids, local, devices, **more)


@pytest.mark.parametrize("wrong", [None, 1, b"m", TEXT.encode()])
def test_only_strings_are_read(wrong: Any) -> None:
    with pytest.raises(TypeError):
        Mesh.from_string(wrong)
    with pytest.raises(TypeError):
        Mesh.from_proto(wrong)
    with pytest.raises(TypeError):
        Mesh.from_device(wrong)


@pytest.mark.heavy
def test_a_million_devices_in_any_order_are_checked_in_bounded_time() -> None:
    devices = [f"TPU:{(index * 7) % 1_000_003}" for index in range(100_000)]
    mesh = Mesh(["x"], np.arange(100_000), range(100_000), devices)
    assert mesh.num_local_devices() == 100_000
    devices[99_999] = "/device:TPU:0"
    with pytest.raises(MeshError, match=r"local_devices\[0\] and local_devices\[99999\]"):
        Mesh(["x"], np.arange(100_000), range(100_000), devices)


def test_device_spec() -> None:
    spec = DeviceSpec.from_string("/job:localhost/replica:0/task:0/cpu:1")
    assert (spec.job, spec.replica, spec.task, spec.device_type, spec.device_index) == ("localhost", 0, 0, "CPU", 1)
    assert spec.to_string() == str(spec) == "/job:localhost/replica:0/task:0/device:CPU:1"
    assert eval(repr(spec)) == spec == pickle.loads(pickle.dumps(spec))
    assert len({spec, DeviceSpec("localhost", 0, 0, "cpu", 1)}) == 1
    assert spec != spec.to_string()
    assert DeviceSpec.from_string(None) == DeviceSpec.from_string("") == DeviceSpec()
    assert spec.replace(device_index=None).to_string().endswith("CPU:*")
    assert DeviceSpec(job="a", task=1).make_merged_spec(DeviceSpec(task=2, device_type="TPU")).to_string() == (
        "/job:a/task:2/device:TPU:*"
    )


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ({"job": ""}, MeshError),
        ({"job": "a/b"}, MeshError),
        ({"job": "a,b"}, MeshError),
        ({"job": 3}, TypeError),
        ({"replica": -1}, MeshError),
        ({"task": "2"}, TypeError),
        ({"task": True}, TypeError),
        ({"task": 1.0}, TypeError),
        ({"task": 2**63}, SizeOverflowError),
        ({"device_type": "*"}, MeshError),
        ({"device_index": 1}, MeshError),
    ],
)
def test_parts_that_no_device_name_can_hold(parts: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(parts))):
        DeviceSpec(**parts)


@pytest.mark.parametrize(
    "text", ["foo", "/job:", "/task:x", "/device:CPU", "CPU:0,CPU:1", "/CPU:0/GPU:0", "CPU:\ud800"]
)
def test_texts_that_are_no_device_name(text: str) -> None:
    with pytest.raises(ParseError, match="device name, byte"):
        DeviceSpec.from_string(text)
