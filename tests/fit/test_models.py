"""Sizes that fit, from a configuration alone and by the rules of a file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.cli import main
from shardwise.fit import fits, fits_tensors
from shardwise.fit.by_rules import fits_by_rules

from ..checks import refused
from ..oracle.quantized import folders

DATA = Path(__file__).parents[1] / "data" / "quantized"
FOLDERS = [folder for folder in folders(DATA) if folder.name != "st-low-bit"]
#: Qwen/Qwen3-30B-A3B-FP8 of vllm-project/vllm 25292, as its config.json says.
QWEN = {
    **{"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32},
    **{
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "moe_intermediate_size": 768,
        "vocab_size": 151936,
    },
    **{"intermediate_size": 6144, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False},
    "quantization_config": {
        **{"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"},
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
    },
}


PLAIN = {"model_type": "llama", "vocab_size": 96, "num_hidden_layers": 1}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_configuration_answers_as_the_headers_do(folder: Path, tmp_path: Path) -> None:
    alone = tmp_path / "config.json"
    alone.write_bytes((folder / "config.json").read_bytes())
    if json.loads(alone.read_text())["quantization_config"].get("desc_act"):
        pytest.skip("a configuration does not say which order the groups are in")
    by_headers = fits(folder, (1, 2, 3, 4), (1, 2))
    for given in (alone, tmp_path, json.loads(alone.read_text())):
        by_config = fits(given, (1, 2, 3, 4), (1, 2))
        assert [size._replace(cuts=()) for size in by_config.sizes] == [
            size._replace(cuts=()) for size in by_headers.sizes
        ]
        assert {(cut.name, cut.why) for size in by_config.sizes for cut in size.cuts} == {
            (cut.name, cut.why) for size in by_headers.sizes for cut in size.cuts
        }
        assert dict(by_config.forms) == dict(by_headers.forms)


@pytest.mark.heavy
def test_a_public_model_from_its_configuration() -> None:
    """The thread: tp 4 is refused, 768 / 4 = 192; tp 2 loads, 384."""
    answer = fits(QWEN, (1, 2, 4, 8), (1, 8))
    verdicts = {(size.tp, size.ep): size.verdict for size in answer.sizes}
    assert (verdicts[1, 1], verdicts[2, 1]) == ("fits", "fits")
    assert verdicts[4, 1] != "fits"
    assert verdicts[8, 8] == "fits"
    four = next(size for size in answer.sizes if (size.tp, size.ep) == (4, 1))
    assert {cut.tensors for cut in four.problems} == {48 * 128}
    said = "The output_size of gate's and up's weight = 192 is not divisible by weight quantization block_n = 128"
    assert said in {limit.why for _, limit in four.limits}


def test_by_the_rules_of_an_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN, "num_hidden_layers": 1, "num_experts": 8}))
    answer = fits(tmp_path / "config.json", (1, 2, 4), rules="vllm/qwen3-moe")
    assert [size.verdict for size in answer.sizes] == ["fits", "fits", "refused"]
    wrong = {cut.name: cut.why for cut in answer.sizes[2].problems}
    assert wrong.keys() == {f"model.layers.*.mlp.experts.routed_experts.w{which}_weight" for which in ("13", "2")}
    assert all("within a block of 128" in why for why in wrong.values())
    assert main(["fits", str(tmp_path / "config.json"), "--rules", "vllm/qwen3-moe", "--tp", "4", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["sizes"][0]["verdict"] == "refused"


def test_a_size_that_rules_cannot_be_for_does_not_fit_and_the_others_are_answered(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Two key-value heads over three ranks: neither divides the other."""
    config = {**PLAIN, "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48, "intermediate_size": 96}
    answer = fits(config, (2, 3, 1), rules="vllm/llama")
    assert [size.verdict for size in answer.sizes] == ["fits", "refused", "fits"]
    assert "at most 2 shards by 3 devices" in answer.sizes[1].problems[0].why
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["fits", str(tmp_path / "config.json"), "--rules", "vllm/llama", "--tp", "2,3"]) == 0
    assert "tp 3: does not fit\n  rules of llama.toml: " in capsys.readouterr().out
    # What is wrong for one rank too is no answer about a size.
    with pytest.raises(sw.ShardwiseError, match="the number heads is missing"):
        fits_by_rules(
            {"q_proj.weight": ("BF16", (8, 8))}, {}, sw.example_rules()["hf/llama"], [(3, 1)], lambda name: None
        )


