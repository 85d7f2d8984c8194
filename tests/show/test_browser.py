"""The pictures in a browser, whose own fonts write the labels: they stand where the numbers of the SVG say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shardwise as sw
from tests.browser import browser
from tests.show.test_svg import MADE

pytestmark = pytest.mark.slow

#: For each picture the texts that leave its page, that leave every tile though they are written on one, and the pairs
#: that lie over one another by more than the rounding of a screen.
CHECK = """
[...document.querySelectorAll('svg')].map(svg => {
  const box = element => element.getBoundingClientRect(), page = box(svg);
  const within = (inner, outer) => inner.left >= outer.left - 1.5 && inner.right <= outer.right + 1.5
    && inner.top >= outer.top - 1.5 && inner.bottom <= outer.bottom + 1.5;
  const texts = [...svg.querySelectorAll('text')].map(element => ({ element, box: box(element) }));
  const tiles = [...svg.querySelectorAll('rect')].filter(rect => rect.querySelector('title')).map(box);
  // A line of text is higher than its letters: what counts is whether these meet.
  const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1.5
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4;
  const wrong = [];
  for (const { element, box: own } of texts) {
    if (!within(own, page)) wrong.push(['page', element.textContent]);
    const onTile = Boolean(element.getAttribute('stroke'));
    if (onTile && !tiles.some(tile => within(own, tile))) wrong.push(['tile', element.textContent]);
  }
  texts.forEach((one, number) => texts.slice(number + 1).forEach(other => {
    if (meet(one.box, other.box)) wrong.push([one.element.textContent, other.element.textContent]);
  }));
  return wrong.slice(0, 5);
})
"""


@pytest.mark.parametrize("font", ["monospace", "serif"])
def test_labels_stand_where_they_should_in_any_font(tmp_path: Path, font: str) -> None:
    pictures = [sw.draw(make()).replace("ui-monospace, Menlo, Consolas, monospace", font) for make in MADE.values()]
    path = tmp_path / "pictures.html"
    # As wide as they are: smaller ones are drawn smaller, texts and all.
    style = "<style>body{width:3000px}</style>"
    path.write_text(f'<meta charset="utf-8">{style}' + "<hr>".join(pictures), encoding="utf-8")
    with browser(tmp_path / "profile") as page:
        page.open(path, 3100, 1000)
        found = dict(zip(MADE, page.run(CHECK), strict=True))
        assert {name: wrong for name, wrong in found.items() if wrong} == {}, json.dumps(found)
        assert page.complaints == []
        assert page.requests == [path.as_uri()]
