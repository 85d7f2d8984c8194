"""Saved plans whose checkpoint goes to an object store: parts anywhere, receipts in the store, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.pieces import Piece, Pieces
from shardwise.store.data.objects import ObjectPath
from shardwise.store.write.plan.grids import FileGrid
from tests.store.stores import Store
from tests.store.tasks import files
from tests.store.toxic import Times

# Of asynchronous connections that the server closes, and of packages that warn about each other.
pytestmark = pytest.mark.filterwarnings("ignore")

MESH = sw.DeviceMesh((4,), ("x",))
FORMS = ["hf", "sharded", "dcp"]


def rules() -> sw.LayoutMap:
    layouts = sw.LayoutMap(MESH)
    layouts["cut"] = (None, "x")
    return layouts


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint with tied tensors, one without elements, and pieces that are stored more than once."""
    rng = np.random.default_rng(5)
    cut = rng.random((16, 240))
    tensors = {"cut": cut, "tied": cut, "none": np.zeros((0, 3)), **{f"{i}": rng.random(900 + i) for i in range(6)}}
    sw.save_checkpoint(tmp_path / "source", tensors, {"cut": sw.TensorLayout(("x", None), MESH)}, to="sharded")
    return tmp_path / "source"


def planned(source: Any, place: Any, to: Any = "sharded", **more: Any) -> sw.CheckpointPlan:
    return sw.plan_checkpoint(source, place, rules(), to=to, **{"max_file_bytes": 30_000, **more})


def expected(source: Path, to: Any) -> dict[str, bytes]:
    sw.reshard_checkpoint(source, source.parent / "direct", rules(), to=to, max_file_bytes=30_000)
    return files(source.parent / "direct")


@given(st.lists(st.integers(1, 1000), max_size=12), st.integers(1, 20))
def test_parts_are_as_equal_as_tasks_allow(sizes: list[int], parts: int) -> None:
    """Each task is in one part, which is off its share by a task at most; tasks of like bytes have a part each."""
    tensors = {f"{i}": np.zeros(size, "u1") for i, size in enumerate(sizes)}
    with tempfile.TemporaryDirectory() as folder:
        sw.save_checkpoint(Path(folder, "a.safetensors"), tensors, sync=False)
        plan = sw.plan_checkpoint(Path(folder, "a.safetensors"), "memory://parts", to="hf", max_file_bytes=1)
    shares = [plan.part(part, parts) for part in range(1, parts + 1)]
    assert [number for share in shares for number in share] == list(range(len(plan.tasks)))
    written = plan.part_bytes(parts)[:, 1]
    assert written.sum() == sum(sizes)
    assert (abs(written - sum(sizes) / parts) <= max(sizes, default=1) + 1).all()
    if sizes and parts == len(sizes) and max(sizes) * 2 * parts < min(sizes) * (2 * parts + 1):
        assert [len(share) for share in shares] == [1] * parts


