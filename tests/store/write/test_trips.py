"""The write path: what each run does, from disk or store to disk or store, is asked once of all (rule 2.12 c)."""

from __future__ import annotations

import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.store.write.forms.universal import BESIDE
from shardwise.store.write.request.planner import OF_NESTED
from tests.checks import same_tensors
from tests.store.tasks import MESH, files, rules, saved, write_replica
from tests.store.trips import FORMS, TRIPS, WAYS, AtOnce, Flaky, Stopped, Trip, name_of, settings

# Of asynchronous connections that the server closes, and of packages that warn about each other.
pytestmark = pytest.mark.filterwarnings("ignore")

DATA = Path(__file__).parents[2] / "data" / "checkpoints"


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded checkpoint that nobody changes."""
    return saved(tmp_path_factory.mktemp("given"), 4)


@pytest.fixture(scope="module")
def expected(given: Path) -> Callable[[str], dict[str, bytes]]:
    """The files that it becomes, by the format: as one call writes them from a disk to a disk."""
    known: dict[str, dict[str, bytes]] = {}

    def made(to: str) -> dict[str, bytes]:
        if to not in known:
            path = given.parent / to / name_of(to)
            path.parent.mkdir()
            sw.reshard_checkpoint(given, path, **settings(to), sync=False)
            known[to] = files(path)
        return known[to]

    return made


Expected = Callable[[str], dict[str, bytes]]


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    """Two, which know the credentials of the S3 server."""
    with pytest.MonkeyPatch.context() as patch, ProcessPoolExecutor(2, get_context("spawn")) as pool:
        for name, value in {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret"}.items():
            patch.setenv(f"AWS_{name}", value)
        pool.submit(os.getpid).result()
        yield pool


class Seen(list[tuple[int, int]]):
    """Progress: of all bytes, each said once, in order."""

    def __call__(self, done: int, total: int) -> None:
        self.append((done, total))

    def check(self) -> None:
        done = [done for done, _ in self]
        assert done == sorted(set(done))
        assert {total for _, total in self} == {done[-1]}


@pytest.mark.heavy
@pytest.mark.parametrize("to", FORMS)
def test_a_reshard(trip: Trip, given: Path, expected: Expected, to: str) -> None:
    """The same bytes as from a disk to a disk; and what is finished is done, and is not written over (rule 2.12 c)."""
    source, new, seen = trip.put(given), trip.new(name_of(to)), Seen()
    report = sw.reshard_checkpoint(source, new, **settings(to), progress=seen)
    seen.check()
    assert trip.made(new) == expected(to)
    # What goes along, an index, and files that the plan has, are not counted.
    besides = {"shardwise.json", ".metadata", "fsdp_config.json", *report.companions}
    besides |= {name for name in expected(to) if to == "universal" and BESIDE.fullmatch(name)}
    assert report.bytes == sum(
        len(data) for name, data in expected(to).items() if name not in besides and "index" not in name
    )
    # A file of `torch.save` has no place for digests; each of its members has a CRC-32.
    done = sw.verify_checkpoint(new)
    assert done.crcs > report.tensors if to == "torch" else done.digests == report.tensors
    assert sw.diff_checkpoints(source, new) == []
    again = sw.reshard_checkpoint(source, new, **settings(to), resume=True)
    assert (again.bytes_written, again.bytes_resumed) == (0, report.bytes)
    with pytest.raises(FileExistsError, match="exists already"):
        sw.reshard_checkpoint(source, new, **settings(to))
    assert trip.made(new) == expected(to)


@pytest.mark.parametrize(("trip", "to"), WAYS, indirect=["trip"])
def test_parts_of_a_saved_plan_in_any_order_and_twice(trip: Trip, given: Path, expected: Expected, to: str) -> None:
    """Each as if on a machine of its own; nothing is a checkpoint before the commit (rule 2.12 h)."""
    source, new, file = trip.put(given), trip.new(name_of(to)), trip.file("new.swplan")
    sw.plan_checkpoint(str(source), str(new), **settings(to)).save(file)
    parts = [1, 2, 3, 4, 5]
    random.Random(len(to)).shuffle(parts)
    for part in parts:
        plan = sw.CheckpointPlan.load(file)
        numbers = plan.part(part, 5)
        if numbers:
            with pytest.raises(sw.ParseError, match=r"receipts of \d+ of \d+ tasks are missing"):
                plan.commit()
        assert plan.run((part, 5), sync=False) == len(numbers)
        plan.run(tasks=list(numbers)[::3], sync=False)
        assert plan.run((part, 5), sync=False) == 0
        assert not plan.is_finished()
    report = plan.commit(check=True)
    assert (report.bytes, report.bytes_resumed) == (plan.nbytes, 0)
    # The pickles of files of `torch.save` are in the plan.
    pickles = sum(tensor.nbytes for tensor in plan.tensors if tensor.is_object) if to in OF_NESTED else 0
    assert report.bytes_read + pickles >= int(plan.part_bytes(1)[0, 0])
    assert trip.made(new) == expected(to)
    assert (plan.run(), plan.run((2, 3)), plan.run(tasks=[0])) == (0, 0, 0)
    again = plan.commit()
    assert (again.bytes_written, again.bytes_resumed, again.bytes) == (0, plan.nbytes, plan.nbytes)
    assert trip.made(new) == expected(to)
    assert plan.digest == sw.CheckpointPlan.load(file).digest


def test_tasks_by_number(trip: Trip, given: Path, expected: Expected) -> None:
    plan = sw.plan_checkpoint(trip.put(given), trip.new(), **settings("dcp"))
    count = len(plan.tasks)
    for wrong in (count, -1, 2**40):
        with pytest.raises(sw.LayoutError, match=f"there is no task {wrong}; the plan has {count}"):
            plan.run(tasks=[0, wrong])
    for part in ((0, 3), (4, 3), (1, 0)):
        with pytest.raises(sw.LayoutError, match="parts are counted from 1"):
            plan.run(part)
    with pytest.raises(TypeError, match="part must be a tuple"):
        plan.run(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="part and tasks cannot both be given"):
        plan.run((1, 2), tasks=[1])
    with pytest.raises(sw.LayoutError, match="retries is -1"):
        plan.run(retries=-1)
    with pytest.raises(sw.LayoutError, match="parts is 0"):
        plan.part_bytes(0)
    with pytest.raises(sw.ParseError, match=f"receipts of {count} of {count} tasks"):
        plan.commit()
    assert plan.run((1, 2)) == len(plan.part(1, 2)) > 0
    with pytest.raises(sw.ParseError, match=rf"receipts of {len(plan.part(2, 2))} of {count} .*; run again part 2/2$"):
        plan.commit()
    assert plan.run(tasks=[count - 1, 0]) == 2
    assert plan.run() == len(plan.part(2, 2)) - 1
    assert plan.commit().bytes_resumed == 0
    assert trip.made(plan.path) == expected("dcp")


@pytest.mark.parametrize(
    ("trip", "to"),
    [*WAYS, *[(trip, to) for trip in TRIPS if "s3" not in trip for to in ("ranks", "vllm")]],
    indirect=["trip"],
)
def test_tasks_are_values(trip: Trip, given: Path, to: str) -> None:
    """Each is small, is what comes out of its pickle and no other one, also of an object of one name (rule 2.12 c)."""
    source, new, more = trip.put(given), trip.new(name_of(to)), settings(to)
    if to in ("ranks", "vllm"):
        more["layouts"] = {"wide": sw.TensorLayout((None, "tp"), sw.DeviceMesh((2,), ("tp",)))}
    plan = sw.plan_checkpoint(source, new, **more)
    tasks = list(plan.tasks)
    # The pickles of files of ranks are in the plan.
    inside = sum(tensor.nbytes for tensor in plan.tensors if tensor.is_object) if to in ("fsdp2", "universal") else 0
    for task in tasks:
        sent = pickle.dumps(task)
        assert len(sent) < 20_000 + inside
        copy = pickle.loads(sent)
        assert (copy, hash(copy), copy.sink, copy.number) == (task, hash(task), task.sink, task.number)
        assert [each for each in tasks if each == copy] == [task]
    if trip.to_store:  # Where a task makes an object.
        assert len({task.sink for task in tasks}) == len(tasks)
        other = sw.plan_checkpoint(source, new, **{**more, "only": "wide"}).tasks[0]
        assert other.sink != tasks[0].sink
        assert other.sink != new


def test_tasks_can_run_twice(trip: Trip, given: Path) -> None:
    """Rule 2.12 c."""
    plan = sw.plan_checkpoint(trip.put(given), trip.new(), **settings("sharded"))
    plan.run()
    for task in plan.tasks[-2:]:
        assert pickle.loads(pickle.dumps(task)).run().contents == task.run().contents
    with pytest.raises(IndexError, match="of"):
        plan.tasks[len(plan.tasks)]
    plan.commit(check=True)


@pytest.mark.parametrize(("trip", "to"), WAYS, indirect=["trip"])
def test_executors(trip: Trip, given: Path, expected: Expected, processes: ProcessPoolExecutor, to: str) -> None:
    source = trip.put(given)
    with ThreadPoolExecutor(3) as threads:
        executors: list[Executor] = [threads] if trip.in_memory else [threads, processes]
        for executor in executors:
            new, seen = trip.new(name_of(to)), Seen()
            sw.reshard_checkpoint(source, new, **settings(to), executor=executor, progress=seen, sync=False)
            seen.check()
            assert trip.made(new) == expected(to)
            if isinstance(new, Path):
                shutil.rmtree(new) if new.is_dir() else new.unlink()
    plan = sw.plan_checkpoint(source, trip.new("other"), **settings("dcp"))
    with pytest.raises(TypeError, match="executor must be"):
        plan.run(executor="threads")  # type: ignore[arg-type]
    if trip.in_memory:
        with pytest.raises(TypeError, match=r"memory://.* is in the memory of this process; give a ThreadPoolExecutor"):
            plan.run(executor=processes)
    else:
        assert plan.run(executor=processes) == len(plan.tasks)
        plan.commit()


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


def test_memory_is_divided_and_the_window_is_bounded(trip: Trip, given: Path, expected: Expected) -> None:
    source, new, other = trip.put(given), trip.new(), trip.new("other")
    with Counting(3) as executor:
        sw.reshard_checkpoint(source, new, **settings("hf"), executor=executor, memory=6 << 20)
    assert set(executor.memory) == {2 << 20}
    assert executor.most <= 6
    assert trip.made(new) == expected("hf")
    with Counting(4) as executor, pytest.raises(sw.LayoutError, match=r"(memory is .*|needed) for each of 4"):
        sw.reshard_checkpoint(source, other, **settings("hf"), executor=executor, memory=50_000)
    with pytest.raises(TypeError, match="executor must be"):
        sw.reshard_checkpoint(source, other, **settings("hf"), executor="threads")  # type: ignore[arg-type]
    plan = sw.plan_checkpoint(source, other, **settings("hf"))
    with pytest.raises(sw.LayoutError, match=r"memory is 4( B| bytes); at least .* needed"):
        plan.run(memory=4)
    with pytest.raises((sw.ParseError, FileNotFoundError)):
        sw.open_checkpoint(other)


@pytest.mark.parametrize(("error", "threads"), [(KeyboardInterrupt, 1), (KeyboardInterrupt, 2), (Stopped, 1)])
def test_an_interrupted_run_goes_on(
    trip: Trip, given: Path, expected: Expected, error: type[BaseException], threads: int
) -> None:
    source, new = trip.put(given), trip.new()

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise error

    said = r"^interrupted after \d+ of \d+ tasks; finished tasks stay( in .*)?, and the next run continues"
    with pytest.raises(error, match=said if error is KeyboardInterrupt else "") as stopped:
        sw.reshard_checkpoint(source, new, **settings("sharded"), threads=threads, progress=stop)
    if error is KeyboardInterrupt and isinstance(new, Path):
        (there,) = new.parent.glob(f".{new.name}.partial/*/data")
        assert f"finished tasks stay in {there}, " in str(stopped.value)
    with pytest.raises((sw.ParseError, FileNotFoundError)):
        sw.open_checkpoint(new)
    report = sw.reshard_checkpoint(source, new, **settings("sharded"), resume=True)
    assert 0 < report.bytes_resumed < report.bytes
    assert trip.made(new) == expected("sharded")


@pytest.mark.parametrize(("trip", "to"), WAYS, indirect=["trip"])
@pytest.mark.parametrize(
    ("error", "after"), [(OSError(5, "Input/output error"), False), (RuntimeError("the worker was lost"), True)]
)
def test_tasks_that_fail_are_tried_again(
    trip: Trip, given: Path, expected: Expected, error: Exception, after: bool, to: str
) -> None:
    """Also when they had done their work: what they made is their own, and is found."""
    source, new = trip.put(given), trip.new(name_of(to))
    executor = Flaky(2, error, after)
    sw.reshard_checkpoint(source, new, **settings(to), executor=executor, sync=False)
    assert trip.made(new) == expected(to)
    assert set(executor.tries.values()) == {3}
    with pytest.raises(FileExistsError, match="exists already"):  # Another's is refused still.
        sw.reshard_checkpoint(source, new, **settings(to), executor=Flaky(2, error, after), sync=False)
    other = trip.new(f"other-{name_of(to)}")
    with pytest.raises(type(error)):
        sw.reshard_checkpoint(source, other, **settings(to), executor=Flaky(3, error, after), sync=False)
    sw.reshard_checkpoint(source, other, **settings(to), resume=True, sync=False)
    assert trip.made(other) == expected(to)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), sw.ParseError("changed"), MemoryError()])
def test_what_would_fail_again_is_not_tried_again(trip: Trip, given: Path, error: Exception) -> None:
    executor = Flaky(9, error)
    with pytest.raises(type(error)):
        sw.reshard_checkpoint(trip.put(given), trip.new(), **settings("hf"), executor=executor, sync=False)
    assert set(executor.tries.values()) == {1}


def test_a_plan_whose_executor_broke_is_just_run_again(trip: Trip, given: Path) -> None:
    """`run` has no argument for it, so the message names none."""
    plan = sw.plan_checkpoint(trip.put(given), trip.new(), **settings("hf"))
    with pytest.raises(BrokenExecutor, match=r"after 0 of .* the next run continues$"):
        plan.run(executor=Flaky(9, BrokenExecutor("gone")))
    assert plan.run() == len(plan.tasks)


class Hanging(AtOnce):
    """Runs the first tasks, and never ends another."""

    def __init__(self, ends: int) -> None:
        super().__init__()
        self.ends = ends

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.ends -= 1
        return super().submit(fn, *args, **kwargs) if self.ends >= 0 else Future()


def test_workers_that_hang_are_given_up(trip: Trip, given: Path, expected: Expected) -> None:
    source, new = trip.put(given), trip.new()
    said = r"no worker has ended a task for 0\.1 seconds; under way: 4 tasks; finished tasks stay"
    with pytest.raises(TimeoutError, match=said):
        sw.reshard_checkpoint(source, new, **settings("sharded"), executor=Hanging(3), timeout=0.1)
    report = sw.reshard_checkpoint(source, new, **settings("sharded"), resume=True)
    assert 0 < report.bytes_resumed < report.bytes
    assert trip.made(new) == expected("sharded")
    plan = sw.plan_checkpoint(source, trip.new("other"), **settings("sharded"))
    with pytest.raises(TimeoutError, match=r"the next run continues$"):
        plan.run(executor=Hanging(2), timeout=0.1)
    assert plan.run() == len(plan.tasks) - 2


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Deadly(Executor):
    """A pool of processes, of which the one is killed that gets the task with this turn."""

    def __init__(self, doomed: int | None) -> None:
        self.pool, self.doomed = ProcessPoolExecutor(2, get_context("spawn")), doomed
        self._max_workers, self.turn = 2, -1

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.turn += 1
        return self.pool.submit(_die) if self.turn == self.doomed else self.pool.submit(fn, *args)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.pool.shutdown(wait, cancel_futures=cancel_futures)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_workers_that_are_killed_cost_their_tasks_only(shared: Trip, given: Path, expected: Expected) -> None:
    source, new = shared.put(given), shared.new()
    left = total = len(sw.plan_checkpoint(source, new, **settings("hf")).tasks)
    for part in (0.1, 0.5, 0):  # What ended after the death is not counted, so the last that is left may not be there.
        with Deadly(int((left - 1) * part)) as executor, pytest.raises(BrokenExecutor) as died:
            sw.reshard_checkpoint(source, new, **settings("hf"), executor=executor, resume=True)
        found = re.search(r"a worker died.*after (\d+) of (\d+) tasks?.* \(resume=True\)$", str(died.value))
        assert found
        assert int(found[2]) <= left <= total
        left = int(found[2]) - int(found[1])
        with pytest.raises((sw.ParseError, FileNotFoundError)):
            sw.open_checkpoint(new)
    with Deadly(None) as executor:
        sw.reshard_checkpoint(source, new, **settings("hf"), executor=executor, resume=True)
    assert sw.verify_checkpoint(new).digests
    assert shared.made(new) == expected("hf")


DRIVER = """
import os, signal, sys
import shardwise as sw
from tests.store.trips import settings
def killed(done, total):
    if done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)
