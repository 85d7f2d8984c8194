"""Digests: against the definition in plain Python (`tests/oracle/digest.py`), and by their laws."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import numpy as np
import pytest

import shardwise as sw
from shardwise.store import Digest
from tests.oracle.digest import digest_of, digest_of_part

PAGE = Path(__file__).parents[3] / "docs/digests.md"
RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", ["u1", ">f4", "<f8", "c16", "u1,<i2", "?"])
@pytest.mark.parametrize("count", [0, 1, 7, 513, 5000])
def test_whole_arrays(dtype: str, count: int) -> None:
    content = RANDOM.integers(0, 2, count * np.dtype(dtype).itemsize, np.uint8).tobytes()
    array = np.frombuffer(content, dtype)
    assert sw.digest(array).number == digest_of(content)
    assert sw.digest(array[::-1]).number == digest_of(array[::-1].tobytes())
    places = RANDOM.permutation(count)
    assert sw.digest(array[places], shape=(count,), offsets=places) == sw.digest(array)


def test_buffers() -> None:
    content = bytes(range(200))
    for buffer in (content, bytearray(content), memoryview(content)):
        assert sw.digest(buffer) == Digest(digest_of(content), "uint8", (200,))


def test_the_pieces_of_every_device_add_up() -> None:
    table = RANDOM.integers(0, 99, (10, 1300), np.int16)
    mesh = sw.DeviceMesh((2, 3), ("a", "b"))
    partition = sw.TensorLayout(("a", "b"), mesh).partition(table.shape, uneven="ceil")
    shards = sw.distribute_tensor(table, partition.layout, uneven="ceil")
    parts = [
        sw.digest(shards.shard(device), shape=table.shape, pieces=partition.pieces(device))
        for device in mesh.devices.flat
    ]
    assert sum(parts) == sw.digest(table)
    box = (slice(2, 9), slice(5, 1100))
    runs = [((row * 1300 + 5) * 2, table[row, 5:1100].tobytes()) for row in range(2, 9)]
    assert sw.digest(table[box], shape=table.shape, box=box).number == digest_of_part(table.tobytes(), runs)


def test_a_sparse_change() -> None:
    old = RANDOM.standard_normal((300, 70)).astype(np.float32)
    new, places = old.copy(), RANDOM.permutation(old.size)[:500]
    new.reshape(-1)[places] += 1
    changed, before = (sw.digest(each.reshape(-1)[places], shape=old.shape, offsets=places) for each in (new, old))
    assert sw.digest(old) + changed - before == sw.digest(new) != sw.digest(old)


def test_a_value() -> None:
    value = sw.digest(np.arange(6).reshape(2, 3))
    assert Digest.parse(str(value)) == value == pickle.loads(pickle.dumps(value)) == eval(repr(value))
    assert hash(value) == hash(Digest.parse(str(value)))
    assert (value - value).number == 0
    with pytest.raises(sw.LayoutError, match="two tensors"):
        value + sw.digest(np.arange(6))
    for text in ("", "f4[2]:00", f"f4[2]:{2**127 - 1:032x}", "f4[-1]:" + "0" * 32):
        with pytest.raises(sw.ParseError, match="not a digest"):
            Digest.parse(text)


def test_refused() -> None:
    ten = np.zeros(10)
    with pytest.raises(sw.LayoutError, match="more than once"):
        sw.digest(ten[:2], shape=(10,), offsets=[3, 3])
    with pytest.raises(sw.LayoutError, match="from 0 to 9"):
        sw.digest(ten[:1], shape=(10,), offsets=[10])
    with pytest.raises(sw.LayoutError, match="its box holds"):
        sw.digest(ten[:2], shape=(10,), box=(slice(0, 3),))
    with pytest.raises(TypeError, match="needs shape and one of"):
        sw.digest(ten, shape=(10,))
    with pytest.raises(TypeError, match="objects"):
        sw.digest(np.array([None]))
    with pytest.raises(TypeError, match="or a buffer"):
        sw.digest([1, 2])


def test_the_vectors_of_the_page() -> None:
    found = re.findall(r"^\| `(.+?)` \| (\d+) \| `([0-9a-f]{32})` \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert len(found) == 6
    for code, size, number in found:
        content = eval(code)
        assert len(content) == int(size)
        assert sw.digest(content).number == digest_of(content) == int(number, 16), code


def test_tensors_of_pytorch() -> None:
    torch = pytest.importorskip("torch")
    from shardwise.store.data.digest_torch import digest_boxes, integers

    tensor = torch.randn(40, 3000).to(torch.bfloat16)
    content = tensor.view(torch.int16).numpy()
    assert sw.digest(tensor) == Digest(digest_of(content.tobytes()), "bfloat16", (40, 3000))
    for box in (((3, 30), (5, 2900)), ((0, 40), (0, 8)), ((7, 8), (1, 2)), ((0, 40), (0, 3000))):
        key = tuple(slice(*side) for side in box)
        want = sw.digest(content[key], shape=content.shape, box=key).number
        # As on a device: by PyTorch's operations.
        assert digest_boxes([(box, integers(tensor[key]))], (40, 3000)) == want
    with pytest.raises(TypeError, match="no strided memory"):
        sw.digest(tensor.to("meta"))
