"""The tensor-parallel plans that Hugging Face transformers' configurations carry, as rules of a layout map.

A plan maps module names, in which `*` is a layer number, to styles: `{"layers.*.self_attn.q_proj": "colwise"}`. What a
style cuts is defined by `transformers.distributed.tensor_parallel`, for weights stored as in PyTorch: the
`weight` of a linear module is (out, in), experts are (experts, out, in).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from .._arguments import instance
from .._text import shown
from ..errors import LayoutError, MeshError
from ..layout import Axes, Spec
from ..mesh import DeviceMesh
from ..packed import concat, part

__all__ = ["rules_of_plan"]

_Cut = Literal["rows", "columns", "dim 0", "dim 1", "packed rows", "packed columns", "experts", "nothing"]

#: What each style does to the parameters: rows are the dim before the last, columns the last, and dims 0 and 1 are
#: themselves. A parameter of one dim has rows only, except that one not called bias has columns too. Packed ones are
#: two matrices, each cut separately (PyTorch's `_StridedShard` with a split factor of 2), except that a bias of packed
#: rows is cut as if it were not packed.
_STYLES: dict[str, _Cut] = {
    "colwise": "rows",
    "colwise_rep": "rows",
    "colwise_gather_output": "rows",
    "local_colwise": "rows",
    "packed_colwise": "packed rows",
    "local_packed_colwise": "packed rows",
    "embedding_rowwise": "dim 0",
    "rowwise": "columns",
    "rowwise_rep": "columns",
    "rowwise_split_input": "columns",
    "local_rowwise": "columns",
    "packed_rowwise": "packed columns",
    "local_packed_rowwise": "packed columns",
    "embedding_colwise": "dim 1",
    "grouped_gemm": "experts",
    # These say how values flow through a module, and leave its parameters whole.
    "sequence_parallel": "nothing",
    "replicate": "nothing",
    "replicated_with_grad_allreduce": "nothing",
    "mla_kv_a_proj": "nothing",
    "all_reduce": "nothing",
    "moe_tp_experts": "nothing",
    "moe_identity_expert": "nothing",
    "local_params": "nothing",
    "local": "nothing",
    "gather": "nothing",
    "ep_router": "nothing",
    "ep_dispatch_experts": "nothing",
}


def rules_of_plan(plan: Mapping[str, str], mesh: DeviceMesh, axis: str, config: Any = None) -> dict[str, Axes]:
    r"""The rules, regular expressions with axes, that say the same as a plan; see `LayoutMap.from_tp_plan`.

    >>> mesh = DeviceMesh((4,), ("model",))
    >>> for rule, axes in rules_of_plan({"layers.*.mlp.down_proj": "rowwise"}, mesh, "model").items():
    ...     print(rule, axes)
    (?:^|\.)layers\.\d+\.mlp\.down_proj\.weight$ (None, 'model')
    (?:^|\.)layers\.\d+\.mlp\.down_proj$ ('model',)
    """
    if not isinstance(plan, Mapping):
        raise TypeError(f"plan must be a mapping of names to styles, got {type(plan).__name__}")
    instance("mesh", mesh, DeviceMesh)
    if axis not in mesh.axis_names:
        raise MeshError(f"axis is {shown(axis)}; the axes of the mesh are {shown(mesh.axis_names)}")
    size = _packed_size(config)
    rules: dict[str, Axes] = {}
    for name, style in plan.items():
        if not isinstance(name, str) or not isinstance(style, str):
            raise TypeError(f"plan must map strings to strings, got {shown(name)}: {shown(style)}")
        if style not in _STYLES:
            known = ", ".join(sorted(_STYLES))
            raise LayoutError(f"plan[{shown(name)}] is the unknown style {shown(style)}; known are {known}")
        rules.update(_rules_of_entry(name, _STYLES[style], axis, size))
    return rules


def _rules_of_entry(name: str, cut: _Cut, axis: str, size: int | None) -> dict[str, Axes]:
    where = r"(?:^|\.)" + re.escape(name).replace(r"\*", r"\d+")
    is_expert = name.split(".")[-2:-1] == ["experts"]
    if cut == "nothing":
        return {}
    if cut == "experts" or (cut == "dim 0" and is_expert):
        return {rf"{where}$": (axis, None, None)}
    if cut == "dim 1":
        return {rf"{where}$": (None, axis, None)} if is_expert else {rf"{where}\.weight$": (None, axis)}
    spec: Spec = axis
    if cut.startswith("packed"):
        names = ("gate", "up") if name.endswith("gate_up_proj") else (None, None)
        spec = concat(*(part(size, axes=axis, uneven="ceil", name=label) for label in names))
    if is_expert:
        return {rf"{where}$": (None, None, spec) if cut.endswith("columns") else (None, spec, None)}
    # The name itself may be a parameter, of one dim: attention sinks.
    if cut == "columns":
        return {rf"{where}\.weight$": (None, spec), rf"{where}$": (axis,)}
    if cut == "packed columns":
        return {rf"{where}\.weight$": (None, spec)}
    return {rf"{where}\.weight$": (spec, None), rf"{where}(?:\.bias)?$": (axis,)}


def _packed_size(config: Any) -> int | None:
    """The rows of one of the packed matrices, if the configuration states them clearly."""
    names = ("intermediate_size", "moe_intermediate_size")
    given = [config.get(name) if isinstance(config, Mapping) else getattr(config, name, None) for name in names]
    sizes = {size for size in given if isinstance(size, int)}
    return sizes.pop() if len(sizes) == 1 else None
