"""The pictures: rectangles tile the tensor, labels say who holds what, and can be read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.show import svg
from tests.interop.layouts import layouts, mesh_of

SVG = "{http://www.w3.org/2000/svg}"
MESH = sw.DeviceMesh((2, 4), ("data", "model"))


def rectangles(root: ET.Element) -> list[tuple[tuple[float, ...], list[tuple[int, int]], str, str]]:
    """Place, box, devices and colour of each rectangle."""
    found = []
    for rect in root.iter(f"{SVG}rect"):
        title = rect.findtext(f"{SVG}title")
        assert title is not None
        match = re.fullmatch(r"\[(.*)\] on (.*)", title)
        assert match is not None
        box = [(int(a), int(b)) for a, b in re.findall(r"(\d+):(\d+)", match[1])]
        place = tuple(float(rect.attrib[key]) for key in ("x", "y", "width", "height"))
        found.append((place, box, match[2], rect.attrib["fill"]))
    return found


@given(layouts(), st.integers(1, 9), st.sampled_from(["ceil", "chunk", "balanced", "floor"]))
def test_rectangles_tile_the_tensor(layout: sw.TensorLayout, size: int, uneven: sw.UnevenRule) -> None:
    partition = layout.partition(tuple(range(size, size + layout.rank)), uneven)
    root = ET.fromstring(sw.draw(partition))
    count = np.zeros(partition.shape, int)
    panels: dict[tuple[float, float], float] = {}
    for (x, y, width, height), box, devices, _ in rectangles(root):
        count[tuple(slice(*bounds) for bounds in box)] += 1
        assert width > 0
        assert height > 0
        holders = (
            partition.devices_holding(
                partition.locate(int(np.ravel_multi_index([a for a, _ in box], partition.shape)))[0]
            )
            if box
            else list(mesh_of(layout).devices.flat)
        )
        assert devices.split(" and ")[0] == ", ".join(holders[:16])
        panels[x, y] = width * height
    assert (count == 1).all()
    # The rectangles of a panel fill it: no two begin at one place, and their areas add up.
    area = sum(panels.values())
    view = [float(number) for number in root.attrib["viewBox"].split()]
    assert area <= view[2] * view[3]
    assert all(0 <= x <= view[2] and 0 <= y <= view[3] for x, y in panels)


def test_places_are_proportional_and_touch() -> None:
    root = ET.fromstring(sw.draw(sw.TensorLayout(("model",), MESH), (10,), uneven="balanced"))
    places = [place for place, _, _, _ in rectangles(root)]
    assert [width for _, _, width, _ in places] == [84, 84, 56, 56]
    for (x, _, width, _), (following, _, _, _) in pairwise(places):
        assert x + width == following


def texts(root: ET.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def test_labels() -> None:
    written = texts(ET.fromstring(sw.draw(sw.TensorLayout((None, "model"), MESH), (6, 8))))
    for label in ("(None, 'model')", "6 x 8, data=2, model=4", "0:6", "0:2", "6:8", "cpu:0", "cpu:4"):
        assert label in written


def test_before_and_after() -> None:
    before, after = sw.TensorLayout(("data", None), MESH), sw.TensorLayout((None, "model"), MESH)
    root = ET.fromstring(sw.draw(before, (8, 8), after=after))
    assert len(rectangles(root)) == 2 + 4
    assert "before: ('data', None)" in texts(root)
    assert "after: (None, 'model')" in texts(root)
    colours = {devices.split(",")[0]: fill for _, _, devices, fill in rectangles(root)}
    # A device has its own colour, before and after.
    assert len(set(colours.values())) == len(colours)
    assert sum(fill == colours["cpu:0"] for _, _, _, fill in rectangles(root)) == 2


def test_panels_for_dims_that_do_not_fit() -> None:
    root = ET.fromstring(sw.draw(sw.TensorLayout(("a", "b", "c"), sw.DeviceMesh((2, 2, 2), list("abc"))), (2, 4, 6)))
    assert [text for text in texts(root) if text.startswith("dim")] == ["dim 0 0:1", "dim 0 1:2"]
    assert len(rectangles(root)) == 8


def test_empty_shards_are_listed() -> None:
    root = ET.fromstring(sw.draw(sw.TensorLayout(("model",), MESH), (3,), uneven="ceil"))
    assert "empty: cpu:3, cpu:7" in texts(root)
    assert len(rectangles(root)) == 3


def test_the_same_text_each_time_and_any_label_is_well_formed() -> None:
    mesh = sw.DeviceMesh((3,), ("<&>",), devices=["<script>", "\0\ud800", ("a", 1)])
    layout = sw.TensorLayout(("<&>",), mesh)
    assert sw.draw(layout, (3,)) == sw.draw(layout, (3,))
    held = [devices for _, _, devices, _ in rectangles(ET.fromstring(sw.draw(layout, (3,))))]
    assert held == ["<script>", "��", "('a', 1)"]


def brightness(colour: str) -> float:
    """Relative luminance, as the Web Content Accessibility Guidelines 2 define it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((brightness(one), brightness(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_text_can_be_read_on_shards_and_on_light_and_dark_pages() -> None:
    assert all(contrast(svg._INK, fill) >= 7 for fill in svg._FILLS)
    assert min(contrast(svg._GREY, page) for page in ("#ffffff", "#000000")) >= 4.5


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((sw.TensorLayout(("data",), MESH),), {}, "shape is needed"),
        ((sw.TensorLayout(("data",), MESH).partition((4,)), (5,)), {}, "but layout is a partition of shape"),
        (
            (sw.TensorLayout(("data",), MESH), (4,)),
            {"after": sw.TensorLayout(("data",), MESH).partition((6,))},
            "they must be equal",
        ),
        ((sw.TensorLayout(("x",), sw.DeviceMesh((2048,), ("x",))), (2048,)), {}, "2048 shards are too many"),
        ((sw.TensorLayout((None,), sw.DeviceMesh((2**40,), ("x",))), (4,)), {}, "1099511627776 devices are too many"),
        ((sw.TensorLayout(("data",)), (4,)), {}, "device_mesh"),
    ],
)
def test_refusals(arguments: Sequence[object], options: dict[str, object], message: str) -> None:
    with pytest.raises(sw.LayoutError, match=message):
        sw.draw(*arguments, **options)  # type: ignore[arg-type]


def test_wrong_types() -> None:
    with pytest.raises(TypeError, match="shape must be a sequence of integers, got 5"):
        sw.draw(sw.TensorLayout((None,), sw.DeviceMesh((1,), ("x",))).partition((4,)), 5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="after must be"):
        sw.draw(sw.TensorLayout(("data",), MESH), (4,), after="data")  # type: ignore[arg-type]


def test_the_picture_of_the_documentation_is_what_is_drawn() -> None:
    page = Path(__file__).parents[2] / "docs" / "pictures" / "axis-order.svg"
    mesh = sw.DeviceMesh((2, 2), ("x", "y"))
    one, other = (sw.TensorLayout((axes, None), mesh) for axes in (("x", "y"), ("y", "x")))
    assert page.read_text(encoding="utf-8") == sw.draw(one, (8, 8), after=other)
