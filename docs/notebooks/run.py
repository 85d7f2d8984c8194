"""Run the notebooks of the documentation, and keep what they show: docs/notebooks/*.ipynb.

python docs/notebooks/run.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def executed(path: Path) -> dict[str, Any]:
    """Run a notebook in an empty folder and give it with what its cells show, the same each time.

    Raises:
        CellExecutionError: if a cell fails.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook: Any = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=120, resources={"metadata": {"path": folder}}).execute()
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in map(_kept, cell.outputs) if output]
    found: dict[str, Any] = json.loads(nbformat.writes(notebook))
    return found


def _kept(output: Any) -> Any:
    """An output without what no reader shows: a picture is in its HTML, which is what notebooks choose."""
    if output.output_type == "execute_result" and "text/html" in output.data:
        output.data.pop("image/svg+xml", None)
    return output


def text_of(notebook: dict[str, Any]) -> str:
    """Give a notebook as the text of its file."""
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


if __name__ == "__main__":
    for path in sorted(HERE.glob("*.ipynb")):
        print(path.name, file=sys.stderr)
        path.write_text(text_of(executed(path)), encoding="utf-8")
