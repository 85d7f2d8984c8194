"""Law 8: values are immutable, hashable, picklable, comparable, and `eval(repr(v)) == v`: all of the public ones."""

from __future__ import annotations

import copy
import enum
import importlib
import inspect
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import shardwise as sw
from shardwise import dtensor as dt
from shardwise import fit, quantized, store
from shardwise.interop import hlo, megatron, torch
from shardwise.model.scope import layout_map_scope
from shardwise.rules import LeftOut, problems, report, tensor_report
from shardwise.store.formats.known import Form

#: The modules whose names are public; those of frameworks that are not installed are left out.
MODULES = (
    "shardwise",
    "shardwise.dtensor",
    "shardwise.errors",
    "shardwise.interop",
    "shardwise.interop.hlo",
    "shardwise.interop.jax",
    "shardwise.interop.keras",
    "shardwise.interop.megatron",
    "shardwise.interop.shardy",
    "shardwise.interop.tensorflow",
    "shardwise.interop.torch",
    "shardwise.fit",
    "shardwise.packed",
    "shardwise.quantized",
    "shardwise.rules.report",
    "shardwise.rules.tensor_report",
    "shardwise.store",
)

MESH = "|x=2,y=2|0,1,2,3|0,1,2,3|CPU:0,CPU:1,CPU:2,CPU:3"


def mesh(devices: Any = None) -> sw.DeviceMesh:
    return sw.DeviceMesh((2, 4), ("data", "model"), devices)


def layout(*axes: Any, **more: Any) -> sw.TensorLayout:
    return sw.TensorLayout(axes or ("data", None), mesh(), **more)


def partition() -> sw.Partition:
    return layout(("model", "data"), None).partition((9, 3), "chunk")


def scales() -> quantized.Component:
    return quantized.Component("a.scale", "F32", (2, 5), (quantized.Along(0, 128), quantized.Along(1, 128)))


def scaled_fits() -> fit.Fits:
    stored = {"down_proj.weight": ("F8_E4M3", (256, 512)), "down_proj.weight_scale_inv": ("F32", (2, 4))}
    return fit.fits_tensors(stored, {"quantization_config": {"quant_method": "fp8"}}, tp=(1, 8))


def ratios(*given: tuple[int, ...]) -> list[fit.RatioFit]:
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 172, "vocab_size": 99}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4}
    return [fit.fits_ratio(config, one) for one in given]


def plan() -> sw.reshard.ReshardPlan:
    return sw.plan_reshard(layout().partition((8, 8)), layout(None, "data").partition((8, 8)))


def flat_plan() -> sw.reshard.ReshardPlan:
    ranges = {"cpu:0": (0, 20), "rank": (20, 64)}
    return sw.plan_reshard(sw.Tiling.from_flat_ranges((8, 8), ranges), layout().partition((8, 8)))


#: The rows of four heads of q, two of k and two of v, of 8 rows each.
FUSED = {"q": 32, "k": 16, "v": 16}


def fused(order: Any, devices: int = 2) -> sw.Partition:
    spec = sw.packed.qkv(4, 2, 8, "model", order=order)
    return sw.TensorLayout((spec, None), sw.DeviceMesh((devices,), ("model",))).partition((64, 3))


def part_of_fused(rows: int) -> sw.Partition:
    return layout("model", None).partition((rows, 3))


def report_of(indivisible: bool = True) -> report.LayoutReport:
    rules = sw.LayoutMap(mesh())
    rules["kernel"] = (None, "model")
    rules["ker"] = (None, "data")
    rules["bias$"] = ("model",)
    rules["unused"] = ("model",)
    shapes = {
        "kernel": (4, 8),
        "a/kernel": (4, 8),
        "bias": (8,),
        "b/bias": (7 if indivisible else 8,),
        "c/bias": (2, 2),
    }
    return rules.report({name: (shape, "float32") for name, shape in shapes.items()})


def report_with_a_default() -> report.LayoutReport:
    rules = sw.LayoutMap(mesh(), default=sw.LayoutRule(layout("data"), "ceil"))
    return rules.report({"kernel": ((5, 8), "float32")})


def mesh_proto() -> dt.MeshProto:
    return dt.MeshProto((dt.MeshDimensionProto("x", 2),), (0, 1), (0, 1), ("CPU:0", "CPU:1"), name="m")


