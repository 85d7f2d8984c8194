"""Megatron-Core's pipeline stages: how many layers of each, and its layout text."""

from __future__ import annotations

import re

from ..._arguments import instance, integer
from ..._text import counted, shown
from ...errors import LayoutError
from ..stages import Chunk, Stages

__all__ = ["pipeline"]

#: The repeats in a layout, as Megatron unrolls them: first brackets, which cannot be nested, then single letters.
_REPEATED = (re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)"))
_LONGEST = 1 << 16


def pipeline(
    num_layers: int,
    pp: int = 1,
    vpp: int | None = None,
    *,
    first: int | None = None,
    last: int | None = None,
    embedding_counts: bool = False,
    loss_counts: bool = False,
    layout: str | None = None,
    mtp: int | None = None,
) -> Stages:
    """Return the stages of a pipeline as Megatron-Core splits the layers.

    Args:
        num_layers: the transformer layers.
        pp: the stages.
        vpp: the chunks of each stage, interleaved; a layout has its own number.
        first: `num_layers_in_first_pipeline_stage`, the sum over the stage's chunks.
        last: `num_layers_in_last_pipeline_stage`.
        embedding_counts: `account_for_embedding_in_pipeline_split`: the embedding takes the place of a layer.
        loss_counts: `account_for_loss_in_pipeline_split`.
        layout: `pipeline_model_parallel_layout`: `E` the embedding, `t` a layer, `m` one of multi-token prediction, `L`
            the loss, `|` between chunks, `x*3` and `(xy|)*3` for repetitions; commas do not count. The chunks are in
            the order of the layers: number i is on stage `i % pp`.
        mtp: `mtp_num_layers`; without a layout they are on the last stage.

    Raises:
        LayoutError: where Megatron refuses.
        TypeError: if an argument is of the wrong type.

    The rules are those of `TransformerConfig`, `get_num_layers_to_build`, `get_transformer_layer_offset` and
    `PipelineParallelLayerLayout`. Without a pipeline Megatron begins all chunks of a layout at layer 0, and builds as
    many layers as `last` says. The stages are then as Megatron builds them, and `is_whole` is false.

    >>> [[chunk.layers for chunk in stage] for stage in pipeline(8, pp=2, vpp=2).chunks]
    [[(0, 1), (4, 5)], [(2, 3), (6, 7)]]
    >>> pipeline(5, pp=4, layout="Et(|tt)*2|L").stage
    (0, 1, 1, 2, 2)
    """
    for name, size in (
        ("num_layers", num_layers),
        ("pp", pp),
        ("vpp", vpp),
        ("first", first),
        ("last", last),
        ("mtp", mtp),
    ):
        if size is not None and integer(name, size) < (name != "mtp"):
            raise LayoutError(f"{name} is {shown(size)}; it must be at least {int(name != 'mtp')}")
    if not num_layers <= _LONGEST or pp > _LONGEST:
        raise LayoutError(f"num_layers is {shown(num_layers)} and pp {shown(pp)}; they may be up to {_LONGEST}")
    instance("embedding_counts", embedding_counts, bool)
    instance("loss_counts", loss_counts, bool)
    counted = embedding_counts or loss_counts
    if (first is not None or last is not None) and counted:
        raise LayoutError("first and last cannot be given where the embedding or the loss counts as a layer")
    if layout is not None:
        if first is not None or last is not None or counted:
            raise LayoutError("layout cannot be given with first, last, embedding_counts or loss_counts")
        return _from_layout(layout, num_layers, pp, vpp, mtp)
    if first is None and last is None:
        per_stage = [_shared(num_layers, pp, vpp, embedding_counts, loss_counts)] * pp
    else:
        per_stage = _uneven(num_layers, pp, vpp, first, last)
    return _stages(num_layers, per_stage, vpp, embedding_counts, loss_counts, mtp or 0)


def _shared(num_layers: int, pp: int, vpp: int | None, embedding_counts: bool, loss_counts: bool) -> int:
    """Return the number of places for layers on each stage, if all stages have the same."""
    places = num_layers + embedding_counts + loss_counts
    called = "layers" if places == num_layers else "layers, with the embedding or the loss counted,"
    if places % pp:
        raise LayoutError(f"{places} {called} are not divisible by pp, {pp}")
    if vpp is not None and places // pp % vpp and (pp > 1 or embedding_counts or loss_counts):
        raise LayoutError(f"{places // pp} {called} on each stage are not divisible by vpp, {vpp}")
    return places // pp


