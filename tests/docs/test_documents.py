"""The code in README.md and docs/ runs, and prints what the page says; so do the commands."""

from __future__ import annotations

import doctest
import importlib.util
import re
import shlex
import zlib
from pathlib import Path

import pytest

import shardwise as sw
from release.site.check import faults
from release.site.docstrings import examples_first
from release.site.hooks import llms_text, on_post_page, outward
from release.site.names import public_names
from shardwise.cli import main

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(python|pycon|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
#: What may be missing; a block that imports it is then left out.
FRAMEWORK = re.compile(r"^(?:>>> )?import (jax|torch|transformers)$", re.MULTILINE)


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # PyTorch's, of one process alone.
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_code_of_the_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One session a page: a block may use what those before it have made."""
    text = page.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    parser = doctest.DocTestParser()
    complaints: list[str] = []
    for block in BLOCK.finditer(text):
        code, line = block.group(2), text[: block.start()].count("\n") + 1
        if block.group(1) == "console":
            for command, said in COMMAND.findall(code):
                # A command that is to fail has its status behind it: `# status 1`.
                wanted = int(found[1]) if (found := re.search(r"# status ([0-9]+)$", command)) else 0
                program, *arguments = shlex.split(command, comments=True)
                assert program == "shardwise"
                status, printed = main(arguments), capsys.readouterr().out
                if (status, printed) != (wanted, said):
                    complaints.append(f"{page.name}: $ {command}: status {status}\n{printed}")
        elif any(importlib.util.find_spec(module) is None for module in FRAMEWORK.findall(code)):
            continue
        elif ">>> " in code:
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
    made = re.findall(r'^        "([a-z-]+-[a-z-]+)",$|^    (?:xla|saved|explicit)\("([a-z-]+)"', source, re.MULTILINE)
    assert sorted(named) == sorted(long or short for long, short in made)


def test_every_public_name_has_its_place_in_the_reference() -> None:
    """By its own entry, or by that of the module whose public names a page lists; `make docs` asks the built pages."""
    pages = (ROOT / "docs" / "reference").glob("*.md")
    entries = {
        entry for page in pages for entry in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
    names = public_names()
    assert {name.removeprefix("shardwise.") for name in names if name.count(".") == 1} >= set(sw.__all__) - {
        "__version__",
        "packed",
    }
    missing = [name for name in names if not {name, name.rpartition(".")[0]} & entries]
    assert not missing
    modules = {name.rpartition(".")[0] for name in names}
    assert not entries - set(names) - modules


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.name != "README.md"}
    pages |= {f"notebooks/{path.stem}.md" for path in (ROOT / "docs" / "notebooks").glob("*.ipynb")}
    assert sorted(re.findall(r"[\w/-]+\.md", menu)) == sorted(pages)


def test_the_site_shows_examples_first() -> None:
    text = "Give one.\n\nArgs:\n    x: what.\n\n>>> one(\n...     2)\n1\n\nMore.\n"
    assert examples_first(text) == (
        "Give one.\n\nExamples:\n    >>> one(\n    ...     2)\n    1\n\nArgs:\n    x: what.\n\nMore."
    )
    assert examples_first("Give one.") == "Give one."


def test_links_out_of_the_pages_lead_to_the_repository() -> None:
    text = "[a](../../LICENSE) [b](x.md) [c](../semantics.md#mesh) [d](https://x/../y)"
    expected = text.replace("../../LICENSE", "https://host/blob/main/LICENSE")
    assert outward(text, "guides/report.md", "https://host") == expected
    with pytest.raises(FileNotFoundError, match=r"docs/guides/report\.md links to \.\./\.\./gone"):
        outward("[a](../../gone)", "guides/report.md", "https://host")


def test_pages_ask_no_host_and_their_search_has_a_name() -> None:
    """`make look` sees both in a browser; these are the places of Material's pages that are changed for it."""
    page = '<a data-md-component="source"></a><div data-md-component="search" role="dialog">'
    assert on_post_page(page) == '<a></a><div data-md-component="search" role="dialog" aria-label="Search">'


@pytest.mark.heavy
def test_what_is_wrong_with_a_site_is_seen(tmp_path: Path) -> None:
    names = [f"{name} py:function 1 a.html -" for name in public_names() if name != "shardwise.draw"]
    data = b"# 1\n# 2\n# 3\n# 4\n" + zlib.compress("\n".join(names).encode())
    (tmp_path / "objects.inv").write_bytes(data)
    page = '<html lang="en"><h1 id="top">A</h1><a href="b.html#there">b</a><a href="https://x/y">y</a>'
    (tmp_path / "a.html").write_text(page + '<a href="#top">a</a><img alt="a picture" src="b.html">')
    (tmp_path / "b.html").write_text('<html lang="en"><h1 id="there">B</h1>')
    assert faults(tmp_path) == ["shardwise.draw has no entry"]
    (tmp_path / "b.html").write_text('<html><img src="a.html"><script src="https://x/y.js"></script><a href="c.html">')
    assert faults(tmp_path) == [
        "a.html: b.html#there has no such place",
        "b.html: no language is given",
        "b.html: the picture a.html has no text in its place",
        "b.html: it loads https://x/y.js, from a network",
        "b.html: 0 headings of the first level",
        "b.html: c.html is not there",
        "shardwise.draw has no entry",
    ]


def test_troubleshooting_quotes_what_the_package_says() -> None:
    """A message that no longer exists helps nobody. Those of the system are not in the sources."""
    of_the_system = {"No space left on device"}
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(quoted) > 20
    package = ROOT / "python" / "shardwise"
    sources = [*package.rglob("*.py"), *(ROOT / "rust").rglob("*.rs")]
    # A message may go over several lines of code, and the command says options where the library says arguments.
    said = re.sub(r'"\s*(?:#.*)?\n\s*f?"', "", "\n".join(path.read_text(encoding="utf-8") for path in sources))
    assert [words for words in quoted if words not in said and words not in of_the_system] == []


def test_the_list_for_programs_has_each_page_with_its_first_sentence(tmp_path: Path) -> None:
    text = "# A\n\n```sh\nx\n```\n\nThe [first](b.md) **sentence**. The second.\n"
    (tmp_path / "a.md").write_text(text, encoding="utf-8")
    menu = [{"Start": "a.md"}, {"Do": [{"More": [{"B": "in/b.md"}, "in/index.md"]}]}]
    assert llms_text(menu, tmp_path).splitlines()[3:] == [
        "",
        "## Start",
        "",
        "- [Start](a.html): The first sentence.",
        "",
        "## Do",
        "",
        "- [B](in/b.html)",
        "- [in/index](in/index.html)",
    ]
