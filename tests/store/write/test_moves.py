"""Training states that move to another framework and another world: one call each, within a memory limit, proven."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from tests.checks import extracted
from tests.store.formats.torch.test_rank_states import EXPECTED, check, check_all
from tests.store.tasks import files
from tests.store.torch_files import save, tensor

DATA = Path(__file__).parents[2] / "data"
MEMORY, TASK = 4 << 20, 1 << 16
#: What is said of values that the new format has no place for, of groups, and of axes of a mesh that cut nothing.
pytestmark = pytest.mark.filterwarnings("ignore::shardwise.ShardwiseWarning")


@dataclass(frozen=True)
class Move:
    """A pair of formats: a checkpoint, and the calls that write it anew."""

    archive: str
    name: str
    #: Of the call, and of another one of another world.
    settings: dict[str, Any]
    other: dict[str, Any] = field(default_factory=dict)
    file: str = "new"

    def source(self, folder: Path) -> Path:
        return extracted(DATA / self.archive, folder / "source") / self.name

    def made(self, source: Path, target: Path, other: bool = False, **more: Any) -> sw.store.WriteReport:
        settings = {**(self.other if other else self.settings), **more}
        return sw.reshard_checkpoint(source, target, **_ready(settings, source), memory=MEMORY, sync=False)


def _ready(settings: dict[str, Any], source: Path) -> dict[str, Any]:
    """The arguments of a call, of which some are said in words here: meshes, and rules of the package."""
    made = dict(settings)
    if "fsdp" in made:
        sizes = made.pop("fsdp")
        made["mesh"] = sw.DeviceMesh(sizes, ("ddp", "fsdp")[-len(sizes) :])
    if "tp" in made:
        mesh = sw.DeviceMesh(made.pop("tp"), ("tp", "dp"))
        rules, beside = sw.example_rules()["torch_dist/llama"], source.parent / "config.json"
        config = beside if beside.exists() else CONFIG
        made["layouts"] = sw.LayoutMap.from_toml(rules, mesh, config=config)
        if source.suffix == ".pt":  # The model is under `model`.
            made["rename"] = {r"^model\.": ""}
        if made.pop("renames", True):
            made["rewrites"] = sw.Rewrites.from_toml(rules, config=config)
    return made


LLAMA = "checkpoints/fsdp/llama_fsdp1.tar.xz"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 40,
}
RANKS = {"to": "fsdp2", "fsdp": (3,)}
OTHERS = {"to": "fsdp2", "fsdp": (2, 2)}
TORCH = {"to": "torch"}
STATES = "checkpoint.tar.xz", "checkpoint"
MOVES = {
    "zero3-fsdp2": Move("checkpoints/zero/zero3_fp32_sub_groups.tar.xz", "checkpoint", RANKS, OTHERS),
    "zero2-fsdp2": Move("checkpoints/zero/zero2_tp.tar.xz", "checkpoint", RANKS, OTHERS),
    "dcp-fsdp2": Move("states/dcp/fsdp2_nested/checkpoint.tar.xz", "checkpoint", RANKS, OTHERS),
    "fsdp1-megatron": Move(
        LLAMA,
        "",
        {"to": "megatron", "tp": (2, 3)},
        {"to": "megatron", "tp": (1, 2), "renames": False},
    ),
    "megatron-megatron": Move(
        "states/megatron/dp_reshardable_pp_buckets/checkpoint.tar.xz", "checkpoint", {"to": "megatron"}
    ),
    "legacy-megatron-dcp": Move("states/megatron/legacy_tp_pp/checkpoint.tar.xz", "checkpoint", {"to": "dcp"}),
    "zero3-torch": Move("checkpoints/zero/zero3_fp32_sub_groups.tar.xz", "checkpoint", TORCH, file="new.pt"),
    "fsdp1-torch": Move(LLAMA, "", TORCH, file="new.pt"),
    "dcp-torch": Move("states/dcp/fsdp2_nested/checkpoint.tar.xz", "checkpoint", TORCH, file="new.pt"),
    "megatron-torch": Move("states/megatron/dp_reshardable_tp/checkpoint.tar.xz", "checkpoint", TORCH, file="new.pt"),
}


@pytest.fixture(params=MOVES)
def move(request: pytest.FixtureRequest) -> Move:
    found: Move = MOVES[request.param]
    return found


def test_it_is_proven_and_twice_re_cut_it_is_the_same(move: Move, tmp_path: Path) -> None:
    source, new = move.source(tmp_path), tmp_path / "a" / move.file
    for name in "abc":
        (tmp_path / name).mkdir()
    move.made(source, new)
    proof = sw.verify_checkpoint(new)
    assert proof.digests or proof.crcs
    if "tp" not in move.settings:
        assert sw.diff_checkpoints(source, new) == []
    other, back = tmp_path / "b" / move.file, tmp_path / "c" / move.file
    settings = {**move.settings, **({"renames": False} if "tp" in move.settings else {})}
    is_other = bool(move.other)
    move.made(new, other, other=is_other)
    assert sw.diff_checkpoints(new, other) == []
    sw.reshard_checkpoint(other, back, **_ready(settings, other), memory=MEMORY, sync=False)
    assert files(back) == files(new)


def test_weights_and_state_apart(move: Move, tmp_path: Path) -> None:
    """Each has what the whole one has of it."""
    source, found = move.source(tmp_path), dict[str, set[str]]()
    for which in ("all", "weights", "state"):
        (tmp_path / which).mkdir()
        if which == "state" and move.archive == LLAMA and move.settings["to"] == "megatron":
            # In float32 the weights are the master copies, which Megatron needs.
            with pytest.raises(
                sw.LayoutError, match=r"no master copy, because the weight itself is the master copy.* which = 'all'"
            ):
                move.made(source, tmp_path / which / move.file, which=which)
            continue
        move.made(source, tmp_path / which / move.file, which=which)
        with sw.open_checkpoint(tmp_path / which / move.file) as checkpoint:
            found[which] = {name for name in checkpoint if "rng" not in name}
            training = checkpoint.training
            parts = [training.is_state(name) for name in checkpoint]
            assert parts.count(True) == (0 if which == "weights" else len(parts) - parts.count(False))
            assert len(training.parameters) or which == "weights"
    assert found["weights"]
    assert len(found["weights"]) < len(found["all"])


def run(folder: Path) -> Path:
    """A file of `torch.save` of 1 MB: a model with the names of Hugging Face's Llama, and its AdamW, by number."""
    rng, hidden, layers = np.random.default_rng(5), 64, 2
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (256, hidden), "lm_head.weight": (256, hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{part}_proj.weight": (hidden, hidden) for part in "qo"}
        shapes |= {f"{at}.self_attn.{part}_proj.weight": (hidden // 2, hidden) for part in "kv"}
        shapes |= {f"{at}.mlp.{part}_proj.weight": (96, hidden) for part in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj.weight": (hidden, 96)}
        shapes |= {f"{at}.{part}_layernorm.weight": (hidden,) for part in ("input", "post_attention")}
    shapes["model.norm.weight"] = (hidden,)
    keys = itertools.count()

    def array(shape: tuple[int, ...]) -> Any:
        return tensor(rng.standard_normal(shape).astype(np.float32), f"{next(keys)}")

    state = {
        number: {"step": tensor(np.float32(3), f"{next(keys)}"), "exp_avg": array(shape), "exp_avg_sq": array(shape)}
        for number, shape in enumerate(shapes.values())
    }
    group = {"lr": 0.5, "weight_decay": 0.0, "params": list(state), "param_names": list(shapes)}
    model = {name: array(shape) for name, shape in shapes.items()}
    (folder / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": hidden, "vocab_size": 256}))
    path = folder / "run.pt"
    optimizer, random = {"state": state, "param_groups": [group]}, tensor(np.arange(5056) % 251, f"{next(keys)}")
    path.write_bytes(save({"model": model, "optimizer": optimizer, "rng": {"cpu": random}}))
    return path


DYING = """
import os, signal, sys
from pathlib import Path
import shardwise as sw
from tests.store.write.test_moves import MEMORY, MOVES, TASK, _ready

def killed(done, total):
    if done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)

move, source = MOVES[sys.argv[1]], Path(sys.argv[2])
more = _ready(move.settings, source)
more |= {"memory": MEMORY, "sync": False, "threads": 1, "task_bytes": TASK, "progress": killed}
sw.reshard_checkpoint(source, sys.argv[3], **more)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
@pytest.mark.parametrize("name", ["zero3-fsdp2", "fsdp1-megatron", "legacy-megatron-dcp", "dcp-torch"])
def test_a_killed_run_goes_on(name: str, tmp_path: Path) -> None:
    move = MOVES[name]
    source, new = run(tmp_path), tmp_path / move.file
    command = [sys.executable, "-W", "ignore", "-c", DYING, name, str(source), str(new)]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], timeout=600)
    assert done.returncode == -signal.SIGKILL
    assert not new.exists()

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # Which keeps what was done; a killed run may have kept nothing yet.
        move.made(source, new, resume=True, task_bytes=TASK, threads=1, progress=stop)
    report = move.made(source, new, resume=True, task_bytes=TASK)
    assert 0 < report.bytes_resumed < report.bytes
    (tmp_path / "whole").mkdir()
    move.made(source, tmp_path / "whole" / move.file)
    assert files(new) == files(tmp_path / "whole" / move.file)
    sw.verify_checkpoint(new)


def test_a_random_state_does_not_go_to_other_ranks(tmp_path: Path) -> None:
    sw.reshard_checkpoint(run(tmp_path), tmp_path / "new", mesh=sw.DeviceMesh((3,), ("fsdp",)), to="fsdp2", sync=False)
    sw.verify_checkpoint(tmp_path / "new")
    with sw.open_checkpoint(tmp_path / "new") as checkpoint:
        assert not [name for name in checkpoint if name.startswith("rng")]


def test_fsdp1_of_6_becomes_megatrons_and_comes_back(tmp_path: Path) -> None:
    """Of the live tensors: what Megatron fuses, stacks and pads, taken apart again, for other ranks of FSDP2."""
    move = MOVES["fsdp1-megatron"]
    source = move.source(tmp_path)
    with sw.open_checkpoint(source) as checkpoint:
        check_all(checkpoint, "llama_fsdp1")
    move.made(source, tmp_path / "megatron")
    with sw.open_checkpoint(tmp_path / "megatron") as checkpoint:
        groups = [checkpoint.objects[f"optimizer.param_groups.{group}.wd_mult"].value() for group in (0, 1)]
        steps = [checkpoint.objects[f"optimizer.param_groups.{group}.step"].value() for group in (0, 1)]
        assert (groups, steps) == ([1.0, 0.0], [2.0, 2.0])
        fused = checkpoint.read("optimizer.state.exp_avg.decoder.layers.self_attention.linear_qkv.weight")
        assert fused.shape == (2, 32, 16)
    rules = sw.example_rules()["torch_dist/llama"]
    rewrites = sw.Rewrites.from_toml(rules, config=CONFIG).inverse()
    mesh = sw.DeviceMesh((4,), ("fsdp",))
    sw.reshard_checkpoint(tmp_path / "megatron", tmp_path / "back", rewrites=rewrites, mesh=mesh, to="fsdp2")
    with sw.open_checkpoint(tmp_path / "back") as checkpoint:
        for name, said in EXPECTED["llama_fsdp1"].items():
            check(checkpoint.read(name), said["weight"], name)
            for kind, held in said["state"].items():
                check(checkpoint.read(f"optimizer.state.{name}.{kind}"), held, f"{name}.{kind}")
            assert float(checkpoint.read(f"optimizer.state.{name}.step")) == 2


def test_master_copies_are_the_weights_that_pytorch_goes_on_from(tmp_path: Path) -> None:
    """Of a model in bfloat16 the rounded weights are left out, and that is said; `dtype` and `which` keep them."""
    move = MOVES["zero2-fsdp2"]
    source = move.source(tmp_path)
    said = json.loads((DATA / "checkpoints" / "zero" / "expected.json").read_text())["zero2_tp"]
    with sw.open_checkpoint(source) as checkpoint:
        dtypes = {checkpoint[name].dtype for name in said}
        assert dtypes == {"bfloat16"}
    for to, more in (("fsdp2", {"mesh": sw.DeviceMesh((2,), ("fsdp",))}), ("dcp", {}), ("torch", {})):
        report = sw.reshard_checkpoint(source, tmp_path / to, to=to, **more)  # type: ignore[arg-type]
        assert [each.kind for each in report.left_out if each.kind == "rounded"] == ["rounded"]
        with sw.open_checkpoint(tmp_path / to) as checkpoint:
            weights = checkpoint.training.names.weights
            for name, held in said.items():
                if "master" in held["state"]:
                    check(checkpoint.read(weights[name]), held["state"]["master"], name)
                for alias in held["aliases"]:
                    assert checkpoint[weights[alias]].alias_of in (name, weights[name])
            assert not [name for name in checkpoint if name.endswith(".master")]
    sw.reshard_checkpoint(source, tmp_path / "rounded", to="dcp", which="weights")
    with sw.open_checkpoint(tmp_path / "rounded") as checkpoint:
        assert {tensor.dtype for tensor in checkpoint.values()} == {"bfloat16"}


def test_the_configuration_is_where_verl_has_it(tmp_path: Path) -> None:
    source = MOVES["fsdp1-megatron"].source(tmp_path)
    (source / "huggingface").mkdir(exist_ok=True)
    (source / "huggingface" / "config.json").write_text(json.dumps(CONFIG))
    mesh = sw.DeviceMesh((2,), ("tp",))
    for name, more in (("found", {}), ("given", {"config": CONFIG}), ("folder", {"config": source})):
        rules = sw.example_rules()["torch_dist/llama"]
        sw.reshard_checkpoint(source, tmp_path / name, rules=rules, mesh=mesh, to="megatron", sync=False, **more)
    assert files(tmp_path / "found") == files(tmp_path / "given") == files(tmp_path / "folder")


def test_weights_without_dims_are_in_all_files_of_ranks(tmp_path: Path) -> None:
    """Of PyTorch's own files: the only parameter without dims, its moments, and what is made of each again."""
    whole = extracted(DATA / "states/torch_plain/adafactor/checkpoint.tar.xz", tmp_path)
    source = whole / "checkpoint" / "checkpoint.pt"
    for sizes in ((3,), (2, 2)):
        mesh = sw.DeviceMesh(sizes, ("ddp", "fsdp")[-len(sizes) :])
        sw.reshard_checkpoint(source, tmp_path / f"{len(sizes)}", mesh=mesh, to="fsdp2", sync=False)
        with sw.open_checkpoint(tmp_path / f"{len(sizes)}") as checkpoint, sw.open_checkpoint(source) as old:
            assert checkpoint["model.scale"].shape == ()
            states = {name: old[name].shape for name in old if ".state.model.scale." in name}
            assert states == {f"optimizer.state.model.scale.{kind}": () for kind in ("step", "variance")}
            assert {name: checkpoint[name].shape for name in states} == states
            row = "optimizer.state.model.embed_tokens.weight.row_var"
            assert {len(checkpoint[row].pieces), old[row].shape[1]} == {sizes[-1], 1}
        assert [
            each for each in sw.diff_checkpoints(source, tmp_path / f"{len(sizes)}") if "rng" not in str(each)
        ] == []


def test_weights_that_become_bfloat16_keep_what_they_were_as_master_copies(tmp_path: Path) -> None:
    """Megatron's states need a copy in float32: of a float32 weight that is itself, whatever `dtype` makes of it."""
    move = MOVES["fsdp1-megatron"]
    source = move.source(tmp_path)
    move.made(source, tmp_path / "float32")
    move.made(source, tmp_path / "bfloat16", dtype="bfloat16")
    with sw.open_checkpoint(tmp_path / "float32") as old, sw.open_checkpoint(tmp_path / "bfloat16") as new:
        weights = old.training.names.weights
        assert len(weights) == 9
        for name in weights.values():
            assert (new[name].dtype, old[name].dtype) == ("bfloat16", "float32")
            master = f"optimizer.state.param.{name}"
            assert new.read(master).tobytes() == old.read(master).tobytes() == old.read(name).tobytes()
            assert abs(new.read(name).astype(np.float32) - old.read(name)).max() <= abs(old.read(name)).max() / 128
    back = sw.reshard_checkpoint(tmp_path / "bfloat16", tmp_path / "back", to="megatron", dtype="float32", sync=False)
    assert back.warnings == ()
    assert sw.diff_checkpoints(tmp_path / "float32", tmp_path / "back") == []


def test_megatrons_states_alone_have_their_steps_and_groups(tmp_path: Path) -> None:
    move = MOVES["megatron-megatron"]
    source = move.source(tmp_path)
    move.made(source, tmp_path / "all")
    move.made(source, tmp_path / "state", which="state")
    assert sw.diff_checkpoints(tmp_path / "all", tmp_path / "state", which="state") == []
    with sw.open_checkpoint(tmp_path / "all") as whole, sw.open_checkpoint(tmp_path / "state") as alone:
        assert not alone.training.names.weights
        for key in ("optimizer.param_groups.0.params", "optimizer.param_groups.1.params"):
            assert alone.objects[key].value() == whole.objects[key].value()
            assert alone.objects[key].value()


@pytest.mark.parametrize(("axes", "is_idle"), [(("tp", "dp"), False), (("model", "dp"), True)])
def test_ranks_of_data_parallelism_are_no_doubt_of_megatrons_files(
    axes: tuple[str, str], is_idle: bool, tmp_path: Path
) -> None:
    """They hold nothing of their own there; a mesh of which no axis is used has a wrong name."""
    move = MOVES["fsdp1-megatron"]
    source = move.source(tmp_path)
    rules = sw.example_rules()["torch_dist/llama"]
    layouts = sw.LayoutMap.from_toml(rules, sw.DeviceMesh((2, 3), ("tp", "dp")), config=CONFIG)
    if is_idle:
        layouts = sw.LayoutMap(sw.DeviceMesh((2, 3), axes), default="replicated")
    rewrites = sw.Rewrites.from_toml(rules, config=CONFIG)
    report = sw.reshard_checkpoint(source, tmp_path / "new", layouts, rewrites=rewrites, to="megatron", sync=False)
    assert [each.names for each in report.left_out if each.kind == "axes"] == [("model",), ("dp",)] * is_idle


def test_groups_are_there_by_number_and_by_parameter(tmp_path: Path) -> None:
    """PyTorch's nested and flattened state dicts have them so, the second in torchtitan; read again they are one."""
    move = MOVES["zero2-fsdp2"]
    source = move.source(tmp_path)
    sw.reshard_checkpoint(source, tmp_path / "dcp", to="dcp", sync=False)
    with sw.open_checkpoint(tmp_path / "dcp") as checkpoint:
        said = {name.partition("param_groups.")[2]: held.value() for name, held in checkpoint.objects.items()}
        trained = [name for name, one in checkpoint.training.parameters.items() if one.states]
    numbered = {number: said[f"{number}.params"] for number in (0, 1)}
    assert sorted(numbered[0] + numbered[1]) == sorted(trained)
    for number, names in numbered.items():
        own = {key.partition(".")[2] for key in said if key.startswith(f"{number}.")} - {"params"}
        for name in names:
            assert {key: said[f"{name}.{key}"] for key in own} == {key: said[f"{number}.{key}"] for key in own}
            asked = {"initial_lr", "foreach", "maximize", "capturable", "differentiable", "fused", "amsgrad"}
            assert asked <= {key.removeprefix(f"{name}.") for key in said}
            assert said[f"{name}.initial_lr"] == said[f"{number}.lr"]
    for to in ("torch", "universal"):
        for name, path in (("a", source), ("b", tmp_path / "dcp")):
            (tmp_path / to / name).mkdir(parents=True)
            sw.reshard_checkpoint(path, tmp_path / to / name / "new.pt", to=to, sync=False)
    a, b = (sw.open_checkpoint(tmp_path / "torch" / name / "new.pt") for name in "ab")
    with a, b:
        assert {name: held.value() for name, held in a.objects.items() if "param_groups" in name} == {
            name: held.value() for name, held in b.objects.items() if "param_groups" in name
        }
    # What has them by parameter only, as torchtitan's own, becomes groups again.
    by_parameter = {"drop": r"param_groups\.\d+\."}
    sw.reshard_checkpoint(tmp_path / "dcp", tmp_path / "flat", to="dcp", sync=False, **by_parameter)  # type: ignore[arg-type]
    sw.reshard_checkpoint(tmp_path / "flat", tmp_path / "flat.pt", sync=False)
    with sw.open_checkpoint(tmp_path / "flat.pt") as checkpoint:
        found = [sorted(checkpoint.objects[f"optimizer.param_groups.{at}.params"].value()) for at in (0, 1)]
        assert sorted(found) == sorted(map(sorted, numbered.values()))


def test_torchtitans_groups_become_megatrons(tmp_path: Path) -> None:
    move = MOVES["fsdp1-megatron"]
    source = move.source(tmp_path)
    sw.reshard_checkpoint(source, tmp_path / "dcp", to="dcp", drop=r"^rng[.]", sync=False)
    flat = {"drop": r"param_groups\.\d+\.|^lr_scheduler"}
    sw.reshard_checkpoint(tmp_path / "dcp", tmp_path / "flat", to="dcp", sync=False, **flat)  # type: ignore[arg-type]
    for name, path in (("a", source), ("b", tmp_path / "flat")):
        (tmp_path / name).mkdir()
        (path / "config.json").write_text(json.dumps(CONFIG))
        move.made(path, tmp_path / name / "new")
    a, b = (sw.open_checkpoint(tmp_path / name / "new") for name in "ab")
    with a, b:
        for key in ("lr", "weight_decay", "betas", "wd_mult", "step", "params"):
            for number in (0, 1):
                name = f"optimizer.param_groups.{number}.{key}"
                assert a.objects[name].value() == b.objects[name].value()
        assert not [name for name in b.objects if name.endswith("weight.lr")]
