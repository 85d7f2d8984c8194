"""Saved plans whose checkpoint goes to an object store: parts anywhere, receipts in the store, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.store.data.objects import ObjectPath
from tests.store.stores import Store
from tests.store.tasks import driven, files
from tests.store.toxic import Times

# Of asynchronous connections that the server closes, and of packages that warn about each other.
pytestmark = pytest.mark.filterwarnings("ignore")

MESH = sw.DeviceMesh((4,), ("x",))


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


def resigned(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest()[:32].encode() + b" " + text + b"\n"


FORGERIES: dict[str, tuple[Any, str]] = {
    "cut": (lambda line, said: line[: len(line) // 2], "edited or is damaged"),
    "empty": (lambda line, said: b"", "has 0 bytes"),
    "edited": (lambda line, said: line.replace(b'"', b"'", 1), "edited or is damaged"),
    "another plan": (lambda line, said: ["0" * 64, *said[1:]], "of another plan"),
    "another task": (lambda line, said: [said[0], said[1] + 1, *said[2:]], "does not agree with the plan"),
    "another size": (lambda line, said: [*said[:-1], [said[-1][0] + 1, said[-1][1]]], "does not agree with the plan"),
    "no object": (lambda line, said: [*said[:-1], None], "does not agree with the plan"),
    "fewer digests": (lambda line, said: [*said[:3], said[3][1:], *said[4:]], r"digests? for \d+ range"),
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
    """The same tasks, and then the same commit: all succeed. Who comes late finds that the checkpoint is the plan's."""
    place = s3.place("new")
    driven([planned(source, place) for _ in range(3)])
    assert s3.objects(place) == expected(source, "sharded")


def test_options_of_any_filesystem_of_a_plan_are_refused(store: Store, source: Path, tmp_path: Path) -> None:
    """Those of the source's too, although the destination's of the same protocol has none."""
    held, place = store.place("source"), store.place("new")
    store.put(source, held)
    special: list[Any] = [ObjectPath(str(path), use_listings_cache=True) for path in (held, place)]
    pairs, option = [(special[0], place), (held, special[1])], "use_listings_cache"
    if store.toxic is not None:  # These have an option as they are.
        pairs, option = [(source, place), (held, source.parent / "new")], "endpoint_url"
    for src, dst in pairs:
        with pytest.raises(TypeError, match=f"has {option}, but a plan file keeps only the URL"):
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
