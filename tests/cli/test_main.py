"""The command line as a program: its exit status, its errors in one line, and output that goes elsewhere."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from shardwise.cli import main
from shardwise.cli.terminal import Screen

from .conftest import error_of

SHOW = ["show", "8,6", "--mesh", "data=2,model=4", "--layout", "model,data"]


def run(*arguments: object, **options: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "shardwise", *map(str, arguments)]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8", **options.pop("env", {})}  # type: ignore[dict-item]
    return subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, timeout=3600, **options)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["shove"], "shove"),
        (["show", "8,6"], "--mesh, --layout"),
        (["show", "8,6", "--mesh", "data=2", "--layout"], "--layout: expected one argument"),
        (["show", "8,6", "--mesh=--", "--layout", "-,-"], "--"),
        ([*SHOW, "--uneven", "odd"], "odd"),
        ([*SHOW, "--dtype", "float31"], "float31"),
        ([*SHOW, "--color"], "--color"),
        (["show", "8;6", "--mesh", "data=2", "--layout", "-,-"], "8;6"),
        (["show", "8,6", "--mesh", "data", "--layout", "-,-"], "'data' is not an axis and its size"),
        (["show", "8,6", "--mesh", "data=0", "--layout", "-,-"], "0"),
        (["show", "8,6", "--mesh", f"a={2**62},b=4", "--layout", "-,-"], "9223372036854775807"),
        (["show", "8,6", "--mesh", "data=2", "--layout", "data"], "2"),
        (["show", "8,6", "--mesh", "data=2", "--layout", "model,-"], "model"),
        (["show", "8,6", "--mesh", "data=2", "--layout", "data,data"], "data"),
        (["show", "7,6", "--mesh", "data=2", "--layout", "data,-"], "7"),
        (["show", f"{2**40},{2**40}", "--mesh", "data=2", "--layout", "data,-"], "9223372036854775807"),
    ],
)
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert message in error_of(capsys, *arguments)


words = st.lists(st.sampled_from([*"abx0127-,=+ (*\0é\ud800", "99999999999", "None", "--"]), max_size=8).map("".join)


@pytest.mark.heavy
@settings(max_examples=300, deadline=None)
@given(shape=words, mesh=words | st.just("a=2,b=3"), layout=words, dtype=words | st.just("f4"))
def test_any_words_give_a_picture_or_one_line(shape: str, mesh: str, layout: str, dtype: str) -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["show", f"--mesh={mesh}", "--layout", layout, f"--dtype={dtype}", "--uneven=ceil", "--", shape])
    assert status in (0, 2)
    assert err.getvalue().count("\n") == (status == 2)
    assert bool(out.getvalue()) == (status == 0)


def test_wrong_files(capsys: pytest.CaptureFixture[str], gpt: Path, rules: Path, tmp_path: Path) -> None:
    mesh = ("--mesh", "data=2,model=4")
    gone, bad, fifo = tmp_path / "gone", tmp_path / "bad", tmp_path / "fifo"
    bad.write_bytes(b"[\x1b]\n]\xff")
    os.mkfifo(fifo)
    for file, message in [(gone, "No such file"), (bad, str(bad)), (fifo, "is a FIFO"), (tmp_path / "x", "No such")]:
        assert message in error_of(capsys, "report", file, *mesh, "--rules", rules)
    for file in (gone, bad, fifo, tmp_path):
        assert str(file) in error_of(capsys, "report", gpt, *mesh, "--rules", file)
    assert "--mesh is missing" in error_of(capsys, "report", gpt, "--rules", rules)
    assert "--mesh is missing" in error_of(capsys, "reshard", gpt, tmp_path / "out", "--rules", rules)
    assert "model" in error_of(capsys, "report", gpt, "--mesh", "data=2", "--rules", rules)
    folder = tmp_path / "folder"
    folder.mkdir()
    assert "the folder is empty" in error_of(capsys, "report", folder, *mesh, "--rules", rules)


def test_files_that_are_something_else_are_said_to_be(
    capsys: pytest.CaptureFixture[str], rules: Path, tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    for data, kind in [
        (b"PK\x03\x04" + bytes(60), "not a safetensors file but a zip archive, as written by torch.save and Keras"),
        (b"\x89HDF\r\n\x1a\n" + bytes(60), "not a safetensors file but an HDF5 file"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid",
            "but a Git LFS pointer: the file itself was not downloaded",
        ),
        (b"<!DOCTYPE html><title>404</title>", "but a web page"),
        ("Größe: 12".encode() * 60, "but text: 'Größe: 12"),
        (b"", "has 0 bytes and is empty"),
        (b"short", "has 5 bytes and is text: 'short'"),
    ]:
        file.write_bytes(data)
        assert kind in error_of(capsys, "report", file, "--mesh", "data=2,model=2", "--rules", rules)
    # What is a header, but of a file that was cut, is not said to be something else.
    file.write_bytes((1000).to_bytes(8, "little") + b'{"a": ')
    assert error_of(capsys, "report", file, "--mesh", "data=2,model=2", "--rules", rules).endswith("in a file of 14\n")


def test_without_a_command_it_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    bare = capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert bare == capsys.readouterr().out
    assert all(f"    {name}" in bare for name in ("report", "plan", "show", "reshard", "rules", "completion"))
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"shardwise {sw.__version__}\n"


@pytest.mark.heavy
def test_as_a_program() -> None:
    done = run(*SHOW)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("8 x 6 laid out as model,data")
    done = run("show", "8,6", "--mesh", "data=2", "--layout", "-,x")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    for arguments in (["--help"], ["report", "--help"], ["show", "--help"]):
        done = run(*arguments)
        assert done.returncode == 0
        assert done.stdout.startswith("usage: shardwise")


def test_a_layout_that_begins_like_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    for layout in (["--layout", "-,data"], ["--layout=-,data"], ["--layout", ",data"], ["--layout", "None,data"]):
        assert main(["show", "8,6", "--mesh", "data=2", *layout]) == 0
        assert capsys.readouterr().out.startswith("8 x 6 laid out as -,data on")


@pytest.mark.heavy
def test_the_reader_may_stop_reading() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "shardwise", *SHOW],
            stdout=closed,
            stderr=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if name != "FORCE_COLOR"},  # rich's own status is 1.
            timeout=3600,
        )
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(os.name != "posix", reason="needs a shell that closes files")
def test_without_a_standard_output_there_is_one_line() -> None:
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "shardwise", *SHOW]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=3600)
    assert (done.returncode, done.stderr) == (2, "shardwise: error: there is no standard output to write to\n")


@pytest.mark.heavy
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "shardwise", *SHOW], stdout=full, stderr=subprocess.PIPE, text=True, timeout=3600
        )
    assert done.returncode == 2
    assert done.stderr.startswith("shardwise: error: ")
    assert done.stderr.count("\n") == 1


def test_a_program_that_calls_it_keeps_its_output_and_its_descriptors() -> None:
    """What it printed after a refusal went nowhere, and each refusal took a descriptor where there was no output."""
    code = """
