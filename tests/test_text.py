"""Values in messages: short, whatever they are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import shardwise as sw
from shardwise._text import shown
from shardwise.interop import hlo
from tests.checks import HUGE, cyclic, deep

MESH = sw.DeviceMesh((2, 2), ("x", "y"))


LAYOUT = sw.TensorLayout(("x",), MESH)


@pytest.mark.heavy
def test_messages_about_large_meshes_are_short() -> None:
    labels = [f"host{i}:gpu:0" for i in range(100_000)]
    mesh = sw.DeviceMesh((len(labels),), ("x",), labels)
    partition = sw.TensorLayout(("x",), mesh).partition((len(labels),))
    other = sw.TensorLayout(("x",), mesh)
    wrong: list[Callable[[], object]] = [
        lambda: partition.box("nowhere"),
        lambda: setattr(other, "device_mesh", MESH),
        lambda: hlo.from_hlo("{devices=[7]<=[7]}", mesh),
        lambda: sw.TensorLayout(("x",), mesh).partition((len(labels) + 1,)),
        lambda: sw.LayoutMap(mesh).__setitem__("a", ("y" * 100_000,)),
        lambda: sw.TensorLayout([f"a{i}" for i in range(100_000)], mesh),
        lambda: sw.TensorLayout((None,) * 100_000, mesh).box("nowhere", (1,) * 100_000),
        lambda: sw.distribute_tensor(np.zeros(3), other),
        lambda: sw.DeviceMesh((2,), ("x",), labels),
        lambda: sw.DeviceMesh((len(labels),), ("x",), [*labels[1:], labels[1]]),
    ]
    for call in wrong:
        with pytest.raises((sw.ShardwiseError, TypeError, ZeroDivisionError)) as raised:
            call()
        assert len(str(raised.value)) <= 1100, str(raised.value)[:3000]


def test_a_value_in_a_message_is_short_whatever_it_is() -> None:
    class Awkward:
        def __repr__(self) -> str:
            raise ValueError("no")

    values = [
        cyclic(),
        deep(),
        HUGE,
        [HUGE] * 100,
        "x" * 10**6,
        ["x" * 1000] * 1000,
        b"x" * 10**6,
        Awkward(),
        [Awkward()],
    ]
    values += [{i: [i] * 100 for i in range(1000)}, np.zeros(10**6), sw.DeviceMesh((10**5,), ("x",), range(10**5))]
    for value in values:
        assert len(shown(value)) <= 410
    assert shown(["a", 1, None, ("b",)]) == "['a', 1, None, ('b',)]"
    layouts = [LAYOUT, sw.TensorLayout((("x", "y"), None)), sw.TensorLayout((None,), MESH, unreduced=("x",))]
    for layout in layouts:
        assert shown(layout) == repr(layout)
    assert shown(sw.DeviceMesh((9,), ("x",))) == "DeviceMesh((9,), ('x',))"
    assert shown(sw.DeviceMesh((9,), ("x",), range(9))).endswith("devices=[0, 1, 2, 3, 4, 5, 6, 7, ...])")
