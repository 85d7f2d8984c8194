"""What is converted or put together beside the destination: tied tensors, interrupted runs, two runs at once."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.store.write.request import scratch
from tests.checks import same_tensors
from tests.store.trips import Stopped

#: Expected of many of these tests, which are about something else.
pytestmark = pytest.mark.filterwarnings("ignore:the layouts cut:shardwise.ShardwiseWarning")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    rng = np.random.default_rng(3)
    sw.save_checkpoint(tmp_path / "source.safetensors", {f"w.{i}": rng.standard_normal((64, 512)) for i in range(8)})
    return tmp_path / "source.safetensors"


def float32(source: Path) -> dict[str, bytes]:
    with sw.open_checkpoint(source) as checkpoint:
        return {name: checkpoint.read(name).astype("f4").tobytes() for name in checkpoint}


def stored(path: Path) -> dict[str, bytes]:
    with sw.open_checkpoint(path) as checkpoint:
        return {name: checkpoint.read(name).tobytes() for name in checkpoint}


class After:
    """Stops a run, or does something once, after this many tasks."""

    def __init__(self, count: int, act: Any = None) -> None:
        self.count, self.act = count, act

    def __call__(self, done: int, total: int) -> None:
        self.count -= 1
        if self.count == 0:
            if self.act is None:
                raise Stopped
            self.act()


PLANNED: dict[str, Any] = {"to": "hf", "dtype": "float32", "task_bytes": 2**16}
SETTINGS: dict[str, Any] = {**PLANNED, "threads": 1}


def test_an_interrupted_conversion_continues_after_the_tasks_that_are_done(tmp_path: Path, source: Path) -> None:
    with pytest.raises(Stopped):
        sw.reshard_checkpoint(source, tmp_path / "new", **SETTINGS, progress=After(5))
    report = sw.reshard_checkpoint(source, tmp_path / "new", **SETTINGS, resume=True)
    assert isinstance(report, sw.store.WriteReport)
    assert 0 < report.bytes_resumed < 8 * 64 * 512 * 4
    assert report.bytes_resumed + report.bytes_written == 8 * 64 * 512 * 4
    assert stored(tmp_path / "new") == float32(source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "source.safetensors"]


def test_it_starts_over_if_the_source_is_another(tmp_path: Path, source: Path) -> None:
    """With the same names, sizes and time, so that only the elements can tell."""
    status = source.stat()
    with pytest.raises(Stopped):
        sw.reshard_checkpoint(source, tmp_path / "new", **SETTINGS, progress=After(5))
    data = bytearray(source.read_bytes())
    data[-4] ^= 1  # Of the last element, which float32 keeps.
    source.write_bytes(data)
    os.utime(source, ns=(status.st_mtime_ns, status.st_mtime_ns))
    with pytest.warns(sw.ShardwiseWarning, match="nothing is resumed: .* its source has changed"):
        report = sw.reshard_checkpoint(source, tmp_path / "new", **SETTINGS, resume=True)
    assert isinstance(report, sw.store.WriteReport)
    assert report.bytes_resumed == 0
    assert stored(tmp_path / "new") == float32(source)


def test_no_other_run_disturbs_a_conversion(tmp_path: Path, source: Path) -> None:
    """A dry run, a plan, a run that is refused, and one whose destination has a shorter name."""
    new = tmp_path / "new.x"

    def others() -> None:
        sw.plan_checkpoint(source, new, **PLANNED).outline()
        sw.plan_checkpoint(source, new, to="hf")
        for dtype in ("float32", "float16", None):
            with pytest.raises(BlockingIOError, match="is locked by process"):
                sw.reshard_checkpoint(source, new, **{**SETTINGS, "dtype": dtype})
        with pytest.raises(BlockingIOError, match="is locked by process"):
            sw.save_checkpoint(new, {"w": np.ones(3)})
        sw.reshard_checkpoint(source, tmp_path / "new", **SETTINGS)

    sw.reshard_checkpoint(source, new, **SETTINGS, progress=After(2, others))
    assert stored(new) == stored(tmp_path / "new") == float32(source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "new.x", "source.safetensors"]


@pytest.mark.parametrize("plan", [False, True])
def test_a_destination_that_exists_is_refused_before_anything_is_converted(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, plan: bool
) -> None:
    (tmp_path / "new").mkdir()
    monkeypatch.setattr(sw.store.StoredTensor, "read", None)
    run: Any = sw.plan_checkpoint if plan else partial(sw.reshard_checkpoint, threads=1)
    with pytest.raises(FileExistsError, match="exists already"):
        run(source, tmp_path / "new", **PLANNED)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "source.safetensors"]


@pytest.mark.parametrize("plan", [False, True])
def test_too_little_memory_for_a_row_is_refused_before_anything_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: bool
) -> None:
    tensors = {"a": np.ones((4, 3)), "z": np.ones((2, 9000))}
    sw.save_checkpoint(tmp_path / "a", tensors)
    monkeypatch.setattr(sw.store.StoredTensor, "read", None)
    run: Any = sw.plan_checkpoint if plan else sw.reshard_checkpoint
    with pytest.raises(sw.LayoutError, match=r"'z' takes 70\.3 KiB .* at least 140\.6 KiB are needed"):
        run(tmp_path / "a", tmp_path / "b", dtype="float32", memory=2**17)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("to", ["safetensors", "hf", "sharded", "dcp"])
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_tied_tensors_stay_tied_if_they_are_put_together_in_a_file(tmp_path: Path, to: Any, dtype: str | None) -> None:
    rows = np.arange(1200.0).reshape(600, 2)
    others = {"one_other": rows + 1, "two_other": rows + 1}
    sw.save_checkpoint(tmp_path / "a", {"one": rows, "two": rows, **others})
    fused = {"packed": "(300 [q:1 k:1])"}
    rewrites = sw.Rewrites(
        [{"from": {"name": "{n}", **fused}, "to": {"parts": {"q": "{n}.q", "k": "{n}.k"}}}], unmatched="refuse"
    )
    outline = sw.plan_checkpoint(tmp_path / "a", tmp_path / "b", to=to, rewrites=rewrites, dtype=dtype).outline()
    report = sw.reshard_checkpoint(tmp_path / "a", tmp_path / "b", to=to, rewrites=rewrites, dtype=dtype)
    assert isinstance(report, sw.store.WriteReport)
    assert outline.bytes == report.bytes
    into = np.dtype(dtype or "f8")
    with sw.open_checkpoint(tmp_path / "b") as checkpoint:
        for name, value in (("one", rows), ("two", rows), ("one_other", rows + 1), ("two_other", rows + 1)):
            assert checkpoint.read(f"{name}.q").tobytes() == value[::2].astype(into).tobytes()
            assert checkpoint.read(f"{name}.k").tobytes() == value[1::2].astype(into).tobytes()
        ties = {name: tensor.alias_of for name, tensor in checkpoint.items() if tensor.alias_of is not None}
    assert {frozenset(pair) for pair in ties.items()} == {frozenset({f"one.{part}", f"two.{part}"}) for part in "qk"}
    # Equal values are not tied: each has its own elements.
    assert report.bytes_written == 6 * 600 * into.itemsize


@pytest.mark.parametrize("to", ["safetensors", "sharded", "dcp"])
def test_tasks_write_a_tensor_in_short_runs_as_any_other(tmp_path: Path, to: Any) -> None:
    """A saved plan has its pieces, so each task puts its own part together; nothing is written beside it first."""
    values = np.random.default_rng(5).integers(0, 2**16, (512, 600), "u2")
    sw.save_checkpoint(tmp_path / "a", {"w": values, "v": np.arange(7.0)})
    # Columns of two halves in turns: 2 bytes each.
    turns = sw.Rewrites(
        [{"from": {"name": "w", "dims": "n (a b) -> n a b", "a": 2}, "to": {"name": "w", "dims": "n (b a) -> n a b"}}]
    )
    layouts = {"w": sw.TensorLayout((None, "x"), sw.DeviceMesh((3,), ("x",)))}
    plan = sw.plan_checkpoint(tmp_path / "a", tmp_path / "b", layouts, to=to, rewrites=turns, task_bytes=2**16)
    plan.save(tmp_path / "plan")
    loaded = sw.store.CheckpointPlan.load(tmp_path / "plan")
    assert len(loaded.tasks) > 3
    assert sum(loaded.run((part, 3)) for part in (3, 1, 2)) == len(loaded.tasks)
    loaded.commit()
    with sw.open_checkpoint(tmp_path / "b") as checkpoint:
        assert np.array_equal(checkpoint.read("w"), values.reshape(512, 2, 300).swapaxes(1, 2).reshape(512, 600))
        assert checkpoint.read("v").tolist() == [*range(7)]


def test_a_plan_has_a_bounded_number_of_short_runs(tmp_path: Path) -> None:
    """The refusal says how many there are, and the way that it names leads there."""
    values = np.random.default_rng(5).integers(0, 2**8, (2048, 4096), "u1")
    sw.save_checkpoint(tmp_path / "a", {"w": values})
    turns = sw.Rewrites(
        [
            {
                "from": {"name": "w", "dims": "(a b) (c d) -> a b c d", "a": 2, "c": 2},
                "to": {"name": "w", "dims": "(b a) (d c) -> a b c d"},
            }
        ]
    )
    plan = sw.plan_checkpoint(tmp_path / "a", tmp_path / "b", rewrites=turns)
    with pytest.raises(TypeError, match=f"have {1024 * 2048} short runs together, and a plan has at most {2**20}; "):
        plan.save(tmp_path / "plan")
    sw.reshard_checkpoint(tmp_path / "a", tmp_path / "b", rewrites=turns, memory=2**24)
    with sw.open_checkpoint(tmp_path / "b") as checkpoint:
        expected = values.reshape(2, 1024, 2, 2048).transpose(1, 0, 3, 2).reshape(2048, 4096)
        assert np.array_equal(checkpoint.read("w"), expected)


@pytest.mark.parametrize(("memory", "rows"), [(80, [1] * 5), (159, [1] * 5), (320, [2, 2, 1]), (800, [5]), (900, [5])])
def test_blocks_to_be_converted_take_a_quarter_of_the_memory(memory: int, rows: list[int]) -> None:
    """Rows of 40 bytes; two of them must fit in the memory."""
    tensor: Any = SimpleNamespace(shape=(5, 10), nbytes=200, name="w")
    blocks = list(scratch._blocks(tensor, memory))
    assert [block[0].stop - block[0].start for block in blocks] == rows
    assert [block[0].start for block in blocks] == [sum(rows[:i]) for i in range(len(rows))]
    assert all(block[1] == slice(0, 10) for block in blocks)
    with pytest.raises(sw.LayoutError, match=r"memory is 79 B; a row of tensor 'w' takes 40 B .* at least 80 B"):
        list(scratch._blocks(tensor, 79))


def test_what_a_killed_conversion_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that are converted wait in files beside the new checkpoint, which a run that is killed leaves there."""
    sw.save_checkpoint(tmp_path / "a.safetensors", {"w": np.arange(6, dtype="f4")})

    def made(name: str) -> set[str]:
        sw.reshard_checkpoint(tmp_path / "a.safetensors", tmp_path / name, dtype="float64")
        same_tensors(tmp_path / name, {"w": np.arange(6.0)})
        return {path.name for path in tmp_path.iterdir() if path.name.startswith(".")}

    with monkeypatch.context() as patch:
        patch.setattr(scratch.ScratchFile, "close", lambda self: None)
        (left,) = made("b.safetensors")
    (tmp_path / "b.safetensors").unlink()
    assert made("c.safetensors") == {left}  # It is another checkpoint's.
    assert made("b.safetensors") == set()
