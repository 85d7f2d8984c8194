"""Objects of S3 that several tasks make: the bytes of a disk, read once, and put once by whoever puts a part."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import tracemalloc
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.store.data.objects import ObjectPath
from shardwise.store.write.places.part_sizes import Limits
from shardwise.store.write.places.parts import upload_tag
from shardwise.store.write.places.store import StorePlace
from shardwise.store.write.places.work import Work
from shardwise.store.write.request.contents import with_shares
from shardwise.store.write.run.run import run_whole
from tests.store.stores import Store, wrapped
from tests.store.tasks import driven, files, forge, unpacked, write_replica
from tests.store.toxic import Times
from tests.store.trips import name_of

# Of asynchronous connections that the server closes, and of packages that warn about each other.
pytestmark = pytest.mark.filterwarnings("ignore")

MESH = sw.DeviceMesh((4,), ("x",))
#: Tasks and parts as they are tried on small checkpoints.
TASK, SMALL = 2**17, Limits(shared=2**12)
FORMS = ["safetensors", "hf", "sharded", "dcp", "ranks", "vllm"]


def rules() -> sw.LayoutMap:
    layouts = sw.LayoutMap(MESH)
    layouts["cut"] = (None, "x")
    layouts["rows"] = ("x", None)
    layouts["small.*"] = (None,)
    return layouts


@pytest.fixture
def small_parts(s3: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A server that takes parts of any size."""
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
    return s3


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint with pieces that are stored more than once, tied tensors, small ones and one without elements."""
    rng = np.random.default_rng(5)
    cut = rng.random((512, 96))
    tensors = {
        "cut": cut, "tied": cut, "rows": rng.integers(0, 99, (200, 1000), np.uint8), "none": np.zeros((0, 3)),
        **{f"small.{i}": rng.random(50 + i) for i in range(6)},
    }  # fmt: skip
    replicated = sw.TensorLayout(("x", None), sw.DeviceMesh((2, 2), ("x", "y")))
    sw.save_checkpoint(tmp_path / "source", tensors, {"cut": replicated}, to="sharded")
    return tmp_path / "source"


def expected(source: Path, to: Any) -> dict[str, bytes]:
    target = source.parent / to / name_of(to)
    if not target.exists():
        target.parent.mkdir()
        sw.reshard_checkpoint(source, target, rules(), to=to)
    return files(target)


def shared(plan: sw.CheckpointPlan, limits: Limits = SMALL, task_bytes: int = TASK) -> sw.CheckpointPlan:
    """The plan of a small checkpoint by tasks that make parts of objects."""
    made = with_shares(plan, limits, task_bytes, 2**28)
    assert made is not None
    return made.with_place(StorePlace(made, limits))


def planned(source: Any, place: ObjectPath, to: Any = "sharded") -> sw.CheckpointPlan:
    return shared(sw.plan_checkpoint(source, place, rules(), to=to))


def uploads(place: ObjectPath) -> list[str]:
    """The uploads that are under way at or below a place."""
    bucket, _, key = place.key.partition("/")
    found = place.filesystem.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=key).get("Uploads") or []
    return sorted(each["Key"] for each in found)


def remains(store: Store, place: ObjectPath) -> dict[str, bytes]:
    """What lies beside a checkpoint that is being written."""
    return store.objects(place.with_name(f".{place.name}.partial"))


def parts_put(store: Store) -> Counter[tuple[str, str]]:
    """How often each part of each object was put."""
    assert store.toxic is not None
    found = (re.fullmatch(r"/([^?]*)\?.*partNumber=(\d+).*", path) for _, path, _ in store.toxic.requests)
    return Counter((each[1], each[2]) for each in found if each is not None)


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("to", FORMS)
def test_the_bytes_of_a_disk(small_parts: Store, source: Path, to: Any, remote: bool) -> None:
    """By parts in any order, some of them twice; nothing is visible before the commit, and nothing left after it."""
    src: Any = source
    if remote:
        src = small_parts.place("source")
        small_parts.put(source, src)
    place = small_parts.place(name_of(to))
    plan = planned(src, place, to)
    assert len(plan.tasks) > 4
    done = sum(plan.run((part, 3)) for part in (3, 1, 2, 1))
    assert done == len(plan.tasks)
    assert plan.run() == 0
    assert plan.run(tasks=[1, 0]) == 2
    assert small_parts.objects(place) == {}
    assert len(uploads(place)) == len(plan.files)
    report = plan.commit(check=True)
    assert small_parts.objects(place) == expected(source, to)
    assert report.bytes == plan.nbytes
    assert (uploads(place), remains(small_parts, place)) == ([], {})
    # What is done is done; it is compared with the sources.
    assert (plan.run(), plan.commit().bytes_written) == (0, 0)
    assert sw.diff_checkpoints(source, place) == []
    sw.verify_checkpoint(place)
    assert (uploads(place), remains(small_parts, place)) == ([], {})


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of a tensor of 24 MiB in three files, and a small tensor."""
    folder = tmp_path_factory.mktemp("large")
    values = np.random.default_rng(3).integers(0, 255, (3072, 8192), np.uint8)
    rows = sw.TensorLayout(("x", None), sw.DeviceMesh((3,), ("x",)))
    sw.save_checkpoint(folder / "source", {"cut": values, "small.0": np.arange(9.0)}, {"cut": rows}, to="sharded")
    return folder / "source"


