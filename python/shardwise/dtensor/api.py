"""Tensors on a mesh as numpy arrays, after TensorFlow's `tf.experimental.dtensor` functions.

A `DTensor` is the list of what each device of this client holds, its components, with the layout that says which parts
of the tensor they are. Nothing is copied except where components have to be put together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from .._arguments import array_like, instance
from .._text import counted, shown
from ..errors import LayoutError
from ..partition import Partition
from .layout import MATCH, UNSHARDED, Layout, LayoutType

__all__ = [
    "DTensor",
    "check_layout",
    "copy_to_mesh",
    "fetch_layout",
    "is_dtensor",
    "pack",
    "relayout",
    "unpack",
]


class DTensor:
    """A tensor that is placed on a mesh; made by `pack`, `copy_to_mesh` and `relayout`.

    >>> from shardwise.dtensor import Mesh
    >>> mesh = Mesh.from_string("|x=2|0,1|0,1|CPU:0,CPU:1")
    >>> copy_to_mesh(np.arange(6), Layout(["x"], mesh))
    DTensor(shape=(6,), dtype=int64, sharding_specs=['x'], components=2)
    """

    __slots__ = ("_components", "_layout", "_shape", "_whole")

    def __init__(
        self, components: Sequence[NDArray[Any]], layout: Layout, shape: tuple[int, ...], whole: NDArray[Any] | None
    ) -> None:
        self._components = tuple(components)
        self._layout = layout
        self._shape = shape
        self._whole = whole

    @property
    def layout(self) -> Layout:
        """The layout."""
        return self._layout

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype."""
        return self._components[0].dtype

    @property
    def components(self) -> tuple[NDArray[Any], ...]:
        """The arrays of this client's devices, in the order of `layout.mesh.local_device_ids()`."""
        return self._components

    def numpy(self) -> NDArray[Any]:
        """Return the whole tensor: the array that it was cut from, else the components put together in a new one.

        Raises:
            LayoutError: if this client does not hold every shard of the tensor.

        >>> from shardwise.dtensor import Mesh
        >>> mesh = Mesh.from_string("|x=2|0,1|0,1|CPU:0,CPU:1")
        >>> pack([np.arange(2), np.arange(2, 4)], Layout(["x"], mesh)).numpy()
        array([0, 1, 2, 3])
        """
        if self._whole is not None:
            return self._whole
        partition, labels = _local(self._layout, self._shape)
        owners = {partition.shard_id(label): position for position, label in reversed(list(enumerate(labels)))}
        if len(owners) != partition.total_shards:
            raise LayoutError(
                f"this client holds {len(owners)} of {partition.total_shards} shards; other clients hold the rest"
            )
        whole = np.empty(self._shape, self.dtype)
        for position in owners.values():
            partition.view(whole, labels[position])[...] = self._components[position]
        return whole

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        whole = self.numpy()
        if copy:
            return np.array(whole, dtype=dtype)
        return np.asarray(whole, dtype=dtype)

    def __len__(self) -> int:
        if not self._shape:
            raise TypeError("a DTensor of rank 0 has no length")
        return self._shape[0]

    def __iter__(self) -> Iterator[NDArray[Any]]:
        """Return the whole tensor's rows, as iterating over an array does."""
        if not self._shape:
            raise TypeError("a DTensor of rank 0 cannot be iterated over")
        return iter(self.numpy())

    def __str__(self) -> str:
        """The arrays of this client's devices, and the layout, as TensorFlow prints it."""
        mesh = self._layout.mesh
        names = [mesh.single_device] if self._layout.is_single_device() else mesh.local_devices()
        held = ", ".join(f'"{name}": {array}' for name, array in zip(names, self._components, strict=True))
        return f'tf.Tensor({{{held}}}, layout="{self._layout.to_string()}", shape={self._shape}, dtype={self.dtype})'

    def __repr__(self) -> str:
        return (
            f"DTensor(shape={self.shape}, dtype={self.dtype}, sharding_specs={self.layout.sharding_specs}, "
            f"components={len(self._components)})"
        )


def pack(tensors: Sequence[ArrayLike], layout: Layout) -> DTensor:
    """Make one tensor from the arrays of this client's devices; the components are not copied.

    Args:
        tensors: One array per local device, in the order of `layout.mesh.local_device_ids()`, all of one shape and
            dtype. Whether replicas hold the same values is up to the caller, as in TensorFlow.
        layout: The layout of the tensor.

    Raises:
        LayoutError: if the number of arrays is wrong, they differ in shape or dtype, or their rank is not the layout's.

    >>> from shardwise.dtensor import Mesh
    >>> mesh = Mesh.from_string("|x=2|0,1|0,1|CPU:0,CPU:1")
    >>> pack([np.zeros((1, 3)), np.ones((1, 3))], Layout(["x", "unsharded"], mesh)).shape
    (2, 3)
    """
    _check(layout)
    arrays = [array_like(f"tensors[{i}]", tensor) for i, tensor in enumerate(tensors)]
    expected = 1 if layout.is_single_device() else layout.mesh.num_local_devices()
    if len(arrays) != expected or not arrays:
        raise LayoutError(
            f"tensors has {counted(len(arrays), 'array')}; the mesh has {counted(expected, 'local device')}"
        )
    for position, array in enumerate(arrays):
        if (array.shape, array.dtype) != (arrays[0].shape, arrays[0].dtype):
            raise LayoutError(
                f"tensors[{position}] has shape {shown(array.shape)} and dtype {array.dtype}, but tensors[0] has "
                f"{arrays[0].shape} and {arrays[0].dtype}; all must have the same"
            )
    shape = layout.global_shape_from_local_shape(arrays[0].shape)
    return DTensor(arrays, layout, shape, arrays[0] if layout.is_single_device() else None)


