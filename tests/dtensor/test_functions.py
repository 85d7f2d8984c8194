"""Meshes made from counts, tensors on meshes as numpy arrays, and layouts by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise import LayoutError, MeshError, ParseError, list_devices
from shardwise.dtensor import (
    DeviceSpec,
    DTensor,
    Layout,
    LayoutMap,
    LayoutType,
    check_layout,
    client_id,
    copy_to_mesh,
    create_distributed_mesh,
    create_mesh,
    fetch_layout,
    full_job_name,
    is_dtensor,
    job_name,
    jobs,
    num_clients,
    pack,
    relayout,
    unpack,
)
from tests.dtensor.strategies import layouts

LOCALHOST = "/job:localhost/replica:0/task:0/device:"
MESH = create_mesh({"x": 2, "y": 3})


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("DTENSOR_CLIENT_ID", "DTENSOR_NUM_CLIENTS", "DTENSOR_JOB_NAME", "DTENSOR_JOBS"):
        monkeypatch.delenv(variable, raising=False)


def test_create_mesh() -> None:
    mesh = create_mesh([("x", 2), ("y", 2)], "named", devices=[f"CPU:{index}" for index in range(4)])
    assert mesh.to_string() == "named|x=2,y=2|0,1,2,3|0,1,2,3|" + ",".join(
        f"{LOCALHOST}CPU:{index}" for index in range(4)
    )
    assert create_mesh({"x": 2, "y": 2}, "named") == mesh
    assert create_mesh({"x": 2, "y": 2}, "named", device_type="cpu") == mesh
    assert create_mesh().shape() == [len(list_devices())]
    assert create_mesh([("batch", -1)]).dim_names == ["batch"]
    assert create_mesh([("batch", -1)], devices=["GPU:3", "GPU:1"]).local_devices() == [
        f"{LOCALHOST}GPU:{i}" for i in (3, 1)
    ]
    given = [DeviceSpec(job="other", task=1, device_type="TPU", device_index=0)]
    assert create_mesh({"x": 1}, devices=given).local_devices() == ["/job:other/replica:0/task:1/device:TPU:0"]
    assert create_mesh({"x": 2}, device_type="TPU", use_xla_spmd=True).use_xla_spmd()


def test_devices_of_the_type_that_was_asked_for() -> None:
    mesh = create_mesh({"x": 2}, devices=["CPU:1", "cpu:0"], device_type="cpu")
    assert mesh.local_devices() == [f"{LOCALHOST}CPU:1", f"{LOCALHOST}CPU:0"]


def test_create_mesh_leaves_its_arguments_alone() -> None:
    dims = [("x", -1)]
    create_mesh(dims, devices=["CPU:0", "CPU:1"])
    assert dims == [("x", -1)]


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"mesh_dims": {"x": 3}, "devices": ["CPU:0"]}, MeshError, r"the number of devices, 1, .* \[3\]"),
        ({"mesh_dims": {"x": 0}}, MeshError, r"mesh_dims\[0\] has size 0"),
        ({"mesh_dims": {"x": -1, "y": -1}}, MeshError, r"mesh_dims\[0\] has size -1"),
        ({"mesh_dims": {"x": 2**40}}, MeshError, "at most 1048576 names are made"),
        ({"mesh_dims": {}}, MeshError, "axis"),
        ({"mesh_dims": {"x": 1.0}}, TypeError, r"mesh_dims\[0\]\[1\]"),
        ({"mesh_dims": {"x": True}}, TypeError, r"mesh_dims\[0\]\[1\]"),
        ({"mesh_dims": ["x"]}, TypeError, r"mesh_dims\[0\]"),
        ({"mesh_dims": [("x", 2), "y1"]}, TypeError, r"mesh_dims\[1\] is 'y1', which is not a pair"),
        ({"mesh_dims": [("x", 1, 2)]}, TypeError, r"mesh_dims\[0\] is .*, which is not a pair"),
        ({"mesh_dims": {"x": 1}, "devices": []}, MeshError, "the list of devices is empty"),
        ({"mesh_dims": {"x": 1}, "devices": "CPU:0"}, TypeError, "devices"),
        ({"mesh_dims": {"x": 1}, "devices": ["foo"]}, ParseError, "device name"),
        ({"devices": ["CPU:0", "GPU:0"], "device_type": "CPU"}, MeshError, "Conflicting devices: number 1"),
        ({"devices": ["CPU:0", "GPU:0"]}, MeshError, "multiple device_types"),
        ({"mesh_dims": {"x": 1}, "use_xla_spmd": True}, MeshError, "XLA SPMD"),
    ],
)
def test_meshes_that_cannot_be_created(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        create_mesh(**arguments)


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 4))
def test_the_clients_of_a_distributed_mesh_hold_it_all(shape: list[int], clients: int) -> None:
    dims = {f"a{axis}": size for axis, size in enumerate([*shape, clients])}
    meshes = [create_distributed_mesh(dims, client_id=client, num_clients=clients) for client in range(clients)]
    held = [number for mesh in meshes for number in mesh.local_device_ids()]
    assert held == list(range(math.prod(shape) * clients))
    names = [name for mesh in meshes for name in mesh.local_devices()]
    assert len(set(names)) == len(names)
    for client, mesh in enumerate(meshes):
        task = DeviceSpec.from_string(mesh.local_devices()[0]).task
        assert (task, mesh.num_local_devices()) == (client, math.prod(shape))


def test_a_distributed_mesh_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTENSOR_JOBS", "localhost:8001,localhost:8002")
    monkeypatch.setenv("DTENSOR_CLIENT_ID", "1")
    assert (jobs(), num_clients(), client_id()) == (["localhost:8001", "localhost:8002"], 2, 1)
    assert (job_name(), full_job_name(), full_job_name(0)) == (
        "worker",
        "worker/replica:0/task:1",
        "worker/replica:0/task:0",
    )
    mesh = create_distributed_mesh([("x", 2), ("y", 2)], local_devices=["GPU:0", "GPU:1"])
    assert mesh.to_string() == (
        "|x=2,y=2|0,1,2,3|2,3|/job:worker/replica:0/task:1/device:GPU:0,/job:worker/replica:0/task:1/device:GPU:1"
    )
    monkeypatch.setenv("DTENSOR_JOB_NAME", "trainer")
    assert create_distributed_mesh({"x": 4}).local_devices()[1] == "/job:trainer/replica:0/task:1/device:CPU:1"
    assert create_distributed_mesh({"x": 4}, client_id=0, num_clients=1, job_name="solo").num_local_devices() == 4
    # Which client this is of those of the environment says nothing of other clients.
    assert create_distributed_mesh({"x": 4}, num_clients=2).local_device_ids() == [0, 1]
    monkeypatch.delenv("DTENSOR_JOBS")
    monkeypatch.setenv("DTENSOR_NUM_CLIENTS", "4")
    assert create_distributed_mesh({"x": 4}).local_device_ids() == [1]


@pytest.mark.parametrize(
    ("environment", "error", "match"),
    [
        ({"DTENSOR_CLIENT_ID": "2", "DTENSOR_JOBS": "a,b"}, MeshError, "DTENSOR_CLIENT_ID is 2"),
        ({"DTENSOR_CLIENT_ID": "1"}, MeshError, "below the number of clients, 1"),
        ({"DTENSOR_CLIENT_ID": "-1"}, ParseError, "DTENSOR_CLIENT_ID"),
        ({"DTENSOR_CLIENT_ID": "one"}, ParseError, "DTENSOR_CLIENT_ID"),
        ({"DTENSOR_CLIENT_ID": "9" * 18}, MeshError, "DTENSOR_CLIENT_ID is 999999999999999999"),
        ({"DTENSOR_CLIENT_ID": "1" + "0" * 18}, ParseError, "DTENSOR_CLIENT_ID .* at most 18 digits"),
        ({"DTENSOR_CLIENT_ID": "٣"}, ParseError, "DTENSOR_CLIENT_ID"),
        ({"DTENSOR_NUM_CLIENTS": "0"}, MeshError, "at least one"),
        ({"DTENSOR_NUM_CLIENTS": "3", "DTENSOR_JOBS": "a,b"}, MeshError, "has 2 entries"),
        ({"DTENSOR_JOBS": "/bns/w/1:p,/bns/w/0:p"}, MeshError, "not in the order"),
        ({"DTENSOR_JOBS": "/bns/w/x:p"}, MeshError, "does not end in a task number"),
    ],
)
def test_an_environment_that_makes_no_sense(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], error: type[Exception], match: str
) -> None:
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(error, match=match):
        create_distributed_mesh({"x": 4})


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"num_clients": 3}, MeshError, "total size 4 .* 3 clients"),
        ({"num_clients": 0}, MeshError, "num_clients is 0"),
        ({"num_clients": 2, "client_id": 2}, MeshError, "client_id is 2"),
        ({"num_clients": 2, "client_id": -1}, MeshError, "client_id is -1"),
        ({"num_clients": 2.0}, TypeError, "num_clients"),
        ({"num_clients": 2, "local_devices": ["CPU:0"]}, MeshError, r"1 of each of 2 clients"),
    ],
)
def test_distributed_meshes_that_cannot_be(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        create_distributed_mesh({"x": 4}, **arguments)


def test_jobs_in_the_order_of_their_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks are numbers: by their text the last would come before the second."""
    listed = ["/bns/cell/job/0:8000", "/bns/cell/job/9:8000", "/bns/cell/job/10:8000"]
    monkeypatch.setenv("DTENSOR_JOBS", ",".join(listed))
    assert jobs() == listed


