"""Digests of the tensors of a checkpoint, and the CRC-32 that some formats have, in one read of all bytes."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from .._boxes import consecutive
from .._text import shown
from ..errors import ParseError
from .engine import CopyJob, HeldPiece, add_digests
from .object_files import ObjectFile
from .objects import ObjectPath
from .protocol import StoredCheckpoint, StoredSum, StoredTensor
from .write.wanted import SourcePiece, held_piece, is_one_run, wanted_stored

__all__ = ["Progress", "tensor_digests", "verified_digests"]

Progress = Callable[[int, int], object]
"""Called now and then with the bytes done and the bytes in all."""

_MEMORY = 256 * 2**20
#: The most bytes of a stretch that are checked at once, without the engine.
_SMALL = 4096


def tensor_digests(
    checkpoint: StoredCheckpoint,
    names: Collection[str] | None = None,
    *,
    memory: int = _MEMORY,
    threads: int | None = None,
    progress: Progress | None = None,
) -> dict[str, int]:
    """Digest these tensors of an open checkpoint, or all, within a memory limit; all their bytes are read.

    A tensor's digest does not depend on how it is cut; see `shardwise.store.engine`. Compare dtypes and shapes too.

    Raises:
        TypeError: if it is not an open checkpoint, or `names` is not a collection of names.
        KeyError: if it has no tensor of a name.
    """
    if not isinstance(checkpoint, StoredCheckpoint):
        raise TypeError(f"checkpoint must be an open checkpoint (see open_checkpoint), got {type(checkpoint).__name__}")
    if names is not None and (isinstance(names, (str, bytes)) or not isinstance(names, Collection)):
        raise TypeError(f"names must be a collection of names, got {type(names).__name__}")
    return _digests(checkpoint, checkpoint if names is None else names, {}, memory, threads, progress)


def verified_digests(
    checkpoint: StoredCheckpoint,
    memory: int,
    threads: int | None,
    progress: Progress | None,
    note: Callable[[StoredSum], object] | None = None,
) -> tuple[dict[str, int], int]:
    """Digest each tensor as `tensor_digests` does, and check each CRC-32 that the checkpoint has in the same read.

    Args:
        checkpoint: The checkpoint.
        memory: Bytes for the buffers of all threads.
        threads: How many.
        progress: Called now and then with the bytes done and the bytes in all.
        note: Called with each stretch that has a CRC-32.

    Returns:
        The digests, and the number of CRC-32 checked.

    Raises:
        ParseError: if a CRC-32 does not match; names the file and the first of the bytes.
    """
    large: dict[tuple[int, int], StoredSum] = {}
    count = 0
    for each in checkpoint.sums():
        count += 1
        if note is not None:
            note(each)
        if isinstance(each.file, ObjectFile):
            _check_crc(each, _fetched_crc(each, memory))
        elif each.size > _SMALL:
            large[id(each.file), each.start] = each
        else:
            _check_crc(each, zlib.crc32(each.file.read(each.start, each.size)))
    return _digests(checkpoint, checkpoint, large, memory, threads, progress), count


def _digests(
    checkpoint: StoredCheckpoint,
    names: Collection[str],
    sums: dict[tuple[int, int], StoredSum],
    memory: int,
    threads: int | None,
    progress: Progress | None,
) -> dict[str, int]:
    """Digest each tensor; check the CRC-32 of these stretches, by file and first byte, in the same read."""
    job, files, arrays = CopyJob(), {}, {}
    sink = job.discard()
    #: For each tensor, and each stretch, the destination pieces that are digested.
    numbers: dict[str, range] = {}
    checked: dict[int, StoredSum] = {}

    def source(file: Any) -> int:
        if id(file) not in files:
            files[id(file)] = job.read_file(file.path, file.size, file.times)
        return files[id(file)]

    is_remote = isinstance(checkpoint.path, ObjectPath)
    for name in names:
        tensor = checkpoint[name]
        if not tensor.size:
            continue
        if tensor.bits % 8:
            tensor = tensor._packed_bytes()
        if is_remote or not all(piece.is_addressable for piece in tensor.pieces):
            arrays[name] = tensor
            continue
        wanted = wanted_stored(name, tensor, None)
        held = [held_piece(source(piece.holder), piece) for piece in wanted.pieces]
        whole = [_summed(sums, piece, wanted.itemsize) for piece in wanted.pieces]
        if any(whole):
            # The boxes whose CRC-32 are known, one by one.
            kept = [HeldPiece(sink, 0, piece.start, piece.stop) for piece in held]
            first = job.add_tensor(tensor.shape, wanted.itemsize, held, kept, digest=True, crc=True)
            checked |= {first + i: each for i, each in enumerate(whole) if each is not None}
        else:
            kept = [HeldPiece(sink, 0, [0] * tensor.ndim, tensor.shape)]
            first = job.add_tensor(tensor.shape, wanted.itemsize, held, kept, digest=True)
        numbers[name] = range(first, first + len(kept))
    for each in sums.values():
        bytes_of_it = HeldPiece(source(each.file), each.start, [0], [each.size])
        checked[job.add_tensor([each.size], 1, [bytes_of_it], [HeldPiece(sink, 0, [0], [each.size])], crc=True)] = each
    done = job.run(budget=memory, threads=threads, progress=progress)
    for number, each in checked.items():
        _check_crc(each, done.crcs[number])
    digests = {name: add_digests(done.digests[number] for number in of) for name, of in numbers.items()}
    digests |= {name: _fetched(tensor, memory) if is_remote else _decoded(tensor) for name, tensor in arrays.items()}
    return {name: digests.get(name, 0) for name in names}


def _summed(sums: dict[tuple[int, int], StoredSum], piece: SourcePiece, itemsize: int) -> StoredSum | None:
    """Take out the stretch that a piece is, if it is one, in order."""
    each = sums.get((id(piece.holder), piece.offset))
    if each is None or not is_one_run(piece, itemsize):
        return None
    if each.size != itemsize * math.prod(stop - start for start, stop in piece.box):
        return None
    return sums.pop((id(piece.holder), piece.offset))


def _check_crc(each: StoredSum, crc: int) -> None:
    if crc != each.crc:
        raise ParseError(
            f"{each.file.path}: byte {each.start}: {shown(each.name)} of {each.size} bytes is not what was written: "
            f"its CRC-32 is {crc:08x}, but {each.crc:08x} was recorded"
        )


def _decoded(tensor: StoredTensor) -> int:
    """The digest of a tensor whose pieces are compressed, one piece at a time."""
    parts = []
    for piece in tensor.pieces:
        values = np.asarray(piece.decode(), order="C")  # `ascontiguousarray` would give a scalar a dim.
        job = CopyJob()
        start, stop = ([side[i] for side in piece.box] for i in (0, 1))
        source = HeldPiece(job.read_array(values), 0, start, stop, values.strides)
        kept = HeldPiece(job.discard(), 0, start, stop)
        job.add_tensor(tensor.shape, values.itemsize, [source], [kept], digest=True)
        parts.append(job.run().digests[0])
    return add_digests(parts)


def _fetched(tensor: StoredTensor, memory: int) -> int:
    """The digest of a tensor in an object store, one block at a time."""
    parts = []
    for block in consecutive(tensor.shape, max(memory // (2 * tensor.numpy_dtype.itemsize), 1)):
        values = tensor.read(block)
        job = CopyJob()
        start, stop = ([getattr(side, end) for side in block] for end in ("start", "stop"))
        source = HeldPiece(job.read_array(values), 0, start, stop, values.strides)
        job.add_tensor(tensor.shape, values.itemsize, [source], [HeldPiece(job.discard(), 0, start, stop)], digest=True)
        parts.append(job.run().digests[0])
    return add_digests(parts)


def _fetched_crc(each: StoredSum, memory: int) -> int:
    """The CRC-32 of a stretch of an object, one block at a time."""
    crc, step = 0, max(memory // 2, 1)
    for at in range(0, each.size, step):
        crc = zlib.crc32(each.file.read(each.start + at, min(step, each.size - at)), crc)
    return crc
