"""`reshard_checkpoint` and `plan_checkpoint`: a checkpoint from another checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from ...._arguments import is_true
from ...._garbage import uncollected
from ...._text import shown
from ....conversion.assembled import Assembled, Wanted
from ....errors import ParseError
from ....layout import UnevenRule
from ....partition import Partition
from ....placing import Layouts, placing_of
from ....quantized.forms import Components, cast_weights
from ....quantized.method import quantization_of
from ....rules.left_out import LeftOut
from ....rules.numbers import Config, config_text, read_config
from ....rules.pattern import NamePattern
from ....rules.rewrites import Rewrites
from ....shared_tiling import SharedTiling
from ...data.location import Location, is_sampled, location_of, taken
from ...formats.open import open_checkpoint
from ...rewritten.components import component_partitions, outline_of
from ...rewritten.convert import Overflow, is_converted
from ...rewritten.left_out import asked_for, dropped_by_rules, nbytes_of, states_alone, without_a_place
from ...rewritten.names import (
    chosen,
    idle_renames,
    kept_values,
    key_paths,
    names_of,
    refuse_unreadable,
    renamed_tensors,
)
from ...rewritten.wanted import partition_for, refuse_unmatched, wanted_object, wanted_stored
from ...tensors.checkpoint import StoredCheckpoint
from ...tensors.companion_files import beside, companions_of
from ...tensors.model_config import config_of
from ..forms.doubts import DoubtsError, doubts_about, ruled_tensors
from ..forms.forms import WRITTEN, Target
from ..places import check_writable, claim_name, locked, refuse_source
from ..places.work import MEMORY, RETRIES, Work, WriteReport, worker_count
from ..run.checkpoint_plan import CheckpointPlan
from ..run.run import run_whole
from .planner import chosen_form, plan_form
from .request import FILE_BYTES, Request
from .save import warn
from .scratch import ScratchFile, opened_scratch

__all__ = ["plan_checkpoint", "reshard_checkpoint"]


def reshard_checkpoint(
    src: str | os.PathLike[str] | Location,
    dst: str | os.PathLike[str] | Location,
    layouts: Layouts | None = None,
    *,
    to: Target | None = None,
    uneven: UnevenRule = "even",
    dtype: Any = None,
    overflow: Overflow = "refuse",
    rename: Mapping[str, str] | Sequence[tuple[str, str]] = (),
    rewrites: Rewrites | None = None,
    only: str | None = None,
    drop: str | None = None,
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
    config: Config | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> WriteReport:
    """Reshard a checkpoint: merge it, split it, or go from one layout to another, within a memory limit.

    Args:
        src: A checkpoint of any format that `open_checkpoint` opens, also by URL; it is only read.
        dst: The new file or folder, or a URL (`s3://`, `gs://`, `memory://`); nothing may be there.
        layouts: The cuts of the tensors, by the new names: a `LayoutMap`, a `Deployment` or a mapping. Without it they
            are merged.
        to: The format of `dst`; see `save_checkpoint`.
        uneven: The rule by which a dim that does not divide is cut.
        dtype: The new dtype of floating-point tensors; by default every tensor keeps its dtype. Converted tensors,
            tensors whose pieces are compressed, and rewritten ones with very many short runs, are first written to
            a file beside `dst`. Values are rounded once, to the nearest, of two that are as near to the even one.
        overflow: The fate of values beyond the range of `dtype`: `"refuse"` is an error that says how many of which
            tensor; `"saturate"` takes the largest value of the same sign, also for an infinity that `dtype` does not
            have; `"round"` what IEEE 754 and ml_dtypes do, an infinity, or NaN in a dtype without. The report says how
            many they were.
        rename: Regular expressions and what replaces their matches in names, one after the other, as by `re.sub`. They
            are searched for in linear time; what only a backtracking search finds is refused.
        rewrites: Tensors that are named, packed, stacked, transposed or padded differently, after `rename`.
        only: A regular expression: the tensors in whose (new) names it is found.
        drop: A regular expression: the tensors and values in whose names in the source it is found are left out. What a
            rules file drops is warned of, unless it is left out so.
        metadata: Texts for the headers' `__metadata__`; `"dcp"` has no place for them.
        max_file_bytes: For `"hf"` and `"vllm"`, the most bytes of tensors in a file.
        memory: Bytes for the buffers of all threads, or of all workers of a host.
        threads: The number of threads; one per core if left out.
        sync: Whether the data is on the disk before the checkpoint has its name.
        progress: Called now and then with the bytes that are done and the bytes in all.
        replicas: `"check"` compares pieces that are stored more than once, byte for byte, as they are stored: before
            `dtype` converts them. `"first"` takes the first of them.
        resume: Whether to continue an interrupted run; its arguments must have been the same. If the checkpoint is
            finished, it is compared with the sources, and nothing is written.
        executor: Runs the tasks instead of threads of this process: any `concurrent.futures.Executor`, such as a
            `ProcessPoolExecutor`, `mpi4py.futures.MPIPoolExecutor` or Dask's `client.get_executor()`, whose workers see
            the same files or URLs. In a store a task is an object, but on S3 mostly parts of several.
        workers: The number of workers of the executor; if left out, as many as it says it has.
        task_bytes: The most bytes that a task writes; by default 64 MiB, and less for small checkpoints.
        retries: The most retries of a task that fails with an error of the system or of its worker.
        timeout: Seconds after which workers of an executor are given up that have ended no task.
        strict: Whether to refuse what the report would warn of: what does not arrive, as tensors that the rules drop
            and files beside the source that are not read; tensors that match no rule, rules that apply to no name, axes
            that no rule uses, a pattern of `rename` that changes none, layouts that cut nothing since the format holds
            tensors whole.
        rank: With `to="ranks"`, the only rank whose file is written: `dst` is that file.
        padded: Whether ranks' tensors in `src` may be padded; see `open_checkpoint`.
        parameter_names: The names of the parameters of PyTorch's optimizers in `src`, in the order of their numbers;
            see `open_checkpoint`.
        config: The model's configuration, a file, its folder or what it holds, in place of the `config.json` in the
            folder of `src`: it says how weights are quantized, and is written beside `"hf"`, `"ranks"` and `"vllm"`.

    Warns:
        ShardwiseWarning: for each of the report's `warnings`, before anything is written.

    Returns:
        What was written; `plan_checkpoint(...).outline()` says before what it would take.

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
    target = location_of(dst)
    request = Request.of(
        target, layouts=placing_of(layouts), to=to, uneven=uneven, dtype=dtype, overflow=overflow,
        names={"rename": rename, "rewrites": rewrites, "only": only, "drop": drop},
        metadata=metadata, max_file_bytes=max_file_bytes, memory=memory, replicas=replicas, task_bytes=task_bytes,
        strict=strict, rank=rank, padded=padded, parameter_names=parameter_names, config=config,
        workers=worker_count(work), resume=work.resume,
    )  # fmt: skip
    with _planned(src, request) as made:
        warn(made.warnings)
        return replace(run_whole(made, work), path=target, warnings=made.warnings, left_out=made.left_out)


