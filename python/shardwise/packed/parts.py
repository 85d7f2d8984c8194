"""Packed dims as a layout has them: their parts, their factors, and how one of these is cut."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .._arguments import INTEGER, check_fields, check_items, instance, integer
from .._text import elements_text, shown
from ..errors import LayoutError, SizeOverflowError
from .written import packed_text, says_all

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["PackedDim", "Part", "Segment", "concat", "part", "segments_of"]

_RULES = ("even", "ceil", "chunk", "balanced", "floor")
_LARGEST = 2**63 - 1
#: The most that the core takes.
MOST_PARTS, MOST_FACTORS = 1 << 16, 64
_OPTIONAL, _TEXT, _FLAG = (*INTEGER, type(None)), (str, type(None)), (bool, np.bool_)
#: The most segments for which an order is written out.
_MOST_SEGMENTS = 1 << 20

#: A segment of a dim: the name of its tensor, where it begins in that tensor, where in the dim, and its length.
Segment = tuple[str, int, int, int]


@dataclass(frozen=True, repr=False)
class Part:
    """One part of a packed dim; `part` makes one."""

    #: The factors, major first; `None` is unknown until the shape is there.
    factors: tuple[int | None, ...]
    #: The number of the factor that is cut; `None` if every device holds the whole part.
    cut: int | None
    #: The axes and sub-axes that cut it, major first.
    axes: tuple[str, ...]
    #: The rule where it does not divide; `None` is the partition's.
    uneven: str | None
    #: The number that multiplies the unknown factor.
    ratio: int
    #: The most shards that it is cut into.
    at_most: int | None
    #: True if elements of the factor are cut too where there are more shards than elements.
    split: bool
    #: The number of elements of the cut factor that stay together; `None` is one.
    unit: int | None
    #: The cut factor is padded to a multiple of this,
    pad_to: int | None
    #: or, if this is true, every shard of it is.
    pad_each: bool
    #: The tensor that the part holds.
    name: str | None
    #: The tensors that the last factor is made of, one after the other, with their sizes, or how many times the unknown
    #: each is.
    blocks: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        check_fields(self, factors=tuple, cut=_OPTIONAL, axes=tuple, uneven=_TEXT, ratio=INTEGER, at_most=_OPTIONAL)
        check_fields(self, split=_FLAG, unit=_OPTIONAL, pad_to=_OPTIONAL, pad_each=_FLAG, name=_TEXT, blocks=tuple)
        check_items("factors", self.factors, _OPTIONAL)
        check_items("axes", self.axes, str)
        check_items("blocks", self.blocks, tuple)
        if not all(len(block) == 2 and isinstance(block[0], str) for block in self.blocks):
            raise TypeError(f"blocks must be pairs of a name and a size, got {shown(self.blocks)}")

    @property
    def size(self) -> int | None:
        """The number of elements; `None` if a factor is unknown."""
        return None if None in self.factors else math.prod(size for size in self.factors if size is not None)

    def core(self) -> tuple[Any, ...]:
        """Return the part as `_core.Layout` takes it."""
        factors = tuple(-self.ratio if size is None else size for size in self.factors)
        pad = None if self.pad_to is None else (self.pad_to, self.pad_each)
        return factors, self.cut, self.axes, self.uneven, self.at_most, self.split, self.unit, pad

    def __repr__(self) -> str:
        arguments = [repr(self.factors), f"cut={self.cut}"]
        given = {
            "axes": self.axes or None,
            "uneven": self.uneven,
            "ratio": None if self.ratio == 1 else self.ratio,
            "at_most": self.at_most,
            "split": self.split or None,
            "unit": self.unit,
            "pad_to": self.pad_to,
            "pad_each": self.pad_each or None,
            "name": self.name,
            "blocks": self.blocks or None,
        }
        arguments += [f"{key}={value!r}" for key, value in given.items() if value is not None]
        return f"packed.part({', '.join(arguments)})"


@dataclass(frozen=True, repr=False)
class PackedDim:
    """A dim that is several parts one after the other; `concat` makes one.

    It goes wherever the spec of a dim may go in a layout. Immutable, hashable, picklable, and `eval(repr(dim)) == dim`
    where `packed` is `shardwise.packed`.

    >>> from shardwise import packed
    >>> packed.qkv(32, 4, 128, "tp")
    packed.parse('q:(32@tp 128) + k:(4@tp/max4 128) + v:(4@tp/max4 128)')
    """

    #: The parts, in order.
    parts: tuple[Part, ...]
    #: The numbers of a model that its sizes were worked out from, for messages.
    numbers: tuple[tuple[str, int], ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        check_fields(self, parts=tuple, numbers=tuple)
        check_items("parts", self.parts, Part)
        check_items("numbers", self.numbers, tuple)

    @property
    def size(self) -> int | None:
        """The number of elements of the dim; `None` if it is left to the shape."""
        sizes = [part.size for part in self.parts]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that are packed, in the order of their first parts; empty unless all of the dim is named."""
        found: dict[str, None] = {}
        for one in self.parts:
            if one.name is None and not one.blocks:
                return ()
            found.update(dict.fromkeys([one.name] if one.name is not None else [name for name, _ in one.blocks]))
        return tuple(name for name in found if name is not None)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The axes and sub-axes that cut parts, in the order in which they first appear."""
        return tuple(dict.fromkeys(name for one in self.parts for name in one.axes))

    def sizes(self, n: int) -> tuple[int, ...]:
        """Return the size of each part of a dim of `n` elements.

        Raises:
            LayoutError: if the parts do not add up to `n`.

        >>> from shardwise import packed
        >>> packed.gate_up("tp").sizes(28672)
        (14336, 14336)
        """
        known = sum(one.size for one in self.parts if one.size is not None)
        unit, unknown = 0, [one for one in self.parts if one.size is None]
        per_unit = sum(_per_unit(one) for one in unknown)
        if unknown and per_unit and n >= known and (n - known) % per_unit == 0:
            unit = (n - known) // per_unit
        elif known != n:
            raise LayoutError(
                f"the dim has {elements_text(n)}, but its parts of known size add up to {known}: "
                f"{shown(self)}{self.sizes_text()}"
            )
        return tuple(_per_unit(one) * unit if one.size is None else one.size for one in self.parts)

    def segments(self, n: int) -> Iterator[Segment]:
        """Yield the segments of a dim of `n` elements, each of one tensor, in the order in which they are packed.

        Each is the tensor's name, the segment's start in the tensor, its start in the dim, and its length.

        Raises:
            LayoutError: if a part does not name its tensor, or the parts do not add up to `n`.

        >>> from shardwise import packed
        >>> list(packed.qkv(4, 2, 1, "tp", order="interleaved").segments(8))[:4]
        [('q', 0, 0, 2), ('k', 0, 2, 1), ('v', 0, 3, 1), ('q', 2, 4, 2)]
        """
        if not self.names:
            raise LayoutError(f"the order is not stated: not all parts of {shown(self)} have names")
        places = dict.fromkeys(self.names, 0)
        at = count = 0
        for one, size in zip(self.parts, self.sizes(n), strict=True):
            unit = size // _per_unit(one) if one.factors[-1] is None and _per_unit(one) else 1
            blocks = (
                [(one.name, size)] if one.name is not None else [(name, unit * times) for name, times in one.blocks]
            )
            row = sum(length for _, length in blocks)
            for _ in range(size // row if row else 0):
                count += len(blocks)
                if count > _MOST_SEGMENTS:
                    raise LayoutError(f"the order has more than {_MOST_SEGMENTS} segments: {shown(self)}")
                for name, length in blocks:
                    assert name is not None
                    yield name, places[name], at, length
                    places[name] += length
                    at += length

    def sizes_text(self) -> str:
        """Return the model's numbers that the sizes follow from, for the end of a message; empty if there are none."""
        return f", where {', '.join(f'{name} = {value}' for name, value in self.numbers)}" if self.numbers else ""

    def mapped(self, axes: dict[str, tuple[str, ...]]) -> PackedDim:
        """Return the same with each axis replaced by others."""

        def mapped(one: Part) -> Part:
            names = tuple(new for name in one.axes for new in axes[name])
            if names or one.pad_to is not None:
                return replace(one, axes=names)
            return part(one.factors, None, ratio=one.ratio, name=one.name, blocks=one.blocks)

        return PackedDim(tuple(map(mapped, self.parts)), self.numbers)

    def __str__(self) -> str:
        return packed_text(self)

    def __repr__(self) -> str:
        if says_all(self):
            with suppress(LayoutError):  # Names that the notation cannot express.
                return f"packed.parse({packed_text(self)!r})"
        return f"packed.concat({', '.join(map(repr, self.parts))})"


