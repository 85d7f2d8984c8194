"""`python -m tests.mutants FILE …`: change modules place by place, and see whether their tests notice.

First the tests are run as they are, to see which of them reach which lines. Then each change is made in a process of
its own, which runs the tests that reach the place, the quickest first, until one fails or does not end. It is forked
from one that has collected the tests, and puts the changed function in the place of the other; for what is done when a
module is imported, from one that has imported only what takes long. What no test reaches, or notices, is printed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from itertools import chain
from pathlib import Path
from types import CodeType
from typing import Any

import coverage
import hypothesis
import ml_dtypes  # noqa: F401  (Imported before the processes are forked.)
import numpy as np  # noqa: F401
import pytest

from .changes import Change, changes_of
from .swapped import Run, Swapping, put_in_place

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "shardwise"

#: Of every kind of value, and of every entry.
VALUES = ["tests/laws/test_values.py", "tests/laws/test_arguments.py"]

#: Where the tests of a room are, besides its own doctests.
TESTS = {
    "array": ["tests/array", "tests/laws"],
    "cli": ["tests/cli"],
    "deploy": ["tests/deploy", "tests/rules"],
    "dtensor": ["tests/dtensor", *VALUES],
    "execute": ["tests/execute"],
    "fit": ["tests/fit"],
    "interop": ["tests/interop", "tests/packed", *VALUES],
    "model": ["tests/model", "tests/array", *VALUES],
    "packed": ["tests/packed", "tests/laws", "tests/reshard"],
    "quantized": ["tests/quantized", "tests/fit", "tests/store/tensors/test_quantized.py"],
    "reshard": [
        "tests/reshard",
        "tests/laws",
        "tests/array",
        "tests/packed",
        "tests/test_sub_axis.py",
    ],
    "rules": ["tests/rules", "tests/model", *VALUES],
    "show": ["tests/show"],
    "store": ["tests/store"],
    "": [
        "tests/test_*.py",
        "tests/process/test_signals.py",
        "tests/process/test_threads.py",
        "tests/laws",
        "tests/packed",
        "tests/array",
        "tests/reshard",
    ],
}
#: Tests that run programs and see none of the changes, or that read the files of the project.
LEFT_OUT = ["rooms", "shipped"]

OPTIONS = ["-x", "-q", "-m", "not slow", "--assert=plain", "--hypothesis-profile=mutants", "--hypothesis-seed=0"]
OPTIONS += ["-p", "no:cacheprovider", "-p", "no:faulthandler", "--continue-on-collection-errors"]

KILLED, SURVIVED, UNREACHED = "killed", "survived", "not reached"
#: How a process ends in which the change cannot be made.
IMPOSSIBLE = 98
#: How many bytes of addresses a process may have that makes a change.
ADDRESSES = 4 << 30
#: The output, also in processes that have another.
SHOWN = os.dup(1)


def tests_of(file: Path) -> list[str]:
    room = file.relative_to(PACKAGE).parts[0]
    patterns = TESTS.get(room, TESTS[""])
    found = [str(path.relative_to(ROOT)) for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    doctests = file if file.parent == PACKAGE else file.parent
    return [str(doctests.relative_to(ROOT)), *(path for path in found if Path(path).stem[5:] not in LEFT_OUT)]


class Reached:
    """A plugin that notes for each test the lines that it reaches, how long it takes, and whether it passes."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self.measured = measured
        self.seconds: dict[str, float] = {}
        #: What is made once for several tests is reached by the first of them; by that one, all of them.
        self.sharing: dict[str, list[str]] = {}
        self._first: dict[Any, str] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.measured.switch_context(item.nodeid)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        yield
        fixtures = getattr(item, "_fixtureinfo", None)
        for fixture in chain.from_iterable(fixtures.name2fixturedefs.values() if fixtures else ()):
            if fixture.scope != "function" and fixture.baseid:  # Not those of pytest itself, which all tests share.
                first = self._first.setdefault(fixture, item.nodeid)
                self.sharing.setdefault(first, []).append(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.seconds[report.nodeid] = report.duration


class Only:
    """A plugin that keeps some tests, in an order given."""

    def __init__(self, names: list[str]) -> None:
        self.order = {name: position for position, name in enumerate(names)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((item for item in items if item.nodeid in self.order), key=lambda x: self.order[x.nodeid])


def in_child(work: Callable[[], int], seconds: float) -> int | None:
    """The exit status of a process of its own that does the work; `None` if it is ended or takes too long."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            os.setpgid(0, 0)
            out = os.open(os.environ.get("MUTANTS_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(out, 1)
            os.dup2(out, 2)
            status = work()
        finally:
            os._exit(status)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, how = os.waitpid(child, os.WNOHANG)
        if ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # What its tests may have left.
            return os.WEXITSTATUS(how) if os.WIFEXITED(how) else None
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def reach(files: list[Path], folder: Path) -> tuple[dict[Path, dict[int, set[str]]], dict[str, float]]:
    """Which tests reach which lines of the files, and how long each test takes."""
    data, times = folder / "reached", folder / "seconds.json"
    tests = list(dict.fromkeys(name for file in files for name in tests_of(file)))

    def work() -> int:
        measured = coverage.Coverage(data_file=str(data), include=list(map(str, files)), config_file=False)
        plugin = Reached(measured)
        measured.start()
        status = pytest.main([*OPTIONS[1:], *tests], plugins=[plugin])
        measured.stop()
        measured.save()
        times.write_text(json.dumps([plugin.seconds, plugin.sharing]), "utf-8")
        return int(status)

    in_child(work, 3600)
    seconds, sharing = json.loads(times.read_text("utf-8")) if times.exists() else ({}, {})
    if not seconds:
        sys.exit("the tests do not run as they are; MUTANTS_LOG names a file for what they say")
    found = coverage.CoverageData(basename=str(data))
    found.read()
    by_line = {
        file: {
            line: {name for first in names for name in (first, *sharing.get(first, ()))}
            for line, names in found.contexts_by_lineno(str(file)).items()
        }
        for file in files
    }
    return by_line, seconds


@dataclass
class Trial:
    """One change, and the tests that may notice it, the quickest first."""

    file: Path
    tree: ast.Module
    change: Change
    tests: list[str]
    seconds: float
    outcome: str | None = None

    def end(self, outcome: str) -> None:
        """Note the outcome, and say it unless the change was noticed."""
        self.outcome = outcome
        if outcome != KILLED:
            line = f"{self.file.relative_to(ROOT)}:{self.change.line}: {outcome}: {self.change.text}\n"
            os.write(SHOWN, line.encode())

    def made(self, work: Callable[[], int]) -> int | None:
        """Make the change in a process of its own, and do the work there; how that ends."""

        def changed() -> int:
            cpu = int(10 + 4 * self.seconds)
            resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
            resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
            self.change.make()
            return work()

        return in_child(changed, 60 + 20 * self.seconds)

    def imported(self) -> str:
        """The outcome where the module is imported as it is changed."""
        get_code = SourceFileLoader.get_code

        def changed(loader: SourceFileLoader, fullname: str) -> CodeType | None:
            if Path(loader.path) != self.file:
                return get_code(loader, fullname)
            return compile(ast.fix_missing_locations(self.tree), str(self.file), "exec", dont_inherit=True)

        def work() -> int:
            SourceFileLoader.get_code = changed  # type: ignore[assignment, method-assign]
            return int(pytest.main([*OPTIONS, *files_of(self.tests)], plugins=[Only(self.tests)]))

        return SURVIVED if self.made(work) == 0 else KILLED

    def swapped(self, run: Run) -> str | None:
        """The outcome where the tests are collected already; `None` if the change cannot be made there."""
        status = self.made(lambda: not run(self.tests) if put_in_place(self.file, self.tree) else IMPOSSIBLE)
        return None if status == IMPOSSIBLE else SURVIVED if status == 0 else KILLED


def files_of(tests: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name.split("::")[0] for name in tests))


def try_swapped(trials: list[Trial]) -> None:
    """Try the changes of functions in one session, in which the tests are collected once.

    A test that fails here though nothing is changed, since it needs others before it, is left out of all trials.
    """
    names = list(dict.fromkeys(name for trial in trials for name in trial.tests))

    def use(run: Run) -> None:
        unfit = {name for name in names if in_child(lambda name=name: not run([name]), 600)}  # type: ignore[misc]
        print(json.dumps(sorted(unfit)), file=answers, flush=True)
        for index, trial in enumerate(trials):
            trial.tests = [name for name in trial.tests if name not in unfit]
            if trial.tests and trial.change.reached_by and (outcome := trial.swapped(run)):
                trial.end(outcome)
                print(index, outcome, file=answers, flush=True)

    with tempfile.TemporaryFile("w+", encoding="utf-8") as answers:
        in_child(lambda: int(pytest.main([*OPTIONS, *files_of(names)], plugins=[Swapping(use)])), 24 * 3600)
        answers.seek(0)
        unfit = set(json.loads(answers.readline() or "[]"))
        for trial in trials:
            trial.tests = [name for name in trial.tests if name not in unfit]
        for line in answers:
            index, outcome = line.strip().split(" ", 1)
            trials[int(index)].outcome = outcome


def tests_that_reach(by_line: dict[int, set[str]], change: Change) -> set[str]:
    lines = change.reached_by or by_line
    return {name for line in lines for name in by_line.get(line, ()) if name}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.split("\n\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--count", type=int, help="how many changes of each file are made, drawn by the seed (all)")
    parser.add_argument("--every", type=int, default=1, help="make one change in so many, from the seed's on (all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=5.0, help="tests that take no longer together, per change (5)")
    arguments = parser.parse_args()
    hypothesis.settings.register_profile(
        "mutants",
        max_examples=10,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    files = [file.resolve() for file in arguments.files]
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory(prefix="shardwise-mutants-") as folder:
        by_line, times = reach(files, Path(folder))
    trials: list[Trial] = []
    found: Counter[Path] = Counter()
    for file in files:
        tree = ast.parse(file.read_text("utf-8"))
        every = changes_of(tree)
        found[file] = len(every)
        chosen = every[arguments.seed % arguments.every :: arguments.every]
        if arguments.count is not None and arguments.count < len(chosen):
            drawn = random.Random(arguments.seed).sample(range(len(chosen)), arguments.count)
            chosen = [chosen[index] for index in sorted(drawn)]
        for change in chosen:
            trial = Trial(file, tree, change, [], 0.0)
            for name in sorted(tests_that_reach(by_line[file], change) & times.keys(), key=lambda name: times[name]):
                trial.seconds += times[name]
                if trial.tests and trial.seconds > arguments.seconds:
                    break
                trial.tests.append(name)
            trials.append(trial)
    try_swapped(trials)
    for trial in trials:
        if trial.outcome is None:
            trial.end(trial.imported() if trial.tests else UNREACHED)
    for file in files:
        counts = Counter(trial.outcome for trial in trials if trial.file == file)
        row = ", ".join(f"{counts[outcome]} {outcome}" for outcome in (KILLED, SURVIVED, UNREACHED))
        print(f"{file.relative_to(ROOT)}: {found[file]} changes, {counts.total()} made: {row}", flush=True)
    print(f"{len(trials)} made: {dict(Counter(trial.outcome for trial in trials))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
