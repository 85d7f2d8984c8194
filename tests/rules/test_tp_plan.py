"""Layout maps of the tensor-parallel plans of Hugging Face transformers."""

from __future__ import annotations

import importlib
import io
import json
import pkgutil
import sys
import warnings
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import shardwise as sw
from shardwise.cli import main
from shardwise.rules.tp_plan import LoadedTensor, rules_of_loaded

from ..oracle.families.models import DATA, numbered, read

MESH = sw.DeviceMesh((2, 4), ("data", "tp"))

#: The gate and the up projection one after the other, each cut as `torch.chunk` cuts it.
PACKED = sw.packed.parse("gate:(n@tp/ceil) + up:(n@tp/ceil)")

LLAMA = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}


def axes(layout_map: sw.LayoutMap, path: str) -> object:
    layout = layout_map[path]
    return None if layout is None else layout.axes


def test_llama() -> None:
    layout_map = sw.LayoutMap.from_tp_plan(LLAMA, MESH, "tp")
    assert axes(layout_map, "model.layers.0.self_attn.q_proj.weight") == ("tp", None)
    assert axes(layout_map, "layers.31.self_attn.k_proj.bias") == ("tp",)
    assert axes(layout_map, "model.layers.11.self_attn.o_proj.weight") == (None, "tp")
    assert axes(layout_map, "model.layers.11.mlp.down_proj.weight") == (None, "tp")
    for whole in (
        "model.layers.11.self_attn.o_proj.bias",
        "model.embed_tokens.weight",
        "model.layers.x.mlp.up_proj.weight",
        "model.layers.1.mlp.up_proj.weight_scale",
        "sublayers.1.mlp.up_proj.weight",
        "model.layers.1.input_layernorm.weight",
    ):
        assert axes(layout_map, whole) is None
    layout = layout_map["layers.0.mlp.up_proj.weight"]
    assert layout is not None
    assert layout.partition((14336, 4096)).shard_shape("cpu:0") == (3584, 4096)


def test_experts_are_cut_within_each_expert() -> None:
    plan = {
        "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
        "layers.*.mlp.experts.down_proj": "rowwise",
        "layers.*.mlp.experts": "moe_tp_experts",
    }
    layout_map = sw.LayoutMap.from_tp_plan(plan, MESH, "tp")
    assert axes(layout_map, "model.layers.3.mlp.experts.gate_up_proj") == (None, PACKED, None)
    assert axes(layout_map, "model.layers.3.mlp.experts.down_proj") == (None, None, "tp")
    # And as files have them, each by itself.
    for name in ("gate_proj", "up_proj", "w1", "w3"):
        assert axes(layout_map, f"model.layers.3.block_sparse_moe.experts.7.{name}.weight") == ("tp", None)
    assert axes(layout_map, "model.layers.3.mlp.experts.7.down_proj.weight") == (None, "tp")
    assert len(layout_map) == 4


def test_sizes_that_disagree_are_not_taken() -> None:
    """Dense layers have other intermediate sizes than experts in some models, so that neither is that of all."""
    plan = {"layers.*.mlp.gate_up_proj": "packed_colwise"}
    for config, size in (
        ({"intermediate_size": 12, "moe_intermediate_size": 6}, "n"),
        ({"intermediate_size": 12, "moe_intermediate_size": 12}, "12"),
        ({"intermediate_size": None, "moe_intermediate_size": 6}, "6"),
    ):
        layout_map = sw.LayoutMap.from_tp_plan(plan, MESH, "tp", config=config)
        dim = sw.packed.parse(f"gate:({size}@tp/ceil) + up:({size}@tp/ceil)")
        assert axes(layout_map, "layers.1.mlp.gate_up_proj.weight") == (dim, None)


