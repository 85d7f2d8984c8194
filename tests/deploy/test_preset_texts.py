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
from shardwise.rules.model_shapes import is_tied

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
        ("vllm(2, 2)", "only the first option, tp, can be given without its name"),
        ("vllm(2, tp=2)", "has tp twice"),
        ("vllm(tp=2, tp=2)", "has tp twice"),
        ("vllm(tp=two)", "tp is 'two'; it must be a whole number"),
        ("vllm(tp=0)", "tp is 0; it must be at least 1"),
        ("vllm(expert_parallel=1)", "expert_parallel is 1; it must be true or false"),
        ("vllm(tp=2", "expected ',' at the end"),
        ("vllm(tp=2) or 1", "expected the end at 'or 1'"),
        ("vllm(tp=__import__('os'))", r"expected ','"),
        (
            "vllm(tp=2, layers=[1, 1], pp=2)",
            "layers is .1, 1., 2 layers in all; it must have 2 stages, with 4 layers in all",
        ),
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


@pytest.mark.parametrize("text", ["megatron(tp=1)", "vllm(tp=1)", "sglang(tp=1)"])
@pytest.mark.parametrize("key", ["num_hidden_layers", "vocab_size"])
def test_a_configuration_with_a_value_of_another_type_is_an_error(text: str, key: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {key: [4]}))
    with contextlib.suppress(sw.ShardwiseError):  # What does not need the key does without it.
        preset(text, tmp_path / "config.json")
    assert main(["report", str(tmp_path / "config.json"), "--for", text]) == 2


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
    with pytest.raises(sw.LayoutError, match="has no model_type"):
        preset("vllm(2)")
    with pytest.raises(sw.LayoutError, match="vLLM has no pipeline stages for models of the type bert"):
        preset("vllm(pp=2)", {**LLAMA, "model_type": "bert"})
    with pytest.raises(sw.LayoutError, match="and these rules do not"):
        preset("sglang(tp=2)", read("deepseek-v3-0")["config"] | {"n_routed_experts": 256})
    # `GPTModel` has output_layer.weight on a last stage without the embedding.
    tied = {**LLAMA, "tie_word_embeddings": True}
    with pytest.raises(sw.LayoutError, match=r"names its copy output_layer\.weight, .*; --to megatron writes"):
        preset("megatron(tp=2, pp=2)", tied, form="ranks")
    assert preset("megatron(tp=2, pp=2)", tied, form="megatron").source == "torch_dist/llama"
    assert preset("megatron(tp=2)", tied, form="ranks").source == "megatron/llama"
    # As the refusals say.
    with pytest.warns(sw.ShardwiseWarning, match="see that each rule is right for it"):
        assert preset("vllm(2)", {**LLAMA, "model_type": "unheard_of"}, rules="vllm/llama").source == "vllm/llama"
    own = read("deepseek-v3-0")["config"] | {"n_routed_experts": 256}
    assert preset("sglang(tp=2, fuse_shared_experts=false)", own).source == "sglang/deepseek-v3"


