"""The language model in a configuration of several models, such as one for text and images.

Its sizes are in a part of the configuration, and its tensors have a prefix. Rules that are for a language model look
into that part, and leave what has another prefix alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["language_config", "language_part", "model_types"]

#: The keys under which configurations have that of their language model, the likeliest first.
_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
#: The deepest level at which they are looked for: Qwen 2.5 Omni has it in `thinker_config.text_config`.
_DEEPEST = 3

_SIZES = (
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_hidden_layers",
)
#: Values that a part leaves out where they are transformers' default for its type: files of transformers 4 have the
#: others only. `None` is worked out from the others.
_DEFAULTS: dict[str, tuple[int | None, ...]] = {
    "llama": (32, None, None, 4096, 11008, 32000, 32),
    "mistral": (32, 8, None, 4096, 14336, 32000, 32),
    "mixtral": (32, 8, None, 4096, 14336, 32000, 32),
    "qwen2": (32, 32, None, 4096, 22016, 151936, 32),
    "qwen3": (32, 32, 128, 4096, 22016, 151936, 32),
    "gemma": (16, 16, 256, 3072, 24576, 256000, 28),
    "gemma2": (8, 4, 256, 2304, 9216, 256000, 26),
    "gemma3_text": (8, 4, 256, 2304, 9216, 262208, 26),
    "gemma3n_text": (8, 2, 256, 2048, 16384, 262400, 35),
    "phi3": (32, None, None, 3072, 8192, 32064, 32),
    "llama4_text": (40, 8, 128, 5120, 8192, 202048, 48),
    "qwen2_vl_text": (64, 8, None, 8192, 29568, 152064, 80),
    "qwen2_5_vl_text": (64, 8, None, 8192, 29568, 152064, 80),
    "qwen2_5_omni_text": (28, 4, None, 3584, 18944, 152064, 28),
    "qwen3_vl_text": (32, 32, 128, 4096, 22016, 151936, 32),
}


def language_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the language model: that of a part, with what only the whole says, or the whole.

    A part's own values come first, then the defaults of transformers for its `model_type`, then those of the whole.

    >>> whole = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "head_dim": 128}}
    >>> found = language_config(whole)
    >>> found["model_type"], found["head_dim"], found["num_key_value_heads"]
    ('gemma3_text', 128, 4)
    >>> language_config({"model_type": "llama", "head_dim": 128})
    {'model_type': 'llama', 'head_dim': 128}
    """
    found = part = config
    for _ in range(_DEEPEST):
        inner = next((part[key] for key in _PARTS if isinstance(part.get(key), Mapping) and part[key]), None)
        if inner is None:
            break
        part = inner
        defaults = dict(zip(_SIZES, _DEFAULTS.get(str(part.get("model_type")), ()), strict=False))
        found = {**found, **defaults, **part}
    return found


def language_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a configuration that is of the language model, as it stands there, or the whole.

    >>> language_part({"model_type": "llava", "text_config": {"model_type": "llama"}})
    {'model_type': 'llama'}
    """
    part = config
    for _ in range(_DEEPEST):
        part = next((part[key] for key in _PARTS if isinstance(part.get(key), Mapping) and part[key]), part)
    return part


def model_types(config: Mapping[str, Any]) -> list[str]:
    """Return the types that a configuration names: its own, and that of the language model in it.

    >>> model_types({"model_type": "llava", "text_config": {"model_type": "llama"}})
    ['llava', 'llama']
    """
    named = (one.get("model_type") for one in (config, language_config(config)))
    return list(dict.fromkeys(one for one in named if isinstance(one, str)))
