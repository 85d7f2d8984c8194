"""The pictures: tiles are as large as what they stand for, labels stand within them, and all can be read."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from shardwise.show import colours
from shardwise.show.html import table_html
from shardwise.show.picture import MOST_KEYS
from tests.interop.layouts import layouts
from tests.show.drawings import Box, Drawing
from tests.tilings import tilings

MESH = sw.DeviceMesh((2, 4), ("data", "model"))
EIGHT = sw.DeviceMesh((8,), ("model",))
SQUARE = sw.DeviceMesh((16, 16), ("data", "model"))
QKV = sw.packed.qkv(64, 8, 128, "tp")
ROWS, COLUMNS = sw.TensorLayout(("data", "model"), MESH), sw.TensorLayout((None, "model"), MESH)


def report() -> sw.rules.LayoutReport:
    rules = sw.LayoutMap(MESH)
    rules[".*kernel"] = (None, "model")
    rules["norm"] = (None,)
    tensors = {f"h.{i}.kernel": ((64, 64), "float32") for i in range(12)}
    return rules.report({**tensors, "norm": ((64,), "float32"), "b": ((5,), "float32"), "x.kernel": ((4, 6), "int8")})


#: Pictures of every kind, among them what is too much to draw as it is.
MADE: dict[str, Callable[[], Any]] = {
    "mesh": lambda: MESH,
    "mesh of one": lambda: sw.DeviceMesh((1,), ("x",)),
    "mesh of five axes": lambda: sw.DeviceMesh((2, 3, 2, 3, 2), list("abcde")),
    "mesh 16 x 16": lambda: SQUARE,
    "mesh of a million": lambda: sw.DeviceMesh((1000, 1000), ("x", "y")),
    "mesh of 2^62": lambda: sw.DeviceMesh((2**31, 2**31), ("x", "y")),
    "mesh of 70 axes": lambda: sw.DeviceMesh((1,) * 70, [f"a{i}" for i in range(70)]),
    "layout": lambda: ROWS,
    "wide": lambda: sw.TensorLayout((None, "model"), EIGHT).partition((4096, 14336)),
    "one dim": lambda: sw.TensorLayout(("model",), EIGHT).partition((4096,)),
    "one dim, not even": lambda: sw.TensorLayout(("model",), MESH).partition((3,), "ceil"),
    "scalar": lambda: sw.TensorLayout((), MESH).partition(()),
    "no elements": lambda: sw.TensorLayout((None, "model"), MESH).partition((0, 8)),
    "replicas": lambda: COLUMNS.partition((6, 8)),
    "partial": lambda: sw.TensorLayout((None,), MESH, unreduced=("model",)).partition((6,)),
    "sub-axes": lambda: sw.TensorLayout(("model:(1)2", "model:(2)2"), MESH).partition((6, 8)),
    "16 x 16": lambda: sw.TensorLayout(("data", "model"), SQUARE).partition((4096, 11008)),
    "three dims": lambda: sw.TensorLayout(("a", "b", "c"), sw.DeviceMesh((2, 2, 2), list("abc"))).partition((2, 4, 6)),
    "2^62 elements": lambda: sw.TensorLayout(("x", None), sw.DeviceMesh((2**20, 2), ("x", "y"))).partition(
        (2**40, 2**22)
    ),
    "a tall one": lambda: sw.TensorLayout(("model", None), EIGHT).partition((2**40, 1)),
    "packed": lambda: sw.TensorLayout((QKV, None), sw.DeviceMesh((2, 16), ("dp", "tp"))).partition((QKV.size or 0, 64)),
    "packed, of many pieces": lambda: sw.TensorLayout(
        (sw.packed.concat(sw.packed.part((2**20, 4, 1), 1, "model")),), MESH
    ).partition((2**22,)),
    "packed, on many": lambda: sw.TensorLayout(
        (sw.packed.gate_up("tp"), None), sw.DeviceMesh((1024, 4), ("tp", "dp"))
    ).partition((2**20, 3)),
    "packed, on a million": lambda: sw.TensorLayout(
        (sw.packed.gate_up("tp"),), sw.DeviceMesh((2**20,), ("tp",))
    ).partition((2**22,)),
    "packed and cut": lambda: sw.TensorLayout(
        (sw.packed.gate_up("tp"), "dp"), sw.DeviceMesh((2, 2), ("tp", "dp"))
    ).partition((8, 6)),
    "chunks": lambda: sw.Tiling.grid((1000, 600), (64, 64)),
    "a million chunks": lambda: sw.Tiling.grid((10**6, 10**6), (1000, 1000)),
    "flat ranges": lambda: sw.Tiling.from_flat_ranges((6, 8), {"rank 0": (0, 20), "rank 1": (20, 48)}),
    "overlap": lambda: sw.Tiling.from_boxes((8,), [[(0, 5)], [(3, 8)]]),
    "many boxes": lambda: sw.Tiling.from_flat_ranges((30, 400), [(i * 3, i * 3 + 3) for i in range(4000)]),
    "one of many boxes": lambda: sw.Tiling.from_boxes((4000,), {"file": [[(i, i + 1)] for i in range(4000)]}),
    "nothing held": lambda: sw.Tiling.from_boxes((4,), {}),
    "plan": lambda: sw.plan_reshard(ROWS.partition((6, 8)), COLUMNS.partition((6, 8))),
    "plan of packed": lambda: sw.plan_reshard(
        sw.TensorLayout((sw.packed.gate_up("model"),), MESH).partition((32,)),
        sw.TensorLayout(("model",), MESH).partition((32,)),
    ),
    "plan for 4,096": lambda: sw.plan_reshard(
        *(
            sw.TensorLayout(axes, sw.DeviceMesh((64, 64), ("x", "y"))).partition((4096, 4096))
            for axes in (("x", "y"), ("y", "x"))
        )
    ),
    "plan from files": lambda: sw.plan_reshard(sw.Tiling.grid((6, 8), (4, 3)), ROWS.partition((6, 8))),
    "plan for a model": lambda: sw.plan_model({"a": ROWS}, {"a": COLUMNS}, {"a": ((6, 8), "float32")}),
    "refit": lambda: sw.plan_refit(
        dict.fromkeys("ab", ROWS.partition((6, 8))), dict.fromkeys("ab", COLUMNS.partition((6, 8)))
    ),
    "array": lambda: sw.distribute_tensor(np.zeros((6, 8)), ROWS),
    "report": report,
    "report of nothing": lambda: sw.LayoutMap(MESH).report({}),
    "report on a million": lambda: sw.LayoutMap(sw.DeviceMesh((2**20,), ("x",))).report({"a": ((4,), "int8")}),
    "labels that mean harm": lambda: sw.TensorLayout(
        ("<&>",), sw.DeviceMesh((3,), ("<&>",), ["<script>alert(1)</script>", "\0\ud800\n]]>", ("a", 1)])
    ).partition((3,)),
    "long labels": lambda: sw.TensorLayout(
        ("x" * 10**5, None),
        sw.DeviceMesh((2, 2), ("x" * 10**5, "漢" * 10**5), ["a" * 10**5, "1" * 10**5, "1a" * 10**5, "-"]),
    ).partition((2, 4)),
}


class Texts(dict[str, str]):
    """The pictures, each drawn when it is asked for: what a test reaches is then what it needs."""

    def __missing__(self, name: str) -> str:
        return sw.draw(MADE[name]())


class Drawings(dict[str, Drawing]):
    """The same, taken apart."""

    def __missing__(self, name: str) -> Drawing:
        return Drawing(sw.draw(MADE[name]()))


@pytest.fixture
def texts() -> dict[str, str]:
    return Texts()


@pytest.fixture
def drawn() -> dict[str, Drawing]:
    return Drawings()


@pytest.mark.parametrize("name", MADE)
def test_nothing_is_written_over_anything_and_all_is_on_the_page(name: str, drawn: dict[str, Drawing]) -> None:
    drawing = drawn[name]
    # On a window of 400 pixels letters of 12 are at least 9 high; there is a margin of 12 on either side.
    assert drawing.page.right - drawing.page.left <= 460 + 24
    for text, box, fill in drawing.texts:
        assert drawing.page.has(box), text
        if fill:
            plain = not fill.startswith("#")
            assert any(tile.box.has(box) and (plain or tile.look[0] == fill) for tile in drawing.tiles), text
        else:
            assert not any(tile.box.meets(box) for tile in drawing.tiles), text
    for (one, box, _), (other, another, _) in itertools.combinations(drawing.texts, 2):
        assert not box.meets(another), (one, other)
    for tile in drawing.tiles:
        assert drawing.page.has(tile.box)
        assert tile.box.left < tile.box.right
        assert tile.box.top < tile.box.bottom


@pytest.mark.parametrize("name", sorted(set(MADE) - {"overlap"}))
def test_tiles_do_not_overlap(name: str, drawn: dict[str, Drawing]) -> None:
    for one, other in itertools.combinations(drawn[name].tiles, 2):
        assert not one.box.meets(other.box), (one.place, other.place)


@pytest.mark.parametrize("name", MADE)
def test_no_two_shards_look_alike(name: str, drawn: dict[str, Drawing]) -> None:
    drawing = drawn[name]
    looks: dict[int | None, set[tuple[str, str]]] = {}
    for key, look in [*((tile.key, tile.look) for tile in drawing.tiles), *drawing.swatches]:
        looks.setdefault(key, set()).add(look)
    uncoloured = looks.pop(None, set())
    assert all(len(found) == 1 for found in looks.values())
    assert len(set().union(*looks.values())) == len(looks) <= MOST_KEYS
    assert not uncoloured & set().union(*looks.values())
    assert len(dict(drawing.swatches)) == len(drawing.swatches)


#: Pictures whose boxes have no room for the names of their holders.
WITH_LEGEND = {"2^62 elements", "a million chunks", "labels that mean harm", "long labels"}


@pytest.mark.parametrize("name", MADE)
def test_there_is_a_legend_only_where_the_boxes_do_not_say_it(name: str, drawn: dict[str, Drawing]) -> None:
    drawing = drawn[name]
    assert bool(drawing.swatches) == (name in WITH_LEGEND)
    if drawing.swatches:
        assert {tile.key for tile in drawing.tiles} <= {None, *dict(drawing.swatches)}


def test_colours_are_shards_and_replicas_share_them(drawn: dict[str, Drawing]) -> None:
    """A layout by itself is its mesh: 2 by 4 devices of which those of one column hold one shard."""
    drawing = Drawing(sw.draw(COLUMNS))
    assert [drawing.labels_on(tile) for tile in drawing.tiles] == [
        [f"cpu:{device}", f"(0, {device % 4})"] for device in range(8)
    ]
    assert [tile.key for tile in drawing.tiles] == [0, 1, 2, 3] * 2
    assert [tile.held for tile in drawing.tiles][5] == "cpu:5 holds shard (0, 1)"
    # A mesh has no shards, and the devices of a packed dim without a size have none yet.
    unsized = sw.TensorLayout((sw.packed.gate_up("model"),), MESH)
    for what in (MESH, unsized):
        assert {tile.key for tile in Drawing(sw.draw(what)).tiles} == {None}
    # The parts of one shard of a packed dim have one colour, which is that of its device before and after.
    keys: dict[str, set[int | None]] = {}
    for tile in drawn["plan of packed"].tiles:
        if " to " not in tile.place:
            keys.setdefault(re.split(r"[, ]", tile.held)[0], set()).add(tile.key)
    assert keys == {f"cpu:{device}": {device} for device in range(4)}


@pytest.mark.parametrize(("name", "devices"), [("mesh 16 x 16", range(256)), ("16 x 16", range(256))])
def test_up_to_256_are_drawn_one_by_one(name: str, devices: Sequence[int], drawn: dict[str, Drawing]) -> None:
    drawing = drawn[name]
    assert [drawing.labels_on(tile) for tile in drawing.tiles] == [[str(device)] for device in devices]
    assert {tile.key for tile in drawing.tiles} == {None}
    assert len({tile.box.left for tile in drawing.tiles}) == len({tile.box.top for tile in drawing.tiles}) == 16


@pytest.mark.heavy
@pytest.mark.parametrize("name", MADE)
def test_it_is_small_and_says_in_words_what_it_is(name: str, texts: dict[str, str], drawn: dict[str, Drawing]) -> None:
    text, drawing = texts[name], drawn[name]
    assert len(text) < 200_000
    title, description = drawing.root[0], drawing.root[1]
    assert (title.tag, description.tag) == ("{http://www.w3.org/2000/svg}title", "{http://www.w3.org/2000/svg}desc")
    assert title.text
    assert description.text
    assert drawing.root.attrib["aria-labelledby"].split() == [title.attrib["id"], description.attrib["id"]]
    # Nothing comes from elsewhere, and no name became markup.
    assert "http" not in re.sub(r'xmlns="[^"]*"', "", text)
    assert not list(drawing.root.iter("{http://www.w3.org/2000/svg}script"))


@pytest.mark.heavy
@pytest.mark.parametrize("name", MADE)
def test_every_notebook_shows_it(name: str, texts: dict[str, str]) -> None:
    value = MADE[name]()
    svg, html = value._repr_svg_(), value._repr_html_()
    assert svg == texts[name]
    assert svg.strip() in html
    assert html.startswith(sw.draw(value, form="html").rstrip())
    assert "<script" not in html
    assert len(html) < 400_000
    text = sw.draw(value, form="text")
    assert len(text) < 400_000
    assert all(line.isprintable() for line in text.split("\n"))


def test_the_table_of_a_picture_has_a_row_for_each_part_and_says_of_which_view() -> None:
    """Two halves of rows on four devices each, then two halves of columns."""
    before, after = (sw.TensorLayout(axes, MESH) for axes in (("data", None), (None, "data")))
    parts = [("before", "[0:2, 0:6]"), ("before", "[2:4, 0:6]"), ("after", "[0:4, 0:3]"), ("after", "[0:4, 3:6]")]
    views = {"before": str(before.axes), "after": str(after.axes)}
    rows = [
        f"<tr><td>{view}: {views[view]}</td><td>{part}</td><td>cpu:{first}..{first + 3} (4 replicas)</td></tr>"
        for (view, part), first in zip(parts, (0, 4, 0, 4), strict=True)
    ]
    html = sw.draw(before, (4, 6), after=after, form="html")
    assert re.findall("<tr><td>.*</tr>", html) == rows


@pytest.mark.parametrize("rows", [512, 513])
def test_a_table_has_up_to_512_rows(rows: int) -> None:
    html = table_html("many", ("name",), [(f"row {number}",) for number in range(rows)])
    assert html.count("<td>") == 512
    assert ("<p>and 1 more</p>" in html) == (" more</p>" in html) == (rows == 513)


def test_more_than_64_dims_or_axes_are_said_not_drawn(drawn: dict[str, Drawing]) -> None:
    partition = sw.TensorLayout((None,) * 65, MESH).partition((1,) * 65)
    drawing = Drawing(sw.draw(partition))
    assert drawing.written() == ["65 dims are too many to draw; at most 64 can be"]
    assert "70 axes are too many to draw" in drawn["mesh of 70 axes"].written()
    assert drawing.tiles == drawn["mesh of 70 axes"].tiles == []


def test_a_label_that_cannot_be_written_is_named_by_its_class() -> None:
    class Silent:
        def __str__(self) -> str:
            raise RuntimeError

    mesh = sw.DeviceMesh((2,), ("x",), [Silent(), "cpu:1"])
    assert [tile.held for tile in Drawing(sw.draw(mesh)).tiles] == ["a Silent", "cpu:1"]


def test_a_layout_without_a_mesh_has_no_picture() -> None:
    assert sw.TensorLayout(("x",))._repr_svg_() is None
    assert sw.TensorLayout(("x",))._repr_html_() is None


@settings(max_examples=60, deadline=None)
@given(layouts(), st.integers(1, 9), st.sampled_from(["ceil", "chunk", "balanced", "floor"]))
def test_tiles_are_the_shards_and_their_areas_are_their_sizes(
    layout: sw.TensorLayout, size: int, uneven: sw.UnevenRule
) -> None:
    partition = layout.partition(tuple(range(size, size + layout.rank)), uneven)
    drawing = Drawing(sw.draw(partition))
    if partition.total_shards > MOST_KEYS or partition.is_packed:
        return
    count = np.zeros(partition.shape, int)
    area: dict[tuple[tuple[int, int], ...], float] = {}
    for tile in drawing.tiles:
        count[tuple(slice(*bounds) for bounds in tile.bounds)] += 1
        area[tuple(tile.bounds)] = tile.box.area
    assert (count == 1).all() or not drawing.tiles  # Slices beyond the fourth are put together.
    if sum(shards > 1 for shards in partition.num_shards) <= 2:
        assert (count == 1).all()
        per_element = {area[box] / np.prod([stop - start for start, stop in box], dtype=float) for box in area}
        assert max(per_element) == pytest.approx(min(per_element), rel=2e-3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 6), max_size=3).map(tuple).flatmap(tilings))
def test_any_tiling_is_drawn(tiling: sw.Tiling) -> None:
    drawing = Drawing(sw.draw(tiling))
    boxes = {
        tuple((side.start, side.stop) for side in piece.box)
        for holder in tiling.holders
        for piece in tiling.pieces(holder)
        if all(side.start < side.stop for side in piece.box)
    }
    found = {tuple(tile.bounds) for tile in drawing.tiles}
    if not any("drawn" in text for text in drawing.written()) and len(boxes) <= 4:
        assert found == boxes
    for text, box, _ in drawing.texts:
        assert drawing.page.has(box), text
    for one, other in itertools.combinations(drawing.tiles, 2):
        assert not one.box.meets(other.box), (one.place, other.place)


@settings(max_examples=60, deadline=None)
@given(layouts(), st.integers(1, 9), st.sampled_from(["ceil", "chunk", "balanced", "floor"]))
def test_the_text_names_who_holds_each_part(layout: sw.TensorLayout, size: int, uneven: sw.UnevenRule) -> None:
    """What a tile of the picture says is in a cell of the text, with the ranges of its row and its column."""
    partition = layout.partition(tuple(range(size, size + layout.rank)), uneven)
    lines = sw.draw(partition, form="text").splitlines()
    drawing = Drawing(sw.draw(partition))
    blocks = [tile for tile in drawing.tiles if " shards, " in tile.held]
    for tile in drawing.tiles if not blocks else []:
        held = tile.held.partition(" (")[0]
        assert any(held[:20] in line for line in lines) or len(held) > 20
        if layout.rank <= 2:
            across = f"{tile.bounds[-1][0]}:{tile.bounds[-1][1]}" if layout.rank else ""
            assert any(across in line for line in lines)


def test_a_wide_weight_cut_in_eight_says_who_holds_what_on_every_strip(drawn: dict[str, Drawing]) -> None:
    drawing = drawn["wide"]
    assert [drawing.labels_on(tile) for tile in drawing.tiles] == [[f"cpu:{i}"] for i in range(8)]
    ranges = [f"{1792 * i}:{1792 * (i + 1)}" for i in range(8)]
    assert [text for text in drawing.written() if text in ranges] == ranges
    assert "0:4096" in drawing.written()
    assert len({tile.look for tile in drawing.tiles}) == 8
    assert {"↓ dim 0: 4096, not cut", "→ dim 1: 14336, cut in 8 by model"} <= set(drawing.written())


@pytest.mark.parametrize("name", ["16 x 16", "wide", "replicas"])
def test_ranges_stand_at_the_middle_of_their_rows_and_columns(name: str, drawn: dict[str, Drawing]) -> None:
    drawing = drawn[name]
    labels = {text: box for text, box, _ in drawing.texts if re.fullmatch(r"\d+:\d+", text)}
    for tile in drawing.tiles:
        (top, bottom), (left, right) = tile.bounds
        row, column = labels[f"{top}:{bottom}"], labels[f"{left}:{right}"]
        assert row.right < tile.box.left
        assert row.top + row.bottom == pytest.approx(tile.box.top + tile.box.bottom, abs=3)
        assert column.bottom < tile.box.top
        assert column.left + column.right == pytest.approx(tile.box.left + tile.box.right, abs=3)


def test_a_tensor_of_one_dim_says_as_much(drawn: dict[str, Drawing]) -> None:
    drawing = drawn["one dim"]
    assert [drawing.labels_on(tile) for tile in drawing.tiles] == [[f"cpu:{i}"] for i in range(8)]
    ranges = [f"{512 * i}:{512 * (i + 1)}" for i in range(8)]
    assert [text for text in drawing.written() if text in ranges] == ranges


def test_captions_count_what_there_is(drawn: dict[str, Drawing]) -> None:
    for name, caption in (
        ("mesh of one", "1 device: cpu:0"),
        ("mesh of a million", "1,000,000 devices: cpu:0 to cpu:999999"),
        ("scalar", "scalar on data=2, model=4: 1 shard, each on 8 devices"),
        ("replicas", "6 × 8 on data=2, model=4: 4 shards, each on 2 devices"),
        ("chunks", "160 holders"),
        ("nothing held", "0 holders"),
        ("one of many boxes", "1 holder"),
        ("labels that mean harm", "<script>alert(1)</script>"),
    ):
        assert caption in drawn[name].written(), name
    assert drawn["mesh"].root[0].text == "mesh data=2, model=4"


def test_what_is_drawn_as_blocks_says_so_in_words(drawn: dict[str, Drawing]) -> None:
    """1,000 by 1,000 devices are 4 by 8 blocks."""
    assert (drawn["mesh of a million"].root[1].text or "").endswith(" Drawn as 32 blocks.")
    assert "blocks" not in (drawn["mesh 16 x 16"].root[1].text or "")


@pytest.mark.parametrize(("columns", "has_colours"), [(8, True), (9, False)])
def test_a_layout_has_colours_for_up_to_32_shards(columns: int, has_colours: bool) -> None:
    tiles = Drawing(sw.draw(sw.TensorLayout(("x", "y"), sw.DeviceMesh((4, columns), ("x", "y"))))).tiles
    assert [tile.key for tile in tiles] == [key if has_colours else None for key in range(4 * columns)]


def test_a_device_of_a_layout_that_is_narrow_has_its_number_and_its_shard() -> None:
    mesh = sw.DeviceMesh((8,), ("x",), [f"processor-{i}" for i in range(8)])
    drawing = Drawing(sw.draw(sw.TensorLayout(("x",), mesh)))
    assert [drawing.labels_on(tile) for tile in drawing.tiles] == [[str(i), f"({i})"] for i in range(8)]


def test_a_layout_of_a_packed_dim_of_known_size_has_the_colours_of_its_shards() -> None:
    drawing = Drawing(sw.draw(sw.TensorLayout((QKV, None), sw.DeviceMesh((2, 16), ("dp", "tp")))))
    assert [tile.key for tile in drawing.tiles] == [*range(16)] * 2
    assert any(text.endswith("16 shards, each on 2 devices") for text in drawing.written())


def test_before_and_after_are_named_and_joined_by_an_arrow() -> None:
    """Narrow ones stand side by side, with the arrow between them; wide ones below each other."""
    layouts = [sw.TensorLayout(axes, MESH) for axes in (("data", None), (None, "data"), ("data", "model"))]
    for second, is_beside in ((layouts[1], True), (layouts[2], False)):
        drawing = Drawing(sw.draw(layouts[0], (16, 8), after=second))
        (arrow,) = arrows(drawing)
        one, other = drawing.tiles[0].box, drawing.tiles[-1].box
        assert (one.right < arrow.left < arrow.right < other.left) == is_beside
        boxes = [tile.box for tile in drawing.tiles] + [box for _, box, _ in drawing.texts]
        assert drawing.page.has(arrow)
        assert all(box.right <= arrow.left or box.left >= arrow.right for box in boxes) == is_beside
        assert (one.bottom < arrow.top < arrow.bottom < other.top) == (not is_beside)
        title = f"before: {layouts[0].axes} → after: {second.axes}"
        assert drawing.root[0].text == title
        assert [text for text in drawing.written() if text.startswith(("before", "after"))] == title.split(" → ")
        text = sw.draw(layouts[0], (16, 8), after=second, form="text").splitlines()
        assert text.count("↓") == 1
        assert text[text.index("↓") + 1] == f"after: {second.axes}"


def test_only_before_and_after_of_a_plan_are_joined_by_an_arrow(drawn: dict[str, Drawing]) -> None:
    assert [len(arrows(drawn[name])) for name in ("plan", "report", "scalar")] == [1, 0, 0]
    assert sw.draw(MADE["plan"](), form="text").splitlines().count("↓") == 1


def arrows(drawing: Drawing) -> list[Box]:
    """The room of the arrows from one view to another, which point to the right or down."""
    paths = [e.attrib["d"] for e in drawing.root if e.tag.endswith("path") and e.get("class") == "line"]
    found = [re.match(r"M([\d.-]+) ([\d.-]+)([hv])(\d+)", path) for path in paths]
    starts = [(float(start[1]), float(start[2]), start[3], int(start[4])) for start in found if start]
    return [
        Box(x, y - 7, x + size, y + 7) if way == "h" else Box(x - 7, y, x + 7, y + size) for x, y, way, size in starts
    ]


@pytest.mark.parametrize("name", ["plan", "plan of packed", "plan for 4,096", "plan from files"])
def test_arrows_are_on_the_page_and_over_nothing(name: str, drawn: dict[str, Drawing]) -> None:
    drawing = drawn[name]
    (arrow,) = arrows(drawing)
    assert drawing.page.has(arrow)
    assert not any(
        arrow.meets(box) for box in [tile.box for tile in drawing.tiles] + [box for _, box, _ in drawing.texts]
    )


@pytest.mark.heavy
@pytest.mark.parametrize("name", MADE)
def test_the_page_ends_below_what_is_on_it(name: str, drawn: dict[str, Drawing]) -> None:
    """With a margin of 12, beside the gap after the last panel or the legend."""
    drawing = drawn[name]
    lowest = max(box.bottom for box in [tile.box for tile in drawing.tiles] + [box for _, box, _ in drawing.texts])
    assert 12 <= drawing.page.bottom - lowest <= 12 + 20


@pytest.mark.parametrize("name", ["labels that mean harm", "2^62 elements", "a million chunks"])
def test_each_colour_of_the_legend_has_its_holder_beside_it(name: str, drawn: dict[str, Drawing]) -> None:
    drawing = drawn[name]
    held = {tile.key: tile.held for tile in drawing.tiles}
    rects = [e for e in drawing.root.iter("{http://www.w3.org/2000/svg}rect") if e.get("data-key") and not len(e)]
    assert len(rects) == len(held)
    for rect in rects:
        x, y, width, height = (float(rect.attrib[side]) for side in ("x", "y", "width", "height"))
        assert not any(tile.box.meets(Box(x, y, x + width, y + height)) for tile in drawing.tiles)
        (entry,) = [
            text
            for text, box, _ in drawing.texts
            if 0 < box.left - x - width <= 10 and abs((box.top + box.bottom) / 2 - y - height / 2) <= 2
        ]
        assert re.sub(r" \([\d,]+ \w+\)$", "", entry) in held[int(rect.attrib["data-key"])]


@pytest.mark.parametrize(("shape", "height"), [((64, 64), 1.0), ((48, 64), 0.75), ((32, 64), 0.5), ((256, 64), 1.0)])
def test_a_picture_has_the_shape_of_the_tensor_up_to_a_square(shape: tuple[int, int], height: float) -> None:
    tiles = Drawing(sw.draw(sw.TensorLayout(("data", None), MESH), shape)).tiles
    wide = max(tile.box.right for tile in tiles) - min(tile.box.left for tile in tiles)
    high = max(tile.box.bottom for tile in tiles) - min(tile.box.top for tile in tiles)
    assert high / wide == pytest.approx(height, abs=1e-3)


def test_a_scalar_is_one_tile(drawn: dict[str, Drawing]) -> None:
    (tile,) = drawn["scalar"].tiles
    assert drawn["scalar"].labels_on(tile) == ["cpu:0..7", "8 replicas"]


def test_only_dims_that_are_cut_are_in_the_headings_of_slices() -> None:
    layout = sw.TensorLayout((None, "a", "b", "c"), sw.DeviceMesh((2, 2, 2), list("abc")))
    written = Drawing(sw.draw(layout.partition((3, 4, 4, 4)))).written()
    assert [text for text in written if " at " in text] == [
        f"dim 1 at {at}; dim 0: 3, not cut" for at in ("0:2", "2:4")
    ]


def test_every_dim_is_named() -> None:
    layout = sw.TensorLayout((None, "model", None), EIGHT)
    written = Drawing(sw.draw(layout.partition((3, 8, 5)))).written()
    for text in ("dim 0: 3, not cut", "↓ dim 1: 8, cut in 8 by model", "→ dim 2: 5, not cut"):
        assert text in written
    flat = sw.TensorLayout((None,) * 7, EIGHT).partition((1, 2, 3, 4, 5, 6, 7))
    said = "dim 0: 1, not cut, dim 1: 2, not cut, dim 2: 3, not cut and 2 more dims"
    assert said in " ".join(Drawing(sw.draw(flat)).written())


@pytest.mark.parametrize("shape", [(4096, 1024), (64, 64), (8, 4096)])
def test_before_and_after_are_at_one_scale(shape: tuple[int, int]) -> None:
    """A shard that has as many elements has as large a tile, in both."""
    rows, columns = sw.TensorLayout(("model", None), EIGHT), sw.TensorLayout((None, "x"), sw.DeviceMesh((2,), ("x",)))
    tiles = Drawing(sw.draw(rows.partition(shape), after=columns.partition(shape))).tiles
    assert len(tiles) == 10
    before, after = (sum(tile.box.area for tile in part) for part in (tiles[:8], tiles[8:]))
    assert before == pytest.approx(after, rel=1e-3)
    widths = [
        max(tile.box.right for tile in part) - min(tile.box.left for tile in part) for part in (tiles[:8], tiles[8:])
    ]
    assert widths[0] == pytest.approx(widths[1], abs=0.1)


def test_no_pattern_goes_through_a_label() -> None:
    """Under each line of text on a tile with a pattern is a plate in the colour of the tile, as long as the text."""
    root = ET.fromstring(sw.draw(sw.TensorLayout(("x", None), sw.DeviceMesh((32,), ("x",))).partition((4096, 512))))
    plates = [each for each in root if each.get("class") == "plate"]
    assert len(plates) == 32 - len(colours.FILLS)
    for plate, text in itertools.pairwise(root):
        if plate.get("class") == "plate":
            assert float(plate.attrib["width"]) >= float(text.attrib["textLength"])
            assert plate.attrib["fill"] in colours.FILLS


def test_replicas_can_be_seen(drawn: dict[str, Drawing]) -> None:
    drawing = drawn["replicas"]
    assert [drawing.labels_on(tile) for tile in drawing.tiles] == [[f"cpu:{i},{i + 4}", "2 replicas"] for i in range(4)]


def test_empty_shards_are_named(drawn: dict[str, Drawing]) -> None:
    drawing = drawn["one dim, not even"]
    assert "empty: cpu:3,7" in drawing.written()
    assert len(drawing.tiles) == 3
    assert "the tensor has no elements" in drawn["no elements"].written()


@pytest.mark.parametrize(
    ("name", "unit", "total"),
    [
        ("mesh of a million", "devices", 10**6),
        ("mesh of 2^62", "devices", 2**62),
        ("2^62 elements", "shards", 2**20),
        ("a million chunks", "chunks", 10**6),
    ],
)
def test_many_are_blocks_with_their_numbers(name: str, unit: str, total: int, drawn: dict[str, Drawing]) -> None:
    drawing = drawn[name]
    counts = [re.match(rf"([\d,]+) {unit}", tile.held) for tile in drawing.tiles]
    assert sum(int(count[1].replace(",", "")) for count in counts if count) == total
    assert len(drawing.tiles) <= MOST_KEYS
    for tile in drawing.tiles:
        assert any(
            label.endswith(unit) or re.fullmatch(r"[\d,]+|[\d.]+e\+\d+", label) for label in drawing.labels_on(tile)
        )


def test_packed_parts_stand_where_they_are(drawn: dict[str, Drawing]) -> None:
    """The rows of device 5 in docs/semantics.md 2.9: 64 / 8 / 8 heads of 128, k and v on two devices each."""
    drawing = drawn["packed"]
    mine = [tile for tile in drawing.tiles if tile.held.startswith("cpu:5,")]
    assert [tile.place for tile in mine] == ["[2560:3072, 0:64]", "[8448:8576, 0:64]", "[9472:9600, 0:64]"]
    assert len({tile.look for tile in mine}) == 1
    first = drawing.tiles[0]
    scale = (first.box.right - first.box.left) / 512
    for tile in drawing.tiles:
        start, stop = tile.bounds[0]
        assert tile.box.left == pytest.approx(first.box.left + start * scale, abs=0.2)
        assert tile.box.right == pytest.approx(first.box.left + stop * scale, abs=0.2)
    assert {"q", "k", "v"} <= set(drawing.written())


def test_before_and_after_a_device_has_one_look() -> None:
    before, after = sw.TensorLayout(("data", None), MESH), sw.TensorLayout((None, "model"), MESH)
    drawing = Drawing(sw.draw(before, (8, 8), after=after))
    assert len(drawing.tiles) == 2 + 4
    assert {"before: ('data', None)", "after: (None, 'model')"} <= set(drawing.written())
    looks: dict[str, set[object]] = {}
    for tile in drawing.tiles:
        looks.setdefault(re.split(r"[,.]", tile.held)[0], set()).add(tile.look)
    assert {len(found) for found in looks.values()} == {1}
    assert len(set().union(*looks.values())) == len(looks) == 5


def test_a_block_has_the_look_of_the_same_devices_elsewhere() -> None:
    mesh = sw.DeviceMesh((64, 64), ("x", "y"))
    one, other, third = (sw.TensorLayout(axes, mesh) for axes in (("x", "y"), ("y", "x"), (("x", "y"), None)))
    before, after = (set(), set())
    looks = [tile.look for tile in Drawing(sw.draw(one, (64, 64), after=other)).tiles]
    before, after = set(looks[:16]), set(looks[16:])
    assert len(looks) == 32
    assert before == after
    # Sixty-four rows of devices are not the sixteen squares of before.
    looks = [tile.look for tile in Drawing(sw.draw(one, (4096, 64), after=third)).tiles]
    assert not set(looks[:16]) & set(looks[16:])


def test_what_a_plan_moves_is_what_its_cells_say(drawn: dict[str, Drawing]) -> None:
    for name in ("plan", "plan of packed", "plan for 4,096", "plan from files"):
        plan, drawing = MADE[name](), drawn[name]
        sums: Counter[str] = Counter()
        for tile in drawing.tiles:
            for number, word in re.findall(r"([\d.]+ \w+) (sent|stay)\b", tile.held):
                sums[word] += size_in(number)
        assert sums["sent"] == plan.bytes_received("float32").sum()
        assert sums["stay"] == plan.bytes_kept("float32").sum()
    cells = {tile.place: tile for tile in drawn["plan"].tiles if " to " in tile.place}
    assert cells["cpu:4 to cpu:0"].held == "24 B sent"
    assert cells["cpu:0 to cpu:0"].held == "24 B stay"
    # Six elements of two bytes each; and what stays is a frame, what is sent a shade.
    halves = {tile.place: tile for tile in Drawing(sw.draw(MADE["plan"](), dtype="bfloat16")).tiles}
    assert halves["cpu:4 to cpu:0"].held == "12 B sent"
    assert (cells["cpu:0 to cpu:0"].look[0], cells["cpu:4 to cpu:0"].look[0]) == ("line", "tile h7")
    assert {"cpu:4 sends 24 B", "cpu:0 gets 24 B"} <= set(drawn["plan"].written())
    with pytest.raises(sw.LayoutError, match="dtype is 'int8', but the picture of a DeviceMesh takes no dtype"):
        sw.draw(MESH, dtype="int8")


def size_in(text: str) -> int:
    number, unit = text.split()
    size = float(number) * 1024 ** ["B", "KiB", "MiB"].index(unit)
    assert size == int(size), "a size of these pictures that is rounded"
    return int(size)


def test_more_bytes_are_a_stronger_shade(drawn: dict[str, Drawing]) -> None:
    """Of at most 24 bytes: 4 are a sixth, 8 a third, 12 a half, 16 two thirds; each shade is an eighth."""
    cells = [tile for tile in drawn["plan from files"].tiles if " to " in tile.place]
    assert {(tile.held, tile.look[0]) for tile in cells} == {
        (f"{size} B sent", f"tile h{min(size * 8 // 24, 7)}") for size in (4, 8, 12, 16, 24)
    }


def test_bars_are_as_long_as_what_they_say(drawn: dict[str, Drawing]) -> None:
    tiles = drawn["plan for a model"].tiles
    sizes = [re.match(r"(\d+) B", tile.held) for tile in tiles]
    scales = {
        round((tile.box.right - tile.box.left) / int(size[1]), 2)
        for tile, size in zip(tiles, sizes, strict=True)
        if size is not None
    }
    assert len(tiles) == 3
    assert len(scales) == 1
    kinds = [tile for tile in drawn["report"].tiles if tile.place.startswith(("cut", "repl", "cannot"))]
    assert [tile.place for tile in kinds] == [
        "cut (12)",
        "replicated by a rule (1)",
        "replicated, no rule matches (1)",
        "cannot be placed (1)",
    ]
    widths = [tile.box.right - tile.box.left for tile in kinds]
    assert [width / widths[0] for width in widths] == pytest.approx(
        [1, 256 / 196608, 20 / 196608, 24 / 196608], abs=1e-4
    )


def test_the_same_text_each_time() -> None:
    for name in ("labels that mean harm", "plan", "packed"):
        assert sw.draw(MADE[name]()) == sw.draw(MADE[name]())


def test_labels_that_mean_harm_are_text(drawn: dict[str, Drawing]) -> None:
    held = [tile.held for tile in drawn["labels that mean harm"].tiles]
    assert held == ["<script>alert(1)</script>", "\N{REPLACEMENT CHARACTER}" * 3 + "]]>", "('a', 1)"]


def luminance(colour: str) -> float:
    """Relative luminance, as the Web Content Accessibility Guidelines 2 define it."""
    return 0.2126 * (rgb := linear(colour))[0] + 0.7152 * rgb[1] + 0.0722 * rgb[2]


def linear(colour: str) -> list[float]:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_text_can_be_read_on_tiles_and_on_light_and_dark_pages() -> None:
    assert all(contrast(colours.INK, fill) >= 4.5 for fill in (*colours.FILLS, colours.NEUTRAL, *colours.HEAT["light"]))
    assert all(contrast(colours.PALE, grey) >= 4.5 for grey in colours.HEAT["dark"])
    style = next(e.text or "" for e in Drawing(sw.draw(MADE["plan"]())).root if e.tag.endswith("style"))
    light, dark = style.split("@media (prefers-color-scheme:dark)")
    for theme, name, ink in ((light, "light", colours.INK), (dark, "dark", colours.PALE)):
        fills = dict(re.findall(r"\.(\w+)\{fill:(#\w{6})", theme))
        assert contrast(fills["text"], fills["page"]) >= 7
        assert contrast(fills["still"], fills["page"]) >= 4.5
        assert fills["amount"] == ink
        assert [fills[f"h{number}"] for number in range(8)] == list(colours.HEAT[name])


#: What an eye without one kind of cones sees of linear RGB (Machado, Oliveira, Fernandes 2009, severity 1).
EYES = {
    "all cones": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]]
    ),
}


def oklab(rgb: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Lightness and two axes of colour, in steps that eyes see as equal (Ottosson 2020), of linear RGB."""
    cones = np.array(
        [
            [0.4122214708, 0.5363325363, 0.0514459929],
            [0.2119034982, 0.6806995451, 0.1073969566],
            [0.0883024619, 0.2817188376, 0.6299787005],
        ]
    )
    axes = np.array(
        [
            [0.2104542553, 0.7936177850, -0.0040720468],
            [1.9779984951, -2.4285922050, 0.4505937099],
            [0.0259040371, 0.7827717662, -0.8086757660],
        ]
    )
    found: npt.NDArray[np.float64] = axes @ np.cbrt(cones @ rgb)
    return found


