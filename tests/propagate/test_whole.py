"""Computations as data, and the layouts of all their values."""

from __future__ import annotations

import json
import math
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.computation import Computation, FactorRule
from shardwise.propagate import Start, propagate
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


def test_layouts_and_moves_are_those_of_shardy() -> None:
    found = Comparison()
    for name, differs in computations.compare_programs(computations.cases_of("programs")):
        found.add(name, compared(False, differs))
    assert found.different == []
    assert found.cases == 251


def test_collectives_of_training_steps_are_those_of_shardy() -> None:
    found = Comparison()
    for name, differs in computations.compare_steps(computations.cases_of("steps")):
        found.add(name, compared(False, differs))
    assert found.different == []
    assert found.cases == 5


def test_small_steps_are_those_of_shardy_too() -> None:
    found = Comparison()
    for name, differs in computations.compare_steps(computations.cases_of("small-steps")):
        found.add(name, compared(False, differs))
    assert found.different == []
    assert found.cases == 9


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", computations.cases_of("small-steps"), ids=lambda case: f"{case['name']} {case['scheme']}"
)
@pytest.mark.parametrize("policy", ["shardy", "least"])
def test_devices_take_a_whole_training_step(case: dict[str, Any], policy: Any) -> None:
    computation, found = computations.stepped(case, policy)
    numpy = np.random.default_rng(0)
    arrays: list[Any] = [
        numpy.integers(0, 8, shape) if dtype == "int32" else np.abs(numpy.standard_normal(shape)) / 4
        for shape, dtype in zip(computation.shapes, computation.dtypes[: computation.inputs], strict=False)
    ]
    for array, expected in zip(found.run(arrays), computation.run(arrays), strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-3, atol=1e-4)


def test_fewest_bytes_are_no_more_than_those_of_shardy_and_xla() -> None:
    *more, in_all = computations.fewest_of(computations.cases_of("steps"))
    assert more == []
    assert "5 steps" in in_all
    wrong = computations.cases_of("steps")[0]
    wrong["xla"]["total"] = {"all-reduce": [1, 7.0]}
    more = [*computations.fewest_of([wrong])]
    assert len(more) == 2
    assert more[0].endswith("XLA 7")


def test_a_layout_that_differs_is_found() -> None:
    cases = computations.cases_of("programs")
    wrong = cases[0]
    wrong["shardy"]["values"][-1] = [["nowhere"]]
    (_, differs), *_ = computations.compare_programs([wrong])
    assert "nowhere" in str(differs())


@pytest.mark.parametrize("change", ["reshards", "results", "jax", "total", "collectives", "argument", "output"])
def test_a_move_that_differs_is_found(change: str) -> None:
    if change in ("total", "collectives", "argument", "output"):
        wrong = computations.cases_of("steps")[0]
        if change == "total":
            wrong["shardy"]["total"]["all-reduce"][1] += 1
        elif change == "collectives":
            wrong["shardy"]["collectives"] = [["all-reduce", "f32", [3], 8, 1, ["dp"]]]
        else:
            wrong["xla"][change] = 1
        (_, differs), *_ = computations.compare_steps([wrong])
    else:
        cases = computations.cases_of("programs")
        wrong = next(case for case in cases if case["jax"] and case["shardy"]["reshards"])
        if change == "jax":
            wrong["jax"][0] = [["nowhere"]]
        elif change == "results":
            wrong["shardy"]["results"] = [[["nowhere"]]]
        else:
            del wrong["shardy"]["reshards"][0]
        (_, differs), *_ = computations.compare_programs([wrong])
    assert "expected" in str(differs())


