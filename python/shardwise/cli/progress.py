"""Progress on the standard error: bytes, rate and time left."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .._text import bytes_text

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["ShownProgress"]

#: Seconds between lines where they follow one another, and between changes of one line.
_EVERY_LINE, _EVERY_CHANGE = 5.0, 0.2


class ShownProgress:
    """Shows progress: a context that gives the function to call with the bytes done and the bytes in all.

    On a terminal it is a bar if rich is installed, else a line that is rewritten in place. Elsewhere it is nothing, or,
    if asked for, a line now and then.

    Args:
        quiet: show nothing.
        asked: show it even where there is no terminal.
    """

    def __init__(self, quiet: bool, asked: bool = False) -> None:
        self._terminal = sys.stderr is not None and sys.stderr.isatty()
        self._silent = quiet or sys.stderr is None or not (asked or self._terminal)
        self._start = self._last = time.monotonic()
        self._shown = False
        self._bar: Progress | None = None
        self._task: Any = None

    def __enter__(self) -> Callable[[int, int], None] | None:
        if self._silent:
            return None
        if self._terminal and (bar := _rich_bar()) is not None:
            self._bar = bar
            self._task = bar.add_task("", total=None)
            bar.start()
        return self._show

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._shown and self._terminal:
            print(file=sys.stderr)

    def _show(self, done: int, total: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
            return
        now = time.monotonic()
        if now - self._last < (_EVERY_CHANGE if self._terminal else _EVERY_LINE) and (done < total or self._terminal):
            return
        self._last, self._shown = now, True
        rate = done / max(now - self._start, 1e-9)
        left = f", {(total - done) / rate:.0f} s left" if rate else ""
        text = f"{bytes_text(done)} of {bytes_text(total)}, {bytes_text(int(rate))}/s{left}"
        print(
            f"\r{text:<60}" if self._terminal else text, end="" if self._terminal else "\n", file=sys.stderr, flush=True
        )


def _rich_bar() -> "Progress | None":
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
    except ImportError:
        return None
    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(file=sys.stderr), transient=True)
