"""Checkpoints that the frameworks wrote, and what their `expected.json` has of them."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

DATA = Path(__file__).parent.parent / "data" / "checkpoints"


KERAS = {
    f"sequential/{layer}/{variable}": f"layers/{group}/vars/{position}"
    for layer, group in (("a", "dense"), ("b", "dense_1"), ("c", "dense_2"))
    for position, variable in enumerate(("kernel", "bias"))
}


#: The path, whose expectations, what it is, and what the names begin with or are called instead.
CASES: dict[str, tuple[str, str, Any]] = {
    "torch/plain.pt": ("torch", "torch", ""),
    "torch/dcp": ("torch", "dcp", "model."),
    "torch/dcp/.metadata": ("torch", "dcp", "model."),
    "torch/dcp_safetensors": ("torch", "dcp-safetensors", ""),
    "torch/fsdp2": ("torch", "fsdp2", ""),
    "megatron": ("megatron", "megatron", ""),
    "megatron/iter_0000100": ("megatron", "megatron", ""),
    **{f"orbax_keras/orbax_{name}": ("orbax_keras", "orbax", "") for name in ("zarr2", "zarr3", "manager")},
    **{f"orbax_keras/orbax_ocdbt_{name}": ("orbax_keras", "orbax", "") for name in ("zarr2", "zarr3")},
    "orbax_keras/orbax_manager/100": ("orbax_keras", "orbax", ""),
    "orbax_keras/orbax_manager/100/state": ("orbax_keras", "orbax", ""),
    "orbax_keras/keras": ("orbax_keras/keras", "keras", KERAS),
    "orbax_keras/keras/m.weights.json": ("orbax_keras/keras", "keras", KERAS),
    "orbax_keras/keras/m.weights.h5": ("orbax_keras/keras", "keras", KERAS),
}


#: What the writer of these leaves out.
LEFT_OUT = {"torch/dcp_safetensors": {"scale", "empty"}}


def expected(case: str) -> dict[str, np.ndarray]:
    """The arrays of a case by the names that they have in it."""
    folder, _, called = CASES[case]
    arrays = {}
    for name, said in json.loads((DATA / folder / "expected.json").read_text())["tensors"].items():
        if name in LEFT_OUT.get(case, ()):
            continue
        dtype = np.dtype(getattr(ml_dtypes, said["dtype"], said["dtype"]))
        array = np.frombuffer(bytes.fromhex(said["hex"]), dtype).reshape(said["shape"])
        arrays[called[name] if isinstance(called, dict) else f"{called}{name}"] = array
    return arrays
