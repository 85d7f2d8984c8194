"""DeepSpeed's own folders: as it wrote them, by hand, in halves, mixed, and forged."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import shardwise as sw
from tests.checks import extracted
from tests.store.real import DATA
from tests.store.torch_files import Call, new, save, size, tensor

ZERO = DATA / "zero"
EXPECTED = json.loads((ZERO / "expected.json").read_text())
FLAT = [case for case in EXPECTED if (ZERO / f"{case}.tar.xz").exists()]
Array = np.ndarray[Any, Any]
#: Safetensors has no place for values.
VALUES = pytest.mark.filterwarnings("ignore:.*values are not written:shardwise.ShardwiseWarning")


def unpacked(case: str, folder: Path) -> Path:
    return extracted(ZERO / f"{case}.tar.xz", folder) / "checkpoint"


def check(array: Array, said: dict[str, Any], name: str) -> None:
    if array.dtype.name != said["dtype"]:  # Stage 3 has no weights but the masters.
        array = array.astype(getattr(ml_dtypes, said["dtype"]))
    assert list(array.shape) == said["shape"], name
    assert hashlib.sha256(array.tobytes()).hexdigest()[:16] == said["sha256"], name


@pytest.mark.parametrize("case", FLAT)
def test_parameters_and_states_are_what_the_trainer_held(case: str, tmp_path: Path) -> None:
    """Taken from the running trainer: tensor-parallel, in round-robin order, in sub-groups, with padding."""
    path = unpacked(case, tmp_path)
    (inside,) = path.glob("global_step*")
    for given in (path, inside):
        with sw.open_checkpoint(given) as checkpoint:
            assert checkpoint.format == "deepspeed"
            names = set()
            for name, said in EXPECTED[case].items():
                for each in (name, *said["aliases"]):
                    check(checkpoint.read(each), said["weight"], each)
                    assert checkpoint[each].alias_of == (None if each == name else name)
                    names.add(each)
                for kind, held in said["state"].items():
                    check(checkpoint.read(f"optimizer.state.{name}.{kind}"), held, f"{name}.{kind}")
                    names.add(f"optimizer.state.{name}.{kind}")
                if said["state"]:
                    names.add(f"optimizer.state.{name}.step")
                    step = checkpoint.read(f"optimizer.state.{name}.step")
                    assert (step.shape, step.dtype.name, float(step)) == ((), "float32", said["step"])
                    group = checkpoint.objects[f"optimizer.param_groups.{said['group']}.params"].value()
                    assert name in group
            assert set(checkpoint) == names
            assert checkpoint.objects["optimizer.param_groups.0.lr"].value() == 0.01
            assert checkpoint.objects["consumed"].value() == 1234
            assert checkpoint.metadata["ds_version"] == "0.19.8"


def test_states_of_stage_0_keep_their_numbers_where_names_are_not_certain(tmp_path: Path) -> None:
    """Two parameters of one shape in one group, and a third of it that is in none: which two is not said."""
    three = {name: tensor(numbers(3), f"{at}") for at, name in enumerate("abc")}
    state = {number: {"exp_avg": tensor(numbers(3), "9"), "step": 4} for number in (0, 1)}
    optimizer: dict[str, Any] = {"state": state, "param_groups": [{"lr": 0.5, "params": [0, 1]}]}
    said: dict[str, Any] = {"module": three, "optimizer": optimizer}
    (tmp_path / "mp_rank_00_model_states.pt").write_bytes(save(said))
    with sw.open_checkpoint(tmp_path) as checkpoint:
        assert "optimizer.state.1.exp_avg" in checkpoint
        assert checkpoint.objects["optimizer.param_groups.0.params"].value() == [0, 1]
        (doubt,) = checkpoint.doubts
        assert "keep their numbers" in doubt
    (tmp_path / "mp_rank_00_model_states.pt").write_bytes(save({**said, "buffer_names": ["a", ["b"]]}))
    with sw.open_checkpoint(tmp_path) as checkpoint:  # The file says which is no parameter.
        assert checkpoint.objects["optimizer.param_groups.0.params"].value() == ["b", "c"]
        assert not checkpoint.doubts
    three.pop("c")
    (tmp_path / "mp_rank_00_model_states.pt").write_bytes(save(said))
    with sw.open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.read("optimizer.state.b.exp_avg").tolist() == [0, 1, 2]
        assert checkpoint.read("optimizer.state.b.step").tolist() == 4
        assert checkpoint.objects["optimizer.param_groups.0.params"].value() == ["a", "b"]
        assert not checkpoint.doubts
    flat = {"optimizer_state_dict": optimizer, "fp32_groups_flat": [tensor(numbers(6), "7")], "cur_iter": 4}
    (tmp_path / "mp_rank_00_model_states.pt").write_bytes(save({**said, "optimizer": flat}))
    with sw.open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.objects["optimizer.cur_iter"].value() == 4
        assert "which parameters are in it" in checkpoint.unreadable["optimizer.fp32_groups_flat"]


def test_masters_are_the_weights_of_stage_3(tmp_path: Path) -> None:
    path = unpacked("zero3_fp32_sub_groups", tmp_path)
    with sw.open_checkpoint(path) as checkpoint:
        assert checkpoint["optimizer.state.model.norm.weight.master"].alias_of == "model.norm.weight"
        assert checkpoint["lm_head.weight"].alias_of == "model.embed_tokens.weight"


@VALUES
@pytest.mark.parametrize("case", FLAT)
def test_it_is_resharded_and_proven(case: str, tmp_path: Path) -> None:
    path = unpacked(case, tmp_path)
    sw.verify_checkpoint(path)
    sw.reshard_checkpoint(path, tmp_path / "whole.safetensors", memory=2**20)
    with sw.open_checkpoint(path) as ours, sw.open_checkpoint(tmp_path / "whole.safetensors") as made:
        assert set(made) == set(ours)
        for name in ours:
            assert made.read(name).tobytes() == ours.read(name).tobytes(), name


def _only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(f"*/{pattern}")
    return found


def _resaved(path: Path, edit: Callable[[str, bytes], bytes] = lambda name, data: data, root: str = "archive") -> None:
    """The same file as if it had been saved to a stream, with other bytes."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(f"{root}/{name.partition('/')[2]}", edit(name, data))


