"""Problems of tensors under the rules of a layout map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .._text import elements_text

__all__ = ["NO_RULE", "Clash", "IndivisibleDim", "Misfit", "RankMismatch", "unused_texts"]

#: The reason of a `Misfit` with no rule where there is no default either.
NO_RULE = "no rule matches it, and there is no default"
#: The most rules that apply to no name and each have a line; more share one, which names as many.
_APART = 3


@dataclass(frozen=True)
class Clash:
    """A name that several rules match, which a look-up refuses."""

    name: str
    rules: tuple[str, ...]

    def __str__(self) -> str:
        rules = ", ".join(map(repr, self.rules))
        return f"{self.name!r} matches {len(self.rules)} rules, but only one may match: {rules}"


@dataclass(frozen=True)
class RankMismatch:
    """A tensor whose rank is not that of its rule's layout, or below that of the default (the rule `None`)."""

    name: str
    rule: str | None
    rank: int
    layout_rank: int

    def __str__(self) -> str:
        if self.rule is None:
            return f"{self.name!r} has rank {self.rank}, but the default layout needs rank {self.layout_rank} or more"
        of_rule = f"the layout of its rule {self.rule!r} has rank {self.layout_rank}"
        return f"{self.name!r} has rank {self.rank}, but {of_rule}"


@dataclass(frozen=True)
class IndivisibleDim:
    """A dim of `size` elements that a rule, or the default (`None`), cuts into shards that do not divide it."""

    name: str
    rule: str | None
    dim: int
    size: int
    num_shards: int

    def __str__(self) -> str:
        return (
            f"{self.name!r}: dim {self.dim} has {elements_text(self.size)}, which the {self.num_shards} shards of "
            f"{'the default' if self.rule is None else f'its rule {self.rule!r}'} do not divide evenly"
        )


@dataclass(frozen=True)
class Misfit:
    """A tensor that cannot be placed by its rule, or by the default (the rule `None`), and the reason.

    The tensor does not fit a packed dim, has no coordinates in a deployment, or has neither a rule nor a default.
    """

    name: str
    rule: str | None
    reason: str

    def __str__(self) -> str:
        if self.reason == NO_RULE:
            return f"{self.name!r}: {self.reason}"
        return f"{self.name!r}: {self.reason} ({'the default' if self.rule is None else f'rule {self.rule!r}'})"


def unused_texts(rules: Sequence[str]) -> list[str]:
    """Return a line for each rule that applies to no name, or one for all if there are many: rules for a whole family.

    >>> unused_texts(["bias$"])
    ["rule 'bias$' applies to no name"]
    >>> unused_texts(["a", "b", "c", "d", "e"])
    ["5 rules apply to no name: 'a', 'b', 'c' and 2 more"]
    """
    if len(rules) <= _APART:
        return [f"rule {rule!r} applies to no name" for rule in rules]
    named = ", ".join(map(repr, rules[:_APART]))
    return [f"{len(rules)} rules apply to no name: {named} and {len(rules) - _APART} more"]
