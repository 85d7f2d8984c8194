"""Stored tensors, as every format's reader returns them: each with its pieces."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..._boxes import consecutive
from ..._drawn import Drawn
from ..._dtypes import Dtype, bytes_for, in_bytes
from ..._fork import importing
from ..._text import counted, shown
from ...errors import ParseError
from ...pieces import Bounds, Pieces, shared_box
from ...tiling import Tiling
from ..data.boxes import Located, check_box, check_out, contiguous_strides, expressible, read_piece
from ..data.files import Holder, ReadsFiles
from ..data.text import box_text
from .stored_pieces import ListedPieces, StoredPiece, check_chunk, decoding_memory

if TYPE_CHECKING:
    from ...show.picture import Picture

__all__ = ["StoredTensor", "UnsupportedError"]


class UnsupportedError(ParseError):
    """Raised for a file, or a part of one, that may follow its format, but is of a kind that cannot be read."""


class StoredTensor(Drawn, ReadsFiles):
    """A tensor of a checkpoint: its dtype and shape, and which file holds which box of it.

    Attributes:
        dtype: The tensor's dtype, as numpy, ml_dtypes and PyTorch call it.
        pieces: Boxes that tile the tensor, each with its place in a file.
        replicas: Further pieces, with the same elements as some of `pieces`.
        alias_of: The name of the tensor whose elements this one shares, if the file has one storage for both; it may be
            a part of that tensor, or in another order of dims.
        chunk: The shape of the chunks that must be decoded as a whole, counted from the start of a piece; `None` if
            elements are stored as plain bytes.
    """

    __slots__ = ("alias_of", "chunk", "known_dtype", "name", "pieces", "replicas", "shape")

    def __init__(
        self,
        name: str,
        dtype: Dtype,
        shape: tuple[int, ...],
        pieces: Sequence[StoredPiece],
        *,
        replicas: Sequence[StoredPiece] = (),
        alias_of: str | None = None,
        chunk: tuple[int, ...] | None = None,
    ) -> None:
        is_one = isinstance(name, str) and isinstance(dtype, Dtype) and isinstance(shape, tuple)
        if not (is_one and isinstance(pieces, Sequence) and isinstance(alias_of, (str, type(None)))):
            raise TypeError("open_checkpoint makes each StoredTensor, of a name, a Dtype, a shape and pieces")
        self.name = name
        self.known_dtype = dtype
        self.shape = shape
        self.pieces = pieces
        self.replicas = replicas
        self.alias_of = alias_of
        self.chunk = chunk

    @property
    def dtype(self) -> str:
        """The name of the dtype."""
        return self.known_dtype.name

    @property
    def bits(self) -> int:
        """The size of one element in bits; not always a multiple of 8."""
        return self.known_dtype.bits

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of an array of the tensor; ImportError if it needs ml_dtypes, TypeError if numpy has none."""
        return self.known_dtype.numpy(f"tensor {shown(self.name)}")

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size in bytes, counted once."""
        return bytes_for(self.size, self.bits)

    @property
    def boxes(self) -> npt.NDArray[np.int64]:
        """The boxes of `pieces`: int64 of shape (pieces, dims, 2)."""
        pieces = self.pieces
        boxes = np.array(pieces.boxes if isinstance(pieces, ListedPieces) else [p.bounds for p in pieces], np.int64)
        return boxes.reshape(len(self.pieces), self.ndim, 2)

    @property
    def tiling(self) -> Tiling:
        """The boxes of each holder, to plan with: holder i is `pieces[i]`."""
        return Tiling.from_boxes(self.shape, self.boxes)

    def read(
        self,
        box: tuple[slice, ...] | None = None,
        *,
        out: npt.NDArray[Any] | None = None,
        memory: int | None = None,
    ) -> npt.NDArray[Any]:
        """Copy a box of the tensor into new memory.

        Args:
            box: A slice per dim with step 1, as `Partition.box` gives it; the whole tensor if left out.
            out: A writable C-contiguous array of the box's shape and the tensor's dtype to read into.
            memory: Bytes that decoding a compressed chunk may take, even if the box needs few of its elements; by
                default 256 MiB, or twice the bytes of the box if these are more.

        Returns:
            `out`, or a new array.

        Raises:
            ImportError: if the tensor's dtype needs ml_dtypes, or its pieces need a library to be decoded, which is not
                installed.
            TypeError: if numpy has no such dtype, or the tensor has more dims than an array may have.
            SizeOverflowError: if the tensor's sizes are too large for an array, even if one of them is 0.
            IndexError: if the box does not have one slice per dim, or reaches outside the tensor.
            ValueError: if `out` does not fit, or the checkpoint is closed.
            LayoutError: if a chunk that must be decoded takes more memory; the message says how much.
            ParseError: if a file changed since it was opened, or does not hold what its index says; `out` may be partly
                written.
            OSError: if a file cannot be read.
        """
        dtype = self.numpy_dtype
        bounds = check_box(box, self.shape)
        shape = tuple(stop - start for start, stop in bounds)
        if out is None:
            with expressible(shown(self.name), self.shape, dtype):
                out = np.empty(shape, dtype)
        target = check_out(out, shape, dtype)
        files: dict[int, Holder] = {}
        for position in self.overlapping(bounds) if target.size else ():
            piece = self.pieces[position]
            common = shared_box(piece.bounds, bounds)
            inner = [low - start for (low, _), (start, _) in zip(common, piece.bounds, strict=True)]
            region = tuple(
                slice(low - start, high - start) for (low, high), (start, _) in zip(common, bounds, strict=True)
            )
            index: tuple[Any, ...] = (*region, ...)  # With an ellipsis, so that a box without dims is a view too.
            part = target[index]
            if piece.is_addressable:
                extent = piece.extent()
                files[id(extent.holder)] = extent.holder
                read_piece(extent, inner, part)
            else:
                if piece.fill is None:
                    self.check_decodable(decoding_memory(memory, target.nbytes))
                part[...] = piece.decoded_box(
                    tuple((at, at + size) for at, size in zip(inner, part.shape, strict=True))
                )
        for file in files.values():
            file.check()
        return target

    @property
    def is_addressable(self) -> bool:
        """True if all elements are stored as plain bytes; False if some must be decoded."""
        known = isinstance(self.pieces, ListedPieces) and self.pieces.has_extents
        return known or all(piece.is_addressable for piece in self.pieces)

    def check_decodable(self, memory: int, wider: int = 0) -> None:
        """Refuse a tensor if decoding one chunk takes more than the memory.

        Args:
            memory: Bytes that decoding may take.
            wider: Bytes of an element of the dtype to which the chunk is converted, if it is.

        Raises:
            LayoutError: if the memory is too little; the message says how much is needed.
        """
        if self.chunk is not None:
            count, itemsize = math.prod(self.chunk), bytes_for(1, self.bits)
            check_chunk(f"tensor {shown(self.name)}", count * itemsize, memory, count * wider)

    @property
    def decoding(self) -> int:
        """The bytes that decoding one chunk takes; 0 where elements are stored as they are."""
        return 0 if self.chunk is None else 2 * math.prod(self.chunk) * bytes_for(1, self.bits)

    def decoded(self, memory: int) -> Iterator[tuple[Bounds, npt.NDArray[Any]]]:
        """Read what is stored, as boxes of whole chunks with their elements, so that each chunk is decoded once.

        Args:
            memory: Bytes for a box; one of a single chunk may take more.
        """
        for piece in self.pieces:
            if piece.fill is None:
                yield from self.decoded_piece(piece, memory)

    def decoded_piece(
        self, piece: StoredPiece, memory: int, *, filled: bool = False
    ) -> Iterator[tuple[Bounds, npt.NDArray[Any]]]:
        """Read a piece of the tensor as `decoded` does; with `filled` also the elements that are not stored."""
        for inner in piece.stored() if piece.stored is not None and not filled else self._blocks_of(piece, memory):
            box = tuple((at + low, at + high) for (at, _), (low, high) in zip(piece.bounds, inner, strict=True))
            if not piece.is_addressable:
                yield box, piece.decoded_box(inner)
                continue
            extent = piece.extent()
            values = np.empty([high - low for low, high in inner], self.numpy_dtype)
            read_piece(extent, [low for low, _ in inner], values)
            extent.holder.check()
            yield box, values

    def _blocks_of(self, piece: StoredPiece, memory: int) -> Iterator[Bounds]:
        """Boxes of a piece, of whole chunks, counted from its beginning."""
        chunk = self.chunk or (1,) * self.ndim
        most = max(memory // (2 * max(math.prod(chunk) * bytes_for(1, self.bits), 1)), 1)
        sizes = [stop - start for start, stop in piece.bounds]
        cells = tuple(-(-size // step) for size, step in zip(sizes, chunk, strict=True))
        for cell in consecutive(cells, most):
            yield tuple(
                (side.start * step, min(side.stop * step, size))
                for side, step, size in zip(cell, chunk, sizes, strict=True)
            )

    def overlapping(self, bounds: Bounds) -> Sequence[int]:
        """Return the positions of the pieces that share elements with a box."""
        if len(self.pieces) == 1:
            return range(1)
        table = self.pieces.table if isinstance(self.pieces, ListedPieces) else Pieces.boxed(self.boxes)
        found: list[int] = table.meeting(bounds).tolist()
        return found

    def packed_bytes(self) -> StoredTensor:
        """Return the bytes of a tensor whose elements are packed, several to a byte; see `in_bytes`.

        Raises:
            ParseError: if a piece of the tensor begins or ends within a byte.
        """
        dtype, shape = in_bytes(self.known_dtype, self.shape)
        bits, inner = dtype.packed or (8, ())
        at = self.ndim - 1 - len(inner)
        row = math.prod(inner) * bits

        def in_pieces(piece: StoredPiece) -> StoredPiece:
            box = piece.bounds
            start, stop = box[at]
            if start * row % 8 or stop * row % 8 or box[at + 1 :] != tuple((0, size) for size in inner):
                where = box_text(box)
                raise ParseError(f"tensor {shown(self.name)}: its piece {where} of {self.dtype} begins within a byte")
            bounds = (*box[:at], (start * row // 8, stop * row // 8), *((0, 1),) * len(inner))

            def locate() -> Located:
                extent = piece.extent()
                dense = contiguous_strides([b - a for a, b in bounds], 1)
                return (extent.holder, extent.offset, extent.strides if any(extent.strides) else dense)

            return StoredPiece(bounds, piece.path, key=piece.key, locate=locate)

        pieces, replicas = ([in_pieces(piece) for piece in some] for some in (self.pieces, self.replicas))
        return StoredTensor(self.name, dtype, shape, pieces, replicas=replicas, alias_of=self.alias_of)

    def array(self) -> npt.NDArray[Any]:
        """Return the tensor as a read-only, memory-mapped array, without a copy.

        The array outlives the checkpoint. Reading it after the file has been truncated kills the process (SIGBUS);
        `read` is safe.

        Raises:
            ValueError: if the tensor is stored in several pieces or compressed, so that it needs a copy; or the
                checkpoint is closed.
            ImportError, TypeError, SizeOverflowError: as for `read`.
            ParseError: if the file changed since it was opened.
        """
        dtype = self.numpy_dtype
        if self.size == 0:
            with expressible(shown(self.name), self.shape, dtype):
                empty: npt.NDArray[Any] = np.empty(self.shape, dtype)
            empty.flags.writeable = False
            return empty
        if len(self.pieces) != 1 or not self.pieces[0].is_addressable:
            why = (
                f"lies in {len(self.pieces)} pieces"
                if len(self.pieces) != 1
                else "is compressed, or in another order of bytes"
            )
            raise ValueError(f"tensor {shown(self.name)} {why}, so there is no array of it without a copy; read it")
        extent = self.pieces[0].extent()
        array: npt.NDArray[Any] = np.ndarray(self.shape, dtype, extent.holder.map(), extent.offset, extent.strides)
        return array

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            return np.asarray(self.array(), dtype)
        return np.asarray(self.read(), dtype)

    def _picture(self) -> Picture:
        with importing:
            from .notebook import tensor_picture

        return tensor_picture(self)

    def __repr__(self) -> str:
        pieces = counted(len(self.pieces), "piece")
        alias = f", shares the storage of {shown(self.alias_of)}" if self.alias_of is not None else ""
        shape = self.shape if self.ndim <= 8 else f"{self.ndim} dims"
        return f"<StoredTensor {shown(self.name)}: {self.dtype} {shape}, {pieces}{alias}>"
