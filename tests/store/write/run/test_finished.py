"""What is finished is done: a second run, commit or resume compares it with the sources, and succeeds if it is that."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.cli import main
from tests.store.tasks import folder_of
from tests.store.trips import name_of

pytestmark = pytest.mark.filterwarnings("ignore")

MESH = sw.DeviceMesh((2,), ("x",))
FORMS = ("safetensors", "hf", "sharded", "dcp")


def rules() -> sw.LayoutMap:
    layouts = sw.LayoutMap(MESH)
    layouts["w"] = ("x", None)
    return layouts


def weights(seed: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return {"a.w": rng.random((64, 512)), "b.w": rng.random((32, 16)), "c": rng.random(7), "none": np.zeros((0, 3))}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    sw.save_checkpoint(tmp_path / "src.safetensors", weights(1))
    return tmp_path / "src.safetensors"


def settings(to: str) -> dict[str, Any]:
    return {"layouts": rules() if to in ("sharded", "dcp") else None, "to": to}


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def an_element(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def a_name(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"a.w"', b'"a.v"'))


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def shorter(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


CHANGES: dict[str, Callable[[Path], object]] = {
    "an element": an_element,
    "a name in a header": a_name,
    "shorter": shorter,
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "gone": Path.unlink,
    "a folder": a_folder,
}


@pytest.mark.parametrize("to", FORMS)
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_the_plans_is_refused(source: Path, change: str, to: str) -> None:
    path = source.parent / name_of(to)
    plan = sw.plan_checkpoint(source, path, **settings(to))
    plan.run()
    plan.commit()
    file = path if to == "safetensors" else max(path.glob("*.distcp" if to == "dcp" else "*.safetensors"))
    if change == "a name in a header" and b'"a.w"' not in file.read_bytes():
        pytest.skip("the manifest has the names")
    if to == "safetensors" and change == "gone":
        pytest.skip("then nothing is there")
    CHANGES[change](file)
    before = tree(source.parent)
    with pytest.raises(FileExistsError, match="exists already"):
        plan.commit()
    with pytest.raises(FileExistsError, match="exists already"):
        sw.reshard_checkpoint(source, path, **settings(to), resume=True)
    assert tree(source.parent) == before


@pytest.mark.parametrize("name", ["shardwise.json", ".metadata"])
@pytest.mark.parametrize("change", ["an element", "gone"])
def test_another_manifest_or_index_is_refused(source: Path, name: str, change: str) -> None:
    plan = sw.plan_checkpoint(source, source.parent / "new", **settings("dcp"))
    plan.run()
    plan.commit()
    CHANGES[change](source.parent / "new" / name)
    with pytest.raises(FileExistsError, match="exists already"):
        plan.commit()


def test_without_its_sources_nothing_can_be_said(source: Path) -> None:
    plan = sw.plan_checkpoint(source, source.parent / "new", to="hf")
    plan.run()
    plan.commit()
    source.unlink()
    with pytest.raises(FileExistsError, match="exists already, and cannot be compared with the result of this plan"):
        plan.commit()


def test_what_a_commit_that_was_killed_left_is_removed(source: Path) -> None:
    plan = sw.plan_checkpoint(source, source.parent / "new", to="hf")
    plan.run()
    shutil.copytree(folder_of(plan).root.parent, source.parent / "kept")
    plan.commit()
    shutil.rmtree(source.parent / "kept" / folder_of(plan).root.name / "data")
    (source.parent / "kept").rename(folder_of(plan).root.parent)
    folder_of(plan).root.parent.chmod(0o700)
    assert plan.commit().bytes_written == 0
    assert not folder_of(plan).root.parent.exists()


def test_the_command_says_so(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = source.parent
    words = [str(source), str(folder / "new"), "--to", "hf"]
    assert main(["plan", *words, "--save", str(folder / "p.swplan")]) == 0
    assert main(["run", str(folder / "p.swplan"), "--part", "1/1"]) == 0
    assert main(["commit", str(folder / "p.swplan")]) == 0
    capsys.readouterr()
    assert main(["commit", str(folder / "p.swplan")]) == 0
    assert "was finished before; its contents are right" in capsys.readouterr().out
    assert main(["run", str(folder / "p.swplan"), "--part", "1/2"]) == 0
    assert "the checkpoint is finished, and has what these tasks would write" in capsys.readouterr().out
    assert main(["reshard", *words, "--resume"]) == 0
    assert "was finished before; its contents are right" in capsys.readouterr().out
    assert main(["commit", str(folder / "p.swplan"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes_written"] == 0
    assert main(["reshard", *words]) == 2
