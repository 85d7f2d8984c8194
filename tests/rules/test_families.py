"""The rules of each family give every rank what the engine's own loader gives it, in sizes that no file names."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.cli import main
from shardwise.rules.toml import read_compared

from ..oracle.families.models import DATA, SEED, digest, elements, read

#: Expected of many of these tests, which are about something else.
pytestmark = pytest.mark.filterwarnings("ignore:.*dropped by the rules:shardwise.ShardwiseWarning")

RULES = sw.example_rules()
#: Models that have the rules of another.
SAME = {
    "llama-tied": "llama",
    "deepseek-v3-mtp": "deepseek-v3",
    "glm4-moe-mtp": "glm4-moe",
    "qwen3-next-mtp": "qwen3-next",
    "bert-model": "bert",
    "llama4-scout": "llama4",
}
#: What the rules of a model leave out.
DROPPED = {"bert-model": r"pooler\."}

#: The names of an expert's projections: Mixtral's, and those of others.
EXPERT_PARTS = (("w1", "gate"), ("w3", "up"), ("w2", "down"))
#: What is added once: by the first rank, whereas the others have zeros.
ON_THE_FIRST = {("vllm", "w2_bias"), ("sglang", "w2_weight_bias")}

#: Megatron-Core's vocabularies, whose padding a rank holds, and no plan reads.
PADDED = {"embedding.word_embeddings.weight", "output_layer.weight"}

#: Each model, size and engine for which there is an answer and a file.
CASES = [
    (file.name.removesuffix(".json.gz"), engine)
    for file in sorted(DATA.glob("*.json.gz"))
    for engine in read(file.name.removesuffix(".json.gz"))["engines"]
]


def rules_of(model: str, engine: str) -> str:
    family = model.rpartition("-")[0]
    name = f"{engine}/{family}" if f"{engine}/{family}" in RULES else f"{engine}/{SAME.get(family, family)}"
    # Where SGLang holds a family as vLLM does, it has no file of its own.
    return name.replace("sglang/", "vllm/") if engine == "sglang" and name not in RULES else name


@functools.cache
def answer(model: str) -> dict[str, Any]:
    return read(model)


def otherwise(config: dict[str, Any], engine: str, count: int, ranks: Any) -> bool:
    """Whether the rules differ from the engine, on purpose, about a model or the number of ranks."""
    if engine not in ("vllm", "sglang"):
        return False
    # They refuse more ranks than experts, whose features could be cut.
    if "refused" in ranks and "is greater than the numbe" in ranks["refused"]:
        return True
    kind = config["model_type"]
    if engine == "sglang":
        # It pads vocabularies further where the ranks do not divide them, padded to 64.
        words = [config["vocab_size"]]
        words += [config["max_position_embeddings"], config["type_vocab_size"]] if kind == "bert" else []
        if any(-(-size // 64) * 64 % count for size in words):
            return True
        # All layers of Qwen3 have experts there, even if a model has them in some only; Mamba's weights are not tied.
        if (kind == "qwen3_moe" and config["decoder_sparse_step"] > 1) or (
            kind == "mamba2" and config["tie_word_embeddings"]
        ):
            return True
    # They cut within the key heads of linear attention, of which a rank then computes with none.
    return bool(config.get("linear_num_key_heads", count) % count)


def layouts(model: str, engine: str, ranks: int) -> sw.LayoutMap:
    mesh = sw.DeviceMesh((2, ranks), ("dp", "tp"))
    return sw.LayoutMap.from_toml(RULES[rules_of(model, engine)], mesh, config=answer(model)["config"])


def report_of(model: str, engine: str, ranks: int, whole: dict[str, Any]) -> sw.LayoutReport:
    return layouts(model, engine, ranks).report({name: (value.shape, "int32") for name, value in whole.items()})


def tensors_of(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    with sw.open_checkpoint(path) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint}


@pytest.mark.parametrize(("model", "engine"), [case for case in CASES if rules_of(*case) in RULES])
def test_every_rank_holds_what_the_engine_gives_it(tmp_path: Path, model: str, engine: str) -> None:
    said = answer(model)
    source, there = tmp_path / "hf", tmp_path / "there"
    tensors = elements(said)
    rewrites = sw.Rewrites.from_toml(RULES[rules_of(model, engine)], config=said["config"])
    first = next(ranks for ranks in said["engines"][engine]["ranks"].values() if "refused" not in ranks)[0]
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
        kept = tensors_of(tmp_path / "back")
        check_back(model, engine, kept, tensors)
    for count, ranks in said["engines"][engine]["ranks"].items():
        if otherwise(said["config"], engine, int(count), ranks):
            continue
        if "refused" in ranks:
            with contextlib.suppress(sw.LayoutError):
                report = report_of(model, engine, int(count), whole)
                assert report.unplaced, f"{engine} refuses {count} ranks: {ranks['refused']}"
            continue
        report = report_of(model, engine, int(count), whole)
        assert not report.unmatched
        assert not report.unused_rules
        assert not report.unplaced
        apart = within_heads(said["config"], engine, int(count), whole)
        check_ranks(engine, layouts(model, engine, int(count)), whole, ranks, apart | computed)


@pytest.mark.parametrize(("model", "engine"), [case for case in CASES if case[0].startswith("glm4-moe")])
def test_a_model_without_biases_is_the_same_but_for_them(tmp_path: Path, model: str, engine: str) -> None:
    """GLM-4.5 without `attention_bias`, which vLLM, SGLang and Megatron-Core take too."""
    said = answer(model)
    config = said["config"] | {"attention_bias": False}
    tensors = {name: value for name, value in elements(said).items() if not name.endswith("proj.bias")}
    rules = RULES[rules_of(model, engine)]
    rewrites = sw.Rewrites.from_toml(rules, config=config)
    sw.save_checkpoint(tmp_path / "hf", tensors, sync=False)
    whole = tensors
    if rewrites:
        sw.reshard_checkpoint(tmp_path / "hf", tmp_path / "there", rewrites=rewrites, sync=False)
        whole = tensors_of(tmp_path / "there")
    layout_map = sw.LayoutMap.from_toml(rules, sw.DeviceMesh((2, 2), ("dp", "tp")), config=config)
    report = layout_map.report({name: (value.shape, "int32") for name, value in whole.items()})
    assert not report.unmatched
    assert not report.unused_rules
    ranks = said["engines"][engine]["ranks"]["2"]
    biases = {name for name in ranks[0] if name.endswith(("proj.bias", "qkv.bias"))}
    assert biases
    check_ranks(engine, layout_map, whole, ranks, biases)


def check_back(model: str, engine: str, kept: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Converted back, all tensors are there again that the rules are for."""
    family = model.rpartition("-")[0]
    back = DROPPED.get(family, "")
    if family.endswith("-mtp") and engine in ("vllm", "sglang"):
        layers, words = answer(model)["config"]["num_hidden_layers"], r"|.*(embed_tokens|head)\.weight"
        own = rf"(mtp|model\.layers\.{layers})\."
        # SGLang takes the embedding and the output layer from the main model.
        back = rf"(?!{own}{words})" if engine == "vllm" else rf"(?!{own}){words}"
    assert kept.keys() == {name for name in tensors if not back or re.match(back, name) is None}
    assert all(np.array_equal(kept[name], tensors[name]) for name in kept)


