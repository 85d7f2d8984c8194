"""What `reshard`, `run`, `commit`, `verify`, `diff` and `inspect` print, and that every option reaches the library."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise._text import bytes_text
from shardwise.cli import checkpoints, main
from shardwise.cli import plan as planning
from shardwise.store import CheckpointPlan

Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in a folder with a.safetensors, of 512 KiB and 3 bytes, and give what it prints."""
    monkeypatch.chdir(tmp_path)
    tensors = {"w": np.arange(2**17, dtype="f4").reshape(4, 2**15), "b": np.arange(3, dtype="i1")}
    sw.save_checkpoint("a.safetensors", tensors, sync=False)
    Path("rules.toml").write_text("[rules]\nw = ['x', []]\nb = [[]]\n")

    def call(*arguments: str, status: int = 0) -> str:
        assert main(list(arguments)) == status
        return capsys.readouterr().out

    return call


def reshard(target: str, *options: str) -> list[str]:
    rules = ("--rules", "rules.toml", "--mesh", "x=2", "--to", "sharded")
    return ["reshard", "a.safetensors", target, *rules, *options]


def plan(target: str, *options: str) -> list[str]:
    return ["plan", *reshard(target, *options)[1:]]


@pytest.mark.heavy
def test_inspect_and_verify(run: Run) -> None:
    assert run("inspect", "a.safetensors").splitlines() == [
        "a.safetensors: safetensors, 2 tensors (1 float32, 1 int8), 512.0 KiB",
        "tensor  dtype        shape      bytes  pieces",
        "w       float32  4 x 32768  512.0 KiB       1",
        "b       int8             3        3 B       1",
    ]
    run("reshard", "a.safetensors", "ranks", "--to", "ranks", "--mesh", "x=2", "--rules", "rules.toml")
    assert run("inspect", "ranks").splitlines()[2:] == [
        "w       float32  4 x 32768  512.0 KiB       2  each 2 x 32768",
        "b       int8             3        3 B       1  1 piece stored again",
    ]
    described = json.loads(run("inspect", "a.safetensors", "--json"))
    assert described["tensors"].pop("w") == {
        "dtype": "float32",
        "shape": [4, 2**15],
        "bytes": 2**19,
        "alias_of": None,
        "pieces": [{"file": "a.safetensors", "box": [[0, 4], [0, 2**15]]}],
        "replicas": 0,
    }
    assert list(described["tensors"]) == ["b"]
    described = {key: value for key, value in described.items() if key != "tensors"}
    expected = {"path": "a.safetensors", "format": "safetensors", "bytes": 2**19 + 3, "objects": [], "unreadable": {}}
    expected["left_out"] = []
    expected["doubts"] = []
    expected["training"] = {
        "weights": {"tensors": 2, "bytes": 2**19 + 3},
        "state": {"tensors": 0, "bytes": 0, "kinds": {}},
    }
    assert described == expected
    said = run("verify", "a.safetensors")
    assert said == "a.safetensors: safetensors, 2 tensors, 512.0 KiB: all 2 digests are right\n"
    found = json.loads(run("verify", "a.safetensors", "--json"))
    assert found["damaged"] == []
    assert found["path"] == "a.safetensors"
    assert [found[name] for name in ("tensors", "bytes", "digests", "crcs")] == [2, 2**19 + 3, 2, 0]


def test_verify_names_all_that_is_damaged_with_a_status_of_its_own(run: Run) -> None:
    sw.save_checkpoint(
        "many", {f"t{i}": np.arange(100.0) + i for i in range(4)}, to="hf", max_file_bytes=1600, sync=False
    )
    files = sorted(Path("many").glob("*.safetensors"))
    for file in files:
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    lines = run("verify", "many", status=3).splitlines()
    assert [line.split(" is not what was written")[0] for line in lines[:2]] == [
        "many/model-00001-of-00002.safetensors: tensor 't1'",
        "many/model-00002-of-00002.safetensors: tensor 't3'",
    ]
    assert lines[2:] == ["many: damaged: 2 of 4 tensors"]
    found = json.loads(run("verify", "many", "--json", status=3))
    assert [(one["tensor"], one["file"]) for one in found["damaged"]] == [("t1", str(files[0])), ("t3", str(files[1]))]
    assert (found["path"], found["tensors"], found["digests"]) == ("many", 4, 4)
    Path("many", "model.safetensors.index.json").unlink()
    files[0].write_bytes(b"")
    found = json.loads(run("verify", "many", "--json", status=3))
    assert {one["tensor"] for one in found["damaged"]} == {None, "t0", "t1", "t3"}
    Path("text.safetensors").write_text("[package]\nname = 'x'\n")
    Path("cut.safetensors").write_bytes(Path("a.safetensors").read_bytes()[:1000])
    assert "is truncated" in run("verify", "cut.safetensors", status=3)
    run("verify", "gone.safetensors", status=2)


