"""Partitions: a layout applied to a shape, and everything that follows from it by arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ._arguments import instance
from ._core import PackedPartition as CorePackedPartition
from ._core import Partition as CorePartition
from ._dtypes import bits_of
from ._fork import importing
from .errors import LayoutError, SizeOverflowError
from .piece import Piece
from .tiling import Tiling

if TYPE_CHECKING:
    import numpy.typing as npt

    from .layout import TensorLayout, UnevenRule
    from .mesh import DeviceMesh

__all__ = ["Partition"]

#: The most devices for which one call each is faster than arithmetic on an array of all.
_FEW = 16

#: The number of devices listed in one call, which does not look at signals.
_AT_ONCE = 1 << 16


class Partition(Tiling):
    """The shards of a tensor, their bounds and their holders: the tiling that a layout makes of a shape.

    Args:
        layout: a layout with a mesh.
        uneven: how a dim that does not divide is cut; see `TensorLayout.partition`, which makes partitions.

    Raises:
        LayoutError: if shape and layout do not fit together.
        SizeOverflowError: if the tensor has more than 2**63 - 1 elements.

    Devices are named by their labels in the mesh; where those are the default ones, `"cpu:0"`, `"cpu:1"`, …, the device
    index also works. Arrays over all devices are in device-index order. Making a partition, and asking it for one
    device, costs O(rank) for a mesh of any size. A partition is immutable, hashable and picklable.

    Methods that take a device raise `MeshError` if the mesh has no such device; those that take the number of a shard,
    `IndexError`.

    >>> from shardwise import DeviceMesh, TensorLayout
    >>> mesh = DeviceMesh((2, 4), ("data", "model"))
    >>> partition = TensorLayout(("data", "model"), mesh).partition((6, 8))
    >>> partition.box("cpu:5")
    (slice(3, 6, None), slice(2, 4, None))
    >>> partition.locate(27)  # row 3, column 3: shard 5, its row 0, column 1
    (5, 1)

    Where the layout has packed dims (`is_packed`), a device may hold several pieces, which `pieces` gives; its array
    has them one after the other. Different shards may then hold the same elements: `locate` gives the first of them.
    """

    __slots__ = ("_few_shapes", "_layout", "_mesh", "_uneven")

    _core: CorePartition | CorePackedPartition
    _layout: TensorLayout
    _mesh: DeviceMesh
    _uneven: UnevenRule
    _few_shapes: list[tuple[int, ...]] | None

    def __init__(self, layout: TensorLayout, shape: Sequence[int], uneven: UnevenRule = "even") -> None:
        try:
            bound, mesh = layout.core, layout.require_mesh("a partition")
        except AttributeError:
            raise TypeError(f"layout must be a TensorLayout, got {type(layout).__name__}") from None
        assert bound is not None
        if type(uneven) is not str:
            instance("uneven", uneven, str)
        try:
            self._core = (CorePackedPartition if layout.is_packed else CorePartition)(bound, shape, uneven)
        except LayoutError as error:
            with importing:
                from .packed import PackedDim  # Late, as most layouts have none: `import shardwise` is fast.

            said = "".join(dict.fromkeys(spec.sizes_text() for spec in layout.axes if isinstance(spec, PackedDim)))
            if said:
                raise type(error)(f"{error}{said}") from None
            raise
        self._layout = layout
        self._mesh = mesh
        self._uneven = uneven
        self._few_shapes = None

    @property
    def core(self) -> CorePartition | CorePackedPartition:
        """The compiled object; for the modules of the package only."""
        return self._core

    @property
    def layout(self) -> TensorLayout:
        """The layout."""
        return self._layout

    @property
    def device_mesh(self) -> DeviceMesh:
        """The layout's mesh."""
        return self._mesh

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self._core.shape

    @property
    def uneven(self) -> UnevenRule:
        """The rule by which dims that do not divide are cut."""
        return self._uneven

    @property
    def size(self) -> int:
        """The number of elements of the tensor."""
        return self._core.size

    @property
    def is_packed(self) -> bool:
        """True if a dim is packed, so that a device may hold several pieces; see `shardwise.packed`."""
        return isinstance(self._core, CorePackedPartition)

    @property
    def num_shards(self) -> tuple[int, ...]:
        """The number of shards along each dim.

        >>> from shardwise import DeviceMesh, TensorLayout
        >>> TensorLayout(("x", None), DeviceMesh((2, 3), ("x", "y"))).partition((4, 4)).num_shards
        (2, 1)
        """
        return self._layout.num_shards

    @property
    def total_shards(self) -> int:
        """The number of different shards: the product of `num_shards`."""
        return self._core.total_shards

    @property
    def replicas(self) -> int:
        """The number of devices that hold each shard."""
        return self._core.replicas

    def box(self, device: Any) -> tuple[slice, ...]:
        """Return the slices of the tensor that `device` holds, one per dim; `array[box]` is its shard.

        Raises:
            LayoutError: if the device holds several pieces, because a dim is packed; `pieces` gives them.

        An empty shard starts and stops at the end of the dim. For a shard given by its number, see `shard_box`.

        >>> from shardwise import DeviceMesh, TensorLayout
        >>> partition = TensorLayout(("x",), DeviceMesh((4,), ("x",))).partition((9,), uneven="ceil")
        >>> partition.box("cpu:2"), partition.box("cpu:3")
        ((slice(6, 9, None),), (slice(9, 9, None),))
        """
        return self._core.box(self._mesh.index_of_label(device))

    def shard_box(self, shard_id: int) -> tuple[slice, ...]:
        """Return the slices of the tensor that the shard with this number covers, whichever devices hold it.

        >>> from shardwise import DeviceMesh, TensorLayout
        >>> TensorLayout(("y",), DeviceMesh((2, 3), ("x", "y"))).partition((9,)).shard_box(1)
        (slice(3, 6, None),)
        """
        return self._core.shard_box(shard_id)

    def shard_shape(self, device: Any) -> tuple[int, ...]:
        """Return the shape of the shard that `device` holds.

        >>> from shardwise import DeviceMesh, TensorLayout
        >>> TensorLayout((None, "x"), DeviceMesh((2,), ("x",))).partition((3, 8)).shard_shape("cpu:1")
        (3, 4)
        """
        return self._core.shard_shape(self._mesh.index_of_label(device))

    @property
    def largest_shard_shape(self) -> tuple[int, ...]:
        """The largest extent that a shard has along each dim; costs O(rank) for a mesh of any size.

        >>> from shardwise import DeviceMesh, TensorLayout
        >>> TensorLayout(("x",), DeviceMesh((4,), ("x",))).partition((10,), "floor").largest_shard_shape
        (3,)
        """
        return self._core.largest_shard_shape

    def boxes(self) -> npt.NDArray[np.int64]:
        """Return start and stop of every device's box: int64 of shape (devices, dims, 2).

        Raises:
            LayoutError: if a device holds several pieces, because a dim is packed; `all_pieces` gives them.

        >>> from shardwise import DeviceMesh, TensorLayout
        >>> TensorLayout((None, "x"), DeviceMesh((2,), ("x",))).partition((3, 8)).boxes().tolist()
        [[[0, 3], [0, 4]], [[0, 3], [4, 8]]]
        """
        return self._core.boxes()

    def devices_indices_map(self) -> dict[Any, tuple[slice, ...]]:
        """Return a dict from each device, in device-index order, to the slices that it holds.

        The name and the meaning are those of `jax.sharding.Sharding.devices_indices_map`, except that a dim that is not
        cut has its bounds here, where JAX writes `slice(None)`.

        >>> from shardwise import DeviceMesh, TensorLayout
        >>> TensorLayout(("x",), DeviceMesh((2,), ("x",))).partition((8,)).devices_indices_map()
        {'cpu:0': (slice(0, 4, None),), 'cpu:1': (slice(4, 8, None),)}
        """
        return self._core.devices_indices_map(self._mesh.labels())

    def shard_id(self, device: Any) -> int:
        """Return the row-major number of the shard that `device` holds.

        >>> from shardwise import DeviceMesh, TensorLayout
        >>> TensorLayout(("x",), DeviceMesh((2, 3), ("x", "y"))).partition((8,)).shard_id("cpu:4")
        1
        """
        return self._core.shard_id(self._mesh.index_of_label(device))

    def replica_id(self, device: Any) -> int:
        """Return the number of a device among those that hold the same shard, in device-index order.

        >>> from shardwise import DeviceMesh, TensorLayout
        >>> TensorLayout(("x",), DeviceMesh((2, 3), ("x", "y"))).partition((8,)).replica_id("cpu:4")
        1
        """
        return self._core.replica_id(self._mesh.index_of_label(device))

    def shard_ids(self) -> npt.NDArray[np.int64]:
        """Return the shard id of every device: int64 of shape (devices,).

        >>> from shardwise import DeviceMesh, TensorLayout
        >>> TensorLayout(("y",), DeviceMesh((2, 3), ("x", "y"))).partition((9,)).shard_ids().tolist()
        [0, 1, 2, 0, 1, 2]
        """
        return self._core.shard_ids()

    def replica_ids(self) -> npt.NDArray[np.int64]:
        """Return the replica id of every device: int64 of shape (devices,).

        >>> from shardwise import DeviceMesh, TensorLayout
        >>> TensorLayout(("y",), DeviceMesh((2, 3), ("x", "y"))).partition((9,)).replica_ids().tolist()
        [0, 0, 0, 1, 1, 1]
        """
        return self._core.replica_ids()

    def devices_holding(self, shard_id: int) -> list[Any]:
        """List the devices that hold a shard, in device-index order: the canonical owner first.

        >>> from shardwise import DeviceMesh, TensorLayout
        >>> TensorLayout(("y",), DeviceMesh((2, 3), ("x", "y"))).partition((9,)).devices_holding(1)
        ['cpu:1', 'cpu:4']
        """
        return self._mesh.labels_at(self._core.devices_holding(shard_id))

    def canonical_device(self, shard_id: int) -> Any:
        """Return the first of the devices that hold a shard, in device-index order; costs O(rank).

        >>> from shardwise import DeviceMesh, TensorLayout
        >>> TensorLayout(("y",), DeviceMesh((2, 3), ("x", "y"))).partition((9,)).canonical_device(1)
        'cpu:1'
        """
        return self._mesh.device(self._core.canonical_device(shard_id))

    @overload
    def locate(self, offsets: int) -> tuple[int, int]: ...
    @overload
    def locate(self, offsets: npt.ArrayLike) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]: ...
    def locate(self, offsets: Any) -> Any:
        """Return the shards of elements, and the position of each element in its shard.

        Args:
            offsets: C-order flat positions in the tensor; one integer, or an array of them of any shape.

        Returns:
            The shard ids and the C-order flat positions in those shards: two integers, or two int64 arrays of the
            shape of `offsets`.

        Raises:
            IndexError: if an offset is negative or not below `size`; the message names the first such position.
            TypeError: if the offsets are not integers.

        >>> from shardwise import DeviceMesh, TensorLayout
        >>> partition = TensorLayout((None, "x"), DeviceMesh((2,), ("x",))).partition((3, 8))
        >>> partition.locate(13)
        (1, 5)
        >>> [answer.tolist() for answer in partition.locate([0, 13, 23])]
        [[0, 1, 1], [0, 5, 11]]
        """
        return self._core.locate(offsets)

    @overload
    def global_offset(self, shard_ids: int, local_offsets: int) -> int: ...
    @overload
    def global_offset(self, shard_ids: npt.ArrayLike, local_offsets: npt.ArrayLike) -> npt.NDArray[np.int64]: ...
    def global_offset(self, shard_ids: Any, local_offsets: Any) -> Any:
        """Return the global offsets of elements of shards: the inverse of `locate`.

        Args:
            shard_ids: one integer, or an array.
            local_offsets: one integer, or an array of the same shape; C-order flat positions in the shards.

        Raises:
            IndexError: if there is no such shard, or no such element in it; the message names the first such position.
            LayoutError: if the arrays are of different shapes.

        >>> from shardwise import DeviceMesh, TensorLayout
        >>> TensorLayout((None, "x"), DeviceMesh((2,), ("x",))).partition((3, 8)).global_offset(1, 5)
        13
        """
        return self._core.global_offset(shard_ids, local_offsets)

    def runs(self, device: Any) -> npt.NDArray[np.int64]:
        """Return the contiguous runs of the device's shard in the C-order tensor: int64 of shape (runs, 2).

        Each row holds offset and length, in elements. The rows are in increasing order, as few and as long as possible.
        Multiplied by the item size they are the byte ranges to read from a file.

        Raises:
            MemoryError: if the runs are too many to list.

        >>> from shardwise import DeviceMesh, TensorLayout
        >>> TensorLayout((None, "x"), DeviceMesh((2,), ("x",))).partition((3, 8)).runs("cpu:1").tolist()
        [[4, 4], [12, 4], [20, 4]]
        """
        return self._core.runs(self._mesh.index_of_label(device))

    def views(self, array: npt.NDArray[Any]) -> list[Any]:
        """Cut an array into zero-copy views, one per device, in device-index order.

        Each view is `array[box]`: the same memory, strides, dtype and writability. Any dtype and any strides work.
        Where a dim is packed, there is a list of views for each device, one for each of its pieces.

        Raises:
            LayoutError: if the array is not of the partition's shape.
            TypeError: if `array` is not a numpy array.

        >>> import numpy as np
        >>> from shardwise import DeviceMesh, TensorLayout
        >>> array = np.arange(8)
        >>> views = TensorLayout(("x",), DeviceMesh((2,), ("x",))).partition((8,)).views(array)
        >>> views[1], np.shares_memory(views[1], array)
        (array([4, 5, 6, 7]), True)
        """
        if type(array) is not np.ndarray:
            instance("array", array, np.ndarray)
        return self._core.views(array)

    def view(self, array: npt.NDArray[Any], device: Any) -> Any:
        """Return the zero-copy view of one device, or, where a dim is packed, the list of its views; see `views`."""
        instance("array", array, np.ndarray)
        return self._core.view(array, self._mesh.index_of_label(device))

    def nbytes(self, dtype: npt.DTypeLike) -> npt.NDArray[np.int64]:
        """Return the bytes that each device holds of a tensor of `dtype`: int64 of shape (devices,).

        Args:
            dtype: A dtype, or its name as numpy, ml_dtypes, PyTorch or safetensors write it.

        The whole tensor takes `size` times the bytes of an element, which is `ShardedArray.nbytes`.

        Raises:
            SizeOverflowError: if the whole tensor has more than 2**63 - 1 bytes.

        >>> from shardwise import DeviceMesh, TensorLayout
        >>> TensorLayout(("x",), DeviceMesh((4,), ("x",))).partition((10,), "balanced").nbytes("float32").tolist()
        [12, 12, 8, 8]
        """
        bits = bits_of(dtype)
        if self.size * bits > 8 * (2**63 - 1):
            size = f"{bits} bits" if bits % 8 else f"{bits // 8} bytes"
            raise SizeOverflowError(f"nbytes: {self.size} elements of {size} are over the limit of {2**63 - 1} bytes")
        return super().nbytes(dtype)

    @property
    def holders(self) -> tuple[Any, ...]:
        """The labels of the devices, in device-index order."""
        return self._mesh.labels()

    def holder_shape(self, holder: Any) -> tuple[int, ...]:
        """Return the shape of a device's shard, as `shard_shape` does."""
        return self._core.shard_shape(self._mesh.index_of_label(holder))

    def pieces(self, holder: Any) -> list[Piece]:
        """Return what a device holds, and where each piece begins in its own array.

        That is one box, which is the whole shard, unless a dim is packed; then empty pieces are left out.

        >>> from shardwise import DeviceMesh, TensorLayout
        >>> TensorLayout(("x",), DeviceMesh((2,), ("x",))).partition((8,)).pieces("cpu:1")
        [Piece(box=(slice(4, 8, None),), start=(0,))]
        """
        device = self._mesh.index_of_label(holder)
        if isinstance(self._core, CorePackedPartition):
            return [Piece(box, start) for box, start in self._core.pieces(device)]
        return [Piece(self._core.box(device), (0,) * len(self.shape))]

    def all_pieces(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the pieces of all devices, in device-index order, as two arrays.

        Returns:
            Where the pieces of each device begin in the list of all, int64 (devices + 1,); and for each piece along
            each dim start, stop, and where it begins in the device's own array: int64 (pieces, dims, 3).

        >>> from shardwise import DeviceMesh, TensorLayout, packed
        >>> partition = TensorLayout((packed.gate_up("tp"),), DeviceMesh((2,), ("tp",))).partition((8,))
        >>> begins, rows = partition.all_pieces()
        >>> begins.tolist(), rows[begins[1] : begins[2], 0].tolist()
        ([0, 2, 4], [[2, 4, 0], [6, 8, 2]])
        """
        if isinstance(self._core, CorePackedPartition):
            return self._core.all_pieces()
        boxes = self._core.boxes()
        rows = np.zeros((*boxes.shape[:2], 3), np.int64)
        rows[:, :, :2] = boxes
        return np.arange(len(boxes) + 1, dtype=np.int64), rows

    def check(self) -> None:
        """Do nothing: the shards of a partition hold every element, and devices with the same shard are replicas."""

    def _array_sizes(self) -> npt.NDArray[np.int64]:
        if isinstance(self._core, CorePackedPartition):
            return self._core.array_sizes()
        boxes = self._core.boxes()
        sizes: npt.NDArray[np.int64] = (boxes[..., 1] - boxes[..., 0]).prod(axis=1, dtype=np.int64)
        return sizes

    @property
    def holder_count(self) -> int:
        """The number of devices."""
        return self._mesh.size

    def shape_at(self, position: int) -> tuple[int, ...]:
        """Return the shape of the shard of the device with this index."""
        return self._core.shard_shape(position)

    def holder_shapes(self) -> list[tuple[int, ...]]:
        """Return the shape of every device's shard."""
        if self._few_shapes is not None:
            return self._few_shapes
        if self.holder_count <= _FEW or isinstance(self._core, CorePackedPartition):
            shapes = [self._core.shard_shape(device) for device in range(self.holder_count)]
            if len(shapes) <= _FEW:  # Kept: small reshards ask for them twice each time.
                self._few_shapes = shapes
            return shapes
        boxes = self._core.boxes()
        sizes = boxes[..., 1] - boxes[..., 0]
        shapes = []
        for start in range(0, len(sizes), _AT_ONCE):  # Between the turns Ctrl-C is heard.
            shapes += map(tuple, sizes[start : start + _AT_ONCE].tolist())
        return shapes

    def covered(self) -> npt.NDArray[np.bool_] | None:
        """Return for each device whether its pieces fill its array; `None` if all do."""
        if isinstance(self._core, CorePackedPartition):
            full: npt.NDArray[np.bool_] = self._core.held_sizes() == self._core.array_sizes()
            return full
        return None

    @property
    def has_replicas(self) -> bool:
        """True if holders of the identical box are replicas, as all of a partition are."""
        return True

    @property
    def has_labels(self) -> bool:
        """True: devices have labels."""
        return True

    def holder_label(self, position: int) -> Any:
        """Return the label of the device with this index."""
        return self._mesh.device(position)

    def position_of(self, holder: Any) -> int:
        """Return the index of the device of this label."""
        return self._mesh.index_of_label(holder)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Partition):
            return NotImplemented
        return self.shape == other.shape and self._uneven == other._uneven and self._layout == other._layout

    def __hash__(self) -> int:
        return hash((self.shape, self._uneven, self._layout))

    def __repr__(self) -> str:
        return f"Partition({self._layout!r}, {self.shape}, {self._uneven!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Partition, (self._layout, self.shape, self._uneven)
