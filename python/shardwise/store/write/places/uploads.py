"""Uploads of one new object to a store: in parts, within the memory, and invisible until all parts are there.

If the store supports it, an object is made on condition that its name is free. If the answer to a request is lost, the
request is made again and refused; a tag that is kept with the object then tells our own object from another writer's.
"""

from __future__ import annotations

import errno
import uuid
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol

from ...._threads import Threads
from ....errors import LayoutError
from ...data.location import taken
from ...data.objects import ObjectPath

__all__ = ["Comparison", "Multipart", "Upload", "check_store", "put_object", "upload_to"]

_TAG = "shardwise-run"


class Upload(Protocol):
    """An object that is being uploaded."""

    #: True if parts may come in any order.
    any_order: bool

    def put(self, number: int, part: bytearray) -> None:
        """Upload the part with this number, counted from 0; wait while too many are under way."""

    def commit(self) -> None:
        """Make the object visible.

        Raises:
            FileExistsError: if the object is to be new, and its name is taken.
        """

    def abort(self) -> None:
        """Drop the uploaded parts; none of them becomes visible."""


def check_store(path: ObjectPath) -> None:
    """Refuse stores in which an object may be visible before it is complete."""
    if not (path.is_s3 or path.protocol in ("memory", "gs", "gcs")):
        raise LayoutError(f"{path}: checkpoints are written to s3://, gs:// and memory://, not to {path.protocol}://")


def upload_to(path: ObjectPath, *, window: int, is_new: bool, run: str | None = None) -> Upload:
    """Begin the upload of an object.

    Args:
        path: The object's name.
        window: The number of parts that are uploaded at a time.
        is_new: Whether the name must be free.
        run: A tag of ownership, if the store keeps tags: an object with the same tag counts as ours.
    """
    if path.is_s3:
        return _InParts(path, window, is_new, run or uuid.uuid4().hex)
    return _MemoryUpload(path, is_new) if path.protocol == "memory" else _GoogleUpload(path, is_new)


def put_object(path: ObjectPath, data: bytes | bytearray, *, is_new: bool) -> None:
    """Make a small object in one step; a `bytearray` is not copied."""
    upload = upload_to(path, window=1, is_new=is_new)
    try:
        upload.put(0, data if isinstance(data, bytearray) else bytearray(data))
        upload.commit()
    except BaseException:
        upload.abort()
        raise


class Comparison:
    """Stands in for an upload, and compares the parts with an object that exists already; nothing is written.

    Args:
        path: The object's name.
        at_once: Bytes that are read and compared at a time.

    Raises:
        FileNotFoundError: if there is no object.
    """

    any_order = False

    def __init__(self, path: ObjectPath, at_once: int = 8 * 2**20) -> None:
        self._path, self._at_once = path, at_once
        self._noted = path.status()
        self._at = 0

    def put(self, number: int, part: bytearray) -> None:
        """Compare the next part."""
        if self._at + len(part) > self._noted.size:
            raise taken(self._path)
        for begin in range(0, len(part), self._at_once):
            wanted = part[begin : begin + self._at_once]
            if self._path.read(self._at, self._at + len(wanted), self._noted.etag) != wanted:
                raise taken(self._path)
            self._at += len(wanted)

    def commit(self) -> None:
        """Check that the object has no further bytes, and that it was not replaced meanwhile."""
        if self._at != self._noted.size or self._path.status() != self._noted:
            raise taken(self._path)

    def abort(self) -> None:
        """Do nothing, as nothing was written."""


