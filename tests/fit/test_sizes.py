"""Sizes that fit: heads, experts, fused weights, forms; and that the answer is what the layouts of components allow."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.errors import LayoutError, ParseError
from shardwise.fit import SizeFit, fits, fits_tensors
from shardwise.fit.roles import TYPES, heads_of, role_of
from shardwise.quantized import component_layouts, find_components
from shardwise.rules.model_shapes import _FAMILIES

from ..checks import refused
from ..oracle.quantized import folders
from ..prove.against_quantized import draw, written

DATA = Path(__file__).parents[1] / "data" / "quantized"
Outline = dict[str, tuple[str, tuple[int, ...]]]

#: The plans of transformers 5.23, `base_model_tp_plan`: rows of out are "colwise" there.
PLANS = {
    "self_attn.q_proj self_attn.k_proj self_attn.v_proj mlp.gate_proj mlp.up_proj mlp.fc1": "colwise",
    "mlp.shared_expert.gate_proj mlp.shared_experts.up_proj attention.query_key_value mlp.dense_h_to_4h": "colwise",
    "self_attn.qkv_proj mlp.gate_up_proj linear_attn.in_proj_qkvz linear_attn.in_proj_ba": "colwise",
    "self_attn.o_proj mlp.down_proj mlp.shared_expert.down_proj mlp.fc2 self_attn.dense attention.dense": "rowwise",
    "mlp.dense_4h_to_h": "rowwise",
    "self_attn.q_norm mlp.gate self_attn.q_a_proj self_attn.kv_a_proj_with_mqa": "whole",
}


@pytest.mark.parametrize(("names", "style"), PLANS.items())
def test_what_is_cut_is_what_plans_of_transformers_cut(names: str, style: str) -> None:
    for name in names.split():
        assert role_of(f"model.layers.3.{name}.weight", 2).dim == {"colwise": -2, "rowwise": -1, "whole": None}[style]


def test_experts_may_be_stacked_and_transposed() -> None:
    # mixtral in transformers 5: packed_colwise; llama4: packed_rowwise.
    assert role_of("layers.0.mlp.experts.gate_up_proj", 3)[:4] == (-2, "", 2, "stacked")
    assert role_of("model.visual.blocks.0.mlp.down_proj.weight", 2).dim is None
    tensors: Outline = {"layers.0.mlp.experts.down_proj": ("BF16", (8, 2880, 64))}
    (size,) = fits_tensors(tensors, {"model_type": "gpt_oss"}, (64,)).sizes
    assert [(cut.size, cut.verdict) for cut in size.cuts] == [(2880, "fits")]


def attention(heads: int, kv: int, tp: int, head_dim: int = 128) -> SizeFit:
    tensors: Outline = {
        f"layers.{i}.self_attn.{name}_proj.weight": ("BF16", (count * head_dim, 64))
        for i in range(2)
        for name, count in (("q", heads), ("k", kv), ("v", kv))
    }
    return fits_tensors(tensors, {"num_attention_heads": heads, "num_key_value_heads": kv}, (tp,)).sizes[0]


@pytest.mark.parametrize(
    ("heads", "kv", "tp", "verdict", "why"),
    [
        (64, 8, 8, "fits", ""),
        (64, 8, 16, "fits", ""),  # Two ranks hold the same head.
        (40, 8, 16, "refused", "40 heads are not divisible by 16"),
        (48, 8, 12, "refused", "8 key-value heads are not divisible by 12"),
        (14, 2, 4, "refused", "14 heads are not divisible by 4"),
    ],
)
def test_heads_stay_whole(heads: int, kv: int, tp: int, verdict: str, why: str) -> None:
    size = attention(heads, kv, tp)
    assert (size.verdict, next((cut.why for cut in size.problems), "")) == (verdict, why)
    assert {cut.tensors for cut in size.cuts} == {2}


@pytest.mark.parametrize(
    ("size", "tp", "block"), [(10, 4, None), (640, 2, 128), (1856, 4, 128), (96, 5, 32), (12, 7, None)]
)
def test_each_way_on_of_a_size_that_does_not_fit_fits(size: int, tp: int, block: int | None) -> None:
    """Padded, and with each of the sizes that would fit."""

    def answer(rows: int, tp: int) -> SizeFit:
        tensors: Outline = {"mlp.up_proj.weight": ("F8_E4M3" if block else "BF16", (rows, 128))}
        if block:
            tensors["mlp.up_proj.weight_scale_inv"] = ("F32", (-(-rows // block), 1))
        said = {"quant_method": "fp8", "weight_block_size": [block, 128]}
        return fits_tensors(tensors, {"quantization_config": said} if block else {}, (tp,)).sizes[0]

    (cut,) = answer(size, tp).problems
    assert cut.padded is not None
    assert answer(cut.padded, tp).verdict == "fits"
    assert [answer(size, one).verdict for one in cut.sizes] == ["fits"] * len(cut.sizes)


def test_what_is_not_padded_says_no_size_and_no_shards() -> None:
    """Whole blocks need no padding, cut or not; and engines cut single elements evenly or not at all."""
    tensors: Outline = {
        "mlp.up_proj.weight": ("F8_E4M3", (256, 128)),
        "mlp.up_proj.weight_scale_inv": ("F32", (2, 1)),
        "other.mlp.up_proj.weight": ("BF16", (10, 64)),
    }
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    one, two, four = fits_tensors(tensors, config, (1, 2, 4)).sizes
    assert [cut.padded for size in (one, two) for cut in size.cuts] == [None] * 4
    # 10 in 4 are padded to 12, 256 in 4 to blocks of 128: 512; of those the last two ranks have none.
    assert {cut.size: (cut.padded, cut.ceil) for cut in four.problems} == {10: (12, ()), 256: (512, (128, 128, 0, 0))}


@pytest.mark.parametrize(
    ("rows", "tp", "why"),
    [
        (16 * 12, 4, ""),
        (16 * 12, 3, "16 heads of linear attention are not divisible by 3"),
    ],
)
def test_heads_of_linear_attention_stay_whole(rows: int, tp: int, why: str) -> None:
    tensors: Outline = {"layers.0.linear_attn.in_proj_qkvz.weight": ("BF16", (rows, 8))}
    (size,) = fits_tensors(tensors, {"num_attention_heads": 8, "linear_num_key_heads": 16}, (tp,)).sizes
    assert next((cut.why for cut in size.problems), "") == why


def test_rows_that_the_heads_do_not_make_are_unknown() -> None:
    tensors: Outline = {"layers.0.linear_attn.in_proj_qkvz.weight": ("BF16", (100, 8))}
    answer = fits_tensors(tensors, {"num_attention_heads": 8, "linear_num_key_heads": 16}, (1, 4))
    assert [size.verdict for size in answer.sizes] == ["fits", "unknown"]
    assert [one.why for one in answer.unknown] == ["linear_num_key_heads is 16, but its dim has 100 elements"]


def test_vocabularies_are_cut_along_their_rows() -> None:
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert role_of(name, 2).dim == -2
        assert role_of(name, 2).vocabulary


def test_tensors_without_elements_fit() -> None:
    assert attention(8, 8, 8, head_dim=0).verdict == "fits"


def test_heads_on_blocks() -> None:
    """Heads of 64 rows, of which two are a block: whole heads, but not whole blocks, on each of 7 ranks."""
    tensors: Outline = {"q_proj.weight": ("F8_E4M3", (14 * 64, 128)), "q_proj.weight_scale_inv": ("F32", (7, 1))}
    config = {
        "num_attention_heads": 14,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    answer = fits_tensors(tensors, config, (2, 7, 14))
    assert [size.verdict for size in answer.sizes] == ["refused", "fits", "shared"]
    assert answer.sizes[0].problems[0].why == "896 in 2 is 448 each, within blocks of 128 of weight_scale_inv"
    assert answer.sizes[0].problems[0].padded is None  # Heads cannot be padded.


def test_parts_of_a_fused_weight() -> None:
    config = {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }

    def verdicts(name: str, rows: int, *tp: int) -> list[str]:
        tensors: Outline = {
            f"{name}.weight": ("F8_E4M3", (rows, 128)),
            f"{name}.weight_scale_inv": ("F32", (-(-rows // 128), 1)),
        }
        return [size.verdict for size in fits_tensors(tensors, config, tp).sizes]

    assert verdicts("qkv_proj", 12 * 128, 1, 2, 4, 16) == ["fits", "fits", "fits", "refused"]
    # Keys begin within a block: heads of 48 rows.
    assert verdicts("qkv_proj", 12 * 56, 1, 2) == ["fits", "refused"]
    assert verdicts("gate_up_proj", 1280, 1, 5, 2) == ["fits", "fits", "padded"]
    assert verdicts("gate_up_proj", 384, 1, 2) == ["fits", "refused"]


@pytest.mark.parametrize("folder", folders(DATA), ids=lambda folder: folder.name)
def test_real_files(folder: Path) -> None:
    answer = fits(folder)
    config = json.loads((folder / "config.json").read_text())
    assert answer.method == config.get("quantization_config", {}).get("quant_method")
    assert answer.sizes[0].verdict == "fits"
    assert json.loads(json.dumps(answer.as_json()))["method"] == answer.method
    if folder.name == "gptq-actorder":
        assert any("g_idx is not in order" in cut.why for cut in answer.sizes[1].problems)
    if folder.name == "gptq":
        assert not any("g_idx" in cut.why for size in answer.sizes for cut in size.cuts)


def test_the_answer_is_what_the_layouts_of_components_allow() -> None:
    rng = random.Random(7)
    seen = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for _ in range(300):
            case = draw(rng)
            raw, config = written(case)
            name = "gate_proj" if case.dim == 0 else "down_proj"
            parts = {old.replace("m.", f"{name}.", 1): old for old in raw.tensors}
            if case.form == "gpt-oss":
                parts = {f"{name}_{old.rpartition('_')[2]}": old for old in raw.tensors}
            outline = {new: raw.tensors[old][:2] for new, old in parts.items()}

            def read(new: str, raw: Any = raw, parts: Any = parts) -> bytes:
                return raw.tensors[parts[new]][2]  # type: ignore[no-any-return]

            (size,) = fits_tensors(outline, {"quantization_config": config}, (case.devices,), read=read).sizes
            (logical,) = find_components(outline, {"quantization_config": config}, read).tensors.values()
            layout = sw.TensorLayout(("tp", None)[:: 1 - 2 * case.dim], sw.DeviceMesh((case.devices,), ("tp",)))
            found = "refused"
            for shared in (False, True):
                try:
                    layout.partition(logical.shape)
                    made = component_layouts(logical, layout, shared=shared)
                except LayoutError:
                    continue
                if not all(isinstance(one, sw.TensorLayout) for one in made.values()):
                    continue  # A rank's blocks are not those that are counted from its first element.
                found = ("fits", "shared")[shared]
                break
            verdict = size.verdict
            seen.add(verdict)
            assert (verdict if verdict in ("fits", "shared") else "refused") == found, case
    assert seen == {"fits", "shared", "padded", "refused"}


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    with refused(LayoutError, "tp is 0; it must be at least 1"):
        fits_tensors({}, {}, (0,))
    with refused(TypeError, "ep"):
        fits_tensors({}, {}, ep=("2",))  # type: ignore[arg-type]
    with refused(ParseError, "num_attention_heads is -4; it must be from 1 to 2147483647"):
        heads_of({"num_attention_heads": -4})
    with refused(ParseError, f"num_attention_heads is {2**31}"):
        heads_of({"num_attention_heads": 2**31})
    assert heads_of({"num_attention_heads": 2**31 - 1}).q == 2**31 - 1
    with refused(ParseError, "num_attention_heads must be an integer"):
        heads_of({"num_attention_heads": "many"})
    sw.save_checkpoint(tmp_path / "m", {"w": np.zeros((2, 2), "float32")})
    for text, message in (("{", "not JSON"), ("[]", "must be a JSON object")):
        (tmp_path / "m" / "config.json").write_text(text)
        with refused(ParseError, message):
            fits(tmp_path / "m")
    assert fits(tmp_path / "m", config={}).sizes[0].verdict == "fits"
    with pytest.raises(FileNotFoundError):
        fits(tmp_path / "gone")


def test_other_formats_are_read_too(tmp_path: Path) -> None:
    mesh = sw.DeviceMesh((2,), ("tp",))
    layouts = {"mlp.down_proj.weight": sw.TensorLayout((None, "tp"), mesh)}
    sw.save_checkpoint(
        tmp_path / "dcp", {"mlp.down_proj.weight": np.zeros((4, 12), "float16")}, layouts=layouts, to="dcp"
    )
    assert [size.verdict for size in fits(tmp_path / "dcp", (2, 4, 8)).sizes] == ["fits", "fits", "padded"]


def known(tensors: Outline, config: dict[str, Any], *tp: int) -> dict[int, str]:
    return {size.tp: size.verdict for size in fits_tensors(tensors, config, tp).sizes}


#: Names of models for which nothing here is known: of the configurations of the models, the sizes that matter.
STRANGERS: dict[str, tuple[Outline, dict[str, Any], tuple[int, ...]]] = {
    "Qwen 1: w2 is the gate, and c_attn a linear layer": (
        {
            "transformer.h.0.attn.c_attn.weight": ("BF16", (24576, 8192)),
            "transformer.h.0.attn.c_proj.weight": ("BF16", (8192, 8192)),
            "transformer.h.0.mlp.w1.weight": ("BF16", (24576, 8192)),
            "transformer.h.0.mlp.w2.weight": ("BF16", (24576, 8192)),
            "transformer.h.0.mlp.c_proj.weight": ("BF16", (8192, 24576)),
        },
        {"model_type": "qwen", "num_attention_heads": 64, "hidden_size": 8192},
        (48, 8),
    ),
    "Molmo": (
        {
            "model.transformer.blocks.0.att_proj.weight": ("BF16", (4608, 3584)),
            "model.transformer.blocks.0.attn_out.weight": ("BF16", (3584, 3584)),
            "model.transformer.blocks.0.ff_proj.weight": ("BF16", (37888, 3584)),
        },
        {"model_type": "molmo", "num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584},
        (8, 4),
    ),
    "GPTBigCode, one key-value head": (
        {"transformer.h.0.attn.c_attn.weight": ("BF16", (6400, 6144))},
        {"model_type": "gpt_bigcode", "n_head": 48, "n_embd": 6144, "multi_query": True},
        (9, 2),
    ),
    "BERT: intermediate.dense is no output of attention": (
        {"encoder.layer.0.intermediate.dense.weight": ("F32", (3072, 768))},
        {"num_attention_heads": 12, "hidden_size": 768},
        (2,),
    ),
    "Mamba: out_proj is no output of attention": (
        {"backbone.layers.0.mixer.out_proj.weight": ("BF16", (2560, 5120))},
        {"num_attention_heads": 32, "hidden_size": 2560},
        (2,),
    ),
    "DBRX: experts in one matrix": (
        {"transformer.blocks.0.ffn.experts.mlp.w1": ("BF16", (16 * 10752, 6144))},
        {"num_attention_heads": 48, "hidden_size": 6144},
        (2,),
    ),
    "DBRX's experts, flattened": (
        {"transformer.blocks.0.ffn.experts.mlp.w1": ("BF16", (16384, 1024))},
        {"num_attention_heads": 16, "hidden_size": 1024},
        (2,),
    ),
    "heads of another number than the file has": (
        {"layers.0.self_attn.k_proj.weight": ("BF16", (2048, 4096))},
        {"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256},
        (16, 2),
    ),
    "no configuration": ({"layers.0.self_attn.q_proj.weight": ("BF16", (4096, 4096))}, {}, (64, 2)),
    "a vision tower alone": (
        {"vision_model.encoder.layers.0.self_attn.q_proj.weight": ("F32", (1152, 1152))},
        {"num_attention_heads": 16},
        (2,),
    ),
    "a vision tower of another name": (
        {"tower.layers.0.self_attn.q_proj.weight": ("F32", (1152, 1152))},
        {"num_attention_heads": 32, "head_dim": 128, "hidden_size": 4096},
        (32, 2),
    ),
    "Idefics 2: a resampler of 16 heads between two networks": (
        {
            "model.text_model.layers.0.self_attn.q_proj.weight": ("BF16", (4096, 4096)),
            "model.connector.perceiver_resampler.layers.0.self_attn.q_proj.weight": ("BF16", (1536, 4096)),
        },
        {"model_type": "idefics2", "text_config": {"model_type": "mistral", "hidden_size": 4096}},
        (32, 2),
    ),
    "integers without a method": ({"layers.0.mlp.down_proj.weight": ("I8", (4096, 4096))}, {}, (2,)),
    "FP8 without scales": ({"layers.0.mlp.down_proj.weight": ("F8_E4M3", (4096, 4096))}, {}, (2,)),
    "flat values of a column, beside weights that are known": (
        {"layers.0.mlp.down_proj.weight": ("BF16", (64, 64)), "layers.0.mlp.up_proj.W_q": ("U8", (2048, 1))},
        {},
        (2,),
    ),
    "values of one dim, beside weights that are known": (
        {"layers.0.mlp.down_proj.weight": ("BF16", (64, 64)), "layers.0.mlp.up_proj.packed": ("I32", (512,))},
        {},
        (2,),
    ),
    "a low-rank adapter": ({"layers.0.self_attn.q_proj.lora_A.weight": ("BF16", (16, 4096))}, {}, (2,)),
    "no tensors": ({}, {"num_attention_heads": 32}, (2,)),
    "stacked experts of equal dims over blocks of rows": (
        {"mlp.experts.w1": ("F8_E4M3", (4, 256, 256)), "mlp.experts.w1_scale_inv": ("F32", (4, 1, 2))},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [256, 128]}},
        (2,),
    ),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_what_is_not_recognised_is_unknown(name: str) -> None:
    tensors, config, sizes = STRANGERS[name]
    answer = fits_tensors(tensors, config, (1, *sizes))
    assert [size.verdict for size in answer.sizes] == ["fits", *["unknown"] * len(sizes)]
    assert not answer.is_known
    assert answer.sizes[0].rests_on == ("one rank, which has all tensors whole",)
    assert answer.sizes[1].rests_on == ()


@pytest.mark.parametrize(
    "said", [{"model_type": "unheard_of"}, {"model_type": "a", "text_config": {"model_type": "b"}}]
)
def test_a_type_of_model_that_is_not_known_is_named(said: dict[str, Any]) -> None:
    """A type may have the names of Llama and mean others, as DiffLlama, which pairs heads that are far apart."""
    tensors: Outline = {"layers.0.self_attn.q_proj.weight": ("BF16", (4096, 4096))}
    answer = fits_tensors(tensors, {"num_attention_heads": 32, **said}, (1, 2))
    assert [size.verdict for size in answer.sizes] == ["fits", "unknown"]
    own = said.get("text_config", said)["model_type"]
    assert [one.why for one in answer.unknown] == [f"the meaning of its name is not known for the model_type {own!r}"]


def test_types_whose_shapes_are_known_are_known() -> None:
    assert _FAMILIES.keys() <= TYPES


def test_known_types_are_cut_as_transformers_cuts_them() -> None:
    """The tensor-parallel plans of transformers, of all types that have one, cut the same dims, or fewer."""
    transformers = pytest.importorskip("transformers")
    compared = 0
    for name in sorted(TYPES & set(transformers.CONFIG_MAPPING)):
        text = transformers.CONFIG_MAPPING[name]().get_text_config()
        for key, style in (type(text).base_model_tp_plan or {}).items():
            rank = 3 if key.endswith(("experts.gate_up_proj", "experts.down_proj")) else 2
            role = role_of(f"model.{key.replace('*', '0')}.weight", rank, name)
            dims = {"colwise": (-2,), "packed_colwise": (-2,), "rowwise": (-1,), "packed_rowwise": (-1,)}.get(style)
            if dims is None or role.dim is None or role.vocabulary:
                continue
            # Experts that are stored transposed are cut in the other dim.
            stored = (-3 - role.dim,) if rank == 3 and name in ("llama4_text", "aria_text", "gpt_oss") else (role.dim,)
            assert stored == dims, (name, key, style)
            compared += 1
    assert compared > 300


def test_a_refusal_stands_whatever_is_not_recognised() -> None:
    tensors: Outline = {
        "layers.0.self_attn.q_proj.weight": ("BF16", (4096, 4096)),
        "layers.0.odd.weight": ("BF16", (64, 64)),
    }
    assert known(tensors, {"num_attention_heads": 32}, 3, 4) == {3: "refused", 4: "unknown"}


def test_key_value_heads_that_are_not_stated_are_those_of_the_shape() -> None:
    """Falcon-7B has one for 71 heads of 64, which `multi_query` says; others have as many as the rows make."""
    falcon: Outline = {"transformer.h.0.self_attention.query_key_value.weight": ("BF16", (4672, 4544))}
    config = {"num_attention_heads": 71, "hidden_size": 4544, "multi_query": True}
    assert known(falcon, config, 2, 71) == {2: "refused", 71: "fits"}
    rows: Outline = {"layers.0.self_attn.k_proj.weight": ("BF16", (256, 4096))}
    # Two heads of 128: eight ranks have one of them each, three cannot.
    config = {"num_attention_heads": 32, "hidden_size": 4096}
    assert known(rows, config, 8, 3) == {8: "fits", 3: "refused"}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("said", [{"hidden_size": 2048}, {}], ids=["hidden_size", "shapes"])
def test_which_dim_of_stacked_experts_is_cut(transposed: bool, said: dict[str, int]) -> None:
    """768 features in 2, 3 and 6 are whole blocks of 128, in 4 they are 192; whichever way the experts are stored."""
    shapes = {"gate_up_proj": (2 * 768, 2048), "down_proj": (2048, 768)}
    tensors: Outline = {}
    for name, (out, columns) in shapes.items():
        pair = (columns, out) if transposed else (out, columns)
        tensors[f"layers.0.mlp.experts.{name}"] = ("F8_E4M3", (8, *pair))
        tensors[f"layers.0.mlp.experts.{name}_scale_inv"] = ("F32", (8, *(size // 128 for size in pair)))
    config = {**said, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    assert known(tensors, config, 2, 3, 4, 6) == {2: "fits", 3: "fits", 4: "padded", 6: "fits"}
    if not said:  # One of the two says nothing of the dim.
        del tensors["layers.0.mlp.experts.down_proj"], tensors["layers.0.mlp.experts.down_proj_scale_inv"]
        assert known(tensors, config, 2) == {2: "unknown"}


def test_llama4_and_gpt_oss_store_experts_transposed() -> None:
    for config in ({"model_type": "gpt_oss"}, {"text_config": {"model_type": "llama4_text", "hidden_size": 64}}):
        tensors: Outline = {"layers.0.feed_forward.experts.down_proj": ("BF16", (8, 96, 64))}
        (cut,) = fits_tensors(tensors, config, (2,)).sizes[0].cuts
        assert (cut.dim, cut.size) == (1, 96)


#: A fused weight of MiMo-V2.5: 64 heads of queries and 8 of keys of 192, 8 of values of 128; 8 groups of 1,856 rows.
MIMO: dict[str, Any] = {
    **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 192, "v_head_dim": 128, "hidden_size": 4096},
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def test_no_padding_cuts_a_group_of_a_fused_weight() -> None:
    """1,856 rows are 14.5 blocks: one group is no whole blocks, two are, and so are 64 heads, 8 and 8 in 4 parts."""
    tensors: Outline = {
        "layers.0.self_attn.qkv_proj.weight": ("F8_E4M3", (14848, 4096)),
        "layers.0.self_attn.qkv_proj.weight_scale_inv": ("F32", (116, 32)),
    }
    answer = fits_tensors(tensors, MIMO, (1, 2, 4, 8))
    assert [size.verdict for size in answer.sizes] == ["fits", "fits", "fits", "refused"]
    assert {cut.padded for size in answer.sizes for cut in size.cuts} == {None}
    # By rows alone nothing is known of the groups.
    assert known(tensors, {**MIMO, "head_dim": None, "v_head_dim": None}, 8) == {8: "unknown"}


def test_a_fused_weight_whose_order_matters_is_unknown() -> None:
    """Queries of 4 heads of 64 and 2 of keys and values: in 2, sections are 128, 64 and 64 rows; a group is 256."""
    tensors: Outline = {
        "layers.0.self_attn.qkv_proj.weight": ("F8_E4M3", (512, 128)),
        "layers.0.self_attn.qkv_proj.weight_scale_inv": ("F32", (4, 1)),
    }
    config = {**MIMO, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "v_head_dim": None}
    config["hidden_size"] = 128
    answer = fits_tensors(tensors, config, (2,))
    assert answer.sizes[0].verdict == "unknown"
    assert "it is not known which of the two holds" in answer.sizes[0].problems[0].why
    # Phi-3 has one after the other; the two devices share the one block of the keys.
    assert known(tensors, {**config, "model_type": "phi3"}, 2) == {2: "shared"}


def test_what_a_verdict_rests_on() -> None:
    answer = fits_tensors(
        {
            "layers.0.self_attn.q_proj.weight": ("BF16", (4096, 4096)),
            "visual.blocks.0.mlp.fc1.weight": ("BF16", (8, 8)),
        },
        {"model_type": "llama", "num_attention_heads": 32},
        (2, 3),
    )
    for size in answer.sizes:
        assert size.rests_on == ("the name q_proj; num_attention_heads = 32",)
    assert answer.elsewhere == ("visual.blocks.*.mlp.fc1.weight",)
    assert answer.rests_on == (
        "names as in Hugging Face's checkpoints: q_proj",
        "num_attention_heads = 32",
        "dtypes: none is that of quantized weights",
        "model_type = llama",
    )
    assert answer.as_json()["sizes"][0]["rests_on"] == ["the name q_proj; num_attention_heads = 32"]
    scaled: Outline = {
        "mlp.up_proj.weight": ("F8_E4M3", (256, 128)),
        "mlp.up_proj.weight_scale_inv": ("F32", (2, 1)),
    }
    fp8 = {"quantization_config": {"quant_method": "fp8"}}
    for config, said in (({}, "names of scales, as of fp8"), (fp8, "quant_method = fp8")):
        assert fits_tensors(scaled, config, (2,)).rests_on == (
            "names as in Hugging Face's checkpoints: up_proj",
            said,
        )


def test_blocks_are_not_shared_where_the_last_ranks_have_one_alone() -> None:
    """By hand: of 192 columns in 3, ranks 0 and 1 share the first block of 128, and rank 2 has the rest alone."""
    stored = {
        "mlp.down_proj.weight": ("F8_E4M3", (256, 192)),
        "mlp.down_proj.weight_scale_inv": ("F32", (2, 2)),
    }
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (size,) = fits_tensors(stored, config, (3,)).sizes
    assert (size.verdict, [cut.padded for cut in size.cuts]) == ("padded", [384])
