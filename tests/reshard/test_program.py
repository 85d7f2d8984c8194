"""Law 10: every program of a plan, run by anyone in any order that respects its waits, ends in the same bytes."""

from __future__ import annotations

import pickle
import queue
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from tests.tilings import SHAPES, held, numbered, tilings

Array = npt.NDArray[Any]


def programs_of(plan: sw.reshard.ReshardPlan) -> Iterator[tuple[sw.reshard.Program, int | None, int | None]]:
    """Every program, with the holder's numbers in the source and in the destination."""
    senders, receivers = list(plan.src.holders), list(plan.dst.holders)
    named = plan.src.has_labels and plan.dst.has_labels
    for i, label in enumerate(senders):
        both = named and label in receivers
        side: Any = None if named or label not in receivers else "src"
        yield plan.program(label, side), i, receivers.index(label) if both else None
    for i, label in enumerate(receivers):
        if not (named and label in senders):
            yield plan.program(label, None if named or label not in senders else "dst"), None, i


def simulate(plan: sw.reshard.ReshardPlan, have: list[Array], seed: int, rendezvous: bool) -> list[Array]:
    """Run all programs in a random order; a send leaves its values in a mailbox, or waits until they are received."""
    rng = random.Random(seed)
    got = [np.zeros(plan.dst.holder_shape(label), have[0].dtype) for label in plan.dst.holders]
    runs = [(pickle.loads(pickle.dumps(program)), source, target) for program, source, target in programs_of(plan)]
    at = [0] * len(runs)
    mailbox: dict[int, Array] = {}
    while waiting := [i for i, (program, *_) in enumerate(runs) if at[i] < len(program)]:
        rng.shuffle(waiting)
        expected = {runs[i][0][at[i]].tag for i in waiting if runs[i][0][at[i]].kind == "receive"}
        for i in waiting:
            program, source, target = runs[i]
            step: sw.reshard.Step = program[at[i]]
            if step.kind == "receive" and step.tag not in mailbox:
                continue
            if step.kind == "send" and rendezvous and step.tag not in expected:
                continue
            break
        else:
            raise AssertionError("all wait for each other")
        at[i] += 1
        if step.kind == "receive":
            values = mailbox.pop(step.tag)
        else:
            assert source is not None
            assert step.src is not None
            values = step.src.view(have[source])
        if step.kind == "send":
            mailbox[step.tag] = values.copy()
            continue
        assert target is not None
        assert step.dst is not None
        view = step.dst.view(got[target])
        view[...] = view + values if step.adds else values
    assert not mailbox
    return got


@st.composite
def plans(draw: st.DrawFn) -> sw.reshard.ReshardPlan:
    shape = draw(SHAPES)
    return sw.plan_reshard(draw(tilings(shape)), draw(tilings(shape)))


@settings(deadline=None)
@given(plans(), st.integers(0, 99), st.booleans())
def test_in_any_order_programs_do_what_run_does(plan: sw.reshard.ReshardPlan, seed: int, rendezvous: bool) -> None:
    have = held(plan.src, numbered(plan.src.shape))
    if have:
        expected = plan.run(have)
        assert all(map(np.array_equal, simulate(plan, have, seed, rendezvous), expected))


@settings(deadline=None)
@given(st.integers(0, 99), st.booleans())
def test_partial_sums_are_added_in_one_order(seed: int, rendezvous: bool) -> None:
    """Floats whose sum depends on the order: all replicas and `run` agree to the last bit."""
    mesh = sw.DeviceMesh((2, 3), ("x", "y"))
    src = sw.TensorLayout(("x",), mesh, unreduced=("y",)).partition((4,))
    dst = sw.TensorLayout((None,), mesh).partition((4,))
    have = [np.random.default_rng(i).normal(size=2) * 10.0**i for i in range(6)]
    plan = sw.plan_reshard(src, dst)
    expected = plan.run(have)
    got = simulate(plan, have, seed, rendezvous)
    assert [a.tobytes() for a in got] == [a.tobytes() for a in expected]


