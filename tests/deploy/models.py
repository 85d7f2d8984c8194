"""Small models on engines, and what a device's parameter holds, put together piece by piece from element numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardwise.deploy import Deployment, LocalParameter, fsdp2, sglang, vllm

Shapes = Mapping[str, tuple[int, ...]]
PADDING = -1


def llama(
    heads: int = 8, keys: int = 2, layers: int = 2, **more: Any
) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    config = {
        "hidden_size": 16,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "num_hidden_layers": layers,
        "intermediate_size": 32,
        "vocab_size": 100,
        **more,
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (100, 16), "lm_head.weight": (100, 16)}
    for i in range(layers):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.self_attn.{x}_proj.weight": (n * 2, 16) for x, n in (("q", heads), ("k", keys), ("v", keys))}
        shapes |= {f"{at}.self_attn.o_proj.weight": (16, heads * 2), f"{at}.input_layernorm.weight": (16,)}
        experts = more.get("num_experts", 0)
        mlps = [f"{at}.mlp.experts.{e}" for e in range(experts)] or [f"{at}.mlp"]
        for mlp in mlps:
            shapes |= {f"{mlp}.{x}_proj.weight": (16, 32) if x == "down" else (32, 16) for x in ("gate", "up", "down")}
    return config, shapes


def numbered(shapes: Shapes) -> dict[str, int]:
    """The first element number of each tensor, of all elements of a model."""
    first, at = {}, 0
    for name, shape in shapes.items():
        first[name] = at
        at += math.prod(shape)
    return first


def dense(parameter: LocalParameter, shapes: Shapes) -> np.ndarray[Any, Any]:
    """A parameter of element numbers, by its pieces."""
    first = numbered(shapes)
    made = np.full(parameter.shape, PADDING)
    for piece in parameter.pieces:
        whole = np.arange(math.prod(shapes[piece.tensor])).reshape(shapes[piece.tensor]) + first[piece.tensor]
        part = whole[piece.box]
        sizes = (1,) * (made.ndim - part.ndim) + part.shape
        region = tuple(slice(start, start + size) for start, size in zip(piece.start, sizes, strict=True))
        made[region] = part.reshape(sizes)
    return made.reshape(-1)


ENGINES: dict[str, tuple[Deployment, Shapes]] = {}
_config, _shapes = llama()
ENGINES["fused, keys repeated"] = vllm(_config, tp=4), _shapes
ENGINES["stages"] = vllm(_config, tp=2, pp=2), _shapes
ENGINES["data parallel"] = sglang(_config, tp=4, dp=2), _shapes
_config, _shapes = llama(num_experts=4)
ENGINES["experts cut"] = vllm(_config, tp=2), _shapes
ENGINES["experts repeated"] = vllm(_config, tp=4, expert_parallel=True, redundant=4), _shapes
ENGINES["fsdp2"] = fsdp2(3), llama()[1]
