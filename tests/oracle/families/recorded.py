"""For every model type that transformers has a plan for: rules of the plan, and what two ranks hold as it is recorded.

`python -m tests.oracle.families.recorded [FIRST [LAST]]`, with torch and transformers. Configurations are transformers'
defaults with small sizes; those that transformers does not take then are not recorded. It takes half an hour, and
writes what it finds into `tests/data/families/plans.json`, of which `table` makes the table of `docs/proof.md`:
`python -c "from tests.oracle.families.recorded import table; print(table())"`.

`python -m tests.oracle.families.recorded tensors [TYPE ...]` learns the tensors of types from their configurations, and
writes those into the package's `rules/tensors.json` that hold for the type's default configuration: minutes a type.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import shardwise as sw
from shardwise.deploy import Recording
from shardwise.rules.toml import read_models

from .models import DATA

#: For each type: "recorded" and equal to the rules of the plan, "rules" of the plan only, or "none".
PLANS = DATA.parent / "families" / "plans.json"
#: The tables of types whose tensors follow from a configuration.
TENSORS = Path(sw.__file__).parent / "rules" / "tensors.json"
RANKS = 2
#: The rows of the table, by what the plan gives and whether the package has a file for the type.
ROWS = {
    ("recorded", True): "recorded, and by hand",
    ("recorded", False): "recorded",
    ("rules", True): "by hand; rules of the plan, not recorded",
    ("rules", False): "rules of the plan, not recorded",
    ("none", True): "by hand",
    ("none", False): "unknown",
}
#: Keys of sizes in the configurations of all kinds of models.
SMALL = {
    64: "hidden_size d_model n_embd out_hidden_size projection_dim max_position_embeddings",
    96: "intermediate_size intermediate_size_mlp ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim vocab_size "
    "vocab_size_per_layer_input",
    32: "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size image_size",
    16: "head_dim global_head_dim q_lora_rank kv_lora_rank o_lora_rank hidden_size_per_layer_input index_head_dim "
    "mamba_head_dim mamba_d_head num_mel_bins",
    8: "qk_nope_head_dim qk_rope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim ssm_state_size "
    "mamba_d_state mamba_n_heads index_topk patch_size",
    4: "num_attention_heads n_head num_heads encoder_attention_heads decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts linear_num_value_heads index_n_heads mamba_num_heads",
    2: "num_hidden_layers n_layer num_layers encoder_layers decoder_layers depth num_key_value_heads "
    "num_experts_per_tok linear_num_key_heads num_global_key_value_heads o_groups num_attention_groups n_groups "
    "mamba_expand",
    1: "first_k_dense_replace n_group topk_group",
}
SIZES = {key: size for size, keys in SMALL.items() for key in keys.split()}
BY_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type")


def table() -> str:
    """The table of types."""
    by_hand = {kind for path in sw.example_rules().values() for kind in read_models(path)}
    found: dict[tuple[str, bool], list[str]] = {key: [] for key in ROWS}
    for kind, how in json.loads(PLANS.read_text())["types"].items():
        found[how, kind in by_hand].append(f"`{kind}`")
    rows = [f"| {ROWS[key]} | {len(names)} | {', '.join(names)} |" for key, names in found.items() if names]
    return "\n".join(["| how | number | model types |", "|---|---|---|", *rows])


def types_table() -> str:
    """The table of the types whose tensors are known from a configuration."""
    from shardwise.rules.model_shapes import _FAMILIES, _tables

    rows = {"by hand": sorted(_FAMILIES), "learned": sorted(_tables().keys() - _FAMILIES.keys())}
    found = [f"| {how} | {len(names)} | {', '.join(f'`{name}`' for name in names)} |" for how, names in rows.items()]
    return "\n".join(["| how | number | model types |", "|---|---|---|", *found])


def defaults(kind: str) -> dict[str, Any]:
    """The default configuration of a type, whole."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found: dict[str, Any] = json.loads(json.dumps(CONFIG_MAPPING[kind]().to_dict(), default=str))
    return found | {"model_type": kind}


