"""Low-rank adapters: two thin matrices next to a weight, cut in the same way as the weight."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .._arguments import instance, integer
from .._dtypes import bits_of
from .._text import counted, shown
from ..errors import LayoutError

__all__ = ["Lora", "adapted"]


@dataclass(frozen=True)
class Lora:
    r"""Adapters as LoRA adds them: for a weight of (out, in) one of (rank, in) and one of (out, rank).

    Args:
        rank: The rank of the adapters.
        targets: A regular expression that is found in the names of the weights that have adapters.
        dtype: The dtype of the adapters.

    Raises:
        LayoutError: if the rank is less than 1, or `targets` is not a regular expression.
        TypeError: if an argument is of the wrong type.

    >>> Lora(8, r"[qv]_proj\.weight$").bits
    32
    """

    rank: int
    targets: str
    dtype: Any = "float32"

    def __post_init__(self) -> None:
        if integer("rank", self.rank) < 1:
            raise LayoutError(f"rank is {shown(self.rank)}; it must be at least 1")
        bits_of(self.dtype)
        try:
            re.compile(instance("targets", self.targets, str))
        except re.error as error:
            raise LayoutError(f"targets is {shown(self.targets)}, which is not a regular expression: {error}") from None

    @property
    def bits(self) -> int:
        """The bits of an element of the adapters."""
        return bits_of(self.dtype)


def adapted(
    lora: Lora, name: str, shape: tuple[int, ...]
) -> Iterator[tuple[str, tuple[int, ...], tuple[int | None, ...]]]:
    """Yield the adapters of a weight: name, shape, and for each dim the weight's dim by which it is cut, or `None`.

    >>> for adapter in adapted(Lora(4, "up"), "up.weight", (12, 6)):
    ...     print(adapter)
    ('up.lora_A.weight', (4, 6), (None, 1))
    ('up.lora_B.weight', (12, 4), (0, None))
    """
    if re.search(lora.targets, name) is None:
        return
    if len(shape) != 2:
        if len(shape) > 2:
            raise LayoutError(
                f"lora: {shown(name)} has {counted(len(shape), 'dim')}, and adapters are known for matrices only; "
                "narrow targets"
            )
        return
    base = name.removesuffix(".weight")
    yield f"{base}.lora_A.weight", (lora.rank, shape[1]), (None, 1)
    yield f"{base}.lora_B.weight", (shape[0], lora.rank), (0, None)