@pytest.mark.parametrize("policy", ["shardy", "least"])
def test_devices_compute_what_the_plain_computation_does(policy: Any) -> None:
    ran = 0
    for number, case in enumerate(computations.cases_of("programs")[:100]):
        computation = computations.computation_of(case)
        if sum(map(math.prod, computation.shapes)) > 20_000:
            continue
        mesh = sw.DeviceMesh([size for _, size in case["mesh"]], [name for name, _ in case["mesh"]])
        arrays = computations.arrays_of(computation, random.Random(number))
        found = propagate(computation, case["given"], mesh=mesh, policy=policy).run(arrays)
        for array, expected in zip(found, computation.run(arrays), strict=True):
            np.testing.assert_allclose(array, expected, rtol=1e-3, atol=1e-3)
        ran += 1
    assert ran > 20


def test_a_wrong_kind_of_factor_is_found_by_running() -> None:
    wrong = FactorRule("([i,j])->([i,j])").to_json()
    op = {"op": "reverse", "in": [0], "out": [[[8, 4], F]], "attrs": {"dimensions": []}, "rule": wrong}
    sort = {"op": "sort", "in": [1], "out": [[[8, 4], F]], "attrs": {"dimension": 0, "n": 1}, "rule": wrong}
    computation = Computation([[(8, 4), F]], [op, sort], [2])
    arrays = [np.arange(32.0)[::-1].reshape(8, 4)]
    found = propagate(computation, [("x", None)], mesh=MESH).run(arrays)
    assert not np.array_equal(found[0], computation.run(arrays)[0])


def test_json_and_back(tmp_path: Path) -> None:
    computation = Computation.from_json(LAYER)
    assert computation.to_json() == LAYER
    assert Computation.from_json(json.loads(json.dumps(computation.to_json()))) == computation
    file = tmp_path / "layer.json"
    file.write_text(json.dumps(LAYER), encoding="utf-8")
    assert Computation.load(file) == computation
    assert repr(computation) == "<Computation of 2 ops, 2 inputs and 1 result>"


def test_a_page_has_each_collective_each_line_and_why(tmp_path: Path) -> None:
    found = propagate(Computation.from_json(LAYER), [(None, "y"), ("y", None)], mesh=MESH)
    file = tmp_path / "layer.html"
    found.save_html(file, "a <layer>")
    page = file.read_text(encoding="utf-8")
    # An all-reduce of 8 x 16 numbers of 4 bytes among 4.
    for said in (
        "<h1>a &lt;layer&gt;</h1>",
        "all-reduce over y: 768 B",
        "model.py:7: 768 B",
        "Each device has an addend: dim 1 of operands[0] is summed, and cut over y.",
    ):
        assert said in page
    assert "-,y" in page
    titles = page[page.index("the most bytes first") : page.index("collectives</th>")]
    assert titles.index("bytes</th>") < titles.index("line</th>") < titles.index("why</th>")  # in sight on a telephone
    assert "<script" not in page
    assert "all-reduce over y" in str(found._repr_svg_())
    nothing = propagate(Computation.from_json(LAYER), [("x", None), None], mesh=MESH)
    assert "receives 0 B" in nothing.to_html()


def test_layouts_go_forward_and_backward() -> None:
    computation = Computation.from_json(LAYER)
    found = propagate(computation, [("x", None), (None, "y")], mesh=MESH)
    assert [layout and layout.axes for layout in found.layouts] == [("x", None), (None, "y"), ("x", "y"), ("x", "y")]
    # A summed letter that is cut in one operand cuts the free one.
    free = propagate(computation, [(None, "y"), None], mesh=MESH)
    assert [layout and layout.axes for layout in free.layouts] == [(None, "y"), ("y", None), None, None]
    assert free.to_json()["layouts"][2] is None


def in_body(op: str, trips: dict[str, int]) -> dict[str, Any]:
    """JSON of a computation whose op has tanh(2 x) as its body."""
    body = {
        "inputs": [[[8, 4], F]],
        "ops": [
            {"op": "add", "in": [0, 0], "out": [[[8, 4], F]]},
            {"op": "tanh", "in": [1], "out": [[[8, 4], F]]},
        ],
        "outputs": [2],
    }
    ops = [{"op": op, "in": [0], "out": [[[8, 4], F]], "body": body} | trips]
    return {"inputs": [[[8, 4], F]], "ops": ops, "outputs": [1]}


