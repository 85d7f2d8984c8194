"""Law 5: going from layout A to layout B gives what cutting the whole array by B gives, and back is the identity."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings

import shardwise as sw
from tests.checks import view_index

Array = npt.NDArray[Any]

DTYPES = ["int8", "float32", ">i8", "complex128", "V3", "S5", "datetime64[s]", [("a", "i2"), ("b", "u1")]]
AXES = ("x", "y", "z")


@st.composite
def layouts(draw: st.DrawFn, rank: int) -> sw.TensorLayout:
    """Any layout over a small mesh, whose devices may be called anything."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    names = AXES[: len(sizes)]
    count = int(np.prod(sizes))
    devices = [f"d{i}" for i in draw(st.permutations(range(count + 2)))][:count]
    mesh = sw.DeviceMesh(sizes, names, devices if draw(st.booleans()) else None)
    specs: list[list[str]] = [[] for _ in range(rank)]
    for name in draw(st.permutations(names)):
        dim = draw(st.integers(0, rank))
        if dim < rank:
            specs[dim].append(name)
    return sw.TensorLayout(specs, mesh)


def strided(array: Array, how: int) -> Array:
    """The same values with other strides: as they are, in F order, every second one of a larger array, backwards."""
    result: Array = array.copy("F" if how == 1 else "C")
    if how == 2:
        every_second = view_index(slice(None, None, 2) for _ in array.shape)
        result = np.zeros([2 * n for n in array.shape], array.dtype)[every_second]
        result[...] = array
    if how == 3:
        turned = view_index(slice(None, None, -1) for _ in array.shape)
        result = array[turned].copy()[turned]
    return result


@st.composite
def cases(draw: st.DrawFn) -> tuple[Array, sw.Partition, sw.Partition, int]:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    values = np.frombuffer(np.random.default_rng(draw(st.integers(0, 99))).bytes(8192), np.uint8)
    size = int(np.prod(shape))
    array = values[: size * dtype.itemsize].copy().view(dtype)[:size].reshape(shape)
    rules: list[sw.UnevenRule] = [draw(st.sampled_from(["ceil", "chunk", "balanced", "floor"])) for _ in range(2)]
    a, b = (draw(layouts(len(shape))).partition(shape, rule) for rule in rules)
    return array, a, b, draw(st.integers(0, 3))


