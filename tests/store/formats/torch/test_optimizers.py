"""PyTorch's optimizers, whose files have numbers: names where exactly one assignment is possible, numbers elsewhere."""

import hashlib
import itertools
import json
import pickle
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.cli import main
from shardwise.store.formats.torch.optimizers import NamedShape, OptimizerDict, numbered_names

from ....checks import extracted
from ...torch_files import Call, save, tensor

#: Checkpoints of tiny models by PyTorch 2.15 and transformers 5.24; `expected.json` has digests of the tensors of the
#: living optimizers.
STATES = Path(__file__).parents[3] / "data" / "states"


def unpacked(case: str, folder: Path) -> Path:
    return extracted(STATES / case / "checkpoint.tar.xz", folder) / "checkpoint"


@pytest.mark.parametrize(
    ("case", "inside"),
    [
        ("torch_plain/adafactor", "checkpoint.pt"),
        ("torch_plain/muon", "checkpoint.pt"),
        ("hf/trainer_adafactor", "checkpoint-2"),
    ],
)
def test_states_are_the_parameters_own(case: str, inside: str, tmp_path: Path) -> None:
    """Of groups, two optimizers, buffers, a tied and a frozen weight; and of safetensors, which are sorted by name."""
    said = json.loads((STATES / case / "expected.json").read_text())["tensors"]
    with sw.open_checkpoint(unpacked(case, tmp_path) / inside) as checkpoint:
        assert checkpoint.doubts == ()
        for name, (dtype, shape, digest) in said.items():
            assert (checkpoint[name].dtype, checkpoint[name].shape) == (dtype, tuple(shape))
            assert hashlib.sha256(checkpoint.read(name).tobytes()).hexdigest() == digest, name
        assert {name for name in checkpoint if name.startswith("optimizer.")} <= set(said)


def assignments(
    groups: list[list[tuple[int] | None]], candidates: list[NamedShape]
) -> list[dict[tuple[int, int], str]]:
    """All assignments that keep the order within groups, by trying each label of each candidate."""
    found = []
    for labels in itertools.product(range(-1, len(groups)), repeat=len(candidates)):
        done, names = [0] * len(groups), dict[tuple[int, int], str]()
        for candidate, group in zip(candidates, labels, strict=True):
            if group < 0:
                continue
            if done[group] == len(groups[group]) or groups[group][done[group]] not in (None, candidate.shape):
                break
            names[group, done[group]] = candidate.name
            done[group] += 1
        else:
            if done == [len(group) for group in groups] and names not in found:
                found.append(names)
    return found


@pytest.mark.parametrize("seed", range(300))
def test_a_number_has_a_name_if_and_only_if_one_assignment_is_possible(seed: int) -> None:
    """Beside trying all of them: shapes are few, some parameters are in no group, some have no states yet."""
    draw = random.Random(seed)
    count = draw.randint(1, 3)
    most = draw.choice([2, 3, 4])
    candidates = [NamedShape(f"p{number}", (draw.randint(1, most),)) for number in range(draw.randint(1, 6))]
    groups: list[list[tuple[int] | None]] = [[] for _ in range(count)]
    for candidate in candidates:
        group = draw.choice([-1, *range(count), *range(count)])
        if group >= 0:
            groups[group].append(candidate.shape if draw.random() < 0.9 else None)
    if draw.random() < 0.1:
        groups[0].append((9,))
    numbers = iter(range(100))
    params = [[next(numbers) for _ in group] for group in groups]
    chain = itertools.chain.from_iterable
    shapes = dict(zip(chain(params), chain(groups), strict=True))
    state = {number: {"exp_avg": shape} for number, shape in shapes.items() if shape is not None}
    optimizer = OptimizerDict("optimizer.", state, [{} for _ in groups], params, lambda shape: shape)
    found, why = numbered_names([optimizer], candidates, is_ordered=True)
    possible = assignments(groups, candidates)
    if len(possible) == 1:
        named = {(g, i): found[0][number] for g, group in enumerate(params) for i, number in enumerate(group)}
        assert named == possible[0]
    else:
        assert found == []
        assert why


