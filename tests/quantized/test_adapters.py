"""Adapters of LoRA: each factor is cut as its weight is, by rules for the weight or for what it is fused into.

The law is that of the product: what a device has of B times what it has of A is what it has of the weight. vLLM's
slices are written out from its `lora/layers` (`slice_lora_a`, `slice_lora_b`), PEFT's order of experts from its
`ParamWrapper.get_delta_weight`, Megatron-Bridge's cuts from its `ParallelLinearAdapter`.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.deploy import sglang, vllm
from shardwise.placing import partition_of, placing_of
from shardwise.quantized import Components
from shardwise.quantized.follow import followed, followers, with_states

CONFIG = {
    "model_type": "llama",
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 48,
    "head_dim": 4,
    "vocab_size": 100,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
}
RANK = 3
#: The rows and columns of the weights of a layer.
WEIGHTS = {
    "self_attn.q_proj": (32, 48),
    "self_attn.k_proj": (8, 48),
    "self_attn.v_proj": (8, 48),
    "self_attn.o_proj": (48, 32),
    "mlp.gate_proj": (96, 48),
    "mlp.up_proj": (96, 48),
    "mlp.down_proj": (48, 96),
}
Arrays = dict[str, np.ndarray[Any, Any]]


def mesh(tp: int) -> sw.DeviceMesh:
    return sw.DeviceMesh((tp,), ("tp",))


def adapter(*modules: str, layers: int = 2) -> Arrays:
    """The tensors of a file of PEFT."""
    rng = np.random.default_rng(0)
    found: Arrays = {}
    for layer in range(layers):
        for module in modules or WEIGHTS:
            rows, columns = WEIGHTS[module]
            name = f"base_model.model.model.layers.{layer}.{module}"
            found[f"{name}.lora_A.weight"] = rng.normal(size=(RANK, columns)).astype(np.float32)
            found[f"{name}.lora_B.weight"] = rng.normal(size=(rows, RANK)).astype(np.float32)
    return found


def described(tensors: Arrays) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (array.shape, array.dtype.name) for name, array in tensors.items()}


def shards(tensors: Arrays, layouts: Any, rewrites: sw.Rewrites | None, device: str) -> Arrays:
    """What a device has of each tensor."""
    found = with_states(Components(None, {}, ()), described(tensors), rewrites)
    cuts: dict[str, Any] = dict(followed(found, layouts))
    held = {}
    for name, array in tensors.items():
        cut = cuts.get(name) or partition_of(placing_of(layouts), name, array.shape, "even")
        assert cut is not None, name
        part = cut.partition(array.shape) if isinstance(cut, sw.TensorLayout) else cut
        held[name] = np.zeros(part.holder_shape(device), array.dtype)
        for piece in part.pieces(device):
            own = array[piece.box]
            assert isinstance(piece.start, tuple)
            held[name][tuple(slice(at, at + size) for at, size in zip(piece.start, own.shape, strict=True))] = own
    return held


def sliced_by_vllm(tensors: Arrays, tp: int, rank: int) -> Arrays:
    """What vLLM's layers take of each factor on a rank of `tp`: `heads`, `groups` of `head_dim` 4, in whole heads."""
    heads, groups, dim = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"], CONFIG["head_dim"]
    assert isinstance(heads, int)
    assert isinstance(groups, int)
    assert isinstance(dim, int)
    q, kv = heads // tp * dim, max(groups // tp, 1) * dim
    replicas = max(tp // groups, 1)
    found = {}
    for name, array in tensors.items():
        module, factor = name.split(".")[-3], name.split(".")[-2]
        rows = {"q_proj": (q, rank), "k_proj": (kv, rank // replicas), "v_proj": (kv, rank // replicas)}
        rows |= {"gate_proj": (96 // tp, rank), "up_proj": (96 // tp, rank)}
        if factor == "lora_B" and module in rows:
            size, at = rows[module]
            array = array[size * at : size * (at + 1)]
        if factor == "lora_A" and module in ("o_proj", "down_proj"):
            size = array.shape[1] // tp
            array = array[:, size * rank : size * (rank + 1)]
        found[name] = array
    return found


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("modules", [(), ("self_attn.q_proj", "self_attn.v_proj"), ("mlp.up_proj", "mlp.down_proj")])
def test_factors_are_what_vllm_slices(tp: int, modules: tuple[str, ...]) -> None:
    """By rules for fused weights, also where only some of the parts have adapters."""
    tensors = adapter(*modules)
    layouts, rewrites = sw.read_rules("vllm/llama", mesh(tp), config=CONFIG)
    for rank in range(tp):
        held = shards(tensors, layouts, rewrites, f"cpu:{rank}")
        wanted = sliced_by_vllm(tensors, tp, rank)
        for name in tensors:
            np.testing.assert_array_equal(held[name], wanted[name], err_msg=name)


@pytest.mark.parametrize("rules", ["hf/llama", "vllm/llama", "megatron/llama"])
def test_products_are_shards_of_the_product(rules: str) -> None:
    tensors = adapter()
    layouts, rewrites = sw.read_rules(rules, mesh(2), config=CONFIG)
    for module, (rows, columns) in WEIGHTS.items():
        name = f"base_model.model.model.layers.0.{module}.lora_"
        whole = tensors[f"{name}B.weight"] @ tensors[f"{name}A.weight"]
        by_rows = module.split(".")[1] not in ("o_proj", "down_proj")
        for rank in range(2):
            held = shards(tensors, layouts, rewrites, f"cpu:{rank}")
            product = held[f"{name}B.weight"] @ held[f"{name}A.weight"]
            half = rows // 2 if by_rows else columns // 2
            at = slice(half * rank, half * (rank + 1))
            np.testing.assert_allclose(product, whole[at] if by_rows else whole[:, at], rtol=1e-5)


def test_the_rules_of_a_deployment_cut_adapters_on_their_stages() -> None:
    tensors = adapter("self_attn.q_proj", "mlp.down_proj")
    engine = vllm(CONFIG, tp=2, pp=2)
    one = sw.DeviceMesh((1,), ("tp",), ["trainer"])
    plan = sw.plan_model({name: sw.TensorLayout((None, None), one) for name in tensors}, engine, described(tensors))
    made = plan.run({name: [array] for name, array in tensors.items()})
    name = "base_model.model.model.layers.{}.{}"
    for layer in range(2):
        q, down = (
            name.format(layer, "self_attn.q_proj.lora_B.weight"),
            name.format(layer, "mlp.down_proj.lora_A.weight"),
        )
        np.testing.assert_array_equal(np.concatenate(made[q]), tensors[q])
        np.testing.assert_array_equal(np.concatenate(made[down], 1), tensors[down])
        assert [array.shape for array in made[q]] == [(16, RANK)] * 2


def test_adapters_of_the_vocabulary_are_whole_in_engines_and_cut_elsewhere() -> None:
    """VocabParallelEmbeddingWithLoRA of both has them whole; the output layer's B is whole in vLLM, cut in SGLang."""
    tensors = {
        "base_model.model.model.embed_tokens.lora_embedding_A": np.zeros((RANK, 100), np.float32),
        "base_model.model.model.embed_tokens.lora_embedding_B": np.zeros((48, RANK), np.float32),
        "base_model.model.lm_head.lora_A.weight": np.zeros((RANK, 48), np.float32),
        "base_model.model.lm_head.lora_B.weight": np.zeros((128, RANK), np.float32),
    }
    a, b, _, head = tensors

    def held(layouts: Any, rewrites: sw.Rewrites | None = None) -> Arrays:
        return shards(tensors, layouts, rewrites, "cpu:0")

    whole = {name: array.shape for name, array in tensors.items()}
    for one in (held(*sw.read_rules("vllm/llama", mesh(2), config=CONFIG)), held(vllm(CONFIG, tp=2))):
        assert {name: array.shape for name, array in one.items()} == whole
    by_sglang = held(sglang(CONFIG, tp=2))
    assert {name: array.shape for name, array in by_sglang.items()} == whole | {head: (64, RANK)}
    own = sw.LayoutMap(mesh(2))
    own[r"(embed_tokens|lm_head)\.weight$"] = ("tp", None)
    assert {a: (RANK, 50), b: (48, RANK), head: (64, RANK)}.items() <= {
        name: array.shape for name, array in held(own).items()
    }.items()


def test_experts_that_are_tensors_of_their_own_follow_their_stack() -> None:
    config = CONFIG | {"model_type": "mixtral", "num_local_experts": 2}
    name = "base_model.model.model.layers.0.block_sparse_moe.experts.1."
    tensors = {
        f"{name}w1.lora_B.weight": np.arange(96 * RANK).reshape(96, RANK),
        f"{name}w1.lora_A.weight": np.arange(48 * RANK).reshape(RANK, 48),
        f"{name}w2.lora_B.weight": np.arange(48 * RANK).reshape(48, RANK),
        f"{name}w2.lora_A.weight": np.arange(96 * RANK).reshape(RANK, 96),
    }
    held = shards(tensors, *sw.read_rules("vllm/mixtral", mesh(2), config=config), "cpu:1")
    np.testing.assert_array_equal(held[f"{name}w1.lora_B.weight"], tensors[f"{name}w1.lora_B.weight"][48:])
    np.testing.assert_array_equal(held[f"{name}w2.lora_A.weight"], tensors[f"{name}w2.lora_A.weight"][:, 48:])
    assert held[f"{name}w1.lora_A.weight"].shape == (RANK, 48)
    assert held[f"{name}w2.lora_B.weight"].shape == (48, RANK)


@pytest.mark.parametrize("of", ["", "base_layer."])  # Of `down_proj`, and of `gate_up_proj`.
def test_experts_of_one_parameter_without_a_configuration_are_refused_and_cut_by_rules_of_their_own(of: str) -> None:
    """PEFT has A expert by expert and B with the expert fastest, as its einsum "o r e, e r i -> e o i" reads them."""
    experts, rows, columns = 4, 6, 5
    rng = np.random.default_rng(1)
    name = f"base_model.model.layers.0.mlp.experts.{of}"
    tensors = {
        f"{name}lora_A.weight": rng.normal(size=(experts * RANK, columns)),
        f"{name}lora_B.weight": rng.normal(size=(rows, RANK * experts)),
    }
    ep = sw.DeviceMesh((2,), ("ep",))
    layouts = sw.LayoutMap(ep)
    layouts[r"mlp\.experts\.weight$"] = ("ep", None, None)
    _, why = followers(with_states(Components(None, {}, ()), described(tensors)), layouts)[f"{name}lora_A.weight"]
    assert isinstance(why, str)
    assert "B has the experts interleaved. Their number and sizes are not known;" in why
    assert "the model's config.json states them (--config)" in why
    assert "a rule for its own name places it" in why
    layouts[r"experts\.(base_layer\.)?lora_A\.weight$"] = (sw.packed.parse(f"({experts}@ep {RANK})"), None)
    layouts[r"experts\.(base_layer\.)?lora_B\.weight$"] = (None, sw.packed.parse(f"({RANK} {experts}@ep)"))

    def delta(held: Arrays, count: int) -> np.ndarray[Any, Any]:
        a = held[f"{name}lora_A.weight"].reshape(count, -1, columns)
        b = held[f"{name}lora_B.weight"].reshape(rows, -1, count)
        made: np.ndarray[Any, Any] = np.einsum("ore,eri->eoi", b, a)
        return made

    whole = delta(tensors, experts)
    for rank in range(2):
        held = shards(tensors, layouts, None, f"cpu:{rank}")
        np.testing.assert_allclose(delta(held, 2), whole[2 * rank : 2 * rank + 2])


def test_vllm_with_fully_sharded_loras_by_rules_of_their_own() -> None:
    """A is cut by the rank, padded to `max_lora_rank` 8: a rank of 3 is on the first two of four ranks."""
    text = """
    'q_proj\\.weight$' = ["tp", []]
    'o_proj\\.weight$' = [[], "tp"]
    'q_proj\\.lora_A\\.weight$' = [{ packed = "(n@tp/pad8)" }, []]
    'o_proj\\.lora_B\\.weight$' = ["tp", []]
    """
    layouts = sw.LayoutMap.from_toml(io.StringIO("[rules]\n" + text.replace("\n    ", "\n")), mesh(4))
    tensors = adapter("self_attn.q_proj", "self_attn.o_proj", layers=1)
    name = "base_model.model.model.layers.0.self_attn."
    a = f"{name}q_proj.lora_A.weight"
    part = partition_of(placing_of(layouts), a, (RANK, 48), "even")
    assert part is not None
    sides = [[piece.box[0].indices(RANK)[:2] for piece in part.pieces(f"cpu:{rank}")] for rank in range(4)]
    assert sides == [[(0, 2)], [(2, 3)], [], []]
    held = shards(tensors, layouts, None, "cpu:3")
    np.testing.assert_array_equal(held[f"{name}o_proj.lora_B.weight"], tensors[f"{name}o_proj.lora_B.weight"][36:])
    np.testing.assert_array_equal(held[f"{name}o_proj.lora_A.weight"], tensors[f"{name}o_proj.lora_A.weight"][:, 24:])


def test_megatron_bridge_cuts_the_rank_too() -> None:
    """`linear_in` of a column-parallel layer is cut by the rank, `linear_out` of every layer by its rows."""
    start = "decoder.layers.0.self_attention."
    tensors = {
        f"{start}linear_qkv.adapter.linear_in.weight": np.arange(4 * 48).reshape(4, 48),
        f"{start}linear_qkv.adapter.linear_out.weight": np.arange(48 * 4).reshape(48, 4),
        f"{start}linear_proj.adapter.linear_in.weight": np.arange(4 * 32).reshape(4, 32),
        f"{start}linear_proj.adapter.linear_out.weight": np.arange(48 * 4).reshape(48, 4),
    }
    layouts, _ = sw.read_rules("megatron/llama", mesh(2), config=CONFIG)
    held = shards(tensors, layouts, None, "cpu:1")
    qkv_in, qkv_out, proj_in, proj_out = tensors.values()
    wanted = [qkv_in[2:], qkv_out[24:], proj_in[:, 16:], proj_out[24:]]
    for name, array in zip(tensors, wanted, strict=True):
        np.testing.assert_array_equal(held[name], array, err_msg=name)


@pytest.mark.parametrize("rules", ["vllm/llama", "hf/llama"])
def test_files_of_ranks_and_back(tmp_path: Path, rules: str) -> None:
    tensors = adapter()
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    (tmp_path / "adapter").mkdir()
    sw.save_checkpoint(tmp_path / "adapter" / "adapter_model.safetensors", tensors)
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 3}')
    sw.reshard_checkpoint(
        tmp_path / "adapter", tmp_path / "ranks", rules=rules, mesh=mesh(4), config=config, to="ranks", strict=True
    )
    with sw.open_checkpoint(tmp_path / "ranks") as checkpoint:
        for name, array in tensors.items():
            np.testing.assert_array_equal(checkpoint.read(name), array)
    assert (tmp_path / "ranks" / "adapter_config.json").is_file()
    # vLLM's `ShardedStateLoader` looks each name up in the model's state dict, which has no adapters.
    with pytest.raises(sw.LayoutError, match=r"do not take adapters, such as 'base_model\..*to='ranks'"):
        sw.reshard_checkpoint(tmp_path / "adapter", tmp_path / "vllm", vllm(CONFIG, tp=4), to="vllm")
    wanted = sliced_by_vllm(tensors, 4, 3)
    with sw.open_checkpoint(next((tmp_path / "ranks").glob("rank-00003*")), part=True) as own:
        for name in tensors:
            np.testing.assert_array_equal(own.read(name), wanted[name], err_msg=name)


def test_modules_trained_whole_and_names_of_a_running_model_follow_too() -> None:
    layouts = sw.LayoutMap(mesh(2))
    layouts[r"^(lm_head|h\.q)\.weight$"] = ("tp", None)
    tensors = {
        "base_model.model.h.q.base_layer.weight": np.zeros((8, 6)),
        "base_model.model.h.q.lora_A.default.weight": np.zeros((2, 6)),
        "base_model.model.h.q.lora_B.default.weight": np.zeros((8, 2)),
        "base_model.model.h.q.lora_magnitude_vector.default.weight": np.zeros(8),
        "base_model.model.lm_head.modules_to_save.default.weight": np.zeros((8, 6)),
    }
    held = shards(tensors, layouts, None, "cpu:1")
    assert [array.shape for array in held.values()] == [(4, 6), (2, 6), (4, 2), (4,), (4, 6)]


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"q.lora_A.weight": (2, 6)}, "the factor B of its adapter is missing"),
        ({"q.lora_A.weight": (2, 6), "q.lora_B.weight": (8, 3)}, "have different ranks"),
        (
            {"c_attn.lora_A.weight": (2, 6), "c_attn.lora_B.weight": (8, 2)},
            "the shape of c_attn is out x in or, for GPT-2's Conv1D, in x out; nothing says which",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_name(tensors: dict[str, tuple[int, ...]], said: str) -> None:
    layouts = sw.LayoutMap(mesh(2))
    layouts[r"(q|c_attn)\.weight$"] = ("tp", None)
    found = with_states(Components(None, {}, ()), {name: (shape, "float32") for name, shape in tensors.items()})
    for name, (_, why) in followers(found, layouts).items():
        assert isinstance(why, str)
        assert said in why, name
        assert "a rule for its own name places it" in why


def test_what_is_not_known_is_refused_by_name_as_a_part_of_a_fused_weight_too() -> None:
    """A magnitude without its factors, one of another length than the rows, and rows that the heads do not make."""
    layouts, rewrites = sw.read_rules("vllm/llama", mesh(2), config=CONFIG)
    name = "base_model.model.model.layers.0.self_attn.k_proj.lora_"
    pair: Arrays = {f"{name}A.weight": np.zeros((3, 48)), f"{name}B.weight": np.zeros((8, 3))}
    vector = f"{name}magnitude_vector"
    for tensors, one, said in (
        ({vector: np.zeros(8)}, vector, "the factor A of its adapter is missing"),
        ({**pair, f"{name}B.weight": np.zeros((9, 3))}, f"{name}B.weight", "the dim has 9 elements"),
        ({**pair, vector: np.zeros(7)}, vector, "7"),
    ):
        found = with_states(Components(None, {}, ()), described(tensors), rewrites)
        cut = followers(found, layouts)[one][1]
        if not isinstance(cut, str):
            with pytest.raises(sw.LayoutError) as error:
                cut.partition(tensors[one].shape)  # type: ignore[union-attr]
            cut = str(error.value)
        assert said in cut


def test_a_rank_that_does_not_divide_is_refused_where_megatron_bridge_cuts_it() -> None:
    start = "decoder.layers.0.self_attention.linear_qkv.adapter.linear_"
    tensors = {f"{start}in.weight": np.zeros((3, 48)), f"{start}out.weight": np.zeros((48, 3))}
    layouts, _ = sw.read_rules("megatron/llama", mesh(2), config=CONFIG)
    found = followers(with_states(Components(None, {}, ()), described(tensors)), layouts)
    assert "dim 0 has 3 elements, which 2 shards do not divide evenly" in str(found[f"{start}in.weight"][1])


def test_a_conv1d_is_turned_by_the_rewrite_that_turns_it() -> None:
    config = {"model_type": "gpt2", "n_head": 4, "n_embd": 16, "vocab_size": 64, "n_layer": 1}
    name = "base_model.model.transformer.h.0.mlp.c_fc."
    tensors = {
        f"{name}lora_A.weight": np.arange(2 * 16).reshape(2, 16),
        f"{name}lora_B.weight": np.arange(64 * 2).reshape(64, 2),
    }
    held = shards(tensors, *sw.read_rules("vllm/gpt2", mesh(2), config=config), "cpu:1")
    np.testing.assert_array_equal(held[f"{name}lora_B.weight"], tensors[f"{name}lora_B.weight"][32:])
    assert held[f"{name}lora_A.weight"].shape == (2, 16)


def test_names_and_shapes_as_peft_saves_them() -> None:
    """PEFT 0.21.2 saved these of a tiny Llama, with an embedding among its targets and a head trained whole."""
    layer = "base_model.model.model.layers.0."
    saved = {
        "base_model.model.lm_head.weight": (64, 32),
        "base_model.model.model.embed_tokens.base_layer.weight": (64, 32),
        "base_model.model.model.embed_tokens.lora_embedding_A": (2, 64),
        "base_model.model.model.embed_tokens.lora_embedding_B": (32, 2),
        f"{layer}mlp.down_proj.lora_A.weight": (2, 48),
        f"{layer}mlp.down_proj.lora_B.weight": (32, 2),
        f"{layer}mlp.down_proj.lora_magnitude_vector": (32,),
        f"{layer}self_attn.v_proj.lora_A.weight": (2, 32),
        f"{layer}self_attn.v_proj.lora_B.weight": (16, 2),
    }
    config = CONFIG | {"hidden_size": 32, "head_dim": 8, "num_attention_heads": 4, "intermediate_size": 48}
    layouts, rewrites = sw.read_rules("hf/llama", mesh(2), config=config | {"vocab_size": 64})
    held = shards({name: np.zeros(shape, np.float32) for name, shape in saved.items()}, layouts, rewrites, "cpu:1")
    assert [array.shape for array in held.values()] == [
        *((32, 32), (32, 32), (2, 32), (32, 2)),
        *((2, 24), (32, 2), (32,), (2, 32), (8, 2)),
    ]
