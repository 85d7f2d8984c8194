"""`shardwise rules`: the rules files that come with the package."""

import argparse
import itertools
import json
from pathlib import Path

from .._text import shown
from ..rules.shipped import example_rules
from ..rules.toml import read_compared
from ..show.table import table_lines
from .terminal import Screen

__all__ = ["run_rules"]


def run_rules(screen: Screen, options: argparse.Namespace) -> int:
    """List the rules files or print one, and give the exit status."""
    known = example_rules()
    if options.name is not None:
        if options.name not in known:
            from difflib import get_close_matches  # Slow to import.

            near = get_close_matches(options.name, known, 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"no rules {shown(options.name)}: the package has {', '.join(known)}{meant}")
        path = known[options.name]
        text = path.read_text(encoding="utf-8")
        if options.json:
            print(json.dumps({"name": options.name, "path": str(path), "text": text}, indent=2))
        else:
            print(text, end="")
        return 0
    about = {name: _about(path) for name, path in known.items()}
    compared = {name: read_compared(path) for name, path in known.items()}
    if options.json:
        rows = (
            {"name": name, "path": str(known[name]), "about": about[name], "compared": compared[name]} for name in known
        )
        print(json.dumps(list(rows), indent=2))
        return 0
    cells = [[(name, "bold"), (about[name], ""), (", ".join(compared[name]), "")] for name in known]
    for line in table_lines(("name", "of", "compared with"), cells, screen.size and screen.size.columns):
        screen.write(*line)
    return 0


def _about(path: Path) -> str:
    """Give what a file says about itself, up to how it is cut: the model, and who stores it so."""
    with path.open(encoding="utf-8") as file:
        lines = [line.removeprefix("#").strip() for line in itertools.islice(file, 3)]
    return " ".join(lines).partition(", tensor-parallel")[0]
