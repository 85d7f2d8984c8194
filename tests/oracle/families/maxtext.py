"""MaxText's own conversion from Hugging Face: its tables of names and its transformations, run on element numbers.

`python -m tests.oracle.families.maxtext MAXTEXT [FAMILY...]`, where MAXTEXT is `src/maxtext` of its sources; it needs
numpy, ml_dtypes, torch and safetensors, and JAX is replaced by numpy. The stacks of layers and experts are those of
`checkpoint_conversion/to_maxtext.py`: layers along dim 1 (`param_scan_axis`), experts first. Names are those in Orbax.
Llama 4 has a script of its own, which does not stack layers.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .models import FAMILIES, digest, numbered, read, write

Array = np.ndarray[Any, Any]
#: The model of MaxText's tables, by family.
MODELS = {
    "qwen2": "qwen2.5-7b",
    "qwen3": "qwen3-8b",
    "qwen3-moe": "qwen3-30b-a3b",
    "deepseek-v3": "deepseek3-671b",
    "qwen3-next": "qwen3-next-80b-a3b",
    "gpt-oss": "gpt-oss-20b",
    "llama": "llama3.1-8b",
    "mixtral": "mixtral-8x7b",
    "gemma2": "gemma2-2b",
    "gemma3": "gemma3-4b",
}
VERSION = "e591f30 of 2026-08-22"


def module_of(root: Path, name: str) -> Any:
    """A module of MaxText, in which JAX is numpy, and what is not needed is empty."""
    for absent in ("maxtext.utils", "maxtext.inference", "maxtext.checkpoint_conversion", "psutil", "tqdm"):
        sys.modules[absent] = types.ModuleType(absent)
    given: dict[str, dict[str, Any]] = {
        "maxtext.utils": {"max_logging": types.SimpleNamespace(log=str)},
        "maxtext.inference.inference_utils": {"str2bool": bool},
        "maxtext.checkpoint_conversion.utils.utils": {"save_weights_to_checkpoint": None},
        "maxtext.checkpoint_conversion.standalone_scripts.llama_or_mistral_ckpt": {"MODEL_PARAMS_DICT": {}},
        "psutil": {"Process": None},
        "tqdm": {"tqdm": lambda some, **_: some},
    }
    for absent, values in given.items():
        made = types.ModuleType(absent)
        vars(made).update(values)
        sys.modules[absent] = made
    jax: Any = types.ModuleType("jax")
    jax.numpy, jax.Array = np, ()
    sys.modules |= {"jax": jax, "jax.numpy": np}
    spec = importlib.util.spec_from_file_location(name.rpartition("/")[2], root / f"checkpoint_conversion/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def shape_of(name: str, shape: tuple[int, ...], config: dict[str, Any]) -> tuple[int, ...]:
    """The shape of a parameter of MaxText, of one layer: kernels have the inputs first, heads are dims of their own."""
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads", heads)
    if name.endswith("-bias") and any(f"{part}-bias" in name for part in ("query", "key", "value")):
        count = heads if "query" in name else groups
        return (count, shape[0] // count)
    if len(shape) != 2 or not name.endswith(("kernel", "wi_0", "wi_1", "wo")):
        return shape
    out, inputs = shape
    if "ttention-out-" in name or "attention_local-out-" in name or "attention_global-out-" in name:
        return (heads, inputs // heads, out)
    for part, count in (("query", heads), ("key", groups), ("value", groups), ("wq_b", heads), ("wkv_b", heads)):
        if f"-{part}-" in name:
            return (inputs, count, out // count)
    return (inputs, out)


def converted(module: Any, family: str, config: dict[str, Any], tensors: dict[str, Array]) -> dict[str, Array | None]:
    """The parameters of MaxText whose sources there are; None for one on whose values it computes."""
    own = types.SimpleNamespace(
        num_experts=config.get("num_local_experts", 0),
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        # As in its files of models: 4 for Qwen3-Next, 2 for gpt-oss.
        inhomogeneous_layer_cycle_interval=config.get("full_attention_interval", 2),
    )
    config = config | {"head_dim": own.head_dim}
    asked = config
    if family == "gemma3":  # Its table is for models of text and images.
        asked = {"text_config": config, "vision_config": {"num_hidden_layers": 0}}
        tensors = {name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()}
    names = module.PARAM_MAPPING[MODELS[family]](asked, own, scan_layers=True)
    hooks = module.HOOK_FNS[MODELS[family]](asked, own, scan_layers=True, saving_to_hf=False)

    def one(key: Any, name: str) -> Array:
        source: Array = tensors[name].astype("f8")
        shape = shape_of(key, source.shape, config) if isinstance(key, str) else source.shape
        given = hooks.get(key, [])
        steps: list[Callable[..., Array]] = given if isinstance(given, list) else [given]
        value = source
        for step in steps:
            value = step(value, shape)
        if value.size != source.size or not np.array_equal(np.sort(value, None), np.sort(source, None)):
            return np.full(value.shape, np.nan)
        return value

    made: dict[str, Array | None] = {}
    for keys, of in names.items():
        if not of:
            continue  # Fewer layers than have their kinds in turn.
        first = of if isinstance(of, str) else of[0] if isinstance(of[0], str) else of[0][0]
        if first not in tensors:
            continue
        if isinstance(of, str):
            value = one(keys, of)
        elif isinstance(of[0], str):
            value = np.stack([one(keys, name) for name in of], min(1, tensors[first].ndim))
        else:
            value = np.stack([np.stack([one(keys, name) for name in layers]) for layers in of])
        # A tensor of several parameters has them in its last dim.
        parts = {keys: value} if isinstance(keys, str) else dict(zip(keys, np.moveaxis(value, -1, 0), strict=True))
        for key, part in parts.items():
            made["params." + key.replace("-", ".")] = None if np.isnan(part).any() else part
    return made


def llama4(module: Any, config: dict[str, Any], tensors: dict[str, Array]) -> dict[str, Array | None]:
    """The parameters that MaxText's script for Llama 4 makes of the text model."""
    import torch
    from safetensors.torch import save_file

    module.CAST_DTYPE = np.float32
    images = (
        "class_embedding positional_embedding_vlm patch_embedding.linear.weight layernorm_pre.weight "
        "layernorm_pre.bias layernorm_post.weight layernorm_post.bias "
        "vision_adapter.mlp.fc1.weight vision_adapter.mlp.fc2.weight"
    )
    whole = {f"language_model.{name}": torch.from_numpy(value) for name, value in tensors.items()}
    whole |= {f"vision_model.{name}": torch.zeros(1, 1) for name in images.split()}
    whole["multi_modal_projector.linear_1.weight"] = torch.zeros(1, 1)
    sizes = {
        "num_layers": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "dims_per_head": config["head_dim"],
        "num_kv_heads": config["num_key_value_heads"],
        "vocab": config["vocab_size"],
        "interleave_moe_layer_step": config["interleave_moe_layer_step"],
        "rope_type": "llama3.1",
        "scale_query": False,  # As for both of its models.
    }
    memory = types.SimpleNamespace(memory_info=lambda: types.SimpleNamespace(rss=0))
    with tempfile.TemporaryDirectory() as folder:
        save_file({name: value.contiguous() for name, value in whole.items()}, f"{folder}/model.safetensors")
        found = module._convert_huggingface_to_jax_weights(folder, "llama4-17b-128e", sizes, memory)
    found.pop("vision_encoder")
    return {f"params.params.{name}": value for name, value in flat(found)}


