"""The cuts of parameters among tensor-parallel ranks, as DeepSpeed's `universal_checkpoint_info` states them.

It names parameters by regular expressions: those that every rank has whole, those cut in dim 1, a vocabulary with rows
of padding, and parameters that consist of several; all others are cut in dim 0. DeepSpeed's own tensor parallelism also
states the place of each rank's elements in the whole (`affine_map`), which then decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...._core import RuleSet
from ...._text import shown
from ...._types import Shape
from ....errors import ParseError
from ....pieces import Bounds
from ...data.text import checked_shape
from ...tensors.coverage import tile
from ...tensors.stored import UnsupportedError
from ...tensors.stored_pieces import whole_box
from .pickles import state_of, torch_sizes
from .tensors import dict_of, items_within

__all__ = ["CutRules", "RankBox", "RankCut", "whole"]


#: The versions of `universal_checkpoint_info` that can be read.
VERSION = 0.4
_AFFINE_VERSION = 1
#: The most characters of all patterns together.
_MOST_PATTERNS = 1 << 24
_LISTS = (
    "tp_replicated_parameter_patterns",
    "parameter_to_average_patterns",
    "parameter_with_2_sub_params_cat_dim_0",
    "parameter_with_row_parallelism_patterns",
    "vocabulary_parameter_patterns",
    "autotp_unsupported_parameter_patterns",
)
#: The keys that only models with experts have.
_EXPERTS = ("ds_autoep_layers", "autoep_layers", "expert_parameter_patterns")


class RankBox(NamedTuple):
    """A box of a rank's tensor, and its start in the whole tensor."""

    box: Bounds
    start: tuple[int, ...]

    @property
    def bounds(self) -> Bounds:
        """The box in the whole tensor."""
        return tuple((at, at + high - low) for at, (low, high) in zip(self.start, self.box, strict=True))


class RankCut(NamedTuple):
    """A tensor in the parts of ranks.

    Attributes:
        shape: The shape of the whole tensor.
        local: The shape of each rank's own tensor.
        parts: For each rank the boxes of its tensor that are in the whole; elements in no box are padding.
    """

    shape: Shape
    local: tuple[Shape, ...]
    parts: tuple[tuple[RankBox, ...], ...]


def whole(shape: Shape) -> RankCut:
    """Return the cut of a tensor of which one rank has all."""
    return RankCut(shape, (shape,), ((RankBox(whole_box(shape), (0,) * len(shape)),),))


class _Patterns:
    """The regular expressions of a list, matched from the beginning of names."""

    def __init__(self, where: object, key: str, patterns: Sequence[str]) -> None:
        self.where, self.key, self.patterns = where, key, list(patterns)
        try:
            self._rules = RuleSet(tuple(self.patterns), "match")
        except (TypeError, ValueError) as error:
            raise ParseError(f"{where}: universal_checkpoint_info: {key}: {error}") from None
        slow = [*self._rules.backtracking(), *(at for at, _ in self._rules.too_large())]
        if slow:
            raise UnsupportedError(
                f"{where}: universal_checkpoint_info: {key}: {shown(self.patterns[slow[0]])} is not a regular "
                "expression, or its search may take for ever"
            )

    def of(self, name: str) -> str | None:
        """Return the expression that matches a name; `None` if none does."""
        found, undecided = self._rules.find(name)
        if undecided or len(found) > 1:
            named = ", ".join(shown(self.patterns[at]) for at in found[:3])
            raise UnsupportedError(
                f"{self.where}: {shown(name)} is not read: several of {self.key} match it ({named}), and nothing says "
                "which one is meant"
            )
        return self.patterns[found[0]] if found else None


