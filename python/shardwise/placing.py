"""Holders of a tensor's boxes, by its name: maps of rules, deployments and plain mappings, asked in one way."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from ._arguments import instance
from ._text import shown
from .errors import LayoutError
from .layout import TensorLayout
from .partition import Partition
from .tiling import Tiling

if TYPE_CHECKING:
    from .layout import UnevenRule
    from .mesh import DeviceMesh

__all__ = ["NOT_PLACED", "NO_LAYOUTS", "Layouts", "Placed", "Placing", "partition_of", "placing_of"]


class Placed(NamedTuple):
    """The place of one tensor.

    Attributes:
        layout: its layout, over the devices that hold it; `None` if there is none. A plain mapping may have a tiling,
            as manifests do.
        uneven: how a dim that does not divide is cut; `None` if that is left to the caller.
        shared: whether devices share the blocks of a quantized weight that a cut goes through.
    """

    layout: TensorLayout | Tiling | None
    uneven: UnevenRule | None = None
    shared: bool = False

    def by_layout(self) -> Placed:
        """Return the same with the layout of a partition in its place: for another shape, as of its states."""
        one = self.layout
        return Placed(one.layout, one.uneven, self.shared) if isinstance(one, Partition) else self


#: The place of a tensor that has no layout.
NOT_PLACED = Placed(None)


class Placing(Protocol):
    """Layouts by name: a `LayoutMap`, a `Deployment`, or a plain mapping as `placing_of` gives it."""

    @property
    def world(self) -> DeviceMesh | None:
        """The mesh that has all devices; `None` if there is no such mesh."""

    @property
    def meshes(self) -> Mapping[str, DeviceMesh]:
        """The meshes of which the layouts are made, by name."""

    def placed(self, path: str, rank: int) -> Placed:
        """Look up the place of a tensor of this name and rank."""

    def placed_alike(self, paths: Sequence[str], rank: int) -> Iterator[tuple[Placed, Sequence[int]]]:
        """Yield the places of names that differ in digits only, each with the positions of its names."""

    def matching_rules(self, path: str) -> tuple[str, ...]:
        """List the keys that apply to a name."""

    @property
    def names(self) -> Collection[str] | None:
        """The names that have layouts; `None` if there are rules, each for any number of names."""

    @property
    def parameters(self) -> tuple[Any, ...]:
        """The parameters that hold several tensors, which only a deployment has."""

    @property
    def prefix(self) -> str:
        """The text with which each key begins; reports leave it out."""

    @property
    def models(self) -> tuple[str, ...]:
        """The types of the models that the rules are for, whose weights they know; empty if they do not say."""

    @property
    def is_whole_elsewhere(self) -> bool:
        """True if a tensor without a layout is whole on every device; if not, no device holds it."""

    def report(self, names: Any, *, uneven: UnevenRule = "even") -> Any:
        """Report what the rules do to tensors; `None` if there are no rules."""


#: Layouts by name; tensors in none of them are not cut.
Layouts: TypeAlias = "Placing | Mapping[str, TensorLayout] | Mapping[str, Tiling]"


def placing_of(layouts: Layouts | None, argument: str = "layouts") -> Placing:
    """Return layouts of any kind as a `Placing`: maps and deployments as they are, a plain mapping wrapped.

    Args:
        layouts: a `LayoutMap`, a `Deployment`, a mapping from names to layouts or tilings, as a manifest is, or `None`,
            which is an empty mapping.
        argument: its name, for errors.

    Raises:
        TypeError: if the value is of another type.

    >>> from shardwise import DeviceMesh
    >>> rows = TensorLayout(("tp", None), DeviceMesh((2,), ("tp",)))
    >>> placing_of({"w": rows}).placed("w", 2).layout.axes
    ('tp', None)
    """
    if hasattr(type(layouts), "placed"):
        return layouts  # type: ignore[return-value]
    if layouts is None:
        return NO_LAYOUTS
    if not isinstance(layouts, Mapping):
        raise TypeError(
            f"{argument} must be a LayoutMap, a Deployment, a manifest or a mapping from names to layouts, got "
            f"{shown(layouts)}"
        )
    return _LayoutsByName(layouts)


def partition_of(layouts: Placing, path: str, shape: tuple[int, ...], uneven: UnevenRule) -> Tiling | None:
    """Return the partition of a tensor by its layout, or the tiling that it has instead; `None` if it has none.

    Args:
        layouts: the map, the deployment or the mapping that is asked.
        path: the tensor's name.
        shape: the tensor's elements along each dim.
        uneven: how a dim that does not divide is cut, unless the layouts say so.

    Raises:
        LayoutError: if the layout has no mesh or does not fit the tensor; the message names it.
        TypeError: if a mapping has something else than a layout under the name.

    >>> from shardwise import DeviceMesh
    >>> rows = TensorLayout(("tp", None), DeviceMesh((2,), ("tp",)))
    >>> partition_of(placing_of({"w": rows}), "w", (4, 2), "even").box("cpu:1")
    (slice(2, 4, None), slice(0, 2, None))
    """
    layout, own, _ = layouts.placed(path, len(shape))
    if layout is None:
        return None
    if isinstance(layout, Tiling):
        if layout.shape != shape:
            raise LayoutError(f"tensor {shown(path)} has shape {shape}, but its tiling has {layout.shape}")
        return layout
    instance(f"layouts[{shown(path)}]", layout, TensorLayout)
    assert isinstance(layout, TensorLayout)
    if layout.device_mesh is None:
        raise LayoutError(f"tensor {shown(path)}: its layout {shown(layout)} has no mesh, and neither have the layouts")
    try:
        return layout.partition(shape, own or uneven)
    except LayoutError as error:
        raise LayoutError(f"tensor {shown(path)}: {error}") from None


class _LayoutsByName:
    """Layouts of a plain mapping, each for the tensor of one name."""

    __slots__ = ("_layouts", "_placed")

    def __init__(self, layouts: Mapping[str, Any]) -> None:
        self._layouts = layouts
        #: The places by the identity of the layout: many tensors have the same, which is kept here.
        self._placed: dict[int, Placed] = {}

    @property
    def world(self) -> DeviceMesh | None:
        """The mesh of all layouts, if they have the same."""
        meshes = self._distinct()
        has_boxes = any(
            isinstance(each, Tiling) and not hasattr(each, "device_mesh") for each in self._layouts.values()
        )
        return meshes[0] if len(meshes) == 1 and not has_boxes else None

    @property
    def meshes(self) -> dict[str, DeviceMesh]:
        """The meshes of the layouts: `"mesh"`, or `"mesh 0"` and so on if there are several."""
        meshes = self._distinct()
        return {"mesh" if len(meshes) == 1 else f"mesh {number}": mesh for number, mesh in enumerate(meshes)}

    def _distinct(self) -> list[DeviceMesh]:
        meshes = [getattr(each, "device_mesh", None) for each in self._layouts.values()]
        return [mesh for mesh in dict.fromkeys(meshes) if mesh is not None]

    def placed(self, path: str, rank: int) -> Placed:
        """Look up the layout of this very name."""
        layout = self._layouts.get(path)
        placed = self._placed.get(id(layout))
        if placed is None or placed.layout is not layout:  # A copy of this object has other layouts.
            placed = self._placed[id(layout)] = Placed(layout)
        return placed

    def placed_alike(self, paths: Sequence[str], rank: int) -> Iterator[tuple[Placed, Sequence[int]]]:
        """Yield the place of each name, with its position."""
        return ((self.placed(path, rank), (at,)) for at, path in enumerate(paths))

    def matching_rules(self, path: str) -> tuple[str, ...]:
        """Return the name itself if it has a layout."""
        return (path,) if path in self._layouts else ()

    @property
    def names(self) -> Collection[str]:
        """The names of the mapping."""
        return self._layouts.keys()

    @property
    def parameters(self) -> tuple[Any, ...]:
        """An empty tuple: no parameter holds several tensors."""
        return ()

    @property
    def prefix(self) -> str:
        """Empty: each key is a name."""
        return ""

    @property
    def models(self) -> tuple[str, ...]:
        """Return no types: each layout is for the tensor of a name."""
        return ()

    @property
    def is_whole_elsewhere(self) -> bool:
        """True: what is not in the mapping is not cut."""
        return True

    def report(self, names: Any, *, uneven: UnevenRule = "even") -> None:
        """Return `None`, for a mapping has no rules."""


#: The layouts of no tensor.
NO_LAYOUTS: Placing = _LayoutsByName({})
