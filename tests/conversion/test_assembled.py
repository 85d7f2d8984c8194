"""Trees of what tensors are made of: the pieces of any box of them, compared with numpy; and which trees are equal."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise._dtypes import DTYPES, Dtype
from shardwise.conversion.arrange import arranged
from shardwise.conversion.assembled import Assembled
from shardwise.conversion.leaves import Stored, Values
from shardwise.conversion.tables import Wanted
from shardwise.pieces import LocatedPiece, Pieces
from shardwise.store.write.places.fetch import fetched_box

Array = np.ndarray[Any, Any]
#: A tree, and its values by numpy.
Made = tuple[Assembled, Array]

U2: Dtype = DTYPES["uint16"]


def leaf(name: str, values: Array, rows: int = 1) -> Stored:
    """A stored tensor whose rows lie in so many arrays."""

    def make() -> Wanted:
        pieces = []
        for begin in range(0, len(values), rows) if values.ndim else [0]:
            part = np.ascontiguousarray(values[begin : begin + rows] if values.ndim else values)
            box = [(0, size) for size in part.shape]
            if values.ndim:
                box[0] = begin, begin + len(part)
            if part.size:
                pieces.append(LocatedPiece(tuple(box), part.view("V2"), 0, part.strides))
        return Wanted(name, U2, values.shape, Pieces.of(pieces, values.ndim))

    return Stored(name, values.shape, U2, make=make)


@st.composite
def trees(draw: st.DrawFn, depth: int = 3) -> Made:
    """Any tree of up to this depth, over tensors of up to three dims."""
    if depth == 0 or draw(st.integers(0, 4)) == 0:
        shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 6]), min_size=1, max_size=3))
        values = np.arange(np.prod(shape), dtype="u2").reshape(shape) + draw(st.integers(0, 9)) * 1000
        return leaf(f"t{draw(st.integers(0, 99))}", values, draw(st.integers(1, 3))), values
    tree, values = draw(trees(depth=depth - 1))
    dim = draw(st.integers(0, values.ndim - 1)) if values.ndim else 0
    kind = draw(st.sampled_from(["taken", "packed", "padded", "stacked", "unstacked", "transposed", "arranged"]))
    size = values.shape[dim] if values.ndim else 0
    if kind == "taken" and size:
        run = draw(st.sampled_from([count for count in (1, 2, 3) if size % count == 0]))
        order = draw(st.permutations(range(size // run)))[: draw(st.integers(1, size // run))]
        runs = np.array([[old * run, new * run, run] for new, old in enumerate(order)], np.int64)
        places = [old * run + at for old in order for at in range(run)]
        return tree.taken(dim, runs, len(places)), np.take(values, places, dim)
    if kind == "packed" and size:
        other = leaf("other", values + 7)
        places = draw(st.permutations(range(2 * size)))
        rows = [np.array([[at, places[part * size + at], 1] for at in range(size)], np.int64) for part in (0, 1)]
        return (
            Assembled.packed(dim, [(tree, rows[0]), (other, rows[1])]),
            np.take(np.concatenate([values, values + 7], dim), np.argsort(places), dim),
        )
    if kind == "padded" and values.ndim:
        more = draw(st.integers(0, 3))
        width = [(0, more if at == dim else 0) for at in range(values.ndim)]
        return tree.padded(dim, size + more), np.pad(values, width)
    if kind == "stacked" and values.ndim < 4:
        return Assembled.stacked([tree, leaf("other", values + 7), tree]), np.stack([values, values + 7, values])
    if kind == "unstacked" and values.ndim > 1 and len(values):
        place = draw(st.integers(0, len(values) - 1))
        return tree.unstacked(place), values[place]
    if kind == "transposed" and values.ndim > 1:
        return tree.transposed(), values.swapaxes(-1, -2)
    if kind == "arranged":
        split = []
        n: int
        for n in values.shape:
            inner = draw(st.sampled_from([count for count in (1, 2, 3) if n % count == 0]))
            split.append([inner, n // inner])
        atoms = [n for group in split for n in group]
        order = draw(st.permutations(range(len(atoms))))
        cuts = sorted(draw(st.lists(st.integers(0, len(order)), max_size=3)))
        merged = [list(order[a:b]) for a, b in itertools.pairwise([0, *cuts, len(order)])]
        shape = [int(np.prod([atoms[atom] for atom in group], dtype=int)) for group in merged]
        return arranged(tree, split, merged), values.reshape(atoms).transpose(order).reshape(shape)
    return tree, values


@pytest.mark.heavy
@settings(max_examples=400)
@given(trees(), st.data())
def test_the_pieces_of_a_box_hold_what_numpy_has_there(made: Made, data: st.DataObject) -> None:
    """A box is made of its own pieces, however the tensor is put together; and the whole is the box of all."""
    tree, values = made
    assert tree.shape == values.shape
    box = []
    for size in values.shape:
        low, high = sorted([data.draw(st.integers(0, size)), data.draw(st.integers(0, size))])
        box.append((low, high))
    expected = values[tuple(slice(*side) for side in box)]
    pieces, replicas = tree.pieces_in(tuple(box))
    assert not len(replicas)
    assert int(pieces.volumes.sum()) == expected.size
    if expected.size:
        assert np.array_equal(fetched_box(pieces, tuple(box), 2).view("u2").reshape(expected.shape), expected)
    if values.size:
        whole = tuple((0, size) for size in values.shape)
        found = fetched_box(tree.tables().pieces, whole, 2).view("u2").reshape(values.shape)
        assert np.array_equal(found, values)


@pytest.mark.parametrize("scattered", [False, True])
def test_a_box_of_a_fine_order_takes_what_the_box_takes(scattered: bool) -> None:
    """Of 10^8 elements in turns, a table of which would take gigabytes, a row is found as one row."""
    size, rows = 1 << 14, 1 << 13
    values = np.broadcast_to(np.arange(rows, dtype="u2"), (size, rows))

    def make() -> Wanted:
        whole = ((0, size), (0, rows))
        return Wanted("w", U2, values.shape, Pieces.of([LocatedPiece(whole, values.view("V2"), 0, values.strides)], 2))

    tree: Assembled = Stored("w", values.shape, U2, make=make)
    tree = arranged(tree, [[2, size // 2], [2, rows // 2]], [[1, 0], [3, 2]])
    if scattered:  # In two steps: columns of what is fine already.
        tree = arranged(tree, [[size], [2, rows // 2]], [[0], [2, 1]])
    assert tree.is_scattered
    pieces, _ = tree.pieces_in(((7, 8), (0, rows)))
    assert len(pieces) <= rows
    got = fetched_box(pieces, ((7, 8), (0, rows)), 2).view("u2")[0]
    once = np.arange(rows, dtype="u2").reshape(2, rows // 2).T.reshape(-1)
    assert np.array_equal(got, once.reshape(2, rows // 2).T.reshape(-1) if scattered else once)


def test_trees_that_are_made_alike_of_the_same_places_are_the_same_tensor() -> None:
    """Equal trees are tied tensors; another leaf, another step or another number is another tensor."""
    values = np.arange(12, dtype="u2").reshape(4, 3)
    first = leaf("a", values)
    same = Stored("b", first.shape, U2, make=partial(lambda made: made, first.make()))
    same_again = Stored("c", first.shape, U2, make=same.make)
    rows = np.array([[2, 0, 2], [0, 2, 2]], np.int64)
    assert same.taken(0, rows, 4).identity() == same_again.taken(0, rows, 4).identity()
    assert same.padded(0, 8).identity() == same_again.padded(0, 8).identity()
    others = [
        same.padded(0, 9),
        same.padded(1, 8),
        same.transposed(),
        leaf("a", values).padded(0, 8),
        Assembled.stacked([same]),
    ]
    assert same.padded(0, 8).identity() not in [other.identity() for other in others]
    assert same.apart().wanted("x", None).identity is None


def test_equal_values_are_two_tensors() -> None:
    """Two weights may have one shape, and it is stated for each: neither is written in place of the other."""
    first, second = (Values.of(name, np.array([3, 4], "<i8"), DTYPES["int64"]) for name in "ab")
    assert first.what == second.what
    assert first.identity() != second.identity()
    assert first.identity() == first.identity()