import contextlib, io, os, sys
from shardwise.cli import main
print("before")
print(main(["show"]), "after")
taken = []
for _ in range(5):
    with contextlib.redirect_stdout(io.StringIO()):
        main(["show"])
    taken.append(os.dup(2))
    os.close(taken[-1])
print(len(set(taken)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=3600)
    assert (done.returncode, done.stdout) == (0, "before\n2 after\n1\n")


def test_with_and_without_rich_the_text_is_the_same(
    capsys: pytest.CaptureFixture[str], gpt: Path, rules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ["report", str(gpt), "--mesh", "data=2,model=4", "--rules", str(rules)]
    assert [main(SHOW), main(plan)] == [0, 0]
    with_rich = capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert [main(SHOW), main(plan)] == [0, 0]
    assert capsys.readouterr().out == with_rich


@pytest.mark.heavy
def test_output_that_has_no_unicode() -> None:
    done = run(*SHOW, env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert "\\u" not in done.stdout
    assert done.stdout.splitlines()[-3:] == [
        "     +-------+-------+",
        " 6:8 | cpu:3 | cpu:7 |",
        "     +-------+-------+",
    ]


def test_a_narrow_terminal_shortens_names(
    capsys: pytest.CaptureFixture[str], gpt: Path, rules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Screen.__init__

    def narrow(screen: Screen) -> None:
        real(screen)
        screen.size = os.terminal_size((84, 24))

    monkeypatch.setattr(Screen, "__init__", narrow)
    assert main(["report", str(gpt), "--mesh", "data=2,model=4", "--rules", str(rules)]) == 0
    rows = capsys.readouterr().out.splitlines()[2:6]
    assert max(map(len, rows)) <= 84


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (AttributeError("x"), 70, "a fault of shardwise itself: AttributeError: x; please report it"),
        (sw.InternalError("panic"), 70, "a fault of shardwise itself: InternalError: panic; please report it"),
        (RecursionError("deep"), 70, "a fault of shardwise itself: RecursionError: deep"),
        (MemoryError(), 2, "error: there is not enough memory\n"),
        (MemoryError("4 GiB"), 2, "error: there is not enough memory: 4 GiB\n"),
    ],
)
def test_a_fault_is_a_sentence_too(
    raised: Exception, status: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise raised

    monkeypatch.setattr("shardwise.cli.rules.run_rules", fail)
    assert main(["rules"]) == status
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    monkeypatch.setenv("SHARDWISE_TRACEBACK", "1")
    if status == 70:
        with pytest.raises(type(raised)):
            main(["rules"])