@pytest.mark.parametrize(("op", "trips"), [("call", {}), ("loop", {"trips": 3})])
def test_layouts_go_into_bodies_and_out_of_them(op: str, trips: dict[str, int]) -> None:
    computation = Computation.from_json(in_body(op, trips))
    found = propagate(computation, [("x", None)], mesh=MESH)
    assert found.results == (sw.TensorLayout(("x", None), MESH),)
    back = propagate(computation, [None], results=[(None, "y")], mesh=MESH)
    assert back.layouts[0] == sw.TensorLayout((None, "y"), MESH)
    assert Computation.from_json(json.loads(json.dumps(computation.to_json()))) == computation


def test_a_move_in_a_loop_counts_as_often_as_it_is_done() -> None:
    said = in_body("loop", {"trips": 3})
    # Rows are sorted, so that the other dim is cut meanwhile, each time.
    said["ops"][0]["body"]["ops"][0] = {
        "op": "sort",
        "in": [0],
        "out": [[[8, 4], F]],
        "attrs": {"dimension": 0, "n": 1},
    }
    found = propagate(Computation.from_json(said), [("x", None)], mesh=MESH)
    # Half of a shard of 64 bytes goes to the other device, before and after.
    moved = [(move.op, move.times, move.bytes, move.kinds) for move in found.moves]
    assert moved == [("sort", 3, 32, "all-to-all over x")] * 2
    assert found.bytes_received == 192


def test_what_moves_in_a_while_is_said_for_a_trip() -> None:
    """Rows are sorted as long as their sum is below 9: how often, nothing says but the run."""
    value = [[8, 4], F]
    ops = [
        {"op": "constant", "in": [], "out": [[[], F]], "attrs": {"value": 0.0}},
        {"op": "reduce", "in": [0, 1], "out": [[[], F]], "attrs": {"dimensions": [0, 1], "body": "add", "n": 1}},
        {"op": "constant", "in": [], "out": [[[], F]], "attrs": {"value": 9.0}},
        {"op": "compare", "in": [2, 3], "out": [[[], "bool"]], "attrs": {"direction": "LT"}},
    ]
    test = {"inputs": [value], "ops": ops, "outputs": [4]}
    ops = [
        {"op": "sort", "in": [0], "out": [value], "attrs": {"dimension": 0, "n": 1}},
        {"op": "add", "in": [1, 1], "out": [value]},
    ]
    bodies = [test, {"inputs": [value], "ops": ops, "outputs": [2]}]
    loop = {"op": "while", "in": [0], "out": [value], "bodies": bodies, "source": "a.py:7"}
    computation = Computation.from_json({"inputs": [value], "ops": [loop], "outputs": [1]})
    assert Computation.from_json(json.loads(json.dumps(computation.to_json()))) == computation
    found = propagate(computation, [("x", None)], mesh=MESH)
    # The sum, twice a half of 4 bytes; half of a shard of 64 bytes, before and after the sort.
    trip = "in each trip of while (a.py:7)"
    moved = [(move.op, move.times, move.bytes, move.when) for move in found.in_order]
    assert moved == [("reduce", 1, 4, trip), ("sort", 1, 32, trip), ("sort", 1, 32, trip)]
    assert (found.bytes_received, found.bytes_when) == (0, {trip: 68})
    assert found.explain().splitlines()[0].endswith(f"each device receives 0 B, and 68 B {trip}.")
    assert f"32 B, {trip}" not in found.explain()
    assert f"8 x 4 float32, {trip}. The op needs dim 0 of operands[0] whole." in found.explain()
    array = np.arange(32.0).reshape(8, 4)[::-1] / 64
    (plain,), (sharded,) = computation.run([array]), found.run([array])
    # The sum is 7.75, and 15.5 after a trip.
    np.testing.assert_array_equal(plain, 2 * np.sort(array, 0))
    np.testing.assert_array_equal(sharded, plain)


