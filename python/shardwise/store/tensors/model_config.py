"""The `config.json` next to a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ...errors import ParseError
from ...rules.numbers import CONFIG_FILES, Config, StoredConfig, read_config
from ..data.location import Location, open_file

__all__ = ["config_beside", "config_of", "config_or_doubt"]

_LARGEST = 2**24


def config_beside(checkpoint: Location) -> StoredConfig | None:
    """Return the model's configuration in a checkpoint's folder, on a disk or in a store; `None` if there is none.

    It is read when it is first needed; see `config_of` for the errors.
    """
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    file = next((folder / name for name in CONFIG_FILES if (folder / name).is_file()), None)
    return None if file is None else StoredConfig(file, partial(_bytes_of, file))


def _bytes_of(file: Location) -> bytes:
    opened = open_file(file)
    try:
        if opened.size > _LARGEST:
            raise ParseError(f"{file}: a configuration of {opened.size} bytes, over the limit of {_LARGEST}")
        return opened.read(0, opened.size)
    finally:
        opened.close()


def config_of(checkpoint: Location) -> Mapping[str, Any]:
    """Return the contents of the model's configuration in a checkpoint's folder; an empty mapping without one.

    Raises:
        OSError: if the file cannot be read.
        ParseError: if the contents are not an object of JSON.
    """
    return dict(config_beside(checkpoint) or {})


def config_or_doubt(config: Config | None, *, is_needed: bool) -> tuple[Mapping[str, Any], list[str]]:
    """Return the contents of a configuration, none without one; and, if it is broken, a sentence that it is left out.

    Raises:
        OSError: if the file cannot be read.
        ParseError: if it is broken, and `is_needed`.
    """
    try:
        return ({} if config is None else dict(read_config(config))), []
    except (ParseError, PermissionError) as error:
        if is_needed:
            raise
        return {}, [f"{error}; it is left out"]
