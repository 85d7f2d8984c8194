"""Rules of layout maps: a layout with an uneven rule of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

from .._arguments import instance
from .._text import shown
from ..errors import LayoutError, ShardwiseError
from ..layout import TensorLayout, UnevenRule
from ..mesh import DeviceMesh

if TYPE_CHECKING:
    from ..packed import PackedDim

__all__ = ["REPLICATED", "LayoutRule", "checked_uneven", "is_replicated", "of_leading_dims", "rule_of", "sizes_said"]

#: The default by name that cuts nothing.
REPLICATED = "replicated"
#: The largest size of an axis that a message names.
_MOST_SIZE = 16


@dataclass(frozen=True, init=False, repr=False)
class LayoutRule:
    """A layout with an uneven rule of its own, as a value of a layout map.

    Args:
        layout: a `TensorLayout`, or the tuple or list of its axes.
        uneven: the rule for dims that do not divide; `None` leaves it to the report or the plan. See
            `TensorLayout.partition`.
        shared: whether a cut may fall within a block of a quantized weight, whose scale is on both sides then; see
            `quantized.component_layouts`.
        optional: whether the rule may apply to no name; a report warns of other rules that apply to none.

    Raises:
        LayoutError: if the uneven rule is unknown, or the axes are not a layout.
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
        """Return this rule over a mesh, unless its layout has one already or there is none."""
        if mesh is None or self.layout.device_mesh is not None:
            return self
        return replace(self, layout=self.layout.with_mesh(mesh))

    @property
    def words(self) -> list[str]:
        """The options that are set, as words: the uneven rule, "shared", "optional"."""
        return [word for word in (self.uneven, "shared" * self.shared, "optional" * self.optional) if word]

    def of_rank(self, rank: int) -> TensorLayout | None:
        """Return the layout for tensors of a rank, whose further dims are not cut; `None` if the rank is too small.

        A tensor without dims is never cut.
        """
        return None if 0 < rank < self.layout.rank else of_leading_dims(self.layout, rank)


def of_leading_dims(layout: TensorLayout, rank: int) -> TensorLayout:
    """Give a layout of leading dims for tensors of a rank that has them: further dims, or all of none, are not cut."""
    if layout.rank == rank:
        return layout
    axes = (*layout.axes, *(None,) * (rank - layout.rank))[:rank]
    return TensorLayout(axes, layout.device_mesh, unreduced=layout.unreduced)


def rule_of(value: Any) -> LayoutRule:
    """Return the rule that a value of a layout map stands for.

    Raises:
        LayoutError: if the axes are not a layout.
        TypeError: if the value is of another type.
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


def sizes_said(rules: Iterable[LayoutRule], mesh: DeviceMesh) -> str:
    """Return the end of a message: other sizes of one axis that rules accept if they refuse the mesh; or empty.

    >>> from shardwise import DeviceMesh
    >>> from shardwise.packed import parse
    >>> sizes_said([LayoutRule((parse("(2@tp/max2 8)"),))], DeviceMesh((3,), ("tp",)))
    '; the rules take tp=1, 2, 4, 6, 8, 10, 12, 14 or 16; `shardwise fits` says which of them fit the model'
    """
    layouts = [rule.layout for rule in rules]
    if _take(layouts, mesh):
        return ""
    for axis in dict.fromkeys(name.partition(":(")[0] for layout in layouts for name in layout.named_axes()):
        others = [
            DeviceMesh([size if name == axis else mesh.axis_size(name) for name in mesh.axis_names], mesh.axis_names)
            for size in range(1, _MOST_SIZE + 1)
        ]
        fitting = [str(other.axis_size(axis)) for other in others if _take(layouts, other)]
        if fitting:
            some = " or ".join(filter(None, (", ".join(fitting[:-1]), fitting[-1])))
            return f"; the rules take {axis}={some}; `shardwise fits` says which of them fit the model"
    return ""


def _take(layouts: Iterable[TensorLayout], mesh: DeviceMesh) -> bool:
    """Return whether a mesh has the axes of all these layouts."""
    try:
        for layout in layouts:
            layout.with_mesh(mesh)
    except ShardwiseError:
        return False
    return True
