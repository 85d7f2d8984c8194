"""`shardwise translate`: one layout in the dialects of other frameworks, side by side."""

import argparse
import json

from ..errors import ParseError
from ..interop import translate
from ..layout import TensorLayout
from .notation import parse_layout, parse_mesh
from .terminal import Screen

__all__ = ["run_translate"]


def run_translate(screen: Screen, options: argparse.Namespace) -> int:
    """Print a layout in each dialect, and give the exit status."""
    rank = 0 if options.layout.strip() == "()" else 1  # No shape says it; "" is one dim that is not cut.
    axes = parse_layout(options.layout, rank).axes
    if not (options.unreduced or "").isprintable():
        raise ParseError(f"unreduced {options.unreduced!r}: holds a character that cannot be printed")
    unreduced = [name.strip() for name in options.unreduced.split(",")] if options.unreduced else []
    layout = TensorLayout(axes, parse_mesh(options.mesh), unreduced=unreduced)
    dialects = None if options.to is None else [name.strip() for name in options.to.split(",")]
    texts = translate(layout, dialects)
    if options.json:
        print(json.dumps(texts, indent=2))
        return 0
    width = max(map(len, texts))
    for dialect, text in texts.items():
        style = "dim" if text.startswith("cannot express") else ""
        screen.write((dialect.ljust(width), "bold"), "  ", (text, style))
    return 0
