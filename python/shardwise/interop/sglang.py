"""A weight loader of SGLang, which imports this module itself, and recordings of what SGLang's own loaders do.

With the weight loader each rank reads its own slices of a checkpoint of any format. A server with
`--custom-weight-loader shardwise.interop.sglang.load` is told to take the weights of a checkpoint by
`engine.update_weights_from_tensor(request(PATH), load_format="shardwise.interop.sglang.load")`; what is sent is the
path. With `--load-format dummy` the server reads nothing else. Each parameter is filled by the rules of its family,
which were compared with SGLang's own loaders; a model with a parameter that would not be filled exactly is refused
before anything is read. SGLang calls such a loader after kernels may have rearranged weights: like SGLang's own
`load_format="direct"`, this loader is for backends that leave weights as they were loaded. Quantized models are not
loaded.

`record_ranks` makes SGLang's own model for each rank, on a CPU and without weights, and loads element numbers into it.
What SGLang rearranges after loading, for the kernels of a device, is not recorded; neither is the stacking of shared
experts after the routed ones on CUDA.
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

__all__ = ["load", "record_models", "record_ranks", "request"]

_PATH, _RULES = "shardwise.checkpoint", "shardwise.rules"


def request(checkpoint: str, rules: str | None = None) -> list[tuple[str, Any]]:
    """Return a request for `load` to read a checkpoint: the `named_tensors` of `update_weights_from_tensor`.

    Args:
        checkpoint: the checkpoint's path or URL, which all ranks see.
        rules: the rules of the engine's parameters, needed if several are for the type of the model, or none.
    """
    import torch

    given = {_PATH: checkpoint} | ({} if rules is None else {_RULES: rules})
    return [(name, torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)) for name, text in given.items()]


def load(model: Any, named_tensors: Sequence[tuple[str, Any]]) -> None:
    """Fill the parameters of a model from the checkpoint that a `request` names.

    Raises:
        LayoutError: if `named_tensors` are not a request; if a parameter would not be filled exactly.
    """
    from sglang.srt.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    given = {name: bytes(tensor.cpu().tolist()).decode() for name, tensor in named_tensors if name in (_PATH, _RULES)}
    others = [name for name, _ in named_tensors if name not in given]
    if _PATH not in given or others:
        raise LayoutError(
            f"named_tensors has {shown([name for name, _ in named_tensors])}; "
            "shardwise.interop.sglang.request(PATH) makes what this loader takes"
        )
    rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    rules = RankRules.of("sglang", model.config.to_dict(), rank, ranks, rules=given.get(_RULES))
    with open_checkpoint(given[_PATH]) as checkpoint:
        fill(dict(model.named_parameters(remove_duplicate=False)), checkpoint, rules)


def record_ranks(
    config: Mapping[str, Any],
    tp: int = 1,
    *,
    pp: int = 1,
    ep: int = 1,
    tensors: Mapping[str, Any] | None = None,
    computed: Literal["refuse", "leave"] = "refuse",
) -> list[Recording]:
    """Find what each rank of SGLang holds of a model, by loading element numbers through its own `load_weights`.

    Args:
        config: the contents of the model's `config.json`, with `architectures`; for a large model, with smaller sizes.
        tp: the number of ranks of tensor parallelism.
        pp: the number of stages.
        ep: the number of ranks of expert parallelism, which divides `tp`.
        tensors: the shape and dtype of each tensor of the checkpoint; by default those that transformers writes.
        computed: what to do with parameters that are computed; see `shardwise.record`.

    Returns:
        The recording of each rank, `pp * tp` of them, labelled from 0 on, stage by stage.

    Raises:
        LayoutError: if SGLang cannot make or load such a model, or computes values; if it is too large to be loaded
            several times; if this process is one of SGLang's own.
    """
    check_sizes(tp=tp, pp=pp, ep=ep)
    if tp % ep:
        raise LayoutError(f"ep is {ep}, which does not divide tp, {tp}")
    if tensors is None:
        from .transformers import written_tensors

        tensors = written_tensors(config)
    check_total(tensors)
    found = []
    with folder_of(config) as folder:
        for rank in range(tp * pp):
            with refused_by("SGLang", f"tp {tp}, pp {pp}, ep {ep}"), _placed(folder, rank, (tp, pp, ep)):
                found.append(recorded_rank(tensors, partial(_model, folder), rank, computed))
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
def _placed(folder: str, rank: int, sizes: tuple[int, int, int]) -> Iterator[None]:
    """Be this rank, stage by stage."""
    from sglang.srt import runtime_context
    from sglang.srt.server_args import ServerArgs

    context, parallel = runtime_context.get_context(), runtime_context.get_parallel()
    try:
        is_running = parallel.tp_group is not None
    except (RuntimeError, ValueError):
        is_running = False
    if is_running:
        raise LayoutError("this process is one of SGLang's own; record in a process of its own")
    tp, pp, ep = sizes
    stage, own = divmod(rank, tp)
    cut = {
        **dict.fromkeys(("tp", "attn_tp", "shared_experts_tp"), (own, tp)),
        "pp": (stage, pp),
        "moe_ep": (own // (tp // ep), ep),
        "moe_tp": (own % (tp // ep), tp // ep),
        **dict.fromkeys(("attn_cp", "attn_dp", "attn_dcp", "moe_dp", "dcp", "dp"), (0, 1)),
    }
    values: dict[str, Any] = {"ep_size": ep, "world_group": LoneGroup(rank, tp * pp), "attn_dp_enabled": False}
    for name, (at, size) in cut.items():
        values |= {f"{name}_rank": at, f"{name}_size": size, f"{name}_group": LoneGroup(at, size)}
    known = runtime_context._parallel_fields()
    try:
        context.set_server_args(ServerArgs(model_path=folder, device="cpu", tp_size=tp, pp_size=pp, ep_size=ep))
        context.override("shardwise", boundary_reduction="ar")  # A server resolves it on its devices; no layout.
        with parallel.override(**{name: value for name, value in values.items() if name in known}):
            yield
    finally:
        runtime_context.reset_context()


def _model(folder: str) -> Any:
    """Return SGLang's model of the rank that this process is."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.loader import _initialize_model

    return _initialize_model(ModelConfig(folder, dtype="float32"), LoadConfig())
