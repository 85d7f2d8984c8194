"""The order in which a model of transformers has its parameters, by its configuration.

Safetensors files are sorted by name, and an optimizer counts parameters as the model's modules were made. The families
are those whose order is the same in all versions; tests ask transformers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["parameter_order"]

_DECODER = (
    "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj self_attn.q_norm self_attn.k_norm "
    "mlp.gate_proj mlp.up_proj mlp.down_proj input_layernorm post_attention_layernorm"
)
_PHI3 = "self_attn.o_proj self_attn.qkv_proj mlp.gate_up_proj mlp.down_proj input_layernorm post_attention_layernorm"
_GPT2 = "ln_1 attn.c_attn attn.c_proj ln_2 mlp.c_fc mlp.c_proj"
_HEADS = "lm_head score"
#: The modules before the layers, the layers' own, and those after them.
_MODEL = ("model.embed_tokens", "model.layers", f"model.norm {_HEADS}")
_TRANSFORMER = ("transformer.wte transformer.wpe", "transformer.h", f"transformer.ln_f {_HEADS}")
#: The modules around the layers, and those of a layer, by `model_type`.
_FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "smollm3", "granite"), (_MODEL, _DECODER)),
    "phi3": (_MODEL, _PHI3),
    "gpt2": (_TRANSFORMER, _GPT2),
}


def parameter_order(config: Mapping[str, Any], names: Iterable[str]) -> list[str] | None:
    """Put the names of a model's parameters in the order of `named_parameters()`.

    Args:
        config: The contents of the model's `config.json`.
        names: All parameters of the model, in any order.

    Returns:
        The names in order; `None` if the order is not known of this family, or of one of the names.

    >>> names = ["model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.q_proj.weight"]
    >>> parameter_order({"model_type": "llama"}, names)
    ['model.layers.0.self_attn.q_proj.weight', 'model.layers.0.self_attn.k_proj.weight']
    >>> parameter_order({"model_type": "llama"}, ["model.layers.0.mlp.experts.0.up_proj.weight"]) is None
    True
    """
    family = config.get("model_type")
    known = _FAMILIES.get(family) if isinstance(family, str) and "auto_map" not in config else None
    if known is None:
        return None
    (before, layers, after), modules = known
    places = {module: (0, number, 0) for number, module in enumerate(before.split())}
    places |= {module: (2, number, 0) for number, module in enumerate(after.split())}
    own = {module: number for number, module in enumerate(modules.split())}
    layer = re.compile(rf"{re.escape(layers)}\.(0|[1-9][0-9]{{0,5}})\.(.+)")
    found: list[tuple[tuple[int, int, int, bool], str]] = []
    for name in names:
        module, _, last = name.rpartition(".")
        match = layer.fullmatch(module)
        number = None if match is None else own.get(match[2])
        place = places.get(module) if match is None or number is None else (1, int(match[1]), number)
        if place is None or last not in ("weight", "bias"):
            return None
        found.append(((*place, last == "bias"), name))
    return [name for _, name in sorted(found)]
