"""Compare with what compilers say about ops: factor rules of Shardy, and how it and JAX treat products.

`tests.oracle.corpora` reads the files; `/tests/data/computations/README.md` says how they were made.

Fresh ones are made in batches, each with a seed of its own, by the maker that comes with the corpora and needs JAX:
`python make_programs.py 2000 SEED` writes `programs.json.gz` into the working folder, half of its time for JAX's
explicit mode, and `python -m tests.oracle.corpora FOLDER programs` compares it.
"""

from __future__ import annotations

import gzip
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import shardwise as sw
from shardwise._dtypes import itemsize_of
from shardwise.computation import Computation, computation_of_jaxpr, factor_rule
from shardwise.propagate import Propagation, Start, propagate
from shardwise.propagate.given import Policy

Case = dict[str, Any]

DATA = Path(__file__).parent.parent / "data" / "computations"

#: The ops that StableHLO calls by the name of a function.
NAMES = {
    "custom_call:mhlo.topk": "top_k",
    "custom_call:Qr": "qr",
    "custom_call:Eigh": "eigh",
    "custom_call:mhlo.erf": "erf",
}
KINDS = {"passthrough": "pass", "reduction": "sum", "need_replication": "whole", "permutation": "shift"}


def rule_differs(case: Case) -> str | None:
    """Compare a factor rule with Shardy's: the factors of each dim, their sizes and kinds."""
    operands, results = ([shape for shape, _ in case[side]] for side in ("operands", "results"))
    rule = factor_rule(NAMES.get(case["op"]) or str(case["op"]), operands, results, **case["attrs"])
    numbers = {name: number for number, name in enumerate(rule.kinds)}
    found = {
        "operands": [[[numbers[name] for name in dim] for dim in dims] for dims in rule.operands],
        "results": [[[numbers[name] for name in dim] for dim in dims] for dims in rule.results],
        "sizes": list(rule.sizes.values()),
        "kinds": list(rule.kinds.values()),
        "blocked": [numbers[name] for name in rule.blocked],
    }
    expected = case["rule"] | {"kinds": [KINDS[kind] for kind in case["rule"]["kinds"]]}
    return None if found == expected else f"is {found}, expected {expected}"


def compare_rules(cases: list[Case]) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """Factor rules."""
    for case in cases:
        yield f"{case['op']} {case['operands']} {case['attrs']}", partial(rule_differs, case)


def product_differs(case: Case) -> str | None:
    """Compare what a product of two tensors gives and moves: with Shardy's passes, and with JAX's explicit mode."""
    (left, _), (right, _) = case["inputs"]
    text = einsum_text(len(left), len(right), case["attrs"])
    mesh = sw.DeviceMesh([size for _, size in case["mesh"]], [name for name, _ in case["mesh"]])
    given = {"x": case["given"][0], "w": case["given"][1]}
    ask = partial(sw.einsum, text, shapes=[left, right], mesh=mesh, **given)
    found, theirs = ask(), case["shardy"]
    held = [axes_of(layout) for layout in (*found.operands.values(), found.result)]
    if held != [
        value or [[] for _ in shape]
        for value, shape in zip(theirs["values"], (left, right, case["result"][0]), strict=True)
    ]:
        return f"shardy: the layouts are {held}, expected {theirs['values']}"
    needed = {move.tensor: axes_of(move.after) for move in found.before}
    reshards = {("x", "w")[value]: after for kind, value, _, after, _ in theirs["reshards"] if value < 2}
    if needed != reshards:
        return f"shardy: {needed} is needed, expected {reshards}"
    summed = [axes for kind, value, _, _, axes in theirs["reshards"] if kind == "all_reduce"]
    if sorted(found.computed.unreduced) != sorted(axis for axes in summed for axis in axes):
        return f"shardy: added over {found.computed.unreduced}, expected {summed}"
    computed = axes_of(found.computed)
    resharded = [before for kind, value, before, _, _ in theirs["reshards"] if kind == "reshard" and value == 2]
    if [computed] != (resharded or [held[2]]):
        return f"shardy: computed as {computed}, expected {resharded}"
    return None if case["jax"] is None else explicit_differs(ask, case["jax"])


