"""The loaders for vLLM and SGLang beside what the engines' own loaders have put into every rank's parameters.

`tests/data/families` has these: digests of element numbers, asked of vLLM 0.33 and SGLang 0.5.23 themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import shardwise as sw  # noqa: E402
from shardwise.interop import _engine, sglang, vllm  # noqa: E402
from tests.oracle.families.models import digest, elements  # noqa: E402
from tests.rules.test_families import CASES, RULES, answer, otherwise, rules_of  # noqa: E402

ENGINES = [case for case in CASES if case[1] in ("vllm", "sglang") and rules_of(*case) in RULES]


class Model:
    """What the loaders ask a model for."""

    def __init__(self, expected: dict[str, Any], config: dict[str, Any]) -> None:
        self.config = SimpleNamespace(to_dict=lambda: config)
        self.held = {name: torch.full(shape, -1.0) for name, (shape, _) in expected.items()}

    def named_parameters(self, remove_duplicate: bool = True) -> Iterator[tuple[str, Any]]:
        assert not remove_duplicate
        yield from self.held.items()


def saved(model: str, path: Path) -> dict[str, Any]:
    """A checkpoint of Hugging Face's tensors; the configuration."""
    tensors = {name: array.astype(np.float32) for name, array in elements(answer(model)).items()}
    sw.save_checkpoint(path, tensors, to="hf", sync=False)
    config: dict[str, Any] = answer(model)["config"]
    return config


@pytest.mark.heavy
@pytest.mark.parametrize(("model", "engine"), ENGINES)
def test_ranks_hold_what_the_engine_loads(model: str, engine: str, tmp_path: Path) -> None:
    config = saved(model, tmp_path / "hf")
    for count, ranks in answer(model)["engines"][engine]["ranks"].items():
        if "refused" in ranks or otherwise(config, engine, int(count), ranks):
            continue
        for rank, expected in enumerate(ranks):
            held = Model(expected, config).held
            with sw.open_checkpoint(tmp_path / "hf") as checkpoint:
                rules = _engine.RankRules.of(engine, config, rank, int(count), rules=rules_of(model, engine))
                if any(numbers is None for _, numbers in expected.values()):  # It computes with values.
                    with pytest.raises(sw.LayoutError):
                        _engine.fill(held, checkpoint, rules)
                    return
                _engine.fill(held, checkpoint, rules, has_all_layers="-mtp" not in model)
            for name, (_, numbers) in expected.items():
                assert digest(held[name].numpy().astype("i4")) == numbers, (name, rank, count)


