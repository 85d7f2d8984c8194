"""Training states that Megatron-Core wrote: each state of each parameter is what the trainer had in memory."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

import shardwise as sw
from shardwise.store.data.parts import LEGACY

from ...checks import extracted, sha256_of

CASES = Path(__file__).parents[2] / "data" / "states" / "megatron"
NAMES = sorted(path.name for path in CASES.iterdir())


def unpacked(case: str, folder: Path) -> Path:
    return extracted(CASES / case / "checkpoint.tar.xz", folder) / "checkpoint"


def named(checkpoint: sw.StoredCheckpoint, key: str, kind: str) -> str:
    """The name of a state: by the key of its weight, or as the file has it."""
    files = ["param", "fp32_param"] if kind == "master" else [kind]
    names = [f"optimizer.state.{key}.{kind}", *(f"optimizer.state.{each}.{key}" for each in files)]
    (found,) = (name for name in names if name in checkpoint)
    return found


@pytest.mark.parametrize("case", NAMES)
def test_each_state_is_what_the_trainer_had(case: str, tmp_path: Path) -> None:
    expected = json.loads((CASES / case / "expected.json").read_text())
    with sw.open_checkpoint(unpacked(case, tmp_path)) as checkpoint:
        states = [name for name in checkpoint if name.startswith("optimizer.")]
        assert len(states) == (1 + len(next(iter(expected.values()))["state"])) * (len(checkpoint) - len(states))
        groups = [checkpoint.objects[f"optimizer.param_groups.{number}.params"].value() for number in (0, 1)]
        for said in expected.values():
            key, layer = said["key"]
            for name, wanted in [(key, said["weight"])] + [
                (named(checkpoint, key, kind), wanted) for kind, wanted in said["state"].items()
            ]:
                whole = checkpoint.read(name)
                array = whole if layer is None else whole[layer]
                assert list(array.shape) == said["shape"]
                assert sha256_of(array) == wanted
                for piece in checkpoint[name].replicas:
                    extent = piece.extent()
                    held = np.empty([stop - start for start, stop in piece.bounds], whole.dtype)
                    for index in np.ndindex(held.shape):
                        at = extent.offset + sum(i * step for i, step in zip(index, extent.strides, strict=True))
                        held[index] = np.frombuffer(extent.holder.read(at, held.itemsize), held.dtype)[0]
                    assert held.tobytes() == whole[piece.box].tobytes()
            assert checkpoint.read(named(checkpoint, key, "step")) == said["step"]
            assert [key in group for group in groups] == [said["group"] == 0, said["group"] == 1]


def test_what_is_saved_beside_tensors(tmp_path: Path) -> None:
    with sw.open_checkpoint(unpacked("dp_reshardable_pp_buckets", tmp_path)) as checkpoint:
        objects = {name: held.value() for name, held in checkpoint.objects.items()}
    assert objects["iteration"] == 2
    assert objects["opt_param_scheduler.num_steps"] == 2
    assert objects["args"].state["pipeline_model_parallel_size"] == 2
    assert objects["optimizer.param_groups.1.weight_decay"] == 0
    assert objects["optimizer.param_groups.0.betas"] == (0.9, 0.95)
    assert not any("per_bucket" in name or "dp_group_idx" in name for name in objects)


def changed(path: Path, old: bytes, new: bytes) -> None:
    """Write a file of torch.save anew, with other bytes in its pickle."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    found = 0
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            found += data.count(old) if name.endswith("data.pkl") else 0
            archive.writestr(name, data.replace(old, new) if name.endswith("data.pkl") else data)
    assert found == 1


def with_argument(file: Path, name: str, value: int) -> None:
    """Give an argument of Megatron's script another value, of one byte in the pickle."""
    with zipfile.ZipFile(file) as archive:
        pickle = archive.read(next(each for each in archive.namelist() if each.endswith("data.pkl")))
    start = pickle.index(b"X" + len(name).to_bytes(4, "little") + name.encode())
    at = pickle.index(b"K", start)
    changed(file, pickle[start : at + 2], pickle[start:at] + b"K" + bytes([value]))


