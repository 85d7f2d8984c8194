"""Computations as data: ops, and how each computes with tensors that are cut.

| module | has |
|---|---|
| `factor_rule` | `FactorRule`, and `factor_rule` for the rules of the ops that are known |
| `einsum` | `Einsum`: the text of an einsum, taken apart |
| `structure` | ops without a rule: constants, constraints, and ops with bodies |
| `computation` | `Computation`: values and ops between inputs and results, and their JSON |
| `held` | a device's part of an op's tensors; reductions |
| `windowed`, `indexed`, `evaluate` | ops in plain numpy, on whole arrays and on views |
| `run` | one op, and a computation's inputs, checked |
| `primitives` | JAX's primitives that are ops but for a name or a param |
| `lowering` | ops on the way, and equations of jaxprs lowered to them |
| `lookups` | gathers and scatters of jaxprs, lowered |
| `jaxpr` | `computation_of_jaxpr`: the computation of a jaxpr as data |
| `traced` | `computation_from_jax`: that of a function of JAX |
"""

from .computation import Computation, Op
from .einsum import Einsum
from .factor_rule import FactorRule, factor_rule
from .jaxpr import computation_of_jaxpr
from .traced import computation_from_jax

__all__ = [
    "Computation",
    "Einsum",
    "FactorRule",
    "Op",
    "computation_from_jax",
    "computation_of_jaxpr",
    "factor_rule",
]
