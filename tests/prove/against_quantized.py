"""Quantized weights of all forms, of random bits, cut in random ways: a dequantized shard is a shard of the whole."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import shardwise as sw
from shardwise.quantized import find_components

from ..oracle.dequantize import dequantized
from ..oracle.quantized import Raw, cut_and_compare
from .subject import Mismatch, Subject, one_by_one, sampled

_WIDTHS = {"F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I64": 8}
FORMS = (
    *("fp8 block", "fp8 tensor", "ct block", "ct channel", "ct int4", "ct int4 zeros", "ct int3", "ct int8"),
    *("awq", "gptq", "gptq order", "nvfp4", "nvfp4 ct", "mxfp4 ct", "gpt-oss", "nf4"),
)


@dataclass(frozen=True)
class Weight:
    """A weight of a form, its sizes, and how it is cut."""

    form: str
    rows: int
    columns: int
    block: int
    dim: int
    devices: int
    spec: str
    uneven: sw.UnevenRule
    shared: bool
    seed: int

    def snippet(self) -> str:
        return f"from tests.prove.against_quantized import Weight, check\n\ncheck({self})"

    def simpler(self) -> Iterator[Weight]:
        if self.devices > 1:
            yield replace(self, devices=self.devices - 1)
        if self.spec != "tp":
            yield replace(self, spec="tp")
        if self.shared:
            yield replace(self, shared=False)
        for field in ("rows", "columns"):
            step = 8 if self.form in ("awq", "gptq", "gptq order", "gpt-oss") else 2
            if (size := getattr(self, field)) > 4 * step:
                yield replace(self, **{field: size // step // 2 * step})


def draw(rng: random.Random) -> Weight:
    form = rng.choice(FORMS)
    block = rng.choice((4, 8, 16, 32)) if "block" in form else rng.choice((8, 16, 32))
    step = {"awq": 8, "gptq": 8, "gptq order": 8, "nvfp4": 16, "nvfp4 ct": 16, "mxfp4 ct": 32, "gpt-oss": 32}.get(
        form, 1
    )
    step = math.lcm(step, 8) if form == "gptq" else step
    rows = rng.randint(1, 12) * (8 if form in ("awq", "gptq", "gptq order") else rng.choice((1, 2, 4, 8, 16)))
    columns = rng.randint(1, 8) * math.lcm(step, rng.choice((1, 2, 8, 16, 32)))
    if form in ("awq", "gptq", "gptq order", "ct int4", "ct int4 zeros"):
        columns = -(-columns // block) * block
    if form == "nf4" and rows * columns % 2:
        columns += 1
    if form in ("nvfp4", "nvfp4 ct"):
        columns = -(-columns // 16) * 16
    dim, devices = rng.randrange(2), rng.choice((1, 2, 2, 3, 4, 4, 8))
    n = columns if dim else rows
    rules: tuple[sw.UnevenRule, ...] = ("even", "even", "ceil", "balanced", "floor", "chunk")
    unit = rng.choice((1, 2, 8, 16, 32, 64))
    specs = ["tp", f"(n@tp/unit{unit})", f"(n@tp/ceil/unit{unit})", f"(n@tp/max{rng.choice((1, 2, 4))})"]
    specs.append(f"(n@tp/unit{unit}/pad{unit}each)")
    if n % 2 == 0:
        specs += [
            f"gate:(n@tp/unit{unit}) + up:(n@tp)",
            "(2 n@tp)",
            "(n@tp 2)",
            "(n@tp [gate:1 up:1])",
            "q:(n@tp) + k:(n)",
        ]
    cut = (rng.choice(specs), rng.choice(rules), rng.random() < 0.4)
    return Weight(form, rows, columns, block, dim, devices, *cut, seed=rng.getrandbits(32))


def check(case: Weight) -> None:
    raw, config = written(case)
    found = find_components(raw.outline(), {"quantization_config": config}, lambda name: raw.tensors[name][2])
    (logical,) = found.tensors.values()
    if logical.shape != (case.rows, case.columns):
        raise Mismatch(f"shape: ours {logical.shape}, expected {(case.rows, case.columns)}")
    spec: Any = "tp" if case.spec == "tp" else sw.packed.parse(case.spec)
    stored = {
        name.removeprefix("m.").replace("weight.", "").replace("quant_state.bitsandbytes__nf4", "quant_state"): (
            raw.tensors[name][0],
            raw.array(name),
        )
        for name in raw.tensors
    }
    if case.form == "gpt-oss":
        stored = {name.removeprefix("weight_"): one for name, one in stored.items()}
    whole = dequantized(found.method or "", config, stored, logical.shape, (0, 0))
    try:
        how: Any = {"shared": case.shared, "spec": spec, "uneven": case.uneven}
        cut_and_compare(logical, raw, found, config, case.dim, case.devices, whole=whole, **how)
    except AssertionError as error:
        raise Mismatch(str(error)) from error


def written(case: Weight) -> tuple[Raw, dict[str, Any]]:
    """The stored tensors of a weight `m.weight`, of random bits, and the configuration."""
    rng = np.random.default_rng(case.seed)
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    rows, columns, block = case.rows, case.columns, case.block

    def put(name: str, dtype: str, *shape: int, value: bytes | None = None) -> None:
        size = math.prod(shape) * _WIDTHS.get(dtype, 1)
        tensors[f"m.{name}"] = (dtype, shape, rng.bytes(size) if value is None else value)

    def up(n: int, size: int) -> int:
        return -(-n // size)

    def scheme(**weights: Any) -> dict[str, Any]:
        form = weights.pop("form")
        return {"quant_method": "compressed-tensors", "config_groups": {"g": {"format": form, "weights": weights}}}

    match case.form.split():
        case ["fp8", "block"]:
            put("weight", "F8_E4M3", rows, columns)
            put("weight_scale_inv", "F32", up(rows, block), up(columns, 2 * block))
            return Raw(tensors), {"quant_method": "fp8", "weight_block_size": [block, 2 * block]}
        case ["fp8", _]:
            put("weight", "F8_E4M3", rows, columns)
            put("weight_scale", "F32")
            put("input_scale", "F32")
            return Raw(tensors), {"quant_method": "modelopt", "quant_algo": "FP8"}
        case ["ct", "block"]:
            put("weight", "F8_E4M3", rows, columns)
            put("weight_scale", "BF16", up(rows, block), up(columns, block))
            return Raw(tensors), scheme(form="float-quantized", strategy="block", block_structure=[block, block])
        case ["ct", "channel"]:
            put("weight", "I8", rows, columns)
            put("weight_scale", "BF16", rows, 1)
            return Raw(tensors), scheme(form="int-quantized", strategy="channel", num_bits=8)
        case ["ct", kind, *zeros]:
            bits = int(kind.removeprefix("int"))
            put("weight_packed", "I32", rows, up(columns * bits, 32))
            put("weight_scale", "F16", rows, up(columns, block) if kind == "int4" else 1)
            put("weight_shape", "I64", 2, value=np.array([rows, columns], "<i8").tobytes())
            if zeros:
                put("weight_zero_point", "I32", up(rows * bits, 32), up(columns, block))
            strategy = "group" if kind == "int4" else "channel"
            return Raw(tensors), scheme(form="pack-quantized", strategy=strategy, num_bits=bits, group_size=block)
        case ["awq"]:
            put("qweight", "I32", columns, rows // 8)
            put("qzeros", "I32", columns // block, rows // 8)
            put("scales", "F16", columns // block, rows)
            return Raw(tensors), {"quant_method": "awq", "bits": 4, "group_size": block}
        case ["gptq", *order]:
            groups = np.arange(columns) // block
            put("qweight", "I32", columns // 8, rows)
            put("qzeros", "I32", columns // block, rows // 8)
            put("scales", "F16", columns // block, rows)
            put("g_idx", "I32", columns, value=(rng.permutation(groups) if order else groups).astype("<i4").tobytes())
            return Raw(tensors), {"quant_method": "gptq", "bits": 4, "group_size": block, "desc_act": bool(order)}
        case ["nvfp4"]:
            put("weight", "U8", rows, columns // 2)
            put("weight_scale", "F8_E4M3", rows, columns // 16)
            put("weight_scale_2", "F32")
            return Raw(tensors), {"quant_method": "modelopt", "quant_algo": "NVFP4"}
        case ["nvfp4", _]:
            put("weight_packed", "U8", rows, columns // 2)
            put("weight_scale", "F8_E4M3", rows, columns // 16)
            put("weight_global_scale", "F32", 1, value=np.array([3.5], "<f4").tobytes())
            return Raw(tensors), scheme(form="nvfp4-pack-quantized", strategy="tensor_group", group_size=16)
        case ["mxfp4", _]:
            put("weight_packed", "U8", rows, columns // 2)
            put("weight_scale", "U8", rows, columns // 32)
            return Raw(tensors), scheme(form="mxfp4-pack-quantized", strategy="group", group_size=32)
        case ["gpt-oss"]:
            put("weight_blocks", "U8", rows, columns // 32, 16)
            put("weight_scales", "U8", rows, columns // 32)
            return Raw(tensors), {"quant_method": "mxfp4"}
        case _:
            put("weight", "U8", rows * columns // 2, 1)
            put("weight.absmax", "F32", up(rows * columns, 64))
            put("weight.quant_map", "F32", 16)
            state = json.dumps({"shape": [rows, columns], "blocksize": 64}).encode()
            put("weight.quant_state.bitsandbytes__nf4", "U8", len(state), value=state)
            return Raw(tensors), {"quant_method": "bitsandbytes", "load_in_4bit": True}


SUBJECTS = [Subject("numpy", "quantized weights, cut and dequantized", 100_000, 500, sampled(draw, one_by_one(check)))]
