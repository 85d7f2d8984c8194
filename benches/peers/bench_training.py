"""A training state of DeepSpeed's ZeRO 3, converted beside `cp`, `ds_to_universal.py` and `zero_to_fp32.py`.

Each conversion is a process of its own, which has imported what it needs before its time begins; nothing is synced.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from figures import Row, faster, quantity
from part import QUICK, main

RANKS, NEW = 8, 6
HIDDEN, INNER, WORDS, LAYERS = (128, 512, 512, 2) if QUICK else (1024, 2816, 8192, 4)
TURNS = 1 if QUICK else 5
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None


def shapes() -> dict[str, tuple[int, ...]]:
    """The shapes of a small model."""
    found: dict[str, tuple[int, ...]] = {"embed.weight": (WORDS, HIDDEN), "head.weight": (WORDS, HIDDEN)}
    for i in range(LAYERS):
        found |= {f"layers.{i}.{x}.weight": (HIDDEN, HIDDEN) for x in "qkvo"}
        found |= {f"layers.{i}.{x}.weight": (INNER, HIDDEN) for x in ("gate", "up")}
        found |= {f"layers.{i}.down.weight": (HIDDEN, INNER), f"layers.{i}.norm.weight": (HIDDEN,)}
    return found


def stage() -> Any:
    """The number of ZeRO's stage as DeepSpeed pickles it."""
    if not HAS_DEEPSPEED:
        return 3
    from deepspeed.runtime.zero.config import ZeroStageEnum

    return ZeroStageEnum(3)


def write(folder: Path) -> int:
    """Write the folder, with random values; gives the bytes of its files."""
    named = shapes()
    tag = folder / "global_step7"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    size = sum(-(-math.prod(shape) // RANKS) for shape in named.values())
    config = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    hyper = {"lr": 1e-5, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    both = {"ds_config": config, "ds_version": "0.19.8"}
    generator = torch.Generator().manual_seed(0)
    for rank in range(RANKS):
        said: dict[str, Any] = {
            "module": {name: torch.empty(0, dtype=torch.bfloat16) for name in named},
            "param_shapes": [{name: torch.Size(shape) for name, shape in named.items()}],
            "shared_params": {}, "buffer_names": [], "frozen_param_shapes": None, "frozen_param_fragments": None,
            "global_steps": 7, "dp_world_size": RANKS, "mp_world_size": 1, **both,
        }  # fmt: skip
        torch.save(said, tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        flat, first, second = (torch.randn(size, generator=generator) for _ in range(3))
        state = {0: {"step": torch.tensor(7.0), "exp_avg": first, "exp_avg_sq": second.square_()}}
        optimizer = {
            "zero_stage": stage(), "partition_count": RANKS, "fp32_flat_groups": [flat],
            "optimizer_state_dict": {"state": state, "param_groups": [{**hyper, "params": [0]}]},
        }  # fmt: skip
        held = {"optimizer_state_dict": optimizer, **both}
        torch.save(held, tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return sum(path.stat().st_size for path in tag.iterdir())


#: What each contestant imports, and what it then does with the folders `src` and `dst`.
WORKS = {
    "fsdp2": (
        "import shardwise as sw; sw.reshard_checkpoint",
        f"sw.reshard_checkpoint(src, dst, mesh=sw.DeviceMesh(({NEW},), ('fsdp',)), to='fsdp2', sync=False)",
    ),
    "universal": (
        "import shardwise as sw; sw.reshard_checkpoint",
        "sw.reshard_checkpoint(src, dst, to='universal', sync=False)",
    ),
    "fp32": (
        "import shardwise as sw; sw.reshard_checkpoint",
        "sw.reshard_checkpoint(src, dst, to='torch', which='weights', sync=False)",
    ),
    "cp": ("import subprocess", "subprocess.run(['cp', '-r', '--reflink=never', src, dst], check=True)"),
    "ds_to_universal.py": (
        "import argparse; from deepspeed.checkpoint import ds_to_universal",
        "ds_to_universal.main(argparse.Namespace(input_folder=src + '/global_step7', output_folder=dst, strict=True, "
        "num_extract_workers=2, num_merge_workers=2, keep_temp_folder=False, inject_missing_state=False))",
    ),
    "zero_to_fp32.py": (
        "from deepspeed.utils import zero_to_fp32",
        "zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(src, dst)",
    ),
}
CHILD = """
import sys, time
src, dst = sys.argv[1:3]
out, sys.stdout = sys.stdout, sys.stderr
exec(sys.argv[3])
began = time.perf_counter()
exec(sys.argv[4])
print(time.perf_counter() - began, file=out, flush=True)
sys.stdin.read()
"""


def converted(name: str, source: Path, target: Path) -> tuple[float, int]:
    """Convert in a process of its own; gives its seconds and its most memory, without that of its own processes."""
    command = [sys.executable, "-W", "ignore", "-c", CHILD, str(source), str(target), *WORKS[name]]
    # With compiled modules, as installed packages have them; the first turn, which does not count, makes them.
    environment = os.environ | {"PYTHONPYCACHEPREFIX": str(source.parent / "compiled")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as child:
        assert child.stdout is not None
        said = child.stdout.readline()
        peak = 0
        if said:
            status = Path(f"/proc/{child.pid}/status").read_text(encoding="ascii")
            peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
        _, errors = child.communicate()
    if child.returncode:
        raise RuntimeError(f"{name} failed: {errors}")
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    return float(said), peak


def compared(work: str, name: str, peer: str, taken: dict[str, list[tuple[float, int]]], times: float) -> Row:
    """A row of the time of ours beside that of a peer, or of none if it is not here."""
    ours = [seconds for seconds, _ in taken[name]]
    if peer not in taken:
        return Row(work, f"`{peer}`", statistics.median(ours), goal=faster(times))
    theirs = [seconds for seconds, _ in taken[peer]]
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    medians = statistics.median(ours), statistics.median(theirs)
    return Row(work, f"`{peer}`", *medians, least=min(ratios), greatest=max(ratios), goal=faster(times))


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "zero"), Path(folder, "new")
        nbytes = write(source)
        taken: dict[str, list[tuple[float, int]]] = {
            name: [] for name in WORKS if HAS_DEEPSPEED or not name.endswith(".py")
        }
        for turn in range(TURNS + 1):
            for name, found in taken.items():
                one = converted(name, source, target)
                if turn or QUICK:  # The first reads the files into the page cache.
                    found.append(one)
        what = f"{quantity(nbytes, 'B')} of ZeRO 3 on {RANKS} ranks"
        yield compared(f"{what}, to FSDP2 of {NEW}", "fsdp2", "cp", taken, 0.8)
        yield compared(f"{what}, to DeepSpeed's universal checkpoint", "universal", "cp", taken, 0.8)
        for name, peer, to in (
            ("universal", "ds_to_universal.py", "DeepSpeed's universal checkpoint"),
            ("fp32", "zero_to_fp32.py", "weights of float32 in a file of PyTorch"),
        ):
            yield compared(f"{what}, to {to}", name, peer, taken, 5)
            ours, theirs = (max((peak for _, peak in taken.get(each, ())), default=None) for each in (name, peer))
            assert ours is not None
            yield Row(f"{what}, to {to}: memory", f"`{peer}`", ours, theirs, goal=faster(10), unit="B")


if __name__ == "__main__":
    main(rows)
