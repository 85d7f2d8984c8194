"""Opening a checkpoint of any format, by the module that reads it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module

from ..._arguments import check_items, is_true
from ..._fork import importing
from ...errors import LayoutError
from ...placing import Layouts, placing_of
from ..data.location import Location, location_of
from ..tensors.checkpoint import StoredCheckpoint
from .known import BY_LAYOUTS, OPTIONS, known_form, no_optimizer

__all__ = ["open_checkpoint"]


def open_checkpoint(
    path: str | os.PathLike[str] | Location,
    *,
    part: bool = False,
    padded: bool = False,
    parameter_names: Sequence[str] | None = None,
    layouts: Layouts | None = None,
) -> StoredCheckpoint:
    """Open a checkpoint of any format: a mapping from names to stored tensors.

    Only indexes and headers are read. A tensor says its dtype, its shape, and which file holds which box of it;
    `read` copies any box of it, whatever the pieces are. No framework is imported, and nothing in a file is run.

    Args:
        path: A safetensors file or a folder of them in Hugging Face's format; a distributed checkpoint of PyTorch, also
            as safetensors; a folder of `model_world_size_W_rank_R.pt`, as trainers with FSDP write them; a folder of
            `torch_checkpointing`; a `.pt` or `.bin` file of `torch.save`; a folder of DeepSpeed's, or a universal one;
            a Megatron `torch_dist` checkpoint; an Orbax checkpoint, or a folder of its steps, whose last one is opened;
            Keras' `.weights.h5`, alone or sharded. Also a URL that fsspec knows, such as `s3://bucket/model`, or an
            `ObjectPath`, which takes options.
        part: Whether one file of a checkpoint in several may be opened alone. The tensors are then those of the file;
            a tensor that is cut has the shape of its part.
        padded: Whether each rank's tensors in `model_world_size_W_rank_R.pt` may be padded at the end to the first
            rank's length; the padding is not read. It has no effect on other checkpoints.
        parameter_names: The names of the parameters of PyTorch's optimizers in the order of their numbers, where a file
            has numbers only, and the model next to it does not settle which number has which name. In the program that
            made the optimizer they are `[names[p] for group in optimizer.param_groups for p in group["params"]]`, with
            `names = {p: name for name, p in model.named_parameters()}`.
        layouts: If given, `path` is a folder of bare files, one for each device of the layouts' mesh, in order, and
            each holds what the layouts give that device: Meta's `consolidated.00.pth`, engines' sharded states, or
            `mp_rank_00.pt`. The layouts must have a mesh of all devices.

    Raises:
        LayoutError: if `layouts` have no mesh of all devices, or do not fit a tensor, or are given with `padded` or
            `parameter_names`.
        OSError: if a file cannot be opened or read.
        ParseError: if the checkpoint is of no known format, or cannot be read; if it is a part of a checkpoint, whose
            other files are missing, or that should be opened as a whole; if a file does not follow its format, or the
            pieces of a tensor leave a gap or overlap. The message names the file and the tensor, or the byte.
        ImportError: if reading this format needs a library that is not installed.

    >>> import json, tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> header = json.dumps({"bias": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}).encode()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "model.safetensors")
    ...     data = np.arange(3, dtype="<f4").tobytes()
    ...     _ = file.write_bytes(len(header).to_bytes(8, "little") + header + data)
    ...     with open_checkpoint(file) as checkpoint:
    ...         print(checkpoint["bias"], checkpoint.read("bias", (slice(1, 3),)))
    <StoredTensor 'bias': float32 (3,), 1 piece> [1. 2.]
    """
    location = location_of(path)
    if layouts is not None and (padded or parameter_names is not None):
        raise LayoutError(
            "padded and parameter_names are for files that say how they are cut; with layouts, leave them out"
        )
    form = known_form(location) if layouts is None else BY_LAYOUTS
    takes = OPTIONS.get(form.module, ())
    if parameter_names is not None:
        check_items("parameter_names", parameter_names, str)
        if "parameter_names" not in takes:
            raise no_optimizer(location)
    given = {
        "part": part and not location.is_dir(),
        "padded": is_true("padded", padded),
        "parameter_names": parameter_names,
        "layouts": None if layouts is None else placing_of(layouts),
    }
    with importing:
        module = import_module(f".{form.module}", __package__)
    opened: StoredCheckpoint = module.open_form(location, **{name: given[name] for name in takes})
    opened.given = location
    return opened
