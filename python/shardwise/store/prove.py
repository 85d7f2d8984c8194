"""Proofs about checkpoints: that one is what was written, and that two are the same tensors, however they are cut."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .._boxes import consecutive
from .._text import shown
from ..errors import ParseError
from .engine import CopyJob, HeldPiece, add_digests
from .object_files import open_file
from .objects import ObjectPath, place_of
from .open import open_checkpoint
from .protocol import StoredCheckpoint, StoredTensor
from .sharded import MANIFEST, read_manifest
from .text import MAX_JSON
from .write.wanted import wanted_stored

__all__ = ["Difference", "VerifyReport", "diff_checkpoints", "tensor_digests", "verify_checkpoint"]

_MEMORY = 256 * 2**20
Progress = Callable[[int, int], object]


@dataclass(frozen=True)
class VerifyReport:
    """What was verified.

    Attributes:
        path: The checkpoint.
        format: What it is.
        tensors: How many tensors it has.
        bytes: Their bytes, all of which were read.
        digests: How many digests were compared; 0 if the checkpoint has none, so that only its structure, and that all
            of it can be read, is verified.
    """

    path: Path
    format: str
    tensors: int
    bytes: int
    digests: int


@dataclass(frozen=True)
class Difference:
    """Something in which two checkpoints differ.

    Attributes:
        name: The tensor.
        what: `"missing"` (in the first), `"added"`, `"dtype"`, `"shape"` or `"values"`.
        first: What the first has: a dtype, a shape or a value.
        second: What the second has.
        index: Of values, the index of the first element that differs.
        count: Of values, how many differ.
    """

    name: str
    what: str
    first: Any = None
    second: Any = None
    index: tuple[int, ...] | None = None
    count: int | None = None

    def __str__(self) -> str:
        if self.what == "missing":
            return f"{self.name!r} is only in the second"
        if self.what == "added":
            return f"{self.name!r} is only in the first"
        if self.what == "values":
            values = f"{self.first} and {self.second}"
            return f"{self.name!r}: {self.count} elements differ, the first at {self.index}: {values}"
        return f"{self.name!r}: {self.what} {self.first} and {self.second}"


def tensor_digests(
    checkpoint: StoredCheckpoint,
    *,
    memory: int = _MEMORY,
    threads: int | None = None,
    progress: Progress | None = None,
) -> dict[str, int]:
    """Digest each tensor of an open checkpoint, in a stated memory; all of its bytes are read.

    A tensor's digest does not depend on how it is cut; see `shardwise.store.engine`. Compare dtypes and shapes as well.
    """
    job, held, arrays = CopyJob(), {}, {}
    sink = job.discard()
    numbers: dict[str, int] = {}
    for name, tensor in checkpoint.items():
        if not tensor.size:
            continue
        if isinstance(checkpoint.path, ObjectPath) or not all(piece.is_addressable for piece in tensor.pieces):
            arrays[name] = tensor
            continue
        wanted = wanted_stored(name, tensor, None)
        sources = []
        for piece in wanted.pieces:
            file: Any = piece.holder
            if id(file) not in held:
                held[id(file)] = job.read_file(file.path, file.size, file.status[3])
            start, stop = ([side[i] for side in piece.box] for i in (0, 1))
            sources.append(HeldPiece(held[id(file)], piece.offset, start, stop, piece.strides))
        whole = HeldPiece(sink, 0, [0] * tensor.ndim, tensor.shape)
        numbers[name] = job.add_tensor(tensor.shape, wanted.itemsize, sources, [whole], digest=True)
    done = job.run(budget=memory, threads=threads, progress=progress).digests if numbers else []
    digests = {name: done[number] for name, number in numbers.items()}
    is_remote = isinstance(checkpoint.path, ObjectPath)
    digests |= {name: _fetched(tensor, memory) if is_remote else _decoded(tensor) for name, tensor in arrays.items()}
    return {name: digests.get(name, 0) for name in checkpoint}


def _decoded(tensor: StoredTensor) -> int:
    """The digest of a tensor whose pieces are compressed: of one piece at a time."""
    parts = []
    for piece in tensor.pieces:
        values = np.ascontiguousarray(piece.decode())
        job = CopyJob()
        start, stop = ([side[i] for side in piece.box] for i in (0, 1))
        source = HeldPiece(job.read_array(values), 0, start, stop, values.strides)
        kept = HeldPiece(job.discard(), 0, start, stop)
        job.add_tensor(tensor.shape, values.itemsize, [source], [kept], digest=True)
        parts.append(job.run().digests[0])
    return add_digests(parts)


def _fetched(tensor: StoredTensor, memory: int) -> int:
    """The digest of a tensor that lies in an object store: of one block at a time."""
    parts = []
    for block in consecutive(tensor.shape, max(memory // (2 * tensor.numpy_dtype.itemsize), 1)):
        values = tensor.read(block)
        job = CopyJob()
        start, stop = ([getattr(side, end) for side in block] for end in ("start", "stop"))
        source = HeldPiece(job.read_array(values), 0, start, stop, values.strides)
        job.add_tensor(tensor.shape, values.itemsize, [source], [HeldPiece(job.discard(), 0, start, stop)], digest=True)
        parts.append(job.run().digests[0])
    return add_digests(parts)


def verify_checkpoint(
    path: str | os.PathLike[str] | ObjectPath,
    *,
    memory: int = _MEMORY,
    threads: int | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Verify that a checkpoint is whole, and that every byte is what was written.

    Args:
        path: A checkpoint of any form, also by URL. Those that shardwise wrote have a digest for each tensor, in the
            manifest or the header; of others all bytes are read, and the structure is checked.
        memory: Bytes for the buffers of all threads.
        threads: How many; one per core if left out.
        progress: Called now and then with the bytes that are done and the bytes in all.

    Raises:
        ParseError: a file is missing, of another size or changed, or a tensor is not what was written; names it.
        OSError: a file cannot be read.

    >>> import tempfile
    >>> from shardwise import save_checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "model.safetensors")
    ...     _ = save_checkpoint(file, {"w": np.arange(6, dtype="u1")})
    ...     print(verify_checkpoint(file).digests)
    ...     _ = file.write_bytes(file.read_bytes()[:-1] + b"x")
    ...     verify_checkpoint(file)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    shardwise.errors.ParseError: ...: tensor 'w' is not what was written: its digest is ...
    """
    given = place_of(path)
    with open_checkpoint(given) as checkpoint:
        expected = _expected(given, checkpoint)
        found = tensor_digests(checkpoint, memory=memory, threads=threads, progress=progress)
        for name, digest in expected.items():
            if name not in found:
                raise ParseError(f"{given}: tensor {shown(name)} was written, and is not there")
            if found[name] != digest:
                raise ParseError(
                    f"{given}: tensor {shown(name)} is not what was written: its digest is {found[name]:032x}, it was "
                    f"{digest:032x}"
                )
        return VerifyReport(given, checkpoint.format, len(checkpoint), checkpoint.nbytes, len(expected))


