"""Caches of keys and values between engines of other tensor parallelism, in any order of dims, block by block."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardwise import DeviceMesh, Piece, Tiling, packed, plan_model
from shardwise.deploy import Deployment, DeploymentRule

from .test_converted import carried_out

TOKENS, DIM = 3, 2


def engine(name: str, tp: int, stages: list[int], heads: int, at: int) -> Deployment:
    """Layers by stages, heads in dim `at`, several devices with the same ones if there are more devices than heads."""
    axes: list[Any] = [None] * 4
    axes[at] = packed.parse(f"({heads}@tp/max)")
    rule = DeploymentRule(axes, at={"pp": "stage[i]"})
    pp = max(stages) + 1
    world = [f"{name}:{i}" for i in range(pp * tp)]
    return Deployment(world, DeviceMesh((pp, tp), ("pp", "tp")), {"k.{i}$": rule}, numbers={"stage": stages})


def pools(side: Deployment, names: list[str], shape: tuple[int, ...], table: list[int], size: int) -> dict[str, Tiling]:
    found = {}
    for name in names:
        cut = side.partition(name, shape)
        pieces: dict[Any, list[Piece]] = {}
        for label in cut.holders:
            box = cut.pieces(label)[0].box
            pieces[label] = [Piece((slice(n, n + 1), *box[1:]), (at, 0, 0, 0)) for n, at in enumerate(table)]
        arrays = {label: (size, *cut.holder_shape(label)[1:]) for label in cut.holders}
        found[name] = Tiling.from_boxes(shape, pieces, replicas=True, arrays=arrays)
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("prefill", "decode"), [(1, 4), (4, 2), (2, 8), (8, 4)])
def test_every_block_is_where_its_table_says(prefill: int, decode: int, seed: int) -> None:
    draw = np.random.default_rng([prefill, decode, seed])
    heads, at, blocks = 4, (1, 2)[seed % 2], int(draw.integers(1, 6))
    shape = (blocks, heads, TOKENS, DIM) if at == 1 else (blocks, TOKENS, heads, DIM)
    layers = 3
    here, there = (draw.permutation(9)[:blocks].tolist() for _ in range(2))
    names = [f"k.{i}" for i in range(layers)]
    is_shared = seed % 4 == 3
    old = engine("a", prefill, [0, 1, 1], heads, at)
    new = engine("a" if is_shared else "b", decode, [0, 0, 0] if seed % 3 else [0, 0, 1], heads, at)
    src, dst = pools(old, names, shape, here, 9), pools(new, names, shape, there, 10)
    plan = plan_model(src, dst, dict.fromkeys(names, (shape, "int32")))
    values = {name: draw.integers(1, 2**31, shape).astype("int32") for name in names}
    memory: dict[Any, dict[str, Any]] = {}
    for name, one in src.items():
        for label in one.holders:
            pool = memory.setdefault(label, {}).setdefault(name, np.zeros(one.holder_shape(label), "int32"))
            pool[here] = cut(values[name], one, label)
    shapes: dict[Any, dict[str, Any]] = {}
    for name, one in dst.items():
        for label in one.holders:
            shapes.setdefault(label, {})[name] = one.holder_shape(label), "int32"
    made = carried_out(plan, memory, shapes)
    for name, one in dst.items():
        for label in one.holders:
            assert np.array_equal(made[label][name][there], cut(values[name], one, label))
            others = [block for block in range(10) if block not in there]
            assert (made[label][name][others] == -1).all()


def cut(values: Any, tiling: Tiling, label: Any) -> Any:
    """The heads of a device, of all blocks of the request."""
    box = (slice(None), *tiling.pieces(label)[0].box[1:])
    return values[box]
