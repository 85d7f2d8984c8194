"""What quantized weights stand for, in plain numpy, whole or a part of them; without the package.

The values of a weight are worked out element by element from the formats' definitions: for element (o, i) of the
weight, which bits of which stored element hold it, and which scale and zero point belong to it. A part of a weight is
the arrays of a rank, and where in the whole its rows and columns begin. All numbers are float64, in which every
product is exact or rounded once; NaN is a value like any other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Stored", "decoded", "dequantized"]

Array = npt.NDArray[Any]
#: For each component, by the last part of its name: the dtype that the file states, and its raw elements.
Stored = Mapping[str, tuple[str, Array]]

_PLAIN = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1"}


def _minifloat(code: Array, exponent_bits: int, mantissa_bits: int) -> Any:
    """Sign, exponent and mantissa, with subnormal numbers and the usual bias of half the exponents, less one."""
    code = code.astype(np.int64)
    mantissa = code & ((1 << mantissa_bits) - 1)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    sign = np.where(code >> (mantissa_bits + exponent_bits) & 1, -1.0, 1.0)
    bias = (1 << (exponent_bits - 1)) - 1
    fraction = mantissa / (1 << mantissa_bits)
    return sign * np.where(
        exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - float(bias))
    )


def decoded(dtype: str, raw: Array) -> Any:
    """The numbers that stored elements of whole bytes are."""
    if dtype in _PLAIN:
        return raw.view(_PLAIN[dtype])
    if dtype == "BF16":
        return (raw.view("<u2").astype("<u4") << 16).view("<f4").astype(float)
    if dtype == "F8_E4M3":
        return np.where(raw.view("u1") & 127 == 127, np.nan, _minifloat(raw.view("u1"), 4, 3))
    if dtype == "F8_E8M0":
        return np.where(raw.view("u1") == 255, np.nan, 2.0 ** (raw.view("u1").astype(float) - 127))
    raise ValueError(dtype)


def _bits(words: Array, position: Array, bits: int) -> Any:
    """`bits` bits from `position` on of the words of 32 bits along the last axis, low bits first."""
    low = words.view("<u4").astype(np.uint64)
    index, shift = position // 32, (position % 32).astype(np.uint64)
    following = np.minimum(index + 1, low.shape[-1] - 1)
    both = low[..., index] | low[..., following] << np.uint64(32)
    return (both >> shift & np.uint64((1 << bits) - 1)).astype(np.int64)


def _pair(data: Array, column: Array) -> Any:
    """Values of four bits, two to a byte along the last axis, the low half first."""
    return data.view("u1")[..., column // 2] >> (4 * (column % 2)).astype(np.uint8) & 15


def dequantized(
    method: str, config: Mapping[str, Any], stored: Stored, shape: tuple[int, ...], start: tuple[int, ...]
) -> Array:
    """The values of a part of a weight: its shape, and where it begins in the whole.

    Of blocks of which the part has only some elements, it has the whole scale.
    """
    return np.asarray(_METHODS[method](config, stored, shape, start), float)


def _blocks(n: int, start: int, size: int) -> Any:
    """For each of `n` elements from `start` on, the number of its block among those that are touched."""
    return (start + np.arange(n)) // size - start // size


def _number(stored: Stored, tail: str) -> float:
    """The one value of a component."""
    (value,) = decoded(*stored[tail]).reshape(-1)
    return float(value)


def _fp8(config: Mapping[str, Any], stored: Stored, shape: tuple[int, ...], start: tuple[int, ...]) -> Any:
    values = decoded(*stored["weight"])
    if "weight_scale_inv" not in stored:
        return values * _number(stored, "weight_scale")
    rows, columns = config["weight_block_size"]
    scale = decoded(*stored["weight_scale_inv"]).astype(float)
    return values * scale[..., _blocks(shape[-2], start[-2], rows), :][..., _blocks(shape[-1], start[-1], columns)]


def _modelopt(config: Mapping[str, Any], stored: Stored, shape: tuple[int, ...], start: tuple[int, ...]) -> Any:
    if "weight_scale_2" not in stored:
        return decoded(*stored["weight"]) * _number(stored, "weight_scale")
    values = _minifloat(_pair(stored["weight"][1], np.arange(shape[-1])), 2, 1)
    scale = decoded(*stored["weight_scale"]) * _number(stored, "weight_scale_2")
    return values * scale[..., _blocks(shape[-1], start[-1], 16)]


def _compressed(config: Mapping[str, Any], stored: Stored, shape: tuple[int, ...], start: tuple[int, ...]) -> Any:
    (group,) = config["config_groups"].values()
    weights = group["weights"]
    form, strategy = group.get("format") or config["format"], weights["strategy"]
    rows, columns = np.arange(shape[-2]), np.arange(shape[-1])
    scale = decoded(*stored["weight_scale"]).astype(float)
    if form == "nvfp4-pack-quantized":
        values = _minifloat(_pair(stored["weight_packed"][1], columns), 2, 1)
        # The global scale divides the scales, before these multiply.
        return values * (scale / _number(stored, "weight_global_scale"))[..., _blocks(shape[-1], start[-1], 16)]
    if form == "mxfp4-pack-quantized":
        values = _minifloat(_pair(stored["weight_packed"][1], columns), 2, 1)
        return values * (2.0 ** (scale - 127))[..., _blocks(shape[-1], start[-1], 32)]
    if strategy == "block":
        high, wide = weights["block_structure"]
        scale = scale[..., _blocks(shape[-2], start[-2], high), :][..., _blocks(shape[-1], start[-1], wide)]
    of_column = np.zeros(shape[-1], int) if strategy == "channel" else None
    if strategy == "group":
        size = weights["group_size"]
        of_column = _blocks(shape[-1], start[-1], size)
        if "weight_g_idx" in stored:  # The groups are numbered as in the whole.
            of_column = stored["weight_g_idx"][1].view("<i4") - start[-1] // size
    if form != "pack-quantized":
        values = decoded(*stored["weight"]).astype(float)
        return values * (scale if strategy in ("tensor", "block") else scale[..., of_column])
    bits = weights["num_bits"]
    offset = 1 << (bits - 1)
    values = _bits(stored["weight_packed"][1], columns * bits, bits) - offset
    if "weight_zero_point" in stored:  # Packed along the rows.
        zeros = _bits(stored["weight_zero_point"][1].T.copy(), rows * bits, bits).T - offset
        values = values - zeros[:, of_column]
    return values * scale[:, of_column]


_COLUMN_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)


def _awq(config: Mapping[str, Any], stored: Stored, shape: tuple[int, ...], start: tuple[int, ...]) -> Any:
    rows = np.arange(shape[0])
    nibble = np.array([_COLUMN_OF_NIBBLE.index(place) for place in range(8)])[rows % 8]
    values, zeros = (_bits(stored[tail][1], rows // 8 * 32 + 4 * nibble, 4) for tail in ("qweight", "qzeros"))
    scale = decoded(*stored["scales"]).astype(float)
    group = _blocks(shape[1], start[1], config["group_size"])
    return ((values - zeros[group]) * scale[group]).T


def _gptq(config: Mapping[str, Any], stored: Stored, shape: tuple[int, ...], start: tuple[int, ...]) -> Any:
    bits = config["bits"]
    values = _bits(stored["qweight"][1].T.copy(), np.arange(shape[1]) * bits, bits).T
    zeros = _bits(stored["qzeros"][1], np.arange(shape[0]) * bits, bits)
    if config.get("checkpoint_format", config.get("format")) != "gptq_v2":
        zeros = (zeros + 1) % (1 << bits)  # The first version stores one less.
    scale = decoded(*stored["scales"]).astype(float)
    group = stored["g_idx"][1].view("<i4") - start[1] // config["group_size"]
    return ((values - zeros[group]) * scale[group]).T


def _mxfp4(config: Mapping[str, Any], stored: Stored, shape: tuple[int, ...], start: tuple[int, ...]) -> Any:
    blocks, scales = stored["blocks"][1].view("u1"), stored["scales"][1].view("u1")
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    values = _minifloat(codes, 2, 1) * 2.0 ** (scales.astype(float) - 127)[..., None]
    return values.reshape(shape)


def _bitsandbytes(config: Mapping[str, Any], stored: Stored, shape: tuple[int, ...], start: tuple[int, ...]) -> Any:
    state = json.loads(stored["quant_state"][1].tobytes())
    size, row = state["blocksize"], math.prod(shape[1:])
    flat = start[0] * row + np.arange(math.prod(shape))
    data = stored["weight"][1].view("u1").reshape(-1)
    at = flat - flat[0] if len(flat) else flat
    codes = data[at // 2] >> (4 * (1 - at % 2)).astype(np.uint8) & 15  # The high half first.
    table = decoded(*stored["quant_map"]).astype(float)
    block = flat // size
    scale = decoded(*stored["absmax"])[block - block[:1]].astype(float)
    if "nested_absmax" in stored:
        nested = block // state["nested_blocksize"]
        number = decoded(*stored["absmax"])[block - block[:1]].astype(int)
        factor = decoded(*stored["nested_absmax"]).astype(float)[nested - nested[:1]]
        scale = decoded(*stored["nested_quant_map"]).astype(float)[number] * factor + state["nested_offset"]
    return (table[codes] * scale).reshape(shape)


_METHODS = {
    "fp8": _fp8,
    "modelopt": _modelopt,
    "compressed-tensors": _compressed,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
}
