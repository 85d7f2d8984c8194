"""Rewrites of quantized checkpoints carry scales along; what a fused weight stands for is what its parts stood for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import shardwise as sw
from shardwise.quantized import LogicalTensor, find_components
from shardwise.rules.shipped import example_rules

from ..checks import refused
from ..oracle.quantized import Raw, folders, read_raw, values_of

#: Expected of many of these tests, which are about something else.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*appl(y|ies) to no name:shardwise.ShardwiseWarning"),
    pytest.mark.filterwarnings("ignore:.*dropped by the rules:shardwise.ShardwiseWarning"),
]

DATA = Path(__file__).parents[1] / "data" / "quantized"
#: Those of Qwen3; the others are written below.
QWEN = [folder for folder in folders(DATA) if folder.name not in ("st-low-bit", "fp8-block-ragged", "mxfp4-gptoss")]
#: What does not fit two ranks: 48, 80, 74 and 72 columns are no whole groups of 32 or 16, or words of 8.
ONE_RANK = {
    "gptq": "within a block of 32 of scales",
    "gptq-actorder": "its g_idx is not in order (desc_act)",
    "int4-ct-asym": "is cut at 80, within a block of 32 of weight_scale",
    "int4-ct-ragged": "is cut at 74, within 8 values packed together of weight_packed",
    "nvfp4-ct": "is cut at 72, within a block of 16 of weight_scale",
    "nvfp4-modelopt": "is cut at 72, within a block of 16 of weight_scale",
}
HEADS = "model.layers.0.self_attn."
MLP = "model.layers.0.mlp."

Array = npt.NDArray[Any]


def family(name: str, folder: Path, mesh: sw.DeviceMesh | None = None) -> Any:
    file = example_rules()[name]
    config = folder / "config.json"
    if mesh is None:
        return sw.Rewrites.from_toml(file, config=config)
    return sw.LayoutMap.from_toml(file, mesh, config=config)


def dequantized(folder: Path) -> dict[str, Array]:
    """Each quantized weight as floats; of a fused one with a scale for each part, a dim of the parts comes first."""
    raw = read_raw(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    found = find_components(raw.outline(), config, lambda name: raw.tensors[name][2])
    answer = {}
    for name, logical in found.tensors.items():
        arrays = {one.name: raw.array(one.name) for one in logical.components}
        parts = max((array.shape[0] for one in numbers(logical) if (array := arrays[one]).ndim), default=1)
        each = []
        for part in range(parts):
            own = {
                one: array[part] if one in numbers(logical) and array.shape == (parts,) else array
                for one, array in arrays.items()
            }
            each.append(values_of(logical, config["quantization_config"], found, own))
        answer[name] = np.stack(each)
    return answer


def numbers(logical: LogicalTensor) -> list[str]:
    """The components that are one number, or one for each part."""
    return [one.name for one in logical.components if len(one.shape) < 2 and one.name.endswith(("scale", "scale_2"))]


def rows_of(values: Array, part: int, rows: Array) -> Array:
    own: Array = values[part if len(values) > 1 else 0][rows]
    return own


@pytest.mark.parametrize("rules", ["vllm/qwen3", "megatron/qwen3", "hf/qwen3"])
@pytest.mark.parametrize("folder", QWEN, ids=lambda folder: folder.name)
def test_what_a_fused_weight_stands_for(folder: Path, rules: str, tmp_path: Path) -> None:
    fused, again = tmp_path / "fused", tmp_path / "again"
    rewrites = family(rules, folder)
    if folder.name.startswith("bnb") and not rules.startswith("hf"):
        with refused(sw.LayoutError, "is stored flat, with its shape in its quant_state"):
            sw.reshard_checkpoint(folder, fused, rewrites=rewrites)
        return
    sw.reshard_checkpoint(folder, fused, rewrites=rewrites, to="hf", sync=False)
    before, after = dequantized(folder), dequantized(fused)
    if rules.startswith("hf"):
        assert before.keys() == after.keys()
    else:
        config = json.loads((folder / "config.json").read_text())
        qkv = "model.layers.0.self_attn.qkv_proj.weight"
        gate_up = f"{MLP}gate_up_proj.weight"
        if rules.startswith("megatron"):
            qkv, gate_up = (
                f"decoder.layers.0.{name}.weight" for name in ("self_attention.linear_qkv", "mlp.linear_fc1")
            )
        sizes = [len(before[f"{HEADS}{part}_proj.weight"][0]) for part in "qkv"]
        order = np.repeat(np.arange(3), sizes)
        if rules.startswith("megatron"):  # The heads of a group, one group after the other.
            groups = config["num_key_value_heads"]
            order = np.tile(np.repeat(np.arange(3), [size // groups for size in sizes]), groups)
        for number, part in enumerate("qkv"):
            rows = np.flatnonzero(order == number)
            assert np.array_equal(rows_of(after[qkv], number, rows), before[f"{HEADS}{part}_proj.weight"][0])
        half = len(before[f"{MLP}gate_proj.weight"][0])
        for number, part in enumerate(("gate", "up")):
            rows = np.arange(half) + number * half
            assert np.array_equal(rows_of(after[gate_up], number, rows), before[f"{MLP}{part}_proj.weight"][0])
    sw.reshard_checkpoint(fused, again, rewrites=rewrites.inverse(), to="hf", sync=False)
    theirs, ours = (read_raw(place / "model.safetensors").tensors for place in (folder, again))
    assert theirs.keys() == ours.keys()
    for name, (dtype, shape, data) in theirs.items():
        # A scale without dims comes back with one.
        assert (dtype, data) == (ours[name][0], ours[name][2]), name
        assert shape == ours[name][1] or (shape, ours[name][1]) == ((), (1,)), name


@pytest.mark.parametrize("folder", QWEN, ids=lambda folder: folder.name)
def test_cut_as_vllm_cuts_and_merged_again(folder: Path, tmp_path: Path) -> None:
    if folder.name.startswith("bnb"):
        return
    layouts = family("vllm/qwen3", folder, sw.DeviceMesh((2,), ("tp",)))
    rewrites = family("vllm/qwen3", folder)
    sw.reshard_checkpoint(folder, tmp_path / "whole", rewrites=rewrites, to="hf", sync=False)
    if folder.name in ONE_RANK:
        for source, done in ((folder, rewrites), (tmp_path / "whole", None)):
            with refused(sw.LayoutError, ONE_RANK[folder.name]):
                sw.reshard_checkpoint(source, tmp_path / "cut", layouts, rewrites=done, to="sharded")
        return
    sw.reshard_checkpoint(folder, tmp_path / "cut", layouts, rewrites=rewrites, to="sharded", sync=False)
    assert sw.diff_checkpoints(tmp_path / "whole", tmp_path / "cut") == []
    sw.reshard_checkpoint(tmp_path / "whole", tmp_path / "recut", layouts, to="sharded", sync=False)
    with sw.open_checkpoint(tmp_path / "cut") as one, sw.open_checkpoint(tmp_path / "recut") as other:
        for name in one:
            assert one[name].boxes.tolist() == other[name].boxes.tolist(), name


def folder_of(path: Path, tensors: dict[str, tuple[str, Array]], config: dict[str, Any]) -> Path:
    path.mkdir()
    header, data = {}, b""
    for name, (dtype, array) in tensors.items():
        begin = len(data)
        data += array.tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    (path / "config.json").write_text(json.dumps(config))
    return path


def random(shape: tuple[int, ...], seed: int, dtype: str = "|u1") -> Array:
    generator = np.random.default_rng(seed)
    return np.frombuffer(generator.bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype).reshape(shape)


def rewrite(*entries: dict[str, Any]) -> sw.Rewrites:
    return sw.Rewrites(entries)


FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 4]}}


def fp8(name: str, rows: int, columns: int, seed: int) -> dict[str, tuple[str, Array]]:
    """A weight in blocks of 2 x 4."""
    return {
        f"{name}.weight": ("F8_E4M3", random((rows, columns), seed)),
        f"{name}.weight_scale_inv": ("F32", random((-(-rows // 2), -(-columns // 4)), seed + 1, "<f4")),
    }


def stored(path: Path) -> Raw:
    return read_raw(path / "model.safetensors")


def test_stacked_experts_stack_their_scales(tmp_path: Path) -> None:
    tensors: dict[str, tuple[str, Array]] = {}
    for expert in range(3):
        tensors |= fp8(f"l.experts.{expert}.gate", 4, 8, 10 * expert)
        tensors |= fp8(f"l.experts.{expert}.up", 4, 8, 10 * expert + 5)
    source = folder_of(tmp_path / "source", tensors, FP8)
    entry = {
        "from": "l.experts.{e}.{gate,up}.weight",
        "to": {"name": "l.experts.w13_weight", "stack": "e", "packed": "gate:(n) + up:(n)"},
    }
    sw.reshard_checkpoint(source, tmp_path / "made", rewrites=rewrite(entry), to="hf", sync=False)
    made = stored(tmp_path / "made")
    for tail in ("weight", "weight_scale_inv"):
        expected = np.stack(
            [
                np.concatenate([tensors[f"l.experts.{expert}.{part}.{tail}"][1] for part in ("gate", "up")])
                for expert in range(3)
            ]
        )
        assert made.tensors[f"l.experts.w13_{tail}"][2] == expected.tobytes()
        assert made.tensors[f"l.experts.w13_{tail}"][1] == expected.shape
    # Cut for two ranks of experts: each has the blocks of its rows of gate and up.
    layouts = sw.LayoutMap(sw.DeviceMesh((2,), ("tp",)))
    layouts["w13_weight$"] = (None, sw.packed.parse("gate:(n@tp) + up:(n@tp)"), None)
    sw.reshard_checkpoint(source, tmp_path / "cut", layouts, rewrites=rewrite(entry), to="sharded", sync=False)
    with sw.open_checkpoint(tmp_path / "cut") as checkpoint:
        boxes = checkpoint["l.experts.w13_weight_scale_inv"].boxes[:, 1].tolist()
        assert sorted(boxes) == [[0, 1], [1, 2], [2, 3], [3, 4]]
    sw.reshard_checkpoint(tmp_path / "made", tmp_path / "back", rewrites=rewrite(entry).inverse(), to="hf", sync=False)
    assert stored(tmp_path / "back").tensors == stored(source).tensors


def test_a_transposition_transposes_blocks(tmp_path: Path) -> None:
    tensors = fp8("l", 4, 8, 1)
    source = folder_of(tmp_path / "source", tensors, FP8)
    entry = {"from": "l.weight", "to": {"name": "t.weight", "transpose": True}}
    sw.reshard_checkpoint(source, tmp_path / "made", rewrites=rewrite(entry), to="safetensors", sync=False)
    made = read_raw(tmp_path / "made")
    for tail in ("weight", "weight_scale_inv"):
        expected = np.ascontiguousarray(tensors[f"l.{tail}"][1].T)
        assert made.tensors[f"t.{tail}"][1:] == (expected.shape, expected.tobytes())


def test_heads_are_split_and_permuted_in_whole_blocks(tmp_path: Path) -> None:
    tensors = fp8("l", 12, 8, 1)
    source = folder_of(tmp_path / "source", tensors, FP8)
    entry = {"from": "l.weight", "to": {"name": "t.weight", "dims": "heads columns d=4 -> (heads d) columns"}}
    sw.reshard_checkpoint(source, tmp_path / "made", rewrites=rewrite(entry), to="safetensors", sync=False)
    made = read_raw(tmp_path / "made")
    for tail, d in (("weight", 4), ("weight_scale_inv", 2)):
        array = tensors[f"l.{tail}"][1]
        expected = np.ascontiguousarray(array.reshape(3, d, array.shape[1]).transpose(0, 2, 1))
        assert made.tensors[f"t.{tail}"][1:] == (expected.shape, expected.tobytes())
    # A block of two rows is not in one head of three, and not of rows of two heads.
    for dims in ("heads columns d=3 -> (heads d) columns", "heads columns d=4 -> (d heads) columns"):
        entry = {"from": "l.weight", "to": {"name": "t.weight", "dims": dims}}
        with refused(sw.LayoutError, "'l.weight'", "its weight_scale_inv has blocks"):
            sw.reshard_checkpoint(source, tmp_path / "refused", rewrites=rewrite(entry), to="safetensors")


def test_parts_that_would_share_a_block_are_refused(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source", {**fp8("q", 3, 8, 1), **fp8("k", 4, 8, 5)}, FP8)
    entry = {"from": "{q,k}.weight", "to": {"name": "qk.weight", "packed": "q:(3) + k:(4)"}}
    with refused(
        sw.LayoutError, "'q.weight' is in blocks of 2 in dim 0 (weight_scale_inv)", "parts would share a block"
    ):
        sw.reshard_checkpoint(source, tmp_path / "made", rewrites=rewrite(entry))
    # The last one of all may be short.
    entry = {"from": "{q,k}.weight", "to": {"name": "qk.weight", "packed": "k:(4) + q:(3)"}}
    sw.reshard_checkpoint(source, tmp_path / "made", rewrites=rewrite(entry), to="hf", sync=False)
    scales = [stored(source).array(f"{part}.weight_scale_inv") for part in "kq"]
    assert stored(tmp_path / "made").array("qk.weight_scale_inv").tobytes() == np.concatenate(scales).tobytes()


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_scale_for_each_part_is_kept_for_each_part(shape: tuple[int, ...], tmp_path: Path) -> None:
    """As vLLM has it: `weight_scale` of `qkv_proj` has three elements, in the order q, k, v."""
    tensors: dict[str, tuple[str, Array]] = {}
    for number, part in enumerate("qkv"):
        tensors[f"{part}_proj.weight"] = ("F8_E4M3", random((2, 4), number))
        for tail in ("weight_scale", "input_scale"):
            tensors[f"{part}_proj.{tail}"] = ("F32", np.full(shape, number + 0.5, "<f4"))
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}
    source = folder_of(tmp_path / "source", tensors, config)
    entry = {"from": "{q,k,v}_proj.weight", "to": {"name": "qkv_proj.weight", "packed": "q:(n) + k:(n) + v:(n)"}}
    sw.reshard_checkpoint(source, tmp_path / "made", rewrites=rewrite(entry), to="hf", sync=False)
    with sw.open_checkpoint(tmp_path / "made") as checkpoint:
        assert checkpoint.read("qkv_proj.weight_scale").tolist() == [0.5, 1.5, 2.5]
        assert checkpoint.read("qkv_proj.input_scale").tolist() == [0.5, 1.5, 2.5]
    sw.reshard_checkpoint(tmp_path / "made", tmp_path / "back", rewrites=rewrite(entry).inverse(), to="hf", sync=False)
    with sw.open_checkpoint(tmp_path / "back") as checkpoint:
        assert [checkpoint.read(f"{part}_proj.weight_scale").tolist() for part in "qkv"] == [[0.5], [1.5], [2.5]]


def test_one_scale_for_a_fused_weight_is_that_of_each_part(tmp_path: Path) -> None:
    tensors = {
        "qkv_proj.weight": ("F8_E4M3", random((6, 4), 3)),
        "qkv_proj.weight_scale": ("F32", np.array(0.25, "<f4")),
    }
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}
    source = folder_of(tmp_path / "source", tensors, config)
    entry = {"from": {"name": "qkv_proj.weight", "packed": "q:(n) + k:(n) + v:(n)"}, "to": "{q,k,v}_proj.weight"}
    sw.reshard_checkpoint(source, tmp_path / "made", rewrites=rewrite(entry), to="hf", sync=False)
    with sw.open_checkpoint(tmp_path / "made") as checkpoint:
        assert [checkpoint.read(f"{part}_proj.weight_scale").tolist() for part in "qkv"] == [0.25] * 3


def test_a_fused_weight_has_one_order_of_groups(tmp_path: Path) -> None:
    folder = DATA / "gptq-actorder"
    raw = read_raw(folder / "model.safetensors")
    tensors = {name: (dtype, raw.array(name)) for name, (dtype, _, _) in raw.tensors.items()}
    other = f"{MLP}up_proj.g_idx"
    assert not np.array_equal(np.roll(raw.array(other), 1), raw.array(other))
    tensors[other] = ("I32", np.roll(raw.array(other), 1))
    source = folder_of(tmp_path / "source", tensors, json.loads((folder / "config.json").read_text()))
    with refused(sw.LayoutError, "gate_proj.weight", "have groups in different orders (g_idx)"):
        sw.reshard_checkpoint(source, tmp_path / "made", rewrites=family("vllm/qwen3", folder), replicas="first")


def test_weights_in_different_forms_are_not_fused(tmp_path: Path) -> None:
    tensors = fp8("q", 4, 8, 1) | {"k.weight": ("BF16", random((4, 8), 9, "<u2"))}
    source = folder_of(tmp_path / "source", tensors, FP8)
    entry = {"from": "{q,k}.weight", "to": {"name": "qk.weight", "packed": "q:(n) + k:(n)"}}
    with refused(sw.LayoutError, "'q.weight' and 'k.weight' cannot be packed", "the other not quantized"):
        sw.reshard_checkpoint(source, tmp_path / "made", rewrites=rewrite(entry))
    stack = {"from": "{p}.weight", "to": {"name": "all.weight", "stack": "p"}}
    with refused(sw.LayoutError):
        sw.reshard_checkpoint(source, tmp_path / "made", rewrites=rewrite(stack))


def test_components_can_be_rewritten_one_by_one(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source", fp8("q", 4, 8, 1), FP8)
    entries = [{"from": f"q.{tail}", "to": f"p.{tail}"} for tail in ("weight", "weight_scale_inv")]
    sw.reshard_checkpoint(source, tmp_path / "made", rewrites=rewrite(*entries), to="hf", sync=False)
    assert {name.replace("p.", "q.") for name in stored(tmp_path / "made").tensors} == stored(source).tensors.keys()
    transposed = {"from": "q.weight_scale_inv", "to": {"name": "q.weight_scale_inv", "transpose": True}}
    with refused(sw.ParseError, "q.weight_scale_inv", "in blocks of 2 x 4 it must be (2, 4)"):
        wide = folder_of(tmp_path / "wide", fp8("q", 4, 16, 1), FP8)
        sw.reshard_checkpoint(wide, tmp_path / "wrong", rewrites=rewrite(transposed))


def test_drop_may_leave_out_what_is_about_inputs_only(tmp_path: Path) -> None:
    folder = DATA / "fp8-tensor-modelopt"
    entry = {"from": f"{MLP}down_proj.weight", "to": "d.weight"}
    without = sw.Rewrites([entry], drop=["{rest*}.input_scale"])
    sw.reshard_checkpoint(folder, tmp_path / "made", rewrites=without, to="hf", sync=False)
    names = stored(tmp_path / "made").tensors.keys()
    assert {"d.weight", "d.weight_scale"} < names
    assert not any(name.endswith("input_scale") for name in names)
    with refused(sw.LayoutError, "drop leaves out its weight_scale"):
        without = sw.Rewrites([entry], drop=["{rest*}.weight_scale"])
        sw.reshard_checkpoint(folder, tmp_path / "wrong", rewrites=without)


def test_a_padded_weight_has_scales_of_zero(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source", fp8("head", 5, 8, 1), FP8)
    entry = {"from": "head.weight", "to": {"name": "head.weight", "pad_to": 8}, "size": 5}
    sw.reshard_checkpoint(source, tmp_path / "made", rewrites=rewrite(entry), to="hf", sync=False)
    before, after = stored(source), stored(tmp_path / "made")
    assert after.array("head.weight_scale_inv").shape == (4, 2)
    assert np.array_equal(after.array("head.weight_scale_inv")[:3], before.array("head.weight_scale_inv"))
    assert not after.array("head.weight_scale_inv")[3:].any()
    assert not after.array("head.weight")[5:].any()
    sw.reshard_checkpoint(tmp_path / "made", tmp_path / "back", rewrites=rewrite(entry).inverse(), to="hf", sync=False)
    assert stored(tmp_path / "back").tensors == before.tensors


def test_the_shape_of_a_fused_weight_is_stated_anew(tmp_path: Path) -> None:
    folder = DATA / "int4-ct-ragged"
    sw.reshard_checkpoint(folder, tmp_path / "made", rewrites=family("vllm/qwen3", folder), to="hf", sync=False)
    with sw.open_checkpoint(tmp_path / "made") as checkpoint:
        # As in the folder's expected.json: 148 x 100 each.
        assert checkpoint.read(f"{MLP}gate_up_proj.weight_shape").tolist() == [296, 100]


def test_mxfp4_is_not_transposed_as_its_bfloat16_form_is(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    shutil.copytree(DATA / "mxfp4-gptoss", folder)
    with refused(sw.LayoutError, "its dims cannot be put in another order"):
        sw.reshard_checkpoint(folder, tmp_path / "made", rewrites=family("vllm/gpt-oss", folder))


@pytest.mark.parametrize("name", ["awq", "fp8-channel-ct", "fp8-tensor-modelopt"])
def test_a_file_for_each_rank_of_an_engine_and_back(name: str, tmp_path: Path) -> None:
    """What is in a rank's file is a quantized model of its own: its rows of each part, dequantized."""
    folder, ranks = DATA / name, tmp_path / "ranks"
    layouts = family("vllm/qwen3", folder, sw.DeviceMesh((2,), ("tp",)))
    rewrites = family("vllm/qwen3", folder)
    sw.reshard_checkpoint(folder, ranks, layouts, rewrites=rewrites, to="ranks", sync=False)
    config, before = json.loads((folder / "config.json").read_text()), dequantized(folder)
    for rank, file in enumerate(sorted(ranks.glob("rank-*.safetensors"))):
        alone = tmp_path / f"{rank}"
        alone.mkdir()
        shutil.copy(file, alone / "model.safetensors")
        shutil.copy(folder / "config.json", alone)
        own = dequantized(alone)
        for fused, parts in (("gate_up", ("gate", "up")), ("down", ("down",))):
            at, values = 0, own[f"{MLP}{fused}_proj.weight"]
            for number, part in enumerate(parts):
                whole = before[f"{MLP}{part}_proj.weight"][0]
                whole = np.split(whole, 2, 1 if part == "down" else 0)[rank]
                assert np.array_equal(rows_of(values, number, np.arange(len(whole)) + at), whole), (rank, part)
                at += len(whole)
        heads, groups = config["num_attention_heads"] // 2, max(config["num_key_value_heads"] // 2, 1)
        d, at, values = config["head_dim"], 0, own[f"{HEADS}qkv_proj.weight"]
        for number, (part, count) in enumerate((("q", heads), ("k", groups), ("v", groups))):
            first = rank * count * d if part == "q" or config["num_key_value_heads"] > 1 else 0
            whole = before[f"{HEADS}{part}_proj.weight"][0][first : first + count * d]
            assert np.array_equal(rows_of(values, number, np.arange(len(whole)) + at), whole), (rank, part)
            at += len(whole)
    sw.reshard_checkpoint(ranks, tmp_path / "back", rewrites=rewrites.inverse(), to="hf", sync=False)
    theirs, ours = (read_raw(place / "model.safetensors").tensors for place in (folder, tmp_path / "back"))
    assert {one: data for one, (_, _, data) in theirs.items()} == {one: data for one, (_, _, data) in ours.items()}


