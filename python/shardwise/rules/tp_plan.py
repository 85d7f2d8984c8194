"""The tensor-parallel plans that Hugging Face transformers' configurations carry, as rules of a layout map.

A plan maps module names, in which `*` is a layer number, to styles: `{"layers.*.self_attn.q_proj": "colwise"}`. What a
style cuts is defined by `transformers.distributed.tensor_parallel`, with weights stored as PyTorch stores them: the
`weight` of a linear module is (out, in), experts are (experts, out, in).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from .._arguments import instance
from .._text import shown
from ..errors import LayoutError, MeshError
from ..layout import Axes
from ..mesh import DeviceMesh

__all__ = ["rules_of_plan"]

_Cut = Literal["rows", "columns", "experts", "nothing"]

#: What each style does to the parameters: rows are the dim before the last, columns the last. A 1-d parameter, like a
#: bias, has rows only.
_STYLES: dict[str, _Cut] = {
    "colwise": "rows",
    "colwise_rep": "rows",
    "colwise_gather_output": "rows",
    "local_colwise": "rows",
    "packed_colwise": "rows",
    "local_packed_colwise": "rows",
    "embedding_rowwise": "rows",
    "rowwise": "columns",
    "rowwise_rep": "columns",
    "rowwise_split_input": "columns",
    "local_rowwise": "columns",
    "packed_rowwise": "columns",
    "local_packed_rowwise": "columns",
    "embedding_colwise": "columns",
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


def rules_of_plan(plan: Mapping[str, str], mesh: DeviceMesh, axis: str) -> dict[str, Axes]:
    r"""The rules, regular expressions with axes, that say the same as a plan; see `LayoutMap.from_tp_plan`.

    >>> mesh = DeviceMesh((4,), ("model",))
    >>> rules_of_plan({"layers.*.mlp.down_proj": "rowwise"}, mesh, "model")
    {'(?:^|\\.)layers\\.\\d+\\.mlp\\.down_proj\\.weight$': (None, 'model')}
    """
    if not isinstance(plan, Mapping):
        raise TypeError(f"plan must be a mapping of names to styles, got {type(plan).__name__}")
    instance("mesh", mesh, DeviceMesh)
    if axis not in mesh.axis_names:
        raise MeshError(f"axis is {shown(axis)}; the axes of the mesh are {shown(mesh.axis_names)}")
    rules: dict[str, Axes] = {}
    for name, style in plan.items():
        if not isinstance(name, str) or not isinstance(style, str):
            raise TypeError(f"plan must map strings to strings, got {shown(name)}: {shown(style)}")
        if style not in _STYLES:
            known = ", ".join(sorted(_STYLES))
            raise LayoutError(f"plan[{shown(name)}] is the unknown style {shown(style)}; known are {known}")
        rules.update(_rules_of_entry(name, _STYLES[style], axis))
    return rules


def _rules_of_entry(name: str, cut: _Cut, axis: str) -> dict[str, Axes]:
    where = r"(?:^|\.)" + re.escape(name).replace(r"\*", r"\d+")
    is_expert = name.split(".")[-2:-1] == ["experts"]
    if cut == "nothing":
        return {}
    if cut == "experts":
        return {rf"{where}$": (axis, None, None)}
    if cut == "columns":
        return {rf"{where}$": (None, None, axis)} if is_expert else {rf"{where}\.weight$": (None, axis)}
    if is_expert:
        return {rf"{where}$": (None, axis, None)}
    # The name itself may be a parameter, of one dim: attention sinks.
    return {rf"{where}\.weight$": (axis, None), rf"{where}(?:\.bias)?$": (axis,)}
