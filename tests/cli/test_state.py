"""`shardwise state`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import main

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
#: The elements of a layer that tp cuts by heads and features; keys and values; and its norms.
QO, KV, MLP, NORMS = 2 * 64 * 64, 2 * 16 * 64, 3 * 64 * 96, 2 * 64
WORDS = 100 * 64


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., str]:
    def made(**more: Any) -> str:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | more))
        return str(tmp_path / "config.json")

    return made


def words(text: str) -> list[str]:
    return text.split()


def answer(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> Any:
    assert main(["state", *arguments, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_by_names(capsys: pytest.CaptureFixture[str], config: Callable[..., str]) -> None:
    """Two stages of two layers, tp 4 over two key-value heads: each on two ranks."""
    found = answer(capsys, config(), *words("--tp 4 --pp 2 --dp 2 --optimizer adamw --sharding ddp --masters float32"))
    layer = QO // 4 + KV // 2 + MLP // 4 + NORMS
    first, last = 2 * layer + WORDS // 4, 2 * layer + WORDS // 4 + 64
    sizes = [sum(kinds["allocated"] for kinds in rank["kinds"].values()) for rank in found["ranks"]]
    # Weights and gradients of two bytes, a master and two moments of four, and a step for each of 9 tensors a layer.
    expected = [n * (2 + 2 + 4 + 8) + 4 * steps for n, steps in ((first, 2 * 9 + 1), (last, 2 * 9 + 2))]
    assert sizes == expected
    assert [rank["devices"] for rank in found["ranks"]] == [list(range(8)), list(range(8, 16))]
    assert found["stages"] == [{"least": size, "most": size} for size in expected]
    assert found["fullest"]["device"] == "cpu:8"
    # A quarter of the output layer is 1,600 elements of 16 bytes, and a step; so is that of the embedding.
    assert found["fullest"]["why"] == (
        "it has 1.0 KiB more than cpu:0, the emptiest: 25.0 KiB more of lm_head.weight, 1.0 KiB more of "
        "model.norm.weight, 25.0 KiB less of model.embed_tokens.weight"
    )
    assert found["rests_on"][-1] == "model_type = llama"
    assert "activations" in found["not_counted"]


def test_it_says_what_would_fit(capsys: pytest.CaptureFixture[str], config: Callable[..., str]) -> None:
    arguments = config(), *["--dp", "8", "--optimizer", "adamw", "--sharding", "zero1", "--memory", "400KB"]
    found = answer(capsys, *arguments, status=1)
    total = 4 * (QO + KV + MLP + NORMS) + 2 * WORDS + 64
    partition = -(-total // 16) * 16 // 8
    assert found["fullest"]["allocated"] == 16 * partition + (2 + 4 + 8) * partition + 4
    ways = {way["change"]: way for way in found["ways"]}
    # ZeRO 2 needs as much, and ZeRO 3 has whole copies of parameters that are so small.
    assert "sharding" not in ways
    assert (ways["tp"]["tp"], ways["tp"]["dp"], ways["tp"]["fits"]) == (2, 4, True)
    assert (ways["pp"]["pp"], ways["pp"]["dp"], ways["pp"]["fits"]) == (2, 4, True)
    # What is said to fit does, with the figure that was said.
    for change in ("tp", "pp"):
        sizes = [f"--{name}={ways[change][name]}" for name in ("tp", "pp", "dp")]
        own = answer(capsys, arguments[0], *sizes, *arguments[3:])
        assert (own["fits"], own["fullest"]["allocated"]) == (True, ways[change]["allocated"])
    assert main(["state", *arguments]) == 1
    said = capsys.readouterr().out
    assert "does not fit 390.6 KiB" in said
    assert "  would fit: tp 2, pp 1, dp 4, " in said
    assert said.splitlines()[-1].startswith("not counted: activations")


def test_experts_and_caches(capsys: pytest.CaptureFixture[str], config: Callable[..., str]) -> None:
    more = {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 32, "head_dim": 8}
    found = answer(capsys, config(**more), *words("--tp 2 --dp 4 --ep 8 --cache batch=2,context=100,block=16"))
    layer = QO // 2 + KV // 2 + 2 * 8 + NORMS + 8 * 64 + 3 * 64 * 32
    assert found["totals"]["weights"]["held"] == 8 * 2 * (4 * layer + 2 * (WORDS // 2) + 64)
    # Keys and values of one of two heads of 8, of 112 tokens in blocks.
    assert found["fullest"]["kinds"]["caches"] == {
        "held": 4 * 2 * 2 * 100 * 8 * 2,
        "allocated": 4 * 2 * 2 * 112 * 8 * 2,
    }
    assert found["optimizer"] is None


def test_tied_embeddings(capsys: pytest.CaptureFixture[str], config: Callable[..., str], tmp_path: Path) -> None:
    """Once on one stage, and on both ends of two; also where a list has both names."""
    layers = 4 * (QO + KV + MLP + NORMS) + 64
    found = answer(capsys, config(tie_word_embeddings=True))
    assert found["totals"]["weights"]["held"] == 2 * (layers + WORDS)
    found = answer(capsys, config(tie_word_embeddings=True), "--pp", "2")
    assert found["totals"]["weights"]["held"] == 2 * (layers + 2 * WORDS)
    (tmp_path / "list.json").write_text(json.dumps({"embed_tokens.weight": [100, 64], "lm_head.weight": [100, 64]}))
    listed = str(tmp_path / "list.json"), "--config", config(tie_word_embeddings=True)
    assert answer(capsys, *listed)["totals"]["weights"]["held"] == 2 * WORDS
    assert answer(capsys, *listed[:2], config())["totals"]["weights"]["held"] == 2 * 2 * WORDS


def test_quantized_weights_are_cut_with_their_scales(
    capsys: pytest.CaptureFixture[str], config: Callable[..., str]
) -> None:
    """A byte for a weight, and four for each block of 128 by 128; halves of both."""
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    path = config(
        hidden_size=512, intermediate_size=1024, num_attention_heads=4, num_key_value_heads=4, quantization_config=fp8
    )
    layer = 4 * (512 * 512 + 4 * 4 * 4) // 2 + 3 * (1024 * 512 + 8 * 4 * 4) // 2 + 2 * 2 * 512
    found = answer(capsys, path, "--tp", "2")
    assert found["fullest"]["allocated"] == 4 * layer + 2 * (2 * 100 * 512 // 2 + 512)
    adapted = answer(capsys, path, *words("--tp 2 --optimizer sgd --lora 4=q_proj --lora-dtype bfloat16"))
    assert adapted["fullest"]["kinds"]["gradients"]["held"] == 4 * 2 * (4 * 512 + 512 // 2 * 4)
    assert main(["state", path, *words("--tp 2 --optimizer sgd")]) == 2
    assert "is not of a dtype that is trained; freeze it with frozen" in capsys.readouterr().err


def test_rules_and_lists(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(json.dumps({"a.up": {"shape": [6, 4], "dtype": "float32"}, "a.norm": [4]}))
    (tmp_path / "rules.toml").write_text("[rules]\nup = ['tp', []]\nnorm = [[]]\n")
    given = str(tmp_path / "list.json"), "--rules", str(tmp_path / "rules.toml"), "--mesh", "data=2,tp=2"
    found = answer(capsys, *given, *["--optimizer", "exp_avg=float32", "--sharding", "fsdp2", "--all"])
    # Rows of 3 x 4 over two, two and one, and of 4 over two: 32 and 4 bytes of weights.
    assert found["fullest"]["kinds"]["weights"] == {"held": 36, "allocated": 36}
    assert found["fullest"]["kinds"]["optimizer"] == {"held": 32 + 8, "allocated": 32 + 8}
    assert found["over"] == ["data"]
    assert {one["tensor"] for one in found["fullest"]["tensors"]} == {"a.up", "a.norm"}
    assert answer(capsys, *given, "--memory", "1KiB")["fits"] is True
    found = answer(capsys, *given, "--memory", "40B", "--optimizer", "sgd", status=1)
    assert [way["change"] for way in found["ways"]] == ["sharding"]


def test_a_page(capsys: pytest.CaptureFixture[str], config: Callable[..., str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["state", config(), "--optimizer", "adamw", "--devices", "--html", str(page)]) == 0
    assert f"the page is in {page}" in capsys.readouterr().out
    text = page.read_text(encoding="utf-8")
    assert "<svg " in text
    assert all(kind in text for kind in ("weights", "gradients", "optimizer"))


def test_what_is_not_known(capsys: pytest.CaptureFixture[str], config: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(json.dumps({"layers.0.att_proj.weight": [64, 64]}))
    assert main(["state", str(tmp_path / "list.json")]) == 4
    assert "unknown: the bytes that a rank needs. The reasons:" in capsys.readouterr().out
    found = answer(capsys, str(tmp_path / "list.json"), status=4)
    assert found == {"known": False, "unknown": ["layers.*.att_proj.weight: its name is not known"]}
    (tmp_path / "rules.toml").write_text("[rules]\nup = ['tp', []]\n")
    rules = str(tmp_path / "list.json"), "--rules", str(tmp_path / "rules.toml"), "--mesh", "tp=2"
    assert answer(capsys, *rules, status=4)["known"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--optimizer shampoo", "error: --optimizer is 'shampoo', which is not known; known are adamw"),
        ("--optimizer shampoo", "dtypes by hand, as in exp_avg=float32"),
        ("--sharding zero9", "sharding is 'zero9', which is not known"),
        ("--tp 0", "tp is 0; it must be at least 1"),
        ("--tp 3", "tp is 3, which does not divide the 8 heads of model.layers.*.self_attn"),
        ("--ep 2 --dp 2", "ep is 2, but no experts are known in this model"),
        ("--pp 8", "pp is 8, but the model has only 4 layers"),
        ("--pp 2 --layers 1,2", "layers is [1, 2]; it must have 2 stages, with 4 layers in all"),
        ("--mesh tp=2", "--mesh is for --rules"),
        ("--lora 8", "--lora '8': give the rank and a regular expression"),
        ("--cache batch=2", "context is missing"),
        ("--cache batch=2,context=3,pages=4", "--cache has 'pages'"),
        ("--set x", "--set 'x': expected a name and a value"),
        ("--memory lots", "'lots' is not a number of bytes"),
        (
            "--optimizer adamw --sharding zero1 --set bucket_size=4",
            "settings has 'bucket_size', which zero1 does not know",
        ),
        ("--optimizer x=y", "--optimizer: unknown dtype 'y'"),
    ],
)
def test_refused(capsys: pytest.CaptureFixture[str], config: Callable[..., str], arguments: str, message: str) -> None:
    assert main(["state", config(), *arguments.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words", "followed"),
    [
        ("--mesh tp=2", "the sizes are --tp, --pp, --dp, --ep and --etp", ["--tp 2", "--pp 2", "--dp 2"]),
        ("--rules hf/llama --mesh tp=2 --tp 2", "with --rules give --mesh", ["--rules hf/llama --mesh tp=2"]),
        (
            "--optimizer adamw --lora 8",
            "give the rank and a regular expression: 16='[qv]_proj'",
            ["--optimizer adamw --lora 16=[qv]_proj"],
        ),
        ("--cache batch=2", "as in batch=8,context=8192", ["--cache batch=8,context=8192"]),
        ("--cache batch=2,pages=4", "it may have batch, context", ["--cache batch=2,context=3"]),
        (
            "--optimizer exp_avg=y",
            "(expected e.g. float32, bfloat16, F8_E4M3)",
            [f"--optimizer exp_avg={dtype}" for dtype in ("float32", "bfloat16", "F8_E4M3")],
        ),
        ("--optimizer exp_avg=", "as in exp_avg=float32", ["--optimizer exp_avg=float32"]),
        (
            "--set x",
            "as in round_robin_gradients=true",
            ["--optimizer adamw --sharding zero1 --set round_robin_gradients=true"],
        ),
        (
            "--optimizer adamw --sharding hsdp --dp 4",
            "give their size as group, or their axes as over",
            [f"--optimizer adamw --sharding hsdp --dp 4 {how}" for how in ("--group 2", "--over dp")],
        ),
        (
            "--optimizer adamw --sharding fsdp1 --dp 2 --frozen q_proj",
            "with use_orig_params: set it to true in settings",
            ["--optimizer adamw --sharding fsdp1 --dp 2 --frozen q_proj --set use_orig_params=true"],
        ),
        (
            "--optimizer adamw --sharding zero1 --rules hf/llama --mesh tp=2",
            "give a mesh with one more axis, or the sharding none or ddp",
            [
                "--optimizer adamw --sharding zero1 --rules hf/llama --mesh data=2,tp=2",
                *(f"--optimizer adamw --sharding {one} --rules hf/llama --mesh tp=2" for one in ("none", "ddp")),
            ],
        ),
    ],
)
def test_what_is_advised_gets_through(
    capsys: pytest.CaptureFixture[str], config: Callable[..., str], arguments: str, words: str, followed: list[str]
) -> None:
    model = config(dtype="bfloat16")
    assert main(["state", model, *arguments.split()]) == 2
    assert words in capsys.readouterr().err
    for each in followed:
        assert main(["state", model, *each.split()]) == 0, capsys.readouterr().err


def test_a_configuration_is_counted_without_the_modules_for_checkpoints_and_colours(tmp_path: Path) -> None:
    """They would take as long to import as all the rest."""
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 100}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    program = """
import sys
from shardwise.cli import main

assert main(["state", sys.argv[1], "--tp", "2", "--optimizer", "adamw"]) == 0
names = "rich", "shardwise.store", "shardwise.conversion", "shardwise.show.svg", "shardwise.deploy.recording"
print([name for name in names if name in sys.modules])
"""
    environment = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
    command = [sys.executable, "-c", program, str(tmp_path / "config.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=True, env=environment)
    assert done.stdout.splitlines()[-1] == "[]"
