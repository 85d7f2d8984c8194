"""Layouts through ops: what comes out of an op whose operands are cut, and what must move.

| module | has |
|---|---|
| `einsum` | `einsum`, which the package has too, and its answer, `LocalEinsum` |
| `move` | `Move`: what must move of one tensor |
| `drawn` | its picture |
"""

from .einsum import LocalEinsum, einsum
from .move import Move

__all__ = ["LocalEinsum", "Move", "einsum"]
