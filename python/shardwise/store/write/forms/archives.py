"""Zip containers as PyTorch writes them, from their parts: headers, the directory, and where elements begin.

Members are not compressed, and elements begin at a multiple of 64 bytes. Unlike PyTorch's, the headers before members
have their sizes and CRC-32, as in any zip. What does not fit into 32 bits is in zip64 fields.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from ...formats.torch.archive import END, END64, ENTRY, LOCAL, LOCATOR
from .files import Extent, TargetFile

__all__ = [
    "ALIGNMENT",
    "CRC_IN_ENTRY",
    "CRC_IN_LOCAL",
    "ROOT",
    "Member",
    "ZippedFile",
    "directory_entry",
    "directory_sizes",
    "end_of",
    "local",
    "local_size",
    "local_sizes",
]

#: The elements begin at a multiple of this many bytes of the container.
ALIGNMENT = 64
#: The folder of all members.
ROOT = "archive"
#: The byte of either header at which the CRC-32 is.
CRC_IN_LOCAL, CRC_IN_ENTRY = 14, 16
_MOST16, _MOST32 = 0xFFFF, 0xFFFFFFFF
_PADDING = 0x4246  # "FB", a field that all readers ignore.
_UTF8 = 1 << 11
_VERSION, _VERSION64 = 20, 45
_EXTRA = struct.calcsize("<2H")
#: 1 January 1980, the first day that a zip knows: the bytes do not depend on the time of writing.
_DATE = 1 << 5 | 1


class Member(NamedTuple):
    """A member of a zip container: its name, the first byte of its header, the size of its contents, their CRC-32."""

    name: bytes
    at: int
    size: int
    crc: int


@dataclass(frozen=True, eq=False)
class ZippedFile(TargetFile):
    """A file of zip containers. Each header states the CRC-32 of the elements after it.

    Attributes:
        extent: The first byte of the data (0) and the size of the file in bytes; `None` if the slots must be summed up.
    """

    needs_crcs: ClassVar[bool] = True
    headers_key: ClassVar[str] = "frames_sha256"

    extent: Extent | None = None

    @property
    def start(self) -> int:
        """Always 0: slots are counted from the beginning of the file."""
        return 0

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.end if self.extent is None else self.extent.size


def local(member: Member, padding: int | None = None) -> bytes:
    """Return the local header of a member.

    With `padding`, an extra field of that many bytes is added; below 4, of that many and `ALIGNMENT` more.
    """
    extra = b""
    size, needs = member.size, _VERSION
    if size >= _MOST32:
        extra, size, needs = struct.pack("<2H2Q", 1, 16, size, size), _MOST32, _VERSION64
    if padding is not None:
        padding = (padding - 4) % ALIGNMENT
        extra += struct.pack("<2H", _PADDING, padding) + bytes(padding)
    head = (b"PK\3\4", needs, _UTF8, 0, 0, _DATE, member.crc, size, size, len(member.name), len(extra))
    return LOCAL.pack(*head) + member.name + extra


def local_size(member: Member) -> int:
    """Return the bytes of a member's local header without padding.

    >>> [local_size(one) == len(local(one)) for one in (Member(b"a", 0, 2**32 - 2, 0), Member(b"bc", 0, 2**32, 0))]
    [True, True]
    """
    return LOCAL.size + len(member.name) + (_EXTRA + 16 if member.size >= _MOST32 else 0)


def local_sizes(names: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the bytes of each member's local header with the least padding.

    Args:
        names: The bytes of each member's name.
        sizes: The bytes of each member's contents.

    >>> members = [Member(b"a" * length, 0, size, 0) for length in (1, 300) for size in (0, 2**32 - 2, 2**32 - 1)]
    >>> found = local_sizes(np.array([len(one.name) for one in members]), np.array([one.size for one in members]))
    >>> found.tolist() == [len(local(one, 4)) for one in members]
    True
    """
    found: npt.NDArray[np.int64] = LOCAL.size + names + _EXTRA + (sizes >= _MOST32) * (_EXTRA + 16)
    return found


def directory_sizes(
    names: npt.NDArray[np.int64], at: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return the bytes of each member's entry in the directory.

    Args:
        names: The bytes of each member's name.
        at: The byte at which each member's header begins.
        sizes: The bytes of each member's contents.

    >>> places = [(at, size) for at in (9, 2**32) for size in (0, 2**32 - 2, 2**32 - 1)]
    >>> members = [Member(b"a" * length, *place, 0) for length in (1, 300) for place in places]
    >>> columns = ([len(one.name) for one in members], [one.at for one in members], [one.size for one in members])
    >>> directory_sizes(*map(np.array, columns)).tolist() == [len(directory_entry(one)) for one in members]
    True
    """
    large = 2 * (sizes >= _MOST32) + (at >= _MOST32)
    found: npt.NDArray[np.int64] = ENTRY.size + names + (large > 0) * _EXTRA + 8 * large
    return found


def directory_entry(member: Member) -> bytes:
    """Return the entry of a member in the directory."""
    large = [value for value in (member.size, member.size, member.at) if value >= _MOST32]
    extra = struct.pack(f"<2H{len(large)}Q", 1, 8 * len(large), *large) if large else b""
    needs = _VERSION64 if large else _VERSION
    size, at = min(member.size, _MOST32), min(member.at, _MOST32)
    head = (b"PK\1\2", needs, needs, _UTF8, 0, 0, _DATE, member.crc, size, size, len(member.name), len(extra))
    return ENTRY.pack(*head, 0, 0, 0, 0, at) + member.name + extra


def end_of(count: int, directory: int, end: int) -> bytes:
    """Return the records at the end of a container.

    Args:
        count: The number of members.
        directory: The byte at which the directory begins.
        end: The byte after the directory.
    """
    size, wide, short = end - directory, b"", min(count, _MOST16)
    if directory >= _MOST32 or count >= _MOST16:
        wide = END64.pack(
            b"PK\6\6", END64.size - 12, _VERSION64, _VERSION64, 0, 0, count, count, size, directory
        ) + LOCATOR.pack(b"PK\6\7", 0, end, 1)
    return wide + END.pack(b"PK\5\6", 0, 0, short, short, min(size, _MOST32), min(directory, _MOST32), 0)
