"""The names and shapes of a model's tensors in Hugging Face's format, worked out from its configuration alone.

The families are those of transformers; `tests/data/families` has models that transformers wrote, which are compared.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from .._expressions import parse_expression
from .._fork import importing
from .._text import shown
from ..errors import ParseError
from .names import expert_names, keys_of
from .numbers import Config, NamedNumbers, read_config
from .type_tensors import MOST_TENSORS, TypeTensors
from .wrapped import language_config, language_part

__all__ = ["is_tied", "model_shapes"]

#: Names in a layer, with the sizes of their dims.
_Shapes = dict[str, str]

#: Sizes by the names that are used here: what configurations call them, or what they are worked out from.
_NUMBERS: dict[str, Any] = {
    **{name: keys_of(name) for name in ("hidden", "heads", "layers", "experts")},
    "inner": [*keys_of("inner"), "4 * n_embd"],
    "groups": [*keys_of("kv_heads"), "heads"],
    "d": [*keys_of("head_dim"), "hidden // heads"],
    "words": keys_of("vocabulary"),
    "places": keys_of("positions"),
    "width": [*keys_of("expert_inner"), "intermediate_size"],
    "common": [*keys_of("shared_inner"), "moe_intermediate_size * n_shared_experts", "intermediate_size"],
    "q_rank": keys_of("q_rank"),
    "kv_rank": keys_of("kv_rank"),
    "rope": keys_of("rope_head_dim"),
    "nope": keys_of("nope_head_dim"),
    "v": keys_of("v_head_dim"),
    "dense": ["intermediate_size_mlp", "intermediate_size"],
    "keys": keys_of("linear_k_heads"),
    "values": keys_of("linear_v_heads"),
    "kd": keys_of("linear_k_head_dim"),
    "vd": keys_of("linear_v_head_dim"),
    "kernel": [*keys_of("linear_kernel"), 4],
}
#: The largest dim of a model.
_LARGEST = 1 << 40

_QKV = {
    "self_attn.q_proj.weight": "heads*d,hidden",
    "self_attn.k_proj.weight": "groups*d,hidden",
    "self_attn.v_proj.weight": "groups*d,hidden",
}
_ATTENTION = {**_QKV, "self_attn.o_proj.weight": "hidden,heads*d"}
_QKV_BIAS = {
    "self_attn.q_proj.bias": "heads*d",
    "self_attn.k_proj.bias": "groups*d",
    "self_attn.v_proj.bias": "groups*d",
}
_QK_NORM = {"self_attn.q_norm.weight": "d", "self_attn.k_norm.weight": "d"}
_NORMS = {"input_layernorm.weight": "hidden", "post_attention_layernorm.weight": "hidden"}
_FOUR_NORMS = {**_NORMS, "pre_feedforward_layernorm.weight": "hidden", "post_feedforward_layernorm.weight": "hidden"}
_LATENT = {
    "self_attn.kv_a_proj_with_mqa.weight": "kv_rank+rope,hidden",
    "self_attn.kv_a_layernorm.weight": "kv_rank",
    "self_attn.kv_b_proj.weight": "heads*(nope+v),kv_rank",
    "self_attn.o_proj.weight": "hidden,heads*v",
}
_Q_LATENT = {
    "self_attn.q_a_proj.weight": "q_rank,hidden",
    "self_attn.q_a_layernorm.weight": "q_rank",
    "self_attn.q_b_proj.weight": "heads*(nope+rope),q_rank",
}
_LINEAR_ATTENTION = {
    "linear_attn.in_proj_qkvz.weight": "2*keys*kd+2*values*vd,hidden",
    "linear_attn.in_proj_ba.weight": "2*values,hidden",
    "linear_attn.conv1d.weight": "2*keys*kd+values*vd,1,kernel",
    "linear_attn.out_proj.weight": "hidden,values*vd",
    **{"linear_attn.A_log": "values", "linear_attn.dt_bias": "values", "linear_attn.norm.weight": "vd"},
}
_GPT2 = {
    **{"ln_1.weight": "hidden", "ln_1.bias": "hidden", "ln_2.weight": "hidden", "ln_2.bias": "hidden"},
    **{"attn.c_attn.weight": "hidden,3*hidden", "attn.c_attn.bias": "3*hidden"},
    **{"attn.c_proj.weight": "hidden,hidden", "attn.c_proj.bias": "hidden"},
    **{"mlp.c_fc.weight": "hidden,inner", "mlp.c_fc.bias": "inner"},
    **{"mlp.c_proj.weight": "inner,hidden", "mlp.c_proj.bias": "hidden"},
}
_GPT_OSS = {
    **{**_ATTENTION, **_QKV_BIAS, "self_attn.o_proj.bias": "hidden", "self_attn.sinks": "heads", **_NORMS},
    **{"mlp.router.weight": "experts,hidden", "mlp.router.bias": "experts"},
    **{"mlp.experts.gate_up_proj": "experts,hidden,2*inner", "mlp.experts.gate_up_proj_bias": "experts,2*inner"},
    **{"mlp.experts.down_proj": "experts,inner,hidden", "mlp.experts.down_proj_bias": "experts,hidden"},
}
_LLAMA4_EXPERTS = {
    "feed_forward.experts.gate_up_proj": "experts,hidden,2*width",
    "feed_forward.experts.down_proj": "experts,width,hidden",
    "feed_forward.router.weight": "experts,hidden",
}
_PHI3 = {
    "self_attn.qkv_proj.weight": "(heads+2*groups)*d,hidden",
    "self_attn.o_proj.weight": "hidden,heads*d",
    **{"mlp.gate_up_proj.weight": "2*inner,hidden", "mlp.down_proj.weight": "hidden,inner", **_NORMS},
}


#: The names of an expert's gate, up and down; those of `mlp` are those of dense layers too.
_GATED = {expert.block: expert.projections for expert in expert_names()}


def _gated(prefix: str, size: str, block: str = "mlp") -> _Shapes:
    gate, up, down = (f"{prefix}.{name}.weight" for name in _GATED[block])
    return {gate: f"{size},hidden", up: f"{size},hidden", down: f"hidden,{size}"}


def _is(config: Mapping[str, Any], key: str, otherwise: bool = False) -> bool:
    value = config.get(key)
    if value is None:
        return otherwise
    if not isinstance(value, bool):
        raise ParseError(f"the configuration: {key} is {shown(value)}; it must be true or false")
    return value


def _number(config: Mapping[str, Any], key: str, otherwise: int) -> int:
    value = config.get(key)
    if value is not None and (type(value) is not int or value < 0):
        raise ParseError(f"the configuration: {key} is {shown(value)}; it must be a whole number")
    return value or otherwise


def _list(config: Mapping[str, Any], key: str) -> list[Any] | None:
    value = config.get(key)
    if value is not None and not isinstance(value, list):
        raise ParseError(f"the configuration: {key} is {shown(value)}; it must be a list")
    return value


def _llama(config: Mapping[str, Any], _: int) -> _Shapes:
    bias = {**_QKV_BIAS, "self_attn.o_proj.bias": "hidden"} if _is(config, "attention_bias") else {}
    more = {"mlp.gate_proj.bias": "inner", "mlp.up_proj.bias": "inner", "mlp.down_proj.bias": "hidden"}
    return {**_ATTENTION, **bias, **_NORMS, **_gated("mlp", "inner"), **(more if _is(config, "mlp_bias") else {})}


def _qwen2(config: Mapping[str, Any], _: int) -> _Shapes:
    return {**_ATTENTION, **_QKV_BIAS, **_NORMS, **_gated("mlp", "inner")}


def _qwen3(config: Mapping[str, Any], layer: int) -> _Shapes:
    return {**_llama(config, layer), **_QK_NORM}


def _sparse(config: Mapping[str, Any], layer: int) -> bool:
    dense = _list(config, "mlp_only_layers") or ()
    return layer not in dense and (layer + 1) % _number(config, "decoder_sparse_step", 1) == 0


def _qwen3_moe(config: Mapping[str, Any], layer: int) -> _Shapes:
    attention = {name: size for name, size in _qwen3(config, layer).items() if not name.startswith("mlp.")}
    if not _sparse(config, layer):
        return {**attention, **_gated("mlp", "inner")}
    return {**attention, "mlp.gate.weight": "experts,hidden", **_gated("mlp.experts.{e}", "width")}


def _qwen3_next(config: Mapping[str, Any], layer: int) -> _Shapes:
    kinds = _list(config, "layer_types") or ()
    is_linear = (
        kinds[layer] == "linear_attention"
        if layer < len(kinds)
        else (layer + 1) % _number(config, "full_attention_interval", 4) != 0
    )
    full = {**_ATTENTION, "self_attn.q_proj.weight": "2*heads*d,hidden", **_QK_NORM}
    mlp = _gated("mlp", "inner")
    if _sparse(config, layer):
        mlp = {
            **{"mlp.gate.weight": "experts,hidden", **_gated("mlp.experts.{e}", "width")},
            **{"mlp.shared_expert_gate.weight": "1,hidden", **_gated("mlp.shared_expert", "common")},
        }
    return {**(_LINEAR_ATTENTION if is_linear else full), **_NORMS, **mlp}


def _mixtral(config: Mapping[str, Any], _: int) -> _Shapes:
    experts = _gated("block_sparse_moe.experts.{e}", "inner", "block_sparse_moe")
    return {**_ATTENTION, **_NORMS, "block_sparse_moe.gate.weight": "experts,hidden", **experts}


def _is_dense(config: Mapping[str, Any], layer: int) -> bool:
    is_before = layer < _number(config, "first_k_dense_replace", 0)
    return config.get("n_routed_experts") is None or is_before or layer % _number(config, "moe_layer_freq", 1) != 0


def _deepseek_mlp(config: Mapping[str, Any], layer: int, *, bias: bool) -> _Shapes:
    if _is_dense(config, layer):
        return _gated("mlp", "inner")
    router = {"mlp.gate.weight": "experts,hidden"}
    if bias:
        router["mlp.gate.e_score_correction_bias"] = "experts"
    shared = _gated("mlp.shared_experts", "common") if config.get("n_shared_experts") else {}
    return {**router, **_gated("mlp.experts.{e}", "width"), **shared}


def _deepseek(config: Mapping[str, Any], layer: int) -> _Shapes:
    q = {"self_attn.q_proj.weight": "heads*(nope+rope),hidden"} if config.get("q_lora_rank") is None else _Q_LATENT
    bias = config.get("topk_method", "noaux_tc") == "noaux_tc" and config.get("model_type") != "deepseek_v2"
    return {**q, **_LATENT, **_NORMS, **_deepseek_mlp(config, layer, bias=bias)}


def _glm4_moe(config: Mapping[str, Any], layer: int) -> _Shapes:
    bias = _QKV_BIAS if _is(config, "attention_bias") else {}
    norm = _QK_NORM if _is(config, "use_qk_norm") else {}
    return {**_ATTENTION, **bias, **norm, **_NORMS, **_deepseek_mlp(config, layer, bias=True)}


def _gemma2(config: Mapping[str, Any], _: int) -> _Shapes:
    return {**_ATTENTION, **_FOUR_NORMS, **_gated("mlp", "inner")}


def _gemma3(config: Mapping[str, Any], layer: int) -> _Shapes:
    return {**_gemma2(config, layer), **_QK_NORM}


def _llama4(config: Mapping[str, Any], layer: int) -> _Shapes:
    sparse, step = _list(config, "moe_layers"), _number(config, "interleave_moe_layer_step", 1)
    is_sparse = layer in sparse if sparse is not None else (layer + 1) % step == 0
    shared = {**_LLAMA4_EXPERTS, **_gated("feed_forward.shared_expert", "width")}
    return {**_ATTENTION, **_NORMS, **(shared if is_sparse else _gated("feed_forward", "dense"))}


#: The tensors of a layer by `model_type`, and whether the output has the embedding's weights if nothing is said.
_FAMILIES: dict[str, tuple[Callable[[Mapping[str, Any], int], _Shapes], bool]] = {
    **dict.fromkeys(("llama", "mistral"), (_llama, False)),
    "qwen2": (_qwen2, False),
    "qwen3": (_qwen3, False),
    "qwen3_moe": (_qwen3_moe, False),
    "qwen3_next": (_qwen3_next, False),
    "mixtral": (_mixtral, False),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), (_deepseek, False)),
    "glm4_moe": (_glm4_moe, False),
    "gpt_oss": (lambda config, layer: _GPT_OSS, False),
    "gemma2": (_gemma2, True),
    **dict.fromkeys(("gemma3", "gemma3_text"), (_gemma3, True)),
    "phi3": (lambda config, layer: _PHI3, False),
    "llama4_text": (_llama4, False),
    "gpt2": (lambda config, layer: _GPT2, True),
}
#: The embedding, what follows the layers, the output, and what comes before the number of a layer.
_USUAL = (
    {"model.embed_tokens.weight": "words,hidden"},
    {"model.norm.weight": "hidden"},
    {"lm_head.weight": "words,hidden"},
    "model.layers",
)
_AROUND = {
    "gpt2": (
        {"transformer.wte.weight": "words,hidden", "transformer.wpe.weight": "places,hidden"},
        {"transformer.ln_f.weight": "hidden", "transformer.ln_f.bias": "hidden"},
        {"lm_head.weight": "words,hidden"},
        "transformer.h",
    )
}


def model_shapes(config: Config, rules: str | os.PathLike[str] | None = None) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a model's tensors, as transformers stores them before they are quantized.

    Args:
        config: The model's `config.json`, or what it says. Of a model with images or sound it is the text model's part
            that counts, if no table has the whole. Layers that predict further tokens are left out.
        rules: A rules file, or the name of one of the package's, that may state the tensors of the model's type.

    Raises:
        ParseError: if the family is not known, or a number that it needs is missing.
        OSError: if the file cannot be read.

    >>> config = {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 100, "head_dim": 32}
    >>> config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    >>> shapes = model_shapes(config)
    >>> shapes["model.layers.1.self_attn.q_proj.weight"], shapes["model.layers.1.self_attn.k_proj.weight"]
    ((128, 64), (64, 64))
    """
    whole = read_config(config)
    said = language_config(whole)
    # A part for text may have no type of its own, and one of its own the whole may lack.
    types = [one.get("model_type") for one in (said, whole)]
    named = ((one.get("model_type"), one) for one in (language_part(whole), whole))
    parts = {kind: one for kind, one in named if isinstance(kind, str)}
    if rules is not None:
        with importing:
            from .toml import read_type_tensors

        stated = read_type_tensors(os.fspath(rules))
        if stated is not None and isinstance(stated.type, str) and stated.type in parts:
            return stated.shapes(parts[stated.type])
    family = next((one for one in types if _is_known(one)), None)
    if family is None:
        table = next((one for one in map(_recorded, reversed(parts)) if one is not None), None)
        if table is not None:
            return table.shapes(parts[str(table.type)])
        known = {*_FAMILIES, *_tables()}
        given = " and ".join(dict.fromkeys(map(shown, types)))
        with importing:
            from difflib import get_close_matches  # Slow to import.

        near = [one for kind in parts for one in get_close_matches(kind, known)]
        also = f", such as {', '.join(dict.fromkeys(near))}" if near else ""
        raise ParseError(
            f"the configuration: model_type is {given}; the tensors of {len(known)} other types are known{also}; "
            "`shardwise rules --record transformers config.json`, where transformers is installed, makes a file that "
            "states them, for --rules. For other models write a file that states them under [tensors], or give the "
            "checkpoint"
        )
    layer_of, is_tied = _FAMILIES[family]
    before, after, output, prefix = _AROUND.get(family, _USUAL)
    numbers = NamedNumbers(_NUMBERS, said, "the family's tensors")
    sizes = _ShapeSizes(numbers)
    found = sizes.of(before)
    for layer in range(sizes.number("layers")):
        for names, shape in sizes.listed(layer_of(said, layer), f"{prefix}.{layer}."):
            found.update(zip(names, itertools.repeat(shape)))
            if len(found) > MOST_TENSORS:
                raise ParseError(f"the configuration: it describes more than {MOST_TENSORS} tensors")
    found.update(sizes.of(after))
    if not _is(said, "tie_word_embeddings", is_tied):
        found.update(sizes.of(output))
    return found


