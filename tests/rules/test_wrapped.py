"""The language model in a model of several: its sizes and its names."""

from __future__ import annotations

import io
import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise import deploy
from shardwise.cli import main
from shardwise.rules.numbers import NamedNumbers
from shardwise.rules.toml import prefixed, read_document, read_models
from shardwise.rules.wrapped import _DEFAULTS, _SIZES, language_config, model_types

from ..oracle.families.models import DATA, read

RULES = sw.example_rules()
SIZES = {"heads": "num_attention_heads", "groups": ["num_key_value_heads", "heads"], "d": ["head_dim", "64"]}
INNER = {"model_type": "own", "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}


@pytest.mark.parametrize("part", ["text_config", "llm_config", "language_config"])
def test_the_sizes_of_a_language_model_are_those_of_its_part(part: str) -> None:
    vision = {"model_type": "siglip", "num_attention_heads": 3}
    config = {"model_type": "wrapper", "num_attention_heads": 5, "vocab_size": 9, part: INNER, "vision_config": vision}
    assert dict(NamedNumbers(SIZES, config)) == {"heads": 8, "groups": 2, "d": 16}
    assert NamedNumbers({"n": f"{part}.head_dim"}, config)["n"] == 16
    assert NamedNumbers({"n": "vision_config.num_attention_heads"}, config)["n"] == 3
    assert NamedNumbers({"n": "vocab_size"}, config)["n"] == 9  # What only the whole says.
    assert model_types(config) == ["wrapper", "own"]


def test_a_part_within_a_part() -> None:
    config = {"model_type": "omni", "thinker_config": {"model_type": "thinker", "text_config": INNER}}
    assert NamedNumbers(SIZES, config)["groups"] == 2
    assert model_types(config) == ["omni", "own"]


def test_a_part_that_leaves_out_defaults_has_those_of_transformers() -> None:
    """Gemma 3's 4B and 12B as Google published them: four key-value heads, said by nothing."""
    config: dict[str, Any] = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 2560}}
    assert dict(NamedNumbers(SIZES, config)) == {"heads": 8, "groups": 4, "d": 256}
    config["text_config"]["num_attention_heads"] = 16
    assert dict(NamedNumbers(SIZES, config)) == {"heads": 16, "groups": 4, "d": 256}
    # As many key-value heads as heads, if a file says that there is no number.
    config["text_config"]["num_key_value_heads"] = None
    assert NamedNumbers(SIZES, config)["groups"] == 16


def test_a_size_of_another_part_is_named() -> None:
    config = {"model_type": "x", "decoder": INNER, "encoder": {}}
    with pytest.raises(Exception, match=r"has no num_attention_heads; if decoder\.num_attention_heads is meant, write"):
        NamedNumbers(SIZES, config)["heads"]
    assert NamedNumbers({"heads": "decoder.num_attention_heads"}, config)["heads"] == 8


@pytest.mark.parametrize("kind", _DEFAULTS)
def test_the_defaults_are_those_of_transformers(kind: str) -> None:
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    fields = auto.CONFIG_MAPPING[kind].__dataclass_fields__
    said = dict(zip(_SIZES, _DEFAULTS[kind], strict=True))
    # Head dims that are worked out have no other default here than that of the heads.
    known = {key: fields[key].default for key in _SIZES if key in fields}
    assert {key: value for key, value in said.items() if value is not None or known.get(key) is not None} == {
        key: value for key, value in known.items() if value is not None
    }


def test_what_is_no_part() -> None:
    configs: list[dict[str, Any]] = [{}, {"text_config": None}, {"text_config": {}}, {"text_config": [1]}]
    for config in configs:
        assert language_config(config) == config


