"""Changes tried where all is imported and the tests are collected already: changed functions get their new code."""

from __future__ import annotations

import ast
import gc
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from types import CodeType, FunctionType

import pytest

__all__ = ["Run", "Swapping", "put_in_place"]

#: Runs the tests of these names up to the first that fails, and says whether all pass.
Run = Callable[[list[str]], bool]


class Swapping:
    """A plugin that runs no test: it hands what runs some of them to a function, which forks processes for it."""

    def __init__(self, use: Callable[[Run], None]) -> None:
        self.use = use
        self.failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}

        def run(names: list[str]) -> bool:
            self.failed = False
            chosen = [items[name] for name in names]
            for item, following in zip_longest(chosen, chosen[1:]):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if self.failed:
                    return False
            return True

        self.use(run)
        return True


def put_in_place(file: Path, tree: ast.Module) -> bool:
    """Give the functions of a module that has been imported the code of a tree that has the same functions.

    `False` if that cannot be done: of functions that are not there, or that would have other variables around them.
    """
    new = _by_place(compile(ast.fix_missing_locations(tree), str(file), "exec", dont_inherit=True))
    gc.unfreeze()  # What was there before the first test is frozen, and would not be among the objects.
    objects = gc.get_objects()
    gc.freeze()
    swapped = False
    for function in objects:
        if type(function) is not FunctionType or function.__code__.co_filename != str(file):
            continue
        found = new[_place(function.__code__)]
        if len(found) != 1 or found[0].co_freevars != function.__code__.co_freevars:
            return False
        function.__code__ = found[0]
        swapped = True
    return swapped


def _place(code: CodeType) -> tuple[str, int]:
    return code.co_name, code.co_firstlineno


def _by_place(module: CodeType) -> dict[tuple[str, int], list[CodeType]]:
    places = defaultdict(list)
    for code in _within(module):
        places[_place(code)].append(code)
    return places


def _within(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _within(constant)
