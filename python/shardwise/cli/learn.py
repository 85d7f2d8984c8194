"""`shardwise learn`: the rewrites that lead from one checkpoint to another."""

import argparse
import json

from ..show.names import lines_alike
from ..store import learn_rewrites
from .checkpoints import refused
from .notation import parse_memory
from .terminal import say

__all__ = ["run_learn"]

_MOST_SHOWN = 20


def run_learn(options: argparse.Namespace) -> int:
    """Print the rewrites, and give the exit status: 1 if some tensors have none."""
    with refused():
        memory = parse_memory(options.memory)
        found = learn_rewrites(
            options.first, options.second, memory=memory, threads=options.jobs, config=options.config
        )
    if options.json:
        said = {"unexplained": dict(found.unexplained), "unused": found.unused, "doubtful": found.doubtful}
        print(json.dumps({"text": found.text, **said}))
        return 1 if found.unexplained else 0
    if not found.rewrites and not found.unexplained:
        print("# Nothing is to be rewritten: the first checkpoint has the tensors of the second, with the same names.")
    print(found.text, end="")
    for names, what in (
        (
            found.unused,
            f"is in no tensor {'that the rewrites make' if found.unexplained else 'of the second checkpoint'}",
        ),
        (
            found.doubtful,
            "could be made of several equal tensors; the one with the most similar name was taken",
        ),
    ):
        say("warning", lines_alike(((name, f" {what}") for name in names), _MOST_SHOWN))
    say("error", lines_alike(((name, f": {why}") for name, why in found.unexplained.items()), _MOST_SHOWN))
    return 1 if found.unexplained else 0
