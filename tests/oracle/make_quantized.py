"""Fresh quantized checkpoints of tiny models, written by the formats' own packages.

Runs where PyTorch, transformers, llmcompressor and nvidia-modelopt are (and knows nothing of this project):

    python tests/oracle/make_quantized.py FOLDER SEED

makes a folder for each form, of sizes that the seed decides, with an `expected.json` as those of `tests/data/quantized`
have it: the shapes of the logical weights, and what each dim of their components stands for, by the formats'
definitions. `python -m tests.oracle.corpora FOLDER` then goes through them.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

#: llmcompressor's schemes, and the unit of heads and features that they need.
SCHEMES = {
    "fp8-block-ct": ("FP8_BLOCK", 1),
    "fp8-channel-ct": ("FP8_DYNAMIC", 1),
    "int8-ct": ("W8A16", 128),
    "int4-ct": ("W4A16", 128),
    "int4-ct-asym": ("W4A16_ASYM", 128),
    "nvfp4-ct": ("NVFP4A16", 16),
    "mxfp4-ct": ("MXFP4A16", 32),
}
MODELOPT = {"fp8-tensor-modelopt": ("FP8_DEFAULT_CFG", 1), "nvfp4-modelopt": ("NVFP4_DEFAULT_CFG", 16)}


def source(folder: Path, rng: random.Random, unit: int) -> Path:
    """A model of random weights; all features are multiples of the unit."""

    def size(least: int, most: int) -> int:
        step = max(unit, 4)
        return step * rng.randint(-(-least // step), max(most // step, -(-least // step)))

    kv, head = rng.choice((1, 2)), max(unit, 16) * rng.choice((1, 2))
    config = Qwen3Config(
        vocab_size=40, hidden_size=size(48, 200), intermediate_size=size(64, 300), num_hidden_layers=1,
        num_attention_heads=kv * rng.choice((1, 2)), num_key_value_heads=kv, head_dim=head,
        tie_word_embeddings=False, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(rng.getrandbits(31))
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models

    words = {f"w{number}": number for number in range(40)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))


def blocks_of(tail: str, weights: dict[str, Any], shape: tuple[int, ...], own: tuple[int, ...]) -> list[dict[str, Any]]:
    """What each dim of a component stands for, by the definitions of compressed-tensors and ModelOpt."""
    bits = weights.get("num_bits", 8)
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    columns = {"block": 128, "channel": shape[1], "tensor": shape[1]}.get(strategy) or weights["group_size"]
    rows = 128 if strategy == "block" else 1
    if tail in ("weight_shape", "weight_global_scale", "weight_scale_2", "input_scale", "input_global_scale"):
        return [{"whole": True}] * len(own)
    if tail == "weight_scale" and strategy == "tensor":
        return [{"whole": True}] * len(own)
    if tail == "weight_scale":
        return [{"of": 0, "block": rows}, {"of": 1, "block": columns}]
    if tail == "weight_zero_point":
        return [{"of": 0, "block": 32 // bits}, {"of": 1, "block": columns}]
    per = {"weight_packed": 32 // bits}.get(tail, 1)
    if own[1] * 2 == shape[1] and bits == 4:
        per = 2
    return [{"of": 0, "block": 1}, {"of": 1, "block": per}]


def expect(folder: Path, plain: Path) -> None:
    """Write `expected.json`: of each weight its shape, as the model had it, and its components."""
    config = json.loads((folder / "config.json").read_text())
    given = config["quantization_config"]
    weights = next(iter(given["config_groups"].values()))["weights"]
    with safe_open(plain / "model.safetensors", "pt") as before:
        shapes = {name: tuple(before.get_slice(name).get_shape()) for name in before.keys()}  # noqa: SIM118
    with safe_open(folder / "model.safetensors", "pt") as after:
        stored = {}
        for name in after.keys():  # noqa: SIM118
            part = after.get_slice(name)
            stored[name] = part.get_dtype(), tuple(part.get_shape())
    tensors: dict[str, Any] = {}
    taken: set[str] = set()
    for name, shape in shapes.items():
        parts = {one: said for one, said in stored.items() if one.rpartition(".")[0] == name.rpartition(".")[0]}
        if not any(one.endswith("weight_scale") for one in parts):
            continue
        taken |= parts.keys()
        components = {
            one: {"dtype": code, "shape": own, "dims": blocks_of(one.rpartition(".")[2], weights, shape, own)}
            for one, (code, own) in parts.items()
        }
        tensors[name] = {"shape": shape, "components": components, "elements": []}
    others = {name: {"dtype": code, "shape": own} for name, (code, own) in stored.items() if name not in taken}
    said = {"quant_method": given["quant_method"], "tensors": tensors, "plain": others}
    (folder / "expected.json").write_text(json.dumps(said))


def main(root: Path, seed: int) -> None:
    rng = random.Random(seed)
    root.mkdir(parents=True, exist_ok=True)
    for name, (scheme, unit) in SCHEMES.items():
        from llmcompressor import oneshot
        from llmcompressor.modifiers.quantization import QuantizationModifier

        plain = source(root / f".{name}", rng, unit)
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
        recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
        oneshot(model=model, tokenizer=tokenizer(), recipe=recipe)
        model.save_pretrained(root / name)
        expect(root / name, plain)
    for name, (setting, unit) in MODELOPT.items():
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export import export_hf_checkpoint

        plain = source(root / f".{name}", rng, unit)
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
        calls = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(seed))
        mtq.quantize(model, getattr(mtq, setting), lambda one, calls=calls: one(calls))
        export_hf_checkpoint(model, export_dir=root / name)
        expect(root / name, plain)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
