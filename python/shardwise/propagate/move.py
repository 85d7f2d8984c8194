"""A change of a tensor's layout before or after an op, with its price."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .._text import bytes_text
from ..layout import TensorLayout
from ..reshard.collectives import CollectiveObstacle, steps_between
from ..reshard.kinds import CollectiveStep
from .given import specs_of

__all__ = ["Move", "axes_json", "move_between"]


@dataclass(frozen=True)
class Move:
    """A change of one tensor's layout: from the one that it has to the one that is needed.

    A result may have addends before it, over the unreduced axes of `before`.
    """

    #: The tensor's name; `"result"` for a result.
    tensor: str
    #: Its shape.
    shape: tuple[int, ...]
    #: Its layout before.
    before: TensorLayout
    #: Its layout after.
    after: TensorLayout
    #: The collectives, in order, as `ReshardPlan.collectives` gives them.
    steps: tuple[CollectiveStep, ...]

    @property
    def bytes(self) -> int:
        """The bytes that each device receives."""
        return sum(step.bytes for step in self.steps)

    @property
    def kinds(self) -> str:
        """The collectives in a few words: `"all-gather over dp"`.

        A slice, for which nothing moves, is named only if there is nothing else.
        """
        steps = [step for step in self.steps if step.kind != "slice"] or self.steps
        return ", then ".join(f"{step.kind} over {', '.join(step.axes)}" for step in steps)

    def to_json(self) -> dict[str, Any]:
        """Give the move as JSON has it."""
        return {
            "tensor": self.tensor,
            "before": axes_json(self.before),
            "after": axes_json(self.after),
            "steps": [
                {"kind": step.kind, "axes": list(step.axes), "bytes_received": step.bytes} for step in self.steps
            ],
            "bytes_received": self.bytes,
        }

    def __str__(self) -> str:
        return f"{self.tensor}: {self.kinds}, each device receives {bytes_text(self.bytes)}"


def move_between(
    tensor: str, shape: tuple[int, ...], before: TensorLayout, after: TensorLayout, itemsize: int
) -> Move | None:
    """Give the move from one layout to another on the same mesh; `None` if nothing changes."""
    if before == after:
        return None
    # Addends that stay are no affair of the move.
    stay = after.unreduced
    rest = TensorLayout(
        before.axes, before.device_mesh, unreduced=[axis for axis in before.unreduced if axis not in stay]
    )
    goal = TensorLayout(after.axes, after.device_mesh)
    steps = steps_between(rest.partition(shape), goal.partition(shape), itemsize, None)
    assert not isinstance(steps, CollectiveObstacle)
    return Move(tensor, shape, before, after, steps) if steps else None


def axes_json(layout: TensorLayout) -> dict[str, Any]:
    """Give a layout as JSON has it: for each dim the list of its axes."""
    return {"axes": [list(spec) for spec in specs_of(layout)], "unreduced": list(layout.unreduced)}
