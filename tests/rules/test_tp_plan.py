"""Layout maps of the tensor-parallel plans of Hugging Face transformers."""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from typing import Any

import pytest

import shardwise as sw

MESH = sw.DeviceMesh((2, 4), ("data", "tp"))

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
    assert axes(layout_map, "model.layers.3.mlp.experts.gate_up_proj") == (None, "tp", None)
    assert axes(layout_map, "model.layers.3.mlp.experts.down_proj") == (None, None, "tp")
    assert len(layout_map) == 2


@pytest.mark.parametrize(
    ("name", "style", "path", "expected"),
    [
        ("lm_head", "colwise_rep", "lm_head.weight", ("tp", None)),
        ("layers.*.self_attn.sinks", "colwise", "model.layers.0.self_attn.sinks", ("tp",)),
        ("embed_tokens", "embedding_rowwise", "model.embed_tokens.weight", ("tp", None)),
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
        sw.LayoutMap.from_tp_plan(["a"], MESH, "tp")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh"):
        sw.LayoutMap.from_tp_plan(LLAMA, 4, "tp")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh, got NoneType"):
        sw.LayoutMap.from_tp_plan(LLAMA, None, "tp")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="plan must map strings to strings"):
        sw.LayoutMap.from_tp_plan({"a": None}, MESH, "tp")  # type: ignore[dict-item]


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


ROWS = ((("tp", None), ("tp",), ("tp",)), (None, None, (None, "tp", None)))
COLUMNS = (((None, "tp"), None, None), (None, None, (None, None, "tp")))
WHOLE = ((None, None, None), (None, None, None))
#: Of a module's weight and bias and of the entry itself; in a list of experts second. From what the classes of
#: transformers 5.23 in distributed/tensor_parallel.py do.
EXPECTED = {
    "colwise": ROWS,
    "colwise_gather_output": ROWS,
    "packed_colwise": ROWS,
    "embedding_rowwise": ROWS,
    "rowwise": COLUMNS,
    "rowwise_split_input": COLUMNS,
    "packed_rowwise": COLUMNS,
    "embedding_colwise": COLUMNS,
    "all_reduce": WHOLE,
    "local_params": WHOLE,
    "mla_kv_a_proj": WHOLE,
    "moe_identity_expert": WHOLE,
    "moe_tp_experts": WHOLE,
    "replicate": WHOLE,
    "replicated_with_grad_allreduce": WHOLE,
}
