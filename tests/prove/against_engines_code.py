"""Fused weights, as the engines' own code cuts them, where it is installed; see `tests.oracle.engines_oracle`."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import shardwise as sw
from shardwise import packed
from shardwise.interop.torch import Replicate, Shard, StridedShard, from_placements, to_placements
from tests.interop.segments import Segments, random_segments

from .against_engines import compare_rows
from .frameworks import Framework
from .subject import Mismatch, Subject, answered, same, sampled

WORKER = "tests.oracle.engines_oracle"
PYTHON = "SHARDWISE_TORCH_PYTHON"


@dataclass(frozen=True)
class OwnCase:
    """What an engine does, numbers from which the sizes are made, and the ranks."""

    what: str
    numbers: tuple[int, int, int]
    ranks: int

    def snippet(self) -> str:
        return f"from tests.prove.against_engines_code import OwnCase, QUESTIONS\n\nQUESTIONS[{self.what!r}]({self!r})"

    def simpler(self) -> Iterator[OwnCase]:
        for i, number in enumerate(self.numbers):
            if number > 1:
                yield replace(self, numbers=(*self.numbers[:i], number - 1, *self.numbers[i + 1 :]))  # type: ignore[arg-type]
        if self.ranks > 1:
            yield replace(self, ranks=self.ranks - 1)


#: What the worker is asked, and how its answer is compared with ours.
Question = tuple[dict[str, Any], Callable[[Any], None]]


def filled(n: int, ranks: int) -> int:
    """The first size from `n` on of which `torch.chunk` gives every rank something: the reader cannot read nothing."""
    return next(size for size in range(n, n + ranks + 1) if (ranks - 1) * math.ceil(size / ranks) < size)


def transformers(style: str) -> Callable[[OwnCase], Question]:
    """A parameter under one style of a plan; sizes that do not divide among them."""

    def asked(case: OwnCase) -> Question:
        n = filled(case.numbers[0] * case.numbers[1] + case.numbers[2] - 1, case.ranks)
        n *= 2 if style.startswith("packed") else 1
        # An embedding's columns are its dim 1, which what has one dim has not.
        kinds = ["weight", "gate_up_proj"] + ["bias", "sinks"] * (style != "embedding_colwise")
        kind = kinds[case.numbers[2] % len(kinds)]
        shape = {"weight": (n, n), "gate_up_proj": (case.numbers[1], n, n)}.get(kind, (n,))
        entry = {"gate_up_proj": "layers.*.mlp.experts.gate_up_proj", "sinks": "layers.*.sinks"}.get(
            kind, "layers.*.up"
        )
        name = entry.replace("*", "2") + (f".{kind}" if kind in ("weight", "bias") else "")
        mesh = sw.DeviceMesh((case.ranks,), ("tp",))
        layout = sw.LayoutMap.from_tp_plan({entry: style}, mesh, "tp")[name]

        def compare(held: Any) -> None:
            whole = np.arange(math.prod(shape)).reshape(shape)
            if layout is None:
                same("a parameter without a rule", held, [whole.ravel().tolist()] * case.ranks)
                return
            shards = sw.distribute_tensor(whole, layout, "chunk").shards
            same("what the ranks hold", [shard.data.ravel().tolist() for shard in shards], held)

        return {"what": "transformers", "style": style, "parameter": kind, "shape": shape, "ranks": case.ranks}, compare

    return asked


def megatron_stride(case: OwnCase) -> Question:
    per, stride, _ = case.numbers
    rows = per * stride * case.ranks
    asked = {"what": "megatron weight", "rows": rows, "stride": stride, "ranks": case.ranks}
    return asked, lambda held: compare_rows(packed.parse("(s f@tp)", s=stride), held)


def heads_of(case: OwnCase) -> tuple[int, int, int]:
    """Query heads, groups and head dim; the groups are more than the ranks, as many, or fewer."""
    per_group, more, d = case.numbers
    divisors = [k for k in range(1, case.ranks + 1) if case.ranks % k == 0]
    groups = case.ranks * per_group if more % 2 else divisors[more * per_group % len(divisors)]
    heads = math.lcm(groups, case.ranks) * per_group
    rows = (heads // groups + 2) * d
    return heads, groups, d if rows % max(case.ranks // groups, 1) == 0 else d * case.ranks


def megatron_qkv(case: OwnCase) -> Question:
    """What a rank's `linear_qkv` holds: raw rows, whatever the number of groups."""
    heads, groups, d = heads_of(case)
    asked = {"what": "megatron weight", "rows": (heads + 2 * groups) * d, "stride": 1, "ranks": case.ranks}
    return asked, lambda held: compare_rows(packed.qkv(heads, groups, d, "tp", order="interleaved"), held)


