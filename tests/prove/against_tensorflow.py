"""Text, bytes and every method of DTensor's meshes and layouts, in TensorFlow."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardwise.dtensor import Layout
from tests.oracle.dtensor_cases import check as compare
from tests.oracle.dtensor_cases import random_case

from .frameworks import Framework
from .subject import Mismatch, Subject, sampled

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


def check(cases: list[DTensorCase]) -> Iterator[BaseException | None]:
    answers = TENSORFLOW.ask([case.arguments for case in cases])
    for case, answer in zip(cases, answers, strict=True):
        try:
            compare(case.arguments, case.layout, answer)
        except AssertionError as error:
            yield Mismatch(f"{error}: TensorFlow answers {answer}")
        except Exception as error:
            yield error
        else:
            yield None


SUBJECTS = [
    Subject(
        "TensorFlow", "text, bytes, methods", 100_000, 500, sampled(draw, check), TENSORFLOW.missing, TENSORFLOW.stop
    )
]
