"""Layouts through ops: what comes out of an op whose operands are cut, and what must move.

| module | has |
|---|---|
| `einsum` | `einsum`, which the package has too, and its answer, `LocalEinsum` |
| `whole` | `propagate`: the layouts of all values of a computation, a `Propagation` |
| `move` | `Move`: what must move of one tensor |
| `drawn` | the picture of an einsum |
| `given` | layouts and meshes as users give them |
"""

from .einsum import LocalEinsum, einsum
from .move import Move
from .whole import Propagation, propagate

__all__ = ["LocalEinsum", "Move", "Propagation", "einsum", "propagate"]
