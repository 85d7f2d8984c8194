"""Rewrites between deployments in memory: what the engines' own loaders give each rank, by descriptors alone."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise import DeviceMesh, LayoutError, LayoutMap, Rewrites, TensorLayout, plan_model
from shardwise.deploy import Deployment, DeploymentRule
from shardwise.reshard import ModelPlan

from ...oracle.families.models import DATA, digest, numbered, read

RULES = sw.example_rules()
#: What Megatron's answers leave out: vocabularies, which are padded by the model that is made.
LEFT_OUT = {"megatron": {"embedding.word_embeddings.weight", "output_layer.weight"}}
#: Numbers of ranks for which the rules say otherwise than vLLM; see tests/rules/test_families.py.
OTHERWISE = {("qwen3-moe-1", "vllm", 8), ("qwen3-next-0", "vllm", 4)}
#: A bias that ranks add together: the engine's other ranks hold zeros, ours all hold it; see there also.
ON_THE_FIRST = "w2_bias"
SAME = {"llama-tied": "llama"}
#: What an engine computes with cannot be rewritten, and another engine needs it.
COMPUTED = {"nemotron-h"}
MODELS = [file.name.removesuffix(".json.gz") for file in sorted(DATA.glob("*.json.gz"))]


@functools.cache
def answer(model: str) -> dict[str, Any]:
    return read(model)


def rules_of(model: str, engine: str) -> str:
    family = model.rpartition("-")[0]
    return f"{engine}/{SAME.get(family, family)}"


def side(model: str, engine: str, ranks: int) -> tuple[LayoutMap, Rewrites]:
    """The layouts of an engine, whose ranks are named after it, and how it names and stores tensors."""
    file, config = RULES[rules_of(model, engine)], answer(model)["config"]
    mesh = DeviceMesh((2, ranks), ("dp", "tp"), [f"{engine}:{i}" for i in range(2 * ranks)])
    return LayoutMap.from_toml(file, mesh, config=config), Rewrites.from_toml(file, config=config)


def held(plan: ModelPlan, src: LayoutMap, stored: dict[str, Any]) -> dict[Any, dict[str, Any]]:
    """Each source rank's arrays."""
    found: dict[Any, dict[str, Any]] = {}
    for name, whole in stored.items():
        layout = src.layout_of(name, whole.ndim)
        assert layout is not None
        sharded = sw.distribute_tensor(whole, layout, src.uneven_of(name) or "even")
        for label in sharded.tiling.holders:
            found.setdefault(label, {})[name] = np.ascontiguousarray(sharded.shard(label))
    return found


def carried_out(plan: ModelPlan, memory: dict[Any, dict[str, Any]], shapes: dict[Any, dict[str, Any]]) -> Any:
    """What each rank then has, by the rows of its own descriptors; every byte is written once."""
    parts = {label: plan.descriptors(label) for label in plan.bytes_sent()}
    data = {(label, name): array.tobytes() for label, arrays in memory.items() for name, array in arrays.items()}
    made: dict[Any, dict[str, Any]] = {}
    for label, arrays in shapes.items():
        part = parts[label]
        out = {name: np.zeros(shape, dtype) for name, (shape, dtype) in arrays.items()}
        flat = {name: array.reshape(-1).view(np.uint8) for name, array in out.items()}
        for one in flat.values():
            one[...] = 0xFF
        times = {name: np.zeros(array.nbytes, np.int8) for name, array in out.items()}
        for rows, kind in ((part.receives, "receives"), (part.copies, "copies"), (part.zeros, "zeros")):
            for peer, of, to, src, dst, size, count, src_stride, dst_stride in rows.tolist():
                who = label if kind != "receives" else part.peers[peer]
                for turn in range(count):
                    a, b = src + turn * src_stride, dst + turn * dst_stride
                    values = bytes(size) if kind == "zeros" else data[who, part.tensors[of]][a : a + size]
                    flat[part.tensors[to]][b : b + size] = np.frombuffer(values, np.uint8)
                    times[part.tensors[to]][b : b + size] += 1
        made[label] = out
        assert all(one.max(initial=0) <= 1 for one in times.values())
        assert part.bytes_received == plan.bytes_received()[label]
        for number, peer in enumerate(part.peers):
            mine = part.receives[part.receives["peer"] == number].tolist()
            theirs = parts[peer].sends[parts[peer].sends["peer"] == part.peers.index(label)].tolist()
            assert [row[1:] for row in mine] == [row[1:] for row in theirs]
    return made


