"""The tensor-parallel plans that Hugging Face transformers' configurations carry, as rules of a layout map.

A plan maps module names, in which `*` is a layer number, to styles: `{"layers.*.self_attn.q_proj": "colwise"}`. What a
style cuts is defined by `transformers.distributed.tensor_parallel`, for weights stored as in PyTorch: the
`weight` of a linear module is (out, in), experts are (experts, out, in).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from .._text import shown
from ..errors import LayoutError
from ..layout import Axes, Spec
from ..packed import concat, part
from .layout_rule import LayoutRule

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


#: The names of projections in files that have each expert by itself, by the name of the stacked one in memory:
#: Mixtral's, and those of others.
_OF_EXPERTS = {"gate_up_proj": "(?:gate_proj|up_proj|w1|w3)", "up_proj": "up_proj", "down_proj": "(?:down_proj|w2)"}
#: Modules that files name otherwise than transformers does in memory: those of Mixtral, GPT-NeoX, and of text models in
#: others, whose files have `language_model.model.` for `model.language_model.`.
_IN_FILES = {
    "mlp": "(?:mlp|block_sparse_moe)",
    "lm_head": "(?:lm_head|embed_out)",
    "language_model": r"language_model(?:\.model)?",
}


def rules_of_plan(plan: Mapping[str, str], axis: str, config: Any = None) -> dict[str, LayoutRule]:
    r"""The rules, by regular expressions, that say the same as a plan; see `LayoutMap.from_tp_plan`.

    >>> for rule, value in rules_of_plan({"layers.*.mlp.down_proj": "rowwise"}, "model").items():
    ...     print(rule, value.layout.axes, value.uneven)
    (?:^|\.)layers\.\d+\.mlp\.down_proj\.weight$ (None, 'model') chunk
    (?:^|\.)layers\.\d+\.mlp\.down_proj$ ('model',) chunk
    """
    if not isinstance(plan, Mapping):
        raise TypeError(f"plan must be a mapping of names to styles, got {type(plan).__name__}")
    size = _packed_size(config)
    rules: dict[str, LayoutRule] = {}
    for name, style in plan.items():
        if not isinstance(name, str) or not isinstance(style, str):
            raise TypeError(f"plan must map strings to strings, got {shown(name)}: {shown(style)}")
        if style not in _STYLES:
            known = ", ".join(sorted(_STYLES))
            raise LayoutError(f"plan[{shown(name)}] is the unknown style {shown(style)}; known are {known}")
        for rule, axes in _rules_of_entry(name, _STYLES[style], axis, size).items():
            rules[rule] = LayoutRule(axes, "chunk")
    return rules


def _rules_of_entry(name: str, cut: _Cut, axis: str, size: int | None) -> dict[str, Axes]:
    # `model.tp_plan` has the prefix of transformers, a configuration's plan has none, and files may have another.
    words = name.removeprefix("model.").split(".")
    *modules, last = [re.escape(word).replace(r"\*", r"\d+") for word in words]
    outer = [_IN_FILES.get(module, module) for module in modules[:1]]
    where = r"(?:^|\.)" + r"\.".join([*outer, *modules[1:], last if modules else _IN_FILES.get(last, last)])
    is_expert = modules[-1:] == ["experts"]
    if cut == "nothing":
        return {}
    if cut == "experts" or (cut == "dim 0" and is_expert):
        return {rf"{where}$": (axis, None, None)}
    if cut == "dim 1":
        return {rf"{where}$": (None, axis, None)} if is_expert else {rf"{where}\.weight$": (None, axis)}
    spec: Spec = axis
    if cut.startswith("packed"):
        names = ("gate", "up") if last == "gate_up_proj" else (None, None)
        spec = concat(*(part(size, axes=axis, uneven="ceil", name=label) for label in names))
    if is_expert:
        is_column = cut.endswith("columns")
        rules: dict[str, Axes] = {rf"{where}$": (None, None, spec) if is_column else (None, spec, None)}
        if last in _OF_EXPERTS:
            # A file may have each expert by itself, and gate and up apart: each is cut as within the stack.
            within = r"\.".join(_IN_FILES.get(module, module) for module in modules)
            rules[rf"(?:^|\.){within}\.\d+\.{_OF_EXPERTS[last]}\.weight$"] = (None, axis) if is_column else (axis, None)
        return rules
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
