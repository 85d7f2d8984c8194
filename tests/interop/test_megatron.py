"""Megatron's rank offsets by hand."""

from __future__ import annotations

import pytest

from shardwise import DeviceMesh, LayoutError, TensorLayout
from shardwise.interop.megatron import RankOffsets, from_rank_offsets, to_rank_offsets

MESH = DeviceMesh((2, 2), ("dp", "tp"))


def test_tensor_parallel_within_data_parallel() -> None:
    # Columns over tensor parallel ranks, rows over both, the tensor parallel rank major: fragment tp * 2 + dp of 4.
    offsets = to_rank_offsets(TensorLayout((("tp", "dp"), None), MESH))
    assert offsets == [RankOffsets(((0, index, 4),), 0) for index in (0, 2, 1, 3)]
    assert to_rank_offsets(TensorLayout((), MESH)) == [RankOffsets((), index) for index in range(4)]


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([[(0, 0, 2)]] * 3, "3 entries, but the mesh has 4"),
        ([[(0, 0, 2)], [(0, 0, 4)], [], []], r"rank_offsets\[1\] cuts"),
        ([[(0, 0, 2)], [(0, 1, 2)], [(0, 1, 2)], [(0, 0, 2)]], "no axes"),
        ([[(2, 0, 2)]] * 4, "does not exist"),
        ([[(0, 0, 2), (0, 0, 2)]] * 4, "repeats one"),
        ([[(0, 2, 2)]] * 4, "shard 2 of 2"),
        ([[(0, 0, 1), (1, -1, 2)]] * 4, "shard -1 of 2"),
        ([[(0, 0, 2)]] * 4, "no axes"),
    ],
)
def test_what_no_layout_can_express(offsets: list[list[tuple[int, int, int]]], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        from_rank_offsets(offsets, MESH, 2)


def test_a_dim_in_one_piece_may_be_said() -> None:
    assert from_rank_offsets([[(0, 0, 1)]] * 4, MESH, 1).axes == (None,)
