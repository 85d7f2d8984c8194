"""Folders with a manifest: every sort of manifest that is not that of its files is refused, and says why."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw

HALVES = sw.TensorLayout(("x",), sw.DeviceMesh((2,), ("x",)))


def saved(tmp_path: Path) -> Path:
    value = np.arange(6.0)
    sw.save_checkpoint(tmp_path / "a", {"w": value, "tied": value, "b": np.arange(3, dtype="u1")}, {"w": HALVES})
    return tmp_path / "a"


def a_file(manifest: dict[str, Any]) -> dict[str, Any]:
    said: dict[str, Any] = next(iter(manifest["files"].values()))
    return said


WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another format": (lambda m: m.update(format="x"), "is not the manifest of a checkpoint"),
    "no format": (lambda m: m.pop("format"), "is not the manifest of a checkpoint"),
    "another version": (lambda m: m.update(version=2), "is of version 2; only version 1 is known"),
    "no tensors": (lambda m: m.pop("tensors"), "tensors is not a JSON object"),
    "files as a list": (lambda m: m.update(files=[]), "files is not a JSON object"),
    "aliases as text": (lambda m: m.update(aliases="x"), "aliases is not a JSON object"),
    "a tensor as text": (lambda m: m["tensors"].update(w="x"), "an entry of tensors is not a JSON object"),
    "a file as a number": (lambda m: m["files"].update(x=5), "an entry of files is not a JSON object"),
    "another size": (lambda m: a_file(m).update(size=a_file(m)["size"] + 1), r"bytes, shardwise\.json says \d+"),
    "a file outside": (lambda m: m["files"].update({"../x": {}}), "'../x', which is not in its own folder"),
    "a file of Windows": (lambda m: m["files"].update({"..\\x": {}}), "which is not in its own folder"),
    "a folder": (lambda m: m["files"].update({"..": {}}), "'..', which is not in its own folder"),
    "its own folder": (lambda m: m["files"].update({".": {}}), "which is not in its own folder"),
    "no name": (lambda m: m["files"].update({"": {}}), "which is not in its own folder"),
    "a null byte": (lambda m: m["files"].update({"a\0": {}}), "which is not in its own folder"),
    "no such file": (lambda m: m["files"].update(x={}), "names the file 'x', which is missing"),
    "a tensor too many": (lambda m: m["tensors"].update(v={}), "names the tensor 'v', which no file holds"),
    "a tensor too few": (lambda m: m["tensors"].pop("b"), "a file holds the tensor 'b', which .* does not name"),
    "another shape": (lambda m: m["tensors"]["b"].update(shape=[4]), r"'b' is uint8 of shape \(3,\), but .* of shape"),
    "another dtype": (lambda m: m["tensors"]["b"].update(dtype="I8"), "'b' is uint8 .* says 'I8' of shape"),
    "a tie to nothing": (lambda m: m["aliases"].update(tied="v"), "ties 'tied' to 'v', which does not exist"),
    "a tie to no text": (lambda m: m["aliases"].update(tied={}), "ties 'tied' to {}, which does not exist"),
    "a tie of a tensor": (lambda m: m["aliases"].update(b="w"), "ties 'b' to 'w'"),
    "a digest that is none": (lambda m: m["tensors"]["b"].update(digest=5), "5 is not a digest"),
    "another digest": (lambda m: m["tensors"]["b"].update(digest="0" * 32), "tensor 'b' is not what was written"),
    "no digest": (lambda m: m["tensors"]["b"].pop("digest"), "None is not a digest"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_manifest_of_other_files(tmp_path: Path, case: str) -> None:
    folder = saved(tmp_path)
    file = folder / "shardwise.json"
    manifest = json.loads(file.read_text("utf-8"))
    assert sw.verify_checkpoint(folder).digests == 2
    change, message = WRONG[case]
    change(manifest)
    file.write_text(json.dumps(manifest), "utf-8")
    with pytest.raises(sw.ParseError, match=message) as caught:
        sw.verify_checkpoint(folder)
    assert str(caught.value).startswith(str(folder))
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("text", ["[]", "5", "null", "", "{", '{"format": "shardwise"'])
def test_a_manifest_that_is_none(tmp_path: Path, text: str) -> None:
    folder = saved(tmp_path)
    (folder / "shardwise.json").write_text(text, "utf-8")
    with pytest.raises(sw.ParseError, match=r"shardwise\.json"):
        sw.open_checkpoint(folder)


def test_tied_tensors_and_what_the_manifest_says_are_read(tmp_path: Path) -> None:
    with sw.open_checkpoint(saved(tmp_path)) as checkpoint:
        assert {name: checkpoint.read(name).tolist() for name in checkpoint} == {
            "w": [*range(6)],
            "tied": [*range(6)],
            "b": [0, 1, 2],
        }
        assert checkpoint["tied"].alias_of == "w"
        assert (checkpoint["tied"].shape, len(checkpoint["tied"].pieces)) == ((6,), 2)
        assert checkpoint.metadata["format"] == "shardwise"
    sw.save_checkpoint(tmp_path / "none", {}, to="sharded")
    with sw.open_checkpoint(tmp_path / "none") as empty:
        assert (len(empty), empty.metadata["format"]) == (0, "shardwise")
