"""Verdicts on numbers of parts: whether a model may be cut so, from its headers, or from what they say."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .._arguments import integers_of
from .._fork import importing
from .._text import elements_text, shown
from ..errors import LayoutError, ParseError
from ..quantized import LogicalTensor
from ..quantized.cut import padded_size, sizes_that_fit
from ..quantized.forms import AlikeTensors, find_kinds, starred
from ..quantized.method import quantization_of, stated_method
from ..rules.names import types_with
from ..rules.numbers import Config
from ..rules.shipped import rules_named
from ..rules.wrapped import model_types
from .answer import ORDER, WAYS, Cut, Fits, SizeFit, Unknown, Verdict, forms_of
from .engines import limits_of
from .evidence import Judged, judged, number_of_experts, odd_elements
from .model import opened_model
from .roles import Heads, Role

__all__ = ["Portion", "fits", "fits_tensors", "portions"]


def fits(
    model: str | os.PathLike[str] | Mapping[str, Any],
    tp: Sequence[int] = (1, 2, 4, 8, 16),
    ep: Sequence[int] = (1,),
    *,
    config: Config | None = None,
    rules: str | os.PathLike[str] | None = None,
) -> Fits:
    """Say for each size of tensor and expert parallelism whether a model fits, and why not.

    Args:
        model: A checkpoint, as `open_checkpoint` takes it; or, for the families that `model_shapes` knows, the model's
            `config.json`, its folder or its contents. Only headers of a checkpoint are read, and the order of groups
            (`g_idx`) if the configuration says that it may differ.
        tp: The sizes of tensor parallelism.
        ep: The sizes of expert parallelism; the experts are cut over these, and the features of each over `tp // ep`.
        config: The model's `config.json`, or its contents; the one next to the checkpoint if left out.
        rules: A rules file, or the name of one that comes with the package, whose rules cut weights, fused ones too,
            over the axes `tp` and `ep`; if left out, the names of weights say what is cut.

    Raises:
        OSError: if a file cannot be read.
        ParseError: if a file does not follow its format, scales do not agree with their weights, or the quantization
            that the configuration states is not known.
        LayoutError: if a size is less than 1, `config` is given together with a configuration, or rewrites of the
            rules do not apply.

    >>> config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "vocab_size": 99}
    >>> config |= {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2}
    >>> answer = fits(config, tp=(1, 8, 16))
    >>> [(size.tp, size.verdict) for size in answer.sizes]
    [(1, 'fits'), (8, 'fits'), (16, 'refused')]
    >>> answer.sizes[2].problems[0].why
    '8 heads are not divisible by 16'
    """
    file = None if rules is None else rules_named(os.fspath(rules), None)
    with opened_model(model, config, file) as (outline, given, read):
        _check_method(given)
        if file is not None:
            with importing:
                from .by_rules import fits_by_rules

            return fits_by_rules(outline, given, file, _sizes(tp, ep), read)
        return fits_tensors(outline, given, tp, ep, read=read)


def fits_tensors(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    config: Mapping[str, Any],
    tp: Sequence[int] = (1, 2, 4, 8, 16),
    ep: Sequence[int] = (1,),
    *,
    read: Callable[[str], bytes | None] | None = None,
) -> Fits:
    """Answer as `fits` does, for tensors whose dtypes and shapes are given; see `quantized.find_components`.

    A verdict rests on names that are recognised, and on shapes and a configuration that agree with them. A tensor of
    several dims that is not recognised is listed in `unknown`. Then the verdict of each size over one rank is
    `"unknown"`, unless something else refuses it.

    >>> stored = {"mlp.down_proj.weight": ("F8_E4M3", (2048, 512)), "mlp.down_proj.weight_scale_inv": ("F32", (16, 4))}
    >>> config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    >>> for size in fits_tensors(stored, config, tp=(4, 8)).sizes:
    ...     print(size.tp, size.verdict, *(cut.padded for cut in size.problems))
    4 fits
    8 shared 1024
    """
    sizes = _sizes(tp, ep)
    method, kinds = find_kinds(tensors, config, read)
    known = judged(kinds, config)
    experts = number_of_experts((one.kind, one.role) for one in known)
    types = model_types(config)
    unknown = tuple(
        Unknown(one.name, len(one.kind.names), one.kind.tensor.shape, one.role.unknown)
        for one in known
        if one.role.unknown and (_is_large(one.kind) or odd_elements(one.kind.tensor, config))
    )
    # Where nothing is recognised that is cut, there is no reason why a size should fit.
    is_known = not unknown and any(one.role.dim is not None for one in known)
    answers = [
        SizeFit.of(
            size, other, (cut for one in known for cut in _cuts(one, experts, size, other, types)), known=is_known
        )
        for size, other in sizes
    ]
    whole = {one.name for one in known if one.role == _WHOLE and _is_large(one.kind) and "_bias" not in one.name}
    return Fits(
        method,
        forms_of((kind.tensor, len(kind.names)) for kind in kinds),
        tuple(answers),
        tuple(sorted(whole)),
        unknown,
        tuple(sorted({one.name for one in known if one.role.elsewhere})),
        _reasons(
            known, method if stated_method(quantization_of(config)) is None else f"quant_method = {method}", config
        ),
    )


_WHOLE = Role(None)


def _check_method(config: Mapping[str, Any]) -> None:
    """Refuse a form of quantized weights that is not known, and say what can be asked of them all the same."""
    try:
        stated_method(quantization_of(config))
    except ParseError as error:
        raise ParseError(
            f"{error}; its blocks are not known, so the sizes that fit are not known. `shardwise report` shows how "
            "the stored tensors are cut: give it rules for their names, and a configuration without "
            "quantization_config (--config)"
        ) from None


def _reasons(known: Sequence[Judged], method: str | None, config: Mapping[str, Any]) -> tuple[str, ...]:
    """List the evidence of the answer as a whole: names, the configuration, the quantization method, the types."""
    cuts = [one for one in known if one.role.dim is not None]
    if not cuts:
        return ()
    said = dict.fromkeys(part for one in cuts for part in one.rests_on.split("; ")[1:])
    names = sorted({one.rests_on.split("; ")[0].removeprefix("the name ") for one in cuts})
    if method is None:
        is_plain = not any(odd_elements(one.kind.tensor, config) for one in known)
        method = "dtypes: none is that of quantized weights" if is_plain else ""
    elif "=" not in method:
        method = f"names of scales, as of {method}"
    types = [f"model_type = {one}" for one in model_types(config)]
    return (f"names as in Hugging Face's checkpoints: {', '.join(names)}", *said, *filter(None, (method, *types)))


def _is_large(kind: AlikeTensors) -> bool:
    return sum(size > 1 for size in kind.tensor.shape) > 1


def _sizes(tp: Sequence[int], ep: Sequence[int]) -> list[tuple[int, int]]:
    ranks, experts = integers_of("tp", tp), integers_of("ep", ep)
    for name, given in (("tp", ranks), ("ep", experts)):
        if least := [one for one in given if one < 1]:
            raise LayoutError(f"{name} is {shown(least[0])}; it must be at least 1")
    return [(one, other) for one in ranks for other in experts]


def _cuts(one: Judged, experts: int, tp: int, ep: int, types: Sequence[str]) -> Iterable[Cut]:
    kind, role = one.kind, one.role
    if role.dim is None or role.vocabulary:
        return
    tensor = kind.tensor
    if role.expert and ep > 1:
        if experts % ep:
            refused = _Finding("refused", f"{experts} experts are not divisible by {ep}")
            yield _cut(kind, 0, Portion(experts, ep, "experts"), 1, refused)._replace(rests_on=one.rests_on)
        tp = max(tp // ep, 1)
    dim = len(tensor.shape) + role.dim
    unit, base = tensor.unit(dim), 0
    parts = list(portions(role, one.heads, tensor.shape[dim], tp))
    cuts = []
    for number, part in enumerate(parts):
        merged = one.merged if len(parts) == 1 else "last" if number == len(parts) - 1 else "first"
        split, per_rank = part.ways if role.expert else tp, part.size // part.ways
        limits = limits_of(tensor, role, per_rank, split, merged) if part.size % part.ways == 0 else ()
        found = _finding(tensor, dim, part, tp)
        if tp > 1 and base % unit:
            why = f"a part of the fused weight begins at {base}, within a block of {unit}: its parts share a block"
            found = _Finding("refused", why)
        cuts.append(_cut(kind, dim, part, unit, found)._replace(limits=limits, rests_on=one.rests_on))
        base += part.size
    if role.heads == "qkv" and unit > 1 and tp > 1 and types_with("queries_first").isdisjoint(types):
        worst = max((cut.verdict for cut in cuts), key=ORDER.index)
        if worst != (other := _in_groups(tensor, dim, one.heads, tp)):
            why = (
                f"if queries, keys and values are one after the other, it is {_SAID[worst]}; if they are in groups, "
                f"one for each key-value head, it is {_SAID[other]}; it is not known which of the two holds"
            )
            cuts = [cut._replace(verdict="unknown", why=why, padded=None, ceil=()) for cut in cuts]
    yield from cuts


_SAID = {"fits": "cut on whole blocks", "shared": "cut within shared blocks", "padded": "padded", "refused": "refused"}


class Portion(NamedTuple):
    """A part of a dim that is cut by itself.

    Attributes:
        size: Its elements.
        ways: The shards into which it is cut.
        heads: The name of the units of which it is made.
        units: The number of these; 0 if they are elements.
    """

    size: int
    ways: int
    heads: str = "elements"
    units: int = 0

    @property
    def head_size(self) -> int:
        """The elements of a unit."""
        return max(self.size // self.units, 1) if self.units else 1


class _Finding(NamedTuple):
    """A verdict, its reason, and the size that fits when padded."""

    verdict: Verdict
    why: str = ""
    padded: int | None = None


def _in_groups(tensor: LogicalTensor, dim: int, heads: Heads, tp: int) -> Verdict:
    """Return the verdict on a fused weight that has the queries, keys and values of each key-value head together."""
    n, unit, kv = tensor.shape[dim], tensor.unit(dim), heads.kv
    if tp <= kv:
        return _finding(tensor, dim, Portion(n, tp, "groups of queries, keys and values", kv), tp).verdict
    size = heads.size or n // (heads.q + 2 * kv)
    if heads.q % tp or tp % kv or size % unit or (heads.value_size or size) % unit:
        return "refused"
    return "fits"


def portions(role: Role, heads: Heads, n: int, tp: int) -> Iterable[Portion]:
    """Yield the parts of a dim of `n` elements."""
    shared = min(tp, heads.kv), "key-value heads", heads.kv
    if role.heads == "qkv":
        size = heads.size or n // (heads.q + 2 * heads.kv)
        yield Portion(size * heads.q, tp, "heads", heads.q)
        for each in (size, heads.value_size or size):
            yield Portion(each * heads.kv, *shared)
    elif role.heads == "kv":
        yield Portion(n, *shared)
    elif role.heads == "q":
        yield Portion(n, tp, "heads", heads.q)
    elif role.heads == "linear":
        for _ in range(role.parts):
            yield Portion(n // role.parts, tp, "heads of linear attention", heads.linear)
    else:
        for _ in range(role.parts):
            yield Portion(n // role.parts, tp)


def _finding(tensor: LogicalTensor, dim: int, part: Portion, tp: int) -> _Finding:
    """Judge the cut of a part of a dim, over `tp` ranks."""
    size, ways, heads, count = part
    if ways == 1 and tp == 1:  # Not cut; the last block may be short.
        return _Finding("fits", padded=None if size % tensor.unit(dim) == 0 else padded_size(size, tensor.unit(dim), 1))
    if why := tensor.why_uncut(dim) if ways > 1 else "":
        return _Finding("refused", why)
    if count and (count % ways or tp % ways):
        return _Finding("refused", f"{count} {heads} are not divisible by {ways if count % ways else tp}")
    unit = tensor.unit(dim)
    padded = None if count else padded_size(size, unit, ways)
    if size % ways:
        return _Finding("padded", f"{size} elements are not divisible by {ways}", padded)
    per_rank = size // ways
    if per_rank % unit == 0:
        return _Finding("fits")
    # Blocks of the flattened tensor count all elements of a row.
    flat = -1 in tensor.blocks
    row = math.prod(tensor.shape[1:]) if flat else 1
    blocks = [one for one in tensor.blocks[-1 if flat else dim] if per_rank * row % one[1]]
    name, block = max(blocks, key=lambda one: one[1])
    each = (
        f"{per_rank} each"
        if row == 1
        else f"{per_rank} row{'s' * (per_rank != 1)} each, {elements_text(per_rank * row)}"
    )
    why = f"{size} in {ways} is {each}, within blocks of {block} of {_tail(tensor, name)}"
    apart = tensor.unit(dim, shared=True)
    if per_rank % apart == 0 and all(_in_equal_shares(size * row, per_rank * row, block) for _, block in blocks):
        return _Finding("shared", why, padded)
    return _Finding("padded" if padded is not None else "refused", why, padded)


def _in_equal_shares(size: int, per_rank: int, block: int) -> bool:
    """Return whether every shard is in one block, and all blocks have equally many."""
    return size <= block or (size % block == 0 and block % per_rank == 0)


def _tail(tensor: LogicalTensor, component: str) -> str:
    """Return the name of a component next to its weight: `weight_scale_inv`, or `scales` of `down_proj_scales`."""
    return component.removeprefix(f"{tensor.name}_") if not tensor.name.endswith("weight") else component.split(".")[-1]


def _cut(kind: AlikeTensors, dim: int, part: Portion, unit: int, found: _Finding) -> Cut:
    """Return the cut of a part of a dim, in which `unit` elements stay together by the format."""
    tensor, (size, ways, heads, _) = kind.tensor, part
    step = -(-size // (unit * ways)) * unit
    is_uneven = unit > 1 and found.verdict != "fits" and ways <= 64
    ceil = tuple(max(min(size - i * step, step), 0) for i in range(ways)) if is_uneven else ()
    sizes = sizes_that_fit(size, math.lcm(unit, part.head_size), WAYS)
    return Cut(
        starred(tensor.name), len(kind.names), tensor.form, dim, size, heads, part.head_size, ways, unit,
        tuple((name.rpartition(".")[2], block) for name, block in tensor.blocks.get(dim, ())),
        *found, bool(tensor.why_uncut(dim)), sizes, ceil,
    )  # fmt: skip
