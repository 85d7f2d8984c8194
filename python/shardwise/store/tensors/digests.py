"""Digests of the tensors of a checkpoint, and the CRC-32 that some formats have, in one read of all bytes."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import ParseError
from ...pieces import Bounds, LocatedPiece, Pieces
from ..data.engine import DIGEST_MODULUS, CopyJob, add_digests, digest_array
from ..data.location import Location
from .checkpoint import StoredCheckpoint, StoredSum
from .stored import StoredTensor

__all__ = ["DigestProgress", "Digested", "piece_digests", "tensor_digests"]

DigestProgress = Callable[[int, int], object]
"""Called now and then with the bytes done and the bytes in all."""

_MEMORY = 256 * 2**20
#: The bytes of a block of the digest; see the module `digest` of the crate `shardwise-io`.
_BLOCK = 4096
#: The most bytes of a range that are checked at once, without the engine.
_SMALL = 4096


def tensor_digests(
    checkpoint: StoredCheckpoint,
    names: Collection[str] | None = None,
    *,
    memory: int = _MEMORY,
    threads: int | None = None,
    progress: DigestProgress | None = None,
) -> dict[str, int]:
    """Digest these tensors of an open checkpoint, or all, within a memory limit; all their bytes are read.

    A tensor's digest does not depend on how it is cut; see `shardwise.store.data.engine`. Compare dtypes and shapes
    too.

    Raises:
        TypeError: if `checkpoint` is not an open checkpoint, or `names` is not a collection of names.
        KeyError: if the checkpoint has no tensor of a name.
        LayoutError: if a chunk that must be decoded takes more memory.
    """
    if not isinstance(checkpoint, StoredCheckpoint):
        raise TypeError(f"checkpoint must be an open checkpoint (see open_checkpoint), got {type(checkpoint).__name__}")
    if names is not None and (isinstance(names, (str, bytes)) or not isinstance(names, Collection)):
        raise TypeError(f"names must be a collection of names, got {type(names).__name__}")
    tensors = {name: checkpoint[name] for name in (checkpoint if names is None else names)}
    found = _digests(tensors, {}, memory, threads, progress, None)
    return {name: add_digests(parts) for name, parts in found.digests.items()}


@dataclass
class Digested:
    """The digests and faults found in the bytes of a checkpoint.

    Attributes:
        digests: For each tensor the digests of its pieces, in order; for a decoded tensor one digest of all.
        sums: The number of CRC-32 compared.
        wrong: The ranges whose CRC-32 is wrong, each with the actual one.
        unread: For each tensor that cannot be read the file, and the error.
    """

    digests: dict[str, list[int]] = field(default_factory=dict)
    sums: int = 0
    wrong: list[tuple[StoredSum, int]] = field(default_factory=list)
    unread: dict[str, tuple[Location, ParseError]] = field(default_factory=dict)


def piece_digests(
    tensors: Mapping[str, StoredTensor],
    sums: Iterable[StoredSum],
    memory: int,
    threads: int | None,
    progress: DigestProgress | None,
    note: Callable[[StoredSum], object] | None = None,
) -> Digested:
    """Digest each piece of each tensor and check the CRC-32 of ranges, in one read; damage does not end it.

    Args:
        tensors: The tensors, by name, of which some pieces may be missing.
        sums: The ranges that have a CRC-32.
        memory: Bytes for the buffers of all threads.
        threads: The number of threads.
        progress: Called now and then with the bytes done and the bytes in all.
        note: Called with each range that has a CRC-32.
    """
    large: dict[tuple[int, int], StoredSum] = {}
    count = 0
    wrong: list[tuple[StoredSum, int]] = []
    for each in sums:
        if each.error is not None:
            wrong.append((each, 0))
            continue
        count += 1
        if note is not None:
            note(each)
        if not each.file.is_fetched and each.size > _SMALL:
            large[id(each.file), each.start] = each
            continue
        crc = _fetched_crc(each, memory) if each.file.is_fetched else zlib.crc32(each.file.read(each.start, each.size))
        if crc != each.crc:
            wrong.append((each, crc))
    found = Digested(sums=count, wrong=wrong)
    return _digests(tensors, large, memory, threads, progress, found)


def _digests(
    tensors: Mapping[str, StoredTensor],
    sums: dict[tuple[int, int], StoredSum],
    memory: int,
    threads: int | None,
    progress: DigestProgress | None,
    found: Digested | None,
) -> Digested:
    """Digest each tensor, and check the CRC-32 of ranges in the same read.

    Args:
        tensors: The tensors that are read, by name.
        sums: The ranges, by file and first byte.
        memory: Bytes for the buffers of all threads.
        threads: The number of threads.
        progress: Called now and then with the bytes done and the bytes in all.
        found: Gets the results; if `None`, a tensor that cannot be read is an error.
    """
    job, files, arrays = CopyJob(), {}, {}
    result = Digested() if found is None else found
    sink = job.discard()
    #: For each tensor, and for each range, the numbers of the destination pieces that are digested.
    numbers: dict[str, range] = {}
    checked: dict[int, StoredSum] = {}

    def source(file: Any) -> int:
        if id(file) not in files:
            files[id(file)] = job.read_file(file.path, file.size, file.times)
        return files[id(file)]

    for name, tensor in tensors.items():
        result.digests[name] = []
        if tensor.size:
            tensor.check_decodable(memory)
    #: The first of tied tensors with the same pieces; they are read once.
    first_of: dict[tuple[Any, ...], str] = {}
    tied: dict[str, str] = {}
    for name, tensor in tensors.items():
        if not tensor.size:
            continue
        owner = first_of.setdefault((id(tensor.pieces), tensor.dtype, tensor.shape), name)
        if owner != name:
            tied[name] = owner
            continue
        if tensor.bits % 8:
            tensor = tensor.packed_bytes()
        if not tensor.is_addressable:
            arrays[name] = tensor
            continue
        try:
            pieces = Pieces.of((piece.extent() for piece in tensor.pieces), tensor.ndim)
        except ParseError as error:
            if found is None:
                raise
            result.unread[name] = _unreadable_file(tensor), error
            continue
        if any(holder.is_fetched for holder in pieces.holders):
            arrays[name] = tensor
            continue
        itemsize = tensor.bits // 8
        held = [piece._replace(holder=source(piece.holder)) for piece in pieces]
        whole = [_summed(sums, piece, itemsize) for piece in pieces]
        # One by one: the digest of each piece says which file is damaged.
        kept = [LocatedPiece.dense(piece.box, sink, 0, itemsize) for piece in held]
        first = job.add_tensor(tensor.shape, itemsize, held, kept, digest=True, crc=any(whole))
        checked |= {first + i: each for i, each in enumerate(whole) if each is not None}
        numbers[name] = range(first, first + len(kept))
    for each in sums.values():
        box = ((0, each.size),)
        held = [LocatedPiece(box, source(each.file), each.start, (1,))]
        checked[job.add_tensor([each.size], 1, held, [LocatedPiece(box, sink, 0, (1,))], crc=True)] = each
    done = job.run(budget=memory, threads=threads, progress=progress)
    result.wrong += [(each, done.crcs[number]) for number, each in checked.items() if done.crcs[number] != each.crc]
    for name, of in numbers.items():
        result.digests[name] = [done.digests[number] for number in of]
    for name, tensor in arrays.items():
        try:
            result.digests[name] = _decoded(tensor, memory)
        except _PieceError as error:
            if found is None:
                raise error.cause from None
            result.unread[name] = error.path, error.cause
    for name, owner in tied.items():
        result.digests[name] = result.digests[owner]
        if owner in result.unread:
            result.unread[name] = result.unread[owner]
    return result


def _unreadable_file(tensor: StoredTensor) -> Location:
    """Return the file of the first piece that is not at the place that its checkpoint states."""
    for piece in tensor.pieces:
        try:
            piece.extent()
        except ParseError:
            return piece.path
    return tensor.pieces[0].path


def _summed(sums: dict[tuple[int, int], StoredSum], piece: LocatedPiece, itemsize: int) -> StoredSum | None:
    """Remove and return the range that is exactly a piece's bytes, if there is one."""
    each = sums.get((id(piece.holder), piece.offset))
    if each is None or not Pieces.of([piece], len(piece.box)).are_runs(itemsize).all():
        return None
    if each.size != itemsize * math.prod(stop - start for start, stop in piece.box):
        return None
    return sums.pop((id(piece.holder), piece.offset))