def megatron_used(case: OwnCase) -> Question:
    """What a rank computes with: queries, keys and values as in the other order, some of them on several ranks."""
    heads, groups, d = heads_of(case)
    interleaved, blocked = (packed.qkv(heads, groups, d, "tp", order=order) for order in ("interleaved", "blocked"))
    size = interleaved.size
    assert size is not None
    # The row of the interleaved weight that each row of the blocked one is.
    places: dict[str, list[int]] = {"q": [], "k": [], "v": []}
    for name, _, at, length in interleaved.segments(size):
        places[name] += range(at, at + length)
    order = np.array(places["q"] + places["k"] + places["v"])

    def compare(used: Any) -> None:
        mesh = sw.DeviceMesh((case.ranks,), ("tp",))
        partition = sw.TensorLayout((blocked,), mesh).partition((size,))
        for label, tensors in zip(partition.holders, used, strict=True):
            own = [order[piece.box[0]].tolist() for piece in partition.pieces(label)]
            same("queries, keys, values", own, tensors)

    return {"what": "megatron used", "heads": heads, "groups": groups, "head_dim": d, "ranks": case.ranks}, compare


def deepspeed(form: str) -> Callable[[OwnCase], Question]:
    def asked(case: OwnCase) -> Question:
        groups, unit, ratio = case.numbers
        # Where there are two key-value heads, the form of GLM is another one.
        groups += form == "glm" and groups == 2
        heads = {"phi3": groups * ratio, "chatglm": 2 * ratio}.get(form, groups)
        kv = 2 if form == "chatglm" else groups
        text, rows, module = {
            "bloom": ("(g@tp/balanced 3 u)", groups * 3 * unit, "BloomBlock"),
            "glm": ("(3 g@tp/balanced u)", groups * 3 * unit, "MPTBlock"),
            "phi3": (
                "(g@tp/balanced r u) + (g@tp/balanced u) + (g@tp/balanced u)",
                (heads + 2 * groups) * unit,
                "Phi3DecoderLayer",
            ),
            "bigcode": ("(g@tp/balanced u) + (2 u)", (groups + 2) * unit, "GPTBigCodeBlock"),
            "chatglm": ("(2@tp/balanced r u) + (2@tp/balanced u) + (2@tp/balanced u)", (heads + 4) * unit, "GLMBlock"),
        }[form]
        sizes = {name: size for name, size in (("g", groups), ("r", ratio), ("u", unit)) if name in text}
        # `meta.n_embd` is the queries' rows; the forms but one look at the rows only.
        meta = {"num_kv_heads": kv, "num_attention_heads": heads, "n_embd": heads * unit}
        if form == "chatglm":
            # Its keys and values are (rows - n_embd) // 2 each.
            meta["n_embd"] = 2 * ratio * unit
        columns = heads * unit
        question = {"what": "deepspeed", "module": module, "shape": (rows, columns), "ranks": case.ranks, "meta": meta}
        return question, lambda held: compare_rows(packed.parse(text, **sizes), held)

    return asked


