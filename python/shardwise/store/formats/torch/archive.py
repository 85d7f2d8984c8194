"""The zip container of `torch.save`: uncompressed members, found by the central directory at its end.

In PyTorch's files the headers before the members state no sizes, so they are read only to find the first byte of a
member. The directory is checked against the file and against itself: members follow one another, none is compressed or
encrypted, none overlaps another.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from ...._text import counted, shown
from ....errors import ParseError
from ...data.files import Holder
from ...tensors.checkpoint import StoredSum

__all__ = ["END", "END64", "ENTRY", "LOCAL", "LOCATOR", "Archive", "ListedMember"]

#: The records of a zip file: the directory's end in 32 bits, in 64 bits, and the locator of the latter; an entry of
#: the directory, and the header before a member.
END = struct.Struct("<4s4H2LH")
END64 = struct.Struct("<4sQ2H2L4Q")
LOCATOR = struct.Struct("<4sLQL")
ENTRY = struct.Struct("<4s6H3L5H2L")
LOCAL = struct.Struct("<4s5H3L2H")
_NONE16, _NONE32 = 0xFFFF, 0xFFFFFFFF

# The bytes read at once from either end of a container: the directory of a small one and its first member fit.
_EDGE = 4096

# A directory is held in memory; 2**20 of PyTorch's members take about 100 MB.
_MAX_DIRECTORY = 1 << 30


class ListedMember(NamedTuple):
    """A member as the directory lists it.

    Attributes:
        name: The member's name.
        size: The size of its contents in bytes.
        crc: The CRC-32 of its contents.
        header: The byte of the container at which its header begins.
        limit: The byte at which the next header, or the directory, begins.
    """

    name: str
    size: int
    crc: int
    header: int
    limit: int


class Archive:
    """A zip container that is a file, or a range of one.

    Attributes:
        members: The members by name, in the order of the directory.

    Raises:
        ParseError: if it is not such a container; the message names the file and the byte.
    """

    def __init__(self, file: Holder, offset: int = 0, length: int | None = None) -> None:
        self._file = file
        self._offset = offset
        self._length = file.size - offset if length is None else length
        if offset < 0 or self._length < 0 or offset + self._length > file.size:
            raise ParseError(f"{file.path}: has {file.size} bytes; a container of {length} should begin at {offset}")
        self._edges: list[tuple[int, bytes]] = []
        for start in dict.fromkeys((0, max(0, self._length - _EDGE))):
            self._edges.append((start, file.read(offset + start, min(_EDGE, self._length - start))))
        self.members: dict[str, ListedMember] = self._directory()
        self._starts: dict[str, int] = {}

    def _error(self, position: int, problem: str) -> ParseError:
        return ParseError(f"{self._file.path}: byte {self._offset + position}: {problem}")

    def _bytes(self, start: int, count: int) -> bytes:
        if start < 0 or count < 0 or start + count > self._length:
            raise self._error(max(start, 0), f"the zip container of {self._length} bytes ends earlier")
        for begin, data in self._edges:
            if begin <= start and start + count <= begin + len(data):
                return data[start - begin : start - begin + count]
        return self._file.read(self._offset + start, count)

    def _directory(self) -> dict[str, ListedMember]:
        end, count, start, size = self._end()
        if start + size != end:
            raise self._error(start, f"the zip directory of {size} bytes does not end at byte {self._offset + end}")
        if size > _MAX_DIRECTORY or count * ENTRY.size > size:
            raise self._error(start, f"a zip directory of {size} bytes for {counted(count, 'member')}")
        data = self._bytes(start, size)
        entries: list[tuple[int, str, int, int, int]] = []
        position = 0
        for _ in range(count):
            entry, position = self._entry(data, position, start)
            entries.append(entry)
        if position != size:
            raise self._error(start + position, "the zip directory goes on after its last member")
        entries.sort()
        members = {}
        for index, (header, name, length, crc, order) in enumerate(entries):
            limit = entries[index + 1][0] if index + 1 < len(entries) else start
            if header + LOCAL.size + length > limit:
                raise self._error(header, f"the zip member {shown(name)} of {length} bytes overlaps what follows it")
            members[name] = (order, ListedMember(name, length, crc, header, limit))
        if len(members) != count:
            raise self._error(start, "two zip members have the same name")
        return {name: member for name, (_, member) in sorted(members.items(), key=lambda item: item[1][0])}

    def _end(self) -> tuple[int, int, int, int]:
        """Return the position of the directory's end record, the members' number, the directory's start and size."""
        position = self._length - END.size
        if position < 0:
            raise self._error(0, f"{self._length} bytes are too few for a zip container")
        # A comment may follow the end; PyTorch never writes one.
        record = self._bytes(position, END.size)
        if record[:4] != b"PK\5\6":
            raise self._error(position, "no end of a zip directory: not a zip container, or a truncated one")
        _, disk, first_disk, here, count, size, start, comment = END.unpack(record)
        if disk or first_disk or here != count or comment:
            raise self._error(position, "a zip container in several parts, or with a comment")
        if _NONE16 not in (count, here) and _NONE32 not in (size, start):
            return self._behind_end64(position), count, start, size
        locator = position - LOCATOR.size
        magic, disk, position64, disks = LOCATOR.unpack(self._bytes(locator, LOCATOR.size))
        if magic != b"PK\6\7" or disk or disks > 1:
            raise self._error(locator, "no end of a zip64 directory")
        record64 = END64.unpack(self._bytes(position64, END64.size))
        magic, length, _, _, disk, first_disk, here, count, size, start = record64
        if magic != b"PK\6\6" or disk or first_disk or here != count or position64 + 12 + length != locator:
            raise self._error(position64, "no end of a zip64 directory")
        return position64, count, start, size

    def _behind_end64(self, position: int) -> int:
        """Return the position before a needless zip64 end record, which PyTorch writes in large files."""
        locator = position - LOCATOR.size
        if locator < END64.size or self._bytes(locator, 4) != b"PK\6\7":
            return position
        position64: int = LOCATOR.unpack(self._bytes(locator, LOCATOR.size))[2]
        return position64 if self._bytes(position64, 4) == b"PK\6\6" else position

    def _entry(self, data: bytes, position: int, start: int) -> tuple[tuple[int, str, int, int, int], int]:
        at = start + position
        if position + ENTRY.size > len(data) or data[position : position + 4] != b"PK\1\2":
            raise self._error(at, "not a member of a zip directory")
        entry = ENTRY.unpack_from(data, position)
        flags, method, crc, packed, size = entry[3], entry[4], entry[7], entry[8], entry[9]
        name_length, extra_length, comment_length, disk, header = entry[10], entry[11], entry[12], entry[13], entry[16]
        name_at = position + ENTRY.size
        stop = name_at + name_length + extra_length + comment_length
        if stop > len(data):
            raise self._error(at, "a zip member that is cut off by the end of the directory")
        try:
            name = data[name_at : name_at + name_length].decode("utf-8")
        except UnicodeDecodeError:
            raise self._error(at, "a zip member whose name is not UTF-8") from None
        if method or flags & 0x41:
            if "code/__torch__" in name:
                raise ParseError(f"{self._file.path}: is a TorchScript program; save its state_dict with torch.save")
            what = "encrypted" if flags & 0x41 else "compressed"
            raise self._error(at, f"the zip member {shown(name)} is {what}; torch.save stores members uncompressed")
        if _NONE32 in (packed, size, header) or disk == _NONE16:
            extra = data[name_at + name_length : name_at + name_length + extra_length]
            size, packed, header, disk = _zip64(extra, size, packed, header, disk)
        if packed != size or disk:
            raise self._error(at, f"the zip member {shown(name)} has {size} bytes in {packed}")
        return (header, name, size, crc, position), stop

    def start(self, member: ListedMember) -> int:
        """Return the byte of the file at which a member's contents begin.

        Raises:
            ParseError: if its header does not agree with the directory, or it overlaps the bytes after it.
        """
        start = self._starts.get(member.name)
        if start is None:
            header = LOCAL.unpack(self._bytes(member.header, LOCAL.size))
            name = self._bytes(member.header + LOCAL.size, header[9])
            start = member.header + LOCAL.size + header[9] + header[10]
            if header[0] != b"PK\3\4" or name != member.name.encode() or header[3]:
                raise self._error(member.header, f"not the header of the zip member {shown(member.name)}")
            if start + member.size > member.limit:
                raise self._error(member.header, f"the zip member {shown(member.name)} overlaps what follows it")
            self._starts[member.name] = start
        return self._offset + start

    def read(self, member: ListedMember, most: int) -> bytes:
        """Read a member of at most `most` bytes."""
        if member.size > most:
            raise self._error(
                member.header,
                f"the zip member {shown(member.name)} has {member.size} bytes, over the limit of {most}",
            )
        return self._bytes(self.start(member) - self._offset, member.size)

    def sums(self) -> Iterator[StoredSum]:
        """Yield the CRC-32 of each member; none if PyTorch was told not to compute them and wrote zeros."""
        members = self.members.values()
        if any(member.crc for member in members):
            for member in members:
                yield StoredSum(self._file, self.start(member), member.size, member.crc, member.name)


def _zip64(extra: bytes, size: int, packed: int, header: int, disk: int) -> tuple[int, int, int, int]:
    """Return the numbers of a member with those that do not fit into 32 bits taken from its extra field."""
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, position)
        field = extra[position + 4 : position + 4 + length]
        position += 4 + length
        if kind != 1:
            continue
        values = []
        for value, none, width in ((size, _NONE32, 8), (packed, _NONE32, 8), (header, _NONE32, 8), (disk, _NONE16, 4)):
            if value == none and len(field) >= width:
                values.append(int.from_bytes(field[:width], "little"))
                field = field[width:]
            else:
                values.append(value)
        return values[0], values[1], values[2], values[3]
    return size, packed, header, disk
