"""A recorded model as checkpoints of element numbers: its tensors, and its parameters."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..._types import Numbers
from ...deploy.recording import Recording

__all__ = ["NumberedModel"]


class NumberedModel:
    """A model with numbered elements: its tensors and its parameters as two checkpoints of element numbers."""

    def __init__(
        self, config: Mapping[str, Any], ranks: Mapping[tuple[int, ...], Sequence[Recording]], name: str, folder: Path
    ) -> None:
        self.config, self.ranks, self.name = config, ranks, name
        (recording,) = next(held for sizes, held in ranks.items() if math.prod(sizes) == 1)
        self.parameters = {
            name: recording.element_numbers(name) for name, one in recording.parameters.items() if one.pieces
        }
        folder.mkdir()
        self.tensors_file, self.parameters_file = folder / "tensors.safetensors", folder / "parameters.safetensors"
        numbers, first = {}, 1
        for name, (shape, _) in recording.tensors.items():
            numbers[name] = np.arange(first, first + math.prod(shape)).reshape(shape)
            first += math.prod(shape)
        _write(self.tensors_file, numbers)
        _write(self.parameters_file, self.parameters)

    def parts(self, name: str) -> Iterator[tuple[tuple[int, ...], int, Numbers | None]]:
        """Yield the sizes of each recording, each rank, and the numbers of the elements that it has of a parameter."""
        for sizes, held in self.ranks.items():
            for rank, one in enumerate(held):
                yield sizes, rank, one.element_numbers(name) if name in one.parameters else None

    def elsewhere(self) -> Iterator[str]:
        """Yield the parameters that are missing in the recording on one rank."""
        for held in self.ranks.values():
            for one in held:
                yield from (name for name, own in one.parameters.items() if own.pieces and name not in self.parameters)


def _write(path: Path, arrays: Mapping[str, Numbers]) -> None:
    """Write arrays of numbers as a safetensors file."""
    header, end = {}, 0
    for name, array in arrays.items():
        header[name] = {"dtype": "I64", "shape": list(array.shape), "data_offsets": [end, end + 8 * array.size]}
        end += 8 * array.size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            file.write(array.astype("<i8").tobytes())
