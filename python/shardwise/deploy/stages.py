"""Pipeline stages: which layers are where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from .._arguments import integer
from .._text import counted, shown
from ..errors import LayoutError

__all__ = ["EXTRA", "Chunk", "Stages"]

#: The stages that may have one layer more than others.
EXTRA = ("first", "middle", "last")
_MOST_LAYERS = 1 << 20


@dataclass(frozen=True)
class Chunk:
    """The layers of one chunk of a stage; a stage that is not interleaved has one chunk.

    Attributes:
        layers: The numbers of the chunk's layers.
        embedding: Whether the chunk holds the embedding of the input.
        loss: Whether the chunk holds the last norm and the output layer.
        mtp: The numbers of the chunk's layers for multi-token prediction.
    """

    layers: tuple[int, ...]
    embedding: bool = False
    loss: bool = False
    mtp: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", _numbers("layers", self.layers))
        object.__setattr__(self, "mtp", _numbers("mtp", self.mtp))

    @property
    def text(self) -> str:
        """Megatron's letters: `E` the embedding, `t` a layer, `m` one of multi-token prediction, `L` the loss."""
        return "E" * self.embedding + "t" * len(self.layers) + "m" * len(self.mtp) + "L" * self.loss


@dataclass(frozen=True, init=False)
class Stages:
    """The layers of each stage of a pipeline, for each of its chunks.

    Args:
        chunks: the chunks of each stage; the same number for each. Plain lists of layers are one chunk each.
        num_layers: the number of layers of the model; by default that of the chunks.

    Raises:
        LayoutError: if stages have different numbers of chunks, or there are none.

    `stage` is the list that rules name: `at = { pp = "stage[i]" }`.

    >>> stages = Stages.of_counts([1, 2, 1])
    >>> stages.stage, stages.first, stages.last
    ((0, 1, 1, 2), 0, 2)
    """

    chunks: tuple[tuple[Chunk, ...], ...]
    num_layers: int

    def __init__(
        self, chunks: Sequence[Sequence[Chunk] | Sequence[int] | Chunk], num_layers: int | None = None
    ) -> None:
        rows: list[tuple[Chunk, ...]] = []
        for number, stage in enumerate(chunks):
            given: Any = (stage,) if isinstance(stage, Chunk) else stage
            if isinstance(given, str) or not isinstance(given, Sequence):
                raise TypeError(f"chunks[{number}] must be chunks or a list of layers, got {shown(stage)}")
            row = tuple(given) if any(isinstance(one, Chunk) for one in given) else (Chunk(tuple(given)),)
            if not all(isinstance(chunk, Chunk) for chunk in row):
                raise TypeError(f"chunks[{number}] must be chunks or a list of layers, got {shown(stage)}")
            rows.append(row)
        if len({len(row) for row in rows}) != 1:
            raise LayoutError(
                f"chunks: the stages have {shown([len(row) for row in rows])} chunks; give each stage the same number"
            )
        object.__setattr__(self, "chunks", tuple(rows))
        held = len({layer for row in rows for chunk in row for layer in chunk.layers})
        object.__setattr__(self, "num_layers", held if num_layers is None else integer("num_layers", num_layers))

    @classmethod
    def of_counts(cls, counts: Sequence[int]) -> Stages:
        """Return stages of consecutive layers, with the embedding on the first and the output on the last.

        Args:
            counts: the layers of each stage; they may differ.

        >>> Stages.of_counts([2, 1]).text
        'Ett|tL'
        """
        sizes = [integer(f"counts[{number}]", count) for number, count in enumerate(counts)]
        if not sizes or min(sizes) < 0 or sum(sizes) > _MOST_LAYERS:
            raise LayoutError(
                f"counts is {shown(list(counts))}; each must be at least 0, and their sum at most {_MOST_LAYERS}"
            )
        ends = pairwise(accumulate(sizes, initial=0))
        last = len(sizes) - 1
        return cls(tuple((Chunk(tuple(range(*each)), at == 0, at == last),) for at, each in enumerate(ends)))

    @classmethod
    def split(cls, layers: int, pp: int, extra: str = "first") -> Stages:
        """Return stages as even as they can be.

        Args:
            layers: the number of layers.
            pp: the number of stages.
            extra: the stages that have one layer more where the layers do not divide: `"first"`, `"last"` as in SGLang,
                or `"middle"` as in vLLM: those just before the last one.

        Raises:
            LayoutError: if `extra` is another word, or a number is out of range.

        >>> [Stages.split(7, 3, extra).text for extra in ("first", "last", "middle")]
        ['Ettt|tt|ttL', 'Ett|tt|tttL', 'Ett|ttt|ttL']
        """
        if extra not in EXTRA:
            raise LayoutError(f"extra is {shown(extra)}; it must be one of {', '.join(EXTRA)}")
        if not 0 <= integer("layers", layers) <= _MOST_LAYERS or not 1 <= integer("pp", pp) <= _MOST_LAYERS:
            raise LayoutError(f"layers is {layers}, and pp {pp}; they must be sizes up to {_MOST_LAYERS}")
        each, more = divmod(layers, pp)
        begin = {"first": 0, "last": pp - more, "middle": pp - 1 - more}[extra]
        return cls.of_counts([each + (begin <= stage < begin + more) for stage in range(pp)])

    @property
    def pp(self) -> int:
        """The number of stages."""
        return len(self.chunks)

    @property
    def is_whole(self) -> bool:
        """True if every layer is on one stage, in order along the pipeline.

        False for Megatron's layout of several chunks without a pipeline, because all of these begin at layer 0.
        """
        held = [layer for chunk in self._in_order() for layer in chunk.layers]
        return held == list(range(self.num_layers))

    @property
    def stage(self) -> tuple[int, ...]:
        """The stage of each layer.

        Raises:
            LayoutError: if a layer is missing or is there twice.
        """
        return tuple(stage for stage, _ in self._places())

    @property
    def chunk(self) -> tuple[int, ...]:
        """The chunk of each layer within its stage.

        Raises:
            LayoutError: if a layer is missing or is there twice.
        """
        return tuple(chunk for _, chunk in self._places())

    @property
    def first(self) -> int:
        """The stage of the embedding."""
        return self._stage_with("embedding")

    @property
    def last(self) -> int:
        """The stage of the output layer."""
        return self._stage_with("loss")

    @property
    def text(self) -> str:
        """Megatron's layout text; it states orders that `megatron.pipeline` reads."""
        return "|".join(chunk.text for chunk in self._in_order())

    def _in_order(self) -> list[Chunk]:
        return [stage[chunk] for chunk in range(len(self.chunks[0])) for stage in self.chunks]

    def _places(self) -> list[tuple[int, int]]:
        found: dict[int, tuple[int, int]] = {}
        for stage, chunks in enumerate(self.chunks):
            for number, chunk in enumerate(chunks):
                for layer in chunk.layers:
                    if layer in found:
                        raise LayoutError(f"layer {layer} is on stage {found[layer][0]} and on stage {stage}")
                    found[layer] = stage, number
        count = max(self.num_layers, len(found))
        for layer in range(count):
            if layer not in found:
                raise LayoutError(f"layer {layer} is on no stage, of {counted(count, 'layer')}")
        return [found[layer] for layer in range(count)]

    def _stage_with(self, what: str) -> int:
        for stage, chunks in enumerate(self.chunks):
            if any(getattr(chunk, what) for chunk in chunks):
                return stage
        raise LayoutError(f"no stage has the {what}")


def _numbers(name: str, values: Any) -> tuple[int, ...]:
    numbers = tuple(integer(f"{name}[{at}]", value) for at, value in enumerate(values))
    if numbers and min(numbers) < 0:
        raise LayoutError(f"{name} is {shown(list(numbers))}; layers are counted from 0")
    return numbers
