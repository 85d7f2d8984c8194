"""Hypothesis strategies for meshes, layouts and partitions, the odd ones included."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

import shardwise as sw

#: Names that a careless formatter, parser or regular expression would trip over.
AXIS_NAMES = [
    "x",
    "y",
    "data",
    "model",
    "X",
    "x y",
    "x,y",
    "a|b",
    "=",
    ":",
    "'",
    '"',
    "\\",
    "\n",
    "\0",
    "é",
    "轴",
    "_",
    "0",
]

RULES: list[sw.UnevenRule] = ["even", "ceil", "chunk", "balanced", "floor"]


def labels(size: int) -> st.SearchStrategy[list[Any] | None]:
    """No labels, the default ones in another order, or labels of several types."""
    default = [f"cpu:{i}" for i in range(size)]
    odd: list[Any] = [(("host", i // 2), i) if i % 3 == 0 else i * 7 if i % 3 == 1 else f"d {i}'" for i in range(size)]
    return st.none() | st.permutations(default) | st.permutations(odd) | st.permutations(range(size))


@st.composite
def meshes(draw: st.DrawFn, max_axes: int = 4, max_size: int = 4) -> sw.DeviceMesh:
    """Meshes of up to `max_axes` axes of up to `max_size`, oddly named, with devices in any order."""
    shape = draw(st.lists(st.integers(1, max_size), min_size=1, max_size=max_axes))
    names = draw(st.permutations(AXIS_NAMES))[: len(shape)]
    size = 1
    for n in shape:
        size *= n
    return sw.DeviceMesh(shape, names, draw(labels(size)))


@st.composite
def layouts(
    draw: st.DrawFn,
    mesh: sw.DeviceMesh | None = None,
    max_rank: int = 4,
    rank: int | None = None,
    partial: bool = True,
) -> sw.TensorLayout:
    """Layouts where each axis of the mesh cuts some dim, in any order, replicates, or, if `partial`, is unreduced."""
    mesh = draw(meshes()) if mesh is None else mesh
    rank = draw(st.integers(0, max_rank)) if rank is None else rank
    axes: list[list[str]] = [[] for _ in range(rank)]
    unreduced = []
    for name in draw(st.permutations(mesh.axis_names)):
        place = draw(st.integers(-2 if partial else -1, rank - 1))
        if place >= 0:
            axes[place].append(name)
        elif place == -2:
            unreduced.append(name)
    return sw.TensorLayout(axes, mesh, unreduced=unreduced)


@st.composite
def partitions(
    draw: st.DrawFn, layout: sw.TensorLayout | None = None, rules: list[sw.UnevenRule] = RULES, max_dim: int = 9
) -> sw.Partition:
    """Partitions under any rule; dims may be 0, and smaller than the number of shards."""
    layout = draw(layouts()) if layout is None else layout
    rule = draw(st.sampled_from(rules))
    shape = []
    for shards in layout.num_shards:
        most = max_dim if rule != "even" else max(max_dim // shards, 1)
        shape.append(draw(st.integers(0, most)) * (shards if rule == "even" else 1))
    return layout.partition(shape, rule)
