"""The plans of all tensors of a model, with the load balanced over all of them."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..._arguments import instance, optional
from ..._drawn import Drawn
from ..._dtypes import bytes_for
from ..._fork import importing
from ..._text import bytes_text, counted, shown
from ...errors import LayoutError, ShardwiseWarning
from ...layout import UnevenRule
from ...rules.rewrites import Rewrites
from ..balance import balanced
from ..explain import explain_model
from ..plan import ReshardPlan
from ..source import ShardSource
from .descriptors import Descriptors
from .groups import GroupedTensors, grouped
from .program import ModelProgram, program_of
from .rows import descriptors_of
from .sides import ModelChange, tilings_of_both, worlds
from .tensors import ModelTensors, model_tensors

if TYPE_CHECKING:
    import numpy.typing as npt

    from ...show.picture import Picture

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
    >>> plan
    <ModelPlan of 80 tensors, 6 devices: 5.0 KiB move>
    """

    __slots__ = (
        "__weakref__",
        "_devices",
        "_grouped",
        "_kept",
        "_model",
        "_nodes",
        "_plans",
        "_received",
        "_senders",
        "_sent",
    )

    #: The tensors, with their tilings, and the senders of their transfers if they have replicas.
    _model: ModelTensors
    _senders: dict[str, npt.NDArray[np.int64] | None]
    #: The node of each holder, if links between nodes count.
    _nodes: dict[Any, Hashable] | None
    _devices: tuple[Any, ...]
    #: The plans and groups that have been asked for.
    _plans: dict[str, ReshardPlan]
    _grouped: GroupedTensors | None

    def __init__(self, change: ModelChange, devices: tuple[Any, ...] = ()) -> None:
        nodes = change.nodes
        optional("nodes", nodes, Mapping)  # type: ignore[type-abstract]
        self._nodes = None if nodes is None else dict(nodes)
        self._plans, self._grouped = {}, None
        self._model = model = model_tensors(change._replace(nodes=self._nodes))
        # In bytes, or in bits if elements are packed into bytes.
        packed = (model.bits % 8).any()
        weights = model.bits if packed else model.bits // 8
        labels, *totals, senders = balanced(model.pairs, model.used.tolist(), weights.tolist(), self._nodes)
        self._devices = tuple(dict.fromkeys((*devices, *worlds((change.src, change.dst), model.pairs), *labels)))
        number_of = {label: number for number, label in enumerate(self._devices)}
        at = [number_of[label] for label in labels]
        self._sent, self._received, self._kept = (np.zeros(len(self._devices), total.dtype) for total in totals)
        for mine, total in zip((self._sent, self._received, self._kept), totals, strict=True):
            mine[at] = bytes_for(total, 1) if packed else total
        self._senders = dict(zip(model.tensors, senders, strict=True))

    def __getitem__(self, name: str) -> ReshardPlan:
        plan = self._plans.get(name)
        if plan is None:
            src, dst = self._model.ends[name]
            plan = self._plans[name] = ReshardPlan(src, dst, self._senders[name])
        return plan

    def __len__(self) -> int:
        return len(self._model.ends)

    def __iter__(self) -> Iterator[str]:
        return iter(self._model.ends)

    @property
    def devices(self) -> tuple[Any, ...]:
        """The labels of all devices, each once: first those of the source, in the order of its world.

        Those that hold nothing are there too, so process number `rank` is `devices[rank]`. The world is that of a
        deployment, or the mesh of a layout map; other mappings have the holders of their tensors, in that order.

        >>> from shardwise import DeviceMesh, LayoutMap
        >>> from shardwise.deploy import Deployment, DeploymentRule
        >>> stages = {"embed": DeploymentRule((None,), at={"pp": 0}), "head": DeploymentRule((None,), at={"pp": 1})}
        >>> trainer = Deployment(["a", "b"], DeviceMesh((2,), ("pp",)), stages)
        >>> engine = LayoutMap(DeviceMesh((1,), ("x",), ["c"]), default="replicated")
        >>> plan_model(trainer, engine, {"head": ((4,), "int8"), "embed": ((4,), "int8")}).devices
        ('a', 'b', 'c')
        """
        return self._devices

    def bytes_sent(self) -> dict[Any, int]:
        """Return the bytes of all tensors that each device sends, by label, in the order of `devices`."""
        return dict(zip(self._devices, self._sent.tolist(), strict=True))

    def bytes_received(self) -> dict[Any, int]:
        """Return the bytes of all tensors that each device receives, by label, in the order of `devices`."""
        return dict(zip(self._devices, self._received.tolist(), strict=True))

    def bytes_kept(self) -> dict[Any, int]:
        """Return the bytes of all tensors that each device already has, by label, in the order of `devices`."""
        return dict(zip(self._devices, self._kept.tolist(), strict=True))

    def total_bytes(self) -> int:
        """Return the bytes that move in all."""
        return sum(self._sent.tolist())

    def descriptors(self, holder: Any) -> Descriptors:
        """Return the bytes that one holder sends, receives and copies, over all tensors, as arrays for a transport.

        They are made of the holder's own part only, and both sides of a transfer have equal rows: no process has to
        send a plan to others. For tensors of equal shapes and layouts they are computed once.

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
        ('peer', 'src_tensor', 'dst_tensor', 'src_offset', 'dst_offset', 'bytes', 'count', 'src_stride', 'dst_stride')
        >>> part.sends.tolist(), part.copies.tolist()
        ([(0, 0, 0, 0, 24, 12, 2, 24, 12)], [(1, 0, 0, 12, 24, 12, 2, 24, 12)])
        """
        model = self._groups(holder)
        for group in model.groups:
            if group.plan.addends > 1:
                raise LayoutError(
                    f"tensor {shown(model.names[int(group.tensors[0])])} has partial sums to be added, which "
                    "descriptors cannot express; program(holder) can"
                )
        return descriptors_of(holder, model)

    def explain(self) -> str:
        """Describe the plan in a few lines: what moves, what stays, and the busiest devices.

        >>> from shardwise import DeviceMesh, TensorLayout
        >>> old, new = DeviceMesh((2,), ("x",)), DeviceMesh((1,), ("x",), ["gpu:0"])
        >>> cut, whole = TensorLayout(("x", None), old), TensorLayout((None, None), new)
        >>> tensors = {f"h.{i}": ((64, 16), "float32") for i in range(4)}
        >>> print(plan_model(dict.fromkeys(tensors, cut), dict.fromkeys(tensors, whole), tensors).explain())
        4 tensors, 16.0 KiB, go from 2 devices to 1.
        8 boxes move, 16.0 KiB in all.
        The busiest device sends 8.0 KiB ('cpu:0'); the busiest receives 16.0 KiB ('gpu:0').
        """
        model = self._model
        counts = np.bincount(model.used, minlength=len(model.pairs)).tolist()
        boxes = sum(count * len(ReshardPlan(*pair[1:])) for pair, count in zip(model.pairs, counts, strict=True))
        sizes = [tiling.size for _, _, tiling in model.pairs]
        bits = sum(sizes[used] * bits for used, bits in zip(model.used.tolist(), model.bits.tolist(), strict=True))
        senders, receivers = (
            len({label for tiling in side for label in tiling.holders}) for side in tilings_of_both(model.pairs)
        )
        return explain_model(self, bits, senders, receivers, boxes, bool(model.sources))

    def program(self, holder: Any, memory: int | None = None) -> ModelProgram:
        """Return the messages of one holder for all tensors: one list for each of its peers, in an order to run.

        Args:
            holder: the label of the holder, in the source or in the destination.
            memory: the most bytes of a message, the same for all holders; without it, all that goes from one holder to
                another is one message.

        Raises:
            LayoutError: if there is no such holder; if a tensor is cut within bytes; if holders have no labels; if
                `memory` is below 1, or below an element with partial sums.

        Partial sums are added: `ModelProgram.sums` has them.

        >>> from shardwise import DeviceMesh, TensorLayout
        >>> mesh = DeviceMesh((2,), ("x",))
        >>> rows, columns = TensorLayout(("x", None), mesh), TensorLayout((None, "x"), mesh)
        >>> tensors = {name: ((4, 6), "float32") for name in "abc"}
        >>> plan = plan_model(dict.fromkeys(tensors, rows), dict.fromkeys(tensors, columns), tensors)
        >>> program = plan.program("cpu:1")
        >>> program.messages["sends"].tolist(), program.messages["bytes"].tolist()
        ([False, True], [72, 72])
        """
        return program_of(holder, self._groups(holder), memory)

    def _groups(self, holder: Any) -> GroupedTensors:
        """Return the tensors grouped by shared plan; refuse a holder that does not exist."""
        if holder not in self._devices:
            raise LayoutError(
                f"holder {shown(holder)} is not in src or dst of the plan; its devices are {shown(list(self._devices))}"
            )
        if self._grouped is None:
            self._grouped = grouped(self._model, self._senders, self._devices)
        return self._grouped

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
        instance("src_shards", src_shards, Mapping)  # type: ignore[type-abstract]
        model = self._model
        if missing := [name for name in model.before or self if name not in src_shards]:
            more = f", nor of {counted(len(missing) - 1, 'other tensor')}" if len(missing) > 1 else ""
            raise LayoutError(f"src_shards has no shards of {shown(missing[0])}{more}")
        if model.sources:
            with importing:
                from .converted import run_rewritten

            after = {name: tiling for name, (_, tiling) in model.ends.items()}
            dtype_from = {name: made_of[0] for name, made_of in model.sources.items()}
            return run_rewritten(src_shards, model.before, after, dtype_from, self.descriptors)
        return {name: plan.run(src_shards[name]) for name, plan in self.items()}

    def _picture(self) -> Picture:
        with importing:
            from ..drawn import loads_picture

        loads = {"sent": self.bytes_sent(), "received": self.bytes_received(), "kept": self.bytes_kept()}
        return loads_picture(f"a plan for {counted(len(self), 'tensor')}, bytes by holder", loads)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModelPlan):
            return NotImplemented
        # In order, since the order decides who sends what.
        mine, others = (
            (list(one.ends.items()), one.tensors, one.sources, one.before) for one in (self._model, other._model)
        )
        return mine == others and self._nodes == other._nodes

    def __hash__(self) -> int:
        return hash(tuple(self._model.ends.items()))

    def __repr__(self) -> str:
        sizes = f"{counted(len(self), 'tensor')}, {counted(len(self._devices), 'device')}"
        return f"<ModelPlan of {sizes}: {bytes_text(self.total_bytes())} move>"

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelPlan, (self._model.as_change(self._nodes), self._devices)


