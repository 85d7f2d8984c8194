"""Recordings: loaders that move element numbers, compared with numpy element by element; and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.deploy import Deployment, FusedParameter, Manifest, RecordedParameter, Recording, join_manifests

from ..oracle.families.models import digest, elements, numbered, read

Array = npt.NDArray[Any]
Moves = Callable[[list[Array]], Array]

# --- Loaders of any kind ---


@st.composite
def moved(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], list[tuple[str, Any]]]:
    """Shapes of tensors, and the moves that make one parameter of them."""
    count = draw(st.integers(1, 3))
    shapes = [tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=3))) for _ in range(count)]
    kinds = ["slice", "concat", "transpose", "pad", "repeat", "tile", "stack", "interleave", "flip", "reshape", "take"]
    moves = draw(st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 2**31)), min_size=1, max_size=5))
    return shapes, moves


def carried_out(arrays: list[Array], moves: list[tuple[str, Any]]) -> Array:
    """The parameter; each move draws its numbers from its own seed, and from shapes only."""
    held = [np.array(each) for each in arrays]
    for kind, seed in moves:
        rng = np.random.default_rng(seed)
        at = int(rng.integers(len(held)))
        one, other = held[at], held[int(rng.integers(len(held)))]
        dim = int(rng.integers(one.ndim)) if one.ndim else 0
        if kind == "stack":
            made = np.stack([one, np.flip(one)])
        elif kind == "tile":
            made = np.tile(one, (2, *(1,) * one.ndim))
        elif kind == "flip":
            made = np.flip(one)
        elif kind == "reshape":
            made = one.reshape(-1)
        elif not one.ndim:
            continue
        elif kind == "slice":
            low = int(rng.integers(one.shape[dim]))
            made = np.take(one, np.arange(low, one.shape[dim], int(rng.integers(1, 4))), dim)
        elif kind == "transpose":
            made = one.transpose(rng.permutation(one.ndim))
        elif kind == "pad":
            made = np.pad(one, [(0, 2) if each == dim else (0, 0) for each in range(one.ndim)])
        elif kind == "repeat":
            made = np.repeat(one, int(rng.integers(1, 4)), dim)
        elif kind == "take":
            made = np.take(one, rng.permutation(one.shape[dim]), dim)
        elif one.shape == other.shape and kind == "interleave":
            made = np.stack([one, other], dim + 1).reshape(
                [2 * n if each == dim else n for each, n in enumerate(one.shape)]
            )
        elif one.ndim == other.ndim and np.delete(one.shape, dim).tolist() == np.delete(other.shape, dim).tolist():
            made = np.concatenate([one, other], dim)
        else:
            continue
        held[at] = made
    return held[0]


def put_together(parameter: RecordedParameter, tensors: Mapping[str, Array], fill: float = 0) -> Array:
    """A parameter from its pieces, by their definition: loops over elements."""
    flat = np.full(math.prod(parameter.shape), fill, np.float64)
    written = np.zeros(len(flat), np.int64)
    for piece in parameter.pieces:
        values = tensors[piece.tensor][piece.box]
        for time in range(piece.times):
            for index in np.ndindex(values.shape):
                place = piece.start + time * piece.apart
                place += sum(at * stride for at, stride in zip(index, piece.strides, strict=True))
                flat[place] = values[index]
                written[place] += 1
    assert (written <= 1).all(), "two pieces have one place"
    assert int((written == 0).sum()) == parameter.padding
    return flat.reshape(parameter.shape)


@given(
    moved(),
    st.sampled_from(["float32", "bfloat16", "float16", "int8", "uint8", "float8_e4m3fn", "float8_e5m2", "float64"]),
)
def test_any_loader_that_moves_is_recorded_exactly(
    drawn: tuple[list[tuple[int, ...]], list[tuple[str, Any]]], dtype: str
) -> None:
    shapes, moves = drawn
    names = [f"t{number}" for number in range(len(shapes))]
    found = sw.record(
        {name: (shape, dtype) for name, shape in zip(names, shapes, strict=True)},
        lambda tensors: {"p": carried_out([tensors[name] for name in names], moves)},
    )
    rng = np.random.default_rng(0)
    values = {name: rng.random(shape) + 1 for name, shape in zip(names, shapes, strict=True)}
    expected = carried_out([values[name] for name in names], moves)
    (parameter,) = found.parameters.values()
    assert parameter.shape == expected.shape
    assert np.array_equal(put_together(parameter, values), expected)
    # The manifest has each element that is there once, and the memory is filled from it.
    there = set(expected[expected != 0].tolist())
    arrays = {}
    for name, tiling in found.manifest.items():
        parts = [values[name][piece.box] for piece in tiling.pieces(0)]
        flat = np.concatenate([part.reshape(-1) for part in parts])
        assert sorted(flat) == sorted(set(values[name].reshape(-1).tolist()) & there)
        arrays[name] = flat.reshape(tiling.holder_shape(0))
    memory = {"p": np.zeros(expected.shape)}
    views = found.views(memory)
    assert views.keys() == arrays.keys()
    for name, array in arrays.items():
        views[name][...] = array
    found.fill(memory, views)
    assert np.array_equal(memory["p"], expected)
    again = {"p": np.zeros(expected.shape)}
    found.fill(again, arrays)
    assert np.array_equal(again["p"], expected)


@pytest.mark.parametrize(
    ("load", "pieces"),
    [
        (lambda w: w, 1),
        (lambda w: w.T, 1),
        (lambda w: w[4:12], 1),
        (lambda w: w[:, ::2], 1),
        (lambda w: np.pad(w, ((0, 3), (0, 1))), 1),
        (lambda w: np.concatenate([w[::2], w[1::2]]), 2),
        (lambda w: np.concatenate([w[:, ::2], w[:, 1::2]], 1), 2),
        (lambda w: np.repeat(w, 3, 0), 1),
        (lambda w: np.tile(w, (3, 1)), 1),
        (lambda w: w[::-1], 1),
        (lambda w: w.reshape(4, 4, 12).swapaxes(0, 1).reshape(16, 12), 4),
        (lambda w: w.reshape(-1)[7:100], 3),  # 2 · rank - 1 boxes, as in 2.10
        (lambda w: np.concatenate([w[:4], w[8:12], w[4:8]]), 3),
    ],
)
def test_pieces_are_few(load: Callable[[Array], Array], pieces: int) -> None:
    """As few as the hand needs: one for what is cut, transposed, padded, interleaved or repeated."""
    found = sw.record({"w": ((16, 12), "bfloat16")}, lambda tensors: {"p": load(tensors["w"])})
    assert len(found.parameters["p"].pieces) == pieces


# --- What is refused, and what is listed ---

SHAPES = dict.fromkeys("abcd", ((6, 4), "bfloat16"))


@pytest.mark.parametrize(
    "computed",
    [
        lambda w: w * 2,
        lambda w: w + 1,
        lambda w: w - 1,
        lambda w: 255 - w,
        lambda w: -w,
        lambda w: (w + w[::-1]) / 2,
        lambda w: np.maximum(w, w[::-1]),
        lambda w: w.sum(0),
        lambda w: w // 2,
        lambda w: np.clip(w, 0, 1),
        lambda w: (w > 3).astype(np.float32),
        lambda w: w.astype(np.float32) ** 2,
        lambda w: np.exp(-w),
        lambda w: w - w.mean(),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float16", "int16", "uint8"])
def test_what_is_computed_is_named_and_refused(computed: Callable[[Array], Array], dtype: str) -> None:
    def load(tensors: Mapping[str, Array]) -> dict[str, Array]:
        return {"moved": tensors["a"][:3], "made": computed(tensors["b"].astype(np.float32))}

    with pytest.raises(sw.LayoutError, match=r"the loader computes \d+ of \d+ elements of 'made'"):
        sw.record(dict.fromkeys("ab", ((6, 4), dtype)), load)
    found = sw.record(dict.fromkeys("ab", ((6, 4), dtype)), load, computed="leave")
    assert list(found.computed) == ["made"]
    assert found.parameters["moved"].pieces[0].box == (slice(0, 3, 1), slice(0, 4, 1))
    assert found.parameters["made"].pieces == ()
    assert list(found.manifest) == ["a"]


def test_one_scalar_that_is_added_to_is_refused() -> None:
    """A single element, of which a hash alone would let one of 256 pass."""
    for dtype in ("float32", "bfloat16", "int8"):
        for by in (1, -1, 2, 3):
            with pytest.raises(sw.LayoutError, match="computes 1 of 1 element of 's', the first at"):
                sw.record({"s": ((), dtype)}, lambda tensors, by=by: {"s": tensors["s"].astype("f4") + by})  # type: ignore[misc]


@pytest.mark.parametrize("value", [0, 1, 2, 255, 127.5, -1, np.inf, -np.inf, np.nan, 0.5])
def test_constants_are_padding(value: float) -> None:
    """Of any value; one that is a digit of numbers too is not taken for an element."""
    found = sw.record(
        {"a": ((300, 2), "bfloat16")},
        lambda tensors: {"p": np.concatenate([tensors["a"].astype(np.float32), np.full((5, 2), value, np.float32)])},
    )
    assert found.parameters["p"].padding == 10
    assert len(found.parameters["p"].pieces) == 1
    assert np.array_equal(found.parameters["p"].values, [value], equal_nan=True)


def test_a_loader_that_differs_from_run_to_run_is_named() -> None:
    rng = np.random.default_rng(0)
    for load in (
        lambda tensors: {"fine": tensors["a"], "random": rng.random(5)},
        lambda tensors: {"fine": tensors["a"], "random": rng.permutation(tensors["b"])},
    ):
        with pytest.raises(sw.LayoutError, match=r"not deterministic.*'random'"):
            sw.record(SHAPES, load)
        with pytest.raises(sw.LayoutError, match=r"not deterministic.*'random'"):
            sw.record(SHAPES, load, computed="leave")
    names = iter(range(9))
    with pytest.raises(sw.LayoutError, match="'p1' is not there in one run"):
        sw.record(SHAPES, lambda tensors: {f"p{next(names)}": tensors["a"]})
    sizes = iter(range(1, 9))
    with pytest.raises(sw.LayoutError, match=r"of shape \(1, 4\) in one run, and of shape \(2, 4\)"):
        sw.record(SHAPES, lambda tensors: {"p": tensors["a"][: next(sizes)]})


def test_names_that_are_asked_for_and_those_that_are_not() -> None:
    def load(tensors: Mapping[str, Array]) -> dict[str, Array]:
        assert "bias" not in tensors
        with pytest.raises(KeyError):
            tensors["scale"]
        assert tensors.get("zero") is None
        assert tensors["b"].shape == (6, 4)
        return {"p": tensors["a"]}

    found = sw.record(SHAPES, load)
    assert found.missing == ("bias", "scale", "zero")
    assert (found.unread, found.unused) == (("c", "d"), ("b",))

    def of_an_engine(weights: Iterator[tuple[str, Array]]) -> Iterator[tuple[str, Array]]:
        for name, array in weights:
            if name == "c":
                return
            yield f"model.{name}", array

    found = sw.record(SHAPES, lambda tensors: of_an_engine(iter(tensors.items())))
    assert list(found.parameters) == ["model.a", "model.b"]
    assert (found.unread, found.unused) == (("d",), ("c",))


def test_a_parameter_of_fewer_bits_than_its_tensor() -> None:
    """A loader that casts moves what the narrower dtype holds: digits are then of that one."""
    found = sw.record({"a": ((40, 30), "float32")}, lambda tensors: {"p": tensors["a"].astype(np.float16)})
    assert found.parameters["p"].dtype == "float16"
    assert len(found.parameters["p"].pieces) == 1
    assert found.parameters["p"].padding == 0


def test_tensors_without_elements_and_without_dims() -> None:
    found = sw.record(
        {"none": ((0, 3), "float32"), "scalar": ((), "float32"), "more": ((0,), "float32")},
        lambda tensors: {"s": np.broadcast_to(tensors["scalar"], (2, 3)), "none": tensors["none"]},
    )
    (piece,) = found.parameters["s"].pieces
    assert (piece.times, piece.apart, piece.box) == (6, 1, ())
    assert found.manifest["scalar"].shape == ()
    assert (found.unread, found.unused) == (("more",), ())


@pytest.mark.parametrize(
    ("given_args", "error", "message"),
    [
        (([], lambda t: t), TypeError, "tensors must map names"),
        (({"a": ((2,), "float31")}, lambda t: t), sw.LayoutError, "'a' has no known dtype"),
        (({"a": ((2,), "float8_e8m0fnu")}, lambda t: t), TypeError, "record it as uint8"),
        (({"a": ((2,), "float32")}, None), TypeError, "load must be a function"),
        (({"a": ((2,), "float32")}, lambda t: 5), TypeError, "must give parameters by name, got 5"),
        (({"a": ((2,), "float32")}, lambda t: [1]), TypeError, "pairs of a name and an array, got 1"),
        (({"a": ((2,), "float32")}, lambda t: {"p": np.array(["x"])}), TypeError, "'p' is of <U1, not of numbers"),
    ],
)
def test_arguments_are_checked(given_args: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sw.record(*given_args)
    with pytest.raises(sw.LayoutError, match='computed is \'x\'; it must be "refuse" or "leave"'):
        sw.record(SHAPES, lambda tensors: {}, computed="x")  # type: ignore[arg-type]


def test_memory_is_bounded() -> None:
    """Some 30 bytes for each element of the parameters beside the loader's own, and one tensor."""
    import tracemalloc

    shapes = {f"w{number}": ((1000, 200), "float32") for number in range(10)}

    def load(tensors: Mapping[str, Array]) -> dict[str, Array]:
        memory = np.zeros((10, 500, 200), np.float32)
        for number, (_, array) in enumerate(tensors.items()):
            memory[number] = array[500:]
        return {"w": memory}

    tracemalloc.start()
    try:
        sw.record(shapes, load)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000 * (30 + 4 + 60)


