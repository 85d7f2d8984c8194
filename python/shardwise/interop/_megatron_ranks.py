"""Recordings of what Megatron-Bridge puts into the models of Megatron-Core, on each rank.

Megatron-Bridge makes its own model of each rank, on a CPU and without weights, and its `load_weights_hf_to_megatron`
loads element numbers into it: the functions of its mappings split and fuse. What ranks send each other meanwhile is
handed on here: the rank that sends is run first, with the same numbers. There is one process, and no communication.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from fnmatch import fnmatch
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..errors import LayoutError
from ._recording import check_sizes, check_total, folder_of, recorded_models, refused_by

if TYPE_CHECKING:
    from ..deploy.recording import Recording
    from ..store import RecordedModel

__all__ = ["record_models", "record_ranks"]


class _MegatronSizes(NamedTuple):
    """The sizes of a run, the ranks of which there are `world`."""

    tp: int
    pp: int
    ep: int
    etp: int
    rows: int | None

    @property
    def world(self) -> int:
        return math.lcm(self.tp, self.etp * self.ep) * self.pp


class _UnsentError(Exception):
    """A rank needs what another one sends, which was not run."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} did not send")
        self.rank = rank


class _Mail:
    """The values that ranks send, by the group to which they send them, in order."""

    def __init__(self) -> None:
        self._sent: defaultdict[tuple[int, ...], list[Any]] = defaultdict(list)
        self.taken: Counter[tuple[int, ...]] = Counter()

    def passed(self, own: Any, src: int | None, group: Any) -> Any:
        """Send a value if this rank is the sender, and return the value that was sent."""
        import torch.distributed as dist

        ranks = tuple(dist.get_process_group_ranks(group))
        sender = ranks[0] if src is None else src
        if dist.get_rank() == sender:
            self._sent[ranks].append(own)
        at = self.taken[ranks]
        if at >= len(self._sent[ranks]):
            raise _UnsentError(sender)
        self.taken[ranks] += 1
        return self._sent[ranks][at]

    def scatter(self, output: Any, parts: Any = None, src: int | None = None, group: Any = None, **_: Any) -> None:
        """Do as `torch.distributed.scatter`."""
        import torch.distributed as dist

        output.copy_(self.passed(parts, src, group)[dist.get_rank(group)])

    def broadcast(self, tensor: Any, src: int | None = None, group: Any = None, **_: Any) -> None:
        """Do as `torch.distributed.broadcast`."""
        tensor.copy_(self.passed(tensor, src, group))


class _GivenTensors(Mapping[str, Any]):
    """Numbered tensors as Megatron-Bridge takes those of a checkpoint."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given
        self.source = SimpleNamespace(
            get_all_keys=lambda: list(given), has_glob=lambda pattern: any(fnmatch(name, pattern) for name in given)
        )

    def __getitem__(self, name: str) -> Any:
        return self._given[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)


def record_ranks(
    config: Mapping[str, Any],
    tp: int = 1,
    *,
    pp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    vocabulary_rows: int | None = None,
    tensors: Mapping[str, Any] | None = None,
    computed: Literal["refuse", "leave"] = "refuse",
) -> list[Recording]:
    """Find what each rank of Megatron-Core holds of a model, by loading element numbers through Megatron-Bridge.

    Args:
        config: the contents of the model's `config.json`, with `architectures`; for a large model, with smaller sizes.
        tp: the number of ranks of tensor parallelism.
        pp: the number of stages.
        ep: the number of ranks of expert parallelism.
        etp: the number of ranks of tensor parallelism of experts; that of dense layers by default.
        vocabulary_rows: if given, the vocabulary is padded so that each rank has a multiple of this many rows; 128 in
            Megatron-LM. Megatron-Bridge 0.5 and later fill such a vocabulary, with `tp` of 2 or more.
        tensors: the shape and dtype of each tensor of the checkpoint; by default those that transformers writes.
        computed: what to do with parameters that are computed; see `shardwise.record`.

    Returns:
        The recording of each rank, labelled from 0 on, in the order "tp-cp-ep-dp-pp".

    Raises:
        LayoutError: if Megatron-Bridge cannot make or load such a model, or computes values; if the model is too large
            to be loaded several times; if this process is in a process group.

    Layers and experts have the names that they have in the whole model: a rank's own model counts both from 0.
    """
    etp = tp if etp is None else etp
    check_sizes(tp=tp, pp=pp, ep=ep, etp=etp, vocabulary_rows=1 if vocabulary_rows is None else vocabulary_rows)
    sizes = _MegatronSizes(tp, pp, ep, etp, vocabulary_rows)
    if tensors is None:
        from .transformers import written_tensors

        tensors = written_tensors(config)
    check_total(tensors)
    from .torch import record

    what = f"tp {tp}, pp {pp}, ep {ep}, etp {etp}"
    with folder_of(config) as folder, refused_by("Megatron-Bridge", what), redirect_stdout(sys.stderr), _on_a_cpu():
        return [record(tensors, _loader(folder, rank, sizes), rank, computed=computed) for rank in range(sizes.world)]


def record_models(
    config: Mapping[str, Any], counts: Sequence[int] = (1, 2, 4), stages: Sequence[int] = ()
) -> list[RecordedModel]:
    """Record three small models of a family, from which `shardwise.store.learn_rules` makes rules for all sizes.

    Args:
        config: the contents of a `config.json`, whose sizes are replaced by small ones that differ from each other.
        counts: the numbers of ranks of tensor parallelism.
        stages: the numbers of stages, if there are to be any; the keys are then `(stages, ranks)`, with two ranks each.

    Raises:
        LayoutError: as `record_ranks`.
    """
    # Each stage has as many layers.
    each = math.lcm(*stages) if stages else 1
    return recorded_models(config, record_ranks, counts, stages, [each * of for of in (1, 2, 3)] if stages else None)


def _loader(folder: str, rank: int, sizes: _MegatronSizes) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return a function that loads tensors as a rank does, after the ranks that send to it."""
    order = [rank]

    def load(given: Mapping[str, Any]) -> dict[str, Any]:
        while True:
            mail, loaded = _Mail(), {}
            try:
                for one in order:
                    mail.taken.clear()
                    loaded = _loaded(folder, one, sizes, given, mail)
            except _UnsentError as missing:
                if missing.rank in order:
                    raise
                order.insert(order.index(one), missing.rank)
            else:
                return loaded

    return load


