"""The check that a checkpoint is unchanged after it was written."""

from __future__ import annotations

import json
import math
import os
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ..._dtypes import DTYPES
from ..._text import shown
from ...errors import LayoutError, ParseError, ShardwiseWarning
from ...pieces import Bounds
from ...placing import Layouts
from ...rules.states import training_names
from ..data.engine import add_digests, check_job_memory, check_threads
from ..data.location import Location, location_of
from ..data.text import are_sizes, box_text
from ..formats import sharded
from ..formats.known import known_form
from ..formats.open import open_checkpoint
from ..formats.sharded import MANIFEST, check_seal, damaged_files, read_manifest
from ..formats.torch import dcp
from ..rewritten.names import Which, checked_which, chosen_part
from ..tensors.checkpoint import StoredCheckpoint, StoredSum
from ..tensors.companion_files import beside
from ..tensors.digests import Digested, DigestProgress, piece_digests
from ..tensors.headers import HeaderDigests, wrong_header
from ..tensors.stored import StoredTensor, UnsupportedError
from ..tensors.stored_pieces import StoredPiece
from ..tensors.training import totals_of
from .damage import MOST_SHOWN, Damage, DamageError, VerifyReport, damage_lines

__all__ = ["verify_checkpoint"]

_MEMORY = 256 * 2**20
_NO_NAME: list[Any] = [None]


def verify_checkpoint(
    path: str | os.PathLike[str] | Location,
    *,
    layouts: Layouts | None = None,
    which: Which = "all",
    memory: int = _MEMORY,
    threads: int | None = None,
    progress: DigestProgress | None = None,
) -> VerifyReport:
    """Verify that a checkpoint is complete, and that every byte is what was written.

    Args:
        path: A checkpoint of any format, also by URL. Those that shardwise wrote have a digest for each tensor, in the
            manifest or the header; those of PyTorch have a CRC-32 for each member of their zip containers. Others are
            read in full, and their structure is checked.
        layouts: The cuts of bare files of ranks, as for `open_checkpoint`; elements that several ranks hold are
            compared.
        which: `"weights"` verifies the weights alone, `"state"` all else: moments, master copies, steps.
        memory: Bytes for the buffers of all threads, and for a chunk that must be decoded.
        threads: The number of threads; one per core if left out.
        progress: Called now and then with the bytes that are done and the bytes in all.

    Warns:
        ShardwiseWarning: for the report's `left_out`: files next to the checkpoint that are not read, and states whose
            weights are not there.

    Raises:
        DamageError: if a file is missing, truncated or changed, or a tensor is not what was written. It is a
            ParseError; its `report.damaged` lists all that is damaged, each tensor with its file.
        ParseError: if there is no checkpoint of a format that is read.
        LayoutError: if the memory is less than 16 KiB, or too little for a chunk; `threads` less than 1; or if the
            checkpoint has nothing that `which` selects.
        OSError: if a file cannot be read.

    >>> import tempfile
    >>> import numpy as np
    >>> from pathlib import Path
    >>> from shardwise import save_checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "model.safetensors")
    ...     _ = save_checkpoint(file, {"w": np.arange(6, dtype="u1")})
    ...     print(verify_checkpoint(file).digests)
    ...     _ = file.write_bytes(file.read_bytes()[:-1] + b"x")
    ...     verify_checkpoint(file)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    shardwise.store.compare.damage.DamageError: ...: tensor 'w' is not what was written: its digest is ...
    """
    check_job_memory(memory)
    check_threads(threads)
    checked_which(which)
    given = location_of(path)
    if layouts is None:
        known_form(given)  # Whatever is wrong from here on is wrong with a checkpoint.
    report = _Verification(given, layouts, which, (memory, threads, progress)).report()
    if report.damaged:
        lines = damage_lines(report.damaged)
        more = [f"and {len(lines) - MOST_SHOWN:,} more"] if len(lines) > MOST_SHOWN else []
        raise DamageError("\n".join([*lines[:MOST_SHOWN], *more]), report)
    for each in report.left_out:
        if each.kind != "asked":
            warnings.warn(str(each), ShardwiseWarning, stacklevel=2)
    return report


