"""Pictures as text: 80 columns, and no number is cut."""

from __future__ import annotations

import re

import pytest

import shardwise as sw
from shardwise import packed
from shardwise.show.draw import _picture
from shardwise.show.lines import width_of
from shardwise.show.text import lines_of
from tests.show.drawings import Drawing
from tests.show.test_svg import MADE, MESH


@pytest.mark.heavy
@pytest.mark.parametrize("name", sorted(set(MADE) - {"long labels"}))
def test_a_picture_fits_a_terminal(name: str) -> None:
    lines = sw.draw(MADE[name](), form="text").split("\n")
    assert max(map(width_of, lines)) <= 80
    assert all(line == line.rstrip() for line in lines)


# The columns of these leave out "cpu:" where they are narrow, or names where they are wide.
@pytest.mark.parametrize("name", sorted(set(MADE) - {"long labels", "report on a million", "wide"}))
def test_a_narrower_picture_says_the_same(name: str) -> None:
    """Whoever is named where there is room for all is named in any terminal, and every range; 70 columns are enough."""

    def said(width: int) -> tuple[set[str], int]:
        lines = ["".join(text for text, _ in line) for line in lines_of(picture, width)]
        return set(re.findall(r"cpu:\d+|\d+:\d+", "\n".join(lines))), max(map(width_of, lines))

    picture = _picture(MADE[name](), None, None, "even", None)
    wide, _ = said(400)
    for width in (24, 40, 60, 70, 100):
        narrow, widest = said(width)
        assert narrow >= wide
        assert widest <= max(width, 70)


def test_only_a_name_makes_it_wider() -> None:
    lines = sw.draw(MADE["long labels"](), form="text").split("\n")
    assert all(len(line) <= 80 or " " not in line.strip() for line in lines)


@pytest.mark.parametrize("name", ["mesh 16 x 16", "16 x 16", "chunks", "wide", "2^62 elements", "mesh of 2^62"])
def test_it_says_who_holds_each_part(name: str) -> None:
    """The first holder of each tile of the picture stands in the text, and each range, though in several frames."""
    text = sw.draw(MADE[name](), form="text")
    for tile in Drawing(sw.draw(MADE[name]())).tiles:
        held = re.search(r"(cpu:\d+|\(\d+, \d+\))", tile.held)
        assert held is not None
        assert re.search(rf"{re.escape(held[1])}(?!\d)", text)
        for start, stop in tile.bounds:
            assert re.search(rf"(?<!\d){start}:{stop}(?!\d)", text)


def test_a_row_of_a_packed_partition_is_a_line() -> None:
    """Device 5 of docs/semantics.md 2.9."""
    lines = sw.draw(MADE["packed"](), form="text").splitlines()
    (line,) = (line for line in lines if line.startswith("  cpu:5,"))
    assert line.endswith("q 2560:3072, k 8448:8576, v 9472:9600")
    bar = line.split("  ")[2].strip()
    # Of 10240 elements in 11 letters: 2560 is in the third, 8448 in the tenth, 9472 in the eleventh.
    assert [bar.index(letter) for letter in "█▓▒"] == [start * len(bar) // 10240 for start in (2560, 8448, 9472)]
    assert sorted(set(bar)) == sorted("█▓▒·")


def test_a_table_of_senders_has_rows_and_columns() -> None:
    rows, columns = (sw.TensorLayout(axes, MESH).partition((6, 8)) for axes in (("data", "model"), (None, "model")))
    text = sw.draw(sw.plan_reshard(rows, columns), form="text")
    lines = [line for line in text.splitlines() if line.lstrip().startswith("cpu:4 sends 24 B │")]
    cells = [cell.strip() for line in lines for cell in line.split("│")[1:-1]]
    assert [cell for cell in cells if cell] == ["24 B", "24 B stay"]


def test_of_what_there_is_nothing_there_is_no_bar() -> None:
    text = sw.draw(sw.LayoutMap(MESH).report({}), form="text")
    assert "cut" not in text
    assert re.search(r"cpu:0..7 \(8\): 0 B each +·+$", text, re.MULTILINE)


def test_wide_letters_take_two_columns() -> None:
    mesh = sw.DeviceMesh((2,), ("x",), ["漢字", "cpu:1"])
    frame = sw.draw(mesh, form="text").splitlines()[3:]
    assert len({width_of(line) for line in frame[1:]}) == 1


def test_columns_that_are_too_many_go_on_in_further_frames() -> None:
    text = sw.draw(MADE["mesh 16 x 16"](), form="text")
    assert text.count("┌") == text.count("┘") > 1
    assert "█" not in text


@pytest.mark.parametrize(("outer", "said"), [(4, "{0}, {1}, {2}, {3}"), (5, "{0}, {1}, …, {4} (5 pieces)")])
def test_up_to_four_pieces_of_a_row_are_named(outer: int, said: str) -> None:
    """Two devices take turns: the first has every even element."""
    dim = sw.packed.concat(sw.packed.part((outer, 2, 1), 1, "x"))
    text = sw.draw(sw.TensorLayout((dim,), sw.DeviceMesh((2,), ("x",))).partition((2 * outer,)), form="text")
    pieces = [f"part 0 {2 * i}:{2 * i + 1}" for i in range(outer)]
    shorter = [piece.removeprefix("part 0 ") for piece in pieces]
    assert said.format(*pieces) in text or said.format(*shorter) in text


def test_boxes_that_are_no_grid_are_a_list() -> None:
    """One box as high as the two beside it: each line has the ranges of a box, and who holds it."""
    boxes = {"a": [[(0, 4), (0, 3)]], "b": [[(0, 2), (3, 8)]], "c": [[(2, 4), (3, 8)]]}
    lines = sw.draw(sw.Tiling.from_boxes((4, 8), boxes), form="text").splitlines()
    assert not any("│" in line for line in lines)
    for name, rows, columns in (("a", "0:4", "0:3"), ("b", "0:2", "3:8"), ("c", "2:4", "3:8")):
        (line,) = (line for line in lines if line.endswith(f" {name}") or f" {name} ·" in line or f" {name}," in line)
        assert line.split()[:2] == [rows, columns]


@pytest.mark.parametrize(("count", "is_grid"), [(16, True), (17, False)])
def test_a_grid_with_free_places_has_up_to_16_rows(count: int, is_grid: bool) -> None:
    boxes = {f"holder {i}": [[(i, i + 1), (i, i + 1)]] for i in range(count)}
    text = sw.draw(sw.Tiling.from_boxes((count, count), boxes), form="text")
    assert ("┌" in text) == is_grid
    assert all(re.search(rf"\bholder {i}\b", text) for i in range(count))


def test_devices_that_hold_addends_are_not_called_replicas() -> None:
    """Axes that cut nothing replicate, unless they are unreduced (2.2)."""
    mesh = sw.DeviceMesh((2, 4), ("x", "y"))
    for axes, unreduced, said in (
        ("x", (), "4 replicas"),
        ("x", ("y",), "4 addends"),
        (None, ("y",), "8 devices"),
        (packed.gate_up("x"), ("y",), "4 addends"),
    ):
        partition = sw.TensorLayout((axes,), mesh, unreduced=unreduced).partition((8,))
        for form in ("text", "svg", "html"):
            text = sw.draw(partition, form=form)
            assert said in text, (axes, form)
            assert ("replicas" in text) == (said == "4 replicas"), (axes, form)