def test_rules_of_ones_own_with_experts(tmp_path: Path) -> None:
    rules = tmp_path / "own.toml"
    own = "[rules]\n'experts.*(gate|up)_proj' = { axes = ['tp', []], shared = true }\n'q_proj' = ['ep', []]\n"
    rules.write_text(f"default = []\n{own}")
    config = {**QWEN, "num_hidden_layers": 1, "num_experts": 2}
    answer = fits(config, (4, 8), (2,), rules=rules)
    # 768 in 4 and in 8 is 192 and 96, which are no equal shares of blocks of 128.
    assert [size.verdict for size in answer.sizes] == ["padded", "padded"]
    assert {cut.padded for size in answer.sizes for cut in size.problems} == {1024}
    assert {cut.name.split(".")[-2] for cut in answer.sizes[0].cuts} == {"gate_proj", "up_proj", "q_proj"}
    assert "model.layers.*.self_attn.o_proj.weight" in answer.whole
    assert {cut.rests_on for size in answer.sizes for cut in size.cuts} == {
        "the rule 'experts.*(gate|up)_proj'",
        "the rule 'q_proj'",
    }
    # Without a default nothing says that the others are whole.
    rules.write_text(own)
    answer = fits(config, (4, 8), (2,), rules=rules)
    assert [size.verdict for size in answer.sizes] == ["unknown", "unknown"]
    assert "model.layers.*.self_attn.o_proj.weight" in {one.name for one in answer.unknown}


def test_rules_over_several_axes_and_rules_that_match_nothing(tmp_path: Path) -> None:
    """By hand: 768 rows over (tp, ep) of 2 and 2 are 192 each, in blocks of 128: 768 / 128 = 6, so 1, 2, 3, 6 fit."""
    rules = tmp_path / "own.toml"
    rules.write_text("[rules]\n'gate_proj' = [['tp', 'ep'], []]\n")
    config = {**QWEN, "num_hidden_layers": 1, "num_experts": 2}
    answer = fits(config, (2,), (2,), rules=rules)
    (cut,) = answer.sizes[0].cuts
    assert (cut.ways, cut.per_rank, cut.head_size, cut.sizes) == (4, 192, 1, (1, 2, 3, 6))
    # Of each expert three weights; of the attention four.
    assert answer.forms == (("FP8 in blocks of 128 x 128", 3 * 2 + 4),)
    for before in ("", "default = []\n"):
        rules.write_text(f"{before}[rules]\n'no such tensor' = ['tp', []]\n")
        answer = fits(config, (2,), rules=rules)
        assert [(size.verdict, size.cuts) for size in answer.sizes] == [("unknown", ())]


def test_the_verdict_of_rules_is_that_of_their_worst_cut(tmp_path: Path) -> None:
    """By hand: 768 in 12 is 64, half a block of 128, which two share; 4,096 in 12 is no whole number."""
    rules = tmp_path / "own.toml"
    rules.write_text("default = []\n[rules]\n'(gate|q)_proj' = ['tp', []]\n")
    (size,) = fits({**QWEN, "num_hidden_layers": 1, "num_experts": 2}, (12,), rules=rules).sizes
    assert [cut.verdict for cut in size.cuts] == ["padded", "shared"]
    assert size.verdict == "padded"


def test_sizes_are_asked_for_up_to_64(tmp_path: Path) -> None:
    rows = 63 * 64 * 65
    sizes = tuple(n for n in range(1, 65) if rows % n == 0)
    config = {**QWEN, "num_hidden_layers": 1, "num_experts": 2, "vocab_size": rows}
    rules = tmp_path / "own.toml"
    rules.write_text("[rules]\n'lm_head' = ['tp', []]\n")
    (cut,) = fits(config, (1,), rules=rules).sizes[0].cuts
    assert (cut.sizes, sizes[0], sizes[-1]) == (sizes, 1, 64)


