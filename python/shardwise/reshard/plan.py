"""The plan from one tiling of a tensor to another: the boxes that move, their cost, and the run in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from .._arguments import integer, refuse_mask
from .._dtypes import dtype_of, itemsize_of
from .._fork import importing
from .._text import shown
from ..errors import LayoutError
from ..partition import Partition
from ..tiling import Tiling
from .collectives import CollectiveObstacle, device_map, obstacle_between, steps_between
from .cost import CollectiveCost, LinkModel
from .kinds import CollectiveStep
from .program import Program, program_of
from .run import run_on_arrays, views_of
from .run_collectives import run_steps
from .source import ShardSource
from .transfers import Transfers

if TYPE_CHECKING:
    from ..show.picture import Picture

__all__ = ["ReshardPlan", "plan_reshard"]


class ReshardPlan(Transfers):
    """The moves from one tiling of a tensor to another; `plan_reshard` makes one.

    Each element of each destination shard is received exactly once, unless its holder already has it: then it stays.
    Devices and other holders are matched by label, whichever meshes they are in. Among the replicas that could send,
    the load is spread: the busiest sends at most `2 - 1/r` times what the best assignment to `r` replicas could
    achieve, and no more than that if all boxes have one size. If the source is unreduced, "once" holds for each addend.

    `senders` names the senders instead, transfer by transfer, by their positions in `src.holders`; `plan_model` uses it
    to balance the load over all tensors.

    A plan is a sequence of `Transfer` objects, made when asked for; `transfers` is all of them as one array. The time
    and memory of planning grow with the number of transfers, however large the tensor. Plans are immutable, comparable,
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

    __slots__ = ("__weakref__",)

    def program(self, holder: Any, side: Literal["src", "dst"] | None = None) -> Program:
        """Return the steps of one holder, in order: its copies, sends and receives, with the boxes in its arrays.

        Args:
            holder: the label of a holder of `src`, of `dst`, or of both.
            side: `"src"` or `"dst"`, needed if each has its own holder of this label: holders without labels of their
                own are numbered in each tiling.

        Raises:
            LayoutError: if there is no such holder, or there are two.

        A program can be run without those of other holders; `Program` says why there is no deadlock.

        >>> from shardwise import DeviceMesh, TensorLayout, plan_reshard
        >>> mesh = DeviceMesh((2,), ("x",))
        >>> rows, columns = TensorLayout(("x", None), mesh), TensorLayout((None, "x"), mesh)
        >>> program = plan_reshard(rows.partition((2, 4)), columns.partition((2, 4))).program("cpu:0")
        >>> for step in program:
        ...     print(step.kind, step.peer, step.tag, step.box)
        copy cpu:0 0 (slice(0, 1, None), slice(0, 2, None))
        receive cpu:1 0 (slice(1, 2, None), slice(0, 2, None))
        send cpu:1 1 (slice(0, 1, None), slice(2, 4, None))
        """
        return program_of(self, holder, side)

    def peak_extra_memory(self, dtype: npt.DTypeLike) -> npt.NDArray[np.int64]:
        """Return the bytes that each destination holder needs on top of what it holds: int64 (destination holders,).

        That is its new array, or nothing if the new array is a part of what it holds, so that a view is enough.

        >>> from shardwise import DeviceMesh, TensorLayout, plan_reshard
        >>> mesh = DeviceMesh((4,), ("x",))
        >>> whole, cut = TensorLayout((None,), mesh), TensorLayout(("x",), mesh)
        >>> plan_reshard(cut.partition((8,)), whole.partition((8,))).peak_extra_memory("int16").tolist()
        [16, 16, 16, 16]
        >>> plan_reshard(whole.partition((8,)), cut.partition((8,))).peak_extra_memory("int16").tolist()
        [0, 0, 0, 0]
        """
        needed = self._dst.nbytes(dtype)
        needed[[device for device, *_ in views_of(self)]] = 0
        return needed

    def rounds(self, max_bytes_in_flight: int, dtype: npt.DTypeLike) -> list[npt.NDArray[np.void]]:
        """Order the transfers in rounds in which no device sends or receives more than a number of bytes.

        Args:
            max_bytes_in_flight: the limit per device, for each of the two directions; a box over the limit is cut.
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
        budget = max(min(integer("max_bytes_in_flight", max_bytes_in_flight), 2**63 - 1), -(2**63))
        pieces, ends = self._core.rounds(budget, itemsize_of(dtype))
        return np.split(self._structured(pieces), ends[:-1]) if len(ends) else []

    @property
    def obstacle(self) -> CollectiveObstacle | None:
        """The reason why collectives cannot do what the plan does; `None` if they can.

        >>> from shardwise import DeviceMesh, TensorLayout, plan_reshard
        >>> mesh = DeviceMesh((4,), ("x",))
        >>> cut, whole = TensorLayout(("x",), mesh), TensorLayout((None,), mesh)
        >>> plan = plan_reshard(cut.partition((6,), uneven="ceil"), whole.partition((6,)))
        >>> plan.obstacle.kind, str(plan.obstacle)
        ('indivisible', 'dim 0 of src has 6 elements, which 4 shards do not divide evenly')
        """
        return obstacle_between(self._src, self._dst)

    def collectives(self, dtype: npt.DTypeLike, links: LinkModel | None = None) -> tuple[CollectiveStep, ...] | None:
        """Return the cheapest sequence of collectives found that does what the plan does.

        Args:
            dtype: the tensor's dtype.
            links: bandwidth and latency of each axis of the source's mesh, and of axes that only the destination's mesh
                has. Without them only the bytes count: fewer are cheaper.

        Returns:
            The steps: empty if nothing has to be done, `None` if collectives cannot express it: `obstacle` says why. If
            one mesh is a view of the other's devices, the steps are along axes and sub-axes of the source's mesh.

        The cheapest has the fewest seconds, then the fewest steps; without `links` the fewest bytes, then the fewest
        steps, and its seconds are those of `LinkModel()`. The search is bounded: it visits a few thousand
        layouts, so the answer is the cheapest of all with up to about five axes, and a good one with more. Ctrl-C
        ends it.

        >>> from shardwise import DeviceMesh, TensorLayout, plan_reshard
        >>> mesh = DeviceMesh((2, 4), ("x", "y"))
        >>> rows, columns = TensorLayout((("x", "y"), None), mesh), TensorLayout((None, ("x", "y")), mesh)
        >>> plan = plan_reshard(rows.partition((64, 64)), columns.partition((64, 64)))
        >>> [(step.kind, step.axes, step.bytes) for step in plan.collectives("float32")]
        [('all-to-all', ('x', 'y'), 1792)]
        """
        found = self._collectives(itemsize_of(dtype), links)
        return None if isinstance(found, CollectiveObstacle) else found

    def cost(self, dtype: npt.DTypeLike, links: LinkModel | None = None) -> CollectiveCost | None:
        """Return the cost of `collectives`: bytes per device, and seconds; `None` if there are no collectives.

        `cost_of` gives the cost of a sequence of your own.

        >>> from shardwise import DeviceMesh, TensorLayout, plan_reshard
        >>> mesh = DeviceMesh((2, 4), ("x", "y"))
        >>> rows, columns = TensorLayout(("y", None), mesh), TensorLayout((None, "y"), mesh)
        >>> plan_reshard(rows.partition((64, 64)), columns.partition((64, 64))).cost("float32").bytes
        3072
        """
        steps = self.collectives(dtype, links)
        return None if steps is None else CollectiveCost(steps)

    def explain(self, dtype: npt.DTypeLike = np.float32, links: LinkModel | None = None) -> str:
        """Return a description of the plan in plain words.

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
        with importing:
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
            src_shards: one array per source holder, in their order, all of one dtype and with any strides; or a
                `ShardedArray` of the tiling `src`.
            out: one writeable array per destination holder to write into; by default new ones.
            progress: called now and then with the bytes copied so far and the bytes in all; an exception that it
                raises ends the run, with the destinations partly written.

        Returns:
            One array per destination holder, in their order: those of `out` if given. Otherwise each is a new array,
            except if it is part of what its holder has: then it is a view of that, and nothing is copied. Elements of a
            new array that no piece covers are 0. Partial sums are added in the order of their coordinates, by
            `numpy.add`.

        Raises:
            LayoutError: if shards are missing or not of the plan's shape and dtype, or if a bounded search finds that
                `out` shares memory with a source or another output.
            ValueError: if an array of `out` is read-only.
            TypeError: if bytes of object arrays would have to be copied, or a shard is not a numpy array.
            MemoryError: if the outputs cannot be allocated; nothing has then been written.

        Boxes are copied as raw bytes, on all cores, with the interpreter lock released.

        >>> import numpy as np
        >>> from shardwise import DeviceMesh, TensorLayout, plan_reshard
        >>> mesh = DeviceMesh((2,), ("x",))
        >>> rows, columns = TensorLayout(("x", None), mesh), TensorLayout((None, "x"), mesh)
        >>> plan = plan_reshard(rows.partition((2, 4)), columns.partition((2, 4)))
        >>> plan.run([np.array([[0, 1, 2, 3]]), np.array([[4, 5, 6, 7]])])[1]
        array([[2, 3],
               [6, 7]])
        """
        if type(src_shards) is not list and isinstance(src_shards, ShardSource):
            self._check_source(src_shards)
        return run_on_arrays(self, src_shards, out, progress)

    def _check_source(self, source: ShardSource) -> None:
        if source.tiling != self._src:
            raise LayoutError(f"src_shards is cut by {shown(source.tiling)}, but the plan is for {shown(self._src)}")

    def run_collectives(self, src_shards: ShardSource, links: LinkModel | None = None) -> list[npt.NDArray[Any]]:
        """Carry out the plan one collective at a time, as the devices of a cluster would, in plain numpy.

        This shows what the steps of `collectives` mean, and is how the tests check them; `run` is faster.

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
        self._check_source(src_shards)
        shards = src_shards.shard_arrays()
        refuse_mask("the source", shards[0])  # As in `run`.
        found = self._collectives(shards[0].dtype.itemsize, links)
        if isinstance(found, CollectiveObstacle):
            raise LayoutError(f"the plan has no collectives: {found}")
        assert isinstance(self._src, Partition)
        assert isinstance(self._dst, Partition)
        arrays = run_steps(self._src, shards, found)
        places = device_map(self._src.device_mesh, self._dst.device_mesh)
        return arrays if places is None else [arrays[place] for place in places.tolist()]

    def _collectives(self, itemsize: int, links: LinkModel | None) -> tuple[CollectiveStep, ...] | CollectiveObstacle:
        return steps_between(self._src, self._dst, itemsize, links)

    def _picture(self) -> Picture:
        return self._picture_of(np.float32)

    def _picture_of(self, dtype: npt.DTypeLike) -> Picture:
        with importing:
            from .drawn import plan_picture

        return plan_picture(self, dtype)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ReshardPlan):
            return NotImplemented
        return self is other or self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[Any, ...]:
        return self._src, self._dst, self._senders

    def __repr__(self) -> str:
        if self._senders is None:
            return f"plan_reshard({self._src!r}, {self._dst!r})"
        return f"ReshardPlan({self._src!r}, {self._dst!r}, {np.frombuffer(self._senders, np.int64).tolist()})"

    def __reduce__(self) -> tuple[Any, ...]:
        if self._senders is None:
            return plan_reshard, (self._src, self._dst)
        return ReshardPlan, (self._src, self._dst, np.frombuffer(self._senders, np.int64))