def same(a: Array, b: Array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


@settings(deadline=None)
@given(cases())
def test_a_to_b_is_b(case: tuple[Array, sw.Partition, sw.Partition, int]) -> None:
    array, a, b, how = case
    shards = [strided(view, how) for view in a.views(array)]
    plan = sw.plan_reshard(a, b)
    expected = b.views(array)
    moved = plan.run(shards)
    assert all(map(same, moved, expected))
    out = [strided(np.zeros_like(view), how) for view in expected]
    assert all(given is got for given, got in zip(out, plan.run(shards, out), strict=True))
    assert all(map(same, out, expected))
    back = sw.plan_reshard(b, a).run(moved)
    assert all(map(same, back, shards))


@settings(deadline=None)
@given(cases())
def test_interleaved_outputs(case: tuple[Array, sw.Partition, sw.Partition, int]) -> None:
    """The views of one large array are fine as outputs, whose memory interleaves, if each element is in one only."""
    array, a, b, how = case
    whole = strided(np.zeros_like(array), how)
    views = b.views(whole)
    plan = sw.plan_reshard(a, b)
    shards = [view.copy() for view in a.views(array)]
    if b.replicas > 1 and any(view.size for view in views):
        with pytest.raises(sw.LayoutError, match=r"shares memory with out\["):
            plan.run(shards, views)
    else:
        plan.run(shards, views)
        assert same(whole, array)


@settings(deadline=None)
@given(cases())
def test_each_element_arrives_once_and_nothing_moves_needlessly(
    case: tuple[Array, sw.Partition, sw.Partition, int],
) -> None:
    _, a, b, _ = case
    plan = sw.plan_reshard(a, b)
    have, want = a.devices_indices_map(), b.devices_indices_map()
    counts = {device: np.zeros(b.shape, int) for device in want}
    for transfer in plan:
        assert transfer.src_device != transfer.dst_device
        counts[transfer.dst_device][transfer.box] += 1
        box = have[transfer.src_device]
        for side, origin, local, to, at in zip(
            transfer.box, box, transfer.src_box, want[transfer.dst_device], transfer.dst_box, strict=True
        ):
            assert (local.start + origin.start, local.stop + origin.start) == (side.start, side.stop)
            assert (at.start + to.start, at.stop + to.start) == (side.start, side.stop)
            assert side.stop <= origin.stop
    for device, box in want.items():
        expected = np.zeros(b.shape, int)
        expected[view_index(box)] = 1
        if device in have:
            expected[view_index(have[device])] = 0
        assert (counts[device] == expected).all()
    sent, received = plan.bytes_sent("i4").sum(), plan.bytes_received("i4").sum()
    assert sent == received == plan.total_bytes("i4") == 4 * sum(count.sum() for count in counts.values())
    assert (plan.bytes_received("i4") + plan.bytes_kept("i4") == b.nbytes("i4")).all()


@st.composite
def even_pairs(draw: st.DrawFn) -> tuple[sw.Partition, sw.Partition]:
    """Two layouts of one mesh, the first perhaps unreduced, of a shape that every cut divides."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    names = AXES[: len(sizes)]
    mesh = sw.DeviceMesh(sizes, names)
    rank = draw(st.integers(1, 3))
    shape = [int(np.prod(sizes))] * rank

    def layout(unreduced: bool) -> sw.TensorLayout:
        specs: list[list[str]] = [[] for _ in range(rank)]
        sums = []
        for name in draw(st.permutations(names)):
            dim = draw(st.integers(0, rank + unreduced))
            if dim < rank:
                specs[dim].append(name)
            elif dim > rank:
                sums.append(name)
        return sw.TensorLayout(specs, mesh, unreduced=sums)

    return layout(True).partition(shape), layout(False).partition(shape)


def addends_of(a: sw.Partition) -> tuple[list[Array], Array]:
    """Source shards of `a`, and the array that they stand for, by summing over coordinates in plain numpy."""
    mesh = a.device_mesh
    axes = [mesh.axis_names.index(name) for name in a.layout.unreduced]
    generator = np.random.default_rng(7)
    partial = generator.integers(-99, 99, (*(mesh.shape[axis] for axis in axes), *a.shape))
    shards = []
    for i, box in enumerate(a.devices_indices_map().values()):
        place = tuple(mesh.coordinate(i)[axis] for axis in axes)
        shards.append(partial[place][view_index(box)].copy())
    return shards, partial.sum(axis=tuple(range(len(axes))))


@settings(deadline=None)
@given(even_pairs())
def test_collectives_step_by_step_give_the_destination(pair: tuple[sw.Partition, sw.Partition]) -> None:
    a, b = pair
    shards, whole = addends_of(a)
    plan = sw.plan_reshard(a, b)
    stepped = plan.run_collectives(sw.ShardedArray(a, shards))
    expected = b.views(whole)
    assert all(map(same, stepped, expected))
    assert all(map(same, plan.run(shards), expected))
    assert same(sw.array.gather(sw.ShardedArray(a, shards)), whole)


@settings(deadline=None)
@given(even_pairs())
def test_a_step_moves_no_less_than_the_transfers_that_it_stands_for(pair: tuple[sw.Partition, sw.Partition]) -> None:
    a, b = pair
    layout = a.layout
    for step in sw.plan_reshard(a, b).collectives("f4") or ():
        assert step.layout is not None
        if not step.layout.unreduced and not layout.unreduced:
            plan = sw.plan_reshard(layout.partition(a.shape), step.layout.partition(a.shape))
            assert plan.bytes_received("f4").max() <= step.bytes
        layout = step.layout


@st.composite
def view_pairs(draw: st.DrawFn) -> tuple[sw.Partition, sw.Partition]:
    """Layouts on two meshes of the same devices: axes cut in two, joined, and in another order."""
    sizes = draw(st.sampled_from([(8,), (2, 4), (2, 2, 2), (6, 2), (4, 3), (2, 3, 2)]))
    mesh = sw.DeviceMesh(sizes, AXES[: len(sizes)])
    other = mesh
    if draw(st.booleans()):
        other = other.transpose(*draw(st.permutations(other.axis_names)))
    if draw(st.booleans()):
        other = other.flatten(name="all")
    axis = draw(st.sampled_from(other.axis_names))
    size = other.axis_size(axis)
    major = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    other = other.unflatten(axis, (major, size // major), (f"{axis}0", f"{axis}1"))
    rank = draw(st.integers(1, 3))
    sides = []
    for each in (mesh, other):
        specs: list[list[str]] = [[] for _ in range(rank)]
        for name in draw(st.permutations(each.axis_names)):
            dim = draw(st.integers(0, rank))
            if dim < rank:
                specs[dim].append(name)
        sides.append(sw.TensorLayout(specs, each).partition((mesh.size,) * rank))
    return (sides[0], sides[1]) if draw(st.booleans()) else (sides[1], sides[0])


def rounding_pair() -> tuple[sw.Partition, sw.Partition]:
    """The search goes along an axis of six devices in parts of 2 and 3, whose seconds do not add up to those of six."""
    mesh = sw.DeviceMesh((6, 2), ("x", "y"))
    other = sw.DeviceMesh((4, 3), ("a", "b"), [f"cpu:{i}" for i in (0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11)])
    return sw.TensorLayout((("y", "x"),), mesh).partition((12,)), sw.TensorLayout((None,), other).partition((12,))


@settings(deadline=None)
@given(view_pairs())
@example(rounding_pair())
def test_two_views_of_one_list_of_devices_have_collectives(pair: tuple[sw.Partition, sw.Partition]) -> None:
    a, b = pair
    plan = sw.plan_reshard(a, b)
    if plan.obstacle is not None:
        assert plan.obstacle.kind == "no-common-sub-axes"
        return
    whole = np.arange(a.size).reshape(a.shape)
    stepped = plan.run_collectives(sw.ShardedArray(a, [view.copy() for view in a.views(whole)]))
    assert all(map(same, stepped, b.views(whole)))
    cost = plan.cost("i8")
    assert cost is not None
    # A price of its own for what the search has found, and one that no exchange can be below.
    assert sw.reshard.cost_of(cost.steps, a, "i8") == cost
    assert plan.bytes_received("i8").max() <= cost.bytes
