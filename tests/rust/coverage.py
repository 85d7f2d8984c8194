"""Lines and regions of the Rust core that its own tests reach: `python -m tests.rust.coverage`.

The unit tests and the ordinary part of the exhaustive tests, compiled with the compiler's instrumentation, and read by
the `llvm-cov` of the compiler's own LLVM: `rustup component add llvm-tools`, or, say, Debian's package `llvm-22`. The
tests that stand in the files of the core do not count as lines of it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = ROOT / "rust" / "core"
TARGET = ROOT / "target" / "coverage"
TESTS = ["--lib", "--test", "exhaustive", "--test", "exhaustive_reshard"]


def output_of(*command: str | Path) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def find_tool(name: str) -> str | None:
    """A tool of LLVM whose version is the compiler's; another does not read the profiles that it writes."""
    version = re.search(r"LLVM version: (\d+)", output_of("rustc", "-vV"))
    major = version[1] if version else ""
    own = Path(output_of("rustc", "--print", "sysroot").strip()).glob(f"lib/rustlib/*/bin/{name}")
    for found in (*map(str, own), shutil.which(f"{name}-{major}"), shutil.which(name)):
        if found and f"version {major}." in output_of(found, "--version"):
            return found
    print(f"The core is not measured: {name} of LLVM {major} is not installed.")
    print(f"`rustup component add llvm-tools` brings it, or your system's package llvm-{major}.")
    return None


def run_tests() -> list[str]:
    """Run the tests, which write profiles, and give their programs."""
    shutil.rmtree(TARGET / "profiles", ignore_errors=True)
    environment = os.environ | {
        "CARGO_TARGET_DIR": str(TARGET),
        "RUSTFLAGS": "-Cinstrument-coverage",
        "LLVM_PROFILE_FILE": str(TARGET / "profiles" / "%p-%m.profraw"),
    }
    command = ["cargo", "test", "--quiet", *TESTS]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    command += ["--no-run", "--message-format", "json"]
    built = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    messages = map(json.loads, built.stdout.splitlines())
    return [message["executable"] for message in messages if message.get("executable")]


def first_test_line(path: Path) -> int:
    """Where the tests in a file of the core begin, which is at its end."""
    lines = path.read_text("utf-8").splitlines()
    return next((number for number, line in enumerate(lines, 1) if line == "mod tests {"), len(lines) + 1)


def counts_of_lines(cov: str, profile: Path, programs: list[str]) -> dict[Path, dict[int, int]]:
    """How often each line of each file ran."""
    objects = [word for program in programs[1:] for word in ("--object", program)]
    text = output_of(cov, "export", "--format=lcov", f"--instr-profile={profile}", programs[0], *objects)
    found: dict[Path, dict[int, int]] = {}
    path, end = Path(), 0
    for line in text.splitlines():
        kind, _, rest = line.partition(":")
        if kind == "SF":
            path = Path(rest)
            ours = path.is_relative_to(CORE) and not {"tests", "tests.rs"} & set(path.relative_to(CORE).parts)
            end = first_test_line(path) if ours else 0
        elif kind == "DA":
            number, count = map(int, rest.split(",")[:2])
            if number < end:
                lines = found.setdefault(path.relative_to(CORE), {})
                lines[number] = max(count, lines.get(number, 0))
    return found


def main() -> int:
    """Print a line for each file, with the lines that nothing reached."""
    profdata, cov = find_tool("llvm-profdata"), find_tool("llvm-cov")
    if profdata is None or cov is None:
        return 0
    programs = run_tests()
    profile = TARGET / "core.profdata"
    output_of(profdata, "merge", "--sparse", "-o", profile, *(TARGET / "profiles").iterdir())
    files = counts_of_lines(cov, profile, programs)
    all_lines = all_missed = 0
    for path, lines in sorted(files.items()):
        missed = [number for number, count in sorted(lines.items()) if count == 0]
        all_lines, all_missed = all_lines + len(lines), all_missed + len(missed)
        share = 100 * (len(lines) - len(missed)) / len(lines)
        print(f"{path!s:32} {len(lines):5} {len(missed):5} {share:6.1f}%  {', '.join(map(str, missed))}")
    print(f"{'TOTAL':32} {all_lines:5} {all_missed:5} {100 * (all_lines - all_missed) / all_lines:6.1f}%")
    return 0


if __name__ == "__main__":
    sys.exit(main())
