"""From a store to a disk: the same tasks as from files, which fetch what they need into memory."""

from __future__ import annotations

import random
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardwise as sw
from shardwise.store.engine import tensors_of
from shardwise.store.object_files import ObjectFile
from shardwise.store.objects import ObjectStatus
from shardwise.store.write.gather import fetch_pieces
from tests.store.stores import Store
from tests.store.tasks import TASK, contents, direct, rules, saved, write_replica

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return saved(tmp_path)


def put(store: Store, source: Path) -> sw.ObjectPath:
    place = store.place("src")
    store.put(source, place)
    return place


def test_parts_of_a_saved_plan_in_any_order(source: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    if store.toxic is not None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.toxic.url)
    place, new = str(put(store, source)), source.parent / "new"
    sw.plan_checkpoint(place, new, rules(), task_bytes=TASK).save(source.parent / "new.swplan")
    parts = list(range(1, 6))
    random.Random(5).shuffle(parts)
    for part in parts:
        plan = sw.CheckpointPlan.load(source.parent / "new.swplan")
        assert plan.run((part, 5)) == len(plan.part(part, 5))
        plan.run(tasks=list(plan.part(part, 5))[::3])
        assert plan.run((part, 5)) == 0
    report = plan.commit(check=True)
    assert report.bytes_read >= report.bytes - len(plan.files) * 4096
    assert (plan.run(), plan.commit().bytes_written) == (0, 0)
    assert contents(new) == direct(source)


@pytest.mark.parametrize("to", ["safetensors", "hf", "sharded", "dcp"])
def test_the_same_bytes_as_from_files(source: Path, memory: Store, to: Any) -> None:
    layouts = rules() if to in ("sharded", "dcp") else None
    names = ("a.safetensors", "b.safetensors") if to == "safetensors" else ("a", "b")
    sw.reshard_checkpoint(source, source.parent / names[0], layouts, to=to, task_bytes=TASK)
    place = put(memory, source)
    report = sw.reshard_checkpoint(place, source.parent / names[1], layouts, to=to, task_bytes=TASK)
    assert isinstance(report, sw.store.WriteReport)
    made = [source.parent / name for name in names]
    if to == "safetensors":
        assert made[0].read_bytes() == made[1].read_bytes()
    else:
        assert contents(made[0]) == contents(made[1])
    assert sw.diff_checkpoints(place, made[1]) == []


class Stopped(Exception):
    pass


def test_an_interrupted_run_goes_on(source: Path, memory: Store) -> None:
    place, new = put(memory, source), source.parent / "new"

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise Stopped

    with pytest.raises(Stopped):
        sw.reshard_checkpoint(place, new, rules(), task_bytes=TASK, threads=1, progress=stop)
    report = sw.reshard_checkpoint(place, new, rules(), task_bytes=TASK, resume=True)
    assert isinstance(report, sw.store.WriteReport)
    assert report.bytes_resumed > 0
    assert contents(new) == direct(source)


def test_executors(source: Path, s3: Store, memory: Store) -> None:
    new = source.parent / "new"
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:
        sw.reshard_checkpoint(put(s3, source), new, rules(), task_bytes=TASK, executor=processes)
        inside = put(memory, source)
        with pytest.raises(TypeError, match=r"memory://.* is in the memory of this process"):
            sw.reshard_checkpoint(inside, source.parent / "b", rules(), executor=processes)
    with ThreadPoolExecutor(2) as threads:
        sw.reshard_checkpoint(inside, source.parent / "c", rules(), task_bytes=TASK, executor=threads)
    wanted = direct(source)
    for name in ("new", "c"):
        assert {path.name: path.read_bytes() for path in (source.parent / name).iterdir()} == wanted


def test_memory(source: Path, memory: Store) -> None:
    place, new = put(memory, source), source.parent / "new"
    plan = sw.plan_checkpoint(place, new, rules(), task_bytes=1 << 20)
    with pytest.raises(sw.LayoutError, match=r"a task that fetches .* from a store needs .* smaller task_bytes"):
        plan.run(memory=1 << 18, threads=1)
    plan.run(memory=4 << 20)
    plan.commit()
    small = sw.reshard_checkpoint(place, source.parent / "small", rules(), memory=1 << 20)
    assert isinstance(small, sw.store.WriteReport)
    assert sw.diff_checkpoints(new, source.parent / "small") == []


def test_an_object_that_is_replaced_is_refused(source: Path, store: Store) -> None:
    place = put(store, source)
    plan = sw.plan_checkpoint(place, source.parent / "new", rules(), task_bytes=TASK)
    plan.run((1, 2))
    for path in source.glob("*.safetensors"):
        place.filesystem.pipe_file((place / path.name).key, path.read_bytes()[:-1] + b"!")
    with pytest.raises(sw.ParseError, match="a different object than before"):
        plan.run((2, 2))