@pytest.mark.parametrize("index", [0, 1, 7])
def test_branches_have_one_layout_and_are_counted_each_by_itself(index: int) -> None:
    value = [[8, 4], F]
    sort = {"op": "sort", "in": [0], "out": [value], "attrs": {"dimension": 0, "n": 1}}
    bodies = [
        {"inputs": [value], "ops": [sort], "outputs": [1]},
        {"inputs": [value], "ops": [], "outputs": [0]},
    ]
    case = {"op": "case", "in": [1, 0], "out": [value], "bodies": bodies}
    computation = Computation.from_json({"inputs": [value, [[], "int32"]], "ops": [case], "outputs": [2]})
    found = propagate(computation, [("x", None), None], mesh=MESH)
    assert found.results == (sw.TensorLayout(("x", None), MESH),)
    assert (found.bytes_received, list(found.bytes_when.values())) == (0, [64])
    assert found.moves[0].when == "each time that branch 0 of case is taken"
    array = np.arange(32.0).reshape(8, 4)[::-1]
    expected = np.sort(array, 0) if index == 0 else array
    for of in (computation.run, found.run):
        np.testing.assert_array_equal(of([array, index])[0], expected)
    # Explicit mode has no layout that both branches give.
    turned = {"op": "constraint", "in": [0], "out": [value], "attrs": {"axes": [[], ["x"]]}}
    bodies[0] = {"inputs": [value], "ops": [turned], "outputs": [1]}
    other = Computation.from_json({"inputs": [value, [[], "int32"]], "ops": [case], "outputs": [2]})
    with pytest.raises(sw.LayoutError, match="dim 0 of a value is whole at the end of one branch, and cut"):
        propagate(other, [("x", None), ()], mesh=MESH, policy="explicit")


def test_addends_that_others_have_too_are_added_at_once_or_with_fewest_bytes() -> None:
    computation = Computation.from_json(LAYER | {"ops": LAYER["ops"][:1], "outputs": [2]})
    (move,) = propagate(computation, [(None, "y"), ("y", None)], results=[(None, None)], mesh=MESH).moves
    # 8 x 16 numbers of 4 bytes; an all-reduce of 4 receives twice three quarters.
    assert (move.kinds, move.bytes) == ("all-reduce over y", 768)
    shapes = [(64, 64), (64, 64)]
    for policy, kinds, received in (
        ("shardy", "all-reduce over y", 24576),
        # The two devices along x have the same addends: each pair adds one half of them, and gathers the other.
        ("least", "all-reduce over y, then all-gather over x", 12288 + 8192),
    ):
        asked: Any = policy
        one = sw.einsum(
            "ik,kj->ij", x=(None, "y"), w=("y", None), shapes=shapes, mesh=MESH, policy=asked, out=(None, None)
        )
        assert (one.after[0].kinds, one.bytes_received) == (kinds, received)


def test_a_constraint_says_what_moves() -> None:
    constraint = {"op": "constraint", "in": [3], "out": [[[8, 16], F]], "attrs": {"axes": [["x"], []]}}
    said = LAYER | {"ops": [*LAYER["ops"], constraint], "outputs": [4]}
    found = propagate(Computation.from_json(said), [("x", None), (None, "y")], mesh=MESH)
    # The constraint is that of its operand too, so that the product is what gathers.
    assert found.results == (sw.TensorLayout(("x", None), MESH),)
    assert {move.kinds for move in found.moves} == {"all-gather over y"}


def test_a_computation_can_be_pickled() -> None:
    computation = Computation.from_json(in_body("loop", {"trips": 3}))
    assert pickle.loads(pickle.dumps(computation)) == computation


