"""PyTorch's cuts of one dim by one mesh axis after the other, strided shards included."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Ranges", "strided_pieces"]

#: Elements of a dim: ascending ranges, none of them empty, none of them touching the next.
Ranges = list[tuple[int, int]]


def strided_pieces(size: int, cuts: Sequence[tuple[int, int]]) -> list[Ranges]:
    """Return the elements that each coordinate over some mesh axes holds, in the C order of the coordinates.

    Args:
        size: the size of the dim.
        cuts: for each axis that cuts it, in mesh order, its size and its split factor, which is 1 for a plain shard.

    A strided shard with factor f cuts what there is into f chunks, and each chunk over the axis; an index then holds
    one piece of each chunk. Only ranges are kept, so the cost does not grow with the number of elements.

    >>> strided_pieces(8, [(2, 1), (2, 2)])
    [[(0, 1), (2, 3)], [(1, 2), (3, 4)], [(4, 5), (6, 7)], [(5, 6), (7, 8)]]
    """
    pieces: list[Ranges] = [[(0, size)] if size else []]
    for count, factor in cuts:
        pieces = [part for piece in pieces for part in _cut(piece, count, factor)]
    return pieces


def _cut(piece: Ranges, count: int, factor: int) -> list[Ranges]:
    """Cut a piece over an axis of size `count`."""
    length = sum(stop - start for start, stop in piece)
    parts: list[Ranges] = [[] for _ in range(count)]
    ranges = iter(piece)
    start = stop = 0
    outer = -(-length // factor)
    for begin in range(0, length, max(outer, 1)):
        chunk = min(outer, length - begin)
        inner = -(-chunk // count)
        for index, position in enumerate(range(0, chunk, inner)):
            wanted = min(inner, chunk - position)
            # The parts are asked for in the order of the elements, so one walk over the ranges gives them all.
            while wanted:
                if start == stop:
                    start, stop = next(ranges)
                taken = min(wanted, stop - start)
                _append(parts[index], start, start + taken)
                start += taken
                wanted -= taken
    return parts


def _append(piece: Ranges, start: int, stop: int) -> None:
    if piece and piece[-1][1] == start:
        piece[-1] = (piece[-1][0], stop)
    else:
        piece.append((start, stop))
