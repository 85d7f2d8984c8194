"""Factor rules: each device computes with its views, and the results are those of the whole op, or add up to them."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import shardwise as sw
from shardwise._types import Array
from shardwise.computation import FactorRule, factor_rule
from shardwise.computation.evaluate import OPS
from shardwise.computation.held import REDUCTIONS, DeviceTensors, identity

from .subject import Mismatch, Subject, one_by_one, sampled

Shape = tuple[int, ...]
SIZES = (1, 2, 2, 3, 4, 4, 6, 8)


@dataclass(frozen=True)
class OpCase:
    """An op, and the axes that cut some of its factors, by their names in the rule."""

    op: str
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    attributes: Mapping[str, Any]
    mesh: tuple[int, ...] = (2,)
    cuts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    seed: int = 0

    def rule(self) -> FactorRule:
        return factor_rule(self.op, self.operands, self.results, **self.attributes)

    def snippet(self) -> str:
        return (
            f"from shardwise.computation import factor_rule\nrule = factor_rule({self.op!r}, {list(self.operands)}, "
            f"{list(self.results)}, **{dict(self.attributes)})\n# on {self.mesh}, cut by {dict(self.cuts)}"
        )

    def simpler(self) -> Iterator[OpCase]:
        for name in self.cuts:
            yield replace(self, cuts={other: axes for other, axes in self.cuts.items() if other != name})


def values_of(case: OpCase) -> list[Array]:
    """Small whole numbers, whose sums are exact in any order; numbers of places where an op looks things up."""
    rng = np.random.default_rng(case.seed)
    arrays: list[Array] = [rng.integers(-4, 5, shape).astype(np.float64) for shape in case.operands]
    attributes = case.attributes
    if attributes.get("body") in ("and", "or", "xor"):
        arrays = [array.astype(np.int64) for array in arrays]
    if case.op in ("gather", "scatter"):
        shape = case.operands[0]
        parts = attributes["slice_sizes"] if case.op == "gather" else window_sizes(case)
        places = arrays[1]
        vector = attributes["index_vector_dim"]
        for at, dim in enumerate(attributes["start_index_map"]):
            index = tuple([slice(None)] * vector + [at])
            places[index] = rng.integers(0, shape[dim] - parts[dim] + 1, places[index].shape)
    if case.op in ("dynamic_slice", "dynamic_update_slice"):
        first = 1 if case.op == "dynamic_slice" else 2
        parts = case.results[0] if first == 1 else case.operands[1]
        for dim, (size, part) in enumerate(zip(case.operands[0], parts, strict=True)):
            arrays[first + dim] = np.array(float(rng.integers(0, size - part + 1)))
    if case.op == "cholesky":
        arrays[0] = arrays[0] @ arrays[0].swapaxes(-1, -2) + 99 * np.eye(case.operands[0][-1])
    if case.op == "batch_norm_inference":
        arrays[4] = np.abs(arrays[4])
    if case.op == "triangular_solve":
        arrays[0] = arrays[0] + 20 * np.eye(case.operands[0][-1])
    if case.op == "reduce":
        arrays[1] = identity(attributes["body"], arrays[0].dtype)
    return arrays


def window_sizes(case: OpCase) -> list[int]:
    shape, attributes = case.operands[0], case.attributes
    whole = [
        dim
        for dim in range(len(shape))
        if dim not in attributes["collapsed_slice_dims"] and dim not in attributes["operand_batching_dims"]
    ]
    sizes = [1] * len(shape)
    for dim, of_slices in zip(whole, attributes["offset_dims"], strict=True):
        sizes[dim] = case.operands[2][of_slices]
    return sizes


def layouts_of(case: OpCase, rule: FactorRule, mesh: sw.DeviceMesh) -> list[sw.TensorLayout]:
    def spec(dim: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for name in dim for axis in case.cuts.get(name, ()))

    return [sw.TensorLayout([spec(dim) for dim in dims], mesh) for dims in (*rule.operands, *rule.results)]


def check_rule(case: OpCase, rule: FactorRule | None = None) -> None:
    """Compare the op on the views of each device with the views of the op; `rule` stands in for the op's own."""
    rule = case.rule() if rule is None else rule
    mesh = sw.DeviceMesh(case.mesh, [f"a{axis}" for axis in range(len(case.mesh))])
    arrays, function = values_of(case), OPS[case.op]
    at_zero = [(0,) * array.ndim for array in arrays]
    whole = function(DeviceTensors(arrays, at_zero, case.operands, case.results), case.attributes)
    layouts = layouts_of(case, rule, mesh)
    shapes = (*case.operands, *case.results)
    partitions = [layout.partition(shape) for layout, shape in zip(layouts, shapes, strict=True)]
    inputs, outputs = partitions[: len(arrays)], partitions[len(arrays) :]
    summed = [axis for name, axes in case.cuts.items() if rule.kinds[name] == "sum" for axis in axes]
    addends: dict[tuple[int, ...], list[tuple[str, list[Array]]]] = {}
    for number in range(mesh.size):
        device = mesh.device(number)
        boxes = [partition.box(device) for partition in inputs]
        views = [array[box] for array, box in zip(arrays, boxes, strict=True)]
        coordinate = dict(zip(mesh.axis_names, mesh.coordinate(number), strict=True))
        first = all(coordinate[axis] == 0 for axis in summed)
        sizes = [partition.shard_shape(device) for partition in outputs]
        starts = [tuple(side.start for side in box) for box in boxes]
        rest = tuple(at for axis, at in coordinate.items() if axis not in summed)
        found = function(DeviceTensors(views, starts, case.operands, sizes, first), case.attributes)
        addends.setdefault(rest, []).append((device, found))
    for parts in addends.values():
        for number, expected in enumerate(whole):
            box = outputs[number].box(parts[0][0])
            value = functools.reduce(REDUCTIONS[rule.reduction], [found[number] for _, found in parts])
            if value.shape != expected[box].shape or not np.allclose(value, expected[box], rtol=1e-9, atol=1e-9):
                raise Mismatch(f"result {number} at {box}: {value.tolist()}, expected {expected[box].tolist()}")