def _per_unit(one: Part) -> int:
    """Return the elements of a part for each unit of its unknown factor."""
    return one.ratio * math.prod(size for size in one.factors if size is not None)


def part(
    factors: int | Sequence[int | None] | None,
    cut: int | None = 0,
    axes: str | Sequence[str] = (),
    uneven: str | None = None,
    *,
    ratio: int = 1,
    at_most: int | None = None,
    split: bool = False,
    unit: int | None = None,
    pad_to: int | None = None,
    pad_each: bool = False,
    name: str | None = None,
    blocks: Sequence[tuple[str, int]] = (),
) -> Part:
    """Make one part of a packed dim: a product of factors, of which at most one is cut.

    Args:
        factors: the sizes of the factors, major first. One of them may be `None`: its size follows from the size of the
            dim, and is one number for all parts.
        cut: the number of the factor that is cut, from 0; `None` if every device is to hold the whole part.
        axes: the axes and sub-axes that cut the part, major first: `"tp"`, `("dp", "tp:(1)8")`.
        uneven: how the part is cut if it does not divide; `None` is the rule of the partition.
        ratio: a multiple of the unknown factor in this part: parts of ratio 2 and 1 share a dim two to one.
        at_most: cut into at most this many shards; where the axes have more coordinates, the devices that differ in the
            minor ones hold the same shard. This replicates key-value heads where there are more devices than heads.
            With several axes it must be the product of the sizes of the first ones and a divisor of the next one.
        split: if the number of shards is a larger multiple of the factor's elements, also cut the factors after it, in
            equal shares. Megatron cuts query groups in this way where there are more devices than groups.
        unit: cut the factor only between multiples of this many elements, as the blocks of quantized weights need. The
            uneven rule acts on units, the last of which may be short.
        pad_to: pad the factor to a multiple of this; every device's array has room for an equal share of the padded
            factor, and the padding, at the end of the last shards, is never read. With a unit, an equal share must be
            whole units.
        pad_each: whether every shard is padded to a multiple of `pad_to`.
        name: the tensor that the part holds, for plans between orders.
        blocks: instead of a name, the tensors that make up the last factor, one after the other, with their sizes; if
            that factor is unknown, their sizes are multiples of the unknown that add up to `ratio`.

    Raises:
        LayoutError: if there is no such factor, a size is negative, or names and blocks do not fit.
        TypeError: if a size is not an integer, or an axis not a string.

    >>> part((3, 12, 64), cut=1, axes="tp")
    packed.part((3, 12, 64), cut=1, axes=('tp',))
    >>> part(2880, axes="tp", uneven="ceil", unit=32)
    packed.part((2880,), cut=0, axes=('tp',), uneven='ceil', unit=32)
    """
    sizes, names = _factors(factors), _axis_names(axes)
    if cut is not None:
        if isinstance(cut, (tuple, list)):
            raise LayoutError(f"cut is {shown(cut)}; at most one factor of a part is cut")
        cut = factor_size("cut", cut, 0)
        if cut >= len(sizes):
            raise LayoutError(f"cut is {cut}, but the part has the factors 0 to {len(sizes) - 1}")
    for flag, given in (("split", split), ("pad_each", pad_each)):
        instance(flag, given, bool)
    how = (uneven, at_most, unit, pad_to)
    if cut is None and (names or split or how != (None,) * 4):
        raise LayoutError("cut is None, but axes, uneven, at_most, split, unit or pad_to say how to cut")
    if not names and pad_to is None:
        cut, uneven, at_most, split, unit = None, None, None, False, None  # Without axes it is not cut.
    if uneven is not None and instance("uneven", uneven, str, " or None") not in _RULES:
        raise LayoutError(f"uneven is {shown(uneven)}; it must be None or one of {', '.join(map(repr, _RULES))}")
    if split and unit is not None:
        raise LayoutError("split and unit are both given; a unit stays whole")
    if split and pad_to is not None:
        raise LayoutError("split and pad_to are both given; units that are padded are not split")
    if pad_each and pad_to is None:
        raise LayoutError("pad_each is True, but pad_to is not given")
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a string or None, got {type(name).__name__}")
    inner = _blocks(blocks, sizes[-1], ratio)
    if inner and name is not None:
        raise LayoutError("a part has a name or blocks, not both")
    if inner and cut == len(sizes) - 1 and names:
        raise LayoutError("blocks make up the last factor, which is cut; blocks are whole in every shard")
    return Part(
        sizes,
        cut,
        names,
        uneven,
        factor_size("ratio", ratio, 1),
        None if at_most is None else factor_size("at_most", at_most, 1),
        split,
        None if unit is None else factor_size("unit", unit, 1),
        None if pad_to is None else factor_size("pad_to", pad_to, 1),
        pad_each,
        name,
        inner,
    )


