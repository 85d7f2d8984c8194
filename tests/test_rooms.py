"""Imports run one way: from the rooms of the package and of the Rust crates to those below them, and in no circle.

`CONTRIBUTING.md` shows the same rooms, from the ground up.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

#: What each house is built of: rooms from the ground up, those of one row side by side. A room is a file or a folder,
#: and imports from the rows below its own and from itself only. A new room has its row here and on the page.
HOUSES: dict[str, tuple[tuple[str, ...], ...]] = {
    "python/shardwise": (
        ("errors", "_core", "_drawn", "_text"),
        ("_arguments", "_dtypes", "_frozen", "_strided", "piece"),
        ("_atomic", "_boxes", "_tree", "packed", "sub_axis"),
        ("mesh_views",),
        ("mesh", "tiling"),
        ("partition",),
        ("layout",),
        ("show",),
        ("reshard", "rules"),
        ("array",),
        ("model", "store"),
        ("execute",),
        ("dtensor",),
        ("interop",),
        ("cli",),
        ("__init__", "__main__"),
    ),
    "rust/core": (
        ("shown",),
        ("error",),
        ("index", "parallel"),
        ("mesh", "region", "uneven"),
        ("sections", "sub_axis"),
        ("layout",),
        ("partition",),
        ("locate", "runs"),
        ("packed",),
        ("tiling",),
        ("plan",),
        ("collective", "copy"),
        ("dtensor", "pickle", "rules"),
        ("dcp",),
        ("lib",),
    ),
    "rust/io/src": (
        ("boxes", "crc32c", "digest", "error", "faults", "strided"),
        ("file", "piece"),
        ("check", "commit", "pair", "slot"),
        ("job",),
        ("maps", "table", "tiles"),
        ("unit",),
        ("run",),
        ("lib",),
    ),
    "rust/python/src": (
        ("errors", "memory"),
        ("arrays", "convert"),
        ("views",),
        ("checksum", "dtensor", "io", "mesh", "pickle", "rules"),
        ("layout",),
        ("partition",),
        ("packed",),
        ("tiling",),
        ("collective", "reshard"),
        ("lib",),
    ),
}

#: Imports for types only that run up: a layout makes partitions, and a partition says whose it is; a mesh has views,
#: which are meshes.
TYPES_ONLY = {("partition", "layout"), ("mesh_views", "mesh")}

#: file -> what it imports of its own house, and whether for types only.
Imports = dict[str, dict[str, bool]]


def python_files(house: Path) -> dict[str, Path]:
    """The modules, by their names within the package; `store` is that of the folder itself."""
    files = {}
    for path in house.rglob("*.py"):
        parts = path.relative_to(house).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return files


def python_imports(house: Path) -> Imports:
    files = python_files(house)
    known = files.keys() | {"_core"}
    found: Imports = {}
    for name, path in files.items():
        folder = path.relative_to(house).parent.parts
        imports: dict[str, bool] = {}
        for module, types_only in imported(ast.parse(path.read_text(encoding="utf-8")), folder):
            # `from ..mesh import DeviceMesh` is of a module, `from .. import _core` is of the name behind it.
            target = next((each for each in (module, module.rpartition(".")[0]) if each in known), "__init__")
            imports[target] = imports.get(target, True) and types_only
        imports.pop(name, None)
        found[name] = imports
    return found


def imported(node: ast.AST, folder: tuple[str, ...], types_only: bool = False) -> Iterator[tuple[str, bool]]:
    """What a module imports of the package, wherever it does: dotted names within the package, and if for types."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom) and child.level:
            base = (*folder[: len(folder) - child.level + 1], *(child.module or "").split("."))
            for alias in child.names:
                yield ".".join(part for part in (*base, alias.name) if part), types_only
        elif isinstance(child, ast.ImportFrom) and (child.module or "").split(".")[0] == "shardwise":
            for alias in child.names:
                yield f"{child.module}.{alias.name}".removeprefix("shardwise."), types_only
        elif isinstance(child, ast.Import):
            for alias in child.names:
                if alias.name.split(".")[0] == "shardwise":
                    yield alias.name.removeprefix("shardwise").lstrip(".") or "__init__", types_only
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            yield from imported(child, folder, types_only=True)
        else:
            yield from imported(child, folder, types_only)


COMMENT = re.compile(r"//[^\n]*")
USE = re.compile(r"\buse\s+([^;]+);")
PUBLIC = re.compile(r"\bpub use\s+([^;]+);")
PATH = re.compile(r"\b((?:crate|super)(?:::\w+)+)")


def rust_imports(house: Path) -> Imports:
    """The files of a crate without their tests: `#[cfg(test)]` stands last in a file, and `tests` is a file's name."""
    files = {}
    for path in house.rglob("*.rs"):
        parts = path.relative_to(house).with_suffix("").parts
        if "tests" not in parts:
            files["::".join(parts[:-1] if parts[-1] == "mod" else parts)] = path
    texts = {name: COMMENT.sub("", path.read_text(encoding="utf-8")) for name, path in files.items()}
    # What the root gives a second name: `pub use index::radix` makes it `crate::radix` as well.
    aliases = {tree.rpartition("::")[2]: tree for use in PUBLIC.findall(texts["lib"]) for tree in spelled_out(use)}
    found: Imports = {}
    for name, text in texts.items():
        code = text.partition("#[cfg(test)]")[0]
        own = () if name == "lib" else tuple(name.split("::"))
        paths = [path for use in USE.findall(code) for path in spelled_out(use)] + PATH.findall(USE.sub("", code))
        imports = {file_of(target, files, aliases) for path in paths if (target := target_of(path, own)) is not None}
        found[name] = dict.fromkeys(sorted(imports - {name}), False)
    return found


