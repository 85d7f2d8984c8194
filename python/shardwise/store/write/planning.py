"""The plan of the tensors that are wanted: their pieces as numbers, and the files that they lie in."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._arguments import integer
from ..._text import shown
from ...errors import LayoutError, SizeOverflowError
from ..files import DataFile
from ..object_files import ObjectFile
from ..objects import ObjectPath
from .checkpoint_plan import CheckpointPlan
from .files import TargetFile
from .plan import PlannedTensor, target_rows
from .task import SourceFile, SourceObject, head_digest
from .wanted import SourcePiece, Wanted

__all__ = ["make_plan"]

#: The most bytes of a task and, for small checkpoints, the least.
_TASK, _LEAST_TASK = 64 * 2**20, 16 * 2**20
#: A checkpoint has at least about this many tasks, unless they would be smaller than `_LEAST_TASK`.
_TASKS = 128
#: Below this a task is nothing but overhead.
_LEAST_ASKED = 64 * 2**10


def make_plan(
    path: Path,
    wanted: Sequence[Wanted],
    files: Sequence[TargetFile],
    *,
    is_folder: bool,
    texts: dict[str, bytes],
    manifest: dict[str, Any],
    compare_replicas: bool,
    task_bytes: int | None,
) -> CheckpointPlan:
    """Put together the plan of these tensors and files.

    Raises:
        LayoutError: if `task_bytes` is too small.
    """
    total = sum(tensor.nbytes for tensor in wanted)
    if task_bytes is None:
        task_bytes = min(max(total // _TASKS, _LEAST_TASK), _TASK)
    elif integer("task_bytes", task_bytes) < _LEAST_ASKED:
        raise LayoutError(f"task_bytes is {task_bytes}; it must be at least {_LEAST_ASKED}")
    holders: dict[int, int] = {}
    held: list[DataFile | npt.NDArray[Any]] = []
    spans: list[tuple[int, int]] = []

    def rows(pieces: Sequence[SourcePiece], tensor: Wanted) -> npt.NDArray[np.int64]:
        numbers = []
        for piece in pieces:
            at = holders.setdefault(id(piece.holder), len(held))
            if at == len(held):
                held.append(piece.holder)
                spans.append((2**63 - 1, 0))
            start, stop = ([side[i] for side in piece.box] for i in (0, 1))
            reach = sum((b - a - 1) * stride for a, b, stride in zip(start, stop, piece.strides, strict=True))
            begin, end = spans[at]
            spans[at] = (min(begin, piece.offset), max(end, piece.offset + reach + tensor.itemsize))
            numbers.append([at, piece.offset, *start, *stop, *piece.strides])
        return _rows(numbers, tensor)

    targets = target_rows(files, [tensor.shape for tensor in wanted], [tensor.itemsize for tensor in wanted])
    tensors = []
    for tensor, target in zip(wanted, targets, strict=True):
        others = [piece for piece in tensor.replicas if compare_replicas and isinstance(piece.holder, DataFile)]
        pieces, replicas = rows(tensor.pieces, tensor), rows(others, tensor)
        tensors.append(
            PlannedTensor(tensor.name, tensor.dtype, tensor.shape, pieces, replicas, target, tensor.is_object)
        )
    sources = [_source(holder, *span) for holder, span in zip(held, spans, strict=True)]
    return CheckpointPlan._made(
        path if isinstance(path, ObjectPath) else path.absolute(),
        is_folder=is_folder,
        task_bytes=task_bytes,
        tensors=tensors,
        files=files,
        sizes=[file.size for file in files],
        sources=sources,
        texts=texts,
        manifest=manifest,
    )


def _rows(numbers: list[list[int]], tensor: Wanted) -> npt.NDArray[np.int64]:
    try:
        return np.array(numbers, np.int64).reshape(len(numbers), 2 + 3 * len(tensor.shape))
    except OverflowError:
        raise SizeOverflowError(f"tensor {shown(tensor.name)}: an offset is over 2**63 - 1") from None


def _source(holder: DataFile | npt.NDArray[Any], begin: int, end: int) -> SourceFile | SourceObject | npt.NDArray[Any]:
    if not isinstance(holder, DataFile):
        return holder
    if isinstance(holder, ObjectFile):
        return SourceObject(*holder.noted)
    path = os.path.abspath(holder.path)  # noqa: PTH100 (a Path would follow `..` through links another way)
    begin, end = min(begin, holder.size), min(end, holder.size)
    return SourceFile(path, holder.size, *holder.times, begin, end, head_digest(path, holder.size, begin, end))
