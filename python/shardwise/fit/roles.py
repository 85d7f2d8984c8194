"""The dims of weights that tensor and expert parallelism cut, by the weights' names in Hugging Face's checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from .._arguments import integer
from .._text import shown
from ..errors import ParseError
from ..rules.wrapped import language_config

__all__ = ["TYPES", "Heads", "Role", "heads_of", "role_of"]

#: Values of `model_type` for which transformers 5.24 has tensor-parallel plans, which cut the dims that are cut here.
_OF_PLANS = """
    apertus apertus1p5_text arcee aria_text beam codegen cohere cohere2 cohere2_moe cwm deepseek_v2 deepseek_v32
    ernie4_5 exaone exaone4 flex_olmo gemma gemma2 gemma3_text glm glm4 glm4_moe glm4v_moe_text glm4v_text glm_moe_dsa
    glm_ocr_text gpt_neox gptj granite granite_docling_text granite_swa granitemoe_swa helium hy_v3 hyperclovax
    internlm3 iquestcoder jais2 kolibri1 llama llama4_text mellum mimo_v2_flash minicpm3 minimax_m2 ministral3 mistral
    mixtral muse_glimmer_text nanochat olmo olmo2 olmo3 olmoe phi phi3 phi4_multimodal qwen2 qwen2_5_omni_text
    qwen2_5_vl_text qwen2_vl_text qwen3 qwen3_moe qwen3_omni_moe_text qwen3_vl_moe_text sarvam_moe seed_oss smollm3
    unlimited_ocr_text vaultgemma
