"""What errors of the library advise, followed: each is raised, says so, and what it says gets through.

Of files of frameworks `tests/oracle/test_advice.py` and `tests/store/formats/test_advice.py` ask the same, of
checkpoints `tests/store/test_advice.py`, and of the command `tests/cli/test_advice.py`.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import shardwise as sw
from shardwise import deploy, dtensor, packed
from shardwise.deploy import Deployment, FusedParameter
from shardwise.interop import hlo, shardy
from shardwise.interop.translation import translate

MESH = sw.DeviceMesh((2, 2), ("x", "y"))
TP = sw.DeviceMesh((4,), ("tp",))
CUT = sw.TensorLayout(("x", None), MESH)
ARRAY: Any = np.arange(16.0).reshape(4, 4)


class Advice(NamedTuple):
    """What an error advises, what raises it, and what does as it says."""

    words: str
    refused: Callable[[], Any]
    followed: Callable[[], Any]


def rules(text: str, mesh: sw.DeviceMesh = MESH, **more: Any) -> sw.LayoutMap:
    return sw.LayoutMap.from_toml(io.StringIO(text), mesh, **more)


QKV = [packed.qkv(4, 2, 8, "x", order=order) for order in ("blocked", "interleaved")]
WIDE = sw.DeviceMesh((8,), ("x",))
CROSSED = sw.Tiling.from_boxes((4,), {"a": [(slice(0, 4),)]}), sw.Tiling.from_boxes((4,), {"b": [(slice(0, 4),)]})


QKV_Y = sw.TensorLayout((QKV[0], "y"), MESH)


def fused(order: int, mesh: sw.DeviceMesh = MESH) -> sw.Partition:
    return sw.TensorLayout((QKV[order], None), mesh).partition((64, 3))


def parameters(*names: str) -> Any:
    one = Deployment(1, sw.DeviceMesh((1,), ("x",)), {".": (None,)}, parameters=[FusedParameter("qk", ("q", "k"))])
    return one.parameters_of("cpu:0", dict.fromkeys(names, (2,)))


def variables(scope: bool = True, initialize: bool = True) -> Any:
    layout_map = sw.LayoutMap(MESH)
    layout_map["w"] = ("x",)
    with sw.layout_map_scope(layout_map):
        made = sw.Variable((4,), "f4", np.ones, name="w")
    return (sw.initialize_variables(made) if initialize else made).value


def reduced(*places: Any) -> Any:
    plan = sw.plan_reshard(CUT.partition((4, 4)), sw.TensorLayout((None, "y"), MESH).partition((4, 4)))
    return plan.program(*places)


def rewritten(tensors: Any, *rewrites: Any, **more: Any) -> Any:
    """The names that rewrites make of float32 tensors of these shapes."""
    layouts = {name: sw.TensorLayout((None,) * len(shape), MESH) for name, shape in tensors.items()}
    made = sw.Rewrites(rewrites, **more)
    everywhere = sw.LayoutMap(MESH, default="replicated")
    return sw.plan_model(layouts, everywhere, {n: (s, "f4") for n, s in tensors.items()}, rewrites=made)


MASKED = np.ma.masked_array([1, 2], [True, False])
OWN = sw.DeviceMesh((2,), ("x",), devices=["b", 0])
DT = dtensor.create_mesh([("x", 2)], device_type="CPU", devices=["CPU:0", "CPU:1"])
ROWS = dtensor.Layout(["x", dtensor.UNSHARDED], DT)
BY_NUMBER = [sw.Tiling.from_boxes((4,), boxes) for boxes in ([[(0, 2)], [(2, 4)]], [[(1, 3)]])]
DEPLOYED = (
    "[world]\nsize = 4\n[meshes]\nm = { shape = [4], axis_names = ['x'] }\n[rules]\n'w' = { mesh = 'm', axes = ['x'] }"
)
LLAMA = {"model_type": "llama", "num_attention_heads": 8, "hidden_size": 64, "num_key_value_heads": 4}


def remeshed(mesh: sw.DeviceMesh) -> None:
    layout = sw.TensorLayout(("x",))
    layout.device_mesh = MESH
    layout.device_mesh = mesh


def mapped(*keys: str, again: bool = False, **more: Any) -> sw.LayoutMap:
    layout_map = sw.LayoutMap(MESH, **more)
    for key in keys:
        if again and key in layout_map:
            del layout_map[key]
        layout_map[key] = ("x",)
    return layout_map


def partial(*axes: str) -> sw.ShardedArray:
    layout = sw.TensorLayout((None, None), MESH, unreduced=axes)
    return sw.ShardedArray(layout.partition((4, 4)), [ARRAY] * 4)


def tiled() -> sw.ShardedArray:
    tiling = sw.Tiling.grid((4, 4), (2, 4))
    return sw.ShardedArray(tiling, [ARRAY[:2], ARRAY[2:]])


def model_run(shared: bool) -> Any:
    layouts = {name: sw.TensorLayout(("x",), OWN) for name in ("a", "b")}
    plan = sw.plan_model(
        layouts, {n: sw.TensorLayout((None,), OWN) for n in layouts}, dict.fromkeys("ab", ((4,), "f4"))
    )
    src = {name: np.zeros(2, "f4") for name in "ab"}
    memory = np.zeros(8, "f4")
    out = {"a": memory[:4], "b": memory[2:6] if shared else memory[4:]}
    return plan.program("b").run(src, out, lambda *_: None, lambda *_: None)


def partly() -> sw.Variable:
    layout_map = sw.LayoutMap(MESH)
    layout_map["w"] = ("x",)
    with sw.layout_map_scope(layout_map, local_devices=["cpu:0"]):
        made: sw.Variable = sw.initialize_variables(sw.Variable((4,), "f4", np.ones, name="w"))
    return made


def scoped(layout_map: sw.LayoutMap) -> None:
    with sw.layout_map_scope(layout_map):
        sw.initialize_variables(sw.Variable((4,), "f4", np.ones, name="w"))


def dtensor_scope(layout_map: dtensor.LayoutMap) -> None:
    with layout_map.scope():
        pass


def spoken(layout: sw.TensorLayout, dialect: str) -> None:
    (text,) = translate(layout, to=[dialect]).values()
    if "cannot express" in text:
        raise sw.LayoutError(text)


def numbered(text: str) -> Any:
    return Deployment(
        2,
        sw.DeviceMesh((2,), ("x",)),
        {r"w\.{i}": deploy.DeploymentRule((None,), at={"x": text})},
        numbers={"n": [0, 1]},
    ).partition("w.1", (2,))


GENERAL = {
    "a layout for a partition": Advice(
        "dst must be a Partition or another Tiling, got TensorLayout; layout.partition(shape) makes one of it",
        lambda: sw.plan_reshard(CUT.partition((4, 4)), CUT),  # type: ignore[arg-type]
        lambda: sw.plan_reshard(CUT.partition((4, 4)), CUT.partition((4, 4))),
    ),
    "sequence": Advice(
        "np.asarray turns a sequence into an array",
        lambda: CUT.partition((4, 4)).views(ARRAY.tolist()),
        lambda: CUT.partition((4, 4)).views(np.asarray(ARRAY.tolist())),
    ),
    "sequence to distribute": Advice(
        "np.asarray turns a sequence into an array",
        lambda: sw.distribute_tensor(ARRAY.tolist(), CUT),
        lambda: sw.distribute_tensor(np.asarray(ARRAY.tolist()), CUT),
    ),
    "sequence to digest": Advice(
        "np.asarray(array) converts what numpy can read",
        lambda: sw.digest([1, 2]),
        lambda: sw.digest(np.asarray([1, 2])),
    ),
    "mask of values": Advice(
        "and its mask would be lost; give its filled() values",
        lambda: sw.distribute_tensor(np.ma.masked_array(np.zeros((64, 3))), fused(0).layout).shards,
        lambda: sw.distribute_tensor(np.ma.masked_array(np.zeros((64, 3))).filled(), fused(0).layout).shards,
    ),
    "mask of numbers": Advice(
        "give its filled() or compressed() values",
        lambda: CUT.partition((4, 4)).locate(np.ma.masked_array([1])),
        lambda: [CUT.partition((4, 4)).locate(one) for one in (MASKED.filled(0), MASKED.compressed())],
    ),
    "boxes and pieces": Advice(
        "mixes Pieces and other boxes; give one or the other",
        lambda: sw.Tiling.from_boxes((4,), {"a": [(slice(0, 2),), sw.Piece((slice(2, 4),), (0,))]}),
        lambda: sw.Tiling.from_boxes((4,), {"a": [(slice(0, 2),), (slice(2, 4),)]}),
    ),
    "device by position": Advice(
        "for the device at position 1 give mesh.device(1)",
        lambda: OWN.index_of_label(1),
        lambda: OWN.index_of_label(OWN.device(1)),
    ),
    "device by coordinate": Advice(
        "device_index takes a coordinate",
        lambda: CUT.partition((4, 4)).box((1, 0)),
        lambda: CUT.partition((4, 4)).box(MESH.device(MESH.device_index((1, 0)))),
    ),
    "None in quotes": Advice(
        "for a dim that is not cut write None, without quotes",
        lambda: sw.TensorLayout(("x", "None"), MESH),
        lambda: sw.TensorLayout(("x", None), MESH),
    ),
    "empty name": Advice(
        "write None for a dim that is not cut",
        lambda: sw.TensorLayout(("x", ""), MESH),
        lambda: sw.TensorLayout(("x", None), MESH),
    ),
    "name nearly": Advice(
        'did you mean "model"?',
        lambda: sw.TensorLayout(("modle",), sw.DeviceMesh((2,), ("model",))),
        lambda: sw.TensorLayout(("model",), sw.DeviceMesh((2,), ("model",))),
    ),
    "mesh set": Advice("make a new layout", lambda: remeshed(TP), lambda: sw.TensorLayout(("tp",), TP)),
    "uneven": Advice(
        'uneven="ceil", "chunk", "balanced" or "floor" would cut it',
        lambda: CUT.partition((3, 1)),
        lambda: [CUT.partition((3, 1), uneven=one) for one in ("ceil", "chunk", "balanced", "floor")],
    ),
    "two names of one argument": Advice(
        "give one of them", lambda: sw.LayoutMap(MESH, mesh=MESH), lambda: (sw.LayoutMap(MESH), sw.LayoutMap(mesh=MESH))
    ),
    "rule again": Advice("delete it to replace it", lambda: mapped("a", "a"), lambda: mapped("a", "a", again=True)),
    "look-around": Advice(
        "LayoutMap(..., backtracking=True), or backtracking = true in a rules file, allows it",
        lambda: mapped("(?=a)a"),
        lambda: mapped("(?=a)a", backtracking=True)["a"],
    ),
    "partial sums of several axes": Advice(
        "reduce_scatter needs an array unreduced over 'x' alone",
        lambda: sw.array.reduce_scatter(partial("x", "y"), "x", 0),
        lambda: sw.array.reduce_scatter(partial("x"), "x", 0),
    ),
    "layout of a tiling": Advice(
        "not by a layout; see its tiling",
        lambda: tiled().layout,
        lambda: tiled().tiling,
    ),
    "packed dim put together": Advice(
        "is packed; reshard cuts its parts",
        lambda: sw.array.all_to_all(sw.distribute_tensor(np.zeros((64, 4)), QKV_Y), "y", 0),
        lambda: sw.distribute_tensor(np.zeros((64, 4)), QKV_Y).reshard(fused(0).layout),
    ),
    "orders": Advice(
        "plan_refit goes from one order to another",
        lambda: sw.plan_reshard(fused(0), fused(1)),
        lambda: sw.plan_refit(fused(0), fused(1)),
    ),
    "part of a fused dim with no name": Advice(
        "must have one packed dim whose parts have names",
        lambda: sw.plan_refit(fused(0), CUT.partition((64, 3))),
        lambda: sw.plan_refit(fused(0), fused(1)),
    ),
    "side": Advice(
        "say which one with side",
        lambda: sw.plan_reshard(*BY_NUMBER).program(0),
        lambda: [sw.plan_reshard(*BY_NUMBER).program(0, side=side) for side in ("src", "dst")],
    ),
    "shared memory": Advice(
        "give it memory of its own",
        lambda: model_run(shared=True),
        lambda: model_run(shared=False),
    ),
    "parameter and tensor of one name": Advice(
        "there is a tensor of this name too; leave it out",
        lambda: parameters("q", "k", "qk"),
        lambda: parameters("q", "k"),
    ),
    "choice": Advice(
        "has a choice; write a part for each",
        lambda: FusedParameter("qk", ("{q,k}.w",)),
        lambda: FusedParameter("qk", ("q.w", "k.w")),
    ),
    "layout with a mesh": Advice(
        "has a mesh of its own; name a mesh of the deployment",
        lambda: Deployment(4, {"m": MESH}, {".": deploy.DeploymentRule(CUT)}),
        lambda: Deployment(4, {"m": MESH}, {".": deploy.DeploymentRule(("x", None), mesh="m")}),
    ),
    "shards on other devices": Advice(
        ".shards gives those",
        lambda: partly().value,
        lambda: [shard.data for shard in partly().shards],
    ),
    "variable before its layout": Advice(
        "call initialize_variables with the object that holds it",
        lambda: variables(initialize=False),
        lambda: variables(),
    ),
    "scope without a mesh": Advice(
        "make it as LayoutMap(device_mesh)",
        lambda: scoped(sw.LayoutMap()),
        lambda: scoped(sw.LayoutMap(MESH)),
    ),
    # dtensor
    "array in the place of a DTensor": Advice(
        "an array gets a layout by relayout",
        lambda: dtensor.check_layout(ARRAY, ROWS),
        lambda: dtensor.check_layout(dtensor.relayout(ARRAY, ROWS), ROWS),
    ),
    "map without a mesh": Advice(
        "make it as LayoutMap(mesh=…)",
        lambda: dtensor_scope(dtensor.LayoutMap()),
        lambda: dtensor_scope(dtensor.LayoutMap(mesh=DT)),
    ),
    # dialects
    "sub-axis": Advice(
        "layout.refined() is the same layout over a mesh in which it is a whole axis",
        lambda: spoken(sw.TensorLayout(("x:(1)2",), WIDE), "jax"),
        lambda: spoken(sw.TensorLayout(("x:(1)2",), WIDE).refined(), "jax"),
    ),
    "sub-axis of PyTorch": Advice(
        "layout.refined() is the same layout over a mesh in which its sub-axes are axes",
        lambda: spoken(sw.TensorLayout(("x:(1)2",), WIDE), "torch"),
        lambda: spoken(sw.TensorLayout(("x:(1)2",), WIDE).refined(), "torch"),
    ),
    **{
        f"sub-axis of {dialect}": Advice(
            "mesh.unflatten gives such axes names of your own",
            lambda dialect=dialect: spoken(sw.TensorLayout(("x:(1)2",), WIDE), dialect),  # type: ignore[misc]
            lambda dialect=dialect: spoken(  # type: ignore[misc]
                sw.TensorLayout(("a",), WIDE.unflatten("x", (2, 4), ("a", "b"))), dialect
            ),
        )
        for dialect in ("tf", "keras", "jax")
    },
    "rank of hlo": Advice(
        "rank is needed",
        lambda: hlo.from_hlo("{replicated}", MESH),
        lambda: hlo.from_hlo("{replicated}", MESH, rank=2),
    ),
    "order of hlo": Advice(
        "needs a T(…) that says the order of its dims",
        lambda: hlo.parse_hlo("{devices=[2,2]<=[2,2]}"),
        lambda: hlo.parse_hlo("{devices=[2,2]<=[2,2]T(1,0)}"),
    ),
    "mesh of shardy": Advice(
        "mesh is needed",
        lambda: shardy.from_shardy('#sdy.sharding<@mesh, [{"x"}]>'),
        lambda: shardy.from_shardy('#sdy.sharding<@mesh, [{"x"}]>', MESH),
    ),
    "labels of shardy": Advice(
        "mesh_to_shardy(mesh, devices=…) takes the 2 labels",
        lambda: shardy.to_shardy(sw.TensorLayout(("x",), OWN), None),
        lambda: shardy.mesh_to_shardy(OWN, devices=[0, "b"]),
    ),
    # rewrites
    "tensors that nothing matches": Advice(
        "no rewrite matches 'b'; drop leaves tensors out, and unmatched = 'keep' keeps them as they are",
        lambda: rewritten({"a": (2,), "b": (2,)}, {"from": "a", "to": "c"}, unmatched="refuse"),
        lambda: [
            rewritten({"a": (2,), "b": (2,)}, {"from": "a", "to": "c"}, unmatched="refuse", drop=["b"]),
            rewritten({"a": (2,), "b": (2,)}, {"from": "a", "to": "c"}, unmatched="keep"),
        ],
    ),
    "rewrites of another engine": Advice(
        "undo its rules first (--source-rules, or Rewrites.inverse); optional = true allows a rewrite to match nothing",
        lambda: rewritten({"b": (2,)}, {"from": "a", "to": "c"}),
        lambda: rewritten({"b": (2,)}, {"from": "a", "to": "c", "optional": True}),
    ),
    "padding": Advice(
        "expected 5, padded to a multiple of 4: 8 or more",
        lambda: rewritten({"a": (6,)}, {"from": {"name": "a", "pad_to": 4}, "to": "b", "size": 5}),
        lambda: rewritten({"a": (8,)}, {"from": {"name": "a", "pad_to": 4}, "to": "b", "size": 5}),
    ),
    "field of one side": Advice(
        "stack = 'i' makes one tensor of these",
        lambda: rewritten({"a.0": (2,), "a.1": (2,)}, {"from": "a.{i}", "to": "b"}),
        lambda: rewritten({"a.0": (2,), "a.1": (2,)}, {"from": "a.{i}", "to": {"name": "b", "stack": "i"}}),
    ),
    "order of parts": Advice(
        "state their order with packed",
        lambda: rewritten({"q": (2,), "k": (2,)}, {"from": "{q,k}", "to": "qk"}),
        lambda: rewritten({"q": (2,), "k": (2,)}, {"from": "{q,k}", "to": {"name": "qk", "packed": "q:(2) + k:(2)"}}),
    ),
    "name of a part": Advice(
        "have no name, such as q:(…)",
        lambda: rewritten({"q": (2,), "k": (2,)}, {"from": "{q,k}", "to": {"name": "qk", "packed": "(2) + k:(2)"}}),
        lambda: rewritten({"q": (2,), "k": (2,)}, {"from": "{q,k}", "to": {"name": "qk", "packed": "q:(2) + k:(2)"}}),
    ),
    "brace": Advice(
        "is unmatched; {{ gives a brace",
        lambda: rewritten({"a{": (2,)}, {"from": "a{", "to": "b"}),
        lambda: rewritten({"a{": (2,)}, {"from": "a{{", "to": "b"}),
    ),
    # rules files
    "list of rules": Advice(
        "write [rules], not [[rules]]", lambda: rules("[[rules]]"), lambda: rules("[rules]\n'w' = ['x']")
    ),
    "dot in a key": Advice(
        "a rule that contains a dot needs quotes",
        lambda: rules("[rules]\na.w = ['x']"),
        lambda: rules("[rules]\n'a.w' = ['x']")["a.w"],
    ),
    "escape": Advice(
        "write a regular expression in single quotes, '\\d'",
        lambda: rules('[rules]\n"\\d" = ["x"]'),
        lambda: rules("[rules]\n'\\d' = ['x']")["1"],
    ),
    "packed nearly": Advice(
        "did you mean 'packed' instead of 'packd'?",
        lambda: rules("[rules]\n'w' = [{ packd = '(2@x)' }]"),
        lambda: rules("[rules]\n'w' = [{ packed = '(2@x)' }]"),
    ),
    "dim that is not cut": Advice(
        "write [] for a dim that is not cut",
        lambda: rules("[rules]\n'w' = ['x', 'None']"),
        lambda: rules("[rules]\n'w' = ['x', []]"),
    ),
    "file of a deployment": Advice(
        "meshes is for deployments; shardwise.deploy.Deployment.from_toml reads the file",
        lambda: rules(DEPLOYED),
        lambda: Deployment.from_toml(io.StringIO(DEPLOYED)),
    ),
    "meshes": Advice(
        "a file of a deployment has no mesh; write [meshes]",
        lambda: Deployment.from_toml(io.StringIO(DEPLOYED.replace("[meshes]\nm", "[mesh]\nm"))),
        lambda: Deployment.from_toml(io.StringIO(DEPLOYED)),
    ),
    "configuration": Advice(
        "and none is given (--config FILE, or config=)",
        lambda: sw.LayoutMap.from_toml("hf/llama", TP),
        lambda: sw.LayoutMap.from_toml("hf/llama", TP, config=LLAMA),
    ),
    "axis of a file": Advice(
        "the file's axis is called tp, as in --mesh tp=4",
        lambda: sw.LayoutMap.from_toml("hf/llama", sw.DeviceMesh((4,), ("x",)), config=LLAMA),
        lambda: sw.LayoutMap.from_toml("hf/llama", TP, config=LLAMA),
    ),
    "counted repetitions": Advice(
        "use + or * instead; LayoutMap(..., backtracking=True), or backtracking = true in a rules file",
        lambda: rules("[rules]\n'^(a{1,50}){1,50}$' = ['x']"),
        lambda: [
            rules("[rules]\n'^(a+)+$' = ['x']")["aa"],
            rules("backtracking = true\n[rules]\n'^(a{1,50}){1,50}$' = ['x']")["aa"],
        ],
    ),
    "list of numbers": Advice(
        "n is the list [0, 1]; write n[…]",
        lambda: numbered("n"),
        lambda: numbered("n[i]"),
    ),
}


@pytest.mark.parametrize("case", GENERAL)
def test_what_is_advised_gets_through(case: str) -> None:
    advice = GENERAL[case]
    with pytest.raises((sw.ShardwiseError, TypeError, ValueError)) as caught:
        advice.refused()
    assert advice.words in str(caught.value)
    advice.followed()
