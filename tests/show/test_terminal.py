"""Grids in a terminal: for random layouts checked against the partition."""

from __future__ import annotations

import itertools
import math
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise import DeviceMesh, TensorLayout, UnevenRule
from shardwise.show.grid import Grid
from shardwise.show.terminal import grid_lines

AXES = ("x", "y", "z")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_device_stands_where_its_box_is(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda sizes: math.prod(sizes) <= 9))
    mesh = DeviceMesh(tuple(sizes), AXES[: len(sizes)])
    rank = data.draw(st.integers(1, 4))
    specs: list[list[str]] = [[] for _ in range(rank)]
    for axis in data.draw(st.permutations(mesh.axis_names)):
        specs[data.draw(st.integers(0, rank - 1))] += [axis] * data.draw(st.integers(0, 1))
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=rank, max_size=rank)))
    uneven: UnevenRule = data.draw(st.sampled_from(["ceil", "chunk", "balanced"]))
    partition = TensorLayout(tuple(map(tuple, specs)), mesh).partition(shape, uneven)

    lines = ["".join(text for text, _ in line) for line in grid_lines(Grid(partition), 10_000, 10_000)]
    down = [int(dim) for dim in re.findall(r"dim (\d)", lines[1])]
    (across,) = (int(dim) for dim in re.findall(r"dim (\d)", lines[0]))
    columns = re.findall(r"\d+:\d+", lines[1])
    found: dict[str, dict[int, str]] = {}
    for line in lines[3::2]:
        label, *cells, _ = line.split("│")
        row = dict(zip(down, re.findall(r"\d+:\d+", label), strict=True))
        for column, cell in zip(columns, cells, strict=True):
            for device in expanded(cell):
                assert device not in found
                found[device] = row | {across: column}
    assert len(found) == mesh.size
    for device, interval in found.items():
        box = partition.box(device)
        assert interval == {dim: f"{box[dim].start}:{box[dim].stop}" for dim in interval}
        # What is not drawn is not cut.
        assert all(partition.num_shards[dim] == 1 for dim in range(rank) if dim not in interval)


def expanded(cell: str) -> list[str]:
    prefix, _, numbers = cell.replace("empty", "").strip().partition(":")
    pieces = [piece.split("..") for piece in numbers.split(",")]
    return [f"{prefix}:{i}" for piece in pieces for i in range(int(piece[0]), int(piece[-1]) + 1)]


def test_colours_of_neighbours_differ() -> None:
    for rows, columns in itertools.product((1, 2, 3, 8, 9, 16), repeat=2):
        mesh = DeviceMesh((rows, columns), ("a", "b"))
        grid = Grid(TensorLayout(("a", "b"), mesh).partition((rows, columns)))
        styles = [
            [style for _, style in line if style.startswith("black")] for line in grid_lines(grid, 10_000, 10_000)
        ]
        colours = [line for line in styles if line]
        assert len(colours) == rows
        for line in colours:
            assert all(left != right for left, right in itertools.pairwise(line))
        for upper, lower in itertools.pairwise(colours):
            assert columns == 1 or all(above != below for above, below in zip(upper, lower, strict=True))
