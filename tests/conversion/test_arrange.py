"""Rewrites of dims, compared with numpy's reshape, transpose and concatenate; and their inverses."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardwise as sw

from ..checks import same_tensors

Model = dict[str, np.ndarray[Any, Any]]


@st.composite
def grouped(draw: st.DrawFn, names: list[str]) -> list[list[str]]:
    """The names in any order, as dims: several as one, or none as a dim of one element."""
    order = draw(st.permutations(names))
    cuts = sorted(draw(st.lists(st.integers(0, len(order)), max_size=4)))
    return [list(order[begin:end]) for begin, end in itertools.pairwise([0, *cuts, len(order)])]


def text_of(groups: list[list[str]]) -> str:
    return " ".join(f"({' '.join(group)})" if len(group) > 1 else group[0] if group else "1" for group in groups)


@pytest.mark.filterwarnings("ignore:no rule that applies uses the axis:shardwise.ShardwiseWarning")
@pytest.mark.heavy
@pytest.mark.parametrize("large", [False, True])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_arrangement_is_that_of_numpy(
    tmp_path_factory: pytest.TempPathFactory, large: bool, data: st.DataObject
) -> None:
    """Dims split, merged, permuted and stacked in any way; large ones have too many boxes to copy one by one."""
    folder = tmp_path_factory.mktemp("any")
    names = [f"n{i}" for i in range(data.draw(st.integers(1, 3 if large else 4)))]
    fields = [f"f{i}" for i in range(data.draw(st.integers(0, 1 if large else 2)))]
    sizes = {name: data.draw(st.sampled_from([17, 24] if large else [1, 2, 3])) for name in names}
    sizes |= {field: data.draw(st.integers(1, 3)) for field in fields}
    common = data.draw(grouped(names))
    stored = data.draw(grouped([*names, *fields]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    places = list(itertools.product(*(range(sizes[field]) for field in fields)))
    shape = [int(np.prod([sizes[name] for name in group], dtype=int)) for group in common]
    layers = {place: rng.integers(0, 255, shape).astype("u1") for place in places}
    plain = {".".join(["w", *map(str, place)]): value for place, value in layers.items()}
    template = ".".join(["w", *(f"{{{field}}}" for field in fields)])
    rewrites = sw.Rewrites(
        [{"from": template, "to": {"name": "all", "dims": f"{text_of(stored)} -> {text_of(common)}", **sizes}}]
    )
    atoms = [*fields, *(name for group in common for name in group)]
    order = [atoms.index(name) for group in stored for name in group]
    whole = np.stack([layers[place] for place in places]).reshape([sizes[name] for name in atoms]).transpose(order)
    expected = whole.reshape([int(np.prod([sizes[name] for name in group], dtype=int)) for group in stored])
    # The source is cut in any way, and so is the new one.
    mesh = sw.DeviceMesh((2, 2), ("x", "y"))
    axes = data.draw(st.permutations(["x", "y", None, None, None]))

    def cut(rank: int) -> tuple[str | None, ...]:
        return tuple((*axes, *[None] * rank)[:rank])

    source = sw.LayoutMap(mesh)
    source["w"] = cut(len(shape))
    sw.save_checkpoint(folder / "a", plain, source, uneven="chunk", sync=False)
    layouts = sw.LayoutMap(mesh)
    layouts["all"] = cut(expected.ndim)
    sw.reshard_checkpoint(folder / "a", folder / "b", layouts, rewrites=rewrites, uneven="chunk", sync=False)
    same_tensors(folder / "b", {"all": np.ascontiguousarray(expected)})
    sw.reshard_checkpoint(folder / "b", folder / "c", rewrites=rewrites.inverse(), memory=1 << 20, sync=False)
    same_tensors(folder / "c", plain)
    assert eval(repr(rewrites), {"Rewrites": sw.Rewrites}) == rewrites


def test_a_dim_of_no_size_beside_one_of_two_is_not_what_was_stored(tmp_path: Path) -> None:
    """As many dims as before, of which each is made of one size, and yet others."""
    plain = {"w": np.arange(15, dtype="i4").reshape(1, 15)}
    made = rewritten(tmp_path, plain, {"from": "w", "to": {"name": "all", "dims": "a b -> 1 (a b)", "a": 3, "b": 5}})
    same_tensors(tmp_path / "b", {"all": plain["w"].reshape(3, 5)})
    assert made["all"].shape == (3, 5)


def values(*shape: int) -> np.ndarray[Any, Any]:
    return np.arange(np.prod(shape, dtype=int), dtype="i4").reshape(shape)


def rewritten(folder: Path, before: Model, *rewrites: Any, **more: Any) -> Model:
    """What rewrites make of tensors, after the inverse has given them back."""
    sw.save_checkpoint(folder / "a", before, sync=False)
    made = sw.Rewrites(rewrites, **more)
    sw.reshard_checkpoint(folder / "a", folder / "b", rewrites=made, sync=False)
    sw.reshard_checkpoint(folder / "b", folder / "c", rewrites=made.inverse(), sync=False)
    same_tensors(folder / "c", before)
    with sw.open_checkpoint(folder / "b") as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint}


def test_heads_apart_and_layers_along_the_second_dim(tmp_path: Path) -> None:
    """As MaxText stores the queries of all layers: (hidden, layers, heads, head dim)."""
    layers = [values(6, 5) + 100 * i for i in range(3)]
    made = rewritten(
        tmp_path,
        {f"model.layers.{i}.q_proj.weight": layer for i, layer in enumerate(layers)},
        {
            "from": "model.layers.{i}.q_proj.weight",
            "to": {"name": "query.kernel", "dims": "hidden i heads d -> (heads d) hidden", "heads": "heads"},
        },
        numbers={"heads": 2},
    )
    expected = np.stack([layer.T.reshape(5, 2, 3) for layer in layers], axis=1)
    assert np.array_equal(made["query.kernel"], expected)


def test_tensors_one_after_the_other_in_a_dim(tmp_path: Path) -> None:
    """As Megatron's grouped experts: (hidden, experts * rows)."""
    experts = [values(4, 3) + 100 * e for e in range(5)]
    made = rewritten(
        tmp_path,
        {f"experts.{e}.w": expert for e, expert in enumerate(experts)},
        {"from": "experts.{e}.w", "to": {"name": "weight1", "dims": "hidden (e rows) -> rows hidden", "e": 5}},
    )
    assert np.array_equal(made["weight1"], np.concatenate([expert.T for expert in experts], axis=1))


