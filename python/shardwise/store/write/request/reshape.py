"""`reshard_checkpoint` and `plan_checkpoint`: a checkpoint from another checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

from ...._arguments import is_true
from ...._garbage import uncollected
from ....layout import UnevenRule
from ....mesh import DeviceMesh
from ....placing import Layouts
from ....rules.numbers import Config
from ....rules.rewrites import Rewrites
from ...data.location import Location, is_sampled, location_of, taken
from ...formats.open import open_checkpoint
from ...rewritten.convert import Overflow
from ...rewritten.names import Which
from ..forms.forms import Target
from ..places import check_writable, claim_name, locked, refuse_source
from ..places.report import WriteReport
from ..places.work import MEMORY, RETRIES, Work, worker_count
from ..run.checkpoint_plan import CheckpointPlan
from ..run.run import run_whole
from .preparation import Preparation
from .request import FILE_BYTES, Request, RulesFile
from .save import warn
from .scratch import ScratchFile, opened_scratch

__all__ = ["plan_checkpoint", "reshard_checkpoint"]


def reshard_checkpoint(
    src: str | os.PathLike[str] | Location,
    dst: str | os.PathLike[str] | Location,
    layouts: Layouts | None = None,
    *,
    mesh: DeviceMesh | None = None,
    rules: RulesFile | None = None,
    source_rules: RulesFile | None = None,
    to: Target | None = None,
    uneven: UnevenRule = "even",
    dtype: Any = None,
    overflow: Overflow = "refuse",
    rename: Mapping[str, str] | Sequence[tuple[str, str]] = (),
    rewrites: Rewrites | None = None,
    only: str | None = None,
    drop: str | None = None,
    which: Which = "all",
    metadata: Mapping[str, str] | None = None,
    max_file_bytes: int = FILE_BYTES,
    memory: int = MEMORY,
    threads: int | None = None,
    sync: bool = True,
    replicas: Literal["check", "first"] = "check",
    resume: bool = False,
    executor: Executor | None = None,
    workers: int | None = None,
    task_bytes: int | None = None,
    retries: int = RETRIES,
    timeout: float | None = None,
    strict: bool = False,
    rank: int | None = None,
    padded: bool = False,
    parameter_names: Sequence[str] | None = None,
    source_layouts: Layouts | None = None,
    config: Config | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> WriteReport:
    """Reshard a checkpoint: merge it, split it, or go from one layout to another, within a memory limit.

    Args:
        src: A checkpoint of any format that `open_checkpoint` opens, also by URL; it is only read.
        dst: The new file or folder, or a URL (`s3://`, `gs://`, `memory://`); nothing may be there.
        layouts: The cuts of the tensors, by the new names: a `LayoutMap`, a `Deployment` or a mapping. Without layouts
            the tensors are merged.
        mesh: The mesh of `rules`. For `"fsdp2"` without rules or layouts: every tensor is cut as `fully_shard` does it,
            dim 0 over the last axis of the mesh.
        rules: A rules file, or the name of one that `shardwise rules` lists: its cuts in place of
            `layouts`, and its rewrites in place of `rewrites`.
        source_rules: The rules file that `src` was made by: its rewrites are undone first.
        to: The format of `dst`; see `save_checkpoint`.
        uneven: The rule by which a dim that does not divide is cut.
        dtype: The new dtype of floating-point weights; by default every tensor keeps its dtype, and the states of an
            optimizer always do. Converted tensors, tensors whose pieces are compressed, and rewritten ones with very
            many short runs, are first written to a file next to `dst`. Values are rounded once, to the nearest value; a
            tie goes to the even one.
        overflow: What happens to values beyond the range of `dtype`: `"refuse"` is an error that gives their number in
            each tensor. `"saturate"` takes the largest value of the same sign, also for an infinity that `dtype` does
            not have. `"round"` gives an infinity, or NaN in a dtype without infinities, as IEEE 754 and ml_dtypes do.
            The report gives their number.
        rename: Regular expressions and what replaces their matches in names, one after the other, as by `re.sub`. They
            are searched for in linear time; what only a backtracking search finds is refused.
        rewrites: Tensors that are named, packed, stacked, transposed or padded differently, after `rename`.
        only: A regular expression: tensors are written if it is found in their new names.
        drop: A regular expression: tensors and values are left out if it is found in their names in the source. A
            warning names what a rules file drops, unless `drop` leaves it out too.
        which: `"weights"` takes the weights alone, `"state"` all else: moments, master copies, steps, groups.
        metadata: Texts for the headers' `__metadata__`; `"dcp"` has no place for them.
        max_file_bytes: For `"hf"` and `"vllm"`, the most bytes of tensors in a file.
        memory: Bytes for the buffers of all threads, or of all workers of a host.
        threads: The number of threads; one per core if left out.
        sync: Whether to wait until the data is on the disk before the checkpoint gets its name.
        progress: Called now and then with the bytes that are done and the bytes in all.
        replicas: `"check"` compares pieces that are stored more than once, byte for byte, as they are stored: before
            `dtype` converts them. `"first"` takes the first of them.
        resume: Whether to continue an interrupted run; its arguments must have been the same. If the checkpoint is
            finished, it is compared with the sources, and nothing is written.
        executor: Runs the tasks instead of threads of this process: any `concurrent.futures.Executor`, such as a
            `ProcessPoolExecutor`, `mpi4py.futures.MPIPoolExecutor` or Dask's `client.get_executor()`, whose workers see
            the same files or URLs. In a store each task makes an object; on S3 it mostly makes parts of objects.
        workers: The number of workers of the executor; by default the number that it states.
        task_bytes: The most bytes that a task writes; by default 64 MiB, and less for small checkpoints.
        retries: The most retries of a task that fails with an error of the system or of its worker.
        timeout: Seconds after which workers of an executor are given up if none has ended a task.
        strict: Whether every warning of the report is an error. The report warns of what is not written: tensors that
            the rules drop, files next to the source that are not read. It also warns of tensors that match no rule,
            rules that apply to no name, axes that no rule uses, a pattern of `rename` that changes no name, and layouts
            that cut nothing because the format holds tensors whole.
        rank: With `to="ranks"`, the only rank whose file is written: `dst` is that file.
        padded: Whether ranks' tensors in `src` may be padded; see `open_checkpoint`.
        parameter_names: The names of the parameters of PyTorch's optimizers in `src`, in the order of their numbers;
            see `open_checkpoint`.
        source_layouts: If `src` is a folder of bare files, one for each rank, which do not say how tensors are cut: the
            cuts of the tensors in those files, by their names there, over a mesh whose devices are the ranks. Tensors
            that several ranks hold are compared.
        config: The model's configuration, a file, its folder or its contents, in place of the `config.json` in the
            folder of `src`: it says how weights are quantized, and is written next to the files of `"hf"`, `"ranks"`
            and `"vllm"`.

    Warns:
        ShardwiseWarning: for each of the report's `warnings`, before anything is written.

    Returns:
        What was written; `plan_checkpoint(...).outline()` gives the cost in advance.

    Raises:
        FileExistsError: if something is there under the new name.
        ParseError: if the source does not follow its format, changed meanwhile, or has replicas that disagree.
        LayoutError: if a layout does not fit a tensor, a rewrite matches nothing or does not fit, two tensors get one
            name, or the memory is too little; if values are beyond the range of `dtype`; with `strict`, on any warning.
        TypeError: if elements of fewer than eight bits are rewritten, or a dtype is one that the format cannot hold.
        OSError: if a file cannot be read or written, or the disk is full; with `resume` the next run continues.
        BrokenExecutor: if a worker died, and its executor with it; with `resume` the next run continues.
        TimeoutError: if workers were given up; with `resume` the next run continues.

    Every byte that is needed is read once and written once. The new checkpoint gets its name only when it is complete
    and on the disk.

    >>> import tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> from shardwise import DeviceMesh, TensorLayout, save_checkpoint
    >>> rows = TensorLayout(("x", None), DeviceMesh((2,), ("x",)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     whole, cut = Path(folder, "whole.safetensors"), Path(folder, "cut")
    ...     _ = save_checkpoint(whole, {"w": np.arange(6).reshape(2, 3)})
    ...     _ = reshard_checkpoint(whole, cut, {"w": rows})
    ...     with open_checkpoint(cut) as checkpoint:
    ...         print(checkpoint["w"], checkpoint.read("w").tolist())
    <StoredTensor 'w': int64 (2, 3), 2 pieces> [[0, 1, 2], [3, 4, 5]]
    """
    work = Work(
        executor=executor, workers=workers, memory=memory, threads=threads, sync=is_true("sync", sync), retries=retries,
        timeout=timeout, progress=progress, resume=is_true("resume", resume),
    )  # fmt: skip
    request = Request.of(
        location_of(dst), layouts=layouts, mesh=mesh, rules=rules, source_rules=source_rules, to=to, uneven=uneven,
        dtype=dtype, overflow=overflow,
        names={"rename": rename, "rewrites": rewrites, "only": only, "drop": drop, "which": which},
        metadata=metadata, max_file_bytes=max_file_bytes, memory=memory, replicas=replicas, task_bytes=task_bytes,
        strict=strict, rank=rank, padded=padded, parameter_names=parameter_names, config=config,
        source_layouts=source_layouts, workers=worker_count(work), resume=work.resume,
    )  # fmt: skip
    with _planned(src, request) as made:
        warn(made.warnings)
        return replace(run_whole(made, work), path=request.target, warnings=made.warnings, left_out=made.left_out)


def plan_checkpoint(
    src: str | os.PathLike[str] | Location,
    dst: str | os.PathLike[str] | Location,
    layouts: Layouts | None = None,
    *,
    mesh: DeviceMesh | None = None,
    rules: RulesFile | None = None,
    source_rules: RulesFile | None = None,
    to: Target | None = None,
    uneven: UnevenRule = "even",
    dtype: Any = None,
    overflow: Overflow = "refuse",
    rename: Mapping[str, str] | Sequence[tuple[str, str]] = (),
    rewrites: Rewrites | None = None,
    only: str | None = None,
    drop: str | None = None,
    which: Which = "all",
    metadata: Mapping[str, str] | None = None,
    max_file_bytes: int = FILE_BYTES,
    replicas: Literal["check", "first"] = "check",
    memory: int = MEMORY,
    task_bytes: int | None = None,
    strict: bool = False,
    rank: int | None = None,
    padded: bool = False,
    parameter_names: Sequence[str] | None = None,
    source_layouts: Layouts | None = None,
    config: Config | None = None,
) -> CheckpointPlan:
    """Plan what `reshard_checkpoint` does, as tasks that can be run anywhere, and write nothing.

    The arguments are those of `reshard_checkpoint`, without those about how it runs. `src` and `dst` are paths or URLs
    that are visible to all machines that run a part. `memory` limits converting and decoding, as in
    `reshard_checkpoint`; tasks get their own limit when they run. Where a task makes an object, as in stores other than
    S3, `max_file_bytes` limits the objects of `"hf"`.

    If a tensor is converted, compressed in the source, or in very many short runs, `reshard_checkpoint` has to put
    it together first. The plan then only has an outline: `save`, `run` and `commit` raise a TypeError that names the
    tensor.

    Raises:
        FileExistsError, ParseError, LayoutError, OSError: as for `reshard_checkpoint`.

    >>> import tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> from shardwise import save_checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     whole, halves = Path(folder, "whole.safetensors"), Path(folder, "halves")
    ...     _ = save_checkpoint(whole, {"w": np.arange(2**17), "b": np.ones(3)})
    ...     plan = plan_checkpoint(whole, halves, to="hf", task_bytes=2**19)
    ...     plan.save(Path(folder, "halves.swplan"))
    ...     for part in (2, 1):  # On any machine, in any order.
    ...         print(CheckpointPlan.load(Path(folder, "halves.swplan")).run((part, 2)), "done")
    ...     report = plan.commit()
    ...     with open_checkpoint(halves) as checkpoint:
    ...         print(int(checkpoint.read("w").sum()) == 2**16 * (2**17 - 1))
    1 done
    2 done
    True
    """
    request = Request.of(
        location_of(dst), layouts=layouts, mesh=mesh, rules=rules, source_rules=source_rules, to=to, uneven=uneven,
        dtype=dtype, overflow=overflow,
        names={"rename": rename, "rewrites": rewrites, "only": only, "drop": drop, "which": which},
        metadata=metadata, max_file_bytes=max_file_bytes, memory=memory, replicas=replicas, task_bytes=task_bytes,
        strict=strict, rank=rank, padded=padded, parameter_names=parameter_names, config=config,
        source_layouts=source_layouts, is_written=False,
    )  # fmt: skip
    with _planned(src, request) as made:
        if made.is_finished():
            raise taken(request.target)
        warn(made.warnings)
        return made


@contextmanager
def _planned(src: str | os.PathLike[str] | Location, request: Request) -> Iterator[CheckpointPlan]:
    """Yield the plan of a request; the source stays open, and the destination locked, until the block ends."""
    target = request.target
    with uncollected():
        opened = open_checkpoint(
            src, padded=request.padded, parameter_names=request.parameter_names, layouts=request.source_layouts
        )
    with opened as checkpoint:
        refuse_source(checkpoint.given, target)
        with (
            locked(target) if request.is_written else nullcontext(),
            opened_scratch(target, is_written=request.is_written, overflow=request.overflow) as scratch,
        ):
            claim_name(target, is_written=request.is_written, resume=request.resume)
            planning = Preparation(request, checkpoint)
            # What must be written to a file first is counted before anything is.
            dry = ScratchFile(target, is_dry=True)
            with uncollected():
                made = planning.plan(dry)
            if request.is_written and dry.nbytes:
                if not request.resume:
                    check_writable(made.path, made.nbytes + dry.nbytes)
                    made.place.claim(resume=False)
                made = planning.plan(scratch)
            obstacle = planning.obstacles[0] if planning.obstacles and not request.is_written else ""
            doubts = [*planning.doubts, *scratch.warnings]
            if request.resume and made.place.is_of_another_run():
                doubts.append(
                    f"{target}: nothing is resumed: the interrupted run had other arguments, or its source has changed"
                )
            yield made.noted(
                warnings=tuple(doubts),
                left_out=tuple(planning.left_out),
                obstacle=obstacle,
                is_sampled=request.is_written or is_sampled(checkpoint.given),
            )
