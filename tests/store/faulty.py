"""Work whose operations on files fail, stop half-way, or kill the process: see `faults.c`, which is compiled here.

A `Machine` is a process with `faults.c` in it that has imported everything; for each piece of work it makes a child. So
a kill costs some milliseconds, and thousands of them can be tried.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Machine", "Outcome", "why_not"]

#: Seconds after which a child that is still running is ended, which fails its test.
_TOO_LONG = 1200
#: What `faults.c` calls them.
_FAULTS = {"count": 0, "kill": 1, "kill after": 2, "fail": 3, "fail from": 4, "short from": 5}


class Outcome(NamedTuple):
    """What became of a piece of work.

    Attributes:
        killed: Whether it was killed.
        error: The class of the exception that came out; `None` if none did.
        message: What it says.
        filename: The file that it names.
        done: What the work gave, as JSON gives it back.
        operations: The operations on files below the folder, `"name path"` each.
    """

    killed: bool
    error: str | None
    message: str
    filename: str | None
    done: Any
    operations: list[str]


def why_not() -> str:
    """Why faults cannot be made here; empty if they can."""
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return "faults are put in front of the C library of GNU, on Linux"
    return "" if shutil.which("cc") else "faults.c is compiled by cc, which is not there"


class Machine:
    """A process that does pieces of work in children of its own, with faults.

    Args:
        folder: Where the compiled library goes.
        module: What holds the functions that do the work.
    """

    def __init__(self, folder: Path, module: str) -> None:
        library = folder / "faults.so"
        source = Path(__file__).with_name("faults.c")
        compiled = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
        subprocess.run(compiled, check=True, capture_output=True, text=True)
        root = Path(__file__).parents[2]
        environment = {**os.environ, "LD_PRELOAD": str(library), "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-m", __spec__.name, str(library), module]
        self._process = subprocess.Popen(
            command, cwd=root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(
        self,
        work: str,
        folder: Path,
        *arguments: object,
        at: int = 0,
        fault: str = "count",
        error: int = 0,
        reads: bool = False,
        here: bool = False,
    ) -> Outcome:
        """Do a piece of work.

        Args:
            work: The name of the function.
            folder: Its first argument; operations below it are counted.
            arguments: Its other ones, as JSON has them.
            at: The operation, from 1, at which the fault is.
            fault: `"kill"` before the operation; `"kill after"` it, or half of it; `"fail"`, this one only, or `"fail
                from"` this one on; `"short from"` this one on, by which half of what is asked for is written and read.
            error: The number of the error of those that fail.
            reads: Whether operations count that only read.
            here: Whether it is done in no child and without faults, so that what it imports stays imported.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = [work, str(folder), arguments, at, _FAULTS[fault], error, reads, here]
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that makes the children ended"
        status, said, operations = json.loads(answer)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        assert killed or status == 0, (work, at, fault, status, said)
        error_name, message, filename, done = said or [None, "", None, None]
        return Outcome(killed, error_name, message, filename, done, operations)

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=3600)


def _said(function: Any, arguments: list[Any]) -> list[Any]:
    """Error, message, file, answer of a call."""
    try:
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
            return [None, "", None, function(*arguments)]
    except Exception as error:
        name = getattr(error, "filename", None)
        return [type(error).__name__, str(error), name if name is None else str(name), None]


def _child(library: Any, function: Any, arguments: list[Any], fault: list[int], answer: int) -> None:
    try:
        signal.alarm(_TOO_LONG)
        library.faults_arm(os.fsencode(arguments[0]), *fault)
        said = _said(function, arguments)
        library.faults_disarm()
        os.write(answer, json.dumps(said).encode())
        os._exit(0)
    finally:
        os._exit(1)


def _serve(library_path: str, module: str) -> None:
    library = ctypes.CDLL(library_path)
    library.faults_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_int]
    library.faults_notes.restype = ctypes.c_char_p
    functions = importlib.import_module(module)
    answers = os.dup(1)  # What the work prints goes elsewhere.
    said: list[Any] | None
    for line in sys.stdin:
        name, folder, arguments, at, fault, error, reads, here = json.loads(line)
        function, given = getattr(functions, name), [folder, *arguments]
        if here:
            status, said = 0, _said(function, given)
        else:
            ours, theirs = os.pipe()
            child = os.fork()
            if child == 0:
                _child(library, function, given, [at, fault, error, reads], theirs)
            os.close(theirs)
            with os.fdopen(ours, "rb") as stream:
                text = stream.read()
            _, status = os.waitpid(child, 0)
            said = json.loads(text) if text else None
        notes = [] if here else os.fsdecode(library.faults_notes()).splitlines()
        os.write(answers, (json.dumps([status, said, notes]) + "\n").encode())


if __name__ == "__main__":
    _serve(*sys.argv[1:])
