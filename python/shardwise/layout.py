"""Layouts: which mesh axes cut which dims of a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeGuard

from ._arguments import instance
from ._core import Layout as CoreLayout
from ._drawn import Drawn
from ._fork import importing
from ._text import shown
from .errors import LayoutError
from .mesh import DeviceMesh
from .partition import Partition
from .sub_axis import SubAxis, parse_sub_axis

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from .packed import PackedDim

__all__ = ["Axes", "TensorLayout", "UnevenRule"]

#: One dim's spec: `None`, an axis name, a tuple of axis names, major first, or a packed dim.
Spec: TypeAlias = "str | tuple[str, ...] | PackedDim | None"
#: One spec per dim.
Axes = tuple[Spec, ...]
#: The rule by which a dim that does not divide is cut.
UnevenRule = Literal["even", "ceil", "chunk", "balanced", "floor"]


class TensorLayout(Drawn):
    """One spec per tensor dim: the mesh axes that cut it.

    Args:
        axes: for each dim `None` (not cut), an axis name, or a tuple of axis names, of which the first is major:
            `("x", "y")` and `("y", "x")` are different layouts. A name may be that of a sub-axis: `"tp:(1)4"` is the
            factor of size 4 of axis `"tp"` that comes first, `"tp:(4)2"` that of size 2 after it (Shardy's notation). A
            dim of several parts, like fused queries, keys and values, is a packed dim: see `shardwise.packed`.
        device_mesh: the mesh; it can be set later, but only once: assign `layout.device_mesh`, or copy by `with_mesh`.
        unreduced: axes over which the values are partial sums still to be reduced. All other axes that cut nothing
            replicate.

    Raises:
        LayoutError: if an axis is used twice, or the mesh does not have it; if sub-axes overlap, or do not divide their
            axis.
        TypeError: if an entry is neither `None`, nor a name, nor a tuple of names.

    A layout is hashable and picklable; equal layouts have equal axes, unreduced axes and meshes. The names follow
    `keras.distribution.TensorLayout`, tuples and unreduced axes `jax.sharding.PartitionSpec`.

    >>> mesh = DeviceMesh((2, 4), ("data", "model"))
    >>> layout = TensorLayout(("data", None), mesh)
    >>> layout.partition((6, 8)).shard_shape("cpu:0")
    (3, 8)
    >>> TensorLayout((("data", "model"), None), mesh).partition((16, 8)).num_shards
    (8, 1)
    >>> TensorLayout(("model:(1)2",), mesh).partition((8,)).shard_ids().tolist()
    [0, 0, 1, 1, 0, 0, 1, 1]
    """

    __slots__ = ("__weakref__", "_axes", "_core", "_mesh", "_packed", "_unreduced")

    _axes: Axes
    _unreduced: tuple[str, ...]
    _mesh: DeviceMesh | None
    _core: CoreLayout | None
    _packed: bool

    def __init__(
        self,
        axes: Sequence[str | Sequence[str] | PackedDim | None],
        device_mesh: DeviceMesh | None = None,
        *,
        unreduced: Iterable[str] = (),
    ) -> None:
        self._axes = _normalised(axes)
        self._packed = any(map(_is_packed, self._axes))
        self._unreduced = names_in_spec("unreduced", unreduced)
        self._mesh = self._core = None
        _check_used_once(self._axes, self._unreduced)
        if device_mesh is not None:
            self._bind(device_mesh)

    def _bind(self, mesh: DeviceMesh) -> None:
        instance("device_mesh", mesh, DeviceMesh)
        axes: tuple[Any, ...] = self._axes
        if self._packed:
            axes = tuple([part.core() for part in spec.parts] if _is_packed(spec) else spec for spec in axes)
        self._core = CoreLayout(mesh.core, axes, self._unreduced)
        self._mesh = mesh

    @property
    def core(self) -> CoreLayout | None:
        """The compiled object; for the modules of the package only."""
        return self._core

    @property
    def axes(self) -> Axes:
        """One spec per dim; a tuple of one name is written as the name, an empty one as `None`.

        >>> TensorLayout([["x"], (), ("y", "z")]).axes
        ('x', None, ('y', 'z'))
        """
        return self._axes

    @property
    def unreduced(self) -> tuple[str, ...]:
        """The axes over which the values are partial sums."""
        return self._unreduced

    @property
    def is_packed(self) -> bool:
        """True if a dim is packed, so that a device may hold several pieces of the tensor.

        >>> from shardwise import packed
        >>> TensorLayout((packed.gate_up("tp"), None)).is_packed
        True
        """
        return self._packed

    @property
    def rank(self) -> int:
        """The number of tensor dims."""
        return len(self._axes)

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The mesh; `None` until it is given. It can be given once.

        Raises:
            LayoutError: if another mesh is set already, or the mesh lacks an axis.

        >>> layout = TensorLayout(("data",))
        >>> layout.device_mesh = DeviceMesh((2,), ("data",))
        >>> layout.device_mesh = DeviceMesh((4,), ("data",))
        Traceback (most recent call last):
        shardwise.errors.LayoutError: device_mesh is set already, to DeviceMesh((2,), ('data',)); make a new layout
        """
        return self._mesh

    @device_mesh.setter
    def device_mesh(self, mesh: DeviceMesh) -> None:
        if self._mesh is None:
            self._bind(mesh)
        elif self._mesh != instance("device_mesh", mesh, DeviceMesh):
            raise LayoutError(f"device_mesh is set already, to {shown(self._mesh)}; make a new layout")

    def with_mesh(self, mesh: DeviceMesh) -> TensorLayout:
        """Return this layout over a mesh: itself if that is its mesh already, else a new one; this one stays as it is.

        Raises:
            LayoutError: if the layout has another mesh, or `mesh` lacks an axis.

        >>> layout = TensorLayout(("data",))
        >>> layout.with_mesh(DeviceMesh((2,), ("data",))).num_shards, layout.device_mesh
        ((2,), None)
        """
        bound = self
        if self._mesh is None:  # Another with the same axes, which were checked when this one was made.
            bound = TensorLayout.__new__(TensorLayout)
            bound._axes, bound._packed, bound._unreduced = self._axes, self._packed, self._unreduced
            bound._mesh = bound._core = None
        bound.device_mesh = mesh
        return bound

    @property
    def replicated_axes(self) -> tuple[str, ...]:
        """The axes of the mesh that neither cut a dim nor are unreduced; for an axis cut in part, its other sub-axes.

        >>> TensorLayout(("x",), DeviceMesh((2, 3), ("x", "y"))).replicated_axes
        ('y',)
        >>> TensorLayout(("x:(1)2",), DeviceMesh((8,), ("x",))).replicated_axes
        ('x:(2)4',)
        """
        bound = self._require_bound("replicated_axes")
        names, _ = bound.mesh_axes
        return tuple(names[axis] for axis in bound.replicated)

    @property
    def num_shards(self) -> tuple[int, ...]:
        """The number of shards along each dim.

        >>> TensorLayout((("x", "y"), None), DeviceMesh((2, 3), ("x", "y"))).num_shards
        (6, 1)
        """
        return self._require_bound("num_shards").num_shards

    @property
    def is_fully_replicated(self) -> bool:
        """True if every device holds the whole tensor: no axis larger than 1 cuts a dim or is unreduced."""
        mesh = self.require_mesh("is_fully_replicated")
        return all(n == 1 for n in self.num_shards) and all(mesh.axis_size(name) == 1 for name in self._unreduced)

    def refined(self) -> TensorLayout:
        """Return the same layout over a mesh in which the sub-axes that it names are axes of their own.

        The devices stay in their order, so every device holds what it holds in this layout. So it can be used where
        there are no sub-axes, as in JAX and PyTorch.

        Raises:
            LayoutError: if the layout has no mesh.

        >>> layout = TensorLayout((None, "tp:(1)4"), DeviceMesh((2, 8), ("dp", "tp")))
        >>> layout.refined()
        TensorLayout((None, 'tp:(1)4'), DeviceMesh((2, 4, 2), ('dp', 'tp:(1)4', 'tp:(4)2')))
        """
        bound, mesh = self._require_bound("refined"), self.require_mesh("refined")
        names, sizes = bound.mesh_axes
        if names == mesh.axis_names and all(name in names for name in self.named_axes()):
            return self
        if self.is_packed:
            return self._over(mesh.with_axes(sizes, names))
        axes = [[names[axis] for axis in spec] for spec in bound.positions]
        return TensorLayout(axes, mesh.with_axes(sizes, names), unreduced=[names[axis] for axis in bound.unreduced])

    def partition(self, shape: Sequence[int], uneven: UnevenRule = "even") -> Partition:
        """Apply the layout to a tensor of `shape`; costs O(rank) for a mesh of any size.

        Args:
            shape: a size for each dim of the layout; each at least 0, their product at most 2**63 - 1.
            uneven: how a dim that does not divide is cut. `"even"` refuses it (JAX, TensorFlow DTensor), `"ceil"` cuts
                as XLA does, `"chunk"` as PyTorch, `"balanced"` as `numpy.array_split`, `"floor"` as llama.cpp.

        Raises:
            LayoutError: if the shape's rank is not the layout's, a dim is negative, or does not divide under `"even"`;
                if the layout has no mesh.
            SizeOverflowError: if the tensor has more than 2**63 - 1 elements.

        >>> layout = TensorLayout(("x",), DeviceMesh((4,), ("x",)))
        >>> [layout.partition((10,), uneven="ceil").shard_shape(f"cpu:{i}") for i in range(4)]
        [(3,), (3,), (3,), (1,)]
        """
        return Partition(self, shape, uneven)

    def box(self, device: Any, shape: Sequence[int], uneven: UnevenRule = "even") -> tuple[slice, ...]:
        """Return the slices of a tensor of `shape` that `device` holds; see `Partition.box`.

        >>> TensorLayout((None, "x"), DeviceMesh((2,), ("x",))).box("cpu:1", (3, 8))
        (slice(0, 3, None), slice(4, 8, None))
        """
        return self.partition(shape, uneven).box(device)

    def shard_shape(self, device: Any, shape: Sequence[int], uneven: UnevenRule = "even") -> tuple[int, ...]:
        """Return the shape of the shard of a tensor of `shape` that `device` holds; see `Partition.shard_shape`.

        >>> TensorLayout((None, "x"), DeviceMesh((2,), ("x",))).shard_shape("cpu:1", (3, 8))
        (3, 4)
        """
        return self.partition(shape, uneven).shard_shape(device)

    def devices_indices_map(self, shape: Sequence[int], uneven: UnevenRule = "even") -> dict[Any, tuple[slice, ...]]:
        """Return every device's slices of a tensor of `shape`; see `Partition.devices_indices_map`.

        >>> TensorLayout(("x",), DeviceMesh((2,), ("x",))).devices_indices_map((8,))
        {'cpu:0': (slice(0, 4, None),), 'cpu:1': (slice(4, 8, None),)}
        """
        return self.partition(shape, uneven).devices_indices_map()

    def boxes(self, shape: Sequence[int], uneven: UnevenRule = "even") -> npt.NDArray[np.int64]:
        """Return start and stop of every device's box; see `Partition.boxes`."""
        return self.partition(shape, uneven).boxes()

    def named_axes(self) -> list[str]:
        """Return the axes and sub-axes that are named anywhere."""
        return [*(name for spec in self._axes for name in axes_of_spec(spec)), *self._unreduced]

    def _over(self, mesh: DeviceMesh) -> TensorLayout:
        """Return the same layout over a mesh of the same devices, whose axes are factors of this mesh's axes."""
        own = self.require_mesh("a view")
        parts = [(other, parse_sub_axis(other)) for other in mesh.axis_names]

        def factors(name: str) -> list[str]:
            if name in mesh.axis_names:
                return [name]
            wanted = parse_sub_axis(name)
            if wanted is None or wanted.axis not in own.axis_names:
                wanted = SubAxis(name, 1, own.axis_size(name))
            if wanted.axis in mesh.axis_names:
                # An axis that is not factored has only the sub-axes of size 1 and the whole axis.
                return [wanted.axis] if wanted.size > 1 else []
            return [
                other
                for other, part in parts
                if part is not None
                and part.axis == wanted.axis
                and wanted.before <= part.before < wanted.before * wanted.size
            ]

        def mapped(spec: Spec) -> PackedDim | list[str]:
            if _is_packed(spec):
                return spec.mapped({name: tuple(factors(name)) for name in spec.axis_names})
            return [part for name in axes_of_spec(spec) for part in factors(name)]

        axes = [mapped(spec) for spec in self._axes]
        return TensorLayout(axes, mesh, unreduced=[part for name in self._unreduced for part in factors(name)])

    def require_mesh(self, what: str) -> DeviceMesh:
        """Return the mesh of the layout; a layout without one is refused, because `what` needs it."""
        if self._mesh is None:
            raise LayoutError(f"{what} needs a device_mesh, and the layout {shown(self)} has none yet")
        return self._mesh

    def _require_bound(self, what: str) -> CoreLayout:
        self.require_mesh(what)
        assert self._core is not None
        return self._core

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, TensorLayout):
            return NotImplemented
        return self._axes == other._axes and set(self._unreduced) == set(other._unreduced) and self._mesh == other._mesh

    def __hash__(self) -> int:
        # Without the mesh, which may be set later: a hash must not change.
        return hash((self._axes, frozenset(self._unreduced)))

    def __repr__(self) -> str:
        mesh = "" if self._mesh is None else f", {self._mesh!r}"
        unreduced = f", unreduced={self._unreduced!r}" if self._unreduced else ""
        return f"TensorLayout({self._axes}{mesh}{unreduced})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._axes, self._mesh, self._unreduced)


