"""The method of a configuration: known, or refused by its name."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import shardwise as sw
from shardwise import deploy
from shardwise.cli import main
from shardwise.errors import ParseError
from shardwise.quantized import LogicalTensor, find_components
from shardwise.quantized.forms import METHODS, find_kinds
from shardwise.quantized.method import KNOWN, quantization_of, stated_method
from shardwise.quantized.stated import stated_tensors

from ..checks import refused

Outline = dict[str, tuple[str, tuple[int, ...]]]
DATA = Path(__file__).parents[1] / "data" / "quantized"
MLX = {"group_size": 64, "bits": 4, "mode": "affine"}


def test_each_known_method_has_a_form() -> None:
    assert KNOWN.keys() == METHODS.keys()


@pytest.mark.parametrize(
    "method",
    [
        *("hqq", "eetq", "aqlm", "spqr", "vptq", "bitnet", "quark", "torchao", "quanto"),
        *("gguf", "higgs", "fp_quant", "FP8", "awq_marlin", "gptq_v3", 4, ["fp8"]),
    ],
)
def test_a_method_that_is_not_known_is_refused_by_its_name(method: Any) -> None:
    config = {"quantization_config": {"quant_method": method}}
    tensors: Outline = {"layers.0.mlp.down_proj.weight": ("I8", (64, 64))}
    for given in (config, {"text_config": config}, {"thinker_config": {"text_config": config}}):
        for ask in (partial(find_components, tensors), partial(find_kinds, tensors), partial(stated_tensors, {})):
            with refused(ParseError, f"quant_method is {method!r}; known are auto-round, awq, bitsandbytes"):
                ask(given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"quant_method": "awq", "version": "marlin"}, "version is 'marlin'; known for awq is gemm"),
        ({"quant_method": "awq", "backend": "llm-awq"}, "backend is 'llm-awq'"),
        (
            {"quant_method": "gptq", "checkpoint_format": "bitblas"},
            "checkpoint_format is 'bitblas'; known for gptq are gptq",
        ),
        ({"quant_method": "gptq", "is_marlin_format": True}, "is_marlin_format is True"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'"),
        ({"quantization": {"quant_algo": "NVFP4_AWQ"}}, "quant_algo is 'NVFP4_AWQ'; known for modelopt are FP8"),
        ({"quant_method": "fp8", "fmt": "e3m4"}, "fmt is 'e3m4'"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format is 'marlin-24'"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"format": "new-packed"}}},
            "format is 'new-packed'",
        ),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config.format is 'sparse-24-bitmask'",
        ),
        ({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "af4"}, "bnb_4bit_quant_type is 'af4'"),
        ({"mode": "mxint8", "bits": 8, "group_size": 32}, "mode is 'mxint8'; known for mlx are affine, mxfp4"),
        (
            {"weights": "int4"},
            "has no quant_method, and the tensors' names do not show one; it says {'weights': 'int4'}",
        ),
    ],
)
def test_a_version_or_type_that_is_not_known_is_refused_by_its_name(given: dict[str, Any], said: str) -> None:
    tensors: Outline = {"layers.0.mlp.down_proj.weight": ("BF16", (64, 64))}
    with refused(ParseError, said):
        find_components(tensors, {"quantization_config": given})


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"quantization": MLX}, "mlx"),
        ({"quantization": {"group_size": 32, "bits": 3}}, "mlx"),
        ({"quantization_config": MLX}, "mlx"),
        ({"quantization_config": {"group_size": 32, "bits": 3}, "quantization": {"group_size": 32, "bits": 3}}, "mlx"),
        ({"llm_config": {"quantization": MLX}}, "mlx"),
        ({"quantization_config": {"load_in_8bit": True}}, "bitsandbytes"),
        ({"quantization_config": {"quantization": {"quant_algo": "FP8"}}}, "modelopt"),
        ({"quantization": None, "quantization_bit": 0, "quantization_config": {}}, None),
        ({"vision_config": {"quantization_config": {"quant_method": "other"}}}, None),
    ],
)
def test_forms_without_a_method(config: dict[str, Any], method: str | None) -> None:
    assert stated_method(quantization_of(config)) == method


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quantization_bit": 4}, "quantization_bit = 4"),
        ({"quantization_config": "fp8"}, "quantization_config = 'fp8'"),
    ],
)
def test_what_is_no_object_is_refused_by_what_it_says(config: dict[str, Any], said: str) -> None:
    with refused(ParseError, said, "known are auto-round, awq"):
        stated_method(quantization_of(config))


def mlx(bits: int, size: int, mode: str, **more: Any) -> LogicalTensor:
    """A weight of 64 x 384: the shapes are those that `mlx.core.quantize` of MLX 0.32.4 gives."""
    words, groups = 384 * bits // 32, 384 // size
    tensors: Outline = {"a.weight": ("U32", (64, words)), "a.scales": ("BF16", (64, groups))}
    if mode == "affine":
        tensors["a.biases"] = ("BF16", (64, groups))
    config = {"quantization": {"group_size": size, "bits": bits, "mode": mode, **more}}
    (logical,) = find_components(tensors, config).tensors.values()
    return logical


@pytest.mark.parametrize(
    ("mode", "bits", "size"),
    [
        *[("affine", bits, size) for bits in (2, 3, 4, 5, 6, 8) for size in (32, 64, 128)],
        *[("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)],
    ],
)
def test_weights_of_mlx(mode: str, bits: int, size: int) -> None:
    logical = mlx(bits, size, mode)
    assert (logical.shape, logical.unit(0), logical.unit(1)) == ((64, 384), 1, size)
    # Values are in words: of so many bits that do not divide 32, as many as make whole words.
    assert logical.unit(1, shared=True) == (32 // bits if 32 % bits == 0 else 32)
    assert [component.name for component in logical.components][:2] == ["a.weight", "a.scales"]


def test_modules_of_mlx_may_have_bits_of_their_own() -> None:
    assert mlx(8, 64, "affine", a={"bits": 8, "group_size": 64}, b={"bits": 2, "group_size": 32}).shape == (64, 384)
    tensors: Outline = {}
    for layer, bits in enumerate((4, 8)):  # 8 bits of half as many columns are as many words.
        tensors[f"layers.{layer}.weight"] = ("U32", (64, 48))
        for tail in ("scales", "biases"):
            tensors[f"layers.{layer}.{tail}"] = ("BF16", (64, 384 * 4 // bits // 64))
    config = {"quantization": {**MLX, "layers.1": {"bits": 8, "group_size": 64}}}
    kinds = find_kinds(tensors, config)[1]
    assert [kind.tensor.shape for kind in kinds] == [(64, 384), (64, 192)]
    with refused(ParseError, "layers.1.weight' has scales, and quantization says that it is not quantized"):
        find_components(tensors, {"quantization": {**MLX, "layers.1": False}})


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"a.weight": ("U32", (64, 48))}, "is U32, and its scales are missing"),
        ({"a.weight": ("BF16", (64, 384)), "a.scales": ("BF16", (64, 6))}, "its weight is BF16; MLX needs U32"),
        ({"a.weight": ("U32", (64, 48)), "a.scales": ("BF16", (64, 6))}, "its biases is missing"),
        ({"a.weight": ("U32", (64, 48)), "a.scales": ("BF16", (64, 12))}, "in blocks of 1 x 64 it must be (64, 6)"),
    ],
)
def test_weights_of_mlx_that_do_not_agree(tensors: Outline, said: str) -> None:
    with refused(ParseError, said):
        find_components(tensors, {"quantization": MLX})


@pytest.mark.parametrize(
    ("tail", "config"),
    [
        ("weight_scale", {"quant_method": "modelopt", "quant_algo": "MXFP8"}),
        ("weight_scale_inv", {"quant_method": "mxfp8"}),
        (
            "weight_scale",
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "g": {
                        "format": "mxfp8-quantized",
                        "weights": {"strategy": "group", "group_size": 32, "num_bits": 8},
                    }
                },
            },
        ),
    ],
    ids=["modelopt", "sglang", "compressed-tensors"],
)
def test_mxfp8_has_a_scale_for_32_columns(tail: str, config: dict[str, Any]) -> None:
    """As vLLM 0.33 allocates it: `modelopt.py`, `compressed_tensors_w8a8_mxfp8.py`; and SGLang's `fp8.py`."""
    tensors: Outline = {"a.weight": ("F8_E4M3", (64, 96)), f"a.{tail}": ("U8", (64, 3))}
    (logical,) = find_components(tensors, {"quantization_config": config}).tensors.values()
    assert (logical.form, logical.unit(0), logical.unit(1)) == ("MXFP8 in groups of 32", 1, 32)
    with refused(ParseError, f"a.{tail}' has the shape (64, 2)"):
        find_components({**tensors, f"a.{tail}": ("U8", (64, 2))}, {"quantization_config": config})


