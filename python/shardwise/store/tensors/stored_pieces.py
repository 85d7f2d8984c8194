"""Pieces of stored tensors: a box, and the place of its elements or the way to decode them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..._arguments import integer
from ..._text import bytes_text
from ...errors import LayoutError
from ...pieces import Bounds, LocatedPiece, Pieces
from ..data.boxes import Located, check_box
from ..data.files import ReadsFiles
from ..data.location import Location
from ..data.text import box_text

__all__ = ["Decoding", "ListedPieces", "StoredPiece", "check_chunk", "decoding_memory", "whole_box"]

#: The bytes that decoding a chunk may take by default, unless as much is read.
_MEMORY = 256 * 2**20


class Decoding(NamedTuple):
    """The way in which a piece is read that is not stored as it is.

    Attributes:
        read: Gives a box of it, counted from its beginning; `None` if there is nothing to decode.
        chunk: The elements and the bytes of one chunk of the piece, each of which is decoded as a whole, if it has
            chunks.
        stored: If some chunks of the piece are not stored: a function that gives the boxes of the stored ones, counted
            from its beginning.
        rest: The value of the elements of the other chunks, an array without dims.
    """

    read: Callable[[Bounds], npt.NDArray[Any]] | None
    chunk: tuple[int, int] | None = None
    stored: Callable[[], Iterable[Bounds]] | None = None
    rest: npt.NDArray[Any] | None = None


_NO_DECODING = Decoding(None)


class StoredPiece(ReadsFiles):
    """A box of a tensor, and where it is stored.

    Attributes:
        path: The file that holds the piece.
        key: The part of the file that has the piece, if the file has named parts; else an empty text.
        fill: The one value of all elements of the piece, as an array without dims, if none of them is stored; else
            None.
        stored: If some chunks of the piece are not stored: a function that gives the boxes of the stored ones, counted
            from its beginning.
        rest: The value of all elements of the chunks that are not stored.
        chunk: The elements and the bytes of one chunk of the piece, each of which is decoded as a whole; else None.
    """

    __slots__ = ("_decode", "_locate", "bounds", "chunk", "fill", "key", "path", "rest", "stored")

    def __init__(
        self,
        box: Bounds,
        path: Location,
        *,
        key: str = "",
        locate: Callable[[], Located] | None = None,
        decoding: Decoding | None = None,
        fill: npt.NDArray[Any] | None = None,
    ) -> None:
        if not (isinstance(box, tuple) and isinstance(key, str)):
            raise TypeError("open_checkpoint makes each StoredPiece: box must be a tuple, and key a text")
        self.bounds = box
        self.path = path
        self.key = key
        self._locate = locate
        self._decode, self.chunk, self.stored, self.rest = decoding or _NO_DECODING
        self.fill = fill

    @property
    def box(self) -> tuple[slice, ...]:
        """The place of the piece in the tensor: a slice per dim, as `Partition.box` gives it and `read` takes it."""
        return tuple(slice(start, stop) for start, stop in self.bounds)

    @property
    def is_addressable(self) -> bool:
        """True if the piece's elements are stored as they are; else it must be read whole and decoded."""
        return self._locate is not None

    def extent(self) -> LocatedPiece:
        """Say where the elements of the piece are stored: the box, the file, the first byte, and strides in bytes.

        For some formats this looks into the file.

        Raises:
            ValueError: if the piece is not addressable.
            ParseError: if the file does not hold what its index says.
        """
        if self._locate is None:
            raise ValueError(f"{self.path}: the piece {box_text(self.bounds)} is compressed; decode() reads it")
        return LocatedPiece(self.bounds, *self._locate())

    def decode(self, box: tuple[slice, ...] | None = None, *, memory: int | None = None) -> npt.NDArray[Any]:
        """Read a box of the piece, counted from the piece's own beginning, into an array; all of it if left out.

        Args:
            box: A slice per dim with step 1.
            memory: Bytes that decoding a chunk may take; see `StoredTensor.read`.

        Raises:
            ValueError: if the piece is addressable, so there is nothing to decode.
            LayoutError: if a chunk takes more memory.
            IndexError: if the box reaches outside the piece.
            ImportError: if decoding needs a library that is not installed.
            ParseError: if the file does not hold what its index says.
        """
        local = check_box(box, tuple(stop - start for start, stop in self.bounds))
        if self.chunk is not None:
            count, itemsize = self.chunk
            nbytes = math.prod(stop - start for start, stop in local) * itemsize
            check_chunk(
                f"{self.path}: the piece {box_text(self.bounds)}", count * itemsize, decoding_memory(memory, nbytes)
            )
        return self.decoded_box(local)

    def decoded_box(self, local: Bounds) -> npt.NDArray[Any]:
        """Return the elements of a box of the piece, decoded."""
        if self.fill is not None:
            return np.broadcast_to(self.fill, [stop - start for start, stop in local])
        if self._decode is not None:
            return self._decode(local)
        raise ValueError(f"{self.path}: the piece {box_text(self.bounds)} is addressable; extent() says where")

    def __repr__(self) -> str:
        return f"<StoredPiece {box_text(self.bounds)} in {str(self.path)!r}{f' {self.key!r}' if self.key else ''}>"


class ListedPieces(Sequence[StoredPiece]):
    """Pieces that are made when they are asked for, from their boxes and a function.

    Attributes:
        has_extents: Whether all are addressable, and `extents` says where they lie, without making one.
    """

    has_extents = False
    _table: Pieces | None = None

    def __init__(self, boxes: npt.NDArray[np.int64], make: Callable[[int, Bounds], StoredPiece]) -> None:
        self._boxes = boxes
        self._make = make

    @property
    def table(self) -> Pieces:
        """The boxes as a table, in which those that meet others are found."""
        if self._table is None:
            self._table = Pieces.boxed(self.boxes)
        return self._table

    @property
    def boxes(self) -> npt.NDArray[np.int64]:
        """The boxes: int64 of shape (pieces, dims, 2)."""
        return self._boxes

    def make(self, position: int, box: Bounds) -> StoredPiece:
        """Make one of them."""
        return self._make(position, box)

    def extents(self) -> Pieces:
        """Return the place of each, as `StoredPiece.extent` says it, as one table."""
        return Pieces.of((piece.extent() for piece in self), self.boxes.shape[1])

    def __len__(self) -> int:
        return len(self._boxes)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        position = operator.index(index)
        if not -len(self) <= position < len(self):
            raise IndexError(f"piece {position} of {len(self)}")
        position %= len(self)
        return self.make(position, tuple((start, stop) for start, stop in self.boxes[position].tolist()))


def decoding_memory(memory: int | None, nbytes: int) -> int:
    """Return the bytes that decoding a chunk may take where so many are read."""
    return max(_MEMORY, 2 * nbytes) if memory is None else integer("memory", memory)


def check_chunk(what: str, chunk: int, memory: int, more: int = 0) -> None:
    """Refuse chunks of so many bytes if one takes more memory than there is."""
    # A chunk as it is stored, which may be as long as what it gives, and decoded.
    needed = 2 * chunk + more
    if needed > memory:
        raise LayoutError(
            f"memory is {bytes_text(memory)}; {what} is stored in chunks of {bytes_text(chunk)}, each of which is "
            f"decoded at once: at least {bytes_text(needed)} are needed"
        )


def whole_box(shape: tuple[int, ...]) -> Bounds:
    """Return the box that is the whole tensor."""
    return tuple((0, size) for size in shape)
