"""Rewrites between two deployments: which arrays of which holders have the elements of each new tensor.

A rewrite of a checkpoint states which boxes of stored tensors make up a new tensor. Here each stored tensor is in the
arrays of its holders, so the boxes are in these arrays: a tiling of the new tensor, with a table of the place of each
piece. Tensors that are made alike from tensors that are cut alike share both.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..._boxes import key_of
from ..._core import Tiling as CoreTiling
from ..._dtypes import find_dtype
from ..._text import shown
from ...conversion.apply import rewritten
from ...conversion.assembled import Assembled, Leaf
from ...conversion.leaves import Stored, Values
from ...conversion.tables import Wanted
from ...errors import LayoutError
from ...partition import Partition
from ...pieces import Pieces, dense_strides
from ...quantized import Components, find_components
from ...quantized.follow import with_states
from ...quantized.forms import NO_COMPONENTS
from ...rules.left_out import LeftOut, listed
from ...rules.rewrites import Rewrites
from ...tiling import Tiling
from ..run import checked_arrays
from ..source import ShardSource
from .descriptors import ZEROS, Descriptors
from .runner import runs_view
from .sides import Described, ModelChange, PieceRows, TilingSide
from .transport import Transport

__all__ = ["Converted", "Sources", "converted", "run_rewritten"]


class Converted(NamedTuple):
    """The tensors of both sides, where they are rewritten, quantized or an optimizer's.

    Attributes:
        stored: The source's tensors.
        rewritten: The destination's tensors, made of those of the source; empty if nothing is rewritten.
        left_out: What is said of tensors.
    """

    stored: dict[str, Described]
    rewritten: dict[str, Assembled]
    left_out: list[LeftOut]


def converted(tensors: Mapping[str, Described], change: ModelChange, ends: tuple[TilingSide, TilingSide]) -> Converted:
    """Rewrite the tensors of a model, and give components and states the layouts of their weights.

    Raises:
        LayoutError: as `rewritten`; if a dtype is not known.
        ParseError: as `find_components`.
    """
    stored, config = dict(tensors), change.config
    weights = _quantized_weights(stored, config)
    made: dict[str, Assembled] = {}
    left_out: list[LeftOut] = []
    sides = (stored, weights), (stored, weights)
    if change.rewrites or change.source_rewrites:
        stored, made, (before, after) = _rewritten(
            stored, change.rewrites, change.source_rewrites, ends[0].tiling, weights
        )
        sides = (stored, before), ({name: (one.shape, one.dtype.name) for name, one in made.items()}, after)
        left_out += _numbers_taken(made, after)
    for end, side in zip(ends, sides, strict=True):
        left_out += end.follow(*side, config or {})
    return Converted(stored, made, left_out)


def _rewritten(
    tensors: Mapping[str, Described],
    rewrites: Rewrites | None,
    source_rewrites: Rewrites | None,
    tiling: Callable[[str, tuple[int, ...]], Tiling],
    weights: Components,
) -> tuple[dict[str, Described], dict[str, Assembled], tuple[Components, Components]]:
    """Return the source's tensors, the destination's tensors made of them, and the quantized weights of each side.

    Args:
        tensors: The shapes and dtypes of the tensors.
        rewrites: The rewrites by which the destination names and stores the tensors.
        source_rewrites: The rewrites by which the source names and stores them.
        tiling: Returns the tiling of a tensor of the source, given its name and shape.
        weights: The quantized weights among the tensors.

    Raises:
        LayoutError: as `rewritten`; if a dtype is not known.
    """
    stored, before = dict(tensors), weights.tensors
    way = rewrites or Rewrites()
    if source_rewrites:
        there, before = rewritten(_assembled(tensors, tiling), source_rewrites, before)
        stored = {name: (one.shape, one.dtype.name) for name, one in there.items()}
        back = source_rewrites.inverse()
        way = back if rewrites is None else back + rewrites
    made, after = rewritten(_assembled(stored, tiling), way, before)
    ends = (
        with_states(weights._replace(tensors=before), _named(stored), source_rewrites),
        with_states(
            weights._replace(tensors=after),
            {name: (one.shape, one.dtype.name) for name, one in made.items()},
            rewrites,
        ),
    )
    return stored, made, ends


def _numbers_taken(made: Mapping[str, Assembled], weights: Components) -> list[LeftOut]:
    """Return the names of numbers, such as steps, that are taken from the first of several weights that become one.

    A plan knows no values, so they cannot be compared.
    """
    states = (component for weight in weights.states for component in weight.components)
    names = tuple(one.name for one in states if not any(each.of is not None for each in one.along))
    taken = tuple(name for name in names if len(made[name].parts) > 1)
    if not taken:
        return []
    count, which = listed(taken, "number")
    text = (
        f"{count} taken from the first of several weights that become one, because a plan has no values to compare: "
        f"{which}"
    )
    return [LeftOut("states", taken, text)]


def _named(tensors: Mapping[str, Described]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (shape, getattr(dtype, "name", str(dtype))) for name, (shape, dtype) in tensors.items()}


def _quantized_weights(tensors: Mapping[str, Described], config: Mapping[str, Any] | None) -> Components:
    """Find the quantized weights among tensors in memory, of which no values are read, and the states of an optimizer.

    Without a configuration nothing is quantized.

    Raises:
        ParseError: as `find_components`.
    """
    if config is None:
        return with_states(NO_COMPONENTS, _named(tensors))
    outline = {}
    for name, (shape, dtype) in tensors.items():
        known = find_dtype(dtype)
        outline[name] = "" if known is None else known.code or known.name, shape
    return with_states(find_components(outline, config), _named(tensors))


def _assembled(
    tensors: Mapping[str, Described], tiling: Callable[[str, tuple[int, ...]], Tiling]
) -> dict[str, Assembled]:
    made: dict[str, Assembled] = {}
    for name, (shape, dtype) in tensors.items():
        known = find_dtype(dtype)
        if known is None:
            raise LayoutError(f"tensor {shown(name)} has the dtype {shown(dtype)}, which cannot be rewritten")
        made[name] = Stored(name, shape, known, make=partial(_held, name, shape, known, tiling))
    return made


def _held(name: str, shape: tuple[int, ...], dtype: Any, tiling: Callable[[str, tuple[int, ...]], Tiling]) -> Wanted:
    """Return a tensor as pieces of its holders' arrays; offsets and strides count elements."""
    found = tiling(name, shape)
    if isinstance(found, Partition) and found.layout.unreduced:
        raise LayoutError(f"tensor {shown(name)} has partial sums, which cannot be rewritten")
    if not found.has_labels:
        raise LayoutError(f"tensor {shown(name)}: its holders have no labels to send to")
    rank, rows = len(shape), []
    labels = found.holders
    for number, label in enumerate(labels):
        own = _strides(found.holder_shape(label))
        for piece in found.pieces(label):
            starts = [side.start for side in piece.box]
            stops = [side.stop for side in piece.box]
            if any(a >= b for a, b in zip(starts, stops, strict=True)):
                continue
            if isinstance(piece.start, tuple) and len(piece.start) == rank:
                strides, offset = own, sum(a * b for a, b in zip(piece.start, own, strict=True))
            else:  # In a flat array each box lies on its own.
                strides = _strides([b - a for a, b in zip(starts, stops, strict=True)])
                offset = piece.start[0] if isinstance(piece.start, tuple) else piece.start
            rows.append([number, offset, *starts, *stops, *strides])
    table = np.array(rows, np.int64).reshape(len(rows), 2 + 3 * rank)
    return Wanted(name, dtype, shape, Pieces(table, [(name, label) for label in labels]))


