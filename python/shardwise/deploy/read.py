"""All that a rules file says: how tensors are cut, as a layout map or a deployment, and what is rewritten."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from typing import Any, TextIO

from ..errors import LayoutError
from ..mesh import DeviceMesh
from ..rules.layout_map import LayoutMap
from ..rules.numbers import Config
from ..rules.rewrites import Rewrites, read_quietly
from ..rules.shipped import called
from ..rules.toml import PLACING, Document, axes_said, read_document
from .deployment import Deployment

__all__ = ["layouts_of", "no_mesh", "read_rules"]


def read_rules(
    file: str | os.PathLike[str] | TextIO, device_mesh: DeviceMesh | None = None, *, config: Config | None = None
) -> tuple[LayoutMap | Deployment, Rewrites]:
    """Read all that a rules file says: how tensors are cut, and what is rewritten.

    Args:
        file: The path of the file, the name of one of the package's (`example_rules`), or an open text file.
        device_mesh: The mesh of the layout map, instead of the one that the file may have.
        config: The model's configuration, for the file's `[numbers]`; see `LayoutMap.from_toml`.

    Returns:
        A `LayoutMap`, or a `Deployment` if the file describes one; and the `Rewrites`, which are false if there are
        none.

    Raises:
        ParseError, LayoutError, MeshError, OSError: as for `LayoutMap.from_toml`, `Deployment.from_toml` and
            `Rewrites.from_toml`; a LayoutError if a mesh is given for the file of a deployment.

    >>> import shardwise as sw
    >>> config = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256}
    >>> layouts, rewrites = sw.read_rules("vllm/llama", sw.DeviceMesh((8,), ("tp",)), config=config)
    >>> layouts["model.layers.0.mlp.down_proj.weight"].axes, bool(rewrites)
    ((None, 'tp'), True)
    """
    document: Any = read_document(file)
    # What looks wrong about the file is said of the layouts already.
    return layouts_of(document, device_mesh, config), read_quietly(document, config)


def layouts_of(
    document: Document,
    device_mesh: DeviceMesh | None,
    config: Config | None,
    world: Sequence[Hashable] | None = None,
) -> LayoutMap | Deployment:
    """Read the layout map or the deployment that a rules file describes; see `read_rules`.

    `world` has the labels of a deployment's devices, instead of those that the file gives.
    """
    read: Any = document
    if not PLACING & document.tables.keys():
        return LayoutMap.from_toml(read, device_mesh, config=config)
    if device_mesh is not None:
        raise LayoutError(
            f"device_mesh is given, but {document.source} is of a deployment, which has meshes of its own"
        )
    return Deployment.from_toml(read, config=config, world=world)


def no_mesh(rules: object, layouts: LayoutMap | Deployment) -> LayoutError:
    """Return the message that a mesh is missing, with the names of its axes."""
    said = axes_said(layouts.rules().values()) if isinstance(layouts, LayoutMap) else ""
    return LayoutError(f"mesh is missing, and {called(rules)} has no mesh of its own{said}")
