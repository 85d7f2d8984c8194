"""Sizes that fit: into how many parts a model may be cut, by its blocks, its heads, and what engines accept.

| module | answers |
|---|---|
| `sizes` | `fits`: may a model be cut into so many parts |
| `answer`, `evidence` | the verdicts; what they rest on |
| `ratio` | `fits_ratio`: may it be cut over devices in a ratio |
| `by_rules` | by rules, and by the form of quantized weights |
| `engines` | what engines refuse besides |
| `by_names`, `nearest` | deployments by names of weights; ways to make a training state fit |
| `model`, `roles` | sizes of a model; what names of weights mean |
"""

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .answer import Cut, Fits, Limit, SizeFit, Unknown
    from .ratio import RatioCut, RatioFit, UnitShares, fits_ratio
    from .sizes import fits, fits_tensors

__all__ = [
    "Cut",
    "Fits",
    "Limit",
    "RatioCut",
    "RatioFit",
    "SizeFit",
    "UnitShares",
    "Unknown",
    "fits",
    "fits_ratio",
    "fits_tensors",
]

__getattr__, __dir__ = lazy(
    globals(),
    {
        "answer": ("Cut", "Fits", "Limit", "SizeFit", "Unknown"),
        "ratio": ("RatioCut", "RatioFit", "UnitShares", "fits_ratio"),
        "sizes": ("fits", "fits_tensors"),
    },
)
