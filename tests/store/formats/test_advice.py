"""What refusals of formats advise, followed: each way leads to the tensors."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.cli import main
from shardwise.cli import main as command
from shardwise.store.data.parts import BARE, LEGACY
from tests.checks import same_tensors

from ..torch_files import Call, Global, Storage, save, tensor

RANDOM = np.random.default_rng(0)
FULL = {
    "tok_embeddings.weight": RANDOM.random((32, 16), "f4"),
    "layers.0.attention.wq.weight": RANDOM.random((16, 16), "f4"),
    "layers.0.attention.wo.weight": RANDOM.random((16, 16), "f4"),
    "norm.weight": RANDOM.random(16, "f4"),
}
#: The dim that Meta's model parallelism cuts.
CUT = {"tok_embeddings.weight": 1, "layers.0.attention.wq.weight": 0, "layers.0.attention.wo.weight": 1}


def of_rank(rank: int, ranks: int = 2) -> dict[str, Any]:
    arrays = {n: np.split(a, ranks, CUT[n])[rank] if n in CUT else a for n, a in FULL.items()}
    return {name: tensor(np.ascontiguousarray(array), str(at)) for at, (name, array) in enumerate(arrays.items())}


def by_rules(files: list[Path], folder: Path, prefix: str = "") -> None:
    """The way of `BY_RULES`, as docs/coming-from.md shows it."""
    opened = [sw.open_checkpoint(file, part=True) for file in files]
    ranks = {f"rank.{rank}.{name}": each[name].array() for rank, each in enumerate(opened) for name in each}
    sw.save_checkpoint(folder / "ranks", ranks, to="hf")
    (folder / "rules.toml").write_text(f"""
        unmatched = "refuse"
        [[rewrite]]
        from = "rank.{{r}}.{prefix}layers.{{i}}.attention.wq.weight"
        to = {{ name = "layers.{{i}}.attention.wq.weight", dims = "(r rows) n -> rows n" }}
        [[rewrite]]
        from = "rank.{{r}}.{prefix}layers.{{i}}.attention.wo.weight"
        to = {{ name = "layers.{{i}}.attention.wo.weight", dims = "rows (r n) -> rows n" }}
        [[rewrite]]
        from = "rank.{{r}}.{prefix}tok_embeddings.weight"
        to = {{ name = "tok_embeddings.weight", dims = "rows (r n) -> rows n" }}
        [[rewrite]]
        from = {{ name = "rank.0.{prefix}norm.weight", also = ["rank.1.{prefix}norm.weight"] }}
        to = "norm.weight"
    """)
    sw.reshard_checkpoint(
        folder / "ranks", folder / "whole", rewrites=sw.Rewrites.from_toml(folder / "rules.toml"), to="hf"
    )
    same_tensors(folder / "whole", FULL)


def test_files_of_ranks_are_one_checkpoint_by_rules(tmp_path: Path) -> None:
    """Meta's form; the values are those that were cut."""
    meta = tmp_path / "meta"
    meta.mkdir()
    files = [meta / f"consolidated.0{rank}.pth" for rank in range(2)]
    for rank, file in enumerate(files):
        file.write_bytes(save(of_rank(rank)))
    for path in (meta, *files):
        with pytest.raises(sw.ParseError, match="rank") as caught:
            sw.open_checkpoint(path)
        assert (BARE in str(caught.value)) == (path == meta)
        assert path == meta or "open_checkpoint(..., part=True) opens this file alone" in str(caught.value)
    by_rules(files, tmp_path)
    # As the refusal says.
    own = tmp_path / "own.toml"
    own.write_text("""
        [rules]
        "attention.wq.weight$" = ["tp", []]
        "(attention.wo|tok_embeddings).weight$" = [[], "tp"]
        "norm.weight$" = [[]]
    """)
    command = ["reshard", str(meta), str(tmp_path / "direct"), "--to", "hf", "--source-rules", str(own), "--no-sync"]
    assert main([*command, "--source-mesh", "tp=2", "--quiet", "--strict"]) == 0
    same_tensors(tmp_path / "direct", FULL)


