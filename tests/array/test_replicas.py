"""Shards whose replicas differ are found, whatever puts them together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise import LayoutError
from shardwise.array import replicas
from tests.checks import linear, refused


def mesh() -> sw.DeviceMesh:
    return sw.DeviceMesh((2, 2), ("x", "y"), ["d3", "d1", "d0", "d2"])


def own(partition: sw.Partition, values: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    return [view.copy() for view in partition.views(values)]


PUT_TOGETHER: list[Callable[[sw.ShardedArray], object]] = [
    lambda array: array.numpy(),
    np.asarray,
    sw.array.gather,
    sw.array.all_gather,
    lambda array: array.reshard(sw.TensorLayout((None, "y"), mesh())),
    lambda array: sw.distribute_tensor(array, sw.TensorLayout((None, "y"), mesh())),
]


@pytest.mark.parametrize("shape", [(4, 4), (2048, 514)], ids=["small", "large"])
@pytest.mark.parametrize("call", PUT_TOGETHER)
def test_the_first_difference_is_named(call: Callable[[sw.ShardedArray], object], shape: tuple[int, int]) -> None:
    """Shard 1 is the lower half; d1 and d2 hold it."""
    partition = sw.TensorLayout(("y", None), mesh()).partition(shape)
    shards = own(partition, np.arange(np.prod(shape), dtype="f8").reshape(shape))
    call(sw.ShardedArray(partition, shards))
    assert partition.devices_holding(1) == ["d1", "d2"]
    shards[3][-1, 2] = -7.5
    shards[3][-1, 1] = -6.5
    row = shape[0] - 1
    element, value = f"element ({row}, 1)", row * shape[1] + 1.0
    with refused(LayoutError, "shard 1", element, f"{value} on device 'd1'", "-6.5 on 'd2'"):
        call(sw.ShardedArray(partition, shards))


def test_the_check_can_be_left_out() -> None:
    partition = sw.TensorLayout((None,), mesh()).partition((2,))
    array = sw.ShardedArray(partition, [np.array([i, i]) for i in range(4)])
    assert array.numpy(check_replicas=False).tolist() == [0, 0]
    assert sw.array.gather(array, check_replicas=False).tolist() == [0, 0]
    cut = sw.TensorLayout(("x",), mesh())
    assert [len(shard.data) for shard in array.reshard(cut, check_replicas=False).shards] == [1] * 4


class Unprintable:
    def __repr__(self) -> str:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (np.array([0.0], "f4"), np.array([-0.0], "f4"), ("is 0.0 on", "-0.0 on")),
        (
            np.array([0x7FC00000], "u4").view("f4"),
            np.array([0x7FC00001], "u4").view("f4"),
            ("0x7fc00000", "0x7fc00001"),
        ),
        (np.array([0x7FC00000], "<u4").view("<f4"), np.array([0x7FC00001], "<u4").view("<f4"), ("nan (0x7fc00001)",)),
        (
            np.array([0x7FC0], "u2").view(ml_dtypes.bfloat16),
            np.array([0xFFC1], "u2").view(ml_dtypes.bfloat16),
            ("nan",),
        ),
        (np.array([b"a"], "S3"), np.array([b"b"], "S3"), ("b'a'", "b'b'")),
        (np.array(["x" * 100]), np.array(["x" * 99 + "y"]), ("…",)),
        (np.array([True]), np.array([False]), ("True", "False")),
        (np.array([None]), np.array(["a"], object), ("None", "a")),
        (np.array([1], object), np.array(["1"], object), ("is 1 on", "'1' on")),
        (np.array([float("nan")], object), np.array([float("nan")], object), ("is nan on", "and nan on")),
        (np.array([float("nan")], object), np.array([np.float64("nan")], object), ("is nan on",)),
        (np.array([Unprintable()], object), np.array([None], object), ("is <Unprintable instance at",)),
        (np.array([(1, [2, 3])], "i1,(2,)i8"), np.array([(1, [2, 4])], "i1,(2,)i8"), ("element (0,)",)),
        (np.array(["2024-01-01"], "M8[D]"), np.array(["NaT"], "M8[D]"), ("2024-01-01", "NaT")),
    ],
)
def test_values_are_compared_by_their_bytes(one: Any, other: Any, said: tuple[str, ...]) -> None:
    pair = sw.TensorLayout((None,), sw.DeviceMesh((2,), ("x",))).partition((1,))
    replicas.check_replicas(pair, [one, one.copy()])
    with refused(LayoutError, "replicas of shard 0 differ", "element (0,)", *said):
        replicas.check_replicas(pair, [one, other])


def test_padding_is_not_a_value() -> None:
    dtype = np.dtype({"names": ["a", "b"], "formats": ["i1", "i8"], "offsets": [0, 8], "itemsize": 24})
    one, other = np.zeros(48, "u1").view(dtype), np.full(48, 255, "u1").view(dtype)
    other["a"] = other["b"] = 0
    pair = sw.TensorLayout((None,), sw.DeviceMesh((2,), ("x",))).partition((2,))
    replicas.check_replicas(pair, [one, other])
    other["b"][1] = 1
    with refused(LayoutError, "element (1,)"):
        replicas.check_replicas(pair, [one, other])


NANS = [np.array([bits], "u4").view("f4") for bits in (0x7FC00000, 0x7FC00001)]


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (np.array([0.0], "f4"), np.array([-0.0], "f4"), "is 0.0 in 'cpu:2' and -0.0 in 'cpu:3'"),
        (*NANS, "0x7fc00000) in 'cpu:2' and nan (0x7fc00001) in 'cpu:3'"),
        (np.array([float("nan")], object), np.array([None], object), "is nan in 'cpu:2' and None in"),
        (np.array([(1, 2)], "i1,i8"), np.array([(1, 3)], "i1,i8"), "is (1, 2) in 'cpu:2' and (1, 3) in"),
    ],
)
def test_packed_replicas_are_compared_likewise(one: Any, other: Any, said: str) -> None:
    """Gate and up of two elements, each cut in two along x; along y are the replicas. An object is equal to itself."""
    mesh = sw.DeviceMesh((2, 2), ("x", "y"))
    partition = sw.TensorLayout((sw.packed.gate_up("x", 2),), mesh).partition((4,))
    values = np.concatenate([one] * 4)
    shards = [values[:2].copy() for _ in range(4)]
    found = sw.ShardedArray(partition, shards).numpy()
    assert replicas.first_difference(values, [found]) is None
    shards[3] = np.concatenate([one, other])
    with refused(LayoutError, "the replicas of a box differ: element (3,)", said):
        sw.ShardedArray(partition, shards).numpy()


def test_padding_of_packed_replicas_is_not_a_value() -> None:
    dtype = np.dtype({"names": ["a", "b"], "formats": ["i1", "i8"], "offsets": [0, 8], "itemsize": 24})
    one, other = np.zeros(48, "u1").view(dtype), np.full(48, 255, "u1").view(dtype)
    other["a"] = other["b"] = 0
    partition = sw.TensorLayout((sw.packed.gate_up("x", 1),), sw.DeviceMesh((1, 2), ("x", "y"))).partition((2,))
    assert sw.ShardedArray(partition, [one, other]).numpy()["b"].tolist() == [0, 0]


def test_addends_of_packed_dims_are_not_replicas_of_one_another() -> None:
    """Over x the values are added; along y they are replicas."""
    partition = sw.TensorLayout((sw.packed.gate_up((), 1),), mesh(), unreduced=("x",)).partition((2,))
    sums = [np.array([1, 2]), np.array([1, 2]), np.array([10, 20]), np.array([10, 20])]
    replicas.check_replicas(partition, sums)
    sums[3] = np.array([10, 21])
    with refused(LayoutError, "element (1,) is 20 in 'd0' and 21 in 'd2'"):
        replicas.check_replicas(partition, sums)
    sums[3] = sums[2]
    with refused(LayoutError, "partial sums are added only where no dim is packed"):
        sw.ShardedArray(partition, sums).reshard(sw.TensorLayout((None,), mesh()))


def test_partial_sums_are_not_replicas_of_one_another() -> None:
    """Over x the values are added; along y they are replicas."""
    partition = sw.TensorLayout((None,), mesh(), unreduced=("x",)).partition((2,))
    sums = [np.array([1, 2]), np.array([1, 2]), np.array([10, 20]), np.array([10, 20])]
    assert sw.array.gather(sw.ShardedArray(partition, sums)).tolist() == [11, 22]
    sums[3] = np.array([10, 21])
    with refused(LayoutError, "element (1,) is 20 on device 'd0' and 21 on 'd2'"):
        sw.array.gather(sw.ShardedArray(partition, sums))


def test_partial_sums_over_a_sub_axis_are_not_replicas_of_one_another() -> None:
    """Of eight devices the first four hold one addend, the last four the other."""
    layout = sw.TensorLayout((None,), sw.DeviceMesh((8,), ("tp",)), unreduced=("tp:(1)2",))
    addends = [np.array([1, 2, 3])] * 4 + [np.array([10, 20, 30])] * 4
    sums = sw.ShardedArray(layout.partition((3,)), addends)
    assert sw.array.gather(sums).tolist() == [11, 22, 33]
    assert sw.array.all_reduce(sums).shard("cpu:5").tolist() == [11, 22, 33]
    drifted = sw.ShardedArray(layout.partition((3,)), [*addends[:7], np.array([10, 20, 31])])
    with refused(LayoutError, "element (2,) is 30 on device 'cpu:4' and 31 on 'cpu:7'"):
        sw.array.gather(drifted)


def test_the_views_of_one_array_are_not_compared() -> None:
    """One element that stands for 2**62: to look at all of them would take years."""
    whole = np.broadcast_to(np.zeros(1, "u1"), 2**62)
    with linear(60):
        replicas.check_replicas(sw.TensorLayout((None,), mesh()).partition(whole.shape), [whole] * 4)
        array = sw.distribute_tensor(whole, sw.TensorLayout((None,), mesh()))
        replicas.check_replicas(array.tiling, [shard.data for shard in array.shards])


@given(data=st.data())
def test_one_changed_byte_is_found_where_it_is(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 9), max_size=4)))
    dtype = data.draw(st.sampled_from(["i1", "f2", "<f4", ">f8", "c16", "S5", "V3"]))
    order: Any = data.draw(st.sampled_from(["C", "F"]))
    one, other = (np.asarray(np.zeros(shape, dtype), order=order) for _ in range(2))
    words, small = data.draw(st.integers(1, 20)), data.draw(st.sampled_from([-1, 100]))
    assert replicas.first_difference(one, [other], words, small) is None
    if not one.size:
        return
    element = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    byte = data.draw(st.integers(0, one.dtype.itemsize - 1))
    # Any view of one element as bytes writes to the array itself.
    index: Any = (*element, ...)
    other[index].reshape(1).view("u1")[byte] = 1
    assert replicas.first_difference(one, [other], words, small) == (element, 0)
