"""Runs at one place of a store: several at once, overtaken, interrupted, and what they leave and remove."""

from __future__ import annotations

import threading
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardwise as sw
from shardwise.store.data.objects import ObjectPath
from shardwise.store.write.places.part_sizes import Limits
from shardwise.store.write.places.store import StorePlace
from shardwise.store.write.places.work import Work
from shardwise.store.write.run.run import run_whole
from tests.store.stores import GoogleLike, Store, wrapped
from tests.store.tasks import files

# Of asynchronous connections that the server closes, and of packages that warn about each other.
pytestmark = pytest.mark.filterwarnings("ignore")

RULES = sw.LayoutMap(sw.DeviceMesh((2,), ("x",)))
RULES["cut"] = ("x",)
FORMS = ["safetensors", "hf", "sharded", "dcp"]


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["memory", "gs", "memory, too little to hold a part back"])
@pytest.mark.parametrize("to", ["safetensors", "dcp"])
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_parts_of_any_kind_are_the_file(
    memory: Store, tmp_path_factory: pytest.TempPathFactory, to: Any, kind: str, data: st.DataObject
) -> None:
    """Tensors that take many parts, and parts that have many tensors; headers before all, and before each."""
    part = 4096
    sizes = data.draw(st.lists(st.sampled_from([0, 1, 500, 3000, 4096, 9001, 40_000]), max_size=7))
    rng = np.random.default_rng(len(sizes))
    tensors = {f"{i}": rng.integers(0, 256, size, "u1") for i, size in enumerate(sizes)}
    folder = tmp_path_factory.mktemp("parts")
    name = "a.safetensors" if to == "safetensors" else "a"
    sw.save_checkpoint(folder / name, tensors, to=to)
    google = GoogleLike()
    place = ObjectPath(f"gs://bucket/{name}", filesystem=google) if kind == "gs" else memory.place(name)
    plan = sw.plan_checkpoint(folder / name, place, to=to)
    plan = plan.with_place(StorePlace(plan, Limits(part, part)))
    report = run_whole(plan, Work(memory=4 * part if "little" in kind else 10 * part))
    if kind == "gs":
        top = f"bucket/{name}"
        assert {key[len(top) :].strip("/"): value for key, value in google.made.items()} == files(folder / name)
    else:
        assert memory.objects(place) == files(folder / name)
    assert report.bytes_written == report.bytes
    assert sw.verify_checkpoint(place).tensors == len(tensors)


def test_the_index_of_pytorch_is_the_last(store: Store, tmp_path: Path) -> None:
    """Nothing that PyTorch looks for is there before all else is; and what is there is not written over."""
    place = store.place()
    sw.save_checkpoint(place, {"cut": np.arange(8.0)}, RULES, to="dcp")
    whole = store.objects(place)
    place.filesystem.rm_file((place / ".metadata").key)
    with pytest.raises(FileExistsError, match="resume=True"):
        sw.save_checkpoint(place, {"cut": np.arange(8.0) + 1}, RULES, to="dcp")
    with pytest.raises(sw.ParseError, match="metadata"):
        sw.open_checkpoint(place)
    assert store.objects(place) == {name: data for name, data in whole.items() if name != ".metadata"}
    place.filesystem.pipe_file((place / ".metadata").key, whole[".metadata"])
    sw.save_checkpoint(tmp_path / "other", {"cut": np.arange(8.0) + 1})
    for resume in (False, True):
        with pytest.raises(FileExistsError, match="exists already"):
            sw.reshard_checkpoint(tmp_path / "other", place, RULES, to="dcp", resume=resume)
    assert store.objects(place) == whole


@pytest.fixture
def source(tmp_path: Path) -> Path:
    rng = np.random.default_rng(5)
    tensors = {"cut": rng.random(32_000), **{f"{i}": rng.random((30, 40 + i)) for i in range(6)}}
    sw.save_checkpoint(tmp_path / "source", tensors, to="hf", max_file_bytes=100_000)
    return tmp_path / "source"


def written(source: Path, place: Any, to: Any, executor: Executor | None, **more: Any) -> sw.store.WriteReport:
    report = sw.reshard_checkpoint(
        source, place, RULES, to=to, max_file_bytes=50_000, memory=80 * 2**20, executor=executor, **more
    )
    assert isinstance(report, sw.store.WriteReport)
    return report


@pytest.mark.parametrize("to", FORMS)
def test_a_store_that_keeps_less_than_it_was_given(memory: Store, source: Path, to: Any) -> None:
    """What it says that it has is compared with what was sent, before anything is called a checkpoint."""
    place = memory.place("a.safetensors" if to == "safetensors" else "a")

    def pipe_file(original: Any, key: str, data: bytes, **more: Any) -> Any:
        return original(key, data[:-1] if b"\0" in data else data, **more)

    for executor in (None, ThreadPoolExecutor(2)):
        with pytest.raises(sw.ParseError, match=r"has \d+ bytes; \d+ were written"):
            written(source, wrapped(place, pipe_file=pipe_file), to, executor, resume=True)
        assert not {"shardwise.json", ".metadata", "model.safetensors.index.json"} & set(memory.objects(place))
        for name in memory.objects(place):
            place.filesystem.rm_file((place / name).key if name else place.key)