def check_pair(model: str, old: tuple[str, int], new: tuple[str, int], source: dict[str, Any]) -> int:
    """From one engine's ranks to another's; the number of arrays that were compared with the engine's own."""
    (src, src_rewrites), (dst, dst_rewrites) = side(model, *old), side(model, *new)
    # What an engine computes with is left out.
    rewrites = [rewrite for each in (src_rewrites, dst_rewrites) for one in each.sets for rewrite in one.rewrites]
    refused = [template for one in rewrites if one.refused for _, template in one.source.names]
    source = {name: value for name, value in source.items() if all(one.matched(name) is None for one in refused)}
    # Numbers of elements are the bytes of floats: integers under the names of weights are refused, as quantized.
    source = {name: value.view(np.float32) for name, value in source.items()}
    config_tensors = {name: (value.shape, value.dtype) for name, value in source.items()}
    plan = plan_model(src, dst, config_tensors, rewrites=dst_rewrites, source_rewrites=src_rewrites)
    one = LayoutMap(DeviceMesh((1,), ("all",), ["all"]), default="replicated")
    whole = {name: [value] for name, value in source.items()}
    stored = {
        name: value[0] for name, value in plan_model(one, one, config_tensors, rewrites=src_rewrites).run(whole).items()
    }
    memory = held(plan, src, stored)
    shapes: dict[Any, dict[str, Any]] = {}
    for name, (_, after) in plan._model.ends.items():
        for label in after.holders:
            shapes.setdefault(label, {})[name] = after.holder_shape(label), plan._model.tensors[name][1]
    made = carried_out(plan, memory, shapes)
    ranks = answer(model)["engines"][new[0]]["ranks"][str(new[1])]
    compared = 0
    for rank, expected in enumerate(ranks):
        for replica in range(2):
            arrays = made[f"{new[0]}:{replica * new[1] + rank}"]
            for name in arrays.keys() - LEFT_OUT.get(new[0], set()):
                is_zero = rank and name.endswith(ON_THE_FIRST)
                numbers = arrays[name].view(np.int32)
                array = np.where((numbers == -1) | is_zero, 0, numbers)
                assert [list(array.shape), digest(array)] == expected[name], (name, rank)
                compared += 1
    return compared


def counts(model: str, engine: str) -> list[int]:
    return [
        int(count)
        for count, ranks in answer(model)["engines"].get(engine, {"ranks": {}})["ranks"].items()
        if "refused" not in ranks and (model, engine, int(count)) not in OTHERWISE
    ]


#: Models for which both engines have answers, and rules whose numbers are not computed.
PAIRS = [
    pytest.param(model, engines, id=f"{model}-{engines[0]}-{engines[1]}")
    for engines in (("megatron", "vllm"), ("vllm", "megatron"))
    for model in MODELS
    if model.rpartition("-")[0] not in COMPUTED
    and all(rules_of(model, engine) in RULES and counts(model, engine) for engine in engines)
]


def test_there_are_models_to_compare() -> None:
    assert len(PAIRS) >= 44


@pytest.mark.heavy
@pytest.mark.parametrize(("model", "engines"), PAIRS)
def test_every_rank_gets_what_the_engine_would_load(model: str, engines: tuple[str, str]) -> None:
    old, new = engines
    source = numbered(answer(model)["tensors"])
    compared = 0
    for before, after in [
        (max(counts(model, old)), min(counts(model, new))),
        (min(counts(model, old)), max(counts(model, new))),
    ]:
        compared += check_pair(model, (old, before), (new, after), source)
    assert compared


def test_an_engine_that_computes_with_values_is_refused() -> None:
    source = numbered(answer("nemotron-h-0")["tensors"])
    (src, src_rewrites), (dst, dst_rewrites) = (side("nemotron-h-0", engine, 1) for engine in ("megatron", "vllm"))
    tensors = {name: (value.shape, value.dtype) for name, value in source.items()}
    with pytest.raises(LayoutError, match=r"cannot be rewritten: .*nothing is computed on values"):
        plan_model(src, dst, tensors, rewrites=dst_rewrites, source_rewrites=src_rewrites)


