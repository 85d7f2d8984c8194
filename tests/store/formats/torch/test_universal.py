"""DeepSpeed's universal folders: as DeepSpeed wrote them, by hand, in halves, and forged."""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.errors import ShardwiseWarning
from tests.checks import extracted, refused
from tests.store.formats.torch.test_deepspeed import check
from tests.store.real import DATA
from tests.store.torch_files import save, size, tensor

EXPECTED = json.loads((DATA / "deepspeed" / "expected.json").read_text())
W = np.arange(12, dtype=np.float32).reshape(3, 4)


def unpacked(case: str, folder: Path) -> Path:
    return extracted(DATA / "deepspeed" / f"{case}.tar.xz", folder) / "universal"


@pytest.mark.parametrize("case", EXPECTED)
def test_parameters_and_states_are_what_the_trainer_held(case: str, tmp_path: Path) -> None:
    """Of two tensor-parallel ranks, with a padded vocabulary; of stage 3, flat. The values were taken while it ran."""
    path = unpacked(case, tmp_path)
    (inside,) = path.glob("*_universal/zero")
    states = json.loads((DATA / "zero" / "expected.json").read_text())[case]
    for given in (path, inside.parent):
        with sw.open_checkpoint(given) as checkpoint:
            assert checkpoint.format == "universal"
            assert not checkpoint.unreadable
            names = set()
            for name, said in EXPECTED[case].items():
                for each in (name, *said["aliases"]):
                    read = checkpoint.read(each)
                    assert (read.dtype.name, list(read.shape)) == (said["dtype"], said["shape"])
                    assert read.tobytes().hex() == said["hex"], each
                    assert checkpoint[each].alias_of == (None if each == name else name)
                    names.add(each)
            for name, said in states.items():
                for kind, held in said["state"].items():
                    full = f"optimizer.state.{name}.{kind}"
                    check(checkpoint.read(full), held, full)
                    names.add(full)
                if said["state"]:
                    names.add(f"optimizer.state.{name}.step")
                    assert checkpoint.read(f"optimizer.state.{name}.step").tolist() == said["step"]
                    assert name in checkpoint.objects[f"optimizer.param_groups.{said['group']}.params"].value()
                else:  # Frozen: of stage 3 each rank has a part, in its own file.
                    check(checkpoint.read(name), said["weight"], name)
                    names.add(name)
            assert set(checkpoint) == names
            assert checkpoint.objects["optimizer.param_groups.1.lr"].value() == 0.005
            assert checkpoint.objects["consumed"].value() == 1234
            assert checkpoint.unread == ()


def test_a_part_of_a_frozen_parameter_that_is_missing_is_named(tmp_path: Path) -> None:
    path = unpacked("zero3_bf16", tmp_path)
    (one,) = path.glob("*/zero_pp_rank_1_mp_rank_00_model_states.pt")
    (other,) = path.glob("*/zero_pp_rank_0_mp_rank_00_model_states.pt")
    shutil.copy(one, other)
    with refused(sw.ParseError, "rank_0_mp_rank_00", "was saved as zero_pp_rank_1_mp_rank_00_model_states.pt"):
        sw.open_checkpoint(path)


def test_a_state_that_other_parameters_have_must_be_there(tmp_path: Path) -> None:
    path = unpacked("zero3_bf16", tmp_path)
    (file,) = path.glob("*/zero/model.norm.weight/exp_avg.pt")
    file.unlink()
    with refused(sw.ParseError, "model.norm.weight", "exp_avg.pt", "files are missing"):
        sw.open_checkpoint(path)


def test_a_step_that_other_parameters_have_must_be_there(tmp_path: Path) -> None:
    path = unpacked("zero2_tp", tmp_path)
    (file,) = path.glob("*/zero/model.norm.weight/step.pt")
    file.unlink()
    with refused(sw.ParseError, "model.norm.weight", "step.pt", "files are missing"):
        sw.open_checkpoint(path)


def weights(checkpoint: Any) -> list[str]:
    return [name for name in checkpoint if not name.startswith("optimizer.")]