def test_full_job_name_of_no_client() -> None:
    assert full_job_name() == "localhost/replica:0/task:0"
    for task in (1, -1):
        with pytest.raises(MeshError, match=f"task_id is {task}; it must be 0 to 0"):
            full_job_name(task)


def test_components_are_views() -> None:
    array = np.arange(24).reshape(4, 6)[:, ::-1]
    tensor = copy_to_mesh(array, Layout(["x", "y"], MESH))
    assert is_dtensor(tensor)
    assert (tensor.shape, tensor.dtype) == (array.shape, array.dtype)
    parts = unpack(tensor)
    assert [part.tolist() for part in parts] == [
        array[2 * i : 2 * i + 2, 2 * j : 2 * j + 2].tolist() for i in range(2) for j in range(3)
    ]
    assert all(np.shares_memory(part, array) for part in parts)
    assert np.shares_memory(tensor.numpy(), array)
    parts[0][0, 0] = -1
    assert array[0, 0] == -1


def test_a_copy_is_made_where_one_is_asked_for() -> None:
    array = np.arange(6)
    tensor = relayout(array, Layout(["x"], MESH))
    assert np.shares_memory(np.asarray(tensor), array)
    copied = np.array(tensor)
    assert not np.shares_memory(copied, array)
    assert copied.tolist() == [0, 1, 2, 3, 4, 5]


