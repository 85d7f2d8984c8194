"""The size of the release wheel, built by maturin from what is here."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from figures import Row, at_most_bytes
from part import main

ROOT = Path(__file__).resolve().parents[2]


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "maturin",
            "build",
            "--release",
            "--quiet",
            "--interpreter",
            sys.executable,
            "--out",
            folder,
        ]
        subprocess.run(command, cwd=ROOT, check=True)
        (wheel,) = Path(folder).iterdir()
        yield Row("the release wheel", "", wheel.stat().st_size, goal=at_most_bytes(2 * 2**20), unit="B")


if __name__ == "__main__":
    main(rows)
