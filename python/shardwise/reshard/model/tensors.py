"""The tensors of a model with their tilings on both sides; tensors with the same two tilings share a pair of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..._arguments import optional
from ..._dtypes import bits_of, dtype_of
from ..._fork import importing
from ..._text import shown
from ..._types import Numbers
from ...rules.rewrites import Rewrites
from ...tiling import Tiling
from ..orders import check_packed
from .sides import Described, ModelChange, PieceRows, TilingSide, shape_and_dtype

if TYPE_CHECKING:
    from ...conversion.assembled import Assembled
    from ...rules.left_out import LeftOut

__all__ = ["ModelTensors", "model_tensors"]

#: Parts of the names of all states and adapters; if a name has none of them, it is not looked into further.
_FOLLOWERS = ("opt", "state.", "lora_", ".adapter.")


class ModelTensors(NamedTuple):
    """The tensors of a model, and their tilings before and after a change of its layouts.

    Attributes:
        tensors: The shapes and dtypes of the destination's tensors.
        stored: Those of the source's tensors: the same object if nothing is rewritten.
        ends: The tilings of each tensor, before and after.
        pairs: The different pairs of tilings, each with the name of a tensor that has it.
        used: For each tensor the position of its pair.
        bits: For each tensor the bits of an element.
        places: For each pair of rewritten tensors the places of its source's pieces.
        sources: For each rewritten tensor the names of the stored tensors that it is made of.
        before: The tilings of these stored tensors.
        left_out: What is said of tensors.
        change: The change that was asked for, if tensors are rewritten.
    """

    tensors: Mapping[str, Described]
    stored: Mapping[str, Described]
    ends: dict[str, tuple[Tiling, Tiling]]
    pairs: list[tuple[str, Tiling, Tiling]]
    used: Numbers
    bits: Numbers
    places: list[PieceRows | None]
    sources: dict[str, tuple[str, ...]]
    before: dict[str, Tiling]
    left_out: list[LeftOut]
    change: ModelChange | None

    def as_change(self, nodes: Mapping[Any, Hashable] | None) -> ModelChange:
        """Return the change between these tilings; its layouts are mappings, which need no rules."""
        src, dst = ({name: ends[side] for name, ends in self.ends.items()} for side in (0, 1))
        if self.change is not None:
            return self.change._replace(src=self.before, dst=dst)
        return ModelChange(src, dst, self.tensors, nodes=nodes)


def model_tensors(change: ModelChange) -> ModelTensors:
    """Return the tensors of a model with their tilings on both sides; see `plan_model`."""
    tensors = change.tensors
    if not isinstance(tensors, Mapping):
        raise TypeError(f"tensors must map names to (shape, dtype), got {type(tensors).__name__}")
    ends = TilingSide("src", change.src, change.uneven), TilingSide("dst", change.dst, change.uneven)
    optional("config", change.config, Mapping)  # type: ignore[type-abstract]
    optional("rewrites", change.rewrites, Rewrites)
    optional("source_rewrites", change.source_rewrites, Rewrites)
    given = {name: shape_and_dtype(name, tensor) for name, tensor in tensors.items()}
    listed, stored, sources = given, given, None
    left_out: list[LeftOut] = []
    made: Mapping[str, Assembled] = {}
    is_rewritten = bool(change.rewrites or change.source_rewrites)
    joined = "\n".join(given)
    may_follow = any(part in joined for part in _FOLLOWERS)
    if is_rewritten or may_follow or change.config is not None or any(end.is_for_models for end in ends):
        with importing:
            from .converted import Sources, converted

        stored, made, left_out = converted(given, change, ends)
        if is_rewritten:
            sources = Sources(ends[0].tiling, stored)
            listed = {name: (one.shape, one.dtype.name) for name, one in made.items()}
    made_of: dict[str, tuple[str, ...]] = {}
    tables: Iterable[PieceRows | None] = repeat(None)
    if sources is None:
        before, after = ends[0].tilings(listed), ends[1].tilings(listed)
    else:
        after = ends[1].tilings(listed)
        before, tables = [], []
        for name, own in zip(listed, after, strict=True):
            tiling, table, made_of[name] = sources.of(name, made[name], own)
            before.append(tiling)
            tables.append(table)
    pairs, places, used = _pairs(zip(listed, before, after, tables, strict=False))
    # The fields of a structured dtype are a list.
    new = {
        name: one if type(one[1]) is not list else (one[0], dtype_of(one[1], f"the dtype of {shown(name)}"))
        for name, one in listed.items()
    }
    sizes: dict[Any, int] = {}
    for name, (_, dtype) in new.items():
        if dtype not in sizes:
            sizes[dtype] = bits_of(dtype, f"the dtype of {shown(name)}")
    held = {} if sources is None else {name: sources.stored(name) for names in made_of.values() for name in names}
    return ModelTensors(
        new,
        new if sources is None else stored,
        dict(zip(new, zip(before, after, strict=True), strict=True)),
        pairs,
        np.array(used, np.int64),
        np.array([sizes[dtype] for _, dtype in new.values()], np.int64),
        places,
        made_of,
        held,
        left_out,
        change._replace(tensors=given) if is_rewritten else None,
    )


def _pairs(
    tensors: Iterable[tuple[str, Tiling, Tiling, PieceRows | None]],
) -> tuple[list[tuple[str, Tiling, Tiling]], list[PieceRows | None], list[int]]:
    """Return the different pairs of tilings, each with a tensor that has it; their places; each tensor's pair.

    Tilings are looked up by identity: tensors of one shape and layout have the same objects.
    """
    numbers: dict[tuple[int, int], int] = {}
    pairs: list[tuple[str, Tiling, Tiling]] = []
    places, used = [], []
    for name, src, dst, table in tensors:
        key = id(src), id(dst)
        number = numbers.get(key)
        if number is None:
            check_packed(src, dst)
            number = len(pairs)
            if src.has_labels and dst.has_labels:  # If not, holders of one tensor are not those of another.
                numbers[key] = number
            pairs.append((name, src, dst))
            places.append(table)
        used.append(number)
    return pairs, places, used
