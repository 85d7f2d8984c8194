"""Sizes that fit: into how many parts a model may be cut, by its blocks, its heads, and what engines accept."""

from .answer import Cut, Fits, Limit, SizeFit, Unknown
from .sizes import fits, fits_tensors

__all__ = ["Cut", "Fits", "Limit", "SizeFit", "Unknown", "fits", "fits_tensors"]
