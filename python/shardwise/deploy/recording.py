"""Recordings: the elements of tensors that a process's own loader put into its parameters, and their places there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .._text import counted, elements_text, shown
from .._types import Numbers
from ..errors import LayoutError
from ..piece import Slices
from .manifest import Manifest
from .parameters import LocalParameter

__all__ = ["RecordedParameter", "RecordedPiece", "Recording"]


class RecordedPiece(NamedTuple):
    """A box of a tensor, and where its elements are in a flat parameter.

    Attributes:
        tensor: The name of the tensor.
        box: Start, stop and step per dim: with a step of 2 every second element.
        start: The flat position of the first element in the parameter.
        strides: For each dim of the tensor the distance in the parameter from one element to the next.
        times: The number of copies of the box.
        apart: The distance from one copy to the next.
    """

    tensor: str
    box: Slices
    start: int
    strides: tuple[int, ...]
    times: int = 1
    apart: int = 0

    @property
    def counts(self) -> tuple[int, ...]:
        """The elements along each dim."""
        return tuple(len(range(side.start, side.stop, side.step)) for side in self.box)

    def positions(self) -> Numbers:
        """Return the flat position of each element in the parameter, in the shape of the box, for the first copy."""
        return _grid(self.start, self.counts, self.strides)

    def offsets(self, shape: Sequence[int]) -> Numbers:
        """Return the flat position of each element in a tensor of this shape, in the shape of the box."""
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        first = sum(side.start * stride for side, stride in zip(self.box, strides, strict=True))
        steps = [side.step * stride for side, stride in zip(self.box, strides, strict=True)]
        return _grid(first, self.counts, steps)


@dataclass(frozen=True)
class RecordedParameter:
    """One parameter of a process, as its loader filled it.

    Attributes:
        dtype: The name of the tensor's dtype.
        pieces: The pieces of the parameter, in the order of their first elements.
        padding: The number of elements that belong to no tensor: they stay the same when the tensors change.
        values: The first few of their values, in ascending order; padding of zeros has 0.0 only.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[RecordedPiece, ...]
    padding: int = 0
    values: tuple[float, ...] = ()

    @property
    def size(self) -> int:
        """The number of elements of the parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False, repr=False)
class Recording:
    """The layout of a process's parameters; `record` makes it.

    Attributes:
        holder: The label of the process.
        tensors: Shape and dtype of each tensor.
        parameters: The parameters by name.
        manifest: The boxes of each tensor that the process holds, under its label: what `plan_model` moves there.
            `join_manifests` makes one manifest of those of all processes.
        computed: The parameters that were left to the loader, each with the number of elements that it computes.
        missing: Names that the loader asked for and that no tensor has.
        unread: Tensors that the loader never took.
        unused: Tensors that the loader took but put into no parameter.
    """

    holder: Any
    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    parameters: Mapping[str, RecordedParameter]
    manifest: Manifest
    computed: Mapping[str, int] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    def __repr__(self) -> str:
        pieces = counted(sum(len(one.pieces) for one in self.parameters.values()), "piece")
        return f"<Recording of {shown(self.holder)}: {counted(len(self.parameters), 'parameter')} of {pieces}>"

    def pieces_of(self, tensor: str) -> list[tuple[str, RecordedPiece]]:
        """Return the pieces of a tensor, each with the name of its parameter.

        Raises:
            LayoutError: if there is no such tensor.
        """
        self._shape(tensor)
        return [(one.name, piece) for one in self.parameters.values() for piece in one.pieces if piece.tensor == tensor]

    def element_numbers(self, parameter: str) -> Numbers:
        """Return the number of the element at each place of a parameter, in its shape; 0 for padding.

        The elements of all tensors are numbered from 1 on, in the order of `tensors`, each in C order.

        Raises:
            LayoutError: if there is no such parameter.

        >>> import shardwise as sw
        >>> shapes = {"a": ((2,), "float32"), "b": ((2, 2), "float32")}
        >>> found = sw.record(shapes, lambda tensors: {"p": np.pad(tensors["b"].T, ((0, 0), (0, 1)))})
        >>> found.element_numbers("p").tolist()
        [[3, 5, 0], [4, 6, 0]]
        """
        if parameter not in self.parameters:
            raise LayoutError(f"there is no parameter {shown(parameter)} in the recording of {shown(self.holder)}")
        one = self.parameters[parameter]
        return (self._numbers(one, self._starts()) + 1).reshape(one.shape)

    def views(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return an array for the process's own part of each tensor, to receive into it; then call `fill`.

        Args:
            parameters: the memory of each parameter by name: contiguous numpy arrays, or tensors of PyTorch.

        Raises:
            LayoutError: if a parameter is missing, or of another shape.

        It is a view of the parameter's memory if the part is one piece there, also a transposed or interleaved one.
        Otherwise it is a new array, from which `fill` copies.
        """
        self._check(parameters)
        found = {}
        for tensor, tiling in self.manifest.items():
            (shape,) = tiling.holder_shapes()
            name, piece = self.pieces_of(tensor)[0]
            array = parameters[name]
            if self._is_view(tensor, piece, shape):
                found[tensor] = _strided(array, piece.start, piece.counts, piece.strides)
            else:
                found[tensor] = (
                    np.empty(shape, array.dtype) if isinstance(array, np.ndarray) else array.new_empty(shape)
                )
        return found

    def fill(self, parameters: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Copy received arrays to all their places in the parameters, except where they are views of the parameters.

        Args:
            parameters: as for `views`.
            arrays: the process's own part of each tensor, as in `manifest`: the arrays from `views`, or others.

        Raises:
            LayoutError: if a parameter or an array is missing, or of another shape.

        Padding is not written.

        >>> import shardwise as sw
        >>> def load(tensors):
        ...     return {"qk": np.concatenate([tensors["q"][:2].T, tensors["k"][:2].T])}
        >>> found = sw.record({"q": ((4, 3), "float32"), "k": ((4, 3), "float32")}, load)
        >>> memory = {"qk": np.zeros((6, 2), np.float32)}
        >>> arrays = found.views(memory)
        >>> arrays["k"][:] = 7  # as a plan would
        >>> found.fill(memory, arrays)
        >>> memory["qk"].tolist()
        [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [7.0, 7.0], [7.0, 7.0], [7.0, 7.0]]
        """
        self._check(parameters)
        for tensor, tiling in self.manifest.items():
            if tensor not in arrays:
                raise LayoutError(f"arrays has no {shown(tensor)}, which {shown(self.holder)} holds a part of")
            (shape,) = tiling.holder_shapes()
            if tuple(arrays[tensor].shape) != shape:
                raise LayoutError(
                    f"arrays[{shown(tensor)}] is of shape {tuple(arrays[tensor].shape)}; the part is of {shape}"
                )
            held = tiling.pieces(tiling.holders[0])
            for number, (name, piece) in enumerate(self.pieces_of(tensor)):
                is_there = number == 0 and self._is_view(tensor, piece, shape)
                for time in range(piece.times):
                    if is_there and time == 0:
                        into = _strided(parameters[name], piece.start, piece.counts, piece.strides)
                        if _is_same_memory(into, arrays[tensor]):
                            continue
                    first = piece.start + time * piece.apart
                    for one in held:
                        _copy_part(piece, first, one.box, one.view(arrays[tensor]), parameters[name])

    def differences(self, parameters: Iterable[RecordedParameter | LocalParameter] | Recording) -> dict[str, str]:
        """Compare with what rules say of the process, or with another recording: all elements of all parameters.

        Args:
            parameters: what `Deployment.parameters_of` gives for the device; or another recording of the same tensors.

        Returns:
            For each parameter that differs, what differs; empty if nothing does.

        >>> import shardwise as sw
        >>> from shardwise.deploy import Deployment
        >>> rules = Deployment(2, sw.DeviceMesh((2,), ("tp",)), {"q|k": ("tp", None)})
        >>> tensors = {name: ((4, 3), "float32") for name in ("q", "k")}
        >>> found = sw.record(tensors, lambda given: {"q": given["q"][2:], "k": given["k"][:2]})
        >>> print(found.differences(rules.parameters_of("cpu:1", tensors)))
        {'k': '6 of 6 elements differ: [0, 0] is k[0, 0], not k[2, 0]'}
        """
        if isinstance(parameters, Recording):
            parameters = parameters.parameters.values()
        others = {one.name: one for one in parameters}
        names, starts, said = list(self.tensors), self._starts(), {}
        for name in [*self.parameters, *(name for name in others if name not in self.parameters)]:
            if name in self.computed:
                continue
            own, other = self.parameters.get(name), others.get(name)
            if own is None or other is None:
                said[name] = (
                    "it was not recorded" if own is None else "it was recorded, but the other side does not have it"
                )
            elif own.shape != other.shape:
                said[name] = f"it is of shape {own.shape}, not {other.shape}"
            else:
                here, there = self._numbers(own, starts), self._numbers(other, starts)
                wrong = np.flatnonzero(here != there)
                if len(wrong):
                    place = [int(at) for at in np.unravel_index(wrong[0], own.shape)]
                    texts = [self._element(int(one[wrong[0]]), names, starts) for one in (here, there)]
                    said[name] = (
                        f"{len(wrong)} of {elements_text(own.size)} differ: {place} is {texts[0]}, not {texts[1]}"
                    )
        return said

    def _starts(self) -> dict[str, int]:
        starts, total = {}, 0
        for name, (shape, _) in self.tensors.items():
            starts[name] = total
            total += math.prod(shape)
        return starts

    def _numbers(self, one: RecordedParameter | LocalParameter, starts: Mapping[str, int]) -> Numbers:
        """Return the number of the element at each position of a parameter, over all tensors; -1 for padding."""
        found = np.full(math.prod(one.shape), -1, np.int64)
        if isinstance(one, RecordedParameter):
            for piece in one.pieces:
                at, offsets = piece.positions(), piece.offsets(self._shape(piece.tensor)) + starts[piece.tensor]
                for time in range(piece.times):
                    found[(at + time * piece.apart).reshape(-1)] = offsets.reshape(-1)
            return found
        shaped = found.reshape(one.shape)
        for tensor, box, start in ((each.tensor, each.box, each.start) for each in one.pieces):
            shape = self._shape(tensor)
            offsets = np.arange(math.prod(shape)).reshape(shape)[box] + starts[tensor]
            extents = (*(1,) * (len(start) - offsets.ndim), *offsets.shape)
            sides = tuple(slice(at, at + extent) for at, extent in zip(start, extents, strict=True))
            shaped[sides] = offsets.reshape(extents)
        return found

    def _element(self, number: int, names: Sequence[str], starts: Mapping[str, int]) -> str:
        if number < 0:
            return "padding"
        name = next(name for name in reversed(names) if starts[name] <= number)
        index = np.unravel_index(number - starts[name], self._shape(name)) if self._shape(name) else ()
        return f"{name}{[int(at) for at in index]}"

    def _shape(self, tensor: str) -> tuple[int, ...]:
        if tensor not in self.tensors:
            raise LayoutError(f"there is no tensor {shown(tensor)} in the recording of {shown(self.holder)}")
        return self.tensors[tensor][0]

    def _check(self, parameters: Mapping[str, Any]) -> None:
        for name, one in self.parameters.items():
            if not one.pieces:
                continue
            if name not in parameters:
                raise LayoutError(f"parameters has no {shown(name)}, which {shown(self.holder)} has")
            if tuple(parameters[name].shape) != one.shape:
                given = tuple(parameters[name].shape)
                raise LayoutError(f"parameters[{shown(name)}] is of shape {given}; the recorded one is of {one.shape}")
            is_plain = getattr(parameters[name], "is_contiguous", None)
            if not (is_plain() if is_plain else parameters[name].flags.c_contiguous):
                raise LayoutError(f"parameters[{shown(name)}] must be contiguous")

    def _is_view(self, tensor: str, piece: RecordedPiece, shape: tuple[int, ...]) -> bool:
        """True if a view can read the piece: it is all of the process, its dims are in order, no stride is negative."""
        sides = self.manifest[tensor].pieces(self.holder)
        is_whole = len(sides) == 1 and [(side.start, side.stop) for side in sides[0].box] == [
            (side.start, side.stop) for side in piece.box
        ]
        return is_whole and piece.counts == shape and min(piece.strides, default=0) >= 0


def _strided(array: Any, start: int, counts: Sequence[int], strides: Sequence[int]) -> Any:
    """Return a view of a contiguous array with these strides, which are not negative."""
    if isinstance(array, np.ndarray):
        flat = array.reshape(-1)[start:]
        steps = [stride * array.itemsize for stride in strides]
        return np.lib.stride_tricks.as_strided(flat, tuple(counts), steps)
    return array.as_strided(tuple(counts), tuple(strides), start + array.storage_offset())


def _is_same_memory(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.__array_interface__["data"] == other.__array_interface__["data"] and one.strides == other.strides
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return False
    return bool(one.data_ptr() == other.data_ptr() and one.stride() == other.stride())


def _copy_part(piece: RecordedPiece, first: int, box: Slices, array: Any, parameter: Any) -> None:
    """Copy the elements of a piece that are in a box, whose array this is, to their places in a parameter."""
    taken, counts, strides, flipped = [], [], [], []
    for dim, (side, own, stride) in enumerate(zip(piece.box, box, piece.strides, strict=True)):
        low = max(0, -(-(own.start - side.start) // side.step))
        high = min(len(range(side.start, side.stop, side.step)), -(-(own.stop - side.start) // side.step))
        if low >= high:
            return
        begin = side.start + low * side.step - own.start
        taken.append(slice(begin, begin + (high - low - 1) * side.step + 1, side.step))
        first += stride * (low if stride >= 0 else high - 1)
        counts.append(high - low)
        strides.append(abs(stride))
        flipped += [dim] if stride < 0 else []
    key: tuple[Any, ...] = (*taken, ...)
    source = array[key]
    if flipped:
        source = np.flip(source, tuple(flipped)) if isinstance(source, np.ndarray) else source.flip(flipped)
    _strided(parameter, first, counts, strides)[...] = source


def _grid(first: int, counts: Sequence[int], strides: Sequence[int]) -> Numbers:
    found = np.full(tuple(counts), first, np.int64)
    for dim, (count, stride) in enumerate(zip(counts, strides, strict=True)):
        found += (np.arange(count) * stride).reshape([-1 if at == dim else 1 for at in range(len(counts))])
    return found
