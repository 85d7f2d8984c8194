"""Shards of the tensors of a plan, of random bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwise.reshard import ModelPlan


def arrays(plan: ModelPlan, seed: int = 0) -> dict[str, list[Any]]:
    """Shards of a tensor of distinct bytes for each holder of the source; replicas hold the same."""
    made = {}
    for number, name in enumerate(plan):
        src = plan[name].src
        shape, dtype = plan._model.tensors[name]
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        whole = np.random.default_rng([seed, number]).integers(0, 256, size, np.uint8).view(dtype).reshape(shape)
        shards = []
        for holder in src.holders:
            shard = np.zeros(src.holder_shape(holder), dtype)
            for piece in src.pieces(holder):
                values = whole[piece.box]
                if isinstance(piece.start, tuple):
                    at = tuple(slice(a, a + n) for a, n in zip(piece.start, values.shape, strict=True))
                    shard[at] = values
                else:
                    shard[piece.start : piece.start + values.size] = values.ravel()
            shards.append(shard)
        made[name] = shards
    return made
