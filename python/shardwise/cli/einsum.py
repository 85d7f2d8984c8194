"""`shardwise einsum`: the layout of an einsum's result, what must move, and what each device computes."""

import argparse
import json

from .._text import counted
from ..errors import ParseError
from ..layout import TensorLayout
from ..propagate.einsum import einsum
from .notation import parse_dtype, parse_layout, parse_mesh, parse_shape
from .terminal import Screen

__all__ = ["run_einsum"]

#: The names of operands: activations and a weight, in most of those that are asked about.
_NAMES = ("x", "w")


def run_einsum(screen: Screen, options: argparse.Namespace) -> int:
    """Print the result and the moves of an einsum, and return the exit status."""
    mesh = parse_mesh(options.mesh)
    shapes = [parse_shape(text) for text in options.shapes]
    if len(options.layouts) != len(shapes) or len(shapes) > len(_NAMES):
        raise ParseError(
            f"{counted(len(options.layouts), 'layout')} and {counted(len(shapes), 'shape')} are given; give one "
            "layout and one shape for "
            f"each operand, at most {len(_NAMES)}"
        )
    pairs = zip(options.layouts, shapes, strict=True)
    layouts = [None if text.strip() == "?" else parse_layout(text, len(shape)) for text, shape in pairs]
    if parse_dtype(options.dtype) % 8:
        raise ParseError(f"dtype {options.dtype!r}: an einsum needs elements of whole bytes")
    out = None
    if options.out is not None or options.unreduced is not None:
        if options.out is None:
            raise ParseError("--unreduced is given without --out")
        rank = len(options.einsum.partition("->")[2].replace(" ", ""))
        axes = [] if options.unreduced is None else [name.strip() for name in options.unreduced.split(",")]
        out = TensorLayout(parse_layout(options.out, rank).axes, mesh, unreduced=axes)
    operands = dict(zip(_NAMES, layouts, strict=False))
    found = einsum(
        options.einsum, shapes=shapes, mesh=mesh, dtype=options.dtype, policy=options.policy, out=out, **operands
    )
    if options.json:
        print(json.dumps(found.to_json()))
        return 0
    for line in found.explain().splitlines():
        screen.write(line)
    return 0