def _expected(path: Path, checkpoint: StoredCheckpoint) -> dict[str, int]:
    """The digests that were written beside the tensors."""
    if path.is_dir() and (path / MANIFEST).is_file():
        manifest = read_manifest(path)
        for name, said in manifest["files"].items():
            _check_header(path / name, said)
        tensors: dict[str, Any] = manifest["tensors"]
        return {name: _number(said.get("digest"), path / MANIFEST) for name, said in tensors.items()}
    text = checkpoint.metadata.get("shardwise.digests")
    if not isinstance(text, str):
        return {}
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        raise ParseError(f"{path}: the digests in its header are not JSON") from None
    if not isinstance(said, dict):
        raise ParseError(f"{path}: the digests in its header are not a JSON object")
    return {name: _number(digest, path) for name, digest in said.items()}


def _check_header(path: Path, said: dict[str, Any]) -> None:
    file = open_file(path)
    try:
        length = int.from_bytes(file.read(0, min(file.size, 8)), "little")
        size = min(8 + length, file.size)
        if length > MAX_JSON or hashlib.sha256(file.read(0, size)).hexdigest() != said.get("header_sha256"):
            raise ParseError(f"{path}: its header is not what was written")
    finally:
        file.close()


def _number(text: object, where: Path) -> int:
    if not isinstance(text, str) or len(text) != 32:
        raise ParseError(f"{where}: {shown(text)} is not a digest")
    try:
        return int(text, 16)
    except ValueError:
        raise ParseError(f"{where}: {shown(text)} is not a digest") from None


