"""The layouts of a rules file: a layout map, or a deployment."""

from __future__ import annotations

from pathlib import Path

from ..deploy.deployment import Deployment
from ..deploy.read import layouts_of
from ..mesh import DeviceMesh
from ..rules.layout_map import LayoutMap
from ..rules.numbers import Config
from ..rules.toml import read_document

__all__ = ["check_for", "read_layouts"]


def read_layouts(rules: Path, mesh: DeviceMesh | None, config: Config | None) -> LayoutMap | Deployment:
    """Read a rules file: a layout map, or a deployment, which has meshes of its own and takes no other."""
    return layouts_of(read_document(rules), mesh, config)


def check_for(mesh: DeviceMesh | None, text: str | None) -> None:
    """Refuse a mesh together with a preset, which has one."""
    if text is not None and mesh is not None:
        raise ValueError(f"--mesh and --for exclude each other: {text} says how many devices there are")
