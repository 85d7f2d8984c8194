"""The pages are read by people from any country: short sentences, and the field's words. So are help and errors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from release.site.hooks import command_line

ROOT = Path(__file__).parents[2]
#: Tables that are written by `make bench`.
FOR_CONTRIBUTORS = {"benchmarks.md"}
PAGES = [
    page for page in sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]) if page.name not in FOR_CONTRIBUTORS
]
#: A sentence of more words is read twice.
LONGEST = 35
#: Words that have to be read twice, and what to write instead.
RULED_OUT = {
    r"\b[Ww]hoever\b": "name who it is",
    r"\bbeside\b": "next to",
    r"\bbut for\b": "except",
    r"\btold apart\b": "distinguished",
    r"\bamid\b": "in the middle of",
    r", since\b": ", because",
    r"\blies? (?:in|at|on|there|where)\b": "is in, is stored at",
    r"\bis none of\b": "is not one of",
    r"\bwill do as well\b": "can be used instead",
}


def paragraphs(text: str) -> list[str]:
    """The text in paragraphs and items of lists, without code, tables and headings."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    found: list[list[str]] = [[]]
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith(("|", "#")):
            found.append([])
        elif re.match(r"\s*(?:[-*]|\d+\.) ", line):
            found.append([line])
        else:
            found[-1].append(line)
    return [" ".join(line.strip() for line in lines) for lines in found if lines]


def sentences(text: str) -> list[str]:
    """The sentences of a page. A piece of code is one word, and the target of a link none."""
    plain = (re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", one)) for one in paragraphs(text))
    return [sentence for one in plain for sentence in re.split(r"(?<=[.!?])\s+", one)]


def test_sentences_are_counted() -> None:
    text = "# A heading\n\nOne `a b. c` two\nthree. Four [five](six.md)!\n\n| a | table |\n\n- seven\n- eight\n\n"
    text += "```sh\nnine\n```\n"
    assert sentences(text) == ["One code two three.", "Four [five]!", "- seven", "- eight"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_sentence_of_the_page_is_long(page: Path) -> None:
    long = [one for one in sentences(page.read_text(encoding="utf-8")) if len(one.split()) > LONGEST]
    assert not long, f"make two sentences of each: {long}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_page_has_plain_words(page: Path) -> None:
    text = "\n".join(sentences(page.read_text(encoding="utf-8")))
    found = {f"{match[0]!r}: {better}" for word, better in RULED_OUT.items() for match in re.finditer(word, text)}
    assert not found


def messages(source: str) -> Iterator[str]:
    """The texts in what a source raises, without what is filled in."""
    for raised in ast.walk(ast.parse(source)):
        if isinstance(raised, ast.Raise) and raised.exc is not None:
            for node in ast.walk(raised.exc):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def test_messages_are_found() -> None:
    source = 'def f(x):\n    """Not this."""\n    raise ValueError(f"{x} lies in" " it")\n'
    assert list(messages(source)) == [" lies in it"]


@pytest.mark.parametrize("room", ["help", "messages"])
def test_what_the_command_and_errors_say_has_plain_words(room: str) -> None:
    if room == "help":
        texts = [" ".join(command_line().split())]
    else:
        files = (ROOT / "python" / "shardwise").rglob("*.py")
        texts = [text for path in files for text in messages(path.read_text(encoding="utf-8"))]
    found = [(match[0], text[:200]) for word in RULED_OUT for text in texts for match in re.finditer(word, text)]
    assert not found
