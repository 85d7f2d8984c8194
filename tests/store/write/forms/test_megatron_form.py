"""Checkpoints written as Megatron's `torch_dist`: names of states, and the files beside the index."""

from __future__ import annotations

import io
import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise._dtypes import DTYPES, Dtype
from shardwise.cli import main
from shardwise.store.write.forms.megatron import megatron_form

from ....checks import extracted
from ...torch_files import ones

CASES = Path(__file__).parents[3] / "data" / "states" / "megatron"


def unpacked(case: str, folder: Path) -> Path:
    return extracted(CASES / case / "checkpoint.tar.xz", folder) / "checkpoint"


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(
    "case", ["core014_fully_sharded_model_space_tp", "dp_reshardable_pp_buckets", "dp_zero_gather_scatter"]
)
def test_a_state_in_any_sharding_is_written_under_megatrons_names(case: str, cut: bool, tmp_path: Path) -> None:
    source, made = unpacked(case, tmp_path), tmp_path / "made"
    mesh = sw.DeviceMesh((2,), ("tp",))
    key, rows = "decoder.layers.mlp.linear_fc2.weight", sw.TensorLayout((None, None, "tp"), mesh)
    with sw.open_checkpoint(source) as checkpoint:
        names = [key, *(name for name in checkpoint if key in name and name.endswith((".exp_avg", f"exp_avg.{key}")))]
    layouts = dict.fromkeys(names, rows) if cut else None
    sw.reshard_checkpoint(source, made, layouts, to="megatron")
    with sw.open_checkpoint(source) as old, sw.open_checkpoint(made) as new:
        assert (new.format, new.metadata["megatron"]["sharded_backend"]) == ("megatron", "torch_dist")
        weights = [name for name in old if not name.startswith("optimizer.")]
        assert set(new) == {*weights} | {f"optimizer.state.{kind}.{name}" for name in weights for kind in KINDS}
        for name in weights:
            assert new.read(name).tobytes() == old.read(name).tobytes()
            for kind, (before, after) in KINDS.items():
                had = next(
                    each
                    for each in (f"{before}{name}{after}", f"optimizer.state.{OLD.get(kind, kind)}.{name}")
                    if each in old
                )
                array = new.read(f"optimizer.state.{kind}.{name}")
                assert array.shape == old[name].shape if kind != "step" else array == 2
                assert array.tobytes() == old.read(had).tobytes()
        if cut:
            assert len(new[f"optimizer.state.exp_avg.{key}"].pieces) == 2
        values, had_values = ({name: held.value() for name, held in each.objects.items()} for each in (new, old))
        assert values["optimizer.param_state_sharding_type"] == "fully_reshardable"
        assert values["content_metadata.distrib_optim_sharding_type"] == "fully_reshardable"
        assert values["args"].name == "argparse.Namespace"
        assert repr(values["args"].state["num_layers"]) == "2"
        assert values["args"].state["params_dtype"].name == "torch.bfloat16"
        for name, value in had_values.items():
            if name.startswith(("optimizer.param_groups.", "opt_param_scheduler.", "iteration", "checkpoint_version")):
                assert values[name] == value


KINDS = {
    "param": ("optimizer.state.", ".master"),
    "exp_avg": ("optimizer.state.", ".exp_avg"),
    "exp_avg_sq": ("optimizer.state.", ".exp_avg_sq"),
    "step": ("optimizer.state.", ".step"),
}
OLD = {"param": "fp32_param"}


@dataclass
class Made:
    """A tensor to be written, as far as its name is concerned."""

    shape: tuple[int, ...]
    dtype: Dtype = DTYPES["float32"]


GROUPS = {"optim.param_groups.0.lr": 0.5, "optim.param_groups.0.params": ["w"], "iteration": 3}


def formed(kept: dict[str, Made], values: dict[str, Any]) -> Any:
    def number(_: str, made: Any) -> float:
        return float(made.shape[0]) if made.shape else 7.0

    return megatron_form(kept, values, number, kept, is_state=False)  # type: ignore[arg-type]


def test_a_float32_weight_is_its_own_master_copy_and_groups_get_megatrons_keys() -> None:
    kept = {"w": Made((2, 3)), "optim.state.w.exp_avg": Made((2, 3)), "optim.state.w.step": Made(())}
    found = formed(kept, GROUPS | {"rng": object()})
    assert found.names == {
        "w": "w",
        "optimizer.state.exp_avg.w": "optim.state.w.exp_avg",
        "optimizer.state.param.w": "w",
    }
    assert found.values == set(GROUPS)


