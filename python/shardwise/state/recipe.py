"""Values that describe a sharded state: a rank's part of a parameter, the arrays kept for it, and their sizes."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .optimizers import Optimizer

if TYPE_CHECKING:
    import numpy.typing as npt

    Count = int | npt.NDArray[np.int64]

__all__ = ["KINDS", "SHARDINGS", "Local", "Recipe", "StateShare", "bytes_by_kind"]

#: The kinds of arrays, in the order in which they are shown.
KINDS = ("weights", "gradients", "masters", "optimizer", "whole", "caches")


#: The known ways to shard, each with a description.
SHARDINGS = {
    "none": "everything as the rules cut it",
    "ddp": "everything whole on every data-parallel rank",
    "zero-redundancy": "PyTorch's ZeroRedundancyOptimizer: each parameter's state on one rank",
    "zero1": "DeepSpeed's ZeRO 1: masters and states in flat partitions",
    "zero2": "DeepSpeed's ZeRO 2: gradients too",
    "zero3": "DeepSpeed's ZeRO 3: each parameter cut, and small ones also whole after a step",
    "fsdp1": "PyTorch's FullyShardedDataParallel: flat parameters, one for each wrapped module",
    "fsdp2": "PyTorch's fully_shard: rows of each parameter, padded to equal numbers",
    "hsdp": "fully_shard within groups of ranks, whole between them",
    "megatron": "Megatron-Core's distributed optimizer: masters and states in parts of padded buckets",
    "megatron-ddp": "Megatron-Core without its distributed optimizer: one buffer of gradients, everything whole",
}


class Local(NamedTuple):
    """A parameter as one rank has it before its state is sharded.

    Attributes:
        tensor: The number of its tensor.
        shape: The shape of the rank's own array.
        bits: The bits of an element.
        trained: Whether it is trained; what is frozen has a weight only.
        unit: A key, the same for parameters that are flattened together: those of a module that FSDP wraps, or of a
            chunk of a stage of Megatron.
        is_matrix: Whether the parameter is a matrix within a layer, as Muon takes them.
        apart: Whether it has a bucket of its own, as Megatron's tied embeddings do in a pipeline.
        room: The shape for which memory is allocated, if that is larger: XLA pads each part to the largest.
    """

    tensor: int
    shape: tuple[int, ...]
    bits: int
    trained: bool = True
    unit: Hashable = 0
    is_matrix: bool = False
    apart: bool = False
    room: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


class StateShare(NamedTuple):
    """One array, or a part of one, on each rank of a data-parallel group.

    Attributes:
        kind: One of `KINDS`.
        name: The name of the array: `"weight"`, `"exp_avg"`, …
        tensor: The number of its tensor; `None` for padding and for arrays that several tensors share.
        held: The bytes of elements that belong to a tensor; one number for all ranks, or an array.
        allocated: The bytes that the framework allocates.
    """

    kind: str
    name: str
    tensor: int | None
    held: Count
    allocated: Count


class Recipe(NamedTuple):
    """The arrays that are kept of each parameter, and how they are sharded.

    Attributes:
        sharding: One of `SHARDINGS`.
        optimizer: The optimizer; `None` if nothing is trained.
        gradients: The bits of gradients; `None` for those of the weights.
        masters: The bits of master copies; `None` for what the framework does, 0 for none.
        aligned: For FSDP1, whether `use_orig_params` is set, by which each parameter begins at a multiple of 16 bytes.
        compute: For FSDP1 so aligned, the bits of the dtype of its mixed precision; `None` without.
        groups: For DeepSpeed, the parameter groups: 1, or 2 with biases and norms in one of their own.
        round_robin: For ZeRO 1 and 2, `round_robin_gradients`.
        persistent: For ZeRO 3, `stage3_param_persistence_threshold`.
        sub_group: For ZeRO 3, `sub_group_size`.
        bucket: For Megatron, the elements of a bucket on the first stage; `None` for one bucket.
        high_bandwidth: For Megatron, `pad_buckets_for_high_nccl_busbw`.
    """

    sharding: str
    optimizer: Optimizer | None = None
    gradients: int | None = None
    masters: int | None = None
    aligned: bool = False
    compute: int | None = None
    groups: int = 1
    round_robin: bool = False
    persistent: int = 100_000
    sub_group: int = 1_000_000_000
    bucket: int | None = None
    high_bandwidth: bool = False

    def gradient_bits(self, part: Local) -> int:
        """Return the bits of an element of a parameter's gradient."""
        return self.gradients or part.bits


def bytes_by_kind(shares: Iterable[StateShare]) -> tuple[tuple[str, Any, Any], ...]:
    """Return the bytes of each kind, held and allocated."""
    sums: dict[str, list[Any]] = {}
    for share in shares:
        own = sums.setdefault(share.kind, [0, 0])
        own[0] = own[0] + share.held
        own[1] = own[1] + share.allocated
    return tuple((kind, held, allocated) for kind, (held, allocated) in sums.items())
