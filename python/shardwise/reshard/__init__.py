"""Plans from one tiling of a tensor to another: their transfers, and their costs.

| module | answers |
|---|---|
| `plan` | a `ReshardPlan` |
| `transfer`, `transfers` | one box that moves; all of them, and their bytes |
| `program` | the steps of one holder |
| `run`, `source`, `same` | a plan run in memory; its arrays; plans without moves |
| `kinds`, `collectives`, `run_collectives` | the same as collectives: kinds, search, run |
| `cost` | times of collectives on links |
| `balance` | the load over all tensors of a model |
| `orders`, `refit` | orders of packed dims; plans between different orders |
| `explain`, `drawn` | sentences; notebooks |
| `model/` | plans of whole models, their programs and descriptors |
"""

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .collectives import CollectiveObstacle
    from .cost import CollectiveCost, LinkModel, cost_of
    from .kinds import Collective, CollectiveStep
    from .model.descriptors import Descriptors
    from .model.plan import ModelPlan
    from .model.program import ModelProgram
    from .plan import ReshardPlan
    from .program import LocalBox, Program, Step
    from .refit import RefitPlan
    from .transfer import Transfer

__all__ = [
    "Collective",
    "CollectiveCost",
    "CollectiveObstacle",
    "CollectiveStep",
    "Descriptors",
    "LinkModel",
    "LocalBox",
    "ModelPlan",
    "ModelProgram",
    "Program",
    "RefitPlan",
    "ReshardPlan",
    "Step",
    "Transfer",
    "cost_of",
]

__getattr__, __dir__ = lazy(
    globals(),
    {
        "collectives": ("CollectiveObstacle",),
        "cost": ("CollectiveCost", "LinkModel", "cost_of"),
        "kinds": ("Collective", "CollectiveStep"),
        "model.descriptors": ("Descriptors",),
        "model.plan": ("ModelPlan",),
        "model.program": ("ModelProgram",),
        "plan": ("ReshardPlan",),
        "program": ("LocalBox", "Program", "Step"),
        "refit": ("RefitPlan",),
        "transfer": ("Transfer",),
    },
)
