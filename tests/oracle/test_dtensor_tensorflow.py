"""The places where TensorFlow is wrong, against an installed one; `tests/prove` has random meshes and layouts."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shardwise import LayoutError, MeshError, ParseError, SizeOverflowError
from shardwise.dtensor import Layout, Mesh
from tests.oracle.worker import Worker, raised

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed (pip install tensorflow-cpu)"
)


@pytest.fixture(scope="module")
def tensorflow() -> Iterator[Worker]:
    worker = Worker("tests.oracle.tensorflow_worker")
    yield worker
    worker.stop()


DEVICES = [f"/job:localhost/replica:0/task:0/device:CPU:{index}" for index in range(4)]
PLAIN = f"Mesh(['x', 'y'], np.arange(4).reshape(2, 2), [0, 1, 2, 3], {DEVICES})"
CUT = f"Layout(['x', 'y'], {PLAIN})"
FAR = f"Mesh(['x', 'y'], np.arange(4).reshape(2, 2), [], [], global_devices={DEVICES})"
ONE = "Layout.from_device('/job:a/task:0/device:CPU:0')"
TPUS = ",".join(f"/job:a/task:0/device:TPU:{index}" for index in range(2))
DIES = "dies"
#: It writes outside of its memory, which crashes it mostly, but not always.
WRITES_OUTSIDE = "writes outside"


def from_text(size: str, ids: str = "0,1,2,3", local_ids: str = "0,1,2,3", more: str = "") -> str:
    text = f"m|x={size}|{ids}|{local_ids}|{','.join(DEVICES)}{more}"
    return f"Mesh.from_string({text!r})"


def mesh_of(names: str = "['x', 'y']", first: int = 0, local_ids: str = "[0, 1, 2, 3]", more: str = "") -> str:
    return f"Mesh({names}, np.arange({first}, {first + 4}).reshape(2, 2), {local_ids}, {DEVICES}{more})"


# What docs/dtensor-differences.md says of TensorFlow 2.21, and what is done here: an error, or the right answer.
DIFFERENCES: list[tuple[str, Any, Any]] = [
    ("Mesh.from_string('m|x2|0,1|0,1|a,b')", DIES, ParseError),
    (mesh_of(more=", mesh_name='a|b'") + ".to_string()[:3]", "a|b", MeshError),
    (f"Mesh.from_string({mesh_of(more=', mesh_name=' + repr('a|b'))}.to_string())", DIES, MeshError),
    (f"Mesh.from_string({mesh_of(repr(['x|', 'y']))}.to_string())", DIES, MeshError),
    ("Mesh.from_string('m|x=-1|*CPU')", DIES, ParseError),
    (f"Layout.batch_sharded({PLAIN}, 'x', rank=0)", DIES, LayoutError),
    (f"Layout.inner_sharded({PLAIN}, 'x', rank=0)", DIES, LayoutError),
    (f"Layout.batch_sharded({PLAIN}, 'x', rank=2, axis=-1)", WRITES_OUTSIDE, LayoutError),
    (f"{CUT}.num_shards(99999999)", DIES, LayoutError),
    (f"{ONE}.num_shards(0)", DIES, LayoutError),
    ("Layout.from_string('empty_layout').num_shards(0)", DIES, LayoutError),
    ("Mesh(['x'], np.arange(1), [0], ['GPU:3']).host_mesh().local_devices()", DIES, ["/device:CPU:3"]),
    (f"{FAR}.host_mesh().device_type()", DIES, "CPU"),
    (from_text("+4") + ".size", 4, ParseError),
    (from_text("4abc") + ".size", 4, ParseError),
    (from_text("4=3") + ".size", 4, ParseError),
    (from_text("04") + ".size", 4, ParseError),
    (from_text("4", "3,1,7,2", "9,8,7,6") + ".local_device_ids()", [9, 8, 7, 6], MeshError),
    ("Mesh.from_string('||||').to_string()", "empty_mesh", MeshError),
    ("Mesh.from_string('n|x=4|||').to_string()", "empty_mesh", MeshError),
    (from_text("4", more="|") + ".size", 4, ParseError),
    (from_text("4", more="||") + ".size", 4, ParseError),
    (
        f"len(Mesh.from_string('|x=2|0,1|0,1|{TPUS}|{TPUS}|use_xla_spmd').global_devices())",
        0,
        2,
    ),
    (f"Layout.from_string('sharding_specs:x,y mesh:' + {PLAIN}.to_string()).sharding_specs", ["x"], ParseError),
    (f"Layout.from_string('sharding_specs:x,y, ' + {PLAIN}.to_string()).sharding_specs", ["x", "y"], ParseError),
    (f"Layout.from_string('maximal:false mesh:{DEVICES[0]}').is_single_device()", True, ParseError),
    (f"Layout(['scalar'], Mesh(['scalar'], np.arange(1), [0], {DEVICES[:1]})).rank", 0, 1),
    (f"{CUT}.local_shape_from_global_shape([5, 4])", (2, 2), LayoutError),
    (f"{CUT}.local_shape_from_global_shape([4, 4, 4])", (2, 2), LayoutError),
    (f"{CUT}.local_shape_from_global_shape([4])[0]", 2, LayoutError),
    (f"{CUT}.global_shape_from_local_shape([2**62, 4])", (-(2**63), 8), SizeOverflowError),
    (f"{CUT}.global_shape_from_local_shape([-1, 4])", (-2, 8), (-1, 8)),
    (f"{ONE}.local_shape_from_global_shape([2, 3])", (), (2, 3)),
    (f"Layout(['match', 'y'], {PLAIN}).num_shards(0)", 2**64 - 1, LayoutError),
    (f"Layout(['match', 'y'], {PLAIN}).local_shape_from_global_shape([4, 4])", (-4, 2), LayoutError),
    (f"{CUT}.offset_tuple_to_global_index((5, -1))", 9, IndexError),
    (f"{CUT}.offset_tuple_to_global_index((1,))", 2, LayoutError),
    (f"{CUT}.offset_tuple_to_global_index((1, 0, 1))", 3, LayoutError),
    (f"{CUT}.offset_tuple_to_global_index((1.5, 0))", 3.0, TypeError),
    (f"{CUT}.delete([5]).sharding_specs", ["x", "y"], LayoutError),
    (f"{CUT}.delete([-1]).sharding_specs", ["x", "y"], LayoutError),
    (f"{CUT}.delete((0,)).sharding_specs", ["x", "y"], ["y"]),
    (f"{CUT}.delete('x').sharding_specs", ["x", "y"], TypeError),
    (f"{CUT}.to_parted().delete(0).to_string()[:6]", "shardi", "parted"),
    (mesh_of(local_ids="[7, 8, 9, 10]") + ".size", 4, MeshError),
    (mesh_of(local_ids="[0, 0, 1, 1]") + ".size", 4, MeshError),
    (mesh_of(first=-2, local_ids="[-2, -1, 0, 1]") + ".size", 4, MeshError),
    *((mesh_of(f"[{name!r}, 'y']") + ".size", 4, MeshError) for name in ("y", "", "unsharded", "match", "any")),
    (mesh_of(more=f", global_devices={DEVICES[:1]}") + ".size", 4, MeshError),
    (f"Mesh([], np.array(0), [0], {DEVICES[:1]}).shape()", [], MeshError),
    ("Mesh.from_device('garbage').device_type()", "garbage", MeshError),
    (mesh_of(first=5, local_ids="[5, 6, 7, 8]") + ".unravel_index().keys() == {0, 1, 2, 3}", True, False),
    (mesh_of(first=5, local_ids="[5, 6, 7, 8]") + ".local_device_locations()[3]", raised("KeyError"), {"x": 1, "y": 1}),
    (f"{PLAIN}.coords(np.arange(2)).shape", (2,), (2, 2)),
    ("Mesh.from_string('empty_mesh').strides", [1], []),
    ("Mesh.from_string('empty_mesh').unravel_index()", {0: {}}, {}),
    ("Mesh.from_string('empty_mesh').global_device_ids().size", raised("ValueError"), 0),
    (f"{ONE}.mesh.host_mesh().to_string()", "empty_mesh", "/job:a/replica:0/task:0/device:CPU:0"),
    *(
        (f"Mesh(['x'], np.arange(1), [0], [{name!r}]).device_type()", theirs, ours)
        for name, theirs, ours in [
            ("cpu:0", "cpu", "CPU"),
            ("tpu:0", "tpu", "TPU"),
            ("/tpu:0", "", "TPU"),
            ("device:CPU:0", "device", "CPU"),
        ]
    ),
    ("Mesh(['x'], np.arange(1), [0], ['/job:a/task:-1/device:GPU:3']).size", 1, MeshError),
    (
        "Mesh.from_string(Mesh(['x'], np.arange(1), [0], ['CPU:0']).to_string()).size",
        raised("ValueError"),
        1,
    ),
    (
        f"Mesh.from_string(Mesh(['x', 'y'], np.arange(4).reshape(2, 2), [0, 1, 2], {DEVICES[:3]}).to_string()).size",
        raised("ValueError"),
        4,
    ),
    (
        f"Layout.from_string(Layout(['x'], {mesh_of(more=', mesh_name=' + repr('a b'))}).to_string()).rank",
        raised("ValueError"),
        1,
    ),
    (f"{PLAIN} == 1", raised("TypeError"), False),
]


@pytest.mark.parametrize(("expression", "theirs", "ours"), DIFFERENCES)
def test_the_documented_differences(tensorflow: Worker, expression: str, theirs: Any, ours: Any) -> None:
    names = {"np": np, "Mesh": Mesh, "Layout": Layout}
    if isinstance(ours, type):
        with pytest.raises(ours):
            eval(expression, names)
    else:
        assert eval(expression, names) == ours
    answer = tensorflow.ask([expression])[0]
    if not tensorflow.version.startswith("2.21"):
        pytest.skip(f"the differences are those of TensorFlow 2.21, this is {tensorflow.version}")
    if theirs != WRITES_OUTSIDE:
        assert answer == theirs
    elif not isinstance(answer, str):
        assert list(answer.sharding_specs) == ["unsharded"] * 2  # The cut is lost.
