"""The stored tensors of one group: their names, dtypes and shapes, checked against each other."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .._text import counted, shown
from ..errors import ParseError
from ..rules.names import weight_named
from .component import Along, Component, LogicalTensor

__all__ = ["LARGEST", "WHOLE", "Given", "StatedError", "WeightGroup", "as_parse_errors"]

#: The largest block, group or number of bits that a configuration may state.
LARGEST = 2**31 - 1

#: A dim that every device holds whole.
WHOLE = Along(None)


class StatedError(ParseError):
    """A configuration that lacks what its form of quantized weights needs, or contradicts it; the message says so.

    >>> str(StatedError("bits is missing"))
    'bits is missing; give a corrected configuration (--config)'
    """

    def __init__(self, said: str) -> None:
        super().__init__(f"{said}; give a corrected configuration (--config)")


@contextmanager
def as_parse_errors() -> Iterator[None]:
    """Raise errors of the configuration as any others: which they are is for those who can do without it."""
    try:
        yield
    except StatedError as error:
        raise ParseError(str(error)) from None


@dataclass(frozen=True)
class Given:
    """The quantization_config of a model, with a function that reads small tensors."""

    config: Mapping[str, Any]
    #: The reader of small tensors by name, if any; it gives `None` for those that are not to be read.
    read: Callable[[str], bytes | None] | None
    #: Values that are worked out once for all groups.
    kept: dict[str, Any] = field(default_factory=dict)

    def integer(self, *keys: str, least: int = 1) -> int | None:
        """Return the integer that the first key that is there has; `None` without one.

        Raises:
            ParseError: if it is no integer from `least` to `LARGEST`.
        """
        for key in keys:
            value = self.config.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST:
                raise StatedError(
                    f"quantization_config: {key} is {shown(value)}; it must be an integer from {least} to {LARGEST}"
                )
            return value
        return None

    def texts(self, key: str) -> list[str]:
        """Return the list of texts that a key has; empty without one.

        Raises:
            ParseError: if it is anything else.
        """
        value = self.config.get(key)
        if value is None:
            return []
        if not isinstance(value, (list, tuple)) or not all(isinstance(text, str) for text in value):
            raise StatedError(f"quantization_config: {key} is {shown(value)}; it must be a list of names")
        return list(value)


class WeightGroup(NamedTuple):
    """The stored tensors of one weight, by the last part of their names: name, dtype, shape."""

    name: str
    members: Mapping[str, tuple[str, str, tuple[int, ...]]]
    given: Given

    def shape(self, tail: str) -> tuple[int, ...]:
        """Return the shape of a member.

        Raises:
            ParseError: if it is missing.
        """
        return self._member(tail)[2]

    def dtype(self, tail: str) -> str:
        """Return the dtype of a member; an empty text if it is missing."""
        member = self.members.get(tail)
        return "" if member is None else member[1]

    def _member(self, tail: str) -> tuple[str, str, tuple[int, ...]]:
        member = self.members.get(tail)
        if member is None:
            raise ParseError(f"{shown(self.name)}: its {tail} is missing; it has {', '.join(self.members)}")
        return member

    def matrix(self, tail: str) -> tuple[int, ...]:
        """Return the shape of a member of at least two dims.

        Raises:
            ParseError: if it is missing, or has fewer.
        """
        name, _, shape = self._member(tail)
        if len(shape) < 2:
            raise ParseError(f"{shown(name)} has the shape {shape}; it must have at least two dims")
        return shape

    def scale(self, tail: str, shape: tuple[int, ...], blocks: tuple[int, int] | None) -> tuple[Along, ...]:
        """Return the dim of the weight, and the elements of it, that each dim of the scales named `tail` stands for.

        Args:
            tail: The end of the scales' name.
            shape: The shape of the weight.
            blocks: The elements of the last two dims that share a scale, 0 for all; `None` for one scale for the whole.

        Raises:
            ParseError: if the scales have another shape than these blocks give.
        """
        name, _, own = self._member(tail)
        lead = tuple(Along(dim) for dim in range(len(shape) - 2))
        if blocks is None:
            # One for the tensor, or one for each of the experts.
            if own in ((), (1,)) or own == (1,) * len(shape):
                return (WHOLE,) * len(own)
            if own[: len(lead)] == shape[:-2] and math.prod(own[len(lead) :]) in (1, self._fused):
                return (*lead, *(WHOLE,) * (len(own) - len(lead)))
            raise ParseError(f"{shown(name)} has the shape {own}; expected one scale for the whole of {shape}")
        along = (*lead, *(Along(len(lead) + i, block) if block else WHOLE for i, block in enumerate(blocks)))
        expected = (
            *shape[:-2],
            *(each.elements(n) if each.of is not None else 1 for each, n in zip(along[-2:], shape[-2:], strict=True)),
        )
        if own == expected:
            return along
        # Scales of whole rows may have no dim for the columns.
        if blocks[1] == 0 and own == expected[:-1]:
            return along[:-1]
        raise ParseError(
            f"{shown(name)} has the shape {own}; for a weight of {shape} in blocks of {_blocks(blocks)} it must be "
            f"{expected}"
        )

    @property
    def _fused(self) -> int:
        """The number of weights that engines fuse under this name, one after the other; each may have a scale."""
        weight = weight_named(re.sub(r"[._]weight[0-9]*$", "", self.name), elsewhere=True)
        return 1 if weight is None else weight.parts

    def tensor(
        self,
        form: str,
        shape: tuple[int, ...],
        along: Mapping[str, tuple[Along, ...]],
        uncut: tuple[tuple[int, str], ...] = (),
        stated: Mapping[str, str] | None = None,
    ) -> LogicalTensor:
        """Make the logical tensor, with what each dim of each component stands for.

        Raises:
            ParseError: if the shape of a component is not the one that this makes.
        """
        components = []
        for tail, each in along.items():
            name, dtype, own = self._member(tail)
            if len(each) != len(own):
                raise ParseError(
                    f"{shown(name)} has the shape {own}; for a weight of {shape} it must have "
                    f"{counted(len(each), 'dim')}"
                )
            expected = tuple(
                have if one.of is None or one.of < 0 else one.elements(shape[one.of])
                for one, have in zip(each, own, strict=True)
            )
            if expected != own:
                raise ParseError(f"{shown(name)} has the shape {own}; for a weight of {shape} it must be {expected}")
            components.append(Component(name, dtype, own, each))
        said = tuple((self.members[tail][0], what) for tail, what in (stated or {}).items() if tail in self.members)
        return LogicalTensor(self.name, shape, form, tuple(components), uncut, said)

    def read(self, tail: str) -> bytes | None:
        """Read the bytes of a member; `None` if there is no reader, or it does not read this one."""
        return None if self.given.read is None else self.given.read(self._member(tail)[0])


def _blocks(blocks: tuple[int, int]) -> str:
    return " x ".join(str(block) if block else "all" for block in blocks)
