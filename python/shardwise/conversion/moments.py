"""States of an optimizer in rewrites: a state of a weight's shape, an average over a dim, or a number (2.17)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from .._text import shown
from ..errors import LayoutError
from ..quantized.states import State
from . import arrange
from .assembled import Assembled
from .weights import Reader

__all__ = ["Moment"]


@dataclass(frozen=True, eq=False)
class Moment:
    """A state of a weight, made of parts of stored ones.

    Attributes:
        origin: The name of one stored state in it, for messages.
        tensor: The tensor: of the weight's rank, with size 1 in the dim over which it is an average; or a number.
        over: The dim of the weight over which it is an average; `None` if it is none.
        is_number: Whether it is one number for the whole weight.
        keeps: Whether the averaged dim is stored, with size 1.
        unknown: The reason why it cannot be rewritten; empty if it can.
        read: Returns the bytes of the number.
        whole: The stored tensor, if the state is unchanged.
    """

    origin: str
    tensor: Assembled
    over: int | None = None
    is_number: bool = False
    keeps: bool = True
    unknown: str = ""
    read: Callable[[], bytes | None] = lambda: None
    whole: Assembled | None = None

    @classmethod
    def of_stored(cls, state: State, made: Assembled, read: Reader) -> Moment:
        """Return a stored state."""
        over, keeps, whole = state.over, True, made
        if over is not None and len(made.shape) < len(state.shape):
            keeps = False
            merged = [[dim] for dim in range(len(made.shape))]
            merged.insert(over, [])
            made = arrange.arranged(made, [[size] for size in made.shape], merged)
        value = partial(read, state.name)
        return cls(state.name, made, over, state.is_number, keeps, state.unknown, value, whole)

    def stored(self) -> Assembled:
        """Return the state as it is to be stored: an average without its dim, if it was stored so."""
        if self.whole is not None or self.over is None or self.keeps:
            return self.whole or self.tensor
        split = [[] if dim == self.over else [size] for dim, size in enumerate(self.tensor.shape)]
        return arrange.arranged(self.tensor, split, [[dim] for dim in range(len(self.tensor.shape) - 1)])

    def changed(self, what: str, dim: int | None, change: Callable[[Assembled], Assembled]) -> Moment:
        """Return the state after a change of a dim of the weight, or of all dims.

        Raises:
            LayoutError: if the meaning of its dims is unknown, or it is an average over that dim.
        """
        self.check(what, dim)
        return replace(self, tensor=self.tensor.apart() if self.is_number else change(self.tensor), whole=None)

    def check(self, what: str, dim: int | None) -> None:
        """Refuse a change of a dim of the weight, or of all dims, which the state cannot follow.

        Raises:
            LayoutError: as `changed`.
        """
        if self.unknown:
            raise LayoutError(f"{what}, but {self.unknown}")
        if dim is not None and dim == self.over:
            raise LayoutError(
                f"{what} in dim {dim}, but {shown(self.origin)} is an average over that dim, and cannot be "
                "computed from the old average; drop leaves it out"
            )

    def moved(self, over: int | None) -> Moment:
        """Return the state with another number for the dim over which it is an average."""
        return self if self.over is None else replace(self, over=over)
