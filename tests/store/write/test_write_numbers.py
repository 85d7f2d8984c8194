"""The numbers that writing goes by, one rule at a time: against numpy, against Python's pickler, and by hand."""

from __future__ import annotations

import hashlib
import itertools
import pickle
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise._dtypes import DTYPES
from shardwise.conversion.apply import kept_objects
from shardwise.conversion.assembled import Wanted
from shardwise.pieces import NO_PIECES, Piece, Pieces
from shardwise.store.data.boxes import contiguous_strides
from shardwise.store.data.objects import ObjectStatus
from shardwise.store.data.sources import Places, SourceFile, head_digest, source_of
from shardwise.store.rewritten import convert
from shardwise.store.rewritten.wanted import wanted_array
from shardwise.store.write.forms.forms import check_names
from shardwise.store.write.forms.pickles import Call, Global, pickled
from shardwise.store.write.places import uploads
from shardwise.store.write.places.folder import _may_hold
from shardwise.store.write.plan.file import check_pieces
from shardwise.store.write.request import spool
from shardwise.store.write.request.planner import Contents, make_plan
from shardwise.store.write.request.request import Request

MIB = 2**20
EDGES = sorted(
    {sign * (2**bits + more) for bits in (0, 7, 8, 15, 16, 31, 32) for more in (-1, 0, 1) for sign in (1, -1)}
)


@pytest.mark.parametrize("value", EDGES)
def test_integers_are_written_as_python_writes_them(value: int) -> None:
    assert pickled(value) == pickle.dumps(value, 2)


def test_the_largest_integers_of_a_size_are_read_back() -> None:
    for value in (sign * (2**bits + more) for bits in (63, 64, 71, 72) for more in (-1, 0, 1) for sign in (1, -1)):
        assert pickle.loads(pickled(value)) == value


@pytest.mark.parametrize("size", range(7))
def test_tuples_of_any_size_are_read_back(size: int) -> None:
    assert pickle.loads(pickled([(*range(size),), (*"abcdef"[:size],)])) == [(*range(size),), (*"abcdef"[:size],)]


def test_every_number_of_a_memo_is_read_back() -> None:
    texts = [str(i) for i in range(258)]
    assert pickle.loads(pickled(texts + texts)) == texts + texts


def test_calls_with_equal_arguments_of_other_types_stay_apart() -> None:
    values: list[tuple[int, ...]] = [(True, 1), (1, True), (1, 1), (True, True), (1, True), (True, 1)]
    made = pickle.loads(pickled([Call(Global("builtins", "list"), (value,)) for value in values]))
    assert repr(made) == repr(list(map(list, values)))


