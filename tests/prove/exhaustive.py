"""Everything small, in Rust: the ignored tests of `tests/exhaustive*.rs`, each cut into parts of some seconds."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import time
from functools import lru_cache, partial

from tests.oracle.worker import ROOT

from .subject import Outcome, Subject

PARTS = 100


@lru_cache
def executable(test: str) -> str:
    """Build a test of Cargo's as `make test` does, and say where it is."""
    command = ["cargo", "test", "--quiet", "--no-run", "--message-format=json", "--test", test]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    for line in built.stdout.splitlines():
        message = json.loads(line)
        if message.get("target", {}).get("name") == test and message.get("executable"):
            return str(message["executable"])
    raise LookupError(f"cargo does not build the test {test}: {built.stderr}")


def run(test: str, _rng: random.Random, _count: int, batch: int) -> Outcome:
    """Do one part; the cases are as many as the test counts."""
    start = time.perf_counter()
    part = f"{batch}/{PARTS}"
    done = subprocess.run(
        [executable(test), "--ignored", "--nocapture"],
        env={**os.environ, "SHARDWISE_PART": part},
        capture_output=True,
        text=True,
    )
    said = done.stdout + done.stderr
    counted = re.search(r"(\d+) cases", said)
    cases = int(counted.group(1)) if counted else 0
    comment = "".join(f"# {line}\n" for line in said.splitlines())
    code = f"# SHARDWISE_PART={part} cargo test --test {test} -- --ignored --nocapture\n{comment}"
    wrong = done.returncode != 0 or not cases
    return Outcome(cases, time.perf_counter() - start, [code] if wrong else [])


def missing(test: str) -> str | None:
    if shutil.which("cargo") is None:
        return "no cargo"
    executable(test)
    return None


def subject(test: str, operation: str, cases: int) -> Subject:
    """`cases` is what all parts come to."""
    return Subject("lists, in Rust", operation, cases, -(-cases // PARTS), partial(run, test), partial(missing, test))


SUBJECTS = [
    subject("exhaustive", "all small partitions", 10_429_664),
    subject("exhaustive_reshard", "all small reshards", 8_228_223),
]
