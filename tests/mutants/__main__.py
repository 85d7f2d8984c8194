"""`python -m tests.mutants FILE …`: change modules place by place, and see whether their tests notice.

First the tests are run as they are, to see which of them reach which lines. Then each change is made in a process of
its own, which is forked from one that has imported what takes long, compiles the module as it is changed, and runs the
tests that reach the place, the quickest first, until one fails. What no test reaches, or notices, is printed.
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
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

import coverage
import hypothesis
import ml_dtypes  # noqa: F401  (Imported before the processes are forked.)
import numpy as np  # noqa: F401
import pytest

from .changes import Change, changes_of

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "shardwise"

#: Where the tests of a room are, besides its own doctests and the tests of its name.
TESTS = {
    "array": ["tests/array", "tests/test_arrays.py", "tests/test_replicas.py", "tests/laws"],
    "cli": ["tests/cli"],
    "dtensor": ["tests/dtensor"],
    "interop": ["tests/interop"],
    "model": ["tests/model"],
    "packed": ["tests/test_packed.py", "tests/laws", "tests/reshard"],
    "reshard": ["tests/reshard", "tests/laws", "tests/array"],
    "rules": ["tests/rules"],
    "show": ["tests/show"],
    "store": ["tests/store"],
    "": ["tests/test_*.py", "tests/laws", "tests/array", "tests/reshard"],
}
#: Tests that run programs and see none of the changes, or that read the files of the project.
LEFT_OUT = ["benchmarks", "documents", "examples", "fused_examples", "guard_pages", "memory", "page_blocks"]
LEFT_OUT += ["release", "rooms"]

OPTIONS = ["-x", "-q", "-m", "not slow", "--assert=plain", "--hypothesis-profile=mutants", "--hypothesis-seed=0"]
OPTIONS += ["-p", "no:cacheprovider", "-p", "no:faulthandler", "--continue-on-collection-errors"]

KILLED, SURVIVED, UNREACHED = "killed", "survived", "not reached"


def tests_of(file: Path) -> list[str]:
    room = file.relative_to(PACKAGE).parts[0]
    patterns = TESTS.get(room, TESTS[""])
    found = [str(path.relative_to(ROOT)) for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    return [str(file.relative_to(ROOT)), *(path for path in found if Path(path).stem[5:] not in LEFT_OUT)]


class Reached:
    """A plugin that notes for each test the lines that it reaches, how long it takes, and whether it passes."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self.measured = measured
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.measured.switch_context(item.nodeid)
        return (yield)

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


def reach(files: list[Path], folder: Path) -> tuple[dict[Path, dict[int, list[str]]], dict[str, float]]:
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
        times.write_text(json.dumps(plugin.seconds), "utf-8")
        return int(status)

    in_child(work, 3600)
    seconds = json.loads(times.read_text("utf-8")) if times.exists() else {}
    if not seconds:
        sys.exit("the tests do not run as they are; MUTANTS_LOG names a file for what they say")
    found = coverage.CoverageData(basename=str(data))
    found.read()
    return {file: found.contexts_by_lineno(str(file)) for file in files}, seconds


def notice(file: Path, tree: ast.Module, change: Change, tests: list[str], seconds: float) -> bool:
    """Whether one of the tests fails when the change is made, or they do not come to an end."""
    get_code = SourceFileLoader.get_code

    def changed(self: SourceFileLoader, fullname: str) -> CodeType | None:
        if Path(self.path) != file:
            return get_code(self, fullname)
        return compile(ast.fix_missing_locations(tree), str(file), "exec", dont_inherit=True)

    def work() -> int:
        cpu = int(10 + 4 * seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
        change.make()
        SourceFileLoader.get_code = changed  # type: ignore[assignment, method-assign]
        return int(
            pytest.main([*OPTIONS, *dict.fromkeys(name.split("::")[0] for name in tests)], plugins=[Only(tests)])
        )

    return in_child(work, 60 + 20 * seconds) != 0


def tests_that_reach(by_line: dict[int, list[str]], change: Change) -> set[str]:
    lines = change.reached_by or by_line
    return {name for line in lines for name in by_line.get(line, ()) if name}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.split("\n\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--count", type=int, help="how many changes of each file are made, drawn by the seed (all)")
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
    total: Counter[str] = Counter()
    for file in files:
        tree = ast.parse(file.read_text("utf-8"))
        every = changes_of(tree)
        chosen = every
        if arguments.count is not None and arguments.count < len(every):
            drawn = random.Random(arguments.seed).sample(range(len(every)), arguments.count)
            chosen = [every[index] for index in sorted(drawn)]
        counts: Counter[str] = Counter()
        for change in chosen:
            reaching = sorted(tests_that_reach(by_line[file], change) & times.keys(), key=lambda name: times[name])
            taken: list[str] = []
            seconds = 0.0
            for name in reaching:
                seconds += times[name]
                if taken and seconds > arguments.seconds:
                    break
                taken.append(name)
            outcome = UNREACHED if not taken else KILLED if notice(file, tree, change, taken, seconds) else SURVIVED
            counts[outcome] += 1
            if outcome != KILLED:
                print(f"{file.relative_to(ROOT)}:{change.line}: {outcome}: {change.text}", flush=True)
        row = ", ".join(f"{counts[outcome]} {outcome}" for outcome in (KILLED, SURVIVED, UNREACHED))
        print(f"{file.relative_to(ROOT)}: {len(every)} changes, {len(chosen)} made: {row}", flush=True)
        total += counts
    print(f"{total.total()} made: {dict(total)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
