"""Shardy's text by hand: what it may look like, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise import DeviceMesh, LayoutError, MeshError, ParseError, TensorLayout
from shardwise.interop.shardy import from_shardy, mesh_from_shardy, mesh_to_shardy, to_shardy

MESH = DeviceMesh((2, 4), ("x", "y"))


@pytest.mark.parametrize(
    ("text", "axes", "unreduced"),
    [
        ("#sdy.sharding<@mesh, []>", (), ()),
        ('#sdy.sharding<@mesh, [{"x"}, {}]>', ("x", None), ()),
        ('#sdy.sharding<@"a mesh", [{"y", "x"}]>', (("y", "x"),), ()),
        ('#sdy.sharding<@m.1$, [{}], replicated={"x"}, unreduced={"y"}>', (None,), ("y",)),
        ('#sdy.sharding<@m, [{}], unreduced={"y"}, replicated={}>', (None,), ("y",)),
        ('<@mesh,[{"x":(1)2}]>', ("x",), ()),
        ('sdy.sharding<mesh<["x"=2, "y"=4]>, [{"x"}]>', ("x",), ()),
    ],
)
def test_reading(text: str, axes: tuple[str | None, ...], unreduced: tuple[str, ...]) -> None:
    assert from_shardy(text, MESH) == TensorLayout(axes, MESH, unreduced=unreduced)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("#sdy.sharding<@mesh, [{?}]>", "dim 0 is open"),
        ('#sdy.sharding<@mesh, [{}, {"x", ?}]>', "dim 1 is open"),
        ('#sdy.sharding<@mesh, [{"x"}p1]>', "dim 0 has a priority"),
        ('#sdy.sharding<@mesh, [{"y":(1)3}]>', r"'y':\(1\)3 does not divide the axis 'y' of size 4"),
        ('#sdy.sharding<@mesh, [{"y":(4)2}]>', "does not divide"),
        ('#sdy.sharding<@mesh, [{"y":(0)2}]>', "does not divide"),
        ('#sdy.sharding<@mesh, [{"y":(1)2}, {"y"}]>', "overlaps"),
        ('#sdy.sharding<@mesh, [{"y":(1)2}], replicated={"y"}>', "listed as replicated"),
        ('#sdy.sharding<@mesh, [{"z"}]>', "'z' is not in the mesh"),
        ('#sdy.sharding<@mesh, [{"x"}, {"x"}]>', "uses axis 'x'"),
        ('#sdy.sharding<@mesh, [{"x"}], replicated={"x"}>', "listed as replicated"),
        ('#sdy.sharding<mesh<["x"=8]>, [{"x"}]>', "but the text holds"),
        (
            '#sdy.sharding<mesh<["x"=2, "y"=4], device_ids=[1, 0, 2, 3, 4, 5, 6, 7]>, [{"x"}]>',
            "but the text holds",
        ),
    ],
)
def test_what_no_layout_can_express(text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        from_shardy(text, MESH)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "#sdy.sharding",
        "#sdy.sharding<@mesh>",
        "#sdy.sharding<@mesh, [{x}]>",
        '#sdy.sharding<@mesh, [{"x"}]',
        '#sdy.sharding<@mesh, [{"x"}]> junk',
        '#sdy.sharding<@mesh, [{"x" "y"}]>',
        '#sdy.sharding<@mesh, [{"x"},, {}]>',
        '#sdy.sharding<@mesh, [{}], sharded={"x"}>',
        "#sdy.sharding<@mesh, [{}], unreduced={}, unreduced={}>",
        '#sdy.sharding<@mesh, [{"\\FF"}]>',
        "#sdy.sharding<mesh, [{}]>",
        '#sdy.sharding<mesh<["x"=' + "9" * 40 + ">, [{}]>",
    ],
)
def test_what_is_no_sharding(text: str) -> None:
    with pytest.raises(ParseError):
        from_shardy(text, MESH)


def test_a_text_without_a_mesh_needs_one() -> None:
    with pytest.raises(LayoutError, match="mesh is needed"):
        from_shardy('#sdy.sharding<@mesh, [{"x"}]>')


@pytest.mark.heavy
def test_a_hundred_thousand_dims_are_read_in_linear_time() -> None:
    dims = ", ".join(["{}"] * 100_000)
    assert from_shardy(f"#sdy.sharding<@mesh, [{dims}]>", MESH).rank == 100_000
    with pytest.raises(ParseError):
        from_shardy(f"#sdy.sharding<@mesh, [{dims}", MESH)


def test_numbers_in_the_text_stand_for_the_labels_of_the_mesh() -> None:
    own = DeviceMesh((2,), ("x",), devices=["b", "a"])
    text = '#sdy.sharding<mesh<["x"=2], device_ids=[1, 0]>, [{"x"}]>'
    assert from_shardy(text, own) == TensorLayout(("x",), own)
    assert from_shardy(text).device_mesh == DeviceMesh((2,), ("x",), devices=["cpu:1", "cpu:0"])


def test_names_are_escaped_as_mlir_does() -> None:
    mesh = DeviceMesh((2,), ('x y"\\\n\té',))
    # What mlir prints for this axis.
    assert mesh_to_shardy(mesh) == '#sdy.mesh<["x y\\22\\\\\\0A\\09\\C3\\A9"=2]>'
    assert mesh_from_shardy(mesh_to_shardy(mesh)) == mesh
    layout = TensorLayout(mesh.axis_names, mesh)
    assert from_shardy(to_shardy(layout, mesh_name=None)) == layout
    assert mesh_from_shardy('#sdy.mesh<["\\t\\"\\n"=2]>').axis_names == ('\t"\n',)


@pytest.mark.parametrize(
    ("name", "written"),
    [("\x7f", r"\7F"), ("\x1f", r"\1F"), ("~", "~"), (" ", " "), ("\x80", r"\C2\80"), ("\n", r"\0A")],
)
def test_what_is_not_printable_ascii_is_escaped(name: str, written: str) -> None:
    """LLVM prints 0x20 to 0x7e as they are."""
    mesh = DeviceMesh((2,), (f"a{name}b",))
    text = to_shardy(TensorLayout((f"a{name}b",), mesh))
    assert f'"a{written}b"' in text
    assert from_shardy(text, mesh).axes == (f"a{name}b",)


def test_meshes() -> None:
    assert mesh_from_shardy('sdy.mesh @mesh = <["x"=2, "y"=4]>') == MESH
    swapped = DeviceMesh((2,), ("x",), devices=["cpu:1", "cpu:0"])
    assert mesh_to_shardy(swapped) == '#sdy.mesh<["x"=2], device_ids=[1, 0]>'
    own = DeviceMesh((2,), ("x",), devices=["b", "a"])
    assert mesh_from_shardy(mesh_to_shardy(own, ["a", "b"]), ["a", "b"]) == own
    # In the order of their numbers there is nothing to say.
    assert mesh_to_shardy(own, ["b", "a"]) == '#sdy.mesh<["x"=2]>'
    assert mesh_from_shardy('#sdy.mesh<["x"=2]>', ["b", "a"]) == own


@pytest.mark.parametrize(
    "text",
    [
        "#sdy.mesh<[]>",
        "#sdy.mesh<[], device_ids=[3]>",
        '#sdy.mesh<["x"=2], device_ids=[0, 0]>',
        '#sdy.mesh<["x"=2], device_ids=[1, 2]>',
        '#sdy.mesh<["x"=0]>',
        '#sdy.mesh<["x"=-2]>',
        '#sdy.mesh<["x"=2, "x"=2]>',
    ],
)
def test_what_is_no_mesh(text: str) -> None:
    with pytest.raises(MeshError):
        mesh_from_shardy(text)


def test_labels_that_have_no_number() -> None:
    own = DeviceMesh((2,), ("x",), devices=["b", "a"])
    with pytest.raises(MeshError, match="has no labels"):
        mesh_to_shardy(own)
    with pytest.raises(MeshError, match="has no labels"):
        mesh_to_shardy(own, ["a", "c"])
    with pytest.raises(MeshError, match="1 label, "):
        mesh_from_shardy('#sdy.mesh<["x"=2]>', ["a"])


def test_names_that_mlir_cannot_hold() -> None:
    with pytest.raises(LayoutError, match="cannot be written as UTF-8"):
        to_shardy(TensorLayout(("x", None), MESH), mesh_name="\ud800")


@pytest.mark.parametrize("text", [None, 3, b"#sdy.sharding<@mesh, []>"])
def test_a_text_of_a_wrong_type(text: Any) -> None:
    with pytest.raises(TypeError, match="text must be a str"):
        from_shardy(text, MESH)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ('#sdy.sharding<@m, [{}], unreduced=max{"x"}>', LayoutError, "reduced by 'max'.* summed"),
        ('#sdy.sharding<@m, [{}], unreduced=min{"x"}>', LayoutError, "reduced by 'min'"),
        ('#sdy.sharding<@m, [{}], replicated={"x", "x"}>', ParseError, "listed once"),
        (
            '#sdy.sharding<@m, [{}], replicated={"y", "x"}>',
            ParseError,
            "in the order of the mesh, but 'x' comes after 'y'",
        ),
        ('#sdy.sharding<@m, [{}], unreduced={"y", "x"}>', ParseError, "unreduced axes .* but 'x' comes after 'y'"),
        ('#sdy.sharding<@m, [{}], unreduced={"y":(2)2, "y":(1)2}>', ParseError, "unreduced axes are listed once"),
        ("#sdy.sharding<@m, [{}], replicated={}, replicated={}>", ParseError, "replicated axes are listed twice"),
    ],
)
def test_what_shardy_refuses_or_a_layout_cannot_express(text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        from_shardy(text, MESH)
    assert from_shardy('#sdy.sharding<@m, [{}], unreduced=sum{"x"}>', MESH).unreduced == ("x",)
