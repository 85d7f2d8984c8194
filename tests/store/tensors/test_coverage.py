"""Pieces that are all of a tensor, or not: against counts of how many hold each element."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardwise.errors import ParseError
from shardwise.store.tensors.coverage import tile
from tests.checks import view_index
from tests.tilings import cut_boxes

Box = list[tuple[int, int]]


def tiled(shape: tuple[int, ...], boxes: list[Box]) -> tuple[list[int], list[int]]:
    numbers = np.array(boxes, np.int64).reshape(len(boxes), len(shape), 2)
    return tile("w", shape, numbers, lambda position: f"file {position}.", "model")


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor cut into boxes, some of them twice, and perhaps one side of one moved."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    boxes = draw(cut_boxes(shape))
    boxes += [list(boxes[i]) for i in draw(st.lists(st.integers(0, len(boxes) - 1), max_size=2))]
    boxes = draw(st.permutations(boxes))
    moved: bool = draw(st.booleans())
    if shape and moved:
        box, dim = boxes[draw(st.integers(0, len(boxes) - 1))], draw(st.integers(0, len(shape) - 1))
        side = list(box[dim])
        side[draw(st.integers(0, 1))] += draw(st.sampled_from([-2, -1, 1, 2]))
        box[dim] = (side[0], side[1])
    return shape, boxes


@pytest.mark.heavy
@settings(max_examples=300)
@example(((3,), [[(0, 0)], [(0, 2)], [(2, 3)], [(0, 2)]]))
@example(((), [[], []]))
@example(((), []))
@example(((0, 2), [[(0, 0), (0, 1)], [(0, 0), (1, 2)]]))
@example(((0, 2), []))
@given(cases())
def test_what_tiles_a_tensor_is_found_by_counting(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    outside = [
        i for i, box in enumerate(boxes) if any(a < 0 or a > b or b > n for (a, b), n in zip(box, shape, strict=True))
    ]
    if outside:
        with pytest.raises(
            ParseError, match=rf"^model: tensor 'w' of shape .*: file {outside[0]}\. holds .*which is outside it"
        ):
            tiled(shape, boxes)
        return
    held = np.zeros(shape, int)
    first: list[int] = []
    again: list[int] = []
    for i, box in enumerate(boxes):
        inside = held[view_index(slice(*side) for side in box)]
        if inside.size:
            (again if box in [boxes[j] for j in first] else first).append(i)
            inside += i in first
    if (held == 1).all():
        if boxes == [[(0, size) for size in shape]]:
            first = [0]  # One box is the tensor, even if neither has elements.
        assert tiled(shape, boxes) == (first, again)
    else:
        with pytest.raises(ParseError, match="overlap" if (held > 1).any() else "leave a gap: none holds") as caught:
            tiled(shape, boxes)
        assert str(caught.value).startswith(f"model: tensor 'w' of shape {shape}: ")


def test_the_files_of_boxes_that_overlap_are_named() -> None:
    """The first box is empty and the third a replica; the second and the last both hold row 1."""
    with pytest.raises(ParseError) as caught:
        tiled((4,), [[(2, 2)], [(0, 2)], [(0, 2)], [(2, 4)], [(1, 2)]])
    found = {i for i in range(5) if f"is in file {i}." in str(caught.value)}
    assert found == {1, 4}
    assert "both hold [1:2]" in str(caught.value)


def test_a_gap_is_named_by_a_box_that_nothing_holds() -> None:
    corners: list[Box] = [[(i, i + 1), (j, j + 1)] for i, j in itertools.product((0, 2), repeat=2)]
    with pytest.raises(ParseError, match=r"leave a gap: none holds \[0:1, 1:2\]"):
        tiled((3, 3), corners)