@pytest.mark.parametrize(
    ("name", "new", "message"),
    [
        ("world_size", 8, "part of a bucket of model-parallel rank 1, but according to the args in common.pt"),
        ("tensor_model_parallel_size", 2, r"states of 2 model-parallel ranks.*common\.pt says that there are 2 x 2"),
        ("world_size", 5, "world_size is 5, which is not a multiple"),
    ],
)
def test_buckets_of_another_world(name: str, new: int, message: str, tmp_path: Path) -> None:
    root = unpacked("dp_reshardable_pp_buckets", tmp_path)
    with_argument(root / "iter_0000002" / "common.pt", name, new)
    with pytest.raises(sw.ParseError, match=message):
        sw.open_checkpoint(root)


def test_buckets_of_other_data_parallel_ranks(tmp_path: Path) -> None:
    """On one stage a world of any size is possible, and only the edges of pieces tell: of 2816 elements in 4 parts."""
    root = unpacked("dp_zero_gather_scatter", tmp_path / "one")
    with_argument(root / "iter_0000002" / "common.pt", "world_size", 6)
    sw.open_checkpoint(root).close()
    root = unpacked("dp_reshardable_tp", tmp_path / "two")
    with_argument(root / "iter_0000002" / "common.pt", "world_size", 8)
    with pytest.raises(sw.ParseError, match="no piece that begins or ends at element 2112, unlike the parameters of 4"):
        sw.open_checkpoint(root)


@pytest.mark.parametrize("case", ["dp_reshardable_pp_buckets", "dp_zero_gather_scatter"])
def test_buckets_of_another_checkpoint(case: str, tmp_path: Path) -> None:
    """A master copy that is not the weight, rounded: the file with it, or the weight, is another checkpoint's."""
    root = unpacked(case, tmp_path)
    with sw.open_checkpoint(root) as checkpoint:
        (piece,) = checkpoint["embedding.word_embeddings.weight"].pieces
        extent = piece.extent()
        path, offset = Path(extent.holder.path), extent.offset
    with path.open("r+b") as stream:
        stream.seek(offset + 2)
        stream.write(b"\x00\x41")
    with pytest.raises(sw.ParseError, match=r"the master copy of 'embedding.word_embeddings.weight'.*begins with"):
        sw.open_checkpoint(root)


def test_weights_are_read_where_states_cannot_be_placed(tmp_path: Path) -> None:
    root = unpacked("dp_reshardable_pp_buckets", tmp_path)
    file = root / "iter_0000002" / "common.pt"
    changed(file, b"untie_embeddings_and_output_weightsq", b"untie_embeddings_and_output_heightsq")
    with sw.open_checkpoint(root) as checkpoint:
        assert checkpoint.read("decoder.final_layernorm.weight").shape == (16,)
        assert not [name for name in checkpoint if name.startswith("optimizer.")]
        assert len(checkpoint.unreadable) == 3 * 6
        for name, why in checkpoint.unreadable.items():
            assert "do not fill buckets" in why
            assert "--dist-ckpt-optim-fully-reshardable" in why
            with pytest.raises(sw.ParseError, match="do not fill buckets"):
                checkpoint[name]


def iteration(root: Path) -> Path:
    return root / "iter_0000002"


def test_what_is_common_must_be_there(tmp_path: Path) -> None:
    root = unpacked("dp_reshardable_pp_buckets", tmp_path)
    (iteration(root) / "common.pt").unlink()
    with pytest.raises(sw.ParseError, match=r"iter_0000002.*has no common\.pt"):
        sw.open_checkpoint(root)


