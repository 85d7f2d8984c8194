"""The parts of tensors that ranks hold in files of `torch.save`: DTensors, ShardedTensors, and plain tensors.

The pickle of a DTensor has everything needed: the shape of the whole tensor, the mesh, the placements and the rank's
own coordinate. That of a ShardedTensor has the boxes themselves. A plain tensor is one that every rank has: one copy is
the tensor, the others are its replicas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ...._dtypes import Dtype
from ...._strided import strided_pieces
from ...._text import shown
from ....errors import ParseError
from ....pieces import Bounds
from ...data.location import Location
from ...data.text import checked_shape
from ...tensors.coverage import tile
from ...tensors.flat import flat_boxes
from ...tensors.stored import StoredTensor
from ...tensors.stored_pieces import ListedPieces, StoredPiece
from .pickles import Record, dtype_of_global, state_of, torch_sizes
from .placed_states import Sharding, Shards, shard_box, sharded_state, state_error, stated_sharding
from .tensors import Container, SavedTensor

__all__ = ["FlatRange", "Gathered", "RankPart", "of_ranges", "tied_tensors"]

#: The number of first bytes of each rank's part that are compared to find tied tensors.
_COMPARED = 1 << 20


class RankPart(NamedTuple):
    """A range of one rank's tensor, and the box of the whole tensor that it covers."""

    container: Container
    tensor: SavedTensor
    local: tuple[int, ...]
    box: Bounds


def _begin(name: str, part: RankPart) -> bytes:
    """Return the first bytes of a rank's part."""
    file, start, _ = part.container.extent(part.tensor, name)
    nbytes = math.prod(part.tensor.shape) * part.tensor.dtype.bits // 8
    return file.read(start, min(nbytes, _COMPARED))


class FlatRange(NamedTuple):
    """A range of a flattened tensor in a rank's array.

    Attributes:
        container: The file that has the array.
        array: The array, of one dim.
        at: The range's first element in the array.
        start: The range's first element in the flattened tensor.
        stop: The element after its last in the flattened tensor.
    """

    container: Container
    array: SavedTensor
    at: int
    start: int
    stop: int


