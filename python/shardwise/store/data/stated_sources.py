"""Sources as a plan file states them."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np

from ..._text import shown
from .objects import ObjectPath
from .sources import SourceBytes, SourceFile, SourceObject, check_path

__all__ = ["Locations", "source_of"]


class Locations:
    """Locations as a plan file states them; objects of one protocol share one filesystem."""

    def __init__(self) -> None:
        self._filesystems: dict[str, Any] = {}

    def of(self, said: str) -> Any:
        """Return the location with this path or URL."""
        return self.object(said) if "://" in said and not said.startswith("/") else Path(said)

    def object(self, url: str) -> ObjectPath:
        """Return the object at this URL."""
        protocol = url.partition("://")[0]
        path = ObjectPath(url, filesystem=self._filesystems.get(protocol))
        self._filesystems[protocol] = path.filesystem
        return path


def source_of(said: Any, places: Locations) -> SourceFile | SourceObject | SourceBytes:
    """Return the source that an entry of a plan file states.

    Raises:
        ValueError: if the entry states none.
    """
    if isinstance(said, dict):
        return SourceBytes(np.array(np.frombuffer(base64.b64decode(said["bytes"], validate=True), np.uint8)))
    path, size, *rest = said
    sizes = [size, *rest[:-1]]
    if not all(isinstance(text, str) for text in (path, rest[-1])) or not all(type(each) is int for each in sizes):
        raise ValueError("it has a source that is neither a file nor an object")
    if not rest[:-1]:
        if not 0 <= size < 1 << 63:
            raise ValueError(f"it has an object of {shown(size)} bytes")
        return SourceObject(places.object(path), size, rest[-1])
    check_path(path)
    source = SourceFile(*said)
    if not all(-1 << 63 <= time < 1 << 63 for time in source.times if time is not None):
        raise ValueError(f"it has a source with the times {shown(source.times)}, which are not times of a file")
    if not 0 <= source.begin <= source.end <= source.size < 1 << 63:
        raise ValueError(f"it has a source of {source.size} bytes, with tensors from {source.begin} to {source.end}")
    return source
