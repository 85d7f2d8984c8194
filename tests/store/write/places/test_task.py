"""Checkpoints written as tasks: in parts, twice, out of order, by any executor, killed, and refused."""

from __future__ import annotations

import itertools
import json
import math
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from shardwise.cli import main
from shardwise.pieces import Piece, Pieces
from shardwise.store.data.engine import DIGEST_MODULUS
from shardwise.store.write.places.place import receipt_from_line, receipt_line
from shardwise.store.write.places.task import TaskReceipt
from shardwise.store.write.plan.grids import TaskGrid, _joined, task_runs
from shardwise.store.write.plan.plan import WritePlan
from shardwise.store.write.run.run import parts_of
from tests.store.tasks import TASK, contents, direct, planned, rules, saved


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return saved(tmp_path)


@pytest.mark.heavy
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_tasks_tile_the_tensors_in_runs(data: st.DataObject) -> None:
    shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)
    tensors = data.draw(st.lists(st.tuples(shapes, st.sampled_from([1, 2, 8]), st.integers(1, 600)), max_size=5))
    most = data.draw(st.integers(8, 3000))
    grid = TaskGrid(task_runs(tensors, most), lambda number: tensors[number][:2])
    covered = [np.zeros(shape, int) for shape, _, _ in tensors]
    for task in range(len(grid)):
        boxes = grid.boxes(task)
        size = 0
        for number, box in boxes:
            covered[number][tuple(slice(*side) for side in box)] += 1
            size += math.prod(stop - start for start, stop in box) * tensors[number][1]
            # In C order it is one run: flat positions without a gap.
            flat = np.arange(covered[number].size).reshape(covered[number].shape)
            places = flat[tuple(slice(*side) for side in box)].reshape(-1)
            assert np.array_equal(places, np.arange(places[0], places[0] + len(places)))
        assert 0 < size <= most
        assert grid.bytes[task] == size
    assert all((counts == 1).all() for counts in covered)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_what_boxes_share_with_tasks_is_counted(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    tensors: list[tuple[tuple[int, ...], int, int]] = [((3,), 1, 1), (shape, 2, 1)]
    runs = task_runs(tensors, data.draw(st.integers(8, 200)))
    grid = TaskGrid(runs, lambda number: tensors[number][:2])
    found, inside = np.zeros(len(grid), np.int64), np.zeros(shape, int)
    boxes = []
    for _ in range(data.draw(st.integers(1, 3))):
        sides = [sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
        inside[tuple(slice(*side) for side in sides)] += 2
        boxes.append(sides)
    pieces = [Piece(tuple((a, b) for a, b in box), "r", 0, (0,) * len(shape)) for box in boxes]
    grid.add_overlaps(1, Pieces.of(pieces, len(shape)), found)
    for task in range(len(grid)):
        written = dict(grid.boxes(task))
        shared = int(inside[tuple(slice(*side) for side in written[1])].sum()) if 1 in written else 0
        assert found[task] == shared


def test_boxes_are_joined_where_one_follows_the_other_along_a_dim() -> None:
    """For all pairs of boxes of a small array: as one box if the second begins where the first ends, and only there."""
    sides = [(start, stop) for start in range(3) for stop in range(start + 1, 4)]
    for first in itertools.product(sides, repeat=2):
        for second in itertools.product(sides, repeat=2):
            counts = np.zeros((3, 3), int)
            for box in (first, second):
                counts[tuple(slice(*side) for side in box)] += 1
            found = _joined(first, second)
            around = tuple((min(a[0], b[0]), max(a[1], b[1])) for a, b in zip(first, second, strict=True))
            is_box = bool((counts[tuple(slice(*side) for side in around)] == 1).all())  # Both fill it, and once.
            follows = all(a[0] <= b[0] for a, b in zip(first, second, strict=True))
            assert found == (around if is_box and follows else None)


@pytest.mark.parametrize(
    ("sizes", "parts", "edges"),
    [
        # The middles are 5, 15 and 25 of 30: the second part begins with 15.
        ([10, 10, 10], 2, [0, 1, 3]),
        # 8, 22 and 30 of 31, which is cut at 15.
        ([16, 13, 2], 2, [0, 1, 3]),
        # 1, 3, 54 of 106, which is cut at 35 and 70: the last part has none.
        ([2, 2, 102], 3, [0, 2, 3, 3]),
        ([7] * 5, 5, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_a_task_is_of_the_part_in_which_its_middle_is(sizes: list[int], parts: int, edges: list[int]) -> None:
    plan: Any = SimpleNamespace(_cut=None, grid=SimpleNamespace(bytes=np.array(sizes, np.int64)))
    assert WritePlan._edges(plan, parts) == edges


def test_each_byte_is_written_by_one_task(source: Path) -> None:
    plan = planned(source)
    assert len(plan.tasks) > 20
    written = [np.zeros(size, np.uint8) for size in plan.sizes]
    for task in plan.tasks:
        assert 0 < task.nbytes <= TASK
        for file, _, begin, end in task.ranges:
            written[task.files[file][0]][begin:end] += 1
    for made, counts in zip(plan.files, written, strict=True):
        header = made.start
        assert not counts[:header].any()
        assert (counts[header:] == 1).all()


@pytest.mark.heavy
@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.integers(0, 3))
def test_parts_are_all_tasks_once(tmp_path_factory: pytest.TempPathFactory, parts: int, seed: int) -> None:
    folder = tmp_path_factory.mktemp("parts")
    sizes = np.random.default_rng(seed).integers(0, 40000, 12)
    sw.save_checkpoint(folder / "a.safetensors", {f"t{i}": np.zeros(size, "f8") for i, size in enumerate(sizes)})
    plan = sw.plan_checkpoint(folder / "a.safetensors", folder / "b.safetensors", task_bytes=TASK)
    numbers = [number for part in range(1, parts + 1) for number in plan.part(part, parts)]
    assert numbers == list(range(len(plan.tasks)))
    sizes = plan.part_bytes(parts)
    assert sizes[:, 1].tolist() == [
        sum(plan.task(number).nbytes for number in plan.part(part, parts)) for part in range(1, parts + 1)
    ]
    assert sizes[:, 1].sum() == sum(8 * size for size in np.random.default_rng(seed).integers(0, 40000, 12))
    assert (sizes[:, 0] == sizes[:, 1]).all()


def test_what_replicas_make_parts_read_is_counted(source: Path) -> None:
    checked, first = planned(source).part_bytes(3), planned(source, replicas="first").part_bytes(3)
    assert (checked[:, 1] == first[:, 1]).all()
    assert (first[:, 0] == first[:, 1]).all()
    # Written by one owner each, so this source has no replicas on the disk.
    assert (checked == first).all()


def test_tasks_are_values(source: Path) -> None:
    for task in planned(source).tasks[:4]:
        assert pickle.loads(pickle.dumps(task)) == task
        assert hash(pickle.loads(pickle.dumps(task))) == hash(task)


class Counting(ThreadPoolExecutor):
    """Threads that note how much memory each task may take, and how many are under way at once."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self.memory: list[int] = []
        self.under_way = self.most = 0
        self.lock = threading.Lock()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        with self.lock:
            self.memory.append(args[1])
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        future = super().submit(fn, *args, **kwargs)
        future.add_done_callback(self.ended)
        return future

    def ended(self, _: Future[Any]) -> None:
        with self.lock:
            self.under_way -= 1


def test_memory_is_divided_and_the_window_is_bounded(source: Path) -> None:
    with Counting(3) as executor:
        sw.reshard_checkpoint(
            source, source.parent / "new", rules(), executor=executor, memory=3 << 20, task_bytes=TASK
        )
    assert set(executor.memory) == {1 << 20}
    assert executor.most <= 6
    assert contents(source.parent / "new") == direct(source)
    with Counting(4) as executor, pytest.raises(sw.LayoutError, match="at least 16384 bytes are needed for each of 4"):
        sw.reshard_checkpoint(source, source.parent / "no", executor=executor, memory=50_000)
    with pytest.raises(TypeError, match="executor must be"):
        sw.reshard_checkpoint(source, source.parent / "no", executor="threads")  # type: ignore[arg-type]
    assert not (source.parent / "no").exists()


@pytest.mark.heavy
def test_two_drivers_and_a_late_task(source: Path) -> None:
    plan = planned(source)
    late = plan.tasks[0]
    entered, leave = threading.Event(), threading.Event()

    def wait(_done: int, _total: int) -> None:
        entered.set()
        assert leave.wait(3600)

    first = threading.Thread(target=lambda: plan.run(progress=wait))
    first.start()
    try:
        assert entered.wait(3600)
        with pytest.raises(BlockingIOError):
            planned(source).run()
        with pytest.raises(BlockingIOError):
            planned(source).commit()
        with pytest.raises(BlockingIOError):
            sw.reshard_checkpoint(source, source.parent / "new", rules())
    finally:
        leave.set()
        first.join()
    with pytest.raises(FileExistsError, match="holds parts of a plan"):
        sw.reshard_checkpoint(source, source.parent / "new", rules())
    plan.commit()
    before = contents(source.parent / "new")
    with pytest.raises(FileNotFoundError):
        late.run()
    # What is done is done.
    assert (plan.run(), plan.run((1, 3)), plan.commit().bytes_written) == (0, 0, 0)
    assert contents(source.parent / "new") == before


def test_what_plans_refuse(source: Path, tmp_path: Path) -> None:
    for wrong in (0, 100, TASK - 1):
        with pytest.raises(sw.LayoutError, match="task_bytes is"):
            planned(source, task_bytes=wrong)
    with pytest.raises(FileNotFoundError):
        sw.plan_checkpoint(source, tmp_path / "no" / "where")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.heavy
def test_the_command(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rules.toml").write_text('[rules]\nwide = ["x", []]\n')

    def run(*arguments: object, status: int = 0) -> str:
        assert main([*map(str, arguments)]) == status
        captured = capsys.readouterr()
        return captured.err if status else captured.out

    rules = (tmp_path / "rules.toml", "--mesh", "x=4", "--task-bytes", "64KiB")
    common = ("plan", source, tmp_path / "new", "--rules", *rules)
    if "error" in (text := run(*common, "--workers", 4)):
        raise AssertionError(text)
    assert "1/4" in text
    assert "4 parts: each reads" in text
    assert not (tmp_path / "new").exists()
    assert "tasks of up to" in run(*common, "--save", tmp_path / "new.swplan")
    assert json.loads(run("run", tmp_path / "new.swplan", "--part", "2/2", "--json", "--quiet"))["tasks"] > 1
    missing = run("commit", tmp_path / "new.swplan", status=2)
    assert "are missing: 0" in missing
    assert missing.endswith("; run again part 1/2\n")
    assert "PART/PARTS" in run("run", tmp_path / "new.swplan", "--part", "2", status=2)
    assert "counted from 1" in run("run", tmp_path / "new.swplan", "--part", "3/2", status=2)
    assert "done" in run("run", tmp_path / "new.swplan", "--quiet")
    assert "were done before" in run("run", tmp_path / "new.swplan", "--quiet")
    assert "tensors" in run("commit", tmp_path / "new.swplan", "--check")
    assert "the checkpoint is finished" in run("run", tmp_path / "new.swplan", "--quiet")
    assert run("diff", source, tmp_path / "new", "--quiet").strip() == "the same tensors"
    other = ("plan", source, tmp_path / "other", "--rules", *rules, "--dtype", "float16")
    assert "in all" not in run(*other)
    for option in (("--save", "p"), ("--workers", 4)):
        assert "is converted; tasks copy bytes" in run(*other, *option, status=2)
    assert not (tmp_path / "p").exists()


def test_a_receipt_says_what_a_task_can_write() -> None:
    """A CRC-32 has 32 bits, and a digest is less than its modulus; each line is right by its own digest."""
    right = TaskReceipt("plan", 3, ((0, 8, 16),), (DIGEST_MODULUS - 1,), (2**32 - 1,), 8, 8, 0.5, "host:1", "1/2")
    line = receipt_line(right)
    assert receipt_from_line(line, "here") == right
    wrong: list[dict[str, Any]] = [
        {"crcs": (2**32,)}, {"crcs": (-1,)}, {"digests": (DIGEST_MODULUS,)}, {"digests": (-1,)}
    ]  # fmt: skip
    for changes in wrong:
        with pytest.raises(sw.ParseError, match=r"^here: a receipt has contents that no task writes$"):
            receipt_from_line(receipt_line(right._replace(**changes)), "here")
    with pytest.raises(sw.ParseError, match=r"^here: a receipt is not what was written"):
        receipt_from_line(line.replace(b"host:1", b"host:2"), "here")
    assert right.contents != right._replace(crcs=(0,)).contents
    # Parts beyond 2**20 are not believed, however many say so.
    assert parts_of({f"1/{2**20}": 1, f"1/{2**20 + 1}": 9, "1/0": 9}) == 2**20
