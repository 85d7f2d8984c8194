"""Public cases of models and sizes that did not fit, asked of `fits`.

A case names a format, the size of a dim and its unit, how many ways it was cut, and what came of it: whether the format
or a kernel refused. `answer_differs` makes a model of it, of an MLP whose size it is, and compares.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from shardwise.fit import Cut, SizeFit, fits_tensors

__all__ = ["answer_differs", "answer_of", "written"]

Case = dict[str, Any]
Outline = dict[str, tuple[str, tuple[int, ...]]]
#: The sizes that the cases look at.
AMONG = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
#: The size of all other dims, a multiple of everything.
OTHER = 8192
#: How the format is named in a case, and here.
FORMS = {
    "fp8 block": "fp8",
    "fp8 per channel": "fp8-channel",
    "nvfp4 (modelopt)": "nvfp4",
    "nvfp4": "nvfp4-ct",
    "mxfp4": "mxfp4",
    "gptq int4, desc_act": "gptq-desc-act",
    "awq / gptq": "gptq",
    "gptq": "gptq",
    "awq": "awq",
    "int4": "int4",
    "int8": "int8",
}
#: Messages that are the words of an engine.
WORDS = ("Weight", "The output_size", "The input_size", "size_n")


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
    if form == "int8":
        tensors = {f"{name}.weight_packed": ("I32", (out, columns // 4)), f"{name}.weight_scale": ("BF16", (out, 1))}
        return tensors, scheme(form="pack-quantized", strategy="channel", num_bits=8)
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


def form_of(case: Case) -> str:
    text = case["format"].lower()
    return next(form for start, form in FORMS.items() if text.startswith(start))


def answer_of(case: Case, ep: int = 1) -> SizeFit:
    """The answer for a model of the case: a gated MLP, of experts where it is theirs, of the case's inner size."""
    form, n, unit = form_of(case), case["size"], case["unit"] if case["unit"] > 1 else 128
    text = f"{case['dim']} {case['model']}".lower()
    experts = ("moe" in text or "experts" in text) and "share" not in text
    prefix = (
        "model.layers.0.mlp.experts" + ("" if form == "mxfp4" else ".0")
        if experts or form == "mxfp4"
        else "model.layers.0.mlp"
    )
    tensors, config = written(form, f"{prefix}.down_proj", OTHER, n, unit)
    if "partitions" in case:
        tensors |= written(form, f"{prefix}.gate_up_proj", n, OTHER, unit)[0]
    elif form == "mxfp4":
        tensors |= written(form, f"{prefix}.gate_up_proj", 2 * n, OTHER, unit)[0]
    else:
        tensors |= written(form, f"{prefix}.gate_proj", n, OTHER, unit)[0]

    def read(name: str) -> bytes:
        columns = tensors[name][1][0]
        groups = np.arange(columns, dtype="<i4") // unit
        return (np.random.default_rng(1).permutation(groups) if form == "gptq-desc-act" else groups).tobytes()

    return fits_tensors(tensors, {"quantization_config": config}, (case["tp"],), (ep,), read=read).sizes[0]


def cut_in_question(case: Case, answer: SizeFit) -> Cut:
    name = "gate_up_proj" if "partitions" in case else "gate_proj" if case["unit"] == 1 else "down_proj"
    return next(cut for cut in answer.cuts if re.search(rf"\.{name}(?:\.weight)?$", cut.name))


def answer_differs(case: Case) -> str | None:
    """What of the answer differs from the case; `None` if nothing does."""
    answer = answer_of(case)
    cut = cut_in_question(case, answer)
    parts = 2 if "partitions" in case else 1
    said = [limit.why for _, limit in answer.limits]
    pairs: list[tuple[str, Any, Any]] = [
        ("unit", cut.unit, case["unit"]),
        ("size", parts * cut.size, case["size"]),
        ("ways", cut.ways, case["tp"]),
        ("per_rank", parts * cut.per_rank, case["per_rank"]),
        ("on_units", cut.on_units, case["cut_on_a_unit"]),
    ]
    if parts == 1:
        pairs.append(("sizes", [size for size in cut.sizes if size in AMONG], case["tp_that_cut_on_units"]))
        if not cut.never:
            pairs.append(("padded", cut.padded or cut.size, case["padded_size_that_fits"]))
    if "per_rank_sizes" in case:
        pairs.append(("ceil", list(cut.ceil), case["per_rank_sizes"]))
    kind = re.split(r"[ :(,]", case["limit"])[0]
    if kind == "format":
        # One rank alone has a last block that is short: the format allows it, the engine may not.
        pairs.append(("fits", answer.verdict == "fits" and not (case["tp"] == 1 and said), False))
    else:
        pairs += [("verdict", answer.verdict, "fits"), ("limits", bool(said), kind == "kernel")]
    if "g_idx" in case["limit"]:
        pairs.append(("refused for its order", cut.never and "g_idx is not in order" in cut.why, True))
    if case["message"].startswith(WORDS):
        pairs.append(("said", any(case["message"].rstrip(".") in one for one in said), True))
    wrong = [f"{what} is {ours}, expected {theirs}" for what, ours, theirs in pairs if ours != theirs]
    return "; ".join(wrong) or None
