"""Every entry of the compiled module is inside `guard`, getters and operators too: a panic becomes an exception."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "rust" / "python" / "src"
FUNCTION = re.compile(r"^(?P<indent> *)(?:pub(?:\([^)]*\))? )?fn (?P<name>r?#?\w+)", re.MULTILINE)


#: What `#[pymethods]` is of, also within a macro, and what is handed to that macro.
METHODS = re.compile(
    r"^(?P<in> *)#\[pymethods\]\n(?P=in)impl .*?\n(?P=in)\}\n|^partition_class!\(\w+ \{\n.*?\n\}\);\n",
    re.MULTILINE | re.DOTALL,
)


def entries(text: str) -> Iterator[tuple[str, str]]:
    """Name and body of what Python can call: the functions of `#[pymethods]`, and those marked `#[pyfunction]`."""
    for block in METHODS.finditer(text):
        functions = list(FUNCTION.finditer(block[0]))
        for function, after in zip(functions, [*functions[1:], None], strict=True):
            if len(function["indent"]) == len(block["in"] or "") + 4:
                yield function["name"], block[0][function.start() : after.start() if after else None]
    for block in re.finditer(r"^ *#\[pyfunction\]\n(.*?)^ *\}\n", text, re.MULTILINE | re.DOTALL):
        function = FUNCTION.search(block[0])  # type: ignore[assignment]
        assert function
        yield function["name"], block[0][function.start() :]


@pytest.mark.parametrize("path", sorted(SOURCES.rglob("*.rs")), ids=lambda path: str(path.relative_to(SOURCES)))
def test_every_entry_is_guarded(path: Path) -> None:
    found = entries(path.read_text(encoding="utf-8"))
    assert [name for name, body in found if not re.match(r"\s*(guard|answer)\(", body.partition("{\n")[2])] == []


#: What PyO3 makes an object of without asking for memory, or raises MemoryError for. It panics where there is no memory
#: for another answer, and outside of `guard`; `answer` makes the object within.
SAFE = re.compile(r"-> PyResult<(Bound<.*|Py<.*|\(\)|bool|Self|DtensorMesh)> \{$")


@pytest.mark.parametrize("path", sorted(SOURCES.rglob("*.rs")), ids=lambda path: str(path.relative_to(SOURCES)))
def test_every_answer_becomes_an_object_within_the_guard(path: Path) -> None:
    heads = [
        (name, "".join(body.partition("{\n")[:2]).strip()) for name, body in entries(path.read_text(encoding="utf-8"))
    ]
    # A hash is a number for the interpreter, which makes the object of it.
    assert [name for name, head in heads if name != "__hash__" and not SAFE.search(head)] == []


def test_the_entries_are_found() -> None:
    found = {name for path in SOURCES.rglob("*.rs") for name, _ in entries(path.read_text(encoding="utf-8"))}
    assert {"new", "shape", "coordinates", "locate", "all_pieces", "default_index", "_panic", "__hash__"} <= found
