"""The workers of frameworks: one per process of the pool, started when first needed."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from typing import Any

from tests.oracle.worker import Worker


class Framework:
    """A framework in another process; what is missing is said, not raised."""

    def __init__(self, package: str, module: str, env: Mapping[str, str] | None = None, python: str = "") -> None:
        self._package, self._module, self._env = package, module, env
        #: The environment variable that names another Python, if one may.
        self._python = python
        self._worker: Worker | None = None

    def missing(self) -> str | None:
        """Say so if it cannot be asked: it is started once to see."""
        python = os.environ.get(self._python, "") if self._python else ""
        if not python and importlib.util.find_spec(self._package) is None:
            return "not installed"
        if python:
            worker = self._made()
            try:
                worker.start()
            except (EOFError, OSError):
                return f"not installed in {python}"
            finally:
                worker.stop()
        return None

    def ask(self, batch: list[Any]) -> list[Any]:
        self._worker = self._worker or self._made()
        return self._worker.ask(batch)

    def _made(self) -> Worker:
        python = os.environ.get(self._python, "") if self._python else ""
        return Worker(self._module, python or sys.executable, self._env)

    def stop(self) -> None:
        if self._worker is not None:
            self._worker.stop()
            self._worker = None