def file_of(target: tuple[str, ...], files: Mapping[str, Path], aliases: Mapping[str, str]) -> str:
    """The file that has the last name of a path from the root: a module's own, or that of the module around it."""
    if target and target[0] not in files and target[0] in aliases:
        target = (*aliases[target[0]].split("::"), *target[1:])
    modules = ("::".join(target[:length]) for length in range(len(target), 0, -1))
    return next((module for module in modules if module in files), "lib")


def spelled_out(tree: str) -> Iterator[str]:
    """The paths of a `use`: `a::{b, c::d}` is `a::b` and `a::c::d`."""
    head, brace, rest = tree.partition("{")
    if not brace:
        yield re.sub(r"\s+as\s+\w+$", "", tree.strip())
        return
    depth, item = 0, ""
    for character in rest[: rest.rindex("}")] + ",":
        depth += (character == "{") - (character == "}")
        if character == "," and depth == 0:
            if item.strip():
                yield from (head + path for path in spelled_out(item.strip()))
            item = ""
        else:
            item += character


def target_of(path: str, own: tuple[str, ...]) -> tuple[str, ...] | None:
    """The path from the root of the crate; `None` for paths of other crates."""
    first, *rest = path.replace(" ", "").split("::")
    if first == "crate":
        return tuple(rest)
    if first == "self":
        return (*own, *rest)
    if first != "super":
        return None
    place = own[:-1]
    while rest and rest[0] == "super":
        place, rest = place[:-1], rest[1:]
    return (*place, *rest)


def imports_of(house: str) -> Imports:
    read = python_imports if house.startswith("python") else rust_imports
    return read(ROOT / house)


def room_of(file: str) -> str:
    return re.split(r"\.|::", file)[0]


def circles(imports: Mapping[str, Mapping[str, bool]]) -> list[tuple[str, ...]]:
    """The files that reach themselves, each circle once, along what is not for types that may run up."""
    edges = {
        file: [other for other in others if (room_of(file), room_of(other)) not in TYPES_ONLY]
        for file, others in imports.items()
    }
    reached = {file: set(others) for file, others in edges.items()}
    changed = True
    while changed:
        changed = False
        for others in reached.values():
            more = set().union(*(reached.get(other, set()) for other in others)) - others
            others |= more
            changed |= bool(more)
    return sorted({tuple(sorted(o for o in reached[f] if f in reached.get(o, ()))) for f in edges if f in reached[f]})


@pytest.mark.parametrize("house", HOUSES)
def test_every_room_has_its_level(house: str) -> None:
    rooms = [room for row in HOUSES[house] for room in row]
    assert len(rooms) == len(set(rooms))
    assert {room_of(file) for file in imports_of(house)} | ({"_core"} & set(rooms)) == set(rooms)


@pytest.mark.parametrize("house", HOUSES)
def test_imports_run_down(house: str) -> None:
    level = {room: number for number, row in enumerate(HOUSES[house]) for room in row}
    wrong = [
        f"{file} imports {other}"
        for file, others in imports_of(house).items()
        for other, types_only in others.items()
        if room_of(file) != room_of(other)
        and level[room_of(other)] >= level[room_of(file)]
        and not (types_only and (room_of(file), room_of(other)) in TYPES_ONLY)
    ]
    assert not wrong


@pytest.mark.parametrize("house", HOUSES)
def test_no_files_import_each_other_in_a_circle(house: str) -> None:
    assert circles(imports_of(house)) == []


@pytest.mark.parametrize("house", HOUSES)
def test_the_page_shows_the_rooms(house: str) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page.partition(f"### `{house}/`\n")[2].partition("\n#")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert [tuple(re.findall(r"`(\w+)[`/.]", row)) for row in rows] == list(HOUSES[house])


class TestTheReaders:
    """What reads imports finds those that it should."""

    def test_python(self, tmp_path: Path) -> None:
        (tmp_path / "high").mkdir()
        (tmp_path / "high" / "__init__.py").write_text("from .file import f\nfrom .. import _core\n")
        (tmp_path / "high" / "file.py").write_text(
            "from typing import TYPE_CHECKING\nfrom ..low import g\nif TYPE_CHECKING:\n    from ..top import T\n"
            "def f():\n    import shardwise.low.part\n    from shardwise.top import x\n"
        )
        (tmp_path / "low.py").write_text("import numpy\nif TYPE_CHECKING:\n    from .high.file import f\n")
        (tmp_path / "top.py").write_text("from . import low\n")
        assert python_imports(tmp_path) == {
            "high": {"high.file": False, "_core": False},
            "high.file": {"low": False, "top": False},
            "low": {"high.file": True},
            "top": {"low": False},
        }

    def test_rust(self, tmp_path: Path) -> None:
        (tmp_path / "room").mkdir()
        (tmp_path / "lib.rs").write_text("pub mod room;\npub mod low;\npub use room::part;\n")
        (tmp_path / "room" / "mod.rs").write_text("mod part;\nuse crate::{low::{A, B as C}, room::part::D};\n")
        (tmp_path / "room" / "part.rs").write_text(
            "use std::sync::Arc;\n// use crate::low;\nuse super::E;\n#[cfg(test)]\nmod tests { use crate::low; }\n"
        )
        (tmp_path / "low.rs").write_text("fn f() { crate::part::g(super::room::h()) }\n")
        assert rust_imports(tmp_path) == {
            "lib": {},
            "room": {"low": False, "room::part": False},
            "room::part": {"room": False},
            "low": {"room::part": False, "room": False},
        }
        assert circles(rust_imports(tmp_path)) == [("low", "room", "room::part")]
