"""A training state of Llama 3 70B in 64 ranks of DeepSpeed's ZeRO 3, planned for 48 of FSDP2, and a part of that.

The files have the pickles that DeepSpeed's have, and a hole for each flat tensor, so that they take no room. And what
`shardwise state` takes to count two models.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from bench_index import llama_70b
from figures import Row, at_most, at_most_bytes, quantity
from part import QUICK, main

import shardwise as sw
from shardwise._dtypes import DTYPES
from shardwise.store.write.forms.dcp import rebuilt
from shardwise.store.write.forms.pickles import Call, Global, pickled

RANKS, NEW = (8, 6) if QUICK else (64, 48)
#: Elements of each rank in a group that is stepped at once, as DeepSpeed's `sub_group_size`.
GROUP = 500_000_000
TURNS = 1 if QUICK else 3
#: Parts of the plan, of which one is run: a gigabyte is written.
PARTS = 800
FLOAT32 = DTYPES["float32"]


class HoledFile:
    """A file of `torch.save` whose large members are holes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.members: list[bytes | int] = []

    def tensor(self, shape: tuple[int, ...], data: bytes | None = None) -> Any:
        """A tensor, of these bytes or of a hole."""
        self.members.append(4 * math.prod(shape) if data is None else data)
        return rebuilt(FLOAT32, shape, f"{len(self.members) - 1}")

    def write(self, value: Any) -> None:
        """Write the file with this value."""
        with self.path.open("wb") as file, zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", pickled(value))
            archive.writestr("archive/byteorder", b"little")
            for number, member in enumerate(self.members):
                info = zipfile.ZipInfo(f"archive/data/{number}")
                if isinstance(member, bytes):
                    archive.writestr(info, member)
                    continue
                info.file_size, info.compress_size, info.CRC = member, member, 0
                info.header_offset = archive.start_dir
                file.seek(info.header_offset)
                file.write(info.FileHeader(zip64=member >= 2**31))
                archive.filelist.append(info)
                archive.start_dir = file.tell() + member
            archive.writestr("archive/version", b"3\n")


