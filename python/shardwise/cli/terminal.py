"""The output of the command: lines of styled text, in colour where there is a terminal and rich is installed.

The text is the same with rich and without; only the colours, and what rich knows about terminals (NO_COLOR,
FORCE_COLOR, how many colours there are), come from it.
"""

import os
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO

from ..show.lines import Line, StyledText, printable

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Screen", "as_options", "say"]

# Drawn without Unicode where the output cannot encode it. Names in a checkpoint may hold anything; see
# `lines.printable`.
_ASCII = str.maketrans("┌┬┐├┼┤└┴┘─│…≤↓→×·█▓▒", "+++++++++-|.<v>x-#=%")


#: The variables by which rich writes colours where there is no terminal.
_COLOURS = ("FORCE_COLOR", "TTY_COMPATIBLE")

#: The advice of the library for a dim that does not divide, and the advice for an engine or a trainer.
WOULD_CUT = 'uneven="ceil", "chunk", "balanced" or "floor" would cut it'
FITS = "`shardwise fits` says which sizes fit the model"

#: Arguments as messages of the library call them, and the options of the command for them.
_OPTIONS = {
    'uneven="ceil", "chunk", "balanced" or "floor"': "--uneven ceil, chunk, balanced or floor",
    "LayoutMap(..., backtracking=True), or backtracking = true in a rules file,": "backtracking = true in the file",
    "memory is ": "--memory is ",
    "threads is ": "--jobs is ",
    "task_bytes is ": "--task-bytes is ",
    "optimizer is '": "--optimizer is '",
    "dtypes by hand, as in {'exp_avg': 'float32'}": "dtypes by hand, as in exp_avg=float32",
    "resume=True": "--resume",
    "open_checkpoint(..., padded=True) and reshard_checkpoint(..., padded=True)": "inspect and reshard --padded",
    "open_checkpoint(..., parameter_names=[...])": "--parameter-names FILE",
    "parameter_names": "--parameter-names",
    "source_layouts": "--source-mesh",
    "device_mesh is given": "--mesh is given",
    "layouts with a mesh, which states the ranks; none was given": (
        "--mesh, which states the ranks, as in --mesh dp=8"
    ),
    "mesh is missing, and": "--mesh is missing, and",
    "mesh is given, but layouts must say": "--mesh is given, but --rules must say",
    "'sharded', 'ranks' and 'dcp' hold": "--to sharded, --to ranks and --to dcp hold",
    'replicas="first"': "--replicas first",
    "overflow='saturate'": "--overflow saturate",
    "overflow='round'": "--overflow round",
    "drop='": "--drop '",
    "which='weights'": "--weights-only",
    "which='state'": "--state-only",
    "to='ranks'": "--to ranks",
    "to='fsdp2'": "--to fsdp2",
    "to='dcp'": "--to dcp",
    "drop= can": "--drop can",
    "drop leaves them out": "--drop leaves them out",
    "open_checkpoint(..., part=True) opens this file alone": "inspect describes this file alone",
}

#: Rules in a message, each as Python writes a text.
_RULES = re.compile(r"\brule '[^']*'|(?<=apply to no name: ).*")


def as_options(message: str) -> str:
    """Write a message of the library with the options of the command in place of Python's arguments.

    >>> as_options("the next run makes all objects again (resume=True)")
    'the next run makes all objects again (--resume)'
    >>> as_options("axes[1] names axis 'tp'")
    "dim 1 names axis 'tp'"

    A rule is written as a rules file has it, between single quotes, where a backslash is one.

    >>> as_options(f"rule {r'wq[.]w$'!r} and rule {r'wq' + chr(92) + '.w$'!r}").count(chr(92))
    1
    """
    for argument, option in _OPTIONS.items():
        message = message.replace(argument, option)
    message = re.sub(r"\baxes\[(\d+)\]", r"dim \1", message)
    return _RULES.sub(lambda found: found[0].replace("\\\\", "\\"), message)


def say(what: str, messages: Iterable[str]) -> None:
    """Write messages of the library to the standard error, each on a line with its kind: "error" or "warning"."""
    for message in messages:
        print(f"shardwise: {what}: {printable(as_options(message))}", file=sys.stderr)


class Screen:
    """Standard output, or any text stream, as a place for styled lines.

    Attributes:
        size: Columns and lines of the terminal; None if the output goes elsewhere and nothing needs to fit.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        found = sys.stdout if stream is None else stream
        if found is None:  # Python has none if the program was started without, as by `>&-`.
            raise OSError("there is no standard output to write to")
        self._stream = found
        self.size = _terminal_size() if self._stream.isatty() else None
        self._console = _rich_console(self._stream)

    def write(self, *parts: StyledText | str) -> None:
        """Write one line."""
        line = [(part, "") if isinstance(part, str) else part for part in parts]
        line = [(self._encodable(printable(text)), style) for text, style in line]
        self._stream.write(self._rendered(line).rstrip() + "\n")

    def _rendered(self, line: Line) -> str:
        if self._console is None:
            return "".join(text for text, _ in line)
        from rich.text import Text

        # Captured, not printed by rich, which would end the program when the pipe is closed.
        with self._console.capture() as capture:
            self._console.print(Text.assemble(*line), soft_wrap=True, end="")
        rendered: str = capture.get()
        return rendered

    def _encodable(self, text: str) -> str:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            text.encode(encoding)
        except UnicodeEncodeError:
            return text.translate(_ASCII).encode(encoding, "backslashreplace").decode(encoding)
        return text


def _terminal_size() -> os.terminal_size:
    import shutil  # Late: it imports all compressions.

    return shutil.get_terminal_size()


def _rich_console(stream: TextIO) -> "Console | None":
    if not stream.isatty() and not any(os.environ.get(name) for name in _COLOURS):
        return None  # Rich would write no colour, and takes a while to import.
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream, highlight=False, markup=False, emoji=False)
