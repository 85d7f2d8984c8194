"""Checkpoints of all formats, loaded by `torch.distributed.checkpoint.load`: each rank has what PyTorch cuts."""

from __future__ import annotations

import json
import os
import socket
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ml_dtypes")

import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
import torch.distributed.checkpoint.state_dict as states  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

import shardwise as sw  # noqa: E402
from shardwise.interop.torch import storage_reader  # noqa: E402
from tests.store.formats.test_megatron_states import NAMES as MEGATRON  # noqa: E402
from tests.store.formats.test_megatron_states import unpacked as unpacked_megatron  # noqa: E402
from tests.store.formats.torch.test_deepspeed import FLAT as ZERO  # noqa: E402
from tests.store.formats.torch.test_deepspeed import unpacked as unpacked_zero  # noqa: E402
from tests.store.real import CASES, DATA, expected  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable")

WORLD = 8
#: Meshes of the world and placements; where a dim is missing, a tensor is replicated along that of the mesh.
LAYOUTS: list[tuple[tuple[int, ...], tuple[Any, ...]]] = [
    ((8,), (Replicate(),)),
    ((8,), (Shard(0),)),
    ((8,), (Shard(1),)),
    ((2, 4), (Shard(0), Shard(1))),
    ((2, 4), (Shard(0), Shard(0))),
    ((4, 2), (Replicate(), Shard(1))),
    ((8,), (_StridedShard(0, split_factor=3),)),
    ((4, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    ((2, 4), (Shard(1), _StridedShard(0, split_factor=2))),
    ((2, 2, 2), (_StridedShard(0, split_factor=4), _StridedShard(0, split_factor=2), Shard(0))),
]
RANKS = (2, 7)
#: What reading a format needs.
NEEDED = {"orbax": "zstandard", "keras": "h5py"}


@contextmanager
def rank_of(rank: int, world: int = WORLD) -> Iterator[None]:
    """This process as one rank of a group that sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def tensor_of(array: np.ndarray[Any, Any]) -> Any:
    """An array as PyTorch reads its bytes."""
    dtype = getattr(torch, array.dtype.name)
    made = torch.frombuffer(bytearray(array.tobytes()), dtype=dtype) if array.size else torch.empty(0, dtype=dtype)
    return made.reshape(array.shape)


def placed(placements: tuple[Any, ...], dims: int) -> list[Any]:
    return [Replicate() if getattr(each, "dim", 0) >= dims else each for each in placements]


def cut(whole: Any, mesh: Any, placements: tuple[Any, ...]) -> Any:
    """What `distribute_tensor` gives this rank, by bytes, since not all dtypes can be split."""
    return distribute_tensor(whole, mesh, placed(placements, whole.ndim), src_data_rank=None)


def same(one: Any, other: Any) -> bool:
    return (
        one.shape == other.shape
        and one.dtype == other.dtype
        and one.numpy(force=True).tobytes() == (other.numpy(force=True).tobytes())
        if one.dtype not in SMALL
        else same(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    )


SMALL = {torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}


def check(path: Path, arrays: dict[str, Any], layouts: Any = None) -> None:
    """Load a checkpoint with all layouts on some ranks."""
    for rank in RANKS:
        with rank_of(rank):
            for shape, placements in LAYOUTS if layouts is None else layouts:
                mesh = init_device_mesh("cpu", shape)
                wholes = {name: tensor_of(array) for name, array in arrays.items()}
                state = {name: cut(torch.zeros_like(whole), mesh, placements) for name, whole in wholes.items()}
                dcp.load(state, storage_reader=storage_reader(path), no_dist=True)
                for name, whole in wholes.items():
                    held = cut(whole, mesh, placements).to_local()
                    assert same(state[name].to_local(), held), (name, rank, placements)


@pytest.mark.parametrize("case", [case for case in CASES if "/keras/" not in case and case != "torch/dcp/.metadata"])
def test_what_frameworks_wrote(case: str) -> None:
    """Files of torch.save, PyTorch's distributed checkpoints in both formats, FSDP2, Megatron, Orbax, Keras."""
    if CASES[case][1] in NEEDED:
        pytest.importorskip(NEEDED[CASES[case][1]])
    check(DATA / case, expected(case))


@pytest.mark.parametrize("to", ["safetensors", "hf", "sharded", "dcp", "torch", "fsdp2"])
def test_what_is_written_here(to: str, tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    arrays = {
        name: random.standard_normal(shape).astype(dtype)
        for name, shape, dtype in (("a", (13, 6), "f4"), ("b", (5, 7, 3), "f2"), ("c", (9,), "f8"), ("d", (), "f4"))
    }
    arrays["e"] = random.integers(0, 9, (3, 4))
    layouts = sw.LayoutMap(sw.DeviceMesh((3,), ("x",)))
    layouts["a"], layouts["b"], layouts["c"] = ("x", None), (None, "x", None), ("x",)
    path = tmp_path / {"safetensors": "a.safetensors", "torch": "a.pt"}.get(to, "a")
    cuts = layouts if to in ("sharded", "dcp", "fsdp2") else None
    sw.save_checkpoint(path, arrays, cuts, to=to, uneven="ceil", max_file_bytes=500, sync=False)  # type: ignore[arg-type]
    check(path, arrays)


@pytest.mark.parametrize("case", [ZERO[0], ZERO[-1], MEGATRON[0], MEGATRON[-1]])
def test_training_states(case: str, tmp_path: Path) -> None:
    """Of DeepSpeed and of Megatron; `tests/store/formats` compare what is read of them with what the trainers held."""
    path = unpacked_zero(case, tmp_path) if case in ZERO else unpacked_megatron(case, tmp_path)
    with sw.open_checkpoint(path) as checkpoint:
        arrays = {name: checkpoint.read(name) for name in checkpoint}
    check(path, arrays, [LAYOUTS[3], LAYOUTS[6]])


def test_ten_formats_and_ten_layouts() -> None:
    formats = {CASES[case][1] for case in CASES} | {"safetensors", "hf", "sharded", "deepspeed"}
    assert len(formats) >= 10
    assert len(LAYOUTS) == 10


class Model(torch.nn.Module):  # type: ignore[misc,name-defined]
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.one, self.two = torch.nn.Linear(6, 5), torch.nn.Linear(5, 3, bias=False)
        self.register_buffer("seen", torch.tensor(seed))

    def forward(self, x: Any) -> Any:
        return self.two(torch.relu(self.one(x)))


def optimizer_of(model: Any, lr: float) -> Any:
    groups = [{"params": [p], "weight_decay": 0.1 * at} for at, p in enumerate(model.parameters())]
    return torch.optim.AdamW(groups, lr=lr)


def step(model: Any, optimizer: Any) -> None:
    torch.manual_seed(0)
    model(torch.randn(4, 6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture(scope="module")
def trained() -> tuple[Any, Any]:
    model = Model(1)
    optimizer = optimizer_of(model, 0.05)
    for _ in range(3):
        step(model, optimizer)
    return model, optimizer


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("form", ["torch.save", "dcp", "dcp, flat", "fsdp2", "torch"])
def test_a_run_goes_on(form: str, flat: bool, trained: tuple[Any, Any], tmp_path: Path) -> None:
    """Whatever the file calls states and groups: the names are those of `get_state_dict`, nested and flattened."""
    model, optimizer = trained
    path = tmp_path / ("run.pt" if form.startswith("torch") else "run")
    if form == "torch.save":
        names = {parameter: name for name, parameter in model.named_parameters()}
        groups = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
        state = optimizer.state_dict()
        state["param_groups"] = [
            {**group, "param_names": own} for group, own in zip(state["param_groups"], groups, strict=True)
        ]
        torch.save({"model": model.state_dict(), "optimizer": state}, path)
    else:
        options = states.StateDictOptions(flatten_optimizer_state_dict=form == "dcp, flat")
        both = states.get_state_dict(model, optimizer, options=options)
        made = tmp_path / "made" if form in ("fsdp2", "torch") else path
        dcp.save({"model": both[0], "optim": both[1]}, checkpoint_id=made, no_dist=True)
        if made != path:
            layouts = sw.LayoutMap(sw.DeviceMesh((2,), ("fsdp",)))
            layouts["weight$"] = ("fsdp", None)
            cuts = layouts if form == "fsdp2" else None
            sw.reshard_checkpoint(made, path, cuts, to=form, uneven="ceil", sync=False)  # type: ignore[arg-type]
    if form == "dcp, flat" and not flat:
        pytest.skip("groups by parameter do not say which parameters are one group")
    other = Model(2)
    again = optimizer_of(other, 0.7)
    options = states.StateDictOptions(flatten_optimizer_state_dict=flat)
    state = dict(zip(("model", "optim"), states.get_state_dict(other, again, options=options), strict=True))
    reader = storage_reader(path, model="model.", optimizer="optim.")
    planner = dcp.DefaultLoadPlanner(allow_partial_load=form in ("fsdp2", "torch"))
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    states.set_state_dict(
        other, again, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options
    )
    assert again.param_groups[0]["lr"] == 0.05
    assert [group["weight_decay"] for group in again.param_groups] == [0.1 * at for at in range(3)]
    continued = Model(3)
    continued.load_state_dict(model.state_dict())
    reference = optimizer_of(continued, 0.3)
    reference.load_state_dict(optimizer.state_dict())
    for _ in range(2):
        step(other, again)
        step(continued, reference)
    for one, two in zip(other.state_dict().values(), continued.state_dict().values(), strict=True):
        assert torch.equal(one, two)


def saved(folder: Path) -> Path:
    tensors = {"w": np.arange(24, dtype="f4").reshape(8, 3), "step": np.float32(3)}
    sw.save_checkpoint(folder / "a.safetensors", tensors, sync=False)
    return folder / "a.safetensors"


def test_what_load_refuses_names_the_tensor(tmp_path: Path) -> None:
    reader = storage_reader(saved(tmp_path))

    def load(state: dict[str, Any], **more: Any) -> dict[str, Any]:
        dcp.load(state, storage_reader=storage_reader(tmp_path / "a.safetensors", **more), no_dist=True)
        return state

    assert isinstance(reader, dcp.StorageReader)
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: v\."):
        load({"v": torch.zeros(8, 3)})
    with pytest.raises(CheckpointException, match=r"Size mismatch .* for w"):
        load({"w": torch.zeros(8, 4)})
    with pytest.raises(
        CheckpointException, match=r"'w' is float32 in .*a\.safetensors, and bfloat16 in the state dict"
    ):
        load({"w": torch.zeros(8, 3, dtype=torch.bfloat16)})
    rounded = load({"w": torch.zeros(8, 3, dtype=torch.float64)}, cast=True)["w"]
    assert torch.equal(rounded, torch.arange(24, dtype=torch.float64).reshape(8, 3))
    with pytest.raises(CheckpointException, match="Invalid checkpoint metadata for step"):
        load({"step": 3})
    with rank_of(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(CheckpointException, match="Invalid checkpoint metadata for w"):
            load({"w": DTensor.from_local(torch.zeros(8, 3), mesh, [Partial()])})
        wrong = DTensor.from_local(
            torch.zeros(3, 3), mesh, [_StridedShard(0, split_factor=2)], shape=torch.Size([8, 3]), stride=(3, 1)
        )
        with pytest.raises(
            CheckpointException, match=r"'w': the local tensor has the shape \(3, 3\).*it must be \(4, 3\)"
        ):
            load({"w": wrong})
    with pytest.raises(sw.LayoutError, match="rename"):
        storage_reader("a", rename={"(": ""})
    with pytest.raises(TypeError, match="model"):
        storage_reader("a", model=1)  # type: ignore[arg-type]


def test_what_cannot_be_read_says_why(tmp_path: Path) -> None:
    header = json.dumps({"f": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    for planner in (None, dcp.DefaultLoadPlanner(allow_partial_load=True)):
        with pytest.raises(
            CheckpointException, match=r"'f' cannot be read: its dtype is F6_E2M3, which PyTorch does not have"
        ):
            dcp.load({"f": torch.zeros(4)}, storage_reader=storage_reader(tmp_path / "a.safetensors"), planner=planner)
    dcp.save(
        {"w": torch.ones(2), "when": Path("here"), "plain": {"a": [1, 2.5, "x", None]}}, checkpoint_id=tmp_path / "b"
    )
    state = {"w": torch.zeros(2), "plain": {"a": None}}
    dcp.load(state, storage_reader=storage_reader(tmp_path / "b"))
    assert torch.equal(state["w"], torch.ones(2))
    assert state["plain"] == {"a": [1, 2.5, "x", None]}
    with pytest.raises(
        CheckpointException, match=r"'when' holds an object of 'pathlib.*leave it out of the state dict"
    ):
        dcp.load({"when": None}, storage_reader=storage_reader(tmp_path / "b"))


def test_names_and_rewrites(tmp_path: Path) -> None:
    path = saved(tmp_path)
    state = {"model": {"w": torch.zeros(8, 3)}, "step": torch.zeros(())}
    dcp.load(state, storage_reader=storage_reader(path, rename={"^w$": "model.w"}))
    assert torch.equal(state["model"]["w"], torch.arange(24.0).reshape(8, 3))
    fused = tmp_path / "fused.toml"
    fused.write_text(
        '[[rewrite]]\nfrom = { parts = { a = "q", b = "k" } }\nto = { name = "qk", packed = "a:(2) + b:(4)" }\n',
        encoding="utf-8",
    )
    sw.save_checkpoint(
        tmp_path / "b.safetensors", {"q": np.ones((2, 3), "f4"), "k": np.zeros((4, 3), "f4")}, sync=False
    )
    given = {"qk": torch.full((6, 3), 7.0)}
    with sw.open_checkpoint(tmp_path / "b.safetensors") as checkpoint:
        dcp.load(given, storage_reader=storage_reader(checkpoint, rewrites=sw.Rewrites.from_toml(fused)))
        assert checkpoint.read("q").sum() == 6  # It stays open.
    assert torch.equal(given["qk"], torch.cat([torch.ones(2, 3), torch.zeros(4, 3)]))
    tensors = dict.fromkeys(("w", "optim.state.w.exp_avg", "optimizer.state.w.exp_avg"), np.ones(1))
    sw.save_checkpoint(tmp_path / "c.safetensors", tensors, sync=False)
    with pytest.raises(CheckpointException, match=r"would both be called 'optim\.state\.w\.exp_avg'"):
        dcp.load({}, storage_reader=storage_reader(tmp_path / "c.safetensors", optimizer="optim."))


def test_another_checkpoint_is_given_to_load(tmp_path: Path) -> None:
    state = {"w": torch.zeros(8, 3)}
    dcp.load(state, checkpoint_id=saved(tmp_path), storage_reader=storage_reader("nowhere"))
    assert state["w"].sum() == 276


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux's count of bytes read")
@pytest.mark.parametrize("dim", [0, 1])
def test_only_its_own_bytes_into_its_own_memory(dim: int, tmp_path: Path) -> None:
    whole = np.arange(2**22, dtype="f4").reshape(2048, 2048)
    sw.save_checkpoint(tmp_path / "a.safetensors", {"w": whole}, sync=False)

    def read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    with rank_of(5):
        mesh = init_device_mesh("cpu", (8,))
        state = {"w": distribute_tensor(torch.zeros(2048, 2048), mesh, [Shard(dim)], src_data_rank=None)}
        reader = storage_reader(tmp_path / "a.safetensors")
        dcp.load({}, storage_reader=reader, no_dist=True)  # What is imported is read before.
        tracemalloc.start()
        before = read()
        dcp.load(state, storage_reader=reader, no_dist=True)
        taken, peak = read() - before, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        rows = slice(5 * 256, 6 * 256)
        assert same(
            state["w"].to_local(), torch.from_numpy(np.ascontiguousarray(whole[rows] if dim == 0 else whole[:, rows]))
        )
        assert whole.nbytes / 8 <= taken < 1.05 * whole.nbytes / 8 + 20_000
        assert peak < whole.nbytes / 16


def process(rank: int, world: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    whole = torch.arange(60.0).reshape(12, 5)
    kinds: dict[tuple[int, ...], list[tuple[Any, ...]]] = {
        (world,): [(Shard(0),), (Shard(1),), (Replicate(),), (_StridedShard(0, split_factor=2),)]
    }
    if world == 4:
        kinds[2, 2] = [(Shard(0), Shard(1)), (Replicate(), Shard(0)), (_StridedShard(0, split_factor=2), Shard(0))]
    for shape, layouts in kinds.items():
        mesh = init_device_mesh("cpu", shape)
        for placements in layouts:
            state = {"w": cut(torch.zeros(12, 5), mesh, placements), "lr": 0.0}
            dcp.load(state, storage_reader=storage_reader(folder))
            assert state["lr"] == 0.25
            assert torch.equal(state["w"].to_local(), cut(whole, mesh, placements).to_local())
    # One rank's error is everybody's, and names the tensor.
    wrong = torch.zeros(12, 5, dtype=torch.float64 if rank == 1 else torch.float32)
    with pytest.raises(CheckpointException, match="'w' is float32 in"):
        dcp.load({"w": wrong}, storage_reader=storage_reader(folder))
    dist.destroy_process_group()


@pytest.mark.heavy
@pytest.mark.parametrize("world", [2, 4])
def test_processes(world: int, tmp_path: Path) -> None:
    dcp.save({"w": torch.arange(60.0).reshape(12, 5), "lr": 0.25}, checkpoint_id=tmp_path / "a")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    given = world, port, str(tmp_path / "a")
    torch.multiprocessing.start_processes(process, given, nprocs=world, start_method="fork")
