"""The pictures of the documentation are those that its script makes."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from shardwise.show import colours

DOCS = Path(__file__).parents[2] / "docs"
MADE = dict(runpy.run_path(str(DOCS / "pictures" / "make.py"))["pictures"]())


def test_the_pictures_are_what_is_drawn() -> None:
    for name, text in MADE.items():
        assert (DOCS / "pictures" / name).read_text(encoding="utf-8") == text, name


def test_every_picture_is_shown_and_every_shown_one_is_there() -> None:
    pages = [DOCS.parent / "README.md", *DOCS.glob("*.md")]
    shown = {name for page in pages for name in re.findall(r"pictures/([\w-]+\.svg)", page.read_text(encoding="utf-8"))}
    there = {path.name for path in (DOCS / "pictures").glob("*.svg")}
    assert shown == there
    assert set(MADE) <= there


@pytest.mark.heavy
def test_the_fills_are_those_that_the_search_finds() -> None:
    """The page says so, and by how much: with the script that it names."""
    script = runpy.run_path(str(DOCS / "pictures" / "palette.py"))
    least, found = script["search"]()
    assert set(found) == set(colours.FILLS)
    assert f"at least {least:.3f} apart in OKLab" in (DOCS / "design.md").read_text(encoding="utf-8")
