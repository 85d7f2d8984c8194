"""Pictures of shards on the command line, drawn by hand here."""

import io
import json

import pytest

from shardwise.cli import main
from shardwise.cli.terminal import Screen


def drawn(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["show", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    [line] = drawn(capsys, "5,6", "--mesh", "a=2,b=2", "--layout", "b,-", "--uneven", "ceil", "--dtype", "f4", "--json")
    whole = [0, 6]
    assert json.loads(line) == {
        "shape": [5, 6],
        "mesh": {"a": 2, "b": 2},
        "layout": "b,-",
        "uneven": "ceil",
        "num_shards": [2, 1],
        "replicas": 2,
        "shards": [
            {
                "shard_id": shard,
                "devices": devices,
                "shape": [stop - start, 6],
                "pieces": [{"box": [[start, stop], whole], "start": [0, 0]}],
                "nbytes": (stop - start) * 6 * 4,
            }
            for shard, devices, start, stop in [(0, ["cpu:0", "cpu:2"], 0, 3), (1, ["cpu:1", "cpu:3"], 3, 5)]
        ],
    }
    # Of two parts of 4 rows each, each device holds two rows of both.
    [line] = drawn(capsys, "8", "--mesh", "x=2", "--layout", "(2 4@x)", "--json")
    assert json.loads(line)["shards"][1]["pieces"] == [
        {"box": [[2, 4]], "start": [0]},
        {"box": [[6, 8]], "start": [2]},
    ]
    assert main(["show", "8", "--mesh", f"x={2**21}", "--layout", "-", "--json"]) == 2
    assert "2097152 devices are too many to list" in capsys.readouterr().err


def test_two_dims(capsys: pytest.CaptureFixture[str]) -> None:
    assert drawn(capsys, "8,6", "--mesh", "data=2,model=2", "--layout", "model,data", "--dtype", "bfloat16") == [
        "8 x 6 laid out as model,data on the mesh data=2,model=2",
        "4 shards of 4 x 3, each on one device, 24 B of 96 B, 25%",
        "",
        "↓ dim 0: 8, cut in 2 by model",
        "→ dim 1: 6, cut in 2 by data",
        "        0:3     3:6",
        "     ┌───────┬───────┐",
        " 0:4 │ cpu:0 │ cpu:2 │",
        "     ├───────┼───────┤",
        " 4:8 │ cpu:1 │ cpu:3 │",
        "     └───────┴───────┘",
    ]


def test_replicas_stand_in_one_cell(capsys: pytest.CaptureFixture[str]) -> None:
    assert drawn(capsys, "6", "--mesh", "data=2,model=3", "--layout", "model") == [
        "6 laid out as model on the mesh data=2,model=3",
        "3 shards of 2, each on 2 devices",
        "",
        "→ dim 0: 6, cut in 3 by model",
        "            0:2                    2:4                    4:6",
        "  ┌──────────────────────┬──────────────────────┬──────────────────────┐",
        "  │ cpu:0,3 · 2 replicas │ cpu:1,4 · 2 replicas │ cpu:2,5 · 2 replicas │",
        "  └──────────────────────┴──────────────────────┴──────────────────────┘",
    ]


def test_a_scalar(capsys: pytest.CaptureFixture[str]) -> None:
    assert drawn(capsys, "", "--mesh", "x=8", "--layout", "") == [
        "scalar laid out as () on the mesh x=8",
        "1 shard of scalar, each on 8 devices",
        "",
        "  ┌───────────────────────┐",
        "  │ cpu:0..7 · 8 replicas │",
        "  └───────────────────────┘",
    ]


def test_more_dims_are_slices(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (
        [
            f"dim 0 at {at}; dim 1: 5, not cut",
            "↓ dim 2: 4, cut in 2 by b",
            "→ dim 3: 6, cut in 2 by c",
            "        0:3     3:6",
            "     ┌───────┬───────┐",
            f" 0:2 │ cpu:{device} │ cpu:{device + 1} │",
            "     ├───────┼───────┤",
            f" 2:4 │ cpu:{device + 2} │ cpu:{device + 3} │",
            "     └───────┴───────┘",
        ]
        for at, device in (("0:1", 0), ("1:2", 4))
    )
    assert drawn(capsys, "2x5x4x6", "--mesh", "a=2,b=2,c=2", "--layout", "a,-,b,c")[3:] == [*first, *second]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            "a,b,-",
            "3 entries for 2 dims: write one for each, - where it is not cut, + between the axes of one dim, as in",
        ),
        ("", "1 entry for 2 dims: write one for each, - where it is not cut, as in -,-"),
    ],
)
def test_a_layout_of_another_rank(capsys: pytest.CaptureFixture[str], layout: str, message: str) -> None:
    assert main(["show", "8,6", "--mesh", "a=2,b=2", "--layout", layout]) == 2
    assert message in capsys.readouterr().err


def test_empty_shards_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    lines = drawn(capsys, "9", "--mesh", "x=2,y=2", "--layout", "x+y", "--uneven", "ceil")
    assert lines[1] == "4 shards of at most 3, each on one device"
    assert lines[-3].split("│")[1:-1] == [" cpu:0 ", " cpu:1 ", " cpu:2 "]
    assert lines[-1] == "empty: cpu:3"


def test_packed_dims_have_a_row_for_each_shard(capsys: pytest.CaptureFixture[str]) -> None:
    """Two rows of eight, of which a device holds the halves."""
    lines = drawn(capsys, "16", "--mesh", "x=2", "--layout", "(2 8@x)")
    assert lines[1] == "2 shards of 8, each on one device"
    assert [line.split()[0] for line in lines[-2:]] == ["cpu:0", "cpu:1"]
    assert lines[-1].endswith("part 0 4:8, part 0 12:16")


def test_a_large_grid_is_blocks_of_neighbours(capsys: pytest.CaptureFixture[str]) -> None:
    lines = drawn(capsys, "1024,1024", "--mesh", "a=32,b=32", "--layout", "a,b")
    assert lines[1] == "1,024 shards of 32 x 32, each on one device"
    assert len(lines) < 45
    assert max(map(len, lines)) <= 100
    cells = [cell.strip() for line in lines if "│" in line for cell in line.split("│")[1:-1]]
    # 32 blocks of 8 by 4 shards; each has two lines.
    assert cells.count("32 shards") == 32
    assert {"cpu:0 …", f"cpu:{24 * 32 + 28} …"} <= set(cells)


def test_a_mesh_beyond_memory(capsys: pytest.CaptureFixture[str]) -> None:
    size = 2**40
    lines = drawn(capsys, f"{size},2", "--mesh", f"a={size},b=1048576,c=2", "--layout", "a,c")
    assert f"each on {2**20:,} devices" in lines[1]
    last = next(line for line in reversed(lines) if f":{size} │" in line)
    assert last.split("│")[1].strip().startswith(f"cpu:{15 * 2**36 * 2**21} ")


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
