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
    """`shardwise rules --from-tp-plan FOLDER`, without PyTorch, gives the rules of what `model.tp_plan` says."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    for file in sorted(DATA.glob("*-0.json.gz")):
        said = read(file.name.removesuffix(".json.gz"))
        if "plan" not in said:
            continue
        (tmp_path / "config.json").write_text(json.dumps(said["config"]))
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
        ({"model_type": "gemma3"}, "made of text_config, vision_config: save its `model.tp_plan`"),
        ({"model_type": "llama", "architectures": ["MyLlama"]}, "no class 'MyLlama' beside LlamaConfig"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert main(["rules", "--from-tp-plan", str(tmp_path / "config.json")]) == 2
        assert message in capsys.readouterr().err


def test_the_rules_of_what_a_folder_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a folder with tensors only the rules that match one are printed; a report then has nothing to say of them."""
    pytest.importorskip("transformers", reason="transformers is not installed")
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
    assert "the plan of a model is in transformers, which cannot be imported" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"h.*.up": "sideways"}')
    assert main(["rules", "--from-tp-plan", str(tmp_path)]) == 2
    assert "unknown style 'sideways'" in capsys.readouterr().err
    assert main(["rules", "gpt2", "--from-tp-plan", str(tmp_path)]) == 2
    assert "gpt2 and --from-tp-plan exclude each other" in capsys.readouterr().err


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
