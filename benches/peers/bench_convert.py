"""DeepSeek-V3 from Hugging Face's files to Megatron's `torch_dist`: planned whole, and a part converted, beside `cp`.

For the plan, files with the model's own names and shapes and nothing in them, which take no room. For the conversion,
random bytes in layers of the same kinds and shapes, of which there are fewer, with fewer experts and words. Without
waiting for the disk, as `cp` does not wait either; from the page cache, and from the disk.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from figures import Goal, Row, at_most, at_most_bytes, quantity
from part import QUICK, main

from shardwise.quantized.stated import stated_tensors
from shardwise.rules.model_shapes import model_shapes

#: As in the model's own `config.json`.
WHOLE: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
}
#: The same layers, but fewer of them: one with an MLP, two with experts, and the one that predicts further tokens.
PART = {**WHOLE, "num_hidden_layers": 3, "first_k_dense_replace": 1, "vocab_size": 4096}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
#: Of each kind of weight, by how many experts a part has about as many bytes; and by how many it has twice as many, of
#: which what is done once takes a smaller share.
KINDS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "FP8 with its scales": (FP8, (16, 44)),
    "bfloat16": ({}, (4,)),
}
FILES = 163
RANKS = 8
TURNS = 2 if QUICK else 5
SIZES = {"BF16": 2, "F32": 4, "F8_E4M3": 1}
GIB = 2**30


def stored_of(config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The dtypes and shapes of a model's tensors, with the layer that predicts further tokens."""
    shapes = model_shapes(config)
    assert shapes is not None
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    last, further = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    shapes |= {name.replace(last, further): shape for name, shape in shapes.items() if name.startswith(last)}
    plain: dict[str, tuple[int, ...]] = {}
    plain |= {f"{further}{norm}.weight": (hidden,) for norm in ("enorm", "hnorm", "shared_head.norm")}
    plain |= {
        f"{further}{name}.weight": (config["vocab_size"], hidden) for name in ("embed_tokens", "shared_head.head")
    }
    plain[f"{further}eh_proj.weight"] = (hidden, 2 * hidden)
    return stated_tensors(shapes, config)[0] | {name: ("BF16", shape) for name, shape in plain.items()}


def write(folder: Path, config: dict[str, Any], files: int, *, empty: bool) -> tuple[int, int]:
    """Write a model with this configuration; gives the number of its tensors and their bytes."""
    stored = stored_of(config)
    sizes = {name: math.prod(shape) * SIZES[dtype] for name, (dtype, shape) in stored.items()}
    each = -(-sum(sizes.values()) // files)
    groups: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if held and held + size > each:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    folder.mkdir()
    block = np.random.default_rng(0).bytes(1 << 24)
    index = {}
    for number, names in enumerate(groups, 1):
        file_name = f"model-{number:05d}-of-{len(groups):06d}.safetensors"
        header: dict[str, Any] = {}
        at = 0
        for name in names:
            dtype, shape = stored[name]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + sizes[name]]}
            at += sizes[name]
            index[name] = file_name
        text = json.dumps(header).encode()
        with (folder / file_name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            if empty:
                file.truncate(8 + len(text) + at)
            else:
                for name in names:  # Alike, as the embedding and its copy are.
                    for begin in range(0, sizes[name], len(block)):
                        file.write(block[: sizes[name] - begin])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))
    return len(sizes), sum(sizes.values())


#: Plans or converts a model, says how long that took the processor and the clock, and waits, to be looked at.
CHILD = """
import sys, time
began = time.perf_counter(), time.process_time()
import shardwise as sw

work, src, dst, ranks = sys.argv[1:]
rules = sw.example_rules()["torch_dist/deepseek-v3"]
config = src + "/config.json"
layouts = sw.LayoutMap.from_toml(rules, sw.DeviceMesh((int(ranks),), ("tp",)), config=config)
rewrites = sw.Rewrites.from_toml(rules, config=config)
if work == "plan":
    plan = sw.plan_checkpoint(src, dst, layouts, to="dcp", rewrites=rewrites)
else:
    sw.reshard_checkpoint(src, dst, layouts, to="dcp", rewrites=rewrites, sync=False)
print(time.perf_counter() - began[0], time.process_time() - began[1], flush=True)
sys.stdin.read()
"""


