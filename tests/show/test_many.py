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
from shardwise.show.views import tilings_picture
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
    assert [tile.place for tile in drawing.tiles[:2]] == ["dim 0 at 0:16384", "dim 0 at 524288:540672"]
    assert "cpu:128 and 127 more (32 shards)" in drawing.written()
    assert [text for text in drawing.written() if "stands for" in text or "holds" in text] == [
        "a row stands for up to 32 shards"
    ]


def test_two_packed_shards_in_a_row_are_counted_and_named() -> None:
    """Of 64 heads of two elements each of 64 devices has one; two devices in a row have four elements of each part."""
    qkv = sw.packed.qkv(64, 64, 2, "tp")
    drawing = Drawing(sw.draw(sw.TensorLayout((qkv,), sw.DeviceMesh((64,), ("tp",))).partition((384,))))
    assert [(tile.place, tile.held) for tile in drawing.tiles] == [
        (f"dim 0 at {at + 4 * row}:{at + 4 * row + 4}", f"2 shards, cpu:{2 * row},{2 * row + 1}")
        for row in range(32)
        for at in (0, 128, 256)
    ]
    rows = {f"cpu:{2 * row},{2 * row + 1} (2 shards)" for row in range(32)}
    assert {*rows, "a row stands for up to 2 shards"} <= set(drawing.written())


def test_packed_shards_of_many_pieces_share_rows_until_there_are_few() -> None:
    """32 shards of 40 pieces each are 1,280; in twos the pieces of neighbours touch, and are 16 times 40."""
    dim = sw.packed.concat(sw.packed.part((40, 32, 1), 1, "x"))
    drawing = Drawing(sw.draw(sw.TensorLayout((dim,), sw.DeviceMesh((32,), ("x",))).partition((1280,))))
    assert "a row stands for up to 2 shards" in drawing.written()
    assert [tile.bounds for tile in drawing.tiles] == [
        [(32 * outer + 2 * row, 32 * outer + 2 * row + 2)] for row in range(16) for outer in range(40)
    ]


@pytest.mark.parametrize(
    ("name", "shards", "pieces"),
    [("packed, on a million", 2**20, []), ("packed, of many pieces", 4, ["a shard holds up to 1,048,576 pieces"])],
)
def test_packed_shards_beyond_reading_are_one_row(name: str, shards: int, pieces: list[str]) -> None:
    drawing = drawing_of(name)
    assert [text for text in drawing.written() if "holds" in text] == pieces
    assert f"a row stands for all {shards:,} shards" in drawing.written()
    bounds = [tile.bounds[0] for tile in drawing.tiles]
    assert bounds[0][0] == 0
    assert all(one[1] == other[0] for one, other in itertools.pairwise(bounds))
    assert bounds[-1][1] == MADE[name]().shape[0]


@pytest.mark.heavy
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
    (view,) = tilings_picture([MADE["packed and cut"]()], [""]).views
    assert "gate" in view.captions[0]
    assert view.captions[1:] == ("8 × 6 on tp=2, dp=2: 4 shards, each on one device", "dim 1: 6, cut in 2 by dp")


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


def test_up_to_256_boxes_are_drawn_as_they_are() -> None:
    drawing = Drawing(sw.draw(sw.Tiling.from_boxes((512,), {"file": [[(i, i + 1)] for i in range(0, 512, 2)]})))
    assert len(drawing.tiles) == 256
    assert not any("drawn" in text for text in drawing.written())


def test_boxes_of_two_holders_are_not_put_together() -> None:
    """600 boxes become two, though they touch."""
    halves = {"one": range(300), "other": range(300, 600)}
    tiling = sw.Tiling.from_boxes((600,), {name: [[(i, i + 1)] for i in half] for name, half in halves.items()})
    drawing = Drawing(sw.draw(tiling))
    assert [(tile.place, tile.held) for tile in drawing.tiles] == [("[0:300]", "one"), ("[300:600]", "other")]
    assert [drawing.labels_on(tile) for tile in drawing.tiles] == [["one", "0:300"], ["other", "300:600"]]
    assert [text for text in drawing.written() if text[0] in "↓→"] == ["→ dim 0: 600"]


def test_ranges_along_a_side_do_not_overlap() -> None:
    """The columns of the third box begin within those of the second, which have their range above them."""
    boxes = {"a": [[(0, 1), (0, 2)]], "b": [[(0, 1), (2, 6)]], "c": [[(1, 2), (4, 8)]]}
    written = Drawing(sw.draw(sw.Tiling.from_boxes((2, 8), boxes))).written()
    assert {"0:2", "2:6"} <= set(written)
    assert "4:8" not in written