def adam(shapes: list[tuple[int, ...]], *groups: int, key: str = "m") -> dict[str, Any]:
    """The state dict of an optimizer whose moments are filled with their number."""
    ends = list(itertools.accumulate(groups or (len(shapes),)))
    lists = [list(range(begin, end)) for begin, end in zip([0, *ends], ends, strict=False)]
    state = {
        number: {"step": 2, "exp_avg": tensor(np.full(shape, number, np.float32), f"{key}{number}")}
        for number, shape in enumerate(shapes)
    }
    return {
        "state": state,
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": each} for each in lists],
    }


def model(**shapes: tuple[int, ...]) -> dict[str, Any]:
    return {name.replace("__", "."): tensor(np.zeros(shape, np.float32), f"w{name}") for name, shape in shapes.items()}


def written(path: Path, value: Any) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(save(value))
    return path


def pairs(checkpoint: sw.store.StoredCheckpoint) -> dict[str, int]:
    """The number that is in the moments of each parameter."""
    ends = (("optimizer.state.", ".exp_avg"), ("state.", ".exp_avg"))
    return {
        name.removeprefix(begin).removesuffix(end): int(checkpoint.read(name).flat[0])
        for name in checkpoint
        for begin, end in ends
        if name.startswith(begin) and name.endswith(end)
    }


TWO = {"b__weight": (4, 3), "b__bias": (4,), "a__weight": (2, 4), "a__bias": (2,)}
SHAPES = [(4, 3), (2, 4), (4,), (2,)]


def test_groups_by_rank_and_buffers_of_integers(tmp_path: Path) -> None:
    weights = {"seen": tensor(np.zeros((4,), np.int64), "n"), **model(**TWO)}
    path = written(tmp_path / "run.pt", {"net": weights, "optim": adam(SHAPES, 2, 2), "epoch": 3})
    with sw.open_checkpoint(path) as checkpoint:
        assert checkpoint.doubts == ()
        names = {name: int(checkpoint.read(name).flat[0]) for name in checkpoint if name.endswith("exp_avg")}
        order = ("b.weight", "a.weight", "b.bias", "a.bias")
        assert names == {f"optim.state.{name}.exp_avg": number for number, name in enumerate(order)}
        step = checkpoint["optim.state.a.bias.step"]
        assert (step.dtype, step.shape, step.read().item()) == ("float32", (), 2)
        values = {name: held.value() for name, held in checkpoint.objects.items()}
        assert values["optim.param_groups.0.params"] == ["b.weight", "a.weight"]
        assert values["optim.param_groups.1.betas"] == (0.9, 0.99)
        assert values["epoch"] == 3


@pytest.mark.parametrize(
    ("weights", "optimizer", "why"),
    [
        # Nothing says which of the three is frozen.
        (model(b=(3,), a=(3,), c=(3,)), adam([(3,), (3,)]), "number 0 may be any of 'b', 'a'"),
        # Nor which of two alike is in which group.
        (model(b=(3,), a=(3,)), adam([(3,), (3,)], 1, 1), "number 0 may be any of 'b', 'a'"),
        # Sorted names do not say the order of modules.
        (model(a=(3,), b=(3,)), adam([(3,), (3,)]), r"of shape \(3,\) may be any of 'a', 'b'"),
        (model(b=(3,), a=(4,)), adam([(4,), (3,)]), "do not fit the model's parameters in their order"),
        (model(b=(3,), a=(4,)), adam([(3,), (4,), (4,)]), "do not fit the model's parameters in their order"),
        (model(a=(3,), b=(4,)), adam([(3,), (5,)]), "which no weight has"),
    ],
)
def test_what_is_not_certain_keeps_its_numbers(weights: Any, optimizer: Any, why: str, tmp_path: Path) -> None:
    path = written(tmp_path / "run.pt", {"model": weights, "optimizer": optimizer})
    with sw.open_checkpoint(path) as checkpoint:
        (doubt,) = checkpoint.doubts
        assert pairs(checkpoint) == {f"{number}": number for number in range(len(optimizer["state"]))}
    assert re.search(why, doubt), doubt
    assert "parameter_names" in doubt


