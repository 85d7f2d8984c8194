"""Plans of models among processes of PyTorch with gloo: equal to the bit, and errors on every process."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from shardwise import DeviceMesh, LayoutError, TensorLayout, plan_model  # noqa: E402
from shardwise.deploy import Deployment, fsdp2  # noqa: E402
from shardwise.execute import torch as executor  # noqa: E402
from shardwise.reshard import ModelPlan, ModelProgram  # noqa: E402

TRAINERS, ENGINES = 8, 4
TENSORS = {f"{kind}{i}": ((24, 16) if kind != "n" else (7,), "float32") for i in range(3) for kind in "abn"}
#: Large enough to go on their own: runs on both sides, on the sender's, on the receiver's, and on neither.
LARGE = {"rows": (4104, 1024), "columns": (4096, 1024), "back": (1024, 4096), "askew": (4096, 1030), "small": (7, 5)}
#: How one process fails, after all have agreed.
FAILURES = ("dies at once", "dies midway", "sends too little", "raises", "a byte less", "half", "a large part")


def plan_of(rows: str = "a") -> ModelPlan:
    columns = "b" if rows == "a" else "a"
    rules = {rows: ("tp", None), columns: (None, "tp"), "n": (None,)}
    engine = Deployment([f"gpu:{i}" for i in range(ENGINES)], DeviceMesh((ENGINES,), ("tp",)), rules)
    return plan_model(fsdp2(TRAINERS), engine, TENSORS)


def large_plan() -> ModelPlan:
    trainer, engine = DeviceMesh((8,), ("x",)), DeviceMesh((4,), ("x",), [f"gpu:{i}" for i in range(ENGINES)])
    rows, columns = ("x", None), (None, "x")
    before = {"rows": rows, "columns": rows, "back": columns, "askew": columns, "small": rows}
    after = {"rows": rows, "columns": columns, "back": rows, "askew": columns, "small": columns}
    src, dst = (
        {name: TensorLayout(axes, mesh) for name, axes in side.items()}
        for side, mesh in ((before, trainer), (after, engine))
    )
    return plan_model(src, dst, {name: (shape, "float32") for name, shape in LARGE.items()}, uneven="balanced")


def tensors_of(plan: ModelPlan, label: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What a process has before, where it writes, and what it should have then."""
    before, out, expected = {}, {}, {}
    for number, name in enumerate(plan):
        shape = plan[name].src.shape
        whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + 1000 * number
        ends = plan[name]
        if label in ends.src.holders:
            before[name] = whole[ends.src.pieces(label)[0].box].contiguous()
        if label in ends.dst.holders:
            expected[name] = whole[ends.dst.pieces(label)[0].box].contiguous()
            out[name] = torch.zeros_like(expected[name])
    return before, out, expected


def sums(rank: int) -> None:
    """Floats whose sum depends on the order: the bytes of adding in the order of the coordinates, as numpy adds."""
    mesh = DeviceMesh((TRAINERS + ENGINES,), ("x",))
    before = dict.fromkeys("ab", TensorLayout((None, None), mesh, unreduced=["x"]))
    after = {"a": TensorLayout(("x", None), mesh), "b": TensorLayout((None, None), mesh)}
    shapes = {"a": (30, 7), "b": (600, 500)}  # The second is larger than a buffer.
    plan = plan_model(before, after, {name: (shapes[name], "float32") for name in "ab"}, uneven="ceil")
    addends = {
        name: [(np.random.default_rng(i).normal(size=shape) * 10.0**i).astype("f4") for i in range(mesh.size)]
        for name, shape in shapes.items()
    }
    label = plan.devices[rank]
    for memory, is_spare in ((None, False), (10**5, True)):
        out = {name: torch.full(plan[name].dst.holder_shape(label), 7.0) for name in "ab"}
        spare = {name: torch.empty_like(tensor) for name, tensor in out.items()} if is_spare else None
        source = {name: torch.from_numpy(addends[name][rank]) for name in "ab"}
        executor.run(plan.program(label, memory), source, out, spare=spare)
        for name in "ab":
            total = addends[name][0]
            for one in addends[name][1:]:
                total = total + one
            assert out[name].numpy().tobytes() == total[plan[name].dst.pieces(label)[0].box].tobytes()
    with pytest.raises(
        LayoutError, match="but the plan adds up float32" if rank == 1 else "rank 1 of the group cannot"
    ):
        executor.run(plan.program(label), source, {**out, "a": out["a"].view(torch.int32)} if rank == 1 else out)


class Disturbed(ModelProgram):
    """A program that its peers agree with, and that is not carried out."""

    agreed: ModelProgram

    def digest(self, peer: Any) -> bytes:
        return self.agreed.digest(peer)


