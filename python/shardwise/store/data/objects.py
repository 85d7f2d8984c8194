"""Objects behind a URL, by fsspec: names, sizes, ranges of bytes, and retries when the store fails.

An `ObjectPath` has the operations that formats need from a path, so that a format does not depend on the kind of
location. It has no `__fspath__`: code that is not written for objects fails at once, and never finds a local file of
the same name.

This module works around weaknesses of stores. A request that fails for a temporary reason is repeated, up to `ATTEMPTS`
times unless the path says otherwise, after growing pauses of random length, so that many workers do not come back at
once; a store that returns fewer bytes than asked for has failed. Listings are never cached, and only suggest which
format a folder may have: its manifest or index says which files belong to a checkpoint.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any, NamedTuple, TypeVar

from ..._arguments import integer
from ..._fork import importing
from ..._text import shown
from ...errors import LayoutError, ParseError
from .filesystem import S3, are_same, count_attempts_here, filesystem_for, said_options
from .retries import ATTEMPTS, LONGEST_PAUSE, PAUSE, Patience, final_failure

__all__ = ["ATTEMPTS", "ObjectPath", "ObjectStatus"]

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_LOCAL = ("file", "local")
Answer = TypeVar("Answer")


class ObjectStatus(NamedTuple):
    """The status of an object at the time of a request.

    Attributes:
        size: The object's size in bytes.
        etag: A text that differs for another object of the same name: the ETag or generation, else the creation time.
    """

    size: int
    etag: str


class ObjectPath:
    """A file or folder behind a URL, for every argument that takes the path of a checkpoint.

    A URL as text is enough if the environment has all that the store needs; this class is for options.

    Args:
        url: `s3://bucket/model`, `gs://bucket/model`, `memory://model`, or any other that fsspec knows.
        filesystem: An fsspec filesystem, used as it is; made from the URL's protocol if left out.
        attempts: The most attempts at a request that fails for a temporary reason.
        pause: Seconds before the second attempt; doubled for each further one, up to 10, and shortened at random by up
            to half.
        options: Options of fsspec's filesystem: for S3 `key`, `secret`, `profile`, `anon`, `endpoint_url`, ….

    Raises:
        ParseError: if `url` is not a URL.
        LayoutError: if `attempts` is below 1, or `pause` below 0.
        ImportError: if fsspec, or its package for this protocol, is not installed.

    >>> ObjectPath("memory://models/a", filesystem=object()) / "model.safetensors"  # in place of one of fsspec's
    ObjectPath('memory://models/a/model.safetensors')
    """

    __slots__ = ("_filesystem", "_key", "_patience", "_protocol")

    def __init__(
        self, url: str, *, filesystem: Any = None, attempts: int = ATTEMPTS, pause: float = PAUSE, **options: Any
    ) -> None:
        if integer("attempts", attempts) < 1:
            raise LayoutError(f"attempts is {attempts}; it must be at least 1")
        if not isinstance(pause, (int, float)):
            raise TypeError(f"pause must be a number of seconds, got {type(pause).__name__}")
        if not 0 <= pause <= LONGEST_PAUSE:
            raise LayoutError(f"pause is {pause}; it must be from 0 to {LONGEST_PAUSE:g} seconds")
        self._patience = Patience(attempts, pause)
        match = _URL.fullmatch(url) if isinstance(url, str) else None
        if match is None or "\0" in url or not match[2].strip("/"):
            raise ParseError(f"url must be like s3://bucket/model, got {shown(url)}")
        self._protocol = match[1].lower()
        self._filesystem = filesystem_for(self._protocol, options) if filesystem is None else filesystem
        if filesystem is not None and options:
            raise TypeError(f"options {', '.join(map(repr, options))} are only for a new filesystem, not for yours")
        # Without `..` and empty names, which to a store are names like any other.
        self._key = "/".join(part for part in match[2].split("/") if part)

    def _at(self, key: str) -> ObjectPath:
        other = object.__new__(ObjectPath)
        other._protocol, other._filesystem, other._key = self._protocol, self._filesystem, key
        other._patience = self._patience
        return other

    def __truediv__(self, name: str) -> ObjectPath:
        return self._at(f"{self._key}/{PurePosixPath(name)}")

    @property
    def protocol(self) -> str:
        """The part before `://`."""
        return self._protocol

    @property
    def filesystem(self) -> Any:
        """The filesystem of fsspec."""
        return self._filesystem

    @property
    def key(self) -> str:
        """The part after `://`: the bucket, and the object's name in it."""
        return self._key

    @property
    def _asked(self) -> str:
        # For a web server the protocol is part of the name.
        return str(self) if self._protocol.startswith("http") else self._key

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self._key.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The end of the name, from its last dot on, with the dot."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> ObjectPath:
        """The path without its last part."""
        return self._at(self._key.rpartition("/")[0] or self._key)

    @property
    def is_s3(self) -> bool:
        """True if the store is S3 through s3fs, whose requests can have conditions."""
        return self._protocol in S3 and hasattr(self._filesystem, "call_s3")

    def with_name(self, name: str) -> ObjectPath:
        """Return the path with another last part."""
        return self.parent / name

    def __str__(self) -> str:
        return f"{self._protocol}://{self._key}"

    def __repr__(self) -> str:
        return f"ObjectPath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return str(self) == str(other) and are_same(self._filesystem, other._filesystem)

    def __hash__(self) -> int:
        return hash(str(self))

    def __lt__(self, other: ObjectPath) -> bool:
        return str(self) < str(other)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (str(self), self._filesystem, self._patience.attempts, self._patience.pause)

    def refuse_options(self, what: str) -> None:
        """Refuse a filesystem that another process could not make from the URL and the same environment.

        Args:
            what: The thing that stores only the URL, for the message.

        Raises:
            TypeError: if the filesystem has other options, or is of another class; the message names the options, but
                not their values.
        """
        other = ObjectPath(str(self))._filesystem
        mine, theirs = said_options(self._filesystem), said_options(other)
        different = sorted(str(key) for key in {*mine, *theirs} if mine.get(key) != theirs.get(key))
        if different or type(other) is not type(self._filesystem):
            names = ", ".join(different[:5]) or "a filesystem of its own"
            raise TypeError(
                f"{self}: has {names}, but {what} keeps only the URL: give the options in the environment, as "
                f"FSSPEC_{self._protocol.upper()}_ENDPOINT_URL or AWS_ENDPOINT_URL"
            )

    def ask(self, what: Callable[[], Answer]) -> Answer:
        """Call a function that makes a request; repeat it if it fails for a temporary reason. Errors name this path.

        Raises:
            FileNotFoundError, PermissionError, OSError: if the store refuses, or keeps failing.
        """
        patience, attempt = self._patience, 0
        while True:
            attempt += 1
            try:
                answer = what()
            except Exception as error:
                final = final_failure(error, attempt, patience, self._protocol, str(self))
                if final is not None:
                    raise final from (None if final is error else error)
            else:
                patience.is_answered = True
                return answer
            self.wait(attempt)

    def wait(self, attempt: int) -> None:
        """Wait as before a repeated request, after `attempt` attempts."""
        self._patience.wait(attempt)

    def _info(self) -> dict[str, Any]:
        found: dict[str, Any] = self.ask(lambda: self._filesystem.info(self._asked))
        return found

    def status(self) -> ObjectStatus:
        """Request the object's present status.

        Raises:
            FileNotFoundError: if there is no such object.
            IsADirectoryError: if there is a folder of this name.
        """
        said = self._info()
        if said.get("type") == "directory":
            raise IsADirectoryError(errno.EISDIR, "is a folder; an object is needed", str(self))
        size = said.get("size")
        if not isinstance(size, int) or size < 0:
            raise ParseError(f"{self}: the store does not say how many bytes it has")
        etags = (said.get(key) for key in ("ETag", "etag", "generation", "md5Hash", "LastModified", "mtime", "created"))
        return ObjectStatus(size, str(next((etag for etag in etags if etag), "")))

    def stat(self) -> Any:
        """Return the object's size as `st_size`; 0 for a folder."""
        return _Stat(0 if self.is_dir() else self.status().size)

    def exists(self) -> bool:
        """Return whether there is an object or a folder of this name."""
        try:
            self._info()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        """Return whether there are objects below this name."""
        try:
            return bool(self._info().get("type") == "directory")
        except FileNotFoundError:
            return False

    def is_file(self) -> bool:
        """Return whether there is an object of this name."""
        try:
            return bool(self._info().get("type") != "directory")
        except FileNotFoundError:
            return False

    def names(self) -> Iterator[tuple[str, bool]]:
        """List the entries directly below: names, and whether each is a folder."""
        for entry in self.ask(lambda: self._filesystem.ls(self._asked, detail=True)):
            name = str(entry["name"]).rstrip("/").rpartition("/")[2]
            # A folder may have an object of its own name, without bytes.
            if name and str(entry["name"]).strip("/") != self._key:
                yield name, entry.get("type") == "directory"

    def iterdir(self) -> Iterator[ObjectPath]:
        """Yield the paths directly below."""
        return (self / name for name, _ in self.names())

    def glob(self, pattern: str) -> Iterator[ObjectPath]:
        """Yield the paths directly below whose names match a pattern."""
        return (self / name for name, _ in self.names() if fnmatchcase(name, pattern))

    def read(self, start: int, stop: int, etag: str) -> bytes:
        """Return the object's bytes from `start` to `stop`; see `read_into`."""
        data = bytearray(stop - start)
        self.read_into(memoryview(data), start, etag)
        return bytes(data)

    def read_into(self, buffer: memoryview, start: int, etag: str) -> None:
        """Fill a buffer with the object's bytes from `start` on; on S3 only if the object has this ETag.

        Raises:
            ParseError: if there is a different object than before, or none.
            OSError: if the store fails, or returns fewer bytes.
        """

        def get() -> None:
            came = self._get(buffer, start, etag)
            if came != len(buffer):
                stop = start + len(buffer)
                raise OSError(errno.EIO, f"bytes {start} to {stop} were needed, but {came} came")

        try:
            self.ask(get)
        except FileNotFoundError:
            raise ParseError(f"{self}: no longer exists") from None
        except OSError as error:
            # S3's refusal of the condition, which s3fs knows as an invalid argument.
            refused = error.errno == errno.EINVAL and self.is_s3
            if refused and ("PreconditionFailed" in str(error) or self.status().etag != etag):
                raise ParseError(f"{self}: is a different object than before: it was replaced") from None
            raise

    def _get(self, buffer: memoryview, start: int, etag: str) -> int:
        """Make one request, and return the number of bytes received."""
        if not self.is_s3:
            data: bytes = self._filesystem.cat_file(self._asked, start=start, end=start + len(buffer))
            if len(data) == len(buffer):
                buffer[:] = data
            return len(data)
        with importing:
            from fsspec.asyn import sync

        bucket, _, name = self._key.partition("/")
        asked = {"Bucket": bucket, "Key": name, "Range": f"bytes={start}-{start + len(buffer) - 1}"}
        if etag:
            asked["IfMatch"] = etag

        async def fill() -> int:
            # Block by block to where they belong: joined first, they would be touched twice.
            body = (await self._filesystem._call_s3("get_object", **asked))["Body"]
            at = 0
            try:
                # One byte more than was asked for, if there is one, says that the range was not kept to.
                while at <= len(buffer) and (block := await body.read(max(len(buffer) - at, 1))):
                    if at + len(block) <= len(buffer):
                        buffer[at : at + len(block)] = block
                    at += len(block)
                return at
            finally:
                body.close()

        came: int = sync(self._filesystem.loop, fill)
        return came


class _Stat(NamedTuple):
    st_size: int


def _unpickled(url: str, filesystem: Any, attempts: int, pause: float) -> ObjectPath:
    path = ObjectPath(url, filesystem=filesystem, attempts=attempts, pause=pause)
    count_attempts_here(path.protocol, filesystem)
    return path
