"""Computations as data: ops, and how each computes with tensors that are cut.

| module | has |
|---|---|
| `factor_rule` | `FactorRule`, and `factor_rule` for the rules of the ops that are known |
| `einsum` | `Einsum`: the text of an einsum, taken apart |
"""

from .einsum import Einsum
from .factor_rule import FactorRule, factor_rule

__all__ = ["Einsum", "FactorRule", "factor_rule"]
