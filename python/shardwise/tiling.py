"""Tilings: who holds which boxes of a tensor. Partitions are the commonest kind."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ._arguments import instance, int64_array, integers_of, label_positions, optional
from ._boxes import chunks_key, key_of, method_of_key, one_each, parse_holder
from ._core import PackedPartition as CorePackedPartition
from ._core import Partition as CorePartition
from ._core import Tiling as CoreTiling
from ._drawn import Drawn
from ._dtypes import bits_of, bytes_for
from ._text import counted, shown
from .errors import LayoutError, SizeOverflowError
from .piece import Piece

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Tiling"]


class Tiling(Drawn):
    """The boxes of a tensor that each holder has.

    A tiling has a shape, holders (devices, ranks, files, by any labels), and for each holder the shape of its own
    array and its pieces: boxes of the tensor, each with its place in that array. A `Partition` is a tiling; others are
    made by `from_boxes`, `grid` and `from_flat_ranges`. `plan_reshard` goes from any tiling to any other.

    Tilings are immutable, comparable, hashable and picklable. Holders without labels are numbered, or named by the
    indices of their chunks; a plan never matches them with holders of another tiling.

    >>> tiling = Tiling.from_flat_ranges((2, 3), {"rank 0": (0, 4), "rank 1": (4, 6)})
    >>> tiling.holders, tiling.holder_shape("rank 0")
    (('rank 0', 'rank 1'), (4,))
    >>> for piece in tiling.pieces("rank 0"):
    ...     print(piece)
    Piece(box=(slice(0, 1, None), slice(0, 3, None)), start=0)
    Piece(box=(slice(1, 2, None), slice(0, 1, None)), start=3)
    """

    __slots__ = ("__weakref__", "_core", "_given_labels", "_index", "_key")

    _core: CoreTiling | CorePartition | CorePackedPartition
    #: The method that made it and its arguments, in a form that can be hashed; the third entry is the labels.
    _key: tuple[Any, ...]
    _given_labels: tuple[Hashable, ...] | None
    _index: dict[Hashable, int] | None

    def __init__(self) -> None:
        raise TypeError("a Tiling is made by Tiling.from_boxes, Tiling.grid or Tiling.from_flat_ranges")

    @classmethod
    def _made(cls, core: CoreTiling, key: tuple[Any, ...]) -> Tiling:
        tiling = Tiling.__new__(Tiling)
        labels = key[2]
        tiling._core, tiling._key, tiling._given_labels, tiling._index = core, key, labels, None
        if labels is not None:
            tiling._index = label_positions("holders", labels, LayoutError)
        return tiling

    @classmethod
    def from_boxes(
        cls,
        shape: Sequence[int],
        boxes: Mapping[Any, Any] | Sequence[Any] | npt.NDArray[np.int64],
        *,
        replicas: bool = False,
        arrays: Mapping[Any, Sequence[int]] | None = None,
    ) -> Tiling:
        """Make a tiling of explicit boxes, such as the chunks of a checkpoint or what a reader asks for.

        Args:
            shape: the tensor's shape.
            boxes: for each holder its boxes: a mapping by label; or a sequence, or an int64 array (holders, dims, 2),
                with one box for each holder. A box is a sequence of slices, or of (start, stop), in elements. A holder
                with one box has an array of its shape. A holder with a list of boxes has an array of one dim, with the
                boxes one after the other, each in C order; or, if the list is of `Piece`s, one of the shape that
                `arrays` gives, with each box where its `Piece` says.
            replicas: whether holders of the identical box are replicas; otherwise that is an overlap.
            arrays: the shapes of the arrays of the holders whose boxes are given as `Piece`s.

        Raises:
            LayoutError: if a box is not within the tensor, or boxes do not fit into their array. Overlaps and
                gaps are found by `check`, and by `plan_reshard` where they matter.

        >>> chunks = Tiling.from_boxes((8, 6), {"a": [(0, 3), (0, 6)], "b": [slice(3, 8), slice(None)]})
        >>> chunks.holder_shape("b")
        (5, 6)
        >>> Tiling.from_boxes((8,), [[(0, 3)], [(4, 8)]]).check()
        Traceback (most recent call last):
        shardwise.errors.LayoutError: the boxes leave a gap: none holds [3:4]
        """
        shape = integers_of("shape", shape)
        replicas = instance("replicas", replicas, bool)
        arrays = optional("arrays", arrays, Mapping)  # type: ignore[type-abstract]
        if not isinstance(boxes, Mapping):
            if arrays:
                raise LayoutError("arrays is given, so every holder needs a label, and its boxes as Pieces")
            bounds = one_each(shape, boxes)
            core = CoreTiling.one_each(shape, bounds, len(bounds), replicas)
            content = chunks_key(core.chunks) or (bounds.tobytes(), len(bounds))
            return cls._made(core, ("from_boxes", shape, None, content, replicas))
        given = dict(arrays or {})
        holders = [parse_holder(label, value, shape, given.pop(label, None)) for label, value in boxes.items()]
        if given:
            raise LayoutError(f"arrays has a shape for {shown(next(iter(given)))}, but boxes has none for it")
        if holders and all(array is True for *_, array in holders):
            together = np.concatenate([bounds for bounds, *_ in holders])
            core = CoreTiling.one_each(shape, together, len(together), replicas)
        else:
            core = CoreTiling.boxes(shape, holders, replicas)
        content = chunks_key(core.chunks) or tuple(map(key_of, holders))
        return cls._made(core, ("from_boxes", shape, tuple(boxes), content, replicas))

    @classmethod
    def grid(
        cls,
        shape: Sequence[int],
        chunks: Sequence[int],
        holders: Sequence[Any] | None = None,
        *,
        padded: bool = False,
    ) -> Tiling:
        """Make a regular grid of chunks, each a holder: the chunks of a zarr array.

        Args:
            shape: the tensor's shape.
            chunks: the shape of a chunk; those at the far ends hold what is left.
            holders: a label for each chunk, in C order; by default they are known by their chunk indices.
            padded: whether the arrays of the chunks at the far ends have the full shape `chunks` too, as those of zarr
                do; elements beyond the tensor are ignored.

        Raises:
            LayoutError: if a chunk has no elements, or the ranks or the number of labels do not fit.

        >>> grid = Tiling.grid((10, 6), (4, 6))
        >>> grid.holders, grid.holder_shape((2, 0)), grid.pieces((2, 0))[0].box
        (((0, 0), (1, 0), (2, 0)), (2, 6), (slice(8, 10, None), slice(0, 6, None)))
        """
        shape, chunks = integers_of("shape", shape), integers_of("chunks", chunks)
        if holders is not None and not isinstance(holders, (Sequence, np.ndarray)):
            raise TypeError(f"holders must be a sequence of labels or None, got {shown(holders)}")
        core = CoreTiling.grid(shape, chunks, instance("padded", padded, bool))
        labels = None if holders is None else tuple(holders)
        if labels is not None and len(labels) != core.holders:
            raise LayoutError(
                f"holders has {counted(len(labels), 'label')} but the grid has {counted(core.holders, 'chunk')}"
            )
        return cls._made(core, ("grid", shape, labels, chunks, padded))

    @classmethod
    def from_flat_ranges(
        cls,
        shape: Sequence[int],
        ranges: Mapping[Any, tuple[int, int]] | Sequence[tuple[int, int]] | npt.NDArray[np.int64],
        *,
        replicas: bool = False,
    ) -> Tiling:
        """Make a tiling of ranges of the flattened tensor, as FSDP's flat parameters and ZeRO cut it.

        Args:
            shape: the tensor's shape.
            ranges: for each holder the range (start, stop) of elements in C order: a mapping by label, or a sequence.
                The holder's array has one dim, of that length. Each range becomes at most 2 · rank - 1 boxes.
            replicas: whether holders of the identical range are replicas; otherwise that is an overlap.

        Raises:
            LayoutError: if a range is not within the flattened tensor.

        >>> ranks = Tiling.from_flat_ranges((3, 4), [(0, 6), (6, 12)])
        >>> [piece.box for piece in ranks.pieces(1)]
        [(slice(1, 2, None), slice(2, 4, None)), (slice(2, 3, None), slice(0, 4, None))]
        """
        shape = integers_of("shape", shape)
        pairs = int64_array("ranges", list(ranges.values()) if isinstance(ranges, Mapping) else ranges)
        if pairs.size == 0:
            pairs = pairs.reshape(0, 2)
        if pairs.ndim != 2 or pairs.shape[1] != 2:
            raise LayoutError(f"ranges is of shape {pairs.shape}; it must be (holders, 2): start and stop")
        labels = tuple(ranges) if isinstance(ranges, Mapping) else None
        core = CoreTiling.flat(shape, pairs, instance("replicas", replicas, bool))
        return cls._made(core, ("from_flat_ranges", shape, labels, pairs.tobytes(), replicas))

    @property
    def core(self) -> CoreTiling | CorePartition | CorePackedPartition:
        """The compiled object; for the modules of the package only."""
        return self._core

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self._core.shape

    @property
    def size(self) -> int:
        """The number of elements of the tensor."""
        return int(np.prod([*self.shape, 1], dtype=object))

    @property
    def holders(self) -> tuple[Any, ...]:
        """The labels of the holders, in order."""
        return tuple(self.holder_label(i) for i in range(self.holder_count))

    def holder_shape(self, holder: Any) -> tuple[int, ...]:
        """Return the shape of a holder's own array.

        Raises:
            LayoutError: if there is no such holder (MeshError for a partition).

        >>> Tiling.from_boxes((8,), {"file": [[(0, 2)], [(4, 8)]]}).holder_shape("file")
        (6,)
        """
        return self.core_tiling().array_shape(self.position_of(holder))

    def pieces(self, holder: Any) -> list[Piece]:
        """Return the boxes of a holder, and where each begins in its own array.

        Raises:
            LayoutError: if there is no such holder (MeshError for a partition).

        >>> Tiling.from_boxes((8,), {"file": [[(0, 2)], [(4, 8)]]}).pieces("file")[1]
        Piece(box=(slice(4, 8, None),), start=2)
        """
        return [Piece(box, start) for box, start in self.core_tiling().pieces(self.position_of(holder))]

    def nbytes(self, dtype: npt.DTypeLike) -> npt.NDArray[np.int64]:
        """Return the bytes of each holder's own array for a dtype: int64 (holders,).

        Args:
            dtype: a dtype, or its name as numpy, ml_dtypes, PyTorch or safetensors write it.

        Raises:
            SizeOverflowError: if an array has more than 2**63 - 1 bytes.

        >>> Tiling.from_flat_ranges((3, 4), [(0, 6), (6, 12)]).nbytes("float32").tolist()
        [24, 24]
        """
        bits, elements = bits_of(dtype), self._array_sizes()
        if len(elements) and int(elements.max()) * bits > 8 * (2**63 - 1):
            raise SizeOverflowError(
                f"nbytes: {int(elements.max())} elements of {bits} bits, padding included, are over {2**63 - 1} bytes"
            )
        return bytes_for(elements, bits)

    def check(self) -> None:
        """Check that the holders hold every element of the tensor, and none twice, except as replicas.

        Raises:
            LayoutError: if an element is in no box, or in two that are not replicas; the message names a box that two
                holders hold, or that none holds.

        A partition and a grid are right by construction. The time is nearly linear in the number of boxes.

        >>> Tiling.from_boxes((4, 4), [[(0, 4), (0, 3)], [(1, 4), (3, 4)]]).check()
        Traceback (most recent call last):
        shardwise.errors.LayoutError: the boxes leave a gap: none holds [0:1, 3:4]
        """
        self.core_tiling().check()

    def core_tiling(self) -> CoreTiling:
        """Return the compiled object of a tiling that is not a partition; for the package's own modules."""
        assert isinstance(self._core, CoreTiling)
        return self._core

    @property
    def holder_count(self) -> int:
        """The number of holders."""
        return self.core_tiling().holders

    def shape_at(self, position: int) -> tuple[int, ...]:
        """Return the shape of the array of the holder of this number."""
        return self.core_tiling().array_shape(position)

    def _array_sizes(self) -> npt.NDArray[np.int64]:
        """Return the elements of each holder's own array, with its padding: int64 (holders,)."""
        return self.core_tiling().array_sizes()

    @property
    def grid_chunks(self) -> tuple[int, ...] | None:
        """The shape of a chunk of a grid; `None` for any other tiling."""
        is_grid = isinstance(self._core, CoreTiling) and self._key[0] == "grid"
        chunks: tuple[int, ...] | None = self._key[3] if is_grid else None
        return chunks

    def kind_text(self) -> str:
        """Say which sort of tiling it is, in plain words."""
        if self._key[0] == "grid":
            return f"chunks of shape {self._key[3]}"
        return "ranges of the flattened tensor" if self._key[0] == "from_flat_ranges" else "explicit boxes"

    def holder_shapes(self) -> list[tuple[int, ...]]:
        """Return the shape of every holder's own array."""
        return [self.core_tiling().array_shape(i) for i in range(self.holder_count)]

    def covered(self) -> npt.NDArray[np.bool_] | None:
        """Return for each holder whether its pieces fill its array; `None` if all do."""
        covered: npt.NDArray[np.bool_] = self.core_tiling().held_sizes() == self.core_tiling().array_sizes()
        return None if covered.all() else covered

    @property
    def has_replicas(self) -> bool:
        """True if holders of the identical box are replicas."""
        return self._key[0] != "grid" and bool(self._key[-1])

    @property
    def has_labels(self) -> bool:
        """True if the labels were given; labels that were not given mean nothing in another tiling."""
        return self._given_labels is not None

    def holder_label(self, position: int) -> Any:
        """Return the label of the holder of this number: the one given, or its chunk's index, or the number."""
        if self._given_labels is not None:
            return self._given_labels[position]
        return self._chunk(position) if self._key[0] == "grid" else position

    def _chunk(self, position: int) -> tuple[int, ...]:
        """Return the chunk index of the chunk at a position in C order."""
        index: list[int] = []
        for size, chunk in zip(reversed(self.shape), reversed(self._key[3]), strict=True):
            position, digit = divmod(position, max(-(-size // chunk), 1))
            index.append(digit)
        return tuple(reversed(index))

    def position_of(self, holder: Any) -> int:
        """Return the number of the holder of this label.

        Raises:
            LayoutError: if there is none.
        """
        if self._index is None:
            self._index = {label: i for i, label in enumerate(self.holders)}
        try:
            return self._index[holder]
        except (KeyError, TypeError):
            names = ", ".join(shown(self.holder_label(i)) for i in range(min(self.holder_count, 3)))
            more = ", …" if self.holder_count > 3 else ""
            raise LayoutError(
                f"holder {shown(holder)} is not in the tiling, which has {counted(self.holder_count, 'holder')}: "
                f"{names}{more}"
            ) from None

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is not Tiling or type(self) is not Tiling:
            return NotImplemented
        return self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        name, arguments, keywords = method_of_key(self._key)
        texts = [*map(repr, arguments), *(f"{key}={value!r}" for key, value in keywords.items())]
        return f"Tiling.{name}({', '.join(texts)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self._key,)


def _restored(key: tuple[Any, ...]) -> Tiling:
    name, arguments, keywords = method_of_key(key)
    tiling: Tiling = getattr(Tiling, name)(*arguments, **keywords)
    return tiling
