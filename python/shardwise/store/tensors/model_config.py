"""The `config.json` beside a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import ParseError
from ...rules.numbers import parsed_config
from ..data.location import Location, open_file

__all__ = ["config_of"]

_LARGEST = 2**24


def config_of(checkpoint: Location) -> Mapping[str, Any]:
    """Give what the model's configuration in a checkpoint's folder says, on a disk or in a store; nothing without one.

    Raises:
        OSError: if it cannot be read.
        ParseError: if it is not an object of JSON.
    """
    file = (checkpoint if checkpoint.is_dir() else checkpoint.parent) / "config.json"
    if not file.is_file():
        return {}
    opened = open_file(file)
    try:
        if opened.size > _LARGEST:
            raise ParseError(f"{file}: a configuration of {opened.size} bytes, over the limit of {_LARGEST}")
        return parsed_config(opened.read(0, opened.size), file)
    finally:
        opened.close()
