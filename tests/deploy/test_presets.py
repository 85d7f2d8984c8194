"""Presets where no corpus has cases: pipelines of engines, the order of their ranks, hybrid sharding."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from shardwise import LayoutError, MeshError
from shardwise.deploy import (
    Deployment,
    ExpertMap,
    LocalParameter,
    Stages,
    balanced_experts,
    fsdp2,
    megatron,
    sglang,
    vllm,
)

from ..checks import refused

#: Layers of each stage by `get_pp_indices` of vLLM 0.33.0 and of SGLang 0.5.23, executed.
PIPELINES = [
    (8, 3, [3, 3, 2], [2, 3, 3]),
    (7, 4, [2, 2, 2, 1], [1, 2, 2, 2]),
    (5, 4, [1, 1, 2, 1], [1, 1, 1, 2]),
    (9, 4, [2, 2, 3, 2], [2, 2, 2, 3]),
    (10, 4, [2, 3, 3, 2], [2, 2, 3, 3]),
    (3, 2, [2, 1], [1, 2]),
    (61, 8, [7, 7, 8, 8, 8, 8, 8, 7], [7, 7, 7, 8, 8, 8, 8, 8]),
    (11, 6, [2, 2, 2, 2, 2, 1], [1, 2, 2, 2, 2, 2]),
]


def config(layers: int = 4, **more: Any) -> dict[str, object]:
    return {"hidden_size": 16, "num_attention_heads": 8, "num_hidden_layers": layers, "vocab_size": 128, **more}


class TestEngines:
    @pytest.mark.parametrize(("layers", "pp", "of_vllm", "of_sglang"), PIPELINES)
    def test_layers_of_each_stage(self, layers: int, pp: int, of_vllm: list[int], of_sglang: list[int]) -> None:
        for made, expected in ((vllm(config(layers), pp=pp), of_vllm), (sglang(config(layers), pp=pp), of_sglang)):
            assert made.numbers["stage"] == Stages.of_counts(expected).stage

    def test_the_ranks_of_vllm(self) -> None:
        # Ranks are (dp, pp, tp); experts are over dp and tp of one stage: ranks 0, 1, 4, 5 and 2, 3, 6, 7.
        one = vllm(config(2, num_experts=8), dp=2, pp=2, tp=2, expert_parallel=True)
        experts = [one.partition(f"model.layers.1.mlp.experts.{e}.up_proj.weight", (4, 16)).holders for e in range(8)]
        assert experts == [(f"cpu:{rank}",) for rank in (2, 2, 3, 3, 6, 6, 7, 7)]
        heads = one.partition("model.layers.0.self_attn.q_proj.weight", (16, 16))
        assert heads.holders == ("cpu:0", "cpu:1", "cpu:4", "cpu:5")
        assert [heads.box(label)[0].start for label in heads.holders] == [0, 8, 0, 8]

    def test_without_expert_parallelism_features_are_cut_over_both(self) -> None:
        one = vllm(config(1, num_experts=2), dp=2, tp=2)
        down = one.partition("model.layers.0.mlp.experts.1.down_proj.weight", (16, 8))
        assert [down.box(f"cpu:{i}")[1] for i in range(4)] == [slice(2 * i, 2 * i + 2) for i in range(4)]

    def test_experts_of_each_layer(self) -> None:
        maps = balanced_experts([[9, 1, 1, 1], [1, 1, 1, 9]], slots=6, ep=2)
        one = vllm(config(2, num_experts=4), tp=2, expert_parallel=True, experts=maps)
        shapes = {
            f"model.layers.{i}.mlp.experts.{e}.{x}_proj.weight": (4, 16) if x != "down" else (16, 4)
            for i in range(2)
            for e in range(4)
            for x in ("gate", "up", "down")
        }
        for rank in range(2):
            by_name = {each.name: each for each in one.parameters_of(f"cpu:{rank}", shapes)}
            for layer in range(2):
                down = by_name[f"model.layers.{layer}.mlp.experts.routed_experts.w2_weight"]
                assert [int(piece.tensor.split(".")[5]) for piece in down.pieces] == list(maps[layer].slots[rank])

    def test_data_parallel_attention_of_sglang(self) -> None:
        one = sglang(config(1, num_experts=4, intermediate_size=32), tp=4, dp=2, ep=4)
        assert one.partition("model.layers.0.self_attn.q_proj.weight", (16, 16)).num_shards == (2, 1)
        assert one.partition("model.layers.0.mlp.down_proj.weight", (16, 32)).num_shards == (1, 4)
        assert one.partition("model.layers.0.mlp.experts.2.down_proj.weight", (16, 8)).holders == ("cpu:2",)

    def test_latent_attention_is_cut_by_heads(self) -> None:
        """By hand: `kv_b_proj` has 6 rows of keys and 10 of values for each of 8 heads; what projects down is whole."""
        latent = {"q_lora_rank": 12, "kv_lora_rank": 4, "qk_nope_head_dim": 6, "qk_rope_head_dim": 2, "v_head_dim": 10}
        one = vllm(config(1, **latent), tp=4)

        def rows(name: str, shape: tuple[int, int]) -> list[tuple[int, int]]:
            found = one.partition(f"model.layers.0.self_attn.{name}.weight", shape)
            return [(found.box(label)[0].start, found.box(label)[0].stop) for label in found.holders]

        assert rows("kv_b_proj", (8 * 16, 4)) == [(32 * i, 32 * i + 32) for i in range(4)]
        assert rows("q_b_proj", (8 * 8, 12)) == [(16 * i, 16 * i + 16) for i in range(4)]
        assert rows("kv_a_proj_with_mqa", (4 + 2, 16)) == [(0, 6)] * 4
        with pytest.raises(LayoutError):  # Not a row of 16 for each head.
            rows("kv_b_proj", (8 * 15, 4))

    def test_a_tied_embedding_is_on_both_ends(self) -> None:
        one = vllm(config(4, tie_word_embeddings=True), pp=4)
        assert one.partition("model.embed_tokens.weight", (128, 16)).holders == ("cpu:0", "cpu:3")

    @pytest.mark.parametrize(
        ("more", "sizes", "message"),
        [
            ({"num_attention_heads": 6}, {"tp": 4}, "num_attention_heads is 6"),
            ({"num_attention_heads": 12, "num_key_value_heads": 3}, {"tp": 4}, "num_key_value_heads is 3"),
            ({"num_experts": 4}, {"tp": 2, "expert_parallel": True, "placement": "random"}, "placement is 'random'"),
            ({"num_experts": 4}, {"tp": 2, "expert_parallel": True, "redundant": -1}, "redundant is -1"),
            ({"num_experts": 4}, {"expert_parallel": True, "experts": ExpertMap.even(4, 2)}, "on 1 rank, "),
            ({"num_hidden_layers": None}, {}, "config has no num_hidden_layers"),
        ],
    )
    def test_refusals(self, more: dict[str, object], sizes: dict[str, object], message: str) -> None:
        with pytest.raises(LayoutError, match=message):
            vllm({**config(), **more}, **sizes)  # type: ignore[arg-type]
        with pytest.raises(MeshError, match="tp is 0"):
            vllm(config(), tp=0)


def parameters(one: Deployment, label: str, tensors: dict[str, Any]) -> dict[str, LocalParameter]:
    return {each.name: each for each in one.parameters_of(label, tensors)}


def expert_tensors(experts: int, layers: int = 1, shared: bool = False) -> dict[str, Any]:
    """Experts of 6 features and a hidden size of 16, and a shared one of as many."""
    owners = [f"experts.{e}" for e in range(experts)] + ["shared_experts"] * shared
    return {
        f"model.layers.{i}.mlp.{owner}.{x}_proj.weight": ((16, 6) if x == "down" else (6, 16), "float32")
        for i in range(layers)
        for owner in owners
        for x in ("gate", "up", "down")
    }


class TestTiedEmbeddings:
    """By `qwen3.py` of SGLang 0.5.23: `lm_head` is a layer of its own on the last of several stages."""

    TIED: Mapping[str, Any] = MappingProxyType({"tie_word_embeddings": True, "model_type": "qwen3"})
    TENSORS = MappingProxyType({"model.embed_tokens.weight": (128, 16), "model.norm.weight": (16,)})

    @pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 3), (4, 2)])
    def test_the_output_layer_of_the_last_stage(self, tp: int, pp: int) -> None:
        for made, name in ((sglang, "lm_head.weight"), (vllm, "model.embed_tokens.weight")):
            one = made(config(**self.TIED), tp=tp, pp=pp)
            for rank in range(tp * pp):
                stage, at = divmod(rank, tp)
                found = parameters(one, f"cpu:{rank}", dict(self.TENSORS))
                names = {0: ["model.embed_tokens.weight"], pp - 1: [name, "model.norm.weight"]}.get(stage, [])
                assert sorted(found) == sorted(names)
                for each in found.values():
                    if each.name != "model.norm.weight":
                        (piece,) = each.pieces
                        assert piece.tensor == "model.embed_tokens.weight"
                        assert piece.box[0] == slice(128 // tp * at, 128 // tp * (at + 1))

    def test_one_stage_has_the_embedding_only(self) -> None:
        one = sglang(config(**self.TIED), tp=2)
        assert sorted(parameters(one, "cpu:1", dict(self.TENSORS))) == [
            "model.embed_tokens.weight",
            "model.norm.weight",
        ]

    def test_within_a_model_of_text_and_images(self) -> None:
        one = sglang({"model_type": "x", "text_config": config(**self.TIED)}, pp=2)
        tensors = {f"language_model.{name}": shape for name, shape in self.TENSORS.items()}
        assert sorted(parameters(one, "cpu:1", tensors)) == [
            "language_model.lm_head.weight",
            "language_model.model.norm.weight",
        ]

    def test_what_cannot_be_said(self) -> None:
        tied = config(**self.TIED)
        with pytest.raises(
            LayoutError, match=r"over tp // dp = 2 devices on the first stage and over tp = 4 .* dp=1 or pp=1"
        ):
            sglang(tied, tp=4, dp=2, pp=2)
        sglang(tied, tp=4, pp=2)
        sglang(tied, tp=4, dp=2)
        with pytest.raises(LayoutError, match=r"no output layer on the last stage of a llama .* give pp=1"):
            sglang({**tied, "model_type": "llama"}, pp=2)
        sglang({**tied, "model_type": "llama"})
        one = sglang(tied, pp=2)
        with pytest.raises(
            LayoutError, match=r"'lm_head\.weight' .* is made of other tensors, but there is a tensor of this"
        ):
            one.parameters_of("cpu:1", {**self.TENSORS, "lm_head.weight": (128, 16)})


class TestSharedExperts:
    """By `shared_experts_fusion_disable_reason` of SGLang 0.5.23, on CUDA with its default options."""

    @pytest.mark.parametrize(
        ("more", "ep", "is_stacked"),
        [
            ({"model_type": "deepseek_v3", "n_routed_experts": 256, "n_shared_experts": 1}, 1, True),
            ({"model_type": "deepseek_v3", "n_routed_experts": 256, "n_shared_experts": 1}, 2, False),
            ({"model_type": "deepseek_v3", "n_routed_experts": 256, "n_shared_experts": 2}, 1, False),
            ({"model_type": "deepseek_v3", "n_routed_experts": 384, "n_shared_experts": 1}, 1, False),
            ({"model_type": "deepseek_v2", "n_routed_experts": 256, "n_shared_experts": 1}, 1, False),
            ({"model_type": "glm4_moe", "n_routed_experts": 4, "n_shared_experts": 1}, 1, True),
            ({"model_type": "glm4_moe", "n_routed_experts": 4, "n_shared_experts": 1}, 2, False),
            ({"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 4, "n_shared_experts": 1}, 1, True),
            ({"architectures": ["DeepseekV32ForCausalLM"], "n_routed_experts": 256, "n_shared_experts": 1}, 1, False),
        ],
    )
    def test_by_default(self, more: dict[str, Any], ep: int, is_stacked: bool) -> None:
        count, tp = more["n_routed_experts"], max(ep, 2)
        one = sglang(config(1, **more), tp=tp, ep=ep)
        for rank in range(tp):
            found = parameters(one, f"cpu:{rank}", expert_tensors(count, shared=True))
            start = "model.layers.0.mlp."
            stacks = {f"{start}experts.w13_weight", f"{start}experts.w2_weight"}
            apart = {f"{start}shared_experts.gate_up_proj.weight", f"{start}shared_experts.down_proj.weight"}
            assert found.keys() == stacks | (set() if is_stacked else apart)
            w13, w2 = (found[f"{start}experts.{x}_weight"] for x in ("w13", "w2"))
            each = 6 * ep // tp
            assert w13.shape == (count // ep + is_stacked, 2 * each, 16)
            assert w2.shape == (count // ep + is_stacked, 16, each)
            last = [piece for piece in w13.pieces if piece.start[0] == w13.shape[0] - 1]
            if is_stacked:
                assert [(piece.tensor, piece.box[0], piece.start[1]) for piece in last] == [
                    (f"{start}shared_experts.{x}_proj.weight", slice(each * rank, each * (rank + 1)), each * at)
                    for at, x in enumerate(("gate", "up"))
                ]
            else:
                assert ".experts." in last[0].tensor

    def test_options(self) -> None:
        glm = config(1, model_type="glm4_moe", n_routed_experts=4, n_shared_experts=1)
        apart = sglang(glm, fuse_shared_experts=False)
        assert len(parameters(apart, "cpu:0", expert_tensors(4, shared=True))) == 4
        with refused(
            LayoutError,
            "w13_weight' of 'cpu:0' is made of",
            "but 'model.layers.0.mlp.shared_experts.gate_proj.weight' is not among",
        ):
            parameters(sglang(glm), "cpu:0", expert_tensors(4))
        with pytest.raises(LayoutError, match="fuse_shared_experts is True, but ep is 2"):
            sglang(glm, tp=2, ep=2, fuse_shared_experts=True)

    def test_models_that_are_not_known_need_the_option(self) -> None:
        for more, said in (
            ({}, "names no architecture"),
            ({"architectures": ["NewForCausalLM"]}, "is of a NewForCausalLM"),
        ):
            unknown = config(1, n_routed_experts=4, n_shared_experts=1, **more)
            with pytest.raises(
                LayoutError, match=rf"shared experts and {said}.*: give fuse_shared_experts=True or False"
            ):
                sglang(unknown)
            for given, count in ((True, 2), (False, 4)):
                one = sglang(unknown, fuse_shared_experts=given)
                assert len(parameters(one, "cpu:0", expert_tensors(4, shared=True))) == count
            assert sglang(unknown, tp=2, ep=2) == sglang(unknown, tp=2, ep=2, fuse_shared_experts=False)


@pytest.mark.parametrize("balancer", ["vllm", "sglang"])
def test_groups_that_nodes_do_not_divide_are_as_none(balancer: Any) -> None:
    """As DeepSeek's `rebalance_experts`: "use global load-balance policy", which knows no nodes."""
    load = [[9, 1, 5, 3, 7, 2], [1, 2, 3, 4, 5, 6]]
    given = balanced_experts(load, slots=8, ep=4, groups=3, nodes=2, balancer=balancer)
    assert given == balanced_experts(load, slots=8, ep=4, balancer=balancer)
    assert given != balanced_experts(load, slots=8, ep=4, groups=2, nodes=2, balancer=balancer)


