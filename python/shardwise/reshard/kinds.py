"""Collectives: what each does, and its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from .._arguments import INTEGER, check_fields, integer, optional
from .._text import bytes_text, shown
from ..errors import LayoutError
from ..layout import TensorLayout

__all__ = ["Collective", "CollectiveKind", "CollectiveStep"]

#: The name of a collective.
CollectiveKind = Literal["slice", "all-gather", "all-to-all", "reduce-scatter", "all-reduce", "collective-permute"]


@dataclass(frozen=True)
class Collective:
    """One collective: its kind, and the axes it is along.

    Args:
        kind: one of `CollectiveKind`.
        axes: the mesh axes, or sub-axes such as `"tp:(1)4"`, major first, in the order of the spec of the dim that is
            cut.
        from_dim: the dim that is gathered, for an all-gather and an all-to-all. The axes are its minor ones, in any
            order.
        to_dim: the dim that is cut, for a slice, an all-to-all and a reduce-scatter. The axes become its minor ones.
        layout: the layout after the collective; required for a collective-permute.

    Raises:
        LayoutError: if there is no such kind, or a dim is negative.
        TypeError: if the axes are not names, a dim is not an integer, or the layout not a `TensorLayout`.

    >>> Collective("all-gather", ("x",), from_dim=0)
    Collective(kind='all-gather', axes=('x',), from_dim=0, to_dim=None, layout=None)
    """

    #: The kind of collective.
    kind: CollectiveKind
    #: The axes or sub-axes of the mesh that it is along, major first.
    axes: tuple[str, ...]
    #: The dim that is gathered, if one is.
    from_dim: int | None = None
    #: The dim that is cut, if one is.
    to_dim: int | None = None
    #: The layout after the collective.
    layout: TensorLayout | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in get_args(CollectiveKind):
            raise LayoutError(f"kind is {shown(self.kind)}; the kinds are {', '.join(get_args(CollectiveKind))}")
        is_sequence = isinstance(self.axes, Sequence) and not isinstance(self.axes, str)
        if not is_sequence or not all(isinstance(name, str) for name in self.axes):
            raise TypeError(f"axes must be a tuple of axis names, got {shown(self.axes)}")
        optional("layout", self.layout, TensorLayout)
        object.__setattr__(self, "axes", tuple(map(str, self.axes)))
        for name in ("from_dim", "to_dim"):
            object.__setattr__(self, name, _dim(name, getattr(self, name)))


def _dim(name: str, given: Any) -> int | None:
    if given is None:
        return None
    dim = integer(name, given)
    if not 0 <= dim < 2**31:
        raise LayoutError(f"{name} is {shown(dim)}, but dims are counted from 0")
    return dim


@dataclass(frozen=True)
class CollectiveStep(Collective):
    """A collective in a sequence, with its cost and the layout that it leads to, on the mesh of the source."""

    #: The bytes that each device receives.
    bytes: int = 0
    #: The seconds that it takes, by the link model.
    seconds: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "bytes", integer("bytes", self.bytes))
        check_fields(self, seconds=(float, *INTEGER))

    def __str__(self) -> str:
        along = ", ".join(self.axes)
        cut = f"dim {self.to_dim} is cut"
        what = {
            "slice": f"each device keeps its part, {cut}",
            "all-gather": f"dim {self.from_dim} is put together",
            "all-to-all": f"dim {self.from_dim} is put together, {cut}",
            "reduce-scatter": f"partial sums are added, {cut}",
            "all-reduce": "partial sums are added",
            "collective-permute": f"shards change places, to {self.layout.axes if self.layout else '?'}",
        }[self.kind]
        received = "nothing moves" if self.kind == "slice" else f"each device receives {bytes_text(self.bytes)}"
        return f"{self.kind} along {along}: {what}; {received}"