def diff_checkpoints(
    first: str | os.PathLike[str] | ObjectPath,
    second: str | os.PathLike[str] | ObjectPath,
    *,
    memory: int = _MEMORY,
    threads: int | None = None,
    progress: Progress | None = None,
) -> list[Difference]:
    """Say in which tensors two checkpoints differ, however each is cut: nothing, if they are the same.

    Args:
        first: A checkpoint of any form, also by URL.
        second: Another.
        memory: Bytes for the buffers of all threads.
        threads: How many; one per core if left out.
        progress: Called now and then with the bytes that are done and the bytes in all, of one and then of the other.

    Returns:
        The differences, by name: tensors that one lacks, other dtypes or shapes, and of other values the first element.
        Values are compared as bytes: -0.0 is not 0.0, and the bits of a NaN count.

    Raises:
        ParseError, OSError: as for `open_checkpoint`.

    Each is digested where it lies, so neither is merged. Only tensors whose digests differ are read again.

    >>> import tempfile
    >>> from shardwise import save_checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name, last in (("a", 3), ("b", 4)):
    ...         _ = save_checkpoint(Path(folder, f"{name}.safetensors"), {"w": np.array([1, 2, last])})
    ...     print(*diff_checkpoints(Path(folder, "a.safetensors"), Path(folder, "b.safetensors")))
    'w': 1 elements differ, the first at (2,): 3 and 4
    """
    with open_checkpoint(first) as one, open_checkpoint(second) as other:
        digests = [
            tensor_digests(checkpoint, memory=memory, threads=threads, progress=progress) for checkpoint in (one, other)
        ]
        differences = []
        for name in sorted({*one, *other}):
            if name not in one or name not in other:
                differences.append(Difference(name, "added" if name in one else "missing"))
            elif one[name].dtype != other[name].dtype:
                differences.append(Difference(name, "dtype", one[name].dtype, other[name].dtype))
            elif one[name].shape != other[name].shape:
                differences.append(Difference(name, "shape", one[name].shape, other[name].shape))
            elif digests[0][name] != digests[1][name]:
                differences.append(_values(name, one[name], other[name], memory))
        return differences


def _values(name: str, one: StoredTensor, other: StoredTensor, memory: int) -> Difference:
    """The first element that differs, and how many do; read in blocks of rows."""
    count, found = 0, None
    rows = max(1, one.shape[0] * memory // max(4 * one.nbytes, 1)) if one.shape else 1
    starts = range(0, one.shape[0], rows) if one.shape else (0,)
    for start in starts:
        box = (
            (slice(start, min(start + rows, one.shape[0])), *(slice(0, size) for size in one.shape[1:]))
            if one.shape
            else ()
        )
        left, right = one.read(box), other.read(box)
        bits = [np.ascontiguousarray(part).view(np.uint8).reshape(*part.shape, part.itemsize) for part in (left, right)]
        differs = (bits[0] != bits[1]).any(axis=-1)
        count += int(np.count_nonzero(differs))
        if found is None and differs.any():
            at = tuple(int(i) for i in np.argwhere(differs)[0])
            index = (at[0] + start, *at[1:]) if one.shape else ()
            found = index, left[at], right[at]
    if found is None:
        raise ParseError(f"tensor {shown(name)}: the digests differ, but not the values: a file changed meanwhile")
    return Difference(name, "values", found[1], found[2], found[0], count)
