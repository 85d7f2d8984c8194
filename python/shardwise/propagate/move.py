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
    """A change of one tensor's layout, before or after an op, as collectives.

    Before the move, a result may be addends over the axes `before.unreduced`. An einsum's moves have no `value`, `op`,
    `source`, `dtype` or `why`; `LocalEinsum.why` has the reasons of all.

    >>> from shardwise import DeviceMesh, einsum
    >>> mesh = DeviceMesh((4,), ("tp",))
    >>> (move,) = einsum("bf,fd->bd", x=(None, "tp"), w=("tp", None), mesh=mesh, shapes=[(8, 16), (16, 4)]).moves
    >>> move.kinds, move.bytes, move.before.unreduced
    ('all-reduce over tp', 192, ('tp',))
    """

    #: The operand's name in an einsum, `"operands[0]"` or `"results[0]"` of the op in a computation, or `"result"`.
    tensor: str
    shape: tuple[int, ...]
    before: TensorLayout
    after: TensorLayout
    #: The collectives in order, as `ReshardPlan.collectives` gives them.
    steps: tuple[CollectiveStep, ...]
    #: The number of the value in its computation or body.
    value: int | None = None
    #: The op's name; `"output"` for a move of a computation's result.
    op: str = ""
    #: The op's place, such as `"train.py:31"`.
    source: str = ""
    #: The number of times: the trips of the loops around the op.
    times: int = 1
    dtype: str = ""
    #: The while or the branch of a case around the op, where only the run tells how often it is computed; else empty.
    when: str = ""
    why: str = ""
    #: True for rows that neighbours have and for cuts that a reshape cannot keep, which Shardy's passes do not list.
    implied: bool = False

    @property
    def bytes(self) -> int:
        """The bytes that each device receives once."""
        return sum(step.bytes for step in self.steps)

    @property
    def bytes_in_all(self) -> int:
        """The bytes that each device receives in all `times` moves; within a `when`, in one trip or one branch."""
        return self.bytes * self.times

    @property
    def line(self) -> str:
        """The move as a line of `Propagation.explain`."""
        times = f" {self.times} times," if self.times > 1 else ""
        place = f" ({self.source})" if self.source else ""
        return (
            f"{bytes_text(self.bytes_in_all)}:{times} {self.kinds} of {self.tensor} of {self.op}{place}, "
            f"{shape_text(self.shape)} {self.dtype}{self.when and f', {self.when}'}. {self.why}"
        )

    @property
    def kinds(self) -> str:
        """The collectives as text, such as `"all-gather over dp"`; slices only if there is nothing else."""
        steps = [step for step in self.steps if step.kind != "slice"] or self.steps
        return ", then ".join(f"{step.kind} over {', '.join(step.axes)}" for step in steps)

    def to_json(self) -> dict[str, Any]:
        """Return the move as values that `json.dumps` takes; a computation's also has its op and its reason."""
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

    With `at_once` addends that keep their cuts are one all-reduce, as in Shardy; otherwise their collectives are those
    that take the fewest bytes.
    """
    # Addends over axes that stay unreduced are left alone.
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
    """Return a layout for JSON: a list of axes for each dim, and the unreduced ones."""
    return {"axes": [list(spec) for spec in specs_of(layout)], "unreduced": list(layout.unreduced)}