@dataclass
class _Verification:
    """A checkpoint under verification, with the damage found so far."""

    _path: Location
    _layouts: Layouts | None
    _which: Which
    #: The memory, the threads and the progress of `verify_checkpoint`.
    _work: tuple[int, int | None, DigestProgress | None]
    _damaged: list[Damage] = field(default_factory=list)

    def report(self) -> VerifyReport:
        """Verify the checkpoint; damage does not end the verification."""
        try:
            return self._report()
        except UnsupportedError:
            raise
        except ParseError as error:
            # What cannot be opened is known by its message only.
            self._add(None, self._path, str(error))
            return VerifyReport(self._path, "", 0, 0, 0, 0, (), tuple(self._damaged))

    def _report(self) -> VerifyReport:
        path, manifest, wrong = self._path, None, dict[str, str]()
        if path.is_dir() and (path / MANIFEST).is_file():
            manifest = read_manifest(path)
            wrong = damaged_files(path, manifest)
            for name in manifest["files"]:
                if name not in wrong and (problem := wrong_header(path / name, name, manifest["files"])):
                    wrong[name] = problem
            for name, problem in wrong.items():
                digests = manifest["files"][name].get("digests")
                for tensor in list(digests) if isinstance(digests, dict) and digests else _NO_NAME:
                    self._add(tensor, path / name, f"{problem}; it holds {shown(tensor)}" if tensor else problem)
        if wrong and manifest is not None:
            found = self._rest(manifest, {name for name in manifest["files"] if name not in wrong})
        else:
            found = self._whole(manifest)
        if manifest is not None:
            try:
                check_seal(path)
            except ParseError as error:
                self._add(None, path / MANIFEST, str(error))
        if manifest is not None and self._which != "all":
            names = training_names(manifest["tensors"])
            is_state = self._which == "state"
            self._damaged = [
                one for one in self._damaged if one.tensor is None or names.is_state(one.tensor) == is_state
            ]
        return replace(found, damaged=tuple(self._damaged))

    def _add(self, tensor: str | None, file: Location | str, problem: str) -> None:
        if all(problem != one.problem for one in self._damaged[-MOST_SHOWN:]):
            self._damaged.append(Damage(tensor, str(file), problem))

    def _whole(self, manifest: dict[str, Any] | None) -> VerifyReport:
        """Verify a checkpoint that can be opened."""
        path = self._path
        with open_checkpoint(path, layouts=self._layouts) as whole:
            expected = _expected(path, whole, manifest)
            checkpoint, left_out = chosen_part(whole, self._which)
            files = {} if manifest is None else _files_of(path, manifest)
            headers = HeaderDigests(whole, files)
            sums = checkpoint.sums()
            if checkpoint is not whole:
                there = {*checkpoint, *(name for name in expected if name not in whole)}
                expected = {name: digest for name, digest in expected.items() if name in there}
                sums = _sums_of(checkpoint, sums, headers)
            found = piece_digests(checkpoint, sums, *self._work, headers.add)
            self._unread(checkpoint, found)
            self._compare(checkpoint, found, expected, files)
            if self._layouts is not None:
                self._compare_replicas(checkpoint)
            # Last, since what is wrong with a tensor says more. This finds what nothing else speaks of, as layouts.
            damaged = {one.file for one in self._damaged}
            for file in headers.damaged():
                if str(file) not in damaged:
                    self._add(None, file, f"{file}: its contents besides tensors are not what was written")
            # States without weights; weights without states may be frozen.
            alone = [] if self._which == "state" else whole.training.left_out()
            alone = [each for each in alone if each.kind == "states"]
            return VerifyReport(
                path, checkpoint.format, len(checkpoint), checkpoint.nbytes, len(expected), found.sums,
                tuple(checkpoint.unreadable), (), (*beside(whole), *alone, *left_out),
                totals_of(checkpoint.described(), whole.training.names),
            )  # fmt: skip

    def _compare_replicas(self, checkpoint: StoredCheckpoint) -> None:
        """Note the bare files that hold other elements than the first rank that has them."""
        for name, tensor in checkpoint.items():
            for piece in tensor.replicas:
                box = tuple(slice(*side) for side in piece.bounds)
                held = StoredTensor(name, tensor.known_dtype, tensor.shape, (piece,)).read(box)
                if held.tobytes() != tensor.read(box).tobytes():
                    where = f"{piece.path}: tensor {shown(name)}: {box_text(piece.bounds)}"
                    self._add(name, piece.path, f"{where} differs from another rank's")

    def _compare(
        self,
        tensors: Mapping[str, StoredTensor],
        found: Digested,
        expected: Mapping[str, int],
        files: Mapping[Location, Mapping[str, Any]],
    ) -> None:
        """Compare the digests of tensors with the written ones; note those that differ, by file."""
        known = {(one.tensor, one.file) for one in self._damaged}
        for name, digest in expected.items():
            if name not in tensors:
                self._add(name, self._path, f"{self._path}: tensor {shown(name)} was written, but is missing")
                continue
            have = add_digests(found.digests[name])
            if name in found.unread or have == digest:
                continue
            held: dict[Location, list[int]] = {}
            for piece, part in zip(tensors[name].pieces, found.digests[name], strict=False):
                held.setdefault(piece.path, []).append(part)
            parts = {file: f"{add_digests(digests):032x}" for file, digests in held.items()}
            wrong = [file for file in parts if _digest_in(files, file, name) not in (None, parts[file])]
            for file in wrong or list(parts) or [self._path]:
                digests = (parts[file], _digest_in(files, file, name)) if wrong else (f"{have:032x}", f"{digest:032x}")
                if (name, str(file)) not in known:
                    self._add(
                        name, file,
                        f"{file}: tensor {shown(name)} is not what was written: its digest is {digests[0]}, but "
                        f"{digests[1]} was recorded",
                    )  # fmt: skip

    def _unread(self, tensors: Mapping[str, StoredTensor], found: Digested) -> None:
        """Note the tensors that cannot be read, and the ranges with another CRC-32."""
        for name, (file, error) in found.unread.items():
            self._add(name, file, str(error))
        for each, crc in found.wrong:
            file = each.file.path
            if each.error is not None:
                self._add(None, file, str(each.error))
                continue
            names = list(_held_in(tensors, each))
            said = f"{file}: byte {each.start}: {shown(each.name)} of {each.size} bytes is not what was written: its "
            for name in names or _NO_NAME:
                holds = "" if name is None else f"; it holds {shown(name)}"
                self._add(name, file, f"{said}CRC-32 is {crc:08x}, but {each.crc:08x} was recorded{holds}")

    def _rest(self, manifest: dict[str, Any], names: set[str]) -> VerifyReport:
        """Verify the readable files of a damaged checkpoint one by one: the same box may be in several."""
        path, form, files = self._path, str(manifest.get("form")), _files_of(self._path, manifest)
        held: dict[Location, dict[str, list[StoredPiece]]] = {}
        total = count = crcs = 0
        with ExitStack() as stack:
            rest = dcp.open_rest(path, names) if form == "dcp" else sharded.open_rest(path, names, form)
            for file in rest.files:
                stack.callback(file.close)
            for name, pieces in rest.pieces.items():
                for piece in pieces:
                    held.setdefault(piece.path, {}).setdefault(name, []).append(piece)
            sums = list(rest.sums)
            for file in rest.files:
                tensors, expected = self._held_by(file.path, held.get(file.path, {}), manifest, files)
                found = piece_digests({}, [each for each in sums if each.file is file], *self._work)
                try:
                    for turn in _turns(tensors):
                        more = piece_digests(turn, (), *self._work)
                        for name, digests in more.digests.items():
                            found.digests.setdefault(name, []).extend(digests)
                        found.unread |= more.unread
                except LayoutError as error:  # Boxes that overlap.
                    self._add(None, file.path, f"{file.path}: {error}")
                    continue
                self._unread(tensors, found)
                self._compare(tensors, found, expected, files)
                for tensor in tensors.values():
                    elements = sum(math.prod(b - a for a, b in piece.bounds) for piece in tensor.pieces)
                    total += tensor.known_dtype.bits * elements // 8
                count, crcs = count + len(expected), crcs + found.sums
        return VerifyReport(path, form, len(manifest["tensors"]), total, count, crcs)

    def _held_by(
        self,
        file: Location,
        held: Mapping[str, list[StoredPiece]],
        manifest: dict[str, Any],
        files: Mapping[Location, Mapping[str, Any]],
    ) -> tuple[dict[str, StoredTensor], dict[str, int]]:
        """Return the parts of tensors that a file has, and the digests that the manifest states for them."""
        tensors, expected = {}, {}
        for name, pieces in held.items():
            entry = manifest["tensors"].get(name, {})
            shape, dtype = entry.get("shape"), DTYPES.get(str(entry.get("dtype")))
            digest = _digest_in(files, file, name)
            if dtype is None or not are_sizes(shape) or digest is None:
                continue
            outside = next((piece for piece in pieces if not _is_within(piece.box, shape)), None)
            if outside is not None:
                self._add(
                    name, file,
                    f"{file}: holds {box_text(outside.bounds)} of tensor {shown(name)}, but {MANIFEST} says that it "
                    f"has the shape {shown(shape)}",
                )  # fmt: skip
                continue
            tensors[name] = StoredTensor(name, dtype, tuple(shape), pieces)
            expected[name] = _number(digest, self._path / MANIFEST)
        return tensors, expected


