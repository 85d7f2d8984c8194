"""`save_checkpoint`: a checkpoint from tensors in memory."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from ...._arguments import is_true
from ....errors import LayoutError, ShardwiseWarning
from ....layout import UnevenRule
from ....mesh import DeviceMesh
from ....placing import Layouts
from ...data.location import Location, location_of
from ...rewritten.partitions import DescribedTensors
from ...rewritten.wanted import wanted_arrays
from ..forms.doubts import DoubtsError, doubts_about
from ..forms.forms import Target
from ..forms.nested import with_masters
from ..places import locked
from ..places.report import WriteReport
from ..places.work import MEMORY, Work
from ..run.run import run_whole
from .planner import OF_NESTED, chosen_form, form_tensors, plan_form
from .request import FILE_BYTES, Request, placing_over

__all__ = ["save_checkpoint", "warn"]


def save_checkpoint(
    path: str | os.PathLike[str] | Location,
    tensors: Mapping[str, Any],
    layouts: Layouts | None = None,
    *,
    mesh: DeviceMesh | None = None,
    to: Target | None = None,
    uneven: UnevenRule = "even",
    metadata: Mapping[str, str] | None = None,
    max_file_bytes: int = FILE_BYTES,
    memory: int = MEMORY,
    threads: int | None = None,
    sync: bool = True,
    check: bool = True,
    progress: Callable[[int, int], object] | None = None,
    strict: bool = False,
) -> WriteReport:
    """Write tensors in memory as a checkpoint.

    Args:
        path: The new file or folder, or a URL (`s3://`, `gs://`, `memory://`); nothing may be there.
        tensors: Arrays by name, with any strides, and `ShardedArray`s. Names that share one array, with the same shape
            and strides, are tied: the elements are written once.
        layouts: The cuts of the tensors, for formats other than `"safetensors"` and `"hf"`: a `LayoutMap`, a
            `Deployment` or a mapping by name. A `ShardedArray` that it does not name keeps its own partition; any other
            tensor is written whole.
        mesh: For `"fsdp2"`, the devices, in place of layouts.
        to: The format. `"safetensors"` is a file; `"hf"`, a folder in Hugging Face's format. In `"sharded"`, a folder,
            every shard is stored once, in a file of a device that owns it; PyTorch's `HuggingFaceStorageReader` loads
            it too. `"dcp"` stores the same for `torch.distributed.checkpoint`, which loads it onto any mesh. `"torch"`
            is a file of `torch.save`; `"fsdp2"`, a folder with the files of each rank of FSDP2; `"universal"`,
            DeepSpeed's universal checkpoint. `"ranks"` is a folder with a file for each device, which has all that the
            device holds, and with `ranks.json`, which lists the files; `"vllm"` is the same for the sharded loaders of
            vLLM and SGLang. By default a file if the path ends in `.safetensors`, else sharded if anything is cut, else
            `"hf"`.
        uneven: The rule by which a dim that does not divide is cut.
        metadata: Texts for the headers' `__metadata__`; `"dcp"` has no place for them.
        max_file_bytes: For `"hf"` and `"vllm"`, the most bytes of tensors in a file.
        memory: Bytes for the buffers of all threads.
        threads: The number of threads; one per core if left out.
        sync: Whether to wait until the data is on the disk before the checkpoint gets its name.
        check: Whether to compare replicas of sharded arrays; `False` takes the first.
        progress: Called now and then with the bytes that are done and the bytes in all.
        strict: Whether every warning of the report is an error, as in `reshard_checkpoint`.

    Warns:
        ShardwiseWarning: for each of the report's `warnings`, before anything is written.

    Raises:
        FileExistsError: if something is there under the new name.
        LayoutError: if a layout does not fit, replicas differ, or the memory is too little; if a deployment has no rule
            for a tensor and no default; with `strict`, on any warning.
        TypeError: if a value is not an array, or has a dtype that the format cannot hold.
        ParseError: if an array is memory-mapped from a file that is cut short or written to meanwhile (on Linux).
        OSError: if a file cannot be written, or the disk is full.

    The checkpoint gets its name only when it is complete and on the disk; if anything fails before that, nothing is
    left.

    >>> import tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> from shardwise import open_checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = save_checkpoint(Path(folder, "model.safetensors"), {"w": np.arange(6).reshape(2, 3)[:, 1:]})
    ...     with open_checkpoint(report.path) as checkpoint:
    ...         print(checkpoint.read("w").tolist())
    [[1, 2], [4, 5]]
    """
    work = Work(memory=memory, threads=threads, sync=is_true("sync", sync), progress=progress)
    request = Request(
        location_of(path), placing_over(layouts, mesh, to), to, uneven, metadata=metadata,
        max_file_bytes=max_file_bytes, memory=memory, strict=strict,
    )  # fmt: skip
    arrays = wanted_arrays(tensors, check=is_true("check", check))
    described = DescribedTensors.of_arrays(arrays)
    wanted = described.cut(arrays, request.layouts, uneven)
    form = chosen_form(request, is_cut=any(each.partition is not None for each in wanted))
    if form == "megatron":
        raise LayoutError("arrays are not written as 'megatron'; save them as 'dcp', and reshard that")
    trained = with_masters(wanted) if form in OF_NESTED else wanted
    made = plan_form(request, form_tensors(request, form, trained))
    lost, said = doubts_about(request.layouts, uneven, form, wanted, described.tensors, described.ruled)
    if request.strict and said:
        raise DoubtsError(said)
    warn(said)
    with locked(request.target):
        # As given; a plan's path is absolute.
        return replace(run_whole(made, work), path=request.target, warnings=tuple(said), left_out=tuple(lost))


def warn(messages: Iterable[str]) -> None:
    """Issue each message once as a ShardwiseWarning, attributed to the caller of the calling function."""
    for message in dict.fromkeys(messages):
        warnings.warn(message, ShardwiseWarning, stacklevel=3)
