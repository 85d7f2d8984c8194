"""States of an optimizer in rewrites: the same becomes of them as of their weights; what has no meaning is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise._dtypes import DTYPES
from shardwise.conversion.apply import rewritten
from shardwise.conversion.leaves import Stored
from shardwise.conversion.tables import Wanted
from shardwise.pieces import LocatedPiece, Pieces
from shardwise.quantized import Along, Component, LogicalTensor
from shardwise.store.write.places.fetch import fetched_box

Model = dict[str, np.ndarray[Any, Any]]
Way = dict[str, Any]

#: Sizes of the model that the rewrites are for: heads of two, four of queries and two of keys and values.
WIDE, HEADS, GROUPS, INNER, VOCABULARY = 6, 4, 2, 8, 7


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """A model of names and shapes."""
    found: dict[str, tuple[int, ...]] = {"emb.weight": (VOCABULARY, WIDE), "norm.weight": (WIDE,)}
    for i in range(layers):
        sizes = {"q": 2 * HEADS, "k": 2 * GROUPS, "v": 2 * GROUPS, "up": INNER, "gate": INNER}
        found |= {f"h.{i}.{name}.weight": (size, WIDE) for name, size in sizes.items()}
        found |= {f"h.{i}.o.weight": (WIDE, 2 * HEADS), f"h.{i}.norm.weight": (WIDE,)}
    return found


QKV = "h.{i}.{q,k,v}.weight"
GATED = f"gate:({INNER}) + up:({INNER})"
#: Rewrites by what they are for: at most one of each is chosen.
WAYS: dict[str, list[Way]] = {
    "qkv": [
        {"from": QKV, "to": {"name": "L.{i}.qkv", "packed": f"q:({HEADS} 2) + k:({GROUPS} 2) + v:({GROUPS} 2)"}},
        {"from": QKV, "to": {"name": "L.{i}.qkv", "packed": "(2 [q:4 k:2 v:2])"}},
        {"from": QKV, "to": {"name": "qkv", "stack": "i", "transpose": True, "packed": "(2 [q:4 k:2 v:2])"}},
        {"from": "h.{i}.q.weight", "to": {"name": "Q", "stack": "i", "transpose": True}},
        {"from": "h.{i}.q.weight", "to": {"name": "Q", "dims": "w i heads d -> (heads d) w", "d": 2}},
        {"from": "h.{i}.k.weight", "to": {"name": "K.{i}", "dims": "(half heads) w -> (heads half) w", "half": 2}},
    ],
    "gate": [
        {"from": "h.{i}.{gate,up}.weight", "to": {"name": "L.{i}.fc1", "packed": GATED}},
        {"from": "h.{i}.{gate,up}.weight", "to": {"name": "L.fc1", "packed": GATED, "stack": "i"}},
        {"from": "h.{i}.up.weight", "to": {"name": "fc", "dims": "(i rows) w -> rows w", "rows": INNER}},
    ],
    "emb": [
        {"from": "emb.weight", "to": {"name": "word", "pad_to": 4}, "size": VOCABULARY},
        {"from": "emb.weight", "to": {"name": "word", "transpose": True}},
        {"from": "emb.weight", "to": {"name": "emb.weight", "pad_to": 5}, "size": VOCABULARY},
    ],
    "o": [
        {"from": "h.{i}.o.weight", "to": {"name": "O.{i}", "zigzag": 2, "dim": 1}},
        {"from": "h.{i}.o.weight", "to": {"name": "O.{i}", "transpose": True}},
        {"from": "h.{i}.o.weight", "to": {"name": "O", "stack": "i"}},
    ],
    "norm": [
        {"from": "h.{i}.norm.weight", "to": "L.{i}.ln"},
        {"from": "h.{i}.norm.weight", "to": {"name": "LN", "stack": "i"}},
    ],
}
CHOSEN = st.tuples(*(st.one_of(st.none(), st.sampled_from(ways)) for ways in WAYS.values())).map(
    lambda ways: [way for way in ways if way is not None]
)


def drawn(layers: int, seed: int) -> Model:
    rng = np.random.default_rng(seed)
    return {name: rng.integers(1, 2**20, shape).astype(np.float32) for name, shape in shapes(layers).items()}


def leaf(name: str, values: np.ndarray[Any, Any]) -> Stored:
    held = np.ascontiguousarray(values).view(f"V{values.itemsize}")

    def make() -> Wanted:
        whole = tuple((0, size) for size in values.shape)
        return Wanted(
            name,
            DTYPES[values.dtype.name],
            values.shape,
            Pieces.of([LocatedPiece(whole, held, 0, held.strides)], held.ndim),
        )

    return Stored(name, values.shape, DTYPES[values.dtype.name], make=make)


def made_of(tensors: Model, rewrites: sw.Rewrites) -> Model:
    """The tensors after rewrites, in memory."""
    made, _ = rewritten({name: leaf(name, value) for name, value in tensors.items()}, rewrites)
    return {
        name: fetched_box(one.tables().pieces, tuple((0, size) for size in one.shape), 4).view("f4").reshape(one.shape)
        for name, one in made.items()
    }


def became(folder: Path, tensors: Model, rewrites: sw.Rewrites, rename: dict[str, str] | None = None) -> Model:
    """The tensors after rewrites, through a file."""
    before, after = folder / "before.safetensors", folder / "after.safetensors"
    for file in (before, after):
        file.unlink(missing_ok=True)
    sw.save_checkpoint(before, tensors, sync=False)
    sw.reshard_checkpoint(before, after, rewrites=rewrites, rename=rename or {}, sync=False)
    with sw.open_checkpoint(after) as checkpoint:
        return {name: np.array(checkpoint.read(name)) for name in checkpoint}


def states(model: Model, name: str = "optimizer.state.{}.exp_avg") -> Model:
    return {name.format(parameter): value for parameter, value in model.items()}


@given(
    CHOSEN,
    st.integers(1, 3),
    st.sampled_from(["optimizer.state.{}.exp_avg", "optimizer.state.exp_avg.{}", "opt_state.0.mu.{}"]),
)
def test_a_state_becomes_what_a_weight_of_the_same_values_becomes(ways: list[Way], layers: int, named: str) -> None:
    """The law: rewritten states are the rewritten model with the weights exchanged for the states."""
    rewrites = sw.Rewrites(ways)
    weights, moments = drawn(layers, 0), drawn(layers, 1)
    made = made_of(weights | states(moments, named), rewrites)
    expected = made_of(weights, rewrites) | states(made_of(moments, rewrites), named)
    assert made.keys() == expected.keys()
    assert all(np.array_equal(made[name], expected[name]) for name in expected)
    back = made_of(made, rewrites.inverse())
    assert all(np.array_equal(back[name], value) for name, value in (weights | states(moments, named)).items())


def largest(values: np.ndarray[Any, Any], dim: int, *, keeps: bool) -> np.ndarray[Any, Any]:
    """A statistic over a dim that needs no rounding: where it is of the elements, so it is of any order of them."""
    return np.asarray(values.max(dim, keepdims=keeps))


@given(CHOSEN, st.integers(1, 3), st.booleans())
def test_an_average_over_a_dim_stays_one_or_is_refused(ways: list[Way], layers: int, keeps: bool) -> None:
    """Adafactor's rows and columns, of PyTorch and of transformers: of the new weight they are what they are called."""
    rewrites = sw.Rewrites(ways)
    kinds = ("row_var", "col_var") if keeps else ("exp_avg_sq_row", "exp_avg_sq_col")
    weights, squares = drawn(layers, 0), drawn(layers, 1)
    kept: Model = {}
    for name, value in squares.items():
        for kind, dim in zip(kinds, (-1, -2), strict=True) if value.ndim > 1 else ():
            kept[f"optimizer.state.{name}.{kind}"] = largest(value, dim, keeps=keeps)
    for dim, kind in zip((-1, -2), kinds, strict=True):
        only = {name: value for name, value in kept.items() if name.endswith(kind)}
        refused = ""
        try:
            made = made_of(weights | only, rewrites)
        except sw.LayoutError as error:
            refused = str(error)
        assert not refused or re.search(r"drop leaves it out|of a weight .* which .* is not", refused)
        if refused:
            continue
        whole = made_of(squares, rewrites)
        assert sum(name.startswith("optimizer") for name in made) == sum(
            value.ndim > 1 and name != "LN" for name, value in whole.items()
        )
        for name, value in made.items():
            if name.startswith("optimizer"):
                weight, _, own = name.removeprefix("optimizer.state.").rpartition(".")
                along = -1 if own == kinds[0] else -2
                assert np.array_equal(value, largest(whole[weight], along, keeps=keeps)), (name, dim)


