"""Law 6 of the dialects that need no framework: `from_x(to_x(layout)) == layout`, or an error that says why not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise import LayoutError, TensorLayout
from shardwise.interop.hlo import from_hlo, parse_hlo, to_hlo
from shardwise.interop.megatron import from_rank_offsets, to_rank_offsets
from shardwise.interop.shardy import from_shardy, mesh_from_shardy, mesh_to_shardy, to_shardy
from shardwise.interop.torch import from_placements, to_placements

from .layouts import layouts, mesh_of


def without_trivial_axes(layout: TensorLayout) -> TensorLayout:
    """What is left of a layout where axes of size 1 leave no trace."""
    mesh = mesh_of(layout)

    def kept(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in names if mesh.axis_size(name) > 1)

    axes = [kept((spec,) if isinstance(spec, str) else spec or ()) for spec in layout.axes]  # type: ignore[arg-type]
    return TensorLayout(axes, mesh, unreduced=kept(layout.unreduced))


@given(layouts(labels=True), st.booleans())
def test_hlo(layout: TensorLayout, iota: bool) -> None:
    mesh = mesh_of(layout)
    text = to_hlo(layout, iota=iota)
    back = from_hlo(text, mesh, layout.rank)
    assert back == without_trivial_axes(layout)
    assert to_hlo(back, iota=iota) == text == str(parse_hlo(text))
    shape = tuple(count * 3 for count in layout.num_shards)
    assert np.array_equal(back.partition(shape).boxes(), layout.partition(shape).boxes())


@given(layouts(labels=True), st.integers(0, 20))
def test_the_tiles_of_hlo_are_the_boxes_of_the_partition(layout: TensorLayout, size: int) -> None:
    sharding = parse_hlo(to_hlo(layout))
    if sharding.kind == "tiled":
        shape = tuple(range(size, size + layout.rank))
        assert np.array_equal(sharding.boxes(shape), layout.partition(shape, uneven="ceil").boxes())


@given(layouts(labels=True))
def test_shardy(layout: TensorLayout) -> None:
    mesh = mesh_of(layout)
    assert from_shardy(to_shardy(layout), mesh) == layout
    assert from_shardy(to_shardy(layout, mesh_name="a mesh"), mesh) == layout
    assert from_shardy(to_shardy(layout, mesh_name=None)) == layout
    assert mesh_from_shardy(mesh_to_shardy(mesh)) == mesh


@given(layouts(labels=True))
def test_megatron(layout: TensorLayout) -> None:
    if layout.unreduced:
        with pytest.raises(LayoutError, match="partial sums"):
            to_rank_offsets(layout)
        return
    mesh = mesh_of(layout)
    offsets = to_rank_offsets(layout)
    assert from_rank_offsets(offsets, mesh, layout.rank) == without_trivial_axes(layout)
    partition = layout.partition(layout.num_shards)
    for device, own in enumerate(offsets):
        box = partition.box(mesh.device(device))
        assert own.rank_offsets == tuple((d, box[d].start, k) for d, k in enumerate(layout.num_shards) if k > 1)
        assert own.replica_id == partition.replica_id(mesh.device(device))


@given(layouts(labels=True))
def test_torch(layout: TensorLayout) -> None:
    mesh = mesh_of(layout)
    if layout != (plain := without_trivial_axes(layout)):
        try:
            assert from_placements(to_placements(layout), mesh, layout.rank) == layout
        except LayoutError:
            # Their order may be more than placements can say.
            assert any(isinstance(spec, tuple) for spec in layout.axes)
    assert from_placements(to_placements(plain), mesh, layout.rank) == plain