def test_what_is_stated_before_there_is_a_file() -> None:
    for config in ({"quantization": MLX}, {"quantization_config": {"quant_method": "mxfp8"}}):
        outline, _ = stated_tensors({"a.up_proj.weight": (64, 384), "norm.weight": (64,)}, config)
        (logical,) = find_components(outline, config).tensors.values()
        assert logical.shape == (64, 384)
        assert outline["norm.weight"] == ("BF16", (64,))


@pytest.mark.parametrize("verb", ["fits", "report", "reshard", "plan"])
@pytest.mark.parametrize("fault", ["scale", "zero"])
def test_scales_without_elements_and_zero_points_without_dims_end_in_a_sentence(
    verb: str, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A scale of shape [0, 0] of ModelOpt, and a zero point of rank 0 of compressed-tensors."""
    name, shape, new = {
        "scale": ("fp8-tensor-modelopt", "weight_scale", [0, 0]),
        "zero": ("int4-ct-asym", "weight_zero_point", []),
    }[fault]
    source = tmp_path / "source"
    shutil.copytree(DATA / name, source)
    forge(source / "model.safetensors", shape, new)
    rules = tmp_path / "own.toml"
    rules.write_text("default = []\n[rules]\n'down_proj' = [[], 'tp']\n")
    more = {
        "fits": [],
        "report": ["--rules", str(rules), "--mesh", "tp=2"],
        "reshard": [str(tmp_path / "new"), "--rules", str(rules), "--mesh", "tp=2"],
        "plan": [str(tmp_path / "new"), "--rules", str(rules), "--mesh", "tp=2"],
    }[verb]
    assert main([verb, str(source), *more]) == 2
    said = capsys.readouterr().err
    assert said.startswith("shardwise: error: ")
    assert f"its {shape} has the shape (0, 0)" in said or f"{shape}' has the shape ()" in said
    assert said.count("\n") == 1


def forge(file: Path, tail: str, shape: list[int]) -> None:
    """Give all tensors of a name another shape, of as many bytes as that has."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    new, parts, at = {}, [], 0
    for name, one in header.items():
        if name == "__metadata__":
            continue
        begin, end = one["data_offsets"]
        part = body[begin:end]
        if name.endswith(f".{tail}"):
            part, one = part[: 0 if 0 in shape else 4], {**one, "shape": shape}
        new[name] = {**one, "data_offsets": [at, at + len(part)]}
        at += len(part)
        parts.append(part)
    raw = json.dumps(new).encode()
    raw += b" " * (-len(raw) % 8)
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + b"".join(parts))