@pytest.mark.parametrize(("features", "ranks"), [(2880, 4), (2880, 8), (96, 4), (96, 2)])
def test_gpt_oss_is_cut_in_units_of_32_as_vllm_cuts_it(features: int, ranks: int, tmp_path: Path) -> None:
    """The bounds of `_load_weights_mxfp4` in vLLM 0.33's `models/gpt_oss.py`; 2,880 over 4: 736, 736, 736, 672."""
    hidden, experts = 64, 2
    tensors: dict[str, tuple[str, Array]] = {}
    for name, rows, columns in (("gate_up_proj", 2 * features, hidden), ("down_proj", hidden, features)):
        at = f"model.layers.0.mlp.experts.{name}"
        tensors[f"{at}_blocks"] = ("U8", random((experts, rows, columns // 32, 16), rows))
        tensors[f"{at}_scales"] = ("U8", random((experts, rows, columns // 32), rows + 1))
        tensors[f"{at}_bias"] = ("BF16", random((experts, rows), rows + 2, "<u2"))
    for name, shape in (("q", (8 * 8, hidden)), ("k", (8 * 8, hidden)), ("v", (8 * 8, hidden))):
        tensors[f"{HEADS}{name}_proj.weight"] = ("BF16", random(shape, len(name), "<u2"))
        tensors[f"{HEADS}{name}_proj.bias"] = ("BF16", random(shape[:1], len(name), "<u2"))
    tensors["model.embed_tokens.weight"] = ("BF16", random((64, hidden), 7, "<u2"))
    config = {
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 8,
        "hidden_size": hidden,
        "vocab_size": 64,
    }
    source = folder_of(tmp_path / "source", tensors, {**config, "quantization_config": {"quant_method": "mxfp4"}})
    layouts = family("vllm/gpt-oss-mxfp4", source, sw.DeviceMesh((ranks,), ("tp",)))
    rewrites = family("vllm/gpt-oss-mxfp4", source)
    sw.reshard_checkpoint(source, tmp_path / "ranks", layouts, rewrites=rewrites, to="ranks", sync=False)
    per_rank = -(-(features // 32) // ranks) * 32
    at = "model.layers.0.mlp.experts."
    sizes = []
    for rank, file in enumerate(sorted((tmp_path / "ranks").glob("rank-*.safetensors"))):
        own = read_raw(file)
        start, end = min(rank * per_rank, features), min((rank + 1) * per_rank, features)
        sizes.append(end - start)
        pairs, bytes_, groups = slice(2 * start, 2 * end), slice(start // 2, end // 2), slice(start // 32, end // 32)
        for name, source_name, index in (
            ("w13_weight", "gate_up_proj_blocks", (slice(None), pairs)),
            ("w13_weight_scale", "gate_up_proj_scales", (slice(None), pairs)),
            ("w13_bias", "gate_up_proj_bias", (slice(None), pairs)),
            ("w2_weight", "down_proj_blocks", (..., bytes_)),
            ("w2_weight_scale", "down_proj_scales", (..., groups)),
        ):
            values = tensors[at + source_name][1]
            if source_name.endswith("blocks"):
                values = values.reshape(*values.shape[:2], -1)
            expected = np.ascontiguousarray(values[index])
            _, held, data = own.tensors[f"{at}routed_experts.{name}"]
            assert (held, data) == (expected.shape, expected.tobytes()), (rank, name)
    if (features, ranks) == (2880, 4):
        assert sizes == [736, 736, 736, 672]
    if (features, ranks) == (96, 4):
        assert sizes == [32, 32, 32, 0]
    sw.reshard_checkpoint(tmp_path / "ranks", tmp_path / "back", rewrites=rewrites.inverse(), to="hf", sync=False)
    assert stored(tmp_path / "back").tensors == stored(source).tensors