def test_two_dims_flattened_in_one_are_both_cut(tmp_path: Path) -> None:
    """Experts over ep and their features over tp, where a file has (experts * features, hidden)."""
    flat = values(4 * 6, 3)
    sw.save_checkpoint(tmp_path / "a", {"w": flat}, sync=False)
    rewrites = sw.Rewrites([{"from": {"name": "w", "dims": "(e f) h -> e f h", "e": 4}, "to": "w"}])
    layouts = {"w": sw.TensorLayout(("ep", "tp", None), sw.DeviceMesh((2, 3), ("ep", "tp")))}
    sw.reshard_checkpoint(tmp_path / "a", tmp_path / "b", layouts, rewrites=rewrites, sync=False)
    same_tensors(tmp_path / "b", {"w": flat.reshape(4, 6, 3)})
    with sw.open_checkpoint(tmp_path / "b") as checkpoint:
        boxes = {tuple((side.start, side.stop) for side in piece.box) for piece in checkpoint["w"].pieces}
    assert boxes == {((2 * e, 2 * e + 2), (2 * f, 2 * f + 2), (0, 3)) for e in range(2) for f in range(3)}
    sw.reshard_checkpoint(tmp_path / "b", tmp_path / "c", rewrites=rewrites.inverse(), sync=False)
    same_tensors(tmp_path / "c", {"w": flat})


def test_stacks_of_stacks(tmp_path: Path) -> None:
    whole = values(2, 3, 4, 5)
    before = {f"l.{i}.e.{e}.w": whole[i, e] for i in range(2) for e in range(3)}
    for stack in (["i", "e"], ["e", "i"]):
        (tmp_path / stack[0]).mkdir()
        made = rewritten(tmp_path / stack[0], before, {"from": "l.{i}.e.{e}.w", "to": {"name": "w", "stack": stack}})
        assert np.array_equal(made["w"], whole if stack[0] == "i" else whole.swapaxes(0, 1))


def test_rotary_halves_in_turn(tmp_path: Path) -> None:
    """Meta's order of a head's rows to Hugging Face's: view(heads, d / 2, 2, in).transpose(1, 2)."""
    stored = values(24, 3)
    made = rewritten(
        tmp_path,
        {"wq": stored},
        {
            "from": {"name": "wq", "dims": "(heads half two) n -> (heads two half) n", "heads": 2, "two": 2},
            "to": {"name": "q", "dims": "(heads two half) n -> (heads two half) n", "heads": 2, "two": 2},
        },
    )
    assert np.array_equal(made["q"], stored.reshape(2, 6, 2, 3).swapaxes(1, 2).reshape(24, 3))