def test_legacy_files_of_megatron_are_one_checkpoint_by_rules(tmp_path: Path) -> None:
    """A folder for each rank, in that of an iteration."""
    root = tmp_path / "megatron"
    files = [root / "iter_0000002" / f"mp_rank_0{rank}" / "model_optim_rng.pt" for rank in range(2)]
    for rank, file in enumerate(files):
        file.parent.mkdir(parents=True)
        file.write_bytes(save({"iteration": 2, "model": of_rank(rank)}))
    (root / "latest_checkpointed_iteration.txt").write_text("2")
    for path in (root, root / "iter_0000002"):
        with pytest.raises(sw.ParseError, match="legacy") as caught:
            sw.open_checkpoint(path)
        assert LEGACY in str(caught.value)
    with pytest.raises(sw.ParseError, match=r"its name says that it is the part of one rank.*part=True"):
        sw.open_checkpoint(files[1])
    by_rules(files, tmp_path, "model.")


def test_one_file_of_meta_is_a_model_unless_its_parameters_say_that_it_is_a_part(tmp_path: Path) -> None:
    (tmp_path / "consolidated.00.pth").write_bytes(save(of_rank(0, 1)))
    (tmp_path / "params.json").write_text('{"dim": 16, "n_heads": 4}')
    same_tensors(tmp_path, FULL)
    same_tensors(tmp_path / "consolidated.00.pth", FULL)
    (tmp_path / "consolidated.00.pth").write_bytes(save(of_rank(0, 2)))
    for path in (tmp_path, tmp_path / "consolidated.00.pth"):
        with pytest.raises(sw.ParseError, match=r"8 columns of .*, but by params.json the whole has 16"):
            sw.open_checkpoint(path)
    with sw.open_checkpoint(tmp_path / "consolidated.00.pth", part=True) as checkpoint:
        assert checkpoint["layers.0.attention.wo.weight"].shape == (16, 8)


def test_keys_that_are_records_have_the_names_of_what_they_stand_for(tmp_path: Path) -> None:
    """As in Megatron's distrib_optim.pt, whose buckets are by pairs of dtypes."""
    pair = (Global("torch", "bfloat16"), Global("torch", "float32"))
    value = {0: {pair: {"param": tensor(FULL["norm.weight"], "0")}}, Call("torch", "device", "cpu"): 3, (1, "a"): 4}
    (tmp_path / "a.pt").write_bytes(save(value))
    with sw.open_checkpoint(tmp_path / "a.pt") as checkpoint:
        assert list(checkpoint) == ["0.(torch.bfloat16, torch.float32).param"]
        assert sorted(checkpoint.objects) == ["(1, 'a')", "torch.device('cpu')"]


def test_a_folder_in_which_a_checkpoint_lies_names_it(tmp_path: Path) -> None:
    (tmp_path / "step" / "actor").mkdir(parents=True)
    sw.save_checkpoint(tmp_path / "step" / "actor" / "model.safetensors", FULL)
    with pytest.raises(sw.ParseError, match="not a checkpoint itself; open its folder 'actor', which is one"):
        sw.open_checkpoint(tmp_path / "step")
    same_tensors(tmp_path / "step" / "actor", FULL)


def test_a_keras_archive_is_unzipped(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "model.weights.h5", "w") as file:
        file.create_dataset("layers/dense/vars/0", data=FULL["norm.weight"])
    with zipfile.ZipFile(tmp_path / "m.keras", "w") as archive:
        archive.write(tmp_path / "model.weights.h5", "model.weights.h5")
    (tmp_path / "model.weights.h5").unlink()
    with pytest.raises(sw.ParseError, match=r"unzip it and open the model\.weights\.h5 in it"):
        sw.open_checkpoint(tmp_path / "m.keras")
    zipfile.ZipFile(tmp_path / "m.keras").extractall(tmp_path)
    with sw.open_checkpoint(tmp_path / "model.weights.h5") as checkpoint:
        assert checkpoint.read("layers/dense/vars/0").tolist() == FULL["norm.weight"].tolist()