ROWS = sw.Rewrites([{"from": "{a,b}", "to": {"name": "c", "packed": "a:(4) + b:(2)"}}])
COLUMNS = sw.Rewrites([{"from": "{a,b}", "to": {"name": "c", "packed": "a:(3) + b:(3)", "dim": 1}}])


def pair(kind: str, a: Any, b: Any, rows: tuple[int, int] = (4, 2)) -> Model:
    found = {name: np.ones((size, 3), np.float32) for name, size in zip("ab", rows, strict=True)}
    for name, value in (("a", a), ("b", b)):
        if value is not None:
            found[f"optim.state.{name}.{kind}"] = np.asarray(value)
    return found


def test_an_average_over_the_dim_of_a_fusion_is_refused_by_name(tmp_path: Path) -> None:
    rows = pair("row_var", np.full((4, 1), 2, "f4"), np.full((2, 1), 3, "f4"))
    assert became(tmp_path, rows, ROWS)["optim.state.c.row_var"].tolist() == [[2]] * 4 + [[3]] * 2
    columns = pair("col_var", np.ones((1, 3), "f4"), np.ones((1, 3), "f4"))
    with pytest.raises(
        sw.LayoutError, match=r"'optim.state.a.col_var' is an average over that dim.*drop leaves it out"
    ):
        became(tmp_path, columns, ROWS)


