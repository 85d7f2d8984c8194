"""The contents of a plan as sections of numbers and bytes (rule 2.12 b); each is read when it is asked for (2.12 i)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ...._dtypes import Dtype, dtype_named
from ....errors import LayoutError, ParseError
from ....pieces import Pieces
from ...data.block_lists import Listed, Made, Section, block_digests, numbers
from ...data.location import Location
from ...data.sources import Places, Source, source_of
from ...formats.sharded import MANIFEST
from ..forms.files import Extent, TargetFile, WrittenFile
from ..forms.forms import WRITTEN, Texts, check_names, header_text, manifest_text, target_file
from ..forms.slots import Slots, SlotTable

__all__ = [
    "LEAST_ASKED",
    "PlanData",
    "PlannedTensor",
    "file_rows",
    "repeated_slots",
    "said_by",
    "slot_rows",
    "target_rows",
]

Numbers = npt.NDArray[np.int64]

#: The columns of a tensor in a plan: where its name, shape, sources, replicas and targets end, each in its section, its
#: dtype and its cut among those of the plan, and whether it is an object.
NAME, SHAPE, SOURCES, REPLICAS, TARGETS, DTYPE, CUT, OBJECT = range(8)
#: Those of a file: where its name and its slots end, the first byte of its data, its bytes, and those of tensors.
FILE_NAME, SLOTS, START, SIZE, DATA = range(5)
#: Those of a target, and of a slot.
_FILE, _OFFSET, _PLACE = range(3)
_TENSOR, _BOX = range(2)

#: The number of tensors that are made at a time where one is asked for: the next one asked for is mostly near.
_NEAR = 32
#: Below this a task is nothing but overhead.
LEAST_ASKED = 64 * 2**10


@contextlib.contextmanager
def said_by(path: Location | None) -> Iterator[None]:
    """Refuse, with ParseError, what cannot be what the plan in a file says."""
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


class PlannedTensor:
    """A tensor to write: its dtype and shape, and rows `[holder, offset, start…, stop…, strides…]` of its pieces.

    Attributes:
        name: Its name.
        dtype: Its dtype.
        shape: Its shape.
        is_object: Whether it is not a tensor, but a value that is copied as it is.
    """

    def __init__(
        self, plan: PlanData, name: str, dtype: Dtype, shape: tuple[int, ...], row: list[int], before: list[int]
    ):
        self._plan, self._row, self._before = plan, row, before
        self.name, self.dtype, self.shape, self.is_object = name, dtype, shape, bool(row[OBJECT])

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
        return self._rows("pieces", SOURCES)

    @property
    def replicas(self) -> Pieces:
        """The pieces that store elements again, to be compared."""
        return self._rows("replicas", REPLICAS)

    @property
    def has_replicas(self) -> bool:
        """True if some elements are stored again."""
        return self._row[REPLICAS] > self._before[REPLICAS]

    @property
    def targets(self) -> Pieces:
        """The pieces to which elements go, in C order; holders are the files."""
        begin, end = self._before[TARGETS], self._row[TARGETS]
        held = self._plan.numbers("targets", 3 * begin, 3 * end).reshape(-1, 3)
        boxes = self._plan.boxes_at(held[:, _PLACE], len(self.shape))
        arrays = boxes[:, 3] if self._plan.has_arrays else None
        return Pieces.dense(held[:, :_PLACE], boxes[:, :2], self.itemsize, arrays=arrays)

    def _rows(self, section: str, column: int) -> Pieces:
        rows = self._plan.numbers(section, self._before[column], self._row[column])
        return Pieces(rows.reshape(-1, 2 + 3 * len(self.shape)), self._plan.sources)


class _LoadedSlots(Slots):
    """The slots of a file of a plan, read when one is asked for."""

    def __init__(self, load: Callable[[], Slots]) -> None:
        self._load = load

    def __getattr__(self, name: str) -> Any:
        if name not in ("table", "tensors", "places", "begins"):
            raise AttributeError(name)
        found = self._load()
        self.table, self.tensors, self.places, self.begins = found.table, found.tensors, found.places, found.begins
        return getattr(self, name)


_Plan = TypeVar("_Plan", bound="PlanData")


class PlanData:
    """A new checkpoint as data.

    Its lists are sections of numbers and bytes, in memory or in a file, of which only what is asked for is read:
    `names`, `shapes`, `tensors`, `pieces`, `replicas`, `targets` and `boxes` of tensors; `file_names`, `files` and
    `slots` of files, and of files for ranks `again`, a byte for each slot that says whether an earlier one has its box;
    `sources` and `source_ends`; `runs` of tasks, and if these make parts of objects `order`, that of the tensors,
    `shares` and `share_ends`; `aliases` and `paths`, which are JSON; and `beside`, the contents of what goes along.

    Attributes:
        path: The place of the new checkpoint.
        is_folder: Whether that is a folder; else it is the only file.
        task_bytes: The most bytes of tensors that a task writes.
        form: Its format.
        dtypes: The dtypes of its tensors.
        tensors: The tensors that are written, each made when it is asked for.
        sources: The files, objects and arrays that it is read from.
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
    tensors: Sequence[PlannedTensor]
    sources: Sequence[Source]
    _file: Location | None
    _digest: str | None
    _files: list[TargetFile] | None
    _slot_table: SlotTable | None

    def __init__(self) -> None:
        raise TypeError(f"a {type(self).__name__} is made by plan_checkpoint, or read from a file by its load")

    @classmethod
    def _made(
        cls: type[_Plan],
        head: Mapping[str, Any],
        sections: Mapping[str, Section],
        *,
        path: Location | None = None,
        sources: Sequence[Any] | None = None,
        file: Location | None = None,
        digest: str | None = None,
    ) -> _Plan:
        """Make a plan.

        Args:
            head: The entries of the plan besides its sections.
            sections: The tables of the plan, by name.
            path: The place of the checkpoint, if it need not be made from the head.
            sources: The sources, if some of them are not in the sections.
            file: The file that it is read from.
            digest: Its digest, if it is known.
        """
        self = cls.__new__(cls)
        self.head, self.sections = head, sections
        self.path = Places().of(head["path"]) if path is None else path
        self.form, self.task_bytes = head["form"], head["task_bytes"]
        self.is_folder = WRITTEN[self.form].names is not None
        self.dtypes = [known for name in head["dtypes"] if (known := dtype_named(name)) is not None]
        self.tensors = Listed("tensor", self.sections["tensors"].nbytes // 64, self._tensors_made, near=_NEAR)
        if sources is None:
            places, count = Places(), self.sections["source_ends"].nbytes // 8
            sources = Listed("source", count, lambda begin, end: (self._source(n, places) for n in range(begin, end)))
        self.sources = sources
        self._file, self._digest = file, digest
        self._files = None
        self._slot_table = None
        return self

    def _tensors_made(self, begin: int, end: int) -> list[PlannedTensor]:
        """The tensors from one to another."""
        with said_by(self._file):
            first = max(begin - 1, 0)
            rows = self.numbers("tensors", 8 * first, 8 * end).reshape(-1, 8).tolist()
            befores, rows = ([[0] * 8, *rows[:-1]], rows) if not begin else (rows[:-1], rows[1:])
            start = befores[0]
            names = self.sections["names"].read(start[NAME], rows[-1][NAME])
            shapes = self.numbers("shapes", start[SHAPE], rows[-1][SHAPE]).tolist()
            made = []
            for before, row in zip(befores, rows, strict=True):
                name = names[before[NAME] - start[NAME] : row[NAME] - start[NAME]].decode()
                shape = tuple(shapes[before[SHAPE] - start[SHAPE] : row[SHAPE] - start[SHAPE]])
                made.append(PlannedTensor(self, name, self.dtypes[row[DTYPE]], shape, row, before))
            return made

    def _source(self, number: int, places: Places) -> Source:
        with said_by(self._file):
            ends = self.numbers("source_ends", max(number - 1, 0), number + 1).tolist()
            text = self.sections["sources"].read(ends[0] if number else 0, ends[-1])
            return source_of(json.loads(text), places)

    def numbers(self, section: str, begin: int, end: int) -> Numbers:
        """Give numbers of a section from one place to another."""
        return numbers(self.sections[section], begin, end)

    def column(self, section: str, width: int, column: int) -> Numbers:
        """Give a column of all rows of a section."""
        held = self.sections[section]
        found = np.empty(held.nbytes // (8 * width), np.int64)
        for begin in range(0, len(found), 2**14):
            end = min(begin + 2**14, len(found))
            found[begin:end] = numbers(held, begin * width, end * width).reshape(-1, width)[:, column]
        return found

    @property
    def has_arrays(self) -> bool:
        """True if the boxes in its files are parts of arrays, and may be in several files: see `SlotTable`."""
        return WRITTEN[self.form].has_arrays

    def boxes_at(self, places: Numbers, rank: int) -> Numbers:
        """Give boxes by their places, with their arrays if they have some: int64 of shape (boxes, 2 or 4, dims)."""
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
            itemsizes = np.array([dtype.bits // 8 for dtype in self.dtypes], np.int64)[self.column("tensors", 8, DTYPE)]
            ranks = np.diff(self.column("tensors", 8, SHAPE), prepend=0)
            self._slot_table = SlotTable(pool, ranks, itemsizes, self.has_arrays)
        return self._slot_table

    @property
    def files(self) -> Sequence[TargetFile]:
        """The files that it is written to."""
        if self._files is None:
            with said_by(self._file):
                files = list(map(self._target, range(self.sections["files"].nbytes // 40)))
                check_names(self.form, str(self.path), [file.name for file in files])
            self._files = files
        return self._files

    def _target(self, number: int) -> TargetFile:
        before, row = self._file_rows(number)
        name = self.sections["file_names"].read(before[FILE_NAME], row[FILE_NAME]).decode()

        def load() -> Slots:
            rows = self.numbers("slots", 2 * before[SLOTS], 2 * row[SLOTS]).reshape(-1, 2)
            return Slots(self.slot_table, rows[:, _TENSOR], rows[:, _BOX], np.zeros(len(rows), np.int64))

        text = header_text(self.form, self.head["metadata"], self.sections["files"].nbytes // 40)
        known = Extent(row[START], row[SIZE])
        return target_file(self.form, name, _LoadedSlots(load), self.tensors, text, known)

    def _file_rows(self, number: int) -> tuple[list[int], list[int]]:
        rows = self.numbers("files", 5 * max(number - 1, 0), 5 * number + 5).reshape(-1, 5).tolist()
        return rows[0] if number else [0] * 5, rows[-1]

    @property
    def sizes(self) -> Sequence[int]:
        """The bytes of each file."""
        found: list[int] = self.column("files", 5, SIZE).tolist()
        return found

    @property
    def texts(self) -> Mapping[str, bytes]:
        """Further files of the folder, by name: what they hold follows from the plan."""
        paths = {name: tuple(path) for name, path in self.json("paths").items()}
        beside, end = {}, 0
        for name, length in self.head["beside"].items():
            beside[name] = self.sections["beside"].read(end, end + length)
            end += length
        return Texts(self.form, self.files, self.tensors, self.json("aliases"), paths, beside)

    def texts_of(self, digests: list[int], files: Iterable[WrittenFile]) -> dict[str, bytes]:
        """All further files of the folder, with the manifest, which is as long whatever the digests are."""
        cuts, texts = self.head["cuts"], dict(self.texts)  # An index takes a while to make.
        found = [cuts[cut] if cut >= 0 else {} for cut in self.column("tensors", 8, CUT).tolist()]
        said = {"form": self.form, "aliases": self.json("aliases"), "tensors": found}
        return {MANIFEST: manifest_text(said, list(self.tensors), digests, files, texts), **texts}

    def json(self, section: str) -> Any:
        """Give what a section says in JSON."""
        held = self.sections[section]
        return json.loads(held.read(0, held.nbytes))

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes)

    @property
    def is_saved(self) -> bool:
        """True if it is from a file."""
        return self._file is not None

    @property
    def is_of_files(self) -> bool:
        """True if everything comes from files and objects, so that any process can do a part of it."""
        return all(source.is_visible for source in self.sources)

    @property
    def is_kept(self) -> bool:
        """True if every run finds the same sources: no arrays, nor files that each run makes anew."""
        return all(source.is_kept for source in self.sources)

    @property
    def is_shared(self) -> bool:
        """True if tasks make parts of objects, which are put together at the end."""
        return self.sections["order"].nbytes > 0

    @property
    def last(self) -> str:
        """Name of the file that makes a folder a checkpoint (manifest or index); it is written last."""
        return WRITTEN[self.form].last

    @property
    def digest(self) -> str:
        """The SHA-256 of everything in the plan, in hexadecimal; for a plan of arrays in memory a random number."""
        if self._digest is None:
            self._digest = hashlib.sha256(self.body()).hexdigest() if self.is_of_files else secrets.token_hex(32)
        return self._digest

    def body(self) -> bytes:
        """The head as JSON, with the length of each section and the digests of its blocks: what is digested."""
        sections = {name: [held.nbytes, block_digests(held)] for name, held in self.sections.items()}
        return json.dumps({**self.head, "sections": sections}, separators=(",", ":")).encode()


def target_rows(files: Sequence[TargetFile], tensors: int) -> tuple[Section, Numbers]:
    """The slots that have bytes, by tensor, as file, offset and box; and how many each tensor has."""
    kept = [np.flatnonzero(file.slots.nbytes) for file in files]
    ends = np.cumsum([len(chosen) for chosen in kept], dtype=np.int64)
    count = int(ends[-1]) if len(ends) else 0
    held = np.zeros(count, np.int32)
    for file, chosen, end in zip(files, kept, ends.tolist(), strict=True):
        held[end - len(chosen) : end] = file.slots.tensors[chosen]
    whole = [len(chosen) == len(file.slots) for file, chosen in zip(files, kept, strict=True)]
    chosen_of = [None if is_whole else chosen for chosen, is_whole in zip(kept, whole, strict=True)]
    kept.clear()
    counts = np.bincount(held, minlength=tensors)
    order = np.argsort(held, kind="stable").astype(np.int32 if count < 1 << 31 else np.int64)

    def make(begin: int, end: int) -> Numbers:
        at = order[begin:end]
        rows = np.empty((len(at), 3), np.int64)
        rows[:, 0] = np.searchsorted(ends, at, side="right")
        by_file = np.argsort(rows[:, 0], kind="stable")
        for here in np.split(by_file, np.flatnonzero(np.diff(rows[by_file, 0])) + 1) if len(at) else ():
            number = int(rows[here[0], 0])
            file, chosen = files[number], chosen_of[number]
            inner = at[here] - (ends[number - 1] if number else 0)
            inner = inner if chosen is None else chosen[inner]
            rows[here, 1] = file.start + file.slots.begins[inner]
            rows[here, 2] = file.slots.places[inner]
        return rows

    return Made(count, 3, make), counts


def slot_rows(files: Sequence[TargetFile]) -> Section:
    """All slots, those of each file in their order, as tensor and box."""
    ends = np.cumsum([0, *(len(file.slots) for file in files)]).tolist()

    def make(begin: int, end: int) -> Numbers:
        parts = [np.zeros((0, 2), np.int64)]
        for number in range(bisect_right(ends, begin) - 1, bisect_left(ends, end)):
            slots, first = files[number].slots, ends[number]
            span = slice(max(begin - first, 0), end - first)
            parts.append(np.column_stack([slots.tensors[span], slots.places[span]]))
        return np.concatenate(parts)

    return Made(ends[-1], 2, make)


def repeated_slots(files: Sequence[TargetFile]) -> bytes:
    """Return a byte per slot: 1 if an earlier slot of any file holds the same non-empty box of the same tensor, else 0.

    Files for ranks have arrays: the same box may be in two of them at two places, with another array around it.
    """
    table = files[0].slots.table
    tensors = np.concatenate([file.slots.tensors for file in files])
    places = np.concatenate([file.slots.places for file in files])
    kept = np.flatnonzero(np.concatenate([file.slots.nbytes for file in files]))
    again = np.zeros(len(tensors), np.bool_)
    for rank, chosen in table.by_rank(tensors[kept]):
        # There are fewer places than slots, and as many boxes as places or fewer.
        known, place = np.unique(places[kept[chosen]], return_inverse=True)
        sides = table.sides(known, rank).reshape(len(known), 2 * rank)
        box = np.unique(sides, axis=0, return_inverse=True)[1].reshape(-1) if rank else np.zeros(len(known), np.int64)
        key = tensors[kept[chosen]].astype(np.int64) * len(known) + box[place.reshape(-1)]
        is_first = np.zeros(len(key), np.bool_)
        is_first[np.unique(key, return_index=True)[1]] = True
        again[kept[chosen[~is_first]]] = True
    return again.tobytes()


def file_rows(names: Sequence[bytes], files: Sequence[TargetFile]) -> Numbers:
    """The files, those with these names."""
    rows = [
        [len(name), len(f.slots), f.start, f.size, int(f.slots.nbytes.sum())]
        for name, f in zip(names, files, strict=True)
    ]
    found = np.array(rows, np.int64).reshape(-1, 5)
    found[:, :2] = np.cumsum(found[:, :2], axis=0)
    return found
