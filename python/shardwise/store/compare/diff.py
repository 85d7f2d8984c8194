"""Differences between two checkpoints, however each is cut; also after one is rewritten as a rules file says."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..._arguments import INTEGER, check_fields, optional
from ..._boxes import consecutive
from ..._text import counted, shown
from ...conversion.apply import kept_objects
from ...conversion.assembled import Assembled
from ...errors import ParseError, ShardwiseWarning
from ...pieces import Bounds, shared_box
from ...placing import Layouts
from ...rules.left_out import LeftOut, listed
from ...rules.optax import adam_counts, kinds_in_pytorch
from ...rules.pattern import NamePattern
from ...rules.rewrites import Rewrites
from ...rules.state_splits import MASTER
from ...show.names import lines_alike
from ..data.engine import check_job_memory, check_threads
from ..data.location import Location
from ..formats.open import open_checkpoint
from ..rewritten.left_out import asked_for, dropped_by_rules, rounded
from ..rewritten.names import Naming, Which, checked_which, chosen_part, names_of
from ..rewritten.view import rewritten_view
from ..tensors.checkpoint import Besides, StoredCheckpoint
from ..tensors.companion_files import beside
from ..tensors.digests import DigestProgress, tensor_digests
from ..tensors.stored import StoredTensor
from ..tensors.stored_pieces import StoredPiece, whole_box
from ..tensors.training import Total
from .values import same_values

__all__ = ["Difference", "Differences", "diff_checkpoints"]

_MEMORY = 256 * 2**20
#: The most ranges of rows that a difference lists; and the most rows of a tensor whose ranges are worked out.
_MOST_RANGES, _MOST_ROWS = 8, 2**26
#: The most values that differ of which a warning says what they are.
_MOST_SHOWN = 8


@dataclass(frozen=True)
class Difference:
    """A difference between two checkpoints.

    Attributes:
        name: The tensor's name.
        what: `"missing"` (in the first checkpoint), `"added"`, `"dtype"`, `"shape"`, `"values"`, or `"unreadable"` if
            one of them has it as a kind of tensor that cannot be read, so that nothing is known about it.
        first: The value in the first checkpoint: a dtype, a shape or a value; or the reason why it cannot be read.
        second: The value in the second checkpoint, in the same way.
        index: For values, the index of the first element that differs.
        count: For values, the number of elements that differ.
        rows: For values, up to eight ranges (start, stop) of the first dim with elements that differ.
    """

    name: str
    what: str
    first: Any = None
    second: Any = None
    index: tuple[int, ...] | None = None
    count: int | None = None
    rows: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, name=str, what=str, first=Hashable, second=Hashable)
        check_fields(self, index=(tuple, type(None)), count=(*INTEGER, type(None)), rows=tuple)

    def __str__(self) -> str:
        if self.what == "missing":
            return f"{self.name!r} is only in the second checkpoint"
        if self.what == "added":
            return f"{self.name!r} is only in the first checkpoint"
        if self.what == "unreadable":
            return f"{self.name!r} cannot be compared: {self.first or self.second}"
        if self.what == "values":
            values = f"{self.first} and {self.second}"
            ranges = ", ".join(f"{start}:{stop}" for start, stop in self.rows)
            more = " and more" if len(self.rows) == _MOST_RANGES else ""
            where = f", in the rows {ranges}{more}" if sum(stop - start for start, stop in self.rows) > 1 else ""
            count = "1 element differs" if self.count == 1 else f"{self.count} elements differ"
            return f"{self.name!r}: {count}, the first at {self.index}: {values}{where}"
        return f"{self.name!r}: {self.what} {self.first} and {self.second}"


class Differences(list[Difference]):
    """The differences of two checkpoints; equal to any list that has the same ones.

    Attributes:
        left_out: What is not compared: tensors that the rewrites drop; values that are not tensors, except equal
            numbers and texts; files next to either checkpoint that are not read; and what the call left out.
        totals: What is compared of each checkpoint: the tensors and bytes of its weights and of each kind of state.
    """

    def __init__(
        self,
        found: Iterable[Difference] = (),
        left_out: Iterable[LeftOut] = (),
        totals: tuple[tuple[Total, ...], tuple[Total, ...]] = ((), ()),
    ) -> None:
        super().__init__(found)
        self.left_out = tuple(left_out)
        self.totals = totals

    @property
    def one_sided(self) -> str:
        """Return a sentence if only one of the checkpoints has a training state; else an empty text."""
        counts = [sum(total.tensors for total in totals[1:]) for totals in self.totals]
        if all(counts) or not any(counts):
            return ""
        has, lacks = ("first", "second") if counts[0] else ("second", "first")
        return f"the {lacks} has no training state; the {has} has {counted(max(counts), 'tensor')} of it"


def diff_checkpoints(
    first: str | os.PathLike[str] | Location,
    second: str | os.PathLike[str] | Location,
    *,
    layouts: Layouts | None = None,
    rewrites: Rewrites | None = None,
    drop: str | None = None,
    which: Which = "all",
    memory: int = _MEMORY,
    threads: int | None = None,
    progress: DigestProgress | None = None,
) -> Differences:
    """List the tensors in which two checkpoints differ, however each is cut; none if they are the same.

    Args:
        first: A checkpoint of any format, also by URL.
        second: Another checkpoint.
        layouts: The cuts of the first checkpoint's tensors, if it is bare files of ranks, as for `open_checkpoint`.
        rewrites: Rewrites of the first before it is compared, as for `reshard_checkpoint`; nothing is written. This
            checks a conversion that another tool has made.
        drop: A regular expression: tensors and values of either checkpoint are not compared if it is found in their
            names, as they are before `rewrites`.
        which: `"weights"` compares the weights alone, `"state"` all else: moments, master copies, steps.
        memory: Bytes for the buffers of all threads.
        threads: The number of threads; one per core if left out.
        progress: Called now and then with the bytes done and the bytes in all, of the first, then of the second.

    Warns:
        ShardwiseWarning: for everything that is not compared, unless `drop` leaves it out.

    Returns:
        The differences, by name: tensors that one lacks, different dtypes or shapes, and the first different value.
        Values are compared as bytes: -0.0 is not 0.0, and the bits of a NaN count. `left_out` of the
        result is what was not compared.

    Raises:
        LayoutError: as for `verify_checkpoint`; if a rewrite does not apply, or either has nothing of `which`.
        ParseError, OSError: as for `open_checkpoint`.

    If both have a training state, weights are matched by parameter, and states by weight and kind, whatever the two
    formats call them: Adam's `mu` in optax is `exp_avg` in PyTorch, and its one `count` is compared with the `step` of
    each parameter that it counts for. If only one has master copies of weights, these are compared with the weights of
    the other. Tensors that both have, with the same dtype and shape, are digested where they are, so neither checkpoint
    is merged. Only those whose digests differ are read again.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from shardwise import save_checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name, last in (("a", 3), ("b", 4)):
    ...         _ = save_checkpoint(Path(folder, f"{name}.safetensors"), {"w": np.array([1, 2, last])})
    ...     print(*diff_checkpoints(Path(folder, "a.safetensors"), Path(folder, "b.safetensors")))
    'w': 1 element differs, the first at (2,): 3 and 4
    """
    check_job_memory(memory)
    check_threads(threads)
    optional("rewrites", rewrites, Rewrites)
    optional("drop", drop, str)
    checked_which(which)
    unwanted = None if drop is None else NamePattern("drop", drop)
    with open_checkpoint(first, layouts=layouts) as opened, open_checkpoint(second) as other_opened:
        dropped: dict[str, Assembled] = {}
        (stored, asked), (there, also) = chosen_part(opened, which), chosen_part(other_opened, which)
        one, other = _without(stored, unwanted), _without(there, unwanted)
        one = rewritten_view(one, Naming(rewrites=rewrites), dropped) if rewrites else one
        (one, other), replaced = _unrounded((one, other))
        one, other = _with_steps(one, other)
        other = _paired(one, other)
        left_out = _not_compared(stored, there, unwanted)
        left_out += (*asked, *also, *replaced)
        if rewrites:
            lost = [name for name in stored.unreadable if not kept_objects([name], rewrites)]
            left_out += dropped_by_rules(dropped, lost, names_of(stored))
        for lacking in left_out:
            if lacking.kind != "asked":
                warnings.warn(str(lacking), ShardwiseWarning, stacklevel=2)
        # Tensors that only one of them has, or with another dtype or shape, differ whatever their bytes are.
        alike = [
            name
            for name, tensor in one.items()
            if name in other and (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape)
        ]
        digests = [
            tensor_digests(checkpoint, alike, memory=memory, threads=threads, progress=progress)
            for checkpoint in (one, other)
        ]
        for each in (one, other):
            for tensor in each.values():
                tensor.check_decodable(memory)
        differences = Differences(left_out=left_out, totals=(one.training.totals, other.training.totals))
        for name in sorted({*one, *other, *one.unreadable, *other.unreadable}):
            if name in one.unreadable or name in other.unreadable:
                reasons = one.unreadable.get(name), other.unreadable.get(name)
                differences.append(Difference(name, "unreadable", *reasons))
            elif name not in one or name not in other:
                differences.append(Difference(name, "added" if name in one else "missing"))
            elif one[name].dtype != other[name].dtype:
                differences.append(Difference(name, "dtype", one[name].dtype, other[name].dtype))
            elif one[name].shape != other[name].shape:
                differences.append(Difference(name, "shape", one[name].shape, other[name].shape))
            elif digests[0][name] != digests[1][name]:
                values = _packed_values if one[name].bits % 8 else _values
                differences.append(values(name, one[name], other[name], memory))
        return differences


def _without(checkpoint: StoredCheckpoint, unwanted: NamePattern | None) -> StoredCheckpoint:
    """Return a view of an open checkpoint without the names that are not compared; the view has no files to close."""
    if unwanted is None:
        return checkpoint
    kept = {name: tensor for name, tensor in checkpoint.items() if not unwanted.is_found(name)}
    unreadable = {name: why for name, why in checkpoint.unreadable.items() if not unwanted.is_found(name)}
    return checkpoint.with_tensors(kept, Besides(unreadable=unreadable))


def _unrounded(both: tuple[StoredCheckpoint, StoredCheckpoint]) -> tuple[list[StoredCheckpoint], list[LeftOut]]:
    """Return two checkpoints after replacing weights by master copies in one, if only that one has them."""
    masters = [_masters(each) for each in both]
    made, left_out = list(both), list[LeftOut]()
    if bool(masters[0]) == bool(masters[1]) or not all(each.training.is_there for each in both):
        return made, left_out
    at = 0 if masters[0] else 1
    (one, own), copies = (both[at], masters[at]), set(masters[at].values())
    tensors = {
        name: one[own.get(name, own.get(tensor.alias_of or name, name))]
        for name, tensor in one.items()
        if name not in copies
    }
    replaced = {name: one[name].nbytes for name, tensor in tensors.items() if tensor.dtype != one[name].dtype}
    made[at] = one.with_tensors(tensors, Besides(unreadable=one.unreadable))
    return made, rounded(replaced, "not compared, but their master copies are")


def _masters(checkpoint: StoredCheckpoint) -> dict[str, str]:
    """Return the master copies of weights that have the weight's shape, by the weight's name."""
    states = checkpoint.training.names.states.items()
    return {
        state.weight: name
        for name, state in states
        if state.kind == MASTER
        and state.weight is not None
        and checkpoint[state.weight].shape == checkpoint[name].shape
    }


def _with_steps(one: StoredCheckpoint, other: StoredCheckpoint) -> tuple[StoredCheckpoint, StoredCheckpoint]:
    """Return two checkpoints after replacing optax's one count by a step for each parameter, if the other has steps."""
    counts = adam_counts(one)
    if not counts:
        if adam_counts(other):
            other, one = _with_steps(other, one)
        return one, other
    states = other.training.names.states.items()
    theirs = {state.parameter: other[name] for name, state in states if state.kind == "step"}
    if adam_counts(other) or not theirs:
        return one, other
    tensors = {name: tensor for name, tensor in one.items() if name not in counts.values()}
    for name, count in counts.items():
        number, step = one.read(count), theirs.get(name.partition("step.")[2])
        dtype = one[count].known_dtype if step is None else step.known_dtype
        fill = number.astype(dtype.name)
        if number.shape != () or fill != number:  # Floats have no such number of steps.
            dtype, fill = one[count].known_dtype, number
        piece = StoredPiece(whole_box(number.shape), one.path, fill=fill)
        tensors[name] = StoredTensor(name, dtype, number.shape, (piece,))
    return one.with_tensors(tensors, Besides(unreadable=one.unreadable)), other


