"""The tensors of a type of models, with shapes in expressions of its configuration, as a file states them.

A file has this under `tensors`: it is what `shardwise rules --record` finds by making models of many sizes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .._expressions import NAME, parse_expression
from .._text import shown
from ..errors import LayoutError, ParseError

__all__ = ["MOST_TENSORS", "TypeTensors", "condition_holds"]

#: The most tensors of a model.
MOST_TENSORS = 1 << 21
#: The largest dim of a model.
_LARGEST = 1 << 40
_KEYS = {"type", "class", "fixed", "choices", "defaults", "nulls", "other_names", "groups"}
_GROUP = {"range", "where", "shapes"}
_CONDITION = re.compile(r"(?P<left>.+?) (?P<mark><|>=|==|!=|in|not in) (?P<right>.+)")
_ENTRY = re.compile(rf"(?P<name>{NAME})\[(?P<at>[^\[\]]+)\]")
_FIELD = re.compile(r"\{([a-z])\}")
_MISSING = object()


class TypeTensors:
    """The names and shapes of a type's tensors, from a configuration.

    Args:
        table: What a file states: `type`, the `model_type`; `class`, the architecture whose tensors they are; `fixed`,
            values by key that a configuration must have; `choices`, the values that a list may have; `defaults`, values
            and expressions, after `=`, for keys that a configuration may lack; `nulls`, those of these keys that may be
            null; `other_names` of keys; and `groups` of tensors, each
            with the `range` of the fields in its names, the conditions `where` they exist, and `shapes`.
        source: The name of the file in messages.

    Raises:
        ParseError: if it states something else.

    >>> group = {"range": {"i": "layers"}, "where": ["not tied"], "shapes": {"h.{i}.w": ["heads * d", "hidden"]}}
    >>> table = {"type": "mine", "defaults": {"d": "= hidden // heads"}, "groups": [group]}
    >>> TypeTensors(table, "mine.toml").shapes({"layers": 1, "hidden": 8, "heads": 2, "tied": False})
    {'h.0.w': (8, 8)}
    """

    def __init__(self, table: Any, source: str) -> None:
        self._source = source
        self._table = self._checked(table, "tensors", _KEYS)
        self.type = self._table.get("type")
        if not isinstance(self.type, str):
            raise ParseError(f"{source}: tensors.type must be a model_type, got {shown(self.type)}")
        groups = self._table.get("groups")
        if not isinstance(groups, list):
            raise ParseError(f"{source}: tensors.groups must be a list of tables, got {shown(groups)}")
        self._groups = [self._checked(group, f"tensors.groups[{at}]", _GROUP) for at, group in enumerate(groups)]
        for at, group in enumerate(self._groups):
            for key, kind in (("range", Mapping), ("where", list), ("shapes", Mapping)):
                if not isinstance(group.get(key, kind() if kind is list else {}), kind):
                    raise ParseError(f"{source}: tensors.groups[{at}].{key} is {shown(group[key])}")

    def _checked(self, table: Any, place: str, keys: set[str]) -> Mapping[str, Any]:
        if not isinstance(table, Mapping) or not set(table) <= keys:
            more = sorted(set(table) - keys) if isinstance(table, Mapping) else table
            raise ParseError(
                f"{self._source}: {place} has {shown(more)}; it must be a table of {', '.join(sorted(keys))}"
            )
        return table

    def shapes(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the tensors of a model.

        Raises:
            ParseError: if the configuration is of another type, or has a value with which the shapes are not known.
            LayoutError: if it lacks a value; the message names it.
        """
        values = ConfigValues(config, self._table)
        self._check(config, values)
        found: dict[str, tuple[int, ...]] = {}
        for group in self._groups:
            ranges, where = group.get("range", {}), group.get("where", [])
            shapes: dict[str, tuple[int, ...]] = {}
            for point in self._points(values, list(ranges.items())[:1], where):
                inner = list(
                    itertools.product(*(range(self._size(values, text)) for text in list(ranges.values())[1:]))
                )
                for name, dims in group.get("shapes", {}).items():
                    if name not in shapes:
                        shapes[name] = tuple(self._size(values, dim) for dim in dims)
                    fields = sorted(set(_FIELD.findall(name)) - point.keys())
                    for numbers in inner if fields else [()]:
                        own = {**point, **dict(zip(list(ranges)[1:], numbers, strict=False))}
                        found[_named(name, own)] = shapes[name]
                    if len(found) > MOST_TENSORS:
                        raise ParseError(f"the configuration: it describes more than {MOST_TENSORS} tensors")
        return found

    def _points(
        self, values: ConfigValues, ranges: Sequence[tuple[str, str]], where: Sequence[str]
    ) -> Iterator[dict[str, int]]:
        """Yield the values of the first field for which the conditions hold."""
        if not ranges:
            yield from [{}] if all(condition_holds(text, values, {}) for text in where) else []
        for field, text in ranges:
            without = [one for one in where if not re.search(rf"\b{field}\b", one)]
            if not all(condition_holds(one, values, {}) for one in without):
                return
            of_field = [one for one in where if one not in without]
            for number in range(self._size(values, text, least=0)):
                if all(condition_holds(one, values, {field: number}) for one in of_field):
                    yield {field: number}

    def _size(self, values: ConfigValues, text: Any, *, least: int = 1) -> int:
        size = parse_expression(str(text)).value(values)
        if not least <= size < _LARGEST:
            raise ParseError(f"the configuration: {text} is {shown(size)}; it must be from {least} to {_LARGEST - 1}")
        return size

    def _check(self, config: Mapping[str, Any], values: ConfigValues) -> None:
        kind = config.get("model_type")
        if kind not in (None, self.type):
            raise ParseError(
                f"{self._source} has the tensors of the model_type {shown(self.type)}, but the configuration is of "
                f"{shown(kind)}: record that type, with `shardwise rules --record transformers config.json`"
            )
        named, own = config.get("architectures"), self._table.get("class")
        if named and own and list(named) != [own]:
            raise ParseError(
                f"the configuration: architectures is {shown(list(named))}; only the tensors of {own} are known"
            )
        for key, value in self._table.get("fixed", {}).items():
            given = values.get(key)
            if given is not _MISSING and given != (None if value == "null" else value):
                raise ParseError(
                    f"the configuration: {key} is {shown(given)}; the tensors of {self.type} are known with "
                    f"{shown(value)}: record a model with that value, with `shardwise rules --record transformers "
                    "config.json`"
                )
        for key, known in self._table.get("choices", {}).items():
            given = values.get(key)
            entries = given if isinstance(given, list) else []
            if unknown := [one for one in entries if one not in known]:
                raise ParseError(
                    f"the configuration: {key} has {shown(unknown[0])}; the tensors of {self.type} are known with "
                    f"{', '.join(map(str, known))}"
                )


