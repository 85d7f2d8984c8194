"""The parts that objects are uploaded in, by hand: of S3's sizes, and within the memory."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

import shardwise as sw
from shardwise.store.data.objects import ObjectPath, ObjectStatus
from shardwise.store.write.places import uploads
from shardwise.store.write.places.part_sizes import parts_for
from shardwise.store.write.places.uploads import Multipart

KIB, MIB = 2**10, 2**20


def file(size: int, needs_values: bool = False) -> Any:
    return SimpleNamespace(name="a", size=size, needs_values=needs_values)


@pytest.mark.parametrize(
    ("size", "digests", "memory", "part", "window", "holds"),
    [
        # A part is filled from another: of a sixth of the memory each, so three are under way, or two and one held.
        (1024 * MIB, False, 96 * MIB, 16 * MIB, 3, False),
        (1024 * MIB, True, 96 * MIB, 16 * MIB, 2, True),
        # At least 8 MiB each, of which four are needed, five to hold one back.
        (1024 * MIB, True, 32 * MIB, 8 * MIB, 1, False),
        (1024 * MIB, True, 40 * MIB - 1, 8 * MIB, 1, False),
        (1024 * MIB, True, 40 * MIB, 8 * MIB, 1, True),
        (1024 * MIB, True, 48 * MIB, 8 * MIB, 2, True),
        # At most 64 MiB each, and 8 under way.
        (1024 * MIB, False, 1024 * MIB, 64 * MIB, 8, False),
        (1024 * MIB, False, 10 * 64 * MIB, 64 * MIB, 7, False),
        # No larger than the largest object, and at most 7,000 of it.
        (1000, False, 8 * KIB, 1000, 5, False),
        (0, False, 8 * KIB, 1, 8, False),
        (7000 * 8 * MIB, False, 32 * MIB, 8 * MIB, 1, False),
        (7000 * 8 * MIB + 1, False, 64 * MIB, 64 * MIB // 6, 3, False),
        (7000 * 16 * MIB + 1, False, 65 * MIB, 16 * MIB + 1, 1, False),
    ],
)
def test_parts_are_within_the_memory(
    size: int, digests: bool, memory: int, part: int, window: int, holds: bool
) -> None:
    for files in ([file(size, digests)], [file(0), file(size, digests)]):
        assert parts_for(files, memory) == (part, window, holds)
        assert part * (3 + holds + window) <= max(memory, 11 * part)


def test_too_little_memory_says_what_is_needed() -> None:
    said = "at least 32.0 MiB are needed for objects that are uploaded in parts of 8.0 MiB"
    with pytest.raises(sw.LayoutError, match=f"memory is 32.0 MiB; {said}"):
        parts_for([file(1024 * MIB)], 32 * MIB - 1)
    with pytest.raises(sw.LayoutError, match=f"memory is 1.0 MiB for each of 3 workers; {said}"):
        parts_for([file(1024 * MIB)], MIB, 3)
    with pytest.raises(TypeError, match="memory must be an integer"):
        parts_for([file(1)], 1.5)  # type: ignore[arg-type]


class _Answers:
    """A filesystem that gives, for each of S3's requests, what it was told to."""

    def __init__(self, **answers: Any) -> None:
        self._answers = answers

    def call_s3(self, request: str, **given: Any) -> Any:
        answer = self._answers[request](given) if callable(self._answers[request]) else self._answers[request]
        if isinstance(answer, Exception):
            raise answer
        return answer


def upload(**answers: Any) -> Multipart:
    return Multipart(ObjectPath("s3://bucket/new", filesystem=_Answers(**answers), attempts=1), "run", "name")


def test_what_a_store_says_first_of_a_part_is_told() -> None:
    """Also if it does not let us ask whether the upload is there still."""
    full = OSError(errno.EIO, "the first")
    with pytest.raises(OSError, match="the first"):
        upload(upload_part=full, list_parts=PermissionError("not yours")).put(1, b"")
    with pytest.raises(OSError, match="the first"):
        upload(upload_part=full, list_parts={}).put(1, b"")
    with pytest.raises(FileNotFoundError, match="this upload no longer exists"):
        upload(upload_part=full, list_parts=FileNotFoundError()).put(1, b"")


def test_parts_are_listed_page_by_page() -> None:
    def page(given: Any) -> Any:
        after = given["PartNumberMarker"]
        parts = [{"PartNumber": number, "Size": 5, "ETag": f"{number}"} for number in (after + 2, after + 4)]
        return {"Parts": parts, "IsTruncated": after < 8}

    assert upload(list_parts=page).parts() == {number: (5, f"{number}") for number in range(2, 13, 2)}
    for same in ([{"PartNumber": 1, "Size": 5, "ETag": "a"}], []):
        with pytest.raises(OSError, match="parts of an upload without an end"):
            upload(list_parts={"Parts": same, "IsTruncated": True}).parts()


class Held:
    """An object of a store, as far as a comparison asks."""

    def __init__(self, data: bytes) -> None:
        self.data, self.etag = data, "1"

    def status(self) -> ObjectStatus:
        return ObjectStatus(len(self.data), self.etag)

    def read(self, begin: int, end: int, etag: str) -> bytes:
        assert etag == self.etag
        assert 0 < end - begin <= 4
        return self.data[begin:end]


def test_what_is_there_is_compared_to_its_last_byte() -> None:
    wanted = bytes(range(11))

    def compare(data: bytes, sizes: Sequence[int], changes: bool = False) -> None:
        held: Any = Held(data)
        comparison, at = uploads.Comparison(held, 4), 0
        for number, size in enumerate(sizes):
            comparison.put(number, bytearray(wanted[at : at + size]))
            at += size
        if changes:
            held.etag = "2"
        comparison.commit()

    for sizes in ([11], [4, 7], [5, 5, 1], [8, 3]):
        compare(wanted, sizes)
        for at in range(11):
            with pytest.raises(FileExistsError, match="exists already"):
                compare(wanted[:at] + b"\xff" + wanted[at + 1 :], sizes)
        for other in (wanted[:-1], wanted + b"\x0b", b""):
            with pytest.raises(FileExistsError, match="exists already"):
                compare(other, sizes)
        with pytest.raises(FileExistsError, match="exists already"):
            compare(wanted, sizes, changes=True)