def folder(at: Path, names: dict[str, Any], **said: Any) -> Path:
    """A universal folder by hand; with what is said of the model, also its file of model states."""
    for name, entry in names.items():
        (at / "zero" / name).mkdir(parents=True)
        for file, value in entry.items():
            (at / "zero" / name / f"{file}.pt").write_bytes(save(value))
    if said:
        states = {"param_shapes": [OrderedDict((name, size(3, 4)) for name in names)], **said}
        (at / "mp_rank_00_model_states.pt").write_bytes(save(states))
    return at


def held(array: np.ndarray = W, **said: Any) -> dict[str, Any]:
    return {"fp32": {"param": tensor(array, "0"), **said}, "exp_avg": {"param": tensor(array, "0")}}


def test_the_only_parameter_of_a_group_may_have_other_states_but_not_some_of_them(tmp_path: Path) -> None:
    shapes = {"param_shapes": [OrderedDict([("a", size(3, 4))]), OrderedDict([("b", size(3, 4))])]}
    moment = {"param": tensor(W, "0")}
    adam = {**held(), "exp_avg_sq": moment}
    muon = {"fp32": moment, "momentum_buffer": moment}
    with sw.open_checkpoint(folder(tmp_path / "both", {"a": adam, "b": muon}, **shapes)) as found:
        assert "optimizer.state.b.momentum_buffer" in found
    for absent in ("exp_avg", "exp_avg_sq"):
        some = {name: value for name, value in adam.items() if name != absent}
        path = folder(tmp_path / absent, {"a": adam, "b": some}, **shapes)
        with refused(sw.ParseError, f"b: has no {absent}.pt, which other parameters have: files are missing"):
            sw.open_checkpoint(path)


def test_a_buffer_and_a_frozen_parameter_keep_their_dtypes(tmp_path: Path) -> None:
    """The converter writes them as float32, also whole numbers, which it may round; the model's own are beside."""
    module = {"w": tensor(W.astype("f2"), "0"), "steps": tensor(np.array([2**24 + 1]), "1"), "tied": tensor(W, "2")}
    names = {"w": held(), "steps": {"fp32": {"param": tensor(np.array([2.0**24], np.float32), "0")}}}
    at = folder(tmp_path / "u", names, module=module, shared_params={"tied": "w"}, param_shapes=[{"w": size(3, 4)}])
    with sw.open_checkpoint(at) as checkpoint:
        assert checkpoint.read("steps").tolist() == [2**24 + 1]
        assert checkpoint["w"].dtype == "float32"
        assert checkpoint["tied"].alias_of == "w"
    with pytest.warns(ShardwiseWarning, match=r"no optimizer_state\.pt"):
        sw.reshard_checkpoint(at, tmp_path / "merged.safetensors")
    with sw.open_checkpoint(tmp_path / "merged.safetensors") as merged:
        states = ["optimizer.state.w.exp_avg", "optimizer.state.w.master"]
        assert sorted(merged) == [*states, "steps", "tied", "w"]


def test_one_file_alone_is_not_a_checkpoint_of_a_model(tmp_path: Path) -> None:
    """Of two model-parallel ranks, what the converter took from the first of them may be a part."""
    names = {"w": held(cat_dim=0), "head": {"fp32": {"param": tensor(W[:2], "0")}}}
    at = folder(tmp_path / "u", names, module={"head": tensor(W[:2], "0")}, param_shapes=[{"w": size(2, 4)}])
    shutil.copy(at / "mp_rank_00_model_states.pt", at / "mp_rank_01_model_states.pt")
    with sw.open_checkpoint(at) as checkpoint:
        assert weights(checkpoint) == ["w"]
        assert "nothing says how 2 model-parallel ranks cut it" in checkpoint.unreadable["head"]
    for file in at.glob("mp_rank_*"):
        file.unlink()
    with sw.open_checkpoint(at) as checkpoint:
        assert weights(checkpoint) == ["w"]
        assert "may be one rank's part" in checkpoint.unreadable["head"]


FLAT = {"fp32": tensor(W.ravel(), "0")}


