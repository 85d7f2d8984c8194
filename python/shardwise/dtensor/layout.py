"""The layout of the DTensor dialect, after TensorFlow's `tf.experimental.dtensor.Layout`."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from .._arguments import instance
from .._core import DtensorLayout, DtensorMesh
from .._text import counted, shown
from ..errors import LayoutError
from ..layout import TensorLayout, UnevenRule
from ..packed import PackedDim
from ..sub_axis import is_sub_axis
from .mesh import Mesh
from .proto import LayoutProto, MeshProto, SerializableMessage, message_bytes

if TYPE_CHECKING:
    from ..partition import Partition

__all__ = ["MATCH", "UNSHARDED", "Layout", "LayoutType"]

UNSHARDED = "unsharded"
"""The spec of a dim that is not cut."""

MATCH = "match"
"""The spec of a dim that keeps its cut when `relayout` changes the layout of a tensor; at most one dim may have it."""


class LayoutType(enum.IntEnum):
    """The form of a layout, numbered as in TensorFlow's `LayoutType` (its message numbers it differently).

    >>> LayoutType.PARTED.value
    3
    """

    EMPTY = 0
    STATIC = 1
    SINGLE_DEVICE = 2
    PARTED = 3


class Layout:
    """The mesh axis that cuts each dim of a tensor; immutable.

    Args:
        sharding_specs: For each dim the name of a mesh axis, `UNSHARDED` or `MATCH`; at most 254, TensorFlow's limit of
            dims.
        mesh: A mesh with axes.

    Raises:
        LayoutError: if a spec names no mesh axis, an axis or `MATCH` is used on two dims, or `mesh` is not a mesh with
            axes.

    >>> mesh = Mesh.from_string("|x=3,y=2|0,1,2,3,4,5|0,1,2,3,4,5|TPU:0,TPU:1,TPU:2,TPU:3,TPU:4,TPU:5")
    >>> layout = Layout(["x", UNSHARDED], mesh)
    >>> layout.num_shards(0), layout.local_shape_from_global_shape((6, 5))
    (3, (2, 5))
    >>> layout.offset_to_shard()
    [(0, 0), (0, 0), (1, 0), (1, 0), (2, 0), (2, 0)]
    """

    __slots__ = ("__weakref__", "_inner", "_mesh", "_tensor_layout")

    _inner: DtensorLayout
    _mesh: Mesh
    #: Made when it is asked for.
    _tensor_layout: TensorLayout | None

    def __init__(self, sharding_specs: Sequence[str], mesh: Mesh) -> None:
        if isinstance(sharding_specs, str) or not isinstance(sharding_specs, Iterable):
            raise TypeError(f"sharding_specs must be a list of str, got {type(sharding_specs).__name__}")
        self._tensor_layout = None
        self._inner = DtensorLayout.new(list(sharding_specs), _mesh_core(mesh))
        self._mesh = mesh

    @classmethod
    def _of(cls, core: DtensorLayout, mesh: Mesh | None = None) -> Layout:
        layout = cls.__new__(cls)
        layout._tensor_layout = None
        layout._inner = core
        layout._mesh = Mesh._of(core.mesh) if mesh is None else mesh
        return layout

    @classmethod
    def from_string(cls, layout_str: str) -> Layout:
        """Read the text form, which `to_string` writes.

        Raises:
            ParseError: if the text does not follow the format; the message says at which byte.
            MeshError, LayoutError: if the text does not describe a mesh or a layout.

        >>> Layout.from_string("sharding_specs:x,unsharded, mesh:|x=2|0,1|0,1|CPU:0,CPU:1").sharding_specs
        ['x', 'unsharded']
        """
        return cls._of(DtensorLayout.from_text(layout_str))

    @classmethod
    def from_proto(cls, layout_proto: SerializableMessage) -> Layout:
        """Take the layout of a `LayoutProto`: ours, TensorFlow's, or any message that gives the same bytes.

        Raises:
            ParseError: if the bytes are not such a message; the message names the byte.
            MeshError, LayoutError: if the message does not describe a mesh or a layout.

        >>> layout = Layout.from_string("sharding_specs:x, mesh:|x=2|0,1|0,1|CPU:0,CPU:1")
        >>> Layout.from_proto(layout.as_proto()) == layout
        True
        """
        return cls._of(DtensorLayout.from_bytes(message_bytes("layout_proto", layout_proto)))

    @classmethod
    def from_str(cls, layout_str: bytes) -> Layout:
        """Read the bytes that `serialized_string` writes.

        Raises:
            ParseError, MeshError, LayoutError: as `from_proto`.

        >>> layout = Layout.from_string("sharding_specs:x, mesh:|x=2|0,1|0,1|CPU:0,CPU:1")
        >>> Layout.from_str(layout.serialized_string()) == layout
        True
        """
        if not isinstance(layout_str, bytes):
            raise TypeError(f"layout_str must be bytes, got {type(layout_str).__name__}")
        return cls._of(DtensorLayout.from_bytes(layout_str))

    @classmethod
    def from_device(cls, device: str) -> Layout:
        """Return the layout of a tensor on one device.

        >>> Layout.from_device("CPU:0").to_string()
        'maximal:true, mesh:CPU:0'
        """
        return cls.from_single_device_mesh(Mesh.from_device(device))

    @classmethod
    def from_single_device_mesh(cls, mesh: Mesh) -> Layout:
        """Return the layout of a tensor on the one device of `mesh`.

        Raises:
            LayoutError: if the mesh is not of the form of `Mesh.from_device`.

        >>> Layout.from_single_device_mesh(Mesh.from_device("CPU:0")).is_single_device()
        True
        """
        return cls._of(DtensorLayout.on_single_device(_mesh_core(mesh)), mesh)

    @classmethod
    def replicated(cls, mesh: Mesh, rank: int) -> Layout:
        """Return the layout of `rank` dims that cuts none of them.

        Raises:
            LayoutError: if the rank is not 0 to 254, or the mesh has no axes.

        >>> Layout.replicated(Mesh.from_string("|x=1|0|0|CPU:0"), 2).sharding_specs
        ['unsharded', 'unsharded']
        """
        return cls._of(DtensorLayout.replicated(_mesh_core(mesh), rank), mesh)

    @classmethod
    def batch_sharded(cls, mesh: Mesh, batch_dim: str, rank: int, axis: int = 0) -> Layout:
        """Return the layout of `rank` dims that cuts the dim `axis` by the mesh axis `batch_dim`.

        Raises:
            LayoutError: if the dim is outside the rank, the mesh does not have the axis, or `replicated` raises.

        >>> Layout.batch_sharded(Mesh.from_string("|x=1|0|0|CPU:0"), "x", 3).sharding_specs
        ['x', 'unsharded', 'unsharded']
        """
        return cls._of(DtensorLayout.cut_at(_mesh_core(mesh), batch_dim, rank, axis), mesh)

    @classmethod
    def inner_sharded(cls, mesh: Mesh, inner_dim: str, rank: int) -> Layout:
        """Return the layout of `rank` dims that cuts the last of them by the mesh axis `inner_dim`.

        >>> Layout.inner_sharded(Mesh.from_string("|x=1|0|0|CPU:0"), "x", 3).sharding_specs
        ['unsharded', 'unsharded', 'x']
        """
        return cls.batch_sharded(mesh, inner_dim, rank, axis=rank - 1)

    @classmethod
    def from_tensor_layout(cls, layout: TensorLayout, mesh: Mesh | None = None) -> Layout:
        """Return the layout of the same cuts in this dialect, over `mesh` or over the layout's own mesh.

        Raises:
            LayoutError: if this dialect cannot express it: several axes on one dim, sub-axes, unreduced axes; if there
                is no mesh, or the axes of `mesh` are not the layout's.

        >>> from shardwise import DeviceMesh
        >>> layout = TensorLayout(("x", None), DeviceMesh((2,), ["x"]))
        >>> Layout.from_tensor_layout(layout).to_string()
        'sharding_specs:x,unsharded, mesh:|x=2|0,1|0,1|cpu:0,cpu:1'
        """
        instance("layout", layout, TensorLayout)
        specs = []
        names = () if layout.device_mesh is None else layout.device_mesh.axis_names
        for dim, axes in enumerate(layout.axes):
            if isinstance(axes, PackedDim):
                raise LayoutError(f"axes[{dim}] is {shown(axes)}; a DTensor layout has no packed dims")
            if isinstance(axes, str) and is_sub_axis(axes, names):
                raise LayoutError(f"axes[{dim}] is the sub-axis {axes!r}; a DTensor layout has whole mesh axes only")
            if isinstance(axes, tuple):
                raise LayoutError(f"axes[{dim}] is {shown(axes)}; a DTensor layout cuts a dim by one mesh axis at most")
            specs.append(UNSHARDED if axes is None else axes)
        if layout.unreduced:
            raise LayoutError(f"unreduced is {shown(layout.unreduced)}; a DTensor layout has no unreduced axes")
        own = layout.device_mesh
        if mesh is None:
            if own is None:
                raise LayoutError("the layout has no device_mesh, and no mesh was given")
            mesh = Mesh.from_device_mesh(own)
        elif not isinstance(mesh, Mesh):
            raise TypeError(f"mesh must be a dtensor.Mesh, got {type(mesh).__name__}")
        elif own is not None and (tuple(mesh.dim_names), tuple(mesh.shape())) != (own.axis_names, own.shape):
            raise LayoutError(f"mesh is {shown(mesh)}, whose axes are not those of the layout's {shown(own)}")
        return cls(specs, mesh)

    def to_tensor_layout(self) -> TensorLayout:
        """Return the layout of the same cuts in the main dialect.

        Raises:
            LayoutError: if that dialect cannot express it: a parted, empty or single-device layout, or `MATCH`.

        >>> Layout.from_string("sharding_specs:x,unsharded, mesh:|x=2|0,1|0,1|CPU:0,CPU:1").to_tensor_layout().axes
        ('x', None)
        """
        if self.type is not LayoutType.STATIC:
            raise LayoutError(f"a TensorLayout is static; it cannot express a layout of type {self.type.name}")
        return self._cuts()

    def _cuts(self) -> TensorLayout:
        if self._tensor_layout is None:
            if self.type in (LayoutType.EMPTY, LayoutType.SINGLE_DEVICE):
                raise LayoutError(f"a layout of type {self.type.name} has no axes")
            self._inner.all_num_shards()  # refuses layouts that leave open how a dim is cut
            axes = tuple(None if spec == UNSHARDED else spec for spec in self.sharding_specs)
            self._tensor_layout = TensorLayout(axes, self.mesh.to_device_mesh())
        return self._tensor_layout

    def partition(self, shape: Sequence[int], uneven: UnevenRule = "even") -> Partition:
        """Apply the layout to a shape, and return the `Partition`; devices are named as in `to_device_mesh`.

        Raises:
            LayoutError: if the shape's rank is not the layout's, a dim does not divide under the rule, or the layout
                has no cuts.

        >>> mesh = Mesh.from_string("|x=2|0,1|0,1|CPU:0,CPU:1")
        >>> Layout(["x"], mesh).partition((6,)).box("CPU:1")
        (slice(3, 6, None),)
        """
        return self._cuts().partition(shape, uneven)

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self._mesh

    @property
    def sharding_specs(self) -> list[str]:
        """The sharding specs, one per dim."""
        return self._inner.specs

    @property
    def rank(self) -> int:
        """The number of dims; 0 for a single-device layout, which fits tensors of any rank."""
        return self._inner.rank

    @property
    def shape(self) -> list[int]:
        """The mesh's shape, as in TensorFlow; not that of a tensor."""
        return self.mesh.shape()

    @property
    def type(self) -> LayoutType:
        """The form of the layout."""
        return LayoutType(self._inner.layout_type)

    def is_fully_replicated(self) -> bool:
        """Return whether no dim is cut; a tensor on one device is not replicated.

        >>> Layout.replicated(Mesh.from_string("|x=1|0|0|CPU:0"), 2).is_fully_replicated()
        True
        """
        return self._inner.is_fully_replicated()

    def is_batch_parallel(self) -> bool:
        """Return whether the first dim is cut and no other.

        >>> Layout.batch_sharded(Mesh.from_string("|x=1|0|0|CPU:0"), "x", 2).is_batch_parallel()
        True
        """
        return self._inner.is_batch_parallel()

    def is_single_device(self) -> bool:
        """Return whether this is the layout of a tensor on one device."""
        return self.type is LayoutType.SINGLE_DEVICE

    def num_shards(self, idx: int) -> int:
        """Return the number of shards along the dim `idx`.

        Raises:
            LayoutError: if the layout does not have the dim, or `MATCH` leaves it open.

        >>> Layout(["x", UNSHARDED], Mesh.from_string("|x=2|0,1|0,1|CPU:0,CPU:1")).num_shards(0)
        2
        """
        return self._inner.num_shards(idx)

    def delete(self, dims: int | Iterable[int]) -> Layout:
        """Return the layout without the dim or the dims `dims`; it keeps its type.

        Raises:
            LayoutError: if the layout does not have a dim.

        >>> Layout(["x", UNSHARDED], Mesh.from_string("|x=1|0|0|CPU:0")).delete(0).sharding_specs
        ['unsharded']
        """
        listed = dims if isinstance(dims, Iterable) else [dims]
        return Layout._of(self._inner.delete(listed), self.mesh)

    def to_parted(self) -> Layout:
        """Return the parted layout of the same cuts: TensorFlow treats its dims as independent.

        Raises:
            LayoutError: if the layout has no mesh with axes.

        >>> Layout(["x"], Mesh.from_string("|x=1|0|0|CPU:0")).to_parted().to_string()
        'parted:x, mesh:|x=1|0|0|CPU:0'
        """
        return Layout._of(self._inner.to_parted(), self.mesh)

    def offset_to_shard(self) -> list[tuple[int, ...]]:
        """Return the shard index of every device, in row-major order of the mesh.

        Raises:
            LayoutError: if `MATCH` leaves the layout open, or it has no axes.

        >>> Layout(["y"], Mesh.from_string("|x=2,y=2|0,1,2,3|0|CPU:0")).offset_to_shard()
        [(0,), (1,), (0,), (1,)]
        """
        return self._inner.offset_to_shard()

    @overload
    def offset_tuple_to_global_index(self, offset_tuple: Sequence[int]) -> int: ...
    @overload
    def offset_tuple_to_global_index(self, offset_tuple: NDArray[Any]) -> Any: ...
    def offset_tuple_to_global_index(self, offset_tuple: Sequence[int] | NDArray[Any]) -> Any:
        """Return the shard id of a shard index: its row-major number among the shards.

        An array of (n, rank) gives the n ids as an int64 array.

        Raises:
            IndexError: if a number is outside the shards of its dim.
            LayoutError: if the index has not one entry per dim, or `MATCH` leaves the layout open.

        >>> layout = Layout(["x", "y"], Mesh.from_string("|x=2,y=3|0,1,2,3,4,5|0|CPU:0"))
        >>> layout.offset_tuple_to_global_index((1, 2))
        5
        >>> layout.offset_tuple_to_global_index(np.array([[0, 2], [1, 0]]))
        array([2, 3])
        """
        return self._inner.shard_id(offset_tuple)

    def unravel(self, unpacked_tensors: Sequence[Any]) -> NDArray[np.object_]:
        """Arrange one tensor per device by shard index, in an object array of the number of shards per dim.

        Raises:
            LayoutError: if there is not one tensor per device of the mesh.

        >>> layout = Layout(["y"], Mesh.from_string("|x=2,y=2|0,1,2,3|0|CPU:0"))
        >>> layout.unravel(["a", "b", "a", "b"])
        array(['a', 'b'], dtype=object)
        """
        if len(unpacked_tensors) != self.mesh.size:
            raise LayoutError(
                f"unpacked_tensors has {counted(len(unpacked_tensors), 'entry', 'entries')} but the mesh has "
                f"{counted(self.mesh.size, 'device')}"
            )
        arranged = np.empty(self._inner.all_num_shards(), dtype=object)
        for index, tensor in zip(self.offset_to_shard(), unpacked_tensors, strict=True):
            arranged[index] = tensor
        return arranged

    def global_shape_from_local_shape(self, local_shape: Iterable[int | None]) -> tuple[int, ...]:
        """Return the shape of the tensor of which every device holds `local_shape`; -1 or `None` is an unknown size.

        Raises:
            LayoutError: if the shape's rank is not the layout's, a size is below -1, or `MATCH` leaves the layout open.
            SizeOverflowError: if a size is over 2**63 - 1.

        >>> layout = Layout(["x", UNSHARDED], Mesh.from_string("|x=2|0,1|0,1|CPU:0,CPU:1"))
        >>> layout.global_shape_from_local_shape((3, -1))
        (6, -1)
        """
        return self._inner.global_shape(local_shape)

    def local_shape_from_global_shape(self, global_shape: Iterable[int | None]) -> tuple[int, ...]:
        """Return the shape that every device holds of a tensor of `global_shape`; -1 or `None` is an unknown size.

        Raises:
            LayoutError: if the layout's shards do not divide a size, the shape's rank is not the layout's, a size is
                below -1, or `MATCH` leaves the layout open.

        >>> layout = Layout(["x"], Mesh.from_string("|x=2|0,1|0,1|CPU:0,CPU:1"))
        >>> layout.local_shape_from_global_shape((6,))
        (3,)
        >>> layout.local_shape_from_global_shape((7,))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        shardwise.errors.LayoutError: dim 0 has 7 elements, which 2 shards do not divide evenly...
        """
        return self._inner.local_shape(global_shape)

    def to_string(self) -> str:
        """Write the text form, which `from_string` reads.

        >>> Layout(["x", UNSHARDED], Mesh.from_string("m|x=1|0|0|CPU:0")).to_string()
        'sharding_specs:x,unsharded, mesh:m|x=1|0|0|CPU:0'
        """
        return self._inner.to_text()

    def as_proto(self) -> LayoutProto:
        """Return the layout as a message, whose bytes are TensorFlow's.

        >>> Layout.replicated(Mesh.from_string("m|x=1|0|0|CPU:0"), 1).as_proto().sharding_specs
        (ShardingSpec(sharding_spec='unsharded'),)
        """
        return LayoutProto.FromString(self._inner.to_bytes())

    def mesh_proto(self) -> MeshProto:
        """Return the mesh as a message.

        >>> Layout.from_device("CPU:0").mesh_proto().single_device
        'CPU:0'
        """
        return self.mesh.as_proto()

    def serialized_string(self) -> bytes:
        r"""Write the bytes of `as_proto`, which `from_str` reads.

        >>> Layout.from_device("CPU:0").serialized_string()
        b'\x12\x07B\x05CPU:0\x18\x03'
        """
        return self._inner.to_bytes()

    def __eq__(self, other: object) -> bool:
        return self._inner == other._inner if isinstance(other, Layout) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._inner)

    def __repr__(self) -> str:
        return f"Layout.from_string({self.to_string()!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout.from_string, (self.to_string(),)


def _mesh_core(mesh: Mesh) -> DtensorMesh:
    # TensorFlow raises a ValueError here, and programs that catch it should go on working.
    if not isinstance(mesh, Mesh):
        raise LayoutError(f"mesh is not a valid Mesh object. It is a {type(mesh).__name__}")
    return mesh._inner