def _cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-99])


def _stepped(name: str, data: bytes) -> bytes:
    return struct.pack("<f", 7.0) if data == struct.pack("<f", 2.0) else data


def _without(pattern: str) -> Callable[[Path], None]:
    def spoil(at: Path) -> None:
        for file in list(at.glob(f"*/{pattern}")):
            file.unlink()

    return spoil


def _copied(one: str, other: str, *, is_stream: bool = True) -> Callable[[Path], None]:
    """One rank's files also as another's; of a stream, no name is in them."""

    def spoil(at: Path) -> None:
        for file in list(at.glob(f"*/*{one}*")):
            made = file.with_name(file.name.replace(one, other))
            shutil.copy(file, made)
            if is_stream:
                _resaved(made)

    return spoil


HALVES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "a rank's optimizer": (
        "zero2_tp",
        _without("*rank_0_mp_rank_01_optim*"),
        r"no \*zero_pp_rank_0_mp_rank_01_optim_states\.pt: files are missing",
    ),
    "the last rank's": (
        "zero2_bf16_round_robin",
        _without("*rank_3_*optim*"),
        "files of 3 data-parallel ranks; mp_rank_00_model_states.pt is of 4",
    ),
    "a model-parallel rank": ("zero2_tp", _without("*mp_rank_01*"), "files of 1 of 2 model-parallel ranks"),
    "a model of stage 3": (
        "zero3_fp32_sub_groups",
        _without("*rank_1_*model*"),
        r"no \*zero_pp_rank_1_mp_rank_00_model_states\.pt",
    ),
    "all models": ("zero2_tp", _without("*model*"), r"no \*_model_states\.pt: files are missing"),
    "swapped": (
        "zero3_fp32_sub_groups",
        _copied("rank_1_mp", "rank_2_mp", is_stream=False),
        "rank_2_.* was saved as zero_pp_rank_1_mp_rank_00_.*_states.pt: it is the file of another rank",
    ),
    "swapped, with padding": (
        "zero1_bf16_optimizer",
        _copied("rank_0_mp", "rank_1_mp"),
        "rank_1_.*has 60 elements of group 1 and .* param_shapes the group has 119.* not the partitions of 2 ranks",
    ),
    "swapped, in round-robin order": (
        "zero2_bf16_round_robin",
        _copied("rank_2_mp", "rank_1_mp"),
        "rank_1_.*param_slice_mappings has .* it is the file of another rank",
    ),
    "another step": (
        "zero2_bf16_round_robin",
        lambda at: _resaved(_only(at, "*rank_2_*optim*"), _stepped),
        "rank_2_.*step is 7.0, but 2.0 in .*rank_0_.*: the files are of different steps",
    ),
    "another world": (
        "zero3_fp32_sub_groups",
        _copied("rank_2_mp", "rank_3_mp"),
        "files of 4 data-parallel ranks; .* is of 3",
    ),
    "another prefix": ("zero2_bf16_round_robin", _copied("bf16_zero_pp_rank_1", "zero_pp_rank_1"), "files of one rank"),
    "cut off": (
        "zero2_tp",
        lambda at: _cut_off(_only(at, "*rank_0_mp_rank_01_optim*")),
        "rank_0_mp_rank_01_optim_states.pt",
    ),
    "a pipeline's": (
        "zero2_tp",
        lambda at: (at / "global_step2" / "layer_00-model_00-model_states.pt").touch(),
        "the layers of a pipeline, or the experts of an old version",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HALVES)