def test_rules_of_a_model_are_not_for_quantized_weights_that_nothing_states(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The parts as EETQ, HQQ, AutoAWQ and compressed-tensors store them, beside a `config.json` that says nothing."""
    config = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    down = "model.layers.0.mlp.down_proj."
    forms: dict[str, dict[str, Any]] = {
        "weight": {"weight": np.ones((256, 128), "int8"), "weight_scales": np.ones(128, "f2")},
        "W_q": {"W_q": np.ones((64, 256), "u1"), "scale": np.ones((512, 1), "f2"), "zero": np.ones((512, 1), "f2")},
        "qweight": {
            **{"qweight": np.ones((256, 16), "i4"), "qzeros": np.ones((2, 16), "i4")},
            "scales": np.ones((2, 128), "f2"),
        },
        "weight_scale": {
            "weight": np.ones((128, 256), ml_dtypes.float8_e4m3fn),
            "weight_scale": np.ones((128, 1), "f4"),
        },
    }
    for odd, parts in forms.items():
        path = tmp_path / odd
        sw.save_checkpoint(path, {f"{down}{name}": value for name, value in parts.items()}, to="hf", sync=False)
        given = [str(path), "--config", str(tmp_path / "config.json"), "--mesh", "tp=2", "--rules"]
        assert main(["report", *given, "hf/llama"]) == 2
        assert f"'{down}{odd}'" in capsys.readouterr().err
        assert main(["reshard", *given, "hf/llama", str(tmp_path / f"{odd}-no")]) == 2
        assert "nothing says how it is quantized" in capsys.readouterr().err
        with pytest.raises(sw.ShardwiseError, match=r"models of the type llama|no rule of the deployment"):
            sw.reshard_checkpoint(path, tmp_path / "no", deploy.vllm({**config, "num_hidden_layers": 1}, tp=2))
        # As the refusal says: rules for the names of what is stored.
        (tmp_path / "own.toml").write_text(f"default = []\n[rules]\n'{odd}$' = ['tp', []]\n")
        assert main(["report", *given, str(tmp_path / "own.toml")]) == 0
        capsys.readouterr()
    # And a configuration that says it.
    stated = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))
    path = tmp_path / "qweight"
    assert (
        main(["report", str(path), "--config", str(tmp_path / "config.json"), "--mesh", "tp=2", "--rules", "hf/llama"])
        == 0
    )


@pytest.mark.parametrize(
    ("stated", "dtype", "shape"),
    [
        ({"load_in_4bit": True}, "u1", (2048, 1)),
        ({"quant_method": "fp8"}, "i1", (64, 64)),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "i4", (64, 64)),
    ],
)
def test_integers_without_what_their_method_stores_beside_them_are_not_cut_as_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stated: dict[str, Any], dtype: str, shape: tuple[int, int]
) -> None:
    """They are no weights of the method, nor plain ones: 64 x 64 values of 4 bits, flat, are 2,048 bytes."""
    config = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 64}
    name = "model.layers.0.self_attn.q_proj.weight"
    sw.save_checkpoint(tmp_path / "m", {name: np.ones(shape, dtype)}, to="hf", sync=False)
    (tmp_path / "m" / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))
    given = [str(tmp_path / "m"), "--mesh", "tp=2", "--rules"]
    for command in (["report"], ["reshard", str(tmp_path / "no")]):
        assert main([command[0], *given, "hf/llama", *command[1:]]) == 2
        assert "it is not known how its rule cuts it" in capsys.readouterr().err
    (tmp_path / "own.toml").write_text("[rules]\n'q_proj' = ['tp', []]\n")
    (tmp_path / "plain.json").write_text(json.dumps(config))
    assert main(["report", *given, str(tmp_path / "own.toml"), "--config", str(tmp_path / "plain.json")]) == 0


def test_weights_of_8_bits_with_no_scales_are_said_unless_they_are_stated_to_be_cast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An element of float8 is one value, so they are cut; but their scales may be lost."""
    config = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 128}
    down = "model.layers.0.mlp.down_proj.weight"
    path = tmp_path / "cast"
    sw.save_checkpoint(path, {down: np.ones((128, 256), ml_dtypes.float8_e4m3fn)}, to="hf", sync=False)
    (tmp_path / "llama.toml").write_text("models = ['llama']\n[rules]\n'down_proj' = [[], 'tp']\n")
    cut = ["--mesh", "tp=2", "--rules", str(tmp_path / "llama.toml")]
    for number, (dtype, is_said) in enumerate(
        [(None, True), ("bfloat16", True), ("float8_e5m2", True), ("float8_e4m3fn", False)]
    ):
        (path / "config.json").write_text(json.dumps({**config, "torch_dtype": dtype}))
        for command in (["report", str(path), *cut], ["reshard", str(path), str(tmp_path / f"{number}"), *cut]):
            assert main([*command, "--strict"]) == is_said
            assert ("nothing says that they were only cast" in "".join(capsys.readouterr())) == is_said, dtype
            if is_said:
                assert main([*command, "--json"]) == 0
                out = capsys.readouterr().out
                said = json.loads(out)["left_out"]
                assert [(one["kind"], one["names"], one["bytes"]) for one in said] == [("cast", [down], 128 * 256)]
        assert main(["fits", str(path), "--tp", "2"]) == (4 if is_said else 0)
        assert main(["fits", str(path), "--tp", "2", "--rules", "hf/llama"]) == (4 if is_said else 0)
        capsys.readouterr()
        # Copied as it is, nothing depends on it.
        assert main(["reshard", str(path), str(tmp_path / f"copy {number}"), "--strict"]) == 0
        assert "cast" not in capsys.readouterr().err
    # Rules for the names of what is stored, which do not say models, cut what they name.
    (tmp_path / "own.toml").write_text("[rules]\n'down_proj' = [[], 'tp']\n")
    (path / "config.json").write_text(json.dumps(config))
    assert main(["report", str(path), "--mesh", "tp=2", "--rules", str(tmp_path / "own.toml"), "--strict"]) == 0


AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int"}


def test_autoround_packs_as_gptq_and_as_awq() -> None:
    """The shapes are those of its `QuantLinear` of 128 x 64: qweight of in/8 x out, qzeros of groups x out/8."""
    words: Outline = {"a.qweight": ("I32", (16, 64)), "a.qzeros": ("I32", (4, 8)), "a.scales": ("F16", (4, 64))}
    for packing in (None, "auto_round:auto_gptq", "auto_round:gptqmodel"):
        config = AUTO_ROUND | ({} if packing is None else {"packing_format": packing})
        (found,) = find_components(words, {"quantization_config": config}).tensors.values()
        assert (found.form, found.shape, found.unit(1)) == ("GPTQ of 4 bits in groups of 32", (64, 128), 32)
        assert found.unit(0) == 8
    columns: Outline = {"a.qweight": ("I32", (128, 8)), "a.qzeros": ("I32", (4, 8)), "a.scales": ("F16", (4, 64))}
    config = {"quantization_config": AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}}
    (found,) = find_components(columns, config).tensors.values()
    assert (found.form, found.shape) == ("AWQ of 4 bits in groups of 32", (64, 128))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            {"packing_format": "auto_round:llm_compressor"},
            "packing_format is 'auto_round:llm_compressor'; known for auto-round",
        ),
        ({"data_type": "mx_fp"}, "data_type is 'mx_fp'; known for auto-round is int"),
        ({"extra_config": {"lm_head": {"bits": 8}}}, "extra_config gives 'lm_head' its own bits"),
        ({"extra_config": {"lm_head": {"bits": 4, "group_size": 64}}}, "gives 'lm_head' its own group_size"),
        ({"extra_config": 3}, "extra_config is 3; it must be an object"),
    ],
)
def test_what_autoround_says_for_some_layers_is_refused(more: dict[str, Any], said: str) -> None:
    words: Outline = {"a.qweight": ("I32", (16, 64)), "a.scales": ("F16", (4, 64))}
    config = {"quantization_config": AUTO_ROUND | more}
    for ask in (partial(find_components, words), partial(stated_tensors, {"a.weight": (64, 128)})):
        with refused(ParseError, said):
            ask(config)


