"""Runs the fuzzers for as long as is asked: `python -m tests.fuzz [NAME …] [--seconds S] [--seed N]`.

Each fuzzer is a property test of Hypothesis, run with one seed after another until its time is over. What it finds is
shrunk and printed with its seed, and becomes a regression case: an input of a parser in `tests/corpus`, a call in
`tests/fuzz/test_fuzz.py`.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis.strategies import SearchStrategy

from shardwise.cli import arguments
from tests.fuzz import api, command, parsers, plans, rules_files
from tests.fuzz.arguments import SHARDWISE, made
from tests.fuzz.limits import limit_memory

#: What is drawn, and what is done with it.
FUZZERS: dict[str, tuple[SearchStrategy[Any], Callable[[Any], object]]] = {
    "api": (api.calls(), api.call_anything),
    "pickle": (made(SHARDWISE), api.pickle_anything),
    **{name: (parsers.inputs(name), partial(parsers.perform, name)) for name in parsers.PARSERS},
    "plans": (plans.cases(), plans.run_any_plan),
    "rules_files": (rules_files.commands(), rules_files.run),
    "command": (command.inputs(), command.spoil),
}

#: Examples that share a seed: few, so that the time is kept.
ROUND = 100


def run_round(name: str, number: int) -> None:
    """Run a fuzzer on what follows from a seed."""
    strategy, check = FUZZERS[name]
    health = list(HealthCheck)

    @seed(number)
    @settings(max_examples=ROUND, database=None, deadline=None, suppress_health_check=health)
    @given(strategy)
    def run(example: Any) -> None:
        check(example)

    # Compiled code that does not even look at signals ends here, with a traceback.
    faulthandler.dump_traceback_later(600, exit=True)
    run()
    faulthandler.cancel_dump_traceback_later()


def main() -> int:
    """Run the fuzzers, print how many examples each had, and give 1 if one found something."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FUZZERS)}; all if none is given")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each fuzzer")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    options = parser.parse_args()
    if unknown := set(options.names) - set(FUZZERS):
        parser.error(f"no fuzzer is called {', '.join(sorted(unknown))}")
    faulthandler.enable()
    # An end like any other, which leaves no temporary files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    limit_memory()
    # To make the parser takes longer than most commands do here; what it reads leaves nothing in it.
    arguments.make_parser = cache(arguments.make_parser)
    for name in options.names or FUZZERS:
        number, end = options.seed, time.monotonic() + options.seconds
        while time.monotonic() < end:
            print(f"\r{name:18} seed {number}", end="", flush=True)
            run_round(name, number)
            number += 1
        examples = ROUND * (number - options.seed)
        print(f"\r{name:18} {examples} examples, seeds {options.seed} to {number - 1}: nothing found", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
