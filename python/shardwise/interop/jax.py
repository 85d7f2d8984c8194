"""JAX's dialect: `Mesh` and `AbstractMesh`, `PartitionSpec`, `NamedSharding`, and arrays on the devices present.

A layout and a `PartitionSpec` say the same: axes per dim, the first major, and unreduced axes. A spec may leave out
trailing dims, so reading one needs the rank. A spec may also have `UNCONSTRAINED` dims and `reduced` axes; these are
refused.

Devices are labelled with their platform and id, `"cpu:0"`, as shardwise labels them by default: the default
mesh of eight devices is the mesh of JAX's eight CPU devices. Axis types and memory kinds are left to JAX: they are
neither read nor kept.

The rules are those of JAX 0.10.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from .._arguments import instance
from .._text import counted, elements_text, shown
from ..array.sharded import ShardedArray
from ..errors import LayoutError, MeshError
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from ..rules.layout_map import LayoutMap
from ._axes import checked_layout, checked_mesh, checked_rank
from ._plain import whole_axes_layout

__all__ = [
    "from_array",
    "from_mesh",
    "from_named_sharding",
    "from_partition_rules",
    "from_partition_spec",
    "to_abstract_mesh",
    "to_array",
    "to_mesh",
    "to_named_sharding",
    "to_partition_rules",
    "to_partition_spec",
]

#: The most devices that JAX's compiled part can count.
_MOST_DEVICES = 2**31 - 1


def to_partition_spec(layout: TensorLayout) -> PartitionSpec:
    """Return the layout's `PartitionSpec`, with an entry for each dim; the layout needs no mesh.

    Raises:
        LayoutError: if the layout names sub-axes that do not make up a whole axis in order, because JAX has no
            sub-axes (`layout.refined()` gives the same layout without them); if a packed dim gives a device several
            segments.

    >>> to_partition_spec(TensorLayout(("data", None, ("x", "y")), unreduced=["z"]))
    P('data', None, ('x', 'y'), unreduced={'z'})
    """
    layout = whole_axes_layout(instance("layout", layout, TensorLayout), "JAX")
    # Only JAX 0.7 and later have unreduced axes.
    unreduced = {"unreduced": frozenset(layout.unreduced)} if layout.unreduced else {}
    return PartitionSpec(*layout.axes, **unreduced)


def from_partition_spec(spec: PartitionSpec, mesh: DeviceMesh | Mesh | AbstractMesh, rank: int) -> TensorLayout:
    """Read a `PartitionSpec` as a layout of a tensor of `rank` dims; dims that the spec leaves out are not cut.

    Raises:
        LayoutError: if the spec has more entries than `rank`, an `UNCONSTRAINED` one, or `reduced` axes.
        MeshError: if an axis of JAX's mesh is not named by a string.

    >>> from jax.sharding import PartitionSpec as P
    >>> from_partition_spec(P("x"), DeviceMesh((2, 2), ("x", "y")), rank=3).axes
    ('x', None, None)
    >>> from_partition_spec(P(P.UNCONSTRAINED), DeviceMesh((2,), ("x",)), rank=1)
    Traceback (most recent call last):
    shardwise.errors.LayoutError: spec leaves dim 0 UNCONSTRAINED, for the compiler to cut; a layout cannot express that
    """
    instance("spec", spec, PartitionSpec)
    own = mesh if isinstance(mesh, DeviceMesh) else from_mesh(mesh)
    dims = checked_rank(rank)
    unreduced, reduced = getattr(spec, "unreduced", ()), getattr(spec, "reduced", ())
    entries = tuple(getattr(spec, "partitions", spec))
    if reduced:
        raise LayoutError(
            f"spec has the reduced axes {sorted(reduced)}, which are about gradients only; a layout cannot express them"
        )
    if len(entries) > dims:
        raise LayoutError(
            f"spec {spec} has {counted(len(entries), 'entry', 'entries')}, but the tensor has {counted(dims, 'dim')}"
        )
    for dim, entry in enumerate(entries):
        if entry is PartitionSpec.UNCONSTRAINED:
            raise LayoutError(
                f"spec leaves dim {dim} UNCONSTRAINED, for the compiler to cut; a layout cannot express that"
            )
    summed = [name for name in own.axis_names if name in unreduced]
    if len(summed) < len(unreduced):
        raise LayoutError(
            f"spec {spec} is unreduced over an axis that the mesh does not have; its axes are {shown(own.axis_names)}"
        )
    return TensorLayout((*entries, *[None] * (dims - len(entries))), own, unreduced=summed)


def from_partition_rules(rules: Any, mesh: DeviceMesh | Mesh | AbstractMesh | None = None) -> LayoutMap:
    """Read an ordered list of regular expressions and `PartitionSpec`s; see `LayoutMap.from_partition_rules`.

    >>> from jax.sharding import PartitionSpec as P
    >>> from_partition_rules([("kernel", P("x")), (".*", P())])["dense/kernel"].axes
    ('x',)
    """
    own = mesh if mesh is None or isinstance(mesh, DeviceMesh) else from_mesh(mesh)
    return LayoutMap.from_partition_rules(rules, own)


def to_partition_rules(rules: LayoutMap) -> list[tuple[str, PartitionSpec]]:
    """Return a layout map as an ordered list of regular expressions and `PartitionSpec`s.

    The first expression that `re.search` finds in a path has its layout; a last one stands for the default.

    Raises:
        LayoutError: as `to_partition_spec`; if a rule has an uneven rule of its own.

    >>> rules = LayoutMap(default="replicated")
    >>> rules["kernel$"] = (None, "model")
    >>> to_partition_rules(rules)
    [('kernel$', P(None, 'model')), ('.*', P())]
    """
    pairs = instance("rules", rules, LayoutMap).partition_rules()
    return [(key, to_partition_spec(TensorLayout(axes))) for key, axes in pairs]


def to_mesh(mesh: DeviceMesh, axis_types: Any = None) -> Mesh:
    """Return the `jax.sharding.Mesh` over the devices of this host that the labels name.

    Args:
        mesh: a mesh whose labels are platforms and ids, as in `"cpu:0"`.
        axis_types: passed on to JAX.

    Raises:
        MeshError: if JAX has no such device.

    >>> dict(to_mesh(DeviceMesh((1, 1), ("x", "y"))).shape)
    {'x': 1, 'y': 1}
    """
    known: dict[str, dict[str, Any]] = {}
    labels = checked_mesh(mesh).devices
    devices = np.empty(mesh.size, object)
    for i, label in enumerate(labels.flat):
        platform = label.rpartition(":")[0] if isinstance(label, str) else ""
        if platform not in known:
            known[platform] = _devices(platform)
        if label not in known[platform]:
            present = ", ".join(map(_label, jax.devices()))
            raise MeshError(f"mesh has the device {shown(label)}, which JAX does not have; it has {present}")
        devices[i] = known[platform][label]
    return Mesh(devices.reshape(mesh.shape), mesh.axis_names, axis_types=axis_types)


def to_abstract_mesh(mesh: DeviceMesh, axis_types: Any = None) -> AbstractMesh:
    """Return the `jax.sharding.AbstractMesh`, which has no devices.

    Raises:
        MeshError: if the mesh has labels of its own, which an `AbstractMesh` cannot express.

    >>> dict(to_abstract_mesh(DeviceMesh((256, 16), ("data", "model"))).shape)
    {'data': 256, 'model': 16}
    """
    if not checked_mesh(mesh).has_default_devices:
        raise MeshError(f"an AbstractMesh has no devices, so it cannot express the labels of {shown(mesh)}")
    return AbstractMesh(mesh.shape, mesh.axis_names, axis_types=axis_types)


def from_mesh(mesh: Mesh | AbstractMesh) -> DeviceMesh:
    """Read a mesh of JAX; the devices are labelled `"platform:id"`, those of an `AbstractMesh` are the default ones.

    A `Mesh` may hold numbers or other labels instead of devices; they are kept.

    Raises:
        MeshError: if an axis is not named by a string, or the mesh has no axes.

    >>> from_mesh(AbstractMesh((2, 4), ("x", "y")))
    DeviceMesh((2, 4), ('x', 'y'))
    """
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise TypeError(f"mesh must be a Mesh or an AbstractMesh of JAX, got {type(mesh).__name__}")
    for name in mesh.axis_names:
        if not isinstance(name, str):
            raise MeshError(f"mesh has an axis named {shown(name)}; the axes of a DeviceMesh are named by strings")
    devices = None if isinstance(mesh, AbstractMesh) else [_label(device) for device in mesh.devices.flat]
    return DeviceMesh(tuple(mesh.axis_sizes), mesh.axis_names, devices)


def to_named_sharding(layout: TensorLayout, *, abstract: bool = False) -> NamedSharding:
    """Return the layout's `NamedSharding`, over the devices present or, if `abstract`, over an `AbstractMesh`.

    Raises:
        LayoutError: if the layout has no mesh.
        MeshError: if JAX does not have a device of the mesh, or the mesh has more devices than a `NamedSharding` can
            count, in 32 bits; see also `to_abstract_mesh`.

    >>> layout = TensorLayout(("data", "model"), DeviceMesh((256, 16), ("data", "model")))
    >>> to_named_sharding(layout, abstract=True).shard_shape((1024, 64))
    (4, 4)
    """
    layout, mesh = checked_layout(layout)
    if mesh.size > _MOST_DEVICES:
        raise MeshError(f"a NamedSharding has at most {_MOST_DEVICES} devices, but {shown(mesh)} has {mesh.size}")
    # JAX has unreduced values on axes of this type only.
    types = (AxisType.Explicit,) * mesh.ndim if layout.unreduced else None
    made = to_abstract_mesh(mesh, types) if abstract else to_mesh(mesh, types)
    return NamedSharding(made, to_partition_spec(layout))


def from_named_sharding(sharding: Sharding, rank: int) -> TensorLayout:
    """Read a `NamedSharding` as a layout of a tensor of `rank` dims.

    Raises:
        LayoutError: if `sharding` is of another kind, or has its own order of devices; see also `from_partition_spec`.

    >>> from jax.sharding import PartitionSpec as P
    >>> from_named_sharding(NamedSharding(AbstractMesh((2,), ("x",)), P("x")), rank=2)
    TensorLayout(('x', None), DeviceMesh((2,), ('x',)))
    """
    if not isinstance(sharding, Sharding):
        raise TypeError(f"sharding must be a NamedSharding, got {type(sharding).__name__}")
    if not isinstance(sharding, NamedSharding):
        raise LayoutError(f"sharding is a {type(sharding).__name__}, which has no named axes; give a NamedSharding")
    if getattr(sharding, "_logical_device_ids", None) is not None:
        raise LayoutError(
            f"sharding {sharding} has an order of devices other than its mesh's; a layout cannot express it"
        )
    return from_partition_spec(sharding.spec, sharding.mesh, rank)


def to_array(sharded: ShardedArray) -> jax.Array:
    """Return a `jax.Array` of the shards, on the devices of the mesh.

    On CPU devices JAX shares the memory of a shard that is C-contiguous and begins at a multiple of 64 bytes; the array
    then changes with the shard, so do not write to the shard any more. Everything else is copied. In a program of
    several processes each gives the shards of its own devices.

    Raises:
        LayoutError: if a dim does not divide, which JAX refuses, or if JAX would narrow the dtype.
        MeshError: if JAX does not have a device of the mesh.

    >>> from shardwise import distribute_tensor
    >>> layout = TensorLayout(("x", None), DeviceMesh((1,), ("x",)))
    >>> to_array(distribute_tensor(np.arange(4, dtype=np.int32).reshape(2, 2), layout)).tolist()
    [[0, 1], [2, 3]]
    """
    instance("sharded", sharded, ShardedArray)
    partition = sharded.partition
    for dim, (size, count) in enumerate(zip(partition.shape, partition.num_shards, strict=True)):
        if size % count:
            raise LayoutError(
                f"dim {dim} of {elements_text(size)} is cut into {count}; JAX has arrays of equal shards only"
            )
    kept = jax.dtypes.canonicalize_dtype(sharded.dtype)
    if kept != sharded.dtype:
        raise LayoutError(f"JAX would convert {sharded.dtype} to {kept}; set jax_enable_x64 to keep 64 bits")
    sharding = to_named_sharding(sharded.layout)
    devices, here = sharding.mesh.devices.flat, jax.process_index()
    placed = [
        jax.device_put(shard.data, device)
        for shard, device in zip(sharded.shards, devices, strict=True)
        if device.process_index == here
    ]
    return jax.make_array_from_single_device_arrays(sharded.shape, sharding, placed)


def from_array(array: jax.Array) -> ShardedArray:
    """Return the shards of a `jax.Array` as numpy arrays.

    On CPU devices they are read-only views of JAX's memory; from other devices they are copied.

    Raises:
        LayoutError: if the array does not have a `NamedSharding`, or other processes hold shards of it; see also
            `from_partition_spec`.

    >>> layout = TensorLayout(("x",), DeviceMesh((1,), ("x",)))
    >>> from_array(jax.device_put(np.arange(3, dtype=np.int32), to_named_sharding(layout)))
    <ShardedArray (3,) int32, TensorLayout(('x',), DeviceMesh((1,), ('x',)))>
    """
    if not isinstance(array, jax.Array):
        raise TypeError(f"array must be a jax.Array, got {type(array).__name__}")
    if not array.is_fully_addressable:
        raise LayoutError("array has shards on devices of other processes, which this one cannot read")
    layout = from_named_sharding(array.sharding, array.ndim)
    on = {shard.device: shard.data for shard in array.addressable_shards}
    return ShardedArray(
        layout.partition(array.shape), [np.asarray(on[device]) for device in array.sharding.mesh.devices.flat]
    )


def _label(device: Any) -> Any:
    """Return the label of a device; of what is no device of JAX, which a `Mesh` may hold too, it is that itself."""
    if hasattr(device, "platform"):
        return f"{device.platform}:{device.id}"
    return device.item() if isinstance(device, np.generic) else device


def _devices(platform: str) -> dict[str, Any]:
    """Return the devices of a platform by their labels; none if JAX does not know the platform."""
    try:
        return {_label(device): device for device in jax.devices(platform or None)}
    except RuntimeError:
        return {}