def _uneven(num_layers: int, pp: int, vpp: int | None, first: int | None, last: int | None) -> list[int]:
    """Return the number of layers on each stage, if the first or the last has its own number."""
    left, middle = num_layers, pp
    for name, own in (("first", first), ("last", last)):
        if own is None:
            continue
        if vpp is not None and own % vpp:
            raise LayoutError(f"{name} is {own}, which is not divisible by vpp, {vpp}")
        left, middle = left - own, middle - 1
    if middle == -1 and left:
        return [last or 0]  # Without a pipeline Megatron builds these, whatever the model has.
    if bool(left) != bool(middle) or left < 0 or middle < 0:
        given = " and ".join(f"{name} is {n}" for name, n in (("first", first), ("last", last)) if n is not None)
        if left < 0:
            raise LayoutError(f"{given}, but there are only {counted(num_layers, 'layer')}")
        raise LayoutError(
            f"{given}: {left} of {counted(num_layers, 'layer')} are left for {counted(max(middle, 0), 'stage')} in "
            "the middle"
        )
    if middle and left % middle:
        raise LayoutError(f"{left} layers in the middle are not divisible by their {middle} stages")
    each = left // middle if middle else 0
    if vpp is not None and each % vpp:
        raise LayoutError(f"{each} layers on each stage in the middle are not divisible by vpp, {vpp}")
    if not middle and vpp is not None and pp > 1:
        raise LayoutError(
            "first and last cannot be given for two stages with vpp: Megatron would divide by 0, the number of "
            "stages in the middle"
        )
    counts = [each] * pp
    if first is not None:
        counts[0] = first
    if last is not None:
        counts[-1] = last
    return counts


def _stages(
    num_layers: int, places: list[int], vpp: int | None, embedding_counts: bool, loss_counts: bool, mtp: int
) -> Stages:
    """Return stages with these numbers of places; if interleaved, layers go round the stages chunk by chunk."""
    pp, chunks = len(places), 1 if vpp is None or len(places) == 1 else vpp
    rows: list[list[Chunk]] = [[] for _ in range(pp)]
    at = 0
    for chunk in range(chunks):
        for stage in range(pp):
            is_first, is_last = (stage, chunk) == (0, 0), (stage, chunk) == (pp - 1, chunks - 1)
            count = places[stage] // chunks - (is_first and embedding_counts) - (is_last and loss_counts)
            if count < 0:
                raise LayoutError(
                    f"chunk {chunk} of stage {stage} has no place for the embedding or the loss, which counts as a "
                    "layer"
                )
            rows[stage].append(
                Chunk(tuple(range(at, at + count)), is_first, is_last, tuple(range(mtp)) if is_last else ())
            )
            at += count
    return Stages(tuple(map(tuple, rows)), num_layers)


def _from_layout(layout: str, num_layers: int, pp: int, vpp: int | None, mtp: int | None) -> Stages:
    rows = _rows(layout)
    if len(rows) % pp:
        raise LayoutError(f"layout {shown(layout)} has {counted(len(rows), 'chunk')}, which pp, {pp}, does not divide")
    chunks = len(rows) // pp
    if vpp is not None and vpp != chunks:
        raise LayoutError(f"vpp is {vpp}, but layout {shown(layout)} has {counted(chunks, 'chunk')} on each stage")
    _check(layout, rows, num_layers, pp, mtp)
    made: list[list[Chunk]] = [[] for _ in range(pp)]
    at = mtp_at = 0
    for number, row in enumerate(rows):
        if pp == 1:
            at = mtp_at = 0
        layers, others = tuple(range(at, at + row.count("t"))), tuple(range(mtp_at, mtp_at + row.count("m")))
        at, mtp_at = at + len(layers), mtp_at + len(others)
        made[number % pp].append(Chunk(layers, "E" in row, "L" in row, others))
    return Stages(tuple(map(tuple, made)), num_layers)


def _rows(layout: str) -> list[str]:
    text = instance("layout", layout, str).replace(",", "")
    for pattern in _REPEATED:
        if len(text) + sum(len(one[1]) * min(int(one[2][-9:]), _LONGEST) for one in pattern.finditer(text)) > _LONGEST:
            raise LayoutError(f"layout {shown(layout)} is of more than {_LONGEST} layers")
        text = pattern.sub(lambda found: found[1] * int(found[2]), text)
    for letter in text:
        if letter not in "ELtm|":
            raise LayoutError(
                f"layout {shown(layout)} has {shown(letter)} once it is unrolled; E, L, t, m and | are known"
            )
    return text.split("|")


def _check(layout: str, rows: list[str], num_layers: int, pp: int, mtp: int | None) -> None:
    """Refuse a layout that `PipelineParallelLayerLayout.validate_layer_layout` refuses."""
    flat = "".join(rows)
    why = None
    if not flat.startswith("E") or flat.count("E") != 1:
        why = "must have E, the embedding, first and once"
    elif not flat.endswith("L") or flat.count("L") != 1:
        why = "must have L, the loss, last and once"
    elif flat.count("t") != num_layers:
        why = f"has {counted(flat.count('t'), 'layer')}, but num_layers is {num_layers}"
    elif flat.count("m") != (mtp or 0):
        why = f"has {counted(flat.count('m'), 'layer')} of multi-token prediction, but mtp is {mtp}"
    elif "t" in flat[flat.find("m") :] and "m" in flat:
        why = "has layers after those of multi-token prediction"
    elif any("m" in row for row in rows[:-pp]):
        why = "has multi-token prediction in a chunk that is not the last of its stage"
    elif any("m" in row and row.count("m") != mtp for row in rows):
        why = "has multi-token prediction in several chunks"
    if why is not None:
        raise LayoutError(f"layout {shown(layout)} {why}")