def test_numbers_shifted_in_names(tmp_path: Path) -> None:
    """A stage of a pipeline begins with layer 4; the last two layers are for predicting further tokens."""
    before = {f"layers.{i}.w": values(2) + i for i in range(4, 8)}
    made = rewritten(
        tmp_path,
        before,
        {"from": "layers.{i+last}.w", "to": "mtp.{i}.w"},
        {"from": "layers.{i+4}.w", "to": "stage.{i+0}.w"},
        numbers={"last": 6},
    )
    assert {name: int(value[0]) for name, value in made.items()} == {
        "stage.0.w": 4,
        "stage.1.w": 5,
        "mtp.0.w": 6,
        "mtp.1.w": 7,
    }


def test_every_second_layer_is_stacked(tmp_path: Path) -> None:
    before = {f"layers.{i}.w": values(2) + i for i in range(5)}
    rewrite = {"from": "layers.{i*every+k}.w", "to": {"name": "block_{k}.w", "stack": "i"}}
    made = rewritten(tmp_path, before, rewrite, numbers={"every": 2})
    assert {name: value[:, 0].tolist() for name, value in made.items()} == {"block_0.w": [0, 2, 4], "block_1.w": [1, 3]}


def test_numbers_shifted_below_zero_do_not_match(tmp_path: Path) -> None:
    sw.save_checkpoint(tmp_path / "a", {"l.1.w": values(2), "l.x.w": values(2), "l.05.w": values(2)}, sync=False)
    rewrites = sw.Rewrites([{"from": "l.{i+2}.w", "to": "m.{i}.w", "optional": True}])
    sw.reshard_checkpoint(tmp_path / "a", tmp_path / "b", rewrites=rewrites, sync=False)
    with sw.open_checkpoint(tmp_path / "b") as checkpoint:
        assert set(checkpoint) == {"l.1.w", "l.x.w", "l.05.w"}
    for template in ("m.{i-2}.w", "m.{i+2}.w"):
        with pytest.raises(
            sw.LayoutError, match=r"\{i\} is '(1|x|05)', which does not give a whole number of 0 or more"
        ):
            sw.reshard_checkpoint(
                tmp_path / "a", tmp_path / "c", rewrites=sw.Rewrites([{"from": "l.{i}.w", "to": template}])
            )


def test_a_name_that_means_two_things(tmp_path: Path) -> None:
    """The norm before a layer is called by the kind of the layer, which only its other tensors say."""
    before = {f"h.{i}.norm": values(2) + i for i in range(3)}
    before |= {"h.0.mlp.w": values(2, 2), "h.1.experts.w": values(3, 2), "h.2.mlp.w": values(2, 2)}
    made = rewritten(
        tmp_path,
        before,
        {"from": {"name": "h.{i}.norm", "where": "h.{i}.experts.w"}, "to": "l.{i}.pre_mlp_norm"},
        {"from": "h.{i}.norm", "to": "l.{i}.fc1.norm"},
    )
    assert {name for name in made if "norm" in name} == {"l.0.fc1.norm", "l.1.pre_mlp_norm", "l.2.fc1.norm"}
    with pytest.raises(sw.LayoutError, match="'where' has fields that 'name' does not have"):
        sw.Rewrites([{"from": {"name": "h.{i}", "where": "h.{i}.{e}"}, "to": "l.{i}"}])


def test_one_tensor_under_two_names(tmp_path: Path) -> None:
    words = values(3, 2)
    rewrite = {"from": "wte", "to": {"name": "embedding", "also": ["output_layer"], "transpose": True}}
    made = rewritten(tmp_path, {"wte": words, "ln": values(2)}, rewrite)
    assert set(made) == {"embedding", "output_layer", "ln"}
    assert np.array_equal(made["output_layer"], words.T)
    with sw.open_checkpoint(tmp_path / "b") as checkpoint:
        assert {checkpoint["embedding"].alias_of, checkpoint["output_layer"].alias_of} != {None}
    # The second name may be missing; if it is there, it must hold the same.
    back = sw.Rewrites([rewrite]).inverse()
    sw.save_checkpoint(tmp_path / "one", {"embedding": words.T}, sync=False)
    sw.reshard_checkpoint(tmp_path / "one", tmp_path / "d", rewrites=back, sync=False)
    same_tensors(tmp_path / "d", {"wte": words})
    sw.save_checkpoint(tmp_path / "other", {"embedding": words.T, "output_layer": words.T + 1}, sync=False)
    with pytest.raises(sw.ShardwiseError, match="replicas disagree; the first element of"):
        sw.reshard_checkpoint(tmp_path / "other", tmp_path / "e", rewrites=back, sync=False)
    sw.reshard_checkpoint(tmp_path / "other", tmp_path / "f", rewrites=back, replicas="first", sync=False)
    same_tensors(tmp_path / "f", {"wte": words})
    sw.save_checkpoint(tmp_path / "short", {"embedding": words.T, "output_layer": words}, sync=False)
    with pytest.raises(sw.LayoutError, match="'embedding' and 'output_layer' should be the same"):
        sw.reshard_checkpoint(tmp_path / "short", tmp_path / "g", rewrites=back, sync=False)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_zigzag(tmp_path: Path, dim: int) -> None:
    """Context parallelism: rank i of k has the chunks i and 2k - 1 - i."""
    ranks, tokens = 3, values(12, 12)
    made = rewritten(tmp_path, {"x": tokens}, {"from": "x", "to": {"name": "y", "dim": dim, "zigzag": ranks}})
    chunks = np.split(tokens, 2 * ranks, dim)
    expected = [chunk for i in range(ranks) for chunk in (chunks[i], chunks[2 * ranks - 1 - i])]
    assert np.array_equal(made["y"], np.concatenate(expected, dim))