SAME_DEVICES = DeviceMesh((2, 2), ("x", "y"))
#: Rewrites, the tensors before, and what a whole tensor afterwards is by numpy.
ORDERS: list[tuple[dict[str, Any], dict[str, tuple[int, ...]], Any]] = [
    ({"from": "a", "to": "b"}, {"a": (8, 4)}, lambda t: {"b": t["a"]}),
    ({"from": "a", "to": {"name": "b", "transpose": True}}, {"a": (8, 6)}, lambda t: {"b": t["a"].T}),
    (
        {"from": "a", "to": {"name": "b", "pad_to": 8}, "size": 5},
        {"a": (5, 4)},
        lambda t: {"b": np.pad(t["a"], ((0, 3), (0, 0)))},
    ),
    (
        {"from": {"name": "a", "pad_to": 4}, "to": {"name": "b", "pad_to": 6, "dim": 0}, "size": 3},
        {"a": (8, 4)},
        lambda t: {"b": np.pad(t["a"][:3], ((0, 3), (0, 0)))},
    ),
    (
        {"from": "{gate,up}", "to": {"name": "b", "packed": "(4 [gate:1 up:1])"}},
        {"gate": (4, 6), "up": (4, 6)},
        lambda t: {"b": np.stack([t["gate"], t["up"]], 1).reshape(8, 6)},
    ),
    (
        {"from": "e.{i}.{w,v}", "to": {"name": "b", "stack": "i", "packed": "w:(n) + v:(n)"}},
        {f"e.{i}.{x}": (4, 2) for i in range(4) for x in "wv"},
        lambda t: {"b": np.stack([np.concatenate([t[f"e.{i}.w"], t[f"e.{i}.v"]]) for i in range(4)])},
    ),
    (
        {"from": {"name": "s", "stack": "i"}, "to": "e.{i}"},
        {"s": (4, 6, 2)},
        lambda t: {f"e.{i}": t["s"][i] for i in range(4)},
    ),
    (
        {"from": "a", "to": {"name": "b", "zigzag": 2}},
        {"a": (8, 4)},
        lambda t: {"b": t["a"].reshape(4, 2, 4)[[0, 3, 1, 2]].reshape(8, 4)},
    ),
    (
        {"from": "a", "to": {"name": "b", "dims": "h d n -> (h d) n", "h": 2}},
        {"a": (8, 6)},
        lambda t: {"b": t["a"].reshape(2, 4, 6)},
    ),
    (
        {"from": {"name": "a", "dims": "(h two half) n -> (h half two) n", "h": 2, "two": 2}, "to": "b"},
        {"a": (8, 6)},
        lambda t: {"b": t["a"].reshape(2, 2, 2, 6).transpose(0, 2, 1, 3).reshape(8, 6)},
    ),
]


def layouts_at_random(
    draw: np.random.Generator, shapes: dict[str, tuple[int, ...]], mesh: DeviceMesh
) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, shape in shapes.items():
        axes: list[Any] = [None] * len(shape)
        for axis in mesh.axis_names:
            if draw.random() < 0.7:
                dim = int(draw.integers(0, len(shape)))
                axes[dim] = axis if axes[dim] is None else (axes[dim], axis)
        made[name] = TensorLayout(axes, mesh).partition(shape, "balanced")
    return made


