"""The page of the benchmarks is what the committed results render to, and its figures are judged as they should be."""

from __future__ import annotations

import doctest
import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PEERS = ROOT / "benches" / "peers"


def check(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "benches" / "peers" / "run.py"), "--check"]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_page_and_the_charts_are_what_the_results_render_to() -> None:
    result = check(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("page", ["docs/benchmarks.md", "docs/pictures/ratios.svg", "docs/pictures/curves.svg"])
def test_another_figure_is_noticed(page: str, tmp_path: Path) -> None:
    shutil.copytree(PEERS, tmp_path / "benches" / "peers")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    text = (tmp_path / page).read_text(encoding="utf-8")
    pattern = r"(?<=\*\*)\d" if page.endswith(".md") else r"(?<=figures )\w"
    changed = re.sub(pattern, lambda match: "1" if match[0] == "0" else "0", text, count=1)
    assert changed != text
    (tmp_path / page).write_text(changed, encoding="utf-8")
    result = check(tmp_path)
    assert result.returncode == 1
    assert Path(page).name in result.stdout


def test_the_template_has_no_figures() -> None:
    """A time, a ratio or a share in it would be one that no run has measured."""
    template = (PEERS / "template.md").read_text(encoding="utf-8")
    template = template.replace("at 100 % nothing", "")
    assert not re.findall(r"\d\s?(?:[nµm]?s\b|×|%|[KMG]i?B)", template)


@pytest.mark.parametrize("module", ["figures", "page"])
def test_the_examples_of_the_module(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that are judged by hand arithmetic."""
    monkeypatch.syspath_prepend(str(PEERS))
    outcome = doctest.testmod(importlib.import_module(module))
    assert outcome.attempted
    assert not outcome.failed
