"""Whole training states that frameworks wrote, opened as a user would, beside the live tensors that were written.

A folder has cases `FORM/CASE`, each with `expected.json`, `expected.npz` and the framework's own files, packed as
`checkpoint.tar.xz` or lying there in `checkpoint/`, DeepSpeed's converted ones in `universal/`. Of every parameter the
weight and each state must be there under its kind, equal bit by bit, and the step; and the group, if the files say it.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import shardwise as sw
from shardwise.store import StoredCheckpoint

__all__ = ["States", "compare_case", "folders"]

Case = dict[str, Any]
#: Folders that DeepSpeed's converter wrote wrongly: the frameworks' own defect, as `expected.json` says.
WRONG = "zero2_bf16_round_robin/universal"


@dataclass
class States:
    """The arrays of one checkpoint: how many are as they should be, and which are not."""

    equal: int = 0
    different: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    refused: str = ""

    @property
    def is_equal(self) -> bool:
        return not (self.different or self.missing or self.refused)

    def __str__(self) -> str:
        if self.refused:
            return f"refused: {self.refused}"
        counts = f"{self.equal} equal, {len(self.different)} different, {len(self.missing)} missing"
        return "; ".join([counts, *(f"{name} is {what}" for name, what in self._examples())])

    def _examples(self) -> Iterator[tuple[str, str]]:
        for what, names in (("different", self.different), ("missing", self.missing)):
            yield from ((name, what) for name in names[:2])


def folders(folder: Path, names: Sequence[str] = ()) -> list[Path]:
    """The cases of a folder: all, or those whose `FORM` or `FORM/CASE` is given."""
    found = [each.parent for each in sorted(folder.glob("*/*/expected.npz"))]
    return [
        each for each in found if not names or each.parent.name in names or f"{each.parent.name}/{each.name}" in names
    ]


def compare_case(case: Path) -> Iterator[tuple[str, States]]:
    """Compare the checkpoints of one case: the framework's own, and that made from it by its converter."""
    expected = json.loads((case / "expected.json").read_text(encoding="utf-8"))
    with np.load(case / "expected.npz") as arrays, unpacked(case) as root:
        for name in ("checkpoint", "universal"):
            if (root / name).is_dir() and f"{case.name}/{name}" != WRONG:
                yield name, compared(opened_at(root / name), expected, arrays)


@contextmanager
def unpacked(case: Path) -> Iterator[Path]:
    """The folder in which a case's files are."""
    packed = case / "checkpoint.tar.xz"
    if not packed.is_file():
        yield case
        return
    with TemporaryDirectory(prefix="states-") as folder:
        with tarfile.open(packed) as file:
            file.extractall(folder, filter="data")
        yield Path(folder)


def opened_at(path: Path) -> Path:
    """What a user would open: the folder, or the only thing in it, or the file that has the model and its optimizer."""
    while path.is_dir() and len(inside := list(path.iterdir())) == 1:
        path = inside[0]
    return path / "checkpoint.pt" if (path / "checkpoint.pt").is_file() else path


def compared(path: Path, expected: Case, arrays: Mapping[str, Any]) -> States:
    """Compare one checkpoint with the expected arrays."""
    states = States()
    try:
        with sw.open_checkpoint(path) as checkpoint:
            _Comparison(checkpoint, expected, arrays, states).compare()
    except (sw.ShardwiseError, OSError) as error:
        states.refused = str(error)
    except Exception as error:  # A case that is not understood is not equal, and the others still count.
        states.refused = f"fails with {type(error).__name__}: {error}"
    return states


class _Comparison:
    """One checkpoint beside the arrays that it should hold."""

    def __init__(self, checkpoint: StoredCheckpoint, expected: Case, arrays: Mapping[str, Any], states: States) -> None:
        self._checkpoint, self._expected, self._arrays, self._states = checkpoint, expected, arrays, states
        self._training = checkpoint.training
        self._owners = {one.weight or name: name for name, one in self._training.parameters.items()}

    def compare(self) -> None:
        for parameter, said in self._expected["parameters"].items():
            weight, row = self._weight(parameter)
            arrays = self._of_parameter(parameter, said)
            owner = self._owners.get(weight or parameter)
            kinds = {} if owner is None else dict(self._training.parameters[owner].states)
            # DeepSpeed's stage 3 and its converted folders have the master copies in place of weights.
            if kinds and self._is_same(weight, row, arrays.get("master")):
                arrays["weight"] = arrays["master"]
                kinds = {"master": weight or "", **kinds}
            for kind, array in arrays.items():
                name = weight if kind == "weight" else kinds.get(kind)
                self._add(f"{parameter}, {kind}", name, row, array)
            for alias in said.get("aliases") or ():
                name, _ = self._weight(alias)
                if name is not None:  # Some files have a tied weight once.
                    self._add(f"{alias}, weight", name, row, arrays["weight"])
            if said.get("step") is not None:
                self._add_step(parameter, owner, said["step"])
            group = None if owner is None else self._training.group(owner)
            if group not in (None, said.get("group")):
                self._states.different.append(f"{parameter}, group {group}, not {said.get('group')}")
            if said.get("requires_grad") is False and kinds:
                self._states.different.append(f"{parameter}, frozen, which has the states {', '.join(kinds)}")

    def _of_parameter(self, parameter: str, said: Case) -> Case:
        if "weight" in said:
            return {"weight": said["weight"], **said.get("state", {})}
        leaves = [leaf for leaf in self._expected["leaves"] if leaf.get("parameter") == parameter and leaf["array"]]
        return {"weight" if leaf["state"] == "params" else leaf["state"]: leaf["array"] for leaf in leaves}

    def _weight(self, parameter: str) -> tuple[str | None, int | None]:
        """The tensor that is a parameter's weight, and the place in it if layers are stacked there."""
        names = self._training.names.weights
        if parameter in names:
            return names[parameter], None
        key, row = (self._expected.get("dist_keys") or {}).get(parameter, (parameter, None))
        if key in names:
            return names[key], row
        ends = [name for name in names.values() if name.endswith(f".{parameter}")]
        return (ends[0] if len(ends) == 1 else None), None

    def _add(self, what: str, name: str | None, row: int | None, wanted: Case) -> None:
        """Compare a tensor with the array that it should be."""
        if name is None:
            self._states.missing.append(what)
        elif self._is_same(name, row, wanted):
            self._states.equal += 1
        else:
            self._states.different.append(what)

    def _is_same(self, name: str | None, row: int | None, wanted: Case | None) -> bool:
        if name is None or wanted is None:
            return False
        found = self._checkpoint.read(name)
        found = found if row is None else found[row]
        array = self._arrays[wanted["npz"]]
        is_same = str(self._checkpoint[name].dtype) == wanted["dtype"] and found.shape == array.shape
        return is_same and bool(found.tobytes() == array.tobytes())

    def _add_step(self, parameter: str, owner: str | None, wanted: float) -> None:
        found = None if owner is None else self._training.step(owner)
        if "leaves" in self._expected and "step" in self._training.names.others:
            # Of Orbax the steps of the loop are said, of which MultiSteps makes fewer of the optimizer.
            found = float(self._checkpoint.read("step"))
        if found is None:
            self._states.missing.append(f"{parameter}, step")
        elif found != wanted:
            self._states.different.append(f"{parameter}, step")
        else:
            self._states.equal += 1