def _factors(given: Any) -> tuple[int | None, ...]:
    """Return the sizes of factors, given one or several, of which one may be unknown."""
    found = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    sizes = tuple(None if size is None else factor_size(f"factors[{i}]", size, 0) for i, size in enumerate(found))
    if not 1 <= len(sizes) <= MOST_FACTORS:
        raise LayoutError(f"factors has {len(sizes)} entries; a part has 1 to {MOST_FACTORS} factors")
    if sizes.count(None) > 1:
        raise LayoutError(f"factors is {shown(sizes)}; only one factor may be unknown")
    return sizes


def _axis_names(given: Any) -> tuple[str, ...]:
    """Return the names of axes, given one or several."""
    names = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else None
    if names is None or not all(isinstance(axis, str) for axis in names):
        raise TypeError(f"axes must be an axis name or a sequence of them, got {shown(given)}")
    return names


def _blocks(given: Sequence[tuple[str, int]], last: int | None, ratio: int) -> tuple[tuple[str, int], ...]:
    """Return the blocks that make up the last factor, or the multiple `ratio` of it where it is unknown."""
    pairs = [block for block in given if isinstance(block, (tuple, list)) and len(block) == 2]
    if len(pairs) < len(given) or not all(isinstance(label, str) for label, _ in pairs):
        raise TypeError(f"blocks must be pairs of a name and a size, got {shown(given)}")
    blocks = tuple((label, factor_size(f"the size of block {shown(label)}", size, 1)) for label, size in pairs)
    if blocks and (total := sum(size for _, size in blocks)) != (ratio if last is None else last):
        whole = f"{ratio} times the unknown" if last is None else str(last)
        raise LayoutError(f"blocks add up to {total}, but must make up the last factor, {whole}")
    return blocks


