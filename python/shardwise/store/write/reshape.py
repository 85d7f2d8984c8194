"""`save_checkpoint` and `reshard_checkpoint`: a checkpoint from tensors in memory, or from another checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from ..._arguments import path_of
from ..._dtypes import Dtype, find_dtype
from ..._text import shown
from ...array.replicas import check_replicas
from ...array.sharded import ShardedArray
from ...errors import LayoutError
from ...layout import UnevenRule
from ...partition import Partition
from ..open import open_checkpoint
from ..protocol import StoredTensor
from .checkpoint_plan import CheckpointPlan
from .drive import run_whole
from .files import TargetFile, hugging_face_files, index_of, sharded_files, single_file
from .names import check_name, new_names, without_ties
from .planning import make_plan
from .reports import WriteOutline, WriteReport
from .spool import Spool, spooling
from .wanted import Layouts, SourcePiece, Wanted, partition_for, wanted_array, wanted_stored

__all__ = ["Target", "plan_checkpoint", "reshard_checkpoint", "save_checkpoint"]

#: What a new checkpoint may be: a safetensors file; a folder in Hugging Face's form; a folder with a file per device.
Target = Literal["safetensors", "hf", "sharded"]

_MEMORY = 256 * 2**20
#: Up to how many bytes Hugging Face's own `save_pretrained` lets a file have.
_FILE_BYTES = 5 * 10**9
#: How often a task is tried again, unless the caller says otherwise.
_RETRIES = 2


def save_checkpoint(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    layouts: Layouts | None = None,
    *,
    to: Target | None = None,
    uneven: UnevenRule = "even",
    metadata: Mapping[str, str] | None = None,
    max_file_bytes: int = _FILE_BYTES,
    memory: int = _MEMORY,
    threads: int | None = None,
    sync: bool = True,
    check: bool = True,
    progress: Callable[[int, int], object] | None = None,
) -> WriteReport:
    """Write tensors in memory as a checkpoint.

    Args:
        path: The new file or folder; nothing may be there.
        tensors: Arrays by name, with any strides, and `ShardedArray`s. Names that share one array, with the same shape
            and strides, are tied: the elements are written once.
        layouts: How the tensors are cut, for `to="sharded"`: a `LayoutMap` or a mapping by name. A `ShardedArray` that
            it does not name keeps its own partition; any other tensor is written whole.
        to: `"safetensors"`, a file; `"hf"`, a folder in Hugging Face's form; `"sharded"`, a folder with a file for each
            device that owns shards, which PyTorch's `HuggingFaceStorageReader` loads as well. By default a file if the
            path ends in `.safetensors`, else sharded if anything is cut, else `"hf"`.
        uneven: How a dim that does not divide is cut.
        metadata: Texts for the headers' `__metadata__`.
        max_file_bytes: Of `"hf"`, how many bytes of tensors a file may have.
        memory: Bytes for the buffers of all threads.
        threads: How many; one per core if left out.
        sync: Whether the data is on the disk before the checkpoint has its name.
        check: Whether replicas of sharded arrays are compared; `False` takes the first.
        progress: Called now and then with the bytes that are done and the bytes in all.

    Raises:
        FileExistsError: something is there under the new name.
        LayoutError: a layout does not fit, replicas differ, or the memory is too little.
        TypeError: a value is not an array, or of a dtype that a safetensors file cannot hold.
        OSError: a file cannot be written, or the disk has no room.

    The checkpoint has its name when all of it is there and on the disk; whatever happens before, nothing is.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = save_checkpoint(Path(folder, "model.safetensors"), {"w": np.arange(6).reshape(2, 3)[:, 1:]})
    ...     with open_checkpoint(report.path) as checkpoint:
    ...         print(checkpoint.read("w").tolist())
    [[1, 2], [4, 5]]
    """
    if not isinstance(tensors, Mapping):
        raise TypeError(f"tensors must be a mapping from names to arrays, got {type(tensors).__name__}")
    wanted = []
    for name, value in tensors.items():
        check_name(name)
        if isinstance(value, ShardedArray) and check and isinstance(value.tiling, Partition):
            check_replicas(value.tiling, value._data())
        shape = tuple(np.shape(value)) if not isinstance(value, ShardedArray) else value.shape
        wanted.append(wanted_array(name, value, partition_for(name, shape, layouts, uneven)))
    plan = _plan(path_of(path), wanted, to, metadata or {}, max_file_bytes, {}, compare=False)
    return run_whole(
        plan,
        executor=None,
        memory=memory,
        threads=threads,
        sync=sync,
        resume=False,
        retries=_RETRIES,
        progress=progress,
    )


def reshard_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    layouts: Layouts | None = None,
    *,
    to: Target | None = None,
    uneven: UnevenRule = "even",
    dtype: Any = None,
    rename: Mapping[str, str] | Sequence[tuple[str, str]] = (),
    only: str | None = None,
    metadata: Mapping[str, str] | None = None,
    max_file_bytes: int = _FILE_BYTES,
    memory: int = _MEMORY,
    threads: int | None = None,
    sync: bool = True,
    replicas: Literal["check", "first"] = "check",
    resume: bool = False,
    plan: bool = False,
    executor: Executor | None = None,
    task_bytes: int | None = None,
    retries: int = _RETRIES,
    progress: Callable[[int, int], object] | None = None,
) -> WriteReport | WriteOutline:
    """Cut a checkpoint anew: merge it, split it, or go from one layout to another, in a stated memory.

    Args:
        src: A checkpoint of any form that `open_checkpoint` opens; it is only read.
        dst: The new file or folder; nothing may be there.
        layouts: How the tensors are cut: a `LayoutMap` or a mapping, by the new names. Without it they are merged.
        to: What `dst` is to be; see `save_checkpoint`.
        uneven: How a dim that does not divide is cut.
        dtype: What floating-point tensors are converted to; by default every tensor keeps its dtype. Converted tensors,
            and tensors whose pieces are compressed, are written to a file beside `dst` first.
        rename: Regular expressions and what replaces their matches in names, one after the other, as by `re.sub`.
        only: A regular expression: the tensors in whose (new) names it is found.
        metadata: Texts for the headers' `__metadata__`.
        max_file_bytes: Of `"hf"`, how many bytes of tensors a file may have.
        memory: Bytes for the buffers of all threads, or of all workers of a host.
        threads: How many; one per core if left out.
        sync: Whether the data is on the disk before the checkpoint has its name.
        progress: Called now and then with the bytes that are done and the bytes in all.
        replicas: `"check"` compares pieces that are stored more than once, `"first"` takes the first of them.
        resume: Whether a run that was interrupted goes on where it was; it must have been the same.
        plan: Whether only to say what it would take.
        executor: What runs the tasks instead of threads of this process: any `concurrent.futures.Executor`, such as a
            `ProcessPoolExecutor`, `mpi4py.futures.MPIPoolExecutor` or Dask's `client.get_executor()`, whose workers see
            the same files.
        task_bytes: How many bytes a task writes at most; by default 64 MiB, and less for small checkpoints.
        retries: How often a task is tried again that fails with an error of the system or of its worker.

    Returns:
        What was written; with `plan` what it would take.

    Raises:
        FileExistsError: something is there under the new name.
        ParseError: the source does not follow its format, changed meanwhile, or has replicas that disagree.
        LayoutError: a layout does not fit a tensor, two tensors get one name, or the memory is too little.
        TypeError: elements are packed, or of a dtype that a safetensors file cannot hold.
        OSError: a file cannot be read or written, or the disk has no room; with `resume` the next run goes on.
        BrokenExecutor: a worker died, and its executor with it; with `resume` the next run goes on.

    Every byte that is needed is read once and written once. The new checkpoint has its name when all of it is there and
    on the disk.

    >>> import tempfile
    >>> from shardwise import DeviceMesh, TensorLayout
    >>> rows = TensorLayout(("x", None), DeviceMesh((2,), ("x",)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     whole, cut = Path(folder, "whole.safetensors"), Path(folder, "cut")
    ...     _ = save_checkpoint(whole, {"w": np.arange(6).reshape(2, 3)})
    ...     _ = reshard_checkpoint(whole, cut, {"w": rows})
    ...     with open_checkpoint(cut) as checkpoint:
    ...         print(checkpoint["w"], checkpoint.read("w").tolist())
    <StoredTensor 'w': int64 (2, 3), 2 pieces> [[0, 1, 2], [3, 4, 5]]
    """
    target = path_of(dst)
    stored: _Stored = "placeholder" if plan else "spool"
    planned = _planning(
        src, target, layouts, to, uneven, dtype, rename, only, metadata, max_file_bytes, memory, replicas, task_bytes,
        stored=stored,
    )  # fmt: skip
    with planned as made:
        outline = made.outline(memory, threads)
        if plan:
            return outline
        if not resume:
            made.check_room()
        return run_whole(
            made,
            executor=executor,
            memory=memory,
            threads=threads,
            sync=sync,
            resume=resume,
            retries=retries,
            progress=progress,
        )


def plan_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    layouts: Layouts | None = None,
    *,
    to: Target | None = None,
    uneven: UnevenRule = "even",
    rename: Mapping[str, str] | Sequence[tuple[str, str]] = (),
    only: str | None = None,
    metadata: Mapping[str, str] | None = None,
    max_file_bytes: int = _FILE_BYTES,
    replicas: Literal["check", "first"] = "check",
    task_bytes: int | None = None,
) -> CheckpointPlan:
    """Plan what `reshard_checkpoint` does, as tasks that can be run anywhere, and write nothing.

    Args:
        src: As for `reshard_checkpoint`, like all that follow; a path that all machines see which run a part.
        dst: The new file or folder; a path that they see as well.
        layouts: How the tensors are cut.
        to: What `dst` is to be.
        uneven: How a dim that does not divide is cut.
        rename: Regular expressions and what replaces their matches in names.
        only: A regular expression: the tensors in whose (new) names it is found.
        metadata: Texts for the headers' `__metadata__`.
        max_file_bytes: Of `"hf"`, how many bytes of tensors a file may have.
        replicas: `"check"` compares pieces that are stored more than once, `"first"` takes the first of them.
        task_bytes: How many bytes a task writes at most; by default 64 MiB, and less for small checkpoints.

    Raises:
        TypeError: a tensor lies compressed in the source, which `reshard_checkpoint` has to decode first.
        FileExistsError, ParseError, LayoutError, OSError: as for `reshard_checkpoint`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     whole, halves = Path(folder, "whole.safetensors"), Path(folder, "halves")
    ...     _ = save_checkpoint(whole, {"w": np.arange(2**17), "b": np.ones(3)})
    ...     plan = plan_checkpoint(whole, halves, to="hf", task_bytes=2**19)
    ...     plan.save(Path(folder, "halves.swplan"))
    ...     for part in (2, 1):  # On any machine, in any order.
    ...         print(CheckpointPlan.load(Path(folder, "halves.swplan")).run((part, 2)), "tasks")
    ...     report = plan.commit()
    ...     with open_checkpoint(halves) as checkpoint:
    ...         print(int(checkpoint.read("w").sum()) == 2**16 * (2**17 - 1))
    2 tasks
    1 tasks
    True
    """
    planned = _planning(
        src, path_of(dst), layouts, to, uneven, None, rename, only, metadata, max_file_bytes, 0, replicas, task_bytes,
        stored="refuse",
    )  # fmt: skip
    with planned as made:
        return made


#: What becomes of tensors that cannot be copied as they are: written to a file first, only counted, or refused.
_Stored = Literal["spool", "placeholder", "refuse"]


@contextmanager
def _planning(
    src: str | os.PathLike[str],
    target: Path,
    layouts: Layouts | None,
    to: Target | None,
    uneven: UnevenRule,
    dtype: Any,
    rename: Mapping[str, str] | Sequence[tuple[str, str]],
    only: str | None,
    metadata: Mapping[str, str] | None,
    max_file_bytes: int,
    memory: int,
    replicas: str,
    task_bytes: int | None,
    *,
    stored: _Stored,
) -> Iterator[CheckpointPlan]:
    if replicas not in ("check", "first"):
        raise LayoutError(f"replicas is {shown(replicas)}; it must be 'check' or 'first'")
    source = path_of(src)
    if target.exists() and source.exists() and target.samefile(source):
        raise FileExistsError(17, "dst is the source", str(target))
    with open_checkpoint(source) as checkpoint, spooling(target) as spool:
        names = new_names(checkpoint, rename, only)
        converted = None if dtype is None else _float_dtype(dtype)
        wanted = []
        aliases: dict[str, str] = {}
        for old, new in names.items():
            tensor = checkpoint[old]
            partition = partition_for(new, tensor.shape, layouts, uneven)
            wanted.append(_wanted(new, tensor, converted, partition, memory, spool, stored))
        yield _plan(
            target, wanted, to, metadata or {}, max_file_bytes, aliases, task_bytes, compare=replicas == "check"
        )


def _wanted(
    name: str,
    tensor: StoredTensor,
    converted: Dtype | None,
    partition: Partition | None,
    memory: int,
    spool: Spool,
    stored: _Stored,
) -> Wanted:
    if _is_addressable(tensor) and (stored == "placeholder" or not _is_converted(tensor, converted)):
        return wanted_stored(name, tensor, partition)
    if stored == "placeholder":
        return _placeholder(name, tensor, partition)
    if stored == "refuse":
        raise TypeError(
            f"tensor {shown(tensor.name)} lies compressed in the source, so that no task can copy a part of it; "
            "reshard_checkpoint decodes it first"
        )
    kept = converted if converted is not None and _is_converted(tensor, converted) else tensor._dtype
    return spool.tensor(name, tensor, kept, partition, memory)


def _plan(
    path: Path,
    wanted: list[Wanted],
    to: Target | None,
    metadata: Mapping[str, str],
    max_file_bytes: int,
    aliases: dict[str, str],
    task_bytes: int | None = None,
    *,
    compare: bool,
) -> CheckpointPlan:
    if to is None:
        to = (
            "safetensors"
            if path.name.endswith(".safetensors")
            else "sharded"
            if any(tensor.partition is not None for tensor in wanted)
            else "hf"
        )
    if to not in get_args(Target):
        raise LayoutError(f"to is {shown(to)}; it must be one of {', '.join(map(repr, get_args(Target)))}")
    for tensor in wanted:
        if tensor.dtype.code is None:
            raise TypeError(f"tensor {shown(tensor.name)} is {tensor.dtype.name}, which a safetensors file cannot hold")
    kept = without_ties(wanted, aliases)
    said = dict(metadata)
    if aliases:
        said["shardwise.aliases"] = json.dumps(aliases)
    files: list[TargetFile]
    texts: dict[str, str] = {}
    if to == "safetensors":
        files = single_file(path.name, kept, said)
    elif to == "hf":
        if isinstance(max_file_bytes, bool) or not isinstance(max_file_bytes, int) or max_file_bytes < 1:
            raise LayoutError(f"max_file_bytes is {shown(max_file_bytes)}; it must be a positive integer")
        files = hugging_face_files(kept, max_file_bytes, said)
        if len(files) > 1:
            texts["model.safetensors.index.json"] = json.dumps(index_of(files, kept), indent=2)
    else:
        files = sharded_files(kept, said)

    manifest = {
        "form": to,
        "aliases": aliases,
        "tensors": [{} if tensor.partition is None or to != "sharded" else _cut(tensor.partition) for tensor in kept],
    }
    return make_plan(
        path,
        kept,
        files,
        is_folder=to != "safetensors",
        texts=texts,
        manifest=manifest,
        compare_replicas=compare,
        task_bytes=task_bytes,
    )


def _cut(partition: Partition) -> dict[str, Any]:
    mesh = partition.device_mesh
    return {
        "layout": [
            list(spec) if isinstance(spec, tuple) else spec if spec is None else str(spec)
            for spec in partition.layout.axes
        ],
        "uneven": partition.uneven,
        "mesh": {"shape": list(mesh.shape), "axis_names": list(mesh.axis_names)},
    }


def _is_addressable(tensor: StoredTensor) -> bool:
    return all(piece.is_addressable for piece in tensor.pieces)


def _is_converted(tensor: StoredTensor, dtype: Dtype | None) -> bool:
    return dtype is not None and _is_float(tensor._dtype) and tensor.dtype != dtype.name


def _is_float(dtype: Dtype) -> bool:
    return "float" in dtype.name


def _float_dtype(value: Any) -> Dtype:
    found = find_dtype(value)
    if found is None or found.origin is None or not _is_float(found) or found.code is None:
        raise TypeError(f"dtype must be a floating-point dtype that a safetensors file can hold, got {shown(value)}")
    return found


def _placeholder(name: str, tensor: StoredTensor, partition: Partition | None) -> Wanted:
    """For a plan: the tensor, as if its elements were in memory already, of which none is."""
    shape = tensor.shape
    whole = np.broadcast_to(np.zeros((), f"V{tensor.bits // 8}"), shape)
    piece = SourcePiece(tuple((0, size) for size in shape), whole, 0, whole.strides)
    return Wanted(name, tensor._dtype, shape, [piece] if tensor.size else [], (), partition, None)
