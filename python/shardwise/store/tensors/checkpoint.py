"""An open checkpoint of any format: its stored tensors by name, and its other contents."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import islice
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt

from ..._drawn import Worded
from ..._dtypes import Dtype, bytes_for
from ..._fork import cached_property, importing
from ..._text import counted, shown
from ...errors import ParseError
from ..data.files import Holder, ReadsFiles
from ..data.location import Location
from ..data.text import MAX_NAME
from .lazy import LazyTensors
from .stored import StoredTensor, UnsupportedError
from .stored_pieces import StoredPiece
from .training import Training

__all__ = ["Besides", "KeyPath", "Rest", "StoredCheckpoint", "StoredObject", "StoredSum"]

#: The most names that are searched for ones like a missing name.
_MOST_COMPARED = 10_000

#: The path of a tensor in the nested state dict that was saved: the keys and positions that lead to it.
KeyPath = tuple[str | int, ...]


class StoredObject(ReadsFiles):
    """A value of a checkpoint that is not a tensor.

    Attributes:
        extent: The file, first byte and size of the container that holds only this value; `None` without one.
    """

    __slots__ = ("_load", "extent", "name")

    def __init__(self, name: str, load: Callable[[], Any], extent: tuple[Holder, int, int] | None = None) -> None:
        self.name = name
        self.extent = extent
        self._load = load

    def value(self) -> Any:
        """Read the value: numbers, texts, lists and dicts; an inert record for an object of a class.

        Raises:
            ParseError: if the value cannot be read in this way.
        """
        return self._load()

    def __repr__(self) -> str:
        return f"<StoredObject {shown(self.name)}>"


class StoredSum(NamedTuple):
    """A range of a file, and the CRC-32 that the checkpoint states for its bytes.

    Attributes:
        file: The open file.
        start: The range's first byte.
        size: The range's size in bytes.
        crc: The stated CRC-32.
        name: The range's name, for messages.
        error: The reason why there is no CRC-32, if the container that should state it is damaged.
    """

    file: Holder
    start: int
    size: int
    crc: int
    name: str
    error: ParseError | None = None


class Rest(NamedTuple):
    """The readable rest of a checkpoint of which some files are missing or damaged.

    Attributes:
        pieces: The pieces of its tensors in the readable files, by name.
        sums: The ranges of these files that have a CRC-32.
        files: These files, open.
    """

    pieces: Mapping[str, Sequence[StoredPiece]]
    sums: Iterable[StoredSum]
    files: Sequence[Holder]


class _Closable(Protocol):
    def close(self) -> None: ...


@dataclass(frozen=True)
class Besides:
    """The contents of a checkpoint besides the tensors that can be read; see `StoredCheckpoint`.

    Attributes:
        metadata: Its statements about itself.
        objects: The checkpoint's values that are not tensors, by name.
        unreadable: The reasons why other tensors cannot be read, by name.
        sums: Returns the ranges of its files that have a CRC-32.
        unread: Files that belong to it and are not read.
        doubts: Warnings about facts that could not be worked out.
    """

    metadata: Mapping[str, Any] = field(default_factory=dict)
    objects: Mapping[str, StoredObject] = field(default_factory=dict)
    unreadable: Mapping[str, str] = field(default_factory=dict)
    sums: Callable[[], Iterable[StoredSum]] = tuple
    unread: Sequence[str] = ()
    doubts: Sequence[str] = ()


class StoredCheckpoint(Worded, ReadsFiles, Mapping[str, StoredTensor]):
    """A checkpoint of any format, open for reading; `open_checkpoint` makes it and lists what it takes.

    Like an open file, it is equal only to itself, and cannot be pickled; `diff_checkpoints` compares two checkpoints.

    Attributes:
        path: The file or folder.
        given: The path or URL that `open_checkpoint` was given: that of a folder around `path`, or of an index in it.
        format: The checkpoint's format: `"safetensors"`, `"dcp"`, ...
        metadata: The metadata that the checkpoint states about itself.
        objects: The checkpoint's values that are not tensors, by name.
        unreadable: The reasons why other tensors cannot be read, by name; these names are not in the mapping, and
            asking for one is a ParseError.
        unread: Files that belong to the checkpoint and are not read, by their paths from its folder.
        doubts: Warnings about facts that could not be worked out, such as which parameter the optimizer means by a
            number.
    """

    def __init__(
        self,
        path: Location,
        form: str,
        tensors: Mapping[str, StoredTensor],
        files: Sequence[_Closable] = (),
        besides: Besides | None = None,
    ) -> None:
        besides = Besides() if besides is None else besides
        if not (isinstance(tensors, Mapping) and isinstance(besides, Besides) and isinstance(form, str)):
            raise TypeError("open_checkpoint makes each StoredCheckpoint, of a path, a format and mappings")
        self.path = self.given = path
        self.format = form
        self.metadata: Mapping[str, Any] = MappingProxyType(dict(besides.metadata))
        self.objects: Mapping[str, StoredObject] = MappingProxyType(dict(besides.objects))
        self.unreadable: Mapping[str, str] = MappingProxyType(dict(besides.unreadable))
        self.unread = tuple(besides.unread)
        self.doubts = tuple(besides.doubts)
        self._tensors = tensors
        self._files = files
        self._sums = besides.sums
        self._closed = False

    def __getitem__(self, name: str) -> StoredTensor:
        """Return a tensor's description.

        Raises:
            KeyError: if there is no tensor of this name; the message proposes similar names.
            ParseError: if the tensor cannot be read.
        """
        try:
            return self._tensors[name]
        except KeyError:
            if name in self.unreadable:
                raise UnsupportedError(self.unreadable[name]) from None
            raise KeyError(f"{self.path} has no tensor {shown(name)}{_meant(name, self._tensors)}") from None

    def read(
        self,
        name: str,
        box: tuple[slice, ...] | None = None,
        *,
        out: npt.NDArray[Any] | None = None,
        memory: int | None = None,
    ) -> npt.NDArray[Any]:
        """Copy a box of a tensor into new memory; see `StoredTensor.read`."""
        tensor = self[name]
        if self._closed:
            raise ValueError(f"{self.path}: this checkpoint is closed")
        return tensor.read(box, out=out, memory=memory)

    def sums(self) -> Iterable[StoredSum]:
        """Yield the ranges of the files for which the checkpoint states a CRC-32; none if its format has none.

        Raises:
            ParseError: if a file does not hold what its index says.
        """
        return self._sums()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; a storage that several share is counted for each."""
        return sum(bytes_for(math.prod(shape), dtype.bits) for _, dtype, shape in self.described())

    def described(self) -> Iterator[tuple[str, Dtype, tuple[int, ...]]]:
        """Yield the name, dtype and shape of each tensor; no `StoredTensor` is made for it."""
        if isinstance(self._tensors, LazyTensors):
            return self._tensors.described()
        return ((name, tensor.known_dtype, tensor.shape) for name, tensor in self._tensors.items())

    @cached_property
    def training(self) -> Training:
        """The training state: which tensors belong to which parameter, and the totals of each kind."""
        return Training(self)

    def part(self, is_kept: Callable[[str], bool]) -> StoredCheckpoint:
        """Return a view of the tensors and values whose names are kept; the view uses the same open files."""
        names = [name for name in self if is_kept(name)]
        lazy = self._tensors
        tensors = lazy.chosen(names) if isinstance(lazy, LazyTensors) else {name: lazy[name] for name in names}
        besides = Besides(
            self.metadata,
            {name: value for name, value in self.objects.items() if is_kept(name)},
            {name: why for name, why in self.unreadable.items() if is_kept(name)},
            self._sums,
            self.unread,
            self.doubts,
        )
        return self.with_tensors(tensors, besides, self._files)

    def with_tensors(
        self, tensors: Mapping[str, StoredTensor], besides: Besides, files: Sequence[_Closable] = ()
    ) -> StoredCheckpoint:
        """Return a view with other tensors and other contents, which closes `files` when it is closed."""
        found = StoredCheckpoint(self.path, self.format, tensors, files, besides)
        found.given = self.given
        return found

    def close(self) -> None:
        """Close the files; arrays taken before stay valid. Closing twice is allowed."""
        self._closed = True
        for file in self._files:
            file.close()

    def __enter__(self) -> StoredCheckpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def _repr_html_(self) -> str:
        with importing:
            from ...show.html import table_html
            from .notebook import checkpoint_table

        return table_html(*checkpoint_table(self))

    def _words(self) -> str:
        with importing:
            from ...show.table import table_text
            from .notebook import checkpoint_table

        return table_text(*checkpoint_table(self))

    def __repr__(self) -> str:
        return f"<StoredCheckpoint {str(self.path)!r}: {self.format}, {counted(len(self), 'tensor')}>"


def _meant(name: object, names: Iterable[str]) -> str:
    """Return the end of a message, which proposes names that are like a missing one; or an empty text."""
    if not isinstance(name, str):
        return ""
    found = get_close_matches(name[:MAX_NAME], islice(names, _MOST_COMPARED), 3)
    return f"; did you mean {' or '.join(map(shown, found))}?" if found else ""
