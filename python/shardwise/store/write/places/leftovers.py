"""The room on a disk for a checkpoint, and the unfinished work of earlier runs there: its size, and its removal."""

from __future__ import annotations

import errno
import re
from contextlib import ExitStack, suppress
from pathlib import Path

from ...._core import free_space
from ...._text import bytes_text
from ...data.location import taken, workplace_of
from ...data.own_folders import OpenFolder, opened_below, refuse_stranger, refuse_unmarked, remove_marked

__all__ = ["DATA", "PARTS", "check_room", "free_bytes", "marker_of", "remove_plans", "unfinished_name"]

#: The file in a plan's folder that marks a plan whose parts are run by independent processes.
PARTS = "parts"
#: The folder of unfinished files in a plan's folder.
DATA = "data"
#: The name of a plan's folder: the beginning of its digest.
_PLAN = re.compile(r"[0-9a-f]{16}")


def unfinished_name(number: int, name: str) -> str:
    """Return the name that a file of a plan has in the folder of unfinished files, in which there are no folders.

    >>> unfinished_name(3, "model.safetensors"), unfinished_name(4, "step/zero/w/fp32.pt")
    ('model.safetensors', '4.unfinished')
    """
    return f"{number}.unfinished" if "/" in name else name


def free_bytes(path: Path) -> int:
    """Return the free bytes of a path's file system."""
    return int(free_space(path.parent))


def check_room(path: Path, nbytes: int, what: str = "the checkpoint") -> None:
    """Refuse, with OSError, bytes that do not fit in a path's file system; remains of earlier runs count as room."""
    free, left = free_bytes(path), _unfinished(path)
    if nbytes > free + left:
        sizes = bytes_text(nbytes), bytes_text(free)
        if sizes[0] == sizes[1]:
            sizes = f"{nbytes:,} bytes", f"{free:,} bytes"
        more = ""
        if left:
            more = (
                f", besides the {bytes_text(left)} that an interrupted run has left in {workplace_of(path).name}; "
                "resume=True goes on with that"
            )
        raise OSError(errno.ENOSPC, f"{what} takes {sizes[0]}, but {sizes[1]} are free{more}", str(path))


def _unfinished(path: Path) -> int:
    """Return the bytes that the remains of earlier runs of a checkpoint take on the disk."""
    total = 0
    with suppress(OSError), opened_below(workplace_of(path), 1) as top:
        for name in top.names():
            with suppress(OSError), opened_below(top.path / name / DATA, 3) as data:
                found = [data.status(each) for each in data.names()]
                total += sum(getattr(each, "st_blocks", 0) * 512 for each in found if each is not None)
    return total


def marker_of(name: str) -> str:
    """Return the text of the file that marks a plan's folder as ours."""
    return f"shardwise plan {name}\n"


def _names_of_plans(top: OpenFolder) -> list[str]:
    """Return the names in the folder of a checkpoint's plans; FileExistsError if no plan made one of them."""
    names = top.names()
    for name in names:
        if not _PLAN.fullmatch(name):
            raise refuse_stranger(top.path / name)
        with top.enter(name) as folder:
            refuse_unmarked(folder, marker_of(name))
    return names


def is_left_by_others(path: Path, own: str) -> bool:
    """Return whether the unfinished work next to a checkpoint is all of plans other than `own`."""
    with suppress(OSError), opened_below(workplace_of(path), 1) as top:
        names = _names_of_plans(top)
        return bool(names) and own not in names
    return False


def remove_plans(path: Path, *, but: str = "", parts: bool = True) -> None:
    """Remove the unfinished work of all plans for a checkpoint, except that of one.

    Raises:
        FileExistsError: if there is something that no plan made, or, unless `parts`, a plan that is run in parts.
    """
    top_path = workplace_of(path)
    with ExitStack() as stack:
        try:
            top = stack.enter_context(opened_below(top_path, 1))
        except FileNotFoundError:
            return
        names = _names_of_plans(top)  # Before anything is removed.
        for name in names:
            if not parts and name != but:
                with top.enter(name) as folder:
                    if folder.status(PARTS) is not None:
                        raise taken(folder.path, "holds parts of a plan; commit the plan, or remove this folder")
        for name in names:
            if name != but:
                remove_marked(top, name, marker_of(name))
    if but not in names:
        with suppress(OSError), OpenFolder.at(top_path.parent) as beside:
            beside.remove_empty(top_path.name)
