"""The picture of a deployment: each of its meshes, with the rules that use it."""

from __future__ import annotations

from typing import Protocol

from ..mesh import DeviceMesh
from ..show.picture import Picture, View, short
from ..show.views import mesh_picture
from .rule import DeploymentRule
from .world import WORLD

__all__ = ["deployment_picture"]

#: So many rules of a mesh are listed.
_MOST_RULES = 12


class Deployed(Protocol):
    """The members of a deployment that a picture needs."""

    @property
    def world(self) -> DeviceMesh: ...
    @property
    def meshes(self) -> dict[str, DeviceMesh]: ...
    @property
    def default(self) -> DeploymentRule | None: ...
    def rules(self) -> dict[str, DeploymentRule]: ...


def deployment_picture(deployment: Deployed) -> Picture:
    """Give the picture of a deployment: a view of each mesh, below which are the rules of its tensors."""
    rules = dict(deployment.rules())
    if deployment.default is not None:
        rules["everything else"] = deployment.default
    only = next(iter(deployment.meshes), WORLD)
    meshes = dict(deployment.meshes)
    if any(rule.mesh == WORLD for rule in rules.values()) or not meshes:
        meshes[WORLD] = deployment.world
    views = []
    for name, mesh in meshes.items():
        own = [_rule_text(key, rule) for key, rule in rules.items() if (rule.mesh or only) == name]
        if len(own) > _MOST_RULES:
            own[_MOST_RULES - 1 :] = [f"and {len(own) - _MOST_RULES + 1} more rules"]
        for view in mesh_picture(mesh).views:
            first, *more = view.captions
            views.append(View((f"{name}: {first}", *more), view.panels, (*view.notes, *own)))
    size = deployment.world.size
    title = f"deployment on {size:,} device{'s' * (size != 1)}"
    return Picture(title, "; ".join((title, *(view.captions[0] for view in views))) + ".", tuple(views))


def _rule_text(key: str, rule: DeploymentRule) -> str:
    at = ", ".join(f"{axis} = {where if isinstance(where, (str, int)) else list(where)}" for axis, where in rule.at)
    return short(f"{key}: {rule.layout.axes or 'whole'}{f' at {at}' if at else ''}", 100)
