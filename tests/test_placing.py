"""Layouts by name: a map of rules, a deployment and a plain mapping give the same answers to the same questions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.deploy import Deployment, DeploymentRule
from shardwise.placing import Placed, Placing, partition_of, placing_of
from shardwise.state import training_state

from .strategies import RULES, layouts, meshes


@st.composite
def three_kinds(draw: st.DrawFn) -> tuple[dict[str, sw.TensorLayout], list[Placing]]:
    """The same layouts as a plain mapping, and as a map, a deployment and that mapping asked as one."""
    mesh = draw(meshes(max_axes=3, max_size=3))
    plain = {
        f"t{number}.w": draw(layouts(mesh, max_rank=3, partial=False)) for number in range(draw(st.integers(1, 4)))
    }
    rules = {f"^t{number}[.]": layout for number, layout in enumerate(plain.values())}
    layout_map = sw.LayoutMap(mesh)
    layout_map.update(rules)
    deployment = Deployment(
        list(mesh.devices.flat), mesh, {key: DeploymentRule(each.axes) for key, each in rules.items()}
    )
    return plain, [layout_map, deployment, placing_of(plain)]


@given(three_kinds(), st.sampled_from(RULES), st.data())
def test_the_three_answer_alike(
    kinds: tuple[dict[str, sw.TensorLayout], list[Placing]], uneven: Any, data: st.DataObject
) -> None:
    """Layout, uneven rule, sharing, partition and meshes of a name do not depend on who is asked."""
    plain, placings = kinds
    name, layout = data.draw(st.sampled_from(sorted(plain.items(), key=lambda item: item[0])))
    mesh = layout.device_mesh
    assert mesh is not None
    count = 4 if uneven != "even" else 36 * 36  # 36 is a multiple of 1, 2 and 3, twice; and a dim has up to 3 axes.
    shape = tuple(data.draw(st.integers(0, count)) if uneven != "even" else count for _ in layout.axes)
    for placing in placings:
        assert placing.placed(name, layout.rank) == Placed(layout, None, False)
        assert placing.placed("other", 1) == Placed(None, None, False)
        assert bool(placing.matching_rules(name))
        assert placing.matching_rules("other") == ()
        assert partition_of(placing, "other", (4,), uneven) is None
        partition = partition_of(placing, name, shape, uneven)
        assert partition is not None
        assert partition == layout.partition(shape, uneven)
        assert placing.world is not None
        assert [*placing.world.devices.flat] == [*mesh.devices.flat]
        assert list(placing.meshes.values()) == [mesh]
        alike = dict.fromkeys(each for each, own in plain.items() if own.rank == layout.rank)
        found = {at: placed for placed, positions in placing.placed_alike([*alike], layout.rank) for at in positions}
        assert [found[at] for at in range(len(alike))] == [placing.placed(each, layout.rank) for each in alike]


def test_what_a_rule_says_besides_its_layout_is_in_the_place() -> None:
    """A rule's own uneven rule wins over the caller's, and it may share blocks, in a map and a deployment."""
    mesh = sw.DeviceMesh((4,), ("tp",))
    layout_map = sw.LayoutMap(mesh)
    layout_map["w"] = sw.LayoutRule(("tp",), uneven="ceil", shared=True)
    deployment = Deployment(4, mesh, {"w": DeploymentRule(("tp",), uneven="ceil", shared=True)})
    for placing in (layout_map, deployment):
        assert placing.placed("w", 1)[1:] == ("ceil", True)
        partition = partition_of(placing, "w", (9,), "balanced")
        assert partition is not None
        # Ceil cuts 9 into 3, 3, 3 and nothing; balanced would give 3, 2, 2, 2.
        assert [partition.holder_shape(f"cpu:{i}") for i in range(4)] == [(3,), (3,), (3,), (0,)]


def test_only_a_plain_mapping_has_names() -> None:
    """A rule is for every name that it matches; an entry of a mapping is for one."""
    mesh = sw.DeviceMesh((2,), ("tp",))
    rules = sw.LayoutMap(mesh)
    rules["w"] = ("tp",)
    assert rules.names is None
    assert Deployment(2, mesh, {"w": ("tp",)}).names is None
    assert list(placing_of({"w": sw.TensorLayout(("tp",), mesh)}).names or ()) == ["w"]


def test_a_tensor_without_a_layout_is_whole_but_in_a_deployment_without_a_default() -> None:
    """A deployment says who holds what; what it says nothing about nobody holds."""
    mesh = sw.DeviceMesh((2,), ("tp",))
    assert sw.LayoutMap(mesh).is_whole_elsewhere
    assert placing_of({}).is_whole_elsewhere
    assert not Deployment(2, mesh, {"w": ("tp",)}).is_whole_elsewhere
    assert Deployment(2, mesh, {"w": ("tp",)}, default="replicated").is_whole_elsewhere


def test_several_meshes_of_a_mapping_are_all_known_and_none_has_all_devices() -> None:
    """Two layouts on two meshes: two meshes by name, and no world."""
    one, two = sw.DeviceMesh((2,), ("x",)), sw.DeviceMesh((3,), ("x",))
    placing = placing_of({"a": sw.TensorLayout(("x",), one), "b": sw.TensorLayout(("x",), two)})
    assert placing.world is None
    assert placing.meshes == {"mesh 0": one, "mesh 1": two}
    assert placing_of(None).world is None
    assert placing_of(None).meshes == {}
    assert sw.LayoutMap().world is None
    assert sw.LayoutMap().meshes == {}


def test_a_layout_without_a_mesh_is_refused_by_the_tensor_s_name() -> None:
    """Neither a map without a mesh nor a mapping of such layouts gives a partition."""
    rules = sw.LayoutMap()
    rules["w"] = ("tp",)
    for given_layouts in (rules, {"w": sw.TensorLayout(("tp",))}):
        with pytest.raises(sw.LayoutError, match=r"tensor 'w': its layout TensorLayout\(\('tp',\)\) has no mesh"):
            partition_of(placing_of(given_layouts), "w", (4,), "even")


def test_others_are_refused_by_the_argument_s_name() -> None:
    """A list of layouts is none of the three; a value that is no layout is refused by its name."""
    with pytest.raises(TypeError, match="src must be a LayoutMap, a Deployment, a manifest or a mapping"):
        placing_of([("w", None)], "src")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"layouts\['w'\]"):
        partition_of(placing_of({"w": ("tp",)}), "w", (4,), "even")  # type: ignore[arg-type]


def test_a_manifest_is_asked_as_its_deployment_is() -> None:
    """What devices need of a training state is the same; listed boxes have no states, and no world."""
    rules = Deployment(2, sw.DeviceMesh((2,), ("tp",)), {"w": ("tp", None)})
    shapes = {"w": ((5, 4), "float32")}
    manifest = rules.manifest(shapes, uneven="balanced")
    placed = placing_of(manifest).placed("w", 2)
    assert placed.by_layout().layout == sw.TensorLayout(("tp", None), sw.DeviceMesh((2,), ("tp",)))
    assert placed.by_layout().uneven == "balanced"
    states = [training_state(shapes, layouts_given, "adamw", uneven="balanced") for layouts_given in (rules, manifest)]
    assert states[0].device_bytes.tolist() == states[1].device_bytes.tolist()
    assert states[1].totals()["weights"] == (80, 80)
    boxes = {"w": sw.Tiling.from_boxes((5, 4), {"a": [[(0, 5), (0, 4)]]})}
    assert placing_of(boxes).world is None
    with pytest.raises(sw.LayoutError, match="layouts has no mesh of all devices; give a layout map with a mesh"):
        training_state(shapes, boxes, "adamw")