def test_priorities_say_which_axes_come_first() -> None:
    add = {"op": "add", "in": [0, 1], "out": [[[8, 8], F]]}
    computation = Computation([[(8, 8), F]] * 2, [add], [2])
    first = propagate(computation, [("x", None), (None, "x")], mesh=MESH)
    assert first.layouts[2] == sw.TensorLayout(("x", None), MESH)
    later = propagate(computation, [Start(("x", None), priorities=[1, 1]), (None, "x")], mesh=MESH)
    assert later.layouts[2] == sw.TensorLayout((None, "x"), MESH)


def test_explicit_mode_names_both_origins() -> None:
    computation = Computation.from_json(LAYER)
    found = propagate(computation, [("x", None), (None, "y")], mesh=MESH, policy="explicit")
    assert found.results == (sw.TensorLayout(("x", "y"), MESH),)
    with pytest.raises(sw.LayoutError) as caught:
        propagate(computation, [(None, "x"), ("y", None)], mesh=MESH, policy="explicit")
    assert str(caught.value) == (
        "dot_general (model.py:7): dim 1 of operands[0] is cut over x, and dim 0 of operands[1] is cut over y "
        "(operands[0] has it from input layouts[0], operands[1] has it from input layouts[1]); give policy='shardy' or "
        "policy='least' to decide it"
    )
    with pytest.raises(sw.LayoutError, match=r"layouts\[1\] is None, but with policy=.explicit. every input"):
        propagate(computation, [("x", None), None], mesh=MESH, policy="explicit")


def test_explicit_mode_refuses_a_dim_that_its_devices_do_not_divide() -> None:
    """As JAX does. A row that two devices share would be broadcast by the one that has it."""
    rows = {"op": "broadcast_in_dim", "in": [0], "out": [[(4, 6), F]], "attrs": {"broadcast_dimensions": [0, 1]}}
    computation = Computation([[(1, 6), F]], [rows], [1])
    with pytest.raises(sw.LayoutError, match=r"^input layouts\[0\]: it cuts dim 0 of 1 element over 2 devices, which"):
        propagate(computation, [("x", None)], mesh=MESH, policy="explicit")
    with pytest.raises(sw.LayoutError, match=r"^results\[0\]: it cuts dim 1 of 6 elements over 4 devices, which"):
        propagate(computation, [(None, None)], results=[(None, "y")], mesh=MESH, policy="explicit")
    attributes = {"axes": [["x"], []]}
    constraint = {"op": "constraint", "in": [0], "out": [[(1, 6), F]], "attrs": attributes, "source": "step.py:3"}
    computation = Computation([[(1, 6), F]], [constraint], [1])
    with pytest.raises(sw.LayoutError, match=r"constraint \(step.py:3\): it cuts dim 0 of 1 element over 2 devices"):
        propagate(computation, [(None, None)], mesh=MESH, policy="explicit")


def test_explicit_mode_takes_parts_of_axes() -> None:
    pad = {"edge_padding_low": [0, 0], "edge_padding_high": [8, 0], "interior_padding": [0, 0]}
    ops = [{"op": "pad", "in": [0, 1], "out": [[[16, 4], F]], "attrs": pad}]
    computation = Computation([[(8, 4), F], [(), F]], ops, [2])
    found = propagate(computation, [("y:(1)2", None), ()], mesh=MESH, policy="explicit")
    assert found.results == (sw.TensorLayout(("y:(1)2", None), MESH),)
    # 6 rows do not divide by 4.
    odd = ops[0] | {"out": [[[6, 4], F]], "attrs": pad | {"edge_padding_high": [-2, 0]}}
    with pytest.raises(
        sw.LayoutError, match=r"dim 0 of operands\[0\] is cut over y, and its shards do not divide the 6"
    ):
        propagate(Computation([[(8, 4), F], [(), F]], [odd], [2]), [("y", None), ()], mesh=MESH, policy="explicit")