def test_numbers_are_not_those_of_a_list_of_parameters(tmp_path: Path) -> None:
    """A model with a `ParameterList`, whose parameters have numbers for names: another number is not theirs."""
    weights = {**model(b=(3,)), **model(list__0=(3,), list__1=(3,), a=(3,))}
    path = written(tmp_path / "run.pt", {"model": weights, "optimizer": adam([(3,), (3,), (3,)])})
    with sw.open_checkpoint(path) as checkpoint:
        assert "keep their numbers" in checkpoint.doubts[0]
        assert pairs(checkpoint) == {"0": 0, "1": 1, "2": 2}
        assert not any(one.weight and one.states for one in checkpoint.training.parameters.values())
    # A model that is one such list, whose parameters are in another order in the groups, or partly frozen.
    for groups in ((1, 1, 1), (2,)):
        moments = adam([(3,)] * sum(groups), *groups)
        path = written(tmp_path / "run.pt", {"model": model(**{"0": (3,), "1": (3,), "2": (3,)}), "optimizer": moments})
        with sw.open_checkpoint(path) as checkpoint:
            assert "keep their numbers" in checkpoint.doubts[0]
            assert pairs(checkpoint) == {f"number_{number}": number for number in range(sum(groups))}
            assert not any(one.weight and one.states for one in checkpoint.training.parameters.values())
    # In one group they are in the order of the model.
    path = written(tmp_path / "run.pt", {"model": model(**{"1": (3,), "0": (3,)}), "optimizer": adam([(3,), (3,)])})
    with sw.open_checkpoint(path) as checkpoint:
        assert not checkpoint.doubts
        assert pairs(checkpoint) == {"1": 0, "0": 1}
        assert {name: one.weight for name, one in checkpoint.training.parameters.items()} == {
            "1": "model.1",
            "0": "model.0",
        }


def test_buffers_of_norms_are_no_parameters(tmp_path: Path) -> None:
    """A `BatchNorm` has four tensors of one shape, of which two are parameters, and counts its batches."""
    weights = model(z__bias=(3,), bn__weight=(3,), bn__bias=(3,), bn__running_mean=(3,), bn__running_var=(3,))
    counted = {**weights, "bn.num_batches_tracked": tensor(np.zeros((), np.int64), "n")}
    three = adam([(3,), (3,), (3,)])
    with sw.open_checkpoint(written(tmp_path / "run.pt", {"model": counted, "optimizer": three})) as checkpoint:
        assert not checkpoint.doubts
        assert pairs(checkpoint) == {"z.bias": 0, "bn.weight": 1, "bn.bias": 2}
    written(tmp_path / "two" / "model.pt", counted)
    written(tmp_path / "two" / "optimizer.pt", three)
    with sw.open_checkpoint(tmp_path / "two") as checkpoint:
        assert not checkpoint.doubts
        assert pairs(checkpoint) == {"z.bias": 0, "bn.weight": 1, "bn.bias": 2}
    with sw.open_checkpoint(written(tmp_path / "run.pt", {"model": weights, "optimizer": three})) as checkpoint:
        assert "keep their numbers" in checkpoint.doubts[0]  # Something else may have such names.


def test_sorted_names_do_where_shapes_alone_say_which_is_which(tmp_path: Path) -> None:
    path = written(tmp_path / "run.pt", {"model": model(a=(3,), b=(4,)), "optimizer": adam([(4,), (3,)])})
    with sw.open_checkpoint(path) as checkpoint:
        assert pairs(checkpoint) == {"b": 0, "a": 1}


def test_a_tied_weight_counts_once(tmp_path: Path) -> None:
    """And so does its optimizer's parameter: under the first name."""
    weights = model(z=(3, 2), b=(3,))
    path = written(tmp_path / "run.pt", {"model": {**weights, "head": weights["z"]}, "optimizer": adam([(3, 2), (3,)])})
    with sw.open_checkpoint(path) as checkpoint:
        assert checkpoint["model.head"].alias_of == "model.z"
        assert pairs(checkpoint) == {"z": 0, "b": 1}


def test_of_several_models_none_is_taken(tmp_path: Path) -> None:
    value = {"generator": model(b=(3,)), "discriminator": model(b=(3,)), "optimizer": adam([(3,)])}
    with sw.open_checkpoint(written(tmp_path / "run.pt", value)) as checkpoint:
        assert "several models: 'generator', 'discriminator'" in checkpoint.doubts[0]
        assert pairs(checkpoint) == {"0": 0}
    # But one that has the usual name is.
    value = {"ema": model(b=(3,)), "model": model(b=(3,)), "optimizer": adam([(3,)])}
    with sw.open_checkpoint(written(tmp_path / "ema.pt", value)) as checkpoint:
        assert pairs(checkpoint) == {"b": 0}


