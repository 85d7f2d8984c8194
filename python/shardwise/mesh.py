"""Meshes of devices: named axes with sizes, and one device per position."""

from __future__ import annotations

import os
import sys
from collections.abc import Hashable, Sequence, Set
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from ._arguments import is_masked, label_positions
from ._core import Mesh as CoreMesh
from ._drawn import Drawn
from ._fork import importing
from ._frozen import frozen_objects, handed_out
from ._text import counted, shown
from .errors import MeshError
from .sub_axis import parse_sub_axis

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["DeviceMesh", "list_devices"]

_PREFIX = "cpu:"
#: The most dims that a numpy array may have: 64 since numpy 2.
_MAX_DIMS = 64 if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else 32
#: The most default labels that a mesh keeps once it has made them: about 5 MB of strings.
_KEEP_LABELS = 1 << 16


def list_devices(device_type: str | None = None) -> list[str]:
    """List the logical CPU devices of this host, one per core that this process may use.

    Args:
        device_type: `"cpu"`, in upper or lower case, or `None` for all types, which is the same: there are no others.

    Raises:
        MeshError: for any other device type.

    A mesh does not depend on this list: it may have more devices than the host.

    >>> list_devices()[0]
    'cpu:0'
    """
    if device_type is not None:
        if not isinstance(device_type, str):
            raise TypeError(f"device_type must be a string or None, got {shown(device_type)}")
        if device_type.lower() != "cpu":
            raise MeshError(f"device_type is {shown(device_type)}; the only devices listed for this host are 'cpu'")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return [f"{_PREFIX}{i}" for i in range(cores)]