class CutRules:
    """A checkpoint's statements of how ranks cut its parameters.

    Args:
        said: `universal_checkpoint_info`, as it is in the pickle.
        where: The beginning of messages.

    Raises:
        UnsupportedError: if it is of an unknown version, or of a model with experts.
        ParseError: if it does not have the form that DeepSpeed writes.
    """

    def __init__(self, said: Any, where: object) -> None:
        self._where = where
        self._said = dict_of(said)
        version = self._said.get("universal_checkpoint_version", 0)
        if not isinstance(version, (int, float)) or not version <= VERSION:
            raise UnsupportedError(
                f"{where}: universal_checkpoint_info is of version {shown(version)}; up to {VERSION} are known"
            )
        self._version = float(version)
        experts = next((key for key in _EXPERTS if self._said.get(key)), None)
        if experts is not None:
            raise UnsupportedError(f"{where}: has {experts}: the experts of a mixture are in files that are not read")
        affine = dict_of(self._said.get("affine_map"))
        if affine and affine.get("version", _AFFINE_VERSION) != _AFFINE_VERSION:
            raise UnsupportedError(
                f"{where}: affine_map is of version {shown(affine['version'])}; {_AFFINE_VERSION} is known"
            )
        self._maps = dict_of(affine.get("params"))
        self._lists = {key: _Patterns(where, key, self._texts(key)) for key in _LISTS}
        self._lists["affine_map"] = _Patterns(where, "affine_map", list(self._maps))
        self._sub_params = self._read_sub_params()
        self._lists["parameter_with_sub_params"] = _Patterns(where, "parameter_with_sub_params", list(self._sub_params))

    def _texts(self, key: str) -> list[str]:
        said = self._said.get(key) or []
        pairs = items_within(said) or ()
        texts = [pair[0] if dict_of(said) else pair[1] for pair in pairs]
        if not all(isinstance(text, str) for text in texts) or sum(map(len, texts)) > _MOST_PATTERNS:
            raise ParseError(f"{self._where}: universal_checkpoint_info: {key} is not a list of regular expressions")
        return texts

    def _read_sub_params(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for _, entry in items_within(self._said.get("parameter_with_sub_params") or []) or ():
            said = state_of(entry) or dict_of(entry)
            for _, pattern in items_within(said.get("patterns")) or ():
                if not isinstance(pattern, str) or len(pattern) > _MOST_PATTERNS:
                    raise ParseError(f"{self._where}: universal_checkpoint_info: {shown(pattern)} is not a pattern")
                found[pattern] = said
        return found

    def cut(self, name: str, shapes: Sequence[Shape], bits: int, *, is_certain: bool) -> RankCut:
        """Return the cut of a parameter.

        Args:
            name: The parameter's name.
            shapes: The shape of each rank's tensor.
            bits: The bits of an element.
            is_certain: Whether a parameter without a statement is known to be cut in dim 0.

        Raises:
            UnsupportedError: if it is cut in a way that cannot be read, or there is no statement.
            ParseError: if the ranks' shapes contradict each other.
        """

        def refused(why: str) -> UnsupportedError:
            return UnsupportedError(f"{self._where}: {shown(name)} is not read: {why}")

        matched = {key: patterns.of(name) for key, patterns in self._lists.items()}
        unsupported = matched["autotp_unsupported_parameter_patterns"]
        if unsupported is not None:
            why = dict_of(self._said.get("autotp_unsupported_parameter_patterns")).get(unsupported)
            raise refused(f"autotp_unsupported_parameter_patterns names it ({shown(why)})")
        if matched["affine_map"] is not None:
            found = self._affine(name, shapes, self._maps[matched["affine_map"]], bits, refused)
        elif matched["tp_replicated_parameter_patterns"] is not None:
            part = RankBox(whole_box(shapes[0]), (0,) * len(shapes[0]))
            found = RankCut(shapes[0], tuple(shapes), tuple((part,) for _ in shapes))
        elif matched["parameter_to_average_patterns"] is not None:
            raise refused("parameter_to_average_patterns names it: ranks have values of their own, to be averaged")
        elif matched["parameter_with_2_sub_params_cat_dim_0"] is not None:
            halves = [((shape or (0,))[0] + 1) // 2 for shape in shapes]
            rest = [(shape or (0,))[0] - half for shape, half in zip(shapes, halves, strict=True)]
            found = self._joined(name, shapes, 0, [halves, rest], bits)
        elif matched["parameter_with_sub_params"] is not None:
            found = self._of_several(name, shapes, matched["parameter_with_sub_params"], bits, refused)
        elif matched["parameter_with_row_parallelism_patterns"] is not None:
            found = self._joined(name, shapes, 1, None, bits)
        elif is_certain or matched["vocabulary_parameter_patterns"] is not None:
            found = self._joined(name, shapes, 0, None, bits)
        else:
            raise refused(f"no optimizer holds it, and nothing says how {len(shapes)} model-parallel ranks cut it")
        if matched["vocabulary_parameter_patterns"] is not None:
            found = self._without_padding(name, found)
        self._check(name, found)
        return found

    def _joined(
        self, name: str, shapes: Sequence[Shape], dim: int, widths: Sequence[Sequence[int]] | None, bits: int
    ) -> RankCut:
        """Return the cut of ranks' tensors one after the other in a dim.

        With `widths`, the dim has several parts, and all ranks' shards of the first part come first, and so on.
        """
        first = shapes[0]
        same = all(
            len(shape) == len(first) > dim and (*shape[:dim], *shape[dim + 1 :]) == (*first[:dim], *first[dim + 1 :])
            for shape in shapes
        )
        if not same:
            raise ParseError(
                f"{self._where}: {shown(name)} should be cut in dim {dim}, but ranks have it in the shapes "
                f"{', '.join(map(str, shapes[:4]))}"
            )
        widths = [[shape[dim] for shape in shapes]] if widths is None else widths
        parts: list[list[RankBox]] = [[] for _ in shapes]
        local, at = [0] * len(shapes), 0
        for segment in widths:
            for rank, width in enumerate(segment):
                box = list(whole_box(shapes[rank]))
                box[dim] = (local[rank], local[rank] + width)
                parts[rank].append(RankBox(tuple(box), (*(0,) * dim, at, *(0,) * (len(first) - dim - 1))))
                local[rank] += width
                at += width
        shape = checked_shape((*first[:dim], at, *first[dim + 1 :]), bits, name, self._where)
        return RankCut(shape, tuple(shapes), tuple(map(tuple, parts)))

    def _of_several(
        self, name: str, shapes: Sequence[Shape], pattern: str, bits: int, refused: Callable[[str], Exception]
    ) -> RankCut:
        said = self._sub_params[pattern]
        dim, spec = said.get("partition_dim"), [size for _, size in items_within(said.get("shape")) or ()]
        if type(dim) is not int or not 0 <= dim < len(spec) or any(len(shape) != len(spec) for shape in shapes):
            raise refused(
                f"parameter_with_sub_params gives it the shape {shown(spec)}, which is not its shape on a rank"
            )
        total = sum(shape[dim] for shape in shapes)
        sizes = torch_sizes(spec[dim])
        if sizes is None:
            count = spec[dim]
            if type(count) is not int or count < 1 or total % count:
                raise refused(
                    f"parameter_with_sub_params says {shown(count)} parts, which do not divide {total} elements evenly"
                )
            sizes = (total // count,) * count
        if self._version < VERSION:
            if any(size % len(shapes) for size in sizes):
                raise refused("before version 0.4 nothing says how its parts are cut unevenly")
            widths = [[size // len(shapes)] * len(shapes) for size in sizes]
        else:
            listed = dict_of(self._said.get("sub_param_shard_widths")).get(pattern)
            widths = [list(torch_sizes(one) or ()) for _, one in items_within(listed) or ()]
        held = [[len(one), sum(one)] for one in widths] == [[len(shapes), size] for size in sizes]
        if not held or any(sum(one[rank] for one in widths) != shape[dim] for rank, shape in enumerate(shapes)):
            raise refused(f"sub_param_shard_widths do not fit {len(shapes)} ranks and {total} elements in dim {dim}")
        return self._joined(name, shapes, dim, widths, bits)

    def _affine(
        self, name: str, shapes: Sequence[Shape], entry: Any, bits: int, refused: Callable[[str], Exception]
    ) -> RankCut:
        said = dict_of(entry)
        shape = checked_shape(torch_sizes(said.get("logical_shape")), bits, name, self._where)
        ranks = {str(rank): held for rank, held in items_within(said.get("ranks")) or ()}
        parts: list[tuple[RankBox, ...]] = []
        for rank, local in enumerate(shapes):
            held = dict_of(ranks.get(str(rank)))
            if not held or torch_sizes(held.get("shard_shape")) != local:
                raise ParseError(
                    f"{self._where}: affine_map gives {shown(name)} the shape {shown(held.get('shard_shape'))} on rank "
                    f"{rank}, which has {local}"
                )
            found = []
            for _, piece in items_within(held.get("pieces")) or ():
                one = dict_of(piece)
                if one.get("scale", 1.0) != 1.0:
                    raise refused(f"affine_map says that rank {rank} holds it multiplied by {shown(one['scale'])}")
                sizes = torch_sizes(one.get("shape"))
                source = _begin(one.get("source"), sizes, shape)
                begin = _begin(one.get("dest"), sizes, local)
                if sizes is None or source is None or begin is None:
                    raise refused("affine_map gives strides with which a rank's elements are not boxes of the whole")
                box = tuple((at, at + size) for at, size in zip(begin, sizes, strict=True))
                if math.prod(sizes):
                    found.append(RankBox(box, source))
            parts.append(tuple(found))
        return RankCut(shape, tuple(shapes), tuple(parts))

    def _without_padding(self, name: str, cut: RankCut) -> RankCut:
        rows = self._said.get("original_vocab_size")
        if type(rows) is not int or rows < 0 or not cut.shape:
            raise ParseError(f"{self._where}: {shown(name)}: original_vocab_size is {shown(rows)}, which is not a size")
        rows = min(rows, cut.shape[0])

        def clipped(part: RankBox) -> RankBox | None:
            (low, high), *rest = part.box
            kept = min(high - low, rows - part.start[0])
            return RankBox(((low, low + kept), *rest), part.start) if kept > 0 else None

        parts = tuple(tuple(kept for part in held if (kept := clipped(part))) for held in cut.parts)
        return RankCut((rows, *cut.shape[1:]), cut.local, parts)

    def _check(self, name: str, cut: RankCut) -> None:
        """Check that the ranks' boxes tile the whole tensor."""
        boxes = [part.bounds for held in cut.parts for part in held]
        if boxes:
            tile(name, cut.shape, np.array(boxes, np.int64).reshape(len(boxes), -1, 2), lambda at: "", self._where)
        elif math.prod(cut.shape):
            raise ParseError(f"{self._where}: {shown(name)} of shape {cut.shape}: no rank has an element of it")


def _begin(said: Any, sizes: Shape | None, shape: Shape) -> tuple[int, ...] | None:
    """Return the first position of a view of an array, given its offset and strides, if it is a box of the array."""
    pair = [value for _, value in items_within(said) or ()]
    strides = torch_sizes(pair[1]) if len(pair) == 2 else None
    if sizes is None or strides is None or type(pair[0]) is not int or not len(sizes) == len(strides) == len(shape):
        return None
    dense = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if any(size > 1 and stride != step for size, stride, step in zip(sizes, strides, dense, strict=True)):
        return None
    if 0 in sizes:
        return (0,) * len(shape)
    if not 0 <= pair[0] < math.prod(shape):
        return None
    begin = tuple(pair[0] // step % size for step, size in zip(dense, shape, strict=True))
    return begin if all(at + n <= size for at, n, size in zip(begin, sizes, shape, strict=True)) else None
