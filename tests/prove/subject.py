"""What is proven: subjects, each a kind of random cases that are compared with one oracle."""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol


class Case(Protocol):
    """Everything that one comparison depends on."""

    def snippet(self) -> str:
        """Give Python code that makes the objects in question."""

    def simpler(self) -> Iterator[Case]:
        """Give cases like this one with less in them, the simplest first."""


class Mismatch(Exception):
    """The two sides differ; the message says in what."""


def same(what: str, ours: Any, theirs: Any) -> None:
    """Raise `Mismatch` unless the two are equal."""
    if ours != theirs:
        raise Mismatch(f"{what}: ours {ours!r}, expected {theirs!r}")


@dataclass
class Outcome:
    """What one batch of cases has shown."""

    cases: int = 0
    seconds: float = 0.0
    #: Code that shows what is wrong, one text per mismatch.
    mismatches: list[str] = field(default_factory=list)


#: Compares cases with the oracle, one `Mismatch` or other exception, or None, for each.
Check = Callable[[list[Any]], Iterator[BaseException | None]]


@dataclass(frozen=True)
class Subject:
    """One row of the table."""

    oracle: str
    operation: str
    #: How many cases `make prove` goes through.
    goal: int
    #: How many of them make one batch: some seconds of work.
    batch: int
    run: Callable[[random.Random, int, int], Outcome]
    #: Why it cannot run here, or None.
    missing: Callable[[], str | None] = lambda: None
    #: Ends what `run` has started.
    stop: Callable[[], None] = lambda: None

    @property
    def name(self) -> str:
        return f"{self.oracle}: {self.operation}"


def one_by_one(check: Callable[[Any], None]) -> Check:
    """Make a check of many cases out of a function that raises if one is wrong."""

    def checked(cases: list[Any]) -> Iterator[BaseException | None]:
        for case in cases:
            yield _raised(check, case)

    return checked


def answered(answers: Callable[[list[Any]], list[Any]], compare: Callable[[Any, Any], None]) -> Check:
    """Make a check out of a function that compares a case with its answer, where `answers` gives those of many."""

    def checked(cases: list[Any]) -> Iterator[BaseException | None]:
        for case, answer in zip(cases, answers(cases), strict=True):
            yield _raised(compare, case, answer)

    return checked


def _raised(check: Callable[..., None], *arguments: Any) -> BaseException | None:
    try:
        check(*arguments)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        return error
    return None


def sampled(make: Callable[[random.Random], Case], check: Check) -> Callable[[random.Random, int, int], Outcome]:
    """Make the `run` of a subject: `make` draws a case, `check` compares a list of them."""

    def run(rng: random.Random, count: int, _batch: int) -> Outcome:
        start = time.perf_counter()
        cases = [make(rng) for _ in range(count)]
        found = [(case, error) for case, error in zip(cases, check(cases), strict=True) if error is not None]
        # A fault that everything shows need not be shown by everything.
        mismatches = [told(*smallest(case, error, check)) for case, error in found[:3]]
        mismatches += [told(case, error) for case, error in found[3:]]
        return Outcome(count, time.perf_counter() - start, mismatches)

    return run


def smallest(case: Case, error: BaseException, check: Check, tries: int = 300) -> tuple[Case, BaseException]:
    """Go from a case that is wrong to simpler ones that are, as long as there are any."""
    candidates = case.simpler()
    while tries > 0 and (candidate := next(candidates, None)) is not None:
        tries -= 1
        again = next(check([candidate]))
        if again is not None:
            case, error, candidates = candidate, again, candidate.simpler()
    return case, error


def told(case: Case, error: BaseException) -> str:
    """Write the case down as code, and what is wrong with it as a comment."""
    text = str(error) if isinstance(error, Mismatch) else "".join(traceback.format_exception(error))
    comment = "".join(f"# {line}\n" for line in text.splitlines())
    return f"{case.snippet()}\n{comment}"
