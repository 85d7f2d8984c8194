"""A model's tensors as Hugging Face, vLLM and Megatron's torch_dist name and order them, restated in plain numpy.

The steps are those of the engines' own converters and loaders (reshape, concatenate, pad), not shardwise's pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Model = dict[str, Array]

__all__ = ["ENGINES", "HEADS", "WORDS", "config", "hugging_face", "torch_dist", "vllm"]

#: Query heads, key-value heads, head dim; and words.
HEADS = {
    "gpt2": (16, 16, 64),
    "llama": (32, 8, 128),
    "qwen2": (32, 4, 128),
    "qwen3": (32, 8, 128),
    "mixtral": (32, 8, 128),
}
WORDS = {"gpt2": 50257, "llama": 128256, "qwen2": 152064, "qwen3": 151936, "mixtral": 32000}
HIDDEN, INNER, LAYERS, EXPERTS = 2, 24, 2, 3


def config(model: str) -> dict[str, int]:
    """What the `config.json` of a model says of its sizes."""
    heads, kv, d = HEADS[model]
    if model == "gpt2":
        return {"n_head": heads, "n_embd": heads * d, "vocab_size": WORDS[model]}
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": d}
    return {**sizes, "vocab_size": WORDS[model], "num_hidden_layers": LAYERS}


def hugging_face(model: str, seed: int) -> Model:
    """Random tensors with the names and shapes of the files of `GPT2LMHeadModel`, `LlamaForCausalLM` and so on."""
    rng = np.random.default_rng(seed)
    heads, kv, d = HEADS[model]
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(LAYERS):
        if model == "gpt2":
            h = f"transformer.h.{i}"
            shapes |= {
                f"{h}.ln_1.weight": (HIDDEN,),
                f"{h}.ln_1.bias": (HIDDEN,),
                f"{h}.attn.c_attn.weight": (HIDDEN, 3 * heads * d),
                f"{h}.attn.c_attn.bias": (3 * heads * d,),
                f"{h}.attn.c_proj.weight": (heads * d, HIDDEN),
                f"{h}.attn.c_proj.bias": (HIDDEN,),
                f"{h}.ln_2.weight": (HIDDEN,),
                f"{h}.ln_2.bias": (HIDDEN,),
                f"{h}.mlp.c_fc.weight": (HIDDEN, INNER),
                f"{h}.mlp.c_fc.bias": (INNER,),
                f"{h}.mlp.c_proj.weight": (INNER, HIDDEN),
                f"{h}.mlp.c_proj.bias": (HIDDEN,),
            }
        else:
            h = f"model.layers.{i}"
            shapes |= {
                f"{h}.input_layernorm.weight": (HIDDEN,),
                f"{h}.self_attn.q_proj.weight": (heads * d, HIDDEN),
                f"{h}.self_attn.k_proj.weight": (kv * d, HIDDEN),
                f"{h}.self_attn.v_proj.weight": (kv * d, HIDDEN),
                f"{h}.self_attn.o_proj.weight": (HIDDEN, heads * d),
                f"{h}.post_attention_layernorm.weight": (HIDDEN,),
            }
            if model == "qwen2":
                shapes |= {f"{h}.self_attn.{p}_proj.bias": (n * d,) for p, n in (("q", heads), ("k", kv), ("v", kv))}
            if model == "qwen3":
                shapes |= {f"{h}.self_attn.{p}_norm.weight": (d,) for p in "qk"}
            if model == "mixtral":
                moe = f"{h}.block_sparse_moe"
                shapes |= {f"{moe}.gate.weight": (EXPERTS, HIDDEN)}
                for e in range(EXPERTS):
                    shapes |= {f"{moe}.experts.{e}.{w}.weight": (INNER, HIDDEN) for w in ("w1", "w3")}
                    shapes |= {f"{moe}.experts.{e}.w2.weight": (HIDDEN, INNER)}
            else:
                shapes |= {f"{h}.mlp.{p}_proj.weight": (INNER, HIDDEN) for p in ("gate", "up")}
                shapes |= {f"{h}.mlp.down_proj.weight": (HIDDEN, INNER)}
    if model == "gpt2":
        shapes |= {"transformer.wte.weight": (WORDS[model], HIDDEN), "transformer.wpe.weight": (8, HIDDEN)}
        shapes |= {"transformer.ln_f.weight": (HIDDEN,), "transformer.ln_f.bias": (HIDDEN,)}
    else:
        shapes |= {"model.embed_tokens.weight": (WORDS[model], HIDDEN), "lm_head.weight": (WORDS[model], HIDDEN)}
        shapes |= {"model.norm.weight": (HIDDEN,)}
    return {name: rng.standard_normal(shape).astype("f2") for name, shape in shapes.items()}


def padded(array: Array, multiple: int) -> Array:
    """Zeros behind the rows."""
    return np.concatenate([array, np.zeros((-len(array) % multiple, *array.shape[1:]), array.dtype)])


def vllm(model: str, whole: Model) -> Model:
    """What vLLM's modules hold: `stacked_params_mapping` of Llama, transposed Conv1D of GPT-2; pads to 64.

    `FusedMoE` of Mixtral has the experts in one tensor, w1 above w3.
    """
    made = {}
    for name, value in whole.items():
        if "attn.c_" in name or "mlp.c_" in name:
            made[name] = value.T if value.ndim == 2 else value
        elif name.endswith(("embed_tokens.weight", "lm_head.weight", "wte.weight")):
            made[name] = padded(value, 64)
        elif "q_proj" in name:
            three = [whole[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            made[name.replace("q_proj", "qkv_proj")] = np.concatenate(three)
        elif ".experts.0." in name:
            stem, each = name.split(".experts.0."), [name.replace(".0.w", f".{e}.w") for e in range(EXPERTS)]
            if stem[1] == "w1.weight":
                both = [np.vstack([whole[one], whole[one.replace("w1", "w3")]]) for one in each]
                made[f"{stem[0]}.experts.routed_experts.w13_weight"] = np.stack(both)
            elif stem[1] == "w2.weight":
                made[f"{stem[0]}.experts.routed_experts.w2_weight"] = np.stack([whole[one] for one in each])
        elif "gate_proj" in name:
            made[name.replace("gate_proj", "gate_up_proj")] = np.vstack([value, whole[name.replace("gate", "up")]])
        elif not any(part in name for part in ("k_proj", "v_proj", "up_proj", ".experts.")):
            made[name] = value
    return made


def _grouped(q: Array, k: Array, v: Array, groups: int) -> Array:
    """Megatron's converters: of each group its queries, its key, its value."""
    split = [part.reshape(groups, -1, *part.shape[1:]) for part in (q, k, v)]
    return np.concatenate(split, axis=1).reshape(-1, *q.shape[1:])