class TestPartsOfParameters:
    """Half of a parameter is no parameter of an engine, whose loaders `--to vllm` writes for: it is refused alike."""

    @pytest.mark.parametrize("made", [vllm, sglang])
    @pytest.mark.parametrize(
        ("given", "parameter", "missing"),
        [
            ("self_attn.q_proj.weight", "self_attn.qkv_proj.weight", "self_attn.k_proj.weight"),
            ("self_attn.k_proj.bias", "self_attn.qkv_proj.bias", "self_attn.q_proj.bias"),
            ("mlp.gate_proj.weight", "mlp.gate_up_proj.weight", "mlp.up_proj.weight"),
            ("mlp.up_proj.weight", "mlp.gate_up_proj.weight", "mlp.gate_proj.weight"),
            ("mlp.experts.2.up_proj.weight", "w13_weight", "mlp.experts.2.gate_proj.weight"),
        ],
    )
    def test_half_of_it_is_refused(self, made: Any, given: str, parameter: str, missing: str) -> None:
        one = made(config(1, num_experts=4), tp=2)
        name, others = f"model.layers.0.{given}", {"model.layers.0.input_layernorm.weight": (16,)}
        shape = (16,) if given.endswith("bias") else (16, 16)
        said = (f"{parameter}' of 'cpu:1' is made of {name!r} and ", f"'model.layers.0.{missing}' is not among")
        with refused(LayoutError, *said):
            one.parameters_of("cpu:1", {**others, name: shape})
        # As it says: none of them, or all.
        assert list(parameters(one, "cpu:1", others)) == list(others)
        if parameter == "mlp.gate_up_proj.weight":
            both = {f"model.layers.0.{name}": shape for name in (given, missing)}
            assert list(parameters(one, "cpu:1", both)) == [f"model.layers.0.{parameter}"]

    @pytest.mark.parametrize("sizes", [{"tp": 2}, {"tp": 2, "expert_parallel": True}])
    def test_a_stack_of_some_experts_is_refused(self, sizes: dict[str, Any]) -> None:
        one = vllm(config(1, num_experts=4), **sizes)
        for experts, said in (((0, 2, 3), "has 1 on 'cpu:0'"), ((0, 1, 2, 3, 4), "none at 4|has no 4")):
            names = [f"model.layers.0.mlp.experts.{e}.down_proj.weight" for e in experts]
            with pytest.raises(LayoutError, match=said):
                one.parameters_of("cpu:0", dict.fromkeys(names, (16, 8)))
        (w2,) = one.parameters_of("cpu:0", {name: (16, 8) for name in expert_tensors(4) if "down" in name})
        assert w2.shape == ((2, 16, 8) if "expert_parallel" in sizes else (4, 16, 4))

    def test_latent_attention_has_its_queries_alone(self) -> None:
        """DeepSeek-V2-Lite: `q_lora_rank` is null, so vLLM has `q_proj` and `kv_a_proj_with_mqa` as they are."""
        latent = {"kv_lora_rank": 4, "qk_nope_head_dim": 6, "qk_rope_head_dim": 2, "v_head_dim": 10}
        start = "model.layers.0.self_attn."
        shapes = {f"{start}q_proj.weight": (64, 16), f"{start}kv_a_proj_with_mqa.weight": (6, 16)}
        for made in (vllm, sglang):
            assert list(parameters(made(config(1, q_lora_rank=None, **latent)), "cpu:0", shapes)) == list(shapes)
        down = {f"{start}{name}.weight": (rows, 16) for name, rows in (("q_a_proj", 12), ("kv_a_proj_with_mqa", 6))}
        one = vllm(config(1, q_lora_rank=12, **latent))
        assert list(parameters(one, "cpu:0", down)) == [f"{start}fused_qkv_a_proj.weight"]
        with refused(
            LayoutError, "of 'cpu:0' is made of", "but 'model.layers.0.self_attn.q_a_proj.weight' is not among"
        ):
            one.parameters_of("cpu:0", {f"{start}kv_a_proj_with_mqa.weight": (6, 16)})


