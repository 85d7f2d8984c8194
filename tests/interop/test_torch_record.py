"""Recordings of loaders that take tensors of PyTorch."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise import LayoutError
from shardwise.interop.torch import record

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"])
def test_a_loader_of_pytorch(dtype: str) -> None:
    """As engines load: pairs of names and tensors, copied into slices of parameters that are there already."""
    kind = getattr(torch, dtype)
    tensors = {name: torch.empty((6, 4), dtype=kind, device="meta") for name in ("gate", "up", "down")}

    def load(given: Any) -> Any:
        memory = {"gate_up": torch.zeros((6, 4), dtype=kind), "down": torch.zeros((4, 3), dtype=kind)}
        for name, tensor in given.items():
            if name == "down":
                memory["down"].copy_(tensor[3:].T)
            else:
                at = 0 if name == "gate" else 3
                memory["gate_up"][at : at + 3].copy_(tensor.narrow(0, 3, 3))
        return {name: torch.nn.Parameter(value, requires_grad=False) for name, value in memory.items()}.items()

    found = record(tensors, load, "rank 1")
    both = found.parameters["gate_up"]
    assert (both.dtype, both.shape, both.padding) == (dtype, (6, 4), 0)
    assert [(piece.tensor, piece.box, piece.start, piece.strides) for piece in both.pieces] == [
        ("gate", (slice(3, 6, 1), slice(0, 4, 1)), 0, (4, 1)),
        ("up", (slice(3, 6, 1), slice(0, 4, 1)), 12, (4, 1)),
    ]
    (down,) = found.parameters["down"].pieces
    assert (down.box, down.strides) == ((slice(3, 6, 1), slice(0, 4, 1)), (1, 3))
    # Values arrive where the loader puts them, in memory of PyTorch.
    numbers = {name: torch.arange(24).reshape(6, 4) + 24 * at for at, name in enumerate(tensors)}
    memory = {name: torch.zeros(one.shape, dtype=torch.int64) for name, one in found.parameters.items()}
    arrays = found.views(memory)
    for name, array in arrays.items():
        array[...] = numbers[name][3:]
    found.fill(memory, arrays)
    assert memory["gate_up"].tolist() == [*numbers["gate"][3:].tolist(), *numbers["up"][3:].tolist()]
    assert memory["down"].tolist() == numbers["down"][3:].T.tolist()


def test_what_pytorch_computes_is_refused() -> None:
    with pytest.raises(LayoutError, match="the loader computes 8 of 8 elements of 'norm'"):
        record({"norm": ((8,), "bfloat16")}, lambda given: {"norm": given["norm"] + 1})
    flipped = record({"w": ((3, 2), "bfloat16")}, lambda given: {"w": given["w"].flip(0)})
    memory = {"w": torch.zeros((3, 2))}
    arrays = flipped.views(memory)
    arrays["w"][...] = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    flipped.fill(memory, arrays)
    assert memory["w"].tolist() == [[5.0, 6.0], [3.0, 4.0], [1.0, 2.0]]
