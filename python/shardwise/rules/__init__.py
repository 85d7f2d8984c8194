"""Reports on layout maps: what they do to the tensors of a model, and what looks wrong."""

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .left_out import LeftOut
    from .problems import Clash, IndivisibleDim, Misfit, RankMismatch
    from .report import LayoutReport, TensorReport

__all__ = [
    "Clash",
    "IndivisibleDim",
    "LayoutReport",
    "LeftOut",
    "Misfit",
    "RankMismatch",
    "TensorReport",
]

__getattr__, __dir__ = lazy(
    globals(),
    {
        "left_out": ("LeftOut",),
        "problems": ("Clash", "IndivisibleDim", "Misfit", "RankMismatch"),
        "report": ("LayoutReport", "TensorReport"),
    },
)
