"""Settings of the property tests, and slices of the slow ones."""

from __future__ import annotations

import gc
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Deadlines measure the machine's load, not the code.
settings.register_profile("shardwise", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fast", settings.get_profile("shardwise"), max_examples=10)
settings.load_profile("shardwise")

pytest_plugins = ["tests.slices"]

# A shell that starts the tests in the background has them ignore Ctrl-C, and what they start inherits that: the tests
# that interrupt a call would wait for nothing.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Keep doctest from importing helpers, some of which are programs that need a framework."""
    helper = collection_path.suffix == ".py" and not collection_path.name.startswith("test_")
    return True if helper and collection_path.name not in ("conftest.py", "__init__.py") else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let tests of drawn cases warn: those that take long, and the comparisons with frameworks.

    Any other test fails when a warning comes that it does not expect.
    """
    drawn = {Path(__file__).parent / folder for folder in ("oracle", "interop", "prove", "fuzz")}
    for item in items:
        if item.get_closest_marker("heavy") or item.get_closest_marker("slow") or drawn.intersection(item.path.parents):
            item.add_marker(pytest.mark.filterwarnings("ignore::shardwise.ShardwiseWarning"))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Keep the collector from the modules and the thousands of tests, which all stay until the end.

    It would go through all of them again and again, in a tenth of the time that the tests take.
    """
    gc.collect()
    gc.freeze()