def check_ranks(
    engine: str,
    rules: sw.LayoutMap,
    whole: dict[str, np.ndarray[Any, Any]],
    ranks: list[Any],
    left_out: Collection[str] = (),
) -> None:
    """Every rank holds what the engine's does, without the tensors that are left out."""
    for rank, expected in enumerate(ranks):
        held = {}
        for name, value in whole.items():
            layout = rules.layout_of(name, value.ndim)
            assert layout is not None
            sharded = sw.distribute_tensor(value, layout, rules.uneven_of(name) or "even")
            held[name] = sharded.shard(f"cpu:{len(ranks) + rank}")
            if rank and (engine, name.rpartition(".")[2]) in ON_THE_FIRST:
                held[name] = np.zeros_like(held[name])
        if engine == "hf":
            held = in_memory(held)
        assert held.keys() - set(left_out) == set(expected) - set(left_out)
        for name in held.keys() - set(left_out):
            got = held[name]
            if name in PADDED:
                got = np.pad(got, ((0, expected[name][0][0] - len(got)), (0, 0)))
            assert [list(got.shape), digest(got)] == expected[name], (name, rank, len(ranks))


@pytest.mark.parametrize("model", [model for model, engine in CASES if engine == "hf" and answer(model).get("plan")])
def test_rules_made_from_a_plan_cut_as_transformers_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    """`shardwise rules --from-tp-plan`, also within heads."""
    said = answer(model)
    (tmp_path / "plan.json").write_text(json.dumps(said["plan"]))
    assert main(["rules", "--from-tp-plan", str(tmp_path / "plan.json")]) == 0
    text = capsys.readouterr().out
    for count, ranks in said["engines"]["hf"]["ranks"].items():
        mesh = sw.DeviceMesh((2, int(count)), ("dp", "tp"))
        check_ranks("hf", sw.LayoutMap.from_toml(io.StringIO(text), mesh), elements(said), ranks)


def within_heads(config: dict[str, Any], engine: str, count: int, names: Collection[str]) -> set[str]:
    """Keys and values that transformers cuts within a head: there several ranks have the same heads here."""
    if engine != "hf" or config.get("num_key_value_heads", count) >= count:
        return set()
    return {name for name in names if re.search(r"self_attn\.[kv]_proj\.", name)}


