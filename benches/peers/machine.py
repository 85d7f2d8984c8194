"""Where and with what the figures are taken."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

from figures import quantity

__all__ = ["caches", "commit", "load", "machine", "versions"]

ROOT = Path(__file__).resolve().parents[2]
#: The packages whose versions are written down, by the name that they are installed under.
PACKAGES = (
    "numpy",
    "jax",
    "tensorflow",
    "tensorflow-cpu",
    "torch",
    "deepspeed",
    "mooncake-transfer-engine",
    "keras",
    "dask",
    "safetensors",
)


def caches(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> str:
    """The sizes of the second- and third-level caches of a core, as Linux says them; empty where nobody does."""
    found = {}
    for cache in sorted(folder.glob("index*")):
        try:
            level, size = ((cache / name).read_text(encoding="ascii").strip() for name in ("level", "size"))
            found[int(level)] = quantity(int(size.removesuffix("K")) * 1024, "B")
        except (OSError, ValueError):
            continue
    return "".join(f", L{level} {size}" for level, size in found.items() if level > 1)


def machine() -> str:
    """The processor, its cores and caches, its system and its Python, in a line."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model}, {cores} cores{caches()}, {platform.system()}, Python {platform.python_version()}"


def load() -> float | None:
    """How many processes wanted to run in the last minute, this one among them; `None` where nobody counts them."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def versions() -> dict[str, str]:
    """The versions of what is installed of `PACKAGES`."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit that is measured, with a `+` if the code is not quite it; empty outside a repository."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "rust", "python", "Cargo.toml", "Cargo.lock", "benches/peers/*.py")
        return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""
