"""Pictures of shards: drawn by hand here, and for random layouts checked against the partition."""

import io
import itertools
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise import DeviceMesh, TensorLayout, UnevenRule
from shardwise.cli import main
from shardwise.cli.show import Grid
from shardwise.cli.terminal import Screen


def drawn(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["show", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_two_dims(capsys: pytest.CaptureFixture[str]) -> None:
    assert drawn(capsys, "8,6", "--mesh", "data=2,model=2", "--layout", "model,data", "--dtype", "bfloat16") == [
        "8 x 6 laid out as model,data on the mesh data=2,model=2",
        "4 shards of 4 x 3, each on one device, 24 B of 96 B, 25%",
        "",
        "            dim 1",
        "dim 0    0:3     3:6",
        "      ┌───────┬───────┐",
        "  0:4 │ cpu:0 │ cpu:2 │",
        "      ├───────┼───────┤",
        "  4:8 │ cpu:1 │ cpu:3 │",
        "      └───────┴───────┘",
    ]


def test_replicas_stand_in_one_cell(capsys: pytest.CaptureFixture[str]) -> None:
    assert drawn(capsys, "6", "--mesh", "data=2,model=3", "--layout", "model") == [
        "6 laid out as model on the mesh data=2,model=3",
        "3 shards of 2, each on 2 devices",
        "",
        "              dim 0",
        "     0:2       2:4       4:6",
        " ┌─────────┬─────────┬─────────┐",
        " │ cpu:0,3 │ cpu:1,4 │ cpu:2,5 │",
        " └─────────┴─────────┴─────────┘",
    ]


def test_a_scalar(capsys: pytest.CaptureFixture[str]) -> None:
    assert drawn(capsys, "", "--mesh", "x=8", "--layout", "") == [
        "scalar laid out as () on the mesh x=8",
        "1 shard of scalar, each on 8 devices",
        "",
        " ┌──────────┐",
        " │ cpu:0..7 │",
        " └──────────┘",
    ]


def test_more_dims_fold_into_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert drawn(capsys, "2x5x4x6", "--mesh", "a=2,b=2,c=2", "--layout", "a,-,b,c")[3:] == [
        "                   dim 3",
        "dim 0, dim 2    0:3     3:6",
        "             ┌───────┬───────┐",
        "    0:1, 0:2 │ cpu:0 │ cpu:1 │",
        "             ├───────┼───────┤",
        "    0:1, 2:4 │ cpu:2 │ cpu:3 │",
        "             ├───────┼───────┤",
        "    1:2, 0:2 │ cpu:4 │ cpu:5 │",
        "             ├───────┼───────┤",
        "    1:2, 2:4 │ cpu:6 │ cpu:7 │",
        "             └───────┴───────┘",
    ]


def test_empty_shards_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    lines = drawn(capsys, "9", "--mesh", "x=2,y=2", "--layout", "x+y", "--uneven", "ceil")
    assert lines[1] == "4 shards of at most 3, each on one device"
    assert lines[-2].split("│")[1:-1] == [" cpu:0 ", " cpu:1 ", " cpu:2 ", " cpu:3 empty "]


def test_a_large_grid_loses_its_middle(capsys: pytest.CaptureFixture[str]) -> None:
    lines = drawn(capsys, "1024,1024", "--mesh", "a=32,b=32", "--layout", "a,b")
    assert lines[1] == "1,024 shards of 32 x 32, each on one device"
    assert len(lines) < 45
    assert max(map(len, lines)) <= 100
    cells = [line.split("│") for line in lines if "│" in line]
    assert [cell.strip() for cell in cells[-1]][-3:] == ["…", "cpu:1023", ""]
    assert {cell.strip() for cell in cells[-2][1:-1]} == {"…"}
    assert cells[0][1].strip() == "cpu:0"


def test_a_mesh_beyond_memory(capsys: pytest.CaptureFixture[str]) -> None:
    size = 2**40
    lines = drawn(capsys, f"{size},2", "--mesh", f"a={size},b=1048576,c=2", "--layout", "a,c")
    assert f"each on {2**20:,} devices" in lines[1]
    assert f"cpu:0 + {2**20 - 1:,}" in lines[6]
    assert f"{size - 1}:{size} │" in lines[-2]


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
    uneven: UnevenRule = data.draw(st.sampled_from(["ceil", "chunk", "balanced", "floor"]))
    partition = TensorLayout(tuple(map(tuple, specs)), mesh).partition(shape, uneven)

    lines = ["".join(text for text, _ in line) for line in Grid(mesh, partition).draw(10_000, 10_000)]
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
        grid = Grid(mesh, TensorLayout(("a", "b"), mesh).partition((rows, columns)))
        styles = [[style for _, style in line if style.startswith("black")] for line in grid.draw(10_000, 10_000)]
        colours = [line for line in styles if line]
        assert len(colours) == rows
        for line in colours:
            assert all(left != right for left, right in itertools.pairwise(line))
        for upper, lower in itertools.pairwise(colours):
            assert columns == 1 or all(above != below for above, below in zip(upper, lower, strict=True))


class Terminal(io.StringIO):
    """A stream that calls itself a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_colour_only_where_there_is_a_terminal_that_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)

    def output(stream: io.StringIO) -> str:
        Screen(stream).write(("cpu:0", "black on color(117)"), " │")
        return stream.getvalue()

    assert output(io.StringIO()) == "cpu:0 │\n"
    assert output(Terminal()) == "\x1b[30;48;5;117mcpu:0\x1b[0m │\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert "48;5" not in output(Terminal())
