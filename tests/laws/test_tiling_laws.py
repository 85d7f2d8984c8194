"""Law 9: a plan between any two tilings gives each holder every element of its pieces exactly once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from tests.checks import view_index
from tests.tilings import SHAPES, cut_boxes, held, numbered, tilings, view


@st.composite
def pairs(draw: st.DrawFn) -> tuple[sw.Tiling, sw.Tiling]:
    shape = draw(SHAPES)
    return draw(tilings(shape)), draw(tilings(shape))


def check(src: sw.Tiling, dst: sw.Tiling) -> None:
    """Carry the transfers one by one between arrays of numbers, each of which tells where it is from."""
    whole = numbered(src.shape)
    have, want = held(src, whole), held(dst, whole, 0)
    plan = sw.plan_reshard(src, dst)
    got = [np.zeros_like(array) for array in want]
    times = [np.zeros(array.shape, int) for array in want]
    senders, receivers = list(src.holders), list(dst.holders)
    for transfer, (src_piece, dst_piece) in zip(plan, plan.pieces().tolist(), strict=True):
        source, target = senders.index(transfer.src_device), receivers.index(transfer.dst_device)
        expected = whole[view_index(transfer.box)]
        assert transfer.size == expected.size > 0
        assert np.array_equal(transfer.src_view(have[source]), expected)
        transfer.dst_view(got[target])[...] = transfer.src_view(have[source])
        transfer.dst_view(times[target])[...] += 1
        for tiling, holder, number in (src, transfer.src_device, src_piece), (dst, transfer.dst_device, dst_piece):
            piece = tiling.pieces(holder)[number]
            assert all(a.start <= b.start and b.stop <= a.stop for a, b in zip(piece.box, transfer.box, strict=True))
    kept: Counter[int] = Counter()
    for row in plan.kept:
        source, target = int(row["src_device"]), int(row["dst_device"])
        assert senders[source] == receivers[target]
        kept[target] += int(np.prod(row["stop"] - row["start"], dtype=int))
    for target, array in enumerate(want):
        missing = np.count_nonzero(array) - np.count_nonzero(times[target])
        assert missing == kept[target]
        assert times[target].max(initial=0) <= 1
        assert np.array_equal(got[target], np.where(times[target], array, 0))
    for result, array in zip(plan.run(have), want, strict=True):
        assert result.shape == array.shape
        assert np.array_equal(result, array)
    out = [np.full(array.shape, 0) for array in want]
    plan.run(have, out)
    assert all(map(np.array_equal, out, want))
    sent, received = plan.bytes_sent("u1"), plan.bytes_received("u1")
    assert sent.sum() == received.sum() == plan.total_bytes("u1")


@settings(deadline=None)
@given(pairs())
def test_any_tiling_to_any_other(pair: tuple[sw.Tiling, sw.Tiling]) -> None:
    check(*pair)


@settings(deadline=None)
@given(SHAPES.flatmap(lambda shape: st.tuples(tilings(shape), cut_boxes(shape), st.data())))
def test_a_reader_may_ask_for_anything(case: Any) -> None:
    src, boxes, data = case
    asked = {f"cpu:{i}": box for i, box in enumerate(data.draw(st.lists(st.sampled_from(boxes))))}
    check(src, sw.Tiling.from_boxes(src.shape, {name: [box] for name, box in asked.items()}))


@settings(deadline=None)
@given(pairs(), st.integers(1, 40))
def test_rounds_lose_nothing(pair: tuple[sw.Tiling, sw.Tiling], budget: int) -> None:
    src, dst = pair
    plan = sw.plan_reshard(src, dst)
    whole = numbered(src.shape)
    got: Counter[tuple[int, int]] = Counter()
    for part in plan.rounds(budget, "u1"):
        loads: Counter[tuple[str, int]] = Counter()
        for row in part:
            box = tuple(map(slice, row["start"].tolist(), row["stop"].tolist()))
            values = whole[view_index(box)].ravel().tolist()
            got.update((int(row["dst_device"]), value) for value in values)
            loads["sent", int(row["src_device"])] += len(values)
            loads["received", int(row["dst_device"])] += len(values)
        assert max(loads.values()) <= budget
    expected: Counter[tuple[int, int]] = Counter()
    for row in plan.transfers:
        box = tuple(map(slice, row["start"].tolist(), row["stop"].tolist()))
        expected.update((int(row["dst_device"]), value) for value in whole[view_index(box)].ravel().tolist())
    assert got == expected


def test_views_of_flat_arrays() -> None:
    """What a device holds of its new shard as a part of a flat parameter is a view of it."""
    src = sw.Tiling.from_flat_ranges((4, 6), {"cpu:0": (0, 12), "cpu:1": (12, 24)})
    rows = sw.TensorLayout(("x", None), sw.DeviceMesh((2,), ("x",))).partition((4, 6))
    parts = [np.arange(12), np.arange(12, 24)]
    results = sw.plan_reshard(src, rows).run(parts)
    assert all(map(np.shares_memory, results, parts))
    assert np.array_equal(np.concatenate(results), np.arange(24).reshape(4, 6))
    assert sw.plan_reshard(src, rows).peak_extra_memory("f4").tolist() == [0, 0]
    assert view(parts[0], src.pieces("cpu:0")[0], (4, 6)).shape == (2, 6)
