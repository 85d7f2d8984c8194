"""`shardwise einsum` and `shardwise propagate`: what moves for one op and for a whole computation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.cli import main
from shardwise.computation import Computation
from shardwise.propagate import propagate
from tests.propagate.test_whole import LAYER

MESH = ("--mesh", "dp=8,tp=4", "--dtype", "bfloat16")
ROW = ("bsf,fd->bsd", "dp,-,tp", "tp,-", "--shapes", "32,2048,14336", "14336,4096")


def lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["einsum", *arguments, *MESH]) == 0
    return capsys.readouterr().out.splitlines()


def test_says_what_einsum_does(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = sw.DeviceMesh((8, 4), ("dp", "tp"))
    shapes = [(32, 2048, 4096), (4096, 14336)]
    found = sw.einsum("bsd,df->bsf", x=("dp", None, None), w=(None, "tp"), shapes=shapes, mesh=mesh, dtype="bfloat16")
    given = ("bsd,df->bsf", "dp,-,-", "-,tp", "--shapes", "32,2048,4096", "4096x14336")
    assert lines(capsys, *given) == found.explain().splitlines()
    assert json.loads("\n".join(lines(capsys, *given, "--json"))) == found.to_json()


def test_the_result_that_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    scattered = lines(capsys, *ROW, "--out", "dp,tp,-")
    assert "result: reduce-scatter over tp, each device receives 48.0 MiB (50,331,648 bytes)." in scattered
    assert "Nothing moves." in lines(capsys, *ROW, "--out", "dp,-,-", "--unreduced", "tp")
    assert "w: -,tp, 6 x 2 on each device." in lines(
        capsys, "ab,bc->ac", "-,-", "?", "--shapes", "4,6", "6,8", "--out", "-,tp"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*ROW, "--policy", "explicit"), "give out="),
        ((*ROW, "--unreduced", "tp"), "--unreduced is given without --out"),
        ((*ROW[:2], *ROW[3:]), "1 layout and 2 shapes are given"),
        ((*ROW[:4], "32,2048,14336", "14336"), "shapes[1] is (14336,), but 'fd' has 2 dims"),
        ((*ROW, "--policy", "best"), "invalid choice: 'best'"),
        ((*ROW, "--dtype", "float31"), "float31"),
    ],
)
def test_what_cannot_be(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["einsum", *arguments, *(MESH if "--dtype" not in arguments else MESH[:2])]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_a_whole_computation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, page = tmp_path / "layer.json", tmp_path / "layer.html"
    file.write_text(json.dumps(LAYER), encoding="utf-8")
    found = propagate(
        Computation.from_json(LAYER),
        [("dp", "tp"), None],
        results=[("dp", None)],
        mesh=sw.DeviceMesh((2, 2), ("dp", "tp")),
    )
    given = ["propagate", str(file), "dp,tp", "?", "--results", "dp,-", "--mesh", "dp=2,tp=2"]
    assert main([*given, "--html", str(page)]) == 0
    assert capsys.readouterr().out.splitlines()[:-1] == found.explain().splitlines()
    assert "dp=2,tp=2" in page.read_text(encoding="utf-8")
    assert main([*given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found.to_json()
    assert main([*given[:3], "--mesh", "dp=2,tp=2"]) == 2
    assert "LAYOUT for inputs: 1 given, 2 needed; write ? for a free one" in capsys.readouterr().err
