"""Tilings: what they hold, what they refuse, and that they are values."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from tests.checks import INT64_MAX, interrupted, refused
from tests.tilings import SHAPES, cut_boxes, held, numbered, tilings


@st.composite
def any_tiling(draw: st.DrawFn) -> sw.Tiling:
    return draw(tilings(draw(SHAPES)))


@settings(deadline=None)
@given(any_tiling())
def test_every_element_is_held_and_tilings_are_values(tiling: sw.Tiling) -> None:
    tiling.check()
    whole = numbered(tiling.shape)
    arrays = held(tiling, whole)
    assert {number for array in arrays for number in array.ravel().tolist()} - {-1} == set(whole.ravel().tolist())
    assert tiling.nbytes("int16").tolist() == [2 * array.size for array in arrays]
    assert tiling.size == whole.size
    # Law 8.
    again = eval(repr(tiling), vars(sw))
    assert again == tiling
    assert hash(again) == hash(tiling)
    for twin in pickle.loads(pickle.dumps(tiling)), copy.copy(tiling), copy.deepcopy(tiling):
        assert twin == tiling
        assert twin.holders == tiling.holders
    for holder in tiling.holders:
        assert len({*tiling.pieces(holder), *again.pieces(holder)}) == len(set(tiling.pieces(holder)))


@settings(deadline=None)
@given(SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), cut_boxes(shape))), st.data())
def test_what_is_missing_or_held_twice_is_named(case: Any, data: st.DataObject) -> None:
    shape, boxes = case
    filled = [i for i, box in enumerate(boxes) if all(start < stop for start, stop in box)]
    if not filled:
        return
    victim = data.draw(st.sampled_from(filled))
    less = np.array([box for i, box in enumerate(boxes) if i != victim], np.int64)
    less = less.reshape(len(boxes) - 1, len(shape), 2)
    with pytest.raises(sw.LayoutError, match="the boxes leave a gap: none holds"):
        sw.Tiling.from_boxes(shape, less).check()
    more = np.array([*boxes, boxes[victim]], np.int64).reshape(len(boxes) + 1, len(shape), 2)
    text = ", ".join(f"{start}:{stop}" for start, stop in boxes[victim])
    with pytest.raises(sw.LayoutError) as error:
        sw.Tiling.from_boxes(shape, more).check()
    assert str(error.value) == f"holders[{victim}] and holders[{len(boxes)}] overlap: both hold [{text}]"
    sw.Tiling.from_boxes(shape, more, replicas=True).check()


def test_the_ways_to_write_a_box() -> None:
    plain = sw.Tiling.from_boxes((8, 6), {"a": [(0, 3), (0, 6)], "b": [(3, 8), (0, 6)]})
    for a in (slice(0, 3), slice(None)), (slice(None, 3), (0, 6)), np.array([[0, 3], [0, 6]]), [[0, 3], slice(6)]:
        assert sw.Tiling.from_boxes((8, 6), {"a": a, "b": [(3, 8), (0, 6)]}) == plain
    assert plain.holder_shape("a") == (3, 6)
    listed = sw.Tiling.from_boxes((8, 6), {"a": [[(0, 3), (0, 6)]], "b": np.array([[[3, 8], [0, 6]]])})
    assert listed != plain
    assert listed.holder_shape("a") == (18,)
    assert listed.pieces("b") == [sw.Piece((slice(3, 8), slice(0, 6)), 0)]
    one_each = sw.Tiling.from_boxes((8, 6), [[slice(0, 3), slice(None)], [(3, 8), (0, 6)]])
    assert one_each == sw.Tiling.from_boxes((8, 6), [[[0, 3], [0, 6]], [[3, 8], [0, 6]]])
    assert one_each.holders == (0, 1)
    assert sw.Tiling.from_boxes((), {"a": ()}).holder_shape("a") == ()
    assert sw.Tiling.from_boxes((), {"a": [()]}).holder_shape("a") == (1,)
    assert sw.Tiling.from_boxes((4,), {"a": [], "b": [(0, 4)]}).holder_shape("a") == (0,)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: sw.Tiling(), TypeError, "made by Tiling.from_boxes"),
        (lambda: sw.Tiling.from_boxes((4,), "ab"), TypeError, "boxes must be a mapping"),
        (lambda: sw.Tiling.from_boxes((4,), 3), TypeError, "boxes must be a mapping"),  # type: ignore[arg-type]
        (lambda: sw.Tiling.from_boxes(4, []), TypeError, "shape must be a sequence of integers"),  # type: ignore[arg-type]
        (lambda: sw.Tiling.grid((4, True), (2, 1)), TypeError, "shape must be a sequence of integers"),
        (lambda: sw.Tiling.grid({4}, (2,)), TypeError, "shape must be a sequence of integers"),  # type: ignore[arg-type]
        (lambda: sw.Tiling.grid((4,), (2,), 3), TypeError, "holders must be a sequence of labels"),  # type: ignore[arg-type]
        (lambda: sw.Tiling.grid((4,), (2,), {"a", "b"}), TypeError, "holders must be a sequence"),  # type: ignore[arg-type]
        (lambda: sw.Tiling.from_boxes((-1,), []), sw.LayoutError, r"shape\[0\] is -1"),
        (lambda: sw.Tiling.from_boxes((2**62, 4), []), sw.SizeOverflowError, "over the limit"),
        (lambda: sw.Tiling.from_boxes((4,), {"a": [(0, 5)]}), sw.LayoutError, r"holders\[0\]: its box is \[0, 5\)"),
        (lambda: sw.Tiling.from_boxes((4,), {"a": [[(0, 1)], [(-2, 1)]]}), sw.LayoutError, "its box 1 is"),
        (lambda: sw.Tiling.from_boxes((4,), {"a": [slice(0, 4, 2)]}), sw.LayoutError, "a box has no steps"),
        (lambda: sw.Tiling.from_boxes((4,), {"a": [(0, 2), (0, 2)]}), sw.LayoutError, "has 2 dims but shape has 1"),
        (lambda: sw.Tiling.from_boxes((4,), {"a": [(0.5, 2)]}), TypeError, "must be an integer or an array of"),
        (lambda: sw.Tiling.from_boxes((4,), {"a": 7}), TypeError, r"boxes\['a'\] must be a box"),
        (lambda: sw.Tiling.from_boxes((4,), {"a": [(0, 4)]}, replicas=1), TypeError, "replicas must be True or"),  # type: ignore[arg-type]
        (
            lambda: sw.Tiling.from_boxes((4,), {"a": [sw.Piece((slice(0, 4),), (0,))]}),
            sw.LayoutError,
            "arrays has no shape for 'a'",
        ),
        (
            lambda: sw.Tiling.from_boxes((4,), {"a": [sw.Piece((slice(0, 4),), (1,))]}, arrays={"a": (4,)}),
            sw.LayoutError,
            r"holders\[0\] does not fit its box 0",
        ),
        (
            lambda: sw.Tiling.from_boxes((4,), {"a": [(0, 4)]}, arrays={"a": (4,)}),
            sw.LayoutError,
            "boxes has no Pieces for it",
        ),
        (
            lambda: sw.Tiling.from_boxes((4,), {"a": [(0, 4)]}, arrays={"b": (4,)}),
            sw.LayoutError,
            "but boxes has none for it",
        ),
        (lambda: sw.Tiling.grid((4,), (0,)), sw.LayoutError, r"chunks\[0\] is 0; a chunk must have at least 1 element"),
        (lambda: sw.Tiling.grid((4,), (2, 2)), sw.LayoutError, "chunks has 2 dims but shape has 1"),
        (lambda: sw.Tiling.grid((4,), (2,), ["a"]), sw.LayoutError, "holders has 1 label but the grid has 2 chunks"),
        (lambda: sw.Tiling.grid((4,), (2,), ["a", "a"]), sw.LayoutError, r"holders\[1\] repeats the label 'a' of"),
        (lambda: sw.Tiling.grid((4,), (2,), [[], []]), TypeError, "every label must be hashable"),
        (lambda: sw.Tiling.from_flat_ranges((4,), [(0, 5)]), sw.LayoutError, r"holders\[0\]: its range is \[0, 5\)"),
        (
            lambda: sw.Tiling.from_flat_ranges((4,), np.array([(0, 1, 2)])),
            sw.LayoutError,
            r"ranges is of shape \(1, 3\)",
        ),
        (lambda: sw.Tiling.from_flat_ranges((4,), [(0, 4)]).pieces(1), sw.LayoutError, "holder 1 is not in the tiling"),
        (lambda: sw.Tiling.from_flat_ranges((4,), [(0, 4)]).holder_shape([]), sw.LayoutError, "which has 1 holder: 0"),
    ],
)
def test_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        make()
    assert len(str(raised.value)) < 500


def test_messages_are_short_whatever_the_labels() -> None:
    labels = ["x" * 100_000, "y" * 100_000]
    tiling = sw.Tiling.from_flat_ranges((4,), {labels[0]: (0, 2), labels[1]: (2, 4)})
    with pytest.raises(sw.LayoutError) as raised:
        tiling.pieces("z" * 100_000)
    assert len(str(raised.value)) < 2000


def test_a_grid_of_any_size_costs_nothing_until_it_is_asked_for() -> None:
    grid = sw.Tiling.grid((2**40, 2**20), (1000, 1000))
    grid.check()
    request = sw.Tiling.from_boxes((2**40, 2**20), {"reader": [(999, 1001), (5, 6)]})
    plan = sw.plan_reshard(grid, request)
    assert [(t.src_device, t.box[0], t.src_box[0]) for t in plan] == [
        ((0, 0), slice(999, 1000), slice(999, 1000)),
        ((1, 0), slice(1000, 1001), slice(0, 1)),
    ]


@pytest.mark.parametrize(
    "work", [lambda tiling: tiling.check(), lambda tiling: sw.plan_reshard(tiling, tiling)], ids=["check", "plan"]
)
def test_ctrl_c_stops_checks_and_plans(work: Callable[[sw.Tiling], object]) -> None:
    """Boxes that lie in no grid, so that a tree is made of them; the signal comes while that goes on."""

    def stairs(n: int) -> sw.Tiling:
        rows = np.arange(n)
        left = np.stack([np.stack([rows, rows + 1], -1), np.stack([0 * rows, rows % 7 + 1], -1)], 1)
        right = np.stack([np.stack([rows, rows + 1], -1), np.stack([rows % 7 + 1, 0 * rows + 8], -1)], 1)
        return sw.Tiling.from_boxes((n, 8), np.concatenate([left, right]))

    assert interrupted(work, (stairs(1 << exponent) for exponent in range(12, 20)), KeyboardInterrupt)


def test_holders_without_labels_are_never_the_same() -> None:
    """The first chunk of one list is not the first chunk of another; what has a label is itself."""
    unnamed = sw.Tiling.from_boxes((4,), [[(0, 2)], [(2, 4)]])
    named = sw.Tiling.from_boxes((4,), {0: [(0, 2)], 1: [(2, 4)]})
    for src, dst in ((unnamed, unnamed), (unnamed, named), (named, unnamed)):
        plan = sw.plan_reshard(src, dst)
        assert (len(plan), len(plan.kept), plan.total_bytes("int8")) == (2, 0, 4)
    plan = sw.plan_reshard(named, named)
    assert (len(plan), len(plan.kept), plan.total_bytes("int8")) == (0, 2, 0)


@pytest.mark.parametrize("wrong", [[None], [3], {"a": 1}, [{"a": 1}], {1, 2}, [{1, 2}], {}, "ab"])
def test_boxes_that_are_not_boxes(wrong: Any) -> None:
    with pytest.raises((TypeError, sw.LayoutError), match=r"^boxes"):
        sw.Tiling.from_boxes((4,), {"a": wrong})


@pytest.mark.parametrize("replicas", [False, True])
@pytest.mark.parametrize(
    ("shape", "chunks"), [((10, 6), (4, 6)), ((7,), (3,)), ((), ()), ((4, 4, 5), (2, 4, 2)), ((5,), (9,))]
)
def test_boxes_that_are_a_grid_are_kept_as_its_chunks(
    shape: tuple[int, ...], chunks: tuple[int, ...], replicas: bool
) -> None:
    """What is kept of them does not grow with their number, and yet says each of them."""
    sides = [[[i, min(i + n, size)] for i in range(0, size, n)] for size, n in zip(shape, chunks, strict=True)]
    boxes = [list(box) for box in itertools.product(*sides)]
    tiling = sw.Tiling.from_boxes(shape, boxes, replicas=replicas)
    flag = ", replicas=True" if replicas else ""
    assert repr(tiling) == f"Tiling.from_boxes({shape}, {boxes}{flag})"
    labels = [f"file {i}" for i in range(len(boxes))]
    labelled = {label: tuple(map(tuple, box)) for label, box in zip(labels, boxes, strict=True)}
    named = sw.Tiling.from_boxes(shape, labelled, replicas=replicas)
    assert repr(named) == f"Tiling.from_boxes({shape}, {labelled}{flag})"
    for one in (tiling, named):
        again = pickle.loads(pickle.dumps(one))
        assert again == one
        assert hash(again) == hash(one)
        assert [again.pieces(holder) for holder in again.holders] == [one.pieces(holder) for holder in one.holders]
    assert tiling != named
    if shape:
        other = [*boxes[:-1], [*boxes[-1][:-1], [boxes[-1][-1][0], boxes[-1][-1][0]]]]
        assert sw.Tiling.from_boxes(shape, other, replicas=replicas) != tiling
        assert sw.Tiling.grid(shape, chunks) != tiling  # whose holders have other names


@pytest.mark.heavy
def test_a_million_boxes_of_a_grid_are_kept_in_little_memory() -> None:
    side = 1000
    corners = np.stack(np.meshgrid(np.arange(side), np.arange(side), indexing="ij"), axis=-1).reshape(-1, 2, 1)
    tiling = sw.Tiling.from_boxes((side, side), np.concatenate([corners, corners + 1], axis=2))
    assert len(tiling.holders) == side**2
    assert len(pickle.dumps(tiling)) < 1000


class TestConstruction:
    def test_a_label_that_comes_twice_is_named_with_both_places(self) -> None:
        with refused(sw.LayoutError, "holders[2] repeats the label 'a' of holders[0]"):
            sw.Tiling.grid((3,), (1,), ["a", "b", "a"])

    def test_shapes_of_arrays_need_labels(self) -> None:
        with refused(sw.LayoutError, "arrays is given, so every holder needs a label"):
            sw.Tiling.from_boxes((4,), [[(0, 4)]], arrays={0: (4,)})

    @pytest.mark.parametrize("ranges", [[], {}, np.empty((0, 2), np.int64)])
    def test_no_ranges_are_no_holders(self, ranges: Any) -> None:
        assert sw.Tiling.from_flat_ranges((0,), ranges).holders == ()

    def test_one_range_is_one_holder(self) -> None:
        assert sw.Tiling.from_flat_ranges((4,), [(0, 4)]).holders == (0,)
        with refused(sw.LayoutError, "(1, 1)"):
            sw.Tiling.from_flat_ranges((4,), [(0,)])  # type: ignore[list-item]

    def test_a_shape_has_one_dim(self) -> None:
        with refused(TypeError, "shape must be a sequence of integers"):
            sw.Tiling.from_boxes(np.ones((2, 2), np.int64), [])  # type: ignore[arg-type]

    @pytest.mark.parametrize(("count", "shown"), [(3, "3 holders: 0, 1, 2"), (4, "4 holders: 0, 1, 2, …")])
    def test_up_to_three_holders_are_listed(self, count: int, shown: str) -> None:
        with pytest.raises(sw.LayoutError) as raised:
            sw.Tiling.from_boxes((count,), [[(i, i + 1)] for i in range(count)]).pieces("nobody")
        assert str(raised.value).endswith(shown)

    def test_a_plan_says_what_sort_of_tilings_there_are(self) -> None:
        chunks, ranges = sw.Tiling.grid((4,), (3,)), sw.Tiling.from_flat_ranges((4,), [(0, 4)])
        text = sw.plan_reshard(chunks, ranges).explain()
        assert "chunks of shape (3,)" in text
        assert "ranges of the flattened tensor" in text
        assert "explicit boxes" in sw.plan_reshard(sw.Tiling.from_boxes((4,), [[(0, 4)]]), ranges).explain()

    def test_boxes_of_another_rank_are_refused_with_their_shape(self) -> None:
        with refused(sw.LayoutError, "boxes is of shape (2, 1, 2)", "(boxes, 2, 2)"):
            sw.Tiling.from_boxes((4, 4), np.zeros((2, 1, 2), np.int64))

        with refused(sw.LayoutError, "boxes['a'] is of shape (2, 1, 2)", "(boxes, 2, 2)"):
            sw.Tiling.from_boxes((4, 4), {"a": np.zeros((2, 1, 2), np.int64)})

    def test_no_boxes_are_of_any_rank(self) -> None:
        tiling = sw.Tiling.from_boxes((4, 0), {"a": [], "b": np.empty((0, 2, 2), np.int64)})
        assert tiling.pieces("a") == tiling.pieces("b") == []

    def test_pieces_and_boxes_are_not_mixed(self) -> None:
        piece = sw.Piece((slice(0, 2),), (0,))
        with refused(TypeError, "Pieces and other boxes"):
            sw.Tiling.from_boxes((4,), {"a": [piece, (slice(2, 4),)]}, arrays={"a": (4,)})

    def test_arrays_of_their_own_come_back_from_a_repr(self) -> None:
        flat = {"a": [sw.Piece((slice(0, 1), slice(0, 3)), 2), sw.Piece((slice(1, 2), slice(0, 3)), 5)]}
        full = {"a": [sw.Piece((slice(0, 1), slice(0, 3)), (1, 0)), sw.Piece((slice(1, 2), slice(0, 3)), (0, 0))]}
        for pieces, own in ((flat, (8,)), (full, (2, 3))):
            tiling = sw.Tiling.from_boxes((2, 3), pieces, arrays={"a": own})
            again = eval(repr(tiling), {"Tiling": sw.Tiling, "Piece": sw.Piece})
            assert again == tiling
            assert again.pieces("a") == pieces["a"]
            assert again.holder_shape("a") == own

    @pytest.mark.parametrize("step", [None, 1])
    def test_a_step_of_one_is_none(self, step: int | None) -> None:
        assert sw.Tiling.from_boxes((4,), {"a": (slice(0, 4, step),)}).pieces("a")[0].box == (slice(0, 4),)

    @pytest.mark.parametrize("step", [-1, 0, 2])
    def test_other_steps_are_refused(self, step: int) -> None:
        with refused(sw.LayoutError, "no steps"):
            sw.Tiling.from_boxes((4,), {"a": (slice(0, 4, step),)})


def test_a_tiling_may_have_as_many_as_int64_holds() -> None:
    assert sw.Tiling.from_boxes((INT64_MAX,), [[(0, INT64_MAX)]]).nbytes("int8").tolist() == [INT64_MAX]
    assert sw.Tiling.from_boxes((2**62 - 1,), [[(0, 2**62 - 1)]]).nbytes("int16").tolist() == [2**63 - 2]
    with refused(sw.SizeOverflowError, f"{2**62} elements of 16 bits", INT64_MAX):
        sw.Tiling.from_boxes((2**62,), [[(0, 2**62)]]).nbytes("int16")
