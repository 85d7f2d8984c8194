"""Tensors, values and files that a new checkpoint lacks: counted and named in the same way everywhere (rule 2.23)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from .._arguments import INTEGER, check_fields, check_items
from .._text import bytes_text, shown
from ..errors import LayoutError
from ..show.names import group_names

__all__ = ["LeftOut", "LossKind", "listed", "names_text"]

#: The kinds of things that are left out; `LeftOut` says what becomes of each.
LossKind = Literal[
    "dropped", "asked", "values", "unmatched", "axes", "states", "untrained", "beside", "cast", "rounded"
]

_SHOWN = 4


@dataclass(frozen=True)
class LeftOut:
    """Things of one kind that are left out, or that differ from what the rules seem to say.

    A `LeftOut` as text is the sentence that says so.

    Attributes:
        kind: `"dropped"`: a rules file drops these tensors. `"asked"`: `only`, `drop` or `which` of the call leaves
            them out, so nobody is warned. `"values"`: these are not tensors, and the new format has no place for them.
            `"unmatched"`: no rule matches these tensors, so every device holds them whole. `"axes"`: no rule uses these
            mesh axes, so they replicate. `"states"`: the weights of these states are missing. `"untrained"`: these
            weights have no state, but others have one. `"beside"`: these files next to a checkpoint are not read.
            `"cast"`: rules for certain types of models cut these weights in floats of 8 bits or less, and nothing says
            that the weights were only cast. `"rounded"`: the master copies are written or compared in place of these
            weights.
        names: The names of those tensors, values, axes or files.
        text: The sentence.
        nbytes: The bytes of those things; `None` if they are not known.
    """

    kind: LossKind
    names: tuple[str, ...]
    text: str
    nbytes: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, kind=str, names=tuple, text=str, nbytes=(*INTEGER, type(None)))
        check_items("names", self.names, str)
        if self.kind not in get_args(LossKind):
            known = ", ".join(map(repr, get_args(LossKind)))
            raise LayoutError(f"kind is {shown(self.kind)}; it must be one of {known}")

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """Return the entry for JSON: the kind, how many there are, their bytes, the sentence, and all names."""
        return {
            "kind": self.kind,
            "count": len(self.names),
            "bytes": self.nbytes,
            "text": self.text,
            "names": list(self.names),
        }


def listed(names: Sequence[str], what: str = "tensor", nbytes: int | None = None) -> tuple[str, str]:
    """Return how many things there are, with the verb to go with it, and their names, alike ones together.

    >>> listed(["h.0.m", "h.1.m", "h.2.m"], "tensor", 12)
    ('3 tensors (12 B) are', "'h.{0..2}.m'")
    """
    size = "" if nbytes is None else f" ({bytes_text(nbytes)})"
    count = f"1 {what}{size} is" if len(names) == 1 else f"{len(names)} {what}s{size} are"
    return count, names_text(names)


def names_text(names: Iterable[str]) -> str:
    """Return the first of these names, those together that differ in their numbers only.

    >>> names_text(["b", "a"])
    "'a', 'b'"
    """
    groups = [text for text, _, _ in group_names((name, None) for name in names)]
    more = f" and {len(groups) - _SHOWN} more like these" if len(groups) > _SHOWN else ""
    return ", ".join(map(shown, groups[:_SHOWN])) + more
