"""Ops without a factor rule, and checks of their shapes, bodies and axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._arguments import instance, integers_of
from .._text import counted, shown
from .._types import Shape
from ..errors import LayoutError

__all__ = ["STRUCTURE", "BodyShapes", "check_structure"]

#: Ops without a factor rule; see `Computation`.
STRUCTURE = ("constant", "iota", "barrier", "constraint", "call", "loop", "while", "case")

#: The shapes that a body takes, and those that it gives.
BodyShapes = tuple[list[Shape], list[Shape]]


def check_structure(
    name: str,
    shapes: list[Shape],
    results: list[Shape],
    attributes: dict[str, Any],
    bodies: Sequence[BodyShapes],
) -> None:
    """Check the shapes, bodies and axes of an op without a rule."""
    taken = shapes[1:] if name == "case" else shapes
    if name == "while" and len(bodies) != 2:
        raise LayoutError(f"a while must have two bodies, the test and the step, got {len(bodies)}")
    if name == "case" and (not bodies or not shapes or shapes[0] != ()):
        raise LayoutError(
            "the first operand of a case must be a scalar, the number of one of its bodies; its operands are "
            f"{shown(shapes)}, and it has {counted(len(bodies), 'body', 'bodies')}"
        )
    for number, body in enumerate(bodies):
        made = [()] if name == "while" and number == 0 else results
        if body != (taken, made):
            raise LayoutError(
                f"body {number} must take {shown(taken)} and give {shown(made)}, but it takes {shown(body[0])} and "
                f"gives {shown(body[1])}"
            )
    same = name in ("loop", "while", "barrier", "constraint")
    if (same and shapes != results) or (name == "constraint" and len(shapes) != 1):
        raise LayoutError(f"results of a {name} must have its operands' shapes, {shown(shapes)}, got {shown(results)}")
    if name in ("constant", "iota") and (shapes or len(results) != 1):
        raise LayoutError(f"it must have no operands and one result, got {len(shapes)} and {len(results)}")
    if name == "constraint":
        axes: Any = attributes.get("axes")
        is_list = isinstance(axes, (list, tuple)) and len(axes) == len(shapes[0])
        if not is_list or not all(isinstance(spec or [], (list, tuple)) for spec in axes):
            raise LayoutError(
                f"axes is {shown(axes)}; it must have a list of axes for each of {counted(len(shapes[0]), 'dim')}"
            )
        for axis in (axis for spec in axes for axis in spec or ()):
            instance("axes", axis, str)
        for dim in integers_of("open", attributes.get("open", ())):
            if dim not in range(len(axes)):
                raise LayoutError(f"open has {dim}, but there are {counted(len(axes), 'dim')}")