STYLES = (
    *("colwise", "colwise_gather_output", "packed_colwise", "packed_rowwise", "rowwise", "rowwise_split_input"),
    *(
        "embedding_rowwise",
        "embedding_colwise",
        "replicate",
        "moe_tp_experts",
        "all_reduce",
        "colwise_rep",
        "rowwise_rep",
    ),
    *("sequence_parallel", "replicated_with_grad_allreduce", "mla_kv_a_proj", "moe_identity_expert", "local_params"),
)
FORMS = ("bloom", "glm", "chatglm", "phi3", "bigcode")

QUESTIONS: dict[str, Callable[[OwnCase], Question]] = {
    **{f"transformers {style}": transformers(style) for style in STYLES},
    "megatron stride": megatron_stride,
    "megatron qkv": megatron_qkv,
    "megatron used": megatron_used,
    **{f"deepspeed {form}": deepspeed(form) for form in FORMS},
}


def drawn(engine: str) -> Callable[[random.Random], OwnCase]:
    kinds = [what for what in QUESTIONS if what.startswith(engine)]
    # Of the styles, those of which several pieces are held.
    kinds += [what for what in kinds if "packed" in what] * 3

    def draw(rng: random.Random) -> OwnCase:
        numbers = rng.randint(1, 6), rng.randint(1, 5), rng.randint(1, 4)
        return OwnCase(rng.choice(kinds), numbers, rng.choice((1, 2, 3, 4, 6, 8)))

    return draw


def compare(case: OwnCase, answer: Any) -> None:
    if isinstance(answer, tuple):
        raise Mismatch(f"the engine answers {answer}")
    QUESTIONS[case.what](case)[1](answer)


def subject(oracle: str, engine: str, package: str) -> Subject:
    framework = Framework(package, WORKER, {"SHARDWISE_ENGINE": engine}, python=PYTHON)

    def answers(cases: list[OwnCase]) -> list[Any]:
        return framework.ask([QUESTIONS[case.what](case)[0] for case in cases])

    run = sampled(drawn(engine), answered(answers, compare))
    return Subject(oracle, "fused weights", 30_000, 1_000, run, framework.missing, framework.stop)


def random_placed(rng: random.Random) -> Segments:
    """A dim that strided shards can say."""
    while True:
        case = random_segments(rng)
        try:
            to_placements(case.layout())
        except sw.LayoutError:
            continue
        return case


def placements_of(case: Segments) -> dict[str, Any]:
    kinds = {Replicate: "replicate", Shard: "shard", StridedShard: "strided"}
    placed = [(kinds[type(one)], *vars(one).values()) for one in to_placements(case.layout())]
    return {"what": "strided", "shape": [case.size], "mesh_shape": case.mesh_shape, "placements": placed}


def compare_placed(case: Segments, answer: Any) -> None:
    """The dim itself, and the one that its placements are read as, against what `_split_tensor` gives every rank."""
    if isinstance(answer, tuple):
        raise Mismatch(f"PyTorch answers {answer}")
    layout = case.layout()
    for what, one in (("the dim", layout), ("read", from_placements(to_placements(layout), case.mesh(), 1))):
        partition = one.partition((case.size,))
        pieces = [[piece.box[0] for piece in partition.pieces(label)] for label in partition.holders]
        same(what, [[row for box in own for row in range(box.start, box.stop)] for own in pieces], answer)


TORCH = Framework("torch", WORKER, {"SHARDWISE_ENGINE": "torch"}, python=PYTHON)


def torch_answers(cases: list[Segments]) -> list[Any]:
    return TORCH.ask([placements_of(case) for case in cases])


PLACED = sampled(random_placed, answered(torch_answers, compare_placed))

SUBJECTS = [
    Subject("PyTorch", "segments and sub-axes", 30_000, 1_000, PLACED, TORCH.missing, TORCH.stop),
    subject("transformers", "transformers", "transformers"),
    subject("Megatron-Core", "megatron", "megatron"),
    subject("DeepSpeed", "deepspeed", "deepspeed"),
]
