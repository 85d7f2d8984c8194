"""From one partition to another: what must move, what it costs, and moving it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .._arguments import int64_array
from .._core import ReshardPlan as CorePlan
from .._dtypes import dtype_of, itemsize_of
from ..errors import LayoutError, SizeOverflowError
from ..partition import Partition
from .collectives import CollectiveObstacle, device_map, no_layout, obstacle_between, steps_between
from .cost import CollectiveCost, LinkModel, checked_links
from .kinds import CollectiveStep
from .run import run_plan
from .run_collectives import run_steps
from .source import ShardSource

if TYPE_CHECKING:
    from ..mesh import DeviceMesh

__all__ = ["ReshardPlan", "Transfer", "plan_from_boxes", "plan_reshard"]

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Transfer:
    """One box on its way from one device to another."""

    #: The sender's label; for boxes made by hand, the number of the box.
    src_device: Any
    #: The receiver's label.
    dst_device: Any
    #: The box in the global tensor.
    box: Slices
    #: The same box in the sender's shard.
    src_box: Slices
    #: The same box in the receiver's shard.
    dst_box: Slices
    #: Its elements.
    size: int

    def nbytes(self, dtype: npt.DTypeLike) -> int:
        """Give the bytes of the box for a dtype."""
        return self.size * itemsize_of(dtype)


class ReshardPlan:
    """What must move from one partition of a tensor to another; `plan_reshard` makes one.

    Each element of each destination shard is received exactly once, unless it is on the destination device already:
    then it stays. Devices are matched by label, whichever meshes they are in. Among the replicas that could send, the
    load is spread: the busiest sends at most `2 - 1/r` times what the best assignment to `r` replicas could achieve,
    and boxes of one size are shared out perfectly. If the source is unreduced, "once" holds for each addend.

    A plan is a sequence of `Transfer` objects, made when asked for; `transfers` is all of them as one array. Planning
    costs time and memory in the number of transfers, however large the tensor. Plans are immutable, comparable,
    hashable and picklable.

    >>> from shardwise import DeviceMesh, TensorLayout, plan_reshard
    >>> mesh = DeviceMesh((2,), ("x",))
    >>> rows, columns = TensorLayout(("x", None), mesh), TensorLayout((None, "x"), mesh)
    >>> plan = plan_reshard(rows.partition((4, 6)), columns.partition((4, 6)))
    >>> len(plan), plan.bytes_received("float32").tolist(), plan.bytes_kept("float32").tolist()
    (2, [24, 24], [24, 24])
    >>> plan[0].src_device, plan[0].dst_device, plan[0].box
    ('cpu:1', 'cpu:0', (slice(2, 4, None), slice(0, 3, None)))
    """

    __slots__ = ("__weakref__", "_boxes", "_core", "_dst", "_kept", "_src", "_transfers")

    _core: CorePlan
    _src: Partition | None
    _dst: Partition
    _boxes: npt.NDArray[np.int64] | None
    _transfers: npt.NDArray[np.void] | None
    _kept: npt.NDArray[np.void] | None

    def __init__(self, src: Partition, dst: Partition) -> None:
        _check_partition("src", src)
        _check_partition("dst", dst)
        same = _same_devices(src.device_mesh, dst.device_mesh)
        self._set(CorePlan(src._core, dst._core, same), src, dst, None)

    def _set(self, core: CorePlan, src: Partition | None, dst: Partition, boxes: npt.NDArray[np.int64] | None) -> None:
        self._core, self._src, self._dst, self._boxes = core, src, dst, boxes
        self._transfers = self._kept = None

    @property
    def src(self) -> Partition | None:
        """The partition to start from; `None` for boxes made by hand."""
        return self._src

    @property
    def dst(self) -> Partition:
        """The partition to end with."""
        return self._dst

    @property
    def addends(self) -> int:
        """How many partial sums make one value: 1 unless the source is unreduced."""
        return self._core.addends

    @property
    def transfers(self) -> npt.NDArray[np.void]:
        """All transfers, in the order of the destination devices: a read-only structured array.

        The fields are `src_device` and `dst_device`, device indices in the two meshes (for boxes made by hand,
        `src_device` is the number of the box), and `start` and `stop`, one int64 per dim: the global box.

        >>> from shardwise import DeviceMesh, TensorLayout, plan_reshard
        >>> mesh = DeviceMesh((2,), ("x",))
        >>> whole, cut = TensorLayout((None,), mesh), TensorLayout(("x",), mesh)
        >>> transfers = plan_reshard(cut.partition((8,)), whole.partition((8,))).transfers
        >>> transfers["src_device"].tolist(), transfers["start"].tolist()
        ([1, 0], [[4], [0]])
        """
        if self._transfers is None:
            self._transfers = self._structured(self._core.transfers())
        return self._transfers

    @property
    def kept(self) -> npt.NDArray[np.void]:
        """The boxes that stay on their device, at most one each, with the fields of `transfers`.

        >>> from shardwise import DeviceMesh, TensorLayout, plan_reshard
        >>> mesh = DeviceMesh((2,), ("x",))
        >>> whole, cut = TensorLayout((None,), mesh), TensorLayout(("x",), mesh)
        >>> plan_reshard(whole.partition((8,)), cut.partition((8,))).kept["stop"].tolist()
        [[4], [8]]
        """
        if self._kept is None:
            self._kept = self._structured(self._core.kept())
        return self._kept

    def _structured(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
        rank = len(self._dst.shape)
        side = (np.int64, (rank,))
        dtype = np.dtype([("src_device", np.int64), ("dst_device", np.int64), ("start", *side), ("stop", *side)])
        array: npt.NDArray[np.void] = rows.reshape(-1).view(dtype)
        array.flags.writeable = False
        return array

    def source_boxes(self) -> npt.NDArray[np.int64]:
        """Give each transfer's box in the sender's shard: int64 (transfers, dims, 2), start and stop.

        >>> from shardwise import DeviceMesh, TensorLayout, plan_reshard
        >>> mesh = DeviceMesh((2,), ("x",))
        >>> whole, cut = TensorLayout((None,), mesh), TensorLayout(("x",), mesh)
        >>> plan_reshard(cut.partition((8,)), whole.partition((8,))).source_boxes().tolist()
        [[[0, 4]], [[0, 4]]]
        """
        return _relative(self.transfers, self._source_bounds()[self.transfers["src_device"]])

    def destination_boxes(self) -> npt.NDArray[np.int64]:
        """Give each transfer's box in the receiver's shard: int64 (transfers, dims, 2), start and stop.

        >>> from shardwise import DeviceMesh, TensorLayout, plan_reshard
        >>> mesh = DeviceMesh((2,), ("x",))
        >>> whole, cut = TensorLayout((None,), mesh), TensorLayout(("x",), mesh)
        >>> plan_reshard(cut.partition((8,)), whole.partition((8,))).destination_boxes().tolist()
        [[[4, 8]], [[0, 4]]]
        """
        return _relative(self.transfers, self._dst.boxes()[self.transfers["dst_device"]])

    def _source_bounds(self) -> npt.NDArray[np.int64]:
        """Start and stop of every source's box: (sources, dims, 2)."""
        if self._src is not None:
            return self._src.boxes()
        assert self._boxes is not None
        return self._boxes

    def __len__(self) -> int:
        return self._core.count

    def __getitem__(self, number: int) -> Transfer:
        row = self.transfers[operator.index(number)]
        source, device = int(row["src_device"]), int(row["dst_device"])
        start, stop = row["start"], row["stop"]
        from_start = self._src._core.box(source) if self._src is not None else None
        if from_start is None:
            origin = self._source_bounds()[source, :, 0]
        else:
            origin = np.array([side.start for side in from_start], np.int64)
        target = np.array([side.start for side in self._dst._core.box(device)], np.int64)
        return Transfer(
            source if self._src is None else self._src.device_mesh.device(source),
            self._dst.device_mesh.device(device),
            _slices(start, stop),
            _slices(start - origin, stop - origin),
            _slices(start - target, stop - target),
            int(np.prod(stop - start, dtype=np.int64)),
        )

    def __iter__(self) -> Iterator[Transfer]:
        return (self[number] for number in range(len(self)))

    def bytes_sent(self, dtype: npt.DTypeLike) -> npt.NDArray[np.int64]:
        """Give the bytes that each source device sends of a tensor of `dtype`: int64 (source devices,).

        Raises:
            SizeOverflowError: if all that is sent is over 2**63 - 1 bytes.

        >>> from shardwise import DeviceMesh, TensorLayout, plan_reshard
        >>> mesh = DeviceMesh((4,), ("x",))
        >>> whole, cut = TensorLayout((None,), mesh), TensorLayout(("x",), mesh)
        >>> plan_reshard(cut.partition((8,)), whole.partition((8,))).bytes_sent("int16").tolist()
        [12, 12, 12, 12]
        """
        return _bytes_by(self.transfers, "src_device", len(self._source_bounds()), dtype)

    def bytes_received(self, dtype: npt.DTypeLike) -> npt.NDArray[np.int64]:
        """Give the bytes that each destination device receives: int64 (destination devices,); see `bytes_sent`."""
        return _bytes_by(self.transfers, "dst_device", self._dst.device_mesh.size, dtype)

    def bytes_kept(self, dtype: npt.DTypeLike) -> npt.NDArray[np.int64]:
        """Give the bytes that each destination device has already: int64 (destination devices,); see `bytes_sent`."""
        return _bytes_by(self.kept, "dst_device", self._dst.device_mesh.size, dtype)

    def total_bytes(self, dtype: npt.DTypeLike) -> int:
        """Give the bytes that move in all.

        >>> from shardwise import DeviceMesh, TensorLayout, plan_reshard
        >>> mesh = DeviceMesh((4,), ("x",))
        >>> whole, cut = TensorLayout((None,), mesh), TensorLayout(("x",), mesh)
        >>> plan_reshard(cut.partition((8,)), whole.partition((8,))).total_bytes("int16")
        48
        """
        return _sum(_volumes(self.transfers)) * itemsize_of(dtype)

    def peak_extra_memory(self, dtype: npt.DTypeLike) -> npt.NDArray[np.int64]:
        """Give the bytes that each destination device needs on top of what it holds: int64 (destination devices,).

        That is its new shard, or nothing where the new shard is a part of what it holds, of which a view will do.

        >>> from shardwise import DeviceMesh, TensorLayout, plan_reshard
        >>> mesh = DeviceMesh((4,), ("x",))
        >>> whole, cut = TensorLayout((None,), mesh), TensorLayout(("x",), mesh)
        >>> plan_reshard(cut.partition((8,)), whole.partition((8,))).peak_extra_memory("int16").tolist()
        [16, 16, 16, 16]
        >>> plan_reshard(whole.partition((8,)), cut.partition((8,))).peak_extra_memory("int16").tolist()
        [0, 0, 0, 0]
        """
        needed = self._dst.nbytes(dtype)
        receives = np.zeros(len(needed), np.bool_)
        receives[self.transfers["dst_device"]] = True
        return np.where(receives, needed, 0)

    def rounds(self, max_bytes_in_flight: int, dtype: npt.DTypeLike) -> list[npt.NDArray[np.void]]:
        """Order the transfers in rounds in which no device sends, and none receives, more than so many bytes.

        Args:
            max_bytes_in_flight: the limit per device, for each of the two directions; a box over it is cut.
            dtype: the tensor's dtype.

        Returns:
            For each round its transfers, as arrays like `transfers`. A full exchange among `n` devices whose boxes are
            of the limit's size takes `n - 1` or `n` rounds; no piece could go into an earlier round than its own.

        Raises:
            LayoutError: if not even one element fits.

        >>> from shardwise import DeviceMesh, TensorLayout, plan_reshard
        >>> mesh = DeviceMesh((4,), ("x",))
        >>> whole, cut = TensorLayout((None,), mesh), TensorLayout(("x",), mesh)
        >>> plan = plan_reshard(cut.partition((8,)), whole.partition((8,)))
        >>> [len(part) for part in plan.rounds(max_bytes_in_flight=4, dtype="int16")]
        [4, 4, 4]
        """
        if isinstance(max_bytes_in_flight, bool) or not hasattr(max_bytes_in_flight, "__index__"):
            raise TypeError(f"max_bytes_in_flight must be an integer, got {max_bytes_in_flight!r}")
        budget = max(min(operator.index(max_bytes_in_flight), 2**63 - 1), -(2**63))
        pieces, ends = self._core.rounds(budget, itemsize_of(dtype))
        return np.split(self._structured(pieces), ends[:-1]) if len(ends) else []

    @property
    def obstacle(self) -> CollectiveObstacle | None:
        """Why collectives cannot do what the plan does; `None` if they can.

        >>> from shardwise import DeviceMesh, TensorLayout, plan_reshard
        >>> mesh = DeviceMesh((4,), ("x",))
        >>> cut, whole = TensorLayout(("x",), mesh), TensorLayout((None,), mesh)
        >>> plan = plan_reshard(cut.partition((6,), uneven="ceil"), whole.partition((6,)))
        >>> plan.obstacle.kind, str(plan.obstacle)
        ('indivisible', 'dim 0 of src has 6 elements, which 4 shards do not divide evenly')
        """
        return no_layout if self._src is None else obstacle_between(self._src, self._dst)

    def collectives(self, dtype: npt.DTypeLike, links: LinkModel | None = None) -> tuple[CollectiveStep, ...] | None:
        """Give the cheapest sequence of collectives found that does what the plan does.

        Args:
            dtype: the tensor's dtype.
            links: bandwidth and latency of each axis of the source's mesh, or of the destination's for axes that only
                that has; by default those of `LinkModel()`.

        Returns:
            The steps, none if nothing has to be done; or `None` if collectives cannot express it: `obstacle` says why.
            Where one mesh is another view of the other's devices, the steps are along axes and sub-axes of the
            source's.

        The cheapest is the one of the fewest seconds, then of the fewest steps. The search is bounded: it visits some
        thousands of layouts, so that the answer is the cheapest of all with up to some five axes, and a good one with
        more. Ctrl-C ends it.

        >>> from shardwise import DeviceMesh, TensorLayout, plan_reshard
        >>> mesh = DeviceMesh((2, 4), ("x", "y"))
        >>> rows, columns = TensorLayout((("x", "y"), None), mesh), TensorLayout((None, ("x", "y")), mesh)
        >>> plan = plan_reshard(rows.partition((64, 64)), columns.partition((64, 64)))
        >>> [(step.kind, step.axes, step.bytes) for step in plan.collectives("float32")]
        [('all-to-all', ('x', 'y'), 1792)]
        """
        if self._src is None:
            return None
        steps = steps_between(self._src, self._dst, itemsize_of(dtype), checked_links(links))
        return None if isinstance(steps, CollectiveObstacle) else steps

    def cost(self, dtype: npt.DTypeLike, links: LinkModel | None = None) -> CollectiveCost | None:
        """Give what `collectives` costs: bytes per device, and seconds; `None` if there are none.

        `cost_of` prices a sequence of your own.

        >>> from shardwise import DeviceMesh, TensorLayout, plan_reshard
        >>> mesh = DeviceMesh((2, 4), ("x", "y"))
        >>> rows, columns = TensorLayout(("y", None), mesh), TensorLayout((None, "y"), mesh)
        >>> plan_reshard(rows.partition((64, 64)), columns.partition((64, 64))).cost("float32").bytes
        3072
        """
        steps = self.collectives(dtype, links)
        return None if steps is None else CollectiveCost(steps)

    def explain(self, dtype: npt.DTypeLike = np.float32, links: LinkModel | None = None) -> str:
        """Say in plain words what the plan does.

        >>> from shardwise import DeviceMesh, TensorLayout, plan_reshard
        >>> mesh = DeviceMesh((4,), ("x",))
        >>> rows, columns = TensorLayout(("x", None), mesh), TensorLayout((None, "x"), mesh)
        >>> print(plan_reshard(rows.partition((1024, 1024)), columns.partition((1024, 1024))).explain())
        A float32 tensor of shape (1024, 1024), 4.0 MiB, goes from ('x', None) on 4 devices to (None, 'x') on 4 devices.
        12 boxes move, 3.0 MiB in all; 1.0 MiB stays in place.
        The busiest device sends 768.0 KiB and receives 768.0 KiB; each needs up to 1.0 MiB of new memory.
        As collectives, about 18.7 µs:
        1. all-to-all along x: dim 0 is put together, dim 1 is cut; each device receives 768.0 KiB.
        """
        from .explain import explain

        return explain(self, dtype_of(dtype), links)

    def run(
        self,
        src_shards: Sequence[npt.NDArray[Any]] | ShardSource,
        out: Sequence[npt.NDArray[Any]] | None = None,
        progress: Callable[[int, int], Any] | None = None,
    ) -> list[npt.NDArray[Any]]:
        """Carry out the plan on numpy arrays in the memory of this process.

        Args:
            src_shards: one array per source device, in device-index order, all of one dtype and with any strides; or
                a `ShardedArray` of the partition `src`. For boxes made by hand, one array per box.
            out: one writeable array per destination device to write into; by default new ones.
            progress: called now and then with the bytes copied so far and the bytes in all; an exception that it
                raises ends the run, with the destinations partly written.

        Returns:
            One array per destination device, in device-index order: those of `out` if given. Otherwise each is an array
            of its own, except where the new shard is part of what its device holds: then it is a view of that, and
            nothing is copied. Partial sums are added in the order of their coordinates, by `numpy.add`.

        Raises:
            LayoutError: if shards are missing, of another shape or dtype than the plan's, or if memory of `out` is also
                memory of a source or of another output, as far as a bounded search can tell.
            ValueError: if an array of `out` is read-only.
            TypeError: if bytes of object arrays would have to be copied, or a shard is no numpy array.
            MemoryError: if the outputs cannot be allocated; nothing has been written then.

        Boxes are copied as raw bytes, on all cores, with the interpreter released.

        >>> import numpy as np
        >>> from shardwise import DeviceMesh, TensorLayout, plan_reshard
        >>> mesh = DeviceMesh((2,), ("x",))
        >>> rows, columns = TensorLayout(("x", None), mesh), TensorLayout((None, "x"), mesh)
        >>> plan = plan_reshard(rows.partition((2, 4)), columns.partition((2, 4)))
        >>> plan.run([np.array([[0, 1, 2, 3]]), np.array([[4, 5, 6, 7]])])[1]
        array([[2, 3],
               [6, 7]])
        """
        if isinstance(src_shards, ShardSource):
            src_shards = self._data_of(src_shards)
        return run_plan(self, src_shards, out, progress)

    def _data_of(self, source: ShardSource) -> list[npt.NDArray[Any]]:
        if source.partition != self._src:
            raise LayoutError(f"src_shards is cut by {source.partition!r}, but the plan is for {self._src!r}")
        return source._data()

    def run_collectives(self, src_shards: ShardSource, links: LinkModel | None = None) -> list[npt.NDArray[Any]]:
        """Do what the plan does one collective at a time, as the devices of a cluster would, in plain numpy.

        It shows what the steps of `collectives` mean, and is how they are tested; `run` is faster.

        Returns:
            One array per destination device, in device-index order.

        Raises:
            LayoutError: if the plan cannot be expressed in collectives, or the shards are not of the partition `src`.

        >>> import numpy as np
        >>> from shardwise import DeviceMesh, TensorLayout, distribute_tensor, plan_reshard
        >>> mesh = DeviceMesh((2,), ("x",))
        >>> sharded = distribute_tensor(np.arange(4), TensorLayout(("x",), mesh))
        >>> plan = plan_reshard(sharded.partition, TensorLayout((None,), mesh).partition((4,)))
        >>> plan.run_collectives(sharded)[1]
        array([0, 1, 2, 3])
        """
        if not isinstance(src_shards, ShardSource):
            raise TypeError(f"src_shards must be a ShardedArray, got {type(src_shards).__name__}")
        shards = self._data_of(src_shards)
        assert self._src is not None
        steps = steps_between(self._src, self._dst, shards[0].dtype.itemsize, checked_links(links))
        if isinstance(steps, CollectiveObstacle):
            raise LayoutError(f"the plan has no collectives: {steps}")
        arrays = run_steps(self._src, shards, steps)
        places = device_map(self._src.device_mesh, self._dst.device_mesh)
        return arrays if places is None else [arrays[place] for place in places.tolist()]

    def _identity(self) -> tuple[Any, ...]:
        boxes = None if self._boxes is None else (self._boxes.shape, self._boxes.tobytes())
        return self._src, self._dst, boxes

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ReshardPlan):
            return NotImplemented
        return self is other or self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        if self._src is None:
            return f"plan_from_boxes({self._source_bounds().tolist()}, {self._dst!r})"
        return f"plan_reshard({self._src!r}, {self._dst!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        if self._src is None:
            return plan_from_boxes, (self._boxes, self._dst)
        return plan_reshard, (self._src, self._dst)