def write(folder: Path) -> int:
    """Write the folder; gives the bytes that its files seem to have."""
    shapes = {name: shape for name, (shape, _) in llama_70b().items()}
    tag = folder / "global_step7"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    sizes, param_shapes = [0], [dict[str, Any]()]
    for name, shape in shapes.items():
        own = -(-math.prod(shape) // RANKS)
        if sizes[-1] and sizes[-1] + own > GROUP:
            sizes.append(0)
            param_shapes.append({})
        sizes[-1] += own
        param_shapes[-1][name] = Call(Global("torch", "Size"), (shape,))
    config = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    hyper = {"lr": 1e-5, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    for rank in range(RANKS):
        file = HoledFile(tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        module = {name: rebuilt(DTYPES["bfloat16"], (0,), "0") for name in shapes}
        file.tensor((0,), b"")
        said: dict[str, Any] = {"module": module, "param_shapes": param_shapes, "shared_params": {}, "buffer_names": []}
        said |= {"frozen_param_shapes": None, "frozen_param_fragments": None, "global_steps": 7}
        file.write({**said, "dp_world_size": RANKS, "mp_world_size": 1, "ds_config": config, "ds_version": "0.19.8"})
        file = HoledFile(tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        state = {
            number: {
                "step": file.tensor((), np.float32(7).tobytes()),
                "exp_avg": file.tensor((size,)),
                "exp_avg_sq": file.tensor((size,)),
            }
            for number, size in enumerate(sizes)
        }
        inner = {"state": state, "param_groups": [{**hyper, "params": list(range(len(sizes)))}]}
        stage = Call(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), (3,))
        flat = [file.tensor((size,)) for size in sizes]
        outer = {"zero_stage": stage, "partition_count": RANKS, "optimizer_state_dict": inner, "fp32_flat_groups": flat}
        file.write({"optimizer_state_dict": outer, "ds_config": config, "ds_version": "0.19.8"})
    return sum(path.stat().st_size for path in tag.iterdir())


#: Plans, or runs a part of a plan; says how long that took the processor, and waits.
CHILD = """
import sys, time
began = time.process_time()
import shardwise as sw

work, src, dst, file, ways = sys.argv[1:]
if work == "plan":
    plan = sw.plan_checkpoint(src, dst, mesh=sw.DeviceMesh((int(ways),), ("fsdp",)), to="fsdp2")
    print(time.process_time() - began, len(plan.tasks), flush=True)
    if file:
        plan.save(file)
else:
    from shardwise.store.write.places.folder import FolderPlace

    def with_holes(place, root):
        place.folder.mkdir()
        for number, size in enumerate(place._new.sizes):
            with open(place.folder / place._unfinished_name(number), "wb") as made:
                made.truncate(size)

    FolderPlace._make_files = with_holes  # The disk has no room for all of it.
    count = sw.CheckpointPlan.load(file).run((1, int(ways)), sync=False)
    print(time.process_time() - began, count, flush=True)
sys.stdin.read()
"""

#: A mixture of experts with 10¹² parameters, as Kimi K2 configures it.
LARGEST = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 163840,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # fmt: skip


def counted(root: Path) -> Iterator[Row]:
    """What the command takes to count a model's training state, from its start to its end."""
    for config, sizes, what, limit in (
        (LLAMA, "--tp 8 --dp 64", "Llama 3 70B on 512 ranks", 0.3),
        (LARGEST, "--tp 8 --pp 8 --dp 16 --ep 64", "a mixture of experts of 10¹² parameters on 1,024 ranks", 1),
    ):
        file = root / "config.json"
        file.write_text(json.dumps(config))
        # With compiled modules, as an installed package has them.
        environment = os.environ | {"PYTHONPYCACHEPREFIX": str(root / "compiled")}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [
            sys.executable,
            "-c",
            STATE,
            str(file),
            *sizes.split(),
            "--optimizer",
            "adamw",
            "--sharding",
            "zero1",
        ]
        taken = []
        for _ in range(TURNS + 3):
            child = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
            taken.append(float(child.stdout))
        yield Row(f"`shardwise state` of {what}", "", statistics.median(taken[1:]), goal=at_most(limit))


def described() -> Iterator[Row]:
    """What it takes to say where each tensor of DeepSeek-V3 is on 64 ranks of vLLM, each with whole experts."""
    config = LARGEST | {"num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256}
    tensors: dict[str, tuple[tuple[int, ...], str]] = {}
    for layer in range(61):
        for name, shape in (("q_a_proj", (1536, 7168)), ("kv_b_proj", (32768, 512)), ("o_proj", (7168, 16384))):
            tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = shape, "bfloat16"
        for expert in range(256 if layer > 2 else 0):
            for name in ("gate_proj", "up_proj", "down_proj"):
                shape = (7168, 2048) if name == "down_proj" else (2048, 7168)
                tensors[f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"] = shape, "bfloat16"
    taken = []
    for _ in range(TURNS):
        engine = sw.deploy.vllm(config, tp=8, dp=8, expert_parallel=True)
        began = time.process_time()
        found = engine.manifest(tensors)
        taken.append(time.process_time() - began)
        assert len(found.tensors) == len(tensors)
    what = f"the manifest of {len(tensors):,} tensors of DeepSeek-V3 on 64 ranks, the processor's time"
    yield Row(what, "", statistics.median(taken), goal=at_most(2))


#: The command, without the start of Python; says how long it took.
STATE = """
import contextlib, io, sys, time
began = time.perf_counter()
from shardwise.cli import main

with contextlib.redirect_stdout(io.StringIO()):
    assert main(["state", *sys.argv[1:]]) == 0
print(time.perf_counter() - began)
"""


def ran(*arguments: str | Path) -> tuple[float, int, int]:
    """Run the child; gives the processor's seconds, what it counted, and its most memory."""
    command = [sys.executable, "-W", "ignore", "-c", CHILD, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ) as child:
        assert child.stdout is not None
        said = child.stdout.readline().split()
        status = Path(f"/proc/{child.pid}/status").read_text(encoding="ascii")
        peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
        child.communicate()
    assert child.returncode == 0
    return float(said[0]), int(said[1]), peak


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        nbytes = write(root / "zero")
        taken = [ran("plan", root / "zero", root / "new", "", f"{NEW}") for _ in range(TURNS)]
        what = f"Llama 3 70B with AdamW, {quantity(nbytes, 'B')}: ZeRO 3 of {RANKS} ranks to FSDP2 of {NEW}"
        seconds, peak = (statistics.median(each[at] for each in taken) for at in (0, 2))
        yield Row(f"planning {what}, the processor's time", "", seconds, goal=at_most(5))
        yield Row(f"planning {what}, the process's memory", "", peak, unit="B", goal=at_most_bytes(300 * 2**20))
        ran("plan", root / "zero", root / "new", root / "plan", f"{NEW}")
        _, tasks, peak = ran("part", root / "zero", root / "new", root / "plan", f"{PARTS}")
        yield Row(f"a part of {PARTS} of that, {tasks} tasks: memory", "", peak, unit="B", goal=at_most_bytes(2**30))
        yield from counted(root)
        yield from described()


if __name__ == "__main__":
    if "--folder" in sys.argv:  # To look at it.
        print(json.dumps({"bytes": write(Path(sys.argv[sys.argv.index("--folder") + 1]))}))
    else:
        main(rows)
