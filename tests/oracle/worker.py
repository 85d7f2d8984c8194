"""Questions to a framework in a process of its own: it may crash, be slow to import, or live in another Python.

Both sides speak pickles over pipes, each preceded by its length in eight bytes. The worker first sends its version;
then it answers every list of cases with a list of answers, one for each. What a worker prints goes to standard error.
This module needs the standard library only, so that a Python without numpy and without shardwise can serve.

A worker's module ends with

    if __name__ == "__main__":
        serve(lambda: framework.__version__, answer)

and is started with `python -m tests.oracle.its_name` in the project's folder.
"""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import get_context
from pathlib import Path
from typing import Any, BinaryIO

ROOT = Path(__file__).parents[2]


def run_ranks(target: Callable[..., None], arguments: Iterable[tuple[Any, ...]], start: str = "spawn") -> None:
    """Run a function once for each tuple of arguments, in processes side by side; end this process if one fails."""
    context: Any = get_context(start)
    processes = [context.Process(target=target, args=each) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit(f"a rank failed: {[process.exitcode for process in processes]}")


def read(stream: BinaryIO) -> Any:
    header = stream.read(8)
    if len(header) < 8:
        raise EOFError
    return pickle.loads(stream.read(struct.unpack("<Q", header)[0]))


def write(stream: BinaryIO, message: Any) -> None:
    data = pickle.dumps(message, protocol=4)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def serve(version: Callable[[], str], answer: Callable[[Any], Any]) -> None:
    """Answer until standard input ends; what `version` imports may print as it likes."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    write(answers, version())
    while True:
        try:
            batch = read(sys.stdin.buffer)
        except EOFError:
            return
        write(answers, [answer(case) for case in batch])


def raised(name: str) -> tuple[str, str]:
    """What a worker answers where its framework raises."""
    return ("raised", name)


class WorkerDied(Exception):
    """The worker died of a case, which is the argument."""


class Worker:
    """A process that answers; started when first asked, and again after it has died."""

    def __init__(self, module: str, python: str = sys.executable, env: Mapping[str, str] | None = None) -> None:
        self._command = [python, "-m", module]
        self._env = {**os.environ, **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self.version = ""

    def ask(self, batch: list[Any]) -> list[Any]:
        """Give an answer for each case; raises `WorkerDied` with the first case that is one too many."""
        process = self._process or self.start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            write(process.stdin, batch)  # type: ignore[arg-type]
            answers: list[Any] = read(process.stdout)  # type: ignore[arg-type]
        except (BrokenPipeError, EOFError):
            self.stop()
            if len(batch) == 1:
                raise WorkerDied(batch[0]) from None
            # Which of them it was is found one by one.
            return [answer for case in batch for answer in self.ask([case])]
        return answers

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process; raises `EOFError` if it ends before it has said its version."""
        self._process = subprocess.Popen(
            self._command,
            cwd=ROOT,
            env=self._env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdout is not None
        self.version = read(self._process.stdout)  # type: ignore[arg-type]
        return self._process

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
