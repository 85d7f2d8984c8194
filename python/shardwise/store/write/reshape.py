"""`save_checkpoint` and `reshard_checkpoint`: a checkpoint from tensors in memory, or from another checkpoint."""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from ..._arguments import instance, optional, path_of
from ..._dtypes import Dtype, find_dtype
from ..._text import bytes_text, shown
from ...array.replicas import check_replicas
from ...array.sharded import ShardedArray
from ...errors import LayoutError
from ...layout import UnevenRule
from ...partition import Partition
from ..boxes import contiguous_strides
from ..files import DataFile
from ..open import open_checkpoint
from ..protocol import StoredCheckpoint, StoredTensor
from .dcp import INDEX, KeyPath, dcp_files, dcp_index, is_writable
from .files import TargetFile, hugging_face_files, index_of, sharded_files, single_file
from .job import WriteJob, WriteOutline, WriteReport, describe_room
from .wanted import Layouts, SourcePiece, Wanted, partition_for, wanted_array, wanted_object, wanted_stored

__all__ = ["Target", "reshard_checkpoint", "save_checkpoint"]

#: What a new checkpoint may be: a safetensors file; a folder in Hugging Face's form; a folder with a safetensors file
#: per device; PyTorch's distributed checkpoint.
Target = Literal["safetensors", "hf", "sharded", "dcp"]

_MEMORY = 256 * 2**20
#: Up to how many bytes Hugging Face's own `save_pretrained` lets a file have.
_FILE_BYTES = 5 * 10**9
#: What the name of a folder beside the destination ends in that holds what had to be converted.
_SPOOL = ".spool"


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
        layouts: How the tensors are cut, for `"sharded"` and `"dcp"`: a `LayoutMap` or a mapping by name. A
            `ShardedArray` that it does not name keeps its own partition; any other tensor is written whole.
        to: `"safetensors"`, a file; `"hf"`, a folder in Hugging Face's form; `"sharded"`, a folder with a file for each
            device that owns shards, which PyTorch's `HuggingFaceStorageReader` loads as well; `"dcp"`, the same as
            `torch.distributed.checkpoint` has it, which loads it onto any mesh. By default a file if the path ends in
            `.safetensors`, else sharded if anything is cut, else `"hf"`.
        uneven: How a dim that does not divide is cut.
        metadata: Texts for the headers' `__metadata__`; `"dcp"` has no place for them.
        max_file_bytes: Of `"hf"`, how many bytes of tensors a file may have.
        memory: Bytes for the buffers of all threads.
        threads: How many; one per core if left out.
        sync: Whether the data is on the disk before the checkpoint has its name.
        check: Whether replicas of sharded arrays are compared; `False` takes the first.
        progress: Called now and then with the bytes that are done and the bytes in all.

    Raises:
        FileExistsError: something is there under the new name.
        LayoutError: a layout does not fit, replicas differ, or the memory is too little.
        TypeError: a value is not an array, or of a dtype that the form cannot hold.
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
        _check_name(name)
        if isinstance(value, ShardedArray) and check and isinstance(value.tiling, Partition):
            check_replicas(value.tiling, value._data())
        shape = tuple(np.shape(value)) if not isinstance(value, ShardedArray) else value.shape
        wanted.append(wanted_array(name, value, partition_for(name, shape, layouts, uneven)))
    job = _job(path_of(path), wanted, to, metadata or {}, max_file_bytes, {}, {}, compare=False)
    _check_room(job, memory, threads)
    return job.run(memory=memory, threads=threads, sync=sync, resume=False, progress=progress)


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
        metadata: Texts for the headers' `__metadata__`; `"dcp"` has no place for them.
        max_file_bytes: Of `"hf"`, how many bytes of tensors a file may have.
        memory: Bytes for the buffers of all threads.
        threads: How many; one per core if left out.
        sync: Whether the data is on the disk before the checkpoint has its name.
        progress: Called now and then with the bytes that are done and the bytes in all.
        replicas: `"check"` compares pieces that are stored more than once, `"first"` takes the first of them.
        resume: Whether a run that was interrupted goes on where it was; it must have been the same.
        plan: Whether only to say what it would take.

    Returns:
        What was written; with `plan` what it would take.

    Raises:
        FileExistsError: something is there under the new name.
        ParseError: the source does not follow its format, changed meanwhile, or has replicas that disagree.
        LayoutError: a layout does not fit a tensor, two tensors get one name, or the memory is too little.
        TypeError: elements are packed, or of a dtype that the form cannot hold.
        OSError: a file cannot be read or written, or the disk has no room; with `resume` the next run goes on.

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
    if replicas not in ("check", "first"):
        raise LayoutError(f"replicas is {shown(replicas)}; it must be 'check' or 'first'")
    source, target = path_of(src), path_of(dst)
    if target.exists() and source.exists() and target.samefile(source):
        raise FileExistsError(17, "dst is the source", str(target))
    with open_checkpoint(source) as checkpoint, _spool(target) as spool:
        names = _new_names(checkpoint, rename, only, with_objects=to == "dcp")
        converted = None if dtype is None else _float_dtype(dtype)
        wanted = []
        aliases: dict[str, str] = {}
        for old, new in names.items():
            tensor = checkpoint.get(old)
            if tensor is None:
                wanted.append(wanted_object(new, checkpoint.objects[old]))
                continue
            partition = partition_for(new, tensor.shape, layouts, uneven)
            if plan or (_is_addressable(tensor) and not _is_converted(tensor, converted)):
                wanted.append(
                    _placeholder(new, tensor, partition)
                    if plan and not _is_addressable(tensor)
                    else wanted_stored(new, tensor, partition)
                )
            else:
                wanted.append(spool.tensor(new, tensor, converted, partition, memory))
        paths = _paths(checkpoint, names)
        job = _job(target, wanted, to, metadata or {}, max_file_bytes, aliases, paths, compare=replicas == "check")
        outline = job.outline(memory, threads)
        if plan:
            return outline
        if not resume:
            describe_room(outline)
        return job.run(memory=memory, threads=threads, sync=sync, resume=resume, progress=progress)


