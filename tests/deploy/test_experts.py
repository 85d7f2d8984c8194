"""Experts that move to other ranks as seldom as can be: compared with all ways to give sets to ranks."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest

from shardwise import LayoutError
from shardwise.deploy import ExpertMap, balanced_experts, least_moves

from ..checks import refused


def drawn(random: np.random.Generator, experts: int, ep: int, slots: int) -> ExpertMap:
    """Each expert at least once, further slots at random, in any order."""
    held = [*range(experts), *random.integers(experts, size=slots * ep - experts).tolist()]
    return ExpertMap.of_physical(random.permutation(held).tolist(), ep)


def moves(old: ExpertMap, sets: tuple[tuple[int, ...], ...]) -> int:
    rows = (*old.slots, *((),) * len(sets))
    return sum(expert not in rows[rank] for rank, row in enumerate(sets) for expert in set(row))


@pytest.mark.parametrize("seed", range(40))
def test_no_other_way_moves_fewer(seed: int) -> None:
    random = np.random.default_rng(seed)
    nodes = int(random.integers(1, 3))
    ep = nodes * int(random.integers(1, 4 - nodes + 1))
    experts = int(random.integers(ep, 3 * ep + 1))
    old = drawn(random, experts, int(random.integers(1, 6)), 2 * experts)
    new = drawn(random, experts, ep, -(-experts // ep) + int(random.integers(3)))
    each = ep // nodes
    ways = []
    for of_node in permutations(range(nodes)):
        for inner in product(permutations(range(each)), repeat=nodes):
            ways.append([of_node[n] * each + at for n in range(nodes) for at in inner[n]])
    (found,) = least_moves([old], [new], nodes=nodes)
    assert found.moved_from(old) == moves(old, found.slots)
    assert found.moved_from(old) == min(moves(old, tuple(new.slots[at] for at in way)) for way in ways)
    # The same sets, those of a node together.
    assert sorted(map(sorted, found.slots)) == sorted(map(sorted, new.slots))
    by_node = [
        sorted(sorted(map(sorted, one.slots[n * each : (n + 1) * each])) for n in range(nodes)) for one in (found, new)
    ]
    assert by_node[0] == by_node[1]
    # What stays is in its slot, as far as it has one.
    for before, after in zip(old.slots, found.slots):  # noqa: B905 - one may have more ranks
        if len(set(before)) == len(before) and len(set(after)) == len(after):
            for slot, expert in enumerate(before[: len(after)]):
                assert expert not in after or after[slot] == expert


def test_a_balancer_that_changes_nothing_moves_nothing() -> None:
    load = np.random.default_rng(0).random((61, 256))
    now = balanced_experts(load, slots=288, ep=32, groups=8, nodes=4)
    shuffled = tuple(ExpertMap(one.slots[16:24] + one.slots[:8] + one.slots[24:] + one.slots[8:16]) for one in now)
    best = least_moves(now, shuffled, nodes=4)
    assert sum(one.moved_from(old) for one, old in zip(best, now, strict=True)) == 0
    assert best == now


def test_what_does_not_fit_is_refused() -> None:
    one, other = ExpertMap.linear(4, ep=2), ExpertMap.linear(6, ep=2)
    with refused(LayoutError, "1 layer, ", "and after 2"):
        least_moves([one], [one, one])
    with refused(LayoutError, "4 experts before", "6 after"):
        least_moves([one], [other])
    for nodes in (0, 3, -1):
        with refused(LayoutError, f"nodes is {nodes}"):
            least_moves([one], [one], nodes=nodes)
    with pytest.raises(TypeError, match="after"):
        least_moves([one], [one.slots])  # type: ignore[list-item]
