"""A change of a tensor's layout before or after an op, with its price."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .._text import bytes_text
from ..layout import TensorLayout
from ..reshard.collectives import CollectiveObstacle, steps_between
from ..reshard.cost import LinkModel, timed
from ..reshard.kinds import Collective, CollectiveStep
from .given import shape_text, specs_of

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
    #: In a computation: the number of the value, the name of the op, its place in the source, and how often it is done.
    value: int | None = None
    op: str = ""
    source: str = ""
    times: int = 1
    dtype: str = ""
    #: For a move within a while or a case when it is done so often; otherwise nothing.
    when: str = ""
    #: Why, in a sentence.
    why: str = ""
    #: True for what Shardy's passes do not list: rows that neighbours have, and cuts that a reshape cannot keep.
    implied: bool = False

    @property
    def bytes(self) -> int:
        """The bytes that each device receives, each time."""
        return sum(step.bytes for step in self.steps)

    @property
    def bytes_in_all(self) -> int:
        """The bytes that each device receives in all times, or each time that `when` says."""
        return self.bytes * self.times

    @property
    def line(self) -> str:
        """The move in a line: bytes, collectives, the tensor and the op, its place in the source, why."""
        times = f" {self.times} times," if self.times > 1 else ""
        place = f" ({self.source})" if self.source else ""
        return (
            f"{bytes_text(self.bytes_in_all)}:{times} {self.kinds} of {self.tensor} of {self.op}{place}, "
            f"{shape_text(self.shape)} {self.dtype}{self.when and f', {self.when}'}. {self.why}"
        )

    @property
    def kinds(self) -> str:
        """The collectives in a few words: `"all-gather over dp"`.

        A slice, for which nothing moves, is named only if there is nothing else.
        """
        steps = [step for step in self.steps if step.kind != "slice"] or self.steps
        return ", then ".join(f"{step.kind} over {', '.join(step.axes)}" for step in steps)

    def to_json(self) -> dict[str, Any]:
        """Return the move as JSON has it."""
        return {
            "tensor": self.tensor,
            "before": axes_json(self.before),
            "after": axes_json(self.after),
            "steps": [
                {"kind": step.kind, "axes": list(step.axes), "bytes_received": step.bytes} for step in self.steps
            ],
            "bytes_received": self.bytes,
        } | (self._of_computation if self.op else {})

    @property
    def _of_computation(self) -> dict[str, Any]:
        names = ("value", "op", "source", "times", "when", "why", "implied")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        return f"{self.tensor}: {self.kinds}, each device receives {bytes_text(self.bytes)}"


def move_between(
    tensor: str,
    shape: tuple[int, ...],
    before: TensorLayout,
    after: TensorLayout,
    itemsize: int,
    *,
    at_once: bool = False,
) -> Move:
    """Return the move from one layout to another on the same mesh.

    Addends that nothing else becomes of are added `at_once`, as Shardy does; otherwise in the way that takes the fewest
    bytes, which may be to cut them over an axis that has the same addends first.
    """
    # Addends that stay are no affair of the move.
    stay, rest, goal = after.unreduced, before, after
    if stay:
        left = [axis for axis in before.unreduced if axis not in stay]
        rest = TensorLayout(before.axes, before.device_mesh, unreduced=left)
        goal = TensorLayout(after.axes, after.device_mesh)
    # A dim that does not divide counts as the next that does.
    counts = zip(shape, rest.num_shards, goal.num_shards, strict=True)
    even = [-(-size // both) * both for size, *pair in counts for both in [math.lcm(*pair)]]
    if at_once and rest.unreduced and rest.axes == goal.axes:
        every = [Collective("all-reduce", rest.unreduced)]
        return Move(tensor, shape, before, after, timed(every, rest.partition(even), itemsize, LinkModel()))
    steps = steps_between(rest.partition(even), goal.partition(even), itemsize, None)
    assert not isinstance(steps, CollectiveObstacle)
    return Move(tensor, shape, before, after, steps)


def axes_json(layout: TensorLayout) -> dict[str, Any]:
    """Return a layout as JSON has it: for each dim the list of its axes."""
    return {"axes": [list(spec) for spec in specs_of(layout)], "unreduced": list(layout.unreduced)}