def test_folders_of_ranks_that_are_incomplete_or_mixed(tmp_path: Path) -> None:
    def refused(name: str, message: str) -> None:
        with pytest.raises(sw.ParseError, match=message):
            sw.open_checkpoint(tmp_path / name / "checkpoint")

    root = iteration(unpacked("legacy_tp_pp", tmp_path / "rank"))
    shutil.rmtree(root / "mp_rank_01_001")
    refused("rank", r"no folder is of rank \(1, 1\), but args in .*mp_rank_00_000.*pipeline_model_parallel_size 2")
    root = iteration(unpacked("legacy_tp_pp", tmp_path / "model"))
    (root / "mp_rank_01_001" / "model_optim_rng.pt").unlink()
    refused("model", r"mp_rank_01_001: has no model_optim_rng\.pt")
    root = iteration(unpacked("legacy_tp_pp", tmp_path / "optimizer"))
    (root / "mp_rank_01_000" / "distrib_optim.pt").unlink()
    refused("optimizer", r"mp_rank_01_000: has no distrib_optim\.pt, which other ranks have")
    root = iteration(unpacked("legacy_tp_pp", tmp_path / "sizes"))
    with_argument(root / "mp_rank_01_000" / "model_optim_rng.pt", "tensor_model_parallel_size", 1)
    refused(
        "sizes", r"mp_rank_01_000.*its tensor_model_parallel_size is 1, but in .*mp_rank_00_000.* it is 2: files of two"
    )
    root = iteration(unpacked("legacy_tp_pp", tmp_path / "layers"))
    for file in root.glob("*/model_optim_rng.pt"):
        with_argument(file, "num_layers", 3)
    refused("layers", "has 2 layers, but args in .* says that num_layers is 3")
    root = iteration(unpacked("legacy_tp_pp", tmp_path / "words"))
    for file in root.glob("*/model_optim_rng.pt"):
        with_argument(file, "padded_vocab_size", 56)
    refused(
        "words",
        r"mp_rank_00_0.*'embedding.word_embeddings.weight' has 14 rows on one .*, but according to args the whole has",
    )


def test_an_optimizer_of_another_rank_is_refused(tmp_path: Path) -> None:
    """Both have as many elements: only the master copies tell that one belongs to the other half of each weight."""
    root = iteration(unpacked("legacy_tp_pp", tmp_path))
    shutil.copy(root / "mp_rank_01_000" / "distrib_optim.pt", root / "mp_rank_00_000" / "distrib_optim.pt")
    with pytest.raises(sw.ParseError, match=r"mp_rank_00_000/distrib_optim\.pt: buffer 0.*the master copy of .*begins"):
        sw.open_checkpoint(root)
    shutil.copy(root / "mp_rank_01_001" / "distrib_optim.pt", root / "mp_rank_00_000" / "distrib_optim.pt")
    with pytest.raises(sw.ParseError, match=r"has 1\d+ elements, but no buckets of its \d+ parameters have as many"):
        sw.open_checkpoint(root)


def test_a_name_whose_cut_is_unknown_is_refused_with_a_way_on(tmp_path: Path) -> None:
    root = iteration(unpacked("legacy_no_distributed_optimizer", tmp_path))
    for file in root.glob("*/model_optim_rng.pt"):
        changed(file, b"decoder.layers.0.mlp.linear_fc2.weightq", b"decoder.layers.0.mlp.linear_fc9.weightq")
    with pytest.raises(
        sw.ParseError, match=r"nothing says how 'decoder.layers.0.mlp.linear_fc9.weight' .* is cut over 2"
    ) as caught:
        sw.open_checkpoint(root)
    assert LEGACY in str(caught.value)


def test_numbers_of_parameters_follow_the_groups(tmp_path: Path) -> None:
    """Two arrays of one shape in another order are told by the master copies beside them."""
    root = iteration(unpacked("legacy_no_distributed_optimizer", tmp_path))
    with sw.open_checkpoint(root) as checkpoint:
        first, second = (
            checkpoint[f"optimizer.state.decoder.layers.{layer}.mlp.linear_fc1.weight.master"].pieces[0].extent()
            for layer in (0, 1)
        )
        path = Path(first.holder.path)
    data = bytearray(path.read_bytes())
    size = 10 * 16 * 4
    one, other = (slice(each.offset, each.offset + size) for each in (first, second))
    data[one], data[other] = data[other], data[one]
    path.write_bytes(data)
    with pytest.raises(sw.ParseError, match=r"mp_rank_00.*linear_fc1.*the optimizer's parameters are in another order"):
        sw.open_checkpoint(root)
