"""Rules files as they are written: a layout map or a deployment as lines of TOML."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from .._atomic import replace_file
from .._text import shown
from ..errors import LayoutError
from ..layout import Spec
from ..mesh import DeviceMesh
from ..packed import PackedDim
from .layout_rule import LayoutRule
from .toml import NOT_CUT, Rules
from .toml_tables import check_file

__all__ = [
    "key_text",
    "labels_text",
    "mesh_lines",
    "name_text",
    "replicated_lines",
    "rule_text",
    "string_text",
    "value_text",
    "write_lines",
    "write_rules",
]


def write_rules(file: str | os.PathLike[str] | TextIO, rules: Rules) -> None:
    """Write a rules file; see `LayoutMap.to_toml` for what it raises."""
    lines = [f"match = {string_text(rules.match)}", *["backtracking = true"][: rules.backtracking]]
    lines += ["ordered = true"][: rules.ordered]
    mesh = rules.device_mesh
    if rules.default is not None:
        _check_mesh("the default", rules.default, mesh)
        lines.append(f"default = {rule_text(rules.default)}")
    lines += replicated_lines(rules.replicated)
    if mesh is not None:
        lines += ["", "[mesh]", *mesh_lines(mesh, not mesh.has_default_devices)]
    lines += ["", "[rules]"]
    for key, rule in rules.layouts.items():
        _check_mesh(f"rule {shown(key)}", rule, mesh)
        lines.append(f"{key_text(key)} = {rule_text(rule)}")
    write_lines(file, lines)


def write_lines(file: str | os.PathLike[str] | TextIO, lines: Iterable[str]) -> None:
    """Write a rules file of these lines; a path is replaced as a whole or not at all.

    Raises:
        LayoutError: if a name cannot be written as UTF-8.
    """
    check_file(file, "write")
    text = "\n".join(lines) + "\n"
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        surrogate = text[error.start]
        raise LayoutError(f"a name or label with the lone surrogate {shown(surrogate)} cannot be written") from None
    if isinstance(file, (str, os.PathLike)):
        replace_file(file, data)
    else:
        file.write(text)


def replicated_lines(axes: Sequence[str]) -> list[str]:
    """Return the line of a rules file for the axes along which all is meant to be replicated, if there are any."""
    return [f"replicated = {value_text(axes)}"] if axes else []


def mesh_lines(mesh: DeviceMesh, with_devices: bool) -> list[str]:
    """Return the entries of a mesh, with the labels of its devices or without."""
    lines = [
        f"shape = {value_text(mesh.shape)}",
        f"axis_names = {value_text(mesh.axis_names)}",
    ]
    return [*lines, f"devices = {labels_text(mesh.labels())}"] if with_devices else lines


def labels_text(labels: Iterable[object]) -> str:
    """Return the labels of devices as a list."""
    return f"[{', '.join(map(_label, labels))}]"


def _label(label: object) -> str:
    if isinstance(label, str):
        return string_text(label)
    if isinstance(label, int) and not isinstance(label, bool) and -(2**63) <= label < 2**63:
        return str(label)
    raise LayoutError(f"device {shown(label)} cannot be written: a rules file has labels that are str or 64-bit int")


def _check_mesh(what: str, rule: LayoutRule, mesh: DeviceMesh | None) -> None:
    if rule.layout.device_mesh != mesh:
        raise LayoutError(f"{what} has a mesh of its own, but a rules file has one mesh for all rules")


def rule_text(rule: LayoutRule, more: Iterable[str] = ()) -> str:
    """Return a rule as it is written in a file, with more entries of its table."""
    layout = rule.layout
    axes = f"[{', '.join(map(_entry, layout.axes))}]"
    more = list(more)
    if layout.unreduced:
        more.append(f"unreduced = {value_text(layout.unreduced)}")
    if rule.uneven is not None:
        more.append(f"uneven = {string_text(rule.uneven)}")
    more += [f"{key} = true" for key in ("shared", "optional") if getattr(rule, key)]
    return f"{{ {', '.join([f'axes = {axes}', *more])} }}" if more else axes


def _entry(spec: Spec) -> str:
    if spec is None:
        return "[]"
    if isinstance(spec, PackedDim):
        return f"{{ packed = {string_text(str(spec))} }}"
    return (
        string_text(spec)
        if isinstance(spec, str) and spec not in NOT_CUT
        else f"[{', '.join(map(string_text, (spec,) if isinstance(spec, str) else spec))}]"
    )


def key_text(key: str) -> str:
    """Return the key of a rule as it is written in a file."""
    # Nothing is escaped in single quotes, which keeps a regular expression readable.
    return f"'{key}'" if "'" not in key and key.isprintable() else string_text(key)


def string_text(text: str) -> str:
    """Return a text in quotes, with escapes."""
    characters = (f"\\{c}" if c in '"\\' else c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}" for c in text)
    return f'"{"".join(characters)}"'


def name_text(name: str) -> str:
    """Return the name of an entry, in quotes if it needs them."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else string_text(name)


def value_text(value: Any) -> str:
    r"""Return a value of texts, whole numbers, lists and mappings as it is written in a file.

    >>> value_text({"name": "h.{i}", "packed": ["q", 2, True]})
    '{ name = "h.{i}", packed = ["q", 2, true] }'
    """
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{name_text(key)} = {value_text(one)}' for key, one in value.items())} }}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(value_text, value))}]"
    return string_text(value) if isinstance(value, str) else str(value).lower()
