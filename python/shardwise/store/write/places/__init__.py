"""Places where checkpoints are written, and the one question of which kind a path is in.

| module | answers |
|---|---|
| `place` | the questions that a place answers |
| `folder`, `regions` | a folder that gets its name at the end; its unfinished files |
| `receipts`, `folder_recorder` | receipts as lines of JSON; a file of them |
| `leftovers` | room on a disk; work that runs have left of a checkpoint there |
| `store` | an object store, whose index comes last |
| `parts`, `shared_objects` | parts of objects that several tasks put; how these objects begin and end |
| `stream`, `uploads`, `part_sizes` | an object made as a whole, part by part; the sizes of the parts |
| `whole_objects` | objects read, compared and removed |
| `task`, `gatherer` | one task and its receipt; its tensors put together from what they are read from |
| `fetch` | reads outside the engine: pieces of objects, replicas that are compared |
| `work`, `report` | how tasks are run: options, workers; what it costs, and the report |
"""

from __future__ import annotations

import errno
import shutil
import tempfile
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from ...data.location import Location, hidden_name, taken
from ...data.objects import ObjectPath
from ...data.own_folders import OpenFolder, make_marked, remove_marked
from . import folder, store
from .leftovers import check_room
from .part_sizes import LIMITS, Limits
from .place import NewCheckpoint, Place
from .uploads import check_store

__all__ = [
    "ScratchFolder",
    "check_writable",
    "claim_name",
    "locked",
    "part_limits",
    "place_for",
    "refuse_source",
    "takes_whole_files",
]


def takes_whole_files(location: Location) -> bool:
    """Return whether a task makes a whole file of a checkpoint at this path; in a folder tasks write parts of files."""
    return isinstance(location, ObjectPath)


def part_limits(location: Location) -> Limits | None:
    """Return the store's limits on multipart uploads; `None` if tasks cannot share an object at this path."""
    return LIMITS if isinstance(location, ObjectPath) and location.is_s3 else None


def place_for(new: NewCheckpoint) -> Place:
    """Return the place of a new checkpoint: a folder, or a store."""
    return store.StorePlace(new) if isinstance(new.path, ObjectPath) else folder.FolderPlace(new)


def locked(path: Location) -> AbstractContextManager[None]:
    """Hold the lock of a new checkpoint; stores have no locks."""
    return folder.locked(path) if isinstance(path, Path) else nullcontext()


def claim_name(path: Location, *, is_written: bool, resume: bool = False) -> None:
    """Refuse a path that is taken, before a plan is made. A path in a store is checked by the plan instead.

    Args:
        path: The path of the checkpoint; if `is_written`, the caller holds its lock.
        is_written: Whether the checkpoint is written now: then remains of a run that was killed at its end are removed.
        resume: Whether the path may hold the finished checkpoint itself.
    """
    if isinstance(path, Path) and not (resume and path.exists()):
        (folder.claim_name if is_written else folder.refuse_existing)(path)


def refuse_source(source: Location, target: Location) -> None:
    """Refuse a destination that is the source, or lies inside of it: a source is only read.

    Raises:
        FileExistsError: if it is the source.
        OSError: if it lies inside of it.
    """
    if isinstance(source, Path) and isinstance(target, Path):
        is_same = target.exists() and source.exists() and target.samefile(source)
        is_inside = source.is_dir() and target.resolve().is_relative_to(source.resolve())
    else:  # No URL begins like a path.
        is_same, is_inside = source == target, str(target).startswith(f"{source}/")
    if is_same:
        raise taken(target, "dst is the source")
    if is_inside:
        raise OSError(errno.EINVAL, f"dst is inside the source {source}, which must not be changed", str(target))


def check_writable(path: Location, nbytes: int = 0) -> None:
    """Refuse a path that cannot be written to, or whose file system has no room for so many bytes; nothing is made."""
    if isinstance(path, ObjectPath):
        check_store(path)
    elif isinstance(path, Path):
        check_room(path, nbytes, "the checkpoint, with what is written next to it first,")


#: The text of the file that marks the folder next to a destination.
_MARKER = "shardwise scratch\n"


class ScratchFolder:
    """A temporary folder for tensors that must be converted first: beside the destination, or elsewhere for a store."""

    def __init__(self, target: Location) -> None:
        self._beside = target.with_name(f"{hidden_name(target.name)}.scratch") if isinstance(target, Path) else None
        self._prefix = f"{hidden_name(target.name)}."
        self._made: Path | None = None

    def clear(self) -> None:
        """Remove the folder that a killed run has left. The caller holds the destination's lock."""
        if self._beside is not None:
            with OpenFolder.at(self._beside.parent) as parent:
                remove_marked(parent, self._beside.name, _MARKER)

    def folder(self) -> Path:
        """Return the folder, made at the first call."""
        if self._made is None:
            if self._beside is None:
                self._made = Path(tempfile.mkdtemp(prefix=self._prefix))
            else:
                with OpenFolder.at(self._beside.parent) as parent, make_marked(parent, self._beside.name, _MARKER):
                    self._made = self._beside
        return self._made

    def remove(self) -> None:
        """Remove the folder, as far as possible; the next run removes what is left."""
        if self._made is not None and self._beside is None:
            shutil.rmtree(self._made, ignore_errors=True)
        elif self._made is not None:
            with suppress(OSError):
                self.clear()
