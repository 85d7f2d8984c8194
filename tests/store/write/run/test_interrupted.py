"""Runs that are interrupted, or whose workers hang: what is left, what is said, and how the next run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.store.write.places.work import Work, workers_for
from tests.store.stores import Store
from tests.store.tasks import TASK, direct, planned, rules

#: Expected of many of these tests, which are about something else.
pytestmark = pytest.mark.filterwarnings("ignore:.*match(es)? no rule:shardwise.ShardwiseWarning")


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"record_bytes": 2**60, "record_seconds": 1e9}, 0),
        ({"record_bytes": 2**60, "record_seconds": 0}, 3),
        ({"record_bytes": 1, "record_seconds": 1e9}, 3),
        ({"record_bytes": 2 * TASK, "record_seconds": 1e9}, 2),
    ],
)
def test_receipts_are_written_after_some_bytes_or_some_time(source: Path, options: dict[str, Any], kept: int) -> None:
    """So a part that is killed goes on where it was, not where the last GiB ended."""
    plan = planned(source)
    place, work = plan.place, Work(**options)
    place.begin_parts()
    with workers_for(work, nbytes=1, tasks=1) as workers:
        recorder = place.recorder(None, work, "1/2", workers)
    for number in range(1, 4):  # Of 64 KiB each.
        recorder.add(plan.task(number).run())
    assert len(list(place.receipts())) == kept
    recorder.flush()
    assert [receipt.part for receipt in place.receipts()] == ["1/2"] * 3
    assert Work().record_seconds <= 10


def test_retries_mean_the_same_in_a_store(source: Path, memory: Store) -> None:
    """Without an executor too: a task that fails once is run again."""
    place, failed = memory.place("new"), []
    pipe = place.filesystem.pipe_file

    class Failing:
        def __getattr__(self, name: str) -> Any:
            return getattr(place.filesystem, name)

        def pipe_file(self, path: str, *args: Any, **kwargs: Any) -> Any:
            if path.endswith(".safetensors") and path not in failed:
                failed.append(path)
                raise OSError(5, "not this time")
            return pipe(path, *args, **kwargs)

    once = sw.ObjectPath(str(place), filesystem=Failing(), attempts=1)
    sw.reshard_checkpoint(source, once, rules(), retries=1)
    assert len(failed) > 2
    assert memory.objects(place) == direct(source)
    failed.clear()
    other = sw.ObjectPath(str(memory.place("other")), filesystem=Failing(), attempts=1)
    with pytest.raises(OSError, match="not this time"):
        sw.reshard_checkpoint(source, other, rules(), retries=0)
