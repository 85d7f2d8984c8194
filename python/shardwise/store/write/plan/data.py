"""The contents of a plan, as sections of numbers and bytes (rule 2.12 b), each read when it is needed (2.12 i)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import starmap
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ...._dtypes import Dtype, dtype_named
from ...._types import Numbers
from ....errors import LayoutError, ParseError
from ....pieces import Pieces
from ...data.block_lists import Listed, Section, block_digests, numbers
from ...data.location import Location
from ...data.sources import Source
from ...data.stated_sources import Locations, source_of
from ...formats.sharded import MANIFEST
from ..forms.files import Extent, TargetFile, WrittenFile
from ..forms.forms import WRITTEN, Texts, check_names, header_text, manifest_text, target_file
from ..forms.slots import Slots, SlotTable
from .tables import TABLES, FileRow, SlotRow, TensorRow, table_of

__all__ = [
    "LEAST_ASKED",
    "CheckpointTables",
    "TargetTensor",
    "said_by",
]


_NO_TENSOR, _NO_FILE = TensorRow._make([0] * 8), FileRow._make([0] * 5)

#: The number of neighbouring tensors that are made when one is asked for, as the next one is mostly near.
_NEAR = 32
#: In a box with its array, the index of the row that is the array's shape.
_SHAPE_OF_ARRAY = 3
#: The least `task_bytes`: smaller tasks would cost more than their data.
LEAST_ASKED = 64 * 2**10


@contextlib.contextmanager
def said_by(path: Location | None) -> Iterator[None]:
    """Turn errors of a damaged plan into a ParseError that names the plan's file."""
    try:
        yield
    except (LayoutError, OSError):
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        if path is None:
            raise
        text = str(error).removeprefix(f"{path}: ")
        text = text if isinstance(error, ParseError) else f"the plan cannot be read: {text[:200]}"
        raise ParseError(f"{path}: {text}") from None


class TargetTensor:
    """A tensor to write, with its stored pieces, and their places in the new files.

    Attributes:
        name: The tensor's name in the new checkpoint.
        dtype: The dtype in which it is written.
        is_object: Whether it is not a tensor, but a value that is copied as bytes.
    """

    def __init__(
        self, plan: CheckpointTables, name: str, dtype: Dtype, shape: tuple[int, ...], row: TensorRow, before: TensorRow
    ):
        self._plan, self._row, self._before = plan, row, before
        self.name, self.dtype, self.shape, self.is_object = name, dtype, shape, bool(row.is_object)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.dtype.bits // 8

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.itemsize

    @property
    def partition(self) -> None:
        """Always `None`: the tensor's boxes say how it is cut."""
        return None

    @property
    def sources(self) -> Pieces:
        """The stored pieces from which its elements are read."""
        return self._rows("pieces", self._before.sources, self._row.sources)

    @property
    def replicas(self) -> Pieces:
        """The pieces that store the same elements once more, to be compared."""
        return self._rows("replicas", self._before.replicas, self._row.replicas)

    @property
    def has_replicas(self) -> bool:
        """True if some elements are stored more than once."""
        return self._row.replicas > self._before.replicas

    @property
    def targets(self) -> Pieces:
        """The pieces of the new files, in C order; their holders are the files' numbers."""
        held = self._plan.rows("targets", self._before.targets, self._row.targets)
        boxes = self._plan.boxes_at(held["place"], len(self.shape))
        arrays = boxes[:, _SHAPE_OF_ARRAY] if self._plan.has_arrays else None
        return Pieces.dense((held["file"], held["offset"]), boxes[:, :2], self.itemsize, arrays)

    def _rows(self, section: str, begin: int, end: int) -> Pieces:
        rows = self._plan.numbers(section, begin, end)
        return Pieces(rows.reshape(-1, 2 + 3 * len(self.shape)), self._plan.sources)


class _LoadedSlots(Slots):
    """The slots of a file of a plan, read when they are needed."""

    def __init__(self, load: Callable[[], Slots]) -> None:
        self._load = load

    def __getattr__(self, name: str) -> Any:
        if name not in ("table", "tensors", "places", "begins"):
            raise AttributeError(name)
        found = self._load()
        self.table, self.tensors, self.places, self.begins = found.table, found.tensors, found.places, found.begins
        return getattr(self, name)


_SelfTables = TypeVar("_SelfTables", bound="CheckpointTables")


