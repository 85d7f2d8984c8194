"""Paths that a caller gives."""

from __future__ import annotations

import errno
import os
from pathlib import Path

__all__ = ["path_of"]


def path_of(file: str | os.PathLike[str]) -> Path:
    r"""Give a path; one that no file can have is an `OSError`, as one that no file has.

    >>> path_of("rules\0.toml")
    Traceback (most recent call last):
    OSError: [Errno 22] no file can have this name, which holds a null byte: 'rules\x00.toml'
    """
    path = Path(file)
    try:
        wrong = "which holds a null byte" if b"\0" in os.fsencode(path) else None
    except UnicodeEncodeError:
        wrong = "which holds half a surrogate pair"
    if wrong is not None:
        raise OSError(errno.EINVAL, f"no file can have this name, {wrong}", str(path))
    return path
