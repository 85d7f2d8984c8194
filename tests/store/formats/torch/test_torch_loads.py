"""What is written, loaded by PyTorch itself, bit for bit; runs where PyTorch is installed in this Python."""

from __future__ import annotations

import importlib
import json
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw

torch = pytest.importorskip("torch")
dcp = importlib.import_module("torch.distributed.checkpoint")
if not hasattr(dcp, "HuggingFaceStorageReader"):
    pytest.skip("this PyTorch does not read DCP as safetensors", allow_module_level=True)
pytest.importorskip("ml_dtypes")

# That it saves and loads without a process group, and the like.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

MESH = sw.DeviceMesh((2, 4), ("data", "model"))
DTYPES = (
    "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32",
    "uint64", "bool", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu",
)  # fmt: skip


#: What PyTorch 2.15 reads from safetensors files by `HuggingFaceStorageReader`: `DTYPE_MAP` in `_hf_utils.py`.
READ_BY_HF = ("float16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "bfloat16")


def values(dtypes: tuple[str, ...] = DTYPES) -> dict[str, np.ndarray[Any, Any]]:
    """Tensors of these dtypes, random bits; of each shape that there may be."""
    rng = np.random.default_rng(3)

    def drawn(name: str, *shape: int) -> np.ndarray[Any, Any]:
        dtype = _numpy(name)
        if name == "bool":
            return rng.integers(0, 2, shape).astype(bool)
        bits = rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
        return np.ascontiguousarray(bits).view(dtype).reshape(shape)

    made = {f"of.{name}": drawn(name, 7, 10) for name in dtypes}
    return made | {
        "wte": drawn("float32", 48, 16),
        "head": drawn("bfloat16", 50, 6),
        "h.w": drawn("float32", 16, 48),
        "scalar": np.array(3.5),
        "count": np.array(2**40 + 1),
        "none": np.zeros((0, 4), "f2"),
        "deep": drawn("uint8", 1, 2, 1, 3, 2, 1, 2, 2),
    }


def _numpy(name: str) -> np.dtype[Any]:
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))


def rules() -> sw.LayoutMap:
    layout_map = sw.LayoutMap(MESH)
    layout_map["wte|^of"] = (("model", "data"), None)
    layout_map["h.w"] = ("data", "model")
    layout_map["head"] = (None, "data")
    return layout_map


def bits(tensor: Any) -> bytes:
    """The bytes of a tensor in C order."""
    tensor = tensor.detach().contiguous()
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def as_torch(array: np.ndarray[Any, Any]) -> Any:
    data = torch.frombuffer(bytearray(array.tobytes()) or bytearray(16), dtype=getattr(torch, array.dtype.name))
    return data[: array.size].reshape(array.shape)


def blank(whole: dict[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    return {name: torch.zeros(array.shape, dtype=getattr(torch, array.dtype.name)) for name, array in whole.items()}


def same(loaded: dict[str, Any], whole: dict[str, np.ndarray[Any, Any]]) -> None:
    assert set(loaded) == set(whole)
    for name, array in whole.items():
        tensor = loaded[name]
        assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{array.dtype.name}", array.shape), name
        assert bits(tensor) == array.tobytes(), name


def test_dcp_onto_plain_tensors(tmp_path: Path) -> None:
    whole = values()
    sw.save_checkpoint(tmp_path / "a", {**whole, "tied": whole["wte"]}, rules(), to="dcp", uneven="chunk")
    sw.reshard_checkpoint(tmp_path / "a", tmp_path / "b", to="dcp")
    for name in "ab":
        loaded = blank({**whole, "tied": whole["wte"]})
        dcp.load(loaded, checkpoint_id=tmp_path / name, no_dist=True)
        same(loaded, {**whole, "tied": whole["wte"]})


def test_dcp_as_a_file_of_torch_save(tmp_path: Path) -> None:
    """PyTorch's own conversion, which builds the nested state dict of what the index says."""
    format_utils = importlib.import_module("torch.distributed.checkpoint.format_utils")
    nested: dict[str, Any] = {
        "model": {"w": torch.arange(6.0).reshape(2, 3)},
        "optim": {"state": [torch.ones(2)], "step": 7},
    }
    dcp.save(nested, checkpoint_id=tmp_path / "theirs", no_dist=True)
    assert sw.verify_checkpoint(tmp_path / "theirs").crcs > 0
    sw.reshard_checkpoint(tmp_path / "theirs", tmp_path / "ours", to="dcp")
    format_utils.dcp_to_torch_save(tmp_path / "ours", tmp_path / "ours.pt")
    loaded = torch.load(tmp_path / "ours.pt", weights_only=True)
    assert torch.equal(loaded["model"]["w"], nested["model"]["w"])
    assert torch.equal(loaded["optim"]["state"][0], torch.ones(2))
    assert loaded["optim"]["step"] == 7
    again: dict[str, Any] = {"model": {"w": torch.zeros(2, 3)}, "optim": {"state": [torch.zeros(2)], "step": 0}}
    dcp.load(again, checkpoint_id=tmp_path / "ours", no_dist=True)
    assert torch.equal(again["model"]["w"], nested["model"]["w"])
    assert again["optim"]["step"] == 7


def test_safetensors_and_hugging_face_folders(tmp_path: Path) -> None:
    safetensors = importlib.import_module("safetensors.torch")
    whole = values(tuple(name for name in DTYPES if name != "complex128"))
    sw.save_checkpoint(tmp_path / "a.safetensors", whole)
    same(safetensors.load_file(tmp_path / "a.safetensors"), whole)
    sw.reshard_checkpoint(tmp_path / "a.safetensors", tmp_path / "hf", to="hf", max_file_bytes=2000)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    loaded: dict[str, Any] = {}
    for file in sorted(set(index["weight_map"].values())):
        part = safetensors.load_file(tmp_path / "hf" / file)
        assert {index["weight_map"][name] for name in part} == {file}
        loaded |= part
    same(loaded, whole)


def test_hugging_face_folders_by_pytorchs_reader(tmp_path: Path) -> None:
    whole = values(READ_BY_HF)
    sw.save_checkpoint(tmp_path / "hf", whole, to="hf", max_file_bytes=2000)
    loaded = blank(whole)
    dcp.load(loaded, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "hf")), no_dist=True)
    same(loaded, whole)


