"""Arrays on which a plan can be run, with the tiling by which they are cut."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt

    from ..tiling import Tiling

__all__ = ["ShardSource"]


class ShardSource(ABC):
    """Shards that `ReshardPlan.run` takes besides plain lists; `ShardedArray` is one."""

    __slots__ = ()

    @property
    @abstractmethod
    def tiling(self) -> Tiling:
        """The tiling of the shards."""

    @abstractmethod
    def shard_arrays(self) -> list[npt.NDArray[Any]]:
        """Return one array per holder, in order, each checked to have its holder's shape."""
