"""The rules that the package brings: by their names wherever a file of rules is taken, listed and printed."""

import json
from pathlib import Path

import numpy as np
import pytest

import shardwise as sw
from shardwise.cli import main

from .conftest import error_of


def test_they_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(sw.example_rules())
    assert "GPT-2 as Hugging Face stores it" in lines[2]
    (llama,) = (line for line in lines if line.startswith("vllm/llama "))
    assert "Llama 2 and 3 as vLLM and SGLang hold it" in llama
    assert llama.endswith("vLLM 0.33.0, SGLang 0.5.23")
    assert main(["rules", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {rules["name"]: Path(rules["path"]) for rules in listed} == sw.example_rules()


@pytest.mark.parametrize("name", sw.example_rules())
def test_one_is_printed_as_it_is(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main(["rules", name]) == 0
    text = capsys.readouterr().out
    assert text == sw.example_rules()[name].read_text()
    assert main(["rules", name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == text


def test_a_name_is_taken_for_a_file(capsys: pytest.CaptureFixture[str], gpt: Path, tmp_path: Path) -> None:
    plan = ["report", str(gpt), "--mesh", "model=4", "--json", "--rules"]
    assert main([*plan, "gpt2"]) == 0
    by_name = capsys.readouterr().out
    assert main([*plan, str(sw.example_rules()["gpt2"])]) == 0
    assert capsys.readouterr().out == by_name
    assert main(["plan", str(gpt), str(tmp_path / "cut"), "--mesh", "model=4", "--rules", "gpt2"]) == 0


def test_a_file_of_that_name_goes_first(
    capsys: pytest.CaptureFixture[str], gpt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gpt2").write_text("[rules]\n'nothing' = [[]]\n")
    assert main(["report", str(gpt), "--mesh", "model=4", "--rules", "gpt2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unused_rules"] == ["nothing"]


def test_names_of_none(capsys: pytest.CaptureFixture[str], gpt: Path) -> None:
    for arguments in (["rules", "gpt3"], ["report", gpt, "--mesh", "model=4", "--rules", "gpt3"]):
        said = error_of(capsys, *arguments)
        assert "'gpt3'" in said
        assert "; did you mean gpt2" in said
        assert "`shardwise rules` lists them" in said
    for name, meant in (("vllm/lama", "vllm/llama or"), ("gemma2", "hf/gemma2 or"), ("llama.toml", "hf/llama or")):
        assert f"; did you mean {meant}" in error_of(capsys, "report", gpt, "--mesh", "model=4", "--rules", name)
    assert "gone.toml" in error_of(capsys, "report", gpt, "--mesh", "model=4", "--rules", "gone.toml")


def test_a_checkpoint_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It is said to be missing, not the numbers that its configuration would have."""
    rules = ["--rules", "vllm/llama"]
    new = str(tmp_path / "new")
    for arguments in (["report", *rules], ["reshard", new, *rules], ["reshard", new, "--source-rules", "vllm/llama"]):
        command, *rest = arguments
        mesh = ["--mesh", "tp=2"] if "--rules" in rest else []
        said = error_of(capsys, command, str(tmp_path / "gone"), *rest, *mesh)
        assert "gone" in said
        assert "No such file" in said
    (tmp_path / "there").mkdir()
    sw.save_checkpoint(tmp_path / "there" / "a.safetensors", {"decoder.w": np.ones(2)})
    assert "num_attention_heads" in error_of(
        capsys, "report", str(tmp_path / "there" / "a.safetensors"), *rules, "--mesh", "tp=2"
    )


def test_rules_for_the_tensors_of_another_engine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sw.save_checkpoint(tmp_path / "a", {"decoder.w": np.ones(2)}, to="hf")
    (tmp_path / "a" / "config.json").write_text('{"num_attention_heads": 2, "head_dim": 2, "vocab_size": 8}')
    said = error_of(
        capsys, "reshard", str(tmp_path / "a"), str(tmp_path / "b"), "--rules", "vllm/llama", "--mesh", "tp=2"
    )
    assert "there are 1, such as 'decoder.w'" in said
    assert "--source-rules" in said
    assert "heads = 2" not in said