def _strides(shape: Any) -> list[int]:
    strides: list[int] = dense_strides(np.array([shape], np.int64), 1)[0].tolist() if len(shape) else []
    return strides


class Sources:
    """The tilings of rewritten tensors before they move; tensors that are made alike share one object.

    Args:
        tiling: Returns the tiling of a stored tensor, given its name and shape: one object for those that are cut
            alike.
        tensors: The shapes and dtypes of the stored tensors.
    """

    def __init__(self, tiling: Callable[[str, tuple[int, ...]], Tiling], tensors: Mapping[str, Described]) -> None:
        self._tiling, self._tensors = tiling, tensors
        self._made: dict[Any, tuple[Tiling, PieceRows]] = {}
        #: Tilings by identity, kept alive so that identities stay unique.
        self._kept: dict[int, Tiling] = {}

    def of(self, name: str, tensor: Assembled, dst: Tiling) -> tuple[Tiling, PieceRows | None, tuple[str, ...]]:
        """Return a tensor's tiling before it moves, the places of its pieces, and the names of its stored tensors.

        Args:
            name: the tensor's name.
            tensor: the tensor, as made of stored ones.
            dst: its tiling afterwards, whose holders make the padding themselves.

        A tensor that is only renamed has the tiling of the stored one, and no table.
        """
        if tensor.source is not None:
            return self.stored(tensor.source), None, (tensor.source,)
        names: dict[str, int] = {}

        def kind(leaf: Leaf) -> Hashable:
            """Return a leaf's number in place of its name, and the identity of its tiling."""
            if isinstance(leaf, Values):
                return leaf.what
            return names.setdefault(leaf.origin, len(names)), id(self.stored(leaf.origin))

        key = tensor.tree(kind), tensor.shape, id(dst)
        if key not in self._made:
            self._kept[id(dst)] = dst
            self._made[key] = self._placed(name, tensor, dst, names)
        return *self._made[key], tuple(names)

    def stored(self, name: str) -> Tiling:
        """Return the tiling of a stored tensor."""
        found = self._tiling(name, self._tensors[name][0])
        self._kept[id(found)] = found
        return found

    def _placed(self, name: str, tensor: Assembled, dst: Tiling, names: Mapping[str, int]) -> tuple[Tiling, PieceRows]:
        if not dst.has_labels:
            raise LayoutError(f"tensor {shown(name)}: its holders have no labels to send to")
        table = tensor.tables().pieces
        rank = len(tensor.shape)
        if any(isinstance(holder, np.ndarray) and holder.tobytes().strip(b"\0") for holder in table.holders):
            raise LayoutError(f"tensor {shown(name)} has values that a rewrite computes, so no holder can send them")
        labels: dict[Any, int] = {}
        #: For each holder in the table, the tensor and the label of the device.
        of = [
            (ZEROS, -1)
            if isinstance(holder, np.ndarray)
            else (names[holder[0]], labels.setdefault(holder[1], len(labels)))
            for holder in table.holders
        ]
        rows = table.rows if len(table) else np.zeros((0, 2 + 3 * rank), np.int64)
        who = np.array(of, np.int64).reshape(-1, 2)[rows[:, 0]]
        rows, zeros = rows[who[:, 0] != ZEROS], rows[who[:, 0] == ZEROS]
        who = who[who[:, 0] != ZEROS]
        if len(zeros):
            # Whoever wants padding has it: nobody sends zeros.
            wanting = [labels.setdefault(label, len(labels)) for label in dst.holders]
            more = np.column_stack([np.full(len(wanting) * len(zeros), ZEROS), np.repeat(wanting, len(zeros))])
            rows = np.concatenate([rows, np.tile(zeros, (len(wanting), 1))])
            who = np.concatenate([who, more])
        order = np.argsort(who[:, 1], kind="stable")
        rows, who = rows[order], who[order]
        begins = np.searchsorted(who[:, 1], np.arange(len(labels) + 1))
        places = np.column_stack([who[:, 0], rows[:, 1], rows[:, 2 : 2 + rank], rows[:, 2 + 2 * rank :]])
        boxes = np.ascontiguousarray(np.stack([rows[:, 2 : 2 + rank], rows[:, 2 + rank : 2 + 2 * rank]], 2))
        holders: list[Any] = [(boxes[begin:end], end - begin, False) for begin, end in pairwise(begins.tolist())]
        core = CoreTiling.boxes(tensor.shape, holders, True)
        key = ("from_boxes", tensor.shape, tuple(labels), tuple(map(key_of, holders)), True)
        return Tiling._made(core, key), PieceRows(begins, places)


