"""What a plan says before anything is written: files, bytes, copies, memory, time; and what then becomes of it."""

from __future__ import annotations

import errno
import itertools
import os
import re
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from shardwise.cli import main
from shardwise.cli.plan import time_text
from shardwise.store.write.places import leftovers as disk
from shardwise.store.write.request import scratch
from shardwise.store.write.run import checkpoint_plan as forecast
from shardwise.store.write.run.checkpoint_plan import runs_to_copy
from tests.store.stores import Store

#: Expected of many of these tests, which are about something else.
pytestmark = [
    pytest.mark.filterwarnings("ignore:no rule that applies uses the axis:shardwise.ShardwiseWarning"),
    pytest.mark.filterwarnings("ignore:.*match(es)? no rule:shardwise.ShardwiseWarning"),
]

FORMS = ("safetensors", "hf", "sharded", "dcp")
TURNED = {"from": {"name": "tied.{n}", "transpose": True}, "to": "turned.tied.{n}"}
SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "converted": {"dtype": "bfloat16"},
    "wider": {"dtype": "float64"},
    "rewritten": {"rewrites": sw.Rewrites([TURNED])},
    "rewritten and converted": {"rewrites": sw.Rewrites([TURNED]), "dtype": "float16"},
    "a choice": {"only": "tied|rows", "rename": [("^", "all.")]},
}


def layouts(*axes: str | None) -> sw.LayoutMap:
    rules = sw.LayoutMap(sw.DeviceMesh((3,), ("x",)))
    rules["rows|tied"] = axes
    return rules


def written(folder: Path, to: Any) -> Path:
    tied = np.arange(6 * 9, dtype="f4").reshape(6, 9)
    tensors = {"rows": tied + 1, "tied.a": tied, "tied.b": tied, "counts": np.arange(5), "scalar": np.array(2.5)}
    path = folder / ("old.safetensors" if to == "safetensors" else "old")
    sw.save_checkpoint(path, tensors, layouts("x", None) if to in ("sharded", "dcp") else None, to=to)
    return path


@pytest.mark.parametrize("how", SETTINGS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("to", FORMS)
def test_it_becomes_what_was_said(tmp_path: Path, form: str, to: Any, how: str) -> None:
    source = written(tmp_path, form)
    target = tmp_path / ("new.safetensors" if to == "safetensors" else "new")
    arguments = {**SETTINGS[how], "to": to, "layouts": layouts(None, "x") if to in ("sharded", "dcp") else None}
    before = sorted(tmp_path.rglob("*"))
    outline = sw.plan_checkpoint(source, target, **arguments).outline()
    assert sorted(tmp_path.rglob("*")) == before
    report = sw.reshard_checkpoint(source, target, **arguments)
    assert isinstance(report, sw.store.WriteReport)
    assert outline.bytes == report.bytes == sum(size for _, size in outline.files)
    assert outline.bytes_read is not None
    assert outline.bytes_read == report.bytes_written  # What is between the tensors of a source may be read as well.
    assert outline.bytes_read <= report.bytes_read
    for name, size in outline.files:
        assert (target / name if target.is_dir() else target).stat().st_size == size
    with sw.open_checkpoint(target) as checkpoint:
        ties = [name for name, tensor in checkpoint.items() if tensor.alias_of is not None]
        assert len(ties) == 1
        assert ties[0].endswith("tied.b")


@pytest.mark.parametrize(
    ("before", "after", "runs"),
    [
        # Six rows of nine, cut in three: of two rows each, or of three columns.
        ((None, None), (None, None), 1),
        (("x", None), (None, None), 3),
        ((None, "x"), (None, None), 18),
        (("x", None), ("x", None), 3),
        (("x", None), (None, "x"), 18),
        ((None, "x"), ("x", None), 18),
    ],
)
def test_copies_of_contiguous_bytes(tmp_path: Path, before: Any, after: Any, runs: int) -> None:
    sw.save_checkpoint(tmp_path / "a", {"rows": np.zeros((6, 9), "f4")}, layouts(*before), to="sharded")
    outline = sw.plan_checkpoint(tmp_path / "a", tmp_path / "b", layouts(*after), to="dcp").outline()
    assert outline.operations == runs


def one_by_one(plan: sw.CheckpointPlan) -> int:
    """The same, of each element whether it is next to the one before it, in the source and in the file."""
    runs = 0
    for tensor in plan.tensors:
        rank = len(tensor.shape)
        for source, target in itertools.product(tensor.sources.rows.tolist(), tensor.targets.rows.tolist()):
            sides = [
                range(max(source[2 + d], target[2 + d]), min(source[2 + rank + d], target[2 + rank + d]))
                for d in range(rank)
            ]
            last: list[int] | None = None
            for element in itertools.product(*sides):
                at = [
                    sum((i - row[2 + d]) * row[2 + 2 * rank + d] for d, i in enumerate(element))
                    for row in (source, target)
                ]
                runs += last is None or at != [each + tensor.itemsize for each in last]
                last = at
    return runs


SPECS = [(), ("x",), ("y",), ("x", "y"), ("y", "x")]


@pytest.mark.heavy
@settings(max_examples=60)
@given(data=st.data(), pairs=st.sampled_from([1, 3, 1 << 18]), few=st.sampled_from([1, 16]))
def test_any_cut_to_any_other(data: st.DataObject, pairs: int, few: int) -> None:
    mesh = sw.DeviceMesh((2, 3), ("x", "y"))
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=3)))

    def layout() -> sw.TensorLayout:
        specs: list[tuple[str, ...]] = []
        for _ in shape:
            used = {axis for spec in specs for axis in spec}
            specs.append(data.draw(st.sampled_from([spec for spec in SPECS if not used & set(spec)])))
        return sw.TensorLayout(specs, mesh)

    values: npt.NDArray[Any] = np.zeros(shape, "f4")
    with tempfile.TemporaryDirectory() as folder:
        sw.save_checkpoint(
            Path(folder, "a"), {"w": values}, {"w": layout()}, to="sharded", uneven="balanced", sync=False
        )
        plan = sw.plan_checkpoint(
            Path(folder, "a"), Path(folder, "b"), {"w": layout()}, to="sharded", uneven="balanced"
        )
        assert runs_to_copy(plan) == one_by_one(plan)
        found = (each.sources.runs_into(each.targets, each.itemsize, few, pairs) for each in plan.tensors)
        assert sum(found) == one_by_one(plan)