def test_an_optimizer_with_the_states_of_all_in_the_first(tmp_path: Path) -> None:
    held = adam([(3,)])
    held["state"][0] |= {"func_evals": 4, "d": tensor(np.zeros(3, np.float32), "d")}
    with sw.open_checkpoint(written(tmp_path / "run.pt", {"model": model(b=(3,)), "optimizer": held})) as checkpoint:
        assert "states of all parameters" in checkpoint.doubts[0]
        assert "optimizer.state.0.d" in checkpoint


def test_names_of_the_caller(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where nothing else says which is which, and only if they fit."""
    weights = model(c=(3,), b=(3,), a=(4,))
    path = written(tmp_path / "run.pt", {"model": weights, "optimizer": adam([(4,), (3,)])})
    with sw.open_checkpoint(path) as checkpoint:
        assert pairs(checkpoint) == {"0": 0, "1": 1}
    with sw.open_checkpoint(path, parameter_names=["a", "b"]) as checkpoint:
        assert pairs(checkpoint) == {"a": 0, "b": 1}
        assert checkpoint.doubts == ()
    for names, why in (
        (["a"], "1 name; the optimizer has 2"),
        (["a", "a"], "some of them twice"),
        (["a", "d"], "'d', which is not a parameter"),
        (["b", "a"], r"'b' of shape \(3,\) for number 0, whose states are of shape \(4,\)"),
    ):
        with pytest.raises(sw.ParseError, match=why):
            sw.open_checkpoint(path, parameter_names=names)
    with pytest.raises(TypeError, match="every item must be a string"):
        sw.open_checkpoint(path, parameter_names=["a", 1])  # type: ignore[list-item]
    alone = written(tmp_path / "optimizer.pt", adam([(4,), (3,)]))
    with sw.open_checkpoint(alone, parameter_names=["a", "b"]) as checkpoint:
        assert pairs(checkpoint) == {"a": 0, "b": 1}
    with pytest.raises(sw.ParseError, match="parameter_names is given, but"):
        sw.open_checkpoint(written(tmp_path / "model.pt", weights), parameter_names=["a"])
    sw.save_checkpoint(tmp_path / "other.safetensors", {"a": np.zeros(3)})
    with pytest.raises(sw.ParseError, match="parameter_names is given, but"):
        sw.open_checkpoint(tmp_path / "other.safetensors", parameter_names=["a"])
    # And as the command's advice says.
    assert main(["inspect", str(path), "--strict"]) == 1
    assert "--parameter-names FILE with the names in the order of the numbers settles it" in capsys.readouterr().out
    (tmp_path / "names.txt").write_text("a\nb\n")
    assert main(["inspect", str(path), "--parameter-names", str(tmp_path / "names.txt")]) == 0
    assert "optimizer.state.b.exp_avg" in capsys.readouterr().out
    target = tmp_path / "out.safetensors"
    with pytest.warns(sw.ShardwiseWarning, match="keep their numbers"):
        sw.reshard_checkpoint(path, tmp_path / "numbers.safetensors", drop="param_groups")
    options = ["--drop", "param_groups", "--quiet", "--parameter-names", str(tmp_path / "names.txt")]
    assert main(["reshard", str(path), str(target), *options]) == 0
    with sw.open_checkpoint(target) as checkpoint:
        assert pairs(checkpoint) == {"a": 0, "b": 1}


CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def trainer(folder: Path, config: dict[str, Any] | None) -> Path:
    """A folder as the Trainer's: weights sorted by name, an optimizer in the order of modules, and what lies beside."""
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (7, 2), f"{layer}mlp.down_proj.weight": (2, 4),
        f"{layer}mlp.gate_proj.weight": (4, 2), f"{layer}mlp.up_proj.weight": (4, 2),
        f"{layer}input_layernorm.weight": (2,), f"{layer}post_attention_layernorm.weight": (2,),
        f"{layer}self_attn.k_proj.weight": (2, 2), f"{layer}self_attn.o_proj.weight": (2, 2),
        f"{layer}self_attn.q_proj.weight": (2, 2), f"{layer}self_attn.v_proj.weight": (2, 2),
        "model.norm.weight": (2,),
    }  # fmt: skip
    sw.save_checkpoint(folder, {name: np.zeros(shapes[name], np.float32) for name in sorted(shapes)})
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    order = [(7, 2), (2, 2), (2, 2), (2, 2), (2, 2), (4, 2), (4, 2), (2, 4), (2,), (2,), (2,)]
    written(folder / "optimizer.pt", adam(order, 8, 3))
    written(folder / "scheduler.pt", {"last_epoch": 3, "base_lrs": [0.1, 0.1]})
    written(folder / "rng_state_1.pth", {"python": (3, (1, 2), None), "cpu": tensor(np.zeros(4, np.uint8), "r")})
    written(folder / "training_args.bin", Call("transformers.training_args", "TrainingArguments"))
    (folder / "trainer_state.json").write_text('{"global_step": 2}')
    return folder


