"""The layouts of a rules file: a layout map, or a deployment."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..deploy.deployment import Deployment
from ..deploy.toml import is_deployment
from ..errors import LayoutError
from ..mesh import DeviceMesh
from ..rules.layout_map import LayoutMap
from ..rules.numbers import Config

__all__ = ["read_layouts", "reading_for"]


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
    if not is_deployment(rules):
        return LayoutMap.from_toml(rules, mesh, config=config)
    if mesh is not None:
        raise ValueError(f"--mesh is given, but {rules} is of a deployment, which has meshes of its own")
    return Deployment.from_toml(rules, config=config)