class Multipart:
    """The requests of an S3 multipart upload. Every process that knows the upload's name can make some of them.

    Args:
        path: The object.
        run: A tag of ownership, which is kept with the object.
        name: The store's name of the upload; empty before `begin`.
    """

    def __init__(self, path: ObjectPath, run: str, name: str = "") -> None:
        self._path, self._run, self.name = path, run, name
        bucket, _, key = path.key.partition("/")
        self._object = {"Bucket": bucket, "Key": key}

    def _ask(self, request: str, **arguments: Any) -> Any:
        return self._path.ask(lambda: self._path.filesystem.call_s3(request, **self._object, **arguments))

    def begin(self) -> str:
        """Begin the upload, and return the store's name for it."""
        self.name = str(self._ask("create_multipart_upload", Metadata={_TAG: self._run})["UploadId"])
        return self.name

    def put(self, number: int, data: bytes | bytearray) -> str:
        """Upload a part, counted from 1, and return its ETag.

        Raises:
            FileNotFoundError: if there is no such upload: it was completed, or aborted.
        """
        try:
            return str(self._ask("upload_part", PartNumber=number, UploadId=self.name, Body=data)["ETag"])
        except OSError:
            is_gone = False
            with suppress(OSError):  # What failed first is what is told.
                is_gone = self.parts() is None  # Not every server says so itself.
            if is_gone:
                raise FileNotFoundError(errno.ENOENT, "this upload no longer exists", str(self._path)) from None
            raise

    def parts(self) -> dict[int, tuple[int, str]] | None:
        """Return the uploaded parts by number, each with its size and its ETag; `None` if there is no such upload."""
        found: dict[int, tuple[int, str]] = {}
        after = 0
        while True:
            try:
                said = self._ask("list_parts", UploadId=self.name, PartNumberMarker=after)
            except FileNotFoundError:
                return None
            found |= {part["PartNumber"]: (part["Size"], str(part["ETag"])) for part in said.get("Parts", [])}
            before, after = after, max(found, default=0)
            if not said.get("IsTruncated"):
                return found
            if after == before:
                raise OSError(errno.EIO, "the store lists parts of an upload without an end", str(self._path))

    def complete(self, etags: Mapping[int, str], *, is_new: bool) -> None:
        """Join the parts into the object; if it `is_new`, on condition that its name is free.

        Raises:
            FileExistsError: if the name is taken by another object.
            FileNotFoundError: if there is no such upload.
        """
        parts = [{"PartNumber": number, "ETag": etags[number]} for number in sorted(etags)]
        said = {"UploadId": self.name, "MultipartUpload": {"Parts": parts}}
        self._finish("complete_multipart_upload", said, is_new)

    def put_object(self, data: bytes | bytearray, *, is_new: bool) -> None:
        """Make the object in one request, without a multipart upload."""
        self._finish("put_object", {"Body": data, "Metadata": {_TAG: self._run}}, is_new)

    def _finish(self, request: str, arguments: dict[str, Any], is_new: bool) -> None:
        condition = {"IfNoneMatch": "*"} if is_new else {}
        try:
            self._ask(request, **arguments, **condition)
        except (FileExistsError, FileNotFoundError):
            # Refused, or the upload no longer exists: a lost answer looks the same.
            if self.is_made():
                return
            if is_new and self._path.exists():
                raise taken(self._path) from None
            raise
        except OSError as error:
            if not condition or error.errno != errno.ENOSYS:
                raise
            # A store without conditions: this is the best that can be done.
            if self._path.exists():
                raise taken(self._path) from None
            self._ask(request, **arguments)

    def is_made(self) -> bool:
        """Return whether the object exists with our tag."""
        try:
            said = self._ask("head_object").get("Metadata", {})
        except OSError:
            return False
        return bool(said.get(_TAG) == self._run)

    def abort(self) -> None:
        """Drop the uploaded parts."""
        with suppress(OSError):  # The store drops it by its own rules; the error that led here is what matters.
            self._ask("abort_multipart_upload", UploadId=self.name)


class _InParts:
    """An upload to S3 by one worker: a multipart upload, or one request if there is only one part."""

    any_order = True

    def __init__(self, path: ObjectPath, window: int, is_new: bool, run: str) -> None:
        self._upload, self._is_new = Multipart(path, run), is_new
        self._first: tuple[int, bytearray] | None = None
        self._window = window
        self._pool = Threads(window, "shardwise-write")
        self._waiting: deque[Future[tuple[int, str]]] = deque()
        self._etags: dict[int, str] = {}

    def put(self, number: int, part: bytearray) -> None:
        if self._first is None and not self._upload.name:
            self._first = number, part
            return
        if self._first is not None:
            self._upload.begin()
            first, self._first = self._first, None
            self._send(*first)
        self._send(number, part)

    def _send(self, number: int, part: bytearray) -> None:
        while len(self._waiting) >= self._window:
            self._end_one()
        self._waiting.append(self._pool.submit(self._sent, number + 1, part))

    def _sent(self, number: int, part: bytearray) -> tuple[int, str]:
        return number, self._upload.put(number, part)

    def _end_one(self) -> None:
        number, etag = self._waiting.popleft().result()
        self._etags[number] = etag

    def commit(self) -> None:
        while self._waiting:
            self._end_one()
        self._pool.shutdown()
        if not self._upload.name:
            self._upload.put_object(self._first[1] if self._first is not None else b"", is_new=self._is_new)
            return
        self._upload.complete(self._etags, is_new=self._is_new)
        self._upload.name = ""

    def abort(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        if self._upload.name:
            self._upload.abort()
            self._upload.name = ""


class _MemoryUpload:
    """An upload to `memory://`; the parts are joined here."""

    any_order = True

    def __init__(self, path: ObjectPath, is_new: bool) -> None:
        self._path = path
        self._is_new = is_new
        self._parts: dict[int, bytearray] = {}

    def put(self, number: int, part: bytearray) -> None:
        self._parts[number] = part

    def commit(self) -> None:
        mode = "create" if self._is_new else "overwrite"
        data = b"".join(self._parts[number] for number in sorted(self._parts))
        try:
            self._path.ask(lambda: self._path.filesystem.pipe_file(self._path.key, data, mode=mode))
        except FileExistsError:
            raise taken(self._path) from None

    def abort(self) -> None:
        self._parts.clear()


class _GoogleUpload:
    """An upload to Google's store through a file of gcsfs, which uploads in order and makes the object at `close`."""

    any_order = False

    def __init__(self, path: ObjectPath, is_new: bool) -> None:
        self._path = path
        self._next = 0
        self._file = path.ask(lambda: path.filesystem.open(path.key, "xb" if is_new else "wb"))

    def put(self, number: int, part: bytearray) -> None:
        assert number == self._next, "parts are uploaded in order"
        self._next += 1
        self._file.write(part)

    def commit(self) -> None:
        try:
            self._file.close()
        except FileExistsError:
            raise taken(self._path) from None

    def abort(self) -> None:
        # A file that is merely dropped would be closed, and so be created.
        self._file.closed = True
        with suppress(OSError):
            self._file.discard()
