"""Operations on a whole sharded array, named after the collectives that do them on devices."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .._arguments import instance, integer
from .._text import shown
from .._types import Array
from ..errors import LayoutError
from ..layout import Spec, TensorLayout, axes_of_spec, names_in_spec
from ..packed import PackedDim
from .sharded import ShardedArray, gathered

__all__ = ["all_gather", "all_reduce", "all_to_all", "gather", "reduce_scatter"]


def gather(sharded: ShardedArray, *, check_replicas: bool = True) -> Array:
    """Put an array together from its shards, adding up partial sums: a new array.

    Args:
        sharded: an array, which may be unreduced.
        check_replicas: whether devices that hold the same values must hold the same bytes; see `ShardedArray.numpy`.

    Raises:
        LayoutError: if replicas differ; the message names the first element that differs.

    >>> import numpy as np
    >>> from shardwise import DeviceMesh, TensorLayout
    >>> mesh = DeviceMesh((2,), ("x",))
    >>> sums = TensorLayout((None,), mesh, unreduced=("x",)).partition((3,))
    >>> gather(ShardedArray(sums, [np.array([1, 2, 3]), np.array([10, 20, 30])]))
    array([11, 22, 33])
    """
    return gathered(_checked(sharded), check_replicas)


def all_gather(sharded: ShardedArray, axes: str | Sequence[str] | None = None) -> ShardedArray:
    """Put shards together along mesh axes, so that the devices along them hold the same.

    Args:
        sharded: an array that is cut by a layout.
        axes: the mesh axes that should no longer cut a dim; by default all of them.

    Raises:
        LayoutError: if an axis cuts no dim.

    >>> import numpy as np
    >>> from shardwise import DeviceMesh, TensorLayout, distribute_tensor
    >>> mesh = DeviceMesh((2, 2), ("x", "y"))
    >>> sharded = distribute_tensor(np.arange(4), TensorLayout((("x", "y"),), mesh))
    >>> all_gather(sharded, "y").shard("cpu:0")
    array([0, 1])
    """
    layout = _checked(sharded).layout
    cutting = [name for spec in layout.axes for name in axes_of_spec(spec)]
    names = cutting if axes is None else [axes] if isinstance(axes, str) else list(names_in_spec("axes", axes))
    if uncut := [name for name in names if name not in cutting]:
        raise LayoutError(
            f"axes names {shown(uncut[0])}, which does not cut a dim; the axes that do are {shown(cutting)}"
        )
    specs = [_without(spec, names) for spec in layout.axes]
    return _become(sharded, TensorLayout(specs, layout.device_mesh, unreduced=layout.unreduced))


def all_reduce(sharded: ShardedArray) -> ShardedArray:
    """Add up the partial sums of an unreduced array, on every device, with `numpy.add` in the order of coordinates.

    >>> import numpy as np
    >>> from shardwise import DeviceMesh, TensorLayout
    >>> mesh = DeviceMesh((2,), ("x",))
    >>> sums = TensorLayout((None,), mesh, unreduced=("x",)).partition((3,))
    >>> all_reduce(ShardedArray(sums, [np.array([1, 2, 3]), np.array([10, 20, 30])])).shard("cpu:0")
    array([11, 22, 33])
    """
    _checked(sharded)
    return _become(sharded, TensorLayout(sharded.layout.axes, sharded.layout.device_mesh))


def all_to_all(sharded: ShardedArray, axes: str | Sequence[str], dim: int) -> ShardedArray:
    """Exchange shards along mesh axes: the dim that they cut is put together, and another one is cut instead.

    Args:
        sharded: an array that is cut by a layout.
        axes: an axis, or several that cut one dim, as its minor ones.
        dim: the dim that the axes are to cut, as its minor axes and in the order given.

    Raises:
        LayoutError: if the axes are not the minor axes of a dim, or that dim is `dim` already; if either is packed.
        IndexError: if there is no such dim.

    The axes leave the minor end of one spec and join that of another, as in `jax.lax.all_to_all`: only then is the
    exchange among the devices along these axes alone.

    >>> import numpy as np
    >>> from shardwise import DeviceMesh, TensorLayout, distribute_tensor
    >>> mesh = DeviceMesh((2,), ("x",))
    >>> sharded = distribute_tensor(np.arange(4).reshape(2, 2), TensorLayout(("x", None), mesh))
    >>> all_to_all(sharded, "x", dim=1).shard("cpu:1")
    array([[1],
           [3]])
    """
    layout = _checked(sharded).layout
    dim = _dim(dim, sharded.ndim)
    names = [axes] if isinstance(axes, str) else list(names_in_spec("axes", axes))
    minor = [() if isinstance(spec, PackedDim) else axes_of_spec(spec)[-len(names) :] for spec in layout.axes]
    source = next((i for i, last in enumerate(minor) if names and sorted(last) == sorted(names)), None)
    if source is None:
        raise LayoutError(f"axes are {shown(names)}, which are not the minor axes of a dim of {shown(layout.axes)}")
    if source == dim:
        raise LayoutError(f"dim is {dim}, which {shown(names)} cut already")
    specs = list(layout.axes)
    specs[source] = _without(specs[source], names)
    specs[dim] = _cut_by(specs[dim], names, dim)
    return _become(sharded, TensorLayout(specs, layout.device_mesh, unreduced=layout.unreduced))


def reduce_scatter(sharded: ShardedArray, axis: str, dim: int) -> ShardedArray:
    """Add up the partial sums of an unreduced array, and cut a dim of the result by the axis of the sums.

    Args:
        sharded: an array that is unreduced over `axis`, and over no other.
        axis: a mesh axis, which may not cut a dim already.
        dim: the dim that `axis` is to cut, as the minor axis of its spec.

    Raises:
        LayoutError: if the array is not unreduced over the axis alone, or the dim is packed.
        IndexError: if there is no such dim.

    >>> import numpy as np
    >>> from shardwise import DeviceMesh, TensorLayout
    >>> mesh = DeviceMesh((2,), ("x",))
    >>> sums = TensorLayout((None,), mesh, unreduced=("x",)).partition((4,))
    >>> sharded = ShardedArray(sums, [np.array([1, 2, 3, 4]), np.array([10, 20, 30, 40])])
    >>> reduce_scatter(sharded, "x", dim=0).shard("cpu:1")
    array([33, 44])
    """
    layout = _checked(sharded).layout
    dim = _dim(dim, sharded.ndim)
    if layout.unreduced != (axis,):
        raise LayoutError(
            f"reduce_scatter needs an array unreduced over {shown(axis)} alone, not over {shown(layout.unreduced)}"
        )
    specs = list(layout.axes)
    specs[dim] = _cut_by(specs[dim], [axis], dim)
    return _become(sharded, TensorLayout(specs, layout.device_mesh))


def _checked(sharded: object) -> ShardedArray:
    return instance("sharded", sharded, ShardedArray)


def _dim(dim: int, rank: int) -> int:
    found = integer("dim", dim)
    if not 0 <= found < rank:
        raise IndexError(
            f"dim is {shown(found)}, outside 0 to {rank - 1}" if rank else f"dim is {shown(found)}, but rank is 0"
        )
    return found


def _without(spec: Spec, names: Collection[str]) -> Spec:
    """Return a spec without these axes; a packed dim stays packed while any axis cuts it."""
    if not isinstance(spec, PackedDim):
        return tuple(name for name in axes_of_spec(spec) if name not in names)
    rest = spec.mapped({name: () if name in names else (name,) for name in spec.axis_names})
    return rest if rest.axis_names else None


def _cut_by(spec: Spec, names: Sequence[str], dim: int) -> Spec:
    """Return the spec of a dim with these axes added as its minor ones."""
    if isinstance(spec, PackedDim):
        raise LayoutError(f"dim {dim} is packed; reshard cuts its parts")
    return (*axes_of_spec(spec), *names)


def _become(sharded: ShardedArray, layout: TensorLayout) -> ShardedArray:
    return sharded.reshard(layout, sharded.partition.uneven)
