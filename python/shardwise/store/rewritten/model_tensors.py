"""The names and shapes of tensors without a checkpoint: from a model's configuration, or from a list of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..._dtypes import CODES, DTYPES, Dtype
from ..._json import MAX_JSON, strict_json
from ..._text import shown
from ...errors import ParseError
from ...quantized.outline import Outline
from ...quantized.stated import stated_tensors
from ...rules.model_shapes import model_shapes
from ...rules.toml_tables import parse_toml
from ..data.text import are_sizes, checked_name, checked_shape

__all__ = ["described_tensors", "is_described"]


def is_described(path: Path) -> bool:
    """Return whether a path is a JSON or TOML file that may list tensors, or be a model's configuration."""
    name = path.name
    return name.endswith((".json", ".toml")) and not name.endswith((".index.json", ".weights.json")) and path.is_file()


def described_tensors(path: Path, rules: str | os.PathLike[str] | None = None) -> Outline:
    """Read the names and shapes of tensors from a model's `config.json`, or from a list in JSON or TOML.

    A list has an entry for each name: a shape, or a table with `shape` and `dtype`; the dtype is bfloat16 if left out.
    Rules may state the tensors of a configuration.

    Raises:
        OSError: if the file cannot be read.
        ParseError: if it is neither; the message names the entry.
    """
    if path.stat().st_size > MAX_JSON:
        raise ParseError(f"{path}: has more than {MAX_JSON} bytes")
    data = path.read_bytes()
    said: Any
    if path.name.endswith(".json"):
        said = strict_json(data, path)
    else:
        try:
            said = parse_toml(data.decode("utf-8"), str(path))
        except UnicodeDecodeError as error:
            raise ParseError(f"{path}: byte {error.start}: not UTF-8") from None
    if not isinstance(said, dict):
        raise ParseError(f"{path}: is neither a model's configuration nor a list of tensors with their shapes")
    if "model_type" in said or "architectures" in said:
        outline, _ = stated_tensors(model_shapes(said, rules), said)
        return {name: (shape, CODES[code]) for name, (code, shape) in outline.items()}
    listed = said.get("tensors", said)
    if not isinstance(listed, dict):
        raise ParseError(f"{path}: tensors must be a table of names with shapes, got {shown(listed)}")
    found = {}
    for name, entry in listed.items():
        checked_name(name, path)
        more = entry if isinstance(entry, dict) else {"shape": entry}
        shape: Any = more.get("shape")
        if not set(more) <= {"shape", "dtype"} or not are_sizes(shape):
            raise ParseError(f"{path}: {shown(name)} is {shown(entry)}; it must be a shape, or have a shape and dtype")
        dtype = _dtype(path, name, more.get("dtype", "bfloat16"))
        found[name] = checked_shape(shape, dtype.bits, name, path), dtype
    if not found:
        raise ParseError(f"{path}: lists no tensors")
    return found


def _dtype(path: Path, name: str, value: Any) -> Dtype:
    found = DTYPES.get(value) if isinstance(value, str) else None
    if found is None:
        raise ParseError(f"{path}: {shown(name)} has the dtype {shown(value)}, which is unknown")
    return found