def plan_checkpoint(
    src: str | os.PathLike[str] | Location,
    dst: str | os.PathLike[str] | Location,
    layouts: Layouts | None = None,
    *,
    to: Target | None = None,
    uneven: UnevenRule = "even",
    dtype: Any = None,
    overflow: Overflow = "refuse",
    rename: Mapping[str, str] | Sequence[tuple[str, str]] = (),
    rewrites: Rewrites | None = None,
    only: str | None = None,
    drop: str | None = None,
    metadata: Mapping[str, str] | None = None,
    max_file_bytes: int = FILE_BYTES,
    replicas: Literal["check", "first"] = "check",
    memory: int = MEMORY,
    task_bytes: int | None = None,
    strict: bool = False,
    rank: int | None = None,
    padded: bool = False,
    parameter_names: Sequence[str] | None = None,
    config: Config | None = None,
) -> CheckpointPlan:
    """Plan what `reshard_checkpoint` does, as tasks that can be run anywhere, and write nothing.

    Args:
        src: As for `reshard_checkpoint`, like all that follow; a path or URL that all machines see that run a part.
        dst: The new file or folder, which they all see too; or a new folder's URL.
        layouts: The cuts of the tensors.
        to: The format of `dst`.
        uneven: The rule by which a dim that does not divide is cut.
        dtype: The new dtype of floating-point tensors.
        overflow: The fate of values beyond the range of `dtype`.
        rename: Regular expressions and what replaces their matches in names.
        rewrites: Tensors that are named, packed, stacked, transposed or padded differently.
        only: A regular expression: the tensors in whose (new) names it is found.
        drop: A regular expression: the tensors and values in whose names in the source it is found are left out.
        metadata: Texts for the headers' `__metadata__`.
        max_file_bytes: For `"hf"` and `"vllm"`, the most bytes of tensors in a file.
        replicas: `"check"` compares pieces that are stored more than once, `"first"` takes the first of them.
        memory: Bytes that `reshard_checkpoint` would have to convert and decode in; tasks are told when they run.
        task_bytes: The most bytes that a task writes; by default 64 MiB, and less for small checkpoints. Where a
            task makes an object, as in stores but S3, `max_file_bytes` limits those of `"hf"`.
        strict: Whether to refuse what the plan's `warnings` would say.
        rank: With `to="ranks"`, the only rank whose file is written.
        padded: Whether ranks' tensors in `src` may be padded.
        parameter_names: The names of the parameters of PyTorch's optimizers in `src`, in the order of their numbers.
        config: The model's configuration, in place of the `config.json` in the folder of `src`.

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
    ...         print(CheckpointPlan.load(Path(folder, "halves.swplan")).run((part, 2)), "tasks")
    ...     report = plan.commit()
    ...     with open_checkpoint(halves) as checkpoint:
    ...         print(int(checkpoint.read("w").sum()) == 2**16 * (2**17 - 1))
    1 tasks
    2 tasks
    True
    """
    target = location_of(dst)
    request = Request.of(
        target, layouts=placing_of(layouts), to=to, uneven=uneven, dtype=dtype, overflow=overflow,
        names={"rename": rename, "rewrites": rewrites, "only": only, "drop": drop},
        metadata=metadata, max_file_bytes=max_file_bytes, memory=memory, replicas=replicas, task_bytes=task_bytes,
        strict=strict, rank=rank, padded=padded, parameter_names=parameter_names, config=config, is_written=False,
    )  # fmt: skip
    with _planned(src, request) as made:
        if made.is_finished():
            raise taken(target)
        warn(made.warnings)
        return made


