"""What is planned, in numbers: tasks, sources, and where each piece is written, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise._dtypes import DTYPES
from shardwise.conversion.tables import Wanted
from shardwise.pieces import NO_PIECES
from shardwise.store.data.boxes import contiguous_strides
from shardwise.store.data.sources import SourceFile
from shardwise.store.write.request.contents import CheckpointContents, make_plan
from shardwise.store.write.request.request import Request

MIB = 2**20


def of(count: int, task_bytes: int | None = None) -> Any:
    """A plan for so many bytes, of which nothing is there."""
    request = Request(Path("x"), task_bytes=task_bytes, memory=MIB << 8, compares=True)
    return make_plan(request, CheckpointContents([Wanted("a", DTYPES["uint8"], (count,), NO_PIECES)], [], "hf"))


def test_tasks_have_from_32_to_64_mib_and_128_of_them_in_between() -> None:
    for total, each in ((0, 32), (128 * 32, 32), (128 * 33, 33), (128 * 64, 64), (128 * 65, 64)):
        assert of(total * MIB).task_bytes == each * MIB
    assert of(MIB, 2**16).task_bytes == 2**16
    with pytest.raises(sw.LayoutError, match="task_bytes is 65535; it must be at least 65536"):
        of(MIB, 2**16 - 1)


def test_a_plan_knows_from_where_to_where_it_reads_a_file(tmp_path: Path) -> None:
    sw.save_checkpoint(tmp_path / "a.safetensors", {"a": np.zeros((2, 3), "f4"), "b": np.zeros(5, "u1")})
    size = (tmp_path / "a.safetensors").stat().st_size
    (source,) = sw.plan_checkpoint(tmp_path / "a.safetensors", tmp_path / "b.safetensors").sources
    assert isinstance(source, SourceFile)
    assert (source.begin, source.end, source.size) == (size - 29, size, size)


def test_rows_of_what_is_written_are_in_c_order(tmp_path: Path) -> None:
    layout = sw.TensorLayout((None, ("x",), None), sw.DeviceMesh((2,), ("x",)))
    tensors = {"w": np.zeros((3, 4, 5), "f4"), "s": np.float64(1), "n": np.zeros((2, 0), "u1")}
    sw.save_checkpoint(tmp_path / "a.safetensors", tensors)
    made = sw.plan_checkpoint(tmp_path / "a.safetensors", tmp_path / "b", {"w": layout})
    starts = [file.start for file in made.files]
    rows = {tensor.name: tensor.targets.rows.tolist() for tensor in made.tensors}
    strides = contiguous_strides((3, 2, 5), 4)
    # The scalar has the largest elements, so it comes first in the file of the first device.
    assert rows["w"] == [
        [0, starts[0] + 8, 0, 0, 0, 3, 2, 5, *strides],
        [1, starts[1], 0, 2, 0, 3, 4, 5, *strides],
    ]
    assert rows["s"] == [[0, starts[0]]]
    assert rows["n"] == []
