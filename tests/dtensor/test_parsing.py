"""Texts and messages that are wrong, and random ones: only the documented exceptions, in linear time."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise import LayoutError, MeshError, ParseError, ShardwiseError, SizeOverflowError
from shardwise.dtensor import (
    DeviceSpec,
    Layout,
    LayoutProto,
    Mesh,
    MeshDimensionProto,
    MeshProto,
    ShardingSpec,
)
from tests.checks import linear
from tests.dtensor.strategies import layouts, meshes, spoiled, spoiled_bytes

DEVICES = "CPU:0,CPU:1"


@pytest.mark.parametrize(
    ("text", "byte"),
    [
        pytest.param("m|x2|0,1|0,1|" + DEVICES, 2, id="missing ="),
        pytest.param("m|x=|0,1|0,1|" + DEVICES, 4, id="x="),
        pytest.param("m|x=+2|0,1|0,1|" + DEVICES, 4, id="x=+2"),
        pytest.param("m|x=2abc|0,1|0,1|" + DEVICES, 4, id="x=2abc"),
        pytest.param("m|x=2.5|0,1|0,1|" + DEVICES, 4, id="x=2.5"),
        pytest.param("m|x=0x2|0,1|0,1|" + DEVICES, 4, id="x=0x2"),
        pytest.param("m|x=2=3|0,1|0,1|" + DEVICES, 4, id="x=2=3"),
        pytest.param("m|x=-2|0,1|0,1|" + DEVICES, 4, id="x=-2"),
        pytest.param("m|x= 2|0,1|0,1|" + DEVICES, 4, id="x= 2"),
        pytest.param("m|x=02|0,1|0,1|" + DEVICES, 4, id="x=02"),
        pytest.param("m|x=2_0|0,1|0,1|" + DEVICES, 4, id="x=2_0"),
        pytest.param("m|x=٢|0,1|0,1|" + DEVICES, 4, id="digits that are not ASCII"),
        pytest.param(f"m|x={2**63}|0,1|0,1|" + DEVICES, 4, id="size of 2**63"),
        pytest.param(f"m|x=2|{2**63},1|0,1|" + DEVICES, 6, id="id of 2**63"),
        pytest.param(f"m|x=2|0,1|0,{2**70}|" + DEVICES, 12, id="local id over 2**63"),
        pytest.param("", 0, id="empty"),
        pytest.param("a|b", 0, id="2 fields"),
        pytest.param("a|x=1|0|0", 0, id="4 fields"),
        pytest.param("m|x=2|0,1|0,1|CPU:0,CPU:1|CPU:0,CPU:1|use_xla_spmd|", 0, id="8 fields"),
        pytest.param("a|b|x=2|0,1|0,1|" + DEVICES, 2, id="a mesh named a|b"),
        pytest.param("m|x=2|0,1|0,1|CPU:0,CPU:1|", 26, id="trailing |"),
        pytest.param("m|x=2|0,1|0,1|CPU:0,CPU:1,", 26, id="trailing comma"),
        pytest.param("m|x=2|0,1|0,1|CPU:0,CPU:1 ", 20, id="trailing space"),
        pytest.param("m|x=2|0,1|0,1|CPU:0,CPU:1\n", 20, id="trailing newline"),
        pytest.param("m|x=2|0,1|0,1|CPU:0,CPU:1\0", 25, id="NUL"),
        pytest.param("m\0|x=2|0,1|0,1|CPU:0,CPU:1", 1, id="NUL in the name"),
        pytest.param("m\ud800|x=2|0,1|0,1|CPU:0,CPU:1", 1, id="lone surrogate"),
        pytest.param("m|x=2|*C-U", 7, id="generated, no device type"),
        pytest.param("m|x=1048577|*CPU", 2, id="generated, too many"),
        pytest.param("m|x=2|CPU", 6, id="generated, no star"),
        pytest.param("not a device", 0, id="neither mesh nor device"),
    ],
)
def test_mesh_texts(text: str, byte: int) -> None:
    with pytest.raises(ParseError, match=rf"^mesh text, byte {byte}: "):
        Mesh.from_string(text)
    if "\0" not in text and "\ud800" not in text:
        with pytest.raises(ParseError, match=rf"^layout text, byte {byte + 21}: "):
            Layout.from_string("sharding_specs: mesh:" + text)


@pytest.mark.parametrize(
    ("head", "byte"),
    [
        pytest.param("", 0, id="nothing"),
        pytest.param("specs:x,", 0, id="unknown form"),
        pytest.param("sharding_specs:x", 16, id="no comma after the last spec"),
        pytest.param("sharding_specs:x, ", 18, id="two spaces"),
        pytest.param("maximal:false,", 8, id="maximal:false"),
        pytest.param("maximal:true", 8, id="maximal without comma"),
        pytest.param("sharding_specs:" + "unsharded," * 255, 15, id="255 dims"),
    ],
)
def test_layout_texts(head: str, byte: int) -> None:
    with pytest.raises(ParseError, match=rf"^layout text, byte {byte}: "):
        Layout.from_string(head + " mesh:m|x=2|0,1|0,1|" + DEVICES)


@pytest.mark.parametrize(
    "text", ["", "x", "sharding_specs:x,", "empty_mesh", "sharding_specs:x,\nmesh:m", "empty_layout "]
)
def test_layout_texts_without_a_mesh(text: str) -> None:
    with pytest.raises(ParseError, match=r"layout text, byte \d+: no ` mesh:`"):
        Layout.from_string(text)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("sharding_specs:q, mesh:m|x=2|0,1|0,1|" + DEVICES, LayoutError),
        ("sharding_specs:x,x, mesh:m|x=2|0,1|0,1|" + DEVICES, LayoutError),
        ("sharding_specs:match,match, mesh:m|x=2|0,1|0,1|" + DEVICES, LayoutError),
        ("sharding_specs:, mesh:m|x=2|0,1|0,1|" + DEVICES, LayoutError),
        ("sharding_specs:scalar, mesh:m|x=2|0,1|0,1|" + DEVICES, LayoutError),
        ("sharding_specs: mesh:empty_mesh", LayoutError),
        ("sharding_specs: mesh:CPU:0", LayoutError),
        ("parted: mesh:CPU:0", LayoutError),
        ("maximal:true, mesh:m|x=2|0,1|0,1|" + DEVICES, LayoutError),
        ("sharding_specs:x, mesh:m|x=3|0,1|0,1|" + DEVICES, MeshError),
        ("sharding_specs:x, mesh:m|x=2,y=2|0,1|0,1|" + DEVICES, MeshError),
        (f"sharding_specs:x, mesh:m|x={2**62},y=4|0,1|0,1|" + DEVICES, SizeOverflowError),
        (f"sharding_specs:x, mesh:m|x={2**32},y={2**32}|0|0|CPU:0", SizeOverflowError),
    ],
)
def test_texts_of_what_is_no_mesh_or_layout(text: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        Layout.from_string(text)


def test_a_text_that_is_read_is_what_is_written() -> None:
    for text in (
        "|x=2|0,1|0,1|" + DEVICES,
        "n|x=2,y=1|4,5|5|/job:a/task:1/gpu:0",
        "|x=2|0,1|||TPU:0,TPU:1",
        "|x=2|0,1|0|TPU:0|TPU:0,TPU:1|use_xla_spmd",
        "|x=1|0|0|TPU:0|use_xla_spmd",
        "é x|é=1|0|0|cpu",
        "empty_mesh",
        "job:localhost/replica:0/task:0/TPU:0",
    ):
        assert Mesh.from_string(text).to_string() == text
    any_text = "sharding_specs:any,any,x, mesh:|x=1|0|0|CPU:0"
    assert Layout.from_string(any_text).to_string() == any_text


@pytest.mark.heavy
def test_the_form_of_three_fields() -> None:
    mesh = Mesh.from_string("n|x=2,y=2|*TPU")
    assert mesh.to_string() == (
        "n|x=2,y=2|0,1,2,3|0,1,2,3|" + ",".join(f"/job:localhost/task:0/device:TPU:{index}" for index in range(4))
    )
    assert Mesh.from_string("|x=1048576|*CPU").size == 2**20
    with pytest.raises(MeshError):
        Mesh.from_string("n||*TPU")
    with pytest.raises(MeshError):
        Mesh.from_string("n|x=0|*TPU")


@pytest.mark.parametrize(
    ("data", "byte"),
    [
        pytest.param(b"\x80", 0, id="truncated varint"),
        pytest.param(b"\x12\x02\x01\x80", 3, id="truncated varint among packed ids"),
        pytest.param(b"\xff" * 10 + b"\x01", 0, id="varint over 64 bits"),
        pytest.param(b"\x1a\x05ab", 1, id="length past the end"),
        pytest.param(b"\x1a" + b"\xff" * 9 + b"\x01", 1, id="length of 2**64 - 1"),
        pytest.param(b"\x18\x01", 0, id="wrong wire type for a text"),
        pytest.param(b"\x1d\x00\x00\x00\x00", 0, id="wrong wire type of four bytes"),
        pytest.param(b"\x3a\x01\x01", 0, id="wrong wire type for a number"),
        pytest.param(b"\x08\x01", 0, id="wrong wire type for a message"),
        pytest.param(b"\x1a\x02\xff\xfe", 2, id="text that is not UTF-8"),
        pytest.param(b"\x1a\x03\xed\xa0\x80", 2, id="encoded surrogate"),
        pytest.param(b"\x00", 0, id="field number 0"),
        pytest.param(b"\x0e", 0, id="wire type 6"),
        pytest.param(b"\x7c", 0, id="end of no group"),
        pytest.param(b"\x7b\x74", 2, id="end of another group"),
        pytest.param(b"\x7b", 1, id="group without end"),
        pytest.param(b"\x0a\x03\x0a\x05x", 3, id="length past the end of an inner message"),
        pytest.param(b"\x7b" * 100_000, 101, id="deep nesting"),
        pytest.param(b"\x0a\x00" * 100_000, 128, id="100,000 axes"),
    ],
)
def test_mesh_messages(data: bytes, byte: int) -> None:
    class Message:
        def SerializeToString(self) -> bytes:  # noqa: N802
            return data

    for read in (MeshProto.FromString, lambda _: Mesh.from_proto(Message())):
        with pytest.raises(ParseError, match=rf"byte {byte}|no wire type"):
            read(data)
    with pytest.raises(ParseError):
        Layout.from_str(b"\x12" + _varint(len(data)) + data)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x18\x04", id="unknown type"),
        pytest.param(b"\x18" + b"\xff" * 9 + b"\x01", id="negative type"),
        pytest.param(b"\x0a\x00" * 100_000, id="100,000 dims"),
        pytest.param(b"\x0a\x03\x12\x01\xff", id="spec that is not UTF-8"),
        pytest.param(b"\x0a\x02\x10\x01", id="spec of a wrong wire type"),
    ],
)
def test_layout_messages(data: bytes) -> None:
    with pytest.raises(ParseError, match="byte"):
        Layout.from_str(data)


def test_unknown_fields_are_skipped() -> None:
    mesh = Mesh.from_string("m|x=2|0,1|0,1|" + DEVICES)
    known = mesh.as_proto().SerializeToString()
    for unknown in (b"\x78\x01", b"\x79" + bytes(8), b"\x7a\x01a", b"\x7b\x73\x08\x01\x74\x7c", b"\x7d" + bytes(4)):
        assert MeshProto.FromString(unknown + known + unknown) == mesh.as_proto()


GOOD = MeshProto(
    mesh_dimensions=(MeshDimensionProto("x", 2),),
    global_device_ids=(0, 1),
    local_device_ids=(0, 1),
    local_devices=("CPU:0", "CPU:1"),
)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"mesh_dimensions": ()}, MeshError),
        ({"mesh_dimensions": (MeshDimensionProto("x", 0),)}, MeshError),
        ({"mesh_dimensions": (MeshDimensionProto("x", -2), MeshDimensionProto("y", -1))}, MeshError),
        ({"mesh_dimensions": (MeshDimensionProto("", 2),)}, MeshError),
        ({"mesh_dimensions": (MeshDimensionProto("match", 2),)}, MeshError),
        ({"mesh_dimensions": (MeshDimensionProto("a|b", 2),)}, MeshError),
        ({"mesh_dimensions": (MeshDimensionProto("x", 2), MeshDimensionProto("x", 1))}, MeshError),
        ({"mesh_dimensions": (MeshDimensionProto("x", 2**32), MeshDimensionProto("y", 2**32))}, SizeOverflowError),
        ({"global_device_ids": (1, 0)}, MeshError),
        ({"global_device_ids": (-1, 0)}, MeshError),
        ({"global_device_ids": (0,)}, MeshError),
        ({"local_device_ids": (0, 7)}, MeshError),
        ({"local_device_ids": (0,)}, MeshError),
        ({"local_devices": ("CPU:0", "zz")}, MeshError),
        ({"local_devices": ("CPU:0", "GPU:1")}, MeshError),
        ({"global_devices": ("CPU:0",)}, MeshError),
        ({"single_device": "CPU:0"}, MeshError),
        ({"use_xla_spmd": True}, MeshError),
        ({"name": "a|b"}, MeshError),
    ],
)
def test_messages_that_break_the_rules_of_a_mesh(change: dict[str, Any], error: type[Exception]) -> None:
    fields = {name: getattr(GOOD, name) for name in GOOD.__dataclass_fields__}
    assert Mesh.from_proto(GOOD).size == 2
    with pytest.raises(error):
        Mesh.from_proto(MeshProto(**{**fields, **change}))
    with pytest.raises(error):
        Layout.from_proto(LayoutProto((), MeshProto(**{**fields, **change}), 1))


def test_messages_that_break_the_rules_of_a_layout() -> None:
    for specs, mesh, layout_type in [
        (("q",), GOOD, 1),
        (("x", "x"), GOOD, 1),
        ((), GOOD, 0),
        ((), GOOD, 3),
        (("unsharded",), None, 0),
        ((), None, 1),
        (("x",), MeshProto(single_device="CPU:0"), 3),
    ]:
        message = LayoutProto(tuple(ShardingSpec(spec) for spec in specs), mesh, layout_type)
        with pytest.raises(LayoutError):
            Layout.from_proto(message)


def test_fields_of_the_messages() -> None:
    mesh = Mesh(["x"], np.arange(2), [0, 1], ["TPU:0", "TPU:1"], "m", ["TPU:0", "TPU:1"], True)
    message = mesh.as_proto()
    assert message == MeshProto(
        mesh_dimensions=(MeshDimensionProto("x", 2),),
        global_device_ids=(0, 1),
        local_device_ids=(0, 1),
        local_devices=("TPU:0", "TPU:1"),
        global_devices=("TPU:0", "TPU:1"),
        name="m",
        use_xla_spmd=True,
    )
    assert MeshProto.FromString(message.SerializeToString(deterministic=True)) == message
    layout = Layout(["x"], mesh).to_parted().as_proto()
    assert layout == LayoutProto((ShardingSpec("x"),), message, LayoutProto.LayoutType.PARTED)
    assert LayoutProto.FromString(layout.SerializeToString()) == layout
    # A message without fields has no bytes: each is what protocol buffers take for one that is left out.
    assert LayoutProto().type == LayoutProto.LayoutType.UNKNOWN
    assert LayoutProto().SerializeToString() == MeshProto().SerializeToString() == b""
    assert (LayoutProto.FromString(b""), MeshProto.FromString(b"")) == (LayoutProto(), MeshProto())


@pytest.mark.parametrize("given", ["TPU:0", b"TPU:0", 7, None])
def test_repeated_fields_are_sequences(given: Any) -> None:
    for field in ("mesh_dimensions", "global_device_ids", "local_device_ids", "local_devices", "global_devices"):
        with pytest.raises(TypeError, match=f"{field} must be a sequence, got {type(given).__name__}"):
            MeshProto(**{field: given})
    with pytest.raises(TypeError, match=f"sharding_specs must be a sequence, got {type(given).__name__}"):
        LayoutProto(given)


# Each of these takes TensorFlow, or a reader that goes back over the text, far longer or far more memory.
@pytest.mark.heavy
@pytest.mark.parametrize(
    ("read", "make"),
    [
        (Mesh.from_string, lambda: "|" * 10_000_000),
        (Mesh.from_string, lambda: "m|" + "," * 10_000_000 + "|0|0|CPU:0"),
        (Mesh.from_string, lambda: "m|" + ",".join(f"a{i}=1" for i in range(100_000)) + "|0|0|CPU:0"),
        (Mesh.from_string, lambda: "m|x=5000000|" + ",".join(["0"] * 5_000_000) + "|0|CPU:0"),
        (Mesh.from_string, lambda: "m|x=1|0|0|" + "CPU:0," * 1_700_000),
        (Mesh.from_string, lambda: "m|x=1|0|0|" + ",".join(["GPU:1", "GPU:0"] * 850_000)),
        (Mesh.from_string, lambda: "/" * 10_000_000),
        (Mesh.from_string, lambda: "m|x=" + "9" * 10_000_000 + "|0|0|CPU:0"),
        (Layout.from_string, lambda: "sharding_specs:" + "unsharded," * 100_000 + " mesh:|x=1|0|0|CPU:0"),
        (Layout.from_string, lambda: " mesh:" * 1_700_000),
        (DeviceSpec.from_string, lambda: "job:" * 2_500_000),
        (MeshProto.FromString, lambda: b"\x7b" * 10_000_000),
        (MeshProto.FromString, lambda: b"\x0a\x00" * 5_000_000),
        (LayoutProto.FromString, lambda: b"\x0a\x00" * 5_000_000),
        (Layout.from_str, lambda: b"\x12\x02*\x00" * 2_500_000),
        (Layout.from_str, lambda: b"\x12\x85\xad\xe2\x04" + b"\x12\x80\xad\xe2\x04" + bytes(10_000_000)),
    ],
)
def test_long_inputs_end_soon(read: Callable[[Any], Any], make: Callable[[], Any]) -> None:
    data = make()
    with linear(), pytest.raises(ShardwiseError) as caught:
        read(data)
    assert len(str(caught.value)) < 1000


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from Linux's /proc")
def test_long_inputs_need_little_memory() -> None:
    program = """