class DeviceMesh(Drawn):
    """Devices arranged along named axes, row-major; no hardware is needed.

    Args:
        shape: the axis sizes, each at least 1; their product is at most 2**63 - 1.
        axis_names: one distinct, non-empty name per axis.
        devices: one distinct, hashable label per position, in row-major order; nested lists or an array of the
            mesh's shape also work. By default they are `"cpu:0"`, `"cpu:1"`, …, made only when asked for, so that a
            mesh of a million devices costs no more than one of eight.

    Raises:
        MeshError: if sizes, names and devices do not fit together.
        SizeOverflowError: if a size or the product of the sizes is over 2**63 - 1.
        TypeError: if a size is not an integer, or a name not a string.

    A mesh is immutable, hashable and picklable. The names follow `keras.distribution.DeviceMesh`; the arithmetic is
    that of `jax.sharding.Mesh` and `tf.experimental.dtensor.Mesh`.

    >>> mesh = DeviceMesh((2, 4), ("data", "model"))
    >>> mesh.size, mesh.strides
    (8, (4, 1))
    >>> mesh.coordinate(6)
    (1, 2)
    >>> mesh.device(6)
    'cpu:6'
    >>> mesh
    DeviceMesh((2, 4), ('data', 'model'))
    """

    __slots__ = ("__weakref__", "_core", "_default_labels", "_devices", "_given_labels", "_hash", "_index")

    _core: CoreMesh
    _given_labels: tuple[Hashable, ...] | None
    _index: dict[Hashable, int] | None
    _default_labels: tuple[str, ...] | None
    _devices: npt.NDArray[np.object_] | None
    _hash: int | None

    def __init__(
        self,
        shape: Sequence[int],
        axis_names: Sequence[str],
        devices: Sequence[Any] | npt.NDArray[Any] | None = None,
    ) -> None:
        # An empty text has as many names as an empty list: too few, rather than of a wrong type.
        self._core = CoreMesh(shape, () if isinstance(axis_names, str) and not axis_names else axis_names)
        self._given_labels = None
        self._index = None
        self._default_labels = None
        self._devices = None
        self._hash = None
        if devices is not None:
            try:
                labels = _flat_labels(devices, self.shape, self.size)
            except RecursionError:
                raise TypeError("devices is nested too deeply, or contains itself") from None
            self._set_devices(labels)

    def _set_devices(self, labels: list[Any]) -> None:
        if len(labels) != self.size:
            raise _wrong_count(len(labels), self.shape, self.size)
        index = label_positions("devices", labels, MeshError)
        # The default labels, written out, are the default mesh.
        if any(type(label) is not str or label != f"{_PREFIX}{i}" for i, label in enumerate(labels)):
            self._given_labels = tuple(labels)
            self._index = index

    @property
    def core(self) -> CoreMesh:
        """The compiled object; for the modules of the package only."""
        return self._core

    @property
    def given_labels(self) -> tuple[Hashable, ...] | None:
        """The labels that were given, in order; `None` for the default ones."""
        return self._given_labels

    @property
    def shape(self) -> tuple[int, ...]:
        """The axis sizes."""
        return self._core.shape

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The axis names, major first."""
        return self._core.axis_names

    @property
    def size(self) -> int:
        """The number of devices."""
        return self._core.size

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self._core.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """The growth of the device index along each axis: `[bcd, cd, d, 1]` for a mesh of shape `[a, b, c, d]`."""
        return self._core.strides

    @property
    def devices(self) -> npt.NDArray[np.object_]:
        """The labels, as a read-only object array of the mesh's shape.

        Raises:
            MeshError: if the mesh has more axes than numpy's arrays have dims, 64; `device(i)` gives one label.

        >>> DeviceMesh((2, 2), ("x", "y"), devices="abcd").devices
        array([['a', 'b'],
               ['c', 'd']], dtype=object)
        """
        if self._devices is None:
            if self.ndim > _MAX_DIMS:
                raise MeshError(
                    f"devices: the mesh has {self.ndim} axes, and a numpy array has at most {_MAX_DIMS} dims"
                )
            labels = self.labels()
            flat = np.empty(self.size, dtype=object)
            # Assigned one by one: numpy would unpack labels that are tuples.
            for i, label in enumerate(labels):
                flat[i] = label
            self._devices = frozen_objects(flat).reshape(self.shape)
        return handed_out(self._devices)

    @property
    def has_default_devices(self) -> bool:
        """True if the labels are `"cpu:0"`, `"cpu:1"`, …, as without the argument `devices`."""
        return self._given_labels is None

    def axis_size(self, axis_name: str) -> int:
        """Return the size of the axis called `axis_name`, or of the sub-axis that it spells.

        Raises:
            MeshError: if the mesh has no such axis, or the sub-axis does not divide it.

        >>> mesh = DeviceMesh((2, 4), ("data", "model"))
        >>> mesh.axis_size("model"), mesh.axis_size("model:(1)2")
        (4, 2)
        """
        try:
            return self.shape[self.axis_names.index(axis_name)]
        except ValueError:
            sub = parse_sub_axis(axis_name) if isinstance(axis_name, str) else None
        if sub is None or sub.axis not in self.axis_names:
            raise MeshError(f"axis_name is {shown(axis_name)}; the axes of this mesh are {shown(self.axis_names)}")
        size = self.axis_size(sub.axis)
        if size % (sub.before * sub.size):
            raise MeshError(
                f"axis_name is {shown(axis_name)}, which does not divide axis {shown(sub.axis)} of size {size}"
            )
        return sub.size

    def __getitem__(self, names: str | Sequence[str]) -> DeviceMesh:
        """Return the mesh of some axes through the first device, as `submesh` does.

        PyTorch's `mesh["tp"]` is the mesh through the device of the process; `submesh` takes the device.

        >>> mesh = DeviceMesh((2, 4), ("dp", "tp"))
        >>> mesh["tp"]
        DeviceMesh((4,), ('tp',))
        >>> mesh["tp", "dp"].devices.tolist()
        [['cpu:0', 'cpu:4'], ['cpu:1', 'cpu:5'], ['cpu:2', 'cpu:6'], ['cpu:3', 'cpu:7']]
        """
        return self.submesh(names)

    def submesh(self, names: str | Sequence[str], through: Hashable = None) -> DeviceMesh:
        """Return the mesh of some axes, in the order named: the devices that differ from one device only along these.

        Args:
            names: an axis, or several; sub-axes as `"tp:(1)4"`.
            through: the label of a device of the new mesh; the first device if left out (in PyTorch, the device of the
                process).

        Raises:
            MeshError: if the mesh has no such axis or device, or two of the axes overlap.

        >>> mesh = DeviceMesh((2, 4), ("dp", "tp"))
        >>> mesh.submesh("tp", through="cpu:6").devices.tolist()
        ['cpu:4', 'cpu:5', 'cpu:6', 'cpu:7']
        """
        with importing:
            from .mesh_views import submesh

        return submesh(self, names, through)

    def flatten(self, names: Sequence[str] | None = None, name: str | None = None) -> DeviceMesh:
        """Merge several axes into one, first axis major; it takes the place of the major-most of them.

        Args:
            names: the axes; all of them if none are given.
            name: what the new axis is called; by default the names joined with `"_"`, as in PyTorch.

        Raises:
            MeshError: if the mesh has no such axis, or the new name is taken.

        >>> DeviceMesh((2, 3, 4), ("pp", "dp", "tp")).flatten(("dp", "tp"), "world")
        DeviceMesh((2, 12), ('pp', 'world'))
        >>> DeviceMesh((2, 4), ("dp", "tp")).flatten()
        DeviceMesh((8,), ('dp_tp',))
        """
        with importing:
            from .mesh_views import flatten

        return flatten(self, names, name)

    def unflatten(self, axis: str | int, sizes: Sequence[int], names: Sequence[str]) -> DeviceMesh:
        """Split one axis into several: the inverse of `flatten`, with the arguments of PyTorch's `_unflatten`.

        Args:
            axis: the name of the axis, or its position.
            sizes: the sizes of the new axes, whose product is the size of `axis`.
            names: the names of the new axes.

        Raises:
            MeshError: if the sizes do not multiply to that of the axis, or the names and sizes do not make axes.

        >>> DeviceMesh((8,), ("world",)).unflatten("world", (2, 4), ("dp", "tp"))
        DeviceMesh((2, 4), ('dp', 'tp'))
        """
        with importing:
            from .mesh_views import unflatten

        return unflatten(self, axis, sizes, names)

    def transpose(self, *names: str) -> DeviceMesh:
        """Return the mesh with its axes in another order; without names, reversed.

        Raises:
            MeshError: if the names are not those of the mesh, each once.

        >>> DeviceMesh((2, 2), ("dp", "tp")).transpose("tp", "dp").devices.tolist()
        [['cpu:0', 'cpu:2'], ['cpu:1', 'cpu:3']]
        """
        with importing:
            from .mesh_views import transpose

        return transpose(self, names)

    def coordinate(self, index: int) -> tuple[int, ...]:
        """Return the coordinate of the device at row-major position `index`: `(index // strides) % shape`.

        Raises:
            IndexError: if there is no such position.

        >>> DeviceMesh((3, 2), ("x", "y")).coordinate(3)
        (1, 1)
        """
        return self._core.coordinate(index)

    def device_index(self, coordinate: Sequence[int]) -> int:
        """Return the row-major position of a coordinate: the inverse of `coordinate`; for a label use `index_of_label`.

        Raises:
            IndexError: if an entry is outside its axis.
            MeshError: if there is not one entry per axis.

        >>> DeviceMesh((3, 2), ("x", "y")).device_index((1, 1))
        3
        """
        return self._core.device_index(coordinate)

    def coordinates(self) -> npt.NDArray[np.int64]:
        """Return the coordinates of all devices, in device-index order: int64 of shape (devices, axes).

        >>> DeviceMesh((3, 2), ("x", "y")).coordinates().tolist()
        [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1]]
        """
        return self._core.coordinates()

    def device(self, index: int) -> Any:
        """Return the label of the device at row-major position `index`.

        Raises:
            IndexError: if there is no such position.

        >>> DeviceMesh((2,), ("x",), devices=["left", "right"]).device(1)
        'right'
        """
        position = self._core.checked(index)
        return f"{_PREFIX}{position}" if self._given_labels is None else self._given_labels[position]

    def index_of_label(self, device: Hashable) -> int:
        """Return the row-major position of the device labelled `device`: the inverse of `device`.

        With the default labels, the position itself is accepted too: `3` for `"cpu:3"`. With labels of your own it is
        not, because they may contain other numbers; `mesh.device(3)` gives the label.

        Raises:
            MeshError: if the mesh has no such label.

        >>> DeviceMesh((2,), ("x",), devices=["left", "right"]).index_of_label("right")
        1
        >>> DeviceMesh((2,), ("x",), devices=["gpu:3", "gpu:0"]).index_of_label(0)
        Traceback (most recent call last):
        shardwise.errors.MeshError: device 0 is not in the mesh, whose devices are labelled 'gpu:3', 'gpu:0'; for the
        device at position 0 give mesh.device(0)
        """
        if self._index is None:
            position = self._core.default_index(device)
        else:
            try:
                position = self._index.get(device)
            except TypeError:  # A list cannot be a label: it has no hash.
                position = None
        if position is not None:
            return position
        is_integer = isinstance(device, (int, np.integer)) and not isinstance(device, bool)
        if is_integer and self._index is None and 0 <= device < self.size:  # type: ignore[operator]
            return int(device)  # type: ignore[call-overload, no-any-return]
        raise self._no_such_device(device, is_integer)

    def _no_such_device(self, device: object, is_integer: bool) -> Exception:
        if not isinstance(device, Hashable):
            return TypeError(f"device must be a label of the mesh, got {type(device).__name__}")
        message = f"device {shown(device)} is not in the mesh, whose devices are labelled {self._label_summary()}"
        if is_integer and 0 <= device < self.size:  # type: ignore[operator]
            message += f"; for the device at position {device} give mesh.device({device})"
        elif isinstance(device, tuple) and len(device) == self.ndim:
            message += "; device_index takes a coordinate"
        return MeshError(message)

    def with_axes(self, shape: Sequence[int], axis_names: Sequence[str]) -> DeviceMesh:
        """Return a mesh of the same devices in the same order, with other axes: it shares the labels."""
        mesh = DeviceMesh(shape, axis_names)
        mesh._given_labels, mesh._index, mesh._default_labels = self._given_labels, self._index, self._default_labels
        return mesh

    def _label_summary(self) -> str:
        if self.size <= 4:
            return ", ".join(shown(self.device(i)) for i in range(self.size))
        return f"{shown(self.device(0))}, {shown(self.device(1))}, … {shown(self.device(self.size - 1))}"

    def labels_at(self, indices: list[int]) -> list[Any]:
        """Return the labels of device indices that the mesh is known to have."""
        labels = self._given_labels or self._default_labels
        return [f"{_PREFIX}{i}" for i in indices] if labels is None else [labels[i] for i in indices]

    def labels(self) -> tuple[Any, ...]:
        """Return the labels of all devices, by device index.

        >>> DeviceMesh((2,), ("x",)).labels()
        ('cpu:0', 'cpu:1')
        """
        if self._given_labels is not None:
            return self._given_labels
        if self._default_labels is None:
            # If there is no room for so many, this says so at once; made one by one they would first fill memory.
            try:
                [None] * self.size
            except MemoryError:
                raise MemoryError(f"no room for the labels of {self.size} devices") from None
            labels = tuple([f"{_PREFIX}{i}" for i in range(self.size)])
            if self.size > _KEEP_LABELS:
                return labels
            self._default_labels = labels
        return self._default_labels

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, DeviceMesh):
            return NotImplemented
        return (
            self.shape == other.shape
            and self.axis_names == other.axis_names
            and self._given_labels == other.given_labels
        )

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((self.shape, self.axis_names, self._given_labels))
        return self._hash

    def __repr__(self) -> str:
        devices = "" if self._given_labels is None else f", devices={list(self._given_labels)!r}"
        return f"DeviceMesh({self.shape}, {self.axis_names}{devices})"

    def __reduce__(self) -> tuple[Any, ...]:
        devices = None if self._given_labels is None else list(self._given_labels)
        return DeviceMesh, (self.shape, self.axis_names, devices)


def _wrong_count(given: int, shape: tuple[int, ...], size: int, more: str = "") -> MeshError:
    entries = f"{more}{counted(given, 'entry', 'entries')}"
    return MeshError(f"devices has {entries} but a mesh of shape {shown(shape)} has {counted(size, 'position')}")


def _flat_labels(devices: Any, shape: tuple[int, ...], size: int) -> list[Any]:
    """Return the labels in row-major order; lists and arrays nest, tuples within them are labels."""
    if is_masked(devices) or isinstance(devices, (bytes, bytearray)):
        raise TypeError(f"devices must be a sequence of labels or None, got {type(devices).__name__}")
    if isinstance(devices, np.ndarray):
        flat = devices.ravel()
        return list(flat) if flat.dtype == object else flat.tolist()
    if isinstance(devices, Set):
        raise TypeError(f"devices must be a sequence of labels, got a {type(devices).__name__}, which has no order")
    try:
        # One more than allowed: an iterable may never end.
        items = list(islice(devices, min(size + 1, sys.maxsize)))
    except TypeError:
        raise TypeError(f"devices must be a sequence of labels or None, got {type(devices).__name__}") from None
    if len(items) > size:
        is_sized = hasattr(devices, "__len__")
        raise _wrong_count(len(devices) if is_sized else size, shape, size, "" if is_sized else "more than ")
    if any(isinstance(item, (list, np.ndarray)) for item in items):
        return [
            label
            for item in items
            for label in (_flat_labels(item, shape, size) if isinstance(item, (list, np.ndarray)) else [item])
        ]
    return items
