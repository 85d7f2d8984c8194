"""Recordings of what transformers loads, compared with real processes, whose ranks are kept, and with closed forms."""

from __future__ import annotations

import importlib.util
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.cli import main
from shardwise.deploy import Recording, join_manifests
from shardwise.rules.type_tensors import TypeTensors

from ..oracle.families.models import DATA, digest, numbered, read

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("shardwise.interop.transformers", reason="transformers is not installed")

#: Families of which processes of transformers have said what they hold; see `tests.oracle.families.parallel`.
LOADED = sorted(
    file.name.removesuffix(".json.gz") for file in DATA.glob("*.json.gz") if "plan" in read(file.name.split(".")[0])
)


def carried(recording: Recording, name: str, values: dict[str, Any]) -> Any:
    """A parameter as its pieces say that it is."""
    parameter = recording.parameters[name]
    flat = np.zeros(math.prod(parameter.shape), "i4")
    for piece in parameter.pieces:
        for time in range(piece.times):
            flat[piece.positions() + time * piece.apart] = values[piece.tensor][piece.box]
    return flat.reshape(parameter.shape)


@pytest.mark.heavy
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", LOADED)
def test_ranks_hold_what_real_processes_hold(name: str, ranks: int) -> None:
    said = read(name)
    kept = said["engines"]["hf"]["ranks"].get(str(ranks))
    config = said["config"] | {"architectures": [said["class"]]}
    shapes = {tensor: (tuple(shape), "float32") for tensor, shape in said["tensors"].items()}
    if kept is None or "refused" in kept:
        pytest.skip("no processes were asked, or they refused")
    recordings = transformers.record_ranks(config, ranks, tensors=shapes)
    values = numbered(said["tensors"])
    for recording, held in zip(recordings, kept, strict=True):
        for parameter, (shape, numbers) in held.items():
            made = carried(recording, parameter, values)
            assert (list(made.shape), digest(made)) == (shape, numbers), parameter
    # The closed form of the plan cuts the same boxes.
    rules, _, _ = transformers.tp_rules_of(config, "tp", {tensor: shape for tensor, (shape, _) in shapes.items()})
    layouts = sw.LayoutMap(sw.DeviceMesh((ranks,), ("tp",), range(ranks)))
    for pattern, rule in rules.items():
        layouts[pattern] = rule
    engine = join_manifests(one.manifest for one in recordings)
    for tensor, (shape, _) in shapes.items():
        layout = layouts[tensor]
        for rank in range(ranks if tensor in engine else 0):
            here, there = np.zeros(shape, bool), np.zeros(shape, bool)
            for piece in engine[tensor].pieces(rank):
                here[piece.box] = True
            for piece in [] if layout is None else layout.partition(shape, "chunk").pieces(rank):
                there[piece.box] = True
            assert np.array_equal(here, there if layout is not None else np.ones(shape, bool)), tensor


CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}


def test_expert_parallelism_gives_each_rank_whole_experts() -> None:
    """Two of four experts each, as `base_model_ep_plan` has it, beside attention that is cut by heads."""
    for rank, recording in enumerate(transformers.record_ranks(CONFIG, 2, ep=2)):
        held = {
            int(name.split(".")[5]) for name in recording.manifest if ".mlp.experts." in name and "layers.0." in name
        }
        assert held == {2 * rank, 2 * rank + 1}
        assert recording.parameters["model.layers.0.mlp.experts.gate_up_proj"].shape == (2, 32, 32)
        query = recording.manifest["model.layers.0.self_attn.q_proj.weight"].pieces(rank)[0].box
        assert (query[0].start, query[0].stop) == (16 * rank, 16 * rank + 16)
        assert len(recording.unused) == 2 * 2 * 3  # layers, experts elsewhere, their projections


def test_stages_hold_their_layers() -> None:
    first, second = transformers.record_ranks(CONFIG, pp=2)
    assert {name.split(".")[2] for name in first.manifest if ".layers." in name} == {"0"}
    assert {name.split(".")[2] for name in second.manifest if ".layers." in name} == {"1"}
    assert "model.embed_tokens.weight" in first.manifest
    assert "lm_head.weight" in second.manifest
    assert not first.manifest.keys() & second.manifest.keys()