class ConfigValues(Mapping[str, "int | Sequence[int]"]):
    """The values of a configuration by key, nested ones with dots, and of its defaults."""

    def __init__(self, config: Mapping[str, Any], table: Mapping[str, Any]) -> None:
        self._config = config
        self._defaults = table.get("defaults", {})
        self._nulls = table.get("nulls", ())
        self._others = table.get("other_names", {})
        self._found: dict[str, Any] = {}

    def get(self, key: str, default: Any = _MISSING) -> Any:
        """Return the value of a key as the configuration has it, or its default."""
        if key not in self._found:
            self._found[key] = self._worked_out(key)
        return default if self._found[key] is _MISSING else self._found[key]

    def _worked_out(self, key: str) -> Any:
        for name in (key, *(other for other, own in self._others.items() if own == key)):
            found: Any = self._config
            for step in name.split("."):
                found = found.get(step, _MISSING) if isinstance(found, Mapping) else _MISSING
            if found is not _MISSING and not (found is None and key in self._defaults and key not in self._nulls):
                return found
        value = self._defaults.get(key, _MISSING)
        if isinstance(value, str) and value.startswith("= "):
            self._found[key] = _MISSING  # One that needs itself is missing.
            return parse_expression(value[2:]).value(self)
        return None if value == "null" else value

    def __getitem__(self, key: str) -> int | Sequence[int]:
        found = self.get(key)
        if found is _MISSING:
            raise LayoutError(f"the configuration has no {key}, which the shapes of its tensors need")
        if isinstance(found, list) and all(type(one) is int for one in found):
            return tuple(found)
        if type(found) not in (int, bool):
            raise ParseError(f"the configuration: {key} is {shown(found)}; it must be a whole number")
        return int(found)

    def __contains__(self, key: object) -> bool:
        return True  # `__getitem__` says what is missing.

    def __iter__(self) -> Iterator[str]:
        return iter(self._config)

    def __len__(self) -> int:
        return len(self._config)


class _AtPoint(Mapping[str, "int | Sequence[int]"]):
    """The values of a configuration, and of a field."""

    def __init__(self, values: ConfigValues, point: Mapping[str, int]) -> None:
        self._values, self._point = values, point

    def __getitem__(self, key: str) -> int | Sequence[int]:
        return self._point[key] if key in self._point else self._values[key]

    def __contains__(self, key: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(self._point)

    def __len__(self) -> int:
        return len(self._point)


def condition_holds(text: str, values: ConfigValues, point: Mapping[str, int]) -> bool:
    """Return whether a condition holds: `key`, `not key`, or a comparison, such as `layer_types[i] == 'linear'`.

    Raises:
        ParseError: if it is no condition.
        LayoutError: if the configuration lacks a value.
    """
    found = _CONDITION.fullmatch(text)
    if found is None:
        key = text.removeprefix("not ")
        return bool(_needed(values, key)) == (key == text)
    left, mark, right = found["left"], found["mark"], found["right"]
    own = _AtPoint(values, point)
    if mark in ("in", "not in"):
        listed = _needed(values, right)
        return (parse_expression(left).value(own) in (listed or [])) == (mark == "in")
    if right.startswith("'"):
        entry = _ENTRY.fullmatch(left)
        value = _needed(values, entry["name"] if entry else left)
        if entry is not None:
            at = parse_expression(entry["at"]).value(own)
            if not isinstance(value, list) or not 0 <= at < len(value):
                raise LayoutError(f"the configuration: {entry['name']} has no entry {at}")
            value = value[at]
        return bool(value == right.strip("'")) == (mark == "==")
    try:
        numbers = parse_expression(left).value(own), parse_expression(right).value(own)
    except ParseError as error:
        raise ParseError(f"{text!r}: {error}") from None
    if mark in ("<", ">="):
        return (numbers[0] < numbers[1]) == (mark == "<")
    return (numbers[0] == numbers[1]) == (mark == "==")


def _named(name: str, fields: Mapping[str, int]) -> str:
    return _FIELD.sub(lambda field: str(fields[field[1]]), name)


def _needed(values: ConfigValues, key: str) -> Any:
    found = values.get(key)
    if found is _MISSING:
        raise LayoutError(f"the configuration has no {key}, which says what tensors there are")
    return found
