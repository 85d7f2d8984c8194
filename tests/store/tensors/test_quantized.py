"""Quantized checkpoints are resharded: one rule cuts a weight and its scales, and merged they are what they were."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.cli import main
from shardwise.deploy import Deployment, DeploymentRule
from shardwise.fit import fits
from shardwise.quantized import component_layouts, find_components, followers
from shardwise.store.rewritten.ranges import device_reads

from ...checks import refused
from ...oracle.quantized import folders, read_raw

#: Expected of many of these tests, which are about something else.
pytestmark = pytest.mark.filterwarnings("ignore:.*appl(y|ies) to no name:shardwise.ShardwiseWarning")

DATA = Path(__file__).parents[2] / "data" / "quantized"
QUANTIZED = [folder for folder in folders(DATA) if folder.name != "st-low-bit"]


def rules(size: int, **options: Any) -> sw.LayoutMap:
    made = sw.LayoutMap(sw.DeviceMesh((size,), ("tp",)), default="replicated")
    made[r"(?:[qkv](?:_b)?|kv_b|gate|up)_proj\.weight$"] = sw.LayoutRule(("tp", None), **options)
    made[r"(?:o|down)_proj\.weight$"] = sw.LayoutRule((None, "tp"), **options)
    made[r"experts\.gate_up_proj$"] = sw.LayoutRule((None, "tp", None), **options)
    made[r"experts\.down_proj$"] = sw.LayoutRule((None, None, "tp"), **options)
    return made


def fitting(folder: Path, size: int) -> bool:
    """Whether all that the rules cut is on whole blocks, by the numbers of `expected.json`."""
    for name, said in json.loads((folder / "expected.json").read_text())["tensors"].items():
        layout = rules(size).layout_of(name, len(said["shape"]))
        assert layout is not None
        (dim,) = (dim for dim, spec in enumerate(layout.axes) if spec is not None)
        per_rank, rest = divmod(said["shape"][dim], size)
        row = int(np.prod(said["shape"][1:]))
        for component in said["components"].values():
            for along in component["dims"]:
                block = 32 if along.get("of") == "bits" else along.get("block", 1)
                if along.get("of") == "flat":
                    if dim > 0 or per_rank * row % block:
                        return False
                elif dim in (along.get("of"), along.get("along")) and block != said["shape"][dim] and per_rank % block:
                    return False
        if rest or ("actorder" in folder.name and dim == 1):
            return False
    return True


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("folder", QUANTIZED, ids=lambda folder: folder.name)
def test_cut_and_merged_again(folder: Path, size: int, tmp_path: Path) -> None:
    cut, merged = tmp_path / "cut", tmp_path / "merged"
    if size > 1 and not fitting(folder, size):
        with refused(sw.LayoutError):
            sw.reshard_checkpoint(folder, cut, rules(size), to="sharded", sync=False)
        assert not cut.exists()
        return
    report = sw.reshard_checkpoint(folder, cut, rules(size), to="sharded", sync=False)
    assert all(" to no name" in warning for warning in report.warnings)  # Of dense models those of experts.
    raw = read_raw(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    found = find_components(raw.outline(), config, lambda name: raw.tensors[name][2])
    with sw.open_checkpoint(cut) as checkpoint:
        for name, logical in found.tensors.items():
            layout = rules(size).layout_of(name, len(logical.shape))
            assert layout is not None
            for component, own in component_layouts(logical, layout).items():
                stored, whole = checkpoint[component], raw.array(component)
                boxes = sorted({tuple(map(tuple, box)) for box in own.partition(whole.shape).boxes().tolist()})
                assert sorted(stored.boxes.tolist()) == [[list(side) for side in box] for box in boxes]
                assert checkpoint.read(component).tobytes() == whole.tobytes()
    sw.reshard_checkpoint(cut, merged, to="hf", sync=False)
    again = read_raw(merged / "model.safetensors")
    assert again.tensors == raw.tensors
    assert sw.diff_checkpoints(folder, merged) == []


def test_blocks_are_shared_if_the_rule_says_so(tmp_path: Path) -> None:
    text = "[mesh]\nshape = [2]\naxis_names = ['tp']\n[rules]\n'up_proj' = { axes = ['tp', []], shared = true }\n"
    (tmp_path / "rules.toml").write_text(text)
    layouts = sw.LayoutMap.from_toml(tmp_path / "rules.toml")
    layouts.to_toml(tmp_path / "again.toml")
    assert sw.LayoutMap.from_toml(tmp_path / "again.toml") == layouts
    assert eval(repr(layouts.rule("up_proj")), {"LayoutRule": sw.LayoutRule, **vars(sw)}) == layouts.rule("up_proj")
    source = tmp_path / "source"
    source.mkdir()
    data = bytes(range(256)) * 2
    header = {
        "up_proj.weight": {"dtype": "F8_E4M3", "shape": [128, 4], "data_offsets": [0, 512]},
        "up_proj.weight_scale_inv": {"dtype": "F32", "shape": [1, 1], "data_offsets": [512, 516]},
    }
    text_bytes = json.dumps(header).encode()
    (source / "model.safetensors").write_bytes(len(text_bytes).to_bytes(8, "little") + text_bytes + data + b"\0\0\x80?")
    (source / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    sw.reshard_checkpoint(source, tmp_path / "cut", layouts, to="sharded", sync=False)
    with sw.open_checkpoint(tmp_path / "cut") as checkpoint:
        assert [piece.box[0] for piece in checkpoint["up_proj.weight"].pieces] == [slice(0, 64), slice(64, 128)]
        assert checkpoint.read("up_proj.weight_scale_inv").tolist() == [[1.0]]
    alone = sw.LayoutMap(layouts.device_mesh)
    alone["up_proj"] = ("tp", None)
    with refused(sw.LayoutError, "'up_proj.weight': dim 0 has 128 elements, and is cut at 64, within a block of 128"):
        sw.reshard_checkpoint(source, tmp_path / "refused", alone, to="sharded", sync=False)


def test_what_does_not_fit_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    folder = DATA / "fp8-block-ragged"
    with refused(sw.LayoutError, "within a block of 128 of weight_scale_inv", "it would fit padded to"):
        sw.reshard_checkpoint(folder, tmp_path / "cut", rules(2), to="sharded")
    with refused(sw.LayoutError, "g_idx is not in order (desc_act)"):
        sw.reshard_checkpoint(DATA / "gptq-actorder", tmp_path / "cut", rules(2), to="sharded")
    source = tmp_path / "source"
    shutil.copytree(folder, source)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [64, 128]
    (source / "config.json").write_text(json.dumps(config))
    with refused(sw.ParseError, "in blocks of 64 x 128 it must be"):
        sw.reshard_checkpoint(source, tmp_path / "cut", rules(2), to="sharded")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_what_is_quantized_by_an_unknown_method_is_not_cut_by_rules_for_weights(tmp_path: Path) -> None:
    """It is refused by name, unless each stored tensor is named, or the configuration left out, as the refusal says."""
    source = tmp_path / "source"
    shutil.copytree(DATA / "gptq", source)
    (source / "config.json").write_text('{"quantization_config": {"quant_method": "other"}}')
    layouts = sw.LayoutMap(sw.DeviceMesh((2,), ("tp",)), default="replicated")
    layouts[r"down_proj\.qweight$"] = (None, "tp")
    with refused(sw.ParseError, "quant_method is 'other'; known are auto-round, awq"):
        sw.reshard_checkpoint(source, tmp_path / "cut", layouts, to="sharded", sync=False)
    with sw.open_checkpoint(source) as checkpoint:
        named = {name: layouts.layout_of(name, len(one.shape)) for name, one in checkpoint.items()}
    ways: tuple[tuple[object, object], ...] = ((None, None), (layouts, {}), (named, None))
    for number, (given, config) in enumerate(ways):
        new = tmp_path / f"{number}"
        sw.reshard_checkpoint(source, new, given, to="sharded", config=config, sync=False)  # type: ignore[arg-type]
        assert sw.diff_checkpoints(source, new) == []


def test_a_version_that_is_not_known_is_as_an_unknown_method(tmp_path: Path) -> None:
    """It is copied as it is, and refused by its name where rules for weights would cut it."""
    source = tmp_path / "source"
    shutil.copytree(DATA / "gptq", source)
    stated = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "bitblas"}
    (source / "config.json").write_text(json.dumps({"quantization_config": stated}))
    layouts = sw.LayoutMap(sw.DeviceMesh((2,), ("tp",)), default="replicated")
    layouts[r"down_proj\.qweight$"] = (None, "tp")
    sw.reshard_checkpoint(source, tmp_path / "copy", sync=False)
    assert sw.diff_checkpoints(source, tmp_path / "copy") == []
    with refused(
        sw.ParseError, "checkpoint_format is 'bitblas'", "give a configuration without quantization_config (--config)"
    ):
        sw.reshard_checkpoint(source, tmp_path / "cut", layouts, to="sharded", sync=False)
    sw.reshard_checkpoint(source, tmp_path / "cut", layouts, to="sharded", config={}, sync=False)
    assert sw.diff_checkpoints(source, tmp_path / "cut") == []


@pytest.mark.parametrize(
    ("stated", "lacking"),
    [
        ({"quant_method": "gptq", "bits": 4}, {"group_size": 32}),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, {"group_size": 32}),
        ({"quant_method": "gptq", "bits": "four", "group_size": 32}, {"bits": 4}),
    ],
)
def test_a_configuration_that_lacks_fields_is_enough_for_a_copy(
    stated: dict[str, Any], lacking: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy cuts nothing; a cut and a rewrite are refused, and the corrected configuration is taken, as they say."""
    source = tmp_path / "source"
    shutil.copytree(DATA / "gptq", source)
    (source / "config.json").write_text(json.dumps({"quantization_config": stated}))
    right = tmp_path / "right.json"
    right.write_text(json.dumps({"quantization_config": {**stated, **lacking}}))
    assert main(["reshard", str(source), str(tmp_path / "copy"), "--no-sync"]) == 0, capsys.readouterr().err
    assert sw.diff_checkpoints(source, tmp_path / "copy") == []
    assert (tmp_path / "copy" / "config.json").read_text() == (source / "config.json").read_text()
    layouts = sw.LayoutMap(sw.DeviceMesh((5,), ("tp",)), default="replicated")
    layouts[r"down_proj\.weight$"] = (None, "tp")
    renamed = sw.Rewrites([{"from": "model.layers.{i}.mlp.down_proj.weight", "to": "down.{i}.weight"}])
    ways: list[tuple[Any, dict[str, Any]]] = [(layouts, {}), (None, {"rewrites": renamed})]
    for number, (given, how) in enumerate(ways):
        with refused(sw.ParseError, next(iter(lacking)), "give a corrected configuration (--config)"):
            sw.reshard_checkpoint(source, tmp_path / "cut", given, to="sharded", sync=False, **how)
        new = tmp_path / f"cut-{number}"
        sw.reshard_checkpoint(source, new, given, to="sharded", config=right, sync=False, **how)
        with sw.open_checkpoint(new) as made:
            fifths = [name for name, tensor in made.items() if name.endswith("qweight") and len(tensor.boxes) == 5]
            assert bool(fifths) == (given is not None)