#: Sizes of a released model, of which nothing is loaded.
LARGE = CONFIG | {
    "hidden_size": 2048,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "num_experts": 128,
    "vocab_size": 151936,
}


@pytest.mark.slow
def test_rules_of_small_models_are_the_plan_of_the_large_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`shardwise rules --record`: the boxes of every tensor are those that the closed form has for the full sizes."""
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    assert main(["rules", "--record", "transformers", str(tmp_path / "config.json")]) == 0
    text = capsys.readouterr().out
    mesh = sw.DeviceMesh((4,), ("tp",))
    learned = sw.LayoutMap.from_toml(io.StringIO(text), mesh, config=LARGE)
    planned, _, _ = transformers.tp_rules_of(LARGE, "tp")
    closed = sw.LayoutMap(mesh, default="replicated")
    closed.update(planned)
    assert text.count("[[rewrite]]") == 2  # gate and up, down; other names are the same in files and in memory
    count = 0
    with torch.device("meta"):
        import transformers as hf

        model = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**LARGE))
    for name, value in model.named_parameters():
        shape = tuple(value.shape)
        for device in mesh.devices:
            ours, theirs = learned.partition(name, shape), closed.partition(name, shape, "chunk")
            assert [piece.box for piece in ours.pieces(device)] == [piece.box for piece in theirs.pieces(device)], name
        count += 1
    assert count == 3 + 3 * 11


def test_the_command_says_which_engines_it_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert main(["rules", "--record", "triton", str(tmp_path / "config.json")]) == 2
    assert (
        "the adapters are for transformers, vllm, sglang, megatron; shardwise.record takes any"
        in capsys.readouterr().err
    )
    if importlib.util.find_spec("sglang") is None:
        assert main(["rules", "--record", "sglang", str(tmp_path / "config.json")]) == 2
        assert "--record loads with sglang itself and PyTorch: install them in one" in capsys.readouterr().err
    assert main(["rules", "--record", "transformers", str(tmp_path / "config.json"), "--axis", "a,b,c"]) == 2
    assert "recorded rules have one axis, or the axis of stages and another, as in pp,tp" in capsys.readouterr().err
    assert main(["rules", "gpt2", "--record", "transformers", str(tmp_path)]) == 2
    assert "--record and gpt2 exclude each other" in capsys.readouterr().err


def test_what_is_refused() -> None:
    with pytest.raises(sw.LayoutError, match="tp must be 1 or more, got 0"):
        transformers.record_ranks(CONFIG, 0)
    with pytest.raises(sw.LayoutError, match="give a configuration with smaller sizes"):
        transformers.record_ranks(CONFIG | {"vocab_size": 1 << 24}, 2)
    with pytest.raises(sw.LayoutError, match="cannot load the model with tp 2, ep 3, pp 1: "):
        transformers.record_ranks(CONFIG, 2, ep=3)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        with pytest.raises(sw.LayoutError, match="this process is in a process group"):
            transformers.record_ranks(CONFIG)
    finally:
        torch.distributed.destroy_process_group()


def test_the_page_says_of_each_type_with_a_plan_how_it_is_known() -> None:
    """All types of this transformers are in the table, most with rules, and it is that of what was found."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from ..oracle.families.recorded import PLANS, has_plan, table, types_table

    known = json.loads(PLANS.read_text())
    hows = list(known["types"].values())
    assert set(hows) == {"recorded", "rules", "none"}  # None differs.
    assert len(hows) - hows.count("none") >= 150
    assert hows.count("recorded") >= 30
    assert table() in (Path(__file__).parents[2] / "docs" / "proof.md").read_text()
    assert types_table() in (Path(__file__).parents[2] / "docs" / "proof.md").read_text()
    if known["transformers"] == transformers.version:
        assert {kind for kind in CONFIG_MAPPING if has_plan(CONFIG_MAPPING[kind])} == known["types"].keys()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["olmoe", "granitemoe", "qwen3_5_text", "minimax_m2", "gemma3n"])
def test_types_are_as_the_page_says(kind: str) -> None:
    """Asked again: the rules of the plan, and what two ranks load."""
    from ..oracle.families.recorded import PLANS, ask

    known = json.loads(PLANS.read_text())
    if known["transformers"] != transformers.version or kind not in known["types"]:
        pytest.skip("another version of transformers")
    assert ask(kind)[0] == known["types"][kind]


