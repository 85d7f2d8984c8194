"""The `config.json` next to a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import ParseError
from ...rules.numbers import CONFIG_FILES, parsed_config
from ..data.location import Location, open_file

__all__ = ["config_of", "config_or_doubt"]

_LARGEST = 2**24


def config_of(checkpoint: Location) -> Mapping[str, Any]:
    """Give what the model's configuration in a checkpoint's folder says, on a disk or in a store; nothing without one.

    Raises:
        OSError: if the file cannot be read.
        ParseError: if the contents are not an object of JSON.
    """
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    file = next((folder / name for name in CONFIG_FILES if (folder / name).is_file()), None)
    if file is None:
        return {}
    opened = open_file(file)
    try:
        if opened.size > _LARGEST:
            raise ParseError(f"{file}: a configuration of {opened.size} bytes, over the limit of {_LARGEST}")
        return parsed_config(opened.read(0, opened.size), file)
    finally:
        opened.close()


def config_or_doubt(checkpoint: Location, *, is_model: bool) -> tuple[Mapping[str, Any], list[str]]:
    """Return the same; and, if it is broken but not that of a model's folder, a sentence that it is left out.

    Raises:
        ParseError: if that of a model's folder is not an object of JSON.
    """
    try:
        return config_of(checkpoint), []
    except (ParseError, PermissionError) as error:
        if is_model:
            raise
        return {}, [f"{error}; it is left out"]
