"""Arrays that are memory-mapped from files, saved while somebody cuts such a file short or writes it anew."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.store.data.engine import digest_array

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux says where memory is mapped from")
PAGE = mmap.PAGESIZE

#: Saves arrays of the file, and does with it what `change` says once the first bytes are written.
WORK = """
import os, sys
from pathlib import Path
import numpy as np
import shardwise as sw

source, target, when, how = sys.argv[1:5]
whole = np.memmap(source, "u4", "r")
tensors = {"rows": whole.reshape(-1, 1024)[:-1], "turned": whole.reshape(1024, -1).T, "back": whole[::-1]}


def change():
    size = os.path.getsize(source)
    if how == "shorter":
        os.truncate(source, size // 3)
    elif how == "a little shorter":
        os.truncate(source, size - 100)
    elif how == "anew":
        data = b"x" * size
        with open(source, "wb") as stream:
            stream.write(data)
        os.utime(source, ns=(1, 1))


def progress(done, total):
    if when == "meanwhile" and 0 < done < total:
        change()


if when == "before":
    change()
if "://" in target:
    more = {"path": target, "to": sys.argv[5], "memory": 2**25}
else:
    more = {"path": Path(target), "sync": False}
try:
    sw.save_checkpoint(tensors=tensors, progress=progress, threads=1, **more)
except (sw.ParseError, OSError) as error:
    print(type(error).__name__, error)
else:
    print("saved")
if "://" in target:
    place = sw.ObjectPath(target)
    print("there" if place.is_file() or (place / "shardwise.json").is_file() else "nothing")
"""


def values(path: Path, rows: int = 6 * 1024) -> np.ndarray[Any, Any]:
    drawn = np.random.default_rng(5).integers(0, 2**32, (rows, 1024), np.uint32)
    drawn.tofile(path)
    return drawn


@pytest.mark.heavy
@LINUX
@pytest.mark.parametrize("how", ["shorter", "a little shorter", "anew"])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_file_that_changes_is_an_error_that_names_it(tmp_path: Path, when: str, how: str) -> None:
    """Without a word of warning, the system would end the process; or zeros would be saved."""
    source, target = tmp_path / "source.bin", tmp_path / "new.safetensors"
    values(source)
    done = subprocess.run(
        [sys.executable, "-c", WORK, str(source), str(target), when, how],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done
    if (when, how) == ("before", "anew"):
        assert done.stdout == "saved\n"  # What is there is what is saved.
        return
    assert done.stdout.startswith(f"ParseError {source}"), done
    assert any(words in done.stdout for words in ("cut short", "bytes when arrays of it", "was written to")), done
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source.bin"]


@pytest.mark.heavy
@LINUX
@pytest.mark.parametrize("how", ["shorter", "a little shorter", "anew"])
@pytest.mark.parametrize("to", ["safetensors", "hf"])
def test_a_file_that_changes_while_objects_are_made(tmp_path: Path, to: str, how: str) -> None:
    """After the first of several parts; a checkpoint that is one object is not made, of a folder there is no end."""
    pytest.importorskip("fsspec")
    source = tmp_path / "source.bin"
    values(source)
    done = subprocess.run(
        [sys.executable, "-c", WORK, str(source), "memory://new", "meanwhile", how, to],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done
    said, left = done.stdout.splitlines()
    assert said.startswith(f"ParseError {source}"), done
    assert any(words in said for words in ("cut short", "bytes when arrays of it", "was written to")), done
    assert left == "nothing"


def arrays_of(whole: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Of all strides that there may be, from any byte of the map on, of many pages and of few bytes."""
    flat, square = whole.reshape(-1), whole[:1024]
    return {
        "whole": whole,
        "turned": square.T,
        "back": flat[::-1],
        "columns back": whole[:, ::-3],
        "rows back": whole[::-2, 5:900],
        "both back": square[::-1, ::-1].T,
        "steps": whole[3::7, 1::2],
        "broadcast": np.broadcast_to(whole[7, :33], (50, 33)),
        "page": flat[PAGE : PAGE + PAGE // 4],
        "odd": flat.view(np.uint8)[1:-3:5],
        "shifted": flat.view(np.uint8)[3 : 3 + 8 * 4000].view("f8"),
        "deep": flat[: 2**16].reshape(2, 4, 8, 16, 2, 32).transpose(5, 0, 3, 1, 4, 2)[::-1, :, ::-2],
        "scalar": flat[12:13].reshape(()),
        "none": whole[:, :0],
        "last": flat[-1:],
    }


@pytest.mark.filterwarnings("ignore:.*match(es)? no rule:shardwise.ShardwiseWarning")
@pytest.mark.heavy
@pytest.mark.parametrize(("mode", "rows"), [("r", 2048), ("r+", 256), ("c", 256)])
def test_arrays_of_all_strides(tmp_path: Path, mode: Any, rows: int) -> None:
    drawn = values(tmp_path / "source.bin", rows)
    whole = np.memmap(tmp_path / "source.bin", "u4", mode, shape=drawn.shape)
    expected = arrays_of(drawn)
    if mode == "c":
        whole[5] = drawn[5] = 7  # Of this process alone; the file has the old values.
    saved = arrays_of(np.asarray(whole))
    rules = sw.LayoutMap(sw.DeviceMesh((2, 3), ("x", "y")))
    rules["^whole$|turned|s back$|both|steps|broadcast"] = ("y", "x")
    rules["^back$|page|odd|shifted|last"] = (("x", "y"),)
    for to, memory in (("safetensors", 1 << 14), ("hf", 1 << 16), ("sharded", 1 << 20), ("dcp", 1 << 26)):
        target = tmp_path / f"{to}.safetensors"
        cut = {"layouts": rules, "uneven": "balanced"} if to in ("sharded", "dcp") else {}
        sw.save_checkpoint(target, saved, to=to, memory=memory, sync=False, **cut)  # type: ignore[arg-type]
        with sw.open_checkpoint(target) as checkpoint:
            for name, array in expected.items():
                assert checkpoint.read(name).tobytes() == array.tobytes(), (to, name)
        assert sw.verify_checkpoint(target).digests > 0
    for name, array in expected.items():
        assert digest_array(np.asarray(saved[name])) == digest_array(np.asarray(array)), name
