"""Decompression that gives the expected number of bytes, and no more, whatever the data claims."""

from __future__ import annotations

import bz2
import gzip
import zlib
from typing import Any

from ..._fork import importing
from ...errors import ParseError
from ..text import shorten

__all__ = ["COMPRESSORS", "decompress", "decompress_node"]

_UNKNOWN = 2**64 - 1
#: The names of what can be decompressed.
COMPRESSORS = ("zstd", "gzip", "zlib", "bz2")


def _zstd() -> Any:
    try:
        with importing:
            import zstandard
    except ImportError:
        message = "this checkpoint is compressed with zstd, which needs zstandard: pip install 'shardwise[orbax]'"
        raise ImportError(message, name="zstandard") from None
    return zstandard


def decompress(name: str, data: bytes, size: int, where: str) -> bytes:
    """Decompress data that must give `size` bytes.

    Raises:
        ParseError: if it gives a different number of bytes, or is not what it should be.
        ImportError: if it is zstd, and zstandard is not installed.
    """
    result = _decompress(name, data, size, where)
    if len(result) != size:
        more = "more" if len(result) > size else f"{len(result)}"
        raise ParseError(f"{where}: gives {more} bytes when decompressed; {size} were expected")
    return result


def decompress_node(data: bytes, most: int, where: str) -> bytes:
    """Decompress zstd data of at most `most` bytes."""
    result = _decompress("zstd", data, most, where)
    if len(result) > most:
        raise ParseError(f"{where}: gives more than {most} bytes when decompressed")
    return result


def _decompress(name: str, data: bytes, most: int, where: str) -> bytes:
    """At most `most + 1` bytes of the decompressed data."""
    if name == "zstd":
        zstandard = _zstd()
        try:
            size = zstandard.get_frame_parameters(data).content_size
            if size != _UNKNOWN and size > most:
                raise ParseError(f"{where}: claims {size} bytes when decompressed; the limit is {most}")
            with zstandard.ZstdDecompressor().stream_reader(data) as reader:
                result: bytes = reader.read(most + 1)
        except zstandard.ZstdError as error:
            raise ParseError(f"{where}: is not zstd data: {str(error)[:200]}") from None
        return result
    try:
        if name == "bz2":
            return bz2.BZ2Decompressor().decompress(data, most + 1)
        bits = zlib.MAX_WBITS | 16 if name == "gzip" else zlib.MAX_WBITS
        return zlib.decompressobj(bits).decompress(data, most + 1)
    except (zlib.error, gzip.BadGzipFile, OSError, ValueError, EOFError) as error:
        raise ParseError(f"{where}: is not {shorten(name)} data: {str(error)[:200]}") from None
