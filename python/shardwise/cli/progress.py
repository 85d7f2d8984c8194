"""The progress of long runs."""

import sys
import time
from collections.abc import Callable

from .._text import bytes_text

__all__ = ["Progress"]


class Progress:
    """A line on the standard error, now and then, of the bytes that are done; rewritten in place on a terminal."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._start = self._last = time.monotonic()
        self._shown = False

    def __enter__(self) -> Callable[[int, int], None] | None:
        return None if self._quiet else self._show

    def __exit__(self, *_: object) -> None:
        if self._shown and sys.stderr.isatty():
            print(file=sys.stderr)

    def _show(self, done: int, total: int) -> None:
        now = time.monotonic()
        every = 0.2 if sys.stderr.isatty() else 5.0
        if now - self._last < every:
            return
        self._last, self._shown = now, True
        rate = done / max(now - self._start, 1e-9)
        left = f", {(total - done) / rate:.0f} s left" if rate else ""
        text = f"{bytes_text(done)} of {bytes_text(total)}, {bytes_text(int(rate))}/s{left}"
        print(
            f"\r{text:<60}" if sys.stderr.isatty() else text, end="" if sys.stderr.isatty() else "\n", file=sys.stderr
        )
