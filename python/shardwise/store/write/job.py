"""Writing a new checkpoint: beside its final name, resumable, and published once all of it is there and on the disk."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import _core
from ..._text import bytes_text, shown
from ...errors import LayoutError, ParseError
from ..engine import CopyJob, CopyOutline, HeldPiece, add_digests
from ..files import DataFile
from ..sharded import MANIFEST
from .files import TargetFile
from .wanted import SourcePiece, Wanted, held_piece, is_one_run

__all__ = ["WriteJob", "WriteOutline", "WriteReport", "describe_difference", "describe_room", "manifest_text"]

_JOURNAL = "journal"


@dataclass(frozen=True)
class WriteOutline:
    """What writing a checkpoint takes.

    Attributes:
        files: The names and bytes of the files.
        bytes: Bytes of all files.
        memory: Bytes of the buffers of all threads.
        threads: How many threads.
        bytes_ranged: Bytes that the operating system is asked to copy from file to file.
        free: Bytes that the destination's file system has left.
    """

    files: tuple[tuple[str, int], ...]
    bytes: int
    memory: int
    threads: int
    bytes_ranged: int
    free: int


@dataclass(frozen=True)
class WriteReport:
    """What was written.

    Attributes:
        path: The new checkpoint.
        tensors: How many tensors it has, aliases not counted.
        bytes: Bytes of its files.
        bytes_read: Bytes read from files.
        bytes_written: Bytes written, without those that the operating system copied.
        bytes_copied: Bytes that the operating system copied from file to file.
        bytes_resumed: Bytes that an earlier run had written.
    """

    path: Path
    tensors: int
    bytes: int
    bytes_read: int
    bytes_written: int
    bytes_copied: int
    bytes_resumed: int


class WriteJob:
    """Tensors and the files that they are to be written to.

    Args:
        path: Where the checkpoint is to be; nothing may be there.
        wanted: The tensors, each once.
        files: The files.
        is_folder: Whether `path` is to be a folder; else it is the only file.
        texts: Further files of the folder, by name.
        describe: What the manifest says, given each tensor's digest.
    """

    def __init__(
        self,
        path: Path,
        wanted: Sequence[Wanted],
        files: Sequence[TargetFile],
        *,
        is_folder: bool,
        texts: Mapping[str, bytes],
        describe: Callable[[Sequence[int]], dict[str, Any]],
        compare_replicas: bool,
    ) -> None:
        self.path = path
        # What is not finished: the journal, and in a folder of its own the files.
        self._workplace = path.with_name(f".{path.name}.partial")
        self._partial = self._workplace / "data"
        self._wanted = wanted
        self._files = files
        self._is_folder = is_folder
        self._texts = texts
        self._describe = describe
        self._job = CopyJob()
        #: By the number of a destination piece: its file, and the slot's position in it.
        self._slots: dict[int, tuple[TargetFile, int]] = {}
        #: The same for those that are compared only: the tensor and the replica.
        self._replicas: dict[int, tuple[Wanted, SourcePiece]] = {}
        self._fill(compare_replicas)

    def _fill(self, compare_replicas: bool) -> None:
        job, sources, compared = self._job, {}, {}
        by_tensor: dict[int, list[tuple[TargetFile, int, HeldPiece]]] = {i: [] for i in range(len(self._wanted))}
        for file in self._files:
            holder = job.write_file(self._partial / file.name, file.size)
            for number, slot in enumerate(file.slots):
                if slot.end > slot.begin:
                    start, stop = ([side[i] for side in slot.box] for i in (0, 1))
                    piece = HeldPiece(holder, file.start + slot.begin, start, stop)
                    by_tensor[slot.tensor].append((file, number, piece))

        def source(piece: SourcePiece) -> HeldPiece:
            holder = piece.holder
            if id(holder) not in sources:
                if isinstance(holder, DataFile):
                    sources[id(holder)] = job.read_file(holder.path, holder.size, holder.status[3])
                else:
                    sources[id(holder)] = job.read_array(holder)
            return held_piece(sources[id(holder)], piece)

        for position, tensor in enumerate(self._wanted):
            targets = by_tensor[position]
            if not targets:
                continue
            held = [piece for *_, piece in targets]
            replicas: list[tuple[HeldPiece, SourcePiece]] = []
            strided: list[tuple[HeldPiece, SourcePiece]] = []
            crc = any(file.needs_crcs for file, *_ in targets)
            if compare_replicas:
                for replica in tensor.replicas:
                    if isinstance(replica.holder, DataFile):
                        other = replica.holder
                        if id(other) not in compared:
                            compared[id(other)] = job.compare_file(other.path, other.size, other.status[3])
                        # What is not one run of bytes has no CRC-32: such are compared by themselves.
                        group = replicas if not crc or is_one_run(replica, tensor.itemsize) else strided
                        group.append((held_piece(compared[id(other)], replica), replica))
            pieces = [source(piece) for piece in tensor.pieces]
            held += [piece for piece, _ in replicas]
            first = job.add_tensor(tensor.shape, tensor.itemsize, pieces, held, digest=True, crc=crc)
            self._slots |= {first + i: (file, number) for i, (file, number, _) in enumerate(targets)}
            self._replicas |= {first + len(targets) + i: (tensor, each) for i, (_, each) in enumerate(replicas)}
            if strided:
                first = job.add_tensor(tensor.shape, tensor.itemsize, pieces, [piece for piece, _ in strided])
                self._replicas |= {first + i: (tensor, each) for i, (_, each) in enumerate(strided)}

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self._files)

    def outline(self, memory: int, threads: int | None) -> WriteOutline:
        """Say what it would take; nothing is written.

        Raises:
            LayoutError: if the memory is too little; says what would be needed.
            OSError: if the folder that is to hold the checkpoint is not there.
        """
        outline: CopyOutline = self._job.outline(budget=memory, threads=threads)
        return WriteOutline(
            tuple((file.name, file.size) for file in self._files),
            self.bytes,
            outline.memory,
            outline.threads,
            outline.bytes_ranged,
            _core.free_space(self.path.parent),
        )

    def run(
        self,
        *,
        memory: int,
        threads: int | None,
        sync: bool,
        resume: bool,
        progress: Callable[[int, int], object] | None,
    ) -> WriteReport:
        """Write the checkpoint."""
        self.outline(memory, threads)
        lock = _core.FileLock(self.path.with_name(f".{self.path.name}.lock"))
        try:
            if self._workplace.exists() and (not resume or self.path.exists()):
                shutil.rmtree(self._workplace)
            _refuse_existing(self.path)
            self._partial.mkdir(parents=True, exist_ok=True)
            report = self._written(memory, threads, sync, progress)
            self._publish(sync)
        except (ParseError, LayoutError):
            # Another run of the same would end the same.
            shutil.rmtree(self._workplace, ignore_errors=True)
            raise
        finally:
            lock.release()
        return report

    def _written(
        self, memory: int, threads: int | None, sync: bool, progress: Callable[[int, int], object] | None
    ) -> WriteReport:
        done = self._job.run(
            budget=memory, threads=threads, sync=sync, journal=self._workplace / _JOURNAL, progress=progress
        )
        for number, element in done.differences:
            raise ParseError(describe_difference(*self._replicas[number], element))
        parts: list[list[int]] = [[] for _ in self._wanted]
        for destination, (file, number) in self._slots.items():
            digest, position = done.digests[destination], file.slots[number].tensor
            parts[position].append(digest)
            file.digests[position] = add_digests([file.digests.get(position, 0), digest])
            if file.needs_crcs:
                file.crcs[number] = done.crcs[destination]
        for file in self._files:
            path = self._partial / file.name
            with _naming(path), path.open("r+b") as stream:
                for at, text in file.frame():
                    stream.seek(at)
                    stream.write(text)
                stream.flush()
                if sync:
                    os.fsync(stream.fileno())
        if self._is_folder:
            self._write_manifest([add_digests(digests) for digests in parts], sync)
        return WriteReport(
            self.path,
            sum(not tensor.is_object for tensor in self._wanted),
            self.bytes,
            done.bytes_read,
            done.bytes_written,
            done.bytes_copied,
            done.bytes_resumed,
        )

    def _write_manifest(self, digests: Sequence[int], sync: bool) -> None:
        said = self._describe(digests)
        texts = {MANIFEST: manifest_text(self._files, self._wanted, said, self._texts), **self._texts}
        for name, text in texts.items():
            path = self._partial / name
            with _naming(path):
                path.write_bytes(text)
            if sync:
                _core.sync_files([path])

    def _publish(self, sync: bool) -> None:
        if self._is_folder:
            if sync:
                _core.sync_files([self._partial / file.name for file in self._files])
            _core.publish(self._partial, self.path, False)
        else:
            (file,) = self._files
            _core.publish(self._partial / file.name, self.path, False)
        shutil.rmtree(self._workplace)


def manifest_text(
    files: Sequence[TargetFile], wanted: Sequence[Wanted], said: Mapping[str, Any], texts: Mapping[str, bytes]
) -> bytes:
    """The manifest: what is said of the tensors, and of each file its size and digests."""
    described: dict[str, Any] = {
        file.name: {
            "size": file.size,
            **file.facts(),
            "digests": {
                wanted[slot.tensor].name: f"{file.digests.get(slot.tensor, 0):032x}"
                for slot in file.slots
                if not wanted[slot.tensor].is_object
            },
        }
        for file in files
    }
    described |= {name: {"size": len(text), "sha256": hashlib.sha256(text).hexdigest()} for name, text in texts.items()}
    manifest = {"format": "shardwise", "version": 1, **said, "files": described}
    return json.dumps(manifest, indent=1, ensure_ascii=False).encode()


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors of writing say nothing of the file; with this they name it."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from None
        raise


def describe_difference(tensor: Wanted, replica: SourcePiece, element: int) -> str:
    """Say which element of a replica differs, by its offset in the tensor."""
    index = []
    for size in reversed(tensor.shape):
        element, at = divmod(element, size)
        index.append(at)
    path = getattr(replica.holder, "path", "an array")
    return (
        f"tensor {shown(tensor.name)}: replicas disagree; the first element of {path} that differs is "
        f'{tuple(index[::-1])}; replicas="first" takes the first of them'
    )


def _refuse_existing(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise FileExistsError(17, "something is there; a checkpoint is written to a new name", str(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(2, "the folder that is to hold the checkpoint is not there", str(path.parent))


def describe_room(outline: WriteOutline) -> None:
    """Refuse what the destination's file system has no room for."""
    if outline.bytes > outline.free:
        raise OSError(28, f"the checkpoint takes {bytes_text(outline.bytes)}, {bytes_text(outline.free)} are free")
