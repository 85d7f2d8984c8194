"""Arrays cut into the shards of a layout: zero-copy views of one array, or arrays of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .._arguments import array_of, instance, is_true
from .._drawn import Drawn
from .._fork import importing
from .._text import bytes_text, shown
from ..errors import LayoutError
from ..layout import TensorLayout, UnevenRule
from ..mesh import DeviceMesh
from ..partition import Partition
from ..reshard.run import checked_arrays
from ..reshard.source import ShardSource
from ..tiling import Tiling
from .pieces import assembled, put_together
from .replicas import check_replicas as check_equal_replicas

if TYPE_CHECKING:
    import numpy.typing as npt

    from ..show.picture import Picture

__all__ = ["Shard", "ShardedArray", "compared_shards", "distribute_tensor", "gathered"]

#: The bytes from which putting shards together is worth a plan; below, making one takes longer than the copies.
_PLANNED = 2**22


@dataclass(frozen=True, eq=False)
class Shard:
    """The part of a sharded array on one device; the names are those of `jax.Shard`."""

    #: The device's label.
    device: Any
    #: The slices of the global array that it holds; where a dim is packed, a tuple of these, one for each piece.
    index: tuple[Any, ...]
    #: The number of the device among those with the same slices; 0 is the canonical owner.
    replica_id: int
    #: The values.
    data: npt.NDArray[Any]


class ShardedArray(Drawn, ShardSource):
    """An array cut into shards, one per device of a mesh, or one per holder of any tiling.

    Args:
        tiling: who holds what: a `Partition`, or any other `Tiling`.
        shards: one array per holder, in their order, of the shape that the tiling gives it and all of one dtype.
            Nothing is copied.

    Raises:
        LayoutError: if the shards do not fit the tiling; the message names the first holder whose shard does not.

    `distribute_tensor` makes one from an array. `numpy()` and `np.asarray` put the shards together.

    >>> import numpy as np
    >>> from shardwise import DeviceMesh, TensorLayout
    >>> partition = TensorLayout(("x",), DeviceMesh((2,), ("x",))).partition((4,))
    >>> ShardedArray(partition, [np.array([1, 2]), np.array([3, 4])]).numpy()
    array([1, 2, 3, 4])

    A flat parameter of FSDP is a sharded array too:

    >>> from shardwise import Tiling
    >>> ranks = Tiling.from_flat_ranges((2, 3), {"cpu:0": (0, 4), "cpu:1": (4, 6)})
    >>> flat = ShardedArray(ranks, [np.array([0, 1, 2, 3]), np.array([4, 5])])
    >>> flat.reshard(TensorLayout((None, "x"), DeviceMesh((3,), ("x",)))).shard("cpu:1")
    array([[1],
           [4]])
    """

    __slots__ = ("__weakref__", "_array", "_dtype", "_tiling", "_views")

    _tiling: Tiling
    _dtype: np.dtype[Any]
    #: The global array that the shards are views of, if there is one.
    _array: npt.NDArray[Any] | None
    _views: list[npt.NDArray[Any]] | None

    def __init__(self, tiling: Tiling, shards: Sequence[npt.NDArray[Any]]) -> None:
        if not isinstance(tiling, Tiling):
            raise TypeError(f"tiling must be a Partition or another Tiling, got {type(tiling).__name__}")
        if not isinstance(shards, (Sequence, np.ndarray)):
            raise TypeError(f"shards must be a sequence of numpy arrays, got {type(shards).__name__}")
        views = checked_arrays("shards", shards, tiling, None)
        self._tiling, self._array, self._views = tiling, None, views
        self._dtype = views[0].dtype if views else np.dtype(np.float64)

    @classmethod
    def _of(
        cls,
        tiling: Tiling,
        dtype: np.dtype[Any],
        array: npt.NDArray[Any] | None,
        shards: list[npt.NDArray[Any]] | None = None,
    ) -> ShardedArray:
        """Return a sharded array of a global array, whose views are made late, or of shards that are known to fit."""
        sharded = cls.__new__(cls)
        sharded._tiling, sharded._dtype, sharded._array, sharded._views = tiling, dtype, array, shards
        return sharded

    def __reduce__(self) -> tuple[Any, ...]:
        shards = self._views if self._array is None else None
        return ShardedArray._of, (self._tiling, self._dtype, self._array, shards)

    @property
    def tiling(self) -> Tiling:
        """The tiling of the array."""
        return self._tiling

    @property
    def partition(self) -> Partition:
        """The partition of the array, if its tiling is one.

        Raises:
            LayoutError: if the tiling is of another kind, which has no layout.
        """
        if not isinstance(self._tiling, Partition):
            raise LayoutError(f"the array is cut by {self._tiling.kind_text()}, not by a layout; see its tiling")
        return self._tiling

    @property
    def layout(self) -> TensorLayout:
        """The layout, if the array is cut by one; see `partition`."""
        return self.partition.layout

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the global array."""
        return self._tiling.shape

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self._tiling.shape)

    @property
    def size(self) -> int:
        """The number of elements of the global array."""
        return self._tiling.size

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype."""
        return self._dtype

    @property
    def nbytes(self) -> int:
        """The bytes of the global array, each element counted once; for those of each device see `partition.nbytes`."""
        return self._tiling.size * self._dtype.itemsize

    @property
    def whole(self) -> npt.NDArray[Any] | None:
        """The global array, if the shards are parts of one, as `distribute_tensor` makes them; else `None`."""
        return self._array

    @property
    def _is_packed(self) -> bool:
        """True if the devices hold several pieces each, because a dim is packed."""
        return isinstance(self._tiling, Partition) and self._tiling.is_packed

    def shard_arrays(self) -> list[npt.NDArray[Any]]:
        """Return one array per device, in device-index order; all views are made in one call."""
        if self._views is None:
            assert self._array is not None
            if self._is_packed:
                shapes = self.partition.holder_shapes()
                devices = range(self.partition.device_mesh.size)
                self._views = [assembled(self.partition, self._array, i, shapes[i]) for i in devices]
            else:
                self._views = self.partition.views(self._array)
        return self._views

    @property
    def shards(self) -> list[Shard]:
        """The arrays of the devices, in device-index order.

        Raises:
            LayoutError: if the array is not cut by a layout; see `shard` and `tiling`.

        >>> import numpy as np
        >>> from shardwise import DeviceMesh, TensorLayout
        >>> sharded = distribute_tensor(np.arange(4), TensorLayout(("x",), DeviceMesh((2,), ("x",))))
        >>> sharded.shards[1]
        Shard(device='cpu:1', index=(slice(2, 4, None),), replica_id=0, data=array([2, 3]))
        """
        replicas = self.partition.replica_ids().tolist()
        if self._is_packed:
            devices = self.partition.holders
            indices: dict[Any, tuple[Any, ...]] = {
                device: tuple(piece.box for piece in self.partition.pieces(device)) for device in devices
            }
        else:
            indices = dict(self.partition.devices_indices_map())
        return [
            Shard(device, index, replica, data)
            for (device, index), replica, data in zip(indices.items(), replicas, self.shard_arrays(), strict=True)
        ]

    def shard(self, device: Any, *, contiguous: bool = False) -> npt.NDArray[Any]:
        """Return what one device holds; for a view of one array this costs O(rank), whatever the mesh's size.

        Args:
            device: the label of the device, or of another holder.
            contiguous: whether the shard must be contiguous in C order; it is copied if it is not already.

        Raises:
            MeshError: if the mesh has no such device (LayoutError: if another tiling has no such holder).

        Where a dim is packed, a device holds several pieces of the array, and no view shows them as one: the shard is
        then a read-only copy, with zeros where it is padded. `partition.view` gives a view of each piece.

        A shard of one array is a view with the array's strides. Functions that ignore the strides of an array, such as
        `safetensors.numpy.save_file`, write wrong values. Give them contiguous shards:
        `save_file({"weight": sharded.shard(device, contiguous=True)}, path)`.

        >>> import numpy as np
        >>> from shardwise import DeviceMesh, TensorLayout
        >>> layout = TensorLayout((None, "x"), DeviceMesh((2,), ("x",)))
        >>> sharded = distribute_tensor(np.arange(8).reshape(2, 4), layout)
        >>> sharded.shard("cpu:1")
        array([[2, 3],
               [6, 7]])
        >>> [shard.strides for shard in (sharded.shard("cpu:1"), sharded.shard("cpu:1", contiguous=True))]
        [(32, 8), (16, 8)]
        """
        if self._array is not None and self._views is None:
            if self._is_packed:
                position = self.partition.device_mesh.index_of_label(device)
                return assembled(self.partition, self._array, position, self.partition.shard_shape(device))
            shard: npt.NDArray[Any] = self.partition.view(self._array, device)
        else:
            shard = self.shard_arrays()[self._tiling.position_of(device)]
        return shard.copy(order="C") if contiguous and not shard.flags.c_contiguous else shard

    def numpy(self, *, check_replicas: bool = True) -> npt.NDArray[Any]:
        """Put the shards together: a new array, which shares no memory with them.

        Args:
            check_replicas: whether devices that hold the same shard must hold the same bytes. The check takes one pass
                over the memory of the shards that have replicas; without it the values of replica 0 are taken.

        Raises:
            LayoutError: if the layout has unreduced axes, whose partial sums are not values yet; if replicas differ;
                the message names the first element that differs.

        """
        if self._array is not None:
            whole: npt.NDArray[Any] = self._array.copy()
            return whole
        tiling = self._tiling
        # An axis of one coordinate has one addend, which is the sum.
        unreduced = tiling.layout.unreduced if isinstance(tiling, Partition) else ()
        if partial := [axis for axis in unreduced if self.partition.device_mesh.axis_size(axis) > 1]:
            raise LayoutError(f"numpy() needs reduced values, but the layout is unreduced over {tuple(partial)}")
        compared = compared_shards(self, check_replicas)
        if self._is_packed:
            return put_together(self.partition, compared)
        if not isinstance(tiling, Partition) or (self.nbytes >= _PLANNED and not self._dtype.hasobject):
            return gathered(self, check_replicas=False)
        array = np.empty(self.shape, self._dtype)
        shards, targets = compared, tiling.views(array)
        # The canonical owners' shards, each element once.
        for owner in np.flatnonzero(tiling.replica_ids() == 0).tolist():
            targets[owner][...] = shards[owner]
        return array

    def reshard(
        self, layout: TensorLayout | Tiling, uneven: UnevenRule = "even", *, check_replicas: bool = True
    ) -> ShardedArray:
        """Change the layout, moving no more than `plan_reshard` says must move.

        Args:
            layout: a layout with a mesh, which may be a new one; or any tiling of the same shape. Devices and other
                holders are matched by label.
            uneven: how a dim that does not divide is cut; see `TensorLayout.partition`.
            check_replicas: whether devices that hold the same shard must hold the same bytes; see `numpy`. Without it
                the new shards may mix several replicas.

        Returns:
            A `ShardedArray`. If the shards are views of one array, the new shards are too. Otherwise a device whose old
            shard contains its whole new one gets a view of it, and everything else is copied. Partial sums are added.

        Raises:
            LayoutError: if the layout does not fit, or is unreduced; if replicas differ.

        >>> import numpy as np
        >>> from shardwise import DeviceMesh, TensorLayout
        >>> mesh = DeviceMesh((2,), ("x",))
        >>> rows = TensorLayout(("x", None), mesh).partition((2, 4))
        >>> sharded = ShardedArray(rows, [np.array([[0, 1, 2, 3]]), np.array([[4, 5, 6, 7]])])
        >>> sharded.reshard(TensorLayout((None, "x"), mesh)).shard("cpu:1")
        array([[2, 3],
               [6, 7]])
        """
        with importing:
            from ..reshard.plan import plan_reshard  # Late, to keep `import shardwise` fast.

        if isinstance(layout, Tiling):
            target = layout
        elif isinstance(layout, TensorLayout):
            target = layout.partition(self.shape, uneven)
        else:
            raise TypeError(f"layout must be a TensorLayout or a Tiling, got {type(layout).__name__}")
        if isinstance(target, Partition):
            if target.layout.unreduced:
                raise _partial_sums(target.layout)
            if self._array is not None and target.shape == self.shape:
                return ShardedArray._of(target, self._dtype, self._array)
        compared_shards(self, check_replicas)
        return ShardedArray._of(target, self._dtype, None, plan_reshard(self._tiling, target).run(self))

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("copy=False: putting shards together makes a new array")
        array: npt.NDArray[Any] = np.asarray(self.numpy(), dtype)
        return array

    def _picture(self) -> Picture:
        with importing:
            from ..show.views import tilings_picture

        return tilings_picture([self._tiling], [f"{self._dtype} array of {bytes_text(self.nbytes)}"])

    def __repr__(self) -> str:
        cut = repr(self._tiling.layout) if isinstance(self._tiling, Partition) else self._tiling.kind_text()
        return f"<ShardedArray {self.shape} {self._dtype}, {cut}>"


def compared_shards(sharded: ShardedArray, check_replicas: bool) -> list[npt.NDArray[Any]]:
    """Return the arrays of all holders; replicas may be compared first, unless all are parts of one array.

    Raises:
        LayoutError: if replicas differ.
    """
    shards = sharded.shard_arrays()
    if is_true("check_replicas", check_replicas) and sharded._array is None:
        check_equal_replicas(sharded.tiling, shards)
    return shards


def gathered(sharded: ShardedArray, check_replicas: bool) -> npt.NDArray[Any]:
    """Put an array together from its shards by a plan, adding up partial sums; see `shardwise.array.gather`."""
    with importing:
        from ..reshard.plan import plan_reshard  # Late, to keep `import shardwise` fast.

    if sharded._is_packed or sharded._array is not None:
        return sharded.numpy(check_replicas=check_replicas)
    compared_shards(sharded, check_replicas)
    whole = TensorLayout((None,) * sharded.ndim, DeviceMesh((1,), ("whole",), [object()]))
    return plan_reshard(sharded.tiling, whole.partition(sharded.shape)).run(sharded)[0]


def distribute_tensor(tensor: Any, layout: TensorLayout, uneven: UnevenRule = "even") -> ShardedArray:
    """Cut an array into the shards of a layout, without copying an element.

    Args:
        tensor: a numpy array, or anything with `__array__` or DLPack in the memory of the CPU; or a `ShardedArray`,
            which then changes its layout.
        layout: a layout with a mesh.
        uneven: how a dim that does not divide is cut; see `TensorLayout.partition`.

    Returns:
        A `ShardedArray` whose shards are views: `array[box]`, with the array's strides, dtype and writability.

    Raises:
        LayoutError: if the layout does not fit the array, has no mesh, or has unreduced axes.
        TypeError: if `tensor` is not an array, or `layout` not a `TensorLayout`.

    The name follows `keras.distribution.distribute_tensor`.

    >>> import numpy as np
    >>> from shardwise import DeviceMesh, TensorLayout
    >>> array = np.arange(12).reshape(3, 4)
    >>> sharded = distribute_tensor(array, TensorLayout((None, "x"), DeviceMesh((2,), ("x",))))
    >>> sharded.shard("cpu:1")
    array([[ 2,  3],
           [ 6,  7],
           [10, 11]])
    >>> np.shares_memory(sharded.shard("cpu:1"), array)
    True
    """
    if type(layout) is not TensorLayout:
        instance("layout", layout, TensorLayout)
    if layout.unreduced:
        raise _partial_sums(layout)
    # To ask of an abstract class takes as long as to make the partition, so not of what is an array.
    if type(tensor) is not np.ndarray and isinstance(tensor, ShardedArray):
        return tensor.reshard(layout, uneven)
    array = array_of("tensor", tensor)
    return ShardedArray._of(layout.partition(array.shape, uneven), array.dtype, array)


def _partial_sums(layout: TensorLayout) -> LayoutError:
    return LayoutError(f"layout is unreduced over {shown(layout.unreduced)}; a value cannot be cut into partial sums")
