"""What `test_mpi.py` runs under `mpirun -n 4`: `python -m tests.execute.mpi_ranks NAME`."""

from __future__ import annotations

import re
import sys
import traceback
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from mpi4py import MPI

import shardwise as sw
from shardwise import packed
from shardwise.execute import mpi
from shardwise.execute.communicator import MpiTransport
from tests.checks import view_index
from tests.strategies import layouts
from tests.tilings import explicit, flat_ranges, grids, held, numbered, view

COMM = MPI.COMM_WORLD
RANK = COMM.Get_rank()
MESH = sw.DeviceMesh((2, 2), ("x", "y"))
DTYPES = ["u1", "<f4", ">i8", "c16", "V3", "S5", "M8[s]"]

Array = npt.NDArray[Any]


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...]) -> sw.Tiling:
    layout = draw(layouts(MESH, rank=len(shape), partial=False))
    return layout.partition(shape, draw(st.sampled_from(["ceil", "chunk", "balanced"])))


def tilings(shape: tuple[int, ...]) -> st.SearchStrategy[sw.Tiling]:
    kinds = partitions(shape) | grids(shape) | flat_ranges(shape) | explicit(shape)
    return kinds.filter(lambda tiling: 0 < len(tiling.holders) <= 4)


def ranks_of(draw: Any, plan: sw.reshard.ReshardPlan) -> tuple[list[int] | None, list[int] | None]:
    """Who is which rank: as it is by default, or dealt out, with one rank for a label that is in both."""
    if draw(st.booleans()):
        return None, None
    sources = draw(st.permutations(range(4)))[: len(plan.src.holders)]
    targets = draw(st.permutations(range(4)))[: len(plan.dst.holders)]
    if plan.src.has_labels and plan.dst.has_labels:
        known = dict(zip(plan.src.holders, sources, strict=True))
        free = [rank for rank in range(4) if rank not in [known.get(label) for label in plan.dst.holders]]
        targets = [known[label] if label in known else free.pop() for label in plan.dst.holders]
    return sources, targets


def default_ranks(plan: sw.reshard.ReshardPlan) -> tuple[list[int], list[int]]:
    before, after = list(plan.src.holders), list(plan.dst.holders)
    if not (plan.src.has_labels and plan.dst.has_labels):
        return list(range(len(before))), list(range(len(after)))
    everyone = before + [label for label in after if label not in before]
    return [everyone.index(label) for label in before], [everyone.index(label) for label in after]


def check(
    plan: sw.reshard.ReshardPlan, whole: Array, given_ranks: Any, memory: int, order: str, with_out: bool
) -> None:
    """Run it on every rank, and compare with what numpy cuts out of the whole tensor."""
    sources, targets = default_ranks(plan) if given_ranks[0] is None else given_ranks
    src = out = None
    if RANK in sources:
        src = np.asarray(held(plan.src, whole, rest=0)[sources.index(RANK)], order=order)  # type: ignore[call-overload]
        src.flags.writeable = False
    if RANK in targets:
        label = plan.dst.holders[targets.index(RANK)]
        if with_out:
            # Every second element of a larger array, from its end.
            room = np.zeros([2 * n for n in plan.dst.holder_shape(label)], whole.dtype)
            out = room[view_index(slice(None, None, -2) for _ in room.shape)]
    got = mpi.run(plan, COMM, src, out, src_ranks=given_ranks[0], dst_ranks=given_ranks[1], memory=memory)
    if RANK not in targets:
        assert got is None
        return
    assert got is not None
    assert out is None or got is out
    for piece in plan.dst.pieces(label):
        assert view(got, piece, whole.shape).tobytes() == whole[view_index(piece.box)].tobytes()


def random_plans() -> None:
    """The first rank draws, and tells the others."""

    @settings(
        max_examples=150,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def lead(data: st.DataObject) -> None:
        shape = data.draw(st.lists(st.integers(0, 6), max_size=3).map(tuple))
        src, dst = data.draw(tilings(shape)), data.draw(tilings(shape))
        plan = sw.plan_reshard(src, dst)
        assume(not (src.has_labels and dst.has_labels) or len({*src.holders, *dst.holders}) <= 4)
        ranks = ranks_of(data.draw, plan)
        memory = data.draw(st.sampled_from([8 * 16, 1000, 1 << 20]))
        dtype, order = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from("CF"))
        case = (src, dst, ranks, memory, dtype, order, data.draw(st.booleans()))
        COMM.bcast(case)
        follow(case)

    def follow(case: Any) -> None:
        src, dst, ranks, memory, dtype, order, with_out = case
        kind = np.dtype(dtype)
        count = int(np.prod(src.shape, dtype=np.int64))
        data = np.arange(count * kind.itemsize, dtype=np.int64).astype(np.uint8) % 251
        check(sw.plan_reshard(src, dst), data.view(kind).reshape(src.shape), ranks, memory, order, with_out)
        cases.append(case)

    cases: list[Any] = []
    if RANK == 0:
        lead()
        COMM.bcast(None)
    else:
        while (case := COMM.bcast(None)) is not None:
            follow(case)
    if RANK == 0:
        print(f"{len(cases)} plans")
    assert len(cases) >= 100


