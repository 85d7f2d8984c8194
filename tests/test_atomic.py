from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from shardwise._atomic import replace_file, replacing

linux = pytest.mark.skipif(sys.platform != "linux", reason="uses locks, owners and /proc as Linux has them")


def run(program: str, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(command, text=True, timeout=3600, check=False, **more)


def test_a_new_file_has_the_usual_mode(tmp_path: Path) -> None:
    old_mask = os.umask(0o027)
    try:
        replace_file(tmp_path / "new", b"text")
    finally:
        os.umask(old_mask)
    assert (tmp_path / "new").read_bytes() == b"text"
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


def test_a_replaced_file_keeps_its_mode_and_its_links(tmp_path: Path) -> None:
    target, link = tmp_path / "file", tmp_path / "link"
    target.write_bytes(b"old")
    target.chmod(0o604)
    link.symlink_to(target)
    replace_file(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o604


@linux
def test_a_replaced_file_keeps_its_owner(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"old")
    try:
        os.chown(target, 1234, 4321)
    except OSError:
        pytest.skip("only root may give files away, and not in every container")
    target.chmod(0o4750)
    replace_file(target, b"new")
    status = target.stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (1234, 4321, 0o4750)


def test_a_file_whose_owner_cannot_be_kept_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"old")

    real = os.fstat

    def foreign(descriptor: int) -> os.stat_result:
        """Of the new file: as if the old one were somebody else's."""
        status = list(real(descriptor))
        status[4], status[5] = 1234, 4321
        return os.stat_result(status)

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fstat", foreign)
    monkeypatch.setattr(os, "fchown", refuse)
    owner = f"owner {os.getuid()} and group {os.getgid()}"
    with pytest.raises(PermissionError, match=owner) as raised:
        replace_file(target, b"new")
    assert raised.value.filename == str(target)
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("failing", ["os.fsync", "pathlib.Path.replace", "os.fchmod"])
def test_after_an_error_the_old_file_is_there_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(failing, fail)
        with pytest.raises(OSError, match="No space left") as raised:
            replace_file(target, b"new")
    assert raised.value.filename == (str(target) if failing.startswith("os.") else None)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert target.read_bytes() == b"old"


def test_after_an_error_of_the_body_the_old_file_is_there_alone(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"old")

    def write() -> None:
        with replacing(target) as file:
            file.write(b"new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert target.read_bytes() == b"old"


def test_the_one_error_after_the_file_was_replaced_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"old")

    sync = os.fsync

    def fail(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(5, "Input/output error")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="the file has been replaced") as raised:
        replace_file(target, b"new")
    assert (raised.value.errno, raised.value.filename) == (5, str(target))
    assert target.read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_interruption_just_after_the_renaming_comes_out_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "file"
    replace = Path.replace

    def interrupted(self: Path, other: Path) -> None:
        replace(self, other)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replace_file(target, b"new")
    assert target.read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_longest_names_can_be_replaced(tmp_path: Path) -> None:
    for name in ("n" * 255, "é" * 127):
        for data in (b"old", b"new"):
            replace_file(tmp_path / name, data)
        assert (tmp_path / name).read_bytes() == b"new"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.heavy
@linux
def test_what_a_killed_writer_left_is_removed_and_what_a_live_one_writes_is_not(tmp_path: Path) -> None:
    program = f"""
        import os, signal
        from shardwise._atomic import replacing
        with replacing({str(tmp_path / "file")!r}) as file:
            file.write(b"part")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    """
    assert run(program).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.read_bytes() == b"part"
    replace_file(tmp_path / "other", b"other")  # Of another name: not its business.
    assert left.exists()
    with replacing(tmp_path / "file") as file:
        assert not left.exists()
        file.write(b"first")
        with replacing(tmp_path / "file") as second:
            second.write(b"second")
        assert (tmp_path / "file").read_bytes() == b"second"
    assert (tmp_path / "file").read_bytes() == b"first"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "other"]


@pytest.mark.heavy
@linux
@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "link"])
def test_an_open_file_is_written_to_where_it_stands(name: str, tmp_path: Path) -> None:
    if name == "link":
        (tmp_path / "link").symlink_to("/dev/stdout")
        name = str(tmp_path / "link")
    program = f"""
        from shardwise._atomic import replace_file
        print("before")
        replace_file({name!r}, b"data\\n")
        print("after")
    """
    with (tmp_path / "output").open("w") as output:
        inode = os.fstat(output.fileno()).st_ino
        assert run(program, stdout=output).returncode == 0
    assert (tmp_path / "output").read_text() == "before\ndata\nafter\n"
    assert (tmp_path / "output").stat().st_ino == inode
    assert run(program, stdout=subprocess.PIPE).stdout == "before\ndata\nafter\n"


@linux
def test_a_number_that_is_no_open_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        replace_file("/dev/fd/987654", b"text")


def test_only_regular_files_are_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(OSError, match="not a regular file"):
            replace_file(path, b"text")
    missing = tmp_path / "missing" / "file"
    with pytest.raises(FileNotFoundError) as raised:
        replace_file(missing, b"text")
    assert raised.value.filename == str(missing)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