sw.reshard_checkpoint(sys.argv[1], sys.argv[2], **settings("sharded"), progress=killed, sync=False)
"""


@pytest.mark.heavy
@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_the_driver_is_killed_and_goes_on(shared: Trip, given: Path, expected: Expected) -> None:
    """Rule 2.12 h."""
    source, new = shared.put(given), shared.new()
    command = [sys.executable, "-c", DRIVER, str(source), str(new)]
    killed = subprocess.run(command, cwd=Path(__file__).parents[3], timeout=3600)
    assert killed.returncode == -signal.SIGKILL
    with pytest.raises((sw.ParseError, FileNotFoundError)):
        sw.open_checkpoint(new)
    sw.reshard_checkpoint(source, new, **settings("sharded"), resume=True)
    assert shared.made(new) == expected("sharded")


@pytest.mark.parametrize(("trip", "to"), WAYS, indirect=["trip"])
def test_what_is_converted(trip: Trip, given: Path, to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put together in a file first, which is removed; so no task can do a part of it."""
    temporary = trip.file("temporary")
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    source, new = trip.put(given), trip.new(name_of(to))
    plan = sw.plan_checkpoint(source, new, **settings(to, dtype="float16"))
    assert plan.outline().files
    for work in (plan.run, plan.commit, partial(plan.save, temporary / "plan"), partial(plan.task, 0)):
        with pytest.raises(TypeError, match="is converted; tasks copy bytes"):
            work()
    assert not plan.is_finished()
    report = sw.reshard_checkpoint(source, new, **settings(to, dtype="float16"))
    trip.made(new)
    assert list(temporary.iterdir()) == []
    with sw.open_checkpoint(given) as checkpoint:
        whole = {name: checkpoint.read(name) for name in checkpoint}
    same_tensors(new, {name: value.astype("f2") if value.dtype.kind == "f" else value for name, value in whole.items()})
    again = sw.reshard_checkpoint(source, new, **settings(to, dtype="float16"), resume=True)
    assert (again.bytes_written, again.bytes_resumed) == (0, report.bytes)
    with pytest.raises(FileExistsError):
        sw.reshard_checkpoint(source, new, **settings(to, dtype="float32"), resume=True)


