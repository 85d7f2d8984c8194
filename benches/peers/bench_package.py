"""The size of the wheel that is released, as `make wheel` makes it."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from figures import Row, at_most_bytes
from part import main

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from release.checks import MOST_BYTES
from release.wheel import build


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        size = build(Path(folder)).stat().st_size
    yield Row("the release wheel", "", size, goal=at_most_bytes(MOST_BYTES), unit="B")


if __name__ == "__main__":
    main(rows)
