"""Arguments: arbitrary objects, odd ones, and nearly right ones, chosen by the name of the parameter."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

import shardwise as sw
from shardwise import dtensor as dt
from shardwise.interop import hlo, torch
from tests.fuzz.limits import Mine
from tests.store.conftest import encode

MESH = sw.DeviceMesh((2, 3), ("x", "y"))
OTHER = sw.DeviceMesh((3, 2), ("a", "x"), ["d5", ("host", 1), 7, "d2", "d1", "d0"])
#: More devices than can be listed, and more elements than there are in memory.
HUGE = sw.DeviceMesh((1 << 31, 1 << 31), ("x", "y"))
TILED = dt.Mesh.from_string("m|x=2,y=3|0,1,2,3,4,5|0,1,2,3,4,5|CPU:0,CPU:1,CPU:2,CPU:3,CPU:4,CPU:5")
ONE_CLIENT = dt.Mesh.from_string("m|x=2|4,5|5|/job:a/task:1/device:GPU:0")
SINGLE = dt.Mesh.from_device("/job:localhost/replica:0/task:0/device:CPU:0")
FOLDER = Path(tempfile.mkdtemp(prefix="shardwise-fuzz-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
CHECKPOINT = FOLDER / "good.safetensors"
HEADER = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b/é": {"dtype": "F4", "shape": [4], "data_offsets": [24, 26]},
}


BOUND = [sw.TensorLayout(axes, mesh) for mesh in (MESH, HUGE) for axes in [(), (None,), ("x", "y"), (("y", "x"), None)]]
BOUND += [sw.TensorLayout(("a", "x"), OTHER), sw.TensorLayout((None, "y"), MESH, unreduced=["x"])]
ROWS, COLUMNS = sw.TensorLayout(("x", None), MESH), sw.TensorLayout((None, "y"), MESH)
PARTITIONS = [layout.partition([6] * layout.rank, "ceil") for layout in BOUND] + [
    ROWS.partition((6, 6)),
    ROWS.partition((0, 5), "chunk"),
    ROWS.partition((1 << 31, 1 << 31)),
    ROWS.partition((5, 7), "balanced"),
]
SHARDED = [
    sw.ShardedArray(p, p.views(np.arange(p.size).reshape(p.shape)))
    for p in (layout.partition([6] * layout.rank) for layout in BOUND if layout.device_mesh != HUGE)
]
SHARDED.append(sw.distribute_tensor(np.arange(12.0).reshape(6, 2)[::-1], ROWS))
LINE, SUMS = (
    sw.TensorLayout(("x",), MESH).partition((6,)),
    sw.TensorLayout((None,), MESH, unreduced=["x"]).partition((6,)),
)
PLANS = [
    sw.plan_reshard(ROWS.partition((6, 6)), COLUMNS.partition((6, 6))),
    sw.plan_reshard(SUMS, LINE),
    sw.plan_reshard(sw.Tiling.from_boxes((6,), [[[0, 3]], [[3, 6]]]), LINE),
    sw.plan_reshard(sw.TensorLayout(("a",), OTHER).partition((7,), "ceil"), BOUND[1].partition((7,), "chunk")),
]
DTENSOR_LAYOUTS = [
    dt.Layout(["x", dt.UNSHARDED], TILED),
    dt.Layout(["y", "x"], TILED),
    dt.Layout([dt.MATCH, "x"], TILED),
    dt.Layout([], TILED),
    dt.Layout(["x"], ONE_CLIENT),
    dt.Layout.from_single_device_mesh(SINGLE),
    dt.Layout.from_string("empty_layout"),
]


def _unbound() -> sw.TensorLayout:
    """A layout whose mesh may still be set; made anew, because a call may set it."""
    return sw.TensorLayout(("x", None))


def _layout_map() -> sw.LayoutMap:
    layout_map = sw.LayoutMap(MESH)
    layout_map["kernel$"] = (None, "x")
    layout_map["bias"] = ("y",)
    return layout_map


def _variable(shape: tuple[int, ...]) -> sw.Variable:
    return sw.Variable(shape, "f4", np.zeros)


def _checkpoint() -> sw.store.StoredCheckpoint:
    good = encode(HEADER, bytes(26))
    # A call may have put a rules file in its place. A new file, for the old one may still be mapped.
    if not CHECKPOINT.exists() or CHECKPOINT.read_bytes() != good:
        CHECKPOINT.unlink(missing_ok=True)
        CHECKPOINT.write_bytes(good)
    return sw.open_checkpoint(CHECKPOINT)


def _dtensor_map() -> dt.LayoutMap:
    layout_map = dt.LayoutMap(TILED)
    layout_map["kernel"] = dt.Layout(["x", dt.UNSHARDED], TILED)
    return layout_map


class Odd:
    """An object whose every hook raises, or answers with what it should not."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self.answer = answer

    def _do(self, *_: Any, **__: Any) -> Any:
        return self.answer()

    __index__ = __int__ = __float__ = __len__ = __iter__ = __getitem__ = __array__ = __fspath__ = __dlpack__ = _do
    __str__ = __repr__ = __contains__ = __bool__ = __next__ = keys = read = write = SerializeToString = shape = _do

    def __eq__(self, other: object) -> Any:
        return self.answer()

    def __hash__(self) -> int:
        answer = self.answer()
        return answer if isinstance(answer, int) else 1