@pytest.mark.heavy
def test_what_is_compressed(trip: Trip) -> None:
    pytest.importorskip("zstandard")
    item, new = DATA / "orbax_keras" / "orbax_zarr3", trip.new()
    source, direct = trip.put(item), trip.file("direct")
    plan = sw.plan_checkpoint(source, new, to="hf")
    with pytest.raises(TypeError, match="is compressed in the source"):
        plan.run()
    for dtype in (None, "float16"):
        for path in (new, direct):
            sw.reshard_checkpoint(source, path.with_name(f"{path.name}-{dtype}"), to="hf", dtype=dtype)
        assert trip.made(new.with_name(f"{new.name}-{dtype}")) == files(direct.with_name(f"{direct.name}-{dtype}"))
    assert sw.diff_checkpoints(item, new.with_name(f"{new.name}-None")) == []


@pytest.mark.parametrize(("trip", "to"), WAYS, indirect=["trip"])
@pytest.mark.parametrize("tensors", [{}, {"none": np.zeros((0, 3))}], ids=["no tensors", "an empty one"])
def test_a_checkpoint_without_elements(trip: Trip, to: Any, tensors: dict[str, Any]) -> None:
    made: Any = trip.file(name_of(to))
    layouts = rules() if to == "fsdp2" else None
    sw.save_checkpoint(made, tensors, to=to, layouts=layouts)
    same_tensors(made, tensors)
    plan = sw.plan_checkpoint(trip.put(made), trip.new(name_of(to)), layouts, to=to)
    # An object without elements is one still; and a file of `torch.save` has its pickle.
    has_pickles = to in OF_NESTED
    assert len(plan.tasks) == (len(plan.files) if trip.to_store else int(has_pickles))
    assert (plan.run((1, 2)), plan.run((2, 2))) == (len(plan.part(1, 2)), len(plan.part(2, 2)))
    plan.commit()
    same_tensors(plan.path, tensors)  # type: ignore[arg-type]
    sw.verify_checkpoint(plan.path)
    assert sw.diff_checkpoints(made, plan.path) == []


