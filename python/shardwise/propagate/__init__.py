"""Layouts through ops: what comes out of an op whose operands are cut, and what must move.

| module | has |
|---|---|
| `einsum` | `einsum`, which the package has too, and its answer, `LocalEinsum` |
| `whole` | `propagate`: the layouts of all values of a computation and what must move, a `Propagation` |
| `flow` | what the core gives: ops with edges into calls and loops, a copy of constants for each use, and layouts |
| `move` | `Move`: what must move of one tensor |
| `moves`, `why` | all that must move for each op, and why |
| `run` | a computation computed by devices, each with its shards, in numpy |
| `shift` | rows that devices read and neighbours have |
| `drawn`, `page` | pictures of an einsum and of a computation's moves; these as a page of HTML |
| `given` | layouts and meshes as users give them |
"""

from .einsum import LocalEinsum, einsum
from .move import Move
from .whole import Propagation, Start, propagate

__all__ = ["LocalEinsum", "Move", "Propagation", "Start", "einsum", "propagate"]
