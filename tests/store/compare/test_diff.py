"""Checkpoints compared: what differs, where, and what is read for it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.store.compare.values import same_values
from shardwise.store.tensors.checkpoint import StoredObject
from tests.store.tasks import mixed, mixed_rules
from tests.store.torch_files import ones, save, tensor

#: Expected of many of these tests, which are about something else.
pytestmark = pytest.mark.filterwarnings("ignore:.*match(es)? no rule:shardwise.ShardwiseWarning")


def test_a_checkpoint_that_differs_is_told_apart(tmp_path: Path) -> None:
    whole = mixed()
    sw.save_checkpoint(tmp_path / "a.safetensors", whole)
    changed = {**whole, "h.0.w": whole["h.0.w"].copy(), "flags": whole["flags"].astype("u1"), "new": np.zeros(1)}
    changed["h.0.w"][3, 5] += 1
    changed["h.0.w"][9, 0] += 1
    del changed["scalar"]
    sw.save_checkpoint(tmp_path / "b", changed, mixed_rules())
    found = {one.name: one for one in sw.diff_checkpoints(tmp_path / "a.safetensors", tmp_path / "b")}
    assert {name: one.what for name, one in found.items()} == {
        "h.0.w": "values",
        "flags": "dtype",
        "new": "missing",
        "scalar": "added",
    }
    assert (found["h.0.w"].index, found["h.0.w"].count) == ((3, 5), 2)


def test_a_comparison_reads_what_can_be_equal(tmp_path: Path) -> None:
    both, big = np.arange(6.0), np.ones(1000)
    sw.save_checkpoint(tmp_path / "a.safetensors", {"both": both, "only": big, "dtype": big, "shape": big})
    other = {"both": both + 1, "dtype": big.astype("f4"), "shape": big.reshape(10, 100), "new": big}
    sw.save_checkpoint(tmp_path / "b.safetensors", other)
    read: list[tuple[int, int]] = []
    found = sw.diff_checkpoints(
        tmp_path / "a.safetensors",
        tmp_path / "b.safetensors",
        progress=lambda done, total: read.append((done, total)),
    )
    assert [(each.name, each.what) for each in found] == [
        ("both", "values"),
        ("dtype", "dtype"),
        ("new", "missing"),
        ("only", "added"),
        ("shape", "shape"),
    ]
    assert {total for _, total in read} == {both.nbytes}


def test_moments_of_optax_are_those_of_pytorch(tmp_path: Path) -> None:
    w, mu, nu = (np.full((2, 3), value, "f4") for value in (1, 2, 3))
    optax = {"params.w": w, "opt_state.0.mu.w": mu, "opt_state.0.nu.w": nu, "opt_state.0.count": np.int32(4)}
    for name, nu_of in (("same", nu), ("other", nu + 1)):
        state = {"model.w": w, "optimizer.state.w.exp_avg": mu, "optimizer.state.w.exp_avg_sq": nu_of}
        sw.save_checkpoint(tmp_path / f"{name}.safetensors", state, sync=False)
    sw.save_checkpoint(tmp_path / "optax.safetensors", optax, sync=False)
    ends = [tmp_path / f"{name}.safetensors" for name in ("optax", "same", "other")]
    (count,) = sw.diff_checkpoints(ends[0], ends[1])
    assert (count.name, count.what) == ("opt_state.0.count", "added")
    found = {(each.name, each.what) for each in sw.diff_checkpoints(ends[0], ends[2])}
    assert found == {("opt_state.0.nu.w", "values"), ("opt_state.0.count", "added")}


@pytest.mark.parametrize("turned", [False, True])
def test_the_count_of_optax_is_the_step_of_each_parameter(tmp_path: Path, turned: bool) -> None:
    """Two parameters, one count: a step that differs is named, and so is a count of other parameters."""
    arrays = {name: np.full(3, value, "f4") for value, name in enumerate(("w", "b"))}
    optax: dict[str, Any] = {"opt_state.0.count": np.int32(4), "opt_state.1.count": np.int32(4)}
    torch: dict[str, Any] = {}
    for name, array in arrays.items():
        optax |= {f"params.{name}": array, f"opt_state.0.mu.{name}": array, f"opt_state.0.nu.{name}": array}
        torch |= {f"model.{name}": array, f"optim.state.{name}.step": np.float32(4)}
        torch |= {f"optim.state.{name}.{kind}": array for kind in ("exp_avg", "exp_avg_sq")}
    sw.save_checkpoint(tmp_path / "optax.safetensors", optax, sync=False)
    found = {}
    for case, last in (("same", np.float32(4)), ("more", np.float32(5)), ("whole", np.int64(4)), ("none", None)):
        state = torch | {"optim.state.b.step": last}
        state = {name: array for name, array in state.items() if array is not None}
        sw.save_checkpoint(tmp_path / f"{case}.safetensors", state, sync=False)
        ends = [tmp_path / "optax.safetensors", tmp_path / f"{case}.safetensors"]
        differences = sw.diff_checkpoints(*(ends[::-1] if turned else ends))
        # No optimizer of PyTorch counts for the schedule.
        found[case] = [(one.name, one.what) for one in differences if one.name != "opt_state.1.count"]
        assert len(found[case]) == len(differences) - 1
    step = "optim.state.b.step" if turned else "opt_state.0.step.b"
    lacking = ("opt_state.0.step.b", "missing" if turned else "added")
    assert found == {"same": [], "more": [(step, "values")], "whole": [], "none": [lacking]}


def test_a_count_that_floats_cannot_hold_is_another_than_the_float(tmp_path: Path) -> None:
    w = np.zeros(1, "f4")
    optax = {"params.w": w, "opt_state.0.mu.w": w, "opt_state.0.nu.w": w, "opt_state.0.count": np.int32(2**24 + 1)}
    torch = {"model.w": w, "optim.state.w.exp_avg": w, "optim.state.w.exp_avg_sq": w}
    sw.save_checkpoint(tmp_path / "a.safetensors", optax, sync=False)
    sw.save_checkpoint(tmp_path / "b.safetensors", torch | {"optim.state.w.step": np.float32(2**24)}, sync=False)
    (only,) = sw.diff_checkpoints(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert (only.name, only.what) == ("opt_state.0.step.w", "dtype")


def test_equal_values_are_compared_and_others_are_named_with_both(tmp_path: Path) -> None:
    """Both files have the same learning rate and another decay; only one has a scheduler's value."""
    more = {"lr_scheduler": {"last_epoch": 3}}
    for name, decay, others in (("a", 0.1, more), ("b", 0.2, {}), ("c", 0.1, more)):
        group = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": decay, "params": [0]}
        moments = {"exp_avg": tensor(ones(3), "1"), "exp_avg_sq": tensor(ones(3), "2")}
        optimizer = {"state": {0: moments}, "param_groups": [group]}
        whole = {"model": {"w": tensor(ones(3), "0")}, "optimizer": optimizer, **others}
        (tmp_path / f"{name}.pt").write_bytes(save(whole))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sw.diff_checkpoints(tmp_path / "a.pt", tmp_path / "c.pt").left_out == ()
    with pytest.warns(sw.ShardwiseWarning) as said:
        found = sw.diff_checkpoints(tmp_path / "a.pt", tmp_path / "b.pt")
    assert found == []
    assert [str(one.message) for one in said] == list(map(str, found.left_out))
    differing, alone = found.left_out
    assert differing.names == ("optimizer.param_groups.0.weight_decay",)
    assert str(differing).endswith("'optimizer.param_groups.0.weight_decay' is 0.1 and 0.2")
    assert alone.names == ("lr_scheduler.last_epoch",)


