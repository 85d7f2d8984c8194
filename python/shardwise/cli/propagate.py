"""`shardwise propagate`: what a whole computation on cut tensors moves, and why."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from ..computation.computation import Computation
from ..errors import ParseError
from ..propagate.whole import propagate
from .notation import parse_layout, parse_mesh
from .terminal import Screen

__all__ = ["run_propagate"]


def run_propagate(screen: Screen, options: argparse.Namespace) -> int:
    """Print the moves of a computation, and return the exit status."""
    mesh = parse_mesh(options.mesh)
    computation = Computation.load(options.computation)
    inputs = [computation.shapes[number] for number in range(computation.inputs)]
    outputs = [computation.shapes[number] for number in computation.outputs]
    layouts = _parsed("inputs", options.layouts, inputs)
    results = None if options.results is None else _parsed("results", options.results, outputs)
    found = propagate(computation, layouts, results=results, mesh=mesh, policy=options.policy)
    if options.html is not None:
        found.save_html(options.html, f"{options.computation.name} on {options.mesh}")
    if options.json:
        page = {} if options.html is None else {"html": str(options.html)}
        print(json.dumps(found.to_json() | page))
        return 0
    for line in found.explain(len(found.moves) if options.all else 10).splitlines():
        screen.write(line)
    if options.html is not None:
        screen.write("the page is in ", (str(options.html), "bold"))
    return 0


def _parsed(what: str, texts: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    if len(texts) != len(shapes):
        raise ParseError(f"LAYOUT for {what}: {len(texts)} given, {len(shapes)} needed; write ? for a free one")
    pairs = zip(texts, shapes, strict=True)
    return [None if text.strip() == "?" else parse_layout(text, len(shape)).axes for text, shape in pairs]