def test_sharded_folders_by_pytorchs_reader(tmp_path: Path) -> None:
    whole = values(READ_BY_HF)
    sw.save_checkpoint(tmp_path / "a", whole, rules(), to="sharded", uneven="chunk")
    loaded = blank(whole)
    dcp.load(loaded, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "a")), no_dist=True)
    same(loaded, whole)


def test_files_whose_checksums_pytorch_did_not_compute(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.arange(6.0)}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert sw.verify_checkpoint(tmp_path / "a.pt").crcs == 0
    torch.save({"w": torch.arange(6.0)}, tmp_path / "b.pt")
    assert sw.verify_checkpoint(tmp_path / "b.pt").crcs > 0


def test_onto_the_tensors_of_four_ranks(tmp_path: Path) -> None:
    sw.save_checkpoint(tmp_path / "dcp", values(), rules(), to="dcp", uneven="chunk")
    sw.save_checkpoint(tmp_path / "sharded", values(READ_BY_HF), rules(), to="sharded", uneven="chunk")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_rank, args=(port, str(tmp_path)), nprocs=4)
    assert sorted(path.name for path in tmp_path.glob("done-*")) == [f"done-{rank}" for rank in range(4)]


def _rank(rank: int, port: int, folder: str) -> None:
    """One of the ranks: loads onto DTensors of two meshes, and compares with `torch.chunk` of the whole."""
    distributed = importlib.import_module("torch.distributed")
    tensor = importlib.import_module("torch.distributed.tensor")
    shard, replicate = tensor.Shard, tensor.Replicate()
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=4)
    make = importlib.import_module("torch.distributed.device_mesh").init_device_mesh
    placed: list[tuple[Any, dict[str, list[Any]]]] = [
        (
            make("cpu", (4,), mesh_dim_names=("x",)),
            {"wte": [shard(1)], "head": [shard(0)], "h.w": [replicate], "deep": [shard(3)], "none": [shard(1)]},
        ),
        (
            make("cpu", (2, 2), mesh_dim_names=("x", "y")),
            {"wte": [shard(0), shard(1)], "head": [shard(0), shard(0)], "h.w": [replicate, shard(1)]},
        ),
    ]
    for mesh, placements in placed:
        for form, whole in (("dcp", values()), ("sharded", values(READ_BY_HF))):
            expected, loaded = {}, {}
            for name, array in whole.items():
                full = as_torch(array)
                how = [shard(0), replicate][: mesh.ndim] if name.startswith("of.") else placements.get(name)
                if how is None:
                    expected[name], loaded[name] = array.tobytes(), torch.zeros(array.shape, dtype=full.dtype)
                    continue
                local = _local(full, mesh, how, rank)
                expected[name] = bits(local)
                zeros = torch.zeros(local.shape, dtype=full.dtype)
                loaded[name] = tensor.DTensor.from_local(
                    zeros, mesh, how, run_check=False, shape=full.shape, stride=full.stride()
                )
            if form == "dcp":
                dcp.load(loaded, checkpoint_id=f"{folder}/dcp")
            else:
                dcp.load(loaded, storage_reader=dcp.HuggingFaceStorageReader(f"{folder}/sharded"))
            for name, value in loaded.items():
                local = value.to_local() if isinstance(value, tensor.DTensor) else value
                assert bits(local) == expected[name], (form, mesh, name)
    distributed.barrier()
    Path(folder, f"done-{rank}").touch()
    distributed.destroy_process_group()


def _local(full: Any, mesh: Any, placements: list[Any], rank: int) -> Any:
    """A rank's part, by `torch.chunk` for each dim of the mesh in turn."""
    at = np.unravel_index(rank, tuple(mesh.mesh.shape))
    for place, count, index in zip(placements, mesh.mesh.shape, at, strict=True):
        if place.is_shard():
            parts = full.chunk(count, dim=place.dim)
            full = parts[index] if index < len(parts) else full.narrow(place.dim, 0, 0)
    return full.contiguous()