def test_a_repository_of_hugging_face_is_downloaded_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"hf download Qwen/Qwen2.5-7B --local-dir FOLDER"):
        sw.open_checkpoint("Qwen/Qwen2.5-7B")
    for name in ("models/a.safetensors", "a/b/c", "a"):
        with pytest.raises(FileNotFoundError) as caught:
            sw.open_checkpoint(name)
        assert "hf download" not in str(caught.value)
    assert command(["rules", "--from-tp-plan", "Qwen/Qwen2.5-7B"]) == 2
    assert "hf download Qwen/Qwen2.5-7B --local-dir FOLDER" in capsys.readouterr().err
    pytest.importorskip("huggingface_hub.cli")
    from huggingface_hub.cli.hf import main  # type: ignore[import-not-found, unused-ignore]

    monkeypatch.setattr(sys, "argv", ["hf", "download", "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code


def test_archives_of_numpy_and_nemo(tmp_path: Path) -> None:
    arrays: Any = FULL
    np.savez(tmp_path / "m.npz", **arrays)
    np.savez_compressed(tmp_path / "c.npz", **arrays)
    for name in ("m", "c"):
        with pytest.raises(sw.ParseError, match=r"save_checkpoint\(PATH, dict\(numpy\.load\(FILE\)\)\)"):
            sw.open_checkpoint(tmp_path / f"{name}.npz")
        sw.save_checkpoint(tmp_path / f"{name}.safetensors", dict(np.load(tmp_path / f"{name}.npz")))
        same_tensors(tmp_path / f"{name}.safetensors", FULL)
    (tmp_path / "model_weights.ckpt").write_bytes(save(of_rank(0, 1)))
    with tarfile.open(tmp_path / "m.nemo", "w") as archive:
        archive.add(tmp_path / "model_weights.ckpt", "./model_weights.ckpt")
    with pytest.raises(sw.ParseError, match=r"unpack it \(tar xf FILE\)"):
        sw.open_checkpoint(tmp_path / "m.nemo")
    with tarfile.open(tmp_path / "m.nemo") as archive:
        archive.extractall(tmp_path / "out", filter="data")
    same_tensors(tmp_path / "out" / "model_weights.ckpt", FULL)


def test_tensors_and_programs_of_pytorch(tmp_path: Path) -> None:
    """Two elements to a byte, whose view as bytes is read, and does not close the others; and TorchScript."""
    packed = np.arange(6, dtype=np.uint8)
    args = (*tensor(packed, "0").args[:6], Global("torch", "float4_e2m1fn_x2"))
    storage = Storage("0", "torch.storage.UntypedStorage", packed.tobytes(), 6)
    value = Call("torch._utils", "_rebuild_tensor_v3", storage, *args[1:])
    (tmp_path / "a.pt").write_bytes(save({"f": value, "w": tensor(FULL["norm.weight"], "1")}))
    with sw.open_checkpoint(tmp_path / "a.pt") as checkpoint:
        assert list(checkpoint) == ["w"]
        assert "two elements to a byte; save tensor.view(torch.uint8)" in checkpoint.unreadable["f"]
    (tmp_path / "b.pt").write_bytes(save({"f": tensor(packed, "0")}))
    same_tensors(tmp_path / "b.pt", {"f": packed})
    with zipfile.ZipFile(tmp_path / "j.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("j/code/__torch__/linear.py", "x" * 99)
    with pytest.raises(sw.ParseError, match=r"is a TorchScript program; save its state_dict with torch\.save"):
        sw.open_checkpoint(tmp_path / "j.pt")


def test_stage_0_of_deepspeed_is_one_file(tmp_path: Path) -> None:
    """Neither converter takes it: there are no parts. It is as DeepSpeed 0.19.8 writes it."""
    folder = tmp_path / "global_step2"
    folder.mkdir()
    (tmp_path / "latest").write_text("global_step2")
    (folder / "mp_rank_00_model_states.pt").write_bytes(save({"module": of_rank(0, 1), "global_steps": 2}))
    for path in (tmp_path, folder):
        same_tensors(path, FULL)
    same_tensors(folder / "mp_rank_00_model_states.pt", {f"module.{name}": each for name, each in FULL.items()})