@pytest.mark.parametrize(
    ("name", "style", "path", "expected"),
    [
        ("lm_head", "colwise_rep", "lm_head.weight", ("tp", None)),
        ("layers.*.self_attn.sinks", "colwise", "model.layers.0.self_attn.sinks", ("tp",)),
        ("layers.*.self_attn.sinks", "local_rowwise", "model.layers.0.self_attn.sinks", ("tp",)),
        ("mlp.down", "rowwise", "mlp.down.bias", None),
        ("embed_tokens", "embedding_rowwise", "model.embed_tokens.weight", ("tp", None)),
        ("layers.*.experts.up", "embedding_rowwise", "layers.0.experts.up", ("tp", None, None)),
        ("layers.*.experts.up", "embedding_colwise", "layers.0.experts.up", (None, "tp", None)),
        ("embed_tokens", "embedding_colwise", "model.embed_tokens.weight", (None, "tp")),
        ("layers.*.mlp.experts.up", "grouped_gemm", "layers.0.mlp.experts.up", ("tp", None, None)),
        ("norm", "sequence_parallel", "norm.weight", None),
        ("layers.*.router", "ep_router", "layers.0.router.weight", None),
    ],
)
def test_styles(name: str, style: str, path: str, expected: object) -> None:
    assert axes(sw.LayoutMap.from_tp_plan({name: style}, MESH, "tp"), path) == expected


def test_what_is_refused() -> None:
    with pytest.raises(sw.LayoutError, match=r"plan\['a.b'\] is the unknown style 'diagonal'; known are all_reduce,"):
        sw.LayoutMap.from_tp_plan({"a.b": "diagonal"}, MESH, "tp")
    with pytest.raises(sw.MeshError, match=r"axis is 'model'; the axes of the mesh are \('data', 'tp'\)"):
        sw.LayoutMap.from_tp_plan(LLAMA, MESH, "model")
    with pytest.raises(TypeError, match="plan must be a mapping of names to styles, got list"):
        sw.LayoutMap.from_tp_plan(["a"], MESH, "tp")
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh"):
        sw.LayoutMap.from_tp_plan(LLAMA, 4, "tp")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh, got NoneType"):
        sw.LayoutMap.from_tp_plan(LLAMA, None, "tp")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="plan must map strings to strings"):
        sw.LayoutMap.from_tp_plan({"a": None}, MESH, "tp")


