"""The metadata of zarr arrays, versions 2 and 3: dtype, shape, chunks, codecs and the value of missing chunks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ...._dtypes import DTYPES, Dtype
from ...._text import shown
from ....errors import ParseError
from ...data.codecs import COMPRESSORS
from ...data.text import are_sizes, checked_shape

__all__ = ["MakeError", "ZarrArray", "array_of_version_2", "array_of_version_3"]


class ZarrArray(NamedTuple):
    """The metadata of an array.

    Attributes:
        name: The array's name in its store.
        stored: The byte order of its elements in a chunk, as in numpy's dtype texts: `>` for big-endian.
        chunk: The shape of a chunk; chunks at the edge have it too, and are padded.
        order: `C` or `F`: the order of the elements in a chunk.
        key: Returns the key of a chunk, given its position.
        codecs: The codecs that were applied to a chunk's bytes, in that order.
        inner: The shape of an inner chunk, if a chunk is a shard of several.
        index_checked: Whether the index of a shard ends with its CRC-32C.
        index_first: Whether the index is at the beginning of the shard.
        fill: The bytes of an element of a missing chunk; `None` if no chunk may be missing.
    """

    name: str
    dtype: Dtype
    stored: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    order: str
    key: Callable[[tuple[int, ...]], str]
    codecs: tuple[str, ...]
    inner: tuple[int, ...] | None
    index_checked: bool
    index_first: bool
    fill: bytes | None


MakeError = Callable[[str], ParseError]


def _shapes(name: str, shape: Any, chunk: Any, bits: int, error: MakeError) -> tuple[tuple[int, ...], tuple[int, ...]]:
    sizes = checked_shape(shape, bits, name, str(error("")).rpartition(": array")[0])
    if not are_sizes(chunk) or len(chunk) != len(sizes) or 0 in chunk:
        raise error(f"chunks of {shown(chunk)} do not fit the shape {sizes}")
    if math.prod(chunk) * bits > 8 * (2**63 - 1):
        raise error(f"chunks of {shown(chunk)} have more than 2**63 - 1 bytes")
    return sizes, tuple(chunk)


def array_of_version_2(name: str, said: dict[str, Any], error: MakeError, unsupported: MakeError) -> ZarrArray:
    """Return the metadata of a zarr 2 array, given its JSON; `error` and `unsupported` make the exceptions."""
    if said.get("zarr_format") != 2 or said.get("filters"):
        raise unsupported(
            f"zarr_format {shown(said.get('zarr_format'))} with filters {shown(said.get('filters'))} is not supported"
        )
    dtype, stored = _dtype2(said.get("dtype"))
    if dtype is None:
        raise unsupported(f"the dtype {shown(said.get('dtype'))} is not supported")
    shape, chunk = _shapes(name, said.get("shape"), said.get("chunks"), dtype.bits, error)
    compressor = said.get("compressor")
    kind = None if compressor is None else compressor.get("id") if isinstance(compressor, dict) else compressor
    if kind is not None and kind not in COMPRESSORS:
        raise unsupported(f"the compressor {shown(kind)} is not supported; supported are {', '.join(COMPRESSORS)}")
    separator, order = said.get("dimension_separator", "."), said.get("order")
    if separator not in (".", "/") or order not in ("C", "F"):
        raise error(f"dimension_separator {shown(separator)}, order {shown(order)}")

    def key(cell: tuple[int, ...]) -> str:
        return f"{name}/{separator.join(map(str, cell)) if cell else '0'}"

    fill = _fill(said.get("fill_value"), dtype, stored, error)
    codecs = () if kind is None else (kind,)
    return ZarrArray(name, dtype, stored, shape, chunk, order, key, codecs, None, False, False, fill)


def _dtype2(text: Any) -> tuple[Dtype | None, str]:
    if not isinstance(text, str):
        return None, ""
    if text in DTYPES:
        return (DTYPES[text] if DTYPES[text].bits % 8 == 0 else None), "<"
    if len(text) == 3 and text[0] in "<>|" and text[1] in "biufc":
        try:
            name = np.dtype(text[1:]).name
        except TypeError:
            return None, ""
        return DTYPES.get(name), ">" if text[0] == ">" else "<"
    if text in ("<c16", ">c16"):
        return DTYPES["complex128"], text[0]
    return None, ""


def array_of_version_3(name: str, said: dict[str, Any], error: MakeError, unsupported: MakeError) -> ZarrArray:
    """Return the metadata of a zarr 3 array, given its JSON; `error` and `unsupported` make the exceptions."""
    if said.get("zarr_format") != 3 or said.get("node_type") != "array" or said.get("storage_transformers"):
        raise unsupported("not the metadata of a supported zarr 3 array")
    text = said.get("data_type")
    dtype = DTYPES.get(text) if isinstance(text, str) else None
    if dtype is None or dtype.bits % 8:
        raise unsupported(f"the data_type {shown(text)} is not supported")
    grid, configuration = _named(said.get("chunk_grid"))
    if grid != "regular":
        raise unsupported(f"the chunk_grid {shown(grid)} is not supported; it must be regular")
    shape, chunk = _shapes(name, said.get("shape"), configuration.get("chunk_shape"), dtype.bits, error)
    key = _keys3(name, said.get("chunk_key_encoding"), unsupported)
    codecs = said.get("codecs")
    if not isinstance(codecs, list):
        raise error("codecs is not a list")
    inner, checked, first = None, False, False
    kind, configuration = _named(codecs[0]) if codecs else ("", {})
    if kind == "sharding_indexed":
        if len(codecs) > 1:
            raise unsupported("codecs around a shard are not supported")
        inner = configuration.get("chunk_shape")
        _, inner = _shapes(name, list(shape), inner, dtype.bits, error)
        if any(outer % size for outer, size in zip(chunk, inner, strict=True)):
            raise error(f"shards of {chunk} are not a whole number of chunks of {inner}")
        checked = _index_is_checked(configuration.get("index_codecs"), unsupported)
        location = configuration.get("index_location", "end")
        if location not in ("start", "end"):
            raise error(f"index_location {shown(location)}")
        first = location == "start"
        codecs = configuration.get("codecs")
    names, endian = _codecs3(codecs, unsupported)
    fill = _fill(said.get("fill_value"), dtype, endian, error)
    return ZarrArray(name, dtype, endian, shape, chunk, "C", key, names, inner, checked, first, fill)


def _named(value: Any) -> tuple[str, dict[str, Any]]:
    """Return the name and the configuration of an extension point of zarr 3."""
    if isinstance(value, str):
        return value, {}
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        configuration = value.get("configuration", {})
        return value["name"], configuration if isinstance(configuration, dict) else {}
    return "", {}


def _keys3(name: str, value: Any, error: MakeError) -> Callable[[tuple[int, ...]], str]:
    encoding, configuration = _named(value)
    if encoding not in ("default", "v2"):
        raise error(f"the chunk_key_encoding {shown(encoding)} is not supported")
    separator = configuration.get("separator", "/" if encoding == "default" else ".")
    if separator not in (".", "/"):
        raise error(f"the separator {shown(separator)} of the chunks' keys is not supported")
    if encoding == "default":
        return lambda cell: f"{name}/{separator.join(['c', *map(str, cell)])}"
    return lambda cell: f"{name}/{separator.join(map(str, cell)) if cell else '0'}"


def _codecs3(value: Any, error: MakeError) -> tuple[tuple[str, ...], str]:
    """Return the codecs from elements to bytes; the first one gives the byte order."""
    codecs = [_named(codec) for codec in value] if isinstance(value, list) else []
    names = [name for name, _ in codecs]
    if not codecs or names[0] != "bytes" or any(name not in (*COMPRESSORS, "crc32c") for name in names[1:]):
        raise error(f"the codecs {shown(names)} are not supported")
    endian = codecs[0][1].get("endian", "little")
    if endian not in ("little", "big"):
        raise error(f"the byte order {shown(endian)}")
    return tuple(names[1:]), ">" if endian == "big" else "<"


def _index_is_checked(value: Any, error: MakeError) -> bool:
    names, endian = _codecs3(value, error)
    if endian != "<" or names not in ((), ("crc32c",)):
        raise error(f"the index_codecs {shown(names)} are not supported")
    return names == ("crc32c",)


def _fill(value: Any, dtype: Dtype, endian: str, error: MakeError) -> bytes | None:
    """Return the bytes of a fill value; `None` if the metadata has none."""
    if value is None:
        return None
    size = dtype.bits // 8
    if value in (0, False) and not isinstance(value, str):
        return bytes(size)
    if isinstance(value, str) and value.startswith("0x") and len(value) == 2 + 2 * size:
        try:
            raw = bytes.fromhex(value[2:])
        except ValueError:
            raise error(f"the fill_value {shown(value)}") from None
        return raw if endian == ">" else raw[::-1]
    words = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
    try:
        number: Any = np.array(words.get(value, value) if isinstance(value, str) else value)
        if number.ndim != 0 or number.dtype.kind not in "biuf":
            return None
        return _swapped(number.astype(dtype.numpy()).tobytes(), endian)
    except (TypeError, ValueError, OverflowError, ImportError):
        return None  # Asked for only if a chunk is missing.


def _swapped(raw: bytes, endian: str) -> bytes:
    return raw[::-1] if endian == ">" else raw
