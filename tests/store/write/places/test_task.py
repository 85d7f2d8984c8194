"""Tasks of a folder and their receipts: two drivers, a task that comes late, and what no task writes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.store.data.engine import DIGEST_MODULUS
from shardwise.store.write.places.receipts import receipt_from_line, receipt_line
from shardwise.store.write.places.task import TaskReceipt
from shardwise.store.write.run.ledger import usual_parts
from tests.store.tasks import contents, planned, rules

#: Expected of many of these tests, which are about something else.
pytestmark = pytest.mark.filterwarnings("ignore:.*match(es)? no rule:shardwise.ShardwiseWarning")


@pytest.mark.heavy
def test_two_drivers_and_a_late_task(source: Path) -> None:
    plan = planned(source)
    late = plan.tasks[0]
    entered, leave = threading.Event(), threading.Event()

    def wait(_done: int, _total: int) -> None:
        entered.set()
        assert leave.wait(3600)

    first = threading.Thread(target=lambda: plan.run(progress=wait))
    first.start()
    try:
        assert entered.wait(3600)
        with pytest.raises(BlockingIOError):
            planned(source).run()
        with pytest.raises(BlockingIOError):
            planned(source).commit()
        with pytest.raises(BlockingIOError):
            sw.reshard_checkpoint(source, source.parent / "new", rules())
    finally:
        leave.set()
        first.join()
    with pytest.raises(FileExistsError, match="holds parts of a plan"):
        sw.reshard_checkpoint(source, source.parent / "new", rules())
    plan.commit()
    before = contents(source.parent / "new")
    with pytest.raises(FileNotFoundError):
        late.run()
    # What is done is done.
    assert (plan.run(), plan.run((1, 3)), plan.commit().bytes_written) == (0, 0, 0)
    assert contents(source.parent / "new") == before


def test_a_receipt_says_what_a_task_can_write() -> None:
    """A CRC-32 has 32 bits, and a digest is less than its modulus; each line is right by its own digest."""
    right = TaskReceipt("plan", 3, ((0, 8, 16),), (DIGEST_MODULUS - 1,), (2**32 - 1,), 8, 8, 0.5, "host:1", "1/2")
    line = receipt_line(right)
    assert receipt_from_line(line, "here") == right
    wrong: list[dict[str, Any]] = [
        {"crcs": (2**32,)}, {"crcs": (-1,)}, {"digests": (DIGEST_MODULUS,)}, {"digests": (-1,)}
    ]  # fmt: skip
    for changes in wrong:
        with pytest.raises(sw.ParseError, match=r"^here: a receipt has contents that no task writes$"):
            receipt_from_line(receipt_line(right._replace(**changes)), "here")
    with pytest.raises(sw.ParseError, match=r"^here: a receipt is not what was written"):
        receipt_from_line(line.replace(b"host:1", b"host:2"), "here")
    assert right.contents != right._replace(crcs=(0,)).contents
    # Parts beyond 2**20 are not believed, however many say so.
    assert usual_parts({f"1/{2**20}": 1, f"1/{2**20 + 1}": 9, "1/0": 9}) == 2**20
