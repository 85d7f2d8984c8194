"""The reads of a device in the form that `preadv`, io_uring and HTTP take; nothing here reads a byte."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._arguments import instance, integer
from .._text import counted, shown
from .._types import Table
from ..errors import LayoutError
from ..reshard.model.memory import Block, check_apart
from ..store import DeviceReads
from .versions import MemoryRange, range_of

__all__ = ["HttpRange", "ReadCalls", "http_ranges", "read_calls"]

_CALL = np.dtype([("file", "i8"), ("offset", "i8"), ("length", "i8"), ("first", "i8"), ("stop", "i8")])
_VECTOR = np.dtype([("address", "u8"), ("length", "i8"), ("array", "i8"), ("destination", "i8")])
#: The most buffers of one `preadv` on Linux: `IOV_MAX`.
_VECTORS = 1024
_ETAG = re.compile(r'"[^"\s]*"|[0-9a-fA-F]{32}(-\d+)?')


class ReadCalls(NamedTuple):
    """Reads as `preadv` and io_uring take them: each call fills several buffers with a range of a file.

    Attributes:
        calls: A structured array: `file` (a position in `files`), `offset` and `length` in it, and `first` and `stop`,
            the buffers of the call in `vectors`, which it fills one after the other.
        vectors: A structured array: the `address` and the `length` of each buffer; its `array`, a position in
            `DeviceReads.arrays`, and the byte `destination` there. Gaps are read into scratch memory: `array` is -1.
    """

    files: tuple[Path, ...]
    calls: Table
    vectors: Table


class HttpRange(NamedTuple):
    """One request for a part of an object.

    Attributes:
        file: The object, or the file.
        headers: The headers of the request: `Range`, and `If-Match` where an ETag is known, so that a server refuses
            the request (412) if the object was replaced.
        length: The bytes of the answer's body.
        copies: A structured array: `array` (a position in `DeviceReads.arrays`), `destination` there, `offset` in the
            body and `length`.
    """

    file: Path
    headers: dict[str, str]
    length: int
    copies: Table


def read_calls(
    reads: DeviceReads, arrays: Sequence[Any], *, scratch: Any = None, max_vectors: int = _VECTORS
) -> ReadCalls:
    """Return the reads of a device as calls of `preadv`, into the arrays themselves.

    Args:
        reads: what `shardwise.store.device_reads` gives, for one device.
        arrays: the memory of each of `reads.arrays`, in C order; padding is not read, so it is zero beforehand.
        scratch: memory for the gaps that are read, as long as the longest of them; not needed with `over_read=0`.
        max_vectors: the most buffers of a call.

    Raises:
        LayoutError: if an array is missing or too small, `scratch` is too small, or several arrays need the same bytes;
            if arrays share memory; if a file is an object of a store.
        ParseError: if a file has changed since the reads were planned.

    >>> import tempfile
    >>> from shardwise import open_checkpoint, save_checkpoint
    >>> from shardwise.store import device_reads
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = save_checkpoint(Path(folder, "m.safetensors"), {"w": np.arange(8, dtype="f4")})
    ...     with open_checkpoint(report.path) as checkpoint:
    ...         reads = device_reads(checkpoint, {}, "cpu:0")
    ...     found = read_calls(reads, [np.zeros(8, "f4")])
    ...     found.calls["length"].tolist(), found.vectors["length"].tolist()
    ([32], [32])
    """
    instance("reads", reads, DeviceReads)
    most = integer("max_vectors", max_vectors)
    if most < 1:
        raise LayoutError(f"max_vectors is {most}; a call has at least one buffer")
    if stored := [file for file in reads.files if not isinstance(file, Path)]:
        raise LayoutError(
            f"{stored[0]} is an object of a store, which these calls cannot read; http_ranges gives the requests for it"
        )
    if len(arrays) != len(reads.arrays):
        raise LayoutError(f"arrays has {counted(len(arrays), 'array')}; the device has {len(reads.arrays)}")
    reads.check()
    into = [range_of(f"arrays[{at}]", array, None, True) for at, array in enumerate(arrays)]
    for at, (one, array) in enumerate(zip(into, reads.arrays, strict=True)):
        if one.nbytes < array.nbytes:
            raise LayoutError(f"arrays[{at}] has {one.nbytes} bytes, but {shown(array.name)} has {array.nbytes}")
    spare = None if scratch is None else range_of("scratch", scratch, None, True)
    written = [*into, *([] if spare is None else [spare])]
    check_apart([Block(f"arrays[{at}]", *_span(one), one.device) for at, one in enumerate(written)], [])
    copies = reads.copies[reads.copies["length"] > 0]
    copies = copies[np.lexsort((copies["offset"], copies["read"]))]
    ends = copies["offset"] + copies["length"]
    is_first = np.concatenate([[True], copies["read"][1:] != copies["read"][:-1]])[: len(copies)]
    gaps = copies["offset"] - np.where(is_first, 0, np.concatenate([[0], ends[:-1]])[: len(copies)])
    if (gaps < 0).any():
        raise LayoutError(
            "several arrays need the same bytes, but a call reads them into one place; ask device_reads for one device"
        )
    longest = int(gaps.max(initial=0))
    if longest > (0 if spare is None else spare.nbytes):
        held = "is not given" if spare is None else f"has {spare.nbytes} bytes"
        raise LayoutError(
            f"scratch {held}; the longest gap that is read has {longest}. Give more, or plan with over_read=0"
        )
    # A buffer for the gap before each run that has one, and one for the run.
    places = np.arange(len(copies)) + np.cumsum(gaps > 0)
    vectors = np.zeros(len(copies) + int(np.count_nonzero(gaps)), _VECTOR)
    vectors["array"] = -1
    vectors["address"] = 0 if spare is None else spare.address
    vectors["length"][places[gaps > 0] - 1] = gaps[gaps > 0]
    bases = np.array([one.address for one in into], np.uint64)
    vectors["address"][places] = bases[copies["array"]] + copies["destination"].astype(np.uint64)
    for name in ("length", "array", "destination"):
        vectors[name][places] = copies[name]
    read = np.repeat(copies["read"], 1 + (gaps > 0))
    begins = np.cumsum(vectors["length"]) - vectors["length"]
    starts = np.flatnonzero(np.concatenate([[True], read[1:] != read[:-1]])[: len(read)])
    sizes = np.diff(np.append(starts, len(read)))
    # The number of each buffer in its read says where the next call begins.
    number = np.arange(len(read)) - np.repeat(starts, sizes)
    firsts = np.flatnonzero(number % most == 0)
    calls = np.zeros(len(firsts), _CALL)
    calls["first"], calls["stop"] = firsts, np.append(firsts[1:], len(read))
    calls["length"] = np.add.reduceat(vectors["length"], firsts) if len(firsts) else 0
    within = (begins - np.repeat(begins[starts], sizes))[firsts]
    calls["file"], calls["offset"] = reads.reads["file"][read[firsts]], reads.reads["offset"][read[firsts]] + within
    return ReadCalls(reads.files, calls, vectors)


def http_ranges(reads: DeviceReads) -> list[HttpRange]:
    """Return the reads of a device, or of several, as requests: one for each read, which any client of HTTP can make.

    Where a store has no ETag, a request has no condition; then `reads.check()` after the last answer notices an object
    that was replaced meanwhile.

    >>> from shardwise.store import ReadArray
    >>> rows = np.array([(0, 100, 32)], [("file", "i8"), ("offset", "i8"), ("length", "i8")])
    >>> fields = [(name, "i8") for name in ("read", "offset", "array", "destination", "length")]
    >>> array = ReadArray("w", "cpu:0", "float32", (8,), 32)
    >>> reads = DeviceReads((Path("m"),), (array,), rows, np.array([(0, 0, 0, 0, 32)], fields), 32, ('"5eb6"',))
    >>> http_ranges(reads)[0].headers
    {'Range': 'bytes=100-131', 'If-Match': '"5eb6"'}
    """
    instance("reads", reads, DeviceReads)
    order = np.argsort(reads.copies["read"], kind="stable")
    copies = reads.copies[order][["array", "destination", "offset", "length"]]
    ends = np.searchsorted(reads.copies["read"][order], np.arange(len(reads.reads)), side="right").tolist()
    found, begin = [], 0
    for (file, offset, length), end in zip(reads.reads.tolist(), ends, strict=True):
        headers = {"Range": f"bytes={offset}-{offset + length - 1}"}
        etag = reads.versions[file]
        if _ETAG.fullmatch(etag):
            headers["If-Match"] = etag if etag.startswith('"') else f'"{etag}"'
        if length:
            found.append(HttpRange(reads.files[file], headers, length, copies[begin:end]))
        begin = end
    return found


def _span(one: MemoryRange) -> tuple[int, int]:
    return one.address, one.address + one.nbytes
