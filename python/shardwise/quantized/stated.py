"""Quantized weights that a configuration describes: the tensors in which each is stored, before there is a file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from .._text import shown
from ..errors import ParseError
from ..rules.names import weight_named
from .component import StoredLook
from .integers import Schemes, check_extra
from .method import quantization_of, stated_method
from .modules import Modules
from .parts import Given, StatedError, as_parse_errors
from .scaled import block_size

__all__ = ["stated_tensors"]

_WORD = 32
_EXPERTS = re.compile(r"\.experts\.(?:gate_up_proj|down_proj)$")

_StatedOutline = dict[str, StoredLook]


def stated_tensors(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]
) -> tuple[_StatedOutline, Callable[[str], bytes | None]]:
    """Return the dtypes and shapes of the stored tensors of a model, and what is known of their values.

    Linear layers are quantized as the `quantization_config` says, but for those that it leaves out, embeddings,
    routers and the output.

    Args:
        shapes: The tensors before they are quantized, as `rules.model_shapes` gives them.
        config: The contents of the model's `config.json`.

    Raises:
        ParseError: if the method is not known, or says what it cannot.

    >>> shapes = {"mlp.down_proj.weight": (2048, 576), "norm.weight": (2048,)}
    >>> config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    >>> for name, stored in stated_tensors(shapes, config)[0].items():
    ...     print(name, stored)
    mlp.down_proj.weight StoredLook(dtype='F8_E4M3', shape=(2048, 576))
    mlp.down_proj.weight_scale_inv StoredLook(dtype='F32', shape=(16, 5))
    norm.weight StoredLook(dtype='BF16', shape=(2048,))
    """
    with as_parse_errors():
        given = quantization_of(config)
        try:
            method = stated_method(given)
            if method is None and given:
                raise ParseError(f"quantization_config has no quant_method; it says {shown(dict(given))}")
        except ParseError as error:
            raise ParseError(f"{error}; if the weights are not quantized, give a configuration without it") from None
        said = config.get("dtype") or config.get("torch_dtype")
        dtype = _DTYPES.get(said, "BF16") if isinstance(said, str) else "BF16"
        made = None if method is None else _MAKERS[method](Given(given, None), dtype)
        skipped = Modules(
            "modules that are left out", [t for key in _SKIPPED for t in Given(given, None).texts(key)], _part
        )
        if made is None:
            # Most tensors of a large model share their look with others, as one object.
            looks = {shape: StoredLook(dtype, shape) for shape in set(shapes.values())}
            return {name: looks[shape] for name, shape in shapes.items()}, lambda name: None
        found: _StatedOutline = {}
        states: dict[str, bytes] = {}
        for name, shape in shapes.items():
            parts = None
            if _is_linear(name, shape, method) and not skipped.named(name.removesuffix(".weight")):
                parts = made(name, shape)
            if parts is None:
                found[name] = StoredLook(dtype, shape)
                continue
            for tail, kind, own in parts:
                component = name + tail[1:] if tail.startswith("+") else name.removesuffix("weight") + tail
                found[component] = StoredLook(kind, own)
                if "quant_state" in component:
                    states[component] = json.dumps({"shape": shape, "blocksize": 64}).encode()
                if tail == "weight_shape":
                    states[component] = b"".join(size.to_bytes(8, "little") for size in shape)
        return found, states.get


_DTYPES = {"float16": "F16", "float32": "F32", "bfloat16": "BF16"}
#: The ends of the names of components, their dtypes and shapes; a plus comes before what is put after the whole name.
_StatedParts = Iterable[tuple[str, str, tuple[int, ...]]]
_PartsMaker = Callable[[str, tuple[int, ...]], _StatedParts | None]


def _is_linear(name: str, shape: tuple[int, ...], method: str | None) -> bool:
    if method == "mxfp4":  # Experts only, which gpt-oss has stacked.
        return len(shape) == 3 and _EXPERTS.search(name) is not None
    if len(shape) != 2 or not name.endswith(".weight"):
        return False
    # Embeddings, routers, gates of one column, and the output unless it is said.
    weight = weight_named(name.removesuffix(".weight"))
    return weight is None or not weight.plain


#: The keys of what is not quantized.
_SKIPPED = ("modules_to_not_convert", "ignore", "exclude_modules", "llm_int8_skip_modules", "ignored_layers")


def _part(text: str) -> str:
    """Return the expression of a name left out: a whole name, its end or a part of it, with `*` for anything."""
    inner = ".*".join(re.escape(part) for part in text.removesuffix(".weight").split("*"))
    return rf"(?:.*\.)?{inner}(?:\..*)?$"


def _up(n: int, size: int) -> int:
    return -(-n // size)


def _fp8(given: Given, dtype: str) -> _PartsMaker:
    blocks = given.config.get("weight_block_size")
    size = None if blocks is None else block_size(blocks, "weight_block_size")
    kind = "F8_E8M0" if given.config.get("scale_fmt") == "ue8m0" else "F32"

    def made(name: str, shape: tuple[int, ...]) -> _StatedParts:
        yield "weight", "F8_E4M3", shape
        if size is None:
            yield "weight_scale", "F32", ()
        else:
            yield "weight_scale_inv", kind, (_up(shape[0], size[0]), _up(shape[1], size[1]))

    return made


def _modelopt(given: Given, dtype: str) -> _PartsMaker:
    algorithm = given.config.get("quant_algo")
    if algorithm not in ("FP8", "MXFP8", "NVFP4"):
        raise ParseError(f"quantization_config: quant_algo is {shown(algorithm)}; known are FP8, MXFP8 and NVFP4")

    def made(name: str, shape: tuple[int, ...]) -> _StatedParts:
        if algorithm == "FP8":
            yield "weight", "F8_E4M3", shape
            yield "weight_scale", "F32", ()
        elif algorithm == "MXFP8":
            yield "weight", "F8_E4M3", shape
            yield "weight_scale", "U8", (shape[0], _up(shape[1], 32))
            return
        else:
            yield "weight", "U8", (shape[0], _whole(name, shape[1], 2))
            yield "weight_scale", "F8_E4M3", (shape[0], _up(shape[1], 16))
            yield "weight_scale_2", "F32", ()
        yield "input_scale", "F32", ()

    return made


def _compressed(given: Given, dtype: str) -> _PartsMaker:
    schemes = Schemes(given.config)

    def made(name: str, shape: tuple[int, ...]) -> _StatedParts | None:
        found = schemes.named(name.removesuffix(".weight"))
        return None if found is None else list(_scheme_parts(name, shape, *found, dtype))

    return made


def _scheme_parts(name: str, shape: tuple[int, ...], form: str, scheme: Given, dtype: str) -> Iterator[Any]:
    rows, columns = shape
    strategy, bits = scheme.config.get("strategy"), scheme.integer("num_bits") or 8
    group = scheme.integer("group_size", least=-1)
    if form.startswith(("nvfp4", "mxfp4")):
        size = group or (16 if form.startswith("nvfp4") else 32)
        yield "weight_packed", "U8", (rows, _whole(name, columns, 2))
        yield "weight_scale", "F8_E4M3" if form.startswith("nvfp4") else "U8", (rows, _up(columns, size))
        if form.startswith("nvfp4"):
            yield "weight_global_scale", "F32", (1,)
        return
    scales: tuple[int, ...] = (1,)
    if strategy == "block":
        block = block_size(scheme.config.get("block_structure"), "block_structure")
        scales = _up(rows, block[0]), _up(columns, block[1])
    elif strategy != "tensor":
        scales = rows, _up(columns, group) if group is not None and group > 0 else 1
    if form.startswith("pack"):
        yield "weight_packed", "I32", (rows, _up(columns * bits, _WORD))
        yield "weight_scale", dtype, scales
        yield "weight_shape", "I64", (2,)
        if scheme.config.get("symmetric") is False:
            yield "weight_zero_point", "I32", (_up(rows * bits, _WORD), *scales[1:])
    else:
        yield "weight", "F8_E4M3" if scheme.config.get("type", "float") == "float" else "I8", shape
        yield "weight_scale", dtype, scales


def _words(given: Given) -> tuple[int, Callable[[int], int]]:
    """Return the bits of a value, and the number of groups of so many columns."""
    bits = given.integer("bits", "w_bit") or 4
    size = given.integer("group_size", "q_group_size", least=-1)
    if size is None or size == 0 or bits > 8:
        raise ParseError("quantization_config: group_size is missing or 0, or bits is over 8")
    return bits, lambda columns: _up(columns, size) if size > 0 else 1


def _awq(given: Given, dtype: str) -> _PartsMaker:
    bits, groups = _words(given)

    def made(name: str, shape: tuple[int, ...]) -> _StatedParts:
        rows, columns = shape
        words = _whole(name, rows * bits, _WORD)
        yield "qweight", "I32", (columns, words)
        if given.config.get("zero_point", True):
            yield "qzeros", "I32", (groups(columns), words)
        yield "scales", "F16", (groups(columns), rows)

    return made


def _gptq(given: Given, dtype: str) -> _PartsMaker:
    bits, groups = _words(given)

    def made(name: str, shape: tuple[int, ...]) -> _StatedParts:
        rows, columns = shape
        yield "qweight", "I32", (_whole(name, columns * bits, _WORD), rows)
        yield "qzeros", "I32", (groups(columns), _whole(name, rows * bits, _WORD))
        yield "scales", "F16", (groups(columns), rows)
        yield "g_idx", "I32", (columns,)

    return made


def _mxfp4(given: Given, dtype: str) -> _PartsMaker:
    def made(name: str, shape: tuple[int, ...]) -> _StatedParts:
        experts, columns, rows = shape  # Where it is not quantized it is stored transposed.
        yield "+_blocks", "U8", (experts, rows, _whole(name, columns, 32), 16)
        yield "+_scales", "U8", (experts, rows, _whole(name, columns, 32))

    return made


def _bitsandbytes(given: Given, dtype: str) -> _PartsMaker:
    four, double = given.config.get("load_in_4bit", True), given.config.get("bnb_4bit_use_double_quant")

    def made(name: str, shape: tuple[int, ...]) -> _StatedParts:
        if not four:
            yield "weight", "I8", shape
            yield "SCB", "F32", (shape[0],)
            return
        count = math.prod(shape)
        yield "weight", "U8", (_up(count, 2), 1)
        yield "+.absmax", "U8" if double else "F32", (_up(count, 64),)
        yield "+.quant_map", "F32", (16,)
        if double:
            yield "+.nested_absmax", "F32", (_up(_up(count, 64), 256),)
            yield "+.nested_quant_map", "F32", (256,)
        yield "+.quant_state.bitsandbytes__nf4", "U8", (1,)

    return made


def _fbgemm(given: Given, dtype: str) -> _PartsMaker:
    def made(name: str, shape: tuple[int, ...]) -> _StatedParts:
        yield "weight", "F8_E4M3", shape
        yield "weight_scale", "F32", (shape[0], 1)

    return made


def _auto_round(given: Given, dtype: str) -> _PartsMaker:
    check_extra(given.config)
    whole = [name for name, own in (given.config.get("extra_config") or {}).items() if own.get("bits", 0) >= 16]
    if patterns := [name for name in whole if not re.fullmatch(r"[\w.]+", name)]:
        raise StatedError(
            f"quantization_config: extra_config names layers by {shown(patterns[0])}, which is not a name"
        )
    left_out = Modules("extra_config", whole, lambda text: rf"(?:.*\.)?{re.escape(text)}$")
    packed = _awq(given, dtype) if "awq" in str(given.config.get("packing_format")) else _gptq(given, dtype)

    def made(name: str, shape: tuple[int, ...]) -> _StatedParts | None:
        parts = None if left_out.named(name.removesuffix(".weight")) else packed(name, shape)
        return None if parts is None else [part for part in parts if part[0] != "g_idx"]

    return made


def _mxfp8(given: Given, dtype: str) -> _PartsMaker:
    def made(name: str, shape: tuple[int, ...]) -> _StatedParts:
        yield "weight", "F8_E4M3", shape
        yield "weight_scale_inv", "U8", (shape[0], _up(shape[1], 32))

    return made


def _mlx(given: Given, dtype: str) -> _PartsMaker:
    def made(name: str, shape: tuple[int, ...]) -> _StatedParts | None:
        said = given.config.get(name.removesuffix(".weight"))
        own = Given({**given.config, **(said if isinstance(said, Mapping) else {})}, None)
        bits, size, mode = own.integer("bits"), own.integer("group_size"), own.config.get("mode") or "affine"
        if bits is None or size is None:
            raise ParseError("quantization: bits or group_size is missing")
        if said is False or shape[1] % size:  # Then mlx-lm leaves it as it is.
            return None
        scales, kind = (shape[0], shape[1] // size), dtype if mode == "affine" else "U8"
        parts = [("weight", "U32", (shape[0], _whole(name, shape[1] * bits, _WORD))), ("scales", kind, scales)]
        return [*parts, ("biases", dtype, scales)] if mode == "affine" else parts

    return made


_MAKERS: dict[str, Callable[[Given, str], _PartsMaker]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "mxfp8": _mxfp8,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "awq": _awq,
    "gptq": _gptq,
    "auto-round": _auto_round,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
    "mlx": _mlx,
}


def _whole(name: str, n: int, size: int) -> int:
    if n % size:
        raise ParseError(
            f"{shown(name)} would have {n} elements or bits, which {size} does not divide: no weight of this "
            "form has that shape"
        )
    return n // size
