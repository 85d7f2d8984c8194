"""One einsum on tensors that are cut: worked numbers, Shardy, JAX, and the einsum itself on each device's views."""

from __future__ import annotations

import json
import math
import random
from functools import partial
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.propagate import LocalEinsum
from tests.oracle import computations
from tests.oracle.corpora import Comparison, compared

MESH = sw.DeviceMesh((8, 4), ("dp", "tp"))
UP = [(32, 2048, 4096), (4096, 14336)]
DOWN = [(32, 2048, 14336), (14336, 4096)]
ask = partial(sw.einsum, mesh=MESH, dtype="bfloat16")


def test_column_parallel() -> None:
    found = ask("bsd,df->bsf", x=("dp", None, None), w=(None, "tp"), shapes=UP)
    assert found.result == sw.TensorLayout(("dp", None, "tp"), MESH)
    assert (found.local_shapes["result"], found.moves, found.flops) == ((4, 2048, 3584), (), 240_518_168_576)


def test_row_parallel() -> None:
    given: dict[str, Any] = {"x": ("dp", None, "tp"), "w": ("tp", None), "shapes": DOWN}
    found = ask("bsf,fd->bsd", **given)
    assert found.result.axes == ("dp", None, None)
    assert [(step.kind, step.axes, step.bytes) for step in found.after[0].steps] == [
        ("all-reduce", ("tp",), 100_663_296)
    ]
    scattered = ask("bsf,fd->bsd", out=("dp", "tp", None), **given)
    assert [(step.kind, step.bytes) for step in scattered.after[0].steps] == [("reduce-scatter", 50_331_648)]
    stays = ask("bsf,fd->bsd", out=sw.TensorLayout(("dp", None, None), MESH, unreduced=("tp",)), **given)
    assert (stays.moves, stays.result.unreduced, stays.bytes_received) == ((), ("tp",), 0)


def test_the_way_on_that_an_error_offers_works() -> None:
    given: dict[str, Any] = {"x": ("dp", None, "tp"), "w": ("tp", None), "shapes": DOWN, "policy": "explicit"}
    with pytest.raises(sw.LayoutError, match=r"give out=, or out=TensorLayout\(axes, mesh, unreduced=\('tp',\)\)"):
        ask("bsf,fd->bsd", **given)
    assert ask("bsf,fd->bsd", out=("dp", None, None), **given).bytes_received == 100_663_296
    stays = sw.TensorLayout(("dp", None, None), MESH, unreduced=("tp",))
    assert ask("bsf,fd->bsd", out=stays, **given).bytes_received == 0


def test_fully_sharded() -> None:
    found = ask("bsd,df->bsf", x=("dp", None, None), w=("dp", "tp"), shapes=UP)
    assert [(move.tensor, move.kinds, move.bytes) for move in found.moves] == [("w", "all-gather over dp", 25_690_112)]
    assert found.why == "dp cuts d of w and b of x, and can cut one of them only."


def test_one_axis_on_two_letters() -> None:
    given: dict[str, Any] = {"x": ("dp", "tp", None), "w": (None, "tp"), "shapes": UP}
    shardy = ask("bsd,df->bsf", **given)
    assert (shardy.result.axes, shardy.before[0].tensor, shardy.bytes_received) == (("dp", "tp", None), "w", 88_080_384)
    least = ask("bsd,df->bsf", policy="least", **given)
    # (tp - 1) shards of x, of 4 x 512 x 4096 elements of two bytes.
    assert (least.before[0].tensor, least.bytes_received) == ("x", 3 * 4 * 512 * 4096 * 2)
    with pytest.raises(
        sw.LayoutError, match="tp would cut dims 1 and 2 of the result: it cuts dim 1 of x and dim 1 of w"
    ):
        ask("bsd,df->bsf", policy="explicit", **given)


