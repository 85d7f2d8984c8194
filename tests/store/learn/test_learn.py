"""Rewrites worked out from two checkpoints: applied, they lead from the one to the other."""

from __future__ import annotations

import io
import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.cli import main
from shardwise.store import learn_rewrites
from tests.checks import swapped

from ...cli.conftest import write_checkpoint
from ...oracle import engines

Tensors = dict[str, np.ndarray[Any, Any]]
Entry = dict[str, Any]
H = 6


def kinds(rng: np.random.Generator) -> dict[str, Callable[[str, str], tuple[dict[str, Any], Entry]]]:
    """Ways in which engines differ: for two names the tensors of a layer, and the rewrite of all layers."""
    n, m = (int(rng.integers(2, 5)) * 2 for _ in "nm")
    heads, d = int(rng.integers(2, 4)), int(rng.integers(2, 4)) * 2
    layers = "h.{i}."

    def one(shape: tuple[int, ...], **to: Any) -> Any:
        def made(old: str, new: str) -> tuple[dict[str, Any], Entry]:
            is_stacked = "stack" in to or re.search(r"\bi\b", to.get("dims", "")) is not None
            name = f"blocks.{new}" if is_stacked else f"blocks.{{i}}.{new}"
            return {old: shape}, {"from": layers + old, "to": {"name": name, **to}}

        return made

    def parts(sizes: dict[str, int], packed: str, *, transpose: bool = False, **to: Any) -> Any:
        def made(old: str, new: str) -> tuple[dict[str, Any], Entry]:
            name = f"blocks.{new}" if "stack" in to else f"blocks.{{i}}.{new}"
            names = {part: f"{layers}{old}.{part}_proj" for part in sizes}
            shapes = {f"{old}.{part}_proj": (H, size) if transpose else (size, H) for part, size in sizes.items()}
            return shapes, {"from": {"parts": names}, "to": {"name": name, "packed": packed, **to}}

        return made

    def padded(old: str, new: str) -> tuple[dict[str, Any], Entry]:
        return {old: (n + 1, H)}, {
            "from": layers + old,
            "to": {"name": f"blocks.{{i}}.{new}", "pad_to": 8},
            "size": n + 1,
        }

    def moved(old: str, new: str) -> tuple[dict[str, Any], Entry]:
        return {old: (n, H)}, {"from": layers + old, "to": f"stage.{{i+4}}.{new}"}

    def grouped(old: str, new: str) -> tuple[dict[str, Any], Entry]:
        source = {"name": layers + old, "packed": f"q:({heads} {d}) + k:({heads} 2)"}
        target = {"name": f"blocks.{{i}}.{new}", "packed": f"({heads} [q:{d} k:2])"}
        return {old: (heads * (d + 2), H)}, {"from": source, "to": target}

    qkv = {"q": heads * d, "k": heads * 2, "v": heads * 2}
    return {
        "plain": one((n, H)),
        "vector": one((n,)),
        "shifted": moved,
        "transposed": one((n, H), transpose=True),
        "stacked": one((n, H), stack="i"),
        "stacked and transposed": one((n, H), stack="i", transpose=True),
        "stacked vectors": one((n,), stack="i"),
        "padded": padded,
        "zigzag": one((8 * n, H), zigzag=4),
        "blocks": parts(qkv, f"q:({heads * d}) + k:({heads * 2}) + v:({heads * 2})"),
        "groups": parts(qkv, f"({heads} [q:{d} k:2 v:2])"),
        "row by row": parts({"gate": n, "up": n}, f"({n} [gate:1 up:1])"),
        "up first": parts({"gate": n, "up": n}, f"up:({n}) + gate:({n})", stack="i"),
        "columns": parts({"gate": n, "up": m}, f"gate:({n}) + up:({m})", transpose=True, dim=1),
        "columns, stacked": parts({"gate": n, "up": m}, f"gate:({n}) + up:({m})", transpose=True, dim=1, stack="i"),
        "regrouped": grouped,
        "heads apart": one((heads * d, H), dims=f"f heads d={d} -> (heads d) f"),
        "heads merged": one((heads, d, H), dims=f"(heads d={d}) f -> heads d f"),
        "permuted": one((n, m, H), dims="c a b -> a b c"),
        "one after the other": one((n, H), dims=f"f (i rows={n}) -> rows f"),
        "rotary": one((2 * n, H), dims=f"(half two={n}) f -> (two half=2) f"),
    }  # fmt: skip


