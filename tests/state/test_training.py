"""Training states by hand arithmetic; `tests/deploy/test_corpora.py` has what frameworks allocate."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.deploy import Deployment, DeploymentRule, fsdp2
from shardwise.quantized.forms import NO_COMPONENTS
from shardwise.state import SHARDINGS, Cache, Lora, key_value_caches, training_state
from shardwise.state.described import described
from shardwise.state.placed import PlacedTensors

MESH = sw.DeviceMesh((4, 2), ("data", "tp"))


def rules() -> sw.LayoutMap:
    found = sw.LayoutMap(MESH)
    found["up"] = ("tp", None)
    found["down"] = (None, "tp")
    found["norm"] = (None,)
    return found


#: 3 x 5 over 2 is cut in no dim that does not divide.
MODEL = {"0.up": ((6, 5), "bfloat16"), "0.down": ((5, 6), "bfloat16"), "0.norm": ((5,), "bfloat16")}


def of_kind(state: Any, kind: str) -> list[tuple[int, int]]:
    return list(zip(state.held[kind].tolist(), state.allocated[kind].tolist(), strict=True))


def test_everything_whole() -> None:
    """3*5 + 5*3 + 5 = 35 elements; masters of twice their bytes; two moments, three steps."""
    state = training_state(MODEL, rules(), "adamw", "ddp", masters="float32")
    assert of_kind(state, "weights") == of_kind(state, "gradients") == [(70, 70)] * 8
    assert of_kind(state, "masters") == [(140, 140)] * 8
    assert of_kind(state, "optimizer") == [(2 * 140 + 3 * 4,) * 2] * 8
    assert state.over == ("data",)


def test_moments_are_of_the_dtype_of_the_weights_where_there_is_no_master() -> None:
    state = training_state(MODEL, rules(), "adamw", "ddp")
    assert of_kind(state, "optimizer") == [(2 * 70 + 3 * 4,) * 2] * 8
    assert "masters" not in state.kinds


def test_rows_of_fully_shard() -> None:
    """Rows of (3, 5), (5, 3) and (5,) over 4: one each of 3; two each of 5, so 2, 2, 1, 0."""
    state = training_state(MODEL, rules(), "sgd-momentum", "fsdp2")
    held = [2 * (5 + 2 * 3 + 2), 2 * (5 + 2 * 3 + 2), 2 * (5 + 3 + 1), 0]
    expected = [size for size in held for _ in range(2)]
    assert state.held["weights"].tolist() == expected
    assert state.allocated["weights"].tolist() == [2 * (5 + 2 * 3 + 2)] * 8
    assert of_kind(state, "optimizer") == [(size, size) for size in expected]


def test_flat_parameters() -> None:
    """35 elements in one flat one over 4: 9 each, of which the last holds 8."""
    state = training_state(MODEL, rules(), "adamw", "fsdp1")
    assert of_kind(state, "weights") == [(18, 18)] * 6 + [(16, 18)] * 2
    assert of_kind(state, "optimizer") == [(2 * 18 + 4, 2 * 18 + 4)] * 6 + [(2 * 16 + 4, 2 * 18 + 4)] * 2
    # Aligned to 16 bytes, eight elements: 0..15, 16..31, 32..37, and 40 in all: 10 each, with 10, 5 + 4, 10, 1 + 5.
    aligned = training_state(MODEL, rules(), "adamw", "fsdp1", settings={"use_orig_params": True})
    assert [room for _, room in of_kind(aligned, "weights")] == [20] * 8
    assert [held for held, _ in of_kind(aligned, "weights")][::2] == [20, 18, 20, 12]


def test_partitions_of_zero() -> None:
    """35 elements, padded to a multiple of 2 * 4, are 40: 10 each in float32."""
    for sharding in ("zero1", "zero2"):
        state = training_state(MODEL, rules(), "adamw", sharding)
        assert of_kind(state, "weights") == [(70, 80)] * 8
        assert [room for _, room in of_kind(state, "masters")] == [40] * 8
        assert [held for held, _ in of_kind(state, "masters")][::2] == [40, 40, 40, 20]
        assert of_kind(state, "optimizer")[-1] == (2 * 20 + 4, 2 * 40 + 4)
    state = training_state(MODEL, rules(), "adamw", "zero3", settings={"stage3_param_persistence_threshold": 5})
    # 15, 15 and 5 over 4: 4 + 4 + 2 each; the norm is whole besides after a step, 4 * 2 for its 5.
    assert [room for _, room in of_kind(state, "weights")] == [20] * 8
    assert [held for held, _ in of_kind(state, "weights")][::2] == [20, 20, 2 * (4 + 4 + 1), 2 * (3 + 3)]
    assert of_kind(state, "whole") == [(10, 16)] * 8


def bytes_per_element(elements: int, ways: int, sharding: str, weights: str, gradients: str | None = None) -> float:
    """What a rank allocates for a matrix of so many elements, per element, with AdamW and float32 masters."""
    layouts = sw.LayoutMap(sw.DeviceMesh((ways,), ("data",)), default=())
    masters = "float32" if sharding == "ddp" else None
    tensors = {"w": ((elements // 1000, 1000), weights)}
    state = training_state(tensors, layouts, "adamw", sharding, over=["data"], gradients=gradients, masters=masters)
    return state.fullest[1] / elements


@pytest.mark.parametrize(
    ("parameters", "sharding", "published"),
    [
        (7.5e9, "ddp", {64: "120"}),
        (7.5e9, "zero2", {4: "41.3", 16: "21.6", 64: "16.6", 256: "15.4", 1024: "15.1"}),
        (7.5e9, "zero3", {4: "30", 16: "7.5", 64: "1.88", 256: "0.47", 1024: "0.12"}),
        (128e9, "zero2", {4: "704", 16: "368", 64: "284", 256: "263", 1024: "257"}),
        (128e9, "zero3", {4: "512", 16: "128", 64: "32", 256: "8", 1024: "2"}),
        (1e12, "zero2", {4: "5500", 16: "2875", 1024: "2013"}),
        (1e12, "zero3", {4: "4000", 16: "1000", 64: "250", 256: "62.5", 1024: "15.6"}),
    ],
)
def test_gigabytes_that_zero_was_published_with(parameters: float, sharding: str, published: dict[int, str]) -> None:
    """Figure 1 and Table 1 of Rajbhandari et al., "ZeRO", arXiv 1910.02054: with Adam in float16, rounded or cut."""
    for ways, said in published.items():
        found = parameters * bytes_per_element(int(parameters), ways, sharding, "float16") / 1e9
        digits = len(said.partition(".")[2])
        assert abs(found - float(said)) < 10**-digits, (ways, found, said)


@pytest.mark.parametrize("ways", [1, 8, 64])
def test_bytes_that_megatron_was_published_with(ways: int) -> None:
    """The table of Megatron-LM's `docs/source/api-guide/dist_optimizer.md`, which leaves out padding and steps.

    Its row of float16 gradients has 4 bytes more, for float32 copies that live within a step.
    """
    for weights, whole, fixed, shared in (("bfloat16", 18, 6, 12), ("float32", 16, 8, 8)):
        found = bytes_per_element(2**30 // 1000 * 1000, ways, "megatron-ddp", weights, "float32")
        assert found == pytest.approx(whole, rel=1e-6)
        found = bytes_per_element(2**30 // 1000 * 1000, ways, "megatron", weights, "float32")
        assert found == pytest.approx(fixed + shared / ways, rel=1e-6)


def test_buckets_of_megatron() -> None:
    """From the last: 5 at 0, 15 at 64, 15 at 128 to 143; the bucket ends at a multiple of 128: 256, and 64 each."""
    state = training_state(MODEL, rules(), "adamw", "megatron", gradients="float32")
    assert of_kind(state, "weights") == [(70, 512)] * 8
    assert of_kind(state, "gradients") == [(140, 1024)] * 8
    assert [held for held, _ in of_kind(state, "masters")][::2] == [20, 60, 60, 0]
    assert of_kind(state, "optimizer")[::2] == [(2 * 20 + 4,) * 2, (2 * 60 + 4,) * 2, (2 * 60 + 4,) * 2, (0, 0)]
    assert [tuple(kept) for kept in state.of("cpu:2") if kept.kind == "masters"] == [
        ("0.down", "masters", "master", 60, 60)
    ]


@pytest.mark.parametrize("sharding", [name for name in SHARDINGS if name != "hsdp"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum", "lion"])
def test_what_all_ranks_hold_is_the_model(sharding: str, optimizer: str) -> None:
    """Whatever is sharded, the parts that are held add up to all elements, as often as they are repeated."""
    state = training_state(MODEL, rules(), optimizer, sharding)
    moments = {"adamw": 2, "sgd-momentum": 1, "lion": 1}[optimizer]
    size = {"masters": 4}.get("masters" if "masters" in state.kinds else "", 2)
    copies = 1 if sharding not in ("none", "ddp", "megatron-ddp") else 4
    # Elements that tp cuts, 30 + 30, are once in all; the norm of 5 is on both.
    elements = (30 + 30 + 2 * 5) * copies
    found = {"moments": 0, "steps": 0}
    for device in MESH.devices.ravel():
        for kept in state.of(device):
            if kept.kind == "optimizer":
                found["steps" if kept.name == "step" else "moments"] += kept.held
    assert found["moments"] == moments * size * elements
    assert all((state.held[kind] <= state.allocated[kind]).all() for kind in state.kinds)
    by_device = np.array([sum(kept.allocated for kept in state.of(device)) for device in MESH.devices.ravel()])
    assert np.array_equal(by_device, state.device_bytes)


def test_groups_within_the_ranks() -> None:
    """Two groups of two ranks: rows of 3, 5 and 5 over 2."""
    state = training_state(MODEL, rules(), "lion", "hsdp", group=2)
    assert state.allocated["weights"].tolist() == [2 * (2 * 5 + 3 * 3 + 3)] * 8
    same = training_state(
        MODEL, fsdp2(2, 2, tp=2, tp_rules={"up": ("tp", None), "down": (None, "tp")}), "lion", "fsdp2"
    )
    assert same.over == ("shard",)
    assert np.array_equal(same.device_bytes, state.device_bytes)


def test_xla_has_the_same_room_everywhere() -> None:
    """7 rows over 4 under `ceil`: 2, 2, 2, 1."""
    layouts = sw.LayoutMap(MESH)
    layouts["w"] = sw.LayoutRule(("data", None), "ceil")
    state = training_state({"w": ((7, 3), "float32")}, layouts)
    assert of_kind(state, "weights")[::2] == [(24, 24), (24, 24), (24, 24), (12, 24)]


def test_eight_bits() -> None:
    """Below 4096 elements float32; beyond, a byte and a scale of four bytes for each 256; tables of 2 KiB once."""
    layouts = sw.LayoutMap(sw.DeviceMesh((1,), ("data",)))
    tensors = {"a": ((64, 64), "bfloat16"), "b": ((4095,), "bfloat16"), "c": ((4097,), "bfloat16")}
    state = training_state(tensors, layouts, "adam8bit", "ddp")
    expected = 2 * (4096 + 4 * 16) + 2 * 4 * 4095 + 2 * (4097 + 4 * 17) + 2048
    assert of_kind(state, "optimizer") == [(expected, expected)]


def test_muon_and_adafactor() -> None:
    layouts = sw.LayoutMap(sw.DeviceMesh((1,), ("data",)))
    tensors = {
        "embed_tokens.weight": ((10, 4), "float32"),
        "layers.0.q.weight": ((4, 4), "float32"),
        "norm.weight": ((4,), "float32"),
        "layers.0.experts": ((2, 3, 5), "float32"),
    }
    state = training_state(tensors, layouts, "muon", "ddp")
    adam = (40 + 4 + 30) * 2 * 4 + 3 * 4
    assert of_kind(state, "optimizer") == [(adam + 16 * 4,) * 2]
    # Rows and columns: 10 + 4, 4 + 4, whole 4, 2 * 3 + 2 * 5; four steps.
    factored = training_state(tensors, layouts, "adafactor", "ddp")
    assert of_kind(factored, "optimizer") == [(4 * (14 + 8 + 4 + 16) + 4 * 4,) * 2]


def test_frozen_and_adapters() -> None:
    state = training_state(MODEL, rules(), "adamw", "ddp", frozen="up|down")
    assert of_kind(state, "gradients") == [(10, 10)] * 8
    # A of (2, 5) whole and B of (6, 2) cut over tp; of down A of (2, 6) cut and B of (5, 2) whole.
    adapted = training_state(MODEL, rules(), "adamw", "ddp", lora=Lora(2, "up|down", "float32"))
    trained = 2 * 5 + 3 * 2 + 2 * 3 + 5 * 2
    assert of_kind(adapted, "gradients") == [(4 * trained, 4 * trained)] * 8
    assert of_kind(adapted, "weights") == [(70 + 4 * trained,) * 2] * 8


def test_tied_tensors() -> None:
    tensors = {"embed": ((8, 2), "float32"), "head": ((8, 2), "float32")}
    layouts = sw.LayoutMap(sw.DeviceMesh((2,), ("data",)), default=())
    state = training_state(tensors, layouts, "lion", "ddp", over=["data"], tied={"head": "embed"})
    assert of_kind(state, "weights") == [(64, 64)] * 2
    stages = Deployment(
        2,
        sw.DeviceMesh((2,), ("pp",)),
        {"embed": DeploymentRule((None, None), at={"pp": 0}), "head": DeploymentRule((None, None), at={"pp": 1})},
    )
    apart = training_state(tensors, stages, "lion", "ddp", tied={"head": "embed"})
    assert of_kind(apart, "weights") == [(64, 64)] * 2
    # A bucket of its own on both stages: 16 elements, padded to 128.
    buckets = training_state(
        {**tensors, "embed.norm": ((3,), "float32")},
        Deployment(
            2,
            sw.DeviceMesh((2, 1), ("pp", "dp")),
            {
                "embed$": DeploymentRule((None, None), at={"pp": 0}),
                "head": DeploymentRule((None, None), at={"pp": 1}),
                "norm": DeploymentRule((None,), at={"pp": 0}),
            },
            replicated=["dp"],
        ),
        "lion",
        "megatron",
        tied={"head": "embed"},
    )
    assert buckets.allocated["gradients"].tolist() == [4 * (128 + 128), 4 * 128]


def test_stages() -> None:
    stages = Deployment(
        4,
        sw.DeviceMesh((2, 2), ("pp", "dp")),
        {"h.{i}": DeploymentRule((None,), at={"pp": "i // 2"})},
        replicated=["dp"],
    )
    state = stages.state({f"h.{i}": ((8,), "float32") for i in range(3)}, "lion", "fsdp2")
    assert state.along("pp").tolist() == [[2 * 3 * 16, 2 * 3 * 16], [3 * 16, 3 * 16]]
    assert state.fullest == ("cpu:0", 96)
    assert state.why == "it has 48 B more than cpu:2, the emptiest: 48 B more of h.*"
    assert state.fits(96)
    assert not state.fits(95)
    assert [(devices, sizes["weights"]) for devices, sizes in state.alike()] == [((0, 1), (32, 32)), ((2, 3), (16, 16))]
    assert state.to_dict()["stages"] == [{"least": 96, "most": 96}, {"least": 48, "most": 48}]
    assert "96 B on cpu:0" in str(state)
    assert pickle.loads(pickle.dumps(state.to_dict()))["fullest"]["device"] == "cpu:0"
    assert sw.draw(state)


def test_axes_of_stages_are_not_of_data() -> None:
    mesh = sw.DeviceMesh((2, 2, 2), ("pp", "dp", "tp"))
    rules = {"h.{i}": DeploymentRule(("tp",), at={"pp": "i"}), "words": DeploymentRule(("tp",), at={"pp": [0, 1]})}
    state = Deployment(8, mesh, rules).state({"h.0": ((8,), "float32"), "words": ((12,), "float32")}, "lion", "zero1")
    assert state.over == ("dp",)
    # Halves of 4 + 6 and of 6, padded to 12 and 8, of which each of two ranks has a half.
    assert state.allocated["masters"].tolist() == [4 * 6] * 4 + [4 * 4] * 4


def test_caches() -> None:
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "num_hidden_layers": 2,
              "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 10}  # fmt: skip
    tensors = {f"layers.{i}.self_attn.{x}_proj.weight": ((16, 32), "bfloat16") for i in range(2) for x in "kv"}
    layouts = sw.LayoutMap(MESH)
    layouts["[kv]_proj"] = ("tp", None)
    caches = key_value_caches(config, tensors, batch=3, context=100, block=16)
    state = training_state(tensors, layouts, caches=caches)
    # Eight rows each of keys and values: 100 tokens, 112 in blocks, and 10, in a block of 16; two bytes.
    assert of_kind(state, "caches") == [(2 * 3 * (100 + 10) * 2 * 8, 2 * 3 * (112 + 16) * 2 * 8)] * 8
    latent = {"layers.0.self_attn.kv_a_proj_with_mqa.weight": ((512 + 64, 32), "bfloat16")}
    caches = key_value_caches({"num_hidden_layers": 1}, latent, batch=1, context=7, dtype="float8_e4m3fn")
    layouts["kv_a"] = (None, None)
    assert of_kind(training_state(latent, layouts, caches=caches), "caches") == [(7 * 576, 7 * 576)] * 8
    fused = {"layers.0.self_attn.qkv_proj.weight": (((4 + 2 + 2) * 8, 32), "bfloat16")}
    caches = key_value_caches({**config, "num_hidden_layers": 1, "layer_types": None}, fused, batch=1, context=5)
    packed = sw.LayoutMap(MESH)
    packed["qkv"] = (sw.packed.qkv(4, 2, 8, "tp"), None)
    assert sum(held for held, _ in of_kind(training_state(fused, packed, caches=caches), "caches")) == 4 * 2 * 5 * 32


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimizer": "shampoo"}, "optimizer is 'shampoo', which is not known"),
        ({"sharding": "zero4"}, "sharding is 'zero4', which is not known"),
        ({"settings": {"overlap": True}}, "settings has 'overlap', which fsdp2 does not know; it knows none"),
        ({"sharding": "zero1", "settings": {"param_groups": 3}}, "must be from 1 to 2"),
        ({"sharding": "hsdp"}, "give their size as group"),
        ({"group": 3}, "group is 3, which does not divide the 4"),
        ({"over": ["rows"]}, "over names the axis 'rows'; the meshes have data, tp"),
        ({"over": ["tp"], "sharding": "zero1"}, "the rules cut dim 0 over tp"),
        ({"frozen": "("}, "frozen is '\\(', which is not a regular expression"),
        ({"lora": Lora(2, "nothing")}, "lora: 'nothing' matches the name of no matrix"),
        ({"tied": {"a": "b"}}, "'a' is not among the tensors"),
        ({"optimizer": "muon", "sharding": "zero1"}, "takes matrices"),
        ({"units": "x"}, "units is for fsdp1 and megatron"),
        ({"sharding": "none", "over": ["data"]}, "over is for a sharding of the state"),
    ],
)
def test_refused_by_name(given: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"optimizer": "adamw", "sharding": "fsdp2", **given}
    with pytest.raises(sw.LayoutError, match=message):
        training_state(MODEL, rules(), **arguments)


def test_tensors_that_are_not_known() -> None:
    with pytest.raises(sw.LayoutError, match=r"'q' is not of a dtype that is trained; freeze it with frozen"):
        training_state({"q": ((4,), "int8")}, rules(), "adamw", "ddp")
    assert training_state({"q": ((4,), "int8")}, rules(), "adamw", "ddp", frozen="q").fullest[1] == 4
    nowhere = Deployment(2, sw.DeviceMesh((2,), ("dp",)), {"w": DeploymentRule((None,))}, replicated=["dp"])
    with pytest.raises(sw.LayoutError, match="no rule matches the tensor 'v', and there is no default"):
        training_state({"v": ((4,), "int8")}, nowhere)
    with pytest.raises(sw.LayoutError, match="a parameter without dims cannot be cut in rows"):
        training_state({"w": ((), "float32")}, sw.LayoutMap(MESH, default=()), "adamw", "fsdp2", over=["data"])
    with pytest.raises(TypeError, match="must be a shape and a dtype"):
        training_state({"w": (4, 4)}, rules())
    assert training_state({"up.w": (4, 4)}, rules(), weights="int8").fullest[1] == 8
    unmatched = training_state({"v": ((4,), "int8")}, rules())
    assert unmatched.unmatched == ("v",)


def asked(**given: Any) -> Any:
    arguments: dict[str, Any] = {"tensors": MODEL, "layouts": rules(), "optimizer": "adamw", "sharding": "fsdp2"}
    return training_state(**{**arguments, **given})


FLAT = sw.LayoutMap(MESH, default="replicated")
STACK = {"up": ((2, 6, 5), "float32"), "norm": ((4,), "float32")}
MIXED = {"0.a": ((4,), "float32"), "0.b": ((4,), "bfloat16")}
HALF = Deployment(8, MESH, {"up": DeploymentRule((None, None)), "down": DeploymentRule((None, None), at={"data": 0})})
WITHOUT = sw.TensorLayout((None, None), MESH), sw.TensorLayout((None, None))
TWO = {"up": ((4, 2), "float32"), "down": ((4, 2), "float32")}
CONFIG: Any = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "num_hidden_layers": 2}
KV: Any = {f"layers.{i}.self_attn.{x}_proj.weight": ((16, 32), "bfloat16") for i in range(2) for x in "kv"}
HAND = Cache("0.keys", "0.up", (0, 6), 10, 10, 16)


FUSED: Any = {f"layers.{i}.self_attn.qkv_proj.weight": ((64, 32), "bfloat16") for i in range(2)}


EIGHT = {"up": ((8, 2), "float32")}


def both_axes(*more: str) -> sw.LayoutMap:
    found = sw.LayoutMap(sw.DeviceMesh((4, 2, *[1] * len(more)), ("data", "tp", *more)))
    found["up"] = (("data", "tp"), None)
    return found


def kept(more: Any = None, tensors: Any = None, **config: Any) -> Any:
    """The state with the caches of a model, or with those that are made by hand."""
    if more is not None:
        return asked(caches=[more])
    found = key_value_caches(CONFIG | config, tensors or KV, batch=1, context=8)
    return asked(tensors=tensors or KV, layouts=FLAT, caches=found)


#: What an error advises, what raises it, and what does as it says.
ADVICE: dict[str, tuple[str, Any, list[Any]]] = {
    "no mesh": (
        "give a layout map with a mesh, or a deployment",
        lambda: asked(layouts=sw.LayoutMap(default="replicated")),
        [
            lambda: asked(layouts=FLAT, over=["data"]),
            lambda: asked(layouts=Deployment(8, MESH, {}, default="replicated"), over=["data"]),
        ],
    ),
    "a layout without a mesh": (
        "its layout has no mesh; give it one, or take a layout map that has one",
        lambda: asked(tensors=TWO, layouts=dict(zip(TWO, WITHOUT, strict=True)), over=["data"]),
        [
            lambda: asked(tensors=TWO, layouts=dict.fromkeys(TWO, sw.TensorLayout((None, None), MESH)), over=["data"]),
            lambda: asked(layouts=FLAT, over=["data"]),
        ],
    ),
    "tied": (
        "'other' is not among the tensors; give both, or leave them out of tied",
        lambda: asked(tied={"0.up": "other"}),
        [lambda: asked(tied={"0.up": "0.down"}), asked],
    ),
    "tied on some": (
        "leave it out of tied to count both",
        lambda: asked(tensors=TWO, layouts=HALF, tied={"up": "down"}, sharding="none"),
        [lambda: asked(tensors=TWO, layouts=HALF, sharding="none")],
    ),
    "groups": (
        "give their size as group, or their axes as over",
        lambda: asked(sharding="hsdp"),
        [lambda: asked(sharding="hsdp", group=2), lambda: asked(sharding="hsdp", over=["data"])],
    ),
    "group of none": ("it must be at least 1", lambda: asked(group=0), [lambda: asked(group=1)]),
    "group that does not divide": (
        "does not divide the 4 data-parallel ranks",
        lambda: asked(group=3),
        [lambda: asked(group=2), lambda: asked(group=4)],
    ),
    "no axis of data": (
        "give a mesh with one more axis, or the sharding none or ddp, or as over the last axis by which they cut rows",
        lambda: asked(tensors=EIGHT, layouts=both_axes()),
        [
            lambda: asked(tensors=EIGHT, layouts=both_axes("more")),
            lambda: asked(tensors=EIGHT, layouts=both_axes(), sharding="none"),
            lambda: asked(tensors=EIGHT, layouts=both_axes(), sharding="ddp"),
            lambda: asked(tensors=EIGHT, layouts=both_axes(), over=["tp"]),
        ],
    ),
    "over for nothing": (
        f"leave over out, or give another sharding: {', '.join(SHARDINGS)}",
        lambda: asked(sharding="none", over=["data"]),
        [
            lambda: asked(sharding="none"),
            *(partial(asked, sharding=one, over=["data"]) for one in SHARDINGS if one != "none"),
        ],
    ),
    "another axis": (
        "the meshes have data, tp",
        lambda: asked(over=["rows"]),
        [lambda: asked(over=["data"])],
    ),
    "no rule": (
        "give it a rule, or the deployment default='replicated'",
        lambda: asked(layouts=Deployment(8, MESH, {"up": ("tp", None)})),
        [
            lambda: asked(layouts=Deployment(8, MESH, {"up|down": (None, None), "norm": (None,)}), over=["data"]),
            lambda: asked(layouts=Deployment(8, MESH, {"up": ("tp", None)}, default="replicated"), over=["data"]),
        ],
    ),
    "integers": (
        "freeze it with frozen, or train adapters with lora",
        lambda: asked(tensors={"q": ((4, 4), "int8")}),
        [
            lambda: asked(tensors={"q": ((4, 4), "int8")}, frozen="q"),
            lambda: asked(tensors={"q": ((4, 4), "int8")}, lora=Lora(2, "q")),
        ],
    ),
    "over what the rules cut": (
        "give other axes as over, or sharding='none', with which only the rules cut",
        lambda: asked(sharding="zero1", over=["tp"]),
        [lambda: asked(sharding="zero1", over=["data"]), lambda: asked(sharding="none")],
    ),
    "no tensor for a cache": (
        "give caches that follow some of these, as key_value_caches makes them",
        lambda: kept(HAND._replace(follows="other")),
        [lambda: kept(HAND), kept],
    ),
    "dtypes": (
        "must be a shape and a dtype, got (4, 4); if weights is given, a shape is enough",
        lambda: asked(tensors={"0.up": (4, 4)}),
        [lambda: asked(tensors={"0.up": ((4, 4), "int8")}, frozen="."), partial(asked, tensors=TWO, weights="float16")],
    ),
    "adapters of a stack": (
        "lora: 'up' has 3 dims, and adapters are known for matrices only; narrow targets",
        lambda: asked(tensors={**STACK, **MODEL}, layouts=FLAT, over=["data"], lora=Lora(2, "up")),
        [lambda: asked(tensors={**STACK, **MODEL}, layouts=FLAT, over=["data"], lora=Lora(2, r"0\.up"))],
    ),
    "a scalar": (
        "give it as one dim of one element",
        lambda: asked(tensors={"w": ((), "float32")}, layouts=FLAT, over=["data"]),
        [lambda: asked(tensors={"w": ((1,), "float32")}, layouts=FLAT, over=["data"])],
    ),
    "dtypes of a unit": (
        "give as units a regular expression that separates them",
        lambda: asked(tensors=MIXED, layouts=FLAT, sharding="fsdp1", over=["data"]),
        [lambda: asked(tensors=MIXED, layouts=FLAT, sharding="fsdp1", over=["data"], units="[ab]$")],
    ),
    "frozen in a unit": (
        "only with use_orig_params: set it to true in settings",
        lambda: asked(sharding="fsdp1", frozen="up"),
        [lambda: asked(sharding="fsdp1", frozen="up", settings={"use_orig_params": True})],
    ),
    "dtypes of a group": (
        "weights gives all of them one dtype",
        lambda: asked(tensors=MIXED, layouts=FLAT, sharding="zero1", over=["data"]),
        [lambda: asked(tensors=MIXED, layouts=FLAT, sharding="zero1", over=["data"], weights="bfloat16")],
    ),
    "no units": (
        "units is for fsdp1 and megatron",
        lambda: asked(units="."),
        [partial(asked, units=".", sharding=one) for one in ("fsdp1", "megatron")],
    ),
    "settings": (
        "settings has 'bucket_size', which zero1 does not know; it knows param_groups, round_robin_gradients",
        lambda: asked(sharding="zero1", settings={"bucket_size": 4}),
        [
            lambda: asked(sharding="zero1", settings={"param_groups": 2}),
            lambda: asked(sharding="zero1", settings={"round_robin_gradients": True}),
        ],
    ),
    "muon": (
        "use one of none, ddp, zero-redundancy, fsdp2, hsdp and megatron-ddp",
        lambda: asked(optimizer="muon", sharding="fsdp1"),
        [
            *(partial(asked, optimizer="muon", sharding=one) for one in ("none", "ddp", "zero-redundancy", "fsdp2")),
            lambda: asked(optimizer="muon", sharding="hsdp", group=2),
            lambda: asked(optimizer="muon", sharding="megatron-ddp"),
        ],
    ),
    "adafactor": (
        "it can under ddp and fsdp1",
        lambda: asked(optimizer="adafactor"),
        [partial(asked, optimizer="adafactor", sharding=one) for one in ("ddp", "fsdp1")],
    ),
    "adam8bit": (
        "use one of ddp, fsdp1, zero1, zero2 and zero3",
        lambda: asked(optimizer="adam8bit"),
        [partial(asked, optimizer="adam8bit", sharding=one) for one in ("ddp", "fsdp1", "zero1", "zero2", "zero3")],
    ),
    "another optimizer": (
        "and dtypes by hand, as in {'exp_avg': 'float32'}",
        lambda: asked(optimizer="shampoo"),
        [lambda: asked(optimizer={"exp_avg": "float32"}), *(partial(asked, optimizer=one) for one in ("adamw", "sgd"))],
    ),
    "another name of a cache": (
        "the name does not say where the keys are; a Cache can be made by hand instead",
        lambda: kept(tensors={"layers.0.self_attn.W_pack.weight": ((96, 32), "bfloat16")}),
        [lambda: kept(HAND)],
    ),
    "layers without caches": (
        "the others have no k_proj, v_proj, qkv_proj or kv_a_proj_with_mqa; a Cache can be made by hand instead",
        lambda: kept(num_hidden_layers=3),
        [lambda: kept(HAND)],
    ),
    "kinds of layers": (
        "known are full_attention, global, sliding_attention, chunked_attention; a Cache can be made by hand instead",
        lambda: kept(layer_types=["linear_attention", "full_attention"]),
        [
            lambda: kept(HAND),
            lambda: kept(layer_types=["full_attention", "global"]),
            lambda: kept(layer_types=["sliding_attention", "chunked_attention"], sliding_window=4),
        ],
    ),
    "no window": (
        "sliding_window is None; give a configuration in which it is at least 1",
        lambda: kept(layer_types=["sliding_attention", "full_attention"]),
        [lambda: kept(layer_types=["sliding_attention", "full_attention"], sliding_window=1)],
    ),
    "no chunk": (
        "attention_chunk_size is 0; give a configuration in which it is at least 1",
        lambda: kept(layer_types=["chunked_attention"] * 2, attention_chunk_size=0, sliding_window=4),
        [lambda: kept(layer_types=["chunked_attention"] * 2, attention_chunk_size=1)],
    ),
    "layers with windows": (
        "nothing says which layers of gemma2 have the window of 4; give a configuration with layer_types",
        lambda: kept(model_type="gemma2", sliding_window=4),
        [lambda: kept(model_type="gemma2", sliding_window=4, layer_types=["sliding_attention", "full_attention"])],
    ),
    "no heads": (
        "the caches need num_attention_heads; give a configuration that has it",
        lambda: kept(num_attention_heads=None, tensors=FUSED),
        [lambda: kept(tensors=FUSED)],
    ),
}


@pytest.mark.parametrize("case", ADVICE)
def test_what_is_advised_gets_through(case: str) -> None:
    words, refused, followed = ADVICE[case]
    with pytest.raises((sw.LayoutError, TypeError)) as caught:
        refused()
    assert words in str(caught.value)
    for each in followed:
        each()


@st.composite
def deployments(draw: st.DrawFn) -> tuple[Deployment, dict[str, tuple[tuple[int, ...], str]], dict[str, str]]:
    """A deployment with stages and experts over two meshes, tensors for it, and those that are tied."""
    pp, ep, tp = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    layers, each = draw(st.integers(pp, 12)), draw(st.integers(1, 3))
    dense = sw.DeviceMesh((pp, ep, tp), ("pp", "dp", "tp"))
    expert = sw.DeviceMesh((pp, ep, tp), ("pp", "ep", "edp"))
    rules: dict[str, DeploymentRule] = {
        r"^h\.{i}\.w[12]$": DeploymentRule(("tp", None), "dense", {"pp": "stage[i]"}, uneven="ceil"),
        r"^h\.{i}\.norm$": DeploymentRule((None,), "dense", {"pp": "stage[i]"}),
        r"^h\.{i}\.experts\.{e}\.up$": DeploymentRule((None, None), "expert", {"pp": "stage[i]", "ep": f"e // {each}"}),
        r"^words$": DeploymentRule(("tp", None), "dense", {"pp": 0}, uneven="ceil"),
        r"^out$": DeploymentRule(("tp", None), "dense", {"pp": pp - 1}, uneven="ceil"),
    }
    stage = sorted(draw(st.lists(st.integers(0, pp - 1), min_size=layers, max_size=layers)))
    made = Deployment(
        pp * ep * tp, {"dense": dense, "expert": expert}, rules, numbers={"stage": stage}, replicated=["dp", "edp"]
    )
    rows = st.integers(1, 7)
    words = (draw(rows), 3), "bfloat16"
    tensors: dict[str, tuple[tuple[int, ...], str]] = {"words": words}
    for i in range(layers):
        tensors |= {f"h.{i}.w{at}": ((draw(rows), 3), "float32") for at in (1, 2)}
        tensors[f"h.{i}.norm"] = (3,), draw(st.sampled_from(["float32", "bfloat16"]))
        tensors |= {f"h.{i}.experts.{e}.up": ((4, 2), "bfloat16") for e in range(each * ep)}
    return made, tensors | {"out": words}, draw(st.sampled_from([{}, {"out": "words"}]))


#: Ways to shard, each with an optimizer that it takes, and the dtype of weights that it needs.
WAYS = [("ddp", "adamw", None), ("ddp", "muon", None), ("fsdp2", "lion", None), ("zero1", "adamw", "bfloat16")]


@given(deployments(), st.sampled_from([*WAYS, ("zero3", "adamw", "bfloat16")]))
def test_tensors_that_are_looked_up_together_are_counted_as_one_by_one(
    drawn: tuple[Deployment, dict[str, tuple[tuple[int, ...], str]], dict[str, str]], way: tuple[str, str, str | None]
) -> None:
    (deployment, tensors, tied), (sharding, optimizer, weights) = drawn, way
    counted = partial(training_state, tensors, deployment, optimizer, sharding, weights=weights, tied=tied)
    together = counted()
    # An expression that is in no name, for which each name is looked up alone.
    alone = counted(frozen="(?!)")
    assert together.to_dict() == alone.to_dict()
    for device in deployment.world.labels():
        assert together.of(device) == alone.of(device)
    listed = described(tensors, None)
    groups = PlacedTensors(deployment, NO_COMPONENTS, "even").alike(listed)
    assert sorted(number for numbers, _ in groups for number in numbers) == list(range(len(tensors)))
    for numbers, placed in groups:
        assert len({listed[number].look for number in numbers}) == 1
        for number in numbers:
            assert deployment.placed(listed[number].name, len(listed[number].look.shape)) == placed


def test_a_name_that_is_no_text_is_refused_by_name() -> None:
    mesh = sw.DeviceMesh((2,), ("tp",))
    deployment = Deployment(2, mesh, {"w": DeploymentRule(("tp",))})
    with pytest.raises(TypeError, match="path must be a string, got 7"):
        training_state({"w.0": ((2,), "float32"), 7: ((2,), "float32")}, deployment)  # type: ignore[dict-item]
