"""Sizes of the families that no file was written for, drawn from a seed."""

from __future__ import annotations

import random
import zlib
from typing import Any

__all__ = ["drawn"]

Size = dict[str, Any]
#: Families of which there are models with one tensor for the embedding and the output layer.
TIED = ("llama", "qwen2", "qwen3", "phi3", "mamba2")


def drawn(family: str, start: Size, seed: int) -> Size:
    """A size of a family: the same for a seed, with heads, widths, layers, experts and words that share no factor."""
    rng = random.Random(zlib.crc32(f"{family} {seed}".encode()))
    size = dict(start)
    groups = rng.choice([1, 2, 2, 3, 4, 4, 5, 6, 8])
    heads = groups * rng.choice([1, 2, 3, 4, 6])
    d = 2 * rng.randint(2, 9)

    def put(key: str, value: Any) -> None:
        if key in size:
            size[key] = value

    put("vocab_size", rng.choice([61, 97, 130, 192, 257, 300]))
    put("num_attention_heads", heads)
    put("num_key_value_heads", groups)
    put("num_kv_heads", groups)
    put("head_dim", d)
    put("hidden_size", heads * (rng.randint(3, 12) if size.get("head_dim") else d))
    for key in ("intermediate_size", "intermediate_size_mlp"):
        put(key, rng.choice([rng.randint(20, 90), 8 * rng.randint(3, 9), 24 * rng.randint(1, 3)]))
    for key in ("moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"):
        put(key, rng.choice([rng.randint(5, 40), 8 * rng.randint(1, 5), 24 * rng.randint(1, 2)]))
    put("num_hidden_layers", rng.randint(1, 5))
    put("tie_word_embeddings", rng.random() < 0.4 if family in TIED else size.get("tie_word_embeddings"))
    put("n_shared_experts", rng.randint(1, 3))
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        put(key, 2 * rng.randint(1, 6) if "n_group" in size else rng.randint(2, 11))
    put("num_experts_per_tok", 1 if size.get("num_experts_per_tok") == 1 else 2)
    return _of_family(family, size, rng, d)


def _of_family(family: str, size: Size, rng: random.Random, d: int) -> Size:
    """What only one family has, and what some do not allow."""
    if family == "gpt2":
        heads = rng.choice([3, 4, 6, 8])
        size |= {"n_embd": heads * d, "n_head": heads, "n_layer": rng.randint(1, 4), "n_positions": rng.randint(9, 40)}
    if family.startswith("bert"):
        size |= {"max_position_embeddings": rng.randint(20, 90), "type_vocab_size": rng.randint(1, 3)}
    if family == "deepseek-v3":
        size |= {"num_key_value_heads": size["num_attention_heads"], "num_hidden_layers": rng.randint(2, 4)}
        size |= {"first_k_dense_replace": rng.randint(1, size["num_hidden_layers"] - 1)}
        size |= {"q_lora_rank": rng.randint(5, 30), "kv_lora_rank": rng.randint(5, 30)}
        size |= {"qk_nope_head_dim": rng.randint(3, 12), "qk_rope_head_dim": 2 * rng.randint(1, 4)}
        size |= {"v_head_dim": rng.randint(3, 12)}
    if family == "glm4-moe":
        size |= {"num_hidden_layers": rng.randint(2, 4), "use_qk_norm": rng.random() < 0.5}
        size |= {"first_k_dense_replace": rng.randint(1, size["num_hidden_layers"] - 1)}
    if family == "qwen3-moe" and size["num_hidden_layers"] > 1:
        size["decoder_sparse_step"] = rng.randint(1, 2)
    if family == "llama4":
        step = rng.randint(1, 3)
        size |= {"interleave_moe_layer_step": step, "num_hidden_layers": step * rng.randint(1, 2)}
    if family == "qwen3-next":
        every = rng.randint(2, 3)
        layers = every * rng.randint(1, 2)
        kinds = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)]
        keys = rng.choice([1, 2, 3, 4, 6, 8])
        size |= {"num_hidden_layers": layers, "layer_types": kinds, "linear_num_key_heads": keys}
        size.pop("full_attention_interval", None)
        size |= {"linear_num_value_heads": keys * rng.randint(1, 3)}
        size |= {"linear_key_head_dim": rng.randint(3, 9), "linear_value_head_dim": rng.randint(3, 9)}
    if family == "mamba2":
        groups = rng.choice([1, 1, 2, 3, 4, 8])
        heads, of_head = groups * rng.choice([1, 2, 4]), 2 * rng.randint(2, 6)
        size |= {"num_heads": heads, "head_dim": of_head, "n_groups": groups, "state_size": rng.randint(3, 12)}
        size |= {"expand": 2, "hidden_size": heads * of_head // 2, "num_hidden_layers": rng.randint(1, 3)}
        size["tie_word_embeddings"] = rng.random() < 0.5
    if family == "nemotron-h":
        groups = rng.choice([1, 2, 3, 4, 8])
        size |= {"n_groups": groups, "mamba_num_heads": groups * rng.choice([1, 2, 4])}
        size |= {"mamba_head_dim": rng.randint(3, 9), "ssm_state_size": rng.randint(3, 12), "n_group": 1}
        kinds = ["mamba", "attention", *rng.choices(["mamba", "mlp", "attention", "moe"], k=rng.randint(0, 4))]
        size["layers_block_type"] = rng.sample(kinds, len(kinds))
    return size