class Gathered:
    """The parts of all ranks under one name.

    Attributes:
        sharding: The way in which the whole tensor is cut; `None` if it is not.
        plain: A rank's tensor, if every rank has all of it.
        places: For a DTensor, by rank in the order of `add`, the number of its shard and of all shards; `None` for a
            rank that is not on the mesh.
        first: The file of the first part; empty before the first `add`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.sharding: Sharding | Shards | None = None
        self.plain: SavedTensor | None = None
        self.parts: list[RankPart] = []
        self.places: list[tuple[int, int] | None] = []
        self.first = ""
        self._added: set[int] = set()

    @property
    def is_sharded(self) -> bool:
        """True if the whole tensor is cut."""
        return self.sharding is not None

    @property
    def mesh(self) -> tuple[int, ...] | None:
        """The shape of the mesh of a DTensor."""
        return self.sharding.mesh if isinstance(self.sharding, Sharding) else None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.parts[0].tensor.shape if self.sharding is None else self.sharding.shape

    @property
    def dtype(self) -> Dtype:
        """The dtype of the tensor."""
        return self.parts[0].tensor.dtype if self.sharding is None else self.sharding.dtype

    def storages(self) -> tuple[Any, ...]:
        """Return the places of the elements, which are equal for two names of tied tensors."""
        return tuple((id(part.container), part.tensor, part.local, part.box) for part in self.parts)

    def add(self, container: Container, value: Any, world: int, *, padded: bool = False, is_cut: bool = False) -> bool:
        """Add a rank's value of this name; return False if it is not a tensor.

        Args:
            container: The rank's file.
            value: The rank's value.
            world: The number of ranks.
            padded: Whether the parts of DTensors may be padded.
            is_cut: Whether a plain tensor of one dim may be a part of an unknown whole: see `flat_units`.
        """
        where, name = container.file.path, self.name
        kind, state = sharded_state(value)
        if not kind:
            plain = container.tensor(value, name)
            if plain is None:
                return False
            self.add_plain(container, plain, is_cut)
        else:
            sharding: Sharding | Shards
            if kind == "DTensor":
                sharding, parts, place = _read_dtensor(state, container, name, world, padded)
                self.places.append(place)
            else:
                sharding, parts = _read_shards(state, container, name, world)
            if self.plain is not None or (self.sharding is not None and self.sharding != sharding):
                raise ParseError(f"{where}: tensor {shown(name)} is not sharded as in {self.first}")
            self.sharding = sharding
            self.parts.extend(parts)
        self.first = self.first or where.name
        self._added.add(id(container))
        return True

    def check_ranks(self, containers: Sequence[Container]) -> None:
        """Refuse a cut tensor that is missing in a rank's file; even a part without elements is in the file."""
        lacking = next((each for each in containers if id(each) not in self._added), None)
        if lacking is not None and self.sharding is not None:
            raise ParseError(f"{lacking.file.path}: has no part of {shown(self.name)}, which {self.first} has")

    def add_plain(self, container: Container, plain: SavedTensor, is_cut: bool = False) -> None:
        """Add a rank's tensor that is not cut; see `add`."""
        held = self.plain
        is_other = held is not None and (held.shape, held.dtype) != (plain.shape, plain.dtype)
        if self.sharding is not None or (is_other and not (is_cut and len(plain.shape) == 1)):
            raise ParseError(
                f"{container.file.path}: tensor {shown(self.name)} is plain, {plain.dtype.name} of shape "
                f"{plain.shape}, unlike in {self.first}"
            )
        self.plain = plain
        whole = tuple((0, size) for size in plain.shape)
        self.parts.append(RankPart(container, plain, (0,) * len(plain.shape), whole))

    def add_array(self, container: Container, array: SavedTensor, sharding: Sharding, at: int | None) -> None:
        """Add a rank's array of a tensor that is cut in this way.

        Args:
            container: The rank's file.
            array: The rank's array.
            sharding: The way in which the tensor is cut.
            at: The rank's position on the mesh; `None` if it is not on it.
        """
        where = container.file.path
        if array.dtype != sharding.dtype:
            raise ParseError(
                f"{where}: tensor {shown(self.name)} is {array.dtype.name}, but the index says {sharding.dtype.name}"
            )
        if at is not None and all(kind == "Replicate" for kind, _, _ in sharding.placements):
            if array.shape != sharding.shape:
                raise ParseError(
                    f"{where}: tensor {shown(self.name)} is of shape {array.shape}, but the index says {sharding.shape}"
                )
            self.add_plain(container, array)
        elif at is not None:
            self.sharding = sharding
            coordinate = tuple(map(int, np.unravel_index(at, sharding.mesh)))
            self.parts.extend(_parts(sharding, coordinate, container, array, self.name, False))
        self.first = self.first or where.name
        self._added.add(id(container))

    def is_same(self, other: Gathered) -> bool:
        """Return whether two tensors that are cut alike begin with the same bytes on all ranks."""
        if [part.box for part in self.parts] != [part.box for part in other.parts] or self.dtype != other.dtype:
            return False
        pairs = zip(self.parts, other.parts, strict=True)
        return all(_begin(self.name, one) == _begin(other.name, its) for one, its in pairs)

    def is_replicated(self) -> bool:
        """Return whether all ranks' copies of a plain tensor begin with the same bytes."""
        first = self.parts[0]
        if any(part.tensor.shape != first.tensor.shape for part in self.parts):
            return False
        begin = _begin(self.name, first)
        return all(_begin(self.name, part) == begin for part in self.parts)

    def tensor(self, path: Location, *, alias_of: str | None = None) -> StoredTensor:
        """Return the whole tensor.

        Raises:
            ParseError: if its parts leave a gap, or overlap without being equal.
        """
        shape, parts = self.shape, self.parts
        boxes = np.array([part.box for part in parts], np.int64).reshape(len(parts), len(shape), 2)
        kept, again = tile(self.name, shape, boxes, lambda at: parts[at].container.file.path.name, path)
        pieces = ListedPieces(boxes[kept], partial(_piece, self.name, [parts[at] for at in kept]))
        replicas = ListedPieces(boxes[again], partial(_piece, self.name, [parts[at] for at in again]))
        return StoredTensor(self.name, self.dtype, shape, pieces, replicas=replicas, alias_of=alias_of)


def _read_shards(value: Any, container: Container, name: str, world: int) -> tuple[Shards, list[RankPart]]:
    """Return the boxes of a ShardedTensor, and the boxes that the rank has."""
    state = value if isinstance(value, tuple) and len(value) >= 2 else ((), None)
    meta = state_of(state[1], "ShardedTensorMetadata")
    listed = None if meta is None else meta.get("shards_metadata")
    properties = None if meta is None else meta.get("tensor_properties")
    kept = properties.state if isinstance(properties, Record) else None
    dtype = dtype_of_global(kept[0] if isinstance(kept, tuple) and kept else (state_of(properties) or {}).get("dtype"))
    if meta is None or not isinstance(listed, list) or not isinstance(state[0], list):
        raise state_error(container, name, "a ShardedTensor without the list of its shards")
    if dtype is None:
        raise state_error(container, name, "a ShardedTensor of an unsupported dtype")
    shape = checked_shape(torch_sizes(meta.get("size")), dtype.bits, name, container.file.path)
    if len(listed) > world:
        raise state_error(container, name, f"a ShardedTensor of {len(listed)} shards, which must be at most {world}")
    boxes = tuple(shard_box(shard, len(shape)) for shard in listed)
    if None in boxes:
        raise state_error(
            container,
            name,
            "a ShardedTensor with a shard that has no offsets and sizes, or not one for each dim",
        )
    shards = Shards(shape, dtype, tuple(box for box in boxes if box is not None))
    parts = []
    for shard in state[0]:
        held = state_of(shard, "Shard") or {}
        box, local = shard_box(held.get("metadata"), len(shape)), container.tensor(held.get("tensor"), name)
        if box is None or local is None or box not in shards.boxes:
            raise state_error(container, name, "a ShardedTensor with a shard that it does not list")
        sizes = tuple(stop - start for start, stop in box)
        if (local.shape, local.dtype) != (sizes, dtype):
            raise state_error(
                container,
                name,
                f"its shard is {dtype.name} of shape {sizes}, but its local tensor is {local.dtype.name} of shape "
                f"{local.shape}",
            )
        parts.append(RankPart(container, local, (0,) * len(shape), box))
    return shards, parts


