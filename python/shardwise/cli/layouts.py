"""The layouts of a rules file: a layout map, or a deployment."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..deploy.deployment import Deployment
from ..deploy.read import layouts_of
from ..mesh import DeviceMesh
from ..rules.layout_map import LayoutMap
from ..rules.numbers import Config, reading_for
from ..rules.toml import read_document
from ..store.data.location import location_of
from ..store.tensors.model_config import config_beside
from .notation import parse_mesh

__all__ = ["check_for", "config_for", "layouts_alone", "read_layouts", "source_layouts"]


def read_layouts(rules: Path, mesh: DeviceMesh | None, config: Config | None) -> LayoutMap | Deployment:
    """Read a rules file: a layout map, or a deployment, which has meshes of its own and takes no other."""
    return layouts_of(read_document(rules), mesh, config)


def config_for(options: argparse.Namespace, checkpoint: str) -> Config | None:
    """Return the model's configuration: that of `--config`, or the one next to a checkpoint; `None` without any."""
    given: Path | None = options.config
    return given or config_beside(location_of(checkpoint))


def check_for(mesh: DeviceMesh | None, text: str | None) -> None:
    """Refuse a mesh together with a preset, which has one."""
    if text is not None and mesh is not None:
        raise ValueError(f"--mesh and --for exclude each other: {text} says how many devices there are")


def source_layouts(options: argparse.Namespace, source: str) -> LayoutMap | Deployment | None:
    """Return the layouts of bare files of ranks, made from the source's rules; `None` without `--source-mesh`."""
    if options.source_mesh is None:
        return None
    if options.source_rules is None:
        raise ValueError(
            "--source-mesh gives the mesh of the ranks; give --source-rules too, which say how their tensors are cut"
        )
    with reading_for(source):
        return read_layouts(options.source_rules, parse_mesh(options.source_mesh), config_for(options, source))


def layouts_alone(options: argparse.Namespace) -> LayoutMap | Deployment | None:
    """Return the layouts of bare files for a command that undoes no rewrites."""
    if options.source_mesh is None and options.source_rules is not None:
        raise ValueError("--source-rules says how the files of ranks are cut; give their mesh too, with --source-mesh")
    return source_layouts(options, options.source)
