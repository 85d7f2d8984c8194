"""Whatever is beside a checkpoint already, under names that a run needs: it is not followed, written or removed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise import _core
from shardwise.store.data.own_folders import OpenFolder
from shardwise.store.write.places.folder import _may_hold
from tests.store.stores import Store
from tests.store.tasks import folder_of

TENSORS = {f"h.{i}": (np.arange(i, i + 2**16) % 999).astype("f4") for i in range(4)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    sw.save_checkpoint(tmp_path / "src.safetensors", TENSORS)
    return tmp_path / "src.safetensors"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder of the user's with some files, which nothing may change."""
    (tmp_path / "home" / "photos").mkdir(parents=True)
    (tmp_path / "home" / "letter.txt").write_text("dear all")
    (tmp_path / "home" / "photos" / "one.jpg").write_bytes(b"\xff\xd8")
    return tmp_path / "home"


def tree(folder: Path) -> dict[str, Any]:
    """All that is below a folder: the bytes of files, what links say."""
    return {
        str(path.relative_to(folder)): path.readlink()
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in sorted(folder.rglob("*"))
    }


def reshard(source: Path, **settings: Any) -> object:
    return sw.reshard_checkpoint(source, source.parent / "out", to="hf", task_bytes=2**16, **settings)


def save(source: Path) -> object:
    return sw.save_checkpoint(source.parent / "out", TENSORS, to="hf")


def convert(source: Path) -> object:
    return reshard(source, dtype="float16")


def resume(source: Path) -> object:
    return reshard(source, resume=True)


def parts(source: Path) -> object:
    return sw.plan_checkpoint(source, source.parent / "out", to="hf", task_bytes=2**16).run((1, 2))


def link(place: Path, home: Path) -> None:
    place.symlink_to(home)


def own_folder(place: Path, home: Path) -> None:
    (place / "mine").mkdir(parents=True)
    (place / "mine" / "work.txt").write_text("years")


def plan_without_mark(place: Path, home: Path) -> None:
    (place / "0123456789abcdef" / "data").mkdir(parents=True)
    (place / "0123456789abcdef" / "data" / "work.txt").write_text("years")


def file(place: Path, home: Path) -> None:
    place.write_text("a note")


def number(place: Path, home: Path) -> None:
    place.write_text("4711\n")


def fifo(place: Path, home: Path) -> None:
    os.mkfifo(place)


@pytest.mark.parametrize("name", [".out.partial", ".out.scratch"])
@pytest.mark.parametrize("planted", [link, own_folder, plan_without_mark, file, fifo])
@pytest.mark.parametrize("call", [reshard, save, resume, convert])
def test_what_no_run_has_made_is_not_removed(
    source: Path,
    home: Path,
    name: str,
    planted: Callable[[Path, Path], None],
    call: Callable[[Path], object],
) -> None:
    planted(source.parent / name, home)
    before = tree(source.parent)
    if name == ".out.scratch" and call is save:  # It needs no such folder.
        call(source)
        assert tree(home).keys() == {"letter.txt", "photos", "photos/one.jpg"}
        return
    with pytest.raises(FileExistsError, match="nothing is written through it or removed") as caught:
        call(source)
    assert str(source.parent / name) in str(caught.value.filename)
    assert tree(source.parent) == before


@pytest.mark.parametrize("planted", [link, file, fifo])
def test_parts_are_not_run_through_what_no_run_has_made(
    source: Path, home: Path, planted: Callable[[Path, Path], None]
) -> None:
    planted(source.parent / ".out.partial", home)
    before = tree(source.parent)
    with pytest.raises(FileExistsError):
        parts(source)
    assert tree(source.parent) == before


def test_what_is_beside_a_complete_checkpoint_is_not_removed_either(source: Path) -> None:
    save(source)
    own_folder(source.parent / ".out.partial", source)
    before = tree(source.parent)
    with pytest.raises(FileExistsError):
        save(source)
    assert tree(source.parent) == before


def hard_link(place: Path, other: Path) -> None:
    os.link(other, place)


