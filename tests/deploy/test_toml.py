from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

from shardwise import (
    DeviceMesh,
    LayoutError,
    LayoutMap,
    ParseError,
    Rewrites,
    ShardwiseError,
    TensorLayout,
    open_checkpoint,
    save_checkpoint,
)
from shardwise.cli import main
from shardwise.deploy import Deployment, DeploymentRule, ExpertMap, FusedParameter, fsdp2, megatron, sglang, vllm

FILE = r"""
match = "fullmatch"
replicated = ["dp"]

[numbers]
heads = "num_attention_heads"
tp = 2

[lists]
stage = { stages = [2, 1] }
where = { experts = 4, ep = 4, redundant = 4 }
slots = { slots = 4, ep = 4, redundant = 4 }
ends = [0, 1]

[world]
label = "trainer:{}"

[meshes]
dense = { shape = [2, 2, "tp"], axis_names = ["pp", "dp", "tp"] }
expert = { shape = [2, 4], axis_names = ["pp", "ep"] }

[rules]
'h\.{i}\.wq' = { axes = [{ packed = "(heads@tp d)" }, []], mesh = "dense", at = { pp = "stage[i]" } }
'h\.{i}\.experts\.{e}\.up' = { axes = [[], []], mesh = "expert", at = { pp = "stage[i]", ep = "where[e]" } }
'embed' = { axes = ["tp", []], mesh = "dense", at = { pp = [0, "pp - 1"] }, uneven = "ceil" }

[[parameters]]
name = "h.{i}.w13"
parts = ["h.{i}.experts.{e}.up"]
stack = "e"
slots = "slots[ep]"
"""
CONFIG = {"num_attention_heads": 4, "unused": 3}


def test_a_file_is_the_deployment_that_it_describes() -> None:
    from shardwise import packed

    experts = ExpertMap.redundant(4, 4, 4)
    expected = Deployment(
        [f"trainer:{i}" for i in range(8)],
        {"dense": DeviceMesh((2, 2, 2), ("pp", "dp", "tp")), "expert": DeviceMesh((2, 4), ("pp", "ep"))},
        {
            r"h\.{i}\.wq": DeploymentRule((packed.parse("(4@tp d)"), None), "dense", {"pp": "stage[i]"}),
            r"h\.{i}\.experts\.{e}\.up": DeploymentRule((None, None), "expert", {"pp": "stage[i]", "ep": "where[e]"}),
            "embed": DeploymentRule(("tp", None), "dense", {"pp": [0, "pp - 1"]}, uneven="ceil"),
        },
        numbers={"stage": (0, 0, 1), "where": experts.where, "slots": experts.slots, "ends": (0, 1)},
        parameters=[FusedParameter("h.{i}.w13", ("h.{i}.experts.{e}.up",), "e", "slots[ep]")],
        match="fullmatch",
    )
    made = Deployment.from_toml(io.StringIO(FILE), config=CONFIG)
    assert made.meshes == expected.meshes
    assert made.numbers == expected.numbers
    shapes = {"h.2.wq": (8, 4), "h.0.experts.1.up": (4, 4), "embed": (7, 4)}
    for name, shape in shapes.items():
        assert made.partition(name, shape).holders == expected.partition(name, shape).holders
        assert made.partition(name, shape).boxes().tolist() == expected.partition(name, shape).boxes().tolist()
    assert made.parameters == expected.parameters
    assert made.partition("h.0.experts.1.up", (4, 4)).holders == ("trainer:0", "trainer:2")


def test_numbers_that_only_the_slots_of_a_parameter_name_are_kept(tmp_path: Path) -> None:
    text = FILE.replace("tp = 2\n", "tp = 2\nshift = 2\nidle = 5\n").replace('"slots[ep]"', '"slots[(ep + shift) % 4]"')
    made = Deployment.from_toml(io.StringIO(text), config=CONFIG)
    made.to_toml(tmp_path / "rules.toml")
    tensors = {f"h.0.experts.{e}.up": (4, 4) for e in range(4)}
    for one in (made, Deployment.from_toml(tmp_path / "rules.toml")):
        assert one == made
        assert one.numbers["shift"] == 2
        assert "idle" not in one.numbers
        # Two of eight slots on each device, and the same two on the second after it.
        (last,) = one.parameters_of("trainer:3", tensors)
        assert [piece.tensor for piece in last.pieces] == ["h.0.experts.2.up", "h.0.experts.3.up"]