#: For each public class of values, some of them, made anew at each call.
VALUES: dict[type, Callable[[], list[Any]]] = {
    sw.DeviceMesh: lambda: [
        mesh(),
        mesh("abcdefgh"),
        sw.DeviceMesh((3,), ("x",), [0, ("a", 1), None]),
        sw.DeviceMesh((2, 1), ("x", "é'\"\\"), np.array([[5], [3]])),
    ],
    sw.TensorLayout: lambda: [
        sw.TensorLayout(()),
        sw.TensorLayout(("data",)),
        sw.TensorLayout([None, ["model", "data"]], unreduced=["x"]),
        layout(None, "model", unreduced=("data",)),
    ],
    sw.Partition: lambda: [partition(), layout().partition((2, 0)), layout(None).partition((3,))],
    sw.Tiling: lambda: [
        sw.Tiling.from_boxes((4, 2), [[(0, 3), (0, 2)], [(3, 4), (0, 2)]]),
        sw.Tiling.from_boxes((4,), {"a": [(0, 3)], ("b", 1): [[(3, 4)], [(0, 1)]]}, replicas=True),
        sw.Tiling.from_boxes((4,), {"a": [sw.Piece((slice(0, 3),), (1,))]}, arrays={"a": (5,)}),
        sw.Tiling.from_boxes((), {"a": ()}),
        sw.Tiling.grid((4, 2), (3, 2)),
        sw.Tiling.grid((4,), (3,), ["a", None], padded=True),
        sw.Tiling.from_flat_ranges((4, 2), [(0, 3), (3, 8)]),
        sw.Tiling.from_flat_ranges((4, 2), {0: (0, 8), 1: (0, 8)}, replicas=True),
    ],
    sw.Piece: lambda: [sw.Piece((slice(0, 2),), (1,)), sw.Piece((slice(0, 2),), 1), sw.Piece((), ())],
    sw.reshard.RefitPlan: lambda: [
        sw.plan_refit(fused("interleaved"), fused("blocked", 4)),
        sw.plan_refit(fused("blocked"), {name: part_of_fused(rows) for name, rows in FUSED.items()}),
        sw.plan_refit({"a": partition()}, {"a": partition()}),
    ],
    sw.packed.PackedDim: lambda: [
        sw.packed.qkv(4, 2, 8, "model"),
        sw.packed.qkv(4, 2, 8, "model", order="interleaved"),
        sw.packed.concat(sw.packed.part((3, 12, 8), 1, "model"), sw.packed.part(5)),
        sw.packed.padded_vocab(50257, "model", 128),
    ],
    fit.Fits: lambda: [scaled_fits()],
    fit.RatioCut: lambda: list(ratios((3, 1))[0].cuts[:3]),
    fit.RatioFit: lambda: ratios((3, 1), (1, 1)),
    fit.UnitShares: lambda: list(ratios((5, 1))[0].units),
    fit.Unknown: lambda: [fit.Unknown("h.*.w", 2, (4, 6), "no name of a weight")],
    fit.SizeFit: lambda: list(scaled_fits().sizes),
    fit.Cut: lambda: [cut for size in scaled_fits().sizes for cut in size.cuts],
    fit.Limit: lambda: [limit for size in scaled_fits().sizes for _, limit in size.limits],
    quantized.Along: lambda: [quantized.Along(1, 128), quantized.Along(None), quantized.Along(0, 32, 3, 32)],
    quantized.Component: lambda: [scales(), scales()._replace(name="b")],
    quantized.LogicalTensor: lambda: [
        quantized.LogicalTensor("a.weight", (256, 576), "FP8", (scales(),)),
        quantized.LogicalTensor("a.weight", (256, 576), "flat", (scales(),), ((1, "flat"),), (("a.shape", "all"),)),
    ],
    sw.packed.Part: lambda: [
        sw.packed.part((3, 12, 8), 1, "model"),
        sw.packed.part(5),
        sw.packed.part(None, 0, ("model", "data"), "chunk", ratio=2),
        sw.packed.part(2880, 0, "model", unit=32),
    ],
    sw.reshard.ReshardPlan: lambda: [
        plan(),
        flat_plan(),
        sw.reshard.ReshardPlan(plan().src, flat_plan().dst, []),
        sw.plan_reshard(layout().partition((8, 8)), flat_plan().dst),
    ],
    sw.reshard.Transfer: lambda: [*list(plan())[:2], *list(flat_plan())[:2]],
    sw.reshard.Program: lambda: [plan().program("cpu:0"), flat_plan().program("cpu:3"), flat_plan().program("rank")],
    sw.reshard.Step: lambda: [*plan().program("cpu:0"), *flat_plan().program("rank")],
    sw.reshard.LocalBox: lambda: [
        sw.reshard.LocalBox((slice(0, 2),)),
        sw.reshard.LocalBox((slice(0, 2), slice(1, 2)), (3, (2, 2))),
    ],
    sw.Rewrites: lambda: [
        sw.Rewrites(),
        sw.Rewrites([{"from": "a.{i}.{q,k}", "to": {"name": "b", "stack": "i", "packed": "(2 [q:4 k:2])"}}]),
        sw.Rewrites(
            [
                {
                    "from": {"name": "a", "pad_to": 8, "dim": -1, "transpose": True},
                    "to": "b",
                    "size": 3,
                    "optional": True,
                }
            ],
            drop=["{rest*}.bias"],
            unmatched="refuse",
        ),
        sw.Rewrites([{"from": "a", "to": "b"}]) + sw.Rewrites(drop=["{{x}}"]),
    ],
    sw.reshard.CollectiveStep: lambda: list(
        sw.plan_reshard(layout("data", "model").partition((4, 8)), layout().partition((4, 8))).collectives("int8") or ()
    ),
    sw.reshard.Collective: lambda: [
        sw.reshard.Collective("all-gather", ("x",), from_dim=0),
        sw.reshard.Collective("all-to-all", ["x", "y"], 0, 1),  # type: ignore[arg-type]
        sw.reshard.Collective("collective-permute", ("x",), layout=layout("model")),
    ],
    sw.reshard.CollectiveCost: lambda: [
        sw.reshard.cost_of(
            [sw.reshard.Collective("all-gather", ("data",), from_dim=0)], layout().partition((4, 8)), "int8"
        ),
        sw.reshard.cost_of([], layout().partition((4, 8)), "int8"),
    ],
    sw.reshard.CollectiveObstacle: lambda: [sw.reshard.CollectiveObstacle("no-layout", "a side is made of boxes")],
    sw.reshard.LinkModel: lambda: [
        sw.reshard.LinkModel(),
        sw.reshard.LinkModel(1e9, 0),
        sw.reshard.LinkModel({"x": 1e9, "y": 2}, {"y": 0, "x": 1e-6}),
    ],
    dt.Mesh: lambda: [dt.Mesh.from_string(MESH), dt.Mesh.from_device("CPU:0")],
    dt.Layout: lambda: [
        dt.Layout(["x", dt.UNSHARDED], dt.Mesh.from_string(MESH)),
        dt.Layout(["x", dt.MATCH], dt.Mesh.from_string(MESH)),
        dt.Layout.from_device("CPU:0"),
    ],
    dt.LayoutType: lambda: [dt.LayoutType.STATIC],
    dt.DeviceSpec: lambda: [dt.DeviceSpec(), dt.DeviceSpec(job="worker", device_type="gpu", device_index=3)],
    dt.MeshDimension: lambda: [dt.MeshDimension("x", 2)],
    dt.MeshDimensionProto: lambda: [dt.MeshDimensionProto("x", 2)],
    dt.ShardingSpec: lambda: [dt.ShardingSpec("x")],
    dt.MeshProto: lambda: [
        mesh_proto(),
        dt.MeshProto(),
        dt.MeshProto([dt.MeshDimensionProto("x", 2)], [0, 1], [0], ["CPU:0"], ["CPU:0", "CPU:1"]),  # type: ignore[arg-type]
    ],
    dt.LayoutProto: lambda: [
        dt.LayoutProto((dt.ShardingSpec("x"),), mesh_proto(), dt.LayoutProto.LayoutType.STATIC),
        dt.LayoutProto([dt.ShardingSpec("x")], None),  # type: ignore[arg-type]
    ],
    hlo.Iota: lambda: [hlo.Iota((2, 4), (1, 0)), hlo.Iota([2, 4], [1, 0])],  # type: ignore[arg-type]
    hlo.HloSharding: lambda: [
        hlo.parse_hlo("{devices=[4,2]<=[2,4]T(1,0)}"),
        hlo.parse_hlo("{devices=[1,2]1,0}"),
        hlo.parse_hlo("{maximal device=3}"),
        hlo.HloSharding("tiled", [2, 1, 1], [1, 0], ["replicated"]),  # type: ignore[arg-type]
    ],
    megatron.RankOffsets: lambda: megatron.to_rank_offsets(layout(None, "model")),
    torch.LocalShards: lambda: [
        torch.local_shards([torch.Shard(0), torch.StridedShard(0, 2)], mesh(), (15, 5)),
        torch.local_shards([torch.Replicate(), torch.Replicate()], mesh(), ()),
        torch.LocalShards([[1]], [[0]], [True]),
    ],
    torch.Shard: lambda: [torch.Shard(1)],
    torch.StridedShard: lambda: [torch.StridedShard(0, 2)],
    torch.Replicate: lambda: [torch.Replicate()],
    torch.Partial: lambda: [torch.Partial(), torch.Partial("max")],
    sw.LayoutRule: lambda: [
        sw.LayoutRule(layout()),
        sw.LayoutRule(("data", None), "ceil"),
        sw.LayoutRule(layout(), uneven="even"),
    ],
    report.LayoutReport: lambda: [report_of(), report_of(indivisible=False), report_with_a_default()],
    tensor_report.TensorReport: lambda: list(report_of().tensors),
    LeftOut: lambda: [LeftOut("dropped", ("a",), "1 tensor is dropped", 4), LeftOut("axes", ("pp",), "unused")],
    problems.Clash: lambda: list(report_of().clashes),
    problems.RankMismatch: lambda: list(report_of().rank_mismatches),
    problems.IndivisibleDim: lambda: list(report_of().indivisible),
    problems.Misfit: lambda: [problems.Misfit("qkv", "qkv$", "too short"), problems.Misfit("qkv", None, "too short")],
    store.Difference: lambda: [
        store.Difference("a", "missing"),
        store.Difference("a", "shape", (2, 3), (3, 2)),
        store.Difference("a", "values", 1.5, -0.0, (1, 2), 3),
    ],
    store.MemoryFault: lambda: [
        store.MemoryFault("w", "cpu:1", "qkv", "differs"),
        store.MemoryFault("", None, "", "zero"),
    ],
    store.Total: lambda: [store.Total("weights", 3, 24), store.Total("exp_avg", 2, 16)],
    store.Digest: lambda: [store.Digest(5, "float32", (2, 3)), store.Digest(0, ">f4", ())],
    store.Damage: lambda: [store.Damage("w", "a.safetensors", "x"), store.Damage(None, "a.safetensors", "y")],
    store.VerifyReport: lambda: [store.VerifyReport(Path("model"), "safetensors", 2, 24, 0, 0)],
    store.WriteOutline: lambda: [
        store.WriteOutline((("model.safetensors", 24),), 24, 1 << 20, 2, 1, 1 << 30),
        store.WriteOutline((("model.safetensors", 24),), 24, 1 << 20, 2, 1, 1 << 30, 32, 3, 0.5),
    ],
    store.WriteReport: lambda: [store.WriteReport(Path("model"), 2, 24, 24, 20, 4)],
    store.ReadArray: lambda: [store.ReadArray("w", "cpu:1", "float32", (2, 3), 24)],
    store.TaskReceipt: lambda: [store.TaskReceipt("ab", 3, ((0, 8, 24),), (5,), (), 16, 16, 0.25, "host:1")],
}

