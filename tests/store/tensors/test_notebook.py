"""What notebooks show of a checkpoint and of its tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import shardwise as sw
from shardwise.show.picture import short
from tests.show.drawings import Drawing

#: Expected of many of these tests, which are about something else.
pytestmark = pytest.mark.filterwarnings("ignore:.*match(es)? no rule:shardwise.ShardwiseWarning")


def make(path: Path) -> None:
    mesh = sw.DeviceMesh((4,), ("tp",))
    rules = sw.LayoutMap(mesh)
    rules["kernel"] = (None, "tp")
    tensors = {f"h.{i}.kernel": np.arange(32, dtype="int16").reshape(4, 8) + i for i in range(3)}
    sw.save_checkpoint(path, {**tensors, "<b>": np.zeros((), "float32")}, rules, to="sharded")


def test_a_checkpoint_shows_its_tensors(tmp_path: Path) -> None:
    """Three tensors of 32 elements of two bytes are one row; the name of the other is text."""
    make(tmp_path / "model")
    with sw.open_checkpoint(tmp_path / "model") as checkpoint:
        html = checkpoint._repr_html_()
    assert "4 tensors, 196 B" in html
    row = "<tr><td>h.{0..2}.kernel × 3</td><td>4 × 8</td><td>int16</td>"
    assert f'{row}<td style="text-align:right">192 B</td></tr>' in html
    assert "<tr><td>&lt;b&gt;</td><td>scalar</td><td>float32</td>" in html


def test_a_tensor_shows_which_file_holds_which_columns(tmp_path: Path) -> None:
    make(tmp_path / "model")
    with sw.open_checkpoint(tmp_path / "model") as checkpoint:
        tensor = checkpoint["h.1.kernel"]
        drawing = Drawing(tensor._repr_svg_() or "")
        names = [piece.path.name for piece in tensor.pieces]
        assert [(tile.bounds[1], tile.held) for tile in drawing.tiles] == [
            ((2 * i, 2 * i + 2), short(name, 40)) for i, name in enumerate(names)
        ]
        assert "h.1.kernel: int16, 64 B" in drawing.written()
        assert "4 × 8 in 4 pieces" in drawing.written()
        assert sw.draw(tensor, form="text").startswith("h.1.kernel: int16, 64 B")
        assert "<svg" in (tensor._repr_html_() or "")


def test_replicas_of_a_piece_are_named_together(tmp_path: Path) -> None:
    make(tmp_path / "model")
    with sw.open_checkpoint(tmp_path / "model") as checkpoint:
        tensor = checkpoint["<b>"]
        [tile] = Drawing(tensor._repr_svg_() or "").tiles
        holders = 1 + len(tensor.replicas)
        assert tile.held.endswith(f"({holders} replicas)") == (holders > 1)
