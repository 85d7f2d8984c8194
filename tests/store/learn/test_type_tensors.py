"""Tensors of a type learned by experiment: a type that is made here, of whose configuration all is known."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest

import shardwise as sw
from shardwise.rules.toml_tables import parse_toml
from shardwise.rules.type_tensors import TypeTensors
from shardwise.store.learn.type_tensors import learn_type_tensors, tensors_text

from ...checks import refused

Shape = tuple[int, ...]
BASE = {
    "model_type": "mine", "hidden": 24, "heads": 4, "kv_heads": 2, "head_dim": 6, "inner": 20, "words": 50, "layers": 4,
    "experts": 3, "first_dense": 1, "latent": 10, "tied": False, "bias": False, "kinds": ["full", "linear"] * 2,
    "theta": 1e4, "width": 2.0, "activation": "silu", "order": "before", "window": 16,
    "tower": {"hidden": 8, "depth": 2},
}  # fmt: skip
#: Larger than anything that is tried.
LARGE = BASE | {
    "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "inner": 11008, "words": 32000, "layers": 24,
    "experts": 40, "first_dense": 3, "latent": 512, "tied": True, "bias": True, "kinds": ["linear", "full", "full"] * 8,
    "activation": "gelu", "tower": {"hidden": 1024, "depth": 30},
}  # fmt: skip


def resolved(config: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in {**BASE, **config}.items() if key in BASE}
    found["tower"] = {**BASE["tower"], **found["tower"]}  # type: ignore[dict-item]
    if config.get("head_dim") is None:
        found["head_dim"] = found["hidden"] // found["heads"]
    return found


def tensors_of(config: Mapping[str, Any], *, odd: bool = False) -> dict[str, Shape]:
    c: Any = resolved(config)
    if c["heads"] % c["kv_heads"]:
        raise ValueError("heads are shared by whole numbers of heads")
    if c["order"] not in ("before", "after") or any(kind not in ("full", "linear") for kind in c["kinds"]):
        raise ValueError("there is no such order or kind")
    found: dict[str, Shape] = {"embed.weight": (c["words"], c["hidden"])}
    for i in range(c["layers"]):
        own: dict[str, Shape] = {}
        if c["kinds"][i] == "full":
            own["q.weight"] = (c["heads"] * c["head_dim"], c["hidden"])
            own["kv.weight"] = (2 * c["kv_heads"] * c["head_dim"], c["hidden"])
            if c["latent"] is not None:
                own |= {"q.weight": (c["heads"] * c["head_dim"], c["latent"]), "a.weight": (c["latent"], c["hidden"])}
            if c["bias"]:
                own["q.bias"] = (own["q.weight"][0],)
        else:
            own["mix.weight"] = (c["hidden"] + 2 * c["heads"], int(c["width"] * c["hidden"]))
        if i < c["first_dense"]:
            own["mlp.weight"] = (c["inner"], c["hidden"])
        else:
            own |= {f"experts.{e}.weight": (c["inner"], c["hidden"]) for e in range(c["experts"])}
        found |= {f"layers.{i}.{name}": shape for name, shape in own.items()}
    for i in range(c["tower"]["depth"]):
        found[f"tower.{i}.0.weight"] = (4 * c["tower"]["hidden"], c["tower"]["hidden"])
        found[f"tower.{i}.2.weight"] = (c["tower"]["hidden"], 4 * c["tower"]["hidden"])
    if not c["tied"]:
        found["head.weight"] = (c["words"], c["hidden"])
    if odd:
        found["odd.weight"] = (c["hidden"] ^ c["inner"],)
    return found


@functools.cache
def learned() -> dict[str, Any]:
    return learn_type_tensors(BASE, tensors_of, resolved, architecture="Mine", other_names={"n_embd": "hidden"})


@pytest.mark.heavy
def test_a_large_model_has_the_tensors_that_small_ones_say() -> None:
    table = learned()
    for config in (LARGE, {**LARGE, "head_dim": None}, {**LARGE, "tied": False, "first_dense": 0}):
        assert TypeTensors(table, "it").shapes(config) == tensors_of(config)
    # Too few models without a latent were seen to tell what the sizes of these follow from.
    with refused(sw.ParseError, "latent is None"):
        TypeTensors(table, "it").shapes({**LARGE, "latent": None})


@pytest.mark.heavy
def test_what_a_configuration_leaves_out_is_what_the_type_adds() -> None:
    table = TypeTensors(learned(), "it")
    for key in ("head_dim", "latent", "tied", "bias", "experts", "tower"):
        less = {name: value for name, value in LARGE.items() if name != key}
        assert table.shapes(less) == tensors_of(less), key
    other = {("n_embd" if name == "hidden" else name): value for name, value in LARGE.items()}
    assert table.shapes(other) == tensors_of(LARGE)
    with refused(sw.LayoutError, "kinds"):
        table.shapes({name: value for name, value in LARGE.items() if name != "kinds"})


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"width": 3.0}, "width is 3.0"),  # A factor that is no whole number is not followed.
        ({"order": "after"}, "order is 'after'"),  # Of texts no other is known to try.
        ({"kinds": ["full", "full", "conv"] * 8}, "kinds has 'conv'"),
        ({"architectures": ["MineForRanking"]}, "architectures"),
        ({"model_type": "yours"}, "yours"),
        ({"hidden": 0}, "it must be from 1 to"),
        ({"layers": 25}, "kinds has no entry 24"),
    ],
)
def test_what_was_not_tried_is_refused_by_name(changed: dict[str, Any], said: str) -> None:
    with pytest.raises((sw.ParseError, sw.LayoutError), match=said):
        TypeTensors(learned(), "it").shapes({**LARGE, **changed})


@pytest.mark.heavy
def test_a_size_that_no_expression_gives_is_named() -> None:
    with refused(sw.LayoutError, "odd.weight"):
        learn_type_tensors(BASE, functools.partial(tensors_of, odd=True), resolved)


def unlisted(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Tensors that follow from keys which no whole configuration has, as models take them by `getattr`."""
    c = resolved(config)
    per_head = config.get("per_head", c["hidden"] // c["heads"])
    found: dict[str, Shape] = {"q.weight": (c["heads"] * per_head, c["hidden"])}
    found["odd.weight"] = (config.get("odd", 7), 3)
    if config.get("scaled"):
        found["q.scale"] = (c["hidden"],)
    for n in range(config.get("further", 0)):
        found[f"further.{n}.weight"] = (c["hidden"], c["words"])
    return found


@pytest.mark.heavy
def test_keys_that_a_configuration_lacks_though_its_model_asks_for_them_are_followed_or_refused() -> None:
    asked = ("per_head", "odd", "scaled", "further", "colour")
    table = TypeTensors(learn_type_tensors(BASE, unlisted, resolved, unlisted=asked), "it")
    for more in ({}, {"per_head": 96}, {"scaled": True}, {"further": 2}, {"per_head": 32, "scaled": True, "colour": 1}):
        assert table.shapes({**LARGE, **more}) == unlisted({**LARGE, **more})
    with refused(sw.ParseError, "odd is 8"):
        table.shapes({**LARGE, "odd": 8})


def in_two_cases(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Layers are dense by their number, or because a list has them; no one list of conditions says so."""
    dense = [i for i in range(config["layers"]) if i in config["dense"] or (i + 1) % config["step"]]
    return {
        f"layers.{i}.{'dense' if i in dense else 'sparse'}.w": (config["hidden"], 3) for i in range(config["layers"])
    }


@pytest.mark.heavy
def test_tensors_that_are_there_in_either_of_two_cases_are_stated_twice() -> None:
    base = {"model_type": "mine", "hidden": 24, "layers": 6, "step": 2, "dense": []}
    table = TypeTensors(learn_type_tensors(base, in_two_cases, lambda config: {**base, **config}), "it")
    for more in ({}, {"dense": [0, 1, 7]}, {"step": 1, "dense": [3]}, {"step": 3}, {"step": 4, "dense": [11]}):
        config = {**base, "layers": 12, "hidden": 64, **more}
        assert table.shapes(config) == in_two_cases(config), more


@pytest.mark.heavy
def test_a_rules_file_states_them() -> None:
    document = parse_toml(tensors_text(learned()), "it")
    assert TypeTensors(document["tensors"], "it").shapes(LARGE) == tensors_of(LARGE)
