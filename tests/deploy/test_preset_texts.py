"""Presets by one short text: each rank has what the engine's own model looks for, and refusals say what there is."""

from __future__ import annotations

import contextlib
import copy
import glob
import io
import json
import pickle
import random
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import shardwise as sw
from shardwise.cli import main
from shardwise.deploy import Deployment, DeploymentRule, megatron, preset
from shardwise.deploy.notation import parse_call

from ..oracle.families.models import DATA, digest, numbered, read

#: The models of which vLLM was asked for stages, or for experts of their own, and how. It refuses a stage of tiny
#: models of GLM and Nemotron-H in which no layer has experts.
STAGED = [
    (file.name.removesuffix(".json.gz"), how)
    for file in sorted(DATA.glob("*-0.json.gz"))
    for how, one in read(file.name.removesuffix(".json.gz")).get("stages", {}).get("vllm", {}).items()
    if "refused" not in one
]
LLAMA = {
    "model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64, "head_dim": 8,
    "num_hidden_layers": 4, "vocab_size": 100, "intermediate_size": 96,
}  # fmt: skip


@pytest.mark.parametrize(("model", "how"), STAGED)
def test_the_files_of_a_stage_are_what_vllm_looks_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, how: str
) -> None:
    """One command; each file has the names and the elements that vLLM's own model has on that rank, and no others.

    The names are those that `ShardedStateLoader._filter_subtensors` leaves of the state dict of the rank.
    """
    said = read(model)
    expected = said["stages"]["vllm"][how]
    tensors = {name: value.view(np.float32) for name, value in numbered(said["tensors"]).items()}
    sw.save_checkpoint(tmp_path / "hf", tensors, to="hf", sync=False)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(said["config"]))
    drop = "A_log" if "nemotron" in model else None  # vLLM computes with it.
    command = ["reshard", str(tmp_path / "hf"), str(tmp_path / "out"), "--for", f"vllm({how})", "--no-sync", "--quiet"]
    status = main([*command, *(["--drop", drop] if drop else [])])
    assert status == 0, capsys.readouterr().err
    for rank, own in enumerate(expected):
        start = f"model-pp-{rank // 2}-tp-{rank % 2}" if "pp" in how else f"model-rank-{rank}"
        state = {name: value for name, value in own.items() if value[1] is not None}
        for path in glob.glob(str(tmp_path / "out" / f"{start}-part-*.safetensors")):  # noqa: PTH207
            for name, value in load_file(path).items():
                assert [list(value.shape), digest(value.view(np.int32))] == state.pop(name), (name, rank)
        assert state == {}, rank


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("vlm(tp=2)", "there is no preset 'vlm'; there are vllm, sglang, megatron, fsdp2, transformers, maxtext"),
        ("vllm(tq=2)", "there is no option 'tq'; vllm takes tp, pp, dp, expert_parallel, placement, layers"),
        ("vllm(2, 2)", "only the first option, tp, goes without its name"),
        ("vllm(2, tp=2)", "has tp twice"),
        ("vllm(tp=2, tp=2)", "has tp twice"),
        ("vllm(tp=two)", "tp is 'two'; it must be a whole number"),
        ("vllm(tp=0)", "tp is 0; it must be at least 1"),
        ("vllm(expert_parallel=1)", "expert_parallel is 1; it must be true or false"),
        ("vllm(tp=2", "expected ',' at the end"),
        ("vllm(tp=2) or 1", "expected the end at 'or 1'"),
        ("vllm(tp=__import__('os'))", r"expected ','"),
        ("vllm(tp=2, layers=[1, 1], pp=2)", "layers is .1, 1., of 2 layers; it must be 2 stages of 4 in all"),
        ("vllm(tp=2, expert_parallel=true)", "names no experts"),
        ("megatron(tp=2, ep=2)", "ep is 2, which does not divide the model's 0 experts"),
        ("megatron(pp=3)", "4 layers are not divisible by pp, 3"),
        ("sglang(tp=3, ep=2)", "ep is 2, which does not divide tp, 3"),
        ("", "expected the name of a preset at the end"),
        ("x" * 5000, "5000 characters; at most 4096"),
    ],
)
def test_refusals_say_what_was_given_and_what_there_is(text: str, pattern: str) -> None:
    with pytest.raises(sw.ShardwiseError, match=pattern):
        preset(text, LLAMA)


def test_no_text_makes_the_parser_fail_otherwise() -> None:
    rng = random.Random(0)
    marks = "()[]=,'\"" + string.ascii_letters[:6] + "0123 \n\x00é"
    for _ in range(2000):
        text = "".join(rng.choice(marks) for _ in range(rng.randint(0, 12)))
        with contextlib.suppress(sw.ParseError):
            parse_call(text)


