from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from shardwise._atomic import replace_file


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


@pytest.mark.parametrize("failing", ["os.fsync", "pathlib.Path.replace", "pathlib.Path.chmod"])
def test_after_an_error_the_old_file_is_there_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(failing, fail)
        with pytest.raises(OSError, match="No space left"):
            replace_file(target, b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert target.read_bytes() == b"old"


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
