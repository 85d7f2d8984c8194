"""Every needed byte is read once, but columns from store to store; counted (rule 2.12 g)."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.store.data.objects import ObjectPath
from tests.store.tasks import files

from ...stores import Store
from ...tasks import write_replica

SIZE = 2**23
VALUES = np.random.default_rng(3).random((1024, SIZE // 4096), np.float32)
ROWS = sw.TensorLayout(("x", None), sw.DeviceMesh((4,), ("x",)))
COLUMNS = sw.TensorLayout((None, "x"), sw.DeviceMesh((4,), ("x",)))


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, src: str) -> Iterator[Callable[[], int]]:
    """What is read meanwhile in bytes: of objects, or of files by this process if the source is on the disk."""
    held = 0
    read = ObjectPath.read_into

    def counting(path: ObjectPath, buffer: memoryview, *args: Any) -> None:
        nonlocal held
        read(path, buffer, *args)
        held += len(buffer)

    def files() -> int:
        found = re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())
        assert found is not None
        return int(found[1])

    began = files()
    with monkeypatch.context() as patch:
        patch.setattr(ObjectPath, "read_into", counting)
        yield lambda: files() - began if src == "disk" else held


@pytest.mark.heavy
@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/io says what a process reads")
@pytest.mark.parametrize("planned", [False, True], ids=["direct", "planned"])
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize(
    ("to", "layout"), [("safetensors", None), ("hf", None), ("sharded", ROWS), ("sharded", COLUMNS), ("dcp", COLUMNS)]
)
@pytest.mark.parametrize("src", ["disk", "store"])
@pytest.mark.parametrize("dst", ["disk", "store"])
def test_replicas_are_read_once_each(
    tmp_path: Path, memory: Store, monkeypatch: pytest.MonkeyPatch, src: str, dst: str, to: Any, layout: Any,
    replicas: int, planned: bool,
) -> None:  # fmt: skip
    # A task makes an object, and fetches the rows of another that its columns are in: `docs/object-stores.md` says so.
    reads = 4 if src == dst == "store" and layout is COLUMNS else 1
    (tmp_path / "source").mkdir()
    for rank in range(replicas):
        write_replica(tmp_path / "source", rank + 1, VALUES)
    source: Any = tmp_path / "source"
    if src == "store":
        source = memory.place("source")
        memory.put(tmp_path / "source", source)
    name = "new.safetensors" if to == "safetensors" else "new"
    target: Any = tmp_path / name if dst == "disk" else memory.place(name)
    layouts = None if layout is None else {"w": layout}

    def run(target: Any) -> None:
        if not planned:
            sw.reshard_checkpoint(source, target, layouts, to=to, threads=1)
            return
        plan = sw.plan_checkpoint(source, target, layouts, to=to)
        plan.run((1, 2))
        plan.run((2, 2))
        plan.commit()

    run(target.with_name(f"warm{name}"))  # What is imported at the first time is read too.
    with counted(monkeypatch, src) as read:
        run(target)
        total = read()
    with sw.open_checkpoint(target) as checkpoint:
        assert np.array_equal(checkpoint.read("w"), VALUES)
    # Headers, receipts and the like take less than a quarter of a replica.
    assert replicas * SIZE <= total < (reads * replicas + 0.25) * SIZE, total / SIZE


RULES = sw.LayoutMap(sw.DeviceMesh((2,), ("x",)))


RULES["cut"] = ("x",)


@pytest.mark.filterwarnings("ignore")  # Of tensors that are not cut, and of aiohttp about large parts.
def test_what_depends_on_all_of_it_is_read_once(s3: Store, tmp_path: Path) -> None:
    """Two tensors of several parts each, in a container each, and in one file with digests."""
    tensors = {"cut": np.arange(2_600_000, dtype="f8"), "b": np.arange(9), "c": np.arange(5_000_000, dtype="i2")}
    sw.save_checkpoint(tmp_path / "source.safetensors", tensors)
    forms: list[tuple[Any, str]] = [("dcp", "a"), ("safetensors", "a.safetensors")]
    for to, name in forms:
        sw.reshard_checkpoint(tmp_path / "source.safetensors", tmp_path / name, RULES, to=to)
        place = s3.place(name)
        report = sw.reshard_checkpoint(tmp_path / "source.safetensors", place, RULES, to=to, memory=48 * 2**20)
        assert isinstance(report, sw.store.WriteReport)
        assert s3.objects(place) == files(tmp_path / name)
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        assert nbytes <= report.bytes_read < 1.01 * nbytes
