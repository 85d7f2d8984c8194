"""What one rank holds, in arrays of its own."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.store.write.forms.one_rank import _zeros


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_padding_is_all_that_no_box_covers(data: st.DataObject) -> None:
    """Counted element by element: the boxes and the zeros tile the array, each element once."""
    shape = tuple(data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=3)))
    held = np.zeros(shape, int)
    boxes = []
    for _ in range(data.draw(st.integers(0, 4))):
        sides = np.array([sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))) for size in shape], np.int64)
        box = tuple(slice(*side) for side in sides.tolist())
        if held[box].any():  # Of a rank no two boxes share elements of an array.
            continue
        held[box] += 1
        # The boxes are of the tensor; in the array each begins where it says.
        away = data.draw(st.integers(0, 9))
        boxes.append(((sides[:, 0] + away, sides[:, 1] + away), sides[:, 0]))
    for piece in _zeros(shape, boxes, 4):
        assert piece.strides == (0,) * len(shape)
        held[tuple(slice(*side) for side in piece.box)] += 1
    assert (held == 1).all()