def test_a_group_of_matrices_and_vectors_becomes_two() -> None:
    """Megatron finds groups by `wd_mult` and whether they are of experts; two that are alike are one of its own."""
    shapes: dict[str, tuple[int, ...]] = {"w": (2, 3), "b": (2,), "c.bias": (2, 2), "layers.mlp.experts.x": (4, 2, 3)}
    kept = {name: Made(shape) for name, shape in shapes.items()}
    kept |= {f"optim.state.{name}.exp_avg": Made(shape) for name, shape in shapes.items()}
    values = {
        "optim.param_groups.0.params": ["w", "b"],
        "optim.param_groups.0.weight_decay": 0.25,
        "optim.param_groups.1.params": ["c.bias", "layers.mlp.experts.x"],
        "optim.param_groups.1.weight_decay": 0.25,
    }
    found = formed(kept, values)
    assert [text.partition(", for which")[0] for text in found.doubts] == [
        "group 0 of the optimizer has a weight decay of 0.25, and 1 of its 2 parameters are vectors or biases",
        "group 1 of the optimizer has a weight decay of 0.25, and 1 of its 2 parameters are vectors or biases",
    ]
    with zipfile.ZipFile(io.BytesIO(found.beside["common.pt"])) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        groups = pickle.loads(archive.read(name))["optimizer"]["optimizer"]["param_groups"]
    keys = [(group["wd_mult"], group["is_expert_parallel"], group["weight_decay"]) for group in groups]
    assert keys == [(1.0, False, 0.25), (0.0, False, 0.25), (1.0, True, 0.25), (0.0, True, 0.25)]


