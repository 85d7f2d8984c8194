"""From a store to a disk: the same tasks as from files, which fetch what they need into memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardwise as sw
from shardwise.store.data.engine import tensors_of
from shardwise.store.data.object_files import ObjectFile
from shardwise.store.data.objects import ObjectStatus
from shardwise.store.write.places.fetch import fetch_pieces
from tests.store.stores import Store
from tests.store.tasks import rules

pytestmark = pytest.mark.filterwarnings("ignore")


def put(store: Store, source: Path) -> sw.ObjectPath:
    place = store.place("src")
    store.put(source, place)
    return place


@pytest.mark.heavy
def test_memory(source: Path, memory: Store) -> None:
    place, new = put(memory, source), source.parent / "new"
    plan = sw.plan_checkpoint(place, new, rules(), task_bytes=1 << 20)
    with pytest.raises(sw.LayoutError, match=r"a task that fetches .* from a store needs .* smaller task_bytes"):
        plan.run(memory=1 << 18, threads=1)
    tasks = sw.plan_checkpoint(place, source.parent / "tasks", rules(), task_bytes=1 << 16)
    assert tasks.run(memory=1 << 18, threads=1) == len(tasks.tasks)
    plan.run(memory=4 << 20)
    plan.commit()
    small = sw.reshard_checkpoint(place, source.parent / "small", rules(), memory=1 << 20)
    assert isinstance(small, sw.store.WriteReport)
    assert sw.diff_checkpoints(new, source.parent / "small") == []


@pytest.mark.heavy
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
