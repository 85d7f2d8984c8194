"""Plans and receipts that are damaged, forged, or of another source: refused, or harmless."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.store.write.task import receipt_line
from tests.store.tasks import planned, saved


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return saved(tmp_path)


def test_a_plan_of_another_version_edited_or_damaged(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "new.swplan"
    planned(source).save(path)
    whole = path.read_bytes()
    line, _, packed = whole.partition(b"\n")
    cases = {
        b"shardwise plan 2" + line[16:] + b"\n" + packed: "of version 2; only version 1 is known",
        b"shardwise plan one" + line[16:] + b"\n" + packed: "not a shardwise plan",
        b"": "not a shardwise plan",
        whole[:-5]: "edited or is damaged",
        whole[:200]: "edited or is damaged",
        line[:-1] + (b"1" if line[-1:] != b"1" else b"2") + b"\n" + packed: "edited or is damaged",
        line[:20] + b"0" * 4 + line[24:] + b"\n" + packed: "edited or is damaged",
    }
    body = zlib.decompress(packed).replace(b'"form":"sharded"', b'"form":"scarred"')
    cases[line + b"\n" + zlib.compress(body)] = "edited or is damaged"
    for data, message in cases.items():
        path.write_bytes(data)
        with pytest.raises(sw.ParseError, match=message) as refused:
            sw.CheckpointPlan.load(path)
        assert len(str(refused.value)) < 400
    for at in range(0, len(whole), len(whole) // 40):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:  # A bit that says nothing, such as the padding of a compressed block, may change.
            assert sw.CheckpointPlan.load(path).digest == planned(source).digest
        except sw.ParseError:
            continue
    with pytest.raises(FileNotFoundError):
        sw.CheckpointPlan.load(tmp_path / "none")


def test_a_plan_that_was_forged_with_care_is_refused_or_harmless(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "new.swplan"
    planned(source).save(path)
    line, _, packed = path.read_bytes().partition(b"\n")
    body = zlib.decompress(packed)
    sizes = [int(word) for word in line.split()[-2:]]
    said, numbers = body[: sizes[0]], body[sizes[0] :]
    for change in (
        lambda text: text.replace(b'"shard-00001-', b'"../ard-00001-'),
        lambda text: text.replace(b'"float64"', b'"float65"'),
        lambda text: text.replace(b"[32,4096]", b"[-2,4096]"),
        lambda text: text.replace(b'"tensors":[[', b'"tensors":[7,['),
        lambda text: b"[]",
        lambda text: b"{" * 9999,
        lambda text: b"[" * 100_000,
        lambda text: text.replace(b'"texts":{', b'"texts":{"../evil":"",'),
    ):
        forged = change(said)
        assert forged != said
        digest = hashlib.sha256(forged + numbers).hexdigest()
        head = f"shardwise plan 1 {digest} {len(forged)} {len(numbers)}\n".encode()
        path.write_bytes(head + zlib.compress(forged + numbers))
        with pytest.raises((sw.ParseError, sw.LayoutError)):
            sw.CheckpointPlan.load(path).run()
    for at in (0, 1, 2, 4, 6):  # Of the first piece: its source, its offset, a start, a stop, a stride.
        for value in (-1, 2**62):
            forged = numbers[: 8 * at] + value.to_bytes(8, "little", signed=True) + numbers[8 * at + 8 :]
            digest = hashlib.sha256(said + forged).hexdigest()
            head = f"shardwise plan 1 {digest} {len(said)} {len(forged)}\n".encode()
            path.write_bytes(head + zlib.compress(said + forged))
            with pytest.raises((sw.ParseError, sw.LayoutError)):
                sw.CheckpointPlan.load(path).run()
    assert not (tmp_path / "new").exists()


def test_another_source_is_refused(source: Path) -> None:
    planned(source).save(source.parent / "new.swplan")
    file = min(source.glob("*.safetensors"))
    data, status = file.read_bytes(), file.stat()

    def refused(message: str) -> None:
        code = f"import shardwise as sw; sw.CheckpointPlan.load({str(source.parent / 'new.swplan')!r}).run()"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=3600)
        assert done.returncode
        assert re.search(message, done.stderr), done.stderr

    file.write_bytes(data.replace(b'"wide"', b'"wild"'))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    refused("its headers differ")
    file.write_bytes(data[:-1])
    refused("bytes")
    file.write_bytes(data)
    refused("was written to")
    file.unlink()
    refused("No such file")
    assert not (source.parent / "new").exists()


def receipts(plan: sw.CheckpointPlan) -> Path:
    (path,) = (plan.workplace / "receipts").iterdir()
    return path


def test_receipts_that_are_missing_forged_or_of_another_plan_stop_the_commit(source: Path) -> None:
    plan = planned(source)
    with pytest.raises(sw.ParseError, match=rf"receipts of {len(plan.tasks)} of {len(plan.tasks)} tasks are missing"):
        plan.commit()
    plan.run()
    path = receipts(plan)
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == len(plan.tasks)
    first = plan.task(3).run()
    other = planned(source, "other")
    other.run(tasks=[3])
    foreign = receipts(other).read_bytes()

    def forged(**changes: Any) -> bytes:
        return receipt_line(first._replace(**changes))

    file, begin, end = first.ranges[0]
    cases: dict[str, tuple[bytes, str]] = {
        "missing": (b"".join(lines[:3] + lines[4:]), "receipts of 1 of .* tasks are missing: 3$"),
        "torn": (b"".join(lines)[:-7], r"receipts of 1 of .* tasks are missing"),
        "edited": (b"".join(lines).replace(b'"', b"'", 1), "is not what was written"),
        "garbage": (b"".join(lines) + b"hello\n", "is not what was written"),
        "ranges": (
            b"".join(lines[:3]) + forged(ranges=((file, begin, end - 8), *first.ranges[1:])),
            "ranges that are not the plan.s",
        ),
        "digests": (b"".join(lines[:3]) + forged(digests=first.digests[1:]), "digests"),
        "large": (b"".join(lines[:3]) + forged(digests=(2**130,) * len(first.digests)), "no task writes"),
        "task": (b"".join(lines) + forged(task=10**6), "the plan has"),
        "one past the last": (b"".join(lines) + forged(task=len(plan.tasks)), "the plan has"),
        "negative": (b"".join(lines) + forged(task=-1), "the plan has"),
        "text": (b"".join(lines) + forged(task="3"), "no task writes"),
        "late": (b"".join(lines) + forged(seconds=10**400), "no task writes"),
        "disagree": (b"".join(lines) + forged(digests=(1,) * len(first.digests)), "two receipts of task 3 disagree"),
        "foreign": (b"".join(lines[:3]) + foreign, "is of the plan"),
    }
    for data, message in cases.values():
        path.write_bytes(data)
        with pytest.raises(sw.ParseError, match=message) as refused:
            plan.commit()
        assert len(str(refused.value)) < 500
        assert not (source.parent / "new").exists()
    # One that was forged with all that a receipt has is found when the data is read back.
    path.write_bytes(b"".join(lines[:3]) + forged(digests=(1,) * len(first.digests)) + b"".join(lines[4:]))
    with pytest.raises(sw.ParseError, match="is not what the receipts say"):
        plan.commit(check=True)
    # Twice the same is what a task that ran twice gives.
    path.write_bytes(b"".join(lines) + receipt_line(first))
    plan.commit(check=True)
    other_root = other.workplace
    assert other_root.is_dir()
    assert {each.name: each.read_bytes() for each in (source.parent / "new").iterdir()}
