"""Sizes that fit by the rules of a file, with its rewrites: what engines fuse and stack, and what they cut."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .._dtypes import CODES, DTYPES
from .._text import shown
from ..conversion.apply import rewritten_outline
from ..conversion.weights import Reader
from ..errors import LayoutError
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ..packed import PackedDim
from ..quantized import Along, Component, LogicalTensor, component_layouts
from ..quantized.cut import padded_size, sizes_that_fit
from ..quantized.forms import starred
from ..quantized.outline import components_in
from ..quantized.unstated import check_known
from ..rules.layout_map import LayoutMap
from ..rules.rewrites import Rewrites
from .answer import ORDER, WAYS, Cut, Fits, SizeFit, Unknown, Verdict, forms_of
from .evidence import odd_elements
from .roles import role_of

__all__ = ["fits_by_rules"]


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
    answers: list[SizeFit] = []
    whole: set[str] = set()
    unknown: dict[str, Unknown] = {}
    rests: dict[str, None] = {}
    elsewhere: set[str] = set()
    for tp, ep in sizes:
        try:
            layouts = LayoutMap.from_toml(rules, DeviceMesh((tp, ep), ("tp", "ep")), config=config)
        except LayoutError as error:
            if tp * ep == 1:
                raise
            LayoutMap.from_toml(rules, DeviceMesh((1, 1), ("tp", "ep")), config=config)  # Or they are wrong anyhow.
            answers.append(SizeFit.of(tp, ep, [_uncut(rules, tp * ep, str(error))]))
            continue
        cuts: list[Cut] = []
        is_known = False
        for tensor, count in kinds:
            name = starred(tensor.name)
            layout = layouts.layout_of(tensor.name, len(tensor.shape))
            matching = layouts.matching_rules(tensor.name)
            is_known = is_known or bool(matching)
            keys = [key.removeprefix(layouts.prefix) for key in matching]
            rests.update(dict.fromkeys(keys))
            if layout is None and role_of(tensor.name, len(tensor.shape)).elsewhere:
                elsewhere.add(name)
                continue
            found = [] if layout is None else _cuts(tensor, count, layout, layouts, tp)
            why = odd_elements(tensor, config) if layout is None or found else ""
            if layout is None and (why or sum(size > 1 for size in tensor.shape) > 1):
                why = "no rule matches it, and there is no default"
            if why:
                unknown[name] = Unknown(name, count, tensor.shape, why)
            if why or layout is None:
                continue
            if not found and sum(size > 1 for size in tensor.shape) > 1:
                whole.add(name)
            said = f"the rule {shown(keys[0])}" if keys else "the default of the rules"
            cuts.extend(cut._replace(rests_on=said) for cut in found)
        answers.append(SizeFit.of(tp, ep, cuts, known=is_known and not unknown))
    reasons = [f"rules of {rules.name}: {', '.join(rests)}"] if rests else []
    reasons += [] if method is None else [f"quant_method = {method}"]
    return Fits(
        method,
        forms_of(kinds),
        tuple(answers),
        tuple(sorted(whole)),
        tuple(unknown.values()),
        tuple(sorted(elsewhere)),
        tuple(reasons),
    )


def _uncut(rules: Path, ways: int, why: str) -> Cut:
    """Return a cut that stands for all that rules would cut, where they cannot be for so many ranks."""
    said = f"rules of {rules.name}"
    return Cut(said, 0, "plain", -1, 0, "elements", 1, ways, 1, (), "refused", why, None, True, (), (), (), said)


def _kinds(
    outline: Mapping[str, tuple[str, tuple[int, ...]]], config: Mapping[str, Any], rewrites: Rewrites, read: Reader
) -> tuple[str | None, list[tuple[LogicalTensor, int]]]:
    """Return the kinds of tensors after the rewrites: one tensor of those alike but for numbers, and their count."""
    stored = {name: (shape, CODES.get(code) or DTYPES[code]) for name, (code, shape) in outline.items()}
    components = components_in(stored, config, read)
    check_known(components)
    made, found = rewritten_outline(stored, rewrites, components, read)
    taken = {component.name for tensor in found.tensors.values() for component in tensor.components}
    tensors = list(found.tensors.values())
    for name, (shape, dtype) in made.items():
        if name not in taken:
            own = Component(name, dtype.code or dtype.name, shape, tuple(map(Along, range(len(shape)))))
            tensors.append(LogicalTensor(name, shape, "plain", (own,)))
    kinds: dict[Any, list[LogicalTensor]] = {}
    for one in tensors:
        kinds.setdefault((starred(one.name), one.shape, one.form, one.uncut), []).append(one)
    return found.method, [(alike[0], len(alike)) for alike in kinds.values()]


def _cuts(tensor: LogicalTensor, count: int, layout: TensorLayout, layouts: LayoutMap, tp: int) -> list[Cut]:
    """Return the cuts of a tensor, each tried alone; an error of all of them together is put to the first."""
    dims = [dim for dim, spec in enumerate(layout.axes) if spec]
    found = []
    for dim in dims:
        alone = TensorLayout([spec if at == dim else None for at, spec in enumerate(layout.axes)], layout.device_mesh)
        found.append(_cut(tensor, count, alone, layouts, dim, tp))
    if len(dims) > 1 and all(cut.verdict in ("fits", "shared") for cut in found):
        verdict, why = _verdict(tensor, layout, layouts)
        if verdict == "refused":
            found[0] = found[0]._replace(verdict=verdict, why=why)
    return found


def _cut(tensor: LogicalTensor, count: int, layout: TensorLayout, layouts: LayoutMap, dim: int, tp: int) -> Cut:
    spec, n, unit = layout.axes[dim], tensor.shape[dim], tensor.unit(dim)
    verdict, why = _verdict(tensor, layout, layouts)
    never = bool(tensor.why_uncut(dim))
    ways = tp
    padded: int | None = None
    sizes: tuple[int, ...] = ()
    if not isinstance(spec, PackedDim):
        axes = (spec,) if isinstance(spec, str) else spec or ()
        ways = math.prod(_ways(layout, axis) for axis in axes)
        padded = padded_size(n, unit, ways) if why and not never else None
        sizes = sizes_that_fit(n, unit, WAYS)
    if verdict == "refused" and padded is not None:
        verdict = "padded"
    blocks = tuple((name.rpartition(".")[2], block) for name, block in tensor.blocks.get(dim, ()))
    return Cut(
        starred(tensor.name), count, tensor.form, dim, n, "elements", 1, ways, unit, blocks,
        verdict, why, padded, never, sizes, (),
    )  # fmt: skip


def _verdict(tensor: LogicalTensor, layout: TensorLayout, layouts: LayoutMap) -> tuple[Verdict, str]:
    """Return whether a tensor can be cut so, without padding; and why not on whole blocks."""
    uneven, shared = layouts.uneven_of(tensor.name) or "even", layouts.shared_of(tensor.name)
    why = ""
    for verdict in ORDER[:2]:
        try:
            layout.partition(tensor.shape, uneven)
            made = component_layouts(tensor, layout, uneven, shared=shared or verdict == "shared")
            if not all(isinstance(one, TensorLayout) for one in made.values()):
                # Engines count blocks from a rank's first row. The reason is that of a cut where nothing is shared.
                component_layouts(tensor, layout, uneven)
        except LayoutError as error:
            why = why or str(error).removeprefix(f"{shown(tensor.name)}: ")
        else:
            return verdict, why
    return "refused", why


def _ways(layout: TensorLayout, axis: str) -> int:
    assert layout.device_mesh is not None
    return layout.device_mesh.axis_size(axis)
