"""Deployments as rules files: the format is on the page `docs/deployments.md`."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TextIO

from .._text import shown
from ..errors import LayoutError, ParseError
from ..mesh import DeviceMesh
from ..rules.layout_rule import REPLICATED
from ..rules.numbers import Config, NamedNumbers
from ..rules.toml import RulesOrDocument, read_document, read_layout, read_numbers, read_replicated
from ..rules.toml_tables import check_table, checked_list, errors_at
from ..rules.toml_text import (
    key_text,
    labels_text,
    mesh_lines,
    name_text,
    replicated_lines,
    rule_text,
    string_text,
    value_text,
    write_lines,
)
from .experts import ExpertMap
from .megatron.pipeline import pipeline
from .numbers import Number
from .parameters import FusedParameter
from .rule import Coordinates, DeploymentRule, checked_at, names_in_rule
from .stages import Stages
from .world import WORLD

__all__ = ["read_deployment", "write_deployment"]

_MOST_DEVICES = 1 << 20
#: The keys of a list that Megatron's split makes.
_PIPELINE = {"layout", "pp", "vpp", "first", "last", "embedding_counts", "loss_counts", "mtp"}


def read_deployment(
    file: RulesOrDocument, config: Config | None, world: Sequence[Hashable] | DeviceMesh | None
) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:
    """Read what a rules file says, as the arguments of a `Deployment`; see `Deployment.from_toml` for errors."""
    document, source, _ = read_document(file)
    for key in ("mesh", "backtracking", "prefix"):
        if key in document:
            raise ParseError(f"{source}: a file of a deployment has no {key}" + ("; write [meshes]" * (key == "mesh")))
    numbers = read_numbers(document, config, source)
    meshes = _meshes(document.get("meshes", {}), f"{source}: meshes", numbers)
    lists = _lists(document.get("lists", {}), f"{source}: lists", numbers)
    rules = document.get("rules", {})
    check_table(rules, f"{source}: rules")
    made = {key: _rule(value, f"{source}: rule {shown(key)}", numbers) for key, value in rules.items()}
    default: Any = document.get("default")
    if default is not None and default != REPLICATED:
        default = _rule(default, f"{source}: default", numbers)
    parameters = _parameters(document.get("parameters", []), f"{source}: parameters")
    check_table(document.get("at", {}), f"{source}: at")
    for key, where in document.get("at", {}).items():
        check_table(where, f"{source}: at {shown(key)}")
    with errors_at(source):
        places = checked_at(document.get("at"))
        used = _named([*made.values(), default], parameters, places)
        # Only those that are named: others may need a configuration that is not there.
        own: dict[str, Number] = {name: numbers[name] for name in numbers if name in used and name not in lists}
        devices = _world(document.get("world"), f"{source}: world", meshes, numbers) if world is None else world
        more = {"numbers": own | lists, "default": default, "parameters": parameters}
        more["replicated"] = read_replicated(document, source)
        more["at"] = places
        return (devices, meshes, made), {**more, "match": document.get("match", "search")}


def _meshes(table: Any, place: str, numbers: NamedNumbers) -> dict[str, DeviceMesh]:
    check_table(table, place)
    found = {}
    for name, value in table.items():
        here = f"{place}.{name}"
        check_table(value, here, required={"shape", "axis_names"}, optional={"devices"})
        shape = [numbers.number(f"{here}.shape", size) for size in checked_list(value["shape"], f"{here}.shape")]
        names = checked_list(value["axis_names"], f"{here}.axis_names")
        devices = checked_list(value["devices"], f"{here}.devices") if "devices" in value else None
        with errors_at(here):
            found[name] = DeviceMesh(shape, names, devices)
    return found


def _world(table: Any, place: str, meshes: Mapping[str, DeviceMesh], numbers: NamedNumbers) -> Any:
    if table is None:
        if not meshes:
            raise ParseError(f"{place} is missing, and there are no meshes that give its size")
        table = {}
    check_table(table, place, optional={"size", "devices", "label"}, required=set())
    if "devices" in table:
        if len(table) > 1:
            raise ParseError(
                f"{place} has devices, so it cannot have {shown(next(k for k in table if k != 'devices'))}"
            )
        return checked_list(table["devices"], f"{place}.devices")
    size = numbers.number(f"{place}.size", table["size"]) if "size" in table else max(m.size for m in meshes.values())
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= _MOST_DEVICES:
        raise ParseError(f"{place}.size must be a whole number from 1 to {_MOST_DEVICES}, got {shown(size)}")
    label = table.get("label", "cpu:{}")
    if not isinstance(label, str) or label.count("{}") != 1:
        raise ParseError(f"{place}.label must be a text with {{}} for the number of the device, got {shown(label)}")
    return size if label == "cpu:{}" else [label.replace("{}", str(number)) for number in range(size)]


def _lists(table: Any, place: str, numbers: NamedNumbers) -> dict[str, Any]:
    check_table(table, place)
    return {name: _made_list(value, f"{place}.{name}", numbers) for name, value in table.items()}


def _made_list(value: Any, place: str, numbers: NamedNumbers) -> Any:
    """Return a list as it is written, or by what makes it."""
    if not isinstance(value, dict):
        rows = checked_list(value, place)
        inner = [one for row in rows if isinstance(row, list) for one in row]
        nested = sum(isinstance(row, list) for row in rows)
        if nested not in (0, len(rows)) or not all(type(one) in (int, str) for one in (inner if nested else rows)):
            raise ParseError(
                f"{place} must be a list of whole numbers, or of lists of whole numbers, got {shown(value)}"
            )
        return [[numbers.number(place, one) for one in row] if nested else numbers.number(place, row) for row in rows]
    with errors_at(place):
        if "stages" in value:
            check_table(value, place, required={"stages"})
            return Stages.of_counts(
                [numbers.number(place, size) for size in checked_list(value["stages"], place)]
            ).stage
        if "extra" in value:
            check_table(value, place, required={"layers", "pp", "extra"})
            layers, pp = (numbers.number(place, value[key]) for key in ("layers", "pp"))
            return Stages.split(layers, pp, value["extra"]).stage
        if "layers" in value:
            check_table(value, place, required={"layers"}, optional=_PIPELINE)
            given = {key: one if key == "layout" else numbers.number(place, one) for key, one in value.items()}
            return pipeline(given.pop("layers"), **given).stage
        for kind in ("experts", "slots"):
            if kind in value:
                check_table(value, place, required={kind, "ep"}, optional={"redundant", "placement"})
                made = _experts(value, kind, numbers, place)
                return made.where if kind == "experts" else made.slots
    raise ParseError(f"{place} must be a list, or a table with stages, layers, experts or slots, got {shown(value)}")


def _experts(value: Mapping[str, Any], kind: str, numbers: NamedNumbers, place: str) -> ExpertMap:
    count, ep, redundant = (numbers.number(place, value.get(key, 0)) for key in (kind, "ep", "redundant"))
    placement = value.get("placement", "even")
    if placement not in ("even", "linear", "round_robin"):
        raise ParseError(f"{place}: placement must be 'even', 'linear' or 'round_robin', got {shown(placement)}")
    if redundant:
        return ExpertMap.redundant(count, redundant, ep)
    made: ExpertMap = getattr(ExpertMap, placement)(count, ep)
    return made


def _rule(value: Any, place: str, numbers: NamedNumbers) -> DeploymentRule:
    mesh = at = None
    if isinstance(value, dict):
        value = dict(value)
        mesh, at = value.pop("mesh", None), value.pop("at", None)
        if at is not None:
            check_table(at, f"{place}: at")
    rule = read_layout(value, place, numbers)
    with errors_at(place):
        return DeploymentRule(rule.layout, mesh, at, rule.uneven, rule.shared, rule.optional)


def _parameters(value: Any, place: str) -> list[FusedParameter]:
    found = []
    for number, table in enumerate(checked_list(value, place), 1):
        here = f"{place} {number}"
        check_table(table, here, required={"name", "parts"}, optional={"stack", "slots", "after", "at"})
        checked_list(table.get("after", []), f"{here}.after")
        check_table(table.get("at", {}), f"{here}.at")
        with errors_at(here):
            found.append(FusedParameter(**table))
    return found


def _named(
    rules: Iterable[Any], parameters: Iterable[FusedParameter], places: Mapping[str, Mapping[str, Any]]
) -> set[str]:
    """Return the names of numbers, lists and fields that rules, coordinates and the slots of parameters use."""
    found = {name for rule in rules if isinstance(rule, DeploymentRule) for name in names_in_rule(rule)}
    found |= {name for where in places.values() for name in names_in_rule(DeploymentRule((), WORLD, where))}
    slots = (one.slots for one in parameters if one.slots is not None)
    return found.union(*(Coordinates("slots", text, 1).names for text in slots))


def write_deployment(file: str | os.PathLike[str] | TextIO, deployment: Any) -> None:
    """Write a deployment as a rules file; see `Deployment.to_toml` for what it raises."""
    world, rules, default = deployment.world, deployment.rules(), deployment.default
    lines = [f"match = {string_text(deployment.match)}"]
    if default is not None:
        replicated = default == DeploymentRule((), WORLD)
        lines.append(f"default = {string_text(REPLICATED) if replicated else _rule_text(default)}")
    lines += replicated_lines(deployment.replicated)
    named = _named([*rules.values(), default], deployment.parameters, deployment.places)
    scalars = {name: value for name, value in deployment.numbers.items() if isinstance(value, int) and name in named}
    lists = {name: value for name, value in deployment.numbers.items() if not isinstance(value, int)}
    for head, values in (("numbers", scalars), ("lists", lists)):
        if values:
            lines += ["", f"[{head}]", *(f"{name} = {_numbers_text(name, value)}" for name, value in values.items())]
    lines += ["", "[world]", *_world_lines(world)]
    if deployment.meshes:
        lines += ["", "[meshes]"]
    for name, mesh in deployment.meshes.items():
        own = not mesh.has_default_devices and mesh.labels() != world.labels()
        lines.append(f"{name_text(name)} = {{ {', '.join(mesh_lines(mesh, own))} }}")
    if deployment.places:
        lines += ["", "[at]", *(f"{key_text(key)} = {value_text(where)}" for key, where in deployment.places.items())]
    lines += ["", "[rules]", *(f"{key_text(key)} = {_rule_text(rule)}" for key, rule in rules.items())]
    for one in deployment.parameters:
        lines += ["", "[[parameters]]", f"name = {string_text(one.name)}"]
        lines.append(f"parts = {value_text(one.parts)}")
        more = {"stack": one.stack, "slots": one.slots}
        lines += [f"{key} = {string_text(text)}" for key, text in more.items() if text is not None]
        if one.after:
            lines.append(f"after = {value_text(one.after)}")
        if one.at:
            lines.append(f"at = {value_text(dict(one.at))}")
    write_lines(file, lines)


def _world_lines(world: DeviceMesh) -> list[str]:
    if world.size > _MOST_DEVICES:
        raise LayoutError(f"the world has {world.size} devices; a rules file has up to {_MOST_DEVICES}")
    if world.has_default_devices:
        return [f"size = {world.size}"]
    labels = world.labels()
    label = f"{labels[0][:-1]}{{}}" if isinstance(labels[0], str) and labels[0].endswith("0") else ""
    if label.count("{}") == 1 and all(one == label.replace("{}", str(i)) for i, one in enumerate(labels)):
        return [f"size = {world.size}", f"label = {string_text(label)}"]
    return [f"devices = {labels_text(labels)}"]


def _rule_text(rule: DeploymentRule) -> str:
    more = [] if rule.mesh is None else [f"mesh = {string_text(rule.mesh)}"]
    if rule.at:
        more.append(f"at = {value_text(dict(rule.at))}")
    return rule_text(rule.placed, more)


def _numbers_text(name: str, value: Number) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_numbers_text(name, one) for one in value)}]"
    if not -(2**63) <= value < 2**63:
        raise LayoutError(f"numbers[{shown(name)}] has {shown(value)}, which is not a 64-bit integer")
    return str(value)
