"""The shapes of a model that the benchmarks of plans move."""

from __future__ import annotations

__all__ = ["llama"]


def llama(layers: int = 32) -> dict[str, tuple[tuple[int, ...], int | None]]:
    """The shapes of Llama-3-8B, and the dim that tensor parallelism cuts."""
    hidden, inner, words, kv = 4096, 14336, 128256, 1024
    tensors: dict[str, tuple[tuple[int, ...], int | None]] = {
        "model.embed_tokens.weight": ((words, hidden), 0),
        "lm_head.weight": ((words, hidden), 0),
        "model.norm.weight": ((hidden,), None),
    }
    for i in range(layers):
        layer = f"model.layers.{i}."
        tensors |= {f"{layer}self_attn.{x}_proj.weight": ((hidden if x == "q" else kv, hidden), 0) for x in "qkv"}
        tensors |= {f"{layer}mlp.{x}_proj.weight": ((inner, hidden), 0) for x in ("gate", "up")}
        tensors[f"{layer}self_attn.o_proj.weight"] = (hidden, hidden), 1
        tensors[f"{layer}mlp.down_proj.weight"] = (hidden, inner), 1
        tensors |= {f"{layer}{x}_layernorm.weight": ((hidden,), None) for x in ("input", "post_attention")}
    return tensors
