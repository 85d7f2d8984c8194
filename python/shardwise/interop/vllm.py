"""A load format of vLLM, which imports this module itself, and recordings of what vLLM's own loaders do.

With the load format each rank reads its own slices of a checkpoint of any format.

`vllm serve MODEL --load-format shardwise` loads what is in the folder of the model; with
`--model-loader-extra-config '{"checkpoint": "s3://bucket/step-900"}'` the weights of another checkpoint, of any format
that `open_checkpoint` opens, under the names of Hugging Face. `"rules"` names the rules, if several are for the type
of the model, or none. Each parameter is filled by the rules of its family, which were compared with vLLM's own loaders;
a model with a parameter that would not be filled exactly is refused before anything is read. Quantized models, and
experts that are placed whole (`--enable-expert-parallel`), are not loaded.

`record_ranks` makes vLLM's own model for each rank, on a CPU and without weights, and loads element numbers into it.
What vLLM rearranges after loading, for the kernels of a device, is not recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from .._text import shown
from ..deploy.recording import Recording
from ..errors import LayoutError
from ..store import RecordedModel, open_checkpoint
from ._engine import RankRules, fill
from ._recording import LoneGroup, check_sizes, check_total, folder_of, recorded_models, recorded_rank, refused_by

__all__ = ["record_models", "record_ranks", "register_load_format"]

#: The groups of vLLM's processes, in `vllm.distributed.parallel_state`.
_GROUPS = ("_WORLD", "_TP", "_PP", "_DP", "_EP", "_EPLB", "_DCP", "_PCP")


def register_load_format() -> None:
    """Make the load format `"shardwise"` known to vLLM, which calls this as the entry point of a plugin."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class ShardwiseModelLoader(BaseModelLoader):  # type: ignore[misc]
        """Reads what a rank holds, and no more."""

        def __init__(self, load_config: Any) -> None:
            super().__init__(load_config)
            given = dict(load_config.model_loader_extra_config or {})
            self._checkpoint, self._rules = given.pop("checkpoint", None), given.pop("rules", None)
            if given:
                raise LayoutError(
                    f"model_loader_extra_config has {shown(sorted(given))}; the load format 'shardwise' takes "
                    "'checkpoint' and 'rules'"
                )

        def download_model(self, model_config: Any) -> None:
            """Do nothing: the weights are read where they are."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            """Fill the parameters of a model."""
            from vllm.distributed import (
                get_pp_group,
                get_tensor_model_parallel_rank,
                get_tensor_model_parallel_world_size,
            )

            path = self._checkpoint or getattr(model_config, "model_weights", "") or model_config.model
            rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
            rules = RankRules.of("vllm", model_config.hf_config.to_dict(), rank, ranks, rules=self._rules)
            parameters = dict(model.named_parameters(remove_duplicate=False))
            with open_checkpoint(path) as checkpoint:
                fill(parameters, checkpoint, rules, has_all_layers=get_pp_group().world_size == 1)

    register_model_loader("shardwise")(ShardwiseModelLoader)


def record_ranks(
    config: Mapping[str, Any],
    tp: int = 1,
    *,
    pp: int = 1,
    expert_parallel: bool = False,
    tensors: Mapping[str, Any] | None = None,
    computed: Literal["refuse", "leave"] = "refuse",
) -> list[Recording]:
    """Find what each rank of vLLM holds of a model, by loading element numbers through its own `load_weights`.

    Args:
        config: the contents of the model's `config.json`, with `architectures`; for a large model, with smaller sizes.
        tp: the number of ranks of tensor parallelism.
        pp: the number of stages.
        expert_parallel: whether each rank has whole experts, as with `--enable-expert-parallel`.
        tensors: the shape and dtype of each tensor of the checkpoint; by default those that transformers writes.
        computed: what to do with parameters that are computed; see `shardwise.record`.

    Returns:
        The recording of each rank, `pp * tp` of them, labelled from 0 on, stage by stage.

    Raises:
        LayoutError: if vLLM cannot make or load such a model, or computes values; if it is too large to be loaded
            several times; if this process is one of vLLM's own.
    """
    check_sizes(tp=tp, pp=pp)
    if tensors is None:
        from .transformers import written_tensors

        tensors = written_tensors(config)
    check_total(tensors)
    found = []
    with folder_of(config) as folder:
        for rank in range(tp * pp):
            stage, own = divmod(rank, tp)
            groups = {"_WORLD": LoneGroup(rank, tp * pp), "_TP": LoneGroup(own, tp), "_PP": LoneGroup(stage, pp)}
            if expert_parallel:
                groups["_EP"] = groups["_EPLB"] = LoneGroup(own, tp)
            with refused_by("vLLM", f"tp {tp}, pp {pp}"), _placed(groups):
                make = partial(_model, folder, rank, (tp, pp, expert_parallel))
                found.append(recorded_rank(tensors, make, rank, computed))
    return found


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
    return recorded_models(config, record_ranks, counts, stages)


@contextmanager
def _placed(groups: Mapping[str, LoneGroup]) -> Iterator[None]:
    """Be the rank of these groups, and alone in all others."""
    from vllm.distributed import parallel_state

    if parallel_state._WORLD is not None:
        raise LayoutError("this process is one of vLLM's own; record in a process of its own")
    try:
        for name in _GROUPS:
            setattr(parallel_state, name, groups.get(name, LoneGroup(0, 1)))
        yield
    finally:
        for name in _GROUPS:
            setattr(parallel_state, name, None)


def _model(folder: str, rank: int, sizes: tuple[int, int, bool]) -> Any:
    """Return vLLM's model of the rank that this process is."""
    from vllm.model_executor.model_loader.utils import initialize_model

    # A configuration is used once: attention layers register in it by their names.
    return initialize_model(_settings(folder, rank, sizes))


def _settings(folder: str, rank: int, sizes: tuple[int, int, bool]) -> Any:
    """Return vLLM's settings of a rank for the `config.json` of a folder, in float32 on a CPU."""
    from vllm.config import DeviceConfig, LoadConfig, ModelConfig, ParallelConfig, VllmConfig

    tp, pp, expert_parallel = sizes
    return VllmConfig(
        model_config=ModelConfig(
            model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="float32", enforce_eager=True
        ),
        parallel_config=ParallelConfig(
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            enable_expert_parallel=expert_parallel,
            distributed_executor_backend="mp",
            rank=rank,
        ),
        load_config=LoadConfig(load_format="dummy"),
        device_config=DeviceConfig("cpu"),
    )