def test_a_value_that_shares_itself_many_times_is_not_compared() -> None:
    """Thirty lists, each twice the one before: written out, there would be a thousand million numbers."""
    value: Any = [1, 2]
    for _ in range(30):
        value = [value, value]
    held = {"more": StoredObject("more", lambda: value)}
    assert same_values(held, held) == (frozenset(), {})


def test_dcp_from_orbax_warns_of_optaxs_names(tmp_path: Path) -> None:
    w = np.arange(3, dtype=np.float32)
    optax = {"params.w": w, "opt_state.0.mu.w": w, "opt_state.0.nu.w": w, "opt_state.0.count": np.int32(4)}
    sw.save_checkpoint(tmp_path / "optax.safetensors", optax, sync=False)
    with pytest.warns(sw.ShardwiseWarning, match=r"names that optax has for them, .*: 'mu', 'nu'; .*--to torch"):
        sw.reshard_checkpoint(tmp_path / "optax.safetensors", tmp_path / "dcp", to="dcp")
    # The way that it names: without a warning of optax's names.
    with pytest.warns(sw.ShardwiseWarning, match="no lr"):
        sw.reshard_checkpoint(tmp_path / "optax.safetensors", tmp_path / "run.pt", to="torch")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sw.reshard_checkpoint(tmp_path / "run.pt", tmp_path / "again", to="dcp")
        sw.reshard_checkpoint(tmp_path / "dcp", tmp_path / "other", to="dcp")
    with sw.open_checkpoint(tmp_path / "again") as made:
        assert {name.rpartition(".")[2] for name in made.training.names.states} == {"exp_avg", "exp_avg_sq", "step"}
