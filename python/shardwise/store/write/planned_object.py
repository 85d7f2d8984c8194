"""Tasks of a saved plan whose checkpoint goes to an object store: each makes an object, whatever was made before."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from ..._text import bytes_text
from ..boxes import Bounds
from ..files import DataFile, opened_again
from ..object_files import ObjectFile
from ..objects import ObjectPath, ObjectStatus
from .gather import check_replicas
from .object_parts import parts_for
from .object_task import ObjectReceipt, ObjectTask
from .plan import PlannedTensor, WritePlan, split_rows
from .task import SourceFile, SourceObject, check_head, worker_name
from .wanted import SourcePiece, Wanted

__all__ = ["PlannedObject", "PlannedReceipt", "planned_object"]


class PlannedReceipt(NamedTuple):
    """What a task has made.

    Attributes:
        plan: The digest of the plan.
        made: The object.
        seconds: How long it took.
        worker: Who made it: host and process.
    """

    plan: str
    made: ObjectReceipt
    seconds: float
    worker: str


@dataclass(frozen=True, repr=False)
class PlannedObject:
    """An object of a new checkpoint, to be made by any process that can reach its sources, any number of times.

    Attributes:
        plan: The digest of the plan that it is of.
        number: Its number in the plan.
        place: Its name.
    """

    plan: str
    number: int
    place: ObjectPath
    #: Which file of the plan it is; and by their positions, the tensors that it has something of.
    _file: Any
    _wanted: dict[int, Wanted]
    #: Tensors with pieces that are stored more than once, and what these are compared with.
    _compared: tuple[Wanted, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of the object."""
        size: int = self._file.size
        return size

    def __repr__(self) -> str:
        return f"<PlannedObject {self.number}: {bytes_text(self.nbytes)}>"

    def run(
        self,
        *,
        memory: int = 256 * 2**20,
        threads: int | None = 1,
        check: bool = False,
        progress: Callable[[int], object] | None = None,
    ) -> PlannedReceipt:
        """Make it; where it was made already, see that it is what it should be.

        Args:
            memory: Bytes for buffers.
            threads: How many read; one per core if `None`.
            check: Whether only to see that what is there is right.
            progress: Called with the bytes of each part.

        Raises:
            FileExistsError: if another object is there.
            FileNotFoundError: if none is, and it is only checked.
            ParseError: if a source is not what it was when the plan was made, or replicas disagree.
            OSError: if a source cannot be read, or the store fails.
        """
        began = time.perf_counter()
        check_replicas(self._compared, memory)
        parts = parts_for([self._file], memory)
        task = ObjectTask(
            self.number, self.place, self._file, self._wanted, *parts, is_new=True, run=self.plan[:32]
        )  # fmt: skip
        made = None
        if not (check or self.place.is_file()):
            with suppress(FileExistsError):  # Another was faster: made by the same task, or not.
                made = task.make(threads=threads, progress=progress)
            progress = None  # All bytes were counted.
        if made is None:
            made = task.confirm(threads=threads, progress=progress)
        return PlannedReceipt(self.plan, made, round(time.perf_counter() - began, 6), worker_name())


def planned_object(plan: WritePlan, number: int) -> PlannedObject:
    """Make the task of a plan that makes this object.

    Raises:
        ParseError: if a source is not what it was when the plan was made.
        OSError: if a source cannot be looked at.
    """
    file, path = plan.files[number], cast(Any, plan.path)
    boxes = file.boxes()
    wanted = {
        position: _wanted(plan, plan.tensors[position], _meeting(plan.tensors[position], held))
        for position, held in boxes.items()
    }
    compared = [
        _compared(plan, plan.tensors[position], row)
        for position, held in boxes.items()
        for row in _beginning(plan.tensors[position], held)
    ]
    return PlannedObject(plan.digest, number, path / file.name, file.of(wanted), wanted, tuple(compared))


def _wanted(
    plan: WritePlan,
    tensor: PlannedTensor,
    rows: npt.NDArray[np.int64],
    replicas: Sequence[npt.NDArray[np.int64]] = (),
) -> Wanted:
    pieces, others = ([_piece(plan, row, len(tensor.shape)) for row in part] for part in (rows, replicas))
    return Wanted(tensor.name, tensor.dtype, tensor.shape, pieces, others, is_object=tensor.is_object)


def _meeting(tensor: PlannedTensor, boxes: Sequence[Bounds]) -> npt.NDArray[np.int64]:
    """The rows of the pieces that share elements with one of these boxes."""
    _, starts, stops, _ = split_rows(tensor.sources, len(tensor.shape))
    return tensor.sources[_meet(starts, stops, boxes)]


def _beginning(tensor: PlannedTensor, boxes: Sequence[Bounds]) -> npt.NDArray[np.int64]:
    """The rows of the replicas whose first element is in an object's boxes: its task compares all of them."""
    _, starts, _, _ = split_rows(tensor.replicas, len(tensor.shape))
    return tensor.replicas[_meet(starts, starts + 1, boxes)]


def _meet(
    starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64], boxes: Sequence[Bounds]
) -> npt.NDArray[np.bool_]:
    meets = np.zeros(len(starts), np.bool_)
    for box in boxes:
        sides = np.array(box, np.int64).reshape(-1, 2)
        meets |= (np.maximum(starts, sides[:, 0]) < np.minimum(stops, sides[:, 1])).all(axis=1)
    return meets


def _compared(plan: WritePlan, tensor: PlannedTensor, row: npt.NDArray[np.int64]) -> Wanted:
    _, start, stop, _ = split_rows(row[None], len(tensor.shape))
    box = tuple(zip(start[0].tolist(), stop[0].tolist(), strict=True))
    return _wanted(plan, tensor, _meeting(tensor, [box]), [row])


def _piece(plan: WritePlan, row: npt.NDArray[np.int64], rank: int) -> SourcePiece:
    holder, offset, *rest = row.tolist()
    starts, stops, strides = rest[:rank], rest[rank : 2 * rank], rest[2 * rank :]
    source = plan.sources[holder]
    held = _opened(source) if isinstance(source, (SourceFile, SourceObject)) else source
    return SourcePiece(tuple(zip(starts, stops, strict=True)), held, offset, tuple(strides))


def _opened(source: SourceFile | SourceObject) -> DataFile:
    """The same file for the same source, so that a task sends it once; which must be what it was."""
    if isinstance(source, SourceFile):
        check_head(source)
    return _file(source)


@functools.lru_cache(maxsize=4096)
def _file(source: SourceFile | SourceObject) -> DataFile:
    if isinstance(source, SourceObject):
        return ObjectFile(source.path, ObjectStatus(source.size, source.mark))
    return opened_again(source.path, source.size, source.times)