#: Towers, projectors and other models beside the language model, as released files and transformers name them.
OTHERS = [
    "vision_tower.",
    "vision_tower.vision_model.",
    "vision_tower.vision_model.encoder.",
    "model.vision_tower.vision_model.encoder.",
    "model.vision_tower.transformer.",
    "model.vision_model.",
    "model.vision_model.encoder.",
    "vision_model.",
    "vision_model.model.",
    "vision_model.encoder.",
    "vision_model.transformer.",
    "vision_encoder.transformer.",
    "model.visual.",
    "visual.",
    "visual.transformer.",
    "vision.",
    "vit.",
    "vit.encoder.",
    "text_model.encoder.",
    "text_encoder.",
    "audio_tower.",
    "model.audio_tower.",
    "thinker.audio_tower.",
    "thinker.visual.",
    "talker.",
    "talker.model.",
    "token2wav.",
    "multi_modal_projector.",
    "model.multi_modal_projector.",
    "model.connector.perceiver_resampler.",
    "model.embed_vision.",
    "model.embed_audio.",
    "mlp1.",
    "projector.",
    "draft.",
    "draft.model.",
    "draft_model.model.",
    "eagle.",
    "encoder.",
    "params.vision_encoder.",
    "vision_model.decoder.",
    "image_encoder.",
    "optimizer.state.exp_avg.",
]
#: Single tensors of such models.
TENSORS = [
    "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight",
    "model.visual.blocks.0.attn.qkv.weight",
    "model.visual.blocks.0.mlp.gate_proj.weight",
    "model.visual.merger.mlp.0.weight",
    "vision_model.model.layers.0.self_attn.q_proj.weight",
    "vision_tower.transformer.layers.0.attention.q_proj.weight",
    "audio_tower.layers.0.self_attn.o_proj.weight",
    "multi_modal_projector.mm_soft_emb_norm.weight",
    "multi_modal_projector.linear_1.weight",
    "model.embed_vision.embedding.weight",
    "model.embed_vision.soft_embedding_norm.weight",
    "model.vision_embed_tokens.weight",
    "model.image_proj_norm.weight",
    "model.layers.0.mlp.vision_moe.experts.0.gate_proj.weight",
    "model.layers.0.mlp.vision_mlp.gate_proj.weight",
    "model.layers.0.cross_attn.o_proj.weight",
    "model.layers.0.cross_attn.q_norm.weight",
    "language_model.model.layers.0.cross_attn.q_proj.weight",
    "model.embed_tokens_per_layer.weight",
    "model.layers.0.self_attn.vision_expert_dense.weight",
    "vision_embed_tokens.weight",
    "vision_model.layernorm_post.weight",
    "qformer.encoder.layer.0.attention.attention.query.weight",
    "vision_model.encoder.layer.0.output.dense.weight",
    "query_tokens",
]
#: What comes before a language model's names within a wrapper, in files and in memory.
LANGUAGE = [
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "model.text_model.",
    "text_model.model.",
]
LANGUAGE += ["language.model.", "llm.model.", "thinker.model.", ""]


def patterns_of(name: str) -> dict[str, re.Pattern[str]]:
    document, _, _ = read_document(RULES[name])
    return {key: re.compile(prefixed(document.get("prefix", ""), key)) for key in document.get("rules", {})}


def names_of(name: str) -> set[str]:
    """Names of tensors as the engine of a file has them, or files do, for the family and for models like it."""
    family = name.rpartition("/")[2].removesuffix("-mtp").removesuffix("-mxfp4")
    found: set[str] = set()
    for file in sorted(DATA.glob(f"{family}*-0.json.gz")):
        said = read(file.name.removesuffix(".json.gz"))
        found |= said["tensors"].keys()
        for engine in said["engines"].values():
            found |= {one for ranks in engine["ranks"].values() if "refused" not in ranks for one in ranks[0]}
    return found


@pytest.mark.parametrize("name", RULES)
def test_rules_of_a_language_model_match_nothing_of_another_model(name: str) -> None:
    patterns = patterns_of(name)
    own = names_of(name)
    assert own
    bare = {
        re.sub(r"^(model|transformer|backbone|bert|gpt_neox|decoder|language_model|params)\.", "", one) for one in own
    }
    for tensor in [*TENSORS, *(prefix + one for prefix in OTHERS for one in own | bare)]:
        matching = [key for key, pattern in patterns.items() if pattern.search(tensor)]
        assert not matching, (tensor, matching)


@pytest.mark.parametrize(
    "name", [name for name in RULES if re.search(r"^(hf|vllm)/(llama|gemma|mistral|mixtral|qwen|glm4-moe$)", name)]
)
def test_a_language_model_has_the_same_rules_within_a_wrapper(name: str) -> None:
    patterns = patterns_of(name)
    own = [one for one in names_of(name) if any(pattern.search(one) for pattern in patterns.values())]
    assert len(own) > 8
    for prefix in LANGUAGE:
        for tensor in own:
            inner = tensor.removeprefix("model.")
            alone, within = (
                [key for key, one in patterns.items() if one.search(text)] for text in (tensor, prefix + inner)
            )
            assert alone == within, (prefix, tensor)


