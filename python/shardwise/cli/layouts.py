"""The layouts of a rules file: a layout map, or a deployment."""

from __future__ import annotations

from pathlib import Path

from ..deploy.deployment import Deployment
from ..deploy.toml import is_deployment
from ..mesh import DeviceMesh
from ..rules.layout_map import LayoutMap
from ..rules.numbers import Config

__all__ = ["read_layouts"]


def read_layouts(rules: Path, mesh: DeviceMesh | None, config: Config | None) -> LayoutMap | Deployment:
    """Read a rules file: a layout map, or a deployment, which has meshes of its own and takes no other."""
    if not is_deployment(rules):
        return LayoutMap.from_toml(rules, mesh, config=config)
    if mesh is not None:
        raise ValueError(f"--mesh is given, but {rules} is of a deployment, which has meshes of its own")
    return Deployment.from_toml(rules, config=config)
