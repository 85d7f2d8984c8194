"""A browser to look at pages with: headless Chromium, spoken to through two pipes.

Nothing but the browser itself is needed. Where there is none, tests that ask for it are skipped.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
#: A browser that says nothing for so many seconds is broken, and its tests fail rather than wait for ever.
_PATIENCE = 300
#: The browser, if there is one.
PROGRAM = next(filter(None, map(shutil.which, _NAMES)), None)


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """Start a browser with a page of its own, and end it."""
    if PROGRAM is None:
        pytest.skip("there is no Chromium")
    # As the browser has it, it reads from 3 and writes to 4; here the ends have numbers that are out of their way.
    pipes = [os.pipe() for _ in range(2)]
    (read, write), (answers, said) = (tuple(fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in pipe) for pipe in pipes)
    for end in (end for pipe in pipes for end in pipe):
        os.close(end)
    options = ["--headless", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    if os.geteuid() == 0:
        options.append("--no-sandbox")
    # The new process takes them itself: a function that runs between fork and exec is unsafe beside threads.
    take = (
        "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
        "os.execv(sys.argv[3], sys.argv[3:])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", take, str(read), str(said), PROGRAM, *options],
        pass_fds=(read, said),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read)
    os.close(said)
    try:
        yield Page(write, answers)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        process.wait()
        os.close(write)
        os.close(answers)


class Page:
    """A page of the browser."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._number, self._rest = write, read, 0, b""
        self._session: dict[str, str] = {}
        #: What it asked for, by any means.
        self.requests: list[str] = []
        #: What went wrong in its scripts.
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Ask for something and give the answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **self._session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _next(self) -> Any:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], _PATIENCE)
            piece = os.read(self._read, 1 << 20) if ready else b""
            assert piece, "the browser says nothing"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        found = json.loads(message)
        if found.get("method") == "Network.requestWillBeSent":
            self.requests.append(found["params"]["request"]["url"])
        elif found.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.complaints.append(json.dumps(found["params"]))
        return found

    def open(self, path: Path, width: int = 1280, height: int = 900) -> None:
        """Load a file, in a window of this size."""
        self.requests.clear()
        self.complaints.clear()
        self.resize(width, height)
        self.call("Page.navigate", url=path.as_uri())
        end = time.monotonic() + _PATIENCE
        while self.run("document.readyState") != "complete" or self.run("location.href") != path.as_uri():
            assert time.monotonic() < end, "the page does not load"

    def resize(self, width: int, height: int = 900) -> None:
        """Give the window another size, in CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def run(self, script: str) -> Any:
        """Give the value of an expression in JavaScript."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, text: str = "", shift: bool = False) -> None:
        """Press and release a key: `Tab`, `Enter`, or a character, which is its own text."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else text)
        about = {
            "key": key,
            "windowsVirtualKeyCode": codes.get(key, ord(key.upper()) if len(key) == 1 and key.isalnum() else 0),
            "modifiers": 8 * shift,
        }
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **about)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def type(self, text: str) -> None:
        """Type a text."""
        for letter in text:
            self.press(letter)

    def save_picture(self, path: Path) -> None:
        """Write what is in the window to a PNG file."""
        import base64

        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
