"""Objects behind a URL, by fsspec: names, sizes, ranges of bytes, and what to do when the store fails.

An `ObjectPath` has what the formats need from a path, so that a format does not know where its files lie. It has no
`__fspath__`: code that is not written for objects fails at once, and never finds a local file of the same name.

Weaknesses of stores are dealt with here. A request that fails for a temporary reason is made again, `ATTEMPTS` times
in all unless the path says otherwise, after pauses that grow and that differ by chance, so that many workers do not
come back at once; a store that gives fewer bytes than it was asked for has failed. Listings are never cached, and only
say which format a folder may have: its manifest or index says what belongs to a checkpoint.
"""

from __future__ import annotations

import errno
import random
import re
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from inspect import Parameter, signature
from pathlib import PurePosixPath
from typing import Any, NamedTuple, TypeVar

from ..._arguments import integer
from ..._fork import importing
from ..._text import cut, shown
from ...errors import LayoutError, ParseError, ShardwiseError

__all__ = ["ATTEMPTS", "ObjectPath", "ObjectStatus"]

#: The number of attempts at a request before its failure is final: with the pauses between, some 40 seconds. A store
#: that has slowed down its callers needs that long; one that was never reached is probably not there.
ATTEMPTS = 12
_UNREACHED_ATTEMPTS = 5
#: Seconds before the second attempt, doubled for each further one up to the longest; half of each is left to chance.
PAUSE = 0.1
_LONGEST_PAUSE = 10.0
#: The exceptions of those who found nobody to ask.
_UNREACHED = {
    "ClientConnectorError", "ConnectTimeoutError", "ConnectionRefusedError", "EndpointConnectionError", "gaierror",
}  # fmt: skip

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_LOCAL = ("file", "local")
_S3 = ("s3", "s3a")
#: Advice on credentials, by the protocol.
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; ObjectPath(url, anon=True) needs none",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to a file of credentials; ObjectPath(url, token='anon') needs none",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or AZURE_STORAGE_CONNECTION_STRING",
}
_SAME = {"s3a": "s3", "gcs": "gs", "abfs": "az", "adl": "az"}
#: The packages whose exceptions report failures of networks and services, besides OSError.
_NETWORK = {"aiobotocore", "aiohttp", "asyncio", "azure", "botocore", "fsspec", "gcsfs", "google", "http", "urllib3"}
#: The errors of a filesystem that is asked for what it does not have, or was made without what it needs.
_FAILURES = (TypeError, AttributeError, LookupError, NotImplementedError, ValueError)

Answer = TypeVar("Answer")


class ObjectStatus(NamedTuple):
    """The status of an object when it was asked for.

    Attributes:
        size: Its bytes.
        etag: A text that tells it from another object of the same name: its etag or generation, else its creation
            time.
    """

    size: int
    etag: str


class _Patience:
    """The number of repeated requests, and whether one was ever answered; shared by all paths made from one.

    Attributes:
        attempts: The most attempts at a request.
        pause: Seconds before the second attempt.
        is_answered: Whether the store was ever reached.
    """

    __slots__ = ("attempts", "is_answered", "pause")

    def __init__(self, attempts: int, pause: float) -> None:
        self.attempts, self.pause, self.is_answered = attempts, pause, False

    def wait(self, attempt: int) -> None:
        """Wait after an attempt, counted from 1."""
        longest = min(self.pause * 2 ** (attempt - 1), _LONGEST_PAUSE)
        time.sleep(longest * random.uniform(0.5, 1))