def plan_reshard(src: Tiling, dst: Tiling) -> ReshardPlan:
    """Plan how to go from one tiling of a tensor to another.

    Args:
        src: the tiling now: a `Partition`, or any other `Tiling`.
        dst: the tiling afterwards, of the same shape; everything else may differ. It need not cover the whole tensor,
            and several holders may get the same elements, as readers do.

    Raises:
        LayoutError: if the shapes differ; if boxes of `src` overlap without being declared replicas, or `src` does not
            hold what `dst` needs: the message names the box; if `dst` is unreduced: a value cannot be cut into partial
            sums.

    If `src` is unreduced, every addend is sent, and `run` adds them where they arrive.

    >>> from shardwise import DeviceMesh, TensorLayout, Tiling
    >>> saved = TensorLayout(("x", "y"), DeviceMesh((64, 64), ("x", "y"))).partition((4096, 4096))
    >>> labels = [f"gpu:{i}" for i in range(4096)]
    >>> wanted = TensorLayout(("x", "y"), DeviceMesh((32, 128), ("x", "y"), labels)).partition((4096, 4096))
    >>> len(plan_reshard(saved, wanted))
    8192
    >>> chunks = Tiling.from_boxes((6,), [[(0, 4)], [(4, 5)]])
    >>> plan_reshard(chunks, Tiling.from_boxes((6,), {"reader": [(2, 5)]})).transfers["src_device"].tolist()
    [0, 1]
    >>> plan_reshard(chunks, TensorLayout(("x",), DeviceMesh((2,), ("x",))).partition((6,)))
    Traceback (most recent call last):
    shardwise.errors.LayoutError: src does not hold [5:6], which holders[1] of dst needs
    """
    return ReshardPlan(src, dst)
