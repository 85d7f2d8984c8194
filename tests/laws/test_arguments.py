"""Arguments that contain themselves, are nested deeply, or are integers that nothing holds: only documented exceptions.

And meshes and tensors of more axes and dims than an array of numpy may have.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise import dtensor as dt
from shardwise.interop import hlo, megatron, shardy, torch, translate
from tests.checks import HUGE, cyclic, deep, linear, refused

MESH = sw.DeviceMesh((2, 2), ("x", "y"))
LAYOUT = sw.TensorLayout(("x",), MESH)
PARTITION = LAYOUT.partition((4,))
DTENSOR = dt.Mesh.from_string("|x=2|0,1|0,1|CPU:0,CPU:1")
SUMS = sw.ShardedArray(sw.TensorLayout((None,), MESH, unreduced=("x",)).partition((4,)), [np.zeros(4)] * 4)


def rules() -> sw.LayoutMap:
    layout_map = sw.LayoutMap(MESH)
    layout_map["k"] = ("x",)
    return layout_map


CALLS: dict[str, Callable[[Any], object]] = {
    "devices": lambda x: sw.DeviceMesh((1,), ("x",), x),
    "shape": lambda x: sw.DeviceMesh(x, ("x",)),
    "size": lambda x: sw.DeviceMesh((x,), ("x",)),
    "axis_names": lambda x: sw.DeviceMesh((1,), x),
    "axes": lambda x: sw.TensorLayout(x),
    "spec": lambda x: sw.TensorLayout([x]),
    "unreduced": lambda x: sw.TensorLayout((None,), unreduced=x),
    "partition": lambda x: LAYOUT.partition(x),
    "dim": lambda x: LAYOUT.partition((x,)),
    "locate": lambda x: PARTITION.locate(x),
    "locate several": lambda x: PARTITION.locate([x]),
    "global_offset": lambda x: PARTITION.global_offset(x, 0),
    "devices_holding": lambda x: PARTITION.devices_holding(x),
    "shard_box": lambda x: PARTITION.shard_box(x),
    "nbytes": lambda x: PARTITION.nbytes(x),
    "views": lambda x: PARTITION.views(x),
    "coordinate": lambda x: MESH.coordinate(x),
    "device": lambda x: MESH.device(x),
    "device_index": lambda x: MESH.device_index(x),
    "device_index of one": lambda x: MESH.device_index((x, 0)),
    "index_of_label": lambda x: MESH.index_of_label(x),
    "index_of_label of huge labels": lambda x: sw.DeviceMesh((2,), ("x",), [HUGE, HUGE + 1]).index_of_label(x),
    "distribute_tensor": lambda x: sw.distribute_tensor(x, LAYOUT),
    "ShardedArray": lambda x: sw.ShardedArray(PARTITION, x),
    "Variable": lambda x: sw.Variable(x, "f4", np.zeros),
    "Variable of a size": lambda x: sw.Variable((x,), "f4", np.zeros),
    "initializer": lambda x: sw.Variable((1,), "f4", lambda *_: x),
    "report": lambda x: rules().report(x),
    "report shape": lambda x: rules().report({"k": x}),
    "report size": lambda x: rules().report({"k": ((x,), "int8")}),
    "apply": lambda x: rules().apply(x),
    "rule": lambda x: rules().update({"a": x}),
    "from_tp_plan": lambda x: sw.LayoutMap.from_tp_plan(x, MESH, "x"),
    "layout_map_scope": lambda x: sw.layout_map_scope(rules(), local_devices=x).__enter__(),
    "reduce_scatter": lambda x: sw.array.reduce_scatter(SUMS, "x", x),
    "all_gather": lambda x: sw.array.all_gather(sw.distribute_tensor(np.arange(4), LAYOUT), x),
    "translate": lambda x: translate(LAYOUT, x),
    "hlo boxes": lambda x: hlo.parse_hlo("{devices=[2]<=[2]}").boxes((x,)),
    "hlo rank": lambda x: hlo.from_hlo("{replicated}", MESH, x),
    "placements": lambda x: torch.from_placements(x, MESH, 1),
    "placement": lambda x: torch.from_placements([torch.Shard(x), torch.Replicate()], MESH, 1),
    "dtensor ids": lambda x: dt.Mesh(["x"], x, [0], ["CPU:0"]),
    "dtensor local ids": lambda x: dt.Mesh(["x"], [0], x, ["CPU:0"]),
    "dtensor devices": lambda x: dt.Mesh(["x"], [0], [0], x),
    "dtensor specs": lambda x: dt.Layout(x, DTENSOR),
    "dtensor rank": lambda x: dt.Layout.replicated(DTENSOR, x),
    "dtensor local shape": lambda x: dt.Layout(["x"], DTENSOR).local_shape_from_global_shape((x,)),
    "create_mesh": lambda x: dt.create_mesh(x),
    "create_mesh size": lambda x: dt.create_mesh([("x", x)]),
    "create_mesh devices": lambda x: dt.create_mesh([("x", 1)], devices=x),
    "pack": lambda x: dt.pack(x, dt.Layout(["x"], DTENSOR)),
    "MeshProto": lambda x: dt.MeshProto((), x).SerializeToString(),
    "LayoutProto": lambda x: dt.LayoutProto((), None, x).SerializeToString(),
}


@pytest.mark.parametrize("argument", [cyclic, deep, lambda: HUGE, lambda: [HUGE], lambda: -HUGE])
@pytest.mark.parametrize("call", CALLS)
def test_it_is_refused_by_a_documented_exception(call: str, argument: Callable[[], Any]) -> None:
    made = argument()
    raised: Exception | None = None
    with linear():
        try:
            CALLS[call](made)
        except (sw.ShardwiseError, TypeError, IndexError, MemoryError) as error:
            raised = error
    assert not isinstance(raised, sw.InternalError)
    assert len(str(raised)) < 2000


@pytest.mark.parametrize(
    "text",
    [
        "{devices=[" + ",".join(["999999999999999999"] * 30_000) + "]<=[8]}",
        "{devices=[8]<=[" + ",".join(["999999999999999999"] * 30_000) + "]}",
        "{devices=[" + "9" * 10_000 + "]<=[8]}",
        "{maximal device=" + "9" * 10_000 + "}",
    ],
    ids=["tiles", "devices", "size", "device"],
)
def test_texts_of_huge_numbers_are_refused_at_once(text: str) -> None:
    with linear(), pytest.raises(sw.ParseError) as raised:
        hlo.parse_hlo(text)
    assert len(str(raised.value)) < 1000


AXES = [f"a{i}" for i in range(70)]


@pytest.mark.parametrize("devices", [None, ["p", "q"]])
class TestMoreAxesThanNumpyHasDims:
    def mesh(self, devices: Any) -> sw.DeviceMesh:
        return sw.DeviceMesh((2,) + (1,) * 69, AXES, devices)

    def layout(self, devices: Any) -> sw.TensorLayout:
        return sw.TensorLayout(("a0",), self.mesh(devices))

    def test_the_array_of_devices_cannot_be(self, devices: Any) -> None:
        with refused(sw.MeshError, "devices", "70 axes"):
            _ = self.mesh(devices).devices
        assert self.mesh(devices).device(1) == ("q" if devices else "cpu:1")

    def test_everything_else_can(self, devices: Any) -> None:
        layout, mesh = self.layout(devices), self.mesh(devices)
        assert pickle.loads(pickle.dumps(layout)) == layout
        assert hlo.from_hlo(hlo.to_hlo(layout), mesh) == layout
        assert hlo.from_hlo(hlo.to_hlo(layout, iota=False), mesh) == layout
        assert torch.from_placements(torch.to_placements(layout), mesh, 1) == layout
        assert shardy.from_shardy(shardy.to_shardy(sw.TensorLayout(("a0",), self.mesh(None))), self.mesh(None)).axes
        assert [entry.replica_id for entry in megatron.to_rank_offsets(layout)] == [0, 0]
        assert translate(layout)["jax"] == "PartitionSpec('a0')"
        assert "cannot express" in translate(layout)["tf"]
        sharded = sw.distribute_tensor(np.arange(4), layout)
        assert [shard.data.tolist() for shard in sharded.shards] == [[0, 1], [2, 3]]
        own = sw.ShardedArray(sharded.partition, [np.array([0, 1]), np.array([2, 3])])
        assert own.reshard(sw.TensorLayout((None,), mesh)).shards[1].data.tolist() == [0, 1, 2, 3]
        with refused(sw.MeshError, "70 axes", "64"):
            dt.Mesh.from_device_mesh(mesh)

    def test_rules_are_written_and_read(self, devices: Any) -> None:
        layout_map, file = sw.LayoutMap(self.mesh(devices)), io.StringIO()
        layout_map["kernel"] = ("a0", None)
        layout_map.to_toml(file)
        file.seek(0)
        assert sw.LayoutMap.from_toml(file) == layout_map


@pytest.mark.parametrize("dims", [62, 63, 64, 70])
@pytest.mark.parametrize("iota", [True, False])
def test_shardings_of_more_dims_than_numpy_has(dims: int, iota: bool) -> None:
    layout = sw.TensorLayout(("y", *[None] * dims, "x"), MESH)
    assert hlo.from_hlo(hlo.to_hlo(layout, iota=iota), MESH) == layout


def endless(value: Any) -> Any:
    while True:
        yield value


PLAN = sw.plan_reshard(PARTITION, sw.TensorLayout((None,), MESH).partition((4,)))

#: Arguments that never come to an end, or later than anyone waits.
ENDLESS: dict[str, tuple[type[Exception], str, Callable[[], object]]] = {
    "devices": (sw.MeshError, "devices", lambda: sw.DeviceMesh((2,), ("x",), endless("a"))),
    "devices of a range": (sw.MeshError, "devices", lambda: sw.DeviceMesh((2,), ("x",), range(10**15))),
    "unreduced": (sw.LayoutError, "unreduced", lambda: sw.TensorLayout((None,), unreduced=endless("x"))),
    "unreduced numbers": (TypeError, "unreduced", lambda: sw.TensorLayout((None,), unreduced=endless(1))),
    "src_shards": (sw.LayoutError, "src_shards", lambda: PLAN.run(endless(np.zeros(2)))),
    "out": (sw.LayoutError, "out", lambda: PLAN.run([np.zeros(2)] * 4, out=endless(np.zeros(4)))),
    "shards": (TypeError, "shards", lambda: sw.ShardedArray(PARTITION, endless(np.zeros(2)))),
    "boxes of a range": (TypeError, "boxes", lambda: sw.Tiling.from_boxes((4,), range(10**15))),
    "boxes": (TypeError, "boxes", lambda: sw.Tiling.from_boxes((4,), [endless(1)])),
    "boxes of ranges": ((sw.LayoutError), "boxes", lambda: sw.Tiling.from_boxes((4,), {"a": [range(10**15)]})),
    "shape of a report": (TypeError, "shape", lambda: rules().report({"k": endless(1)})),
    "shape of a partition": (TypeError, "shape", lambda: rules().partition("k", endless(1))),
    "rules": (TypeError, "entry 0", lambda: rules().update(endless(1))),
    "a rule of megabytes": (sw.LayoutError, "1048576", lambda: rules().update({"a" * 5_000_000: ("x",)})),
}


@pytest.mark.parametrize("call", ENDLESS)
def test_what_never_ends_is_refused_at_once(call: str) -> None:
    error, name, make = ENDLESS[call]
    with linear(), refused(error, name):
        make()


@pytest.mark.parametrize("length", [4100, 1_000_000])
@pytest.mark.parametrize("call", [sw.open_checkpoint, sw.LayoutMap.from_toml, rules().to_toml])
def test_paths_that_no_system_has_are_refused_in_short(call: Callable[[Any], object], length: int) -> None:
    with pytest.raises(OSError, match="too long") as raised:
        call("é" * length)
    assert len(str(raised.value)) < 1000