def converted(work: str, source: Path, target: Path) -> tuple[float, float, int]:
    """Plan or convert in a process of its own; gives its seconds, those of the processor, and its most memory."""
    command = [sys.executable, "-c", CHILD, work, str(source), str(target), str(RANKS)]
    # With compiled modules, as an installed package has them; the first turn, which does not count, compiles them.
    environment = os.environ | {"PYTHONPYCACHEPREFIX": str(source.parent / "compiled")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        said = child.stdout.readline().split()
        # Not `ru_maxrss`, in which Linux counts what the parent of the process had when it started it.
        status = Path(f"/proc/{child.pid}/status").read_text(encoding="ascii")
        peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
        child.communicate()
    assert child.returncode == 0
    return float(said[0]), float(said[1]), peak


def forget(folder: Path) -> None:
    """Have the files of a folder no longer in the page cache."""
    for path in folder.iterdir():
        with path.open("rb+") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plans(root: Path) -> Iterator[Row]:
    for kind, (more, _) in KINDS.items():
        config = {**(PART if QUICK else WHOLE), **more}
        count, nbytes = write(root / "whole", config, FILES, empty=True)
        _, seconds, peak = converted("plan", root / "whole", root / "out")
        shutil.rmtree(root / "whole")
        work = f"planning DeepSeek-V3 for {RANKS} ranks, {kind}: {count:,} tensors of {nbytes / GIB:,.0f} GiB"
        yield Row(f"{work}, the processor's time", "", seconds, goal=at_most(15))
        yield Row(f"{work}, the process's memory", "", peak, unit="B", goal=at_most_bytes(GIB))


def conversions(root: Path) -> Iterator[Row]:
    for kind, (more, sizes) in KINDS.items():
        for experts in sizes[:1] if QUICK else sizes:
            config = {**PART, **more, "n_routed_experts": experts}
            if QUICK:
                config |= {
                    "hidden_size": 256,
                    "intermediate_size": 1024,
                    "moe_intermediate_size": 1024,
                    "vocab_size": 256,
                }
            yield from conversion(root, kind, config, is_first=experts == sizes[0])


def conversion(root: Path, kind: str, config: dict[str, Any], *, is_first: bool) -> Iterator[Row]:
    """The rows of one part; a larger one is not read from the disk too."""
    source, target = root / "part", root / "out"
    _, nbytes = write(source, config, 4, empty=False)
    peak = 0
    for where in ("from the page cache", "from the disk")[: 2 if is_first else 1]:
        taken: dict[str, list[float]] = {"ours": [], "cp": []}
        for turn in range((TURNS if is_first else min(TURNS, 3)) + 1):
            for name, times in taken.items():
                if where == "from the disk":
                    forget(source)
                start = time.perf_counter()
                if name == "ours":
                    seconds, _, memory = converted("convert", source, target)
                    peak = max(peak, memory)
                else:
                    subprocess.run(["cp", "-r", "--reflink=never", source, target], check=True)
                    seconds = time.perf_counter() - start
                shutil.rmtree(target)
                if turn:
                    times.append(seconds)
        work = f"{quantity(nbytes, 'B')} of DeepSeek-V3's layers, {kind}, {where}"
        goal = Goal("ratio", 0.8)
        ratios = [b / a for a, b in zip(taken["ours"], taken["cp"], strict=True)]
        medians = statistics.median(taken["ours"]), statistics.median(taken["cp"])
        yield Row(work, "`cp` of the files", *medians, least=min(ratios), greatest=max(ratios), goal=goal)
    shutil.rmtree(source)
    work = f"{quantity(nbytes, 'B')} of DeepSeek-V3's layers, {kind}: the process's memory"
    yield Row(work, "", peak, unit="B", goal=at_most_bytes(GIB))


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        yield from plans(Path(name))
        free, needed = shutil.disk_usage(name).free, 18 * GIB
        if free < needed:
            sys.exit(f"{name} has {quantity(free, 'B')} free; {quantity(needed, 'B')} are needed")
        yield from conversions(Path(name))


if __name__ == "__main__":
    main(rows)