def _paired(one: StoredCheckpoint, other: StoredCheckpoint) -> StoredCheckpoint:
    """Return the second checkpoint, with the first's names for the same parameters and for their states by kind."""
    if not (one.training.is_there and other.training.is_there):
        return other
    weights = {
        name: one.training.names.weights[parameter]
        for parameter, name in other.training.names.weights.items()
        if parameter in one.training.names.weights
    }
    mine, theirs = (kinds_in_pytorch(each.training.names) for each in (one, other))
    known = {(state.weight, mine.get(name, state.kind)): name for name, state in one.training.names.states.items()}
    names = {name: weight for name, weight in weights.items() if name not in one}
    for name, state in other.training.names.states.items():
        weight = state.weight and weights.get(state.weight, state.weight)
        kind = theirs.get(name, state.kind)
        if weight is not None and name not in one and (weight, kind) in known:
            names[name] = known[weight, kind]
    taken = set(names.values())
    if not names or len(taken) < len(names) or any(name in other for name in taken):
        return other
    tensors = {names.get(name, name): tensor for name, tensor in other.items()}
    return other.with_tensors(tensors, Besides(unreadable=other.unreadable))


def _not_compared(one: StoredCheckpoint, other: StoredCheckpoint, unwanted: NamePattern | None) -> list[LeftOut]:
    """List all things in two checkpoints that are not compared, each with the path of its checkpoint."""
    alike, unlike = same_values(one.objects, other.objects)
    differing = {name: text for name, text in unlike.items() if unwanted is None or not unwanted.is_found(name)}
    found: list[LeftOut] = []
    if differing:
        count = f"{len(differing)} values differ" if len(differing) > 1 else "1 value differs"
        which = "; ".join(lines_alike(((name, f" is {text}") for name, text in differing.items()), _MOST_SHOWN))
        found.append(LeftOut("values", tuple(differing), f"{count}, which diff does not count as tensors: {which}"))
    sizes: dict[str, int] = {}
    values: list[str] = []
    for checkpoint in (one, other):
        known = alike | unlike.keys()
        own = [n for n in checkpoint.objects if n not in known and (unwanted is None or not unwanted.is_found(n))]
        if own:
            count, which = listed(own, "value")
            what = "it is not a tensor" if len(own) == 1 else "they are not tensors"
            text = f"{checkpoint.path}: {count} not compared, because {what}: {which}"
            found.append(LeftOut("values", tuple(own), text))
        if unwanted is not None:
            sizes |= {name: each.nbytes for name, each in checkpoint.items() if unwanted.is_found(name)}
            values += [name for name in (*checkpoint.objects, *checkpoint.unreadable) if unwanted.is_found(name)]
        found += beside(checkpoint, unwanted)
    return [*found, *asked_for(sizes, dict.fromkeys(values))]


