"""`shardwise fits`."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import shardwise as sw
from shardwise.cli import main

from .conftest import error_of

DATA = Path(__file__).parents[1] / "data" / "quantized"


def test_each_size_has_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fits", str(DATA / "mxfp4-gptoss"), "--tp", "1, 2,8"]) == 0
    said = capsys.readouterr().out
    assert "MXFP4 in groups of 32, 2 weights" in said
    assert "tp 1: fits\n" in said
    assert (
        "tp 2: fits with padding\n  model.layers.*.mlp.experts.down_proj, dim 2: 96 in 2 is 48 each, within blocks of "
        "32 of blocks; would fit: padded to 128; tp 3; uneven, 64, 32\n" in said
    )
    assert "4 heads are not divisible by 8" in said
    assert main(["fits", str(DATA / "mxfp4-gptoss"), "--tp", "8,16"]) == 1  # None fits.
    assert "does not fit" in capsys.readouterr().out
    assert "\nwhole on every rank: model.layers.*.mlp.router.weight\nrests on names as in Hugging Face" in said


def test_a_size_that_rules_refuse_names_its_dim_once_and_no_option_that_fits_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 64}
    llama |= {"intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(llama), encoding="utf-8")
    assert main(["fits", str(tmp_path / "config.json"), "--tp", "3", "--rules", "vllm/llama"]) == 1
    said = capsys.readouterr().out
    assert (
        "mlp.down_proj.weight (2 tensors): dim 1 has 128 elements, which 3 shards do not divide evenly; would fit: "
        "padded to 129; tp 2, 4, 8, 16, 32, 64\n" in said
    )
    assert "uneven" not in said


def test_experts_and_engines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fits", str(DATA / "mxfp4-gptoss"), "--tp", "4", "--ep", "1,4,3"]) == 0
    said = capsys.readouterr().out
    assert "tp 4, ep 4: fits\n" in said
    assert (
        "tp 4, ep 3: does not fit\n  model.layers.*.mlp.experts.down_proj and 1 more, dim 0: 4 experts are not" in said
    )
    assert main(["fits", str(DATA / "fp8-block-ragged"), "--tp", "2"]) == 0
    said = capsys.readouterr().out
    assert (
        "  vLLM 0.33 (FP8 in blocks) refuses model.layers.*.mlp.down_proj.weight: Weight input_size_per_partition = 96 "
        "is not divisible by weight quantization block_k = 128\n" in said
    )


def test_a_reason_that_two_dims_share_names_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of one and columns of the other are 12, which do not divide into 8; with one of them the dim is told."""
    both = {"mlp.up_proj.weight": np.zeros((12, 4), "f2"), "mlp.down_proj.weight": np.zeros((4, 12), "f2")}
    for names, said in (
        (tuple(both), " and 1 more: 12"),
        (("mlp.down_proj.weight",), "mlp.down_proj.weight, dim 1: 12"),
    ):
        path = tmp_path / f"{len(names)}"
        sw.save_checkpoint(path, {name: both[name] for name in names}, sync=False)
        assert main(["fits", str(path), "--tp", "8"]) == 0
        assert said in capsys.readouterr().out


def test_json_has_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fits", str(DATA / "fp8-block-ragged"), "--tp", "1,2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["forms"] == {"FP8 in blocks of 128 x 128": 8}
    one, two = answer["sizes"]
    assert (one["tp"], one["ep"], one["verdict"], one["problems"]) == (1, 1, "fits", [])
    cut = next(cut for cut in two["problems"] if cut["name"].endswith("mlp.down_proj.weight"))
    assert (cut["size"], cut["ways"], cut["unit"], cut["padded"], cut["ceil"]) == (192, 2, 128, 256, [128, 64])
    assert cut["blocks"] == {"weight_scale_inv": 128}
    assert {engine["engine"] for engine in two["engines"]} == {"vLLM 0.33", "SGLang 0.5.23"}