def test_arithmetic_is_refused_by_name(tmp_path: Path) -> None:
    rewrite = {"from": "l.{i}.norm", "to": "n.{i}", "refused": "it is stored there as w - 1", "optional": True}
    for rewrites, name in ((sw.Rewrites([rewrite]), "l.0.norm"), (sw.Rewrites([rewrite]).inverse(), "n.0")):
        sw.save_checkpoint(tmp_path / name, {name: values(2)}, sync=False)
        with pytest.raises(sw.LayoutError, match=f"tensor '{name}' cannot be rewritten: it is stored there as w - 1"):
            sw.reshard_checkpoint(tmp_path / name, tmp_path / "b", rewrites=rewrites)
        other = {"other": values(2)}
        sw.save_checkpoint(tmp_path / f"{name}-other", other, sync=False)
        sw.reshard_checkpoint(tmp_path / f"{name}-other", tmp_path / f"{name}-same", rewrites=rewrites, sync=False)
        same_tensors(tmp_path / f"{name}-same", other)


@pytest.mark.parametrize(
    ("side", "message"),
    [
        ({"dims": "a b -> (a b)"}, r"'x': dim 0 is \(a b\), but the size of neither a nor b is given"),
        (
            {"dims": "a (b c) -> (a b c)", "a": 5, "b": 2},
            r"'x': dim 0 has 12 elements, and is \(a b c\), where a = 5, b = 2",
        ),
        ({"dims": "a b -> a b"}, r"'x': it has 1 dim; 'a b -> a b' is for 2"),
        ({"dims": "(a b) 1 -> a b 1"}, r"'x': it has 1 dim;"),
        ({"zigzag": 4}, "'x': dim 0 has 12 elements, which zigzag = 4 does not cut into 8 chunks"),
    ],
)
def test_dims_that_do_not_fit(tmp_path: Path, side: dict[str, Any], message: str) -> None:
    sw.save_checkpoint(tmp_path / "a", {"x": values(12)}, sync=False)
    with pytest.raises(sw.LayoutError, match=message):
        sw.reshard_checkpoint(
            tmp_path / "a", tmp_path / "b", rewrites=sw.Rewrites([{"from": "x", "to": {"name": "y", **side}}])
        )


def test_a_number_of_tensors_that_disagrees(tmp_path: Path) -> None:
    sw.save_checkpoint(tmp_path / "a", {f"w.{i}": values(2) for i in range(3)}, sync=False)
    to = {"name": "w", "dims": "i n -> n"}
    with pytest.raises(sw.LayoutError, match="i = 4, but the number of tensors along i is 3"):
        sw.reshard_checkpoint(
            tmp_path / "a", tmp_path / "b", rewrites=sw.Rewrites([{"from": "w.{i}", "to": {**to, "i": 4}}])
        )
    sw.save_checkpoint(tmp_path / "c", {f"w.{name}": values(2) for name in ("0.0", "1.1", "1.0")}, sync=False)
    rewrites = sw.Rewrites([{"from": "w.{a}.{b}", "to": {"name": "w", "stack": ["a", "b"]}}])
    with pytest.raises(sw.LayoutError, match=r"stack of 4 tensors, but none has a = 0, b = 1; one has a = "):
        sw.reshard_checkpoint(tmp_path / "c", tmp_path / "b", rewrites=rewrites)


def test_empty_tensors(tmp_path: Path) -> None:
    made = rewritten(
        tmp_path,
        {f"w.{i}": np.zeros((0, 4), "f4") for i in range(2)},
        {"from": "w.{i}", "to": {"name": "w", "dims": "(i b) rows a -> rows (a b)", "a": 2, "i": 2}},
    )
    assert made["w"].shape == (4, 0, 2)
