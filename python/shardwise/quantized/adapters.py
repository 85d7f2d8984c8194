"""Low-rank adapters: factors with the meaning of their dims, cut like the weights that they adapt.

A weight of out × in has a factor A of rank × in and a factor B of out × rank. A is cut where the weight's columns are,
B where its rows are; the rank is whole. The product of a device's parts of both belongs to its part of the weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ..rules.adapters import adapter_names
from ..rules.rewrites import Rewrites
from ..rules.within import Within, steps_of
from .component import Along, Component, LogicalTensor
from .expert_adapters import StoredFactors, expert_adapters, is_of_experts

__all__ = ["SHARDED", "adapters_in"]

#: The form of Megatron-Bridge's adapters, in which the rank of A is cut like the weight's rows, and the rows of B like
#: its columns.
SHARDED = "adapter of Megatron-Bridge"
_FORM = "adapter"
#: Names of modules that are Conv1D (in × out) in GPT-2, but linear layers in other models with these names.
_EITHER = ("c_attn", "c_fc", "c_proj", "q_attn")
_WAY_ON = "a rule for its own name places it"


class _Adapted(NamedTuple):
    """A weight with an adapter: the adapter's tensors by factor, and the rewrites that use the weight."""

    weight: str
    factors: dict[str, str]
    steps: tuple[Within, ...]


def adapters_in(
    tensors: Mapping[str, tuple[tuple[int, ...], str]],
    rewrites: Rewrites | None = None,
    config: Mapping[str, Any] = MappingProxyType({}),
) -> list[LogicalTensor]:
    """Find the adapters among tensors, each as a component of its weight.

    Args:
        tensors: The shape of each tensor, and the name of its dtype.
        rewrites: The rewrites between the names of the adapted weights and those that rules are for.
        config: What the model's configuration says, which has the number of stacked experts.

    >>> pair = {"base_model.model.up.lora_A.weight": ((4, 6), "bfloat16")}
    >>> pair["base_model.model.up.lora_B.weight"] = ((12, 4), "bfloat16")
    >>> for one in adapters_in(pair):
    ...     print(one.name, one.shape, [dim.of for dim in one.components[0].along])
    up.weight (12, 6) [None, 1]
    up.weight (12, 6) [0, None]
    """
    names = adapter_names(tensors)
    steps: dict[str, tuple[Within, ...]] = {}
    adapted: dict[str, _Adapted] = {}
    for name, one in names.items():
        if one.weight not in steps:
            steps[one.weight] = steps_of(one.weight, rewrites)
        adapted.setdefault(one.before, _Adapted(one.weight, {}, steps[one.weight])).factors[one.factor] = name
    made: list[LogicalTensor] = []
    of_experts: list[tuple[str, StoredFactors]] = []
    for each in adapted.values():
        if is_of_experts(each.weight, each.factors):
            factors = {factor: (name, tensors[name][1], tensors[name][0]) for factor, name in each.factors.items()}
            of_experts.append((each.weight, factors))
        else:
            made.extend(_made(each, tensors))
    return [*made, *expert_adapters(of_experts, config, rewrites)]


def _made(one: _Adapted, tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> Iterator[LogicalTensor]:
    shapes = {factor: tensors[name][0] for factor, name in one.factors.items()}
    shape, alongs, why = _described(one, shapes)
    name = one.steps[-1].name if one.steps else one.weight
    for factor, own in one.factors.items():
        size, dtype = tensors[own]
        along, uncut = alongs.get(factor), why
        if along is None or len(along) != len(size):
            along, uncut = (Along(None),) * len(size), why or f"its {factor} has the shape {size}"
        form = SHARDED if factor in ("in", "out") else _FORM
        reasons = tuple((dim, f"{uncut}; {_WAY_ON}") for dim in range(len(shape))) if uncut else ()
        yield LogicalTensor(name, shape, form, (Component(own, dtype, size, along),), reasons, within=one.steps)


def _described(
    one: _Adapted, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[int, ...], dict[str, tuple[Along, ...]], str]:
    """Return the weight's shape, the meaning of each factor's dims, and why it cannot be cut, if so."""
    if "weight" in shapes:
        whole = shapes["weight"]
        return whole, {"weight": tuple(map(Along, range(len(whole))))}, ""
    down = shapes.get("A") or shapes.get("in") or shapes.get("embedding_A")
    up = shapes.get("B") or shapes.get("out") or shapes.get("embedding_B")
    if down is None or up is None or len(down) < 2 or len(up) != len(down):
        missing = "A" if down is None else "B"
        return (0, 0), {}, f"the factor {missing} of its adapter is missing, or has another number of dims"
    if down[0] != up[1]:
        return (0, 0), {}, f"its factors {down} and {up} have different ranks"
    rest = len(down) - 2
    module = one.weight.removesuffix(".weight").rpartition(".")[2]
    if "embedding_A" in shapes:  # The product is transposed: its columns are the vocabulary.
        return (down[1], up[0]), {"embedding_A": (Along(None), Along(0)), "embedding_B": (Along(1), Along(None))}, ""
    shape, rows, columns = (up[0], *down[1:]), 0, 1
    why = ""
    if one.steps and one.steps[0].rewrite.source.transpose:
        shape, rows, columns = (down[1], up[0]), 1, 0
    elif module in _EITHER and not one.steps:
        why = f"the shape of {module} is out x in or, for GPT-2's Conv1D, in x out; nothing says which"
    inner = tuple(map(Along, range(2, 2 + rest)))
    alongs: dict[str, tuple[Along, ...]] = {
        "A": (Along(None), Along(columns), *inner),
        "B": (Along(rows), Along(None), *(Along(None),) * rest),
        "bias": (Along(rows),),
        "magnitude": (Along(rows),),
        "in": (Along(None), Along(columns)),
        "out": (Along(rows), Along(None)),
    }
    return shape, alongs, why
