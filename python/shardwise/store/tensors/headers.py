"""The bytes of files around the tensors (headers, pickles, padding, values), checked against the manifest's digest."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from ..._json import MAX_JSON
from ..data.files import Holder
from ..data.location import Location, open_file
from .checkpoint import StoredCheckpoint, StoredSum

__all__ = ["HeaderDigests", "wrong_header"]

#: The end of the name of the member with the elements, in a PyTorch container of one tensor.
_ELEMENTS = "/data/0"
#: The manifest's key for the digest of a file with a member for each tensor.
_MEMBERS = "members_sha256"
_BLOCK = 2**20


class HeaderDigests:
    """The bytes around the tensors in the files of a PyTorch checkpoint with a manifest.

    The digest is a SHA-256 of these bytes. A value that is not a tensor is represented by its CRC-32: `commit`, which
    writes the digest, knows the CRC-32 and does not read the value again.

    Args:
        files: The manifest's entry for each file, by path. Files with `frames_sha256` have a container for each tensor,
            those with `members_sha256` a member; others are not checked.
    """

    def __init__(self, checkpoint: StoredCheckpoint, files: Mapping[Location, Mapping[str, Any]]) -> None:
        self._expected = {
            name: said[key] for name, said in files.items() for key in ("frames_sha256", _MEMBERS) if key in said
        }
        self._of_members = frozenset(name for name, said in files.items() if _MEMBERS in said)
        self._files: dict[Location, Holder] = {}
        self._held: dict[Location, list[tuple[int, int, bool]]] = {}
        for value in checkpoint.objects.values() if self._expected else ():
            if value.extent is not None:
                self._note(*value.extent, is_value=True)

    def add(self, member: StoredSum) -> None:
        """Note the range of a member if it holds a tensor's elements."""
        if not self._expected:
            return
        if member.file.path in self._of_members:
            is_value = member.name.endswith("/data.pkl")
            if is_value or "/data/" in member.name:
                self._note(member.file, member.start, member.size, is_value=is_value)
        elif member.name.endswith(_ELEMENTS):
            self._note(member.file, member.start, member.size, is_value=False)

    def _note(self, file: Holder, start: int, size: int, *, is_value: bool) -> None:
        self._files[file.path] = file
        self._held.setdefault(file.path, []).append((start, start + size, is_value))

    def damaged(self) -> Iterator[Location]:
        """Yield the paths of the files in which the bytes around the tensors were changed."""
        for name, expected in self._expected.items():
            if name not in self._files or _digest(self._files[name], sorted(self._held[name])) != expected:
                yield name


def _digest(file: Holder, held: list[tuple[int, int, bool]]) -> str:
    digest, at = hashlib.sha256(), 0
    for begin, end, is_value in [*held, (file.size, file.size, False)]:
        for block in _blocks(file, at, begin):
            digest.update(block)
        if is_value:
            crc = 0
            for block in _blocks(file, begin, end):
                crc = zlib.crc32(block, crc)
            digest.update(crc.to_bytes(4, "little"))
        at = max(at, end)
    return digest.hexdigest()


def _blocks(file: Holder, begin: int, end: int) -> Iterator[bytes]:
    return (file.read(at, min(_BLOCK, end - at)) for at in range(begin, end, _BLOCK))


def wrong_header(path: Location, name: str, files: Mapping[str, Mapping[str, Any]]) -> str:
    """Compare what the manifest says about a file besides its tensors: the digest of its header, or of all of it."""
    key = next((key for key in ("header_sha256", "sha256") if key in files[name]), None)
    if key is None:
        return ""
    file = open_file(path)
    try:
        size = file.size
        if key == "header_sha256":
            length = int.from_bytes(file.read(0, min(size, 8)), "little")
            size = min(8 + length, size) if length <= MAX_JSON else 0
        digest = _sha256(file.read(0, size))
    finally:
        file.close()
    if digest == files[name][key]:
        return ""
    other = next((other for other, said in files.items() if said.get(key) == digest), None)
    what = "its header" if key == "header_sha256" else "it"
    return f"{path}: {what} is not what was written{f', but that of {other}' if other else ''}"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
