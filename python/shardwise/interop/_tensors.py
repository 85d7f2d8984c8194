"""Numpy arrays as tensors of PyTorch and back, without a copy; bfloat16 and the float8 dtypes of ml_dtypes too."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from .._dtypes import dtype_of

__all__ = ["array_of_tensor", "tensor_of_array"]


def tensor_of_array(array: npt.NDArray[Any]) -> Any:
    """Return a `torch.Tensor` on the array's memory."""
    import torch

    name = array.dtype.name
    if not _narrow(name) or not hasattr(torch, name):
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(_bits(array.itemsize))).view(getattr(torch, name))


def array_of_tensor(tensor: Any) -> npt.NDArray[Any]:
    """Return an array on the memory of a `torch.Tensor` on the CPU.

    Raises:
        ImportError: if its dtype belongs to ml_dtypes, which is not installed.
    """
    tensor = tensor.detach()
    name = str(tensor.dtype).removeprefix("torch.")
    if not _narrow(name):
        array: npt.NDArray[Any] = tensor.numpy()
        return array
    import torch

    dtype = dtype_of(tensor.dtype)
    bits = getattr(torch, _bits(dtype.itemsize))
    viewed: npt.NDArray[Any] = tensor.view(bits).numpy()
    return viewed.view(dtype)


def _narrow(name: str) -> bool:
    # Dtypes that numpy lacks have the same name in ml_dtypes and PyTorch.
    return name.startswith(("bfloat", "float8_"))


def _bits(itemsize: int) -> str:
    return f"int{8 * itemsize}"
