"""Plans and receipts that are damaged, forged, or of another source: refused, or harmless."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.cli import main
from shardwise.store.write.forms.files import NO_DIGESTS, WrittenFile
from shardwise.store.write.places.receipts import receipt_line
from shardwise.store.write.plan.tables import TABLES
from tests.store.tasks import folder_of, forge, planned, unpacked

#: Expected of many of these tests, which are about something else.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*match(es)? no rule:shardwise.ShardwiseWarning"),
    pytest.mark.filterwarnings("ignore:the layouts cut:shardwise.ShardwiseWarning"),
]


def test_a_plan_of_another_version_edited_or_damaged(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "new.swplan"
    planned(source).save(path)
    whole = path.read_bytes()
    line, _, rest = whole.partition(b"\n")
    cases = {
        b"shardwise plan 1" + line[16:] + b"\n" + rest: "of version 1; only version 3 is known: plan it again",
        b"shardwise plan one" + line[16:] + b"\n" + rest: "not a shardwise plan",
        b"": "not a shardwise plan",
        b"shardwise plan 3\n" + rest: "edited or is damaged",
        whole[:-5]: "edited or is damaged",
        whole[:200]: "edited or is damaged",
        whole + b"1": "edited or is damaged",
        line[:-1] + (b"1" if line[-1:] != b"1" else b"2") + b"\n" + rest: "edited or is damaged",
        line[:20] + b"0" * 4 + line[24:] + b"\n" + rest: "edited or is damaged",
        whole.replace(b'"form":"sharded"', b'"form":"scarred"'): "edited or is damaged",
    }
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


def test_a_plan_is_what_its_file_says(source: Path, tmp_path: Path) -> None:
    """The file that a test takes apart and puts together again is the plan: what follows changes it."""
    path = tmp_path / "new.swplan"
    for plan in (
        planned(source),
        planned(source, "hf", to="hf", max_file_bytes=300_000),
        planned(source, "d", to="dcp"),
    ):
        plan.save(path)
        forge(path, *unpacked(path))
        again = sw.CheckpointPlan.load(path)
        assert [task.ranges for task in again.tasks] == [task.ranges for task in plan.tasks]
        digests = list(range(len(plan.tensors)))
        theirs, ours = (
            each.texts_of(digests, [WrittenFile(file, NO_DIGESTS, file.headers_digest()) for file in each.files])
            for each in (again, plan)
        )
        assert theirs == ours
        again.check()


@pytest.mark.parametrize(
    "change",
    [
        {"task_bytes": 0},
        {"task_bytes": -5},
        {"task_bytes": True},
        {"task_bytes": 2**16 - 1},
        {"task_bytes": 2**63},
        {"task_bytes": 1e6},
        {"form": "orbax"},
        {"form": "hf"},
        {"form": "safetensors"},
        {"form": ["dcp"]},
        {"path": 3},
        {"path": ""},
        {"path": "/"},
        {"path": "there/.."},
        {"texts": {"shardwise.json": "e30="}},
        {"is_folder": True},
        {"beside": {"shardwise.json": 0}},
        {"beside": {"config.json": 0}},
        {"beside": {"config.json": -1, "a.json": 1}},
        {"metadata": {"a": 1}},
        {"metadata": None},
        {"dtypes": ["float65"]},
        {"dtypes": ["int4"]},
        {"dtypes": []},
        {"cuts": []},
        {"cuts": [{"layout": [None]}]},
        {"cuts": [7]},
        {"cuts": [{"layout": 3, "uneven": "even", "mesh": {"shape": [2], "axis_names": ["x"]}}] * 9},
        {"cuts": [{"layout": [3], "uneven": "even", "mesh": {"shape": [2], "axis_names": ["x"]}}] * 9},
        {"cuts": [{"layout": ["x"], "uneven": "odd", "mesh": {"shape": [2], "axis_names": ["x"]}}] * 9},
        {"cuts": [{"layout": ["x"], "uneven": "even", "mesh": {"shape": [-2], "axis_names": ["x"]}}] * 9},
    ],
    ids=str,
)
def test_a_forged_head_is_refused_when_it_is_read(source: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "new.swplan"
    planned(source).save(path)
    head, sections = unpacked(path)
    forge(path, {**head, **change}, sections)
    with pytest.raises(sw.ParseError) as refused:
        sw.CheckpointPlan.load(path)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("form", ["sharded", "dcp", "ranks"])
@pytest.mark.parametrize("name", ["", "__metadata__", "\ud800", "w" * 4097, "é" * 2049])
def test_names_that_no_reader_takes_are_refused_when_a_plan_is_read(
    source: Path, tmp_path: Path, form: sw.Target, name: str
) -> None:
    """Committed it could not be opened. Headers have names, and are as long as planned; DCP's index is written last."""
    path = tmp_path / "new.swplan"
    layouts = sw.LayoutMap(sw.DeviceMesh((1,), ("x",)), default="replicated")
    sw.plan_checkpoint(source, tmp_path / "there", layouts, to=form).save(path)
    head, sections = unpacked(path)
    rows = np.frombuffer(sections["tensors"], "<i8").reshape(-1, len(TABLES["tensors"]._fields)).copy()
    end = int(rows[0, 0])
    forged = [{"aliases": json.dumps({name: sections["names"][:end].decode()}).encode()}]
    if form == "dcp":
        text = name.encode(errors="surrogatepass")
        rows[:, 0] += len(text) - end
        forged.append({"names": text + sections["names"][end:], "tensors": rows.tobytes()})
    for change in forged:
        forge(path, head, {**sections, **change})
        with pytest.raises(
            sw.ParseError, match=r"new.swplan: the plan cannot be read: .*(name|called|utf-8)"
        ) as refused:
            sw.CheckpointPlan.load(path)
        assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    "change", [("path", "a\0b"), ("path", "x" * 70_000), ("modified", 2**63), ("changed", -(2**64)), ("size", 2**63)]
)
def test_sources_that_no_file_can_be_are_refused_when_they_are_read(
    source: Path, tmp_path: Path, change: tuple[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new.swplan"
    planned(source).save(path)
    head, sections = unpacked(path)
    fields = ("path", "size", "modified", "changed", "begin", "end", "digest")
    ends = np.frombuffer(sections["source_ends"], "<i8").tolist()
    texts = [json.loads(sections["sources"][at:end]) for at, end in zip([0, *ends], ends, strict=False)]
    texts[-1][fields.index(change[0])] = change[1]
    made = [json.dumps(text).encode() for text in texts]
    forge(
        path,
        head,
        {**sections, "sources": b"".join(made), "source_ends": np.cumsum([*map(len, made)]).astype("<i8").tobytes()},
    )
    with pytest.raises(sw.ParseError, match=r"new.swplan: the plan cannot be read: it has (the path|a source)"):
        sw.CheckpointPlan.load(path)
    for command in ("run", "commit"):
        assert main([command, str(path)]) == 2
        assert re.fullmatch("shardwise: error: .*the plan cannot be read: it has .*\n", capsys.readouterr().err)
    forge(path, {**head, "path": f"{head['path']}\0"}, sections)
    with pytest.raises(sw.ParseError, match=r"it has the path .* null byte"):
        sw.CheckpointPlan.load(path)


@pytest.mark.parametrize(
    "text", [b"[]", b"{" * 9999, b"[" * 100_000, b"{}", b"3", b"\xff", b'{"sections":{"names":3}}']
)
def test_a_head_that_is_none_is_refused(tmp_path: Path, text: bytes) -> None:
    line = f"shardwise plan 3 {hashlib.sha256(text).hexdigest()} {len(text)} 0\n".encode()
    (tmp_path / "p").write_bytes(line + text)
    with pytest.raises(sw.ParseError, match="the plan cannot be read"):
        sw.CheckpointPlan.load(tmp_path / "p")


def changed(data: bytes, position: int, value: int) -> bytes:
    return data[: 8 * position] + value.to_bytes(8, "little", signed=True) + data[8 * position + 8 :]


NUMBERS = [
    "shapes", "tensors", "pieces", "replicas", "targets", "boxes", "files", "slots", "source_ends", "runs",
]  # fmt: skip


@pytest.mark.parametrize("section", NUMBERS)
@pytest.mark.parametrize("to", ["hf", "sharded", "dcp"])
def test_no_number_of_a_plan_can_be_another(tmp_path: Path, section: str, to: Any) -> None:
    """Each number of each section is moved by one and out of all bounds; what is not refused is of no consequence.

    The places and the strides of a piece in its source are not told by anything else: only their bounds are.
    """
    mesh = sw.DeviceMesh((2,), ("x",))
    rows = {"w": sw.TensorLayout(("x", None), mesh)}
    tensors = {"w": np.arange(12, dtype="f4").reshape(4, 3), "v": np.arange(5, dtype="u1"), "n": np.zeros((0, 2), "u2")}
    sw.save_checkpoint(tmp_path / "a", tensors, rows, to="sharded")
    path = tmp_path / "plan"
    sw.plan_checkpoint(tmp_path / "a", tmp_path / "b", rows if to != "hf" else None, to=to, max_file_bytes=16).save(
        path
    )
    head, sections = unpacked(path)
    held = np.frombuffer(sections[section], "<i8").tolist()
    assert held or section == "replicas"
    kept = []
    for position, number in enumerate(held):
        for value in {number - 1, number + 1, -1, 2**62, -(2**63), 2**63 - 1} - {number}:
            forge(path, head, {**sections, section: changed(sections[section], position, value)})
            try:
                sw.CheckpointPlan.load(path)
            except sw.ParseError:
                continue
            kept.append((position, value))
    if section == "pieces":
        assert {position % 8 for position, _ in kept if position < 16} <= {0, 1, 6, 7}
    else:
        allowed = {"tensors": {0, 5, 6}}  # Names, dtypes of one size, and cuts: what readers are told.
        assert {position % 8 for position, _ in kept} <= allowed.get(section, set()), (section, to, kept)
    for cut in (sections[section][:-8], sections[section] + bytes(8), sections[section][:-1]):
        # Boxes that nothing has are of no consequence.
        if cut != sections[section] and not (section == "boxes" and len(cut) > len(sections[section])):
            forge(path, head, {**sections, section: cut})
            with pytest.raises(sw.ParseError):
                sw.CheckpointPlan.load(path)


def test_no_name_of_a_plan_can_be_that_of_another_file(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "new.swplan"
    planned(source).save(path)
    head, sections = unpacked(path)
    names = sections["file_names"]
    length = len("shard-00001-model-00001-of-00001.safetensors")
    for name in (b"../evil", b"shardwise.json", b".metadata", names[length : 2 * length]):
        forged = name.ljust(length, b"x") if len(name) < length else name
        forge(path, head, {**sections, "file_names": forged + names[length:]})
        with pytest.raises(sw.ParseError, match=r"no checkpoint of the form|two of its files"):
            sw.CheckpointPlan.load(path)
    cases = {
        "names": [sections["names"].replace(b"wide", b"deep"), b"\xff" + sections["names"][1:]],
        "aliases": [b"[]", b"{", b'{"wide":"deep"}', b'{"a":"b"}', b'{"a":3}'],
        "paths": [b"[]", b'{"wide":["a"]}'],
        "sources": [sections["sources"].replace(b'"', b" ", 1), b"7" * len(sections["sources"])],
    }
    for section, texts in cases.items():
        for text in texts:
            forge(path, head, {**sections, section: text})
            with pytest.raises(sw.ParseError):
                sw.CheckpointPlan.load(path)


def test_what_a_plan_claims_takes_no_memory(source: Path, tmp_path: Path) -> None:
    """A file of kilobytes that claims, or inflates to, gigabytes is refused for less than the file and a few blocks."""
    path = tmp_path / "new.swplan"
    planned(source).save(path)
    head, sections = unpacked(path)
    line, _, rest = path.read_bytes().partition(b"\n")
    zeros = bytes(2**28)
    short = zlib.compress(zeros[: 2**18])
    text = json.dumps({**head, "sections": {"names": [2**28, [hashlib.sha256(zeros[: 2**18]).hexdigest()] * 2**10]}})
    of_zeros = f"shardwise plan 3 {hashlib.sha256(text.encode()).hexdigest()} {len(text)} {2**10}\n{text}".encode()
    of_zeros += np.full(2**10, len(short), "<i8").tobytes() + short * 2**10
    said = {name: [len(data), [hashlib.sha256(data).hexdigest()] * bool(data)] for name, data in sections.items()}
    files: dict[str, Callable[[], object]] = {
        "short blocks": lambda: path.write_bytes(of_zeros),
        "long head": lambda: path.write_bytes(
            b" ".join([*line.split()[:-2], b"9" * 15, line.split()[-1]]) + b"\n" + rest
        ),
        "many blocks": lambda: path.write_bytes(b" ".join([*line.split()[:-1], b"9" * 15]) + b"\n" + rest),
        "long section": lambda: forge(path, head, sections, targets=[2**62, said["targets"][1]]),
        "no blocks": lambda: forge(path, head, sections, targets=[2**28, []]),
        "longer block": lambda: forge(path, head, sections, targets=[2**18, said["targets"][1]]),
    }
    for name, make in files.items():
        make()
        assert path.stat().st_size < 2**20
        tracemalloc.start()
        with pytest.raises(sw.ParseError):
            sw.CheckpointPlan.load(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**22, (name, peak)


@pytest.mark.heavy
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
    (path,) = (folder_of(plan).root / "receipts").iterdir()
    return path


@pytest.mark.parametrize("more", [-1, 1])
def test_files_that_were_cut_or_grew_after_their_receipts_stop_the_commit(source: Path, more: int) -> None:
    """Also where the values are not read once more."""
    plan = planned(source)
    plan.run()
    file = min(folder_of(plan).folder.iterdir())
    size = file.stat().st_size
    os.truncate(file, size + more)
    with pytest.raises(sw.ParseError, match=f"has {size + more} bytes, but was made with {size}"):
        plan.commit(check=False)
    assert not (source.parent / "new").exists()


@pytest.mark.parametrize("count", [0, 1])
def test_receipts_have_the_checksums_that_files_need(source: Path, count: int) -> None:
    """PyTorch's files have CRC-32: one for each range; a receipt with another number of them would leave wrong ones."""
    plan = planned(source, to="dcp", dtype=None)
    plan.run()
    path = receipts(plan)
    lines = path.read_bytes().splitlines(keepends=True)
    first = plan.task(0).run()
    assert len(first.crcs) == len(first.ranges)
    path.write_bytes(receipt_line(first._replace(crcs=(*first.crcs, 0) if count else ())) + b"".join(lines[1:]))
    with pytest.raises(sw.ParseError, match=r"the receipt of task 0 has \d+ CRC-32; it must have \d+"):
        plan.commit()
    path.write_bytes(receipt_line(first) + b"".join(lines[1:]))
    plan.commit(check=True)


@pytest.mark.heavy
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
        "missing": (b"".join(lines[:3] + lines[4:]), "receipts of 1 of .* tasks are missing: 3;"),
        "torn": (b"".join(lines)[:-7], r"receipts of 1 of .* tasks are missing"),
        "edited": (b"".join(lines).replace(b'"', b"'", 1), "is not what was written"),
        "garbage": (b"".join(lines) + b"hello\n", "is not what was written"),
        "ranges": (
            b"".join(lines[:3]) + forged(ranges=((file, begin, end - 8), *first.ranges[1:])),
            "ranges that are not the plan.s",
        ),
        "digests": (b"".join(lines[:3]) + forged(digests=first.digests[1:]), "digests"),
        "more digests": (b"".join(lines[:3]) + forged(digests=(*first.digests, 1)), r"digests? for \d+ range"),
        "large": (b"".join(lines[:3]) + forged(digests=(2**130,) * len(first.digests)), "no task writes"),
        "task": (b"".join(lines) + forged(task=10**6), "the plan has"),
        "one past the last": (b"".join(lines) + forged(task=len(plan.tasks)), "the plan has"),
        "negative": (b"".join(lines) + forged(task=-1), "the plan has"),
        "text": (b"".join(lines) + forged(task="3"), "no task writes"),
        "late": (b"".join(lines) + forged(seconds=10**400), "no task writes"),
        "disagree": (b"".join(lines) + forged(digests=(1,) * len(first.digests)), "two receipts of task 3 disagree"),
        "foreign": (b"".join(lines[:3]) + foreign, "is of another plan"),
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
    other_root = folder_of(other).root
    assert other_root.is_dir()
    assert {each.name: each.read_bytes() for each in (source.parent / "new").iterdir()}