def test_diff_lists_twenty_and_counts_the_rest(run: Run) -> None:
    zeros = {f"t{i:02}": np.zeros(2, "i1") for i in range(21)}
    sw.save_checkpoint("zeros.safetensors", zeros, sync=False)
    sw.save_checkpoint("ones.safetensors", {name: array + 1 for name, array in zeros.items()}, sync=False)
    assert run("diff", "zeros.safetensors", "zeros.safetensors") == "the same tensors\n"
    lines = run("diff", "zeros.safetensors", "ones.safetensors", status=1).splitlines()
    assert lines[0] == "'t00': 2 elements differ, the first at (0,): 0 and 1"
    assert lines[19].startswith("'t19'")
    assert lines[20:] == ["and 1 more"]
    sw.save_checkpoint("fewer.safetensors", {name: zeros[name] + 1 for name in list(zeros)[1:]}, sync=False)
    assert len(run("diff", "ones.safetensors", "fewer.safetensors", status=1).splitlines()) == 1
    sw.save_checkpoint("twenty.safetensors", {name: zeros[name] for name in list(zeros)[1:]}, sync=False)
    assert len(run("diff", "twenty.safetensors", "fewer.safetensors", status=1).splitlines()) == 20
    # Layers of which the same is to be said are one line.
    layers = {f"layers.{i}.w": np.zeros(2, "i1") for i in range(30)}
    sw.save_checkpoint("layers.safetensors", layers, sync=False)
    sw.save_checkpoint("none.safetensors", {"norm": zeros["t00"]}, sync=False)
    assert run("diff", "layers.safetensors", "none.safetensors", status=1).splitlines() == [
        "'layers.{0..29}.w' is only in the first checkpoint (30 tensors)",
        "'norm' is only in the second checkpoint",
        "if rules made the second checkpoint, give them with --rules: then its tensors are compared",
    ]
    found = json.loads(run("diff", "zeros.safetensors", "ones.safetensors", "--json", status=1))
    assert len(found) == 21
    said = {"name": "t00", "what": "values", "first": "0", "second": "1", "index": [0], "count": 2, "rows": []}
    assert found[0] == said


