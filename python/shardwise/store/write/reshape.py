"""`save_checkpoint` and `reshard_checkpoint`: a checkpoint from tensors in memory, or from another checkpoint."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from ..._arguments import instance, optional
from ..._dtypes import Dtype, find_dtype
from ..._text import shown
from ...array.replicas import check_replicas
from ...array.sharded import ShardedArray
from ...errors import LayoutError
from ...layout import UnevenRule
from ...partition import Partition
from ...rules.rewrites import Rewrites
from ..objects import ObjectPath, place_of
from ..open import open_checkpoint
from ..protocol import StoredCheckpoint
from .assembled import Assembled
from .checkpoint_plan import CheckpointPlan
from .dcp import INDEX, KeyPath, dcp_files, dcp_index, is_writable
from .drive import run_whole
from .files import TargetFile, hugging_face_files, index_of, sharded_files, single_file
from .gather import check_replicas as check_stored_replicas
from .objects import ObjectJob
from .plan import uncollected
from .planning import make_plan
from .reports import WriteOutline, WriteReport
from .rewrite import kept_objects, rewritten
from .spool import is_addressable, is_converted, is_float, opened_spool, placeholder, unread
from .wanted import Layouts, Wanted, partition_for, wanted_array, wanted_object, wanted_stored

__all__ = ["Target", "plan_checkpoint", "reshard_checkpoint", "save_checkpoint"]

#: What a new checkpoint may be: a safetensors file; a folder in Hugging Face's form; a folder with a safetensors file
#: per device; PyTorch's distributed checkpoint.
Target = Literal["safetensors", "hf", "sharded", "dcp"]

#: What to do instead of writing a form that is read.
_ONLY_READ = {
    "orbax": "write safetensors or hf, load that into JAX, and save it with Orbax",
    "keras": "write safetensors or hf, set a model's weights by it, and save them with Keras",
}

_MEMORY = 256 * 2**20
#: Up to how many bytes Hugging Face's own `save_pretrained` lets a file have.
_FILE_BYTES = 5 * 10**9
#: How often a task is tried again, unless the caller says otherwise.
_RETRIES = 2


def save_checkpoint(
    path: str | os.PathLike[str] | ObjectPath,
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
        path: The new file or folder, or a URL (`s3://`, `gs://`, `memory://`); nothing may be there.
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
        FileExistsError: if something is there under the new name.
        LayoutError: if a layout does not fit, replicas differ, or the memory is too little.
        TypeError: if a value is not an array, or of a dtype that the form cannot hold.
        ParseError: if an array is memory-mapped from a file that was cut short, or is written to meanwhile (on Linux).
        OSError: if a file cannot be written, or the disk has no room.

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
    target = place_of(path)
    made = _plan(target, wanted, to, metadata or {}, max_file_bytes, {}, {}, compare=False)
    return _run(made, target, None, memory, threads, sync, False, _RETRIES, progress)


def reshard_checkpoint(
    src: str | os.PathLike[str] | ObjectPath,
    dst: str | os.PathLike[str] | ObjectPath,
    layouts: Layouts | None = None,
    *,
    to: Target | None = None,
    uneven: UnevenRule = "even",
    dtype: Any = None,
    rename: Mapping[str, str] | Sequence[tuple[str, str]] = (),
    rewrites: Rewrites | None = None,
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
        src: A checkpoint of any form that `open_checkpoint` opens, also by URL; it is only read.
        dst: The new file or folder, or a URL (`s3://`, `gs://`, `memory://`); nothing may be there.
        layouts: How the tensors are cut: a `LayoutMap` or a mapping, by the new names. Without it they are merged.
        to: What `dst` is to be; see `save_checkpoint`.
        uneven: How a dim that does not divide is cut.
        dtype: What floating-point tensors are converted to; by default every tensor keeps its dtype. Converted tensors,
            tensors whose pieces are compressed, and rewritten ones of very many short stretches, are written to a file
            beside `dst` first.
        rename: Regular expressions and what replaces their matches in names, one after the other, as by `re.sub`.
        rewrites: What is named, packed, stacked, transposed or padded otherwise, after `rename`.
        only: A regular expression: the tensors in whose (new) names it is found.
        metadata: Texts for the headers' `__metadata__`; `"dcp"` has no place for them.
        max_file_bytes: Of `"hf"`, how many bytes of tensors a file may have.
        memory: Bytes for the buffers of all threads, or of all workers of a host.
        threads: How many; one per core if left out.
        sync: Whether the data is on the disk before the checkpoint has its name.
        progress: Called now and then with the bytes that are done and the bytes in all.
        replicas: `"check"` compares pieces that are stored more than once, byte for byte, as they are stored: before
            `dtype` converts them. `"first"` takes the first of them.
        resume: Whether a run that was interrupted goes on where it was; it must have been the same.
        plan: Whether only to say what it would take.
        executor: What runs the tasks instead of threads of this process: any `concurrent.futures.Executor`, such as a
            `ProcessPoolExecutor`, `mpi4py.futures.MPIPoolExecutor` or Dask's `client.get_executor()`, whose workers see
            the same files or URLs. In a store a task is an object.
        task_bytes: How many bytes a task writes at most; by default 64 MiB, and less for small checkpoints.
        retries: How often a task is tried again that fails with an error of the system or of its worker.

    Returns:
        What was written; with `plan` what it would take.

    Raises:
        FileExistsError: if something is there under the new name.
        ParseError: if the source does not follow its format, changed meanwhile, or has replicas that disagree.
        LayoutError: if a layout does not fit a tensor, a rewrite matches nothing or does not fit, two tensors get one
            name, or the memory is too little.
        TypeError: elements are packed, or of a dtype that the form cannot hold.
        OSError: if a file cannot be read or written, or the disk has no room; with `resume` the next run goes on.
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
    target = place_of(dst)
    stored: _Stored = "placeholder" if plan else "spool"
    planned = _planning(
        src, target, layouts, to, uneven, dtype, rename, rewrites, only, metadata, max_file_bytes, memory, replicas,
        task_bytes,
        how=stored,
    )  # fmt: skip
    with planned as made:
        if plan:
            return made.outline(memory, threads)
        return _run(made, target, executor, memory, threads, sync, resume, retries, progress)


def plan_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    layouts: Layouts | None = None,
    *,
    to: Target | None = None,
    uneven: UnevenRule = "even",
    rename: Mapping[str, str] | Sequence[tuple[str, str]] = (),
    rewrites: Rewrites | None = None,
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
        rewrites: What is named, packed, stacked, transposed or padded otherwise.
        only: A regular expression: the tensors in whose (new) names it is found.
        metadata: Texts for the headers' `__metadata__`.
        max_file_bytes: Of `"hf"`, how many bytes of tensors a file may have.
        replicas: `"check"` compares pieces that are stored more than once, `"first"` takes the first of them.
        task_bytes: How many bytes a task writes at most; by default 64 MiB, and less for small checkpoints.

    Raises:
        TypeError: if a tensor lies compressed in the source, or in very many short stretches, so that
            `reshard_checkpoint` has to put it together first.
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
    target = place_of(dst)
    if isinstance(target, ObjectPath):
        raise TypeError(f"dst is {target}; saved plans write to disks; reshard_checkpoint(executor=…) writes to stores")
    planned = _planning(
        src, target, layouts, to, uneven, None, rename, rewrites, only, metadata, max_file_bytes, 0, replicas,
        task_bytes,
        how="refuse",
    )  # fmt: skip
    with planned as made:
        assert isinstance(made, CheckpointPlan)
        return made


def _run(
    made: CheckpointPlan | ObjectJob,
    path: Path,
    executor: Executor | None,
    memory: int,
    threads: int | None,
    sync: bool,
    resume: bool,
    retries: int,
    progress: Callable[[int, int], object] | None,
) -> WriteReport:
    if isinstance(made, ObjectJob):
        return made.run(
            executor=executor, memory=memory, threads=threads, resume=resume, retries=retries, progress=progress
        )
    if not resume:
        made.check_room()
    report = run_whole(
        made,
        executor=executor,
        memory=memory,
        threads=threads,
        sync=sync,
        resume=resume,
        retries=retries,
        progress=progress,
    )
    return replace(report, path=path)  # As it was given; that of a plan is absolute.


#: What becomes of tensors that cannot be copied as they are: written to a file first, only counted, or refused.
_Stored = Literal["spool", "placeholder", "refuse"]


@contextmanager
def _planning(
    src: str | os.PathLike[str] | ObjectPath,
    target: Path,
    layouts: Layouts | None,
    to: Target | None,
    uneven: UnevenRule,
    dtype: Any,
    rename: Mapping[str, str] | Sequence[tuple[str, str]],
    rewrites: Rewrites | None,
    only: str | None,
    metadata: Mapping[str, str] | None,
    max_file_bytes: int,
    memory: int,
    replicas: str,
    task_bytes: int | None,
    *,
    how: _Stored,
) -> Iterator[CheckpointPlan | ObjectJob]:
    if replicas not in ("check", "first"):
        raise LayoutError(f"replicas is {shown(replicas)}; it must be 'check' or 'first'")
    rename = _pairs(rename)
    source = place_of(src)
    if _is_same(source, target):
        raise FileExistsError(17, "dst is the source", str(target))
    with open_checkpoint(source) as checkpoint, opened_spool(target) as spool:
        is_remote = isinstance(source, ObjectPath)
        converted = None if dtype is None else _float_dtype(dtype)

        def stored(old: str, new: str, partition: Partition | None) -> Wanted:
            tensor = checkpoint[old]
            # The engine reads local files; what lies in a store is fetched first, unless it goes to a store again.
            is_direct = is_addressable(tensor) and (isinstance(target, ObjectPath) or not is_remote)
            if how == "placeholder" and not is_direct:
                return placeholder(new, tensor, partition)
            if how == "placeholder" or (is_direct and not is_converted(tensor, converted)):
                return wanted_stored(new, tensor, partition)
            if how == "refuse":
                raise _not_in_tasks(old)
            if replicas == "check" and tensor.replicas and is_addressable(tensor):
                # As they are stored: what differs may be equal once it is converted.
                check_stored_replicas([wanted_stored(new, tensor, None)], memory)
            return spool.tensor(new, tensor, converted, partition, memory)

        wanted = []
        aliases: dict[str, str] = {}
        #: By their names in the source, what goes to the destination as it is.
        names: dict[str, str] = {}
        tensors = _made(checkpoint, rename, rewrites, converted, stored)
        for name, made in _chosen(tensors, only, checkpoint.path).items():
            partition = partition_for(name, made.shape, layouts, uneven)
            if made.stored is not None:
                names[made.stored] = name
                wanted.append(stored(made.stored, name, partition))
            elif not made.is_scattered:
                wanted.append(made.wanted(name, partition))
            elif how == "refuse":
                raise _not_in_tasks(name)
            elif how == "placeholder":
                wanted.append(unread(name, made.dtype, made.shape, partition))
            else:
                wanted.append(spool.assembled(name, made, partition, memory))
        if to == "dcp":
            for old, name in _objects(checkpoint, rename, rewrites, only, tensors).items():
                names[old] = name
                wanted.append(wanted_object(name, checkpoint.objects[old]))
        paths = _paths(checkpoint, names)
        with uncollected():
            planned = _plan(
                target, wanted, to, metadata or {}, max_file_bytes, aliases, paths, task_bytes,
                compare=replicas == "check",
            )  # fmt: skip
        yield planned


def _not_in_tasks(name: str) -> TypeError:
    return TypeError(
        f"tensor {shown(name)} lies compressed in the source, or in too many short stretches, so that no task can copy "
        "a part of it; reshard_checkpoint puts it together first"
    )


def _plan(
    path: Path,
    wanted: list[Wanted],
    to: Target | None,
    metadata: Mapping[str, str],
    max_file_bytes: int,
    aliases: dict[str, str],
    paths: Mapping[str, KeyPath],
    task_bytes: int | None = None,
    *,
    compare: bool,
) -> CheckpointPlan | ObjectJob:
    if to is None:
        to = (
            "safetensors"
            if path.name.endswith(".safetensors")
            else "sharded"
            if any(tensor.partition is not None for tensor in wanted)
            else "hf"
        )
    if to not in get_args(Target):
        why = f"; {only_read(to)}" if only_read(to) else ""
        raise LayoutError(f"to is {shown(to)}; it must be one of {', '.join(map(repr, get_args(Target)))}{why}")
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

    manifest = {
        "form": to,
        "aliases": aliases,
        "tensors": [
            {} if tensor.partition is None or to not in ("sharded", "dcp") else _cut(tensor.partition)
            for tensor in kept
        ],
    }
    is_folder = to != "safetensors"
    if isinstance(path, ObjectPath):
        return ObjectJob(
            path, kept, files, is_folder=is_folder, texts=texts, manifest=manifest, compare_replicas=compare
        )
    return make_plan(
        path,
        kept,
        files,
        is_folder=is_folder,
        texts=texts,
        manifest=manifest,
        compare_replicas=compare,
        task_bytes=task_bytes,
    )


def only_read(form: Any) -> str:
    """Why a form is not written that is read, and what to do; nothing of any other form.

    >>> only_read("dcp"), only_read("orbax")
    ('', 'orbax is read, not written: write safetensors or hf, load that into JAX, and save it with Orbax')
    """
    instead = _ONLY_READ.get(form) if isinstance(form, str) else None
    return "" if instead is None else f"{form} is read, not written: {instead}"


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
            raise LayoutError(f"two values are to be called {shown(tensor.name)}")
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


def _made(
    checkpoint: StoredCheckpoint,
    rename: Sequence[tuple[str, str]],
    rewrites: Rewrites | None,
    converted: Dtype | None,
    stored: Callable[[str, str, Partition | None], Wanted],
) -> dict[str, Assembled]:
    """The tensors by their new names: renamed, then rewritten."""
    optional("rewrites", rewrites, Rewrites)
    made: dict[str, Assembled] = {}
    for old, tensor in checkpoint.items():
        new = _renamed(rename, old)
        if new in made:
            raise LayoutError(f"rename calls both {shown(made[new].origin)} and {shown(old)} {shown(new)}")
        dtype = converted if converted is not None and is_converted(tensor, converted) else tensor._dtype
        made[new] = Assembled.of_stored(old, tensor.shape, dtype, partial(stored, old, old, None))
    if rewrites is not None:
        made = rewritten(made, rewrites)
    for new in made:
        _check_name(new)
    return made


def _chosen(made: dict[str, Assembled], only: str | None, path: Path) -> dict[str, Assembled]:
    optional("only", only, str)
    if only is None:
        return made
    pattern = _compiled("only", only)
    found = {name: tensor for name, tensor in made.items() if pattern.search(name)}
    if not found:
        raise LayoutError(f"only is {shown(only)}, which is found in no name of {path}")
    return found


def _objects(
    checkpoint: StoredCheckpoint,
    rename: Sequence[tuple[str, str]],
    rewrites: Rewrites | None,
    only: str | None,
    tensors: Mapping[str, Assembled],
) -> dict[str, str]:
    """The values that are not tensors and can be copied, with their new names, which no tensor may have."""
    names = {old: _renamed(rename, old) for old, value in checkpoint.objects.items() if value.extent is not None}
    kept = set(names.values()) if rewrites is None else kept_objects(names.values(), rewrites)
    origins = {new: tensor.origin for new, tensor in tensors.items()}
    found: dict[str, str] = {}
    for old, new in names.items():
        if new not in kept:
            continue
        _check_name(new)
        if new in origins:
            raise LayoutError(f"rename calls both {shown(origins[new])} and {shown(old)} {shown(new)}")
        origins[new] = old
        if only is None or _compiled("only", only).search(new):
            found[old] = new
    return found


def _renamed(rename: Sequence[tuple[str, str]], name: str) -> str:
    for pattern, replacement in rename:
        name = _substituted("rename", pattern, replacement, name)
    return name


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


def _is_same(source: Path, target: Path) -> bool:
    if isinstance(source, ObjectPath) or isinstance(target, ObjectPath):
        return source == target
    return target.exists() and source.exists() and target.samefile(source)


def _float_dtype(value: Any) -> Dtype:
    found = find_dtype(value)
    if found is None or found.origin is None or not is_float(found) or found.code is None:
        raise TypeError(f"dtype must be a floating-point dtype that a safetensors file can hold, got {shown(value)}")
    return found