def is_tied(config: Mapping[str, Any]) -> bool:
    """Return whether the output layer is the embedding: as a configuration says, or else as transformers takes it.

    >>> is_tied({"model_type": "gemma2"}), is_tied({"model_type": "llama"})
    (True, False)
    """
    said = language_config(config)
    kinds = [one.get("model_type") for one in (said, config)]
    named = [kind for kind in kinds if isinstance(kind, str)]
    known = [_FAMILIES[kind][1] for kind in named if kind in _FAMILIES]
    if not known:
        tables = [_tables()[kind].get("defaults", {}) for kind in named if kind in _tables()]
        known = [table.get("tie_word_embeddings") is True for table in tables]
    return _is(said, "tie_word_embeddings", any(known[:1]))


@functools.cache
def _tables() -> dict[str, Any]:
    """Return the tables of types that were recorded."""
    found: dict[str, Any] = json.loads((Path(__file__).parent / "tensors.json").read_text(encoding="utf-8"))
    return found


def _recorded(kind: Any) -> TypeTensors | None:
    table = _tables().get(kind) if isinstance(kind, str) else None
    return None if table is None else TypeTensors({"type": kind, **table}, "the package")


def _is_known(family: Any) -> TypeGuard[str]:
    return isinstance(family, str) and family in _FAMILIES


