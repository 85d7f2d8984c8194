"""XLA's text by hand: what it may look like, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given

from shardwise import DeviceMesh, LayoutError, ParseError, TensorLayout
from shardwise.interop.hlo import from_hlo, parse_hlo, to_hlo

from .layouts import layouts, mesh_of

MESH = DeviceMesh((2, 4), ("x", "y"))


@pytest.mark.parametrize(
    ("text", "rank", "axes", "unreduced"),
    [
        ("{replicated}", 2, (None, None), ()),
        (" { replicated } ", 0, (), ()),
        ("{unreduced}", 1, (None,), ("x", "y")),
        ("{devices=[2,4]<=[8]}", None, ("x", "y"), ()),
        ("{devices=[2, 4] 0, 1, 2, 3, 4, 5, 6, 7}", None, ("x", "y"), ()),
        ("{devices=[4,2]<=[2, 4] T(1, 0)}", None, ("y", "x"), ()),
        ("{devices=[4,2]<=[2,2,2]T(1,2,0)}", 2, ("y", "x"), ()),
        ("{devices=[8,1]0,4,1,5,2,6,3,7}", None, (("y", "x"), None), ()),
        ("{devices=[1,2,4]<=[8] last_tile_dim_replicate}", None, (None, "x"), ()),
        # Which replica is which says nothing.
        ("{devices=[2,4]3,2,1,0,7,5,6,4 last_tile_dims={replicated}}", None, ("x",), ()),
        ("{devices=[2,1,4]<=[8] last_tile_dims={unreduced}}", None, ("x", None), ("y",)),
        ("{devices=[1,1,8]<=[8] last_tile_dim_replicate}", None, (None, None), ()),
        ("{mesh['a'=2,'b'=4], [{'b'}, {'a'}]}", None, ("y", "x"), ()),
        ("{mesh['a'=2,'b'=4], [{}, {'b':(2)2}], unreduced={'a'}}", 2, (None, "y:(2)2"), ("x",)),
        ("{mesh['a'=2,'b'=4], [{}, {}, {}]}", None, (None, None, None), ()),
        ("{mesh['a'=8], [{'a':(1)2, ?}], metadata={op_name=\"a}\"}}", None, ("x",), ()),
        ("{mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)), [{'a'}]}", None, ("y",), ()),
        ('{devices=[2,4]<=[8] metadata={op_name="{" source_line=3}}', None, ("x", "y"), ()),
        ('{replicated metadata={{op_name="a"}, {op_name="b"}}}', 1, (None,), ()),
    ],
)
def test_reading(text: str, rank: int | None, axes: tuple[str | None, ...], unreduced: tuple[str, ...]) -> None:
    assert from_hlo(text, MESH, rank) == TensorLayout(axes, MESH, unreduced=unreduced)


def test_subgroups_in_either_order() -> None:
    mesh = DeviceMesh((2, 2, 2), ("x", "y", "z"))
    layout = TensorLayout(("x",), mesh, unreduced=["y"])
    assert to_hlo(layout) == "{devices=[2,2,2]<=[8] last_tile_dims={unreduced, replicated}}"
    assert from_hlo("{devices=[2,2,2]<=[2,2,2]T(0,2,1) last_tile_dims={replicated, unreduced}}", mesh) == layout


def test_a_single_device() -> None:
    one = DeviceMesh((1, 1), ("x", "y"))
    assert to_hlo(TensorLayout(("x",), one)) == "{replicated}"
    assert from_hlo("{maximal device=0}", one, 1).axes == (None,)
    with pytest.raises(LayoutError, match="device 3 alone"):
        from_hlo("{maximal device=3}", one, 1)
    assert from_hlo("{devices=[1,1]<=[1]}", one).axes == (None, None)


def test_boxes_of_what_no_layout_expresses() -> None:
    assert parse_hlo("{devices=[4]0,1,3,2}").boxes((7,)).tolist() == [[[0, 2]], [[2, 4]], [[6, 7]], [[4, 6]]]
    # ceil((2**63 - 1) / 4) is 2**61, of which the fourth multiple is over the limit.
    assert parse_hlo("{devices=[4]<=[4]}").boxes((2**63 - 1,))[2:].tolist() == [
        [[2 * 2**61, 3 * 2**61]],
        [[3 * 2**61, 2**63 - 1]],
    ]
    assert parse_hlo("{devices=[2]<=[2]}").boxes((0,)).tolist() == [[[0, 0]], [[0, 0]]]
    with pytest.raises(LayoutError, match=r"shape\[0\] is -3"):
        parse_hlo("{devices=[2]<=[2]}").boxes((-3,))


@pytest.mark.parametrize(
    ("text", "rank", "message"),
    [
        ("{replicated}", None, "rank is needed"),
        ("{maximal device=3}", 1, "device 3 alone"),
        ("{manual}", 1, "manual"),
        ("{unknown}", 1, "unknown"),
        ("{devices=[2,4]<=[8] last_tile_dims={manual}}", None, "leaves the cut to the program"),
        ("{devices=[2,4]<=[8]}", 3, "rank is 3"),
        ("{mesh['a'=8], [{}, {}]}", 3, "rank is 3"),
        ("{mesh['a'=2,'b'=4], [{'b'}], manual={'a'}}", None, "leaves the cut to the program"),
        ("{mesh['a'=8], manual}", 1, "manual"),
        ("{maximal_mesh[device_id=3]}", 1, "device 3 alone"),
        ("{devices=[2,2]<=[4]}", None, "over 4 devices, but the mesh has 8"),
        ("{devices=[8]0,1,2,3,4,5,7,6}", None, "no axes of"),
        ("{devices=[2,4]0,1,3,2,4,5,6,7}", None, "no axes of"),
        ("{devices=[2,4]0,1,3,2,4,5,6,7 last_tile_dims={unreduced}}", None, "partial sums"),
        ("{devices=[8]7,6,5,4,3,2,1,0}", None, "no axes of"),
    ],
)
def test_what_no_layout_can_express(text: str, rank: int | None, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        from_hlo(text, MESH, rank)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "replicated",
        "{replicated",
        "{devices=[2,4]}",
        "{devices=[]<=[1]}",
        "{devices=[2,4]0,1}",
        "{devices=[2,4]0,1,2,3,4,5,6,6}",
        "{devices=[2,4]0,1,2,3,4,5,6,8}",
        "{devices=[2,4]<=[4]}",
        "{devices=[2,4]<=[2,4]}",
        "{devices=[2,4]<=[2,4]T(0,0)}",
        "{devices=[2,4]<=[8]T(1)}",
        "{devices=[0]<=[0]}",
        "{devices=[-2]<=[2]}",
        "{devices=[2,4]<=[8] last_tile_dims={sharded}}",
        "{devices=[2]<=[2] last_tile_dims={replicated,unreduced}}",
        "{devices=[2,4]<=[8] junk}",
        "{devices=[9999999999999999999999]<=[1]}",
        "{{replicated},{replicated}}",
        "{maximal device=}",
        "{devices=[2]\u0660,1}",
        "{mesh['a'=2]}",
        "{mesh['a'=2], [{'b'}]}",
        "{mesh['a'=2], [{'a'}, {'a'}]}",
        "{mesh['a'=2], [{'a'}], replicated={'a'}}",
        "{mesh['a'=2,'a'=2], [{'a'}]}",
        "{mesh['a'=0], [{'a'}]}",
        "{mesh['a'=8], [{'a':(3)2}]}",
        "{mesh['a'=8], [{'a':(2)8}]}",
        "{mesh['a'=8], [{'a':(1)4}, {'a':(2)4}]}",
        "{mesh['a'=12], [{'a':(2)3}, {'a':(3)2}]}",
        "{mesh['a'=2], device_ids=(0,0), [{'a'}]}",
        "{mesh['a'=2], device_ids=(0), [{'a'}]}",
        "{mesh['a'=4], device_ids=([2,2]T(0,0)), [{'a'}]}",
        "{mesh['a'=4194304], device_ids=([2,2097152]T(1,0)), [{'a'}]}",
        "{mesh['a'=999999999999999999,'b'=999999999999999999], [{'a'}]}",
        "{mesh['a'=2], [{'a'}], padded={'a'}}",
        "{mesh['a'=2], [{'a'}] junk}",
        "{mesh['a'=2], [{'a}]}",
        '{devices=[2]<=[2] metadata={op_name="x"}',
        "\ud800",
    ],
)
def test_what_is_no_sharding(text: str) -> None:
    with pytest.raises(ParseError):
        parse_hlo(text)


def test_names_and_places_in_a_program_are_not_kept() -> None:
    """By hand: the tile of device 1 of the order 0, 2, 1, 3 is in the other half of the first axis."""
    named = parse_hlo("{mesh['x'=2,'y'=2], device_ids=(0,2,1,3), [{'x'}]}")
    assert str(named) == "{devices=[2,2]<=[2,2]T(1,0) last_tile_dim_replicate}"
    assert named.boxes((4,))[:, 0].tolist() == [[0, 2], [2, 4], [0, 2], [2, 4]]
    assert str(parse_hlo("{mesh['a'=2], [{'a'}], metadata={op_name=\"x\"}}")) == "{devices=[2]<=[2]}"
    assert str(parse_hlo("{mesh['x'=4], device_ids=(0,1,3,2), [{'x'}]}")) == "{devices=[4]0,1,3,2}"


@given(layouts())
def test_a_named_sharding_has_the_tiles_of_the_unnamed_one(layout: TensorLayout) -> None:
    """And is read as the same layout, but for axes of size 1, which cut nothing."""
    mesh = mesh_of(layout)
    named, tiles = to_hlo(layout, named=True), to_hlo(layout)
    assert from_hlo(named, mesh, layout.rank) == from_hlo(tiles, mesh, layout.rank)


def test_named_shardings_as_xla_writes_them() -> None:
    mesh = DeviceMesh((2, 8), ("a", "it's"))
    layout = TensorLayout((("it's:(2)2", "a"), None), mesh, unreduced=["it's:(1)2"])
    text = to_hlo(layout, named=True)
    assert text == "{mesh['a'=2,'it\\'s'=8], [{'it\\'s':(2)2, 'a'}, {}], unreduced={'it\\'s':(1)2}}"
    assert from_hlo(text, mesh) == layout


def test_a_large_sharding_over_a_small_mesh_is_refused_before_its_devices_are_made() -> None:
    with pytest.raises(LayoutError, match="the mesh has 8"):
        from_hlo("{devices=[1099511627776]<=[1099511627776]}", MESH)


def test_a_mesh_of_2_to_the_40_devices_has_its_text_at_once() -> None:
    layout = TensorLayout(("y", "x"), DeviceMesh((2**20, 2**20), ("x", "y")))
    assert to_hlo(layout) == "{devices=[1048576,1048576]<=[1048576,1048576]T(1,0)}"


@pytest.mark.parametrize("wrong", [None, 3, b"{replicated}"])
def test_wrong_types(wrong: object) -> None:
    with pytest.raises(TypeError):
        parse_hlo(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        to_hlo(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        from_hlo("{replicated}", wrong, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        from_hlo("{replicated}", MESH, True)


def test_a_layout_needs_its_mesh() -> None:
    with pytest.raises(LayoutError, match="no device_mesh"):
        to_hlo(TensorLayout(("x",)))


def test_boxes_of_a_shape_that_is_none() -> None:
    sharding = parse_hlo("{devices=[2,4]<=[8]}")
    with pytest.raises(LayoutError, match=r"shape\[1\] is -4"):
        sharding.boxes([4, -4])
    with pytest.raises(LayoutError, match="does not tile 1 dim"):
        sharding.boxes([4])


def test_a_rank_that_no_tensor_has() -> None:
    with pytest.raises(LayoutError, match="rank is -1"):
        from_hlo("{replicated}", MESH, -1)
