"""What a wheel must be and must hold, read from the file alone.

python -m release.checks WHEEL...        # says what is wrong, and ends with status 1 if anything is
"""

from __future__ import annotations

import os
import re
import sys
import zipfile
from pathlib import Path

__all__ = ["MOST_BYTES", "faults"]

ROOT = Path(__file__).parent.parent
#: A wheel that is larger is looked at before this number is raised. Half is the compiled module.
MOST_BYTES = 24 * 2**17

# Folders of people, and of what builds on hosted machines.
_HOMES = re.compile(rb"(?:/home/|/root/|/Users/|/github/|/runner/|[A-Za-z]:[\\/](?:Users|a)[\\/])[\w.\\/-]*")


def faults(wheel: Path) -> list[str]:
    """Give a line for each thing that is wrong with a wheel."""
    found = []
    size = wheel.stat().st_size
    if size > MOST_BYTES:
        found.append(f"{wheel.name} has {size:,} bytes, {MOST_BYTES:,} at most")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        for name in sorted(names):
            found += [f"{name} holds the path {path}" for path in _paths(archive.read(name))]
    wanted = {path.relative_to(ROOT / "python").as_posix() for path in _sources()}
    found += [f"{name} is missing" for name in sorted(wanted - names)]
    modules = [name for name in names if re.fullmatch(r"shardwise/_core[^/]*\.(so|pyd)", name)]
    if len(modules) != 1:
        found.append(f"there must be one compiled module, got {sorted(modules)}")
    for text in ("LICENSE", "THIRD-PARTY-LICENSES"):
        if not any(name.endswith(f".dist-info/licenses/{text}") for name in names):
            found.append(f"{text} is missing")
    foreign = {name for name in names if not re.match(r"shardwise(/|-[^/]*\.dist-info/)", name)}
    found += [f"{name} does not belong there" for name in sorted(foreign)]
    return found


def _sources() -> list[Path]:
    package = ROOT / "python" / "shardwise"
    kinds = (".py", ".pyi", ".toml", ".typed")
    return [path for path in package.rglob("*") if path.suffix in kinds or path.name == "py.typed"]


def _paths(data: bytes) -> list[str]:
    """Paths of the machine that built it: of this checkout, of this person, or of anybody's home."""
    own = {str(ROOT), str(Path.home()), os.environ.get("CARGO_HOME", ""), os.environ.get("RUSTUP_HOME", "")}
    found = {path for path in own if len(path) > 1 and path.encode() in data}
    found |= {match[0].decode("utf-8", "replace")[:80] for match in _HOMES.finditer(data)}
    return sorted(found)[:5]


if __name__ == "__main__":
    complaints = [fault for wheel in sys.argv[1:] for fault in faults(Path(wheel))]
    sys.exit("\n".join(complaints) or None)
