"""Imports run one way: from the rooms of the package and of the Rust crates to those below them, and in no circle.

`CONTRIBUTING.md` shows the same rooms, from the ground up.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

#: What each house is built of: rooms from the ground up, those of one row side by side. A room is a file or a folder,
#: and imports from the rows below its own and from itself only. A new room has its row here and on the page.
HOUSES: dict[str, tuple[tuple[str, ...], ...]] = {
    "python/shardwise": (
        ("_fork", "_threads"),
        ("errors", "_core", "_drawn", "_garbage", "_lazy", "_text", "_types"),
        ("_arguments", "_dtypes", "_expressions", "_frozen", "_json", "_strided", "piece", "pieces"),
        ("_atomic", "_boxes", "_gaps", "_tree", "packed", "sub_axis"),
        ("mesh_views",),
        ("mesh", "tiling"),
        ("partition",),
        ("layout",),
        ("shared_tiling",),
        ("placing", "show"),
        ("rules",),
        ("quantized",),
        ("conversion",),
        ("computation", "reshard", "state"),
        ("array", "deploy", "propagate"),
        ("model", "store"),
        ("execute", "fit"),
        ("dtensor",),
        ("interop",),
        ("cli",),
        ("__init__", "__main__"),
    ),
    "python/shardwise/store": (
        ("data",),
        ("tensors",),
        ("formats",),
        ("rewritten",),
        ("compare", "learn", "write"),
        ("__init__",),
    ),
    "python/shardwise/store/write": (
        ("__init__", "forms"),
        ("places",),
        ("plan",),
        ("run",),
        ("request",),
    ),
    "rust/core": (
        ("short", "shown"),
        ("error",),
        ("assignment", "index", "parallel", "room"),
        ("mesh", "region", "uneven"),
        ("factor", "sections", "sub_axis"),
        ("computation", "layout"),
        ("shards",),
        ("partition",),
        ("locate", "runs"),
        ("packed",),
        ("tiling",),
        ("plan",),
        ("collective", "copy"),
        ("propagate",),
        ("dtensor", "pickle", "rules"),
        ("dcp",),
        ("lib",),
    ),
    "rust/io/src": (
        ("crc32c", "digest", "error", "faults", "strided"),
        ("file", "piece"),
        ("check", "commit", "pair", "slot"),
        ("blocks", "job"),
        ("maps", "table", "tiles"),
        ("unit",),
        ("run",),
        ("lib",),
    ),
    "rust/python/src": (
        ("errors", "memory"),
        ("arrays", "convert"),
        ("views",),
        ("assignment", "checksum", "dtensor", "factor", "held", "io", "mesh", "pickle", "rules"),
        ("files", "layout", "propagate"),
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


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def dotted(node: ast.AST) -> str:
    """The names of an expression such as `a.b.c`; an empty text for any other."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join((node.id, *reversed(parts))) if isinstance(node, ast.Name) else ""


def python_imports(house: Path) -> Imports:
    files = python_files(house)
    known = files.keys() | {"_core"}
    found: Imports = {}
    for name, path in files.items():
        folder = path.relative_to(house).parent.parts
        imports: dict[str, bool] = {}
        for module, types_only in imported(tree_of(path), folder):
            # `from ..mesh import DeviceMesh` is of a module, `from .. import _core` is of the name behind it.
            target = next((each for each in (module, module.rpartition(".")[0]) if each in known), "__init__")
            imports[target] = imports.get(target, True) and types_only
        imports.pop(name, None)
        found[name] = imports
    return found