from shardwise import ShardwiseError
from shardwise.dtensor import Layout, Mesh
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) // 1024 for line in status if line.startswith("VmHWM"))
before = peak()
for read, data in [
    (Mesh.from_string, "|" * 10_000_000),
    (Mesh.from_string, "m|x=5000000|" + "0," * 2_500_000 + "0|" + "0," * 2_500_000 + "0|CPU:0"),
    (Mesh.from_string, "m|x=1|0|0|" + ",".join(["GPU:1", "GPU:0"] * 850_000)),
    (Layout.from_str, b"\\x12\\x02*\\x00" * 2_500_000),
    (Layout.from_str, b"\\x12\\x85\\xad\\xe2\\x04" + b"\\x12\\x80\\xad\\xe2\\x04" + bytes(10_000_000)),
    (Layout.from_str, b"\\x0a\\x00" * 5_000_000),
]:
    try:
        read(data)
    except ShardwiseError:
        pass
    else:
        raise SystemExit("read")
print(peak() - before)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(result.stdout) < 256


@settings(deadline=None)
@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    for read in (Mesh.from_string, Layout.from_string, DeviceSpec.from_string, Mesh.from_device):
        try:
            read(text)
        except ShardwiseError:
            continue


@settings(deadline=None)
@given(st.binary())
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for read in (MeshProto.FromString, LayoutProto.FromString, Layout.from_str):
        try:
            read(data)
        except ShardwiseError:
            continue


