"""Arrays saved: views, shards, flat parameters, files and names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import shardwise as sw
from tests.checks import same_tensors
from tests.store.tasks import MESH, mixed, mixed_rules

#: Expected of many of these tests, which are about something else.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*match(es)? no rule:shardwise.ShardwiseWarning"),
    pytest.mark.filterwarnings("ignore:no rule that applies uses the axis:shardwise.ShardwiseWarning"),
]


def test_the_safetensors_package_reads_what_is_written(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    whole = {name: value for name, value in mixed().items() if name != "complex"}
    sw.save_checkpoint(tmp_path / "a.safetensors", whole)
    loaded = safetensors.load_file(tmp_path / "a.safetensors")
    assert {name: value.tobytes() for name, value in loaded.items()} == {n: v.tobytes() for n, v in whole.items()}
    sharded = sw.distribute_tensor(whole["wte"], sw.TensorLayout((None, "model"), MESH))
    sw.save_checkpoint(tmp_path / "s", {"wte": sharded})
    files = sorted((tmp_path / "s").glob("*.safetensors"))
    columns = [safetensors.load_file(file)["wte"] for file in files]
    assert np.array_equal(np.concatenate(columns, axis=1), whole["wte"])


def test_strided_views_are_written_right(tmp_path: Path) -> None:
    base = np.arange(60).reshape(6, 10)
    views = {
        "columns": base[:, 3:5],
        "stepped": base[::2],
        "transposed": base.T,
        "reversed": base[::-1, ::-1],
        "repeated": np.broadcast_to(np.float32(2), (3, 4)),
        "big": base.astype(">i8"),
    }
    sw.save_checkpoint(tmp_path / "a.safetensors", views)
    expected = {name: np.ascontiguousarray(view).astype(view.dtype.newbyteorder("<")) for name, view in views.items()}
    same_tensors(tmp_path / "a.safetensors", expected)


def test_replicas_that_disagree_are_named(tmp_path: Path) -> None:
    layout = sw.TensorLayout(("data", None), sw.DeviceMesh((2, 2), ("data", "rest")))
    value = np.arange(12.0).reshape(4, 3)
    shards = [np.array(shard.data) for shard in sw.distribute_tensor(value, layout).shards]
    shards[1][0, 2] = -1
    drifted = sw.ShardedArray(layout.partition((4, 3)), shards)
    with pytest.raises(sw.LayoutError, match="cpu:1"):
        sw.save_checkpoint(tmp_path / "a", {"w": drifted})
    assert list(tmp_path.iterdir()) == []
    sw.save_checkpoint(tmp_path / "a", {"w": drifted}, check=False)
    same_tensors(tmp_path / "a", {"w": value})


@pytest.mark.parametrize(
    ("most", "expected"),
    [(10**6, [["a", "b", "c"]]), (48, [["a", "b", "c"]]), (47, [["a", "b"], ["c"]]), (32, [["a", "b"], ["c"]]),
     (31, [["a"], ["b"], ["c"]]), (16, [["a"], ["b"], ["c"]]), (np.int64(1), [["a"], ["b"], ["c"]])],
)  # fmt: skip
def test_files_of_at_most_so_many_bytes(tmp_path: Path, most: int, expected: list[list[str]]) -> None:
    """Three tensors of 16 bytes; one that is larger than a file may be has its own."""
    sw.save_checkpoint(tmp_path / "made", {name: np.ones(2) for name in "abc"}, to="hf", max_file_bytes=most)
    files = sorted((tmp_path / "made").glob("*.safetensors"))
    assert [sorted(safetensors.numpy.load_file(file)) for file in files] == expected


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [(n, sw.LayoutError, f"max_file_bytes is {n}; it must be a positive integer") for n in (0, -1, np.int8(0))]
    + [(what, TypeError, f"max_file_bytes must be an integer, got {what!r}") for what in (True, 1.5, "9", None)],
)
def test_files_of_no_bytes(tmp_path: Path, wrong: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sw.save_checkpoint(tmp_path / "made", {"a": np.ones(2)}, to="hf", max_file_bytes=wrong)
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:rule '.*' applies to no name:shardwise.ShardwiseWarning")
def test_the_header_of_a_shard_is_that_of_pytorch(tmp_path: Path) -> None:
    """As `HuggingFaceStorageWriter` has it, and of what it is a part; the rest is in the manifest alone."""
    sw.save_checkpoint(tmp_path / "made", {"h.0.b": np.arange(8.0)}, mixed_rules(), metadata={"note": "x"})
    for rank, file in enumerate(sorted((tmp_path / "made").glob("*.safetensors"))):
        with safetensors.safe_open(file, "np") as opened:
            info = json.dumps({"h.0.b": {"saved_offsets": [2 * rank]}})
            said = {"DCP_SHARDING_INFO": info, "DCP_VERSION": "1.0", "format": "pt", "note": "x"}
            said["shardwise.part"] = json.dumps({"files": 4, "shapes": {"h.0.b": [8]}}, separators=(",", ":"))
            assert opened.metadata() == said


def test_flat_parameters_are_saved(tmp_path: Path) -> None:
    """Ranges of the flattened tensor, as FSDP1 and ZeRO hold them, also with something between the elements."""
    value = np.arange(35.0).reshape(5, 7)
    ranges = {"a": (0, 11), "b": (11, 12), "c": (12, 12), "d": (12, 30), "e": (30, 35)}
    tiling = sw.Tiling.from_flat_ranges((5, 7), ranges)
    for step in (1, 3):
        shards = [np.repeat(value.reshape(-1)[start:stop], step)[::step] for start, stop in ranges.values()]
        path = tmp_path / f"{step}.safetensors"
        sw.save_checkpoint(path, {"w": sw.ShardedArray(tiling, shards), "b": np.ones(1)})
        same_tensors(path, {"w": value, "b": np.ones(1)})


@pytest.mark.parametrize("to", ["safetensors", "hf", "sharded", "dcp"])
def test_a_name_that_no_reader_here_takes_is_not_written(to: Any, tmp_path: Path) -> None:
    values = np.arange(4, dtype="float32")
    longest, path = "é" * 2048, tmp_path / ("made.safetensors" if to == "safetensors" else "made")
    with pytest.raises(sw.LayoutError, match="4097 bytes; a name that can be read has at most 4096") as caught:
        sw.save_checkpoint(path, {longest + "a": values}, to=to)
    assert len(str(caught.value)) < 1000
    assert list(tmp_path.iterdir()) == []
    sw.save_checkpoint(path, {longest: values}, to=to)
    with sw.open_checkpoint(path) as checkpoint:
        assert checkpoint[longest].read().tolist() == values.tolist()


@pytest.mark.parametrize("name", ["n" * 255, "é" * 127, "n" * 231, "n" * 230])
def test_names_may_be_as_long_as_the_file_system_allows(name: str, tmp_path: Path) -> None:
    saved, again = tmp_path / name, tmp_path / f"{name[:-1]}m"
    sw.save_checkpoint(saved, {"a": np.arange(4.0)})
    sw.reshard_checkpoint(saved, again)
    with sw.open_checkpoint(again) as stored:
        assert stored.read("a").tolist() == [0, 1, 2, 3]
    assert {path.name for path in tmp_path.iterdir()} == {saved.name, again.name}