def _give(value: Any) -> Any:
    return value


def _raise() -> Any:
    raise Mine("from an odd object")


class Text(str):
    """A string of another class."""


def _stream() -> Iterator[Any]:
    yield from ("x", 1, None)


SCALARS: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 6, 255, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, -(2**63), 10**30, 0.0, 1.5,
    float("nan"), float("inf"), -1e308, 1j, "", "x", "y", "a", "z", "cpu:0", "cpu:5", "cpu:6", "d1", "unsharded",
    "match", "any", "even", "ceil", "chunk", "balanced", "floor", "x:(1)2", "float32", "bfloat16", "int4", "O",
    "V0", "f4,f8", "kernel",
    "bias", ".*", "(", "(a+)+$", "\0", "\ud800", "é", "轴" * 100, "x" * 5000, "CPU", "GPU:0", "good.safetensors",
    "missing/file", b"", b"\xff", b"x=2", bytearray(b"x"), ..., NotImplemented, object(), int, str, np.float32,
    np.int64(1), np.uint64(2**64 - 1), np.float32(1), np.bool_(True), np.str_("x"), np.datetime64("NaT"), slice(None),
    slice(0, 2), slice(2, 0, -1), range(3), range(10**12), Text("x"), FOLDER, CHECKPOINT, frozenset(["x"]),
]  # fmt: skip

ARRAYS: list[Callable[[], Any]] = [
    lambda: np.arange(6).reshape(2, 3),
    lambda: np.arange(36.0).reshape(6, 6),
    lambda: np.asfortranarray(np.ones((6, 6), np.int8)),
    lambda: np.arange(72).reshape(6, 12)[::-1, ::-2],
    lambda: np.zeros((), np.float32),
    lambda: np.zeros((0, 6)),
    lambda: np.zeros((6, 6), ">i4"),
    lambda: np.zeros((6, 6), [("a", "i1"), ("b", "f8")]),
    lambda: np.array([["x", None], [1, 2.5]], object),
    lambda: np.array(["a", "bc"]),
    lambda: np.zeros(6, "V0"),
    lambda: np.zeros(6, "M8[s]"),
    lambda: np.ma.masked_array(np.arange(6), np.arange(6) % 2 == 1),
    lambda: np.zeros((6, 6), ml_dtypes.bfloat16),
    lambda: np.zeros((6, 6), ml_dtypes.float8_e4m3fn),
    lambda: np.broadcast_to(np.int8(0), (1 << 40,)),
    lambda: np.broadcast_to(np.float64(0), (6, 6)),
    lambda: np.lib.stride_tricks.as_strided(np.zeros(8), (6, 6), (8, 0)),
    lambda: np.frombuffer(bytes(289), np.uint8)[1:].view("f8").reshape(6, 6),
    lambda: np.array([0, 1, 2, 35]),
    lambda: np.array([0, -1]),
    lambda: np.array([2**63], np.uint64),
    lambda: np.array([[0, 6], [0, 6]]),
    lambda: np.zeros((6, 2, 2), np.int64),
    lambda: np.zeros((1,) * 33),
    lambda: memoryview(b"abc"),
]


def _same(values: list[Any]) -> list[Callable[[], Any]]:
    """Makers of values that no call can change."""
    return [partial(_give, value) for value in values]