def flat(tree: dict[str, Any], before: str = "") -> Iterator[tuple[str, Array]]:
    """The arrays of a tree by their paths."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def main() -> None:
    """Ask MaxText for each family."""
    root = Path(sys.argv[1])
    tables = module_of(root, "utils/param_mapping")
    script = module_of(root, "standalone_scripts/llama4_ckpt_unscanned")
    for family in sys.argv[2:] or [*MODELS, "llama4"]:
        for size in range(len(FAMILIES[family][2])):
            said = read(f"{family}-{size}")
            config, tensors = said["config"], numbered(said["tensors"])
            if family != "llama4":
                made, by = converted(tables, family, config, tensors), MODELS[family]
            elif config["hidden_size"] == config["num_attention_heads"] * config["head_dim"]:
                made, by = llama4(script, config, tensors), "llama4_ckpt_unscanned"
            else:
                print(family, size, "the script has no head_dim that is not hidden_size // heads")
                continue
            held: dict[str, Any] = {
                name: [[], None] if value is None else [list(value.shape), digest(value.astype("i4"))]
                for name, value in made.items()
            }
            of = f"MaxText {VERSION}: {by} in checkpoint_conversion"
            said["engines"]["maxtext"] = {"of": of, "ranks": {"1": [held]}}
            write(f"{family}-{size}", said)
            print(family, size, len(held), [name for name, (_, numbers) in held.items() if numbers is None])


if __name__ == "__main__":
    main()