def torch_dist(model: str, whole: Model) -> Model:
    """Megatron's `GPTModel` with Transformer Engine's layers, its layers stacked by `sharded_state_dict`."""
    _, groups, _ = HEADS[model]
    layers: dict[str, list[Array]] = {}

    def layer(name: str, value: Array) -> None:
        layers.setdefault(f"decoder.layers.{name}", []).append(value)

    made: Model = {}
    for i in range(LAYERS):
        if model == "gpt2":
            one = {name.split(f".h.{i}.")[1]: value for name, value in whole.items() if f".h.{i}." in name}
            for kind in ("weight", "bias"):
                fused = one[f"attn.c_attn.{kind}"]
                q, k, v = np.split(fused.T if kind == "weight" else fused, 3)
                layer(f"self_attention.linear_qkv.{kind}", _grouped(q, k, v, groups))
                layer(f"self_attention.linear_qkv.layer_norm_{kind}", one[f"ln_1.{kind}"])
                layer(f"self_attention.linear_proj.{kind}", one[f"attn.c_proj.{kind}"].T)
                layer(f"mlp.linear_fc1.layer_norm_{kind}", one[f"ln_2.{kind}"])
                layer(f"mlp.linear_fc1.{kind}", one[f"mlp.c_fc.{kind}"].T)
                layer(f"mlp.linear_fc2.{kind}", one[f"mlp.c_proj.{kind}"].T)
        else:
            one = {name.split(f".layers.{i}.")[1]: value for name, value in whole.items() if f".layers.{i}." in name}
            q, k, v = (one[f"self_attn.{part}_proj.weight"] for part in "qkv")
            layer("self_attention.linear_qkv.weight", _grouped(q, k, v, groups))
            layer("self_attention.linear_qkv.layer_norm_weight", one["input_layernorm.weight"])
            layer("self_attention.linear_proj.weight", one["self_attn.o_proj.weight"])
            if model == "qwen2":
                q, k, v = (one[f"self_attn.{part}_proj.bias"] for part in "qkv")
                layer("self_attention.linear_qkv.bias", _grouped(q, k, v, groups))
            if model == "qwen3":
                for part in "qk":
                    layer(f"self_attention.{part}_layernorm.weight", one[f"self_attn.{part}_norm.weight"])
            if model == "mixtral":
                # The norm is not fused with the experts' first layer, whose weights `SequentialMLP` has by expert.
                layer("pre_mlp_layernorm.weight", one["post_attention_layernorm.weight"])
                layer("mlp.router.weight", one["block_sparse_moe.gate.weight"])
                each = [f"block_sparse_moe.experts.{e}" for e in range(EXPERTS)]
                gated = [np.vstack([one[f"{e}.w1.weight"], one[f"{e}.w3.weight"]]) for e in each]
                layer("mlp.experts.experts.linear_fc1.weight", np.stack(gated))
                layer("mlp.experts.experts.linear_fc2.weight", np.stack([one[f"{e}.w2.weight"] for e in each]))
                continue
            layer("mlp.linear_fc1.layer_norm_weight", one["post_attention_layernorm.weight"])
            layer("mlp.linear_fc1.weight", np.vstack([one["mlp.gate_proj.weight"], one["mlp.up_proj.weight"]]))
            layer("mlp.linear_fc2.weight", one["mlp.down_proj.weight"])
    made |= {name: np.stack(values) for name, values in layers.items()}
    if model == "gpt2":
        made["embedding.word_embeddings.weight"] = padded(whole["transformer.wte.weight"], 128)
        made["embedding.position_embeddings.weight"] = whole["transformer.wpe.weight"]
        made |= {f"decoder.final_layernorm.{kind}": whole[f"transformer.ln_f.{kind}"] for kind in ("weight", "bias")}
    else:
        made["embedding.word_embeddings.weight"] = padded(whole["model.embed_tokens.weight"], 128)
        made["output_layer.weight"] = padded(whole["lm_head.weight"], 128)
        made["decoder.final_layernorm.weight"] = whole["model.norm.weight"]
    return made


#: From Hugging Face's tensors to an engine's.
ENGINES: dict[str, Callable[[str, Model], Model]] = {
    "hf": lambda _, whole: whole,
    "vllm": vllm,
    "torch_dist": torch_dist,
}