#: The public classes that are not values, and why.
NOT_VALUES: dict[type, str] = {
    sw.Deployment: "its repr is a summary of a whole model; tests/deploy compares, copies and pickles it",
    sw.LayoutMap: "rules are added and removed; it compares and pickles as a mapping",
    sw.Shard: "holds memory that can be written, so it is equal to itself alone",
    sw.ShardedArray: "holds memory that can be written, as a numpy array does",
    sw.Variable: "gets its data later",
    store.Differences: "a list, which may be changed",
    store.ObjectPath: "holds a filesystem of fsspec, by which it compares",
    sw.CheckpointPlan: "is compared by its digest; `save` and `load` are its text",
    sw.reshard.ModelPlan: "compares, hashes and pickles; its repr is a line, for it is two layouts of each tensor",
    sw.store.Task: "compares, hashes and pickles; its repr names it, for it is thousands of numbers",
    store.StoredCheckpoint: "holds open files",
    store.StoredTensor: "reads from an open file",
    store.StoredObject: "reads from an open file",
    store.StoredPiece: "reads from an open file",
    store.DeviceReads: "holds numpy arrays",
    store.Learned: "holds a mapping, of texts",
    store.LearnedRules: "holds a mapping, of texts",
    store.RecordedModel: "holds mappings, of a configuration and recordings",
    store.MemoryDigests: "holds dicts, of digests, and a numpy array",
    store.Training: "knows the names of an open checkpoint",
    store.TrainedParameter: "holds a mapping, of the names of states",
    Form: "holds a function, of which no text can make it again",
    quantized.Components: "holds a dict, of values",
    dt.DTensor: "holds memory that can be written",
    dt.LayoutMap: "rules are added and removed",
}