def model(seed: int) -> tuple[Tensors, list[Entry]]:
    rng = np.random.default_rng(seed)
    tensors: Tensors = {"embed.weight": rng.normal(size=(11, H)).astype("f4")}
    entries: list[Entry] = [{"from": "embed.weight", "to": {"name": "tok.weight", "pad_to": 4}, "size": 11}]
    known = kinds(rng)
    layers = int(rng.integers(2, 4))
    for at, kind in enumerate(rng.choice(sorted(known), 3, replace=False)):
        shapes, entry = known[kind](f"old{'abc'[at]}", f"new{'xyz'[at]}")
        for name, shape in shapes.items():
            tensors |= {f"h.{i}.{name}": rng.normal(size=shape).astype("f4") for i in range(layers)}
        entries.append(entry)
    return tensors, entries


def learnt(first: Path, second: Path) -> sw.Rewrites:
    found = learn_rewrites(first, second)
    assert found.unexplained == {}, found
    rewrites = sw.Rewrites.from_toml(io.StringIO(found.text))
    assert sw.diff_checkpoints(first, second, rewrites=rewrites or None) == []
    return rewrites


@pytest.mark.parametrize("seed", [*range(60), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(60, 300))])
def test_random_rewrites_are_found(tmp_path: Path, seed: int) -> None:
    tensors, entries = model(seed)
    sw.save_checkpoint(tmp_path / "a", tensors, to="hf", sync=False)
    sw.reshard_checkpoint(tmp_path / "a", tmp_path / "b", to="hf", rewrites=sw.Rewrites(entries), sync=False)
    forward = learnt(tmp_path / "a", tmp_path / "b")
    # Generalised: no rewrite is for one layer.
    assert len(forward.sets[0].rewrites) <= 3 * len(entries)
    learnt(tmp_path / "b", tmp_path / "a")


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2", "qwen3", "mixtral"])
@pytest.mark.parametrize("engine", ["vllm", "torch_dist"])
def test_conversions_of_engines(tmp_path: Path, name: str, engine: str) -> None:
    whole = engines.hugging_face(name, 0)
    sw.save_checkpoint(tmp_path / "a", whole, sync=False)
    sw.save_checkpoint(tmp_path / "b", engines.ENGINES[engine](name, whole), sync=False)
    forward = learnt(tmp_path / "a", tmp_path / "b")
    assert forward.sets[0].drop == ()
    learnt(tmp_path / "b", tmp_path / "a")