class ObjectPath:
    """A file or folder behind a URL, for every argument that takes the path of a checkpoint.

    A URL as text is enough if the environment has all that the store needs; this class is for options.

    Args:
        url: `s3://bucket/model`, `gs://bucket/model`, `memory://model`, or any other that fsspec knows.
        filesystem: An fsspec filesystem, used as it is; made from the URL's protocol if left out.
        attempts: The most attempts at a request that fails for a temporary reason.
        pause: Seconds before the second attempt, doubled for each further one up to 10; up to half less by chance.
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
        if not 0 <= pause <= _LONGEST_PAUSE:
            raise LayoutError(f"pause is {pause}; it must be from 0 to {_LONGEST_PAUSE:g} seconds")
        self._patience = _Patience(attempts, pause)
        match = _URL.fullmatch(url) if isinstance(url, str) else None
        if match is None or "\0" in url or not match[2].strip("/"):
            raise ParseError(f"url must be like s3://bucket/model, got {shown(url)}")
        self._protocol = match[1].lower()
        self._filesystem = _filesystem(self._protocol, options) if filesystem is None else filesystem
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
        """The last part."""
        return self._key.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The end of the name, from its last dot on."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> ObjectPath:
        """All but the last part."""
        return self._at(self._key.rpartition("/")[0] or self._key)

    @property
    def is_s3(self) -> bool:
        """True if the store is S3 through s3fs, whose requests can have conditions."""
        return self._protocol in _S3 and hasattr(self._filesystem, "call_s3")

    def with_name(self, name: str) -> ObjectPath:
        """Give the path with another last part."""
        return self.parent / name

    def __str__(self) -> str:
        return f"{self._protocol}://{self._key}"

    def __repr__(self) -> str:
        return f"ObjectPath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return str(self) == str(other) and _are_same(self._filesystem, other._filesystem)

    def __hash__(self) -> int:
        return hash(str(self))

    def __lt__(self, other: ObjectPath) -> bool:
        return str(self) < str(other)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (str(self), self._filesystem, self._patience.attempts, self._patience.pause)

    def refuse_options(self, what: str) -> None:
        """Refuse a filesystem that another process would not make of the URL and the same environment.

        Args:
            what: What keeps the URL only.

        Raises:
            TypeError: if it has other options, or is of another kind; names those options, and no values.
        """
        other = ObjectPath(str(self))._filesystem
        mine, theirs = _said_options(self._filesystem), _said_options(other)
        different = sorted(str(key) for key in {*mine, *theirs} if mine.get(key) != theirs.get(key))
        if different or type(other) is not type(self._filesystem):
            names = ", ".join(different[:5]) or "a filesystem of its own"
            raise TypeError(
                f"{self}: has {names}; {what} keeps URLs, and no options: give them by the environment, "
                f"as FSSPEC_{self._protocol.upper()}_ENDPOINT_URL or AWS_ENDPOINT_URL"
            )

    def ask(self, what: Callable[[], Answer]) -> Answer:
        """Make a request, repeated if it fails for a temporary reason; its errors name this path.

        Raises:
            FileNotFoundError, PermissionError, OSError: if the store refuses, or keeps failing.
        """
        patience, attempt = self._patience, 0
        while True:
            attempt += 1
            try:
                answer = what()
            except Exception as error:
                final = self._final(error, attempt)
                if final is not None:
                    raise final from (None if final is error else error)
            else:
                patience.is_answered = True
                return answer
            self.wait(attempt)

    def wait(self, attempt: int) -> None:
        """Wait as long as after so many attempts at a request, counted from 1."""
        self._patience.wait(attempt)

    def _final(self, error: Exception, attempt: int) -> Exception | None:
        """The exception for a failure; `None` if the request should be made again."""
        if isinstance(error, (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)):
            number = error.errno or {FileNotFoundError: errno.ENOENT, FileExistsError: errno.EEXIST}.get(type(error), 0)
            gone = "the bucket does not exist" if "bucket does not exist" in str(error) else "does not exist"
            return type(error)(number, gone if number == errno.ENOENT else str(error), str(self))
        where = _CREDENTIALS.get(_SAME.get(self._protocol, self._protocol), "see fsspec's filesystem for this protocol")
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if any("Credential" in kind or kind == "ProfileNotFound" for kind in kinds):
            return PermissionError(errno.EACCES, f"no credentials: {where} ({error})", str(self))
        if isinstance(error, PermissionError):
            return PermissionError(errno.EACCES, f"the store refuses: {error}; credentials: {where}", str(self))
        is_network = isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _NETWORK
        if not is_network:
            if not isinstance(error, _FAILURES) or isinstance(error, ShardwiseError):
                return error
            said = f"fsspec's filesystem for {self._protocol}:// fails: {type(error).__name__}: {cut(error)}"
            return OSError(errno.EIO, said, str(self))
        if isinstance(error, OSError) and error.errno in (errno.EINVAL, errno.ENOSYS, errno.EPERM):
            return OSError(error.errno, str(error), str(self))
        attempts = self._patience.attempts
        if kinds & _UNREACHED and not self._patience.is_answered:
            attempts = min(attempts, _UNREACHED_ATTEMPTS)
        if attempt < attempts:
            return None
        times = "once" if attempt == 1 else f"{attempt} times, the last time"
        return OSError(errno.EIO, f"failed {times} with: {str(error) or type(error).__name__}", str(self))

    def _info(self) -> dict[str, Any]:
        found: dict[str, Any] = self.ask(lambda: self._filesystem.info(self._asked))
        return found

    def status(self) -> ObjectStatus:
        """Give the object's present status.

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
        """Give the object's bytes as `st_size`."""
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
        """List what lies directly below: names, and whether each is a folder."""
        for entry in self.ask(lambda: self._filesystem.ls(self._asked, detail=True)):
            name = str(entry["name"]).rstrip("/").rpartition("/")[2]
            # A folder may have an object of its own name, without bytes.
            if name and str(entry["name"]).strip("/") != self._key:
                yield name, entry.get("type") == "directory"

    def iterdir(self) -> Iterator[ObjectPath]:
        """List what lies directly below."""
        return (self / name for name, _ in self.names())

    def glob(self, pattern: str) -> Iterator[ObjectPath]:
        """List what lies directly below, and matches a pattern."""
        return (self / name for name, _ in self.names() if fnmatchcase(name, pattern))

    def read(self, start: int, stop: int, etag: str) -> bytes:
        """Read a range of the object's bytes; see `read_into`."""
        data = bytearray(stop - start)
        self.read_into(memoryview(data), start, etag)
        return bytes(data)

    def read_into(self, buffer: memoryview, start: int, etag: str) -> None:
        """Fill a buffer of bytes with those from `start` on; on S3 only of the object with this ETag.

        Raises:
            ParseError: if there is a different object than before, or none.
            OSError: if the store fails, or gives fewer bytes.
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
        """Make one request, and give the number of bytes that came."""
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


def _are_same(one: Any, other: Any) -> bool:
    """Return whether filesystems are equal, or of one kind with the same options: fsspec also compares the thread."""
    if one is other or bool(one == other):
        return True
    is_like = type(one) is type(other) and hasattr(one, "storage_options")
    return is_like and one.storage_args == other.storage_args and _said_options(one) == _said_options(other)


def _said_options(filesystem: Any) -> dict[str, Any]:
    """The options that it was made with; except for attempts, which are counted here, and which botocore changes."""
    said = dict(getattr(filesystem, "storage_options", {}))
    said["config_kwargs"] = {key: value for key, value in said.get("config_kwargs", {}).items() if key != "retries"}
    return said


class _Stat(NamedTuple):
    st_size: int


def _unpickled(url: str, filesystem: Any, attempts: int, pause: float) -> ObjectPath:
    path = ObjectPath(url, filesystem=filesystem, attempts=attempts, pause=pause)
    _count_attempts_here(path.protocol, filesystem)
    return path


def _count_attempts_here(protocol: str, filesystem: Any) -> None:
    """Switch off s3fs's own retries, which pickles do not keep."""
    if protocol in _S3 and hasattr(filesystem, "retries"):
        filesystem.retries = 1


