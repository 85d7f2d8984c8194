"""What has been done already: one line per batch in a file under target/, which outlives any kill."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.oracle.worker import ROOT

from .subject import Outcome

FOLDER = ROOT / "target" / "prove"
#: What the answers depend on: another version of any of these has proven nothing yet.
SOURCES = (
    *("python/shardwise/**/*.py", "python/shardwise/*.so", "python/shardwise/*.pyd", "rust/core/**/*.rs"),
    *("tests/oracle/*.py", "tests/prove/*.py", "tests/**/*.rs"),
)


def code_version(root: Path = ROOT) -> str:
    """Give a digest of the package as it is built, and of the oracles."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in SOURCES for path in root.glob(pattern)}):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


class Ledger:
    """The outcomes of one run, which is named by seed, scale and version of the code."""

    def __init__(self, seed: int, scale: float, version: str, folder: Path = FOLDER) -> None:
        self.seed, self.scale, self.version = seed, scale, version
        self.folder = folder
        self.path = folder / f"{version}-{scale}-{seed}.jsonl"

    @classmethod
    def unfinished(cls, scale: float, version: str, folder: Path = FOLDER) -> Ledger | None:
        """Find the newest run of this scale and version that has not come to its end."""
        paths = sorted(folder.glob(f"{version}-{scale}-*.jsonl"), key=lambda path: path.stat().st_mtime)
        for path in reversed(paths):
            ledger = cls(int(path.stem.rpartition("-")[2]), scale, version, folder)
            if not any("finished" in line for line in ledger._lines()):
                return ledger
        return None

    def start(self, resume: bool) -> dict[tuple[str, int], Outcome]:
        """Give what has been done, by subject and batch; nothing, and an empty file, unless `resume`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not resume:
            self.path.unlink(missing_ok=True)
        self.path.touch()
        done = {}
        for line in self._lines():
            if "subject" in line:
                done[line["subject"], line["batch"]] = Outcome(line["cases"], line["seconds"], line["mismatches"])
        return done

    def add(self, subject: str, batch: int, outcome: Outcome) -> None:
        self._write({"subject": subject, "batch": batch, **asdict(outcome)})

    def finish(self) -> None:
        self._write({"finished": True})

    def save_mismatch(self, subject: str, batch: int, number: int, text: str) -> Path:
        name = "".join(letter if letter.isalnum() else "_" for letter in subject)
        path = self.folder / f"{name}-{self.seed}-{batch}-{number}.py"
        path.write_text(f"# {subject}, seed {self.seed}\n{text}", encoding="utf-8")
        return path

    def _write(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _lines(self) -> Iterator[dict[str, Any]]:
        for text in self.path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(text)
            except ValueError:
                # A line that a kill has cut short; its batch is done again.
                continue
