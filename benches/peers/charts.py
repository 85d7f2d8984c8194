"""The charts of the benchmarks, as SVG: the ratios against the goals, and the curves of the cost.

They have the colours of the pictures: of one lightness that can be read on white, and where the page is dark the fills
of the pictures, on the background of those. Each carries the digest of the figures that it shows, so that a chart left
over from other results is known for what it is.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from figures import Point, Row, ratio_text
from page import Results, digest, shown

__all__ = ["draw", "stale"]

PAGE, INK, FAINT = "#ffffff", "#57606a", "#d0d7de"
OURS, MISSED = "#4a71b3", "#9d6300"
LIBRARIES = {
    "shardwise": OURS,
    "numpy": "#4b8322",
    "dask": "#995398",
    "JAX": "#098474",
    "TensorFlow": "#9d6300",
    "fill": INK,
}
#: What each colour is where the page is dark: the fills of shardwise.show.colours, which have the same hues.
DARK = {
    PAGE: "#14181d",
    INK: "#9aa5b1",
    FAINT: "#30363d",
    "#4a71b3": "#8db8ff",
    "#4b8322": "#8fcb6c",
    "#995398": "#e499e2",
    "#098474": "#0fd4bb",
    "#9d6300": "#f3a539",
}
#: The blocks of the ratios, by what the peer's name begins with; the last is for all others.
PEERS = ("JAX", "TensorFlow", "PyTorch", "Keras", "dask", "numpy")
BARE = "the bare work"
#: The width in inches, and the most letters in a line of a label: what can be read on a telephone.
_WIDTH, _WIDEST = 4.6, 30
#: From the middle of a row to that of each of two lines in it, in rows.
_LINE = 0.7
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "shardwise",  # the names of parts do not change from one drawing to the next
    "font.sans-serif": ["Helvetica Neue", "Helvetica", "Arial", "Liberation Sans", "DejaVu Sans"],
    "font.size": 9,
    "figure.facecolor": PAGE,
    "axes.facecolor": "none",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titlecolor": INK,
}
DEVICES = {8: "8", 512: "512", 2**15: "32,768", 2**20: "2²⁰"}
SECONDS = {1e-6: "1 µs", 1e-3: "1 ms", 1.0: "1 s"}


def draw(results: Results, folder: Path) -> list[Path]:
    """Draw what there are results for; without matplotlib say so."""
    try:
        import matplotlib
    except ImportError:
        print("no charts drawn: matplotlib is not installed (it is in the extra `bench`)")
        return []
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with matplotlib.rc_context(dict[Any, Any](STYLE)):
        for name, items in shown(results).items():
            if items:
                figure = _ratios(items) if name == "ratios" else _curves(items)
                path = folder / f"{name}.svg"
                about = {"Date": None, "Creator": None, "Description": f"figures {digest(results)}"}
                figure.savefig(path, metadata=about)
                # Without the blanks that it leaves at the ends of lines.
                text = "\n".join(map(str.rstrip, path.read_text("utf-8").splitlines())) + "\n"
                path.write_text(text.replace("</style>", f"{_dark()}</style>", 1), "utf-8")
                written.append(path)
    return written


def _dark() -> str:
    """The style of a dark page: it goes before the colours that each part has of its own."""
    rules = (
        f'[style*="{kind}: {light}"]{{{kind}:{dark}!important}}'
        for light, dark in DARK.items()
        for kind in ("fill", "stroke")
    )
    return f"@media (prefers-color-scheme:dark){{{''.join(rules)}}}"


def stale(results: Results, folder: Path) -> list[Path]:
    """The charts that were drawn from other results, or not at all."""
    paths = [folder / f"{name}.svg" for name, items in shown(results).items() if items]
    return [path for path in paths if not path.exists() or f"figures {digest(results)}" not in path.read_text("utf-8")]


def _ratios(rows: list[Any]) -> Any:
    """A bar from 1× to the ratio for each row whose goal is a ratio, and a mark where the goal is; a block per peer."""
    from matplotlib.figure import Figure

    blocks: dict[str, list[Row]] = {name: [] for name in (*PEERS, BARE)}
    for row in sorted(rows, key=lambda row: -row.ratio):
        blocks[next((name for name in PEERS if row.peer.startswith(name)), BARE)].append(row)
    blocks = {name: block for name, block in blocks.items() if block}
    labels = {row.work: textwrap.wrap(_plain(row.work), _WIDEST) for row in rows}
    lines = sum(_height(labels[row.work]) for row in rows) + 1.6 * len(blocks)
    figure = Figure(figsize=(_WIDTH, 0.7 + 0.215 * lines), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.axvline(1, color=INK, linewidth=0.8)
    y = 0.0

    def label(y: float, text: str, weight: str = "normal") -> None:
        # A text of its own for each line: an SVG has the ends of several in one where matplotlib's own font would end.
        place, moved = axes.get_yaxis_transform(), (-4, 0)
        axes.annotate(text, (0, y), moved, place, "offset points", ha="right", va="center", weight=weight)

    for name, block in blocks.items():
        label(y, name, "bold")
        for row in block:
            ratio, target = row.ratio or 1.0, row.target or 1.0
            half = _height(labels[row.work]) / 2
            y -= half + 0.5
            for number, line in enumerate(labels[row.work]):
                label(y + _LINE * ((len(labels[row.work]) - 1) / 2 - number), line)
            colour = OURS if row.verdict == "met" else MISSED
            axes.barh(y, ratio - 1, left=1, height=0.62, color=colour, linewidth=0)
            axes.plot([target, target], [y - 0.42, y + 0.42], color=INK, linewidth=1.6, solid_capstyle="butt")
            place, shift = (max(ratio, target, 1), y), (5, 0)
            axes.annotate(
                ratio_text(ratio), place, shift, textcoords="offset points", va="center", color=colour, weight="bold"
            )
            y -= half - 0.5
        y -= 1.6
    axes.set_yticks([])
    axes.set_ylim(y + 0.8, 0.8)
    axes.spines["left"].set_visible(False)
    least, greatest = (pick(row.ratio for row in rows) for pick in (min, max))
    powers = [10.0**power for power in range(0, 7, 2) if 10**power <= greatest * 2]
    axes.set_xticks(powers, [f"{power:,.0f}×" for power in powers])
    axes.set_xticks([], minor=True)
    axes.set_xlim(min(least, 0.8) * 0.9, max(greatest, 10) * 40)
    title = "How many times as fast as the peer.\nThe mark is the goal; orange where it is missed."
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, color=INK)
    return figure


def _height(lines: list[str]) -> float:
    """The height of a row: of two lines it is not twice that of one."""
    return 1 + 0.75 * (len(lines) - 1)


def _curves(points: list[Any]) -> Any:
    """A panel for each operation, all with the same axes, and the libraries' names at the ends of the lines."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(point.curve for point in points))
    rows = max(1, -(-len(names) // 2))
    figure = Figure(figsize=(_WIDTH, 1.9 * rows), layout="constrained")
    panels = figure.subplots(rows, 2, sharex=True, sharey=True, squeeze=False).flatten()
    low, high = min(point.seconds for point in points) / 2, max(point.seconds for point in points) * 2
    for panel, name in zip(panels, names, strict=False):
        panel.set(xscale="log", yscale="log", xlim=(5, 2**20 * 150), ylim=(low, high))
        panel.set_title(_plain(name))
        panel.set_xticks(list(DEVICES), list(DEVICES.values()))
        panel.set_yticks(list(SECONDS), list(SECONDS.values()))
        panel.set_xticks([], minor=True)
        panel.set_yticks([], minor=True)
        panel.tick_params(length=0, labelsize=8, labelbottom=True)
        panel.grid(color=FAINT, linewidth=0.5)
        _lines(panel, [point for point in points if point.curve == name], high / low)
    for panel in panels[len(names) :]:
        panel.set_visible(False)
    figure.supxlabel("devices of the mesh", fontsize=9, color=INK)
    return figure


def _lines(panel: Any, points: list[Point], span: float) -> None:
    lines: dict[str, list[Point]] = {}
    for point in points:
        lines.setdefault(point.library, []).append(point)
    ends = {library: max(line, key=lambda point: point.devices) for library, line in lines.items()}
    # From the lowest end upwards, each name at least a line of text above the one before.
    step, height = span ** (1 / 13), 0.0
    for library, end in sorted(ends.items(), key=lambda item: item[1].seconds):
        line = sorted(lines[library], key=lambda point: point.devices)
        colour, ours, floor = LIBRARIES[library], library == "shardwise", library == "fill"
        panel.plot(
            [point.devices for point in line],
            [point.seconds for point in line],
            color=colour,
            linewidth=2.4 if ours else 1.4,
            linestyle=(0, (1, 1.5)) if floor else "-",
            zorder=3 if ours else 2,
        )
        height = max(end.seconds, height * step)
        panel.annotate(
            library,
            (end.devices, height),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=colour,
            weight="bold" if ours else "normal",
        )


def _plain(text: str) -> str:
    return text.replace("`", "")
