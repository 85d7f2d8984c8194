"""The method by which a model is quantized, as its configuration states it: known, or refused by its name (2.22)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .._arguments import instance
from .._dtypes import DTYPES, Dtype
from .._text import shown
from ..errors import ParseError
from ..rules.wrapped import language_config

__all__ = ["KNOWN", "cast_dtype", "quantization_of", "stated_method"]

_GPTQ = {
    **dict.fromkeys(("checkpoint_format", "format"), ("gptq", "gptq_v2")),
    **{"is_marlin_format": (False,), "pack_dtype": ("int32",)},
}
_AWQ = {
    **dict.fromkeys(("version", "checkpoint_format", "format"), ("gemm",)),
    **{"backend": ("autoawq",), "pack_dtype": ("int32",)},
}
_FORMATS = (
    *("naive-quantized", "int-quantized", "float-quantized", "pack-quantized", "mixed-precision"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)
#: The methods, and of each the keys that say how values lie, with the values that are known.
KNOWN: dict[str, dict[str, tuple[Any, ...]]] = {
    "fp8": {"fmt": ("e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2"), "scale_fmt": ("ue8m0", "float", "float32")},
    "fbgemm_fp8": {},
    "mxfp8": {"fmt": ("e4m3",), "scale_fmt": ("ue8m0",)},
    "compressed-tensors": {"format": _FORMATS},
    "modelopt": {"quant_algo": ("FP8", "FP8_PB_WO", "MXFP8", "NVFP4")},
    "awq": _AWQ,
    "gptq": _GPTQ,
    # Its `llm_compressor` packings are of another method.
    "auto-round": {
        **{
            "packing_format": ("auto_round:auto_gptq", "auto_round:gptqmodel", "auto_round:gptq", "auto_round:auto_awq")
        },
        **{"data_type": ("int",)},
    },
    "mxfp4": {},
    "bitsandbytes": {"bnb_4bit_quant_type": ("nf4", "fp4")},
    "mlx": {"mode": ("affine", "mxfp4", "mxfp8", "nvfp4")},
}
_KEYS = ("quantization_config", "compression_config", "quantization", "quantization_bit")


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the `quantization_config` of a configuration, or of the language model in it; empty if there is none.

    MLX has one without a method, `quantization`. What is none of the known forms is given as the method, which is then
    not known.

    >>> quantization_of({"text_config": {"quantization_config": {"quant_method": "awq"}}})
    {'quant_method': 'awq'}
    >>> quantization_of({"quantization": {"group_size": 64, "bits": 4}})["quant_method"]
    'mlx'
    """
    said = language_config(instance("config", config, Mapping))  # type: ignore[type-abstract]
    stated = [(key, said[key]) for key in _KEYS if said.get(key)]
    if not stated:
        return {}
    key, given = next((one for one in stated if isinstance(one[1], Mapping) and _is_named(one[1])), stated[0])
    if not isinstance(given, Mapping):
        return {"quant_method": f"{key} = {shown(given)}"}
    if _is_named(given):
        return given
    inner = given.get("quantization")
    if isinstance(inner, Mapping) and "quant_algo" in inner:  # As in ModelOpt's hf_quant_config.json.
        return {**inner, "quant_method": "modelopt"}
    if given.get("load_in_8bit") is True or given.get("load_in_4bit") is True:
        return {**given, "quant_method": "bitsandbytes"}
    given = next((one for name, one in stated if name == "quantization" and isinstance(one, Mapping)), given)
    is_of_mlx = "mode" in given or any(name == "quantization" for name, _ in stated)
    if is_of_mlx and {"bits", "group_size"} <= given.keys():
        return {**given, "quant_method": "mlx"}
    return given


def cast_dtype(config: Mapping[str, Any]) -> Dtype | None:
    """Return the dtype of 8 bits or less in which a configuration says that weights are; `None` if it says another.

    >>> cast_dtype({"torch_dtype": "float8_e4m3fn"}).code, cast_dtype({"dtype": "bfloat16"})
    ('F8_E4M3', None)
    """
    said = language_config(config)
    stated = said.get("dtype") or said.get("torch_dtype")
    found = DTYPES.get(stated.removeprefix("torch.")) if isinstance(stated, str) else None
    return found if found is not None and found.bits <= 8 else None


def _is_named(given: Mapping[str, Any]) -> bool:
    return given.get("quant_method") not in (None, "")


def stated_method(given: Mapping[str, Any]) -> str | None:
    """Return the `quant_method` of a `quantization_config`; `None` if it has none.

    Raises:
        ParseError: if it is not known, or one of its versions, formats or types is not.

    >>> stated_method({"quant_method": "awq"})
    'awq'
    >>> stated_method({"quant_method": "awq", "version": "gemv"})
    Traceback (most recent call last):
    shardwise.errors.ParseError: quantization_config: version is 'gemv'; known for awq is gemm
    """
    if not _is_named(given):
        return None
    method = given["quant_method"]
    if not isinstance(method, str) or method not in KNOWN:
        known = ", ".join(sorted(KNOWN))
        raise ParseError(f"quantization_config: quant_method is {shown(method)}; known are {known}")
    for key, known_values in KNOWN[method].items():
        for value in _values(given, key, method):
            if _plain(value) not in map(_plain, known_values):
                are = "is" if len(known_values) == 1 else "are"
                words = ", ".join(str(one) for one in known_values)
                raise ParseError(f"quantization_config: {key} is {shown(value)}; known for {method} {are} {words}")
    sparsity = given.get("sparsity_config")
    form = sparsity.get("format") if isinstance(sparsity, Mapping) else None
    if form not in (None, "", "dense"):
        raise ParseError(f"quantization_config: sparsity_config.format is {shown(form)}; known is dense")
    return method


def _values(given: Mapping[str, Any], key: str, method: str) -> Iterator[Any]:
    """Yield the values of a key, also those of the groups of compressed-tensors and of the modules of MLX."""
    groups = given.get("config_groups")
    inner = groups.values() if isinstance(groups, Mapping) else given.values() if method == "mlx" else ()
    for one in (given, *inner):
        if isinstance(one, Mapping) and one.get(key) not in (None, ""):
            yield one[key]


def _plain(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value
