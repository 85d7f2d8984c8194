"""Training states that frameworks wrote, cut and rewritten by rules for their weights: numpy says what comes out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.deploy import Deployment, DeploymentRule
from shardwise.store import DeviceReads

from ...checks import extracted, sha256_of
from ...oracle import engines
from ..torch_files import Dcp

CASES = Path(__file__).parents[2] / "data" / "states"
Arrays = dict[str, np.ndarray[Any, Any]]

#: Expected of many of these tests, which are about something else.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*match no rule, so every device:shardwise.ShardwiseWarning"),
    pytest.mark.filterwarnings("ignore:.*for single ranks of the run:shardwise.ShardwiseWarning"),
]


def unpacked(case: str, folder: Path) -> Path:
    whole = extracted(CASES / case / "checkpoint.tar.xz", folder) / "checkpoint"
    nested = whole / "checkpoint" / "step-2"
    return nested if nested.exists() else whole


def expected_of(case: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CASES / case / "expected.json").read_text())
    return found


def read_all(path: Path, **how: Any) -> Arrays:
    with sw.open_checkpoint(path, **how) as checkpoint:
        return {name: np.array(checkpoint.read(name)) for name in checkpoint}


#: For each case what weights and states are called, by the name of the parameter.
TORCH = {
    "dcp/fsdp2_nested": ("app.model.{}", "app.optim.state.{}.{}", {r"^app\.model\.": ""}),
    "torchtitan/fsdp2": ("{}", "optimizer.state.{}.{}", {}),
}


def rewrites_of(wide: int, rows: int) -> sw.Rewrites:
    """Fused, stacked and transposed, padded, and renamed."""
    return sw.Rewrites(
        [
            {
                "from": "model.layers.{i}.self_attn.{q,k}_proj.weight",
                "to": {"name": "L.{i}.qk.weight", "packed": f"(4 [q:{wide // 4} k:{wide // 8}])"},
            },
            {"from": "model.layers.{i}.mlp.up_proj.weight", "to": {"name": "L.up", "stack": "i", "transpose": True}},
            {"from": "model.embed_tokens.weight", "to": {"name": "word", "pad_to": 8}, "size": rows},
            {"from": "model.layers.{i}.input_layernorm.weight", "to": "L.{i}.norm"},
        ]
    )


def by_hand(model: Arrays) -> Arrays:
    """The same, in numpy."""
    made: Arrays = {}
    for i in range(2):
        q, k = (model.pop(f"model.layers.{i}.self_attn.{name}_proj.weight") for name in "qk")
        parts = [each.reshape(4, -1, each.shape[1]) for each in (q, k)]
        made[f"L.{i}.qk.weight"] = np.concatenate(parts, 1).reshape(-1, q.shape[1])
        made[f"L.{i}.norm"] = model.pop(f"model.layers.{i}.input_layernorm.weight")
    made["L.up"] = np.stack([model.pop(f"model.layers.{i}.mlp.up_proj.weight").T for i in range(2)])
    word = model.pop("model.embed_tokens.weight")
    made["word"] = np.pad(word, ((0, -len(word) % 8), (0, 0)))
    return {**model, **made}


def rules(devices: int) -> sw.LayoutMap:
    """Rules for the new names, without a line about states."""
    found = sw.LayoutMap(sw.DeviceMesh((devices,), ("tp",)))
    found[r"^L\.\d+\.qk\.weight$"] = ("tp", None)
    found[r"^L\.up$"] = (None, None, "tp")
    found[r"^word$"] = ("tp", None)
    found[r"down_proj\.weight$"] = (None, "tp")
    return found


@pytest.fixture(params=TORCH)
def torch_state(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, sw.Rewrites]:
    source, said = unpacked(request.param, tmp_path), expected_of(request.param)
    wide, rows = (said[f"model.{name}.weight"]["shape"][0] for name in ("layers.0.self_attn.q_proj", "embed_tokens"))
    return request.param, source, rewrites_of(wide, rows)


def models_of(case: str, source: Path) -> dict[str, Arrays]:
    """The model, and for each kind of state the model with states in the place of weights: those of the trainer."""
    weights, states, _ = TORCH[case]
    held, said = read_all(source), expected_of(case)
    found: dict[str, Arrays] = {"": {}, "exp_avg": {}, "exp_avg_sq": {}}
    for name, each in said.items():
        found[""][name] = held[weights.format(name)]
        assert sha256_of(found[""][name]) == each["weight"]
        for kind in ("exp_avg", "exp_avg_sq"):
            found[kind][name] = held[states.format(name, kind)]
            assert sha256_of(found[kind][name]) == each["state"][kind]
    return found


@pytest.mark.parametrize("form", ["dcp", "sharded", "hf"])
@pytest.mark.filterwarnings("ignore:.*are not written, because .* has no place:shardwise.ShardwiseWarning")
@pytest.mark.filterwarnings("ignore:the layouts cut:shardwise.ShardwiseWarning")
def test_moments_are_cut_and_rewritten_as_their_weights(
    torch_state: tuple[str, Path, sw.Rewrites], tmp_path: Path, form: Any
) -> None:
    case, source, rewrites = torch_state
    _, states, rename = TORCH[case]
    given: dict[str, Any] = {"rename": rename, "rewrites": rewrites, "uneven": "balanced"}
    sw.reshard_checkpoint(source, tmp_path / "out", rules(3), to=form, **given)
    models = {kind: by_hand(model) for kind, model in models_of(case, source).items()}
    with sw.open_checkpoint(tmp_path / "out") as made:
        for kind, model in models.items():
            for name, value in model.items():
                own = name if not kind else states.format(name, kind)
                assert np.array_equal(made.read(own), value), own
                if kind and name in made:
                    cuts = [sorted(piece.bounds for piece in made[each].pieces) for each in (name, own)]
                    assert cuts[0] == cuts[1], own
        steps = {float(made.read(name)) for name in made if name.endswith(".step") and "state." in name}
        assert steps == {2.0}
        assert len([name for name in made if name.endswith(".step")]) >= len(models["exp_avg"])


@pytest.mark.parametrize("devices", [2, 3])
def test_files_for_ranks_hold_the_states_of_what_they_hold(
    torch_state: tuple[str, Path, sw.Rewrites], tmp_path: Path, devices: int
) -> None:
    case, source, rewrites = torch_state
    _, states, rename = TORCH[case]
    given: dict[str, Any] = {"rename": rename, "rewrites": rewrites, "uneven": "balanced"}
    with pytest.warns(sw.ShardwiseWarning, match="not written, because .* has no place"):
        sw.reshard_checkpoint(source, tmp_path / "out", rules(devices), to="ranks", **given)
    models = {kind: by_hand(model) for kind, model in models_of(case, source).items()}
    for rank, file in enumerate(sorted((tmp_path / "out").glob("*.safetensors"))):
        held = read_all(file, part=True)
        for kind, model in models.items():
            for name, value in model.items():
                layout = rules(devices)[name]
                own = held[states.format(name, kind) if kind else name]
                box = (...,) if layout is None else layout.partition(value.shape, "balanced").box(f"cpu:{rank}")
                assert np.array_equal(own, value[box])
        # One rank's file alone is the same.
        alone = tmp_path / "alone.safetensors"
        alone.unlink(missing_ok=True)
        with pytest.warns(sw.ShardwiseWarning, match="not written, because .* has no place"):
            sw.reshard_checkpoint(source, alone, rules(devices), to="ranks", rank=rank, **given)
        assert {name: sha256_of(value) for name, value in read_all(alone, part=True).items()} == {
            name: sha256_of(value) for name, value in held.items()
        }


def test_a_device_reads_the_states_of_what_it_reads(torch_state: tuple[str, Path, sw.Rewrites]) -> None:
    case, source, _ = torch_state
    weights, states, _ = TORCH[case]
    name = "model.layers.0.self_attn.q_proj.weight"
    layouts = {weights.format(name): sw.TensorLayout(("tp", None), sw.DeviceMesh((2,), ("tp",)))}
    with sw.open_checkpoint(source) as checkpoint:
        reads: DeviceReads = sw.store.device_reads(checkpoint, layouts, "cpu:1")
        shapes = {array.name: array.shape for array in reads.arrays}
        half = checkpoint[weights.format(name)].shape[0] // 2
    assert all(shapes[states.format(name, kind)][0] == half for kind in ("exp_avg", "exp_avg_sq"))
    assert shapes[states.format(name, "step")] == ()


def test_new_names_are_where_the_old_ones_were_in_the_nested_state_dict(
    torch_state: tuple[str, Path, sw.Rewrites], tmp_path: Path
) -> None:
    """PyTorch puts a state dict together by these paths, when it is given none."""
    case, source, rewrites = torch_state
    if "dcp" in case:  # Its weights are two dicts deep.
        rewrites = sw.Rewrites(
            [{"from": f"app.model.{name}", "to": f"app.model.L.{name}"} for name in ["model.norm.{x*}"]]
        )
    sw.reshard_checkpoint(source, tmp_path / "out", to="dcp", rewrites=rewrites)
    with sw.open_checkpoint(tmp_path / "out") as made:
        paths = {name: path for name, path in made.metadata["planner_data"].items() if ".state." in name}
        weights = {name: path for name, path in made.metadata["planner_data"].items() if ".L." in name}
    if "dcp" in case:
        assert paths["app.optim.state.L.model.norm.weight.exp_avg"][:-2] == ("app", "optim", "state")
        assert paths["app.optim.state.L.model.norm.weight.exp_avg"][-2:] == ("L.model.norm.weight", "exp_avg")
        assert weights["app.model.L.model.norm.weight"] == ("app", "model", "L.model.norm.weight")
        return
    assert paths["optimizer.state.L.0.qk.weight.exp_avg"] == ("optimizer", "state.L.0.qk.weight.exp_avg")


def test_groups_name_the_new_parameters(torch_state: tuple[str, Path, sw.Rewrites], tmp_path: Path) -> None:
    case, source, rewrites = torch_state
    _, states, rename = TORCH[case]
    sw.reshard_checkpoint(source, tmp_path / "out", to="dcp", rename=rename, rewrites=rewrites)
    with sw.open_checkpoint(source) as before, sw.open_checkpoint(tmp_path / "out") as after:
        root = states.partition("state.")[0] + "param_groups."
        said = {name.removeprefix(root): one.value() for name, one in after.objects.items() if name.startswith(root)}
        old = {name.removeprefix(root): one.value() for name, one in before.objects.items() if name.startswith(root)}
    every = {parameter.partition(".exp_avg")[0] for parameter in by_hand(models_of(case, source)["exp_avg"])}
    if "0.params" in said:
        assert set(said["0.params"]) | set(said["1.params"]) == every
        assert {"L.0.qk.weight", "L.up", "word"} <= set(said["0.params"])
        numbered = {key: value for key, value in said.items() if key[0].isdigit() and not key.endswith("params")}
        assert numbered == {key: value for key, value in old.items() if not key.endswith("params")}
        # The same once more by parameter, as torchtitan asks for it.
        by_parameter = {key: value for key, value in said.items() if not key[0].isdigit()}
        assert {key.rpartition(".")[0] for key in by_parameter} in (every, set())
        group_of = {name: group for group in "01" for name in said[f"{group}.params"]}
        for key, value in by_parameter.items():
            name, _, field = key.rpartition(".")
            of_group = numbered.get(f"{group_of[name]}.{field}")
            assert value == (numbered[f"{group_of[name]}.lr"] if field == "initial_lr" else of_group), key
        return
    assert {key.rpartition(".")[0] for key in said} == every
    assert said["L.0.qk.weight.lr"] == old["model.layers.0.self_attn.k_proj.weight.lr"]
    assert said["L.1.norm.weight_decay"] == old["model.layers.1.input_layernorm.weight.weight_decay"] == 0


def of_two_groups(folder: Path, *, nested: bool) -> Path:
    """Two weights of two groups, of which one alone has weight decay."""
    made = Dcp()
    for name in "ab":
        for tensor in (name, f"optim.state.{name}.exp_avg"):
            made.add(tensor, (2, 2), [((0, 0), np.ones((2, 2), "f4"))])
    for number, (name, decay) in enumerate({"a": 0.5, "b": 0.25}.items()):
        if nested:
            made.add_object(f"optim.param_groups.{number}.params", [name])
        made.add_object(f"optim.param_groups.{number if nested else name}.weight_decay", decay)
        made.add_object(f"optim.param_groups.{number if nested else name}.lr", 1)
    return made.write(folder)


FUSED = sw.Rewrites([{"from": "{a,b}", "to": {"name": "c", "packed": "a:(2) + b:(2)"}}])


def test_what_fused_parameters_say_differently_is_left_out_and_named(tmp_path: Path) -> None:
    source = of_two_groups(tmp_path / "flat", nested=False)
    with pytest.warns(
        sw.ShardwiseWarning, match=r"1 value.*differ.*'optim.param_groups.a.weight_decay' is 0.5, .* 0.25"
    ):
        report = sw.reshard_checkpoint(source, tmp_path / "out", to="dcp", rewrites=FUSED)
    (lost,) = report.left_out
    assert lost.names == ("optim.param_groups.a.weight_decay", "optim.param_groups.b.weight_decay")
    with sw.open_checkpoint(tmp_path / "out") as made:
        assert {name: one.value() for name, one in made.objects.items()} == {"optim.param_groups.c.lr": 1}


def test_a_parameter_made_of_several_groups_is_in_one_and_that_is_said(tmp_path: Path) -> None:
    source = of_two_groups(tmp_path / "nested", nested=True)
    with pytest.warns(sw.ShardwiseWarning, match=r"'optim.param_groups.1.params' is not written: 'c' is made of"):
        sw.reshard_checkpoint(source, tmp_path / "out", to="dcp", rewrites=FUSED)
    with sw.open_checkpoint(tmp_path / "out") as made:
        assert made.objects["optim.param_groups.0.params"].value() == ["c"]
        assert "optim.param_groups.1.params" not in made.objects


def test_adafactor_of_optax_by_its_own_dims(tmp_path: Path) -> None:
    case = "orbax/adafactor_zarr"
    source, said = unpacked(case, tmp_path), expected_of(case)
    held = {name: value for name, value in read_all(source).items() if name in said}
    assert {name: sha256_of(value) for name, value in held.items()} == {
        name: one["sha256"] for name, one in said.items()
    }
    way = sw.Rewrites(
        [{"from": "params.layer_{i}.mlp.up.kernel", "to": {"name": "params.layers.{i}.up", "transpose": True}}]
    )
    layouts = sw.LayoutMap(sw.DeviceMesh((2,), ("tp",)))
    layouts[r"^params\.layers\.\d+\.up$"] = ("tp", None)
    layouts[r"^params\.embed\.embedding$"] = ("tp", None)
    sw.reshard_checkpoint(source, tmp_path / "out", layouts, rewrites=way)
    made = read_all(tmp_path / "out")
    up, new = "layer_1.mlp.up.kernel", "layers.1.up"
    assert np.array_equal(made[f"params.{new}"], held[f"params.{up}"].T)
    assert np.array_equal(made[f"opt_state.4.ema.{new}"], held[f"opt_state.4.ema.{up}"].T)
    # The larger of the two dims is averaged over, however they lie.
    for kind in ("v_row", "v_col", "v"):
        assert np.array_equal(made[f"opt_state.0.{kind}.{new}"], held[f"opt_state.0.{kind}.{up}"])
    with sw.open_checkpoint(tmp_path / "out") as checkpoint:
        pieces = {name: len(checkpoint[name].pieces) for name in checkpoint if "embed" in name or name.endswith(new)}
    rows, columns = held["params.embed.embedding"].shape
    assert rows > columns
    assert pieces["params.embed.embedding"] == pieces["opt_state.0.v_col.embed.embedding"] == 2
    assert pieces["opt_state.0.v_row.embed.embedding"] == 1
    assert pieces[f"opt_state.0.v_col.{new}"] == pieces[f"params.{new}"] == 2
    assert pieces[f"opt_state.0.v.{new}"] == pieces[f"opt_state.0.v_row.{new}"] == 1


def test_rules_of_the_package_are_for_states_as_for_weights(tmp_path: Path) -> None:
    """From Hugging Face's names to Megatron's, as `oracle/engines.py` restates them, cut for two ranks, and back."""
    weights, moments = engines.hugging_face("llama", seed=1), engines.hugging_face("llama", seed=2)
    states = {f"optimizer.state.{name}.exp_avg": value for name, value in moments.items() if name != "lm_head.weight"}
    steps = {f"{name.removesuffix('exp_avg')}step": np.float32(3) for name in states}
    sw.save_checkpoint(tmp_path / "hf", {**weights, **states, **steps}, to="dcp", sync=False)
    file, config = sw.example_rules()["torch_dist/llama"], engines.config("llama")
    layouts = sw.LayoutMap.from_toml(file, sw.DeviceMesh((2,), ("tp",)), config=config)
    rewrites = sw.Rewrites.from_toml(file, config=config)
    sw.reshard_checkpoint(tmp_path / "hf", tmp_path / "out", layouts, rewrites=rewrites, to="dcp", sync=False)
    expected = {kind: engines.ENGINES["torch_dist"]("llama", model) for kind, model in (("", weights), ("m", moments))}
    with sw.open_checkpoint(tmp_path / "out") as made:
        for name, value in expected[""].items():
            assert np.array_equal(made.read(name), value)
            state = f"optimizer.state.{name}.exp_avg"
            if state in made:
                assert np.array_equal(made.read(state), expected["m"][name])
                assert [piece.bounds for piece in made[state].pieces] == [piece.bounds for piece in made[name].pieces]
        assert sum(name.endswith("exp_avg") for name in made) == len(expected[""]) - ("output_layer.weight" in made)
    sw.reshard_checkpoint(tmp_path / "out", tmp_path / "back", rewrites=rewrites.inverse(), to="dcp", sync=False)
    back = read_all(tmp_path / "back")
    assert back.keys() == {*weights, *states, *steps}
    assert all(np.array_equal(back[name], value) for name, value in {**weights, **states, **steps}.items())


def test_a_deployment_without_a_default_places_states(tmp_path: Path) -> None:
    """Each stage has the states of its layers, in files for ranks and in what a rank extracts."""
    labels = ["a", "b", "c", "d"]
    rules = {r"^h\.(?P<i>\d+)\.w$": DeploymentRule(("tp", None), mesh="grid", at={"pp": "i"})}
    deployment = Deployment(labels, {"grid": sw.DeviceMesh((2, 2), ("pp", "tp"), labels)}, rules)
    held = {f"h.{i}.w": np.arange(12, dtype="f4").reshape(4, 3) + 100 * i for i in range(2)}
    states = {f"optimizer.state.{name}.exp_avg": value + 1000 for name, value in held.items()}
    steps = {f"optimizer.state.{name}.step": np.float32(4) for name in held}
    sw.save_checkpoint(tmp_path / "whole.safetensors", {**held, **states, **steps}, sync=False)
    sw.reshard_checkpoint(tmp_path / "whole.safetensors", tmp_path / "out", deployment, to="ranks", sync=False)
    for rank, file in enumerate(sorted((tmp_path / "out").glob("*.safetensors"))):
        stage, part = divmod(rank, 2)
        rows, name = slice(2 * part, 2 * part + 2), f"h.{stage}.w"
        found = read_all(file, part=True)
        assert found.keys() == {name, f"optimizer.state.{name}.exp_avg", f"optimizer.state.{name}.step"}
        assert np.array_equal(found[name], held[name][rows])
        assert np.array_equal(found[f"optimizer.state.{name}.exp_avg"], states[f"optimizer.state.{name}.exp_avg"][rows])
    # From memory too.
    sw.save_checkpoint(tmp_path / "again", {**held, **states, **steps}, deployment, to="ranks", sync=False)
    for file in (tmp_path / "out").glob("*.safetensors"):
        mine, theirs = (read_all(folder / file.name, part=True) for folder in (tmp_path / "again", tmp_path / "out"))
        assert {name: sha256_of(value) for name, value in mine.items()} == {
            name: sha256_of(value) for name, value in theirs.items()
        }


def test_pytorch_loads_the_new_names_into_its_nested_state_dict(tmp_path: Path) -> None:
    """The optimizer's part as `set_state_dict` takes it: states by parameter, and groups that list the parameters."""
    pytest.importorskip("torch")
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    source = unpacked("dcp/fsdp2_nested", tmp_path)
    name = "app.model.model.layers.{i}.self_attn."
    fused = {"name": f"{name}qk.weight", "packed": "(4 [q:4 k:2])"}
    rewrites = sw.Rewrites([{"from": f"{name}{{q,k}}_proj.weight", "to": fused}])
    sw.reshard_checkpoint(source, tmp_path / "out", to="dcp", rewrites=rewrites)
    state: dict[str, Any] = {}
    reader = FileSystemReader(str(tmp_path / "out"))
    _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    new = "model.layers.0.self_attn.qk.weight"
    optimizer = state["app"]["optim"]
    assert optimizer["state"][new]["exp_avg"].shape == state["app"]["model"][new].shape
    assert sorted(name for group in optimizer["param_groups"] for name in group["params"]) == sorted(optimizer["state"])
    assert optimizer["param_groups"][0]["lr"] == 0.01


