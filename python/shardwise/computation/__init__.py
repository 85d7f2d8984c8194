"""Computations as data: ops, and how each computes with tensors that are cut.

| module | has |
|---|---|
| `factor_rule` | `FactorRule`, and `factor_rule` for the rules of the ops that are known |
| `einsum` | `Einsum`: the text of an einsum, taken apart |
| `computation` | `Computation`: values and ops between inputs and results, and their JSON |
"""

from .computation import Computation, Op
from .einsum import Einsum
from .factor_rule import FactorRule, factor_rule

__all__ = ["Computation", "Einsum", "FactorRule", "Op", "factor_rule"]
