"""No memory left is a `MemoryError` in every call: never the end of the process, never another exception."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.oracle.worker import ROOT
from tests.out_of_memory import CALLS

linux = pytest.mark.skipif(sys.platform != "linux", reason="limits the address space as Linux does")

#: What needs so little that it always succeeds: it may not fail either. Boxes that are a grid are not copied.
LITTLE = {"box", "boxes by hand", "label that is not there", "partition"}


def outcomes(call: str, backtrace: str) -> dict[str, int]:
    environment = {**os.environ, "RUST_BACKTRACE": backtrace}
    command = [sys.executable, "-m", "tests.out_of_memory", call]
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
