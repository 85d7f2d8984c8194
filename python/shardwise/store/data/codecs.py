"""Decompression to an expected size, in memory of that size, whatever the compressed data claims."""

from __future__ import annotations

import bz2
import gzip
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._fork import importing
from ..._text import cut, shown
from ...errors import ParseError

__all__ = ["COMPRESSORS", "decompress", "decompress_node"]

_UNKNOWN = 2**64 - 1
#: The formats that can be decompressed, each with an upper bound on the bytes that one compressed byte can give.
_MOST_PER_BYTE = {"zstd": 1 << 16, "gzip": 1 << 11, "zlib": 1 << 11, "bz2": 1 << 17}
#: The names of these formats.
COMPRESSORS = tuple(_MOST_PER_BYTE)
#: The bytes that are decompressed in one step; and an allowance for a frame's head and checksums.
_STEP = 1 << 18
_FRAME = 1 << 10


def _zstd() -> Any:
    try:
        with importing:
            import zstandard
    except ImportError:
        message = "this checkpoint is compressed with zstd, which needs zstandard: pip install 'shardwise[orbax]'"
        raise ImportError(message, name="zstandard") from None
    return zstandard


def decompress(name: str, data: bytes, size: int, where: str) -> npt.NDArray[np.uint8]:
    """Return decompressed data, which must have exactly `size` bytes.

    Raises:
        ParseError: if it has a different size, or is damaged; the message begins with `where`.
        ImportError: if it is zstd, and zstandard is not installed.
    """
    zstandard = _zstd() if name == "zstd" else None
    if size > (len(data) + _FRAME) * _MOST_PER_BYTE[name]:
        raise ParseError(f"{where}: {len(data)} compressed bytes cannot give the {size} bytes that were expected")
    out = np.empty(size, np.uint8)
    try:
        count = _read_zstd(zstandard, data, out, where) if zstandard else _read(name, data, out, where)
    except (zlib.error, gzip.BadGzipFile, OSError, ValueError, EOFError) as error:
        if isinstance(error, ParseError):
            raise
        raise ParseError(f"{where}: is not {shown(name)} data: {cut(error)}") from None
    if count != size:
        more = "more" if count > size else f"{count}"
        raise ParseError(f"{where}: gives {more} bytes when decompressed; {size} were expected")
    return out


def decompress_node(data: bytes, most: int, where: str) -> bytes:
    """Return decompressed zstd data of at most `most` bytes."""
    zstandard = _zstd()
    try:
        _check_frame(zstandard, data, most, where)
        with zstandard.ZstdDecompressor().stream_reader(data) as reader:
            result: bytes = reader.read(most + 1)
    except zstandard.ZstdError as error:
        raise ParseError(f"{where}: is not zstd data: {cut(error)}") from None
    if len(result) > most:
        raise ParseError(f"{where}: gives more than {most} bytes when decompressed")
    return result


def _check_frame(zstandard: Any, data: bytes, most: int, where: str) -> None:
    size = zstandard.get_frame_parameters(data).content_size
    if size != _UNKNOWN and size > most:
        raise ParseError(f"{where}: claims {size} bytes when decompressed; the limit is {most}")


def _read_zstd(zstandard: Any, data: bytes, out: npt.NDArray[np.uint8], where: str) -> int:
    """Decompress into an array; return the number of bytes, or the array's size plus one if there are more."""
    try:
        _check_frame(zstandard, data, len(out), where)
        with zstandard.ZstdDecompressor().stream_reader(data) as reader:
            done = 0
            while done < len(out) and (count := reader.readinto(out[done:].data)):
                done += count
            return done + len(reader.read(1)) if done == len(out) else done
    except zstandard.ZstdError as error:
        raise ParseError(f"{where}: is not zstd data: {cut(error)}") from None


def _read(name: str, data: bytes, out: npt.NDArray[np.uint8], where: str) -> int:
    """Decompress data of the other formats into an array, step by step; return as `_read_zstd` does."""
    reader: Any = (
        bz2.BZ2Decompressor()
        if name == "bz2"
        else zlib.decompressobj(zlib.MAX_WBITS | 16 if name == "gzip" else zlib.MAX_WBITS)
    )
    done, at, rest, is_full = 0, 0, b"", False
    while not reader.eof:
        if not rest and not is_full:
            rest = data[at : at + _STEP]
            at += len(rest)
            if not rest:
                break
        most = min(len(out) - done + 1, _STEP)
        part = reader.decompress(rest, most)
        if done + len(part) > len(out):
            return len(out) + 1
        out[done : done + len(part)] = np.frombuffer(part, np.uint8)
        done += len(part)
        # Zlib gives back what it has not used; bzip2 keeps it, and goes on with nothing more.
        rest, is_full = getattr(reader, "unconsumed_tail", b""), len(part) == most
    if reader.eof and (reader.unused_data or at < len(data)):
        raise ParseError(f"{where}: goes on after the end of its {name} data")
    if done == len(out) and not reader.eof:
        raise ParseError(f"{where}: is truncated: its {name} data has no end")
    return done
