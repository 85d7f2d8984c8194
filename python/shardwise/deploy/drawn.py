"""The picture of a deployment: each of its meshes, with what every device holds, and the rules that use it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

from ..errors import ShardwiseError
from ..mesh import DeviceMesh
from ..show.names import brief
from ..show.picture import Panel, Picture, Tile, View, short
from ..show.views import axes_text, mesh_picture
from .ready_rule import ReadyRule
from .rule import DeploymentRule
from .world import WORLD

__all__ = ["deployment_picture"]

#: The most rules of a mesh that are listed.
_MOST_RULES = 12
#: A field that has more values without leaving an axis is not listed: nothing says how many there are.
_MOST_VALUES = 4096
#: The last word before a field: the things that it counts.
_COUNTED = r"([A-Za-z][A-Za-z_]*)[^A-Za-z]*(?:\{{{0}\}}|\(\?P<{0}>)"

#: The numbers of layers, of experts and so on at each coordinate of an axis, by what they are.
_FieldValues = dict[int, dict[int, dict[str, list[int]]]]


class Deployed(Protocol):
    """The members of a deployment that a picture needs."""

    @property
    def world(self) -> DeviceMesh: ...
    @property
    def meshes(self) -> dict[str, DeviceMesh]: ...
    @property
    def default(self) -> DeploymentRule | None: ...
    def rules(self) -> dict[str, DeploymentRule]: ...


def deployment_picture(deployment: Deployed, ready: Iterable[ReadyRule] = ()) -> Picture:
    """Return the picture of a deployment: its meshes, on each device the layers and experts there, and the rules below.

    Args:
        deployment: its meshes and rules, to be drawn.
        ready: its rules, ready to be applied, from which it is known what is where.
    """
    rules = dict(deployment.rules())
    if deployment.default is not None:
        rules["everything else"] = deployment.default
    only = next(iter(deployment.meshes), WORLD)
    meshes = dict(deployment.meshes)
    if any(rule.mesh == WORLD for rule in rules.values()) or not meshes:
        meshes[WORLD] = deployment.world
    used = list(ready)
    views = []
    for name, mesh in meshes.items():
        own = [_rule_text(key, rule) for key, rule in rules.items() if (rule.mesh or only) == name]
        if len(own) > _MOST_RULES:
            own[_MOST_RULES - 1 :] = [f"and {len(own) - _MOST_RULES + 1} more rules"]
        held = _held([rule for rule in used if rule.mesh == mesh and (rule.rule.mesh or only) == name])
        for view in mesh_picture(mesh).views:
            first, *more = view.captions
            panels = tuple(_with_contents(panel, held, mesh) for panel in view.panels)
            views.append(View((f"{name}: {first}", *more), panels, (*view.notes, *own)))
    size = deployment.world.size
    title = f"deployment on {size:,} device{'s' * (size != 1)}"
    return Picture(title, "; ".join((title, *(view.captions[0] for view in views))) + ".", tuple(views))


def _rule_text(key: str, rule: DeploymentRule) -> str:
    at = ", ".join(f"{axis} = {where if isinstance(where, (str, int)) else list(where)}" for axis, where in rule.at)
    return short(f"{key}: {axes_text(rule.layout) if rule.layout.axes else 'whole'}{f' at {at}' if at else ''}", 100)


def _held(rules: Iterable[ReadyRule]) -> _FieldValues:
    """Return, by the rules of a mesh, the values of fields that lead to each coordinate of each axis."""
    found: _FieldValues = {}
    for rule in rules:
        for axis, coordinates, fields in rule.at:
            if len(fields) != 1 or rule.pattern is None:
                continue
            counted = re.search(_COUNTED.format(fields[0]), rule.pattern.pattern)
            noun = counted[1] if counted else fields[0]
            for value, places in _values(coordinates, fields, rule.numbers):
                for place in places:
                    values = found.setdefault(axis, {}).setdefault(place, {}).setdefault(noun, [])
                    if value not in values:
                        values.append(value)
    return found


def _values(coordinates: Any, fields: tuple[str, ...], numbers: Mapping[str, Any]) -> Iterator[tuple[int, Any]]:
    """Yield the values of a field, from 0 on, that lead to coordinates of the axis; none if they never end."""
    found = []
    for value in range(_MOST_VALUES + 1):
        try:
            found.append((value, coordinates.of((str(value),), fields, numbers)))
        except ShardwiseError:
            break
    yield from found if len(found) <= _MOST_VALUES else ()


def _with_contents(panel: Panel, held: _FieldValues, mesh: DeviceMesh) -> Panel:
    """Return the panel with the layers and experts of each device below the device's name."""
    if not held:
        return panel
    return replace(panel, tiles=tuple(_tile(tile, held, mesh) for tile in panel.tiles))


def _tile(tile: Tile, held: _FieldValues, mesh: DeviceMesh) -> Tile:
    place = [int(number) for number in re.findall(r"[0-9]+", tile.place)]
    if len(place) != mesh.ndim or ":" in tile.place:  # A tile that stands for several devices.
        return tile
    lines = [
        brief([f"{noun} {value}" for value in sorted(values)])
        for axis, at in sorted(held.items())
        for noun, values in at.get(place[axis], {}).items()
    ]
    if not lines:
        return tile
    labels = ((tile.labels[0][0], *(short(line, 18) for line in lines)), *tile.labels)
    naming = None if tile.naming is None else tile.naming + 1
    return replace(tile, labels=labels, naming=naming, caption=f"{tile.caption} holds {', '.join(lines)}")