@pytest.mark.parametrize("to", ["sharded", "dcp"])
def test_replicas_are_compared(memory: Store, tmp_path: Path, to: Any) -> None:
    (tmp_path / "source").mkdir()
    values = np.arange(32, dtype="f4").reshape(4, 8)
    layouts = {"w": sw.TensorLayout((None, "x"), sw.DeviceMesh((4,), ("x",)))}
    for different in (True, False):
        other = values.copy()
        other[3, 7] += different
        write_replica(tmp_path / "source", 1, values)
        write_replica(tmp_path / "source", 2, other)
        place, new = put(memory, tmp_path / "source"), tmp_path / f"new-{different}"
        if different:
            with pytest.raises(sw.ParseError, match=r"'w': replicas disagree.*memory://.*is \(3, 7\)"):
                sw.reshard_checkpoint(place, new, layouts, to=to)
            sw.reshard_checkpoint(place, new, layouts, to=to, replicas="first")
        else:
            sw.reshard_checkpoint(place, new, layouts, to=to)
        with sw.open_checkpoint(new) as checkpoint:
            assert checkpoint.read("w").tolist() == values.tolist()


def test_tensors_that_lie_together_are_fetched_together(memory: Store, tmp_path: Path) -> None:
    """A request for each of many small tensors would take a minute where one takes a moment."""
    tensors = {f"{i}": np.full(64, i, "u2") for i in range(3000)}
    sw.save_checkpoint(tmp_path / "a.safetensors", tensors)
    place = memory.place("a.safetensors")
    memory.put(tmp_path / "a.safetensors", place)
    asked: list[tuple[int, int]] = []
    plan = sw.plan_checkpoint(place, tmp_path / "b.safetensors")
    get = sw.ObjectPath.read_into

    def counted(path: sw.ObjectPath, buffer: memoryview, start: int, mark: str) -> None:
        asked.append((start, start + len(buffer)))
        get(path, buffer, start, mark)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sw.ObjectPath, "read_into", counted)
        plan.run()
    plan.commit()
    assert 0 < len(asked) <= 4
    assert (tmp_path / "b.safetensors").read_bytes() == (tmp_path / "a.safetensors").read_bytes()


@pytest.mark.parametrize(("gap", "windows"), [(60, 1), (110, 1), (120, 2), (150, 2)])
def test_a_window_is_a_quarter_more_than_its_pieces_and_64_kib(memory: Store, gap: int, windows: int) -> None:
    """Two pieces of 100 KiB: fetched together where no more than 50 + 64 KiB lie between them."""
    kib = 1 << 10
    place = memory.place("a")
    place.filesystem.pipe_file(place.key, bytes(400 * kib))
    rows = [[1, 1, 1, 1, 0, 100 * kib, 0, at, 0, 100 * kib, 1] for at in (0, (100 + gap) * kib)]
    program = np.array(rows, np.int64).reshape(-1)
    arrays, nbytes = fetch_pieces(list(tensors_of(program)), [ObjectFile(place, place.status())], 1 << 30, 0)
    assert (len(arrays), nbytes) == (windows, (200 + gap * (windows == 1)) * kib)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_every_piece_is_found_in_its_window(memory: Store, data: st.DataObject) -> None:
    """Of programs with pieces of any strides, near and far, the arrays have what the object has."""
    length = 1 << 20
    values = np.random.default_rng(7).integers(0, 256, length, "u1")
    place = memory.place("a")
    place.filesystem.pipe_file(place.key, values.tobytes())
    status = place.status()
    rows, boxes = [], []
    for _ in range(data.draw(st.integers(1, 6))):
        itemsize = data.draw(st.sampled_from([1, 2, 8]))
        extents = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 40)))
        strides = (data.draw(st.integers(1, 100_000)), data.draw(st.sampled_from([itemsize, 3 * itemsize, 999])))
        reach = sum((a - 1) * b for a, b in zip(extents, strides, strict=True)) + itemsize
        if reach > length:
            continue
        offset = data.draw(st.integers(0, length - reach))
        row = [0, offset, 0, 0, *extents, *strides]
        rows += [itemsize, 1, 2, 1, 0, *extents, *row]
        boxes.append(np.ndarray(extents, f"V{itemsize}", values.data, offset, strides).tobytes())
    program = np.array(rows, np.int64)
    source = ObjectFile(place, ObjectStatus(*status))
    arrays, nbytes = fetch_pieces(list(tensors_of(program)), [source], 1 << 30, 0)
    assert nbytes <= 2 * sum(map(len, boxes)) + len(boxes) * (1 << 16)
    at = 0
    for box in boxes:
        itemsize, extents = int(program[at]), tuple(program[at + 5 : at + 7].tolist())
        holder, offset, *rest = program[at + 7 : at + 15].tolist()
        at += 15
        raw = arrays[holder - 1].reshape(-1).view(np.uint8)
        assert np.ndarray(extents, f"V{itemsize}", raw.data, offset, tuple(rest[4:])).tobytes() == box
