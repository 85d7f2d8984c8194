"""Cuts by a ratio: devices of unequal memory hold unequal shares, each of whole heads, groups and blocks.

A ratio is for all that tensor parallelism cuts. Heads of queries go with their key-value heads, and columns with the
rows that make them, so each *kind of unit* is cut once, for all tensors that have it. A share is from
`⌊units · before / all⌋` on, as llama.cpp has it for `--tensor-split`: where units do not divide in the ratio, it is
rounded, and no device may be left without one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

from .._arguments import integers_of
from .._text import counted, shown
from ..errors import LayoutError
from ..piece import Piece
from ..quantized.forms import find_kinds
from ..rules.numbers import Config
from ..tiling import Tiling
from .evidence import Judged, judged, odd_elements
from .model import opened_model
from .sizes import portions

__all__ = ["RatioCut", "RatioFit", "UnitShares", "fits_ratio"]

#: The verdicts, from the best: all units in the ratio, rounded to whole units, not known, or not possible.
RatioVerdict = Literal["fits", "rounded", "unknown", "refused"]
_ORDER: tuple[RatioVerdict, ...] = ("fits", "rounded", "unknown", "refused")
#: The most devices of a ratio, and the largest of its numbers.
_MOST, _LARGEST = 1024, 1 << 32


class UnitShares(NamedTuple):
    """The shares of one kind of unit.

    Attributes:
        what: The unit in words: `"groups of 4 heads and a key-value head"`, `"blocks of 32 of 11008"`.
        units: The number of units.
        shares: The units of each device.
        verdict: `"fits"` if the shares are in the ratio, `"rounded"` if they are rounded to whole units, `"refused"` if
            not.
        why: The reason why the shares are rounded or refused.
        names: The names of the tensors, with `*` for numbers.
    """

    what: str
    units: int
    shares: tuple[int, ...]
    verdict: RatioVerdict
    why: str
    names: tuple[str, ...]


class RatioCut(NamedTuple):
    """A tensor that is cut by a ratio.

    Attributes:
        dim: The dim that is cut.
        segments: For each device the segments of that dim that it has, each from its first element to one past its
            last; a fused tensor has one for each part.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    segments: tuple[tuple[tuple[int, int], ...], ...]


class RatioFit(NamedTuple):
    """The answer for a ratio.

    Attributes:
        ratio: The ratio, in its lowest terms.
        verdict: The worst of the verdicts, or `"unknown"` if none is a refusal and tensors are not recognised.
        units: The shares of each kind of unit.
        unknown: The names of tensors that are not recognised.
        quantized: The names of quantized weights that are cut; the tilings do not include their scales.
        cuts: The tensors that are cut.
    """

    ratio: tuple[int, ...]
    verdict: RatioVerdict
    units: tuple[UnitShares, ...]
    unknown: tuple[str, ...]
    quantized: tuple[str, ...]
    cuts: tuple[RatioCut, ...]

    def tilings(self, devices: Sequence[Hashable]) -> dict[str, Tiling]:
        """Return who holds what of each tensor that is cut, as `plan_model` takes it; others are whole on each device.

        Raises:
            LayoutError: if the ratio does not fit, or is for another number of devices.
        """
        if self.quantized:
            raise LayoutError(f"{shown(self.quantized[0])} is quantized; tilings by a ratio are of whole elements")
        if self.verdict not in ("fits", "rounded"):
            raise LayoutError(f"the ratio {self.text} is {self.verdict}, so it is not known which device holds what")
        if len(devices) != len(self.ratio):
            raise LayoutError(
                f"devices has {counted(len(devices), 'label')}, but the ratio {self.text} needs {len(self.ratio)}"
            )
        made: dict[Any, Tiling] = {}
        found = {}
        for name, shape, dim, every in self.cuts:
            key = shape, dim, every
            if key not in made:
                whole = tuple((0, size) for size in shape)
                boxes = {
                    label: [(*whole[:dim], segment, *whole[dim + 1 :]) for segment in own]
                    for label, own in zip(devices, every, strict=True)
                }
                arrays = {
                    label: (*shape[:dim], sum(b - a for a, b in own), *shape[dim + 1 :])
                    for label, own in zip(devices, every, strict=True)
                }
                made[key] = Tiling.from_boxes(shape, _placed(boxes, dim), arrays=arrays)
            found[name] = made[key]
        return found

    @property
    def text(self) -> str:
        """The ratio as it is written: `3:2:1`."""
        return ":".join(map(str, self.ratio))


