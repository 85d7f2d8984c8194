"""Evaluates expressions with the frameworks that they import; the protocol is `worker`'s.

A case is a list of lines of Python, of which the last is an expression: its value is the answer, or, if it raises,
`("raised", the exception's type)`. JAX has eight devices, Keras the numpy backend.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import numpy as np

from tests.oracle.worker import serve


def answer(lines: list[str]) -> Any:
    names: dict[str, Any] = {"np": np}
    exec("\n".join(lines[:-1]), names)
    try:
        return eval(lines[-1], names)
    except Exception as error:
        return ("raised", type(error).__name__)


def version() -> str:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["KERAS_BACKEND"] = "numpy"
    warnings.simplefilter("ignore")
    return str(np.__version__)


if __name__ == "__main__":
    serve(version, answer)