@pytest.mark.heavy
@settings(max_examples=300, deadline=None)
@given(layouts(), st.data())
def test_spoiled_texts_are_refused_or_read_as_they_stand(layout: Layout, data: st.DataObject) -> None:
    text = data.draw(spoiled(layout.to_string()))
    with contextlib.suppress(ShardwiseError):
        assert Layout.from_string(text).to_string() == text
    text = data.draw(spoiled(layout.mesh.to_string()))
    try:
        mesh = Mesh.from_string(text)
        assert mesh.to_string() == text or "*" in text
    except ShardwiseError:
        pass


@pytest.mark.heavy
@settings(max_examples=300, deadline=None)
@given(layouts(), st.data())
def test_spoiled_bytes_are_refused_or_read(layout: Layout, data: st.DataObject) -> None:
    spoilt = data.draw(spoiled_bytes(layout.serialized_string()))
    try:
        read = Layout.from_str(spoilt)
        assert Layout.from_str(read.serialized_string()) == read
    except ShardwiseError:
        pass
    spoilt = data.draw(spoiled_bytes(layout.mesh.as_proto().SerializeToString()))
    try:
        message = MeshProto.FromString(spoilt)
        assert MeshProto.FromString(message.SerializeToString()) == message
        mesh = Mesh.from_proto(message)
        assert Mesh.from_string(mesh.to_string()) == mesh
    except ShardwiseError:
        pass


