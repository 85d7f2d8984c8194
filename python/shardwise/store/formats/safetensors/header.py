"""The header of a safetensors file, read without touching the tensors.

The format, as https://github.com/huggingface/safetensors gives it:

- 8 bytes: the length of the header, an unsigned little-endian integer, at most 100,000,000;
- the header: a JSON object in UTF-8, tensor name -> `dtype`, `shape` and `data_offsets`; it may be padded with spaces;
- `data_offsets` are begin and end of the tensor's bytes, counted from the end of the header;
- `__metadata__`, if there, maps text to text;
- the rest: the tensors' bytes, little-endian, in C order, with no gap, no overlap and nothing after the last one.

Everything is checked before anything is used. Some rules are stricter than the `safetensors` package: a duplicate
name is refused, a size is at most 2**63 - 1, a tensor has at most 64 dims and a name at most 4,096 bytes. Names are
only ever names: none is used as a path.
"""

from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from ...._dtypes import CODES
from ...._json import MAX_JSON, strict_json
from ...._text import shown
from ....errors import ParseError
from ...data.files import Holder
from ...data.location import Location
from ...data.text import MAX_DIMS, are_sizes, checked_name
from ...tensors.kinds import kind_of
from ...tensors.stored import UnsupportedError

__all__ = ["Entry", "read_header"]

_LENGTH = 8
_INT = frozenset([int])


class Entry(NamedTuple):
    """An entry of a header, about one tensor.

    Attributes:
        dtype: The dtype as the format writes it: `F32`, `BF16`, ...
        start: The tensor's first byte, counted from the beginning of the file.
        stop: The byte after its last one.
        file: The file that holds the tensor.

    >>> from pathlib import Path
    >>> Entry("bias", "BF16", (3, 4), 104, 128, Path("model.safetensors")).nbytes
    24
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    file: Location

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        return self.stop - self.start

    @property
    def bits(self) -> int:
        """The size of one element in bits; not always a multiple of 8."""
        return CODES[self.dtype].bits

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of the array; ImportError if it needs ml_dtypes, TypeError if numpy cannot express it."""
        return CODES[self.dtype].numpy(f"tensor {self.name!r}", self.dtype)


def read_header(file: Holder) -> tuple[dict[str, Entry], dict[str, str]]:
    """Read and check a file's header: its tensors, in the header's order, and its metadata.

    Raises:
        ParseError: if the file does not follow the format; the message names the file and the byte or the tensor.
    """
    if file.size < _LENGTH:
        kind = kind_of(file.read(0, file.size))
        raise ParseError(
            f"{file.path}: has {file.size} bytes and is {kind}; a safetensors file has a length in its first {_LENGTH}"
        )
    length = int.from_bytes(file.read(0, _LENGTH), "little")
    begin = _LENGTH + length
    if length > MAX_JSON or begin > file.size:
        if other := _other_kind(file):
            refused = ParseError if other.startswith("zeros") else UnsupportedError  # Or it was one.
            raise refused(f"{file.path}: is not a safetensors file but {other}")
        if length > MAX_JSON:
            raise ParseError(f"{file.path}: byte 0: header of {length} bytes; at most {MAX_JSON} are allowed")
        raise ParseError(f"{file.path}: byte 0: is truncated: header of {length} bytes in a file of {file.size}")
    header = strict_json(file.read(_LENGTH, length), file.path, _LENGTH)
    if not isinstance(header, dict):
        raise ParseError(f"{file.path}: byte {_LENGTH}: the header is not a JSON object")
    metadata = _metadata(header.pop("__metadata__", None), file.path)
    known: _SizesKnown = {}
    entries = {name: _entry(checked_name(name, file.path), info, begin, file, known) for name, info in header.items()}
    _check_coverage(entries, begin, file)
    return entries, metadata


def _other_kind(file: Holder) -> str:
    """Return the kind of a file that does not begin with a header's length, as a text; empty if it is unknown."""
    head = file.read(0, min(file.size, 512))
    kind = "" if head[_LENGTH : _LENGTH + 1] == b"{" else kind_of(head)
    return "" if kind.startswith("of an unknown") else kind


def _metadata(value: object, path: Location) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ParseError(f"{path}: __metadata__ does not map text to text")
    return value


def _error(file: Holder, name: str, problem: str) -> ParseError:
    return ParseError(f"{file.path}: tensor {shown(name)}: {problem}")


#: A cache of the sizes in bytes by dtype and shape, which many tensors of a model share.
_SizesKnown = dict[tuple[str, tuple[int, ...]], int]


def _entry(name: str, info: Any, begin: int, file: Holder, known: _SizesKnown) -> Entry:
    # What is not exactly like a tensor before it is looked at more closely.
    try:
        dtype, shape, (first, last) = info["dtype"], tuple(info["shape"]), info["data_offsets"]
        is_like = type(info["shape"]) is list and _INT.issuperset(map(type, shape))
        if (
            is_like
            and known.get((dtype, shape)) == last - first
            and type(first) is type(last) is int
            and 0 <= first <= last <= file.size - begin
        ):
            return Entry(name, dtype, shape, begin + first, begin + last, file.path)
    except (KeyError, TypeError, ValueError):
        pass
    entry = _checked(name, info, begin, file)
    known[entry.dtype, entry.shape] = entry.nbytes
    return entry


def _checked(name: str, info: object, begin: int, file: Holder) -> Entry:
    if not isinstance(info, dict):
        raise _error(file, name, "is not described by a JSON object")
    try:
        dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    except KeyError as missing:
        raise _error(file, name, f"lacks {missing}") from None
    if not isinstance(dtype, str) or dtype not in CODES:
        raise _error(file, name, f"unknown dtype {shown(dtype)}; known are {', '.join(CODES)}")
    if not are_sizes(shape):
        raise _error(file, name, f"shape {shown(shape)} is not a list of integers from 0 to 2**63 - 1")
    if not are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _error(
            file, name, f"data_offsets {shown(offsets)} are not a begin and an end, integers from 0 to 2**63 - 1"
        )
    start, stop = begin + offsets[0], begin + offsets[1]
    if stop > file.size:
        raise _error(
            file, name, f"the file is truncated: data_offsets {offsets} end at byte {stop} of a file of {file.size}"
        )
    if _bits(shape, CODES[dtype].bits, 8 * file.size) != 8 * (stop - start):
        raise _error(
            file, name, f"shape {shown(shape)} of {dtype} does not fill {stop - start} bytes, data_offsets {offsets}"
        )
    if len(shape) > MAX_DIMS:
        raise _error(file, name, f"has {len(shape)} dims, over the limit of {MAX_DIMS}")
    return Entry(name, dtype, tuple(shape), start, stop, file.path)


def _bits(shape: list[int], bits: int, limit: int) -> int:
    """Return the bits of a tensor, or some number above `limit` if there are more."""
    if 0 in shape:
        return 0
    for size in shape:
        bits *= size
        if bits > limit:
            break
    return bits


def _check_coverage(entries: dict[str, Entry], begin: int, file: Holder) -> None:
    position = begin
    for entry in sorted(entries.values(), key=attrgetter("start", "stop")):
        if entry.start != position:
            problem = "leaves a gap" if entry.start > position else "overlaps the tensor before it"
            raise _error(file, entry.name, f"{problem}: it begins at byte {entry.start}, not {position}")
        position = entry.stop
    if position != file.size:
        raise ParseError(f"{file.path}: byte {position}: {file.size - position} bytes after the last tensor")