def disturbed(program: ModelProgram, failure: str) -> ModelProgram:
    messages = program.messages.copy()
    sends = np.flatnonzero(messages["sends"])
    if failure == "sends too little":
        messages["stop"][sends[-1]] -= 1
        row = program.descriptors.sends[messages["stop"][sends[-1]]]
        messages["bytes"][sends[-1]] -= int(row["bytes"] * row["count"])
    else:
        messages["peer"][sends[len(sends) // 2]] = 10**6  # Looked at when it is its turn.
    made = Disturbed(program.descriptors, messages)
    object.__setattr__(made, "agreed", program)
    return made


def shortening(send: Any, failure: str) -> Any:
    """Send one message that is shorter than its receiver awaits: gloo says nothing."""
    left = iter(range(3))

    def shorter(data: Any, *arguments: Any, **named: Any) -> Any:
        if failure == "a large part":
            is_it = data.numel() >= 2**18 and data.numel() % 4 == 0  # One without a mark after it.
        else:
            is_it = next(left, None) is None
        if is_it:
            data = data[: len(data) // 2] if failure == "half" else data[:-1]
        return send(data, *arguments, **named)

    return shorter


def shared_arguments(before: Any, out: Any, spare: Any, joined: Any) -> list[tuple[Any, Any, Any]]:
    """Three ways to give memory that is written and used once more; those that overlap do so in part."""
    numel = out["a0"].numel()
    first, second = joined[:numel].view(out["a0"].shape), joined[numel // 2 :][:numel].view(out["a0"].shape)
    assert out["a0"].shape == out["a1"].shape
    return [
        (before, {**out, "a0": first, "a1": second}, None),
        (before, out, {**spare, "b0": out["b0"]}),
        (before, {**out, "a0": first}, {**spare, "a1": second}),
    ]


def process(rank: int, port: int, failure: str | None, said: Any) -> None:
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    timeout = timedelta(seconds=25 if failure else 240)
    dist.init_process_group("gloo", rank=rank, world_size=TRAINERS + ENGINES, timeout=timeout)
    plan = large_plan() if failure == "a large part" else plan_of()
    label = plan.devices[rank]
    before, out, expected = tensors_of(plan, label)
    spare = {name: torch.full_like(tensor, 7) for name, tensor in out.items()}
    if failure:
        program = plan.program(label, None if failure == "a large part" else 100)
        dist.barrier()
        if rank == 1:
            if failure == "dies at once":
                os._exit(0)
            if failure == "dies midway":
                send, left = dist.isend, iter(range(3))

                def dies(*arguments: Any, **named: Any) -> Any:
                    if next(left, None) is None:
                        os._exit(0)
                    return send(*arguments, **named)

                dist.isend = dies
            elif failure in ("a byte less", "half", "a large part"):
                dist.isend = shortening(dist.isend, failure)
            else:
                program = disturbed(program, failure)
        began = time.monotonic()
        failed = False
        try:
            executor.run(program, before, out, spare=spare)
        except (RuntimeError, LayoutError, IndexError):
            failed = True
        untouched = not any(tensor.any() for tensor in out.values())
        said.put((rank, failed and untouched and time.monotonic() - began < 100))
        said.close()
        said.join_thread()
        os._exit(0)  # Whatever PyTorch still waits for.
    for memory, more in ((None, None), (100, None), (100, spare)):
        for tensor in out.values():
            tensor.zero_()
        executor.run(plan.program(label, memory), before, out, spare=more)
        assert all(torch.equal(out[name], expected[name]) for name in expected)
    large = large_plan()
    large_before, large_out, large_expected = tensors_of(large, label)
    for memory in (None, 3 * 2**20 + 1):
        executor.run(large.program(label, memory), large_before, large_out)
        assert all(torch.equal(large_out[name], large_expected[name]) for name in large_expected)
        for tensor in large_out.values():
            tensor.zero_()
    sums(rank)
    for tensor in out.values():
        tensor.zero_()
    small = {
        name: tensor[:1].contiguous() if rank == TRAINERS and name == "a0" else tensor for name, tensor in out.items()
    }
    mine = (
        r"out\['a0'\] has \d+ bytes; the plan needs"
        if rank == TRAINERS
        else rf"rank {TRAINERS} of the group cannot begin"
    )
    with pytest.raises(LayoutError, match=mine):
        executor.run(plan.program(label), before, small)
    with pytest.raises(LayoutError, match=mine.replace("out", "spare")):
        executor.run(plan.program(label), before, out, spare={name: tensor.clone() for name, tensor in small.items()})
    # One of them writes into what it reads, into the same memory twice, or receives into what is to stay whole.
    joined = torch.zeros(2**12)
    for given in shared_arguments(before, out, spare, joined) if rank == TRAINERS else [(before, out, None)] * 3:
        with pytest.raises(LayoutError, match="shares memory with" if rank == TRAINERS else "cannot begin"):
            executor.run(plan.program(label), given[0], given[1], spare=given[2])
    assert not any(tensor.any() for tensor in (*out.values(), joined))
    other = plan_of("b" if rank == 0 else "a")
    _, out_there, _ = tensors_of(other, label)
    with pytest.raises(LayoutError, match=r"have different plans for each other: [0-9a-f]{64} and [0-9a-f]{64}"):
        executor.run(other.program(label), before, out_there)
    with pytest.raises(LayoutError, match=r"have different versions: [0-9a-f]{64} and [0-9a-f]{64}"):
        executor.run(plan.program(label), before, out, version="step 8" if rank else "step 7")
    assert not any(tensor.any() for tensor in (*out.values(), *out_there.values()))
    with pytest.raises(LayoutError, match=r"ranks has no rank for 'cpu:0'|cannot begin"):
        executor.run(plan.program(label), before, out, ranks={} if rank else None)
    said.put((rank, True))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("failure", [None, *FAILURES])
def test_among_processes(failure: str | None) -> None:
    # Processes that need not import PyTorch each.
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", __name__])
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    said = context.Queue()
    ranks = range(TRAINERS + ENGINES)
    started = [context.Process(target=process, args=(rank, port, failure, said)) for rank in ranks]
    for one in started:
        one.start()
    left = {rank for rank in ranks if not (failure and failure.startswith("dies") and rank == 1)}
    try:
        while left:
            rank, good = said.get(timeout=300)
            assert good
            left.remove(rank)
    finally:
        for one in started:
            one.join(10)
            one.kill()