def explicit_differs(ask: Callable[..., sw.propagate.LocalEinsum], theirs: Any) -> str | None:
    try:
        found = ask(policy="explicit")
    except sw.LayoutError as error:
        says = {"ambiguous": "may be whole", "consistent": "is cut over", "illegally": "would cut dims"}
        refused = (
            [ours for word, ours in says.items() if word in dict(theirs, error="").get("message", "")]
            if isinstance(theirs, dict)
            else []
        )
        return (
            None if any(ours in str(error) for ours in refused) else f"explicit: refused ({error}), expected {theirs}"
        )
    return None if axes_of(found.result) == theirs else f"explicit: {axes_of(found.result)}, expected {theirs}"


#: The dtypes that StableHLO calls otherwise.
DTYPES = {"f32": "float32", "i32": "int32", "bf16": "bfloat16", "i1": "bool"}


def computation_of(case: Case) -> Computation:
    """Read a computation of the corpora."""

    def named(values: list[Any]) -> list[Any]:
        return [[shape, DTYPES[dtype]] for shape, dtype in values]

    ops = [op | {"op": NAMES.get(op["op"]) or op["op"], "out": named(op["out"])} for op in case["ops"]]
    return Computation(named(case["inputs"]), ops, case["outputs"])


def arrays_of(computation: Computation, rng: random.Random) -> list[Any]:
    """Give arrays for the inputs of a computation: small numbers, and places that are there."""
    numpy = np.random.default_rng(rng.getrandbits(32))
    arrays: list[Any] = [numpy.integers(-4, 5, shape) / 4 for shape in computation.shapes[: computation.inputs]]
    for op in computation.ops:
        shapes = [computation.shapes[number] for number in (*op.operands, *op.results)]
        if op.name in ("gather", "scatter"):
            for at, dim in enumerate(op.attributes["start_index_map"]):
                places = arrays[op.operands[1]]
                last = shapes[0][dim] - (1 if dim in op.attributes["collapsed_slice_dims"] else shapes[0][dim])
                places[..., at] = numpy.integers(0, last + 1, places.shape[:-1])
        if op.name in ("dynamic_slice", "dynamic_update_slice"):
            first, part = (1, shapes[-1]) if op.name == "dynamic_slice" else (2, shapes[1])
            for number, size, own in zip(op.operands[first:], shapes[0], part, strict=True):
                arrays[number] = numpy.integers(0, size - own + 1, ())
    return arrays


def program_differs(case: Case) -> str | None:
    """Compare the layouts of all values of a computation, its reshards and sums with those of Shardy's passes."""
    computation = computation_of(case)
    mesh = sw.DeviceMesh([size for _, size in case["mesh"]], [name for name, _ in case["mesh"]])
    may_grow = case.get("open") or [0] * computation.inputs
    given = [Start(axes, open=True) if grows else axes for axes, grows in zip(case["given"], may_grow, strict=True)]
    found = propagate(computation, given, mesh=mesh)
    layouts = [None if layout is None else axes_of(layout) for layout in found.layouts]
    expected = case["shardy"]["values"]
    wrong = [number for number, pair in enumerate(zip(layouts, expected, strict=True)) if pair[0] != pair[1]]
    if wrong:
        return f"value {wrong[0]} is {layouts[wrong[0]]}, expected {expected[wrong[0]]}"
    results = [None if layout is None else axes_of(layout) for layout in found.results]
    # Without a layout for any result there is no list of them.
    wanted = case["shardy"]["results"] or [None] * len(results)
    if results != wanted:
        return f"the results are {results}, expected {wanted}"
    moves = sorted(reshard_of(move) for move in found.in_order if not move.implied)
    theirs = sorted(reshard_said(case, reshard) for reshard in case["shardy"]["reshards"])
    if moves != theirs:
        more = [move for move in moves if move not in theirs]
        less = [move for move in theirs if move not in moves]
        return f"moves {more}, expected {less}"
    return ops_differ(computation, case, mesh)