def _sums_of(checkpoint: StoredCheckpoint, sums: Iterable[StoredSum], headers: HeaderDigests) -> list[StoredSum]:
    """Return the ranges in which a piece of one of these tensors begins; `headers` notes the other ranges."""
    begins: dict[Location, list[int]] = {}
    for tensor in checkpoint.values():
        for piece in tensor.pieces if tensor.size else ():
            if piece.is_addressable:
                begins.setdefault(piece.path, []).append(piece.extent().offset)
    for offsets in begins.values():
        offsets.sort()
    found = []
    for each in sums:
        offsets = begins.get(each.file.path, [])
        at = bisect_left(offsets, each.start)
        if at < len(offsets) and offsets[at] < each.start + each.size:
            found.append(each)
        else:
            headers.add(each)
    return found


def _turns(tensors: Mapping[str, StoredTensor]) -> Iterator[dict[str, StoredTensor]]:
    """Yield the pieces of tensors in groups without repeated boxes; files for ranks repeat boxes."""
    turns: list[dict[str, list[StoredPiece]]] = []
    for name, tensor in tensors.items():
        seen: Counter[Bounds] = Counter()
        for piece in tensor.pieces:
            turn = seen[piece.bounds]
            seen[piece.bounds] += 1
            if turn == len(turns):
                turns.append({})
            turns[turn].setdefault(name, []).append(piece)
    for each in turns:
        yield {
            name: StoredTensor(name, tensors[name].known_dtype, tensors[name].shape, some)
            for name, some in each.items()
        }


