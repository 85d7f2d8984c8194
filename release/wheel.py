"""Build the wheel of this platform, check it, install it where there is no Rust, and use it.

python -m release.wheel [FOLDER]       # the wheel and the sdist go into dist/ if no folder is given

One wheel serves every CPython from 3.10 on; a free-threaded Python, which has no stable interface, needs its own. On
Linux it is linked by zig against the symbols of glibc 2.17, so that it runs wherever a manylinux2014 wheel may. Needs
Rust, and what the dependency group `release` names.
"""

from __future__ import annotations

import re
import shutil
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from unittest import mock
from zipfile import ZipFile

from .checks import faults
from .programs import HERE, ROOT, run, step
from .use import use

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["build", "compress", "remapped"]

SEPARATOR = "\x1f"
STABLE = not sysconfig.get_config_var("Py_GIL_DISABLED")


def remapped(environment: Mapping[str, str], source: Path) -> dict[str, str]:
    """Give the environment in which rustc writes neither the path of the sources nor that of the crates'.

    The other flags are those of the environment; if it has none, those of the sources.
    """
    if "CARGO_ENCODED_RUSTFLAGS" in environment:
        flags = environment["CARGO_ENCODED_RUSTFLAGS"].split(SEPARATOR)
    elif "RUSTFLAGS" in environment:
        flags = environment["RUSTFLAGS"].split()
    else:
        text = (source / ".cargo" / "config.toml").read_text(encoding="utf-8")
        flags = tomllib.loads(text)["build"]["rustflags"]
    cargo = environment.get("CARGO_HOME") or str(Path.home() / ".cargo")
    flags = [*flags, f"--remap-path-prefix={cargo}=/cargo", f"--remap-path-prefix={source}=/shardwise"]
    return {**environment, "CARGO_ENCODED_RUSTFLAGS": SEPARATOR.join(filter(None, flags))}


def build(out: Path) -> Path:
    """Make the sdist, build the wheel from nothing but it, and give the wheel's path."""
    command = ["maturin", "build", "--release", "--locked", "--quiet"]
    command += ["--interpreter", sys.executable, *(["--features", "abi3"] if STABLE else [])]
    if sys.platform == "linux":
        command += ["--zig", "--compatibility", "manylinux2014"]
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "made")
        step("Making the sdist")
        run(["maturin", "sdist", "--out", str(made)])
        [sdist] = made.iterdir()
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        source = Path(folder, sdist.name.removesuffix(".tar.gz"))
        # Beside other builds, which stay as they are.
        target = ["--target-dir", str(ROOT / "target" / "wheel")]
        step("Building the wheel from it, optimised (two to four minutes the first time)")
        run([*command, *target, "--out", str(made)], remapped(HERE, source), source)
        [wheel] = made.glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(sdist, out / sdist.name)
        step("Compressing it once more (half a minute)")
        compress(wheel, out / wheel.name)
        return out / wheel.name


class _Zopfli:
    """What `zlib.compressobj` gives, of the compressor that takes longest and makes the smallest deflate streams."""

    def __init__(self, *_: object) -> None:
        self._content = bytearray()

    def compress(self, data: bytes) -> bytes:
        self._content += data
        return b""

    def flush(self) -> bytes:
        from zopfli import zlib

        # As many blocks as make it smaller, each with codes of its own, where the default is 15 in a million bytes.
        made: bytes = zlib.compress(bytes(self._content), blocksplittingmax=0)
        return made[2:-4]  # A zip file has neither zlib's header nor its checksum.


def compress(wheel: Path, out: Path) -> None:
    """Write the files of a wheel once more, 3 % smaller, for each of the many that load it."""
    with ZipFile(wheel) as source, mock.patch("zlib.compressobj", _Zopfli), ZipFile(out, "w") as target:
        for info in source.infolist():
            target.writestr(info, source.read(info))


def audit(wheel: Path) -> None:
    """Look at the file, and have those look at it who know what the tags in its name promise."""
    if found := faults(wheel):
        sys.exit("\n".join(found))
    if sys.platform == "linux":
        shown = run(["auditwheel", "show", str(wheel)])
        seen = re.search(r'platform tag:\s+"(\w+)"', shown)
        if seen is None or seen[1] not in wheel.stem.split("-")[-1].split("."):
            sys.exit(f"auditwheel sees another platform than {wheel.name}:\n{shown}")
    if STABLE:
        run(["abi3audit", "--strict", str(wheel)])


if __name__ == "__main__":
    made = build(Path(sys.argv[1] if len(sys.argv) > 1 else "dist").resolve())
    step("Looking at what is in it")
    audit(made)
    step("Installing it into a new environment, and using it there (half a minute)")
    use(made)
    print(f"{made.name}: {made.stat().st_size:,} bytes")