def known_types() -> list[str]:
    from shardwise.rules.model_shapes import _tables

    return sorted(_tables())


@pytest.mark.slow
@pytest.mark.parametrize("kind", known_types())
def test_tensors_of_types_are_those_of_default_configurations(kind: str) -> None:
    """At the full sizes of each type, of which nothing was learned."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from shardwise.rules.model_shapes import model_shapes

    if kind not in CONFIG_MAPPING:
        pytest.skip("this transformers does not have it")
    config = json.loads(json.dumps(CONFIG_MAPPING[kind]().to_dict(), default=str)) | {"model_type": kind}
    config["architectures"] = None
    made = {name: shape for name, (shape, _) in transformers.written_tensors(config).items()}
    assert model_shapes(config) == made


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["apertus", "cohere", "granite", "olmo2", "phi", "glm4v_moe_text"])
def test_types_whose_code_takes_a_size_of_heads_that_no_configuration_lists(kind: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from shardwise.rules.model_shapes import model_shapes

    config = CONFIG_MAPPING[kind]().to_dict() | {"model_type": kind, "head_dim": 32, "architectures": None}
    made = {name: shape for name, (shape, _) in transformers.written_tensors(config).items()}
    assert model_shapes(config) == made


@pytest.mark.slow
def test_a_recorded_file_states_the_tensors_of_its_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole way: the file of one model, then `fits` and the tensors of another one from that file alone."""
    from shardwise.rules.model_shapes import model_shapes
    from shardwise.store.learn.type_tensors import tensors_text

    config = {
        "model_type": "helium", "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8,
        "vocab_size": 480, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 3,
    }  # fmt: skip
    rules = tmp_path / "mine.toml"
    rules.write_text("[rules]\n'proj.weight' = ['tp', []]\n\n" + tensors_text(transformers.type_tensors_of(config)))
    other = config | {"hidden_size": 512, "num_hidden_layers": 7, "tie_word_embeddings": True, "attention_bias": True}
    made = {name: shape for name, (shape, _) in transformers.written_tensors(other).items()}
    assert model_shapes(other, rules) == made
    (tmp_path / "config.json").write_text(json.dumps(other))
    assert main(["fits", str(tmp_path / "config.json"), "--rules", str(rules), "--tp", "2"]) in (0, 4)
    assert "tp 2" in capsys.readouterr().out


def test_a_model_without_a_plan_is_refused_by_its_type_before_it_is_loaded() -> None:
    bloom = {"model_type": "bloom", "hidden_size": 32, "n_layer": 1, "n_head": 4, "vocab_size": 64}
    with pytest.raises(sw.LayoutError, match=r"no tensor-parallel plan for 'bloom'.*try vllm or sglang"):
        transformers.record_ranks(bloom, 2)
    assert len(transformers.record_ranks(bloom, 1)) == 1


def test_sizes_that_a_default_configuration_leaves_out_are_named() -> None:
    with pytest.raises(sw.LayoutError, match=r"n_routed_experts.* are null: give the config.json of a released model"):
        transformers.record_ranks(transformers.CONFIG_MAPPING["dots1"]().to_dict(), 2)


def test_a_model_of_the_whole_configuration_comes_before_that_of_its_text() -> None:
    config = transformers.CONFIG_MAPPING["qwen3_5"]().to_dict()
    tensors = transformers.written_tensors(config)
    assert {name.split(".")[1] for name in tensors if name.startswith("model.")} == {"language_model", "visual"}


@pytest.mark.heavy
def test_keys_that_a_models_code_asks_for_and_its_configuration_lacks_are_learned() -> None:
    # Qwen2's attention takes `head_dim`, which is no key of its configuration.
    config = transformers.CONFIG_MAPPING["qwen2"](num_hidden_layers=2).to_dict()
    table = TypeTensors(transformers.type_tensors_of(config), "it")
    for more in ({}, {"head_dim": 64}):
        held = transformers.written_tensors({**config, **more, "architectures": ["Qwen2ForCausalLM"]})
        assert table.shapes({**config, **more}) == {name: shape for name, (shape, _) in held.items()}