class CheckpointTables:
    """The tables of a new checkpoint.

    Its lists are sections of numbers and bytes, in memory or in a file, of which only what is asked for is read:
    `names`, `shapes`, `tensors`, `pieces`, `replicas`, `targets` and `boxes` of tensors; `file_names`, `files` and
    `slots` of files, and of files for ranks `again`, a byte for each slot that says whether an earlier one has its box;
    `sources` and `source_ends`; `runs` of tasks, and if these make parts of objects `order`, that of the tensors,
    `shares` and `share_ends`; `aliases` and `paths`, which are JSON; and `beside`, the contents of what goes along.

    Attributes:
        path: The place of the new checkpoint.
        is_folder: Whether the checkpoint is a folder; otherwise it is one file.
        task_bytes: The most bytes of tensors that a task writes.
        form: The format of the new checkpoint.
        dtypes: The dtypes that occur, in the order of their numbers in the tables.
        tensors: The tensors that are written, each made when it is asked for.
        sources: The files, objects and arrays that are read.
        head: The entries of the plan besides its sections.
        sections: The sections by name.
    """

    path: Location
    is_folder: bool
    task_bytes: int
    form: str
    head: Mapping[str, Any]
    sections: Mapping[str, Section]
    dtypes: Sequence[Dtype]
    tensors: Sequence[TargetTensor]
    sources: Sequence[Source]
    _file: Location | None
    _digest: str | None
    _files: list[TargetFile] | None
    _slot_table: SlotTable | None

    def __init__(self) -> None:
        raise TypeError(f"a {type(self).__name__} is made by plan_checkpoint, or read from a file by its load")

    @classmethod
    def of_sections(
        cls: type[_SelfTables],
        head: Mapping[str, Any],
        sections: Mapping[str, Section],
        *,
        path: Location | None = None,
        sources: Sequence[Any] | None = None,
        files: list[TargetFile] | None = None,
        file: Location | None = None,
        digest: str | None = None,
    ) -> _SelfTables:
        """Make a plan of its head and its sections.

        Args:
            head: The entries of the plan besides its sections.
            sections: The tables of the plan, by name.
            path: The place of the checkpoint; if `None`, the head states it.
            sources: The sources; if `None`, the sections state all of them.
            files: The files; if `None`, they are made of the sections.
            file: The file that the plan is read from, if any.
            digest: The plan's digest, if it is known.
        """
        self = cls.__new__(cls)
        self.head, self.sections = head, sections
        self.path = Locations().of(head["path"]) if path is None else path
        self.form, self.task_bytes = head["form"], head["task_bytes"]
        self.is_folder = WRITTEN[self.form].names is not None
        self.dtypes = [known for name in head["dtypes"] if (known := dtype_named(name)) is not None]
        self.tensors = Listed("tensor", self.count("tensors"), self._tensors_made, near=_NEAR)
        if sources is None:
            places, count = Locations(), self.sections["source_ends"].nbytes // 8
            sources = Listed("source", count, lambda begin, end: (self._source(n, places) for n in range(begin, end)))
        self.sources = sources
        self._file, self._digest = file, digest
        self._files = files
        self._slot_table = None
        return self

    def _tensors_made(self, begin: int, end: int) -> list[TargetTensor]:
        """Return the tensors from one number to another."""
        with said_by(self._file):
            first = max(begin - 1, 0)
            found = list(starmap(TensorRow, self.rows("tensors", first, end).tolist()))
            befores, rows = ([_NO_TENSOR, *found[:-1]], found) if not begin else (found[:-1], found[1:])
            start = befores[0]
            names = self.sections["names"].read(start.name, rows[-1].name)
            shapes = self.numbers("shapes", start.shape, rows[-1].shape).tolist()
            made = []
            for before, row in zip(befores, rows, strict=True):
                name = names[before.name - start.name : row.name - start.name].decode()
                shape = tuple(shapes[before.shape - start.shape : row.shape - start.shape])
                made.append(TargetTensor(self, name, self.dtypes[row.dtype], shape, row, before))
            return made

    def _source(self, number: int, places: Locations) -> Source:
        with said_by(self._file):
            ends = self.numbers("source_ends", max(number - 1, 0), number + 1).tolist()
            text = self.sections["sources"].read(ends[0] if number else 0, ends[-1])
            return source_of(json.loads(text), places)

    def numbers(self, section: str, begin: int, end: int) -> Numbers:
        """Return the numbers of a section from one position to another."""
        return numbers(self.sections[section], begin, end)

    def count(self, section: str) -> int:
        """Return the number of rows of a table."""
        return self.sections[section].nbytes // (8 * len(TABLES[section]._fields))

    def rows(self, section: str, begin: int, end: int) -> npt.NDArray[np.void]:
        """Return the rows of a table from one row to another."""
        width = len(TABLES[section]._fields)
        return table_of(section, self.numbers(section, width * begin, width * end))

    def column(self, section: str, column: str) -> Numbers:
        """Return a column of a table, for all rows."""
        found = np.empty(self.count(section), np.int64)
        for begin in range(0, len(found), 2**14):
            end = min(begin + 2**14, len(found))
            found[begin:end] = self.rows(section, begin, end)[column]
        return found

    @property
    def has_arrays(self) -> bool:
        """True if boxes are parts of arrays in the files, and may be in several files: see `SlotTable`."""
        return WRITTEN[self.form].has_arrays

    def boxes_at(self, places: Numbers, rank: int) -> Numbers:
        """Return boxes by their places, with their arrays if they have any: int64 of shape (boxes, 2 or 4, dims)."""
        width = 4 if self.has_arrays else 2
        if not len(places) or not rank:
            return np.zeros((len(places), width, rank), np.int64)
        first = int(places.min())
        pool = self.numbers("boxes", first, int(places.max()) + width * rank)
        found: Numbers = pool[(places - first)[:, None] + np.arange(width * rank)].reshape(len(places), width, rank)
        return found

    @property
    def slot_table(self) -> SlotTable:
        """The table that the slots of all files share."""
        if self._slot_table is None:
            pool = self.numbers("boxes", 0, self.sections["boxes"].nbytes // 8)
            itemsizes = np.array([dtype.bits // 8 for dtype in self.dtypes], np.int64)[self.column("tensors", "dtype")]
            ranks = np.diff(self.column("tensors", "shape"), prepend=0)
            self._slot_table = SlotTable(pool, ranks, itemsizes, self.has_arrays)
        return self._slot_table

    @property
    def files(self) -> Sequence[TargetFile]:
        """The files of the new checkpoint that have tensors."""
        if self._files is None:
            with said_by(self._file):
                files = list(map(self._target, range(self.count("files"))))
                check_names(self.form, str(self.path), [file.name for file in files])
            self._files = files
        return self._files

    def _target(self, number: int) -> TargetFile:
        before, row = self._file_rows(number)
        name = self.sections["file_names"].read(before.name, row.name).decode()

        def load() -> Slots:
            rows = self.rows("slots", before.slots, row.slots)
            tensors, places = (np.ascontiguousarray(rows[column]) for column in SlotRow._fields)
            return Slots(self.slot_table, tensors, places, np.zeros(len(rows), np.int64))

        text = header_text(self.form, self.head["metadata"], self.count("files"))
        known = Extent(row.start, row.size)
        return target_file(self.form, name, _LoadedSlots(load), self.tensors, text, known)

    def _file_rows(self, number: int) -> tuple[FileRow, FileRow]:
        rows = list(map(FileRow._make, self.rows("files", max(number - 1, 0), number + 1).tolist()))
        return rows[0] if number else _NO_FILE, rows[-1]

    @property
    def sizes(self) -> Sequence[int]:
        """The bytes of each file."""
        found: list[int] = self.column("files", "size").tolist()
        return found

    @property
    def texts(self) -> Mapping[str, bytes]:
        """The folder's files without tensors, by name, except the manifest."""
        paths = {name: tuple(path) for name, path in self.json("paths").items()}
        beside, end = {}, 0
        for name, length in self.head["beside"].items():
            beside[name] = self.sections["beside"].read(end, end + length)
            end += length
        return Texts(self.form, self.files, self.tensors, self.json("aliases"), paths, beside)

    def texts_of(self, digests: list[int], files: Iterable[WrittenFile]) -> dict[str, bytes]:
        """Return the folder's files without tensors, with the manifest, whose length does not depend on the digests."""
        cuts, texts = self.head["cuts"], dict(self.texts)  # An index takes a while to make.
        found = [cuts[cut] if cut >= 0 else {} for cut in self.column("tensors", "cut").tolist()]
        said = {"form": self.form, "aliases": self.json("aliases"), "tensors": found}
        return {MANIFEST: manifest_text(said, list(self.tensors), digests, files, texts), **texts}

    def json(self, section: str) -> Any:
        """Return the value that a section holds as JSON."""
        held = self.sections[section]
        return json.loads(held.read(0, held.nbytes))

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes)

    @property
    def is_saved(self) -> bool:
        """True if the plan was read from a file."""
        return self._file is not None

    @property
    def is_of_files(self) -> bool:
        """True if all sources are files and objects, so that any process can run a part of the plan."""
        return all(source.is_visible for source in self.sources)

    @property
    def is_kept(self) -> bool:
        """True if every run finds the same sources: neither arrays nor files that each run makes anew."""
        return all(source.is_kept for source in self.sources)

    @property
    def is_shared(self) -> bool:
        """True if tasks make parts of objects, which are joined at the end."""
        return self.sections["order"].nbytes > 0

    @property
    def last(self) -> str:
        """Name of the file that makes a folder a checkpoint (manifest or index); it is written last."""
        return WRITTEN[self.form].last

    @property
    def digest(self) -> str:
        """The SHA-256 of all contents of the plan, in hexadecimal; for a plan of arrays in memory a random number."""
        if self._digest is None:
            self._digest = hashlib.sha256(self.body()).hexdigest() if self.is_of_files else secrets.token_hex(32)
        return self._digest

    def body(self) -> bytes:
        """Return the bytes that are digested: the head as JSON, with each section's length and block digests."""
        sections = {name: [held.nbytes, block_digests(held)] for name, held in self.sections.items()}
        return json.dumps({**self.head, "sections": sections}, separators=(",", ":")).encode()