def unpack(tensor: DTensor) -> list[NDArray[Any]]:
    """Return what each device of this client holds, as views that share the tensor's memory.

    >>> from shardwise.dtensor import Mesh
    >>> mesh = Mesh.from_string("|x=2|0,1|0,1|CPU:0,CPU:1")
    >>> array = np.arange(4)
    >>> components = unpack(copy_to_mesh(array, Layout(["x"], mesh)))
    >>> components
    [array([0, 1]), array([2, 3])]
    >>> np.shares_memory(components[1], array)
    True
    """
    return list(_dtensor(tensor).components)


def copy_to_mesh(tensor: ArrayLike | DTensor, layout: Layout, source_layout: Layout | None = None) -> DTensor:
    """Lay a tensor out on the mesh of `layout`; the same as `relayout`, as in TensorFlow.

    The components are views of `tensor`, despite the name. `source_layout` is not used, as in TensorFlow.

    Raises:
        LayoutError: as `relayout`.

    >>> from shardwise.dtensor import Mesh
    >>> mesh = Mesh.from_string("|x=2|0,1|0,1|CPU:0,CPU:1")
    >>> copy_to_mesh([[1, 2], [3, 4]], Layout(["unsharded", "x"], mesh)).components[0].tolist()
    [[1], [3]]
    """
    return relayout(tensor, layout)


def relayout(tensor: ArrayLike | DTensor, layout: Layout, name: str | None = None) -> DTensor:
    """Change the layout of a tensor, whatever its layout and mesh; an array counts as a tensor that is not cut.

    A dim whose spec is `MATCH` keeps the cut that it has. `name`, which TensorFlow gives an operation, is not used.

    Raises:
        LayoutError: if the ranks of tensor and layout differ, a dim does not divide, this client does not hold every
            shard of the tensor, or the layout cuts another dim by the axis of a kept cut.

    >>> from shardwise.dtensor import Mesh
    >>> mesh = Mesh.from_string("|x=2|0,1|0,1|CPU:0,CPU:1")
    >>> cut = relayout(np.arange(4).reshape(2, 2), Layout(["x", "unsharded"], mesh))
    >>> relayout(cut, Layout(["unsharded", "x"], mesh)).components[1].tolist()
    [[1], [3]]
    >>> relayout(cut, Layout(["match", "unsharded"], mesh)).layout.sharding_specs
    ['x', 'unsharded']
    """
    _check(layout)
    given = tensor if isinstance(tensor, DTensor) else array_like("tensor", tensor)
    layout = _matched(given, layout)
    if isinstance(given, DTensor):
        if given.layout == layout:
            return given
        given = given.numpy()
    whole: NDArray[Any] = given
    if layout.is_single_device():
        return DTensor([whole], layout, whole.shape, whole)
    partition, labels = _local(layout, whole.shape)
    return DTensor([partition.view(whole, label) for label in labels], layout, whole.shape, whole)


def fetch_layout(tensor: object) -> Layout | None:
    """Return the layout of a tensor, or `None` if it is not a `DTensor`.

    >>> from shardwise.dtensor import Mesh
    >>> mesh = Mesh.from_string("|x=2|0,1|0,1|CPU:0,CPU:1")
    >>> fetch_layout(copy_to_mesh(np.arange(4), Layout(["x"], mesh))).sharding_specs
    ['x']
    >>> print(fetch_layout(-1024))
    None
    """
    return tensor.layout if isinstance(tensor, DTensor) else None


def check_layout(tensor: DTensor, layout: Layout) -> None:
    """Check that `layout` is the layout of `tensor`.

    Raises:
        LayoutError: if the tensor has another layout; the message names both.

    >>> from shardwise.dtensor import Mesh
    >>> mesh = Mesh.from_string("|x=2|0,1|0,1|CPU:0,CPU:1")
    >>> check_layout(copy_to_mesh(np.arange(4), Layout(["x"], mesh)), Layout(["x"], mesh))
    """
    fetched = _dtensor(tensor).layout
    if fetched != layout:
        raise LayoutError(f"Layout of tensor: {fetched}, did not match expected layout: {layout}")


def is_dtensor(tensor: object) -> bool:
    """Return whether something is a `DTensor`.

    >>> is_dtensor(np.arange(4))
    False
    """
    return isinstance(tensor, DTensor)


def _check(layout: Layout) -> None:
    instance("layout", layout, Layout)


def _dtensor(tensor: object) -> DTensor:
    if not isinstance(tensor, DTensor):
        raise TypeError(f"tensor must be a DTensor, got {type(tensor).__name__}; an array gets a layout by relayout")
    return tensor


def _matched(tensor: NDArray[Any] | DTensor, layout: Layout) -> Layout:
    """Return the layout with the cuts of `tensor` in place of `MATCH`."""
    if MATCH not in layout.sharding_specs:
        return layout
    rank = len(tensor.shape)
    if rank != layout.rank:
        raise LayoutError(f"tensor has {counted(rank, 'dim')} but the layout has {layout.rank}")
    kept = tensor.layout.sharding_specs if isinstance(tensor, DTensor) else []
    specs = [
        (kept[dim] if kept else UNSHARDED) if spec == MATCH else spec for dim, spec in enumerate(layout.sharding_specs)
    ]
    matched = Layout(specs, layout.mesh)
    return matched.to_parted() if layout.type is LayoutType.PARTED else matched


def _local(layout: Layout, shape: tuple[int, ...]) -> tuple[Partition, list[Any]]:
    """Return the partition of a shape, and its labels of the devices that this client holds."""
    partition = layout.partition(shape)
    first = layout.mesh.min_global_device_id()
    return partition, [partition.device_mesh.device(number - first) for number in layout.mesh.local_device_ids()]
