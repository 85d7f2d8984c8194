"""A checkpoint to write as tasks, and the plans that do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import shardwise as sw

MESH = sw.DeviceMesh((2, 4), ("data", "model"))
TASK = 1 << 16


def saved(folder: Path) -> Path:
    """A sharded checkpoint with replicas, tied tensors, small ones and some that take several tasks."""
    rng = np.random.default_rng(7)
    tied = rng.standard_normal((64, 512)).astype("f4")
    tensors = {
        "wide": rng.standard_normal((32, 4096)).astype("f8"),
        "deep": rng.integers(0, 99, (3, 2, 8, 9000)).astype("u2"),
        "tied.a": tied,
        "tied.b": tied,
        **{f"small.{i}": rng.standard_normal((8, 8 * i)).astype("f2") for i in range(5)},
        "scalar": np.array(2.5),
    }
    layouts = {"wide": sw.TensorLayout(("model", None), MESH), "deep": sw.TensorLayout((None,) * 3 + ("data",), MESH)}
    sw.save_checkpoint(folder / "src", tensors, layouts)
    return folder / "src"


def rules() -> sw.LayoutMap:
    layout_map = sw.LayoutMap(MESH)
    layout_map["wide"] = (None, ("data", "model"))
    layout_map["deep"] = (None, "data", "model", None)
    return layout_map


def planned(source: Path, name: str = "new", **settings: Any) -> sw.CheckpointPlan:
    return sw.plan_checkpoint(source, source.parent / name, rules(), **{"task_bytes": TASK, **settings})


def direct(source: Path) -> dict[str, bytes]:
    sw.reshard_checkpoint(source, source.parent / "direct", rules())
    return contents(source.parent / "direct")


def contents(folder: Path) -> dict[str, bytes]:
    assert not [path for path in folder.parent.iterdir() if path.name.startswith(".")]
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