def test_attention_by_heads() -> None:
    heads = ("dp", None, "tp", None)
    found = ask("bshk,bthk->bhst", q=heads, k=heads, shapes=[(32, 2048, 32, 128)] * 2)
    assert (found.result.axes, found.moves, found.flops) == (("dp", "tp", None, None), (), 34_359_738_368)


def test_shardy_and_jax_say_the_same_of_products() -> None:
    found = Comparison()
    for name, differs in computations.compare_products(computations.cases_of("products")):
        found.add(name, compared(False, differs))
    assert found.different == []
    assert found.cases == 400


def test_an_answer_that_differs_is_found() -> None:
    cases = computations.cases_of("products")
    wrong = next(case for case in cases if case["shardy"]["reshards"])
    wrong["shardy"]["reshards"] = []
    (_, differs), *_ = computations.compare_products([wrong])
    assert "shardy" in str(differs())
    refused = next(case for case in cases if isinstance(case["jax"], dict))
    refused["jax"] = [[] for _ in refused["result"][0]]
    (_, differs), *_ = computations.compare_products([refused])
    assert "explicit" in str(differs())


def drawn(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """An einsum of one or two operands, its shapes, a mesh and layouts that divide; perhaps a layout of the result."""
    sizes = [rng.choice((2, 2, 3, 4)) for _ in range(rng.randint(1, 3))]
    mesh = sw.DeviceMesh(tuple(sizes), tuple("xyz"[: len(sizes)]))
    extents = {letter: rng.choice((1, 2, 4, 6, 12)) for letter in "abcde"}
    operands = ["".join(rng.sample("abcde", rng.randint(1, 3))) for _ in range(rng.randint(1, 2))]
    letters = sorted({*"".join(operands)})
    result = "".join(rng.sample(letters, rng.randint(0, min(4, len(letters)))))

    def layout(side: str) -> list[tuple[str, ...]]:
        specs: list[tuple[str, ...]] = [() for _ in side]
        left = [extents[letter] for letter in side]
        for name, size in rng.sample(list(zip(mesh.axis_names, sizes, strict=True)), len(sizes)):
            free = [dim for dim, extent in enumerate(left) if extent % size == 0]
            if free and rng.random() < 0.7:
                dim = rng.choice(free)
                specs[dim] = (*specs[dim], name)
                left[dim] //= size
        return specs

    given: dict[str, Any] = {name: layout(side) for name, side in zip("uv", operands, strict=False)}
    if rng.random() < 0.3:
        given["out"] = layout(result)
    shapes = [tuple(extents[letter] for letter in side) for side in operands]
    return f"{','.join(operands)}->{result}", given | {"shapes": shapes, "mesh": mesh}


def computed(found: LocalEinsum, arrays: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """What each device has of the result in the end: the einsum of its views, added over the axes of addends."""
    mesh, text = found._mesh, str(found.einsum)
    views = [
        found.local[name].partition(shape).views(array)
        for (name, shape), array in zip(found.shapes.items(), arrays, strict=True)
    ]
    parts = [np.einsum(text, *of_device) for of_device in zip(*views, strict=True)]
    whole = np.zeros(found.result_shape)
    partition = found.computed.partition(found.result_shape)
    # Where several devices have the same addend, it counts once.
    summed = found.computed.unreduced
    seen = set()
    for number, part in enumerate(parts):
        coordinate = dict(zip(mesh.axis_names, mesh.coordinate(number), strict=True))
        box = partition.box(mesh.device(number))
        key = (str(box), tuple(coordinate[axis] for axis in summed))
        if key not in seen:
            seen.add(key)
            whole[box] += part
    return [
        whole[box] for box in (found.result.partition(found.result_shape).box(mesh.device(n)) for n in range(mesh.size))
    ]


@pytest.mark.parametrize("policy", ["shardy", "least", "explicit"])
def test_devices_that_compute_so_have_the_einsum(policy: Any) -> None:
    rng = random.Random(20261126)
    numbers = np.random.default_rng(1)
    answered = 0
    for _ in range(150):
        text, given = drawn(rng)
        try:
            found = sw.einsum(text, policy=policy, **given)
        except sw.LayoutError:
            if policy != "explicit":
                raise
            continue
        answered += 1
        arrays = [numbers.integers(-9, 10, shape).astype(float) for shape in given["shapes"]]
        expected = np.einsum(text, *arrays)
        partition = found.result.partition(found.result_shape)
        for device, part in zip(found._mesh.devices.ravel(), computed(found, arrays), strict=True):
            np.testing.assert_array_equal(part, expected[partition.box(device)])
    assert answered > 60


def test_least_is_never_more_than_the_others() -> None:
    rng = random.Random(7)
    for _ in range(150):
        text, given = drawn(rng)
        # Whatever comes out is put in the same layout, so that the answers can be compared.
        shardy = sw.einsum(text, **given)
        given["out"] = shardy.result
        assert sw.einsum(text, policy="least", **given).bytes_received <= sw.einsum(text, **given).bytes_received


def test_an_operand_without_a_layout_gets_one() -> None:
    found = ask("bsd,df->bsf", x=("dp", None, "tp"), w=None, shapes=UP)
    assert (found.operands["w"].axes, found.moves[0].kinds) == (("tp", None), "all-reduce over tp")
    with pytest.raises(sw.LayoutError, match="w has no layout"):
        ask("bsd,df->bsf", x=("dp", None, "tp"), w=None, shapes=UP, policy="explicit")


def test_one_operand() -> None:
    turned = ask("ab->ba", x=("dp", "tp"), shapes=[(16, 8)])
    assert (turned.result.axes, turned.flops, turned.moves) == (("tp", "dp"), 0, ())
    summed = ask("ab->a", x=("dp", "tp"), shapes=[(16, 8)], policy="explicit")
    assert (summed.result.axes, summed.flops, summed.moves[0].kinds) == (("dp",), 4, "all-reduce over tp")
    assert ask("ab->", x=("dp", "tp"), shapes=[(16, 8)]).result.axes == ()


def test_sub_axes() -> None:
    found = ask("ab,bc->ac", x=("dp:(1)2", None), w=(None, "dp:(2)4"), shapes=[(16, 8), (8, 16)])
    assert (found.result.axes, found.bytes_received) == (("dp:(1)2", "dp:(2)4"), 0)


def test_a_part_of_an_axis_counts_where_the_axis_begins_with_it() -> None:
    mesh = sw.DeviceMesh((4, 3), ("x", "y"))
    given: dict[str, Any] = {"u": ("x", None), "v": ("x:(2)2", "x:(1)2", None), "out": ("x:(1)2", "x:(2)2", None)}
    found = sw.einsum("li,jlk->ijk", shapes=[(16, 16), (8, 16, 16)], mesh=mesh, **given)
    # As Shardy's passes of jaxlib 0.10.2: the first operand gives up a part, the result is added, then cut.
    assert [(move.tensor, move.after.axes) for move in found.before] == [("u", ("x:(1)2", None))]
    assert (found.computed.axes, found.computed.unreduced) == ((None, "x:(2)2", None), ("x:(1)2",))


def test_large_meshes_take_no_longer() -> None:
    mesh = sw.DeviceMesh((512, 256), ("dp", "tp"))
    found = sw.einsum("bsf,fd->bsd", x=("dp", None, "tp"), w=("tp", None), shapes=[(512, 2, 256), (256, 8)], mesh=mesh)
    assert found.after[0].kinds == "all-reduce over tp"


def test_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    found = ask("bsd,df->bsf", x=("dp", None, None), w=("dp", "tp"), shapes=UP)
    said = json.loads(json.dumps(found.to_json()))
    assert said["operands"]["w"]["computed_with"] == {"axes": [[], ["tp"]], "unreduced": []}
    assert said["moves"][0]["steps"] == [{"kind": "all-gather", "axes": ["dp"], "bytes_received": 25_690_112}]
    print(found)
    assert capsys.readouterr().out == found.explain() + "\n"
    picture = sw.draw(found)
    assert picture == found._repr_svg_()
    assert "all-gather over dp" in picture
    views = found._picture().views
    assert [view.captions[0].split(":")[0] for view in views] == [
        "x",
        "w",
        "w after all-gather over dp, 24.5 MiB",
        "result",
    ]
    # cpu:0 has the same colour in all of them.
    first = [panel.tiles[0] for view in views for panel in view.panels]
    assert len({tile.key for tile in first}) == 1


@pytest.mark.parametrize(
    ("text", "given", "says"),
    [
        ("ab,bc->ac", {"x": ("dp", None)}, "the layouts of 1 are given"),
        ("ab->ab", {"x": ("dp",)}, "x has 1 dim, but 'ab' has 2"),
        ("ab->ab", {"x": ("dp", None), "shapes": [(16,)]}, r"shapes\[0\] is \(16,\), but 'ab' has 2 dims"),
        (
            "ab,bc->ac",
            {"x": (None, None), "w": (None, None), "shapes": [(2, 3), (4, 5)]},
            "'b' is 3 in one operand and 4",
        ),
        ("ab->ab", {"x": ("dp", None), "shapes": [(12, 8)]}, "which 8 shards do not divide evenly"),
        ("ab->ab", {"x": ("pp", None)}, "does not have"),
        ("ab->ab", {"x": ("dp", None), "policy": "best"}, "policy is 'best'"),
        ("ab->ab", {"x": sw.TensorLayout(("y", None), sw.DeviceMesh((2,), ("y",)))}, "others are on dp=8, tp=4"),
        ("ab->ab", {"x": sw.TensorLayout((None, None), MESH, unreduced=("tp",))}, "reduce it first"),
        ("ab->ab", {"x": (sw.packed.parse("(2 8@tp)"), None)}, "packed"),
        (
            "ab->ab",
            {"x": (None, None), "out": sw.TensorLayout((None, None), MESH, unreduced=("tp",))},
            "out is unreduced over tp; these axes must cut a summed dim",
        ),
        (
            "ab,ac->bc",
            {"x": ("dp", None), "w": ("tp", None), "shapes": [(32, 8)] * 2, "policy": "explicit"},
            "dim 0 of x is cut over dp, and dim 0 of w is cut over tp",
        ),
    ],
)
def test_what_cannot_be_is_refused(text: str, given: dict[str, Any], says: str) -> None:
    with pytest.raises(sw.LayoutError, match=says):
        ask(text, **{"shapes": [(16, 8)], **given})


def test_wrong_types_are_named() -> None:
    with pytest.raises(TypeError, match="x must be a TensorLayout, a tuple of axes or None"):
        ask("ab->ab", x="dp", shapes=[(16, 8)])
    with pytest.raises(TypeError, match="shapes must be a sequence of shapes, got None"):
        sw.einsum("ab->a", x=None, shapes=None, mesh=MESH)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="dtype must be a dtype, got None"):
        sw.einsum("ab->a", x=None, shapes=[(2, 2)], mesh=MESH, dtype=None)
    with pytest.raises(sw.LayoutError, match=r"w: axes\[0\] names axis"):
        sw.einsum("ab,b->a", x=None, w=("zz",), shapes=[(2, 2), (2,)], mesh=MESH)
    with pytest.raises(sw.LayoutError, match=r"x: dim 0 has 3 elements, which \d shards do not divide evenly$"):
        sw.einsum("ab->a", x=(MESH.axis_names[0], None), shapes=[(3, 2)], mesh=MESH)
    with pytest.raises(TypeError, match="text must be a string"):
        ask(3, x=("dp",), shapes=[(16,)])  # type: ignore[arg-type]
    with pytest.raises(sw.LayoutError, match="mesh is missing"):
        sw.einsum("ab->ab", x=("dp", None), shapes=[(16, 8)])
    assert math.prod(ask("ab->ab", x=("dp", None), shapes=[(16, 8)]).local_shapes["x"]) == 16
