"""Plans of so many short boxes that the workers find them while they copy, in every way of storing, beside numpy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import shardwise as sw

Array = npt.NDArray[Any]

N = 520
"""So many devices on both sides have more than 2^18 boxes to exchange."""


def mesh(prefix: str, *sizes: int) -> sw.DeviceMesh:
    count = int(np.prod(sizes))
    return sw.DeviceMesh(sizes, ("x", "y")[: len(sizes)], [f"{prefix}:{i}" for i in range(count)])


def values(shape: tuple[int, ...], dtype: str) -> Array:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.random.default_rng(len(shape)).integers(0, 256, size, np.uint8).view(dtype).reshape(shape)


def apart(views: list[Array]) -> list[Array]:
    """The same arrays, each in memory of its own that begins anywhere in a line of the cache."""
    arrays = []
    for number, view in enumerate(views):
        memory = np.zeros(view.nbytes + 64, np.uint8)
        array = memory[number % 64 :][: view.nbytes].view(view.dtype).reshape(view.shape)
        array[...] = view
        arrays.append(array)
    return arrays


def check(
    plan: sw.reshard.ReshardPlan, array: Array, shards: list[Array], out: list[Array], expected: list[Array]
) -> None:
    assert len(plan.transfers) + len(plan.kept) >= 1 << 18
    wanted = [want.tobytes() for want in expected]
    for streaming in (True, False, None):
        for one in out:
            one[...] = np.zeros((), array.dtype)
        plan.core.run(shards, out, list(range(len(out))), None, streaming)
        assert all(got.tobytes() == want for got, want in zip(out, wanted, strict=True)), streaming


ROWS: dict[str, tuple[tuple[int, ...], str, Any, Any, str, str]] = {
    # Shape, dtype, and layout and rule of either side.
    "rows to columns": ((2 * N, 40 * N), "u1", ("x", None), (None, "x"), "even", "even"),
    "shards of several sizes": ((1100, 37 * N + 11), "u2", ("x", None), (None, "x"), "balanced", "chunk"),
    "shards that are empty": ((2 * N - 3, 100 * N - 500), "u1", ("x", None), (None, "x"), "ceil", "ceil"),
    "a row of each shard": ((N, 70 * N), "u1", ("x", None), (None, "x"), "even", "even"),
    "a column of each shard": ((70 * N, N), "u1", (None, "x"), ("x", None), "even", "even"),
    "a few rows of each shard": ((4 * N - 1, 40 * N + 7), "u1", (None, "x"), ("x", None), "balanced", "balanced"),
    "an element of each shard": ((N, N), "c16", ("x", None), (None, "x"), "even", "even"),
    "columns to rows": ((700, 64 * N), "u1", (None, "x"), ("x", None), "even", "balanced"),
    "planes": ((3, 2 * N, 33 * N), "u1", (None, "x", None), (None, None, "x"), "even", "even"),
    "first to last": ((N, 3, 70 * N), "u1", ("x", None, None), (None, None, "x"), "even", "even"),
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", ROWS)
def test_partitions(name: str) -> None:
    shape, dtype, one, other, rule, other_rule = ROWS[name]
    array = values(shape, dtype)
    src = sw.TensorLayout(one, mesh("a", N)).partition(shape, rule)  # type: ignore[arg-type]
    dst = sw.TensorLayout(other, mesh("b", N)).partition(shape, other_rule)  # type: ignore[arg-type]
    expected = dst.views(array)
    check(sw.plan_reshard(src, dst), array, apart(src.views(array)), apart(expected), expected)


@pytest.mark.heavy
def test_devices_that_keep_a_part_and_views_of_one_array() -> None:
    shape = (2 * N, 24 * N)
    array = values(shape, "f4")
    src, dst = (sw.TensorLayout(spec, mesh("a", N)).partition(shape) for spec in (("x", None), (None, "x")))
    expected = dst.views(array)
    check(sw.plan_reshard(src, dst), array, src.views(array), dst.views(np.zeros_like(array)), expected)


@pytest.mark.heavy
def test_sources_of_several_strides() -> None:
    shape = (2 * N, 80 * N)
    array = values(shape, "u1")
    src, dst = (sw.TensorLayout(s, mesh(p, N)).partition(shape) for s, p in ((("x", None), "a"), ((None, "x"), "b")))
    # Every third is backwards, every third has gaps.
    forms: list[Callable[[Array], Array]] = [
        lambda view: view.copy(),
        lambda view: view[::-1].copy()[::-1],
        lambda view: np.repeat(view, 2, axis=0)[::2],
    ]
    shards = [forms[i % 3](view) for i, view in enumerate(src.views(array))]
    expected = dst.views(array)
    check(sw.plan_reshard(src, dst), array, shards, apart(expected), expected)
    check(sw.plan_reshard(src, dst), array, shards[:1] + apart(shards[1:]), expected_like(expected), expected)


def expected_like(views: list[Array]) -> list[Array]:
    """Arrays of these shapes, of which one is wider than it is long in memory."""
    return [
        np.zeros(view.shape[::-1], view.dtype).T if i == 300 else np.zeros_like(view) for i, view in enumerate(views)
    ]


@pytest.mark.heavy
def test_meshes_of_two_axes() -> None:
    shape = (64 * 4, 64 * 64 * 70)
    array = values(shape, "u1")
    src = sw.TensorLayout(("x", "y"), mesh("a", 64, 4)).partition(shape)
    dst = sw.TensorLayout((None, ("y", "x")), mesh("b", 64, 64)).partition(shape)
    expected = dst.views(array)
    check(sw.plan_reshard(src, dst), array, apart(src.views(array)), apart(expected), expected)


@pytest.mark.heavy
def test_tilings_that_are_lists() -> None:
    shape = (2 * N, 40 * N)
    array = values(shape, "u1")
    boxes = np.array([[[2 * i, 2 * i + 2], [0, shape[1]]] for i in range(N)])
    src = sw.Tiling.from_boxes(shape, boxes)
    dst = sw.TensorLayout((None, "x"), mesh("b", N)).partition(shape)
    expected = dst.views(array)
    shards = apart([array[2 * i : 2 * i + 2] for i in range(N)])
    check(sw.plan_reshard(src, dst), array, shards, apart(expected), expected)


@pytest.mark.heavy
def test_of_partial_sums_the_addends_are_added() -> None:
    shape = (2 * N, 40 * N)
    array = values(shape, "u1")
    src = sw.TensorLayout(("x", None), mesh("a", N, 2), unreduced=("y",)).partition(shape)
    dst = sw.TensorLayout((None, "x"), mesh("b", N)).partition(shape)
    shards = [view if i % 2 == 0 else np.full_like(view, 3) for i, view in enumerate(src.views(array))]
    out = apart(dst.views(array))
    sw.plan_reshard(src, dst).run(shards, out)
    assert all((got == want + np.uint8(3)).all() for got, want in zip(out, dst.views(array), strict=True))


@pytest.mark.heavy
@pytest.mark.parametrize("asked", [[0], [0, N - 1], [0, 1, 200, N - 2, N - 1]])
def test_some_outputs_one_of_rows_that_are_cut(asked: list[int]) -> None:
    """The last holder has rows of more than 64 KiB, with a rest; of most holders nothing is asked."""
    long = 70_001
    shape = (2 * N, N - 1 + long)
    array = values(shape, "u1")
    edges = [*range(N), shape[1]]
    src = sw.TensorLayout(("x", None), mesh("a", N)).partition(shape)
    dst = sw.Tiling.from_boxes(shape, np.array([[[0, shape[0]], side] for side in itertools.pairwise(edges)]))
    outputs = [asked.index(holder) if holder in asked else -1 for holder in range(N)]
    expected = [array[:, edges[holder] : edges[holder + 1]] for holder in asked]
    plan, shards = sw.plan_reshard(src, dst), src.views(array)
    for streaming in (True, False, None):
        out = [np.zeros_like(one) for one in apart(expected)]
        plan.core.run(shards, out, outputs, None, streaming)
        assert all((got == want).all() for got, want in zip(out, expected, strict=True)), streaming


@pytest.mark.heavy
@pytest.mark.parametrize("after", [0, 400_000])
def test_a_copy_that_is_stopped_has_written_right_elements_or_none(after: int) -> None:
    shape = (2 * N, 40 * N)
    array = values(shape, "u1")
    array[array == 0] = 1
    src, dst = (sw.TensorLayout(s, mesh(p, N)).partition(shape) for s, p in ((("x", None), "a"), ((None, "x"), "b")))
    plan, shards, expected = sw.plan_reshard(src, dst), src.views(array), dst.views(array)
    # One after the other, with a byte between them that is no one's.
    memory = np.zeros(array.size + N + 1, np.uint8)
    size = expected[0].size
    out = [memory[1 + i * (size + 1) :][:size].reshape(view.shape) for i, view in enumerate(expected)]

    def stop(done: int, total: int) -> None:
        if done > after:
            raise InterruptedError

    for streaming in (True, False, None):
        memory[:] = 0
        with pytest.raises(InterruptedError):
            plan.core.run(shards, out, list(range(N)), stop, streaming)
        assert all(((got == want) | (got == 0)).all() for got, want in zip(out, expected, strict=True))
        assert not memory[:: size + 1].any()
        plan.core.run(shards, out, list(range(N)), None, streaming)
        assert all((got == want).all() for got, want in zip(out, expected, strict=True))
        assert not memory[:: size + 1].any()
