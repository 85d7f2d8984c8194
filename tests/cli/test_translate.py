"""`shardwise translate`: one layout in many dialects."""

from __future__ import annotations

import json

import pytest

from shardwise.cli import main


def lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["translate", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    mesh, to = "data=2,model=4", "jax,torch, hlo,shardy,megatron,spmd"
    assert lines(capsys, "--mesh", mesh, "--layout", "data,model", "--to", to) == [
        "jax       PartitionSpec('data', 'model')",
        "torch     [Shard(0), Shard(1)]",
        "hlo       {devices=[2,4]<=[8]}",
        'shardy    #sdy.sharding<@mesh, [{"data"}, {"model"}]>',
        "megatron  rank_offsets=[(0, data, 2), (1, model, 4)], replica_id=0",
        "spmd      SpmdType({'data': S(0), 'model': S(1)})",
    ]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--mesh", "data=2,model=4", "--layout", "-,model+data", "--to", "jax,keras", "--json")
    texts = json.loads("\n".join(lines(capsys, *given)))
    assert texts["jax"] == "PartitionSpec(None, ('model', 'data'))"
    assert texts.keys() == {"jax", "keras"}
    assert texts["keras"].startswith("cannot express: dim 1")


def test_axis_tuples_and_partial_sums(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--mesh", "a=2,b=3,c=5", "--layout", "-,c+a", "--unreduced", "b")
    assert lines(capsys, *given, "--to", "jax") == ["jax  PartitionSpec(None, ('c', 'a'), unreduced={'b'})"]
    assert lines(capsys, *given, "--to", "keras") == [
        "keras  cannot express: dim 1 is cut by the axes ('c', 'a'); Keras has at most one axis per dim"
    ]


def test_scalars_and_one_dim(capsys: pytest.CaptureFixture[str]) -> None:
    assert lines(capsys, "--mesh", "a=2", "--layout", "()", "--to", "shardy") == ["shardy  #sdy.sharding<@mesh, []>"]
    assert lines(capsys, "--mesh", "a=2", "--layout", "-", "--to", "shardy") == ["shardy  #sdy.sharding<@mesh, [{}]>"]


def test_all_dialects(capsys: pytest.CaptureFixture[str]) -> None:
    names = [line.split()[0] for line in lines(capsys, "--mesh", "a=2", "--layout", "a")]
    assert names == ["jax", "torch", "tf", "keras", "hlo", "shardy", "megatron", "spmd"]


@pytest.mark.parametrize(
    ("layout", "to", "message"),
    [("a", "mlx", "'mlx'; the dialects are jax"), ("b", "jax", '"b"'), ("a,a", "jax", "uses axis 'a'")],
)
def test_refusals(capsys: pytest.CaptureFixture[str], layout: str, to: str, message: str) -> None:
    assert main(["translate", "--mesh", "a=2", "--layout", layout, "--to", to]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


def test_a_name_that_is_half_of_a_surrogate_pair_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "--mesh", "x=2", "--layout", "x", "--unreduced", "\udc80"]) == 2
    assert "holds a character that cannot be printed" in capsys.readouterr().err