def shape_of(rng: random.Random, least: int = 1, most: int = 3) -> Shape:
    return tuple(rng.choice(SIZES) for _ in range(rng.randint(least, most)))


def some(rng: random.Random, dims: int) -> list[int]:
    return sorted(rng.sample(range(dims), rng.randint(0, dims)))


def elementwise(rng: random.Random) -> OpCase:
    op, shape = rng.choice(("add", "multiply", "tanh", "compare", "clamp", "select")), shape_of(rng)
    count = {"tanh": 1, "clamp": 3, "select": 3}.get(op, 2)
    scalars = {"clamp": (0, 2), "select": (0,)}.get(op, ()) if rng.random() < 0.5 else ()
    return OpCase(op, tuple(() if number in scalars else shape for number in range(count)), (shape,), {})


def shaped(rng: random.Random) -> OpCase:
    """Ops that put elements elsewhere."""
    op = rng.choice(
        (
            "transpose",
            "reshape",
            "broadcast_in_dim",
            "concatenate",
            "slice",
            "dynamic_slice",
            "dynamic_update_slice",
            "reverse",
        )
    )
    shape = shape_of(rng)
    rank = len(shape)
    if op == "transpose":
        order = rng.sample(range(rank), rank)
        return OpCase(op, (shape,), (tuple(shape[dim] for dim in order),), {"permutation": order})
    if op == "reshape":
        left, result = math.prod(shape), []
        while left > 1:
            result.append(rng.choice([size for size in range(2, left + 1) if left % size == 0]))
            left //= result[-1]
        return OpCase(op, (shape,), (tuple(result),), {})
    if op == "broadcast_in_dim":
        dims = some(rng, rank)
        return OpCase(
            op,
            (tuple(rng.choice((shape[dim], shape[dim], 1)) for dim in dims),),
            (shape,),
            {"broadcast_dimensions": dims},
        )
    if op == "concatenate":
        dim = rng.randrange(rank)
        parts = [(*shape[:dim], rng.choice(SIZES), *shape[dim + 1 :]) for _ in range(rng.randint(1, 3))]
        whole = (*shape[:dim], sum(part[dim] for part in parts), *shape[dim + 1 :])
        return OpCase(op, tuple(parts), (whole,), {"dimension": dim})
    if op == "reverse":
        return OpCase(op, (shape,), (shape,), {"dimensions": some(rng, rank)})
    part = tuple(rng.choice((size, rng.randint(1, size))) for size in shape)
    if op == "dynamic_slice":
        return OpCase(op, (shape, *[()] * rank), (part,), {"slice_sizes": list(part)})
    if op == "dynamic_update_slice":
        return OpCase(op, (shape, part, *[()] * rank), (shape,), {})
    starts = [rng.randint(0, size - own) for size, own in zip(shape, part, strict=True)]
    stops = [start + own for start, own in zip(starts, part, strict=True)]
    return OpCase(op, (shape,), (part,), {"start_indices": starts, "limit_indices": stops, "strides": [1] * rank})


