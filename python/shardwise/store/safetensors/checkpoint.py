"""A checkpoint as a mapping from tensor names to zero-copy arrays."""

import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np

from ..._arguments import path_of
from ..boxes import Extent, check_box, check_out, contiguous_strides, expressible, read_extent
from ..files import DataFile, ReadsFiles
from .folder import locate_checkpoint, open_entries
from .header import Entry

__all__ = ["Checkpoint", "open_safetensors"]


def open_safetensors(path: str | os.PathLike[str]) -> "Checkpoint":
    """Open a safetensors checkpoint: a mapping from tensor names to zero-copy numpy arrays.

    Only headers are read. An array is made when it is asked for, as a read-only view of the memory-mapped file, so a
    shard of it does not touch the bytes of other shards.

    Args:
        path: A `.safetensors` file, a folder in Hugging Face's format (with `model.safetensors`, or with
            `model.safetensors.index.json` and the files that it names), or such an index itself.

    Raises:
        OSError: if a file cannot be opened or read.
        ParseError: if a file does not follow the format; names the file and the byte offset or the tensor.

    >>> import json, tempfile
    >>> from pathlib import Path
    >>> header = json.dumps({"bias": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}).encode()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "model.safetensors")
    ...     data = np.arange(3, dtype="<f4").tobytes()
    ...     _ = path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    ...     with open_safetensors(path) as checkpoint:
    ...         print(checkpoint["bias"], checkpoint.info("bias").shape)
    [0. 1. 2.] (3,)
    """
    return Checkpoint(path)


class Checkpoint(ReadsFiles, Mapping[str, np.ndarray[Any, Any]]):
    """A safetensors checkpoint, open for reading; `open_safetensors` makes it and lists what it takes.

    Arrays outlive the checkpoint: each keeps its file's map alive. No library can keep an array alive whose file is
    truncated: reading it then kills the process (SIGBUS). Every access looks at the file first and raises ParseError if
    it changed; if a file may shrink during the work, `read` is safe, at the price of a copy.

    As an open file it is equal to itself alone, and cannot be pickled; `diff_checkpoints` compares the tensors of two.

    Attributes:
        path: The file, or the index of several.
        entries: What the headers say about each tensor, by name.
        metadata: The free text of the headers' `__metadata__`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = locate_checkpoint(path_of(path))
        entries, metadata, files = open_entries(self.path)
        self._files = {file.path: file for file in files}
        self._closed = False
        self.entries: Mapping[str, Entry] = MappingProxyType(entries)
        self.metadata: Mapping[str, str] = MappingProxyType(metadata)

    def info(self, name: str) -> Entry:
        """Say what the header says about one tensor: dtype, shape, file and byte range; KeyError if there is none."""
        return self.entries[name]

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        """Give a tensor as a read-only, memory-mapped array.

        Raises:
            KeyError: if there is no such tensor.
            ImportError: if its dtype needs ml_dtypes, which is not installed.
            TypeError: if numpy cannot express it: its elements are packed, several to a byte, or it has more dims
                than an array may have.
            SizeOverflowError: if its sizes are too large for an array, as they may be beside one of 0.
            ParseError: if the file changed since it was opened.
        """
        entry = self.entries[name]
        dtype, buffer = entry.numpy_dtype, self._file(entry).map()
        with expressible(repr(entry.name), entry.shape, dtype):
            array: np.ndarray[Any, Any] = np.ndarray(entry.shape, dtype, buffer, entry.start)
        return array

    def read(
        self, name: str, box: tuple[slice, ...] | None = None, *, out: np.ndarray[Any, Any] | None = None
    ) -> np.ndarray[Any, Any]:
        """Copy a box of a tensor into new memory; safe even if the file is truncated meanwhile.

        Args:
            name: The tensor.
            box: A slice per dim with step 1, as `Partition.box` gives it; the whole tensor if left out.
            out: A writable C-contiguous array of the box's shape and the tensor's dtype to read into.

        Returns:
            `out`, or a new array.

        Raises:
            KeyError, ImportError, TypeError, SizeOverflowError: as for `checkpoint[name]`.
            IndexError: if the box does not have one slice per dim, or reaches outside the tensor.
            ValueError: if `out` does not fit.
            ParseError: if the file changed since it was opened; `out` may be partly written.
            OSError: if the file cannot be read.
        """
        entry = self.entries[name]
        dtype = entry.numpy_dtype
        bounds = check_box(box, entry.shape)
        shape = tuple(stop - start for start, stop in bounds)
        with expressible(repr(entry.name), entry.shape, dtype):
            whole = np.empty(shape, dtype) if out is None else out
        target = check_out(whole, shape, dtype)
        file = self._file(entry)
        strides = contiguous_strides(entry.shape, dtype.itemsize)
        read_extent(Extent(file, entry.start, strides), [start for start, _ in bounds], target)
        file.check()
        return target

    def _file(self, entry: Entry) -> DataFile:
        if self._closed:
            raise ValueError(f"{self.path}: this checkpoint is closed")
        return self._files[entry.file]

    def close(self) -> None:
        """Close the files; arrays taken before stay valid. Closing twice is allowed."""
        self._closed = True
        for file in self._files.values():
            file.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        return f"<Checkpoint {str(self.path)!r}: {len(self)} tensors>"
