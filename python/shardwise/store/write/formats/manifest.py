"""The manifest of a checkpoint: its tensors and how they are cut, and the size and digests of each file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ...._text import shown
from ...sharded import sealed
from .files import Named, TargetFile

__all__ = ["differing_replica", "manifest_text"]


class _Described(Named, Protocol):
    """A tensor of a plan, or one that is wanted."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""


def manifest_text(
    said: Mapping[str, Any],
    tensors: Sequence[_Described],
    digests: Sequence[int],
    files: Sequence[TargetFile],
    sizes: Sequence[int],
    texts: Mapping[str, bytes],
) -> bytes:
    """Write the manifest.

    Args:
        said: The format, the aliases, and under `"tensors"` how each tensor is cut.
        tensors: The tensors, and values that are not tensors, which are left out.
        digests: One for each tensor.
        files: The files, with the digests of what they hold.
        sizes: The bytes of each.
        texts: The other files, by name.
    """
    manifest: dict[str, Any] = {"format": "shardwise", "version": 1, **said}
    manifest["tensors"] = {
        tensor.name: {
            "dtype": tensor.dtype.stated,
            "shape": tensor.dtype.element_shape(tensor.shape),
            "digest": f"{digest:032x}",
            **more,
        }
        for tensor, more, digest in zip(tensors, said["tensors"], digests, strict=True)
        if not tensor.is_object
    }
    manifest["files"] = {
        file.name: {
            "size": size,
            **file.facts(),
            "digests": {
                tensors[slot.tensor].name: f"{file.digests.get(slot.tensor, 0):032x}"
                for slot in file.slots
                if not tensors[slot.tensor].is_object
            },
        }
        for file, size in zip(files, sizes, strict=True)
    } | {name: {"size": len(text), "sha256": hashlib.sha256(text).hexdigest()} for name, text in texts.items()}
    return sealed(json.dumps(manifest, indent=1, ensure_ascii=False).encode())


def differing_replica(name: str, shape: tuple[int, ...], path: object, element: int) -> str:
    """Say which element of a replica differs, by its offset in the tensor."""
    index = tuple(map(int, np.unravel_index(element, shape)))
    return (
        f"tensor {shown(name)}: replicas disagree; the first element of {path} that differs is {index}; "
        'replicas="first" takes the first of them'
    )