def public_classes() -> Iterator[type]:
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        for exported in module.__all__:
            found = getattr(module, exported)
            if inspect.isclass(found) and found.__module__.startswith("shardwise") and not is_protocol(found):
                yield found


def is_protocol(found: type) -> bool:
    return bool(getattr(found, "_is_protocol", False))


def cases() -> list[Any]:
    return [
        pytest.param(kind, i, id=f"{kind.__module__}.{kind.__name__}-{i}")
        for kind, make in VALUES.items()
        for i in range(len(make()))
    ]


#: What a `repr` may name, besides the class itself.
NAMES: dict[str, Any] = {
    **{name: getattr(sw, name) for name in dir(sw)},
    **{kind.__name__: kind for kind in VALUES},
    **{type(Path()).__name__: Path},
}


def names_for(kind: type) -> dict[str, Any]:
    # Two modules have a `Layout` or a `Shard`; whose, their user knows.
    module = importlib.import_module(kind.__module__)
    return {**NAMES, **vars(module), "LayoutType": dt.LayoutType}


def test_every_public_class_is_here() -> None:
    for found in public_classes():
        assert found in VALUES or found in NOT_VALUES or issubclass(found, Exception), found
    assert not VALUES.keys() & NOT_VALUES.keys()


@pytest.mark.parametrize("error", [found for found in public_classes() if issubclass(found, Exception)])
def test_an_error_is_pickled_with_its_message(error: type[Exception]) -> None:
    back = pickle.loads(pickle.dumps(error("what was given")))
    assert type(back) is error
    assert str(back) == "what was given"


