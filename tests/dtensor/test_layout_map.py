"""What TensorFlow's own test of `LayoutMap` (tf_keras, dtensor/layout_map_test.py, LayoutMapTest) asks of a mapping.

Each test has the name of the case whose meaning it has.
"""

from __future__ import annotations

import pytest

from shardwise.dtensor import Layout, LayoutMap, Mesh

MESH = Mesh.from_string("|X=2,Y=2|0,1,2,3|0,1,2,3|CPU:0,CPU:1,CPU:2,CPU:3")
WHOLE_2D, WHOLE_1D = Layout.replicated(MESH, 2), Layout.replicated(MESH, 1)
ROWS_2D, ROWS_1D = Layout.batch_sharded(MESH, "X", 2), Layout.batch_sharded(MESH, "X", 1)
PATHS = [f"{layer}/{end}" for layer in ("dense", "dense_2", "conv2d") for end in ("kernel", "bias")]


def dense() -> LayoutMap:
    layout_map = LayoutMap()
    layout_map["dense/kernel"], layout_map["dense/bias"] = WHOLE_2D, WHOLE_1D
    return layout_map


def test_add() -> None:
    layout_map = dense()
    assert dict(layout_map) == {"dense/kernel": WHOLE_2D, "dense/bias": WHOLE_1D}
    with pytest.raises(ValueError, match="'dense/kernel' is in the LayoutMap already"):
        layout_map["dense/kernel"] = WHOLE_1D
    with pytest.raises(TypeError, match=r"layout of 'conv\.kernel' must be a Layout, got list"):
        layout_map["conv.kernel"] = [1, 2, 3]  # type: ignore[assignment]
    assert dict(layout_map) == dict(dense())


def test_get() -> None:
    """An exact key, then the first rule in order; a later rule serves what the earlier ones leave."""
    layout_map = LayoutMap()
    layout_map["dense/kernel"], layout_map["dense/bias"] = ROWS_2D, ROWS_1D
    layout_map["dense.*kernel"], layout_map["dense.*bias"] = WHOLE_2D, WHOLE_1D
    layout_map[".*bias"] = ROWS_1D
    assert {path: layout_map[path] for path in PATHS} == {
        "dense/kernel": ROWS_2D,
        "dense/bias": ROWS_1D,
        "dense_2/kernel": WHOLE_2D,
        "dense_2/bias": WHOLE_1D,
        "conv2d/kernel": None,
        "conv2d/bias": ROWS_1D,
    }


def test_delete() -> None:
    """By key, never by what the key would match."""
    layout_map = dense()
    assert layout_map.pop("dense/kernel") == WHOLE_2D
    with pytest.raises(KeyError):
        layout_map.pop(".*bias")
    del layout_map["dense/bias"]
    assert dict(layout_map) == {}
    assert layout_map["dense/bias"] is None


def test_len() -> None:
    assert len(LayoutMap()) == 0
    assert not LayoutMap()
    assert len(dense()) == 2


def test_iter() -> None:
    """In the order of insertion."""
    assert list(dense()) == list(dense().keys()) == ["dense/kernel", "dense/bias"]
    assert list(dense().values()) == [WHOLE_2D, WHOLE_1D]
    assert list(dense().items()) == [("dense/kernel", WHOLE_2D), ("dense/bias", WHOLE_1D)]
