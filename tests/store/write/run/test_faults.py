"""Killed, refused or cut short at any operation on files: nothing is lost, and nothing is mixed.

Each case is a call as users make it, in a process of its own, with a fault at one operation (`faulty.py`). Afterwards
the checkpoint is either not there, or there as a whole; the same call with `resume=True` ends with the bytes of a run
that nothing disturbed; nothing else is left, and the source is as it was.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest

import shardwise as sw
from shardwise._atomic import replace_file
from shardwise.cli import main
from shardwise.store.write.places.work import Work
from shardwise.store.write.request import reshape
from shardwise.store.write.run import checkpoint_plan

from ...faulty import Machine, Outcome, why_not

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    # Expected of many of these tests, which are about something else.
    pytest.mark.filterwarnings("ignore:.*match(es)? no rule:shardwise.ShardwiseWarning"),
]

T = TypeVar("T")

MESH = sw.DeviceMesh((4,), ("x",))
FORMS = ("safetensors", "hf", "sharded", "dcp")
#: A form; a file for each device, with replicas; a folder in Hugging Face's form whose tensors are converted beside it
#: first; the same with rewrites.
KINDS = (*FORMS, "ranks", "converted", "rewritten")
KILLS = ("kill", "kill after")
ERRORS = (errno.ENOSPC, errno.EIO)
#: What the system may interrupt. Names are changed as a whole.
INTERRUPTED = {"create", "open", "read", "write", "fsync", "ftruncate", "fallocate"}
NEW = "new" * 9999

#: The quick tests have a fault at so many operations of a piece of work. The slow ones have each fault at each, in
#: shares that take some seconds, so that what has little time does some of them. A rewrite has the most operations.
SOME, SHARES, SHARES_OF_A_REWRITE = 5, 12, 96


class Amount(NamedTuple):
    """How much of the work is done: of so many shares which, or, of none, some of it."""

    share: int | None = None
    shares: int = SHARES


def amounts(shares: int, prefix: str = "") -> list[Any]:
    some = pytest.param(Amount(), id=f"{prefix}some")
    every = (
        pytest.param(Amount(i, shares), id=f"{prefix}{i + 1} of {shares}", marks=pytest.mark.slow)
        for i in range(shares)
    )
    return [some, *every]


some_or_all = pytest.mark.parametrize("amount", amounts(SHARES))
some_or_all_of_every_kind = pytest.mark.parametrize(
    ("kind", "amount"),
    [
        pytest.param(kind, *amount.values, id=amount.id, marks=amount.marks)
        for kind in KINDS
        for amount in amounts(SHARES_OF_A_REWRITE if kind == "rewritten" else SHARES, f"{kind}-")
    ],
)


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    tied = rng.standard_normal(40).astype("f4")
    return {
        "h.0.w": rng.standard_normal((64, 640)).astype("f4"),
        "h.1.w": rng.standard_normal((48, 320)).astype("f8"),
        "tied.a": tied,
        "tied.b": tied,
        "flags": rng.integers(0, 2, (3, 5)).astype(bool),
        "scalar": np.array(2.5),
    }


def layouts(dim: int) -> sw.LayoutMap:
    rules = sw.LayoutMap(MESH)
    rules[r"w$"] = ("x", None) if dim == 0 else (None, "x")
    return rules


def name_of(kind: str) -> str:
    return "new.safetensors" if kind == "safetensors" else "new"


def arguments_for(kind: str) -> dict[str, Any]:
    to = kind if kind in (*FORMS, "ranks") else "hf"
    cut = {"layouts": layouts(1)} if to in ("sharded", "dcp", "ranks") else {}
    return {"to": to, **cut, **({"max_file_bytes": 200_000} if to == "hf" else {})}


# The work, which is done in other processes. How fast they are makes no difference to what is recorded, and when.


def record_after(record_bytes: int) -> None:
    for module in (checkpoint_plan, reshape):
        module.Work = functools.partial(Work, record_bytes=record_bytes, record_seconds=1e9)  # type: ignore[attr-defined]


def record_each_task() -> None:
    """So that some tasks can be resumed."""
    record_after(1)


def reshard(folder: str, source: str, kind: str, resume: bool) -> int:
    record_each_task()
    dtype = "float16" if kind == "converted" else None
    turned = [{"from": "h.{i}.w", "to": {"name": "t.{i}", "transpose": True}}]
    target = Path(folder, name_of(kind))
    report = sw.reshard_checkpoint(
        source,
        target,
        dtype=dtype,
        rewrites=sw.Rewrites(turned) if kind == "rewritten" else None,
        resume=resume,
        threads=1,
        memory=1 << 16,
        task_bytes=1 << 16,
        **arguments_for(kind),
    )
    assert isinstance(report, sw.store.WriteReport)
    return report.bytes_resumed


def save(folder: str, kind: str) -> None:
    record_each_task()
    sw.save_checkpoint(Path(folder, name_of(kind)), tensors(), memory=1 << 16, **arguments_for(kind))


def command(_: str, *arguments: str) -> tuple[int, str]:
    record_each_task()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        status = main(arguments)
    return status, said.getvalue()


def columns(folder: str, source: str, files: int, resume: bool, sync: bool = True) -> int:
    """Cut into many files, as users do: receipts are written when there is much to lose."""
    record_after(1 << 60)
    rules = sw.LayoutMap(sw.DeviceMesh((files,), ("x",)))
    rules["h.0.w"] = (None, "x")
    target = Path(folder, "new")
    report = sw.reshard_checkpoint(source, target, rules, to="sharded", threads=1, resume=resume, sync=sync)
    assert isinstance(report, sw.store.WriteReport)
    return report.bytes_resumed


def put(folder: str, text: str) -> None:
    replace_file(Path(folder, "rules.toml"), text.encode())


# What is common to the tests.


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    """In memory where the system has such a place: this work brings all to the disk at every step."""
    memory = Path("/dev/shm")
    is_there = memory.is_dir() and os.access(memory, os.W_OK)
    with tempfile.TemporaryDirectory(dir=memory if is_there else None) as folder:
        yield Path(folder).resolve()


@pytest.fixture(scope="module")
def source(base: Path) -> Path:
    sw.save_checkpoint(base / "source", tensors(), layouts(0))
    return base / "source"


@pytest.fixture(scope="module")
def machine(base: Path) -> Iterator[Machine]:
    machine = Machine(base, __name__)
    yield machine
    machine.close()


class Bench:
    """Makes folders to work in, does work there, and says what must come of it."""

    def __init__(self, base: Path, machine: Machine, source: Path) -> None:
        self.base, self.machine, self.source = base, machine, source
        self._numbers = itertools.count()
        self._references: dict[tuple[Any, ...], tuple[dict[str, bytes], list[str]]] = {}
        self._steps: tuple[dict[str, bytes], list[list[str]]] | None = None
        self._source = contents(source)

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        folder = self.base / f"case{next(self._numbers)}"
        folder.mkdir()
        yield folder
        shutil.rmtree(folder)
        assert contents(self.source) == self._source

    def reference(self, name: str, work: str, *arguments: object) -> tuple[dict[str, bytes], list[str]]:
        """What undisturbed work makes under this name, and the operations that it takes."""
        key = name, work, *arguments
        if key not in self._references:
            with self.folder() as folder:  # The first run imports what is needed.
                assert self.machine.run(work, folder, *arguments, here=True).error is None
            with self.folder() as folder:
                done = self.machine.run(work, folder, *arguments)
                assert done.error is None, done
                assert listed(folder) == [name]
                self._references[key] = contents(folder / name), done.operations
        return self._references[key]

    def steps(self) -> tuple[dict[str, bytes], list[list[str]]]:
        """What a plan makes whose parts are run and committed by the command, and the operations of each step."""
        if self._steps is None:
            for here in (True, False):
                with self.folder() as folder:
                    planned(self, folder)
                    done = [tasks(self, folder, step, here=here) for step in range(3)]
                    assert [each.done[0] for each in done] == [0, 0, 0], done
                    self._steps = contents(folder / "new"), [each.operations for each in done]
        assert self._steps is not None
        assert self._steps[0] == self.reference("new", "reshard", str(self.source), "sharded", False)[0]
        return self._steps

    def putting(self, old: str | None) -> list[str]:
        """The operations of `put`."""
        for here in (True, False):
            with self.folder() as folder:
                if old is not None:
                    (folder / "rules.toml").write_text(old)
                done = self.machine.run("put", folder, NEW, here=here)
                assert contents(folder) == {"rules.toml": NEW.encode()}
        return done.operations

    def settled(self, target: Path, expected: dict[str, bytes], work: str, *arguments: object) -> Outcome:
        """Check what a fault left, and what work makes of it that goes on with it; gives what became of that."""
        complete = target.exists()
        if complete:
            assert contents(target) == expected
        else:
            with pytest.raises(FileNotFoundError):
                sw.open_checkpoint(target)
        done = self.machine.run(work, target.parent, *arguments)
        # What is finished is done, unless it is in memory only.
        assert done.error == ("FileExistsError" if complete and work == "save" else None), done
        assert contents(target) == expected
        assert listed(target.parent) == [target.name]
        return done


@pytest.fixture(scope="module")
def bench(base: Path, machine: Machine, source: Path) -> Bench:
    return Bench(base, machine, source)


def contents(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return {"": path.read_bytes()}
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def places(operations: list[str]) -> list[int]:
    """Some of the operations, by their numbers from 1: spread evenly, and those that change names."""
    if len(operations) <= SOME:
        return list(range(1, len(operations) + 1))
    spread = {1 + i * (len(operations) - 1) // (SOME - 1) for i in range(SOME)}
    return sorted(spread | {at for at, line in enumerate(operations, 1) if line.startswith("rename ")})


def cases(operations: list[str], amount: Amount, faults: Sequence[T]) -> list[tuple[int, T]]:
    """Which fault is at which operation: of some one or another; in a share its own of all, the first and the last."""
    if amount.share is None:
        return list(zip(places(operations), itertools.cycle(faults), strict=False))
    whole = list(itertools.product(range(1, len(operations) + 1), faults))
    return [each for i, each in enumerate(whole) if i % amount.shares == amount.share or i in (0, len(whole) - 1)]


@pytest.mark.heavy
def test_the_operations_are_seen(bench: Bench) -> None:
    """A call that goes around the C library would not be counted, and nothing below would say so."""
    _, operations = bench.reference("new", "reshard", str(bench.source), "sharded", False)
    names = {line.partition(" ")[0] for line in operations}
    assert names >= {"create", "write", "ftruncate", "fallocate", "fsync", "mkdir", "rename", "unlink", "rmdir"}
    assert "rename new" in operations


# Kills.


@some_or_all_of_every_kind
def test_a_killed_reshard_goes_on(bench: Bench, kind: str, amount: Amount) -> None:
    name, source = name_of(kind), str(bench.source)
    expected, operations = bench.reference(name, "reshard", source, kind, False)
    complete, resumed, chosen = 0, 0, cases(operations, amount, KILLS)
    for at, kill in chosen:
        with bench.folder() as folder:
            assert bench.machine.run("reshard", folder, source, kind, False, at=at, fault=kill).killed
            complete += (folder / name).exists()
            done = bench.settled(folder / name, expected, "reshard", source, kind, True)
            resumed += bool(done.done)
    assert 0 < complete < len(chosen)
    assert resumed


@some_or_all_of_every_kind
def test_killed_again_while_it_goes_on(bench: Bench, kind: str, amount: Amount) -> None:
    name, source = name_of(kind), str(bench.source)
    expected, operations = bench.reference(name, "reshard", source, kind, False)
    published = operations.index(f"rename {name}") + 1

    def killed_once(folder: Path, at: int) -> None:
        assert bench.machine.run("reshard", folder, source, kind, False, at=at, fault="kill").killed

    for first in [published // 3, published * 2 // 3] if amount.share is not None else [published * 2 // 3]:
        with bench.folder() as folder:
            killed_once(folder, first)
            going_on = bench.machine.run("reshard", folder, source, kind, True).operations
        for at, kill in cases(going_on, amount, KILLS):
            with bench.folder() as folder:
                killed_once(folder, first)
                assert bench.machine.run("reshard", folder, source, kind, True, at=at, fault=kill).killed
                bench.settled(folder / name, expected, "reshard", source, kind, True)


@some_or_all
@pytest.mark.parametrize("kind", FORMS)
def test_a_killed_save_is_done_again(bench: Bench, kind: str, amount: Amount) -> None:
    name = name_of(kind)
    expected, operations = bench.reference(name, "save", kind)
    for at, kill in cases(operations, amount, KILLS):
        with bench.folder() as folder:
            assert bench.machine.run("save", folder, kind, at=at, fault=kill).killed
            bench.settled(folder / name, expected, "save", kind)


STEPS = (("run", "new.swplan", "--part", "1/2"), ("run", "new.swplan", "--part", "2/2"), ("commit", "new.swplan"))


def tasks(bench: Bench, folder: Path, step: int, **fault: Any) -> Outcome:
    first, plan, *rest = STEPS[step]
    quiet = ["--quiet"] if first == "run" else []
    return bench.machine.run("command", folder, first, str(folder / plan), *rest, *quiet, **fault)


def planned(bench: Bench, folder: Path, steps: int = 0) -> None:
    """Save a plan, and do some of its steps."""
    plan = sw.plan_checkpoint(bench.source, folder / "new", layouts(1), to="sharded", task_bytes=1 << 16)
    plan.save(folder / "new.swplan")
    for step in range(steps):
        assert tasks(bench, folder, step).done[0] == 0


@some_or_all
@pytest.mark.parametrize("step", range(3))
def test_parts_and_commits_that_are_killed_are_run_again(bench: Bench, step: int, amount: Amount) -> None:
    expected, operations = bench.steps()
    for at, kill in cases(operations[step], amount, KILLS):
        with bench.folder() as folder:
            planned(bench, folder, step)
            assert tasks(bench, folder, step, at=at, fault=kill).killed
            complete = (folder / "new").exists()
            assert not complete or step == 2
            for each in range(step, 3):
                done = tasks(bench, folder, each)
                assert done.done[0] == 0, done
            assert contents(folder / "new") == expected


@some_or_all
@pytest.mark.parametrize("old", ["old", None])
def test_a_file_is_replaced_as_a_whole(bench: Bench, old: str | None, amount: Amount) -> None:
    found = set()
    for at, kill in cases(bench.putting(old), amount, KILLS):
        with bench.folder() as folder:
            path = folder / "rules.toml"
            if old is not None:
                path.write_text(old)
            assert bench.machine.run("put", folder, NEW, at=at, fault=kill).killed
            found.add(path.read_text() if path.exists() else None)
            assert bench.machine.run("put", folder, "newer").error is None
            assert contents(folder) == {"rules.toml": b"newer"}
    assert found == {old, NEW}


# Errors of the system.


@some_or_all_of_every_kind
def test_an_error_names_the_file_and_the_next_run_goes_on(bench: Bench, kind: str, amount: Amount) -> None:
    name, source = name_of(kind), str(bench.source)
    expected, operations = bench.reference(name, "reshard", source, kind, False)
    refused = 0
    for at, (number, fault) in cases(operations, amount, list(itertools.product(ERRORS, ("fail", "fail from")))):
        with bench.folder() as folder:
            done = bench.machine.run("reshard", folder, source, kind, False, at=at, fault=fault, error=number)
            complete = (folder / name).exists()
            if done.error is None:  # It was tried again, or it was about what nobody needs.
                assert complete
            else:
                assert done.error == "OSError", done
                assert os.strerror(number) in done.message
                assert done.filename is not None, done
                assert Path(done.filename).is_relative_to(folder), done
                assert complete == ("the checkpoint is complete" in done.message)
                refused += 1
            bench.settled(folder / name, expected, "reshard", source, kind, True)
    # A share may have nothing but single faults of tasks, which are tried again, after the first operation.
    assert refused > (2 if amount.share is None else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_every_sort_of_file_is_named(bench: Bench, kind: str) -> None:
    """Of operations whose lines differ in numbers and tokens only, the first one fails."""
    name, source = name_of(kind), str(bench.source)
    _, operations = bench.reference(name, "reshard", source, kind, False)
    sorts: dict[str, int] = {}
    for at, line in enumerate(operations, 1):
        sorts.setdefault(re.sub(r"[0-9]|(?<=[._/-])[0-9a-z_]{8,}", "#", line), at)
    assert len(sorts) > 20
    for sort, at in sorts.items():
        with bench.folder() as folder:
            done = bench.machine.run("reshard", folder, source, kind, False, at=at, fault="fail", error=errno.ENOSPC)
            named = done.filename is not None and Path(done.filename).is_relative_to(folder)
            assert named if done.error is not None else (folder / name).exists(), (sort, done)


@some_or_all
@pytest.mark.parametrize("kind", FORMS)
def test_an_error_of_a_save_leaves_nothing(bench: Bench, kind: str, amount: Amount) -> None:
    name = name_of(kind)
    expected, operations = bench.reference(name, "save", kind)
    for at, number in cases(operations, amount, ERRORS):
        with bench.folder() as folder:
            done = bench.machine.run("save", folder, kind, at=at, fault="fail", error=number)
            complete = (folder / name).exists()
            if done.error is not None:
                assert done.filename is not None, done
                assert Path(done.filename).is_relative_to(folder), done
                assert complete == ("the checkpoint is complete" in done.message)
                assert listed(folder) == [name] * complete, done
            bench.settled(folder / name, expected, "save", kind)


@some_or_all
@pytest.mark.parametrize("step", range(3))
def test_a_part_or_commit_that_fails_is_run_again(bench: Bench, step: int, amount: Amount) -> None:
    expected, operations = bench.steps()
    for at, number in cases(operations[step], amount, ERRORS):
        with bench.folder() as folder:
            planned(bench, folder, step)
            status, said = tasks(bench, folder, step, at=at, fault="fail", error=number).done
            complete = "the checkpoint is complete" in said
            if status:
                assert os.strerror(number) in said
                assert str(folder) in said
                assert (folder / "new").exists() == complete
            for each in range(step + (status == 0), 3):
                assert tasks(bench, folder, each).done[0] == 0
            assert contents(folder / "new") == expected


@some_or_all
def test_a_file_that_cannot_be_replaced_stays(bench: Bench, amount: Amount) -> None:
    for at, number in cases(bench.putting("old"), amount, ERRORS):
        with bench.folder() as folder:
            (folder / "rules.toml").write_text("old")
            done = bench.machine.run("put", folder, NEW, at=at, fault="fail", error=number)
            replaced = done.error is None or "has been replaced" in done.message
            if done.error is not None:
                assert done.error == "OSError", done
                assert str(folder / "rules.toml") in done.message
            assert contents(folder)["rules.toml"] == (NEW.encode() if replaced else b"old")
            assert bench.machine.run("put", folder, "newer").error is None
            assert contents(folder) == {"rules.toml": b"newer"}


@some_or_all_of_every_kind
def test_calls_that_are_interrupted_are_made_again(bench: Bench, kind: str, amount: Amount) -> None:
    name, source = name_of(kind), str(bench.source)
    expected, _ = bench.reference(name, "reshard", source, kind, False)
    with bench.folder() as folder:
        operations = bench.machine.run("reshard", folder, source, kind, False, reads=True).operations
    may_be = [at for at, line in enumerate(operations, 1) if line.partition(" ")[0] in INTERRUPTED]
    for place_of, _ in cases([operations[at - 1] for at in may_be], amount, [errno.EINTR]):
        with bench.folder() as folder:
            fault: dict[str, Any] = {"at": may_be[place_of - 1], "fault": "fail", "error": errno.EINTR}
            done = bench.machine.run("reshard", folder, source, kind, False, reads=True, **fault)
            assert done.error is None, done
            assert contents(folder / name) == expected
            assert listed(folder) == [name]


@pytest.mark.parametrize("kind", KINDS)
def test_reads_and_writes_of_less_than_was_asked_for(bench: Bench, kind: str) -> None:
    name = name_of(kind)
    expected, whole = bench.reference(name, "reshard", str(bench.source), kind, False)
    with bench.folder() as folder:
        source = str(shutil.copytree(bench.source, folder / "source"))
        done = bench.machine.run("reshard", folder, source, kind, False, at=1, fault="short from", reads=True)
        assert done.error is None, done
        assert contents(folder / name) == expected
    assert sum(line.startswith("write") for line in done.operations) > sum(line.startswith("write") for line in whole)


@some_or_all_of_every_kind
def test_a_source_that_cannot_be_read_is_named(bench: Bench, kind: str, amount: Amount) -> None:
    name = name_of(kind)
    expected, _ = bench.reference(name, "reshard", str(bench.source), kind, False)
    with bench.folder() as folder:
        source = str(shutil.copytree(bench.source, folder / "source"))
        operations = bench.machine.run("reshard", folder, source, kind, False, reads=True).operations
    reads = [at for at, line in enumerate(operations, 1) if re.match("(open|read) source", line)]
    refused = 0
    for number, _ in cases([operations[at - 1] for at in reads], amount, [errno.EIO]):
        with bench.folder() as folder:
            source = str(shutil.copytree(bench.source, folder / "source"))
            fault: dict[str, Any] = {"at": reads[number - 1], "fault": "fail", "error": errno.EIO}
            done = bench.machine.run("reshard", folder, source, kind, False, reads=True, **fault)
            if done.error is not None:
                refused += 1
                assert done.filename is not None, done
                assert Path(done.filename).is_relative_to(source), done
                assert not (folder / name).exists()
                assert bench.machine.run("reshard", folder, source, kind, True).error is None
            assert contents(folder / name) == expected
            assert listed(folder) == sorted([name, "source"])
    assert refused


# What a loss of power would leave.


@pytest.mark.parametrize("kind", KINDS)
def test_all_is_on_the_disk_before_it_has_its_name(bench: Bench, kind: str) -> None:
    """Of every file that is published, nothing is written after it was brought to the disk; so with names."""
    name = name_of(kind)
    expected, operations = bench.reference(name, "reshard", str(bench.source), kind, False)
    published = operations.index(f"rename {name}")
    before = [line.partition(" ")[::2] for line in operations[:published]]
    for file in expected:
        last = {how: at for at, (how, path) in enumerate(before) if path.endswith("/" + (file or name))}
        assert last["fsync"] > max(at for how, at in last.items() if how != "fsync"), file
    made = [at for at, (how, _) in enumerate(before) if how in ("create", "mkdir", "rename")]
    synced = [at for at, (how, path) in enumerate(before) if how == "fsync" and path.endswith("/data")]
    assert name == "new.safetensors" or max(synced) > max(at for at in made if "/data/" in before[at][1])
    assert operations[published + 1] == "fsync "


FILES = 40  # More than are synced one after the other.


def test_every_file_is_synced_once(bench: Bench) -> None:
    """Each wait for the disk is a few milliseconds, and there may be thousands of files."""
    expected, operations = bench.reference("new", "columns", str(bench.source), FILES, False)
    files = sorted(name for name in expected if name.endswith(".safetensors"))
    assert len(files) == FILES
    data = [line.partition(" ")[::2] for line in operations[: operations.index("rename new")]]
    for file in files:
        done = [how for how, path in data if path.endswith(f"/data/{file}")]
        assert done[-1] == "fsync", file
        assert done.count("fsync") == 1, file


def test_without_sync_nothing_waits_for_the_disk_once_data_are_written(bench: Bench) -> None:
    """Not for the folder's name either: for it a journal first brings there what was written before."""
    _, operations = bench.reference("new", "columns", str(bench.source), FILES, False, False)
    first = next(at for at, line in enumerate(operations) if line.startswith("write ") and "/data/" in line)
    assert any(line == "rename new" for line in operations[first:])
    assert not [line for line in operations[first:] if line.startswith("fsync")]


@pytest.mark.heavy
def test_what_fails_at_the_end_goes_on_from_there(bench: Bench) -> None:
    """Receipts that were not needed so far are written when headers cannot be, and not after a kill."""
    arguments = str(bench.source), FILES
    expected, operations = bench.reference("new", "columns", *arguments, False)
    last = max(at for at, line in enumerate(operations, 1) if line.startswith("write ") and "/data/" in line)
    for fault in ("fail", "kill"):
        with bench.folder() as folder:
            done = bench.machine.run("columns", folder, *arguments, False, at=last, fault=fault, error=errno.ENOSPC)
            assert done.killed == (fault == "kill")
            assert done.killed or done.error == "OSError"
            going_on = bench.settled(folder / "new", expected, "columns", *arguments, True)
            # Those of 64 x 640 and 48 x 320, of 4 and 8 bytes; the tied ones, once; three rows of five; and one.
            assert (going_on.done == 64 * 640 * 4 + 48 * 320 * 8 + 160 + 15 + 8) == (fault == "fail")