def plan_reshard(src: Partition, dst: Partition) -> ReshardPlan:
    """Plan how to go from one partition of a tensor to another.

    Args:
        src: who holds what now.
        dst: who is to hold what; of the same shape. Mesh, device labels, axes and uneven rule may all differ.

    Raises:
        LayoutError: if the shapes differ, or `dst` is unreduced: a value cannot be cut into partial sums.

    If `src` is unreduced, every addend is sent, and `run` adds them where they arrive.

    >>> from shardwise import DeviceMesh, TensorLayout
    >>> saved = TensorLayout(("x", "y"), DeviceMesh((64, 64), ("x", "y"))).partition((4096, 4096))
    >>> labels = [f"gpu:{i}" for i in range(4096)]
    >>> wanted = TensorLayout(("x", "y"), DeviceMesh((32, 128), ("x", "y"), labels)).partition((4096, 4096))
    >>> len(plan_reshard(saved, wanted))
    8192
    """
    return ReshardPlan(src, dst)


def plan_from_boxes(boxes: npt.ArrayLike, dst: Partition) -> ReshardPlan:
    """Plan how to assemble the shards of a partition from boxes made by hand, such as the chunks of a checkpoint.

    Args:
        boxes: int64 (boxes, dims, 2): start and stop per dim, in elements. Together they must be the whole tensor, each
            element once; empty boxes are allowed.
        dst: who is to hold what.

    Returns:
        A plan whose `src_device` is the number of the box; nothing counts as kept.

    Raises:
        LayoutError: if a box leaves the tensor, two overlap, or some elements are in none; names the box.

    >>> from shardwise import DeviceMesh, TensorLayout
    >>> dst = TensorLayout(("x",), DeviceMesh((2,), ("x",))).partition((6,))
    >>> plan_from_boxes([[[0, 4]], [[4, 6]]], dst).transfers["src_device"].tolist()
    [0, 0, 1]
    >>> plan_from_boxes([[[0, 4]], [[5, 6]]], dst)
    Traceback (most recent call last):
    shardwise.errors.LayoutError: the boxes leave a gap: none holds [4:5]
    """
    _check_partition("dst", dst)
    array = int64_array("boxes", boxes).copy()
    rank = len(dst.shape)
    if array.ndim in (1, 2) and array.size == len(array) * rank == 0:
        array = array.reshape(len(array), rank, 2)  # lists that hold no number: no boxes, or those of a scalar
    if array.ndim != 3 or array.shape[1:] != (rank, 2):
        raise LayoutError(f"boxes is of shape {array.shape}; it must be (boxes, {rank}, 2)")
    if rank == 0 and len(array) != 1:
        raise LayoutError(f"boxes has {len(array)} boxes, but a tensor of rank 0 is one element, which one box holds")
    array.flags.writeable = False
    plan = ReshardPlan.__new__(ReshardPlan)
    plan._set(CorePlan.from_boxes(array, dst._core), None, dst, array)
    return plan


