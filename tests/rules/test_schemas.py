"""The JSON Schemas of the package: what it ships and writes follows them, and what it refuses does not."""

from __future__ import annotations

import io
import json
from importlib.resources import files
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.rules import rewrite, toml
from shardwise.rules.search import MATCH_MODES
from shardwise.rules.toml_tables import parse_toml

jsonschema = pytest.importorskip("jsonschema")


def schema(name: str) -> Any:
    return json.loads((files("shardwise") / "schemas" / f"{name}.schema.json").read_text(encoding="utf-8"))


def faults(name: str, value: Any) -> list[str]:
    """The messages of what does not follow a schema."""
    validator = jsonschema.Draft202012Validator(schema(name))
    return [error.message for error in validator.iter_errors(value)]


@pytest.mark.parametrize("name", ["rules", "manifest"])
def test_the_schema_is_one(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(schema(name))


@pytest.mark.parametrize("name", sw.example_rules())
def test_the_rules_of_the_package_follow_the_schema(name: str) -> None:
    assert faults("rules", parse_toml(sw.example_rules()[name].read_text(encoding="utf-8"), name)) == []


def test_the_schema_has_the_keys_that_are_read() -> None:
    found = schema("rules")
    top = toml._CUTTING | toml._REWRITING | toml._BOTH | toml.PLACING
    assert set(found["properties"]) == top
    assert set(found["$defs"]["rule"]["anyOf"][1]["properties"]) == {*toml._KEYS, "mesh", "at"}
    assert set(found["$defs"]["rewrite"]["properties"]) == set(rewrite._REWRITE_KEYS)
    assert set(found["$defs"]["side"]["anyOf"][1]["properties"]) == set(rewrite._SIDE_KEYS)
    assert found["properties"]["match"]["enum"] == list(MATCH_MODES)


@pytest.mark.parametrize(
    "text",
    [
        "[rules]\nw = 3",
        "[rules]\nw = [3]",
        "[rules]\nw = { axis = ['x'] }",
        "rule = {}\n[rules]",
        "match = 'some'\n[rules]",
        "[mesh]\nshape = [2]\n[rules]",
        "[[rewrite]]\nfrom = 'a'",
        "[rules]\nw = { axes = ['x'], uneven = 'most' }",
        "models = 'llama'\n[rules]",
    ],
)
def test_what_is_refused_does_not_follow_the_schema(text: str) -> None:
    assert faults("rules", parse_toml(text, "the file"))
    with pytest.raises((sw.ParseError, sw.LayoutError)):
        sw.read_rules(io.StringIO(text))


def test_deployments_follow_the_schema() -> None:
    file = io.StringIO()
    config = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 64}
    sw.deploy.vllm({**config, "vocab_size": 128, "intermediate_size": 128}, tp=2, pp=2).to_toml(file)
    assert faults("rules", parse_toml(file.getvalue(), "the file")) == []


def test_manifests_follow_the_schema() -> None:
    mesh = sw.DeviceMesh((2, 2), ("x", "y"), devices=["a", "b", 3, 4])
    plain = sw.TensorLayout(("x", ("y",)), mesh)
    fused = sw.TensorLayout((None, sw.packed.parse("(3 h=2@y d=4)")), mesh)
    manifest = sw.deploy.Deployment(4, {}, {}, default="replicated").manifest({"v": np.zeros((2, 3), "f4")})
    cut = sw.deploy.Manifest(
        {
            "w": sw.deploy.ManifestTensor((4, 4), "float32", plain),
            "q": sw.deploy.ManifestTensor((4, 24), "bfloat16", fused, digest="00"),
            "t": sw.deploy.ManifestTensor((4,), "float32", sw.Tiling.from_boxes((4,), {"a": [(0, 2)], 5: [(2, 4)]})),
        }
    )
    for one in (manifest, cut):
        assert faults("manifest", one.to_dict()) == []
    broken = cut.to_dict()
    broken["tensors"]["w"] = [0, [-1], "float32"]
    assert faults("manifest", broken)