def test_diff_says_how_to_compare_what_was_rewritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where each has names that the other lacks; by the rules they are the same."""
    value = np.ones((2, 2), "f4")
    sw.save_checkpoint(tmp_path / "one", {"a.w": value}, to="hf")
    sw.save_checkpoint(tmp_path / "two", {"b.w": value}, to="hf")
    (tmp_path / "rules.toml").write_text('[[rewrite]]\nfrom = "a.{rest*}"\nto = "b.{rest*}"\n')
    both = [str(tmp_path / "one"), str(tmp_path / "two"), "--quiet"]
    assert main(["diff", *both]) == 1
    assert capsys.readouterr().out.endswith("give them with --rules: then its tensors are compared\n")
    assert main(["diff", *both, "--rules", str(tmp_path / "rules.toml")]) == 0
    assert capsys.readouterr().out == "the same tensors\n"


def test_verify_lists_twenty_and_counts_the_rest(run: Run) -> None:
    sw.save_checkpoint("many", {f"t{i}": np.zeros(8, "u1") for i in range(23)}, to="hf", sync=False)
    (file,) = Path("many").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[: -23 * 8] + b"x" * 23 * 8)
    lines = run("verify", "many", status=3).splitlines()
    assert len(lines) == 22
    assert lines[20:] == ["and 3 more (--json lists all)", "many: damaged: 23 of 23 tensors"]


def test_verify_says_once_that_a_file_is_missing(run: Run) -> None:
    sw.save_checkpoint("many", {f"t{i}": np.zeros(8, "u1") for i in range(5)}, to="hf", sync=False)
    (file,) = Path("many").glob("*.safetensors")
    file.unlink()
    line, total = run("verify", "many", status=3).splitlines()
    assert line.endswith("; it holds 5 tensors: 't0', 't1', 't2' and 2 more")
    assert total == "many: damaged: 5 of 5 tensors"
    found = json.loads(run("verify", "many", "--json", status=3))["damaged"]
    assert [(one["tensor"], one["file"]) for one in found] == [(f"t{i}", str(file)) for i in range(5)]
    assert found[0]["problem"] == line.partition(" 5 tensors")[0] + " 't0'"


def test_one_tensor_is_not_told_in_the_plural(run: Run) -> None:
    sw.save_checkpoint("one.safetensors", {"w": np.zeros(8, "u1")}, sync=False)
    assert "one.safetensors: safetensors, 1 tensor (1 uint8), 8 B\n" in run("inspect", "one.safetensors")
    assert run("verify", "one.safetensors").startswith("one.safetensors: safetensors, 1 tensor, 8 B: ")


def test_a_plan_says_what_it_would_take_and_writes_nothing(run: Run) -> None:
    lines = run(*plan("new")).splitlines()
    assert lines[0].startswith("new would be 2 files, 512.6 KiB, in 1 task; up to 16.0 MiB of memory in 1 thread; ")
    # Two halves of w, and b.
    assert lines[1].startswith("512.0 KiB are read, in 3 contiguous parts; ")
    assert [line.split()[0] for line in lines[2:]] == ["file", *(name for name, _ in files_of(run))]
    assert not Path("new").exists()


def files_of(run: Run) -> list[list[Any]]:
    """The files of the plan, with their sizes, from the JSON of it."""
    outline = json.loads(run(*plan("new", "--json")))
    assert (len(outline["files"]), outline["tasks"]) == (2, 1)
    assert outline["bytes"] == sum(size for _, size in outline["files"])
    assert 2**19 + 3 < outline["bytes"] < 2**19 + 1000
    return outline["files"]  # type: ignore[no-any-return]


def test_what_each_worker_would_do(run: Run) -> None:
    """There are 8 tasks of 64 KiB for w, and one for b; all that is read is written."""
    options = ("--workers", "9", "--task-bytes", "64KiB")
    document = json.loads(run(*plan("new", *options, "--json")))
    assert document["tasks"] == 9
    parts = document["parts"]
    assert [part["part"] for part in parts] == list(range(1, 10))
    assert sum(part["tasks"] for part in parts) == 9
    assert sum(part["reads"] for part in parts) == sum(part["writes"] for part in parts) == 2**19 + 3
    lines = run(*plan("new", *options)).splitlines()
    assert "in 9 tasks; " in lines[0]
    expected = [
        f"{part['part']}/9 {part['tasks']} {bytes_text(part['reads'])} {bytes_text(part['writes'])}" for part in parts
    ]
    at = lines.index(next(line for line in lines if line.startswith("part ")))
    assert [" ".join(line.split()) for line in lines[at + 1 : -1]] == expected
    both = " to ".join(bytes_text(pick(part["reads"] for part in parts)) for pick in (min, max))
    assert lines[-1] == f"9 parts: each reads {both} and writes {both}"
    many = run(*plan("new", "--workers", "21", "--task-bytes", "64KiB")).splitlines()
    assert sum("/21 " in line for line in many) == 20


def test_what_is_copied_along_is_named(run: Run) -> None:
    for count, more in ((8, ""), (10, " and 2 more")):
        run("reshard", "a.safetensors", f"from{count}", "--to", "hf", "--no-sync")
        for letter in "abcdefghij"[:count]:
            Path(f"from{count}", f"{letter}.md").write_text(letter)
        said = run("reshard", f"from{count}", f"to{count}", "--to", "hf", "--no-sync").splitlines()
        assert said[1:] == ["copied along: a.md, b.md, c.md, d.md, e.md, f.md, g.md, h.md" + more]


def test_the_parts_of_a_saved_plan(run: Run) -> None:
    said = run(*plan("new", "--save", "p.swplan", "--task-bytes", "65536"))
    assert said.startswith("p.swplan: 9 tasks of up to 64.0 KiB, 512.6 KiB in all; ")
    document = json.loads(run(*plan("new", "--save", "p.swplan", "--task-bytes", "64K", "--json")))
    size = sum(size for _, size in files_of(run))
    assert document == {"plan": "p.swplan", "tasks": 9, "bytes": size, "warnings": [], "left_out": []}
    first = json.loads(run("run", "p.swplan", "--part", "1/2", "--json", "--no-sync"))
    assert first == {"plan": "p.swplan", "tasks": first["of"], "of": first["of"]}
    assert 1 <= (before := first["of"]) <= 8
    assert run("run", "p.swplan") == f"p.swplan: {9 - before} tasks done, {before} were done before\n"
    assert run("run", "p.swplan") == "p.swplan: 0 tasks done, 9 were done before\n"
    done = json.loads(run("commit", "p.swplan", "--json", "--no-sync"))
    assert done["path"] == str(Path.cwd() / "new")
    assert [done[name] for name in ("tensors", "bytes_read", "bytes_written")] == [2, 2**19 + 3, 2**19 + 3]
    assert run("inspect", "new").splitlines()[2].endswith("  2  each 2 x 32768")
    assert run("diff", "a.safetensors", "new") == "the same tensors\n"
    run(*plan("one", "--save", "one.swplan"))
    assert run("run", "one.swplan") == "one.swplan: 1 task done\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--memory", "0"], "--memory is 0 bytes; at least 16384 bytes are needed"),
        (["--memory", "1"], "--memory is 1 byte; at least 16384 bytes are needed"),
        (["--jobs", "0"], "--jobs is 0; it must be at least 1"),
    ],
)
def test_too_little_memory_or_too_few_threads(
    run: Run, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    for command in (["verify", "a.safetensors"], ["diff", *["a.safetensors"] * 2], ["reshard", "a.safetensors", "new"]):
        assert main([*command, *arguments]) == 2
        assert capsys.readouterr().err == f"shardwise: error: {said}\n"


class Asked(BaseException):  # What the command does not catch.
    """Ends a command where the library would begin."""


def asked(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, arguments: list[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a command passes on to a function of the library."""
    got: list[Any] = []

    def note(*positional: Any, **named: Any) -> None:
        got.extend((positional, named))
        raise Asked

    with monkeypatch.context() as context:
        context.setattr(where, name, note)
        with pytest.raises(Asked):
            main(arguments)
    return got[0], {key: value for key, value in got[1].items() if key != "progress"}