def _values(name: str, one: StoredTensor, other: StoredTensor, memory: int) -> Difference:
    """Return the difference in the values of a tensor: the first such element, their number and their rows."""
    # The blocks are those of the chunks of the tensor that must be decoded, so that each is decoded once.
    is_turned = one.is_addressable and not other.is_addressable
    count = 0
    rows = np.zeros(one.shape[0] if len(one.shape) > 1 and one.shape[0] <= _MOST_ROWS else 0, np.bool_)
    found: tuple[tuple[int, ...], Any, Any] | None = None
    for box, left, right in _blocks(other, one, memory) if is_turned else _blocks(one, other, memory):
        times = 1
        if not any((*left.strides, *right.strides)):  # One element stands for all, of which there may be any number.
            times, first_of_each = math.prod(left.shape), (slice(0, 1),) * left.ndim
            left, right = left[first_of_each], right[first_of_each]
        bits = [np.ascontiguousarray(part).view(np.uint8).reshape(*part.shape, part.itemsize) for part in (left, right)]
        differs = (bits[0] != bits[1]).any(axis=-1)
        count += int(np.count_nonzero(differs)) * times
        if len(rows):
            own = differs.reshape(len(differs), -1).any(axis=1)
            rows[slice(*box[0])] |= own if len(own) == box[0][1] - box[0][0] else bool(own.any())
        if differs.any():
            at = tuple(int(i) for i in np.argwhere(differs)[0])
            index = tuple(start + i for (start, _), i in zip(box, at, strict=True))
            if found is None or index < found[0]:
                found = index, left[at], right[at]
    if found is None:
        raise _changed(name)
    first, second = (found[2], found[1]) if is_turned else found[1:]
    edges = np.flatnonzero(np.diff(rows, prepend=False, append=False)).reshape(-1, 2)[:_MOST_RANGES].tolist()
    return Difference(name, "values", first, second, found[0], count, tuple((start, stop) for start, stop in edges))