@pytest.mark.parametrize("text", ["", "a letter\n", "4711\n", "shardwise process 1\n"])
@pytest.mark.parametrize("planted", [link, hard_link])
def test_a_lock_is_not_another_file(source: Path, home: Path, planted: Callable[[Path, Path], None], text: str) -> None:
    (home / "letter.txt").write_text(text)
    planted(source.parent / ".out.lock", home / "letter.txt")
    before = tree(source.parent)
    with pytest.raises(FileExistsError, match="has the name of a lock file, but is not one") as caught:
        reshard(source)
    assert caught.value.filename == str(source.parent / ".out.lock")
    assert tree(source.parent) == before


@pytest.mark.parametrize("planted", [own_folder, file, fifo, number])
def test_a_file_in_the_place_of_a_lock_stays(source: Path, planted: Callable[[Path, Path], None]) -> None:
    planted(source.parent / ".out.lock", source)
    before = tree(source.parent)
    with pytest.raises(FileExistsError, match="has the name of a lock file"):
        reshard(source)
    assert tree(source.parent) == before


@pytest.mark.parametrize("text", [b"", b"shardwise pro", b"shardwise process 4711\n"])
def test_a_lock_that_a_killed_run_has_left_is_taken(source: Path, text: bytes) -> None:
    (source.parent / ".out.lock").write_bytes(text)
    reshard(source)
    assert not (source.parent / ".out.lock").exists()


def test_a_lock_that_is_held_names_its_process(tmp_path: Path) -> None:
    lock = _core.FileLock(tmp_path / "lock")
    with pytest.raises(BlockingIOError, match=f"by process {os.getpid()}; another"):
        _core.FileLock(tmp_path / "lock")
    lock.release()


# Links within the workplace.


@pytest.fixture
def begun(source: Path) -> sw.CheckpointPlan:
    """A plan of which one part has run."""
    plan = sw.plan_checkpoint(source, source.parent / "out", to="hf", task_bytes=2**16)
    assert plan.run((1, 2)) > 0
    return plan


def moved(place: Path, home: Path) -> Path:
    """Something of a workplace, now in a folder of somebody's, and a link to it."""
    other = home / place.name
    place.rename(other)
    place.symlink_to(other)
    return other


@pytest.mark.parametrize("call", ["run", "task", "commit", "check"])
@pytest.mark.parametrize("name", ["receipts", "data", "plan", "workplace"])
def test_links_in_a_workplace_are_not_followed(begun: sw.CheckpointPlan, home: Path, name: str, call: str) -> None:
    if call in ("commit", "check"):
        begun.run((2, 2))
    if call == "task" and name == "receipts":  # Which it does not write.
        return
    places = {"workplace": folder_of(begun).root.parent, "plan": folder_of(begun).root}
    moved(places.get(name, folder_of(begun).root / name), home)
    before = tree(home.parent)
    calls: dict[str, Callable[[], object]] = {
        "run": lambda: begun.run((2, 2)),
        "task": lambda: begun.task(1).run(),
        "commit": begun.commit,
        "check": lambda: begun.commit(check=True),
    }
    with pytest.raises(FileExistsError, match="is a link that no run of shardwise has made"):
        calls[call]()
    assert tree(home.parent) == before


def test_a_hard_link_of_the_right_size_is_not_written(begun: sw.CheckpointPlan, home: Path) -> None:
    made = folder_of(begun).folder / "model.safetensors"
    (home / "precious").write_bytes(bytes(made.stat().st_size))
    made.unlink()
    os.link(home / "precious", made)
    before = tree(home.parent)
    with pytest.raises(FileExistsError, match="another name too"):
        begun.run((2, 2))
    assert (home / "precious").read_bytes() == before["home/precious"]


def test_a_hard_link_is_not_published(begun: sw.CheckpointPlan, home: Path) -> None:
    begun.run((2, 2))
    os.link(folder_of(begun).folder / "model.safetensors", home / "kept")
    with pytest.raises(FileExistsError, match="a second name"):
        begun.commit()
    assert not (home.parent / "out").exists()
    (home / "kept").unlink()
    begun.commit()


