"""The licences of the crates that are linked into the compiled module, as one file that goes into every wheel.

python -m release.licences          # writes THIRD-PARTY-LICENSES
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["FILE", "linked_crates"]

ROOT = Path(__file__).parent.parent
FILE = ROOT / "THIRD-PARTY-LICENSES"

HEADER = """\
The compiled module of shardwise contains code of the crates below, some of them on some platforms only, and of Rust's
standard library (MIT OR Apache-2.0, The Rust Project Contributors, https://github.com/rust-lang/rust). Where there is
a choice the code is taken under the MIT licence. `python -m release.licences` writes this file.
"""

# Import libraries of Windows, published without the text of their licence.
MICROSOFT = ("windows-link", "windows-sys")


def linked_crates() -> list[tuple[str, str]]:
    """Name and version of each crate that is linked in on any platform, except those of shardwise itself."""
    command = ["cargo", "tree", "--locked", "--package", "shardwise-module", "--target", "all", "--prefix", "none"]
    command += ["--edges", "normal,no-proc-macro", "--format", "{p}"]
    tree = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found = {(name, version) for name, version in re.findall(r"^(\S+) v(\S+)", tree, re.MULTILINE)}
    return sorted(crate for crate in found if not crate[0].startswith("shardwise-"))


def texts_of(package: dict[str, Any], mit: str) -> list[str]:
    """The texts that go with a crate: that of MIT or what else there is, and those of parts of it."""
    folder = Path(package["manifest_path"]).parent
    own = [file for name in ("LICENSE-MIT", "LICENSE", "LICENSE.txt", "LICENSE.md") if (file := folder / name).exists()]
    if "MIT" in package["license"] and package["name"] in MICROSOFT:
        return ["Copyright (c) Microsoft Corporation.\n\n" + mit]
    if not own:
        raise SystemExit(f"{folder} has no file with its licence, {package['license']}")
    files = [own[0], *sorted(folder.rglob("LICENSE-UNICODE*"))]
    return [file.read_text(encoding="utf-8").strip() for file in files]


def page() -> str:
    """All of the file."""
    command = ["cargo", "metadata", "--locked", "--format-version", "1"]
    metadata = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)
    packages = {(package["name"], package["version"]): package for package in metadata["packages"]}
    crates = linked_crates()
    anyone = next(text for crate in crates for text in texts_of(packages[crate], "") if "Permission is" in text)
    mit = anyone[anyone.index("Permission is") :]
    users: dict[str, list[str]] = {}
    for crate in crates:
        for text in texts_of(packages[crate], mit):
            users.setdefault(text, []).append(" ".join(crate))
    lines = [f"{name} {version}: {packages[name, version]['license']}" for name, version in crates]
    parts = [HEADER, "\n".join(lines) + "\n"]
    parts += [f"{'=' * 80}\n{', '.join(names)}\n{'=' * 80}\n\n{text}\n" for text, names in users.items()]
    return "\n".join(parts)


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
    print(f"{FILE.name}: {len(linked_crates())} crates")
