"""Programs: the steps of one holder in a plan, whatever carries them out."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .._arguments import INTEGER, check_fields, check_items, optional
from .._text import shown
from ..errors import LayoutError, MeshError
from ..piece import Slices, check_slices, sides_of
from .run import Runnable, Window, box_view, check_addable, slices_of

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

__all__ = ["LocalBox", "Program", "Step", "program_of"]

_TUPLE = (tuple, type(None))
_KINDS: tuple[Literal["copy"], Literal["send"], Literal["receive"]] = ("copy", "send", "receive")


@dataclass(frozen=True)
class LocalBox:
    """A box in a holder's own array.

    >>> import numpy as np
    >>> LocalBox((slice(0, 2), slice(1, 2)), window=(3, (2, 2))).view(np.arange(10))
    array([[4],
           [6]])
    """

    #: The box in the array; if that is flat, in the part of it that `window` gives.
    box: Slices
    #: Offset and shape of the piece in an array of one dim: the box lies in
    #: `array[offset : offset + prod(shape)].reshape(shape)`. `None` if the array has the tensor's rank.
    window: Window | None = None

    def __post_init__(self) -> None:
        check_slices("box", self.box)
        if not isinstance(self.window, _TUPLE):
            check_fields(self, window=_TUPLE)

    def view(self, array: Array) -> Array:
        """Return the box as a view of the array."""
        return box_view(array, self.window, self.box)

    def __hash__(self) -> int:
        return hash((sides_of(self.box), self.window))


_LOCAL, _FLAG = (LocalBox, type(None)), (bool, np.bool_)


@dataclass(frozen=True)
class Step:
    """One step of a program."""

    #: `"copy"` from the holder's source array to its destination array, `"send"` from its source array to `peer`, or
    #: `"receive"` from `peer` into its destination array.
    kind: Literal["copy", "send", "receive"]
    #: The label of the other holder; for a copy, its own.
    peer: Any
    #: The number of the transfer, the same in `peer`'s receive or send; for a copy, its position in `plan.kept`.
    tag: int
    #: The box in the global tensor.
    box: Slices
    #: The box in the holder's source array; `None` if it receives.
    src: LocalBox | None
    #: The box in the holder's destination array; `None` if it sends.
    dst: LocalBox | None
    #: True if the values are added to what is there: the second and further addends of partial sums.
    adds: bool = False

    def __post_init__(self) -> None:
        check_slices("box", self.box)
        is_right = isinstance(self.kind, str) and isinstance(self.tag, INTEGER) and isinstance(self.adds, _FLAG)
        if not (is_right and isinstance(self.src, _LOCAL) and isinstance(self.dst, _LOCAL)):
            check_fields(self, kind=str, tag=INTEGER, src=_LOCAL, dst=_LOCAL, adds=_FLAG)
        if type(self.peer).__hash__ is None:
            check_fields(self, peer=Hashable)

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents of the box."""
        return tuple(side.stop - side.start for side in self.box)

    def __hash__(self) -> int:
        return hash((self.kind, self.peer, self.tag, sides_of(self.box), self.src, self.dst, self.adds))