def _check_partition(name: str, value: Any) -> None:
    if not isinstance(value, Partition):
        raise TypeError(f"{name} must be a Partition, got {type(value).__name__}; layout.partition(shape) makes one")


@lru_cache(maxsize=16)  # the tensors of a checkpoint share their meshes
def _same_devices(src: DeviceMesh, dst: DeviceMesh) -> npt.NDArray[np.int64]:
    """For each device of `dst`, the device index that its label has in `src`, or -1."""
    if (src._labels is None and dst._labels is None) or src._labels is dst._labels:
        try:
            same = np.arange(dst.size, dtype=np.int64)
        except ValueError:  # numpy's word for a size that no address space holds
            raise SizeOverflowError(f"a plan for a mesh of {dst.size} devices is over the address space") from None
        same[src.size :] = -1
        same.flags.writeable = False
        return same
    index = {label: i for i, label in enumerate(src._all_labels())}
    same = np.array([index.get(label, -1) for label in dst._all_labels()], np.int64)
    same.flags.writeable = False
    return same


def _relative(transfers: npt.NDArray[np.void], bounds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.stack([transfers["start"], transfers["stop"]], axis=-1) - bounds[..., :1]


def _slices(start: npt.NDArray[np.int64], stop: npt.NDArray[np.int64]) -> Slices:
    return tuple(slice(a, b) for a, b in zip(start.tolist(), stop.tolist(), strict=True))


def _volumes(transfers: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    volumes: npt.NDArray[np.int64] = (transfers["stop"] - transfers["start"]).prod(axis=-1, dtype=np.int64)
    return volumes


def _sum(numbers: npt.NDArray[np.int64]) -> int:
    """The exact sum, which may be over 64 bits."""
    return (int((numbers >> 32).sum()) << 32) + int((numbers & 0xFFFFFFFF).sum())


def _bytes_by(transfers: npt.NDArray[np.void], field: str, devices: int, dtype: npt.DTypeLike) -> npt.NDArray[np.int64]:
    volumes, itemsize = _volumes(transfers), itemsize_of(dtype)
    if _sum(volumes) * itemsize > 2**63 - 1:
        raise SizeOverflowError(f"{_sum(volumes)} elements of {itemsize} bytes are over the limit of {2**63 - 1} bytes")
    totals = np.zeros(devices, np.int64)
    np.add.at(totals, transfers[field], volumes)
    return totals * itemsize
