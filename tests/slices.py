"""Slow tests in slices: those marked `slow` come last, in an order that a seed gives, until their time is used up.

So the suite stays as fast as its quick tests, however many slow ones there are. What there was no time for is skipped
and says so; another seed begins with others, and `pytest -m slow` runs them all.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator

import pytest


class Slices:
    """Puts the slow tests at the end, and skips them once they have taken `seconds` together."""

    def __init__(self, seconds: float, seed: int) -> None:
        self.seconds, self.seed = seconds, seed
        self._used = 0.0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        slow = [item for item in items if item.get_closest_marker("slow")]
        chosen = set(slow)
        items[:] = [item for item in items if item not in chosen]
        random.Random(self.seed).shuffle(slow)
        items += slow

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


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes seconds; `--slow-seconds` says how long all of them may take")
    config.pluginmanager.register(Slices(config.getoption("--slow-seconds"), config.getoption("--slow-seed")))
