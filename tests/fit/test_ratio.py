"""Cuts by a ratio: whole groups of heads, whole blocks, and what is rounded or refused, by hand arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.cli import main
from shardwise.fit import fits_ratio
from shardwise.rules.model_shapes import model_shapes

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 96,
    "vocab_size": 99,
    "num_hidden_layers": 1,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
}


def test_a_ratio_in_which_all_units_divide() -> None:
    answer = fits_ratio(LLAMA, (6, 4, 2))
    assert (answer.text, answer.verdict) == ("3:2:1", "fits")
    assert [(one.what, one.units, one.shares) for one in answer.units] == [
        ("groups of 2 heads and a key-value head", 6, (3, 2, 1)),
        ("elements of 96", 96, (48, 32, 16)),
    ]
    assert "model.layers.*.self_attn.o_proj.weight" in answer.units[0].names


@pytest.mark.parametrize(
    ("ratio", "verdict", "why"),
    [
        ((1, 1), "fits", ""),
        # floor(6 · 4 / 5) = 4, floor(6 · 5 / 5) = 6; and of 96: 76, 20.
        ((4, 1), "rounded", "6 groups in 4:1 are rounded to 4, 2"),
        ((13, 1), "rounded", "6 groups in 13:1 are rounded to 5, 1"),
        ((1, 13), "refused", "6 groups in 1:13 leave device 0 without one"),
        ((1,) * 7, "refused", "6 groups in 1:1:1:1:1:1:1 leave device 0 without one"),
    ],
)
def test_shares_are_rounded_as_llama_cpp_rounds_them(ratio: tuple[int, ...], verdict: str, why: str) -> None:
    answer = fits_ratio(LLAMA, ratio)
    assert (answer.verdict, answer.units[0].why) == (verdict, why)
    sums = np.cumsum([0, *answer.ratio])
    for one in answer.units:
        assert list(one.shares) == np.diff(one.units * sums // sums[-1]).tolist()


def test_blocks_of_quantized_weights_stay_whole() -> None:
    """128 rows of groups of 16: blocks of 32 hold two groups; 96 features are three blocks."""
    config = LLAMA | {
        "head_dim": 8,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]},
    }
    answer = fits_ratio(config, (2, 1))
    assert [(one.what, one.shares, one.verdict) for one in answer.units] == [
        ("4 groups of 2 heads and a key-value head together", (), "refused"),
        ("blocks of 32 of 96", (2, 1), "fits"),
    ]
    assert answer.units[0].why == "6 groups are not whole blocks of 4"
    with pytest.raises(sw.LayoutError, match="is quantized; tilings by a ratio are of whole elements"):
        answer.tilings(("a", "b"))


def test_a_plan_moves_a_model_to_devices_of_a_ratio() -> None:
    shapes = model_shapes(LLAMA | {"attention_bias": True})
    answer = fits_ratio(LLAMA | {"attention_bias": True}, (3, 2, 1))
    whole = sw.DeviceMesh((1,), ("x",), ["trainer"])
    cut = answer.tilings(("a", "b", "c"))
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(size=shapes[name]) for name in cut}
    src = {name: sw.TensorLayout((None,) * array.ndim, whole) for name, array in tensors.items()}
    plan = sw.plan_model(src, cut, {name: (array.shape, "float64") for name, array in tensors.items()})
    made = plan.run({name: [array] for name, array in tensors.items()})
    q, o = (f"model.layers.0.self_attn.{one}_proj.weight" for one in "qo")
    assert [array.shape for array in made[q]] == [(24, 48), (16, 48), (8, 48)]
    assert [array.shape for array in made[o]] == [(48, 24), (48, 16), (48, 8)]
    for name, array in tensors.items():
        dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        np.testing.assert_array_equal(np.concatenate(made[name], dim), array, err_msg=name)
    assert [array.shape for array in made["model.layers.0.self_attn.k_proj.bias"]] == [(12,), (8,), (4,)]


def test_what_is_not_recognised_is_unknown() -> None:
    """Phi-3 has queries, keys and values in one weight, and names alone do not say in which order."""
    answer = fits_ratio(LLAMA | {"model_type": "phi3"}, (2, 1))
    assert (answer.verdict, answer.unknown) == ("unknown", ("model.layers.*.self_attn.qkv_proj.weight",))
    with pytest.raises(sw.LayoutError, match="the ratio 2:1 is unknown, so it is not known which device holds what"):
        answer.tilings(("a", "b"))
    with pytest.raises(sw.LayoutError, match=r"ratio is \(3, 0\); it must be 1 to 1024 numbers from 1"):
        fits_ratio(LLAMA, (3, 0))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    assert main(["fits", str(path), "--ratio", "4,1"]) == 0
    said = capsys.readouterr().out
    assert "4:1: fits with shares rounded to whole units" in said
    assert "6 groups of 2 heads and a key-value head: 4, 2; 6 groups in 4:1 are rounded to 4, 2" in said
    assert main(["fits", str(path), "--ratio", "3,2,1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "fits"