@pytest.mark.parametrize("what", ["gate and up", "two heads"])
def test_a_planted_swap_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    """One layer that is made otherwise than the others is a mistake; the rewrites of the rest are right."""
    rng = np.random.default_rng(3)
    shapes = {
        "self_attn.q_proj": 32,
        "self_attn.k_proj": 8,
        "self_attn.v_proj": 8,
        "mlp.gate_proj": 12,
        "mlp.up_proj": 12,
    }
    whole = {
        f"model.layers.{i}.{n}.weight": rng.normal(size=(rows, 16)) for i in range(4) for n, rows in shapes.items()
    }
    sw.save_checkpoint(tmp_path / "a", whole, to="hf", sync=False)
    fused: Tensors = {}
    for i in range(4):
        own = {name: whole[f"model.layers.{i}.{name}.weight"] for name in shapes}
        attention, mlp = (np.concatenate([own[name] for name in own if name.startswith(at)]) for at in ("self", "mlp"))
        fused |= {f"layers.{i}.qkv": attention, f"layers.{i}.gate_up": mlp}
    name, first, second = (
        ("gate_up", slice(12), slice(12, 24)) if what == "gate and up" else ("qkv", slice(8), slice(16, 24))
    )
    swapped(fused[f"layers.2.{name}"], first, second)
    sw.save_checkpoint(tmp_path / "b", fused, to="hf", sync=False)
    found = learn_rewrites(tmp_path / "a", tmp_path / "b")
    assert set(found.unexplained) == {f"layers.2.{name}"}
    assert main(["learn", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    said = capsys.readouterr()
    assert said.out == found.text
    assert f"layers.2.{name}" in said.err
    # Its sources are in it, if not as they should be.
    assert name == "gate_up" or "is in no tensor that the rewrites make" in said.err
    assert "is in no tensor of the second checkpoint\n" not in said.err
    # What was right is in the rules.
    assert "q:(32) + k:(8) + v:(8)" in found.text or name == "qkv"


def test_nothing_is_to_be_rewritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sw.save_checkpoint(tmp_path / "a", {"w": np.arange(64.0).reshape(8, 8)}, to="hf", sync=False)
    assert main(["learn", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    said = capsys.readouterr().out
    assert said.startswith("# Nothing is to be rewritten")
    assert not sw.Rewrites.from_toml(io.StringIO(said))


def test_equal_tensors_are_told_by_their_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = {f"h.{i}.{norm}.weight": np.ones(8) for i in range(3) for norm in ("input_norm", "post_norm")}
    whole |= {"left.out": np.arange(5.0)}
    sw.save_checkpoint(tmp_path / "a", whole, to="hf", sync=False)
    other = {name.replace("h.", "layers."): value for name, value in whole.items() if name != "left.out"}
    sw.save_checkpoint(tmp_path / "b", {name: value.copy() for name, value in other.items()}, to="hf", sync=False)
    assert main(["learn", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    said = capsys.readouterr()
    assert 'from = "h.{i}.input_norm.weight"\nto = "layers.{i}.input_norm.weight"' in said.out
    assert 'drop = ["left.out"]' in said.out
    assert "'left.out' is in no tensor of the second" in said.err
    assert "could be made of several equal tensors" in said.err
    (tmp_path / "rules.toml").write_text(said.out)
    assert (
        main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--rules", str(tmp_path / "rules.toml"), "--quiet"])
        == 0
    )


def test_tensors_of_zeros(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    whole = {f"h.{i}.{name}": rng.normal(size=(8, 6)) for i in range(2) for name in ("q.weight", "k.weight")}
    whole |= {f"h.{i}.{name}": np.zeros(8) for i in range(2) for name in ("q.bias", "k.bias", "norm.bias")}
    sw.save_checkpoint(tmp_path / "a", whole, to="hf", sync=False)
    other = {f"h.{i}.norm.b": np.zeros(8) for i in range(2)}
    for kind in ("weight", "bias"):
        other |= {f"h.{i}.qk.{kind}": np.concatenate([whole[f"h.{i}.{p}.{kind}"] for p in "qk"]) for i in range(2)}
    sw.save_checkpoint(tmp_path / "b", other, to="hf", sync=False)
    learnt(tmp_path / "a", tmp_path / "b")
    sw.save_checkpoint(tmp_path / "c", {"w": np.zeros((500, 6))}, to="hf", sync=False)
    sw.save_checkpoint(tmp_path / "d", {"v": np.zeros((500, 6))}, to="hf", sync=False)
    learnt(tmp_path / "c", tmp_path / "d")
    # Of a hundred rows and columns of zeros nothing says which is which.
    for name in "ef":
        sw.save_checkpoint(tmp_path / name, {name: np.zeros((100, 100))}, to="hf", sync=False)
    assert list(learn_rewrites(tmp_path / "e", tmp_path / "f").unexplained) == ["f"]


def test_elements_alone(tmp_path: Path) -> None:
    """Scalars, and tensors of one element: stacked, taken apart, with another number of dims."""
    v = np.random.default_rng(2).normal(size=6)
    scalars, ones = ({f"h.{i}.s": v[i] if is_scalar else v[i : i + 1] for i in range(6)} for is_scalar in (True, False))
    forms: dict[str, dict[str, Any]] = {
        "scalars": scalars,
        "ones": ones,
        "vector": {"blocks.s": v},
        "column": {"blocks.s": v[:, None]},
    }
    for name, tensors in forms.items():
        sw.save_checkpoint(tmp_path / name, tensors, to="hf", sync=False)
    for first in forms:
        for second in forms:
            learnt(tmp_path / first, tmp_path / second)


def test_tensors_of_which_nothing_is_looked_at_keep_their_names(tmp_path: Path) -> None:
    for name, values in (("a", b"\x01\x02"), ("b", b"\x01\x03")):
        tensors: dict[str, Any] = {"none": ("F32", (0, 3)), "w": ("F4", (2, 2)), name: ("F32", (0,))}
        path = write_checkpoint(tmp_path / f"{name}.safetensors", tensors)
        path.write_bytes(path.read_bytes()[:-2] + values)
    found = learn_rewrites(tmp_path / "a.safetensors", tmp_path / "a.safetensors")
    assert (dict(found.unexplained), found.unused) == ({}, ())
    found = learn_rewrites(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert "some of its elements differ" in found.unexplained["w"]
    assert "no elements to find it by" in found.unexplained["b"]
    assert set(found.unexplained) == {"w", "b"}


@pytest.mark.heavy
def test_memory_is_for_all_that_is_read(tmp_path: Path) -> None:
    """Of a stack the rows along its first dim are as many as a layer has elements."""
    rng = np.random.default_rng(4)
    stack = rng.integers(0, 2**30, (6, 700, 1100), np.int32)  # 18 MiB
    parts = {f"h.{i}.w": stack[i].T for i in range(6)}
    sw.save_checkpoint(tmp_path / "a", {"stack": stack}, to="hf", sync=False)
    sw.save_checkpoint(tmp_path / "b", parts, to="hf", sync=False)
    sw.save_checkpoint(tmp_path / "c", {"other": stack}, to="hf", sync=False)
    for second in ("b", "c"):
        tracemalloc.start()
        found = learn_rewrites(tmp_path / "a", tmp_path / second, memory=2**20, threads=2)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert found.unexplained == {}
        rows = 2 * 6 * (700 + 1100)
        assert peak < 2**20 + 200 * rows, peak


def fused_by_hand(config: dict[str, int], order: str) -> tuple[Tensors, Tensors]:
    """A model of this configuration, and as an engine holds it: q, k and v group by group or one after the other."""
    rng = np.random.default_rng(config["hidden_size"])
    heads, groups, d = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    hidden, inner, words = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    shapes = {"q": heads * d, "k": groups * d, "v": groups * d, "gate": inner, "up": inner}
    whole = {"embed": rng.normal(size=(words, hidden))}
    whole |= {f"h.{i}.{n}_proj": rng.normal(size=(rows, hidden)) for i in range(2) for n, rows in shapes.items()}
    padded = -words % 64
    made = {"words": np.concatenate([whole["embed"], np.zeros((padded, hidden))])}
    for i in range(2):
        q, k, v, gate, up = (whole[f"h.{i}.{n}_proj"] for n in shapes)
        made[f"layers.{i}.gate_up"] = np.concatenate([gate, up])
        by_group = [each.reshape(groups, -1, hidden) for each in (q, k, v)]
        grouped = np.concatenate(by_group, axis=1).reshape(-1, hidden)
        made[f"layers.{i}.qkv"] = grouped if order == "groups" else np.concatenate([q, k, v])
    return whole, made


SMALL = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "hidden_size": 16, "intermediate_size": 24}
LARGE = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "hidden_size": 40, "intermediate_size": 56}
NOT_GROUPED = {**SMALL, "num_key_value_heads": 4, "intermediate_size": 16}


@pytest.mark.parametrize("order", ["groups", "blocks"])
@pytest.mark.parametrize("config", [SMALL, NOT_GROUPED])
def test_rules_with_names_hold_for_other_sizes(tmp_path: Path, config: dict[str, int], order: str) -> None:
    """Learned from one size, in which a hidden size is that of all heads, they make another one, and its inverse."""
    config, other = config | {"vocab_size": 50}, LARGE | {"vocab_size": 70}
    for name, each in (("small", config), ("large", other)):
        for form, tensors in zip("ab", fused_by_hand(each, order), strict=True):
            sw.save_checkpoint(tmp_path / f"{name} {form}", tensors, to="hf", sync=False)
    (tmp_path / "small a" / "config.json").write_text(json.dumps(config))
    found = learn_rewrites(tmp_path / "small a", tmp_path / "small b")
    assert found.unexplained == {}
    for name in ("heads", "groups", "d", "inner", "words"):
        assert f"\n{name} = " in f"\n{found.text}"
    assert learn_rewrites(tmp_path / "small a", tmp_path / "small b", config=config) == found
    for which, numbers in (("small", config), ("large", other)):
        rewrites = sw.Rewrites.from_toml(io.StringIO(found.text), config=numbers)
        assert sw.diff_checkpoints(tmp_path / f"{which} a", tmp_path / f"{which} b", rewrites=rewrites) == []
        back = rewrites.inverse()
        assert sw.diff_checkpoints(tmp_path / f"{which} b", tmp_path / f"{which} a", rewrites=back) == []
    # A name that has its size by chance: parts do not add up.
    wrong = sw.Rewrites.from_toml(io.StringIO(found.text), config=other | {"intermediate_size": 24})
    with pytest.raises(sw.LayoutError, match="inner = 24"):
        sw.diff_checkpoints(tmp_path / "large b", tmp_path / "large a", rewrites=wrong.inverse())


def test_sizes_that_have_no_name_stand_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, made = fused_by_hand(SMALL | {"vocab_size": 50}, "blocks")
    for form, tensors in (("a", whole), ("b", made)):
        sw.save_checkpoint(tmp_path / form, tensors, to="hf", sync=False)
    plain = learn_rewrites(tmp_path / "a", tmp_path / "b")
    assert "[numbers]" not in plain.text
    (tmp_path / "other.json").write_text('{"hidden_size": 7, "num_attention_heads": null, "vocab_size": "50"}')
    assert learn_rewrites(tmp_path / "a", tmp_path / "b", config=tmp_path / "other.json") == plain
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(sw.ParseError, match="not a model's configuration"):
        learn_rewrites(tmp_path / "a", tmp_path / "b", config=tmp_path / "list.json")
    (tmp_path / "given.json").write_text(json.dumps({"intermediate_size": 24}))
    assert main(["learn", str(tmp_path / "a"), str(tmp_path / "b"), "--config", str(tmp_path / "given.json")]) == 0
    said = capsys.readouterr().out
    assert '[numbers]\ninner = "intermediate_size"\n' in said
    assert "gate:(inner) + up:(inner)" in said
    assert "q:(16) + k:(8) + v:(8)" in said


def test_names_of_any_kind(tmp_path: Path) -> None:
    """Numbers of more than 64 bits, more numbers than fields have names, and what TOML escapes."""
    a, b = np.random.default_rng(0).normal(size=(2, 4, 6))
    many = "h.0.0.0.0.0.0.w"
    sw.save_checkpoint(tmp_path / "a", {'x\x7f"\\': a, many: b}, to="hf", sync=False)
    sw.save_checkpoint(tmp_path / "b", {"{y}\x7f": a, "v": b.reshape(1, 1, 1, 1, 1, 1, 4, 6)}, to="hf", sync=False)
    learnt(tmp_path / "a", tmp_path / "b")
    large = {f"x.{10**20 + i}.w": each for i, each in enumerate((a, b))}
    sw.save_checkpoint(tmp_path / "c", large, to="hf", sync=False)
    sw.save_checkpoint(tmp_path / "d", {"w": np.stack([a, b])}, to="hf", sync=False)
    assert learn_rewrites(tmp_path / "c", tmp_path / "d").unexplained == {
        "w": "the number 1 in the names of its sources does not say the place of each source in it"
    }


@pytest.mark.parametrize("case", ["reversed", "leading zeros", "other sizes"])
def test_layers_that_one_template_does_not_name(tmp_path: Path, case: str) -> None:
    w = [np.random.default_rng(i).normal(size=(4 if case != "other sizes" or i else 8, 6)) for i in range(3)]
    first: Tensors = {}
    second: Tensors = {}
    for i, each in enumerate(w):
        if case == "other sizes":  # Of the first layer the parts are larger.
            first |= {f"h.{i}.q": each, f"h.{i}.k": -each}
            second[f"g.{i}.qk"] = np.concatenate([each, -each])
        else:
            first[f"h.{i}.w" if case == "reversed" else f"h.0{i}.w"] = each
            second[f"g.{2 - i}.w" if case == "reversed" else f"g.{i}.w"] = each
    sw.save_checkpoint(tmp_path / "a", first, to="hf", sync=False)
    sw.save_checkpoint(tmp_path / "b", second, to="hf", sync=False)
    learnt(tmp_path / "a", tmp_path / "b")
    learnt(tmp_path / "b", tmp_path / "a")


def test_names_that_change_places(tmp_path: Path) -> None:
    a, b = np.random.default_rng(0).normal(size=(2, 4, 6))
    sw.save_checkpoint(tmp_path / "a", {"one": a, "two": b}, to="hf", sync=False)
    sw.save_checkpoint(tmp_path / "b", {"one": b, "two": a}, to="hf", sync=False)
    learnt(tmp_path / "a", tmp_path / "b")


def test_names_that_change_places_in_one_layer(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    model = {f"h.{i}.{part}": rng.normal(size=(4, 6)) for i in range(3) for part in ("gate", "up")}
    wrong = model | {"h.1.gate": model["h.1.up"], "h.1.up": model["h.1.gate"]}
    sw.save_checkpoint(tmp_path / "a", model, to="hf", sync=False)
    sw.save_checkpoint(tmp_path / "b", wrong, to="hf", sync=False)
    learnt(tmp_path / "a", tmp_path / "b")


def test_what_has_no_rewrite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    w = rng.normal(size=(16, 8))
    sw.save_checkpoint(tmp_path / "a", {"w": w, "v": w[:3] + 1}, to="hf", sync=False)
    shuffled = w[rng.permutation(16)]
    other = {"w": w * 2, "x": shuffled, "v": (w[:3] + 1).astype("f4"), "y": w[:5].copy()}
    sw.save_checkpoint(tmp_path / "b", other, to="hf", sync=False)
    assert main(["learn", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert set(said["unexplained"]) == {"w", "x", "v", "y"}
    assert sorted(said["unused"]) == ["v", "w"]
    one = w.copy()
    one[7, 7] += 1  # None of the elements that are looked at first.
    wide = rng.normal(size=(40, 64))
    changed = wide.copy()
    changed[3, 0] += 1
    sw.save_checkpoint(tmp_path / "c", {"wide": wide}, to="hf", sync=False)
    sw.save_checkpoint(tmp_path / "d", {"wider": changed}, to="hf", sync=False)
    found = learn_rewrites(tmp_path / "c", tmp_path / "d")
    assert list(found.unexplained) == ["wider"]
    assert "[[rewrite]]" not in found.text