def in_memory(held: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """A rank's tensors as transformers has them in memory: experts stacked, gate above up, and some names changed."""
    made: dict[str, np.ndarray[Any, Any]] = {}
    experts: dict[str, dict[str, list[np.ndarray[Any, Any]]]] = {}
    for name in sorted(held, key=lambda name: [int(part) if part.isdigit() else 0 for part in name.split(".")]):
        found = re.fullmatch(r"(.*\.experts)\.\d+\.(\w+)\.weight", name)
        if found is None:
            made[name.replace("embed_out.", "lm_head.")] = held[name]
        else:
            experts.setdefault(found[1], {}).setdefault(found[2], []).append(held[name])
    for prefix, parts in experts.items():
        gate, up, down = (parts.get(one) or parts.get(f"{other}_proj") for one, other in EXPERT_PARTS)
        assert up is not None
        assert down is not None
        made[f"{prefix}.down_proj"] = np.stack(down)
        fused = [np.concatenate(pair) for pair in zip(gate, up, strict=True)] if gate else up
        made[f"{prefix}.{'gate_up_proj' if gate else 'up_proj'}"] = np.stack(fused)
    return {re.sub(r"^backbone\.", "model.", name).replace(".block_sparse_moe.", ".mlp."): made[name] for name in made}


#: Rules for Hugging Face's names of families for which transformers has no plan: they cut as vLLM does.
AS_VLLM = [
    file.name.removesuffix(".json.gz")
    for file in sorted(DATA.glob("*.json.gz"))
    if rules_of(file.name.removesuffix(".json.gz"), "hf") in RULES
    and "-mtp-" not in file.name
    and read(file.name.removesuffix(".json.gz"))["engines"].keys() & {"hf", "vllm"} == {"vllm"}
]


@pytest.mark.heavy
@pytest.mark.parametrize("model", AS_VLLM)
def test_ranks_hold_the_elements_that_those_of_vllm_hold(tmp_path: Path, model: str) -> None:
    """Of all tensors together, whatever their names and orders are."""
    said = answer(model)
    dropped = DROPPED.get(model.rpartition("-")[0], r"A_log\Z")  # Not at all in vLLM, or not as it is stored.
    tensors = {name: value for name, value in elements(said).items() if re.search(dropped, name) is None}
    rewrites = sw.Rewrites.from_toml(RULES[rules_of(model, "vllm")], config=said["config"])
    sw.save_checkpoint(tmp_path / "hf", tensors, sync=False)
    sw.reshard_checkpoint(tmp_path / "hf", tmp_path / "vllm", rewrites=rewrites, sync=False)
    both = {"hf": tensors, "vllm": tensors_of(tmp_path / "vllm")}
    counts = [count for count, ranks in said["engines"]["vllm"]["ranks"].items() if "refused" not in ranks]
    if model.startswith("falcon-") and "multi_query" in said["config"] and said["config"]["new_decoder_architecture"]:
        counts = [count for count in counts if int(count) <= said["config"]["num_kv_heads"]]
    assert len(counts) > 1 or SEED
    for count in map(int, counts):
        held: dict[str, list[set[int]]] = {}
        for engine, whole in both.items():
            rules = layouts(model, engine, count)
            assert not rules.report({name: (value.shape, "int32") for name, value in whole.items()}).unmatched
            held[engine] = [set() for _ in range(count)]
            for name, value in whole.items():
                layout = rules[name]
                assert layout is not None
                sharded = sw.distribute_tensor(value, layout, rules.uneven_of(name) or "even")
                for rank, own in enumerate(held[engine]):
                    own |= set(sharded.shard(f"cpu:{rank}").reshape(-1).tolist()) - {0}
        assert held["hf"] == held["vllm"], count


def test_the_page_lists_all_files_of_engines() -> None:
    page = (Path(__file__).parents[2] / "docs" / "families.md").read_text()
    listed = set(re.findall(r"`((?:hf|vllm|sglang)/[\w.-]+)`", page.partition("## Models in other models")[0]))
    assert listed == {name for name in RULES if name.startswith(("hf/", "vllm/", "sglang/"))}


@pytest.mark.parametrize("name", RULES)
def test_a_file_says_what_it_was_compared_with(name: str) -> None:
    """In its `compared`, which `shardwise rules` prints; and it is short."""
    of = [answer(model)["engines"][engine]["of"] for model, engine in CASES if rules_of(model, engine) == name]
    of += [answer(model)["engines"]["vllm"]["of"] for model in AS_VLLM if rules_of(model, "hf") == name]
    said = {one for text in of for one in text.partition(":")[0].split(", ")}
    assert set(read_compared(RULES[name])) == said
    text = RULES[name].read_text()
    assert text.count("\n") <= 124
    assert all(len(line) <= 121 for line in text.splitlines())