@settings(deadline=None)
@given(meshes(), st.data())
def test_cut_off_bytes_never_mean_the_same(mesh: Mesh, data: st.DataObject) -> None:
    whole = mesh.as_proto().SerializeToString()
    if whole:
        cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
        with contextlib.suppress(ShardwiseError):
            assert Mesh.from_proto(MeshProto.FromString(cut)) != mesh


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.binary(max_size=3),
    st.lists(st.integers(-1, 3) | st.sampled_from(["x", "CPU:0", None, 1.5]), max_size=3),
    st.sampled_from([np.arange(2), np.zeros(2), np.array("x"), object(), Mesh.from_string("|x=1|0|0|CPU:0")]),
)  # fmt: skip


@pytest.mark.heavy
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_arguments_give_a_documented_exception(data: st.DataObject) -> None:
    mesh = Mesh.from_string("|x=2|0,1|0,1|CPU:0,CPU:1")
    layout = Layout(["x", "unsharded"], mesh)
    calls: list[tuple[Callable[..., Any], int]] = [
        (Mesh, 7),
        (Mesh.from_string, 1),
        (Mesh.from_proto, 1),
        (Mesh.from_device, 1),
        (mesh.coords, 1),
        (mesh.device_location, 1),
        (mesh.dim_size, 1),
        (Layout, 2),
        (lambda specs: Layout(specs, mesh), 1),
        (lambda *more: Layout.batch_sharded(mesh, *more), 3),
        (lambda rank: Layout.replicated(mesh, rank), 1),
        (Layout.from_str, 1),
        (layout.num_shards, 1),
        (layout.delete, 1),
        (layout.offset_tuple_to_global_index, 1),
        (layout.local_shape_from_global_shape, 1),
        (layout.global_shape_from_local_shape, 1),
        (DeviceSpec, 5),
    ]
    function, arguments = data.draw(st.sampled_from(calls))
    with contextlib.suppress(ShardwiseError, TypeError, IndexError):
        function(*(data.draw(ANYTHING) for _ in range(arguments)))


@pytest.mark.parametrize("wrong", [{"name": 1}, {"use_xla_spmd": 1}, {"use_xla_spmd": "no"}, {"single_device": None}])
def test_messages_are_made_of_the_types_of_their_fields(wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(wrong))):
        MeshProto(**wrong)