def test_families_without_rules_or_stages_are_refused() -> None:
    with pytest.raises(sw.LayoutError, match="no rules for models of the type unheard_of in vllm"):
        preset("vllm(2)", {**LLAMA, "model_type": "unheard_of"})
    with pytest.raises(sw.LayoutError, match="names no model_type"):
        preset("vllm(2)")
    with pytest.raises(sw.LayoutError, match="vLLM has no pipeline stages for models of the type bert"):
        preset("vllm(pp=2)", {**LLAMA, "model_type": "bert"})
    with pytest.raises(sw.LayoutError, match="which its rules here do not"):
        preset("sglang(tp=2)", read("deepseek-v3-0")["config"] | {"n_routed_experts": 256})
    # As the refusals say.
    with pytest.warns(sw.ShardwiseWarning, match="see that each rule is right for it"):
        assert preset("vllm(2)", {**LLAMA, "model_type": "unheard_of"}, rules="vllm/llama").source == "vllm/llama"
    own = read("deepseek-v3-0")["config"] | {"n_routed_experts": 256}
    assert preset("sglang(tp=2, fuse_shared_experts=false)", own).source == "sglang/deepseek-v3"


def test_ranks_of_megatron_hold_what_its_deployment_says() -> None:
    """The deployment of `megatron.gpt`, which is compared with Megatron-Core, has other names for experts only."""
    config = read("qwen3-moe-0")["config"] | {"num_hidden_layers": 4, "num_experts": 8, "mlp_only_layers": []}
    made = preset("megatron(tp=2, pp=2, ep=4, etp=1)", config, form="report").layouts
    ranks = megatron.Ranks(8, tp=2, pp=2, ep=4, etp=1)
    other = megatron.gpt(ranks, megatron.pipeline(4, pp=2))
    inner, hidden = 12, config["hidden_size"]
    for layer in range(4):
        start = f"decoder.layers.{layer}."
        for name, shape in {
            f"{start}self_attention.linear_proj.weight": (hidden, 32),
            f"{start}mlp.router.weight": (8, hidden),
            f"{start}input_layernorm.weight": (hidden,),
        }.items():
            if made.matching_rules(name):
                assert made.partition(name, shape).holders == other.partition(name, shape).holders
        for expert in range(8):
            name = f"{start}mlp.experts.linear_fc1.weight{expert}"
            stacked = other.partition(f"{start}mlp.experts.experts.linear_fc1.weight", (8, 2 * inner, hidden))
            firsts = {device: stacked.pieces(device)[0].box[0] for device in stacked.holders}
            held = [device for device, rows in firsts.items() if rows.start <= expert < rows.stop]
            assert list(made.partition(name, (2 * inner, hidden)).holders) == held


def test_coordinates_of_names_are_apart_from_rules() -> None:
    mesh = sw.DeviceMesh((2, 2), ("pp", "tp"))
    at: dict[str, dict[str, Any]] = {r"layers\.{i}\.": {"pp": "i // 2"}, "embed|norm$": {"pp": 0}}
    made = Deployment(4, mesh, {r"w$": ("tp", None), "embed|norm$": (None,), "head": (None,)}, at=at)
    assert made.partition("layers.3.w", (4, 2)).holders == ("cpu:2", "cpu:3")
    assert made.partition("norm", (4,)).holders == ("cpu:0", "cpu:1")
    assert made.partition("head", (4,)).holders == made.devices  # No coordinates: along all.
    assert made.at("layers.2.w") == {"pp": (1,)}
    # Those of a rule come first.
    own = Deployment(4, mesh, {r"w$": DeploymentRule(("tp", None), at={"pp": 0})}, at=at)
    assert own.partition("layers.3.w", (4, 2)).holders == ("cpu:0", "cpu:1")
    text = io.StringIO()
    made.to_toml(text)
    assert Deployment.from_toml(io.StringIO(text.getvalue())) == made == pickle.loads(pickle.dumps(made))
    assert copy.deepcopy(made) == eval(
        repr(made), vars(sw) | {"Deployment": Deployment, "DeploymentRule": DeploymentRule}
    )
    assert made != Deployment(4, mesh, made.rules())
    with pytest.raises(sw.LayoutError, match=r"matches 2 keys of at, but only one may match"):
        made.layout_of("layers.1.norm", 1)
    with pytest.raises(sw.LayoutError, match=r"at\['x'\] names the axis 'qq'; the meshes have pp, tp"):
        Deployment(4, mesh, {}, at={"x": {"qq": 1}})
    with pytest.raises(sw.LayoutError, match=r"for i = 9, but the axis is of size 2"):
        made.layout_of("layers.9.w", 2)
    with pytest.raises(TypeError, match=r"at\['x'\] must map the names of axes to coordinates"):
        Deployment(4, mesh, {}, at={"x": 1})  # type: ignore[dict-item]