def strided_shard(array: np.ndarray[Any, Any], dim: int, ranks: int, rank: int, split_factor: int) -> Any:
    """PyTorch's `_StridedShard(dim, split_factor)`: each of `split_factor` chunks is chunked, and joined by rank."""

    def chunks(part: Any, count: int) -> list[Any]:
        step = -(-part.shape[dim] // count)
        return [part[(slice(None),) * dim + (slice(i * step, (i + 1) * step),)] for i in range(count)]

    return np.concatenate([chunks(part, ranks)[rank] for part in chunks(array, split_factor)], axis=dim)


#: All entries of transformers 5.23 whose style is packed, with the number of plans that have them.
PACKED_ENTRIES = {
    ("layers.*.mlp.experts.gate_up_proj", "packed_colwise"): 50,
    ("layers.*.mlp.experts.gate_up_proj", "packed_rowwise"): 1,
    ("layers.*.experts.gate_up_proj", "packed_colwise"): 2,
    ("blocks.*.mlp.experts.gate_up_proj", "packed_colwise"): 1,
    ("layers.*.mlp.text_moe.experts.gate_up_proj", "packed_colwise"): 1,
    ("layers.*.mlp.vision_moe.experts.gate_up_proj", "packed_colwise"): 1,
    ("layers.*.block_sparse_moe.experts.gate_up_proj", "packed_colwise"): 4,
    ("layers.*.feed_forward.experts.gate_up_proj", "packed_colwise"): 2,
    ("layers.*.feed_forward.experts.gate_up_proj", "packed_rowwise"): 1,
}


@pytest.mark.parametrize(("entry", "style"), PACKED_ENTRIES)
@pytest.mark.parametrize("size", [8, 6, 5])
def test_packed_entries_are_cut_as_transformers_cuts_them(entry: str, style: str, size: int) -> None:
    """`PackedColwiseParallel` and `PackedRowwiseParallel`: `_StridedShard` of factor 2 of the dim -2 or -1."""
    mesh = sw.DeviceMesh((4,), ("tp",))
    layout_map = sw.LayoutMap.from_tp_plan({entry: style}, mesh, "tp")
    layout = layout_map["model." + entry.replace("*", "3")]
    assert layout is not None
    dim = 1 if style == "packed_colwise" else 2
    shape = [3, 7, 7]
    shape[dim] = 2 * size
    array = np.arange(np.prod(shape)).reshape(shape)
    sharded = sw.distribute_tensor(array, layout)
    for rank in range(4):
        assert np.array_equal(sharded.shard(f"cpu:{rank}"), strided_shard(array, dim, 4, rank, 2))


def test_a_packed_linear_module() -> None:
    """Its weight is packed, and its bias, of one dim, is cut as if it were not: `_packed_output_shard_dim`."""
    layout_map = sw.LayoutMap.from_tp_plan({"mlp.up": "packed_colwise", "mlp.down": "packed_rowwise"}, MESH, "tp")
    weight, bias = layout_map["mlp.up.weight"], layout_map["mlp.up.bias"]
    assert weight is not None
    assert bias is not None
    array = np.arange(48).reshape(16, 3)
    assert np.array_equal(sw.distribute_tensor(array, weight).shard("cpu:5"), strided_shard(array, 0, 4, 1, 2))
    assert bias.axes == ("tp",)
    down = layout_map["mlp.down.weight"]
    assert down is not None
    assert np.array_equal(sw.distribute_tensor(array.T, down).shard("cpu:5"), strided_shard(array.T, 1, 4, 1, 2))
    assert layout_map["mlp.down.bias"] is None


def test_a_configuration() -> None:
    class Config:
        base_model_tp_plan: ClassVar = {"layers.*.experts.gate_up_proj": "packed_colwise"}
        intermediate_size = 16

    layout = sw.LayoutMap.from_tp_plan(Config(), MESH, "tp")["layers.0.experts.gate_up_proj"]
    assert layout is not None
    assert layout.partition((2, 32, 3)).shard_shape("cpu:0") == (2, 8, 3)
    with pytest.raises(sw.LayoutError, match="dim 1 has 24 elements, but its parts add up to 32"):
        layout.partition((2, 24, 3))


def installed_plans() -> dict[str, dict[str, str]]:
    """Every plan of the installed transformers, by the name of its configuration; PyTorch is not needed."""
    models = pytest.importorskip("transformers.models", reason="transformers is not installed")
    plans = {}
    for module in pkgutil.iter_modules(models.__path__):
        name = f"transformers.models.{module.name}.configuration_{module.name}"
        try:
            configuration: Any = importlib.import_module(name)
        except ImportError:
            continue
        for config in vars(configuration).values():
            plan = getattr(config, "base_model_tp_plan", None)
            if isinstance(config, type) and plan and config.__module__ == name:
                plans[config.__name__] = plan
    return plans


def test_the_packed_entries_are_those_of_the_installed_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    if not transformers.__version__.startswith("5.23."):
        pytest.skip(f"the list is that of transformers 5.23, and {transformers.__version__} is installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        entries = [item for plan in installed_plans().values() for item in plan.items()]
    # Configurations that take over another's plan have it once more.
    assert {item for item in entries if item[1].startswith("packed")} == PACKED_ENTRIES.keys()
    assert sum(PACKED_ENTRIES.values()) == 63


def test_all_plans_of_the_installed_transformers() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plans = installed_plans()
    for name in ("LlamaConfig", "MistralConfig", "Qwen2Config", "Qwen3Config", "Gemma2Config", "MixtralConfig"):
        assert name in plans
    assert plans["LlamaConfig"] == LLAMA
    for name, plan in plans.items():
        layout_map = sw.LayoutMap.from_tp_plan(plan, MESH, "tp")
        for entry, style in plan.items():
            path = "model." + entry.replace("*", "7")
            # At most one rule each: a look-up that two rules match would raise.
            found = tuple(axes(layout_map, path + end) for end in (".weight", ".bias", ""))
            assert found == EXPECTED[style][entry.split(".")[-2:-1] == ["experts"]], (name, entry, style)


def test_the_plan_of_a_configuration_is_that_of_its_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`shardwise rules --from-tp-plan FOLDER` gives the rules of what `model.tp_plan` says."""
    transformers = pytest.importorskip("shardwise.interop.transformers", reason="no transformers or no PyTorch")
    for file in sorted(DATA.glob("*-0.json.gz")):
        said = read(file.name.removesuffix(".json.gz"))
        if "plan" not in said or f"transformers {transformers.version}" not in said["engines"]["hf"]["of"]:
            continue
        config = said["config"] | {"architectures": [said["class"]]}
        assert transformers.tp_plan_of(config) == said["plan"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "plan.json").write_text(json.dumps(said["plan"]))
        texts = []
        for source in (tmp_path, tmp_path / "plan.json"):
            assert main(["rules", "--from-tp-plan", str(source)]) == 0
            texts.append(capsys.readouterr().out)
        made = [sw.LayoutMap.from_toml(io.StringIO(text)) for text in texts]
        assert any(made[0][name] for name in said["tensors"]), file.name
        for name in said["tensors"]:
            assert made[0][name] == made[1][name], name
    for config, message in (
        ({"model_type": "no such"}, "no model of the type 'no such'"),
        ({"model_type": "gpt2"}, "no tensor-parallel plan for 'gpt2'"),
        ({"model_type": "llama", "architectures": ["MyLlama"]}, "no class 'MyLlama' next to LlamaConfig"),
        (
            {"model_type": "llama", "num_attention_heads": 7, "hidden_size": 64},
            "cannot make the model of the configura",
        ),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert main(["rules", "--from-tp-plan", str(tmp_path / "config.json")]) == 2
        assert message in capsys.readouterr().err


def test_the_rules_of_what_a_folder_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a folder with tensors only the rules that match one are printed; a report then has nothing to say of them."""
    pytest.importorskip("shardwise.interop.transformers", reason="no transformers or no PyTorch")
    said = read("mixtral-0")
    sw.save_checkpoint(tmp_path / "hf", numbered(said["tensors"]), to="hf", sync=False)
    config = said["config"] | {"architectures": [said["class"]]}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    assert main(["rules", "--from-tp-plan", str(tmp_path / "hf"), "--axis", "model"]) == 0
    (tmp_path / "rules.toml").write_text(capsys.readouterr().out)
    arguments = ["--mesh", "model=2", "--rules", str(tmp_path / "rules.toml"), "--json"]
    assert main(["report", str(tmp_path / "hf"), "--strict", *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["unused_rules"] == []


def test_transformers_may_be_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "shardwise.interop.transformers", raising=False)
    monkeypatch.delitem(vars(sw.interop), "transformers", raising=False)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert main(["rules", "--from-tp-plan", str(tmp_path)]) == 2
    assert "the plan of a model is in transformers, which cannot be imported with PyTorch" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"h.*.up": "sideways"}')
    assert main(["rules", "--from-tp-plan", str(tmp_path)]) == 2
    assert "unknown style 'sideways'" in capsys.readouterr().err
    assert main(["rules", "gpt2", "--from-tp-plan", str(tmp_path)]) == 2
    assert "gpt2 and --from-tp-plan exclude each other" in capsys.readouterr().err


PLAN = {"m.*.up": "packed_colwise", "m.*.q": "colwise", "m.*.k": "rowwise", "m.*.whole": "replicate"}
#: What transformers loads, what it makes of it, and how the tensor is then cut: by hand.
LOADED = [
    # Experts, each by itself, gate and up apart: rows of a stack, each half cut separately.
    (LoadedTensor(2, ("m.0.up",), (0, 2), (("stack", (0,)), ("join", (1,)))), (2, 8, 3), "('tp', None)"),
    # One tensor for all experts, stored transposed.
    (LoadedTensor(3, ("m.0.up",), (0, 1), (("swap", (1, 2)),)), (2, 8, 3), "(None, None, (n@tp/ceil) + (n@tp/ceil))"),
    # Two in one: each part is cut separately, or is on every rank.
    (
        LoadedTensor(2, ("m.0.q.weight", "m.1.q.weight"), steps=(("split", (0,)),)),
        (4, 6),
        "((4@tp/ceil) + (4@tp/ceil), None)",
    ),
    (
        LoadedTensor(2, ("m.0.q.weight", "m.0.whole.weight"), steps=(("split", (0,)),)),
        (4, 6),
        "((4@tp/ceil) + (4), None)",
    ),
    (LoadedTensor(2, ("m.0.k.weight",), steps=(("permute", (0,)),)), (4, 6), "(None, 'tp')"),
    (LoadedTensor(1, ("m.0.whole.weight",), steps=(("Odd", ()),)), (4,), "(None,)"),
]
#: Ways to load after which a rank's share is nothing that a rule for the tensor could say.
NO_RULE = [
    # One projection of two tensors, cut as one: a rank has the whole of the first.
    LoadedTensor(2, ("m.0.q.weight",), (0, 2), (("join", (0,)),)),
    LoadedTensor(2, ("m.0.q.weight",), steps=(("permute", (0,)),)),
    LoadedTensor(2, ("m.0.q.weight",), steps=(("Odd", ()),)),
    # Parts of which one is cut along another dim.
    LoadedTensor(2, ("m.0.q.weight", "m.0.k.weight"), steps=(("split", (0,)),)),
    LoadedTensor(1, ("m.0.q.weight",), steps=(("stack", (0,)),)),
]


@pytest.mark.parametrize(("tensor", "shape", "expected"), LOADED)
def test_what_is_loaded_is_cut_as_the_parameter_that_it_becomes(
    tensor: LoadedTensor, shape: tuple[int, ...], expected: str
) -> None:
    rules = rules_of_loaded(PLAN, dict.fromkeys(tensor.parameters, shape), {"a.3.b": tensor}, "tp")
    found = [rule.layout.axes for rule in rules.values()] or [(None,) * len(shape)]
    assert [
        f"({', '.join(str(s) if isinstance(s, sw.packed.PackedDim) else repr(s) for s in one)})" for one in found
    ] == [expected.replace("(None,)", "(None)")]
    assert list(rules) in ([r"^a\.\d+\.b$"], [])


@pytest.mark.parametrize("tensor", NO_RULE)
def test_what_no_rule_can_say_is_refused(tensor: LoadedTensor) -> None:
    with pytest.raises(
        sw.LayoutError, match=r"of 'a\.b' \(\w+\), and no rule for that tensor .*save_original_format=False"
    ):
        rules_of_loaded(PLAN, dict.fromkeys(tensor.parameters, (8, 4)), {"a.b": tensor}, "tp")


def test_a_parameter_that_is_cut_and_made_of_nothing_is_refused() -> None:
    shapes = {"m.0.q.weight": (8, 4), "m.0.q.bias": (8,), "m.0.whole.weight": (8,), "head.weight": (8, 4)}
    plan = PLAN | {"head": "colwise"}
    tensors = {"m.0.q.weight": LoadedTensor(2, ("m.0.q.weight",)), "m.0.q.bias": LoadedTensor(1, ("m.0.q.bias",))}
    with pytest.raises(
        sw.LayoutError, match=r"cuts the parameter 'head.weight', but makes it from none of the 2 tensors .*'m.0.q.wei"
    ):
        rules_of_loaded(plan, shapes, tensors, "tp")
    # One that is the same as another is made of that.
    rules = rules_of_loaded(plan, shapes, tensors, "tp", [frozenset({"head.weight", "m.0.q.weight"})])
    assert [rule.layout.axes for rule in rules.values()] == [("tp", None), ("tp",)]
    with pytest.raises(sw.LayoutError, match=r"'m\.0\.q\.weight' has 1 dim, but transformers makes a parameter of 2"):
        rules_of_loaded(PLAN, shapes, tensors | {"m.0.q.weight": LoadedTensor(1, ("m.0.q.weight",))}, "tp")


def test_layers_that_are_cut_differently_are_named() -> None:
    """Files of dory: attention and MLP of a layer are two blocks one after the other, each called `mixer`."""
    tensors = {f"layers.{i}.mixer.w": LoadedTensor(2, (f"m.{i // 2}.{'qk'[i % 2]}.weight",)) for i in range(4)}
    shapes = {f"m.{i}.{one}.weight": (8, 4) for i in (0, 1) for one in "qk"}
    layout_map = sw.LayoutMap(MESH)
    layout_map.update(rules_of_loaded(PLAN, shapes, tensors, "tp"))
    assert [axes(layout_map, name) for name in tensors] == [("tp", None), (None, "tp")] * 2


LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
GRANITE = {
    **{"model_type": "granitemoe", "intermediate_size": 16, "num_key_value_heads": 2, "num_local_experts": 4},
    **{"num_experts_per_tok": 2, **LAYERS},
}
HRM = {"model_type": "hrm_text", "intermediate_size": 48, "num_key_value_heads": 4, "head_dim": 8, **LAYERS}
TEXT = {"model_type": "gemma3_text", "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, **LAYERS}
VISION = {"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
VISION |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
WRAPPED = {"model_type": "gemma3", "text_config": TEXT, "vision_config": VISION}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("config", "name", "expected"),
    [
        # gate_up_proj (4, 32, 32) of memory, both halves cut; down_proj (4, 32, 16).
        (GRANITE, "model.layers.0.block_sparse_moe.input_linear.weight", (4, 16, 32)),
        (GRANITE, "model.layers.1.block_sparse_moe.output_linear.weight", (4, 32, 8)),
        (GRANITE, "model.layers.1.block_sparse_moe.experts.gate_up_proj", (4, 16, 32)),
        (GRANITE, "model.layers.0.block_sparse_moe.router.layer.weight", (4, 32)),
        # Gate, queries, keys and values in one tensor, each cut separately.
        (HRM, "model.H_module.layers.0.attn.gqkv_proj.weight", (64, 32)),
        (HRM, "model.L_module.layers.1.attn.o_proj.weight", (32, 16)),
        (WRAPPED, "language_model.model.layers.1.self_attn.q_proj.weight", (16, 32)),
        (WRAPPED, "model.language_model.layers.1.self_attn.q_proj.weight", (16, 32)),
        (WRAPPED, "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight", (16, 16)),
    ],
)
def test_names_in_files_are_those_that_transformers_renames(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any], name: str, expected: tuple[int, ...]
) -> None:
    pytest.importorskip("shardwise.interop.transformers", reason="no transformers or no PyTorch")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["rules", "--from-tp-plan", str(tmp_path)]) == 0
    rules = sw.LayoutMap.from_toml(io.StringIO(capsys.readouterr().out), sw.DeviceMesh((2,), ("tp",)))
    whole = {
        "gqkv_proj": (128, 32),
        "input_linear": (4, 32, 32),
        "output_linear": (4, 32, 16),
        "gate_up_proj": (4, 32, 32),
        "layer": (4, 32),
    }
    shape = (16, 16) if "vision" in name else whole.get(name.split(".")[-2], whole.get(name.split(".")[-1], (32, 32)))
    assert rules.partition(name, shape).shard_shape("cpu:0") == expected


@pytest.mark.heavy
def test_a_folder_that_lacks_what_is_cut_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("shardwise.interop.transformers", reason="no transformers or no PyTorch")
    model = transformers._model(GRANITE)
    from transformers.core_model_loading import revert_weight_conversion

    shapes = {name: tuple(value.shape) for name, value in revert_weight_conversion(model, model.state_dict()).items()}
    tensors = {name: np.zeros(shape, "f4") for name, shape in shapes.items()}
    tensors["model.rotary.weight"] = np.zeros(3, "f4")
    sw.save_checkpoint(tmp_path / "hf", tensors, to="hf", sync=False)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(GRANITE))
    assert main(["rules", "--from-tp-plan", str(tmp_path / "hf")]) == 0
    text = capsys.readouterr().out
    assert "# Transformers does not load 'model.rotary.weight'." in text
    rules = sw.LayoutMap.from_toml(io.StringIO(text), sw.DeviceMesh((2,), ("tp",)))
    assert not rules.report(shapes).unused_rules
    del tensors["model.layers.1.block_sparse_moe.input_linear.weight"]
    sw.save_checkpoint(tmp_path / "less", tensors, to="hf", sync=False)
    (tmp_path / "less" / "config.json").write_text(json.dumps(GRANITE))
    assert main(["rules", "--from-tp-plan", str(tmp_path / "less")]) == 2
    said = capsys.readouterr().err
    assert (
        "cuts the parameter 'model.layers.1.block_sparse_moe.experts.gate_up_proj', but makes it from none of" in said
    )