@pytest.mark.parametrize("eye", EYES)
def test_fills_are_told_apart_by_every_eye(eye: str) -> None:
    """A difference of 0.02 is just seen; these are two and a half of it apart, for the eye that sees least of it."""
    seen = [oklab(np.clip(EYES[eye] @ np.array(linear(fill)), 0, 1)) for fill in colours.FILLS]
    assert min(np.linalg.norm(one - other) for one, other in itertools.combinations(seen, 2)) >= 0.05
    assert len({colours.look(key) for key in range(MOST_KEYS)}) == MOST_KEYS


def test_fills_are_of_one_lightness_and_greys_in_equal_steps() -> None:
    lightness = [oklab(np.array(linear(fill)))[0] for fill in colours.FILLS]
    assert lightness == pytest.approx([0.78] * len(lightness), abs=0.003)
    # Printed without colours they are one grey, on which the names are read.
    assert max(luminance(fill) for fill in colours.FILLS) - min(map(luminance, colours.FILLS)) < 0.08
    for greys in colours.HEAT.values():
        steps = np.diff([oklab(np.array(linear(grey)))[0] for grey in greys])
        assert steps == pytest.approx([steps.mean()] * len(steps), abs=0.004)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((ROWS.partition((4, 4)), (5,)), {}, sw.LayoutError, "but what is of shape"),
        ((MESH, (5,)), {}, sw.LayoutError, "a DeviceMesh takes no shape"),
        ((ROWS, (4, 4)), {"after": ROWS.partition((8, 4))}, sw.LayoutError, "they must be equal"),
        ((sw.TensorLayout(("data",)), (4,)), {}, sw.LayoutError, "device_mesh"),
        ((ROWS,), {"after": COLUMNS}, sw.LayoutError, "shape is needed to draw what next to another"),
        ((sw.TensorLayout(("data",)),), {}, sw.LayoutError, "draw needs a device_mesh"),
        ((ROWS, (4, 4)), {"dtype": "int8"}, sw.LayoutError, "the picture of a TensorLayout takes no dtype"),
        ((MESH,), {"form": "png"}, sw.LayoutError, "form is 'png'; it must be one of 'svg', 'html', 'text'"),
        ((ROWS.partition((4, 4)), 5), {}, TypeError, "shape must be a sequence of integers, got 5"),
        ((ROWS, (4, 4)), {"after": "data"}, TypeError, "after must be a layout"),
        (("data",), {}, TypeError, "what must be a layout.*got str"),
        ((MESH,), {"after": ROWS}, TypeError, "got DeviceMesh"),
    ],
)
def test_refusals(arguments: Sequence[Any], options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sw.draw(*arguments, **options)


def test_a_label_that_looks_like_the_fill_of_a_pattern_stays_as_it_is() -> None:
    mesh = sw.DeviceMesh((16,), ("x",), ["url(#a)", *range(15)])
    drawn = sw.draw(sw.TensorLayout(("x", None), mesh), (16, 2))
    assert ">url(#a)</text>" in drawn
    used = set(re.findall(r'fill="url\(#(\w+)\)"', drawn))
    assert used
    assert used == set(re.findall(r'<pattern id="(\w+)"', drawn))