def _missing_options(kind: Any, options: dict[str, Any]) -> list[str]:
    """The options without which a filesystem cannot be made."""
    try:
        parameters = list(signature(kind.__init__).parameters.values())[1:]
    except (TypeError, ValueError):
        return []
    named = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    needed = [each.name for each in parameters if each.kind in named and each.default is Parameter.empty]
    return [name for name in needed if name not in options]


def _needs(protocol: str, why: str, name: str = "NAME") -> ParseError:
    return ParseError(
        f"{protocol}:// needs more than a URL: {why}. Give its options by the environment, as "
        f"FSSPEC_{protocol.upper()}_{name.upper()}, or a filesystem: ObjectPath(url, filesystem=...)"
    )


def _filesystem(protocol: str, options: dict[str, Any]) -> Any:
    try:
        with importing:
            import fsspec
    except ImportError:
        extra = {"s3": "s3", "gs": "gcs"}.get(_SAME.get(protocol, protocol), "fsspec")
        message = f"{protocol}:// needs fsspec: pip install 'shardwise[{extra}]'"
        raise ImportError(message, name="fsspec") from None
    kept: dict[str, Any] = {"use_listings_cache": False, **options}
    if protocol in _S3:
        # Retries are counted here; three layers of them would be a hundred.
        kept["config_kwargs"] = {"retries": {"max_attempts": 0}, **options.get("config_kwargs", {})}
    try:
        # Some that lack an option are made halfway, and fail once more when they are thrown away.
        missing = _missing_options(
            fsspec.get_filesystem_class(protocol), {**fsspec.config.conf.get(protocol, {}), **kept}
        )
        if missing:
            raise _needs(protocol, f"{', '.join(missing)} must be given", missing[0])
        filesystem = fsspec.filesystem(protocol, skip_instance_cache=True, **kept)
    except ImportError as error:
        message = f"{protocol}:// needs another package for fsspec: {error}"
        raise ImportError(message, name=error.name) from None
    except OSError as error:
        raise OSError(
            error.errno or errno.EIO, f"fsspec's filesystem cannot be made: {error}", f"{protocol}://"
        ) from None
    except ParseError:
        raise
    except Exception as error:
        if options and isinstance(error, TypeError):
            raise  # They are the caller's.
        raise _needs(protocol, f"fsspec says: {cut(error)}") from None
    _count_attempts_here(protocol, filesystem)
    return filesystem
