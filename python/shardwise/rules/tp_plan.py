"""The tensor-parallel plans that Hugging Face transformers' configurations carry, as rules of a layout map.

A plan maps module names, in which `*` is a layer number, to styles: `{"layers.*.self_attn.q_proj": "colwise"}`. What a
style cuts is defined by `transformers.distributed.tensor_parallel`, for weights stored as in PyTorch: the
`weight` of a linear module is (out, in), experts are (experts, out, in).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .._text import counted, shown
from ..errors import LayoutError
from ..layout import Axes, Spec
from ..packed import PackedDim, concat, part
from .layout_rule import LayoutRule
from .names import expert_names

__all__ = ["LoadedTensor", "rules_of_loaded", "rules_of_plan"]

_StyleCut = Literal["rows", "columns", "dim 0", "dim 1", "packed rows", "packed columns", "experts", "nothing"]

#: The cut of the parameters by each style: rows are the dim before the last, columns the last, and dims 0 and 1 are
#: themselves. A parameter of one dim has rows only, except that one not called bias has columns too. Packed ones are
#: two matrices, each cut separately (PyTorch's `_StridedShard` with a split factor of 2), except that a bias of packed
#: rows is cut as if it were not packed.
_STYLES: dict[str, _StyleCut] = {
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


def _of_experts(first: int, last: int) -> str:
    """Return the names of some of an expert's gate, up and down, as an expression."""
    return f"(?:{'|'.join(name for expert in expert_names() for name in expert.projections[first:last])})"


#: The names of projections in files that have each expert by itself, by the name of the stacked one in memory.
_OF_EXPERTS = {"gate_up_proj": _of_experts(0, 2), "up_proj": "up_proj", "down_proj": _of_experts(2, 3)}
#: Modules that files name otherwise than transformers does in memory: those of Mixtral, GPT-NeoX, and of text models in
#: others, whose files have `language_model.model.` for `model.language_model.`.
_IN_FILES = {
    "mlp": f"(?:{'|'.join(expert.block for expert in expert_names())})",
    "lm_head": "(?:lm_head|embed_out)",
    "language_model": r"language_model(?:\.model)?",
}


