"""Plans of whole models, and plans carried out by other systems: MPI ranks, processes of PyTorch.

| module | answers |
|---|---|
| `model` | plans of whole models |
| `model_program`, `descriptors` | the steps of one holder; the same as plain arrays |
| `sources` | rewrites between two deployments |
| `mpi`, `mpi_model`, `torch` | programs run over MPI and PyTorch |
| `_ranks` | devices as ranks of a communicator |
"""

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
