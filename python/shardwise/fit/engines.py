"""The limits of engines in addition to those of the formats: the limits of their loaders and kernels.

They are data, `rules/engines.toml`, each with its engine, version, date and source: a check in the engine, or the
public thread that reports it. They go away with later versions; what a format allows does not change.
"""

from __future__ import annotations

import datetime
import re
from functools import cache
from typing import NamedTuple

from ..quantized import LogicalTensor
from ..rules.names import shipped_table
from .answer import Limit
from .roles import Role

__all__ = ["EngineLimit", "engine_limits", "limits_of"]


class EngineLimit(NamedTuple):
    """A limit of an engine; `engines.toml` says what each field means."""

    engine: str
    version: str
    date: datetime.date
    source: str
    kernel: str
    form: str
    why: str
    cut: str = ""
    weights: str = ""
    when: tuple[str, ...] = ()
    multiple: int | str = 1
    copies: int = 1
    groups: int | None = None

    def is_about(self, tensor: LogicalTensor, role: Role, ways: int, merged: str) -> bool:
        """Return whether this limit applies to tensors of this form and role that are cut and merged this way."""
        if re.match(self.form, tensor.form) is None or self.cut not in ("", "rows" if role.dim == -2 else "columns"):
            return False
        kinds = {"experts" if role.expert else "dense", *(() if role.heads else ("no heads",))}
        there = {merged, *(("cut",) if ways > 1 else ())}
        return (not self.weights or self.weights in kinds) and (not self.when or not there.isdisjoint(self.when))


@cache
def engine_limits() -> tuple[EngineLimit, ...]:
    """List the limits that are known."""
    entries = shipped_table("engines.toml")["limits"]
    return tuple(EngineLimit(**{**entry, "when": tuple(entry.get("when", ()))}) for entry in entries)


def limits_of(tensor: LogicalTensor, role: Role, per_rank: int, ways: int, merged: str = "") -> tuple[Limit, ...]:
    """Return what engines refuse of a cut into `ways` shards of `per_rank` elements (of each part of a fused weight).

    `merged` is `"first"` for a matrix that engines put before another one, gate before up, and `"last"` for the other.
    """
    assert role.dim is not None
    found = []
    for limit in engine_limits():
        if not limit.is_about(tensor, role, ways, merged):
            continue
        size = per_rank * limit.copies
        multiple = _block(tensor, role.dim) if limit.multiple == "block" else int(limit.multiple)
        if limit.groups is not None:
            size, multiple = _group(tensor), limit.groups
        if size % multiple if limit.groups is None else size not in (0, multiple):
            why = limit.why.format(size=size, multiple=multiple, padded=-(-size // multiple) * multiple)
            found.append(Limit(f"{limit.engine} {limit.version}", limit.kernel, why))
    return tuple(found)


def _block(tensor: LogicalTensor, dim: int) -> int:
    """Return the largest block along a dim of a weight; `dim` is negative, counted from the end."""
    return max(size for _, size in tensor.blocks[len(tensor.shape) + dim])


def _group(tensor: LogicalTensor) -> int:
    """Return the size of the groups of columns that have a scale; 0 if there are none."""
    groups = [size for name, size in tensor.blocks.get(len(tensor.shape) - 1, ()) if name.endswith("weight_scale")]
    return groups[0] if groups else 0
