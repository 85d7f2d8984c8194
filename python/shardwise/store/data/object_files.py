"""An object of a store read like a data file: by few, large ranges of bytes, several at a time.

A request takes as long as reading a few megabytes. So two runs with a gap below a limit are read by one request; long
runs are divided into parts, of which `WINDOW` are requested at a time; and small reads, such as of headers, are served
from cached blocks.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from ..._fork import ForkLock
from ..._threads import Threads
from ..._types import Array
from ...errors import ParseError
from .files import Holder, is_in_order
from .objects import ObjectPath, ObjectStatus

__all__ = ["WINDOW", "ObjectFile", "Requests"]

#: The number of requests at a time.
WINDOW = 8


class Requests(NamedTuple):
    """The sizes of requests, in bytes.

    Attributes:
        part: The most bytes of a request.
        gap: The most bytes between two runs that are read needlessly to save a request.
        small: The most bytes of a read that is served from cached blocks.
        block: The bytes of a cached block.
        blocks: The number of cached blocks.
    """

    part: int = 8 * 2**20
    gap: int = 2**20
    small: int = 64 * 2**10
    block: int = 256 * 2**10
    blocks: int = 8


_REQUESTS = Requests()


class _RangeRequest(NamedTuple):
    """A request: its range of bytes, and the arrays that get them."""

    start: int
    stop: int
    part: Array
    strides: list[int] | None


class ObjectFile(Holder):
    """An object, open for reading: its size and ETag are noted, and a different object is refused.

    Args:
        noted: Its status, if known; requested now if left out.
        requests: The sizes of requests by which it is read.

    On S3 every request has the condition that the object is still the same; elsewhere `check` asks after reading.
    """

    is_fetched = True

    def __init__(self, path: ObjectPath, noted: ObjectStatus | None = None, requests: Requests = _REQUESTS) -> None:
        self.path = self._object = path
        self._requests = requests
        self._noted = path.status() if noted is None else noted
        self.size = self._noted.size
        self._closed = False
        self._lock = ForkLock()
        self._blocks: OrderedDict[int, bytes] = OrderedDict()

    @property
    def version(self) -> str:
        """Return the ETag, or the store's equivalent."""
        return self._noted.etag

    @property
    def noted(self) -> tuple[ObjectPath, int, str]:
        """Return the path, the size, and the ETag or its equivalent, when the object was opened."""
        return self._object, *self._noted

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectFile, (self._object, self._noted, self._requests)

    def close(self) -> None:
        """Drop the cached blocks; nothing can be read afterwards."""
        self._closed = True
        self._blocks.clear()

    def map(self) -> mmap.mmap:
        """Refuse: an object cannot be mapped into memory."""
        raise ValueError(f"{self.path}: is in an object store, so there is no array of it without a copy; read it")

    def check(self) -> None:
        """Raise ParseError if this name now has a different object from the one that was opened."""
        self._check_open()
        if self._object.is_s3 and self._noted.etag:
            return  # Every request had the condition.
        try:
            now = self._object.status()
        except FileNotFoundError:
            raise ParseError(f"{self.path}: no longer exists") from None
        if now != self._noted:
            raise ParseError(f"{self.path}: is a different object than before: it was replaced or written to")

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"{self.path}: this checkpoint is closed")

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer of bytes from the object's byte `offset` on; ParseError if it ends before."""
        self._check_open()
        end = offset + len(buffer)
        if end > self.size:
            raise ParseError(f"{self.path}: ends at byte {self.size}; bytes {offset} to {end} were needed")
        if len(buffer) <= self._requests.small:
            self._read_small(buffer, offset)
        else:
            out = np.frombuffer(buffer, np.uint8)
            self._fetch(_sections(offset, out, self._requests))

    def _read_small(self, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            number, skipped = divmod(offset + done, self._requests.block)
            piece = self._block(number)[skipped : skipped + len(buffer) - done]
            buffer[done : done + len(piece)] = piece
            done += len(piece)

    def _block(self, number: int) -> bytes:
        with self._lock:
            block = self._blocks.get(number)
            if block is not None:
                self._blocks.move_to_end(number)
                return block
        start = number * self._requests.block
        block = self._object.read(start, min(start + self._requests.block, self.size), self._noted.etag)
        with self._lock:
            self._blocks[number] = block
            while len(self._blocks) > self._requests.blocks:
                self._blocks.popitem(last=False)
        return block

    def read_box(self, start: int, strides: list[int], out: Array, span: int = 0) -> None:
        """Read a box whose first element is at byte `start`, the dims with the largest strides first."""
        self._check_open()
        self._fetch(_spans(start, strides, out, self._requests))

    def _fetch(self, spans: Iterable[_RangeRequest]) -> None:
        spans = iter(spans)
        first, second = next(spans, None), next(spans, None)
        if first is not None and second is None:
            self._put(first)
        if first is None or second is None:
            return
        waiting: deque[Future[None]] = deque()
        pool = Threads(WINDOW, "shardwise-read")
        try:
            for span in chain((first, second), spans):
                waiting.append(pool.submit(self._put, span))
                if len(waiting) >= 2 * WINDOW:
                    waiting.popleft().result()
            while waiting:
                waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _put(self, span: _RangeRequest) -> None:
        if span.strides is None:
            self._object.read_into(memoryview(span.part), span.start, self._noted.etag)  # type: ignore[arg-type]
        else:
            data = self._object.read(span.start, span.stop, self._noted.etag)
            span.part[...] = np.ndarray(span.part.shape, span.part.dtype, data, strides=span.strides)


def _sections(start: int, out: Array, requests: Requests) -> Iterator[_RangeRequest]:
    """Yield the requests for one run of bytes."""
    for at in range(0, len(out), requests.part):
        part = out[at : at + requests.part]
        yield _RangeRequest(start + at, start + at + len(part), part, None)


def _spans(start: int, strides: list[int], out: Array, requests: Requests) -> Iterator[_RangeRequest]:
    """Yield the requests for a box whose dims have decreasing strides."""
    if out.size == 0:
        return
    lengths = _lengths(strides, out)
    if lengths[0] == out.nbytes and out.flags.c_contiguous and is_in_order(strides, out):
        yield from _sections(start, out.reshape(-1).view(np.uint8), requests)
        return
    sizes = [dim for dim, size in enumerate(out.shape) if size > 1]
    # Between two rows of a dim lie the bytes by which its stride is longer than a row.
    is_dense = all(strides[dim] - lengths[dim + 1] <= requests.gap for dim in sizes)
    if is_dense and lengths[0] <= requests.part:
        yield _RangeRequest(start, start + lengths[0], out, strides)
        return
    dim = sizes[0]
    rows = max(1, (requests.part - lengths[dim + 1]) // max(strides[dim], 1) + 1) if is_dense else 1
    for row in range(0, out.shape[dim], rows):
        part = out[(slice(None),) * dim + (slice(row, row + rows),)]
        yield from _spans(start + row * strides[dim], strides, part, requests)


def _lengths(strides: Sequence[int], out: Array) -> list[int]:
    """Return for each dim the bytes that a box of this dim and the later ones spans; last, those of an element."""
    lengths = [out.itemsize]
    for size, stride in zip(reversed(out.shape), reversed(strides), strict=True):
        lengths.append(lengths[-1] + (size - 1) * stride)
    return lengths[::-1]
