"""The cost of writing a checkpoint, and the report on it."""

from __future__ import annotations

from dataclasses import dataclass

from ...._arguments import INTEGER, check_fields, check_items
from ....rules.left_out import LeftOut
from ...data.location import LOCATIONS, Location

__all__ = ["WriteOutline", "WriteReport"]


@dataclass(frozen=True)
class WriteOutline:
    """The cost of writing a checkpoint.

    Attributes:
        files: The names and bytes of the files.
        bytes: Bytes of all files.
        memory: The most bytes of the buffers of all threads.
        threads: The number of threads.
        tasks: The number of tasks.
        free: Bytes that the destination's file system has left; 2**63 - 1 for a destination in a store.
        bytes_read: Bytes that are read, with those of replicas to be compared. `None` for a destination in a store.
        operations: The number of copies, each of bytes that are contiguous in a source and in a file; those that are
            near one another are read and written together. `None` for a destination in a store.
        seconds: The estimated time in one thread, from a sample. `None` for a source or a destination in a store, or if
            nothing can be written next to the destination.
        warnings: Things that look wrong, as in `WriteReport`.
        left_out: Things that the new checkpoint would not contain, as in `WriteReport`.
    """

    files: tuple[tuple[str, int], ...]
    bytes: int
    memory: int
    threads: int
    tasks: int
    free: int
    bytes_read: int | None = None
    operations: int | None = None
    seconds: float | None = None
    warnings: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    def __post_init__(self) -> None:
        maybe = (*INTEGER, type(None))
        check_fields(self, files=tuple, bytes=INTEGER, memory=INTEGER, threads=INTEGER, tasks=INTEGER, free=INTEGER)
        check_fields(self, bytes_read=maybe, operations=maybe, seconds=(float, *maybe), warnings=tuple)
        check_items("left_out", self.left_out, LeftOut)


@dataclass(frozen=True)
class WriteReport:
    """The checkpoint that was written.

    Attributes:
        path: The new checkpoint.
        tensors: The number of tensors, not counting aliases.
        bytes: Bytes of all files.
        bytes_read: Bytes read from files.
        bytes_resumed: Bytes that an earlier run had written.
        warnings: Warnings, a sentence each: rules that apply to no name, tensors that match no rule, a pattern of
            `rename` that changes no name, layouts that cut nothing because the format holds tensors whole; values
            beyond the range of the new dtype; values that the format has no place for.
        left_out: Things that the new checkpoint does not contain, by kind; `str` of one is its sentence.
        companions: The names of files that were copied along with the tensors of a Hugging Face folder.
    """

    path: Location
    tensors: int
    bytes: int
    bytes_read: int
    bytes_written: int
    bytes_resumed: int
    warnings: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    companions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, path=LOCATIONS, tensors=INTEGER, bytes=INTEGER)
        check_fields(self, bytes_read=INTEGER, bytes_written=INTEGER, bytes_resumed=INTEGER, warnings=tuple)
        check_fields(self, left_out=tuple, companions=tuple)
        check_items("left_out", self.left_out, LeftOut)
