"""Views: whatever the array, a view is what `array[box]` gives; every line on numpy buffers of the catalogue."""

from __future__ import annotations

import gc
import mmap
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise import LayoutError
from tests.checks import assert_same_view, refused, view_index
from tests.strategies import RULES, partitions

Array = npt.NDArray[Any]


def partition_of(shape: tuple[int, ...], rule: sw.UnevenRule = "ceil") -> sw.Partition:
    """Cut up to three dims, the last one over two axes, minor first."""
    mesh = sw.DeviceMesh((2, 3, 2, 2), ("a", "b", "c", "d"))
    axes: list[Any] = [("c", "b"), "d", "a"][: len(shape)] + [None] * (len(shape) - 3)
    return sw.TensorLayout(list(reversed(axes)), mesh).partition(shape, rule)


def check(array: Array, rule: sw.UnevenRule = "ceil") -> None:
    """All views, made at once and one by one, are what indexing makes."""
    partition = partition_of(array.shape, rule)
    views = partition.views(array)
    for (device, box), view in zip(partition.devices_indices_map().items(), views, strict=True):
        expected = array[view_index(box)]
        assert_same_view(view, expected)
        assert_same_view(partition.view(array, device), expected)
        assert view.base is not None
        if view.nbytes and not array.dtype.hasobject:
            assert np.shares_memory(view, array)


def read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


def misaligned() -> Array:
    return np.arange(5 * 4 * 8 + 1, dtype=np.uint8)[1:].view(np.float64).reshape(5, 4)


STRIDES: dict[str, Callable[[], Array]] = {
    "C order": lambda: np.arange(60).reshape(5, 4, 3),
    "F order": lambda: np.asfortranarray(np.arange(60).reshape(5, 4, 3)),
    "stepped": lambda: np.arange(480).reshape(10, 8, 6)[::2, ::2, ::2],
    "negative strides": lambda: np.arange(60).reshape(5, 4, 3)[::-1, :, ::-1],
    "zero strides": lambda: np.broadcast_to(np.arange(3), (5, 4, 3)),
    "one element, broadcast": lambda: np.broadcast_to(np.float32(1), (5, 4)),
    "overlapping windows": lambda: np.lib.stride_tricks.sliding_window_view(np.arange(20), 4),
    "misaligned": misaligned,
    "transposed": lambda: np.arange(60).reshape(5, 4, 3).transpose(2, 0, 1),
    "diagonal": lambda: np.arange(49).reshape(7, 7).diagonal(),
    "read-only": lambda: read_only(np.arange(20).reshape(5, 4)),
    "0-d": lambda: np.array(7),
    "0-d, read-only": lambda: read_only(np.array(7)),
    "empty": lambda: np.zeros((0,)),
    "empty beside others": lambda: np.zeros((5, 0, 3)),
    "one element": lambda: np.zeros((1, 1, 1)),
    "a field of a structured array": lambda: np.zeros((5, 4), [("a", "i1"), ("b", "f8")])["b"],
    "the imaginary part": lambda: np.arange(20).reshape(5, 4).astype(complex).imag,
}

