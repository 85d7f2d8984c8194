"""Text, bytes and every method of DTensor's meshes and layouts, in TensorFlow."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardwise.dtensor import Layout
from tests.oracle.dtensor_cases import check, random_case

from .frameworks import Framework
from .subject import Mismatch, Subject, answered, sampled

TENSORFLOW = Framework("tensorflow", "tests.oracle.tensorflow_worker")


@dataclass(frozen=True)
class DTensorCase:
    """TensorFlow's arguments, and the layout that is made of them."""

    arguments: dict[str, Any]
    layout: Layout

    def snippet(self) -> str:
        text = self.layout.to_string()
        return f"from shardwise.dtensor import Layout\n\nlayout = Layout.from_string({text!r})\ncase = {self.arguments}"

    def simpler(self) -> Iterator[DTensorCase]:
        return iter(())


def draw(rng: random.Random) -> DTensorCase:
    return DTensorCase(*random_case(rng))


def compare(case: DTensorCase, answer: dict[str, Any]) -> None:
    try:
        check(case.arguments, case.layout, answer)
    except AssertionError as error:
        raise Mismatch(f"{error}: TensorFlow answers {answer}") from None


def answers(cases: list[DTensorCase]) -> list[Any]:
    return TENSORFLOW.ask([case.arguments for case in cases])


SUBJECTS = [
    Subject(
        "TensorFlow",
        "text, bytes, methods",
        100_000,
        500,
        sampled(draw, answered(answers, compare)),
        TENSORFLOW.missing,
        TENSORFLOW.stop,
    )
]
