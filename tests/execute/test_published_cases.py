"""Counts of rows, bytes and reads of published models; the expected numbers are sums over their shapes, by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

import shardwise as sw
from shardwise._types import Numbers
from shardwise.deploy import Deployment, DeploymentRule, vllm
from shardwise.execute.reads import read_calls
from shardwise.execute.transports import MemoryManifest, MemoryRange, address_rows
from shardwise.reshard import Descriptors
from shardwise.store import DeviceReads, device_reads

from ..cli.conftest import write_checkpoint

Shapes = dict[str, tuple[int, ...]]

LAYERS, EXPERTS, HIDDEN, INNER, WORDS = 48, 128, 2048, 768, 151936
QUERIES, KEYS, HEAD = 4096, 512, 128
QWEN = {
    "model_type": "qwen3_moe", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": HEAD, "num_experts": EXPERTS, "moe_intermediate_size": INNER,
    "vocab_size": WORDS, "num_experts_per_tok": 8, "intermediate_size": 6144,
}  # fmt: skip


def qwen() -> Shapes:
    """Qwen3-30B-A3B, as its checkpoint names it."""
    shapes: Shapes = {"model.embed_tokens.weight": (WORDS, HIDDEN), "lm_head.weight": (WORDS, HIDDEN)}
    shapes["model.norm.weight"] = (HIDDEN,)
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.self_attn.{x}_proj.weight": (QUERIES if x == "q" else KEYS, HIDDEN) for x in "qkv"}
        shapes[f"{name}.self_attn.o_proj.weight"] = HIDDEN, QUERIES
        shapes |= {f"{name}.self_attn.{x}_norm.weight": (HEAD,) for x in "qk"}
        shapes |= {f"{name}.{x}_layernorm.weight": (HIDDEN,) for x in ("input", "post_attention")}
        shapes[f"{name}.mlp.gate.weight"] = EXPERTS, HIDDEN
        for expert in range(EXPERTS):
            shapes |= {f"{name}.mlp.experts.{expert}.{x}_proj.weight": (INNER, HIDDEN) for x in ("gate", "up")}
            shapes[f"{name}.mlp.experts.{expert}.down_proj.weight"] = HIDDEN, INNER
    return shapes


def far_apart(part: Descriptors, side: str) -> dict[str, MemoryRange]:
    """Memory that is not there, for each tensor, no two of which touch."""
    rows = part.sends if side == "src" else part.receives
    ends = rows[f"{side}_offset"] + (rows["count"] - 1) * rows[f"{side}_stride"] + rows["bytes"]
    least = np.zeros(len(part.tensors), np.int64)
    np.maximum.at(least, rows[f"{side}_tensor"], ends)
    starts = np.cumsum(least + 64) - least
    used = np.flatnonzero(least).tolist()
    return {part.tensors[at]: MemoryRange(int(starts[at]), int(least[at])) for at in used}


@pytest.mark.heavy
def test_nvidias_case() -> None:
    """ai-dynamo/modelexpress 528: 16 trainers with 8 of 128 experts each, an engine with tensor parallelism 4.

    There an engine's rank avoids 12,576,768 descriptors of runs by reading 51 % more than it needs, and has 117,123.
    """
    down, output = EXPERTS * LAYERS, LAYERS
    others = 2 * EXPERTS * LAYERS + LAYERS * (3 + 2 + 2 + 1) + 3  # gate and up; q, k, v, norms and router; the ends
    rows, runs = down + output + others, HIDDEN * (down + output) + others
    assert (rows, runs) == (18_867, 12_576_768 + 117_123)
    cut = EXPERTS * LAYERS * 3 * INNER * HIDDEN + 2 * WORDS * HIDDEN + LAYERS * HIDDEN * (2 * QUERIES + 2 * KEYS)
    whole = HIDDEN + LAYERS * (2 * HIDDEN + 2 * HEAD + EXPERTS * HIDDEN)
    shapes = qwen()
    assert sum(map(math.prod, shapes.values())) == cut + whole
    labels = [f"trainer:{rank}" for rank in range(16)]
    experts = {r"experts\.{e}\.": DeploymentRule((None, None), at={"ep": "e // 8"})}
    trainer = Deployment(labels, sw.DeviceMesh((16,), ("ep",)), experts, default="replicated")
    engine = vllm(QWEN, tp=4, world=[f"engine:{rank}" for rank in range(4)])
    plan = sw.plan_model(trainer, engine, {name: (shape, "bfloat16") for name, shape in shapes.items()})
    part = plan.descriptors("engine:1")
    assert (len(part.receives), int(part.receives["count"].sum())) == (rows, runs)
    assert part.bytes_received == 2 * (cut // 4 + whole)
    mine = MemoryManifest.of(part, {}, far_apart(part, "dst"), version="step 1")
    counts = np.zeros(3, np.int64)
    for label in labels:
        there = plan.descriptors(label)
        told = MemoryManifest.of(there, far_apart(there, "src"), {}, version="step 1")
        found = address_rows(part, mine, told)
        local, remote, *_ = found.nixl()
        assert local.shape == remote.shape == (len(found), 5)
        counts += [len(local), int(local[:, 4].sum()), int((local[:, 1] * local[:, 4]).sum())]
    assert counts.tolist() == [rows, runs, part.bytes_received]


def deepseek() -> Shapes:
    """DeepSeek-V3 without its scales and its layer for several tokens, as its checkpoint names it."""
    hidden, inner, rank, latent, heads = 7168, 2048, 1536, 512, 128
    shapes: Shapes = {"model.embed_tokens.weight": (129280, hidden), "lm_head.weight": (129280, hidden)}
    shapes["model.norm.weight"] = (hidden,)
    for layer in range(61):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.self_attn.q_a_proj.weight": (rank, hidden),
            f"{name}.self_attn.q_a_layernorm.weight": (rank,),
            f"{name}.self_attn.q_b_proj.weight": (heads * 192, rank),
            f"{name}.self_attn.kv_a_proj_with_mqa.weight": (latent + 64, hidden),
            f"{name}.self_attn.kv_a_layernorm.weight": (latent,),
            f"{name}.self_attn.kv_b_proj.weight": (heads * 256, latent),
            f"{name}.self_attn.o_proj.weight": (hidden, heads * 128),
            f"{name}.input_layernorm.weight": (hidden,),
            f"{name}.post_attention_layernorm.weight": (hidden,),
        }
        if layer < 3:
            shapes |= {f"{name}.mlp.{x}_proj.weight": (18432, hidden) for x in ("gate", "up")}
            shapes[f"{name}.mlp.down_proj.weight"] = hidden, 18432
            continue
        shapes |= {f"{name}.mlp.gate.weight": (256, hidden), f"{name}.mlp.gate.e_score_correction_bias": (256,)}
        for expert in [*(f"experts.{number}" for number in range(256)), "shared_experts"]:
            shapes |= {f"{name}.mlp.{expert}.{x}_proj.weight": (inner, hidden) for x in ("gate", "up")}
            shapes[f"{name}.mlp.{expert}.down_proj.weight"] = hidden, inner
    return shapes


DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048,
    "intermediate_size": 18432, "vocab_size": 129280, "first_k_dense_replace": 3, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip


@pytest.mark.slow
def test_own_slices_of_deepseek_v3(tmp_path: Path) -> None:
    """One of 64 ranks with expert parallelism: its 4 of 256 experts of each layer, and all else, of 163 files."""
    shapes = deepseek()
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    assert len(shapes) == 45_395
    assert sum(sizes.values()) == 671_026_419_200
    files: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    for name, shape in shapes.items():
        if sum(sizes[one] for one in files[-1]) > sum(sizes.values()) // 163:
            files.append({})
        files[-1][name] = "F8_E4M3", shape
    index: dict[str, str] = {}
    for number, tensors in enumerate(files):
        file = write_checkpoint(tmp_path / f"model-{number + 1:05}-of-{len(files):05}.safetensors", tensors)
        index |= dict.fromkeys(tensors, file.name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    engine = vllm(DEEPSEEK, dp=64, expert_parallel=True)
    with sw.open_checkpoint(tmp_path) as checkpoint:
        reads = device_reads(checkpoint, engine, "cpu:5")
    own = 4 * 58 * 3 * 2048 * 7168
    assert reads.nbytes == own + sum(size for name, size in sizes.items() if ".experts." not in name)
    assert reads.bytes_read <= 1.05 * reads.nbytes
    assert len(reads.reads) <= 2000
    arrays = [MemoryRange(int(at), one.nbytes) for at, one in zip(starts(reads), reads.arrays, strict=True)]
    calls = read_calls(reads, arrays, scratch=MemoryRange(2**40, int(reads.bytes_read - reads.nbytes)))
    assert int(calls.calls["length"].sum()) == reads.bytes_read
    assert len(calls.calls) <= 2000


def starts(reads: DeviceReads) -> Numbers:
    sizes = np.array([one.nbytes for one in reads.arrays], np.int64)
    return np.cumsum(sizes) - sizes
