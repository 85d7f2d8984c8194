"""What an SVG picture says, read from its own numbers."""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple
from xml.etree import ElementTree as ET

SVG = "{http://www.w3.org/2000/svg}"

#: The classes of texts that stand on tiles.
ON_TILES = ("on", "amount", "still")

Look = tuple[str, str]


class Box(NamedTuple):
    """A rectangle of the picture."""

    left: float
    top: float
    right: float
    bottom: float

    def has(self, other: Box, slack: float = 0.06) -> bool:
        return (
            self.left - slack <= other.left
            and self.top - slack <= other.top
            and other.right <= self.right + slack
            and other.bottom <= self.bottom + slack
        )

    def meets(self, other: Box, slack: float = 0.06) -> bool:
        return (
            min(self.right, other.right) - max(self.left, other.left) > slack
            and min(self.bottom, other.bottom) - max(self.top, other.top) > slack
        )

    @property
    def area(self) -> float:
        return (self.right - self.left) * (self.bottom - self.top)


class Tile(NamedTuple):
    """A rectangle with what it says when pointed at."""

    box: Box
    place: str
    held: str
    look: Look
    key: int | None

    @property
    def bounds(self) -> list[tuple[int, int]]:
        return [(int(a), int(b)) for a, b in re.findall(r"(\d+):(\d+)", self.place)]


class Drawing:
    """A picture taken apart: tiles, swatches of the legend, texts with the room that they take."""

    def __init__(self, svg: str) -> None:
        self.root = ET.fromstring(svg)
        view = [float(number) for number in self.root.attrib["viewBox"].split()]
        self.page = Box(view[0], view[1], view[0] + view[2], view[1] + view[3])
        patterns = {e.attrib["id"]: e[0].attrib["d"] for e in self.root.iter(f"{SVG}pattern")}
        self.tiles: list[Tile] = []
        self.swatches: list[tuple[int, Look]] = []
        self.texts: list[tuple[str, Box, str]] = []
        elements = list(self.root)
        for element, following in itertools.zip_longest(elements, elements[1:]):
            kind = element.get("class", "")
            if element.tag == f"{SVG}rect" and kind.split()[0] in ("tile", "line"):
                over = following.attrib["fill"] if following is not None and following.get("class") == "over" else ""
                # Shades of grey are classes, since a dark page has others.
                look = element.get("fill", kind), patterns[over[5:-1]] if over else ""
                title = element.findtext(f"{SVG}title")
                key = None if element.get("data-key") is None else int(element.attrib["data-key"])
                if title is None:
                    assert key is not None
                    self.swatches.append((key, look))
                else:
                    place, _, held = title.partition(": ")
                    self.tiles.append(Tile(_rectangle(element), place, held, look, key))
            elif element.tag == f"{SVG}text":
                on = element.get("stroke", "") if kind == "on" else ""
                self.texts.append((element.text or "", _extent(element), on or (kind if kind in ON_TILES else "")))

    def written(self) -> list[str]:
        return [text for text, _, _ in self.texts]

    def labels_on(self, tile: Tile) -> list[str]:
        return [text for text, box, fill in self.texts if fill and tile.box.has(box)]


def _rectangle(element: ET.Element) -> Box:
    x, y, width, height = (float(element.attrib[name]) for name in ("x", "y", "width", "height"))
    return Box(x, y, x + width, y + height)


def _extent(element: ET.Element) -> Box:
    """The room of a text of 12 units: 9 above its line, 3 below, and as long as it says."""
    x, y, length = (float(element.attrib[name]) for name in ("x", "y", "textLength"))
    before = {"start": 0.0, "middle": length / 2, "end": length}[element.attrib["text-anchor"]]
    if element.get("transform") is None:
        return Box(x - before, y - 9, x - before + length, y + 3)
    assert element.attrib["transform"] == f"rotate(-90 {element.attrib['x']} {element.attrib['y']})"
    return Box(x - 9, y + before - length, x + 3, y + before)
