"""Replicas in files: compared as they are stored, whatever becomes of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from tests.store.tasks import write_replica

from ...torch_files import Storage, save, tensor

ml_dtypes = pytest.importorskip("ml_dtypes")


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float64"])
@pytest.mark.parametrize("rewritten", [False, True])
def test_replicas_that_a_conversion_makes_equal_disagree(tmp_path: Path, dtype: str | None, rewritten: bool) -> None:
    source = tmp_path / "source"
    source.mkdir()
    values = np.arange(12, dtype="f4").reshape(3, 4)
    other = values.copy()
    other[2, 1] = np.nextafter(other[2, 1], np.float32(np.inf))  # Equal as bfloat16.
    write_replica(source, 1, values)
    write_replica(source, 2, other)
    rewrites = sw.Rewrites([{"from": {"name": "w", "transpose": True}, "to": "v"}]) if rewritten else None
    with pytest.raises(sw.ParseError, match=r"replicas disagree; the first element .* is \(\d, \d\)"):
        sw.reshard_checkpoint(source, tmp_path / "out", dtype=dtype, rewrites=rewrites)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    sw.reshard_checkpoint(source, tmp_path / "first", dtype=dtype, rewrites=rewrites, replicas="first")
    write_replica(source, 2, values)
    sw.reshard_checkpoint(source, tmp_path / "same", dtype=dtype, rewrites=rewrites)
    for name in ("first", "same"):
        with sw.open_checkpoint(tmp_path / name) as checkpoint:
            found = checkpoint.read("v" if rewritten else "w")
        expected = values.T if rewritten else values
        assert found.dtype.name == (dtype or "float32")
        assert found.astype("f4").tolist() == expected.tolist()


def test_replicas_are_compared_in_blocks(tmp_path: Path) -> None:
    """The last element, when there is memory for a part of the tensor only."""
    source = tmp_path / "source"
    source.mkdir()
    values = np.random.default_rng(0).random((64, 512), np.float32)
    other = values.copy()
    other[63, 511] += 1
    write_replica(source, 1, values)
    write_replica(source, 2, other)
    with pytest.raises(sw.ParseError, match=r"replicas disagree; .* is \(63, 511\)"):
        sw.reshard_checkpoint(source, tmp_path / "out", dtype="bfloat16", memory=1 << 16)


@pytest.mark.parametrize("to", ["safetensors", "sharded", "dcp"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_replicas_in_any_order_of_elements(tmp_path: Path, to: Any, order: Any) -> None:
    """A plain tensor in the file of each rank, transposed or not: one is copied, the others compared with it."""
    values = np.arange(12, dtype="f4").reshape(3, 4)
    source, rows = tmp_path / "source", sw.TensorLayout(("x", None), sw.DeviceMesh((3,), ("x",)))
    source.mkdir()
    target = tmp_path / ("made.safetensors" if to == "safetensors" else "made")

    def rank(number: int, held: np.ndarray[Any, Any]) -> None:
        strides = (4, 1) if order == "C" else (1, 3)
        storage = Storage("0", "torch.FloatStorage", held.tobytes(order), held.size)
        saved = save({"w": tensor(held, "0", storage=storage, strides=strides)})
        (source / f"model_world_size_3_rank_{number}.pt").write_bytes(saved)

    for number in range(3):
        rank(number, values)
    sw.reshard_checkpoint(source, target, {"w": rows} if to != "safetensors" else None, to=to)
    sw.verify_checkpoint(target)
    with sw.open_checkpoint(target) as checkpoint:
        assert checkpoint.read("w").tolist() == values.tolist()
    other = values.copy()
    other[2, 1] = -1
    rank(1, other)
    with pytest.raises(sw.ParseError, match=r"replicas disagree; the first element .* is \(2, 1\)"):
        sw.reshard_checkpoint(source, tmp_path / "out", to=to)


def test_two_dtypes_of_one_tensor_are_refused(tmp_path: Path) -> None:
    write_replica(tmp_path, 1, np.ones((3, 4), "f4"))
    write_replica(tmp_path, 2, np.ones((3, 4), "f2"), "F16")
    with pytest.raises(sw.ParseError, match=r"'w'.*(float16|F16).*(float32|F32)|'w'.*(float32|F32).*(float16|F16)"):
        sw.open_checkpoint(tmp_path)


def qkv(*axes: str) -> sw.TensorLayout:
    """Of 4 heads, with 2 key-value heads."""
    mesh = sw.DeviceMesh((4,) if len(axes) == 1 else (2, 2), axes)
    return sw.TensorLayout((sw.packed.qkv(4, 2, 2, axes[0]), None), mesh)


BOXES: dict[str, Any] = {"a": [((0, 9), (0, 5))], "b": [((9, 16), (0, 5))], "c": [((9, 16), (0, 5))]}
#: Tilings of a tensor of 16 x 5; a holder, an element of its own array, and which element of the tensor that is.
SHARED: dict[str, tuple[sw.Tiling, int, int, str]] = {
    "shards": (sw.TensorLayout(("x", None), sw.DeviceMesh((2, 2), ("x", "y"))).partition((16, 5)), 3, 7, "(9, 2)"),
    "parts of different shards": (qkv("x").partition((16, 5)), 3, 29, "(15, 4)"),
    "all parts of shards": (qkv("x", "y").partition((16, 5)), 1, 21, "(8, 1)"),
    "boxes": (sw.Tiling.from_boxes((16, 5), BOXES, replicas=True), 2, 6, "(10, 1)"),
    "ranges": (sw.Tiling.from_flat_ranges((16, 5), [(0, 43), (43, 80), (0, 43)], replicas=True), 2, 42, "(8, 2)"),
}


@pytest.mark.parametrize("case", SHARED)
@pytest.mark.parametrize("mode", ["r", "c"])
def test_replicas_in_files_of_their_own_are_compared(tmp_path: Path, case: str, mode: Any) -> None:
    tiling, holder, at, element = SHARED[case]
    values = np.arange(80, dtype="f4").reshape(16, 5)

    def sharded(name: str, change: int) -> sw.ShardedArray:
        shards = []
        for number, label in enumerate(tiling.holders):
            shard = np.zeros(tiling.holder_shape(label), "f4")
            for piece in tiling.pieces(label):
                piece.view(shard)[...] = values[piece.box]
            if number == holder:
                shard.reshape(-1)[at] += change
            shard.tofile(tmp_path / f"{name}{number}")
            shards.append(np.memmap(tmp_path / f"{name}{number}", "f4", mode, shape=shard.shape))
        return sw.ShardedArray(tiling, shards)

    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(sw.LayoutError, match=f"element {re.escape(element)} is "):
        sw.save_checkpoint(out / "new", {"w": sharded("a", 1)})
    assert list(out.iterdir()) == []
    sw.save_checkpoint(out / "first", {"w": sharded("b", 1)}, check=False)
    sw.save_checkpoint(out / "same", {"w": sharded("c", 0)})
    for name in ("first", "same"):
        with sw.open_checkpoint(out / name) as checkpoint:
            assert checkpoint.read("w").tolist() == values.tolist()


def test_what_pads_a_shard_is_not_compared(tmp_path: Path) -> None:
    layout = sw.TensorLayout((sw.packed.parse("(3@x/pad4)"),), sw.DeviceMesh((2, 2), ("x", "y")))
    shards = [np.array(shard, "f4") for shard in ([0, 1], [0, 1], [2, 98], [2, 99])]
    array = sw.ShardedArray(layout.partition((3,)), shards)
    sw.save_checkpoint(tmp_path / "new", {"w": array})
    with sw.open_checkpoint(tmp_path / "new") as checkpoint:
        assert checkpoint.read("w").tolist() == [0, 1, 2]
