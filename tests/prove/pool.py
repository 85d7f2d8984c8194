"""Batches of work in processes, any of which may die of a case."""

from __future__ import annotations

import importlib
import multiprocessing
import random
import signal
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from .subject import Outcome, Subject

#: Clean processes: a forked one would hold the pipes of its siblings open, and not learn that their owner has gone.
SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Work:
    """One batch: the number of a subject, of the batch, and how many cases."""

    subject: int
    batch: int
    count: int


def seeded(seed: int, subject: str, batch: int) -> random.Random:
    """Give the source of one batch's cases, which depends on nothing but these."""
    return random.Random(f"{seed}/{subject}/{batch}")


def subjects_of(registry: str) -> list[Subject]:
    """Give the subjects that a module lists."""
    subjects: list[Subject] = importlib.import_module(registry).SUBJECTS
    return subjects


def serve(registry: str, seed: int, connection: Connection[Any, Any]) -> None:
    """Do what comes through the pipe until it is closed."""
    subjects = subjects_of(registry)
    # Ctrl-C comes to all processes of a terminal; the one that keeps the ledger decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    last: Subject | None = None
    try:
        while True:
            work: Work = connection.recv()
            subject = subjects[work.subject]
            if last is not None and last is not subject:
                last.stop()
            last = subject
            try:
                outcome = subject.run(seeded(seed, subject.name, work.batch), work.count, work.batch)
            except Exception:
                outcome = Outcome(work.count, 0.0, [f"# the check itself fails\n# {traceback.format_exc()}"])
            connection.send(outcome)
    except (EOFError, BrokenPipeError):
        pass
    finally:
        if last is not None:
            last.stop()


class Pool:
    """So many processes; `outcomes` gives the results of a sequence of work as they come."""

    def __init__(self, registry: str, seed: int, jobs: int) -> None:
        self._registry, self._seed, self._jobs = registry, seed, jobs
        self._processes: dict[Connection[Any, Any], Any] = {}

    def outcomes(self, works: Iterator[Work]) -> Iterator[tuple[Work, Outcome]]:
        busy: dict[Connection[Any, Any], Work] = {}
        for _ in range(self._jobs):
            self._give(works, self._new(), busy)
        while busy:
            for connection in wait(list(busy)):
                assert isinstance(connection, multiprocessing.connection.Connection)
                work = busy.pop(connection)
                try:
                    outcome: Outcome = connection.recv()
                except EOFError:
                    connection = self._after_death(connection)
                    outcome = Outcome(work.count, 0.0, [self._obituary(work)])
                self._give(works, connection, busy)
                yield work, outcome

    def _give(self, works: Iterator[Work], connection: Connection[Any, Any], busy: dict[Any, Work]) -> None:
        work = next(works, None)
        if work is not None:
            connection.send(work)
            busy[connection] = work

    def _new(self) -> Connection[Any, Any]:
        ours, theirs = SPAWN.Pipe()
        process = SPAWN.Process(target=serve, args=(self._registry, self._seed, theirs))
        process.start()
        theirs.close()
        self._processes[ours] = process
        return ours

    def _after_death(self, connection: Connection[Any, Any]) -> Connection[Any, Any]:
        self._processes.pop(connection).join()
        connection.close()
        return self._new()

    def _obituary(self, work: Work) -> str:
        return (
            f"# the process died in batch {work.batch}: one of its cases kills it\n"
            f"from tests.prove.pool import seeded, subjects_of\n\n"
            f"subject = subjects_of({self._registry!r})[{work.subject}]\n"
            f"subject.run(seeded({self._seed}, subject.name, {work.batch}), {work.count}, {work.batch})\n"
        )

    def close(self, kill: bool = False) -> None:
        """End the processes, once they have done what they are at, or now."""
        for connection, process in self._processes.items():
            connection.close()
            if kill:
                process.kill()
        for process in self._processes.values():
            process.join()
        self._processes.clear()
