"""Requests to a store: which failures are final, and when a request is repeated."""

from __future__ import annotations

import errno
import random
import time

from ..._text import cut
from ...errors import ShardwiseError
from .filesystem import SAME_STORE

__all__ = ["ATTEMPTS", "LONGEST_PAUSE", "PAUSE", "Patience", "final_failure"]

#: The most attempts at a request: with the pauses between them, some 40 seconds. A store that throttles its callers
#: needs that long. If the store was never reached, it probably does not exist, and fewer attempts are made.
ATTEMPTS = 12
_UNREACHED_ATTEMPTS = 5
#: Seconds before the second attempt, doubled for each further one up to the longest; half of each is left to chance.
PAUSE = 0.1
LONGEST_PAUSE = 10.0
#: The names of exceptions that mean that the store was not reached.
_UNREACHED = {
    "ClientConnectorError", "ConnectTimeoutError", "ConnectionRefusedError", "EndpointConnectionError", "gaierror",
}  # fmt: skip
#: Advice on credentials, by protocol.
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; ObjectPath(url, anon=True) needs none",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to a file of credentials; ObjectPath(url, token='anon') needs none",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or AZURE_STORAGE_CONNECTION_STRING",
}
#: The packages whose exceptions report failures of networks and services, besides OSError.
_NETWORK = {"aiobotocore", "aiohttp", "asyncio", "azure", "botocore", "fsspec", "gcsfs", "google", "http", "urllib3"}
#: The errors of a filesystem that lacks an operation, or was made without an option that it needs.
_FAILURES = (TypeError, AttributeError, LookupError, NotImplementedError, ValueError)


class Patience:
    """The limits on repeated requests, shared by all paths made from one.

    Attributes:
        attempts: The most attempts at a request.
        pause: Seconds before the second attempt.
        is_answered: Whether the store has ever answered a request.
    """

    __slots__ = ("attempts", "is_answered", "pause")

    def __init__(self, attempts: int, pause: float) -> None:
        self.attempts, self.pause, self.is_answered = attempts, pause, False

    def wait(self, attempt: int) -> None:
        """Wait after an attempt; attempts are counted from 1."""
        longest = min(self.pause * 2 ** (attempt - 1), LONGEST_PAUSE)
        time.sleep(longest * random.uniform(0.5, 1))


def final_failure(error: Exception, attempt: int, patience: Patience, protocol: str, url: str) -> Exception | None:
    """Return the exception to raise for a failed request; `None` if the request should be repeated."""
    if isinstance(error, (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)):
        number = error.errno or {FileNotFoundError: errno.ENOENT, FileExistsError: errno.EEXIST}.get(type(error), 0)
        gone = "the bucket does not exist" if "bucket does not exist" in str(error) else "does not exist"
        return type(error)(number, gone if number == errno.ENOENT else str(error), url)
    where = _CREDENTIALS.get(SAME_STORE.get(protocol, protocol), "see fsspec's filesystem for this protocol")
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if any("Credential" in kind or kind == "ProfileNotFound" for kind in kinds):
        return PermissionError(errno.EACCES, f"no credentials: {where} ({error})", url)
    if isinstance(error, PermissionError):
        return PermissionError(errno.EACCES, f"the store refuses: {error}; credentials: {where}", url)
    is_network = isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _NETWORK
    if not is_network:
        if not isinstance(error, _FAILURES) or isinstance(error, ShardwiseError):
            return error
        said = f"fsspec's filesystem for {protocol}:// fails: {type(error).__name__}: {cut(error)}"
        return OSError(errno.EIO, said, url)
    if isinstance(error, OSError) and error.errno in (errno.EINVAL, errno.ENOSYS, errno.EPERM):
        return OSError(error.errno, str(error), url)
    attempts = patience.attempts
    if kinds & _UNREACHED and not patience.is_answered:
        attempts = min(attempts, _UNREACHED_ATTEMPTS)
    if attempt < attempts:
        return None
    times = "once" if attempt == 1 else f"{attempt} times, the last time"
    return OSError(errno.EIO, f"failed {times} with: {str(error) or type(error).__name__}", url)
