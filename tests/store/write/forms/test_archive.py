"""Zip containers: what Python's zipfile writes, and everything that may be wrong in one."""

import io
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from shardwise.store.data.files import DataFile
from shardwise.store.formats.torch.archive import Archive

MEMBERS = {"archive/data.pkl": b"pickle", "archive/data/0": bytes(range(100)), "archive/empty": b"", "é": b"x"}


def written(members: dict[str, bytes] = MEMBERS, **options: object) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **options) as archive:  # type: ignore[call-overload]
        for name, data in members.items():
            archive.writestr(name, data)
    return file.getvalue()


def opened(tmp_path: Path, data: bytes, offset: int = 0, length: int | None = None) -> Archive:
    path = tmp_path / "a.zip"
    path.write_bytes(data)
    return Archive(DataFile(path), offset, length)


def test_members_are_those_of_zipfile(tmp_path: Path) -> None:
    archive = opened(tmp_path, written())
    assert list(archive.members) == list(MEMBERS)
    for name, data in MEMBERS.items():
        member = archive.members[name]
        assert (member.size, member.crc) == (len(data), zlib.crc32(data))
        assert archive.read(member, 1000) == data
    assert [(each.name, each.crc) for each in archive.sums()] == [(n, zlib.crc32(d)) for n, d in MEMBERS.items()]
    assert opened(tmp_path, written({})).members == {}


def test_a_range_of_a_file_is_a_container_too(tmp_path: Path) -> None:
    data = written()
    archive = opened(tmp_path, b"before" + data + b"behind", 6, len(data))
    member = archive.members["archive/data/0"]
    assert archive.read(member, 1000) == MEMBERS["archive/data/0"]
    assert (tmp_path / "a.zip").read_bytes()[archive.start(member) :].startswith(MEMBERS["archive/data/0"])
    for offset, length in ((0, len(data)), (6, len(data) - 1), (6, len(data) + 1), (7, len(data) - 1), (6, 10**9)):
        with pytest.raises(sw.ParseError):
            opened(tmp_path, b"before" + data + b"behind", offset, length)


def test_a_flipped_bit_changes_the_checksum(tmp_path: Path) -> None:
    data = bytearray(written())
    data[data.index(MEMBERS["archive/data/0"]) + 50] ^= 1
    found = {each.name: each for each in opened(tmp_path, bytes(data)).sums()}
    for name, each in found.items():
        is_right = zlib.crc32(each.file.read(each.start, each.size)) == each.crc
        assert is_right == (name != "archive/data/0")


def test_checksums_that_were_not_computed_are_not_given(tmp_path: Path) -> None:
    # As torch.serialization.set_crc32_options(False) writes them: zeros.
    data = written({"archive/data.pkl": b"pickle", "archive/data/0": bytes(range(100))})
    directory = data.index(b"PK\1\2")
    entries = [at for at in range(directory, len(data)) if data[at : at + 4] == b"PK\1\2"]
    for at in entries:
        data = data[: at + 16] + bytes(4) + data[at + 20 :]
    assert len(entries) == 2
    assert list(opened(tmp_path, data).sums()) == []


def zip64(members: dict[str, bytes]) -> bytes:
    """By hand: sizes, offsets and the directory's place all in their 64-bit fields."""
    data, directory = b"", b""
    for name, content in members.items():
        header = len(data)
        text, crc = name.encode(), zlib.crc32(content)
        extra = struct.pack("<HHQQ", 1, 16, len(content), len(content))
        data += struct.pack(
            "<4s5H3L2H", b"PK\3\4", 45, 0x800, 0, 0, 0, crc, 2**32 - 1, 2**32 - 1, len(text), len(extra)
        )
        data += text + extra + content
        extra = struct.pack("<HHHHQQQ", 99, 0, 1, 24, len(content), len(content), header)
        fields = (45, 45, 0x800, 0, 0, 0, crc, 2**32 - 1, 2**32 - 1, len(text), len(extra), 0, 0, 0, 0, 2**32 - 1)
        directory += struct.pack("<4s6H3L5H2L", b"PK\1\2", *fields) + text + extra
    start, count = len(data), len(members)
    end64 = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(directory), start)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, start + len(directory), 1)
    return (
        data
        + directory
        + end64
        + locator
        + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 2**16 - 1, 2**16 - 1, 2**32 - 1, 2**32 - 1, 0)
    )


def test_zip64(tmp_path: Path) -> None:
    data = zip64(MEMBERS)
    with zipfile.ZipFile(io.BytesIO(data)) as peer:
        assert {name: peer.read(name) for name in peer.namelist()} == MEMBERS
    archive = opened(tmp_path, data)
    assert {name: archive.read(member, 1000) for name, member in archive.members.items()} == MEMBERS
    # A zip64 end that nothing needs, as PyTorch writes one.
    plain = written()
    start, size = struct.unpack("<LL", plain[-10:-2])[::-1]
    end64 = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 4, 4, size, start)
    both = plain[:-22] + end64 + struct.pack("<4sLQL", b"PK\6\7", 0, len(plain) - 22, 1) + plain[-22:]
    archive = opened(tmp_path, both)
    assert {name: archive.read(member, 1000) for name, member in archive.members.items()} == MEMBERS


def patched(change: Callable[[bytearray], None], members: dict[str, bytes] = MEMBERS) -> bytes:
    data = bytearray(written(members))
    change(data)
    return bytes(data)