def _read_dtensor(
    state: dict[str, Any], container: Container, name: str, world: int, padded: bool
) -> tuple[Sharding, list[RankPart], tuple[int, int] | None]:
    """Return the sharding of a DTensor, the boxes that the rank has, and the number of its shard and of all shards."""
    sharding, at = stated_sharding(state, container, name, world)
    if at is None:
        return sharding, [], None
    local = container.tensor(state.get("_local_tensor"), name)
    if local is None:
        raise state_error(container, name, "a DTensor without its local tensor")
    if local.dtype != sharding.dtype:
        raise state_error(
            container, name, f"a DTensor of {sharding.dtype.name} with a local tensor of {local.dtype.name}"
        )
    cutting = [axis for axis, (kind, _, _) in enumerate(sharding.placements) if kind != "Replicate"]
    index = 0
    for axis in cutting:
        index = index * sharding.mesh[axis] + at[axis]
    count = math.prod(sharding.mesh[axis] for axis in cutting)
    return sharding, _parts(sharding, at, container, local, name, padded), (index, count)


def _length(ranges: list[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in ranges)


@lru_cache(4096)
def _cuts(size: int, cuts: tuple[tuple[int, int], ...]) -> list[list[tuple[int, int]]]:
    return strided_pieces(size, cuts)


def _parts(
    sharding: Sharding, coordinate: tuple[int, ...], container: Container, local: SavedTensor, name: str, padded: bool
) -> list[RankPart]:
    """Return the boxes that make up a rank's tensor, each with its start in that tensor."""
    ranges, longest = [], []
    for dim, size in enumerate(sharding.shape):
        index, cuts = 0, []
        for axis in sharding.order[dim]:
            cuts.append((sharding.mesh[axis], sharding.placements[axis][2]))
            index = index * sharding.mesh[axis] + coordinate[axis]
        pieces = _cuts(size, tuple(cuts)) if cuts else [[(0, size)]]
        ranges.append(pieces[index])
        longest.append(max(map(_length, pieces)))
    expected = tuple(map(_length, ranges))
    # Of several ranges in one dim, nothing says whether each is padded.
    is_padded = local.shape == tuple(longest) and all(len(held) <= 1 for held in ranges)
    if local.shape != expected and not (padded and is_padded):
        way = (
            "; it is as long as the longest on any rank: if the rest is padding, open_checkpoint(..., padded=True) "
            "and reshard_checkpoint(..., padded=True) read the beginning"
        )
        raise ParseError(
            f"{container.file.path}: tensor {shown(name)}: its placements give this rank {expected} "
            f"of {sharding.shape}, but its local tensor is {local.shape}{way if is_padded else ''}"
        )
    sides = []
    for held in ranges:
        at, side = 0, []
        for start, stop in held:
            side.append((at, (start, stop)))
            at += stop - start
        sides.append(side)
    return [
        RankPart(container, local, tuple(at for at, _ in cell), tuple(bounds for _, bounds in cell))
        for cell in product(*sides)
    ]


def _piece(name: str, parts: list[RankPart], position: int, box: Bounds) -> StoredPiece:
    part = parts[position]
    return part.container.piece(part.tensor, name, box, part.local)


def _piece_of(container: Container, array: SavedTensor, at: int, shape: tuple[int, ...], box: Bounds) -> RankPart:
    """Return a box of a tensor that is stored in C order in a flat array, beginning at element `at` of the array."""
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    sizes = tuple(stop - start for start, stop in box)
    return RankPart(
        container, array._replace(shape=sizes, strides=strides, offset=array.offset + at), (0,) * len(box), box
    )


def of_ranges(name: str, shape: tuple[int, ...], dtype: Dtype, ranges: list[FlatRange]) -> Gathered:
    """Return a tensor whose flattened elements are ranges of the ranks' arrays."""
    held = Gathered(name)
    held.sharding = Shards(shape, dtype, ())
    found = flat_boxes(shape, [(one.start, one.stop) for one in ranges])
    rows = zip(found.boxes.tolist(), found.ranges.tolist(), found.begins.tolist(), strict=True)
    for sides, number, begin in rows:
        one = ranges[number]
        box = tuple((low, high) for low, high in sides)
        held.parts.append(_piece_of(one.container, one.array, one.at + begin, shape, box))
    return held


def tied_tensors(path: Location, gathered: dict[str, Gathered]) -> dict[str, StoredTensor]:
    """Return the tensors; one that has the same storages as another on every rank is tied to it."""
    owners: dict[Any, str] = {}
    tensors = {}
    for name, held in gathered.items():
        owner = owners.setdefault(held.storages(), name) if held.shape and 0 not in held.shape else name
        tensors[name] = held.tensor(path, alias_of=None if owner == name else owner)
    return tensors
