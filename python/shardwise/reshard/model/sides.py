"""The two sides of a plan for a model: the tilings of tensors on each side, and the side's devices in order."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..._dtypes import find_dtype
from ..._fork import importing
from ..._text import shown
from ..._types import Numbers
from ...errors import LayoutError
from ...layout import TensorLayout, UnevenRule
from ...partition import Partition
from ...placing import placing_of
from ...rules.rewrites import Rewrites
from ...tiling import Tiling

if TYPE_CHECKING:
    from ...quantized import Components
    from ...rules.left_out import LeftOut

__all__ = ["Described", "ModelChange", "PieceRows", "TilingSide", "shape_and_dtype", "tilings_of_both", "worlds"]


#: The shape and the dtype of a tensor.
Described = tuple[tuple[int, ...], Any]


class ModelChange(NamedTuple):
    """A change of a model's layouts: the arguments of `plan_model`."""

    src: Any
    dst: Any
    tensors: Mapping[str, Any]
    uneven: UnevenRule = "even"
    rewrites: Rewrites | None = None
    source_rewrites: Rewrites | None = None
    config: Mapping[str, Any] | None = None
    nodes: Mapping[Any, Hashable] | None = None


class PieceRows(NamedTuple):
    """The pieces of a rewritten tensor's tiling, each with its place before it moves.

    Attributes:
        begins: For each holder its first row; one more entry for the end.
        rows: For each piece the number of its stored tensor, or `ZEROS`; its first element in the holder's array of
            that tensor; its start in the new tensor, per dim; and the elements from one to the next in the array, per
            dim.
    """

    begins: Numbers
    rows: Numbers


def tilings_of_both(pairs: Sequence[tuple[str, Tiling, Tiling]]) -> tuple[list[Tiling], list[Tiling]]:
    """Return the tilings of the source, and those of the destination."""
    return [src for _, src, _ in pairs], [dst for _, _, dst in pairs]


def worlds(layouts: tuple[Any, Any], pairs: Sequence[tuple[str, Tiling, Tiling]]) -> Iterator[Any]:
    """Yield the devices of both sides, in order: those of a world, or those that hold the tensors."""
    for given, tilings in zip(layouts, tilings_of_both(pairs), strict=True):
        placing = placing_of(given)
        # A mapping would go through all its layouts to say so.
        world = placing.world if placing.names is None else None
        if world is not None:
            yield from world.labels()
        else:
            seen: set[int] = set()
            for one in tilings:
                # Many tilings have the mesh in common.
                at = id(one.device_mesh) if isinstance(one, Partition) else id(one)
                if at not in seen and one.has_labels:
                    seen.add(at)
                    yield from one.holders


def shape_and_dtype(name: str, tensor: Any) -> tuple[tuple[int, ...], Any]:
    """Return the shape and the dtype of a tensor that a caller gives."""
    try:
        shape, dtype = tensor if type(tensor) is tuple else (tensor.shape, tensor.dtype)
        return tuple(map(operator.index, shape)), dtype
    except (AttributeError, TypeError, ValueError):
        pass
    try:
        shape, dtype = tensor
        return tuple(map(operator.index, shape)), dtype
    except (TypeError, ValueError):
        raise TypeError(f"tensors[{shown(name)}] must be (shape, dtype), got {shown(tensor)}") from None


class TilingSide:
    """The tilings of tensors on one side; tensors that are cut alike share one object."""

    def __init__(self, side: str, layouts: Any, uneven: UnevenRule) -> None:
        self._side, self._uneven = side, uneven
        self._layouts = placing_of(layouts, side)
        self._known: dict[Any, Tiling] = {}
        self._followed: Mapping[str, TensorLayout | Tiling] = {}

    @property
    def is_for_models(self) -> bool:
        """True if the layouts come from rules for types of models, which are for weights that are not quantized."""
        return bool(self._layouts.models)

    def follow(self, tensors: Mapping[str, Described], weights: Components, config: Mapping[str, Any]) -> list[LeftOut]:
        """Give the components of quantized weights the layouts that follow from their weights' layouts.

        What the rules of a model cut otherwise than it may be is refused, or given as what is said of it.
        """
        with importing:
            from ...quantized.follow import followed
            from ...quantized.unstated import cast_weights, check_elements

        said: list[LeftOut] = []
        if self.is_for_models:
            outline = {name: (shape, find_dtype(dtype)) for name, (shape, dtype) in tensors.items()}
            known = {name: (shape, dtype) for name, (shape, dtype) in outline.items() if dtype is not None}
            check_elements(known, weights, self._layouts)
            said = cast_weights(known, weights, self._layouts, config)
        self._followed = followed(weights, self._layouts, self._uneven)
        return said

    def tiling(self, name: str, shape: tuple[int, ...]) -> Tiling:
        """Return the tiling of a tensor.

        Raises:
            LayoutError: if it has none, or a layout does not fit.
        """
        (tiling,) = self.tilings({name: (shape, None)})
        return tiling

    def tilings(self, tensors: Mapping[str, Described]) -> list[Tiling]:
        """Return the tilings of tensors, as `tiling` does."""
        known, followed, placed = self._known, self._followed, self._layouts.placed
        found: list[Tiling] = []
        for name, (shape, _) in tensors.items():
            layout: Any = followed.get(name) if followed else None
            own = None
            if layout is None:
                layout, own, _ = placed(name, len(shape))
            key = id(layout), shape, own
            tiling = known.get(key)
            if tiling is None:
                if layout is None:
                    raise LayoutError(f"{self._side} has no layout for {shown(name)}")
                tiling = known[key] = self._made(layout, name, shape, own or self._uneven)
            found.append(tiling)
        return found

    def _made(self, given: Any, name: str, shape: tuple[int, ...], uneven: UnevenRule) -> Tiling:
        if isinstance(given, Tiling):
            if given.shape != shape:
                raise LayoutError(f"{self._side}[{shown(name)}] has shape {given.shape}, but the tensor has {shape}")
            return given
        if isinstance(given, TensorLayout):
            try:
                return given.partition(shape, uneven)
            except LayoutError as error:
                raise LayoutError(f"{self._side}[{shown(name)}]: {error}") from None
        kind = type(given).__name__
        raise TypeError(f"{self._side}[{shown(name)}] must be a TensorLayout or a Tiling, got {kind}")
