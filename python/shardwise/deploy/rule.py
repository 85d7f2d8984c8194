"""One rule of a deployment: a mesh, coordinates along some of its axes, and a layout over the others."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .._arguments import integer
from .._arguments import optional as none_or
from .._expressions import Expression, parse_expression
from .._text import counted, shown
from ..errors import LayoutError, ShardwiseError
from ..layout import TensorLayout
from ..rules.layout_rule import LayoutRule, is_replicated
from .numbers import Number
from .world import WORLD

if TYPE_CHECKING:
    from ..layout import UnevenRule
    from ..packed import PackedDim

__all__ = [
    "At",
    "Coordinates",
    "DeploymentRule",
    "checked_at",
    "default_rule",
    "deployment_rule",
    "names_in_rule",
    "with_fields",
]

#: A place along an axis: one, or several that hold the same.
At = int | str | Sequence[int | str]

#: A field of a name within the key of a rule.
_FIELD = re.compile(r"(?<!\\)\{([A-Za-z_][A-Za-z0-9_]*)\}")
#: Texts in an expression that stand for any digit, and names of groups; and texts that may stand for one digit.
_ANY_DIGIT = re.compile(r"\[0-9\]|\\d|\(\?P<\w+>")
_DIGIT = re.compile(r"\d|\\[NUux0]")
#: The most coordinates that are remembered.
_MOST_FOUND = 1 << 16
#: A look-up in a named list whose entries may be lists.
_ENTRY = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*\[(.*)\]\s*", re.DOTALL)


def tells_digits_apart(pattern: str) -> bool:
    r"""Return whether a regular expression may match one of two names that differ in digits only.

    It does not where it has no digit, nor a way to write one, but in `[0-9]`, `\d` and names of groups.

    >>> tells_digits_apart(r"layers\.(?P<i2>[0-9]+)\.w$"), tells_digits_apart("layers.0.")
    (False, True)
    """
    rest = _ANY_DIGIT.sub("", pattern)
    return _DIGIT.search(rest) is not None


def with_fields(key: str) -> str:
    r"""Write the fields of a rule's key as the regular expressions that they stand for.

    >>> with_fields(r"layers\.{i}\.")
    'layers\\.(?P<i>[0-9]+)\\.'
    """
    return _FIELD.sub(r"(?P<\1>[0-9]+)", key) if isinstance(key, str) else key


@dataclass(frozen=True, init=False, repr=False)
class DeploymentRule:
    """The mesh, the coordinates and the layout of a rule's tensors.

    Args:
        layout: a `TensorLayout` without a mesh, or the tuple or list of its axes.
        mesh: the name of the mesh; it may be left out where a deployment has one mesh.
        at: for some axes of that mesh, the coordinate of the tensor, or a list of coordinates that all hold it. A
            coordinate is a whole number or an expression, which may use the fields of the name, the numbers and lists
            of the deployment, and the sizes of the mesh's axes by their names.
        uneven: how a dim that does not divide is cut; see `LayoutRule`.
        shared: whether a cut may fall within a block of a quantized weight; see `LayoutRule`.
        optional: whether the rule may apply to no name; see `LayoutRule`.

    Raises:
        LayoutError: if the axes are not a layout, or `at` is not an expression.
        TypeError: if a value is of the wrong type.

    >>> DeploymentRule(("tp", None), mesh="dense", at={"pp": "stage[i]"})
    DeploymentRule(('tp', None), mesh='dense', at={'pp': 'stage[i]'})
    """

    layout: TensorLayout
    mesh: str | None
    at: tuple[tuple[str, int | str | tuple[int | str, ...]], ...]
    uneven: UnevenRule | None
    shared: bool
    optional: bool

    def __init__(
        self,
        layout: TensorLayout | Sequence[str | Sequence[str] | PackedDim | None],
        mesh: str | None = None,
        at: Mapping[str, At] | None = None,
        uneven: UnevenRule | None = None,
        shared: bool = False,
        optional: bool = False,
    ) -> None:
        rule = LayoutRule(layout, uneven, shared, optional)
        if rule.layout.device_mesh is not None:
            raise LayoutError(f"the layout {shown(rule.layout)} has a mesh of its own; name a mesh of the deployment")
        set_field = object.__setattr__
        set_field(self, "layout", rule.layout)
        set_field(self, "uneven", rule.uneven)
        set_field(self, "shared", rule.shared)
        set_field(self, "optional", rule.optional)
        set_field(self, "mesh", none_or("mesh", mesh, str))
        places = none_or("at", at, Mapping) or {}  # type: ignore[type-abstract]
        set_field(self, "at", tuple((_axis(axis), _checked(axis, where)) for axis, where in places.items()))
        for axis, _ in self.at:
            if axis in self.layout.named_axes():
                raise LayoutError(
                    f"axis {shown(axis)} is in at, so it cannot be in the layout {shown(self.layout.axes)}"
                )

    @property
    def placed(self) -> LayoutRule:
        """The rule without its mesh and coordinates."""
        return LayoutRule(self.layout, self.uneven, self.shared, self.optional)

    def __repr__(self) -> str:
        layout: Any = self.layout if self.layout.unreduced else self.layout.axes
        more = [f"mesh={self.mesh!r}"] if self.mesh is not None else []
        if self.at:
            more.append(f"at={ {axis: list(at) if isinstance(at, tuple) else at for axis, at in self.at}!r}")
        if self.uneven is not None:
            more.append(f"uneven={self.uneven!r}")
        more += [f"{flag}=True" for flag in ("shared", "optional") if getattr(self, flag)]
        return f"DeploymentRule({', '.join([repr(layout), *more])})"


def checked_at(at: Any) -> dict[str, dict[str, At]]:
    """Check the coordinates that patterns of names have, and give them as rules hold them.

    Raises:
        LayoutError: if one is not an expression, or there is none.
        TypeError: if a value is of the wrong type.
    """
    found: dict[str, dict[str, At]] = {}
    for key, places in (none_or("at", at, Mapping) or {}).items():  # type: ignore[type-abstract]
        if not isinstance(places, Mapping) or not places:
            raise TypeError(f"at[{shown(key)}] must map the names of axes to coordinates, got {shown(places)}")
        try:
            found[key] = {_axis(axis): _checked(axis, where) for axis, where in places.items()}
        except ShardwiseError as error:
            raise type(error)(f"{error}, under the key {shown(key)}") from None
    return found


def _axis(axis: object) -> str:
    if not isinstance(axis, str) or not axis:
        raise TypeError(f"at must have the names of axes as keys, got {shown(axis)}")
    return axis


def _checked(axis: str, where: Any) -> int | str | tuple[int | str, ...]:
    if isinstance(where, (list, tuple)):
        if not where:
            raise LayoutError(f"at[{shown(axis)}] is empty; give at least one coordinate")
        return tuple(_place(axis, one) for one in where)
    return _place(axis, where)


def _place(axis: str, where: Any) -> int | str:
    if isinstance(where, str):
        _parsed(axis, where)
        return where
    return integer(f"at[{shown(axis)}], if it is not an expression,", where)


def _parsed(axis: str, text: str) -> tuple[str | None, Expression]:
    """Return an expression, and the named list that it is an entry of as a whole."""
    found = _ENTRY.fullmatch(text)
    try:
        if found is not None:
            try:
                return found[1], parse_expression(found[2])
            except ShardwiseError:
                pass  # Not one look-up: `a[i] + b[j]`.
        return None, parse_expression(text)
    except ShardwiseError as error:
        raise LayoutError(f"at[{shown(axis)}]: {error}") from None


def deployment_rule(what: str, value: Any) -> DeploymentRule:
    """Return the rule that a value under a key, or a default, stands for.

    Raises:
        LayoutError: if the axes are not a layout.
        TypeError: if the value is of another type.
    """
    if isinstance(value, DeploymentRule):
        return value
    if not isinstance(value, (TensorLayout, tuple, list)):
        raise TypeError(f"{what} must be a DeploymentRule or a tuple or list of axes, got {shown(value)}")
    try:
        return DeploymentRule(value)
    except ShardwiseError as error:
        raise type(error)(f"{what}: {error}") from None


def default_rule(default: Any) -> DeploymentRule:
    """Return the rule that a default stands for; `"replicated"` is on every device of the world."""
    return DeploymentRule((), WORLD) if is_replicated(default) else deployment_rule("default", default)


def names_in_rule(rule: DeploymentRule) -> tuple[str, ...]:
    """Return the names that are used in the `at` of a rule: of fields, numbers, lists and axes."""
    return tuple(dict.fromkeys(name for axis, where in rule.at for name in Coordinates(axis, where, 1).names))


class Coordinates:
    """The coordinates along one axis that an entry of `at` gives to names; each is worked out once."""

    def __init__(self, axis: str, where: int | str | tuple[int | str, ...], size: int) -> None:
        self._axis, self._size = axis, size
        each = where if isinstance(where, tuple) else (where,)
        self._parts = [_parsed(axis, one) if isinstance(one, str) else one for one in each]
        names: dict[str, None] = {}
        for part in self._parts:
            if isinstance(part, tuple):
                names.update(dict.fromkeys([*([part[0]] if part[0] is not None else []), *part[1].names]))
        #: The names with which it is written.
        self.names = tuple(names)
        self._found: dict[tuple[str, ...], tuple[int, ...]] = {}
        #: The coordinates that were found by the text of a single field, for those who look many up.
        self.by_text: dict[str, tuple[int, ...]] = {}

    def of(self, texts: tuple[str, ...], wanted: Sequence[str], numbers: Mapping[str, Number]) -> tuple[int, ...]:
        """Return the coordinates, in ascending order and each once.

        Args:
            texts: the texts of those fields of the name that the entry uses; empty for one that is not in the name.
            wanted: the names of these fields.
            numbers: the other names.

        Raises:
            LayoutError: if a field is not a number, a calculation fails, or a coordinate is outside of the axis.
        """
        found = self._found.get(texts)
        if found is None:
            fields = {name: _integer(self._axis, name, text) for name, text in zip(wanted, texts, strict=True)}
            given = {**numbers, **fields}
            found = tuple(sorted({one for part in self._parts for one in self._worked_out(part, given)}))
            if not found or found[0] < 0 or found[-1] >= self._size:
                said = ", ".join(f"{name} = {value}" for name, value in fields.items())
                raise LayoutError(
                    f"at[{shown(self._axis)}] is {shown(list(found))}{f' for {said}' if said else ''}, but the axis is "
                    f"of size {self._size}"
                )
            if len(self._found) >= _MOST_FOUND:
                self._found.clear()
            self._found[texts] = found
        return found

    def in_order(self, numbers: Mapping[str, Number]) -> tuple[int, ...]:
        """Return the numbers in the order in which they are listed, unchecked against the size of the axis."""
        return tuple(one for part in self._parts for one in self._worked_out(part, numbers))

    def _worked_out(self, part: Any, names: Mapping[str, Number]) -> tuple[int, ...]:
        if isinstance(part, int):
            return (part,)
        listed, expression = part
        try:
            if listed is None:
                return (expression.value(names),)
            entries, place = names[listed], expression.value(names)
            if not isinstance(entries, tuple):
                raise LayoutError(f"{listed} is the number {entries}, not a list")
            if not 0 <= place < len(entries):
                raise LayoutError(
                    f"the list {listed} has {counted(len(entries), 'entry', 'entries')}, and none at {place}"
                )
            entry = entries[place]
            return entry if isinstance(entry, tuple) else (entry,)
        except ShardwiseError as error:
            raise type(error)(f"at[{shown(self._axis)}]: {error}") from None


def _integer(axis: str, name: str, text: str) -> int:
    if not text.isdecimal() or len(text) > 18:
        raise LayoutError(f"at[{shown(axis)}] needs the field {name} of the name as a whole number, got {shown(text)}")
    return int(text)