# --- Against rules, and in plans ---

TENSORS = {
    "q": ((8, 4), "float32"),
    "k": ((4, 4), "float32"),
    "v": ((4, 4), "float32"),
    "o": ((4, 8), "float32"),
    "norm": ((4,), "float32"),
}
MESH = sw.DeviceMesh((2,), ("tp",))
RULES = Deployment(
    2,
    MESH,
    {"q|k|v": ("tp", None), "o": (None, "tp"), "norm": (None,)},
    parameters=[FusedParameter("qkv", ("q", "k", "v"))],
)


def as_the_rules(tensors: Mapping[str, Array], rank: int) -> dict[str, Array]:
    parts = [np.split(tensors[name], 2)[rank] for name in ("q", "k", "v")]
    return {"qkv": np.concatenate(parts), "o": np.split(tensors["o"], 2, 1)[rank], "norm": tensors["norm"]}


def recorded(load: Callable[[Mapping[str, Array], int], dict[str, Array]], rank: int) -> Recording:
    return sw.record(TENSORS, lambda tensors: load(tensors, rank), f"cpu:{rank}")


def test_a_recording_is_what_the_rules_say() -> None:
    for rank in range(2):
        found = recorded(as_the_rules, rank)
        assert found.differences(RULES.parameters_of(f"cpu:{rank}", TENSORS)) == {}
        assert found.differences(recorded(as_the_rules, rank)) == {}
    joined = join_manifests(recorded(as_the_rules, rank).manifest for rank in range(2))
    by_rules = RULES.manifest(TENSORS)
    for name in TENSORS:
        for holder in ("cpu:0", "cpu:1"):
            assert joined[name].pieces(holder)[0].box == by_rules[name].pieces(holder)[0].box
    assert Manifest.from_dict(joined.to_dict()) == joined