@dataclass(frozen=True)
class Program(Sequence[Step]):
    """The steps of one holder in a plan, in order; `ReshardPlan.program` makes one.

    A program is a sequence of `Step`s, and data only: it can be pickled and carried out elsewhere, by threads, MPI
    ranks or tasks. Carrying it out takes the holder's own two arrays, and a way to send and to receive.

    The order is such that there is no deadlock, even if a send waits for its receive: all steps of all holders have one
    order, and each program is its own part of that. Within that order holders take turns: in the n-th turn each sends
    to the n-th after it, so that all of them are busy. A runner may also begin all receives at once, and send in any
    order, as long as values are added (`Step.adds`) in the order of the program.
    """

    #: The holder's label.
    holder: Any
    #: The steps.
    steps: tuple[Step, ...]
    #: The shape of the holder's array before; `None` if it has none.
    src_shape: tuple[int, ...] | None
    #: The shape of its array after; `None` if it has none.
    dst_shape: tuple[int, ...] | None

    def __post_init__(self) -> None:
        check_fields(self, holder=Hashable, steps=tuple, src_shape=_TUPLE, dst_shape=_TUPLE)
        check_items("steps", self.steps, Step)

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, number: Any) -> Any:
        return self.steps[number]

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def run(
        self,
        src: Array | None,
        out: Array | None,
        send: Callable[[Any, int, Array], Any],
        receive: Callable[[Any, int, tuple[int, ...], np.dtype[Any]], Array],
    ) -> Array | None:
        """Carry out the steps one after the other.

        Args:
            src: the array that the holder has, of shape `src_shape`; `None` if it has none.
            out: the array to write into, of shape `dst_shape`; `None` if it has none.
            send: called with peer, tag and values; the values are a view of `src`, so copy what you keep.
            receive: called with peer, tag, shape and dtype; returns the values.

        Returns:
            `out`.

        Raises:
            ValueError: if `src`, `out` or received values have a wrong shape, or `out` has another dtype than `src`.
            TypeError: if numpy cannot add the partial sums, or their sum has another dtype.

        >>> import numpy as np
        >>> from queue import Queue
        >>> from shardwise import DeviceMesh, TensorLayout, plan_reshard
        >>> mesh = DeviceMesh((2,), ("x",))
        >>> rows, columns = TensorLayout(("x", None), mesh), TensorLayout((None, "x"), mesh)
        >>> plan = plan_reshard(rows.partition((2, 2)), columns.partition((2, 2)))
        >>> mail = {0: Queue(), 1: Queue()}  # by tag
        >>> def send(peer, tag, values):
        ...     mail[tag].put(values.copy())
        >>> def receive(peer, tag, shape, dtype):
        ...     return mail[tag].get()
        >>> shards = {"cpu:0": np.array([[1, 2]]), "cpu:1": np.array([[3, 4]])}
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> with ThreadPoolExecutor(2) as pool:
        ...     done = [pool.submit(plan.program(name).run, shard, np.empty((2, 1), int), send, receive)
        ...             for name, shard in shards.items()]
        >>> [future.result().ravel().tolist() for future in done]
        [[1, 3], [2, 4]]
        """
        for name, array, shape in (("src", src, self.src_shape), ("out", out, self.dst_shape)):
            given = None if array is None else array.shape
            if given != shape:
                raise ValueError(f"{name} must be {'None' if shape is None else f'of shape {shape}'}, got {given}")
        if src is not None and out is not None and src.dtype != out.dtype:
            raise ValueError(f"out must be of dtype {src.dtype}, as src is, got {out.dtype}")
        if any(step.adds for step in self.steps) and out is not None:
            check_addable(out.dtype)
        for step in self.steps:
            if step.src is not None:
                assert src is not None
                values = step.src.view(src)
            if step.kind == "send":
                send(step.peer, step.tag, values)
                continue
            assert step.dst is not None
            assert out is not None
            target = step.dst.view(out)
            if step.kind == "receive":
                values = receive(step.peer, step.tag, step.shape, out.dtype)
                if np.shape(values) != step.shape:  # numpy would repeat what is smaller
                    raise ValueError(f"receive must return values of shape {step.shape}, got {np.shape(values)}")
            if step.adds:
                np.add(target, values, out=target)
            else:
                target[...] = values
        return out


def program_of(plan: Runnable, holder: Any, side: str | None) -> Program:
    """Return the program of one holder; see `ReshardPlan.program`."""
    source, target = _numbers_of(plan, holder, side)
    pieces = (plan.core.kept_pieces(), plan.core.pieces())
    places: dict[tuple[int, int], tuple[tuple[int, ...], Window | None]] = {}

    def local(at: int, number: int, piece: int) -> LocalBox:
        if (at, piece) not in places:
            places[at, piece] = plan.core.place(at, number, piece)
        origin, window = places[at, piece]
        return LocalBox(slices_of(start - origin, stop - origin), window)

    steps = []
    for kind, peer, number, addend in plan.core.program(source, target).tolist():
        row = (plan.kept if kind == 0 else plan.transfers)[number]
        start, stop = row["start"], row["stop"]
        src_piece, dst_piece = pieces[kind > 0][number].tolist()
        src = local(0, source, src_piece) if kind != 2 else None
        dst = local(1, target, dst_piece) if kind != 1 else None
        label = plan.dst.holder_label(peer) if kind == 1 else plan.src.holder_label(peer)
        steps.append(Step(_KINDS[kind], label, number, slices_of(start, stop), src, dst, addend > 0))
    src_shape = plan.src.shape_at(source) if source >= 0 else None
    return Program(holder, tuple(steps), src_shape, plan.dst.shape_at(target) if target >= 0 else None)


def _numbers_of(plan: Runnable, holder: Any, side: str | None) -> tuple[int, int]:
    """Return the numbers of a holder in the source and in the destination, each -1 if it is not there."""
    if optional("side", side, str) not in (None, "src", "dst"):
        raise LayoutError(f"side must be 'src', 'dst' or None, got {shown(side)}")
    found = []
    for tiling in (plan.src, plan.dst):
        try:
            found.append(tiling.position_of(holder))
        except (LayoutError, MeshError, TypeError):  # TypeError: not a label, since it has no hash
            found.append(-1)
    # A mesh takes device indices too; a holder with this label comes before the one with this number.
    sides = zip((plan.src, plan.dst), found, strict=True)
    called = [at if at >= 0 and tiling.holder_label(at) == holder else -1 for tiling, at in sides]
    source, target = found = called if max(called) >= 0 else found
    if source >= 0 and target >= 0 and not (plan.src.has_labels and plan.dst.has_labels):
        if side is None:
            raise LayoutError(f"src and dst each have a holder {shown(holder)}; say which one with side")
        return (source, -1) if side == "src" else (-1, target)
    if max(found) < 0 or (side == "src" and source < 0) or (side == "dst" and target < 0):
        raise LayoutError(f"holder {shown(holder)} is not in {side or 'src or dst'} of the plan")
    return source, target
