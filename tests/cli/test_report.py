"""Reports on checkpoints, with bytes counted by hand."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise import DeviceMesh, TensorLayout, UnevenRule
from shardwise._dtypes import CODES, DTYPES
from shardwise.cli import main
from shardwise.cli.terminal import Screen
from shardwise.show.lines import StyledText

from .conftest import Tensors, write_checkpoint

MESH = "data=2,model=4"


def reported(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> list[str]:
    assert main(["report", *map(str, arguments)]) == status
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out.splitlines()


def reported_json(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> Any:
    return json.loads("\n".join(reported(capsys, *arguments, "--json", status=status)))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def test_a_report(capsys: pytest.CaptureFixture[str], gpt: Path, rules: Path) -> None:
    # A c_attn has 16 * 48 * 4 = 3072 bytes, a ln_1 64, wte 50 * 16 * 2 = 1600; together 11008. A device holds
    # 3 * (768 + 64) + 200 = 2696. Replicated are 3 * 64.
    assert reported(capsys, gpt, "--mesh", MESH, "--rules", rules, "--strict") == [
        f"{gpt}: 7 tensors, 10.8 KiB, on the mesh data=2,model=4 of 8 devices",
        "",
        "tensor                         shape  dtype     layout          shard  per device",
        "h.{0..2}.attn.c_attn.weight  16 x 48  float32   -,model       16 x 12   3 x 768 B",
        "h.{0..2}.ln_1.bias                16  float32   -                  16    3 x 64 B",
        "wte.weight                   50 x 16  bfloat16  -,data+model   50 x 2       200 B",
        "",
        "each device holds 2.6 KiB of 10.8 KiB, 24.5%",
        "all 8 devices hold 21.1 KiB, 1.96 times the tensors' size",
        "1.74% of the bytes are on every device",
    ]


def test_all_rows_and_all_devices(capsys: pytest.CaptureFixture[str], gpt: Path, rules: Path) -> None:
    lines = reported(capsys, gpt, "--mesh", MESH, "--rules", rules, "--all", "--devices")
    assert lines[3] == "h.0.attn.c_attn.weight  16 x 48  float32   -,model       16 x 12       768 B"
    assert sum(line.endswith("  768 B") for line in lines) == 3
    assert lines[-2:] == ["devices   bytes", "cpu:0..7  2,696"]


def test_json(capsys: pytest.CaptureFixture[str], gpt: Path, rules: Path) -> None:
    plan = reported_json(capsys, gpt, "--mesh", MESH, "--rules", rules, "--devices")
    tensors = {tensor.pop("name"): tensor for tensor in plan.pop("tensors")}
    assert plan == {
        "file": str(gpt),
        "mesh": {"data": 2, "model": 4},
        "uneven": "even",
        "default": None,
        "nbytes": 11008,
        "training": {"weights": {"tensors": 7, "bytes": 11008}, "state": {"tensors": 0, "bytes": 0, "kinds": {}}},
        "replicated_share": 192 / 11008,
        "bytes_per_device": {"least": 2696, "most": 2696},
        "bytes_on_all_devices": 8 * 2696,
        "device_bytes": [2696] * 8,
        **{what: [] for what in ("unmatched", "unused_rules", "unused_axes", "clashes", "rank_mismatches")},
        **{what: [] for what in ("indivisible", "misfits", "left_out")},
        "warnings": [],
    }
    assert len(tensors) == 7
    assert tensors["wte.weight"] == {
        "shape": [50, 16],
        "dtype": "bfloat16",
        "rule": "wte",
        "layout": [None, ["data", "model"]],
        "num_shards": [1, 8],
        "shard_shape": [50, 2],
        "uneven": "even",
        "nbytes": 1600,
        "bytes_per_device": 200,
        "bytes_total": 1600,
    }


def test_everything_that_looks_wrong(capsys: pytest.CaptureFixture[str], gpt: Path, tmp_path: Path) -> None:
    rules = tmp_path / "wrong.toml"
    rules.write_text(
        '[rules]\n"attn" = [[], "model"]\n"weight" = ["model", []]\n"ln" = ["data", []]\n"lm_head" = ["data"]'
    )
    arguments = (gpt, "--mesh", MESH, "--rules", rules)
    lines = reported(capsys, *arguments, status=1)
    clash, rank, indivisible = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    [unused] = [line.removeprefix("warning: ") for line in lines if line.startswith("warning: ")]
    for text in ("h.{0..2}.attn.c_attn.weight", "'attn'", "'weight'"):
        assert text in clash
    for text in ("h.{0..2}.ln_1.bias", "'ln'", "rank 1", "rank 2"):
        assert text in rank
    for text in ("wte.weight", "dim 0", "50", "4 shards"):
        assert text in indivisible
    assert "'lm_head'" in unused
    assert "7 tensors cannot be placed: 3 clashing, 3 of another rank, 1 indivisible" in lines
    # Of none it is said what devices hold.
    assert not [line for line in lines if "hold" in line or "times" in line]
    strict = reported(capsys, *arguments, "--strict", status=1)
    assert strict == [line.replace("warning: ", "error: ") for line in lines]
    plan = reported_json(capsys, *arguments, "--strict", status=1)
    assert [len(plan[kind]) for kind in ("clashes", "rank_mismatches", "indivisible", "unused_rules")] == [3, 3, 1, 1]
    assert plan["bytes_per_device"] == {"least": 0, "most": 0}


@pytest.mark.parametrize(
    ("rule", "status", "strict"),
    [
        ("'wte' = ['model', []]\n'.' = [[]]", 1, 1),  # 50 rows over 4 devices; two rules for one name.
        ("'wte' = { axes = ['model', []], uneven = 'ceil' }", 0, 1),  # The others match nothing: a warning.
        ("'wte' = { axes = ['model', []], uneven = 'ceil' }\n'attn' = [[], 'model']\n'ln' = [[]]", 0, 0),
        ("'wte' = ['data', []]\n'attn' = [[], 'model']\n'ln' = [[]]\n'mtp' = { axes = [[]], optional = true }", 0, 0),
        ("'attn' = [[[]]]", 2, 2),
    ],
)
def test_what_cannot_be_placed_counts_and_strict_counts_every_warning(
    capsys: pytest.CaptureFixture[str], gpt: Path, tmp_path: Path, rule: str, status: int, strict: int
) -> None:
    rules = tmp_path / "some.toml"
    rules.write_text(f"replicated = ['data']\n[rules]\n{rule}")
    for options, expected in (([], status), (["--strict"], strict)):
        assert main(["report", str(gpt), "--mesh", MESH, "--rules", str(rules), *options]) == expected
    capsys.readouterr()


def test_packed_dims_that_do_not_divide_are_rows(capsys: pytest.CaptureFixture[str], gpt: Path, tmp_path: Path) -> None:
    rules = tmp_path / "packed.toml"
    rules.write_text(
        """
        [rules]
        'c_attn' = [[], { packed = "(3 h=12@model d=3)" }]
        'ln' = [[]]
        'wte' = [[], { packed = "(3 h=4@model d=8)" }]
        """
    )
    arguments = (gpt, "--mesh", "model=4", "--rules", rules)
    lines = reported(capsys, *arguments, status=1)  # 48 columns are 3 * 12 * 4/3; 16 are not 3 * 4 * 8.
    assert sum("cannot be placed" in line for line in lines) == 3  # A row each, and their count.
    assert "4 tensors cannot be placed: 4 of sizes that do not fit" in lines
    assert not [line for line in lines if "each device holds" in line]  # Nor of the rest what devices hold.
    said = [line for line in lines if line.startswith("error: ")]
    assert len(said) == 2
    assert "h.{0..2}.attn.c_attn.weight" in said[0]
    assert "rule 'wte'" in said[1]
    plan = reported_json(capsys, *arguments, status=1)
    assert [misfit["name"] for misfit in plan["misfits"]] == [
        *(f"h.{i}.attn.c_attn.weight" for i in range(3)),
        "wte.weight",
    ]
    assert plan["bytes_per_device"] == {"least": 3 * 64, "most": 3 * 64}


def test_a_message_names_the_option_not_the_argument(
    capsys: pytest.CaptureFixture[str], gpt: Path, tmp_path: Path
) -> None:
    assert main(["show", "10", "--mesh", "x=4", "--layout", "x"]) == 2
    assert capsys.readouterr().err.endswith("; --uneven ceil, chunk, balanced or floor would cut it\n")
    assert main(["show", "10,2", "--mesh", "data=2,model=4", "--layout", "modle,-"]) == 2
    assert capsys.readouterr().err.endswith('; did you mean "model"?\n')


def test_a_default_places_what_no_rule_matches(capsys: pytest.CaptureFixture[str], gpt: Path, tmp_path: Path) -> None:
    rules = tmp_path / "default.toml"
    rules.write_text("default = { axes = ['model'], uneven = 'balanced' }\nreplicated = ['data']\n[rules]\n'ln' = [[]]")
    arguments = (gpt, "--mesh", MESH, "--rules", rules)
    lines = reported(capsys, *arguments, "--strict")
    assert lines[3:6] == [
        "h.{0..2}.attn.c_attn.weight  16 x 48  float32   model,-     4 x 48   3 x 768 B",
        "h.{0..2}.ln_1.bias                16  float32   -               16    3 x 64 B",
        "wte.weight                   50 x 16  bfloat16  model,-  ≤ 13 x 16       416 B",
    ]
    plan = reported_json(capsys, *arguments, "--devices")
    assert plan["default"] == {"layout": ["model"], "uneven": "balanced"}
    # Of 50 rows of 32 bytes the first two of the four of "model" hold 13, the others 12.
    assert plan["device_bytes"] == [3 * 768 + 3 * 64 + 32 * rows for rows in (13, 13, 12, 12)] * 2


def test_names_without_a_rule_are_replicated_and_listed(
    capsys: pytest.CaptureFixture[str], gpt: Path, tmp_path: Path
) -> None:
    rules = tmp_path / "few.toml"
    rules.write_text("replicated = ['data']\n[rules]\n'wte' = [[], 'model']")
    lines = reported(capsys, gpt, "--mesh", MESH, "--rules", rules)
    assert lines[-2:] == [
        "",
        "warning: 6 tensors match no rule and are replicated, 9.2 KiB: h.{0..2}.attn.c_attn.weight, h.{0..2}.ln_1.bias",
    ]
    assert lines[3] == "h.{0..2}.attn.c_attn.weight  16 x 48  float32   no rule  16 x 48  3 x 3.0 KiB"


def test_names_without_a_rule_are_counted_and_six_listed(
    capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path
) -> None:
    rules = tmp_path / "none.toml"
    rules.write_text("[rules]\n")
    for count, said in (
        (1, "1 tensor matches no rule and is replicated, 0 B: a"),
        (6, "6 tensors match no rule and are replicated, 60 B: a, b, c, d, e, f"),
        (8, "8 tensors match no rule and are replicated, 112 B: a, b, c, d, e, f and 2 more"),
    ):
        # 0, 4, 8, … bytes.
        write_checkpoint(file, {name: ("F32", (place,)) for place, name in enumerate("abcdefgh"[:count])})
        assert reported(capsys, file, "--mesh", MESH, "--rules", rules)[-1] == f"warning: {said}"


def test_what_stands_out_is_coloured(
    capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    styles: dict[str, str] = {}

    class Noting(Screen):
        def write(self, *parts: StyledText | str) -> None:
            styles.update((text.strip(), style) for text, style in (x for x in parts if isinstance(x, tuple)))

    monkeypatch.setattr("shardwise.cli.Screen", Noting)
    rules = tmp_path / "some.toml"
    rules.write_text("[rules]\n'cut' = ['data']\n'odd' = ['model']\n'kept' = [[]]\n'wh.' = [[]]\n'.ho' = [[]]\n")
    two = {"cut.0": ("U8", (8,)), "cut.1": ("U8", (8,))}
    others = {name: ("U8", (size,)) for name, size in (("odd", 7), ("kept", 9), ("none", 3), ("who", 5))}
    assert main(["report", str(write_checkpoint(file, {**two, **others})), "--mesh", MESH, "--rules", str(rules)]) == 1
    assert styles["data"] == "cyan"
    assert styles["model"] == "red"
    assert styles["cannot be placed"] == "red"
    assert styles["-"] == "dim"
    assert styles["clash"] == "red"
    assert styles["no rule"] == "yellow"
    assert styles["warning:"] == "bold yellow"
    assert styles["2 x 4 B"] == styles["cut.{0,1}"] == ""


def test_uneven_shards_are_counted_one_by_one(capsys: pytest.CaptureFixture[str], file: Path, rules: Path) -> None:
    write_checkpoint(file, {"wte": ("F32", (3, 9)), "ln_1.bias": ("U8", (5,)), "c_attn.weight": ("F64", (2, 10))})
    rules.write_text(rules.read_text().replace("[[]]", '["data"]'))
    arguments = (file, "--mesh", MESH, "--rules", rules, "--devices")
    plan = reported_json(capsys, *arguments, "--uneven", "ceil")
    # wte: 9 columns over 8 devices, two each for four of them, then one, then none. ln: 3 and 2 over the two of "data".
    # c_attn: 10 columns over the four of "model": 3, 3, 3, 1.
    wte = [3 * 4 * columns for columns in (2, 2, 2, 2, 1, 0, 0, 0)]
    ln = [3, 3, 3, 3, 2, 2, 2, 2]
    attn = [2 * 8 * columns for columns in (3, 3, 3, 1, 3, 3, 3, 1)]
    assert plan["device_bytes"] == [sum(sizes) for sizes in zip(wte, ln, attn, strict=True)]
    assert plan["bytes_per_device"] == {"least": 18, "most": 75}
    lines = reported(capsys, *arguments, "--uneven", "ceil")
    assert "each device holds 18 B to 75 B of 273 B, 27.5%" in lines
    assert [line.split() for line in lines[-5:]] == [
        ["cpu:0..2", "75"],
        ["cpu:3", "43"],
        ["cpu:4", "62"],
        ["cpu:5,6", "50"],
        ["cpu:7", "18"],
    ]
    assert lines[5].split()[-5:] == ["≤", "3", "x", "2", "24", "B"][-5:]


def test_every_dtype_is_planned_without_ml_dtypes(
    capsys: pytest.CaptureFixture[str], file: Path, rules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    write_checkpoint(file, {f"wte.{code}": (code, (3, 32)) for code in CODES})
    rules.write_text("[rules]\n'wte' = [[], ['data', 'model']]")
    plan = reported_json(capsys, file, "--mesh", MESH, "--rules", rules)
    for tensor in plan["tensors"]:
        bits = DTYPES[tensor["dtype"]].bits
        assert (tensor["nbytes"], tensor["bytes_per_device"]) == (96 * bits // 8, -(-12 * bits // 8))


def test_the_mesh_of_the_rules(capsys: pytest.CaptureFixture[str], gpt: Path, rules: Path) -> None:
    rules.write_text('[mesh]\nshape = [2, 4]\naxis_names = ["data", "model"]\n' + rules.read_text())
    assert reported_json(capsys, gpt, "--rules", rules)["mesh"] == {"data": 2, "model": 4}
    assert reported_json(capsys, gpt, "--rules", rules, "--mesh", "data=1,model=2")["mesh"] == {"data": 1, "model": 2}


def test_a_plan_agrees_with_the_partitions(capsys: pytest.CaptureFixture[str], file: Path, rules: Path) -> None:
    write_checkpoint(file, {"wte": ("F16", (37, 53)), "ln_1.bias": ("F16", (11,))})
    mesh = DeviceMesh((2, 4), ("data", "model"))
    rules_of_uneven: tuple[UnevenRule, ...] = ("ceil", "chunk", "balanced", "floor")
    for uneven in rules_of_uneven:
        plan = reported_json(capsys, file, "--mesh", MESH, "--rules", rules, "--uneven", uneven, "--devices")
        partition = TensorLayout((None, ("data", "model")), mesh).partition((37, 53), uneven)
        assert plan["device_bytes"] == [size + 22 for size in partition.nbytes("float16").tolist()]


def test_a_large_checkpoint_is_a_short_table(capsys: pytest.CaptureFixture[str], file: Path, rules: Path) -> None:
    tensors: Tensors = {f"h.{layer}.{i}.c_attn.weight": ("F32", (64, 64)) for layer in range(80) for i in range(8)}
    lines = reported(capsys, write_checkpoint(file, tensors), "--mesh", MESH, "--rules", rules)
    assert lines[0].startswith(f"{file}: 640 tensors, 10.0 MiB")
    assert lines[3].startswith("h.{0..79}.{0..7}.c_attn.weight")
    assert lines[3].endswith("640 x 4.0 KiB")


def test_a_mesh_too_large_to_count_on(capsys: pytest.CaptureFixture[str], file: Path, rules: Path) -> None:
    write_checkpoint(file, {"wte": ("U8", (1, 2**22)), "ln_1.bias": ("U8", (7,)), "c_attn.weight": ("U8", (4, 4))})
    arguments = ["report", str(file), "--mesh", f"data={2**38},model=4", "--rules", str(rules), "--uneven", "ceil"]
    assert main(arguments) == 0
    # One byte of wte, all of ln_1.bias, a column of c_attn.
    assert "a device holds at most 12 B of 4.0 MiB" in capsys.readouterr().out
    assert main([*arguments, "--devices"]) == 2
    assert "too many to list" in capsys.readouterr().err


def test_an_empty_checkpoint(capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path) -> None:
    rules = tmp_path / "none.toml"
    rules.write_text("[rules]\n")
    lines = reported(capsys, write_checkpoint(file, {}), "--mesh", MESH, "--rules", rules, "--strict")
    assert "each device holds 0 B of 0 B" in lines


def test_names_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str], file: Path, rules: Path) -> None:
    write_checkpoint(file, {"ln_1.bias\x1b[2J": ("U8", (7,)), "wte\n": ("U8", (1, 8))})
    out = "\n".join(reported(capsys, file, "--mesh", MESH, "--rules", rules))
    assert "\x1b" not in out
    assert r"ln_1.bias\x1b[2J" in out
    assert r"wte\n" in out


def test_a_page(capsys: pytest.CaptureFixture[str], gpt: Path, rules: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    lines = reported(capsys, gpt, "--mesh", MESH, "--rules", rules)
    assert reported(capsys, gpt, "--mesh", MESH, "--rules", rules, "--html", page) == [
        *lines,
        "",
        f"the page is in {page}",
    ]
    text = page.read_text(encoding="utf-8")
    assert "<h1>gpt.safetensors on data=2,model=4</h1>" in text
    assert "c_attn.<wbr>weight" in text
    assert reported_json(capsys, gpt, "--mesh", MESH, "--rules", rules, "--html", page)["html"] == str(page)
    assert page.read_text(encoding="utf-8") == text


def test_a_page_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], gpt: Path, rules: Path, tmp_path: Path
) -> None:
    arguments = ["report", str(gpt), "--mesh", MESH, "--rules", str(rules), "--html"]
    assert main([*arguments, str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("shardwise: error: ")


LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8,
    "num_key_value_heads": 2, "num_hidden_layers": 3, "vocab_size": 100, "tie_word_embeddings": False,
}  # fmt: skip


def test_from_a_configuration_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The same as from a checkpoint of these shapes, by the rules of any engine, with its rewrites."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    head, rows = 64 // 8, {"q": 64, "k": 16, "v": 16, "o": 64}
    tensors: Tensors = {
        **{f"self_attn.{part}_proj.weight": ("BF16", (size, 64)) for part, size in rows.items()},
        **{f"mlp.{part}_proj.weight": ("BF16", (96, 64)) for part in ("gate", "up")},
        "mlp.down_proj.weight": ("BF16", (64, 96)),
        **{f"{norm}_layernorm.weight": ("BF16", (64,)) for norm in ("input", "post_attention")},
    }
    tensors = {f"model.layers.{i}.{name}": one for i in range(3) for name, one in tensors.items()}
    tensors |= dict.fromkeys(("lm_head.weight", "model.embed_tokens.weight"), ("BF16", (100, 64)))
    tensors["model.norm.weight"] = ("BF16", (64,))
    (tmp_path / "hf").mkdir()
    write_checkpoint(tmp_path / "hf" / "model.safetensors", tensors)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(LLAMA))
    for rules in ("hf/llama", "vllm/llama", "torch_dist/llama"):
        arguments = "--rules", rules, "--mesh", "tp=4", "--devices", "--strict"
        found = reported_json(capsys, tmp_path / "config.json", *arguments)
        expected = reported_json(capsys, tmp_path / "hf", *arguments)
        names = [one["name"] for one in found["tensors"]]
        assert sorted(names) == sorted(one["name"] for one in expected["tensors"])
        assert found["device_bytes"] == expected["device_bytes"]
        if rules == "vllm/llama":
            # Queries and one head each of keys and values, which two ranks share.
            rows_of = {one["name"]: one["shard_shape"] for one in found["tensors"]}
            assert rows_of["model.layers.2.self_attn.qkv_proj.weight"] == [2 * head + 2 * head, 64]
    # Tensors that are named so already are not rewritten once more.
    fused = {one["name"]: one["shape"] for one in reported_json(
        capsys, tmp_path / "config.json", "--rules", "vllm/llama", "--mesh", "tp=2")["tensors"]}  # fmt: skip
    (tmp_path / "fused.json").write_text(json.dumps(fused))
    again = reported_json(
        capsys, tmp_path / "fused.json", "--rules", "vllm/llama", "--mesh", "tp=2", "--config", tmp_path / "config.json"
    )
    assert {one["name"]: one["shape"] for one in again["tensors"]} == fused


def test_from_a_list_of_shapes_by_rank(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text('replicated = ["d"]\n[rules]\na = ["x", []]\nb = [[]]\n')
    (tmp_path / "list.json").write_text('{"a": [8, 4], "b": {"shape": [3], "dtype": "float32"}}')
    (tmp_path / "list.toml").write_text('[tensors]\na = [8, 4]\nb = { shape = [3], dtype = "float32" }\n')
    for name in ("list.json", "list.toml"):
        arguments = tmp_path / name, "--rules", tmp_path / "rules.toml", "--mesh", "d=2,x=2", "--ranks"
        # Half of 64 bytes, and all of 12.
        assert reported_json(capsys, *arguments)["ranks"][3] == {
            "rank": 3,
            "device": "cpu:3",
            "coordinates": {"mesh": {"d": 1, "x": 1}},
            "bytes": 44,
            "file": "rank-00003-d-1-x-1.safetensors",
        }
        assert reported(capsys, *arguments)[-1].split() == ["3", "cpu:3", "44", "rank-00003-d-1-x-1.safetensors"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 8}', "'a' is 8; it must be a shape"),
        ('{"a": [8, -1]}', "must be a shape"),
        ('{"a": {"shape": [8], "type": 1}}', "must be a shape"),
        ('{"a": {"shape": [8], "dtype": "float31"}}', "dtype 'float31', which is unknown"),
        ('{"model_type": "nonesuch"}', "model_type is 'nonesuch'"),
        ("[1]", "neither a model's configuration nor a list"),
        ("{}", "lists no tensors"),
        ('{"tensors": 3}', "tensors must be a table"),
        ("{", "JSON"),
        ('{"a": [9223372036854775807, 2]}', "more than 2**63 - 1 bytes"),
        (f'{{"a": [{"1, " * 64}1]}}', "has 65 dims, over the limit of 64"),
    ],
)
def test_what_is_no_list(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "rules.toml").write_text("[rules]\na = [[]]\n")
    (tmp_path / "list.json").write_text(text)
    assert main(["report", str(tmp_path / "list.json"), "--rules", str(tmp_path / "rules.toml"), "--mesh", "x=2"]) == 2
    assert message in capsys.readouterr().err


def test_a_list_in_toml_is_utf8(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text("[rules]\na = [[]]\n")
    (tmp_path / "list.toml").write_bytes(b'"a\xff" = [8]\n')
    assert main(["report", str(tmp_path / "list.toml"), "--rules", str(tmp_path / "rules.toml"), "--mesh", "x=2"]) == 2
    assert "list.toml: byte 2: not UTF-8" in capsys.readouterr().err


def test_components_of_quantized_weights_follow_their_weight(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = Path(__file__).parents[1] / "data" / "quantized" / "nvfp4-modelopt"
    rules = tmp_path / "rules.toml"
    rules.write_text("default = 'replicated'\n[rules]\n'down_proj\\.weight$' = [[], 'tp']\n'k_proj' = ['tp', []]\n")
    assert main(["report", str(folder), "--rules", str(rules), "--mesh", "tp=3"]) == 1
    output = capsys.readouterr().out
    rows = {line.split()[0]: line for line in output.splitlines() if line.startswith("model.layers")}
    # 144 columns in groups of 16, two values to a byte: 48 for each rank.
    assert "96 x 24" in rows["model.layers.0.mlp.down_proj.weight"]
    assert "96 x 3" in rows["model.layers.0.mlp.down_proj.weight_scale"]
    assert "cannot be placed" in rows["model.layers.0.self_attn.k_proj.weight_scale"]
    assert "warning" not in output


def test_errors_come_last_equal_ones_together(capsys: pytest.CaptureFixture[str], gpt: Path, tmp_path: Path) -> None:
    """Those of alike names are counted, and what devices hold of the rest is not said."""
    rules = tmp_path / "rank.toml"
    rules.write_text("default = []\n[rules]\n'ln|c_attn.weight' = [[], [], []]\n")
    lines = reported(capsys, gpt, "--mesh", MESH, "--rules", rules, status=1)
    (count,) = (line for line in lines if "cannot be placed:" in line)
    said = [line for line in lines if line.startswith("error: ")]
    assert lines[-len(said) :] == said
    assert sum(int(match[1]) for line in said if (match := re.search(r"(\d+) tensors\)$", line))) == int(
        count.split()[0]
    )
    assert said == [
        "error: 'h.{0..2}.attn.c_attn.weight' has rank 2, but the layout of its rule 'ln|c_attn.weight' has rank 3 "
        "(3 tensors)",
        "error: 'h.{0..2}.ln_1.bias' has rank 1, but the layout of its rule 'ln|c_attn.weight' has rank 3 (3 tensors)",
    ]
    described = tmp_path / "names.json"
    described.write_text(json.dumps({f"h.{i}.{kind}": [4, 4] for i in range(3) for kind in "kqv"}))
    rules.write_text("[rules]\n'h' = ['model']\n")
    lines = reported(capsys, described, "--mesh", "model=2", "--rules", rules, status=1)
    assert lines[-1] == (
        "error: 'h.{0..2}.k' has rank 2, but the layout of its rule 'h' has rank 1 "
        "(the same of 'h.{0..2}.q' and 'h.{0..2}.v'; 9 tensors)"
    )
    assert not [line for line in lines if "each device holds" in line]
