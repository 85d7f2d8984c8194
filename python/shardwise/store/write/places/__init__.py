"""Places where checkpoints are written, and the one question of which kind a path is in.

| module | answers |
|---|---|
| `place` | the questions that a place answers; receipts |
| `folder`, `regions` | a folder that gets its name at the end; its unfinished files |
| `leftovers` | room on a disk; work that runs have left of a checkpoint there |
| `store` | an object store, whose index comes last |
| `parts`, `shared_objects` | parts of objects that several tasks put; how these objects begin and end |
| `stream`, `uploads`, `part_sizes` | an object made as a whole, part by part; the sizes of the parts |
| `whole_objects` | objects read, compared and removed |
| `task`, `gatherer` | one task and its receipt; its tensors put together from what they are read from |
| `fetch` | reads beside the engine: pieces of objects, replicas that are compared |
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
    """Return whether a task makes a whole file of a checkpoint that is to be there, and not parts of any."""
    return isinstance(location, ObjectPath)


def part_limits(location: Location) -> Limits | None:
    """Return limits on uploads by parts of the store at this path; `None` if tasks cannot share an object there."""
    return LIMITS if isinstance(location, ObjectPath) and location.is_s3 else None


def place_for(new: NewCheckpoint) -> Place:
    """Give the place of a new checkpoint."""
    return store.StorePlace(new) if isinstance(new.path, ObjectPath) else folder.FolderPlace(new)


def locked(path: Location) -> AbstractContextManager[None]:
    """Hold the lock of a new checkpoint; in a store there is none."""
    return folder.locked(path) if isinstance(path, Path) else nullcontext()


def claim_name(path: Location, *, is_written: bool, resume: bool = False) -> None:
    """Refuse a path that is taken, before a plan is made; in a store only the plan knows what would be.

    Args:
        path: The path, whose lock is held if it `is_written`: then what a killed run left of a finished one is removed.
        is_written: Whether something is written now.
        resume: Whether what is there may be the finished checkpoint itself.
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
        raise OSError(errno.EINVAL, f"dst lies inside of the source {source}, which is only read", str(target))


def check_writable(path: Location, nbytes: int = 0) -> None:
    """Refuse, before anything is made beside it, a place that cannot be written or has no room for so many bytes."""
    if isinstance(path, ObjectPath):
        check_store(path)
    elif isinstance(path, Path):
        check_room(path, nbytes, "the checkpoint, with what is written beside it first,")


#: The text of the file that marks the folder beside a destination.
_MARKER = "shardwise scratch\n"


class ScratchFolder:
    """A folder for what is put together before it is written: beside the destination, for a store a temporary one."""

    def __init__(self, target: Location) -> None:
        self._beside = target.with_name(f"{hidden_name(target.name)}.scratch") if isinstance(target, Path) else None
        self._prefix = f"{hidden_name(target.name)}."
        self._made: Path | None = None

    def clear(self) -> None:
        """Remove what a killed run has left; the destination's lock is held."""
        if self._beside is not None:
            with OpenFolder.at(self._beside.parent) as parent:
                remove_marked(parent, self._beside.name, _MARKER)

    def folder(self) -> Path:
        """Give the folder, which is made if it is not there."""
        if self._made is None:
            if self._beside is None:
                self._made = Path(tempfile.mkdtemp(prefix=self._prefix))
            else:
                with OpenFolder.at(self._beside.parent) as parent, make_marked(parent, self._beside.name, _MARKER):
                    self._made = self._beside
        return self._made

    def remove(self) -> None:
        """Remove the folder; what stays is for the next run to remove."""
        if self._made is not None and self._beside is None:
            shutil.rmtree(self._made, ignore_errors=True)
        elif self._made is not None:
            with suppress(OSError):
                self.clear()
