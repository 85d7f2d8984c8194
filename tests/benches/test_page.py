"""The page of the benchmarks is what the committed results render to, and its figures are judged as they should be."""

from __future__ import annotations

import doctest
import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "benches" / "peers"


RUN = {
    "machine": "a processor",
    "versions": {"numpy": "2"},
    "commit": "abc",
    "date": "2026-01-01",
    "load": [0.5, 1.0],
    "seconds": 3.0,
}
ROW = {
    "work": "coordinates",
    "peer": "numpy",
    "ours": 1e-5,
    "theirs": 5e-5,
    "least": 4.0,
    "greatest": 6.0,
    "floor": "fill",
    "floor_takes": 4e-6,
    "goal": {"kind": "ratio", "limit": 6.0},
    "unit": "s",
    "ratio": 5.0,
    "verdict": "missed",
}
POINT = {"curve": "coordinates", "library": "shardwise", "devices": 8, "seconds": 1e-6}


def run(root: Path, option: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "benches" / "peers" / "run.py"), option]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_page_and_the_charts_are_what_the_results_render_to() -> None:
    result = run(ROOT, "--check")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a row and a point that were measured, and the page of them."""
    root = tmp_path_factory.mktemp("repository")
    shutil.copytree(PEERS, root / "benches" / "peers", ignore=shutil.ignore_patterns("results", "__pycache__"))
    results = root / "benches" / "peers" / "results"
    results.mkdir()
    merged = {**ROW, "work": "merging 1 GiB of 8 column shards", "peer": "PyTorch", "goal": None}
    for part, line in (("core", ROW), ("curves", POINT), ("merge", merged)):
        (results / f"{part}.json").write_text(f"{json.dumps(RUN)}\n{json.dumps(line)}\n", encoding="utf-8")
    written = run(root, "--write-only")
    assert written.returncode == 0, written.stderr
    return root


def test_a_row_and_a_point(measured: Path) -> None:
    page = (measured / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert "| coordinates | 10 µs | numpy | 50 µs | **5.0×** (4.0× to 6.0×) | 40% of fill | ≥ 6×, **missed** |" in page
    assert "| coordinates | shardwise | 1 µs |" in page
    assert "Goals measured: 1; met: 0. Missed:\n\n- coordinates, beside numpy: 5.0× (≥ 6× asked)" in page
    assert "2026-01-01, commit abc, 3 s, load 0.5 to 1.0" in page


def test_the_ratios_of_several_machines_stand_side_by_side(measured: Path, tmp_path: Path) -> None:
    shutil.copytree(measured, tmp_path, dirs_exist_ok=True)
    results = tmp_path / "benches" / "peers" / "results"
    unknown = {**ROW, "work": "what this machine has not measured"}
    machines = {"second": [{**ROW, "theirs": 9e-5}, unknown], "third": [{**ROW, "theirs": 2e-5}]}
    for name, rows in machines.items():
        folder = results / "elsewhere" / name
        folder.mkdir(parents=True)
        lines = [{**RUN, "machine": f"the {name}, 2 cores, Linux, Python 3.11", "commit": name[0]}, *rows]
        (folder / "core.json").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    # The one with more parts comes first.
    (results / "elsewhere" / "third" / "floors.json").write_text(
        json.dumps({**RUN, "machine": "the third, 2 cores, Linux, Python 3.12", "commit": "u"}) + "\n", encoding="utf-8"
    )
    assert run(tmp_path, "--write-only").returncode == 0
    page = (tmp_path / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    found = [f"the third, 2 cores, Linux, Python 3.{minor}" for minor in (12, 11)]
    assert f"- Machine 2: {'; '.join(found)}; numpy 2; commit u, t; 0 of 1 goals met." in page
    assert "- Machine 3: the second, 2 cores, Linux, Python 3.11; numpy 2; commit s; 1 of 2 goals met." in page
    assert "| work | compared with | here | machine 2 | machine 3 | goal |" in page
    here, second, third = (f"**{ratio}** (4.0× to 6.0×)" for ratio in ("5.0×", "2.0×", "9.0×"))
    assert f"| coordinates | numpy | {here} | {second} | {third} | ≥ 6× |" in page
    assert "what this machine has not measured" not in page


def test_the_same_processor_with_another_python_is_not_another_machine(measured: Path, tmp_path: Path) -> None:
    shutil.copytree(measured, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "benches" / "peers" / "results" / "elsewhere" / "the same"
    folder.mkdir(parents=True)
    (folder / "core.json").write_text(f"{json.dumps(RUN)}\n{json.dumps(ROW)}\n", encoding="utf-8")
    assert run(tmp_path, "--write-only").returncode == 0
    assert "No other machine is measured yet." in (tmp_path / "docs" / "benchmarks.md").read_text(encoding="utf-8")


def test_the_results_of_a_machine_that_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of another move to its folder; those that are newer replace the ones in a machine's own folder."""
    monkeypatch.syspath_prepend(str(PEERS))
    keep = importlib.import_module("run").keep

    def result(name: str, date: str) -> str:
        return json.dumps({"machine": f"{name}, 2 cores, Linux, Python 3.11", "date": date}) + "\n"

    def found() -> dict[str, str]:
        return {
            str(file.relative_to(tmp_path)): json.loads(file.read_text())["date"] for file in tmp_path.rglob("*.json")
        }

    keep(tmp_path, "core.json", result("A", "1"))
    assert found() == {"core.json": "1"}
    keep(tmp_path, "core.json", result("B(R)", "2"))
    assert found() == {"core.json": "2", "elsewhere/a-2-cores/core.json": "1"}
    keep(tmp_path, "core.json", result("C", "3"))
    keep(tmp_path, "core.json", result("C", "4"))
    others = {"elsewhere/a-2-cores/core.json": "1", "elsewhere/b-r-2-cores/core.json": "2"}
    assert found() == {"core.json": "4", **others}
    keep(tmp_path, "core.json", result("A", "5"))
    assert found() == {"core.json": "5", "elsewhere/b-r-2-cores/core.json": "2", "elsewhere/c-2-cores/core.json": "4"}