def run_rewritten(
    src_shards: Mapping[str, Sequence[npt.NDArray[Any]] | ShardSource],
    before: Mapping[str, Tiling],
    after: Mapping[str, Tiling],
    dtype_from: Mapping[str, str],
    descriptors: Callable[[Any], Descriptors],
) -> dict[str, list[npt.NDArray[Any]]]:
    """Carry out the descriptors of all receivers in the memory of this process.

    Args:
        src_shards: the shards of each stored tensor, as `ModelPlan.run` takes them.
        before: the tilings of the stored tensors.
        after: the tilings of the new ones.
        dtype_from: the stored tensor whose dtype each new one has.
        descriptors: the descriptors of a holder.
    """
    memory: dict[tuple[Any, str], Any] = {}
    dtypes: dict[str, np.dtype[Any]] = {}
    for name, tiling in before.items():
        given = src_shards[name]
        shards = (
            given.shard_arrays()
            if isinstance(given, ShardSource)
            else checked_arrays(f"src_shards[{shown(name)}]", given, tiling, None)
        )
        for label, shard in zip(tiling.holders, shards, strict=True):
            dtypes[name] = shard.dtype
            memory[label, name] = np.ascontiguousarray(shard).reshape(-1).view(np.uint8)
    made: dict[str, list[npt.NDArray[Any]]] = {}
    out: dict[tuple[Any, str], Any] = {}
    for name, tiling in after.items():
        made[name] = [np.zeros(tiling.holder_shape(label), dtypes[dtype_from[name]]) for label in tiling.holders]
        for label, array in zip(tiling.holders, made[name], strict=True):
            out[label, name] = array.reshape(-1).view(np.uint8)
    transport = Transport()
    for label in dict.fromkeys(label for label, _ in out):
        part = descriptors(label)
        for row in (*part.receives.tolist(), *part.copies.tolist()):
            peer, source, target = row[:3]
            values = runs_view(transport, {source: memory[part.peers[peer], part.tensors[source]]}, row, "src")
            transport.copy(runs_view(transport, {target: out[label, part.tensors[target]]}, row, "dst"), values)
    return made
