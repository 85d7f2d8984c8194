"""What errors of the command advise, followed; and that options and extras of which any message speaks are there."""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
from collections.abc import Iterator
from importlib.metadata import metadata
from pathlib import Path

import numpy as np
import pytest

import shardwise as sw
from shardwise.cli import main
from shardwise.cli.arguments import make_parser
from shardwise.cli.terminal import _OPTIONS

PACKAGE = Path(sw.__file__).parent
LLAMA = {
    **{"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 8, "vocab_size": 16},
    **{"intermediate_size": 12, "num_hidden_layers": 1, "tie_word_embeddings": False},
}
RESHARD = "reshard hf made --no-sync"

#: What is refused, what the error advises, and the commands that do as it says.
COMMANDS = [
    ("report hf --rules hf/llama", "--mesh is missing", ["report hf --rules hf/llama --mesh tp=2"]),
    (
        "report hf --rules hf/llama --mesh x=2",
        "the file's axis is called tp, as in --mesh tp=4",
        ["report hf --rules hf/llama --mesh tp=2"],
    ),
    *(
        (
            f"{command} --rules hf/llama --mesh tp=3",
            "the rules take tp=1, 2, 4, 6, 8, 10, 12, 14 or 16; `shardwise fits` says which of them fit the model",
            ["fits hf", *(f"{command}-{size} --rules hf/llama --mesh tp={size}" for size in fitting)],
        )
        for command, fitting in (("reshard hf --no-sync made", (1, 2, 4)), ("plan hf made", (1, 2, 4)))
    ),
    (
        "report hf --rules hf/llama --mesh tp=3",
        "`shardwise fits` says which of them fit the model",
        ["fits hf", "report hf --rules hf/llama --mesh tp=4"],
    ),
    ("show 8,8 --mesh x=2 --layout x", "where it is not cut, as in x,-", ["show 8,8 --mesh x=2 --layout x,-"]),
    (
        """show 8,8 --mesh data=2 --layout "('data', None)\"""",
        "write data,- for ('data', None)",
        ["show 8,8 --mesh data=2 --layout data,-"],
    ),
    ("show 8 --mesh x=2 --layout x,-", "+ between the axes of one dim, as in x", ["show 8 --mesh x=2 --layout x"]),
    (
        "report hf --for vllm(tp=3)",
        "`shardwise fits` says which sizes fit the model",
        ["fits hf", "report hf --for vllm(tp=4)"],
    ),
    (
        f"{RESHARD} --for vllm(tp=16)",
        "16 shards do not divide evenly; `shardwise fits` says which sizes fit the model",
        ["fits hf", f"{RESHARD} --for vllm(tp=4)"],
    ),
    ("state hf --tp 3", "`shardwise fits` says which sizes fit the model", ["fits hf", "state hf --tp 2"]),
    (
        f"{RESHARD} --to fsdp2",
        "files for ranks need --mesh, which states the ranks, as in --mesh dp=8",
        [f"{RESHARD} --to fsdp2 --mesh dp=8"],
    ),
    (
        f"{RESHARD} --dtype fp8",
        "such as bfloat16 or float8_e4m3fn",
        [
            "reshard hf made --no-sync --dtype bfloat16",
            "reshard hf made2 --no-sync --dtype float8_e4m3fn --overflow saturate",
        ],
    ),
    ("merge hf made.safetensors", "did you mean reshard?", ["reshard hf made.safetensors --no-sync"]),
    ("compare hf hf", "did you mean diff?", ["diff hf hf"]),
    (
        f"{RESHARD} --tp 2",
        "elsewhere a size is part of --mesh tp=2, or of --for 'vllm(tp=2)'",
        [f"{RESHARD} --mesh tp=2 --rules hf/llama", "reshard hf made2 --no-sync --for 'vllm(tp=2)'"],
    ),
    (
        f"{RESHARD} --mesh tp=2",
        "--rules must say how the tensors are cut",
        [f"{RESHARD} --mesh tp=2 --rules hf/llama"],
    ),
    (
        f"{RESHARD} --rename model",
        "--rename 'model': write PATTERN=REPLACEMENT",
        [f"{RESHARD} --rename ^model=language_model"],
    ),
    (
        "plan hf made --rules hf/lama --mesh tp=2",
        "did you mean hf/llama or",
        ["plan hf made --rules hf/llama --mesh tp=2"],
    ),
    ("plan hf made --rules hf/lama --mesh tp=2", "`shardwise rules` lists them", ["rules"]),
    (
        f"{RESHARD} --to vllm --mesh tp=2 --rules hf/llama",
        "--rules vllm/llama, or use --to ranks, which takes any names",
        [
            f"{RESHARD} --to vllm --mesh tp=2 --rules vllm/llama",
            "reshard hf ranks --no-sync --to ranks --mesh tp=2 --rules hf/llama",
        ],
    ),
    (
        f"{RESHARD} --to vllm --mesh pp=2,tp=2 --rules vllm/llama",
        "leave pp out of the mesh, take the preset vllm(tp=…, pp=…) (--for",
        [f"{RESHARD} --to vllm --mesh tp=2 --rules vllm/llama", "reshard hf made2 --no-sync --for 'vllm(tp=2, pp=1)'"],
    ),
    ("report hf", "--rules or --for is missing", ["report hf --for 'vllm(tp=2)'", "report hf --for fsdp2(2)"]),
    (
        f"{RESHARD} --for vllm(tp=2) --mesh tp=2",
        "--mesh and --for exclude each other",
        [f"{RESHARD} --for vllm(tp=2)"],
    ),
    (
        f"{RESHARD} --to hf --mesh tp=2 --rules hf/llama --strict",
        "--to sharded, --to ranks and --to dcp hold them in pieces",
        [
            f"reshard hf in-{to} --no-sync --strict --to {to} --mesh tp=2 --rules hf/llama"
            for to in ("sharded", "ranks", "dcp")
        ],
    ),
    (
        f"{RESHARD} --dtype float16",
        "--overflow saturate takes the largest value instead, --overflow round rounds as IEEE 754 says",
        [f"reshard hf {how} --no-sync --dtype float16 --overflow {how}" for how in ("saturate", "round")],
    ),
    (
        "reshard sharded/model-00001-of-00002.safetensors made --no-sync",
        "open the folder that has all parts, or its index; inspect describes this file alone",
        [
            "reshard sharded made --no-sync",
            "reshard sharded/model.safetensors.index.json again --no-sync",
            "inspect sharded/model-00001-of-00002.safetensors",
        ],
    ),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which hf and sharded are models of Llama, of which the norm has a value beyond float16."""
    rows: dict[str, tuple[int, ...]] = {
        f"self_attn.{name}_proj.weight": (8 if name in "qo" else 4, 8) for name in "qkvo"
    }
    rows |= {f"mlp.{name}_proj.weight": (8, 12) if name == "down" else (12, 8) for name in ("gate", "up", "down")}
    shapes = {f"model.layers.0.{name}": shape for name, shape in rows.items()}
    shapes |= {f"model.layers.0.{name}_layernorm.weight": (8,) for name in ("input", "post_attention")}
    shapes |= {"model.embed_tokens.weight": (16, 8), "lm_head.weight": (16, 8), "model.norm.weight": (8,)}
    arrays = {name: np.full(shape, 1e30 if "norm" in name else 1, "f4") for name, shape in shapes.items()}
    for name, most in (("hf", 10**6), ("sharded", 1700)):
        sw.save_checkpoint(tmp_path / name, arrays, to="hf", max_file_bytes=most, sync=False)
        (tmp_path / name / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("refused", "words", "followed"), COMMANDS)
def test_what_is_advised_gets_through(
    refused: str, words: str, followed: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split(refused)) in (1, 2)
    assert words in capsys.readouterr().err
    for command in followed:
        assert main(shlex.split(command)) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "refused"),
    [
        ("show 8,8 --mesh {} --layout -,-", "x"),
        ("show {} --mesh x=2 --layout -,-", "x"),
        ("show 8,8 --mesh x=2 --layout -,- --dtype {}", "x"),
        ("fits hf --tp {}", "x"),
        ("reshard hf {0}made --no-sync --memory {0}", "x"),
    ],
)
def test_examples_of_notations_are_taken(
    command: str, refused: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What an error expects, or says `such as`, is taken in the place of what was refused."""
    assert main(shlex.split(command.format(refused))) == 2
    examples = re.split(r" or |, (?=\w+\b)", re.split(r"expected e\.g\. |such as ", capsys.readouterr().err.strip())[1])
    for example in [",".join(examples)] if "mesh {}" in command else examples:
        assert main(shlex.split(command.format(example))) == 0, example


def messages() -> Iterator[tuple[Path, str]]:
    """All texts of the package, but for docstrings."""
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        documented = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
                yield path, node.value


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    found = {option for action in parser._actions for option in action.option_strings}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found = found.union(*map(options_of, action.choices.values()))
    return found


def test_options_and_extras_of_which_messages_speak_are_there() -> None:
    others = {"--local-dir", "--ckpt-convert-format", "--ckpt-convert-save"}
    others.add("--dist-ckpt-optim-fully-reshardable")
    options = options_of(make_parser()) | others
    extras = set(metadata("shardwise").get_all("Provides-Extra") or ())
    speaks = set()
    for path, text in messages():
        for option in re.findall(r"(?<![\w-])--[a-z][a-z_-]*", text):
            assert option in options, f"{path}: {text}"
            speaks.add(option)
        for extra in re.findall(r"shardwise\[([a-z0-9]+)\]", text):
            assert extra in extras, f"{path}: {text}"
    assert others < speaks
    assert len(speaks) > 30


def test_arguments_that_are_written_as_options_are_in_messages() -> None:
    others = {'uneven="ceil", "chunk", "balanced" or "floor"', "drop='"}  # Of the core, and before a value.
    said = "\n".join(text for path, text in messages() if path.name != "terminal.py")
    assert [argument for argument in _OPTIONS if argument not in said and argument not in others] == []
