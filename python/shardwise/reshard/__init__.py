"""Plans from one tiling of a tensor to another: what they are made of, and what they cost.

| module | answers |
|---|---|
| `plan` | a `ReshardPlan` |
| `transfer`, `program` | one box that moves; the steps of one holder |
| `run`, `source`, `same` | a plan run in memory; its arrays; nothing to do |
| `kinds`, `collectives`, `run_collectives` | the same as collectives: kinds, search, run |
| `cost` | times of collectives on links |
| `balance` | the load over all tensors of a model |
| `orders`, `refit` | orders of packed dims; plans between different orders |
| `explain`, `drawn` | sentences; notebooks |
"""

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .collectives import CollectiveObstacle
    from .cost import CollectiveCost, LinkModel, cost_of
    from .kinds import Collective, CollectiveStep
    from .plan import ReshardPlan
    from .program import LocalBox, Program, Step
    from .refit import RefitPlan
    from .transfer import Transfer

__all__ = [
    "Collective",
    "CollectiveCost",
    "CollectiveObstacle",
    "CollectiveStep",
    "LinkModel",
    "LocalBox",
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
        "plan": ("ReshardPlan",),
        "program": ("LocalBox", "Program", "Step"),
        "refit": ("RefitPlan",),
        "transfer": ("Transfer",),
    },
)