def test_a_configuration_elsewhere(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = json.loads((DATA / "fp8-block-ragged" / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [64, 128]
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = error_of(capsys, "fits", DATA / "fp8-block-ragged", "--config", tmp_path / "config.json")
    assert "in blocks of 64 x 128 it must be" in said


def test_wrong_arguments(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "--tp 'two': not whole numbers" in error_of(capsys, "fits", DATA / "gptq", "--tp", "two")
    for size in ("1234567890", "9" * 5000):
        assert f"--tp '{size[:80]}': not whole numbers" in error_of(capsys, "fits", DATA / "gptq", "--tp", size)
    assert "--tp '1,'" in error_of(capsys, "fits", DATA / "gptq", "--tp", "1,")
    assert "ep is 0" in error_of(capsys, "fits", DATA / "gptq", "--ep", "0")
    assert "gone" in error_of(capsys, "fits", tmp_path / "gone")


def test_what_is_not_recognised_has_a_status_and_a_way_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The way on that is printed is taken: rules that say how the tensors are cut, and that the rest is whole."""
    tensors = {
        "h.0.att_proj.weight": np.zeros((12, 4), "f2"),
        "h.0.gate_gate.weight": np.zeros((6, 4), "f2"),
        "h.0.ln.weight": np.zeros(4, "f2"),
    }
    sw.save_checkpoint(tmp_path / "m", tensors, sync=False)
    assert main(["fits", str(tmp_path / "m"), "--tp", "1,4"]) == 4
    said = capsys.readouterr().out
    assert "not quantized" not in said
    assert "tp 1: fits\n" in said
    assert "tp 4: unknown\n" in said
    assert (
        "not recognised, so that no size over one rank is known to fit:\n"
        "  h.*.att_proj.weight of 12 x 4, h.*.gate_gate.weight of 6 x 4: its name is not known\n"
        "to decide it, say how each tensor is cut in a rules file, and give it: --rules FILE; with default = [] "
        "tensors that no rule matches are whole on every rank\n" in said
    )
    rules = tmp_path / "own.toml"
    for default, status, verdict in (("", 4, "unknown"), ("default = []\n", 0, "fits")):
        rules.write_text(f"{default}[rules]\n'att_proj' = ['tp', []]\n")
        assert main(["fits", str(tmp_path / "m"), "--tp", "4", "--rules", str(rules), "--json"]) == status
        answer = json.loads(capsys.readouterr().out)
        assert answer["sizes"][0]["verdict"] == verdict
        assert answer["rests_on"] == ["rules of own.toml: att_proj"]
        assert [one["name"] for one in answer["unknown"]] == (["h.*.gate_gate.weight"] if status else [])
    assert main(["fits", str(tmp_path / "m"), "--tp", "5", "--rules", str(rules)]) == 0
    assert "the rule" not in capsys.readouterr().err
    rules.write_text("[rules]\n'att_proj' = ['tp', []]\n")
    assert main(["fits", str(tmp_path / "m"), "--tp", "4", "--rules", str(rules)]) == 4
    assert "to decide it, add rules for them; with default = []" in capsys.readouterr().out


def test_engines_that_refuse_one_rank_are_told_beside_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """10,944 rows are 85.5 blocks of 128."""
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    tensors = {
        f"mlp.{name}_proj.{tail}": np.zeros(shape, dtype)
        for name in ("gate", "up")
        for tail, shape, dtype in (
            ("weight", (10944, 2), ml_dtypes.float8_e4m3fn),
            ("weight_scale_inv", (86, 1), np.float32),
        )
    }
    sw.save_checkpoint(tmp_path / "m", tensors, sync=False)
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    assert main(["fits", str(tmp_path / "m"), "--tp", "1"]) == 0
    said = capsys.readouterr().out
    assert "tp 1: fits, and engines refuse it\n" in said
    assert "Weight output_partition_size = 10944 is not divisible by weight quantization block_n = 128\n" in said


def test_other_networks_are_said_not_to_be_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("model.language_model.layers.0.mlp.up_proj.weight", "model.vision_tower.layers.0.mlp.fc1.weight")
    sw.save_checkpoint(tmp_path / "m", {name: np.zeros((8, 8), "f2") for name in names}, sync=False)
    rules = tmp_path / "own.toml"
    rules.write_text("[rules]\n'up_proj' = ['tp', []]\n")
    for more in ([], ["--rules", str(rules)]):
        assert main(["fits", str(tmp_path / "m"), "--tp", "2", *more]) == 0
        said = capsys.readouterr().out
        assert "tp 2: fits\n" in said
        assert "not looked at, because they are not of the language model: model.vision_tower.layers.*.mlp.fc1" in said
