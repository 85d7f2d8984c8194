"""Einsums on tensors that are cut: the layout of the result, the moves, the work of each device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .._arguments import sizes_of
from .._core import Computation as CoreComputation
from .._core import propagated, settle
from .._drawn import Drawn
from .._dtypes import find_dtype, itemsize_of
from .._fork import importing
from .._text import bytes_text, counted, elements_text, shown
from ..computation.einsum import Einsum
from ..errors import LayoutError
from ..layout import TensorLayout
from ..mesh import DeviceMesh
from .flow import Specs
from .given import GivenAxes, Policy, check_policy, layout_of, layout_text, mesh_of, mesh_text, shape_text, specs_of
from .move import Move, axes_json, move_between
from .why import Reasons

if TYPE_CHECKING:
    from ..show.picture import Picture

__all__ = ["LocalEinsum", "einsum"]


@dataclass(frozen=True)
class LocalEinsum(Drawn):
    """An einsum on tensors that are cut, its result and its moves; `einsum` makes one.

    Mappings are by the operands' names. In a notebook it shows its picture, as `shardwise.draw` does: the tensors
    before and after each move.
    """

    einsum: Einsum
    shapes: dict[str, tuple[int, ...]]
    #: The layout of each operand before its move.
    operands: dict[str, TensorLayout]
    #: The layout of each operand after its move, with which the devices compute.
    local: dict[str, TensorLayout]
    #: The layout of the result before its move: unreduced over the axes that cut what is summed.
    computed: TensorLayout
    #: The layout of the result after its move.
    result: TensorLayout
    #: The moves of operands.
    before: tuple[Move, ...]
    #: The move of the result, if there is one.
    after: tuple[Move, ...]
    dtype: str
    policy: Policy
    #: The axes that cut each letter while the devices compute.
    cuts: dict[str, tuple[str, ...]] = field(repr=False)

    @property
    def result_shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        sizes = self.einsum.sizes(list(self.shapes.values()))
        return tuple(sizes[letter] for letter in self.einsum.result)

    @property
    def moves(self) -> tuple[Move, ...]:
        """The moves of operands, then that of the result."""
        return (*self.before, *self.after)

    @property
    def bytes_received(self) -> int:
        """The bytes that each device receives in all moves."""
        return sum(move.bytes for move in self.moves)

    @property
    def local_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each operand and of `"result"` on a device while it computes."""
        found = {name: _local_shape(layout, self.shapes[name]) for name, layout in self.local.items()}
        return found | {"result": _local_shape(self.computed, self.result_shape)}

    @property
    def flops(self) -> int:
        """The floating-point operations of each device.

        A sum of products has two for each product, products or sums alone have one each, a transpose has none. XLA's
        cost analysis counts a `dot` in the same way.
        """
        sizes = self.einsum.sizes([self.local_shapes[name] for name in self.shapes])
        elements = math.prod(sizes.values())
        if len(self.einsum.operands) > 1:
            return 2 * elements if self.einsum.summed else elements
        return elements if self.einsum.summed else 0

    @property
    def why(self) -> str:
        """The reason of each move in a sentence, or the axes that cut the result if nothing moves."""
        return _why(self)

    def explain(self) -> str:
        """Return the einsum in words: operands, moves, the work of each device, the result, the reasons.

        >>> mesh = DeviceMesh((8, 4), ("dp", "tp"))
        >>> x, w = ("dp", None, "tp"), ("tp", None)
        >>> shapes = [(32, 2048, 14336), (14336, 4096)]
        >>> print(einsum("bsf,fd->bsd", x=x, w=w, mesh=mesh, shapes=shapes, dtype="bfloat16").explain())
        bsf,fd->bsd in bfloat16 on dp=8, tp=4
        x: dp,-,tp, 4 x 2048 x 3584 on each device.
        w: tp,-, 3584 x 4096 on each device.
        Each device computes 4 x 2048 x 4096 with 240,518,168,576 flops.
        result: all-reduce over tp, each device receives 96.0 MiB (100,663,296 bytes).
        result: dp,-,-, 4 x 2048 x 4096 on each device.
        Each device has an addend: f of x is summed, and cut over tp.
        """
        mesh = self._mesh
        lines = [f"{self.einsum} in {self.dtype} on {mesh_text(mesh)}"]
        for name, layout in self.operands.items():
            lines.append(f"{name}: {_held(layout, self.shapes[name])}.")
        lines += [f"{_moved(move)}." for move in self.before]
        shape = shape_text(self.local_shapes["result"], "a scalar")
        lines.append(f"Each device computes {shape} with {self.flops:,} flops.")
        lines += [f"{_moved(move)}." for move in self.after]
        lines.append(f"result: {_held(self.result, self.result_shape)}.")
        if not self.moves:
            lines.append("Nothing moves.")
        lines.append(self.why)
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the layouts, shapes, moves, bytes and flops as values that `json.dumps` takes.

        >>> mesh = DeviceMesh((2,), ("x",))
        >>> einsum("ik,kj->ij", a=("x", None), b=(None, None), mesh=mesh, shapes=[(4, 6), (6, 8)]).to_json()["result"]
        {'axes': [['x'], []], 'unreduced': [], 'shape': [4, 8], 'local_shape': [2, 8]}
        """

        def tensor(layout: TensorLayout, shape: tuple[int, ...]) -> dict[str, Any]:
            return axes_json(layout) | {"shape": list(shape), "local_shape": list(_local_shape(layout, shape))}

        return {
            "einsum": str(self.einsum),
            "mesh": dict(zip(self._mesh.axis_names, self._mesh.shape, strict=True)),
            "dtype": self.dtype,
            "policy": self.policy,
            "operands": {
                name: tensor(layout, self.shapes[name]) | {"computed_with": axes_json(self.local[name])}
                for name, layout in self.operands.items()
            },
            "computed": tensor(self.computed, self.result_shape),
            "result": tensor(self.result, self.result_shape),
            "moves": [move.to_json() for move in self.moves],
            "bytes_received": self.bytes_received,
            "flops": self.flops,
            "why": self.why,
        }

    @property
    def _mesh(self) -> DeviceMesh:
        mesh = self.result.device_mesh
        assert mesh is not None
        return mesh

    def _picture(self) -> Picture:
        with importing:
            from .drawn import op_picture
        operands = [(name, self.shapes[name], layout) for name, layout in self.operands.items()]
        moves = {move.tensor: move for move in self.moves}
        title = f"{self.einsum}: {bytes_text(self.bytes_received)} received by each device"
        return op_picture(title, operands, ("result", self.result_shape, self.result), moves, self.why)

    def __str__(self) -> str:
        return self.explain()

    def __repr__(self) -> str:
        moves = f"{counted(len(self.moves), 'move')}, {self.bytes_received:,} bytes to each device"
        return (
            f"<LocalEinsum {str(self.einsum)!r} on {mesh_text(self._mesh)}: {moves if self.moves else 'nothing moves'}>"
        )


def einsum(
    text: str,
    *,
    shapes: Sequence[Sequence[int]],
    mesh: DeviceMesh | None = None,
    dtype: Any = "float32",
    policy: Policy = "shardy",
    out: TensorLayout | GivenAxes | None = None,
    **operands: TensorLayout | GivenAxes | None,
) -> LocalEinsum:
    """Return the layout of an einsum's result, the moves before and after it, and the work of each device.

    Args:
        text: the einsum, such as `"bsd,df->bsf"`: letters for the dims of one or two operands and of the result.
        shapes: the shape of each operand, in elements.
        mesh: the mesh; may be left out if a layout has one.
        dtype: the dtype of operands and result, by which bytes are counted.
        policy: the choice where layouts disagree: `"shardy"` decides as Shardy's passes do, which JAX uses; `"least"`
            moves the fewest bytes to a device; `"explicit"` refuses, as JAX's explicit mode does.
        out: the layout that the result gets. Over its unreduced axes the devices keep their addends.
        operands: the layout of each operand, in the order of the text, as keywords of names that you choose: a
            `TensorLayout`, or its axes. If it is `None`, the policy takes a layout that fits the other operands.

    Raises:
        LayoutError: if the text is not an einsum, shapes or layouts do not fit it, a dim does not divide, or the policy
            is `"explicit"` and layouts disagree.
        SizeOverflowError: if a tensor has 2**63 elements or more.
        TypeError: if an argument is of another type.

    >>> mesh = DeviceMesh((8, 4), ("dp", "tp"))
    >>> shapes = [(32, 2048, 4096), (4096, 14336)]
    >>> column = einsum("bsd,df->bsf", x=("dp", None, None), w=(None, "tp"), mesh=mesh, shapes=shapes)
    >>> column.result.axes, column.local_shapes["result"], column.bytes_received
    (('dp', None, 'tp'), (4, 2048, 3584), 0)
    >>> fsdp = einsum("bsd,df->bsf", x=("dp", None, None), w=("dp", "tp"), mesh=mesh, shapes=shapes, dtype="bfloat16")
    >>> print(fsdp.before[0])
    w: all-gather over dp, each device receives 24.5 MiB
    """
    parsed = Einsum.parse(text)
    check_policy(policy)
    if dtype is None:
        raise TypeError("dtype must be a dtype, got None")
    if len(operands) != len(parsed.operands):
        raise LayoutError(
            f"{str(parsed)!r} has {counted(len(parsed.operands), 'operand')}, but the layouts of {len(operands)} are "
            "given "
            f"({', '.join(operands) or 'none'}); give each as a keyword, such as x=layout"
        )
    names = list(operands)
    if isinstance(shapes, str) or not hasattr(shapes, "__len__"):
        raise TypeError(f"shapes must be a sequence of shapes, got {shown(shapes)}")
    extents = [sizes_of(f"shapes[{number}]", shape) for number, shape in enumerate(shapes)]
    sizes = parsed.sizes(extents)
    where = mesh_of(mesh, {**operands, "out": out})
    layouts = {
        name: layout_of(name, given, where, len(side), repr(side))
        for (name, given), side in zip(operands.items(), parsed.operands, strict=True)
    }
    goal = layout_of("out", out, where, len(parsed.result), repr(parsed.result), unreduced=True)
    shape = tuple(sizes[letter] for letter in parsed.result)
    itemsize = itemsize_of(dtype)
    tensors = [*layouts.values(), goal]
    for name, layout, extent in zip([*names, "out"], tensors, [*extents, shape], strict=True):
        for dim, (size, count) in enumerate(zip(extent, () if layout is None else layout.num_shards, strict=False)):
            if size % count:
                raise LayoutError(
                    f"{name}: dim {dim} has {elements_text(size)}, which {count} shards do not divide evenly"
                )
        if layout is not None:
            layout.partition(extent)
    specs = [None if layout is None else specs_of(layout) for layout in tensors]
    if policy == "explicit" and goal is None:
        specs[-1] = _explicit(parsed, [*extents, shape], specs[:-1], names, where)
    kept = () if goal is None else goal.unreduced
    found = settle(where.core, parsed.rule._core, [*extents, shape], specs, itemsize, kept, policy)
    if found is None:
        summed = " or ".join(parsed.summed) or "there is none"
        raise LayoutError(f"out is unreduced over {', '.join(kept)}; these axes must cut a summed dim ({summed})")
    settled, (cuts, local, _, _) = found
    cut = dict(zip(parsed.letters, map(tuple, cuts), strict=True))
    *held, result = [own or TensorLayout(given, where) for own, given in zip(tensors, settled, strict=True)]
    needed = [own if other is None else TensorLayout(other, where) for own, other in zip(held, local, strict=False)]
    over = [axis for letter in parsed.summed for axis in cut[letter]]
    computed = TensorLayout(local[-1] or settled[-1], where, unreduced=over)
    moves = list(map(move_between, names, extents, held, needed, [itemsize] * len(names)))
    last = move_between("result", shape, computed, result, itemsize, at_once=policy != "least")
    known = find_dtype(dtype)
    return LocalEinsum(
        parsed,
        dict(zip(names, extents, strict=True)),
        dict(zip(names, held, strict=True)),
        dict(zip(names, needed, strict=True)),
        computed,
        result,
        tuple(move for move in moves if move.steps),
        (last,) if last.steps else (),
        str(dtype) if known is None else known.name,
        policy,
        cut,
    )


def _explicit(
    parsed: Einsum, shapes: Sequence[tuple[int, ...]], specs: Sequence[Specs | None], names: list[str], mesh: DeviceMesh
) -> Specs:
    """Return the layout of the result in JAX's explicit mode.

    Raises:
        LayoutError: if an operand has no layout, or explicit mode gives the result none.
    """
    count, on = len(names), "policy='shardy' or policy='least' to decide it"
    for name, given in zip(names, specs, strict=True):
        if given is None:
            raise LayoutError(f"{name} has no layout, which policy='explicit' needs; give {on}")
    values, rule = list(range(count)), parsed.rule.of(shapes[:-1], shapes[-1:])._core
    op: tuple[Any, ...] = ("dot_general", values, [count], rule, [], 1, None, None)
    computation = CoreComputation(shapes, ["float32"] * len(shapes), count, [op], [count])
    starts = [(given, [False for _ in given or ()], [0 for _ in given or ()]) for given in specs]
    found = propagated(mesh.core, computation, starts, [None], itemsize_of, "explicit")
    if isinstance(found, list):
        axes: Specs | None = found[0].value(found[0].numbers[0][count] or 0)[2]
        return axes or ((),) * len(parsed.result)
    why = found[0]
    for number, name in enumerate(names):
        why = why.replace(f"operands[{number}]", name)
    summed = [axes for letter, axes in zip(parsed.operands[0], specs[0] or (), strict=True) if letter in parsed.summed]
    over = tuple(axis for axes in summed for axis in axes)
    addends = f"out=TensorLayout(axes, mesh, unreduced={over!r})" if "addends" in why else on
    raise LayoutError(f"{why}; give out=, or {addends}")


def _why(found: LocalEinsum) -> str:
    """Return the sentences of `LocalEinsum.why`."""
    parsed, names = found.einsum, [*found.shapes, "result"]
    sides = (*parsed.operands, parsed.result)
    rule = parsed.rule
    reasons = Reasons(rule, list(found.cuts.values()), lambda tensor, dim: f"{sides[tensor][dim]} of {names[tensor]}")
    pairs = {name: (specs_of(found.operands[name]), specs_of(found.local[name])) for name in found.shapes}
    said = [reasons.moved(names.index(move.tensor), *pairs[move.tensor]) for move in found.before]
    if found.computed.unreduced:
        said.append(reasons.summed())
    elif found.after:
        said.append(reasons.moved(len(found.shapes), specs_of(found.computed), specs_of(found.result)))
    cut = [f"{letter} over {'+'.join(axes)}" for letter, axes in found.cuts.items() if axes]
    if not said and cut:
        return f"The operands agree: each device has what it needs, with {' and '.join(cut)} cut in the result as well."
    return " ".join(said) or "Nothing is cut: each device computes the whole result."


def _held(layout: TensorLayout, shape: tuple[int, ...]) -> str:
    partial = f", addends over {', '.join(layout.unreduced)}" if layout.unreduced else ""
    held = shape_text(_local_shape(layout, shape), "a scalar")
    return f"{layout_text(layout)}{partial}, {held} on each device"


def _local_shape(layout: TensorLayout, shape: tuple[int, ...]) -> tuple[int, ...]:
    return layout.partition(shape).largest_shard_shape


def _moved(move: Move) -> str:
    received = (
        f"each device receives {bytes_text(move.bytes)} ({move.bytes:,} bytes)" if move.bytes else "nothing moves"
    )
    return f"{move.tensor}: {move.kinds}, {received}"
