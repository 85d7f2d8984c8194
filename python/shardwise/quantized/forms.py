"""Quantized weights recognised: from `quantization_config`, from names, dtypes and shapes.

The forms and where they are defined:

| form | method | written by |
|---|---|---|
| FP8 in blocks, per tensor | `fp8` | DeepSeek-V3, transformers `integrations/finegrained_fp8.py` |
| FP8, INT8: blocks, per channel, per tensor | `compressed-tensors` | `compressors/naive_quantized` |
| integers packed into int32 | `compressed-tensors` | `compressors/pack_quantized` |
| NVFP4, MXFP4 | `compressed-tensors` | `compressors/nvfp4`, `compressors/mxfp4` |
| FP8, NVFP4 | `modelopt` | ModelOpt `torch/export`, `qtensor/nvfp4_tensor.py` |
| AWQ (gemm) | `awq` | AutoAWQ `modules/linear/gemm.py` |
| GPTQ, versions 1 and 2 | `gptq` | GPTQModel `nn_modules/qlinear` |
| GPTQ's and AWQ's words | `auto-round` | AutoRound `auto_round_extension/torch/qlinear_torch_zp.py` |
| FP8 per channel | `fbgemm_fp8` | transformers `integrations/fbgemm_fp8.py`; vLLM `fbgemm_fp8.py` |
| MXFP8 | `modelopt`, `mxfp8` | ModelOpt; SGLang `layers/quantization/fp8.py` |
| integers, MXFP4, MXFP8, NVFP4 of MLX | `mlx` | `mlx.core.quantize`, mlx-lm `utils.py` |
| MXFP4 of gpt-oss | `mxfp4` | transformers `integrations/mxfp4.py` |
| flat values of 4 bits; INT8 per row | `bitsandbytes` | bitsandbytes `functional.py`, `QuantState.as_dict` |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from .._text import all_digits_alike, shown
from . import flat, integers, scaled
from .component import Along, Component, LogicalTensor
from .method import quantization_of, stated_method
from .parts import Given, StatedError, WeightGroup, as_parse_errors

__all__ = [
    "METHODS",
    "NO_COMPONENTS",
    "AlikeTensors",
    "Components",
    "find_components",
    "find_kinds",
    "starred",
    "stated_components",
]

#: The function of each method that makes a logical tensor of the components of one group.
METHODS: dict[str, Callable[[WeightGroup], LogicalTensor | None]] = {
    "fp8": scaled.fp8,
    "fbgemm_fp8": scaled.fbgemm,
    "mxfp8": scaled.mxfp8,
    "compressed-tensors": integers.compressed,
    "modelopt": scaled.modelopt,
    "awq": integers.awq,
    "gptq": integers.gptq,
    "auto-round": integers.auto_round,
    "mxfp4": scaled.mxfp4,
    "bitsandbytes": flat.bitsandbytes,
    "mlx": integers.mlx,
}
#: The last parts of the names of components; what comes before is the group.
_TAILS = frozenset(
    [
        *("weight", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_packed", "weight_shape"),
        *("weight_zero_point", "weight_g_idx", "weight_global_scale"),
        *("input_scale", "input_global_scale", "input_zero_point", "activation_scale", "input_scale_ub"),
        *("qweight", "qzeros", "scales", "biases", "g_idx"),
    ]
)
_TAILS_BY_LENGTH = sorted(_TAILS, key=len, reverse=True)
#: Ends of names of what belongs to stacked experts, `experts.gate_up_proj_scale_inv`, and what that is called where
#: a weight has a part of its own.
_ENDS = {
    "_blocks": "blocks",
    "_scales": "scales",
    "_weight_scale_inv": "weight_scale_inv",
    "_weight_scale_2": "weight_scale_2",
    "_weight_scale": "weight_scale",
    "_input_scale": "input_scale",
    "_scale_inv": "weight_scale_inv",
    "_scale_2": "weight_scale_2",
    "_scale": "weight_scale",
}
#: Names of bitsandbytes for tensors next to the weight, and after its name.
_BESIDE = frozenset(["SCB", "weight_format"])
_ORDERS = frozenset(["g_idx", "weight_g_idx"])
_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.|$)")
_DIGIT = re.compile("[0-9]")

#: The stored tensors of a group, by the last part of their names: name, dtype, shape.
Members = dict[str, tuple[str, str, tuple[int, ...]]]

_AFTER = frozenset(["absmax", "quant_map", "nested_absmax", "nested_quant_map"])


class Components(NamedTuple):
    """The logical tensors of a checkpoint, and its tensors that are not quantized."""

    #: The value of `quant_method`; `None` if nothing is quantized. Of one that is not known all tensors are plain.
    method: str | None
    #: The quantized weights by name.
    tensors: Mapping[str, LogicalTensor]
    #: The names of the other tensors.
    plain: tuple[str, ...]
    #: The reason why the method, its version or its blocks are not known; empty if they are.
    refused: str = ""
    #: The states of an optimizer, each as the only component of its weight.
    states: tuple[LogicalTensor, ...] = ()
    #: The configuration of the model, as `config.json` has it.
    config: Mapping[str, Any] = {}

    @property
    def taken(self) -> frozenset[str]:
        """The names of all components and states, which are cut as weights are."""
        every = (*self.tensors.values(), *self.states)
        return frozenset(component.name for weight in every for component in weight.components)


#: The components of tensors of which none is quantized.
NO_COMPONENTS = Components(None, {}, ())


class AlikeTensors(NamedTuple):
    """Tensors that differ in the numbers in their names only: those of the layers of a model, and of its experts."""

    #: The first of them; one that is not quantized has one component, itself.
    tensor: LogicalTensor
    #: The names of all.
    names: tuple[str, ...]


def starred(name: str) -> str:
    """Return a name with `*` for its numbers.

    >>> starred("layers.12.up.weight")
    'layers.*.up.weight'
    """
    return _NUMBER.sub("*", name)


def find_components(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    config: Mapping[str, Any],
    read: Callable[[str], bytes | None] | None = None,
) -> Components:
    """Find the logical tensors of a quantized checkpoint.

    Args:
        tensors: the dtype of each stored tensor, as the safetensors format writes it, and its shape.
        config: the contents of `config.json`; if it has no `quantization_config`, the names of the tensors show the
            method.
        read: gives the bytes of a tensor, or `None`. It is called for small tensors only, whose values state what
            shapes do not: `g_idx` of GPTQ, `weight_shape` of packed integers, the `quant_state` of bitsandbytes.
            Without these values, groups are taken to be in order only if `desc_act` is false, and the last word is
            taken to be full.

    Raises:
        ParseError: if a scale is missing, a shape does not agree with the weight and the blocks that the configuration
            states, or the method is not known; the message names the tensor.

    >>> found = find_components(
    ...     {
    ...         "up.weight": ("F8_E4M3", (256, 576)),
    ...         "up.weight_scale_inv": ("F32", (2, 5)),
    ...         "norm.weight": ("BF16", (576,)),
    ...     },
    ...     {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    ... )
    >>> found.tensors["up.weight"].blocks
    {0: (('up.weight_scale_inv', 128),), 1: (('up.weight_scale_inv', 128),)}
    >>> found.plain
    ('norm.weight',)
    """
    with as_parse_errors():
        return stated_components(tensors, config, read)


def stated_components(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    config: Mapping[str, Any],
    read: Callable[[str], bytes | None] | None = None,
) -> Components:
    """Find the components as `find_components` does, but raise an error where the configuration is wrong.

    Raises:
        StatedError: if the configuration lacks what is needed or contradicts itself.
        ParseError: as `find_components`.
    """
    method, given = _method(tensors, config)
    how = Given(given, read)
    if method is None:
        return Components(None, {}, tuple(tensors), config=config)
    make = METHODS[method]
    found: dict[str, LogicalTensor] = {}
    for key, members in _groups(tensors).items():
        logical = make(WeightGroup(key, members, how))
        if logical is not None:
            found[logical.name] = logical
    taken = {component.name for logical in found.values() for component in logical.components}
    return Components(method, found, tuple(name for name in tensors if name not in taken), config=config)


def find_kinds(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    config: Mapping[str, Any],
    read: Callable[[str], bytes | None] | None = None,
) -> tuple[str | None, tuple[AlikeTensors, ...]]:
    """Find the method, and the kinds of tensors, of which only the first is looked at closely; see `find_components`.

    What `read` gives may differ within a kind: where an order of groups may be other than in order, each is read.

    >>> layers = {f"layers.{i}.up.weight": ("BF16", (4, 4)) for i in range(32)}
    >>> (kind,) = find_kinds(layers, {})[1]
    >>> kind.tensor.name, kind.tensor.form, len(kind.names)
    ('layers.0.up.weight', 'plain', 32)
    """
    with as_parse_errors():
        method, given = _method(tensors, config)
        if method is None:  # Nothing is a part of anything: a model of 100,000 experts takes a third of the time.
            plain: dict[Hashable, list[str]] = {}
            # Names that differ in digits only are alike with stars, but for digits that are no numbers.
            known: dict[Hashable, list[str]] = {}
            for name, digits in zip(
                tensors, zip(all_digits_alike(tensors), tensors.values(), strict=True), strict=True
            ):
                try:
                    known[digits].append(name)
                except KeyError:
                    starry = starred(name)
                    those = plain.setdefault((starry, tensors[name]), [])
                    those.append(name)
                    if _DIGIT.search(starry) is None:
                        known[digits] = those
            return None, tuple(_plain(names, *tensors[names[0]]) for names in plain.values())
        how = Given(given, read)
        apart = _ORDERS if given.get("desc_act", True) is not False else frozenset()
        if method == "mlx" and any(isinstance(one, (Mapping, bool)) for one in given.values()):
            apart = frozenset(["scales"])  # Modules may have bits and groups of their own.
        kinds: dict[Hashable, list[tuple[str, Members]]] = {}
        for key, members in _groups(tensors).items():
            look = starred(key) if members.keys().isdisjoint(apart) else key
            alike = tuple([(tail, dtype, shape) for tail, (_, dtype, shape) in members.items()])
            kinds.setdefault((look, alike), []).append((key, members))
        found = []
        for groups in kinds.values():
            key, members = groups[0]
            logical = METHODS[method](WeightGroup(key, members, how))
            taken = set()
            if logical is not None:
                found.append(AlikeTensors(logical, tuple(key for key, _ in groups)))
                taken = {component.name for component in logical.components}
            for tail, (name, dtype, shape) in members.items():
                if name in taken:
                    continue
                found.append(_plain([members[tail][0] for _, members in groups], dtype, shape))
        return method, tuple(found)


def _plain(names: Sequence[str], dtype: str, shape: tuple[int, ...]) -> AlikeTensors:
    """Tensors that are stored as they are."""
    own = Component(names[0], dtype, shape, tuple(map(Along, range(len(shape)))))
    return AlikeTensors(LogicalTensor(names[0], shape, "plain", (own,)), tuple(names))


def _method(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], config: Mapping[str, Any]
) -> tuple[str | None, Mapping[str, Any]]:
    given = quantization_of(config)
    method = stated_method(given) or _method_of(tensors)
    if method is None and given:
        raise StatedError(
            "quantization_config has no quant_method, and the tensors' names do not show one; it says "
            f"{shown(dict(given))}"
        )
    return method, given


def _method_of(tensors: Mapping[str, object]) -> str | None:
    """Return the method by the names of the tensors, where the configuration does not say it."""
    tails = {name.rpartition(".")[2] for name in tensors}
    for tail, method in (
        ("weight_packed", "compressed-tensors"),
        ("weight_scale_2", "modelopt"),
        ("weight_scale_inv", "fp8"),
        ("g_idx", "gptq"),
        ("qweight", "awq"),
        ("absmax", "bitsandbytes"),
        ("SCB", "bitsandbytes"),
        ("weight_scale", "compressed-tensors"),
    ):
        if tail in tails:
            return method
    return "mxfp4" if any(tail.endswith("_blocks") for tail in tails) else None


def _stacked_key(name: str, tensors: Mapping[str, object]) -> str:
    """Return the weight of a tensor that engines name after it, as `w13_weight_scale`; empty if it is no such name."""
    at = name.rfind(".") + 1
    end = next((end for end in _TAILS_BY_LENGTH if name.endswith(end, at) and name[-len(end) - 1] == "_"), "")
    base = name[: len(name) - len(end)]
    is_there = end != "" and any(f"{base}{one}" in tensors for one in ("weight", "qweight", "weight_packed"))
    return f"{base}weight" if is_there else ""


def _groups(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Members]:
    groups: dict[str, Members] = {}
    for name, (dtype, shape) in tensors.items():
        head, _, tail = name.rpartition(".")
        if tail in _TAILS:
            key = f"{head}.weight" if head else "weight"
        elif tail in _BESIDE:
            key = f"{head}.weight"
        elif tail in _AFTER:
            key = head
        elif tail.startswith("bitsandbytes__") and head.endswith(".quant_state"):
            key, tail = head.removesuffix(".quant_state"), "quant_state"
        elif key := _stacked_key(name, tensors):
            tail = name[len(key) - len("weight") :]
        else:
            end = next((end for end in _ENDS if tail.endswith(end)), "")
            key = name[: len(name) - len(end)]
            # A scale of something else, such as `k_proj.k_scale`, is a tensor like any other.
            if not end or not (key in tensors or f"{key}_blocks" in tensors):
                # A stacked weight has the name of its group.
                groups.setdefault(name, {})["weight"] = (name, dtype, shape)
                continue
            tail = _ENDS[end]
        groups.setdefault(key, {})[tail] = (name, dtype, shape)
    return groups
