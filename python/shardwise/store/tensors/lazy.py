"""The tensors of a checkpoint by name, made when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

from ..._dtypes import Dtype
from .stored import StoredTensor

__all__ = ["LazyTensors"]

Listing = TypeVar("Listing")


class LazyTensors(Mapping[str, StoredTensor], Generic[Listing]):
    """The tensors of a checkpoint by name, each made from its entry in the index when it is first asked for.

    Checking 10⁵ tensors takes a fraction of the time of making them. The reader of the format checks all entries when
    it opens the checkpoint, so making a tensor must not fail.

    Args:
        rows: The entry of each tensor in the index.
        describe: Returns the dtype and the shape that a row states.
        make: Makes the tensor of a name and its row.
        made: Tensors that are made already.
    """

    def __init__(
        self,
        rows: Mapping[str, Listing],
        describe: Callable[[Listing], tuple[Dtype, tuple[int, ...]]],
        make: Callable[[str, Listing], StoredTensor],
        made: Mapping[str, StoredTensor] | None = None,
    ) -> None:
        self._rows = rows
        self._describe = describe
        self._make = make
        self._made = dict(made or {})

    def described(self) -> Iterator[tuple[str, Dtype, tuple[int, ...]]]:
        """Yield the name, dtype and shape of each tensor; none is made."""
        describe = self._describe
        for name, row in self._rows.items():
            yield name, *describe(row)

    def __getitem__(self, name: str) -> StoredTensor:
        made = self._made.get(name)
        if made is None:
            # Two threads may make it; both get the first one.
            made = self._made.setdefault(name, self._make(name, self._rows[name]))
        return made

    def chosen(self, names: Iterable[str]) -> LazyTensors[Listing]:
        """Return the tensors with these names; none is made."""
        rows = {name: self._rows[name] for name in names}
        return LazyTensors(
            rows, self._describe, self._make, {name: self._made[name] for name in rows if name in self._made}
        )

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)