@pytest.mark.parametrize("rank", [0, 1])
def test_mistakes_of_loaders_are_named(rank: int) -> None:
    """One tensor scaled, two swapped, one skipped, one transposed."""

    def wrong(change: Callable[[dict[str, Array]], dict[str, Array]]) -> Recording:
        return recorded(lambda tensors, rank: as_the_rules(change(dict(tensors)), rank), rank)

    rules = RULES.parameters_of(f"cpu:{rank}", TENSORS)
    with pytest.raises(sw.LayoutError, match="computes 16 of 32 elements of 'qkv'"):
        wrong(lambda tensors: tensors | {"q": tensors["q"] * 0.5})
    swapped = wrong(lambda tensors: tensors | {"k": tensors["v"], "v": tensors["k"]}).differences(rules)
    row = 2 * rank
    assert swapped == {"qkv": f"16 of 32 elements differ: [4, 0] is v[{row}, 0], not k[{row}, 0]"}
    skipped = wrong(lambda tensors: tensors | {"v": np.zeros((4, 4), np.float32)})
    assert skipped.unused == ("v",)
    assert skipped.differences(rules) == {"qkv": f"8 of 32 elements differ: [6, 0] is padding, not v[{row}, 0]"}
    transposed = wrong(lambda tensors: tensors | {"k": tensors["k"].T}).differences(rules)
    off_diagonal = 2 * (4 - 1)  # of two rows of four, one each is where it was
    at, here, there = ("[4, 1]", "k[1, 0]", "k[0, 1]") if rank == 0 else ("[4, 0]", "k[0, 2]", "k[2, 0]")
    assert transposed == {"qkv": f"{off_diagonal} of 32 elements differ: {at} is {here}, not {there}"}
    turned = recorded(lambda tensors, rank: as_the_rules(tensors, rank) | {"o": tensors["o"].T}, rank)
    assert turned.differences(rules) == {"o": "it is of shape (8, 4), not (4, 4)"}
    gone = recorded(lambda tensors, rank: {"qkv": as_the_rules(tensors, rank)["qkv"], "more": tensors["o"]}, rank)
    assert gone.differences(rules) == {
        "more": "it was recorded, but the other side does not have it",
        "o": "it was not recorded",
        "norm": "it was not recorded",
    }