def packed_plans() -> None:
    line = sw.DeviceMesh((4,), ("tp",))
    whole = numbered((48, 5))
    for before, after in [("blocked", "by_rank"), ("by_rank", "blocked")]:
        fused = sw.TensorLayout((packed.qkv(8, 4, 3, "tp"), None), line).partition((48, 5))
        rows = sw.TensorLayout(("tp", None), line).partition((48, 5))
        for src, dst in ((fused, rows), (rows, fused)):
            check(sw.plan_reshard(src, dst), whole, (None, None), 999, "C", before < after)


def sums() -> None:
    """Floats whose sum depends on the order: every replica has the bytes of adding in the order of the ranks."""
    mesh = sw.DeviceMesh((4,), ("x",))
    addends = [np.random.default_rng(i).normal(size=(6, 7)) * 10.0**i for i in range(4)]
    src = sw.TensorLayout((None, None), mesh, unreduced=("x",)).partition((6, 7))
    total = addends[0] + addends[1] + addends[2] + addends[3]
    for axes in [(None, None), ("x", None), (None, "x")]:
        dst = sw.TensorLayout(axes, mesh).partition((6, 7), "ceil")
        for memory in (64, 500, 1 << 20):
            got = mpi.run(sw.plan_reshard(src, dst), COMM, addends[RANK], memory=memory)
            assert got is not None
            assert got.tobytes() == dst.views(total)[RANK].tobytes()


def dtypes_by_name() -> None:
    """A rank that only receives is told which dtype the others have, also of ml_dtypes."""
    import ml_dtypes

    plan = sw.plan_reshard(sw.Tiling.from_boxes((4, 6), [[(0, 4), (0, 6)]]), sw.Tiling.grid((4, 6), (2, 3)))
    for kind in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float16, ">u4"):
        whole = numbered((4, 6)).astype(kind)
        got = mpi.run(plan, COMM, whole if RANK == 0 else None)
        assert got is not None
        row, column = divmod(RANK, 2)
        expected = whole[2 * row : 2 * row + 2, 3 * column : 3 * column + 3]
        assert (got.dtype, got.tobytes()) == (np.dtype(kind), expected.tobytes())