def test_what_only_the_rank_that_wrote_it_can_use_is_said_where_ranks_change(tmp_path: Path) -> None:
    source = unpacked("torchtitan/fsdp2", tmp_path)
    layouts = sw.LayoutMap(sw.DeviceMesh((2,), ("tp",)))
    layouts[r"down_proj\.weight$"] = (None, "tp")
    said = r"values of a training state are for single ranks .*'dataloader.dp_rank_\{0,1\}'.*drop='(.*)' says"
    with pytest.warns(sw.ShardwiseWarning, match=said):
        report = sw.reshard_checkpoint(source, tmp_path / "one", layouts, to="dcp", uneven="ceil", sync=False)
    (text,) = (text for text in report.warnings if "for single ranks" in text)
    advice = re.search(said, text)
    assert advice is not None
    report = sw.reshard_checkpoint(
        source, tmp_path / "two", layouts, to="dcp", uneven="ceil", drop=advice[1], sync=False
    )
    assert not any("for single ranks" in text for text in report.warnings)
    with sw.open_checkpoint(tmp_path / "two") as made:
        assert not any("dp_rank" in name for name in made.objects)
    # Of a copy that is not cut anew nothing is said.
    assert sw.reshard_checkpoint(source, tmp_path / "three", to="dcp", sync=False).warnings == ()
