"""Rules of deployments, ready to be applied, and the places of the tensors that they are for."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import re

    from ..layout import TensorLayout
    from ..mesh import DeviceMesh
    from ..placing import Placed
    from ..rules.layout_rule import LayoutRule
    from ..rules.pattern import FieldSearch
    from .numbers import Number
    from .rule import Coordinates, DeploymentRule

__all__ = ["ReadyRule", "TensorPlace"]


class ReadyRule(NamedTuple):
    """A rule, ready to be applied."""

    rule: DeploymentRule
    #: The rule without its mesh and coordinates.
    placed: LayoutRule
    mesh: DeviceMesh
    #: For each entry of `at`: the position of its axis, its coordinates, and those names in it that are fields.
    at: tuple[tuple[int, Coordinates, tuple[str, ...]], ...]
    pattern: re.Pattern[str] | None
    #: The other names that are used: sizes of axes, and the deployment's numbers.
    numbers: dict[str, Number]
    #: For each entry of `at` the search for its fields in a name, if it uses some.
    fields: tuple[FieldSearch | None, ...]
    #: True if these fields are in the same places of all names that differ in digits only and that the rule matches.
    is_blind: bool
    #: The places that were found, by the coordinates.
    places: dict[tuple[tuple[int, ...], ...], TensorPlace]


class TensorPlace:
    """The place of tensors: their rule, and the coordinates of each entry of its `at`.

    One object for all tensors there, so that those of one rank have one layout, and are planned once.
    """

    __slots__ = ("at", "layouts", "placed", "ready")

    def __init__(self, ready: ReadyRule, at: tuple[tuple[int, ...], ...]) -> None:
        self.ready = ready
        self.at = at
        #: The layouts by rank; `None` if the rule is for another.
        self.layouts: dict[int, TensorLayout | None] = {}
        #: The place by rank, as `Placing` gives it.
        self.placed: dict[int, Placed] = {}