def _job(
    path: Path,
    wanted: list[Wanted],
    to: Target | None,
    metadata: Mapping[str, str],
    max_file_bytes: int,
    aliases: dict[str, str],
    paths: Mapping[str, KeyPath],
    *,
    compare: bool,
) -> WriteJob:
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
        if to == "dcp" and not is_writable(tensor.dtype.name):
            raise TypeError(f"tensor {shown(tensor.name)} is {tensor.dtype.name}, which PyTorch does not have")
        if to != "dcp" and tensor.dtype.code is None:
            raise TypeError(f"tensor {shown(tensor.name)} is {tensor.dtype.name}, which a safetensors file cannot hold")
    if to == "dcp" and metadata:
        raise LayoutError("metadata is given; PyTorch's distributed checkpoint has no place for it")
    kept = _without_ties(wanted, aliases)
    said = dict(metadata)
    if aliases:
        said["shardwise.aliases"] = json.dumps(aliases)
    files: Sequence[TargetFile]
    texts: dict[str, bytes] = {}
    if to == "safetensors":
        files = single_file(path.name, kept, said)
    elif to == "hf":
        if isinstance(max_file_bytes, bool) or not isinstance(max_file_bytes, int) or max_file_bytes < 1:
            raise LayoutError(f"max_file_bytes is {shown(max_file_bytes)}; it must be a positive integer")
        files = whole = hugging_face_files(kept, max_file_bytes, said)
        if len(whole) > 1:
            texts["model.safetensors.index.json"] = json.dumps(index_of(whole, kept), indent=2).encode()
    elif to == "dcp":
        files = saved = dcp_files(kept)
        texts[INDEX] = dcp_index(saved, kept, aliases, paths)
    else:
        files = sharded_files(kept, said)

    def describe(digests: Sequence[int]) -> dict[str, Any]:
        return {
            "form": to,
            "aliases": aliases,
            "tensors": {
                tensor.name: {
                    "dtype": tensor.dtype.name,
                    "shape": list(tensor.shape),
                    "digest": f"{digest:032x}",
                    **({} if tensor.partition is None or to not in ("sharded", "dcp") else _cut(tensor.partition)),
                }
                for tensor, digest in zip(kept, digests, strict=True)
                if not tensor.is_object
            },
        }

    return WriteJob(
        path, kept, files, is_folder=to != "safetensors", texts=texts, describe=describe, compare_replicas=compare
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


def _without_ties(wanted: Iterable[Wanted], aliases: dict[str, str]) -> list[Wanted]:
    """The tensors, each once; notes down which names are tied to which."""
    first: dict[Any, Wanted] = {}
    kept, names = [], set()
    for tensor in wanted:
        if tensor.name in names:
            raise LayoutError(f"two tensors are to be called {shown(tensor.name)}")
        names.add(tensor.name)
        key = tensor.identity
        other = first.setdefault(key, tensor) if key is not None and tensor.pieces else tensor
        if other is tensor:
            kept.append(tensor)
        else:
            aliases[tensor.name] = other.name
    return kept


def _pairs(rename: Any) -> list[tuple[str, str]]:
    if not isinstance(rename, (Mapping, Sequence)) or isinstance(rename, (str, bytes)):
        raise TypeError(f"rename must be a mapping or a sequence of pairs, got {shown(rename)}")
    pairs = list(rename.items()) if isinstance(rename, Mapping) else list(rename)
    for position, pair in enumerate(pairs):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise TypeError(f"rename[{position}] must be a pair of strings, got {shown(pair)}")
    return [(pattern, replacement) for pattern, replacement in pairs]


def _new_names(
    checkpoint: StoredCheckpoint,
    rename: Mapping[str, str] | Sequence[tuple[str, str]],
    only: str | None,
    *,
    with_objects: bool,
) -> dict[str, str]:
    optional("only", only, str)
    pairs = _pairs(rename)
    names: dict[str, str] = {}
    origin: dict[str, str] = {}
    objects = [name for name, value in checkpoint.objects.items() if value.extent is not None]
    for old in (*checkpoint, *(objects if with_objects else ())):
        new = old
        for pattern, replacement in pairs:
            new = _substituted("rename", pattern, replacement, new)
        _check_name(new)
        if new in origin:
            raise LayoutError(f"rename calls both {shown(origin[new])} and {shown(old)} {shown(new)}")
        origin[new] = old
        if only is None or _compiled("only", only).search(new):
            names[old] = new
    if only is not None and not names:
        raise LayoutError(f"only is {shown(only)}, which is found in no name of {checkpoint.path}")
    return names


def _substituted(argument: str, pattern: str, replacement: str, name: str) -> str:
    try:
        return _compiled(argument, pattern).sub(replacement, name)
    except (re.error, IndexError) as error:
        raise LayoutError(
            f"{argument}: {shown(replacement)} is not a replacement for {shown(pattern)}: {error}"
        ) from None


def _compiled(argument: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise LayoutError(f"{argument}: {shown(pattern)} is not a regular expression: {error}") from None


def _paths(checkpoint: StoredCheckpoint, names: Mapping[str, str]) -> dict[str, KeyPath]:
    """Where the tensors that keep their names lay in a nested state dict, as far as the checkpoint says."""
    said = checkpoint.metadata.get("planner_data")
    if not isinstance(said, Mapping):
        return {}
    return {
        new: path
        for old, new in names.items()
        for path in [said.get(old)]
        if old == new and isinstance(path, tuple) and path and all(type(key) in (str, int) for key in path)
    }


def _check_name(name: Any) -> None:
    instance("the name of a tensor", name, str)
    if not name or name == "__metadata__":
        raise LayoutError(f"a tensor cannot be called {name!r}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise LayoutError(f"the name {shown(name)} holds a lone surrogate, which no file can hold") from None


def _check_room(job: WriteJob, memory: int, threads: int | None) -> None:
    describe_room(job.outline(memory, threads))


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


class _Spool:
    """A file beside the destination, for what cannot be copied from the source as it is."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._folder: Path | None = None
        self._count = 0
        self._made: list[DataFile] = []

    def tensor(
        self, name: str, tensor: StoredTensor, dtype: Dtype | None, partition: Partition | None, memory: int
    ) -> Wanted:
        """Write the tensor whole, converted if need be, and give it as one that lies in that file."""
        kept = dtype if dtype is not None and _is_converted(tensor, dtype) else tensor._dtype
        into = kept.numpy(f"tensor {shown(name)}")
        if self._folder is None:
            name_of_folder = f".{self._target.name}."
            self._folder = Path(tempfile.mkdtemp(prefix=name_of_folder, suffix=_SPOOL, dir=self._target.parent))
        path = self._folder / f"{self._count}.bin"
        self._count += 1
        with path.open("wb") as stream:
            for block in _blocks(tensor, memory):
                values = tensor.read(block)
                stream.write(np.ascontiguousarray(values.astype(into, copy=False)).tobytes())
        file = DataFile(path)
        self._made.append(file)
        shape = tensor.shape
        piece = SourcePiece(tuple((0, size) for size in shape), file, 0, contiguous_strides(shape, kept.bits // 8))
        return Wanted(name, kept, shape, [piece] if tensor.size else [], (), partition, None)

    def close(self) -> None:
        for file in self._made:
            file.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def _spool(target: Path) -> Iterator[_Spool]:
    if not target.parent.is_dir():
        raise FileNotFoundError(2, "the folder that is to hold the checkpoint is not there", str(target.parent))
    for stale in target.parent.glob(f".{glob.escape(target.name)}.*{_SPOOL}"):
        shutil.rmtree(stale, ignore_errors=True)  # Of a run that was killed.
    spool = _Spool(target)
    try:
        yield spool
    finally:
        spool.close()


def _blocks(tensor: StoredTensor, memory: int) -> Iterable[tuple[slice, ...]]:
    """Boxes that follow one another in C order, each of which takes no more than a part of the memory."""
    if not tensor.shape:
        yield ()
        return
    rest = tuple(slice(0, size) for size in tensor.shape[1:])
    row = max(tensor.nbytes // max(tensor.shape[0], 1), 1)
    # A block, the piece that it is decoded from, and its conversion.
    rows = min(max(memory // (4 * row), 1), tensor.shape[0])
    if row * 2 > memory:
        raise LayoutError(
            f"memory is {bytes_text(memory)}; a row of tensor {shown(tensor.name)} takes {bytes_text(row)}, which has "
            f"to be converted or decoded in memory: at least {bytes_text(2 * row)} are needed"
        )
    for start in range(0, tensor.shape[0], max(rows, 1)):
        yield (slice(start, min(start + rows, tensor.shape[0])), *rest)
