"""Folders with a PyTorch file for each rank, made by hand: what each holds, and what does not fit together."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from shardwise.cli import main
from shardwise.interop import torch as placements

from ...torch_files import Call, Global, dtensor, ones, save, size, tensor


def ranks(tmp_path: Path, states: list[dict[str, Any]], name: str = "model_world_size_{}_rank_{}.pt") -> Path:
    path = tmp_path / "fsdp"
    path.mkdir(exist_ok=True)
    for file in path.iterdir():
        file.unlink()
    for rank, state in enumerate(states):
        (path / name.format(len(states), rank)).write_bytes(save(state))
    return path


@pytest.mark.heavy
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_what_each_rank_holds_is_put_where_pytorch_has_it(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Against the arithmetic of DTensor in `interop.torch`, which is compared with PyTorch's own."""
    sizes = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    shape = tuple(data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=2)))
    mesh = sw.DeviceMesh(sizes, tuple("abc"[: len(sizes)]))
    how = []
    for axis in range(len(sizes)):
        dim = data.draw(st.integers(0, len(shape) - 1))
        factor = data.draw(st.integers(1, max(1, mesh.size // sizes[axis])))
        kinds: list[Any] = [placements.Replicate(), placements.Shard(dim), placements.StridedShard(dim, factor)]
        how.append(data.draw(st.sampled_from(kinds)))
    array = ones(*shape)
    # Each element's own number, followed along each dim through the cuts.
    held = [placed_rows(how, mesh, shape, dim) for dim in range(len(shape))]
    states = []
    for rank in range(mesh.size):
        local = array[np.ix_(*(held[dim][rank] for dim in range(len(shape))))]
        states.append({"w": dtensor(local, "0", shape, sizes, mesh.coordinate(rank), how), "b": tensor(ones(2), "1")})
    with sw.open_checkpoint(ranks(tmp_path_factory.mktemp("r"), states)) as checkpoint:
        assert checkpoint.read("w").tolist() == array.tolist()
        assert checkpoint.read("b").tolist() == [0, 1]
        assert len(checkpoint["b"].replicas) == mesh.size - 1
        checkpoint["w"].tiling.check()


@pytest.mark.parametrize(("shape", "mesh", "how"), [
    ((10, 3), (4,), [placements.Shard(0)]),
    ((5,), (4,), [placements.Shard(0)]),
    ((7, 5), (3, 2), [placements.Shard(0), placements.Shard(1)]),
    ((7, 5), (2, 3), [placements.Replicate(), placements.Shard(1)]),
])  # fmt: skip
def test_padded_tensors_are_read_if_that_is_said(
    shape: tuple[int, ...], mesh: tuple[int, ...], how: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As verl and others save them: each rank has as many rows as the first. What is beyond is -1 here."""
    named = sw.DeviceMesh(mesh, tuple("ab"[: len(mesh)]))
    array = ones(*shape)
    held = [placed_rows(how, named, shape, dim) for dim in range(len(shape))]
    longest = [max(map(len, rows)) for rows in held]
    states = []
    for rank in range(named.size):
        local = np.full(longest, -1, np.float32)
        own = array[np.ix_(*(held[dim][rank] for dim in range(len(shape))))]
        local[tuple(map(slice, own.shape))] = own
        states.append({"w": dtensor(local, "0", shape, mesh, named.coordinate(rank), how)})
    path = ranks(tmp_path, states)
    with pytest.raises(sw.ParseError, match=r"if the rest is padding, open_checkpoint\(\.\.\., padded=True\)"):
        sw.open_checkpoint(path)
    assert main(["inspect", str(path)]) == 2
    assert "inspect and reshard --padded read the beginning" in capsys.readouterr().err
    with sw.open_checkpoint(path, padded=True) as checkpoint:
        assert checkpoint.read("w").tolist() == array.tolist()
    assert main(["inspect", str(path), "--padded"]) == 0
    assert main(["reshard", str(path), str(tmp_path / "m.safetensors"), "--padded", "--quiet"]) == 0
    with sw.open_checkpoint(tmp_path / "m.safetensors") as checkpoint:
        assert checkpoint.read("w").tolist() == array.tolist()


def test_other_lengths_are_refused_padded_or_not(tmp_path: Path) -> None:
    """Longer than the first rank's; and of a strided cut, whose padding may be within."""
    long = [dtensor(ones(4), "0", (5,), (2,), (at,), [placements.Shard(0)]) for at in range(2)]
    how = [placements.Shard(0), placements.StridedShard(0, 2)]
    strided = [dtensor(ones(3), "0", (9,), (1, 2), (0, at), how) for at in range(2)]
    for states in (long, strided):
        with pytest.raises(sw.ParseError, match="but its local tensor is") as caught:
            sw.open_checkpoint(ranks(tmp_path, [{"w": each} for each in states]), padded=True)
        assert "padded=True" not in str(caught.value)


def placed_rows(how: list[Any], mesh: sw.DeviceMesh, shape: tuple[int, ...], dim: int) -> list[np.ndarray]:
    """The positions along a dim that each rank holds, by chunking arrays of positions as PyTorch chunks tensors."""
    rows = []
    for rank in range(mesh.size):
        held = np.arange(shape[dim])
        for axis, placement in enumerate(how):
            if getattr(placement, "dim", None) != dim:
                continue
            count, index = mesh.shape[axis], mesh.coordinate(rank)[axis]
            factor = getattr(placement, "split_factor", 1)
            parts = [chunk(part, count) for part in chunk(held, factor)]
            held = np.concatenate([part[index] for part in parts if index < len(part)] or [held[:0]])
        rows.append(held)
    return rows


def chunk(array: np.ndarray, count: int) -> list[np.ndarray]:
    """`torch.chunk`: parts of ceil(n / count), as many as there are elements for."""
    step = -(-len(array) // count)
    return [array[start : start + step] for start in range(0, len(array), max(step, 1))] or [array]


def test_an_order_of_the_mesh_s_own(tmp_path: Path) -> None:
    """`shard_order` cuts by the second mesh dim first."""
    array, how = ones(8), [placements.Shard(0), placements.Shard(0)]
    entry = Call("torch.distributed.tensor._dtensor_spec", "ShardOrderEntry", 0, (1, 0))
    states = []
    for a, b in np.ndindex(2, 2):
        local = array.reshape(2, 2, 2)[b, a]  # The second mesh dim cuts in halves, the first cuts these.
        states.append({"w": dtensor(local, "0", (8,), (2, 2), (a, b), how, shard_order=(entry,))})
    with sw.open_checkpoint(ranks(tmp_path, states)) as checkpoint:
        assert checkpoint.read("w").tolist() == array.tolist()


def test_the_meshes_are_counted(tmp_path: Path) -> None:
    states = pair()
    for rank, state in enumerate(states):
        state["v"] = dtensor(ones(2)[rank:][:1], "1", (2,), (2,), (rank,), [placements.Shard(0)])
        state["u"] = dtensor(ones(2), "2", (2,), (1, 2), (0, rank), [placements.Replicate()] * 2)
    with sw.open_checkpoint(ranks(tmp_path, states)) as checkpoint:
        assert dict(checkpoint.metadata) == {"world_size": 2, "meshes": {"(2,)": 2, "(1, 2)": 1}}


ORDERS = ["torch.distributed.tensor._dtensor_spec", "ShardOrderEntry"]


@pytest.mark.parametrize(
    "order",
    [
        (5,), ((0, (1, 0)),), (Call(ORDERS[0], "TensorMeta", 0, (1, 0)),), (Call(*ORDERS, 0),), (Call(*ORDERS, 0, 5),),
        (Call(*ORDERS, 1, (1, 0)),), (Call(*ORDERS, -1, (1, 0)),), (Call(*ORDERS, "0", (1, 0)),),
        (Call(*ORDERS, 0, (1,)),), (Call(*ORDERS, 0, (1, 2)),), (Call(*ORDERS, 0, (1, 0)), Call(*ORDERS, 0, (1, 1))),
    ],
)  # fmt: skip
def test_orders_that_do_not_fit_the_placements(tmp_path: Path, order: Any) -> None:
    how = [placements.Shard(0), placements.Shard(0)]
    states = [{"w": dtensor(ones(2), "0", (8,), (2, 2), at, how, shard_order=order)} for at in np.ndindex(2, 2)]
    with pytest.raises(sw.ParseError, match=r"'w'.* a shard_order that does not fit its placements"):
        sw.open_checkpoint(ranks(tmp_path, states))


def test_a_mesh_as_older_versions_have_it(tmp_path: Path) -> None:
    numbers = np.arange(2, dtype=np.int64)
    states = [
        {"w": dtensor(ones(4)[2 * rank :][:2], "0", (4,), (2,), [rank], [placements.Shard(0)],
                      mesh_state={"_layout": None, "mesh": tensor(numbers, "m")})}
        for rank in range(2)
    ]  # fmt: skip
    with sw.open_checkpoint(ranks(tmp_path, states)) as checkpoint:
        assert checkpoint.read("w").tolist() == [0, 1, 2, 3]


def pair(**changes: Any) -> list[dict[str, Any]]:
    """Two ranks of a sharded tensor; `changes` are those of the second."""
    made = []
    for rank in range(2):
        options: dict[str, Any] = {
            "local": ones(4)[2 * rank :][:2], "key": "0", "shape": (4,), "mesh": (2,), "at": (rank,),
            "how": [placements.Shard(0)],
        }  # fmt: skip
        made.append({"w": dtensor(**{**options, **(changes if rank else {})})})
    return made


INT32 = Global("torch", "int32")
WRONG_RANKS: dict[str, tuple[Callable[[], list[dict[str, Any]]], str]] = {
    "partial sums": (lambda: [{"w": dtensor(ones(4), "0", (4,), (1,), (0,), [placements.Partial()])}], "partial sums"),
    "another shape": (lambda: pair(shape=(5,)), "is not sharded as in model_world_size_2_rank_0.pt"),
    "other placements": (lambda: pair(how=[placements.Replicate()], local=ones(4)), "is not sharded as in"),
    "another local shape": (lambda: pair(local=ones(3)), r"this rank \(2,\) of \(4,\), but its local tensor is \(3"),
    "one coordinate twice": (lambda: pair(at=(0,), local=ones(2)), r"leave a gap: none holds \[2:4\]"),
    "a coordinate off the mesh": (lambda: pair(at=(2,)), r"the coordinate \(2,\) is not on the mesh"),
    "a coordinate of another rank": (lambda: pair(at=(1, 0)), "is not on the mesh"),
    "a larger mesh": (lambda: pair(mesh=(3,)), "must have at most 2 ranks"),
    "more placements": (lambda: pair(how=[placements.Shard(0)] * 2), "placed on a mesh of 1 dim"),
    "a dim that is not there": (lambda: pair(how=[placements.Shard(1)]), "have no boxes"),
    "a plain tensor on one rank": (lambda: [pair()[0], {"w": tensor(ones(4), "0")}], "is plain, float32"),
    "plain tensors that differ": (
        lambda: [{"w": tensor(ones(2), "0")}, {"w": tensor(ones(3), "0")}], r"is plain, float32 of shape \(3,\)"
    ),
    "a tensor and a number": (lambda: [{"w": tensor(ones(2), "0")}, {"w": 5}], "is not a tensor, but is one in"),
    "a number and a tensor": (lambda: [{"w": 5}, {"w": tensor(ones(2), "0")}], "a tensor in some files"),
    "flat parameters": (lambda: [{"a._flat_param": tensor(ones(2), "0")}], "a flat parameter of FSDP1"),
    "a dtype that differs": (
        lambda: [{"w": dtensor(ones(4), "0", (4,), (1,), (0,), [placements.Replicate()],
                               tensor_meta=Call("torch.distributed.x", "TensorMeta", size(4), (), INT32))}],
        "a DTensor of int32 with a local tensor of float32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_RANKS)
def test_ranks_that_do_not_fit_together(case: str, tmp_path: Path) -> None:
    make, message = WRONG_RANKS[case]
    with pytest.raises(sw.ParseError, match=message) as caught:
        sw.open_checkpoint(ranks(tmp_path, make()))
    assert "'w'" in str(caught.value) or "_flat_param" in str(caught.value)


def test_folders_that_are_not_of_all_ranks(tmp_path: Path) -> None:
    path = ranks(tmp_path, pair())
    (path / "model_world_size_2_rank_1.pt").rename(path / "model_world_size_2_rank_2.pt")
    with pytest.raises(sw.ParseError, match="there is no file of rank 1"):
        sw.open_checkpoint(path)
    path = ranks(tmp_path, pair())
    (path / "model_world_size_4_rank_1.pt").write_bytes(b"")
    with pytest.raises(sw.ParseError, match="several kinds or world sizes"):
        sw.open_checkpoint(path)
    path = ranks(tmp_path, pair())
    with pytest.raises(
        sw.ParseError, match="its name says that it is the part of one rank; open the folder that has all parts"
    ):
        sw.open_checkpoint(path / "model_world_size_2_rank_1.pt")


def test_a_rank_that_is_not_on_the_mesh_has_no_part(tmp_path: Path) -> None:
    states = [
        *pair(),
        {"w": dtensor(ones(0), "0", (4,), (2,), None, [placements.Shard(0)]), "own": tensor(ones(3), "1")},
    ]
    with sw.open_checkpoint(ranks(tmp_path, states)) as checkpoint:
        assert checkpoint.read("w").tolist() == [0, 1, 2, 3]
        assert checkpoint.read("own").tolist() == [0, 1, 2]
