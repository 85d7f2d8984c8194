"""Weights and training state of a checkpoint: parameters, totals, steps, groups; and each of the two alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise import LayoutError
from shardwise.store import DamageError, Total, diff_checkpoints
from shardwise.store.tensors.training import totals_text

from ..torch_files import ones, save, tensor

WEIGHTS = {"model.a.w": np.arange(6, dtype="f4").reshape(2, 3), "model.b": np.ones(4, "f2")}
STATE = {
    "optim.state.a.w.exp_avg": np.full((2, 3), 2, "f4"),
    "optim.state.a.w.step": np.array(7, "f4"),
    "optim.state.b.exp_avg": np.full(4, 3, "f4"),
    "optim.state.b.step": np.array(8, "f4"),
    "lr_scheduler.last": np.array(9, "i8"),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    sw.save_checkpoint(tmp_path / "all.safetensors", {**WEIGHTS, **STATE}, sync=False)
    return tmp_path / "all.safetensors"


class TestTraining:
    def test_parameters(self, file: Path) -> None:
        with sw.open_checkpoint(file) as checkpoint:
            training = checkpoint.training
            assert training is checkpoint.training
            assert {name: (each.weight, dict(each.states)) for name, each in training.parameters.items()} == {
                "a.w": ("model.a.w", {"exp_avg": "optim.state.a.w.exp_avg", "step": "optim.state.a.w.step"}),
                "b": ("model.b", {"exp_avg": "optim.state.b.exp_avg", "step": "optim.state.b.step"}),
            }
            assert [training.step(name) for name in ("a.w", "b")] == [7, 8]
            assert training.group("b") is None
            assert training.left_out() == []
            with pytest.raises(KeyError):
                training.step("c")

    def test_totals(self, file: Path) -> None:
        """By hand: 6 float32 and 4 float16; 10 float32; two float32; an int64."""
        with sw.open_checkpoint(file) as checkpoint:
            assert checkpoint.training.totals == (
                *(Total("weights", 2, 32), Total("exp_avg", 2, 40), Total("step", 2, 8), Total("others", 1, 8)),
            )
            assert str(checkpoint.training) == (
                "2 weights, 32 B; training state: 5 tensors, 56 B (2 exp_avg, 40 B; 2 step, 8 B; 1 others, 8 B)"
            )
        assert totals_text([Total("weights", 3, 5)]) == ""

    def test_steps_of_optax(self, tmp_path: Path) -> None:
        """The nearest count above a moment is its own; MultiSteps counts for all."""
        inner = "opt_state.inner_opt_state.inner_states.decay.inner_state.0"
        tensors = {
            "params.a": np.ones(2),
            "params.b": np.ones(2),
            "opt_state.acc_grads.a": np.ones(2),
            f"{inner}.mu.a": np.ones(2),
            f"{inner}.count": np.array(3),
            "opt_state.acc_grads.b": np.ones(2),
            "opt_state.gradient_step": np.array(5),
        }
        sw.save_checkpoint(tmp_path / "a.safetensors", tensors, sync=False)
        with sw.open_checkpoint(tmp_path / "a.safetensors") as checkpoint:
            assert checkpoint.training.step("a") == 3
            assert checkpoint.training.step("b") == 5

    def test_groups(self, tmp_path: Path) -> None:
        groups = [{"params": ["a"], "lr": 0.1}, {"params": ["b"], "lr": 0.2}]
        one, two, moment = (tensor(ones(2), key) for key in "012")
        state = {"state": {"a": {"exp_avg": moment}}, "param_groups": groups}
        (tmp_path / "a.pt").write_bytes(save({"model": {"a": one, "b": two}, "optim": state}))
        with sw.open_checkpoint(tmp_path / "a.pt") as checkpoint:
            assert [checkpoint.training.group(name) for name in ("a", "b")] == [0, 1]

    def test_left_out(self, tmp_path: Path) -> None:
        tensors = {**WEIGHTS, **STATE, "model.ids": np.arange(3), "model.frozen": np.ones(1, "f4")}
        del tensors["model.b"]
        sw.save_checkpoint(tmp_path / "a.safetensors", tensors, sync=False)
        with sw.open_checkpoint(tmp_path / "a.safetensors") as checkpoint:
            assert [(each.kind, sorted(each.names)) for each in checkpoint.training.left_out()] == [
                ("states", ["optim.state.b.exp_avg", "optim.state.b.step"]),
                ("untrained", ["model.frozen"]),
            ]

    def test_no_state(self, tmp_path: Path) -> None:
        sw.save_checkpoint(tmp_path / "a.safetensors", WEIGHTS, sync=False)
        with sw.open_checkpoint(tmp_path / "a.safetensors") as checkpoint:
            assert not checkpoint.training.is_there
            assert str(checkpoint.training) == ""
            assert checkpoint.training.left_out() == []
            assert [total.kind for total in checkpoint.training.totals] == ["weights"]

    def test_notebook(self, file: Path) -> None:
        with sw.open_checkpoint(file) as checkpoint:
            assert "training state: 5 tensors, 56 B" in checkpoint._repr_html_()


class TestWhich:
    @pytest.mark.parametrize("to", ["safetensors", "dcp"])
    def test_reshard(self, file: Path, tmp_path: Path, to: Any) -> None:
        which: Any
        for which, expected, others in (("weights", WEIGHTS, STATE), ("state", STATE, WEIGHTS)):
            made = tmp_path / f"{which}-{to}"
            report = sw.reshard_checkpoint(file, made, to=to, which=which, sync=False, strict=True)
            assert report.warnings == ()
            (asked,) = report.left_out
            assert (asked.kind, set(asked.names)) == ("asked", set(others))
            assert asked.nbytes == sum(value.nbytes for value in others.values())
            with sw.open_checkpoint(made) as checkpoint:
                assert set(checkpoint) == set(expected)
                for name, value in expected.items():
                    assert np.array_equal(checkpoint.read(name), value)
        plan, same = (
            sw.plan_checkpoint(file, tmp_path / "p", **how)  # type: ignore[arg-type]
            for how in ({"which": "weights"}, {"only": "^model"})
        )
        assert plan.nbytes == same.nbytes

    def test_verify(self, file: Path, tmp_path: Path) -> None:
        for to in ("safetensors", "dcp"):
            made = tmp_path / f"all-{to}"
            sw.reshard_checkpoint(file, made, to=to, sync=False)
            which: Any
            for which, count, nbytes in (("all", 7, 88), ("weights", 2, 32), ("state", 5, 56)):
                report = sw.verify_checkpoint(made, which=which)
                assert (report.tensors, report.bytes, report.digests) == (count, nbytes, count)
                assert sum(total.tensors for total in report.totals) == count

    def test_damage_elsewhere(self, file: Path) -> None:
        """What is not verified may be damaged; what is verified is found."""
        with sw.open_checkpoint(file) as checkpoint:
            (piece,) = checkpoint["optim.state.b.exp_avg"].pieces
            offset = piece.extent().offset
        data = bytearray(file.read_bytes())
        data[offset] ^= 1
        file.write_bytes(data)
        assert sw.verify_checkpoint(file, which="weights").digests == 2
        for which in ("state", "all"):
            with pytest.raises(DamageError, match=r"'optim\.state\.b\.exp_avg' is not what was written"):
                sw.verify_checkpoint(file, which=which)

    def test_diff(self, file: Path, tmp_path: Path) -> None:
        other = {**WEIGHTS, **STATE, "optim.state.b.exp_avg": np.zeros(4, "f4")}
        sw.save_checkpoint(tmp_path / "b.safetensors", other, sync=False)
        found = diff_checkpoints(file, tmp_path / "b.safetensors", which="weights")
        assert not found
        assert [each.kind for each in found.left_out] == ["asked", "asked"]
        assert not found.one_sided
        for which in ("state", "all"):
            (one,) = diff_checkpoints(file, tmp_path / "b.safetensors", which=which)
            assert (one.name, one.what) == ("optim.state.b.exp_avg", "values")

    def test_one_side_alone(self, file: Path, tmp_path: Path) -> None:
        sw.save_checkpoint(tmp_path / "b.safetensors", WEIGHTS, sync=False)
        found = diff_checkpoints(file, tmp_path / "b.safetensors")
        assert {one.name for one in found} == set(STATE)
        assert found.one_sided == "the second has no training state; the first has 5 tensors of it"
        assert diff_checkpoints(tmp_path / "b.safetensors", file).one_sided.startswith("the first has no")
        with pytest.raises(LayoutError, match=r"which='state', but .*b\.safetensors has no training state"):
            diff_checkpoints(file, tmp_path / "b.safetensors", which="state")

    def test_states_of_other_names(self, file: Path, tmp_path: Path) -> None:
        """Megatron's way to call them beside PyTorch's: the states of the same weights are compared."""
        names = {
            "optim.state.a.w.exp_avg": "optimizer.state.exp_avg.a.w",
            "optim.state.b.exp_avg": "optim.state.exp_avg.b",
        }
        other = {names.get(name, name): value for name, value in {**WEIGHTS, **STATE}.items()}
        sw.save_checkpoint(tmp_path / "b.safetensors", other, sync=False)
        assert diff_checkpoints(file, tmp_path / "b.safetensors") == []
        other["optim.state.exp_avg.b"] = np.zeros(4, "f4")
        sw.save_checkpoint(tmp_path / "c.safetensors", other, sync=False)
        (one,) = diff_checkpoints(file, tmp_path / "c.safetensors")
        assert (one.name, one.what, one.count) == ("optim.state.b.exp_avg", "values", 4)

    @pytest.mark.parametrize("which", ["states", "", None, 1])
    def test_refused(self, file: Path, tmp_path: Path, which: Any) -> None:
        for ask in (
            lambda: sw.verify_checkpoint(file, which=which),
            lambda: diff_checkpoints(file, file, which=which),
            lambda: sw.reshard_checkpoint(file, tmp_path / "n", which=which),
        ):
            with pytest.raises(LayoutError, match=r"which is .*; it must be one of 'all', 'weights', 'state'"):
                ask()
        assert not (tmp_path / "n").exists()