def product(rng: random.Random) -> OpCase:
    batch, summed, left, right = (shape_of(rng, 0, 2) for _ in range(4))
    tensors: list[Any] = []
    for own in (left, right):
        tags = [(kind, at) for kind, sizes in (("b", batch), ("s", summed), ("o", own)) for at in range(len(sizes))]
        rng.shuffle(tags)
        sizes = {"b": batch, "s": summed, "o": own}
        shape = tuple(sizes[kind][at] for kind, at in tags)
        free = tuple(own[at] for kind, at in tags if kind == "o")
        tensors.append((shape, *([tags.index((kind, at)) for at in range(len(sizes[kind]))] for kind in "bs"), free))
    (lhs, left_batch, left_sum, left_free), (rhs, right_batch, right_sum, right_free) = tensors
    attributes = {
        "lhs_batching_dimensions": left_batch,
        "rhs_batching_dimensions": right_batch,
        "lhs_contracting_dimensions": left_sum,
        "rhs_contracting_dimensions": right_sum,
    }
    return OpCase("dot_general", (lhs, rhs), ((*batch, *left_free, *right_free),), attributes)


def convolved(rng: random.Random) -> OpCase:
    spatial = rng.randint(1, 2)
    batch, features, outputs, groups = (rng.choice((1, 2, 4)) for _ in range(4))
    sizes, kernel = [rng.choice((3, 4, 6)) for _ in range(spatial)], [rng.choice((1, 2, 3)) for _ in range(spatial)]
    strides, padding = [rng.choice((1, 2)) for _ in range(spatial)], [[rng.randint(0, 1), 0] for _ in range(spatial)]
    counts = [(n + low - k) // by + 1 for n, k, by, (low, _) in zip(sizes, kernel, strides, padding, strict=True)]
    numbers = list(range(spatial))
    named: list[list[str | int]] = [["b", "f", *numbers], ["o", "i", *numbers], ["b", "f", *numbers]]
    for names in named:
        rng.shuffle(names)
    extents: tuple[dict[str | int, int], ...] = (
        {"b": batch, "f": features * groups} | dict(enumerate(sizes)),
        {"o": outputs * groups, "i": features} | dict(enumerate(kernel)),
        {"b": batch, "f": outputs * groups} | dict(enumerate(counts)),
    )
    lhs, rhs, out = (tuple(sizes[name] for name in names) for names, sizes in zip(named, extents, strict=True))
    attributes = {
        **dict(zip(("lhs_spec", "rhs_spec", "out_spec"), named, strict=True)),
        "window_strides": strides,
        "padding": padding,
        "feature_group_count": groups,
    }
    return OpCase("convolution", (lhs, rhs), (out,), attributes)


def reduced(rng: random.Random) -> OpCase:
    shape, body = shape_of(rng), rng.choice(tuple(REDUCTIONS))
    if rng.random() < 0.6:
        dims = some(rng, len(shape))
        kept = tuple(size for dim, size in enumerate(shape) if dim not in dims)
        return OpCase("reduce", (shape, ()), (kept,), {"dimensions": dims, "body": body})
    window = [rng.choice((1, min(2, size))) for size in shape]
    strides = [rng.choice((1, size)) for size in window]
    counts = tuple((n - size) // by + 1 for n, size, by in zip(shape, window, strides, strict=True))
    attributes = {
        "window_dimensions": window,
        "window_strides": strides,
        "padding": [[0, 0]] * len(shape),
        "body": body,
    }
    return OpCase("reduce_window", (shape, ()), (counts,), attributes)


def looked_up(rng: random.Random) -> OpCase:
    shape = shape_of(rng)
    rank = len(shape)
    batch = [0] if rank > 1 and rng.random() < 0.3 else []
    rest = [dim for dim in range(rank) if dim not in batch]
    collapsed = sorted(rng.sample(rest, rng.randint(0, len(rest))))
    parts = [
        1 if dim in collapsed or dim in batch else rng.choice((n, n, rng.randint(1, n))) for dim, n in enumerate(shape)
    ]
    coordinates = sorted({*collapsed, *rng.sample(rest, rng.randint(0, len(rest)))})
    batches = [shape[dim] for dim in batch] + [rng.choice(SIZES) for _ in range(rng.randint(0, 2))]
    windows = [parts[dim] for dim in rest if dim not in collapsed]
    offset = sorted(rng.sample(range(len(batches) + len(windows)), len(windows)))
    of_batches, of_windows = iter(batches), iter(windows)
    slices = tuple(next(of_windows if dim in offset else of_batches) for dim in range(len(batches) + len(windows)))
    attributes = {
        "offset_dims": offset,
        "collapsed_slice_dims": collapsed,
        "operand_batching_dims": batch,
        "start_indices_batching_dims": [0] * len(batch),
        "start_index_map": coordinates,
        "index_vector_dim": len(batches),
    }
    indices = (*batches, len(coordinates))
    if rng.random() < 0.5:
        return OpCase("gather", (shape, indices), (slices,), attributes | {"slice_sizes": parts})
    body = rng.choice(("add", "multiply", "maximum", "assign"))
    return OpCase("scatter", (shape, indices, slices), (shape,), attributes | {"body": body})


def other(rng: random.Random) -> OpCase:
    """Sorts, decompositions, transforms, normalisation."""
    op = rng.choice(("sort", "top_k", "cholesky", "lu", "qr", "svd", "triangular_solve", "fft", "batch_norm_inference"))
    shape, side = shape_of(rng), rng.choice((2, 4))
    last = len(shape) - 1
    if op == "sort":
        return OpCase(op, (shape,), (shape,), {"dimension": rng.randint(0, last)})
    if op == "top_k":
        kept = (*shape[:-1], rng.randint(1, shape[-1]))
        return OpCase(op, (shape,), (kept, kept), {})
    if op == "cholesky":
        return OpCase(op, ((*shape[:2], side, side),), ((*shape[:2], side, side),), {})
    if op in ("lu", "qr", "svd"):
        batch, (m, n) = shape[:2], rng.choices(SIZES, k=2)
        k = min(m, n)
        forms: dict[str, Any] = {
            "lu": [((m, n), (k,), (m,))],
            "qr": [((m, n), (k,)), ((m, k), (k, n)), ((m, m), (m, n))],
            "svd": [((k,),), ((k,), (m, k), (k, n)), ((k,), (m, m), (n, n))],
        }
        return OpCase(op, ((*batch, m, n),), tuple((*batch, *sides) for sides in rng.choice(forms[op])), {})
    if op == "triangular_solve":
        left, columns = rng.random() < 0.5, rng.choice(SIZES)
        b = (*shape[:2], *((side, columns) if left else (columns, side)))
        return OpCase(op, ((*shape[:2], side, side), b), (b,), {"left_side": left, "transpose_a": rng.random() < 0.5})
    if op == "fft":
        return OpCase(
            op, (shape,), (shape,), {"fft_type": "FFT", "fft_length": list(shape[-rng.randint(1, len(shape)) :])}
        )
    feature = rng.randint(0, last)
    return OpCase(op, (shape, *[(shape[feature],)] * 4), (shape,), {"feature_index": feature})


def random_case(rng: random.Random) -> OpCase:
    """An op, and axes for factors that may be cut: those that pass or are summed, whose dims they then cut evenly."""
    case = rng.choice((elementwise, shaped, shaped, product, product, convolved, reduced, looked_up, looked_up, other))(
        rng
    )
    rule = case.rule()
    mesh = tuple(rng.choice((2, 2, 3)) for _ in range(rng.randint(1, 3)))
    sizes = dict(rule.sizes)
    cuts: dict[str, tuple[str, ...]] = {}
    for axis, size in enumerate(mesh):
        free = [name for name in cuttable(case, rule, sizes) if sizes[name] % size == 0]
        if free and rng.random() < 0.9:
            name = rng.choice(free)
            sizes[name] //= size
            cuts[name] = (*cuts.get(name, ()), f"a{axis}")
    return replace(case, mesh=mesh, cuts=cuts, seed=rng.randrange(2**32))


def cuttable(case: OpCase, rule: FactorRule, left: Mapping[str, int]) -> list[str]:
    """The factors that a layout can cut: the first of a dim, or one after those of which nothing is `left`."""
    tensors = (*rule.operands, *rule.results)
    found = []
    for name, kind in rule.kinds.items():
        homes = [dim for dims in tensors for dim in dims if name in dim]
        major = all(left[before] == 1 for dim in homes for before in dim[: dim.index(name)])
        if kind in ("pass", "sum") and homes and major and not needs_more(case, rule, name):
            found.append(name)
    return found


def needs_more(case: OpCase, rule: FactorRule, name: str) -> bool:
    """Say whether Shardy's rule, which ours is, promises more than a device can compute with its views alone."""
    if case.op == "reshape":  # A factor of one side is no index that both have.
        return sum(name in dim for dims in (*rule.operands, *rule.results) for dim in dims) < 2
    if case.op == "convolution" and rule.kinds[name] == "sum":  # Places in a window need their neighbours as well.
        return name not in rule.operands[1][case.attributes["rhs_spec"].index("i")]
    # Of a dim that is sorted as a whole each device needs all, also if none of it is left out.
    return case.op == "top_k" and name in rule.operands[0][-1]


SUBJECTS = [Subject("numpy", "factor rules", 1_000_000, 1_000, sampled(random_case, one_by_one(check_rule)))]