def test_two_drivers_at_once(s3: Store, source: Path) -> None:
    """With tasks of their own, of the same plan: whoever comes late finds what it would have made itself."""
    place = s3.place("a")
    ended: list[Any] = []

    def drive() -> None:
        with ThreadPoolExecutor(2) as executor:
            try:
                ended.append(written(source, place, "dcp", executor))
            except Exception as error:
                ended.append(error)

    drivers = [threading.Thread(target=drive) for _ in range(2)]
    for driver in drivers:
        driver.start()
    for driver in drivers:
        driver.join()
    reports = [end for end in ended if isinstance(end, sw.store.WriteReport)]
    others = [end for end in ended if isinstance(end, Exception)]
    assert all(isinstance(error, FileExistsError) for error in others), others
    assert len(ended) == 2
    assert (".metadata" in s3.objects(place)) == bool(reports)
    if reports:
        assert sw.diff_checkpoints(source, place) == []


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("to", FORMS)
def test_a_driver_that_is_overtaken(memory: Store, source: Path, to: Any, fails: bool) -> None:
    """Another run commits, and removes all receipts, when the first is about to be put: it keeps its objects."""
    place = memory.place("a.safetensors" if to == "safetensors" else "a")
    whole: dict[str, bytes] = {}

    def pipe_file(original: Any, key: str, data: bytes, **more: Any) -> Any:
        if key.endswith(".receipt") and not whole:
            written(source, place, to, None, resume=True)
            whole.update(memory.objects(place))
            raise sw.ParseError("a source changed") if fails else FileExistsError(key)
        return original(key, data, **more)

    late = wrapped(place, pipe_file=pipe_file)
    if fails:
        with pytest.raises(sw.ParseError, match="a source changed"):
            written(source, late, to, None, resume=True)
    else:
        written(source, late, to, None, resume=True)
    assert whole
    assert memory.objects(place) == whole
    assert sw.diff_checkpoints(source, place) == []
    assert memory.objects(place.parent).keys() == {f"{place.name}/{name}".rstrip("/") for name in whole}


@pytest.mark.parametrize("to", FORMS[1:])
def test_a_driver_that_fails_removes_nothing_that_another_commits_at_that_moment(
    memory: Store, source: Path, to: Any
) -> None:
    """It has seen that there is no checkpoint when the other one makes these objects one: that must not succeed."""
    place, index = memory.place("a"), ".metadata" if to == "dcp" else "shardwise.json"
    waits = threading.Event()
    ended: list[Any] = []

    def other() -> None:
        def info(original: Any, key: str, **more: Any) -> Any:
            if key.rstrip("/").endswith("/removal"):  # Everything is written; all that is left to do is to look.
                waits.set()
            return original(key, **more)

        try:
            ended.append(written(source, wrapped(place, info=info), to, None, resume=True))
        except Exception as error:
            ended.append(error)
        waits.set()

    committer, first = threading.Thread(target=other), threading.Lock()

    def rm_file(original: Any, key: str, **more: Any) -> Any:
        # The first run has looked, and removes its first object.
        if not key.endswith((".receipt", "/removal")) and first.acquire(blocking=False):
            committer.start()
            assert waits.wait(60)
        return original(key, **more)

    def pipe_file(original: Any, key: str, data: bytes, **more: Any) -> Any:
        if key.endswith(index):
            raise sw.ParseError("a source changed")
        return original(key, data, **more)

    with pytest.raises(sw.ParseError, match="a source changed"):
        written(source, wrapped(place, pipe_file=pipe_file, rm_file=rm_file), to, None, resume=True)
    committer.join(60)
    if isinstance(ended[0], Exception):
        assert isinstance(ended[0], FileNotFoundError)
        assert "was removed meanwhile by a run of the same work that failed" in str(ended[0])
        assert index not in memory.objects(place)
        written(source, place, to, None, resume=True)
    assert sw.diff_checkpoints(source, place) == []
    assert not [name for name in memory.objects(place.parent) if ".partial" in name]


def test_a_removal_that_never_ends_is_named(memory: Store, source: Path) -> None:
    """Of a run that was killed while it removed what it had made."""
    place = memory.place("a")
    removal = place.with_name(".a.partial") / "removal"
    removal.filesystem.pipe_file(removal.key, b"")
    hurried = ObjectPath(str(place), filesystem=place.filesystem, attempts=2, pause=0)
    said = r"/\.a\.partial/removal says that a failed run .*; .* remove that object, and verify the checkpoint"
    with pytest.raises(TimeoutError, match=said) as caught:
        written(source, hurried, "hf", None)
    assert caught.value.filename == str(place)
    # As it says.
    removal.filesystem.rm_file(removal.key)
    assert sw.verify_checkpoint(place).damaged == ()
    assert sw.diff_checkpoints(source, place) == []
    written(source, hurried.with_name("b"), "hf", None)


@pytest.mark.parametrize("kind", ["memory", "s3"])
def test_a_run_that_fails_removes_what_it_has_made_only(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Two save the same arrays at once: what one of them finds there stays, and the other one commits it."""
    store: Store = request.getfixturevalue(kind)
    place = store.place()
    tensors = {"cut": np.arange(900.0), "b": np.arange(70), "c": np.arange(5)}
    sw.save_checkpoint(tmp_path / "a", tensors, to="hf", max_file_bytes=500)
    found = sorted(path.name for path in (tmp_path / "a").glob("*.safetensors"))
    assert len(found) > 2
    seen: list[str] = []

    def info(original: Any, key: str, **more: Any) -> Any:
        name = key.rpartition("/")[2]
        if name == found[0] and not seen:  # Put by the other one, a moment before it is looked for.
            seen.append(name)
            place.filesystem.pipe_file((place / name).key, (tmp_path / "a" / name).read_bytes())
        if name == found[-1] and seen:
            raise KeyboardInterrupt
        return original(key, **more)

    with pytest.raises(KeyboardInterrupt):
        sw.save_checkpoint(wrapped(place, info=info), tensors, to="hf", max_file_bytes=500)
    assert set(store.objects(place)) == {found[0]}
