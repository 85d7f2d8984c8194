"""Files that are replaced as a whole or not at all."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from ._arguments import path_of

__all__ = ["replace_file"]


def replace_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Put these bytes in the place of the file, which keeps its mode; a link goes on pointing to it.

    They are written to a new file in the same folder, brought to the disk and renamed, so that whoever reads the path
    sees the old bytes or the new ones. After an error the old file is as it was, and the new one is gone.

    Raises:
        OSError: if the file cannot be written, or is no regular file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     replace_file(Path(folder, "rules.toml"), b"[rules]")
    ...     Path(folder, "rules.toml").read_text()
    '[rules]'
    """
    target = Path(os.path.realpath(path_of(path)))
    mode = _mode(target)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        # Exclusive, so that it is ours to remove; the mask of the process applies to a file that is new.
        opened = temporary.open("xb")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from None
    with opened as file:
        try:
            if mode is not None:
                temporary.chmod(mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(target)
        except BaseException:
            temporary.unlink()
            raise
    _sync_folder(target.parent)


def _mode(target: Path) -> int | None:
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):
        raise OSError(f"{str(target)!r} is not a regular file")
    return stat.S_IMODE(mode)


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return  # Only there can a folder be opened and synced.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
