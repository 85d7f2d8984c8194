"""A weight loader of SGLang: each rank reads its own slices of a checkpoint of any format. SGLang imports it itself.

A server with `--custom-weight-loader shardwise.interop.sglang.load` is told to take the weights of a checkpoint by
`engine.update_weights_from_tensor(request(PATH), load_format="shardwise.interop.sglang.load")`; what is sent is the
path. With `--load-format dummy` it reads nothing else. Each parameter is filled by the rules of its family, which were
compared with SGLang's own loaders; a model of which one would not be filled exactly is refused before anything is read.
SGLang calls such a loader after kernels may have rearranged weights: like its own `load_format="direct"` it is for
backends that leave them as they were loaded. Quantized models are not loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._text import shown
from ..errors import LayoutError
from ..store import open_checkpoint
from ._engine import RankRules, fill

__all__ = ["load", "request"]

_PATH, _RULES = "shardwise.checkpoint", "shardwise.rules"


def request(checkpoint: str, rules: str | None = None) -> list[tuple[str, Any]]:
    """Give what tells `load` which checkpoint to read: the `named_tensors` of `update_weights_from_tensor`.

    Args:
        checkpoint: its path or URL, which all ranks see.
        rules: the rules of the engine's parameters, where the type of the model does not say which.
    """
    import torch

    given = {_PATH: checkpoint} | ({} if rules is None else {_RULES: rules})
    return [(name, torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)) for name, text in given.items()]


def load(model: Any, named_tensors: Sequence[tuple[str, Any]]) -> None:
    """Fill the parameters of a model from the checkpoint that a `request` names.

    Raises:
        LayoutError: if it is no request; if a parameter would not be filled exactly.
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
