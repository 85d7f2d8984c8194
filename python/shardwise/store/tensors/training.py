"""The training state in a checkpoint: weights apart from an optimizer's tensors, by parameter and kind."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from ..._dtypes import Dtype, bytes_for
from ..._fork import cached_property
from ..._text import bytes_text
from ...rules.left_out import LeftOut, listed
from ...rules.states import TrainingNames, training_names
from .stored import StoredTensor

__all__ = ["Total", "TrainedParameter", "Training", "totals_dict", "totals_of", "totals_text"]

#: The total of the weights, and that of states that belong to no parameter.
WEIGHTS, OTHERS = "weights", "others"
_GROUP = re.compile(r"(?:.*\.)?param_groups\.([0-9]{1,9})\.params")
#: Counts of steps in optax's states: the nearest one above a moment is its own.
_COUNTS = ("count", "gradient_step")


class Total(NamedTuple):
    """The tensors of one kind in a checkpoint, and their bytes.

    Attributes:
        kind: `"weights"`, a kind of state (`"exp_avg"`, `"step"`, `"master"`, …), or `"others"` for tensors of the
            training state that belong to no parameter.
        tensors: How many there are.
    """

    kind: str
    tensors: int
    bytes: int


class TrainedParameter(NamedTuple):
    """A parameter in a checkpoint.

    Attributes:
        weight: The name of the tensor that is the parameter's weight; `None` if the checkpoint does not have it.
        states: The names of the parameter's states, by kind.
    """

    weight: str | None
    states: Mapping[str, str]


class _Checkpoint(Protocol):
    """An open checkpoint."""

    @property
    def objects(self) -> Mapping[str, Any]: ...

    @property
    def unreadable(self) -> Mapping[str, str]: ...

    def __iter__(self) -> Iterator[str]: ...

    def __getitem__(self, name: str) -> StoredTensor: ...

    def described(self) -> Iterable[tuple[str, Dtype, tuple[int, ...]]]: ...

    def read(self, name: str) -> Any: ...


class Training:
    """The training state of a checkpoint, whatever its format calls it; `StoredCheckpoint.training` gives it.

    >>> import tempfile
    >>> import numpy as np
    >>> from pathlib import Path
    >>> import shardwise as sw
    >>> tensors = {"model.w": np.ones(3), "optim.state.w.exp_avg": np.zeros(3), "optim.state.w.step": np.float32(2)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = sw.save_checkpoint(Path(folder, "a.safetensors"), tensors)
    ...     with sw.open_checkpoint(Path(folder, "a.safetensors")) as checkpoint:
    ...         training = checkpoint.training
    ...         print(training.parameters["w"].weight, dict(training.parameters["w"].states))
    ...         print(training.step("w"), *training.totals, sep="; ")
    model.w {'exp_avg': 'optim.state.w.exp_avg', 'step': 'optim.state.w.step'}
    2.0; Total(kind='weights', tensors=1, bytes=24); Total(kind='exp_avg', tensors=1, bytes=24); \
Total(kind='step', tensors=1, bytes=4)
    """

    def __init__(self, checkpoint: _Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.names: TrainingNames = training_names(iter(checkpoint), [*checkpoint.objects, *checkpoint.unreadable])

    @cached_property
    def parameters(self) -> Mapping[str, TrainedParameter]:
        """The weight and the states of each parameter, by its name as the states have it."""
        states: dict[str, dict[str, str]] = {}
        weights: dict[str, str | None] = dict(self.names.weights)
        parameters = {weight: parameter for parameter, weight in self.names.weights.items()}
        for name, state in self.names.states.items():
            parameter = parameters.get(state.weight or "", state.parameter)
            if state.weight is None and weights.get(parameter) is not None:
                parameter = state.before + parameter  # A number of an optimizer, and a weight that is called so.
            weights.setdefault(parameter, None)
            states.setdefault(parameter, {})[state.kind] = name
        return MappingProxyType(
            {
                parameter: TrainedParameter(weight, MappingProxyType(states.get(parameter, {})))
                for parameter, weight in weights.items()
            }
        )

    @property
    def is_there(self) -> bool:
        """True if the checkpoint has a tensor of a training state."""
        return bool(self.names.states or self.names.others)

    @cached_property
    def totals(self) -> tuple[Total, ...]:
        """The tensors and bytes of the weights, of each kind of state, and of the rest of the state."""
        return totals_of(self._checkpoint.described(), self.names)

    def is_state(self, name: str) -> bool:
        """Return whether a tensor or a value of this name belongs to the training state."""
        return self.names.is_state(name)

    def step(self, parameter: str) -> float | None:
        """Return the steps that a parameter was trained for, as its optimizer counts them; `None` if nothing says it.

        Raises:
            KeyError: if there is no such parameter.
        """
        states = self.parameters[parameter].states
        name = states.get("step")
        if name is None:
            others = set(self.names.others)
            paths = {path for state in states.values() for path in _above(self.names.states[state].before)}
            counts = [path + count for path in sorted(paths, key=len) for count in _COUNTS if path + count in others]
            name = counts[-1] if counts else None
        return None if name is None else float(self._checkpoint.read(name))

    @cached_property
    def _groups(self) -> Mapping[str, int]:
        found: dict[str, int] = {}
        for name, value in self._checkpoint.objects.items():
            match = _GROUP.fullmatch(name)
            if match is not None:
                found |= {each: int(match[1]) for each in _texts(value)}
        return found

    def group(self, parameter: str) -> int | None:
        """Return the number of a parameter's group in its optimizer; `None` if the checkpoint does not say it.

        Raises:
            KeyError: if there is no such parameter.
            ParseError: if the groups cannot be read.
        """
        return self._groups.get(parameter) if self.parameters[parameter] else None

    def left_out(self) -> list[LeftOut]:
        """Say which states have no weight in the checkpoint, and how many weights have no state although others do."""
        alone = tuple(name for name, state in self.names.states.items() if state.weight is None)
        found = []
        if alone:
            count, which = listed(alone, "optimizer state")
            whose = "its weight" if len(alone) == 1 else "their weights"
            found.append(LeftOut("states", alone, f"{count} there without {whose}: {which}"))
        trained = {state.weight for state in self.names.states.values()}
        if trained - {None}:
            bare = tuple(
                name for name in self.names.weights.values() if name not in trained and self._is_trainable(name)
            )
            if bare:
                count, which = listed(bare, "weight")
                what = "an optimizer state, as if it was" if len(bare) == 1 else "optimizer states, as if they were"
                found.append(LeftOut("untrained", bare, f"{count} without {what} frozen or tied: {which}"))
        return found

    def _is_trainable(self, name: str) -> bool:
        tensor = self._checkpoint[name]
        return tensor.alias_of is None and "float" in tensor.known_dtype.name

    def __str__(self) -> str:
        return totals_text(self.totals)


def _above(path: str) -> Iterator[str]:
    """Yield the paths within which this one lies, each with its dot."""
    while path:
        path = path[: path.rstrip(".").rfind(".") + 1]
        yield path


def totals_of(described: Iterable[tuple[str, Dtype, tuple[int, ...]]], names: TrainingNames) -> tuple[Total, ...]:
    """Count tensors and bytes of weights, of each kind of state and of the rest; the weights come first."""
    counts: dict[str, list[int]] = {WEIGHTS: [0, 0]}
    others = frozenset(names.others)
    for name, dtype, shape in described:
        state = names.states.get(name)
        kind = state.kind if state is not None else OTHERS if name in others else WEIGHTS
        total = counts.setdefault(kind, [0, 0])
        total[0] += 1
        total[1] += bytes_for(math.prod(shape), dtype.bits)
    last = counts.pop(OTHERS, None)
    found = [Total(kind, *total) for kind, total in counts.items()]
    return (*found, *([Total(OTHERS, *last)] if last else []))


def totals_text(totals: Iterable[Total]) -> str:
    """Say totals in a line; an empty text if there is no training state.

    >>> totals_text([Total("weights", 2, 2048), Total("exp_avg", 1, 1024), Total("step", 1, 4)])
    '2 weights, 2.0 KiB; training state: 2 tensors, 1.0 KiB (1 exp_avg, 1.0 KiB; 1 step, 4 B)'
    """
    weights, *kinds = totals
    if not kinds:
        return ""
    each = "; ".join(f"{total.tensors} {total.kind}, {bytes_text(total.bytes)}" for total in kinds)
    count, size = sum(total.tensors for total in kinds), sum(total.bytes for total in kinds)
    first = f"{weights.tensors} weight{'s' * (weights.tensors != 1)}, {bytes_text(weights.bytes)}"
    return f"{first}; training state: {count} tensor{'s' * (count != 1)}, {bytes_text(size)} ({each})"


def totals_dict(totals: Iterable[Total]) -> dict[str, Any]:
    """Return the entry for JSON: tensors and bytes of weights and of the state, and of each kind of state."""
    weights, *kinds = totals
    return {
        "weights": {"tensors": weights.tensors, "bytes": weights.bytes},
        "state": {
            "tensors": sum(each.tensors for each in kinds),
            "bytes": sum(each.bytes for each in kinds),
            "kinds": {each.kind: {"tensors": each.tensors, "bytes": each.bytes} for each in kinds},
        },
    }


def _texts(value: Any) -> list[str]:
    found = value.value()
    return [each for each in found if isinstance(each, str)] if isinstance(found, (list, tuple)) else []
