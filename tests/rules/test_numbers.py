"""Numbers of a model's size, which rules files name."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.cli import main
from shardwise.rules.numbers import NamedNumbers
from shardwise.store.tensors.model_config import config_of

LLAMA = """
[numbers]
heads = "num_attention_heads"
groups = ["num_key_value_heads", "heads"]
hidden = "hidden_size"
head_dim = ["head_dim", "hidden // heads"]
words = ["vocab_size", "text_config.vocab_size"]

[rules]
'qkv\\.weight$' = [{ packed = "(groups@tp [q:heads//groups*head_dim k:head_dim v:head_dim])" }, []]
'blocked$' = [{ packed = "q:(heads@tp d) + k:(groups@tp/max d) + v:(g@tp/max d)", g = "groups", d = "head_dim" }]
'plain$' = ["tp"]

[[rewrite]]
from = "{q,k,v}.weight"
to = { name = "qkv.weight", packed = "(groups [q:heads//groups*head_dim k:head_dim v:head_dim])" }
optional = true

[[rewrite]]
from = "words"
to = { name = "words", pad_to = 64 }
size = "words"
optional = true
"""
#: Llama-3-8B's and Llama-3.2-1B's.
LARGE = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "head_dim": None,
    "vocab_size": 128256,
}
SMALL = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 2048, "head_dim": 64, "vocab_size": 128256}


def layout_map(config: Any = None, text: str = LLAMA) -> sw.LayoutMap:
    return sw.LayoutMap.from_toml(io.StringIO(text), sw.DeviceMesh((2,), ("tp",)), config=config)


def dim_of(rules: sw.LayoutMap, name: str) -> Any:
    layout = rules[name]
    assert layout is not None
    return layout.axes[0]


def test_one_file_is_for_every_size(tmp_path: Path) -> None:
    for config, qkv in ((LARGE, "(8@tp [q:512 k:128 v:128])"), (SMALL, "(8@tp [q:256 k:64 v:64])")):
        assert str(dim_of(layout_map(config), "layer.qkv.weight")) == qkv
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert layout_map(tmp_path) == layout_map(tmp_path / "config.json") == layout_map(config)
        assert sw.Rewrites.from_toml(io.StringIO(LLAMA), config=str(tmp_path)) == sw.Rewrites.from_toml(
            io.StringIO(LLAMA), config=config
        )
    blocked = dim_of(layout_map(SMALL), "blocked")
    assert str(blocked) == "q:(32@tp 64) + k:(8@tp/max8 64) + v:(8@tp/max8 64)"
    assert eval(repr(blocked), {"packed": sw.packed}) == blocked


def test_what_is_made_is_written_with_its_sizes() -> None:
    written = io.StringIO()
    layout_map(LARGE).to_toml(written)
    assert "groups" not in written.getvalue()
    assert sw.LayoutMap.from_toml(io.StringIO(written.getvalue())) == sw.LayoutMap.from_toml(
        io.StringIO(LLAMA), sw.DeviceMesh((2,), ("tp",)), config=LARGE
    )
    rewrites = sw.Rewrites.from_toml(io.StringIO(LLAMA), config=LARGE)
    assert eval(repr(rewrites), {"Rewrites": sw.Rewrites, "packed": sw.packed}) == rewrites


def test_the_same_in_python() -> None:
    named = sw.Rewrites(
        [{"from": "{q,k}", "to": {"name": "x", "packed": "q:(2*n) + k:(n)", "pad_to": "n * 4"}, "size": "3 * n"}],
        numbers={"n": 2},
    )
    assert named == sw.Rewrites(
        [{"from": "{q,k}", "to": {"name": "x", "packed": "q:(4) + k:(2)", "pad_to": 8}, "size": 6}]
    )
    assert named.inverse().inverse() == named
    dim = sw.packed.parse("(groups@tp [q:heads//groups*d k:d])", heads=8, groups=2, d=4)
    assert dim == sw.packed.parse("(2@tp [q:16 k:4])")


@pytest.mark.parametrize(
    ("table", "config", "value"),
    [
        ({"n": 3}, None, 3),
        ({"n": [1, 2]}, None, (1, 2)),
        ({"n": "a"}, {"a": 4}, 4),
        ({"n": "text.a"}, {"text": {"a": 4}}, 4),
        ({"n": ["text.a", "a"]}, {"a": 4}, 4),
        ({"n": ["text.a", "a"]}, {"a": 5, "text": {"a": 4}}, 4),
        ({"n": ["a", 7]}, {"a": None}, 7),
        ({"n": ["a", 7]}, None, 7),
        ({"n": "n"}, {"n": 9}, 9),
        ({"n": "m * 2", "m": "a"}, {"a": 4, "m": 100}, 8),
        ({"n": ["m * 2", 1], "m": "a"}, {"m": 100}, 1),
        ({"n": "blocks[1]"}, {"blocks": [128, 64]}, 64),
        ({"n": []}, None, ()),
        ({"n": "blocks"}, {"blocks": [128, 64]}, (128, 64)),
        ({"n": " blocks "}, {"blocks": [128, 64]}, (128, 64)),
        ({"n": "a"}, {"a": 1 - 2**63}, 1 - 2**63),
    ],
)
def test_where_a_number_is_from(table: Any, config: Any, value: Any) -> None:
    assert NamedNumbers(table, config)["n"] == value


@pytest.mark.parametrize(
    ("table", "config", "error", "message"),
    [
        (
            {"n": "a"},
            None,
            sw.LayoutError,
            "the number n is missing: it is a of the model's config.json, and none",
        ),
        ({"n": "a"}, {"b": 1}, sw.LayoutError, "the number n is missing: the configuration has no a"),
        ({"n": ["a", "t.a"]}, {"t": 3}, sw.LayoutError, "the configuration has no a or t.a"),
        ({"n": "m", "m": "a"}, {}, sw.LayoutError, "the number n is missing: the configuration has no a"),
        ({"n": "a"}, {"a": "32"}, sw.ParseError, "a of the configuration must be a whole number, got '32'"),
        ({"n": "a"}, {"a": 32.0}, sw.ParseError, "must be a whole number, got 32.0"),
        ({"n": "a"}, {"a": True}, sw.ParseError, "must be a whole number, got True"),
        ({"n": "a"}, {"a": 2**63}, sw.ParseError, "over the limit"),
        ({"n": 2**63}, None, sw.ParseError, "over the limit"),
        ({"n": -(2**63)}, None, sw.ParseError, "over the limit"),
        ({"n": "a"}, {"a": -(2**63)}, sw.ParseError, "over the limit"),
        ({"n": "a // b"}, {"a": 1, "b": 0}, sw.LayoutError, "the number n: 'a // b' divides 1 by 0"),
        ({"n": "m", "m": "n + 1"}, {}, sw.ParseError, "numbers.n needs itself: n -> m -> n"),
        (
            {"n": 1.5},
            None,
            sw.ParseError,
            "numbers.n must be a whole number, an expression, or a list of these, got 1.5",
        ),
        ({"n": [["a"]]}, None, sw.ParseError, "numbers.n must be"),
        ({"n": {"m": 1}}, None, sw.ParseError, "numbers.n must be"),
        ({"n": "a b"}, None, sw.ParseError, "numbers.n: expected an operator at character 2"),
        ({"n.m": 1}, None, sw.ParseError, "the name of a number is 1 to 200 letters"),
    ],
)
def test_numbers_that_are_refused(table: Any, config: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        NamedNumbers(table, config)["n"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "byte 1: not JSON"),
        (b"[1]", "must be a JSON object"),
        (b"\xff", "byte 0: not UTF-8"),
        (b"[" * 100_000, "JSON nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON that can be read"),
        (b'{"hidden_size": 8, "hidden_size": 16}', "duplicate key 'hidden_size'"),
    ],
)
def test_a_configuration_that_cannot_be_read(tmp_path: Path, data: bytes, message: str) -> None:
    """It is refused alike where it is given and where it lies beside a checkpoint."""
    file = tmp_path / "config.json"
    file.write_bytes(data)
    with pytest.raises(sw.ParseError, match=message):
        config_of(tmp_path)
    with pytest.raises(sw.ParseError, match=message):
        layout_map(file)
    with pytest.raises(FileNotFoundError):
        layout_map(tmp_path / "other.json")
    # A file that needs no number does not open it.
    assert dim_of(layout_map(file, "[rules]\nplain = ['tp']"), "plain") == "tp"


def test_a_configuration_has_at_most_16_mib(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b'{"a": 3}'.ljust(16 * 2**20))
    assert NamedNumbers({"n": "a"}, file)["n"] == 3
    file.write_bytes(b'{"a": 3}'.ljust(16 * 2**20 + 1))
    with pytest.raises(sw.ParseError, match="has over 16777216 bytes"):
        NamedNumbers({"n": "a"}, file)["n"]


def test_the_sizes_of_a_dim_come_before_the_numbers_of_the_file() -> None:
    text = "[numbers]\nheads = 8\nd = 3\n[rules]\nw = [{ packed = '(heads@tp d)', heads = 6 }]"
    dim = dim_of(layout_map({}, text), "w")
    assert dim == sw.packed.parse("(6@tp 3)")
    # A shape that is not 18 is not said to disagree with a number that was not used.
    with pytest.raises(sw.LayoutError) as caught:
        layout_map({}, text).partition("w", (24,))
    assert "d = 3" in str(caught.value)
    assert "heads = 8" not in str(caught.value)


def test_a_number_that_disagrees_with_a_shape_is_named_with_it(tmp_path: Path) -> None:
    rules = layout_map(LARGE)
    said = r"groups = 8, heads = 32, head_dim = 128"
    with pytest.raises(sw.LayoutError, match=rf"3072.*6144.*{said}"):
        rules.partition("qkv.weight", (3072, 4096))
    sw.save_checkpoint(
        tmp_path / "a",
        {
            "q.weight": np.zeros((2048, 2)),
            "k.weight": np.zeros((512, 2)),
            "v.weight": np.zeros((512, 2)),
        },
    )
    sw.save_checkpoint(tmp_path / "words", {"words": np.zeros((7, 2))})
    rewrites = sw.Rewrites.from_toml(io.StringIO(LLAMA), config=LARGE)
    with pytest.raises(sw.LayoutError, match=rf"'q.weight'.*2048.*{said}"):
        sw.reshard_checkpoint(tmp_path / "a", tmp_path / "b", rewrites=rewrites)
    with pytest.raises(
        sw.LayoutError, match=r"'words'.*7 elements, but size is 128256; the rewrite has words = 128256"
    ):
        sw.reshard_checkpoint(tmp_path / "words", tmp_path / "b", rewrites=rewrites)


def test_a_missing_number_is_named_with_its_rule() -> None:
    with pytest.raises(
        sw.LayoutError,
        match=r"rule '.*qkv.*': dim 0: the number groups is missing: it is num_key_value_heads or "
        r"num_attention_heads of",
    ):
        layout_map()
    with pytest.raises(sw.LayoutError, match=r"rewrite 1: the number groups is missing"):
        sw.Rewrites.from_toml(io.StringIO(LLAMA))
    with pytest.raises(sw.LayoutError, match=r"rule 'a': dim 0: 'many//2': the number many is not given"):
        layout_map({}, "[rules]\na = [{ packed = '([q:many//2])' }]")


RULES = """
[numbers]
heads = "num_attention_heads"

