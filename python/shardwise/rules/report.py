"""What a layout map does to the tensors of a model: who holds how much, and what looks wrong."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .._dtypes import bytes_for
from .._text import bytes_text
from ..errors import SizeOverflowError
from ..layout import TensorLayout
from ..mesh import DeviceMesh

if TYPE_CHECKING:
    from ..layout import UnevenRule

__all__ = ["Clash", "IndivisibleDim", "LayoutReport", "RankMismatch", "TensorReport", "checked_size"]

_NAMES_SHOWN = 3


@dataclass(frozen=True)
class TensorReport:
    """One tensor under the rules of a layout map.

    It has a place if its layout is known, has a mesh, and fits the shape under the uneven rule of the report.

    Attributes:
        name: The path that was looked up.
        shape: The shape of the tensor.
        dtype: The name of its dtype, or `None` if none was given.
        bits: Bits per element, or `None`.
        rule: The key whose layout applies; `None` where no key does, or several.
        layout: That layout; one that cuts nothing where no key applies; `None` where several do.
        num_shards: Shards per dim, or `None` without a place.
        shard_shape: The shape of the largest shard, or `None` without a place.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str | None
    bits: int | None
    rule: str | None
    layout: TensorLayout | None
    num_shards: tuple[int, ...] | None
    shard_shape: tuple[int, ...] | None

    @property
    def nbytes(self) -> int | None:
        """Bytes of the tensor, counted once; `None` where the dtype is not known."""
        return None if self.bits is None else bytes_for(math.prod(self.shape), self.bits)

    @property
    def bytes_per_device(self) -> int | None:
        """Bytes of the largest shard; `None` without a place or a dtype."""
        if self.bits is None or self.shard_shape is None:
            return None
        return bytes_for(math.prod(self.shard_shape), self.bits)

    @property
    def bytes_total(self) -> int | None:
        """Bytes that all devices of the layout's mesh hold, replicas counted; `None` without a place or a dtype."""
        mesh = None if self.layout is None else self.layout.device_mesh
        if self.nbytes is None or self.num_shards is None or mesh is None:
            return None
        return self.nbytes * (mesh.size // math.prod(self.num_shards))

    @property
    def is_replicated(self) -> bool:
        """Whether it has a place and every device of its mesh holds all of it."""
        return self.num_shards is not None and self.layout is not None and self.layout.is_fully_replicated

    def to_dict(self) -> dict[str, Any]:
        """What is known of the tensor, as JSON has it; the layout as its axes."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "rule": self.rule,
            "layout": None if self.layout is None else _listed(self.layout.axes),
            "num_shards": _listed(self.num_shards),
            "shard_shape": _listed(self.shard_shape),
            "nbytes": self.nbytes,
            "bytes_per_device": self.bytes_per_device,
            "bytes_total": self.bytes_total,
        }


@dataclass(frozen=True)
class Clash:
    """A name that several rules match, which a look-up refuses."""

    name: str
    rules: tuple[str, ...]

    def __str__(self) -> str:
        rules = ", ".join(map(repr, self.rules))
        return f"{self.name!r} matches {len(self.rules)} rules, only one may: {rules}"


@dataclass(frozen=True)
class RankMismatch:
    """A tensor of another rank than the layout of its rule."""

    name: str
    rule: str
    rank: int
    layout_rank: int

    def __str__(self) -> str:
        return f"{self.name!r} has rank {self.rank}, the layout of its rule {self.rule!r} has rank {self.layout_rank}"


@dataclass(frozen=True)
class IndivisibleDim:
    """A dim of `size` elements that a rule cuts into a number of shards which does not divide it."""

    name: str
    rule: str
    dim: int
    size: int
    num_shards: int

    def __str__(self) -> str:
        return (
            f"{self.name!r}: dim {self.dim} has {self.size} elements, which do not divide by the {self.num_shards} "
            f"shards of its rule {self.rule!r}"
        )


@dataclass(frozen=True)
class LayoutReport:
    """What a layout map does to a set of tensors, as `LayoutMap.report` gives it.

    `str(report)` is a table of the tensors, the totals and the warnings.

    Attributes:
        tensors: Every tensor, in the order given.
        uneven: The uneven rule.
        device_mesh: The mesh of the map, or else the one that its layouts share, or `None`.
        unused_rules: The keys that apply to no name.
        clashes: The names that several rules match; they have no place.
        rank_mismatches: The tensors of another rank than their layout; they have no place.
        indivisible: The dims that do not divide; under `"even"` their tensors have no place.
    """

    tensors: tuple[TensorReport, ...]
    uneven: UnevenRule
    device_mesh: DeviceMesh | None
    unused_rules: tuple[str, ...]
    clashes: tuple[Clash, ...]
    rank_mismatches: tuple[RankMismatch, ...]
    indivisible: tuple[IndivisibleDim, ...]

    @cached_property
    def unmatched(self) -> tuple[TensorReport, ...]:
        """The tensors to whose name no key applies; they are replicated."""
        return tuple(tensor for tensor in self.tensors if tensor.rule is None and tensor.layout is not None)

    @cached_property
    def placed(self) -> tuple[TensorReport, ...]:
        """The tensors that have a place."""
        return tuple(tensor for tensor in self.tensors if tensor.num_shards is not None)

    @cached_property
    def nbytes(self) -> int | None:
        """Bytes of all tensors, each counted once; `None` where a dtype is not known."""
        return _sum(tensor.nbytes for tensor in self.tensors)

    @cached_property
    def replicated_share(self) -> float | None:
        """Of the bytes of all placed tensors, each counted once, the share that every device holds.

        `None` where a dtype is not known, or no tensor has a place.
        """
        whole = _sum(tensor.nbytes for tensor in self.placed)
        replicated = _sum(tensor.nbytes for tensor in self.placed if tensor.is_replicated)
        return replicated / whole if whole and replicated is not None else None

    @cached_property
    def device_bytes(self) -> npt.NDArray[np.int64] | None:
        """Bytes of all placed tensors on each device: a read-only int64 array, in the order of device indices.

        `None` without a mesh, where a dtype is not known, and where a layout has a mesh of its own.

        Raises:
            SizeOverflowError: A device would hold more than 2**63 - 1 bytes.
        """
        mesh = self.device_mesh
        largest = _sum(tensor.bytes_per_device for tensor in self.placed)
        meshes = {tensor.layout.device_mesh for tensor in self.placed if tensor.layout is not None}
        if mesh is None or largest is None or not meshes <= {mesh}:
            return None
        checked_size(largest, "the bytes on a device")
        counts: Counter[tuple[TensorLayout, tuple[int, ...], int]] = Counter()
        for tensor in self.placed:
            if tensor.layout is not None and tensor.bits is not None:
                # Whole bytes are added up, so that a shape is cut once for all its dtypes.
                packed = tensor.bits % 8 != 0
                counts[tensor.layout, tensor.shape, tensor.bits if packed else 8] += 1 if packed else tensor.bits // 8
        result = np.zeros(mesh.size, np.int64)
        for (layout, shape, bits), count in counts.items():
            result += bytes_for(layout.partition(shape, uneven=self.uneven).nbytes("uint8"), bits) * count
        result.flags.writeable = False
        # A view: of the array itself numpy would let anyone set the flag again.
        readonly: npt.NDArray[np.int64] = result.view()
        return readonly

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """All that looks wrong, a line each; the names that match nothing share one."""
        problems: list[object] = [*self.clashes, *self.rank_mismatches]
        if self.uneven == "even":
            problems += self.indivisible
        if self.unmatched:
            problems.append(_unmatched_text(self.unmatched))
        problems += [f"rule {rule!r} applies to no name" for rule in self.unused_rules]
        return tuple(map(str, problems))

    @property
    def ok(self) -> bool:
        """Whether there are no warnings."""
        return not self.warnings

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON has it."""
        mesh, device_bytes = self.device_mesh, self.device_bytes
        return {
            "tensors": [tensor.to_dict() for tensor in self.tensors],
            "uneven": self.uneven,
            "mesh": None if mesh is None else {"shape": _listed(mesh.shape), "axis_names": _listed(mesh.axis_names)},
            "unmatched": [tensor.name for tensor in self.unmatched],
            "unused_rules": list(self.unused_rules),
            "clashes": [vars(clash) | {"rules": list(clash.rules)} for clash in self.clashes],
            "rank_mismatches": [dict(vars(mismatch)) for mismatch in self.rank_mismatches],
            "indivisible": [dict(vars(dim)) for dim in self.indivisible],
            "nbytes": self.nbytes,
            "replicated_share": self.replicated_share,
            "device_bytes": None if device_bytes is None else device_bytes.tolist(),
            "warnings": list(self.warnings),
            "ok": self.ok,
        }

    def __str__(self) -> str:
        from .report_text import report_text

        return report_text(self)


def checked_size(size: int, what: str) -> int:
    """Give the size back.

    Raises:
        SizeOverflowError: if it is over 2**63 - 1; says what it is the size of.
    """
    if size > 2**63 - 1:
        raise SizeOverflowError(f"{what} are {size}, over the limit of {2**63 - 1}")
    return size


def _unmatched_text(tensors: tuple[TensorReport, ...]) -> str:
    names = ", ".join(repr(tensor.name) for tensor in tensors[:_NAMES_SHOWN])
    more = f" and {len(tensors) - _NAMES_SHOWN} more" if len(tensors) > _NAMES_SHOWN else ""
    nbytes = _sum(tensor.nbytes for tensor in tensors)
    size = "" if nbytes is None else f" ({bytes_text(nbytes)})"
    if len(tensors) == 1:
        return f"1 name matches no rule, so every device holds it whole{size}: {names}"
    return f"{len(tensors)} names match no rule, so every device holds them whole{size}: {names}{more}"


def _sum(numbers: Iterable[int | None]) -> int | None:
    total = 0
    for number in numbers:
        if number is None:
            return None
        total += number
    return total


def _listed(value: Any) -> Any:
    return [_listed(entry) for entry in value] if isinstance(value, tuple) else value
