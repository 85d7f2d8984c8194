"""`shardwise reshard` with rules that rewrite, and its progress."""

from __future__ import annotations

import io
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.cli import main, progress

from ..oracle import engines


def test_from_one_engine_to_another_by_their_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = engines.hugging_face("llama", 0)
    sw.save_checkpoint(tmp_path / "hf", whole, sync=False)
    config = tmp_path / "hf" / "config.json"
    config.write_text(json.dumps(engines.config("llama")))
    megatron, vllm = "torch_dist/llama", "vllm/llama"
    source, there, other = (str(tmp_path / name) for name in ("hf", "torch_dist", "vllm"))
    assert main(["reshard", source, there, "--rules", megatron, "--mesh", "tp=4", "--no-sync"]) == 0
    further = ["--config", str(config), "--no-sync"]
    arguments = [there, other, "--source-rules", megatron, "--rules", vllm, "--mesh", "tp=8", *further]
    assert main(["reshard", *arguments]) == 0
    back = str(tmp_path / "back.safetensors")
    assert main(["reshard", other, back, "--source-rules", vllm, *further]) == 0
    assert main(["diff", source, back]) == 0
    assert capsys.readouterr().err == ""
    for path, engine in ((there, "torch_dist"), (other, "vllm")):
        with sw.open_checkpoint(path) as checkpoint:
            expected = engines.ENGINES[engine]("llama", whole)
            assert set(checkpoint) == set(expected)
            assert all(checkpoint.read(name).tobytes() == value.tobytes() for name, value in expected.items())


def test_rules_without_layouts_need_no_mesh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sw.save_checkpoint(tmp_path / "a", engines.hugging_face("gpt2", 0), sync=False)
    rules = tmp_path / "rules.toml"
    rules.write_text("[[rewrite]]\nfrom = 'transformer.{rest*}'\nto = '{rest*}'\n")
    assert main(["reshard", str(tmp_path / "a"), str(tmp_path / "b"), "--rules", str(rules), "--no-sync"]) == 0
    with sw.open_checkpoint(tmp_path / "b") as checkpoint:
        assert "wte.weight" in checkpoint
    arguments = ["reshard", str(tmp_path / "a"), str(tmp_path / "c"), "--rules", str(rules), "--mesh", "tp=2"]
    assert main(arguments) == 2
    assert "--rules must say how the tensors are cut" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, **settings: Any) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.ShownProgress(settings.pop("quiet", False), **settings) as show:
        for done in (0, 1 << 20, 3 << 20):
            if show is not None:
                show(done, 3 << 20)
    return stream.getvalue()


def test_progress_is_shown_on_a_terminal_or_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "80")
    clock = itertools.count(0, 10)
    monkeypatch.setattr("shardwise.cli.progress.time.monotonic", lambda: float(next(clock)))
    assert shown(monkeypatch, io.StringIO()) == ""
    assert shown(monkeypatch, io.StringIO(), quiet=True, asked=True) == ""
    assert shown(monkeypatch, Terminal(), quiet=True) == ""
    lines = shown(monkeypatch, io.StringIO(), asked=True).splitlines()
    assert [line.split(",")[0] for line in lines] == ["0 B of 3.0 MiB", "1.0 MiB of 3.0 MiB", "3.0 MiB of 3.0 MiB"]
    assert "s left" in lines[1]
    monkeypatch.setenv("TERM", "xterm")
    assert "3.0/3.0 MiB" in shown(monkeypatch, Terminal())
    monkeypatch.setitem(sys.modules, "rich.console", None)
    plain = shown(monkeypatch, Terminal())
    assert plain.startswith("\r0 B of 3.0 MiB")
    assert plain.endswith("\n")


def test_lines_come_every_five_seconds_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("shardwise.cli.progress.time.monotonic", lambda: now)
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    with progress.ShownProgress(False, asked=True) as show:
        assert show is not None
        for now, mebibytes in ((101.0, 1), (108.0, 2), (112.9, 3), (116.0, 8)):  # noqa: B007
            show(mebibytes << 20, 8 << 20)
    # 2 MiB in 8 s are 256 KiB/s, and the other 6 MiB take 24 s; 8 MiB in 16 s are 512 KiB/s.
    assert stream.getvalue().splitlines() == [
        "2.0 MiB of 8.0 MiB, 256.0 KiB/s, 24 s left",
        "8.0 MiB of 8.0 MiB, 512.0 KiB/s, 0 s left",
    ]
    now, stream = 0.0, io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.ShownProgress(False, asked=True) as show:
        assert show is not None
        for now, done in ((1.0, 0), (2.0, 3), (3.0, 4)):  # noqa: B007
            show(done, 4)
    assert stream.getvalue() == "4 B of 4 B, 1 B/s, 0 s left\n"
    now = 50.0
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with progress.ShownProgress(False) as show:
        assert show is not None
        for now, done in ((50.1, 1), (50.5, 2), (50.6, 3), (51.0, 4)):  # noqa: B007
            show(done, 4)
    assert [line.split(" of ")[0] for line in terminal.getvalue().split("\r")] == ["", "2 B", "4 B"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "a.safetensors", "new", "--to", "dcp", "--save", "new.swplan"], "tensor 'w' is F4"),
        (["plan", "a.safetensors", "new", "--to", "dcp", "--workers", "2"], "tensor 'w' is F4"),
        (["reshard", "a.safetensors", "new", "--to", "dcp"], "tensor 'w' is F4"),
    ],
)
def test_what_the_library_calls_a_wrong_type_is_one_line(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    pytest.importorskip("fsspec")
    monkeypatch.chdir(tmp_path)
    header = b'{"w":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}'
    Path("a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\x21")
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("shardwise: error: ")
    assert said in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors"]


@pytest.mark.parametrize("form", ["orbax", "keras"])
def test_forms_that_are_only_read_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    sw.save_checkpoint(tmp_path / "a", {"w": np.ones(3)}, sync=False)
    said = f"{form} is read, not written: write safetensors or hf, "
    assert main(["reshard", str(tmp_path / "a"), str(tmp_path / "b"), "--to", form]) == 2
    assert said in capsys.readouterr().err
    with pytest.raises(sw.LayoutError, match=f"to is '{form}'; it must be one of .*; {said}"):
        sw.reshard_checkpoint(tmp_path / "a", tmp_path / "b", to=form)  # type: ignore[arg-type]
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("more", [[], ["--json"], ["--workers", "2"]])
def test_a_plan_for_a_disk_that_is_too_small_says_so(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sw.save_checkpoint(tmp_path / "a.safetensors", {"w": np.zeros(1000, "f4")}, sync=False)
    plan = ["plan", str(tmp_path / "a.safetensors"), str(tmp_path / "b"), "--to", "hf", *more]
    assert main(plan) == 0
    capsys.readouterr()
    monkeypatch.setattr("shardwise.store.write.places.leftovers.free_space", lambda _: 1000)
    assert main(plan) == 1
    said = capsys.readouterr()
    assert "there is no room for it: it takes 4" in said.err
    assert "but 1000 B are free" in said.err
    assert said.out