@pytest.mark.parametrize("sizes", ["tp=2, pp=2, ep=4, etp=1", "tp=2, pp=2, ep=2", "tp=1, pp=1, ep=1, etp=2"])
@pytest.mark.parametrize(
    "model",
    ["qwen3-moe", "mixtral", "deepseek-v3", "glm4-moe", "qwen3-next", "llama4", "gpt-oss", "nemotron-h"],
)
def test_ranks_of_megatron_hold_what_its_deployment_says(model: str, sizes: str) -> None:
    """The deployment of `megatron.gpt`, which is compared with Megatron-Core, has other names for experts only."""
    config = read(f"{model}-0")["config"] | {"num_hidden_layers": 4, "layers_block_type": ["moe"] * 4}
    config |= {key: 8 for key in ("num_experts", "n_routed_experts", "num_local_experts") if key in config}
    made = preset(f"megatron({sizes})", config, form="report").layouts
    given: dict[str, Any] = {key: int(size) for key, size in (one.split("=") for one in sizes.split(", "))}
    assert isinstance(made, Deployment)
    ranks = megatron.Ranks(len(made.devices), **given)
    if model == "gpt-oss" and (ranks.etp or ranks.tp) > 1:
        return  # Experts with biases are not cut: Megatron-Core refuses.
    other = megatron.gpt(ranks, megatron.pipeline(4, pp=ranks.pp), gated=model != "nemotron-h")
    inner, hidden = 12, config["hidden_size"]
    shapes = {"linear_fc1": (2 * inner, hidden), "linear_fc2": (hidden, 2 * inner)}
    for layer in range(4):
        start = f"decoder.layers.{layer}."
        for name, shape in {
            f"{start}self_attention.linear_proj.weight": (hidden, 32),
            f"{start}mlp.router.weight": (8, hidden),
            f"{start}mlp.linear_fc1.weight": shapes["linear_fc1"],
            f"{start}mlp.shared_experts.linear_fc1.weight": shapes["linear_fc1"],
            f"{start}mlp.shared_experts.linear_fc2.weight": shapes["linear_fc2"],
            f"{start}input_layernorm.weight": (hidden,),
        }.items():
            if made.matching_rules(name):
                assert made.partition(name, shape).holders == other.partition(name, shape).holders
                assert made.partition(name, shape).holder_shape(made.partition(name, shape).holders[0]) == (
                    other.partition(name, shape).holder_shape(other.partition(name, shape).holders[0])
                )
        for kind, shape in shapes.items():
            whole = np.arange(8 * 2 * inner * hidden).reshape(8, *shape)
            expected = held(other.partition(f"{start}mlp.experts.experts.{kind}.weight", whole.shape), whole)
            firsts: dict[Any, int] = {device: int(value.min()) // whole[0].size for device, value in expected.items()}
            for expert in range(8):
                for way in (f"{kind}.weight{expert}", f"local_experts.{expert}.{kind}.weight"):
                    if model == "nemotron-h" and "local" in way:
                        continue
                    found = held(made.partition(f"{start}mlp.experts.{way}", shape), whole[expert])
                    wanted = {
                        device: value[expert - firsts[device]]
                        for device, value in expected.items()
                        if 0 <= expert - firsts[device] < len(value)
                    }
                    assert found.keys() == wanted.keys()
                    assert all(np.array_equal(found[device], wanted[device]) for device in found)


def held(partition: sw.Partition, whole: Any) -> dict[Any, Any]:
    """What each device holds of an array."""
    found = {}
    for device in partition.holders:
        found[device] = np.empty(partition.holder_shape(device), whole.dtype)
        for piece in partition.pieces(device):
            piece.view(found[device])[...] = whole[piece.box]
    return found


def test_a_stage_of_megatron_that_predicts_further_tokens_has_the_embedding_and_its_own_experts() -> None:
    """As `GPTModel` makes them: `pre_process or mtp_process` has the embedding, and experts are spread there too."""
    config = read("deepseek-v3-mtp-0")["config"] | {"num_hidden_layers": 4, "n_routed_experts": 4}
    words, layer = "embedding.word_embeddings.weight", "mtp.layers.0.transformer_layer."
    for more, first, last in (
        ("", ("cpu:0", "cpu:1"), ("cpu:2", "cpu:3")),
        (', layout="Ett|t|t|mL"', ("cpu:0", "cpu:1"), ("cpu:6", "cpu:7")),
    ):
        pp = 4 if more else 2
        made = preset(f"megatron(tp=2, pp={pp}, ep=2, etp=1{more})", config, form="report").layouts
        assert made.partition(words, (256, 32)).holders == first + last
        assert made.partition(f"{layer}mlp.router.weight", (4, 32)).holders == last
        for name in (f"{layer}mlp.shared_experts.linear_fc1.weight", "mtp.layers.0.eh_proj.weight"):
            assert made.partition(name, (32, 32)).holders == last
        for expert in range(4):
            name = f"{layer}mlp.experts.linear_fc1.weight{expert}"
            assert made.partition(name, (32, 32)).holders == (last[expert // 2],)
    none = preset('megatron(tp=2, pp=2, layout="Ett|ttL")', config, form="report").layouts
    assert none.partition(words, (256, 32)).holders == ("cpu:0", "cpu:1")
    assert preset("megatron(pp=2)", {**config, "num_nextn_predict_layers": 0}, form="report").layouts.partition(
        words, (256, 32)
    ).holders == ("cpu:0",)


def test_a_configuration_that_does_not_say_whether_it_is_tied_is_as_transformers_takes_it() -> None:
    """Released files of Gemma leave out what is the default of their class."""
    words, shape = "embedding.word_embeddings.weight", (256, 64)
    for model, ends in (("gemma2-0", 2), ("gemma3-0", 2), ("llama-0", 1), ("qwen3-0", 1)):
        config = read(model)["config"] | {"num_hidden_layers": 4}
        config.pop("tie_word_embeddings", None)
        made = preset("megatron(pp=2)", config, form="report").layouts
        assert made.partition(words, shape).holders == ("cpu:0", "cpu:1")[:ends]
    # As a type that was recorded says; and of one that is not known, as before.
    types = {"gpt2": True, "cohere": True, "arcee": False, "unheard_of": False}
    assert {kind: is_tied({"model_type": kind}) for kind in types} == types
    assert not is_tied({"model_type": "gemma2", "tie_word_embeddings": False})


def test_rules_for_experts_and_others_alike_are_refused_where_experts_are_apart(tmp_path: Path) -> None:
    config = read("qwen3-moe-0")["config"]
    own = tmp_path / "own.toml"

    def rules(*keys: str) -> str:
        own.write_text("[rules]\n" + "".join(f"'{key}' = ['tp', []]\n" for key in keys))
        return str(own)

    for text, key in (
        ("megatron(tp=2, ep=2)", r"linear_fc1\.weight\d*$"),
        ("megatron(tp=2, etp=1)", r"linear_fc1\.weight\d*$"),
        ("vllm(tp=2, expert_parallel=true)", r"w13_weight$"),
        ("sglang(tp=2, ep=2)", r"w2_weight$"),
    ):
        with pytest.raises(sw.LayoutError, match="for both experts and other tensors") as said:
            preset(text, config, rules=rules(key), form="report")
        assert repr(key) in str(said.value)
        assert r"experts\. in the key" in str(said.value)
        # As it says; and where experts are placed as others, one rule is enough.
        preset(text, config, rules=rules(rf"mlp\.experts\.{key}", r"other\.weight$"), form="report")
        preset("megatron(tp=2, etp=2)", config, rules=rules(key), form="report")


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
        (["--to", "vllm"], "--rules hf/llama has other names for the tensors"),
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
        with pytest.raises(sw.LayoutError, match=f"'{bad}': the rules .* type llama, vllm/llama, have no rule for it"):
            sw.reshard_checkpoint(path, tmp_path / "no", rules, to="vllm")
        # As the refusal says.
        sw.reshard_checkpoint(path, tmp_path / f"{number}-only", rules, to="vllm", only="down_proj", sync=False)
        sw.reshard_checkpoint(path, tmp_path / f"{number}-ranks", rules, to="ranks", sync=False)
