"""Meshes and layouts of the DTensor dialect beside TensorFlow's; its mesh of 2**20 devices takes it ten seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy as np
from figures import Goal, Row, at_most, faster
from part import QUICK, main
from tensorflow.dtensor.python import layout as tensorflow
from timing import compare

from shardwise import dtensor

TENSORFLOW = "TensorFlow"
LARGE, LARGE_NAME = ((128, 128), "2¹⁴") if QUICK else ((1024, 1024), "2²⁰")

Work = Callable[[], Any]


def arguments(shape: tuple[int, ...]) -> tuple[Any, ...]:
    """The arguments of a mesh of this shape."""
    ids = np.arange(int(np.prod(shape)))
    devices = [f"/job:localhost/replica:0/task:0/device:TPU:{index}" for index in range(ids.size)]
    return list("xyz"[: len(shape)]), ids.reshape(shape), ids.tolist(), devices


def four_thousand() -> Iterator[Row]:
    given = arguments((64, 64))
    ours, theirs = dtensor.Mesh(*given), tensorflow.Mesh(*given)
    our_layout, their_layout = dtensor.Layout(["x", "y"], ours), tensorflow.Layout(["x", "y"], theirs)
    mesh_text, layout_text = ours.to_string(), our_layout.to_string()
    data = our_layout.serialized_string()
    proto = their_layout.as_proto()
    index = (63, 62)
    assert (mesh_text, layout_text) == (theirs.to_string(), their_layout.to_string())
    assert data == proto.SerializeToString(deterministic=True)
    assert ours.unravel_index() == theirs.unravel_index()
    assert our_layout.offset_to_shard() == their_layout.offset_to_shard()
    assert our_layout.offset_tuple_to_global_index(index) == their_layout.offset_tuple_to_global_index(index)
    assert np.array_equal(ours.coords(4000), theirs.coords(4000))
    rows, columns = (ours.coords(np.arange(4096))[:, axis].tolist() for axis in (0, 1))

    def tuples() -> Any:
        return list(zip(rows, columns, strict=True))

    def from_proto() -> Any:
        return tensorflow.Layout.from_proto(tensorflow.layout_pb2.LayoutProto.FromString(data))

    def to_proto() -> Any:
        return their_layout.as_proto().SerializeToString(deterministic=True)

    cases: list[tuple[str, Work, Work, Goal, tuple[str, Work] | None]] = [
        ("`Mesh(...)` from strings", lambda: dtensor.Mesh(*given), lambda: tensorflow.Mesh(*given), faster(5), None),
        ("`unravel_index()`", ours.unravel_index, theirs.unravel_index, faster(4), None),
        ("`local_device_locations()`", ours.local_device_locations, theirs.local_device_locations, faster(4), None),
        (
            "`offset_to_shard()`",
            our_layout.offset_to_shard,
            their_layout.offset_to_shard,
            faster(12),
            ("its tuples alone", tuples),
        ),
        (
            "`offset_tuple_to_global_index`, one call",
            lambda: our_layout.offset_tuple_to_global_index(index),
            lambda: their_layout.offset_tuple_to_global_index(index),
            faster(8),
            None,
        ),
        ("`coords(k)`, one call", lambda: ours.coords(4000), lambda: theirs.coords(4000), faster(100), None),
        ("`Mesh.to_string`", ours.to_string, theirs.to_string, faster(2), None),
        (
            "`Mesh.from_string`",
            lambda: dtensor.Mesh.from_string(mesh_text),
            lambda: tensorflow.Mesh.from_string(mesh_text),
            faster(2),
            None,
        ),
        ("`Layout.to_string`", our_layout.to_string, their_layout.to_string, faster(2), None),
        (
            "`Layout.from_string`",
            lambda: dtensor.Layout.from_string(layout_text),
            lambda: tensorflow.Layout.from_string(layout_text),
            faster(2),
            None,
        ),
        ("`serialized_string`", our_layout.serialized_string, to_proto, faster(2), None),
        ("`from_str`", lambda: dtensor.Layout.from_str(data), from_proto, faster(2), None),
    ]
    for work, our_work, their_work, goal, floor in cases:
        yield compare(f"{work}, 4,096 devices", our_work, TENSORFLOW, their_work, goal=goal, floor=floor)


def many_indices() -> Row:
    layout = dtensor.Layout(["x", "y"], dtensor.Mesh(*arguments((64, 64))))
    indices = np.random.default_rng(0).integers(0, 64, (100_000, 2))

    def by_numpy() -> Any:
        return np.ravel_multi_index((indices[:, 0], indices[:, 1]), (64, 64))

    assert np.array_equal(layout.offset_tuple_to_global_index(indices), by_numpy())
    return compare(
        "`offset_tuple_to_global_index`, 100,000 at once",
        lambda: layout.offset_tuple_to_global_index(indices),
        "numpy `ravel_multi_index`",
        by_numpy,
        goal=at_most(1.5e-3),
        floor=("copying them", indices.copy),
    )


def a_million() -> Iterator[Row]:
    given = arguments(LARGE)
    ours, theirs = dtensor.Mesh(*given), tensorflow.Mesh(*given)
    our_layout, their_layout = dtensor.Layout(["x", "y"], ours), tensorflow.Layout(["x", "y"], theirs)
    pairs: list[tuple[str, Work, Work]] = [
        ("`Mesh(...)`", lambda: dtensor.Mesh(*given), lambda: tensorflow.Mesh(*given)),
        ("`Layout(...)`", lambda: dtensor.Layout(["x", "y"], ours), lambda: tensorflow.Layout(["x", "y"], theirs)),
        ("`offset_to_shard()`", our_layout.offset_to_shard, their_layout.offset_to_shard),
    ]
    for work, our_work, their_work in pairs:
        name = f"{work}, {LARGE_NAME} devices"
        yield compare(name, our_work, TENSORFLOW, their_work, goal=faster(10), turns=2)


def memory(library: str) -> int:
    """The bytes by which a large mesh, a layout and its shards make a fresh process grow."""
    program = f"import bench_dtensor; bench_dtensor.grow({library!r})"
    command = [sys.executable, "-c", program, *(["--quick"] if QUICK else [])]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    return int(result.stdout)


def grow(library: str) -> None:
    module = dtensor if library == "shardwise" else tensorflow
    given = arguments(LARGE)
    before = peak()
    layout = module.Layout(["x", "y"], module.Mesh(*given))
    layout.offset_to_shard()
    print(peak() - before)


def peak() -> int:
    """The most memory that this process has had, in bytes; 0 where there is no Linux to say it."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def rows() -> Iterator[Row]:
    yield from four_thousand()
    yield many_indices()
    yield from a_million()
    name = f"the memory of mesh, layout and `offset_to_shard()`, {LARGE_NAME} devices"
    yield Row(name, TENSORFLOW, memory("shardwise"), memory(TENSORFLOW), unit="B")


if __name__ == "__main__":
    main(rows)
