"""What it takes to open a checkpoint, to plan how it is cut anew, and to write the index of a new one.

No peer does the same: PyTorch's own index is a pickle that it loads without a check of what it says.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from figures import Row, at_most
from part import QUICK, main
from timing import compare

import shardwise as sw

#: Of the distributed checkpoint: tensors, and into how many boxes each is cut.
CUT, WAYS = 500 if QUICK else 12_500, 8
#: Of the folder in Hugging Face's form.
TENSORS, FILES = (500, 10) if QUICK else (10_000, 200)


def opened(path: Path) -> int:
    with sw.open_checkpoint(path) as checkpoint:
        return len(checkpoint)


def distributed(folder: Path) -> Iterator[Row]:
    layout = sw.TensorLayout(("x", None), sw.DeviceMesh((WAYS,), ("x",)))
    tensors = {f"model.layers.{i}.self_attn.q_proj.weight": np.full((WAYS, 4), i, np.float32) for i in range(CUT)}
    layouts, path, taken = dict.fromkeys(tensors, layout), folder / "dcp", []
    for _ in range(3):
        shutil.rmtree(path, ignore_errors=True)
        start = time.perf_counter()
        sw.save_checkpoint(path, tensors, layouts, to="dcp", sync=False)
        taken.append(time.perf_counter() - start)
    name = f"PyTorch's DCP of {CUT * WAYS:,} chunks of {CUT:,} tensors"
    goal = None if QUICK else at_most(1)
    assert opened(path) == CUT
    yield compare(f"opening {name}", lambda: opened(path), goal=goal, turns=5)
    yield Row(f"writing {name} of 16 bytes", "", statistics.median(taken), goal=at_most(CUT * 1e-3))


def hugging_face(folder: Path) -> Row:
    path = folder / "hf"
    tensors = {f"model.layers.{i}.weight": np.full((4, 4), i, np.float32) for i in range(TENSORS)}
    sw.save_checkpoint(path, tensors, to="hf", max_file_bytes=64 * TENSORS // FILES, sync=False)
    assert len(list(path.glob("*.safetensors"))) == FILES
    assert opened(path) == TENSORS
    name = f"opening Hugging Face's form: {TENSORS:,} tensors in {FILES} files"
    return compare(name, lambda: opened(path), goal=None if QUICK else at_most(0.3), turns=5)


Parameters = dict[str, tuple[tuple[int, ...], int | None]]


def llama_70b() -> Parameters:
    """The parameters of Llama 3 70B: the shape of each, and the dim that tensor parallelism cuts."""
    found: Parameters = {
        "model.embed_tokens.weight": ((128256, 8192), 0),
        "lm_head.weight": ((128256, 8192), 0),
        "model.norm.weight": ((8192,), None),
    }
    for layer in range(4 if QUICK else 80):
        at = f"model.layers.{layer}."
        for name, rows in (("q", 8192), ("k", 1024), ("v", 1024)):
            found[f"{at}self_attn.{name}_proj.weight"] = (rows, 8192), 0
        for name in ("gate", "up"):
            found[f"{at}mlp.{name}_proj.weight"] = (28672, 8192), 0
        found[f"{at}self_attn.o_proj.weight"] = (8192, 8192), 1
        found[f"{at}mlp.down_proj.weight"] = (8192, 28672), 1
        for name in ("input", "post_attention"):
            found[f"{at}{name}_layernorm.weight"] = (8192,), None
    return found


def layouts_of(parameters: Parameters, ways: int) -> dict[str, sw.TensorLayout]:
    mesh = sw.DeviceMesh((ways,), ("tp",))
    return {
        name: sw.TensorLayout(tuple("tp" if d == dim else None for d in range(len(shape))), mesh)
        for name, (shape, dim) in parameters.items()
    }


def write_holes(folder: Path, parameters: Parameters, ways: int) -> None:
    """Files with headers, and a hole each for the elements: as PyTorch writes DCP as safetensors."""
    folder.mkdir()
    for rank in range(ways):
        entries: dict[str, Any] = {}
        offsets, at = {}, 0
        for name, (shape, dim) in parameters.items():
            if dim is None and rank:
                continue
            sizes = [size // ways if d == dim else size for d, size in enumerate(shape)]
            end = at + 2 * math.prod(sizes)
            entries[name] = {"dtype": "BF16", "shape": sizes, "data_offsets": [at, end]}
            offsets[name] = {"saved_offsets": [rank * size if d == dim else 0 for d, size in enumerate(sizes)]}
            at = end
        entries["__metadata__"] = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0"}
        header = json.dumps(entries).encode()
        with (folder / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + at)


def planned(folder: Path) -> Iterator[Row]:
    parameters = llama_70b()
    src, dst = layouts_of(parameters, 8), layouts_of(parameters, 16)
    tensors = {name: (shape, "bfloat16") for name, (shape, _) in parameters.items()}
    name = f"Llama 3 70B, {len(tensors)} tensors, from 8 to 16 ways"
    goal = None if QUICK else at_most(0.05)
    yield compare(f"`plan_model`: {name}", lambda: sw.plan_model(src, dst, tensors), goal=goal)
    path = folder / "llama"
    write_holes(path, parameters, 8)

    def outline() -> Any:
        return sw.plan_checkpoint(path, folder / "for-16", dst, to="sharded").outline()

    yield compare(f"`plan_checkpoint(…).outline()`, opening and all bytes of all files: {name}", outline, turns=5)


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        yield from distributed(folder)
        yield hugging_face(folder)
        yield from planned(folder)


if __name__ == "__main__":
    main(rows)