@pytest.mark.parametrize(
    ("seconds", "time"),
    [
        (0.0, "a few seconds at most"),
        (1.9, "a few seconds at most"),
        (2.0, "about 2 seconds"),
        (119.0, "about 119 seconds"),
        (120.0, "about 2 minutes"),
        (7140.0, "about 119 minutes"),
        (7200.0, "about 2 hours"),
        (36000.0, "about 10 hours"),
    ],
)
def test_times_are_said_in_words(seconds: float, time: str) -> None:
    assert time_text(seconds) == f"{time}, estimated from a sample"


def test_the_command_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = written(tmp_path, "safetensors")
    assert main(["plan", str(source), str(tmp_path / "new.safetensors")]) == 0
    said = capsys.readouterr().out
    assert "would be 1 file" in said
    assert re.search(r"480 B are read, in 4 contiguous parts; .*, estimated from a sample\n", said)
    assert "are free" in said


def test_of_a_store_only_what_is_known_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fsspec")
    assert main(["plan", str(written(tmp_path, "hf")), "memory://outlined", "--to", "hf"]) == 0
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first.startswith("memory://outlined would be 1 file, ")
    assert first.endswith(" of memory in 1 thread")
    assert second.split() == ["file", "bytes"]
    assert not sw.ObjectPath("memory://outlined").exists()


def test_where_nothing_can_be_written_there_is_no_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    source = written(tmp_path, "hf")
    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    outline = sw.plan_checkpoint(source, tmp_path / "new").outline()
    assert outline.seconds is None
    assert main(["plan", str(source), str(tmp_path / "new")]) == 0
    assert "no estimate of the time" in capsys.readouterr().out


@pytest.mark.parametrize("size", [0, 1, 1 << 21])
def test_a_sample_of_any_size(tmp_path: Path, size: int) -> None:
    sw.save_checkpoint(tmp_path / "a.safetensors", {"w": np.zeros(size, "u1")})
    for dtype in (None, "float16"):
        outline = sw.plan_checkpoint(tmp_path / "a.safetensors", tmp_path / "b", dtype=dtype).outline()
        assert outline.seconds is not None
        assert outline.seconds >= 0
        assert outline.bytes_read == size