def entry(data: bytearray, number: int) -> int:
    """Where the entry of a member begins in the directory."""
    position = -1
    for _ in range(number + 1):
        position = data.index(b"PK\1\2", position + 1)
    return position


def put(entry_number: int, offset: int, form: str, value: int) -> Callable[[bytearray], None]:
    return lambda data: struct.pack_into(form, data, entry(data, entry_number) + offset, value)


def both(first: Callable[[bytearray], None], second: Callable[[bytearray], None]) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        first(data)
        second(data)

    return change


def end(offset: int, form: str, value: int) -> Callable[[bytearray], None]:
    return lambda data: struct.pack_into(form, data, len(data) - 22 + offset, value)


WRONG = {
    "deflated": (written(compression=zipfile.ZIP_DEFLATED), "is compressed"),
    "encrypted": (patched(put(1, 8, "<H", 1)), "is encrypted"),
    "strongly encrypted": (patched(put(1, 8, "<H", 0x40)), "is encrypted"),
    "sizes that differ": (patched(put(1, 20, "<L", 99)), "has 100 bytes in 99"),
    "an offset past the end": (patched(put(3, 42, "<L", 10**6)), "overlaps what follows"),
    "two members at one place": (patched(put(2, 42, "<L", 0)), "overlaps what follows"),
    "a member over the next": (patched(both(put(1, 20, "<L", 150), put(1, 24, "<L", 150))), "overlaps"),
    "a size past the end": (patched(both(put(3, 20, "<L", 2**31), put(3, 24, "<L", 2**31))), "overlaps"),
    "one name twice": (patched(lambda data: None, {"ab": b"1", "ac": b"2"}).replace(b"ac", b"ab"), "the same name"),
    "a name that is not UTF-8": (written().replace("é".encode(), b"\xff\xfe"), "not UTF-8"),
    "more members than there are": (patched(both(end(8, "<H", 9), end(10, "<H", 9))), "directory"),
    "fewer members than there are": (patched(both(end(8, "<H", 1), end(10, "<H", 1))), "goes on"),
    "counts that differ": (patched(end(8, "<H", 1)), "several parts"),
    "a disk number": (patched(end(4, "<H", 1)), "several parts"),
    "a member on another disk": (patched(put(1, 34, "<H", 1)), "has 100 bytes in 100"),
    "a comment": (patched(end(20, "<H", 1)) + b"c", "not a zip container"),
    "a comment that is not there": (patched(end(20, "<H", 1)), "comment"),
    "a directory elsewhere": (patched(end(16, "<L", 5)), "does not end at byte"),
    "a directory past the end": (patched(end(16, "<L", 2**31)), "does not end at byte"),
    "bytes behind it": (written() + b"x", "not a zip container"),
    "bytes before it": (b"x" + written(), "does not end at byte"),
    "nothing": (b"", "too few"),
    "no zip": (bytes(1000), "not a zip container"),
    "zip64 without its end": (patched(end(12, "<L", 2**32 - 1)), "zip64"),
    "a zip64 end past the end": (
        zip64(MEMBERS)[:-34] + struct.pack("<Q", 2**62) + zip64(MEMBERS)[-26:], "ends earlier"
    ),
    "a zip64 end of another length": (
        zip64(MEMBERS)[:-94] + struct.pack("<Q", 45) + zip64(MEMBERS)[-86:], "no end of a zip64 directory"
    ),
    "a directory without entries": (written().replace(b"PK\1\2", b"XX\1\2", 1), "not a member"),
    "a name longer than the directory": (patched(put(3, 28, "<H", 60000)), "is cut off"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_containers_are_refused(case: str, tmp_path: Path) -> None:
    data, message = WRONG[case]
    with pytest.raises(sw.ParseError, match=message) as caught:
        opened(tmp_path, data)
    assert str(caught.value).startswith(f"{tmp_path / 'a.zip'}: byte ")


def test_a_header_that_is_not_the_directory_s(tmp_path: Path) -> None:
    for old, new in ((b"PK\3\4", b"PK\3\5"), (b"archive/data/0", b"archive/data/1")):
        data = bytearray(written())
        at = data.index(old, data.index(b"PK\3\4", 10))
        data[at : at + len(old)] = new
        archive = opened(tmp_path, bytes(data))
        with pytest.raises(sw.ParseError, match="not the header of the zip member 'archive/data/0'"):
            archive.read(archive.members["archive/data/0"], 1000)
    data = bytearray(written())
    struct.pack_into("<H", data, data.index(b"PK\3\4", 10) + 28, 60000)  # An extra field over all that follows.
    archive = opened(tmp_path, bytes(data))
    with pytest.raises(sw.ParseError, match="overlaps what follows"):
        archive.start(archive.members["archive/data/0"])
    with pytest.raises(sw.ParseError, match="has 100 bytes, over the limit of 99"):
        archive.read(archive.members["archive/data/0"], 99)


@pytest.mark.heavy
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damaged_containers_are_read_or_refused(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    damaged = bytearray(data.draw(st.sampled_from([written(), zip64(MEMBERS)])))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        archive = opened(tmp_path_factory.getbasetemp(), bytes(damaged))
        for member in archive.members.values():
            assert len(archive.read(member, 1000)) == member.size
    except sw.ParseError:
        pass
