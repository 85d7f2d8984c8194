"""The page of the benchmarks: the template's words, and the figures of the results."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import Point, Row, quantity, ratio_text

__all__ = [
    "BRIEF",
    "CHARTS",
    "ELSEWHERE",
    "HERE",
    "PARTS",
    "Part",
    "Result",
    "Results",
    "digest",
    "folder_name",
    "processor",
    "read_elsewhere",
    "read_results",
    "render",
    "render_brief",
    "shown",
]

HERE = Path(__file__).resolve().parent
#: The folder, in that of the results, with a folder for each other machine.
ELSEWHERE = "elsewhere"


@dataclass(frozen=True)
class Part:
    """A `bench_*.py`: what it is called, what it cannot run without, and under which names that is installed."""

    name: str
    #: Modules to import.
    peers: tuple[str, ...] = ()

    @property
    def script(self) -> Path:
        """The file to run."""
        return HERE / f"bench_{self.name}.py"


PARTS = (
    Part("floors"),
    Part("core"),
    Part("jax_boxes", ("jax",)),
    Part("curves", ("jax", "tensorflow", "dask")),
    Part("layout_map", ("keras",)),
    Part("dtensor", ("tensorflow",)),
    Part("plans", ("dask",)),
    Part("tilings"),
    Part("mooncake", ("mooncake",)),
    Part("transports"),
    Part("reshard"),
    Part("jax_reshard", ("jax",)),
    Part("propagate", ("jax",)),
    Part("torch", ("torch",)),
    Part("gloo", ("torch",)),
    Part("digests", ("torch",)),
    Part("positions"),
    Part("index"),
    Part("checkpoint", ("safetensors",)),
    Part("merge", ("torch",)),
    Part("readers", ("s3fs",)),
    Part("bounds", ("ml_dtypes",)),
    Part("files"),
    Part("quantized"),
    Part("convert"),
    Part("states"),
    Part("training", ("torch",)),
    Part("tasks", ("distributed",)),
    Part("scope", ("keras", "jax", "tensorflow")),
    Part("package", ("abi3audit", "auditwheel", "maturin")),
)


#: The rows of the page in brief: their part, and the beginnings of their work and of their peer.
BRIEF = (
    ("merge", "merging 1 GiB of 8 column shards", "PyTorch"),
    ("merge", "merging 1 GiB of 8 column shards", "`cp`"),
    ("convert", "3.57 GiB of DeepSeek-V3's layers, FP8 with its scales, from the page cache", "`cp`"),
    ("convert", "3.57 GiB of DeepSeek-V3's layers, FP8 with its scales, from the disk", "`cp`"),
    ("training", "780 MiB of ZeRO 3 on 8 ranks, to FSDP2 of 6", "`cp`"),
    ("training", "780 MiB of ZeRO 3 on 8 ranks, to DeepSpeed's universal checkpoint", "`ds_to_universal.py`"),
    ("readers", "a tensor of 1 GiB, read by S3", "fsspec"),
    ("bounds", "merging 8 GiB of 8 column shards: the process's memory, budget 64 MiB", ""),
    ("mooncake", "plan of Llama-3-8B's 291 tensors", "mooncake"),
    ("propagate", "a step of Llama, 2,368 ops: layouts and moves, `shardy`", "XLA"),
    ("jax_boxes", "boxes of 4,096 devices, one array", "JAX"),
    ("layout_map", "50 rules, 10,000 new paths", "Keras"),
)

CHARTS = {
    "ratios": "How many times as fast as the peer, and what the project asks of itself",
    "growth": "The time of each operation against the number of devices",
}


@dataclass(frozen=True)
class Result:
    """What a part measured, and where."""

    #: `machine`, `versions`, `commit`, `date`, `load` at start and end, `seconds`.
    run: dict[str, Any]
    rows: tuple[Row, ...]
    points: tuple[Point, ...]

    @classmethod
    def from_text(cls, text: str) -> Result:
        """Read JSON lines: the run, and its rows or points.

        >>> Result.from_text('{"commit": "abc"}').run
        {'commit': 'abc'}
        """
        run, *lines = text.splitlines()
        points = tuple(Point.from_json(line) for line in lines if '"curve"' in line)
        rows = tuple(Row.from_json(line) for line in lines if '"curve"' not in line)
        return cls(json.loads(run), rows, points)


Results = dict[str, Result]


def read_results(folder: Path) -> Results:
    """The results that there are, by part."""
    files = {part.name: folder / f"{part.name}.json" for part in PARTS}
    texts = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.exists()}
    return {name: Result.from_text(text) for name, text in texts.items()}


def folder_name(processor: str) -> str:
    """What the folder of a machine's results is called.

    >>> folder_name("A(R) CPU @ 2.50GHz, 2 cores, L2 1 MiB")
    'a-r-cpu-2-50ghz-2-cores-l2-1-mib'
    """
    return re.sub(r"[^a-z0-9]+", "-", processor.lower()).strip("-")


def read_elsewhere(results: Path) -> list[Results]:
    """What other machines gave, beside the results in a folder: the one with the most parts first."""
    folders = sorted((results / ELSEWHERE).glob("*"))
    return sorted((found for found in map(read_results, folders) if found), key=len, reverse=True)


def shown(results: Results) -> dict[str, list[Row] | list[Point]]:
    """What each chart shows; one that shows nothing is not drawn."""
    rows = [row for result in results.values() for row in result.rows if row.target is not None]
    return {"ratios": rows, "growth": [point for result in results.values() for point in result.points]}


def digest(results: Results) -> str:
    """A name for the figures of some results, which the charts carry."""
    rows = [row.to_json() for result in results.values() for row in result.rows]
    lines = rows + [point.to_json() for result in results.values() for point in result.points]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def processor(result: Result) -> str:
    """What a machine is known by: its processor and its caches, without the versions of what is installed.

    >>> processor(Result({"machine": "A CPU, 2 cores, L2 1 MiB, L3 32 MiB, Linux, Python 3.11.7"}, (), ()))
    'A CPU, 2 cores, L2 1 MiB, L3 32 MiB'
    """
    return str(result.run["machine"]).rsplit(", ", 2)[0]


def render(template: str, results: Results, elsewhere: list[Results]) -> str:
    """Fill the template; what no part and no table is named after is an error."""
    tables = {part.name: _section(part, results.get(part.name)) for part in PARTS}
    tables |= {"summary": _summary(results), "machine": _machine(results), "elsewhere": _beside(results, elsewhere)}
    tables |= {name: f"![{CHARTS[name]}](pictures/{name}.svg)" if shown(results)[name] else "" for name in CHARTS}
    used: set[str] = set()

    def fill(match: re.Match[str]) -> str:
        used.add(match[1])
        return tables[match[1]]

    page = re.sub(r"\{\{ (\w+) \}\}", fill, template)
    assert used == set(tables), f"the template does not show {sorted(set(tables) - used)}"
    # What is empty leaves no gap.
    return re.sub(r"\n{3,}", "\n\n", page)


def render_brief(template: str, results: Results) -> str:
    """Fill the template of the page in brief, with the rows of `BRIEF` that are measured."""
    found = [
        next((row for row in results[part].rows if row.work.startswith(work) and row.peer.startswith(peer)), None)
        for part, work, peer in BRIEF
        if part in results
    ]
    rows = [row for row in found if row is not None]
    columns = {
        "work": [row.work for row in rows],
        "ratio": ["" if row.ratio is None else f"**{ratio_text(row.ratio)}**" for row in rows],
        "shardwise": [quantity(row.ours, row.unit) for row in rows],
        "compared with": [row.peer for row in rows],
        "takes": ["" if row.theirs is None else quantity(row.theirs, row.unit) for row in rows],
    }
    chart = f"![{CHARTS['ratios']}](pictures/ratios.svg)" if shown(results)["ratios"] else ""
    table = _markdown(columns) if rows else "Nothing of this is measured yet."
    return template.replace("{{ brief }}", table).replace("{{ ratios }}", chart)


def _section(part: Part, result: Result | None) -> str:
    command = f"`python benches/peers/run.py --only {part.name}`"
    if result is None:
        needs = f", which needs {', '.join(part.peers)}" if part.peers else ""
        return f"Not measured yet: {command}{needs}."
    run = result.run
    load = " to ".join(f"{value:.1f}" for value in run["load"] if value is not None)
    line = f"{command}, {run['date']}, commit {run['commit']}, {run['seconds']:.0f} s" + (
        f", load {load}" if load else ""
    )
    table = _curves(result.points) if result.points else _table(result.rows)
    return f"{table}\n\n<sub>{line}</sub>"


def _table(rows: tuple[Row, ...]) -> str:
    """Columns that no row fills are left out."""
    columns = {
        "work": [row.work for row in rows],
        "shardwise": [quantity(row.ours, row.unit) for row in rows],
        "compared with": [row.peer for row in rows],
        "takes": ["" if row.theirs is None else quantity(row.theirs, row.unit) for row in rows],
        "ratio": [_ratio(row) for row in rows],
        "share of the floor": ["" if row.share is None else f"{row.share:.0%} of {row.floor}" for row in rows],
        "goal": [_goal(row) for row in rows],
    }
    if not any(columns["compared with"]) and not any(columns["goal"]):
        columns = {"work": columns["work"], "time": columns["shardwise"]}
    return _markdown({name: cells for name, cells in columns.items() if any(cells)})


def _ratio(row: Row) -> str:
    if row.ratio is None:
        return ""
    text = f"**{ratio_text(row.ratio)}**"
    if row.least is not None and row.greatest is not None:
        text += f" ({ratio_text(row.least)} to {ratio_text(row.greatest)})"
    return text


def _goal(row: Row) -> str:
    return f"{row.goal}, {row.verdict if row.verdict == 'met' else f'**{row.verdict}**'}" if row.goal else ""


def _curves(points: tuple[Point, ...]) -> str:
    """A line for each curve and library, a column for each size of the mesh."""
    sizes = sorted({point.devices for point in points})
    lines: dict[tuple[str, str], dict[int, float]] = {}
    for point in points:
        lines.setdefault((point.curve, point.library), {})[point.devices] = point.seconds
    columns = {
        "work": [curve for curve, _ in lines],
        "library": [library for _, library in lines],
        **{
            f"{size:,}": [quantity(found[size], "s") if size in found else "" for found in lines.values()]
            for size in sizes
        },
    }
    return _markdown(columns)


def _markdown(columns: dict[str, list[str]]) -> str:
    lines = [list(columns), ["---"] * len(columns), *map(list, zip(*columns.values(), strict=True))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _summary(results: Results) -> str:
    """How many goals are met, and which are not."""
    if not results:
        return "Nothing is measured yet."
    rows = [row for result in results.values() for row in result.rows if row.goal]
    missed = [row for row in rows if row.verdict == "missed"]
    met = sum(row.verdict == "met" for row in rows)
    text = f"Goals measured: {met + len(missed)}; met: {met}."
    return f"{text} Missed:\n\n" + "\n".join(f"- {_missed(row)}" for row in missed) if missed else text


def _missed(row: Row) -> str:
    got = quantity(row.ours, row.unit)
    if row.ratio is not None and row.goal is not None and row.goal.kind == "ratio":
        got = ratio_text(row.ratio)
    elif row.ratio is not None and row.goal is not None and row.goal.kind in ("times", "moved"):
        got = f"{ratio_text(1 / row.ratio)} {'its time' if row.goal.kind == 'times' else 'as many'}"
    elif row.theirs is not None and row.goal is not None and row.goal.kind == "more":
        got = f"{quantity(row.ours - row.theirs, row.unit)} more"
    return f"{row.work}{f', beside {row.peer}' if row.peer else ''}: {got} ({row.goal} asked)"


def _beside(results: Results, elsewhere: list[Results]) -> str:
    """The ratios of this machine beside those of each other, where at least two have the row."""
    others = [_rows(results, machine) for machine in elsewhere]
    rows = [
        row
        for result in results.values()
        for row in result.rows
        if row.ratio is not None and any((row.work, row.peer) in other for other in others)
    ]
    if not rows:
        return "No other machine is measured yet."
    numbers = range(2, len(elsewhere) + 2)
    columns = {
        "work": [row.work for row in rows],
        "compared with": [row.peer for row in rows],
        "here": [_ratio(row) for row in rows],
        **{
            f"machine {number}": [_ratio(other[key]) if (key := (row.work, row.peer)) in other else "" for row in rows]
            for number, other in zip(numbers, others, strict=True)
        },
        "goal": [str(row.goal or "") for row in rows],
    }
    machines = "\n".join(
        f"- Machine {number}: {_one_machine(machine)}." for number, machine in zip(numbers, elsewhere, strict=True)
    )
    return f"{machines}\n\n{_markdown(columns)}"


def _rows(results: Results, machine: Results) -> dict[tuple[str, str], Row]:
    """What another machine has measured of the same parts, by work and peer."""
    return {
        (row.work, row.peer): row
        for name, result in machine.items()
        if name in results and processor(results[name]) != processor(result)
        for row in result.rows
    }


def _one_machine(results: Results) -> str:
    """A machine and what was installed, the commits at which it was measured, and how many goals are met on it."""
    names = dict.fromkeys(result.run["machine"] for result in results.values())
    installed = dict.fromkeys(package for result in results.values() for package in _installed(result))
    commits = dict.fromkeys(result.run["commit"] for result in results.values())
    verdicts = [row.verdict for result in results.values() for row in result.rows]
    met, missed = verdicts.count("met"), verdicts.count("missed")
    told = ("; ".join(names), ", ".join(installed), f"commit {', '.join(commits)}")
    return f"{'; '.join(told)}; {met} of {met + missed} goals met"


def _installed(result: Result) -> list[str]:
    return [f"{package} {version}" for package, version in result.run["versions"].items()]


def _machine(results: Results) -> str:
    """Each machine with the parts that ran on it, and what was installed."""
    if not results:
        return ""
    machines: dict[str, list[str]] = {}
    for name, result in results.items():
        machines.setdefault(f"{result.run['machine']}; {', '.join(_installed(result))}", []).append(name)
    if len(machines) == 1:
        return f"The machine: {next(iter(machines))}."
    lines = "\n".join(f"- {', '.join(parts)}: {machine}." for machine, parts in machines.items())
    return f"What was measured where:\n\n{lines}"