def resigned(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest()[:32].encode() + b" " + text + b"\n"


FORGERIES: dict[str, tuple[Any, str]] = {
    "cut": (lambda line, said: line[: len(line) // 2], "edited or is damaged"),
    "empty": (lambda line, said: b"", "has 0 bytes"),
    "edited": (lambda line, said: line.replace(b'"', b"'", 1), "edited or is damaged"),
    "another plan": (lambda line, said: ["0" * 64, *said[1:]], "of another plan"),
    "another task": (lambda line, said: [said[0], said[1] + 1, *said[2:]], "something else than the plan"),
    "another size": (lambda line, said: [*said[:-1], [said[-1][0] + 1, said[-1][1]]], "something else than the plan"),
    "no object": (lambda line, said: [*said[:-1], None], "something else than the plan"),
    "fewer digests": (lambda line, said: [*said[:3], said[3][1:], *said[4:]], "digests for its ranges"),
    "fewer ranges": (lambda line, said: [*said[:2], said[2][1:], *said[3:]], "ranges that are not the plan's"),
    "a text": (lambda line, said: [*said[:-1], [str(said[-1][0]), said[-1][1]]], "that no task writes"),
    "a large digest": (lambda line, said: [*said[:3], ["f" * 40] * len(said[3]), *said[4:]], "no task writes"),
    "short": (lambda line, said: said[:3], "that no task writes"),
    "deep": (lambda line, said: resigned(b"[" * 100_000), "that no task writes"),
}


@pytest.mark.parametrize("kind", FORGERIES)
def test_receipts_that_are_forged(memory: Store, source: Path, kind: str) -> None:
    place = memory.place("new")
    plan = planned(source, place)
    plan.run()
    forge, message = FORGERIES[kind]
    key = f"{place.with_name('.new.partial').key}/{plan.digest[:16]}/1.receipt"
    line = place.filesystem.cat_file(key)
    made = forge(line, json.loads(line.partition(b" ")[2]))
    place.filesystem.pipe_file(key, made if isinstance(made, bytes) else resigned(json.dumps(made).encode()))
    before = memory.objects(place)
    with pytest.raises((sw.ParseError, FileExistsError), match=message) as caught:
        plan.commit()
    assert len(str(caught.value)) < 400
    assert memory.objects(place) == before
    # What is wrong is removed; the task is run again, and finds what it made.
    place.filesystem.rm_file(key)
    with pytest.raises(sw.ParseError, match=r"receipts of 1 of 4 tasks are missing: 1"):
        plan.commit()
    assert plan.run() == 1
    plan.commit(check=True)
    assert memory.objects(place) == expected(source, "sharded")


def test_the_same_bytes_with_another_mark_are_the_same_object(store: Store, source: Path) -> None:
    """As after an object was made again, in parts of other sizes: its receipt and the store name two marks."""
    place = store.place("new")
    plan = planned(source, place)
    plan.run()
    first = place / plan.files[0].name
    data = store.objects(first)[""]
    key = f"{place.with_name('.new.partial').key}/{plan.digest[:16]}/0.receipt"
    before = place.filesystem.cat_file(key)
    said = json.loads(before.partition(b" ")[2])
    place.filesystem.pipe_file(key, resigned(json.dumps([*said[:-1], [said[-1][0], "another"]]).encode()))
    assert plan.run(tasks=[0]) == 1  # It finds the object, and two receipts that differ in the mark only.
    assert json.loads(place.filesystem.cat_file(key).partition(b" ")[2])[-1] == said[-1]
    place.filesystem.pipe_file(key, resigned(json.dumps([*said[:-1], [said[-1][0], "another"]]).encode()))
    plan.commit()
    assert store.objects(first) == {"": data}
    assert store.objects(place) == expected(source, "sharded")


def test_a_receipt_with_another_digest_is_found_by_reading_all(memory: Store, source: Path) -> None:
    place = memory.place("new")
    plan = planned(source, place)
    plan.run()
    key = f"{place.with_name('.new.partial').key}/{plan.digest[:16]}/0.receipt"
    said = json.loads(place.filesystem.cat_file(key).partition(b" ")[2])
    said[3][0] = f"{int(said[3][0], 16) ^ 1:x}"
    place.filesystem.pipe_file(key, resigned(json.dumps(said).encode()))
    with pytest.raises(sw.ParseError, match="is not what its receipt says"):
        plan.commit(check=True)
    with pytest.raises(sw.ParseError, match="two receipts of task 0 disagree"):
        plan.run(tasks=[0])
    # Believed, it is in the manifest, where it is found.
    plan.commit()
    with pytest.raises(sw.ParseError):
        sw.verify_checkpoint(place)


def test_objects_in_the_way_and_objects_that_are_replaced(store: Store, source: Path) -> None:
    place = store.place("new")
    plan = planned(source, place)
    first, second = (place / file.name for file in plan.files[:2])
    other = bytes(plan.sizes[0])
    place.filesystem.pipe_file(first.key, other)
    with pytest.raises(FileExistsError, match="exists already"):
        plan.run()
    assert store.objects(first) == {"": other}
    place.filesystem.rm_file(first.key)
    assert plan.run() == 4
    place.filesystem.pipe_file(second.key, store.objects(second)[""][:-1] + b"!")
    with pytest.raises(FileExistsError, match="exists already"):
        plan.commit()
    for again in (lambda: plan.run(tasks=[1]), lambda: plan.commit(check=True)):
        with pytest.raises(FileExistsError, match="exists already"):
            again()
    place.filesystem.rm_file(second.key)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        plan.commit()
    assert "shardwise.json" not in store.objects(place)


def test_bytes_that_another_has_made_meanwhile_are_counted_once(
    memory: Store, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(source, memory.place("new"))
    seen: list[tuple[int, int]] = []
    plan.run()
    monkeypatch.setattr(ObjectPath, "is_file", lambda path: False)
    plan.run(tasks=range(len(plan.tasks)), progress=lambda *at: seen.append(at))
    done = [at[0] for at in seen]
    assert done == sorted(set(done))
    assert seen[-1] == (plan.nbytes, plan.nbytes)


@pytest.mark.parametrize("harm", ["503", "cut", "lost"])
def test_a_store_that_fails_for_a_while(s3: Store, source: Path, harm: str) -> None:
    """The first three requests of each kind, of a run and then of a commit, fail, and the end is the same."""
    toxic, held = s3.toxic, s3.place("source")
    assert toxic is not None
    s3.put(source, held)
    wanted = expected(source, "sharded")
    harmed: set[tuple[str, str]] = set()
    for method in ("GET", "PUT", "HEAD", "POST"):
        plan = planned(held, s3.place("new"))
        for name, work in (("run", plan.run), ("commit", partial(plan.commit, check=True))):
            poison = Times(harm, 3, lambda request, method=method: request[0] == method)  # type: ignore[misc]
            toxic.poison = poison
            work()
            if poison.left < 3:
                harmed.add((name, method))
        toxic.calm()
        assert s3.objects(plan.path) == wanted  # type: ignore[arg-type]
    assert harmed >= {(name, method) for name in ("run", "commit") for method in ("GET", "PUT", "HEAD")}


def test_two_at_once(s3: Store, source: Path) -> None:
    """The same tasks, and then the same commit: all succeed."""
    place = s3.place("new")
    ended: list[Any] = []

    def drive(plan: sw.CheckpointPlan) -> None:
        try:
            plan.run(tasks=range(len(plan.tasks)))
            ended.append("run")
            barrier.wait()
            ended.append(plan.commit())
        except Exception as error:
            ended.append(error)

    barrier = threading.Barrier(3)
    drivers = [threading.Thread(target=drive, args=(planned(source, place),)) for _ in range(3)]
    for driver in drivers:
        driver.start()
    for driver in drivers:
        driver.join()
    assert ended.count("run") == 3
    # Who comes late finds the checkpoint, and that it is the plan's.
    assert sum(isinstance(end, sw.store.WriteReport) for end in ended) == 3, ended
    assert s3.objects(place) == expected(source, "sharded")


def test_what_no_saved_plan_does(store: Store, source: Path, tmp_path: Path) -> None:
    held = store.place("source")
    store.put(source, held)
    plan = planned(source, held.with_name("new"))
    if store.toxic is not None:
        with pytest.raises(TypeError, match="has endpoint_url; a plan file keeps URLs"):
            plan.save(tmp_path / "new.swplan")
        assert not (tmp_path / "new.swplan").exists()
    with pytest.raises(FileExistsError, match="exists already"):
        sw.plan_checkpoint(source, held)


def test_options_of_any_filesystem_of_a_plan_are_refused(memory: Store, source: Path, tmp_path: Path) -> None:
    """Those of the source's too, although the destination's of the same protocol has none."""
    held, place = memory.place("source"), memory.place("new")
    memory.put(source, held)
    special = [ObjectPath(str(path), use_listings_cache=True) for path in (held, place)]
    for src, dst in ((special[0], place), (held, special[1])):
        with pytest.raises(TypeError, match="has use_listings_cache; a plan file keeps URLs"):
            planned(src, dst).save(tmp_path / "new.swplan")
        assert not (tmp_path / "new.swplan").exists()


def environment(s3: Store, **more: str) -> dict[str, str]:
    assert s3.toxic is not None
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    kept |= {"AWS_EC2_METADATA_DISABLED": "true", "AWS_DEFAULT_REGION": "us-east-1", "HOME": "/nowhere"}
    return {**kept, "AWS_ENDPOINT_URL": s3.toxic.url, **more}


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_the_command_by_processes_of_which_one_is_killed(s3: Store, source: Path, tmp_path: Path) -> None:
    """A plan, parts on any machine, one of which dies between an object and its receipt; and the commit."""
    place = s3.place("new")
    (tmp_path / "rules.toml").write_text('[rules]\n"cut" = [[], ["x"]]\n')
    env = environment(s3, AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY="secret")

    def command(*words: Any, kept: dict[str, str] = env) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "shardwise", *map(str, words)]
        return subprocess.run(line, env=kept, capture_output=True, text=True, timeout=3600)

    plan = tmp_path / "new.swplan"
    made = command("plan", source, place, "--mesh", "x=4", "--rules", tmp_path / "rules.toml", "--save", plan)
    assert made.returncode == 0, made.stderr
    refused = command("run", plan, "--part", "1/2", kept=environment(s3))
    assert refused.returncode == 2
    assert "AWS_ACCESS_KEY_ID" in refused.stderr
    dying = (
        "import os, signal, sys\n"
        "from shardwise import CheckpointPlan\n"
        "from shardwise.store.write.places.store import StorePlace\n"
        "StorePlace.keep = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "CheckpointPlan.load(sys.argv[1]).run((1, 2))\n"
    )
    killed = subprocess.run([sys.executable, "-c", dying, str(plan)], env=env, timeout=3600)
    assert killed.returncode == -signal.SIGKILL
    assert len(s3.objects(place)) == 1
    early = command("commit", plan)
    assert early.returncode == 2
    assert "receipts of 4 of 4 tasks are missing" in early.stderr, early.stderr
    for part in ("2/2", "1/2"):
        ran = command("run", plan, "--part", part)
        assert ran.returncode == 0, ran.stderr
    done = command("commit", plan, "--check")
    assert done.returncode == 0, done.stderr
    assert s3.objects(place) == expected(source, "sharded")


@given(st.data())
def test_what_replicas_share_with_files_is_read_for_them(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=3)))
    cuts = [sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    sides = [list(pairwise(edges)) for edges in cuts]
    tiles: list[Any] = [()]
    for dim in sides:
        tiles = [(*tile, side) for tile in tiles for side in dim]
    owners = [data.draw(st.integers(0, 2)) for _ in tiles]
    held = [[(0, tile) for tile, owner in zip(tiles, owners, strict=True) if owner == file] for file in range(3)]
    corners = np.array(tiles, np.int64).reshape(len(tiles), len(shape), 2).transpose(0, 2, 1)
    places = np.column_stack([np.array(owners, np.int64), np.zeros(len(owners), np.int64)])
    written = Pieces.dense(places, corners, 2), 2
    grid = FileGrid(np.zeros(3, np.int64), held.__getitem__, lambda tensor: written)
    assert len(grid) == 3
    owned = np.zeros(shape, int)
    for tile, owner in zip(tiles, owners, strict=True):
        owned[tuple(slice(*side) for side in tile)] = owner
    boxes = []
    for _ in range(4):
        starts = [data.draw(st.integers(0, size - 1)) for size in shape]
        boxes.append(
            [(start, data.draw(st.integers(start + 1, size))) for start, size in zip(starts, shape, strict=True)]
        )
    found = np.zeros(3, np.int64)
    grid.add_overlaps(0, Pieces.of([Piece(tuple(box), "r", 0, (0,) * len(shape)) for box in boxes], len(shape)), found)
    for file in range(3):
        assert found[file] == sum(2 * int((owned[tuple(slice(*side) for side in box)] == file).sum()) for box in boxes)
