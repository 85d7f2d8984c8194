"""Public cases of models and sizes that did not fit, asked of `fits`.

A case names a format, the size of a dim and its unit, how many ways it was cut, and what came of it: whether the format
or a kernel refused. `answer_differs` makes a model of it, of an MLP whose size it is, and compares.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from shardwise.errors import ParseError
from shardwise.fit import Cut, SizeFit, fits_tensors
from shardwise.quantized.cut import padded_size, sizes_that_fit

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
    "mxfp8": "mxfp8",
    "bitsandbytes": "bnb",
    "bnb": "bnb",
    "torchao": "torchao",
    "gptq int4, desc_act": "gptq-desc-act",
    "awq / gptq": "gptq",
    "gptq": "gptq",
    "awq": "awq",
    "int4": "int4",
    "int8": "int8",
}
#: Methods of which no form is known here: they are refused by name, and what is left is arithmetic.
NOT_KNOWN = frozenset(["torchao"])
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
    if form == "mxfp8":
        tensors = {f"{name}.weight": ("F8_E4M3", (out, columns)), f"{name}.weight_scale": ("U8", (out, columns // 32))}
        return tensors, {"quant_method": "modelopt", "quant_algo": "MXFP8"}
    if form == "bnb":
        tensors = {
            f"{name}.weight": ("U8", (out * columns // 2, 1)),
            f"{name}.weight.absmax": ("F32", (-(-out * columns // 64),)),
            f"{name}.weight.quant_map": ("F32", (16,)),
            f"{name}.weight.quant_state.bitsandbytes__nf4": ("U8", (100,)),
        }
        return tensors, {"quant_method": "bitsandbytes", "load_in_4bit": True}
    if form in NOT_KNOWN:
        return {f"{name}.weight": ("I8", (out, columns))}, {"quant_method": form}
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
    merged = case.get("partitions", [n])
    text = f"{case['dim']} {case['model']}".lower()
    experts = ("moe" in text or "experts" in text) and "share" not in text
    prefix = (
        "model.layers.0.mlp.experts" + ("" if form == "mxfp4" else ".0")
        if experts or form == "mxfp4"
        else "model.layers.0.mlp"
    )
    tensors, config = written(form, f"{prefix}.down_proj", OTHER, n, unit)
    shapes = {"down_proj": (OTHER, n)}
    if len(set(merged)) == 1 and "partitions" in case:
        tensors |= written(form, f"{prefix}.gate_up_proj", n, OTHER, unit)[0]
    elif form == "mxfp4":
        tensors |= written(form, f"{prefix}.gate_up_proj", 2 * n, OTHER, unit)[0]
    else:  # Matrices of several sizes are stored each, and merged by engines.
        for name, rows in (("gate_proj", merged[0]), ("up_proj", merged[-1])):
            tensors |= written(form, f"{prefix}.{name}", rows, OTHER, unit)[0]
            shapes[name] = rows, OTHER

    def read(name: str) -> bytes:
        if "quant_state" in name:
            return json.dumps({"shape": shapes[name.split(".")[-4]], "blocksize": 64}).encode()
        columns = tensors[name][1][0]
        groups = np.arange(columns, dtype="<i4") // unit
        return (np.random.default_rng(1).permutation(groups) if form == "gptq-desc-act" else groups).tobytes()

    return fits_tensors(tensors, {"quantization_config": config}, (case["tp"] or 1,), (ep,), read=read).sizes[0]


def cut_in_question(case: Case, answer: SizeFit) -> Cut:
    return next(iter(cuts_in_question(case, answer)))


def cuts_in_question(case: Case, answer: SizeFit) -> list[Cut]:
    """The cuts of the dim that a case is about: of merged matrices the cut of each."""
    rows = case["dim"].startswith("out") if form_of(case) == "bnb" else case["unit"] == 1
    names = "gate_up_proj|gate_proj|up_proj" if "partitions" in case else "gate_proj" if rows else "down_proj"
    return sorted(
        (cut for cut in answer.cuts if re.search(rf"\.(?:{names})(?:\.weight)?$", cut.name)), key=lambda cut: cut.name
    )


def answer_differs(case: Case) -> str | None:
    """What of the answer differs from the case; `None` if nothing does."""
    if form_of(case) in NOT_KNOWN:
        return _rounding_differs(case)
    answer = answer_of(case)
    cuts = cuts_in_question(case, answer)
    cut, parts = cuts[0], len(cuts)
    said = [limit.why for _, limit in answer.limits]
    pairs: list[tuple[str, Any, Any]] = [
        ("unit", cut.unit, case["unit"]),
        ("size", sum(each.size for each in cuts), case["size"]),
        ("on_units", all(each.on_units for each in cuts), case["cut_on_a_unit"]),
    ]
    if case["tp"] is not None:  # Some cases are about whole weights.
        pairs += [("ways", cut.ways, case["tp"]), ("per_rank", sum(one.per_rank for one in cuts), case["per_rank"])]
    if parts == 1:
        sizes = [size for size in cut.sizes if size in AMONG]
        flat = cut.never and form_of(case) == "bnb"
        pairs.append(("sizes", [1] if flat else sizes, case["tp_that_cut_on_units"]))
        if not cut.never:
            pairs.append(("padded", cut.padded or cut.size, case["padded_size_that_fits"]))
    if "per_rank_sizes" in case:
        pairs.append(("ceil", list(cut.ceil), case["per_rank_sizes"]))
    kind = re.split(r"[ :(,]", case["limit"])[0]
    if kind == "format":
        # One rank alone has a last block that is short: the format allows it, the engine may not.
        pairs.append(("fits", answer.verdict == "fits" and not (case["tp"] == 1 and said), False))
    else:
        # Flat values are never cut along their columns, so that no whole model of them fits.
        verdict = cut.verdict if form_of(case) == "bnb" else answer.verdict
        pairs += [("verdict", verdict, "fits"), ("limits", bool(said), kind in ("kernel", "engine"))]
    if "g_idx" in case["limit"]:
        pairs.append(("refused for its order", cut.never and "g_idx is not in order" in cut.why, True))
    if case["message"].startswith(WORDS):
        pairs.append(("said", any(case["message"].rstrip(".") in one for one in said), True))
    wrong = [f"{what} is {ours}, expected {theirs}" for what, ours, theirs in pairs if ours != theirs]
    return "; ".join(wrong) or None


def _rounding_differs(case: Case) -> str | None:
    """What differs of a method that is not known here: it is refused by its name, and rounds to certain sizes."""
    try:
        answer_of(case)
    except ParseError as error:
        if f"quant_method is {form_of(case)!r}" not in str(error):
            return f"refused without its name: {error}"
    else:
        return "it is not refused"
    size, unit = case["size"], case["unit"]
    pairs = [
        ("padded", padded_size(size, unit, case["tp"] or 1), case["padded_size_that_fits"]),
        ("sizes", list(sizes_that_fit(size, unit, AMONG)), case["tp_that_cut_on_units"]),
    ]
    return "; ".join(f"{what} is {ours}, expected {theirs}" for what, ours, theirs in pairs if ours != theirs) or None
