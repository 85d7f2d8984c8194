"""Writing a new checkpoint to an object store: each object once, under its final name, the manifest last.

There is no rename in a store, and no folder that appears at once. What makes a folder a checkpoint is its manifest,
which is written when all else is there, on condition that there is none. A single object is seen when it is whole.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from ..._boxes import consecutive
from ..._text import bytes_text, shown
from ...errors import LayoutError
from ..boxes import Bounds
from ..engine import add_digests
from ..objects import ObjectPath, ObjectStatus
from ..sharded import MANIFEST
from .files import TargetFile
from .gather import Gatherer, check_replicas
from .manifest import manifest_text
from .reports import WriteOutline, WriteReport
from .uploads import check_writable, put_object, upload_to
from .wanted import Wanted

__all__ = ["ObjectJob"]

#: S3 takes at least 5 MiB for each part but the last, and at most 10,000 parts. Parts are filled to three quarters at
#: least, with blocks of a quarter at most.
_LEAST_PART = 8 * 2**20
_MOST_PART = 64 * 2**20
_MOST_PARTS = 7_000
_FLIGHT = 8
_THERE = "something is there; a checkpoint is written to a new name"


class ObjectJob:
    """A new checkpoint in a store: as a plan of tasks for a disk, with objects that are made one after the other."""

    def __init__(
        self,
        path: Any,
        wanted: Sequence[Wanted],
        files: Sequence[TargetFile],
        *,
        is_folder: bool,
        texts: Mapping[str, bytes],
        manifest: Mapping[str, Any],
        compare_replicas: bool,
    ) -> None:
        self.path: ObjectPath = path
        self._wanted = wanted
        self._files = files
        self._is_folder = is_folder
        self._texts = texts
        self._manifest = manifest
        self._compare_replicas = compare_replicas
        self._sizes = [file.size for file in files]
        check_writable(self.path)

    @property
    def bytes(self) -> int:
        """Bytes of all objects."""
        return sum(self._sizes)

    def outline(self, memory: int, threads: int | None) -> WriteOutline:
        """Say what it would take; nothing is written.

        Raises:
            LayoutError: if the memory is too little; says what would be needed.
        """
        part = self._part_bytes(memory)
        taken = part * (3 + self._flight(memory))
        names = [file.name for file in self._files]
        return WriteOutline(
            tuple(zip(names, self._sizes, strict=True)), self.bytes, taken, threads or 1, len(names), free=2**63 - 1
        )

    def _part_bytes(self, memory: int) -> int:
        """The bytes of a part: one is filled, from another, while some are under way."""
        if isinstance(memory, bool) or not isinstance(memory, int):
            raise TypeError(f"memory must be an integer, got {shown(memory)}")
        largest = max(self._sizes, default=1)
        least = max(_LEAST_PART, -(-largest // _MOST_PARTS))
        part = min(max(least, min(memory // 6, _MOST_PART)), max(largest, 1))
        if memory < 4 * part:
            raise LayoutError(
                f"memory is {bytes_text(memory)}; {bytes_text(4 * part)} are needed at least, for objects that are "
                f"uploaded in parts of {bytes_text(part)}"
            )
        return part

    def _flight(self, memory: int) -> int:
        return max(1, min(memory // self._part_bytes(memory) - 3, _FLIGHT))

    def run(
        self,
        *,
        memory: int,
        threads: int | None,
        sync: bool,
        resume: bool,
        progress: Callable[[int, int], object] | None,
    ) -> WriteReport:
        """Write the checkpoint; what a store says that it has is on its disks, whatever `sync` says."""
        part = self._part_bytes(memory)
        self._refuse_existing(resume)
        if self._compare_replicas:
            check_replicas(self._wanted, memory)
        gatherer = Gatherer(self._wanted, threads)
        made: dict[ObjectPath, ObjectStatus] = {}
        digests: list[list[int]] = [[] for _ in self._wanted]
        written = 0
        for file, size in zip(self._files, self._sizes, strict=True):
            place = self.path / file.name if self._is_folder else self.path
            if not resume and self._is_folder and place.is_file():
                raise FileExistsError(errno.EEXIST, f"{_THERE}; resume=True makes it anew", str(place))
            if file.has_digests:
                # They stand in the header, before what they are of.
                for _ in self._parts(file, gatherer, part, file.digests):
                    pass
            found: dict[int, int] = {}
            upload = upload_to(place, flight=self._flight(memory), is_new=not (resume and self._is_folder))
            try:
                for data in self._parts(file, gatherer, part, found):
                    upload.put(data)
                    written += len(data)
                    if progress is not None:
                        progress(written, self.bytes)
                upload.commit()
            except BaseException:
                upload.abort()
                raise
            if file.has_digests and found != file.digests:
                raise OSError(errno.EIO, "a source changed while it was read, so the digests are wrong", str(place))
            file.digests.update(found)
            for position, digest in found.items():
                digests[position].append(digest)
            made[place] = place.status()
            if made[place].size != size:
                raise OSError(errno.EIO, f"has {made[place].size} bytes; {size} were written", str(place))
        if self._is_folder:
            self._finish([add_digests(parts) for parts in digests], made, resume)
        return WriteReport(cast(Any, self.path), len(self._wanted), self.bytes, gatherer.bytes_read, written, 0)

    def _refuse_existing(self, resume: bool) -> None:
        # What is in the way of a folder is its manifest; the rest is refused object by object, when it is made.
        goes_on = resume and self._is_folder
        is_there = self.path.is_file() if goes_on else self.path.exists()
        if is_there or (self._is_folder and (self.path / MANIFEST).is_file()):
            hint = "; resume=True writes over what an interrupted run left" if self._is_folder and not resume else ""
            raise FileExistsError(errno.EEXIST, f"{_THERE}{hint}", str(self.path))

    def _finish(self, digests: Sequence[int], made: Mapping[ObjectPath, ObjectStatus], resume: bool) -> None:
        """Write the index, see that all is still there, and write the manifest."""
        for name, text in self._texts.items():
            put_object(self.path / name, text, is_new=not resume)
        for place, status in made.items():
            if place.status() != status:
                raise FileExistsError(errno.EEXIST, "was replaced meanwhile: another run writes here", str(place))
        text = manifest_text(self._manifest, self._wanted, digests, self._files, self._sizes, self._texts)
        put_object(self.path / MANIFEST, text, is_new=True)

    def _parts(
        self, file: TargetFile, gatherer: Gatherer, part_bytes: int, digests: dict[int, int]
    ) -> Iterator[bytearray]:
        """The bytes of an object in order; adds up the digests of its tensors."""
        ((_, pending),) = file.frame()  # All that stands before the tensors; nothing stands behind them.
        while len(pending) > part_bytes:
            yield bytearray(pending[:part_bytes])
            pending = pending[part_bytes:]
        blocks: list[tuple[int, Bounds, int]] = []
        filled = len(pending)

        def flush() -> bytearray:
            data = bytearray(filled)
            data[: len(pending)] = pending
            if blocks:
                found = gatherer.fill(np.frombuffer(data, np.uint8), blocks)
                for (position, _, _), digest in zip(blocks, found, strict=True):
                    digests[position] = add_digests([digests.get(position, 0), digest])
            return data

        for slot in file.slots:
            itemsize = self._wanted[slot.tensor].itemsize
            extents = tuple(stop - start for start, stop in slot.box)
            if slot.end == slot.begin:
                continue
            for block in consecutive(extents, max(part_bytes // 4 // itemsize, 1)):
                nbytes = itemsize
                for side in block:
                    nbytes *= side.stop - side.start
                if filled + nbytes > part_bytes and filled:
                    yield flush()
                    pending, blocks, filled = b"", [], 0
                box = tuple(
                    (start + side.start, start + side.stop) for (start, _), side in zip(slot.box, block, strict=True)
                )
                blocks.append((slot.tensor, box, filled))
                filled += nbytes
        if filled:
            yield flush()