class _PieceError(Exception):
    """Raised for a piece that cannot be read."""

    def __init__(self, path: Location, cause: ParseError) -> None:
        super().__init__(str(cause))
        self.path = path
        self.cause = cause


def _decoded(tensor: StoredTensor, memory: int) -> list[int]:
    """Return the digests of the pieces of a tensor that are compressed or in a store; fill values cost no time."""
    fills = (piece.rest if piece.fill is None else piece.fill for piece in tensor.pieces)
    fill = next((each for each in fills if each is not None), None)
    if fill is not None and not any(fill.tobytes()):
        fill = None  # Zeros add nothing.
    parts = [] if fill is None else [_constant(fill.tobytes(), tensor.nbytes)]
    for piece in tensor.pieces:
        if piece.fill is not None:
            continue
        sums = []
        try:
            for box, values in tensor.decoded_piece(piece, memory):
                sums.append(_of_box(tensor, box, np.asarray(values)))
                if fill is not None:  # Counted everywhere, and taken away again where something else is stored.
                    sums.append(-_of_box(tensor, box, np.broadcast_to(fill, values.shape)))
        except ParseError as error:
            raise _PieceError(piece.path, error) from None
        parts.append(add_digests(sums))
    return parts


def _of_box(tensor: StoredTensor, box: Bounds, values: npt.NDArray[Any]) -> int:
    """Return the contribution of a box with these elements to the digest of its tensor."""
    job = CopyJob()
    source = LocatedPiece(box, job.read_array(values), 0, values.strides)
    kept = LocatedPiece.dense(box, job.discard(), 0, values.itemsize)
    job.add_tensor(tensor.shape, values.itemsize, [source], [kept], digest=True)
    return job.run().digests[0]


def _constant(element: bytes, nbytes: int) -> int:
    """Return the digest of a tensor of this many bytes whose elements are all the same, without a loop over them.

    Each block of the digest has the same sum, and counts `R` times as much as the one before.
    """
    block = np.frombuffer(element * (_BLOCK // len(element)), np.uint8)
    first = np.zeros(_BLOCK + 1, np.uint8)
    first[_BLOCK] = 1
    key = digest_array(first[_BLOCK:])
    radix = digest_array(first) * pow(key, -1, DIGEST_MODULUS) % DIGEST_MODULUS
    count, rest = divmod(nbytes, _BLOCK)
    power = pow(radix, count, DIGEST_MODULUS)
    series = (power - 1) * pow(radix - 1, -1, DIGEST_MODULUS)
    return (digest_array(block) * series + digest_array(block[:rest]) * power) % DIGEST_MODULUS


def _fetched_crc(each: StoredSum, memory: int) -> int:
    """Return the CRC-32 of a range of an object, read block by block."""
    crc, step = 0, max(memory // 2, 1)
    for at in range(0, each.size, step):
        crc = zlib.crc32(each.file.read(each.start + at, min(step, each.size - at)), crc)
    return crc
