"""What shells complete: asked of the shells themselves, where they are installed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.cli.layout_arguments import SHELLS

from .conftest import error_of

# The script sets the function that bash calls; this calls it as bash does, with the words typed so far.
BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"
complete -p shardwise > /dev/null || exit 3
function=$(complete -p shardwise | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$function shardwise "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(params=SHELLS)
def script(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> tuple[str, Path]:
    pytest.importorskip("shtab")
    assert main(["completion", request.param]) == 0
    path = tmp_path / f"shardwise.{request.param}"
    path.write_text(capsys.readouterr().out)
    return request.param, path


def test_the_shell_reads_its_script(script: tuple[str, Path]) -> None:
    shell, path = script
    text = path.read_text()
    assert all(word in text for word in ("translate", "uneven", "balanced", "megatron/llama"))
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, "-n", path], capture_output=True, text=True, timeout=3600)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["pl"], {"plan"}),
        (["re"], {"report", "reshard"}),
        (["plan", "--un"], {"--uneven"}),
        (["show", "--uneven", "ba"], {"balanced"}),
        (["completion", "f"], {"fish"}),
        (["rules", "vllm/mix"], {"vllm/mixtral"}),
        (["report", "model.s"], {"model.safetensors"}),
        (["report", "--rules", "model.t"], {"model.toml"}),
        (["reshard", "--source-rules", "model.t"], {"model.toml"}),
        (["inspect", "model.s"], {"model.safetensors"}),
        (["diff", "model.safetensors", "model.s"], {"model.safetensors"}),
        (["commit", "model."], {"model.safetensors", "model.toml"}),
    ],
)
def test_bash_completes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, typed: list[str], offered: set[str]
) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    path = tmp_path / "script"
    path.write_text(capsys.readouterr().out)
    for name in ("model.safetensors", "model.toml"):
        (tmp_path / name).touch()
    command = ["bash", "-c", BASH, "bash", str(path), "shardwise", *typed]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, cwd=tmp_path)
    assert set(done.stdout.split()) == offered, done.stderr


def test_without_shtab(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert r"pip install 'shardwise[cli]'" in error_of(capsys, "completion", "bash")
    assert "tcsh" in error_of(capsys, "completion", "tcsh")
