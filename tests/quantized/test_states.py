"""States of an optimizer under rules for their weights: every kind of layouts, and what goes before."""

from __future__ import annotations

from typing import Any

import pytest

import shardwise as sw
from shardwise.deploy import Deployment, DeploymentRule
from shardwise.quantized.follow import followed, followers, with_states
from shardwise.quantized.forms import Components

MESH = sw.DeviceMesh((2,), ("tp",))


def components(tensors: dict[str, Any]) -> Components:
    return with_states(Components(None, {}, ()), {name: (shape, "float32") for name, shape in tensors.items()})


def cuts(tensors: dict[str, Any], layouts: Any, uneven: Any = "even") -> dict[str, tuple[int, ...]]:
    """The largest shard of each state that has a layout."""
    found = followed(components(tensors), layouts, uneven)
    return {
        name: one.partition(tensors[name]).largest_shard_shape
        if isinstance(one, sw.TensorLayout)
        else one.largest_shard_shape
        for name, one in found.items()
    }


def layout_map(**rules: Any) -> sw.LayoutMap:
    found = sw.LayoutMap(MESH)
    for key, axes in rules.items():
        found[rf"(^|\.)model\.{key}$"] = axes
    return found


WEIGHT: dict[str, Any] = {"model.w": (4, 6)}


@pytest.mark.parametrize(
    ("axes", "kind", "shape", "shard"),
    [
        ((None, "tp"), "exp_avg", (4, 6), (4, 3)),
        ((None, "tp"), "master", (4, 6), (4, 3)),
        ((None, "tp"), "step", (), ()),
        (("tp", None), "row_var", (4, 1), (2, 1)),
        ((None, "tp"), "row_var", (4, 1), (4, 1)),
        ((None, "tp"), "col_var", (1, 6), (1, 3)),
        (("tp", None), "exp_avg_sq_row", (4,), (2,)),
        (("tp", None), "exp_avg_sq_col", (6,), (6,)),
        ((None, "tp"), "exp_avg_sq_col", (6,), (3,)),
        ((None, "tp"), "RMS", (), ()),
    ],
)
def test_a_state_is_cut_by_the_dims_that_it_has(axes: Any, kind: str, shape: Any, shard: Any) -> None:
    name = f"optim.state.w.{kind}"
    assert cuts(WEIGHT | {name: shape}, layout_map(w=axes)) == {name: shard}
    # The same of a mapping, which names the weight only.
    assert cuts(WEIGHT | {name: shape}, {"model.w": sw.TensorLayout(axes, MESH)}) == {name: shard}


@pytest.mark.parametrize(
    ("weight", "row", "column"), [((4, 6), (4,), (6,)), ((6, 4), (4,), (6,)), ((3, 6, 4), (3, 4), (3, 6))]
)
def test_optax_averages_over_the_larger_dims(weight: Any, row: Any, column: Any) -> None:
    """`optax/_src/factorized.py` deletes the largest dim for `v_row`, the second largest for `v_col`."""
    tensors = {"params.w": weight, "opt_state.0.v_row.w": row, "opt_state.0.v_col.w": column, "opt_state.0.v.w": (1,)}
    largest = weight.index(6)
    axes = tuple("tp" if dim == largest else None for dim in range(len(weight)))
    found = cuts(tensors, {"params.w": sw.TensorLayout(axes, MESH)})
    assert found["opt_state.0.v_row.w"] == row
    assert found["opt_state.0.v_col.w"] == (*column[:-1], 3)
    assert found["opt_state.0.v.w"] == (1,)


def test_an_uneven_rule_of_the_weight_is_that_of_its_states() -> None:
    found = sw.LayoutMap(MESH)
    found[r"^model\.w$"] = sw.LayoutRule(("tp", None), uneven="balanced")
    tensors = {"model.w": (5, 3), "optim.state.w.exp_avg": (5, 3)}
    (made,) = followed(components(tensors), found).values()
    assert isinstance(made, sw.Partition)
    assert made == found.rule(r"^model\.w$").layout.partition((5, 3), "balanced")


def test_a_rule_for_a_state_goes_first() -> None:
    rules = layout_map(w=("tp", None))
    tensors = WEIGHT | {"optim.state.w.exp_avg": (4, 6), "optim.state.w.exp_avg_sq": (4, 6)}
    rules[r"^optim\.state\.w\.exp_avg$"] = (None, "tp")
    assert cuts(tensors, rules).keys() == {"optim.state.w.exp_avg_sq"}
    named = {name: sw.TensorLayout((None, "tp"), MESH) for name in ("model.w", "optim.state.w.exp_avg")}
    assert cuts(tensors, named).keys() == {"optim.state.w.exp_avg_sq"}
    # One that finds the weight's name in the state's is not one for the state.
    anywhere = sw.LayoutMap(MESH)
    anywhere["w"] = ("tp", None)
    assert cuts(tensors | {"optim.state.w.row_var": (4, 1)}, anywhere)["optim.state.w.row_var"] == (2, 1)


def test_states_without_their_weights_are_cut_as_these_would_be() -> None:
    tensors = {"optimizer.state.model.w.exp_avg": (4, 6), "optimizer.state.model.w.step": ()}
    assert cuts(tensors, layout_map(w=(None, "tp"))) == {
        "optimizer.state.model.w.exp_avg": (4, 3), "optimizer.state.model.w.step": (),
    }  # fmt: skip
    averages = {"optimizer.state.model.w.row_var": (4, 1), "optimizer.state.model.w.col_var": (1, 6)}
    assert cuts(averages, layout_map(w=(None, "tp"))) == {
        "optimizer.state.model.w.row_var": (4, 1), "optimizer.state.model.w.col_var": (1, 3),
    }  # fmt: skip


def test_a_state_of_which_nothing_is_known_is_refused_by_name_where_it_would_be_cut() -> None:
    tensors = WEIGHT | {"optim.state.w.absmax1": (3,)}
    assert cuts(tensors, layout_map(w=(None, None))) == {"optim.state.w.absmax1": (3,)}
    with pytest.raises(sw.LayoutError, match=r"'optim.state.w.absmax1' has the shape \(3,\), and nothing says which"):
        cuts(tensors, layout_map(w=("tp", None)))
    weight, why = followers(components(tensors), layout_map(w=("tp", None)))["optim.state.w.absmax1"]
    assert weight == "model.w"
    assert "a rule for its own name places it, and drop leaves it out" in str(why)


def test_stages_and_experts_have_the_states_of_their_weights() -> None:
    """A deployment without a default, and without a rule for any state."""
    meshes = {"grid": sw.DeviceMesh((2, 2), ("pp", "tp"), ["a", "b", "c", "d"])}
    rules = {r"^h\.(?P<i>\d+)\.w$": DeploymentRule(("tp", None), mesh="grid", at={"pp": "i"})}
    deployment = Deployment(["a", "b", "c", "d"], meshes, rules)
    tensors = {"h.0.w": (4, 6), "h.1.w": (4, 6), "optimizer.state.h.1.w.exp_avg": (4, 6)}
    (made,) = followed(components(tensors), deployment).values()
    assert isinstance(made, sw.Partition)
    assert list(made.holders) == ["c", "d"]
    assert made.box("d") == (slice(2, 4), slice(0, 6))