def concat(*parts: Part) -> PackedDim:
    """Make a packed dim of parts one after the other; it goes wherever the spec of a dim may go in a layout.

    Args:
        parts: the parts, in the order in which they are in the dim; `part` makes one.

    Raises:
        LayoutError: if there are none, or more than 65,536.
        TypeError: if an argument is not a part.

    >>> half = part(14336, axes="tp")
    >>> concat(half, half).size
    28672
    """
    if not 1 <= len(parts) <= MOST_PARTS:
        raise LayoutError(f"parts: {len(parts)} were given; a packed dim has 1 to {MOST_PARTS} parts")
    for i, one in enumerate(parts):
        if not isinstance(one, Part):
            raise TypeError(f"parts[{i}] must be made by packed.part, got {type(one).__name__}")
    return PackedDim(tuple(parts))


def segments_of(spec: PackedDim, n: int) -> dict[str, npt.NDArray[np.int64]]:
    """Return the segments of each tensor, int64 (segments, 3): their starts in it and in the dim, and lengths."""
    found: dict[str, list[tuple[int, int, int]]] = {name: [] for name in spec.names}
    for name, place, at, length in spec.segments(n):
        rows = found[name]
        if rows and rows[-1][0] + rows[-1][2] == place and rows[-1][1] + rows[-1][2] == at:
            rows[-1] = (*rows[-1][:2], rows[-1][2] + length)
        elif length:
            rows.append((place, at, length))
    return {name: np.array(rows, np.int64).reshape(-1, 3) for name, rows in found.items()}


def factor_size(name: str, value: Any, least: int) -> int:
    number = integer(name, value)
    if number < least:
        raise LayoutError(f"{name} is {shown(number)}; it must be at least {least}")
    if number > _LARGEST:
        raise SizeOverflowError(f"{name} is {shown(number)}, over the limit of {_LARGEST}")
    return number
