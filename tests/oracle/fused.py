"""What engines do with fused weights, restated: for each rank the rows of the whole that it gets, in its own order.

Each function follows the engine's own steps (slices, splits, concatenations), not the closed form of 2.9. Rows are
given by their numbers.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]

__all__ = [
    "deepspeed_bigcode",
    "deepspeed_bloom",
    "deepspeed_glm",
    "deepspeed_phi3",
    "llama_cpp",
    "megatron_qkv",
    "megatron_stride",
    "megatron_vocab",
    "strided_shard",
    "tensorrt_llm_qkv",
    "transformers_packed",
    "vllm_merged",
    "vllm_qkv",
    "vllm_vocab",
]


def vllm_qkv(heads: int, kv_heads: int, head_dim: int, tp: int, rank: int) -> Rows:
    """`QKVParallelLinear`: its constructor, and `weight_loader` for each of q, k and v."""
    num_heads = heads // tp
    if tp >= kv_heads:
        num_kv_heads, num_kv_head_replicas = 1, tp // kv_heads
    else:
        num_kv_heads, num_kv_head_replicas = kv_heads // tp, 1
    loaded = []
    offset = 0
    for name, total in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        whole = np.arange(offset, offset + total * head_dim)
        shard_size = (num_heads if name == "q" else num_kv_heads) * head_dim
        shard_rank = rank if name == "q" else rank // num_kv_head_replicas
        start = shard_rank * shard_size
        loaded.append(whole[start : start + shard_size])
        offset += total * head_dim
    return np.concatenate(loaded)


def vllm_merged(sizes: list[int], tp: int, rank: int) -> Rows:
    """`MergedColumnParallelLinear`: each output is loaded by itself, from `rank * size / tp` on."""
    loaded = []
    for offset, size in zip(np.cumsum([0, *sizes]).tolist(), sizes, strict=False):
        shard_size = size // tp
        loaded.append(np.arange(offset, offset + size)[rank * shard_size :][:shard_size])
    return np.concatenate(loaded)


def vllm_vocab(vocabulary: int, tp: int, rank: int, padding: int = 64) -> tuple[Rows, int]:
    """`VocabParallelEmbedding`: the words of a rank, and the rows of its parameter."""
    padded = (vocabulary + padding - 1) // padding * padding
    per_rank = padded // tp
    start = rank * per_rank
    return np.arange(min(start, vocabulary), min(start + per_rank, vocabulary)), per_rank


def megatron_qkv(heads: int, groups: int, head_dim: int, tp: int, rank: int) -> Rows:
    """`linear_qkv`: the rows of all query groups, [q … q k v], split evenly; either number divides the other."""
    assert groups % tp == 0 or tp % groups == 0
    return np.split(np.arange((heads + 2 * groups) * head_dim), tp)[rank]


def megatron_stride(size: int, stride: int, tp: int, rank: int) -> Rows:
    """`_initialize_affine_weight_cpu` with `partition_stride`: `weight_list[rank::world_size]`, concatenated."""
    per_partition_per_stride = size // tp // stride
    weights = np.split(np.arange(size), size // per_partition_per_stride) if per_partition_per_stride else []
    return np.concatenate([np.zeros(0, np.int64), *weights[rank::tp]])


def megatron_vocab(vocabulary: int, tp: int, rank: int, divisible_by: int = 128) -> tuple[Rows, int]:
    """`vocab_size_with_padding` and `VocabUtility`: the words of a rank, and the rows of its parameter."""
    padded = vocabulary
    while padded % (divisible_by * tp):
        padded += 1
    per_rank = padded // tp
    return np.array(
        [row for row in range(rank * per_rank, (rank + 1) * per_rank) if row < vocabulary], np.int64
    ), per_rank


def tensorrt_llm_qkv(heads: int, kv_heads: int, head_dim: int, tp: int, rank: int) -> Rows:
    """`split_qkv_tp` after `dup_kv_weight`: keys and values are repeated until there are as many as ranks."""
    q, k, v = np.split(np.arange((heads + 2 * kv_heads) * head_dim), [heads * head_dim, (heads + kv_heads) * head_dim])
    if kv_heads < tp:
        reps = tp // kv_heads
        k, v = (np.repeat(part.reshape(kv_heads, 1, head_dim), reps, axis=1).ravel() for part in (k, v))
    return np.concatenate([np.split(part, tp)[rank] for part in (q, k, v)])


def chunks(rows: Rows, count: int) -> list[Rows]:
    """`torch.chunk`, with empty chunks where it gives fewer."""
    step = -(-len(rows) // count) if len(rows) else 0
    return [rows[min(i * step, len(rows)) : min((i + 1) * step, len(rows))] for i in range(count)]


def strided_shard(size: int, split_factor: int, tp: int, rank: int) -> Rows:
    """PyTorch's `_StridedShard._split_tensor`: chunks of each of `split_factor` chunks, put together by rank."""
    return np.concatenate([chunks(part, tp)[rank] for part in chunks(np.arange(size), split_factor)])


