"""Answers about sizes: verdicts, the cuts that they come from, and the limits of engines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from ..quantized import LogicalTensor

__all__ = ["ORDER", "WAYS", "Cut", "Fits", "Limit", "SizeFit", "Unknown", "Verdict", "forms_of"]

#: The verdicts, from the best. `"fits"`: all cuts are on whole blocks. `"shared"`: some are within a block whose scale
#: all ranks in it hold, each of them in no other. `"padded"`: some dims have to be padded. `"unknown"`: it cannot be
#: said, because some tensors are not recognised. `"refused"`: none of these would do, whatever is not recognised.
Verdict = Literal["fits", "shared", "padded", "unknown", "refused"]
ORDER: tuple[Verdict, ...] = ("fits", "shared", "padded", "unknown", "refused")
#: The numbers of shards that are looked at for those that would do.
WAYS = range(1, 65)


class Limit(NamedTuple):
    """A limit of an engine: it refuses a cut, or computes wrongly with it, although the format may allow it."""

    #: The engine and its version.
    engine: str
    #: The kernel or the check that refuses.
    kernel: str
    why: str


class Cut(NamedTuple):
    """The cut of one dim, the same for all tensors of a kind."""

    #: The names, with `*` for numbers.
    name: str
    #: The number of these tensors.
    tensors: int
    form: str
    #: The dim; -1 if rules cannot be made for so many ranks, so that it is all that they cut.
    dim: int
    #: The elements that are cut: those of one part, where a dim holds several (gate and up).
    size: int
    #: The name of the heads in whole numbers of which the elements are cut, and the elements of one.
    heads: str
    head_size: int
    #: The number of shards.
    ways: int
    #: The elements that stay together by the format, and the components whose blocks these are.
    unit: int
    blocks: tuple[tuple[str, int], ...]
    verdict: Verdict
    #: The reason why it does not fit; empty if it fits.
    why: str
    #: The least size that is cut into whole units when padded; `None` if it is already, or padding does not help.
    padded: int | None
    #: True if the dim cannot be cut at all, whatever the size.
    never: bool
    #: The numbers of shards, of 1 to 64, that cut whole units, and whole heads.
    sizes: tuple[int, ...]
    #: The lengths of the shards where engines cut in whole units under the rule `"ceil"`; empty if it fits.
    ceil: tuple[int, ...]
    limits: tuple[Limit, ...] = ()
    #: The evidence of the verdict: the name, numbers of the configuration, shapes, or a rule.
    rests_on: str = ""

    @property
    def per_rank(self) -> float:
        """The elements of a shard; not always a whole number."""
        return self.size // self.ways if self.size % self.ways == 0 else self.size / self.ways

    @property
    def on_units(self) -> bool:
        """True if every shard is whole units."""
        return self.size % (self.ways * self.unit) == 0


class Unknown(NamedTuple):
    """A kind of tensors that is not recognised."""

    #: The names, with `*` for numbers.
    name: str
    #: The number of these tensors.
    tensors: int
    shape: tuple[int, ...]
    why: str


class SizeFit(NamedTuple):
    """The answer for one size."""

    tp: int
    ep: int
    verdict: Verdict
    #: All cuts, those that fit worst first.
    cuts: tuple[Cut, ...]

    @classmethod
    def of(cls, tp: int, ep: int, cuts: Iterable[Cut], *, known: bool = True) -> SizeFit:
        """Return the answer that follows from cuts; if some cuts are unknown, only one rank is known to fit."""
        ordered = sorted(cuts, key=lambda cut: -ORDER.index(cut.verdict))
        verdict: Verdict = ordered[0].verdict if ordered else "fits"
        if not known and tp * ep > 1:
            verdict = max(verdict, "unknown", key=ORDER.index)
        return cls(tp, ep, verdict, tuple(ordered))

    @property
    def rests_on(self) -> tuple[str, ...]:
        """The evidence of the cuts with this verdict, each item once."""
        if self.tp * self.ep == 1 and self.verdict == "fits":
            return ("one rank, which has all tensors whole",)
        cuts = self.cuts if self.verdict == "fits" else [cut for cut in self.cuts if cut.verdict == self.verdict]
        return tuple(dict.fromkeys(cut.rests_on for cut in cuts if cut.rests_on))

    @property
    def problems(self) -> tuple[Cut, ...]:
        """The cuts whose verdict is not `"fits"`."""
        return tuple(cut for cut in self.cuts if cut.verdict != "fits")

    @property
    def limits(self) -> tuple[tuple[Cut, Limit], ...]:
        """The refusals of engines, one for each reason, with the first cut that it concerns."""
        found: dict[Limit, Cut] = {}
        for cut in self.cuts:
            for limit in cut.limits:
                found.setdefault(limit, cut)
        return tuple((cut, limit) for limit, cut in found.items())


class Fits(NamedTuple):
    """The answer for a model: the numbers of parts into which it may be cut, with their verdicts."""

    #: The value of `quant_method`; `None` if nothing is quantized.
    method: str | None
    #: The forms of its weights, with their numbers of tensors.
    forms: tuple[tuple[str, int], ...]
    sizes: tuple[SizeFit, ...]
    #: The names of tensors of several dims that every rank has whole, with `*` for numbers.
    whole: tuple[str, ...]
    #: The tensors of several dims that are not recognised.
    unknown: tuple[Unknown, ...] = ()
    #: The names of tensors of other networks than the language model, of which the verdicts say nothing.
    elsewhere: tuple[str, ...] = ()
    #: The evidence of the answer as a whole: names, a configuration, a method, rules.
    rests_on: tuple[str, ...] = ()

    @property
    def is_known(self) -> bool:
        """True if there is a verdict for each size."""
        return all(size.verdict != "unknown" for size in self.sizes)

    def as_json(self) -> dict[str, Any]:
        """Return all of it as objects, lists and numbers."""
        return {
            "method": self.method,
            "forms": dict(self.forms),
            "sizes": [
                {
                    "tp": size.tp,
                    "ep": size.ep,
                    "verdict": size.verdict,
                    "rests_on": list(size.rests_on),
                    "problems": [_cut_json(cut) for cut in size.problems],
                    "engines": [{"tensor": cut.name, **limit._asdict()} for cut, limit in size.limits],
                }
                for size in self.sizes
            ],
            "whole": list(self.whole),
            "unknown": [{**one._asdict(), "shape": list(one.shape)} for one in self.unknown],
            "elsewhere": list(self.elsewhere),
            "rests_on": list(self.rests_on),
        }


def forms_of(tensors: Iterable[tuple[LogicalTensor, int]]) -> tuple[tuple[str, int], ...]:
    """Return the forms of quantized weights with their numbers of tensors."""
    forms: dict[str, int] = {}
    for tensor, count in tensors:
        if tensor.form != "plain":
            forms[tensor.form] = forms.get(tensor.form, 0) + count
    return tuple(sorted(forms.items()))


def _cut_json(cut: Cut) -> dict[str, Any]:
    named = cut._asdict()
    named.pop("limits")
    return {**named, "blocks": dict(cut.blocks), "per_rank": cut.per_rank}