def learn_tensors(kinds: Sequence[str], file: Path = TENSORS) -> None:
    """Learn the tensors of types, and keep the tables of those of which no size is fixed."""
    from shardwise.interop import transformers as adapter

    tables = json.loads(file.read_text())
    for kind in kinds:
        tables.pop(kind, None)
        try:
            table = adapter.type_tensors_of(defaults(kind))
        except sw.ShardwiseError as error:
            print(kind, f"{error}"[:200], flush=True)
            continue
        fixed = {key: value for key, value in table.get("fixed", {}).items() if isinstance(value, int | float | list)}
        print(kind, f"sizes are fixed: {fixed}" if fixed else "learned", flush=True)
        if not fixed:
            tables[kind] = {key: value for key, value in table.items() if key != "type"}
        lines = [f"{json.dumps(key)}: {json.dumps(tables[key], separators=(',', ':'))}" for key in sorted(tables)]
        file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def ask(kind: str) -> tuple[str, list[str]]:
    """What the adapter makes of a type, as in `PLANS`, and why it is not more."""
    from shardwise.interop import transformers as adapter

    given = defaults(kind)
    how, said = "none", []
    try:
        adapter.tp_rules_of(given, "tp")
        how = "rules"
        said = differing(adapter.tp_rules_of(small(given), "tp")[0], adapter.record_ranks(small(given), RANKS))
        return "differs" if said else "recorded", said
    except sw.ShardwiseError as error:
        return how, [f"{error}"[:200]]


def has_plan(kind: Any) -> bool:
    parts = (getattr(kind, "sub_configs", None) or {}).values()
    return bool(getattr(kind, "base_model_tp_plan", None)) or any(
        has_plan(part) for part in parts if isinstance(part, type) and part is not kind
    )


def small(config: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in config.items():
        if isinstance(value, dict) and key.endswith("config"):
            value = small(value)
        elif key in SIZES and type(value) is int:
            value = SIZES[key]
        elif key.endswith("token_id") and type(value) is int:
            value = min(value, 1)
        elif key in BY_LAYER and isinstance(value, list):
            value = value[:2]
        found[key] = value
    return found


def differing(rules: Any, recordings: list[Recording]) -> list[str]:
    """The tensors of which a rank has other elements than the rules give it."""
    layouts = sw.LayoutMap(sw.DeviceMesh((RANKS,), ("tp",), range(RANKS)), default="replicated")
    layouts.update(rules)
    found = []
    for name, (shape, _) in recordings[0].tensors.items():
        for rank, recording in enumerate(recordings):
            here, there = np.zeros(shape, bool), np.zeros(shape, bool)
            if name in recording.manifest:
                for piece in recording.manifest[name].pieces(rank):
                    here[piece.box] = True
                for piece in layouts.partition(name, shape, "chunk").pieces(rank):
                    there[piece.box] = True
            found += [name] if (here != there).any() else []
    return found


def main() -> None:
    """Print a line for each type, and the counts; write what was found."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    warnings.filterwarnings("ignore")
    kinds = [kind for kind in CONFIG_MAPPING if has_plan(CONFIG_MAPPING[kind])]
    if sys.argv[1:2] == ["tensors"]:
        learn_tensors(sys.argv[2:] or kinds)
        return
    asked = kinds[slice(*map(int, sys.argv[1:3] or ["0", str(len(kinds))]))]
    found = json.loads(PLANS.read_text())["types"]
    for kind in asked:
        found[kind], said = ask(kind)
        print(kind, found[kind], *said[:3], flush=True)
    types = {kind: found[kind] for kind in sorted(found) if kind in kinds}
    PLANS.write_text(json.dumps({"transformers": transformers.__version__, "types": types}, indent=0) + "\n")
    print({how: sum(found[kind] == how for kind in asked) for how in ("recorded", "differs", "rules", "none")})


if __name__ == "__main__":
    main()
