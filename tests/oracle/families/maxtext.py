"""MaxText's own conversion from Hugging Face: its tables of names and its transformations, run on element numbers.

`python -m tests.oracle.families.maxtext PARAM_MAPPING [FAMILY...]`, where PARAM_MAPPING is MaxText's
`checkpoint_conversion/utils/param_mapping.py`; it needs numpy, and JAX is replaced by numpy. The stacks of layers and
experts are those of `to_maxtext.py`: layers along dim 1 (`param_scan_axis`), experts first. Names are those in Orbax.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from .models import digest, numbered, read, write

Array = np.ndarray[Any, Any]
#: The model of MaxText's tables, by family.
MODELS = {
    "qwen2": "qwen2.5-7b",
    "qwen3": "qwen3-8b",
    "qwen3-moe": "qwen3-30b-a3b",
    "deepseek-v3": "deepseek3-671b",
}
VERSION = "e591f30 of 2026-08-22"


def tables(file: str) -> Any:
    """The module of MaxText, in which JAX is numpy."""
    jax: Any = types.ModuleType("jax")
    jax.numpy = np
    sys.modules |= {"jax": jax, "jax.numpy": np}
    spec = importlib.util.spec_from_file_location("param_mapping", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shape_of(name: str, shape: tuple[int, ...], config: dict[str, Any]) -> tuple[int, ...]:
    """The shape of a parameter of MaxText, of one layer: kernels have the inputs first, heads are dims of their own."""
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads", heads)
    if name.endswith("-bias") and "self_attention" in name:
        count = heads if "query" in name else groups
        return (count, shape[0] // count)
    if not name.endswith(("kernel", "wi_0", "wi_1", "wo")):
        return shape
    out, inputs = shape
    if "self_attention-out" in name:
        return (heads, inputs // heads, out)
    for part, count in (("query", heads), ("key", groups), ("value", groups), ("wq_b", heads), ("wkv_b", heads)):
        if f"self_attention-{part}-" in name:
            return (inputs, count, out // count)
    return (inputs, out)


def converted(module: Any, model: str, config: dict[str, Any], tensors: dict[str, Array]) -> dict[str, Array | None]:
    """All parameters of MaxText whose sources there are; None for one on whose values it computes."""
    own = types.SimpleNamespace(
        num_experts=config.get("num_local_experts", 0),
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
    )
    config = config | {"head_dim": own.head_dim}
    names = module.PARAM_MAPPING[model](config, own, scan_layers=True)
    hooks = module.HOOK_FNS[model](config, own, scan_layers=True, saving_to_hf=False)

    def one(key: str, name: str) -> Array:
        value: Array = tensors[name].astype("f8")
        shape = shape_of(key, value.shape, config)
        given = hooks.get(key, [])
        steps: list[Callable[..., Array]] = given if isinstance(given, list) else [given]
        for step in steps:
            value = step(value, shape)
        assert value.shape == shape, (key, value.shape, shape)
        return value

    made: dict[str, Array | None] = {}
    for key, of in names.items():
        first = of if isinstance(of, str) else of[0] if isinstance(of[0], str) else of[0][0]
        if first not in tensors:
            continue
        if isinstance(of, str):
            value = one(key, of)
        elif isinstance(of[0], str):
            value = np.stack([one(key, name) for name in of], min(1, tensors[first].ndim))
        else:
            value = np.stack([np.stack([one(key, name) for name in layers]) for layers in of])
        made["params." + key.replace("-", ".")] = value if (value == value.astype("i4")).all() else None
    return made


def main() -> None:
    """Ask MaxText for each family."""
    module = tables(sys.argv[1])
    for family in sys.argv[2:] or MODELS:
        for size in range(2):
            said = read(f"{family}-{size}")
            made = converted(module, MODELS[family], said["config"], numbered(said["tensors"]))
            held: dict[str, Any] = {
                name: [[], None] if value is None else [list(value.shape), digest(value.astype("i4"))]
                for name, value in made.items()
            }
            of = f"MaxText {VERSION}: {MODELS[family]} in checkpoint_conversion"
            said["engines"]["maxtext"] = {"of": of, "ranks": {"1": [held]}}
            write(f"{family}-{size}", said)
            print(family, size, len(held), [name for name, (_, numbers) in held.items() if numbers is None])


if __name__ == "__main__":
    main()
