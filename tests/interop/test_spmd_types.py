"""The dialect of `spmd_types` 0.3: types per mesh axis and specs, both ways."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from shardwise import DeviceMesh, TensorLayout
from shardwise.errors import LayoutError
from shardwise.interop._axes import spec_names
from shardwise.interop.spmd_types import from_spmd_types, to_spmd_type, to_spmd_types

from ..strategies import layouts

MESH = DeviceMesh((2, 4), ("dp", "tp"))


def without_size_one(layout: TensorLayout) -> list[Any]:
    mesh = layout.device_mesh
    assert mesh is not None
    return [[name for name in spec_names(spec) if mesh.axis_size(name) > 1] for spec in layout.axes]


@given(layouts())
def test_there_and_back(layout: TensorLayout) -> None:
    """Every layout of whole axes comes back, except where an axis of one rank is in a tuple of axes."""
    try:
        made = to_spmd_types(layout)
    except LayoutError:
        return
    assert layout.device_mesh is not None
    again = from_spmd_types(made, layout.device_mesh, layout.rank)
    assert without_size_one(again) == without_size_one(layout)
    assert set(again.unreduced) == set(layout.unreduced)


def test_each_type() -> None:
    both = from_spmd_types({"dp": "I", "tp": "S(0)"}, MESH, 2)
    assert both == from_spmd_types({"dp": "R", "tp": "S(-2)"}, MESH, 2) == TensorLayout(("tp", None), MESH)
    assert from_spmd_types({"dp": "P", "tp": "R"}, MESH, 1) == TensorLayout((None,), MESH, unreduced=["dp"])
    assert from_spmd_types(("tp",), MESH, 3) == TensorLayout(("tp", None, None), MESH)
    assert from_spmd_types((("tp", "dp"), None), MESH, 2) == TensorLayout((("tp", "dp"), None), MESH)
    one = DeviceMesh((1, 4), ("dp", "tp"))
    assert from_spmd_types({"tp": "S(0)"}, one, 1).axes == ("tp",)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dp": "S(0)", "tp": "S(0)"}, "S does not state their order; a PartitionSpec does"),
        ({"dp": "R"}, "axis 'tp' has no type"),
        ({"dp": "R", "tp": "V"}, "axis 'tp' is V: its values differ, but the dim that it cuts is not stated"),
        ({"dp": "R", "tp": "S(2)"}, r"axis 'tp' is S\(2\), but the tensor has 2 dims"),
        ({"dp": "X", "tp": "R"}, "axis 'dp' has the type 'X'"),
        ({"pp": "R"}, "axis 'pp' is not in the mesh"),
        (("tp", None, None), "the spec has 3 entries, but the tensor has 2 dims"),
    ],
)
def test_what_is_not_a_layout(given: Any, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        from_spmd_types(given, MESH, 2)
    with pytest.raises(TypeError, match="expected types per mesh axis"):
        from_spmd_types(3, MESH, 2)


def test_as_the_package_has_it() -> None:
    types = pytest.importorskip("spmd_types.types")
    layout = TensorLayout((None, "tp"), MESH, unreduced=["dp"])
    made = to_spmd_type(layout)
    assert made == types.SpmdType({"dp": types.P, "tp": types.S(1)})
    assert from_spmd_types(made, MESH, 2) == layout
    several = TensorLayout((("tp", "dp"), None), MESH)
    made = to_spmd_type(several)
    assert made == types.SpmdType({"dp": types.V, "tp": types.V}, types.PartitionSpec(("tp", "dp"), None))
    assert from_spmd_types(made, MESH, 2) == several
    # The package's own way from S to a spec, and that a spec of several axes needs an order there too.
    shards = {"dp": types.S(1), "tp": types.S(0)}
    spec = types.shard_types_to_partition_spec(shards, 2)
    assert from_spmd_types(spec, MESH, 2) == from_spmd_types(shards, MESH, 2)
    with pytest.raises(types.SpmdTypeError):
        types.shard_types_to_partition_spec({"dp": types.S(0), "tp": types.S(0)}, 2)
    assert from_spmd_types(types.TensorSharding(None, ("tp", "dp")), MESH, 2).axes == (None, ("tp", "dp"))
