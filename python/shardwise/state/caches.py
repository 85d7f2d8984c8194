"""Caches of keys and values: the elements that each layer keeps for each token."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .._arguments import integer
from .._dtypes import bits_of
from .._text import shown
from ..errors import LayoutError
from ..rules.names import keys_of, stated, weight_named
from ..rules.wrapped import language_config, model_types

__all__ = ["Cache", "key_value_caches"]

_PROJECTION = re.compile(
    r"(?:^|\.)(?P<layer>[0-9]+)\.(?:self_attn|attention|attn)\."
    r"(?P<kind>k_proj|v_proj|kv_a_proj_with_mqa|qkv_proj|c_attn|query_key_value|W_pack|in_proj_qkvz)\.weight$"
)
_FULL, _WINDOW = ("full_attention", "global"), ("sliding_attention", "chunked_attention")
_BY_HAND = "a Cache can be made by hand instead"
#: Types of models whose layers have a window only if `layer_types` or a pattern says so.
_NO_WINDOW = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")


class Cache(NamedTuple):
    """A cache of one layer, cut like the rows of the weight that makes its contents.

    Attributes:
        name: The name of the layer's module, and after it the kind of cache: `.k`, `.v` or `.latent`.
        follows: The name of that weight.
        rows: The range of the weight's rows that make keys, or values; `None` for a cache that every device with a part
            of the weight keeps whole.
        held: The elements that are kept for each row: one for each token.
        allocated: The elements for which there is room.
        bits: The bits of an element.
    """

    name: str
    follows: str
    rows: tuple[int, int] | None
    held: int
    allocated: int
    bits: int


def key_value_caches(
    config: Mapping[str, Any],
    tensors: Mapping[str, Any],
    *,
    batch: int,
    context: int,
    dtype: Any = "bfloat16",
    block: int = 1,
) -> tuple[Cache, ...]:
    """Return the caches of keys and values of a model, by the names of Hugging Face's checkpoints.

    Args:
        config: the model's `config.json`, for heads, windows and latent attention.
        tensors: the names of the model's tensors, with their shapes.
        batch: the sequences on each data-parallel rank.
        context: the tokens of a sequence.
        dtype: the dtype of keys and values.
        block: the tokens of a block; room is made for whole blocks.

    Raises:
        LayoutError: if a size is less than 1, or a layer's kind of attention is not known.

    A layer with a sliding window keeps the tokens of one window; latent attention (MLA) keeps the latent vector and the
    rotated part of the key, on every device that has the layer. A device that has a part of the heads keeps the caches
    of these.

    >>> config = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    >>> shapes = {f"layers.0.self_attn.{x}_proj.weight": (16, 32) for x in "kv"}
    >>> for cache in key_value_caches(config, shapes, batch=3, context=100, block=16):
    ...     print(cache.name, cache.rows, cache.held, cache.allocated)
    layers.0.self_attn.k (0, 16) 300 336
    layers.0.self_attn.v (0, 16) 300 336
    """
    for name, size in (("batch", batch), ("context", context), ("block", block)):
        if integer(name, size) < 1:
            raise LayoutError(f"{name} is {shown(size)}; it must be at least 1")
    said, bits = language_config(config), bits_of(dtype)
    found = []
    for name, given in tensors.items():
        match = _PROJECTION.search(name)
        if match is None:
            continue
        layer, kind = int(match["layer"]), match["kind"]
        tokens = min(context, _window(said, config, layer) or context)
        held, room = batch * tokens, batch * (-(-tokens // block) * block)
        base = name[: match.start("kind")].removesuffix(".")
        shape = getattr(given, "shape", given)
        rows = (shape[0] if isinstance(shape[0], (tuple, list)) else shape)[0]
        weight = weight_named(kind)
        if weight is not None and weight.heads == "kv":
            found.append(Cache(f"{base}.{kind[0]}", name, (0, rows), held, room, bits))
        elif kind == "kv_a_proj_with_mqa":
            found.append(Cache(f"{base}.latent", name, None, held * rows, room * rows, bits))
        elif kind == "qkv_proj":
            q, kv = _count(said, "heads"), _count(said, "kv_heads", "heads")
            size = (stated(said, "head_dim") or ("", 0))[1] or rows // (q + 2 * kv)
            keys = q * size, (q + kv) * size
            found.append(Cache(f"{base}.k", name, keys, held, room, bits))
            found.append(Cache(f"{base}.v", name, (keys[1], keys[1] + kv * size), held, room, bits))
        else:
            raise LayoutError(
                f"the cache of {shown(name)} is not known, because the name does not say where the keys are; {_BY_HAND}"
            )
    layers = (stated(said, "layers") or ("", None))[1]
    if not found or (type(layers) is int and len({cache.name.rpartition(".")[0] for cache in found}) < layers):
        raise LayoutError(
            f"the caches of {len({cache.name.rpartition('.')[0] for cache in found})} layers are known, out of "
            f"{layers if layers is not None else 'an unknown number'}: the others have no k_proj, v_proj, qkv_proj or "
            f"kv_a_proj_with_mqa; {_BY_HAND}"
        )
    return tuple(found)


def _count(said: Mapping[str, Any], *sizes: str) -> int:
    """Return the first of these sizes that the configuration states."""
    for size in sizes:
        found = stated(said, size)
        if found is not None and type(found[1]) is int and found[1] > 0:
            return int(found[1])
    raise LayoutError(f"the caches need {keys_of(sizes[0])[0]}; give a configuration that has it")


def _window(said: Mapping[str, Any], config: Mapping[str, Any], layer: int) -> int | None:
    """Return the number of tokens that a layer keeps; `None` for all."""
    kinds: Iterable[Any] | None = said.get("layer_types")
    window = said.get("sliding_window")
    if isinstance(kinds, list) and layer < len(kinds):
        kind = kinds[layer]
        if kind in _FULL:
            return None
        if kind not in _WINDOW:
            raise LayoutError(
                f"layer_types says that layer {layer} has {shown(kind)}, whose cache is not known; known are "
                f"{', '.join((*_FULL, *_WINDOW))}; {_BY_HAND}"
            )
        if kind == "chunked_attention":
            window = said.get("attention_chunk_size", window)
        if type(window) is not int or window < 1:
            key = "attention_chunk_size" if "attention_chunk_size" in said and kind == "chunked_attention" else ""
            raise LayoutError(
                f"layer_types says that layer {layer} has {kind}, and {key or 'sliding_window'} is {shown(window)}; "
                "give a configuration in which it is at least 1"
            )
        return window
    if type(window) is not int or said.get("use_sliding_window") is False:
        return None
    pattern = said.get("sliding_window_pattern")
    if type(pattern) is int and pattern > 0:
        return None if (layer + 1) % pattern == 0 else window
    types = model_types(config)
    if any(one in _NO_WINDOW for one in types):
        first = said.get("max_window_layers", 0)
        return window if said.get("use_sliding_window") and layer >= first else None
    if any(one.startswith(("gemma2", "gemma3", "cohere2", "gpt_oss", "llama4")) for one in types):
        raise LayoutError(
            f"nothing says which layers of {types[0]} have the window of {window}; give a configuration with "
            "layer_types"
        )
    return window
