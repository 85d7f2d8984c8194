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


class Block(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A loader written by hand: rows of gate and up in turn, keys repeated, the rows of words over ranks in turn."""

    def __init__(self, rank: int, fault: str) -> None:
        super().__init__()
        self.rank, self.fault = rank, fault
        sizes = {"words": (6, 8), "gate_up": (10, 8), "down": (5, 8), "qkk": (12, 8), "norm": (8,)}
        for name, shape in sizes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape), requires_grad=False))

    def load_weights(self, pairs: Any) -> dict[str, Any]:
        gate, up = ("up", "gate") if self.fault == "swapped" else ("gate", "up")
        for name, weight in pairs:
            if name == "words":
                self.words.data.copy_(weight[self.rank :: 2])
            elif name == gate:
                self.gate_up.data[0::2].copy_(weight.chunk(2)[self.rank])
            elif name == up:
                self.gate_up.data[1::2].copy_(weight.chunk(2)[self.rank])
            elif name == "down":
                self.down.data.copy_(weight.chunk(2, 1)[self.rank].T)
            elif name == "q":
                own = weight.T if self.fault == "transposed" else weight
                self.qkk.data[:4].copy_(own.chunk(2)[self.rank])
            elif name == "k" and self.fault != "skipped":
                self.qkk.data[4:].copy_(weight.repeat_interleave(2, 0))
            elif name == "norm":
                self.norm.data.copy_(weight * 2 if self.fault == "scaled" else weight)
        return dict(self.named_parameters())


WEIGHTS = {"words": (12, 8), "gate": (10, 8), "up": (10, 8), "down": (8, 10), "q": (8, 8), "k": (4, 8), "norm": (8,)}


def recorded(rank: int, fault: str = "") -> Any:
    shapes = {name: (shape, "bfloat16") for name, shape in WEIGHTS.items()}
    return record(shapes, lambda given: Block(rank, fault).load_weights(given.items()), f"rank {rank}")


def test_a_loader_written_by_hand_is_recorded_as_it_cuts() -> None:
    first, numbers = 1, {}
    for name, shape in WEIGHTS.items():
        numbers[name] = torch.arange(first, first + torch.Size(shape).numel()).reshape(shape)
        first += torch.Size(shape).numel()
    for rank in range(2):
        found = recorded(rank)
        half = slice(5 * rank, 5 * rank + 5)
        expected = {
            "words": numbers["words"][rank::2],
            "gate_up": torch.stack([numbers["gate"][half], numbers["up"][half]], 1).reshape(10, 8),
            "down": numbers["down"][:, half].T,
            "qkk": torch.cat([numbers["q"][4 * rank : 4 * rank + 4], numbers["k"][[0, 0, 1, 1, 2, 2, 3, 3]]]),
            "norm": numbers["norm"],
        }
        assert {name: found.element_numbers(name).tolist() for name in expected} == {
            name: one.tolist() for name, one in expected.items()
        }


def test_each_planted_fault_is_named() -> None:
    with pytest.raises(LayoutError, match="the loader computes 8 of 8 elements of 'norm'"):
        recorded(1, "scaled")
    right, skipped = recorded(1), recorded(1, "skipped")
    assert right.differences(recorded(1, "swapped")) == {
        "gate_up": "80 of 80 elements differ: [0, 0] is gate[5, 0], not up[5, 0]"
    }
    assert right.differences(recorded(1, "transposed")) == {
        "qkk": "28 of 96 elements differ: [0, 0] is q[4, 0], not q[0, 4]"
    }
    assert right.differences(skipped) == {"qkk": "64 of 96 elements differ: [4, 0] is k[0, 0], not padding"}
    assert (skipped.unused, right.unused) == (("k",), ())