def addresses(sizes: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Where the elements begin, in C order."""
    return [sum(map(int.__mul__, at, strides)) for at in itertools.product(*map(range, sizes))]


@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from([2, 4, 6, 12, 8])), max_size=3))
def test_a_piece_is_one_run_if_its_elements_follow_one_another(dims: list[tuple[int, int]]) -> None:
    sizes, strides = tuple(size for size, _ in dims), tuple(stride for _, stride in dims)
    box = tuple((5, 5 + size) for size in sizes)
    expected = addresses(sizes, strides) == list(range(0, 2 * int(np.prod(sizes)), 2))
    assert Pieces.of([Piece(box, "x", 0, strides)], len(dims)).are_runs(2).tolist() == [expected]


@st.composite
def boxes(draw: st.DrawFn, rank: int, most: int = 5) -> tuple[tuple[int, int], ...]:
    starts = [draw(st.integers(0, most - 1)) for _ in range(rank)]
    return tuple((start, draw(st.integers(start + 1, most))) for start in starts)


@given(st.data())
def test_pieces_within_a_box_are_the_elements_in_both(data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, 3))
    held = data.draw(st.lists(boxes(rank), max_size=4))
    box = data.draw(boxes(rank))
    rows = np.zeros((len(held), 2 + 3 * rank), np.int64)
    expected: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for number, piece in enumerate(held):
        strides = [data.draw(st.integers(1, 100)) for _ in range(rank)]
        holder, offset = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 1000))
        rows[number] = [holder, offset, *(a for a, _ in piece), *(b for _, b in piece), *strides]
        for at in itertools.product(*(range(*side) for side in piece)):
            if all(start <= place < stop for place, (start, stop) in zip(at, box, strict=True)):
                address = offset + sum((x - a) * s for x, (a, _), s in zip(at, piece, strides, strict=True))
                expected.setdefault(at, []).append((holder, address))
    pieces, holders = Pieces(rows, "abc"), dict[int, int]()
    clipped = pieces.clipped(box).numbered(holders, 7)
    called = {7 + number: holder for holder, number in holders.items()}
    found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for row in clipped.rows.tolist():
        starts, stops, strides = row[2 : 2 + rank], row[2 + rank : 2 + 2 * rank], row[2 + 2 * rank :]
        for at in itertools.product(*map(range, starts, stops)):
            address = row[1] + sum((x - a) * s for x, a, s in zip(at, starts, strides, strict=True))
            found.setdefault(at, []).append((called[row[0]], address))
    assert found == expected
    meets = [all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(piece, box, strict=True)) for piece in held]
    assert pieces.meeting(box).tolist() == np.flatnonzero(meets).tolist()
    assert len(clipped) == sum(meets)


@given(st.lists(st.integers(0, 5), max_size=4).map(tuple), st.integers(1, 3), st.integers(1, 70))
def test_runs_of_a_tensor_follow_one_another_and_none_is_too_long(
    shape: tuple[int, ...], itemsize: int, most: int
) -> None:
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    found = [whole[tuple(slice(*side) for side in box)].reshape(-1) for box in spool._runs(shape, itemsize, most)]
    assert np.array_equal(np.concatenate([[], *found]), whole.reshape(-1))
    assert all(part.size * itemsize <= most or part.size <= 1 for part in found)
    # What fits is one run.
    if whole.size and whole.size * itemsize <= most:
        assert len(found) == 1


@pytest.mark.parametrize(("memory", "rows"), [(80, [1] * 5), (159, [1] * 5), (320, [2, 2, 1]), (800, [5]), (900, [5])])
def test_blocks_to_be_converted_take_a_quarter_of_the_memory(memory: int, rows: list[int]) -> None:
    """Rows of 40 bytes; two of them must fit in the memory."""
    tensor: Any = SimpleNamespace(shape=(5, 10), nbytes=200, name="w")
    blocks = list(spool._blocks(tensor, memory))
    assert [block[0].stop - block[0].start for block in blocks] == rows
    assert [block[0].start for block in blocks] == [sum(rows[:i]) for i in range(len(rows))]
    assert all(block[1] == slice(0, 10) for block in blocks)
    with pytest.raises(sw.LayoutError, match=r"memory is 79 B; a row of tensor 'w' takes 40 B .* at least 80 B"):
        list(spool._blocks(tensor, 79))


def of(count: int, task_bytes: int | None = None) -> Any:
    """A plan for so many bytes, of which nothing is there."""
    request = Request(Path("x"), task_bytes=task_bytes, memory=MIB << 8, compares=True)
    return make_plan(request, Contents([Wanted("a", DTYPES["uint8"], (count,), NO_PIECES)], [], "hf"))


def test_tasks_have_from_16_to_64_mib_and_128_of_them_in_between() -> None:
    for total, each in ((0, 16), (128 * 16, 16), (128 * 17, 17), (128 * 64, 64), (128 * 65, 64)):
        assert of(total * MIB).task_bytes == each * MIB
    assert of(MIB, 2**16).task_bytes == 2**16
    with pytest.raises(sw.LayoutError, match="task_bytes is 65535; it must be at least 65536"):
        of(MIB, 2**16 - 1)


def test_a_plan_knows_from_where_to_where_it_reads_a_file(tmp_path: Path) -> None:
    sw.save_checkpoint(tmp_path / "a.safetensors", {"a": np.zeros((2, 3), "f4"), "b": np.zeros(5, "u1")})
    size = (tmp_path / "a.safetensors").stat().st_size
    (source,) = sw.plan_checkpoint(tmp_path / "a.safetensors", tmp_path / "b.safetensors").sources
    assert isinstance(source, SourceFile)
    assert (source.begin, source.end, source.size) == (size - 29, size, size)


@pytest.mark.parametrize(("before", "after"), [(0, 0), (10, 0), (0, 10), (MIB + 9, 7), (5, 2**16 + 9), (MIB, 2**16)])
def test_headers_are_digested_up_to_their_limits(tmp_path: Path, before: int, after: int) -> None:
    data = np.random.default_rng(1).bytes(before + 100 + after)
    (tmp_path / "x").write_bytes(data)
    expected = data[: min(before, MIB)] + data[len(data) - min(after, 2**16) :]
    found = head_digest(tmp_path / "x", len(data), before, before + 100)
    assert found == hashlib.sha256(expected if after else data[: min(before, MIB)]).hexdigest()


def test_receipts_are_looked_for_where_they_may_be() -> None:
    for first, end, start, stop in itertools.product(range(4), repeat=4):
        if first < end and start < stop:
            meets = bool(set(range(first, end)) & set(range(start, stop)))
            assert _may_hold(f"{first}-{end}-host-7-1-9.jsonl", range(start, stop)) == meets
    assert _may_hold("other-9.jsonl", range(1))
    assert _may_hold("9-other.jsonl", range(1))


@pytest.mark.parametrize("form", ["safetensors", "hf", "sharded", "dcp"])
def test_a_plan_names_no_files_but_those_of_its_form(form: str) -> None:
    """The names are those that save_checkpoint gives: nothing else can be written, and nothing else replaced."""
    right = {
        "safetensors": ["m.safetensors"],
        "hf": ["model.safetensors", "model-00001-of-00002.safetensors", "model-123456-of-123456.safetensors"],
        "sharded": ["shard-00001-model-00001-of-00002.safetensors"],
        "dcp": ["__0_0.distcp", "__12_0.distcp"],
    }
    for name in right[form]:
        check_names(form, "/a/m.safetensors", [name])
    others = [name for other, names in right.items() if other != form for name in names]
    bad = ["", ".", "..", "a/b", "/a", "a\\b", "a\0", "shardwise.json", ".metadata", "model.safetensors.index.json"]
    for name in [*others, *bad, right[form][0] + "\n", "../" + right[form][0]]:
        with pytest.raises(sw.ParseError, match="which no checkpoint of the form"):
            check_names(form, "/a/m.safetensors", [name])
    with pytest.raises(sw.ParseError, match="two of its files"):
        check_names(form, "/a/m.safetensors", [right[form][0]] * 2)


def test_pieces_of_a_plan_are_in_their_tensor_and_their_source() -> None:
    """Rows are holder, offset, starts, stops and strides; each number is moved over its bound by one."""
    right = [1, 0, 0, 2, 3, 4, 8, 0]
    check_pieces(Pieces(np.array([right], np.int64)), (3, 4), 2)
    for at, wrong in ((0, 2), (0, -1), (1, -1), (2, -1), (3, -1), (2, 3), (3, 4), (4, 4), (5, 5), (6, -1), (7, -1)):
        rows = np.array([right, [wrong if at == place else number for place, number in enumerate(right)]], np.int64)
        with pytest.raises(ValueError, match="not in its tensor, or in no source"):
            check_pieces(Pieces(rows), (3, 4), 2)


def test_sources_of_a_plan_are_within_their_size() -> None:
    for begin, end, size in ((0, 0, 0), (0, 7, 7), (7, 7, 7), (2, 3, 2**63 - 1)):
        assert source_of(["/a", size, 5, 6, begin, end, "d"], Places()) == ("/a", size, 5, 6, begin, end, "d")
    for begin, end, size in ((-1, 3, 7), (4, 3, 7), (0, 8, 7), (0, 1, 2**63)):
        with pytest.raises(ValueError, match=f"it has a source of {size} bytes, with tensors from {begin} to {end}"):
            source_of(["/a", size, 5, 6, begin, end, "d"], Places())
    for said in (
        ["/a", 7, 5, 6, 0, 3, 4],
        [3, 7, 5, 6, 0, 3, "d"],
        ["/a", 7, 5.0, 6, 0, 3, "d"],
        ["/a", True, 5, 6, 0, 3, "d"],
    ):
        with pytest.raises(ValueError, match="neither a file nor an object"):
            source_of(said, Places())


class Held:
    """An object of a store, as far as a comparison asks."""

    def __init__(self, data: bytes) -> None:
        self.data, self.mark = data, "1"

    def status(self) -> ObjectStatus:
        return ObjectStatus(len(self.data), self.mark)

    def read(self, begin: int, end: int, mark: str) -> bytes:
        assert mark == self.mark
        assert 0 < end - begin <= 4
        return self.data[begin:end]


def test_what_is_there_is_compared_to_its_last_byte() -> None:
    wanted = bytes(range(11))

    def compare(data: bytes, sizes: Sequence[int], changes: bool = False) -> None:
        held: Any = Held(data)
        comparison, at = uploads.Comparison(held, 4), 0
        for number, size in enumerate(sizes):
            comparison.put(number, bytearray(wanted[at : at + size]))
            at += size
        if changes:
            held.mark = "2"
        comparison.commit()

    for sizes in ([11], [4, 7], [5, 5, 1], [8, 3]):
        compare(wanted, sizes)
        for at in range(11):
            with pytest.raises(FileExistsError, match="exists already"):
                compare(wanted[:at] + b"\xff" + wanted[at + 1 :], sizes)
        for other in (wanted[:-1], wanted + b"\x0b", b""):
            with pytest.raises(FileExistsError, match="exists already"):
                compare(other, sizes)
        with pytest.raises(FileExistsError, match="exists already"):
            compare(wanted, sizes, changes=True)


def test_values_that_are_dropped_are_not_kept() -> None:
    names = ["epoch", "opt.lr", "opt.step", "x"]
    rename = {"from": "w", "to": "v"}
    assert kept_objects(names, sw.Rewrites([rename])) == set(names)
    assert kept_objects(names, sw.Rewrites([rename], drop=["opt.{a}"])) == {"epoch", "x"}
    assert kept_objects(names, sw.Rewrites([rename], unmatched="drop")) == set()


def test_rows_of_what_is_written_are_in_c_order(tmp_path: Path) -> None:
    layout = sw.TensorLayout((None, ("x",), None), sw.DeviceMesh((2,), ("x",)))
    tensors = {"w": np.zeros((3, 4, 5), "f4"), "s": np.float64(1), "n": np.zeros((2, 0), "u1")}
    sw.save_checkpoint(tmp_path / "a.safetensors", tensors)
    made = sw.plan_checkpoint(tmp_path / "a.safetensors", tmp_path / "b", {"w": layout})
    starts = [file.start for file in made.files]
    rows = {tensor.name: tensor.targets.rows.tolist() for tensor in made.tensors}
    strides = contiguous_strides((3, 2, 5), 4)
    # The scalar has the largest elements, so it comes first in the file of the first device.
    assert rows["w"] == [
        [0, starts[0] + 8, 0, 0, 0, 3, 2, 5, *strides],
        [1, starts[1], 0, 2, 0, 3, 4, 5, *strides],
    ]
    assert rows["s"] == [[0, starts[0]]]
    assert rows["n"] == []


def test_a_sharded_array_is_cut_as_it_is_unless_a_layout_says_otherwise() -> None:
    mesh = sw.DeviceMesh((2, 2), ("x", "y"))
    array = sw.distribute_tensor(np.arange(12).reshape(4, 3), sw.TensorLayout(("x", None), mesh))
    other = sw.TensorLayout((None, "y"), mesh).partition((4, 3), "ceil")
    halves = [((0, 2), (0, 3)), ((2, 4), (0, 3))]
    for given_one, expected in ((None, array.tiling), (other, other)):
        wanted = wanted_array("a", array, given_one)
        assert wanted.partition is expected
        assert [piece.box for piece in wanted.pieces] == [piece.box for piece in wanted.replicas] == halves
    assert wanted_array("a", np.zeros((4, 3)), None).partition is None
    assert wanted_array("a", np.zeros((4, 3)), other).partition is other


def test_what_is_converted_is_of_another_floating_point_dtype() -> None:
    def is_converted(stored: str, to: str | None) -> bool:
        tensor: Any = SimpleNamespace(_dtype=DTYPES[stored], dtype=stored)
        return convert.is_converted(tensor, None if to is None else DTYPES[to])

    assert is_converted("float32", "float16")
    assert is_converted("bfloat16", "float32")
    assert not is_converted("float32", "float32")
    assert not is_converted("float32", None)
    assert not is_converted("int32", "float16")
    assert not is_converted("bool", "float16")
