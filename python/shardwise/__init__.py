"""Exact shard arithmetic: which part of an array each device of a mesh holds, and where an element lives.

>>> import numpy as np
>>> import shardwise as sw
>>> mesh = sw.DeviceMesh((2, 4), ("data", "model"))
>>> sharded = sw.distribute_tensor(np.zeros((6, 8)), sw.TensorLayout(("data", "model"), mesh))
>>> sharded.shard("cpu:5").shape
(3, 2)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import InternalError, LayoutError, MeshError, ParseError, ShardwiseError, SizeOverflowError
from .layout import Axes, TensorLayout, UnevenRule
from .mesh import DeviceMesh, list_devices
from .partition import Partition
from .sharded import Shard, ShardedArray, distribute_tensor

if TYPE_CHECKING:
    from .checkpoint import Checkpoint, open_safetensors
    from .collectives import CollectiveStep, LinkModel, all_gather, all_reduce, gather, reduce_scatter
    from .drawing import draw
    from .layout_map import LayoutMap
    from .reshard import ReshardPlan, Transfer, plan_from_boxes, plan_reshard
    from .scope import layout_map_scope
    from .variable import Variable, initialize_variables

__all__ = [
    "Axes",
    "Checkpoint",
    "CollectiveStep",
    "DeviceMesh",
    "InternalError",
    "LayoutError",
    "LayoutMap",
    "LinkModel",
    "MeshError",
    "ParseError",
    "Partition",
    "ReshardPlan",
    "Shard",
    "ShardedArray",
    "ShardwiseError",
    "SizeOverflowError",
    "TensorLayout",
    "Transfer",
    "UnevenRule",
    "Variable",
    "all_gather",
    "all_reduce",
    "distribute_tensor",
    "draw",
    "gather",
    "initialize_variables",
    "layout_map_scope",
    "list_devices",
    "open_safetensors",
    "plan_from_boxes",
    "plan_reshard",
    "reduce_scatter",
]

# Whoever asks only who holds what should not wait for the rest, which is imported when a name of it is first used.
_ROOMS = {
    "checkpoint": ("Checkpoint", "open_safetensors"),
    "collectives": ("CollectiveStep", "LinkModel", "all_gather", "all_reduce", "gather", "reduce_scatter"),
    "drawing": ("draw",),
    "layout_map": ("LayoutMap",),
    "reshard": ("ReshardPlan", "Transfer", "plan_from_boxes", "plan_reshard"),
    "scope": ("layout_map_scope",),
    "variable": ("Variable", "initialize_variables"),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_ROOM_OF[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