def test_commands_take_presets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: dict[str, Any] = {
        "model.norm.weight": (64,),
        "model.embed_tokens.weight": (100, 64),
        "lm_head.weight": (100, 64),
    }
    for i in range(4):
        layer = f"model.layers.{i}."
        rows |= {f"{layer}self_attn.{x}_proj.weight": (64 if x in "qo" else 16, 64) for x in "qkvo"}
        rows |= {f"{layer}mlp.{x}_proj.weight": (64, 96) if x == "down" else (96, 64) for x in ("gate", "up", "down")}
        rows |= {f"{layer}{x}_layernorm.weight": (64,) for x in ("input", "post_attention")}
    whole = {name: value.view(np.float32) for name, value in numbered(rows).items()}
    sw.save_checkpoint(tmp_path / "hf", whole, to="hf", sync=False)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(LLAMA))
    source = str(tmp_path / "hf")
    assert main(["report", source, "--for", "vllm(tp=2, pp=2)", "--json", "--strict"]) == 0
    said = json.loads(capsys.readouterr().out)
    norm = 64 * 4
    # By hand: of 4 layers, 2 on each stage; 128 padded words over 2; the last norm.
    held = (64 + 16 + 16) * 64 // 2 + 64 * 64 // 2 + 3 * 96 * 64 // 2 + 2 * 64
    assert said["bytes_per_device"] == {"least": 4 * (2 * held + 64 * 64), "most": 4 * (2 * held + 64 * 64) + norm}
    for text, form, back in (
        ("vllm(tp=2, pp=2)", "vllm", "vllm/llama"),
        ("megatron(tp=2, pp=2)", "dcp", "torch_dist/llama"),
        ("fsdp2(3)", "sharded", None),
    ):
        target = tmp_path / form
        assert main(["plan", source, str(target), "--for", text]) == 0
        assert main(["reshard", source, str(target), "--for", text, "--no-sync", "--quiet"]) == 0
        with sw.open_checkpoint(target) as checkpoint:
            assert checkpoint.format == ("megatron" if form == "dcp" else form)
        undone = [] if back is None else ["--source-rules", back]
        command = [
            "reshard",
            str(target),
            str(tmp_path / f"{form}-back"),
            "--to",
            "hf",
            *undone,
            "--no-sync",
            "--quiet",
        ]
        assert main([*command, "--config", f"{source}/config.json"]) == 0
        assert main(["diff", source, str(tmp_path / f"{form}-back"), "--quiet"]) == 0
    assert {path.name for path in (tmp_path / "dcp").iterdir()} >= {"metadata.json", "common.pt", ".metadata"}
    one = tmp_path / "one.safetensors"
    assert main(["extract", source, str(one), "--for", "vllm(tp=2, pp=2)", "--rank", "3", "--no-sync", "--quiet"]) == 0
    assert load_file(one).keys() == load_file(tmp_path / "vllm" / "model-pp-1-tp-1-part-0.safetensors").keys()
    capsys.readouterr()
    for more, pattern in (
        (["--mesh", "tp=2"], "--mesh and --for exclude each other"),
        (["--to", "vllm"], "--rules hf/llama is not for the names of vLLM"),
    ):
        command = ["reshard", source, str(tmp_path / "no"), "--for", "transformers(tp=2)", *more]
        assert main(command) == 2
        assert pattern in capsys.readouterr().err
    assert main(["report", source]) == 2
    assert "--rules or --for is missing" in capsys.readouterr().err


def test_names_that_the_engine_does_not_have_are_refused(tmp_path: Path) -> None:
    """Of a family that is known, also names that no engine fuses: an adapter's, a tower's, another family's."""
    good = {"model.layers.0.mlp.down_proj.weight": np.ones((64, 96), "f4")}
    rules = sw.LayoutMap(sw.DeviceMesh((2,), ("tp",)), default="replicated", replicated=["tp"])
    for number, bad in enumerate(["vision_tower.proj.weight", "decoder.layers.0.mlp.linear_fc2.weight", "x"]):
        path = tmp_path / f"{number}"
        sw.save_checkpoint(path, {**good, bad: np.ones((4, 4), "f4")}, to="hf", sync=False)
        (path / "config.json").write_text(json.dumps(LLAMA))
        with pytest.raises(
            sw.LayoutError, match=f"'{bad}': in the rules .* type llama, vllm/llama, there is none for it"
        ):
            sw.reshard_checkpoint(path, tmp_path / "no", rules, to="vllm")
        # As the refusal says.
        sw.reshard_checkpoint(path, tmp_path / f"{number}-only", rules, to="vllm", only="down_proj", sync=False)
        sw.reshard_checkpoint(path, tmp_path / f"{number}-ranks", rules, to="ranks", sync=False)
