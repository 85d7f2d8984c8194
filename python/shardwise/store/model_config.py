"""The `config.json` beside a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ParseError
from .location import Location, open_file
from .text import strict_json

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
        # Those of models with state spaces have a limit that is infinite.
        found = strict_json(opened.read(0, opened.size), file, constants=True)
    finally:
        opened.close()
    if not isinstance(found, dict):
        raise ParseError(f"{file} is not a model's configuration, which is an object of JSON")
    return found