def ops_differ(computation: Computation, case: Case, mesh: sw.DeviceMesh) -> str | None:
    """Compare each op with JAX's explicit mode: the layout of its result, or that there is none."""
    if not case["jax"]:
        return None
    specs: list[Any] = [
        axes or [()] * len(shape) for axes, shape in zip(case["given"], computation.shapes, strict=False)
    ]
    values = list(zip(computation.shapes, computation.dtypes, strict=True))
    for op, said, theirs in zip(computation.ops, case["ops"], case["jax"], strict=True):
        taken, count = [specs[number] for number in op.operands], len(op.operands)
        alone = said | {"op": op.name, "in": list(range(count)), "out": [values[number] for number in op.results]}
        one = Computation([values[number] for number in op.operands], [alone], [count])
        try:
            found: Any = axes_of(held(propagate(one, taken, mesh=mesh, policy="explicit").layouts[count]))
        except sw.LayoutError as error:
            found = error
        refused = isinstance(theirs, dict)
        if isinstance(found, sw.LayoutError) != refused or (not refused and found != theirs):
            return f"explicit: {op.name} of {taken} gives {found}, expected {theirs}"
        specs.append([()] * len(values[op.results[0]][0]) if refused else theirs)
    return None


def held(layout: sw.TensorLayout | None) -> sw.TensorLayout:
    assert layout is not None
    return layout


def reshard_of(move: sw.propagate.Move) -> tuple[Any, ...]:
    """Give a move as the corpora write reshards and sums."""
    if move.before.unreduced:
        return ("all_reduce", move.value, [], axes_of(move.after), list(move.before.unreduced))
    return ("reshard", move.value, axes_of(move.before), axes_of(move.after), [])


def reshard_said(case: Case, reshard: list[Any]) -> tuple[Any, ...]:
    kind, value, before, after, axes = reshard
    rank = len(after)
    # A sum is in the layout in which it was computed.
    return (kind, value, [] if kind == "all_reduce" else before or [[]] * rank, after, axes or [])


def compare_programs(cases: list[Case]) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """Computations: the layouts of all values, the reshards and the sums."""
    for number, case in enumerate(cases):
        yield f"{number} {[op['op'] for op in case['ops']]}", partial(program_differs, case)


def stepped(case: Case, policy: Policy = "shardy") -> tuple[Computation, Propagation]:
    """Ask for a training step."""
    computation = computation_of_jaxpr(case["jaxpr"])
    mesh = sw.DeviceMesh([size for _, size in case["mesh"]], [name for name, _ in case["mesh"]])
    found = propagate(computation, case["in_specs"], results=case["out_specs"], mesh=mesh, policy=policy)
    return computation, found


def step_differs(case: Case) -> str | None:
    """Compare a training step: collectives of Shardy's passes by kind, count and bytes, and each of them by its shard.

    Where XLA has compiled it, also the bytes that a device has of arguments and results.
    """
    computation, found = stepped(case)
    totals: dict[str, list[float]] = {}
    each: Counter[tuple[Any, ...]] = Counter()
    for move in found.in_order:
        for step in () if move.implied else move.steps:
            if step.kind != "slice":
                total = totals.setdefault(step.kind, [0, 0])
                total[0] += move.times
                total[1] += move.times * step.bytes
                assert step.layout is not None
                shard = step.layout.partition(move.shape, uneven="ceil").largest_shard_shape
                each[step.kind, shard, step.axes] += move.times
    expected = case["shardy"]["total"]
    if totals != expected:
        return f"collectives {totals}, expected {expected}"
    if "collectives" in case["shardy"]:
        theirs: Counter[tuple[Any, ...]] = Counter()
        for kind, _, shard, _, times, axes in case["shardy"]["collectives"]:
            theirs[kind, tuple(shard), tuple(axes)] += times
        # What a permute is over is not said.
        mine = Counter({key if key[0] != "collective-permute" else (*key[:2], ()): n for key, n in each.items()})
        if mine != theirs:
            return f"collectives {dict(mine - theirs)}, expected {dict(theirs - mine)}"
    xla = case.get("xla", {})
    for name, numbers, layouts, more in (
        ("argument", range(computation.inputs), found.layouts[: computation.inputs], 0),
        # The place of each result is 8 bytes.
        ("output", computation.outputs, found.results, 8),
    ):
        held = [
            (
                0 if layout is None else math.prod(layout.partition(shape, uneven="ceil").largest_shard_shape),
                shape,
                dtype,
            )
            for layout, shape, dtype in (
                (layout, computation.shapes[number], computation.dtypes[number])
                for layout, number in zip(layouts, numbers, strict=True)
            )
        ]
        size = sum((n or math.prod(shape)) * itemsize_of(dtype) + more for n, shape, dtype in held)
        if name in xla and size != xla[name]:
            return f"{name}s are {size} bytes on a device, expected {xla[name]}"
    return None


