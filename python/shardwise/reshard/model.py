"""The plans of all tensors of a model, with the load balanced over all of them."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .._core import balance_model
from .._drawn import Drawn
from .._dtypes import bits_of, bytes_for, dtype_of
from .._fork import importing
from .._text import shown
from ..errors import LayoutError
from ..layout import TensorLayout, UnevenRule
from ..partition import Partition
from ..tiling import Tiling
from .descriptors import Descriptors, Group, descriptors_of
from .model_program import ModelProgram, program_of
from .orders import check_packed
from .plan import ReshardPlan
from .same import same_holders
from .source import ShardSource

if TYPE_CHECKING:
    import numpy.typing as npt

    from ..show.picture import Picture

__all__ = ["ModelPlan", "plan_model"]


class ModelPlan(Drawn, Mapping[str, ReshardPlan]):
    """The moves of all tensors of a model; `plan_model` makes one.

    It is a mapping from the names of the tensors to their plans, which differ from those of `plan_reshard` in who
    sends: of the replicas of a box, the one that has sent the fewest bytes over all tensors. A plan is made when it is
    asked for. Totals are by the labels of the holders, in bytes of the tensors' own dtypes.

    >>> from shardwise import DeviceMesh, TensorLayout
    >>> old, new = DeviceMesh((4,), ("x",)), DeviceMesh((2,), ("x",), ["gpu:0", "gpu:1"])
    >>> norms = {f"norm.{i}": ((8,), "float32") for i in range(80)}
    >>> here, there = ({name: TensorLayout((None,), mesh) for name in norms} for mesh in (old, new))
    >>> plan = plan_model(here, there, norms)
    >>> plan.bytes_sent()
    {'cpu:0': 1280, 'cpu:1': 1280, 'cpu:2': 1280, 'cpu:3': 1280, 'gpu:0': 0, 'gpu:1': 0}
    >>> len(plan), plan.total_bytes(), len(plan["norm.79"])
    (80, 5120, 2)
    """

    __slots__ = (
        "__weakref__",
        "_bits",
        "_ends",
        "_groups",
        "_kept",
        "_labels",
        "_made",
        "_pairs",
        "_received",
        "_senders",
        "_sent",
        "_tensors",
        "_used",
    )

    #: The tilings of each tensor, and who sends, where there are replicas.
    _ends: dict[str, tuple[Tiling, Tiling]]
    _senders: dict[str, npt.NDArray[np.int64] | None]
    _tensors: dict[str, tuple[tuple[int, ...], Any]]
    _labels: tuple[Any, ...]
    _made: dict[str, ReshardPlan]
    #: The pairs of tilings, each with the name of a tensor; for each tensor its pair, and the bits of an element.
    _pairs: list[tuple[str, Tiling, Tiling]]
    _used: npt.NDArray[np.int64]
    _bits: npt.NDArray[np.int64]
    _groups: list[Group] | None

    def __init__(self, src: Any, dst: Any, tensors: Mapping[str, Any], uneven: UnevenRule = "even") -> None:
        if not isinstance(tensors, Mapping):
            raise TypeError(f"tensors must map names to (shape, dtype), got {type(tensors).__name__}")
        self._ends, self._tensors, self._made, self._groups = {}, {}, {}, None
        ends = [_End("src", src, uneven), _End("dst", dst, uneven)]
        bits: dict[Any, int] = {}
        #: By the two tilings: the position in `pairs`. They are looked up by identity, so they are kept.
        sorts: dict[Any, int] = {}
        pairs: list[tuple[str, Tiling, Tiling]] = []
        used, sizes = [], []
        for name, tensor in tensors.items():
            shape, dtype = _described(name, tensor)
            before, after = ends[0].tiling(name, shape), ends[1].tiling(name, shape)
            key: Any = id(before), id(after)
            if not (before._is_named and after._is_named):
                key = (*key, name)
            if key not in sorts:
                check_packed(before, after)
                sorts[key] = len(pairs)
                pairs.append((name, before, after))
            if isinstance(dtype, list):
                dtype = dtype_of(dtype, f"the dtype of {shown(name)}")  # The fields of a structured one.
            if dtype not in bits:
                bits[dtype] = bits_of(dtype, f"the dtype of {shown(name)}")
            used.append(sorts[key])
            sizes.append(bits[dtype])
            self._ends[name] = before, after
            self._tensors[name] = shape, dtype
        # In bytes, or in bits if elements are packed into bytes.
        packed = any(size % 8 for size in sizes)
        weights = sizes if packed else [size // 8 for size in sizes]
        self._labels, *totals, senders = balanced(pairs, used, weights)
        self._pairs, self._used, self._bits = pairs, np.array(used, np.int64), np.array(sizes, np.int64)
        self._sent, self._received, self._kept = (bytes_for(total, 1) if packed else total for total in totals)
        self._senders = dict(zip(tensors, senders, strict=True))

    def __getitem__(self, name: str) -> ReshardPlan:
        plan = self._made.get(name)
        if plan is None:
            src, dst = self._ends[name]
            plan = self._made[name] = ReshardPlan(src, dst, self._senders[name])
        return plan

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[str]:
        return iter(self._ends)

    def bytes_sent(self) -> dict[Any, int]:
        """Give the bytes of all tensors that each holder sends, by label."""
        return dict(zip(self._labels, self._sent.tolist(), strict=True))

    def bytes_received(self) -> dict[Any, int]:
        """Give the bytes of all tensors that each holder receives, by label."""
        return dict(zip(self._labels, self._received.tolist(), strict=True))

    def bytes_kept(self) -> dict[Any, int]:
        """Give the bytes of all tensors that each holder already has, by label."""
        return dict(zip(self._labels, self._kept.tolist(), strict=True))

    def total_bytes(self) -> int:
        """Give the bytes that move in all."""
        return sum(self._sent.tolist())

    def descriptors(self, holder: Any) -> Descriptors:
        """Give what one holder sends, receives and copies, over all tensors, as arrays for a transport.

        They are made of the holder's own part only, and both sides of a transfer have equal rows: nobody has to send a
        plan to others. Tensors of equal shapes and layouts share their arithmetic.

        Args:
            holder: the label of the holder, in the source or in the destination.

        Raises:
            LayoutError: if there is no such holder; if a tensor has partial sums, or is cut within bytes; if holders
                have no labels.

        >>> from shardwise import DeviceMesh, TensorLayout
        >>> mesh = DeviceMesh((2,), ("x",))
        >>> rows, columns = TensorLayout(("x", None), mesh), TensorLayout((None, "x"), mesh)
        >>> plan = plan_model({"w": rows}, {"w": columns}, {"w": ((4, 6), "float32")})
        >>> part = plan.descriptors("cpu:1")
        >>> print(part.sends.dtype.names)
        ('peer', 'tensor', 'src_offset', 'dst_offset', 'bytes', 'count', 'src_stride', 'dst_stride')
        >>> part.sends.tolist(), part.copies.tolist()
        ([(0, 0, 0, 24, 12, 2, 24, 12)], [(1, 0, 12, 24, 12, 2, 24, 12)])
        """
        if holder not in self._labels:
            raise LayoutError(f"holder {shown(holder)} is not in src or dst of the plan")
        return descriptors_of(holder, self._labels, tuple(self._ends), self._grouped())

    def program(self, holder: Any, memory: int | None = None) -> ModelProgram:
        """Give what one holder has to do for all tensors: one list of messages to and from each of its peers.

        Args:
            holder: the label of the holder, in the source or in the destination.
            memory: the most bytes of a message, the same for all holders; without it, all that goes from one holder to
                another is one message.

        Raises:
            LayoutError: as for `descriptors`; if `memory` is below 1.

        >>> from shardwise import DeviceMesh, TensorLayout
        >>> mesh = DeviceMesh((2,), ("x",))
        >>> rows, columns = TensorLayout(("x", None), mesh), TensorLayout((None, "x"), mesh)
        >>> tensors = {name: ((4, 6), "float32") for name in "abc"}
        >>> plan = plan_model(dict.fromkeys(tensors, rows), dict.fromkeys(tensors, columns), tensors)
        >>> program = plan.program("cpu:1")
        >>> program.messages["sends"].tolist(), program.messages["bytes"].tolist()
        ([False, True], [72, 72])
        """
        return program_of(self.descriptors(holder), memory)

    def _grouped(self) -> list[Group]:
        """The tensors by the plans that they share."""
        if self._groups is None:
            numbers = {label: number for number, label in enumerate(self._labels)}
            groups: dict[tuple[int, bytes | None], list[int]] = {}
            for number, (sort, senders) in enumerate(zip(self._used.tolist(), self._senders.values(), strict=True)):
                key = sort, None if senders is None else senders.tobytes()
                groups.setdefault(key, []).append(number)
            found: list[Group] = []
            positions: dict[int, npt.NDArray[np.int64]] = {}
            for (sort, order), members in groups.items():
                name, src, dst = self._pairs[sort]
                ends = []
                for tiling in (src, dst):
                    if not tiling._is_named:
                        raise LayoutError(f"tensor {shown(name)}: its holders have no labels to send to")
                    # Many tilings have the mesh in common.
                    at = id(tiling.device_mesh) if isinstance(tiling, Partition) else id(tiling)
                    if at not in positions:
                        positions[at] = np.array([numbers[label] for label in tiling.holders], np.int64)
                    ends.append(positions[at])
                plan = ReshardPlan(src, dst, None if order is None else np.frombuffer(order, np.int64))
                chosen = np.array(members, np.int64)
                found.append(Group(plan, chosen, self._bits[chosen], *ends))
            self._groups = found
        return self._groups

    def run(
        self, src_shards: Mapping[str, Sequence[npt.NDArray[Any]] | ShardSource]
    ) -> dict[str, list[npt.NDArray[Any]]]:
        """Carry out all plans on numpy arrays in the memory of this process.

        Args:
            src_shards: for each tensor what `ReshardPlan.run` takes: one array per source holder, or a
                `ShardedArray`.

        Returns:
            For each tensor one array per destination holder.

        Raises:
            LayoutError: if a tensor is missing; see `ReshardPlan.run`.

        >>> from shardwise import DeviceMesh, TensorLayout
        >>> mesh = DeviceMesh((2,), ("x",))
        >>> cut, whole = TensorLayout(("x",), mesh), TensorLayout((None,), mesh)
        >>> plan = plan_model({"w": cut}, {"w": whole}, {"w": ((4,), "int8")})
        >>> plan.run({"w": [np.array([0, 1], "int8"), np.array([2, 3], "int8")]})["w"][1]
        array([0, 1, 2, 3], dtype=int8)
        """
        if missing := [name for name in self if name not in src_shards]:
            more = f", nor of {len(missing) - 1} other tensors" if len(missing) > 1 else ""
            raise LayoutError(f"src_shards has no shards of {shown(missing[0])}{more}")
        return {name: plan.run(src_shards[name]) for name, plan in self.items()}

    def _picture(self) -> Picture:
        with importing:
            from .drawn import loads_picture

        loads = {"sent": self.bytes_sent(), "received": self.bytes_received(), "kept": self.bytes_kept()}
        return loads_picture(f"a plan for {len(self):,} tensor{'s' * (len(self) != 1)}, bytes by holder", loads)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModelPlan):
            return NotImplemented
        # In order, since the order decides who sends what.
        return list(self._ends.items()) == list(other._ends.items()) and self._tensors == other._tensors

    def __hash__(self) -> int:
        return hash(tuple(self._ends.items()))

    def __repr__(self) -> str:
        src, dst = ({name: ends[side] for name, ends in self._ends.items()} for side in (0, 1))
        return f"plan_model({src!r}, {dst!r}, {self._tensors!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        src, dst = ({name: ends[side] for name, ends in self._ends.items()} for side in (0, 1))
        return plan_model, (src, dst, self._tensors)


def plan_model(src: Any, dst: Any, tensors: Mapping[str, Any], *, uneven: UnevenRule = "even") -> ModelPlan:
    """Plan how to go from one layout of a model to another, with the load balanced over all tensors.

    Args:
        src: who holds what now: a `LayoutMap`, a `Deployment`, or a mapping from names to layouts that have their mesh,
            partitions or other tilings.
        dst: who should hold what, given in the same way.
        tensors: the shape and the dtype of each tensor, by name: a pair, or anything that has them as attributes, such
            as what a checkpoint has.
        uneven: how layouts cut dims that do not divide, unless a rule of the map says so; see
            `TensorLayout.partition`.

    Raises:
        LayoutError: if a tensor has no layout, or its layout does not fit; see `plan_reshard`.

    Tensors of the same shape, between the same layouts, are planned only once.

    >>> from shardwise import DeviceMesh, LayoutMap, TensorLayout
    >>> mesh = DeviceMesh((2, 2), ("data", "model"))
    >>> rows, columns = LayoutMap(mesh), LayoutMap(mesh)
    >>> rows["kernel"], columns["kernel"] = ("model", None), (None, "model")
    >>> plan = plan_model(rows, columns, {f"{i}/kernel": ((4, 4), "bfloat16") for i in range(3)})
    >>> list(plan), len(plan["0/kernel"]), plan.bytes_received()["cpu:0"]
    (['0/kernel', '1/kernel', '2/kernel'], 4, 24)
    """
    return ModelPlan(src, dst, tensors, uneven)


def _described(name: str, tensor: Any) -> tuple[tuple[int, ...], Any]:
    """The shape and the dtype of a tensor."""
    try:
        shape, dtype = tensor if type(tensor) is tuple else (tensor.shape, tensor.dtype)
        return tuple(map(operator.index, shape)), dtype
    except (AttributeError, TypeError, ValueError):
        pass
    try:
        shape, dtype = tensor
        return tuple(map(operator.index, shape)), dtype
    except (TypeError, ValueError):
        raise TypeError(f"tensors[{shown(name)}] must be (shape, dtype), got {shown(tensor)}") from None


class _End:
    """The tilings that one side has for tensors: one object for tensors that are cut alike."""

    def __init__(self, side: str, layouts: Any, uneven: UnevenRule) -> None:
        self._side, self._layouts, self._uneven = side, layouts, uneven
        # A layout map or a deployment also has a default and uneven rules.
        self._placed = getattr(layouts, "_placed", None)
        self._known: dict[Any, Tiling] = {}

    def tiling(self, name: str, shape: tuple[int, ...]) -> Tiling:
        """Give the tiling of a tensor.

        Raises:
            LayoutError: if it has none, or a layout does not fit.
        """
        found, own = self._found(name, len(shape)) if self._placed is None else self._placed(name, len(shape))
        tiling = self._known.get((id(found), shape, own))
        if tiling is None:
            if found is None:
                raise LayoutError(f"{self._side} has no layout for {shown(name)}")
            tiling = self._known[id(found), shape, own] = self._made(found, name, shape, own or self._uneven)
        return tiling

    def _found(self, name: str, rank: int) -> tuple[Any, UnevenRule | None]:
        try:
            return self._layouts[name], None
        except KeyError:
            return None, None
        except TypeError:
            kind = type(self._layouts).__name__
            raise TypeError(f"{self._side} must be a LayoutMap, a Deployment or a mapping, got {kind}") from None

    def _made(self, given: Any, name: str, shape: tuple[int, ...], uneven: UnevenRule) -> Tiling:
        if isinstance(given, Tiling):
            if given.shape != shape:
                raise LayoutError(f"{self._side}[{shown(name)}] has shape {given.shape}, but the tensor has {shape}")
            return given
        if isinstance(given, TensorLayout):
            try:
                return given.partition(shape, uneven)
            except LayoutError as error:
                raise LayoutError(f"{self._side}[{shown(name)}]: {error}") from None
        kind = type(given).__name__
        raise TypeError(f"{self._side}[{shown(name)}] must be a TensorLayout or a Tiling, got {kind}")


def balanced(pairs: Sequence[tuple[str, Tiling, Tiling]], used: list[int], weights: list[int]) -> Any:
    """Choose who sends what of tensors in turn, so that of the replicas of a box the least busy one sends it.

    Args:
        pairs: the tilings between which tensors go, each with the name of a tensor.
        used: for each tensor the position of its pair.
        weights: for each tensor what an element counts.

    Returns:
        The labels of all holders; what each of them sends, receives and keeps; for each tensor the senders of its
        transfers, or `None` where there are no replicas.
    """
    labels, arguments = _participants(pairs)
    return labels, *balance_model(arguments, used, weights, len(labels))


def _participants(pairs: Sequence[tuple[str, Tiling, Tiling]]) -> tuple[tuple[Any, ...], list[Any]]:
    """The labels of all holders, and what `balance_model` takes: tilings, shared holders, numbers of labels."""
    numbers: dict[Hashable, int] = {}
    meshes: dict[int, npt.NDArray[np.int64]] = {}

    def ids(tiling: Tiling, name: str, side: str) -> npt.NDArray[np.int64]:
        if isinstance(tiling, Partition):
            key = id(tiling.device_mesh)
            if key not in meshes:
                meshes[key] = listed(tiling.holders)
            return meshes[key]
        # Holders without labels of their own exist in one tiling only.
        return listed(tiling.holders if tiling._is_named else [(name, side, label) for label in tiling.holders])

    def listed(labels: Sequence[Any]) -> npt.NDArray[np.int64]:
        return np.array([numbers.setdefault(label, len(numbers)) for label in labels], np.int64)

    arguments = [
        (src._core, dst._core, same_holders(src, dst), ids(src, name, "src"), ids(dst, name, "dst"))
        for name, src, dst in pairs
    ]
    return tuple(numbers), arguments
