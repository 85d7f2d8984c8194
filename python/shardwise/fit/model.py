"""A model as it is known: the headers of its checkpoint, or its configuration alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .._arguments import path_of
from .._fork import importing
from .._garbage import uncollected
from ..errors import LayoutError
from ..quantized.component import StoredLook
from ..rules.numbers import Config, read_config

if TYPE_CHECKING:
    from ..conversion.weights import Reader

__all__ = ["Known", "opened_model"]

#: Dtype and shape of each stored tensor, what the configuration says, and how values are read.
Known = tuple[dict[str, StoredLook], Mapping[str, Any], "Reader"]


@contextmanager
def opened_model(
    model: str | os.PathLike[str] | Mapping[str, Any],
    config: Config | None,
    rules: str | os.PathLike[str] | None = None,
) -> Iterator[Known]:
    """Yield what is known of a model: of a checkpoint what its headers say, else what its configuration says.

    Rules may state the tensors of a configuration.

    Raises:
        OSError: if a file cannot be read.
        ParseError: if a file does not follow its format, or the tensors of the model's family are not known.
        LayoutError: if `config` is given, and the model is a configuration itself.
    """
    if isinstance(model, Mapping):
        _refuse_two(config)
        yield _configured(model, rules)
        return
    if isinstance(model, str) and "://" not in model and _is_configuration(path_of(model)):
        _refuse_two(config)
        yield _configured(read_config(model), rules)
        return
    with importing:  # Late: none of it is needed for a configuration on a disk.
        from ..store.data.location import location_of
        from ..store.formats.open import open_checkpoint
        from ..store.rewritten.components import reader_of
        from ..store.tensors.model_config import config_of
        from ..store.tensors.stored import UnsupportedError

    path = location_of(model)
    if _is_configuration(path):
        _refuse_two(config)
        yield _configured(config_of(path) if path.name == "config.json" else read_config(path), rules)
        return
    with uncollected():
        try:
            opened = open_checkpoint(path)
        except UnsupportedError:
            given = config_of(path) if config is None else read_config(config)
            if not given or not path.is_dir():
                raise
            yield _configured(given, rules)
            return
        with opened as checkpoint:
            outline = {name: StoredLook(each.code or each.name, shape) for name, each, shape in checkpoint.described()}
            given = config_of(path) if config is None else read_config(config)
            yield outline, given, reader_of(checkpoint)


def _is_configuration(path: Any) -> bool:
    return path.name.endswith(".json") and not path.name.endswith(".index.json") and bool(path.is_file())


def _refuse_two(config: Config | None) -> None:
    if config is not None:
        raise LayoutError("config is given, but model is a configuration itself; give one of them")


def _configured(config: Mapping[str, Any], rules: str | os.PathLike[str] | None) -> Known:
    with importing:
        from ..quantized.stated import stated_tensors
        from ..rules.model_shapes import model_shapes

    outline, read = stated_tensors(model_shapes(config, rules), config)
    return outline, config, read
