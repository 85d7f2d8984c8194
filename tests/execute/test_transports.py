"""Rows of addresses, carried out on this process's memory by code that knows nothing but addresses; and refusals."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from shardwise import DeviceMesh, LayoutError, ParseError, TensorLayout, plan_model
from shardwise._gaps import joined_over_gaps, spare_limit
from shardwise.deploy import Deployment, FusedParameter, Manifest, fsdp2
from shardwise.execute.transports import (
    AddressRows,
    MemoryManifest,
    MemoryRange,
    NixlRows,
    address_rows,
    check_manifests,
)
from shardwise.reshard import Descriptors, ModelPlan

from .shards import arrays

MESH = DeviceMesh((2, 2), ("x", "y"))


def copy(target: int, source: int, size: int) -> None:
    """One run, as a transport moves it."""
    ctypes.memmove(target, source, size)


def nixl_blocks(rows: NixlRows) -> Iterator[tuple[int, int, int]]:
    """The blocks that NIXL makes of rows: of both sides as many, in order, of the same lengths."""
    sides = []
    for side in (rows.local, rows.remote):
        found = []
        for address, size, _, *strided in side.tolist():
            step, count = strided or (size, 1)
            found += [(address + turn * step, size) for turn in range(count)]
        sides.append(found)
    assert rows.indices.tolist() == list(range(len(sides[0])))
    for (here, size), (there, other) in zip(*sides, strict=True):
        assert size == other
        yield here, there, size


def carried_out(rows: AddressRows, how: str) -> None:
    """Move all runs by what one of the functions gives."""
    if how == "mooncake":
        moved = list(zip(*rows.mooncake(), strict=True))
    elif how == "runs":
        moved = list(zip(*(column.tolist() for column in rows.runs()), strict=True))
    else:
        moved = list(nixl_blocks(rows.nixl(strided=how == "nixl")))
    assert sum(size for _, _, size in moved) == rows.nbytes
    assert len(moved) == rows.run_count
    for here, there, size in moved:
        copy(*((there, here) if rows.writes else (here, there)), size)


class Side:
    """A holder in the memory of this process, with the manifest that it tells others."""

    def __init__(self, plan: ModelPlan, label: Any, source: dict[str, list[Any]], version: str = "step 7") -> None:
        self.part = plan.descriptors(label)
        self.src = {
            name: np.ascontiguousarray(shards[plan[name].src.holders.index(label)])
            for name, shards in source.items()
            if label in plan[name].src.holders
        }
        self.out = {
            name: np.zeros(one.dst.holder_shape(label), source[name][0].dtype)
            for name, one in plan.items()
            if label in one.dst.holders
        }
        made = MemoryManifest.of(self.part, self.src, self.out, version=version)
        self.manifest = MemoryManifest.from_dict(json.loads(json.dumps(made.to_dict())))
        assert self.manifest == made


def move(plan: ModelPlan, source: dict[str, list[Any]], how: str, writes: bool) -> dict[Any, Side]:
    sides = {label: Side(plan, label, source) for label in plan.devices}
    for own, other in itertools.product(sides.values(), repeat=2):
        rows = address_rows(own.part, own.manifest, other.manifest, writes=writes and own is not other)
        carried_out(rows, how)
    return sides


def check(plan: ModelPlan, how: str, writes: bool) -> None:
    source = arrays(plan)
    sides, expected = move(plan, source, how, writes), plan.run(source)
    for name, one in plan.items():
        for label, array in zip(one.dst.holders, expected[name], strict=True):
            assert sides[label].out[name].tobytes() == array.tobytes()


def plan_of(tensors: dict[str, Any] | None = None) -> ModelPlan:
    """Flat units to columns, among devices that hold both, or one of the two, or nothing."""
    tensors = tensors or {"a": ((8, 12), "float32"), "b": ((4, 4), "int16"), "n": ((6,), "float64")}
    trainer = fsdp2(5, world=["t0", "t1", "t2", "both", "idle"])
    columns = TensorLayout((None, "tp"), DeviceMesh((2,), ("tp",), ["both", "e1"]))
    one = TensorLayout((None,), DeviceMesh((1,), ("one",), ["e1"]))
    engine = {name: columns if len(shape) == 2 else one for name, (shape, _) in tensors.items()}
    return plan_model(trainer, engine, tensors, uneven="ceil")


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("how", ["nixl", "plain", "runs", "mooncake"])
def test_rows_move_what_the_plan_moves(how: str, writes: bool) -> None:
    check(plan_of(), how, writes)


DTYPES = ["int8", "float16", "float32", "float64", "complex128"]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_boxes_of_any_rank(data: Any) -> None:
    tensors: dict[str, Any] = {}
    src: dict[str, Any] = {}
    dst: dict[str, Any] = {}
    for name in "ab":
        shape = tuple(data.draw(st.sampled_from([0, 1, 2, 4, 6])) for _ in range(data.draw(st.integers(1, 6))))
        tensors[name] = shape, data.draw(st.sampled_from(DTYPES))
        for side in (src, dst):
            axes: list[Any] = [None] * len(shape)
            for axis in ("x", "y"):
                if data.draw(st.booleans()) and None in axes:
                    axes[data.draw(st.sampled_from([at for at, one in enumerate(axes) if one is None]))] = axis
            side[name] = TensorLayout(tuple(axes), MESH)
    plan = plan_model(src, dst, tensors, uneven="ceil")
    check(plan, data.draw(st.sampled_from(["nixl", "plain", "mooncake"])), data.draw(st.booleans()))


class TestStaged:
    """Reads over gaps: what arrives is the same, and no other reads are fewer, or of fewer bytes."""

    @settings(max_examples=200, deadline=None)
    @given(data=st.data())
    def test_least_by_exhaustion(self, data: Any) -> None:
        runs = []
        for group in range(data.draw(st.integers(1, 3))):
            begins = sorted(data.draw(st.lists(st.integers(0, 25), min_size=1, max_size=4)))
            runs += [(group, begin, begin + data.draw(st.integers(1, 4))) for begin in begins]
        groups, starts, stops = (np.array(column) for column in zip(*runs, strict=True))

        def of(cuts: tuple[int, ...]) -> tuple[int, int] | None:
            """The reads and bytes of a partition of the runs: one read from the first to the last byte of each part."""
            edges, size = [0, *cuts, len(runs)], 0
            for begin, end in itertools.pairwise(edges):
                if len({runs[at][0] for at in range(begin, end)}) > 1:
                    return None
                size += max(run[2] for run in runs[begin:end]) - runs[begin][1]
            return len(edges) - 1, size

        found = [
            cost for count in range(len(runs)) for cuts in itertools.combinations(range(1, len(runs)), count)
            if (cost := of(cuts)) is not None
        ]  # fmt: skip
        covered = {(group, byte) for group, start, stop in runs for byte in range(start, stop)}

        def taken(limit: Any) -> tuple[int, int]:
            is_first, reach = joined_over_gaps(groups, starts, stops, limit)
            cost = of(tuple(np.flatnonzero(is_first)[1:].tolist()))
            assert cost is not None
            lasts = [*(np.flatnonzero(is_first)[1:] - 1), len(runs) - 1]
            assert cost[1] == int((reach[lasts] - starts[is_first]).sum())
            return cost

        over = data.draw(st.integers(0, 30))
        reads, size = taken((over, None))
        assert size <= len(covered) + over
        assert reads == min(count for count, bytes_ in found if bytes_ <= len(covered) + over)
        most = data.draw(st.integers(len(set(groups.tolist())), len(runs)))
        reads, size = taken((None, most))
        assert reads <= most
        assert size == min(bytes_ for count, bytes_ in found if count <= most)

    @pytest.mark.parametrize("limit", [{}, {"over_bytes": 12}, {"over_bytes": 10**6}, {"max_rows": 3}, {"max_rows": 5}])
    def test_what_arrives_is_the_same(self, limit: dict[str, int]) -> None:
        plan = plan_of()
        source, counts = arrays(plan), set()
        expected = plan.run(source)
        sides = {label: Side(plan, label, source) for label in plan.devices}
        for own, other in itertools.product(sides.values(), repeat=2):
            direct = address_rows(own.part, own.manifest, other.manifest)
            staged = direct.staged(**limit)
            scratch = np.full(staged.nbytes, 99, np.uint8)
            rows = staged.into(scratch)
            counts.add(len(rows))
            assert rows.nbytes == staged.nbytes >= direct.nbytes
            assert len(rows) <= limit.get("max_rows", direct.run_count)
            assert staged.nbytes <= direct.nbytes + limit.get("over_bytes", 10**6)
            carried_out(rows, "nixl")
            staged.unpack(scratch, list(own.out.values()))
        for name, one in plan.items():
            for label, array in zip(one.dst.holders, expected[name], strict=True):
                assert sides[label].out[name].tobytes() == array.tobytes()
        assert max(counts) > 1 or limit.get("over_bytes") == 10**6 or limit == {"max_rows": 3}

    def test_a_gap_is_never_written(self) -> None:
        plan = plan_of()
        source = arrays(plan)
        own, other = (Side(plan, label, source).manifest for label in ("t0", "e1"))
        rows = address_rows(plan.descriptors("t0"), own, other, writes=True)
        for limit in ({"over_bytes": 8}, {"max_rows": 1}):
            with pytest.raises(LayoutError, match=rf"^{next(iter(limit))}: a write .* overwrite what 'e1' has"):
                rows.staged(**limit)

    def test_what_is_refused(self) -> None:
        plan = plan_of()
        source = arrays(plan)
        t0, e1 = (Side(plan, label, source) for label in ("t0", "e1"))
        rows = address_rows(e1.part, e1.manifest, t0.manifest)
        with pytest.raises(LayoutError, match="over_bytes and max_rows are both given"):
            rows.staged(over_bytes=1, max_rows=3)
        with pytest.raises(LayoutError, match=r"over_bytes is -1; it must be 0 or more"):
            rows.staged(over_bytes=-1)
        with pytest.raises(LayoutError, match=r"max_rows is 0, but the runs are in (\d) separate .*; give \1 or more"):
            rows.staged(max_rows=0)
        staged = rows.staged(over_bytes=100)
        with pytest.raises(LayoutError, match=rf"scratch has 3 bytes; {staged.nbytes} are needed"):
            staged.into(np.zeros(3, np.uint8))
        with pytest.raises(LayoutError, match="shares memory with"):
            staged.into(MemoryRange(e1.manifest.out["a"].address, staged.nbytes))
        with pytest.raises(LayoutError, match="no array in blocks holds the"):
            staged.unpack(np.zeros(staged.nbytes, np.uint8), [np.zeros(4)])
        assert spare_limit("a", None, "b", None) == (0, None)


class TestJoined:
    """Rows that follow each other in registered memory of both sides are one."""

    def test_stacked_experts(self) -> None:
        # Four experts of 6 × 4, stacked on both sides; each side of the engine has half of the columns.
        tensors = {f"e{i}": ((6, 4), "int32") for i in range(4)}
        trainer = DeviceMesh((1,), ("one",), ["t"])
        mesh = DeviceMesh((2,), ("tp",), ["g0", "g1"])
        plan = plan_model(
            dict.fromkeys(tensors, TensorLayout((None, None), trainer)),
            dict.fromkeys(tensors, TensorLayout((None, "tp"), mesh)),
            tensors,
        )
        before = np.arange(96, dtype="i4").reshape(4, 6, 4)
        after = np.zeros((4, 6, 2), "i4")
        t, g = plan.descriptors("t"), plan.descriptors("g1")
        counts = []
        for blocks in ((None, None), ([before], [after])):
            src = {f"e{i}": before[i] for i in range(4)}
            told = MemoryManifest.of(t, src, {}, version="1", blocks=blocks[0])
            mine = MemoryManifest.of(g, {}, {f"e{i}": after[i] for i in range(4)}, version="1", blocks=blocks[1])
            rows = address_rows(g, mine, told)
            counts.append((len(rows), rows.run_count))
            after[...] = 0
            carried_out(rows, "nixl")
            assert np.array_equal(after, before[:, :, 2:])
        # A row for each expert of six runs; and one row of them all.
        assert counts == [(4, 24), (1, 24)]
        # One block on one side only: a row has one block on each side.
        told = MemoryManifest.of(t, src, {}, version="1")
        assert len(address_rows(g, mine, told)) == 4

    def test_a_block_that_is_not_registered(self) -> None:
        plan = plan_of()
        source = arrays(plan)
        t0, e1 = Side(plan, "t0", source), Side(plan, "e1", source)
        mine = MemoryManifest.of(e1.part, {}, e1.out, version="step 7", blocks=[e1.out["a"]])
        with pytest.raises(LayoutError, match=r"out\['[bn]'\] of 'e1' is in none of its blocks"):
            address_rows(e1.part, mine, t0.manifest)
        with pytest.raises(LayoutError, match=r"blocks\[1\] shares memory with blocks\[0\]"):
            MemoryManifest.of(e1.part, {}, e1.out, version="step 7", blocks=[e1.out["a"], e1.out["a"][1:]])


class TestAgreement:
    """Two sides with other plans, versions or memory are refused before a byte moves, by digests of both."""

    def sides(self) -> tuple[Side, Side]:
        plan = plan_of()
        source = arrays(plan)
        return Side(plan, "e1", source), Side(plan, "t0", source)

    def test_another_plan(self) -> None:
        (e1, t0), other = (
            self.sides(),
            plan_of({"a": ((8, 12), "int32"), "b": ((4, 4), "int16"), "n": ((6,), "float64")}),
        )
        with pytest.raises(LayoutError, match=r"no array|of dtype float32, but the plan has int32"):
            MemoryManifest.of(other.descriptors("t0"), t0.src, {}, version="step 7")
        # Plans that differ in a dtype alone: the rows are the same.
        there = Side(other, "t0", arrays(other))
        with pytest.raises(LayoutError) as caught:
            check_manifests(e1.manifest, there.manifest)
        digests = e1.part.digest("t0").hex(), there.part.digest("e1").hex()
        assert str(caught.value) == (
            f"'e1' and 't0' have different plans for each other: {digests[0]} and {digests[1]}. Nothing has been sent"
        )
        with pytest.raises(LayoutError, match="have different plans for each other"):
            address_rows(e1.part, e1.manifest, there.manifest)
        with pytest.raises(
            LayoutError, match=r"the manifest of 't0' and part have different plans: [0-9a-f]{64} and [0-9a-f]"
        ):
            address_rows(other.descriptors("t0"), t0.manifest, e1.manifest, writes=True)

    def test_another_version(self) -> None:
        e1, t0 = self.sides()
        newer = t0.manifest.of_version("step 8")
        said = (
            rf"different versions: 'step 7' \(manifest {e1.manifest.digest}\) and 'step 8' \(manifest {newer.digest}\)"
        )
        with pytest.raises(LayoutError, match=said):
            address_rows(e1.part, e1.manifest, newer)
        check_manifests(e1.manifest.of_version("step 8"), newer)

    def test_other_memory(self) -> None:
        e1, t0 = self.sides()
        check_manifests(e1.manifest, t0.manifest, t0.manifest.digest)
        moved = MemoryManifest.of(t0.part, {name: a.copy() for name, a in t0.src.items()}, t0.out, version="step 7")
        said = f"'t0' now has the manifest {moved.digest}, but 'e1' knows {t0.manifest.digest}: another version"
        with pytest.raises(LayoutError, match=said):
            check_manifests(e1.manifest, t0.manifest, moved.digest)
        # The next version in the same memory.
        mine, theirs = (one.manifest.of_version("step 8") for one in (e1, t0))
        check_manifests(mine, theirs, t0.manifest.of_version("step 8").digest)
        with pytest.raises(LayoutError, match="now has the manifest"):
            check_manifests(mine, theirs, t0.manifest.digest)
        # Less memory than the rows need.
        told: Any = json.loads(json.dumps(t0.manifest.to_dict()))
        told["src"]["a"][1] -= 1
        del told["digest"]
        with pytest.raises(ParseError, match=r"has digest [0-9a-f]{64}, but says None"):
            MemoryManifest.from_dict(told)
        small = MemoryManifest(
            "t0", "step 7", t0.manifest.plans, {**t0.manifest.src, "a": t0.manifest.src["a"]._replace(nbytes=95)}, {},
            t0.manifest.blocks,
        )  # fmt: skip
        with pytest.raises(
            LayoutError, match=rf"'t0' has 95 bytes for src\['a'\], .* 96 bytes \(manifest {small.digest}"
        ):
            address_rows(e1.part, e1.manifest, small)
        alone = MemoryManifest("t0", "step 7", t0.manifest.plans, {}, {}, ())
        with pytest.raises(LayoutError, match=r"'t0' has no memory for src\['a'\]"):
            address_rows(e1.part, e1.manifest, alone)
        with pytest.raises(LayoutError, match=r"'e1' and 'e1' have different memory"):
            address_rows(e1.part, e1.manifest, replaced(e1.manifest))

    def test_who_is_who(self) -> None:
        e1, t0 = self.sides()
        with pytest.raises(LayoutError, match="part is of 'e1', but own is the manifest of 't0'"):
            address_rows(e1.part, t0.manifest, e1.manifest)
        stranger = MemoryManifest("zz", "step 7", {}, {}, {}, ())
        with pytest.raises(LayoutError, match="'zz' is not in the plan"):
            address_rows(e1.part, e1.manifest, stranger)


def replaced(manifest: MemoryManifest) -> MemoryManifest:
    return MemoryManifest(manifest.holder, manifest.version, {}, manifest.src, manifest.out, manifest.blocks)


def of_addresses(part: Descriptors, src: int, out: int, device: str = "cpu", version: str = "1") -> MemoryManifest:
    """A manifest of memory that is not there."""
    return MemoryManifest.of(
        part, {"w": MemoryRange(src, 96, device)}, {"w": MemoryRange(out, 48, device)}, version=version
    )


class TestAddresses:
    def plan(self) -> tuple[Descriptors, Descriptors]:
        """Columns of 4 × 6 floats to another device."""
        one, two = (DeviceMesh((1,), ("one",), [label]) for label in ("a", "b"))
        whole = TensorLayout((None, None), one)
        cut = sw.Tiling.from_boxes((4, 6), {"b": (slice(0, 4), slice(2, 5))})
        del two
        plan = plan_model({"w": whole}, {"w": cut}, {"w": ((4, 6), "float32")})
        return plan.descriptors("a"), plan.descriptors("b")

    def test_the_largest(self) -> None:
        a, b = self.plan()
        told = MemoryManifest.from_dict(json.loads(json.dumps(of_addresses(a, 2**64 - 96, 0).to_dict())))
        mine = of_addresses(b, 0, 2**63 + 8)
        rows = address_rows(b, mine, told)
        # Four runs of 12 bytes: 24 apart there, 12 here.
        assert rows.nixl().local.tolist() == [[2**63 + 8, 12, 0, 12, 4]]
        assert rows.nixl().remote.tolist() == [[2**64 - 96 + 8, 12, 0, 24, 4]]
        assert rows.nixl(strided=False).remote[:, 0].tolist() == [2**64 - 88 + 24 * row for row in range(4)]
        assert rows.mooncake().peer_buffers == [2**64 - 88 + 24 * row for row in range(4)]
        staged = rows.staged(over_bytes=10**6)
        assert (staged.remote.tolist(), staged.lengths.tolist()) == ([2**64 - 88], [84])

    @pytest.mark.parametrize("address", [-1, -(2**63), 2**64 - 95, 2**64, 2**100])
    def test_what_is_none(self, address: int) -> None:
        a, _ = self.plan()
        with pytest.raises(LayoutError, match=r"src\['w'\] is 96 bytes at .*, which is beyond addresses of 64 bits"):
            of_addresses(a, address, 0)
        told: Any = json.loads(json.dumps(of_addresses(a, 0, 96).to_dict()))
        told["src"]["w"][0] = address
        with pytest.raises(ParseError, match="cannot be read: LayoutError"):
            MemoryManifest.from_dict(told)

    def test_overlap(self) -> None:
        mesh = DeviceMesh((1,), ("one",), ["a"])
        cut = sw.Tiling.from_boxes((4, 6), {"a": (slice(0, 4), slice(2, 5))})
        part = plan_model({"w": TensorLayout((None, None), mesh)}, {"w": cut}, {"w": ((4, 6), "float32")}).descriptors(
            "a"
        )
        with pytest.raises(LayoutError, match=r"out\['w'\] shares memory with src\['w'\]"):
            of_addresses(part, 0, 95)
        # The same addresses of two devices are two places.
        MemoryManifest.of(part, {"w": MemoryRange(0, 96, "cuda:0")}, {"w": MemoryRange(0, 48, "cuda:1")}, version="")
        array = np.arange(24, dtype="f4")
        with pytest.raises(LayoutError, match=r"out\['w'\] shares memory with src\['w'\]"):
            MemoryManifest.of(part, {"w": array}, {"w": array[:12]}, version="")
        rows = address_rows(part, own := of_addresses(part, 0, 96), own)
        assert rows.nixl().remote.tolist() == [[8, 12, 0, 24, 4]]

    def test_devices(self) -> None:
        a, b = self.plan()
        # Two ranks on one device: each its own addresses there.
        rows = address_rows(b, of_addresses(b, 0, 4096, "cuda:3"), of_addresses(a, 8192, 0, "cuda:3"))
        found = rows.nixl()
        assert (found.local_memory, found.remote_memory) == ("VRAM", "VRAM")
        assert (found.local[:, 2].tolist(), found.remote[:, 2].tolist()) == ([3], [3])
        rows = address_rows(b, of_addresses(b, 0, 4096, "cuda:1"), of_addresses(a, 8192, 0))
        assert (rows.nixl().local_memory, rows.nixl().remote_memory) == ("VRAM", "DRAM")
        rows = address_rows(b, of_addresses(b, 0, 4096, "meta"), of_addresses(a, 8192, 0))
        with pytest.raises(LayoutError, match="on device 'meta', but NIXL takes arrays on cpu or cuda:N only"):
            rows.nixl()
        assert rows.mooncake().lengths == [12] * 4

    def test_two_kinds_of_memory(self) -> None:
        one, two = (DeviceMesh((1,), ("one",), [label]) for label in ("a", "b"))
        tensors = {"v": ((4,), "int8"), "w": ((4,), "int8")}
        ends = [dict.fromkeys(tensors, TensorLayout((None,), mesh)) for mesh in (one, two)]
        plan = plan_model(ends[0], ends[1], tensors)
        part = plan.descriptors("b")
        mine = MemoryManifest.of(part, {}, {"v": MemoryRange(0, 4), "w": MemoryRange(64, 4, "cuda:0")}, version="1")
        told = MemoryManifest.of(
            plan.descriptors("a"), {"v": MemoryRange(0, 4), "w": MemoryRange(8, 4)}, {}, version="1"
        )
        rows = address_rows(part, mine, told)
        with pytest.raises(LayoutError, match=r"the local arrays are in DRAM and in VRAM; take each of by_memory\(\)"):
            rows.nixl()
        found = [one.nixl() for one in rows.by_memory()]
        assert [(one.local_memory, one.local.tolist(), one.remote.tolist()) for one in found] == [
            ("DRAM", [[0, 4, 0, 4, 1]], [[0, 4, 0, 4, 1]]),
            ("VRAM", [[64, 4, 0, 4, 1]], [[8, 4, 0, 4, 1]]),
        ]

    def test_nothing_to_move(self) -> None:
        mesh = DeviceMesh((2,), ("x",))
        for tensors in ({}, {"w": ((0, 4), "float32")}, {"w": ((4, 0), "float32")}):
            layouts = dict.fromkeys(tensors, TensorLayout(("x", None), mesh))
            columns = dict.fromkeys(tensors, TensorLayout((None, "x"), mesh))
            plan = plan_model(layouts, columns, tensors)
            if not tensors:
                continue
            empty = {"w": np.zeros(0, "f4")}
            told = [MemoryManifest.of(plan.descriptors(label), empty, empty, version="1") for label in plan.devices]
            rows = address_rows(plan.descriptors("cpu:0"), *told)
            assert (len(rows), rows.nbytes, rows.run_count) == (0, 0, 0)
            assert rows.nixl().local.shape == (0, 5)
            assert rows.nixl(strided=False).remote.shape == (0, 3)
            assert rows.mooncake() == ([], [], [])
            assert rows.by_memory() == []
            staged = rows.staged(over_bytes=3)
            assert len(staged.into(np.zeros(0, np.uint8))) == 0


class TestDtypes:
    def part(self, dtype: str, count: int = 8) -> Descriptors:
        one, two = (DeviceMesh((1,), ("one",), [label]) for label in ("a", "b"))
        ends = [{"w": TensorLayout((None,), mesh)} for mesh in (one, two)]
        return plan_model(ends[0], ends[1], {"w": ((count,), dtype)}).descriptors("b")

    @pytest.mark.parametrize(
        ("dtype", "array", "fits"),
        [
            ("bfloat16", np.zeros(8, "u2"), True),
            ("bfloat16", np.zeros(16, "u1"), True),
            ("bfloat16", np.zeros(8, "f2"), False),
            ("bfloat16", np.zeros(8, "f4"), False),
            ("float32", np.zeros(8, "f4"), True),
            ("float32", np.zeros(8, "f8"), False),
            ("int32", np.zeros(8, "f4"), False),
            ("float8_e4m3fn", np.zeros(8, "u1"), True),
            ("F4", np.zeros(4, "u1"), True),
            ("F4", np.zeros(4, "u2"), False),
        ],
    )
    def test_arrays(self, dtype: str, array: Any, fits: bool) -> None:
        part = self.part(dtype)
        if fits:
            assert MemoryManifest.of(part, {}, {"w": array}, version="1").out["w"].nbytes == array.nbytes
        else:
            with pytest.raises(LayoutError, match=rf"out\['w'\] is of dtype .*, but the plan has {dtype}"):
                MemoryManifest.of(part, {}, {"w": array}, version="1")

    def test_elements_that_share_bytes(self) -> None:
        # 8 elements of 4 bits: 4 bytes; cut at half, 2 bytes each.
        mesh = DeviceMesh((2,), ("x",), ["b", "c"])
        whole = TensorLayout((None,), DeviceMesh((1,), ("one",), ["a"]))
        plan = plan_model({"w": whole}, {"w": TensorLayout(("x",), mesh)}, {"w": ((8,), "F4")})
        before, after = np.arange(4, dtype="u1"), np.zeros(2, "u1")
        told = MemoryManifest.of(plan.descriptors("a"), {"w": before}, {}, version="1")
        mine = MemoryManifest.of(plan.descriptors("c"), {}, {"w": after}, version="1")
        carried_out(address_rows(plan.descriptors("c"), mine, told), "nixl")
        assert after.tolist() == [2, 3]

    @pytest.mark.parametrize(
        ("array", "said"),
        [
            (np.zeros((4, 4), "f4")[:, :2], "not in C order"),
            ([0.0] * 8, "must be an array of numpy, a tensor of PyTorch or a MemoryRange"),
            (np.frombuffer(bytes(32), "f4"), "is read-only"),
        ],
    )
    def test_what_is_no_array(self, array: Any, said: str) -> None:
        with pytest.raises((LayoutError, TypeError), match=rf"out\['w'\] .*{said}|out\['w'\] is .*{said}"):
            MemoryManifest.of(self.part("float32"), {}, {"w": array}, version="1")
        with pytest.raises(LayoutError, match="out has no array for 'w'"):
            MemoryManifest.of(self.part("float32"), {}, {}, version="1")
        with pytest.raises(TypeError, match="version must be"):
            MemoryManifest.of(self.part("float32"), {}, {"w": np.zeros(8, "f4")}, version=7)  # type: ignore[arg-type]


def test_too_many_runs() -> None:
    whole = TensorLayout((None, None), DeviceMesh((1,), ("one",), ["a"]))
    mesh = DeviceMesh((2,), ("x",), ["b", "c"])
    shape = 60_000_000, 2
    plan = plan_model({"w": whole}, {"w": TensorLayout((None, "x"), mesh)}, {"w": (shape, "int8")})
    told = MemoryManifest.of(plan.descriptors("a"), {"w": MemoryRange(0, math.prod(shape))}, {}, version="1")
    part = plan.descriptors("c")
    mine = MemoryManifest.of(part, {}, {"w": MemoryRange(0, shape[0])}, version="1")
    rows = address_rows(part, mine, told)
    assert rows.nixl().local.tolist() == [[0, 1, 0, 1, shape[0]]]
    for asked in (rows.mooncake, rows.runs, lambda: rows.staged(max_rows=5)):
        with pytest.raises(LayoutError, match=re.escape("there are 60,000,000 runs; at most 50,000,000 are listed")):
            asked()


def test_names_of_a_fused_parameter() -> None:
    """Rows into views of a parameter, which is the registered block."""
    mesh = DeviceMesh((2,), ("tp",))
    engine = Deployment(["e0", "e1"], mesh, {"q|k": ("tp", None)}, parameters=[FusedParameter("qk", ("q", "k"))])
    shapes = {"q": (8, 4), "k": (4, 4)}
    plan = plan_model(fsdp2(2, world=["t0", "t1"]), engine, {name: (shape, "int32") for name, shape in shapes.items()})
    whole = {name: np.arange(math.prod(shape), dtype="i4").reshape(shape) for name, shape in shapes.items()}
    (parameter,) = engine.parameters_of("e1", shapes)
    memory = np.zeros(parameter.shape, "i4")
    part = plan.descriptors("e1")
    mine = MemoryManifest.of(part, {}, parameter.views(memory), version="1", blocks=[memory])
    for number in range(2):
        held = {name: np.ascontiguousarray(np.array_split(one, 2)[number]) for name, one in whole.items()}
        told = MemoryManifest.of(plan.descriptors(f"t{number}"), held, {}, version="1")
        carried_out(address_rows(part, mine, told), "nixl")
    assert np.array_equal(memory, np.concatenate([whole["q"][4:], whole["k"][2:]]))


def test_more_blocks_than_nixl_numbers() -> None:
    whole = TensorLayout((None, None), DeviceMesh((1,), ("one",), ["a"]))
    halves = TensorLayout((None, "x"), DeviceMesh((2,), ("x",), ["b", "c"]))
    plan = plan_model({"w": whole}, {"w": halves}, {"w": ((2**31, 2), "int8")})
    told = MemoryManifest.of(plan.descriptors("a"), {"w": MemoryRange(0, 2**32)}, {}, version="1")
    mine = MemoryManifest.of(plan.descriptors("b"), {}, {"w": MemoryRange(0, 2**31)}, version="1")
    with pytest.raises(LayoutError, match=r"there are 2,147,483,648 runs; NIXL numbers them with 32 bits"):
        address_rows(plan.descriptors("b"), mine, told).nixl()


def test_manifests_of_mooncake() -> None:
    """Placements that Mooncake wrote, and the bytes that its own plan between them moves."""
    data = json.loads((Path(__file__).parents[1] / "data" / "deploy" / "mooncake.json").read_text())
    src, dst = Manifest.from_mooncake(data["trainer"]), Manifest.from_mooncake(data["engine"])
    plan = plan_model(src, dst, src.tensors)
    size = 0
    for label in dict.fromkeys(holder for tiling in dst.values() for holder in tiling.holders):
        part = plan.descriptors(label)
        mine = MemoryManifest.of(part, {}, _ranges(part, "dst"), version="1")
        for peer in np.unique(part.receives["peer"]).tolist():
            there = plan.descriptors(part.peers[peer])
            told = MemoryManifest.of(there, _ranges(there, "src"), {}, version="1")
            size += sum(address_rows(part, mine, told).mooncake().lengths)
    assert size == data["bytes"]


def _ranges(part: Descriptors, side: str) -> dict[str, MemoryRange]:
    """Memory that is large enough for each tensor of a side, no two of which touch."""
    rows = part.sends if side == "src" else part.receives
    return {part.tensors[at]: MemoryRange(at << 32, 2**31) for at in np.unique(rows[f"{side}_tensor"]).tolist()}


EXAMPLE = Path(__file__).parents[2] / "examples" / "nixl_transfer.py"
KINDS = ["shared", *(["nixl"] if importlib.util.find_spec("nixl") else [])]


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
def test_the_example_between_processes(kind: str) -> None:
    ended = subprocess.run([sys.executable, str(EXAMPLE), kind], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    said = re.findall(r"engine:\d (?:has|does not read) step \d", ended.stdout)
    assert sorted(said) == sorted(
        f"engine:{rank} {what}" for rank in range(2) for what in ("has step 1", "has step 2", "does not read step 3")
    )
