"""Manifests of checkpoints: the boxes that each of its files holds."""

from __future__ import annotations

import os
from typing import Any

from ..._arguments import is_true
from ...deploy.manifest import Manifest, ManifestTensor
from ...tiling import Tiling
from ..tensors.checkpoint import StoredCheckpoint
from ..tensors.digests import tensor_digests

__all__ = ["manifest_of"]


def manifest_of(checkpoint: StoredCheckpoint, *, digests: bool = False) -> Manifest:
    """Return the boxes of tensors that each file of a checkpoint holds, according to its metadata.

    Args:
        checkpoint: an open checkpoint; no tensor is read.
        digests: whether to digest all tensors, which reads all their bytes; see `tensor_digests`.

    Raises:
        TypeError: if `checkpoint` is not an open checkpoint.
        LayoutError: if files hold parts of each other's boxes.

    Holders are files, named by their paths from the folder of the checkpoint. A file holds one box of a tensor, or
    several one after the other.

    >>> import tempfile
    >>> import numpy as np
    >>> from shardwise import DeviceMesh, TensorLayout, open_checkpoint, save_checkpoint
    >>> cut = TensorLayout(("x",), DeviceMesh((2,), ("x",)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save_checkpoint(f"{folder}/cut", {"w": np.arange(4)}, {"w": cut})
    ...     with open_checkpoint(f"{folder}/cut") as checkpoint:
    ...         for holder in manifest_of(checkpoint)["w"].holders:
    ...             print(holder, manifest_of(checkpoint)["w"].pieces(holder)[0].box)
    shard-00001-model-00001-of-00001.safetensors (slice(0, 2, None),)
    shard-00002-model-00001-of-00001.safetensors (slice(2, 4, None),)
    """
    if not isinstance(checkpoint, StoredCheckpoint):
        raise TypeError(f"checkpoint must be an open checkpoint (see open_checkpoint), got {type(checkpoint).__name__}")
    sums = tensor_digests(checkpoint) if is_true("digests", digests) else {}
    made: dict[Any, Tiling] = {}
    found = {}
    for name, tensor in checkpoint.items():
        boxes: dict[str, list[Any]] = {}
        for piece in (*tensor.pieces, *tensor.replicas):
            boxes.setdefault(_name_of(piece.path, checkpoint), []).append(piece.bounds)
        key = tensor.shape, tuple((file, tuple(own)) for file, own in boxes.items())
        if key not in made:
            given = {file: own[0] if len(own) == 1 else own for file, own in boxes.items()}
            made[key] = Tiling.from_boxes(tensor.shape, given, replicas=True)
            made[key].check()
        digest = f"{sums[name]:032x}" if name in sums else None
        found[name] = ManifestTensor(tensor.shape, tensor.dtype, made[key], digest=digest)
    return Manifest(found)


def _name_of(path: Any, checkpoint: StoredCheckpoint) -> str:
    """Return the path of a file, or a URL, relative to the folder of the checkpoint, or of its only file."""
    text = str(path).replace(os.sep, "/")
    for around in (checkpoint.path, checkpoint.path.parent):
        folder = str(around).replace(os.sep, "/").rstrip("/") + "/"
        if text.startswith(folder):
            return text[len(folder) :]
    return text
