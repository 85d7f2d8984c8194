"""Time shardwise beside its peers, and write docs/benchmarks.md, that page in brief, and charts from what they took.

Run: `python benches/peers/run.py [--only core,reshard] [--quick] [--allow-missing torch]`

Each part (`bench_*.py`) runs in a process of its own and leaves its rows in benches/peers/results/. A part whose peer
is not installed does not run, its last results stay, and the exit status is 1, unless the peer may be missing. Results
of another processor are kept beside the new ones, in a folder of results/elsewhere/, and the page shows all.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import charts
from machine import ROOT, commit, load, machine, versions
from page import (
    ELSEWHERE,
    HERE,
    PARTS,
    Part,
    Result,
    folder_name,
    processor,
    read_elsewhere,
    read_results,
    render,
    render_brief,
)


def names(text: str) -> list[str]:
    """A list of names with commas between them."""
    return [name for name in text.split(",") if name]


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=names, default=[], metavar="PARTS", help=", ".join(part.name for part in PARTS))
    parser.add_argument("--quick", action="store_true", help="smaller work; writes to target/benchmarks, not to docs")
    parser.add_argument("--allow-missing", type=names, default=[], metavar="PEERS", help="peers that need not be there")
    parser.add_argument("--write-only", action="store_true", help="measure nothing, write the pages from the results")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail unless the pages are as they should be"
    )
    chosen = parser.parse_args()
    unknown = set(chosen.only) - {part.name for part in PARTS}
    if unknown:
        parser.error(f"--only: no part is called {', '.join(sorted(unknown))}")
    return chosen


def measure(part: Part, results: Path, quick: bool) -> bool:
    """Run one part, and keep what it says if it ends well."""
    print(f"{part.name} (load {load()})", flush=True)
    start, load_before = time.perf_counter(), load()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.json")
        command = [sys.executable, str(part.script), "--json", str(file), *(["--quick"] if quick else [])]
        if subprocess.run(command).returncode:
            print(f"{part.name} failed; its last results stay", file=sys.stderr)
            return False
        rows = file.read_text(encoding="utf-8")
    run = {
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "load": [load_before, load()],
        "seconds": round(time.perf_counter() - start, 1),
    }
    keep(results, f"{part.name}.json", f"{json.dumps(run, ensure_ascii=False)}\n{rows}")
    return True


def keep(results: Path, name: str, text: str) -> None:
    """Write a part's results; those of another processor move to its folder, and older ones of this one are gone."""
    file, here = results / name, folder_name(processor(Result.from_text(text)))
    results.mkdir(parents=True, exist_ok=True)
    if file.exists():
        there = folder_name(processor(Result.from_text(file.read_text(encoding="utf-8"))))
        if there != here:
            folder = results / ELSEWHERE / there
            folder.mkdir(parents=True, exist_ok=True)
            file.replace(folder / name)
    file.write_text(text, encoding="utf-8")
    (results / ELSEWHERE / here / name).unlink(missing_ok=True)


def filled(stored: Path) -> dict[str, str]:
    """The pages as the results make them, by name."""
    tables, brief = ((HERE / name).read_text(encoding="utf-8") for name in ("template.md", "brief.md"))
    results = read_results(stored)
    return {
        "benchmarks.md": render(tables, results, read_elsewhere(stored)),
        "benchmarks-in-brief.md": render_brief(brief, results),
    }


def main() -> int:
    """Measure, write, and say what is missing."""
    chosen = arguments()
    out = ROOT / "target" / "benchmarks" if chosen.quick else HERE.parents[1] / "docs"
    stored = out / "results" if chosen.quick else HERE / "results"
    if chosen.check:
        results = read_results(stored)
        wrong = [out / name for name, text in filled(stored).items() if (out / name).read_text("utf-8") != text]
        wrong += charts.stale(results, out / "pictures")
        for path in wrong:
            print(f"{path} is not what the results say; write it: python benches/peers/run.py --write-only")
        return 1 if wrong else 0
    missing, failed = [], []
    for part in () if chosen.write_only else PARTS:
        if chosen.only and part.name not in chosen.only:
            continue
        absent = [peer for peer in part.peers if importlib.util.find_spec(peer) is None]
        if absent:
            print(f"{part.name}: not run, for {', '.join(absent)} is not installed", flush=True)
            missing += absent
        elif not measure(part, stored, chosen.quick):
            failed.append(part.name)
    results = read_results(stored)
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in filled(stored).items():
        written.append(out / name)
        written[-1].write_text(text, encoding="utf-8")
    written += charts.draw(results, out / "pictures")
    print("written:", *(path.relative_to(ROOT) for path in written))
    needed = sorted(set(missing) - set(chosen.allow_missing))
    if needed:
        print(f"not compared with {', '.join(needed)}: not installed", file=sys.stderr)
    return 1 if needed or failed else 0


if __name__ == "__main__":
    sys.exit(main())