class _ShapeSizes:
    """Shapes worked out from the numbers of a model."""

    def __init__(self, numbers: NamedNumbers) -> None:
        self._numbers = numbers
        self._shapes: dict[str, tuple[int, ...]] = {}

    def number(self, text: str) -> int:
        size = parse_expression(text).value(self._numbers)
        if not 0 < size < _LARGEST:
            raise ParseError(f"the configuration: {text} is {shown(size)}; it must be from 1 to {_LARGEST - 1}")
        return size

    def of(self, shapes: _Shapes) -> dict[str, tuple[int, ...]]:
        """Return each parameter's name and shape."""
        return {name: shape for names, shape in self.listed(shapes) for name in names}

    def listed(self, shapes: _Shapes, before: str = "") -> Iterator[tuple[list[str], tuple[int, ...]]]:
        """Yield the names of parameters, after a common beginning, and their shape: of `{e}` one for each expert."""
        for name, text in shapes.items():
            if text not in self._shapes:
                self._shapes[text] = tuple(self.number(size) for size in text.split(","))
                if math.prod(self._shapes[text]) >= 2**60:
                    raise ParseError(f"the configuration: {name} would have the shape {self._shapes[text]}")
            if "{e}" not in name:
                yield [before + name], self._shapes[text]
                continue
            head, tail = f"{before}{name}".split("{e}")
            experts = range(min(self.number("experts"), MOST_TENSORS + 1))
            yield [f"{head}{expert}{tail}" for expert in experts], self._shapes[text]