@pytest.mark.parametrize(
    ("names", "said", "message"),
    [
        ({"b": held(), "w": {"exp_avg": {"param": tensor(W, "0")}}}, {}, "zero/w: has no fp32.pt: files are missing"),
        ({"w": held()}, {"param_shapes": [{"w": size(3, 4), "b": size(2)}]}, "has no folder 'b', a parameter"),
        ({"w": held()}, {"mp_world_size": 2}, r"of 1 of 2 ranks: files are missing"),
        ({"w": held()}, {"param_shapes": [{"w": size(3, 5)}]}, r"has the shape \(3, 4\); .*\(3, 5\)"),
        ({"w": FLAT}, {"param_shapes": [{"w": size(2**40, 2**40)}]}, r"over the limit|2\*\*63"),
        ({"w": FLAT}, {"param_shapes": [{"w": size(3, 5)}]}, r"has the shape \(12,\); .*\(3, 5\)"),
        ({"w": {"fp32": 3}}, {}, "holds no tensor"),
        ({"w": held()}, {"param_shapes": 3}, "has no list param_shapes"),
        ({"w": held()}, {"universal_checkpoint_info": {"universal_checkpoint_version": 0.5}}, "version 0.5"),
        ({"w": held()}, {"universal_checkpoint_info": {"universal_checkpoint_version": "x"}}, "version 'x'"),
        (
            {"w": held()},
            {"ds_config": {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}, "dp_world_size": 2},
            "takes wrong elements.*zero_to_fp32.py",
        ),
    ],
)  # fmt: skip
def test_halves_and_forgeries_are_refused(names: Any, said: dict[str, Any], message: str, tmp_path: Path) -> None:
    at = folder(tmp_path / "u", names, **said)
    with pytest.raises(sw.ParseError, match=message):
        sw.open_checkpoint(at)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (held(folded="rows"), "says 'folded' about its tensor, which is not a known key"),
        ({"fp32": tensor(W.ravel(), "0"), "step": 3}, r"no \*_model_states.pt next to zero says its whole shape"),
    ],
)
def test_what_a_parameter_is_must_be_known(entry: Any, message: str, tmp_path: Path) -> None:
    with sw.open_checkpoint(folder(tmp_path / "u", {"w": entry, "b": held()})) as checkpoint:
        assert weights(checkpoint) == ["b"]
        with pytest.raises(sw.ParseError, match=message):
            checkpoint["w"]


def test_interrupted_conversions_and_missing_ranks(tmp_path: Path) -> None:
    at = folder(tmp_path / "a", {"w": held()})
    (at / "tmp").mkdir()
    with refused(sw.ParseError, "the conversion was interrupted"):
        sw.open_checkpoint(at)
    path = unpacked("zero3_bf16", tmp_path)
    (one,) = path.glob("*/zero_pp_rank_2_mp_rank_00_model_states.pt")
    one.unlink()
    with refused(sw.ParseError, "which are not all ranks: some are missing"):
        sw.open_checkpoint(path)
    (zero,) = path.glob("*/zero")
    shutil.rmtree(zero)
    with refused(sw.ParseError, "has no folder zero"):
        sw.open_checkpoint(path)


def test_a_folder_without_the_files_of_what_is_not_trained_says_so(tmp_path: Path) -> None:
    with sw.open_checkpoint(folder(tmp_path / "u", {"w": held()})) as checkpoint:
        assert any("has no *_model_states.pt" in said for said in checkpoint.doubts)
    with sw.open_checkpoint(unpacked("zero3_bf16", tmp_path)) as checkpoint:
        assert not checkpoint.doubts


@pytest.mark.parametrize("name", ["../u", "/etc", "..", "", "gone", "a\0b", "x" * 900])
def test_the_last_folder_is_one_beside(name: str, tmp_path: Path) -> None:
    at = folder(tmp_path / "u", {"w": held()})
    (at.parent / "root").mkdir()
    (at.parent / "root" / "latest_universal").write_text(name)
    with pytest.raises((sw.ParseError, OSError), match=r"is not the name of a folder|does not exist|too long"):
        sw.open_checkpoint(at.parent / "root")