@pytest.mark.parametrize(
    "page",
    ["docs/benchmarks.md", "docs/benchmarks-in-brief.md", "docs/pictures/ratios.svg", "docs/pictures/growth.svg"],
)
def test_another_figure_is_noticed(page: str, measured: Path, tmp_path: Path) -> None:
    if page.endswith(".svg"):
        pytest.importorskip("matplotlib")
    shutil.copytree(measured, tmp_path, dirs_exist_ok=True)
    text = (tmp_path / page).read_text(encoding="utf-8")
    pattern = r"(?<=\*\*)\d" if page.endswith(".md") else r"(?<=figures )\w"
    changed = re.sub(pattern, lambda match: "1" if match[0] == "0" else "0", text, count=1)
    assert changed != text
    (tmp_path / page).write_text(changed, encoding="utf-8")
    result = run(tmp_path, "--check")
    assert result.returncode == 1
    assert Path(page).name in result.stdout


def test_the_times_on_other_pages_are_those_of_the_page() -> None:
    """Two digits of the first, and those of the merge as they are."""
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    row = re.search(r"\| boxes of 4,096 devices, one array \| ([\d.]+) (.s) \| JAX [^|]+\| ([\d.]+) (.s) \|", page)
    assert row is not None
    ours, theirs = (f"{float(value):.2g} {unit}" for value, unit in (row.group(1, 2), row.group(3, 4)))
    assert f"| boxes of 4,096 devices | {ours} | {theirs} |" in readme
    merged = {
        peer: times
        for ours, peer, theirs in re.findall(
            r"\| merging 1 GiB of 8 column shards into a file \| ([\d.]+ m?s) \| ([^|]+) \| ([\d.]+ m?s) \|", page
        )
        for times in [(ours, theirs)]
    }
    (ours, cp), (_, theirs) = merged["`cp` of the same bytes"], merged["PyTorch `consolidate_safetensors_files`"]
    line = f"| 1 GiB of 8 column shards merged (`cp`: {cp}) | {ours} | {theirs}, `consolidate_safetensors_files` | |"
    assert line in readme


def test_the_page_in_brief_has_all_rows_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a row of the tables too, with the same figures."""
    monkeypatch.syspath_prepend(str(PEERS))
    chosen = importlib.import_module("page").BRIEF
    brief = (ROOT / "docs" / "benchmarks-in-brief.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in brief.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == len(chosen)
    tables = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for row, (_, work, peer) in zip(rows, chosen, strict=True):
        assert row[0].startswith(f"| {work}")
        assert row[3].startswith(peer)
        assert " | ".join([row[0], *row[2:4]]) in tables
        assert row[1] in tables


TIME = re.compile(r"(?<![\w.])\d[\d.,]* (?:ns|µs|ms|s)\b")


def unmeasured(text: str, page: str) -> list[str]:
    """Find the times, in rows and in paragraphs that link to the page of benchmarks, that it does not have."""
    parts = [part for part in text.split("\n\n") if "benchmarks.md" in part]
    parts += [line for line in text.splitlines() if line.startswith("| 1 GiB")]
    return [
        time for part in parts for time in TIME.findall(part) if not re.search(rf"(?<![\d.]){re.escape(time)}", page)
    ]


def test_every_time_beside_a_link_to_the_page_is_on_it() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    pages = [ROOT / "README.md", *(path for path in (ROOT / "docs").rglob("*.md") if path.name != "benchmarks.md")]
    found = {path.name: unmeasured(path.read_text(encoding="utf-8"), page) for path in pages}
    assert {name: times for name, times in found.items() if times} == {}


def test_a_time_that_no_run_has_measured_is_found() -> None:
    page = "| merging 1 GiB | 227 ms | `cp` | 12.61 s |"
    text = "It took 227 ms, they 2.61 s ([benchmarks](benchmarks.md)).\n\nIt waits 3 s.\n\n| 1 GiB merged | 5.1 s |"
    assert unmeasured(text, page) == ["2.61 s", "5.1 s"]


def test_the_template_has_no_figures() -> None:
    """A time, a ratio or a share in it would be one that no run has measured."""
    template = (PEERS / "template.md").read_text(encoding="utf-8")
    template = template.replace("at 100 % nothing", "")
    assert not re.findall(r"\d\s?(?:[nµm]?s\b|×|%|[KMG]i?B)", template)


@pytest.mark.parametrize("module", ["figures", "page"])
def test_the_examples_of_the_module(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that are judged by hand arithmetic."""
    monkeypatch.syspath_prepend(str(PEERS))
    outcome = doctest.testmod(importlib.import_module(module))
    assert outcome.attempted
    assert not outcome.failed


def test_the_caches_are_those_that_linux_lists(tmp_path: Path) -> None:
    for index, (level, size) in enumerate([("1", "48K"), ("1", "32K"), ("2", "2048K"), ("3", "491520K")]):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        (folder / "level").write_text(level + "\n")
        (folder / "size").write_text(size + "\n")
    (tmp_path / "index4").mkdir()  # of which nothing is said
    sys.path.insert(0, str(PEERS))
    try:
        caches = importlib.import_module("machine").caches
    finally:
        sys.path.remove(str(PEERS))
    assert caches(tmp_path) == ", L2 2 MiB, L3 480 MiB"
    assert caches(tmp_path / "none") == ""