@pytest.mark.parametrize("given", ["missing.json", "empty"])
def test_what_says_nothing_is_refused(given: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises((FileNotFoundError, sw.ParseError)):
        fits(tmp_path / given)


def test_an_unknown_family_is_named(tmp_path: Path) -> None:
    config: dict[str, Any] = {"model_type": "other"}
    with refused(sw.ParseError, "model_type is 'other'"):
        fits(config)


@pytest.mark.heavy
def test_a_configuration_of_another_name_is_read_itself(tmp_path: Path) -> None:
    """And not the config.json that lies beside it."""
    (tmp_path / "config.json").write_text('{"model_type": "other"}')
    (tmp_path / "qwen.json").write_text(json.dumps(QWEN))
    assert fits(tmp_path / "qwen.json", (1,)).sizes[0].verdict == "fits"


def test_a_file_that_is_no_checkpoint_is_not_answered_from_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    (tmp_path / "notes.txt").write_text("no checkpoint")
    with pytest.raises(sw.ParseError, match=r"notes\.txt"):
        fits(tmp_path / "notes.txt")


def test_by_rules_the_worst_cut_comes_first(tmp_path: Path) -> None:
    """12 rows in 8 could be padded, 16 in 8 fit; plain weights are of no form of their own."""
    rules = tmp_path / "own.toml"
    rules.write_text("[rules]\n'_proj' = ['tp', []]\n")
    tensors = {"a_proj.weight": np.zeros((16, 2), "f2"), "b_proj.weight": np.zeros((12, 2), "f2")}
    sw.save_checkpoint(tmp_path / "m", tensors, sync=False)
    answer = fits(tmp_path / "m", (8,), rules=rules)
    assert [(cut.name, cut.verdict) for cut in answer.sizes[0].cuts] == [
        ("b_proj.weight", "padded"),
        ("a_proj.weight", "fits"),
    ]
    assert answer.sizes[0].cuts[0].padded == 16
    assert answer.sizes[0].verdict == "padded"
    assert answer.forms == ()


def test_by_rules_each_dim_that_is_cut_is_answered_for_itself(tmp_path: Path) -> None:
    """8 experts in 2 fit; 20 columns in 7 do not, and would do as 21, in which experts have no part."""
    rules = tmp_path / "own.toml"
    rules.write_text("[rules]\n'down_proj' = ['ep', [], 'tp']\n")
    sw.save_checkpoint(tmp_path / "m", {"m.experts.down_proj": np.zeros((8, 4, 20), "f2")}, sync=False)
    size = fits(tmp_path / "m", (7,), (2,), rules=rules).sizes[0]
    assert [(cut.dim, cut.size, cut.ways, cut.verdict, cut.padded) for cut in size.cuts] == [
        (2, 20, 7, "padded", 21),
        (0, 8, 2, "fits", None),
    ]
    assert size.verdict == "padded"
    assert fits(tmp_path / "m", (5,), (2,), rules=rules).sizes[0].verdict == "fits"
    assert fits(tmp_path / "m", (5,), (3,), rules=rules).sizes[0].cuts[0][3:6] == (0, 8, "elements")
    assert [(cut.dim, cut.ways) for cut in fits(tmp_path / "m", (5,), rules=rules).sizes[0].cuts] == [(0, 1), (2, 5)]


def test_ways_out_do_not_name_tensor_parallelism_where_experts_are_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sw.save_checkpoint(
        tmp_path / "m.safetensors", {f"m.experts.{i}.up_proj.weight": np.zeros((4, 4), "f2") for i in range(6)}
    )
    assert main(["fits", str(tmp_path / "m.safetensors"), "--tp", "4", "--ep", "4"]) == 1
    assert "6 experts are not divisible by 4; would fit: in 2, 3, 6 parts\n" in capsys.readouterr().out


@pytest.mark.parametrize("said", [{"model_type": ["llama"]}, {"text_config": {"model_type": {}}}])
def test_a_family_that_is_no_text_is_none(said: dict[str, Any]) -> None:
    stored = {"a.up_proj.weight": ("BF16", (8, 8))}
    assert fits_tensors(stored, said, (2,)) == fits_tensors(stored, {}, (2,))


def test_a_number_of_an_expert_that_is_no_number() -> None:
    stored = {f"experts.{number}.up_proj.weight": ("BF16", (8, 8)) for number in ("0", "9" * 5000)}
    assert fits_tensors(stored, {}, (2,), (2,)).sizes[0].verdict == "refused"


def test_what_is_asked_twice_or_is_no_sizes(tmp_path: Path) -> None:
    given = tmp_path / "config.json"
    given.write_text(json.dumps(QWEN))
    for model in (given, QWEN):
        with refused(sw.LayoutError, "config is given, but model is a configuration itself"):
            fits(model, config=QWEN)
    with refused(TypeError, "tp must be a sequence of integers, got 8"):
        fits(QWEN, 8)  # type: ignore[arg-type]


def test_a_method_that_is_no_text_is_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused by name, by the names of weights and by rules, and by the report of rules."""
    sw.save_checkpoint(tmp_path / "m", {"a.up_proj.weight": np.zeros((8, 8), "f2")}, sync=False)
    (tmp_path / "m" / "config.json").write_text('{"quantization_config": {"quant_method": ["fp8"]}}')
    rules = tmp_path / "own.toml"
    rules.write_text("[rules]\n'_proj' = ['tp', []]\n")
    for given in (None, rules):
        with refused(sw.ParseError, "quant_method is"):
            fits(tmp_path / "m", (2,), rules=given)
    assert main(["report", str(tmp_path / "m"), "--rules", str(rules), "--mesh", "tp=2"]) == 2
    assert "quant_method is" in capsys.readouterr().err


@pytest.mark.parametrize(
    "stated", [{"quant_method": "hqq", "nbits": 4}, {"quant_method": "awq", "bits": 4, "version": "gemv"}]
)
def test_a_form_that_is_not_known_has_no_sizes_and_a_way_on(
    stated: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the refusal says: rules for what is stored, and a configuration without it, show how it is cut."""
    down = "model.layers.0.mlp.down_proj.weight"
    tensors = {down: np.ones((64, 128), "i1"), f"{down}_scales": np.ones(64, "f4")}
    sw.save_checkpoint(tmp_path / "m", tensors, to="hf", sync=False)
    plain = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 8}
    (tmp_path / "m" / "config.json").write_text(json.dumps(plain | {"quantization_config": stated}))
    rules, config = tmp_path / "own.toml", tmp_path / "plain.json"
    rules.write_text("[rules]\n'down_proj.weight$' = [[], 'tp']\n'scales$' = [[]]\n")
    config.write_text(json.dumps(plain))
    for more in ([], ["--rules", str(rules)], ["--rules", "hf/llama"]):
        assert main(["fits", str(tmp_path / "m"), *more]) == 2
        assert re.search("`shardwise report`.*--config", capsys.readouterr().err)
    cut = ["report", str(tmp_path / "m"), "--rules", str(rules), "--mesh", "tp=2"]
    assert main([*cut, "--config", str(config)]) == 0
    assert "-,tp    64 x 64" in capsys.readouterr().out
    # Without the method it stays unknown, whatever rules say, and so does the advice.
    for more in ([], ["--rules", str(rules)]):
        assert main(["fits", str(tmp_path / "m"), "--config", str(config), "--tp", "2", *more]) == 4
        said = capsys.readouterr().out
        assert "`shardwise report`" in said
        assert not re.search("none is that of quantized weights|to decide it, ", said)
    # A configuration that states a known form tells it: a scale for each row, so no cut of columns is within a block.
    form = {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}, "targets": ["Linear"]}
    known = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": form}}
    config.write_text(json.dumps(plain | {"quantization_config": known}))
    renamed = {down: tensors[down], f"{down}_scale": np.ones((64, 1), "f4")}
    sw.save_checkpoint(tmp_path / "known", renamed, to="hf", sync=False)
    assert main(["fits", str(tmp_path / "known"), "--config", str(config), "--tp", "2"]) == 0


