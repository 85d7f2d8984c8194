"""Weights in the memory of devices, proven equal to a checkpoint's by digests that add up, without gathering.

Each device digests its own boxes. Boxes of the same bounds on several devices are replicas, whose digests are equal;
the digests of all distinct boxes add up to the tensor's. Padding must be zero, and further places of a tensor in a
parameter must equal the first: each device checks these by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..._arguments import check_items, instance
from ..._text import counted, shown
from ...deploy.positions import Positions, positions_of
from ...errors import LayoutError
from ...layout import UnevenRule
from ...partition import Partition
from ...piece import Piece
from ...pieces import Bounds
from ...reshard.model.memory import Repeat
from ...shared_tiling import SharedTiling
from ...tiling import Tiling
from ..data.digest import Digest, digest, digests_of_pieces, elements_with_bits
from ..data.engine import DIGEST_MODULUS
from ..data.text import box_text
from ..tensors.checkpoint import StoredCheckpoint

__all__ = ["MemoryDigests", "MemoryFault", "check_memory", "check_sums", "memory_digests"]

#: The most combinations of differing replicas that are tried to find the right ones.
_MOST_TRIED = 4096
_LIMBS = 4


class MemoryFault(NamedTuple):
    """A fault in the memory of a device.

    Attributes:
        tensor: the tensor of the checkpoint; `""` for padding that is in no tensor.
        device: the label of the device; `None` if it is not known which.
        parameter: the parameter of the device; `""` if it is not known.
        why: a sentence about the fault.
    """

    tensor: str
    device: Any
    parameter: str
    why: str


@dataclass(frozen=True)
class MemoryDigests:
    """The digests of one device's boxes of a model; `memory_digests` returns them, `check_memory` compares all.

    A report has some 100 bytes for each tensor, and can be pickled, to be gathered from all processes.

    Attributes:
        device: the label of the device.
        boxes: for each tensor on the device the digest of each box that it holds there.
        parameters: for each of these tensors the parameter that it is in.
        faults: the faults that the device finds by itself: padding that is not zero, places of a tensor that differ.
        sums: for one all-reduce by addition: int64 (tensors, 4), a row for each tensor of the model, in order.
            `check_sums` takes the sum over all devices.
    """

    device: Any
    boxes: Mapping[str, Mapping[Bounds, Digest]]
    parameters: Mapping[str, str]
    faults: tuple[MemoryFault, ...]
    sums: npt.NDArray[np.int64] = field(compare=False, repr=False)


def memory_digests(
    layouts: Any,
    device: Any,
    tensors: Mapping[str, Any],
    memory: Mapping[str, Any],
    uneven: UnevenRule = "even",
) -> MemoryDigests:
    """Return the digests of all that a device holds of a model, in one call.

    Args:
        layouts: the layouts: a `Deployment`, a `LayoutMap`, a `Manifest`, or a mapping from names to layouts.
        device: the label of the device.
        tensors: the shape of each tensor of the checkpoint, or its shape and dtype, or anything that has these.
        memory: the device's parameters by name: arrays of numpy, or tensors of PyTorch, which are read in place.
        uneven: how dims that do not divide are cut, unless the layouts say so.

    Raises:
        LayoutError: if a parameter is missing or has another shape; if a tensor has no layout.
        MeshError: if there is no such device.

    >>> from shardwise import DeviceMesh, LayoutMap
    >>> rules = LayoutMap(DeviceMesh((2,), ("tp",)))
    >>> rules["w"] = (None, "tp")
    >>> whole = np.arange(8, dtype=np.float32).reshape(2, 4)
    >>> held = {"cpu:0": whole[:, :2].copy(), "cpu:1": whole[:, 2:].copy()}
    >>> reports = [memory_digests(rules, device, {"w": (2, 4)}, {"w": array}) for device, array in held.items()]
    >>> check_memory(reports, {"w": digest(whole)})
    []
    >>> held["cpu:1"][0, 0] = 7
    >>> reports[1] = memory_digests(rules, "cpu:1", {"w": (2, 4)}, {"w": held["cpu:1"]})
    >>> [fault.why for fault in check_memory(reports, {"w": digest(whole)})]
    ['what the devices hold is not what the checkpoint holds']
    """
    places = positions_of(layouts, tensors, uneven)
    names = list(places.shapes)
    boxes: dict[str, dict[Bounds, Digest]] = {}
    parameters: dict[str, str] = {}
    faults: list[MemoryFault] = []
    asked: list[tuple[Any, tuple[int, ...], Piece]] = []
    #: For each place of a tensor its parameter, its key and the bounds of its boxes.
    held_at: list[tuple[str, str, list[Bounds]]] = []
    for one in places.local_parameters(device):
        if one.name not in memory:
            raise LayoutError(f"memory lacks the parameter {shown(one.name)} of {shown(device)}")
        array = memory[one.name]
        views = one.views(array)
        held = 0
        for key, view in views.items():
            tensor = _tensor_of(key)
            pieces = _pieces(places, tensor, device)
            held += sum(map(_count, pieces))
            asked += [(view, places.shapes[tensor], piece) for piece in pieces]
            held_at.append((one.name, key, [_bounds(piece) for piece in pieces]))
        if held < math.prod(one.shape) and (wrong := _outside(array, views, places, device)):
            why = f"{counted(wrong, 'element')} of padding {'is' if wrong == 1 else 'are'} not zero"
            faults.append(MemoryFault("", device, one.name, why))
    digests = iter(digests_of_pieces(asked))
    for parameter, key, bounds in held_at:
        tensor = _tensor_of(key)
        found = dict(zip(bounds, islice(digests, len(bounds)), strict=True))
        if tensor not in boxes:
            boxes[tensor], parameters[tensor] = found, parameter
        elif found != boxes[tensor]:
            faults.append(
                MemoryFault(tensor, device, parameter, f"{key} does not hold what the first place of this tensor holds")
            )
    sums = np.zeros((len(names), _LIMBS), np.int64)
    for row, name in enumerate(names):
        if name in boxes:
            _, weights = _weights(places, name)
            total = sum(one.number * weights[bounds] for bounds, one in boxes[name].items()) % DIGEST_MODULUS
            sums[row] = [total >> 32 * limb & 0xFFFFFFFF for limb in range(_LIMBS)]
    return MemoryDigests(device, boxes, parameters, tuple(faults), sums)


def check_memory(
    reports: Iterable[MemoryDigests], digests: Mapping[str, Digest | int], checkpoint: StoredCheckpoint | None = None
) -> list[MemoryFault]:
    """Compare the memory of all devices with a checkpoint, replica by replica, and list all faults.

    Args:
        reports: the results of `memory_digests` from all devices.
        digests: the digest of each tensor, or its number, as `tensor_digests` gives those of a checkpoint; a number
            says nothing of dtype and shape.
        checkpoint: the checkpoint itself, to find out which device is wrong where the digests of a whole tensor do not
            tell: only the boxes of wrong tensors are read.

    Returns:
        All faults, by tensor; none if the devices hold the checkpoint.

    Raises:
        KeyError: if the checkpoint lacks a tensor that is wrong.

    If replicas differ, those that do not fit the digest of the whole are named; if none fits, all are named.
    """
    listed = list(reports)
    check_items("reports", listed, MemoryDigests)
    check_items("digests", list(instance("digests", digests, Mapping).values()), (Digest, int))  # type: ignore[type-abstract]
    faults = [fault for report in listed for fault in report.faults]
    held: dict[str, dict[Bounds, dict[Digest, list[MemoryDigests]]]] = {}
    for report in listed:
        for name, boxes in report.boxes.items():
            for bounds, one in boxes.items():
                held.setdefault(name, {}).setdefault(bounds, {}).setdefault(one, []).append(report)
    for name, expected in digests.items():
        if name not in held:
            faults.append(MemoryFault(name, None, "", "no device holds it"))
            continue
        faults += _checked(name, held[name], expected, checkpoint)
    unknown = [name for name in held if name not in digests]
    return faults + [MemoryFault(name, None, "", "there is no digest to compare it with") for name in unknown]


def check_sums(
    layouts: Any,
    tensors: Mapping[str, Any],
    sums: npt.NDArray[np.int64],
    digests: Mapping[str, Digest | int],
    uneven: UnevenRule = "even",
) -> list[str]:
    """Name the tensors that some device does not hold as the checkpoint does, from one all-reduce over all devices.

    Args:
        layouts: the layouts, as given to `memory_digests`.
        tensors: the tensors, in the same order.
        sums: the sum over all devices of `MemoryDigests.sums`, for fewer than 2**31 devices.
        digests: the digest of each tensor of the checkpoint, or its number.
        uneven: how dims that do not divide are cut, unless the layouts say so.

    Raises:
        LayoutError: if `sums` is not of (tensors, 4); if a digest is missing.

    Every replica is in the sum, which is the tensor's digest times a number that follows from the layouts.
    """
    places = positions_of(layouts, tensors, uneven)
    given = np.asarray(sums)
    if given.shape != (len(places.shapes), _LIMBS):
        raise LayoutError(f"sums has shape {given.shape}; it must be {(len(places.shapes), _LIMBS)}")
    wrong = []
    for name, limbs in zip(places.shapes, given.tolist(), strict=True):
        if name not in digests:
            raise LayoutError(f"digests has no entry for {shown(name)}")
        times, _ = _weights(places, name)
        total = sum(limb << 32 * at for at, limb in enumerate(limbs)) % DIGEST_MODULUS
        expected = digests[name]
        number = expected if isinstance(expected, int) else expected.number
        if total != number * times % DIGEST_MODULUS:
            wrong.append(name)
    return wrong


def _checked(
    name: str,
    held: Mapping[Bounds, Mapping[Digest, list[MemoryDigests]]],
    given: Digest | int,
    checkpoint: StoredCheckpoint | None,
) -> list[MemoryFault]:
    """Compare the boxes of one tensor."""
    kinds = {(one.dtype, one.shape) for values in held.values() for one in values}
    expected = Digest(given, *min(kinds)) if isinstance(given, int) else given
    if kinds != {(expected.dtype, expected.shape)}:
        said = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in sorted(kinds))
        why = f"devices have it as {said}, the checkpoint as {expected.dtype}{list(expected.shape)}"
        return [MemoryFault(name, None, "", why)]
    size = sum(math.prod(stop - start for start, stop in bounds) for bounds in held)
    if size != math.prod(expected.shape):
        count = counted(size, "element")
        why = f"the boxes of all reports together hold {count} of {math.prod(expected.shape)}: a box is missing"
        return [MemoryFault(name, None, "", why)]
    choices = product(*([*values] for values in held.values()))
    # One of each box: what is right is what adds up to the whole.
    right = next((each for each in islice(choices, _MOST_TRIED) if _total(each) == expected.number), None)
    if right is None and checkpoint is not None:
        tensor = checkpoint[name]
        right = tuple(
            digest(tensor.read(box), shape=tensor.shape, box=box)
            for box in (tuple(slice(*side) for side in bounds) for bounds in held)
        )
    faults = []
    differ = "what the devices hold is not what the checkpoint holds"
    if right is None and all(len(values) == 1 for values in held.values()):
        return [MemoryFault(name, None, "", differ)]
    for at, (bounds, values) in enumerate(held.items()):
        wrong = [] if right is not None else [*values] * (len(values) > 1)
        if right is not None:
            wrong = [one for one in values if one != right[at]]
        why = f"its box {box_text(bounds)} differs from " + ("other replicas" if right is None else "the checkpoint's")
        faults += [
            MemoryFault(name, report.device, report.parameters[name], why) for one in wrong for report in values[one]
        ]
    return faults


def _total(digests: Iterable[Digest]) -> int:
    return sum(one.number for one in digests) % DIGEST_MODULUS


def _weights(places: Positions, name: str) -> tuple[int, Mapping[Bounds, int]]:
    """Return how often the whole tensor is in the sum over all devices, and the weight of each box that makes it so.

    Weights differ if only some boxes of a tensor are on several devices.
    """
    partition = places.partition(name)
    if partition is None:
        whole = tuple((0, size) for size in places.shapes[name])
        return len(places.devices), {whole: 1}
    boxes = _all_boxes(partition)
    if not partition.shape:
        return len(boxes), {(): 1}
    boxes = boxes[(boxes[:, :, 1] > boxes[:, :, 0]).all(1)]
    distinct, counts = np.unique(boxes.reshape(len(boxes), -1), axis=0, return_counts=True)
    sides = distinct.reshape(len(distinct), -1, 2)
    if (sides[:, :, 1] - sides[:, :, 0]).prod(1).sum() != partition.size:
        raise LayoutError(f"{shown(name)}: devices hold boxes that partly overlap, whose digests do not add up")
    times = math.lcm(*counts.tolist())
    bounds = (tuple((box[at], box[at + 1]) for at in range(0, len(box), 2)) for box in distinct.tolist())
    return times, dict(zip(bounds, (times // count for count in counts.tolist()), strict=True))


def _all_boxes(partition: Tiling) -> npt.NDArray[np.int64]:
    """Return the boxes of all devices: int64 (boxes, dims, 2)."""
    if isinstance(partition, (Partition, SharedTiling)):
        return partition.all_pieces()[1][:, :, :2]
    boxes = [_bounds(piece) for holder in partition.holders for piece in partition.pieces(holder)]
    return np.array(boxes, np.int64).reshape(len(boxes), len(partition.shape), 2)


def _pieces(places: Positions, tensor: str, device: Any) -> list[Piece]:
    """Return the non-empty pieces of a tensor on a device, each with its start in the device's array."""
    partition = places.partition(tensor)
    if partition is None:
        shape = places.shapes[tensor]
        return [Piece(tuple(slice(0, size) for size in shape), (0,) * len(shape))]
    return [piece for piece in partition.pieces(device) if _count(piece)]


def _count(piece: Piece) -> int:
    return math.prod(side.stop - side.start for side in piece.box)


def _bounds(piece: Piece) -> Bounds:
    return tuple((side.start, side.stop) for side in piece.box)


def _tensor_of(key: str) -> str:
    """Return the tensor of a view, which may be a further place of it."""
    return key.tensor if isinstance(key, Repeat) else key


def _outside(array: Any, views: Mapping[str, Any], places: Positions, device: Any) -> int:
    """Return the number of elements of a parameter that are in no tensor and have a bit that is not zero."""
    inside = 0
    for key, view in views.items():
        for piece in _pieces(places, _tensor_of(key), device):
            inside += elements_with_bits(piece.view(view))
    return elements_with_bits(array) - inside
