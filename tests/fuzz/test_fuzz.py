"""The fuzzers for a moment each, and everything that they ever found."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise import dtensor as dt
from shardwise import store
from shardwise.interop import hlo, torch, translate
from tests.fuzz import command, parsers
from tests.fuzz.__main__ import FUZZERS
from tests.fuzz.arguments import BOUND, DTENSOR_LAYOUTS, FOLDER, HUGE, MESH, PLANS, ROWS, SHARDED, Odd
from tests.fuzz.surface import members, public_classes, public_names

linux = pytest.mark.skipif(sys.platform != "linux", reason="the limits of time and memory are Linux's")


@pytest.mark.slow
@linux
def test_every_fuzzer_runs_and_finds_nothing() -> None:
    """In a process of its own, which a fault would end. `make fuzz` runs them for as long as one likes."""
    command = [sys.executable, "-m", "tests.fuzz", "--seconds", "0.2", "--seed", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^(?:.*\r)?(\w+) .*nothing found$", done.stdout, re.MULTILINE) == list(FUZZERS)


@pytest.mark.parametrize("name", parsers.PARSERS)
def test_kept_inputs_are_read_or_refused(name: str) -> None:
    for data in parsers.corpus(name):
        parsers.perform(name, data)


@linux
@pytest.mark.heavy
@pytest.mark.parametrize("name", command.NAMES)
def test_the_command_ends_with_a_status_whatever_a_file_says(name: str) -> None:
    statuses = [command.spoil((name, seed))[0] for seed in range(8)]
    # Of two little is read by what is done here; of each other something is refused.
    assert any(statuses) or name in ("configuration", "manifest of dcp")


def test_each_corpus_has_inputs_that_are_read() -> None:
    for name, parser in parsers.PARSERS.items():
        refused = 0
        for data in parsers.corpus(name):
            try:
                parser.check(data)
            except sw.ShardwiseError:
                refused += 1
        assert refused <= len(parsers.corpus(name)) - 2, name
    assert {path.stem for path in parsers.CORPUS.glob("*.txt")} == set(parsers.PARSERS)


def test_the_walk_finds_what_the_packages_export() -> None:
    names = {str(name) for name in public_names()}
    assert {
        "shardwise.DeviceMesh",
        "shardwise.plan_reshard",
        "shardwise.dtensor.Layout",
        "shardwise.interop.hlo.parse_hlo",
    } <= names
    found = {str(member) for kind in public_classes() for member in members(kind)}
    assert {
        "DeviceMesh.coordinates",
        "Partition.locate",
        "LayoutMap.__getitem__",
        "Layout.from_string",
        "LayoutMap.pop",
    } <= found
    assert len(names) > 60
    assert len(found) > 250


#: Has no truth of its own, and no hash.
SEVERAL: Any = np.arange(6)

#: Calls of wrong types that gave an `AttributeError`, a `SyntaxError`, a `ValueError` or the like from within.
WRONG_TYPES: list[tuple[str, Callable[[], Any]]] = [
    ("sharded", lambda: sw.array.gather([])),  # type: ignore[arg-type]
    ("sharded", lambda: sw.array.all_gather(0)),  # type: ignore[arg-type]
    ("sharded", lambda: sw.array.all_reduce(None)),  # type: ignore[arg-type]
    ("sharded", lambda: sw.array.reduce_scatter("x", "x", 0)),  # type: ignore[arg-type]
    ("returned non-int", lambda: PLANS[0].rounds(Odd(lambda: "x"), "f4")),  # type: ignore[arg-type]
    ("dim", lambda: sw.array.reduce_scatter(SHARDED[1], "x", "0")),  # type: ignore[arg-type]
    ("links", lambda: sw.plan_reshard(ROWS.partition((6, 6)), ROWS.partition((6, 6))).collectives("f4", {})),  # type: ignore[arg-type]
    ("integer", lambda: sw.plan_reshard(ROWS.partition((6, 6)), ROWS.partition((6, 6)))["start"]),  # type: ignore[index]
    ("file", lambda: sw.LayoutMap().to_toml(5)),  # type: ignore[arg-type]
    ("file", lambda: sw.LayoutMap.from_toml({})),  # type: ignore[arg-type]
    ("device_mesh", lambda: dt.Mesh.from_device_mesh(2)),  # type: ignore[arg-type]
    ("dev", lambda: dt.DeviceSpec().make_merged_spec(3)),  # type: ignore[arg-type]
    ("layout", lambda: dt.Layout.from_tensor_layout({})),  # type: ignore[arg-type]
    ("mesh", lambda: dt.Layout.from_tensor_layout(BOUND[0], MESH)),  # type: ignore[arg-type]
    ("to", lambda: translate(ROWS, [Odd(lambda: True)])),  # type: ignore[list-item]
    ("device_type", lambda: dt.create_mesh({"x": 1}, device_type=7)),  # type: ignore[arg-type]
    ("task_id", lambda: dt.full_job_name(np.zeros((2, 3)))),  # type: ignore[arg-type]
    ("devices", lambda: dt.create_mesh({"x": 1}, devices=[np.int64(1)])),
    ("mesh", lambda: torch.mesh_from_torch(8)),
    ("mesh", lambda: torch.read_placements([], {"x": 2}, 0)),  # type: ignore[arg-type]
    ("layout", lambda: torch.from_local_tensors([], {}, [])),  # type: ignore[arg-type]
    ("sharded", lambda: torch.to_local_tensors(None)),  # type: ignore[arg-type]
    ("tensors", lambda: torch.from_local_tensors([5], ROWS, [6, 6])),
    ("tensor", lambda: dt.copy_to_mesh([[1], [2, 3]], DTENSOR_LAYOUTS[0])),
    (r"tensors\[1\]", lambda: dt.pack([[1], [[2], [3, 4]]], DTENSOR_LAYOUTS[4])),
    ("tensor", lambda: sw.distribute_tensor(Odd(lambda: 1), ROWS)),
    ("dtype", lambda: ROWS.partition((6, 6)).nbytes(",f8")),
    ("dtype", lambda: sw.Variable((2,), {"x": 1}, np.zeros)),  # type: ignore[arg-type]
    ("dtype", lambda: sw.plan_reshard(ROWS.partition((6, 6)), ROWS.partition((6, 6))).total_bytes({"kernel": 3})),  # type: ignore[arg-type]
    ("check_replicas", lambda: SHARDED[0].numpy(check_replicas=SEVERAL)),
    ("device_mesh", lambda: ROWS.with_mesh(SEVERAL)),
    ("arrays", lambda: sw.Tiling.from_boxes((6,), [], arrays=SEVERAL)),
    ("side", lambda: PLANS[0].program("cpu:0", SEVERAL)),
    ("metadata", lambda: sw.save_checkpoint("a", {}, metadata=[["k"]])),  # type: ignore[arg-type]
    ("to", lambda: sw.save_checkpoint("a", {}, to=SEVERAL)),
    ("default", lambda: sw.LayoutMap(default=SEVERAL)),
    ("order", lambda: sw.packed.gate_up("x", order=SEVERAL)),
    ("is_box", lambda: torch.LocalShards([[1]], [[0]], Odd(lambda: None))),
    ("offsets", lambda: torch.LocalShards([[1]], [np.zeros((1,) * 33)], [True])),
    ("mappings", lambda: store.StoredCheckpoint(FOLDER, "dcp", SEVERAL)),
    # Values that functions make: wrong ones have no repr, no hash, or no answer to `==`.
    ("box", lambda: sw.reshard.LocalBox("x")),  # type: ignore[arg-type]
    ("window", lambda: sw.reshard.LocalBox((slice(0, 2),), SEVERAL)),
    ("box", lambda: sw.Piece((1,), 0)),  # type: ignore[arg-type]
    ("start", lambda: sw.Piece((slice(0, 2),), SEVERAL)),
    ("box", lambda: sw.reshard.Step("copy", "a", 0, None, None, None)),  # type: ignore[arg-type]
    ("kind", lambda: sw.reshard.Step(SEVERAL, "a", 0, (), None, None)),
    ("peer", lambda: sw.reshard.Step("copy", SEVERAL, 0, (), None, None)),
    ("dst_box", lambda: sw.reshard.Transfer("a", "b", (), (), "x", 1)),  # type: ignore[arg-type]
    ("size", lambda: sw.reshard.Transfer("a", "b", (), (), (), SEVERAL)),
    ("dst_device", lambda: sw.reshard.Transfer("a", SEVERAL, (), (), (), 1)),
    ("steps", lambda: sw.reshard.Program("a", (1,), None, None)),  # type: ignore[arg-type]
    ("src_shape", lambda: sw.reshard.Program("a", (), SEVERAL, None)),
    ("message", lambda: sw.reshard.CollectiveObstacle("devices", None)),  # type: ignore[arg-type]
    ("bytes", lambda: sw.reshard.CollectiveStep("slice", ("x",), bytes=1e300)),  # type: ignore[arg-type]
    ("seconds", lambda: sw.reshard.CollectiveStep("slice", ("x",), seconds=SEVERAL)),
    ("parts", lambda: sw.packed.PackedDim((1,))),  # type: ignore[arg-type]
    ("factors", lambda: replace(sw.packed.part(2), factors=(SEVERAL,))),
    ("blocks", lambda: replace(sw.packed.part(2), blocks=(("q",),))),  # type: ignore[arg-type]
    ("format", lambda: store.VerifyReport(FOLDER, SEVERAL, 0, 0, 0, 0)),
    ("first", lambda: store.Difference("a", "values", SEVERAL)),
    ("free", lambda: store.WriteOutline((), 0, 0, 1, 0, SEVERAL)),
    ("bytes", lambda: store.WriteReport(FOLDER, 0, SEVERAL, 0, 0, 0)),
    ("ranges", lambda: sw.store.Task("", 0, None, (), ((0,),), (), (), (), b"")),  # type: ignore[arg-type]
    ("size", lambda: dt.MeshDimensionProto("x", SEVERAL)),
    ("sharding_spec", lambda: dt.ShardingSpec(SEVERAL)),
    ("mesh_dimensions", lambda: dt.MeshProto((SEVERAL,))),
    ("mesh_config", lambda: dt.LayoutProto((), SEVERAL)),
    ("perm", lambda: hlo.Iota((2,), SEVERAL.reshape(2, 3))),
    ("kind", lambda: hlo.HloSharding(SEVERAL)),
    ("dim", lambda: torch.Shard(SEVERAL)),
    ("split_factor", lambda: torch.StridedShard(0, SEVERAL)),
    ("reduce_op", lambda: torch.Partial(SEVERAL)),
]


@pytest.mark.parametrize(("argument", "call"), WRONG_TYPES)
def test_wrong_types_are_named(argument: str, call: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match=argument):
        call()


def test_the_items_of_a_layout_map_have_a_repr() -> None:
    layout_map = sw.LayoutMap()
    layout_map["kernel"] = ("x",)
    assert repr(layout_map.items()) == "ItemsView([('kernel', TensorLayout(('x',)))])"


def test_a_plan_for_more_devices_than_there_are_addresses() -> None:
    partition = sw.TensorLayout(("x", None), HUGE).partition((6, 6), "ceil")
    with pytest.raises(sw.SizeOverflowError, match=r"4611686018427387904 devices"):
        sw.plan_reshard(partition, partition)


def test_sequences_longer_than_any_memory() -> None:
    """The compiled module would otherwise end the process, for want of memory for what it lists."""
    longest = range(1 << 50)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("shape", lambda: ROWS.partition(longest)),
        ("shape", lambda: sw.DeviceMesh(longest, ["x"])),
        ("global_shape", lambda: DTENSOR_LAYOUTS[0].local_shape_from_global_shape(longest)),
    ]
    for argument, call in calls:
        with pytest.raises(MemoryError, match=f"{argument}: {1 << 50} are too many to list"):
            call()
    with pytest.raises(MemoryError):
        sw.Variable(longest, "f4", np.zeros)
    with pytest.raises(MemoryError):
        sw.LayoutMap().report({"kernel": longest})


def test_meshes_of_more_devices_than_any_memory_holds() -> None:
    with pytest.raises(MemoryError, match=rf"labels of {1 << 62} devices"):
        dt.Mesh.from_device_mesh(HUGE)
    with pytest.raises(MemoryError, match=rf"numbers of {1 << 62} devices"):
        hlo.to_hlo(BOUND[6], iota=False)
    jax = pytest.importorskip("shardwise.interop.jax", exc_type=ImportError)
    with pytest.raises(MemoryError, match=rf"labels of {1 << 62} devices"):
        jax.to_mesh(HUGE)
    with pytest.raises(sw.MeshError, match=rf"at most {(1 << 31) - 1} devices, .* has {1 << 62}"):
        jax.to_named_sharding(BOUND[4], abstract=True)


@pytest.mark.parametrize("path", ["a\0b", "a\ud800b"])
def test_paths_that_no_file_can_have(path: str) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: sw.open_checkpoint(path),
        lambda: sw.LayoutMap.from_toml(path),
        lambda: sw.LayoutMap().to_toml(path),
    ]
    for call in calls:
        with pytest.raises(OSError, match="no file can have this name"):
            call()