def test_a_sample_goes_through_small_files(tmp_path: Path) -> None:
    """Twelve of 300,000 bytes: three blocks of a MiB and the rest, each byte from its place in a tensor."""
    values = np.random.default_rng(0).integers(0, 256, (12, 300_000), np.uint8)
    mesh = sw.DeviceMesh((12,), ("x",))
    sw.save_checkpoint(tmp_path / "a", {"w": values}, {"w": sw.TensorLayout(("x", None), mesh)}, to="sharded")
    plan = sw.plan_checkpoint(tmp_path / "a", tmp_path / "b.safetensors")
    found = [bytes(block) for block in forecast._sample(plan, 1 << 24)]
    assert sum(map(len, found)) == 4 << 20  # The last block overlaps the one before it.
    whole = values.tobytes()
    assert b"".join(found)[: 1 << 20] == whole[: 1 << 20]
    assert b"".join(found)[-(1 << 20) :] == whole[-(1 << 20) :]
    few = b"".join(forecast._sample(plan, 1000))
    assert few == whole[:1000]


#: More runs, of fewer bytes, than are copied one by one.
TURNED_PARTS = sw.Rewrites(
    [{"from": {"name": "w", "packed": "(300 [a:1 b:1])"}, "to": {"name": "w", "packed": "b:(300) + a:(300)"}}]
)


@pytest.mark.parametrize(
    ("case", "beside", "arguments"),
    [
        ("converted", 600 * 9 * 2, {"dtype": "bfloat16"}),
        ("put together", 600 * 9 * 4, {"rewrites": TURNED_PARTS}),
        ("fetched and converted", 600 * 9 * 2, {"dtype": "bfloat16"}),
    ],
)
def test_there_is_room_for_what_is_written_first(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    beside: int,
    arguments: dict[str, Any],
) -> None:
    """Before anything is read; the source is opened once."""
    source: Any = tmp_path / "old.safetensors"
    sw.save_checkpoint(source, {"w": np.arange(5400, dtype="f4").reshape(600, 9)})
    if case == "fetched and converted":
        memory: Store = request.getfixturevalue("memory")
        memory.put(source, source := memory.place("old.safetensors"))
    target = tmp_path / "new" / "model.safetensors"
    target.parent.mkdir()
    outline = sw.plan_checkpoint(source, target, **arguments).outline()
    closed = 0
    close = sw.store.StoredCheckpoint.close

    def counted(checkpoint: sw.store.StoredCheckpoint) -> None:
        nonlocal closed
        closed += 1
        close(checkpoint)

    monkeypatch.setattr(sw.store.StoredCheckpoint, "close", counted)
    monkeypatch.setattr(disk, "free_space", lambda _: outline.bytes + beside - 1)
    with pytest.raises(OSError, match=r"written next to it first, takes .* are free") as caught:
        sw.reshard_checkpoint(source, target, **arguments)
    assert caught.value.errno == errno.ENOSPC
    assert list(target.parent.iterdir()) == []
    monkeypatch.setattr(disk, "free_space", lambda _: outline.bytes + beside + 2**15)
    sw.reshard_checkpoint(source, target, **arguments)
    assert closed == 2
    assert [path.name for path in target.parent.iterdir()] == ["model.safetensors"]


def test_nothing_is_written_first_for_a_name_that_is_taken_in_a_store(
    tmp_path: Path, memory: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, place = written(tmp_path, "safetensors"), memory.place("new")
    arguments: dict[str, Any] = {"dtype": "float16", "to": "sharded"}
    sw.reshard_checkpoint(source, place, **arguments)
    tensor = scratch.ScratchFile.tensor

    def dry_only(self: scratch.ScratchFile, *given: Any, **named: Any) -> Any:
        assert self.is_dry
        return tensor(self, *given, **named)

    monkeypatch.setattr(scratch.ScratchFile, "tensor", dry_only)
    with pytest.raises(FileExistsError, match="exists already"):
        sw.reshard_checkpoint(source, place, **arguments)


def test_no_sample_says_how_fast_a_store_is(tmp_path: Path, memory: Store) -> None:
    source = written(tmp_path, "safetensors")
    place = memory.place("old.safetensors")
    memory.put(source, place)
    for src, dst in ((place, tmp_path / "new"), (source, memory.place("new"))):
        outline = sw.plan_checkpoint(src, dst).outline()
        assert outline.seconds is None


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no FIFOs")
def test_no_sample_is_taken_of_a_source_that_changed(tmp_path: Path) -> None:
    source = written(tmp_path, "safetensors")
    plan = sw.plan_checkpoint(source, tmp_path / "new")
    assert plan.outline().seconds is not None
    source.write_bytes(source.read_bytes()[:-1])
    assert plan.outline().seconds is None
    source.unlink()
    os.mkfifo(source)
    found: list[float | None] = []
    thread = threading.Thread(target=lambda: found.append(plan.outline().seconds), daemon=True)
    thread.start()
    thread.join(600)
    assert found == [None]