def _rebuild(axes: Axes, mesh: DeviceMesh | None, unreduced: tuple[str, ...]) -> TensorLayout:
    return TensorLayout(axes, mesh, unreduced=unreduced)


def axes_of_spec(spec: Spec) -> tuple[str, ...]:
    if spec is None:
        return ()
    if isinstance(spec, str):
        return (spec,)
    return spec if isinstance(spec, tuple) else spec.axis_names


def _is_packed(spec: Spec) -> TypeGuard[PackedDim]:
    """Return whether a spec of a layout is a packed dim: it is neither a name, nor a tuple of names, nor `None`."""
    return spec is not None and not isinstance(spec, (str, tuple))


def _normalised(axes: Any) -> Axes:
    if isinstance(axes, (str, bytes)) or not isinstance(axes, Sequence):
        raise TypeError(f"axes must be a sequence with one entry per dim, got {shown(axes)}")
    return tuple(_spec(dim, entry) for dim, entry in enumerate(axes))


def _spec(dim: int, entry: Any) -> Spec:
    if entry is None or type(entry) is str:
        return entry
    if isinstance(entry, str):
        return str(entry)
    if isinstance(entry, (tuple, list)) and all(isinstance(name, str) for name in entry):
        names = tuple(str(name) for name in entry)
        return names if len(names) > 1 else names[0] if names else None
    with importing:
        from .packed import PackedDim  # Late, as most layouts have none: `import shardwise` is fast.

    if isinstance(entry, PackedDim):
        return entry
    raise TypeError(
        f"axes[{dim}] must be None, an axis name, a tuple of axis names or a packed dim, got {shown(entry)}"
    )


def names_in_spec(argument: str, names: Any) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(f"{argument} must be a sequence of axis names, got {shown(names)}")
    # No further than they can be valid: an iterable may never end.
    found: dict[str, None] = {}
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{argument} must be a sequence of axis names, got {shown(names)}")
        plain = str(name)
        if plain in found:
            return (*found, plain)
        found[plain] = None
    return tuple(found)


def _check_used_once(axes: Axes, unreduced: tuple[str, ...]) -> None:
    """Check what the core checks too, but before a mesh is known."""
    seen: dict[str, str] = {}
    places = [(f"axes[{dim}]", name) for dim, spec in enumerate(axes) for name in axes_of_spec(spec)]
    for place, name in [*places, *(("unreduced", name) for name in unreduced)]:
        if not name:
            raise LayoutError(f"{place} holds an empty axis name; write None for a dim that is not cut")
        if name in seen:
            raise LayoutError(
                f"{place} uses axis {shown(name)}, which {seen[name]} uses already; a mesh axis cuts at most one "
                "dim, once"
            )
        seen[name] = place