def test_steps_are_merged_if_they_are_the_same(tmp_path: Path) -> None:
    same = pair("step", np.float32(7), np.float32(7))
    made = became(tmp_path, same, ROWS)
    assert made["optim.state.c.step"].shape == ()
    assert made["optim.state.c.step"] == 7
    assert became(tmp_path, made, ROWS.inverse()).keys() == same.keys()
    with pytest.raises(
        sw.LayoutError, match=r"'optim.state.a.step' and 'optim.state.b.step'.*float32 7.0.*float32 8.0"
    ):
        became(tmp_path, pair("step", np.float32(7), np.float32(8)), ROWS)


def test_a_weight_without_the_state_of_the_one_that_it_is_fused_with_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(sw.LayoutError, match=r"'b' is .* of 'optim.state.a.exp_avg', but has no such state"):
        became(tmp_path, pair("exp_avg", np.ones((4, 3), "f4"), None), ROWS)


def test_a_state_of_which_nothing_is_known_is_renamed_and_nothing_else(tmp_path: Path) -> None:
    blocks = pair("absmax1", np.arange(5, dtype="f4"), np.arange(5, dtype="f4"), rows=(2, 2))
    made = became(tmp_path, blocks, sw.Rewrites([{"from": "a", "to": "c"}]))
    assert made["optim.state.c.absmax1"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(sw.LayoutError, match=r"'optim.state.a.absmax1' has the shape \(5,\), and nothing says which"):
        became(tmp_path, blocks, COLUMNS)


def test_a_rewrite_that_names_a_state_is_for_it_alone(tmp_path: Path) -> None:
    given_names = pair("exp_avg", np.ones((4, 3), "f4"), np.ones((2, 3), "f4")) | {"optim.state.a.step": np.float32(1)}
    rewrites = sw.Rewrites([{"from": "a", "to": "c"}, {"from": "optim.state.{n}.exp_avg", "to": "adam.m.{n}"}])
    made = became(tmp_path, given_names, rewrites)
    assert made.keys() == {"c", "b", "optim.state.c.step", "adam.m.a", "adam.m.b"}


def test_drop_is_for_states_by_their_own_names_and_for_those_of_a_weight(tmp_path: Path) -> None:
    held = pair("exp_avg", np.ones((4, 3), "f4"), np.ones((2, 3), "f4"))
    with pytest.warns(sw.ShardwiseWarning, match="dropped by the rules"):
        made = became(tmp_path, held, sw.Rewrites(drop=["optim.{n*}"]))
    assert made.keys() == {"a", "b"}
    with pytest.warns(sw.ShardwiseWarning, match="dropped by the rules: 'b', 'optim.state.b.exp_avg'"):
        made = became(tmp_path, held, sw.Rewrites(drop=["b"]))
    assert made.keys() == {"a", "optim.state.a.exp_avg"}


def test_what_no_rewrite_takes_is_dropped_and_refused_without_the_rest_of_a_training_state(tmp_path: Path) -> None:
    held = pair("exp_avg", np.ones((4, 3), "f4"), np.ones((2, 3), "f4")) | {"lr_scheduler.last_epoch": np.int64(3)}
    way = [{"from": "a", "to": "c"}]
    with pytest.warns(sw.ShardwiseWarning, match="dropped by the rules: 'b', 'optim.state.b.exp_avg'"):
        made = became(tmp_path, held, sw.Rewrites(way, unmatched="drop"))
    assert made.keys() == {"c", "optim.state.c.exp_avg", "lr_scheduler.last_epoch"}
    with pytest.raises(sw.LayoutError, match="no rewrite matches 'b'; drop"):
        became(tmp_path, held, sw.Rewrites(way, unmatched="refuse"))


def test_a_further_name_of_a_weight_has_no_states(tmp_path: Path) -> None:
    held = pair("exp_avg", np.ones((4, 3), "f4"), np.ones((2, 3), "f4"))
    rewrites = sw.Rewrites([{"from": "a", "to": {"name": "c", "also": ["d"]}}])
    made = became(tmp_path, held, rewrites)
    assert made.keys() == {"b", "c", "d", "optim.state.b.exp_avg", "optim.state.c.exp_avg"}
    assert became(tmp_path, made, rewrites.inverse()).keys() == held.keys()


@pytest.mark.parametrize(
    ("rename", "expected"),
    [
        ({r"^model\.": ""}, ["c.w", "optim.state.c.w.exp_avg"]),
        ({r"^model\.c": "model.d"}, ["model.d.w", "optim.state.d.w.exp_avg"]),
        ({"c": "cc"}, ["model.cc.w", "optim.state.cc.w.exp_avg"]),
        ({r"^model\.": "", r"^optim\.": "adam_optimizer."}, ["adam_optimizer.state.c.w.exp_avg", "c.w"]),
        ({r"optim\.state\.(.*)\.exp_avg": r"m.\1"}, ["m.c.w", "model.c.w"]),
    ],
)
def test_a_renamed_weight_takes_its_states_along(tmp_path: Path, rename: dict[str, str], expected: list[str]) -> None:
    held = {"model.c.w": np.ones(2, "f4"), "optim.state.c.w.exp_avg": np.ones(2, "f4")}
    assert sorted(became(tmp_path, held, sw.Rewrites(), rename)) == expected


def test_states_keep_their_dtype(tmp_path: Path) -> None:
    held = pair("exp_avg", np.ones((4, 3), "f4"), np.ones((2, 3), "f4")) | {"lr_scheduler.rate": np.float32(0.5)}
    sw.save_checkpoint(tmp_path / "a.safetensors", held)
    sw.reshard_checkpoint(tmp_path / "a.safetensors", tmp_path / "b.safetensors", dtype="float16", rewrites=ROWS)
    with sw.open_checkpoint(tmp_path / "b.safetensors") as made:
        found = {name: made[name].dtype for name in made}
    assert found == {"c": "float16", "optim.state.c.exp_avg": "float32", "lr_scheduler.rate": "float32"}


def test_two_optimizers_of_one_model_stay_two(tmp_path: Path) -> None:
    """Muon has matrices, AdamW the rest: kinds that only some parameters have."""
    held = {name: np.ones((size, 3), np.float32) for name, size in {"a": 4, "b": 2, "e": 5}.items()}
    held |= {f"optimizer.0.state.{name}.momentum_buffer": held[name] * 2 for name in "ab"}
    held |= {"optimizer.1.state.e.exp_avg": held["e"] * 3, "optimizer.1.state.e.step": np.array(1, "f4")}
    made = became(tmp_path, held, ROWS)
    assert made.keys() == held.keys() - {"a", "b", *(f"optimizer.0.state.{name}.momentum_buffer" for name in "ab")} | {
        "c", "optimizer.0.state.c.momentum_buffer",
    }  # fmt: skip
    held["optimizer.1.state.b.exp_avg"] = held.pop("optimizer.0.state.b.momentum_buffer")
    with pytest.raises(
        sw.LayoutError,
        match=r"'b' is .* of 'optimizer.0.state.a.momentum_buffer', but has no",
    ):
        became(tmp_path, held, ROWS)


def test_quantized_weights_have_states_beside_their_scales() -> None:
    """Blocks of two rows with a scale each; the state has an element for each of the weight."""
    weights: dict[str, LogicalTensor] = {}
    tensors: dict[str, Any] = {}
    for name, rows in {"a.weight": 4, "b.weight": 2}.items():
        scale = f"{name}_scale_inv"
        held = {name: np.ones((rows, 3), "f4"), scale: np.full((rows // 2, 3), rows, "f4")}
        along = (Along(0), Along(1)), (Along(0, 2), Along(1))
        parts = [
            Component(each, "F32", value.shape, one) for (each, value), one in zip(held.items(), along, strict=True)
        ]
        weights[name] = LogicalTensor(name, (rows, 3), "blocks of two rows", tuple(parts))
        held[f"optim.state.{name}.exp_avg"] = np.arange(3 * rows, dtype="f4").reshape(rows, 3)
        tensors |= {each: leaf(each, value) for each, value in held.items()}
    fused = sw.Rewrites([{"from": "{a,b}.weight", "to": {"name": "c.weight", "packed": "a:(4) + b:(2)"}}])
    made, carried = rewritten(tensors, fused, weights)
    assert {name: one.shape for name, one in made.items()} == {
        "c.weight": (6, 3), "c.weight_scale_inv": (3, 3), "optim.state.c.weight.exp_avg": (6, 3),
    }  # fmt: skip
    assert carried.keys() == {"c.weight"}
    back, _ = rewritten(made, fused.inverse(), carried)
    assert {name: one.shape for name, one in back.items()} == {name: one.shape for name, one in tensors.items()}
