"""The notebooks run, and show what is kept of them."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

from release.site.hooks import notebook_page

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.mark.filterwarnings("ignore")  # What runs notebooks says of itself what is not ours to mend.
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_it_shows_when_it_is_run(path: Path) -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    run = runpy.run_path(str(FOLDER / "run.py"))
    found, kept = run["executed"](path), json.loads(path.read_text(encoding="utf-8"))
    for now, then in zip(found["cells"], kept["cells"], strict=True):
        assert now == then, "".join(then["source"])
    assert run["text_of"](found) == path.read_text(encoding="utf-8")


def test_each_says_something() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["shards"]
    for path in NOTEBOOKS:
        outputs = [
            cell["outputs"] for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if "outputs" in cell
        ]
        assert sum(map(bool, outputs)) >= 3


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_page_of_a_notebook_has_its_pictures_as_images(path: Path) -> None:
    page = notebook_page(path)
    assert page.startswith("# ")
    assert "<svg" not in page
    alternatives = re.findall(r'<img alt="([^"]+)" src="data:image/svg\+xml;base64,', page)
    assert len(alternatives) == path.read_text(encoding="utf-8").count("<svg ")
