"""Shipped rules: every rank has what vLLM and Megatron give it of fused weights, and nothing is left unmatched."""

from __future__ import annotations

import io
import runpy
from pathlib import Path

import numpy as np
import pytest

import shardwise as sw
from shardwise.cli import main
from tests.cli.conftest import Tensors, bert, write_checkpoint

from ..oracle import fused
from ..oracle.families.models import DATA, read

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"
RULES = sw.example_rules()
#: Query heads, key-value heads, head dim.
HEADS = {
    "gpt2": (12, 12, 64),
    "llama": (32, 8, 128),
    "qwen2": (28, 4, 128),
    "qwen3": (32, 8, 128),
    "mixtral": (32, 8, 128),
}


def config(model: str) -> dict[str, int]:
    heads, kv, d = HEADS[model]
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": d, "vocab_size": WORDS}
    return {"n_head": heads, "n_embd": heads * d, "vocab_size": WORDS} if model == "gpt2" else sizes


#: A hidden size and an intermediate size that are quick to write out; the rules leave them open.
HIDDEN, INNER, WORDS = 2, 48, 50257


def vllm(model: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of vLLM's modules, of layer 3."""
    heads, kv, d = HEADS[model]
    fused_rows = (heads + 2 * kv) * d
    if model == "gpt2":
        return {
            "transformer.h.3.attn.c_attn.weight": (fused_rows, HIDDEN),
            "transformer.h.3.attn.c_attn.bias": (fused_rows,),
            "transformer.h.3.attn.c_proj.weight": (HIDDEN, heads * d),
            "transformer.h.3.attn.c_proj.bias": (HIDDEN,),
            "transformer.h.3.mlp.c_fc.weight": (INNER, HIDDEN),
            "transformer.h.3.mlp.c_fc.bias": (INNER,),
            "transformer.h.3.mlp.c_proj.weight": (HIDDEN, INNER),
            "transformer.h.3.mlp.c_proj.bias": (HIDDEN,),
            "transformer.wte.weight": (WORDS, HIDDEN),
            "transformer.wpe.weight": (8, HIDDEN),
            "transformer.h.3.ln_1.weight": (HIDDEN,),
            "transformer.ln_f.bias": (HIDDEN,),
        }
    names: dict[str, tuple[int, ...]] = {
        "model.layers.3.self_attn.qkv_proj.weight": (fused_rows, HIDDEN),
        "model.layers.3.self_attn.o_proj.weight": (HIDDEN, heads * d),
        "model.embed_tokens.weight": (WORDS, HIDDEN),
        "lm_head.weight": (WORDS, HIDDEN),
        "model.layers.3.input_layernorm.weight": (HIDDEN,),
        "model.layers.3.post_attention_layernorm.weight": (HIDDEN,),
        "model.norm.weight": (HIDDEN,),
    }
    if model == "qwen2":
        names["model.layers.3.self_attn.qkv_proj.bias"] = (fused_rows,)
    if model == "qwen3":
        names |= {f"model.layers.3.self_attn.{part}_norm.weight": (d,) for part in "qk"}
    if model == "mixtral":
        names["model.layers.3.block_sparse_moe.experts.w13_weight"] = (3, 2 * INNER, HIDDEN)
        names["model.layers.3.block_sparse_moe.experts.w2_weight"] = (3, HIDDEN, INNER)
        names["model.layers.3.block_sparse_moe.gate.weight"] = (3, HIDDEN)
    else:
        names["model.layers.3.mlp.gate_up_proj.weight"] = (2 * INNER, HIDDEN)
        names["model.layers.3.mlp.down_proj.weight"] = (HIDDEN, INNER)
    return names


def megatron(model: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of Megatron's modules, of layer 3."""
    heads, kv, d = HEADS[model]
    layer, fused_rows, gated = "decoder.layers.3", (heads + 2 * kv) * d, 1 if model == "gpt2" else 2
    mlp = f"{layer}.mlp.experts.local_experts.5" if model == "mixtral" else f"{layer}.mlp"
    names: dict[str, tuple[int, ...]] = {
        f"{layer}.self_attention.linear_qkv.weight": (fused_rows, HIDDEN),
        f"{layer}.self_attention.linear_proj.weight": (HIDDEN, heads * d),
        f"{mlp}.linear_fc1.weight": (gated * INNER, HIDDEN),
        f"{mlp}.linear_fc2.weight": (HIDDEN, INNER),
        "embedding.word_embeddings.weight": (WORDS, HIDDEN),
        "output_layer.weight": (WORDS, HIDDEN),
        f"{layer}.self_attention.linear_qkv.layer_norm_weight": (HIDDEN,),
        "decoder.final_layernorm.weight": (HIDDEN,),
    }
    if model in ("qwen2", "gpt2"):
        names[f"{layer}.self_attention.linear_qkv.bias"] = (fused_rows,)
    if model == "qwen3":
        names |= {f"{layer}.self_attention.{part}_layernorm.weight": (d,) for part in "qk"}
    if model == "mixtral":
        names[f"{layer}.mlp.router.weight"] = (8, HIDDEN)
    if model == "gpt2":
        names |= {
            f"{layer}.self_attention.linear_proj.bias": (HIDDEN,),
            f"{mlp}.linear_fc1.bias": (INNER,),
            f"{mlp}.linear_fc2.bias": (HIDDEN,),
            "embedding.position_embeddings.weight": (8, HIDDEN),
            f"{layer}.self_attention.linear_qkv.layer_norm_bias": (HIDDEN,),
        }
    return names


def expected_vllm(model: str, name: str, shape: tuple[int, ...], tp: int, rank: int) -> list[np.ndarray]:
    """The positions of a rank along each dim, as vLLM's weight loaders take them."""
    whole = [np.arange(n) for n in shape]
    if "qkv_proj" in name or "c_attn" in name:
        whole[0] = fused.vllm_qkv(*HEADS[model], tp, rank)
    elif "gate_up" in name or "w13" in name:
        dim = len(shape) - 2
        whole[dim] = fused.vllm_merged([shape[dim] // 2] * 2, tp, rank)
    elif "embed_tokens" in name or "lm_head" in name or "wte" in name:
        whole[0] = fused.vllm_vocab(shape[0], tp, rank)[0]
    elif "c_fc" in name:
        whole[0] = np.split(whole[0], tp)[rank]
    elif ("o_proj" in name or "down_proj" in name or "w2_" in name or "c_proj" in name) and len(shape) > 1:
        whole[-1] = np.split(whole[-1], tp)[rank]
    return whole


def expected_megatron(model: str, name: str, shape: tuple[int, ...], tp: int, rank: int) -> list[np.ndarray]:
    """The positions of a rank along each dim, as Megatron's layers are made of whole weights."""
    whole = [np.arange(n) for n in shape]
    if "linear_qkv" in name and "norm" not in name:
        whole[0] = fused.megatron_qkv(*HEADS[model], tp, rank)
    elif "linear_fc1" in name:
        whole[0] = fused.megatron_stride(shape[0], 1 if model == "gpt2" else 2, tp, rank)
    elif "word_embeddings" in name or "output_layer" in name:
        whole[0] = fused.megatron_vocab(shape[0], tp, rank)[0]
    elif ("linear_proj" in name or "linear_fc2" in name) and len(shape) > 1:
        whole[-1] = np.split(whole[-1], tp)[rank]
    return whole


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("model", HEADS)
@pytest.mark.parametrize("engine", ["vllm", "megatron"])
def test_every_rank_holds_what_the_engine_gives_it(engine: str, model: str, tp: int) -> None:
    heads, kv, _ = HEADS[model]
    if heads % tp or (engine == "megatron" and kv % tp and tp % kv):
        pytest.skip("the engine refuses so many ranks")
    mesh = sw.DeviceMesh((2, tp), ("dp", "tp"))
    rules = sw.LayoutMap.from_toml(RULES[f"{engine}/{model}"], mesh, config=config(model))
    names, expected = (vllm(model), expected_vllm) if engine == "vllm" else (megatron(model), expected_megatron)
    report = rules.report({name: (shape, "float32") for name, shape in names.items()})
    assert not report.unmatched
    assert not report.unused_rules
    for name, shape in names.items():
        layout = rules[name]
        assert layout is not None
        array = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
        sharded = sw.distribute_tensor(array, layout)
        for rank in range(tp):
            positions = expected(model, name, shape, tp, rank)
            wanted = array[np.ix_(*positions)]
            got = sharded.shard(f"cpu:{tp + rank}")
            # The rows of padding, at the end, are zeros.
            assert np.array_equal(got[: len(wanted)], wanted), (name, rank)
            assert not got[len(wanted) :].any()
        if "embed" in name or "wte" in name or "output_layer" in name:
            rows = fused.vllm_vocab(WORDS, tp, 0)[1] if engine == "vllm" else fused.megatron_vocab(WORDS, tp, 0)[1]
            assert {shard.data.shape[0] for shard in sharded.shards} == ({rows} if "position" not in name else {8})


@pytest.mark.filterwarnings("ignore:.*is for models of the type:shardwise.ShardwiseWarning")
@pytest.mark.parametrize("name", RULES)
def test_the_rules_are_written_back(name: str) -> None:
    models = [f"{name.partition('/')[2]}-0", "llama-0"]
    said = next(read(model)["config"] for model in models if (DATA / f"{model}.json.gz").exists())
    rules = sw.LayoutMap.from_toml(RULES[name], sw.DeviceMesh((2, 2), ("tp", "model")), config=said)
    written = io.StringIO()
    rules.to_toml(written)
    assert sw.LayoutMap.from_toml(io.StringIO(written.getvalue())) == rules


def gpt2(prefix: str, **sizes: int) -> Tensors:
    arrays = runpy.run_path(str(DEMO))["gpt2_tensors"](**sizes)
    return {prefix + name: ("F32", array.shape) for name, array in arrays.items()}


@pytest.mark.parametrize("mesh", ["model=4", "data=2,model=4", "model=2,data=3"])
@pytest.mark.parametrize(
    ("rules", "tensors"),
    [
        ("bert", bert(layers=6, width=384)),
        ("bert", {f"bert.{name}": info for name, info in bert(layers=2, width=768).items()}),
        ("gpt2", gpt2("", layers=2, width=64, context=8)),
        ("gpt2", gpt2("transformer.", layers=2, width=96, context=8)),
    ],
    ids=["minilm", "bert", "gpt2", "gpt2-lm"],
)
def test_rules_fit_their_models(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, rules: str, tensors: Tensors, mesh: str
) -> None:
    file = write_checkpoint(tmp_path / "model.safetensors", tensors)
    status = main(["report", str(file), "--mesh", mesh, "--rules", rules, "--strict"])
    said = capsys.readouterr().out
    # The rules cut along `model` only; an axis besides is said, and is all that is.
    has_data = "data" in mesh
    assert (status, said.count("warning"), said.count("error:")) == (has_data, 0, has_data)
    assert said.count("uses the axis 'data'") == has_data