@pytest.mark.parametrize(("boxes", "each", "who"), [(8, 2, "{},{}"), (20, 8, "{}..{}")])
def test_holders_are_put_together_until_there_are_few_boxes(boxes: int, each: int, who: str) -> None:
    """64 holders have every 64th element: 8 each are 256 boxes in twos; 20 each in twos 640, in fours 320, then 160."""
    own = {i: [[(i + 64 * k, i + 64 * k + 1)] for k in range(boxes)] for i in range(64)}
    drawing = Drawing(sw.draw(sw.Tiling.from_boxes((64 * boxes,), own)))
    assert sorted((tile.bounds, tile.held) for tile in drawing.tiles) == [
        ([(at, at + each)], f"{who.format(at % 64, at % 64 + each - 1)} ({each} holders)")
        for at in range(0, 64 * boxes, each)
    ]


def test_boxes_are_read_up_to_the_holder_that_has_too_many() -> None:
    """The first has 5,000 of the 8,192 that are read; the second would have as many again."""
    boxes = {name: [[(2 * i, 2 * i + 1)] for i in range(5000)] for name in "abc"}
    written = Drawing(sw.draw(sw.Tiling.from_boxes((10_000,), boxes))).written()
    assert "the boxes of the first 1 of 3 holders are drawn" in written


@pytest.mark.parametrize("slices", [8, 9])
def test_up_to_8_slices_of_boxes_are_drawn(slices: int) -> None:
    places = itertools.product(range(slices), range(2), range(2))
    tiling = sw.Tiling.from_boxes((slices, 2, 2), {"all": [[(at, at + 1) for at in place] for place in places]})
    drawing = Drawing(sw.draw(tiling))
    assert [text for text in drawing.written() if text.startswith("dim 0 at")] == [
        f"dim 0 at {at}:{at + 1}" for at in range(8)
    ]
    assert len(drawing.tiles) == 8 * 4
    assert ("only 8 of 9 slices are drawn" in drawing.written()) == (slices == 9)
    assert any("slices" in text for text in drawing.written()) == (slices == 9)


def test_a_holder_of_boxes_has_one_look_in_both_pictures() -> None:
    before = sw.Tiling.from_boxes((8,), {"a": [[(0, 3)]], "b": [[(3, 8)]]})
    after = sw.Tiling.from_boxes((8,), {"c": [[(0, 2)]], "b": [[(2, 4)]], "a": [[(4, 8)]]})
    tiles = Drawing(sw.draw(before, after=after)).tiles
    assert [tile.held for tile in tiles] == ["a", "b", "c", "b", "a"]
    assert [tile.key for tile in tiles] == [0, 1, 2, 1, 0]


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


def test_boxes_in_a_line_are_joined_where_they_touch() -> None:
    assert _joined([((0, 1),), ((1, 2),), ((3, 4),), ((4, 5),), ((5, 7),)]) == [((0, 2),), ((3, 7),)]


@pytest.mark.parametrize("sides", [1, 2])
def test_boxes_that_overlap_have_a_row_each_with_who_has_it(sides: int) -> None:
    """Of 8 elements one has the first 5, the other the last 5; in two dims they share a corner."""
    tiling = sw.Tiling.from_boxes((8,) * sides, {"one": [[(0, 5)] * sides], "other": [[(3, 8)] * sides]})
    drawing = Drawing(sw.draw(tiling))
    assert {"boxes overlap: a row each", "0:5"} <= set(drawing.written())
    one, other = drawing.tiles
    assert not one.box.meets(other.box)
    for tile, name, start, stop in ((one, "one", 0, 5), (other, "other", 3, 8)):
        place = "[" + ", ".join([f"{start}:{stop}"] * sides) + "]"
        assert (tile.place, tile.held) == (place, name)
        assert drawing.labels_on(tile) == [f"{name}: {place}"]
        (box,) = [box for text, box, _ in drawing.texts if text == name]
        assert tile.box.top < (box.top + box.bottom) / 2 < tile.box.bottom
    assert (one.box.right - one.box.left) / (other.box.right - one.box.left) == pytest.approx(5 / 8, abs=0.01)


