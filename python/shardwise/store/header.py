"""The header of a safetensors file, read without touching the tensors.

The format, as https://github.com/huggingface/safetensors gives it:

- 8 bytes: the length of the header, an unsigned little-endian integer, at most 100,000,000;
- the header: a JSON object in UTF-8, tensor name -> `dtype`, `shape` and `data_offsets`; it may be padded with spaces;
- `data_offsets` are begin and end of the tensor's bytes, counted from the end of the header;
- `__metadata__`, if there, maps text to text;
- the rest: the tensors' bytes, little-endian, in C order, with no hole, no overlap and nothing behind the last one.

Everything is checked before anything is believed. Two rules are stricter than the `safetensors` package: a duplicate
name is refused, and a size is at most 2**63 - 1. Names are only ever names: none is used as a path.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._dtypes import CODES
from ..errors import ParseError
from .files import DataFile

__all__ = ["MAX_HEADER", "Entry", "read_header", "shorten", "strict_json"]

MAX_HEADER = 100_000_000
_LENGTH = 8
_MAX_SIZE = 2**63 - 1


class Entry(NamedTuple):
    """What a header says about one tensor.

    Attributes:
        name: The tensor's name.
        dtype: The dtype as the format writes it: `F32`, `BF16`, ...
        shape: Elements per dim.
        start: The tensor's first byte, counted from the beginning of the file.
        stop: The byte behind its last one.
        file: The file that holds it.

    >>> Entry("bias", "BF16", (3, 4), 104, 128, Path("model.safetensors")).nbytes
    24
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    file: Path

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.stop - self.start

    @property
    def bits(self) -> int:
        """The size of one element in bits; not always a multiple of 8."""
        return CODES[self.dtype].bits

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of the array; ImportError if it needs ml_dtypes, TypeError if numpy cannot express it."""
        return CODES[self.dtype].numpy(f"tensor {self.name!r}", self.dtype)


def read_header(file: DataFile) -> tuple[dict[str, Entry], dict[str, str]]:
    """Read and check a file's header: its tensors, in the header's order, and its metadata.

    Raises:
        ParseError: the file does not follow the format; names the file and the byte or the tensor.
    """
    if file.size < _LENGTH:
        raise ParseError(
            f"{file.path}: has {file.size} bytes; a safetensors file begins with the {_LENGTH} of a length"
        )
    length = int.from_bytes(file.read(0, _LENGTH), "little")
    if length > MAX_HEADER:
        raise ParseError(f"{file.path}: byte 0: header of {length} bytes; at most {MAX_HEADER} are allowed")
    begin = _LENGTH + length
    if begin > file.size:
        raise ParseError(f"{file.path}: byte 0: header of {length} bytes in a file of {file.size}")
    header = strict_json(file.read(_LENGTH, length), file.path, _LENGTH)
    if not isinstance(header, dict):
        raise ParseError(f"{file.path}: byte {_LENGTH}: the header is not a JSON object")
    metadata = _metadata(header.pop("__metadata__", None), file.path)
    entries = {name: _entry(name, info, begin, file) for name, info in header.items()}
    _check_coverage(entries, begin, file)
    return entries, metadata


def _metadata(value: object, path: Path) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ParseError(f"{path}: __metadata__ does not map text to text")
    return value


def _error(file: DataFile, name: str, problem: str) -> ParseError:
    return ParseError(f"{file.path}: tensor {shorten(name)}: {problem}")


def _entry(name: str, info: object, begin: int, file: DataFile) -> Entry:
    if not isinstance(info, dict):
        raise _error(file, name, "is not described by a JSON object")
    try:
        dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    except KeyError as missing:
        raise _error(file, name, f"lacks {missing}") from None
    if not isinstance(dtype, str) or dtype not in CODES:
        raise _error(file, name, f"unknown dtype {shorten(dtype)}; known are {', '.join(CODES)}")
    if not _are_sizes(shape):
        raise _error(file, name, f"shape {shorten(shape)} is not a list of integers from 0 to 2**63 - 1")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _error(
            file, name, f"data_offsets {shorten(offsets)} are not a begin and an end, integers from 0 to 2**63 - 1"
        )
    start, stop = begin + offsets[0], begin + offsets[1]
    if stop > file.size:
        raise _error(file, name, f"data_offsets {offsets} end at byte {stop} of a file of {file.size}")
    if _bits(shape, CODES[dtype].bits, 8 * file.size) != 8 * (stop - start):
        raise _error(
            file, name, f"shape {shorten(shape)} of {dtype} does not fill {stop - start} bytes, data_offsets {offsets}"
        )
    return Entry(name, dtype, tuple(shape), start, stop, file.path)


def _are_sizes(value: Any) -> bool:
    # `type` and not `isinstance`: a bool is no size. JSON's 1.0 arrives as a float.
    return (
        isinstance(value, list)
        and set(map(type, value)) <= {int}
        and min(value, default=0) >= 0
        and max(value, default=0) <= _MAX_SIZE
    )


def _bits(shape: list[int], bits: int, limit: int) -> int:
    """Give the bits of a tensor; no larger number than it takes to see that they are more than `limit`."""
    if 0 in shape:
        return 0
    for size in shape:
        bits *= size
        if bits > limit:
            break
    return bits


def _check_coverage(entries: dict[str, Entry], begin: int, file: DataFile) -> None:
    position = begin
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.stop)):
        if entry.start != position:
            problem = "leaves a hole" if entry.start > position else "overlaps the tensor before it"
            raise _error(file, entry.name, f"{problem}: it begins at byte {entry.start}, not {position}")
        position = entry.stop
    if position != file.size:
        raise ParseError(f"{file.path}: byte {position}: {file.size - position} bytes behind the last tensor")


def strict_json(data: bytes, path: Path, offset: int = 0) -> Any:
    """Parse JSON in UTF-8 that stands at byte `offset` of a file: no duplicate keys, no NaN, no lone surrogates.

    Raises:
        ParseError: names the file and, where there is one, the byte.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) != len(pairs):
            keys = sorted(key for key, _ in pairs)
            duplicate = next(key for key, following in pairwise(keys) if key == following)
            raise ParseError(f"{path}: duplicate key {shorten(duplicate)}")
        return mapping

    def no_constant(name: str) -> None:
        raise ParseError(f"{path}: {name} is not JSON")

    try:
        text = data.decode("utf-8")
        value = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
        if "\\u" in text:  # The only way in for half a surrogate pair, which no UTF-8 can say.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except ParseError:
        raise
    except UnicodeDecodeError as error:
        raise ParseError(f"{path}: byte {offset + error.start}: not UTF-8") from None
    except UnicodeEncodeError:
        raise ParseError(f"{path}: half a surrogate pair in a name or text") from None
    except json.JSONDecodeError as error:
        position = offset + len(text[: error.pos].encode("utf-8"))
        raise ParseError(f"{path}: byte {position}: not JSON: {error.msg}") from None
    except RecursionError:
        raise ParseError(f"{path}: JSON nested too deeply") from None
    except ValueError as error:  # An integer of more digits than Python is willing to read.
        raise ParseError(f"{path}: not JSON that can be read: {error}") from None
    return value


def shorten(value: object) -> str:
    """Give the `repr` of a value from a file, cut to a length that fits a message."""
    text = repr(value[:100] if isinstance(value, (str, list)) else value)
    return text if len(text) <= 100 else f"{text[:97]}..."
