"""Checkpoints verified by their manifest: flipped bits, and files that are missing or swapped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from tests.store.tasks import mixed, mixed_rules

#: Expected of many of these tests, which are about something else.
pytestmark = pytest.mark.filterwarnings("ignore:.*match(es)? no rule:shardwise.ShardwiseWarning")


def test_a_flipped_bit_a_missing_and_a_swapped_file_are_found(tmp_path: Path) -> None:
    sw.save_checkpoint(tmp_path / "s", mixed(), mixed_rules())
    files = sorted((tmp_path / "s").glob("*.safetensors"))
    data = files[1].read_bytes()
    files[1].write_bytes(data[:-3] + bytes([data[-3] ^ 4]) + data[-2:])
    with pytest.raises(sw.ParseError, match="is not what was written"):
        sw.verify_checkpoint(tmp_path / "s")
    files[1].write_bytes(data[:-1])
    with pytest.raises(sw.ParseError, match=r"bytes"):
        sw.open_checkpoint(tmp_path / "s")
    files[-1].rename(tmp_path / "elsewhere")
    with pytest.raises(sw.ParseError):
        sw.open_checkpoint(tmp_path / "s")


def test_a_manifest_alone_names_the_file_that_is_missing(tmp_path: Path) -> None:
    sw.save_checkpoint(tmp_path / "cut", {"w": np.zeros(2)}, to="sharded")
    for file in (tmp_path / "cut").glob("*.safetensors"):
        file.unlink()
    with pytest.raises(sw.ParseError, match=r"names the file 'shard-.*, which is missing"):
        sw.open_checkpoint(tmp_path / "cut")


@pytest.mark.heavy
@pytest.mark.parametrize("to", ["hf", "sharded", "dcp"])
def test_a_flipped_bit_anywhere_in_the_manifest_is_found(tmp_path: Path, to: Any) -> None:
    """Also in what speaks of no tensor's bytes: names of axes, how a tensor is cut, the digest itself."""
    rules = sw.LayoutMap(sw.DeviceMesh((2,), ("x",)))
    rules["w"] = ("x", None)
    cut = {} if to == "hf" else {"layouts": rules}
    sw.save_checkpoint(tmp_path / "s", {"w": np.arange(8.0).reshape(4, 2)}, to=to, sync=False, **cut)  # type: ignore[arg-type]
    sw.verify_checkpoint(tmp_path / "s")
    path = tmp_path / "s" / "shardwise.json"
    text = path.read_bytes()
    assert json.loads(text)["format"] == "shardwise"
    for at in range(0, len(text), 3):
        path.write_bytes(text[:at] + bytes([text[at] ^ 1 << at % 7]) + text[at + 1 :])
        with pytest.raises(sw.ParseError):
            sw.verify_checkpoint(tmp_path / "s")
    path.write_bytes(text)
    sw.verify_checkpoint(tmp_path / "s")
