"""A checkpoint in blocks of FP8 beside one of bfloat16 of as many bytes, and beside `cp`: cut, merged, fused.

All work is on files in the page cache, without waiting for the disk. In each turn every work is done once.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from figures import Row, at_most_times
from part import QUICK, main

import shardwise as sw

#: 512 MiB of values: layers of gate, up and down, as of a model of 4,096 features.
LAYERS, FEATURES, INNER = (1, 256, 512) if QUICK else (4, 4096, 10752)
TURNS = 2 if QUICK else 15
CONFIG = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


def write(folder: Path, dtype: str) -> None:
    folder.mkdir()
    header: dict[str, Any] = {}
    at = 0
    # Half as many columns of two bytes each, so that the bytes are the same, with the scales as one more tensor.
    width = 1 if dtype == "F8_E4M3" else 2

    def put(name: str, code: str, *shape: int) -> None:
        nonlocal at
        size = int(np.prod(shape)) * {"F8_E4M3": 1, "BF16": 2, "F32": 4}[code]
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [at, at + size]}
        at += size

    for layer in range(LAYERS):
        for name, rows, columns in (("gate", INNER, FEATURES), ("up", INNER, FEATURES), ("down", FEATURES, INNER)):
            put(f"layers.{layer}.mlp.{name}_proj.weight", dtype, rows, columns // width)
            if width == 1:
                put(f"layers.{layer}.mlp.{name}_proj.weight_scale_inv", "F32", rows // 128, columns // 128)
    if width == 2:
        put("rest", "F32", LAYERS * 3 * INNER // 128 * FEATURES // 128)
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        block = np.random.default_rng(0).bytes(1 << 24)
        for begin in range(0, at, len(block)):
            file.write(block[: at - begin])
    (folder / "config.json").write_text(json.dumps(CONFIG if width == 1 else {}))


def layouts(*, fused: bool) -> sw.LayoutMap:
    rules = sw.LayoutMap(sw.DeviceMesh((4,), ("tp",)), default="replicated")
    rules[r"gate_up_proj\.weight$" if fused else r"(gate|up)_proj\.weight$"] = (
        (sw.packed.parse("gate:(n@tp) + up:(n@tp)"), None) if fused else ("tp", None)
    )
    rules[r"down_proj\.weight$"] = (None, "tp")
    return rules


FUSED = sw.Rewrites(
    [
        {
            "from": "{rest*}.{gate,up}_proj.weight",
            "to": {"name": "{rest*}.gate_up_proj.weight", "packed": "gate:(n) + up:(n)"},
        }
    ]
)


def cut(source: Path, target: Path, **options: Any) -> None:
    sw.reshard_checkpoint(source, target, to="sharded", sync=False, **options)


def merge(source: Path, target: Path) -> None:
    sw.reshard_checkpoint(source, target, to="hf", sync=False)


def copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", "--reflink=never", source, target], check=True)


def timed(work: Callable[[Path], None], target: Path) -> float:
    start = time.perf_counter()
    work(target)
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    return seconds


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        fp8, plain, cut_fp8, cut_plain = (root / name for name in ("fp8", "bf16", "cut-fp8", "cut-bf16"))
        write(fp8, "F8_E4M3")
        write(plain, "BF16")
        cut(fp8, cut_fp8, layouts=layouts(fused=False))
        cut(plain, cut_plain, layouts=layouts(fused=False))
        nbytes = sum(path.stat().st_size for path in fp8.iterdir())
        works: dict[str, Callable[[Path], None]] = {
            "cp": partial(copy, fp8),
            "cut": partial(cut, fp8, layouts=layouts(fused=False)),
            "cut bf16": partial(cut, plain, layouts=layouts(fused=False)),
            "merge": partial(merge, cut_fp8),
            "merge bf16": partial(merge, cut_plain),
            "fuse": partial(cut, fp8, layouts=layouts(fused=True), rewrites=FUSED),
            "fuse bf16": partial(cut, plain, layouts=layouts(fused=True), rewrites=FUSED),
        }
        turns = [{name: timed(work, root / "out") for name, work in works.items()} for _ in range(TURNS + 1)][1:]

        def row(work: str, ours: str, peer: str, theirs: str, times: float | None) -> Row:
            ratios = [turn[theirs] / turn[ours] for turn in turns]
            goal = None if times is None or QUICK else at_most_times(times)
            mine, other = (statistics.median(turn[name] for turn in turns) for name in (ours, theirs))
            return Row(work, peer, mine, other, least=min(ratios), greatest=max(ratios), goal=goal)

        size = f"{nbytes >> 20} MiB in blocks of FP8"
        for name, said in (("cut", "cut for 4 ranks"), ("merge", "merged"), ("fuse", "gate and up fused, cut for 4")):
            yield row(f"{size}, {said}", name, "`cp` of the file", "cp", None)
            yield row(f"{size}, {said}", name, "bfloat16 of as many bytes", f"{name} bf16", 1.15)


if __name__ == "__main__":
    main(rows)