@pytest.mark.parametrize("is_planned", [False, True], ids=["direct", "planned"])
@pytest.mark.parametrize("src", ["disk", "store"])
@pytest.mark.parametrize("to", ["safetensors", "sharded", "vllm"])
def test_once(s3: Store, large: Path, to: Any, src: str, is_planned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four objects of columns, and one object by several tasks: each byte is read once, and each part put once."""
    source: Any = large
    if src == "store":
        source = s3.place("source")
        s3.put(large, source)
    place = s3.place(name_of(to))
    if is_planned:
        plan = sw.plan_checkpoint(source, place, rules(), to=to)
        assert plan.is_shared
        plan.run((1, 2))
        plan.run((2, 2))
        report = plan.commit()
    else:
        report = sw.reshard_checkpoint(source, place, rules(), to=to, threads=1)
    total = sum(path.stat().st_size for path in large.glob("*.safetensors"))
    assert report.bytes_read <= total * 1.01
    assert s3.toxic is not None
    if src == "store":
        asked = [
            re.fullmatch(r"bytes=(\d+)-(\d+)", headers["range"])
            for method, path, headers in s3.toxic.requests
            if method == "GET" and path.startswith(f"/{source.key}/") and "range" in headers
        ]
        assert sum(int(each[2]) + 1 - int(each[1]) for each in asked if each) <= total * 1.1
    assert set(parts_put(s3).values()) == {1}
    assert s3.objects(place) == expected(large, to)
    assert (uploads(place), remains(s3, place)) == ([], {})


def environment(store: Store) -> dict[str, str]:
    assert store.toxic is not None
    return {**os.environ, "AWS_ENDPOINT_URL": store.toxic.url}


def command(env: dict[str, str], *words: Any) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "shardwise", *map(str, words)]
    return subprocess.run(line, env=env, capture_output=True, text=True, timeout=3600)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_one_object_by_processes_of_which_one_is_killed(s3: Store, large: Path, tmp_path: Path) -> None:
    """It dies when its first receipt is there; what that names is not put again."""
    place, env, saved = s3.place("new.safetensors"), environment(s3), tmp_path / "new.swplan"
    made = command(env, "plan", large, place, "--save", saved)
    assert made.returncode == 0, made.stderr
    dying = (
        "import os, signal, sys\n"
        "from shardwise import CheckpointPlan\n"
        "from shardwise.store.write.places.store import StorePlace\n"
        "keep = StorePlace.keep\n"
        "StorePlace.keep = lambda *given: (keep(*given), os.kill(os.getpid(), signal.SIGKILL))\n"
        "CheckpointPlan.load(sys.argv[1]).run(threads=1)\n"
    )
    killed = subprocess.run([sys.executable, "-c", dying, str(saved)], env=env, timeout=3600)
    assert killed.returncode == -signal.SIGKILL
    assert sorted(name.rpartition(".")[2] for name in remains(s3, place)).count("receipt") == 1
    before = parts_put(s3)
    early = command(env, "commit", saved)
    assert early.returncode == 2
    assert re.search(r"receipts of \d of \d tasks are missing", early.stderr), early.stderr
    parts = [
        subprocess.Popen([sys.executable, "-m", "shardwise", "run", str(saved), "--part", part], env=env)
        for part in ("2/2", "1/2")
    ]
    assert [part.wait(3600) for part in parts] == [0, 0]
    done = command(env, "commit", saved)
    assert done.returncode == 0, done.stderr
    assert s3.objects(place) == expected(large, "safetensors")
    assert (uploads(place), remains(s3, place)) == ([], {})
    # The first task has the one part that it named, or none if all of it is in the remainder.
    put = parts_put(s3)
    named_parts = [key for key in before if put[key] == before[key]]
    assert named_parts or not before
    assert max(put.values()) <= 2


def test_an_executor_shares_one_object(s3: Store, large: Path) -> None:
    place = s3.place("new.safetensors")
    seen: list[tuple[int, int]] = []
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:
        sw.reshard_checkpoint(large, place, executor=processes, progress=lambda *at: seen.append(at))
    assert len(seen) > 1
    assert seen[-1][0] == seen[-1][1]
    assert s3.objects(place) == expected(large, "safetensors")
    assert set(parts_put(s3).values()) == {1}


def test_an_interrupted_run_goes_on(small_parts: Store, source: Path) -> None:
    """What receipts name is not put again, if the store still has it; else it is."""
    place = small_parts.place("new")
    plan = planned(source, place)
    half = range(len(plan.tasks) // 2)
    assert plan.run(tasks=half) == len(half)
    before = parts_put(small_parts)
    assert before
    plan = planned(source, place)
    assert plan.run() == len(plan.tasks) - len(half)
    assert all(count == 1 for count in parts_put(small_parts).values())
    # As after a rule of the store that removes what is never completed.
    bucket, _, key = (place / plan.files[1].name).key.partition("/")
    (upload,) = place.filesystem.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=key)["Uploads"]
    place.filesystem.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload["UploadId"])
    with pytest.raises(sw.ParseError, match=r"receipts of \d+ of \d+ tasks are missing"):
        plan.commit()
    with pytest.raises(
        FileNotFoundError, match=r"has dropped an upload of it; remove .*uploads, and run all parts again"
    ):
        plan.run()
    place.filesystem.rm_file(
        next(
            f"{place.parent.key}/.new.partial/{name}"
            for name in remains(small_parts, place)
            if name.endswith("/uploads")
        )
    )
    assert plan.run() > 0
    plan.commit(check=True)
    assert small_parts.objects(place) == expected(source, "sharded")
    assert remains(small_parts, place) == {}


def test_a_run_as_a_whole_begins_dropped_uploads_again(s3: Store, large: Path) -> None:
    place = s3.place("new")
    plan = sw.plan_checkpoint(large, place, rules(), to="sharded")
    assert plan.is_shared
    plan.run(tasks=[0])
    for upload in place.filesystem.call_s3(
        "list_multipart_uploads", Bucket="bucket", Prefix=place.key.partition("/")[2]
    )["Uploads"]:
        place.filesystem.call_s3(
            "abort_multipart_upload", Bucket="bucket", Key=upload["Key"], UploadId=upload["UploadId"]
        )
    report = sw.reshard_checkpoint(large, place, rules(), to="sharded", resume=True)
    assert report.bytes_resumed == 0
    assert s3.objects(place) == expected(large, "sharded")
    assert (uploads(place), remains(s3, place)) == ([], {})


def test_a_commit_that_was_interrupted(small_parts: Store, source: Path) -> None:
    """Some objects are complete, and no manifest is there: the next commit makes the others."""
    place = small_parts.place("new")
    plan = planned(source, place)
    plan.run()
    assert small_parts.toxic is not None
    completed: list[str] = []

    def poison(request: Any) -> str | None:
        is_end = request[0] == "POST" and "uploadId=" in request[1]
        if is_end:
            completed.append(request[1])
        return "503" if is_end and len(completed) > 2 else None

    small_parts.toxic.poison = poison
    with pytest.raises(OSError, match="failed"):
        plan.commit()
    small_parts.toxic.calm()
    assert 0 < len(small_parts.objects(place)) < len(plan.files)
    assert planned(source, place).run() == 0
    planned(source, place).commit(check=True)
    assert small_parts.objects(place) == expected(source, "sharded")
    assert (uploads(place), remains(small_parts, place)) == ([], {})


def test_a_commit_that_was_interrupted_and_uploads_that_were_dropped(small_parts: Store, source: Path) -> None:
    """What tasks have of objects that are complete is compared, and the rest is put again."""
    place = small_parts.place("new")
    plan = planned(source, place)
    plan.run()
    assert small_parts.toxic is not None
    first = plan.files[0].name
    small_parts.toxic.poison = lambda request: (
        "503" if request[0] == "POST" and "uploadId=" in request[1] and first not in request[1] else None
    )
    with pytest.raises(OSError, match="failed"):
        plan.commit()
    small_parts.toxic.calm()
    assert [*small_parts.objects(place)] == [first]
    bucket, _, key = place.key.partition("/")
    for upload in place.filesystem.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=key)["Uploads"]:
        which = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
        place.filesystem.call_s3("abort_multipart_upload", Bucket=bucket, **which)
    run_whole(planned(source, place), Work(resume=True))
    assert small_parts.objects(place) == expected(source, "sharded")
    assert (uploads(place), remains(small_parts, place)) == ([], {})


def test_a_source_that_is_wrong_leaves_no_uploads(s3: Store, tmp_path: Path) -> None:
    """Replicas that disagree in their last element, when the first of two tasks is done."""
    (tmp_path / "source").mkdir()
    values = np.random.default_rng(3).random((3072, 2048), np.float32)
    for rank in (1, 2):
        write_replica(tmp_path / "source", rank, values)
        values = values.copy()
        values[-1, -1] += 1
    place = s3.place("new")
    layouts = {"w": sw.TensorLayout((None, "x"), sw.DeviceMesh((2,), ("x",)))}
    with pytest.raises(sw.ParseError, match="'w': replicas disagree"):
        sw.reshard_checkpoint(tmp_path / "source", place, layouts, task_bytes=14 * 2**20, threads=1)
    assert len(parts_put(s3)) == 2
    assert (uploads(place), remains(s3, place), s3.objects(place)) == ([], {}, {})


def test_two_drivers_at_once(small_parts: Store, source: Path) -> None:
    """The same tasks, and then the same commit: all succeed."""
    place = small_parts.place("new")
    driven([planned(source, place) for _ in range(3)])
    assert small_parts.objects(place) == expected(source, "sharded")
    assert (uploads(place), remains(small_parts, place)) == ([], {})


def test_a_task_that_comes_late_compares(small_parts: Store, source: Path) -> None:
    """After another run has committed, it finds what it would have put; before a plan is begun, nothing."""
    place = small_parts.place("new.safetensors")
    plan = planned(source, place, "safetensors")
    late = list(plan.tasks)
    assert pickle.loads(pickle.dumps(late)) == late
    with pytest.raises(FileNotFoundError, match="the plan was not begun, or was committed or given up"):
        late[0].run()
    plan.run()
    plan.commit()
    for task in late:
        receipt = task.run()
        assert (receipt.bytes_written, receipt.shares) == (0, ())
    data = small_parts.objects(place)[""]
    place.filesystem.pipe_file(place.key, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(FileNotFoundError):  # It is not ours any more.
        late[-1].run()
    with pytest.raises(FileExistsError, match="exists already"):
        late[-1].check()
    with pytest.raises(FileExistsError, match="exists already"):
        plan.run()
    assert remains(small_parts, place) == {}


def test_objects_in_the_way(small_parts: Store, source: Path) -> None:
    """Found when the work begins, or else when an object is to be made: it is not replaced."""
    place = small_parts.place("new")
    plan = planned(source, place)
    first = place / plan.files[0].name
    place.filesystem.pipe_file(first.key, b"theirs")
    with pytest.raises(FileExistsError, match="exists already"):
        plan.run()
    assert uploads(place) == []
    place.filesystem.rm_file(first.key)
    plan.run()
    place.filesystem.pipe_file(first.key, b"theirs")
    with pytest.raises(FileExistsError, match="exists already"):
        plan.commit()
    assert small_parts.objects(first) == {"": b"theirs"}
    assert "shardwise.json" not in small_parts.objects(place)
    place.filesystem.rm_file(first.key)
    plan.commit(check=True)
    assert small_parts.objects(place) == expected(source, "sharded")


def resigned(said: Any) -> bytes:
    text = json.dumps(said).encode()
    return hashlib.sha256(text).hexdigest()[:32].encode() + b" " + text + b"\n"


#: What is made of a receipt's shares, by name; and what is said of it.
_OTHER = "does not agree with the plan"
RECEIPTS: dict[str, tuple[Callable[[list[Any]], list[Any]], str]] = {
    "fewer": (lambda shares: shares[1:], _OTHER),
    "moved": (lambda shares: [[shares[0][0], shares[0][1] + 1, *shares[0][2:]], *shares[1:]], _OTHER),
    "another file": (lambda shares: [[99, *shares[0][1:]], *shares[1:]], _OTHER),
    "none of a part": (lambda shares: [[*share[:3], ""] for share in shares], _OTHER),
    "a text": (lambda shares: [[str(shares[0][0]), *shares[0][1:]], *shares[1:]], "that no task writes"),
    "three": (lambda shares: [share[:3] for share in shares], "that no task writes"),
    "another ETag": (lambda shares: [[*share[:3], '"00"'] for share in shares], "receipts of 1 of "),
}


@pytest.mark.parametrize("kind", RECEIPTS)
def test_receipts_that_are_forged(small_parts: Store, source: Path, kind: str) -> None:
    forge, message = RECEIPTS[kind]
    place = small_parts.place("new")
    plan = planned(source, place)
    plan.run()
    number = next(n for n in range(len(plan.tasks)) if all(share.begin == share.part for share in plan.shares(n)))
    key = f"{place.with_name('.new.partial').key}/{plan.digest[:16]}/{number}.receipt"
    said = json.loads(place.filesystem.cat_file(key).partition(b" ")[2])
    place.filesystem.pipe_file(key, resigned([*said[:-2], forge(said[-2]), said[-1]]))
    with pytest.raises(sw.ParseError, match=message):
        plan.commit()
    assert small_parts.objects(place) == {}
    place.filesystem.rm_file(key)
    assert plan.run() == 1
    plan.commit(check=True)
    assert small_parts.objects(place) == expected(source, "sharded")


def test_a_remainder_that_is_longer(small_parts: Store, source: Path) -> None:
    """Also if the receipt names it as it is."""
    place = small_parts.place("new.safetensors")
    plan = planned(source, place, "safetensors")
    plan.run()
    number = next(n for n in range(len(plan.tasks)) if any(share.begin < share.part for share in plan.shares(n)))
    top = place.with_name(f".{place.name}.partial") / plan.digest[:16]
    other, receipt = top / f"{number}.remainder", top / f"{number}.receipt"
    place.filesystem.pipe_file(other.key, place.filesystem.cat_file(other.key) + b"!")
    said = json.loads(place.filesystem.cat_file(receipt.key).partition(b" ")[2])
    place.filesystem.pipe_file(receipt.key, resigned([*said[:-1], list(other.status())]))
    with pytest.raises(sw.ParseError, match=_OTHER):
        plan.commit()
    assert small_parts.objects(place) == {}


def test_an_object_of_our_tag_that_is_shorter(small_parts: Store, source: Path) -> None:
    """It is taken for one that an earlier commit has made; but no manifest is written for it."""
    place = small_parts.place("new")
    plan = planned(source, place)
    plan.run()
    bucket, _, key = (place / plan.files[1].name).key.partition("/")
    tag = {"shardwise-run": upload_tag(plan.digest, 1)}
    place.filesystem.call_s3("put_object", Bucket=bucket, Key=key, Body=b"short", Metadata=tag)
    with pytest.raises(FileExistsError, match=r"has 5 bytes; \d+ were put"):
        plan.commit()
    assert "shardwise.json" not in small_parts.objects(place)


def test_uploads_of_which_one_cannot_be_begun(small_parts: Store, source: Path) -> None:
    """Nobody knows of the others: they are aborted."""
    place = small_parts.place("new")
    plan = planned(source, place)
    assert small_parts.toxic is not None
    last = plan.files[-1].name
    small_parts.toxic.poison = lambda request: "503" if request[0] == "POST" and last in request[1] else None
    with pytest.raises(OSError, match="failed"):
        plan.run()
    small_parts.toxic.calm()
    assert (uploads(place), remains(small_parts, place)) == ([], {})


def test_memory_of_the_remainder(s3: Store, large: Path) -> None:
    """It is put together, which is counted, and then put as it is."""
    held: list[int] = []

    def noting(call: Any, request: str, **given: Any) -> Any:
        if given["Key"].endswith(".remainder"):
            held.append(tracemalloc.get_traced_memory()[0])
        return call(request, **given)

    place = wrapped(s3.place("new.safetensors"), call_s3=noting)
    plan = sw.plan_checkpoint(large, place, rules(), to="safetensors")
    plan = shared(plan, Limits(shared=2**22), 6 * 2**20)
    plan.run(tasks=[])
    ((_, begin, end, part),) = plan.shares(0)
    assert (begin > 0, part) == (True, end)
    task = plan.tasks[0]
    tracemalloc.start()
    try:
        task.run()
    finally:
        tracemalloc.stop()
    nbytes = end - begin
    assert nbytes <= max(held) < 1.5 * nbytes
    assert plan.most_shared == 2 * nbytes


#: What is made of the list of uploads; and what is said of it.
LISTS: dict[str, tuple[Callable[[str, list[str]], Any], str]] = {
    "another plan": (lambda plan, names: ["0" * 64, names], "the list of uploads is of another plan"),
    "fewer": (lambda plan, names: [plan, names[1:]], "the list of uploads has 3 entries for 4 files"),
    "a number": (lambda plan, names: [plan, [1, *names[1:]]], "the list of uploads has contents"),
    "no list": (lambda plan, names: {plan: names}, "the list of uploads has contents"),
    "an edit": (lambda plan, names: b"0" * 32 + b" []", "the list of uploads is not what was written"),
    "nothing": (lambda plan, names: b"", "is damaged: it has 0 bytes, outside 1 to "),
}


@pytest.mark.parametrize("kind", LISTS)
def test_lists_of_uploads_that_are_forged(small_parts: Store, source: Path, kind: str) -> None:
    forge, message = LISTS[kind]
    place = small_parts.place("new")
    plan = planned(source, place)
    plan.run()
    key = f"{place.with_name('.new.partial').key}/{plan.digest[:16]}/uploads"
    before = place.filesystem.cat_file(key)
    made = forge(*json.loads(before.partition(b" ")[2]))
    place.filesystem.pipe_file(key, made if isinstance(made, bytes) else resigned(made))
    for work in (plan.run, plan.commit):
        with pytest.raises(sw.ParseError, match=message):
            work()
    assert small_parts.objects(place) == {}
    place.filesystem.pipe_file(key, before)
    plan.commit(check=True)
    assert small_parts.objects(place) == expected(source, "sharded")


def test_the_name_of_another_objects_upload(small_parts: Store, source: Path) -> None:
    """It has no parts for this one: nothing is put there, and nothing made of it."""
    place = small_parts.place("new")
    plan = planned(source, place)
    plan.run(tasks=[0])
    key = f"{place.with_name('.new.partial').key}/{plan.digest[:16]}/uploads"
    of, names = json.loads(place.filesystem.cat_file(key).partition(b" ")[2])
    place.filesystem.pipe_file(key, resigned([of, ["unknown", *names[1:]]]))
    with pytest.raises(FileNotFoundError, match="has dropped an upload"):
        plan.run()
    with pytest.raises(sw.ParseError, match="tasks are missing"):
        plan.commit()
    assert small_parts.objects(place) == {}


def test_a_remainder_that_is_another(small_parts: Store, source: Path) -> None:
    place = small_parts.place("new.safetensors")
    plan = planned(source, place, "safetensors")
    plan.run()
    key = next(
        f"{place.parent.key}/.{place.name}.partial/{name}"
        for name in remains(small_parts, place)
        if name.endswith(".remainder")
    )
    data = place.filesystem.cat_file(key)
    for other in (data[:-1] + b"!", data + b"!", None):
        place.filesystem.rm_file(key) if other is None else place.filesystem.pipe_file(key, other)
        with pytest.raises(sw.ParseError, match="receipts of 1 of"):
            plan.commit()
    assert small_parts.objects(place) == {}
    assert plan.run() == 1
    plan.commit()
    assert small_parts.objects(place) == expected(source, "safetensors")


def test_a_remainder_that_changes_while_it_is_put_together(small_parts: Store, source: Path) -> None:
    """After the receipts have been found right: the task is named, and run again it is whole."""
    place = small_parts.place("new.safetensors")
    asked: list[str] = []
    changed: list[str] = []

    def info(original: Any, key: str, **more: Any) -> Any:
        if key.endswith(".remainder") and asked:
            asked.append(key)
            if asked.count(key) == 2 and not changed:
                changed.append(key)
                place.filesystem.pipe_file(key, place.filesystem.cat_file(key) + b"!")
        return original(key, **more)

    plan = planned(source, wrapped(place, info=info), "safetensors")
    plan.run()
    asked.append("from here on")
    with pytest.raises(sw.ParseError, match=r"is not what the receipt of task \d+ says; run that task again") as caught:
        plan.commit()
    number = int(str(caught.value).split("of task ")[1].split()[0])
    assert changed[0].endswith(f"/{number}.remainder")
    assert small_parts.objects(place) == {}
    assert plan.run(tasks=[number]) == 1
    plan.commit()
    assert small_parts.objects(place) == expected(source, "safetensors")


@pytest.mark.parametrize("harm", ["503", "cut", "lost"])
def test_a_store_that_fails_for_a_while(small_parts: Store, source: Path, harm: str) -> None:
    """The first three requests of each kind, of a run and then of a commit, fail, and the end is the same."""
    toxic, held = small_parts.toxic, small_parts.place("source")
    assert toxic is not None
    small_parts.put(source, held)
    wanted = expected(source, "sharded")
    for method in ("GET", "PUT", "HEAD", "POST"):
        plan = planned(held, small_parts.place("new"))
        for work in (plan.run, partial(plan.commit, check=True)):
            toxic.poison = Times(harm, 3, lambda request, method=method: request[0] == method)  # type: ignore[misc]
            work()
        toxic.calm()
        assert small_parts.objects(plan.path) == wanted  # type: ignore[arg-type]


def test_memory_that_is_too_little(s3: Store, large: Path) -> None:
    """Of a plan that is made with more than it is run with; reshard_checkpoint plans for what it has."""
    place = s3.place("new")
    plan = sw.plan_checkpoint(large, place, rules(), to="sharded")
    assert plan.is_shared
    with (
        ThreadPoolExecutor(16) as threads,
        pytest.raises(sw.LayoutError, match=r"memory is .* for each worker; a task"),
    ):
        plan.run(executor=threads, memory=2**26)
    assert uploads(place) == []
    with ThreadPoolExecutor(4) as threads:
        sw.reshard_checkpoint(large, place, rules(), to="sharded", executor=threads, memory=2**27)
    assert s3.objects(place) == expected(large, "sharded")


@pytest.mark.parametrize(
    "change",
    [
        {"share_ends": lambda numbers: numbers + 99},
        {"share_ends": lambda numbers: numbers[1:]},
        {"shares": lambda numbers: numbers[:-1]},
        {"shares": lambda numbers: numbers - [0, 1, 0, 0] * (len(numbers) // 4)},
        {"shares": lambda numbers: numbers + [0, 0, 2**62, 0] * (len(numbers) // 4)},
    ],
)
def test_shares_that_are_forged(
    s3: Store, large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    """Of a plan so large that it is checked where it is read: the run is refused, and so is the commit."""
    assert s3.toxic is not None
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.toxic.url)
    path = tmp_path / "new.swplan"
    plan = sw.plan_checkpoint(large, str(s3.place("new")), rules(), to="vllm")
    assert plan.is_shared
    plan.save(path)
    head, sections = unpacked(path)
    head["beside"] |= {"tokenizer.json": 2**22}
    sections["beside"] += bytes(2**22)
    ((name, other),) = change.items()
    sections[name] = other(np.frombuffer(sections[name], "<i8")).astype("<i8").tobytes()
    forge(path, head, sections)
    forged = sw.CheckpointPlan.load(path)
    for work in (forged.run, forged.commit):
        with pytest.raises(sw.ParseError, match="the plan cannot be read"):
            work()


class _Nowhere:
    """A filesystem of S3 in which there is nothing."""

    def call_s3(self) -> None:
        raise AssertionError

    def info(self, path: str) -> None:
        raise FileNotFoundError(path)


@pytest.mark.parametrize("to", FORMS)
def test_where_objects_are_made_whole(memory: Store, source: Path, large: Path, to: Any) -> None:
    """Of small ones, in stores without parts in any order, and where most would be too short for a part."""
    nowhere = ObjectPath("s3://bucket/new", filesystem=_Nowhere())
    place = nowhere.with_name(name_of(to))
    assert not sw.plan_checkpoint(source, place, rules(), to=to).is_shared
    assert not sw.plan_checkpoint(large, memory.place(name_of(to)), rules(), to=to).is_shared
    assert not sw.plan_checkpoint(large, place, rules(), to=to, task_bytes=2**20).is_shared
    assert sw.plan_checkpoint(large, place, rules(), to=to).is_shared == (to != "dcp")


def test_arrays_of_zeros_are_of_objects_that_are_made_whole(small_parts: Store, tmp_path: Path) -> None:
    """Of what vLLM adds once all ranks but the first have zeros, which no task reads, and so none would put."""
    tensors = {"a.experts.w2_bias": np.arange(2**14), "cut": np.arange(2.0**16).reshape(512, 128)}
    layouts = sw.LayoutMap(MESH)
    layouts["cut"], layouts["w2_bias"] = (None, "x"), (None,)
    sw.save_checkpoint(tmp_path / "source.safetensors", tensors)
    sw.reshard_checkpoint(tmp_path / "source.safetensors", tmp_path / "new", layouts, to="vllm")
    place = small_parts.place("new")
    plan = sw.plan_checkpoint(tmp_path / "source.safetensors", place, layouts, to="vllm")
    assert with_shares(plan, SMALL, TASK, 2**28) is None
    plan.run()
    plan.commit(check=True)
    assert small_parts.objects(place) == files(tmp_path / "new")


@given(st.data())
def test_parts_are_as_s3_takes_them(data: st.DataObject) -> None:
    """Whatever is cut: each byte is in one part, whose number says where it is; and none but the last is too short."""
    count = data.draw(st.integers(1, 6))
    least, task = data.draw(st.integers(1, 300)), data.draw(st.integers(16, 2000))
    limits = Limits(shared=least, shared_parts=data.draw(st.integers(1, 40)))
    tensors, layouts = {}, sw.LayoutMap(MESH)
    for number in range(count):
        shape = (4 * data.draw(st.integers(0, 12)), 4 * data.draw(st.integers(1, 12)))
        tensors[f"t{number}"] = np.zeros(shape, data.draw(st.sampled_from(["u1", "f8"])))
        layouts[f"t{number}"] = data.draw(st.sampled_from([(None, "x"), ("x", None), (None, None)]))
    to: Any = data.draw(st.sampled_from(FORMS))
    with tempfile.TemporaryDirectory() as folder:
        sw.save_checkpoint(Path(folder, "a.safetensors"), tensors, sync=False)
        place = ObjectPath("s3://bucket/new", filesystem=_Nowhere()).with_name(name_of(to))
        plan = with_shares(
            sw.plan_checkpoint(Path(folder, "a.safetensors"), place, layouts, to=to), limits, task, 2**28
        )
    if plan is None:
        return
    cuts: dict[int, list[tuple[int, int]]] = {number: [] for number in range(len(plan.files))}
    for number in range(len(plan.tasks)):
        assert plan.grid.bytes[number] > 0
        for file, begin, end, part in plan.shares(number):
            assert 0 <= begin <= part <= end <= plan.sizes[file]
            if part < end:
                cuts[file].append((part, end))
    for file, found in cuts.items():
        size = plan.sizes[file]
        edges = sorted({0, size, *(edge for span in found for edge in span)})
        spans = list(pairwise(edges))
        # No two parts share a byte: what is between edges is a part, or between two parts.
        assert len(found) == len(set(found)) == sum(span in spans for span in found)
        numbers = [limits.part_number(size, begin) for begin, _ in spans]
        assert numbers == sorted(set(numbers))
        assert all(1 <= number <= max(limits.shared_parts, 1) for number in numbers)
        assert all(end - begin >= least for begin, end in spans[:-1])
