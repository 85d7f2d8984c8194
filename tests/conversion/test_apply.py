"""Rewrites of checkpoints: every engine's names and orders to every other's, and back; what is refused."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from shardwise.conversion.apply import kept_objects

from ..checks import same_tensors
from ..oracle import engines, fused
from ..store.tasks import write_replica

#: Expected of many of these tests, which are about something else.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*not compared,:shardwise.ShardwiseWarning"),
    pytest.mark.filterwarnings("ignore:no rule that applies uses the axis:shardwise.ShardwiseWarning"),
    pytest.mark.filterwarnings("ignore:.*not written,:shardwise.ShardwiseWarning"),
    pytest.mark.filterwarnings("ignore:.*dropped by the rules:shardwise.ShardwiseWarning"),
]

ROOT = Path(__file__).parents[2]
MEGATRON = ROOT / "tests" / "data" / "checkpoints" / "megatron"
Model = dict[str, np.ndarray[Any, Any]]


def rewrites_of(engine: str, model: str) -> sw.Rewrites:
    return sw.Rewrites.from_toml(sw.example_rules()[f"{engine}/{model}"], config=engines.config(model))


def layouts_of(engine: str, model: str, tp: int) -> sw.LayoutMap:
    mesh, file = sw.DeviceMesh((tp,), ("tp",)), sw.example_rules()[f"{engine}/{model}"]
    return sw.LayoutMap.from_toml(file, mesh, config=engines.config(model))


#: Each two engines; as each case goes there and back, the other order differs in what is cut for how many ranks.
PAIRS = [
    param
    for one, other in itertools.combinations(engines.ENGINES, 2)
    for param in (pytest.param(one, other), pytest.param(other, one, marks=pytest.mark.slow))
]


@pytest.mark.heavy
@pytest.mark.parametrize("model", engines.HEADS)
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_every_engine_to_every_other_and_back(tmp_path: Path, model: str, one: str, other: str) -> None:
    """Rewritten and cut for 4 ranks, cut for 8, for 2, merged, rewritten back: each compared with the restatement."""
    whole = engines.hugging_face(model, seed=len(one) + len(other))
    before, after = engines.ENGINES[one](model, whole), engines.ENGINES[other](model, whole)
    rewrites = sw.Rewrites()
    if one != "hf":
        rewrites += rewrites_of(one, model).inverse()
    if other != "hf":
        rewrites += rewrites_of(other, model)

    def rules(engine: str, tp: int) -> sw.LayoutMap | None:
        if engine == "hf":
            return None
        return layouts_of(engine, model, tp)

    sw.save_checkpoint(tmp_path / "source", before, rules(one, 2), sync=False)
    report = sw.reshard_checkpoint(
        tmp_path / "source", tmp_path / "tp4", rules(other, 4), rewrites=rewrites, sync=False, memory=1 << 20
    )
    assert isinstance(report, sw.store.WriteReport)
    assert report.bytes_read <= 1.05 * sum(value.nbytes for value in before.values())
    same_tensors(tmp_path / "tp4", after)
    sw.verify_checkpoint(tmp_path / "tp4")
    for tp, source in ((8, "tp4"), (2, "tp8"), (1, "tp2")):
        sw.reshard_checkpoint(tmp_path / source, tmp_path / f"tp{tp}", rules(other, tp), sync=False)
    same_tensors(tmp_path / "tp1", after)
    sw.reshard_checkpoint(tmp_path / "tp8", tmp_path / "back", rules(one, 4), rewrites=rewrites.inverse(), sync=False)
    same_tensors(tmp_path / "back", before)
    assert sw.diff_checkpoints(tmp_path / "source", tmp_path / "back") == []


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("model", engines.HEADS)
def test_every_rank_holds_what_megatron_gives_it(model: str, tp: int) -> None:
    whole = engines.torch_dist(model, engines.hugging_face(model, 1))
    rules = layouts_of("torch_dist", model, tp)
    unused = set(rules)
    for name, value in whole.items():
        layout = rules[name]
        assert layout is not None, name
        unused -= set(rules.matching_rules(name))
        sharded = sw.distribute_tensor(value, layout)
        for rank in range(tp):
            if "linear_qkv." in name and "norm" not in name:
                wanted = value[:, fused.megatron_qkv(*engines.HEADS[model], tp, rank)]
            elif "linear_fc1." in name and "norm" not in name:
                dim = value.ndim - 2 if model != "gpt2" else 1  # Experts come before the rows; GPT-2 has a bias.
                rows = fused.megatron_stride(value.shape[dim], 2 - (model == "gpt2"), tp, rank)
                wanted = np.take(value, rows, axis=dim)
            elif name.endswith(("linear_proj.weight", "linear_fc2.weight")):
                wanted = np.split(value, tp, axis=-1)[rank]
            elif "word_embeddings" in name or "output_layer" in name:
                wanted = value[fused.megatron_vocab(len(value), tp, rank)[0]]
            else:
                wanted = value
            got = sharded.shard(f"cpu:{rank}")
            assert np.array_equal(got[: len(wanted)], wanted), (name, rank)
    assert not {rule for rule in unused if "output_layer" not in rule}


def test_a_checkpoint_that_megatron_wrote(tmp_path: Path) -> None:
    """Its layers apart, its groups taken apart, its words without padding; and back."""
    expected = {}
    for name, said in json.loads((MEGATRON / "expected.json").read_text())["tensors"].items():
        dtype = "u2" if said["dtype"] == "bfloat16" else said["dtype"]
        expected[name] = np.frombuffer(bytes.fromhex(said["hex"]), dtype).reshape(said["shape"])
    fused_name = "decoder.layers.self_attention.linear_qkv.weight"
    rewrites = sw.Rewrites(
        [
            {
                "from": {"name": fused_name, "stack": "i", "packed": "(2 [q:4 k:2 v:2])"},
                "to": "model.layers.{i}.self_attn.{q,k,v}_proj.weight",
            },
            {
                "from": {"name": "decoder.layers.self_attention.linear_proj.weight", "stack": "i"},
                "to": {"name": "model.layers.{i}.self_attn.o_proj.weight", "transpose": True},
            },
            {
                "from": {"name": "embedding.word_embeddings.weight", "pad_to": 16},
                "to": "model.embed_tokens.weight",
                "size": 27,
            },
        ]
    )
    sw.reshard_checkpoint(MEGATRON, tmp_path / "hf", rewrites=rewrites)
    wanted: Model = {
        "decoder.final_layernorm.weight": expected["decoder.final_layernorm.weight"],
        "model.embed_tokens.weight": expected["embedding.word_embeddings.weight"][:27],
    }
    for i in range(3):
        rows = expected[fused_name][i]
        for part, begin, end in (("q", 0, 4), ("k", 4, 6), ("v", 6, 8)):
            wanted[f"model.layers.{i}.self_attn.{part}_proj.weight"] = np.concatenate(
                [rows[begin:end], rows[8 + begin : 8 + end]]
            )
        wanted[f"model.layers.{i}.self_attn.o_proj.weight"] = expected[
            "decoder.layers.self_attention.linear_proj.weight"
        ][i].T
    with sw.open_checkpoint(tmp_path / "hf") as checkpoint:
        assert set(checkpoint) == set(wanted)
        for name, value in wanted.items():
            assert checkpoint.read(name).tobytes() == value.tobytes(), name
    sw.reshard_checkpoint(MEGATRON, tmp_path / "dcp", rewrites=rewrites, to="dcp")
    assert sw.diff_checkpoints(tmp_path / "dcp", tmp_path / "hf") == []
    sw.reshard_checkpoint(tmp_path / "hf", tmp_path / "back", rewrites=rewrites.inverse())
    found = sw.diff_checkpoints(MEGATRON, tmp_path / "back")
    # The words' padding held numbers, which are zeros now.
    assert [(one.name, one.index) for one in found] == [("embedding.word_embeddings.weight", (27, 0))]
    with sw.open_checkpoint(tmp_path / "back") as checkpoint:
        assert not checkpoint.read("embedding.word_embeddings.weight")[27:].any()


@pytest.mark.heavy
@pytest.mark.parametrize("scattered", [False, True])
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_there_and_back_is_the_identity(
    tmp_path_factory: pytest.TempPathFactory, scattered: bool, data: st.DataObject
) -> None:
    """Stacked, packed in any order along any dim, transposed and padded; cut by anything on the way.

    Copied piece by piece, or, where the pieces are too many and too short for that, in blocks of 1 KiB.
    """
    folder = tmp_path_factory.mktemp("any")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    groups = data.draw(st.integers(260, 270) if scattered else st.integers(1, 3))
    layers, dim = data.draw(st.integers(1, 3)), data.draw(st.integers(-2, 1))
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=2, max_size=4))
    names = [f"part{i}" for i in range(len(sizes))]
    blocks = " ".join(f"{name}:{size}" for name, size in zip(names, sizes, strict=True))
    blocked = " + ".join(f"{name}:({groups} {size})" for name, size in zip(names, sizes, strict=True))
    other, total, multiple = data.draw(st.integers(1, 4)), groups * sum(sizes), data.draw(st.integers(1, 5))
    transpose, stack = data.draw(st.booleans()), data.draw(st.booleans())
    whole: Model = {}
    for i in range(layers):
        for name, size in zip(names, sizes, strict=True):
            shape = (groups * size, other) if dim % 2 == 0 else (other, groups * size)
            whole[f"h.{i}.{name}"] = rng.integers(0, 255, shape).astype("u1")
    side = {"transpose": transpose, "dim": dim, "pad_to": multiple}
    rewrites = sw.Rewrites(
        [
            {
                "from": {"parts": {name: f"h.{{i}}.{name}" for name in names}},
                "to": {
                    "packed": f"({groups} [{blocks}])",
                    "name": "fused" if stack else "fused.{i}",
                    "stack": "i" if stack else None,
                    **side,
                },
                "size": total,
            },
            {
                "from": {
                    "packed": f"({groups} [{blocks}])",
                    "name": "fused" if stack else "fused.{i}",
                    "stack": "i" if stack else None,
                    **side,
                },
                "to": {"packed": blocked, "name": "blocked.{i}", "dim": dim},
                "size": total,
            },
        ][: 1 + data.draw(st.booleans())]
    )
    sw.save_checkpoint(folder / "a", whole, sync=False)
    mesh = sw.DeviceMesh((2, 2), ("x", "y"))
    axes = data.draw(st.permutations(["x", "y", None]))
    rank = 3 if stack and len(rewrites.sets[0].rewrites) == 1 else 2
    layouts = sw.LayoutMap(mesh)
    layouts["fused|blocked"] = tuple(axes[:rank])
    arguments: dict[str, Any] = {"layouts": layouts, "rewrites": rewrites, "uneven": "chunk"}
    assert not sw.plan_checkpoint(folder / "a", folder / "b", **arguments).obstacle
    work: dict[str, Any] = {"memory": 2**14, "threads": 1, "sync": False}
    sw.reshard_checkpoint(folder / "a", folder / "b", **arguments, **work)
    expected: Model = {}
    for i in range(layers):
        parts = [whole[f"h.{i}.{name}"] for name in names]
        axis = dim % 2
        if len(rewrites.sets[0].rewrites) == 2:
            expected[f"blocked.{i}"] = np.concatenate(parts, axis)
            continue
        split = [np.split(part, groups, axis) for part in parts]
        value = np.concatenate([part[g] for g in range(groups) for part in split], axis)
        pads = [(0, -total % multiple) if d == axis else (0, 0) for d in range(2)]
        value = np.pad(value, pads)
        expected[f"fused.{i}"] = value.T if transpose else value
    if stack and rank == 3:
        expected = {"fused": np.stack([expected[f"fused.{i}"] for i in range(layers)])}
    same_tensors(folder / "b", {name: np.ascontiguousarray(value) for name, value in expected.items()})
    sw.reshard_checkpoint(folder / "b", folder / "c", rewrites=rewrites.inverse(), **work)
    same_tensors(folder / "c", whole)


@pytest.mark.parametrize("memory", [1 << 16, 1 << 28])
def test_many_short_runs(tmp_path: Path, memory: int) -> None:
    """The experts of gpt-oss have gate and up column by column in turn; vLLM has one after the other, transposed."""
    value = np.random.default_rng(0).integers(0, 1 << 16, (3, 40, 2 * 700)).astype("u2")
    sw.save_checkpoint(tmp_path / "a", {"experts.gate_up": value, "rest": np.ones(3)}, sync=False)
    turned = {"name": "w13", "transpose": True, "dim": -1, "packed": "gate:(n) + up:(n)"}
    rewrites = sw.Rewrites(
        [{"from": {"name": "experts.gate_up", "dim": -1, "packed": "(700 [gate:1 up:1])"}, "to": turned}]
    )
    expected = np.concatenate([value[..., ::2], value[..., 1::2]], axis=-1).swapaxes(1, 2)
    layouts = {"w13": sw.TensorLayout((None, "x", None), sw.DeviceMesh((4,), ("x",)))}
    arguments: dict[str, Any] = {"rewrites": rewrites, "memory": memory}
    outline = sw.plan_checkpoint(tmp_path / "a", tmp_path / "b", layouts, **arguments).outline(memory)
    report = sw.reshard_checkpoint(tmp_path / "a", tmp_path / "b", layouts, **arguments, sync=False)
    assert outline.bytes == report.bytes
    same_tensors(tmp_path / "b", {"w13": expected, "rest": np.ones(3)})
    sw.reshard_checkpoint(tmp_path / "b", tmp_path / "c", rewrites=rewrites.inverse(), memory=memory, sync=False)
    same_tensors(tmp_path / "c", {"experts.gate_up": value, "rest": np.ones(3)})
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".") and path.is_dir()]


def whole() -> Model:
    rng = np.random.default_rng(3)
    found: Model = {}
    for i in range(3):
        found |= {f"h.{i}.{name}": rng.standard_normal((rows, 4)).astype("f4") for name, rows in (("q", 4), ("k", 2))}
    return found | {"wte": rng.standard_normal((10, 4)).astype("f4"), "ln": np.ones(4, "f4")}


def test_a_tensor_that_is_dropped_leaves_its_name(tmp_path: Path) -> None:
    sw.save_checkpoint(tmp_path / "a.safetensors", whole())
    rewrite = {"from": "wte", "to": "ln"}
    with pytest.raises(sw.LayoutError, match="gives 'wte' the name 'ln', which exists already"):
        sw.reshard_checkpoint(tmp_path / "a.safetensors", tmp_path / "b", rewrites=sw.Rewrites([rewrite]))
    dropping = sw.Rewrites([rewrite], unmatched="drop")
    sw.reshard_checkpoint(tmp_path / "a.safetensors", tmp_path / "b", rewrites=dropping)
    with sw.open_checkpoint(tmp_path / "b") as made:
        assert list(made) == ["ln"]
        np.testing.assert_array_equal(made.read("ln"), whole()["wte"])
    for later in ({"from": "ln", "to": "x"}, {"from": {"name": "h.0.q", "also": ["ln"]}, "to": "x"}):
        both = sw.Rewrites([rewrite, later], unmatched="drop")
        with pytest.raises(sw.LayoutError, match="which exists already"):
            sw.reshard_checkpoint(tmp_path / "a.safetensors", tmp_path / "c", rewrites=both)


PACKED = "q:(4) + k:(2)"


@pytest.mark.parametrize(
    ("rewrite", "message"),
    [
        ({"from": "h.{i}.v", "to": "v.{i}"}, r"no tensor is called 'h\.\{i\}\.v'.*optional"),
        (
            {"from": "h.{i}.q", "to": {"name": "ln", "stack": "i"}},
            r"gives 'h\.0\.q' the name 'ln', which exists already",
        ),
        ({"from": "h.{i}.{q,k}", "to": {"name": "x.{i}", "packed": "q:(4) + k:(3)"}}, r"q 4 \+ k 2 = 6 .* dim 0: .* 7"),
        ({"from": "h.{i}.{q,k}", "to": {"name": "x.{i}", "packed": "q:(3) + k:(3)"}}, r"have q 4 \+ k 2 .* has 3 of q"),
        (
            {"from": "h.{i}.{q,v}", "to": {"name": "x.{i}", "packed": "q:(4) + v:(2)"}},
            r"'h\.0\.v' is missing.*'h\.0\.q'",
        ),
        ({"from": {"name": "wte", "packed": PACKED}, "to": "{q,k}"}, r"tensor 'wte'.* 10 elements.* 6"),
        ({"from": {"name": "wte", "stack": "i", "packed": PACKED}, "to": "{i}.{q,k}"}, r"'wte'.* 4 elements.* 6"),
        ({"from": {"name": "ln", "transpose": True}, "to": "x"}, r"'ln' has 1 dim, "),
        ({"from": {"name": "wte", "pad_to": 4}, "to": "x", "size": 9}, r"'wte': dim 0 has 10 .* 9, padded to .* 12"),
        ({"from": "wte", "to": {"name": "x", "pad_to": 4}, "size": 9}, r"'wte': dim 0 has 10 .* size is 9"),
        ({"from": {"name": "ln", "dim": 2, "pad_to": 4}, "to": "x", "size": 4}, r"'ln' has no dim 2"),
        ({"from": {"name": "ln", "dim": 1, "pad_to": 4}, "to": "x", "size": 4}, r"'ln' has no dim 1"),
        ({"from": {"name": "ln", "dim": -2, "pad_to": 4}, "to": "x", "size": 4}, r"'ln' has no dim -2"),
        ({"from": "{a}", "to": {"name": "x", "stack": "a"}}, r"'x' should be a stack of 2 .* a = 0; one has a = 'ln'"),
        ({"from": "h.{i}.{a}", "to": {"name": "x.{i}", "stack": "a"}}, r"a stack of 2 .* a = 0"),
        ({"from": {"parts": {"a": "wte", "b": "{x}"}}, "to": "{a,b}"}, "do not have the same fields"),
        (
            {"from": {"parts": {"a": "wte", "b": "ln"}}, "to": {"name": "x", "packed": "a:(10) + b:(4)"}},
            "'wte' and 'ln' cannot be packed in dim 0",
        ),
        ({"from": {"parts": {"a": "wte", "b": "wte"}}, "to": "{a,b}"}, "both the part a and the part b"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, rewrite: Any, message: str) -> None:
    sw.save_checkpoint(tmp_path / "a.safetensors", whole())
    with pytest.raises(sw.LayoutError, match=message) as caught:
        sw.reshard_checkpoint(tmp_path / "a.safetensors", tmp_path / "b", rewrites=sw.Rewrites([rewrite]))
    assert len(str(caught.value)) < 800
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_two_tensors_of_different_kinds_are_not_put_together(tmp_path: Path) -> None:
    sw.save_checkpoint(
        tmp_path / "a", {"q": np.zeros((2, 3), "f4"), "k": np.zeros((2, 3), "f2"), "v": np.zeros((2, 4), "f4")}
    )
    for other, what in (("k", "float16"), ("v", r"\(2, 4\)")):
        rewrites = sw.Rewrites([{"from": f"{{q,{other}}}", "to": {"name": "x", "packed": f"q:(2) + {other}:(2)"}}])
        with pytest.raises(sw.LayoutError, match=rf"'q' and '{other}' cannot be packed in dim 0.*{what}"):
            sw.reshard_checkpoint(tmp_path / "a", tmp_path / "b", rewrites=rewrites)
        rewrites = sw.Rewrites([{"from": "{x}", "to": {"name": "x", "stack": "x"}}])
    sw.save_checkpoint(tmp_path / "c", {"0": np.zeros(2), "1": np.zeros(3)})
    with pytest.raises(sw.LayoutError, match="'0' and '1' cannot be stacked"):
        sw.reshard_checkpoint(tmp_path / "c", tmp_path / "b", rewrites=rewrites)


def test_what_is_left_is_kept_dropped_or_refused(tmp_path: Path) -> None:
    sw.save_checkpoint(tmp_path / "a", whole())
    one = {"from": "h.{i}.{q,k}", "to": "layers.{i}.{q,k}"}
    renamed = {f"layers.{i}.{name}" for i in range(3) for name in "qk"}
    for unmatched, drop, expected in (
        ("keep", [], {*renamed, "wte", "ln"}),
        ("keep", ["{w}te"], {*renamed, "ln"}),
        ("drop", [], renamed),
        ("refuse", ["{wte,ln}"], renamed),
    ):
        rewrites = sw.Rewrites([one], drop=drop, unmatched=unmatched)  # type: ignore[arg-type]
        target = tmp_path / f"{unmatched}-{len(drop)}"
        sw.reshard_checkpoint(tmp_path / "a", target, rewrites=rewrites, sync=False)
        with sw.open_checkpoint(target) as checkpoint:
            assert set(checkpoint) == expected
    with pytest.raises(sw.LayoutError, match="no rewrite matches 'ln' and 1 other;"):
        sw.reshard_checkpoint(tmp_path / "a", tmp_path / "b", rewrites=sw.Rewrites([one], unmatched="refuse"))


def test_rewrites_follow_one_another_after_renames(tmp_path: Path) -> None:
    sw.save_checkpoint(tmp_path / "a", {"old.0.w": np.arange(3), "old.1.w": np.arange(3, 6), "x": np.zeros(1)})
    rewrites = sw.Rewrites(
        [
            {"from": "new.{rest*}", "to": "deep.{rest*}"},
            {"from": "deep.{i}.w", "to": {"name": "w", "stack": "i"}},
            {"from": "x", "to": "y"},
            {"from": "w", "to": "x"},
        ]
    )
    sw.reshard_checkpoint(tmp_path / "a", tmp_path / "b", rename=[("^old", "new")], rewrites=rewrites, only="^x$")
    same_tensors(tmp_path / "b", {"x": np.arange(6).reshape(2, 3)})


def test_a_plan_writes_nothing_and_a_conversion_reads_what_is_needed(tmp_path: Path) -> None:
    sw.save_checkpoint(tmp_path / "a", whole())
    rewrites = sw.Rewrites(
        [{"from": "h.{i}.{q,k}", "to": {"name": "x", "stack": "i", "packed": PACKED}}, {"from": "wte", "to": "y"}]
    )
    arguments: dict[str, Any] = {"rewrites": rewrites, "dtype": "float16", "only": "x"}
    outline = sw.plan_checkpoint(tmp_path / "a", tmp_path / "b.safetensors", **arguments).outline()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    report = sw.reshard_checkpoint(tmp_path / "a", tmp_path / "b.safetensors", **arguments)
    assert report.bytes == outline.bytes == (tmp_path / "b.safetensors").stat().st_size
    tensors = whole()
    layers = [np.concatenate([tensors[f"h.{i}.q"], tensors[f"h.{i}.k"]]).astype("f2") for i in range(3)]
    same_tensors(tmp_path / "b.safetensors", {"x": np.stack(layers)})


def test_tied_tensors_stay_tied(tmp_path: Path) -> None:
    words = np.arange(12.0).reshape(3, 4)
    sw.save_checkpoint(tmp_path / "a", {"wte": words, "head": words})
    rewrites = sw.Rewrites(
        [{"from": "{wte,head}", "to": {"name": "{wte,head}.padded", "pad_to": 4, "transpose": True}, "size": 3}]
    )
    sw.reshard_checkpoint(tmp_path / "a", tmp_path / "b", rewrites=rewrites)
    padded = np.vstack([words, np.zeros((1, 4))]).T
    same_tensors(tmp_path / "b", {"wte.padded": padded, "head.padded": padded})
    with sw.open_checkpoint(tmp_path / "b") as checkpoint:
        assert {checkpoint["wte.padded"].alias_of, checkpoint["head.padded"].alias_of} & {"wte.padded", "head.padded"}


def test_replicas_are_compared_after_a_rewrite(tmp_path: Path) -> None:
    source = tmp_path / "fsdp2"
    shutil.copytree(ROOT / "tests" / "data" / "checkpoints" / "torch" / "fsdp2", source)
    with sw.open_checkpoint(source) as checkpoint:
        name = next(name for name, tensor in checkpoint.items() if len(tensor.replicas) and tensor.ndim == 2)
        expected = checkpoint.read(name)
        extent = checkpoint[name].replicas[0].extent()
        file, at = extent.holder.path, extent.offset
    rows = expected.shape[0]
    side = {"name": name, "packed": f"a:({rows - 1}) + b:(1)"}
    other = {"name": "x", "packed": f"b:(1) + a:({rows - 1})", "transpose": True}
    rewrites = sw.Rewrites([{"from": side, "to": other}], unmatched="drop")
    sw.reshard_checkpoint(source, tmp_path / "a", rewrites=rewrites)
    with sw.open_checkpoint(tmp_path / "a") as checkpoint:
        wanted = np.ascontiguousarray(np.roll(expected, 1, axis=0).T)
        assert checkpoint.read("x").tobytes() == wanted.tobytes()
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(sw.ParseError, match="tensor 'x': replicas disagree"):
        sw.reshard_checkpoint(source, tmp_path / "b", rewrites=rewrites)
    with pytest.raises(sw.ParseError, match="tensor 'x': replicas disagree"):
        sw.plan_checkpoint(source, tmp_path / "c", rewrites=rewrites).run()
    sw.reshard_checkpoint(source, tmp_path / "b", rewrites=rewrites, replicas="first")
    assert sw.diff_checkpoints(tmp_path / "a", tmp_path / "b") == []


def test_replicas_of_too_many_runs_are_compared_where_they_lie(tmp_path: Path) -> None:
    """By tasks as by a run that puts them together in a file first, of the first replica."""
    source, values = tmp_path / "source", np.arange(1200, dtype="f4").reshape(600, 2)
    source.mkdir()
    rewrites = sw.Rewrites(
        [{"from": {"name": "w", "packed": "(300 [a:1 b:1])"}, "to": {"name": "x", "packed": "b:(300) + a:(300)"}}]
    )
    for rank in (1, 2):
        write_replica(source, rank, values)
    planned = sw.plan_checkpoint(source, tmp_path / "p", rewrites=rewrites)
    planned.run()
    planned.commit()
    sw.reshard_checkpoint(source, tmp_path / "a", rewrites=rewrites)
    expected = np.concatenate([values[1::2], values[::2]])
    for made in ("p", "a"):
        same_tensors(tmp_path / made, {"x": expected})
    values[599, 1] = -1
    write_replica(source, 2, values)
    with pytest.raises(sw.ParseError, match="tensor 'x': replicas disagree"):
        sw.reshard_checkpoint(source, tmp_path / "b", rewrites=rewrites)
    with pytest.raises(sw.ParseError, match="tensor 'x': replicas disagree"):
        sw.plan_checkpoint(source, tmp_path / "c", rewrites=rewrites).run()
    sw.reshard_checkpoint(source, tmp_path / "b", rewrites=rewrites, replicas="first")
    same_tensors(tmp_path / "b", {"x": expected})


def test_a_stack_of_anything_is_refused(tmp_path: Path) -> None:
    """A tensor without elements may have any number of layers."""
    header = json.dumps({"x": {"dtype": "F32", "shape": [10**12, 0], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    rewrites = sw.Rewrites([{"from": {"name": "x", "stack": "i"}, "to": "x.{i}"}])
    with pytest.raises(sw.LayoutError, match="'x' is a stack of 1000000000000 tensors, over the limit"):
        sw.reshard_checkpoint(tmp_path / "a.safetensors", tmp_path / "b", rewrites=rewrites)


def test_values_that_are_dropped_are_not_kept() -> None:
    names = ["epoch", "opt.lr", "opt.step", "x"]
    rename = {"from": "w", "to": "v"}
    assert kept_objects(names, sw.Rewrites([rename])) == set(names)
    assert kept_objects(names, sw.Rewrites([rename], drop=["opt.{a}"])) == {"epoch", "x"}
    assert kept_objects(names, sw.Rewrites([rename], unmatched="drop")) == set()