def test_rows_of_neighbours_are_priced() -> None:
    window = {"window_dimensions": [3, 1], "window_strides": [1, 1], "padding": [[1, 1], [0, 0]], "body": "add"}
    op = {"op": "reduce_window", "in": [0, 1], "out": [[[16, 4], F]], "attrs": window}
    found = propagate(Computation([[(16, 4), F], [(), F]], [op], [2]), [("y", None), None], mesh=MESH)
    # A device in the middle reads one row of each neighbour: 2 rows of 4 numbers of 4 bytes.
    assert [(move.kinds, move.bytes, move.implied) for move in found.moves] == [("collective-permute over y", 32, True)]


def test_a_cut_that_a_reshape_cannot_keep_is_priced() -> None:
    reshape = {"op": "reshape", "in": [0], "out": [[[12, 16, 2, 2, 2], F]]}
    computation = Computation([[(16, 96), F]], [reshape], [1])
    mesh = sw.DeviceMesh((8,), ("x",))
    found = propagate(computation, [("x", None)], mesh=mesh)
    # Each device has 2 of 16 rows, 768 bytes of 6,144. Of the 8 shards the reshape can keep 4, those of what 16 and 12
    # have in common, so that pairs of devices put theirs together first.
    moves = [(move.kinds, move.bytes, move.implied) for move in found.in_order if move.bytes]
    assert moves == [("all-gather over x:(4)2", 768, True), ("all-gather over x:(1)4", 4608, False)]
    assert found.bytes_received == 6144 - 768


def run_alike(computation: Computation, layouts: list[Any], mesh: sw.DeviceMesh) -> sw.propagate.Propagation:
    """Check that devices compute what the plain computation does."""
    numpy = np.random.default_rng(0)
    arrays = [numpy.integers(-4, 5, shape) for shape in computation.shapes[: computation.inputs]]
    found = propagate(computation, layouts, mesh=mesh)
    for array, expected in zip(found.run(arrays), computation.run(arrays), strict=True):
        np.testing.assert_array_equal(array, expected)
    return found


def test_a_cut_that_does_not_divide_does_not_go_through_a_reshape() -> None:
    reshape = {"op": "reshape", "in": [1], "out": [[[34], F]]}
    negate = {"op": "negate", "in": [0], "out": [[[17, 2], F]]}
    constraint = {"op": "constraint", "in": [1], "out": [[[17, 2], F]], "attrs": {"axes": [["x"], []]}}
    said: list[Any] = [negate, constraint, reshape | {"in": [2]}]
    found = run_alike(Computation([[(17, 2), F]], said, [3]), [None], MESH)
    # Of 17 rows one device has 9 and the other 8, 18 and 16 elements: of 34 they would have 17 each.
    # Shardy lists that the result is gathered, and not that the operand is before.
    gathered = [(move.op, move.tensor, move.implied) for move in found.in_order if "all-gather" in move.kinds]
    assert gathered == [("reshape", "operands[0]", True), ("reshape", "results[0]", False)]


def convolved(inputs: list[list[int]], result: list[int], padding: int, **counts: int) -> Computation:
    """A convolution along one dim: batch, places, features."""
    attributes = {
        **{"lhs_spec": ["b", 0, "f"], "rhs_spec": [0, "i", "o"], "out_spec": ["b", 0, "f"]},
        **{"window_strides": [1], "padding": [[padding, padding]], "lhs_dilation": [1], "rhs_dilation": [1]},
        **{"feature_group_count": 1, "batch_group_count": 1, **counts},
    }
    op = {"op": "convolution", "in": [0, 1], "out": [[result, F]], "attrs": attributes}
    return Computation([[shape, F] for shape in inputs], [op], [2])