@pytest.mark.parametrize("number", range(len(ORDERS)))
@pytest.mark.parametrize("seed", range(4))
def test_orders_by_numpy(number: int, seed: int) -> None:
    rewrite, shapes, expected_of = ORDERS[number]
    draw = np.random.default_rng([number, seed])
    dtype = ("int16", "float32", "uint8", "complex64")[seed]
    whole = {name: draw.integers(1, 200, shape).astype(dtype) for name, shape in shapes.items()}
    expected = expected_of(whole)
    old = SAME_DEVICES
    new = SAME_DEVICES if seed % 2 else DeviceMesh((3,), ("z",), ["cpu:3", "gpu:0", "cpu:1"])
    src = layouts_at_random(draw, shapes, old)
    if seed == 3:  # Ranges of the flattened tensors, as FSDP has them.
        src = {
            name: sw.Tiling.from_flat_ranges(shape, {f"cpu:{i}": (at, at + size) for i, (at, size) in enumerate(parts)})
            for name, shape in shapes.items()
            for n in [int(np.prod(shape))]
            for parts in [[(0, n // 3), (n // 3, n - n // 3)]]
        }
    dst = layouts_at_random(draw, {name: value.shape for name, value in expected.items()}, new)
    tensors = {name: (shape, dtype) for name, shape in shapes.items()}
    plan = plan_model(src, dst, tensors, rewrites=Rewrites([rewrite]))
    assert list(plan) == list(expected)
    assert {name: tensor[0] for name, tensor in plan._model.tensors.items()} == {
        n: v.shape for n, v in expected.items()
    }
    memory: dict[Any, dict[str, Any]] = {}
    for name, tiling in src.items():
        for label in tiling.holders:
            shard = np.zeros(tiling.holder_shape(label), dtype)
            for piece in tiling.pieces(label):
                values = whole[name][piece.box]
                if isinstance(piece.start, tuple):
                    shard[tuple(slice(a, a + n) for a, n in zip(piece.start, values.shape, strict=True))] = values
                else:
                    shard[piece.start : piece.start + values.size] = values.ravel()
            memory.setdefault(label, {})[name] = shard
    shapes_then: dict[Any, dict[str, Any]] = {}
    for name, tiling in dst.items():
        for label in tiling.holders:
            shapes_then.setdefault(label, {})[name] = tiling.holder_shape(label), dtype
    made = carried_out(plan, memory, shapes_then)
    here = plan.run({name: [memory[label][name] for label in tiling.holders] for name, tiling in src.items()})
    for name, tiling in dst.items():
        for position, label in enumerate(tiling.holders):
            assert made[label][name].tobytes() == expected[name][tiling.box(label)].tobytes(), (name, label)
            assert here[name][position].tobytes() == made[label][name].tobytes()
    # Nothing that a rank has is sent, and padding least of all.
    moved = sum(plan.bytes_sent().values())
    assert moved == plan.total_bytes() == sum(plan.bytes_received().values())
    assert sum(plan.bytes_kept().values()) + moved == sum(
        tiling.nbytes(dtype)[i] for tiling in dst.values() for i in range(len(tiling.holders))
    )
    if "pad_to" not in str(rewrite):
        back = Rewrites([rewrite]).inverse()
        assert plan == plan_model(
            src, dst, {name: (v.shape, dtype) for name, v in expected.items()}, source_rewrites=back
        )
    again = pickle.loads(pickle.dumps(plan))
    assert (again, again.devices, again.bytes_sent()) == (plan, plan.devices, plan.bytes_sent())


def test_tensors_that_are_made_alike_share_their_plan() -> None:
    rewrites = Rewrites([{"from": "h.{i}.{q,k}", "to": {"name": "h.{i}.qk", "packed": "(2 [q:2 k:1])"}}])
    tensors = {f"h.{i}.{x}": ((4, 3) if x == "q" else (2, 3), "float32") for i in range(50) for x in "qk"}
    cut = TensorLayout(("x", None), DeviceMesh((2,), ("x",)))
    there = TensorLayout((None, None), DeviceMesh((1,), ("x",), ["gpu"]))
    src, dst = dict.fromkeys(tensors, cut), {f"h.{i}.qk": there for i in range(50)}
    plan = plan_model(src, dst, tensors, rewrites=rewrites)
    assert len(plan._model.pairs) == 1
    # q of the first rank is rows 0 and 1, its k row 2; 12 bytes a row.
    rows = plan.descriptors("gpu").receives[:2]
    assert [tuple(row)[3:7] for row in rows.tolist()] == [(0, 0, 24, 1), (0, 24, 12, 1)]
    assert [plan.descriptors("gpu").tensors[row["src_tensor"]] for row in rows] == ["h.0.q", "h.0.k"]
    assert plan.descriptors("gpu").tensors[:2] == ("h.0.qk", "h.1.qk")


class TestRefusals:
    def test_what_cannot_be_rewritten(self) -> None:
        mesh = DeviceMesh((2,), ("x",))
        fused = Rewrites([{"from": "{q,k}", "to": {"name": "qk", "packed": "q:(2) + k:(2)"}}])
        tensors = dict.fromkeys("qk", ((2,), "float32"))
        there = {"qk": TensorLayout((None,), mesh)}
        cut = TensorLayout(("x",), mesh)
        sums = TensorLayout((None,), mesh, unreduced=["x"])
        with pytest.raises(LayoutError, match="'q' has partial sums, which cannot be rewritten"):
            plan_model(dict.fromkeys("qk", sums), there, tensors, rewrites=fused)
        with pytest.raises(LayoutError, match="'q': its holders have no labels"):
            plan_model(dict.fromkeys("qk", sw.Tiling.grid((2,), (1,))), there, tensors, rewrites=fused)
        with pytest.raises(LayoutError, match="'qk': its holders have no labels"):
            plan_model(dict.fromkeys("qk", cut), {"qk": sw.Tiling.grid((4,), (2,))}, tensors, rewrites=fused)
        with pytest.raises(TypeError, match="packed elements cannot be rewritten"):
            plan_model(dict.fromkeys("qk", cut), there, dict.fromkeys("qk", ((2,), "F4")), rewrites=fused)
        with pytest.raises(LayoutError, match="'k' is missing; it belongs with 'q'"):
            plan_model({"q": cut}, there, {"q": ((2,), "float32")}, rewrites=fused)
        with pytest.raises(LayoutError, match="dst has no layout for 'qk'"):
            plan_model(dict.fromkeys("qk", cut), {}, tensors, rewrites=fused)
        with pytest.raises(LayoutError, match="src has no layout for 'k'"):
            plan_model({"q": cut}, there, tensors, rewrites=fused)
        with pytest.raises(TypeError, match="rewrites must be"):
            plan_model(dict.fromkeys("qk", cut), there, tensors, rewrites=[])  # type: ignore[arg-type]
        with pytest.raises(LayoutError, match="src_shards has no shards of 'q'"):
            plan_model(dict.fromkeys("qk", cut), there, tensors, rewrites=fused).run({})
        with pytest.raises(LayoutError, match="has the dtype 'float33'"):
            plan_model(dict.fromkeys("qk", cut), there, dict.fromkeys("qk", ((2,), "float33")), rewrites=fused)


def test_a_deployment_with_stages_and_experts() -> None:
    """Experts that a trainer has one by one, on the ranks of their stage, become stacks that are cut by features."""
    meshes = {"dense": DeviceMesh((2, 2), ("pp", "tp")), "expert": DeviceMesh((2, 2), ("pp", "ep"))}
    trainer = Deployment(
        4, meshes,
        {
            r"h\.{i}\.experts\.{e}\.": DeploymentRule((None, None), "expert", {"pp": "i", "ep": "e // 2"}),
            r"h\.{i}\.norm": DeploymentRule((None,), "dense", {"pp": "i"}),
        },
    )  # fmt: skip
    stacked = Rewrites([{"from": "h.{i}.experts.{e}.{gate,up}",
                         "to": {"name": "h.{i}.w13", "stack": "e", "packed": "gate:(n) + up:(n)"}}])  # fmt: skip
    tensors: dict[str, Any] = {
        f"h.{i}.experts.{e}.{x}": ((4, 3), "int32") for i in range(2) for e in range(4) for x in ("gate", "up")
    }
    tensors |= {f"h.{i}.norm": ((3,), "int32") for i in range(2)}
    whole = {n: np.arange(np.prod(s)).reshape(s).astype(d) + 100 * i for i, (n, (s, d)) in enumerate(tensors.items())}
    packed = sw.packed.parse("gate:(n@tp) + up:(n@tp)")
    engine = Deployment(["gpu:0", "gpu:1"], DeviceMesh((2,), ("tp",)), {"w13": (None, packed, None), "norm": (None,)})
    plan = plan_model(trainer, engine, tensors, rewrites=stacked)
    memory = {
        label: {name: whole[name][one.box(label)] for name, one in trainer.held_by(label, tensors).items()}
        for label in trainer.devices
    }
    stacks: dict[str, Any] = {f"h.{i}.w13": ((4, 4, 3), "int32") for i in range(2)}
    stacks |= {f"h.{i}.norm": ((3,), "int32") for i in range(2)}
    shapes = {str(label): stacks for label in engine.devices}
    made = carried_out(plan, memory, shapes)
    for tp, label in enumerate(engine.devices):
        for i in range(2):
            for e in range(4):
                gate, up = (whole[f"h.{i}.experts.{e}.{x}"][2 * tp : 2 * tp + 2] for x in ("gate", "up"))
                assert made[label][f"h.{i}.w13"][e].tolist() == [*gate.tolist(), *up.tolist()]
