"""The language model in a model of several: its sizes and its names."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.rules.numbers import Numbers
from shardwise.rules.wrapped import _DEFAULTS, _SIZES, language_config, model_types

SIZES = {"heads": "num_attention_heads", "groups": ["num_key_value_heads", "heads"], "d": ["head_dim", "64"]}
INNER = {"model_type": "own", "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}


@pytest.mark.parametrize("part", ["text_config", "llm_config", "language_config"])
def test_the_sizes_of_a_language_model_are_those_of_its_part(part: str) -> None:
    vision = {"model_type": "siglip", "num_attention_heads": 3}
    config = {"model_type": "wrapper", "num_attention_heads": 5, "vocab_size": 9, part: INNER, "vision_config": vision}
    assert dict(Numbers(SIZES, config)) == {"heads": 8, "groups": 2, "d": 16}
    assert Numbers({"n": f"{part}.head_dim"}, config)["n"] == 16
    assert Numbers({"n": "vision_config.num_attention_heads"}, config)["n"] == 3
    assert Numbers({"n": "vocab_size"}, config)["n"] == 9  # What only the whole says.
    assert model_types(config) == ["wrapper", "own"]


def test_a_part_within_a_part() -> None:
    config = {"model_type": "omni", "thinker_config": {"model_type": "thinker", "text_config": INNER}}
    assert Numbers(SIZES, config)["groups"] == 2
    assert model_types(config) == ["omni", "own"]


def test_a_part_that_leaves_out_defaults_has_those_of_transformers() -> None:
    """Gemma 3's 4B and 12B as Google published them: four key-value heads, said by nothing."""
    config: dict[str, Any] = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 2560}}
    assert dict(Numbers(SIZES, config)) == {"heads": 8, "groups": 4, "d": 256}
    config["text_config"]["num_attention_heads"] = 16
    assert dict(Numbers(SIZES, config)) == {"heads": 16, "groups": 4, "d": 256}
    # As many key-value heads as heads, if a file says that there is no number.
    config["text_config"]["num_key_value_heads"] = None
    assert Numbers(SIZES, config)["groups"] == 16


def test_a_size_of_another_part_is_named() -> None:
    config = {"model_type": "x", "decoder": INNER, "encoder": {}}
    with pytest.raises(Exception, match=r"has no num_attention_heads; if decoder\.num_attention_heads is meant, write"):
        Numbers(SIZES, config)["heads"]
    assert Numbers({"heads": "decoder.num_attention_heads"}, config)["heads"] == 8


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
