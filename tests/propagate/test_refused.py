"""Computations and layouts that are refused, by errors that name the argument, what was given, and the limit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, cast

import pytest

import shardwise as sw
from shardwise.computation import Computation, FactorRule
from shardwise.propagate import Start, propagate

from .test_whole import LAYER, MESH, F, in_body


def held(*axes: list[str]) -> dict[str, Any]:
    """Return a constraint as the only op."""
    return {"ops": [constrained({"axes": axes})["ops"][0] | {"source": "model.py:9"}], "outputs": [2]}


def constrained(attributes: dict[str, Any]) -> dict[str, Any]:
    return {"ops": [{"op": "constraint", "in": [0], "out": [[[8, 4], F]], "attrs": attributes}]}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"outputs": [4]}, "outputs names value 4; only values below 4 are made before it"),
        ({"inputs": [[[8, 4], F]]}, r"ops\[0\].in names value 1; only values below 1 are made before it"),
        (
            {"ops": [{"op": "my_product", "in": [0], "out": []}]},
            r"ops\[0\]: op \"my_product\": no rule is known for it; give one",
        ),
        (
            {"ops": [LAYER["ops"][0] | {"out": [[[8, 17], F]]}]},
            r"ops\[0\] \(model.py:7\): op \"dot_general\": results\[0\]",
        ),
        ({"ops": [{"op": "tanh"}]}, r"ops\[0\]: an op must be a mapping with op, in and out"),
        ({"inputs": [[8, 4]]}, r"inputs\[0\]\[0\]|shape"),
        ({"inputs": ["f32"]}, r"inputs\[0\] must be a shape and a dtype"),
        ({"ops": "tanh"}, "ops must be a list"),
        (in_body("loop", {"trips": 2**70}), r"trips is \d+; it must be from 0 to 2\*\*63 - 1"),
        (constrained({"axes": ["x", []]}), "axes is .*; it must have a list of axes for each of 2 dims"),
        (constrained({"axes": [[3], []]}), "axes must be a string, got 3"),
        (constrained({"axes": [[], []], "open": 1}), "open must be a sequence of integers, got 1"),
        (in_body("call", {}) | {"outputs": [0], "inputs": [[[8, 5], F]]}, r"ops\[0\]: body 0 must take"),
        (in_body("loop", {"trips": -1}), "trips is -1; it must be from 0 to"),
        (
            {"ops": [{"op": "while", "in": [0], "out": [[[8, 4], F]], "bodies": []}]},
            "a while must have two bodies, the test and",
        ),
        (
            {"ops": [{"op": "case", "in": [0], "out": [[[8, 4], F]], "bodies": []}]},
            "the first operand of a case must be a scalar",
        ),
        ({"ops": [{"op": "loop", "in": [0], "out": [[[8, 4], F]]}]}, r"ops\[0\].body must be a mapping with inputs"),
        (
            {"ops": [{"op": "call", "in": [0], "out": [[[8, 4], F]], "rule": {"text": "([i,j])->([i,j])"}}]},
            "a call takes no rule; an op with a rule must have another name",
        ),
        (
            {"ops": [{"op": "tanh", "in": [0, 0], "out": [[[8, 4], F]]}]},
            r"op \"tanh\": it has 1 operand and 1 result",
        ),
        ({"ops": [{"op": "constant", "in": [0], "out": [[[8, 4], F]]}]}, "it must have no operands and one result"),
        (
            {"ops": [{"op": "constraint", "in": [0], "out": [[[8, 4], F]], "attrs": {"axes": [["x"]]}}]},
            "axes is .*; it must have a list of axes for each of 2 dims",
        ),
    ],
)
def test_what_is_no_computation_is_refused(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises((sw.LayoutError, TypeError), match=says):
        Computation.from_json(LAYER | change)
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps(LAYER | change), encoding="utf-8")
    with pytest.raises(sw.ParseError, match=r"wrong\.json: "):
        Computation.load(file)


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda one: propagate(one, cast(Any, None), mesh=MESH), "layouts must be a sequence of layouts, got None"),
        (lambda one: propagate(one, "xy", mesh=MESH), "layouts must be a sequence of layouts, got 'xy'"),
        (
            lambda one: propagate(one, cast(Any, [3, None]), mesh=MESH),
            r"layouts\[0\] must be a TensorLayout, a tuple of axes",
        ),
        (
            lambda one: propagate(one, [None] * 2, results=[("z", None)], mesh=MESH),
            r"results\[0\]: axes\[0\] names",
        ),
        (
            lambda one: propagate(one, [Start(("x", None), open=cast(Any, 1)), None], mesh=MESH),
            r"layouts\[0\]\.open must be",
        ),
        (lambda one: propagate(one, [None] * 2, mesh=MESH).explain(-1), "most is -1; it must be at least 0"),
        (lambda one: one.run(None), "arrays must be a sequence of arrays, got None"),
        (lambda one: one.run(["a", 1]), r"arrays\[0\] cannot be of dtype float32: "),
        (
            lambda _: Computation(
                [], [{"op": "constant", "in": [], "out": [[(), F]], "attrs": {"value": "x"}}], [0]
            ).run([]),
            "constant: numpy cannot compute it: ValueError: ",
        ),
        (lambda _: FactorRule("([i])->([i])", sizes=cast(Any, [1])), "sizes must be a Mapping, got list"),
        (lambda _: FactorRule("([i])->([i])", sum=cast(Any, None)), "sum must be the names of factors, got None"),
        (
            lambda one: propagate(Computation.from_json(one.to_json() | held(["z"], [])), [None] * 2, mesh=MESH),
            r"ops\[0\] \(model.py:9\): op \"constraint\": axes names axis \"z\"",
        ),
        (
            lambda one: propagate(Computation.from_json(one.to_json() | held(["x"], ["x"])), [None] * 2, mesh=MESH),
            r"ops\[0\] \(model.py:9\): op \"constraint\": axes\[1\] uses axis \"x\", which axes\[0\] uses already",
        ),
        (
            lambda _: propagate(Computation([[(4,), "f99"]], [], [0]), [("x",)], mesh=MESH),
            "a value of the computation has the dtype 'f99', whose size is not known",
        ),
    ],
)
def test_errors_name_the_argument(ask: Any, says: str) -> None:
    with pytest.raises((sw.LayoutError, TypeError), match=says):
        ask(Computation.from_json(LAYER))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(sw.ParseError, match="is not a regular file"):
        Computation.load(tmp_path / "fifo")
    (tmp_path / "list.json").write_text("[]", encoding="utf-8")
    with pytest.raises(sw.ParseError, match=r"list\.json: a computation must be a mapping"):
        Computation.load(tmp_path / "list.json")


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    computation = Computation.from_json(LAYER)
    with pytest.raises(sw.LayoutError, match="layouts has 1 entry for 2 inputs"):
        propagate(computation, [None], mesh=MESH)
    with pytest.raises(sw.LayoutError, match=r"layouts\[0\] has 1 dim, but its tensor has 2"):
        propagate(computation, [("x",), None], mesh=MESH)
    with pytest.raises(sw.LayoutError, match=r"layouts\[0\]\.open has 2; the tensor has 2 dims"):
        propagate(computation, [Start(("x", None), open=[2]), None], mesh=MESH)
    with pytest.raises(
        sw.LayoutError,
        match=r"layouts\[0\]\.priorities is \[1\]; it must have a number from 0 to 2\*\*32 - 1 for each of 2",
    ):
        propagate(computation, [Start(("x", None), priorities=[1]), None], mesh=MESH)
    with pytest.raises(sw.LayoutError, match="results has 2 entries for 1 result"):
        propagate(computation, [("x", None), None], results=[None, None], mesh=MESH)
    with pytest.raises(sw.LayoutError, match="policy is 'most'; it must be one of 'explicit', 'shardy', 'least'"):
        propagate(computation, [("x", None), None], mesh=MESH, policy="most")  # type: ignore[arg-type]
    with pytest.raises(sw.ParseError, match="a computation must be a mapping"):
        Computation.from_json([])
    file = tmp_path / "no.json"
    file.write_text("{", encoding="utf-8")
    with pytest.raises(sw.ParseError):
        Computation.load(file)