DTYPES: dict[str, Any] = {
    **{name: name for name in ("bool", "int8", "uint64", "float16", "float64", "longdouble", "complex128")},
    **{name: name for name in (">i4", ">f8", ">c16", "<U3", ">U3", "S5", "V7", "M8[ns]", ">m8[D]")},
    "object": object,
    "structured": [("a", "i1"), ("b", ">f8"), ("c", "S3")],
    "structured, aligned": np.dtype([("a", "i1"), ("b", "f8")], align=True),
    "nested, with a subarray": [("a", [("b", "i2", (2, 2)), ("c", "f4")])],
    "structured, with objects": [("a", "i1"), ("b", "O")],
    "empty bytes": "S0",
    "empty text": "U0",
    "void of no bytes": "V0",
    **{name: getattr(ml_dtypes, name) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4")},
}


@pytest.mark.parametrize("rule", RULES[1:])
@pytest.mark.parametrize("name", STRIDES)
def test_any_strides(name: str, rule: sw.UnevenRule) -> None:
    check(STRIDES[name](), rule)


@pytest.mark.parametrize("name", DTYPES)
def test_any_dtype(name: str) -> None:
    for shape in ((5, 4), (0, 3), ()):
        array = np.zeros(shape, DTYPES[name])
        if array.dtype.itemsize and array.dtype.kind not in "OMm" and not array.dtype.hasobject and array.size:
            raw = array.reshape(-1).view(np.uint8)
            raw[:] = np.arange(raw.size) % 2
        check(array)
        check(array[::-1] if array.ndim else array)


@pytest.mark.parametrize("view_of", [lambda a: a, lambda a: a[::-1, ::2]])
def test_string_dtype(view_of: Callable[[Array], Array]) -> None:
    """numpy's variable-width strings own memory through their dtype, which a view must go on sharing."""
    dtypes = pytest.importorskip("numpy.dtypes")
    if not hasattr(dtypes, "StringDType"):
        pytest.skip("StringDType came with numpy 2")
    array = view_of(
        np.array([[f"a string {'long ' * i}{j}" for j in range(4)] for i in range(5)], dtype=dtypes.StringDType())
    )
    partition = partition_of(array.shape)
    for box, view in zip(partition.devices_indices_map().values(), partition.views(array), strict=True):
        assert view.tolist() == array[box].tolist()
        assert view.strides == array[box].strides
        if view.size:
            assert np.shares_memory(view, array)
    partition.views(array)[0][...] = "written through the view, and long enough to need memory of its own"
    assert array[partition.boxes()[0, 0, 0], 0].startswith("written through")


def test_reference_counts_of_objects_and_dtypes() -> None:
    import sys

    item, array = object(), np.full((6, 4), None, dtype=object)
    array[0, 0] = item
    dtype = np.dtype([("a", "i1"), ("b", "f8")])
    structured = np.zeros((6, 4), dtype)
    partition = partition_of((6, 4))
    before = sys.getrefcount(item), sys.getrefcount(structured.dtype), sys.getrefcount(array)
    for _ in range(100):
        partition.views(array)
        partition.views(structured)
        partition.view(array, "cpu:1")
    gc.collect()
    assert (sys.getrefcount(item), sys.getrefcount(structured.dtype), sys.getrefcount(array)) == before


def test_writes_go_through() -> None:
    array = np.zeros((4, 6))
    partition = partition_of((4, 6))
    for i, view in enumerate(partition.views(array)):
        view[...] = i
    for device, box in partition.devices_indices_map().items():
        last = partition.device_mesh.index_of_label(partition.devices_holding(partition.shard_id(device))[-1])
        assert (array[box] == last).all()


def test_a_read_only_array_gives_read_only_views() -> None:
    for view in partition_of((4, 6)).views(read_only(np.zeros((4, 6)))):
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True


def test_the_base_lives_as_long_as_a_view() -> None:
    class Owner(np.ndarray[Any, Any]):
        pass

    owner = Owner((4, 6))
    owner[...] = np.arange(24).reshape(4, 6)
    alive = weakref.ref(owner)
    array = np.asarray(owner)
    assert array.base is owner
    view = partition_of((4, 6)).views(array)[-1]
    expected = view.tolist()
    del owner, array
    gc.collect()
    assert alive() is not None
    assert view.tolist() == expected
    del view
    gc.collect()
    assert alive() is None


def test_a_view_outlives_partition_mesh_and_array() -> None:
    partition = partition_of((400, 600))
    views = partition.views(np.ones((400, 600)))
    del partition
    gc.collect()
    _ = [np.zeros((400, 600)) for _ in range(4)]
    assert all((view == 1).all() for view in views)


def test_memory_mapped_files(tmp_path: Path) -> None:
    path = tmp_path / "array.bin"
    np.arange(24.0).tofile(path)
    for mode in ("r", "r+", "c"):
        array = np.memmap(path, dtype=float, mode=mode, shape=(4, 6))
        check(array)
        check(np.asarray(array))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        views = partition_of((4, 6)).views(np.frombuffer(mapped, dtype=float).reshape(4, 6))
        with pytest.raises(BufferError):  # The views hold the map open.
            mapped.close()
        assert views[0][0, 0] == 0
        del views
        gc.collect()


class Tagged(np.ndarray[Any, Any]):
    """A subclass with a value of its own, as numpy's documentation makes them."""

    tag: str | None

    def __array_finalize__(self, other: Any) -> None:
        self.tag = getattr(other, "tag", None)


def test_subclasses_keep_numpy_s_rule() -> None:
    tagged = np.arange(24).reshape(4, 6).view(Tagged)
    tagged.tag = "mine"
    check(tagged)
    assert all(isinstance(view, Tagged) and view.tag == "mine" for view in partition_of((4, 6)).views(tagged))
    check(np.zeros(4, [("a", "i4"), ("b", "f8")]).view(np.recarray))


def test_masked_arrays_keep_their_mask() -> None:
    array = np.ma.masked_array(np.arange(24).reshape(4, 6), mask=np.arange(24).reshape(4, 6) % 3 == 0)
    partition = partition_of((4, 6))
    for box, view in zip(partition.devices_indices_map().values(), partition.views(array), strict=True):
        assert isinstance(view, np.ma.MaskedArray)
        assert (view.mask == array[box].mask).all()
        assert np.shares_memory(view.data, array.data)


def test_what_a_subclass_raises_comes_out_unchanged() -> None:
    class Refusing(np.ndarray[Any, Any]):
        def __getitem__(self, key: Any) -> Any:
            raise LookupError("not here")

    with refused(LookupError, "not here"):
        partition_of((4,)).views(np.zeros(4).view(Refusing))


@pytest.mark.parametrize("rank", [3, 17, 32, 33, 64])
def test_many_dims(rank: int) -> None:
    try:
        array = np.arange(2 * 3 * 4).reshape((1,) * (rank - 3) + (2, 3, 4))
    except ValueError:
        pytest.skip(f"this numpy holds no {rank} dims")
    check(array)
    check(array.T)


@given(partitions(), st.data())
def test_any_partition_and_any_strides(partition: sw.Partition, data: st.DataObject) -> None:
    steps = [data.draw(st.sampled_from([-2, -1, 1, 3])) for _ in partition.shape]
    whole = np.arange(int(np.prod([n * abs(s) for n, s in zip(partition.shape, steps, strict=True)])))
    shaped = whole.reshape([n * abs(s) for n, s in zip(partition.shape, steps, strict=True)])
    array = shaped[view_index(slice(None, None, step) for step in steps)]
    assert array.shape == partition.shape
    for box, view in zip(partition.devices_indices_map().values(), partition.views(array), strict=True):
        assert_same_view(view, array[view_index(box)])


@pytest.mark.parametrize("shape", [(), (4,), (6, 4), (4, 6, 1), (4, 0)])
def test_an_array_of_another_shape(shape: tuple[int, ...]) -> None:
    partition = partition_of((4, 6))
    for call in (partition.views, lambda array: partition.view(array, "cpu:0")):
        with refused(LayoutError, "array has shape", "[4, 6]"):
            call(np.zeros(shape))


@pytest.mark.parametrize("array", [[1, 2, 3, 4], (1, 2, 3, 4), None, 5, "1234", memoryview(b"1234"), np.int64(4)])
def test_what_is_no_array(array: Any) -> None:
    partition = partition_of((4,))
    for call in (partition.views, lambda given: partition.view(given, "cpu:0")):
        with refused(TypeError, "array", type(array).__name__):
            call(array)


def test_extents_of_an_array_strided_beyond_its_buffer_do_not_wrap() -> None:
    """Such an array is its maker's affair; computing where its views begin must not fail, and reads nothing."""
    huge = np.lib.stride_tricks.as_strided(np.zeros(1), (4, 6), (2**61, -(2**62)))
    partition = partition_of((4, 6))
    for box, view in zip(partition.devices_indices_map().values(), partition.views(huge), strict=True):
        expected = huge[box]
        assert (view.shape, view.strides) == (expected.shape, expected.strides)
        assert view.__array_interface__["data"] == expected.__array_interface__["data"]