def test_boxes_beside_each_other_do_not_overlap() -> None:
    """Three in a corner; the ranges that they have stand along the sides, first of all those from the beginning on."""
    boxes = {"a": [[(0, 2), (0, 3)]], "b": [[(0, 2), (3, 8)]], "c": [[(2, 8), (0, 3)]]}
    drawing = Drawing(sw.draw(sw.Tiling.from_boxes((8, 8), boxes)))
    assert not any("overlap" in text for text in drawing.written())
    assert [drawing.labels_on(tile)[0] for tile in drawing.tiles] == ["a", "b", "c"]
    assert {"0:2", "2:8", "0:3", "3:8", "↓ dim 0: 8", "→ dim 1: 8"} <= set(drawing.written())


def test_tiles_of_one_size_say_the_same_of_themselves() -> None:
    drawing = Drawing(sw.draw(sw.TensorLayout(("x", "y"), sw.DeviceMesh((32, 32), ("x", "y"))), (1024, 1024)))
    first = [row * 256 + column * 4 for row in range(4) for column in range(8)]
    assert [drawing.labels_on(tile) for tile in drawing.tiles] == [[f"cpu:{device} …", "32 shards"] for device in first]


@pytest.mark.parametrize(("replicas", "held"), [(1, "16 shards, cpu:0..15"), (2, "16 shards, 32 devices: cpu:0..31")])
def test_a_block_says_how_many_shards_and_devices_it_stands_for(replicas: int, held: str) -> None:
    """512 shards in 32 blocks."""
    layout = sw.TensorLayout(("x",), sw.DeviceMesh((512, replicas), ("x", "y")))
    tiles = Drawing(sw.draw(layout, (1024,))).tiles
    assert [tile.bounds for tile in tiles] == [[(32 * i, 32 * i + 32)] for i in range(32)]
    assert tiles[0].held == held


def test_each_chunk_has_its_own_coordinates() -> None:
    tiles = drawing_of("chunks").tiles
    assert len(tiles) == 16 * 10
    assert [tile.held for tile in tiles] == [
        f"({row[0] // 64}, {column[0] // 64})" for row, column in (t.bounds for t in tiles)
    ]


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


@pytest.mark.parametrize("name", ["report", "plan for a model", "refit"])
def test_each_bar_has_its_name_and_number_beside_or_above_it(name: str) -> None:
    """Bars are 16 high: rows are of 20, and 15 more where names stand above them."""
    drawing = drawing_of(name)
    labels = [(text, box) for text, box, _ in drawing.texts if re.search(r": [\d.]+ \w+( each)?$", text)]
    for tile in drawing.tiles:
        assert tile.box.bottom - tile.box.top == pytest.approx(16)
        own = [box for text, box in labels if text == f"{tile.place}: {tile.held}"]
        middle = (tile.box.top + tile.box.bottom) / 2
        assert any(
            (box.right < tile.box.left and abs((box.top + box.bottom) / 2 - middle) <= 3)
            or 0 <= tile.box.top - box.bottom <= 3
            for box in own
        )


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
    assert panel.down is not None
    assert [span.text for span in panel.down.spans][::16] == ["0..3 (4): 1 to 4", "64: 65"]


def test_neighbours_of_one_size_share_a_bar() -> None:
    panel = holder_bars("held", "abcd", [5, 5, 0, 5], "{} B".format)
    assert panel.down is not None
    assert [span.text for span in panel.down.spans] == ["a,b (2): 5 B each", "c: 0 B", "d: 5 B"]
    assert [(tile.down, tile.across) for tile in panel.tiles] == [((0, 1), (0, 5)), ((2, 3), (0, 5))]
    panel = holder_bars("held", "abc", [3, 5, 5], "{} B".format)
    assert panel.down is not None
    assert [span.text for span in panel.down.spans] == ["a: 3 B", "b,c (2): 5 B each"]


def test_more_holders_than_colours_have_none() -> None:
    drawing = Drawing(sw.draw(sw.Tiling.from_boxes((40,), [[(i, i + 1)] for i in range(40)])))
    assert [(tile.key, tile.look) for tile in drawing.tiles] == [(None, (colours.NEUTRAL, ""))] * 40
    assert drawing.swatches == []
    drawing = Drawing(sw.draw(sw.Tiling.from_boxes((32,), [[(i, i + 1)] for i in range(32)])))
    assert [tile.key for tile in drawing.tiles] == [key for key, _ in drawing.swatches] == list(range(32))
