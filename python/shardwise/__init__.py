"""Exact shard arithmetic: which part of an array each device of a mesh holds, and where an element lives.

>>> import numpy as np
>>> import shardwise as sw
>>> mesh = sw.DeviceMesh((2, 4), ("data", "model"))
>>> sharded = sw.distribute_tensor(np.zeros((6, 8)), sw.TensorLayout(("data", "model"), mesh))
>>> sharded.shard("cpu:5").shape
(3, 2)
"""

from ._garbage import uncollected as _uncollected

# First, and without the collection of garbage, of which imports make none: it takes a sixth of the time.
with _uncollected():
    import numpy as _numpy  # noqa: F401

# isort: split
from typing import TYPE_CHECKING

from ._core import __version__
from ._drawn import draw_with
from ._lazy import lazy, load_with
from .errors import (
    InternalError,
    LayoutError,
    MeshError,
    ParseError,
    ShardwiseError,
    ShardwiseWarning,
    SizeOverflowError,
)
from .layout import Axes, TensorLayout, UnevenRule
from .mesh import DeviceMesh, list_devices
from .partition import Partition
from .piece import Piece
from .tiling import Tiling

if TYPE_CHECKING:
    from . import array as array
    from . import computation as computation
    from . import deploy as deploy
    from . import dtensor as dtensor
    from . import execute as execute
    from . import fit as fit
    from . import interop as interop
    from . import packed as packed
    from . import propagate as propagate
    from . import quantized as quantized
    from . import reshard as reshard
    from . import rules as rules
    from . import state as state
    from . import store as store
    from .array.sharded import Shard, ShardedArray, distribute_tensor
    from .deploy.deployment import Deployment
    from .deploy.read import read_rules
    from .deploy.record import record
    from .fit.sizes import fits
    from .model.scope import layout_map_scope
    from .model.variable import Variable, initialize_variables
    from .propagate.einsum import einsum
    from .reshard.model.plan import plan_model
    from .reshard.plan import plan_reshard
    from .reshard.refit import plan_refit
    from .rules.layout_map import LayoutMap
    from .rules.layout_rule import LayoutRule
    from .rules.rewrites import Rewrites
    from .rules.shipped import example_rules
    from .show.draw import draw
    from .store import (
        CheckpointPlan,
        ObjectPath,
        diff_checkpoints,
        digest,
        learn_rewrites,
        open_checkpoint,
        plan_checkpoint,
        reshard_checkpoint,
        save_checkpoint,
        verify_checkpoint,
    )

__all__ = [
    "Axes",
    "CheckpointPlan",
    "Deployment",
    "DeviceMesh",
    "InternalError",
    "LayoutError",
    "LayoutMap",
    "LayoutRule",
    "MeshError",
    "ObjectPath",
    "ParseError",
    "Partition",
    "Piece",
    "Rewrites",
    "Shard",
    "ShardedArray",
    "ShardwiseError",
    "ShardwiseWarning",
    "SizeOverflowError",
    "TensorLayout",
    "Tiling",
    "UnevenRule",
    "Variable",
    "__version__",
    "diff_checkpoints",
    "digest",
    "distribute_tensor",
    "draw",
    "einsum",
    "example_rules",
    "fits",
    "initialize_variables",
    "layout_map_scope",
    "learn_rewrites",
    "list_devices",
    "open_checkpoint",
    "plan_checkpoint",
    "plan_model",
    "plan_refit",
    "plan_reshard",
    "read_rules",
    "record",
    "reshard_checkpoint",
    "save_checkpoint",
    "verify_checkpoint",
]

# Loaded when they are first used, to keep `import shardwise` fast.
_LAZY = {
    "array.sharded": ("Shard", "ShardedArray", "distribute_tensor"),
    "deploy.deployment": ("Deployment",),
    "deploy.read": ("read_rules",),
    "deploy.record": ("record",),
    "fit.sizes": ("fits",),
    "model.scope": ("layout_map_scope",),
    "model.variable": ("Variable", "initialize_variables"),
    "propagate.einsum": ("einsum",),
    "reshard.model.plan": ("plan_model",),
    "reshard.plan": ("plan_reshard",),
    "reshard.refit": ("plan_refit",),
    "rules.layout_map": ("LayoutMap",),
    "rules.layout_rule": ("LayoutRule",),
    "rules.rewrites": ("Rewrites",),
    "rules.shipped": ("example_rules",),
    "show.draw": ("draw",),
    "store": (
        "CheckpointPlan",
        "ObjectPath",
        "diff_checkpoints",
        "digest",
        "learn_rewrites",
        "open_checkpoint",
        "plan_checkpoint",
        "reshard_checkpoint",
        "save_checkpoint",
        "verify_checkpoint",
    ),
}

__getattr__, __dir__ = lazy(
    globals(),
    _LAZY,
    (
        "array",
        "computation",
        "deploy",
        "dtensor",
        "execute",
        "fit",
        "interop",
        "packed",
        "propagate",
        "quantized",
        "reshard",
        "rules",
        "state",
        "store",
    ),
    {
        "Layout": "shardwise.TensorLayout, or TensorFlow's in shardwise.dtensor",
        "Mesh": "shardwise.DeviceMesh, or TensorFlow's in shardwise.dtensor",
        "NamedSharding": "shardwise.TensorLayout, which shardwise.interop.translate writes for JAX",
        "PartitionSpec": "shardwise.TensorLayout, which shardwise.interop.translate writes for JAX",
        "diff": "shardwise.diff_checkpoints",
        "learn": "shardwise.learn_rewrites",
        "load": "shardwise.open_checkpoint",
        "open": "shardwise.open_checkpoint",
        "plan": "shardwise.plan_reshard, plan_model or plan_checkpoint",
        "save": "shardwise.save_checkpoint",
        "shard": "shardwise.distribute_tensor",
        "training_state": "shardwise.state.training_state",
        "verify": "shardwise.verify_checkpoint",
    },
)

# A framework that is not imported needs nothing from this package.
draw_with("shardwise.show.draw")
load_with("keras", "shardwise.interop.keras")
load_with("tensorflow", "shardwise.interop.tf_variable")
