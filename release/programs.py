"""Programs that are run, with those of this environment found first."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["HERE", "ROOT", "run", "step"]

ROOT = Path(__file__).parent.parent
HERE = {**os.environ, "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))}


def step(what: str) -> None:
    """Say what comes next, and about how long it takes where that is long."""
    print(f"{what} …", flush=True)


def run(command: list[str], environment: Mapping[str, str] = HERE, folder: Path = ROOT) -> str:
    """Run a program; give what it says, and end with that if it fails."""
    program = shutil.which(command[0], path=environment["PATH"])
    if program is None:
        sys.exit(f"{command[0]} is missing: pip install --group release")
    done = subprocess.run(
        [program, *command[1:]], cwd=folder, env=environment, capture_output=True, text=True, encoding="utf-8"
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout
