"""Rules learned from recordings: of an engine's loader that is written here, for sizes that were not recorded."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import shardwise as sw
from shardwise.deploy import Deployment
from shardwise.store import RecordedModel, learn_rules

Array = npt.NDArray[Any]
Config = dict[str, int]
Parameters = dict[str, Array]

SIZES = ("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
         "num_hidden_layers", "num_experts", "moe_intermediate_size")  # fmt: skip
FIRST: Config = dict(zip(SIZES, (16, 6, 4, 2, 40, 70, 2, 3, 20), strict=True))
SECOND: Config = dict(zip(SIZES, (24, 10, 8, 4, 56, 150, 1, 5, 28), strict=True))
THIRD: Config = dict(zip(SIZES, (20, 14, 12, 2, 44, 90, 3, 2, 36), strict=True))
#: Of which nothing is recorded.
ANOTHER: Config = dict(zip(SIZES, (32, 8, 16, 4, 72, 200, 4, 6, 24), strict=True))


def shapes_of(config: Config) -> dict[str, tuple[tuple[int, ...], str]]:
    hidden, size, heads, groups, inner, words, layers, experts, each = (config[name] for name in SIZES)
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (words, hidden)}
    for layer in (f"model.layers.{i}." for i in range(layers)):
        for name, rows in (("q", heads * size), ("k", groups * size), ("v", groups * size)):
            found[f"{layer}self_attn.{name}_proj.weight"] = rows, hidden
        found[f"{layer}self_attn.o_proj.weight"] = hidden, heads * size
        found[f"{layer}mlp.gate_proj.weight"] = found[f"{layer}mlp.up_proj.weight"] = inner, hidden
        found[f"{layer}mlp.down_proj.weight"] = hidden, inner
        found[f"{layer}input_layernorm.weight"] = (hidden,)
        for expert in range(experts):
            at = f"{layer}mlp.experts.{expert}."
            found[f"{at}w1.weight"] = found[f"{at}w3.weight"] = each, hidden
            found[f"{at}w2.weight"] = hidden, each
    return {name: (shape, "float32") for name, shape in found.items()}


def loaded(tensors: Mapping[str, Array], config: Config, ranks: int, rank: int) -> Parameters:
    """As engines do: fused by heads, keys and values repeated, experts stacked, one transposed, the words padded."""
    groups = config["num_key_value_heads"]

    def cut(name: str, dim: int = 0) -> Array:
        return np.split(tensors[name], ranks, dim)[rank]

    def keys(name: str) -> Array:
        return cut(name) if ranks <= groups else np.split(tensors[name], groups)[rank * groups // ranks]

    words = tensors["model.embed_tokens.weight"]
    made = {"embed.weight": np.split(np.pad(words, ((0, -len(words) % 64), (0, 0))), ranks)[rank]}
    for i in range(config["num_hidden_layers"]):
        old, new = f"model.layers.{i}.", f"blocks.{i}."
        attention = f"{old}self_attn."
        made[f"{new}qkv.weight"] = np.concatenate(
            [cut(f"{attention}q_proj.weight"), keys(f"{attention}k_proj.weight"), keys(f"{attention}v_proj.weight")]
        )
        made[f"{new}o.weight"] = cut(f"{attention}o_proj.weight", 1)
        made[f"{new}gate_up.weight"] = np.concatenate(
            [cut(f"{old}mlp.gate_proj.weight"), cut(f"{old}mlp.up_proj.weight")]
        )
        made[f"{new}down.weight"] = cut(f"{old}mlp.down_proj.weight", 1).T.copy()
        made[f"{new}norm.weight"] = tensors[f"{old}input_layernorm.weight"]
        experts = [f"{old}mlp.experts.{expert}." for expert in range(config["num_experts"])]
        made[f"{new}w13"] = np.stack([np.concatenate([cut(f"{e}w1.weight"), cut(f"{e}w3.weight")]) for e in experts])
        made[f"{new}w2"] = np.stack([cut(f"{e}w2.weight", 1) for e in experts])
    return made


Load = Callable[[Mapping[str, Array], Config, int, int], Parameters]


def model(config: Config, load: Load = loaded, counts: tuple[int, ...] = (1, 2, 4)) -> RecordedModel:
    return RecordedModel(
        config,
        {
            count: [
                sw.record(shapes_of(config), lambda given: load(given, config, count, rank), rank)  # noqa: B023
                for rank in range(count)
            ]
            for count in counts
        },
    )


def test_rules_hold_for_a_size_that_was_not_recorded(tmp_path: Path) -> None:
    learned = learn_rules([model(FIRST), model(SECOND), model(THIRD, counts=(1, 2, 4))])
    assert (learned.unexplained, learned.unused) == ({}, ())
    # Every parameter of every rank: 1 + 7 a layer, on 1, 2 and 4 ranks.
    assert learned.compared == sum(1 + 7 * one["num_hidden_layers"] for one in (FIRST, SECOND, THIRD)) * 7
    values = {name: np.random.default_rng(len(name)).random(shape) for name, (shape, _) in shapes_of(ANOTHER).items()}
    mesh = sw.DeviceMesh((8,), ("tp",))
    rules = sw.LayoutMap.from_toml(io.StringIO(learned.text), mesh, config=ANOTHER)
    whole = loaded(values, ANOTHER, 1, 0)
    for rank in range(8):
        for name, held in loaded(values, ANOTHER, 8, rank).items():
            partition = rules.partition(name, whole[name].shape)
            own = np.zeros(partition.holder_shape(f"cpu:{rank}"))
            for piece in partition.pieces(f"cpu:{rank}"):
                piece.view(own)[...] = whole[name][piece.box]
            assert np.array_equal(own, held), (name, rank)
    # And the rewrites make the whole parameters of the checkpoint.
    sw.save_checkpoint(tmp_path / "hf.safetensors", values, sync=False)
    rewrites = sw.Rewrites.from_toml(io.StringIO(learned.text), config=ANOTHER)
    sw.reshard_checkpoint(
        tmp_path / "hf.safetensors", tmp_path / "whole.safetensors", rewrites=rewrites, config=ANOTHER, sync=False
    )
    with sw.open_checkpoint(tmp_path / "whole.safetensors") as made:
        assert made.keys() == whole.keys()
        for name, array in whole.items():
            assert np.array_equal(made[name].read(), array), name


def test_what_is_learned_is_written_as_people_write_it() -> None:
    text = learn_rules([model(FIRST), model(SECOND), model(THIRD, counts=(1, 2))]).text
    for line in (
        'words = "vocab_size"',
        r"""'^blocks\.\d+\.qkv\.weight$' = """
        '[{ packed = "q:(heads@tp d) + k:(groups@tp/max d) + v:(groups@tp/max d)" }, []]',
        r"""'^blocks\.\d+\.o\.weight$' = [[], "tp"]""",
        r"""'^blocks\.\d+\.norm\.weight$' = [[]]""",
        r"""'^blocks\.\d+\.w2$' = [[], [], "tp"]""",
        'to = { name = "embed.weight", pad_to = 64 }',
        'to = { name = "blocks.{j}.w13", packed = "w1:(expert_inner) + w3:(expert_inner)", stack = "i" }',
        'to = { name = "blocks.{i}.down.weight", transpose = true }',
    ):
        assert line in text.splitlines(), line


def changed(name: str, by: Callable[[Array, int], Array]) -> Load:
    def load(tensors: Mapping[str, Array], config: Config, ranks: int, rank: int) -> Parameters:
        made = loaded(tensors, config, ranks, rank)
        return {key: by(one, rank) if key.endswith(name) else one for key, one in made.items()}

    return load


def test_what_no_rule_says_is_named_and_not_printed() -> None:
    """Rows in another order on one rank: all others are learned."""
    load = changed("o.weight", lambda one, rank: one[::-1].copy() if rank else one)
    learned = learn_rules([model(FIRST, load), model(SECOND, load), model(THIRD, load, (1, 2))])
    assert {name.partition(".o.")[2] for name in learned.unexplained} == {"weight"}
    assert set(learned.unexplained.values()) == {"its ranks hold it in a way that no rule can state"}
    assert r"\.o\." not in learned.text
    assert r"\.qkv\." in learned.text


def test_what_one_size_does_not_show_another_refutes() -> None:
    """With as many groups as ranks nothing says that keys are repeated; the last model has fewer."""
    learned = learn_rules([model(SECOND), model(FIRST)])
    assert set(learned.unexplained) == {"blocks.0.qkv.weight", "blocks.1.qkv.weight"}
    assert set(learned.unexplained.values()) == {"rank 0 of 4 of models[1] has it differently"}
    assert "qkv" not in learned.text


def test_the_last_model_is_a_check() -> None:
    """An engine that does otherwise for the size that was not learned from."""
    load = changed("down.weight", lambda one, rank: one[:, ::-1].copy())
    learned = learn_rules([model(FIRST), model(SECOND), model(THIRD, load)])
    assert {name.split(".")[2] for name in learned.unexplained} == {"down"}
    assert set(learned.unexplained.values()) == {"rank 0 of 1 of models[2] has it differently"}
    assert "down" not in learned.text
    assert learned.compared > 0


def rows_cut(names: list[str], rows: int) -> RecordedModel:
    """Return a model of tensors whose rows are cut, recorded on one rank and on two."""

    def load(tensors: Mapping[str, Array], ranks: int, rank: int) -> Parameters:
        return {name: np.split(one, ranks)[rank] for name, one in tensors.items()}

    def recorded(ranks: int, rank: int) -> sw.Recording:
        shapes = dict.fromkeys(names, ((rows, 4), "float32"))
        return sw.record(shapes, lambda tensors: load(tensors, ranks, rank), rank)

    held = {ranks: [recorded(ranks, rank) for rank in range(ranks)] for ranks in (1, 2)}
    return RecordedModel({"hidden_size": 4, "intermediate_size": rows}, held)


@pytest.mark.parametrize("layers", [(2, 3, 4), (3, 2, 4), (1, 1, 4)])
def test_numbers_within_words_are_named(layers: tuple[int, ...]) -> None:
    """A rule has a field for a number between dots only: it says nothing of layers that no model before has."""
    names = [[f"{layer}.w" for i in range(count) for layer in (f"l{i}", f"h.{i}")] for count in layers]
    learned = learn_rules([rows_cut(own, rows) for own, rows in zip(names, (12, 20, 28), strict=True)])
    why = (
        "only models[2] has it, and nothing is learned from that model; if its number is a layer's or an expert's, it "
        "must stand alone between dots, as in 'layers.0.w'"
    )
    assert learned.unexplained == {f"l{i}.w": why for i in range(max(layers[:2]), layers[2])}
    assert r"""'^h\.\d+\.w$' = ["tp", []]""" in learned.text


def test_what_the_other_models_lack() -> None:
    learned = learn_rules([rows_cut(["a", "c"], 12), rows_cut(["l1.w", "b"], 20), rows_cut(["a", "b", "c"], 28)])
    assert learned.unexplained.keys() == {"l1.w", "b"}
    assert learned.unexplained["b"] == "models[0] lacks it"
    assert learned.unexplained["l1.w"].startswith("models[0] lacks it; if its number is a layer's")


def test_what_is_refused() -> None:
    with pytest.raises(sw.LayoutError, match="models has 1; rules are learned from one or more, and checked on"):
        learn_rules([model(FIRST, counts=(1,))])
    with pytest.raises(sw.LayoutError, match="each model must also be recorded on one rank"):
        learn_rules([model(FIRST, counts=(1,)), RecordedModel(SECOND, {2: []})])
    with pytest.raises(TypeError, match="models"):
        learn_rules([1, 2])  # type: ignore[list-item]


def staged(tensors: Mapping[str, Array], config: Config, sizes: tuple[int, ...], at: tuple[int, ...]) -> Parameters:
    """Experts are whole on `ep` and cut by `tp`, all else is cut by both; the words are on both ends."""
    (pp, ep, tp), (stage, own, rank) = sizes, at
    made = loaded(tensors, config, ep * tp, own * tp + rank)
    experts = loaded(tensors, config, tp, rank)
    made |= {name: np.split(value, ep)[own] for name, value in experts.items() if name.endswith(("w13", "w2"))}
    each, more = divmod(config["num_hidden_layers"], pp)
    counts = [each + (1 if number >= pp - more else 0) for number in range(pp)]  # The last ones have one more.
    mine = range(sum(counts[:stage]), sum(counts[: stage + 1]))
    return {
        name: value
        for name, value in made.items()
        if (int(name.split(".")[1]) in mine if name.startswith("blocks.") else stage in (0, pp - 1))
    }


def staged_model(config: Config, *sizes: tuple[int, ...]) -> RecordedModel:
    return RecordedModel(
        config,
        {
            one: [
                sw.record(shapes_of(config), lambda given: staged(given, config, one, at), rank)  # noqa: B023
                for rank, at in enumerate(np.ndindex(*one))
            ]
            for one in sizes
        },
    )


@pytest.mark.slow
def test_rules_of_stages_and_experts_hold_for_sizes_that_were_not_recorded() -> None:
    first, second = FIRST | {"num_hidden_layers": 4, "num_experts": 4}, SECOND | {"num_hidden_layers": 2}
    last = SECOND | {"num_hidden_layers": 4, "num_experts": 2}
    models = [
        staged_model(first, (1, 1, 1), (3, 2, 1), (1, 2, 2)),
        staged_model(second | {"num_experts": 2}, (1, 1, 1), (2, 1, 2)),
        staged_model(last, (1, 1, 1), (3, 2, 2)),
    ]
    learned = learn_rules(models, ("pp", "ep", "tp"), stages="pp")
    assert learned.unexplained == {}
    for line in (
        'stage = { layers = "layers", pp = "pp", extra = "last" }',
        """'^embed\\.weight$' = { axes = [["ep", "tp"], []], at = { pp = [0, "pp - 1"] } }""",
        """'^blocks\\.{i}\\.w2$' = { axes = ["ep", [], "tp"], at = { pp = "stage[i]" } }""",
    ):
        assert line in learned.text.splitlines(), line
    # Other sizes of the ranks and of the model, of which nothing was recorded: the numbers at the top are changed.
    config, sizes = ANOTHER | {"num_hidden_layers": 7, "num_experts": 8}, (4, 4, 2)
    text = re.sub(
        r"(?m)^(pp|ep|tp) = \d+$", lambda m: f"{m[1]} = {sizes[['pp', 'ep', 'tp'].index(m[1])]}", learned.text
    )
    rules = Deployment.from_toml(io.StringIO(text), config=config, world=range(32))
    values = {name: np.random.default_rng(len(name)).random(shape) for name, (shape, _) in shapes_of(config).items()}
    whole = loaded(values, config, 1, 0)
    for rank, at in enumerate(np.ndindex(*sizes)):
        held = staged(values, config, sizes, at)
        for name, value in whole.items():
            partition = rules.partition(name, value.shape)
            assert (rank in partition.holders) == (name in held), (name, rank)
            if name in held:
                own = np.zeros(partition.holder_shape(rank))
                for piece in partition.pieces(rank):
                    piece.view(own)[...] = value[piece.box]
                assert np.array_equal(own, held[name]), (name, rank)


def test_a_parameter_that_only_stages_have_is_named() -> None:
    def load(given: Mapping[str, Array], ranks: int, rank: int) -> Parameters:
        return {"head" if rank and ranks > 1 else "embed": given["words"]}

    shapes = {"words": ((4, 2), "float32")}
    models = [
        RecordedModel(
            {"vocab_size": 4},
            {
                count: [sw.record(shapes, lambda given: load(given, count, rank), rank) for rank in range(count)]  # noqa: B023
                for count in (1, 2)
            },
        )
        for _ in range(2)
    ]
    learned = learn_rules(models, ("pp",), stages="pp")
    assert learned.unexplained == {"head": "it exists only on several ranks"}
    assert "at = { pp = 0 }" in learned.text


def test_keys_are_sizes_of_the_axes() -> None:
    one = model(FIRST, counts=(1,))
    with pytest.raises(sw.LayoutError, match=r"models\[0\] was recorded on 1 ranks; a key must be the size of each of"):
        learn_rules([one, one], ("pp", "tp"), stages="pp")
    with pytest.raises(sw.LayoutError, match="stages is 'pp', which is not one of the axes"):
        learn_rules([one, one], ("ep", "tp"), stages="pp")
    with pytest.raises(sw.LayoutError, match=r"models\[0\] has 1 recordings for 2 ranks"):
        learn_rules([RecordedModel(FIRST, {1: one.ranks[1], 2: one.ranks[1]}), one])  # type: ignore[index]


def test_tensors_that_a_loader_leaves_out_are_dropped_in_all_layers() -> None:
    def load(tensors: Mapping[str, Array], config: Config, ranks: int, rank: int) -> Parameters:
        return {name: value for name, value in loaded(tensors, config, ranks, rank).items() if "norm" not in name}

    learned = learn_rules([model(FIRST, load), model(SECOND, load), model(THIRD, load)])
    assert not learned.unexplained
    assert 'drop = ["model.layers.{i}.input_layernorm.weight"]' in learned.text