def test_a_prefix_comes_before_each_rule() -> None:
    text = "prefix = '^(model\\.)?'\n[rules]\n'norm$' = [[]]\n'a|b$' = ['x']\n"
    rules = sw.LayoutMap.from_toml(io.StringIO(text), sw.DeviceMesh((2,), ("x",)))
    assert list(rules) == [r"^(model\.)?norm$", r"^(model\.)?(?:a|b$)"]
    assert rules["model.norm"] is not None
    assert rules["tower.norm"] is None
    assert rules["tower.b"] is None
    report = rules.report({"model.norm": (2,), "tower.norm": (2,)})
    assert [one.rule for one in report.tensors] == ["norm$", None]
    assert report.unused_rules == ("(?:a|b$)",)
    # A rule that begins with ^ has the whole name.
    assert prefixed("^(model.)?", r"^tower\.norm$") == r"^tower\.norm$"
    for key, expected in (
        (r"(a|b)(c(d|e))", r"(a|b)(c(d|e))"),
        (r"\(a|b\)", r"(?:\(a|b\))"),
        (r"[(]a|b[)]", r"(?:[(]a|b[)])"),
        (r"[|]a", r"[|]a"),
    ):
        assert prefixed("^", key) == "^" + expected
    with pytest.raises(sw.ParseError, match="prefix must be a regular expression, got 3"):
        sw.LayoutMap.from_toml(io.StringIO("prefix = 3\n[rules]\n"))
    with pytest.raises(sw.ParseError, match="prefix"):
        deploy.Deployment.from_toml(
            io.StringIO("prefix = 'a'\n[meshes]\nm = { shape = [2], axis_names = ['x'] }\n[rules]\n")
        )