def test_a_folder_of_the_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with sw.open_checkpoint(trainer(tmp_path / "a", CONFIG)) as checkpoint:
        layer = "model.layers.0."
        order = [
            "model.embed_tokens", *(f"{layer}self_attn.{name}_proj" for name in "qkvo"),
            *(f"{layer}mlp.{name}_proj" for name in ("gate", "up", "down")), f"{layer}input_layernorm",
            f"{layer}post_attention_layernorm", "model.norm",
        ]  # fmt: skip
        assert pairs(checkpoint) == {f"{name}.weight": number for number, name in enumerate(order)}
        assert checkpoint.format == "safetensors"
        values = {name: held.value() for name, held in checkpoint.objects.items()}
        assert values["lr_scheduler.last_epoch"] == 3
        assert values["rng.rank_1.python"] == (3, (1, 2), None)
        assert values["trainer_state"] == {"global_step": 2}
        assert checkpoint.read("rng.rank_1.cpu").tolist() == [0] * 4
    # The one file that nobody reads is said.
    assert main(["inspect", str(tmp_path / "a")]) == 0
    assert "1 file is not read, next to" in (said := capsys.readouterr().out)
    assert "training_args.bin" in said
    for name, config in (("b", None), ("c", {"model_type": "other"}), ("d", {**CONFIG, "auto_map": {}})):
        with sw.open_checkpoint(trainer(tmp_path / name, config)) as checkpoint:
            assert "nothing says in which order" in checkpoint.doubts[0]
            assert pairs(checkpoint) == {f"{number}": number for number in range(11)}
    with sw.open_checkpoint(tmp_path / "b", parameter_names=[f"{name}.weight" for name in order]) as checkpoint:
        assert pairs(checkpoint) == {f"{name}.weight": number for number, name in enumerate(order)}


def test_folders_of_a_model_and_its_optimizers(tmp_path: Path) -> None:
    """As accelerate writes them: by number beside a state dict in its own order, by name, and several of them."""
    written(tmp_path / "a/pytorch_model.bin", model(**TWO))
    written(tmp_path / "a/optimizer.bin", adam(SHAPES, 2, 2))
    with sw.open_checkpoint(tmp_path / "a") as checkpoint:
        assert pairs(checkpoint) == {"b.weight": 0, "a.weight": 1, "b.bias": 2, "a.bias": 3}
        assert "b.weight" in checkpoint
    by_name = {"state": {"w": adam([(3,)])["state"][0]}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}
    written(tmp_path / "b/pytorch_model_fsdp.bin", model(w=(3,)))
    written(tmp_path / "b/optimizer.bin", by_name)
    with sw.open_checkpoint(tmp_path / "b") as checkpoint:
        assert pairs(checkpoint) == {"w": 0}
        assert checkpoint.objects["optimizer.param_groups.0.params"].value() == ["w"]
    written(tmp_path / "c/model.pt", model(**TWO))
    for name, shapes in (("optimizer.bin", SHAPES[:2]), ("optimizer_1.bin", SHAPES[2:])):
        written(tmp_path / "c" / name, adam(shapes))
    with sw.open_checkpoint(tmp_path / "c") as checkpoint:
        found = [name for name in checkpoint if name.endswith("exp_avg")]
        assert found == [f"optimizer.{n}.state.{x}.{y}.exp_avg" for n, y in ((0, "weight"), (1, "bias")) for x in "ba"]
    # PyTorch's own examples of FSDP call it so.
    written(tmp_path / "d/model.pt", model(**TWO))
    written(tmp_path / "d/optim.pt", adam(SHAPES, 2, 2))
    with sw.open_checkpoint(tmp_path / "d") as checkpoint:
        assert pairs(checkpoint) == {"b.weight": 0, "a.weight": 1, "b.bias": 2, "a.bias": 3}
    # A damaged file is an error; one that no PyTorch since 1.6 wrote is among those that are not read.
    (tmp_path / "c/optimizer_1.bin").write_bytes((tmp_path / "c/optimizer_1.bin").read_bytes()[:-9])
    with pytest.raises(sw.ParseError, match="optimizer_1"):
        sw.open_checkpoint(tmp_path / "c")
    (tmp_path / "c/optimizer_1.bin").write_bytes(pickle.dumps({}, 2))
    with sw.open_checkpoint(tmp_path / "c") as checkpoint:
        assert not any(name.startswith("optimizer.1.") for name in checkpoint)


