"""Folders with a file for each rank and an optimizer: as trainers wrote them, in halves, mixed, and of two runs."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.interop import torch as placements
from shardwise.store.formats.torch.flat_units import wrapped_modules
from tests.checks import extracted
from tests.store.real import DATA
from tests.store.torch_files import dtensor, ones, save, tensor

FSDP = DATA / "fsdp"
EXPECTED = json.loads((FSDP / "expected.json").read_text())
CASES = list(EXPECTED)
#: Their optimizers know parameters by number.
NUMBERED = [case for case in CASES if case.startswith("verl")]


def unpacked(case: str, folder: Path) -> Path:
    return extracted(FSDP / f"{case}.tar.xz", folder / case)


def check(array: np.ndarray[Any, Any], said: dict[str, Any], name: str) -> None:
    assert (list(array.shape), array.dtype.name) == (said["shape"], said["dtype"]), name
    assert hashlib.sha256(array.tobytes()).hexdigest()[:16] == said["sha256"], name


def check_all(checkpoint: sw.store.StoredCheckpoint, case: str) -> None:
    for name, said in EXPECTED[case].items():
        check(checkpoint.read(name), said["weight"], name)
        for kind, held in said["state"].items():
            check(checkpoint.read(f"optimizer.state.{name}.{kind}"), held, f"{name}.{kind}")
        step = checkpoint.read(f"optimizer.state.{name}.step")
        assert (step.shape, step.dtype.name, float(step)) == ((), "float32", said["step"])
        assert name in checkpoint.objects[f"optimizer.param_groups.{said['group']}.params"].value()


@pytest.mark.parametrize("case", CASES)
def test_parameters_and_states_are_what_the_trainer_held(case: str, tmp_path: Path) -> None:
    """Taken from the live tensors: flat parameters with padding and without, DTensors, ShardedTensors, two copies."""
    with sw.open_checkpoint(unpacked(case, tmp_path)) as checkpoint:
        check_all(checkpoint, case)
        names = {name for name in checkpoint if not name.startswith(("optimizer.", "rng."))}
        tied = {alias for said in EXPECTED[case].values() for alias in said["aliases"]}
        assert names - set(EXPECTED[case]) <= tied
        states = {name for name in checkpoint if name.startswith("optimizer.state.")}
        kinds = ("exp_avg", "exp_avg_sq", "step")
        assert states == {f"optimizer.state.{name}.{kind}" for name in EXPECTED[case] for kind in kinds}
        assert checkpoint.objects["optimizer.param_groups.0.lr"].value() == 0.01
        assert (checkpoint.doubts, dict(checkpoint.unreadable)) == ((), {})
        # The same states by number are beside those by name.
        assert all(name.startswith("optim_world_size") for name in checkpoint.unread)
        assert bool(checkpoint.unread) == case.startswith("local")


def test_a_tied_parameter_has_its_states_under_the_first_name(tmp_path: Path) -> None:
    with sw.open_checkpoint(unpacked("verl_fsdp2_ddp", tmp_path)) as checkpoint:
        assert checkpoint["lm_head.weight"].alias_of == "model.embed_tokens.weight"
        assert len(checkpoint["optimizer.state.model.norm.weight.exp_avg"].replicas) == 2


def test_units_are_worked_out_where_the_file_does_not_say_what_was_wrapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = unpacked("verl_fsdp1", tmp_path)
    asked: list[Any] = []

    def unknown(root: Any) -> tuple[str, ...]:
        asked.append(root)
        return ()

    monkeypatch.setattr("shardwise.store.formats.torch.fsdp.wrapped_modules", unknown)
    with sw.open_checkpoint(path) as checkpoint:
        check_all(checkpoint, "verl_fsdp1")
    assert asked
    assert wrapped_modules(asked[0]) == ("", "model.layers.0", "model.layers.1")


def test_random_states_are_those_of_each_rank_and_the_schedule_is_there_once(tmp_path: Path) -> None:
    with sw.open_checkpoint(unpacked("verl_fsdp1", tmp_path)) as checkpoint:
        assert checkpoint.objects["lr_scheduler.last_epoch"].value() == 0
        assert checkpoint.objects["lr_scheduler.base_lrs"].value() == [0.01]
        for rank in range(4):
            assert checkpoint[f"rng.rank_{rank}.cpu"].shape == (5056,)
            version, numbers, gauss = checkpoint.objects[f"rng.rank_{rank}.random"].value()
            assert (version, len(numbers), gauss) == (3, 625, None)
            kind, keys, *_ = checkpoint.objects[f"rng.rank_{rank}.numpy"].value()
            assert (kind, keys.shape, keys.dtype.name) == ("MT19937", (624,), "uint32")
            # Numpy takes it.
            np.random.RandomState().set_state(checkpoint.objects[f"rng.rank_{rank}.numpy"].value())
        assert checkpoint.metadata["FSDP_version"] == 1
        # The flat parameters are the root's and the blocks'; an optimizer of another wrapping has the model's order.
        params = checkpoint.objects["optimizer.param_groups.0.params"].value()
        assert params == [name for name in checkpoint if name in EXPECTED["verl_fsdp1"]]


def remove(name: str) -> Callable[[Path, Path], object]:
    return lambda path, other: (path / name).unlink()


def take(name: str, as_name: str = "") -> Callable[[Path, Path], object]:
    return lambda path, other: shutil.copy(other / name, path / (as_name or name))


def swap(name: str) -> Callable[[Path, Path], object]:
    """Exchange the files of ranks 0 and 1."""

    def swapped(path: Path, other: Path) -> None:
        first, second = (path / name.format(rank) for rank in range(2))
        first.rename(path / "first")
        second.rename(first)
        (path / "first").rename(second)

    return swapped


def write(name: str, text: str) -> Callable[[Path, Path], object]:
    return lambda path, other: (path / name).write_text(text)


@pytest.mark.parametrize(("case", "change", "said"), [
    ("verl_fsdp1", remove("model_world_size_4_rank_3.pt"), "model_world_size_4: there is no file of rank 3"),
    ("verl_fsdp1", remove("optim_world_size_4_rank_1.pt"), "optim_world_size_4: there is no file of rank 1"),
    ("verl_fsdp1", remove("extra_state_world_size_4_rank_0.pt"), "extra_state_world_size_4: there is no file"),
    ("local_flat", remove("optim_state_dict_rank_2.pt"), "optim_state_dict: there is no file of rank 2"),
    ("accelerate", remove("optimizer_0_rank2.bin"), "optimizer_0: there is no file of rank 2"),
    ("accelerate", remove("pytorch_model_fsdp_0_rank1.bin"), "pytorch_model_fsdp_0: there is no file of rank 1"),
    ("accelerate", remove("pytorch_model_fsdp_0_rank2.bin"), "a file of rank 2|must have at most 2 ranks"),
    ("verl_fsdp1", take("optim_world_size_3_rank_0.pt"), "'optim_world_size_3_rank_0.pt' and .* are of different"),
    ("verl_fsdp1", take("model_world_size_3_rank_0.pt"), "holds checkpoints of several kinds or world sizes"),
    ("verl_fsdp1", write("fsdp_config.json", '{"world_size": 3}'), "world_size is 3, but the files are"),
    (
        "verl_fsdp1",
        take("optim_world_size_3_rank_1.pt", "optim_world_size_4_rank_1.pt"),
        "optim_world_size_4_rank_1.pt: was saved as optim_world_size_3_rank_1.pt: it is the file of another rank",
    ),
    # Flat shards and random states do not say whose they are.
    ("verl_fsdp1", swap("optim_world_size_4_rank_{}.pt"), "rank_0.pt: was saved as optim_world_size_4_rank_1.pt"),
    ("verl_fsdp1", swap("extra_state_world_size_4_rank_{}.pt"), "rank_0.pt: was saved as extra_state_world"),
    ("verl_fsdp1", swap("model_world_size_4_rank_{}.pt"), "rank_0.pt: was saved as model_world_size_4_rank_1.pt"),
    ("accelerate", swap("optimizer_0_rank{}.bin"), "rank0.bin: was saved as optimizer_0_rank1.bin"),
    (
        "verl_fsdp1",
        take("optim_world_size_3_rank_0.pt", "model_world_size_4_rank_0.pt"),
        "model_world_size_4_rank_0.pt: was saved as optim_world_size_3_rank_0.pt: it is the file of another rank",
    ),
])  # fmt: skip
def test_halves_and_mixtures_are_refused_by_name(
    case: str, change: Callable[[Path, Path], object], said: str, tmp_path: Path
) -> None:
    path, other = unpacked(case, tmp_path), unpacked("verl_fsdp1_orig_params", tmp_path)
    change(path, other)
    with pytest.raises(sw.ParseError, match=said):
        sw.open_checkpoint(path)


def test_ranks_of_another_run_are_refused_by_name(tmp_path: Path) -> None:
    """The same shapes, after another step, with another rate, or with another schedule."""
    path = tmp_path / "made"
    path.mkdir()

    def made(rank: int, step: float = 2.0, rate: float = 0.5, epoch: int = 7) -> None:
        held = dtensor(ones(2), "0", (4,), (2,), (rank,), [SHARD])
        (path / f"model_world_size_2_rank_{rank}.pt").write_bytes(save({"w": held}))
        state = {"step": tensor(np.array(step, np.float32), "1"), "exp_avg": held}
        groups = [{"lr": rate, "betas": (0.9, 0.99), "params": [0]}]
        optimizer = save({"state": {0: state}, "param_groups": groups})
        (path / f"optim_world_size_2_rank_{rank}.pt").write_bytes(optimizer)
        extra = save({"lr_scheduler": {"last_epoch": epoch}})
        (path / f"extra_state_world_size_2_rank_{rank}.pt").write_bytes(extra)

    made(0)
    made(1)
    with sw.open_checkpoint(path) as checkpoint:
        assert checkpoint.read("optimizer.state.w.exp_avg").tolist() == [0, 1, 0, 1]
    for how, said in [
        ({"step": 3.0}, "optim_world_size_2_rank_1.pt: its optimizer and .* have made different numbers of steps"),
        ({"rate": 0.25}, r"optim_world_size_2_rank_1.pt: param_groups\[0\]\['lr'\] is 0.25, but 0.5"),
        ({"epoch": 8}, "extra_state_world_size_2_rank_1.pt: 'lr_scheduler.last_epoch' is 8, but 7"),
    ]:
        made(1, **how)  # type: ignore[arg-type]
        with pytest.raises(sw.ParseError, match=said):
            sw.open_checkpoint(path)


def test_an_optimizer_of_ranks_alone_says_what_it_needs(tmp_path: Path) -> None:
    path = unpacked("verl_fsdp1", tmp_path)
    for name in path.glob("model_*"):
        name.unlink()
    with pytest.raises(sw.ParseError, match="no files of the model, which have the names and shapes"):
        sw.open_checkpoint(path)
    with pytest.raises(sw.ParseError, match="is one rank's part of an optimizer or of a run; open its folder"):
        sw.open_checkpoint(path / "optim_world_size_4_rank_0.pt")


def test_flat_parameters_without_names_are_refused(tmp_path: Path) -> None:
    path = unpacked("local_flat", tmp_path)
    for name in path.glob("optim_state_dict*"):
        name.unlink()
    with pytest.raises(
        sw.ParseError, match="'_flat_param' is a flat parameter of FSDP1, and nothing says which tensors"
    ):
        sw.open_checkpoint(path)


def test_flat_shards_that_fit_no_unit_are_unreadable_by_name(tmp_path: Path) -> None:
    """Or that fit more than one: here either of two blocks of the same size."""
    path = tmp_path / "made"
    path.mkdir()
    for rank in range(2):
        model = {
            f"{block}.{number}.w": dtensor(ones(2), "0", (4,), (2,), (rank,), [SHARD])
            for block in "ab"
            for number in range(2)
        }
        (path / f"model_world_size_2_rank_{rank}.pt").write_bytes(save(model))
        state = {number: {"exp_avg": tensor(ones(size), str(number))} for number, size in enumerate((4, 2, 2))}
        groups = [{"lr": 0.5, "params": [0, 1, 2]}]
        (path / f"optim_world_size_2_rank_{rank}.pt").write_bytes(save({"state": state, "param_groups": groups}))
    with sw.open_checkpoint(path) as checkpoint:
        assert checkpoint.read("a.0.w").tolist() == [0, 1, 0, 1]
        said = checkpoint.unreadable["optimizer.state.0.exp_avg"]
        assert "more than one way" in said
        assert not [name for name in checkpoint if name.startswith("optimizer.state")]


def test_parameters_that_may_be_either_keep_their_numbers_and_names_settle_it(tmp_path: Path) -> None:
    """Two groups, each with one of two weights of the same shape."""
    path = tmp_path / "made"
    path.mkdir()
    for rank in range(2):
        model = {name: dtensor(ones(2), name, (4,), (2,), (rank,), [SHARD]) for name in ("b", "a")}
        (path / f"model_world_size_2_rank_{rank}.pt").write_bytes(save(model))
        state = {n: {"exp_avg": dtensor(ones(2) + n, str(n), (4,), (2,), (rank,), [SHARD])} for n in range(2)}
        groups = [{"lr": 0.5, "params": [0]}, {"lr": 0.25, "params": [1]}]
        (path / f"optim_world_size_2_rank_{rank}.pt").write_bytes(save({"state": state, "param_groups": groups}))
    with sw.open_checkpoint(path) as checkpoint:
        assert checkpoint.read("optimizer.state.1.exp_avg").tolist() == [1, 2, 1, 2]
        (said,) = checkpoint.doubts
        assert "keep their numbers: number 0 may be any of 'b', 'a', by order and shapes; open_checkpoint(" in said
    with sw.open_checkpoint(path, parameter_names=["a", "b"]) as checkpoint:
        assert checkpoint.read("optimizer.state.b.exp_avg").tolist() == [1, 2, 1, 2]
        assert checkpoint.objects["optimizer.param_groups.1.params"].value() == ["b"]
    for rank in range(2):  # An optimizer that was made of pairs with names says them.
        state = {n: {"exp_avg": dtensor(ones(2) + n, str(n), (4,), (2,), (rank,), [SHARD])} for n in range(2)}
        groups = [{"params": [0], "param_names": ["a"]}, {"params": [1], "param_names": ["b"]}]
        (path / f"optim_world_size_2_rank_{rank}.pt").write_bytes(save({"state": state, "param_groups": groups}))
    with sw.open_checkpoint(path) as checkpoint:
        assert checkpoint.read("optimizer.state.b.exp_avg").tolist() == [1, 2, 1, 2]
    with pytest.raises(sw.ParseError, match=r"optim_world_size_2_rank_0.pt: parameter_names has 1 name;"):
        sw.open_checkpoint(path, parameter_names=["a"])
    with pytest.raises(sw.ParseError, match=r"parameter_names is given, but it has no optimizer whose parameters"):
        sw.open_checkpoint(unpacked("accelerate", tmp_path), parameter_names=["a"])


def test_parameters_of_no_elements_are_not_tied(tmp_path: Path) -> None:
    """Their parts are in the same place, that is nowhere."""
    shapes = {"a": (0, 2), "b": (0,), "c": (3,)}
    for rank in range(2):
        own = {name: ones(*(2 - rank if extent == 3 else extent for extent in shape)) for name, shape in shapes.items()}
        made = {name: dtensor(own[name], name, shape, (2,), (rank,), [SHARD]) for name, shape in shapes.items()}
        (tmp_path / f"model_world_size_2_rank_{rank}.pt").write_bytes(save(made))
        held = {"state": {number: {"exp_avg": value} for number, value in enumerate(made.values())}}
        groups = [{"lr": 0.5, "params": [0, 1, 2]}]
        (tmp_path / f"optim_world_size_2_rank_{rank}.pt").write_bytes(save({**held, "param_groups": groups}))
    with sw.open_checkpoint(tmp_path) as checkpoint:
        assert not checkpoint.doubts
        assert {name: checkpoint[f"optimizer.state.{name}.exp_avg"].shape for name in shapes} == shapes


SHARD = placements.Shard(0)
