"""Units: elements of a cut factor that stay together, against lists of elements cut unit by unit."""

from __future__ import annotations

import itertools
import pickle
from typing import get_args

import numpy as np
import pytest

import shardwise as sw
from shardwise import packed
from shardwise.interop.hlo import to_hlo
from shardwise.interop.torch import to_placements
from shardwise.layout import UnevenRule

from ..checks import refused
from ..oracle.numpy_oracle import pieces

RULES: tuple[UnevenRule, ...] = get_args(UnevenRule)
#: Meshes, and the axes by which the factor is cut.
CUTS = [
    *(((k,), ("a",)) for k in range(1, 6)),
    ((2, 3), ("a", "b")),
    ((2, 3), ("b", "a")),
    ((4, 2), ("a:(2)2", "b")),
]


def units_of(n: int, unit: int) -> list[list[int]]:
    elements = list(range(n))
    return [elements[at : at + unit] for at in range(0, n, unit)]


def digits(mesh: sw.DeviceMesh, axes: tuple[str, ...], device: int) -> tuple[tuple[int, ...], int]:
    """The sizes of the axes, and the number that a device's coordinates along them make, major first."""
    sizes, number = [], 0
    for axis in axes:
        if axis == "a:(2)2":  # of 4: the minor one of two factors
            size, at = 2, mesh.coordinate(device)[0] % 2
        else:
            place = mesh.axis_names.index(axis)
            size, at = mesh.shape[place], mesh.coordinate(device)[place]
        sizes.append(size)
        number = number * size + at
    return tuple(sizes), number


@pytest.mark.parametrize("rule", RULES)
def test_every_small_cut_is_that_of_its_units(rule: UnevenRule) -> None:
    refusals = 0
    for (shape, axes), unit, n in itertools.product(CUTS, range(1, 6), range(14)):
        mesh = sw.DeviceMesh(shape, ("a", "b")[: len(shape)])
        layout = sw.TensorLayout((packed.concat(packed.part(n, axes=axes, unit=unit)),), mesh)
        units = units_of(n, unit)
        sizes = digits(mesh, axes, 0)[0]
        try:
            cut = pieces(len(units), sizes, rule)
        except ValueError:
            with refused(sw.LayoutError, "do not divide evenly"):
                layout.partition((n,), rule)
            refusals += 1
            continue
        partition = layout.partition((n,), rule)
        for device in range(mesh.size):
            held = [at for one in cut[digits(mesh, axes, device)[1]] for at in units[one]]
            found = [at for piece in partition.pieces(f"cpu:{device}") for at in range(n)[piece.box[0]]]
            assert found == held, (shape, axes, unit, n)
            assert partition.shard_shape(f"cpu:{device}") == (len(held),)
            assert partition.runs(f"cpu:{device}").tolist() == ([[held[0], len(held)]] if held else [])
        shards, local = partition.locate(np.arange(n))
        assert partition.global_offset(shards, local).tolist() == list(range(n))
    assert (refusals > 0) == (rule == "even")


