"""The dims of weights that tensor and expert parallelism cut, by the weights' names in Hugging Face's checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from .._arguments import integer
from .._text import shown
from ..errors import ParseError

__all__ = ["Heads", "Role", "heads_of", "role_of"]


class Role(NamedTuple):
    """The dim that is cut of a weight of (out, in), or of experts of (expert, out, in)."""

    #: The dim that tensor parallelism cuts, counted from the end; `None` if every rank has the whole weight.
    dim: int | None
    #: What the rows or columns are made of: heads of queries, of keys and values, all three, or of linear attention.
    heads: Literal["", "q", "kv", "qkv", "linear"] = ""
    #: How many parts lie one after the other in the dim, each cut separately.
    parts: int = 1
    #: Whether it is a weight of an expert: `"one"`, or `"stacked"` in dim 0.
    expert: Literal["", "one", "stacked"] = ""
    #: Whether it is a vocabulary, which engines pad.
    vocabulary: bool = False


class Heads(NamedTuple):
    """The numbers of heads of a model; 0 is not known."""

    q: int
    kv: int
    #: The key heads of linear attention.
    linear: int


_ROWS: dict[str, Role] = {
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3", "fc1", "fc_in", "wi", "wi_0", "wi_1"), Role(-2)),
    **dict.fromkeys(("dense_h_to_4h", "linear_1"), Role(-2)),
    **dict.fromkeys(("gate_up_proj", "up_gate_proj", "w13"), Role(-2, parts=2)),
    **dict.fromkeys(("q_proj", "q_b_proj", "q_up_proj", "wq_b", "wq"), Role(-2, "q")),
    "kv_b_proj": Role(-2, "q"),
    **dict.fromkeys(("k_proj", "v_proj", "wk", "wv"), Role(-2, "kv")),
    **dict.fromkeys(("qkv_proj", "query_key_value", "Wqkv", "W_pack", "wqkv"), Role(-2, "qkv")),
    **dict.fromkeys(("in_proj_qkvz", "in_proj_ba"), Role(-2, "linear")),
}
_COLUMNS: dict[str, Role] = {
    **dict.fromkeys(("down_proj", "w2", "fc2", "fc_out", "dense_4h_to_h", "linear_2"), Role(-1)),
    **dict.fromkeys(("o_proj", "out_proj", "wo", "dense"), Role(-1, "q")),
}
_VOCABULARY = dict.fromkeys(
    ("embed_tokens", "lm_head", "wte", "word_embeddings", "embed_in", "embed_out", "embeddings"),
    Role(-2, vocabulary=True),
)
_ROLES = {**_ROWS, **_COLUMNS, **_VOCABULARY}
#: Of other networks than the text model; engines cut these by other rules.
_ELSEWHERE = re.compile(r"(?:^|\.)(?:visual|vision\w*|audio\w*|vit|image\w*|mm_projector|multi_modal_projector)\.")
_INDEXER = re.compile(r"\.indexer\.")
_WHOLE = Role(None)
#: No model has more heads.
_MOST = 2**31 - 1


def role_of(name: str, rank: int, *, transposed: bool = False) -> Role:
    """Give the role of a weight; experts may be stacked as (expert, in, out).

    >>> role_of("model.layers.3.mlp.experts.17.down_proj.weight", 2)
    Role(dim=-1, heads='', parts=1, expert='one', vocabulary=False)
    >>> role_of("model.layers.3.input_layernorm.weight", 1).dim is None
    True
    """
    if rank < 2 or _ELSEWHERE.search(name) or _INDEXER.search(name):
        return _WHOLE
    parts = name.split(".")
    if parts[-1] == "weight":
        parts.pop()
    role = _ROLES.get(parts[-1] if parts else "")
    if role is None:
        return _WHOLE
    if "linear_attn" in parts and parts[-1] == "out_proj":
        role = Role(-1, "linear")
    if "experts" in parts[:-1]:
        if rank == 2:
            return role._replace(expert="one")
        return role._replace(expert="stacked", dim=-3 - (role.dim or 0) if transposed else role.dim)
    return role if rank == 2 else _WHOLE


def heads_of(config: Mapping[str, Any]) -> Heads:
    """Give the numbers of heads that a configuration states, or that of its text model.

    Raises:
        ParseError: if one is not an integer of at least 1.

    >>> heads_of({"num_attention_heads": 64, "num_key_value_heads": 8})
    Heads(q=64, kv=8, linear=0)
    """
    for part in (config, config.get("text_config"), config.get("llm_config"), config.get("language_config")):
        if isinstance(part, Mapping) and _number(part, "num_attention_heads", "n_head", "n_heads"):
            q = _number(part, "num_attention_heads", "n_head", "n_heads")
            kv = _number(part, "num_key_value_heads", "num_kv_heads", "multi_query_group_num") or q
            return Heads(q, kv, _number(part, "linear_num_key_heads"))
    return Heads(0, 0, 0)


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
