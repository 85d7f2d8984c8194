"""Plans in the form that transports take: rows of addresses for NIXL, Mooncake and others that read or write memory.

Nothing here imports a transport, or moves a byte: each function gives the arrays that a library's own functions take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .._arguments import instance, is_true
from .._gaps import joined_over_gaps, spare_limit
from .._text import counted, shown
from .._types import Numbers, Table
from ..errors import LayoutError
from ..reshard import Descriptors
from .address_table import ROW, Addresses, addresses_of_runs, joined_rows, lengths_of_runs, located, strided
from .versions import MemoryManifest, MemoryRange, check_manifests, difference_error, range_of

__all__ = [
    "AddressRows",
    "MemoryManifest",
    "MemoryRange",
    "MooncakeLists",
    "NixlRows",
    "StagedRows",
    "address_rows",
    "check_manifests",
]


#: The most runs that are listed one by one.
_MOST = 50_000_000


class NixlRows(NamedTuple):
    """A transfer, both sides of it, as NIXL's `prep_xfer_dlist` and `get_xfer_descs` take them.

    Attributes:
        local: An array of uint64 with a row for each descriptor: address, length, device, and with strides also the
            bytes from one block to the next, and the number of blocks.
        remote: The same array for the other side.
        local_memory: The memory type of `local`: `"DRAM"` or `"VRAM"`.
        remote_memory: The memory type of `remote`.
        indices: The numbers of all blocks, for `make_prepped_xfer`; the same on both sides.
    """

    local: Addresses
    remote: Addresses
    local_memory: str
    remote_memory: str
    indices: npt.NDArray[np.int32]


class MooncakeLists(NamedTuple):
    """A transfer as the `batch_transfer_*` functions of Mooncake's `TransferEngine` take it, after the target.

    Attributes:
        buffers: Addresses here.
        peer_buffers: Addresses there.
        lengths: The bytes of each run.
    """

    buffers: list[int]
    peer_buffers: list[int]
    lengths: list[int]


@dataclass(frozen=True, eq=False, repr=False)
class AddressRows:
    """Runs of bytes between two holders, as addresses of both; `address_rows` makes it.

    Attributes:
        own: The manifest of this side.
        other: The manifest of the other side.
        writes: True if this side writes into the other's memory, False if it reads from there.
        rows: A structured array: `local`, `remote`, `bytes`, `count`, `local_stride`, `remote_stride`, and the
            positions of the blocks of both sides. Run k of a row begins k strides after its address.
    """

    own: MemoryManifest
    other: MemoryManifest
    writes: bool
    rows: Table

    @property
    def nbytes(self) -> int:
        """The bytes that go in all."""
        return sum((self.rows["bytes"] * self.rows["count"]).tolist())

    @property
    def run_count(self) -> int:
        """The number of runs, each of which is contiguous on both sides."""
        return int(self.rows["count"].sum())

    def __len__(self) -> int:
        return len(self.rows)

    def runs(self) -> tuple[Addresses, Addresses, Numbers]:
        """Return the runs one by one: addresses here, addresses there, and lengths.

        Raises:
            LayoutError: if there are more than 50 million.
        """
        if self.run_count > _MOST:
            raise LayoutError(
                f"there are {self.run_count:,} runs; at most {_MOST:,} are listed. nixl() has {len(self)} with strides"
            )
        return addresses_of_runs(self.rows, "local"), addresses_of_runs(self.rows, "remote"), lengths_of_runs(self.rows)

    def nixl(self, strided: bool = True) -> NixlRows:
        """Return the rows that NIXL takes.

        Args:
            strided: whether rows have strides: N × 5, which `prep_xfer_dlist` takes from NIXL 1.5 on; otherwise N × 3,
                one for each run, which `get_xfer_descs` takes too.

        Raises:
            LayoutError: if arrays of a side are in memory of several kinds, because a list has one kind; `by_memory`
                separates them. If NIXL has no type for the memory, or there are too many runs.
        """
        kinds = [self._kinds(side) for side in ("local", "remote")]
        for side, (kind, _) in zip(("local", "remote"), kinds, strict=True):
            if len(np.unique(kind)) > 1:
                raise LayoutError(f"the {side} arrays are in DRAM and in VRAM; take each of by_memory() by itself")
        if self.run_count >= 2**31:
            raise LayoutError(f"there are {self.run_count:,} runs; NIXL numbers them with 32 bits")
        found = []
        for side, (_, device) in zip(("local", "remote"), kinds, strict=True):
            rows = self.rows
            if is_true("strided", strided):
                stride = np.where(rows["count"] > 1, rows[f"{side}_stride"], rows["bytes"])
                columns = [rows[side], rows["bytes"], device, stride, rows["count"]]
            else:
                columns = [addresses_of_runs(rows, side), lengths_of_runs(rows), np.repeat(device, rows["count"])]
            found.append(np.stack([column.astype(np.uint64) for column in columns], 1))
        memory = [_MEMORY[int(kind[0])] if len(kind) else _MEMORY[0] for kind, _ in kinds]
        return NixlRows(found[0], found[1], memory[0], memory[1], np.arange(self.run_count, dtype=np.int32))

    def by_memory(self) -> list[AddressRows]:
        """Return the rows by kind of memory on both sides, because a list of NIXL has one kind."""
        kinds = 2 * self._kinds("local")[0] + self._kinds("remote")[0]
        return [replace(self, rows=self.rows[kinds == kind]) for kind in np.unique(kinds).tolist()]

    def mooncake(self) -> MooncakeLists:
        """Return the lists that Mooncake's `batch_transfer_sync_read` and `…_write` take, an entry for each run.

        Raises:
            LayoutError: if there are more than 50 million runs.
        """
        return MooncakeLists(*(column.tolist() for column in self.runs()))

    def staged(self, *, max_rows: int | None = None, over_bytes: int | None = None) -> StagedRows:
        """Read the gaps between runs too, for fewer and longer reads, into scratch memory.

        Args:
            max_rows: the most reads; within that limit the fewest bytes are read.
            over_bytes: the most bytes of gaps that are read; within that limit there are the fewest reads.

        Raises:
            LayoutError: if this side writes, because that would overwrite the gaps; if both limits are given, or
                `max_rows` is less than the blocks of the other side; if there are more than 50 million runs.

        The reads have no strides, and each is within one block of the other side's memory. With the same bytes, fewer
        such reads are not possible; reads with strides are not considered.
        """
        limit = spare_limit("over_bytes", over_bytes, "max_rows", max_rows)
        if self.writes:
            which = "max_rows" if max_rows is not None else "over_bytes"
            raise LayoutError(
                f"{which}: a write that joins two runs would overwrite what {shown(self.other.holder)} has between "
                "them; leave out writes=True, and let the receiver read"
            )
        _, remote, lengths = self.runs()
        block = np.repeat(self.rows["remote_block"], self.rows["count"])
        order = np.lexsort((remote, block))
        starts, stops = remote[order], remote[order] + lengths[order].astype(np.uint64)
        is_first, reach = joined_over_gaps(block[order], starts, stops, limit)
        firsts = np.flatnonzero(is_first)
        lasts = np.append(firsts[1:], len(order)) - 1 if len(firsts) else firsts
        sizes = (reach[lasts] - starts[firsts]).astype(np.int64)
        begins = np.cumsum(sizes) - sizes
        read = np.empty(len(order), np.int64)
        read[order] = np.cumsum(is_first) - 1
        scratch = begins[read] + (remote - starts[firsts][read]).astype(np.int64)
        return StagedRows(self, starts[firsts], sizes, block[order][firsts], scratch)

    def _kinds(self, side: str) -> tuple[Numbers, Numbers]:
        """Return the kind of memory and the device of each row of a side."""
        manifest = self.own if side == "local" else self.other
        used = np.unique(self.rows[f"{side}_block"]).tolist()
        found = np.zeros((len(manifest.blocks), 2), np.int64)
        known: dict[str, tuple[int, int]] = {}
        for block in used:
            device = manifest.blocks[block].device
            found[block] = known[device] = known.get(device) or _nixl_device(device)
        return found[self.rows[f"{side}_block"], 0], found[self.rows[f"{side}_block"], 1]

    def __repr__(self) -> str:
        verb = "writes to" if self.writes else "reads from"
        return f"<AddressRows: {shown(self.own.holder)} {verb} {shown(self.other.holder)}, {counted(len(self), 'row')}>"


@dataclass(frozen=True, eq=False, repr=False)
class StagedRows:
    """Reads that include the gaps between runs, and where each run is in them; `AddressRows.staged` makes it.

    Attributes:
        of: The rows that are read.
        remote: The address of each read in the other side's memory.
        lengths: The bytes of each run.
        blocks: The block of the other side that has each read.
        places: The byte at which each run begins in the memory that is read into.
    """

    of: AddressRows
    remote: Addresses
    lengths: Numbers
    blocks: Numbers
    places: Numbers

    @property
    def nbytes(self) -> int:
        """The bytes that are read, one read after the other."""
        return int(self.lengths.sum())

    def into(self, scratch: Any) -> AddressRows:
        """Return the reads into memory of at least `nbytes` bytes.

        Raises:
            LayoutError: if the memory is too small, or shares memory with arrays that are sent or written.
        """
        given = range_of("scratch", scratch, None, True)
        if given.nbytes < self.nbytes:
            raise LayoutError(f"scratch has {given.nbytes} bytes; {self.nbytes} are needed")
        own = replace(self.of.own, out={**self.of.own.out, "scratch of staged rows": given}, blocks=(given,))
        rows = np.zeros(len(self.lengths), ROW)
        rows["local"] = np.uint64(given.address) + (np.cumsum(self.lengths) - self.lengths).astype(np.uint64)
        rows["remote"], rows["bytes"], rows["count"] = self.remote, self.lengths, 1
        rows["remote_block"] = self.blocks
        return AddressRows(own, self.of.other, False, rows)

    def unpack(self, scratch: npt.NDArray[Any], blocks: Sequence[npt.NDArray[Any]]) -> None:
        """Copy the runs from what was read to their places.

        Args:
            scratch: the memory that was read into, an array of numpy.
            blocks: the arrays of numpy that the manifest was made with as `blocks`, or those of `out`.

        Raises:
            LayoutError: if an array is missing, or not in C order.
        """
        data = scratch.reshape(-1).view(np.uint8)
        views = [(range_of("blocks", block, None, True).address, block.reshape(-1).view(np.uint8)) for block in blocks]
        views.sort(key=lambda view: view[0])
        begins = np.array([address for address, _ in views], np.uint64)
        rows, run = self.of.rows, 0
        which = np.searchsorted(begins, rows["local"], side="right") - 1
        for number, (local, _, size, count, stride, *_) in zip(which.tolist(), rows.tolist(), strict=True):
            at = local - views[number][0] if number >= 0 else -1
            if at < 0 or at + (count - 1) * stride + size > len(views[number][1]):
                raise LayoutError(f"no array in blocks holds the {size} bytes at address {local}")
            places = self.places[run : run + count]
            target = strided(views[number][1], at, count, size, stride)
            steps = np.diff(places)
            if count > 1 and (steps == steps[0]).all() and steps[0] > 0:
                target[...] = strided(data, int(places[0]), count, size, int(steps[0]))
            else:
                for one, place in enumerate(places.tolist()):
                    target[one] = data[place : place + size]
            run += count

    def __repr__(self) -> str:
        reads = counted(len(self.lengths), "read")
        return f"<StagedRows: {reads}, {self.nbytes:,} bytes, of which {self.of.nbytes:,} are needed>"


def address_rows(part: Descriptors, own: MemoryManifest, other: MemoryManifest, *, writes: bool = False) -> AddressRows:
    """Return the transfers between two holders, as addresses.

    Args:
        part: what this side sends, receives and copies: `ModelPlan.descriptors(holder)`.
        own: its manifest.
        other: the manifest of the other side, as `MemoryManifest.from_dict` reads it; `own` itself for what this side
            copies in its own memory.
        writes: whether this side writes what it sends into the other's memory; by default it reads what it receives.

    Raises:
        LayoutError: if the two sides have different plans or versions, or less memory than the plan
            needs: `check_manifests`.

    Padding (`Descriptors.zeros`) and further places of a tensor (`Repeat`) are in no rows: fill them yourself.

    >>> from shardwise import DeviceMesh, TensorLayout, plan_model
    >>> mesh = DeviceMesh((2,), ("x",))
    >>> rows, columns = TensorLayout(("x", None), mesh), TensorLayout((None, "x"), mesh)
    >>> plan = plan_model({"w": rows}, {"w": columns}, {"w": ((4, 6), "float32")})
    >>> parts = [plan.descriptors(label) for label in mesh.devices]
    >>> told = [MemoryManifest.of(part, {"w": np.zeros((2, 6), "f4")}, {"w": np.zeros((4, 3), "f4")}, version="1")
    ...         for part in parts]
    >>> found = address_rows(parts[1], *reversed(told))
    >>> found.nixl().local[:, 1:].tolist(), found.nixl().remote[:, 1:].tolist()
    ([[12, 0, 12, 2]], [[12, 0, 24, 2]])
    >>> int(found.rows["remote"][0]) - told[0].src["w"].address
    12
    """
    instance("part", part, Descriptors)
    instance("own", own, MemoryManifest)
    instance("other", other, MemoryManifest)
    writes = is_true("writes", writes)
    if part.holder != own.holder:
        raise LayoutError(f"part is of {shown(part.holder)}, but own is the manifest of {shown(own.holder)}")
    check_manifests(own, other)
    if other.holder == own.holder:
        if own != other:
            raise difference_error("memory", (shown(own.holder),) * 2, (own.digest, other.digest))
        rows = part.copies
    else:
        if other.holder not in part.peers:
            raise LayoutError(f"{shown(other.holder)} is not in the plan")
        rows = part.sends if writes else part.receives
        rows = rows[rows["peer"] == part.peers.index(other.holder)]
        planned = part.digest(other.holder).hex() if len(rows) else own.plans.get(other.holder, "none")
        if own.plans.get(other.holder, "none") != planned:
            whose = f"the manifest of {shown(own.holder)}", "part"
            raise difference_error("plans", whose, (own.plans.get(other.holder, "none"), planned))
    rows = rows[rows["bytes"] * rows["count"] > 0]
    made = np.zeros(len(rows), ROW)
    made["bytes"], made["count"] = rows["bytes"], rows["count"]
    for side, manifest, end in (
        ("local", own, "src" if writes else "dst"),
        ("remote", other, "dst" if writes else "src"),
    ):
        what = "src" if end == "src" else "out"
        last = rows[f"{end}_offset"] + (rows["count"] - 1) * rows[f"{end}_stride"] + rows["bytes"]
        table = located(manifest, what, part.tensors, rows[f"{end}_tensor"], last)
        made[side] = table["address"] + rows[f"{end}_offset"].astype(np.uint64)
        made[f"{side}_block"], made[f"{side}_stride"] = table["block"], rows[f"{end}_stride"]
    return AddressRows(own, other, writes, joined_rows(made))


_MEMORY = ("DRAM", "VRAM")


def _nixl_device(device: str) -> tuple[int, int]:
    """Return the kind of memory, a position in `_MEMORY`, and the number of a device."""
    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()):
        raise LayoutError(f"an array is on device {shown(device)}, but NIXL takes arrays on cpu or cuda:N only")
    return ("cpu", "cuda").index(kind), int(number or 0) if kind == "cuda" else 0
