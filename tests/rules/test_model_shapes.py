"""Names and shapes from configurations, beside those of models that transformers wrote."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.cli import main
from shardwise.rules.model_shapes import model_shapes

from ..checks import refused

DATA = Path(__file__).parents[1] / "data" / "families"
#: Families whose tensors are not known from their configuration alone.
UNKNOWN = {"bert", "falcon", "gpt_neox", "mamba2", "nemotron_h"}
#: Without the layers that predict further tokens, which transformers does not write.
FILES = [file for file in sorted(DATA.glob("*.json.gz")) if "-mtp-" not in file.name]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name.partition(".")[0])
def test_as_transformers_writes_them(file: Path) -> None:
    said = json.loads(gzip.decompress(file.read_bytes()))
    family = said["config"]["model_type"]
    if family in UNKNOWN:
        with refused(sw.ParseError, f"model_type is '{family}'", "other types are known", "for --rules"):
            model_shapes(said["config"])
        return
    assert model_shapes(said["config"]) == {name: tuple(shape) for name, shape in said["tensors"].items()}
    for part in ("text_config", "llm_config", "language_config"):
        nested = {"model_type": "with_images", part: said["config"], "vision_config": {"hidden_size": 2}}
        assert model_shapes(nested) == model_shapes(said["config"])
    deeper = {"model_type": "with_sound", "thinker_config": {"text_config": said["config"], "audio_config": {}}}
    assert model_shapes(deeper) == model_shapes(said["config"])


def test_a_wrapper_of_a_known_type_says_what_its_layers_are_in_a_part_of_it() -> None:
    """Gemma 3: both types are known; tied or not is said by the part."""
    text = {"model_type": "gemma3_text", "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    text |= {"head_dim": 4, "num_hidden_layers": 1, "intermediate_size": 16, "vocab_size": 4}
    for said, tied in (({}, True), ({"tie_word_embeddings": False}, False)):
        shapes = model_shapes({"model_type": "gemma3", "text_config": {**text, **said}, "vision_config": {}})
        assert shapes["model.layers.0.self_attn.q_proj.weight"] == (8, 8)
        assert ("lm_head.weight" not in shapes) == tied
    del text["model_type"]
    assert model_shapes({"model_type": "gemma3", "text_config": text}) == model_shapes({**text, "model_type": "gemma3"})


def test_sizes_in_a_part_that_is_not_known_are_named() -> None:
    sizes = {
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 16,
        "vocab_size": 4,
    }
    with refused(sw.LayoutError, "inner_model.vocab_size"):
        model_shapes({"model_type": "llama", "inner_model": sizes})
    with refused(sw.ParseError, "model_type is 'inner' and 'outer'; the tensors of"):
        model_shapes({"model_type": "outer", "text_config": {"model_type": "inner"}})


def test_what_a_configuration_lacks_is_named() -> None:
    with refused(sw.LayoutError, "intermediate_size"):
        model_shapes(
            {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 4}
        )
    with refused(sw.ParseError, "model_type is None"):
        model_shapes({})


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("num_hidden_layers", 10**9, "more than"),
        ("hidden_size", -8, "it must be from 1 to"),
        ("vocab_size", 2**62, "words is"),
        ("tie_word_embeddings", "no", "tie_word_embeddings is 'no'"),
        ("model_type", ["llama"], "model_type is ['llama']"),
        ("model_type", {}, "model_type is {}"),
    ],
)
def test_sizes_that_cannot_be(key: str, value: object, said: str) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 4,
    }
    with refused(sw.ParseError, said):
        model_shapes({**config, "intermediate_size": 16, key: value})


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("qwen3_next", "full_attention_interval", "4"),
        ("qwen3_next", "full_attention_interval", [4]),
        ("qwen3_next", "full_attention_interval", float("nan")),
        ("qwen3_next", "layer_types", "linear_attention"),
        ("qwen3_moe", "decoder_sparse_step", -2),
        ("qwen3_moe", "mlp_only_layers", {"0": 1}),
        ("deepseek_v3", "first_k_dense_replace", True),
        ("deepseek_v3", "moe_layer_freq", [1]),
        ("llama4_text", "interleave_moe_layer_step", 2.0),
        ("llama4_text", "moe_layers", 3),
    ],
)
def test_what_layers_are_is_said_by_numbers_and_lists(family: str, key: str, value: object) -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "vocab_size": 4, "intermediate_size": 16}
    with refused(sw.ParseError, f"{key} is {value!r}"):
        model_shapes({"model_type": family, "n_routed_experts": 2, **sizes, key: value})


def test_a_number_that_is_null_is_not_there() -> None:
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 4, "head_dim": 4}
    config |= {"intermediate_size": 16, "num_attention_heads": 2, "num_experts": 2, "moe_intermediate_size": 8}
    null = {"decoder_sparse_step": None, "mlp_only_layers": None}
    assert model_shapes(config) == model_shapes(config | null)
    assert "model.layers.0.mlp.experts.1.up_proj.weight" in model_shapes(config)


MINE = """
[rules]
'\\.w$' = ["tp", []]