"""
#: And these vLLM 0.33 cuts so, where transformers cuts less, or nothing.
_OF_ENGINES = "bloom deepseek_v3 falcon gemma3 gpt2 gpt_oss kimi_k2 qwen2_moe qwen3_next qwen3_vl_text"
#: The types, of language models, of which the names here are known to mean what they say.
TYPES = frozenset((_OF_PLANS + _OF_ENGINES).split())


class Role(NamedTuple):
    """The dim that is cut of a weight of (out, in), or of experts of (expert, out, in)."""

    #: The dim that tensor parallelism cuts, counted from the end; `None` if there is none, or it is not known.
    dim: int | None
    #: The units of the rows or columns: heads of queries, of keys and values, all three, or of linear attention.
    heads: Literal["", "q", "kv", "qkv", "linear"] = ""
    #: The number of parts that lie one after the other in the dim, each cut separately.
    parts: int = 1
    #: `"one"` for a weight of an expert, `"stacked"` for those of several in dim 0; else empty.
    expert: Literal["", "one", "stacked"] = ""
    #: True if it is a vocabulary, which engines pad.
    vocabulary: bool = False
    #: Why nothing is known of it; empty for what is known, also that every rank has the whole weight.
    unknown: str = ""
    #: True if it is of another network than the language model, which is not looked at.
    elsewhere: bool = False


class Heads(NamedTuple):
    """The numbers of heads of a model; 0 is not known."""

    q: int
    kv: int
    #: The key heads of linear attention.
    linear: int
    #: The rows of a head, of queries and keys and of values, if they are stated.
    size: int = 0
    value_size: int = 0

    def said(self) -> dict[str, int]:
        """Give those that are known, by what they are called."""
        named = {"heads": self.q, "key-value heads": self.kv, "heads of linear attention": self.linear}
        return {name: count for name, count in named.items() if count}


_ROWS: dict[str, Role] = {
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3", "fc1", "fc_in", "dense_h_to_4h"), Role(-2)),
    **dict.fromkeys(("gate_up_proj", "up_gate_proj", "w13"), Role(-2, parts=2)),
    **dict.fromkeys(("q_proj", "q_b_proj", "q_up_proj", "wq_b", "kv_b_proj"), Role(-2, "q")),
    **dict.fromkeys(("k_proj", "v_proj"), Role(-2, "kv")),
    **dict.fromkeys(("qkv_proj", "query_key_value", "Wqkv", "W_pack", "wqkv"), Role(-2, "qkv")),
    **dict.fromkeys(("in_proj_qkvz", "in_proj_ba"), Role(-2, "linear")),
}
_COLUMNS: dict[str, Role] = {
    **dict.fromkeys(("down_proj", "w2", "fc2", "fc_out", "dense_4h_to_h"), Role(-1)),
    "o_proj": Role(-1, "q"),
}
#: Roles of names that other modules have too: only those of attention are meant.
_OF_ATTENTION: dict[str, Role] = {
    "wq": Role(-2, "q"),
    **dict.fromkeys(("wk", "wv"), Role(-2, "kv")),
    **dict.fromkeys(("out_proj", "wo", "dense"), Role(-1, "q")),
}
_ATTENTION = frozenset(["self_attn", "self_attention", "attention", "attn"])
_VOCABULARY = dict.fromkeys(
    ("embed_tokens", "lm_head", "wte", "word_embeddings", "embed_in", "embed_out", "embeddings"),
    Role(-2, vocabulary=True),
)
_ROLES = {**_ROWS, **_COLUMNS, **_VOCABULARY}
#: GPT-2 stores its linear layers as (in, out).
_GPT2 = {
    "attn.c_attn": Role(-1, "qkv"),
    "attn.c_proj": Role(-2, "q"),
    "mlp.c_fc": Role(-1),
    "mlp.c_proj": Role(-2),
}
#: Every rank has these whole: routers, latents, positions, what predicts further tokens, masks.
_WHOLE = re.compile(
    r"(?:^|\.)(?:gate|router|shared_expert_gate|q_a_proj|kv_a_proj|kv_a_proj_with_mqa|wpe|position_embeddings"
    r"|embed_positions|position_ids|token_type_embeddings|eh_proj|[a-z0-9_]*norm|ln_[a-z0-9]+)(?:\.weight)?$"
    r"|\.indexer\.|\.attn\.(?:masked_)?bias$"
)
#: Names of other networks than the language model; engines cut these by other rules, or not at all.
_ELSEWHERE = re.compile(
    r"(?:^|\.)(?:visual|vision\w*|audio\w*|speech\w*|vit|image\w*|mm_projector|multi_modal_projector"
    r"|vpm|apm|resampler|aligner|talker|token2wav)\."
)
#: The part of a name before its layers, and the words of which it is made in a language model.
_BEFORE_LAYERS = re.compile(r"((?:[^.]+\.)*?)(?!experts\.)[^.]+\.[0-9]+\.")
_LANGUAGE = frozenset(
    [
        *("base_model", "gpt_neox", "language", "language_model", "llm", "lm", "model", "module", "mtp"),
        *("text_model", "thinker", "transformer"),
    ]
)
_NOT_KNOWN = Role(None, unknown="its name is not known")
#: No model has more heads.
_MOST = 2**31 - 1


def role_of(name: str, rank: int, family: object = None) -> Role:
    """Give the role of a weight by its name, and by the `model_type` if that has names of its own.

    >>> role_of("model.layers.3.mlp.experts.17.down_proj.weight", 2)[:4]
    (-1, '', 1, 'one')
    >>> role_of("model.layers.3.input_layernorm.weight", 1).unknown, role_of("layers.0.att_proj.weight", 2).unknown
    ('', 'its name is not known')
    """
    if _ELSEWHERE.search(name):
        return Role(None, elsewhere=True)
    if rank < 2 or _WHOLE.search(name):
        return Role(None)
    before = _BEFORE_LAYERS.match(name)
    if before is not None and not _LANGUAGE.issuperset(before[1].split(".")[:-1]):
        return Role(None, unknown=f"whether {shown(before[1][:-1])} is a part of the language model is not known")
    parts = name.removesuffix(".weight").split(".")
    last, within = parts[-1], parts[-2] if len(parts) > 1 else ""
    if family == "gpt2" and rank == 2 and (own := _GPT2.get(f"{within}.{last}")):
        return own
    if within == "linear_attn":
        return _of_linear_attention(last, rank)
    if last.endswith("_bias") and last.removesuffix("_bias") in _ROLES:  # It is cut as its weight is.
        return Role(None)
    role = _ROLES.get(last) or (_OF_ATTENTION.get(last) if within in _ATTENTION else None)
    if role is None:
        return _NOT_KNOWN
    if "experts" in parts[:-1]:
        if rank == 2 and parts[parts.index("experts") + 1].isdecimal():
            return role._replace(expert="one")
        if rank == 3:
            return role._replace(expert="stacked")
        return Role(None, unknown="of experts, a weight for each or a stack of three dims is known")
    return role if rank == 2 else Role(None, unknown=f"it has {rank} dims, and by its name it would have two")


def _of_linear_attention(last: str, rank: int) -> Role:
    if last == "out_proj" and rank == 2:
        return Role(-1, "linear")
    if last == "conv1d" and rank == 3:
        return Role(-3, "linear")
    return _ROWS[last] if last in ("in_proj_qkvz", "in_proj_ba") and rank == 2 else _NOT_KNOWN


def heads_of(config: Mapping[str, Any]) -> Heads:
    """Give the numbers of heads that a configuration states, or that of the language model in it.

    Raises:
        ParseError: if one is not an integer of at least 1.

    >>> heads_of({"num_attention_heads": 64, "num_key_value_heads": 8})[:3]
    (64, 8, 0)
    """
    said = language_config(config)
    q = _number(said, "num_attention_heads", "n_head", "n_heads")
    size, value = (one if type(one := said.get(key)) is int and one > 0 else 0 for key in ("head_dim", "v_head_dim"))
    if said.get("multi_query") is True and not said.get("new_decoder_architecture"):
        kv = 1
    elif said.get("multi_query_attention") is False:
        kv = q
    else:
        kv = _number(said, "num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "multi_query_group_num")
    return Heads(q, kv, _number(said, "linear_num_key_heads"), size, value or size)


def _number(config: Mapping[str, Any], *keys: str) -> int:
    for key in keys:
        if config.get(key) is not None:
            try:
                number = integer(key, config[key])
            except TypeError as error:
                raise ParseError(f"the configuration: {error}") from None
            if not 0 < number <= _MOST:
                raise ParseError(f"the configuration: {key} is {shown(number)}; it must be from 1 to {_MOST}")
            return number
    return 0
