"""Layouts of tensors by the rules for what rewrites make of them: a part of a fused weight, an expert of a stack.

Rules of an engine are for its own weights, `qkv_proj`. What they say of `q_proj` follows from the rewrites, name by
name and dim by dim, without the tensors: so an adapter of `q_proj` is cut as that part is, whatever else is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from .._text import shown
from ..errors import LayoutError
from ..layout import Spec, TensorLayout
from ..packed import PackedDim, Part, concat, part
from .rewrite import Rewrite
from .rewrites import Rewrites

__all__ = ["Within", "layout_before", "rank_after", "steps_of"]


class Within(NamedTuple):
    """One rewrite that takes a tensor: as which part, and what it is called then."""

    rewrite: Rewrite
    part: str
    name: str


def steps_of(name: str, rewrites: Rewrites | None) -> tuple[Within, ...]:
    """Return the rewrites that take a tensor of this name, in order.

    >>> fused = {"name": "h.{i}.qkv", "packed": "q:(4@tp 2) + k:(2@tp 2) + v:(2@tp 2)"}
    >>> for step in steps_of("h.3.k", Rewrites([{"from": "h.{i}.{q,k,v}", "to": fused}])):
    ...     print(step.part, step.name)
    k h.3.qkv
    """
    steps: list[Within] = []
    for one in () if rewrites is None else rewrites.sets:
        for rewrite in one.rewrites:
            step = _step(name, rewrite)
            if step is not None:
                steps.append(step)
                name = step.name
    return tuple(steps)


def _step(name: str, rewrite: Rewrite) -> Within | None:
    target = rewrite.target
    for label, template in rewrite.source.names:
        values = template.matched(name)
        if values is not None:
            names = dict(target.names)
            # A tensor that is taken apart has several names; all of its parts are cut alike, or it is refused later.
            found = names.get(label) or next(iter(names.values()))
            return Within(rewrite, label, found.filled(values))
    return None


def rank_after(rank: int, steps: Sequence[Within]) -> int:
    """Return the rank of what rewrites make of a tensor of this rank."""
    return rank + sum(len(step.rewrite.target.stack) - len(step.rewrite.source.stack) for step in steps)


def layout_before(layout: TensorLayout, steps: Sequence[Within]) -> TensorLayout:
    """Return the layout of a tensor, given the layout of the tensor that rewrites make of it.

    Raises:
        LayoutError: if the rule does not say how this part is cut: says why.

    >>> from shardwise import DeviceMesh, packed
    >>> rewrites = Rewrites([{"from": "{q,k}", "to": {"name": "qk", "packed": "q:(4 2) + k:(2 2)"}}])
    >>> rule = TensorLayout((packed.parse("q:(4@tp 2) + k:(2@tp 2)"), None), DeviceMesh((2,), ("tp",)))
    >>> print(layout_before(rule, steps_of("k", rewrites)).axes[0])
    k:(2@tp 2)
    """
    axes = list(layout.axes)
    for step in reversed(steps):
        try:
            axes = _before(axes, step)
        except LayoutError as error:
            raise LayoutError(f"in its rewrite to {shown(step.name)}, {error}") from None
    return TensorLayout(axes, layout.device_mesh, unreduced=layout.unreduced)


def _before(axes: list[Spec], step: Within) -> list[Spec]:
    source, target = step.rewrite.source, step.rewrite.target
    if not any(map(_is_cut, axes)):
        return [None] * (len(axes) - len(target.stack) + len(source.stack))
    if step.rewrite.refused is not None:
        raise LayoutError(step.rewrite.refused)
    if source.dims is not None or target.dims is not None or source.stack:
        raise LayoutError("its dims are split, merged or stacked, so a cut of one dim cannot be carried over")
    depth = len(target.stack)
    for field, spec in zip(target.stack, axes[:depth], strict=True):
        if _is_cut(spec):
            raise LayoutError(f"it is one of the tensors stacked along {{{field}}}, which is cut itself")
    axes = axes[depth:]
    if target.transpose:
        axes[-2:] = axes[:-3:-1]
    at = _dim(axes, target.dim)
    axes[at] = _unpadded(axes[at], target.pad_to)
    if _is_cut(axes[at]) and (target.zigzag is not None or source.zigzag is not None):
        raise LayoutError("the dim that is cut is in zigzag order")
    if target.packed is not None:
        labels = [step.part] if step.part else list(target.packed.names)
        order = source.packed
        if not step.part and (order is None or order.names != tuple(labels)):
            raise LayoutError("its parts are in another order there")
        found = [_part_of(axes[at], label) for label in labels]
        if not any(map(_is_cut, found)):
            axes[at] = None
        elif len(found) == 1:
            axes[at] = found[0]
        elif order is not None and all(one.name is not None for one in order.parts):
            axes[at] = axes[at]
        else:
            raise LayoutError("its parts are in another order there")
    elif source.packed is not None and _is_cut(axes[at]):
        raise LayoutError("it is taken apart into tensors with rules of their own")
    if source.pad_to is not None and _is_cut(axes[_dim(axes, source.dim)]):
        raise LayoutError(f"it is first padded to a multiple of {source.pad_to}")
    if source.transpose:
        axes[-2:] = axes[:-3:-1]
    return axes


def _dim(axes: list[Spec], dim: int) -> int:
    if not -len(axes) <= dim < len(axes):
        raise LayoutError(f"it has no dim {dim}")
    return dim % len(axes)


def _is_cut(spec: Spec) -> bool:
    return any(one.axes for one in spec.parts) if isinstance(spec, PackedDim) else bool(spec)


def _unpadded(spec: Spec, pad_to: int | None) -> Spec:
    """Return the cut of a dim before it is padded to a multiple: padding that the cut has."""
    if pad_to is None or not _is_cut(spec):
        return spec
    if not isinstance(spec, PackedDim):
        return concat(part(None, axes=spec or (), pad_to=pad_to))
    (one, *others) = spec.parts
    if others or one.unit is not None or one.pad_to not in (None, pad_to) or len(one.factors) > 1:
        raise LayoutError(f"the dim is padded to a multiple of {pad_to}, which its cut {shown(str(spec))} contradicts")
    return PackedDim((replace(one, factors=(None,), pad_to=pad_to),), spec.numbers)


def _part_of(spec: Spec, label: str) -> Spec:
    """Return the cut of one part of a fused dim."""
    if not _is_cut(spec):
        return None
    if not isinstance(spec, PackedDim) or label not in spec.names:
        raise LayoutError(f"the fused dim is cut as a whole by {shown(spec)}, which has no part {shown(label)}")
    found = [made for one in spec.parts if (made := _only(one, label)) is not None]
    return PackedDim(tuple(found), spec.numbers)


def _only(one: Part, label: str) -> Part | None:
    """Return the elements that one part of a packed dim has of a tensor."""
    if not one.blocks:
        return one if one.name == label else None
    size = sum(times for name, times in one.blocks if name == label)
    if not size:
        return None
    last: int | None = None if one.factors[-1] is None else size
    ratio = size if last is None else one.ratio
    return replace(one, factors=(*one.factors[:-1], last), ratio=ratio, name=label, blocks=())