def rules_of_plan(plan: Mapping[str, str], axis: str, config: Any = None) -> dict[str, LayoutRule]:
    r"""Return the rules, by regular expressions, that say the same as a plan; see `LayoutMap.from_tp_plan`.

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


def _rules_of_entry(name: str, cut: _StyleCut, axis: str, size: int | None) -> dict[str, Axes]:
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
        spec = _packed(last, axis, size)
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


def _packed(name: str, axis: str, size: int | None) -> PackedDim:
    """Return two matrices, each cut separately."""
    names = ("gate", "up") if name == "gate_up_proj" else (None, None)
    return concat(*(part(size, axes=axis, uneven="ceil", name=label) for label in names))


@dataclass(frozen=True)
class LoadedTensor:
    """A tensor of a file, and what transformers makes of it when it loads a model.

    Attributes:
        rank: The number of its dims; `None` if it is not known.
        parameters: The parameters that it becomes, or a part of, in order.
        source: Which of the tensors it is that are put together, and of how many.
        steps: The steps that make parameters of it, in order, each with the dims that it is about.
    """

    rank: int | None
    parameters: tuple[str, ...]
    source: tuple[int, int] = (0, 1)
    steps: tuple[tuple[str, tuple[int, ...]], ...] = ()


def rules_of_loaded(
    plan: Mapping[str, str],
    parameters: Mapping[str, Sequence[int]],
    tensors: Mapping[str, LoadedTensor],
    axis: str,
    same: Iterable[frozenset[str]] = (),
) -> dict[str, LayoutRule]:
    r"""Return the rules for tensors of files, which cut them as transformers cuts the parameters that they become.

    Args:
        plan: Styles by name, as `model.tp_plan` has them.
        parameters: The shapes of the model's parameters.
        tensors: What becomes of each tensor.
        axis: The axis of the mesh that cuts.
        same: Sets of parameters that share their memory.

    Raises:
        LayoutError: if a parameter that is cut is made of none of the tensors, or a tensor is changed in a way in which
            its share is not a box of it.

    >>> steps = (("stack", (0,)), ("join", (1,)))
    >>> tensors = {f"h.0.{i}.w{n}": LoadedTensor(2, ("h.0.up",), (n, 2), steps) for i in (0, 1) for n in (0, 1)}
    >>> plan, parameters = {"h.*.up": "packed_colwise"}, {"h.0.up": (2, 8, 3)}
    >>> for rule, value in rules_of_loaded(plan, parameters, tensors, "tp").items():
    ...     print(rule, value.layout.axes)
    ^h\.\d+\.\d+\.w0$ ('tp', None)
    ^h\.\d+\.\d+\.w1$ ('tp', None)
    """
    for name, style in plan.items():
        _cut_of(name, style)
    cuts = {name: _axes_of(plan, name, len(shape), axis) for name, shape in parameters.items()}
    made = {name for tensor in tensors.values() for name in tensor.parameters}
    made |= {name for group in same if group & made for name in group}
    if lacking := sorted(name for name, axes in cuts.items() if any(axes) and name not in made):
        others = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise LayoutError(
            f"transformers cuts the parameter {shown(lacking[0])}{others}, but makes it from none of the "
            f"{len(tensors)} tensors that it loads, such as {', '.join(map(shown, list(tensors)[:3]))}"
        )
    found: dict[str, dict[str, Axes]] = {}
    for name, tensor in tensors.items():
        axes = _axes_in_file(name, tensor, cuts, parameters)
        found.setdefault(_NUMBERS.sub(lambda number: r"\d+", re.escape(name)), {})[name] = axes
    rules: dict[str, LayoutRule] = {}
    for pattern, each in found.items():
        for axes in dict.fromkeys(each.values()):
            if any(axes):
                # The numbers are named where layers of one name are cut differently.
                alike = [re.escape(name) for name, other in each.items() if other == axes]
                text = pattern if len(alike) == len(each) else f"(?:{'|'.join(alike)})"
                rules[f"^{text}$"] = LayoutRule(axes, "chunk")
    return rules


#: Numbers of layers and experts, in an escaped name.
_NUMBERS = re.compile(r"(?<=\.)\d+(?=\\\.|$)|^\d+(?=\\\.)")


def _cut_of(name: str, style: str) -> _StyleCut:
    if style not in _STYLES:
        raise LayoutError(
            f"plan[{shown(name)}] is the unknown style {shown(style)}; known are {', '.join(sorted(_STYLES))}"
        )
    return _STYLES[style]


def _axes_of(plan: Mapping[str, str], name: str, rank: int, axis: str) -> Axes:
    """Return the axes by which transformers cuts a parameter: by the entry of its name, or by that of its module."""
    starred = re.sub(r"\.\d+(?=\.|$)", ".*", name)
    module, _, last = starred.rpartition(".")
    entry = starred if starred in plan else module
    axes: list[Spec] = [None] * rank
    if entry not in plan or not rank:
        return tuple(axes)
    cut = _cut_of(entry, plan[entry])
    # As in `shard_param` of transformers.distributed: biases of second projections are whole.
    if cut in ("dim 0", "experts"):
        axes[0] = axis
    elif cut == "dim 1":
        axes[min(1, rank - 1)] = axis
    elif cut == "rows" or (cut == "packed rows" and rank == 1):
        axes[max(rank - 2, 0)] = axis
    elif cut == "columns" and last != "bias":
        axes[-1] = axis
    elif cut.startswith("packed") and rank > 1:
        axes[-2 if cut == "packed rows" else -1] = _packed(last, axis, None)
    return tuple(axes)


def _axes_in_file(
    name: str, tensor: LoadedTensor, cuts: Mapping[str, Axes], parameters: Mapping[str, Sequence[int]]
) -> Axes:
    """Return the cut of a stored tensor whose parameters are cut so: each step is undone, the last one first."""
    items = [cuts[one] for one in tensor.parameters]
    if not any(spec for axes in items for spec in axes):
        return (None,) * (tensor.rank or 0)
    shapes = [parameters[one] for one in tensor.parameters]
    for step, dims in reversed(tensor.steps):
        undone = _undone(step, dims, items, shapes, tensor.source[1])
        if undone is None:
            whole = ", ".join(map(shown, tensor.parameters))
            raise LayoutError(
                f"transformers makes {whole} of {shown(name)} ({step}), and no rule for that tensor can say how "
                "it cuts the result; save the model by save_pretrained(…, save_original_format=False) and make the "
                "rules from that folder, which has the names of the parameters in memory"
            )
        items = undone
    axes = items[tensor.source[0]] if len(items) > 1 else items[0]
    if tensor.rank is not None and len(axes) != tensor.rank:
        raise LayoutError(
            f"{shown(name)} has {counted(tensor.rank, 'dim')}, but transformers makes a parameter of "
            f"{counted(len(axes), 'dim')} from it: "
            "the configuration is of another model, or the tensor is packed"
        )
    return axes


def _undone(
    step: str, dims: tuple[int, ...], items: list[Axes], shapes: list[Sequence[int]], sources: int
) -> list[Axes] | None:
    """Return the cuts of the inputs of a step from the cuts of its outputs; `None` if no layout expresses them."""
    if step == "stack":
        at = dims[0]
        return None if any(axes[at] for axes in items) else [axes[:at] + axes[at + 1 :] for axes in items]
    if step == "swap":
        first, second = dims
        moved = [list(axes) for axes in items]
        for axes in moved:
            axes[first], axes[second] = axes[second], axes[first]
        return [tuple(axes) for axes in moved]
    if step not in ("join", "split"):
        moves = any(any(axes) if not dims else axes[dims[0]] for axes in items)
        return None if moves else items  # What moves within a dim that is not cut.
    at = dims[0]
    specs = [axes[at] for axes in items]
    if step == "join":
        spec = specs[0]
        if isinstance(spec, PackedDim) and len(spec.parts) == sources:
            spec = spec.parts[0].axes[0]
        elif len(items) > 1 or (spec and sources > 1):
            return None
        return [(*items[0][:at], spec, *items[0][at + 1 :])] * sources
    if len({axes[:at] + axes[at + 1 :] for axes in items}) > 1 or any(isinstance(spec, PackedDim) for spec in specs):
        return None
    merged: Spec = None
    if any(specs):
        sizes = [shape[at] for shape in shapes]
        parts = [
            part(size, axes=str(spec), uneven="ceil") if spec else part(size, cut=None)
            for size, spec in zip(sizes, specs, strict=True)
        ]
        merged = concat(*parts)
    return [(*items[0][:at], merged, *items[0][at + 1 :])]


def _packed_size(config: Any) -> int | None:
    """Return the rows of one of the packed matrices, if the configuration states them clearly."""
    names = ("intermediate_size", "moe_intermediate_size")
    given = [config.get(name) if isinstance(config, Mapping) else getattr(config, name, None) for name in names]
    sizes = {size for size in given if isinstance(size, int)}
    return sizes.pop() if len(sizes) == 1 else None