def test_rules_that_are_for_another_model_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 8, "vocab_size": 64}
    mesh = sw.DeviceMesh((2,), ("tp",))
    for config in (
        {"model_type": "qwen3", **sizes},
        {"model_type": "wrapper", "text_config": {"model_type": "qwen3", **sizes}},
        sizes,  # Of a type that nothing says.
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not sw.LayoutMap.from_toml(RULES["vllm/qwen3"], mesh, config=config).report({}).notes
    said = r"models of the type qwen3 or qwen3_vl_text, and this one is of the type llama; vllm/llama is for it"
    with pytest.warns(sw.ShardwiseWarning, match=said):
        sw.LayoutMap.from_toml(RULES["vllm/qwen3"], mesh, config={"model_type": "llama", **sizes})
    wrapped = {"model_type": "llava", "text_config": {"model_type": "other", **sizes}}
    with pytest.warns(sw.ShardwiseWarning, match="of the type llava with other; see that each rule is right for it"):
        sw.LayoutMap.from_toml(RULES["vllm/qwen3"], mesh, config=wrapped)
    sw.save_checkpoint(tmp_path / "hf", {"model.norm.weight": np.ones(8, "f4")}, to="hf", sync=False)
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    (tmp_path / "own.toml").write_text("models = ['qwen3']\n[rules]\n'norm' = ['tp']\n")
    arguments = [str(tmp_path / "hf"), "--rules", str(tmp_path / "own.toml"), "--mesh", "tp=2"]
    said = "is for models of the type qwen3, and this one is of the type llama; see that"
    assert main(["report", *arguments]) == 0
    assert said in capsys.readouterr().out
    assert main(["report", *arguments, "--strict"]) == 1
    assert said in capsys.readouterr().out
    target = ["reshard", arguments[0], str(tmp_path / "there"), *arguments[1:], "--to", "ranks", "--no-sync"]
    assert main([*target, "--strict"]) == 1
    assert said in capsys.readouterr().err
    assert main(target) == 0
    assert said in capsys.readouterr().err

    # A file of a deployment, and one whose rewrites are undone.
    (tmp_path / "own.toml").write_text(
        "models = ['qwen3']\n[meshes]\nm = { shape = [2], axis_names = ['tp'] }\n[rules]\n'norm' = ['tp']\n"
    )
    arguments[3:] = []
    assert main(["report", *arguments]) == 0
    assert said in capsys.readouterr().out
    target = ["reshard", arguments[0], str(tmp_path / "placed"), *arguments[1:], "--to", "ranks", "--no-sync"]
    assert main([*target, "--strict"]) == 1
    assert said in capsys.readouterr().err
    assert main(target) == 0
    assert said in capsys.readouterr().err
    (tmp_path / "own.toml").write_text(
        "models = ['qwen3']\n[[rewrite]]\nfrom = 'a.norm.weight'\nto = 'model.norm.weight'\n"
    )
    undone = ["reshard", arguments[0], str(tmp_path / "undone"), "--source-rules", arguments[2], "--no-sync"]
    assert main([*undone, "--strict"]) == 1
    assert said in capsys.readouterr().err
    assert main([*undone, "--json"]) == 0
    assert any(said in each for each in json.loads(capsys.readouterr().out)["warnings"])
    config = {"model_type": "llama", **sizes}
    with pytest.warns(sw.ShardwiseWarning, match=said):
        rewrites = sw.Rewrites.from_toml(tmp_path / "own.toml", config=config)
    assert rewrites == rewrites.inverse().inverse()
    with pytest.warns(sw.ShardwiseWarning) as found:
        sw.read_rules("vllm/qwen3", mesh, config=config)
    assert len(found) == 1


@pytest.mark.parametrize("name", RULES)
def test_all_files_say_of_which_types_their_models_are(name: str) -> None:
    models = read_models(RULES[name])
    family = name.rpartition("/")[2].removesuffix("-mtp").removesuffix("-mxfp4")
    files = sorted(DATA.glob(f"{family}-[0-9].json.gz"))
    assert files
    for file in files:
        assert read(file.name.removesuffix(".json.gz"))["config"]["model_type"] in models


def test_a_rule_for_what_is_not_wanted_is_not_unused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sw.save_checkpoint(tmp_path / "a", {"m.norm": np.ones(8, "f4"), "m.up": np.ones(8, "f4")}, sync=False)
    (tmp_path / "own.toml").write_text("prefix = '^m.'\n[rules]\n'norm' = ['tp']\n'up' = ['tp']\n")
    arguments = ["reshard", str(tmp_path / "a"), str(tmp_path / "b"), "--rules", str(tmp_path / "own.toml"), "--strict"]
    assert main([*arguments, "--mesh", "tp=2", "--to", "ranks", "--no-sync", "--only", "norm"]) == 0
    assert "applies to no name" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("prefix", "rename"),
    [("language_model.model.", r"^language_model\.="), ("model.language_model.", r"^model\.language_model\.=model.")],
)
def test_a_language_model_within_a_wrapper_is_rewritten_as_the_error_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prefix: str, rename: str
) -> None:
    said = read("llama-0")
    tensors = {name: np.zeros(shape, "f4") for name, shape in said["tensors"].items()}
    inner = {name.replace("model.", prefix, 1) if "lm_head" not in name else name: one for name, one in tensors.items()}
    sw.save_checkpoint(tmp_path / "hf", inner | {"vision_tower.norm.weight": np.zeros(3, "f4")}, to="hf", sync=False)
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": said["config"]}))
    arguments = ["reshard", str(tmp_path / "hf"), str(tmp_path / "there"), "--rules", "vllm/llama", "--mesh", "tp=2"]
    arguments += ["--to", "ranks", "--no-sync"]
    assert main(arguments) == 2
    assert f"its names are renamed first (--rename '{rename}', or" in capsys.readouterr().err
    assert main([*arguments, "--rename", rename]) == 0
    assert "1 name matches no rule" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rules", "kind"),
    [(f"{engine}/qwen2", f"{kind}_text") for engine in ("hf", "vllm") for kind in ("qwen2_vl", "qwen2_5_vl")]
    + [("vllm/qwen3", "qwen3_vl_text")],
)
def test_the_language_models_of_qwen_vl_have_the_rules_of_qwen(rules: str, kind: str) -> None:
    """vLLM makes them as `Qwen2ForCausalLM` and `Qwen3ForCausalLM`; transformers has one plan for both."""
    text = {"model_type": kind, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 64}
    config = {"model_type": kind.removesuffix("_text"), "text_config": text, "vocab_size": 128}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = sw.LayoutMap.from_toml(rules, sw.DeviceMesh((2,), ("tp",)), config=config)
    own = "qkv_proj" if rules.startswith("vllm") else "q_proj"
    for start in ("model.", "model.language_model.", "language_model.model."):
        assert found[f"{start}layers.0.self_attn.{own}.weight"] is not None
    assert found[f"visual.blocks.0.attn.{own}.weight"] is None
    assert found[f"model.visual.layers.0.self_attn.{own}.weight"] is None


@pytest.mark.parametrize("kind", ["qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"])
def test_transformers_has_one_plan_for_qwen_2_and_its_wrapped_types(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    assert mapping[kind]().base_model_tp_plan == mapping["qwen2"]().base_model_tp_plan
    assert kind in read_models(RULES["hf/qwen2"])
