"""The slices of slow tests: last, in the order of a seed, and no longer than they may."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.oracle.worker import ROOT

SUITE = """
import time
import pytest

@pytest.mark.slow
@pytest.mark.parametrize("i", range(6))
def test_slow(i):
    time.sleep({seconds})

def test_quick():
    pass

@pytest.mark.heavy
def test_heavy():
    pass

@pytest.mark.parametrize("i", range(9))
def test_cases(i):
    pass
"""


def outcomes(folder: Path, *arguments: str, seconds: float = 0) -> list[tuple[str, str]]:
    (folder / "test_it.py").write_text(SUITE.format(seconds=seconds))
    command = [sys.executable, "-m", "pytest", "-v", "-p", "tests.slices", "-c", "/dev/null", "--rootdir", str(folder)]
    # Neither options nor plugins of the run that this is part of.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "FORCE_", "PY_"))
    }
    text = subprocess.run(
        [*command, "-p", "no:cacheprovider", *arguments, str(folder)],
        cwd=ROOT,
        env={**environment, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    ).stdout
    return re.findall(r"::test_(\S+) (PASSED|SKIPPED)", text)


@pytest.mark.heavy
def test_slow_tests_come_last_in_the_order_of_the_seed(tmp_path: Path) -> None:
    first, again, other = (outcomes(tmp_path, "--slow-seed", seed) for seed in ("1", "1", "2"))
    assert first == again
    assert first != other
    assert sorted(first) == sorted(other)
    assert first[0] == other[0] == ("quick", "PASSED")
    assert {outcome for _, outcome in first} == {"PASSED"}


@pytest.mark.heavy
def test_they_stop_when_their_time_is_used_up(tmp_path: Path) -> None:
    """Each takes 0.2 seconds at least, so that at most two begin within 0.3."""
    found = outcomes(tmp_path, "--slow-seconds", "0.3", seconds=0.2)
    passed = [outcome for name, outcome in found if name.startswith("slow")].count("PASSED")
    assert 1 <= passed <= 2
    assert len(found) == 17
    assert found[0] == ("quick", "PASSED")


@pytest.mark.heavy
def test_none_is_run_without_time(tmp_path: Path) -> None:
    found = outcomes(tmp_path, "--slow-seconds", "0")
    assert [outcome for _, outcome in found] == [*["PASSED"] * 11, *["SKIPPED"] * 6]


@pytest.mark.heavy
def test_a_thin_run_has_a_few_cases_of_each_test_and_no_heavy_one(tmp_path: Path) -> None:
    runs = [outcomes(tmp_path, "--cases", "3", "--slow-seed", seed) for seed in ("1", "1", "2")]
    names = [[name.partition("[")[0] for name, _ in found] for found in runs]
    assert names == [["quick", *["cases"] * 3, *["slow"] * 3]] * 3
    assert runs[0] == runs[1] != runs[2]
