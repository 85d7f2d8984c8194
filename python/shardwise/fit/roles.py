"""The dims of weights that tensor and expert parallelism cut, by the weights' names in Hugging Face's checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, cast

from .._arguments import integer
from .._text import counted, shown
from ..errors import ParseError
from ..rules.names import WeightRole, module_words, starred_words, stated, types_with, weight_named
from ..rules.wrapped import language_config

__all__ = ["TYPES", "Heads", "Role", "heads_of", "role_of"]

#: The types, of language models, of which the names here are known to mean what they say.
TYPES = types_with("known")


_HeadKind = Literal["", "q", "kv", "qkv", "linear"]


class Role(NamedTuple):
    """The dim that is cut of a weight of (out, in), or of experts of (expert, out, in)."""

    #: The dim that tensor parallelism cuts, counted from the end; `None` if there is none, or it is not known.
    dim: int | None
    #: The units of the rows or columns: heads of queries, of keys and values, all three, or of linear attention.
    heads: _HeadKind = ""
    #: The number of parts that lie one after the other in the dim, each cut separately.
    parts: int = 1
    #: `"one"` for a weight of an expert, `"stacked"` for those of several in dim 0; else empty.
    expert: Literal["", "one", "stacked"] = ""
    #: True if it is a vocabulary, which engines pad.
    vocabulary: bool = False
    #: The reason why nothing is known of it; empty for what is known, also that every rank has the whole weight.
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
        """Return the numbers of heads that are known, by the words that messages have for them."""
        named = {"heads": self.q, "key-value heads": self.kv, "heads of linear attention": self.linear}
        return {name: count for name, count in named.items() if count}


#: The dims that are cut, counted from the end, of a weight of (out, in), and of a convolution.
_DIMS = {"rows": -2, "columns": -1, "channels": -3}
_SWAPPED = {-2: -1, -1: -2}
#: Names of other networks than the language model; engines cut these by other rules, or not at all.
_ELSEWHERE = re.compile(rf"(?:^|\.)(?:{starred_words(module_words('elsewhere'))})\.")
#: The part of a name before its layers, and the words of which it is made in a language model.
_BEFORE_LAYERS = re.compile(r"((?:[^.]+\.)*?)(?!experts\.)[^.]+\.[0-9]+\.")
_LANGUAGE = frozenset([*module_words("language"), *module_words("outer")])
#: Modules that every rank has whole.
_WHOLE = re.compile(rf"\.(?:{starred_words(module_words('whole'))})\.")
_NOT_KNOWN = Role(None, unknown="its name is not known")
#: The most heads of a model.
_MOST = 2**31 - 1


def role_of(name: str, rank: int, family: object = None) -> Role:
    """Return the role of a weight by its name, and by the `model_type` if that has names of its own.

    >>> role_of("model.layers.3.mlp.experts.17.down_proj.weight", 2)[:4]
    (-1, '', 1, 'one')
    >>> role_of("model.layers.3.input_layernorm.weight", 1).unknown, role_of("layers.0.att_proj.weight", 2).unknown
    ('', 'its name is not known')
    """
    if _ELSEWHERE.search(name):
        return Role(None, elsewhere=True)
    path = name.removesuffix(".weight")
    weight = weight_named(path, [family] if isinstance(family, str) else ())
    if rank < 2 or _WHOLE.search(name) or (weight is not None and not weight.cut):
        return Role(None)
    if weight is not None and weight.heads and family in types_with("attention_whole"):
        return Role(None)
    before = _BEFORE_LAYERS.match(name)
    is_own = weight is not None and family in weight.models
    if before is not None and not is_own and not _LANGUAGE.issuperset(before[1].split(".")[:-1]):
        return Role(None, unknown=f"whether {shown(before[1][:-1])} is a part of the language model is not known")
    parts = path.split(".")
    if weight is None:
        own = weight_named(path.removesuffix("_bias"), ()) if path.endswith("_bias") else None
        return _NOT_KNOWN if own is None or own.within else Role(None)  # A bias is cut as its weight is.
    if "linear_attn" in parts[-2:-1] and weight.heads != "linear":
        return _NOT_KNOWN
    role = _role_of(weight)
    if weight.stacked and rank == 3:
        return role._replace(expert="stacked")
    if "experts" in parts[:-1]:
        if rank == 2 and parts[parts.index("experts") + 1].isdecimal():
            return role._replace(expert="one")
        if rank == 3:
            return role._replace(expert="stacked")
        return Role(None, unknown="experts are only known as a weight for each or as a stack of three dims")
    dims = 3 if weight.cut == "channels" else 2
    return (
        role
        if rank == dims
        else Role(None, unknown=f"it has {counted(rank, 'dim')}, but a weight of its name should have {_WORDS[dims]}")
    )


_WORDS = {2: "two", 3: "three"}


def _role_of(weight: WeightRole) -> Role:
    """Return the role of a weight of this name, of two dims or as many as it always has."""
    dim, heads = _DIMS[weight.cut], cast(_HeadKind, weight.heads)
    return Role(
        _SWAPPED[dim] if weight.in_out else dim,
        heads,
        weight.parts if heads in ("", "linear") else 1,
        vocabulary=weight.vocabulary,
    )


def heads_of(config: Mapping[str, Any]) -> Heads:
    """Return the numbers of heads that a configuration states, or that of the language model in it.

    Raises:
        ParseError: if one is not an integer of at least 1.

    >>> heads_of({"num_attention_heads": 64, "num_key_value_heads": 8})[:3]
    (64, 8, 0)
    """
    said = language_config(config)
    q = _number(said, "heads")
    size, value = (
        found[1] if (found := stated(said, key)) is not None and type(found[1]) is int and found[1] > 0 else 0
        for key in ("head_dim", "v_head_dim")
    )
    if said.get("multi_query") is True and not said.get("new_decoder_architecture"):
        kv = 1
    elif said.get("multi_query_attention") is False:
        kv = q
    else:
        kv = _number(said, "kv_heads")
    return Heads(q, kv, _number(said, "linear_k_heads"), size, value or size)


def _number(config: Mapping[str, Any], size: str) -> int:
    """Return the number that a configuration states for a size; 0 if it states none."""
    found = stated(config, size)
    if found is None:
        return 0
    key, value = found
    try:
        number = integer(key, value)
    except TypeError as error:
        raise ParseError(f"the configuration: {error}") from None
    if not 0 < number <= _MOST:
        raise ParseError(f"the configuration: {key} is {shown(number)}; it must be from 1 to {_MOST}")
    return number