def test_the_example_of_the_documentation() -> None:
    mesh = create_mesh({"x": 3, "y": 2}, device_type="TPU")
    tensor = copy_to_mesh(np.arange(6).reshape(3, 2), Layout(["x", "unsharded"], mesh))
    assert [part.tolist() for part in unpack(tensor)] == [[[0, 1]]] * 2 + [[[2, 3]]] * 2 + [[[4, 5]]] * 2


@settings(deadline=None)
@given(layouts(cut=True).filter(lambda layout: layout.mesh.size == layout.mesh.num_local_devices()), st.data())
def test_pack_and_unpack_are_inverse(layout: Layout, data: st.DataObject) -> None:
    shape = tuple(layout.num_shards(dim) * data.draw(st.integers(0, 2)) for dim in range(layout.rank))
    array = np.arange(math.prod(shape)).reshape(shape)
    tensor = relayout(array, layout)
    again = pack(unpack(tensor), layout)
    assert again.shape == shape
    assert np.array_equal(again.numpy(), array)
    assert np.array_equal(np.asarray(again), array)
    assert all(a is b for a, b in zip(unpack(again), unpack(tensor), strict=True))
    check_layout(again, layout)
    replicated = relayout(again, Layout.replicated(layout.mesh, layout.rank))
    assert all(np.array_equal(part, array) for part in unpack(replicated))
    assert np.array_equal(relayout(replicated, layout).numpy(), array)


