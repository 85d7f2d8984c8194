"""Plans carried out by NIXL itself: agents of this machine read and write each other's memory over UCX.

`pip install --no-deps nixl nixl-cu12` is enough for these, on a machine without a GPU too.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest

from shardwise.execute.transports import AddressRows, address_rows

from .shards import arrays
from .test_transports import Side, plan_of
from .test_transports import carried_out as copied

nixl = pytest.importorskip("nixl._api")


def wait_for(agent: Any, handle: Any) -> None:
    """Start a transfer, and wait until it is done."""
    state, end = agent.transfer(handle), time.monotonic() + 60
    while state == "PROC":
        assert time.monotonic() < end
        state = agent.check_xfer_state(handle)
    assert state == "DONE"
    agent.release_xfer_handle(handle)


def carried_out(agent: Any, peer: str, rows: AddressRows, strided: bool) -> None:
    """One list of rows as one transfer of NIXL."""
    if not len(rows):
        return
    found, operation = rows.nixl(strided), "WRITE" if rows.writes else "READ"
    if not strided:
        ends = (
            agent.get_xfer_descs(found.local, found.local_memory),
            agent.get_xfer_descs(found.remote, found.remote_memory),
        )
        wait_for(agent, agent.initialize_xfer(operation, *ends, peer))
        return
    here = agent.prep_xfer_dlist("NIXL_INIT_AGENT", found.local, found.local_memory)
    there = agent.prep_xfer_dlist(peer, found.remote, found.remote_memory)
    wait_for(agent, agent.make_prepped_xfer(operation, here, found.indices, there, found.indices))
    agent.release_dlist_handle(here)
    agent.release_dlist_handle(there)


@pytest.mark.heavy
@pytest.mark.parametrize(("strided", "writes"), [(True, False), (True, True), (False, False), (False, True)])
def test_agents_of_this_machine(strided: bool, writes: bool) -> None:
    plan = plan_of()
    source = arrays(plan)
    sides = {label: Side(plan, label, source) for label in plan.devices if label != "idle"}
    agents = {label: nixl.nixl_agent(label, nixl.nixl_agent_config(backends=["UCX"])) for label in sides}
    for label, side in sides.items():
        agents[label].register_memory([(one.address, one.nbytes, 0, "") for one in side.manifest.blocks], "DRAM")
    for label, other in itertools.permutations(sides, 2):
        assert agents[label].add_remote_agent(agents[other].get_agent_metadata()) in (other, other.encode())
    for own, other in itertools.product(sides.values(), repeat=2):
        rows = address_rows(own.part, own.manifest, other.manifest, writes=writes and own is not other)
        carried_out(agents[own.manifest.holder], other.manifest.holder, rows, strided)
    expected = plan.run(source)
    for name, one in plan.items():
        for label, array in zip(one.dst.holders, expected[name], strict=True):
            assert sides[label].out[name].tobytes() == array.tobytes()


@pytest.mark.heavy
def test_reads_over_gaps_arrive_in_scratch_memory() -> None:
    plan = plan_of()
    source = arrays(plan)
    own, other = Side(plan, "e1", source), Side(plan, "t0", source)
    mine, theirs = (nixl.nixl_agent(name, nixl.nixl_agent_config(backends=["UCX"])) for name in ("e1", "t0"))
    staged = address_rows(own.part, own.manifest, other.manifest).staged(over_bytes=10**6)
    scratch = np.zeros(staged.nbytes, np.uint8)
    theirs.register_memory([(one.address, one.nbytes, 0, "") for one in other.manifest.blocks], "DRAM")
    mine.register_memory([(scratch.ctypes.data, scratch.nbytes, 0, "")], "DRAM")
    mine.add_remote_agent(theirs.get_agent_metadata())
    carried_out(mine, "t0", staged.into(scratch), True)
    staged.unpack(scratch, list(own.out.values()))
    direct = Side(plan, "e1", source)
    copied(address_rows(direct.part, direct.manifest, other.manifest), "runs")
    assert {name: array.tobytes() for name, array in own.out.items()} == {
        name: array.tobytes() for name, array in direct.out.items()
    }
