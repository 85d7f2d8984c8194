"""Recordings of Megatron-Bridge, by a small one that sends as it does: `test_engine_record.py` asks its own sources."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.interop import megatron

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
dist: Any = torch.distributed

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4, "num_attention_heads": 1}
SHAPES = {
    "words": ((10, 4), "bfloat16"),
    **{f"{layer}.q": ((8, 4), "bfloat16") for layer in range(2)},
    **{f"{layer}.k": ((4, 4), "bfloat16") for layer in range(2)},
    **{f"{layer}.norm": ((4,), "bfloat16") for layer in range(2)},
    **{f"{layer}.{expert}.down": ((4, 8), "bfloat16") for layer in range(2) for expert in range(4)},
}


class Core:
    """Groups of ranks as `megatron.core.parallel_state` has them, of PyTorch's own process groups."""

    def initialize_model_parallel(self, **sizes: Any) -> None:
        assert not sizes.pop("create_gloo_process_groups")
        self.tp, self.pp, self.ep, self.etp = (
            sizes[f"{name}_parallel_size"]
            for name in ("tensor_model", "pipeline_model", "expert_model", "expert_tensor")
        )
        world = dist.get_world_size()
        stage, own = divmod(dist.get_rank(), world // self.pp)
        self.stage, self.expert = stage, own // self.etp % self.ep
        start = dist.get_rank() - dist.get_rank() % self.tp
        self.tp_group = dist.new_group(range(start, start + self.tp))
        start = dist.get_rank() - dist.get_rank() % self.etp
        self.etp_group = dist.new_group(range(start, start + self.etp))
        self.ends = dist.new_group(sorted({own, own + world - world // self.pp}))

    def destroy_model_parallel(self) -> None:
        self.tp_group = self.etp_group = self.ends = None


class Stage(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A stage's layers, counted from 0, and a rank's experts; the last stage has the words a second time."""

    def __init__(self, core: Core, rows: int | None) -> None:
        super().__init__()
        self.config, own = SimpleNamespace(), 2 // core.pp
        self.first = core.stage * own
        words = 10 if rows is None else -(-10 // (rows * core.tp)) * rows * core.tp
        of_end = {core.pp - 1: "output", 0: "embedding"}
        if core.stage in of_end:
            self.register_parameter(of_end[core.stage], torch.nn.Parameter(torch.empty(words // core.tp, 4)))
        for layer in range(own):
            # As Megatron-Core does: on a device, which is replaced by the CPU.
            device = torch.cuda.current_device()
            made = {"qk": (12 // core.tp, 4), "norm": (4,)}
            made |= {f"weight{expert}": (4, 8 // core.etp) for expert in range(4 // core.ep)}
            for name, shape in made.items():
                self.register_parameter(f"{layer}_{name}", torch.nn.Parameter(torch.empty(shape, device=device).cuda()))


class Bridge:
    """What a bridge of Megatron-Bridge does, with the communication that it has."""

    def __init__(self, core: Core) -> None:
        self.core = core

    def sent(self, whole: Any, param: Any, group: Any, dim: int = 0) -> Any:
        """As `MegatronParamMapping.scatter_to_tp_ranks`."""
        if dist.get_world_size(group) == 1:
            return whole
        output = torch.empty_like(param)
        parts = list(whole.chunk(dist.get_world_size(group), dim)) if dist.get_rank(group) == 0 else None
        dist.scatter(output, parts, src=dist.get_global_rank(group, 0), group=group)
        return output

    def fused(self, q: Any, k: Any) -> Any:
        return torch.cat([part for pair in zip(q.chunk(4), k.chunk(4), strict=True) for part in pair])

    def load_weights_hf_to_megatron(self, source: Any, models: list[Stage]) -> None:
        core, (model,), state = self.core, models, source.state
        assert {*state.source.get_all_keys()} == {*state} == {*SHAPES}
        assert state.source.has_glob("*.3.down")  # Bridges of GLM ask so.
        assert not state.source.has_glob("3.down")
        gathered: list[Any] = [None] * dist.get_world_size(core.ends)
        dist.all_gather_object(gathered, [name for name, _ in model.named_parameters()], group=core.ends)
        assert all(gathered)
        print("Loading")
        for name, param in model.named_parameters():
            layer, _, kind = name.partition("_")
            number = f"{model.first + int(layer)}" if kind else ""
            if name == "embedding":
                whole = state["words"]
                whole = torch.cat([whole, whole.new_zeros(len(param) * core.tp - 10, 4)])
                param.copy_(self.sent(whole, param, core.tp_group))
            elif kind == "qk":
                param.copy_(self.sent(self.fused(state[f"{number}.q"], state[f"{number}.k"]), param, core.tp_group))
            elif kind == "norm":
                whole = state[f"{number}.norm"] if dist.get_rank(core.tp_group) == 0 else torch.empty(4)
                dist.broadcast(whole, src=dist.get_global_rank(core.tp_group, 0), group=core.tp_group)
                param.copy_(whole)
            elif kind:
                expert = int(kind.removeprefix("weight")) + core.expert * 4 // core.ep
                param.copy_(self.sent(state[f"{number}.{expert}.down"], param, core.etp_group, 1))
        if core.stage in (0, core.pp - 1):
            words = model.embedding.data if core.stage == 0 else torch.empty_like(model.output)
            dist.broadcast(words, src=dist.get_process_group_ranks(core.ends)[0], group=core.ends)
            if core.stage == core.pp - 1 > 0:
                model.output.data.copy_(words)


def global_name(core: Core, models: list[Stage], _: Any, name: str, vp_stage: int | None = None) -> str:
    assert vp_stage == 0
    layer, _, kind = name.partition("_")
    expert = kind.removeprefix("weight")
    kind = f"weight{int(expert) + core.expert * 4 // core.ep}" if expert != kind else kind
    return f"{int(layer) + models[0].first}.{kind}" if kind else name


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the adapter imports of Megatron-Bridge and Megatron-Core, by the names and with the arguments of 0.6.0."""
    known = SimpleNamespace(core=Core(), bridge=Bridge)

    class Provider(SimpleNamespace):
        is_final = False

        def finalize(self) -> None:
            self.is_final = True

        def provide(self) -> Stage:
            assert self.is_final
            assert self.params_dtype is torch.float32
            assert self.tensor_model_parallel_size == known.core.tp
            rows = getattr(self, "make_vocab_size_divisible_by", None)
            return Stage(known.core, rows if getattr(self, "should_pad_vocab", False) else None)

    class AutoBridge:
        @classmethod
        def from_hf_config(cls, config: Any) -> AutoBridge:
            assert (config.architectures, config.hidden_size) == (["LlamaForCausalLM"], 4)
            return cls()

        def to_megatron_provider(self, load_weights: bool = True) -> Provider:
            assert not load_weights
            return Provider()

        @property
        def _model_bridge(self) -> Any:
            return known.bridge(known.core)

    def of(*given: Any) -> str:
        return global_name(known.core, *given)

    groups = SimpleNamespace(use_mpu_process_groups=lambda: "groups")
    modules: dict[str, dict[str, Any]] = {
        "megatron": {},
        "megatron.bridge": {"AutoBridge": AutoBridge},
        "megatron.bridge.models": {},
        "megatron.bridge.models.conversion": {},
        "megatron.bridge.models.conversion.model_bridge": {"_megatron_local_name_to_global": of},
        "megatron.bridge.models.conversion.utils": {"persistent_buffers": lambda _: ()},
        "megatron.core": {"parallel_state": known.core},
        "megatron.core.process_groups_config": {"ProcessGroupCollection": groups},
        "megatron.core.tensor_parallel": {},
        "megatron.core.tensor_parallel.random": {"CudaRNGStatesTracker": SimpleNamespace(fork=None)},
    }
    for name, values in modules.items():
        module = ModuleType(name)
        vars(module).update(values, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    return known


def numbers() -> dict[str, Any]:
    found, first = {}, 1
    for name, (shape, _) in SHAPES.items():
        size = int(np.prod(shape))
        found[name] = np.arange(first, first + size).reshape(shape)
        first += size
    return found


def expected(tp: int, pp: int, ep: int, etp: int, rows: int) -> list[dict[str, Any]]:
    """The element numbers of each rank, cut by hand."""
    known, found = numbers(), []
    world = max(tp, etp * ep)
    for rank in range(world * pp):
        stage, own = divmod(rank, world)
        held = {}
        words = np.concatenate([known["words"], np.zeros((rows - 10, 4), int)])
        if stage == 0:
            held["embedding"] = np.split(words, tp)[own % tp]
        if stage == pp - 1 > 0:
            held["output"] = np.split(words, tp)[own % tp]
        for layer in range(2) if pp == 1 else [stage]:
            pairs = zip(np.split(known[f"{layer}.q"], 4), np.split(known[f"{layer}.k"], 4), strict=True)
            held[f"{layer}.qk"] = np.split(np.concatenate([part for pair in pairs for part in pair]), tp)[own % tp]
            held[f"{layer}.norm"] = known[f"{layer}.norm"]
            for expert in np.split(np.arange(4), ep)[own // etp % ep]:
                held[f"{layer}.weight{expert}"] = np.split(known[f"{layer}.{expert}.down"], etp, 1)[own % etp]
        found.append(held)
    return found


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [((1, 1, 1, 1), None), ((2, 1, 1, 2), None), ((2, 2, 1, 2), 3), ((2, 2, 2, 1), 4), ((1, 2, 2, 2), None)],
)
def test_each_rank_is_recorded(
    engine: SimpleNamespace, capsys: pytest.CaptureFixture[str], sizes: tuple[int, int, int, int], rows: int | None
) -> None:
    tp, pp, ep, etp = sizes
    given: dict[str, Any] = {"pp": pp, "ep": ep, "etp": None if etp == tp else etp, "vocabulary_rows": rows}
    before = dist.scatter, torch.cuda.current_device, torch.Tensor.cuda, sys.excepthook
    ranks = megatron.record_ranks(CONFIG, tp, **given, tensors=SHAPES)
    whole = expected(tp, pp, ep, etp, 10 if rows is None else -(-10 // (rows * tp)) * rows * tp)
    assert [one.holder for one in ranks] == [*range(len(whole))]
    for recording, held in zip(ranks, whole, strict=True):
        assert {*recording.parameters} == {*held} - ({"output"} if pp == 1 else set())
        for name, value in held.items():
            assert np.array_equal(recording.element_numbers(name), value), (recording.holder, name)
    assert capsys.readouterr().out == ""  # A bridge prints what it does; the command prints rules.
    assert before == (dist.scatter, torch.cuda.current_device, torch.Tensor.cuda, sys.excepthook)
    assert not dist.is_initialized()


def test_what_a_bridge_computes_swaps_skips_and_transposes_is_named(engine: SimpleNamespace) -> None:
    def planted(change: Callable[[Any, Any], Any]) -> None:
        engine.bridge = type("Planted", (Bridge,), {"fused": lambda self, q, k: change(q, k)})

    planted(lambda q, k: torch.cat([q * 2, k]))
    with pytest.raises(sw.LayoutError, match=r"the loader computes \d+ of 24 elements of '0.qk'; |'0.qk'"):
        megatron.record_ranks(CONFIG, 2, tensors=SHAPES)
    for left in megatron.record_ranks(CONFIG, 2, tensors=SHAPES, computed="leave"):
        assert {*left.computed} == {"0.qk", "1.qk"}
        assert {*left.parameters["0.norm"].pieces[0].counts} == {4}
    known = numbers()
    planted(lambda q, k: torch.cat([k, q]))
    swapped = megatron.record_ranks(CONFIG, 2, tensors=SHAPES)[0]
    assert np.array_equal(swapped.element_numbers("0.qk"), np.concatenate([known["0.k"], known["0.q"]])[:6])
    planted(lambda q, k: torch.cat([q.reshape(4, 8).T.reshape(8, 4), k]))
    turned = megatron.record_ranks(CONFIG, 2, tensors=SHAPES)[0]
    assert np.array_equal(turned.element_numbers("0.qk"), known["0.q"].reshape(4, 8).T.reshape(8, 4)[:6])
    planted(lambda q, k: torch.cat([q, torch.zeros_like(k)]))
    skipped = megatron.record_ranks(CONFIG, 2, tensors=SHAPES)[1]
    assert {"0.k", "1.k"} <= {*skipped.unused}
    assert skipped.parameters["0.qk"].padding == 16


def test_what_does_not_go_is_refused(engine: SimpleNamespace) -> None:
    class Silent(Bridge):
        """Its first rank sends nothing."""

        def sent(self, whole: Any, param: Any, group: Any, dim: int = 0) -> Any:
            if dist.get_rank(group):
                dist.scatter(param, None, src=dist.get_global_rank(group, 0), group=group)
            return whole.chunk(dist.get_world_size(group), dim)[0]

    engine.bridge = Silent
    with pytest.raises(sw.LayoutError, match=r"cannot load the model with tp 2, .*rank 0 did not send"):
        megatron.record_ranks(CONFIG, 2, tensors=SHAPES)
    with pytest.raises(sw.LayoutError, match="vocabulary_rows must be 1 or more, got 0"):
        megatron.record_ranks(CONFIG, tensors=SHAPES, vocabulary_rows=0)
    with pytest.raises(sw.LayoutError, match="the configuration has no architectures"):
        megatron.record_ranks({"model_type": "llama"}, tensors=SHAPES)
