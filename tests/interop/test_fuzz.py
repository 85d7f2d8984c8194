"""Any text at all is read, or refused by one of the documented exceptions."""

from __future__ import annotations

import contextlib

from hypothesis import example, given
from hypothesis import strategies as st

from shardwise import DeviceMesh, ShardwiseError
from shardwise.interop.hlo import from_hlo, parse_hlo
from shardwise.interop.shardy import from_shardy, mesh_from_shardy

MESH = DeviceMesh((2, 4), ("x", "y"))
SEEDS = [
    "{devices=[2,1,4]<=[2,4]T(1,0) last_tile_dims={unreduced, replicated}}",
    "{devices=[2,4]0,1,2,3,4,5,6,7 last_tile_dim_replicate}",
    "{maximal device=3}",
    "{mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)), [{'y':(2)2, ?}, {}], unreduced={'x'}, metadata={op_name=\"a\"}}",
    '#sdy.sharding<@mesh, [{"x"}, {"y":(1)4, ?}p1], replicated={}, unreduced={"y"}>',
    '#sdy.sharding<mesh<["x"=2, "y"=4], device_ids=[7, 6, 5, 4, 3, 2, 1, 0]>, [{}]>',
    'sdy.mesh @"a mesh" = <["x\\22"=2, "y"=4], device_ids=[]>',
]


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Any text, or one that was right before some characters were put, taken or doubled."""
    if draw(st.booleans()):
        return draw(st.binary()).decode(errors="surrogateescape")
    text = draw(st.sampled_from(SEEDS))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(text)))
        put = draw(st.one_of(st.sampled_from(list('{}[]<>()",:=?@0123456789 ')), st.just("\ud800"), st.just("9" * 25)))
        text = text[:at] + put + text[at + draw(st.integers(0, 3)) :]
    return text


@given(texts())
@example("{devices=[1,1]<=[1]")
@example("#sdy.mesh<[")
@example('#sdy.sharding<@mesh, [{"x":(99999999999999999999)')
@example("{devices=[999999999999999999]<=[999999999999999999]}")
def test_readers_raise_only_what_they_say(text: str) -> None:
    for read in (
        parse_hlo,
        lambda text: from_hlo(text, MESH, 2),
        lambda text: from_shardy(text, MESH),
        mesh_from_shardy,
    ):
        with contextlib.suppress(ShardwiseError):
            read(text)
