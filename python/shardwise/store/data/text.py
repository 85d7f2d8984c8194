"""Names, shapes and boxes read from files: checks, and texts for messages."""

from __future__ import annotations

import math
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from ..._text import shown
from ...errors import ParseError

__all__ = [
    "MAX_DIMS",
    "MAX_NAME",
    "are_sizes",
    "box_text",
    "checked_name",
    "checked_shape",
    "stays_inside",
]

#: The longest name of a tensor, in bytes of UTF-8.
MAX_NAME = 4096

#: The most dims of a tensor, the same as of a numpy array.
MAX_DIMS = 64

_MAX_SIZE = 2**63 - 1


def are_sizes(value: Any) -> bool:
    """Return whether a value from JSON is a list of integers from 0 to 2**63 - 1."""
    if not isinstance(value, list):
        return False
    # `type`, not `isinstance`: a bool is not a size. JSON's 1.0 arrives as a float. A loop, because most lists are
    # shapes, for which `all` takes longer than the comparisons.
    for size in value:  # noqa: SIM110
        if type(size) is not int or not 0 <= size <= _MAX_SIZE:
            return False
    return True


def box_text(box: Any) -> str:
    """Return a box of starts and stops as text, as in slicing.

    >>> box_text(((0, 2), (3, 5)))
    '[0:2, 3:5]'
    """
    try:
        sides = [f"{start}:{stop}" for start, stop in list(box)[:8]]
    except (TypeError, ValueError):  # Not a box; a message is not the place to say so.
        return shown(box)
    return f"[{', '.join([*sides, '...'] if len(box) > 8 else sides)}]"


def stays_inside(name: str) -> bool:
    """Return whether a relative path, given in a file, stays inside the file's folder.

    Only the text is judged: a link may lead elsewhere, as in Hugging Face's cache, where every file is a link.
    """
    windows = PureWindowsPath(name)
    return bool(PurePosixPath(name).name and "\0" not in name and ".." not in windows.parts and not windows.anchor)


def checked_shape(shape: Any, bits: int, name: str, where: object) -> tuple[int, ...]:
    """Return a shape that a file states, if a tensor can have it: at most 64 dims, and at most 2**63 - 1 bytes.

    Raises:
        ParseError: if it cannot; the message names the tensor, and `where` it is stated.
    """
    sizes = list(shape) if isinstance(shape, (list, tuple)) else shape
    if not are_sizes(sizes):
        raise ParseError(f"{where}: tensor {shown(name)}: shape {shown(shape)} is not sizes from 0 to 2**63 - 1")
    if len(sizes) > MAX_DIMS:
        raise ParseError(f"{where}: tensor {shown(name)} has {len(sizes)} dims, over the limit of {MAX_DIMS}")
    if math.prod(sizes) * bits > 8 * _MAX_SIZE:
        raise ParseError(f"{where}: tensor {shown(name)} of shape {shown(shape)} has more than 2**63 - 1 bytes")
    return tuple(sizes)


def checked_name(name: object, where: object) -> str:
    """Return a tensor's name that a file states, if it is text of at most 4,096 bytes.

    Raises:
        ParseError: if it is not.
    """
    # No character takes more than four bytes, so a short name needs no counting.
    if not isinstance(name, str) or (
        4 * len(name) > MAX_NAME and len(name.encode("utf-8", "surrogatepass")) > MAX_NAME
    ):
        raise ParseError(f"{where}: the name {shown(name)} is not text of at most {MAX_NAME} bytes")
    return name
