"""What is taken for an array: numpy arrays, `__array__`, and DLPack in the memory of the CPU, without a copy."""

from __future__ import annotations

import array as stdlib_array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import shardwise as sw
from tests.checks import refused


def halves() -> sw.TensorLayout:
    return sw.TensorLayout((None, "x"), sw.DeviceMesh((2,), ("x",)))


class DLPackOnly:
    """What a PyTorch tensor on the CPU shows to numpy, and nothing else."""

    def __init__(self, values: npt.NDArray[Any]) -> None:
        self.values = values

    def __dlpack__(self, **options: Any) -> Any:
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.values.__dlpack_device__()


class WithArray:
    def __init__(self, give: Callable[[], Any]) -> None:
        self.give = give

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.give()


class WithInterface:
    def __init__(self, values: npt.NDArray[Any]) -> None:
        self.values = values
        self.__array_interface__ = values.__array_interface__


@pytest.mark.parametrize("wrap", [lambda a: a, DLPackOnly, lambda a: WithArray(lambda: a), WithInterface])
def test_memory_is_shared(wrap: Callable[[npt.NDArray[Any]], Any]) -> None:
    values = np.arange(12.0).reshape(3, 4)
    sharded = sw.distribute_tensor(wrap(values), halves())
    assert sharded.shard("cpu:1").tolist() == [[2, 3], [6, 7], [10, 11]]
    assert np.shares_memory(sharded.shard("cpu:1"), values)


def test_dlpack_of_strided_memory() -> None:
    values = np.arange(48.0).reshape(6, 8)[::2, ::-2]
    sharded = sw.distribute_tensor(DLPackOnly(values), halves())
    assert sharded.shard("cpu:0").tolist() == values[:, :2].tolist()
    assert sharded.shard("cpu:0").strides == values.strides


def test_dlpack_that_is_refused() -> None:
    class Refusing(DLPackOnly):
        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("needs grad")

    with refused(TypeError, "tensor", "needs grad"):
        sw.distribute_tensor(Refusing(np.zeros((3, 4))), halves())


@pytest.mark.parametrize(
    "tensor", [[[1, 2]], ((1, 2),), None, 5, 1.5, "12", b"12", range(2), stdlib_array.array("i", [1])]
)
def test_what_is_no_array(tensor: Any) -> None:
    with refused(TypeError, "tensor", type(tensor).__name__, "np.asarray"):
        sw.distribute_tensor(tensor, halves())


def test_what_array_raises_comes_out_unchanged() -> None:
    def fail() -> Any:
        raise LookupError("mine")

    with refused(LookupError, "mine"):
        sw.distribute_tensor(WithArray(fail), halves())


def test_numpy_scalars_are_0_d() -> None:
    sharded = sw.distribute_tensor(np.float32(3), sw.TensorLayout((), halves().device_mesh))
    assert sharded.shape == ()
    assert sharded.shard("cpu:1") == 3


class TestMasksAreKeptOrRefused:
    """What copies values alone would lose a mask without a word."""

    array = np.ma.masked_array(np.arange(4.0), mask=[False, True, False, False])
    mesh = sw.DeviceMesh((2,), ("x",))
    packed = sw.TensorLayout((sw.packed.parse("(2 n@x)"),), mesh)

    def sharded(self) -> sw.ShardedArray:
        return sw.distribute_tensor(self.array, sw.TensorLayout(("x",), self.mesh))

    def test_kept(self) -> None:
        whole = sw.TensorLayout((None,), self.mesh)
        for made in (
            sw.array.gather(self.sharded()),
            self.sharded().numpy(),
            self.sharded().reshard(whole).shard("cpu:1"),
            sw.distribute_tensor(self.array, self.packed).numpy(),
            sw.array.gather(sw.distribute_tensor(self.array, self.packed)),
        ):
            assert isinstance(made, np.ma.MaskedArray)
            assert made.mask.tolist() == [False, True, False, False]

    @pytest.mark.parametrize("sharded", [False, True])
    def test_checkpoints_refuse_it_and_nothing_is_written(self, sharded: bool, tmp_path: Path) -> None:
        value = self.sharded() if sharded else self.array
        with refused(TypeError, "tensor 'w'", "masked array", "filled()"):
            sw.save_checkpoint(tmp_path / "made.safetensors", {"w": value})
        assert list(tmp_path.iterdir()) == []

    def test_copies_refuse_it(self) -> None:
        other = sw.DeviceMesh((2,), ("y",), ["a", "b"])
        plan = sw.plan_reshard(self.sharded().partition, sw.TensorLayout(("y",), other).partition((4,)))
        with refused(TypeError, "source", "masked array"):
            plan.run(self.sharded())
        with refused(TypeError, "source", "masked array"):
            plan.run_collectives(self.sharded())
        with refused(TypeError, "packed", "masked array"):
            sw.distribute_tensor(self.array, self.packed).shard("cpu:0")
        with refused(sw.LayoutError, "initializer", "masked array"):
            sw.initialize_variables(sw.Variable((4,), "float64", lambda *_: self.array, name="w"))