def _is_within(box: tuple[slice, ...], shape: list[int]) -> bool:
    return len(box) == len(shape) and all(side.stop <= size for side, size in zip(box, shape, strict=True))


def _held_in(tensors: Mapping[str, StoredTensor], each: StoredSum) -> Iterator[str]:
    """Yield the tensors of which a piece is in a range of a file."""
    for name, tensor in tensors.items():
        for piece in tensor.pieces if tensor.size else ():
            if piece.path != each.file.path or not piece.is_addressable:
                continue
            with suppress(ParseError):
                if each.start <= piece.extent().offset < each.start + each.size:
                    yield name
                    break


def _files_of(path: Location, manifest: Mapping[str, Any]) -> dict[Location, Mapping[str, Any]]:
    """Return a manifest's entries about files, by their paths."""
    return {path / name: said for name, said in manifest["files"].items()}


def _digest_in(files: Mapping[Location, Mapping[str, Any]], file: Location, name: str) -> str | None:
    """Return the digest that a manifest states for what a file holds of a tensor."""
    digests = files.get(file, {}).get("digests")
    found = digests.get(name) if isinstance(digests, dict) else None
    return found if isinstance(found, str) else None


def _expected(path: Location, checkpoint: StoredCheckpoint, manifest: dict[str, Any] | None) -> dict[str, int]:
    """Return the digests that were written next to the tensors."""
    if manifest is not None:
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


def _number(text: object, where: Location) -> int:
    with suppress(ValueError):
        if isinstance(text, str) and len(text) == 32:
            return int(text, 16)
    raise ParseError(f"{where}: {shown(text)} is not a digest")
