"""Variables of plain Python objects, initialised shard by shard once their layout is known."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .._arguments import optional, refuse_mask, sizes_of
from .._dtypes import dtype_of
from .._text import shown
from .._tree import children, named_leaves
from ..array.sharded import Shard, ShardedArray
from ..errors import LayoutError
from ..layout import TensorLayout
from .hooks import foreign_variables
from .scope import LayoutScope, PlacedVariable, current_scope

__all__ = ["Variable", "initialize_variables"]

Tree = TypeVar("Tree")

#: The buffer of each shard that is local, by shard id; replicas share it.
_DeviceBuffers = dict[int, npt.NDArray[Any]]


class Variable:
    """An array with a shape, a dtype and an initializer, whose data may be made later, and only in part.

    Args:
        shape: the global shape.
        dtype: a numpy dtype, but not object.
        initializer: `initializer(shape, dtype)` gives an array of that shape and dtype. If it has a parameter `index`,
            it is called once per shard, as `initializer(shape, dtype, index=index)`: with the shape of the shard, and
            with the slices of the global array that the shard covers; where a dim is packed, once for each piece, which
            several shards may share. Otherwise it is called once, for the whole.
        name: what the variable is called until its path is known, or if it belongs to no object.

    Raises:
        LayoutError: if a size is negative.
        TypeError: if an argument is of a wrong type.

    Under a `layout_map_scope` the variable is empty until `initialize_variables` finds its path. Outside of any scope
    it is initialised whole, at once, and has no layout.

    >>> import numpy as np
    >>> from shardwise import DeviceMesh, LayoutMap, layout_map_scope
    >>> layout_map = LayoutMap(DeviceMesh((2,), ("x",)))
    >>> layout_map["rows"] = ("x", None)
    >>> def numbered(shape, dtype, index):
    ...     return np.full(shape, index[0].start, dtype)
    >>> with layout_map_scope(layout_map):
    ...     rows = Variable((4, 2), "int32", numbered, name="rows")
    >>> initialize_variables(rows).numpy().tolist()
    [[0, 0], [0, 0], [2, 2], [2, 2]]
    """

    __slots__ = (
        "__weakref__",
        "_buffers",
        "_dtype",
        "_initializer",
        "_name",
        "_placement",
        "_scope",
        "_shape",
        "_whole",
    )

    _buffers: _DeviceBuffers | None
    _placement: PlacedVariable | None
    _whole: npt.NDArray[Any] | None

    def __init__(
        self, shape: Sequence[int], dtype: npt.DTypeLike, initializer: Callable[..., Any], name: str | None = None
    ) -> None:
        self._shape = sizes_of("shape", shape)
        self._dtype = dtype_of(dtype)
        if self._dtype.hasobject:
            raise TypeError(f"dtype must be made of bytes, got {self._dtype}")
        if not callable(initializer):
            raise TypeError(f"initializer must be callable, as initializer(shape, dtype), got {shown(initializer)}")
        optional("name", name, str)
        self._initializer = initializer
        self._name = name
        self._scope = current_scope()
        self._placement = None
        self._buffers = None
        self._whole = None
        if self._scope is None:
            self._whole = self._made(self._label(), self._shape, None)

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype."""
        return self._dtype

    @property
    def name(self) -> str | None:
        """The name that the variable was given."""
        return self._name

    @property
    def path(self) -> str | None:
        """The object path that named the variable; `None` before that, and outside of any scope."""
        return None if self._placement is None else self._placement.path

    @property
    def is_initialized(self) -> bool:
        """True if the variable holds data."""
        return self._whole is not None or self._buffers is not None

    @property
    def layout(self) -> TensorLayout | None:
        """The layout that the path found in the layout map; `None` for a variable made outside of any scope.

        Under a scope of `shardwise.dtensor` it is a `Layout` of that dialect.

        Raises:
            LayoutError: if the path is not known yet.
        """
        layout: TensorLayout | None = None if self._scope is None else self._placed().shown_layout
        return layout

    @property
    def shards(self) -> list[Shard]:
        """The arrays of the local devices, in device-index order; replicas share one buffer.

        Raises:
            LayoutError: if the path is not known yet, or the variable was made outside of any scope.
        """
        placement = self._placed()
        partition, buffers = placement.partition, self._buffers
        assert buffers is not None

        def index(device: Any) -> tuple[Any, ...]:
            if partition.is_packed:
                return tuple(piece.box for piece in partition.pieces(device))
            return partition.box(device)

        return [
            Shard(device, index(device), partition.replica_id(device), buffers[partition.shard_id(device)])
            for device in _local_devices(self._scope, placement)
        ]

    @property
    def value(self) -> ShardedArray | npt.NDArray[Any]:
        """The shards of all devices as one `ShardedArray`; the numpy array itself if there is no layout.

        Raises:
            LayoutError: if the path is not known yet, or a shard is on no local device.
        """
        if self._whole is not None:
            return self._whole
        partition = self._placed().partition
        buffers = self._all_buffers()
        return ShardedArray(partition, [buffers[i] for i in partition.shard_ids().tolist()])

    def numpy(self) -> npt.NDArray[Any]:
        """Return the shards combined into a new array.

        Raises:
            LayoutError: if the path is not known yet, or a shard is on no local device.
        """
        if self._whole is not None:
            return np.array(self._whole)
        partition = self._placed().partition
        array: npt.NDArray[Any] = np.empty(self._shape, self._dtype)
        for shard_id, data in self._all_buffers().items():
            owner = partition.devices_holding(shard_id)[0]
            for piece in partition.pieces(owner):
                array[piece.box] = piece.view(data)
        return array

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("copy=False: the value of a variable is put together in a new array")
        array: npt.NDArray[Any] = np.asarray(self.numpy(), dtype)
        return array

    def __repr__(self) -> str:
        state = "" if self.is_initialized else ", not initialized"
        layout = "" if self._placement is None else f", layout={self._placement.layout.axes}"
        return f"<Variable {self._label()!r} {self._shape} {self._dtype}{layout}{state}>"

    def _label(self) -> str:
        return self.path or self._name or "(unnamed)"

    def _placed(self) -> PlacedVariable:
        if self._scope is None:
            raise LayoutError(
                f"variable {shown(self._label())} was made outside of any layout_map_scope: it has no layout"
            )
        if self._placement is None:
            raise LayoutError(
                f"variable {shown(self._label())} of shape {self._shape} has no path yet: call initialize_variables "
                "with "
                "the object that holds it"
            )
        return self._placement

    def _all_buffers(self) -> _DeviceBuffers:
        partition = self._placed().partition
        buffers = self._buffers
        assert buffers is not None
        if len(buffers) < partition.total_shards:
            raise LayoutError(
                f"variable {shown(self._label())}: {len(buffers)} of its {partition.total_shards} shards are on local "
                "devices; .shards gives those"
            )
        return buffers

    def _filled(self, placement: PlacedVariable) -> _DeviceBuffers:
        """Return the local shards: made box by box if the initializer takes an index, else cut from the whole."""
        partition = placement.partition
        owners = {partition.shard_id(device): device for device in _local_devices(self._scope, placement)}
        if partition.is_packed:
            return self._filled_by_piece(placement, owners)
        if _takes_index(self._initializer):
            return {
                shard_id: self._made(placement.path, partition.shard_shape(device), partition.box(device))
                for shard_id, device in owners.items()
            }
        whole = self._made(placement.path, self._shape, None)
        views = {shard_id: partition.view(whole, device) for shard_id, device in owners.items()}
        if len(views) == partition.total_shards:
            return views
        # Copies, so that the whole can be freed.
        return {shard_id: view.copy() for shard_id, view in views.items()}

    def _filled_by_piece(self, placement: PlacedVariable, owners: dict[int, Any]) -> _DeviceBuffers:
        """Return the local shards of a packed tensor: each combined from its pieces, with zeros as padding."""
        partition = placement.partition
        whole = None if _takes_index(self._initializer) else self._made(placement.path, self._shape, None)
        # What several shards hold has the same values in all of them, however the initializer draws them.
        made: dict[tuple[tuple[int, int], ...], npt.NDArray[Any]] = {}
        buffers: _DeviceBuffers = {}
        for shard_id, device in owners.items():
            buffer: npt.NDArray[Any] = np.zeros(partition.shard_shape(device), self._dtype)
            for piece in partition.pieces(device):
                if whole is not None:
                    piece.view(buffer)[...] = whole[piece.box]
                    continue
                key = tuple((one.start, one.stop) for one in piece.box)
                if key not in made:
                    made[key] = self._made(placement.path, tuple(stop - start for start, stop in key), piece.box)
                piece.view(buffer)[...] = made[key]
            buffers[shard_id] = buffer
        return buffers

    def _made(self, path: str, shape: tuple[int, ...], box: tuple[slice, ...] | None) -> npt.NDArray[Any]:
        part = "" if box is None else f" for the box {_box_text(box)}"
        what = f"variable {path!r}: its initializer{part}"
        try:
            if _takes_index(self._initializer):
                whole = tuple(slice(0, size) for size in self._shape)
                made = self._initializer(shape, self._dtype, index=whole if box is None else box)
            else:
                made = self._initializer(shape, self._dtype)
            refuse_mask("its value", made)
            array = np.asarray(made)
        except Exception as error:
            raise LayoutError(f"{what} raised {type(error).__name__}: {error}") from error
        if array.shape != shape or array.dtype != self._dtype:
            raise LayoutError(
                f"{what} gave shape {shown(array.shape)} and dtype {array.dtype}; it must give shape {shown(shape)} "
                "and dtype "
                f"{self._dtype}"
            )
        return np.require(array, requirements=["W"])


