"""Arrays that end, or begin, exactly where readable memory does: one step outside is a crash.

Each array lies in a mapping whose first and last page may not be touched, placed against the one or the other. Making,
reading and (where numpy does) copying every view must not reach over; nor must a plan that is run on such arrays, which
copies on its own. It is done in child processes, so that an error in the address arithmetic fails the test instead of
ending the run.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import shardwise as sw
from tests.checks import view_index
from tests.process.guarded import FORMS, Placed, guarded

Array = npt.NDArray[Any]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages are protected through Linux's libc")


def arrays() -> Iterator[npt.NDArray[Any]]:
    """Arrays of several dtypes and strides at both ends of such a mapping."""
    dtypes: list[Any] = ["u1", "f8", ">i4", "c16", "S3", [("a", "i1"), ("b", "f8")]]
    for name, shape in itertools.product(dtypes, [(7,), (5, 9), (3, 4, 5), (1, 1), (0, 5), ()]):
        dtype = np.dtype(name)
        nbytes = max(int(np.prod(shape)), 0) * dtype.itemsize
        memory = guarded(max(nbytes, 1))
        for start in (0, memory.size - nbytes):
            array = memory[start : start + nbytes].view(dtype).reshape(shape)
            yield array
            yield array.T
            yield array[view_index([slice(None, None, -1)] * len(shape))]
            yield array[view_index([slice(None, None, 2)] * len(shape))]
            if shape:
                yield np.broadcast_to(array[-1:], shape)


def read_every_view() -> int:
    """Make, read and write through every view; give their number."""
    mesh = sw.DeviceMesh((2, 3, 2), ("a", "b", "c"))
    count = 0
    for array in arrays():
        axes: list[Any] = [("c", "a"), "b", None][: array.ndim]
        for rule in ("ceil", "chunk", "balanced", "floor"):
            partition = sw.TensorLayout(axes, mesh).partition(array.shape, rule)
            views = partition.views(array)
            sharded = sw.ShardedArray(partition, views)
            assert sharded.numpy().tobytes() == array.tobytes()
            for view in views:
                view.copy()
                if view.flags.writeable:
                    view[...] = np.zeros((), view.dtype)
            count += len(views)
    return count


def copy_between(a: sw.Partition, b: sw.Partition, array: npt.NDArray[Any], turn: int) -> None:
    """Run the plan on shards at both ends of their mappings; every byte arrives, and no other is written."""

    def placed(views: list[npt.NDArray[Any]], offset: int) -> list[Placed]:
        # Neighbouring shards differ in the end at which they lie, and all combinations come by as the turns go on.
        return [
            Placed(
                view,
                FORMS[(turn + offset + i // 2) % len(FORMS)],
                at_end=(turn // 5 + offset + i) % 2 == 0,
                gap=1 + turn % 7,
            )
            for i, view in enumerate(views)
        ]

    sources, outputs = placed(a.views(array), 0), placed([np.zeros_like(view) for view in b.views(array)], turn // 10)
    plan = sw.plan_reshard(a, b)
    shards = [source.array for source in sources]
    given = [output.array for output in outputs]
    # The last time with stores past the cache, which only large copies use otherwise.
    for got in (plan.run(shards), plan.run(shards, given), streamed(plan, shards, given)):
        for shard, expected in zip(got, b.views(array), strict=True):
            assert shard.tobytes() == expected.tobytes(), (a, b, array.shape, array.dtype, turn)
    assert sw.ShardedArray(a, shards).numpy().tobytes() == array.tobytes()
    assert all(one.is_untouched_outside() for one in sources + outputs), (a, b, array.shape, array.dtype, turn)


def streamed(plan: sw.reshard.ReshardPlan, shards: list[Array], out: list[Array]) -> list[Array]:
    """Run a plan with streaming stores, on outputs that are wiped."""
    for array in out:
        array[...] = np.zeros((), array.dtype)
    plan.core.run(shards, out, list(range(len(out))), None, True)
    return out


def copy_every_row() -> int:
    """Rows of 1 to 264 bytes in all forms, from and to few and many shards, and rows that are cut; count them."""
    count = 0
    random = np.random.default_rng(0)

    def some(shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.frombuffer(random.bytes(size), f"V{np.dtype(dtype).itemsize}").view(dtype).reshape(shape)

    for width in range(1, 265):
        # As many bytes as one element has, and as a row of bytes has.
        devices = (2, 3, 8, 31)[width % 4]
        mesh = sw.DeviceMesh((devices,), ("x",))
        for dtype, columns in ((f"V{width}", devices), ("u1", width * devices))[width % 2 :: 2 if width > 32 else 1]:
            shape = (5 + width % 13, columns)
            rows = sw.TensorLayout(("x", None), mesh).partition(shape, "ceil")
            cut = sw.TensorLayout((None, "x"), mesh).partition(shape)
            array = some(shape, dtype)
            for a, b in ((rows, cut), (cut, rows)):
                copy_between(a, b, array, count)
                count += 1
    mesh = sw.DeviceMesh((4, 3), ("x", "y"))
    for dtype in ("u1", "u2", "f4", "f8", "c16", "V3", "V24", ">i8"):
        for cube in ((7, 9, 11), (1, 40, 3), (13, 2, 2), (64, 3, 5), (0, 3, 4)):
            array = some(cube, dtype)
            layouts = [("x", "y", None), (None, ("y", "x"), None), ("y", None, "x"), (None, None, ("x", "y"))]
            parts = [sw.TensorLayout(axes, mesh).partition(cube, "balanced") for axes in layouts]
            for a, b in itertools.permutations(parts, 2):
                copy_between(a, b, array, count)
                count += 1
    # Long enough for the kernels that cut rows, and for several threads.
    for columns in (65_535, 65_537, 300_001):
        whole = sw.TensorLayout((None, None), mesh).partition((3, columns))
        for layout in (("x", None), (None, ("x", "y"))):
            part = sw.TensorLayout(layout, mesh).partition((3, columns), "chunk")
            copy_between(part, whole, some((3, columns), "u1"), count)
            copy_between(whole, part, some((3, columns), "u1"), count + 1)
            count += 2
    return count


def copy_in_the_heap() -> int:
    """A few views and copies of memory that `make valgrind` watches; give the number of plans."""
    widths = (1, 3, 8, 24, 130)
    for width in widths:
        mesh = sw.DeviceMesh((3,), ("x",))
        rows, cut = (sw.TensorLayout(axes, mesh).partition((41, 9), "ceil") for axes in (("x", None), (None, "x")))
        array = np.zeros((41, 9), f"V{width}")
        for a, b in ((rows, cut), (cut, rows)):
            for shard in sw.plan_reshard(a, b).run([view.copy() for view in a.views(array)]):
                shard.tobytes()
    return 2 * len(widths)


def child(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.process.test_guard_pages", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)


@pytest.mark.heavy
def test_no_view_reaches_over_the_end_of_its_array() -> None:
    done = child("read")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10_000


@pytest.mark.slow
def test_no_copy_reaches_over_the_end_of_its_arrays() -> None:
    done = child("copy")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 800


@pytest.mark.heavy
@pytest.mark.parametrize("end", ["first", "last"])
def test_the_guard_pages_are_guarded(end: str) -> None:
    """What the test above relies on: one byte further is a segmentation fault."""
    assert child(end).returncode == -11


if __name__ == "__main__":
    os.environ["PYTHONFAULTHANDLER"] = ""
    if sys.argv[1] == "read":
        print(read_every_view())
    elif sys.argv[1] == "copy":
        print(copy_every_row())
    elif sys.argv[1] == "heap":
        print(copy_in_the_heap())
    else:
        inside = guarded(8)
        address = inside.__array_interface__["data"][0]
        ctypes.string_at(address - 1 if sys.argv[1] == "first" else address + inside.size, 1)