@contextmanager
def _planned(src: str | os.PathLike[str] | Location, request: Request) -> Iterator[CheckpointPlan]:
    """Plan a request on a source, which is open, and its destination locked, until the plan has been run."""
    source, target = location_of(src), request.target
    refuse_source(source, target)
    with uncollected():
        opened = open_checkpoint(source, padded=request.padded, parameter_names=request.parameter_names)
    with (
        opened as checkpoint,
        locked(target) if request.is_written else nullcontext(),
        opened_scratch(target, is_written=request.is_written, overflow=request.overflow) as scratch,
    ):
        claim_name(target, is_written=request.is_written, resume=request.resume)
        refuse_unreadable(checkpoint, request.naming)
        planning = _Preparation(request, source, checkpoint)
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
        yield made.noted(
            warnings=(*planning.doubts, *scratch.warnings),
            left_out=tuple(planning.left_out),
            obstacle=obstacle,
            is_sampled=request.is_written or is_sampled(source),
        )


class _Preparation:
    """The way from a request to a plan, and the findings on it.

    Attributes:
        doubts: Things that look wrong, a sentence each.
        left_out: Things that do not arrive.
        obstacles: Why no task can be run by itself.
    """

    def __init__(self, request: Request, source: Location, checkpoint: StoredCheckpoint) -> None:
        self._request, self._source, self._checkpoint = request, source, checkpoint
        self.doubts: list[str] = []
        self.left_out: list[LeftOut] = []
        self.obstacles: list[str] = []
        self._along: dict[str, bytes] = {}
        self._config = (
            _configuration(source, checkpoint.format, self.doubts)
            if request.config is None
            else read_config(request.config)
        )

    def plan(self, scratch: ScratchFile) -> CheckpointPlan:
        """Plan the new checkpoint; with a dry scratch file nothing is written, and what looks wrong is found.

        Raises:
            DoubtsError: if something does, and the request is strict.
            LayoutError, TypeError, ParseError, OSError: as `reshard_checkpoint`.
        """
        request, checkpoint, naming = self._request, self._checkpoint, self._request.naming
        tensors, weights, dropped = renamed_tensors(
            checkpoint, naming, request.dtype, partial(self._stored, scratch), self._config
        )
        kept = chosen(tensors, naming, checkpoint.path)
        names, wanted = self._wanted(scratch, kept, weights)
        form = chosen_form(request, wanted)
        values, dropped_values = kept_values(checkpoint, naming, tensors)
        copied = {old: new for old, new in values.items() if form == "dcp" and checkpoint.objects[old].extent}
        if scratch.is_dry:
            self.doubts += checkpoint.doubts
            self.doubts += idle_renames(checkpoint, naming.rename)
            lost, said = doubts_about(
                request.layouts, request.uneven, form, wanted, tensors, ruled_tensors(kept, weights)
            )
            self.doubts += said
            self.doubts += [note for note in (naming.rewrites or Rewrites())._notes if note not in said]
            losses = dropped_by_rules(dropped, dropped_values, names_of(checkpoint))
            if homeless := [old for old in values if old not in copied]:
                losses.append(without_a_place(homeless, form, names_of(checkpoint)))
            losses += states_alone(kept, checkpoint)
            losses += cast_weights(outline_of(kept), weights, request.layouts, self._config)
            self._note(lost, losses)
            self.left_out += _asked(checkpoint, tensors, kept, (*values, *dropped_values), naming.unwanted)
            self._take_along(form, weights)
            if request.strict and self.doubts:
                raise DoubtsError(self.doubts)
        for old, name in copied.items():
            names[old] = name
            wanted.append(wanted_object(name, checkpoint.objects[old]))
        scratch.finish()
        paths = key_paths(checkpoint, names)
        with uncollected():
            return plan_form(request, wanted, paths, self._along)

    def _stored(self, scratch: ScratchFile, old: str, new: str, partition: Partition | SharedTiling | None) -> Wanted:
        """A stored tensor, to be copied from where it is, or put into the scratch file if it cannot be."""
        request, tensor = self._request, self._checkpoint[old]
        is_other = is_converted(tensor, request.dtype)
        if tensor.is_addressable and not is_other:
            return wanted_stored(new, tensor, partition)
        self.obstacles.append(
            f"tensor {shown(old)} is converted; tasks copy bytes: reshard_checkpoint converts it first"
            if is_other
            else f"tensor {shown(old)} is compressed in the source, so no task can copy a part of it; "
            "reshard_checkpoint puts it together first"
        )
        return scratch.tensor(new, tensor, request.dtype, partition, request.memory, compare=request.compares)

    def _wanted(
        self, scratch: ScratchFile, kept: Mapping[str, Assembled], weights: Components
    ) -> tuple[dict[str, str], list[Wanted]]:
        """The tensors to be written; and those that go as they are, by their names in the source."""
        request, layouts = self._request, self._request.layouts
        names: dict[str, str] = {}
        wanted, fine = [], 0
        refuse_unmatched(layouts, [name for name, _, _ in ruled_tensors(kept, weights)])
        components = component_partitions(weights, outline_of(kept), layouts, request.uneven)
        for name, made in kept.items():
            partition = components.get(name) or partition_for(name, made.shape, layouts, request.uneven)
            if made.stored is not None:
                names[made.stored] = name
                wanted.append(self._stored(scratch, made.stored, name, partition))
            elif not made.is_scattered:
                wanted.append(made.wanted(name, partition))
            elif request.is_written or (fine := fine + made.expected) > _MOST_FINE:
                self.obstacles.append(
                    f"tensor {shown(name)} and others in short runs have {fine} of them, and a plan has at "
                    f"most {_MOST_FINE}; reshard_checkpoint puts it together first"
                )
                wanted.append(scratch.assembled(name, made, partition, request.memory))
            else:
                wanted.append(made.wanted(name, partition))
        return names, wanted

    def _note(self, lost: Iterable[LeftOut], losses: list[LeftOut]) -> None:
        """Note tensors that do not arrive, by the rules or otherwise, and a `drop` that is found in no name."""
        checkpoint, unwanted = self._checkpoint, self._request.naming.unwanted
        unread = beside(self._source, checkpoint, unwanted)
        losses += unread
        self.doubts += [str(each) for each in losses if each.kind != "asked"]
        self.left_out += [*lost, *losses]
        there = [*names_of(checkpoint), *(name for each in unread for name in each.names)]
        if unwanted is not None and not any(map(unwanted.is_found, there)):
            self.doubts.append(f"drop is {shown(unwanted.pattern)}, which is found in no name of {checkpoint.path}")

    def _take_along(self, form: str, weights: Components) -> None:
        """Take the files that go along with a model, and the configuration that is given."""
        request, folder = self._request, _folder_of(self._source)
        if not WRITTEN[form].takes_files or request.rank is not None:
            return
        if self._checkpoint.format in _FOLDERS and folder is not None:
            found, left = companions_of(folder)
            self._along.update(found)
            self.doubts += left
        if request.config is not None:
            self._along["config.json"] = config_text(request.config)
            method = quantization_of(self._config).get("quant_method")
            if method is not None and not weights.tensors:
                self.doubts.append(
                    f"config says that weights are quantized by {shown(method)}, but none is; loaders will "
                    "look for their scales: remove its quantization_config"
                )


