"""The layouts that JAX's explicit mode gives the results of ops, and its errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from .._types import Shape
from ..computation.computation import Computation
from ..errors import LayoutError
from ..mesh import DeviceMesh
from .flow import BegunLayout, Flow, FlowNode, Specs

__all__ = ["Conflict", "Operands", "explicit_layouts", "explicit_results"]


_WHOLE_DIMS = ("slice", "pad", "dynamic_slice", "reduce_window", "convolution")


class Conflict(Exception):
    """A disagreement that explicit mode does not decide: in words, and the operands and dims that disagree."""

    def __init__(self, why: str, *origins: tuple[int, int]) -> None:
        super().__init__(why)
        #: Pairs of an operand and a dim.
        self.origins = origins


@dataclass(frozen=True)
class Operands:
    """The operands of an op, and what it gives."""

    op: str
    attributes: Mapping[str, Any]
    shapes: Sequence[Shape]
    specs: Sequence[Specs]
    results: Sequence[Shape]
    #: The size of each axis.
    sizes: Mapping[str, int]

    def text(self, operand: int, dim: int) -> str:
        """Say how a dim of an operand is cut."""
        axes = "+".join(self.specs[operand][dim])
        return f"dim {dim} of operands[{operand}] is {f'cut over {axes}' if axes else 'whole'}"


def explicit_layouts(flow: Flow, computation: Computation, mesh: DeviceMesh) -> list[BegunLayout | None]:
    """Give the layouts of all values, op by op.

    Raises:
        LayoutError: where those of an op's operands do not say; names the op, and where each of its layouts is from.
    """
    free = next((at for at in range(computation.inputs) if flow.starts[at] is None), None)
    if free is not None:
        raise LayoutError(
            f"layouts[{free}] is None, and policy='explicit' gives none; give its axes, or policy='shardy'"
        )
    found = [None if start is None else tuple(map(tuple, start.axes)) for start in flow.starts]
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    # The input or the op that each value's layout is from.
    origins: list[str] = [""] * len(found)
    for at in range(computation.inputs):
        name = computation.names[at] if computation.names else f"layouts[{at}]"
        origins[at] = f"input {name}"

    # The inputs of a loop's body have what the loop begins with.
    loops = {node.values[-1]: node.values[0] for node in flow.nodes if node.op is not None and node.op.name == "loop"}

    def held(value: int) -> Specs:
        owner = flow.same[value]
        if found[owner] is None and owner in loops:
            found[owner], origins[owner] = held(loops[owner]), origins[flow.same[loops[owner]]]
        specs = found[owner]
        return ((),) * len(flow.shapes[value]) if specs is None else specs

    for node in [*flow.nodes, *flow.outputs]:
        count = len(node.values) - (len(node.op.results) if node.op is not None and node.kind == "op" else 1)
        operands, results = node.values[:count], node.values[count:]
        if node.way in ("edge", "constraint"):
            if found[results[0]] is None:
                found[results[0]], origins[results[0]] = held(operands[0]), origins[flow.same[operands[0]]]
            continue
        assert node.op is not None
        given = Operands(
            node.op.name,
            node.op.attributes,
            [flow.shapes[value] for value in operands],
            [held(value) for value in operands],
            [flow.shapes[value] for value in results],
            sizes,
        )
        try:
            specs = explicit_results(given, node.op.is_elementwise)
        except Conflict as conflict:
            raise LayoutError(_said(node, conflict, [origins[flow.same[value]] for value in operands])) from None
        for value, each in zip(results, specs, strict=True):
            cut = [origins[flow.same[operand]] for operand in operands if any(held(operand))]
            found[value], origins[value] = each, cut[0] if cut else ""
    return [
        None if specs is None else BegunLayout(specs, [False] * len(specs), [0] * len(specs))
        for specs in (found[flow.same[value]] for value in range(len(found)))
    ]


def _said(node: FlowNode, conflict: Conflict, origins: Sequence[str]) -> str:
    assert node.op is not None
    place = f" ({node.op.source})" if node.op.source else ""
    from_ = [
        f"operands[{at}] has it from {origins[at]}"
        for at in dict.fromkeys(at for at, _ in conflict.origins)
        if origins[at]
    ]
    where = f" ({', '.join(from_)})" if from_ else ""
    return f"{node.op.name}{place}: {conflict}{where}; give policy='shardy' or policy='least' to have it decided"


def explicit_results(given: Operands, elementwise: bool) -> list[Specs]:
    """Give the layouts of the results of an op.

    Raises:
        Conflict: where the operands' do not say.
    """
    if elementwise and given.op not in ("select", "clamp"):
        found = _alike(given)
    elif given.op in _RULES:
        found = _RULES[given.op](given)
    elif given.op in _WHOLE_DIMS:
        found = _sliced(given)
    elif any(any(specs) for specs in given.specs):
        raise Conflict(f"explicit mode has no rule for {given.op}")
    else:
        found = ()
    specs = [found if len(found) == len(shape) else ((),) * len(shape) for shape in given.results]
    for result in specs:
        axes = list(chain.from_iterable(result))
        twice = next((axis for axis in axes if axes.count(axis) > 1), None)
        if twice is not None:
            dims = [dim for dim, spec in enumerate(result) if twice in spec]
            raise Conflict(
                f"{twice} would cut dims {dims[0]} and {dims[-1]} of the result",
                *[(at, dim) for at, specs in enumerate(given.specs) for dim, spec in enumerate(specs) if twice in spec],
            )
    return specs


def _agree(given: Operands, *places: tuple[int, int]) -> tuple[str, ...]:
    """Give the axes that several dims have, but for those that are whole."""
    cut = [(at, dim) for at, dim in places if given.specs[at][dim]]
    for at, dim in cut[1:]:
        if given.specs[at][dim] != given.specs[cut[0][0]][cut[0][1]]:
            raise Conflict(f"{given.text(*cut[0])}, and {given.text(at, dim)}", cut[0], (at, dim))
    return given.specs[cut[0][0]][cut[0][1]] if cut else ()


def _equal(given: Operands, first: int, other: int) -> None:
    for dim, (one, two) in enumerate(zip(given.specs[first], given.specs[other], strict=True)):
        if one != two:
            raise Conflict(f"{given.text(first, dim)}, and {given.text(other, dim)}", (first, dim), (other, dim))


def _alike(given: Operands) -> Specs:
    ranked = [at for at, shape in enumerate(given.shapes) if shape]
    rank = len(given.shapes[ranked[0]]) if ranked else 0
    return tuple(_agree(given, *[(at, dim) for at in ranked]) for dim in range(rank))


def _select(given: Operands) -> Specs:
    _equal(given, 1, 2)
    if given.shapes[0]:
        _equal(given, 0, 1)
    return given.specs[1]


def _concatenate(given: Operands) -> Specs:
    for other in range(1, len(given.specs)):
        _equal(given, 0, other)
    return given.specs[0]


def _update(given: Operands) -> Specs:
    _equal(given, 0, 1)
    return given.specs[0]


def _sort(given: Operands) -> Specs:
    dim = given.attributes["dimension"]
    for at in range(len(given.specs)):
        _whole(given, at, dim)
        _equal(given, 0, at)
    return given.specs[0]


def _whole(given: Operands, operand: int, dim: int) -> None:
    if given.specs[operand][dim]:
        raise Conflict(f"{given.text(operand, dim)}, but {given.op} needs it whole", (operand, dim))


def _sliced(given: Operands) -> Specs:
    if given.op == "convolution":
        for dim in range(len(given.shapes[1])):
            _whole(given, 1, dim)
        _whole(given, 0, given.attributes["lhs_spec"].index("f"))
    for dim, (before, after, spec) in enumerate(zip(given.shapes[0], given.results[0], given.specs[0], strict=True)):
        shards = math.prod(given.sizes[axis] for axis in spec)
        if before != after and after % shards:
            raise Conflict(f"{given.text(0, dim)}, and what {given.op} gives of it, {after}, does not divide", (0, dim))
    return given.specs[0]


def _dot_general(given: Operands) -> Specs:
    named = {
        kind: [list(given.attributes[f"{side}_{kind}_dimensions"]) for side in ("lhs", "rhs")]
        for kind in ("batching", "contracting")
    }
    batch = [_agree(given, (0, left), (1, right)) for left, right in zip(*named["batching"], strict=True)]
    for left, right in zip(*named["contracting"], strict=True):
        _agree(given, (0, left), (1, right))
    for left, right in zip(*named["contracting"], strict=True):
        if given.specs[0][left] and given.specs[1][right]:
            raise Conflict(
                f"{given.text(0, left)}, and so is dim {right} of operands[1], and both are summed: the result may be "
                "whole, cut or left as addends",
                (0, left),
                (1, right),
            )
    batch = [given.specs[0][left] for left in named["batching"][0]]
    rest = [
        given.specs[side][dim]
        for side in (0, 1)
        for dim in range(len(given.shapes[side]))
        if dim not in named["batching"][side] and dim not in named["contracting"][side]
    ]
    return (*batch, *rest)


def _gather(given: Operands) -> Specs:
    said, (operand, indices) = given.attributes, given.specs
    pairs = list(zip(said["operand_batching_dims"], said["start_indices_batching_dims"], strict=True))
    batches = {two: _agree(given, (0, one), (1, two)) for one, two in pairs}
    for dim in said["start_index_map"]:
        if said["slice_sizes"][dim] != given.shapes[0][dim]:
            _whole(given, 0, dim)
    for dim in range(len(indices)):
        if dim not in batches:
            _whole(given, 1, dim)
    taken = iter([d for d in range(len(operand)) if d not in (*said["collapsed_slice_dims"], *dict(pairs))])
    numbers = iter(dim for dim in range(len(indices)) if dim != said["index_vector_dim"])
    return tuple(
        operand[next(taken)] if dim in said["offset_dims"] else batches.get(next(numbers), ())
        for dim in range(len(given.results[0]))
    )


def _scatter(given: Operands) -> Specs:
    said, (operand, indices, updates) = given.attributes, given.specs
    if not any(map(any, given.specs)):
        return operand
    windows = said["offset_dims"]
    batches = [dim for dim in range(len(updates)) if dim not in windows]
    pairs = list(zip(said["operand_batching_dims"], said["start_indices_batching_dims"], strict=True))
    found = list(operand)
    for one, two in pairs:
        found[one] = _agree(given, (0, one), (1, two), (2, batches[two]))
    inserted = [*said["collapsed_slice_dims"], *dict(pairs)]
    whole = [dim for dim in range(len(operand)) if dim not in inserted]
    for update, dim in zip(windows, whole, strict=True):
        if given.shapes[2][update] != given.shapes[0][dim]:
            _whole(given, 0, dim)
            _whole(given, 2, update)
        elif updates[update] != operand[dim]:
            raise Conflict(f"{given.text(0, dim)}, and {given.text(2, update)}", (0, dim), (2, update))
    of_indices = [two for _, two in pairs]
    for dim in said["collapsed_slice_dims"]:
        _whole(given, 0, dim)
    for at, dim in enumerate(batches):
        if at not in of_indices:
            _whole(given, 2, dim)
    for dim in range(len(indices)):
        if dim not in of_indices:
            _whole(given, 1, dim)
    return tuple(found)


def _reshape(given: Operands) -> Specs:
    (before,), (after,), (specs,) = given.shapes, given.results, given.specs
    if not any(specs):
        return ((),) * len(after)
    if [size for size in before if size != 1] == [size for size in after if size != 1]:
        kept = iter([spec for size, spec in zip(before, specs, strict=True) if size != 1])
        return tuple(() if size == 1 else next(kept) for size in after)
    if len(after) > len(before) and (groups := _groups(given, before, after)):
        return tuple(
            each
            for group, spec in zip(groups, specs, strict=True)
            for each in (_spread(given, group, spec) if isinstance(group, list) else [spec])
        )
    if len(after) < len(before) and (groups := _groups(given, after, before)):
        rest = iter(specs)
        return tuple(
            _spread(given, [size], _joined(given, [next(rest) for _ in group]))[0]
            if isinstance(group, list)
            else next(rest)
            for size, group in zip(after, groups, strict=True)
        )
    raise _refused(given)


def _refused(given: Operands) -> Conflict:
    dim = next(dim for dim, spec in enumerate(given.specs[0]) if spec)
    return Conflict(
        f"{given.text(0, dim)}, and a reshape to {given.results[0]} does not say what becomes of it", (0, dim)
    )


def _groups(given: Operands, few: Shape, many: Shape) -> list[int | list[int]]:
    """Give for each dim of the shape of fewer dims its size, or for one of them the sizes that it is split into."""
    left, right, ones = list(few), list(many), 0
    while left and left[-1] == 1 and right[-1] == 1:
        del left[-1], right[-1]
        ones += 1
    found: list[int | list[int]] = []
    i = j = count = 0
    while j < len(right):
        if i >= len(left):
            return []
        if left[i] == right[j]:
            found.append(left[i])
        else:
            count += 1
            if count > 1:
                raise _refused(given)
            parts = [right[j]]
            after = j + 1
            while math.prod(parts) != left[i] or (after < len(right) and right[after] == 1):
                if math.prod(parts) > left[i]:
                    return []
                if math.prod(parts) == left[i] and i + 1 < len(left) and right[after] == left[i + 1]:
                    break
                j += 1
                if j >= len(right):
                    return []
                parts.append(right[j])
                after += 1
            found.append(parts)
        i, j = i + 1, j + 1
    return found + [1] * ones


def _spread(given: Operands, sizes: Sequence[int], axes: Sequence[str]) -> list[tuple[str, ...]]:
    """Give each of the sizes the axes that cut it, major first."""
    rest, found = list(axes), []
    for size in sizes:
        left, own = size, []
        while left > 1 and rest:
            if left % given.sizes[rest[0]]:
                raise _refused(given)
            left //= given.sizes[rest[0]]
            own.append(rest.pop(0))
        found.append(tuple(own))
    return found


def _joined(given: Operands, specs: Sequence[Sequence[str]]) -> list[str]:
    """Give the axes of dims that are joined; a dim that is whole must not come before one that is cut."""
    while specs and not specs[-1]:
        specs = specs[:-1]
    if any(not spec for spec in specs):
        raise _refused(given)
    return [axis for spec in specs for axis in spec]


def _moved(given: Operands) -> Specs:
    return tuple(given.specs[0][dim] for dim in given.attributes["permutation"])


def _spread_out(given: Operands) -> Specs:
    found: list[tuple[str, ...]] = [()] * len(given.results[0])
    for dim, spec in zip(sorted(given.attributes["broadcast_dimensions"]), given.specs[0], strict=True):
        found[dim] = spec
    return tuple(found)


def _reduced(given: Operands) -> Specs:
    return tuple(spec for dim, spec in enumerate(given.specs[0]) if dim not in given.attributes["dimensions"])


_RULES = {
    "select": _select,
    "clamp": lambda given: given.specs[1],
    "transpose": _moved,
    "broadcast_in_dim": _spread_out,
    "reshape": _reshape,
    "concatenate": _concatenate,
    "reverse": lambda given: given.specs[0],
    "dynamic_update_slice": _update,
    "dot_general": _dot_general,
    "reduce": _reduced,
    "gather": _gather,
    "scatter": _scatter,
    "sort": _sort,
}