def fewest_of(cases: list[Case]) -> Iterator[str]:
    """Compare the fewest bytes with those of Shardy and XLA, step by step: a line for each that has more, and the sums.

    To Shardy's collectives those come that it does not list.
    """
    sums = [0.0, 0.0, 0.0]
    for case in cases:
        shardy, least = (stepped(case, policy)[1].bytes_received for policy in ("shardy", "least"))
        xla = sum(size for _, size in case["xla"]["total"].values()) if "xla" in case else math.inf
        sums = [total + size for total, size in zip(sums, (least, shardy, xla), strict=True)]
        for name, size in (("Shardy", shardy), ("XLA", xla)):
            if least > size:
                yield f"{case['name']} {case['scheme']}: {least:,} bytes, {name} {size:,.0f}"
    names = ("the fewest", "Shardy", "XLA")
    said = (f"{name} {size:,.0f}" for name, size in zip(names, sums, strict=True) if size < math.inf)
    yield f"bytes of {len(cases)} steps in all: {', '.join(said)}"


def compare_steps(cases: list[Case]) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """Training steps: the collectives."""
    for case in cases:
        yield f"{case['name']} {case['scheme']}", partial(step_differs, case)


def einsum_text(left: int, right: int, attributes: dict[str, Any]) -> str:
    """Write a `dot_general` as an einsum."""
    # Summed letters are taken in their order.
    letters, summed_letters = iter("jklmnopqrstuvwxyz"), iter("abcdefghi")
    names = [[next(letters) for _ in range(rank)] for rank in (left, right)]
    pairs = {
        kind: list(zip(*(attributes[f"{side}_{kind}_dimensions"] for side in ("lhs", "rhs")), strict=True))
        for kind in ("batching", "contracting")
    }
    for at, other in pairs["batching"]:
        names[1][other] = names[0][at]
    for at, other in pairs["contracting"]:
        names[0][at] = names[1][other] = next(summed_letters)
    batch = [names[0][dim] for dim in attributes["lhs_batching_dimensions"]]
    summed = [names[0][dim] for dim in attributes["lhs_contracting_dimensions"]]
    free = [name for side in names for name in side if name not in batch and name not in summed]
    return f"{''.join(names[0])},{''.join(names[1])}->{''.join(batch + free)}"


def axes_of(layout: sw.TensorLayout) -> list[list[str]]:
    specs: Any = layout.axes
    return [[] if spec is None else [spec] if isinstance(spec, str) else list(spec) for spec in specs]


def compare_products(cases: list[Case]) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """Products of two tensors."""
    for case in cases:
        yield f"{case['inputs']} {case['attrs']} {case['mesh']} {case['given']}", partial(product_differs, case)


def cases_of(name: str) -> list[Case]:
    """Read the cases that are kept here."""
    with gzip.open(DATA / f"{name}.json.gz") as file:
        cases: list[Case] = json.load(file)["cases"]
    return cases


#: What is known of each file.
KNOWN: dict[str, Callable[[list[Case]], Iterator[tuple[str, Callable[[], str | None]]]]] = {
    "rules": compare_rules,
    "products": compare_products,
    "programs": compare_programs,
    "steps": compare_steps,
}