def test_a_link_in_the_place_of_a_file_is_not_published(begun: sw.CheckpointPlan, home: Path) -> None:
    begun.run((2, 2))
    moved(folder_of(begun).folder / "model.safetensors", home)
    with pytest.raises(FileExistsError, match="is a link"):
        begun.commit()
    assert not (home.parent / "out").exists()


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "config.json"])
def test_what_is_not_of_the_plan_is_not_published(begun: sw.CheckpointPlan, name: str) -> None:
    begun.run((2, 2))
    (folder_of(begun).folder / name).write_bytes(b"{}")
    with pytest.raises(FileExistsError, match="no run of shardwise has made"):
        begun.commit()
    (folder_of(begun).folder / name).unlink()
    begun.commit()


@pytest.mark.parametrize("kind", ["a link", "a hard link", "a FIFO"])
def test_the_texts_are_not_written_through_what_is_there(begun: sw.CheckpointPlan, home: Path, kind: str) -> None:
    begun.run((2, 2))
    place = folder_of(begun).folder / "shardwise.json"
    if kind == "a FIFO":
        os.mkfifo(place)
    else:
        (place.symlink_to if kind == "a link" else place.hardlink_to)(home / "letter.txt")
    with pytest.raises(FileExistsError):
        begun.commit()
    assert (home / "letter.txt").read_text() == "dear all"


def test_nobody_else_may_enter_a_workplace(begun: sw.CheckpointPlan, source: Path) -> None:
    for folder in (folder_of(begun).root, folder_of(begun).root.parent):
        assert folder.stat().st_mode & 0o777 == 0o700
    begun.run((2, 2))
    begun.commit()
    mask = os.umask(0)
    os.umask(mask)
    assert (source.parent / "out").stat().st_mode & 0o777 == 0o777 & ~mask


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_workplace_of_another_user_is_refused(begun: sw.CheckpointPlan, step: int) -> None:
    folder = (folder_of(begun).root.parent, folder_of(begun).root, folder_of(begun).folder)[step]
    begun.run((2, 2))
    os.chown(folder, 4711, 4711)
    with pytest.raises(FileExistsError, match="belongs to another user"):
        begun.run(tasks=[0])
    with pytest.raises(FileExistsError, match="belongs to another user"):
        begun.commit()


def test_paths_to_the_destination_may_have_links(source: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    sw.reshard_checkpoint(source, tmp_path / "link" / "out", to="hf")
    assert [path.name for path in (tmp_path / "real").iterdir()] == ["out"]


@pytest.mark.parametrize("through", ["link", ".."])
def test_a_destination_inside_its_source_is_refused_by_any_path(tmp_path: Path, through: str) -> None:
    sw.save_checkpoint(tmp_path / "src", TENSORS, to="hf")
    (tmp_path / "link").symlink_to(tmp_path / "src")
    target = (tmp_path / "link" if through == "link" else tmp_path / "src" / ".." / "src") / "new"
    before = tree(tmp_path)
    for call in (sw.reshard_checkpoint, sw.plan_checkpoint):
        with pytest.raises(OSError, match="dst is inside the source"):
            call(tmp_path / "src", target)
    assert tree(tmp_path) == before


def test_a_bucket_that_does_not_exist_is_named_as_that(tmp_path: Path, s3: Store) -> None:
    place = s3.place()
    away = sw.ObjectPath(f"s3://no-such-bucket/{place.name}", filesystem=place.filesystem, pause=0.001)
    with pytest.raises(FileNotFoundError, match="the bucket does not exist"):
        sw.save_checkpoint(away, {"w": np.zeros(3)}, to="hf")
    with pytest.raises(FileNotFoundError, match="the bucket does not exist"):
        sw.open_checkpoint(away)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="nothing lists the open descriptors")
def test_a_folder_that_takes_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    class Late(OpenFolder):
        def status(self, name: str) -> None:
            """As it was before the folder came."""

    (tmp_path / "receipt").mkdir()
    with Late.at(tmp_path) as folder:
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        with pytest.raises(FileExistsError), folder.file("receipt", os.O_RDONLY):
            pass
        assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_receipts_are_looked_for_where_they_may_be() -> None:
    for first, end, start, stop in itertools.product(range(4), repeat=4):
        if first < end and start < stop:
            meets = bool(set(range(first, end)) & set(range(start, stop)))
            assert _may_hold(f"{first}-{end}-host-7-1-9.jsonl", range(start, stop)) == meets
    assert _may_hold("other-9.jsonl", range(1))
    assert _may_hold("9-other.jsonl", range(1))