def test_relayout() -> None:
    tensor = relayout(np.arange(36).reshape(6, 6), Layout(["x", "unsharded"], MESH))
    assert relayout(tensor, Layout(["x", "unsharded"], MESH)) is tensor
    turned = relayout(tensor, Layout(["y", "x"], MESH))
    assert turned.components[4].tolist() == np.arange(36).reshape(6, 6)[2:4, 3:].tolist()
    kept = relayout(tensor, Layout(["match", "y"], MESH))
    assert fetch_layout(kept) == Layout(["x", "y"], MESH)
    parted = relayout(tensor, Layout(["match", "y"], MESH).to_parted())
    assert parted.layout.type is LayoutType.PARTED
    assert relayout(np.arange(6), Layout(["match"], MESH)).layout.is_fully_replicated()
    with pytest.raises(LayoutError, match="unique"):
        relayout(tensor, Layout(["match", "x"], MESH))
    for specs in (["match"], ["unsharded", "unsharded", "match"]):
        with pytest.raises(LayoutError, match="dims"):
            relayout(tensor, Layout(specs, MESH))
    with pytest.raises(LayoutError, match="dims"):
        relayout(tensor, Layout(["x"], MESH))
    with pytest.raises(LayoutError, match="divide evenly"):
        relayout(np.arange(5), Layout(["x"], MESH))
    with pytest.raises(TypeError):
        relayout(np.arange(6), ["x"])  # type: ignore[arg-type]


def test_a_tensor_on_one_device() -> None:
    layout = Layout.from_device("CPU:0")
    array = np.arange(6).reshape(2, 3)
    for tensor in (relayout(array, layout), pack([array], layout)):
        assert tensor.shape == (2, 3)
        assert unpack(tensor)[0] is array
    spread = relayout(relayout(array, layout), Layout(["x", "y"], MESH))
    assert spread.components[5].tolist() == [[5]]


def test_any_dtype_and_rank() -> None:
    for array in (np.array(7.5), np.array(["a", "bc"]), np.zeros((2, 0), ">f4"), np.array([None, 1], object)):
        layout = Layout(["x"] * (array.ndim > 0) + ["unsharded"] * (array.ndim - 1), MESH)
        tensor = copy_to_mesh(array, layout)
        assert tensor.dtype == array.dtype
        assert all(isinstance(part, np.ndarray) for part in unpack(tensor))
        assert np.array_equal(pack(unpack(tensor), layout).numpy(), array)


def test_a_client_with_part_of_the_devices() -> None:
    mesh = create_distributed_mesh({"x": 4}, client_id=1, num_clients=2)
    layout = Layout(["x"], mesh)
    tensor = copy_to_mesh(np.arange(8), layout)
    assert [part.tolist() for part in unpack(tensor)] == [[4, 5], [6, 7]]
    packed = pack(unpack(tensor), layout)
    assert packed.shape == (8,)
    with pytest.raises(LayoutError, match="2 of 4 shards"):
        packed.numpy()
    with pytest.raises(LayoutError, match="3 arrays; the mesh has 2 local devices"):
        pack([np.zeros(2)] * 3, layout)
    whole = pack([np.arange(3)] * 2, Layout.replicated(mesh, 1))
    assert whole.numpy().tolist() == [0, 1, 2]


def test_what_cannot_be_packed() -> None:
    layout = Layout(["x"], create_mesh({"x": 2}))
    cases: list[tuple[list[Any], str]] = [
        ([np.zeros(2)], "1 array; the mesh has 2"),
        ([np.zeros(2), np.zeros(3)], r"tensors\[1\] has shape \(3,\)"),
        ([np.zeros(2), np.zeros(2, int)], r"tensors\[1\] .*int64"),
        ([np.zeros((2, 2))] * 2, "dims"),
    ]
    for tensors, match in cases:
        with pytest.raises(LayoutError, match=match):
            pack(tensors, layout)
    with pytest.raises(TypeError):
        pack([np.zeros(2)] * 2, "x")  # type: ignore[arg-type]


def test_layouts_of_tensors() -> None:
    layout = Layout(["x"], MESH)
    tensor = copy_to_mesh(np.arange(2), layout)
    assert fetch_layout(tensor) == layout
    check_layout(tensor, layout)
    with pytest.raises(LayoutError, match="did not match expected layout"):
        check_layout(tensor, Layout(["y"], MESH))
    assert fetch_layout(-1024) is fetch_layout(np.arange(2)) is None
    for function in (lambda tensor: check_layout(tensor, layout), unpack):
        with pytest.raises(TypeError, match="must be a DTensor, got ndarray"):
            function(np.arange(2))  # type: ignore[arg-type]
    assert not is_dtensor(np.arange(2))
    assert repr(tensor) == "DTensor(shape=(2,), dtype=int64, sharding_specs=['x'], components=6)"
    assert isinstance(tensor, DTensor)