def test_a_window_that_is_cut_is_read_whole() -> None:
    computation = convolved([[2, 8, 3], [4, 3, 5]], [2, 7, 5], 1)
    found = run_alike(computation, [None, ("y", None, None)], MESH)
    # Each device has one of four rows of 3 x 5 numbers of 4 bytes, and reads them all.
    moved = [(move.tensor, move.kinds, move.bytes, move.implied) for move in found.moves]
    assert moved == [("operands[1]", "collective-permute over y", 3 * 3 * 5 * 4, True)]


def test_a_dim_that_is_sorted_as_a_whole_is_read_whole() -> None:
    # Of all four Shardy lets the dim be cut, of the largest two it does not.
    for kept in (4, 2):
        op = {"op": "top_k", "in": [0], "out": [[[3, kept], F], [[3, kept], "int32"]]}
        found = run_alike(Computation([[(3, 4), F]], [op], [1, 2]), [(None, "y")], MESH)
        assert (found.moves[0].tensor, found.moves[0].bytes) == ("operands[0]", 3 * 3 * 4)
    eigh = {"op": "eigh", "in": [0], "out": [[[4, 4], F], [[4], F]]}
    vectors = propagate(Computation([[(4, 4), F]], [eigh], [1, 2]), [("x", None)], mesh=MESH)
    assert [(move.bytes, move.implied) for move in vectors.moves] == [(2 * 4 * 4, True)]


def test_groups_of_batches_are_cut_as_their_outputs_are() -> None:
    computation = convolved([[8, 6, 2], [3, 2, 4]], [2, 4, 4], 0, batch_group_count=4)
    run_alike(computation, [None, (None, None, "y")], MESH)


def test_an_op_without_a_rule_is_put_together_if_asked() -> None:
    said = [[(8, 4), F]], [{"op": "my_op", "in": [0], "out": [[(8, 4), F]], "source": "model.py:3"}], [1]
    with pytest.warns(UserWarning, match=r"ops\[0\] \(model.py:3\): no rule is known for 'my_op'"):
        computation = Computation(*said, unknown="whole")
    found = propagate(computation, [("x", None)], mesh=MESH)
    assert [(move.op, move.kinds, move.bytes) for move in found.moves] == [("my_op", "all-gather over x", 64)]


def test_a_rule_of_ones_own() -> None:
    rule = FactorRule("([i,k],[k,j])->([i,j])", sum="k")
    own = {"op": "my_product", "in": [0, 1], "out": [[[8, 16], F]], "rule": rule.to_json()}
    computation = Computation.from_json(LAYER | {"ops": [own, LAYER["ops"][1]]})
    found = propagate(computation, [("x", None), (None, "y")], mesh=MESH)
    assert found.layouts[3] == sw.TensorLayout(("x", "y"), MESH)
    assert Computation.from_json(computation.to_json()) == computation


@pytest.mark.parametrize("policy", ["shardy", "least"])
def test_a_cut_behind_a_factor_that_is_whole_is_put_together(policy: Any) -> None:
    """A dim of 16 cut in 4 becomes the minor part of one of 8: no part of that is cut so."""
    reshape = {"op": "reshape", "in": [0], "out": [[(3, 8, 8, 2, 2), F]]}
    spread = {
        "op": "broadcast_in_dim",
        "in": [0],
        "out": [[(2, 6, 16, 8), F]],
        "attrs": {"broadcast_dimensions": [1, 2, 3]},
    }
    computation = Computation([[(6, 16, 8), F]], [reshape, spread], [1, 2])
    mesh = sw.DeviceMesh((2, 4), ("x", "y"))
    found = propagate(computation, [("x", "y", None)], mesh=mesh, policy=policy)
    # Each device has 96 numbers of 768.
    assert sum(move.bytes for move in found.moves) == (768 - 96) * 4
    array = np.arange(768.0).reshape(6, 16, 8)
    assert np.array_equal(found.run([array])[0], array.reshape(3, 8, 8, 2, 2))