WORK = ["--memory", "32MiB", "--jobs", "3", "--quiet"]
GIVEN = {"memory": 32 << 20, "threads": 3}
USUAL = {"memory": 256 << 20, "threads": None}


def test_every_option_reaches_the_library(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for function, files in (("verify", ["a"]), ("diff", ["a", "b"])):
        name = f"{function}_checkpoint{'s' * (function == 'diff')}"
        own: dict[str, Any] = {"which": "all", "layouts": None} | (
            {"rewrites": None, "drop": None} if function == "diff" else {}
        )
        assert asked(monkeypatch, checkpoints, name, [function, *files]) == ((*files,), {**own, **USUAL})
        assert asked(monkeypatch, checkpoints, name, [function, *files, *WORK]) == ((*files,), {**own, **GIVEN})

    every: dict[str, Any] = {"mesh": None, "to": None, "uneven": "even", "dtype": None, "rename": [], "rewrites": None}
    every |= {
        "only": None,
        "drop": None,
        "which": "all",
        "replicas": "check",
        "task_bytes": None,
        "strict": False,
        "rank": None,
        "padded": False,
        "parameter_names": None,
        "rules": None,
        "source_rules": None,
        "source_layouts": None,
        "config": None,
    }
    local = {"sync": True, "resume": False, "overflow": "refuse"}
    found = asked(monkeypatch, checkpoints, "reshard_checkpoint", ["reshard", "a", "b"])
    assert found == (("a", "b", None), {**every, **local, **USUAL})
    options = ["--uneven", "ceil", "--to", "hf", "--rename", "a=b", "--rename", "c==", "--only", "w", "--drop", "v"]
    options += ["--replicas", "first", "--task-bytes", "1MB", "--strict", "--padded", "--weights-only"]
    changed: dict[str, Any] = {"uneven": "ceil", "to": "hf", "rename": [("a", "b"), ("c", "=")], "only": "w"}
    changed |= {
        "drop": "v",
        "replicas": "first",
        "task_bytes": 10**6,
        "strict": True,
        "padded": True,
        "which": "weights",
    }
    command = ["reshard", "a", "b", *options, *WORK]
    more = ["--no-sync", "--resume", "--dtype", "f2", "--overflow", "saturate"]
    found = asked(monkeypatch, checkpoints, "reshard_checkpoint", [*command, *more])
    given = {"sync": False, "resume": True, "dtype": "f2", "overflow": "saturate"}
    assert found == (("a", "b", None), {**every, **local, **changed, **GIVEN, **given})
    planned = {**every, **changed, "overflow": "refuse", "memory": 256 << 20}
    command = ["plan", "a", "b", *options]
    found = asked(monkeypatch, planning, "plan_checkpoint", [*command, "--save", "p"])
    assert found == (("a", "b", None), planned)

    run(*plan("new", "--save", "p.swplan", "--task-bytes", "64KiB"))
    saved = CheckpointPlan
    assert asked(monkeypatch, saved, "run", ["run", "p.swplan"])[1] == {**USUAL, "sync": True}
    found = asked(monkeypatch, saved, "run", ["run", "p.swplan", "--part", "2/3", "--no-sync", *WORK])
    assert (found[0][-1], found[1]) == ((2, 3), {**GIVEN, "sync": False})
    usual = {"check": False, "memory": 256 << 20, "sync": True}
    assert asked(monkeypatch, saved, "commit", ["commit", "p.swplan"])[1] == usual
    found = asked(monkeypatch, saved, "commit", ["commit", "p.swplan", "--check", "--no-sync", "--memory", "1G"])
    assert found[1] == {"check": True, "memory": 2**30, "sync": False}