def test_a_configuration_of_an_unknown_form_answers_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {key: value for key, value in QWEN.items() if key != "quantization_config"} | {"num_hidden_layers": 1}
    for stated in ({"quant_method": "hqq"}, {"bits": 4}):
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
        for command in (["fits"], ["report", "--rules", "hf/qwen3-moe", "--mesh", "tp=2"]):
            assert main([command[0], str(tmp_path / "config.json"), *command[1:]]) == 2
            assert "if the weights are not quantized, give a configuration without it" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["fits", str(tmp_path / "config.json"), "--tp", "2"]) == 0
    assert main(["report", str(tmp_path / "config.json"), "--rules", "hf/qwen3-moe", "--mesh", "tp=2"]) == 0


def test_infinities_of_a_configuration_beside_a_checkpoint(tmp_path: Path) -> None:
    """Models with state spaces have them: `"time_step_limit": [0.0, Infinity]`."""
    sw.save_checkpoint(tmp_path / "m", {"a.up_proj.weight": np.ones((8, 8), "f2")}, sync=False)
    (tmp_path / "m" / "config.json").write_text('{"time_step_limit": [0.0, Infinity], "a": NaN}')
    assert fits(tmp_path / "m", (2,)).sizes[0].verdict == "fits"
    sw.reshard_checkpoint(tmp_path / "m", tmp_path / "new", sync=False)
    assert json.loads((tmp_path / "new" / "config.json").read_text())["time_step_limit"] == [0.0, float("inf")]


def test_by_rules_integers_may_be_whole_but_are_not_cut_as_weights(tmp_path: Path) -> None:
    """Rules that name them do not say how they are quantized."""
    rules = tmp_path / "own.toml"
    tensors = {"up_proj.weight": ("BF16", (8, 8)), "tables": ("I64", (8, 8))}
    for rule, verdict in (("[]", "fits"), ("['tp', []]", "unknown")):
        rules.write_text(f"[rules]\n'up_proj' = ['tp', []]\n'tables' = {rule if rule != '[]' else '[[], []]'}\n")
        answer = fits_by_rules(tensors, {}, rules, [(2, 1)], lambda name: None)
        assert answer.sizes[0].verdict == verdict
        assert [one.name for one in answer.unknown] == (["tables"] if verdict == "unknown" else [])


def test_by_rules_dtypes_that_safetensors_have_not(tmp_path: Path) -> None:
    rules = tmp_path / "own.toml"
    rules.write_text("[rules]\n'w' = ['tp']\n")
    assert fits_by_rules({"w": ("complex128", (4,))}, {}, rules, [(2, 1)], lambda name: None).sizes[0].verdict == "fits"