@pytest.mark.parametrize(("left", "message"), [(b"", "is empty"), (bytes(4096), "is filled with zeros")])
def test_an_optimizer_that_was_not_copied_as_a_whole_is_refused(left: bytes, message: str, tmp_path: Path) -> None:
    """It would else be one of the files that are not read."""
    written(tmp_path / "model.pt", model(**TWO))
    (tmp_path / "optimizer.pt").write_bytes(left)
    with pytest.raises(sw.ParseError, match=rf"optimizer\.pt: {message}"):
        sw.open_checkpoint(tmp_path)


def test_a_folder_of_one_file_with_its_optimizer_numbered_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of FSDP's full state dicts: the second is the same optimizer, and is named as not read."""
    by_name = {"state": {"w": adam([(3,)])["state"][0]}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}
    written(tmp_path / "a/checkpoint.pt", {"model": model(w=(3,)), "optimizer": by_name})
    written(tmp_path / "a/optimizer_by_number.pt", adam([(3,)]))
    with sw.open_checkpoint(tmp_path / "a") as checkpoint:
        assert pairs(checkpoint) == {"w": 0}
    with pytest.warns(sw.ShardwiseWarning, match=r"1 file is not read.*optimizer_by_number\.pt"):
        report = sw.reshard_checkpoint(tmp_path / "a", tmp_path / "new.pt", sync=False)
    assert [(each.kind, each.names) for each in report.left_out] == [("beside", ("optimizer_by_number.pt",))]
    command = ["reshard", str(tmp_path / "a"), str(tmp_path / "again.pt"), "--strict"]
    assert main(command) == 1
    assert "'optimizer_by_number.pt'" in capsys.readouterr().err
    # With another file nothing says which of them is the checkpoint.
    written(tmp_path / "a/other.pt", model(w=(3,)))
    with pytest.raises(sw.ParseError, match="and nothing says which belong together"):
        sw.open_checkpoint(tmp_path / "a")


def test_folders_of_distributed_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name, tensors in (
        ("pytorch_model_fsdp_0", {"model.w": np.ones((2, 3))}),
        ("optimizer_0", {"optimizer.state.w.exp_avg": np.zeros((2, 3))}),
    ):
        sw.save_checkpoint(folder / name, tensors, to="dcp")
    written(folder / "scheduler.bin", {"last_epoch": 3})
    with sw.open_checkpoint(folder) as checkpoint:
        assert (checkpoint.format, list(checkpoint)) == ("dcp", ["model.w", "optimizer.state.w.exp_avg"])
        assert checkpoint.read("model.w").sum() == 6
        assert checkpoint.objects["lr_scheduler.last_epoch"].value() == 3
    assert main(["verify", str(folder), "--quiet"]) == 0
    (folder / "pytorch_model_fsdp_0").rename(tmp_path / "elsewhere")
    with pytest.raises(sw.ParseError, match="no pytorch_model_fsdp_0 with the weights"):
        sw.open_checkpoint(folder)