def test_a_mapping_names_weights_or_components(tmp_path: Path) -> None:
    folder = DATA / "nvfp4-modelopt"
    raw = read_raw(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    layout = sw.TensorLayout((None, "tp"), sw.DeviceMesh((3,), ("tp",)))
    found = find_components(raw.outline(), json.loads((folder / "config.json").read_text()))
    given = component_layouts(found.tensors[name], layout)
    for number, layouts in enumerate(({name: layout}, given)):
        sw.reshard_checkpoint(folder, tmp_path / f"{number}", layouts, to="sharded", sync=False)
        with sw.open_checkpoint(tmp_path / f"{number}") as checkpoint:
            assert {one: len(checkpoint[one].pieces) for one in given} == {
                name: 3,
                f"{name}_scale": 3,
                f"{name}_scale_2": 1,
                name.replace("weight", "input_scale"): 1,
            }


@pytest.mark.parametrize("size", [1, 2, 4])
def test_stacked_experts_are_cut_over_expert_ranks(size: int, tmp_path: Path) -> None:
    folder = DATA / "mxfp4-gptoss"
    layouts = sw.LayoutMap(sw.DeviceMesh((size,), ("ep",)), default="replicated")
    layouts[r"experts\.(gate_up|down)_proj$"] = ("ep", None, None)
    sw.reshard_checkpoint(folder, tmp_path / "cut", layouts, to="sharded", sync=False)
    with sw.open_checkpoint(tmp_path / "cut") as checkpoint:
        for tail in ("blocks", "scales"):
            boxes = checkpoint[f"model.layers.0.mlp.experts.down_proj_{tail}"].boxes
            assert sorted(boxes[:, 0].tolist()) == [[rank * 4 // size, (rank + 1) * 4 // size] for rank in range(size)]
    sw.reshard_checkpoint(tmp_path / "cut", tmp_path / "merged", to="hf", sync=False)
    assert read_raw(tmp_path / "merged" / "model.safetensors").tensors == read_raw(folder / "model.safetensors").tensors


def test_more_expert_ranks_than_experts_are_refused(tmp_path: Path) -> None:
    layouts = sw.LayoutMap(sw.DeviceMesh((8,), ("ep",)), default="replicated")
    layouts[r"experts\.(gate_up|down)_proj$"] = ("ep", None, None)
    with refused(sw.LayoutError, "4", "8"):
        sw.reshard_checkpoint(DATA / "mxfp4-gptoss", tmp_path / "cut", layouts, to="sharded")


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("folder", QUANTIZED, ids=lambda folder: folder.name)
def test_experts_one_by_one_are_on_their_rank_with_all_components(folder: Path, size: int, tmp_path: Path) -> None:
    """Eight experts, each the weights of one layer's down projection."""
    if folder.name == "mxfp4-gptoss":
        return
    raw = read_raw(folder / "model.safetensors").tensors
    own = {name: one for name, one in raw.items() if ".mlp.down_proj." in name}
    tensors = {name.replace("mlp.", f"mlp.experts.{expert}."): one for expert in range(8) for name, one in own.items()}
    source = tmp_path / "source"
    source.mkdir()
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, shape, values) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(header).encode()
    (source / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    shutil.copy(folder / "config.json", source)
    mesh = sw.DeviceMesh((size,), ("ep",))
    rule = DeploymentRule((None, None), at={"ep": f"e // {8 // size}"})
    deployment = Deployment(size, mesh, {r"experts\.{e}\.": rule})
    sw.reshard_checkpoint(source, tmp_path / "cut", deployment, to="sharded", sync=False)
    with sw.open_checkpoint(tmp_path / "cut") as checkpoint:
        for name in tensors:
            (piece,) = checkpoint[name].pieces
            expert = int(name.split("experts.")[1].split(".")[0])
            # One file for each rank that holds something, in order.
            assert (
                sorted(path.name for path in (tmp_path / "cut").glob("*.safetensors"))[expert * size // 8]
                == Path(str(piece.path)).name
            )
    sw.reshard_checkpoint(tmp_path / "cut", tmp_path / "merged", to="hf", sync=False)
    assert read_raw(tmp_path / "merged" / "model.safetensors").tensors == tensors


def test_what_a_device_has_to_read_follows_too() -> None:
    folder = DATA / "nvfp4-modelopt"
    layouts = sw.LayoutMap(sw.DeviceMesh((3,), ("tp",)), default="replicated")
    layouts[r"down_proj\.weight$"] = (None, "tp")
    raw = read_raw(folder / "model.safetensors")
    with sw.open_checkpoint(folder) as checkpoint:
        plan = device_reads(checkpoint, layouts, "cpu:1", over_read=0)

        def fetch(path: Path, offset: int, length: int) -> bytes:
            return path.read_bytes()[offset : offset + length]

        held = {array.name: values for array, values in zip(plan.arrays, plan.fill(fetch), strict=True)}
    for tail in ("weight", "weight_scale"):
        name = f"model.layers.0.mlp.down_proj.{tail}"
        assert held[name].tobytes() == np.split(raw.array(name), 3, 1)[1].tobytes()
    assert held["model.layers.0.mlp.down_proj.weight_scale_2"].nbytes == 4


#: By hand: of 768 rows in 4 each has 192, a block and a half of 128.
HELD = [[0, 1], [1, 2], [3, 4], [4, 5]]


def shared_blocks(folder: Path, ways: int = 4) -> sw.LayoutMap:
    """Write FP8 of 768 rows, six blocks of 128 with the numbers 0 to 5 as scales; and give rules that share them."""
    arrays = {"up.weight": np.arange(768 * 2).astype("u1").reshape(768, 2)}
    arrays["up.weight_scale_inv"] = np.arange(6, dtype="<f4").reshape(6, 1)
    header, at = {}, 0
    for (name, array), dtype in zip(arrays.items(), ("F8_E4M3", "F32"), strict=True):
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(array.tobytes() for array in arrays.values())
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (folder / "config.json").write_text(json.dumps(config))
    layouts = sw.LayoutMap(sw.DeviceMesh((ways,), ("tp",)))
    layouts[r"up\.weight$"] = sw.LayoutRule(("tp", None), shared=True)
    return layouts


def test_files_of_ranks_have_the_blocks_that_neighbours_share(tmp_path: Path) -> None:
    layouts = shared_blocks(tmp_path / "hf")
    sw.reshard_checkpoint(tmp_path / "hf", tmp_path / "ranks", layouts, to="ranks", sync=False)
    for rank, held in enumerate(HELD):
        alone = tmp_path / f"{rank}.safetensors"
        sw.reshard_checkpoint(tmp_path / "hf", alone, layouts, to="ranks", rank=rank, sync=False)
        for file in (alone, tmp_path / "ranks" / f"rank-{rank:05}-tp-{rank}.safetensors"):
            raw = read_raw(file)
            assert raw.array("up.weight_scale_inv").view("<f4").tolist() == [[each] for each in held]
            first = 2 * 192 * rank
            assert raw.tensors["up.weight"][2] == bytes(at % 256 for at in range(first, first + 2 * 192))
    # Read again it is the whole, and what two files say of a block has to be the same.
    whole = tmp_path / "hf" / "model.safetensors"
    assert sw.diff_checkpoints(whole, tmp_path / "ranks") == []
    sw.reshard_checkpoint(tmp_path / "ranks", tmp_path / "merged.safetensors", sync=False)
    assert read_raw(tmp_path / "merged.safetensors").tensors == read_raw(whole).tensors
    file = tmp_path / "ranks" / "rank-00001-tp-1.safetensors"
    before, after = (np.array(each, "<f4").tobytes() for each in ([1, 2], [9, 2]))
    data = file.read_bytes()
    assert data.count(before) == 1
    file.write_bytes(data.replace(before, after))
    with refused(sw.ParseError, "'up.weight_scale_inv': replicas disagree", "differs is (1, 0)"):
        sw.reshard_checkpoint(tmp_path / "ranks", tmp_path / "again.safetensors", sync=False)


@pytest.mark.parametrize("to", ["sharded", "dcp"])
def test_formats_that_hold_elements_once_have_a_shared_block_once(to: Any, tmp_path: Path) -> None:
    layouts = shared_blocks(tmp_path / "hf")
    sw.reshard_checkpoint(tmp_path / "hf", tmp_path / "cut", layouts, to=to, sync=False)
    with sw.open_checkpoint(tmp_path / "cut") as checkpoint:
        found = checkpoint["up.weight_scale_inv"].boxes[:, 0].tolist()
        assert sorted(found) == [[0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 6]]
        read = np.frombuffer(checkpoint.read("up.weight_scale_inv").tobytes(), "<f4")
        assert read.tolist() == [0, 1, 2, 3, 4, 5]
    assert sw.verify_checkpoint(tmp_path / "cut").damaged == ()


def test_engines_would_take_wrong_scales_of_shared_blocks(tmp_path: Path) -> None:
    """They count blocks from a rank's first row: of rank 1 row 64 is in block 2, and would get the scale of block 1."""
    layouts = shared_blocks(tmp_path / "hf")
    with refused(
        sw.LayoutError,
        "'up.weight_scale_inv'",
        "count blocks from the rank's first",
        "to='ranks' writes files",
        "`shardwise fits` says which sizes",
    ):
        sw.reshard_checkpoint(tmp_path / "hf", tmp_path / "vllm", layouts, to="vllm", sync=False)
    assert not (tmp_path / "vllm").exists()
    # A rank within one block is right: half a block of 128 each.
    halves = shared_blocks(tmp_path / "hf", 12)
    sw.reshard_checkpoint(tmp_path / "hf", tmp_path / "vllm", halves, to="vllm", sync=False)
    for rank in range(12):
        raw = read_raw(tmp_path / "vllm" / f"model-rank-{rank}-part-0.safetensors")
        assert raw.array("up.weight_scale_inv").view("<f4").tolist() == [[rank // 2]]
    # The refusal names `fits`: of what it says fits, every size is written.
    (tmp_path / "rules.toml").write_text("[rules]\nup = { axes = ['tp', []], shared = true }\n")
    sizes = fits(tmp_path / "hf", rules=tmp_path / "rules.toml", tp=(2, 3, 4, 6, 12)).sizes
    fitting = [size.tp for size in sizes if size.verdict == "fits"]
    assert fitting == [
        2,
        3,
        6,
        12,
    ]  # By hand: of 4 one begins within a block that it shares, of 12 each is half a block.
    for ways in fitting:
        whole = shared_blocks(tmp_path / f"of-{ways}", ways)
        sw.reshard_checkpoint(tmp_path / f"of-{ways}", tmp_path / f"in-{ways}", whole, to="vllm", sync=False)


@pytest.mark.parametrize("is_mapping", [False, True])
def test_ranges_of_shared_blocks_are_read(is_mapping: bool, tmp_path: Path) -> None:
    rules = shared_blocks(tmp_path / "hf")
    layouts: Any = rules
    if is_mapping:  # From the names of the components to what each has.
        stored = {"up.weight": ("F8_E4M3", (768, 2)), "up.weight_scale_inv": ("F32", (6, 1))}
        found = find_components(stored, json.loads((tmp_path / "hf" / "config.json").read_text()))
        layouts = {name: layout for name, (_, layout) in followers(found, rules).items()}
    with sw.open_checkpoint(tmp_path / "hf" / "model.safetensors") as checkpoint:
        for rank, held in enumerate(HELD):
            plan = device_reads(checkpoint, layouts, f"cpu:{rank}")
            made = dict(zip([array.name for array in plan.arrays], plan.fill(fetched), strict=True))
            assert made["up.weight_scale_inv"].view("<f4").tolist() == held
            assert plan.nbytes == 192 * 2 + 2 * 4
        if is_mapping:
            wrong = {"up.weight": layouts["up.weight_scale_inv"], "up.weight_scale_inv": layouts["up.weight_scale_inv"]}
            with refused(sw.LayoutError, "tensor 'up.weight' has shape (768, 2), but its tiling has (6, 1)"):
                device_reads(checkpoint, wrong, "cpu:0")


def fetched(path: Path, offset: int, length: int) -> bytes:
    return path.read_bytes()[offset : offset + length]


def test_a_report_counts_shared_blocks_on_both_sides(tmp_path: Path) -> None:
    """By hand: each of four ranks has 192 · 2 bytes of the weight, and 2 scales of 4 bytes."""
    layouts = shared_blocks(tmp_path / "hf")
    stored = {"up.weight": ("F8_E4M3", (768, 2)), "up.weight_scale_inv": ("F32", (6, 1))}
    found = find_components(stored, json.loads((tmp_path / "hf" / "config.json").read_text()))
    described = {"up.weight": ((768, 2), "float8_e4m3fn"), "up.weight_scale_inv": ((6, 1), "float32")}
    report = layouts.report(described, followers=followers(found, layouts))
    assert report.problems == ()
    assert report.device_bytes is not None
    assert report.device_bytes.tolist() == [392] * 4
    _, scale = report.tensors
    assert (scale.shard_shape, scale.num_shards, scale.bytes_per_device, scale.bytes_total) == ((2, 1), (4, 1), 8, 32)
    assert not scale.is_uneven
    assert not scale.is_replicated
    assert json.loads(json.dumps(report.to_dict()))["tensors"][1]["shard_shape"] == [2, 1]
    assert "neighbours share blocks" in report.to_html()
    # 500 rows by ceil in 3 touch 2 blocks each; in 3 of units of 192 they touch 2, 2 and 1.
    stored = {"up.weight": ("F8_E4M3", (500, 2)), "up.weight_scale_inv": ("F32", (4, 1))}
    described = {"up.weight_scale_inv": ((4, 1), "float32")}
    layouts = sw.LayoutMap(sw.DeviceMesh((3,), ("tp",)))
    layouts["up"] = sw.LayoutRule((sw.packed.parse("(n@tp/ceil/unit192)"), None), shared=True)
    report = layouts.report(described, followers=followers(find_components(stored, {}), layouts))
    assert report.device_bytes is not None
    assert report.device_bytes.tolist() == [8, 8, 4]
    assert report.tensors[0].is_uneven
