"""Plans among four MPI ranks: the bytes that numpy cuts, whatever the tilings, the dtype and the memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.execute import mpi
from tests.checks import peak_of, poisoned_memory

ROOT = Path(__file__).parents[2]
# The wheels of an MPI put it beside the interpreter.
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


def mpirun(*command: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("mpi4py")
    if MPIRUN is None:
        pytest.skip("no mpirun")
    return subprocess.run(
        [MPIRUN, "-n", "4", sys.executable, *command], capture_output=True, text=True, timeout=3600, cwd=ROOT
    )


@pytest.mark.parametrize("name", ["random_plans", "packed_plans", "sums", "dtypes_by_name", "refusals"])
def test_among_four_ranks(name: str) -> None:
    if name == "dtypes_by_name":
        pytest.importorskip("ml_dtypes")
    done = mpirun("-m", "tests.execute.mpi_ranks", name)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("all is well") == 4


def test_a_failure_in_the_middle_ends_all_ranks() -> None:
    done = mpirun("-m", "tests.execute.mpi_ranks", "failure_later")
    assert done.returncode != 0
    assert "rank 2 failed, so all ranks end: MemoryError: no room for this" in done.stderr
    assert "all is well" not in done.stdout


def test_a_message_that_is_too_short_ends_all_ranks() -> None:
    done = mpirun("-m", "tests.execute.mpi_ranks", "too_little")
    assert done.returncode != 0
    assert "so all ranks end: LayoutError: rank 2 has sent 255 bytes, not 256" in done.stderr
    assert "all is well" not in done.stdout


def test_the_example() -> None:
    done = mpirun("examples/mpi_ranks.py")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "every rank has its columns" in done.stdout


def test_the_example_of_pytorch() -> None:
    pytest.importorskip("torch")
    command = [sys.executable, "examples/torch_send_receive.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "every one has its columns" in done.stdout


def test_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.execute import mpi

    monkeypatch.setitem(sys.modules, "mpi4py", None)
    mesh = sw.DeviceMesh((1,), ("x",))
    whole = sw.TensorLayout((None,), mesh).partition((4,))
    with pytest.raises(ImportError, match=r"pip install 'shardwise\[mpi\]'"):
        mpi.run(sw.plan_reshard(whole, whole), None, np.zeros(4))


def test_a_model_among_ranks() -> None:
    done = mpirun("-m", "tests.execute.mpi_model_ranks")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("all is well") == 4


class Alone:
    """A communicator of one rank, which takes the place of mpi4py's: what it sends itself, it copies."""

    def Get_rank(self) -> int:  # noqa: N802
        return 0

    def Get_size(self) -> int:  # noqa: N802
        return 1

    def Dup(self) -> Alone:  # noqa: N802
        return self

    def Free(self) -> None:  # noqa: N802
        pass

    def Is_inter(self) -> bool:  # noqa: N802
        return False

    def Allgather(self, sent: list[Any], received: list[Any]) -> None:  # noqa: N802
        received[0][0] = sent[0]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Alone:
    world = types.ModuleType("mpi4py.MPI")
    world.__dict__.update(Comm=Alone, COMM_NULL=None, BYTE=None, Request=None)
    package = types.ModuleType("mpi4py")
    package.__dict__["MPI"] = world
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    return Alone()


def test_the_padding_of_a_rank_is_zero(alone: Alone) -> None:
    mesh = sw.DeviceMesh((1,), ("x",))
    dst = sw.TensorLayout((sw.packed.padded_vocab(500, "x", 600),), mesh).partition((500,))
    src = sw.TensorLayout((None,), mesh).partition((500,))
    poisoned_memory((600,), "f8")
    got = mpi.run(sw.plan_reshard(src, dst), alone, np.ones(500), memory=64)
    assert got is not None
    assert got.tolist() == [1.0] * 500 + [0.0] * 100


@pytest.mark.parametrize("memory", [8 << 20, 24 << 20])
def test_the_buffers_of_a_rank_take_the_memory_that_was_named(alone: Alone, memory: int) -> None:
    whole = sw.TensorLayout((None,), sw.DeviceMesh((1,), ("x",))).partition((4,))
    plan, src = sw.plan_reshard(whole, whole), np.arange(4.0)
    peak = peak_of(lambda: mpi.run(plan, alone, src, memory=memory))
    assert 0.9 * memory < peak < 1.1 * memory


def test_ranks_that_are_given_and_those_that_follow() -> None:
    """Holders in both have one rank; the others have those that no source has, in order."""
    few, many = sw.DeviceMesh((3,), ("x",), ["a", "b", "c"]), sw.DeviceMesh((4,), ("x",), ["d", "b", "e", "f"])
    plan = sw.plan_reshard(*(sw.TensorLayout(("x",), mesh).partition((12,)) for mesh in (few, many)))
    assert mpi._ranks_of(plan, [4, 0, 2], None, 8) == ([4, 0, 2], [1, 0, 3, 5])
    assert mpi._ranks_of(plan, None, None, 6) == ([0, 1, 2], [3, 1, 4, 5])
