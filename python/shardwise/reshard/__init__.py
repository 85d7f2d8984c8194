"""Plans from one tiling of a tensor to another: what they are made of, and what they cost."""

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .collectives import CollectiveObstacle
    from .cost import CollectiveCost, LinkModel, cost_of
    from .descriptors import Descriptors
    from .kinds import Collective, CollectiveStep
    from .model import ModelPlan
    from .model_program import ModelProgram
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
        "descriptors": ("Descriptors",),
        "cost": ("CollectiveCost", "LinkModel", "cost_of"),
        "kinds": ("Collective", "CollectiveStep"),
        "model": ("ModelPlan",),
        "model_program": ("ModelProgram",),
        "plan": ("ReshardPlan",),
        "program": ("LocalBox", "Program", "Step"),
        "refit": ("RefitPlan",),
        "transfer": ("Transfer",),
    },
)
