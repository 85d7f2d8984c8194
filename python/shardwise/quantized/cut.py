"""One layout for a logical tensor, and the layouts of its components that follow from it (rule 2.13)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from .._text import counted, elements_text, shown
from ..errors import LayoutError
from ..layout import Spec, TensorLayout, UnevenRule
from ..mesh import DeviceMesh
from ..packed import PackedDim, Part, concat, part
from ..partition import Partition
from ..shared_tiling import SharedTiling, Windows
from .component import Along, LogicalTensor

__all__ = ["component_layouts", "padded_size", "sizes_that_fit"]


class _CutKey(NamedTuple):
    """The inputs of the layouts of components, without names: equal for the layers of a model."""

    shape: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    along: tuple[tuple[Along, ...], ...]
    tails: tuple[str, ...]
    uncut: tuple[tuple[int, str], ...]
    layout: TensorLayout
    uneven: UnevenRule
    shared: bool


@overload
def component_layouts(
    tensor: LogicalTensor, layout: TensorLayout, uneven: UnevenRule = "even", *, shared: Literal[False] = False
) -> dict[str, TensorLayout]: ...
@overload
def component_layouts(
    tensor: LogicalTensor, layout: TensorLayout, uneven: UnevenRule = "even", *, shared: bool
) -> dict[str, TensorLayout | SharedTiling]: ...
def component_layouts(
    tensor: LogicalTensor, layout: TensorLayout, uneven: UnevenRule = "even", *, shared: bool = False
) -> dict[str, Any]:
    """Return the layout of each component: a device holds the blocks that its box of the logical tensor touches.

    If devices share blocks unevenly, no layout expresses it. The answer is then a `Tiling` over the devices of the
    mesh, in which shared blocks are boxes of their own that both neighbours hold.

    Args:
        tensor: the logical tensor.
        layout: how the logical tensor is cut; the layout has a mesh.
        uneven: the rule for dims that do not divide. The returned layouts contain it, whatever rule they are later used
            with.
        shared: whether a cut may fall within a block that has one scale. The devices on both sides hold the scale
            then, as replicas.

    Raises:
        LayoutError: if a cut falls within a block, or within values that are packed together; if a part of a fused dim
            does not begin on a block; or if a dim cannot be cut at all. The message names sizes and padding that work.

    >>> from shardwise import DeviceMesh
    >>> from shardwise.quantized import Along, Component
    >>> weight = Component("down.weight", "F8_E4M3", (256, 512), (Along(0), Along(1)))
    >>> scale = Component("down.weight_scale_inv", "F32", (2, 4), (Along(0, 128), Along(1, 128)))
    >>> down = LogicalTensor("down.weight", (256, 512), "FP8 in blocks", (weight, scale))
    >>> layout = TensorLayout((None, "tp"), DeviceMesh((4,), ("tp",)))
    >>> component_layouts(down, layout)["down.weight_scale_inv"].shard_shape("cpu:1", (2, 4))
    (2, 1)
    >>> layout = TensorLayout((None, "tp"), DeviceMesh((8,), ("tp",)))
    >>> component_layouts(down, layout)
    Traceback (most recent call last):
    shardwise.errors.LayoutError: 'down.weight': dim 1 has 512 elements, and is cut at 64, within a block of 128 of
    weight_scale_inv; whole blocks need a multiple of 1024: it would fit padded to 1024, or cut 1, 2 or 4 ways; with
    shared = true both sides hold the block
    >>> component_layouts(down, layout, shared=True)["down.weight_scale_inv"].shard_shape("cpu:1", (2, 4))
    (2, 1)
    >>> layout = TensorLayout(("tp", None), DeviceMesh((8,), ("tp",)))
    >>> wide = LogicalTensor("up.weight", (1536, 128), "FP8 in blocks", (scale._replace(shape=(12, 1)),))
    >>> tiling = component_layouts(wide, layout, shared=True)["down.weight_scale_inv"]
    >>> [[piece.box[0].indices(12)[:2] for piece in tiling.pieces(f"cpu:{rank}")] for rank in (0, 1)]
    [[(0, 1), (1, 2)], [(1, 2), (2, 3)]]
    """
    if layout.rank != len(tensor.shape):
        raise LayoutError(
            f"{shown(tensor.name)} has {counted(len(tensor.shape), 'dim')}, but its layout has {layout.rank}"
        )
    if layout.device_mesh is None:
        raise LayoutError(f"{shown(tensor.name)}: its layout {shown(layout)} has no mesh")
    along = tuple(component.along for component in tensor.components)
    tails = tuple(component.name.removeprefix(tensor.name.rpartition(".")[0] + ".") for component in tensor.components)
    shapes = tuple(component.shape for component in tensor.components)
    key = _CutKey(tensor.shape, shapes, along, tails, tensor.uncut, layout, uneven, shared)
    try:
        layouts = _layouts(key)
    except LayoutError as error:
        raise LayoutError(f"{shown(tensor.name)}: {error}") from None
    return {component.name: one for component, one in zip(tensor.components, layouts, strict=True)}


def padded_size(n: int, unit: int, shards: int) -> int:
    """Return the least size from `n` that `shards` shards cut into whole units.

    >>> padded_size(2880, 32, 4)
    2944
    """
    return -(-n // (unit * shards)) * unit * shards


def sizes_that_fit(n: int, unit: int, among: Iterable[int]) -> tuple[int, ...]:
    """Return the numbers of shards, of those to look at, that cut `n` elements into whole units.

    >>> sizes_that_fit(29568, 128, (1, 2, 3, 4, 8))
    (1, 3)
    """
    return tuple(shards for shards in among if n % (shards * unit) == 0)


@lru_cache(maxsize=4096)
def _layouts(key: _CutKey) -> tuple[TensorLayout | SharedTiling, ...]:
    mesh = key.layout.device_mesh
    assert mesh is not None
    dims = [_parts(spec, n, key.uneven) for spec, n in zip(key.layout.axes, key.shape, strict=True)]
    for dim, why in key.uncut:
        if any(_is_cut(one, mesh) for one in dims[dim]):
            raise LayoutError(f"dim {dim} cannot be cut: {why}")
    made: list[TensorLayout | SharedTiling] = []
    for shape, along, tail in zip(key.shapes, key.along, key.tails, strict=True):
        specs: list[Spec | _Shared] = []
        for each in along:
            if each.of is None:
                specs.append(None)
                continue
            # Blocks of the flattened tensor are cut by the rows.
            dim, row = (0, math.prod(key.shape[1:])) if each.of < 0 else (each.of, 1)
            if any(_is_cut(one, mesh) or one.pad_to is not None for one in dims[dim]):
                specs.append(_spec(each, row, dims[dim], _Dim(dim, tail, mesh, key.shared)))
            else:
                specs.append(None)
        alone = [spec for spec in specs if not isinstance(spec, _Shared)]
        if len(alone) == len(specs):
            made.append(TensorLayout(alone, mesh))
            continue
        windows = [
            spec.windows if isinstance(spec, _Shared) else _windows(spec, size, mesh)
            for spec, size in zip(specs, shape, strict=True)
        ]
        within = any(spec.begins_within for spec in specs if isinstance(spec, _Shared))
        made.append(SharedTiling.of(shape, key.layout, windows, begins_within=within))
    return tuple(made)


def _shards(one: Part, mesh: DeviceMesh) -> int:
    return math.prod(mesh.axis_size(axis) for axis in one.axes)


def _is_cut(one: Part, mesh: DeviceMesh) -> bool:
    return one.at_most != 1 and _shards(one, mesh) > 1


def _parts(spec: Spec, n: int, uneven: UnevenRule) -> list[Part]:
    """Return the parts of a dim with all factors known, each with its rule; a plain dim has one."""
    if not isinstance(spec, PackedDim):
        return [part(n, axes=spec or (), uneven=uneven)]
    known = []
    for one, size in zip(spec.parts, spec.sizes(n), strict=True):
        others = math.prod(factor for factor in one.factors if factor is not None)
        factors = tuple((size // others if others else 0) if factor is None else factor for factor in one.factors)
        rule = one.uneven if one.uneven is not None or one.cut is None else uneven
        known.append(replace(one, factors=factors, ratio=1, uneven=rule))
    return known


class _Dim(NamedTuple):
    """A dim of the logical tensor, and the component in question."""

    number: int
    component: str
    mesh: DeviceMesh
    shared: bool


class _Shared(NamedTuple):
    """A dim of a component, of which devices hold ranges that overlap."""

    windows: Windows
    #: True if the first of several blocks of a device begins before the device's elements.
    begins_within: bool


def _windows(spec: Spec, n: int, mesh: DeviceMesh) -> Windows:
    """Return the ranges of a dim of `n` elements that a spec gives each device."""
    partition = TensorLayout((spec,), mesh).partition((n,))
    begins, rows = partition.all_pieces()
    return Windows(begins, rows[:, 0], np.array(partition.holder_shapes(), np.int64)[:, 0])


def _together(found: list[Part | _Shared], sizes: list[int], mesh: DeviceMesh) -> _Shared:
    """Return the ranges of all parts of a dim; the parts have these sizes and follow one another."""
    devices: list[list[npt.NDArray[np.int64]]] = [[] for _ in range(mesh.size)]
    base, places, within = 0, np.zeros(mesh.size, np.int64), False
    for one, size in zip(found, sizes, strict=True):
        windows = one.windows if isinstance(one, _Shared) else _windows(concat(one), size, mesh)
        within = within or (isinstance(one, _Shared) and one.begins_within)
        for number, own in enumerate(devices):
            rows = windows.rows[windows.begins[number] : windows.begins[number + 1]]
            own.append(rows + np.array([base, base, places[number]]))
        base, places = base + size, places + windows.sizes
    each = [np.concatenate(own) for own in devices]
    begins = np.cumsum([0, *map(len, each)], dtype=np.int64)
    return _Shared(Windows(begins, np.concatenate(each), places), within)


def _spec(along: Along, row: int, parts: list[Part], dim: _Dim) -> Spec | _Shared:
    """Return the spec of a component's dim. Of an element of the parts, the logical dim's, the blocks count `row`."""
    sizes = [math.prod(factor or 0 for factor in one.factors) * row for one in parts]
    for number, base in enumerate(accumulate(sizes[:-1]), 1):
        if base % along.block:
            raise LayoutError(
                f"dim {dim.number}: part {number} begins at {base // row}, within a block of {along.block} of "
                f"{dim.component}; the parts of a fused weight share it"
            )
    found: list[Part | _Shared] = [
        _coarse(along, row, one, dim)
        if _is_cut(one, dim.mesh) or one.pad_to is not None
        else part(along.elements(size), name=one.name)
        for one, size in zip(parts, sizes, strict=True)
    ]
    cut = [one for one in found if isinstance(one, Part)]
    if len(cut) < len(found):
        return _together(found, [along.elements(size) for size in sizes], dim.mesh)
    if len(cut) == 1 and _is_plain(cut[0], dim.mesh):
        return cut[0].axes
    return concat(*cut)


def _is_plain(one: Part, mesh: DeviceMesh) -> bool:
    """Return whether the part is cut in equal shards, so that all uneven rules agree and it is like a plain dim."""
    shards = _shards(one, mesh)
    (n, *others) = (factor or 0 for factor in one.factors)
    divides = not others and n % (shards * (one.unit or 1)) == 0
    return divides and one.pad_to is None and (one.at_most is None or one.at_most >= shards)


def _coarse(along: Along, row: int, one: Part, dim: _Dim) -> Part | _Shared:
    """Return the part of a component that has the blocks of a part which is cut, or what devices have of it."""
    block, words = along.block, along.words
    assert one.cut is not None
    factors = [factor or 0 for factor in one.factors]
    outer, n, inner = math.prod(factors[: one.cut]), factors[one.cut], math.prod(factors[one.cut + 1 :]) * row
    if (block, words, row) == (1, 1, 1):
        return one
    shards = _shards(one, dim.mesh)
    if one.split and shards > n > 0 and shards % n == 0:
        n, inner = n * inner, 1
    one = replace(one, split=False)
    if outer > 1 and n * inner % block:
        raise LayoutError(
            f"dim {dim.number}: each of its {outer} segments has {n * inner // row} elements, not a multiple of the "
            f"block of {block} of {dim.component}"
        )
    cuts = _cuts(one, n, dim.mesh)
    within = next((at for at in cuts[:, 0].tolist() if at < n and at * inner % block), None)
    count = along.elements(n * inner)
    if within is not None:
        why_not = _why_not_shared(along, one)
        if why_not is not None or not dim.shared:
            raise LayoutError(_within(along, dim, _Factor(n, inner, row, shards), within, why_not))
        return _shared(along, one, outer, count, cuts * inner, dim)
    # Every shard has the same room if the factor is padded.
    room = None if one.pad_to is None else _partition(one, n, dim.mesh).largest_shard_shape[0] * inner
    if room is not None and room % block:
        raise LayoutError(
            f"dim {dim.number} has room for {room // row} elements on each device when padded, not a multiple of the "
            f"block of {block} of {dim.component}"
        )
    # How many elements of the factor make whole blocks, and what they are in the component.
    unit = math.lcm(one.unit or 1, block // math.gcd(block, inner)) * inner // block * words
    coarse = part(
        (outer, count) if outer > 1 else count,
        1 if outer > 1 else 0,
        one.axes,
        one.uneven,
        at_most=one.at_most,
        unit=None if unit == 1 else unit,
        pad_to=None if room is None else max(room // block * words, 1),
        pad_each=room is not None,
        name=one.name,
    )
    if not np.array_equal(_cuts(coarse, count, dim.mesh), np.minimum(-(-cuts * inner * words // block), count)):
        raise LayoutError(
            f"dim {dim.number}: the rule {one.uneven!r} cuts {dim.component} at other places than its weight; "
            "give the factor a unit"
        )
    return coarse


def _why_not_shared(along: Along, one: Part) -> str | None:
    """Return the reason why devices cannot share the blocks of a part: empty for packed values, `None` if they can."""
    if along.packing > 1:
        return ""
    # The room of padding may reach into blocks that a share does not.
    return None if one.pad_to is None else "blocks of a dim that is padded are not shared"


def _shared(along: Along, one: Part, outer: int, count: int, cuts: npt.NDArray[np.int64], dim: _Dim) -> Part | _Shared:
    """Return the blocks, of `count` in each of `outer` segments, that each device's share touches; as a part, if so."""
    start, stop = cuts.T
    low, high = np.where(start == stop, count, [start // along.block, -(-stop // along.block)])
    if outer == 1:
        coarse = part(count, 0, one.axes, one.uneven, at_most=count, name=one.name)
        try:
            if np.array_equal(_cuts(coarse, count, dim.mesh), np.stack([low, high]).T):
                return coarse
        except LayoutError:  # So many devices cannot have so many blocks in equal shares.
            pass
    size, segment = high - low, np.arange(outer, dtype=np.int64)
    rows = np.stack([np.add.outer(side, segment * count) for side in (low, high)] + [np.multiply.outer(size, segment)])
    begins = np.arange(len(size) + 1, dtype=np.int64) * outer
    within = bool(((start % along.block != 0) & (size > 1)).any())
    return _Shared(Windows(begins, rows.reshape(3, -1).T, size * outer), within)


def _partition(one: Part, n: int, mesh: DeviceMesh) -> Partition:
    """Return the partition of the one factor of the part that is cut, given `n` elements."""
    alone = replace(one, factors=(n,), cut=0, ratio=1, name=None, blocks=())
    return TensorLayout((concat(alone),), mesh).partition((n,))


def _cuts(one: Part, n: int, mesh: DeviceMesh) -> npt.NDArray[np.int64]:
    """Start and stop of the cut factor, of `n` elements, on each device."""
    return _partition(one, n, mesh).boxes()[:, 0]


class _Factor(NamedTuple):
    """A factor that is cut.

    Attributes:
        n: Its size.
        inner: The elements that the blocks count behind each of its steps.
        row: Those of them for each element of the dim.
        shards: The shards into which it is cut.
    """

    n: int
    inner: int
    row: int
    shards: int


def _within(along: Along, dim: _Dim, factor: _Factor, at: int, why_not: str | None) -> str:
    """Return the message of a cut within a block, and why it cannot be shared."""
    block, (n, inner, row, shards) = along.block, factor
    unit = block // math.gcd(block, inner)
    what = f"{block} values packed together" if along.packing > 1 else f"a block of {block}"
    fits = [str(k) for k in sizes_that_fit(n, unit, range(1, 65))]
    fits = fits if len(fits) > 1 else []
    ways = f"{', '.join(fits[:-1])} or {fits[-1]}" if fits else ""
    share = "; with shared = true both sides hold the block" if why_not is None else f"; {why_not}" if why_not else ""
    elements = elements_text(n) if inner == row else f"{counted(n, 'unit')} of {elements_text(inner // row)}"
    return (
        f"dim {dim.number} has {elements}, and is cut at {at}, within {what} of {dim.component}; whole blocks need a "
        f"multiple of {unit * shards}: it would fit padded to {padded_size(n, unit, shards)}"
        + (f", or cut {ways} ways" if fits else "")
        + share
    )