class TestRanksWithoutExperts:
    """vLLM's `create_weights` makes parameters of no entries: shapes by the features, which are whole."""

    @pytest.mark.parametrize(("experts", "ep"), [(1, 2), (2, 4), (3, 4), (2, 6)])
    def test_fewer_experts_than_ranks(self, experts: int, ep: int) -> None:
        one = vllm(config(2, num_experts=experts, num_attention_heads=6), tp=ep // 2, dp=2, pp=2, expert_parallel=True)
        held = [0] * one.world.size
        for rank in range(one.world.size):
            stage = rank // (ep // 2) % 2
            found = parameters(one, f"cpu:{rank}", expert_tensors(experts, layers=2))
            start = f"model.layers.{stage}.mlp.experts.routed_experts."
            assert found.keys() == {f"{start}w13_weight", f"{start}w2_weight"}
            held[rank] = found[f"{start}w2_weight"].shape[0]
            assert found[f"{start}w13_weight"].shape == (held[rank], 12, 16)
            assert found[f"{start}w2_weight"].shape == (held[rank], 16, 6)
            assert bool(found[f"{start}w2_weight"].pieces) == (held[rank] > 0)
            assert found[f"{start}w2_weight"].views(np.zeros((held[rank], 16, 6))).keys() == {
                piece.tensor for piece in found[f"{start}w2_weight"].pieces
            }
        assert sorted(held) == sorted([1] * experts * 2 + [0] * (2 * ep - 2 * experts))

    def test_a_map_of_each_layer(self) -> None:
        """A rank is without experts in one layer, and has all of them in the other."""
        maps = [ExpertMap(((0, 1), ())), ExpertMap(((), (1, 0, 1)))]
        one = vllm(config(2, num_experts=2), tp=2, expert_parallel=True, experts=maps)
        for rank, sizes in enumerate([(2, 0), (0, 3)]):
            found = parameters(one, f"cpu:{rank}", expert_tensors(2, layers=2))
            stacks = [found[f"model.layers.{i}.mlp.experts.routed_experts.w13_weight"] for i in range(2)]
            assert [each.shape for each in stacks] == [(size, 12, 16) for size in sizes]

    def test_sglang_with_features_cut_as_well(self) -> None:
        one = sglang(config(1, num_experts=2), tp=4, ep=2, experts=ExpertMap(((0, 1), ())))
        shapes = [
            parameters(one, f"cpu:{i}", expert_tensors(2))["model.layers.0.mlp.experts.w2_weight"].shape
            for i in range(4)
        ]
        assert shapes == [(2, 16, 3), (2, 16, 3), (0, 16, 3), (0, 16, 3)]


class TestNames:
    def test_what_projects_down_in_latent_attention(self) -> None:
        """`fused_qkv_a_proj` in vLLM 0.33, `fused_qkv_a_proj_with_mqa` in SGLang 0.5.23."""
        latent = {"q_lora_rank": 12, "kv_lora_rank": 4, "qk_nope_head_dim": 6, "qk_rope_head_dim": 2, "v_head_dim": 10}
        start = "model.layers.0.self_attn."
        tensors = {f"{start}q_a_proj.weight": (12, 16), f"{start}kv_a_proj_with_mqa.weight": (6, 16)}
        for made, name in ((vllm, "fused_qkv_a_proj"), (sglang, "fused_qkv_a_proj_with_mqa")):
            assert list(parameters(made(config(1, **latent), tp=4), "cpu:1", tensors)) == [f"{start}{name}.weight"]

    @pytest.mark.parametrize("made", [vllm, sglang])
    def test_towers_are_no_part_of_the_language_model(self, made: Any) -> None:
        one = made(config())
        for name in (
            "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight",
            "model.vision_tower.encoder.layers.0.self_attn.q_proj.weight",
            "visual.blocks.0.norm.weight",
            "audio_tower.layers.0.self_attn.o_proj.weight",
            "vision_model.embeddings.norm.weight",
        ):
            assert not one.matching_rules(name)
        for start in ("", "model.", "language_model.model.", "model.language_model.", "thinker.model."):
            assert len(one.matching_rules(f"{start}layers.0.self_attn.q_proj.weight")) == 1
            assert len(one.matching_rules(f"{start}norm.weight")) == 1

    def test_the_numbers_of_the_language_model_come_first(self) -> None:
        """As `language_config`: a part's own values, then those of the whole."""
        whole = config(8, num_attention_heads=4, text_config={"num_hidden_layers": 2, "num_attention_heads": 8})
        one = vllm(whole, pp=2, tp=8)
        assert one.numbers["stage"] == (0, 1)
        assert one == vllm(config(2), pp=2, tp=8)
        deeper = {"thinker_config": {"text_config": config(2)}, "num_attention_heads": 3}
        assert vllm(deeper, pp=2, tp=8) == one


def test_the_vocabulary_is_padded_for_the_embedding_and_for_the_head() -> None:
    """By hand: 400 words are 448 with padding to 64, which 3 devices do not divide: 576, and for 6 devices 768."""
    one = sglang(config(vocab_size=400, num_attention_heads=6), tp=6, dp=2)
    embedding, head = (one.partition(f"{name}.weight", (400, 16)) for name in ("model.embed_tokens", "lm_head"))
    assert [embedding.holder_shape(f"cpu:{i}")[0] for i in range(6)] == [192] * 6
    assert [head.holder_shape(f"cpu:{i}")[0] for i in range(6)] == [128] * 6


class TestMegatron:
    def test_a_tied_embedding_is_on_both_ends(self) -> None:
        stages = megatron.pipeline(4, pp=4)
        for tied, holders in ((False, ("cpu:0",)), (True, ("cpu:0", "cpu:3"))):
            one = megatron.gpt(megatron.Ranks(4, pp=4), stages, tied=tied)
            assert one.partition("embedding.word_embeddings.weight", (8, 4)).holders == holders

    def test_a_model_is_gated_and_not_tied_unless_it_is_said(self) -> None:
        """As Megatron's `TransformerConfig` with SwiGLU and `untie_embeddings_and_output_weights`: gate, then up."""
        one = megatron.gpt(megatron.Ranks(4, tp=2, pp=2), megatron.pipeline(4, pp=2))
        assert one.partition("embedding.word_embeddings.weight", (8, 4)).holders == ("cpu:0", "cpu:1")
        first = one.partition("decoder.layers.0.mlp.linear_fc1.weight", (16, 4))
        assert [[piece.box[0] for piece in first.pieces(label)] for label in ("cpu:0", "cpu:1")] == [
            [slice(0, 4), slice(8, 12)],
            [slice(4, 8), slice(12, 16)],
        ]

    def test_stages_that_are_not_those_of_the_ranks(self) -> None:
        with pytest.raises(LayoutError, match="stages has 2 stages, but ranks has pp 4"):
            megatron.gpt(megatron.Ranks(4, pp=4), megatron.pipeline(4, pp=2))
        with pytest.raises(LayoutError, match="layer 0 is on stage 0 and on stage 0"):
            megatron.gpt(megatron.Ranks(1), megatron.pipeline(4, layout="Ett|ttL"))

    @pytest.mark.parametrize(
        "layout", ["E" + "t*99999" * 9 + "L", "E(tttttttt)*99999999999999999999L", "E" * 10 + "*9" * 9]
    )
    def test_a_layout_that_is_too_long_is_refused_at_once(self, layout: str) -> None:
        with pytest.raises(LayoutError, match=r"is of more than|must have|unrolled"):
            megatron.pipeline(4, layout=layout)

    def test_a_layout_is_written_again(self) -> None:
        stages = megatron.pipeline(5, pp=2, layout="Et|tt|t|tL")
        assert stages.text == "Et|tt|t|tL"
        assert stages.chunk == (0, 0, 0, 1, 1)
        assert megatron.pipeline(5, pp=2, layout=stages.text) == stages


class TestLimits:
    """Sizes that would take all memory are refused at once."""

    def test_too_many(self) -> None:
        for make, error, message in (
            (lambda: megatron.Ranks(2**40), MeshError, "world is 1099511627776; it must be from 1 to"),
            (lambda: megatron.pipeline(2**40), LayoutError, "up to 65536"),
            (lambda: ExpertMap.linear(2**40, 2), LayoutError, "num_experts is 1099511627776"),
            (lambda: ExpertMap.redundant(2, 2**40, 2), LayoutError, "redundant is 1099511627776"),
            (lambda: ExpertMap(((0, 2**40),)), LayoutError, "slots has expert 1099511627776, but no expert 1"),
            (lambda: balanced_experts([[1.0, 2.0]], 2**40, 2), LayoutError, "must be from 1 to"),
            (lambda: balanced_experts([[1.0, float("nan")]], 2, 2), LayoutError, "load must be finite numbers"),
            (lambda: Stages.of_counts([2**40]), LayoutError, "counts is"),
        ):
            with pytest.raises(error, match=message):
                make()


class TestFsdp:
    def test_hybrid_sharding_repeats(self) -> None:
        rows = fsdp2(2, 2).partition("w", (3, 2)).boxes()[:, 0].tolist()
        assert rows == [[0, 2], [2, 3], [0, 2], [2, 3]]

    def test_scalars_are_whole_everywhere(self) -> None:
        """PyTorch's `fully_shard` takes no parameters without dims, and leaves buffers as they are."""
        whole = fsdp2(2).partition("scale", ())
        assert (whole.total_shards, whole.replicas) == (1, 2)