[tensors]
type = "mine"
fixed = { gated = false }
defaults = { d = "= hidden // heads" }

[[tensors.groups]]
range = { i = "layers", e = "experts" }
where = ["kinds[i] == 'sparse'", "i >= first_sparse"]
[tensors.groups.shapes]
'h.{i}.experts.{e}.w' = ["heads * d", "hidden"]
"""
CONFIG = {"model_type": "mine", "hidden": 12, "heads": 3, "layers": 3, "kinds": ["sparse", "dense", "sparse"]}
CONFIG |= {"experts": 2, "first_sparse": 1}


def test_a_rules_file_states_the_tensors_of_its_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rules, config = tmp_path / "mine.toml", tmp_path / "config.json"
    rules.write_text(MINE)
    config.write_text(json.dumps(CONFIG))
    shapes = {"h.2.experts.0.w": (12, 12), "h.2.experts.1.w": (12, 12)}
    assert model_shapes(CONFIG, rules) == shapes
    assert model_shapes({"model_type": "outer", "text_config": CONFIG}, rules) == shapes
    assert model_shapes({**CONFIG, "d": 5}, rules)["h.2.experts.0.w"] == (15, 12)
    assert [size.verdict for size in sw.fits(CONFIG, (2, 8), rules=rules).sizes] == ["fits", "padded"]
    assert main(["report", str(config), "--rules", str(rules), "--mesh", "tp=4"]) == 0
    assert "h.2.experts.{0,1}.w" in capsys.readouterr().out
    assert main(["state", str(config), "--rules", str(rules), "--mesh", "tp=4"]) == 0
    assert capsys.readouterr().out
    with refused(sw.ParseError, "gated is True", "--record"):
        model_shapes({**CONFIG, "gated": True}, rules)
    with refused(sw.LayoutError, "no first_sparse"):
        model_shapes({name: value for name, value in CONFIG.items() if name != "first_sparse"}, rules)
    llama = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    assert "lm_head.weight" in model_shapes({**llama, "vocab_size": 4, "intermediate_size": 16}, rules)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('type = "mine"', "type = 3", "tensors.type"),
        ("range =", "ranges =", "ranges"),
        ("where = [", 'where = ["i ~ 3", ', "i ~ 3"),
        ('"heads * d"', '"heads *"', "expected a number"),
        ("[[tensors.groups]]", "[[tensors.group]]", "group"),
    ],
)
def test_a_table_of_tensors_that_is_wrong_is_refused(before: str, after: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(MINE.replace(before, after))
    with pytest.raises(sw.ShardwiseError, match=said):
        model_shapes(CONFIG, tmp_path / "mine.toml")


def test_types_that_were_learned_are_known_without_transformers() -> None:
    """Gemma 7B has 8,537,680,896 parameters, as its card says; what is not in its configuration is the type's own."""
    config = {"model_type": "gemma", "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28}
    config |= {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "vocab_size": 256000}
    shapes = model_shapes(config)
    assert shapes["model.layers.27.self_attn.q_proj.weight"] == (4096, 3072)
    assert sum(math.prod(shape) for shape in shapes.values()) == 8_537_680_896
    assert "lm_head.weight" not in shapes
    inner = model_shapes({"model_type": "with_images", "text_config": config, "vision_config": {"hidden_size": 2}})
    assert inner == shapes
    with refused(sw.ParseError, "architectures", "GemmaForCausalLM"):
        model_shapes({**config, "architectures": ["GemmaForSequenceClassification"]})


def test_a_configuration_without_a_type_is_like_no_type() -> None:
    with refused(sw.ParseError, "model_type is None", "other types are known; `shardwise rules"):
        model_shapes({"hidden_size": 8})