def test_halves_and_mixtures_are_refused_and_name_the_file(case: str, tmp_path: Path) -> None:
    of, spoil, message = HALVES[case]
    path = unpacked(of, tmp_path)
    spoil(path)
    with pytest.raises(sw.ParseError, match=message):
        sw.open_checkpoint(path)


def fragments(spans: dict[str, tuple[int, int]]) -> OrderedDict[str, Call]:
    module = "deepspeed.utils.tensor_fragment"
    return OrderedDict(
        (name, new(module, "fragment_address", start=start, numel=count)) for name, (start, count) in spans.items()
    )


def written(
    at: Path, ranks: list[dict[str, Array]], info: Any = None, *, dp: int = 3, moments: Any = None, **said: Any
) -> Path:
    """A folder of stage 2 by hand: the masters of each model-parallel rank, cut among data-parallel ranks."""
    at.mkdir(parents=True)
    for mp, held in enumerate(ranks):
        whole = np.concatenate([array.ravel() for array in held.values()])
        part = -(-whole.size // (2 * dp)) * 2
        for rank in range(dp):
            own = whole[rank * part : (rank + 1) * part]
            state = {"step": 5, "exp_avg": tensor(own * 2, "1")} if moments is None else moments(own)
            optimizer = {
                "base_optimizer_state": {"state": {0: state}, "param_groups": [{"lr": 0.5, "params": [0]}]},
                "single_partition_of_fp32_groups": [tensor(own, "0")],
                "partition_count": [dp],
                "param_slice_mappings": None,
                **said.get("optimizer", {}),
            }
            name = f"zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt"
            (at / name).write_bytes(save({"optimizer_state_dict": optimizer}))
        model = {
            "module": {name: tensor(array, f"{i}") for i, (name, array) in enumerate(held.items())},
            "param_shapes": [OrderedDict((name, size(*array.shape)) for name, array in held.items())],
            "dp_world_size": dp,
            "mp_world_size": len(ranks),
            **({} if info is None else {"universal_checkpoint_info": info}),
            **said.get("model", {}),
        }
        (at / f"mp_rank_{mp:02d}_model_states.pt").write_bytes(save(model))
    return at


def numbers(*shape: int, first: int = 0) -> Array:
    return (np.arange(np.prod(shape, dtype=int), dtype=np.float32) + first).reshape(shape)


def affine(shape: tuple[int, ...], ranks: list[list[dict[str, Any]]], locals_: list[tuple[int, ...]]) -> dict[str, Any]:
    held = {
        str(rank): {"shard_shape": list(local), "pieces": pieces}
        for rank, (pieces, local) in enumerate(zip(ranks, locals_, strict=True))
    }
    return {"logical_shape": list(shape), "ranks": held}


A, B, QKV = numbers(7, 4), numbers(4, 6, first=100), numbers(8, 4, first=200)
NORM = numbers(5, first=300)


def cut_both() -> tuple[list[dict[str, Array]], dict[str, Array], dict[str, Any]]:
    """Two ranks whose partitions end elsewhere, as their shares are uneven; what both have is in different ranges."""
    vocab = np.concatenate([A, np.zeros((1, 4), np.float32)])
    gate = numbers(6, 2, first=400)
    fused = numbers(9, 2, first=500)
    ranks = [
        {
            "norm": NORM, "embed": vocab[:4], "b": B[:, :4], "gate": np.concatenate([gate[:2], gate[3:5]]),
            "fused": np.concatenate([fused[:2], fused[3:5], fused[6:7]]), "qkv": np.concatenate([QKV[:3], QKV[4:]]),
        },
        {
            "norm": NORM, "embed": vocab[4:], "b": B[:, 4:], "gate": np.concatenate([gate[2:3], gate[5:]]),
            "fused": np.concatenate([fused[2:3], fused[5:6], fused[7:]]), "qkv": np.concatenate([QKV[3:4], QKV[4:]]),
        },
    ]  # fmt: skip
    whole = {"norm": NORM, "embed": A, "b": B, "gate": gate, "fused": fused, "qkv": QKV}
    pieces = [
        [
            {"shape": [count, 4], "source": [first * 4, [4, 1]], "dest": [0, [4, 1]], "locations": [rank]},
            {"shape": [4, 4], "source": [16, [4, 1]], "dest": [count * 4, [4, 1]], "locations": [0, 1]},
        ]
        for rank, (first, count) in enumerate([(0, 3), (3, 1)])
    ]
    info = {
        "universal_checkpoint_version": 0.4,
        "tp_replicated_parameter_patterns": ["no.m$"],
        "parameter_with_row_parallelism_patterns": ["b$"],
        "vocabulary_parameter_patterns": ["embed"],
        "original_vocab_size": 7,
        "parameter_with_2_sub_params_cat_dim_0": ["gate"],
        "parameter_with_sub_params": [{"patterns": ["fused"], "shape": [(3, 3, 3), 2], "partition_dim": 0}],
        "sub_param_shard_widths": {"fused": [[2, 1], [2, 1], [1, 2]]},
        "affine_map": {"version": 1, "params": {"^qkv$": affine((8, 4), pieces, [(7, 4), (5, 4)])}},
    }
    return ranks, whole, info


@VALUES
@pytest.mark.parametrize("dp", [1, 2, 3, 5])
def test_the_cuts_of_tensor_parallel_ranks(dp: int, tmp_path: Path) -> None:
    ranks, whole, info = cut_both()
    at = written(tmp_path / "z", ranks, info, dp=dp)
    with sw.open_checkpoint(at) as checkpoint:
        for name, array in whole.items():
            for full, expected in (
                (name, array),
                (f"optimizer.state.{name}.master", array),
                (f"optimizer.state.{name}.exp_avg", array * 2),
            ):
                assert checkpoint.read(full).tolist() == expected.tolist(), full
            assert checkpoint.read(f"optimizer.state.{name}.step").tolist() == 5
        assert not checkpoint.unreadable
        assert len(checkpoint["optimizer.state.norm.exp_avg"].replicas) >= 1
    sw.verify_checkpoint(at)
    # What both ranks have is compared.
    (file,) = at.glob("zero_pp_rank_0_mp_rank_01_*")
    ranks[1]["norm"] = NORM + 1
    written(tmp_path / "other", ranks, info, dp=dp)
    shutil.copy(tmp_path / "other" / file.name, file)
    with pytest.raises(sw.ParseError, match=r"norm"):
        sw.reshard_checkpoint(at, tmp_path / "whole.safetensors")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "version": ({"universal_checkpoint_version": 0.5}, "universal_checkpoint_info is of version 0.5; up to 0.4"),
    "affine": ({"affine_map": {"version": 2, "params": {}}}, "affine_map is of version 2; 1 is known"),
    "experts": ({"expert_parameter_patterns": ["x"]}, "has expert_parameter_patterns: the experts of a mixture"),
    "nothing": ({}, r"save it once with engine.save_checkpoint\(..., client_state="),
    "not a pattern": ({"tp_replicated_parameter_patterns": ["("]}, "'\\(' is not a regular expression"),
    "for ever": ({"tp_replicated_parameter_patterns": [r"(a)\1"]}, "or its search may take for ever"),
    "a number": ({"tp_replicated_parameter_patterns": [3]}, "is not a list of regular expressions"),
    "rows": ({"vocabulary_parameter_patterns": ["w"]}, "original_vocab_size is None, which is not a size"),
    "dim 1": ({"parameter_with_row_parallelism_patterns": ["v"]}, "'v' should be cut in dim 1"),
    "two shapes": (
        {"tp_replicated_parameter_patterns": ["v"]},
        r"'w' should be cut in dim 0, but .* \(2, 4\), \(2, 3\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_said_of_cuts_must_be_known(case: str, tmp_path: Path) -> None:
    info, message = REFUSED[case]
    other = 3 if case == "two shapes" else 4
    ranks = [{"w": numbers(2, 4), "v": numbers(4)}, {"w": numbers(2, other), "v": numbers(4)}]
    with pytest.raises(sw.ParseError, match=message):
        sw.open_checkpoint(written(tmp_path / "z", ranks, info or None))


def _piece(**more: Any) -> dict[str, Any]:
    return {"shape": [2, 4], "source": [0, [4, 1]], "dest": [0, [4, 1]], "locations": [0], **more}


def _of_w(*pieces: list[dict[str, Any]]) -> dict[str, Any]:
    return {"affine_map": {"params": {"w": affine((4, 4), list(pieces), [(2, 4)] * 2)}}}


def _in_parts(version: float, *sizes: int) -> dict[str, Any]:
    said = {"patterns": ["w"], "shape": [sizes, 4], "partition_dim": 0}
    return {"universal_checkpoint_version": version, "parameter_with_sub_params": [said]}


UNREADABLE: dict[str, tuple[dict[str, Any], str]] = {
    "unsupported": (
        {"autotp_unsupported_parameter_patterns": {"^w$": "fused in a way of its own"}},
        r"autotp_unsupported_parameter_patterns names it \('fused in a way of its own'\)",
    ),
    "averaged": ({"parameter_to_average_patterns": ["w"]}, "values of their own, to be averaged"),
    "scaled": (
        _of_w([_piece(scale=0.5)], [_piece(source=[8, [4, 1]])]),
        "rank 0 holds it multiplied by 0.5",
    ),
    "strides": (
        _of_w([_piece(source=[0, [8, 1]])], [_piece(source=[4, [8, 1]])]),
        "strides with which a rank's elements are not boxes",
    ),
    "no widths": (
        _in_parts(0.4, 2, 2),
        "sub_param_shard_widths do not fit 2 ranks and 4 elements in dim 0",
    ),
    "uneven before 0.4": (
        _in_parts(0.3, 1, 3),
        "before version 0.4 nothing says",
    ),
    "two patterns": ({"vocabulary_parameter_patterns": ["w", "^w"]}, "several of vocabulary_parameter_patterns match"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_parameter_whose_cut_is_not_known_is_refused_with_its_states(case: str, tmp_path: Path) -> None:
    info, message = UNREADABLE[case]
    ranks = [{"w": numbers(2, 4), "v": numbers(4)}, {"w": numbers(2, 4), "v": numbers(4)}]
    with sw.open_checkpoint(written(tmp_path / "z", ranks, info)) as checkpoint:
        assert checkpoint.read("v").size == 8
        assert sorted(name for name in checkpoint if "v" not in name.split(".")) == ["optimizer.state.w.step"]
        for name in ("w", "optimizer.state.w.master", "optimizer.state.w.exp_avg"):
            with pytest.raises(sw.ParseError, match=message):
                checkpoint[name]


def _last(own: Array, **more: Any) -> dict[str, Any]:
    return {"exp_avg": tensor(own, "1"), **more}


FORGED: dict[str, tuple[dict[str, Any], str]] = {
    "shapes too large": (
        {"model": {"param_shapes": [OrderedDict(w=size(2**40, 2**40))]}}, r"has more than 2\*\*63 - 1 bytes"
    ),
    "another shape": ({"model": {"param_shapes": [OrderedDict(w=size(5, 4))]}}, "param_shapes the group has 20"),
    "others": ({"model": {"param_shapes": [OrderedDict(w=size(4, 6))]}}, r"has the shape \(6, 4\); .*\(4, 6\)"),
    "no shapes": ({"model": {"param_shapes": None}}, "has no list param_shapes"),
    "groups": ({"model": {"param_shapes": []}}, "has 1 master; param_shapes has 0 groups"),
    "world": ({"optimizer": {"partition_count": [4]}}, "is of 4 partitions; there are files of 3"),
    "experts": ({"model": {"num_experts": [8]}}, "the file of expert 0 of layer 0 is missing"),
    "experts forged": ({"model": {"num_experts": [1 << 62] * 9}}, "the file of expert 0 of layer 0 is missing"),
    "experts of no number": ({"model": {"num_experts": ["8"]}}, "num_experts is "),
    "AutoEP": ({"model": {"ds_autoep_layers": {"a": 1}}}, "is of AutoEP's mixture of experts"),
    "stages": ({"model": {"checkpoint_parallel_dimensions": {"pp_degree": 2}}}, "is of 2 pipeline stages"),
    "mics": ({"model": {"ds_config": {"zero_optimization": {"mics_shard_size": 2}}}}, "was trained with MiCS"),
    "another optimizer": ({"optimizer": {"single_partition_of_fp32_groups": None}}, "has neither"),
    "no module": ({"model": {"module": None}}, "has no module, whose tensors are in other files"),
    "a short moment": ({"moments": lambda own: _last(own[:-1])}, "exp_avg of group 0 has 7 elements; its master has 8"),
    "a moment of rows": ({"moments": lambda own: _last(own.reshape(2, -1))}, "must be flat"),
}  # fmt: skip


@pytest.mark.parametrize("case", FORGED)
def test_what_a_file_says_of_itself_must_fit(case: str, tmp_path: Path) -> None:
    said, message = FORGED[case]
    with pytest.raises(sw.ParseError, match=message):
        sw.open_checkpoint(written(tmp_path / "z", [{"w": numbers(6, 4)}], **said))


@pytest.mark.parametrize("is_elastic", [False, True])
def test_parameters_that_begin_at_multiples_of_16_bytes(is_elastic: bool, tmp_path: Path) -> None:
    """What lies between is in no tensor; an elastic file has a list of the states of groups."""
    held = {"a": numbers(5), "b": numbers(7, first=10), "c": numbers(2, 3, first=20)}
    flat = np.full(22, np.nan, np.float32)
    for begin, array in zip((0, 8, 16), held.values(), strict=True):
        flat[begin : begin + array.size] = array.ravel()
    for rank, part in enumerate((flat[:8], flat[8:16], flat[16:])):
        whole = np.concatenate([part, np.full(8 - part.size, np.nan, np.float32)])
        state = {"exp_avg": tensor((part if is_elastic else whole) * 2, "1")}
        groups = [{"lr": 0.5, "params": [0]}]
        optimizer = {
            "base_optimizer_state": [state] if is_elastic else {"state": {0: state}, "param_groups": groups},
            "base_optimizer_state_step": 6,
            "single_partition_of_fp32_groups": [tensor(part, "0")],
            "group_paddings": [8 - part.size],
            "param_alignment_paddings": [[3, 1, 0]],
            "partition_count": [3],
        }
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        (tmp_path / name).write_bytes(save({"optimizer_state_dict": optimizer}))
    model = {
        "module": {name: tensor(array, name) for name, array in held.items()},
        "param_shapes": [OrderedDict((name, size(*array.shape)) for name, array in held.items())],
        "dp_world_size": 3,
    }
    (tmp_path / "mp_rank_00_model_states.pt").write_bytes(save(model))
    with sw.open_checkpoint(tmp_path) as checkpoint:
        for name, array in held.items():
            assert checkpoint.read(f"optimizer.state.{name}.master").tolist() == array.tolist()
            assert checkpoint.read(f"optimizer.state.{name}.exp_avg").tolist() == (array * 2).tolist()
            assert checkpoint.read(f"optimizer.state.{name}.step").tolist() == 6
        assert ("optimizer.param_groups.0.lr" in checkpoint.objects) is not is_elastic


def test_the_step_is_where_the_optimizer_keeps_it(tmp_path: Path) -> None:
    """In its state, or once for all groups; a step that a float32 does not hold is an int64."""
    cases: list[tuple[Any, dict[str, Any], Any]] = [
        (lambda own: _last(own, step=2**24 + 1), {}, 2**24 + 1),
        (_last, {"base_optimizer_state_step": 4}, 4.0),
        (_last, {}, None),
    ]
    for number, (moments, more, expected) in enumerate(cases):
        at = written(tmp_path / f"{number}", [{"w": numbers(6, 4)}], moments=moments, optimizer=more)
        with sw.open_checkpoint(at) as checkpoint:
            name = "optimizer.state.w.step"
            assert (checkpoint.read(name).item() if name in checkpoint else None) == expected
            if expected is not None:
                assert checkpoint[name].dtype == ("int64" if expected > 2**24 else "float32")


def test_blocks_of_eight_bits_are_not_taken_apart(tmp_path: Path) -> None:
    def moments(own: Array) -> dict[str, Any]:
        return {"state1": tensor(own.astype(np.uint8), "1")}

    with sw.open_checkpoint(written(tmp_path / "z", [{"w": numbers(6, 4)}], moments=moments)) as checkpoint:
        with pytest.raises(sw.ParseError, match="is uint8, in blocks that cross the boundaries between parameters"):
            checkpoint["optimizer.state.w.state1"]
        assert sorted(checkpoint) == ["optimizer.state.w.master", "w"]


def test_values_of_ranks_that_differ_are_under_their_rank(tmp_path: Path) -> None:
    ranks = [{"v": numbers(4)}, {"v": numbers(4)}]
    info = {"tp_replicated_parameter_patterns": ["v"]}
    at = written(
        tmp_path / "z", ranks, info, model={"iteration": 3, "rng": {"cpu": tensor(numbers(2), "9"), "seed": 1}}
    )
    with sw.open_checkpoint(at) as checkpoint:
        assert checkpoint.objects["iteration"].value() == 3
        assert checkpoint.objects["rng.seed"].value() == 1
        assert not any(re.search(r"rank_", name) for name in checkpoint.objects)
        assert {name for name in checkpoint if name.startswith("rng")} == {"rng.cpu", "rng.rank_1.cpu"}


EXPERTS = "moe.deepspeed_moe.experts.deepspeed_experts"


@VALUES
@pytest.mark.parametrize("ways", [1, 2])
def test_a_mixture_of_experts(ways: int, tmp_path: Path) -> None:
    """Two experts on two ranks, with ZeRO 2: on both, or one on each, whose states no file tells apart."""
    path = unpacked(f"experts_ep{ways}", tmp_path)
    live = [np.load(path / f"live{rank}.npz") for rank in (0, 1)]
    with sw.open_checkpoint(path) as checkpoint:
        weights = {name for name in checkpoint if not checkpoint.training.is_state(name)}
        found = set()
        for rank, own in enumerate(live):
            for key in own.files:
                name, _, kind = key.partition("|")
                if kind == "weight":
                    name = name if ways == 1 else name.replace(f"{EXPERTS}.0", f"{EXPERTS}.{rank}")
                    assert checkpoint.read(name).tobytes() == own[key].tobytes()
                    found.add(name)
        assert found == weights
        assert len(weights) == 13
        if ways == 2:
            assert list(checkpoint.unreadable) == ["optimizer.state.experts"]
            assert set(checkpoint) == weights
        else:
            assert not checkpoint.unreadable
            for group in (0, 1):  # A flat array of each group, of which each rank has a half.
                for kind in ("master", "exp_avg", "exp_avg_sq"):
                    flat, at = np.concatenate([own[f"{group}|{kind}"] for own in live]), 0
                    for name in live[0][f"{group}|names"].tolist():
                        state = checkpoint.read(f"optimizer.state.{name}.{kind}")
                        assert state.tobytes() == flat[at : at + state.size].tobytes()
                        at += state.size
    if ways == 2:
        with pytest.raises(sw.ParseError, match="which = 'weights' takes the weights"):
            sw.reshard_checkpoint(path, tmp_path / "new", to="hf", sync=False)
        sw.reshard_checkpoint(path, tmp_path / "new", to="hf", which="weights", sync=False)
        with sw.open_checkpoint(tmp_path / "new") as checkpoint:
            assert set(checkpoint) == weights


def test_halves_of_a_mixture_of_experts(tmp_path: Path) -> None:
    (inside,) = unpacked("experts_ep1", tmp_path).glob("global_step*")
    one, other = (inside / f"layer_0_expert_{expert}_mp_rank_00_model_states.pt" for expert in (0, 1))
    kept = other.read_bytes()
    other.unlink()
    with pytest.raises(sw.ParseError, match="the file of expert 1 of layer 0 is missing"):
        sw.open_checkpoint(inside)
    shutil.copy(one, other)
    with pytest.raises(sw.ParseError, match="it is the file of another rank"):
        sw.open_checkpoint(inside)
    other.write_bytes(kept)
    (inside / "layer_0_expert_2_mp_rank_00_model_states.pt").write_bytes(kept)
    with pytest.raises(sw.ParseError, match=r"the file of another rank|the file of expert 2 of layer 0 is one more"):
        sw.open_checkpoint(inside)
    (inside / "layer_0_expert_2_mp_rank_00_model_states.pt").rename(
        inside / "layer_0_expert_0_mp_rank_01_model_states.pt"
    )
    with pytest.raises(sw.ParseError, match="experts that model-parallel ranks cut are not read"):
        sw.open_checkpoint(inside)
