"""The rows of a holder's descriptors, made from the transfers of plans: boxes as runs, shared by equal tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..._frozen import frozen
from ..._types import Numbers
from ...errors import LayoutError
from ...partition import Partition
from ...pieces import dense_strides
from ...tiling import Tiling
from ..plan import ReshardPlan
from ..run import addends_of
from .descriptors import DESCRIPTOR, ZEROS, Descriptors, RowTable
from .groups import BoxRuns, GroupedTensors, TensorGroup

__all__ = ["descriptors_of"]

#: The most transfers of a plan whose runs are worked out for all holders together.
_FEW = 4096


class _RowTemplate(NamedTuple):
    """The rows of the tensors of a group, which differ in the tensors only.

    Attributes:
        rows: The rows, in order, without tensors.
        leaf: For each row, which of the sources of its tensor has the elements; or `ZEROS`.
        tensors: The positions of the tensors.
        sources: For each tensor, the positions of the stored tensors that it is made of.
    """

    rows: RowTable
    leaf: Numbers
    tensors: Numbers
    sources: Numbers


def descriptors_of(holder: Any, model: GroupedTensors, addend: int = 0) -> Descriptors:
    """Make the descriptors of a holder; see `ModelPlan.descriptors`.

    Args:
        holder: The label of the holder.
        model: The tensors by their plans.
        addend: The number of the partial sums that the rows are of; values without partial sums have number 0.
    """
    peers, names, dtypes, groups = model
    own = peers.index(holder)
    found: tuple[list[_RowTemplate], ...] = ([], [], [])
    for group in groups:
        (sources,), (targets,) = (group.src == own).nonzero(), (group.dst == own).nonzero()
        if not len(sources) and not len(targets):
            continue
        is_of_addend = _of_addend(group.plan, addend)
        transfers = group.plan.transfers
        for kind, (field, here, other, there) in enumerate(
            (("src_device", sources, "dst_device", group.dst), ("dst_device", targets, "src_device", group.src))
        ):
            chosen = is_of_addend(transfers, _among(transfers[field], here))
            peer = there[transfers[other]]
            # Of tilings without labels a holder may have one of each side: it sends itself nothing.
            itself = chosen[peer[chosen] == own]
            if len(itself):
                chosen = chosen[peer[chosen] != own]
                if kind:
                    found[2].extend(_templates(group, False, itself, peer))
            if len(chosen):
                found[kind].extend(_templates(group, False, chosen, peer))
        kept = group.plan.kept
        chosen = is_of_addend(kept, _among(kept["dst_device"], targets))
        if len(chosen):
            found[2].extend(_templates(group, True, chosen, np.full(len(kept), own)))
    sends, receives, copies = (_expanded(templates, len(names)) for templates in found)
    padding = copies["src_tensor"] == ZEROS
    zeros, copies = copies[padding], frozen(copies[~padding])
    zeros["src_tensor"] = zeros["dst_tensor"]
    return Descriptors(holder, peers, names, dtypes, sends, receives, copies, frozen(zeros))


def _of_addend(plan: ReshardPlan, addend: int) -> Callable[[RowTable, npt.NDArray[np.intp]], npt.NDArray[np.intp]]:
    """Return a function that selects the transfers of one addend."""
    if plan.addends == 1:
        return lambda _, chosen: chosen if addend == 0 else chosen[:0]
    assert isinstance(plan.src, Partition)
    addends = addends_of(plan.src)
    return lambda transfers, chosen: chosen[addends[transfers["src_device"][chosen]] == addend]


def _among(devices: Numbers, wanted: Numbers) -> npt.NDArray[np.intp]:
    """Return the positions of the wanted devices, which mostly are one or none."""
    if len(wanted) == 1:
        found: npt.NDArray[np.intp] = (devices == wanted[0]).nonzero()[0]
        return found
    return np.flatnonzero(np.isin(devices, wanted)) if len(wanted) else np.zeros(0, np.intp)


def _templates(group: TensorGroup, kept: bool, chosen: npt.NDArray[np.intp], peer: Numbers) -> Iterator[_RowTemplate]:
    """Yield the rows of some transfers of a plan, for each size of elements; `peer` is given for all transfers."""
    one = _lowered(group, kept, chosen)
    for bits in sorted(set(group.bits.tolist())):
        same = group.bits == bits
        each = np.zeros(len(one.transfer), DESCRIPTOR)
        each["peer"], each["count"] = peer[one.transfer], one.times
        sizes = (one.src, one.dst, one.run, one.src_stride, one.dst_stride)
        for name, size in zip(("src_offset", "dst_offset", "bytes", "src_stride", "dst_stride"), sizes, strict=True):
            if bits % 8 and (size * bits % 8).any():
                raise LayoutError("a tensor with several elements in a byte is cut within bytes, which cannot be sent")
            each[name] = size * (bits // 8) if bits % 8 == 0 else size * bits // 8
        yield _RowTemplate(*_joined(each, one.leaf), group.tensors[same], group.sources[same])


def _lowered(group: TensorGroup, kept: bool, chosen: npt.NDArray[np.intp]) -> BoxRuns:
    """Return the runs of some transfers of a plan; if it has few, all are worked out, for the next holder that asks."""
    count = len(group.plan.kept) if kept else len(group.plan.transfers)
    if count > _FEW:
        return _runs_of(group, kept, chosen)
    if kept not in group.lowered:
        group.lowered[kept] = _runs_of(group, kept, np.arange(count))
    whole = group.lowered[kept]
    wanted = np.zeros(count, np.bool_)
    wanted[chosen] = True
    (rows,) = wanted[whole.transfer].nonzero()
    return BoxRuns(*(column[rows] for column in whole))


def _runs_of(group: TensorGroup, kept: bool, chosen: npt.NDArray[np.intp]) -> BoxRuns:
    plan = group.plan
    moved = (plan.kept if kept else plan.transfers)[chosen]
    pieces = (plan.core.kept_pieces() if kept else plan.pieces())[chosen]
    extents = (moved["stop"] - moved["start"]).astype(np.int64)
    leaf = np.zeros(len(moved), np.int64)
    ends = []
    for side, (tiling, field) in enumerate(((plan.src, "src_device"), (plan.dst, "dst_device"))):
        if side or group.places is None:
            boxes = plan.core.local_boxes(side, kept)[chosen, :, 0]
            ends.append(_located(plan, side, tiling, moved[field], pieces[:, side], boxes))
        else:
            rows = group.places.rows[group.places.begins[moved[field]] + pieces[:, 0]]
            leaf, rank = rows[:, 0], extents.shape[1]
            strides = rows[:, 2 + rank :]
            ends.append(_End(rows[:, 1] + ((moved["start"] - rows[:, 2 : 2 + rank]) * strides).sum(1), strides))
    one = _runs_of_boxes(extents, ends[0], ends[1])
    return one._replace(transfer=chosen[one.transfer], leaf=leaf[one.transfer])


class _End(NamedTuple):
    """One end of transfers: the offset of each box in its array, and the strides of the array, in elements."""

    offset: Numbers
    strides: Numbers


def _located(plan: ReshardPlan, side: int, tiling: Tiling, holders: Numbers, pieces: Numbers, starts: Numbers) -> _End:
    if isinstance(tiling, Partition) and not tiling.is_packed:
        # Each device has one box, which is its array.
        bounds = tiling.boxes()
        strides = dense_strides((bounds[:, :, 1] - bounds[:, :, 0])[holders], 1)
        return _End((starts * strides).sum(1), strides)
    rank = starts.shape[1]
    shapes = np.ones((len(holders), rank), np.int64)
    offsets = np.zeros(len(holders), np.int64)
    # Each pair of a holder and a piece once.
    width = int(pieces.max(initial=0)) + 1
    pairs, which = np.unique(holders * width + pieces, return_inverse=True)
    for number, pair in enumerate(pairs.tolist()):
        holder, piece = divmod(pair, width)
        _, window = plan.core.place(side, holder, piece)
        # A piece in a flat array is a part of it, of the piece's own shape.
        offset, shape = (0, tiling.shape_at(holder)) if window is None else window
        chosen = which == number
        shapes[chosen], offsets[chosen] = shape, offset
    strides = dense_strides(shapes, 1)
    return _End(offsets + (starts * strides).sum(1), strides)


def _runs_of_boxes(extents: Numbers, src: _End, dst: _End) -> BoxRuns:
    """Return boxes as runs that are contiguous on both sides, repeated along one more dim; the rest as further rows.

    The dims are taken from the last to the first. As long as a dim's stride is the length of the run on both sides, the
    run grows by it. The first other dim repeats the run; one whose strides go on where its repeats end, on both sides,
    only makes more of these. Each further dim is looped over: a row for each of its elements.
    """
    number, rank = extents.shape
    run, count = np.ones(number, np.int64), np.ones(number, np.int64)
    steps = [np.zeros(number, np.int64), np.zeros(number, np.int64)]
    contiguous = np.ones(number, bool)
    #: The dims that still have to be looped over: their extents and strides.
    outer: list[tuple[Numbers, Numbers, Numbers]] = []
    for dim in range(rank - 1, -1, -1):
        extent, here = extents[:, dim], (src.strides[:, dim], dst.strides[:, dim])
        contiguous &= (extent == 1) | ((here[0] == run) & (here[1] == run))
        run = np.where(contiguous, run * extent, run)
        loop = ~contiguous & (extent > 1)
        first = loop & (count == 1)
        joined = loop & ~first & (here[0] == steps[0] * count) & (here[1] == steps[1] * count)
        steps = [np.where(first, stride, step) for stride, step in zip(here, steps, strict=True)]
        count = np.where(first, extent, np.where(joined, count * extent, count))
        left = loop & ~first & ~joined
        if left.any():
            outer.append((np.where(left, extent, 1), *here))
    index = np.arange(number)
    offsets = [src.offset, dst.offset]
    for extent, *strides in outer:
        times = extent[index]
        begins = np.repeat(np.cumsum(times) - times, times)
        index, turn = np.repeat(index, times), np.arange(int(times.sum())) - begins
        offsets = [
            np.repeat(offset, times) + turn * stride[index] for offset, stride in zip(offsets, strides, strict=True)
        ]
    return BoxRuns(index, offsets[0], offsets[1], run[index], count[index], steps[0][index], steps[1][index], index)


def _joined(rows: RowTable, leaf: Numbers) -> tuple[RowTable, Numbers]:
    """Return the rows of one tensor in order, with rows joined that are adjacent on both sides.

    Rows that are adjacent at the receiver follow each other in the order of its offsets, so each row need be compared
    with its successor only; a group of joined rows is as long as its rows together.
    """
    if len(rows) == 1:
        return rows, leaf
    order = np.lexsort((rows["src_offset"], rows["dst_offset"], rows["peer"]))
    rows, leaf = rows[order], leaf[order]
    before, after = rows[:-1], rows[1:]
    joins = (before["count"] == 1) & (after["count"] == 1) & (before["peer"] == after["peer"]) & (leaf[:-1] == leaf[1:])
    for name in ("src_offset", "dst_offset"):
        joins &= before[name] + before["bytes"] == after[name]
    if joins.any():
        starts = np.flatnonzero(np.concatenate([[True], ~joins]))
        sizes = np.add.reduceat(rows["bytes"], starts)
        rows, leaf = rows[starts], leaf[starts]
        rows["bytes"] = sizes
    return rows, leaf


def _expanded(templates: Sequence[_RowTemplate], count: int) -> RowTable:
    """Return the rows of all tensors, made from templates, sorted by peer, tensor and offset."""
    if not templates:
        return frozen(np.zeros(0, DESCRIPTOR))
    which, member = [], []
    first, members = 0, 0
    # There are many more rows than templates have, and tensors: half the memory, where the positions of both allow it.
    most = max(sum(len(one.rows) for one in templates), sum(len(one.tensors) for one in templates))
    small = np.int32 if most < 2**31 else np.int64
    for one in templates:
        number = np.arange(members, members + len(one.tensors), dtype=small)
        edges = np.flatnonzero(np.diff(one.rows["peer"])) + 1
        # All tensors to one peer, and then to the next: nearly the order that is wanted.
        for begin, end in pairwise([0, *edges.tolist(), len(one.rows)]):
            part = np.arange(first + begin, first + end, dtype=small)
            which.append(part[None].repeat(len(number), 0).ravel())
            member.append(number.repeat(end - begin))
        first, members = first + len(one.rows), members + len(one.tensors)
    row, tensor = np.concatenate(which), np.concatenate(member)
    del which, member
    # As numbers: joining records takes numpy longer, as does taking field after field.
    rows = np.concatenate([one.rows.view(np.int64) for one in templates]).view(DESCRIPTOR)
    tensors = np.concatenate([one.tensors for one in templates])
    order = np.argsort(rows["peer"][row] * count + tensors[tensor], kind="stable")
    row, tensor = row[order], tensor[order]
    del order
    made = rows.take(row)
    made["dst_tensor"] = tensors[tensor]
    # The tensors that these are made of, one after the other; most are made of one.
    sources = np.concatenate([one.sources.ravel() for one in templates])
    begins = np.concatenate([np.full(len(one.tensors), one.sources.shape[1]) for one in templates])
    begins = np.cumsum(begins) - begins
    position = begins[tensor]
    leaf = np.concatenate([one.leaf for one in templates])[row]
    del row, tensor
    padding = leaf == ZEROS
    position += np.maximum(leaf, 0, out=leaf)
    made["src_tensor"] = sources.take(position, out=leaf)
    made["src_tensor"][padding] = ZEROS
    # Read-only without another copy.
    return np.frombuffer(made.view(np.uint8).data.toreadonly(), DESCRIPTOR)
