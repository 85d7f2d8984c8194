"""Meshes seen with other axes: flattened, unflattened, and parts of them."""

from __future__ import annotations

import pytest

import shardwise as sw
from shardwise.sub_axis import SubAxis, parse_sub_axis
from tests.checks import refused

MESH = sw.DeviceMesh((2, 4), ("dp", "tp"))


def test_sub_axes_of_axes_with_line_breaks() -> None:
    assert parse_sub_axis("a\nb:(2)4") == SubAxis("a\nb", 2, 4)


def test_unflatten_takes_positions_within_the_mesh() -> None:
    assert MESH.unflatten(0, (2, 1), ("a", "b")).axis_names == ("a", "b", "tp")
    assert MESH.unflatten(1, (2, 2), ("a", "b")).axis_names == ("dp", "a", "b")
    for position in (-1, 2):
        with refused(sw.MeshError, f"axis is {position}", "('dp', 'tp'), numbered from 0"):
            MESH.unflatten(position, (2, 2), ("a", "b"))


def test_names_that_are_no_strings_are_named() -> None:
    with refused(TypeError, "name must be a string or None, got int"):
        MESH.flatten(("dp", "tp"), 3)  # type: ignore[arg-type]


def test_sub_axes_that_cut_across_each_other() -> None:
    mesh = sw.DeviceMesh((12,), ("tp",))
    with refused(sw.MeshError, "cannot be combined", "at 4 and 6"):
        mesh.submesh(("tp:(1)4", "tp:(2)3"))


def test_what_overlaps_is_said_to() -> None:
    with refused(sw.MeshError, "names[0] is 'tp'", "(two of the names overlap)"):
        MESH.submesh(("tp", "tp:(1)2"))
    with refused(sw.MeshError, "names[0] is 'tp:(1)4'", "(two of the names overlap)"):
        MESH.submesh(("tp:(1)4", "tp:(1)2"))
    for names in ("pp", ("dp", "pp")):
        with pytest.raises(sw.MeshError) as raised:
            MESH.submesh(names)
        assert str(raised.value).endswith("the axes of this mesh are ('dp', 'tp')")


def test_names_that_are_not_text_are_shown() -> None:
    with refused(TypeError, "names must be an axis name or a sequence of them, got (0, 1)"):
        MESH.submesh((0, 1))  # type: ignore[arg-type]


def test_an_axis_named_twice_is_named_with_both_places() -> None:
    with refused(sw.MeshError, "names[2] repeats the axis 'dp' of names[0]"):
        MESH.submesh(("dp", "tp", "dp"))
