"""States of DeepSpeed's optimizer: those of stage 0, whole in the file of a model, and single values."""

from __future__ import annotations

from typing import Any

from ...._text import counted
from ....errors import ParseError
from ...tensors.stored import StoredTensor
from .deepspeed_files import ReadFile
from .optimizers import OptimizerDict, as_optimizer
from .tensors import SavedTensor, dict_of, items_within
from .zero_partitions import RankArrays

__all__ = ["number_in", "state_value", "whole_optimizer"]


def whole_optimizer(file: ReadFile) -> tuple[OptimizerDict | None, dict[int, Any]]:
    """Return the optimizer of stage 0 in the file of a model, and the masters by number, if it has some."""
    said = dict_of(file.values.get("optimizer"))
    inner = said.get("optimizer_state_dict", file.values.get("optimizer"))

    def shape_of(value: Any) -> tuple[int, ...] | None:
        saved = file.container.tensor(value, "")
        return None if saved is None else saved.shape

    optimizer = as_optimizer("optimizer.", inner, shape_of)
    if optimizer is None:
        return None, {}
    listed = [
        master for _, group in items_within(said.get("fp32_groups")) or () for _, master in items_within(group) or ()
    ]
    numbers = [number for params in optimizer.params for number in params]
    if listed and len(listed) != len(numbers):
        raise ParseError(
            f"{file.path}: fp32_groups has {counted(len(listed), 'master')} of {counted(len(numbers), 'parameter')}"
        )
    return optimizer, dict(zip(numbers, listed, strict=True)) if listed else {}


def state_value(part: RankArrays, number: int, kind: str) -> Any:
    """Return a state of a group: a tensor, or its value."""
    value = part.states[number][kind]
    saved = part.file.container.tensor(value, f"{kind} of group {number}")
    return value if saved is None else saved


def number_in(part: RankArrays, value: Any) -> float | int | None:
    """Return the number that a value is, or that a tensor without dims holds; else `None`."""
    if isinstance(value, SavedTensor) and not value.shape:
        piece = part.file.container.piece(value, "", ())
        number = StoredTensor("", value.dtype, (), (piece,)).read().item()
    else:
        number = value
    return number if type(number) in (int, float) else None
