"""The layouts of a rules file: a layout map, or a deployment."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..deploy.deployment import Deployment
from ..deploy.read import layouts_of
from ..errors import LayoutError
from ..mesh import DeviceMesh
from ..rules.layout_map import LayoutMap
from ..rules.numbers import Config
from ..rules.shipped import called
from ..rules.toml import axes_said, read_document

__all__ = ["check_for", "no_mesh", "read_layouts", "reading_for"]


@contextmanager
def reading_for(source: str) -> Iterator[None]:
    """Say that a checkpoint is not there, rather than that its configuration lacks a number."""
    try:
        yield
    except LayoutError:
        if "://" not in source and not Path(source).exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source) from None
        raise


def read_layouts(rules: Path, mesh: DeviceMesh | None, config: Config | None) -> LayoutMap | Deployment:
    """Read a rules file: a layout map, or a deployment, which has meshes of its own and takes no other."""
    return layouts_of(read_document(rules), mesh, config)


def check_for(mesh: DeviceMesh | None, text: str | None) -> None:
    """Refuse a mesh beside a preset, which has one."""
    if text is not None and mesh is not None:
        raise ValueError(f"--mesh and --for exclude each other: {text} says how many devices there are")


def no_mesh(rules: Path, layouts: LayoutMap | Deployment) -> ValueError:
    """Say that a mesh is missing, and what its axes are called."""
    said = axes_said(layouts.rules().values()) if isinstance(layouts, LayoutMap) else ""
    return ValueError(f"--mesh is missing, and {called(rules)} has no mesh of its own{said}")
