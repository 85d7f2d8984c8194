"""Arrays cut into shards: collectives, which give one sharded array from another.

| module | answers |
|---|---|
| `verbs` | the collectives |
| `sharded` | a `ShardedArray`: the views of its shards |
| `replicas` | shards of several devices compared |
| `pieces` | several views of one holder |
"""

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .verbs import all_gather, all_reduce, all_to_all, gather, reduce_scatter

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "gather",
    "reduce_scatter",
]

__getattr__, __dir__ = lazy(
    globals(),
    {
        "verbs": ("all_gather", "all_reduce", "all_to_all", "gather", "reduce_scatter"),
    },
)