@pytest.mark.parametrize("dtype", [F, "int32"])
def test_a_device_without_an_element_has_the_least_maximum(dtype: str) -> None:
    """Five numbers on eight devices: three have none."""
    reduced = {"op": "reduce", "in": [0, 1], "out": [[(), dtype]], "attrs": {"dimensions": [0], "body": "maximum"}}
    computation = Computation([[(5,), dtype], [(), dtype]], [reduced], [2])
    found = propagate(computation, [(("x", "y"),), None], mesh=MESH)
    numbers = np.array([-7, -3, -9, -4, -5], dtype)
    assert found.run([numbers, np.array(-8, dtype)])[0] == -3


@pytest.mark.parametrize("dtype", ["int8", "int4", "float16", "float8_e4m3fn", "bool"])
def test_devices_read_rows_of_small_numbers(dtype: str) -> None:
    rows = {"start_indices": [1], "limit_indices": [7], "strides": [1]}
    part = {"op": "slice", "in": [0], "out": [[(6,), dtype]], "attrs": rows}
    # No dims are turned.
    same = {"op": "reverse", "in": [1], "out": [[(6,), dtype]]}
    found = propagate(Computation([[(8,), dtype]], [part, same], [2]), [("x",)], mesh=MESH)
    numbers = np.array([1, 0, 1, 1, 0, 0, 1, 1])
    assert found.run([numbers])[0].tolist() == [0, 1, 1, 0, 0, 1]
    # Each device has the rows that it reads.
    assert found.moves == ()


def test_a_kernel_is_put_together_rather_than_read_in_parts() -> None:
    """A grouped convolution whose kernel is cut over places in the windows, and its result by groups."""
    specs = {"lhs_spec": ["b", 0, 1, "f"], "rhs_spec": [0, 1, "i", "o"], "out_spec": ["b", 0, 1, "f"]}
    attributes = {**specs, "padding": [[1, 1], [1, 1]], "feature_group_count": 3}
    shapes: list[Any] = [(4, 8, 8, 3), (3, 3, 1, 6), (4, 8, 8, 6)]
    convolution = {"op": "convolution", "in": [0, 1], "out": [[shapes[2], F]], "attrs": attributes}
    computation = Computation([[shapes[0], F], [shapes[1], F]], [convolution], [2])
    given, results = [(None, None, None, None), (None, "x", None, None)], [(None, None, None, "x")]
    mesh = sw.DeviceMesh((3,), ("x",))
    shardy, least = (
        propagate(computation, given, results=results, mesh=mesh, policy=policy) for policy in ("shardy", "least")
    )
    assert least.bytes_received <= shardy.bytes_received
    numpy = np.random.default_rng(0)
    arrays = [numpy.standard_normal(shape) for shape in shapes[:2]]
    np.testing.assert_allclose(least.run(arrays)[0], computation.run(arrays)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("places", [(4,), (4, 1)])
def test_indices_may_be_scalars(places: tuple[int, ...]) -> None:
    """The dim of the vectors may be the one after the last."""
    lists = ("operand_batching_dims", "start_indices_batching_dims")
    attributes = {"offset_dims": [1], "collapsed_slice_dims": [0], "start_index_map": [0], "index_vector_dim": 1}
    attributes |= {name: [] for name in lists}
    gather = {"op": "gather", "in": [0, 1], "out": [[(4, 6), F]], "attrs": attributes | {"slice_sizes": [1, 6]}}
    computation = Computation([[(8, 6), F], [places, "int32"]], [gather], [2])
    table, chosen = np.arange(48.0).reshape(8, 6), np.array([3, 0, 7, 3])
    found = propagate(computation, [("x", "y"), None], mesh=sw.DeviceMesh((2, 3), ("x", "y")))
    for of in (computation.run, found.run):
        np.testing.assert_array_equal(of([table, chosen.reshape(places)])[0], table[chosen])
