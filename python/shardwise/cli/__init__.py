"""The command line.

| module | answers |
|---|---|
| `arguments`, `layout_arguments` | the arguments of the commands about checkpoints, and of the others |
| `parser` | help in groups, with examples; what was meant by an unknown word |
| `options` | options that several commands take |
| `notation` | meshes, shapes and layouts as text |
| `report`, `checkpoints`, `plan`, `tasks`, `learn` | the commands about checkpoints |
| `fits`, `state`, `state_text` | sizes that fit; what ranks need, worked out and printed |
| `show`, `translate`, `einsum`, `propagate`, `explore`, `rules`, `completion` | the other commands |
| `layouts` | the layouts of a rules file |
| `terminal`, `progress` | output; progress |

For checkpoints: `report`, `reshard`, `extract`, `plan`, `run`, `commit`, `verify`, `diff`, `learn`, `inspect`,
`fits`, `state`; for layouts: `show`, `translate`, `einsum`, `propagate`, `explore`.

Without a command it prints its help. `rules` prints the rules files that come with the package, `completion` the script
for shell completion.

Exit status: 0 on success; 1 if `report` finds tensors that cannot be placed (with `--strict`, on any warning, as in
`reshard`, `inspect`, `verify` and `diff`), `diff` finds a difference, `learn` no rewrite for a tensor, `fits` no size
that fits, or `state` needs more than `--memory`; 2 for bad input, with one line on the standard error; 3 if `verify`
finds damage; 4 if `fits` or `state` cannot tell; 70 for a fault of shardwise itself.
"""

import argparse
import contextlib
import os
import signal
import sys
import warnings
from collections.abc import Sequence

from .._garbage import uncollected
from .._text import cut
from ..errors import InternalError, ShardwiseError, ShardwiseWarning
from .arguments import make_parser, parse_arguments
from .terminal import FITS, WOULD_CUT, Screen, say

__all__ = ["main"]

# The status of what SIGPIPE ends; by its number, which Windows does not have.
_BROKEN_PIPE = 128 + 13
# The status of a fault of shardwise itself: EX_SOFTWARE of sysexits.h.
_FAULT = 70


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and give its exit status.

    Args:
        arguments: what follows the program's name; `sys.argv[1:]` if left out.

    >>> main(["show", "4,6", "--mesh", "x=2", "--layout", "x,-", "--dtype", "int8"])
    4 x 6 laid out as x,- on the mesh x=2
    2 shards of 2 x 6, each on one device, 12 B of 24 B, 50%
    <BLANKLINE>
    ↓ dim 0: 4, cut in 2 by x
    → dim 1: 6, not cut
            0:6
         ┌───────┐
     0:2 │ cpu:0 │
         ├───────┤
     2:4 │ cpu:1 │
         └───────┘
    0
    """
    preset = ""
    try:
        options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
        preset = getattr(options, "preset", None) or ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ShardwiseWarning)  # The reports have them, and they are written from there.
            status = _run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_what_cannot_be_written()  # The reader has closed the pipe, as `head` does.
        return _BROKEN_PIPE
    except KeyboardInterrupt as stopped:
        if str(stopped):  # What is left, and how to go on.
            say("error", [str(stopped)])
        return 128 + signal.SIGINT
    except InternalError as error:
        return _fault(error)
    except (ShardwiseError, ValueError, OSError, ImportError) as error:
        _drop_what_cannot_be_written()  # It may be what failed, on a full disk; then it would fail again at exit.
        said = _sentence(error)
        # An engine cuts its own way: an uneven rule would give its ranks other elements than they look for.
        say("error", [said.replace(WOULD_CUT, FITS) if preset.startswith(("vllm", "sglang", "megatron")) else said])
        return 2
    except MemoryError as error:
        _drop_what_cannot_be_written()
        say("error", [f"there is not enough memory{f': {error}' if str(error) else ''}"])
        return 2
    except Exception as error:
        return _fault(error)
    return status


def _fault(error: Exception) -> int:
    """Write one sentence for an error that is a fault of shardwise; SHARDWISE_TRACEBACK=1 gives the traceback."""
    if os.environ.get("SHARDWISE_TRACEBACK"):
        raise error
    _drop_what_cannot_be_written()
    text = f"a fault of shardwise itself: {type(error).__name__}: {cut(error)}"
    say("error", [f"{text}; please report it, with what SHARDWISE_TRACEBACK=1 shows"])
    return _FAULT


def _sentence(error: Exception) -> str:
    """Return the message of an error, without the number of an operating system's error."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        name = os.fspath(error.filename)
        hint = _hint(name) if isinstance(error, FileNotFoundError) else ""
        return f"{name!s}: {error.strerror.removesuffix(hint)}{hint}"
    return str(error)


def _hint(name: str | bytes) -> str:
    from ..store.data.location import hub_hint

    return hub_hint(os.fsdecode(name))


def _drop_what_cannot_be_written() -> None:
    """Flush the standard output; if that fails, redirect it to the null device."""
    # It has no descriptor if it was replaced, or closed.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        try:
            sys.stdout.flush()
        except OSError:
            with open(os.devnull, "wb") as null:  # noqa: PTH123
                os.dup2(null.fileno(), sys.stdout.fileno())


def _run(options: argparse.Namespace) -> int:
    # Imported when needed: `show` has no use for checkpoints, nor `--help` for anything.
    if options.command is None:
        make_parser().print_help()
        return 0
    if options.command == "show":
        from .show import run_show

        return run_show(Screen(), options)
    if options.command == "einsum":
        from .einsum import run_einsum

        return run_einsum(Screen(), options)
    if options.command == "propagate":
        from .propagate import run_propagate

        return run_propagate(Screen(), options)
    if options.command == "explore":
        from .explore import run_explore

        return run_explore(Screen(), options)
    if options.command == "translate":
        from .translate import run_translate

        return run_translate(Screen(), options)
    if options.command == "rules":
        from .rules import run_rules

        return run_rules(Screen(), options)
    if options.command == "completion":
        from .completion import run_completion

        return run_completion(options)
    if options.command in ("reshard", "extract", "verify", "diff", "inspect"):
        from . import checkpoints

        run = getattr(checkpoints, f"run_{'reshard' if options.command == 'extract' else options.command}")
        status: int = run(Screen(), options)
        return status
    if options.command == "learn":
        from .learn import run_learn

        return run_learn(options)
    if options.command == "fits":
        from .fits import run_fits

        return run_fits(Screen(), options)
    if options.command == "state":
        with uncollected():  # Neither an import nor a model of a hundred thousand tensors leaves anything to collect.
            from .state import run_state

            return run_state(Screen(), options)
    if options.command in ("run", "commit"):
        from . import tasks

        return tasks.run_run(Screen(), options) if options.command == "run" else tasks.run_commit(Screen(), options)
    if options.command == "plan":
        from .plan import run_plan

        return run_plan(Screen(), options)
    from .report import run_report

    return run_report(Screen(), options)