def transformers_packed(sizes: list[int], tp: int, rank: int) -> Rows:
    """`get_packed_weights` of transformers 4: of each block the rows of the rank, by a list of indices."""
    indices: list[int] = []
    block_offset = 0
    for block_size in sizes:
        shard_block_size = block_size // tp
        start = rank * shard_block_size
        stop = (rank + 1) * shard_block_size
        indices += range(block_offset + start, block_offset + stop)
        block_offset += block_size
    return np.array(indices, np.int64)


def shard_sizes(total_kv_heads: int, unit: int, tp: int) -> list[int]:
    """DeepSpeed's `get_shard_size_list`: the first ranks get the heads that are left over."""
    return [(total_kv_heads // tp + (1 if i < total_kv_heads % tp else 0)) * unit for i in range(tp)]


def deepspeed_bloom(groups: int, unit: int, tp: int, rank: int) -> Rows:
    """`_bloom_type_transpose`: (heads, 3, head dim) split by heads."""
    split = np.split(np.arange(groups * 3 * unit), np.cumsum(shard_sizes(groups, 3 * unit, tp))[:-1])
    return split[rank]


def deepspeed_glm(groups: int, unit: int, tp: int, rank: int) -> Rows:
    """`_glm_type_transpose`: q, k and v of one size each, each split by heads, and concatenated."""
    parts = np.split(np.arange(3 * groups * unit), 3)
    return np.concatenate([np.split(part, np.cumsum(shard_sizes(groups, unit, tp))[:-1])[rank] for part in parts])


def deepspeed_phi3(groups: int, ratio: int, unit: int, tp: int, rank: int) -> Rows:
    """`_phi3_type_transpose`: queries in units of the group, keys and values split by key-value heads."""
    sizes = [groups * ratio * unit, groups * unit, groups * unit]
    parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    units = [ratio * unit, unit, unit]
    return np.concatenate(
        [np.split(part, np.cumsum(shard_sizes(groups, u, tp))[:-1])[rank] for part, u in zip(parts, units, strict=True)]
    )


def deepspeed_bigcode(heads: int, unit: int, tp: int, rank: int) -> Rows:
    """`_bigcode_type_transpose`: the queries are split, the one key and value stay whole."""
    q, kv = np.split(np.arange((heads + 2) * unit), [heads * unit])
    return np.concatenate([np.split(q, np.cumsum(shard_sizes(heads, unit, tp))[:-1])[rank], kv])


def llama_cpp(segments: list[tuple[int, int]], ranks: int, rank: int) -> Rows:
    """The split state of a tensor with segments: of each, `granularity` rows at a time, the `floor` of its share."""
    held, offset = [], 0
    for count, granularity in segments:
        low, high = math.floor(count * rank / ranks), math.floor(count * (rank + 1) / ranks)
        held.append(np.arange(offset + low * granularity, offset + high * granularity))
        offset += count * granularity
    return np.concatenate(held)