@pytest.mark.parametrize("rule", RULES[1:])
def test_halves_segments_and_padding_have_units_of_their_own(rule: UnevenRule) -> None:
    for n, unit, devices in itertools.product(range(10), range(1, 5), range(1, 5)):
        mesh = sw.DeviceMesh((devices,), ("tp",))
        # Two halves, of which one is twice as long; two segments of n rows of 2; all on units.
        halves = packed.concat(
            packed.part(n, axes="tp", unit=unit),
            packed.part(2 * n, axes="tp", unit=unit, pad_to=unit, pad_each=True),
            packed.part((2, n, 2), cut=1, axes="tp", unit=unit),
        )
        partition = sw.TensorLayout((halves,), mesh).partition((7 * n,), rule)
        for device in range(devices):
            expected: list[int] = []
            own = pieces(len(units_of(n, unit)), (devices,), rule)[device]
            one = [at for number in own for at in units_of(n, unit)[number]]
            expected += one
            step = next(step for step in itertools.count(0, unit) if step * devices >= 2 * n)
            padded = [n + at for at in range(2 * n) if step and at // step == device]
            expected += [*padded, *[-1] * (step - len(padded))]
            expected += [3 * n + o * 2 * n + 2 * at + i for o in range(2) for at in one for i in range(2)]
            held = np.full(partition.shard_shape(f"cpu:{device}"), -1)
            for piece in partition.pieces(f"cpu:{device}"):
                piece.view(held)[:] = np.arange(7 * n)[piece.box]
            assert held.tolist() == expected, (n, unit, devices)


def test_engines_cut_uneven_in_whole_units() -> None:
    # vLLM cuts the 2,880 of gpt-oss so: cdiv(2880 / 32, 4) * 32, the last rank has what is left.
    dim = packed.parse("(n@tp/ceil/unit32)")
    layout = sw.TensorLayout((dim,), sw.DeviceMesh((4,), ("tp",)))
    for n, lengths in ((2880, [736, 736, 736, 672]), (64, [32, 32, 0, 0])):
        partition = layout.partition((n,))
        assert [partition.shard_shape(f"cpu:{device}") for device in range(4)] == [(length,) for length in lengths]


def test_units_are_text() -> None:
    for text in ("(n@tp/unit128)", "gate:(n@tp/ceil/max4/unit32) + up:(n@tp/unit32/pad64each)", "(4@tp/unit2 128)"):
        dim = packed.parse(text)
        assert str(dim) == text
        assert repr(dim) == f"packed.parse({text!r})"
        assert pickle.loads(pickle.dumps(dim)) == eval(repr(dim)) == dim
    for one in (packed.part(8, axes="a)", unit=2), packed.part(8, pad_to=8, unit=4)):
        assert eval(repr(one)) == one
    # Without axes nothing is cut.
    assert packed.part(8, unit=4) == packed.part(8)


def test_bad_units_are_refused() -> None:
    with refused(sw.LayoutError, "unit is 0; it must be at least 1"):
        packed.part(8, axes="tp", unit=0)
    with refused(TypeError, "unit"):
        packed.part(8, axes="tp", unit=1.5)  # type: ignore[arg-type]
    with refused(sw.LayoutError, "split and unit are both given"):
        packed.parse("(8@tp/split/unit4)")
    with refused(sw.LayoutError, "cut is None"):
        packed.part(8, None, unit=2)
    with refused(sw.ParseError, "'unit' is not an uneven rule"):
        packed.parse("(8@tp/unit)")
    with refused(sw.ParseError, "repeats an option"):
        packed.parse("(8@tp/unit2/unit2)")
    with refused(sw.LayoutError, "320, that is 3 units of 128, which 2 shards do not divide evenly"):
        sw.TensorLayout((packed.parse("(n@tp/unit128)"),), sw.DeviceMesh((2,), ("tp",))).partition((320,))
    with refused(sw.LayoutError, "is 384 when padded, of which each of 2 shards has 192: not a multiple of 128"):
        sw.TensorLayout((packed.parse("(n@tp/unit128/pad64each)"),), sw.DeviceMesh((2,), ("tp",))).partition((320,))


def test_dialects_take_units_only_where_they_change_nothing() -> None:
    mesh = sw.DeviceMesh((2,), ("tp",))
    exact = sw.TensorLayout((packed.parse("(512@tp/unit128)"),), mesh)
    assert to_hlo(exact) == to_hlo(sw.TensorLayout(("tp",), mesh))
    assert to_placements(exact) == to_placements(sw.TensorLayout(("tp",), mesh))
    for text in ("(n@tp/unit128)", "(384@tp/unit128)"):
        for dialect in (to_hlo, to_placements):
            with refused(sw.LayoutError, "stay together in units of 128"):
                dialect(sw.TensorLayout((packed.parse(text),), mesh))
