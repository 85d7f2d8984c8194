"""The mesh of the DTensor dialect, after TensorFlow's `tf.experimental.dtensor.Mesh`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .._arguments import instance, int64_array
from .._core import DtensorMesh
from .._text import shown
from ..errors import MeshError
from ..mesh import DeviceMesh
from .proto import MeshProto, SerializableMessage, message_bytes

__all__ = ["Device", "Mesh", "MeshDimension"]

#: The most dims of a numpy array, and the most axes of a TensorFlow mesh.
_MAX_AXES = 64


class MeshDimension(NamedTuple):
    """Name and size of a mesh axis."""

    name: str
    size: int


class Device(Protocol):
    """Anything that names a device: a `DeviceSpec`, TensorFlow's or ours."""

    def to_string(self) -> str:
        """Return the device's name."""
        ...


class Mesh:
    """Named axes over devices, of which this client holds some; immutable.

    Args:
        dim_names: The axis names, at most 64: not `unsharded`, `match` or `any`, and without `|`, `,`, `=`, `:` and
            NUL.
        global_device_ids: An array of the mesh's shape with the ids of all devices, which go up by one in row-major
            order, usually from 0.
        local_device_ids: The ids of the devices that this client holds.
        local_devices: The names of those devices, as strings or as anything with `to_string()`, all of one type.
        mesh_name: A name of the mesh's own, under the same rules as those of the axes; may be empty.
        global_devices: The names of all devices, in row-major order, when they are known; needed when none is local.
        use_xla_spmd: Whether XLA partitions programs; only for TPUs.

    Raises:
        MeshError: if names, ids and devices are inconsistent. One host CPU may be given for every position; otherwise
            no device may be given twice.
        SizeOverflowError: if an id or the number of devices is over 2**63 - 1.

    >>> mesh = Mesh(["x", "y"], np.arange(4).reshape(2, 2), [0, 1, 2, 3], ["CPU:0", "CPU:1", "CPU:2", "CPU:3"])
    >>> mesh.shape(), mesh.strides, mesh.size
    ([2, 2], [2, 1], 4)
    >>> mesh
    Mesh.from_string('|x=2,y=2|0,1,2,3|0,1,2,3|CPU:0,CPU:1,CPU:2,CPU:3')
    """

    __slots__ = ("__weakref__", "_device_mesh", "_host_mesh", "_inner")

    _inner: DtensorMesh
    #: The two meshes are made when they are asked for.
    _device_mesh: DeviceMesh | None
    _host_mesh: Mesh | None

    def __init__(
        self,
        dim_names: Sequence[str],
        global_device_ids: ArrayLike,
        local_device_ids: Sequence[int] | NDArray[Any],
        local_devices: Sequence[str | Device] | NDArray[Any],
        mesh_name: str = "",
        global_devices: Sequence[str | Device] | NDArray[Any] | None = None,
        use_xla_spmd: bool = False,
    ) -> None:
        self._device_mesh = self._host_mesh = None
        ids = int64_array("global_device_ids", global_device_ids)
        if not isinstance(use_xla_spmd, bool | np.bool_):
            raise TypeError(f"use_xla_spmd must be a bool, got {type(use_xla_spmd).__name__}")
        self._inner = DtensorMesh.new(
            _listed("dim_names", dim_names),
            list(ids.shape),
            ids.ravel(),
            _listed("local_device_ids", local_device_ids),
            _listed("local_devices", local_devices),
            mesh_name,
            _listed("global_devices", () if global_devices is None else global_devices),
            bool(use_xla_spmd),
        )

    @classmethod
    def _of(cls, core: DtensorMesh) -> Mesh:
        mesh = cls.__new__(cls)
        mesh._device_mesh = mesh._host_mesh = None
        mesh._inner = core
        return mesh

    @classmethod
    def from_string(cls, mesh_str: str) -> Mesh:
        """Read the text form, which `to_string` writes.

        Raises:
            ParseError: if the text does not follow the format; the message says at which byte.
            MeshError: if the text does not describe a mesh.

        >>> Mesh.from_string("m|x=2|0,1|0,1|CPU:0,CPU:1").name
        'm'
        >>> Mesh.from_string("m|x=two|0,1|0,1|CPU:0,CPU:1")
        Traceback (most recent call last):
        shardwise.errors.ParseError: mesh text, byte 4: "two" is not a decimal number
        """
        return cls._of(DtensorMesh.from_text(mesh_str))

    @classmethod
    def from_proto(cls, proto: SerializableMessage) -> Mesh:
        """Take the mesh of a `MeshProto`: ours, TensorFlow's, or any message that gives the same bytes.

        Raises:
            ParseError: if the bytes are not such a message; the message names the byte.
            MeshError: if the message does not describe a mesh.

        >>> mesh = Mesh.from_string("m|x=2|0,1|0,1|CPU:0,CPU:1")
        >>> Mesh.from_proto(mesh.as_proto()) == mesh
        True
        """
        return cls._of(DtensorMesh.from_bytes(message_bytes("proto", proto)))

    @classmethod
    def from_device(cls, device: str) -> Mesh:
        """Return the mesh of one device; it has no axes.

        Raises:
            MeshError: if the text is not a device name, or lacks the device type.

        >>> Mesh.from_device("/job:localhost/task:0/device:CPU:0").is_single_device()
        True
        """
        return cls._of(DtensorMesh.from_device(device))

    @classmethod
    def from_device_mesh(cls, device_mesh: DeviceMesh, mesh_name: str = "") -> Mesh:
        """Return the mesh of the same axes and devices, all of them local, with ids from 0.

        Raises:
            MeshError: if labels are not device names, or this dialect does not allow a name.

        >>> Mesh.from_device_mesh(DeviceMesh((2,), ["x"])).to_string()
        '|x=2|0,1|0,1|cpu:0,cpu:1'
        """
        instance("device_mesh", device_mesh, DeviceMesh)
        if device_mesh.ndim > _MAX_AXES:
            raise MeshError(f"device_mesh has {device_mesh.ndim} axes; a mesh of this dialect has at most {_MAX_AXES}")
        devices = list(device_mesh.labels())
        ids = np.arange(device_mesh.size)
        return cls(device_mesh.axis_names, ids.reshape(device_mesh.shape), ids.tolist(), devices, mesh_name)

    def to_device_mesh(self) -> DeviceMesh:
        """Return the mesh of the same axes in the main dialect.

        The names of all devices, where these are known and differ, are the labels of the new mesh. Otherwise, when this
        client knows only its own, or they are all one host CPU, the labels are `/device:TYPE:id`.

        Raises:
            MeshError: if the mesh has no axes.

        >>> Mesh.from_string("|x=2|4,5|5|TPU:1").to_device_mesh().devices.tolist()
        ['/device:TPU:4', '/device:TPU:5']
        """
        if self._device_mesh is None:
            if self.size == 0:
                raise MeshError(f"{shown(self)} has no axes; a DeviceMesh needs at least one")
            self._device_mesh = DeviceMesh(tuple(self.shape()), self.dim_names, self._labels())
        return self._device_mesh

    def _labels(self) -> list[str]:
        first = self._inner.first_global_id
        labels = self.global_devices()
        if not labels and self.num_local_devices() == self.size:
            by_id = dict(zip(self.local_device_ids(), self.local_devices(), strict=True))
            labels = [by_id[first + index] for index in range(self.size)]
        if len(set(labels)) == self.size:
            return labels
        return [f"/device:{self.device_type()}:{first + index}" for index in range(self.size)]

    @property
    def dim_names(self) -> list[str]:
        """The axis names, major first."""
        return self._inner.dim_names

    @property
    def name(self) -> str:
        """The mesh's own name, often empty."""
        return self._inner.name

    @property
    def size(self) -> int:
        """The number of positions; 0 for a mesh without axes, also that of a single device."""
        return self._inner.size

    @property
    def strides(self) -> list[int]:
        """The growth of the device index along each axis: `[bcd, cd, d, 1]` for the shape `[a, b, c, d]`."""
        return self._inner.strides

    @property
    def single_device(self) -> str:
        """The device of a mesh of one device; empty for any other mesh."""
        return self._inner.single_device or ""

    def is_single_device(self) -> bool:
        """Return whether the mesh is one device without axes."""
        return self._inner.single_device is not None

    def shape(self) -> list[int]:
        """Return the axis sizes, major first."""
        return self._inner.shape

    def contains_dim(self, dim_name: str) -> bool:
        """Return whether the mesh has an axis of this name.

        >>> mesh = Mesh.from_string("|x=2|0,1|0,1|CPU:0,CPU:1")
        >>> mesh.contains_dim("x"), "y" in mesh
        (True, False)
        """
        if not isinstance(dim_name, str):
            raise TypeError(f"dim_name must be a str, got {type(dim_name).__name__}")
        return dim_name in self._inner.dim_names

    __contains__ = contains_dim

    def dim_size(self, dim_name: str) -> int:
        """Return the size of an axis.

        Raises:
            MeshError: if the mesh does not have the axis.
        """
        if not self.contains_dim(dim_name):
            raise MeshError(f"dim_name is {shown(dim_name)}; the axes of the mesh are {self.dim_names}")
        return self._inner.shape[self._inner.dim_names.index(dim_name)]

    def __getitem__(self, dim_name: str) -> MeshDimension:
        return MeshDimension(dim_name, self.dim_size(dim_name))

    def device_type(self) -> str:
        """Return the type of the devices, such as `"CPU"`; empty for the empty mesh."""
        return self._inner.device_type

    def use_xla_spmd(self) -> bool:
        """Return whether XLA partitions programs, rather than DTensor."""
        return self._inner.use_xla_spmd

    def is_remote(self) -> bool:
        """Return whether this client holds none of the devices."""
        return self.num_local_devices() == 0 and self.size > 0

    def num_local_devices(self) -> int:
        """Return the number of devices that this client holds."""
        return self._inner.num_local_devices

    def min_global_device_id(self) -> int:
        """Return the smallest device id.

        Raises:
            MeshError: if the mesh has no axes, and so no ids.

        >>> Mesh.from_string("|x=2|4,5|5|CPU:0").min_global_device_id()
        4
        """
        if self.size == 0:
            raise MeshError(f"{shown(self)} has no axes, and so no device ids")
        return self._inner.first_global_id

    def global_device_ids(self) -> NDArray[np.int64]:
        """Return the ids of all devices, as a read-only int64 array of the mesh's shape (of shape (0,) without axes).

        >>> Mesh.from_string("|x=2,y=1|4,5|5|CPU:0").global_device_ids()
        array([[4],
               [5]])
        """
        first = self._inner.first_global_id
        ids = np.arange(first, first + self.size, dtype=np.int64).reshape(self._inner.shape or [0])
        ids.flags.writeable = False
        return ids

    def global_devices(self) -> list[str]:
        """Return the names of all devices, or an empty list if they were not given."""
        return self._inner.global_devices()

    def local_device_ids(self) -> list[int]:
        """Return the ids of the devices that this client holds."""
        return self._inner.local_ids()

    def local_devices(self) -> list[str]:
        """Return the names of the devices that this client holds, in the order of their ids in `local_device_ids`."""
        return self._inner.local_devices()

    def local_device_locations(self) -> list[dict[str, int]]:
        """Return the position of each device that this client holds, as a dict from axis name to index.

        >>> Mesh.from_string("|x=2,y=2|4,5,6,7|7,5|CPU:3,CPU:1").local_device_locations()
        [{'x': 1, 'y': 1}, {'x': 0, 'y': 1}]
        """
        return self._inner.local_device_locations()

    def unravel_index(self) -> dict[int, dict[str, int]]:
        """Return the position of every device by its id, as a dict from axis name to index; see `coordinates`.

        >>> Mesh.from_string("|x=2,y=2|0,1,2,3|0|CPU:0").unravel_index()
        {0: {'x': 0, 'y': 0}, 1: {'x': 0, 'y': 1}, 2: {'x': 1, 'y': 0}, 3: {'x': 1, 'y': 1}}
        """
        return self._inner.unravel_index()

    def coordinates(self) -> NDArray[np.int64]:
        """Return the coordinates of all devices in row-major order, as an int64 array of (devices, axes)."""
        return self._inner.coordinates()

    def coords(self, device_idx: int | NDArray[Any]) -> NDArray[np.int64]:
        """Return the coordinate of a device index, `(device_idx // strides) % shape`, as an int64 array of (axes,).

        Indices past the last device wrap around, as in TensorFlow. An array of indices gives an array of their shape
        with one more dim.

        >>> mesh = Mesh.from_string("|x=2,y=2|0,1,2,3|0|CPU:0")
        >>> mesh.coords(2), mesh.coords(6)
        (array([1, 0]), array([1, 0]))
        >>> mesh.coords(np.array([1, 2])).tolist()
        [[0, 1], [1, 0]]
        """
        if isinstance(device_idx, np.ndarray):
            indices = int64_array("device_idx", device_idx)
            return self._inner.coords_of(indices.ravel()).reshape(*indices.shape, len(self.dim_names))
        return self._inner.coords(device_idx)

    def device_location(self, device_id: int) -> list[int]:
        """Return the coordinate of a device index, counted from 0 (TensorFlow calls it an id).

        Raises:
            IndexError: if the mesh does not have the index.
        """
        return self._inner.device_location(device_id)

    def host_mesh(self) -> Mesh:
        """Return the same mesh over the CPUs of the devices' hosts.

        The name of the new mesh is empty. Devices whose job is known get their full names.

        >>> Mesh.from_string("m|x=1|0|0|/job:a/task:1/device:TPU:3").host_mesh().to_string()
        '|x=1|0|0|/job:a/replica:0/task:1/device:CPU:3'
        """
        if self._host_mesh is None:
            self._host_mesh = Mesh._of(self._inner.host_mesh())
        return self._host_mesh

    def to_string(self) -> str:
        """Write the text form: `name|axes|global ids|local ids|local devices`, which `from_string` reads.

        The names of all devices and `use_xla_spmd` follow, if present. A single device is written as its name, an
        empty mesh as `empty_mesh`.

        >>> Mesh.from_string("m|x=2|0,1|0,1|CPU:0,CPU:1").to_string()
        'm|x=2|0,1|0,1|CPU:0,CPU:1'
        """
        return self._inner.to_text()

    def as_proto(self) -> MeshProto:
        r"""Return the mesh as a message, whose bytes are TensorFlow's.

        >>> Mesh.from_string("m|x=1|0|0|CPU:0").as_proto().SerializeToString()
        b'\n\x05\n\x01x\x10\x01\x12\x01\x00\x1a\x01m"\x01\x00*\x05CPU:0'
        """
        return MeshProto.FromString(self._inner.to_bytes())

    def __eq__(self, other: object) -> bool:
        return self._inner == other._inner if isinstance(other, Mesh) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._inner)

    def __repr__(self) -> str:
        return f"Mesh.from_string({self.to_string()!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Mesh.from_string, (self.to_string(),)


def _listed(what: str, values: Iterable[Any]) -> list[Any]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError(f"{what} must be a list, got {type(values).__name__}")
    return values.tolist() if isinstance(values, np.ndarray) else list(values)
