"""Sizes that fit by the rules of a file, with its rewrites: what engines fuse and stack, and what they cut."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .._dtypes import CODES
from .._text import shown
from ..errors import LayoutError
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ..packed import PackedDim
from ..quantized import Along, Component, LogicalTensor, component_layouts
from ..quantized.cut import padded_size, sizes_that_fit
from ..rules.layout_map import LayoutMap
from ..rules.rewrites import Rewrites
from ..store.described import rewritten_outline
from ..store.quantized import components_in
from .answer import Cut, Fits, SizeFit, Verdict
from .model import Reader

__all__ = ["fits_by_rules"]

_ORDER: tuple[Verdict, ...] = ("fits", "shared", "padded", "refused")
_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.|$)")


def fits_by_rules(
    outline: Mapping[str, tuple[str, tuple[int, ...]]],
    config: Mapping[str, Any],
    rules: Path,
    sizes: Sequence[tuple[int, int]],
    read: Reader,
) -> Fits:
    """Say for each size whether the tensors fit as a rules file rewrites and cuts them; see `fits`.

    Raises:
        OSError, ParseError: as for `LayoutMap.from_toml`.
        LayoutError: if a rewrite does not apply to the tensors.
    """
    method, kinds = _kinds(outline, config, Rewrites.from_toml(rules, config=config), read)
    answers, whole = [], set()
    for tp, ep in sizes:
        mesh = (
            DeviceMesh((tp, ep), ("tp", "ep")) if any(other > 1 for _, other in sizes) else DeviceMesh((tp,), ("tp",))
        )
        layouts = LayoutMap.from_toml(rules, mesh, config=config)
        cuts = []
        for tensor, count in kinds:
            layout = layouts.layout_of(tensor.name, len(tensor.shape))
            if layout is None:
                whole.add(_NUMBER.sub("*", tensor.name))
                continue
            if any(layout.axes):
                cuts.append(_cut(tensor, count, layout, layouts, tp))
        cuts.sort(key=lambda cut: -_ORDER.index(cut.verdict))
        worst = max((cut.verdict for cut in cuts), key=_ORDER.index, default=_ORDER[0])
        answers.append(SizeFit(tp, ep, worst, tuple(cuts)))
    forms: dict[str, int] = {}
    for tensor, count in kinds:
        if tensor.form != "plain":
            forms[tensor.form] = forms.get(tensor.form, 0) + count
    return Fits(method, tuple(sorted(forms.items())), tuple(answers), tuple(sorted(whole)))


def _kinds(
    outline: Mapping[str, tuple[str, tuple[int, ...]]], config: Mapping[str, Any], rewrites: Rewrites, read: Reader
) -> tuple[str | None, list[tuple[LogicalTensor, int]]]:
    """The tensors after the rewrites, of those that differ in numbers in their names one, and how many these are."""
    stored = {name: (shape, CODES[code]) for name, (code, shape) in outline.items()}
    made, found = rewritten_outline(stored, rewrites, components_in(stored, config, read), read)
    taken = {component.name for tensor in found.tensors.values() for component in tensor.components}
    tensors = list(found.tensors.values())
    for name, (shape, dtype) in made.items():
        if name not in taken:
            own = Component(name, dtype.code or "", shape, tuple(map(Along, range(len(shape)))))
            tensors.append(LogicalTensor(name, shape, "plain", (own,)))
    kinds: dict[Any, list[LogicalTensor]] = {}
    for one in tensors:
        kinds.setdefault((_NUMBER.sub("*", one.name), one.shape, one.form, one.uncut), []).append(one)
    return found.method, [(alike[0], len(alike)) for alike in kinds.values()]


def _cut(tensor: LogicalTensor, count: int, layout: TensorLayout, layouts: LayoutMap, tp: int) -> Cut:
    uneven = layouts.uneven_of(tensor.name) or "even"
    shared = layouts.shared_of(tensor.name)
    dim = next(at for at, spec in enumerate(layout.axes) if spec)
    spec = layout.axes[dim]
    n, unit = tensor.shape[dim], tensor.unit(dim)
    why, verdict = "", _ORDER[0]
    for verdict in ("fits", "shared"):
        try:
            layout.partition(tensor.shape, uneven)
            component_layouts(tensor, layout, uneven, shared=shared or verdict == "shared")
            break
        except LayoutError as error:
            why = why or str(error).removeprefix(f"{shown(tensor.name)}: ")
    else:
        is_padded = not isinstance(spec, PackedDim) and not tensor.why_uncut(dim)
        verdict = "padded" if is_padded else "refused"
    axes = () if isinstance(spec, PackedDim) else (spec,) if isinstance(spec, str) else spec or ()
    ways = math.prod(_ways(layout, axis) for axis in axes)
    padded = None if isinstance(spec, PackedDim) or not why or tensor.why_uncut(dim) else padded_size(n, unit, ways)
    blocks = tuple((name.rpartition(".")[2], block) for name, block in tensor.blocks.get(dim, ()))
    name = _NUMBER.sub("*", tensor.name)
    sizes = () if isinstance(spec, PackedDim) else sizes_that_fit(n, unit, range(1, 65))
    return Cut(
        name, count, tensor.form, dim, n, "elements", 1, ways if ways > 1 else tp, unit, blocks, verdict,
        "" if verdict == "fits" else why, padded, bool(tensor.why_uncut(dim)), sizes, (),
    )  # fmt: skip


def _ways(layout: TensorLayout, axis: str) -> int:
    assert layout.device_mesh is not None
    return layout.device_mesh.axis_size(axis)