ROWS = ((("tp", None), ("tp",), ("tp",)), (None, None, (None, "tp", None)))
COLUMNS = (((None, "tp"), None, ("tp",)), (None, None, (None, None, "tp")))
WHOLE = ((None, None, None), (None, None, None))
#: Of a module's weight and bias and of the entry itself; in a list of experts second. From what the classes of
#: transformers 5.23 in distributed/tensor_parallel.py do.
EXPECTED = {
    "colwise": ROWS,
    "colwise_gather_output": ROWS,
    "packed_colwise": ((None, None, None), (None, None, (None, PACKED, None))),
    "embedding_rowwise": (ROWS[0], (None, None, ("tp", None, None))),
    "rowwise": COLUMNS,
    "rowwise_split_input": COLUMNS,
    "packed_rowwise": ((None, None, None), (None, None, (None, None, PACKED))),
    "embedding_colwise": (((None, "tp"), None, None), (None, None, (None, "tp", None))),
    "all_reduce": WHOLE,
    "local_params": WHOLE,
    "mla_kv_a_proj": WHOLE,
    "moe_identity_expert": WHOLE,
    "moe_tp_experts": WHOLE,
    "replicate": WHOLE,
    "replicated_with_grad_allreduce": WHOLE,
}


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")
def test_what_no_rule_can_say_is_said_of_what_is_saved_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Experts of text and of images, which a file has in one list, and memory in two stacks."""
    pytest.importorskip("shardwise.interop.transformers", reason="no transformers or no PyTorch")
    ernie = pytest.importorskip("transformers.models.ernie4_5_vl_moe")
    text: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
    }
    text |= {"num_key_value_heads": 1, "vocab_size": 64, "moe_intermediate_size": [16, 8], "moe_num_experts": 4}
    text |= {"moe_layer_start_index": 1, "moe_num_shared_experts": 1}
    vision = {"hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 24, "in_channels": 3}
    model = ernie.Ernie4_5_VLMoeForConditionalGeneration(
        ernie.Ernie4_5_VLMoeConfig(text_config=text, vision_config=vision)
    )
    model.save_pretrained(tmp_path / "refused")
    assert main(["rules", "--from-tp-plan", str(tmp_path / "refused")]) == 2
    assert "save the model by save_pretrained(…, save_original_format=False)" in capsys.readouterr().err
    model.save_pretrained(tmp_path / "made", save_original_format=False)
    assert main(["rules", "--from-tp-plan", str(tmp_path / "made")]) == 0
    rules = sw.LayoutMap.from_toml(io.StringIO(capsys.readouterr().out), sw.DeviceMesh((2,), ("tp",)))
    for kind, rows in (("text", 32), ("vision", 16)):
        name = f"model.language_model.layers.1.mlp.{kind}_moe.experts.gate_up_proj"
        assert model.state_dict()[name].shape == (4, rows, 128)
        assert rules.partition(name, (4, rows, 128)).shard_shape("cpu:0") == (4, rows // 2, 128)


@pytest.mark.heavy
def test_a_configuration_of_a_part_names_its_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shardwise.interop.transformers", reason="no transformers or no PyTorch")
    config: dict[str, Any] = {"model_type": "emu3_text_model", **LAYERS, "pad_token_id": 0}
    for names, status in ([], 2), (["Emu3TextModel"], 0):
        (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": names}))
        assert main(["rules", "--from-tp-plan", str(tmp_path)]) == status
    assert "has no model for Emu3TextConfig; name its class in architectures" in capsys.readouterr().err
