"""`shardwise completion`: the script that lets a shell complete the commands, made by shtab from their parser."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from ..rules.shipped import example_rules
from .arguments import make_parser

__all__ = ["run_completion"]

#: The arguments that are files or folders, and may be something else: a URL, or the name of rules of the package.
_FILES = ("source", "target", "first", "second", "rules", "source_rules")


def run_completion(options: argparse.Namespace) -> int:
    """Print the script, and give the exit status."""
    try:
        import shtab
    except ImportError as error:
        raise ImportError("completion needs shtab: pip install 'shardwise[cli]'") from error
    parser = make_parser()
    for action in _actions(parser):
        if action.type is Path or action.dest in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.dest == "name":
            action.choices = list(example_rules())
    print(shtab.complete(parser, options.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