@pytest.mark.parametrize("to", ["safetensors", "sharded", "dcp"])
def test_replicas_that_disagree_are_found_by_the_task_that_writes_them(trip: Trip, tmp_path: Path, to: Any) -> None:
    """Two files with the same tensor, of which the last element differs, and four files with columns of it each."""
    values = np.arange(32, dtype="f4").reshape(4, 8)
    layouts = {"w": sw.TensorLayout((None, "model"), MESH)} if to != "safetensors" else None
    for different in (True, False):
        (tmp_path / f"{different}").mkdir()
        other = values.copy()
        other[3, 7] += different
        for rank, held in ((1, values), (2, other)):
            write_replica(tmp_path / f"{different}", rank, held)
        source, new = trip.put(tmp_path / f"{different}"), trip.new(f"{different}-{name_of(to)}")
        make: Any = partial(sw.plan_checkpoint, source, new, layouts, to=to)
        plan = make()
        # Each compares what it writes.
        assert plan.part_bytes(1).tolist() == [[256, 128]]
        assert (plan.part_bytes(4)[:, 0] == 2 * plan.part_bytes(4)[:, 1]).all()
        if different:
            failed = 0
            for number in range(len(plan.tasks)):
                try:
                    plan.run(tasks=[number])
                except sw.ParseError as error:
                    assert re.search(r"'w': replicas disagree.* is \(3, 7\)", str(error))  # noqa: PT017
                    failed += 1
            assert failed == 1
            with pytest.raises(sw.ParseError, match=r"receipts of .* are missing"):
                plan.commit()
            with pytest.raises(sw.ParseError, match=r"'w': replicas disagree.* is \(3, 7\)"):
                sw.reshard_checkpoint(source, trip.new(f"direct-{name_of(to)}"), layouts, to=to)
            plan = make(replicas="first")
            assert plan.part_bytes(1).tolist() == [[128, 128]]
        plan.run()
        plan.commit()
        same_tensors(new, {"w": values})


