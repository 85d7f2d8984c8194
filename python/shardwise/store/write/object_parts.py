"""What making objects takes, by whatever it is driven: parts, memory, workers; and the end of it, the manifest."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, NamedTuple

from ..._arguments import integer
from ..._text import bytes_text
from ...errors import LayoutError
from ..engine import add_digests, check_threads
from ..objects import ObjectPath
from ..sharded import MANIFEST
from .crew import Crew, crew_of
from .dcp import INDEX
from .files import TargetFile
from .manifest import manifest_text
from .object_task import ObjectReceipt
from .reports import WriteOutline
from .uploads import put_object, refusal

__all__ = ["Parts", "finish", "last_of", "object_crew", "outline_of", "parts_for", "parts_of_crew", "refuse_existing"]

#: S3 takes at least 5 MiB for each part but the last, and at most 10,000 parts. Parts are filled to at least three
#: quarters, with blocks of at most a quarter.
_LEAST_PART = 8 * 2**20
_MOST_PART = 64 * 2**20
_MOST_PARTS = 7_000
_FLIGHT = 8


class Parts(NamedTuple):
    """How objects are cut into parts.

    Attributes:
        bytes: Of a part.
        flight: How many are under way at a time.
        holds: Whether there is room for a part that is held back.
    """

    bytes: int
    flight: int
    holds: bool


def parts_for(files: Sequence[TargetFile], memory: int, workers: int = 1) -> Parts:
    """Say what parts objects are made of by a worker with so much memory.

    One part is filled, from another, while some are under way.

    Raises:
        LayoutError: if the memory is too little; says what would be needed.
    """
    integer("memory", memory)
    largest = max((file.size for file in files), default=1)
    least = max(_LEAST_PART, -(-largest // _MOST_PARTS))
    part = min(max(least, min(memory // 6, _MOST_PART)), max(largest, 1))
    if memory < 4 * part:
        each = f" for each of {workers} workers" if workers > 1 else ""
        raise LayoutError(
            f"memory is {bytes_text(memory)}{each}; at least {bytes_text(4 * part)} are needed for objects that "
            f"are uploaded in parts of {bytes_text(part)}"
        )
    holds = any(file.has_digests or file.needs_crcs for file in files) and memory >= 5 * part
    return Parts(part, max(1, min(memory // part - 3 - holds, _FLIGHT)), holds)


def parts_of_crew(files: Sequence[TargetFile], memory: int, crew: Crew) -> Parts:
    """Say what parts each worker of a crew makes objects of; the workers of a host share its memory."""
    return parts_for(files, crew.memory, memory // crew.memory)


def outline_of(files: Sequence[TargetFile], memory: int, threads: int | None) -> WriteOutline:
    """Say what it takes to make objects in this process.

    Raises:
        LayoutError: if the memory is too little; says what would be needed.
    """
    check_threads(threads)
    part, flight, holds = parts_for(files, memory)
    sizes = tuple((file.name, file.size) for file in files)
    total = sum(size for _, size in sizes)
    return WriteOutline(sizes, total, part * (3 + holds + flight), threads or 1, len(sizes), free=2**63 - 1)


def object_crew(executor: Executor, memory: int, places: Iterable[ObjectPath]) -> Crew:
    """Give what makes objects through a caller's executor; `memory` is that of one host.

    Raises:
        TypeError: if it is not an executor, or does not run in this process, in whose memory one of the places is.
        LayoutError: if the memory is too little.
    """
    crew = crew_of(executor, memory)
    inside = next((path for path in places if path.protocol == "memory"), None)
    if inside is not None and not crew.is_here:
        raise TypeError(f"{inside}: is in the memory of this process; give a ThreadPoolExecutor")
    return crew


def last_of(texts: Mapping[str, bytes]) -> str:
    """The name of what makes a folder a checkpoint: PyTorch looks for its own index, and does not know the manifest."""
    return INDEX if INDEX in texts else MANIFEST


def refuse_existing(path: ObjectPath, texts: Mapping[str, bytes]) -> None:
    """Refuse, with FileExistsError, a name at which there is a checkpoint with such texts, or an object."""
    if path.is_file() or (path / last_of(texts)).is_file():
        raise refusal(path)


def finish(
    path: ObjectPath,
    files: Sequence[TargetFile],
    tensors: Sequence[Any],
    texts: Mapping[str, bytes],
    manifest: Mapping[str, Any],
    receipts: Sequence[ObjectReceipt],
    put_text: Callable[[ObjectPath, bytes], object],
) -> None:
    """Check that everything is still there; write index and manifest, last the one that makes it a checkpoint.

    Args:
        path: The folder.
        files: What its objects are.
        tensors: What is in them.
        texts: The other objects, by name.
        manifest: What the manifest says, besides digests.
        receipts: Of each object.
        put_text: Makes an object, besides the last, which is made on condition that there is none.
    """
    parts: list[list[int]] = [[] for _ in tensors]
    for file, receipt in zip(files, receipts, strict=True):
        file.digests, file.crcs = receipt.digests, receipt.crcs
        for position, digest in receipt.digests.items():
            parts[position].append(digest)
    with ThreadPoolExecutor(_FLIGHT, thread_name_prefix="shardwise-look") as pool:
        found = pool.map(lambda file: (path / file.name).status(), files)
        for file, receipt, status in zip(files, receipts, found, strict=True):
            if status != receipt.status:
                text = "was replaced meanwhile: another run writes here"
                raise FileExistsError(errno.EEXIST, text, str(path / file.name))
    digests, sizes = [add_digests(each) for each in parts], [file.size for file in files]
    last = last_of(texts)
    made = {**texts, MANIFEST: manifest_text(manifest, tensors, digests, files, sizes, texts)}
    for name, content in made.items():
        if name != last:
            put_text(path / name, content)
    put_object(path / last, made[last], is_new=True)
