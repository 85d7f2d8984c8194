"""Subjects for the tests of the prover itself: one that is right, one that is wrong, one that kills its process."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from .subject import Subject, one_by_one, same, sampled


@dataclass(frozen=True)
class Number:
    value: int

    def snippet(self) -> str:
        return f"value = {self.value}"

    def simpler(self) -> Iterator[Number]:
        for smaller in (self.value // 2, self.value - 1):
            if 0 <= smaller < self.value:
                yield Number(smaller)


def draw(rng: random.Random) -> Number:
    return Number(rng.randrange(1000))


def right(number: Number) -> None:
    time.sleep(0.002)
    same("the number", number.value, number.value)


def wrong(number: Number) -> None:
    same("whether it is below 17", number.value < 17, True)


def deadly(number: Number) -> None:
    if number.value % 2:
        os.kill(os.getpid(), 9)


RIGHT = Subject("nobody", "right", 1_000, 50, sampled(draw, one_by_one(right)))
SUBJECTS = [RIGHT]
