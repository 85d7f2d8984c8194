"""Checkpoints that the frameworks wrote, read bit for bit as their `expected.json` has them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from shardwise.store import learn_rewrites
from tests.store.real import CASES, DATA, expected


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_read_bit_for_bit(case: str) -> None:
    with sw.open_checkpoint(DATA / case) as checkpoint:
        assert checkpoint.format == CASES[case][1]
        for name, array in expected(case).items():
            tensor = checkpoint[name]
            assert (tensor.name, tensor.dtype, tensor.shape) == (name, array.dtype.name, array.shape)
            assert (tensor.nbytes, tensor.size, tensor.ndim) == (array.nbytes, array.size, array.ndim)
            read = checkpoint.read(name)
            assert read.dtype == array.dtype
            assert read.tobytes() == array.tobytes()
            out = np.empty_like(array)
            assert tensor.read(out=out) is out
            assert out.tobytes() == array.tobytes()
            assert np.asarray(tensor).tobytes() == array.tobytes()


@pytest.mark.parametrize("case", CASES)
def test_the_pieces_tile_each_tensor_and_hold_their_boxes(case: str) -> None:
    arrays = expected(case)
    with sw.open_checkpoint(DATA / case) as checkpoint:
        for name, tensor in checkpoint.items():
            tensor.tiling.check()
            assert tensor.tiling.shape == tensor.shape
            assert tensor.boxes.shape == (len(tensor.pieces), tensor.ndim, 2)
            for position, piece in enumerate(tensor.pieces):
                assert piece.path.is_file()
                assert np.array_equal(
                    np.array([(side.start, side.stop) for side in piece.box], int).reshape(-1, 2),
                    tensor.boxes[position],
                )
                if name not in arrays:
                    continue
                part = arrays[name][piece.box]
                if piece.is_addressable:
                    _, file, start, strides = piece.extent()
                    whole = np.frombuffer(Path(str(piece.path)).read_bytes(), np.uint8)
                    assert file.path == piece.path
                    found = np.ndarray(part.shape, part.dtype, whole.data, start, strides)
                else:
                    found = piece.decode()
                assert found.tobytes() == part.tobytes()


@pytest.mark.heavy
@settings(max_examples=60, deadline=None)
@given(data=st.data(), case=st.sampled_from(sorted(CASES)))
def test_any_box_is_what_slicing_gives(data: st.DataObject, case: str) -> None:
    arrays = expected(case)
    name = data.draw(st.sampled_from(sorted(arrays)))
    array = arrays[name]
    box = []
    for size in array.shape:
        start = data.draw(st.integers(0, size))
        box.append(slice(start, data.draw(st.integers(start, size))))
    with sw.open_checkpoint(DATA / case) as checkpoint:
        assert checkpoint.read(name, tuple(box)).tobytes() == array[tuple(box)].tobytes()


def test_arrays_without_a_copy_where_the_form_allows_it() -> None:
    for case in ("torch/plain.pt", "orbax_keras/keras/m.weights.h5", "torch/dcp", "torch/fsdp2"):
        checkpoint = sw.open_checkpoint(DATA / case)
        whole = 0
        for name, array in expected(case).items():
            tensor = checkpoint[name]
            if len(tensor.pieces) > 1:
                with pytest.raises(ValueError, match=r"lies in \d pieces.*read it"):
                    tensor.array()
                continue
            view = tensor.array()
            whole += 1
            assert view.tobytes() == array.tobytes()
            assert not view.flags.writeable
            assert view.size == 0 or np.shares_memory(view, tensor.array())
        assert whole > 1
        checkpoint.close()
    with sw.open_checkpoint(DATA / "orbax_keras/orbax_zarr2") as checkpoint:
        with pytest.raises(ValueError, match="is compressed"):
            checkpoint["counts"].array()
        with pytest.raises(ValueError, match="compressed; decode"):
            checkpoint["counts"].pieces[0].extent()


def test_tied_and_strided_tensors_of_one_storage() -> None:
    embed = expected("torch/plain.pt")["embed.weight"]
    with sw.open_checkpoint(DATA / "torch/plain.pt") as checkpoint:
        assert [checkpoint[name].alias_of for name in ("embed.weight", "tied", "transposed", "slice")] == [
            None, "embed.weight", "embed.weight", "embed.weight",
        ]  # fmt: skip
        assert checkpoint.read("tied").tobytes() == embed.tobytes()
        assert checkpoint.read("transposed").tobytes() == embed.T.tobytes()
        assert checkpoint.read("transposed", (slice(2, 5), slice(7, 30))).tobytes() == embed.T[2:5, 7:30].tobytes()
        assert checkpoint.read("slice").tobytes() == embed[3:9, 2:5].tobytes()
        assert checkpoint["transposed"].array().strides == embed.T.strides


def test_what_is_not_a_tensor() -> None:
    with sw.open_checkpoint(DATA / "torch/dcp") as checkpoint:
        assert {name: held.value() for name, held in checkpoint.objects.items()} == {"optim.lr": 0.1, "step": 7}
        assert checkpoint.read("optim.state.0").tolist() == [0, 1, 2]
        assert checkpoint.metadata["planner_data"]["optim.state.0"] == ("optim", "state", 0)
        assert checkpoint.metadata["version"] == "1.0.0"
    with sw.open_checkpoint(DATA / "megatron") as checkpoint:
        assert checkpoint.objects["iteration"].value() == 100
        assert checkpoint.metadata["megatron"]["sharded_backend"] == "torch_dist"
    with sw.open_checkpoint(DATA / "orbax_keras/orbax_manager") as checkpoint:
        assert (checkpoint.metadata["step"], checkpoint.metadata["items"]) == (100, ["state"])
    with sw.open_checkpoint(DATA / "orbax_keras/keras") as checkpoint:
        assert checkpoint.metadata["layers"]["layers/dense_1/vars"] == "b"


def test_replicas_are_noted() -> None:
    with sw.open_checkpoint(DATA / "torch/fsdp2") as checkpoint:
        # On a mesh of 2 by 2: placed [Replicate, Shard(0)], [Shard(0), Replicate], [Shard(1), Replicate]; plain.
        for name in ("layers.0.q_proj.weight", "layers.0.fp8", "counts"):
            tensor = checkpoint[name]
            assert (len(tensor.pieces), len(tensor.replicas)) == (2, 2)
            assert {repr(piece.box) for piece in tensor.replicas} == {repr(piece.box) for piece in tensor.pieces}
        assert (len(checkpoint["mask"].pieces), len(checkpoint["mask"].replicas)) == (1, 3)
        for piece in checkpoint["mask"].replicas:
            _, file, start, _ = piece.extent()
            assert file.read(start, 6) == checkpoint.read("mask").tobytes()


def test_no_framework_is_imported_and_no_class_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    real = builtins.__import__

    def watched(name: str, *args: Any, **kwargs: Any) -> Any:
        assert name.partition(".")[0] not in ("torch", "jax", "keras", "tensorflow", "pickle", "orbax"), name
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", watched)
    for case in CASES:
        with sw.open_checkpoint(DATA / case) as checkpoint:
            for name in checkpoint:
                checkpoint.read(name)


@pytest.mark.parametrize("case", CASES)
def test_a_closed_checkpoint_says_so(case: str) -> None:
    checkpoint = sw.open_checkpoint(DATA / case)
    name = next(iter(expected(case)))
    tensor, shape = checkpoint[name], checkpoint[name].shape
    checkpoint.close()
    checkpoint.close()
    assert (len(checkpoint) > 0, checkpoint[name].shape) == (True, shape)
    with pytest.raises(ValueError, match="closed"):
        checkpoint.read(name)
    with pytest.raises(ValueError, match="closed"):
        tensor.read()


def copied(case: str, folder: Path) -> Path:
    """A copy that a test may damage."""
    source = DATA / case
    return Path(shutil.copytree(source, folder / source.name) if source.is_dir() else shutil.copy(source, folder))


@pytest.mark.heavy
@pytest.mark.parametrize("case", [case for case in CASES if not case.endswith((".metadata", ".json"))])
def test_a_file_that_is_cut_short_is_an_error(case: str, tmp_path: Path) -> None:
    """Each file of each checkpoint, cut at some places: it is refused, or what is still there is right."""
    arrays = expected(case)
    root = copied(case, tmp_path)
    files = [root] if root.is_file() else sorted(file for file in root.rglob("*") if file.is_file())
    for file in files:
        data = file.read_bytes()
        for length in {0, 1, len(data) // 3, len(data) - 1} - {len(data)}:
            if "h5" in file.suffix and length < 4096:
                continue  # Left to libhdf5, which is not ours.
            file.write_bytes(data[:length])
            try:
                with sw.open_checkpoint(root) as checkpoint:
                    for name in checkpoint:
                        if name in arrays:
                            assert checkpoint.read(name).tobytes() == arrays[name].tobytes(), (file, length)
            except (sw.ShardwiseError, FileNotFoundError):
                pass
            file.write_bytes(data)


@pytest.mark.parametrize("case", [case for case in CASES if not case.endswith((".metadata", ".json", "keras"))])
def test_a_file_that_is_missing_is_an_error_or_was_not_needed(case: str, tmp_path: Path) -> None:
    arrays = expected(case)
    root = copied(case, tmp_path)
    for file in sorted(file for file in root.rglob("*") if file.is_file()):
        data = file.read_bytes()
        file.unlink()
        try:
            with sw.open_checkpoint(root) as checkpoint:
                read = {name: checkpoint.read(name).tobytes() for name in arrays}
            last_shard = "shard-00004-model" in file.name  # Of which no other file says anything.
            assert last_shard or read == {name: array.tobytes() for name, array in arrays.items()}, file
        except (sw.ShardwiseError, FileNotFoundError):
            pass
        except KeyError:
            assert "megatron" not in case
            assert file.name in (".zarray", "zarr.json", "_METADATA") or last_shard_of(file), file
        file.write_bytes(data)


def last_shard_of(file: Path) -> bool:
    return file.name.startswith("shard-00004")


def test_the_configuration_is_the_one_next_to_the_path_that_was_given(tmp_path: Path) -> None:
    """The root of a run of Megatron has a folder for each iteration, and the model's configuration beside them."""
    root, engine = tmp_path / "run", tmp_path / "engine.safetensors"
    shutil.copytree(DATA / "megatron", root)
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2, "hidden_size": 6}
    (root / "config.json").write_text(json.dumps(config))
    with sw.open_checkpoint(root) as checkpoint:
        assert (checkpoint.given, checkpoint.path) == (root, root / "iter_0000100")
        tensors = {name.removeprefix("decoder."): checkpoint.read(name) for name in checkpoint}
    for layer, qkv in enumerate(tensors.pop("layers.self_attention.linear_qkv.weight")):
        groups = qkv.reshape(2, 8, 6)
        for name, rows in {"q": slice(4), "k": slice(4, 6), "v": slice(6, 8)}.items():
            tensors[f"layers.{layer}.{name}"] = groups[:, rows].reshape(-1, 6)
    sw.save_checkpoint(engine, tensors)
    assert 'packed = "(groups [q:heads//groups*d k:d v:d])"' in learn_rewrites(root, engine).text
