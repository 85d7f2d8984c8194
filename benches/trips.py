"""How many files of the store a run enters, and how its rooms import each other: `python benches/trips.py`.

A file counts when a function of it is called on the way; floors are the files of the longest chain of imports.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import shardwise as sw

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.test_rooms import Imports, imports_of

HOUSE = Path(sw.__file__).parent
STORE = HOUSE / "store"


def entered(work: Callable[[], object]) -> list[str]:
    """The files of the store of which a function is called, in order."""
    seen: dict[str, None] = {}

    def look(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(str(STORE)):
            seen.setdefault(Path(name).relative_to(STORE).as_posix())

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return list(seen)


def floors(edges: Imports) -> int:
    """The length of the longest chain of imports."""

    @functools.cache
    def height(file: str) -> int:
        return 1 + max(map(height, edges[file]), default=0)

    return max(map(height, edges), default=0)


def main() -> None:
    """Print the figures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tensors = {"w": np.arange(2**17).reshape(512, 256), "b": np.ones(3)}
        sw.save_checkpoint(folder / "warm", tensors)
        trips = {"save_checkpoint": entered(lambda: sw.save_checkpoint(folder / "a", tensors))}
        sw.plan_checkpoint(folder / "a", folder / "b", task_bytes=2**17).save(folder / "b.swplan")
        plan = sw.CheckpointPlan.load(folder / "b.swplan")
        trips["CheckpointPlan.run"] = entered(plan.run)
    for trip, files in trips.items():
        own = [file for file in files if file.startswith("write/")]
        print(f"{trip}: {len(files)} files of store, {len(own)} of store/write: {', '.join(own)}")
    edges = imports_of("python/shardwise/store/write")
    count = sum(map(len, edges.values()))
    print(f"store/write: {len(edges)} files, {floors(edges)} floors, {count} imports")
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in STORE.rglob("*.py")}
    write = sum(length for path, length in lines.items() if "write" in path.parts)
    print(f"lines: {sum(lines.values())} of store, {write} of store/write")


if __name__ == "__main__":
    main()
