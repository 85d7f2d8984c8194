"""The table of names: nothing that a shipped rules file is for is missing, and nobody else has a table of his own."""

from __future__ import annotations

import ast
import datetime
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.fit.engines import engine_limits
from shardwise.rules.model_shapes import model_shapes
from shardwise.rules.names import (
    keys_of,
    merged_names,
    module_of,
    shipped_table,
    stated,
    weight_named,
    weights,
)
from shardwise.rules.toml import read_document

from ..oracle.families.models import DATA, read

PACKAGE = Path(sw.__file__).parent
SIZES: dict[str, list[str]] = shipped_table("names.toml")["sizes"]
WITHOUT = frozenset(shipped_table("names.toml")["without"])


def has_role(name: str) -> bool:
    last_two, last = ".".join(name.split(".")[-2:]), name.rpartition(".")[2]
    path = module_of(name)
    names = {last, last_two, path.rpartition(".")[2], ".".join(path.split(".")[-2:])}
    return bool(names & WITHOUT) or weight_named(path, elsewhere=True) is not None


@pytest.mark.parametrize("model", sorted(file.name.removesuffix(".json.gz") for file in DATA.glob("*.json.gz")))
def test_every_tensor_of_every_family_and_engine_has_a_role(model: str) -> None:
    """The names are those that transformers, vLLM, SGLang, Megatron-Core and MaxText have for a model."""
    said = read(model)
    names = set(said["tensors"])
    for engine in said["engines"].values():
        names |= {
            name for ranks in engine["ranks"].values() if "refused" not in ranks for rank in ranks for name in rank
        }
    assert names
    assert sorted(name for name in names if not has_role(name)) == []


def test_a_name_that_nobody_has_has_no_role() -> None:
    assert not has_role("model.layers.0.mlp.sideways_proj.weight")
    assert not has_role("model.layers.0.attention.gamma.weight")


def sides(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for key in ("name", "also", "where") for text in sides(value.get(key, [])))
    else:
        yield from (text for one in value for text in sides(one))


def alternatives(template: str) -> list[str]:
    """The names that a template of a rewrite has with each of its choices; fields are 0, and texts x."""
    found = [template]
    while (choice := re.search(r"\{([^{}]*,[^{}]*)\}", found[0])) is not None:
        # A choice that is repeated is the same each time.
        found = [text.replace(choice[0], one) for text in found for one in choice[1].split(",")]
    found = [text for text in found if not re.search(r"(?:^|\.)\{\w+\*?\}$", text)]  # The last word may be any.
    return [re.sub(r"\{\w+(?:[+-]\w+)?\}", "0", re.sub(r"\{\w+\*\}", "x", text)) for text in found]


@pytest.mark.parametrize("rules", sorted(sw.example_rules()))
def test_every_name_in_the_rewrites_of_a_shipped_file_has_a_role(rules: str) -> None:
    tables = read_document(sw.example_rules()[rules]).tables
    templates = [
        text for rewrite in tables.get("rewrite", []) for key in ("from", "to") for text in sides(rewrite[key])
    ]
    names = {name for template in templates for name in alternatives(template)}
    assert sorted(name for name in names if not has_role(name)) == []


@pytest.mark.parametrize("rules", sorted(sw.example_rules()))
def test_keys_that_a_shipped_file_lists_for_a_number_are_of_one_size(rules: str) -> None:
    of = {key: size for size, keys in SIZES.items() for key in keys}
    for choices in read_document(sw.example_rules()[rules]).tables.get("numbers", {}).values():
        if isinstance(choices, list):
            assert len({of[key] for key in choices if key in of}) <= 1


def test_a_key_is_of_one_size_and_no_entry_is_there_twice() -> None:
    keys = [key for keys in SIZES.values() for key in keys]
    assert len(keys) == len(set(keys))
    entries = [
        (name, place, model)
        for weight in weights()
        for name in (*weight.names, *weight.elsewhere)
        for place in (weight.within or ("",))
        for model in (weight.models or ("",))
    ]
    assert len(entries) == len(set(entries))
    assert {
        part for merged in merged_names() for part in merged.parts if weight_named(part, elsewhere=True) is None
    } == set()
    assert all(weight.parts == 1 or not weight.cut or weight.cut == "rows" for weight in weights())


def literals(tree: ast.AST) -> Iterator[set[str]]:
    """The texts that stand beside each other in a list or a call."""
    for node in ast.walk(tree):
        parts = node.args if isinstance(node, ast.Call) else getattr(node, "elts", [])
        yield {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}


def test_no_module_has_a_table_of_keys_or_of_merged_matrices_of_its_own() -> None:
    """Two keys of one size beside each other, or all parts of what is merged, are a second table."""
    ours = [set(keys) for keys in SIZES.values()] + [set(merged.parts) for merged in merged_names()]
    files = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py") if "interop" not in path.parts}
    assert len(files) > 200
    found = [
        (path.relative_to(PACKAGE).as_posix(), sorted(beside & keys))
        for path, text in files.items()
        if any(sum(f'"{key}"' in text for key in keys) > 1 for keys in ours)
        for beside in literals(ast.parse(text))
        for keys in ours
        if len(beside & keys) > 1
    ]
    assert found == []


def test_a_size_is_stated_by_any_of_its_keys() -> None:
    for size in SIZES:
        for key in keys_of(size):
            assert stated({key: 3, "other": 4}, size) == (key, 3)
        assert stated(dict.fromkeys(keys_of(size)), size) is None


@pytest.mark.parametrize("key", keys_of("experts"))
def test_experts_are_counted_by_any_key_everywhere(key: str) -> None:
    """Shapes of a model, its deployment, and fits read the same key: the same number of experts in all three."""
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 1, "hidden_size": 8, "vocab_size": 64, "head_dim": 4}
    config |= {"intermediate_size": 16, "num_attention_heads": 2, "moe_intermediate_size": 8, key: 4}
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in model_shapes(config)
    engine = sw.deploy.vllm(config, tp=2, expert_parallel=True)
    assert engine.partition("model.layers.0.mlp.experts.3.up_proj.weight", (8, 8)).holders == ("cpu:1",)
    (size,) = sw.fit.fits(config, (4,), (4,)).sizes
    assert size.verdict != "unknown"


def test_facts_of_engines_have_a_version_a_date_and_a_source() -> None:
    table = shipped_table("engines.toml")
    for facts in (*table["engines"].values(), *table["limits"]):
        assert isinstance(facts["date"], datetime.date)
        assert facts["version"]
        assert facts["source"]
    for limit in engine_limits():
        said = limit.why.format(size=1, multiple=2, padded=3)
        assert "{" not in said
        assert re.compile(limit.form)
