"""The zip container of `torch.save` around the elements of one tensor, whose CRC-32 is known when they are written.

Members as PyTorch's: the pickle, the byte order, the elements, the version; none is compressed, and the elements begin
at a multiple of 64 bytes. Unlike PyTorch's, the headers before the members have their sizes and CRC-32, as in any zip.
What does not fit into 32 bits is in zip64 fields.
"""

from __future__ import annotations

import struct
import zlib
from functools import lru_cache
from typing import NamedTuple

__all__ = ["ALIGNMENT", "Frame", "frame_of"]

#: The elements begin at a multiple of this many bytes of the container.
ALIGNMENT = 64

_ROOT = "archive"
_LOCAL = struct.Struct("<4s5H3L2H")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
#: The byte of either header at which the CRC-32 is.
_CRC_IN_LOCAL, _CRC_IN_ENTRY = 14, 16
_MOST32 = 0xFFFFFFFF
_PADDING = 0x4246  # "FB", a field that all readers ignore.
_UTF8 = 1 << 11
_VERSION, _VERSION64 = 20, 45
#: 1 January 1980, the first day that a zip knows: the bytes do not depend on the time of writing.
_DATE = 1 << 5 | 1


class _Member(NamedTuple):
    name: bytes
    at: int
    size: int
    crc: int


class Frame(NamedTuple):
    """The bytes before and after the elements."""

    head: bytes
    tail: bytes


class _Blank(NamedTuple):
    """A frame of elements whose CRC-32 is 0, and the places of the CRC-32 in its head and its tail."""

    head: bytes
    tail: bytes
    in_head: int
    in_tail: int


def frame_of(pickle: bytes, size: int, crc: int) -> Frame:
    """Give the frame around `size` bytes of elements with this CRC-32; its lengths do not depend on the CRC-32."""
    blank, said = _blank(pickle, size), crc.to_bytes(4, "little")
    return Frame(_with(blank.head, blank.in_head, said), _with(blank.tail, blank.in_tail, said))


def _with(data: bytes, at: int, said: bytes) -> bytes:
    return data[:at] + said + data[at + len(said) :]


@lru_cache(maxsize=1024)
def _blank(pickle: bytes, size: int) -> _Blank:
    # The layers of a model have the same boxes: most frames are made before.
    head, members = bytearray(), []
    for name, data in ((f"{_ROOT}/data.pkl", pickle), (f"{_ROOT}/byteorder", b"little")):
        members.append(_Member(name.encode(), len(head), len(data), zlib.crc32(data)))
        head += _local(members[-1]) + data
    elements = _Member(f"{_ROOT}/data/0".encode(), len(head), size, 0)
    head += _local(elements, -(len(head) + len(_local(elements))) % ALIGNMENT)
    members.append(elements)
    start, data = len(head) + size, b"3\n"
    version = _Member(f"{_ROOT}/version".encode(), start, len(data), zlib.crc32(data))
    tail = bytearray(_local(version) + data)
    members.append(version)
    directory, in_tail = start + len(tail), 0
    for member in members:
        if member is elements:
            in_tail = len(tail) + _CRC_IN_ENTRY
        tail += _entry(member)
    tail += _end(len(members), directory, start + len(tail))
    return _Blank(bytes(head), bytes(tail), elements.at + _CRC_IN_LOCAL, in_tail)


def _local(member: _Member, padding: int | None = None) -> bytes:
    """The header before a member; with padding, an extra field of that many bytes, or of the alignment more."""
    extra = b""
    size, needs = member.size, _VERSION
    if size >= _MOST32:
        extra, size, needs = struct.pack("<2H2Q", 1, 16, size, size), _MOST32, _VERSION64
    if padding is not None:
        padding = (padding - 4) % ALIGNMENT
        extra += struct.pack("<2H", _PADDING, padding) + bytes(padding)
    head = (b"PK\3\4", needs, _UTF8, 0, 0, _DATE, member.crc, size, size, len(member.name), len(extra))
    return _LOCAL.pack(*head) + member.name + extra


def _entry(member: _Member) -> bytes:
    large = [value for value in (member.size, member.size, member.at) if value >= _MOST32]
    extra = struct.pack(f"<2H{len(large)}Q", 1, 8 * len(large), *large) if large else b""
    needs = _VERSION64 if large else _VERSION
    size, at = min(member.size, _MOST32), min(member.at, _MOST32)
    head = (b"PK\1\2", needs, needs, _UTF8, 0, 0, _DATE, member.crc, size, size, len(member.name), len(extra))
    return _ENTRY.pack(*head, 0, 0, 0, 0, at) + member.name + extra


def _end(count: int, directory: int, end: int) -> bytes:
    size, wide = end - directory, b""
    if directory >= _MOST32:
        wide = _END64.pack(
            b"PK\6\6", _END64.size - 12, _VERSION64, _VERSION64, 0, 0, count, count, size, directory
        ) + _LOCATOR.pack(b"PK\6\7", 0, end, 1)
    return wide + _END.pack(b"PK\5\6", 0, 0, count, count, size, min(directory, _MOST32), 0)