def test_each_program_is_run_by_a_thread_of_its_own() -> None:
    mesh = sw.DeviceMesh((4,), ("x",))
    whole = numbered((12, 8))
    src = sw.Tiling.from_flat_ranges(whole.shape, {f"cpu:{i}": (24 * i, 24 * i + 24) for i in range(4)})
    dst = sw.TensorLayout((None, "x"), mesh).partition(whole.shape)
    plan = sw.plan_reshard(src, dst)
    boxes: dict[tuple[Any, int], queue.Queue[Array]] = {
        (t.dst_device, tag): queue.Queue(1) for tag, t in enumerate(plan)
    }
    results: dict[str, Array | None] = {}

    def work(name: str, part: Array) -> None:
        program = plan.program(name)
        assert program.dst_shape is not None

        def receive(peer: Any, tag: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
            values = boxes[name, tag].get(timeout=600)
            assert (values.shape, values.dtype, peer) == (shape, dtype, plan[tag].src_device)
            return values

        results[name] = program.run(
            part,
            np.empty(program.dst_shape, whole.dtype),
            lambda peer, tag, values: boxes[peer, tag].put(values.copy(), timeout=600),
            receive,
        )

    threads = [threading.Thread(target=work, args=item) for item in zip(src.holders, held(src, whole), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, name in enumerate(dst.holders):
        assert np.array_equal(results[name], dst.views(whole)[i])  # type: ignore[arg-type]


def test_programs_are_values() -> None:
    mesh = sw.DeviceMesh((2,), ("x",))
    plan = sw.plan_reshard(
        sw.TensorLayout(("x", None), mesh).partition((4, 4)), sw.TensorLayout((None, "x"), mesh).partition((4, 4))
    )
    program = plan.program("cpu:1")
    assert [step.kind for step in program] == ["copy", "send", "receive"]
    assert program == plan.program("cpu:1") != plan.program("cpu:0")
    assert hash(program) == hash(plan.program("cpu:1"))
    assert pickle.loads(pickle.dumps(program)) == program
    assert eval(repr(program), {name: getattr(sw.reshard, name) for name in ("Program", "Step", "LocalBox")}) == program
    assert hash(plan[0]) == hash(plan[0])
    assert (program.holder, program.src_shape, program.dst_shape) == ("cpu:1", (2, 4), (4, 2))
    with pytest.raises(ValueError, match=r"src must be of shape \(2, 4\), got \(4, 2\)"):
        program.run(np.empty((4, 2)), np.empty((4, 2)), print, print)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="out must be of dtype float64, as src is, got int64"):
        program.run(np.empty((2, 4)), np.empty((4, 2), np.int64), print, print)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"receive must return values of shape \(2, 2\), got \(2,\)"):
        program.run(np.empty((2, 4)), np.empty((4, 2)), print, lambda *_: np.empty(2))


def test_who_is_who() -> None:
    chunks = sw.Tiling.from_boxes((4,), [[(0, 2)], [(2, 4)]])
    plan = sw.plan_reshard(chunks, sw.Tiling.from_boxes((4,), [[(1, 3)]]))
    with pytest.raises(sw.LayoutError, match="src and dst each have a holder 0; say which one with side"):
        plan.program(0)
    assert [step.kind for step in plan.program(0, "src")] == ["send"]
    assert sorted((step.kind, step.peer) for step in plan.program(0, "dst")) == [("receive", 0), ("receive", 1)]
    assert [step.kind for step in plan.program(1)] == ["send"]
    wrongs: list[Any] = [2, "x", []]
    for wrong in wrongs:
        with pytest.raises(sw.LayoutError, match="is not in src or dst of the plan"):
            plan.program(wrong)
    with pytest.raises(sw.LayoutError, match="is not in dst of the plan"):
        plan.program(1, "dst")
    with pytest.raises(sw.LayoutError, match="side must be"):
        plan.program(1, "both")  # type: ignore[arg-type]
    back = sw.plan_reshard(sw.Tiling.from_boxes((4,), [[(0, 4)]]), chunks)
    assert [step.kind for step in back.program(1)] == ["receive"]


def test_the_first_device_by_its_label_its_index_and_from_either_side() -> None:
    mesh = sw.DeviceMesh((2,), ("x",))
    rows, columns = (sw.TensorLayout(axes, mesh).partition((4, 4)) for axes in (("x", None), (None, "x")))
    plan = sw.plan_reshard(rows, columns)
    program = plan.program("cpu:0")
    assert program == plan.program("cpu:0", "src") == plan.program("cpu:0", "dst")
    assert program.steps == plan.program(0).steps


def test_arrays_of_a_plan_cannot_be_made_writeable() -> None:
    plan = sw.plan_reshard(
        sw.TensorLayout(("x",), sw.DeviceMesh((2,), ("x",))).partition((4,)),
        sw.TensorLayout((None,), sw.DeviceMesh((2,), ("x",))).partition((4,)),
    )
    for array in (plan.transfers, plan.kept, *plan.rounds(1, "u1")):
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
