"""The one table of boxes with the places of their bytes: against its elements, counted one by one."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwise import pieces as pieces_module
from shardwise.pieces import NO_PIECES, LocatedPiece, Pieces, dense_strides, repeats

#: Functions that look for what is shared along one dim, in which there are no boxes: of tasks, of chunks, of ranges of
#: flat parameters.
ALONG_ONE_DIM = {
    ("store/write/plan/grids.py", "add_overlaps"),
    ("store/formats/orbax/zarr.py", "_from_shard"),
    ("store/formats/torch/flat_units.py", "parameter_ranges"),
    ("store/formats/torch/flat_units.py", "local_weights"),
    ("store/formats/torch/zero_partitions.py", "_check_named"),
}
LARGER, SMALLER = {"max", "np.maximum"}, {"min", "np.minimum"}


def intersections(tree: ast.AST) -> Iterator[str]:
    """The functions that work out where two runs both are: from the larger start to the smaller stop."""

    def is_call(node: ast.AST, names: set[str]) -> bool:
        return isinstance(node, ast.Call) and len(node.args) == 2 and ast.unparse(node.func) in names

    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for node in ast.walk(function):
            pairs: list[tuple[ast.AST, ast.AST]] = []
            if isinstance(node, ast.Tuple) and len(node.elts) == 2:
                pairs = [(node.elts[0], node.elts[1])]
            elif isinstance(node, ast.Compare):
                pairs = [(node.left, node.comparators[0])]
            elif isinstance(node, ast.BinOp):
                pairs = [(node.right, node.left)]
            if any(is_call(start, LARGER) and is_call(stop, SMALLER) for start, stop in pairs):
                yield function.name


def test_nothing_else_intersects_boxes() -> None:
    package = Path(pieces_module.__file__).parent
    found = {
        (path.relative_to(package).as_posix(), name)
        for room in ("conversion", "reshard/model", "store")
        for path in (package / room).rglob("*.py")
        for name in intersections(ast.parse(path.read_text()))
    }
    assert len(found) == len(ALONG_ONE_DIM)  # It finds those that there are.
    assert found <= ALONG_ONE_DIM, found - ALONG_ONE_DIM
    for line in ("low, high = max(a, b), min(c, d)", "np.maximum(a, b) < np.minimum(c, d)", "min(c, d) - max(a, b)"):
        assert list(intersections(ast.parse(f"def f(a, b, c, d): {line}"))) == ["f"]


Elements = dict[tuple[int, ...], list[tuple[Any, int]]]


def boxes(rank: int, most: int = 6) -> st.SearchStrategy[tuple[tuple[int, int], ...]]:
    side = st.tuples(st.integers(0, most - 1), st.integers(1, most)).map(lambda pair: (pair[0], pair[0] + pair[1]))
    return st.tuples(*[side] * rank)


def pieces(rank: int, most: int = 5) -> st.SearchStrategy[list[LocatedPiece]]:
    one = st.builds(
        LocatedPiece, boxes(rank), st.sampled_from("ab"), st.integers(0, 99), st.tuples(*[st.integers(0, 50)] * rank)
    )
    return st.lists(one, max_size=most)


def elements(held: Any) -> Elements:
    """For each position of the tensor where its bytes are, of all pieces in order."""
    found: Elements = {}
    for box, holder, offset, strides in held:
        for at in itertools.product(*(range(*side) for side in box)):
            steps = sum((x - start) * step for x, (start, _), step in zip(at, box, strides, strict=True))
            found.setdefault(at, []).append((holder, offset + steps))
    return found


@given(st.integers(0, 3).flatmap(lambda rank: st.tuples(pieces(rank), boxes(rank))))
def test_what_is_within_a_box_is_at_the_same_bytes(drawn: tuple[list[LocatedPiece], Any]) -> None:
    held, box = drawn
    table = Pieces.of(held, len(box))
    assert list(table) == held
    inside = {
        at: where for at, where in elements(held).items() if all(a <= x < b for x, (a, b) in zip(at, box, strict=True))
    }
    clipped = table.clipped(box)
    assert elements(clipped) == inside
    meets = [all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(piece.box, box, strict=True)) for piece in held]
    assert table.meeting(box).tolist() == np.flatnonzero(meets).tolist()
    assert len(clipped) == sum(meets)
    # Holders by numbers of their own, as files of a plan have them.
    numbers = dict[int, int]()
    numbered = clipped.numbered(numbers, 7)
    called = {7 + number: holder for holder, number in numbers.items()}
    assert [called[number] for number in numbered.rows[:, 0].tolist()] == clipped.numbers.tolist()
    assert sorted(called) == list(range(7, 7 + len(called)))
    assert numbered.rows[:, 1:].tolist() == clipped.rows[:, 1:].tolist()
    assert table.volumes.sum() == sum(map(len, elements(held).values()))


@given(
    st.integers(1, 3).flatmap(
        lambda rank: st.tuples(st.lists(boxes(rank, 9), min_size=64, max_size=200), pieces(rank, 40))
    )
)
def test_many_pieces_are_found_by_a_tree_as_few_are_one_by_one(drawn: tuple[list[Any], list[LocatedPiece]]) -> None:
    held, asked = drawn
    rank = len(held[0])
    table = Pieces.of([LocatedPiece(box, "x", 0, (1,) * rank) for box in held], rank)
    others = Pieces.of(asked, rank)
    expected = [
        (ours, theirs)
        for theirs, other in enumerate(asked)
        for ours, box in enumerate(held)
        if all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(box, other.box, strict=True))
    ]
    found = [tuple(pair) for part in table.pairs(others, few=0, at_once=7) for pair in part.T.tolist()]
    assert found == expected
    for number, other in enumerate(asked[:5]):
        assert table.meeting(other.box).tolist() == [ours for ours, theirs in expected if theirs == number]


@given(
    st.integers(1, 3).flatmap(
        lambda rank: st.tuples(pieces(rank), st.integers(0, rank - 1), st.permutations(range(rank)))
    )
)
def test_dims_are_moved_with_their_bytes(drawn: tuple[list[LocatedPiece], int, list[int]]) -> None:
    held, dim, order = drawn
    table, whole = Pieces.of(held, len(order)), elements(held)
    assert elements(table.transposed(order)) == {tuple(at[dim] for dim in order): where for at, where in whole.items()}
    assert elements(table.within(7)) == {(7, *at): where for at, where in whole.items()}
    # Rows 1 to 3 at 10, and rows 2 and 3 once more at 0.
    taken = table.taken(dim, np.array([[1, 10, 3], [2, 0, 2]], np.int64))
    expected: Elements = {}
    for at, where in whole.items():
        for begin, to, length in ((1, 10, 3), (2, 0, 2)):
            if begin <= at[dim] < begin + length:
                moved = (*at[:dim], at[dim] - begin + to, *at[dim + 1 :])
                expected[moved] = where
    assert {at: sorted(where) for at, where in elements(taken).items()} == {
        at: sorted(where) for at, where in expected.items()
    }
    flat = table.taken(dim, np.array([[2, 0, 1]], np.int64)).without(dim)
    first = {(*at[:dim], *at[dim + 1 :]): where for at, where in whole.items() if at[dim] == 2}
    assert elements(flat) == first


@given(st.integers(0, 3).flatmap(lambda rank: st.tuples(st.just(rank), pieces(rank), pieces(rank))))
def test_tables_are_joined_and_told_apart(drawn: tuple[int, list[LocatedPiece], list[LocatedPiece]]) -> None:
    rank, first, second = drawn
    tables = [Pieces.of(first, rank), NO_PIECES, Pieces.of(second, rank)]
    joined = Pieces.joined(tables, rank)
    assert list(joined) == first + second
    assert joined.identity == Pieces.of(first + second, rank).identity or len({p.holder for p in first + second}) > 1
    if first:
        assert Pieces.of([first[0]._replace(offset=100)], rank).identity != Pieces.of(first[:1], rank).identity


@given(boxes(3), st.integers(1, 9))
def test_dense_pieces_are_runs(box: Any, itemsize: int) -> None:
    sides = np.array(box, np.int64).T[None]
    table = Pieces.dense((0, 5), sides, itemsize)
    assert table.are_runs(itemsize).all()
    begins, ends = table.spans(itemsize)
    assert (begins[0], ends[0] - begins[0]) == (5, table.volumes[0] * itemsize)
    assert np.array_equal(table.strides, dense_strides(sides[:, 1] - sides[:, 0], itemsize))


@given(st.integers(0, 2), st.lists(st.integers(0, 7), max_size=40))
def test_a_box_repeats_an_earlier_one(rank: int, starts: list[int]) -> None:
    rows = np.array([[[start, start + 1 + start % 2]] * rank for start in starts], np.int64).reshape(
        len(starts), rank, 2
    )
    boxes = rows.tolist()
    assert repeats(Pieces.boxed(rows)).tolist() == [box in boxes[:at] for at, box in enumerate(boxes)]


@given(st.integers(0, 2), st.lists(st.integers(0, 2), max_size=6))
def test_filled_pieces_have_elements(rank: int, extents: list[int]) -> None:
    boxes = [((3, 3 + extent), (0, 2))[:rank] for extent in extents]
    table = Pieces.of([LocatedPiece(box, at, at, (2, 1)[:rank]) for at, box in enumerate(boxes)], rank)
    expected = [at for at, extent in enumerate(extents) if extent or not rank]
    assert [piece.holder for piece in table.filled] == expected


def test_the_table_without_pieces_is_of_any_number_of_dims() -> None:
    changed = NO_PIECES.transposed([1, 0]), NO_PIECES.within(3), NO_PIECES.without(1), NO_PIECES.clipped(((0, 1),) * 2)
    assert all(table is NO_PIECES for table in changed)


def addresses(sizes: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Where the elements begin, in C order."""
    return [sum(map(int.__mul__, at, strides)) for at in itertools.product(*map(range, sizes))]


@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from([2, 4, 6, 12, 8])), max_size=3))
def test_a_piece_is_one_run_if_its_elements_follow_one_another(dims: list[tuple[int, int]]) -> None:
    sizes, strides = tuple(size for size, _ in dims), tuple(stride for _, stride in dims)
    box = tuple((5, 5 + size) for size in sizes)
    expected = addresses(sizes, strides) == list(range(0, 2 * int(np.prod(sizes)), 2))
    assert Pieces.of([LocatedPiece(box, "x", 0, strides)], len(dims)).are_runs(2).tolist() == [expected]
