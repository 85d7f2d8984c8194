"""Computations as data, and the layouts of all their values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.computation import Computation, FactorRule
from shardwise.propagate import propagate
from tests.oracle import computations
from tests.oracle.corpora import Comparison, compared

MESH = sw.DeviceMesh((2, 4), ("x", "y"))
F = "float32"
#: tanh(a @ b), as JSON has it.
LAYER: dict[str, Any] = {
    "inputs": [[[8, 4], F], [[4, 16], F]],
    "ops": [
        {
            "op": "dot_general",
            "in": [0, 1],
            "out": [[[8, 16], F]],
            "attrs": {"lhs_contracting_dimensions": [1], "rhs_contracting_dimensions": [0]}
            | {f"{side}_batching_dimensions": [] for side in ("lhs", "rhs")},
            "source": "model.py:7",
        },
        {"op": "tanh", "in": [2], "out": [[[8, 16], F]]},
    ],
    "outputs": [3],
}


def test_layouts_are_those_of_shardy() -> None:
    found = Comparison()
    for name, differs in computations.compare_programs(computations.cases_of("programs")):
        found.add(name, compared(False, differs))
    assert found.different == []
    assert found.cases == 250


def test_a_layout_that_differs_is_found() -> None:
    cases = computations.cases_of("programs")
    wrong = cases[0]
    wrong["shardy"]["values"][-1] = [["nowhere"]]
    (_, differs), *_ = computations.compare_programs([wrong])
    assert "nowhere" in str(differs())


def test_json_and_back(tmp_path: Path) -> None:
    computation = Computation.from_json(LAYER)
    assert computation.to_json() == LAYER
    assert Computation.from_json(json.loads(json.dumps(computation.to_json()))) == computation
    file = tmp_path / "layer.json"
    file.write_text(json.dumps(LAYER), encoding="utf-8")
    assert Computation.load(file) == computation
    assert repr(computation) == "<Computation of 2 ops, 2 inputs and 1 results>"


def test_layouts_go_forward_and_backward() -> None:
    computation = Computation.from_json(LAYER)
    found = propagate(computation, [("x", None), (None, "y")], mesh=MESH)
    assert [layout and layout.axes for layout in found.layouts] == [("x", None), (None, "y"), ("x", "y"), ("x", "y")]
    # A summed letter that is cut in one operand cuts the free one.
    free = propagate(computation, [(None, "y"), None], mesh=MESH)
    assert [layout and layout.axes for layout in free.layouts] == [(None, "y"), ("y", None), None, None]
    assert free.to_json()["layouts"][2] is None


def test_a_rule_of_ones_own() -> None:
    rule = FactorRule("([i,k],[k,j])->([i,j])", sum="k")
    own = {"op": "my_product", "in": [0, 1], "out": [[[8, 16], F]], "rule": rule.to_json()}
    computation = Computation.from_json(LAYER | {"ops": [own, LAYER["ops"][1]]})
    found = propagate(computation, [("x", None), (None, "y")], mesh=MESH)
    assert found.layouts[3] == sw.TensorLayout(("x", "y"), MESH)
    assert Computation.from_json(computation.to_json()) == computation


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"outputs": [4]}, "outputs names value 4; there are 4 before it"),
        ({"inputs": [[[8, 4], F]]}, r"ops\[0\].in names value 1; there are 1 before it"),
        (
            {"ops": [{"op": "my_product", "in": [0], "out": []}]},
            r"ops\[0\]: op \"my_product\": no rule is known for it; give one",
        ),
        (
            {"ops": [LAYER["ops"][0] | {"out": [[[8, 17], F]]}]},
            r"ops\[0\] \(model.py:7\): op \"dot_general\": results\[0\]",
        ),
        ({"ops": [{"op": "tanh"}]}, r"ops\[0\]: an op is a mapping with op, in and out"),
        ({"inputs": [[8, 4]]}, r"inputs\[0\]\[0\]|shape"),
        ({"inputs": ["f32"]}, r"inputs\[0\] is a shape and a dtype"),
        ({"ops": "tanh"}, "ops is a list"),
    ],
)
def test_what_is_no_computation_is_refused(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises((sw.LayoutError, TypeError), match=says):
        Computation.from_json(LAYER | change)
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps(LAYER | change), encoding="utf-8")
    with pytest.raises(sw.ParseError, match=r"wrong\.json: "):
        Computation.load(file)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    computation = Computation.from_json(LAYER)
    with pytest.raises(sw.LayoutError, match="layouts has 1 entries for 2 inputs"):
        propagate(computation, [None], mesh=MESH)
    with pytest.raises(sw.LayoutError, match=r"layouts\[0\] has 1 dims, but its tensor has 2"):
        propagate(computation, [("x",), None], mesh=MESH)
    with pytest.raises(sw.LayoutError, match="1 is not an input with a layout"):
        propagate(computation, [("x", None), None], mesh=MESH, open=[1])
    with pytest.raises(sw.ParseError, match="a computation is a mapping"):
        Computation.from_json([])
    file = tmp_path / "no.json"
    file.write_text("{", encoding="utf-8")
    with pytest.raises(sw.ParseError):
        Computation.load(file)
