"""Rules of layout maps: a layout with an uneven rule of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

from .._arguments import instance
from .._text import shown
from ..errors import LayoutError
from ..layout import TensorLayout, UnevenRule

if TYPE_CHECKING:
    from ..mesh import DeviceMesh
    from ..packed import PackedDim

__all__ = ["REPLICATED", "LayoutRule", "checked_uneven", "is_replicated", "rule_of"]

#: The default by name that cuts nothing.
REPLICATED = "replicated"


@dataclass(frozen=True, init=False, repr=False)
class LayoutRule:
    """A layout with an uneven rule of its own, as a value of a layout map.

    Args:
        layout: a `TensorLayout`, or the tuple or list of its axes.
        uneven: how a dim that does not divide is cut, whatever a report or a plan says for other tensors; `None` means
            what these say. See `TensorLayout.partition`.
        shared: whether a cut may fall within a block of a quantized weight, whose scale is on both sides then; see
            `quantized.component_layouts`.
        optional: whether the rule may apply to no name; of other rules that apply to none a report warns.

    Raises:
        LayoutError: if there is no such uneven rule, or the axes are not a layout.
        TypeError: if the layout is something else.

    >>> from shardwise import DeviceMesh, LayoutMap
    >>> layout_map = LayoutMap(DeviceMesh((4,), ("model",)))
    >>> layout_map["embed"] = LayoutRule(("model", None), uneven="ceil")
    >>> layout_map.partition("embed", (10, 2)).shard_shape("cpu:3")
    (1, 2)
    >>> layout_map["embed"].axes, layout_map.rule("embed").uneven
    (('model', None), 'ceil')
    """

    layout: TensorLayout
    uneven: UnevenRule | None
    shared: bool
    optional: bool

    def __init__(
        self,
        layout: TensorLayout | Sequence[str | Sequence[str] | PackedDim | None],
        uneven: UnevenRule | None = None,
        shared: bool = False,
        optional: bool = False,
    ) -> None:
        if isinstance(layout, (tuple, list)):
            layout = TensorLayout(layout)
        object.__setattr__(self, "layout", instance("layout", layout, TensorLayout, " or a tuple or list of axes"))
        object.__setattr__(self, "uneven", None if uneven is None else checked_uneven(uneven))
        object.__setattr__(self, "shared", instance("shared", shared, bool))
        object.__setattr__(self, "optional", instance("optional", optional, bool))

    def __repr__(self) -> str:
        more = ", shared=True" * self.shared + ", optional=True" * self.optional
        return f"LayoutRule(layout={self.layout!r}, uneven={self.uneven!r}{more})"

    def with_mesh(self, mesh: DeviceMesh | None) -> LayoutRule:
        """Give this rule over a mesh, unless its layout has one already or there is none."""
        if mesh is None or self.layout.device_mesh is not None:
            return self
        return replace(self, layout=self.layout.with_mesh(mesh))

    @property
    def words(self) -> list[str]:
        """Options that are set, as words: the uneven rule, "shared", "optional"."""
        return [word for word in (self.uneven, "shared" * self.shared, "optional" * self.optional) if word]

    def of_rank(self, rank: int) -> TensorLayout | None:
        """Give the layout for tensors of a rank, whose further dims are not cut; `None` if the rank is too small."""
        missing = rank - self.layout.rank
        if missing < 0:
            return None
        axes = (*self.layout.axes, *(None,) * missing)
        return TensorLayout(axes, self.layout.device_mesh, unreduced=self.layout.unreduced)


def rule_of(value: Any) -> LayoutRule:
    """Give the rule that a value of a layout map stands for.

    Raises:
        LayoutError: if the axes are not a layout.
        TypeError: if it is something else.
    """
    if isinstance(value, LayoutRule):
        return value
    if not isinstance(value, (TensorLayout, tuple, list)):
        raise TypeError(
            f"the value must be a TensorLayout, a LayoutRule or a tuple or list of axes, got {type(value).__name__}"
        )
    return LayoutRule(value)


def is_replicated(default: Any) -> bool:
    """Return whether a default is the word for one that cuts nothing.

    Raises:
        LayoutError: if it is another word.
    """
    if isinstance(default, str) and default != REPLICATED:
        raise LayoutError(f"default is {shown(default)}; it must be a layout or {REPLICATED!r}")
    return isinstance(default, str)


def checked_uneven(uneven: Any) -> UnevenRule:
    """Return the given uneven rule.

    Raises:
        LayoutError: if there is no such rule; lists them.
    """
    instance("uneven", uneven, str)
    if uneven not in get_args(UnevenRule):
        raise LayoutError(f"uneven is {shown(uneven)}; it must be one of {', '.join(map(repr, get_args(UnevenRule)))}")
    rule: UnevenRule = uneven
    return rule
