"""Short forms of common packed dims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from .._arguments import instance
from .._text import shown
from ..errors import LayoutError
from .parts import PackedDim, concat, factor_size, part

__all__ = ["experts", "gate_up", "padded_vocab", "qkv"]

#: The order of queries, keys and values in one tensor.
Order = Literal["blocked", "interleaved"]


def qkv(
    heads: int,
    kv_heads: int,
    head_dim: int,
    axes: str | Sequence[str],
    *,
    order: Order = "blocked",
    v_head_dim: int | None = None,
) -> PackedDim:
    """Return the dim of fused queries, keys and values, cut by heads.

    Args:
        heads: the query heads.
        kv_heads: the key-value heads; their number divides `heads`. If there are more devices, each head is on several.
        head_dim: the rows of a head.
        axes: the axes that cut the heads, major first.
        order: `"blocked"`, all queries, then all keys, then all values (vLLM, Hugging Face's fused weights); or
            `"interleaved"`, for each key-value head its queries, its key and its value (Megatron, BLOOM). The shape is
            the same, so it does not tell one order from the other.
        v_head_dim: the rows of a value head, if different.

    Raises:
        LayoutError: if the heads are not a multiple of the key-value heads, or the order is unknown.

    Both orders name their tensors `q`, `k` and `v`, so `plan_refit` can go from one to the other. Interleaved heads
    are cut in whole groups; where there are fewer groups than devices, in equal shares of a group, as Megatron-Core
    does. A device then holds rows that others use; Megatron-Core gathers the results before it splits them.

    >>> print(qkv(64, 8, 128, "tp"))
    q:(64@tp 128) + k:(8@tp/max8 128) + v:(8@tp/max8 128)
    >>> print(qkv(64, 8, 128, "tp", order="interleaved"))
    (8@tp/split [q:1024 k:128 v:128])
    """
    heads, kv_heads = factor_size("heads", heads, 1), factor_size("kv_heads", kv_heads, 1)
    head_dim = factor_size("head_dim", head_dim, 1)
    value_dim = head_dim if v_head_dim is None else factor_size("v_head_dim", v_head_dim, 1)
    if heads % kv_heads:
        raise LayoutError(f"heads is {heads}, which is not a multiple of kv_heads, {kv_heads}")
    if instance("order", order, str) == "interleaved":
        blocks = [("q", heads // kv_heads * head_dim), ("k", head_dim), ("v", value_dim)]
        return concat(part((kv_heads, sum(size for _, size in blocks)), axes=axes, split=True, blocks=blocks))
    if order != "blocked":
        raise LayoutError(f"order is {shown(order)}; it must be 'blocked' or 'interleaved'")
    return concat(
        part((heads, head_dim), axes=axes, name="q"),
        part((kv_heads, head_dim), axes=axes, at_most=kv_heads, name="k"),
        part((kv_heads, value_dim), axes=axes, at_most=kv_heads, name="v"),
    )


def gate_up(axes: str | Sequence[str], size: int | None = None, *, order: Order = "blocked") -> PackedDim:
    """Return the dim of a gate and an up projection of a gated MLP in one tensor, each cut separately.

    Args:
        axes: the axes that cut each of the two, major first.
        size: the rows of the gate, as many as those of the up projection; half of the dim if not given.
        order: `"blocked"`, the gate, then the up projection (vLLM, Megatron's SwiGLU, Hugging Face); or
            `"interleaved"`, row by row in turn (gpt-oss).

    Raises:
        LayoutError: if the order is unknown.

    >>> print(gate_up("tp"))
    gate:(n@tp) + up:(n@tp)
    """
    if instance("order", order, str) == "interleaved":
        return concat(part((size, 2), axes=axes, blocks=[("gate", 1), ("up", 1)]))
    if order != "blocked":
        raise LayoutError(f"order is {shown(order)}; it must be 'blocked' or 'interleaved'")
    return concat(part(size, axes=axes, name="gate"), part(size, axes=axes, name="up"))


def experts(
    count: int, axes: str | Sequence[str], *, cut: Literal["experts", "features"] = "experts", fused: int = 1
) -> PackedDim:
    """Return the dim of the rows of many experts, stacked: expert, projection, feature.

    Args:
        count: the experts.
        axes: the axes that cut, major first.
        cut: `"experts"`, each device holds whole experts (expert parallelism); or `"features"`, each holds its
            features of all experts (tensor parallelism).
        fused: the number of projections that an expert has one after the other: 2 for gate and up.

    Raises:
        LayoutError: if `cut` is neither of the two.

    >>> print(experts(8, "ep"))
    (8@ep 1 n)
    >>> print(experts(8, "tp", cut="features", fused=2))
    (8 2 n@tp)
    """
    if instance("cut", cut, str) not in ("experts", "features"):
        raise LayoutError(f"cut is {shown(cut)}; it must be 'experts' or 'features'")
    sizes = (factor_size("count", count, 1), factor_size("fused", fused, 1), None)
    return concat(part(sizes, cut=0 if cut == "experts" else 2, axes=axes))


def padded_vocab(
    size: int | None, axes: str | Sequence[str], multiple: int = 64, *, per_shard: bool = False
) -> PackedDim:
    """Return the dim of a vocabulary that is padded before it is cut; the padding, on the last devices, is never read.

    Args:
        size: the number of words; the whole dim if it is `None`.
        axes: the axes that cut the vocabulary, major first.
        multiple: the padded size is a multiple of this: 64 in vLLM, 128 per shard in Megatron.
        per_shard: whether every shard must be a multiple, as in Megatron.

    >>> from shardwise import DeviceMesh, TensorLayout
    >>> layout = TensorLayout((padded_vocab(50257, "tp", 128, per_shard=True),), DeviceMesh((4,), ("tp",)))
    >>> partition = layout.partition((50257,))
    >>> partition.shard_shape("cpu:3"), partition.box("cpu:3")
    ((12672,), (slice(38016, 50257, None),))
    """
    return concat(part(size, axes=axes, pad_to=multiple, pad_each=per_shard))
