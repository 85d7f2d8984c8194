"""The boxes of all devices beside JAX's `devices_indices_map`, for shapes that JAX has not seen: it caches by shape."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from figures import Row, faster
from jax_mesh import mesh_sharding
from part import main
from timing import compare

import shardwise as sw

SIZES = itertools.count(1)


def rows() -> Iterator[Row]:
    # A stand-in for a device is as good as a device.
    real, stand_in = (list(mesh_sharding((16, 32), s).devices_indices_map((640, 640)).values()) for s in (False, True))
    assert real == stand_in
    for grid, goal in (((64, 64), 3), ((16, 32), 6), ((2, 4), 8)):
        sharding = mesh_sharding(grid)
        mesh = sw.DeviceMesh(grid, ("x", "y"))
        layout = sw.TensorLayout(("x", "y"), mesh)

        def new_shape(grid: tuple[int, int] = grid) -> tuple[int, int]:
            return (grid[0] * next(SIZES), grid[1] * 3)

        def by_jax(sharding: Any = sharding, new_shape: Any = new_shape) -> Any:
            return sharding.devices_indices_map(new_shape())

        def as_dict(layout: Any = layout, new_shape: Any = new_shape) -> Any:
            return layout.partition(new_shape()).devices_indices_map()

        def as_array(layout: Any = layout, new_shape: Any = new_shape) -> Any:
            return layout.partition(new_shape()).boxes()

        boxes = list(layout.devices_indices_map((640, 640)).values())
        assert boxes == list(sharding.devices_indices_map((640, 640)).values())
        first, second = ([box[dim] for box in boxes] for dim in (0, 1))

        def tuples(first: Any = first, second: Any = second) -> Any:
            return list(zip(first, second, strict=True))

        def filled(numbers: int = 4 * mesh.size) -> Any:
            np.empty(numbers, np.int64).fill(1)

        jax = "JAX `devices_indices_map`, new shape"
        count = f"{mesh.size:,} devices"
        if mesh.size == 4096:
            name = f"boxes of {count}, one array"
            yield compare(name, as_array, jax, by_jax, goal=faster(120), floor=("fill", filled))
        floor = ("its tuples alone", tuples)
        yield compare(f"boxes of {count}, a dict of slices", as_dict, jax, by_jax, goal=faster(goal), floor=floor)


if __name__ == "__main__":
    main(rows)
