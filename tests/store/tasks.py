"""A checkpoint to write as tasks, and the plans that do."""

from __future__ import annotations

import hashlib
import json
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import shardwise as sw
from shardwise.store.write.places.folder import FolderPlace

MESH = sw.DeviceMesh((2, 4), ("data", "model"))
TASK = 1 << 16


def saved(folder: Path, part: int = 1) -> Path:
    """A sharded checkpoint of 2 MB, or a part of that: with tied tensors, small ones, some that take several tasks."""
    rng = np.random.default_rng(7)
    tied = rng.standard_normal((64 // part, 512)).astype("f4")
    tensors = {
        "wide": rng.standard_normal((32, 4096 // part)).astype("f8"),
        "deep": rng.integers(0, 99, (3, 2, 8, 9000 // part)).astype("u2"),
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


def mixed() -> dict[str, np.ndarray[Any, Any]]:
    """Small tensors of many dtypes and shapes, one without elements and one without dims."""
    rng = np.random.default_rng(7)
    return {
        "wte": rng.standard_normal((48, 16)).astype("f4"),
        "h.0.w": rng.standard_normal((16, 48)).astype("f4"),
        "h.0.b": np.arange(48, dtype="i8"),
        "scalar": np.array(3.5),
        "none": np.zeros((0, 4), "f2"),
        "flags": np.array([True, False, True]),
        "deep": rng.integers(0, 99, (1, 2, 1, 3, 2, 1, 2, 2)).astype("u1"),
        "complex": np.array([1 + 2j, 3], "c8"),
    }


def mixed_rules() -> sw.LayoutMap:
    layout_map = sw.LayoutMap(MESH)
    layout_map["wte"] = (("model", "data"), None)
    layout_map[r"\.w$"] = ("data", "model")
    layout_map[r"\.b$"] = ("model",)
    return layout_map


def planned(source: Path, name: str = "new", **settings: Any) -> sw.CheckpointPlan:
    return sw.plan_checkpoint(source, source.parent / name, rules(), **{"task_bytes": TASK, **settings})


def folder_of(plan: sw.CheckpointPlan) -> FolderPlace:
    """Where what is unfinished of it lies."""
    assert isinstance(plan.place, FolderPlace)
    return plan.place


def direct(source: Path) -> dict[str, bytes]:
    sw.reshard_checkpoint(source, source.parent / "direct", rules())
    return contents(source.parent / "direct")


def contents(folder: Path) -> dict[str, bytes]:
    assert not [path for path in folder.parent.iterdir() if path.name.startswith(".")]
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def unpacked(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The head of a plan file without its sections, and these."""
    line, _, rest = path.read_bytes().partition(b"\n")
    length, count = (int(word) for word in line.split()[-2:])
    head, at = json.loads(rest[:length]), length + 8 * count
    sizes = np.frombuffer(rest[length:at], "<i8").tolist()
    blocks = []
    for size in sizes:
        blocks.append(zlib.decompress(rest[at : at + size]))
        at += size
    sections: dict[str, bytes] = {}
    for name, (nbytes, digests) in head.pop("sections").items():
        sections[name] = b"".join(blocks[: len(digests)])
        assert len(sections[name]) == nbytes
        blocks = blocks[len(digests) :]
    return head, sections


def forge(path: Path, head: dict[str, Any], sections: dict[str, bytes], **said: Any) -> None:
    """Write a plan file of these, all its digests right; `said` are lengths that sections only claim to have."""
    blocks: dict[str, list[bytes]] = {
        name: [data[at : at + 2**18] for at in range(0, len(data), 2**18)] for name, data in sections.items()
    }
    digests = {name: [hashlib.sha256(block).hexdigest() for block in held] for name, held in blocks.items()}
    said = {name: said.get(name, [len(data), digests[name]]) for name, data in sections.items()}
    text = json.dumps({**head, "sections": said}).encode()
    # No block may be much shorter than its contents; an eighth is the least that this makes of it.
    deflaters = (
        (zlib.compressobj(1, strategy=zlib.Z_HUFFMAN_ONLY), block) for held in blocks.values() for block in held
    )
    short = [deflater.compress(block) + deflater.flush() for deflater, block in deflaters]
    line = f"shardwise plan 3 {hashlib.sha256(text).hexdigest()} {len(text)} {len(short)}\n".encode()
    path.write_bytes(line + text + np.array([len(each) for each in short], "<i8").tobytes() + b"".join(short))


def write_replica(folder: Path, rank: int, values: np.ndarray[Any, Any], code: str = "F32") -> None:
    """The file of a rank that holds all of `w`, as PyTorch writes DCP as safetensors."""
    about = {"DCP_SHARDING_INFO": '{"w": {"saved_offsets": [0, 0]}}', "DCP_VERSION": "1.0"}
    entry = {"dtype": code, "shape": list(values.shape), "data_offsets": [0, values.nbytes]}
    header = json.dumps({"__metadata__": about, "w": entry}).encode()
    data = len(header).to_bytes(8, "little") + header + values.tobytes()
    (folder / f"shard-{rank:05}-model-00001-of-00001.safetensors").write_bytes(data)


def files(folder: Path) -> dict[str, bytes]:
    if folder.is_file():
        return {"": folder.read_bytes()}
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def driven(plans: Sequence[sw.CheckpointPlan]) -> None:
    """Run all tasks of each plan in a thread of its own, then commit each at the same time; all must succeed."""
    ended: list[Any] = []
    barrier = threading.Barrier(len(plans))

    def drive(plan: sw.CheckpointPlan) -> None:
        try:
            plan.run(tasks=range(len(plan.tasks)))
            ended.append("run")
            barrier.wait()
            ended.append(plan.commit())
        except BaseException as error:
            ended.append(error)

    drivers = [threading.Thread(target=drive, args=(plan,)) for plan in plans]
    for driver in drivers:
        driver.start()
    for driver in drivers:
        driver.join()
    assert ended.count("run") == len(plans), ended
    assert sum(isinstance(end, sw.store.WriteReport) for end in ended) == len(plans), ended
