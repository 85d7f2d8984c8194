"""Elements of 4 and 6 bits: copied, merged, cut at bytes, digested, compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw

from ...checks import refused
from ...oracle.quantized import Raw, read_raw

DATA = Path(__file__).parents[2] / "data" / "quantized" / "st-low-bit"


def written(file: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    """A safetensors file, without the package."""
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def codes(data: bytes, bits: int, shape: tuple[int, ...]) -> Any:
    """The elements as numbers, the first in the lowest bits."""
    count = int(np.prod(shape))
    flat = np.unpackbits(np.frombuffer(data, "u1"), bitorder="little")[: count * bits].reshape(count, bits)
    return (flat.astype(int) << np.arange(bits)).sum(1).reshape(shape)


def test_a_file_of_them_is_merged_and_split(tmp_path: Path) -> None:
    raw = read_raw(DATA / "model.safetensors")
    sw.reshard_checkpoint(DATA, tmp_path / "hf", to="hf", sync=False)
    assert read_raw(tmp_path / "hf" / "model.safetensors").tensors == raw.tensors
    sw.reshard_checkpoint(DATA, tmp_path / "one.safetensors", sync=False)
    assert read_raw(tmp_path / "one.safetensors").tensors == raw.tensors
    mesh = sw.DeviceMesh((2,), ("tp",))
    layouts = {"a.f4": sw.TensorLayout((None, "tp"), mesh), "b.f6_e2m3": sw.TensorLayout(("tp", None), mesh)}
    sw.reshard_checkpoint(DATA, tmp_path / "cut", layouts, to="sharded", sync=False)
    assert sw.diff_checkpoints(DATA, tmp_path / "cut") == []
    assert sw.verify_checkpoint(tmp_path / "cut").damaged == ()
    with sw.open_checkpoint(tmp_path / "cut") as checkpoint:
        assert checkpoint["a.f4"].boxes.tolist() == [[[0, 4], [0, 16]], [[0, 4], [16, 32]]]
    sw.reshard_checkpoint(tmp_path / "cut", tmp_path / "again", to="hf", sync=False)
    assert read_raw(tmp_path / "again" / "model.safetensors").tensors == raw.tensors


@pytest.mark.parametrize(
    ("dtype", "bits", "shape", "specs", "ways"),
    [
        ("F4", 4, (6, 8), ("tp", None), 3),
        ("F4", 4, (6, 8), (None, "tp"), 4),
        ("F4", 4, (4, 3), ("tp", None), 2),  # Two rows of one byte and a half.
        ("F4", 4, (2, 4, 3), (None, "tp", None), 2),
        ("F6_E2M3", 6, (3, 8), (None, "tp"), 2),
        ("F6_E3M2", 6, (8, 2), ("tp", None), 4),
    ],
)
def test_shards_are_those_of_the_elements(
    tmp_path: Path, dtype: str, bits: int, shape: tuple[int, ...], specs: tuple[str | None, ...], ways: int
) -> None:
    data = np.random.default_rng(4).bytes(int(np.prod(shape)) * bits // 8)
    written(tmp_path / "w.safetensors", {"w": (dtype, shape, data)})
    layout = sw.TensorLayout(specs, sw.DeviceMesh((ways,), ("tp",)))
    sw.reshard_checkpoint(tmp_path / "w.safetensors", tmp_path / "cut", {"w": layout}, to="sharded", sync=False)
    whole = codes(data, bits, shape)
    files = sorted((tmp_path / "cut").glob("*.safetensors"))
    assert len(files) == ways
    for file, box in zip(files, layout.partition(shape).boxes().tolist(), strict=True):
        own = read_raw(file).tensors["w"]
        part = whole[tuple(slice(*side) for side in box)]
        assert own[:2] == (dtype, part.shape)
        assert np.array_equal(codes(own[2], bits, part.shape), part)
    sw.reshard_checkpoint(tmp_path / "cut", tmp_path / "again.safetensors", sync=False)
    assert read_raw(tmp_path / "again.safetensors") == Raw({"w": (dtype, shape, data)})


@pytest.mark.parametrize(
    ("dtype", "shape", "specs", "ways", "message"),
    [
        ("F4", (2, 3), ("tp", None), 2, "is cut at 1, within 2 values packed together"),
        ("F4", (2, 6), (None, "tp"), 2, "is cut at 3, within 2 values packed together"),
        ("F6_E2M3", (2, 8), (None, "tp"), 4, "is cut at 2, within 4 values packed together"),
        ("F4", (4, 3), (None, "tp"), 3, "dim 1 cannot be cut: its elements share bytes"),
    ],
)
def test_a_cut_within_a_byte_is_refused(
    tmp_path: Path, dtype: str, shape: tuple[int, ...], specs: tuple[str | None, ...], ways: int, message: str
) -> None:
    bits = 4 if dtype == "F4" else 6
    written(tmp_path / "w.safetensors", {"w": (dtype, shape, bytes(int(np.prod(shape)) * bits // 8))})
    layout = sw.TensorLayout(specs, sw.DeviceMesh((ways,), ("tp",)))
    with refused(sw.LayoutError, "'w': ", message):
        sw.reshard_checkpoint(tmp_path / "w.safetensors", tmp_path / "cut", {"w": layout}, to="sharded")
    assert not (tmp_path / "cut").exists()


def test_saved_plans_and_differences(tmp_path: Path) -> None:
    data = np.random.default_rng(5).bytes(4 * 64 // 2)
    written(tmp_path / "one.safetensors", {"w": ("F4", (4, 64), data)})
    written(tmp_path / "two.safetensors", {"w": ("F4", (4, 64), data[:70] + bytes([data[70] ^ 0x30]) + data[71:])})
    (difference,) = sw.diff_checkpoints(tmp_path / "one.safetensors", tmp_path / "two.safetensors")
    assert (difference.index, difference.count) == ((2, 13), 1)
    layout = sw.TensorLayout((None, "tp"), sw.DeviceMesh((2,), ("tp",)))
    plan = sw.plan_checkpoint(tmp_path / "one.safetensors", tmp_path / "cut", {"w": layout}, to="sharded")
    plan.save(tmp_path / "plan")
    loaded = sw.CheckpointPlan.load(tmp_path / "plan")
    loaded.run((1, 1))
    loaded.commit()
    assert sw.diff_checkpoints(tmp_path / "one.safetensors", tmp_path / "cut") == []
    with refused(TypeError, "F4, which PyTorch does not have"):
        sw.reshard_checkpoint(tmp_path / "one.safetensors", tmp_path / "dcp", to="dcp")


def test_packed_elements_are_not_rewritten(tmp_path: Path) -> None:
    data = {f"w.{i}": ("F4", (2, 4), bytes(4)) for i in range(2)}
    written(tmp_path / "w.safetensors", dict(data))
    rewrites = sw.Rewrites([{"from": "w.{i}", "to": {"name": "w", "stack": "i"}}])
    with refused(TypeError, "F4, 4 bits an element; packed elements cannot be rewritten"):
        sw.reshard_checkpoint(tmp_path / "w.safetensors", tmp_path / "out.safetensors", rewrites=rewrites)
