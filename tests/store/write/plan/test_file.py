"""Files of plans: numbers that are refused, each over its bound by one."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise.pieces import Pieces
from shardwise.store.write.plan.file import check_pieces


def test_pieces_of_a_plan_are_in_their_tensor_and_their_source() -> None:
    """Rows are holder, offset, starts, stops and strides; each number is moved over its bound by one."""
    right = [1, 0, 0, 2, 3, 4, 8, 0]
    check_pieces(Pieces(np.array([right], np.int64)), (3, 4), 2)
    for at, wrong in ((0, 2), (0, -1), (1, -1), (2, -1), (3, -1), (2, 3), (3, 4), (4, 4), (5, 5), (6, -1), (7, -1)):
        rows = np.array([right, [wrong if at == place else number for place, number in enumerate(right)]], np.int64)
        with pytest.raises(ValueError, match="is outside its tensor, or is in no source"):
            check_pieces(Pieces(rows), (3, 4), 2)