def plan_model(
    src: Any,
    dst: Any,
    tensors: Mapping[str, Any],
    *,
    uneven: UnevenRule = "even",
    rewrites: Rewrites | None = None,
    source_rewrites: Rewrites | None = None,
    config: Mapping[str, Any] | None = None,
    nodes: Mapping[Any, Hashable] | None = None,
) -> ModelPlan:
    """Plan how to go from one layout of a model to another, with the load balanced over all tensors.

    Args:
        src: the layouts now: a `LayoutMap`, a `Deployment`, or a mapping from names to layouts that have their mesh,
            partitions or other tilings.
        dst: the layouts afterwards, given in the same way.
        tensors: the shape and the dtype of each tensor, by name: a pair, or anything that has them as attributes, such
            as the tensors of a checkpoint.
        uneven: how layouts cut dims that do not divide, unless a rule of the map says so; see
            `TensorLayout.partition`.
        rewrites: how `dst` names and stores the tensors: fused, stacked, padded, transposed, in another order; by
            default as `tensors` has them.
        source_rewrites: how `src` names and stores them. If `tensors` are those of a checkpoint from which both sides
            were made, each side has its own rewrites.
        config: the contents of the model's `config.json`. If it states a quantization, scales and other components
            follow the rules and the rewrites for their weights. By default all tensors have rules of their own.
        nodes: the node of each holder of either side, by label. Then the links between nodes are balanced too. Among
            replicas that have sent nearly equal bytes, one on the receiver's node sends, else the one whose node has
            sent the fewest bytes to that node.

    Raises:
        LayoutError: if a tensor has no layout, or its layout does not fit; see `plan_reshard`. If a holder has no node.
            If a rewrite matches nothing or does not fit, as in `reshard_checkpoint`.
        ParseError: if `config` states a quantization that is not known, or that the tensors contradict; if rules for
            certain types of models would cut integers, and `config` does not say how these are quantized.
        TypeError: if elements of fewer than eight bits are rewritten.

    Warns:
        ShardwiseWarning: if rules for certain types of models cut floats of 8 bits, and `config` does not say that
            these were only cast.

    Tensors of the same shape, between the same layouts, are planned only once.

    >>> from shardwise import DeviceMesh, LayoutMap, TensorLayout
    >>> mesh = DeviceMesh((2, 2), ("data", "model"))
    >>> rows, columns = LayoutMap(mesh), LayoutMap(mesh)
    >>> rows["kernel"], columns["kernel"] = ("model", None), (None, "model")
    >>> plan = plan_model(rows, columns, {f"{i}/kernel": ((4, 4), "bfloat16") for i in range(3)})
    >>> list(plan), len(plan["0/kernel"]), plan.bytes_received()["cpu:0"]
    (['0/kernel', '1/kernel', '2/kernel'], 4, 24)

    A trainer with fused queries, keys and values, and an engine that has them separate:

    >>> from shardwise import Rewrites
    >>> fused = Rewrites([{"from": "{q,k,v}", "to": {"name": "qkv", "packed": "(2 [q:2 k:1 v:1])"}}])
    >>> trainer = {"qkv": TensorLayout((("data", "model"),), mesh)}
    >>> engine = dict.fromkeys("qkv", TensorLayout((None,), DeviceMesh((1,), ("tp",), ["gpu"])))
    >>> plan = plan_model(trainer, engine, {"q": ((4,), "int8"), "k": ((2,), "int8"), "v": ((2,), "int8")},
    ...                   source_rewrites=fused)
    >>> {name: one[0].tolist() for name, one in plan.run({"qkv": np.arange(8, dtype="int8").reshape(4, 2)}).items()}
    {'q': [0, 1, 4, 5], 'k': [2, 6], 'v': [3, 7]}
    """
    made = ModelPlan(ModelChange(src, dst, tensors, uneven, rewrites, source_rewrites, config, nodes))
    for each in dict.fromkeys(map(str, made._model.left_out)):
        warnings.warn(each, ShardwiseWarning, stacklevel=2)
    return made
