"""Functions that are imported already take the code of a changed tree, if it is the same functions'."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

from .changes import changes_of
from .swapped import put_in_place

SOURCE = """
from functools import lru_cache

def outer(limit):
    def inner(value):
        return value < limit
    return inner

@lru_cache
def twice(value):
    return 2 * value

class Holder:
    @property
    def size(self):
        return 3
"""


def imported(file: Path, source: str) -> ModuleType:
    file.write_text(source, "utf-8")
    spec = importlib.util.spec_from_file_location("changed", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_functions_methods_and_closures_are_swapped(tmp_path: Path) -> None:
    file = tmp_path / "changed.py"
    module = imported(file, SOURCE)
    inner, holder = module.outer(3), module.Holder()
    assert (inner(3), module.twice(4), holder.size) == (False, 8, 3)
    tree = ast.parse(SOURCE)
    for change in changes_of(tree):
        if change.text in ("value < limit  ->  value <= limit", "2 * value  ->  2 // value", "3  ->  4"):
            change.make()
    assert put_in_place(file, tree)
    # What was remembered before is still.
    assert (inner(3), module.outer(3)(3), module.twice(4), module.twice(1), holder.size) == (True, True, 8, 2, 4)


def test_what_cannot_be_told_apart_or_has_other_surroundings_is_not(tmp_path: Path) -> None:
    file = tmp_path / "alike.py"
    source = "two = (lambda: 1, lambda: 2)\ndef one():\n    return 3\n"
    module = imported(file, source)
    assert not put_in_place(file, ast.parse(source))
    assert (module.two[0](), module.one()) == (1, 3)
    file = tmp_path / "around.py"
    module = imported(file, SOURCE)
    inner = module.outer(3)
    assert not put_in_place(file, ast.parse(SOURCE.replace("value < limit", "value < 3")))
    assert inner(2)
    assert not put_in_place(tmp_path / "never_imported.py", ast.parse(SOURCE))
