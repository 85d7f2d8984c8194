"""Values of Keras variables, put on the mesh's devices, if the backend is JAX and these exist."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from ..._text import shown
from ...errors import LayoutError
from ...layout import TensorLayout
from ...mesh import DeviceMesh
from ...partition import Partition
from .compiled import sharded_value

__all__ = ["initial_value", "local_data", "sharding_of"]

#: The most bytes of a value that is computed whole and then placed: compiling its initializer takes a second, placing
#: it a millisecond, and the memory that it occupies meanwhile does not matter.
_WHOLE_BYTES = 4 * 2**20

#: Initializers that numpy can also do, shard by shard, at any size.
_CONSTANTS = {keras.initializers.Zeros: 0, keras.initializers.Ones: 1}


def sharding_of(partition: Partition) -> Any:
    """Return the `jax.sharding.NamedSharding` of a partition; `None` where the value stays whole.

    That is where the backend is not JAX, a device does not exist, or a dim does not divide, which JAX does not cut.
    """
    layout = partition.layout
    if any(size % shards for size, shards in zip(partition.shape, layout.num_shards, strict=True)):
        return None
    return _sharding_of(layout)


@lru_cache(maxsize=1024)
def _sharding_of(layout: TensorLayout) -> Any:
    if keras.backend.backend() != "jax" or layout.device_mesh is None:
        return None
    layout = layout.refined()
    assert layout.device_mesh is not None
    mesh = _jax_mesh(layout.device_mesh)
    if mesh is None:
        return None
    import jax

    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*layout.axes))


@lru_cache(maxsize=64)
def _jax_mesh(mesh: DeviceMesh) -> Any:
    import jax

    if mesh.size > jax.device_count() and mesh.size > jax.device_count("cpu"):
        return None
    devices = [_jax_device(label) for label in mesh.devices.flat]
    if None in devices:
        return None
    return jax.sharding.Mesh(np.array(devices, dtype=object).reshape(mesh.shape), mesh.axis_names)


def _jax_device(label: Any) -> Any:
    """Return the device that Keras calls `"cpu:0"`, or the `jax.Device` itself."""
    import jax

    if isinstance(label, jax.Device):
        return label
    platform, _, number = str(label).partition(":")
    try:
        return next((device for device in jax.devices(platform) if str(device.id) == number), None)
    except RuntimeError:  # no such platform
        return None


def local_data(value: Any) -> dict[int, npt.NDArray[Any]]:
    """Return the parts of a `jax.Array` on the devices of this host, by device index in the mesh of its sharding."""
    index = {device: i for i, device in enumerate(value.sharding.mesh.devices.flat)}
    return {index[shard.device]: np.asarray(shard.data) for shard in value.addressable_shards}


def initial_value(
    initializer: Callable[..., Any], path: str, shape: tuple[int, ...], dtype: str, sharding: Any = None
) -> Any:
    """Return the value that an initializer gives the variable at `path`, checked, and placed if there is a sharding.

    Raises:
        LayoutError: if the initializer raises, or gives another shape or dtype; Keras itself would take any.
    """
    try:
        if sharding is None:
            value = initializer(shape, dtype=dtype)
            value = value if hasattr(value, "dtype") else keras.ops.convert_to_tensor(value)
        else:
            value = _placed_value(initializer, shape, dtype, sharding)
    except Exception as error:
        raise LayoutError(f"variable {shown(path)}: its initializer raised {type(error).__name__}: {error}") from error
    given = tuple(value.shape), keras.backend.standardize_dtype(value.dtype)
    if given != (shape, dtype):
        raise LayoutError(
            f"variable {shown(path)}: its initializer gave shape {given[0]} and dtype {given[1]}; it must give shape "
            f"{shown(shape)} and dtype {dtype}"
        )
    return value


def _placed_value(initializer: Callable[..., Any], shape: tuple[int, ...], dtype: str, sharding: Any) -> Any:
    import jax

    numpy_dtype = jax.numpy.dtype(dtype)
    constant = _CONSTANTS.get(type(initializer))
    if constant is not None:
        host = np.broadcast_to(np.array(constant, numpy_dtype), shape)
    elif (
        numpy_dtype.itemsize * int(np.prod(shape, dtype=object)) > _WHOLE_BYTES
        # A QR decomposition needs the whole matrix; compiled for shards, every device would do all of it.
        and not isinstance(initializer, keras.initializers.Orthogonal)
    ):
        return sharded_value(initializer, shape, dtype, sharding)
    else:
        value = initializer(shape, dtype=dtype)
        value = value if hasattr(value, "dtype") else keras.ops.convert_to_tensor(value)
        if value.shape != shape:
            return value
        # Through numpy, which cuts views; JAX needs a compiled program to cut its own arrays.
        host = np.asarray(value)
    return jax.make_array_from_callback(shape, sharding, host.__getitem__)