IMPORTERS = ("import_module", "importlib.import_module", "__import__")


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
        elif isinstance(child, ast.Call) and dotted(child.func) in IMPORTERS:
            # A name that is made at run time is not read: that is for what is found by its name, as a format is.
            name = child.args[0] if child.args else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                dots = len(name.value) - len(name.value.lstrip("."))
                base = folder[: len(folder) - dots + 1] if dots else ()
                if dots or name.value.split(".")[0] == "shardwise":
                    yield ".".join((*base, name.value[dots:].removeprefix("shardwise").lstrip("."))), types_only
        elif isinstance(child, ast.If) and dotted(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from imported(ast.Module(child.body, []), folder, types_only=True)
            yield from imported(ast.Module(child.orelse, []), folder, types_only)
        else:
            yield from imported(child, folder, types_only)


COMMENT = re.compile(r"//[^\n]*")
USE = re.compile(r"\b(pub(?:\([^)]*\))? )?use\s+([^;]+);")
#: What is compiled for tests only, as rustfmt writes it: to the end of the item, which is as far in as its start.
TESTS_ONLY = re.compile(
    r"^( *)#\[cfg\(test\)\]\n(?:\1#\[.*\n)*(?:\1\S.*;\n|(?:\1\S.*\n)(?:(?!\1\}).*\n)*\1\}.*\n)", re.MULTILINE
)
PATH = re.compile(r"(?<![\w:])([a-z_]\w*(?:::\w+)+)")

#: A path from the root of a crate.
Place = tuple[str, ...]


@dataclass
class RustFile:
    """What a file says of the rest of its crate."""

    #: What it uses.
    used: set[Place] = field(default_factory=set)
    #: The names that it has of others, and whose they are.
    names: dict[str, Place] = field(default_factory=dict)


def rust_imports(house: Path) -> Imports:
    """The files of a crate without their tests, in files of that name and in items that are compiled for them only.

    A file imports what it uses: by a path from the root, from the module around it, or from one within it. A name that
    it only gives on (`pub use`) belongs to where it is written, and so does one that is used by way of such a file.
    """
    paths = {}
    for path in house.rglob("*.rs"):
        parts = path.relative_to(house).with_suffix("").parts
        if "tests" not in parts:
            paths[() if parts == ("lib",) else parts[:-1] if parts[-1] == "mod" else parts] = path
    files = {own: read_rust(path, own, paths) for own, path in paths.items()}
    found: Imports = {}
    for own, file in files.items():
        owners = {owner_of(place, files) for place in file.used} - {own}
        found["::".join(own) or "lib"] = dict.fromkeys(sorted("::".join(owner) or "lib" for owner in owners), False)
    return found


def read_rust(path: Path, own: Place, files: Collection[Place]) -> RustFile:
    code = TESTS_ONLY.sub("", COMMENT.sub("", path.read_text(encoding="utf-8")))
    assert "cfg(test)" not in code, path
    file, body = RustFile(), USE.sub("", code)
    for public, tree in USE.findall(code):
        for spelled in spelled_out(tree):
            name, renamed = re.fullmatch(r"(.*?)(?:\s+as\s+(\w+))?", spelled, re.DOTALL).groups()  # type: ignore[union-attr]
            if (place := place_of(name, own, files)) is not None:
                called = renamed or place[-1]
                file.names[called] = place
                # What it defines as well, for other platforms, it does not need from elsewhere.
                own_too = re.search(rf"\b(?:enum|fn|struct|trait|type)\s+{called}\b", body)
                if not public or (re.search(rf"\b{called}\b", body) and not own_too):
                    file.used.add(place)
    file.used |= {place for name in PATH.findall(body) if (place := place_of(name, own, files)) is not None}
    return file


def place_of(name: str, own: Place, files: Collection[Place]) -> Place | None:
    """The place that a path means in the file `own`; `None` for those of other crates, and of a file's own types."""
    first, *rest = name.replace(" ", "").split("::")
    if first == "crate":
        return tuple(rest)
    if first == "self":
        return (*own, *rest)
    if first == "super":
        place = own[:-1]
        while rest and rest[0] == "super":
            place, rest = place[:-1], rest[1:]
        return (*place, *rest)
    return (*own, first, *rest) if (*own, first) in files else None


def owner_of(place: Place, files: Mapping[Place, RustFile]) -> Place:
    """The file that has the last name of a path: behind all names that others give on."""
    for _ in range(9):
        length = next(length for length in range(len(place), -1, -1) if place[:length] in files)
        owner, rest = place[:length], place[length:]
        if not rest or rest[0] not in files[owner].names:
            return owner
        place = (*files[owner].names[rest[0]], *rest[1:])
    raise AssertionError(f"{place} is given on in a circle")


def spelled_out(tree: str) -> Iterator[str]:
    """The paths of a `use`: `a::{b, c::d as e}` is `a::b` and `a::c::d as e`."""
    head, brace, rest = tree.partition("{")
    if not brace:
        yield tree.strip()
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


@functools.cache
def imports_of(house: str) -> Imports:
    if not house.startswith("python"):
        return rust_imports(ROOT / house)
    package, *folders = house.removeprefix("python/").split("/")
    imports = python_imports(ROOT / "python" / package)
    return within(imports, ".".join(folders)) if folders else imports


def within(imports: Imports, folder: str) -> Imports:
    """The imports of each other of a folder's files, by their names within it."""
    own = {file: file.removeprefix(folder).lstrip(".") or "__init__"
           for file in imports if f"{file}.".startswith(f"{folder}.")}  # fmt: skip
    return {name: {own[other]: types for other, types in imports[file].items() if other in own}
            for file, name in own.items()}  # fmt: skip


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


def test_the_page_names_what_is_to_be_changed_for_a_format_or_a_place() -> None:
    """Each file that it names is there, and has what stands beside it."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page.partition("## To add a format or a place\n")[2].partition("\n#")[0]
    rows = [line.split("|")[2:4] for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 9
    for files, what in rows:
        paths = [each for each in re.findall(r"`([^`]+)`", files) if each.endswith(".py")]
        paths += [each for each in re.findall(r"`([^`]+)`", what) if each.endswith(".py")]
        found = [path if path.startswith(("tests/", "python/")) else f"python/shardwise/store/{path}" for path in paths]
        text = "".join((ROOT / path).read_text(encoding="utf-8") for path in found)
        names = [each for each in re.findall(r"`([^`]+)`", what) if not each.endswith(".py")]
        assert [name for name in names if re.search(rf"(?<!\w){name}(?!\w)", text) is None] == [], files


def cited_rules(text: str) -> set[str]:
    """The rules that a source cites in brackets: `2.12`, and `2.12 c` for a part of one."""
    cited = re.findall(r"\(rules? ([^)]*)\)|\((2\.\d+ [a-i])\)", text)
    return {rule for either in cited for rule in re.findall(r"\b2\.\d+(?: [a-i]\b)?", "".join(either))}


def test_rules_that_are_cited_can_be_read() -> None:
    """Each number is a heading of the page of semantics, and each letter a part that CONTRIBUTING.md has."""
    headings = re.findall(r"^## (2\.\d+) ", (ROOT / "docs/semantics.md").read_text(encoding="utf-8"), re.MULTILINE)
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("### Rule 2.12, by its parts\n")[2]
    parts = re.findall(r"^- \*\*([a-z])\. ", section.partition("\n#")[0], re.MULTILINE)
    written = {*headings, *(f"2.12 {part}" for part in parts)}
    files = [
        path
        for room in ("python", "rust", "tests")
        for path in (ROOT / room).rglob("*")
        if path.suffix in (".py", ".rs")
    ]
    cited = {path: cited_rules(path.read_text(encoding="utf-8")) for path in files if path.name != "test_rooms.py"}
    assert {"2.12 i", "2.6"} <= set().union(*cited.values())
    assert {path: rules - written for path, rules in cited.items() if rules - written} == {}
    assert cited_rules("(rules 2.6 and 2.11), (rule 2.12 c), (2.12 i), version 2.13 (2.0)") == {
        "2.6",
        "2.11",
        "2.12 c",
        "2.12 i",
    }


class TestTheReaders:
    """What reads imports finds those that it should."""

    def test_python(self, tmp_path: Path) -> None:
        (tmp_path / "high").mkdir()
        (tmp_path / "high" / "__init__.py").write_text("from .file import f\nfrom .. import _core\n")
        (tmp_path / "high" / "file.py").write_text(
            "from typing import TYPE_CHECKING\nfrom ..low import g\nif TYPE_CHECKING:\n    from ..top import T\n"
            "def f():\n    import shardwise.low.part\n    from shardwise.top import x\n"
        )
        (tmp_path / "high" / "named.py").write_text(
            "if typing.TYPE_CHECKING:\n    from ..top import T\nelse:\n    from ..low import g\n"
            "x = importlib.import_module('.file', __package__), __import__('shardwise.high'), import_module(f'.{y}')\n"
        )
        (tmp_path / "low.py").write_text("import numpy\nif TYPE_CHECKING:\n    from .high.file import f\n")
        (tmp_path / "top.py").write_text("from . import low\n")
        assert python_imports(tmp_path) == {
            "high": {"high.file": False, "_core": False},
            "high.file": {"low": False, "top": False},
            "high.named": {"top": True, "low": False, "high.file": False, "high": False},
            "low": {"high.file": True},
            "top": {"low": False},
        }

    def test_rust(self, tmp_path: Path) -> None:
        (tmp_path / "room").mkdir()
        files = {
            "lib": "pub mod room;\npub mod low;\npub use room::part;\n",
            "room/mod": "mod given;\nuse crate::{low::{A, B as C}, room::part::D};\npub use given::{G, H};\n",
            "room/part": (
                "#[cfg(test)]\nmod tests;\n"
                "use std::sync::Arc;\n// use crate::low;\nuse super::E;\n"
                "impl A {\n    #[cfg(test)]\n    #[inline]\n    fn f(\n        x: i64,\n    ) {\n"
                "        crate::low::g();\n    }\n\n    fn h() {\n        crate::top::g();\n    }\n}\n"
                "#[cfg(test)]\nmod more {\n    use crate::low;\n}\n"
            ),
            # What it takes by way of the module around it is another file's, which that gives on.
            "room/given": "use super::{C, part};\n",
            "top": "mod inner;\npub use inner::I;\nfn f() { crate::room::G::new(I, inner::x()) }\n",
            "top/inner": "",
            "side": "#[cfg(unix)]\npub use low::J;\n#[cfg(not(unix))]\npub struct J;\nimpl J {}\nconst K: i64 = 0;\n",
            "side/low": "use super::K;\n",
            "low": "fn f() { crate::part::g(super::room::h()) }\n",
        }
        (tmp_path / "top").mkdir()
        (tmp_path / "side").mkdir()
        for name, text in files.items():
            (tmp_path / f"{name}.rs").write_text(text)
        assert rust_imports(tmp_path) == {
            "lib": {},
            "room": {"low": False, "room::part": False},
            "room::part": {"room": False, "top": False},
            "room::given": {"low": False, "room::part": False},
            "top": {"room::given": False, "top::inner": False},
            "top::inner": {},
            "side": {},
            "side::low": {"side": False},
            "low": {"room::part": False, "room": False},
        }
        assert circles(rust_imports(tmp_path)) == [
            ("low", "room", "room::given", "room::part", "top"),
        ]


#: Words that refer to a thing before it is named: no docstring begins with one, and no comment of an attribute.
RELATIONS = (
    "What", "Where", "How", "Who", "Whether", "Which", "Why", "Of", "That", "Those", "These", "This", "It", "Its",
    "They", "Their", "Nothing", "Both", "None", "Into", "Up", "Below",
)  # fmt: skip
_BACKWARDS = re.compile(rf"\W*(?:{'|'.join(RELATIONS)})\b")


def said_backwards(text: str, tree: ast.Module) -> Iterator[str]:
    """Yield the first lines of docstrings, and of comments with `#:`, that begin with one of `RELATIONS`."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node) or ""
            if _BACKWARDS.match(docstring):
                yield f"{node.body[0].lineno}: {docstring.splitlines()[0]}"
    before = ""
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if line.startswith("#: ") and not before.startswith("#:") and _BACKWARDS.match(line[3:]):
            yield f"{number}: {line}"
        before = line


def test_docstrings_begin_with_the_thing() -> None:
    """A docstring names its thing first, "Return the …", "A …", and then says how it relates to others."""
    package = ROOT / "python/shardwise"
    found = [
        f"{path.relative_to(package).as_posix()}, {line}"
        for path in sorted(package.rglob("*.py"))
        for line in said_backwards(path.read_text(encoding="utf-8"), tree_of(path))
    ]
    assert not found, "\n".join(found)
    nested = 'class A:\n    def f(self):\n        """What it is."""'
    for text in ('"""`None`: all."""', nested, "#: How often.\nN = 1"):
        assert len([*said_backwards(text, ast.parse(text))]) == 1, text
    for text in ('"""Return what is there."""', "#: The length.\n#: None is all.\nN = 1"):
        assert not [*said_backwards(text, ast.parse(text))], text


#: A line of a docstring that explains an argument or an attribute by its own name.
_BY_ITS_NAME = re.compile(r"^ +(\w+): (?:the|its|an?) \1\.$", re.MULTILINE | re.IGNORECASE)


def test_arguments_are_not_explained_by_their_own_names() -> None:
    """Such a line is left out, or says what a reader cannot guess."""
    package = ROOT / "python/shardwise"
    found = {
        path.relative_to(package).as_posix(): [match[0].strip() for match in _BY_ITS_NAME.finditer(text)]
        for path in sorted(package.rglob("*.py"))
        if _BY_ITS_NAME.search(text := path.read_text(encoding="utf-8"))
    }
    assert found == {}
    assert _BY_ITS_NAME.findall("    plan: The plan.\n    mesh: the mesh of all devices.\n    name: its name.\n") == [
        "plan",
        "name",
    ]


def wrong_verbs(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings that say Yield of a function that is no generator, or Return of one, or where nothing is."""
    for node in ast.walk(tree):
        docstring = ast.get_docstring(node) or "" if isinstance(node, ast.FunctionDef) else ""
        if not isinstance(node, ast.FunctionDef) or not docstring.startswith(("Return ", "Yield ")):
            continue
        returns = "" if node.returns is None else ast.unparse(node.returns)
        nested = [each for each in ast.walk(node) if isinstance(each, ast.FunctionDef) and each is not node]
        inner = {id(one) for each in nested for one in ast.walk(each)}
        yields = any(isinstance(each, ast.Yield | ast.YieldFrom) and id(each) not in inner for each in ast.walk(node))
        is_context = any("contextmanager" in ast.unparse(each) for each in node.decorator_list)
        if docstring.startswith("Yield "):
            wrong = not yields and not any(kind in returns for kind in ("Iterator", "Iterable", "Generator", "Headers"))
        else:
            wrong = (yields and not is_context) or (returns == "None" and "`None`" not in docstring.splitlines()[0])
        if wrong:
            yield f"{node.lineno}: {node.name}: {docstring.splitlines()[0]}"


def test_docstrings_say_what_functions_do() -> None:
    """A docstring says Yield of generators and iterators, and Return of functions that return a value."""
    package = ROOT / "python/shardwise"
    found = [
        f"{path.relative_to(package).as_posix()}, {line}"
        for path in sorted(package.rglob("*.py"))
        for line in wrong_verbs(tree_of(path))
    ]
    assert not found, "\n".join(found)
    for text, count in (
        ('def f() -> list[int]:\n    """Yield them."""', 1),
        ('def f() -> Iterator[int]:\n    """Return them."""\n    yield 1', 1),
        ('def f() -> None:\n    """Return them."""', 1),
        ('def f() -> None:\n    """Return `None`: it has none."""', 0),
        ('def f() -> Iterator[int]:\n    """Yield them."""\n    return iter([1])', 0),
    ):
        assert len([*wrong_verbs(ast.parse(text))]) == count, text


def said_backwards_in_rust(text: str) -> Iterator[str]:
    """Yield the first lines of comments of Rust's items and modules that begin with one of `RELATIONS`."""
    before = ""
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        is_first = not before.startswith(("///", "//!"))
        if is_first and line.startswith(("/// ", "//! ")) and _BACKWARDS.match(line[4:]):
            yield f"{number}: {line}"
        before = line


def test_comments_of_rust_begin_with_the_thing() -> None:
    """As docstrings do; those of `rust/core/copy`, which is finished, stay as they are."""
    house = ROOT / "rust"
    found = [
        f"{path.relative_to(house).as_posix()}, {line}"
        for path in sorted(house.rglob("*.rs"))
        if "core/copy" not in path.as_posix() and "tests" not in path.relative_to(house).as_posix()
        for line in said_backwards_in_rust(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)
    for text in ("/// What it is.\nfn f() {}", "//! How a dim is cut.", "    /// Whether it is there."):
        assert len([*said_backwards_in_rust(text)]) == 1, text
    for text in ("/// The name.\n/// None is all.", "//! A dim.", "// What is not documentation."):
        assert not [*said_backwards_in_rust(text)], text


def answering(docstring: str) -> set[str]:
    """The modules that the table at the top of a package names."""
    rows = [line.split("|")[1] for line in docstring.splitlines() if line.startswith("| `")]
    return set(re.findall(r"`(?:shardwise\.\w+\.)?(\w+)/?`", " ".join(rows)))


def test_each_package_begins_with_a_table_of_its_modules() -> None:
    """A new module has its row in the docstring of its package: its name, and the question that it answers."""
    house = ROOT / "python/shardwise"
    wrong = {}
    for path in house.rglob("__init__.py"):
        inside = {each.stem for each in path.parent.glob("*.py")} | {
            each.parent.name for each in path.parent.glob("*/__init__.py")
        }
        named = answering(ast.get_docstring(tree_of(path)) or "")
        public = {name for name in inside if not name.startswith("_")}
        if path.parent != house and (public - named or named - inside):
            wrong[path.relative_to(ROOT).as_posix()] = sorted(public - named), sorted(named - inside)
    assert wrong == {}


def names_of_meanings(package: Path) -> dict[str, list[str]]:
    """The names that more than one module defines at its top, with these modules.

    Counted are classes, aliases of types and functions; of classes and aliases a first underscore does not count, and
    functions with one are left out, as nobody else calls them.
    """
    found: dict[str, set[str]] = {}
    for path in package.rglob("*.py"):
        for node in tree_of(path).body:
            name = ""
            if isinstance(node, ast.ClassDef):
                name = node.name.lstrip("_")
            elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                name = node.name
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                called = target.id.lstrip("_") if isinstance(target, ast.Name) else ""
                name = called if called[:1].isupper() and not called.isupper() else ""
            if name:
                found.setdefault(name, set()).add(path.relative_to(package).as_posix())
    return {name: sorted(modules) for name, modules in found.items() if len(modules) > 1}


def test_a_name_has_one_meaning() -> None:
    """A class, an alias of a type or a function has a name of its own, but for those that the page lists."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page.partition("### Names that several modules define\n")[2].partition("\n#")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    listed = {name: what for names, what in rows for name in re.findall(r"`(\w+)`", names)}
    found = names_of_meanings(ROOT / "python/shardwise")
    new = {name: modules for name, modules in found.items() if name not in listed}
    assert new == {}, "choose another name, or say in CONTRIBUTING.md why it is the same thing"
    assert found.keys() == listed.keys()
    assert sum("two meanings" in what for what in listed.values()) <= 8


def test_names_with_several_meanings_are_found(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("class _A: ...\nBox = tuple[int]\nC = 1\ndef f(): ...\ndef _g(): ...\nE_F = 1\n")
    (tmp_path / "two.py").write_text("class A: ...\n_Box: object = int\ndef f(): ...\ndef _g(): ...\nE_F = 1\n")
    assert names_of_meanings(tmp_path) == {name: ["one.py", "two.py"] for name in ("A", "Box", "f")}


def test_the_package_imports_itself_relatively() -> None:
    """As a caller may rename or vendor it; `__main__` alone may be run as a file."""
    for path in (ROOT / "python" / "shardwise").rglob("*.py"):
        tree = tree_of(path)
        found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
        names = [node.module or "" for node in found]
        assert path.name == "__main__.py" or not [name for name in names if name.split(".")[0] == "shardwise"], path


def test_nothing_is_imported_or_locked_that_a_child_would_wait_for() -> None:
    """But for what imports frameworks, and the command, which has no threads when it imports."""
    found = []
    package = ROOT / "python" / "shardwise"
    for path in package.rglob("*.py"):
        where = path.relative_to(package)
        text = path.read_text(encoding="utf-8")
        if path.name == "_fork.py" or not re.search(
            r"^\s+(import|from) |import_module|Lock\(|cached_property", text, re.M
        ):
            continue
        tree = tree_of(path)
        guarded = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.With) and dotted(node.items[0].context_expr) == "importing"
            for inner in ast.walk(node)
        }
        for function in (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.Lambda))):
            for node in ast.walk(function):
                is_call = (
                    isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "import_module"
                )
                is_import = is_call or isinstance(node, (ast.Import, ast.ImportFrom))
                if is_import and id(node) not in guarded and where.parts[0] not in ("cli", "execute", "interop"):
                    found.append(f"{where}, {function.lineno}: {ast.unparse(node)} is not under `with importing`")
        for node in ast.walk(tree):
            named = node.func if isinstance(node, ast.Call) else node
            is_lock = isinstance(named, ast.Attribute) and named.attr in ("Lock", "RLock", "cached_property")
            if is_lock and ast.unparse(node) in ("threading.Lock()", "threading.RLock()", "functools.cached_property"):
                found.append(f"{where}: {ast.unparse(node)}, not of _fork")
            if isinstance(node, ast.ImportFrom) and node.module == "functools":
                found += [f"{where}: functools.{name.name}" for name in node.names if name.name == "cached_property"]
    assert found == []


#: What tells one kind of path, file or source from another.
KINDS = {"Path", "PosixPath", "PurePath", "ObjectPath", "ObjectFile", "DataFile", "SourceFile", "SourceObject"}


def asks_for_kinds(tree: ast.AST) -> Iterator[str]:
    """The expressions that ask what kind of path something is, and the casts between kinds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
            if dotted(node.func).rpartition(".")[2] not in ("isinstance", "issubclass", "cast"):
                continue
            named = {ast.unparse(part).rpartition(".")[2].strip("'\"") for each in node.args for part in ast.walk(each)
                     if isinstance(part, (ast.Name, ast.Attribute, ast.Constant))}  # fmt: skip
            if named & KINDS:
                yield ast.unparse(node)
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(side, ast.Name) and side.id in KINDS for side in sides):
                yield ast.unparse(node)
        elif isinstance(node, ast.MatchClass) and ast.unparse(node.cls).rpartition(".")[2] in KINDS:
            yield ast.unparse(node)


def test_nobody_asks_what_kind_of_path_it_has() -> None:
    """But `location` and `places`: a format or a driver that did would change with each kind of place (rule 2.12 e)."""
    house = ROOT / "python/shardwise/store"
    found = {}
    for path in house.rglob("*.py"):
        where = path.relative_to(house).as_posix()
        asked = list(asks_for_kinds(tree_of(path)))
        if asked and where != "data/location.py" and not where.startswith("write/places/"):
            found[where] = asked
    assert found == {}


def test_the_store_asks_layouts_by_their_protocol() -> None:
    """Maps, deployments and mappings answer alike, as `placing.Placing`: no file of the store has to name a class."""
    imports = imports_of("python/shardwise")
    assert "rules.layout_map" in imports["deploy.read"]
    classes = {"rules.layout_map", "deploy.deployment"}
    assert [f"{file} imports {each}" for file in imports if room_of(file) == "store"
            for each in sorted(classes & imports[file].keys())] == []  # fmt: skip


#: Tests of the package as a whole, and folders of tests beside its rooms, of which CONTRIBUTING says what they are.
WHOLE = {"advice", "package", "rooms"}
BESIDE = {"benches", "docs", "fuzz", "laws", "mutants", "oracle", "process", "prove", "release", "rust", "slices"}


def test_tests_stand_in_the_rooms_of_what_they_test() -> None:
    """A file at the top is named for a module at the top, a folder for a folder of the package."""
    tests, package = ROOT / "tests", ROOT / "python/shardwise"
    wrong = []
    for path in tests.rglob("test_*.py"):
        folder = path.parent.relative_to(tests)
        if folder.parts:
            if folder.parts[0] not in BESIDE and not (package / folder / "__init__.py").exists():
                wrong.append(path.relative_to(tests).as_posix())
        else:
            name = path.stem.removeprefix("test_")
            if name not in WHOLE and not any((package / f"{each}.py").exists() for each in (name, f"_{name}")):
                wrong.append(path.name)
    assert wrong == []


def patched(tree: ast.AST) -> Iterator[str]:
    """The names that a test replaces with `setattr`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
            yield ".".join(ast.unparse(each).strip("'\"") for each in node.args[: len(node.args) - 1])


def is_ours_alone(name: str) -> bool:
    """Whether a dotted name has a part that begins with one underscore, or ends in a constant."""
    parts = name.split(".")
    has_private = any(part.startswith("_") and not part.startswith("__") for part in parts)
    # A setting of the S3 server under test is none of ours.
    return parts[0] != "moto" and ((has_private and parts[0] != "_core") or parts[-1].isupper())


def test_no_test_replaces_what_is_private() -> None:
    """What a test must shrink, or see, is an argument; the compiled module stands for the operating system."""
    found = []
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        names = patched(ast.parse(text)) if ".setattr(" in text else ()
        found += [f"{path.relative_to(ROOT)}: {name}" for name in names if is_ours_alone(name)]
    assert found == []


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        ("monkeypatch.setattr(files, '_MOST_OPEN', 8)", True),
        ("patch.setattr(assembled, 'MOST_RUNS', 0)", True),
        ("monkeypatch.setattr('shardwise.store.formats.known.FORMS', [])", True),
        ("monkeypatch.setattr(_Descriptor, '__init__', f)", True),
        ("monkeypatch.setattr(_core, 'parse_device', f)", False),
        ("monkeypatch.setattr(ObjectPath, 'read_into', f)", False),
        ("monkeypatch.setattr(os, 'fsync', f)", False),
    ],
)
def test_patches_are_found(text: str, is_refused: bool) -> None:
    (name,) = patched(ast.parse(text))
    assert is_ours_alone(name) == is_refused


def test_the_questions_are_found() -> None:
    text = "isinstance(x, (str, Path)), cast('ObjectPath', x), type(x) is ObjectPath, isinstance(x, str), Path(x) == y"
    assert len(list(asks_for_kinds(ast.parse(text)))) == 3