def test_a_source_that_changes_between_two_parts_is_named(trip: Trip, given: Path) -> None:
    source = trip.put(shutil.copytree(given, trip.file("copy")))
    plan = sw.plan_checkpoint(source, trip.new(), **settings("sharded"))
    plan.run((1, 2))
    for path in given.glob("*.safetensors"):
        trip.change(source, path.name, path.read_bytes()[:-1] + b"!")
    for part in (None, (2, 2)):
        with pytest.raises(sw.ParseError, match=r"a different object than before|was written to since it was opened"):
            plan.run(part)
    with pytest.raises(sw.ParseError, match=r"receipts of .* are missing"):
        plan.commit()
    assert not plan.is_finished()


def test_a_source_that_changes_is_refused_by_the_worker(trip: Trip, given: Path) -> None:
    """It is told what the source was when the driver opened it."""
    source = trip.put(shutil.copytree(given, trip.file("copy")))

    class Changing(AtOnce):
        def call(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            sent = pickle.dumps(args)
            if args[0].number == 1:
                for path in given.glob("*.safetensors"):
                    trip.change(source, path.name, path.read_bytes()[:-1] + b"!")
            return fn(*pickle.loads(sent), **kwargs)

    new = trip.new()
    with pytest.raises(sw.ParseError, match=r"a different object than before|was written to since it was opened"):
        sw.reshard_checkpoint(source, new, **settings("hf"), executor=Changing())
    with pytest.raises((sw.ParseError, FileNotFoundError)):
        sw.open_checkpoint(new)


def test_names_that_are_taken_are_refused_when_it_is_planned(trip: Trip, given: Path) -> None:
    source, new = trip.put(given), trip.new()
    for call in (sw.plan_checkpoint, sw.reshard_checkpoint):
        with pytest.raises(FileExistsError, match="dst is the source"):
            call(source, source)
    sw.save_checkpoint(new, {"w": np.ones(3)}, to="sharded")
    before = trip.made(new)
    for call in (sw.plan_checkpoint, partial(sw.reshard_checkpoint, resume=True)):
        with pytest.raises(FileExistsError, match="exists already"):
            call(source, new, **settings("sharded"))
    assert trip.made(new) == before


@pytest.mark.parametrize("trip", ["disk to disk", "memory to memory", "s3 to s3"], indirect=True)
def test_a_destination_inside_its_source_is_refused(trip: Trip, given: Path) -> None:
    sw.save_checkpoint(source := trip.new("src"), {"w": np.zeros(3)}, to="hf")
    before = trip.made(source)
    for call in (sw.reshard_checkpoint, sw.plan_checkpoint):
        with pytest.raises(OSError, match="dst is inside the source"):
            call(source, source / "new")
    assert trip.made(source) == before
    sw.reshard_checkpoint(source, source.with_name("src-2"))


@pytest.mark.parametrize(("trip", "to"), WAYS, indirect=["trip"])
def test_a_save(trip: Trip, given: Path, to: str) -> None:
    """From memory, the bytes that a save on a disk gives."""
    with sw.open_checkpoint(given) as checkpoint:
        tensors = {name: checkpoint.read(name) for name in checkpoint}
    more: dict[str, Any] = {
        "layouts": rules() if to in ("sharded", "dcp", "fsdp2") else None,
        "to": to,
        "max_file_bytes": 80_000,
    }
    new, direct, seen = trip.new(name_of(to)), trip.file(name_of(to)), Seen()
    report = sw.save_checkpoint(new, tensors, **more, progress=seen)
    seen.check()
    assert (report.bytes_resumed, report.tensors) == (0, len(tensors))
    sw.save_checkpoint(direct, tensors, **more)
    assert trip.made(new) == files(direct)
    same_tensors(new, tensors)
    with pytest.raises(FileExistsError, match="exists already"):
        sw.save_checkpoint(new, tensors, **more)
