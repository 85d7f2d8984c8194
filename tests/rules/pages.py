"""A report on a model of a thousand tensors, with everything in it that a page shows."""

from __future__ import annotations

import shardwise as sw

MESH = sw.DeviceMesh((2, 8), ("dp", "tp"))


def large_report(layers: int = 111) -> sw.rules.LayoutReport:
    """Nine tensors a layer, and five more: one that no rule matches, one that does not divide, one with two rules."""
    rules = sw.LayoutMap(MESH)
    rules[r"(q|k|v)_proj"] = ("tp", None)
    rules["o_proj|down_proj"] = (None, "tp")
    rules["gate_up"] = (sw.packed.gate_up("tp"), None)
    rules["embed_tokens|lm_head"] = (("dp", "tp"), None)
    rules["norm"] = (None,)
    rules[r"odd\."] = ("tp", None)
    rules["never"] = ("tp",)
    bf16 = "bfloat16"
    tensors: dict[str, tuple[tuple[int, ...], str]] = {
        "model.embed_tokens.weight": ((128256, 8192), bf16),
        "lm_head.weight": ((128256, 8192), bf16),
        "odd.kernel": ((6, 10), "float32"),
        "odd.norm": ((8,), "float32"),
        "extra.bias": ((5,), "float32"),
    }
    for layer in range(layers):
        name = f"model.layers.{layer}."
        tensors |= {
            f"{name}self_attn.q_proj.weight": ((8192, 8192), bf16),
            f"{name}self_attn.k_proj.weight": ((1024, 8192), bf16),
            f"{name}self_attn.v_proj.weight": ((1024, 8192), bf16),
            f"{name}self_attn.o_proj.weight": ((8192, 8192), bf16),
            f"{name}mlp.gate_up.weight": ((57344, 8192), bf16),
            f"{name}mlp.down_proj.weight": ((8192, 28672), bf16),
            f"{name}input_layernorm.weight": ((8192,), bf16),
            f"{name}post_attention_layernorm.weight": ((8192,), bf16),
            f"{name}self_attn.rotary.inv_freq": ((64,), "float32"),
        }
    return rules.report(tensors)
