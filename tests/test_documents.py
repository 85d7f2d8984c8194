"""The code in README.md and docs/ runs, and prints what the page says."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```(?:python|pycon)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One session a page: a block may use what those before it have made."""
    text = page.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    parser = doctest.DocTestParser()
    complaints: list[str] = []
    for block in BLOCK.finditer(text):
        code, line = block.group(1), text[: block.start()].count("\n") + 1
        if ">>> " in code:
            test = parser.get_doctest(code, names, page.name, str(page), line)
            runner.run(test, out=complaints.append, clear_globs=False)
            names.update(test.globs)
        else:
            exec(compile("\n" * line + code, str(page), "exec"), names)
    assert not complaints, "".join(complaints)


FINDINGS = sorted((ROOT / "docs").glob("findings*.md"))
NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
#: The last cell of a row: names of tests, or of cases of `test_findings`.
TEST_CELL = re.compile(r"\| (`[^|]*`) \|$", re.MULTILINE)


@pytest.mark.parametrize("page", FINDINGS, ids=lambda page: page.name)
def test_the_tests_that_findings_name_exist(page: Path) -> None:
    named = NAMED_TEST.findall(page.read_text(encoding="utf-8"))
    assert named
    for file, name in named:
        assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file} has no {name}"


def test_the_cases_that_findings_name_are_all_that_there_are() -> None:
    page = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    source = (ROOT / "tests" / "oracle" / "test_findings.py").read_text(encoding="utf-8")
    cells = [name for cell in TEST_CELL.findall(page) for name in re.findall(r"`([^`]+)`", cell)]
    named = [name for name in cells if "::" not in name]
    made = re.findall(r'^        "([a-z-]+-[a-z-]+)",$|^    (?:xla|saved)\("([a-z-]+)"', source, re.MULTILINE)
    assert sorted(named) == sorted(long or short for long, short in made)