def fits_ratio(
    model: str | os.PathLike[str] | Mapping[str, Any], ratio: Sequence[int], *, config: Config | None = None
) -> RatioFit:
    """Say whether a model can be cut over devices in a ratio, in whole heads, groups and blocks.

    Args:
        model: A checkpoint or a configuration, as `fits` takes it.
        ratio: A number for each device, such as `(3, 2, 1)`.
        config: The model's `config.json`, or its contents; the one next to the checkpoint if left out.

    Raises:
        LayoutError: if a number is below 1, or there are too many.
        OSError, ParseError: as `fits`.

    >>> config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 172, "vocab_size": 99}
    >>> config |= {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4}
    >>> for one in fits_ratio(config, (2, 1, 1)).units:
    ...     print(one.verdict, one.shares, one.what)
    fits (2, 1, 1) groups of 2 heads and a key-value head
    fits (86, 43, 43) elements of 172
    >>> print(fits_ratio(config, (5, 1)).units[0].why)
    4 groups in 5:1 are rounded to 3, 1
    """
    given = integers_of("ratio", ratio)
    if not 1 <= len(given) <= _MOST or not all(1 <= one <= _LARGEST for one in given):
        raise LayoutError(f"ratio is {shown(tuple(given))}; it must be 1 to {_MOST} numbers from 1 to {_LARGEST}")
    terms = tuple(one // math.gcd(*given) for one in given)
    with opened_model(model, config) as (outline, said, read):
        _, kinds = find_kinds(outline, said, read)
        known = judged(kinds, said)
    unknown = [
        one.name
        for one in known
        if one.role.unknown and (len(one.kind.tensor.shape) > 1 or odd_elements(one.kind.tensor, said))
    ]
    cut = [one for one in known if one.role.dim is not None and not one.role.vocabulary]
    unknown += [
        one.name for one in cut if one.role.heads == "qkv" or (one.role.heads in ("q", "kv") and not _group(one))
    ]
    classes: dict[tuple[str, int], list[Judged]] = {}
    for one in cut:
        if one.name not in unknown:
            classes.setdefault(_class(one), []).append(one)
    units = {key: _shares(key, members, terms) for key, members in classes.items()}
    verdicts = [one.verdict for one in units.values()]
    if unknown or not cut:
        verdicts.append("unknown")
    cuts = {
        name: RatioCut(name, one.kind.tensor.shape, _dim(one), _segments(one, units[key]))
        for key, members in classes.items()
        if units[key].verdict != "refused"
        for one in members
        for name in one.kind.names
    }
    for one in known:  # A bias is cut as the rows of its weight.
        for name in one.kind.names if one.name.endswith(".bias") else ():
            rows = cuts.get(f"{name.removesuffix('bias')}weight")
            if rows is not None and rows.dim == 0 and one.kind.tensor.shape == rows.shape[:1]:
                cuts[name] = RatioCut(name, one.kind.tensor.shape, 0, rows.segments)
    quantized = tuple(dict.fromkeys(one.name for one in cut if one.kind.tensor.form != "plain"))
    verdict = max(verdicts, key=_ORDER.index)
    return RatioFit(
        terms, verdict, tuple(units.values()), tuple(dict.fromkeys(unknown)), quantized, tuple(cuts.values())
    )


def _dim(one: Judged) -> int:
    assert one.role.dim is not None
    return len(one.kind.tensor.shape) + one.role.dim


def _group(one: Judged) -> int:
    """Return the heads of queries that go with a key-value head; 0 if that is not known."""
    q, kv = one.heads.q, one.heads.kv
    return q // kv if q and kv and q % kv == 0 else 0


def _class(one: Judged) -> tuple[str, int]:
    """Return the kind and the number of the units in which a dim is cut; dims with equal ones are cut alike."""
    if one.role.heads in ("q", "kv"):
        return "groups", one.heads.kv
    if one.role.heads == "linear":
        return "heads of linear attention", one.heads.linear
    return "elements", one.kind.tensor.shape[_dim(one)] // one.role.parts


def _shares(key: tuple[str, int], members: Sequence[Judged], ratio: Sequence[int]) -> UnitShares:
    what, count = key
    names = tuple(sorted({one.name for one in members}))
    together = 1
    for one in members:
        tensor, dim = one.kind.tensor, _dim(one)
        each = tensor.shape[dim] // one.role.parts // count if count else 0
        unit = tensor.unit(dim)
        if (why := tensor.why_uncut(dim)) or not each or tensor.shape[dim] % (count * one.role.parts):
            why = why or f"{tensor.shape[dim]} rows or columns of {one.name} are not {count} {what}"
            return UnitShares(what, count, (), "refused", why, names)
        together = math.lcm(together, unit // math.gcd(unit, each))
    if what == "groups":
        heads = _group(members[0])
        said = f"groups of {heads} head{'s' * (heads > 1)} and a key-value head"
        said = said if together == 1 else f"{together} {said} together"
    elif together == 1:
        said = what if what != "elements" else f"elements of {count}"
    else:
        said = f"blocks of {together} of {count}" if what == "elements" else f"{together} {what} together"
    if count % together:
        why = f"{count} {what} are not whole blocks of {together}"
        return UnitShares(said, count // together, (), "refused", why, names)
    units = count // together
    bounds = [units * at // sum(ratio) for at in accumulate(ratio, initial=0)]
    shares = tuple(b - a for a, b in pairwise(bounds))
    text, word = ":".join(map(str, ratio)), what if together == 1 else "blocks"
    if 0 in shares:
        why = f"{units} {word} in {text} leave device {shares.index(0)} without one"
        return UnitShares(said, units, shares, "refused", why, names)
    if all(units * one % sum(ratio) == 0 for one in ratio):
        return UnitShares(said, units, shares, "fits", "", names)
    why = f"{units} {word} in {text} are rounded to {', '.join(map(str, shares))}"
    return UnitShares(said, units, shares, "rounded", why, names)


def _segments(one: Judged, cut: UnitShares) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return for each device the segments of the dim that it has: one of each part."""
    found: list[list[tuple[int, int]]] = [[] for _ in cut.shares]
    base = 0
    for part in portions(one.role, one.heads, one.kind.tensor.shape[_dim(one)], 1):
        each = part.size // cut.units
        for device, (a, b) in enumerate(pairwise(accumulate(cut.shares, initial=0))):
            found[device].append((base + a * each, base + b * each))
        base += part.size
    return tuple(map(tuple, found))


def _placed(boxes: Mapping[Any, list[tuple[tuple[int, int], ...]]], dim: int) -> dict[Any, Any]:
    """Return the boxes of each device, one after the other along the dim in its own array."""
    placed = {}
    for label, own in boxes.items():
        at, pieces = 0, []
        for box in own:
            begin = tuple(at if each == dim else 0 for each in range(len(box)))
            pieces.append(Piece(tuple(slice(a, b) for a, b in box), begin))
            at += box[dim][1] - box[dim][0]
        placed[label] = pieces
    return placed
