"""What the commands print with `--json` follows the package's JSON Schema, in every form that it has."""

from __future__ import annotations

import argparse
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.cli import main
from shardwise.cli.arguments import make_parser
from tests.propagate.test_whole import LAYER

jsonschema = pytest.importorskip("jsonschema")

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
CUT = "--rules r.toml --mesh model=2"
#: Lines of a command, one after the other, with their exit statuses.
LINES = [
    (f"report a.safetensors {CUT} --devices --ranks --html page.html", 0),
    ("report a.safetensors --rules r.toml --mesh model=3", 1),
    ("report a.safetensors --rules clash.toml --mesh model=2", 1),
    ("report config.json --for vllm(tp=2,pp=2)", 0),
    ("show 6,8 --mesh data=2,model=4 --layout data,model --dtype bfloat16", 0),
    ("show 768,2304 --mesh tp=4 --layout -,(3&12@tp&64)", 0),
    ("translate --mesh data=2,model=4 --layout -,model+data", 0),
    ("einsum bf,fd->bd data,model model,- --shapes 32,64 64,16 --mesh data=2,model=4", 0),
    ("propagate step.json dp,tp ? --results dp,- --mesh dp=2,tp=2 --html step.html", 0),
    ("state config.json --tp 2 --optimizer adamw --memory 1GiB --html state.html --all", 0),
    ("state config.json --dp 8 --optimizer adamw --sharding zero1 --memory 300KiB", 1),
    ("state a.safetensors --tp 2", 4),
    ("fits config.json --tp 1,2,8,3", 0),
    ("fits a.safetensors --tp 2", 4),
    ("rules", 0),
    ("rules hf/llama", 0),
    ("rules --from-tp-plan plan.json", 0),
    (f"plan a.safetensors d {CUT}", 0),
    (f"plan a.safetensors d {CUT} --workers 2", 0),
    (f"plan a.safetensors d {CUT} --save p.swplan", 0),
    ("run p.swplan --part 1/1", 0),
    ("commit p.swplan", 0),
    (f"reshard a.safetensors c {CUT} --drop norm", 0),
    (f"extract a.safetensors e.safetensors --rank 1 {CUT}", 0),
    ("verify c", 0),
    ("verify broken.safetensors", 3),
    ("diff a.safetensors d", 0),
    ("diff a.safetensors b.safetensors --drop embed", 1),
    ("inspect c", 0),
    ("inspect b.safetensors", 0),
    ("learn a.safetensors b.safetensors", 1),
]


def schema() -> Any:
    return json.loads((files("shardwise") / "schemas" / "output.schema.json").read_text(encoding="utf-8"))


def validator(command: str) -> Any:
    whole = schema()
    return jsonschema.Draft202012Validator({**whole, "$ref": f"#/$defs/{command}"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("outputs")
    weights = {"embed": np.arange(4096, dtype="f4").reshape(64, 64), "norm": np.ones(8, "f4")}
    state = weights | {"optim.state.embed.exp_avg": np.zeros((64, 64), "f4")}
    sw.save_checkpoint(made / "a.safetensors", state)
    sw.save_checkpoint(made / "b.safetensors", weights | {"norm": np.zeros(8, "f4"), "x": np.ones(3)})
    data = bytearray((made / "a.safetensors").read_bytes())
    data[-1] ^= 1
    (made / "broken.safetensors").write_bytes(data)
    (made / "r.toml").write_text('[rules]\nembed = ["model", []]\nnorm = [[]]\n')
    (made / "clash.toml").write_text('[rules]\nembed = ["model", []]\nmbed = [[], []]\n"nor" = [[], []]\n')
    (made / "config.json").write_text(json.dumps(LLAMA))
    (made / "step.json").write_text(json.dumps(LAYER))
    (made / "plan.json").write_text(json.dumps({"layers.*.q_proj": "colwise"}))
    return made


def test_the_schema_is_one_and_has_each_command() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    parser = make_parser()
    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction)).choices
    printing = {name for name, one in commands.items() if any("--json" in a.option_strings for a in one._actions)}
    assert printing <= set(schema()["$defs"])
    assert printing == {line.split()[0] for line, _ in LINES}


@pytest.mark.filterwarnings("ignore::shardwise.ShardwiseWarning")
def test_what_the_commands_print(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    for line, status in LINES:
        arguments = [word.replace("&", " ") for word in line.split()]
        assert main([*arguments, "--json"]) == status, line
        answer = json.loads(capsys.readouterr().out)
        faults = [error.message for error in validator(arguments[0]).iter_errors(answer)]
        assert faults == [], line


def test_another_key_is_a_fault() -> None:
    """Else the schema would accept whatever is printed."""
    assert validator("run").is_valid({"plan": "p", "tasks": 1, "of": 2})
    assert not validator("run").is_valid({"plan": "p", "tasks": 1, "of": 2, "more": 3})
    assert not validator("run").is_valid({"plan": "p", "tasks": "1", "of": 2})
