"""Public threads about models and sizes that did not fit: what the format allows, and what engines accept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.fit import Cut, fits_tensors

CASES = json.loads((Path(__file__).parents[1] / "data" / "quantized" / "cases.json").read_text())
Outline = dict[str, tuple[str, tuple[int, ...]]]
#: The sizes that the cases look at.
AMONG = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)


def scheme(**weights: Any) -> dict[str, Any]:
    group = {"format": weights.pop("form"), "targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def written(form: str, name: str, out: int, columns: int, unit: int) -> tuple[Outline, dict[str, Any]]:
    """The tensors of one weight of (out, columns), and the configuration."""
    if form == "fp8":
        shape = (-(-out // unit), -(-columns // unit))
        tensors: Outline = {
            f"{name}.weight": ("F8_E4M3", (out, columns)),
            f"{name}.weight_scale_inv": ("F32", shape),
        }
        return tensors, {"quant_method": "fp8", "weight_block_size": [unit, unit]}
    if form == "fp8-channel":
        tensors = {f"{name}.weight": ("F8_E4M3", (out, columns)), f"{name}.weight_scale": ("BF16", (out, 1))}
        return tensors, scheme(form="float-quantized", strategy="channel", num_bits=8)
    if form == "int4":
        tensors = {
            f"{name}.weight_packed": ("I32", (out, columns // 8)),
            f"{name}.weight_scale": ("BF16", (out, columns // unit)),
        }
        return tensors, scheme(form="pack-quantized", strategy="group", group_size=unit, num_bits=4)
    if form.startswith("nvfp4"):
        packed = "weight" if form == "nvfp4" else "weight_packed"
        tensors = {
            f"{name}.{packed}": ("U8", (out, columns // 2)),
            f"{name}.weight_scale": ("F8_E4M3", (out, columns // 16)),
            f"{name}.{'weight_scale_2' if form == 'nvfp4' else 'weight_global_scale'}": ("F32", (1,)),
        }
        if form == "nvfp4":
            return tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4"}
        return tensors, scheme(form="nvfp4-pack-quantized", strategy="tensor_group", group_size=16)
    if form == "mxfp4":
        tensors = {
            f"{name}_blocks": ("U8", (128, out, columns // 32, 16)),
            f"{name}_scales": ("U8", (128, out, columns // 32)),
        }
        return tensors, {"quant_method": "mxfp4"}
    groups = columns // unit
    if form == "awq":
        tensors = {
            f"{name}.qweight": ("I32", (columns, out // 8)),
            f"{name}.qzeros": ("I32", (groups, out // 8)),
            f"{name}.scales": ("F16", (groups, out)),
        }
        return tensors, {"quant_method": "awq", "bits": 4, "group_size": unit}
    tensors = {
        f"{name}.qweight": ("I32", (columns // 8, out)),
        f"{name}.qzeros": ("I32", (groups, out // 8)),
        f"{name}.scales": ("F16", (groups, out)),
        f"{name}.g_idx": ("I32", (columns,)),
    }
    return tensors, {"quant_method": "gptq", "bits": 4, "group_size": unit, "desc_act": form == "gptq-desc-act"}


def cut_of(case: dict[str, Any], ep: int = 1) -> Cut:
    """The cut of the dim in question."""
    given, n = case["as"], case["size"]
    # The other dim is a multiple of everything.
    out, columns = (n, 8192) if given["side"] != "in" else (8192, n)
    unit = case["unit"] if case["unit"] > 1 else 128
    tensors, config = written(given["form"], given["weight"], out, columns, unit)
    if given["form"].startswith("nvfp4"):  # What the groups of the one allow, the kernel refuses of the other.
        tensors |= written(given["form"], given["weight"].replace("down", "gate"), columns, out, unit)[0]

    def read(name: str) -> bytes:
        groups = np.arange(n, dtype="<i4") // case["unit"]
        return (np.random.default_rng(1).permutation(groups) if given["form"] == "gptq-desc-act" else groups).tobytes()

    answer = fits_tensors(tensors, {"quantization_config": config}, (case["tp"],), (ep,), read=read)
    dim = 2 if given["form"] == "mxfp4" else int(given["side"] == "in")
    cut = next(cut for cut in answer.sizes[0].cuts if cut.dim == dim)
    return cut._replace(limits=tuple(limit for _, limit in answer.sizes[0].limits))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_what_the_format_allows_and_what_engines_accept(case: dict[str, Any]) -> None:
    cut = cut_of(case)
    halves = 2 if case["as"]["side"] == "halves" else 1
    # The numbers of the thread: of both halves of a fused weight together, where it has two.
    if case["id"] == "trtllm-8430":
        assert cut.unit == 8  # The thread counts groups, which lie along in.
    else:
        assert cut.unit == case["unit"]
        assert (halves * cut.size, cut.ways, cut.per_rank) == (case["size"], case["tp"], case["per_rank"] / halves)
        assert cut.on_units == case["cut_on_a_unit"]
        if halves == 1:
            assert [size for size in cut.sizes if size in AMONG] == case["tp_that_cut_on_units"]
            if cut.verdict != "refused":
                assert (cut.padded or cut.size) == case["padded_size_that_fits"]
    said = [limit.why for limit in cut.limits]
    kind = case["limit"].partition(" ")[0].rstrip(":,")
    if kind == "format":
        assert cut.verdict != "fits" or (case["tp"] == 1 and said)
        if "g_idx" in case["limit"]:
            assert cut.verdict == "refused"
            assert "g_idx is not in order" in cut.why
    elif kind == "kernel":
        assert cut.verdict == "fits"
        assert said
    else:
        assert (kind, cut.verdict, said) == ("loader", "fits", [])
    if case["message"].startswith(("Weight", "The output", "size_n")):  # In the words of the engine.
        assert any(case["message"].rstrip(".") in one for one in said), said
    if "per_rank_sizes" in case:
        assert list(cut.ceil) == case["per_rank_sizes"]


def test_experts_fit_where_they_are_cut_whole() -> None:
    """vllm-project/vllm-gaudi 1411 and ROCm/ATOM 1944: the way out that the threads name is `ep` 8."""
    gaudi = next(case for case in CASES if case["id"] == "gaudi-1411")
    assert [cut_of(gaudi, ep).verdict for ep in (1, 8)] == ["padded", "fits"]
    tensors: Outline = {}
    for expert in range(16):
        for name, out, columns in (("gate", 512, 2048), ("up", 512, 2048), ("down", 2048, 512)):
            more, config = written("fp8", f"model.layers.0.mlp.experts.{expert}.{name}_proj", out, columns, 128)
            tensors |= more
    answer = fits_tensors(tensors, {"quantization_config": config}, (8,), (1, 2, 8, 3))
    assert [(size.ep, size.verdict) for size in answer.sizes] == [
        (1, "shared"),
        (2, "fits"),
        (8, "fits"),
        (3, "refused"),
    ]
    assert answer.sizes[3].problems[0].why == "16 experts do not divide into 3"
