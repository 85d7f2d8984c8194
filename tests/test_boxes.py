"""Boxes cut into parts, against the elements that numpy gives."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shardwise._boxes import consecutive


@pytest.mark.parametrize("shape", [(), (0,), (7,), (2, 3), (3, 4, 5), (1, 1, 6), (4, 1, 2), (2, 0, 3)])
@pytest.mark.parametrize("most", [1, 2, 5, 6, 11, 12, 20, 1000])
def test_a_box_is_cut_in_parts_that_follow_one_another(shape: tuple[int, ...], most: int) -> None:
    elements = np.arange(math.prod(shape)).reshape(shape)
    parts = [elements[box].ravel().tolist() for box in consecutive(shape, most)]
    assert [element for part in parts for element in part] == elements.ravel().tolist()
    assert all(len(part) <= most for part in parts)
