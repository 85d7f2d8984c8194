"""The rules of each family give every rank what the engine's own loader gives it, in sizes that no file names."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.rules.toml import read_compared

from ..oracle.families.models import DATA, digest, numbered, read

RULES = sw.example_rules()
#: Models that have the rules of another.
SAME = {"llama-tied": "llama"}
#: Rules for tensors that some models of a family do not have: dense layers among experts.
OPTIONAL = {"vllm/qwen3-moe": {r"mlp\.gate_up_proj\.weight$", r"mlp\.down_proj\.weight$"}}
#: Numbers of ranks that an engine refuses, or loads for, and why the rules say otherwise.
OTHERWISE = {
    ("qwen3-moe-1", "vllm", "8"): "vLLM refuses more ranks than experts, whose features could be cut",
    ("qwen3-next-0", "vllm", "4"): "vLLM cuts within the two key heads, of which each rank then computes with none",
}

#: What is added once: by the first rank, whereas the others have zeros.
ON_THE_FIRST = {("vllm", "w2_bias")}

#: What an answer leaves out: vocabularies, which are padded by the model that is made.
LEFT_OUT = {"megatron": {"embedding.word_embeddings.weight", "output_layer.weight"}}

#: Each model, size and engine for which there is an answer and a file.
CASES = [
    (file.name.removesuffix(".json.gz"), engine)
    for file in sorted(DATA.glob("*.json.gz"))
    for engine in read(file.name.removesuffix(".json.gz"))["engines"]
]


def rules_of(model: str, engine: str) -> str:
    family = model.rpartition("-")[0]
    return f"{engine}/{SAME.get(family, family)}"


@functools.cache
def answer(model: str) -> dict[str, Any]:
    return read(model)


def layouts(model: str, engine: str, ranks: int) -> sw.LayoutMap:
    mesh = sw.DeviceMesh((2, ranks), ("dp", "tp"))
    return sw.LayoutMap.from_toml(RULES[rules_of(model, engine)], mesh, config=answer(model)["config"])


def tensors_of(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    with sw.open_checkpoint(path) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint}


@pytest.mark.parametrize(("model", "engine"), [case for case in CASES if rules_of(*case) in RULES])
def test_every_rank_holds_what_the_engine_gives_it(tmp_path: Path, model: str, engine: str) -> None:
    said = answer(model)
    source, there = tmp_path / "hf", tmp_path / "there"
    tensors = numbered(said["tensors"])
    rewrites = sw.Rewrites.from_toml(RULES[rules_of(model, engine)], config=said["config"])
    first = said["engines"][engine]["ranks"]["1"][0]
    computed = {name for name, (_, numbers) in first.items() if numbers is None}
    if computed:
        sw.save_checkpoint(tmp_path / "all", tensors, sync=False)
        with pytest.raises(sw.LayoutError, match="nothing is computed on values"):
            sw.reshard_checkpoint(tmp_path / "all", there, rewrites=rewrites)
        refused = [one.source.names[0][1] for one in rewrites.sets[0].rewrites if one.refused]
        tensors = {name: value for name, value in tensors.items() if all(one.matched(name) is None for one in refused)}
    sw.save_checkpoint(source, tensors, sync=False)
    whole = tensors
    if rewrites:
        sw.reshard_checkpoint(source, there, rewrites=rewrites, sync=False)
        whole = tensors_of(there)
        sw.reshard_checkpoint(there, tmp_path / "back", rewrites=rewrites.inverse(), sync=False)
        assert sw.diff_checkpoints(source, tmp_path / "back") == []
    for count, ranks in said["engines"][engine]["ranks"].items():
        if (model, engine, count) in OTHERWISE:
            continue
        rules = layouts(model, engine, int(count))
        report = rules.report({name: (value.shape, "int32") for name, value in whole.items()})
        assert not report.unmatched
        assert set(report.unused_rules) <= OPTIONAL.get(rules_of(model, engine), set())
        if "refused" in ranks:
            assert report.unplaced, f"{engine} refuses {count} ranks: {ranks['refused']}"
            continue
        assert not report.unplaced
        for rank, expected in enumerate(ranks):
            device = f"cpu:{int(count) + rank}"
            compared = whole.keys() - LEFT_OUT.get(engine, set())
            assert compared == set(expected) - computed
            for name in compared:
                value = whole[name]
                layout = rules[name]
                assert layout is not None
                got = sw.distribute_tensor(value, layout, rules.uneven_of(name) or "even").shard(device)
                if rank and (engine, name.rpartition(".")[2]) in ON_THE_FIRST:
                    got = np.zeros_like(got)
                assert [list(got.shape), digest(got)] == expected[name], (name, rank, count)


@pytest.mark.parametrize("name", RULES)
def test_a_file_says_what_it_was_compared_with(name: str) -> None:
    """In its `compared`, which `shardwise rules` prints; and it is short."""
    engine, _, family = name.rpartition("/")
    models = {family, *(model for model, same in SAME.items() if same == family)}
    said = {
        answer(model)["engines"][engine]["of"].partition(":")[0]
        for model, of in CASES
        if of == engine and model.rpartition("-")[0] in models
    }
    assert set(read_compared(RULES[name])) == said
    text = RULES[name].read_text()
    assert text.count("\n") <= 120
    assert all(len(line) <= 121 for line in text.splitlines())
