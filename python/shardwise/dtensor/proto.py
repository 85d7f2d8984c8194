"""The messages of TensorFlow's `layout.proto`, with its field names and its bytes, and no dependency on `protobuf`.

A message is a plain value: its fields need not be consistent; `Mesh.from_proto` and `Layout.from_proto` check that.
`SerializeToString()` gives the bytes that TensorFlow's message gives, and `FromString` reads them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from .._arguments import INTEGER, check_fields, check_items
from .._core import decode_layout, decode_mesh, encode_layout, encode_mesh

if TYPE_CHECKING:
    from .._core import _MeshFields

__all__ = ["LayoutProto", "MeshDimensionProto", "MeshProto", "SerializableMessage", "ShardingSpec"]


@runtime_checkable
class SerializableMessage(Protocol):
    """Any message that gives its bytes: one of this module, or of a protocol buffer library."""

    def SerializeToString(self) -> bytes:  # noqa: N802 (the name that protocol buffers give it)
        """Return the bytes of the message."""
        ...


@dataclass(frozen=True)
class MeshDimensionProto:
    """Name and size of a mesh axis.

    >>> MeshDimensionProto("x", 2)
    MeshDimensionProto(name='x', size=2)
    """

    name: str = ""
    size: int = 0

    def __post_init__(self) -> None:
        check_fields(self, name=str, size=INTEGER)


@dataclass(frozen=True)
class ShardingSpec:
    """The mesh axis that cuts one dim of a tensor.

    >>> ShardingSpec("unsharded")
    ShardingSpec(sharding_spec='unsharded')
    """

    sharding_spec: str = ""

    def __post_init__(self) -> None:
        check_fields(self, sharding_spec=str)


@dataclass(frozen=True)
class MeshProto:
    r"""A mesh: either with axes, or of a single device, or, when nothing is set, of none.

    >>> MeshProto(mesh_dimensions=(MeshDimensionProto("x", 1),), global_device_ids=(0,)).SerializeToString()
    b'\n\x05\n\x01x\x10\x01\x12\x01\x00'
    """

    mesh_dimensions: tuple[MeshDimensionProto, ...] = ()
    global_device_ids: tuple[int, ...] = ()
    local_device_ids: tuple[int, ...] = ()
    local_devices: tuple[str, ...] = ()
    global_devices: tuple[str, ...] = ()
    name: str = ""
    use_xla_spmd: bool = False
    single_device: str = ""

    def __post_init__(self) -> None:
        _keep_as_tuple(self, "mesh_dimensions", MeshDimensionProto)
        for ids in ("global_device_ids", "local_device_ids"):
            _keep_as_tuple(self, ids, INTEGER)
        for names in ("local_devices", "global_devices"):
            _keep_as_tuple(self, names, str)
        check_fields(self, name=str, use_xla_spmd=(bool, np.bool_), single_device=str)

    def SerializeToString(self, *, deterministic: bool = True) -> bytes:  # noqa: N802
        """Return the bytes of the message; they are always the same for the same fields."""
        return encode_mesh(self._fields())

    @classmethod
    def FromString(cls, data: bytes) -> MeshProto:  # noqa: N802
        r"""Read the message. Unknown fields are skipped.

        Raises:
            ParseError: if the bytes are not such a message; the message names the byte.

        >>> MeshProto.FromString(b"\x1a\x01m")
        MeshProto(mesh_dimensions=(), global_device_ids=(), local_device_ids=(), local_devices=(), global_devices=(),
                  name='m', use_xla_spmd=False, single_device='')
        """
        return cls._of(decode_mesh(data))

    def _fields(self) -> _MeshFields:
        return (
            [(axis.name, axis.size) for axis in self.mesh_dimensions],
            list(self.global_device_ids),
            self.name,
            list(self.local_device_ids),
            list(self.local_devices),
            list(self.global_devices),
            self.use_xla_spmd,
            self.single_device,
        )

    @classmethod
    def _of(cls, fields: _MeshFields) -> MeshProto:
        axes, global_ids, name, local_ids, local_devices, global_devices, use_xla_spmd, single_device = fields
        return cls(
            mesh_dimensions=tuple(MeshDimensionProto(*axis) for axis in axes),
            global_device_ids=tuple(global_ids),
            local_device_ids=tuple(local_ids),
            local_devices=tuple(local_devices),
            global_devices=tuple(global_devices),
            name=name,
            use_xla_spmd=use_xla_spmd,
            single_device=single_device,
        )


@dataclass(frozen=True)
class LayoutProto:
    r"""A layout: a spec for each dim of a tensor, and a mesh.

    >>> LayoutProto((ShardingSpec("x"),), MeshProto(), LayoutProto.LayoutType.STATIC).SerializeToString()
    b'\n\x03\x12\x01x\x12\x00\x18\x01'
    """

    class LayoutType(enum.IntEnum):
        """The form of a layout, as the message numbers it (`shardwise.dtensor.LayoutType` numbers it differently)."""

        UNKNOWN = 0
        STATIC = 1
        PARTED = 2
        SINGLE_DEVICE = 3

    sharding_specs: tuple[ShardingSpec, ...] = ()
    mesh_config: MeshProto | None = None
    type: int = 0

    def __post_init__(self) -> None:
        _keep_as_tuple(self, "sharding_specs", ShardingSpec)
        check_fields(self, mesh_config=(MeshProto, type(None)), type=INTEGER)

    def SerializeToString(self, *, deterministic: bool = True) -> bytes:  # noqa: N802
        """Return the bytes of the message; they are always the same for the same fields."""
        mesh = None if self.mesh_config is None else self.mesh_config._fields()
        return encode_layout([spec.sharding_spec for spec in self.sharding_specs], mesh, int(self.type))

    @classmethod
    def FromString(cls, data: bytes) -> LayoutProto:  # noqa: N802
        r"""Read the message. Unknown fields are skipped.

        Raises:
            ParseError: if the bytes are not such a message; the message names the byte.

        >>> LayoutProto.FromString(b"\x18\x09")
        Traceback (most recent call last):
        shardwise.errors.ParseError: LayoutProto, byte 0: type is 9; it must be 0 to 3
        """
        specs, mesh, layout_type = decode_layout(data)
        return cls(
            sharding_specs=tuple(ShardingSpec(spec) for spec in specs),
            mesh_config=None if mesh is None else MeshProto._of(mesh),
            type=cls.LayoutType(layout_type),
        )


def _keep_as_tuple(message: MeshProto | LayoutProto, field: str, kind: type | tuple[type, ...]) -> None:
    """A repeated field may be given as a list, but a list could be changed, and has no hash."""
    given = getattr(message, field)
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise TypeError(f"{field} must be a sequence, got {type(given).__name__}")
    items = tuple(given)
    check_items(field, items, kind)
    object.__setattr__(message, field, items)


def message_bytes(what: str, message: object) -> bytes:
    """Return the bytes of a message of this module or of a protocol buffer library."""
    if not isinstance(message, SerializableMessage):
        raise TypeError(f"{what} must be a message with SerializeToString(), got {type(message).__name__}")
    return message.SerializeToString()
