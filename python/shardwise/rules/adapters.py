"""Names of low-rank adapters: which tensors are the factors of LoRA, and which weight each belongs to.

PEFT calls the factors `base_model.model.MODULE.lora_A.weight` and `….lora_B.weight`, for embeddings `lora_embedding_A`
and `_B`, and has modules that were trained whole next to them, under the same prefix. A running model has the adapter's
name in them, `lora_A.default.weight`, and its own weights as `MODULE.base_layer.weight`. Megatron-Bridge has
`MODULE.adapter.linear_in.weight` and `….linear_out.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Literal, NamedTuple

__all__ = ["AdapterName", "FactorName", "adapter_names", "are_adapters"]

#: The parts that a tensor of an adapter may be; `"weight"` is a whole weight, or a bias, of a model with adapters.
FactorName = Literal["A", "B", "embedding_A", "embedding_B", "magnitude", "bias", "in", "out", "weight"]

#: The prefix of all names of PEFT.
_PREFIX = "base_model.model."
_FACTOR = re.compile(
    r"(?P<module>.+)\.(?:"
    r"(?P<linear>lora_[AB])(?:\.[^.]+)?\.(?P<of>weight|bias)"
    r"|(?P<embedding>lora_embedding_[AB])(?:\.[^.]+)?"
    r"|(?P<magnitude>lora_magnitude_vector)(?:\.[^.]+){0,2}"
    r"|adapter\.linear_(?P<bridge>in|out)\.weight)"
)
_BRIDGE: dict[str, FactorName] = {"in": "in", "out": "out"}
_LINEAR: dict[tuple[str, str], FactorName] = {
    ("lora_A", "weight"): "A",
    ("lora_B", "weight"): "B",
    ("lora_B", "bias"): "bias",
}


class AdapterName(NamedTuple):
    """The name of a tensor of an adapter, taken apart.

    Attributes:
        weight: The name of the weight of the model, without the prefix of PEFT.
        factor: Which part of the adapter it is.
        before: The name without the factor's own part: equal for the factors of one weight.
    """

    weight: str
    factor: FactorName
    before: str


def adapter_names(names: Iterable[str]) -> dict[str, AdapterName]:
    """Find the tensors of adapters among names; none if no name is a factor's.

    Under the prefix of PEFT all other tensors are weights of the model, or modules that were trained whole.

    >>> named = ["base_model.model.h.0.q.lora_A.weight", "base_model.model.lm_head.weight", "norm.weight"]
    >>> found = adapter_names(named)
    >>> for one in found.values():
    ...     print(one.weight, one.factor)
    h.0.q.weight A
    lm_head.weight weight
    """
    found: dict[str, AdapterName | None] = {}
    for name in names:
        one = _factor(name) if "lora_" in name or ".adapter.linear_" in name else None
        if one is not None or name.startswith(_PREFIX):
            found[name] = one
    if not any(found.values()):
        return {}
    return {name: AdapterName(_weight(name), "weight", name) if one is None else one for name, one in found.items()}


def are_adapters(names: Collection[str]) -> bool:
    """Return whether all names are of adapters, as those of a folder of PEFT are."""
    return 0 < len(names) == len(adapter_names(names))


def _factor(name: str) -> AdapterName | None:
    """Return the parts of a factor's name; `None` for any other name."""
    match = _FACTOR.fullmatch(name)
    if match is None:
        return None
    module = match["module"]
    weight = _weight(f"{module}.weight")
    if match["linear"]:
        factor = _LINEAR.get((match["linear"], match["of"]))
        return None if factor is None else AdapterName(weight, factor, module)
    if match["embedding"]:
        return AdapterName(weight, "embedding_A" if match["embedding"].endswith("A") else "embedding_B", module)
    return AdapterName(weight, _BRIDGE[match["bridge"]] if match["bridge"] else "magnitude", module)


def _weight(name: str) -> str:
    """Return the name that the model's own file has for a weight."""
    return re.sub(r"\.(?:base_layer|to_wrap|modules_to_save\.[^.]+)(?=\.)", "", name.removeprefix(_PREFIX))