@pytest.fixture
def layout_map() -> LayoutMap:
    mapped = LayoutMap(mesh=MESH)
    mapped["dense.*kernel"] = Layout.inner_sharded(MESH, "x", 2)
    mapped["dense.*"] = Layout.replicated(MESH, 2)
    mapped["dense_9.kernel"] = Layout.replicated(MESH, 0)
    mapped[".*bias"] = Layout.replicated(MESH, 1)
    return mapped


def test_the_first_rule_that_matches_from_the_beginning_wins(layout_map: LayoutMap) -> None:
    assert layout_map["dense_1.kernel"] == Layout.inner_sharded(MESH, "x", 2)
    assert layout_map["dense_1.bias"] == Layout.replicated(MESH, 2)
    assert layout_map["model/conv.bias"] == Layout.replicated(MESH, 1)
    assert layout_map["model/dense.kernel"] is None
    assert layout_map.get("nothing", "default") == "default"


def test_an_exact_key_goes_before_every_rule(layout_map: LayoutMap) -> None:
    assert layout_map["dense_9.kernel"] == Layout.replicated(MESH, 0)
    layout_map["a+b"] = Layout.replicated(MESH, 3)
    assert layout_map["a+b"] == Layout.replicated(MESH, 3)


@pytest.mark.parametrize("first", ["(?<!b)a.*", "a.*"])
@pytest.mark.parametrize("second", ["(?=a)a.*", "a+"])
def test_the_first_wins_whichever_engine_finds_it(first: str, second: str) -> None:
    mapped = LayoutMap(backtracking=True)
    mapped["never(?=x)"] = Layout.replicated(MESH, 3)
    mapped[first] = Layout.replicated(MESH, 1)
    mapped[second] = Layout.replicated(MESH, 2)
    assert mapped["aa"] == Layout.replicated(MESH, 1)
    assert mapped["ba"] is None


def test_a_pattern_that_backtracks_for_ever_does_not_hang() -> None:
    mapped = LayoutMap()
    mapped["(a+)+$"] = Layout.replicated(MESH, 1)
    assert mapped["a" * 40 + "!"] is None


def test_a_layout_map_is_a_mutable_mapping(layout_map: LayoutMap) -> None:
    assert len(layout_map) == 4
    assert next(iter(layout_map)) == "dense.*kernel"
    assert "dense.*kernel" in layout_map
    assert "dense_1.kernel" not in layout_map
    del layout_map["dense.*kernel"]
    assert layout_map["dense_1.kernel"] == Layout.replicated(MESH, 2)
    with pytest.raises(KeyError):
        del layout_map["dense.*kernel"]
    assert layout_map.get_default_mesh() is MESH
    assert LayoutMap().get_default_mesh() is None


def test_what_a_layout_map_refuses(layout_map: LayoutMap) -> None:
    with pytest.raises(LayoutError, match="already"):
        layout_map[".*bias"] = Layout.replicated(MESH, 1)
    for wrong in (None, ("x",), "x", MESH):
        with pytest.raises(TypeError, match="must be a Layout"):
            layout_map["new"] = wrong  # type: ignore[assignment]
    with pytest.raises(LayoutError, match="not a regular expression"):
        layout_map["(unclosed"] = Layout.replicated(MESH, 1)
    for key in (1, None, b"dense"):
        with pytest.raises(TypeError):
            layout_map[key] = Layout.replicated(MESH, 1)  # type: ignore[index]
        with pytest.raises(TypeError):
            layout_map[key]  # type: ignore[index]
    with pytest.raises(TypeError):
        LayoutMap(mesh="mesh")  # type: ignore[arg-type]
    assert len(layout_map) == 4


def test_a_tensor_is_printed_and_iterated_over_as_a_whole() -> None:
    tensor = copy_to_mesh(np.arange(4).reshape(2, 2), Layout(["x", "unsharded"], MESH))
    assert [row.tolist() for row in tensor] == [[0, 1], [2, 3]]
    assert len(tensor) == 2
    assert len(copy_to_mesh(np.zeros((2, 3, 5)), Layout(["unsharded"] * 3, MESH))) == 2
    text = str(tensor)
    assert text.startswith('tf.Tensor({"')
    assert text.count('": [[') == MESH.num_local_devices()
    assert f'layout="{tensor.layout.to_string()}", shape=(2, 2), dtype=int64)' in text
    scalar = copy_to_mesh(np.int32(3), Layout([], MESH))
    with pytest.raises(TypeError, match="rank 0"):
        iter(scalar)
    with pytest.raises(TypeError, match="rank 0"):
        len(scalar)