def test_a_plan_fills_what_was_recorded() -> None:
    """From a trainer's layout to the engine's ranks, whose loader packs per head, transposes and repeats."""

    def load(tensors: Mapping[str, Array], rank: int) -> dict[str, Array]:
        heads = [np.split(tensors[name], 2)[rank] for name in ("k", "v")]
        packed = np.stack([each.reshape(2, 1, 4) for each in heads], 1).reshape(4, 4)
        return {
            "kv": np.concatenate([packed, packed]),
            "q": np.split(tensors["q"], 2)[1 - rank].T,
            "o": np.concatenate([tensors["o"][:, ::2], tensors["o"][:, 1::2]], 1),
            "norm": np.pad(tensors["norm"], (0, 2)),
        }

    trainer = {name: sw.TensorLayout(("dp", *(None,) * (len(shape) - 1)), sw.DeviceMesh((4,), ("dp",), list("wxyz")))
               for name, (shape, _) in TENSORS.items()}  # fmt: skip
    recordings = [recorded(load, rank) for rank in range(2)]
    engine = join_manifests(one.manifest for one in recordings)
    plan = sw.plan_model(trainer, engine, TENSORS)
    rng = np.random.default_rng(0)
    values = {name: rng.random(shape).astype(np.float32) for name, (shape, _) in TENSORS.items()}
    moved = plan.run({name: trainer[name].partition(array.shape).views(array) for name, array in values.items()})
    for rank, one in enumerate(recordings):
        memory = {name: np.zeros(parameter.shape, np.float32) for name, parameter in one.parameters.items()}
        targets = one.views(memory)
        for name, array in targets.items():
            array[...] = moved[name][engine[name].holders.index(f"cpu:{rank}")]
        one.fill(memory, targets)
        for name, array in load(values, rank).items():
            assert np.array_equal(memory[name], array), name


@pytest.mark.parametrize("family", ["llama-1", "qwen3-moe-1", "deepseek-v3-1", "gpt2-0"])
def test_a_whole_model_in_bfloat16(family: str) -> None:
    """Tens of thousands of elements in three digits: as numbers in int32, which vLLM's ranks were kept as."""
    said = read(family)
    shapes = {name: (tuple(shape), "bfloat16") for name, shape in said["tensors"].items()}
    stacked = [name for name, (shape, _) in shapes.items() if len(shape) == 2]

    def load(tensors: Mapping[str, Array]) -> dict[str, Array]:
        return {name: array.T if name in stacked else array for name, array in tensors.items()}

    found = sw.record(shapes, load)
    assert all(len(one.pieces) == 1 for one in found.parameters.values())
    values = numbered(said["tensors"])
    for name in stacked[:6]:
        made = put_together(found.parameters[name], values).astype("i4")
        assert digest(made) == digest(elements(said)[name].T)