@pytest.mark.parametrize(("kind", "i"), cases())
def test_a_value_is_equal_to_its_copies_and_hashes_as_they_do(kind: type, i: int) -> None:
    value, again = VALUES[kind]()[i], VALUES[kind]()[i]
    pickled = [pickle.loads(pickle.dumps(value, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    for other in [again, copy.copy(value), copy.deepcopy(value), *pickled]:
        assert type(other) is type(value)
        assert other == value
        assert (other != value) is False
        assert hash(other) == hash(value)
        assert repr(other) == repr(value)
    assert value != object()
    assert (value == object()) is False
    assert value != None  # noqa: E711 (the operator is what is tested)
    assert {value: 1}[again] == 1


@pytest.mark.parametrize("kind", list(VALUES))
def test_different_values_differ(kind: type) -> None:
    values = VALUES[kind]()
    assert len(set(values)) == len({repr(value) for value in values})


@pytest.mark.parametrize(("kind", "i"), cases())
def test_the_repr_of_a_value_makes_it_again(kind: type, i: int) -> None:
    value = VALUES[kind]()[i]
    if isinstance(value, dt.LayoutType):
        assert dt.LayoutType[value.name] is value  # As every enumeration of Python.
        return
    text = repr(value).replace("<LayoutType.STATIC: 1>", "1")
    assert eval(text, names_for(kind)) == value


@pytest.mark.parametrize(("kind", "i"), cases())
def test_a_value_cannot_be_changed(kind: type, i: int) -> None:
    value = VALUES[kind]()[i]
    before, hashed = repr(value), hash(value)
    if isinstance(value, enum.Enum):
        return  # Python's affair.
    attributes = [name for name in dir(value) if not name.startswith("_")]
    for name in [*attributes, "a_name_that_it_does_not_have"]:
        if kind is sw.TensorLayout and name == "device_mesh":
            continue  # It may be given later, once: tests/test_layout.py.
        with pytest.raises((AttributeError, TypeError)):
            setattr(value, name, None)
        with pytest.raises((AttributeError, TypeError)):
            delattr(value, name)
    for name, array in arrays_of(value):
        shape = array.shape
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # numpy 2.5 would rather have `reshape`.
            array.shape = (1, *shape)
        # The items of a tuple are what they are.
        assert getattr(value, name).shape == shape or kind is torch.LocalShards
        array.shape = shape
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
        # Nor what it is a view of.
        owner: Any = array
        while isinstance(owner, np.ndarray):
            with pytest.raises(ValueError, match="WRITEABLE"):
                owner.flags.writeable = True
            owner = owner.base
        # Numbers are bytes; objects cannot be, and what has them has nothing public to write to.
        assert [name for name in dir(owner) if not name.startswith("_")] == [] or memoryview(owner).readonly
    assert (repr(value), hash(value)) == (before, hashed)


def arrays_of(value: Any) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """The arrays that a value keeps: attributes that give the same memory twice."""
    for name in dir(value):
        with suppress(sw.LayoutError):  # A layout without its mesh has no answer.
            array = None if name.startswith("_") else getattr(value, name)
            if isinstance(array, np.ndarray) and np.shares_memory(array, getattr(value, name)):
                yield name, array


def test_arrays_that_values_keep_are_found() -> None:
    kept = {name for made in (mesh(), plan(), report_of()) for name, _ in arrays_of(made)}
    assert kept == {"devices", "device_bytes", "kept", "transfers"}


def test_a_sharded_array_and_its_shards_are_pickled_with_their_values() -> None:
    whole = np.arange(16.0).reshape(2, 8)
    sharded = sw.distribute_tensor(whole, layout("data", "model"))
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(sharded, protocol)).numpy().tolist() == sharded.numpy().tolist()
    back = pickle.loads(pickle.dumps(sharded))
    assert back.partition == sharded.partition
    assert back.numpy().tolist() == whole.tolist()
    shard = pickle.loads(pickle.dumps(sharded.shards[5]))
    assert (shard.device, shard.index, shard.replica_id) == ("cpu:5", sharded.shards[5].index, 0)
    assert shard.data.tolist() == sharded.shards[5].data.tolist()


def test_a_refit_plan_keeps_nothing_of_its_callers() -> None:
    sides = {"a": partition()}
    plan = sw.plan_refit(sides, sides)
    hashed = hash(plan)
    sides["b"] = partition()
    for given in (plan.src, plan.dst, plan.plans):
        given.clear()  # type: ignore[union-attr]
    assert (hash(plan), list(plan.plans)) == (hashed, ["a"])
    assert plan == sw.plan_refit({"a": partition()}, {"a": partition()})
    assert plan != sw.plan_refit(sides, sides)


def test_a_layout_map_is_compared_pickled_and_copied() -> None:
    rules = sw.LayoutMap(mesh(), match="fullmatch")
    rules["a.*"] = (None, "model")
    for other in (pickle.loads(pickle.dumps(rules)), copy.deepcopy(rules), copy.copy(rules)):
        assert other == rules
        other["b"] = ("data",)
        assert list(rules) == ["a.*"]


def test_what_takes_a_value_leaves_it_as_it_was() -> None:
    unbound, bound, whole = sw.TensorLayout(("data", "model")), layout(None, "model"), np.zeros((4, 8))
    values = [unbound, bound, mesh(), partition(), layout("data", "model").partition((4, 8))]
    before = [(repr(value), hash(value)) for value in values]
    for rules in (sw.LayoutMap(mesh()), sw.LayoutMap()):
        rules["kernel"] = unbound
        rules["bias"] = bound
        rules.report({"kernel": (4, 8)})
        rules.apply({"kernel": whole})
    with layout_map_scope(sw.LayoutMap(mesh())):
        sw.initialize_variables(sw.Variable((4, 8), "float32", np.zeros, name="kernel"))
    sharded = sw.distribute_tensor(whole, bound)
    sw.array.all_gather(sharded.reshard(layout("data", "model")))
    sw.plan_reshard(sharded.partition, values[4]).explain()  # type: ignore[arg-type]
    hlo.from_hlo(hlo.to_hlo(bound), values[2])  # type: ignore[arg-type]
    torch.from_placements(torch.to_placements(bound), values[2], 2)  # type: ignore[arg-type]
    assert [(repr(value), hash(value)) for value in values] == before
