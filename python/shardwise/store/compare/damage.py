"""Damage of a checkpoint, and the report on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..._arguments import INTEGER, check_fields
from ..._text import counted, shown
from ...errors import ParseError
from ...rules.left_out import LeftOut
from ..data.location import LOCATIONS, Location
from ..tensors.training import Total

__all__ = ["MOST_SHOWN", "Damage", "DamageError", "VerifyReport", "damage_lines"]

#: The most damages that a message lists.
MOST_SHOWN = 20
#: The most tensors of a damaged file that a message names.
_MOST_NAMED = 3


@dataclass(frozen=True)
class Damage:
    """A part of a checkpoint that is damaged.

    Attributes:
        tensor: The damaged tensor; `None` if the damage is elsewhere, such as in a header.
        file: The file that is damaged.
        problem: A sentence about the damage, with the names of tensor and file.
    """

    tensor: str | None
    file: str
    problem: str

    def __post_init__(self) -> None:
        check_fields(self, tensor=(str, type(None)), file=str, problem=str)

    def __str__(self) -> str:
        return self.problem


@dataclass(frozen=True)
class VerifyReport:
    """The result of verifying a checkpoint.

    Attributes:
        path: The checkpoint.
        format: The checkpoint's format; an empty text if the checkpoint is too damaged to be opened.
        tensors: The number of the checkpoint's tensors.
        bytes: The bytes of all tensors, which were all read.
        digests: The number of digests compared. If the checkpoint has neither digests nor CRC-32, only its structure is
            verified, and whether all of it can be read.
        crcs: The number of CRC-32 compared, of members of PyTorch's zip containers.
        unreadable: The tensors that were not read, because their kind is not supported.
        damaged: All damage that was found.
        left_out: The files next to the checkpoint that are not read, states without their weights, and the tensors that
            the call left out.
        totals: The tensors and bytes of the weights, and of each kind of training state.
    """

    path: Location
    format: str
    tensors: int
    bytes: int
    digests: int
    crcs: int
    unreadable: tuple[str, ...] = ()
    damaged: tuple[Damage, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    totals: tuple[Total, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, path=LOCATIONS, format=str, tensors=INTEGER, bytes=INTEGER)
        check_fields(self, digests=INTEGER, crcs=INTEGER, unreadable=tuple, damaged=tuple, left_out=tuple, totals=tuple)


def damage_lines(damaged: Iterable[Damage]) -> list[str]:
    """Return a line for each damage; damage of a file is said once, with the first tensors that the file holds.

    >>> damage_lines([Damage(name, "f", f"f: is missing; it holds {name!r}") for name in "abcde"])
    ["f: is missing; it holds 5 tensors: 'a', 'b', 'c' and 2 more"]
    """
    held: dict[str, list[str]] = {}
    for one in damaged:
        name = f"; it holds {shown(one.tensor)}"
        problem = one.problem if one.tensor is None else one.problem.removesuffix(name)
        names = held.setdefault(problem, [])
        if problem != one.problem:
            names.append(shown(one.tensor))
    lines = []
    for problem, names in held.items():
        more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
        count = f"{counted(len(names), 'tensor')}: " if len(names) > 1 else ""
        lines.append(problem + (f"; it holds {count}{', '.join(names[:_MOST_NAMED])}{more}" if names else ""))
    return lines


class DamageError(ParseError):
    """Raised for a damaged checkpoint; the message has a line for each of the first twenty damages.

    Attributes:
        report: The report of `verify_checkpoint`, with all damage.
    """

    def __init__(self, message: str, report: VerifyReport | None = None) -> None:
        super().__init__(message)
        self.report = report or VerifyReport(Path(), "", 0, 0, 0, 0)

    def __reduce__(self) -> tuple[Any, ...]:
        return DamageError, (str(self), self.report)