def _asked(
    checkpoint: StoredCheckpoint,
    tensors: Mapping[str, Assembled],
    kept: Mapping[str, Assembled],
    values: Collection[str],
    unwanted: NamePattern | None,
) -> list[LeftOut]:
    """List the tensors and values that are left out because of `only` and `drop`; not these `values`."""
    sizes = {} if unwanted is None else {
        name: tensor.nbytes for name, tensor in checkpoint.items() if unwanted.is_found(name)
    }  # fmt: skip
    sizes |= {name: nbytes_of(made) for name, made in tensors.items() if name not in kept}
    known = set(values)
    return asked_for(sizes, [name for name in (*checkpoint.objects, *checkpoint.unreadable) if name not in known])


def _folder_of(source: Location) -> Location | None:
    """The folder that a source is, or whose index it is; None for one file, around which anything may lie."""
    if source.is_dir():
        return source
    return source.parent if source.name.endswith(".index.json") else None


def _configuration(source: Location, form: str, doubts: list[str]) -> Mapping[str, Any]:
    """Return the configuration in a model's folder; around anything else `config.json` may be of something else.

    Raises:
        ParseError: if that of a model's folder is not an object of JSON.
    """
    try:
        return config_of(source)
    except (ParseError, PermissionError) as error:
        if form in _FOLDERS and _folder_of(source) is not None:
            raise
        doubts.append(f"{error}; it is left aside")
        return {}


#: The most pieces of tensors in short runs that a plan has, each with a row of a hundred bytes or so.
_MOST_FINE = 1 << 20
#: The formats of folders whose files beside the tensors say what model it is.
_FOLDERS = ("safetensors", "torch", "sharded", "ranks", "vllm")
