"""The nearest way to make a training state fit: other tensor parallelism, other stages, another way to shard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ..errors import ShardwiseError
from .by_names import ParallelSizes

__all__ = ["Way", "nearest"]

#: For each way to shard those that leave less on a rank, the nearest first.
_LADDER: dict[str, tuple[str, ...]] = {
    "none": ("zero-redundancy", "zero1", "zero2", "fsdp2", "zero3"),
    "ddp": ("zero-redundancy", "zero1", "zero2", "fsdp2", "zero3"),
    "zero-redundancy": ("fsdp2",),
    "zero1": ("zero2", "zero3"),
    "zero2": ("zero3",),
    "zero3": ("fsdp2",),
    "fsdp1": ("fsdp2",),
    "hsdp": ("fsdp2",),
    "megatron-ddp": ("megatron", "fsdp2"),
    "megatron": ("fsdp2",),
}
#: The most devices along an axis that are tried.
_MOST = 64


class Way(NamedTuple):
    """A change, and what the fullest device then allocates.

    Attributes:
        change: What is changed: `"sharding"`, `"tp"`, `"pp"`, or `"together"`.
        sharding: The way to shard.
        sizes: The sizes of the deployment.
        allocated: The bytes of the fullest device.
        fits: Whether it fits.
    """

    change: str
    sharding: str
    sizes: ParallelSizes
    allocated: int
    fits: bool

    @property
    def text(self) -> str:
        """The change in a few words."""
        sizes = f"tp {self.sizes.tp}, pp {self.sizes.pp}, dp {self.sizes.dp}"
        return {"sharding": self.sharding, "tp": sizes, "pp": sizes}.get(self.change, f"{self.sharding} with {sizes}")


def nearest(
    memory: int,
    sizes: ParallelSizes,
    sharding: str,
    needed: Callable[[ParallelSizes, str], int],
    now: int,
    *,
    trains: bool = True,
) -> list[Way]:
    """Find for each kind of change the nearest that fits, or if none does the one that needs least.

    Args:
        memory: the bytes of a device.
        sizes: the sizes that do not fit.
        sharding: the way to shard that does not.
        needed: gives the bytes of the fullest device; a ShardwiseError if it cannot be done.
        now: the bytes that are needed as it is; what needs as much is no way.
        trains: whether something is trained: if not, ways that shard gradients and states change nothing.

    >>> def needed(sizes, sharding):
    ...     return 640 // sizes.tp // sizes.pp // (2 if sharding == "zero3" else 1)
    >>> for way in nearest(40, ParallelSizes(tp=2, dp=8), "zero1", needed, 320):
    ...     print(way.change, way.text, way.allocated, way.fits)
    sharding zero3 160 False
    tp tp 16, pp 1, dp 1 40 True
    pp tp 2, pp 8, dp 1 40 True
    """
    shardings = [how for how in _LADDER[sharding] if trains or how in ("fsdp2", "zero3")]
    world = sizes.world
    wider = [sizes._replace(tp=tp, dp=world // tp // sizes.pp) for tp in _larger(sizes.tp, world // sizes.pp)]
    longer = [sizes._replace(pp=pp, dp=world // pp // sizes.tp) for pp in _larger(sizes.pp, world // sizes.tp)]
    found: list[Way] = []
    for change, tried in (
        ("sharding", [(sizes, how) for how in shardings]),
        ("tp", [(one, sharding) for one in wider]),
        ("pp", [(one, sharding) for one in longer]),
    ):
        found += _first(change, tried, memory, needed, now)
    if not any(way.fits for way in found):
        both = [
            (one._replace(pp=pp, dp=world // pp // one.tp), how)
            for one in (sizes, *wider)
            for pp in (sizes.pp, *_larger(sizes.pp, world // one.tp))
            for how in (sharding, *shardings)
        ]
        both.sort(key=lambda one: one[0].tp * one[0].pp)
        found += _first("together", both, memory, needed, now)
    return found


def _larger(size: int, most: int) -> Iterator[int]:
    """Return the multiples of a size, by powers of two and all that divides, that divide `most`."""
    return (one for one in range(size + 1, min(most, max(_MOST, size)) + 1) if most % one == 0 and one % size == 0)


def _first(
    change: str,
    tried: Iterable[tuple[ParallelSizes, str]],
    memory: int,
    needed: Callable[[ParallelSizes, str], int],
    now: int,
) -> list[Way]:
    best: Way | None = None
    for sizes, how in tried:
        try:
            size = needed(sizes, how)
        except ShardwiseError:
            continue  # What cannot be cut so is no way.
        way = Way(change, how, sizes, size, size <= memory)
        if best is None or way.fits or size < best.allocated:
            best = way
        if way.fits:
            break
    return [] if best is None or best.allocated >= now else [best]
