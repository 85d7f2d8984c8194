"""Meshes from axis sizes and devices, of one client or of many, after TensorFlow's `mesh_util`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from .._arguments import integer, optional
from .._text import counted, shown
from ..errors import MeshError
from ..mesh import list_devices
from . import config
from .device_spec import DeviceSpec
from .mesh import Device, Mesh

__all__ = ["create_distributed_mesh", "create_mesh"]

MeshDims = Mapping[str, int] | Sequence[tuple[str, int]]

_MAX_MADE_UP = 1 << 20
"""The most devices that are made up; a mesh keeps all their names."""


def create_mesh(
    mesh_dims: MeshDims | None = None,
    mesh_name: str = "",
    devices: Sequence[str | Device] | None = None,
    device_type: str | None = None,
    use_xla_spmd: bool = False,
) -> Mesh:
    """Create a mesh whose devices are all held by this process.

    Args:
        mesh_dims: Axis names and sizes, as a dict or as pairs. By default one axis `"x"` over all devices; a single
            axis of size -1 means the same.
        mesh_name: The mesh's own name.
        devices: Device names such as `"CPU:0"`; missing parts are filled in as `/job:localhost/replica:0/task:0`, with
            `DTENSOR_JOB_NAME` for the job. By default the number that `mesh_dims` asks for, from 0 on; if it states
            none, one for each core of this host.
        device_type: The type of the devices, `"CPU"` by default.
        use_xla_spmd: Whether XLA partitions programs; only for TPUs.

    Raises:
        MeshError: if the number of devices is not the product of the sizes, devices are not of the type
            `device_type`, or `Mesh` raises.

    >>> create_mesh({"x": 2, "y": 1}, devices=["CPU:0", "CPU:1"]).to_string()
    '|x=2,y=1|0,1|0,1|/job:localhost/replica:0/task:0/device:CPU:0,/job:localhost/replica:0/task:0/device:CPU:1'
    >>> create_mesh([("x", 8)], device_type="GPU").size
    8
    """
    names, shape = _read_dims([("x", -1)] if mesh_dims is None else mesh_dims)
    size = None if shape == [-1] else _product(shape)
    here = DeviceSpec(job=config.job_name(), replica=0, task=0)
    local = _device_names(devices, device_type, size, here)
    if size is None:
        shape = [len(local)]
    elif size != len(local):
        raise MeshError(f"the number of devices, {len(local)}, must be the size of the mesh of shape {shown(shape)}")
    ids = np.arange(len(local))
    return Mesh(names, ids.reshape(shape), ids.tolist(), local, mesh_name, use_xla_spmd=use_xla_spmd)


def create_distributed_mesh(
    mesh_dims: MeshDims,
    mesh_name: str = "",
    local_devices: Sequence[str | Device] | None = None,
    device_type: str | None = None,
    use_xla_spmd: bool = False,
    *,
    client_id: int | None = None,
    num_clients: int | None = None,
    job_name: str | None = None,
) -> Mesh:
    """Create the mesh of a cluster as one of its clients sees it: each holds an equal range of the devices, in order.

    Args:
        mesh_dims: Axis names and sizes, as a dict or as pairs.
        mesh_name: The mesh's own name.
        local_devices: The names of the devices of this client, such as `"CPU:0"`. Missing parts are filled in: the job,
            and the client's number as the task. By default the client's part of the mesh, from 0 on.
        device_type: The type of the devices, `"CPU"` by default.
        use_xla_spmd: Whether XLA partitions programs; only for TPUs.
        client_id: Which client this is, from 0; by default `DTENSOR_CLIENT_ID`.
        num_clients: The number of clients; by default the number of entries of `DTENSOR_JOBS`.
        job_name: The job of all clients; by default `DTENSOR_JOB_NAME`, else `localhost` for one and `worker` for many.

    Raises:
        MeshError: if the number of devices is not the product of the sizes, `client_id` is out of range, devices are
            not of the type `device_type`, or `Mesh` raises.

    >>> mesh = create_distributed_mesh({"x": 4}, client_id=1, num_clients=2)
    >>> mesh.local_device_ids(), mesh.local_devices()[0]
    ([2, 3], '/job:worker/replica:0/task:1/device:CPU:0')
    """
    names, shape = _read_dims(mesh_dims)
    size = _product(shape)
    clients = config.num_clients() if num_clients is None else integer("num_clients", num_clients)
    if clients < 1:
        raise MeshError(f"num_clients is {clients}; there is at least one client")
    if client_id is None:
        # The variable counts the clients of the environment, which an argument may have replaced.
        client = config.client_id() if num_clients is None else 0
    else:
        client = integer("client_id", client_id)
    if not 0 <= client < clients:
        raise MeshError(f"client_id is {client}; it must be 0 to {clients - 1}")
    if local_devices is None and size % clients:
        raise MeshError(
            f"total size {size} of the mesh of shape {shown(shape)} is not a multiple of the {clients} clients"
        )
    if job_name is None:
        job_name = config.job_name() if num_clients is None else ("localhost" if clients == 1 else "worker")
    here = DeviceSpec(job=job_name, replica=0, task=client)
    local = _device_names(local_devices, device_type, size // clients, here)
    if len(local) * clients != size:
        raise MeshError(
            f"the number of devices, {len(local)} of each of {counted(clients, 'client')}, must be the size of the "
            "mesh of shape "
            f"{shown(shape)}"
        )
    local_ids = list(range(client * len(local), (client + 1) * len(local)))
    return Mesh(names, np.arange(size).reshape(shape), local_ids, local, mesh_name, use_xla_spmd=use_xla_spmd)


def _device_names(
    devices: Sequence[str | Device] | None, device_type: str | None, count: int | None, here: DeviceSpec
) -> list[str]:
    """Return the names of the devices with what they leave open filled in from `here`."""
    optional("device_type", device_type, str)
    if devices is None:
        number = len(list_devices()) if count is None else count
        if number > _MAX_MADE_UP:
            raise MeshError(
                f"{shown(number)} devices have no names, and at most {_MAX_MADE_UP} names are made; give the names"
            )
        wanted = here.replace(device_type="CPU" if device_type is None else device_type.upper())
        return [f"{wanted.to_string().removesuffix('*')}{index}" for index in range(number)]
    if isinstance(devices, str):
        raise TypeError(f"devices must be a list, got the str {shown(devices)}")
    specs = [_spec(device) for device in devices]
    if not specs:
        raise MeshError("the list of devices is empty; a mesh needs at least one")
    if device_type is not None:
        for position, spec in enumerate(specs):
            if (spec.device_type or "").upper() != device_type.upper():
                raise MeshError(
                    f"Conflicting devices: number {position} is {spec}, device_type is {shown(device_type)}"
                )
    return [here.make_merged_spec(spec).to_string() for spec in specs]


def _spec(device: str | Device) -> DeviceSpec:
    if isinstance(device, DeviceSpec):
        return device
    if not isinstance(device, str) and not hasattr(device, "to_string"):
        raise TypeError(f"devices must hold strings or DeviceSpecs, got {shown(device)}")
    return DeviceSpec.from_string(device if isinstance(device, str) else device.to_string())


def _read_dims(mesh_dims: MeshDims) -> tuple[list[str], list[int]]:
    pairs = list(mesh_dims.items() if isinstance(mesh_dims, Mapping) else mesh_dims)
    names, shape = [], []
    for position, pair in enumerate(pairs):
        if isinstance(pair, str) or len(pair) != 2:
            raise TypeError(f"mesh_dims[{position}] is {shown(pair)}, which is not a pair of a name and a size")
        names.append(pair[0])
        shape.append(integer(f"mesh_dims[{position}][1]", pair[1]))
    return names, shape


def _product(shape: list[int]) -> int:
    # The mesh's error for a size below 1 names the axis; an array of such sizes could not be made.
    for axis, size in enumerate(shape):
        if size < 1:
            raise MeshError(f"mesh_dims[{axis}] has size {shown(size)}; an axis size must be at least 1")
    return math.prod(shape)