@pytest.mark.parametrize(
    ("kept", "values", "message"),
    [
        ({"optim.state.w.exp_avg": Made((2, 3))}, GROUPS, "'optim.state.w.exp_avg' has no weight"),
        (
            {"w": Made((2, 3), DTYPES["bfloat16"]), "optim.state.w.exp_avg": Made((2, 3))},
            GROUPS,
            "'w' is bfloat16 and has states of an optimizer but no master copy",
        ),
        (
            {name: Made((2,)) for name in ("v", "w")}
            | {"optim.state.v.exp_avg": Made((2,)), "optim.state.w.exp_avg": Made((2,))}
            | {"optim.state.v.step": Made((5,)), "optim.state.w.step": Made((6,))},
            GROUPS,
            "'optim.state.v.step' is 5 and 'optim.state.w.step' is 6, but Megatron has one number of steps",
        ),
        ({"w": Made((2, 3)), "optim.state.w.exp_avg": Made((2, 3))}, {}, "no values optimizer.param_groups.0.lr"),
        (
            {name: Made((2, 3)) for name in ("v", "w", "optim.state.v.exp_avg", "optim.state.w.exp_avg")},
            GROUPS | {"optim.param_groups.1.lr": 0.25, "optim.param_groups.1.params": ["v"]},
            "groups 0 and 1 of the optimizer differ in lr, but Megatron cannot tell them apart",
        ),
    ],
)
def test_what_megatrons_optimizer_cannot_have_is_refused(
    kept: dict[str, Made], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(sw.LayoutError, match=message):
        formed(kept, values)


def test_states_can_be_left_out_and_arrays_are_resharded(tmp_path: Path) -> None:
    source = unpacked("dp_zero_gather_scatter", tmp_path)
    sw.reshard_checkpoint(source, tmp_path / "weights", to="megatron", drop="^optimizer")
    with sw.open_checkpoint(tmp_path / "weights") as checkpoint:
        assert not [name for name in (*checkpoint, *checkpoint.objects) if name.startswith("optimizer")]
    with pytest.raises(sw.LayoutError, match="save them as 'dcp', and reshard that"):
        sw.save_checkpoint(tmp_path / "a", {"w": ones(2)}, to="megatron")
    sw.save_checkpoint(tmp_path / "a", {"w": ones(2)}, to="dcp")
    sw.reshard_checkpoint(tmp_path / "a", tmp_path / "b", to="megatron")
    with sw.open_checkpoint(tmp_path / "b") as checkpoint:
        assert checkpoint.format == "megatron"
        assert np.array_equal(checkpoint.read("w"), ones(2))
        assert checkpoint.objects["checkpoint_version"].value() == 3


def test_states_that_are_not_those_of_the_weights_are_not_read(tmp_path: Path) -> None:
    """As Megatron-Core 0.16.1 writes them where buckets have padding: from some parameter on, elements further on."""
    made = tmp_path / "made"
    sw.reshard_checkpoint(unpacked("dp_zero_gather_scatter", tmp_path), made, to="megatron")
    key = "decoder.layers.self_attention.linear_qkv.weight"
    with sw.open_checkpoint(made) as checkpoint:
        (piece,) = checkpoint[f"optimizer.state.param.{key}"].pieces
        extent, expected = piece.extent(), checkpoint.read(key)
        path, size = Path(extent.holder.path), checkpoint[f"optimizer.state.param.{key}"].nbytes
    data = bytearray(path.read_bytes())
    elements = data[extent.offset : extent.offset + size]
    data[extent.offset : extent.offset + size] = elements[4 * 64 :] + elements[: 4 * 64]
    path.write_bytes(data)
    with sw.open_checkpoint(made) as checkpoint:
        assert checkpoint.read(key).tobytes() == expected.tobytes()
        assert set(checkpoint.unreadable) == {
            f"optimizer.state.{kind}.{name}" for name in checkpoint for kind in ("param", "exp_avg", "exp_avg_sq")
        }
        with pytest.raises(
            sw.ParseError, match=f"optimizer.state.param.{key}.*and the weight has .* fully_reshardable"
        ):
            checkpoint[f"optimizer.state.exp_avg.{key}"]
    with pytest.raises(sw.ParseError, match="and the weight has"):
        sw.reshard_checkpoint(made, tmp_path / "again", to="megatron")


def test_layers_get_the_states_for_which_megatron_asks(tmp_path: Path) -> None:
    """As `sharded_state_dict` of Megatron-Core's local layers has them, by hand, and those of Transformer Engine."""
    shapes = {
        "decoder.layers.self_attention.linear_qkv.weight": (2, 6, 4),
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (2, 4),
        "decoder.layers.self_attention.linear_proj.weight": (2, 4, 4),
        "decoder.layers.mlp.experts.experts.linear_fc1.weight": (2, 3, 4, 4),
        "decoder.layers.5.mlp.experts.experts.linear_fc2.weight": (3, 4, 4),
        "decoder.layers.5.mlp.router.weight": (3, 4),
        "decoder.final_layernorm.weight": (4,),
        "embedding.word_embeddings.weight": (8, 4),
        "output_layer.weight": (8, 4),
    }
    sw.save_checkpoint(tmp_path / "made", {name: np.ones(shape, "f4") for name, shape in shapes.items()}, sync=False)
    sw.reshard_checkpoint(tmp_path / "made", tmp_path / "megatron", to="megatron", sync=False)
    layer, attention = "decoder.layers.", "decoder.layers.self_attention."
    expected = {
        f"{attention}{name}._extra_state/shard_{at}_2"
        for name in ("linear_qkv", "linear_proj", "core_attention")
        for at in range(2)
    }
    fc = "mlp.experts.experts.linear_fc"
    expected |= {f"{layer}{fc}1._extra_state/shard_{at}.{e}_2.3" for at in range(2) for e in range(3)}
    expected |= {f"{layer}5.{fc}2._extra_state/shard_{e}_3" for e in range(3)}
    expected |= {"decoder.final_layernorm._extra_state/shard_0_1"}
    with sw.open_checkpoint(tmp_path / "megatron") as checkpoint:
        states = {name: held.value() for name, held in checkpoint.objects.items() if "_extra_state" in name}
    assert states == {name: [None] for name in expected}
    # Those of a source are copied, and no others are made.
    sw.reshard_checkpoint(tmp_path / "megatron", tmp_path / "fewer", to="megatron", drop="qkv._extra", sync=False)
    with sw.open_checkpoint(tmp_path / "fewer") as checkpoint:
        assert {name for name in checkpoint.objects if "_extra_state" in name} == {
            name for name in expected if "qkv" not in name
        }
    sw.reshard_checkpoint(tmp_path / "made", tmp_path / "dcp", to="dcp", sync=False)
    with sw.open_checkpoint(tmp_path / "dcp") as checkpoint:
        assert not checkpoint.objects


def test_only_files_of_the_source_are_said_to_be_copied_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron's own `metadata.json` is made."""
    source = unpacked("core014_fully_sharded_model_space_tp", tmp_path)
    assert main(["reshard", str(source), str(tmp_path / "made"), "--to", "megatron"]) == 0
    assert (tmp_path / "made" / "metadata.json").is_file()
    assert "copied along" not in capsys.readouterr().out