[rules]
'q$' = [{ packed = "(heads@tp d)" }, []]

[[rewrite]]
from = "{a,b}"
to = { name = "q", packed = "a:(heads) + b:(n)" }
"""


def test_the_commands_take_the_configuration_beside_the_checkpoint_or_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, rules, other = tmp_path / "model", tmp_path / "rules.toml", tmp_path / "other.json"
    sw.save_checkpoint(source, {"a": np.ones((4, 2)), "b": np.zeros((8, 2))}, sync=False)
    rules.write_text(RULES)
    (source / "config.json").write_text('{"num_attention_heads": 4}')
    other.write_text('{"num_attention_heads": 3}')
    arguments = ["--rules", str(rules), "--mesh", "tp=2"]
    assert main(["reshard", str(source), str(tmp_path / "there"), *arguments, "--no-sync"]) == 0
    with sw.open_checkpoint(tmp_path / "there") as checkpoint:
        assert checkpoint["q"].shape == (12, 2)
    assert main(["reshard", str(source), str(tmp_path / "c"), *arguments, "--config", str(other)]) == 2
    assert "a 4 + b 8 elements in dim 0, but" in (said := capsys.readouterr().err)
    assert "heads = 3" in said
    assert main(["reshard", str(tmp_path / "there"), str(tmp_path / "d"), "--source-rules", str(rules)]) == 2
    said = capsys.readouterr().err
    assert "the number heads is missing" in said
    assert "--config FILE" in said
    back = ["--source-rules", str(rules), "--config", str(source / "config.json"), "--no-sync"]
    assert main(["reshard", str(tmp_path / "there"), str(tmp_path / "back"), *back]) == 0
    assert sw.diff_checkpoints(source, tmp_path / "back") == []
    # A report on one file too: its folder has the configuration.
    sw.save_checkpoint(source / "one.safetensors", {"q": np.zeros((12, 2))})
    assert main(["report", str(source / "one.safetensors"), *arguments]) == 0
    assert "(4@tp n)" in capsys.readouterr().out


def test_numbers_that_need_each_other_are_each_worked_out_once() -> None:
    """Forty that need two others each took 2^40 steps where the last is missing; the answer is known by hand."""
    table: dict[str, Any] = {f"n{i}": [f"n{i + 1}", f"n{i + 1} + 1"] for i in range(40)}
    with pytest.raises(sw.LayoutError, match=r"the number n0 is missing: the configuration has no missing$"):
        NamedNumbers({**table, "n40": "missing"}, {})["n0"]
    assert NamedNumbers({**table, "n40": "there"}, {"there": 7})["n0"] == 7
    sums = {f"n{i}": f"n{i + 1} + n{i + 1}" for i in range(40)}
    assert NamedNumbers({**sums, "n40": 1})["n0"] == 2**40


@pytest.mark.parametrize("length", [400, 20_000])
def test_a_chain_of_numbers_may_have_any_length(length: int) -> None:
    chain: dict[str, Any] = {f"n{i}": f"n{i + 1} + 1" for i in range(length)}
    assert NamedNumbers({**chain, f"n{length}": 5})["n0"] == length + 5
    with pytest.raises(sw.LayoutError, match=f"the number n0 is missing: it is n{length} of the model's config"):
        NamedNumbers(chain)["n0"]
    with pytest.raises(sw.ParseError, match=r"numbers.n0 needs itself: n0 -> n1 -> .{1,60} -> … -> n\d+ -> n0$"):
        NamedNumbers({**chain, f"n{length}": "n0"})["n0"]


def test_what_is_missing_does_not_grow_from_number_to_number() -> None:
    table = {f"n{i}": [f"n{i + 1}", f"key{i}"] for i in range(5_000)}
    with pytest.raises(sw.LayoutError, match=r"has no n5000 or key4999 or key4998 .* or key4993 or others$"):
        NamedNumbers(table, {})["n0"]


def test_a_number_that_is_missing_matters_only_where_it_is_named() -> None:
    text = '[numbers]\nmissing = "of_no_model"\n[rules]\n"w" = [{ packed = "(h=4@tp d)", d = 3 }]\n'
    assert str(dim_of(layout_map({}, text), "w")) == "(4@tp 3)"
