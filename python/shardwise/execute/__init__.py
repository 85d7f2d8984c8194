"""Plans of whole models, and plans carried out by other systems: MPI ranks, processes of PyTorch."""

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .descriptors import Descriptors
    from .model import ModelPlan
    from .model_program import ModelProgram

__all__ = ["Descriptors", "ModelPlan", "ModelProgram"]

__getattr__, __dir__ = lazy(
    globals(), {"descriptors": ("Descriptors",), "model": ("ModelPlan",), "model_program": ("ModelProgram",)}
)