def _loaded(folder: str, rank: int, sizes: _MegatronSizes, given: Mapping[str, Any], mail: _Mail) -> dict[str, Any]:
    """Return the parameters of a rank that Megatron-Bridge has loaded."""
    import torch
    import transformers
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.conversion.model_bridge import _megatron_local_name_to_global
    from megatron.bridge.models.conversion.utils import persistent_buffers
    from megatron.core.process_groups_config import ProcessGroupCollection

    with _placed(rank, sizes, mail):
        config = transformers.AutoConfig.from_pretrained(folder)
        made = AutoBridge.from_hf_config(config)
        provider = made.to_megatron_provider(load_weights=False)
        settings = {
            "tensor_model_parallel_size": sizes.tp,
            "pipeline_model_parallel_size": sizes.pp,
            "expert_model_parallel_size": sizes.ep,
            "expert_tensor_parallel_size": sizes.etp,
            "use_cpu_initialization": True,
            "perform_initialization": False,
            "gradient_accumulation_fusion": False,
            "params_dtype": torch.float32,
            "pipeline_dtype": torch.float32,
            "bf16": False,
            "fp16": False,
            "_pg_collection": ProcessGroupCollection.use_mpu_process_groups(),
        }
        if sizes.rows is not None:
            settings |= {"should_pad_vocab": True, "make_vocab_size_divisible_by": sizes.rows}
        for name, value in settings.items():
            setattr(provider, name, value)
        provider.finalize()
        model = provider.provide()
        held = dict(itertools.chain(model.named_parameters(), persistent_buffers(model)))
        with torch.no_grad():
            for value in held.values():  # What no tensor fills is zero each time.
                value.data = torch.zeros_like(value, dtype=torch.float32 if value.is_floating_point() else None)
            source = SimpleNamespace(config=config, state=_GivenTensors(given), model_name_or_path=folder)
            bridge = made._model_bridge
            bridge._with_progress_tracking = lambda tasks, *_, **__: tasks
            bridge.load_weights_hf_to_megatron(source, [model])
        # The state of quantization is no parameter.
        names = [name for name in held if "_extra_state" not in name]
        return {_megatron_local_name_to_global([model], model.config, name, 0): held[name] for name in names}


@contextmanager
def _placed(rank: int, sizes: _MegatronSizes, mail: _Mail) -> Iterator[None]:
    """Be this rank, in groups that hand on by `mail`."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise LayoutError("this process is in a process group; record in a process of its own")
    dist.init_process_group("fake", rank=rank, world_size=sizes.world, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tp,
            pipeline_model_parallel_size=sizes.pp,
            expert_model_parallel_size=sizes.ep,
            expert_tensor_parallel_size=sizes.etp,
            create_gloo_process_groups=False,
        )

        def of_all(found: list[Any], own: Any, **_: Any) -> None:
            found[:] = [own] * len(found)  # The names of other stages: nothing of them is loaded here.

        with ExitStack() as stack:
            for name, function in (
                ("scatter", mail.scatter),
                ("broadcast", mail.broadcast),
                ("all_gather_object", of_all),
            ):
                stack.enter_context(_replaced(dist, name, function))
            yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@contextmanager
def _on_a_cpu() -> Iterator[None]:
    """Make on the CPU what Megatron-Core makes on the current device, and take no random numbers."""
    import torch
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    class OnTheCpu(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if str(kwargs.get("device")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return function(*args, **kwargs)

    with ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(_replaced(torch.cuda, "current_device", lambda: "cpu"))
            stack.enter_context(_replaced(torch.Tensor, "cuda", lambda own, *_, **__: own))
            stack.enter_context(OnTheCpu())
        stack.enter_context(_replaced(CudaRNGStatesTracker, "fork", lambda *_: nullcontext()))
        # Each process group that PyTorch makes has it say the rank.
        stack.enter_context(_replaced(sys, "excepthook", sys.excepthook))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
