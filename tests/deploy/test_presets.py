"""Presets where no corpus has cases: pipelines of engines, the order of their ranks, hybrid sharding."""

from __future__ import annotations

import pytest

from shardwise import LayoutError, MeshError
from shardwise.deploy import ExpertMap, Stages, balanced_experts, fsdp2, megatron, sglang, vllm

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


def config(layers: int = 4, **more: object) -> dict[str, object]:
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
            ({"num_experts": 4}, {"expert_parallel": True, "experts": ExpertMap.even(4, 2)}, "on 1 ranks"),
            ({"num_hidden_layers": None}, {}, "config has no num_hidden_layers"),
        ],
    )
    def test_refusals(self, more: dict[str, object], sizes: dict[str, object], message: str) -> None:
        with pytest.raises(LayoutError, match=message):
            vllm({**config(), **more}, **sizes)  # type: ignore[arg-type]
        with pytest.raises(MeshError, match="tp is 0"):
            vllm(config(), tp=0)


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
            (lambda: ExpertMap(((0, 2**40),)), LayoutError, "slots has no expert 1, but expert 1099511627776"),
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

    def test_scalars_are_refused(self) -> None:
        with pytest.raises(LayoutError, match="rank 0"):
            fsdp2(2).partition("scale", ())
