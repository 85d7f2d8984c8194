"""Proofs about checkpoints: that one is what was written, and that two hold the same tensors, however they are cut."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .._arguments import INTEGER, check_fields
from .._text import shown
from ..errors import ParseError
from .digests import Progress, tensor_digests, verified_digests
from .engine import check_memory, check_threads
from .frames import Frames
from .object_files import open_file
from .objects import ObjectPath, place_of
from .open import open_checkpoint
from .protocol import StoredCheckpoint, StoredTensor
from .sharded import MANIFEST, check_seal, read_manifest
from .text import MAX_JSON

__all__ = ["Difference", "VerifyReport", "diff_checkpoints", "verify_checkpoint"]

_MEMORY = 256 * 2**20


@dataclass(frozen=True)
class VerifyReport:
    """What was verified.

    Attributes:
        path: The checkpoint.
        format: Its format.
        tensors: The number of its tensors.
        bytes: Their bytes, all of which were read.
        digests: The number of digests compared. If the checkpoint has neither digests nor CRC-32, only its
            structure, and that all of it can be read, is verified.
        crcs: The number of CRC-32 compared, of members of PyTorch's zip containers.
    """

    path: Path
    format: str
    tensors: int
    bytes: int
    digests: int
    crcs: int

    def __post_init__(self) -> None:
        check_fields(self, path=(Path, ObjectPath), format=str, tensors=INTEGER, bytes=INTEGER)
        check_fields(self, digests=INTEGER, crcs=INTEGER)


@dataclass(frozen=True)
class Difference:
    """Something in which two checkpoints differ.

    Attributes:
        name: The tensor.
        what: `"missing"` (in the first), `"added"`, `"dtype"`, `"shape"` or `"values"`.
        first: What the first has: a dtype, a shape or a value.
        second: What the second has.
        index: For values, the index of the first element that differs.
        count: For values, the number of those that differ.
    """

    name: str
    what: str
    first: Any = None
    second: Any = None
    index: tuple[int, ...] | None = None
    count: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, name=str, what=str, first=Hashable, second=Hashable)
        check_fields(self, index=(tuple, type(None)), count=(*INTEGER, type(None)))

    def __str__(self) -> str:
        if self.what == "missing":
            return f"{self.name!r} is only in the second"
        if self.what == "added":
            return f"{self.name!r} is only in the first"
        if self.what == "values":
            values = f"{self.first} and {self.second}"
            return f"{self.name!r}: {self.count} elements differ, the first at {self.index}: {values}"
        return f"{self.name!r}: {self.what} {self.first} and {self.second}"


def verify_checkpoint(
    path: str | os.PathLike[str] | ObjectPath,
    *,
    memory: int = _MEMORY,
    threads: int | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Verify that a checkpoint is complete, and that every byte is what was written.

    Args:
        path: A checkpoint of any format, also by URL. Those that shardwise wrote have a digest for each tensor, in
            the manifest or the header; those of PyTorch, in its zip containers, a CRC-32 for each member. Others are
            read in full, and their structure is checked.
        memory: Bytes for the buffers of all threads.
        threads: How many; one per core if left out.
        progress: Called now and then with the bytes that are done and the bytes in all.

    Raises:
        ParseError: if a file is missing, has a different size or changed, or a tensor is not what was written; names
            it.
        LayoutError: if the memory is less than 16 KiB, or `threads` less than 1.
        OSError: if a file cannot be read.

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
    check_memory(memory)
    check_threads(threads)
    given = place_of(path)
    with open_checkpoint(given) as checkpoint:
        expected, files = _expected(given, checkpoint)
        frames = Frames(checkpoint, files)
        found, sums = verified_digests(checkpoint, memory, threads, progress, frames.add)
        for name, digest in expected.items():
            if name not in found:
                raise ParseError(f"{given}: tensor {shown(name)} was written, but is missing")
            if found[name] != digest:
                raise ParseError(
                    f"{given}: tensor {shown(name)} is not what was written: its digest is {found[name]:032x}, but "
                    f"{digest:032x} was recorded"
                )
        # Last, since what is wrong with a tensor says more. This finds what nothing else speaks of, such as layouts.
        frames.check()
        if given.is_dir() and (given / MANIFEST).is_file():
            check_seal(given)
        return VerifyReport(given, checkpoint.format, len(checkpoint), checkpoint.nbytes, len(expected), sums)


def _expected(path: Path, checkpoint: StoredCheckpoint) -> tuple[dict[str, int], dict[str, dict[str, Any]]]:
    """The digests that were written beside the tensors, and what the manifest says about each file."""
    if path.is_dir() and (path / MANIFEST).is_file():
        manifest = read_manifest(path)
        for name, said in manifest["files"].items():
            _check_header(path / name, said)
        tensors: dict[str, Any] = manifest["tensors"]
        return {name: _number(said.get("digest"), path / MANIFEST) for name, said in tensors.items()}, manifest["files"]
    text = checkpoint.metadata.get("shardwise.digests")
    if not isinstance(text, str):
        return {}, {}
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        raise ParseError(f"{path}: the digests in its header are not JSON") from None
    if not isinstance(said, dict):
        raise ParseError(f"{path}: the digests in its header are not a JSON object")
    return {name: _number(digest, path) for name, digest in said.items()}, {}


def _check_header(path: Path, said: dict[str, Any]) -> None:
    """Check what the manifest says about a file besides its tensors: the digest of its header, or of all of it."""
    file = open_file(path)
    try:
        if "header_sha256" in said:
            length = int.from_bytes(file.read(0, min(file.size, 8)), "little")
            is_right = length <= MAX_JSON and _sha256(file.read(0, min(8 + length, file.size))) == said["header_sha256"]
        else:
            is_right = "sha256" not in said or _sha256(file.read(0, file.size)) == said["sha256"]
    finally:
        file.close()
    if not is_right:
        raise ParseError(f"{path}: {'its header' if 'header_sha256' in said else 'it'} is not what was written")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


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
    """List the tensors in which two checkpoints differ, however each is cut; none if they are the same.

    Args:
        first: A checkpoint of any format, also by URL.
        second: Another.
        memory: Bytes for the buffers of all threads.
        threads: How many; one per core if left out.
        progress: Called now and then with the bytes that are done and the bytes in all, of one and then of the other.

    Returns:
        The differences, by name: tensors that one lacks, different dtypes or shapes, and the first different value.
        Values are compared as bytes: -0.0 is not 0.0, and the bits of a NaN count.

    Raises:
        LayoutError: as for `verify_checkpoint`.
        ParseError, OSError: as for `open_checkpoint`.

    Tensors that both have, with the same dtype and shape, are digested where they are, so neither checkpoint is merged.
    Only those whose digests differ are read again.

    >>> import tempfile
    >>> from shardwise import save_checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name, last in (("a", 3), ("b", 4)):
    ...         _ = save_checkpoint(Path(folder, f"{name}.safetensors"), {"w": np.array([1, 2, last])})
    ...     print(*diff_checkpoints(Path(folder, "a.safetensors"), Path(folder, "b.safetensors")))
    'w': 1 elements differ, the first at (2,): 3 and 4
    """
    check_memory(memory)
    check_threads(threads)
    with open_checkpoint(first) as one, open_checkpoint(second) as other:
        # Tensors that only one of them has, or with another dtype or shape, differ whatever their bytes are.
        alike = [
            name
            for name, tensor in one.items()
            if name in other and (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape)
        ]
        digests = [
            tensor_digests(checkpoint, alike, memory=memory, threads=threads, progress=progress)
            for checkpoint in (one, other)
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
                values = _packed_values if one[name].bits % 8 else _values
                differences.append(values(name, one[name], other[name], memory))
        return differences


def _values(name: str, one: StoredTensor, other: StoredTensor, memory: int) -> Difference:
    """The first element that differs, and the number of those that do; read in blocks of rows."""
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
        raise _changed(name)
    return Difference(name, "values", found[1], found[2], found[0], count)


def _packed_values(name: str, one: StoredTensor, other: StoredTensor, memory: int) -> Difference:
    """The same of elements that are packed, several to a byte, the first in the lowest bits; their bits as integers."""
    count = 0
    found: tuple[tuple[int, ...], int, int] | None = None
    # 24 bits hold whole elements of 4 bits and of 6.
    step = 3 * max(1, memory // 128)
    for start in range(0, one.nbytes, step):
        box = (slice(start, min(start + step, one.nbytes)),)
        left, right = (
            np.unpackbits(each._packed_bytes().read(box), bitorder="little").reshape(-1, each.bits)
            for each in (one, other)
        )
        differs = (left != right).any(axis=1)
        count += int(np.count_nonzero(differs))
        if found is None and differs.any():
            at = int(differs.argmax())
            index = tuple(map(int, np.unravel_index(start * 8 // one.bits + at, one.shape)))
            values = [int(np.packbits(bits[at], bitorder="little")[0]) for bits in (left, right)]
            found = index, values[0], values[1]
    if found is None:
        raise _changed(name)
    return Difference(name, "values", found[1], found[2], found[0], count)


def _changed(name: str) -> ParseError:
    return ParseError(f"tensor {shown(name)}: the digests differ but the values do not: a file changed meanwhile")
