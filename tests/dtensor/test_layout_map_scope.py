"""The scope of the DTensor dialect: the first rule in order that matches from the path's beginning."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise import LayoutError, Variable, initialize_variables
from shardwise import LayoutMap as TensorLayoutMap
from shardwise.dtensor import Layout, LayoutMap, Mesh, layout_map_scope

MESH = Mesh.from_string("|x=2,y=2|0,1,2,3|0,1,2,3|CPU:0,CPU:1,CPU:2,CPU:3")


def model() -> dict[str, dict[str, Variable]]:
    return {"d1": {"kernel": Variable((4, 8), "float32", np.ones), "bias": Variable((8,), "float32", np.ones)}}


def test_the_first_matching_rule_counts() -> None:
    layout_map = LayoutMap(mesh=MESH)
    layout_map["d1.kernel"] = Layout(["x", "y"], MESH)
    layout_map["d1.*"] = Layout(["y"], MESH)
    layout_map[".*bias"] = Layout(["x"], MESH)
    with layout_map.scope():
        made = initialize_variables(model())["d1"]
    assert made["kernel"].layout == Layout(["x", "y"], MESH)
    assert made["bias"].layout == Layout(["y"], MESH)
    assert [shard.data.shape for shard in made["kernel"].shards] == [(2, 4)] * 4


def test_a_rule_matches_from_the_beginning_and_what_none_matches_is_replicated() -> None:
    layout_map = LayoutMap(mesh=MESH)
    layout_map["kernel"] = Layout(["x", "y"], MESH)
    layout_map["d1.bias"] = Layout(["x"], MESH)
    with layout_map_scope(layout_map):
        made = initialize_variables(model())["d1"]
    assert made["kernel"].layout == Layout.replicated(MESH, 2)
    assert made["bias"].layout == Layout(["x"], MESH)


def test_what_cannot_be_a_scope() -> None:
    with pytest.raises(LayoutError, match="layout_map has no mesh"):
        LayoutMap().scope()
    with pytest.raises(TypeError, match="layout_map must be a LayoutMap of"):
        layout_map_scope(TensorLayoutMap())  # type: ignore[arg-type]
    parted = LayoutMap(mesh=MESH)
    parted["kernel"] = Layout(["x", "y"], MESH).to_parted()
    with pytest.raises(LayoutError, match="static"):
        parted.scope()


def test_a_rule_that_needs_a_backtracking_search_has_it_where_the_map_allows_it() -> None:
    layout_map = LayoutMap(mesh=MESH, backtracking=True)
    layout_map[r"(?<!b)k(?=e).*"] = Layout.batch_sharded(MESH, "x", 1)
    with layout_map_scope(layout_map):
        model = initialize_variables({"kernel": Variable((4,), "float32", np.zeros)})
    assert model["kernel"].layout == layout_map["kernel"]
