"""A plan of a model among MPI ranks: `mpiexec -n N python -m tests.execute.mpi_model_ranks`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from shardwise import DeviceMesh, LayoutError, TensorLayout, plan_model
from shardwise.deploy import Deployment, fsdp2, megatron
from shardwise.execute import mpi
from shardwise.reshard import ModelPlan

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()


def tensors() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for i in range(4):
        found[f"decoder.layers.{i}.mlp.linear_fc1.weight"] = (24, 6), "float32"
        found[f"decoder.layers.{i}.mlp.linear_fc2.weight"] = (6, 12), "float16"
        found[f"decoder.layers.{i}.mlp.linear_fc2.bias"] = (7,), "complex128"
    return found


def check(plan: ModelPlan, memory: int | None) -> None:
    label = plan.devices[RANK]
    before: dict[str, Any] = {}
    out: dict[str, Any] = {}
    expected: dict[str, Any] = {}
    for number, (name, (shape, dtype)) in enumerate(tensors().items()):
        whole = np.arange(np.prod(shape)).reshape(shape).astype(dtype) + number
        for tiling, into in ((plan[name].src, before), (plan[name].dst, expected)):
            if label in tiling.holders:
                shard = np.zeros(tiling.holder_shape(label), dtype)
                for piece in tiling.pieces(label):
                    assert isinstance(piece.start, tuple)
                    values = whole[piece.box]
                    shard[tuple(slice(a, a + n) for a, n in zip(piece.start, values.shape, strict=True))] = values
                into[name] = shard
        if name in expected:
            out[name] = np.zeros_like(expected[name])
    mpi.run_model(plan.program(label, memory), COMM, before, out)
    assert all(out[name].tobytes() == expected[name].tobytes() for name in expected)
    for array in out.values():
        array[...] = 0
    # One rank cannot begin: none does.
    given = {} if RANK == 0 else before
    with pytest.raises(LayoutError, match="has no array" if RANK == 0 else "rank 0 cannot begin"):
        mpi.run_model(plan.program(label, memory), COMM, given, {} if RANK == 0 else out)
    # All ranks write into one piece of memory twice: nobody sends anything.
    joined = np.zeros(2**12, np.uint8)
    twice = {n: joined[: a.nbytes].view(a.dtype).reshape(a.shape) for n, a in out.items()}
    is_shared = sum(array.nbytes > 0 for array in out.values()) > 1
    with pytest.raises(LayoutError, match="shares memory with out" if is_shared else "cannot begin"):
        mpi.run_model(plan.program(label, memory), COMM, before, twice)
    assert not joined.any()
    # Rank 1 has other messages than the others.
    with pytest.raises(LayoutError, match=r"have different plans for each other: [0-9a-f]{64} and [0-9a-f]{64}"):
        mpi.run_model(plan.program(label, 48 if RANK == 1 else memory), COMM, before, out)
    with pytest.raises(LayoutError, match=r"have different versions: [0-9a-f]{64} and [0-9a-f]{64}"):
        mpi.run_model(plan.program(label, memory), COMM, before, out, version="step 8" if RANK == 1 else "step 7")
    assert not any(array.any() for array in out.values())


def sums() -> None:
    """Floats whose sum depends on the order, of three sizes: the bytes of adding in the order of the coordinates."""
    mesh = DeviceMesh((SIZE,), ("x",))
    tensors = {"a": ((6, 7), "float64"), "b": ((5, 8), "float32"), "c": ((9, 4), "float16"), "d": ((4,), "int8")}
    before = {name: TensorLayout((None,) * len(shape), mesh, unreduced=["x"]) for name, (shape, _) in tensors.items()}
    before["d"] = TensorLayout((None,), mesh)
    cuts: Any = {"a": ("x", None), "b": (None, "x"), "c": (None, None), "d": ("x",)}
    after = {name: TensorLayout(axes, mesh) for name, axes in cuts.items()}
    plan = plan_model(before, after, tensors, uneven="ceil")
    addends = [
        {
            name: (np.random.default_rng(i).normal(size=shape) * 10.0**i).astype(dtype)
            for name, (shape, dtype) in tensors.items()
        }
        for i in range(SIZE)
    ]
    addends = [{**one, "d": np.arange(4, dtype="int8")} for one in addends]
    label = plan.devices[RANK]
    for memory in (None, 100, 8):
        out = {name: np.zeros(plan[name].dst.holder_shape(label), dtype) for name, (_, dtype) in tensors.items()}
        mpi.run_model(plan.program(label, memory), COMM, addends[RANK], out)
        for name, (shape, dtype) in tensors.items():
            total = np.zeros(shape, dtype) + addends[0][name]
            for one in addends[1:] if name != "d" else []:
                total = total + one[name]
            assert out[name].tobytes() == total[plan[name].dst.pieces(label)[0].box].tobytes()
    # One rank has an array of another dtype of the same size: nobody adds anything.
    wrong = {**addends[RANK], "b": addends[RANK]["b"].view("int32")} if RANK == 1 else addends[RANK]
    for array in out.values():
        array[...] = 0
    with pytest.raises(
        LayoutError, match="is of dtype int32, but the plan adds up float32" if RANK == 1 else "rank 1 "
    ):
        mpi.run_model(plan.program(label), COMM, wrong, out)
    assert not any(array.any() for array in out.values())


def main() -> None:
    half = SIZE // 2
    stages = megatron.gpt(megatron.Ranks(half, tp=half // 2, pp=2), megatron.pipeline(4, pp=2))
    rules = {"fc1": ("tp", None), r"fc2\.weight": (None, "tp"), "bias": (None,)}
    labels = [f"gpu:{i}" for i in range(SIZE - half)]
    engine = Deployment(labels, DeviceMesh((SIZE - half,), ("tp",)), rules)
    for memory in (None, 100):
        check(plan_model(stages, engine, tensors()), memory)
        check(plan_model(fsdp2(SIZE), stages, tensors()), memory)
    sums()
    print("all is well", flush=True)


if __name__ == "__main__":
    main()
