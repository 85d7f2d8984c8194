"""Run as a program: every call again and again, each time with another amount of memory left.

Each try is a process of its own, forked from one in which the call has been made once on something small, so that all
that is made once (modules, patterns, types) is there. It limits its address space, fills what its allocators still
have, and calls. What comes of it is its exit status. Written to the standard output is one line for each call: how
often it succeeded, how often it raised MemoryError, and everything else that happened.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import shardwise as sw
import shardwise.reshard.plan  # Some calls on something small do not come to it.
from shardwise import dtensor as dt
from shardwise.interop import hlo, megatron, shardy, torch

#: The bytes that are left when the call begins, beyond what it needs to begin at all.
LEFT = [0, *(1 << power for power in (14, 16, 18, 20, 21, 22, 23, 24, 25, 26, 27)), 3 << 20, 12 << 20, 48 << 20]

#: How many devices or so: what is made of them takes some 10 to 100 MB.
MANY = 1 << 18

SUCCEEDED, NO_MEMORY, OTHER = 0, 1, 2


class Call(NamedTuple):
    """A call on something that `make` makes of a number; the larger the number, the more memory it takes."""

    make: Callable[[int], Any]
    call: Callable[[Any], object]


def _line(size: int, devices: Any = None) -> sw.DeviceMesh:
    return sw.DeviceMesh((size, 2), ("x", "y"), devices)


def _partition(size: int) -> sw.Partition:
    return sw.TensorLayout((("y", "x"), None), _line(size)).partition((3 * size, 5), "chunk")


def _dtensor(size: int) -> dt.Mesh:
    names = [f"/job:a/replica:0/task:0/device:CPU:{i}" for i in range(size)]
    return dt.Mesh(["x"], np.arange(size), list(range(size)), names, global_devices=names)


def _map(size: int) -> sw.LayoutMap:
    rules = sw.LayoutMap(_line(4))
    for i in range(size // 1024 + 1):
        rules[rf"layer{i}[/.](kernel|bias){{1,3}}$"] = ("x", None)
    return rules


def _asked(rules: sw.LayoutMap) -> object:
    copied: sw.LayoutMap = pickle.loads(pickle.dumps(rules))
    return copied["layer0/kernel"]


def _shards(size: int) -> sw.ShardedArray:
    partition = sw.TensorLayout(("x", None), _line(4)).partition((size // 16 * 4, 64))
    return sw.ShardedArray(partition, [view.copy() for view in partition.views(np.zeros((size // 16 * 4, 64), "i1"))])


def _pair(size: int) -> tuple[sw.Partition, sw.Partition]:
    mesh = sw.DeviceMesh((size,), ("x",))
    line, shape = sw.TensorLayout(("x",), mesh), (7 * size + 1,)
    return line.partition(shape, "ceil"), line.partition(shape, "balanced")


def _boxes(size: int) -> np.ndarray[Any, Any]:
    rows = np.arange(size)
    return np.stack([np.stack([rows, rows + 1], axis=1), np.broadcast_to([0, 3], (size, 2))], axis=1)


def _stairs(size: int) -> np.ndarray[Any, Any]:
    rows, zeros = np.arange(size), np.zeros(size, int)
    along = np.stack([rows, rows + 1], axis=1)
    left = np.stack([along, np.stack([zeros, rows], axis=1)], axis=1)
    right = np.stack([along, np.stack([rows, zeros + size + 1], axis=1)], axis=1)
    return np.concatenate([left, right])


def _tiling(stairs: np.ndarray[Any, Any]) -> sw.Tiling:
    return sw.Tiling.from_boxes((len(stairs) // 2, len(stairs) // 2 + 1), stairs)


def _array(partition: sw.Partition) -> np.ndarray[Any, Any]:
    return np.broadcast_to(np.zeros((), "i1"), partition.shape)


CALLS: dict[str, Call] = {
    "mesh of labels": Call(lambda n: range(2 * n), lambda labels: _line(len(labels) // 2, labels)),
    "devices": Call(_line, lambda mesh: mesh.devices),
    "coordinates": Call(_line, lambda mesh: mesh.coordinates()),
    "mesh repr": Call(lambda n: _line(n, range(2 * n)), repr),
    "label that is not there": Call(lambda n: _line(n, range(2 * n)), lambda mesh: _caught(mesh.index_of_label, "a")),
    "layout of many dims": Call(lambda n: [None] * n, lambda axes: sw.TensorLayout(axes, _line(2)).num_shards),
    "layout of many axes": Call(
        lambda n: [f"a{i}" for i in range(n)], lambda names: sw.TensorLayout((tuple(names),), unreduced=["b"])
    ),
    "partition of many dims": Call(
        lambda n: sw.TensorLayout([None] * n, _line(2)), lambda layout: layout.partition((1,) * layout.rank).boxes()
    ),
    "partition": Call(
        lambda n: sw.TensorLayout((("y", "x"),), _line(n)), lambda layout: layout.partition((2**40,), "ceil")
    ),
    "boxes": Call(_partition, lambda partition: partition.boxes()),
    "box": Call(_partition, lambda partition: partition.box("cpu:1")),
    "devices_indices_map": Call(_partition, lambda partition: partition.devices_indices_map()),
    "shard_ids": Call(_partition, lambda partition: partition.shard_ids()),
    "replica_ids": Call(_partition, lambda partition: partition.replica_ids()),
    "devices_holding": Call(
        lambda n: sw.TensorLayout((None,), _line(n)).partition((8,)), lambda partition: partition.devices_holding(0)
    ),
    "nbytes": Call(_partition, lambda partition: partition.nbytes("float32")),
    "locate": Call(_partition, lambda partition: partition.locate(range(partition.size))),
    "locate array": Call(_partition, lambda partition: partition.locate(np.broadcast_to(3, partition.size))),
    "global_offset": Call(
        _partition, lambda partition: partition.global_offset(np.broadcast_to(3, 10**6), np.broadcast_to(0, 10**6))
    ),
    "runs": Call(
        lambda n: sw.TensorLayout((None, "x"), _line(2)).partition((4 * n, 4)),
        lambda partition: partition.runs("cpu:0"),
    ),
    "views": Call(_partition, lambda partition: partition.views(_array(partition))),
    "views of a subclass": Call(
        _partition, lambda partition: partition.views(np.zeros(partition.shape, "i1").view(np.recarray))
    ),
    "shards": Call(
        lambda n: sw.distribute_tensor(np.zeros((3 * n, 5), "i1"), _partition(n).layout, "chunk"),
        lambda sharded: sharded.shards,
    ),
    "numpy": Call(_shards, lambda sharded: sharded.numpy()),
    "reshard": Call(_shards, lambda sharded: sharded.reshard(sw.TensorLayout((None, "x"), _line(4)))),
    "gather": Call(_shards, sw.array.gather),
    "plan": Call(_pair, lambda pair: sw.plan_reshard(*pair)),
    "plan as an array": Call(
        lambda n: sw.plan_reshard(*_pair(n)), lambda plan: (plan.transfers, plan.kept, plan.bytes_sent("int8"))
    ),
    "transfers": Call(lambda n: sw.plan_reshard(*_pair(n)), list),
    "rounds": Call(lambda n: sw.plan_reshard(*_pair(n)), lambda plan: plan.rounds(plan.dst.size // 64 + 8, "int8")),
    "run": Call(
        lambda n: (sw.plan_reshard(*_pair(n // 16)), np.zeros(7 * n // 16 + 1, "i1")),
        lambda given: given[0].run(given[0].src.views(given[1])),
    ),
    "boxes by hand": Call(_boxes, lambda boxes: sw.Tiling.from_boxes((len(boxes), 3), boxes).check()),
    "boxes in no grid": Call(_stairs, lambda boxes: _tiling(boxes).check()),
    "replicas of boxes": Call(
        lambda n: np.concatenate([_boxes(n), _boxes(n)]),
        lambda boxes: sw.Tiling.from_boxes((len(boxes) // 2, 3), boxes, replicas=True).check(),
    ),
    "holders of boxes": Call(
        lambda n: {i: [[(i, i + 1), (0, 3)]] for i in range(n // 16)},
        lambda boxes: sw.Tiling.from_boxes((len(boxes), 3), boxes).nbytes("i1"),
    ),
    "holders of a grid": Call(lambda n: sw.Tiling.grid((n, 3), (1, 2)), lambda grid: (grid.holders, grid.nbytes("i1"))),
    "flat ranges": Call(
        lambda n: [(7 * i, 7 * i + 7) for i in range(n)],
        lambda ranges: sw.Tiling.from_flat_ranges((len(ranges), 7), ranges).check(),
    ),
    "plan of tilings": Call(
        lambda n: (_tiling(_stairs(n)), sw.Tiling.grid((n, n + 1), (3, n))),
        lambda pair: sw.plan_reshard(*pair).transfers,
    ),
    "program": Call(lambda n: sw.plan_reshard(*_pair(n)), lambda plan: plan.program("cpu:3")),
    "plan of a model": Call(
        lambda n: {f"{i}": ((64,), "i1") for i in range(n // 64)},
        lambda norms: sw.plan_model(
            dict.fromkeys(norms, sw.TensorLayout((None,), _line(4))),
            dict.fromkeys(norms, sw.TensorLayout((None,), _line(4, range(8)))),
            norms,
        ),
    ),
    "explain": Call(lambda n: sw.plan_reshard(*_pair(n)), lambda plan: plan.explain()),
    "layout map": Call(_map, _asked),
    "report": Call(_map, lambda rules: rules.report({f"layer{i}/kernel": (4, 8) for i in range(len(rules))})),
    "apply": Call(_map, lambda rules: rules.apply([{"kernel": np.zeros((4, 8))}] * (256 * len(rules)))),
    "draw": Call(lambda n: sw.TensorLayout(("x",), sw.DeviceMesh((64,), ("x",))).partition((n,), "ceil"), sw.draw),
    "dtensor mesh": Call(lambda n: n, _dtensor),
    "dtensor mesh text": Call(_dtensor, lambda mesh: mesh.to_string()),
    "dtensor mesh bytes": Call(_dtensor, lambda mesh: mesh.as_proto().SerializeToString()),
    "dtensor mesh from text": Call(lambda n: _dtensor(n).to_string(), dt.Mesh.from_string),
    "dtensor mesh from bytes": Call(
        lambda n: _dtensor(n).as_proto().SerializeToString(),
        lambda data: dt.Mesh.from_proto(dt.MeshProto.FromString(data)),
    ),
    "dtensor text that is wrong": Call(lambda n: "|" * (8 * n), lambda text: _caught(dt.Mesh.from_string, text)),
    "dtensor bytes that are wrong": Call(
        lambda n: b"\x0a\x00" * (8 * n), lambda data: _caught(dt.LayoutProto.FromString, data)
    ),
    "dtensor host mesh": Call(_dtensor, lambda mesh: dt.Mesh.from_string(mesh.to_string()).host_mesh()),
    "dtensor unravel_index": Call(_dtensor, lambda mesh: mesh.unravel_index()),
    "dtensor locations": Call(_dtensor, lambda mesh: mesh.local_device_locations()),
    "dtensor coords": Call(_dtensor, lambda mesh: [mesh.coords(i) for i in range(1000)]),
    "dtensor devices": Call(_dtensor, lambda mesh: (mesh.global_devices(), mesh.local_devices())),
    "dtensor layout": Call(
        lambda n: dt.Layout(["x"], _dtensor(n)), lambda layout: (layout.offset_to_shard(), layout.to_string())
    ),
    "dtensor layout from text": Call(lambda n: dt.Layout(["x"], _dtensor(n)).to_string(), dt.Layout.from_string),
    "dtensor device names": Call(lambda n: "/job:" + "a" * n, dt.DeviceSpec.from_string),
    "hlo": Call(
        lambda n: sw.TensorLayout(("x", None), _line(n)),
        lambda layout: hlo.from_hlo(hlo.to_hlo(layout, iota=False), layout.device_mesh),
    ),
    "shardy": Call(lambda n: sw.TensorLayout(("x", None), _line(n, range(2 * n))), shardy.to_shardy),
    "megatron": Call(lambda n: sw.TensorLayout(("x", None), _line(n)), megatron.to_rank_offsets),
    "torch": Call(_line, lambda mesh: torch.local_shards([torch.Shard(0), torch.Replicate()], mesh, (mesh.size, 3))),
}


def _caught(call: Callable[[Any], object], argument: Any) -> None:
    try:
        call(argument)
    except sw.ShardwiseError:
        return
    raise AssertionError("not refused")


def _limit(left: int) -> None:
    """Leave the process `left` bytes: the rest is filled, in pieces of all sizes."""
    statm = Path("/proc/self/statm").read_text()
    used = int(statm.split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + left + (1 << 20), resource.getrlimit(resource.RLIMIT_AS)[1]))


def _fill(left: int) -> list[object]:
    """Take what the allocators still have in pieces that a call may ask for, except what is to be left."""
    reserved = bytearray(left) if left else None
    taken: list[object] = []
    for size in (1 << 20, 1 << 16, 1 << 12, 1 << 9, 1 << 7, 1 << 5):
        try:
            while True:
                taken.append(bytearray(size))
        except MemoryError:
            continue
    del reserved
    return taken


def _attempt(call: Callable[[Any], object], argument: Any, left: int) -> int:
    _limit(left)
    _kept = _fill(left)
    try:
        call(argument)
    except MemoryError:
        return NO_MEMORY
    except BaseException as error:
        del _kept
        if isinstance(error, SystemError) and "ufunc" in str(error):
            return NO_MEMORY  # numpy's own word: some of its functions forget to say why they failed.
        resource.setrlimit(resource.RLIMIT_AS, (resource.getrlimit(resource.RLIMIT_AS)[1],) * 2)
        print(f"{left}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr, flush=True)
        return OTHER
    return SUCCEEDED


def attempt(call: Callable[[Any], object], argument: Any, left: int) -> str:
    """What comes of the call in a process with so much memory left: the status, or the signal that ended it."""
    child = os.fork()
    if child == 0:
        status = OTHER
        try:
            signal.alarm(600)  # A call that hangs ends the test, however slow the machine is.
            status = _attempt(call, argument, left)
        finally:
            os._exit(status)
    _, how = os.waitpid(child, 0)
    if os.WIFSIGNALED(how):
        return f"signal {os.WTERMSIG(how)} at {left}"
    return {SUCCEEDED: "succeeded", NO_MEMORY: "MemoryError"}.get(os.WEXITSTATUS(how), f"another error at {left}")


def main(names: list[str]) -> None:
    for name in names or CALLS:
        make, call = CALLS[name]
        call(make(32))
        small, large = make(32), make(MANY)
        outcomes = Counter(attempt(call, large, left) for left in LEFT)
        # Where nothing is left, even what needs little finds none.
        outcomes.update(attempt(call, small, left) for left in LEFT[:5])
        print(json.dumps({"call": name, "outcomes": outcomes}), flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory():
        main(sys.argv[1:])
