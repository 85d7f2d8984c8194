"""Filesystems of fsspec: made for a protocol from options, and compared."""

from __future__ import annotations

import errno
from inspect import Parameter, signature
from typing import Any

from ..._fork import importing
from ..._text import cut
from ...errors import ParseError

__all__ = ["S3", "SAME_STORE", "are_same", "count_attempts_here", "filesystem_for", "said_options"]

S3 = ("s3", "s3a")
SAME_STORE = {"s3a": "s3", "gcs": "gs", "abfs": "az", "adl": "az"}


def are_same(one: Any, other: Any) -> bool:
    """Return whether filesystems are equal, or of one class with the same options; fsspec compares threads too."""
    if one is other or bool(one == other):
        return True
    is_like = type(one) is type(other) and hasattr(one, "storage_options")
    return is_like and one.storage_args == other.storage_args and said_options(one) == said_options(other)


def said_options(filesystem: Any) -> dict[str, Any]:
    """Return a filesystem's options, without those for retries, which are made here and which botocore changes."""
    said = dict(getattr(filesystem, "storage_options", {}))
    said["config_kwargs"] = {key: value for key, value in said.get("config_kwargs", {}).items() if key != "retries"}
    return said


def count_attempts_here(protocol: str, filesystem: Any) -> None:
    """Switch off s3fs's own retries: requests are repeated here. Pickles of s3fs do not keep the setting."""
    if protocol in S3 and hasattr(filesystem, "retries"):
        filesystem.retries = 1


def _missing_options(kind: Any, options: dict[str, Any]) -> list[str]:
    """Return the names of required options of a filesystem's class that are not given."""
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


def filesystem_for(protocol: str, options: dict[str, Any]) -> Any:
    """Return a filesystem for a protocol, with its own retries off: requests are repeated here."""
    try:
        with importing:
            import fsspec
    except ImportError:
        extra = {"s3": "s3", "gs": "gcs"}.get(SAME_STORE.get(protocol, protocol), "fsspec")
        message = f"{protocol}:// needs fsspec: pip install 'shardwise[{extra}]'"
        raise ImportError(message, name="fsspec") from None
    kept: dict[str, Any] = {"use_listings_cache": False, **options}
    if protocol in S3:
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
    count_attempts_here(protocol, filesystem)
    return filesystem