def refusals() -> None:
    """What one rank does wrong, all hear of; and the next call works."""
    mesh = sw.DeviceMesh((4,), ("x",))
    rows, columns = (sw.TensorLayout(axes, mesh).partition((4, 8)) for axes in (("x", None), (None, "x")))
    plan, good = sw.plan_reshard(rows, columns), np.full((1, 8), RANK)
    odd = RANK == 2
    sums, whole = (sw.TensorLayout((None, None), mesh, unreduced=axes).partition((4, 8)) for axes in (("x",), ()))
    added = sw.plan_reshard(sums, whole)
    one = sw.plan_reshard(sw.Tiling.from_boxes((1, 8), [[(0, 1), (0, 8)]]), sw.Tiling.grid((1, 8), (1, 2)))
    cases: list[tuple[str, Any, Any, dict[str, Any]]] = [
        ("src must be of shape (1, 8), got (8, 1)", plan, good.T if odd else good, {}),
        ("src must be of shape (1, 8), got None", plan, None if odd else good, {}),
        ("rank 2 and rank 0 have different plans", sw.plan_reshard(rows, rows) if odd else plan, good, {}),
        ("plan must be a ReshardPlan", rows if odd else plan, good, {}),
        ("the dtype is", plan, good.astype("f4") if odd else good, {}),
        ("out is read-only", plan, good, {"out": np.broadcast_to(np.int64(0), (4, 2))} if odd else {}),
        ("out shares memory with src", plan, good, {"out": good.reshape(4, 2)} if odd else {}),
        (
            "out overlaps itself",
            plan,
            good,
            {"out": np.lib.stride_tricks.as_strided(good, (4, 2), (8, 8))} if odd else {},
        ),
        ("src is of dtype object", plan, good.astype(object) if odd else good, {}),
        ("memory is", plan, good, {"memory": 2**20 if odd else 2**21}),
        ("memory is 8 B; at least 8 buffers", plan, good, {"memory": 8}),
        ("memory is 3; it must be at least 8 bytes", plan, good, {"memory": 3}),
        ("src_ranks has 2 ranks, but the plan has 4 holders", plan, good, {"src_ranks": [0, 1]}),
        ("dst_ranks[1] is 9; the communicator has 4 ranks", plan, good, {"dst_ranks": [0, 9, 1, 2]}),
        ("dst_ranks[1] is 4; the communicator has 4 ranks", plan, good, {"dst_ranks": [0, 4, 1, 2]}),
        ("src_ranks[1] is -1; the communicator has 4 ranks", plan, good, {"src_ranks": [0, -1, 1, 2]}),
        ("src_ranks must be a sequence of integers, got str", plan, good, {"src_ranks": "0123"}),
        ("src must be a numpy array without a mask", plan, np.ma.masked_array(good) if odd else good, {}),
        ("src must be a numpy array without a mask, or None, got list", plan, good.tolist() if odd else good, {}),
        ("out must be of shape (4, 2), got (2, 4)", plan, good, {"out": np.empty((2, 4), np.int64)} if odd else {}),
        ("src is of dtype int64, but out is of dtype float64", plan, good, {"out": np.empty((4, 2))} if odd else {}),
        ("src is of dtype |V0, whose elements cannot be sent", plan, np.empty((1, 8), "V0") if odd else good, {}),
        ("memory is 4611686018427387905; it must be", plan, good, {"memory": 2**62 + 1}),
        ("partial sums of dtype datetime64[s] do not add up", added, np.full((4, 8), RANK, "M8[s]"), {}),
        ("src must be None, got (1, 8)", one, good, {}),
        ("src_ranks[1] repeats rank 0", plan, good, {"src_ranks": [0, 0, 1, 2]}),
        ("dst_ranks[0] is 1, but 'cpu:0' is in src too, as rank 0", plan, good, {"dst_ranks": [1, 0, 2, 3]}),
    ]
    for message, other, src, options in cases:
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            mpi.run(other, COMM, src, **options)
        COMM.Barrier()
    for comm in (None, "world", MPI.COMM_NULL):
        with pytest.raises(TypeError, match="comm must be an intracommunicator of mpi4py"):
            mpi.run(plan, comm, good)
    # The least memory that there may be: a byte a buffer.
    for array, memory in ((good, 2**26), (good.astype("u1"), 8), (good, 64)):
        got = mpi.run(plan, COMM, array, memory=memory)
        assert got is not None
        assert got.dtype == array.dtype
        assert got.tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
    with pytest.raises(sw.LayoutError, match=re.escape("memory is 63 B; at least 8 buffers")):
        mpi.run(plan, COMM, good, memory=63)


def failure_later() -> None:
    """One rank fails when others wait for it already: all end."""
    mesh = sw.DeviceMesh((4,), ("x",))
    rows, columns = (sw.TensorLayout(axes, mesh).partition((4, 8)) for axes in (("x", None), (None, "x")))
    if RANK == 2:

        def fail(*arguments: Any) -> Any:
            raise MemoryError("no room for this")

        MpiTransport.send = fail  # type: ignore[assignment, method-assign]
    mpi.run(sw.plan_reshard(rows, columns), COMM, np.full((1, 8), RANK))


def too_little() -> None:
    """One rank sends a byte less than it should, of partial sums: MPI takes it, and says nothing."""
    mesh = sw.DeviceMesh((4,), ("x",))
    sums, whole = (sw.TensorLayout((None, None), mesh, unreduced=axes).partition((4, 8)) for axes in (("x",), ()))
    if RANK == 2:
        send = MpiTransport.send

        def shorter(self: Any, peer: int, tag: int, data: Any, part: Any) -> Any:
            return send(self, peer, tag, data, part._replace(size=part.size - 1))

        MpiTransport.send = shorter  # type: ignore[method-assign]
    mpi.run(sw.plan_reshard(sums, whole), COMM, np.full((4, 8), RANK))


if __name__ == "__main__":
    try:
        globals()[sys.argv[1]]()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        COMM.Abort(3)
    print("all is well", flush=True)
