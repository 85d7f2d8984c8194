"""No memory left is a `MemoryError` in every call: never the end of the process, never another exception.

Nor do counts and ranks that are too large for any memory end it, or keep it busy.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.oracle.worker import ROOT
from tests.process.out_of_memory import CALLS

linux = pytest.mark.skipif(sys.platform != "linux", reason="limits the address space as Linux does")

#: What needs so little that it always succeeds: it may not fail either. Boxes that are a grid are not copied.
LITTLE = {"box", "boxes by hand", "label that is not there", "partition"}


def outcomes(call: str, backtrace: str) -> dict[str, int]:
    environment = {**os.environ, "RUST_BACKTRACE": backtrace}
    command = [sys.executable, "-m", "tests.process.out_of_memory", call]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False, timeout=3600)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    found = json.loads(done.stdout)["outcomes"]
    assert set(found) <= {"succeeded", "MemoryError"}, (found, done.stderr.decode(errors="replace")[-2000:])
    assert isinstance(found, dict)
    return found


@linux
@pytest.mark.slow
@pytest.mark.parametrize("backtrace", ["0", "1"])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_succeeds_or_raises_memory_error(call: str, backtrace: str) -> None:
    found = outcomes(call, backtrace)
    assert found.get("succeeded", 0) > 0
    assert ("MemoryError" in found) is (call not in LITTLE)


@pytest.mark.heavy
@linux
def test_one_call_always() -> None:
    """One that was seen to raise a panic; the others have their turn among the slow tests."""
    assert outcomes("devices_holding", "1").keys() == {"succeeded", "MemoryError"}


#: Calls of the compiled module that are given a count, a rank, a size or a place `n`.
COUNTS = {
    "tree": "_core.BoxTree(zeros(0), n)",
    "one_each": "_core.Tiling.one_each((), zeros(0), n, True).check()",
    "one_each, no box": "_core.Tiling.one_each((4,), zeros(0), n, True)",
    "own": "_core.Tiling.boxes((), [(zeros(0), n, True)], True)",
    "flat": "_core.Tiling.boxes((), [(zeros(0), n, False)], True)",
    "given": "_core.Tiling.boxes((), [(zeros(0), n, ((), zeros(0)))], True)",
    "given, flat": "_core.Tiling.boxes((), [(zeros(0), n, ((n,), zeros(0)))], True)",
    "grid": "grid((n, 4), (1, 1), True).array_sizes()",
    "grid, held": "grid((n, 4), (1, 1), True).held_sizes()",
    "grid, chunks": "grid((4, 4), (n, n), True).check()",
    "pieces": "grid((4,), (2,), True).pieces(n)",
    "ranges": "_core.Tiling.flat((n,), np.array([0, n]), True).pieces(0)",
    "plan": "_core.ReshardPlan(grid((n,), (1,), False), grid((n,), (n,), False), zeros(0), None)",
    "plan, one to all": "_core.ReshardPlan(grid((n,), (n,), False), grid((n,), (1,), False), -1 - zeros(1), None)",
    "mesh": "_core.Mesh((n, n), ('x', 'y')).coordinates()",
    "axis": "_core.Mesh((n,), ('x',)).coordinate(n)",
    "participants": "_core.balance_model([], [], [], n, None)",
    "sorts": "_core.balance_model([], [n], [n], 1, None)",
    "sizes of elements": "_core.balance_model([(grid((4,), (4,), False), grid((4,), (2,), False), -1 - zeros(2), "
    "zeros(1), zeros(2))], [0] * 9, [min(n, 2**63 - 1)] * 9, 1, None)",
    "tree, boxes": "_core.BoxTree(np.array([min(n, 2**63 - 1), -n if n < 2**63 else 0, 0, 0] * 20).reshape(-1), 2)",
    "threads": "_core.CopyJob([], [], zeros(0)).run(1 << 20, n, False, None)",
    "budget": "_core.CopyJob([], [], zeros(0)).run(n, 1, False, None)",
    "dims": "_core.CopyJob([], [], np.array([1, 0, n, 0, 0]))",
    "rows": "_core.CopyJob([], [], np.array([1, 0, 0, n, n]))",
    "length": "_core.joined_crc(1, 2, n)",
}

PROGRAM = """
import resource, sys
import numpy as np
from shardwise import _core
resource.setrlimit(resource.RLIMIT_AS, (4 << 30,) * 2)
zeros, grid = lambda count: np.zeros(count, np.int64), _core.Tiling.grid
for n in [2**31, 2**40, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1]:
    print(n, end=" ", flush=True)
    try:
        eval(sys.argv[1])
        print("succeeded", flush=True)
    except Exception as error:
        print(type(error).__name__, str(error)[:200], flush=True)
print("all")
"""


@linux
@pytest.mark.parametrize("call", COUNTS)
def test_a_count_that_is_too_large_for_any_memory_is_refused_at_once(call: str) -> None:
    command = [sys.executable, "-c", PROGRAM, COUNTS[call]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, timeout=60, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all\n")
    assert "InternalError" not in done.stdout, done.stdout
    if call in {"tree", "one_each", "own", "flat", "given", "given, flat"}:
        assert "succeeded" not in done.stdout, done.stdout