@pytest.mark.parametrize(("model", "engine"), ENGINES)
def test_the_rules_are_found_by_the_type_of_the_model(model: str, engine: str) -> None:
    if "-mtp" in model or model.startswith("falcon"):  # Layers for further tokens; two architectures of one type.
        return
    assert _engine.engine_rules(engine, answer(model)["config"]) == rules_of(model, engine)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the two loaders import of the engines, by the names and with the arguments that these have."""
    known = SimpleNamespace(formats={}, rank=1, ranks=2, stages=1)

    class BaseModelLoader:
        def __init__(self, load_config: Any) -> None:
            self.load_config = load_config

    def register_model_loader(load_format: str) -> Any:
        def registered(kind: Any) -> Any:
            assert issubclass(kind, BaseModelLoader)
            known.formats[load_format] = kind
            return kind

        return registered

    parallel = {
        "get_tensor_model_parallel_rank": lambda: known.rank,
        "get_tensor_model_parallel_world_size": lambda: known.ranks,
        "get_pp_group": lambda: SimpleNamespace(world_size=known.stages),
    }
    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {"register_model_loader": register_model_loader},
        "vllm.model_executor.model_loader.base_loader": {"BaseModelLoader": BaseModelLoader},
        "vllm.distributed": parallel,
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.distributed": parallel,
    }
    for name, values in modules.items():
        module = ModuleType(name)
        vars(module).update(values, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    return known


def test_the_load_format_of_vllm(engines: SimpleNamespace, tmp_path: Path) -> None:
    config = saved("llama-0", tmp_path / "hf")
    vllm.register_load_format()
    settings = SimpleNamespace(
        model=str(tmp_path / "hf"), model_weights="", hf_config=SimpleNamespace(to_dict=lambda: config)
    )
    expected = answer("llama-0")["engines"]["vllm"]["ranks"]["2"][1]
    elsewhere = tmp_path / "a.pt"
    sw.reshard_checkpoint(tmp_path / "hf", elsewhere, to="torch", sync=False)
    for extra, model_path in (
        ({}, tmp_path / "hf"),
        ({"checkpoint": str(elsewhere), "rules": "vllm/llama"}, "nowhere"),
    ):
        loader = engines.formats["shardwise"](SimpleNamespace(model_loader_extra_config=extra))
        settings.model = str(model_path)
        model = Model(expected, config)
        loader.download_model(settings)
        loader.load_weights(model, settings)
        assert all(digest(model.held[name].numpy().astype("i4")) == said for name, (_, said) in expected.items())
    with pytest.raises(sw.LayoutError, match="takes 'checkpoint' and 'rules'"):
        engines.formats["shardwise"](SimpleNamespace(model_loader_extra_config={"path": "a"}))


def test_a_stage_of_a_pipeline_has_its_layers_only(engines: SimpleNamespace, tmp_path: Path) -> None:
    config = saved("llama-0", tmp_path / "hf")
    vllm.register_load_format()
    expected = {
        name: said
        for name, said in answer("llama-0")["engines"]["vllm"]["ranks"]["2"][1].items()
        if ".layers.1." in name
    }
    loader = engines.formats["shardwise"](SimpleNamespace(model_loader_extra_config=None))
    settings = SimpleNamespace(model=str(tmp_path / "hf"), hf_config=SimpleNamespace(to_dict=lambda: config))
    with pytest.raises(sw.LayoutError, match="but the model has no such parameter"):
        loader.load_weights(Model(expected, config), settings)
    engines.stages = 2
    model = Model(expected, config)
    loader.load_weights(model, settings)
    assert all(digest(model.held[name].numpy().astype("i4")) == said for name, (_, said) in expected.items())


def test_the_weight_loader_of_sglang(engines: SimpleNamespace, tmp_path: Path) -> None:
    config = saved("mixtral-0", tmp_path / "hf")
    expected = answer("mixtral-0")["engines"]["sglang"]["ranks"]["2"][1]
    for rules in (None, "sglang/mixtral"):
        model = Model(expected, config)
        sglang.load(model, sglang.request(str(tmp_path / "hf"), rules))
        assert all(digest(model.held[name].numpy().astype("i4")) == said for name, (_, said) in expected.items())
    with pytest.raises(sw.LayoutError, match=r"request\(PATH\) makes what this loader takes"):
        sglang.load(model, [("model.norm.weight", torch.zeros(3))])


def test_what_is_not_filled_exactly_is_refused(tmp_path: Path) -> None:
    """Nothing is read before: the parameters are as they were."""
    config = saved("llama-0", tmp_path / "hf")
    expected = answer("llama-0")["engines"]["vllm"]["ranks"]["2"][0]
    name = "model.layers.0.self_attn.qkv_proj.weight"

    def refused(message: str, held: dict[str, Any], **changed: Any) -> None:
        with sw.open_checkpoint(tmp_path / "hf") as checkpoint, pytest.raises(sw.LayoutError, match=message):
            _engine.fill(held, checkpoint, _engine.RankRules.of("vllm", {**config, **changed}, 0, 2))
        assert all((one == -1).all() for one in held.values())

    held = Model(expected, config).held
    refused(r"qkv_proj.weight' has the shape \(1, 2\) in the model, but", {**held, name: torch.full((1, 2), -1.0)})
    refused(r"no tensor of .* holds 1 parameter of the model: .*'scale'", {**held, "scale": torch.full((3,), -1.0)})
    refused("but the model has no such parameter", {key: value for key, value in held.items() if key != name})
    refused("is torch.int32 in the model, and float32 in the file", {**held, name: held[name].to(torch.int32)})
    refused("quantized weights are not loaded", held, quantization_config={"quant_method": "fp8"})
    refused("there are no rules of vllm for a model of the type", held, model_type="nobody")
    half = {key: value.to(torch.bfloat16) for key, value in held.items()}
    with sw.open_checkpoint(tmp_path / "hf") as checkpoint:
        rules = _engine.RankRules.of("vllm", config, 0, 2)
        assert _engine.fill(half, checkpoint, rules) > 0  # Rounded, as the engine's own loaders do.


def test_the_entry_point_is_what_vllm_looks_for() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    entry = 'shardwise = "shardwise.interop.vllm:register_load_format"'
    assert f'[project.entry-points."vllm.general_plugins"]\n{entry}' in text