def test_layers_that_autoround_leaves_whole_are_plain() -> None:
    config = {"quantization_config": AUTO_ROUND | {"extra_config": {"lm_head": {"bits": 16, "data_type": "fp"}}}}
    made, _ = stated_tensors({"h.0.mlp.down_proj.weight": (64, 128), "lm_head.weight": (64, 128)}, config)
    assert made["lm_head.weight"] == ("BF16", (64, 128))
    assert made["h.0.mlp.down_proj.qweight"] == ("I32", (16, 64))
    assert find_components(dict(made), config).plain == ("lm_head.weight",)


def test_fbgemm_has_a_scale_for_each_row() -> None:
    """As transformers' `FbgemmFp8Linear` has it; files of before have the bound of activations too."""
    config = {"quantization_config": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}}
    tensors: Outline = {"a.weight": ("F8_E4M3", (64, 128)), "a.weight_scale": ("F32", (64, 1))}
    for more in ({}, {"a.input_scale_ub": ("F32", (1,))}):
        (found,) = find_components({**tensors, **more}, config).tensors.values()
        assert (found.form, found.shape, found.unit(0), found.unit(1)) == ("FP8 per channel", (64, 128), 1, 1)
        assert [[dim.of for dim in one.along] for one in found.components][:2] == [[0, 1], [0, None]]
    with refused(ParseError, "'a.weight_scale' has the shape (1,)"):
        find_components({"a.weight": ("F8_E4M3", (64, 128)), "a.weight_scale": ("F32", (1,))}, config)
    made, _ = stated_tensors({"mlp.down_proj.weight": (64, 128)}, config)
    assert made["mlp.down_proj.weight_scale"] == ("F32", (64, 1))