SHARDWISE: list[Callable[[], Any]] = [
    *_same([MESH, OTHER, HUGE, TILED, ONE_CLIENT, SINGLE, *BOUND, *PARTITIONS, *SHARDED, *PLANS, *DTENSOR_LAYOUTS]),
    _unbound,
    lambda: sw.TensorLayout(()),
    _layout_map,
    _dtensor_map,
    _checkpoint,
    lambda: _checkpoint()["a"],
    lambda: _variable((6, 6)),
    lambda: _variable(()),
    lambda: sw.initialize_variables({"kernel": _variable((2, 3))})["kernel"],
    lambda: _layout_map().report({"kernel": ((4, 4), "float32"), "free": ((3,), None)}),
    lambda: _layout_map().report({"kernel": ((4, 4), "float32")}).tensors[0],
    lambda: PLANS[0][0],
    lambda: sw.reshard.LinkModel(),
    lambda: sw.reshard.Collective("all-gather", ("x",), 0),
    lambda: sw.reshard.CollectiveStep("all-gather", ("x",), 0, None, sw.TensorLayout((None,), MESH), 5, 0.5),
    lambda: sw.reshard.CollectiveCost(()),
    lambda: sw.reshard.CollectiveObstacle("devices", "other devices"),
    lambda: SHARDED[0].shards[0],
    lambda: dt.copy_to_mesh(np.arange(36).reshape(6, 6), DTENSOR_LAYOUTS[0]),
    lambda: dt.MeshDimension("x", 2),
    lambda: TILED.as_proto(),
    lambda: DTENSOR_LAYOUTS[0].as_proto(),
    lambda: dt.MeshDimensionProto("x", 2),
    lambda: dt.ShardingSpec("x"),
    lambda: dt.DeviceSpec.from_string("/job:a/task:1/device:GPU:0"),
    lambda: hlo.parse_hlo("{devices=[2,3]<=[6]}"),
    lambda: hlo.Iota((2, 3), (1, 0)),
    lambda: torch.Shard(0),
    lambda: torch.StridedShard(0, 2),
    lambda: torch.Replicate(),
    lambda: torch.Partial(),
]

CALLABLES: list[Callable[[], Any]] = [
    lambda: np.zeros,
    lambda: np.ones,
    lambda: _raise,
    lambda: print,
    lambda: int,
    lambda: lambda *args, **kwargs: None,
    lambda: lambda shape, dtype=None: np.full(shape, 3, dtype),
    lambda: lambda shape, dtype=None, index=None: np.zeros(shape, dtype),
]

#: What such an object answers with.
ANSWERS: list[Any] = [None, -1, 2, 10**30, "x", 1.5, [], (), b"x", NotImplemented]

ODD: list[Callable[[], Any]] = [
    *(partial(Odd, partial(_give, answer)) for answer in ANSWERS),
    lambda: Odd(_raise),
    lambda: Odd(lambda: np.arange(6)),
    _stream,
]


def made(makers: list[Callable[[], Any]]) -> st.SearchStrategy[Any]:
    """What one of the functions makes, anew each time."""
    return st.sampled_from(makers).map(lambda maker: maker())


ATOMS = st.one_of(st.sampled_from(SCALARS), st.integers(-3, 8), st.text(max_size=4), made(ODD))
ANYTHING = st.one_of(
    ATOMS,
    made(ARRAYS),
    made(SHARDWISE),
    made(CALLABLES),
    st.lists(ATOMS, max_size=4),
    st.lists(ATOMS, max_size=4).map(tuple),
    st.lists(st.lists(ATOMS, max_size=3), max_size=3),
    st.dictionaries(st.sampled_from(["kernel", "bias", "x", "y", "", 0, 1, None]), ATOMS, max_size=3),
    made(SHARDWISE).map(lambda value: [value, value]),
    made(SHARDWISE).map(lambda value: {"kernel": value}),
)

SIZES = st.one_of(
    st.integers(0, 7), st.sampled_from([6, 12, 2**31, 2**62, 2**63 - 1, 2**63, -1, np.int64(6), True, 6.0])
)
AXES = st.sampled_from(["x", "y", None, (), ("x",), ("x", "y"), ("y", "x"), "z", "unsharded", "a", 0])
SHAPES = st.lists(SIZES, max_size=4).flatmap(
    lambda sizes: st.sampled_from([sizes, tuple(sizes), np.array(sizes, object)])
)
FILES = st.sampled_from(
    [CHECKPOINT, str(CHECKPOINT), FOLDER / "rules.toml", FOLDER, FOLDER / "missing" / "file", "/dev/null", "\0"]
)