def _blocks(one: StoredTensor, other: StoredTensor, memory: int) -> Iterator[tuple[Bounds, Any, Any]]:
    """Yield boxes of a tensor, with its elements and another's; where neither is stored, one element stands for all."""
    for piece in one.pieces:
        if piece.fill is None:
            for box, values in one.decoded_piece(piece, memory // 2, filled=True):
                yield box, np.asarray(values), other.read(tuple(slice(*side) for side in box), memory=memory)
            continue
        for position in other.overlapping(piece.bounds):
            there = other.pieces[position]
            common = shared_box(piece.bounds, there.bounds)
            sizes = tuple(stop - start for start, stop in common)
            most = math.prod(sizes) if there.fill is not None else max(memory // (4 * piece.fill.itemsize), 1)
            for part in consecutive(sizes, most) if 0 not in sizes else ():
                box = tuple((at + side.start, at + side.stop) for (at, _), side in zip(common, part, strict=True))
                extents = [stop - start for start, stop in box]
                right = (
                    np.broadcast_to(there.fill, extents)
                    if there.fill is not None
                    else other.read(tuple(slice(*side) for side in box), memory=memory)
                )
                yield box, np.broadcast_to(piece.fill, extents), right


def _packed_values(name: str, one: StoredTensor, other: StoredTensor, memory: int) -> Difference:
    """Do as `_values` for packed elements, several to a byte, the first in the lowest bits; values are integers."""
    count = 0
    found: tuple[tuple[int, ...], int, int] | None = None
    # 24 bits hold whole elements of 4 bits and of 6. Both have one shape, so that their bytes do too.
    first, second = one.packed_bytes(), other.packed_bytes()
    position = 0
    for part in consecutive(first.shape, 3 * max(1, memory // 128)):
        both = [np.unpackbits(each.read(part).reshape(-1), bitorder="little") for each in (first, second)]
        left, right = (bits.reshape(-1, one.bits) for bits in both)
        differs = (left != right).any(axis=1)
        count += int(np.count_nonzero(differs))
        if found is None and differs.any():
            at = int(differs.argmax())
            index = tuple(map(int, np.unravel_index(position * 8 // one.bits + at, one.shape)))
            values = [int(np.packbits(bits[at], bitorder="little")[0]) for bits in (left, right)]
            found = index, values[0], values[1]
        position += math.prod(side.stop - side.start for side in part)
    if found is None:
        raise _changed(name)
    return Difference(name, "values", found[1], found[2], found[0], count)


def _changed(name: str) -> ParseError:
    return ParseError(f"tensor {shown(name)}: the digests differ but the values do not: a file changed meanwhile")
