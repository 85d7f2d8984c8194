"""Boxes read out of files, of any strides and by each of the ways: against numpy's view of the same bytes."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardwise.pieces import LocatedPiece
from shardwise.store.data.boxes import Reads, read_piece
from shardwise.store.data.files import DataFile

BYTES = np.random.default_rng(0).integers(0, 256, 2**16, np.uint8)
Case = tuple[int, list[tuple[int, int, int]], int, list[int]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """The bytes of an element; of each dim its size, its stride and where the box begins; a gap; the order of `out`."""
    rank = draw(st.integers(0, 3))
    itemsize = draw(st.sampled_from([1, 2, 8]))
    strides = st.sampled_from([0, 1, 2, 3, 7, 8, 16, 40, 100])
    dims = draw(st.lists(st.tuples(st.integers(0, 7), strides, st.integers(0, 3)), min_size=rank, max_size=rank))
    if draw(st.booleans()):  # In C order, with room between the rows or without.
        step, packed = itemsize, []
        for size, _, at in reversed(dims):
            packed.append((size, step, at))
            step = step * max(size + at, 1) + draw(st.sampled_from([0, 0, itemsize, 24]))
        dims = packed[::-1]
    return itemsize, dims, draw(st.integers(0, 9)), draw(st.permutations(range(rank)))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> DataFile:
    path = tmp_path_factory.mktemp("boxes") / "data"
    path.write_bytes(BYTES.tobytes())
    return DataFile(path)


@pytest.mark.heavy
@pytest.mark.parametrize("way", ["spans", "the engine"])
@settings(max_examples=150)
@example(case=(8, [(3, 40, 1), (2, 16, 0), (1, 0, 3)], 5, [2, 0, 1]))
@example(case=(2, [(7, 100, 3), (7, 2, 0)], 0, [0, 1]))
@given(case=cases())
def test_a_box_of_any_strides(file: DataFile, way: str, case: Case) -> None:
    itemsize, dims, begin, order = case
    shape, strides = tuple(size for size, _, _ in dims), tuple(stride for _, stride, _ in dims)
    starts = [at for _, _, at in dims]
    flat = BYTES[begin + sum(at * stride for at, stride in zip(starts, strides, strict=True)) :]
    kind = np.dtype(f"u{itemsize}")
    expected = np.ndarray(shape, kind, flat.tobytes(), strides=strides)
    # Of one, the memory is in another order of dims, with something between the elements.
    memory = np.zeros([2 * shape[dim] if dim == order[-1] else shape[dim] for dim in order], kind)
    spaced = memory[..., ::2].transpose(np.argsort(order)) if order else memory
    for out in (np.empty(shape, kind), spaced):
        reads = Reads(1, 1, 1, 64) if way == "the engine" else Reads(span=64)
        read_piece(LocatedPiece(tuple((0, size) for size in shape), file, begin, strides), starts, out, reads)
        np.testing.assert_array_equal(out, expected)
    assert not order or not memory[..., 1::2].any()