def test_slots_that_cannot_be_read_are_refused_with_the_parameter() -> None:
    with pytest.raises(LayoutError, match="slots"):
        FusedParameter("w", ("e.{e}",), "e", "slots[")


LLAMA = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 4}
MOE = {**LLAMA, "num_experts": 8, "vocab_size": 128}
GPUS = [f"gpu:{i}" for i in range(8)]
WRITTEN = {
    "fsdp2": lambda: fsdp2(8),
    "hsdp and tp": lambda: fsdp2(2, replicate=2, tp=2),
    "megatron": lambda: megatron.gpt(
        megatron.Ranks(16, tp=2, pp=2, ep=4, etp=1), megatron.pipeline(8, 2, 2), tied=True
    ),
    "megatron, other labels": lambda: megatron.gpt(
        megatron.Ranks(8, tp=2, pp=2), megatron.pipeline(5, 2, layout="Ettt|ttL"), world=GPUS[::-1]
    ),
    "vllm": lambda: vllm(LLAMA, tp=4, world=GPUS[:4]),
    "vllm, experts": lambda: vllm(MOE, tp=2, dp=2, pp=2, expert_parallel=True),
    "sglang, tied": lambda: sglang({**LLAMA, "tie_word_embeddings": True, "model_type": "qwen3"}, tp=2, pp=2),
    "sglang, shared": lambda: sglang({**MOE, "n_shared_experts": 1}, tp=2, fuse_shared_experts=True),
    "sglang": lambda: sglang(MOE, tp=4, ep=4, redundant=4),
    "a file": lambda: Deployment.from_toml(io.StringIO(FILE), config=CONFIG),
    "by hand": lambda: Deployment(
        ["a", 'b"\\', 3, "c"],
        {"m n": DeviceMesh((2, 2), ("x", "a.b"), ["c", 3, "a", 'b"\\']), "half": DeviceMesh((2,), ("x",), ["a", "c"])},
        {
            "it's {k}": DeploymentRule((("x",), None), "m n", at={"a.b": ["k + n", 1]}, shared=True),
            "{k}": DeploymentRule(TensorLayout((None,), unreduced=("x",)), "half", optional=True),
        },
        numbers={"where": [[0], [], [1, 0]], "n": -3, "a": []},
        default=DeploymentRule((), "half", at={"x": 1}),
        match="match",
    ),
    "replicated": lambda: Deployment(2, {}, {}, default="replicated"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_is_read_as_the_same(name: str, tmp_path: Path) -> None:
    made = WRITTEN[name]()
    made.to_toml(tmp_path / "rules.toml")
    again = Deployment.from_toml(tmp_path / "rules.toml")
    assert again == made
    assert hash(again) == hash(made)
    assert again.numbers == made.numbers
    assert again.world == made.world


def test_what_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text("kept")
    for made, message in (
        (Deployment([("a",), "b"], {}, {}), r"device \('a',\) cannot be written"),
        (Deployment(2**20 + 1, {}, {}), "the world has 1048577 devices; a rules file has up to 1048576"),
        (Deployment(1, {}, {}, numbers={"a": [2**63]}), "numbers.'a'. has 9223372036854775808, which is not a 64-bit"),
        (Deployment(["\udc80"], {}, {}), "lone surrogate"),
    ):
        with pytest.raises(LayoutError, match=message):
            made.to_toml(path)
    assert path.read_text() == "kept"
    unused = Deployment(1, DeviceMesh((1,), ("x",)), {"w": (None,)}, numbers={"n": 3, "a": [3]})
    unused.to_toml(path)
    assert Deployment.from_toml(path).numbers == {"a": (3,)}


def test_lists_that_megatron_splits() -> None:
    rules = "[rules]\n'h.{i}' = { axes = [], at = { pp = 'stage[i]' } }\n[meshes]\nm = {shape=[4], axis_names=['pp']}\n"
    for text, stages in (
        ("stage = { layers = 8, pp = 4, vpp = 2 }", megatron.pipeline(8, 4, 2)),
        ("stage = { layers = 'n', pp = 4, layout = 'Ett|t|t|ttL' }", megatron.pipeline(6, 4, layout="Ett|t|t|ttL")),
        ("stage = { layers = 10, pp = 4, first = 3, last = 3 }", megatron.pipeline(10, 4, first=3, last=3)),
    ):
        made = Deployment.from_toml(io.StringIO(f"[numbers]\nn = 6\n[lists]\n{text}\n{rules}"))
        assert made.numbers["stage"] == stages.stage


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[world]", "[mesh]\nshape = [8]\naxis_names = ['x']\n[world]", "a file of a deployment has no mesh; write"),
        ('label = "trainer:{}"', 'label = "trainer"', r"world.label must be a text with \{\}"),
        ('label = "trainer:{}"', "size = 0", "world.size must be a whole number from 1"),
        ('label = "trainer:{}"', "size = 1099511627776", "world.size must be a whole number from 1 to 1048576"),
        ('label = "trainer:{}"', "size = 4", r"meshes\['dense'\] has 8 devices, but the world has 4"),
        ('label = "trainer:{}"', "devices = ['a']\nsize = 1", "world has devices, so it cannot have 'size'"),
        ('label = "trainer:{}"', "devices = 'a'", "world.devices"),
        ('label = "trainer:{}"', "size = 1", "has 8 devices, but the world has 1"),
        ('label = "trainer:{}"', "count = 8", "unknown key 'count'"),
        ("stage = { stages", "stage = { stage", "lists.stage must be a list, or a table with stages"),
        ("stages = [2, 1]", "stages = [2, -1]", "lists.stage: counts is"),
        ("ep = 4, redundant = 4 }", "ep = 3 }", "lists.where: num_experts is 4, which is not divisible by ep, 3"),
        ('at = { pp = "stage[i]" }', "at = 3", "rule .*: at must be a table"),
        ('pp = "stage[i]" } }', 'pp = "stages[i]" } }', "names 'stages'"),
        ('pp = "stage[i]" } }', 'pp = "stage[i" } }', r"at\['pp'\]"),
        ('mesh = "dense", at', 'mash = "dense", at', "unknown key 'mash'"),
        ('name = "h.{i}.w13"', 'name = "h.w13"', "does not have the fields of the name"),
        ('stack = "e"', 'stacks = "e"', "parameters 1: unknown key 'stacks'"),
        ('shape = [2, 4]', 'shape = [2, "ep"]', "meshes.expert.shape"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(old: str, new: str, message: str) -> None:
    assert old in FILE
    with pytest.raises(ShardwiseError, match=message):
        Deployment.from_toml(io.StringIO(FILE.replace(old, new, 1)), config=CONFIG)


def test_a_layout_map_says_who_reads_the_file() -> None:
    with pytest.raises(ParseError, match=r"lists is for deployments; shardwise.deploy.Deployment.from_toml reads"):
        LayoutMap.from_toml(io.StringIO(FILE))


def test_numbers_that_no_rule_names_may_be_missing() -> None:
    file = FILE + "\n" + "[[rewrite]]\nfrom = 'a.{i}'\nto = 'h.{i}.wq'\n"
    made = Deployment.from_toml(io.StringIO(file.replace("tp = 2", "tp = 2\nwords = 'vocab_size'")), config=CONFIG)
    assert "words" not in made.numbers
    assert Rewrites.from_toml(io.StringIO(file), config=CONFIG)


class TestReports:
    SHAPES = {  # noqa: RUF012
        **{f"h.{i}.wq": ((8, 4), "float32") for i in range(3)},
        **{f"h.{i}.experts.{e}.up": ((4, 4), "float32") for i in range(3) for e in range(4)},
        "embed": ((8, 4), "float32"),
    }

    def test_bytes_of_devices_and_stages(self) -> None:
        report = Deployment.from_toml(io.StringIO(FILE), config=CONFIG).report(self.SHAPES)
        assert report.warnings == ()
        # A layer's wq is halved by tp: 64 bytes. Eight slots of experts on four ranks: 2 x 64 bytes. The embedding: 64.
        assert report.device_bytes is not None
        assert report.device_bytes.tolist() == [2 * (64 + 128) + 64] * 4 + [64 + 128 + 64] * 4
        assert report.bytes_along("pp").tolist() == [[448, 448], [256, 256]]
        assert report.bytes_along("ep", "expert").tolist() == [[256, 448]] * 4
        assert report.fullest == ("trainer:0", 448)
        assert "a device of stage 0 holds 448 B, of stage 1 256 B" in report.totals
        assert "the fullest is trainer:0, with 448 B" in report.totals
        assert report.to_dict()["meshes"]["expert"] == {"pp": 2, "ep": 4}
        assert "0% of the bytes are on every device" in str(report)
        assert report.to_html("deployment").startswith("<!DOCTYPE html>")

    def test_what_has_no_place(self) -> None:
        report = Deployment.from_toml(io.StringIO(FILE), config=CONFIG).report(
            {"h.9.wq": ((8, 4), "float32"), "norm": ((4,), "float32"), "embed": ((4,), "float32")}
        )
        assert [tensor.name for tensor in report.unplaced] == ["h.9.wq", "norm", "embed"]
        text = str(report)
        assert "the list stage has 3 entries, and none at 9" in text
        assert "'norm': no rule matches it, and there is no default\n" in f"{text}\n"
        assert "3 tensors cannot be placed: 1 of another rank, 1 without a rule, 1 of sizes that do not fit" in text
        assert "'embed' has rank 1" in text
        with pytest.raises(ShardwiseError, match="axis is 'xx'"):
            report.bytes_along("xx")


class TestCommands:
    def files(self, folder: Path) -> tuple[str, str]:
        tensors = {name: np.ones(shape, dtype) for name, (shape, dtype) in TestReports.SHAPES.items()}
        save_checkpoint(folder / "model.safetensors", tensors)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        (folder / "trainer.toml").write_text(FILE)
        return str(folder / "model.safetensors"), str(folder / "trainer.toml")

    def test_report(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        model, rules = self.files(tmp_path)
        assert main(["report", model, "--rules", rules]) == 0
        out = capsys.readouterr().out
        assert "on 8 devices by the meshes dense pp=2,dp=2,tp=2; expert pp=2,ep=4" in out
        assert "a device of stage 0 holds 448 B, of stage 1 256 B" in out
        assert main(["report", model, "--rules", rules, "--json", "--devices"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert said["device_bytes"] == [448] * 4 + [256] * 4
        assert said["meshes"]["dense"] == {"pp": 2, "dp": 2, "tp": 2}

    def test_a_mesh_cannot_be_given_too(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        model, rules = self.files(tmp_path)
        assert main(["report", model, "--rules", rules, "--mesh", "tp=8"]) == 2
        assert "of a deployment, which has meshes of its own" in capsys.readouterr().err

    @pytest.mark.parametrize("form", ["sharded", "dcp"])
    def test_files_belong_to_devices(self, tmp_path: Path, form: str) -> None:
        model, rules = self.files(tmp_path)
        assert main(["reshard", model, str(tmp_path / form), "--rules", rules, "--to", form]) == 0
        with open_checkpoint(tmp_path / form) as checkpoint:
            held: dict[str, set[str]] = {}
            for name in TestReports.SHAPES:
                tensor = checkpoint[name]
                assert (np.asarray(tensor) == 1).all()
                for piece in tensor.pieces:
                    held.setdefault(piece.path.name, set()).add(name.split(".")[1] if "." in name else "")
        # Layer 2 is on the second stage, in files of its own. Redundant experts and copies are written once, by the
        # first two devices of their stage, which hold all of it.
        assert sorted(map(sorted, held.values())) == [["", "0", "1"], ["", "0", "1"], ["2"], ["2"]]


@pytest.mark.parametrize(
    "value", ["[[[1]]]", "[[1], 2]", "[1, [2]]", "[1.5]", "[[true]]", "[{ x = 1 }]", "[[{ x = 1 }]]"]
)
def test_lists_that_are_nested_wrongly_are_refused(value: str) -> None:
    text = f"[lists]\na = {value}\n[meshes]\nm = {{ shape = [2], axis_names = ['pp'] }}\n[rules]\nw = [[]]\n"
    with pytest.raises(ParseError, match=r"^the rules file: lists.a must be a list of whole numbers, or of lists of"):
        Deployment.from_toml(io.StringIO(text))


def test_what_finds_the_fields_of_a_name_takes_linear_time() -> None:
    """Python's own search would take 2^40 steps before it came to the second alternative."""
    rules = {r"h\.{i}\.(?:(?:a|a)+b|.*w)$": DeploymentRule((None,), at={"pp": "i"})}
    deployment = Deployment(2, DeviceMesh((2,), ("pp",)), rules)
    assert deployment.partition(f"h.1.{'a' * 40}w", (4,)).holders == ("cpu:1",)