#: By the name of a parameter, or a part of the name: the sort of thing that it takes.
NEARLY_RIGHT: dict[str, st.SearchStrategy[Any]] = {
    "mesh": st.sampled_from([MESH, OTHER, HUGE, TILED, ONE_CLIENT, SINGLE, {"x": 2, "y": 3}, [("x", 2)]]),
    "partition": st.sampled_from(PARTITIONS),
    "src_shards": st.sampled_from(SHARDED),
    "sharded": st.sampled_from(SHARDED),
    "layout_map": made([_layout_map, _dtensor_map]),
    "layout": made([_unbound, *_same([*BOUND, *DTENSOR_LAYOUTS])]),
    "shards": st.lists(made(ARRAYS), max_size=7),
    "src": st.sampled_from(PARTITIONS),
    "dst": st.sampled_from(PARTITIONS),
    "shape": SHAPES,
    "axes": st.one_of(st.lists(AXES, max_size=4), st.lists(AXES, max_size=4).map(tuple), AXES),
    "axis_names": st.lists(st.sampled_from(["x", "y", "z", ""]), max_size=4),
    "unreduced": st.lists(st.sampled_from(["x", "y"]), max_size=2),
    "uneven": st.sampled_from(["even", "ceil", "chunk", "balanced", "floor", "odd"]),
    "device": st.sampled_from(
        ["cpu:0", "cpu:5", "cpu:6", "cpu:+1", "cpu:٣", "cpu:" + "9" * 30, "d1", ("host", 1), 7, "GPU:0"]
    ),
    "dtype": st.sampled_from(
        ["f4", np.float64, np.dtype("i1"), ml_dtypes.bfloat16, "O", "V0", "S0", None, [("a", "f4")]]
    ),
    "offsets": st.one_of(SIZES, st.lists(SIZES, max_size=3), made(ARRAYS)),
    "ids": st.one_of(SIZES, st.lists(SIZES, max_size=3), made(ARRAYS)),
    "index": st.one_of(SIZES, st.lists(SIZES, max_size=3)),
    "rank": SIZES,
    "tensor": st.one_of(made(ARRAYS), st.lists(made(ARRAYS), max_size=6)),
    "array": made(ARRAYS),
    "boxes": st.one_of(
        made(ARRAYS), st.lists(st.lists(st.lists(SIZES, min_size=2, max_size=2), max_size=2), max_size=3)
    ),
    "file": FILES,
    "path": st.one_of(st.sampled_from(["kernel", "layer/kernel", "bias", ""]), FILES),
    "text": st.sampled_from(
        ["", "x=2", "{replicated}", "#sdy.sharding<@mesh, [{}]>", TILED.to_string(), "sharding_specs:x, mesh:"]
    ),
    "names": st.dictionaries(
        st.sampled_from(["kernel", "a.kernel", "bias", ""]), st.tuples(SHAPES, st.sampled_from(["f4", None, "?", 3]))
    ),
    "tree": st.dictionaries(
        st.sampled_from(["kernel", "bias", 0, ""]), st.one_of(made(ARRAYS), made(SHARDWISE)), max_size=3
    ),
    "initializer": made(CALLABLES),
    "progress": made(CALLABLES),
    "key": st.sampled_from(["kernel", "bias", "(", "a|b", "\\d+", ""]),
    "box": st.lists(st.sampled_from([slice(0, 1), slice(1, 3), slice(None), slice(0, 99), 1]), max_size=3).map(tuple),
    "name": st.sampled_from(["a", "b/é", "x", "y", "all_gather", ""]),
    "placements": st.lists(
        made([torch.Replicate, torch.Partial, lambda: torch.Shard(0), lambda: torch.StridedShard(1, 2)]), max_size=3
    ),
    "data": st.one_of(
        st.binary(max_size=8),
        st.sampled_from([TILED.as_proto().SerializeToString(), DTENSOR_LAYOUTS[0].serialized_string()]),
    ),
    "budget": SIZES,
    "max_bytes_in_flight": SIZES,
    "plan": st.dictionaries(
        st.sampled_from(["layers.*.q", "norm"]), st.sampled_from(["colwise", "rowwise", "local", "?", 1])
    ),
}


def argument(name: str) -> st.SearchStrategy[Any]:
    """Mostly what a parameter of this name takes, or nearly; else anything."""
    fitting = next((sort for part, sort in NEARLY_RIGHT.items() if part == name), None)
    if fitting is None:
        fitting = next((sort for part, sort in NEARLY_RIGHT.items() if part in name), None)
    return ANYTHING if fitting is None else st.one_of(fitting, fitting, fitting, ANYTHING)
