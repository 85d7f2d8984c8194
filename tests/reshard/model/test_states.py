"""Plans of models with the states of an optimizer: these go where their weights go, and are rewritten as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardwise as sw

Arrays = dict[str, np.ndarray[Any, Any]]

REWRITES = sw.Rewrites(
    [
        {
            "from": "h.{i}.{q,k,v}.weight",
            "to": {"name": "L.{i}.qkv.weight", "packed": "q:(4 2) + k:(2 2) + v:(2 2)"},
        },
        {"from": "h.{i}.o.weight", "to": {"name": "L.o", "stack": "i", "transpose": True}},
    ]
)


def trainer() -> sw.LayoutMap:
    found = sw.LayoutMap(sw.DeviceMesh((2,), ("tp",), ["a", "b"]))
    found[r"^h\.\d+\.[qkv]\.weight$"] = ("tp", None)
    found[r"^h\.\d+\.o\.weight$"] = (None, "tp")
    return found


def engine() -> sw.LayoutMap:
    found = sw.LayoutMap(sw.DeviceMesh((4,), ("tp",), ["w", "x", "y", "z"]))
    found[r"^L\.\d+\.qkv\.weight$"] = ("tp", None)
    found[r"^L\.o$"] = (None, "tp", None)
    return found


def model(seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    sizes = {"q": (8, 6), "k": (4, 6), "v": (4, 6), "o": (6, 8)}
    return {f"h.{i}.{name}.weight": rng.random(shape, "f4") for i in range(2) for name, shape in sizes.items()}


def by_hand(held: Arrays) -> Arrays:
    made = {f"L.{i}.qkv.weight": np.concatenate([held[f"h.{i}.{name}.weight"] for name in "qkv"]) for i in range(2)}
    return made | {"L.o": np.stack([held[f"h.{i}.o.weight"].T for i in range(2)])}


def shards(layouts: sw.LayoutMap, weights: Arrays, arrays: Arrays) -> dict[str, list[np.ndarray[Any, Any]]]:
    """What each device has: of a state by the dims of its weight, of an average by those that it has."""
    found: dict[str, list[np.ndarray[Any, Any]]] = {}
    for name, value in arrays.items():
        weight = name.removeprefix("optimizer.state.").rpartition(".")[0] if "optimizer" in name else name
        layout = layouts[weight]
        assert layout is not None
        assert layout.device_mesh is not None
        boxes = [layout.partition(weights[weight].shape).box(label) for label in layout.device_mesh.labels()]
        whole = [
            tuple(side if n > 1 else slice(None) for side, n in zip(box, value.shape, strict=False)) for box in boxes
        ]
        found[name] = [np.array(value[box], order="C") for box in whole]
    return found


def test_states_of_a_trainer_reach_an_engine_of_other_names_and_cuts() -> None:
    weights, moments = model(0), model(1)
    rows = {name: value.max(1, keepdims=True) for name, value in moments.items()}
    held = dict(weights)
    held |= {f"optimizer.state.{name}.exp_avg": value for name, value in moments.items()}
    held |= {f"optimizer.state.{name}.row_var": value for name, value in rows.items()}
    held |= {f"optimizer.state.{name}.step": np.array(3, "f4") for name in weights}
    described = {name: (value.shape, value.dtype) for name, value in held.items()}
    with pytest.warns(
        sw.ShardwiseWarning, match="3 numbers are taken from the first of several weights that become one"
    ):
        plan = sw.plan_model(trainer(), engine(), described, rewrites=REWRITES)
    made = plan.run(shards(trainer(), weights, held))
    new, averages = by_hand(moments), by_hand(weights)
    expected: Arrays = by_hand(weights) | {f"optimizer.state.{name}.exp_avg": value for name, value in new.items()}
    for i in range(2):
        name = f"L.{i}.qkv.weight"
        expected[f"optimizer.state.{name}.row_var"] = new[name].max(1, keepdims=True)
    expected["optimizer.state.L.o.col_var"] = new["L.o"].max(1, keepdims=True)
    expected |= {f"optimizer.state.{name}.step": np.array(3, "f4") for name in new}
    wanted = shards(engine(), averages, expected)
    assert made.keys() == wanted.keys()
    for name, arrays in wanted.items():
        for mine, theirs in zip(made[name], arrays, strict=True):
            assert np.array_equal(mine, theirs), name


def test_without_rewrites_and_rules_for_models_states_follow_too() -> None:
    one, other = sw.DeviceMesh((2,), ("x",)), sw.DeviceMesh((4,), ("x",))
    described = {"w": ((8, 2), "float32"), "optim.state.w.exp_avg": ((8, 2), "float32")}
    layouts = [{"w": sw.TensorLayout(("x", None), mesh)} for mesh in (one, other)]
    plan = sw.plan_model(layouts[0], layouts[1], described)
    value = np.arange(16, dtype="f4").reshape(8, 2)
    made = plan.run({name: list(value.reshape(2, 4, 2)) for name in described})
    assert [array.tolist() for array in made["optim.state.w.exp_avg"]] == value.reshape(4, 2, 2).tolist()
