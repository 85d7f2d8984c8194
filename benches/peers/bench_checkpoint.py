"""One device's column slice of a tensor in a safetensors file, beside the safetensors package."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from figures import Row
from part import main
from safetensors import safe_open
from safetensors.numpy import save_file
from tensors import SIDE, SIZE
from timing import compare

import shardwise as sw

DEVICE = "cpu:3"


def rows() -> Iterator[Row]:
    partition = sw.TensorLayout((None, "x"), sw.DeviceMesh((8,), ("x",))).partition((SIDE, SIDE))
    box = partition.box(DEVICE)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.safetensors")
        array = np.random.default_rng(0).random((SIDE, SIDE), np.float32)
        save_file({"weight": array}, path)

        def copied() -> Any:
            with sw.open_checkpoint(path) as checkpoint:
                return partition.view(checkpoint["weight"].array(), DEVICE).copy()

        def read() -> Any:
            with sw.open_checkpoint(path) as checkpoint:
                return checkpoint.read("weight", box)

        def by_safetensors() -> Any:
            with safe_open(path, "numpy") as file:
                return file.get_slice("weight")[:, box[1]]

        def in_memory() -> Any:
            return array[box].copy()

        assert np.array_equal(copied(), array[box])
        assert np.array_equal(read(), array[box])
        assert np.array_equal(by_safetensors(), array[box])
        name = f"an eighth of {SIZE} by columns, from a file in the page cache"
        floor = ("copying it from memory", in_memory)
        for how, work in (("the view copied", copied), ("`Checkpoint.read`", read)):
            yield compare(f"{name}: {how}", work, "safetensors `get_slice`", by_safetensors, floor=floor, turns=5)


if __name__ == "__main__":
    main(rows)
