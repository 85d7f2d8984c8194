"""Slow tests in slices: those marked `slow` come last, in an order that a seed gives, until their time is used up.

So the suite stays as fast as its quick tests, however many slow ones there are. What there was no time for is skipped
and says so; another seed begins with others, and `pytest -m slow` runs them all.

In a thin run of all tests each has a few of its cases, as property tests have a few of their examples, and those marked
`heavy` have none.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator

import pytest


class Slices:
    """Puts the slow tests at the end, and skips them once they have taken `seconds` together.

    With `cases`, leaves the heavy ones out, and all but so many cases of each other one.
    """

    def __init__(self, seconds: float, seed: int, cases: int | None) -> None:
        self.seconds, self.seed, self.cases = seconds, seed, cases
        self._used = 0.0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self.cases is not None:
            kept = self._thin(items)
            config.hook.pytest_deselected(items=[item for item in items if item not in kept])
            items[:] = [item for item in items if item in kept]
        slow = [item for item in items if item.get_closest_marker("slow")]
        chosen = set(slow)
        items[:] = [item for item in items if item not in chosen]
        random.Random(self.seed).shuffle(slow)
        items += slow

    def _thin(self, items: list[pytest.Item]) -> set[pytest.Item]:
        by_test: dict[str, list[pytest.Item]] = {}
        for item in items:
            if not item.get_closest_marker("heavy"):
                by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
        draw = random.Random(self.seed)
        return {
            item for found in by_test.values() for item in draw.sample(found, min(len(found), self.cases or len(found)))
        }

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if item.get_closest_marker("slow") and self._used >= self.seconds:
            pytest.skip(f"slow tests have had their {self.seconds:g} seconds, in the order of seed {self.seed}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        start = time.monotonic()
        try:
            return (yield)
        finally:
            if item.get_closest_marker("slow"):
                self._used += time.monotonic() - start


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow-seconds", type=float, default=math.inf, help="how long slow tests may take (no limit)")
    parser.addoption("--slow-seed", type=int, default=0, help="the seed of the order of slow tests")
    parser.addoption(
        "--cases", type=int, help="of each test at most so many cases, drawn by that seed; of heavy ones none"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes seconds; `--slow-seconds` says how long all of them may take")
    config.addinivalue_line("markers", "heavy: takes a quarter of a second of processor time or more; not in thin runs")
    names = ("--slow-seconds", "--slow-seed", "--cases")
    config.pluginmanager.register(Slices(*map(config.getoption, names)))
