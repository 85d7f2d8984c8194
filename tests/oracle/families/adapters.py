"""What the adapters of engines record, compared element by element with the rules and presets of the package.

`PYTHONPATH=SOURCES:. python -m tests.oracle.families.adapters ENGINE [FAMILY...]`, where SOURCES has the engine's, with
torch and transformers; ENGINE is vllm, sglang or megatron, for which SOURCES has Megatron-Bridge 0.5 or later, and
Megatron-Core. Prints a line of JSON for each family: the elements that were compared and those that differ,
by preset, or with what the engine or the rules refused. `SHARDWISE_SEED=5` is for other sizes, drawn from this seed.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import shardwise as sw
from shardwise.deploy import Recording, preset
from shardwise.rules.names import keys_of

from .models import FAMILIES, SEED, config_of

#: The presets that are compared, with the options of the adapters.
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "vllm": {
        "vllm(tp=1)": {},
        "vllm(tp=2)": {"tp": 2},
        "vllm(tp=4)": {"tp": 4},
        "vllm(tp=2, pp=2)": {"tp": 2, "pp": 2},
        "vllm(tp=2, expert_parallel=true)": {"tp": 2, "expert_parallel": True},
    },
    "sglang": {
        "sglang(tp=1)": {},
        "sglang(tp=2)": {"tp": 2},
        "sglang(tp=4)": {"tp": 4},
        "sglang(tp=2, pp=2)": {"tp": 2, "pp": 2},
        "sglang(tp=4, ep=2)": {"tp": 4, "ep": 2},
    },
    "megatron": {  # Megatron-Bridge does not fill a padded vocabulary on one rank.
        "megatron(tp=2)": {"tp": 2},
        "megatron(tp=4)": {"tp": 4},
        "megatron(tp=2, pp=2)": {"tp": 2, "pp": 2},
        "megatron(tp=2, ep=2, etp=1)": {"tp": 2, "ep": 2, "etp": 1},
        "megatron(tp=2, pp=2, ep=2)": {"tp": 2, "pp": 2, "ep": 2},
    },
}
#: Options of all recordings of an engine.
ALWAYS = {"megatron": {"vocabulary_rows": 128}}
#: What all ranks add: the first one has it.
ADDED_ONCE = ("w2_bias", "w2_weight_bias")
#: What released configurations have, and the classes of transformers 5 do not write.
RELEASED = {
    "deepseek-v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
    "bert": {"position_embedding_type": "absolute"},
    "bert-model": {"position_embedding_type": "absolute"},
    "gemma2": {"hidden_act": "gelu_pytorch_tanh"},
}


def prepare(engine: str) -> Any:
    """Import an engine with stand-ins for what is not installed, and give its adapter."""
    if engine == "megatron":
        importlib.import_module("tests.oracle.families.transformer_engine").stand_in()
        return importlib.import_module("shardwise.interop.megatron")
    importlib.import_module(f"tests.oracle.families.{engine}_loads").prepare()
    if engine == "vllm":  # Its own inspection of classes is in a process without the stand-ins.
        registry: Any = importlib.import_module("vllm.model_executor.models.registry")
        registry._run_in_subprocess = lambda function: function()
    return importlib.import_module(f"shardwise.interop.{engine}")


def fitted(config: dict[str, Any]) -> dict[str, Any]:
    """Sizes that Megatron-Core takes: as many layers on each stage, and what two ranks divide."""
    found = dict(config)
    if found["num_hidden_layers"] % 2:
        found["num_hidden_layers"] += 1
        for key in ("layer_types", "mlp_layer_types"):
            if found.get(key):
                found[key] = [*found[key], found[key][-1]]
    if SEED:
        for size in ("hidden", "heads", "kv_heads", "inner", "experts", "expert_inner", "shared_inner"):
            found |= {key: 2 * found[key] for key in keys_of(size) if type(found.get(key)) is int}
    return found


def numbered(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The element numbers of a model's tensors, as recordings number them."""
    found, first = {}, 1
    for name, (shape, _) in tensors.items():
        size = int(np.prod(shape))
        found[name] = np.arange(first, first + size, dtype="i4").reshape(shape)
        first += size
    return found


def compared(text: str, config: dict[str, Any], recordings: list[Recording], tp: int) -> tuple[int, list[str]]:
    """The number of elements that a preset's rules place, over all ranks, and the parameters that differ.

    The last of several stages of vLLM has a tied embedding under two names; a recording has the first of them.
    """
    made = preset(text, config, form="report")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "hf")
        sw.save_checkpoint(source, numbered(recordings[0].tensors), sync=False)
        if made.rewrites:
            sw.reshard_checkpoint(source, Path(folder, "made"), rewrites=made.rewrites, sync=False)
            source = Path(folder, "made")
        with sw.open_checkpoint(source) as checkpoint:
            whole = {name: checkpoint.read(name) for name in checkpoint}
    count, wrong = 0, []
    for rank, recording in enumerate(recordings):
        held = {name for name, one in recording.parameters.items() if one.pieces}
        for name, value in whole.items():
            partition, label = made.layouts.partition(name, value.shape), f"cpu:{rank}"
            if label not in partition.holders:
                wrong += [f"{name} on {rank}: only recorded"] if name in held else []
                continue
            own = np.zeros(partition.holder_shape(label), "i8")
            for piece in partition.pieces(label):
                piece.view(own)[...] = value[piece.box]
            count += own.size
            if name.endswith(ADDED_ONCE) and rank % tp:
                own[...] = 0
            is_there = name in recording.parameters
            if not (is_there and np.array_equal(own, recording.element_numbers(name))) and (own.any() or is_there):
                wrong.append(f"{name} on {rank}")
        wrong += [f"{name} on {rank}: of no rule" for name in sorted(held - whole.keys())]
    return count, wrong


def main() -> None:
    """Print what is compared for each family."""
    engine, *families = sys.argv[1:]
    adapter = prepare(engine)
    for family in families or FAMILIES:
        size = 1  # The odd one.
        said: dict[str, Any] = {"family": family, "seed": SEED, "presets": {}}
        config = json.loads(config_of(family, size).to_json_string()) | RELEASED.get(family, {})
        config = {
            key: value for key, value in config.items() if not isinstance(value, dict) or key != "time_step_limit"
        }
        config["architectures"] = [FAMILIES[family][0]]
        if engine == "megatron":
            config = fitted(config)
        for text, options in PRESETS[engine].items():
            begun = time.perf_counter()
            try:
                recordings = adapter.record_ranks(config, **options, **ALWAYS.get(engine, {}), computed="leave")
                taken = time.perf_counter() - begun
                count, wrong = compared(text, config, recordings, options.get("tp", 1))
            except sw.ShardwiseError as error:
                said["presets"][text] = {"refused": str(error)[:160]}
            else:
                said["presets"][text] = {"elements": count, "wrong": wrong[:5], "seconds": round(taken, 1)}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
