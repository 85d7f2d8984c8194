"""Pictures of what is too much to draw one by one: neighbours are put together, and nothing is lost or made up."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from shardwise.show import colours
from shardwise.show.boxes import _joined
from shardwise.show.lanes import holder_bars
from tests.show.drawings import SVG, Drawing
from tests.show.test_svg import MADE


def drawing_of(name: str) -> Drawing:
    return Drawing(sw.draw(MADE[name]()))


def number_in(text: str, unit: str) -> int:
    found = re.search(rf"([\d,]+) {unit}", text)
    assert found is not None, text
    return int(found[1].replace(",", ""))


def test_packed_shards_share_rows_that_hold_what_they_hold() -> None:
    """1,024 shards in 32 rows: a row holds 32 times 512 elements of either half, one after the other."""
    drawing = drawing_of("packed, on many")
    assert [tile.bounds for tile in drawing.tiles] == [
        [(half * 2**19 + row * 2**14, half * 2**19 + (row + 1) * 2**14)] for row in range(32) for half in range(2)
    ]
    assert {number_in(tile.held, "shards") for tile in drawing.tiles} == {32}
    assert {number_in(tile.held, "devices") for tile in drawing.tiles} == {128}
    assert "cpu:128 and 127 more (32 shards)" in drawing.written()
    assert "a row stands for up to 32 shards" in drawing.written()


@pytest.mark.parametrize(("name", "shards"), [("packed, on a million", 2**20), ("packed, of many pieces", 4)])
def test_packed_shards_beyond_reading_are_one_row(name: str, shards: int) -> None:
    drawing = drawing_of(name)
    assert f"a row stands for all {shards:,} shards" in drawing.written()
    bounds = [tile.bounds[0] for tile in drawing.tiles]
    assert bounds[0][0] == 0
    assert all(one[1] == other[0] for one, other in itertools.pairwise(bounds))
    assert bounds[-1][1] == MADE[name]().shape[0]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(33, 90), st.integers(1, 3))
def test_rows_of_packed_shards_tile_the_tensor(outer: int, ranks: int, inner: int) -> None:
    """Every element of the dim is in the row of the shard that holds it, however the dim is interleaved."""
    mesh = sw.DeviceMesh((ranks,), ("tp",))
    dim = sw.packed.concat(sw.packed.part((outer, ranks * 2, inner), 1, "tp"))
    partition = sw.TensorLayout((dim,), mesh).partition((outer * ranks * 2 * inner,))
    drawing = Drawing(sw.draw(partition))
    rows = sorted({tile.box.top for tile in drawing.tiles})
    each = -(-ranks // 32)
    assert len(rows) == -(-ranks // each)
    found = np.full(partition.shape, -1)
    for tile in drawing.tiles:
        assert (found[slice(*tile.bounds[0])] == -1).all()
        found[slice(*tile.bounds[0])] = rows.index(tile.box.top)
    for shard in range(ranks):
        for piece in partition.pieces(partition.canonical_device(shard)):
            assert (found[piece.box] == shard // each).all()


def test_a_row_says_which_part_of_another_dim_it_is() -> None:
    written = drawing_of("packed and cut").written()
    assert [text for text in written if "dim 1 at" in text] == [
        "cpu:0, dim 1 at 0:3",
        "cpu:1, dim 1 at 3:6",
        "cpu:2, dim 1 at 0:3",
        "cpu:3, dim 1 at 3:6",
    ]
    assert {"dim 1: 6, cut in 2 by dp", "gate", "up", "gate 0:2", "up 6:8"} <= set(written)


def test_flat_ranges_of_many_holders_tile_the_tensor() -> None:
    drawing = drawing_of("many boxes")
    count = np.zeros((30, 400), int)
    for tile in drawing.tiles:
        count[tuple(slice(*bounds) for bounds in tile.bounds)] += 1
        # 4,000 holders in 32 groups; three elements each.
        assert number_in(tile.held, "holders") == 125
        first = np.ravel_multi_index([start for start, _ in tile.bounds], (30, 400))
        group = int(tile.held.split()[0]) // 125
        assert group * 375 <= first < (group + 1) * 375
    assert (count == 1).all()
    assert "4,020 boxes; those that touch are drawn as one" in drawing.written()


def test_boxes_of_one_holder_that_touch_are_one() -> None:
    drawing = drawing_of("one of many boxes")
    assert [(tile.bounds, tile.held) for tile in drawing.tiles] == [([(0, 4000)], "file")]
    assert "4,000 boxes; those that touch are drawn as one" in drawing.written()


def test_boxes_that_are_too_many_even_so_are_counted() -> None:
    tiling = sw.Tiling.from_boxes((4000,), {"file": [[(i, i + 1)] for i in range(0, 4000, 2)]})
    drawing = Drawing(sw.draw(tiling))
    assert len(drawing.tiles) == 256
    assert "256 of 2,000 boxes are drawn" in drawing.written()
    tiling = sw.Tiling.from_boxes((20_000,), {"file": [[(i, i + 1)] for i in range(20_000)], "other": []})
    assert "the first 8,192 of the 20,000 boxes of file are drawn" in Drawing(sw.draw(tiling)).written()


Boxes = list[tuple[tuple[int, int], ...]]


@given(st.lists(st.tuples(*[st.integers(0, 4)] * 2), unique=True, max_size=12))
def test_joined_boxes_are_the_same_elements(cells: list[tuple[int, int]]) -> None:
    boxes: Boxes = [tuple((at, at + 1) for at in cell) for cell in cells]
    before, after = np.zeros((5, 5), int), np.zeros((5, 5), int)
    for count, found in ((before, boxes), (after, _joined(boxes))):
        for box in found:
            count[tuple(slice(*side) for side in box)] += 1
    assert (before == after).all()
    assert len(_joined(boxes)) <= len(boxes)


def test_tiles_of_one_size_say_the_same_of_themselves() -> None:
    drawing = Drawing(sw.draw(sw.TensorLayout(("x", "y"), sw.DeviceMesh((32, 32), ("x", "y"))), (1024, 1024)))
    first = [row * 256 + column * 4 for row in range(4) for column in range(8)]
    assert [drawing.labels_on(tile) for tile in drawing.tiles] == [[f"cpu:{device} …", "32 shards"] for device in first]


def test_who_sends_to_whom_is_written_on_every_cell_for_many() -> None:
    drawing = drawing_of("plan for 4,096")
    cells = [tile for tile in drawing.tiles if " to " in tile.place]
    assert len(cells) == 64
    for tile in cells:
        moves, *stays = tile.held.removesuffix(" sent").split(" sent, ")
        number, unit = moves.split()
        assert drawing.labels_on(tile) in ([moves], [number, unit], [f"{float(number):.0f}", unit])
        assert bool(stays) == (tile.place.split(" to ")[0] == tile.place.split(" to ")[1])


def test_devices_are_named_by_coordinates_and_groups_of_them_by_ranges() -> None:
    written = drawing_of("mesh").written()
    assert {"0", "1", "2", "3", "8 devices: cpu:0..7"} <= set(written)
    assert not any(":" in text and not re.match(r"cpu:\d$|. \w+: \d$|8 devices", text) for text in written)
    assert "0:250" in drawing_of("mesh of a million").written()
    headings = [text for text in drawing_of("mesh of five axes").written() if " at " in text]
    assert headings[0] == "a at 0:2, b at 0:2, c at 0"


@pytest.mark.parametrize("name", MADE)
def test_a_thin_tile_is_seen_in_its_colour(name: str) -> None:
    """A rim in the colour of the ink would hide it, and on a dark page be hidden itself."""
    for rect in Drawing(sw.draw(MADE[name]())).root.iter(f"{SVG}rect"):
        if rect.get("class") is None and min(float(rect.attrib["width"]), float(rect.attrib["height"])) < 3:
            assert rect.attrib["stroke"] == rect.attrib["fill"]


def test_bars_begin_at_one_place() -> None:
    for name in ("report", "plan for a model"):
        tiles = drawing_of(name).tiles
        assert len({tile.box.left for tile in tiles}) == 1


def test_a_tensor_that_nobody_holds_has_elements() -> None:
    assert "no holder has an element" in drawing_of("nothing held").written()
    assert "the tensor has no elements" in Drawing(sw.draw(sw.Tiling.from_boxes((0, 4), {}))).written()


def test_numbers_in_a_legend_are_whole() -> None:
    entries = [text for text in drawing_of("2^62 elements").written() if " more (" in text]
    assert len(entries) == 32
    assert all(text.endswith(" and 65,535 more (32,768 shards)") for text in entries)


def test_bars_share_a_row_in_pairs_until_there_are_few() -> None:
    """33 holders of 1 to 33: sixteen pairs, and the last alone; 65 of them in fours, and the last alone."""
    panel = holder_bars("held", range(33), range(1, 34), str)
    assert panel.down is not None
    assert [span.text for span in panel.down.spans] == [
        *(f"{i},{i + 1} (2): {i + 1} to {i + 2}" for i in range(0, 32, 2)),
        "32: 33",
    ]
    assert [tile.across for tile in panel.tiles] == [(0, i + 2) for i in range(0, 32, 2)] + [(0, 33)]
    panel = holder_bars("held", range(65), range(1, 66), str)
    assert [tile.across for tile in panel.tiles] == [(0, i + 4) for i in range(0, 64, 4)] + [(0, 65)]


def test_neighbours_of_one_size_share_a_bar() -> None:
    panel = holder_bars("held", "abcd", [5, 5, 0, 5], "{} B".format)
    assert panel.down is not None
    assert [span.text for span in panel.down.spans] == ["a,b (2): 5 B each", "c: 0 B", "d: 5 B"]
    assert [(tile.down, tile.across) for tile in panel.tiles] == [((0, 1), (0, 5)), ((2, 3), (0, 5))]


def test_more_holders_than_colours_have_none() -> None:
    drawing = Drawing(sw.draw(sw.Tiling.from_boxes((40,), [[(i, i + 1)] for i in range(40)])))
    assert [(tile.key, tile.look) for tile in drawing.tiles] == [(None, (colours.NEUTRAL, ""))] * 40
    assert drawing.swatches == []
    drawing = Drawing(sw.draw(sw.Tiling.from_boxes((32,), [[(i, i + 1)] for i in range(32)])))
    assert [tile.key for tile in drawing.tiles] == [key for key, _ in drawing.swatches] == list(range(32))