def initialize_variables(tree: Tree) -> Tree:
    """Find the path of each variable in an object tree, give it its layout, and make its data.

    Args:
        tree: any object: attributes (with `__slots__` or without), lists, tuples, dicts and dataclasses are followed,
            however deep, with cycles or without. Paths begin below `tree`. The path of a single variable is its name.

    Returns:
        The tree itself.

    Raises:
        LayoutError: if a layout does not fit its variable, which is found out before any data is made; or if an
            initializer raises or gives something of another shape or dtype. Then no variable of the tree has changed.

    A variable takes the layout map of the scope that it was made in, so this may be called inside the scope or after
    it. Variables that already have data are left as they are. A variable that several paths reach takes the first of
    them: depth first, attributes in the order in which they were assigned.

    >>> import numpy as np
    >>> from shardwise import DeviceMesh, LayoutMap, layout_map_scope
    >>> layout_map = LayoutMap(DeviceMesh((2,), ("x",)))
    >>> layout_map["blocks.1"] = ("x",)
    >>> with layout_map_scope(layout_map):
    ...     model = {"blocks": [Variable((4,), "int8", np.zeros), Variable((4,), "int8", np.ones)]}
    >>> [(variable.path, variable.layout.axes) for variable in initialize_variables(model)["blocks"]]
    [('blocks.0', (None,)), ('blocks.1', ('x',))]
    """
    placements: list[tuple[Any, PlacedVariable]] = []
    paths: dict[LayoutScope, list[str]] = {}
    foreign = foreign_variables()
    notes = tuple(hook.bookkeeping for hook in foreign.values())

    def held(node: Any) -> Iterator[tuple[str, Any]]:
        return ((name, child) for name, child in children(node) if not name.startswith(notes))

    leaves: Iterator[tuple[tuple[str, ...], Any]] = named_leaves(tree, (Variable, *foreign), held if notes else None)
    for names, variable in leaves:
        hook = next((foreign[kind] for kind in foreign if isinstance(variable, kind)), None)
        scope = variable._scope if hook is None else hook.scope_of(variable)
        if scope is None or (hook is None and variable.is_initialized):
            continue
        path = ".".join(names) or variable.name or ""
        placements.append((variable, scope.place(path, tuple(variable.shape))))
        paths.setdefault(scope, []).append(path)
    filled = [
        (variable, placement, variable._filled(placement) if isinstance(variable, Variable) else None)
        for variable, placement in placements
    ]
    for variable, placement, buffers in filled:
        if isinstance(variable, Variable):
            variable._placement, variable._buffers = placement, buffers
        else:
            next(foreign[kind] for kind in foreign if isinstance(variable, kind)).settle(variable, placement)
    for scope, found in paths.items():
        scope.warn_if_nothing_matches(found)
    return tree


def _local_devices(scope: LayoutScope | None, placement: PlacedVariable) -> Sequence[Any]:
    if scope is not None and scope.local_devices is not None:
        return scope.local_devices
    return placement.partition.device_mesh.labels()


def _takes_index(initializer: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(initializer).parameters
    except (TypeError, ValueError):  # some C functions have no signature
        return False
    return "index" in parameters


def _box_text(box: tuple[slice, ...]) -> str:
    return "[" + ", ".join(f"{part.start}:{part.stop}" for part in box) + "]"
